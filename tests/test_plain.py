"""`make plain`: Part I of qwen3.c alone gives the bytes of the fast program: chat, lists, perplexities, embeddings,
given answers; with and without fma; also where weights, sums and logits are not finite."""
import functools
import random
import re
import subprocess

import deltas
import numpy as np
import pytest
from conftest import QWEN3, ROOT, TESTS, build, copy_model, environment, export, export_py, hurting_list
from test_tokenizer import KINDS, make_text

SHAPES = {"Qwen3": dict(n_layers=3), "Qwen2": dict(qwen2=True, head_dim=16), "untied": dict(tied=False, seed=3),
          "experts": dict(n_experts=8, hidden_dim=64, n_experts_used=3, seed=4),
          "groups of 32": dict(dim=96, hidden_dim=160, n_heads=6, head_dim=16, seed=5)}
# 299 tokens: more than one span of attention
LONG = " ".join(f"Line {i}: the {i % 7} keepers of {i * i} lighthouses sang." for i in range(10))
TEXTS = ["Once upon a time", "What is the capital of France?", "zebra", "a common beginning of all",
         "a common beginning of allz", LONG[:150], LONG[:150] + "z"]
LIST = "".join(text + "\n" for text in TEXTS).encode()
RUNS = [
    (["-i", LONG, "-n", "30", "-s", "1"], b""),
    (["-i", LONG[:300], "-m", "generate", "-n", "20", "-t", "0"], b""),
    (["-m", "perplexity"], LONG.encode()),
    (["-m", "chat", "-n", "12", "-s", "2", "-e", "1.1"], b"Who are you?\nAnd who am I?\n"),
    (["-l", "-", "-s", "3", "-n", "9"], LIST),
    (["-l", "-", "-m", "perplexity"], LIST),
    (["-l", "-", "-m", "embed"], LIST),
    (["-l", "-", "-o", "yes|no|not at all"], LIST),
]
RUNS += [(["-C", "8", *args], stdin) for args, stdin in RUNS]


def said(program, model, args, stdin):
    """stdout, exit status, and what stderr says of errors: of a list's lines as they end, so in any order."""
    context = [] if "-c" in args else ["-c", "512"]
    done = subprocess.run([program, model, "-q", *context, *args], input=stdin, capture_output=True,
                          env=environment(), timeout=600)
    return done.stdout, done.returncode, sorted(done.stderr.splitlines())


def compare(plain, fast, model, runs=RUNS):
    """Both give the same; the exit statuses."""
    results = [(said(plain, model, *run), said(fast, model, *run), run) for run in runs]
    for wanted, found, run in results:
        assert wanted == found, run
    return {wanted[1] for wanted, _, _ in results}


@pytest.fixture(scope="module")
def model(random_model, tmp_path_factory, tokenizer35):
    """model(name, bits): a file. "delta" is a Qwen3.5."""
    @functools.cache
    def make(name, bits):
        if name in SHAPES:
            return random_model("--bits", bits, **SHAPES[name])
        folder = tmp_path_factory.mktemp("delta")
        return export(deltas.save(folder / "hf", *deltas.Delta("dense").saved(), tokenizer35), folder / "model.bin", "--bits", bits)
    return make


@pytest.mark.parametrize("tokens", [("a", "b", "a"), ("<think>", "a", "b", "a")])
def test_same_bytes_of_answers_that_repeat_themselves(chain, tokens):
    """Alone, with a batch of one, in lists; thinking; and where -n lets it go on."""
    runs = [(["-t", "0", "-c", "0", *args, *options], stdin)
            for options in ([], ["-n", "-1"], ["-C", "8"], ["-b", "1"], ["-r", "300"], ["-o", "a|b"])
            for args, stdin in ((["-i", "x"], b""), (["-l", "-"], b"x\nx y\n"), (["-L", "-"], b'{"a":1,"text":"x"}\n'))]
    assert compare(ROOT / "qwen3-plain", QWEN3, chain("Ċ", *tokens, max_len=700), runs) == {0}


@pytest.mark.parametrize("name, bits", [
    *[(name, 8) for name in SHAPES], ("Qwen3", 4), ("experts", 4), ("groups of 32", 4),
    *[pytest.param(name, bits, marks=pytest.mark.slow) for name, bits in (("Qwen2", 4), ("untied", 4), ("delta", 8), ("delta", 4))]])
def test_same_bytes(model, name, bits):
    assert compare(ROOT / "qwen3-plain", QWEN3, model(name, bits)) == {0}


def test_same_ids(small):
    """Part I looks at all neighbours again and again, Part II merges by a tree."""
    runs = [(["-m", "tokenize"], make_text(random.Random(kind), kind, 400).encode()) for kind in KINDS]
    assert compare(ROOT / "qwen3-plain", QWEN3, small, runs) == {0}


def tensors(model):
    """(its header, (name, offset of its scales or fp32 values, end) of each of its tensors), by export.py's layout."""
    header = export_py.Header._make(export_py.HEADER.unpack(model.read_bytes()[:export_py.HEADER.size]))
    return header, [(tensor.names[0], tensor.scales if tensor.bits < 32 else tensor.values, tensor.end)
                    for tensor in export_py.lay_out(header)]


SPOILED = ["input_layernorm", "post_attention", "norm.weight", "q_norm", "embed_tokens", "q_proj.weight", "k_proj.weight",
           "v_proj.weight", "o_proj", "gate_proj", "down_proj", "up_proj", "lm_head", "q_proj.bias", "k_proj.bias", "v_proj.bias", "mlp.gate.weight"]


def spoil(model, path, value, z, kinds=tuple(SPOILED)):
    """For each kind of tensor a copy of the model in which one scale, or one fp32 value, is `value`: for the embedding
    that of z. (8 bits: a scale is a float.)"""
    rng = np.random.default_rng(1)
    data, (header, table) = model.read_bytes(), tensors(model)
    assert len(data) == table[-1][2]
    copy_model(model, path.parent)
    for kind in kinds:
        of_kind = [row for row in table if kind in row[0]]
        if not of_kind:
            continue
        name, start, end = of_kind[len(of_kind) // 2]
        at = start + 4 * (z // 16 * 16 * (header.dim // header.group_size) + z % 16 if kind == "embed_tokens"
                          else int(rng.integers((end - start) // 4)))
        path.write_bytes(data[:at] + np.array(value, "<f4").tobytes() + data[at + 4:])
        yield kind


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e30], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_same_bytes_if_not_finite(model, name, value, tokenizer, tmp_path):
    kinds = []
    for kind in spoil(model(name, 8), tmp_path / "model.bin", value, tokenizer.token_to_id("z")):
        kinds.append(kind)
        compare(ROOT / "qwen3-plain", QWEN3, tmp_path / "model.bin")
    assert len(kinds) > 9


@pytest.mark.slow
def test_same_bytes_without_fma(model, tmp_path):
    """Both built for any CPU: no fma, no SIMD in the fast one."""
    build(tmp_path, "NATIVE=", "qwen3", "qwen3-plain")
    for name in SHAPES:
        for bits in 8, 4:
            compare(tmp_path / "qwen3-plain", tmp_path / "qwen3", model(name, bits))


# -- lists made to hurt the engine's cache

def hurt(plain, test, model, seed, lines):
    """`plain` and the test build, which asserts the cache's invariant, in each mode; with other batches, threads and
    caches of few blocks: the same lines, the same messages but for the statistics."""
    rng = random.Random(seed)
    data, answers = hurting_list(rng, lines)
    statistics = re.compile(rb"^\d+ texts in .*\n|^\d+ rows\n", re.M)
    for options in (["-m", "generate", "-o", answers, "-n", "0"], ["-m", "generate", "-t", "0"], ["-o", answers],
                    ["-o", answers, "-r", "3", "-n", "20"], ["-m", "generate", "-n", "25", "-x", "e"], ["-n", "9", "-e", "1.1"],
                    ["-m", "perplexity", "-c", "40"], ["-m", "perplexity"], ["-m", "embed"]):
        args = [model, "-l", "-", "-s", "3", "-C", rng.choice(["8", "32"]), *([] if "-c" in options else ["-c", "300"]), *options]
        wanted = subprocess.run([plain, *args], input=data, capture_output=True, env=environment(), timeout=900)
        for _ in range(2):
            how = ["-b", str(rng.choice([1, 3, 4, 5, 16, 512])), "-j", str(rng.choice([1, 2, 3]))]
            blocks = rng.choice(["1", "20", "40", "10000"]) + rng.choice(["", f",{seed + 1}"])  # see give_up
            found = subprocess.run([test, "list", blocks, *args, *how], input=data,
                                   capture_output=True, env=environment(), timeout=900)
            assert found.stdout == wanted.stdout and found.returncode == wanted.returncode, (seed, found.args, found.stderr)
            said_found, said_wanted = (sorted(statistics.sub(b"", run.stderr).splitlines()) for run in (found, wanted))
            assert said_found == said_wanted, (seed, found.args)


@pytest.mark.parametrize("name", ["Qwen3", "experts", "delta"])
def test_lists_made_to_hurt(model, name):
    hurt(ROOT / "qwen3-plain", TESTS / "test", model(name, 8), 0, 7)


@pytest.fixture(scope="module")
def all_digits(tmp_path_factory):
    """A folder with both programs, which print scores to their last bit."""
    folder = tmp_path_factory.mktemp("digits")
    build(folder, "CFLAGS=-O2 -DSCORE_DIGITS=17 -DNLL_DIGITS=17", "NATIVE=$(THIS_CPU)", "qwen3-plain", "tests/test")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name, bits", [("Qwen3", 8), ("Qwen2", 4), ("experts", 8), ("groups of 32", 4), ("delta", 8)])
def test_bits_of_lists_made_to_hurt(model, name, bits, all_digits, tokenizer, tmp_path):
    """More lines than places (as many as -b); in the end with texts whose numbers are not finite."""
    programs = all_digits / "qwen3-plain", all_digits / "tests/test"
    for seed in range(1 if name == "delta" else 5):     # plain delta layers are slow
        hurt(*programs, model(name, bits), seed, 14)
    if bits == 8 and name != "delta":
        for value in float("nan"), float("inf"):
            for _ in spoil(model(name, 8), tmp_path / "model.bin", value, tokenizer.token_to_id("z"), ["embed_tokens"]):
                hurt(*programs, tmp_path / "model.bin", 9, 14)

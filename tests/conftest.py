"""What the tests share: running qwen3 and export.py, and checkpoints made on the spot.

The programs are black boxes here. QWEN3=path runs another build (say, one with sanitizers).
"""
import contextlib
import functools
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

# No threads in the process that the programs are forked from, however many cores there are
os.environ.update(OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import numpy as np  # noqa: E402
import pexpect  # noqa: E402
import pytest  # noqa: E402
import reference  # noqa: E402
import tokenizers  # noqa: E402
from tokenizers import models, normalizers, pre_tokenizers, decoders, trainers  # noqa: E402

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))
import export as export_py  # noqa: E402

export_py.unicode_sections = functools.cache(export_py.unicode_sections)  # a third of a second each

QWEN3 = Path(os.environ.get("QWEN3", ROOT / "qwen3")).resolve()
QUOTED_QWEN3 = shlex.quote(str(QWEN3))      # for a shell
TINY = TESTS / "tiny"
LINUX = sys.platform == "linux"

RATE = r"(?:0\.\d{3}|[1-9]\.\d\d|\d\d\.\d|\d{3}|\d{3}0|\d\d\.\dk|\d{3,}k)/s"  # three significant digits
STATS = re.compile((rf"prompt (\d+) tokens at {RATE} \((\d+) cached\), "
                    rf"answer (\d+) at {RATE}, seed (\d+)\n").encode())


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: for `make test-all`, not for `make test`")


# -- running the programs

# Who runs the tests may ignore signals (nohup, a shell's &) or block them; the programs inherit it.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)          # here still without effect, there as usual
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# As the usual 8 MB for each thread is what the tests with little memory reckon with
stack, most = resource.getrlimit(resource.RLIMIT_STACK)
if most == resource.RLIM_INFINITY or most >= 8 << 20:
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, most))


def environment(**changes):
    keep = ("PATH", "HOME", "TMPDIR", "CC", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    return {**env, "LC_ALL": "C.UTF-8", **changes}


def qwen3(*args, stdin=b"", timeout=300, **env):
    """Run the program with no terminal anywhere; stdout and stderr as bytes."""
    return subprocess.run([str(QWEN3), *map(_argument, args)], input=stdin, capture_output=True,
                          timeout=timeout, env=environment(**env), start_new_session=True)


def _argument(value):
    return value if isinstance(value, (str, bytes)) else str(value)


def spawn(*args, **env):
    """The program at a pseudo-terminal: stdin, stdout and stderr."""
    return pexpect.spawn(str(QWEN3), [str(arg) for arg in args], timeout=60, dimensions=(24, 80),
                         env=environment(TERM="xterm", **env))


def finish(child):
    """The exit status of a spawned program; what it wrote last is in child.before."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def output(*args, stdin=b"", **kwargs):
    """stdout of a run that must succeed."""
    result = qwen3(*args, stdin=stdin, **kwargs)
    assert result.returncode == 0, result
    return result.stdout


def tokenize(model, text):
    """The ids of a text (bytes), through stdin."""
    out = output(model, "-m", "tokenize", "-q", stdin=text)
    assert out.endswith(b"\n") and out.count(b"\n") == 1
    return [int(word) for word in out.split()]


def perplexity(model, *args, stdin=b""):
    """(N, nll, ppl) of a run of -m perplexity."""
    out = output(model, "-m", "perplexity", "-q", *args, stdin=stdin)
    match = re.fullmatch(rb"tokens (\d+) nll (-?\d+\.\d{6}) ppl (\d+(?:\.\d+)?(?:e\+\d+)?)\n", out)
    assert match, out
    return int(match[1]), float(match[2]), float(match[3])


def assert_error(result, code, *words):
    """The run failed as cli.md says: nothing on stdout, one line on stderr, this exit status."""
    message = result.stderr.decode("utf-8", "replace")
    message = re.sub(r"==\d+==WARNING: AddressSanitizer failed to allocate.*\n", "", message)
    assert result.returncode == code, (result.returncode, message)
    assert result.stdout == b""
    assert message.startswith("qwen3: ") and message.endswith("\n"), message
    assert message.count("\n") == 1, message
    assert not re.search(r"expected (\S+) to \1,", message), message
    for word in words:
        assert str(word) in message, f"no {word!r} in: {message}"


def run_export(*args):
    """(exit status, stderr) of export.py's main() in this process, which has loaded its packages."""
    errors, argv = io.StringIO(), sys.argv
    export_py.notes.clear()
    sys.argv = ["export.py", *map(str, args)]
    try:
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
            export_py.main()
    finally:
        sys.argv = argv
    return stop.value.code, errors.getvalue()


def export(source, out, *args):
    """OUT.bin's path, exported."""
    status, error = run_export(source, out, *args)
    assert status == 0, error
    return Path(out)


def copy_model(model, directory, extension=True):
    """The model's two files once more, to be changed; without the extension as older exports wrote
    the tokenizer file."""
    path = directory / "model.bin"
    shutil.copy(model, path)
    data = Path(f"{model}.tokenizer").read_bytes()
    Path(f"{path}.tokenizer").write_bytes(data if extension else data[:data.index(b"q3tx")])
    return path


def expand_four_bits(model, path):
    """The model's two files once more, in eight bits, with the same values: int8 levels[nibble] and
    the scales in fp32."""
    shutil.copy(f"{model}.tokenizer", f"{path}.tokenizer")
    return reference.Model.from_bin(model).to_bin(path)


def split_tokenizer(data):
    """A tokenizer file's (part before the extension, {tag: payload})."""
    end = data.index(b"q3tx")
    at, sections = end + 12, {}
    while at < len(data):
        tag, length = struct.unpack_from("<4sI", data, at)
        sections[tag] = data[at + 8:at + 8 + length]
        at += 8 + length
    return data[:end], sections


def join_tokenizer(plain, sections):
    body = b"".join(tag + struct.pack("<I", len(payload)) + payload for tag, payload in sections)
    return plain + b"q3tx" + struct.pack("<II", 1, len(body)) + body


def records(mode, *args, texts):
    """Run tests/test's modes `tokens` and `render`: texts are (kind, bytes) pairs; a list of ids comes
    back for each line of the output."""
    path = QWEN3.parent / "tests/test"                      # of the same build, if it has one
    path = path if path.exists() else TESTS / "test"
    assert path.exists(), f"no {path}: make tests/test"
    command = [path.with_name("render")] if mode == "render" else [path, mode]
    data = b"".join(b"%s %d\n%s\n" % (kind.encode(), len(text), text) for kind, text in texts)
    result = subprocess.run([*command, *map(str, args)], input=data, capture_output=True, timeout=300,
                            env=environment())
    assert result.returncode == 0, result.stderr
    return [[int(i) for i in line.split()] for line in result.stdout.split(b"\n")[:-1]]


# -- a tokenizer of the real kind, trained on a few sentences

ADDED = [(text, True) for text in """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|>
<|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|>
<|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()] + [
    (text, False) for text in """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>
<|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think>
</think>""".split()]

SENTENCES = """The old lighthouse keeper didn't like the wind, but he'd never say it's too much.
We're told they'll come back when the harvest is in; I'm sure you've heard that they won't.
user assistant system: answer the question, then think about the answer again.
    if (n > 0) { return f(n - 1) + 1; }  // a comment\n\n\tfor i in range(10):\n\t\tprint(i)\r\n
Waſſer, daſs, liſt, faſt, gaſt, laſt, maſt, raſt, haſt, Kunſt, Fürſt, Haſs, eſst, muſs, laſs.
Größe, naïve, crème brûlée, año, smörgåsbord, łódź, ğüneş, tiếng Việt.
Старый смотритель маяка не любил ветер. Ο φάρος ήταν παλιός.
灯塔的老看守人不喜欢风。燈台の老人は風が嫌いだった。등대지기는 바람을 싫어했다。
المنارة قديمة جدا. מגדלור ישן מאוד. पुराना प्रकाशस्तंभ। ประภาคารเก่า
1 22 333 4444 1999-12-31 3.14159 ½ ² Ⅷ ① ٣  🙂🎉👩‍🚀 -- ... !!! ???    ~~~
"""


def train_tokenizer(merges=220, text=SENTENCES):
    tok = tokenizers.Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(reference.SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=256 + merges, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert tok.get_vocab_size() == 256 + merges
    tok.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)
                    for text, special in ADDED])
    data = json.loads(tok.to_str())
    for entry, (_, special) in zip(data["added_tokens"], ADDED):
        entry["special"] = special                  # add_tokens makes none special
    assert all("".join(pair) in data["model"]["vocab"] for pair in data["model"]["merges"])
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@pytest.fixture(scope="session")
def tokenizer():
    """The trained tokenizer, a tokenizers.Tokenizer: 256 bytes, 220 merges, 26 added tokens."""
    return train_tokenizer()


# -- checkpoints in Hugging Face's layout

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

HYBRID = CHATML.replace("{% endif %}", "{% if enable_thinking is defined and not enable_thinking %}"
                        "<think>\n\n</think>\n\n{% endif %}{% endif %}")


def write_safetensors(path, tensors, dtype):
    """tensors: name -> fp32 array. dtype F32, F16 or BF16 (rounded towards zero)."""
    header, blobs, at = {}, [], 0
    for name, array in tensors.items():
        array = np.ascontiguousarray(array, np.float32)
        blob = {"F32": array.tobytes, "F16": array.astype("<f2").tobytes,
                "BF16": (array.view("<u4") >> 16).astype("<u2").tobytes}[dtype]()
        header[name] = {"dtype": dtype, "shape": list(array.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(blobs))


def random_weights(rng, dim, hidden_dim, n_layers, n_heads, n_kv_heads, head_dim, vocab_size, tied,
                   qwen2=False, n_experts=0):
    """Weights that make the output depend on everything: sharp logits, attention that matters,
    experts of different weight, and q and k so small that the epsilon of their norms shows; in
    Qwen2, which has biases instead of these norms, as large as the biases."""
    def normal(rows, columns, rms):
        return rng.standard_normal((rows, columns), np.float32) * np.float32(rms)

    def around(mean, n):
        return (mean * (1 + 0.2 * rng.standard_normal(n))).astype(np.float32)

    w = {"model.embed_tokens.weight": normal(vocab_size, dim, 0.1)}
    w["model.embed_tokens.weight"][-1] = 0                      # groups of zeros have scale 0
    for i in range(n_layers):
        layer, inner = f"model.layers.{i}.", dim ** -0.5
        qk = 1.5 if qwen2 else 0.003
        w[layer + "input_layernorm.weight"] = around(1, dim)
        w[layer + "self_attn.q_proj.weight"] = normal(n_heads * head_dim, dim, qk * inner)
        w[layer + "self_attn.k_proj.weight"] = normal(n_kv_heads * head_dim, dim, qk * inner)
        w[layer + "self_attn.v_proj.weight"] = normal(n_kv_heads * head_dim, dim, 0.3 * inner)
        w[layer + "self_attn.o_proj.weight"] = normal(dim, n_heads * head_dim,
                                                      (n_heads * head_dim) ** -0.5)
        if qwen2:
            for name, rows, rms in (("q", n_heads, 1.5), ("k", n_kv_heads, 1.5),
                                    ("v", n_kv_heads, 0.3)):
                w[f"{layer}self_attn.{name}_proj.bias"] = normal(1, rows * head_dim, rms)[0]
        else:
            w[layer + "self_attn.q_norm.weight"] = around(1.7, head_dim)
            w[layer + "self_attn.k_norm.weight"] = around(1.7, head_dim)
        w[layer + "post_attention_layernorm.weight"] = around(1, dim)
        if n_experts:
            w[layer + "mlp.gate.weight"] = normal(n_experts, dim, 2 * inner)
        for mlp in [f"mlp.experts.{e}." for e in range(n_experts)] or ["mlp."]:
            w[layer + mlp + "gate_proj.weight"] = normal(hidden_dim, dim, 1.5 * inner)
            w[layer + mlp + "up_proj.weight"] = normal(hidden_dim, dim, 0.5 * inner)
            w[layer + mlp + "down_proj.weight"] = normal(dim, hidden_dim, 0.3 * hidden_dim ** -0.5)
    w["model.norm.weight"] = around(20 * dim ** -0.5, dim)      # logits with an rms of 2
    if not tied:
        w["lm_head.weight"] = normal(vocab_size, dim, 0.1)
    return w


def make_checkpoint(directory, tokenizer, seed=1, dim=64, hidden_dim=128, n_layers=2, n_heads=4,
                    n_kv_heads=2, head_dim=32, tied=True, theta=1000000, eps=1e-6, max_len=512,
                    yarn=None, dtype="BF16", shards=1, prefix="model.", pad_to=0, new_keys=False,
                    weights=None, template=CHATML, generation=None, qwen2=False, n_experts=0,
                    n_experts_used=2, topk_norm=True):
    """Write a Qwen3 checkpoint: random weights, or those given. yarn: the rope_scaling dict. qwen2:
    a Qwen2 one, where head_dim is not in the config and must be dim / n_heads. n_experts: a mixture
    of experts, hidden_dim is one expert's. new_keys: as transformers 5 writes config.json."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    text_tokens = tokenizer.get_vocab_size()
    vocab_size = max(pad_to, text_tokens)
    if weights is None:
        weights = random_weights(np.random.default_rng(seed), dim, hidden_dim, n_layers, n_heads,
                                 n_kv_heads, head_dim, vocab_size, tied, qwen2, n_experts)
    weights = {name.replace("model.", prefix, 1): w for name, w in weights.items()}
    names = sorted(weights)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
    else:
        where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
                 for i, name in enumerate(names)}
        for file in set(where.values()):
            write_safetensors(directory / file,
                              {name: weights[name] for name in names if where[name] == file}, dtype)
        (directory / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {"total_size": 0}, "weight_map": where}))
    ids = {text: tokenizer.token_to_id(text) for text, _ in ADDED}
    config = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False,
                  bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"],
                  head_dim=head_dim, hidden_act="silu", hidden_size=dim,
                  intermediate_size=hidden_dim, max_position_embeddings=max_len,
                  num_attention_heads=n_heads, num_hidden_layers=n_layers,
                  num_key_value_heads=n_kv_heads, rms_norm_eps=eps, sliding_window=None,
                  tie_word_embeddings=tied, use_sliding_window=False, vocab_size=vocab_size)
    if qwen2:
        assert head_dim * n_heads == dim
        config |= dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=4096)
        del config["head_dim"], config["attention_bias"]
    if n_experts:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                   "num_local_experts" if new_keys else "num_experts": n_experts,
                   "num_experts_per_tok": n_experts_used, "moe_intermediate_size": hidden_dim,
                   "intermediate_size": 3 * hidden_dim, "norm_topk_prob": topk_norm,
                   "decoder_sparse_step": 1, "mlp_only_layers": []}
    if new_keys:
        config |= dict(dtype="bfloat16", rope_parameters={"rope_type": "default", **(yarn or {}),
                                                          "rope_theta": theta})
    else:
        config |= dict(torch_dtype="bfloat16", rope_scaling=yarn, rope_theta=theta)
    (directory / "config.json").write_text(json.dumps(config))
    if generation is None:
        generation = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    (directory / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], **generation}))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None,
         "chat_template": template}))
    return directory


def make_table_model(directory, tokenizer, states, logits, dim=64, **kwargs):
    """A checkpoint whose next-token logits depend on the last token alone, as a table says.

    states: the tokens told apart (ids); all others are state 0. logits (vocab, 1 + len(states)):
    column 0 after any other token, column i + 1 after states[i]. The layers add nothing.
    """
    vocab, columns = logits.shape
    assert columns == 1 + len(states) <= dim
    embedding = np.zeros((vocab, dim), np.float32)
    embedding[:, 0] = 1
    for i, token in enumerate(states):
        embedding[token] = np.eye(dim)[i + 1]
    head = np.zeros((vocab, dim), np.float32)
    head[:, :columns] = logits
    weights = random_weights(np.random.default_rng(0), dim, 64, 1, 2, 1, 32, vocab, True)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"] *= 0
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head,
                "model.norm.weight": np.full(dim, dim ** -0.5, np.float32)}
    return make_checkpoint(directory, tokenizer, dim=dim, hidden_dim=64, n_layers=1, n_heads=2,
                           n_kv_heads=1, head_dim=32, tied=False, weights=weights, dtype="F32",
                           **kwargs)


# -- models that many tests use

@pytest.fixture(scope="session", autouse=True)
def built():
    if not QWEN3.exists():
        pytest.exit(f"{QWEN3}: not built, run make first", returncode=1)


@pytest.fixture(scope="session")
def small(tmp_path_factory, tokenizer):
    """A random model of two layers, exported."""
    directory = tmp_path_factory.mktemp("small")
    return export(make_checkpoint(directory / "hf", tokenizer), directory / "small.bin")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The trained tiny model, exported anew from its checkpoint."""
    if not (TINY / "model" / "config.json").exists():
        pytest.skip("no tests/tiny/model")
    return export(TINY / "model", tmp_path_factory.mktemp("tiny") / "tiny.bin")


@pytest.fixture(scope="session")
def chain(tmp_path_factory, tokenizer):
    """make(token, token, ...): a model that goes from each token to the next, with a lead of 12.
    Tokens are ids, or texts as the vocabulary writes them (a newline is \u010a)."""
    made = {}

    def make(*tokens, **kwargs):
        key = tokens, tuple(kwargs.items())
        if key not in made:
            ids = [tokenizer.token_to_id(t) if isinstance(t, str) else t for t in tokens]
            assert None not in ids and len(set(ids[:-1])) == len(ids) - 1
            logits = np.zeros((tokenizer.get_vocab_size(), len(ids)), np.float32)
            for i, token in enumerate(ids[1:]):
                logits[token, i + 1] = 12.7
            directory = tmp_path_factory.mktemp("chain")
            made[key] = export(make_table_model(directory / "hf", tokenizer, ids[:-1], logits,
                                                **kwargs), directory / "model.bin")
        return made[key]
    return make

"""The forward pass of exported random checkpoints, against tests/reference.py, which reads the checkpoint itself.
The texts are drawn from the model under test, so that their likelihood is high and mistakes lower it, by 0.07 and
more; the likelihood of a foreign text hardly moves.
"""
import numpy as np
import pytest
from conftest import (ADDED, STATS, expand_four_bits, export, make_checkpoint, output, perplexity, qwen3, tokenize)
from reference import Model, read_tokenizer

SLOW = {"mha", "head-dim-48", "head-dim-128", "one-head", "gqa-8", "no-prefix-f32", "padded-vocabulary",
        "theta-1e4", "eps-1e-5", "yarn-old-keys", "qwen2-gqa-7-group-32-untied", "experts-one-of-40"}
SHAPES = {
    "gqa-2": dict(),
    "mha": dict(n_kv_heads=4, seed=2),
    "mqa": dict(n_heads=6, n_kv_heads=1, seed=3),
    "gqa-3-group-32": dict(dim=96, hidden_dim=160, n_heads=6, n_kv_heads=2, head_dim=16, seed=4),
    "head-dim-10-group-32": dict(dim=32, hidden_dim=96, n_heads=16, n_kv_heads=4, head_dim=10, seed=5),
    "head-dim-48": dict(n_heads=4, n_kv_heads=1, head_dim=48, seed=6),
    "head-dim-128": dict(n_heads=4, n_kv_heads=2, head_dim=128, seed=7),
    "one-head": dict(n_heads=1, n_kv_heads=1, head_dim=64, n_layers=1, seed=8),
    "gqa-8": dict(n_heads=16, n_kv_heads=2, head_dim=16, n_layers=3, seed=9),
    "wide-untied": dict(dim=256, hidden_dim=576, n_heads=4, head_dim=64, tied=False, seed=10),
    "untied-f16-shards": dict(tied=False, dtype="F16", shards=5, seed=11),
    "no-prefix-f32": dict(prefix="", dtype="F32", seed=12),
    "padded-vocabulary": dict(pad_to=640, seed=13),
    "theta-5e6": dict(theta=5000000, new_keys=True, seed=14),
    "theta-1e4": dict(theta=10000.0, seed=15),
    "eps-1e-5": dict(eps=1e-5, seed=16),
    "yarn": dict(max_len=256, new_keys=True, seed=17, yarn=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "yarn-all-keys": dict(max_len=256, seed=18, head_dim=64, theta=10000, yarn=dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=3.0,
        beta_slow=0.4, attention_factor=1.4, truncate=False)),
    "qwen2": dict(n_heads=2, n_kv_heads=1, head_dim=32, qwen2=True, seed=22),
    "qwen2-gqa-7-group-32-untied": dict(dim=224, hidden_dim=160, n_heads=14, n_kv_heads=2,
                                        head_dim=16, tied=False, qwen2=True, seed=23),
    "experts": dict(hidden_dim=64, n_experts=8, n_experts_used=2, tied=False, seed=25),
    "experts-all-without-norm-group-32": dict(dim=96, hidden_dim=32, n_heads=6, n_kv_heads=2, head_dim=16,
                                              n_experts=5, n_experts_used=5, topk_norm=False, seed=26),
    "experts-one-of-40": dict(hidden_dim=64, n_experts=40, n_experts_used=1, new_keys=True, seed=27),
    "yarn-old-keys": dict(max_len=256, seed=19, yarn=dict(
        type="yarn", factor=2.0, original_max_position_embeddings=128)),
}


EACH_SHAPE = pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SHAPES])


def draw_text(model, tokenizer, n, seed=1):
    """n tokens drawn from the model, none added, each where the text so far encodes to the ids: text, ids."""
    rng, cache, ids, text = np.random.default_rng(seed), [], [], ""
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size() - len(ADDED))]
    while len(ids) < n:
        if ids:
            logits = model.logits(ids[-1:], cache)[-1, :len(pieces)].astype(float)
        else:
            logits = np.zeros(len(pieces))
        p = np.exp(logits - logits.max())
        for token in rng.choice(len(pieces), 40, replace=False, p=(p + 1e-9) / (p + 1e-9).sum()):
            piece = pieces[token]
            if "\ufffd" not in piece and tokenizer.encode(text + piece).ids == ids + [int(token)]:
                ids, text = ids + [int(token)], text + piece
                break
        else:                                           # a dead end: step back
            cut = max(len(ids) - 3, 0)
            ids, text = ids[:cut], "".join(pieces[i] for i in ids[:cut])
            cache = [(k[:cut - 1], v[:cut - 1]) for k, v in cache] if cut > 1 else []
    return text.encode(), ids


class Case:
    def __init__(self, directory, tokenizer, shape):
        self.hf = make_checkpoint(directory / "hf", tokenizer, **shape)
        self.bin = export(self.hf, directory / "model.bin")
        self.reference = Model.from_checkpoint(self.hf)
        self.text, self.ids = draw_text(self.reference, tokenizer, 220 if "yarn" in shape else 150)
        self.file = directory / "text"
        self.file.write_bytes(self.text)


@pytest.fixture(scope="module")
def case(tmp_path_factory, tokenizer):
    made = {}
    def get(name):
        if name not in made:
            made[name] = Case(tmp_path_factory.mktemp(name), tokenizer, SHAPES[name])
        return made[name]
    return get


@EACH_SHAPE
def test_perplexity(case, name):
    c = case(name)
    n, nll, ppl = perplexity(c.bin, "-f", c.file)
    assert n == len(c.ids) - 1
    assert abs(nll - c.reference.nll(c.ids)) < 0.03
    assert ppl == pytest.approx(np.exp(nll), rel=1e-4)


@EACH_SHAPE
def test_first_logits(case, name):
    """One position gives rounding little room to spread: 1e-3, but where an activation lies at a rounding boundary."""
    c, off = case(name), []
    for letters in ("aa", "bc", "de", "fg", "zz", "QX", "77", "+-", "\n7"):
        ids = tokenize(c.bin, letters.encode())
        if len(ids) == 2:
            n, nll, _ = perplexity(c.bin, stdin=letters.encode())
            assert n == 1
            off.append(abs(nll - c.reference.nll(ids)))
    assert len(off) > 4 and np.median(off) < 1e-3 and max(off) < 0.1


@EACH_SHAPE
def test_greedy(case, name, tokenizer):
    """The same most likely tokens, where the reference's lead is clear."""
    c = case(name)
    header, tokens, scores, _ = read_tokenizer(f"{c.bin}.tokenizer", c.reference.c["vocab_size"])
    stops = {tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    special = {tokenizer.token_to_id(t) for t, special in ADDED if special}
    tried = 0
    for start in range(0, 130, 2):
        prompt = c.ids[start:start + 8]
        text = tokenizer.decode(prompt, skip_special_tokens=False)
        if tokenizer.encode(text).ids != prompt:
            continue
        new, lead = c.reference.greedy(prompt, 12)
        if lead < 0.12:
            continue
        end = next((i for i, token in enumerate(new) if token in stops), len(new))
        expected = b"".join(tokens[token] for token in new[:end] if token not in special)
        found = output(c.bin, "-m", "generate", "-t", 0, "-n", 12, "-q", stdin=text.encode())
        assert found.decode(errors="replace") == expected.decode(errors="replace")      # half a character may end it
        tried += 1
        if tried == 3:
            break
    assert tried, "no prompt with a clear continuation"


@pytest.mark.parametrize("group", [128, 256, *[pytest.param(n, marks=pytest.mark.slow) for n in (32, 64)]])
def test_group_sizes(tokenizer, tmp_path, group):
    """Files that others wrote: any of the four group sizes, and int8 values of -128."""
    hf = make_checkpoint(tmp_path / "hf", tokenizer, dim=256, hidden_dim=512, n_heads=4,
                         n_kv_heads=2, head_dim=64, seed=20)
    reference = Model.from_checkpoint(hf, group=group)
    for matrix in (reference.w["embed"], *reference.w["down"]):
        matrix.grouped[3:40, 0, ::5] = -128
    export(hf, tmp_path / "model.bin")                  # for its tokenizer file
    reference = Model.from_bin(reference.to_bin(tmp_path / "model.bin"))
    text, ids = draw_text(reference, tokenizer, 120)
    n, nll, _ = perplexity(tmp_path / "model.bin", stdin=text)
    assert n == len(ids) - 1 and abs(nll - reference.nll(ids)) < 0.03


# -- equality: four bits, threads, batches, seeds, pieces of the context

@pytest.mark.parametrize("group", [32, *[pytest.param(n, marks=pytest.mark.slow) for n in (64, 128, 256)]])
def test_four_bits_are_the_same_bits(random_model, tmp_path, group):
    """A four-bit file, and the file of eight bits with the same values: one figure, one text."""
    width = max(group, 96 if group == 32 else 64)       # 3 groups of 32, and odd numbers of scales
    shape = dict(dim=width, hidden_dim=3 * group, n_heads=width // 32, n_kv_heads=1, n_layers=3, tied=False, seed=24)
    four = random_model("--bits", 4, "--group-size", group, **shape)
    eight = expand_four_bits(four, tmp_path / "8.bin")
    assert four.stat().st_size < eight.stat().st_size
    assert perplexity(four, "-f", __file__)[1] != perplexity(random_model(**shape), "-f", __file__)[1]
    for cut in ((), ("-b", 1), ("-b", 7, "-j", 2), ("-j", 3)):
        assert perplexity(four, "-f", __file__, *cut) == perplexity(eight, "-f", __file__)
    run = ("-m", "generate", "-i", "the", "-n", 60, "-t", 1, "-k", 0, "-p", 1, "-q", "-s", 5)
    assert output(four, *run) == output(eight, *run)


CUTS = [("-j", 2), ("-j", 3), ("-b", 1), ("-b", 7), ("-b", 64), ("-b", 512), ("-j", 1, "-b", 33)]


@pytest.fixture(scope="module")
def wide_context(tmp_path_factory, tokenizer):
    """A model with room for 1,024 tokens, and a text of over 600."""
    directory = tmp_path_factory.mktemp("long")
    hf = make_checkpoint(directory / "hf", tokenizer, dim=96, hidden_dim=160, n_heads=6,
                         n_kv_heads=2, head_dim=16, max_len=1024, seed=21)
    path = export(hf, directory / "model.bin")
    text, ids = draw_text(Model.from_checkpoint(hf), tokenizer, 130)
    file = directory / "text"
    file.write_bytes(text * 5)
    assert 520 < len(tokenize(path, text * 5)) < 900
    return path, file


@pytest.fixture(scope="module")
def wide_experts(random_model, wide_context):
    """The same for a mixture of experts, with four bits."""
    shape = dict(hidden_dim=96, n_experts=12, n_experts_used=3, max_len=1024, seed=28)
    return random_model("--bits", 4, **shape), wide_context[1]


@pytest.mark.parametrize("options", CUTS, ids=lambda options: " ".join(map(str, options)))
@pytest.mark.parametrize("model", ["wide_context", "wide_experts"])
@pytest.mark.parametrize("cache", [32, 8])
def test_same_bits_however_cut(request, model, options, cache):
    path, file = request.getfixturevalue(model)
    options = ("-C", cache, *options)
    assert perplexity(path, "-f", file, *options) == perplexity(path, "-f", file, "-C", cache, "-j", 1)
    for sampling in (("-t", 0), ("-t", 1, "-k", 0, "-p", 1, "-s", 12345)):
        run = (path, "-m", "generate", "-f", file, "-n", 60, "-q", *sampling)
        assert output(*run, *options) == output(*run, "-C", cache, "-j", 1)


def test_cache_of_8_bits_without_the_bias(tokenizer, tmp_path):
    """Elements of the key's bias that are 200 times the rest, in pairs that rope hardly turns, cost nothing."""
    bias = np.random.default_rng(1).standard_normal((4, 16), np.float32)
    bias[:, 14:] = 200
    large = {f"layers.{i}.self_attn.k_proj.bias": bias.ravel() for i in range(2)}
    path = export(make_checkpoint(tmp_path / "hf", tokenizer, dim=128, qwen2=True, weights=large, seed=29), tmp_path / "model.bin")
    losses = [perplexity(path, "-f", __file__, "-C", cache)[1] for cache in (32, 8)]
    assert losses[0] != losses[1] and abs(losses[1] - losses[0]) < 0.0003                   # 0.002 with it


def test_seed_repeats(small):
    """Each seed has a text of its own; without one, the statistics say which it was, and it is short."""
    run = (small, "-m", "generate", "-i", "the", "-n", 60, "-t", 1, "-k", 0, "-p", 1)
    drawn = [qwen3(*run) for _ in range(2)]
    texts = {STATS.search(result.stderr)[4].decode(): result.stdout for result in drawn}
    assert all(int(seed) < 10**6 for seed in texts)
    texts |= {seed: output(*run, "-s", seed) for seed in (*range(8), 2**32 + 1, -3, 2**64 - 1)}
    written = [text for text in texts.values() if text]                        # seed -3's is empty, and 3 % of those drawn
    assert len(set(written)) == len(written) >= 10 and len(texts) == 13
    assert all(output(*run, "-s", seed) == text for seed, text in texts.items())


@pytest.mark.parametrize("context", [2, 3, 50, 149, 150])
def test_text_longer_than_context(case, context):
    """Scored in pieces, each beginning with the last token of the one before; one of 150 tokens is not."""
    c = case("gqa-2")
    result = qwen3(c.bin, "-m", "perplexity", "-c", context, "-f", c.file)
    expected = np.concatenate([c.reference.logprobs(c.ids[at:at + context])
                               for at in range(0, len(c.ids) - 1, context - 1)])
    n, nll, _ = perplexity(c.bin, "-c", context, "-f", c.file)
    assert n == len(expected) == len(c.ids) - 1
    assert abs(nll + expected.mean()) < 0.04
    assert (b"in pieces of %d (-c)" % context in result.stderr) == (context < len(c.ids))

"""--bits 4 beside a naive quantization."""
import re
import struct

import numpy as np
import pytest
import reference
from checkpoints import experts
from conftest import ROOT, refused


LEVELS = np.array([-127, -100, -78, -61, -46, -33, -21, -9, 2, 13, 24, 36, 49, 64, 82, 106])
MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
            "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj",
            "up": "mlp.up_proj"}  # reference.py's names


def nearest(x, levels):
    """The nearest level to each value."""
    return levels[np.abs(x[..., None] - levels).argmin(axis=-1)]


def naive_q4(x, group, levels=LEVELS):
    """(values, scales) of a matrix, in double: of both ends of the levels and five scales each the
    one that leaves the least squared error, made the best for its levels, and rounded to fp16."""
    x = x.reshape(-1, group).astype(np.float64)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    best, scale = np.full(len(x), np.inf), np.zeros((len(x), 1))
    for end in levels[[0, -1]]:
        for factor in np.linspace(0.8, 1.1, 5):
            level = nearest(x / np.where(peak, peak * factor / end, 1), levels)
            fit = (x * level).sum(axis=1, keepdims=True) / (level ** 2).sum(axis=1, keepdims=True).clip(1)
            error = ((x - fit * level) ** 2).sum(axis=1)
            scale[error < best] = fit[error < best]
            best = np.minimum(error, best)
    scale = scale.astype(np.float16).astype(np.float64)
    return nearest(x / np.where(scale, scale, np.inf), levels) * scale, scale


def layer_matrices(ck, weights):
    """(tensor of the checkpoint, reference.py's matrix) of each matrix in the layers."""
    for ours, theirs in MATRICES.items():
        for layer, found in enumerate(weights[ours]):
            found = found if isinstance(found, list) else [found]
            for mlp, matrix in zip(ck.feed_forwards(), found):
                yield ck.tensors[f"layers.{layer}.{theirs.replace('mlp', mlp)}.weight"], matrix


@pytest.mark.parametrize("group, config", [
    (None, {}), (64, {}), (32, {}), (None, experts(3)), (None, {"architectures": ["Qwen2ForCausalLM"], "head_dim": 32})])
def test_four_bits(checkpoint, exports, tmp_path, group, config):
    """All but the layers' matrices is as in eight bits, v, too (Qwen2: k and v). The others hold what the naive
    quantization gives, except for a few groups with two choices that are about equally good."""
    ck = checkpoint("F32", num_key_value_heads=2, tie_word_embeddings=False, **config)
    said = exports(ck.save(tmp_path / "in"), "--bits", 4, *(["--group-size", group] if group else []))[0]
    assert re.search(r"wrote in-q4.bin \(0.[12] MB, 4 bits in groups of", said), said
    data, group = (tmp_path / "in-q4.bin").read_bytes(), group or 32
    eight = ck.expected(group)
    assert data[:0x68] == eight[:0x68] and data[0x80:0x9C] == eight[0x80:0x9C]
    assert data[0x68:0x80] == struct.pack("<2I", 4, 6 if ck.qwen2 else 4) + LEVELS.astype(np.int8).tobytes()
    (tmp_path / "eight.bin").write_bytes(eight)
    four, eight = (reference.Model.from_bin(tmp_path / name).w for name in ("in-q4.bin", "eight.bin"))
    for name in four.keys() - MATRICES:
        assert np.array_equal(*(w[name].rows(range(ck.config["vocab_size"])) if name in (
            "embed", "head") else w[name] for w in (four, eight)))
    same = {name: [np.array_equal(a.grouped, b.grouped) for a, b in zip(four[name], eight[name])
                   if not isinstance(a, list)] for name in MATRICES}
    kept = "kv" if ck.qwen2 else "v"
    assert all(all(same.pop(name)) for name in kept) and not any(map(any, same.values()))
    for x, matrix in layer_matrices(ck, {name: [] if name in kept else four[name] for name in MATRICES}):
        x = x.reshape(-1, group)
        expected, scale = naive_q4(x, group)
        found = matrix.rows(range(len(matrix.grouped))).reshape(-1, group)
        assert np.isfinite(found).all()
        assert np.mean(matrix.row_scale.reshape(-1, 1) == scale) > 0.95
        assert ((x - found) ** 2).sum() <= 1.005 * ((x - expected) ** 2).sum()


def test_four_bits_of_trained_weights(run, tmp_path):
    """The error is less than in GGUF's Q4_0, which has 8.7 % here."""
    assert run(ROOT / "tests/tiny/model", "--bits", 4)[0] == 0
    four = reference.Model.from_bin(tmp_path / "model-q4.bin", "weights").w
    exact = reference.Model.from_checkpoint(ROOT / "tests/tiny/model", "fp32").w
    pairs = [(a.dense, b.dense) for name in MATRICES for a, b in zip(exact[name], four[name])]
    assert sum(((a - b) ** 2).sum() for a, b in pairs) < 0.0738 ** 2 * sum((a ** 2).sum() for a, _ in pairs)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of numpy: a division by 0, an overflow
@pytest.mark.parametrize("scale", [0, 1e-45, 1e-40, 3e-8, 1e-6, 106 * 2.0 ** 15])
def test_four_bits_of_the_smallest_and_largest_weights(checkpoint, run, tmp_path, scale):
    """They lose what fp16 scales cannot hold, and no more."""
    ck = checkpoint("F32")
    x = ck.tensors["layers.1.mlp.up_proj.weight"]
    x[...] = np.random.default_rng(1).uniform(-scale, scale, x.shape)
    x[0, 0] = scale
    assert run(ck.save(tmp_path / "in"), "out.bin", "--bits", 4)[0] == 0
    found = reference.Model.from_bin(tmp_path / "out.bin", "weights").w["up"][1].dense
    assert (np.abs(found - x) <= max(0.15 * scale, 127 * 2.0 ** -25)).all()
    assert run("in", "out.bin", "--check")[0] == 0


def test_weights_too_large_for_four_bits(checkpoint, run, tmp_path):
    ck = checkpoint("F32")
    ck.tensors["layers.1.mlp.up_proj.weight"][3, 5] = -3473409
    ck.tensors["embed_tokens.weight"][3, 5] = 1e30  # this is in eight bits
    refused(run(ck.save(tmp_path / "in"), "out.bin", "--bits", 4), "layers.1.mlp.up_proj.weight",
            "numbers up to 3473408 for --bits 4, found 3473409")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert run("in", "out.bin")[0] == 0

"""export.py against checkpoints made here and naive re-implementations.

Most tests call main() inside this process, as a user would from a shell: arguments in, files,
standard error and exit status out. Memory and the hub are tested on real processes.
"""

import fcntl
import http.server
import json
import math
import os
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import reference
import tokenizers
from checkpoints import ADDED, SENTENCES, Checkpoint
from conftest import (ROOT, environment, export_process, export_py as export, measures,
                      refused)
from tokenizers import Regex, normalizers, pre_tokenizers

# ---------------------------------------------------------------------------- a checkpoint

def experts(n: int, key="num_experts", used=1, **config) -> dict:
    """What a mixture of experts has in its config.json; intermediate_size belongs to no layer."""
    return {"architectures": ["Qwen3MoeForCausalLM"], key: n, "num_experts_per_tok": used,
            "moe_intermediate_size": 64, "intermediate_size": 1000, "norm_topk_prob": True} | config


def read_tokenizer(data: bytes, vocab_size: int):
    """(header, [(score, token)], sections) of a .tokenizer file, everything checked."""
    head, tokens, scores, sections = reference.read_tokenizer(data, vocab_size)
    assert head[0] == max(map(len, tokens)) and len(tokens) == vocab_size and sections
    return head, list(zip(scores, tokens)), sections


def rows(section: bytes, width: int):
    return [tuple(row) for row in np.frombuffer(section, "<u4").reshape(-1, width).tolist()]


def chat_strings(section: bytes) -> list[str]:
    strings, at = [], 0
    while at < len(section):
        length, = struct.unpack_from("<I", section, at)
        strings.append(section[at + 4:at + 4 + length].decode())
        at += 4 + length
    assert len(strings) == 12
    return strings


# ---------------------------------------------------------------------------- weights

@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_byte_is_as_the_naive_quantization_gives(checkpoint, run, tmp_path, dtype):
    ck = checkpoint(dtype)
    if dtype == "F32":  # the smallest numbers: a scale that underflows to 0, and a coarse one
        ck.tensors["embed_tokens.weight"][4, :] = 1e-45
        ck.tensors["embed_tokens.weight"][5, :] = np.linspace(-2.6e-43, 2.6e-43, 64)
    status, err = run(ck.save(tmp_path / "in"), "out.bin")
    assert status == 0 and len(err) == 2, err  # the summary, and that there is no chat template
    assert (tmp_path / "out.bin").read_bytes() == ck.expected()


def variant(ck, which):
    """(checkpoint, shards, group size)"""
    if which == "shards":
        return ck(), 3, 64
    if which == "no prefix":
        one = ck()
        one.prefix = ""
        return one, 1, 64
    if which == "lm_head stored although tied":
        one = ck()
        one.tensors["lm_head.weight"] = np.ones((3, 3), np.float32)
        one.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(32, np.float32)
        original = one.expected()
        one.expected = lambda group: original
        return one, 1, 64
    if which.startswith("qwen2"):
        one = ck(architectures=["Qwen2ForCausalLM"], head_dim=32, use_sliding_window=False,
                 sliding_window=64, max_window_layers=1, tie_word_embeddings="untied" not in which,
                 attention_bias=True if "attention_bias" in which else None)
        one.tensors = {name: x * 9 if name.endswith("bias") else x for name, x in one.tensors.items()}
        if "attention_bias" not in which:
            head_dim = one.config.pop("head_dim")
            expected = one.expected
            one.expected = lambda group: (one.config.update(head_dim=head_dim), expected(group),
                                          one.config.pop("head_dim"))[1]
        return one, 2, 64
    if which.startswith("experts"):
        if "transformers 5" not in which:
            return ck(**experts(3, used=2), tie_word_embeddings=False), 1, 64
        one = ck(**experts(5, "num_local_experts"))
        del one.config["norm_topk_prob"]  # then it is false
        return one, 3, 64
    return {"untied": lambda: (ck(tie_word_embeddings=False), 2, 64),
            "group 32, odd shapes": lambda: (ck(hidden_size=96, intermediate_size=160,
                                                num_attention_heads=3, num_key_value_heads=3,
                                                head_dim=32, vocab_size=505), 1, 32),
            "head size not given": lambda: (ck(head_dim=128), 1, 64)}[which]()


@pytest.mark.parametrize("which", ["shards", "no prefix", "lm_head stored although tied", "untied",
                                   "group 32, odd shapes", "head size not given", "qwen2",
                                   "qwen2, untied", "qwen2, head_dim and attention_bias given",
                                   "experts", "experts, transformers 5"])
def test_variants_of_checkpoints(checkpoint, run, tmp_path, which):
    ck, shards, group = variant(checkpoint, which)
    expected = ck.expected(group)
    if which == "head size not given":
        del ck.config["head_dim"]
    assert run(ck.save(tmp_path / "in", shards), "out.bin")[0] == 0
    assert (tmp_path / "out.bin").read_bytes() == expected


@pytest.mark.parametrize("group, config", [(64, {}), (32, {"hidden_size": 96}), (64, experts(3))])
def test_pieces_join_where_a_tensor_is_larger_than_one(checkpoint, run, tmp_path, monkeypatch,
                                                       group, config):
    monkeypatch.setattr(export, "PIECE", 64 * 7)
    ck = checkpoint(**config)
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0
    assert (tmp_path / "out.bin").read_bytes() == ck.expected(group)


# name -> (changes of config.json, the header from 0x30: theta, eps, kind, factor, original length,
# beta_fast, beta_slow, attention factor, not truncated)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
HEADERS = {
    "plain": ({}, (0, 0, 0, 0, 0, 0, 0, 0, 0)),
    "2507": ({"rope_theta": 5000000, "rms_norm_eps": 1e-5}, (5e6, 1e-5, 0, 0, 0, 0, 0, 0, 0)),
    "new keys": ({"rope_theta": None, "rope_parameters": {"rope_type": "default",
                                                          "rope_theta": 5e5}},
                 (5e5, 0, 0, 0, 0, 0, 0, 0, 0)),
    "no theta": ({"rope_theta": None}, (1e4, 0, 0, 0, 0, 0, 0, 0, 0)),
    "yarn": ({"rope_scaling": YARN}, (0, 0, 1, 4, 128, 0, 0, 0, 0)),
    "yarn, type": ({"rope_scaling": {"type": "yarn", "factor": 2}}, (0, 0, 1, 2, 512, 0, 0, 0, 0)),
    "yarn, ratio": ({"rope_scaling": YARN | {"factor": None,
                                             "original_max_position_embeddings": 64}},
                    (0, 0, 1, 8, 64, 0, 0, 0, 0)),
    "yarn, length outside": ({"rope_scaling": YARN, "original_max_position_embeddings": 77},
                             (0, 0, 1, 4, 77, 0, 0, 0, 0)),
    "yarn, explicit": ({"rope_parameters": YARN | {
        "rope_theta": 7e4, "attention_factor": 0.5, "beta_fast": 24, "beta_slow": 2.5,
        "truncate": False}}, (7e4, 0, 1, 4, 128, 24, 2.5, 0.5, 1)),
    "yarn, defaults spelt out": ({"rope_scaling": YARN | {
        "attention_factor": 0.1 * math.log(4) + 1, "beta_fast": 32, "beta_slow": 1.0,
        "truncate": True}}, (0, 0, 1, 4, 128, 0, 0, 0, 0)),
    "yarn, mscale": ({"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 2.0}},
                     (0, 0, 1, 4, 128, 0, 0, (0.0707 * math.log(4) + 1) / (0.2 * math.log(4) + 1),
                      0)),
    "yarn, mscale alone": ({"rope_scaling": YARN | {"mscale": 0.707}},
                           (0, 0, 1, 4, 128, 0, 0, 0, 0)),
    "yarn, factor below 1": ({"rope_scaling": YARN | {"factor": 0.5}},
                             (0, 0, 1, 0.5, 128, 0, 0, 1, 0)),
    "deepseek": ({"rope_scaling": YARN | {"attn_factor": 0.8782488562869419}},
                 (0, 0, 1, 4, 128, 0, 0, 0, 0)),
}


YARN_OPTION = {  # config.json -> what --yarn makes of it
    "qwen3": ({"max_position_embeddings": 40960}, 2, {"max_position_embeddings": 65536}, 32768),
    "base": ({"max_position_embeddings": 32768}, 4, {"max_position_embeddings": 131072}, 32768),
    "2507": ({"max_position_embeddings": 262144, "rope_theta": 5e6}, 2.5,
             {"max_position_embeddings": 655360}, 262144),
    "new keys": ({"max_position_embeddings": 512, "rope_theta": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 7e4}}, 4,
        {"max_position_embeddings": 2048, "rope_theta": 7e4}, 512),
}


@pytest.mark.parametrize("which", YARN_OPTION)
def test_yarn_option(checkpoint, run, tmp_path, which):
    """The same file as from a config.json with the fields that Qwen's model cards give."""
    config, factor, changes, original = YARN_OPTION[which]
    folder = checkpoint(**config).save(tmp_path / "plain")
    assert run("--yarn", factor, folder, "option.bin")[0] == 0
    changes = changes | {"rope_scaling": {"rope_type": "yarn", "factor": factor,
                                          "original_max_position_embeddings": original}}
    folder = checkpoint(**(config | changes)).save(tmp_path / "changed")
    assert run(folder, "changed.bin")[0] == 0
    data = (tmp_path / "option.bin").read_bytes()
    assert data == (tmp_path / "changed.bin").read_bytes()
    assert struct.unpack_from("<If", data, 0x38) == (2, np.float32(0.1 * math.log(factor) + 1))
    c = {"head_dim": 64, "theta": {"2507": 5e6, "new keys": 7e4}.get(which, 1e6),
         "yarn": {"factor": factor, "original": original}}
    assert reference.Model.from_bin(tmp_path / "option.bin").freq.tolist() == (
        reference.rope_frequencies(c)[0].tolist())


def test_yarn_option_refused(checkpoint, run, tmp_path):
    folder = checkpoint(rope_scaling=YARN).save(tmp_path / "in")
    refused(run(folder, "--yarn", "2"), "--yarn", "yarn")
    for value in ("1", "0", "-2", "65", "x", "nan", "inf", ""):
        status, err = run(folder, "--yarn", value)
        assert status == 2 and len(err) == 1 and "--yarn" in err[0] and repr(value) in err[0]
    assert run(folder, "--yarn")[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("which", HEADERS)
def test_header_extensions(checkpoint, tmp_path, which):
    changes, fields = HEADERS[which]
    export.notes.clear()
    folder = checkpoint(**changes).save(tmp_path)
    config = export.read_config(export.read_folder(folder), export.parse_arguments(["in"]))
    theta, eps, kind, *values = fields
    yarn = dict(zip(("factor", "original", "beta_fast", "beta_slow", "attention_factor", "unrounded"),
                    values))
    factor, freq = 0, []
    if kind:
        freq, factor = reference.rope_frequencies({"head_dim": 64, "theta": theta or 1e6, "yarn": yarn})
    assert export.header(config)[0x30:] == struct.pack(
        "<2fIf", theta, eps, 2 * kind, factor).ljust(256 - 0x30, b"\0")
    assert np.array_equal(np.float32(config.frequencies), freq)
    assert not export.notes


# ---------------------------------------------------------------------------- four bits

LEVELS = np.array([-127, -100, -78, -61, -46, -33, -21, -9, 2, 13, 24, 36, 49, 64, 82, 106])
MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
            "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj",
            "up": "mlp.up_proj"}  # reference.py's names


def nearest(x):
    """The nearest level to each value, and the squared difference."""
    level = LEVELS[np.abs(x[..., None] - LEVELS).argmin(axis=-1)]
    return level, (x - level) ** 2


def naive_q4(x, group):
    """(values, scales) of a matrix, in double: of both ends of the levels and five scales each the
    one that leaves the least squared error, made the best for its levels, and rounded to fp16."""
    x = x.reshape(-1, group).astype(np.float64)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    best, scale = np.full(len(x), np.inf), np.zeros((len(x), 1))
    for end in (-127, 106):
        for factor in np.linspace(0.8, 1.1, 5):
            level, _ = nearest(x / np.where(peak, peak * factor / end, 1))
            fit = (x * level).sum(axis=1, keepdims=True) / (level ** 2).sum(axis=1, keepdims=True)
            error = ((x - fit * level) ** 2).sum(axis=1)
            scale[error < best] = fit[error < best]
            best = np.minimum(error, best)
    scale = scale.astype(np.float16).astype(np.float64)
    return nearest(x / np.where(scale, scale, np.inf))[0] * scale, scale


def layer_matrices(ck, weights):
    """(tensor of the checkpoint, reference.py's matrix) of each matrix in the layers."""
    for ours, theirs in MATRICES.items():
        for layer, found in enumerate(weights[ours]):
            found = found if isinstance(found, list) else [found]
            for mlp, matrix in zip(ck.feed_forwards(), found):
                yield ck.tensors[f"layers.{layer}.{theirs.replace('mlp', mlp)}.weight"], matrix


@pytest.mark.parametrize("group, config", [(None, {}), (64, {}), (32, {}), (None, experts(3))])
def test_four_bits(checkpoint, run, tmp_path, group, config):
    """All but the layers' matrices is as in eight bits. These hold what the naive quantization
    gives, except for a few groups with two choices that are about equally good."""
    ck = checkpoint("F32", num_key_value_heads=2, tie_word_embeddings=False, **config)
    folder = ck.save(tmp_path / "in")
    status, err = run(folder, "--bits", 4, *(["--group-size", group] if group else []))
    assert status == 0 and re.search(r"wrote in-q4.bin \(0.[12] MB, 4 bits in groups of", err[0]), err
    data, group = (tmp_path / "in-q4.bin").read_bytes(), group or 32
    eight = ck.expected(group)
    assert data[:0x68] == eight[:0x68] and data[0x80:256] == eight[0x80:256]
    assert data[0x68:0x80] == struct.pack("<2I", 4, 0) + LEVELS.astype(np.int8).tobytes()
    (tmp_path / "eight.bin").write_bytes(eight)
    four, eight = (reference.Model.from_bin(tmp_path / name).w
                   for name in ("in-q4.bin", "eight.bin"))
    for name in four.keys() - MATRICES:
        assert np.array_equal(*(w[name].rows(range(ck.config["vocab_size"])) if name in (
            "embed", "head") else w[name] for w in (four, eight)))
    for x, matrix in layer_matrices(ck, four):
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
    assert sum(((a - b) ** 2).sum() for a, b in pairs) < 0.0738 ** 2 * sum((a ** 2).sum()
                                                                          for a, _ in pairs)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of numpy: a division by 0, an overflow
@pytest.mark.parametrize("scale", [0, 1e-45, 1e-40, 3e-8, 1e-6, 2.0 ** 22])
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
    ck.tensors["layers.1.mlp.up_proj.weight"][3, 5] = -4194305
    ck.tensors["embed_tokens.weight"][3, 5] = 1e30  # this is in eight bits
    refused(run(ck.save(tmp_path / "in"), "out.bin", "--bits", 4), "layers.1.mlp.up_proj.weight",
            "numbers up to 4194304 for --bits 4, found 4194305")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    assert run("in", "out.bin")[0] == 0


def test_four_bits_do_not_depend_on_pieces_or_threads(checkpoint, run, tmp_path, monkeypatch):
    folder = checkpoint(hidden_size=96).save(tmp_path / "in")
    assert run(folder, "a.bin", "--bits", 4)[0] == 0
    monkeypatch.setattr(export, "PIECE", 64 * 7)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert run(folder, "b.bin", "--bits", 4)[0] == 0
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


# ---------------------------------------------------------------------------- refusals

BAD_CONFIG = [
    ({"architectures": ["Qwen3NextForCausalLM"]}, "not Qwen3's", "found Qwen3NextForCausalLM$"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "not Qwen3's", "found Qwen3ForSequence"),
    ({"architectures": None}, "architecture", "none"),
    ({"quantization_config": {"quant_method": "fp8"}}, "unquantized", "a GGUF file, found fp8$"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "unquantized", "a GGUF file, found .*64"),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
     "use_sliding_window", "full_attention"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types",
     "found full_attention, sliding_attention"),
    ({"attention_bias": True}, "attention_bias", "False|false"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"hidden_size": "64"}, "hidden_size", "'64'"),
    ({"hidden_size": -64}, "hidden_size", "-64"),
    ({"vocab_size": 2 ** 40}, "vocab_size", "from 1 to 1048576"),
    ({"num_hidden_layers": None}, "num_hidden_layers", "None"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "from 1.17549e-38 to 1e\\+12"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
    ({"rope_theta": 10 ** 400}, "rope_theta", "a number from 1e-06 to 1e\\+12, found 1000"),
    ({"head_dim": 63}, "head_dim", "even"),
    ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads", "divisor of 3"),
    ({"hidden_size": 80}, "hidden_size", "multiple of 32"),
    ({"intermediate_size": 72}, "intermediate_size", "72"),
    ({"head_dim": 24}, r"num_attention_heads \* head_dim", "48"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type", "llama3"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type", "linear"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2}}, "rope scaling default", "found factor"),
    ({"rope_scaling": YARN | {"surprise": 1}}, "rope scaling yarn", "surprise"),
    ({"rope_scaling": YARN | {"factor": "four"}}, "factor", "'four'"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "factor", "None"),
    ({"rope_scaling": YARN | {"truncate": 0}}, "truncate", "True or False, found '0'"),
    ({"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor", "from 1e-06"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5"),
    ({"rope_scaling": "yarn"}, "config.json", "broken"),
    ({"vocab_size": 300}, "embed_tokens.weight|ids", "300"),
]


BAD_EXPERTS = [
    ({"num_experts": None}, "num_experts, expected an integer from 0 to 4096, found None"),
    ({"num_experts": 0}, "num_experts_per_tok, expected from 1 to num_experts, 0, found 2"),
    ({"num_local_experts": 1}, "num_experts_per_tok, expected from 1 to num_experts, 1, found 2"),
    ({"num_experts": 4097}, "num_experts.*4096, found 4097"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok, expected from 1 to num_experts, 3, found 4"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok.*found None"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size.*found None"),
    ({"moe_intermediate_size": 72}, "moe_intermediate_size, expected a multiple of 32"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is not supported, expected True or False, found '1'"),
    ({"mlp_only_layers": [1]}, r"mlp_only_layers is not supported, expected \[\], found \[1\]"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step is not supported, expected 1, found 2"),
    ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size.*expected 0, found 64"),
    ({"qkv_bias": True}, "qkv_bias is not supported, expected False, found True"),
    ({"use_qk_norm": False}, "use_qk_norm is not supported, expected True, found False"),
    ({"attention_bias": True}, "attention_bias"),
    ({"num_experts": 4}, "missing: layers.0.mlp.experts.3.gate_proj.weight"),
    ({"num_experts": 2}, "left over: model.layers.0.mlp.experts.2.gate_proj.weight"),
    ({"moe_intermediate_size": 128}, r"shape of model.layers.0.mlp.experts.0.gate_proj.weight"),
    ({"architectures": ["Qwen3ForCausalLM"], "intermediate_size": 64},
     "missing: layers.0.mlp.gate_proj.weight.*left over: model.layers.0.mlp.gate.weight"),
]


def with_config(folder: Path, changes: dict) -> Path:
    """Changes a saved checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("changes, patterns", [(c, p) for c, *p in BAD_CONFIG])
def test_config_refused(checkpoint, run, tmp_path, changes, patterns):
    refused(run(with_config(checkpoint().save(tmp_path / "in"), changes), "out.bin"), *patterns)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("changes, pattern", BAD_EXPERTS)
def test_experts_refused(checkpoint, run, tmp_path, changes, pattern):
    folder = checkpoint(**experts(3, used=2, qkv_bias=False, use_qk_norm=True, mlp_only_layers=[],
                                  shared_expert_intermediate_size=0)).save(tmp_path / "in")
    assert run(folder, "out.bin")[0] == 0
    refused(run(with_config(folder, changes), "out.bin"), pattern)


def vision_language(ck, tied=True):
    """The checkpoint as the text part of a Qwen3-VL, in the layout of the published ones."""
    text = ck.config | {"model_type": "qwen3_vl_text", "rope_scaling": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
    for key in ("architectures", "tie_word_embeddings"):
        text.pop(key)
    ck.config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
                 "tie_word_embeddings": tied, "image_token_id": 151655, "vision_config": {"hidden_size": 8, "depth": 1}}
    ck.prefix = "model.language_model."
    return ck


@pytest.mark.parametrize("tied", [True, False])
def test_text_part_of_qwen3_vl(checkpoint, run, tmp_path, tied):
    """HF's logits for a text are those of a Qwen3 with the same weights: so is the file."""
    ck = checkpoint(tie_word_embeddings=tied)
    expected = ck.expected()
    ck = vision_language(ck, tied)
    stored = list(ck.stored())
    seen = np.ones((8, 8), "<u2")
    ck.stored = lambda: stored + [("model.visual.blocks.0.attn.qkv.weight", seen, None)]
    status, err = run(ck.save(tmp_path / "in", 2), "out.bin")
    assert status == 0 and "the text part alone" in err[0], err
    assert (tmp_path / "out.bin").read_bytes() == expected


@pytest.mark.parametrize("name, changes, pattern", [
    ("in", {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "found Qwen3VLMoeForConditionalGeneration$"),
    ("Qwen3-VL-Embedding-2B", {}, "Qwen3-VL that makes embeddings"), ("in", {"text_config": None}, "config.json: broken")])
def test_qwen3_vl_refused(checkpoint, run, tmp_path, name, changes, pattern):
    folder = vision_language(checkpoint()).save(tmp_path / name)
    refused(run(with_config(folder, changes), "out.bin"), pattern)


def test_router_that_is_not_finite(checkpoint, run, tmp_path):
    ck = checkpoint(**experts(3))
    ck.tensors["layers.1.mlp.gate.weight"][2, 7] = np.nan
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "model.layers.1.mlp.gate.weight", "NaN")


@pytest.mark.parametrize("changes, missing, left_over", [
    ({"head_dim": 32}, "layers.0.self_attn.k_proj.bias", "k_norm"), ({}, "proj.bias", "norm")])
def test_qwen2_with_qwen3_s_tensors(checkpoint, run, tmp_path, changes, missing, left_over):
    folder = checkpoint(**changes).save(tmp_path / "in")
    with_config(folder, {"architectures": ["Qwen2ForCausalLM"]})
    refused(run(folder, "out.bin"), f"missing:.*{missing}.*left over:.*{left_over}")


def spoil_tensors(ck, how):
    t = ck.tensors
    if how == "missing":
        del t["layers.1.mlp.up_proj.weight"], t["norm.weight"]
    elif how == "left over":
        t["layers.0.self_attn.q_proj.bias"] = np.zeros(4, np.float32)
    elif how == "many left over":
        for i in range(30):
            t[f"layers.0.mlp.experts.{i}.weight"] = np.zeros(4, np.float32)
    elif how == "shape":
        t["layers.0.mlp.down_proj.weight"] = t["layers.0.mlp.up_proj.weight"]
    elif how == "infinity":
        t["layers.1.mlp.up_proj.weight"][7, 3] = np.inf
    elif how == "nan in a norm":
        t["norm.weight"][1] = np.nan
    elif how == "untied without lm_head":
        ck.config["tie_word_embeddings"] = False


@pytest.mark.parametrize("how, patterns", [
    ("missing", ["missing: ", "layers.1.mlp.up_proj.weight", "norm.weight", "left over: none"]),
    ("left over", ["missing: none", "left over: model.layers.0.self_attn.q_proj.bias"]),
    ("many left over", ["experts.0.weight", "24 more"]),
    ("shape", [r"model.layers.0.mlp.down_proj.weight", r"\[64, 192\], found \[192, 64\]"]),
    ("infinity", ["model.layers.1.mlp.up_proj.weight", "infinity or NaN"]),
    ("nan in a norm", ["model.norm.weight", "infinity or NaN"]),
    ("untied without lm_head", ["missing: lm_head.weight"]),
])
def test_tensors_refused(checkpoint, run, tmp_path, how, patterns):
    ck = checkpoint()
    spoil_tensors(ck, how)
    refused(run(ck.save(tmp_path / "in"), "out.bin"), *patterns)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def edit_header(data: bytes, change) -> bytes:
    length, = struct.unpack_from("<Q", data)
    head = json.loads(data[8:8 + length])
    change(head)
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length:]


NORM = "model.norm.weight"


def set_offsets(begin, end):
    def change(head):
        old = head[NORM]["data_offsets"]
        head[NORM]["data_offsets"] = [old[0] + begin, old[1] + end]
    return lambda data: edit_header(data, change)


def entry(**changes):
    return lambda data: edit_header(data, lambda head: head[NORM].update(changes))


BAD_SAFETENSORS = {
    "web page": (lambda data: b"<!doctype html>\n<html>", "download it again"),
    "empty": (lambda data: b"", "broken safetensors"),
    "cut in the length": (lambda data: data[:5], "broken safetensors"),
    "cut in the header": (lambda data: data[:300], "broken safetensors"),
    "cut in the data": (lambda data: data[:-1], "truncated.*download it again"),
    "longer": (lambda data: data + b"x", "oversized"),
    "huge header": (lambda data: b"\xff" * 8 + data[8:], "18446744073709551615"),
    "no json": (lambda data: data[:8] + b"}" + data[9:], "JSONDecodeError"),
    "not utf-8": (lambda data: data[:8] + b"\xff" + data[9:], "UnicodeDecodeError|JSONDecode"),
    "a list": (lambda data: struct.pack("<Q", 2) + b"[]" + data, "list"),
    "deep": (lambda data: struct.pack("<Q", 200000) + b"[" * 200000, "RecursionError"),
    "overlap": (set_offsets(-2, 0), "data_offsets of model.norm.weight"),
    "hole": (set_offsets(2, 0), "data_offsets of model.norm.weight"),
    "too long": (set_offsets(0, 2), NORM),
    "backwards": (set_offsets(0, -4096), "data_offsets"),
    "out of range": (set_offsets(10 ** 9, 10 ** 9), "data_offsets of model"),
    "one offset": (entry(data_offsets=[1]), "broken"),
    "text offsets": (entry(data_offsets="ab"), "broken"),
    "no shape": (lambda d: edit_header(d, lambda h: h[NORM].pop("shape")), "KeyError"),
    "shape of text": (entry(shape=["x"]), "broken"),
    "entry is a number": (lambda d: edit_header(d, lambda h: h.update({NORM: 3})), "broken"),
    "fp8": (entry(dtype="F8_E4M3"), "dtype of model.norm.weight.*BF16, F16, F32 .*, found F8_E4M3"),
    "f64": (entry(dtype="F64"), "F64"),
    "both names": (lambda d: edit_header(d, lambda h: h.update(
        {"norm.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}})), "both with and without"),
}


@pytest.mark.parametrize("which", BAD_SAFETENSORS)
def test_broken_safetensors_refused(checkpoint, run, tmp_path, which):
    spoil, pattern = BAD_SAFETENSORS[which]
    folder = checkpoint().save(tmp_path / "in")
    file = folder / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    refused(run(folder, "out.bin"), "model.safetensors" if which not in ("fp8", "f64", "both names")
            else "in:", pattern)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_K", "IQ1_S", "I8", "F64"])
def test_dtypes_that_safetensors_does_not_have(checkpoint, run, tmp_path, dtype):
    """Though a GGUF file may: such a matrix would be garbage."""
    file = checkpoint().save(tmp_path / "in") / "model.safetensors"
    file.write_bytes(edit_header(file.read_bytes(), lambda head: head["model.embed_tokens.weight"].update(dtype=dtype)))
    refused(run("in"), f"dtype of model.embed_tokens.weight, expected BF16, F16, F32 .*, found {dtype}$")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name, content, patterns", [
    ("model-00002-of-00002.safetensors", None, ["model-00002-of-00002", "missing"]),
    ("model.safetensors.index.json", None, ["no weights, expected a directory of safetensors"]),
    ("model.safetensors.index.json", {"metadata": {}}, ["KeyError.*weight_map"]),
    ("model.safetensors.index.json", {"weight_map": {"a": "../a.safetensors"}}, ["missing"]),
    ("model.safetensors.index.json", {"weight_map": ["a"]}, ["broken"]),
    ("model.safetensors.index.json", "add", ["other tensors.*difference in extra.weight$"]),
    ("model.safetensors.index.json", "move", ["other tensors.*difference in model.norm.weight$"]),
])
def test_broken_shards_refused(checkpoint, run, tmp_path, name, content, patterns):
    folder = checkpoint().save(tmp_path / "in", 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    if content == "add":
        content = {"weight_map": index["weight_map"] | {"extra.weight": first}}
    elif content == "move":
        index["weight_map"][NORM] = second if index["weight_map"][NORM] == first else first
        content = index
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(json.dumps(content))
    refused(run(folder, "out.bin"), *patterns)


def change_merge(t):
    t["model"]["merges"][5] = ["Ġ", "zzz"]


BAD_TOKENIZER = {
    "model": (lambda t: t["model"].update(type="WordPiece"), "WordPiece"),
    "dropout": (lambda t: t["model"].update(dropout=0.1), "model.dropout"),
    "unk": (lambda t: t["model"].update(unk_token="<unk>"), "model.unk_token"),
    "prefix": (lambda t: t["model"].update(continuing_subword_prefix="##"), "##"),
    "suffix": (lambda t: t["model"].update(end_of_word_suffix="</w>"), "</w>"),
    "byte fallback": (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
    "ignore_merges": (lambda t: t["model"].update(ignore_merges=True), "ignore_merges"),
    "normalizer": (lambda t: t.update(normalizer={"type": "NFKC"}), "normalizer.*NFKC"),
    "no pre_tokenizer": (lambda t: t.update(pre_tokenizer=None), "pre_tokenizer"),
    "regex": (lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(
        pattern={"Regex": r"\p{L}+"}), "pre_tokenizer"),
    "prefix space": (lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(
        add_prefix_space=True), "pre_tokenizer"),
    "lstrip": (lambda t: t["added_tokens"][3].update(lstrip=True), "lstrip.*object_ref_start"),
    "normalized": (lambda t: t["added_tokens"][3].update(normalized=True), "normalized"),
    "long added": (lambda t: t["added_tokens"][3].update(content="é" * 64 + "x"), "up to 128 bytes"),
    "empty added": (lambda t: t["added_tokens"][3].update(content=""), "tokens"),
    "id used twice": (lambda t: t["added_tokens"][3].update(id=5), "id of its own"),
    "id too large": (lambda t: t["added_tokens"][3].update(id=10 ** 6), "vocab_size"),
    "negative id": (lambda t: t["added_tokens"][3].update(id=-1), "ids"),
    "byte missing": (lambda t: t["model"]["vocab"].pop("Ń"), "256 single bytes|merges"),
    "foreign letter": (lambda t: t["model"]["vocab"].update({"a b": 1}), "merges|broken"),
    "unknown merge": (change_merge, "merge 5.*zzz"),
    "merge dropped": (lambda t: t["model"]["merges"].pop(), "merges that make it"),
    "merge split": (lambda t: t["model"]["merges"].__setitem__(0, ["a"]), "broken"),
    "no model": (lambda t: t.pop("model"), "KeyError"),
    "vocabulary is a list": (lambda t: t["model"].update(vocab=["a"]), "broken"),
    "post-processor": (lambda t: t.update(post_processor={"type": "Magic"}),
                       "post_processor .*ByteLevel or TemplateProcessing, found 'Magic'"),
}


@pytest.mark.parametrize("which", BAD_TOKENIZER)
def test_tokenizer_refused(checkpoint, run, tmp_path, which):
    ck = checkpoint()
    spoil, pattern = BAD_TOKENIZER[which]
    spoil(ck.tokenizer)
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "tokenizer.json", pattern)


def test_a_token_that_its_merges_do_not_make_is_refused(checkpoint, run, tmp_path):
    """Here "any two neighbours that make a token" would differ from the list of merges: x+yx comes
    to lie side by side as (xy, x) only, as xy is merged first."""
    ck = checkpoint()
    vocab, merges = ck.tokenizer["model"]["vocab"], ck.tokenizer["model"]["merges"]
    for token, merge in (("QX", ["Q", "X"]), ("XQ", ["X", "Q"]), ("QXQ", ["Q", "XQ"])):
        vocab[token] = max(t["id"] for t in ck.tokenizer["added_tokens"]) + 1 + len(token)
        merges.append(merge)
    vocab["XQ"] += 2
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "token 'QXQ'", "merges that make it")
    merges[-1] = ["QX", "Q"]
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0
    merges[-1:] = [["QX", "Q"], ["Q", "XQ"]]  # both ways, one after the other: one rank would do
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0
    merges.insert(0, ["Q", "XQ"])
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "makes 'QXQ' again")


@pytest.mark.parametrize("name, content, patterns", [
    ("config.json", None, ["not a checkpoint", "config.json"]),
    ("config.json", "{", ["config.json: broken", "JSONDecodeError"]),
    ("config.json", "[1]", ["list"]),
    ("tokenizer.json", None, ["tokenizer.json: missing"]),
    ("tokenizer.json", '{"model": ', ["tokenizer.json: broken"]),
    ("tokenizer_config.json", "\x00", ["tokenizer_config.json: broken"]),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "<new>", "special": 1}}}',
     ["<new>"]),
    ("tokenizer_config.json", '{"eos_token": "<none>"}', ["<none>"]),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "<think>", "special": 1}'
     '}}', ["<think>"]),
    ("generation_config.json", '{"temperature": -1}', ["temperature", "-1"]),
    ("generation_config.json", '{"temperature": "hot"}', ["temperature", "a number", "'hot'"]),
    ("generation_config.json", '{"repetition_penalty": 0}', ["repetition_penalty", "0"]),
    ("generation_config.json", '{"repetition_penalty": "1.1"}', ["repetition_penalty", "'1.1'"]),
    ("modules.json", "[1]", ["modules.json: broken"]),
    ("modules.json", '[{"type": "x.Pooling", "path": "1_Pooling"}]', ["1_Pooling/config.json"]),
    ("generation_config.json", '{"eos_token_id": ["x"]}', ["token id", "'x'"]),
    ("generation_config.json", '{"eos_token_id": [99999999]}', ["99999999"]),
])
def test_broken_files_refused(checkpoint, run, tmp_path, name, content, patterns):
    folder = checkpoint().save(tmp_path / "in")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    refused(run(folder, "out.bin"), *patterns)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_old_files_are_refused_by_name(checkpoint, run, tmp_path):
    ck = checkpoint()
    ck.files["pytorch_model.bin"] = ""
    folder = ck.save(tmp_path / "in")
    (folder / "model.safetensors").unlink()
    refused(run(folder, "out.bin"), "no weights.*save_pretrained", "found .*pytorch_model.bin")
    ck.files |= {"tokenizer.json": None, "vocab.json": {}, "merges.txt": "a b"}
    refused(run(ck.save(tmp_path / "slow"), "out.bin"), "vocab.json")


def test_names_with_control_characters_stay_one_line(checkpoint, run, tmp_path):
    ck = checkpoint()
    ck.tensors["evil\n\x1b[31m"] = np.zeros(3, np.float32)
    refused(run(ck.save(tmp_path / "in"), "out.bin"), r"evil\\n\\x1b\[31m")
    ck.tensors["z" * 9999] = ck.tensors.pop("evil\n\x1b[31m")
    status, err = run(ck.save(tmp_path / "in"), "out.bin")
    assert status == 1 and len(err[0]) < 1100
    refused(run("x" * 5000), r"xx \.\.\. xx.*: can't be read.*found File name too long$")


@pytest.mark.parametrize("where", ["read_config", "header", "quantize", "chat_pieces"])
def test_our_own_bugs(checkpoint, run, tmp_path, monkeypatch, where):
    """They are not blamed on a file. --traceback shows where they are."""
    folder = checkpoint().save(tmp_path / "in")

    def a_bug(*_):
        return {}["a bug"]
    monkeypatch.setattr(export, where, a_bug)
    refused(run(folder, "out.bin"), "^export.py: out.bin: export.py failed, .*--traceback.*found KeyError: 'a bug'$")
    status, err = run(folder, "out.bin", "--traceback")
    assert status == 1 and err[0].startswith("Traceback") and any("in a_bug" in line for line in err), err
    assert "export.py failed" in err[-1] and [p.name for p in tmp_path.iterdir()] == ["in"]


# ---------------------------------------------------------------------------- target

@pytest.mark.parametrize("args, expected", [
    (["in", "a.bin"], "a.bin"), (["b.bin", "in"], "b.bin"), (["in"], "in.bin"),
    (["in/"], "in.bin"), (["in.bin", "in"], "in.bin"), (["in", "deep/c.bin"], "deep/c.bin")])
def test_order_of_arguments_and_default_name(checkpoint, run, tmp_path, args, expected):
    checkpoint().save(tmp_path / "in")
    (tmp_path / "deep").mkdir()
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    status, err = run(*args)
    assert status == 0 and expected in err[0]
    new = {p for p in tmp_path.rglob("*") if p.is_file()} - before
    assert new == {tmp_path / expected, tmp_path / f"{expected}.tokenizer"}


@pytest.mark.parametrize("args", [[], ["a", "b.bin", "c"], ["a", "b"], ["--what", "a"], ["-x"], [""]])
def test_usage_errors(run, args):
    status, err = run(*args)
    assert status == 2 and len(err) == 1 and err[0].startswith("export.py: ")


@pytest.mark.parametrize("name", ["\x1b[31m", "\u202ecod", "\u2066", "\x9b", "\udcff"])
@pytest.mark.parametrize("args", [["in", "x{}"], ["in", "--plot", "{}.jpg"], ["--{}"], ["--bits", "{}"],
                                  ["missing{}"], ["in", "{}.bin"]])
def test_names_drive_no_terminal(checkpoint, run, tmp_path, name, args):
    """Neither in usage errors nor in refusals nor in the summary."""
    checkpoint().save(tmp_path / "in")
    status, err = run(*(arg.format(name) for arg in args))
    assert status == (0 if args[-1] == "{}.bin" else 1 if "missing" in args[-1] else 2)
    assert all(line.isprintable() for line in err) and repr(name)[1:-1] in err[0], err


def test_ctrl_c_while_the_arguments_are_read():
    """argparse's clean-up fails on a signal's exception at the wrong moment."""
    code = ("import argparse, os, runpy, signal, sys, time\n"
            "def interrupted(self):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
            "argparse.ArgumentParser.format_usage = interrupted\n"
            "sys.argv = ['export.py', 'in']\n"
            f"runpy.run_path({str(ROOT / 'export.py')!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "")


def test_windows():
    """It has no os.pread: it is said at once."""
    code = f"import os, runpy; os.name = 'nt'; runpy.run_path({str(ROOT / 'export.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "in"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch("export.py: Windows: not supported, expected Linux.* found Windows\n", done.stderr), done


def test_help_is_on_stdout():
    done = export_process("-h")
    assert done.returncode == 0 and "export.py SOURCE [OUT.bin]" in done.stdout
    assert done.stderr == ""


def test_existing_files_are_replaced_only_by_a_complete_export(checkpoint, run, tmp_path):
    (tmp_path / "out.bin").write_text("old model")
    (tmp_path / "out.bin.tokenizer").write_text("old tokenizer")
    ck = checkpoint()
    spoil_tensors(ck, "infinity")
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "infinity")
    assert (tmp_path / "out.bin").read_text() == "old model"
    assert (tmp_path / "out.bin.tokenizer").read_text() == "old tokenizer"
    assert run(checkpoint().save(tmp_path / "in"), "out.bin")[0] == 0
    assert (tmp_path / "out.bin").read_bytes() == checkpoint().expected()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out.bin", "out.bin.tokenizer"]


def test_parts_that_others_left_or_hold(checkpoint, run, tmp_path):
    """What a killed process left is used again. What one still writes stays as it is: a lock says so, as a pid
    means nothing in a container."""
    ck = checkpoint()
    folder, parts = ck.save(tmp_path / "in"), [tmp_path / name for name in ("out.bin.part", "out.bin.tokenizer.part")]
    for held in parts:
        for part in parts:
            part.write_bytes(b"x" * 10_000_000)
        with open(held, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            refused(run(folder, "out.bin"), f"{held.name}: in use")
            assert held.read_bytes() == b"x" * 10_000_000 and not (tmp_path / "out.bin").exists()
    assert run(folder, "out.bin")[0] == 0
    assert (tmp_path / "out.bin").read_bytes() == ck.expected()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out.bin", "out.bin.tokenizer"]


def test_names_come_after_the_contents(checkpoint, run, tmp_path, monkeypatch):
    """Both files are on the disk before the first gets its name."""
    folder, done = checkpoint().save(tmp_path / "in"), []
    for name in "fsync", "replace":
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, call=call, name=name: (done.append(name), call(*args)))
    assert run(folder, "out.bin")[0] == 0 and done == ["fsync", "fsync", "replace", "replace"]


def test_too_little_space_is_found_before_writing(checkpoint, run, tmp_path, monkeypatch):
    folder = checkpoint().save(tmp_path / "in")
    assert run(folder, "out.bin")[0] == 0
    size = sum((tmp_path / name).stat().st_size for name in ("out.bin", "out.bin.tokenizer"))
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export, "write_model", lambda *_: pytest.fail("it wrote"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=size - 1))
    refused(run(folder, "new.bin"), "disk space", f"{size} bytes", f"{size - 1} free")
    monkeypatch.undo()


@pytest.mark.parametrize("out, pattern", [
    ("nowhere/out.bin", "nowhere: missing"), ("file/out.bin", "Not a directory"),
    ("folder.bin", "a directory"), ("longname" * 40 + ".bin", "name too long")])
def test_target_that_cannot_be_written(checkpoint, run, tmp_path, out, pattern):
    folder = checkpoint().save(tmp_path / "in")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.bin").mkdir()
    refused(run(folder, out), pattern)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.parent != folder) == [
        "file", "folder.bin", "in"]


def test_source_that_is_neither_here_nor_a_hub_name(run, tmp_path):
    (tmp_path / "some.txt").write_text("This is a text, no GGUF file.")
    refused(run("no such place", "out.bin"), "a GGUF file or a hub name", "found nothing$")
    refused(run("./org/name", "out.bin"), "a GGUF file or a hub name")
    refused(run("some.txt", "out.bin"), "a checkpoint's directory or a GGUF file", "b'This'")


def sparse_checkpoint(ck, folder: Path, **config) -> Path:
    """Large weights that take no space: an embedding of 240 MB in two dozen layers' company, as
    holes in two shards."""
    ck.config |= {"hidden_size": 1024, "vocab_size": 120_000, "num_hidden_layers": 24} | config
    shapes = dict(ck.shapes())
    ck.tensors = {}
    ck.save(folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for i in (0, 1):
        shard, head, end = f"model-{i}.safetensors", {}, 0
        for name in sorted(shapes)[i::2]:
            size = 2 * math.prod(shapes[name])
            head["model." + name] = {"dtype": "BF16", "shape": shapes[name],
                                     "data_offsets": [end, end + size]}
            places["model." + name], end = shard, end + size
        text = json.dumps(head).encode()
        with open(folder / shard, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_more_shards_than_files_that_may_be_open(checkpoint, tmp_path):
    ck = checkpoint()
    folder = ck.save(tmp_path / "in", len(ck.tensors))
    done = export_process(folder, "out.bin", cwd=tmp_path, preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(ck.tensors), len(ck.tensors))))
    assert done.returncode == 0 and (tmp_path / "out.bin").read_bytes() == ck.expected(), done


@pytest.mark.parametrize("cores, threads", [(1, 1), (7, 7), (None, 1), (128, 64)])
def test_a_thread_for_each_core(checkpoint, run, tmp_path, monkeypatch, cores, threads):
    folder, found = checkpoint().save(tmp_path / "in"), []
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(export, "ThreadPoolExecutor", lambda n: (found.append(n), ThreadPoolExecutor(n))[1])
    assert run(folder, "out.bin")[0] == 0 and found == [threads]


def test_bf16_needs_no_package(checkpoint, run, tmp_path, monkeypatch):
    """Its floats are shifted: four times as fast as the gguf package."""
    ck = checkpoint("BF16")
    monkeypatch.setattr(export.gguf, "dequantize", lambda *_: pytest.fail("it is called"))
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0 and (tmp_path / "out.bin").read_bytes() == ck.expected()


@pytest.mark.slow
@measures
def test_memory_stays_small_whatever_the_size(checkpoint, tmp_path):
    """264 MB of weights, one tensor of 246 MB (492 in fp32): far more than this allows."""
    folder = sparse_checkpoint(checkpoint(), tmp_path / "in")
    done = export_process(folder, "out.bin", measure=True, cwd=tmp_path)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) < 200e6, done
    (tmp_path / "out.bin").unlink()


def test_progress_is_for_terminals_and_the_summary_for_logs(checkpoint, tmp_path):
    folder = checkpoint().save(tmp_path / "in")
    done = export_process(folder, "out.bin", cwd=tmp_path)
    assert done.stdout == "" and "wrote out.bin" in done.stderr.splitlines()[0]
    assert "\r" not in done.stderr and "B/s" not in done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    child = subprocess.Popen([sys.executable, ROOT / "export.py", folder, "out.bin"], cwd=tmp_path,
                             stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while block := os.read(ours, 4096):
            seen += block
    except OSError:  # Linux's way to say that the other side is closed
        pass
    assert child.wait(300) == 0 and b"100%" in seen and b"B/s" in seen


@pytest.mark.parametrize("file, content, said", [
    ("jinja2.py", "raise ImportError(\"No module named 'jinja2'\")", "No module named 'jinja2'"),
    ("jinja2-3.1.5.dist-info/METADATA", "Name: jinja2\nVersion: 3.1.5\n",
     "jinja2 3.1.5 is older than 3.1.6")])
def test_missing_packages_are_named_from_the_block_at_the_top(tmp_path, file, content, said):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    done = export_process("in", "out.bin", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"export.py: {said}: run it as `uv run export.py ...`")
    assert re.search("pip install 'numpy>=[0-9.]+' 'tokenizers>=.*' 'jinja2>=3.1.6' ", done.stderr)


# ---------------------------------------------------------------------------- vocabulary

@pytest.fixture(scope="session")
def exported(tokenizer_json, tmp_path_factory):
    """(checkpoint, its .tokenizer file read back)"""
    ck = Checkpoint(tokenizer_json)
    folder = ck.save(tmp_path_factory.mktemp("exported"))
    export.notes.clear()
    data = export.tokenizer_file(export.read_folder(folder), ck.config["vocab_size"])
    return ck, read_tokenizer(data, ck.config["vocab_size"])


def test_vocabulary(exported, tokenizer_json):
    ck, (head, records, sections) = exported
    tok = tokenizers.Tokenizer.from_str(tokenizer_json)
    assert head[1:] == (ck.eos - 2, ck.eos)
    merges = [tuple(m) for m in ck.tokenizer["model"]["merges"]]
    letters = {b: tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
               .pre_tokenize_str(chr(b))[0][0] for b in range(128)}
    assert all(records[tok.token_to_id(letter)] == (-1e6, bytes([b]))
               for b, letter in letters.items())
    for rank, (a, b) in enumerate(merges):
        made = records[tok.token_to_id(a + b)]
        assert made[0] == np.float32(-math.log(rank + 1))
        assert made[1] == records[tok.token_to_id(a)][1] + records[tok.token_to_id(b)][1]
    for text, _ in ADDED:
        assert records[tok.token_to_id(text)] == (-1e6, text.encode())
    assert records[-5:] == [(-1e6, b"")] * 5
    assert rows(sections["adde"], 2) == [(tok.token_to_id(text), special) for text, special in ADDED]


def test_best_score_first_gives_the_ids_of_the_merge_list(exported, tokenizer_json):
    _, (_, records, sections) = exported
    tok = tokenizers.Tokenizer.from_str(tokenizer_json)
    added = {i for i, _ in rows(sections["adde"], 2)}
    ids = {token: i for i, (_, token) in enumerate(records) if token and i not in added}
    rng = random.Random(5)
    alphabet = "".join(sorted(set(SENTENCES)))
    for _ in range(300):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 9)))
        parts = [bytes([b]) for b in text.encode()]
        while True:
            pairs = [(records[ids[a + b]][0], -i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
                     if a + b in ids]
            if not pairs:
                break
            i = -max(pairs)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        letters = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0]
        assert [ids[p] for p in parts] == [t.id for t in tok.model.tokenize(letters)], text


def sections_of(ck, tmp_path):
    export.notes.clear()
    source = export.read_folder(ck.save(tmp_path))
    data = export.tokenizer_file(source, ck.config["vocab_size"])
    return read_tokenizer(data, ck.config["vocab_size"])


@pytest.mark.parametrize("generation, config, settings, stop", [
    ({"eos_token_id": [2, 0]}, {"eos_token_id": 2}, {"eos_token": "<|im_end|>"}, [2, 0]),
    ({"eos_token_id": 0}, {"eos_token_id": 0}, {"eos_token": "<|im_end|>"}, [0, 2]),
    ({"eos_token_id": [1, 0]}, {"eos_token_id": 2}, {}, [1, 0, 2]),
    ({"eos_token_id": 0}, {"eos_token_id": 0}, {"eos_token": {"content": "<|endoftext|>"}}, [0]),
    ({}, {"eos_token_id": [2, 1]}, {}, [2, 1]),
    ({}, {"eos_token_id": None}, {}, [0]),
    ({"eos_token_id": 1}, {"eos_token_id": None}, {}, [1]),
])
def test_stop_ids(checkpoint, tmp_path, generation, config, settings, stop):
    ck = checkpoint()
    base = ck.eos - 2

    def ids(value):
        return [base + i for i in value] if isinstance(value, list) else (
            None if value is None else base + value)
    ck.generation = {k: ids(v) for k, v in generation.items()}
    ck.config |= {k: ids(v) for k, v in config.items()}
    ck.settings = settings
    head, _, sections = sections_of(ck, tmp_path)
    assert [i - base for i, in rows(sections["stop"], 1)] == stop
    first = config["eos_token_id"] if config["eos_token_id"] is not None else (
        generation.get("eos_token_id", 0))
    assert head[2] - base == (first[0] if isinstance(first, list) else first)


@pytest.mark.parametrize("generation, values", [
    ({}, None), ({"eos_token_id": 1}, None),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
    ({"do_sample": True}, (1.0, 1.0, 50)), ({"temperature": 0.7}, (0.7, 1.0, 50)),
    ({"do_sample": True, "top_k": None, "top_p": 0.8}, (1.0, 0.8, 50)),
    ({"do_sample": False, "temperature": 0.6, "top_k": 0}, (0.0, 1.0, 0)),
])
def test_sampling_defaults(generation, values):
    data = export.sampling(Path("generation_config.json"), generation)
    assert data == (b"" if values is None else struct.pack("<2fI", *values))


@pytest.mark.parametrize("value, expected", [
    (None, b""), (1.0, b""), (1, b""), (1.05, struct.pack("<f", 1.05)), (2, struct.pack("<f", 2))])
def test_repetition_penalty(checkpoint, tmp_path, value, expected):
    ck = checkpoint()
    ck.generation["repetition_penalty"] = value
    assert sections_of(ck, tmp_path)[2].get("repe", b"") == expected
    assert not any("penalty" in note for note in export.notes)


@pytest.mark.parametrize("template, generation, config, settings, mode, noted", [
    (True, [2, 0], 2, "<|im_end|>", 0, ""), (True, 0, 0, "<|endoftext|>", 1, "base model"),
    (True, None, 2, "<|endoftext|>", 0, ""), (True, 0, 0, "<|im_end|>", 0, ""),
    (False, [2, 0], 2, "<|im_end|>", 1, "no chat template")])
def test_mode(checkpoint, tmp_path, template, generation, config, settings, mode, noted):
    """A base model's ids that end a text do not hold the end of a turn; or it has no template."""
    ck = checkpoint()
    base = ck.eos - 2
    ck.generation["eos_token_id"] = None if generation is None else (
        [base + i for i in generation] if isinstance(generation, list) else base + generation)
    ck.config["eos_token_id"] = base + config
    ck.settings = {"eos_token": settings} | ({"chat_template": CHATML} if template else {})
    sections = sections_of(ck, tmp_path)[2]
    assert sections.get("mode") == (struct.pack("<I", mode) if mode else None)
    assert len(export.notes) == bool(noted) and all(noted in note for note in export.notes)


def sentence_transformers(ck, pooling, *modules):
    """Makes it an embedding model, as sentence-transformers saves one."""
    ck.files["modules.json"] = json.dumps([
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "",
         "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(modules)])
    ck.files["1_Pooling/config.json"] = json.dumps(pooling)
    return ck


LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True, "include_prompt": True}
MEAN = LAST | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_model(checkpoint, run, tmp_path, tied):
    """It needs no lm_head, whatever the tied flag says: the file has a shared classifier."""
    ck = sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling", "Normalize")
    expected = ck.expected()
    ck.config["tie_word_embeddings"], ck.settings["chat_template"] = tied, CHATML
    (tmp_path / "in/1_Pooling").mkdir(parents=True)
    status, err = run(ck.save(tmp_path / "in"), "out.bin")
    assert status == 0 and len(err) == 1, err
    assert (tmp_path / "out.bin").read_bytes() == expected
    data = (tmp_path / "out.bin.tokenizer").read_bytes()
    assert read_tokenizer(data, ck.config["vocab_size"])[2]["mode"] == struct.pack("<I", 4)


@pytest.mark.parametrize("architecture, prefix, mode", [
    ("Qwen3Model", "", "lasttoken"), ("Qwen3Model", "model.", ["lasttoken"]), ("Qwen3ForCausalLM", "model.", "lasttoken")])
def test_embedding_model_of_sentence_transformers_6(checkpoint, run, tmp_path, architecture, prefix, mode):
    """One key for the pooling, and the architecture without a head."""
    ck = sentence_transformers(checkpoint(architectures=[architecture]), {
        "embedding_dimension": 64, "pooling_mode": mode, "include_prompt": True}, "Transformer", "Pooling", "Normalize")
    ck.prefix = prefix
    (tmp_path / "in/1_Pooling").mkdir(parents=True)
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0
    assert (tmp_path / "out.bin").read_bytes() == ck.expected()
    data = (tmp_path / "out.bin.tokenizer").read_bytes()
    assert read_tokenizer(data, ck.config["vocab_size"])[2]["mode"] == struct.pack("<I", 4)


@pytest.mark.parametrize("pooling, modules, patterns", [
    (MEAN, ["Pooling"], ["1_Pooling/config.json", "pooling", "lasttoken", "mean_tokens"]),
    (LAST | {"pooling_mode_mean_tokens": True}, ["Pooling"], ["expected lasttoken, found 'mean_tokens, lasttoken'$"]),
    ({"pooling_mode": "mean"}, ["Pooling"], ["expected lasttoken, found 'mean'$"]),
    ({"pooling_mode": ["cls", "lasttoken"]}, ["Pooling"], ["expected lasttoken, found 'cls, lasttoken'$"]),
    (LAST, ["Pooling", "Dense"], ["modules.json", "Dense"]), ({}, ["Pooling"], ["lasttoken, found ''$"])])
def test_embedding_refused(checkpoint, run, tmp_path, pooling, modules, patterns):
    ck = sentence_transformers(checkpoint(), pooling, "Transformer", *modules)
    (tmp_path / "in/1_Pooling").mkdir(parents=True)
    refused(run(ck.save(tmp_path / "in"), "out.bin"), *patterns)


def test_modules_without_pooling_make_no_embedding_model(checkpoint, tmp_path):
    ck = sentence_transformers(checkpoint(), {}, "Transformer", "Normalize")
    del ck.files["1_Pooling/config.json"]
    ck.settings["chat_template"] = CHATML
    assert "mode" not in sections_of(ck, tmp_path)[2]


def test_special_tokens_by_role_and_by_the_second_list(checkpoint, tmp_path):
    ck = checkpoint()
    think, think_end, call = (next(t for t in ck.tokenizer["added_tokens"] if t["content"] == text)
                              for text in ("<think>", "</think>", "<tool_call>"))
    ck.settings = {"added_tokens_decoder": {str(think["id"]): think | {"special": True}},
                   "additional_special_tokens": ["</think>"]}
    special = dict(rows(sections_of(ck, tmp_path)[2]["adde"], 2))
    assert (special[think["id"]], special[think_end["id"]], special[call["id"]]) == (1, 1, 0)


def test_post_processor(checkpoint, tmp_path, exported):
    ck = checkpoint()
    sections = exported[1][2]
    assert "head" not in sections and "tail" not in sections
    begin, end = ck.eos - 1, ck.eos - 2
    ck.tokenizer["post_processor"] = {"type": "Sequence", "processors": [
        ck.tokenizer["post_processor"],
        {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "B", "type_id": 0}}, {"SpecialToken": {"id": "E", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "E", "type_id": 0}}],
         "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
         "special_tokens": {"B": {"id": "B", "ids": [begin], "tokens": ["<|im_start|>"]},
                            "E": {"id": "E", "ids": [end], "tokens": ["<|endoftext|>"]}}}]}
    sections = sections_of(ck, tmp_path)[2]
    tok = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tok.encode("").ids == [begin, end, end]
    assert rows(sections["head"], 1) == [(begin,), (end,)]
    assert rows(sections["tail"], 1) == [(end,)]


# ---------------------------------------------------------------------------- Unicode

def test_character_classes(exported):
    sections = exported[1][2]
    kind, last = {}, -1
    for first, end, number in rows(sections["clas"], 3):
        assert last < first <= end and number in (1, 2, 3)
        last = end
        kind |= dict.fromkeys(range(first, end + 1), number)
    rng = random.Random(1)
    chars = [*range(0x300), 0x3000, 0xFEFF, 0x180E, 0x85, 0x1C, 0xBD, 0x10FFFF, 0x2F800, 0x323AF,
             0xE0101, 0x1E950, 0x1D7CE, *(rng.randrange(0x20000) for _ in range(4000))]
    splits = {n: pre_tokenizers.Split(Regex(p), "removed", invert=True)
              for n, p in ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s"))}
    for c in chars:
        if not 0xD800 <= c < 0xE000:
            wanted = [n for n, split in splits.items() if split.pre_tokenize_str(chr(c))]
            assert [kind[c]] == wanted if c in kind else wanted == [], hex(c)


class Normalizer:
    """NFC as a program does it that has nothing but the sections."""

    def __init__(self, sections):
        self.ccc, self.steps, self.pairs, last = {}, {}, {}, -1
        for first, end, number in rows(sections["ccc "], 3):
            assert last < first <= end and 1 <= number <= 254
            last = end
            self.ccc |= dict.fromkeys(range(first, end + 1), number)
        last = -1
        for c, first, second, composes in rows(sections["deco"], 4):
            assert last < c and composes in (0, 1) and not 0xAC00 <= c < 0xD7A4
            last, self.steps[c] = c, [first, second] if second else [first]
            if composes:
                assert (first, second) not in self.pairs
                self.pairs[first, second] = c

    def decompose(self, c):
        if 0xAC00 <= c < 0xD7A4:
            s = c - 0xAC00
            tail = [0x11A7 + s % 28] if s % 28 else []
            return [0x1100 + s // 588, 0x1161 + s % 588 // 28, *tail]
        return [x for step in self.steps[c] for x in self.decompose(step)] if c in self.steps else [c]

    def compose(self, a, b):
        if 0x1100 <= a < 0x1113 and 0x1161 <= b < 0x1176:
            return 0xAC00 + (a - 0x1100) * 588 + (b - 0x1161) * 28
        if 0xAC00 <= a < 0xD7A4 and (a - 0xAC00) % 28 == 0 and 0x11A8 <= b < 0x11C3:
            return a + b - 0x11A7
        return self.pairs.get((a, b))

    def nfd(self, text):
        out, marks = [], []
        for c in [x for char in text for x in self.decompose(ord(char))] + [0]:
            if self.ccc.get(c):
                marks.append(c)
                continue
            out += sorted(marks, key=self.ccc.get) + [c]
            marks = []
        return out[:-1]

    def nfc(self, text):
        out, starter, last = [], None, 0
        for c in self.nfd(text):
            number = self.ccc.get(c, 0)
            if starter is not None and (last < number or last == 0 == len(out) - 1 - starter) and (
                    joined := self.compose(out[starter], c)):
                out[starter] = joined
                continue
            out.append(c)
            last = number
            if number == 0:
                starter = len(out) - 1
        return out


def test_normalization_from_the_sections_is_the_package_s(exported):
    ours = Normalizer(exported[1][2])
    nfc, nfd = normalizers.NFC(), normalizers.NFD()
    rng = random.Random(2)
    marks, parts = list(ours.ccc), list(ours.steps)
    firsts = [a for a, _ in ours.pairs] + [0x1100, 0x1161, 0x11A8, 0x11A7, 0xAC00, 0xAC01, 0xD7A3]
    texts = [chr(c) for c in range(0x3100) if not ours.ccc.get(c)] + [chr(c) for c in parts]
    texts += [chr(a) + chr(b) for a, b in ours.pairs]
    for _ in range(6000):
        pool = rng.choice([marks, parts, firsts, [rng.randrange(0x1F000) for _ in range(9)]])
        texts.append("".join(chr(c) for c in [rng.choice(firsts), *rng.choices(pool, k=2),
                                              *rng.choices(marks, k=rng.randrange(4))]
                             if not 0xD800 <= c < 0xE000))
    for text in texts:
        assert "".join(map(chr, ours.nfd(text))) == nfd.normalize_str(text), ascii(text)
        assert "".join(map(chr, ours.nfc(text))) == nfc.normalize_str(text), ascii(text)


@pytest.mark.parametrize("normalizer", [None, {"type": "Sequence", "normalizers": []}])
def test_no_normalizer_no_tables(checkpoint, tmp_path, normalizer):
    ck = checkpoint()
    ck.tokenizer["normalizer"] = normalizer
    sections = sections_of(ck, tmp_path)[2]
    assert sections["ccc "] == sections["deco"] == b"" and sections["clas"]


# ---------------------------------------------------------------------------- chat

CHATML = """{% for m in messages %}
{%- set text = m.content %}
{%- if m.role == 'assistant' and '</think>' in text %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
LINES = """  {% for m in messages %}
    {% set text = m.content %}
    {% if m.role == 'assistant' and '</think>' in text %}
      {% set text = text.split('</think>')[-1].lstrip('\\n') %}
    {% endif %}
<|im_start|>{{ m.role }}
{{ text }}<|im_end|>
  {% endfor %}
  {% if add_generation_prompt %}
<|im_start|>assistant
    {% if enable_thinking is defined and not enable_thinking %}
<think>

</think>

    {% endif %}
  {% endif %}
"""
OPEN, CLOSE = "<|im_start|>{}\n", "<|im_end|>\n"
ORDINARY = ["", "", OPEN.format("system"), CLOSE, OPEN.format("user"), CLOSE,
            OPEN.format("assistant"), CLOSE, OPEN.format("assistant") + "<think>\n\n</think>\n\n",
            OPEN.format("assistant"), "</think>", "\n"]


def change(strings, **new):
    names = export.Pieces._fields
    return [new.get(name, old) for name, old in zip(names, strings)]


CHATS = {
    "hybrid": (CHATML, ORDINARY),
    "tags on lines of their own": (LINES, ORDINARY),
    "spaces go too": (CHATML.replace("lstrip('", "lstrip(' "), change(ORDINARY, trim=" \n")),
    "verbatim": (CHATML.replace("'</think>' in text", "false"), change(ORDINARY, strip="", trim="")),
    "bos, other marks": (
        "{{ bos_token }}{% for m in messages %}{{ {'system': '', 'user': '[U]', 'assistant': '[A]'}"
        "[m.role] }}{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
        "{{ '[/A]' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}[A]<think>{{ '</think>' if not enable_thinking }}{% endif %}",
        ["<|begin|>", "", "", "", "[U]", "", "[A]", "[/A]", "[A]<think></think>", "[A]<think>",
         "</think>", ""]),
    "the user's turn opens the answer": (
        "{% for m in messages %}{{ '[U]' + m.content + '[A]' if m.role == 'user' else m.content }}"
        "{{ '[/A]' if m.role == 'assistant' }}{% endfor %}",
        ["", "", "", "", "[U]", "[A]", "", "[/A]", "", "", "", ""]),
    "default system prompt": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
        + CHATML,
        change(ORDINARY, no_system="<|im_start|>system\nBe good.<|im_end|>\n")),
    "no system prompt": ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
                         "{% endif %}" + CHATML, "no system role"),
    "trims": (CHATML.replace("m.content", "m.content | trim"), "differs for"),
    "counts": (CHATML.replace("add_generation_prompt", "add_generation_prompt and messages|length < 5"),
               "differs for"),
    "dates": ("{{ strftime_now('%Y') }}" + CHATML, "the date"),
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "escape": ("{{ messages.__class__.__mro__ }}" + CHATML, "SecurityError"),
    "escape by a filter": ("{{ ('{0.__class__.__mro__}'|attr('format'))(1) }}" + CHATML, "SecurityError"),
    "changes": ("{% set _ = messages.append(1) %}" + CHATML, "SecurityError"),
    "half of a surrogate pair": ("{# \udc80 #}" + CHATML.replace("<|im_end|>", "\udc80"), "surrogate"),
}


@pytest.mark.parametrize("which", CHATS)
def test_chat_pieces(which):
    template, expected = CHATS[which]
    export.notes.clear()
    pieces = export.chat_pieces(template, export.role_tokens({"bos_token": {"content": "<|begin|>"}}))
    if isinstance(expected, list):
        assert list(pieces) == expected and not export.notes
    else:
        assert pieces is None and len(export.notes) == 1 and expected in export.notes[0]


@pytest.mark.parametrize("file, key", [
    ("\udc80", "not this one"), (None, "x"), (None, None),
    (None, [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}])])
def test_where_the_chat_template_is(tmp_path, file, key):
    """chat_template.jinja, whatever its bytes, or tokenizer_config.json, or an older file."""
    if file:
        (tmp_path / "chat_template.jinja").write_bytes(file.encode(errors="surrogateescape"))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    expected = file or ("x" if key else "old")
    assert export.chat_template(tmp_path, {"chat_template": key}) == expected


def test_chat_template_that_is_no_text(tmp_path):
    with pytest.raises(export.Refused, match="tokenizer_config.json: broken"):
        export.chat_template(tmp_path, {"chat_template": [1]})


def test_chat_section_and_what_is_said_without_one(checkpoint, run, tmp_path):
    ck = checkpoint()
    ck.files["chat_template.jinja"] = CHATS["hybrid"][0]
    status, err = run(ck.save(tmp_path / "in"), "out.bin")
    data = (tmp_path / "out.bin.tokenizer").read_bytes()
    sections = read_tokenizer(data, ck.config["vocab_size"])[2]
    assert status == 0 and len(err) == 1 and chat_strings(sections["chat"]) == ORDINARY
    for template, pattern in ((CHATS["trims"][0], "warning: the chat template.*differs for"),
                              (None, "no chat template")):
        ck.files["chat_template.jinja"] = template
        (tmp_path / "in/chat_template.jinja").unlink(missing_ok=True)
        status, err = run(ck.save(tmp_path / "in"), "out.bin")
        assert status == 0 and len(err) == 2 and re.search(pattern, err[1]), err
        data = (tmp_path / "out.bin.tokenizer").read_bytes()
        assert "chat" not in read_tokenizer(data, ck.config["vocab_size"])[2]


# ---------------------------------------------------------------------------- hub

class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: the folders org/NAME of a folder."""
    protocol_version = "HTTP/1.1"
    folder: Path
    asked: list

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        model, _, file = re.sub("^/(api/models/)?|/resolve/[^/]+(?=/)|/(revision|tree)/.*", "", path,
                                ).partition("/")[2].partition("/")
        model = self.folder / "org" / model
        files = {p.relative_to(model).as_posix(): p.stat().st_size
                 for p in sorted(model.rglob("*")) if p.is_file()}
        files["original/consolidated.safetensors"] = 1
        commit = {"sha": "1" * 40, "id": f"org/{model.name}", "_id": "1", "tags": [],
                  "private": False}
        if path.startswith("/api/models/") and "/tree/" in path and model.is_dir():
            self.answer(200, json.dumps([{"type": "file", "path": p, "size": n, "oid": "2" * 40}
                                         for p, n in files.items()]).encode())
        elif path.startswith("/api/models/") and model.is_dir():
            self.answer(200, json.dumps(commit | {"siblings": [
                {"rfilename": p, "size": n, "blobId": "2" * 40} for p, n in files.items()]}).encode())
        elif "/resolve/" in path and (model / file).is_file():
            data = (model / file).read_bytes()
            self.answer(200, data, {"ETag": f'"{hash(data) & 0xFFFFFFFF:x}"',
                                    "X-Repo-Commit": commit["sha"]})
        else:
            self.answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, body, headers={"Content-Type": "application/json"}):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """hub(arguments) is export.py with a hub that has tmp_path/hub; hub.env is its environment."""
    handler = type("Served", (Hub,), {"folder": tmp_path / "hub", "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1",
           "HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300",
           "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}

    def call(*args, **changes):
        done = export_process(*args, cwd=tmp_path, env=env | changes)
        return done.returncode, done.stderr.splitlines()

    def stop():
        server.shutdown()
        server.server_close()
    call.asked = lambda: {path.partition("/resolve/")[2].partition("/")[2]
                          for path in handler.asked if "/resolve/" in path}
    call.stop, call.url = stop, env["HF_ENDPOINT"]
    yield call
    stop()


def test_download_from_a_hub(checkpoint, hub, tmp_path):
    ck = sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling")
    ck.files |= {"README.md": "no", "pytorch_model.bin": "no", "chat_template.jinja": CHATML}
    (tmp_path / "hub/org/tiny/1_Pooling").mkdir(parents=True)
    ck.save(tmp_path / "hub/org/tiny", 2)
    status, err = hub(f"{hub.url}/org/tiny/tree/main?a=b")
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert hub.asked() >= {"model-00002-of-00002.safetensors", "chat_template.jinja",
                           "1_Pooling/config.json"}
    assert not hub.asked() & {"README.md", "pytorch_model.bin", "original/consolidated.safetensors"}
    assert f"the download stays in {tmp_path}/cache/hub/models--org--tiny;" in err[-1]
    assert "hf cache rm model/org/tiny" in err[-1]
    refused(hub("org/absent", "out.bin"), "org/absent: neither here nor available", "HF_TOKEN",
            "RepositoryNotFound")
    (tmp_path / "tiny.bin").unlink()
    hub.stop()
    for changes in {"HF_HUB_OFFLINE": "1"}, {}:  # not allowed to ask, and no one there
        status, err = hub("org/tiny", **changes)
        assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
        assert hub("org/tiny", "--check", **changes)[0] == 0
        (tmp_path / "tiny.bin").unlink()
        refused(hub("org/tiny", "x.bin", **changes, HF_HOME=str(tmp_path / "empty")),
                "org/tiny: not here, and the hub can't be", "network.*HF_ENDPOINT.*HF_HUB_OFFLINE")


def test_ctrl_c_during_a_download(checkpoint, hub, tmp_path, monkeypatch):
    """It does not wait for the files under way."""
    checkpoint().save(tmp_path / "hub/org/tiny")
    answer, begun, end = Hub.answer, threading.Event(), threading.Event()

    def answer_late(self, *args):
        if self.command == "GET" and "model.safetensors" in self.path:
            begun.set()
            end.wait(300)
        with suppress(OSError):                 # there may be no one left
            answer(self, *args)
    monkeypatch.setattr(Hub, "answer", answer_late)
    child = subprocess.Popen([sys.executable, ROOT / "export.py", "org/tiny"], cwd=tmp_path, stderr=subprocess.PIPE,
                             env=environment(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "cache"),
                                             HF_HUB_ETAG_TIMEOUT="300", HF_HUB_DOWNLOAD_TIMEOUT="300"))
    try:
        assert begun.wait(120)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == b"" and sorted(p.name for p in tmp_path.iterdir()) == ["cache", "hub"]
    finally:
        end.set()
        child.kill()
        child.communicate()


def test_a_hub_s_commit_and_index(checkpoint, hub, tmp_path, monkeypatch):
    """All files are of one commit, though each question for the newest finds another; of the weights only those
    that the index names."""
    ck = checkpoint()
    folder = ck.save(tmp_path / "hub/org/tiny", 2)
    (folder / "model-00003-of-00003.safetensors").write_text("of an earlier upload")
    answer, paths = Hub.answer, []

    def answer_newer(self, status, body, headers={"Content-Type": "application/json"}):
        paths.append(self.path)
        asked = re.search("[0-9a-f]{40}", self.path)
        commit = asked[0] if asked else f"{len(paths):040x}"
        if not asked and len(paths) > 1 and status == 200:
            body = json.dumps(json.loads(body) | {"siblings": []}).encode()     # of a commit without files
        answer(self, status, body.replace(b"1" * 40, commit.encode()),
               {key: value.replace("1" * 40, commit) for key, value in headers.items()})
    monkeypatch.setattr(Hub, "answer", answer_newer)
    status, err = hub("org/tiny")
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert len({re.search("/resolve/([^/]+)/", path)[1] for path in paths if "/resolve/" in path}) == 1, paths
    assert "model-00002-of-00002.safetensors" in hub.asked()
    assert "model-00003-of-00003.safetensors" not in hub.asked()


@pytest.mark.parametrize("config, out, pattern", [
    ({"architectures": ["Qwen3NextForCausalLM"]}, "out.bin", "org/tiny/config.json: not Qwen3"),
    ({"quantization_config": {"quant_method": "gptq"}}, "out.bin", "org/tiny/config.json:.*gptq"),
    ({}, "nowhere/out.bin", "nowhere: missing"), ({}, "folder.bin", "a directory"),
    ({}, "longname" * 40 + ".bin", "File name too long"),
    ({"num_hidden_layers": 4096, "hidden_size": 1 << 20, "intermediate_size": 1 << 20}, "out.bin",
     "too little disk space")])
def test_what_a_hub_s_json_shows_is_refused_before_the_weights(checkpoint, hub, tmp_path, config, out,
                                                               pattern):
    (tmp_path / "folder.bin").mkdir()
    ck = checkpoint()
    ck.config |= config
    ck.save(tmp_path / "hub/org/tiny")
    refused(hub("org/tiny", out), pattern)
    assert "model.safetensors" not in hub.asked()


def test_the_disk_of_a_download(checkpoint, hub, tmp_path):
    checkpoint().save(tmp_path / "hub/org/tiny")
    (tmp_path / "cache/hub").mkdir(parents=True)
    (tmp_path / "cache/hub/models--org--tiny").write_text("")
    refused(hub("org/tiny"), "cache/hub/models--org--tiny.*: can't be read or written")
    (tmp_path / "cache/hub/models--org--tiny").unlink()
    os.truncate(tmp_path / "hub/org/tiny/model.safetensors", 1 << 43)  # a hole
    refused(hub("org/tiny"), "/cache/hub: too little disk space, expected 8796[0-9]* bytes")
    assert "model.safetensors" not in hub.asked()

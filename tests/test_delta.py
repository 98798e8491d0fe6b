"""Exports of Qwen3.5, its mixtures and Qwen3-Next: OUT.bin is reference.py's, from any layout, also of a GGUF file.
(reference.py computes what transformers does: see deltas.json and `python tests/deltas.py transformers`.)"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import deltas
import ggufs
import numpy as np
import pytest
import reference
from checkpoints import SENTENCES, make_embedding, with_config
from conftest import export, perplexity, qwen3, refused, split_tokenizer

MOE = {"shared_expert_intermediate_size", "num_experts_per_tok"}
KINDS = {"dense": {}, "moe": {}, "next": {}, "as many v heads": {"linear_num_value_heads": 2}, "three v heads a k head": {
    "linear_num_value_heads": 6, "tie_word_embeddings": False, "num_hidden_layers": 8},
    "every second": {"full_attention_interval": 2}}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return deltas.Delta(request.param if request.param in ("moe", "next") else "dense", **KINDS[request.param])


@pytest.mark.parametrize("layout, group", [("saved", 32), ("published", 64)])
def test_eight_bits(tmp_path, model, tokenizer35, run, layout, group):
    """The last line names what is left out, if it is there."""
    config, tensors = getattr(model, layout)()
    deltas.save(tmp_path / "hf", config, tensors, tokenizer35)
    said = run("hf", "out.bin", "--group-size", group)[1][0]
    assert (tmp_path / "out.bin").read_bytes() == reference.Model.from_tensors(config, tensors, group=group).to_bytes()
    left_out = "mtp.*" if model.kind == "next" else "mtp.* and visual.*"
    assert re.findall(r", without (.*)\) and", said) == [left_out] * (layout == "published")


def test_mlx(tmp_path, model, tokenizer35, run):
    """The shape of its convolutions says that its norms have their 1, not its names."""
    if model.kind == "next":
        pytest.skip("it has no such name")
    model.tensors |= {name: deltas.bf16(x + 1) - 1 for name, x in model.tensors.items()
                      if name.endswith("norm.weight") and "linear_attn" not in name}  # BF16 has x + 1
    config, tensors = model.mlx()
    out = export(deltas.save(tmp_path / "hf", config, tensors, tokenizer35), tmp_path / "out.bin")
    assert out.read_bytes() == reference.Model.from_tensors(*model.published()).to_bytes()
    _, tensors = model.published()
    tensors = {name.replace("model.language_model.", "language_model.model."): x for name, x in tensors.items()}
    out.unlink()
    export(deltas.save(tmp_path / "hf", config, tensors, tokenizer35), out)
    assert out.read_bytes() == reference.Model.from_tensors(*model.published()).to_bytes()
    name = "language_model.model.layers.0.linear_attn.conv1d.weight"  # MLX's alone
    deltas.save(tmp_path / "hf", config, tensors | {name: tensors[name].swapaxes(1, 2)}, tokenizer35)
    refused(run("hf", "out.bin"), "shape of language_model.model.layers.[12].linear_attn.conv1d.weight")


@pytest.mark.parametrize("model, kind, how", [
    ("dense", "F32", {}), ("moe", "BF16", {"guess": True, "joined": True}), ("next", "F16", {"guess": True}),
    ("next", "F32", {"joined": True}), ("three v heads a k head", "BF16", {"guess": True})], indirect=["model"])
def test_gguf(tmp_path, model, tokenizer35, run, kind, how):
    """v heads in HF's order, norms and decays as there, and no layer that guesses tokens."""
    ggufs.write_delta(tmp_path / "m.gguf", model, tokenizer35, kind, **how)
    said = run("m.gguf", "out.bin")[1][0]
    assert (tmp_path / "out.bin").read_bytes() == reference.Model.from_tensors(*model.published()).to_bytes()
    assert re.findall(r", without (.*)\) and", said) == [f"blk.{model.numbers['num_hidden_layers']}.*"] * ("guess" in how)


@pytest.mark.parametrize("model", ["three v heads a k head"], indirect=True)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "IQ4_NL"])
def test_gguf_blocks(tmp_path, model, tokenizer35, kind):
    """Blocks are copied, those of columns of v heads, too."""
    w = reference.Model.from_bin(export(ggufs.write_delta(tmp_path / "m.gguf", model, tokenizer35, kind), tmp_path / "o.bin")).w
    for name, part, first in ("o", "out_proj", 0), ("v", "in_proj_qkv", 512), ("z", "in_proj_z", 0):
        stored = ggufs.quantize(model.tensors[f"model.layers.0.linear_attn.{part}.weight"], ggufs.Kind[kind])[first:]
        assert np.array_equal(w[name][0].rows(range(len(stored))), ggufs.gguf.dequantize(stored, ggufs.Kind[kind]))


def blob(model, tokenizer, **changes):
    """(metadata, tensors) as Ollama's converter has them: heads by layer, ssm_dt without .bias, what sees and what guesses."""
    family, tensors = {"dense": "qwen35", "moe": "qwen35moe", "next": "qwen3next"}[model.kind], ggufs.delta_blocks(model, ggufs.Kind.F32)
    every, layers = (model.numbers[key] for key in ("full_attention_interval", "num_hidden_layers"))
    heads = [0 if (i + 1) % every else model.numbers["num_key_value_heads"] for i in range(layers)]
    tensors = {name.replace("ssm_dt.bias", "ssm_dt"): x for name, x in tensors.items()} | {
        name: (np.ones(shape, np.float32), ggufs.Kind.F32) for name, shape in (
            ("v.blk.0.attn_q.weight", (8, 8)), ("v.patch_embed.weight", (8, 3, 4, 4)), ("mtp.layers.0.attn_q.weight", (8, 8)))}
    metadata = {key: x for key, x in ggufs.delta_values(model, tokenizer).items() if not key.endswith(("full_attention_interval", "nextn_predict_layers"))}
    metadata |= {f"{family}.{key}": x for key, x in {"attention.head_count_kv": heads, "rope.dimension_sections": [3, 3, 2]}.items()}
    metadata |= {f"{family}.feed_forward_length": 0} if model.moe else {}
    return metadata | {f"{family}.{key}": x for key, x in changes.items()}, tensors


@pytest.mark.parametrize("model", ["dense", "moe", "next", "three v heads a k head", "every second"], indirect=True)
def test_ollama_s_files(tmp_path, model, tokenizer35, run):
    ggufs.write(tmp_path / "m.gguf", *blob(model, tokenizer35))
    said = run("m.gguf", "out.bin")[1][0]
    assert ", without mtp.* and v.*) and" in said
    assert (tmp_path / "out.bin").read_bytes() == reference.Model.from_tensors(*model.published()).to_bytes()


@pytest.mark.parametrize("model", ["dense", "next"], indirect=True)
def test_the_order_of_v_heads_in_ollama_s_files(tmp_path, model, tokenizer35, run):
    """A key says if they are as llama.cpp's converter has them, for qwen35, or as in Hugging Face's files."""
    reordered = model.kind == "dense"
    metadata, tensors = blob(model, tokenizer35)
    family = metadata["general.architecture"]
    for said in None, reordered, not reordered:
        run(ggufs.write(tmp_path / "m.gguf", metadata | {f"{family}.ssm.v_head_reordered": said}, tensors), f"{said}.bin")
    if model.kind == "next":  # ssm_ba is Qwen3-Next's, also where the file calls itself so
        metadata = {key.replace("qwen3next", "qwen35moe"): "qwen35" if key.endswith("ggml.pre") else x for key, x in metadata.items()}
        run(ggufs.write(tmp_path / "m.gguf", metadata | {"general.architecture": "qwen35moe"}, tensors), "None.bin")
    assert Path("None.bin").read_bytes() == Path(f"{reordered}.bin").read_bytes() != Path(f"{not reordered}.bin").read_bytes()


IRREGULAR = [[0, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0, 0, 1]]


@pytest.mark.parametrize("changes, pattern", [
    *[({"attention.head_count_kv": kinds}, "layer_types, expected full_attention after") for kinds in IRREGULAR],
    *[({"attention.head_count_kv": 1, "attention.recurrent_layers": [not x for x in kinds]}, "layer_types, expected full_attention after")
      for kinds in IRREGULAR],
    ({"attention.head_count_kv": [0, 0, 0, 1, 0, 0], "block_count": 6}, "num_hidden_layers, expected a multiple of 4, found 6"),
    ({"attention.head_count_kv": [0, 0, 0, 2, 0, 0, 0, 1]}, "shape of blk.3.attn_k.weight, expected .128, 64., found .64, 64."),
    ({"attention.head_count_kv": [0] * 8}, "layer_types, expected full_attention after"),
    ({"attention.head_count_kv": [[1]] * 8}, "num_key_value_heads, expected an integer from 1 to 4096, found .1."),
    ({"attention.recurrent_layers": 5}, "attention.recurrent_layers, expected a list, found 5")])
def test_gguf_with_irregular_layers(tmp_path, tokenizer35, run, changes, pattern):
    ggufs.write(tmp_path / "m.gguf", *blob(deltas.Delta("dense", num_hidden_layers=8), tokenizer35, **changes))
    refused(run("m.gguf", "out.bin"), pattern)


@pytest.mark.parametrize("model", ["dense", "moe"], indirect=True)
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_names_of_wrappers(tmp_path, model, tokenizer35, run, prefix):
    """Also of what sees and what guesses, which may have experts of its own."""
    config, tensors = model.published()
    tensors |= {"mtp.layers.0.mlp.experts.0.up_proj.weight": np.ones((8, 8), np.float32)}
    deltas.save(tmp_path / "hf", config, {prefix + name: x for name, x in tensors.items()}, tokenizer35)
    assert ", without mtp.* and visual.*)" in run("hf", "out.bin")[1][0]
    assert (tmp_path / "out.bin").read_bytes() == reference.Model.from_tensors(*model.published()).to_bytes()


@pytest.mark.parametrize("name, rows, pattern", [
    ("blk.0.attn_qkv", 769, "shape of blk.0.attn_qkv.weight, expected rows in multiples of 1024, found .769, 64.$"),
    ("blk.0.attn_gate", 511, "shape of blk.0.attn_gate.weight, expected .512, 64., found .511, 64.$")])
def test_gguf_refused(tmp_path, tokenizer35, run, name, rows, pattern):
    ggufs.write_delta(tmp_path / "m.gguf", deltas.Delta("dense"), tokenizer35, "F32", more={name: rows})
    refused(run("m.gguf", "out.bin"), pattern)


@pytest.mark.parametrize("shape", deltas.SHAPES)
def test_results_are_those_of_transformers(tmp_path, tokenizer35, shape):
    """Recorded ones, in fp32, are reference.py's; with rounded weights and inputs this has the program's."""
    expected, changes = json.loads(deltas.RECORDED.read_text())[shape], deltas.SHAPES[shape]
    assert np.allclose(deltas.nll_of(deltas.by_reference("dense", **changes)), expected, rtol=0, atol=1e-3)
    out = export(deltas.save(tmp_path / "hf", *deltas.Delta("dense", **changes).published(), tokenizer35), tmp_path / "out.bin")
    text = SENTENCES[:120]
    ids = tokenizer35.encode(text).ids
    assert perplexity(out, "-i", text)[1] == pytest.approx(reference.Model.from_bin(out).nll(ids), abs=0.02)


@pytest.mark.parametrize("name", [*deltas.KINDS, *deltas.CHECKPOINTS])
def test_reference_is_transformers(name):
    """Recorded ones of mixtures, Next and Qwen2: test_model.py and others compare the program with reference.py."""
    expected = json.loads(deltas.RECORDED.read_text())[name]
    assert np.allclose(deltas.nll_of(deltas.reference_of(name)), expected, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_transformers_itself():
    """TRANSFORMERS names a Python that has it, and torch, unless this one has."""
    python = os.environ.get("TRANSFORMERS", sys.executable)
    if subprocess.run([python, "-c", "import torch, transformers, gguf, tokenizers"], capture_output=True).returncode:
        pytest.skip("no transformers: TRANSFORMERS=PYTHON")
    subprocess.run([python, deltas.__file__, "transformers"], check=True)


def test_check(tmp_path, model, tokenizer35, exports):
    deltas.save(tmp_path / "hf", *model.published(), tokenizer35)
    exports("hf", "out.bin", "--bits", "4")
    assert "out.bin matches hf" in exports("--check", "hf", "out.bin")[0]


@pytest.mark.parametrize("changes, pattern", [
    ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types, expected"),
    ({"layer_types": ["full_attention"] * 4}, "full_attention_interval, expected an integer from 2 to 4096, found 1"),
    ({"num_hidden_layers": 6, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
     "num_hidden_layers, expected a multiple of 4, found 6"),
    ({"num_hidden_layers": 6, "layer_types": None}, "num_hidden_layers, expected a multiple of 4, found 6"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types, expected full_attention after .*found linear_attention, lin"),
    ({"linear_num_value_heads": 5}, "linear_num_value_heads, expected a multiple of 2, found 5"),
    ({"linear_num_key_heads": 129}, "linear_num_key_heads, expected an integer from 1 to 128, found 129"),
    ({"linear_num_value_heads": 258}, "linear_num_value_heads, expected an integer from 1 to 256, found 258"),
    ({"linear_key_head_dim": 64}, "linear_key_head_dim is not supported, expected 128, found 64"),
    ({"linear_value_head_dim": 64}, "linear_value_head_dim is not supported, expected 128, found 64"),
    ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is not supported, expected 4"),
    ({"attn_output_gate": False}, "attn_output_gate is not supported, expected True"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type is not supported, expected swish or silu, found 'sigmoid'"),
    ({"attention_bias": True}, "attention_bias is not supported, expected False"),
    ({"head_dim": 72}, "head_dim, expected a multiple of 16, found 72"),
    ({"rope_parameters": deltas.ROPE | {"partial_rotary_factor": 0.02}}, "partial_rotary_factor, expected an even part"),
    ({"rope_parameters": deltas.ROPE | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor, expected an even part"),
    ({"architectures": ["Qwen4ForCausalLM"]}, "not Qwen3's architecture, .*found Qwen4ForCausalLM"),
    ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size is not supported, expected 64, found 32"),
    ({"num_experts_per_tok": 2, "norm_topk_prob": False}, "norm_topk_prob is not supported, expected True, found False"),
    ({"num_attention_heads": 4}, "shape of model.layers.3.self_attn.q_proj.weight, expected")])
def test_refused(tmp_path, tokenizer35, run, changes, pattern):
    with_config(deltas.save(tmp_path / "hf", *deltas.Delta("moe" if MOE & {*changes} else "dense").saved(), tokenizer35), changes)
    refused(run("hf", "out.bin"), pattern)


@pytest.mark.parametrize("kind, change, pattern", [
    ("dense", lambda t: t.pop("model.language_model.layers.0.linear_attn.in_proj_qkv.weight"),
     "missing: layers.0.linear_attn.in_proj_q.weight"),
    ("next", lambda t: t.update({name: x.swapaxes(1, 2) for name, x in t.items() if "conv1d" in name}),  # MLX's
     r"conv1d.weight, expected \[1024, 1, 4\] \(not MLX's: .*\), found \[1024, 4, 1\]$")])
def test_tensors_refused(tmp_path, tokenizer35, run, kind, change, pattern):
    config, tensors = deltas.Delta(kind).published()
    change(tensors)
    deltas.save(tmp_path / "hf", config, tensors, tokenizer35)
    refused(run("hf", "out.bin"), pattern)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind, name, shape", [
    ("dense", "0.linear_attn.in_proj_q", (256, 64)), ("dense", "1.linear_attn.in_proj_v", (512, 64)), ("dense", "3.self_attn.q_gate", (128, 64)),
    ("next", "0.linear_attn.in_proj_z", (512, 64)), ("next", "2.linear_attn.in_proj_qkv", (1024, 64)), ("moe", "3.self_attn.q_gate", (128, 64)),
    ("next", "1.linear_attn.in_proj_a", (4, 64)), ("moe", "3.mlp.experts.1.up_proj", (64, 64))])
def test_whole_and_in_parts(tmp_path, tokenizer35, run, kind, name, shape, first):
    """Neither replaces the other, whichever comes first in the file: transformers would take one that this has not."""
    config, tensors = deltas.Delta(kind).published()
    prefix = next(key for key in tensors if "layers.0." in key).partition("layers.")[0]
    more = {f"{prefix}layers.{name}.weight": np.ones(shape, np.float32)}
    deltas.save(tmp_path / "hf", config, more | tensors if first else tensors | more, tokenizer35)
    refused(run("hf", "out.bin"), "tensors, expected each once.* twice")


@pytest.mark.parametrize("architecture", ["Qwen3_5TextModel", "Qwen3_5Model"])
def test_embedding_models(tmp_path, tokenizer35, run, architecture):
    config, tensors = deltas.Delta("dense").saved()
    folder = deltas.save(tmp_path / "hf", config | {"architectures": [architecture]},
                         {name.removeprefix("model."): x for name, x in tensors.items()}, tokenizer35)
    make_embedding(folder)
    status, err = run("hf", "out.bin")
    assert status == 0 and not any("not known" in line for line in err)
    assert (tmp_path / "out.bin").read_bytes() == reference.Model.from_tensors(config, tensors).to_bytes()


def test_yarn(tmp_path, tokenizer35):
    """Frequencies of the part of a head that rope turns."""
    folder = deltas.save(tmp_path / "hf", *deltas.Delta("dense").published(), tokenizer35)
    found = reference.Model.from_bin(export(folder, tmp_path / "out.bin", "--yarn", "4"))
    assert len(found.freq) == 8
    yarn = {"factor": 4.0, "original": 1024}
    expected, factor = reference.rope_frequencies({"head_dim": 64, "rotary_dim": 16, "theta": 1e7, "yarn": yarn})
    assert np.array_equal(found.freq, expected.astype(np.float32)) and np.float32(factor) == found.factor


@pytest.mark.parametrize("width, plain", [(64, "-t 0.7 -p 0.8 -k 20 -a 1.5"), (1024, "-t 1 -p 1 -k 20 -a 2")])
def test_settings_of_the_cards(tmp_path, tokenizer35, width, plain):
    """They hold if the checkpoint has none; Qwen3.5-0.8B has its own, by its width. Greedy answers have no penalty."""
    folder = deltas.save(tmp_path / "hf", *deltas.Delta("dense", hidden_size=width).published(), tokenizer35, deltas.STRIPS)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    out = export(folder, tmp_path / "out.bin")
    for options, expected in ((), plain), (("-r", 1), "-t 1 -p 0.95 -k 20 -a 1.5"), (("-t", 0), "-a 0"), (("-a", 1), "-a 1 "):
        err = qwen3(out, "-i", "Hi", "-n", 1, "-v", *options).stderr.decode()
        assert expected in re.search("sampling: .*", err)[0]


def test_template_that_strips(tmp_path, tokenizer35):
    """As Qwen3.5's does. An empty section says it; no later system message is known."""
    config, tensors = deltas.Delta("dense").published()
    export(deltas.save(tmp_path / "hf", config, tensors, tokenizer35, deltas.STRIPS), tmp_path / "out.bin")
    sections = split_tokenizer((tmp_path / "out.bin.tokenizer").read_bytes())[1]
    assert sections[b"strp"] == b"" and b"syst" not in sections and b"gues" not in sections
    assert re.findall(rb"<think>[\n</think>]*", sections[b"chat"]) == [b"<think>\n\n</think>\n\n", b"<think>\n"]

"""config.json and the other settings: the header of OUT.bin, and what is refused."""
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import reference
from checkpoints import MIXTURE, YARN, vision_language, with_config, with_tensors
from conftest import export_py as export, refused, split_tokenizer


# name -> (changes of config.json, the header from 0x30: theta, eps, kind, factor, original length,
# beta_fast, beta_slow, attention factor, not truncated)
HEADERS = {
    "plain": ({}, (0, 0, 0, 0, 0, 0, 0, 0, 0)),
    "2507": ({"rope_theta": 5000000, "rms_norm_eps": 1e-5}, (5e6, 1e-5, 0, 0, 0, 0, 0, 0, 0)),
    "new keys": ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
                 (5e5, 0, 0, 0, 0, 0, 0, 0, 0)),
    "no theta": ({"rope_theta": None}, (1e4, 0, 0, 0, 0, 0, 0, 0, 0)),
    "yarn": ({"rope_scaling": YARN}, (0, 0, 1, 4, 128, 0, 0, 0, 0)),
    "yarn, type": ({"rope_scaling": {"type": "yarn", "factor": 2}}, (0, 0, 1, 2, 512, 0, 0, 0, 0)),
    "yarn, ratio": ({"rope_scaling": YARN | {"factor": None, "original_max_position_embeddings": 64}},
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
                     (0, 0, 1, 4, 128, 0, 0, (0.0707 * math.log(4) + 1) / (0.2 * math.log(4) + 1), 0)),
    "yarn, mscale alone": ({"rope_scaling": YARN | {"mscale": 0.707}}, (0, 0, 1, 4, 128, 0, 0, 0, 0)),
    "yarn, factor below 1": ({"rope_scaling": YARN | {"factor": 0.5}}, (0, 0, 1, 0.5, 128, 0, 0, 1, 0)),
    "deepseek": ({"rope_scaling": YARN | {"attn_factor": 0.8782488562869419}}, (0, 0, 1, 4, 128, 0, 0, 0, 0)),
}


YARN_OPTION = {  # config.json -> what --yarn makes of it
    "qwen3": ({"max_position_embeddings": 40960}, 2, {"max_position_embeddings": 65536}, 32768),
    "base": ({"max_position_embeddings": 32768}, 4, {"max_position_embeddings": 131072}, 32768),
    "2507": ({"max_position_embeddings": 262144, "rope_theta": 5e6}, 2.5, {"max_position_embeddings": 655360}, 262144),
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


@pytest.mark.parametrize("scaling", [YARN, {"type": "linear", "factor": 2}])
def test_yarn_option_refused(checkpoint, refuses, scaling):
    refuses(checkpoint(rope_scaling=scaling), "its rope is scaled already: leave --yarn out", args=["--yarn", "2"])


@pytest.mark.parametrize("changes, theta, factor", [
    ({"rope_scaling": {"type": "linear", "factor": 3}}, 1e6, 3),
    ({"rope_scaling": {"rope_type": "linear", "factor": 8.0, export.ORIGINAL: 64}}, 1e6, 8),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 0.7, "rope_theta": 7e4}}, 7e4, 0.7)])
def test_linear_scaling(checkpoint, tmp_path, changes, theta, factor):
    """Frequencies / factor, in fp32 as torch divides them; the length stays."""
    folder = checkpoint(**changes).save(tmp_path)
    header, computed = export.read_header(export.read_folder(folder), None, None, None)
    powers = (theta ** (np.arange(0, 64, 2, np.float32) / np.float32(64)).astype(float)).astype(np.float32)
    assert np.array_equal(computed["frequencies"].read_fp32(), np.float32(1) / powers / np.float32(factor))
    assert (header.rope_scaling, header.rope_factor, header.max_seq_len) == (2, 1, 512)


NUMBERS = {"rms_norm_eps": 1e-6, "num_key_value_heads": 1, "rope_theta": 1e6}


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_beside_a_text_config_count_for_nothing(checkpoint, refuses, key):
    ck = vision_language(checkpoint())
    ck.config |= {key: ck.config["text_config"].pop(key)}
    refuses(ck, f"config.json: {key}, expected an? (integer|number) from .*found None")


@pytest.mark.parametrize("architectures", [{}, {"architectures": None}, {"architectures": []}])
@pytest.mark.parametrize("kind, family", [
    ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM"), ("qwen3_moe", "Qwen3MoeForCausalLM"), ("mimo", "MiMoForCausalLM"),
    *[(kind, f"Q{kind[1:].replace('_vl', 'VL').replace('2_5', '2_5_')}ForConditionalGeneration") for kind in (
        "qwen2_vl", "qwen2_5_vl", "qwen3_vl")]])
def test_a_model_type_in_place_of_architectures(kind, family, architectures):
    config = {"model_type": kind, "text_config": {"model_type": f"{kind}_text"} | NUMBERS} | architectures
    assert family in export.normalize_config("config.json", config)[0].architectures.split()


@pytest.mark.parametrize("config", [
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, {"max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 2},
    {"use_sliding_window": True, "max_window_layers": 2}, MIXTURE | {"use_sliding_window": False}])
def test_windows_of_no_layer(checkpoint, run, tmp_path, config):
    assert run(checkpoint(**config).save(tmp_path / "in"), "out.bin")[0] == 0


@pytest.mark.parametrize("which", HEADERS)
def test_header_extensions(checkpoint, tmp_path, which):
    changes, fields = HEADERS[which]
    export.Notices.hints.clear()
    folder = checkpoint(**changes).save(tmp_path)
    header, computed = export.read_header(export.read_folder(folder), None, None, None)
    theta, eps, kind, *values = fields
    yarn = dict(zip(("factor", "original", "beta_fast", "beta_slow", "attention_factor", "unrounded"), values))
    factor, freq = 0, []
    if kind:
        freq, factor = reference.rope_frequencies({"head_dim": 64, "theta": theta or 1e6, "yarn": yarn})
    assert export.HEADER.pack(*header)[0x30:0x80] == struct.pack(
        "<2fIf", theta, eps, 2 * kind, factor).ljust(0x80 - 0x30, b"\0")
    found = [tensor.read_fp32() for tensor in computed.values()]
    assert np.array_equal(found, [freq] if kind else [])
    assert not export.Notices.hints


BAD_CONFIG = [
    ({"architectures": ["Qwen3OmniForCausalLM"]}, "not Qwen3's", "found Qwen3OmniForCausalLM$"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "not Qwen3's architecture, expected the model that it was made from",
     r"-o 'yes\|no', found Qwen3ForSequenceClassification$"),
    ({"architectures": "Qwen3ForCausalLM"}, "architectures, expected a list, found 'Qwen3ForCausalLM'"),
    ({"is_causal": False}, "is_causal is not supported, expected True, found False"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported, expected False, found True"),
    ({"architectures": None}, "architecture", "found None$"),
    ({"architectures": [], "model_type": "qwen4_exp"}, "architecture", "found qwen4_exp$"),
    *[({"model_type": "qwen3", "architectures": [name]} | more, f"not Qwen3's architecture.*found {name}$") for name, more in (
        ("Qwen3ForSequenceClassification", {}), ("Qwen3ForGuardModel", {}), ("FSDPQwen3ForTokenClassification", {}),
        ("MyQwen3ForCausalLM", {"auto_map": {"AutoModelForCausalLM": "mine.MyQwen3ForCausalLM"}}))],
    ({"model_type": "qwen4_exp", "architectures": ["FSDPQwen3ForCausalLM"]}, "architecture", "found FSDPQwen3ForCausalLM$"),
    ({"architectures": ["Qwen2ForCausalLM"]}, "missing:.*proj.bias.*left over:.*norm"),   # Qwen3's tensors
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
     "use_sliding_window", "full_attention"),
    ({"use_sliding_window": True, "max_window_layers": 0}, "its sliding window", "found 'sliding'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types",
     "found 'full_attention, sliding_attention'"),
    ({"attention_bias": True}, "attention_bias", "False|false"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"hidden_size": "64"}, "hidden_size", "'64'"),
    ({"num_hidden_layers": None}, "num_hidden_layers", "None"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "from 1.17549e-38 to 1e\\+12"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "nan"),
    ({"rope_theta": 10 ** 400}, "rope_theta", "a number from 1e-06 to 1e\\+12, found 1000"),
    ({"head_dim": 63}, "head_dim", "multiple of 2, found 63"),
    ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads", "multiple of 2, found 3"),
    ({"hidden_size": 80}, "hidden_size", "multiple of 32"),
    ({"hidden_size": 300}, "hidden_size, expected a multiple of 32, the quantization group, found 300"),
    ({"head_dim": 24}, r"num_attention_heads \* head_dim", "48"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type", "llama3"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type", "dynamic"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor, expected a number", "None"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 9}}, "rope scaling linear", "found beta_fast"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2}}, "rope scaling default", "found factor"),
    ({"rope_scaling": YARN | {"surprise": 1}}, "rope scaling yarn", "surprise"),
    ({"rope_scaling": YARN | {"factor": "four"}}, "factor", "'four'"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "factor", "None"),
    ({"rope_scaling": YARN | {"truncate": 0}}, "truncate", "True or False, found '0'"),
    ({"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor", "from 1e-06"),
    ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta, expected another number with YaRN", "found 1.0"),
    ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "0.5"),
    ({"rope_scaling": "yarn"}, "config.json: rope_scaling, expected a dict, found 'yarn'"),
    ({"vocab_size": 300}, "embed_tokens.weight|ids", "300"),
    # Beyond the limits, which test_untrusted.py compares with qwen3.c's
    *[({key: value}, f"{key}, expected an? (integer|number) from .*found {value}")
      for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")
      for value in (0, export.NUMBERS[key][1] + 1)],
    *[({"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": 1, key: 1e13}}, f"{key}.*found 1000")
      for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")],
    ({"rope_theta": 1e13}, "rope_theta, expected a number from 1e-06 to 1e.12, found 1000"),
]


BAD_EXPERTS = [
    ({"num_experts": None}, "num_experts, expected an integer from 0 to 4096, found None"),
    ({"num_experts": 0}, "num_experts_per_tok, expected from 1 to num_experts, 0, found 2"),
    ({"num_local_experts": 1}, "num_experts_per_tok, expected from 1 to num_experts, 1, found 2"),
    ({"num_experts": 4097}, "num_experts.*4096, found 4097"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok, expected from 1 to num_experts, 3, found 4"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok.*found None"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok, expected from 1 to num_experts, 3, found 0"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size.*found None"),
    *[({"use_sliding_window": True} | more, "use_sliding_window is not supported, expected False, found True")
      for more in ({}, {"max_window_layers": 9}, {"layer_types": ["full_attention"] * 2})],
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


@pytest.mark.parametrize("key, value, clear", [
    *[("top_k", x, None) for x in (-1, 2 ** 31, 1.5, "20", True)], *[("top_p", x, None) for x in (0.0, 1e-50, 1.1, -1)],
    *[("temperature", x, None) for x in (-1, 1e7, "hot", float("nan"))],
    *[("repetition_penalty", x, None) for x in (0, 1e-30, float("inf"), "1.1")],
    ("top_k", 20.0, 20), ("temperature", 1, 1.0), ("temperature", 0.0, 0), ("eos_token_id", "END", "its id"),
    ("eos_token_id", ["END"], ["its id"]), ("bos_token_id", "END", "its id")])
def test_odd_settings(checkpoint, run, tmp_path, key, value, clear):
    """They are advice: one that is out of bounds counts as if it were not there, and a hint names it. A clear one in another
    form needs none."""
    ck, found = checkpoint(), []
    forms = {"END": "<|im_end|>", "its id": ck.eos}
    for name, x in ("odd", value), ("clear", clear):
        ck.generation[key] = [forms[y] for y in x] if isinstance(x, list) else forms.get(x, x)
        status, err = run(ck.save(tmp_path / name), f"{name}.bin")
        said = [line for line in err if f"generation_config.json: ignored, as only options or nothing at all sets them: {key} " in line]
        assert status == 0 and len(said) == (name == "odd" and clear is None), err
        plain, sections = split_tokenizer(Path(f"{name}.bin.tokenizer").read_bytes())
        found.append((plain, sections | {b"from": b""}))
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture, kind", [("FSDPQwen3ForCausalLM", "qwen3"), ("MyModel", "qwen3"), ("Qwen3NextModel", "qwen3_next"),
                                                ("FSDPQwen3VLForConditionalGeneration", "qwen3_vl"), ("LMHeadModel", "qwen2")])
def test_a_model_type_beside_an_unknown_class(architecture, kind):
    """A wrapper's name, or a class of one's own."""
    export.Notices.hints.clear()
    config = {"model_type": kind, "architectures": [architecture]} | NUMBERS
    assert kind in export.normalize_config("config.json", config)[0].architectures.split()
    assert export.Notices.hints == [f"{architecture} is not known: taken for its model_type, {kind}"]


UP, BNB = "layers.0.mlp.up_proj.weight", {"quantization_config": {"quant_method": "bitsandbytes"}}


@pytest.mark.parametrize("config, said", [
    (BNB, "bitsandbytes"), ({"quantization_config": {"quant_method": "fp8"}}, "fp8"), ({"quantization": {"bits": 4}}, "MLX weights")])
@pytest.mark.parametrize("more, dtype", [
    ({}, None), ({UP: (64, 64)}, "U8"), ({UP: (192, 64)}, "F8_E4M3"), ({UP: (12288, 1), UP + ".absmax": (192,)}, "BF16"), ({UP + "_scale_inv": (2, 1)}, "F32"),
    ({UP.replace("weight", "qweight"): (8, 192)}, "I32"), ({UP.replace("weight", "scales"): (192, 2)}, "F16")])
def test_quantization_config(checkpoint, run, tmp_path, config, said, more, dtype):
    """It may be what a merge or a training left: the weights decide."""
    ck = checkpoint()
    expected, ck.config = ck.expected(), ck.config | config
    folder = ck.save(tmp_path / "in")
    if more:
        with_tensors(folder, dtype, {f"model.{name}": shape for name, shape in more.items()})
        return refused(run(folder, "out.bin"), f"in/config.json: its quantized weights, expected the unquantized .*a GGUF file, found {said}$")
    status, err = run(folder, "out.bin")
    assert status == 0 and Path("out.bin").read_bytes() == expected
    assert "export.py: quantization_config counts for nothing: the weights are whole" in err


BAD_VISION = [
    ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "found Qwen3VLMoeForConditionalGeneration$"),
    ({"text_config": [1]}, r"config.json: text_config, expected a dict, found \[1\]"), ("Qwen3-VL-Embedding-2B", "a vision model that makes embeddings")]


@pytest.mark.parametrize("kind, changes, patterns", [
    (kind, changes, patterns) for kind, rows in (
        ("plain", BAD_CONFIG), ("experts", BAD_EXPERTS), ("vision", BAD_VISION))
    for changes, *patterns in rows])
def test_config_refused(checkpoint, refuses, tmp_path, kind, changes, patterns):
    name, changes = (changes, {}) if isinstance(changes, str) else ("in", changes)
    ck = checkpoint(**MIXTURE) if kind == "experts" else checkpoint()
    folder = (vision_language(ck) if kind == "vision" else ck).save(tmp_path / name)
    with_config(folder, changes)
    refuses(folder, *patterns)


@pytest.mark.parametrize("name, content, patterns", [
    ("config.json", None, ["not a checkpoint", "config.json"]),
    ("config.json", "{", ["config.json: broken", "JSONDecodeError"]),
    ("config.json", "[1]", ["list"]),
    ("tokenizer.json", None, ["tokenizer.json: missing"]),
    ("tokenizer.json", '{"model": ', ["tokenizer.json: broken"]),
    ("tokenizer_config.json", "\x00", ["tokenizer_config.json: broken"]),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "<new>", "special": 1}}}', ["<new>"]),
    ("added_tokens.json", '{"<new>": 9}', ["'<new>' of tokenizer_config.json, added_tokens.json .*save_pretrained.*found no such"]),
    ("tokenizer_config.json", '{"add_prefix_space": true}', ["add_prefix_space .*expected False, found True"]),
    ("tokenizer_config.json", '{"split_special_tokens": true}', ["split_special_tokens .*expected False, found True"]),
    ("tokenizer_config.json", '{"eos_token": "<none>"}', ["<none>"]),
    ("tokenizer_config.json", '{"chat_template": [1]}', ["tokenizer_config.json: broken"]),
    ("tokenizer_config.json", '{"chat_template": 5}', ["in: chat_template, expected a text, found 5"]),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "<think>", "special": 1}}}', ["<think>"]),
    ("modules.json", "[1]", ["modules.json: broken"]),
    ("modules.json", '[{"type": "x.Pooling", "path": "1_Pooling"}]', ["expected Transformer, Pooling, Norm", "found Pooling$"]),
    ("generation_config.json", '{"eos_token_id": ["x"]}', ["token id", "'x'"]),
    ("generation_config.json", '{"eos_token_id": [99999999]}', ["99999999"]),
])
def test_broken_files_refused(saved, refuses, name, content, patterns):
    if content is None:
        (saved / name).unlink()
    else:
        (saved / name).write_text(content)
    refuses(saved, *patterns)


def test_old_files_are_refused_by_name(checkpoint, run, tmp_path):
    ck = checkpoint()
    ck.files["pytorch_model.bin"] = ""
    folder = ck.save(tmp_path / "in")
    (folder / "model.safetensors").unlink()
    refused(run(folder, "out.bin"), "no weights.*save_pretrained", "found .*pytorch_model.bin")
    ck.files |= {"tokenizer.json": None, "vocab.json": {}, "merges.txt": "a b"}
    refused(run(ck.save(tmp_path / "slow"), "out.bin"), "vocab.json")

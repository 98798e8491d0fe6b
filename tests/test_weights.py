"""OUT.bin byte for byte: what export.py makes of each kind of checkpoint, and in what pieces."""
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference
from checkpoints import LAST, MIXTURE, experts, sentence_transformers, vision_language
from conftest import export_process, export_py as export, refused


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_byte_is_as_the_naive_quantization_gives(checkpoint, exported_bytes, dtype):
    ck = checkpoint(dtype)
    if dtype == "F32":  # the smallest numbers: a scale that underflows to 0, and a coarse one
        ck.tensors["embed_tokens.weight"][4, :] = 1e-45
        ck.tensors["embed_tokens.weight"][5, :] = np.linspace(-2.6e-43, 2.6e-43, 64)
    assert exported_bytes(ck, lines=2) == ck.expected()  # the summary, and that there is no chat template


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "head_dim": 32, "use_sliding_window": False, "sliding_window": 64,
         "max_window_layers": 1}
VARIANTS = {  # name -> (config, shards, group size, keys that config.json leaves out, tensors that nobody needs)
    "shards": ({}, 3, 64, [], {}), "no prefix": ({}, 1, 64, [], {}),
    "lm_head stored although tied": ({}, 1, 64, [], {"lm_head.weight": None,
                                                     "layers.0.self_attn.rotary_emb.inv_freq": (32,)}),
    "untied": ({"tie_word_embeddings": False}, 2, 64, [], {}),
    "group 32, odd shapes": ({"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3,
                              "num_key_value_heads": 3, "head_dim": 32, "vocab_size": 505}, 1, 32, [], {}),
    "head size not given": ({"head_dim": 128}, 1, 64, ["head_dim"], {}),
    "qwen2": (QWEN2, 2, 64, ["head_dim"], {}),
    "qwen2, untied, a window for no layer": (QWEN2 | {"tie_word_embeddings": False, "use_sliding_window": True,
                                                      "max_window_layers": 2}, 2, 64, ["head_dim"], {}),
    "qwen2, head_dim and attention_bias given": (QWEN2 | {"attention_bias": True}, 2, 64, [], {}),
    "experts": (MIXTURE | {"tie_word_embeddings": False}, 1, 64, [], {}),
    "experts, head size not given": (MIXTURE | {"head_dim": 32}, 1, 64, ["head_dim"], {}),
    "experts, transformers 5": (experts(5, "num_local_experts", norm_topk_prob=False), 3, 64, ["norm_topk_prob"], {})}


@pytest.mark.parametrize("which", VARIANTS)
def test_variants_of_checkpoints(checkpoint, exported_bytes, tmp_path, which):
    config, shards, group, absent, more = VARIANTS[which]
    ck = checkpoint(**config)
    ck.prefix = "" if which == "no prefix" else ck.prefix
    ck.tensors = {name: x * 9 if name.endswith("bias") else x for name, x in ck.tensors.items()}
    expected = ck.expected(group)
    ck.tensors |= {name: np.ones(shape, np.float32) if shape else ck.tensors["embed_tokens.weight"]
                   for name, shape in more.items()}
    for key in absent:
        del ck.config[key]
    assert exported_bytes(ck.save(tmp_path / "in", shards)) == expected


@pytest.mark.parametrize("how", ["_orig_mod.", "module.", "base_model.model.", "my.own_class.", "module._orig_mod.", "each layer"])
def test_names_of_wrappers(checkpoint, exported_bytes, tmp_path, how):
    """A prefix that all names have, and what torch.compile and FSDP put into them."""
    ck = checkpoint(tie_word_embeddings=False)
    expected, stored = ck.expected(), list(ck.stored())
    ck.stored = lambda: [(name.replace(".self_attn", "._orig_mod.self_attn").replace(".mlp", "._fsdp_wrapped_module.mlp")
                          if how == "each layer" else how + name, *more) for name, *more in stored]
    assert exported_bytes(ck.save(tmp_path / "in", 2), lines=2) == expected


def join_experts(ck, layout):
    """A layer's experts in one tensor, (experts, out, in), as transformers 5 or MLX calls it."""
    n, t = ck.n_experts, ck.tensors
    for layer in range(ck.config["num_hidden_layers"]):
        stem = f"layers.{layer}.mlp."
        gate, up, down = (np.stack([t.pop(f"{stem}experts.{i}.{kind}_proj.weight") for i in range(n)])
                          for kind in ("gate", "up", "down"))
        t |= {"transformers": {f"{stem}experts.gate_up_proj": np.concatenate([gate, up], axis=1),
                               f"{stem}experts.down_proj": down},
              "mlx": {f"{stem}switch_mlp.{kind}_proj.weight": x
                      for kind, x in (("gate", gate), ("up", up), ("down", down))}}[layout]
    return ck


@pytest.mark.parametrize("layout", ["transformers", "mlx"])
@pytest.mark.parametrize("dtype, shards, width", [("BF16", 1, 64), ("F32", 3, 192), ("F16", 2, 72)])
def test_experts_in_one_tensor(checkpoint, exported_bytes, tmp_path, layout, dtype, shards, width):
    ck = checkpoint(dtype, **experts(5, used=2, moe_intermediate_size=width, tie_word_embeddings=False))
    apart, joined = exported_bytes(ck), join_experts(checkpoint(dtype, **ck.config), layout)
    assert exported_bytes(joined.save(tmp_path / "joined", shards), lines=2) == apart


@pytest.mark.parametrize("shape, said", [((3, 64), "missing: layers.0.mlp.experts.0.gate_proj.weight"), ((3, 129, 64), "missing: layers.0.mlp.experts.0.gate_proj.weight"),
                                         ((2, 128, 64), "missing: layers.0.mlp.experts.2.gate_proj.weight"),
                                         ((4, 128, 64), "left over: model.layers.0.mlp.experts.gate_up_proj"),
                                         ((3, 64, 128), r"expected \[64, 64\], found \[32, 128\]")])
def test_experts_in_one_tensor_refused(checkpoint, refuses, shape, said):
    ck = join_experts(checkpoint(**experts(3)), "transformers")
    ck.tensors["layers.0.mlp.experts.gate_up_proj"] = np.zeros(shape, np.float32)
    refuses(ck, said)


@pytest.mark.parametrize("group, bits", [(32, 8), (64, 8), (256, 8), (32, 4), (64, 4)])
@pytest.mark.parametrize("key, width", [("intermediate_size", 300), ("moe_intermediate_size", 72)])
def test_widths_that_no_group_divides(checkpoint, run, tmp_path, monkeypatch, key, width, group, bits):
    """The file is that of a checkpoint with zeros, for which the same is computed; with 4 bits the levels' codes of
    zeros may differ where the scale is 0."""
    monkeypatch.setattr(export, "PIECE", 48 * 256)
    config = {"hidden_size": 256, "vocab_size": 515, "head_dim": 128} | (experts(3, used=2) if key[0] == "m" else {})
    ck = checkpoint(**config | {key: width})
    wide = checkpoint(**config | {key: width + -width % group})
    for name, shape in wide.shapes():
        x = ck.tensors[name]
        wide.tensors[name] = np.pad(x, [(0, new - old) for new, old in zip(shape, x.shape)])
    args = ["--group-size", group, "--bits", bits]
    assert run(ck.save(tmp_path / "in"), "out.bin", *args)[0] == run(wide.save(tmp_path / "wide"), "wide.bin", *args)[0] == 0
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("out.bin", "wide.bin"))
    assert len(ours) == len(theirs) and ours[:0x9C] == theirs[:0x9C] and (bits == 4 or ours == theirs == wide.expected(group))
    found, expected = (reference.Model.from_bin(tmp_path / name, "weights").w for name in ("out.bin", "wide.bin"))
    for kind in "gate", "down", "up":
        for a, b in zip(np.ravel(found[kind]), np.ravel(expected[kind])):
            assert np.array_equal(a.dense[:, :width], b.dense[:, :width])
            assert kind == "down" or not a.dense[width:].any()
    assert run("in", "out.bin", "--check")[0] == 0
    (tmp_path / "out.bin").write_bytes(ours[:-8] + b"\1" + ours[-7:])  # of zeros or not
    refused(run("in", "out.bin", "--check"), "is not what the source gives")


@pytest.mark.parametrize("shards", [1, 3])
def test_of_two_tied_tensors_one_is_stored(checkpoint, run, exported_bytes, tmp_path, shards):
    """safetensors.torch.save_model() keeps the first name in the alphabet."""
    ck = checkpoint()
    expected = ck.expected()
    ck.tensors["lm_head.weight"] = ck.tensors.pop("embed_tokens.weight")
    assert exported_bytes(ck.save(tmp_path / "in", shards), lines=2) == expected
    ck.config["tie_word_embeddings"] = False
    refused(run(ck.save(tmp_path / "in", shards), "x.bin"), "missing: embed_tokens.weight; left over: none")
    ck.config["tie_word_embeddings"] = True  # AutoModel has no lm_head, so the embedding would be random
    sentence_transformers(ck, LAST, "Transformer", "Pooling", "Normalize")
    refused(run(ck.save(tmp_path / "in", shards), "x.bin"), "missing: embed_tokens.weight; left over: none")


@pytest.mark.parametrize("names", [["v_head.summary.weight", "v_head.summary.bias"], ["score.weight"], [
    "model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "value_head.weight", *map(str, range(9))]])
def test_tensors_beside_a_whole_model(checkpoint, run, tmp_path, names):
    """transformers warns of them."""
    ck = checkpoint()
    expected, stored = ck.expected(), list(ck.stored())
    ck.stored = lambda: stored + [(name, np.ones((1, 64), "<u2"), None) for name in names]
    status, err = run(ck.save(tmp_path / "in", 2), "out.bin")
    said = [line for line in err if "left out, as transformers does: " in line]
    assert status == 0 and len(err) == 3 and len(said) == 1 and names[0] in said[0], err
    assert ("and 6 more" in said[0]) == (len(names) > 6) and (tmp_path / "out.bin").read_bytes() == expected


@pytest.mark.parametrize("embedding, nested", [(False, False), (False, True), (True, False)])
def test_a_classifier_of_its_own_although_it_is_tied(checkpoint, run, tmp_path, embedding, nested):
    """It counts, as in transformers 5; 4 took the embedding. --check compares it. An embedding model needs none."""
    ck = checkpoint()
    ck.tensors["lm_head.weight"] = np.roll(ck.tensors["embed_tokens.weight"], 1)
    ck.config["tie_word_embeddings"] = embedding
    expected = ck.expected()
    ck.config["tie_word_embeddings"] = True
    if embedding:
        sentence_transformers(ck, LAST, "Transformer", "Pooling", "Normalize")
    ck = vision_language(ck) if nested else ck
    status, err = run(ck.save(tmp_path / "in"), "out.bin")
    said = [line for line in err if "lm_head.weight is written, too" in line]
    assert status == 0 and (tmp_path / "out.bin").read_bytes() == expected and len(said) == (not embedding), err
    assert run("--check", "in", "out.bin")[0] == 0
    if not embedding:
        data = bytearray(expected)
        data[-1] ^= 1                                           # of the classifier's scales
        (tmp_path / "out.bin").write_bytes(data)
        refused(run("--check", "in", "out.bin"), "out.bin: lm_head.weight is not what the source gives")


@pytest.mark.parametrize("trained", [None, 0, 5, 33, 39])
def test_a_classifier_of_another_dtype_is_compared_as_a_whole(monkeypatch, trained):
    monkeypatch.setattr(export, "PIECE", 64)
    b = np.random.default_rng(1).normal(size=(40, 64)).astype("<f2")
    a = b.astype("<f4")
    if trained is not None:
        b[trained] *= 1.1
    tensors = {f"{name}.weight": export.Tensor(name, None, 0, dtype, x.shape, x.tobytes())
               for name, dtype, x in (("embed_tokens", "F32", a), ("lm_head", "F16", b))}
    assert ("lm_head.weight" in export.drop_copy(tensors)) == (trained is not None)


LARGE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize("bits, group, config", [(8, 64, {}), (8, 32, {"hidden_size": 96}), (4, 32, {"hidden_size": 96}),
                                                 (8, 64, experts(3)), (8, 128, LARGE), (8, 256, LARGE)])
def test_pieces_and_threads_change_nothing(checkpoint, exports, exported_bytes, monkeypatch, bits, group, config):
    ck, args = checkpoint(**config), ("--bits", bits, "--group-size", group)
    whole = exported_bytes(ck, *args)
    exports("--check", "in", "out.bin")
    monkeypatch.setattr(export, "PIECE", 64 * 7)
    pools = []
    monkeypatch.setattr(export, "ThreadPoolExecutor", lambda n: pools.append(n) or ThreadPoolExecutor(n))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7}, raising=False)  # of taskset, say
    monkeypatch.setattr(sys, "platform", "linux")
    assert exported_bytes("in", *args) == whole and (bits == 4 or whole == ck.expected(group)) and pools == [1]


BESIDE = {"hidden_size": 32, "num_hidden_layers": 1, "rms_norm_eps": 1e-3, "rope_theta": 7, "use_sliding_window": True,
          "max_window_layers": 0, "rope_scaling": {"type": "linear", "factor": 2}}  # counts for nothing there
VISION = {"image_token_id": 151655, "vision_config": {"hidden_size": 8, "depth": 1}}
RELATIVES = {  # architecture -> (that of the plain model, its other settings, where its layers are, tensors left out)
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2ForCausalLM", VISION | {"rope_scaling": {
        "type": "mrope", "mrope_section": [16, 24, 24]}}, "model.", "visual."),
    "Qwen2VLForConditionalGeneration": ("Qwen2ForCausalLM", VISION | {"rope_parameters": {  # of transformers 5
        "type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}},
        "model.language_model.", "model.visual."),
    "Qwen3VLForConditionalGeneration": ("Qwen3ForCausalLM", VISION | {"rope_scaling": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
        "model.language_model.", "model.visual."),
    "MiMoForCausalLM": ("Qwen2ForCausalLM", {"num_nextn_predict_layers": 1, "attention_bias": True}, "model.",
                        "model.mtp_layers."),
    "Qwen2Model": ("Qwen2ForCausalLM", {}, "", None), "Qwen3Model": ("Qwen3ForCausalLM", {}, "", None)}


NESTED = {"both say it": {}, "inside alone": {"tie_word_embeddings": None}, "inside, no above": {"tie_word_embeddings": False}}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("nested", [None, *NESTED])
@pytest.mark.parametrize("architecture", RELATIVES)
def test_relatives_of_the_plain_models(checkpoint, run, tmp_path, architecture, nested, tied):
    """HF's logits are those of the plain model with the same weights (transformers 5.24: by 0), and so is the file. A
    nested config may alone say that the classifier is tied, as transformers writes it where the value is its default."""
    plain, settings, prefix, left_out = RELATIVES[architecture]
    ck = checkpoint(architectures=[plain], tie_word_embeddings=tied, head_dim=32)
    expected, text = ck.expected(), ck.config | settings
    text.pop("architectures")
    inside = tied != (nested == "both say it")      # above it says what is true
    ck.config = {"text_config": text | {"tie_word_embeddings": inside}} | VISION | BESIDE if nested else text
    ck.config |= {"architectures": [architecture], "tie_word_embeddings": tied} | NESTED.get(nested, {})
    stored = [(name.replace("model.", prefix, 1), *more) for name, *more in ck.stored()]
    if left_out:
        stored.append((f"{left_out}0.attn.qkv.weight", np.ones((8, 8), "<u2"), None))
    ck.stored = lambda: stored
    status, err = run(ck.save(tmp_path / "in", 2), "out.bin")
    said = f", without {left_out.removeprefix('model.')}*)" if left_out else "in groups of 64)"
    assert status == 0 and said in err[0], err
    assert (tmp_path / "out.bin").read_bytes() == expected


def test_more_shards_than_files_that_may_be_open(checkpoint, tmp_path):
    ck = checkpoint()
    folder = ck.save(tmp_path / "in", len(ck.tensors))
    done = export_process(folder, "out.bin", cwd=tmp_path, preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(ck.tensors), len(ck.tensors))))
    assert done.returncode == 0 and (tmp_path / "out.bin").read_bytes() == ck.expected(), done

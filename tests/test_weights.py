"""OUT.bin byte for byte: what export.py makes of each kind of checkpoint, and in what pieces."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import MIXTURE, experts, vision_language
from conftest import export_process, export_py as export


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
            return ck(**MIXTURE, tie_word_embeddings=False), 1, 64
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
    assert status == 0 and "in groups of 64, without visual.*)" in err[0], err
    assert (tmp_path / "out.bin").read_bytes() == expected


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

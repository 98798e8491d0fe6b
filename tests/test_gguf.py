"""export.py on GGUF files of the checkpoints of checkpoints.py; what the checkpoint itself gives is the measure."""
import math
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import reference
from checkpoints import CHATML, experts
from conftest import (Hub, export_process, export_py as export, measures, read_tokenizer, refused, rows, split_tokenizer)
from gguf import GGMLQuantizationType as Kind
from ggufs import (CALLED_CONTROL, PRINTED, QUANTIZED, blocks, dequantize, gguf_name, is_matrix, random_blocks, values,
                   with_experts_joined, write, write_parts)
from reference import quantize
from test_four_bits import LEVELS, MATRICES, naive_q4


@pytest.fixture
def make(checkpoint, tmp_path):
    """make(checkpoint, kind, changes) writes model.gguf."""
    def call(ck=None, kind=Kind.F32, changes={}, tensors={}):
        ck = ck or checkpoint()
        return write(tmp_path / "model.gguf", values(ck) | changes, blocks(ck, kind) | tensors)
    return call


def files(path: Path) -> tuple[bytes, bytes, dict]:
    """OUT.bin and the tokenizer file, but for where it came from."""
    plain, sections = split_tokenizer(Path(f"{path}.tokenizer").read_bytes())
    return path.read_bytes(), plain, {tag: section for tag, section in sections.items() if tag != b"from"}


# ---------------------------------------------------------------------------- the same as from HF

VARIANTS = [
    ("F32", {}), ("F16", {}), ("BF16", {}), ("F16", {"tie_word_embeddings": False}),
    ("BF16", {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}),
    ("F32", {"rope_theta": 5000000, "rms_norm_eps": 1e-5}), ("F16", {"intermediate_size": 300}),
    ("BF16", {"architectures": ["Qwen2ForCausalLM"], "head_dim": 32}), ("BF16", experts(3, used=2))]


@pytest.mark.parametrize("added, dtype, config", [*[(None, *variant) for variant in VARIANTS], ("he", "BF16", {})])
def test_same_files_as_from_the_checkpoint(checkpoint, make, exports, tmp_path, monkeypatch, added, dtype, config):
    """Also with an added token that merges make: tokenizer.add_tokens() of a text of the vocabulary, which the converter
    calls user-defined."""
    ck = checkpoint(dtype, **config)
    ck.settings["chat_template"] = CHATML
    if added:
        monkeypatch.setattr("ggufs.PRINTED", PRINTED | {added})
        token = {"id": ck.tokenizer["model"]["vocab"][added], "content": added, "normalized": False}
        ck.tokenizer["added_tokens"].insert(0, token)
    for token in ck.tokenizer["added_tokens"]:
        token["special"] = token["content"] not in PRINTED | CALLED_CONTROL | {added}
    exports(ck.save(tmp_path / "hf"), "hf.bin")
    assert len(exports(make(ck, Kind[ck.dtype]), "gguf.bin")) == 1  # the summary alone: nothing was lost
    assert files(tmp_path / "gguf.bin") == files(tmp_path / "hf.bin")


@pytest.mark.parametrize("pre", [None, "default"])
@pytest.mark.parametrize("spoil, said", [(lambda tokens: tokens, None),
    *[(lambda tokens, old=old, new=new: [new if text == old else text for text in tokens], "tokenizer.ggml.pre")
      for old, new in (("<|im_end|>", "</s>"), ("<|endoftext|>", "<|eot|>"), ("he", "12"), ("he", "\u01201"), ("he", "v2"))]])
def test_no_pre_tokenizer_with_a_vocabulary_of_qwen(checkpoint, make, run, tmp_path, pre, spoil, said):
    """Nothing but Qwen's regular expression fits it. Another one is refused."""
    assert run(make(), "qwen2.bin")[0] == 0
    tokens = spoil(values(checkpoint())["tokenizer.ggml.tokens"])
    result = run(make(changes={"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens}), "out.bin")
    if said:
        return refused(result, said, f"expected qwen2, or Qwen's vocabulary .*found {pre!r}$")
    assert result[0] == 0 and files(tmp_path / "out.bin") == files(tmp_path / "qwen2.bin")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0])
def test_gate_and_up_in_one_tensor(checkpoint, make, run, tmp_path, kind):
    ck = checkpoint("F32", **experts(3, used=2))
    assert run(make(ck, kind), "apart.bin")[0] == 0
    tensors, metadata = blocks(ck, kind), values(ck)
    for layer in "01":
        gate, up = (tensors.pop(f"blk.{layer}.ffn_{name}_exps.weight")[0] for name in ("gate", "up"))
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1), kind
    assert run(write(tmp_path / "m.gguf", metadata, tensors), "out.bin")[0] == 0
    assert files(tmp_path / "out.bin") == files(tmp_path / "apart.bin")


@pytest.mark.parametrize("name", ["qwen2vl", "qwen25vl", "qwen3vl"])
def test_text_part_of_a_vision_model(checkpoint, exported_bytes, tmp_path, name):
    """Ollama's have what sees in the same file."""
    old = name.replace("vl", "").replace("25", "2")
    ck = checkpoint("BF16", architectures=[f"Q{old[1:]}ForCausalLM"], head_dim=32)
    metadata = {re.sub(f"^{old}[.]", f"{name}.", key): value for key, value in values(ck).items()} | {
        "general.architecture": name, f"{name}.rope.dimension_sections": [16, 24, 24, 0]}
    tensors = {"v.blk.0.attn_q.weight": (np.ones((8, 8), np.float32), Kind.F32)} if name != "qwen2vl" else {}
    assert exported_bytes(write(tmp_path / "m.gguf", metadata, blocks(ck, Kind.BF16) | tensors)) == ck.expected()


def test_padding_and_ends_of_ollama(checkpoint, make, run, tmp_path):
    """Its padding tokens, [PAD0] and so on, are no words of a user; more ids end an answer."""
    ck = checkpoint()
    tokens, types = (values(ck)[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    run(make(), "plain.bin")
    pads = {f"tokenizer.ggml.{key}": x[:-5] + more for key, x, more in (
        ("tokens", tokens, [f"[PAD{i}]" for i in range(5)]), ("token_type", types, [4] * 5))}
    run(make(changes=pads | {"tokenizer.ggml.eos_token_ids": [ck.eos, ck.eos - 2, ck.eos + 1]}), "out.bin")
    found, expected = (files(tmp_path / name) for name in ("out.bin", "plain.bin"))
    assert found[:2] == expected[:2] and found[2].pop(b"stop") == struct.pack("<3I", ck.eos, ck.eos - 2, ck.eos + 1)
    assert expected[2].pop(b"stop") == struct.pack("<2I", ck.eos, ck.eos - 2) and found[2] == expected[2]


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_classifier_is_shared_if_it_is_the_embedding(checkpoint, make, exported_bytes, same):
    ck = checkpoint("BF16")
    embedding = ck.tensors["embed_tokens.weight"]
    ck.tensors["lm_head.weight"] = embedding if same else np.roll(embedding, 1)
    data, ck.config["tie_word_embeddings"] = exported_bytes(make(ck, Kind.BF16)), same
    assert data == ck.expected()


@pytest.mark.parametrize("embedding, output, noise, shared", [
    ("Q5_0", "Q8_0", 0, "output"), ("Q8_0", "Q4_0", 0, "token_embd"), ("Q4_0", "F16", 0, "output"),
    ("F16", "F32", 0, None),        # floats are equal or two tables
    ("Q4_1", "Q5_1", 0.3, None),    # a classifier that was trained on, and unrelated ones
    ("Q5_0", "Q8_0", 0.2, None), ("Q8_0", "Q8_0", 0.01, None), ("Q4_0", "Q8_0", 3, None),
    ("Q5_0", "Q8_0", "of <|im_end|>", None)])  # a row that was trained alone
def test_the_better_one_of_two_tables_stays(checkpoint, make, exports, tmp_path, embedding, output, noise, shared):
    """If the classifier is the embedding in another kind; else both."""
    ck = checkpoint("F32")
    rng, x = np.random.default_rng(5), ck.tensors["embed_tokens.weight"]
    ck.tensors["embed_tokens.weight"] = x = rng.standard_normal(x.shape, np.float32)
    y = x * (1 + (0 if isinstance(noise, str) else noise) * rng.standard_normal(x.shape, np.float32))
    y[ck.eos] = x[5] if isinstance(noise, str) else y[ck.eos]
    tables = {f"{name}.weight": (gguf.quantize(z, Kind[kind]), Kind[kind])
              for name, z, kind in (("token_embd", x, embedding), ("output", y, output))}
    assert [line for line in exports(make(ck, tensors=tables), "out.bin", "--group-size", 32) if "is the embedding" in line] == ([
        f"export.py: the classifier ({output}) is the embedding ({embedding}): written once, from the "
        "more precise one"] if shared else [])
    w = reference.Model.from_bin(tmp_path / "out.bin").w
    for name, found in {"token_embd": w["embed"], "output": w["head"]}.items():
        q, scale = quantize(gguf.dequantize(*tables[f"{shared or name}.weight"]).reshape(len(x), -1), 32)
        assert np.array_equal(found.grouped.reshape(q.shape), q)
    assert np.array_equal(found.row_scale, scale)


def test_parts_are_joined(checkpoint, run, exported_bytes, tmp_path, monkeypatch):
    ck = checkpoint("F16")
    write_parts(tmp_path / "m", ck, 3)
    write(tmp_path / "joined.gguf", values(ck) | {"split.count": 0}, blocks(ck, Kind.F16))  # as llama.cpp's program does
    assert exported_bytes("m-00001-of-00003.gguf") == exported_bytes("joined.gguf") == ck.expected()
    with monkeypatch.context() as patch:
        patch.setattr("export.MOST_TENSORS", len(ck.tensors) - 1)
        refused(run("m-00001-of-00003.gguf", "out.bin"), "too many tensors")
    refused(run("m-00002-of-00003.gguf", "out.bin"), "one of several parts", "one of several parts, expected the first, -00001-of-")
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "elsewhere")
    refused(run("m-00001-of-00003.gguf", "x.bin"), "m-00003-of-00003.gguf")


@pytest.fixture
def several(checkpoint, tmp_path):
    """A model on the hub as F16, Q8_0, Q4_0 and BF16, the last in two parts."""
    ck = checkpoint("F16", hidden_size=256)
    folder = tmp_path / "hub/org/tiny-GGUF"
    (folder / "BF16").mkdir(parents=True)
    for name in FILES[:5]:
        (folder / name).write_text("{}")
    for kind in Kind.F16, Kind.Q8_0, Kind.Q4_0:
        write(folder / f"tiny-{kind.name}.gguf", values(ck), blocks(ck, kind))
    ck.dtype = "BF16"
    write_parts(folder / "BF16/tiny-BF16", ck, 2)


@pytest.mark.parametrize("beside", ["mtp-tiny-Q8_0.gguf", "imatrix.gguf", "tiny-imatrix.gguf", "x/Tiny-Eagle3-Q8_0.gguf", "tiny-draft-Q8_0.gguf",
                                    "tiny-DFlash-Q8_0.gguf", "imatrix_unsloth.gguf", "tiny-MTP-Q8_0.gguf"])
@pytest.mark.parametrize("wanted, default", [("", ""), ("", "Q8_0"), ("Q8_0", ""), ("q8_0", "Q8_0")])
def test_what_lies_beside_a_model(beside, wanted, default):
    """A drafter or llama-imatrix's file is chosen by its own name alone, unless there is nothing else."""
    files = ["drafts-Q8_0.gguf", beside]
    assert export.choose_gguf("", files, wanted, default) == ["drafts-Q8_0.gguf"]
    assert export.choose_gguf("", files, beside, default) == [beside] == export.choose_gguf("", [beside, "x.txt"], "", default)


FILES = """README.md config.json mmproj-tiny-Q8_0.gguf tiny-mmproj-F16.gguf BF16/mmproj-BF16.gguf
tiny-F16.gguf tiny-Q8_0.gguf tiny-Q4_0.gguf BF16/tiny-BF16-00001-of-00002.gguf
BF16/tiny-BF16-00002-of-00002.gguf""".split()


@pytest.mark.parametrize("name, file", [
    ("org/tiny-GGUF", "tiny-Q8_0"), ("org/tiny-GGUF:Q4_0", "tiny-Q4_0"),
    ("org/tiny-GGUF:bf16", "BF16/tiny-BF16-00001-of-00002"),
    ("org/tiny-GGUF/tiny-F16.gguf", "tiny-F16"), ("https://hf.co/org/tiny-GGUF/", "tiny-Q8_0"),
    ("https://hf.co/org/tiny-GGUF/tree/main", "tiny-Q8_0"), ("hf.co/org/tiny-GGUF", "tiny-Q8_0"),
    ("huggingface.co/org/tiny-GGUF:Q4_0", "tiny-Q4_0"),
    ("https://hf.co/org/tiny-GGUF/blob/main/tiny-F16.gguf#x", "tiny-F16"),
    ("org/tiny-GGUF/BF16/tiny-BF16-00002-of-00002.gguf", "BF16/tiny-BF16-00001-of-00002")])
def test_names(name, file):
    found = export.HUB_NAME.fullmatch(name)
    assert found["model"] == "org/tiny-GGUF"
    found = export.choose_gguf("", FILES, found["kind"] or found["file"], "Q8_0")
    assert found[0] == f"{file}.gguf"


@pytest.mark.parametrize("wanted, more, said", [
    *[(wanted, [], f"x: no GGUF file {wanted}, expected the name of one of these, found "
       "BF16/tiny-BF16.gguf, tiny-F16.gguf, tiny-Q4_0.gguf, tiny-Q8_0.gguf$")
      for wanted in ("Q6_K", "x.gguf", "4_0")],
    ("", ["other-Q8_0.gguf"], "x: more than one GGUF file Q8_0, expected the name of one")])
def test_names_of_no_file(wanted, more, said):
    with pytest.raises(export.Refused, match=said):
        export.choose_gguf("x", FILES + more, wanted, "Q8_0")


@pytest.mark.parametrize("name, file, out", [
    ("org/tiny-GGUF:Q4_0", "tiny-Q4_0", "tiny-Q4_0-q4.bin"),
    ("URL/org/tiny-GGUF/blob/main/BF16/tiny-BF16-00002-of-00002.gguf?download=true",
     "BF16/tiny-BF16-00001-of-00002", "tiny-BF16.bin")])
def test_from_the_hub_by_name(several, hub, run, tmp_path, name, file, out):
    """The same as from that file; nothing else is downloaded."""
    status, err = hub(name.replace("URL", hub.url))
    assert status == 0 and f"wrote {out} " in err[0] and "the download stays in" in " ".join(err), err
    asked = {re.sub("-0000[12]-", "-00001-", asked) for asked in hub.asked()}
    assert asked == {f"{file}.gguf"}
    sections = split_tokenizer((tmp_path / f"{out}.tokenizer").read_bytes())[1]
    assert sections[b"from"].startswith(f"org/tiny-GGUF/{file}.gguf at {Hub.newest}, ".encode())
    assert run(tmp_path / f"hub/org/tiny-GGUF/{file}.gguf", "x.bin")[0] == 0
    assert files(tmp_path / out) == files(tmp_path / "x.bin")
    assert hub(name.replace("URL", hub.url), "--check")[0] == 0


@pytest.mark.parametrize("kind, more, pattern", [
    ("llama", [], "^export.py: org/tiny-GGUF: general.architecture is not supported, expected qwen2 or .*found 'llama'$"),
    ("llama", ["mmproj-F16.gguf"], "^export.py: org/tiny-GGUF: general.architecture is not supported"), ("qwen3", [], None), ("clip", [], None),
    (None, [], None), ("eagle3", ["tiny-eagle3.gguf"], None)])
def test_another_family_on_the_hub(checkpoint, hub, tmp_path, monkeypatch, kind, more, pattern):
    """The hub says it before anything is downloaded; it may speak of what lies beside the model."""
    ck = checkpoint()
    folder = tmp_path / "hub/org/tiny-GGUF"
    folder.mkdir(parents=True)
    write(folder / "tiny.gguf", values(ck), blocks(ck, Kind.F16))
    for name in more:
        (folder / name).write_text("")
    monkeypatch.setattr(Hub, "metadata", {"gguf": {"architecture": kind, "total": 1}} if kind else {})
    if pattern:
        refused(hub("org/tiny-GGUF"), pattern)
    else:
        assert hub("org/tiny-GGUF")[0] == 0
    assert hub.asked() == (set() if pattern else {"tiny.gguf"})


def test_where_a_refused_download_lies(checkpoint, hub, tmp_path):
    (tmp_path / "hub/org/tiny-GGUF").mkdir(parents=True)
    write(tmp_path / "hub/org/tiny-GGUF/tiny.gguf", values(checkpoint()) | {"general.architecture": "llama"}, {})
    for more in f"; the download stays in {hub.cache}/models--org--tiny-GGUF; to remove it, delete that folder or run .*$", "'llama'$":
        refused(hub("org/tiny-GGUF"), f"general.architecture .*{more}")


def test_not_on_the_hub(hub, tmp_path):
    folder = tmp_path / "hub/org/tiny-GGUF"
    folder.mkdir(parents=True)
    for name in "tiny-F16.gguf", "tiny-Q8_0.gguf":
        (folder / name).write_text("")
    refused(hub("org/tiny-GGUF:Q6_K"), "org/tiny-GGUF: no GGUF file Q6_K.* found tiny-F16")
    refused(hub("org/tiny-GGUF", "nowhere/x.bin"), "nowhere: missing")
    assert not hub.asked()
    refused(hub("org/tiny-GGUF/tiny-F16.gguf"), "^export.py: org/tiny-GGUF/tiny-F16.gguf: broken")


def test_folder_with_a_gguf(several, run, tmp_path):
    folder = tmp_path / "hub/org/tiny-GGUF"
    refused(run(folder), "tiny-GGUF: more than one GGUF file, expected the name of one",
            "tiny-F16.gguf, tiny-Q4_0.gguf, tiny-Q8_0.gguf$")
    for name in "tiny-F16.gguf", "tiny-Q4_0.gguf":
        (folder / name).unlink()
    assert run(folder)[0] == 0 and (tmp_path / "tiny-Q8_0.bin").exists()
    assert run(folder / "BF16")[0] == 0 and (tmp_path / "tiny-BF16.bin").exists()


# ---------------------------------------------------------------------------- quantized weights

def assert_embedding(path: Path, x: np.ndarray, group=64) -> None:
    """The file's embedding is this matrix, quantized."""
    found, (q, scale) = reference.Model.from_bin(path).w["embed"], quantize(x, group)
    assert np.array_equal(found.grouped.reshape(q.shape), q)
    assert np.array_equal(found.row_scale, scale)


def test_q8_0_goes_over_as_it_is(checkpoint, make, exports, exported_bytes, tmp_path):
    ck = checkpoint("F32")
    path = make(ck, Kind.Q8_0)
    data = bytearray(path.read_bytes())
    stored = blocks(ck, Kind.Q8_0)["token_embd.weight"][0].reshape(-1, 34)
    at = data.find(stored[64:67].tobytes())
    assert at > 0
    data[at + 2] = 0x80  # -128, which our own quantization never makes
    stored[64, 2] = 0x80
    stored[65, 2:] = np.arange(1, 33)  # far from 127: no rescaling
    data[at + 34:at + 68] = stored[65].tobytes()
    path.write_bytes(data)
    assert struct.unpack_from("<I", exported_bytes(path, lines=1), 0x2C) == (32,)
    found = reference.Model.from_bin(tmp_path / "out.bin").w["embed"]
    assert np.array_equal(found.grouped.reshape(-1, 32), stored[:, 2:].view(np.int8))
    assert np.array_equal(found.row_scale.ravel(), stored[:, :2].copy().view("<f2")[:, 0])
    assert "rms error at most 0 %" in exports("--check", path, "out.bin")[-1]  # every tensor, that is
    _, said = exports(path, "out64.bin", "--group-size", 64)
    assert "Q8_0: quantized again, in groups of 64" in said
    assert_embedding(tmp_path / "out64.bin", gguf.dequantize(stored, Kind.Q8_0).reshape(-1, 64))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_other_quantizations(checkpoint, make, exports, tmp_path, kind):
    """As the gguf package dequantizes them, then quantized as ever; a note says so."""
    kind = Kind[kind]
    ck = checkpoint("F32", hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
    tensors = random_tensors(ck, kind, "")
    _, said = exports(make(ck, tensors=tensors), "out.bin")
    assert f"{kind.name}: quantized again" in said
    assert_embedding(tmp_path / "out.bin", gguf.dequantize(*tensors["token_embd.weight"]))


FOUR_BITS = {"Q4_0": list(range(-8, 8)), "Q1_0": list(range(-8, 8)),
             "IQ4_NL": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]}


def random_tensors(ck, kind, part="blk."):
    """Random blocks of that kind in matrices with such names; scales may be negative, too."""
    rng = np.random.default_rng(4)
    return {name: (random_blocks(rng, x.shape, kind), kind)
            for name, x in with_experts_joined(ck.tensors).items() if is_matrix(name, x) and part in name}


ONE_BIT = pytest.param("Q1_0", {}, 128, marks=pytest.mark.skipif(
    "Q1_0" not in Kind.__members__, reason="this gguf package can't write Q1_0"))


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of numpy, where a group is zeros
@pytest.mark.parametrize("kind, config, group", [
    ("Q4_0", {}, 32), ("IQ4_NL", {}, 32), ("Q4_0", experts(3), 32), ONE_BIT,
    pytest.param("Q1_0", {}, 32, marks=ONE_BIT.marks)])
def test_four_bits_go_over_as_they_are(checkpoint, make, exports, tmp_path, kind, config, group):
    """Matrices of another kind, here the first ffn_down, are quantized with the same levels: most files have some."""
    ck = checkpoint("F32", hidden_size=256, **{"intermediate_size": 256} | config)
    down = "blk.0.ffn_down" + "_exps" * bool(config)
    tensors = random_tensors(ck, Kind[kind]) | random_tensors(ck, Kind.Q6_K, "token_embd")
    tensors[f"{down}.weight"] = blocks(ck, Kind.Q4_1)[f"{down}.weight"]
    args = ["--group-size", group] if group > 32 else []
    wrote, said = exports(make(ck, tensors=tensors), *args)[:2]
    assert "wrote model-q4.bin" in wrote and f"export.py: Q4_1, Q6_K: quantized again, in groups of {group}" in said
    model = reference.Model.from_bin(tmp_path / "model-q4.bin", "weights")
    data = (tmp_path / "model-q4.bin").read_bytes()
    assert list(np.frombuffer(data, "i1", 16, 0x70)) == FOUR_BITS[kind]
    assert struct.unpack_from("<2I", data, 0x68) == (4, 0)
    for ours, theirs in MATRICES.items():
        for layer, found in enumerate(model.w[ours]):
            name = theirs.replace("mlp", "mlp.experts" if config else "mlp")
            name = gguf_name(f"layers.{layer}.{name}.weight")
            x = dequantize(*tensors[name])
            found = [m.dense for m in found] if isinstance(found, list) else found.dense
            if name == f"{down}.weight":
                expected, _ = naive_q4(x, group, np.array(FOUR_BITS[kind]))
                found, x = (np.reshape(y, (-1, group)) for y in (found, x))
                assert ((x - found) ** 2).sum() <= 1.005 * ((x - expected) ** 2).sum()
            else:
                assert np.array_equal(found, x)
    assert_embedding(tmp_path / "model-q4.bin", gguf.dequantize(*tensors["token_embd.weight"]), group)
    assert "rms error at most" in exports("model.gguf", "--check")[0]


BETTER = {  # matrices, the kind that they have in a file mostly in Q4_0 or IQ4_NL, Header.eight_bits
    "v": (["attn_v"], "Q5_K", 4), "k and v": (["attn_v", "attn_k"], "Q8_0", 6), "o": (["attn_output"], "Q6_K", 8), "down": (["ffn_down"], "F16", 32),
    "q and gate": (["attn_q.", "ffn_gate."], "Q5_0", 17), "half": (["blk.0.attn_v"], "Q8_0", 0), "no more": (["attn_v"], "Q4_1", 0),
    "all": (["attn_k", "attn_v", "ffn_up", "attn_output"], "BF16", 78)}


@pytest.mark.parametrize("kind", ["Q4_0", "IQ4_NL"])
@pytest.mark.parametrize("which", BETTER)
def test_what_has_more_bits_keeps_them(checkpoint, make, exports, tmp_path, which, kind):
    """Uploaders give some matrices more on purpose, llama.cpp v. What is in 8 bits is as exact as in a file in Q8_0."""
    parts, better, expected = BETTER[which]
    ck = checkpoint("F32", hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4)
    tensors = random_tensors(ck, Kind[kind])
    for part in parts:
        tensors |= random_tensors(ck, Kind[better], part) if "_K" in better else {
            name: (gguf.quantize(x, Kind[better]), Kind[better]) for name, x in with_experts_joined(ck.tensors).items() if part in name}
    exports(make(ck, tensors=tensors), "out.bin")
    data = Path("out.bin").read_bytes()
    assert struct.unpack_from("<2I", data, 0x68) == (4, expected) and list(np.frombuffer(data, "i1", 16, 0x70)) == FOUR_BITS[kind]
    w = reference.Model.from_bin(tmp_path / "out.bin", "weights").w
    for i, (ours, theirs) in enumerate(MATRICES.items()):
        if expected >> i & 1:
            x = dequantize(*tensors[gguf_name(f"layers.1.{theirs}.weight")])
            assert ((w[ours][1].dense - x) ** 2).sum() <= (0 if better == "Q8_0" else 1e-4) * (x ** 2).sum()
    assert "out.bin matches model.gguf" in exports("model.gguf", "out.bin", "--check")[0]


def ffn_in_q4_0(ck):
    return {name: block for name, block in blocks(ck, Kind.Q4_0).items() if "ffn_" in name}


def two_kinds(first, second):
    """Of the layers' matrices, half are of each kind."""
    return lambda ck: random_tensors(ck, Kind[first]) | random_tensors(ck, Kind[second], "blk.1.")


@pytest.mark.parametrize("kind, tensors, args, name, bits, group, said", [
    # Quantized again, with our own levels
    ("Q8_0", two_kinds("Q4_0", "Q4_0"), ["--group-size", 64], "model-q4.bin", 4, 64, "Q4_0, Q8_0: quantized again, in groups of 64"),
    ("Q8_0", two_kinds("Q4_0", "Q4_0"), ["--bits", 8], "model.bin", 0, 64, "Q4_0, Q8_0: quantized again, in groups of 64"),
    ("Q8_0", two_kinds("Q4_0", "Q4_0"), ["--bits", 8, "--group-size", 64], "model.bin", 0, 64, "Q4_0, Q8_0: quantized again"),
    ("F32", two_kinds("Q4_0", "Q4_0"), ["--bits", 8], "model.bin", 0, 64, "Q4_0: quantized again, in groups of 64"),
    # Most weights decide, not most matrices: three of seven are larger. No more than half of them make eight bits.
    ("Q5_0", ffn_in_q4_0, [], "model-q4.bin", 4, 32, "Q5_0: quantized again"),
    # Likewise for groups of 32
    ("Q5_0", two_kinds("Q8_0", "Q8_0"), [], "model.bin", 0, 32, "Q5_0: quantized again, in groups of 32"),
    *[("F32", two_kinds(*kinds), [], "model.bin", 0, None, "quantized again") for kinds in (
        ("Q4_0", "IQ4_NL"), ("Q4_0", "Q5_0"), ("Q5_1", "IQ4_NL"))],
    *[("F32", two_kinds(*kinds), ["--bits", 4], "model-q4.bin", 4, 32,
       f"{', '.join(sorted(kinds))}: quantized again, in groups of 32, which adds") for kinds in (
        ("Q4_0", "IQ4_NL"), ("Q4_0", "Q5_0"), ("Q5_1", "IQ4_NL"))]])
def test_which_bits_and_groups(checkpoint, make, run, tmp_path, kind, tensors, args, name, bits, group, said):
    ck = checkpoint("F32")
    path = make(ck, Kind[kind], tensors=tensors(ck))
    status, err = run(path, *args)
    assert status == 0 and f"wrote {name} " in err[0] and said in " ".join(err[1:]), err
    data = (tmp_path / name).read_bytes()
    assert struct.unpack_from("<I", data, 0x68) == (bits,)
    assert group is None or struct.unpack_from("<I", data, 0x2C) == (group,)
    levels = FOUR_BITS["Q4_0"] if said == "Q5_0: quantized again" else LEVELS
    assert data[0x70:0x80] == (np.int8(levels).tobytes() if bits else bytes(16))
    assert run(path, name, "--check")[0] == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, which a user does not see
@pytest.mark.parametrize("kind, args", [("Q8_0", []), ("Q4_0", []), ("Q8_0", ["--group-size", 64])])
def test_infinite_scale_is_refused(checkpoint, make, run, tmp_path, kind, args):
    ck = checkpoint("F32")
    tensors = blocks(ck, Kind[kind])
    tensors["blk.1.ffn_up.weight"][0][3, :2] = 0x00, 0x7C
    make(ck, tensors=tensors)
    done = (export_process("model.gguf", "out.bin", *args, cwd=tmp_path)  # without numpy's warning
            if args else run("model.gguf", "out.bin"))
    refused(done, "blk.1.ffn_up.weight", "finite numbers")
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


# ---------------------------------------------------------------------------- metadata

def rope_of(path: Path):
    """theta and the frequencies and the factor of scaled rope."""
    model = reference.Model.from_bin(path)
    return model.c["theta"], model.freq.tolist(), np.float32(model.factor)


SCALING = {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
           "qwen3.rope.scaling.original_context_length": 128}
DEFAULT = 0.1 * math.log(4) + 1


@pytest.mark.parametrize("changes, fields", [
    (SCALING, (1e6, 4, 128, 0, 0, 0)),
    (SCALING | {"qwen3.rope.scaling.yarn_beta_fast": 16.0, "qwen3.rope.scaling.yarn_beta_slow": 2.0,
                "qwen3.rope.scaling.yarn_attn_factor": 1.5, "qwen3.rope.scaling.finetuned": True},
     (1e6, 4, 128, 16, 2, 1.5)),
    # DeepSeek's attn_factor, which transformers ignores
    (SCALING | {"qwen3.rope.scaling.yarn_attn_factor": 1 / DEFAULT}, (1e6, 4, 128, 0, 0, 0)),
    (SCALING | {"qwen3.rope.scaling.yarn_attn_factor": 1.0005 / DEFAULT}, (1e6, 4, 128, 0, 0, 0)),
    (SCALING | {"qwen3.rope.scaling.yarn_attn_factor": 1.002 / DEFAULT}, (1e6, 4, 128, 0, 0, 1.002 / DEFAULT)),
    (SCALING | {"qwen3.rope.scaling.yarn_attn_factor": 0.95 / DEFAULT}, (1e6, 4, 128, 0, 0, 0.95 / DEFAULT)),
    ({"qwen3.rope.scaling.type": "none"}, (1e6,))])
def test_rope(make, exports, tmp_path, changes, fields):
    assert len(exports(make(changes=changes), "out.bin")) == 1
    theta, *yarn = fields
    yarn = dict(zip(("factor", "original", "beta_fast", "beta_slow", "attention_factor"), yarn))
    freq, factor = reference.rope_frequencies({"head_dim": 64, "theta": theta, "yarn": yarn})
    assert rope_of(tmp_path / "out.bin") == (theta, freq.tolist(), np.float32(factor))


def tokenizer_of(path: Path, ck):
    return read_tokenizer(Path(f"{path}.tokenizer").read_bytes(), ck.config["vocab_size"])


def test_tokenizer_metadata(checkpoint, make, run, tmp_path):
    ck = checkpoint()
    end, turn = ck.eos - 2, ck.eos  # <|endoftext|>, <|im_end|>
    assert run(make(ck, changes={
        "tokenizer.ggml.eos_token_id": end, "tokenizer.ggml.eot_token_id": turn,
        "tokenizer.ggml.eom_token_id": end + 5, "tokenizer.ggml.bos_token_id": turn, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True, "qwen3.pooling_type": 3,
        "tokenizer.chat_template": None, "general.sampling.temp": None,
        "general.sampling.top_p": 0.5, "general.sampling.top_k": None}), "out.bin")[0] == 0
    head, records, sections = tokenizer_of(tmp_path / "out.bin", ck)
    assert head[1:] == (turn, end)
    assert rows(sections["head"], 1) == [(turn,)] and rows(sections["tail"], 1) == [(end,)]
    assert rows(sections["stop"], 1) == [(end,), (turn,), (end + 5,)]  # of a text, a turn, a message
    assert sections["samp"] == struct.pack("<2fI", 1.0, 0.5, 50)  # the rest as in transformers
    assert rows(sections["mode"], 1) == [(4,)] and "chat" not in sections
    special = {records[i][1].decode() for i, flag in rows(sections["adde"], 2) if flag & 1}
    printed = {records[i][1].decode() for i, flag in rows(sections["adde"], 2) if not flag & 1}
    assert printed == PRINTED | CALLED_CONTROL
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|box_start|>"} <= special
    assert records[-5:] == [(-1e6, b"")] * 5  # [PAD...], which nothing makes
    for add, said in (False, 0), (None, 1):  # an old converter's
        err = run(make(ck, changes={"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": add}), "out.bin")[1]
        assert sum("no add_eos_token: Qwen3-Embedding needs <|endoftext|>" in line for line in err) == said


NO_SAMPLING = {f"general.sampling.{key}": None for key in ("temp", "top_p", "top_k")}
THINKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")


@pytest.mark.parametrize("architecture, changes, penalty", [
    ("Qwen2ForCausalLM", {}, 1.1), ("Qwen2ForCausalLM", {"general.sampling.top_k": 20}, None),
    ("Qwen2ForCausalLM", {"tokenizer.chat_template": THINKING}, None),
    ("Qwen2ForCausalLM", {"tokenizer.chat_template": None}, None), ("Qwen3ForCausalLM", {}, None)])
def test_sampling_settings_of_qwen2_5(checkpoint, make, run, tmp_path, architecture, changes, penalty):
    """Where a file has none: for a chat model that does not think."""
    ck = checkpoint(architectures=[architecture], head_dim=32)
    status, err = run(make(ck, changes=NO_SAMPLING | changes), "out.bin")
    sections = tokenizer_of(tmp_path / "out.bin", ck)[2]
    said = "export.py: no sampling settings in the file: Qwen2.5's, -t 0.7 -p 0.8 -k 20 -e 1.1" in err
    assert status == 0 and said == bool(penalty)
    assert (sections.get("samp") == struct.pack("<2fI", 0.7, 0.8, 20)) == bool(penalty)
    assert sections.get("repe") == (penalty and struct.pack("<f", penalty))


def test_larger_models_of_qwen2_5_have_a_lower_penalty(checkpoint, make, monkeypatch):
    path = make(checkpoint(architectures=["Qwen2ForCausalLM"], head_dim=32), changes=NO_SAMPLING)
    for weights, penalty in (1_999_999_999, 1.1), (2_000_000_000, 1.05):
        more = export.Tensor("x", path, 0, "F32", (weights,))
        monkeypatch.setattr(export, "drop_copy", lambda *_: {"x": more})
        assert export.read_gguf(path).generation["repetition_penalty"] == penalty


def test_reranker(checkpoint, make, run, tmp_path):
    """Its head is two rows of the classifier, and -o 'yes|no' does what it does."""
    ck = checkpoint("F16")
    head = {"cls.output.weight": (np.ones((2, 64), np.float32), Kind.F32)}
    path = make(ck, Kind.F16, {"qwen3.pooling_type": 4, "qwen3.classifier.output_labels": ["yes", "no"]}, head)
    status, err = run(path, "out.bin")
    assert status == 0 and "cls.output.weight is left out" in err[1] and "-o 'yes|no'" in err[1]
    assert (tmp_path / "out.bin").read_bytes() == ck.expected()
    assert "mode" not in tokenizer_of(tmp_path / "out.bin", ck)[2]  # it chats
    refused(run(make(ck, Kind.F16, tensors=head), "out.bin"), "left over: cls.output.weight")


@pytest.mark.parametrize("where", ["read_gguf_config", "read_gguf_tokenizer", "add_tensor", "drop_copy", "read_gguf"])
def test_our_own_bugs(make, run, monkeypatch, where):
    """They are not blamed on the file."""
    path = make()
    monkeypatch.setattr(export, where, lambda *_: {}["a bug"])
    refused(run(path, "out.bin"), "^export.py: out.bin: export.py failed, .*found KeyError: 'a bug', in lines")


# ---------------------------------------------------------------------------- refused

def without(name):
    return lambda tensors: tensors.pop(name)


def shape(name, *new):
    return lambda tensors: tensors.update({name: (np.zeros(new, np.float32), Kind.F32)})


BAD = [  # changes of the metadata, of the tensors, the message
    ({"general.architecture": "llama"}, None, "general.architecture .*'llama'"),
    ({"general.architecture": "qwen2moe"}, None, "qwen2 or qwen2vl or qwen3 .* qwen35 or .*, found 'qwen2moe'"),
    ({"general.architecture": "clip"}, None, "no model, expected the file of its model.* found clip$"),
    ({"general.type": "mmproj"}, None, "no model, expected the file of its model.* found mmproj$"),
    ({"general.type": "adapter"}, without("token_embd.weight"), "no model, .*llama-export-lora .*found adapter$"),
    ({"tokenizer.ggml.model": "llama"}, None, "tokenizer.ggml.model .*gpt2, found 'llama'"),
    ({"tokenizer.ggml.pre": "llama-bpe"}, None, "tokenizer.ggml.pre .*qwen2.*'llama-bpe'"),
    ({"tokenizer.ggml.tokens": None}, None, "KeyError: 'tokens'"),
    ({"tokenizer.ggml.merges": None}, None, "KeyError: 'merges'"),
    ({"tokenizer.ggml.token_type": [6] * 507}, None, "token_type of '!'.*found 6"),
    ({"tokenizer.ggml.token_type": [1]}, None, "zip"),
    ({"qwen3.context_length": None}, None, "max_position_embeddings.*found None"),
    ({"qwen3.block_count": 3}, None, "missing: layers.2"),
    ({"qwen3.attention.head_count": [2, 2]}, None, r"num_attention_heads, expected an integer .*found \[2, 2\]"),
    ({"qwen3.attention.head_count": 0}, None, "num_attention_heads, expected an integer .*found 0"),
    ({"qwen3.attention.causal": False}, None, "attention.causal is not supported, expected True, found False"),
    ({"split.count": 3}, None, "split.count is not supported, expected 1, found 3"),
    *[({"split.count": n}, None, f"split.count is not supported, expected 1, found {re.escape(repr(n))}") for n in ([3], "3", 2.0)],
    ({"tokenizer.chat_template": 5}, None, "chat_template, expected a text, found 5"),
    ({}, lambda t: t.update({f"{name}.weight": (np.zeros((0, 64), kind), Kind[name_of]) for name, kind, name_of in (
        ("token_embd", np.float32, "F32"), ("output", np.float16, "F16"))}), "vocab_size, expected an integer from 1 .*found 0"),
    ({"qwen3.embedding_length": 64.0}, None, "hidden_size.*64.0"),
    ({"qwen3.rope.freq_base": None}, None, "rope.freq_base, expected a number .*found None$"),  # of old converters
    ({"qwen3.rope.scaling.type": "dynamic"}, None, "rope_type.*'dynamic'"),
    (SCALING | {"qwen3.rope.scaling.alpha": 1.0}, None, "alpha"),
    ({"qwen3.rope.dimension_count": 32}, None, "partial_rotary_factor is not supported, expected 1, found 0.5"),
    ({"qwen3.pooling_type": 1}, None, "pooling_type.*found 1"),
    ({"tokenizer.ggml.eos_token_id": 99999}, None, "token ids.*99999"),
    *[({"general.alignment": value}, None, "general.alignment, expected a power "
                                rf"of two from 8, found {re.escape(repr(value))}") for value in (
        0, 4, 48, -32, 32.0, "32", True, [32])],
    ({}, without("token_embd.weight"), "tensors, expected token_embd.weight"),
    ({}, without("blk.1.attn_q.weight"), "missing: layers.1.self_attn.q_proj.weight"),
    ({}, shape("blk.0.ffn_gate_exps.weight", 1, 2, 2), "left over: blk.0.ffn_gate_exp"),
    ({}, shape("blk.0.ffn_gate_exps.weight", 2, 2), "left over: blk.0.ffn_gate_exps.wei"),
    ({}, shape("blk.0.ffn_gate_exps.weight", 4097, 1, 1), "left over: blk.0.ffn_gate_exps.weight"),
    ({}, without("blk.0.attn_q_norm.weight"), "missing: layers.0.self_attn.q_norm"),
    ({}, shape("blk.0.attn_q.bias", 128), "left over: blk.0.attn_q.bias"),
    ({}, shape("blk.0.attn_q.weight", 64, 128),
              r"shape of blk.0.attn_q.weight, expected \[128, 64\], found \[64, 128\]"),
    ({"qwen3.attention.head_count_kv": [2, 1]}, None, "shape of blk.0.attn_k.weight, expected .128, 64., found .64, 64."),
    ({}, lambda t: t.update({"output_norm.weight": (np.zeros(64, np.int32), Kind.I32)}),
                 "dtype of output_norm.weight.*I32"),
]


BAD_EXPERTS = [
    ({"qwen3moe.expert_count": None}, None, "num_experts.*found None"),
    ({"qwen3moe.expert_used_count": 4}, None, "num_experts_per_tok.*found 4"),
    ({"qwen3moe.expert_feed_forward_length": None}, None, "moe_intermediate_size.*None"),
    ({"qwen3moe.expert_count": 4}, None, "missing: layers.0.mlp.experts.3.gate_proj.weight"),
    ({"qwen3moe.expert_count": 2}, None, "left over: blk.0.ffn_gate_exps.weight"),
    ({}, without("blk.1.ffn_up_exps.weight"), "missing: layers.1.mlp.experts.0.up_proj"),
    ({}, shape("blk.1.ffn_up_exps.weight", 3, 64, 32),
              r"shape of blk.1.ffn_up_exps.weight, expected \[64, 64\], found \[64, 32\]"),
    ({}, without("blk.1.ffn_gate_inp.weight"), "missing: layers.1.mlp.gate.weight"),
    ({}, lambda t: t["blk.1.ffn_gate_inp.weight"][0].fill(np.nan),
            "blk.1.ffn_gate_inp.weight, expected finite numbers"),
]


@pytest.mark.parametrize("config, changes, spoil, pattern", [
    (config, *row) for config, rows in (({}, BAD), (experts(3), BAD_EXPERTS)) for row in rows])
def test_refused(checkpoint, refuses, tmp_path, config, changes, spoil, pattern):
    ck = checkpoint("F32", **config)
    tensors = blocks(ck, Kind.F32)
    if spoil:
        spoil(tensors)
    refuses(write(tmp_path / "model.gguf", values(ck) | changes, tensors), "model.gguf", pattern)


@pytest.mark.parametrize("divides", [True, False])
def test_shares_of_experts(checkpoint, make, exported_bytes, tmp_path, divides):
    """Ollama's files have norm_topk_prob."""
    ck = checkpoint("BF16", **experts(3, used=2, norm_topk_prob=divides))
    assert exported_bytes(make(ck, Kind.BF16, {"qwen3moe.norm_top_k_prob": divides})) == ck.expected()


def test_a_classifier_is_compared_lazily(checkpoint, make, run, tmp_path, monkeypatch):
    """Not further than to the first difference, and not at all where both may be holes of any size."""
    path, read, read_bytes = make(checkpoint("F32", tie_word_embeddings=False)), [], export.Tensor.read_bytes
    monkeypatch.setattr(export, "PIECE", 64)
    monkeypatch.setattr(export, "write_model", lambda *_: None)
    monkeypatch.setattr(export.Tensor, "read_bytes", lambda self: (
        read.extend([self.name] * (self.path == path)), read_bytes(self))[1])  # not a probe of a dtype, which is in no file
    assert run(path, "out.bin")[0] == 0 and sorted(read) == ["output.weight", "token_embd.weight"]
    huge = {f"{name}.weight": export.Tensor(name, Path("nowhere"), 0, "F32", (1 << 20, 1 << 12))
            for name in ("embed_tokens", "lm_head")}
    assert export.drop_copy(huge) == huge


@pytest.mark.parametrize("kind", [4, 31, 99, 139, 2 ** 32 - 1])
def test_kinds_that_the_package_does_not_know(make, run, kind):
    """Of a fork, of a newer llama.cpp, or removed: another download would not help."""
    path = make()
    data = path.read_bytes()
    at = data.index(b"blk.1.attn_q.weight") + 19 + 4 + 2 * 8
    path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4:])
    refused(run(path, "out.bin"), f"model.gguf: dtype of blk.1.attn_q.weight, expected one that the gguf package knows, found number {kind}$")


def test_big_endian(checkpoint, refuses, tmp_path):
    ck = checkpoint("F32")
    path = write(tmp_path / "b.gguf", values(ck), blocks(ck, Kind.F32), gguf.GGUFEndian.BIG)
    refuses(path, r"GGUF's version \(or it is big-endian\) is not supported, expected 2 or 3")


def test_truncated_and_spoiled(make, run, tmp_path):
    """Wherever the file ends, and whatever a word of its metadata says: one line, at once."""
    path = make(kind=Kind.Q8_0)
    data = path.read_bytes()
    at = data.index(b"token_embd.weight")
    for end in [0, 3, 23, 24, 40, 5000, at, at + 20, at + 40, len(data) - 34 * 64, len(data) - 34]:
        path.write_bytes(data[:end])
        refused(run(path, "out.bin"), "model.gguf: (broken|truncated|not supported)")
        if end > at + 5000:  # within the weights: found before anything is written
            refused(run(path, "out.bin"), f"truncated in .* bytes .*, found {end}$")
    for place, word in [
            (0, b"GGML"), (4, b"\1\0\0\0"), (8, b"\xff" * 8), (16, b"\xff" * 7), (24, b"\xff" * 8),
            (24, b"\0\0\0\0\0\0\0\x10"), (at - 8, b"\xff\xff"), (at + 17, b"\xff\xff\xff\xff"), (at + 21, b"\xff" * 8),
            (at + 37, b"\x63\0\0\0"), (at + 41, b"\xff" * 8), (at + 41, b"\0" * 6 + b"\1")]:
        path.write_bytes(data[:place] + word + data[place + len(word):])
        refused(run(path, "out.bin"), "model.gguf: ")
    array = data.index(b"tokenizer.ggml.tokens") + 21
    path.write_bytes(data[:array + 8] + b"\xff" * 8 + data[array + 16:])  # 2^64 - 1 strings
    refused(run(path, "out.bin"), "broken")
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


# ---------------------------------------------------------------------------- large files

@pytest.mark.slow
@measures
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_K])
def test_memory_stays_small_whatever_the_size(checkpoint, make, tmp_path, kind):
    """An embedding of 123 million values, up to 492 MB."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    table = np.zeros((120_000, 1024) if kind == Kind.F32 else (120_000, 1024 // elements * size),
                     np.float32 if kind == Kind.F32 else np.uint8)
    make(checkpoint("F32", hidden_size=1024), tensors={"token_embd.weight": (table, kind)})
    for more in ([], ["--check"]):
        done = export_process("model.gguf", "out.bin", *more, measure=True, cwd=tmp_path)
        assert done.returncode == 0 and float(done.stdout.split()[-1]) < 250e6, done
    for name in "out.bin", "model.gguf":
        (tmp_path / name).unlink()

"""Files of weights and their tensors: everything that is refused."""
import errno
import json
import os
import struct

import numpy as np
import pytest
from conftest import LINUX, export_py as export, refused


BAD_TENSORS = [  # what is done to the checkpoint ck and its tensors t
    (lambda ck, t: (t.pop("layers.1.mlp.up_proj.weight"), t.pop("norm.weight")),
     "missing: norm.weight, layers.1.mlp.up_proj.weight; left over: none"),
    (lambda ck, t: t.update({f"layers.0.mlp.experts.{i}.weight": np.zeros(4, np.float32)
                             for i in range(30)}), "experts.0.weight.* 24 more"),
    (lambda ck, t: t.update({"layers.0.mlp.down_proj.weight": t["layers.0.mlp.up_proj.weight"]}),
     r"model.layers.0.mlp.down_proj.weight.*\[64, 192\], found \[192, 64\]"),
    (lambda ck, t: t["layers.1.mlp.up_proj.weight"][7].fill(np.inf),
     "model.layers.1.mlp.up_proj.weight.* infinity or NaN"),
    (lambda ck, t: t["norm.weight"].fill(np.nan), "model.norm.weight.* infinity or NaN"),
    (lambda ck, t: ck.config.update(tie_word_embeddings=False), "missing: lm_head.weight")]


@pytest.mark.parametrize("spoil, pattern", BAD_TENSORS, ids=[pattern for _, pattern in BAD_TENSORS])
def test_tensors_refused(checkpoint, refuses, spoil, pattern):
    ck = checkpoint()
    spoil(ck, ck.tensors)
    refuses(ck, pattern)


def edit_header(data: bytes, change) -> bytes:
    length, = struct.unpack_from("<Q", data)
    head = json.loads(data[8:8 + length])
    change(head)
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length:]


NORM, MOST = "model.norm.weight", export.TENSORS_SIZE


def set_offsets(begin, end):
    def change(head):
        old = head[NORM]["data_offsets"]
        head[NORM]["data_offsets"] = [old[0] + begin, old[1] + end]
    return lambda data: edit_header(data, change)


def entry(**changes):
    return lambda data: edit_header(data, lambda head: head[NORM].update(changes))


BAD_SAFETENSORS = {
    "web page": (lambda data: b"<!doctype html>\n<html>", "not downloaded.*found a web page"),
    "empty": (lambda data: b"", "broken safetensors"),
    "cut in the length": (lambda data: data[:5], "broken safetensors"),
    "cut in the header": (lambda data: data[:300], "broken safetensors"),
    "cut in the data": (lambda data: data[:-1], "truncated.*download it again"),
    "longer": (lambda data: data + b"x", "oversized"),
    "huge header": (lambda data: b"\xff" * 8 + data[8:], "18446744073709551615"),
    "too large header": (lambda data: struct.pack("<Q", MOST + 1) + b" " * (MOST + 1),
                         f"expected a header of 2 to {MOST} bytes, found {MOST + 1}"),
    "no json": (lambda data: data[:8] + b"}" + data[9:], "JSONDecodeError"),
    "not utf-8": (lambda data: data[:8] + b"\xff" + data[9:], "UnicodeDecodeError|JSONDecode"),
    "a list": (lambda data: struct.pack("<Q", 2) + b"[]" + data, "broken"),
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
    **{f"entry {i}": (entry(**changes), "shape or data_offsets of model.norm.weight")
       for i, changes in enumerate((
           {"shape": [64.0]}, {"shape": [True] * 2}, {"shape": [64] + [1] * 5},
           {"data_offsets": [0.0, 128.0]},
           {"shape": [10 ** 18] * 300_000}))},  # their product would have 5 million digits
    "entry is a number": (lambda d: edit_header(d, lambda h: h.update({NORM: 3})), "broken"),
    # Also those that a GGUF file may have: such a matrix would be garbage
    **{f"dtype {dtype} of {name}": (lambda d, dtype=dtype, name=name: edit_header(d, lambda h: h[name].update(dtype=dtype)),
                                    f"dtype of {name}, expected BF16, F16, F32 .*, found {dtype}$")
       for name, dtypes in ((NORM, "F8_E4M3"), ("model.embed_tokens.weight", "Q8_0 Q4_K IQ1_S I8 F64"))
       for dtype in dtypes.split()},
    "both names": (lambda d: edit_header(d, lambda h: h.update(
        {"norm.weight": {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}})), "norm.weight twice"),
}


@pytest.mark.parametrize("which", BAD_SAFETENSORS)
def test_broken_safetensors_refused(saved, refuses, which):
    spoil, pattern = BAD_SAFETENSORS[which]
    file = saved / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    refuses(saved, "in:" if which.startswith("dtype") else "model.safetensors", pattern)


INDEX, SHARDS = "model.safetensors.index.json", [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


@pytest.mark.parametrize("name, change, pattern", [  # of weight_map, or another index
    (SHARDS[1], None, "model-00002-of-00002.safetensors: missing"),
    (INDEX, None, "no weights .*, expected a directory of safetensors"),
    (INDEX, lambda of: {"metadata": {}}, "KeyError.*weight_map"),
    (INDEX, lambda of: {"weight_map": {"a": "../a.safetensors"}}, "missing"),
    (INDEX, lambda of: {"weight_map": ["a"]}, "broken"),
    (INDEX, lambda of: {"weight_map": of | {"extra.weight": SHARDS[0]}}, "other tensors.*difference in extra.weight$"),
    (INDEX, lambda of: {"weight_map": of | {NORM: SHARDS[of[NORM] == SHARDS[0]]}}, f"other tensors.*difference in {NORM}$")])
def test_broken_shards_refused(checkpoint, refuses, tmp_path, name, change, pattern):
    file = checkpoint().save(tmp_path / "in", 2) / name
    if change:
        file.write_text(json.dumps(change(json.loads(file.read_text())["weight_map"])))
    else:
        file.unlink()
    refuses(file.parent, pattern)


def test_a_file_that_became_shorter(checkpoint, run, tmp_path, monkeypatch):
    """After its header was read. Or the disk fails: that is not OUT's fault either."""
    (tmp_path / "model.safetensors").write_bytes(bytes(300))
    with pytest.raises(export.Refused, match="truncated in x, expected 400 bytes, found 200"):
        export.Tensor("x", tmp_path / "model.safetensors", 100, "F32", (100,)).read_bytes()
    folder = checkpoint().save(tmp_path / "in")
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(os, "pread", fail)
    refused(run(folder, "out.bin"), "in/model.safetensors: can't be read .get it again.*error$")
    if LINUX:
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to("/proc/self/mem")  # whose first byte is such an error
        refused(run(folder, "out.bin"), "in/config.json: can't be read .get it again.*error$")

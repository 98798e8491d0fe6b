"""export.py --check and --group-size: what the check finds in files that tests spoil."""
import os
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import experts
from conftest import export_by_rows, outputs, refused
from reference import Model
from test_four_bits import MATRICES


@pytest.fixture
def ck(checkpoint):
    return checkpoint("F32")


@pytest.fixture
def exported(ck, run, tmp_path):
    """OUT.bin, beside its checkpoint in hf."""
    assert run(ck.save(tmp_path / "hf"), "out.bin")[0] == 0
    return tmp_path / "out.bin"


def flip(file: Path, at: int, bits=1) -> None:
    """Changes these bits of a byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= bits
    file.write_bytes(data)


def word(columns: int, row: int, column: int) -> int:
    """Offset of a value in a matrix in panels, of as many bytes as columns."""
    return 4 * (row // 16 * columns // 4 * 16 + column // 4 * 16 + row % 16) + column % 4


def differs(name: str, at: int) -> str:
    """The pattern of the message: the 32-bit word at this byte is wrong."""
    return rf"out.bin: model.{name}.weight is not what the source gives, at byte {at // 4 * 4:#x}, expected"


@pytest.mark.parametrize("size, args", [(0.05, ["--group-size", 32]), (0.05, ["--bits", 4]),
                                        (1e-40, []), (1e-25, []), (1e25, [])])
def test_a_good_file(ck, run, tmp_path, monkeypatch, args, size):
    """The largest error is that of a tensor's values, not of a piece's; fp32 does not hold the last sizes' squares."""
    monkeypatch.setattr("export.PIECE", 16 * 64)
    x = ck.tensors["layers.1.mlp.up_proj.weight"]
    x[...] = np.random.default_rng(1).uniform(-size, size, x.shape)
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin", *args)[0] == 0
    status, err = run("--check", folder, "out.bin")
    model = Model.from_bin(tmp_path / "out.bin", "weights")
    matrices = {"embed_tokens": model.w["embed"]} | {
        f"layers.{i}.{name}": matrix for ours, name in MATRICES.items()
        for i, matrix in enumerate(model.w[ours])}
    errors = {}
    for name, matrix in matrices.items():
        x = ck.tensors[f"{name}.weight"].astype(np.float64)
        errors[name] = 100 * np.sqrt(np.sum((x - matrix.dense) ** 2) / np.sum(x ** 2))
    worst = max(errors, key=errors.get)
    assert status == 0 and re.fullmatch(
        rf"export.py: out.bin matches .*/hf: header, tokenizer and {len(ck.tensors)} tensors; "
        rf"rms error at most {errors[worst]:.2g} %, in model.{worst}.weight", err[0]), (err, errors[worst], worst)


def test_experts(checkpoint, run, exports, tmp_path):
    """What differs is an expert's, and so is the largest error."""
    ck = checkpoint("F32", **experts(3))
    ck.tensors["layers.1.mlp.experts.2.up_proj.weight"][:, ::64] *= 99
    folder = ck.save(tmp_path / "hf")
    exports(folder, "out.bin")
    assert exports("--check", folder, "out.bin")[0].endswith(" %, in model.layers.1.mlp.experts.2.up_proj.weight")
    places = outputs((tmp_path / "out.bin").read_bytes())
    at = places["layers.1.mlp.experts.0.up_proj.weight"].values + word(64, 2 * 64 + 5, 7)
    flip(tmp_path / "out.bin", at)
    refused(run(folder, "out.bin", "--check"), differs("layers.1.mlp.experts.2.up_proj", at))


@pytest.mark.parametrize("group, width", [(128, 64), (256, 64), (64, 96)])
def test_group_size_that_does_not_divide(checkpoint, refuses, group, width):
    refuses(checkpoint(hidden_size=width), f"hidden_size, expected a multiple of {group}",
            f"found {width}", args=["--group-size", group])


def test_options_stand_anywhere_and_out_has_its_default(ck, exports, tmp_path):
    ck.save(tmp_path / "hf")
    for args in ("--group-size", "32"), ("--check",), ("--check", "hf.bin"), ("--bits", "4"):
        exports("hf", *args)
    exports("--check", "hf.bin", "hf")
    (tmp_path / "hf.bin").unlink()
    assert exports("hf", "--check")[0].startswith("export.py: hf-q4.bin matches hf")


# ---------------------------------------------------------------------------- what it finds

@pytest.mark.parametrize("bits, where, at, flipped, pattern", [
    (8, "layers.1.self_attn.o_proj", word(128, 2, 5), 1, None), (8, "layers.1.self_attn.k_norm", 8, 1, None),
    (8, "layers.1.mlp.up_proj scales", 192 * 4 - 4, 1, None), (8, "layers.0.mlp.gate_proj scales", 3, 0x80, None),
    (8, "", 0x30, 1, "header .* at byte 0x30, expected 00 00 00 00"), (8, "", 8, 0x60, "header .* at byte 0x8"),
    (8, "", 0x2C, 1, "group_size.*found 65"), (8, "", 0x80, 3, "panels .*expected 1, found 2"),
    (4, "", 0x68, 1, "layer_bits .* is not supported, expected 0 or 4, found 5"),
    (4, "", 0x68, 4, "header .* at byte 0x6c"), (4, "", 0x6C, 4, "header .* at byte 0x6c"),
    (4, "", 0x70, 3, "header .* at byte 0x70"), (4, "layers.0.self_attn.q_proj", word(32, 10, 5), 0x10, None),
    (4, "layers.0.self_attn.q_proj", word(32, 10, 5), 1, None), (4, "layers.0.self_attn.q_proj scales", 20, 1, None),
    (4, "layers.1.mlp.up_proj scales", 192 * 2 * 2 - 1, 1, None)])
def test_finds(ck, run, tmp_path, bits, where, at, flipped, pattern):
    """Whatever differs from what export.py makes: a byte of a tensor's values or scales, or of the file."""
    folder, out = ck.save(tmp_path / "hf"), tmp_path / "out.bin"
    assert run(folder, "out.bin", "--bits", bits)[0] == run("--check", folder, "out.bin")[0] == 0
    if where:
        name, _, scales = where.partition(" ")
        at += getattr(outputs(out.read_bytes())[f"{name}.weight"], scales or "values")
        pattern = differs(name, at)
    flip(out, at, flipped)
    refused(run("--check", folder, "out.bin"), "out.bin", pattern)


@pytest.mark.parametrize("size, pattern", [(-4, "truncated or oversized"), (1, "truncated or oversized"),
    (0, "truncated, expected a header of 256 bytes, found 0"), (255, "truncated, .* found 255")])
def test_finds_another_size(exported, run, size, pattern):
    os.truncate(exported, size if size in (0, 255) else exported.stat().st_size + size)
    refused(run("--check", "hf", "out.bin"), "out.bin", pattern)


def test_a_file_of_older_programs(checkpoint, run, tmp_path):
    """With row after row it still runs, but is not compared; it is the base format's."""
    folder = checkpoint("F32").save(tmp_path / "hf")
    export_by_rows(folder, tmp_path / "out.bin")
    assert run(folder, "new.bin")[0] == 0
    Model.from_bin(tmp_path / "new.bin").to_bin(tmp_path / "base.bin", panels=False)
    assert (tmp_path / "base.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()
    refused(run("--check", folder, "out.bin"), r"out.bin: panels \(export it again\) is not supported, expected 1, found 0")


@pytest.mark.parametrize("edit", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:200] + bytes([d[200] ^ 1]) + d[201:]])
def test_tokenizer_differs(exported, run, edit):
    path = Path(f"{exported}.tokenizer")
    path.write_bytes(edit(path.read_bytes()))
    refused(run("--check", "hf", "out.bin"), "out.bin.tokenizer: .*not what the source gives")


def test_missing_files(exported, run):
    Path(f"{exported}.tokenizer").unlink()
    refused(run("--check", "hf", "out.bin"), "out.bin.tokenizer")
    exported.unlink()
    refused(run("--check", "hf", "out.bin"), "^export.py: out.bin: missing, expected the file to compare with hf")


def test_yarn(ck, run, tmp_path):
    """Without the option of the export, the error names it."""
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin", "--yarn", 2.5)[0] == run(folder, "plain.bin")[0] == 0
    assert run("--check", folder, "out.bin", "--yarn", 2.5)[0] == 0
    for args in (["out.bin"], ["plain.bin", "--yarn", 3], ["out.bin", "--yarn", 3]):
        refused(run("--check", folder, *args), r"the header \(another model, or --yarn\?\) is not")
    at = 256 + 4 * (2 * 2 * (64 + 64) + 64) + 40  # after two layers' norms and the last
    flip(tmp_path / "out.bin", at)
    refused(run("--check", folder, "out.bin", "--yarn", 2.5),
            f"rope's frequencies is not what the source gives, at byte {at:#x}")
    flip(tmp_path / "out.bin", 0x38, 3)
    refused(run("--check", folder, "out.bin", "--yarn", 2.5), "export it again")

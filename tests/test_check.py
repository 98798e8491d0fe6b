"""export.py --check, --plot and --group-size: what the check finds in files that tests spoil."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Checkpoint, experts
from conftest import ROOT, export_process, export_py as export, join_tokenizer, refused, split_tokenizer
from reference import Model, quantize


@pytest.fixture
def ck(checkpoint):
    return checkpoint("F32")


@pytest.fixture
def exported(ck, run, tmp_path):
    """OUT.bin, beside its checkpoint in hf."""
    assert run(ck.save(tmp_path / "hf"), "out.bin")[0] == 0
    return tmp_path / "out.bin"


def place(ck: Checkpoint, wanted: str) -> tuple[int, tuple[int, ...]]:
    """(offset in OUT.bin with groups of 64, shape) of a tensor."""
    order = ["input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm",
             "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj",
             "up_proj", "lm_head"]
    at = 256
    for name, shape in sorted(ck.shapes(), key=lambda item: order.index(item[0].split(".")[-2])):
        if name == wanted:
            return at, shape
        n = shape[-1] if len(shape) == 1 else -(-shape[0] // 16) * 16 * shape[1]  # whole panels
        at += 4 * n if len(shape) == 1 else n + n // 16
    raise KeyError(wanted)


def word(columns: int, row: int, column: int) -> int:
    """Offset of a value in a matrix in panels, of as many bytes as columns."""
    return 4 * (row // 16 * columns // 4 * 16 + column // 4 * 16 + row % 16) + column % 4


@pytest.fixture
def table(run, capfd):
    """table(arguments) is what a --check that succeeds prints: name -> rms error in %; table.err are
    the lines on stderr."""
    def call(*args):
        capfd.readouterr()
        status, call.err = run("--check", *args)
        assert status == 0, call.err
        head, *lines = capfd.readouterr().out.splitlines()
        assert head == "rms error (% of rms)  tensor"
        return {name: float(rms) for rms, name in map(str.split, lines)}
    return call


def differs(name: str, at: int) -> str:
    """The pattern of the message: the 32-bit word at this byte is wrong."""
    return rf"out.bin: model.{name}.weight is not what the source gives, at byte {at // 4 * 4:#x}, expected"


@pytest.mark.parametrize("group", [None, 32, 64])
def test_a_good_file(ck, run, table, tmp_path, group):
    """Its errors are those of a naive computation, and every tensor is in the table."""
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin", *(["--group-size", group] if group else []))[0] == 0
    found = table(folder, "out.bin")
    assert found.keys() == {f"model.{name}" for name in ck.tensors}
    for name, x in ck.tensors.items():
        rms = found[f"model.{name}"]
        if x.ndim == 1:
            assert rms == 0
            continue
        q, scale = quantize(x.reshape(1, -1), group or 64)
        groups = x.reshape(-1, group or 64).astype(np.float64)
        error = np.abs(groups - q.reshape(groups.shape) * scale[0].astype(np.float64)[:, None])
        assert rms == pytest.approx(100 * np.sqrt((error ** 2).sum() / (groups ** 2).sum()),
                                    abs=1e-4)
    worst = max(found, key=found.get)
    said = re.fullmatch(rf"export.py: out.bin matches .*/hf: header, tokenizer and {len(found)} "
                        r"tensors; rms error at most (\S+) %, in \S+", table.err[0])
    assert said[1] == f"{found[worst]:.2g}"


def test_four_bits(ck, run, table, tmp_path):
    """The table's errors are those of the file's values."""
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin", "--bits", 4)[0] == 0
    found = table(folder, "out.bin")
    model = Model.from_bin(tmp_path / "out.bin", "weights")
    for layer, matrix in enumerate(model.w["down"]):
        name = f"layers.{layer}.mlp.down_proj.weight"
        x = ck.tensors[name].astype(np.float64)
        error = 100 * np.sqrt(((x - matrix.dense) ** 2).sum() / (x ** 2).sum())
        assert found[f"model.{name}"] == pytest.approx(error, abs=1e-3)


def test_experts(checkpoint, run, table, tmp_path):
    """A row of the table for the experts of a layer; an error names the expert."""
    ck = checkpoint("F32", **experts(3))
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin")[0] == 0
    found = table(folder, "out.bin")
    assert found.keys() == {f"model.{re.sub('experts.[0-9]+', 'experts.*', name)}"
                            for name in ck.tensors}
    assert found["model.layers.1.mlp.gate.weight"] == 0
    data = bytearray((tmp_path / "out.bin").read_bytes())
    up_proj = 3 * 64 * 64  # values of a layer, the last tensor of the file
    at = len(data) - up_proj * 17 // 16 + word(64, 2 * 64 + 5, 7)
    data[at] = data[at] + (1 if data[at] < 100 else -1)
    (tmp_path / "out.bin").write_bytes(data)
    refused(run(folder, "out.bin", "--check"), differs("layers.1.mlp.experts.2.up_proj", at))


def test_large_groups(checkpoint, run, tmp_path):
    ck = checkpoint(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_hidden_layers=1)
    folder = ck.save(tmp_path / "hf")
    for group in (128, 256):
        assert run(folder, "out.bin", "--group-size", group)[0] == 0
        assert (tmp_path / "out.bin").read_bytes() == ck.expected(group)
        assert run("--check", folder, "out.bin")[0] == 0


@pytest.mark.parametrize("group, key", [(128, "hidden_size, expected a multiple of 128"),
                                        (256, "hidden_size, expected a multiple of 256")])
def test_group_size_that_does_not_divide(ck, run, tmp_path, group, key):
    refused(run(ck.save(tmp_path / "hf"), "out.bin", "--group-size", group), key, "found 64")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_group_size_that_the_default_would_not_choose(checkpoint, run, tmp_path):
    folder = checkpoint(hidden_size=96).save(tmp_path / "hf")
    assert run(folder, "out.bin")[0] == 0
    refused(run(folder, "out.bin", "--group-size", 64), "hidden_size, expected a multiple of 64")


def test_options_stand_anywhere_and_out_has_its_default(ck, run, tmp_path):
    ck.save(tmp_path / "hf")
    assert run("hf", "--group-size", "32")[0] == 0
    assert run("hf", "--check")[0] == run("--check", "hf.bin", "hf")[0] == 0
    assert run("hf", "--check", "hf.bin")[0] == 0
    assert run("hf", "--bits", "4")[0] == 0
    (tmp_path / "hf.bin").unlink()
    status, err = run("hf", "--check")
    assert status == 0 and err[0].startswith("export.py: hf-q4.bin matches hf")


# ---------------------------------------------------------------------------- what it finds

def add(at: int, change):
    def spoil(data: bytearray) -> None:
        data[at:at + 4] = struct.pack("<f", change(struct.unpack_from("<f", data, at)[0]))
    return spoil


def q_by_one(ck):
    at, (_, columns) = place(ck, "layers.1.self_attn.o_proj.weight")
    i = at + word(columns, 2, 5)
    def spoil(data):
        data[i] = (data[i] + (1 if data[i] < 100 else -1)) % 256
    return spoil, differs("layers.1.self_attn.o_proj", i)


def last_scale(ck):
    at, shape = place(ck, "layers.1.mlp.up_proj.weight")
    n = int(np.prod(shape))
    at += n + n // 16 - 4
    return add(at, lambda x: 1.02 * x), differs("layers.1.mlp.up_proj", at)


def nan_scale(ck):
    at, shape = place(ck, "layers.0.mlp.gate_proj.weight")
    at += int(np.prod(shape))
    return add(at, lambda x: float("nan")), differs("layers.0.mlp.gate_proj", at)


def norm_bit(ck):
    at, _ = place(ck, "layers.1.self_attn.k_norm.weight")
    def spoil(data):
        data[at + 8] ^= 1  # the last bit of the third value
    return spoil, differs("layers.1.self_attn.k_norm", at + 8)


def zero_group(ck):
    """Values where the source has a group of zeros."""
    at, _ = place(ck, "layers.0.mlp.down_proj.weight")
    ck.tensors["layers.0.mlp.down_proj.weight"][0, :64] = 0
    def spoil(data):
        data[at + 3] = 1  # row 0, column 3
        scale = at + 64 * 192
        data[scale:scale + 4] = struct.pack("<f", 1e-6)
    return spoil, differs("layers.0.mlp.down_proj", at)


def swapped(ck):
    """Two matrices of the same shape, exchanged."""
    (a, shape), (b, _) = (place(ck, f"layers.{i}.self_attn.q_proj.weight") for i in (0, 1))
    n = int(np.prod(shape)) * 17 // 16
    def spoil(data):
        data[a:a + n], data[b:b + n] = data[b:b + n], data[a:a + n]
    return spoil, "model.layers.0.self_attn.q_proj.weight is not what the source gives"


def cut(data):
    del data[-4:]


FINDS = {
    "q": q_by_one, "scale": last_scale, "NaN": nan_scale, "norm": norm_bit, "zeros": zero_group,
    "swapped": swapped,
    "truncated": lambda ck: (cut, "truncated or oversized"),
    "longer": lambda ck: (lambda data: data.extend(b"\0"), "truncated or oversized"),
    "theta": lambda ck: (add(0x30, lambda x: 5e6), "header .* at byte 0x30, expected 00 00 00 00"),
    "dim": lambda ck: (lambda data: data.__setitem__(8, 32), "header .* at byte 0x8"),
    "group": lambda ck: (lambda data: data.__setitem__(0x2C, 65), "group_size.*found 65"),
    "panels": lambda ck: (lambda data: data.__setitem__(0x80, 2), "panels .*expected 0 or 1, found 2"),
    "no panels": lambda ck: (lambda data: data.__setitem__(0x80, 0), "truncated or oversized"),
    "empty": lambda ck: (lambda data: data.clear(), "truncated, expected a header of 256 bytes, found 0"),
    "short": lambda ck: (lambda data: data.__delitem__(slice(255, None)), "truncated, .* found 255"),
}


@pytest.mark.parametrize("which", FINDS)
def test_finds(ck, run, tmp_path, which):
    spoil, pattern = FINDS[which](ck)
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin")[0] == 0 and run("--check", folder, "out.bin")[0] == 0
    data = bytearray((tmp_path / "out.bin").read_bytes())
    spoil(data)
    (tmp_path / "out.bin").write_bytes(data)
    refused(run("--check", folder, "out.bin"), "out.bin", pattern)


@pytest.mark.parametrize("at, change, pattern", [
    ("codes", lambda code: code ^ 0x10, "layers.0.self_attn.q_proj"),
    ("codes", lambda code: code ^ 0x01, "layers.0.self_attn.q_proj"),
    ("scales", lambda byte: byte ^ 1, "layers.0.self_attn.q_proj"),
    (0x68, lambda _: 5, "layer_bits .* is not supported, expected 0 or 4, found 5"),
    (0x68, lambda _: 0, "header .* at byte 0x6c"),
    (0x6C, lambda _: 0, "header .* at byte 0x6c"),
    (0x70, lambda level: level + 1, "header .* at byte 0x70"),
    (-1, lambda byte: byte ^ 1, "layers.1.mlp.up_proj")])
def test_finds_in_four_bits(ck, run, tmp_path, at, change, pattern):
    """Whatever differs from what export.py makes: here a byte of row 10's codes."""
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin", "--bits", 4)[0] == run(folder, "out.bin", "--check")[0] == 0
    data = bytearray((tmp_path / "out.bin").read_bytes())
    sizes = {name: int(np.prod(shape)) for name, shape in ck.shapes()}
    rows = -(-ck.config["vocab_size"] // 16) * 16
    codes = 256 + rows * 64 * 9 // 8 + sum(4 * n for name, n in sizes.items() if "norm" in name)
    at = {"codes": codes + word(32, 10, 5),
          "scales": codes + sizes["layers.0.self_attn.q_proj.weight"] // 2 + 10 * 2}.get(at, at)
    data[at] = change(data[at])
    (tmp_path / "out.bin").write_bytes(data)
    refused(run(folder, "out.bin", "--check"), "out.bin",
            differs(pattern, at % len(data)) if pattern.startswith("layers") else pattern)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("config", [{}, {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}, experts(3)])
def test_rows_without_panels(checkpoint, run, tmp_path, monkeypatch, bits, config):
    """Files of older programs have row after row, and no matrices with eight bits beside four."""
    ck = checkpoint("F32", **config)
    folder, read_header = ck.save(tmp_path / "hf"), export.read_header
    assert run(folder, "new.bin", "--bits", bits)[0] == 0
    def older(*args):
        header, computed = read_header(*args)
        return header._replace(panels=0, eight_bits=0), computed
    with monkeypatch.context() as patch:
        patch.setattr(export, "read_header", older)
        assert run(folder, "out.bin", "--bits", bits)[0] == 0
    new, old = (Model.from_bin(tmp_path / name, "weights").w for name in ("new.bin", "out.bin"))
    for name in "q", "o", "down":
        for a, b in zip(new[name], old[name]):
            assert all(np.array_equal(x.dense, y.dense) for x, y in zip(*(
                m if isinstance(m, list) else [m] for m in (a, b))))
    if bits == 8:
        Model.from_bin(tmp_path / "new.bin").to_bin(tmp_path / "base.bin", panels=False)
        assert (tmp_path / "base.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()
    file = tmp_path / "out.bin.tokenizer"
    plain, sections = split_tokenizer(file.read_bytes())
    for tokens in join_tokenizer(plain, {b"clas": sections[b"clas"]}.items()), plain:   # older ones, or none
        file.write_bytes(tokens)
        assert run("--check", folder, "out.bin")[0] == 0
    file.write_bytes(plain[:-1])
    refused(run("--check", folder, "out.bin"), "out.bin.tokenizer: .*not what the source gives")
    file.write_bytes(plain)
    data = bytearray((tmp_path / "out.bin").read_bytes())
    data[-5] ^= 1
    (tmp_path / "out.bin").write_bytes(data)
    refused(run("--check", folder, "out.bin"), "out.bin", "is not what the source gives")


def test_where_it_came_from_may_differ(exported, ck, run, tmp_path):
    """The section `from` names the folder, which may be a copy; all before it is compared."""
    assert run("--check", ck.save(tmp_path / "a copy"), "out.bin")[0] == 0
    plain, sections = split_tokenizer(Path(f"{exported}.tokenizer").read_bytes())
    assert [*sections][-1] == b"from"
    for changed, found in ((sections | {b"from": b"another"}, 0), (sections | {b"mode": b"\2\0\0\0"}, 1)):
        Path(f"{exported}.tokenizer").write_bytes(join_tokenizer(plain, changed.items()))
        assert run("--check", "hf", "out.bin")[0] == found


@pytest.mark.parametrize("edit", [lambda d: d[:-1], lambda d: d + b"\0",
                                  lambda d: d[:200] + bytes([d[200] ^ 1]) + d[201:]])
def test_tokenizer_differs(exported, run, edit):
    path = Path(f"{exported}.tokenizer")
    path.write_bytes(edit(path.read_bytes()))
    refused(run("--check", "hf", "out.bin"), "out.bin.tokenizer: .*not what the source gives")


def test_an_export_that_was_killed_between_the_two_names(exported, run, tmp_path):
    """The tokenizer file has its name, OUT.bin not yet. If both are parts, the older pair is a pair."""
    parts = [Path(f"{exported}.part"), Path(f"{exported}.tokenizer.part")]
    for part in parts:
        part.write_text("")
    assert run("--check", "hf", "out.bin")[0] == 0
    parts[1].unlink()
    refused(run("--check", "hf", "out.bin"), "^export.py: out.bin: older than its tokenizer file, expected both of one "
            "export: export again, found out.bin.part, which a killed export has left$")
    assert run("hf", "out.bin")[0] == run("--check", "hf", "out.bin")[0] == 0


def test_missing_files(exported, run):
    Path(f"{exported}.tokenizer").unlink()
    status, err = run("--check", "hf", "out.bin")
    assert status == 1 and len(err) == 1 and "out.bin.tokenizer" in err[0]
    exported.unlink()
    refused(run("--check", "hf", "out.bin"), "^export.py: out.bin: missing, expected the file to compare with hf")


def test_another_source(exported, ck, run, tmp_path):
    ck.tensors["layers.1.mlp.down_proj.weight"][5, 7] += 1
    refused(run("--check", ck.save(tmp_path / "hf2"), "out.bin"),
            "model.layers.1.mlp.down_proj.weight is not what the source gives")


def test_scales_hardly_above_zero(ck, run, tmp_path):
    """Rounding of the scale itself, in the subnormals, is no error."""
    ck.tensors["embed_tokens.weight"][4, :] = 1e-45
    ck.tensors["embed_tokens.weight"][5, :] = np.linspace(-2.6e-43, 2.6e-43, 64)
    ck.tensors["embed_tokens.weight"][6, :] = np.linspace(-1e-40, 1e-40, 64)
    assert run(ck.save(tmp_path / "hf"), "out.bin")[0] == run("--check", "hf", "out.bin")[0] == 0


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e25])
def test_errors_of_the_smallest_and_largest_weights(ck, run, table, tmp_path, size):
    """Squares that fp32 does not hold."""
    x = ck.tensors["layers.1.mlp.up_proj.weight"]
    x[...] = np.random.default_rng(1).uniform(-size, size, x.shape)
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin")[0] == 0
    assert 0.2 < table(folder, "out.bin")["model.layers.1.mlp.up_proj.weight"] < 0.6


def test_yarn(ck, run, tmp_path):
    """Without the option of the export, the error names it."""
    folder = ck.save(tmp_path / "hf")
    assert run(folder, "out.bin", "--yarn", 2.5)[0] == run(folder, "plain.bin")[0] == 0
    assert run("--check", folder, "out.bin", "--yarn", 2.5)[0] == 0
    for args in (["out.bin"], ["plain.bin", "--yarn", 3], ["out.bin", "--yarn", 3]):
        refused(run("--check", folder, *args), r"the header \(the --yarn of the export\?\) is not")
    data = bytearray((tmp_path / "out.bin").read_bytes())
    at = 256 + 4 * (2 * 2 * (64 + 64) + 64)  # after two layers' norms and the last
    data[at + 40] ^= 1
    (tmp_path / "out.bin").write_bytes(data)
    refused(run("--check", folder, "out.bin", "--yarn", 2.5),
            f"rope's frequencies is not what the source gives, at byte {at + 40:#x}")
    data[0x38] = 1
    (tmp_path / "out.bin").write_bytes(data)
    refused(run("--check", folder, "out.bin", "--yarn", 2.5), "export it again")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_for_the_table(exported, tmp_path):
    with open("/dev/full", "w") as full:
        refused(export_process("--check", "hf", "out.bin", stdout=full, stderr=subprocess.PIPE,
                               cwd=tmp_path), "^export.py: stdout: ")


# ---------------------------------------------------------------------------- --plot

@pytest.mark.slow
def test_plot(exported, run, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    assert run("hf", "out.bin", "--plot", "errors.png")[0] == 0
    pixels = image.imread(tmp_path / "errors.png")
    assert pixels.shape[0] > 500 and pixels.shape[1] > 900
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 8  # a line's color each


@pytest.mark.parametrize("name", ["$_{$.bin", "\udcff.bin"])
def test_plot_of_an_odd_name(ck, run, tmp_path, name):
    pytest.importorskip("matplotlib")
    folder = ck.save(tmp_path / "hf")
    assert run(folder, name)[0] == run(folder, name, "--plot", "$.png")[0] == 0


def test_plot_s_folder_comes_first(run, monkeypatch):
    """Not after minutes of comparing."""
    monkeypatch.setattr(export, "find_source", lambda _: pytest.fail("it works"))
    refused(run("hf", "out.bin", "--plot", "nowhere/a.png"), "^export.py: nowhere: missing, expected the directory")


def test_plot_without_matplotlib(exported, tmp_path):
    """It is not among the packages that export.py asks for."""
    code = ("import runpy, sys, importlib.util as u\n"
            "find = u.find_spec\n"
            "u.find_spec = lambda name, *more: name != 'matplotlib' and find(name, *more)\n"
            "sys.argv = ['export.py', 'hf', 'out.bin', '--plot', 'a.png']\n"
            f"runpy.run_path({str(ROOT / 'export.py')!r}, "
            "run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "--plot: needs matplotlib" in done.stderr and "uv run --with" in done.stderr

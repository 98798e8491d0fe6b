"""Files that are not as README.md says: one clear line, exit 1, and never a crash."""
import os
import random
import struct
import subprocess
import sys

import pytest
from conftest import QWEN3, assert_error, environment, export, make_checkpoint, qwen3
from reference import HEADER

FIELDS = {name: 4 + 4 * i for i, name in enumerate(HEADER)} | {"magic": 0}
EXTENSION = {"rope_theta": 0x30, "rms_norm_eps": 0x34, "rope_scaling": 0x38, "factor": 0x3C,
             "original": 0x40, "beta_fast": 0x44, "beta_slow": 0x48, "attention_factor": 0x4C,
             "truncate": 0x50, "qkv_bias": 0x54, "no_qk_norm": 0x58}
INF, NAN = float("inf"), float("nan")


class Files:
    """A copy of a model's two files, to be damaged; run() answers a question with them."""

    def __init__(self, model, directory):
        self.path = directory / "model.bin"
        self.tokenizer = directory / "model.bin.tokenizer"
        self.model_bytes = model.read_bytes()
        self.tokenizer_bytes = model.with_name(model.name + ".tokenizer").read_bytes()
        self.path.write_bytes(self.model_bytes)
        self.tokenizer.write_bytes(self.tokenizer_bytes)

    def patch(self, format, at, *values):
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(struct.pack("<" + format, *values))

    def run(self, *args):
        return qwen3(self.path, "-m", "generate", "-i", "the wind", "-n", 2, "-s", 3,
                     "-q", *args)


@pytest.fixture
def files(small, tmp_path):
    return Files(small, tmp_path)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("yarn")
    return export(make_checkpoint(directory / "hf", tokenizer, yarn=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
        directory / "model.bin")


def test_the_copies_work(files, yarn, tmp_path):
    assert files.run().returncode == 0
    (tmp_path / "yarn").mkdir()
    assert Files(yarn, tmp_path / "yarn").run().returncode == 0


# -- the header

@pytest.mark.parametrize("field, value", [
    ("magic", 0x47475546), ("magic", 0), ("version", 0), ("version", 2), ("version", -1),
    ("dim", 0), ("dim", -64), ("dim", 65), ("dim", 32), ("dim", 128), ("dim", 2**31 - 64),
    ("hidden_dim", 0), ("hidden_dim", -128), ("hidden_dim", 100), ("hidden_dim", 2**31 - 64),
    ("n_layers", 0), ("n_layers", -1), ("n_layers", 1), ("n_layers", 3), ("n_layers", 2**31 - 1),
    ("n_heads", 0), ("n_heads", -4), ("n_heads", 3), ("n_heads", 2**30),
    ("n_kv_heads", 0), ("n_kv_heads", -2), ("n_kv_heads", 3), ("n_kv_heads", 8),
    ("n_kv_heads", 2**31 - 1),
    ("vocab_size", 0), ("vocab_size", -502), ("vocab_size", 501), ("vocab_size", 503),
    ("vocab_size", 2**31 - 1),
    ("max_seq_len", 0), ("max_seq_len", -512), ("max_seq_len", -2**31),
    ("head_dim", 0), ("head_dim", -32), ("head_dim", 31), ("head_dim", 2), ("head_dim", 2**31 - 2),
    ("shared_classifier", 0), ("shared_classifier", 2), ("shared_classifier", -1),
    ("group_size", 0), ("group_size", -64), ("group_size", 16), ("group_size", 48),
    ("group_size", 63), ("group_size", 512), ("group_size", 128), ("group_size", 2**31 - 1)])
def test_bad_header_field(files, field, value):
    files.patch("I" if value > 2**31 else "i", FIELDS[field], value)
    # A value that is possible in itself shows only in the file's size.
    possible = {("dim", 128), ("dim", 2**31 - 64), ("hidden_dim", 2**31 - 64), ("n_layers", 1),
                ("n_layers", 3), ("n_layers", 2**31 - 1), ("vocab_size", 501), ("vocab_size", 503),
                ("shared_classifier", 0)}
    word = "bytes" if (field, value) in possible else field
    if (field, value) == ("group_size", 128):           # fine, but then dim is not
        word = "dim"
    result = files.run()
    assert_error(result, 1, "model.bin", "expected", "found", word)


@pytest.mark.parametrize("field, format, value", [
    ("rope_theta", "f", -1.0), ("rope_theta", "f", INF), ("rope_theta", "f", NAN),
    ("rms_norm_eps", "f", -1e-6), ("rms_norm_eps", "f", NAN), ("rms_norm_eps", "f", INF),
    ("rope_scaling", "I", 2), ("rope_scaling", "I", 0xFFFFFFFF),
    ("factor", "f", 4.0), ("original", "i", 64), ("beta_fast", "f", 16.0), ("beta_slow", "f", 2.0),
    ("attention_factor", "f", 1.5), ("truncate", "I", 1),
    ("qkv_bias", "I", 1), ("qkv_bias", "I", 2), ("qkv_bias", "I", 0xFFFFFFFF),
    ("no_qk_norm", "I", 1), ("no_qk_norm", "I", 2), ("no_qk_norm", "I", 0xFFFFFFFF)])
def test_bad_extension_field(files, field, format, value):
    """Without rope scaling, the fields of YaRN are zero. A bias that is not there, or a norm that
    should not be, shows in the file's size."""
    files.patch(format, EXTENSION[field], value)
    assert_error(files.run(), 1, "model.bin", "expected")


@pytest.mark.parametrize("field, format, value", [
    ("factor", "f", 0.0), ("factor", "f", -4.0), ("factor", "f", NAN), ("factor", "f", INF),
    ("original", "i", 0), ("original", "i", -64), ("beta_fast", "f", -32.0),
    ("beta_fast", "f", NAN), ("beta_slow", "f", -1.0), ("beta_slow", "f", INF), ("attention_factor", "f", NAN),
    ("attention_factor", "f", -1.0), ("truncate", "I", 2)])
def test_bad_yarn_field(yarn, tmp_path, field, format, value):
    files = Files(yarn, tmp_path)
    files.patch(format, EXTENSION[field], value)
    assert_error(files.run(), 1, "model.bin")


@pytest.mark.parametrize("offset", [0x5C, 0x5D, 0x80, 0xFC, 0xFF])
def test_unknown_extension(files, offset):
    files.patch("B", offset, 1)
    assert_error(files.run(), 1, "model.bin")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("qwen2")
    return export(make_checkpoint(directory / "hf", tokenizer, n_heads=2, n_kv_heads=1, qwen2=True),
                  directory / "model.bin")


@pytest.mark.parametrize("field, value", [
    ("qkv_bias", 0), ("qkv_bias", 2), ("no_qk_norm", 0), ("no_qk_norm", 2)])
def test_bad_qwen2_field(qwen2, tmp_path, field, value):
    files = Files(qwen2, tmp_path)
    assert files.run().returncode == 0
    files.patch("I", EXTENSION[field], value)
    assert_error(files.run(), 1, "model.bin", "expected", "found", field if value else "bytes")


def test_truncated_biases(qwen2, tmp_path):
    files = Files(qwen2, tmp_path)
    size, biases = len(files.model_bytes), 4 * 2 * (64 + 32 + 32)
    for cut in (1, 4, 4 * 2 * 32, 4 * 2 * (32 + 32), biases - 4, biases, biases + 1):
        files.path.write_bytes(files.model_bytes[:size - cut])
        assert_error(files.run(), 1, "model.bin", "expected", "found")
    files.path.write_bytes(files.model_bytes + bytes(4))
    assert_error(files.run(), 1, "model.bin", "bytes", "expected", "found")


# -- the size

def test_truncated_model(files):
    """At the borders of every tensor, and near the beginning and end."""
    size = len(files.model_bytes)
    dim, hidden, layers, heads, kv, hd, vocab = 64, 128, 2, 128, 64, 32, 502
    at, borders = 256, [0, 1, 3, 4, 47, 48, 100, 255, 256, 257, size - 1, size - 4]
    for n in (layers * dim, layers * dim, dim, layers * hd, layers * hd):
        at += 4 * n
        borders.append(at)
    for n in [vocab * dim] + [heads * dim, kv * dim, kv * dim, dim * heads, hidden * dim,
                              dim * hidden, hidden * dim] * layers:
        borders += [at + n, at + n + n // 16]
        at += n + n // 16
    assert at == size
    for cut in sorted(set(borders) - {size}):
        files.path.write_bytes(files.model_bytes[:cut])
        assert_error(files.run(), 1, "model.bin", "expected", "found")


@pytest.mark.parametrize("extra", [1, 4, 255, 4096])
def test_oversized_model(files, extra):
    files.path.write_bytes(files.model_bytes + bytes(extra))
    assert_error(files.run(), 1, "model.bin", "bytes", "expected", "found")


def test_sizes_are_64_bit(files):
    """A header that describes over 2^32 bytes, and a (sparse) file of that size modulo 2^32."""
    vocab = (2**32 // (64 + 4)) // 64 * 64
    files.patch("i", FIELDS["vocab_size"], vocab)
    expected = len(files.model_bytes) + (vocab - 502) * (64 + 4)
    assert expected > 2**32 - 2**16
    assert_error(files.run(), 1, "bytes")
    with open(files.path, "r+b") as file:
        file.truncate(expected % 2**32 if expected > 2**32 else expected - 1)
    assert_error(files.run(), 1, "bytes")


# -- what is no model at all

def test_missing_model(tmp_path):
    assert_error(qwen3(tmp_path / "none.bin", "-i", "x"), 1, "none.bin")


def test_directory_as_model(tmp_path):
    assert_error(qwen3(tmp_path, "-i", "x"), 1, tmp_path)


@pytest.mark.parametrize("content", [b"", b"x", b"GGUF" + bytes(1000), random.Random(1).randbytes(5000),
                                     b"\0" * 256, b"#!/bin/sh\n" * 100],
                         ids=["empty", "byte", "gguf", "noise", "zeros", "script"])
def test_something_else_as_model(tmp_path, content):
    (tmp_path / "model.bin").write_bytes(content)
    assert_error(qwen3(tmp_path / "model.bin", "-i", "x"), 1, "model.bin")


def test_fifo_and_device_as_model(tmp_path):
    assert_error(qwen3("/dev/null", "-i", "x"), 1, "/dev/null")
    os.mkfifo(tmp_path / "fifo")
    with open(os.open(tmp_path / "fifo", os.O_RDWR), "wb"):
        assert_error(qwen3(tmp_path / "fifo", "-i", "x"), 1, "fifo")


# -- the tokenizer

def test_missing_tokenizer(files):
    files.tokenizer.unlink()
    assert_error(files.run(), 1, "model.bin.tokenizer")


def test_truncated_tokenizer(files):
    """At every border of its first records and sections, and in between."""
    data = files.tokenizer_bytes
    plain = data.index(b"q3tx")                         # ending there is the older format
    cuts = [*range(60), *range(3000, 3060), *range(60, len(data), 997), plain - 1, len(data) - 1]
    at = plain + 12
    cuts += range(plain + 1, at)
    while at < len(data):
        length = struct.unpack_from("<I", data, at + 4)[0]
        cuts += [at, at + 4, at + 8, at + 8 + length // 2]
        at += 8 + length
    records, at = {12}, 12                              # between two records: fewer tokens, fine
    for _ in range(502):
        at += 8 + struct.unpack_from("<I", data, at + 4)[0]
        records.add(at)
    assert at == plain
    accepted = []
    for cut in sorted(set(cuts) - records):
        files.tokenizer.write_bytes(data[:cut])
        result = files.run()
        if result.returncode == 0:
            accepted.append(cut)
        else:
            assert_error(result, 1, "model.bin.tokenizer")
    assert not accepted


def test_tokenizer_with_something_after_it(files):
    for extra in (b"\0", b"q3tx", b"x" * 1000):
        files.tokenizer.write_bytes(files.tokenizer_bytes + extra)
        assert_error(files.run(), 1, "model.bin.tokenizer")


def test_plain_tokenizer_with_something_after_it(files):
    plain = files.tokenizer_bytes[:files.tokenizer_bytes.index(b"q3tx")]
    for extra in (b"\0", b"q3ty" + bytes(8), b"x" * 1000):
        files.tokenizer.write_bytes(plain + extra)
        assert_error(files.run(), 1, "model.bin.tokenizer")


def test_tokenizer_of_another_vocabulary(files, tmp_path, tokenizer):
    """More tokens than rows, and a current file for more rows."""
    other = tmp_path / "other"
    other.mkdir()
    export(make_checkpoint(other / "hf", tokenizer, pad_to=640), other / "model.bin")
    files.tokenizer.write_bytes((other / "model.bin.tokenizer").read_bytes())
    assert_error(files.run(), 1, "model.bin.tokenizer")


def sections(data):
    """A tokenizer file's (part before the extension, {tag: payload})."""
    return data[:data.index(b"q3tx")], read_tokenizer_sections(data)


def read_tokenizer_sections(data):
    at, found = data.index(b"q3tx") + 12, {}
    while at < len(data):
        tag, length = struct.unpack_from("<4sI", data, at)
        found[tag] = data[at + 8:at + 8 + length]
        at += 8 + length
    return found


def join(plain, parts, version=1, magic=b"q3tx"):
    body = b"".join(tag + struct.pack("<I", len(payload)) + payload for tag, payload in parts)
    return plain + magic + struct.pack("<II", version, len(body)) + body


def test_extension_in_any_order(files):
    """The test's own tool, and: the order of the sections does not matter."""
    expected = files.run().stdout
    assert expected
    plain, parts = sections(files.tokenizer_bytes)
    assert join(plain, parts.items()) == files.tokenizer_bytes
    files.tokenizer.write_bytes(join(plain, reversed(parts.items())))
    assert files.run().stdout == expected


@pytest.mark.parametrize("tag", [b"adde", b"clas", b"ccc ", b"deco", b"head", b"tail", b"stop",
                                 b"samp", b"chat", b"repe", b"mode"])
def test_section_left_out(files, tag):
    """Each has a default."""
    plain, parts = sections(files.tokenizer_bytes)
    parts.pop(tag, None)
    files.tokenizer.write_bytes(join(plain, parts.items()))
    for mode in ("generate", "chat"):
        assert files.run("-m", mode).returncode == 0


@pytest.mark.parametrize("change", [
    "version", "unknown tag", "twice", "odd length", "id out of range", "descending", "chat cut",
    "chat long", "stop out of range", "added twice", "class 4", "class overlap", "samp nan",
    "samp short", "deco beyond Unicode", "penalty nan", "penalty 0", "penalty -1", "penalty short",
    "mode 5", "mode -1", "mode long"])
def test_bad_section(files, change):
    def u32(*values):
        return struct.pack(f"<{len(values)}I", *values)
    plain, parts = sections(files.tokenizer_bytes)
    items, version = dict(parts), 1
    if change == "version":
        version = 2
    elif change == "unknown tag":
        items[b"xxxx"] = b""
    elif change == "odd length":
        items[b"clas"] = items[b"clas"][:-1]
    elif change == "id out of range":
        items[b"adde"] = items[b"adde"] + u32(502, 1)
    elif change == "descending":
        items[b"adde"] = items[b"adde"][8:] + items[b"adde"][:8]
    elif change == "added twice":
        items[b"adde"] = items[b"adde"] + items[b"adde"][-8:]
    elif change == "chat cut":
        items[b"chat"] = items.get(b"chat", u32(1) * 12)[:-1]
    elif change == "chat long":
        items[b"chat"] = u32(2**32 - 1) + bytes(44)
    elif change == "stop out of range":
        items[b"stop"] = u32(476, 2**31)
    elif change == "class 4":
        items[b"clas"] = items[b"clas"][:-4] + u32(4)
    elif change == "class overlap":
        items[b"clas"] = items[b"clas"] + items[b"clas"][-12:]
    elif change == "samp nan":
        items[b"samp"] = struct.pack("<ffI", NAN, 0.9, 20)
    elif change == "samp short":
        items[b"samp"] = struct.pack("<ff", 0.6, 0.9)
    elif change == "deco beyond Unicode":
        items[b"deco"] = u32(0x110000, 0x61, 0x300, 1)
    elif change.startswith("penalty"):
        value = {"nan": NAN, "0": 0.0, "-1": -1.0, "short": 1.1}[change.split()[1]]
        items[b"repe"] = struct.pack("<f", value)[:3 if change == "penalty short" else 4]
    elif change.startswith("mode"):
        items[b"mode"] = u32(*{"5": [5], "-1": [2**32 - 1], "long": [1, 0]}[change.split()[1]])
    new = list(items.items())
    if change == "twice":
        new.append(new[0])
    files.tokenizer.write_bytes(join(plain, new, version))
    assert_error(files.run(), 1, "model.bin.tokenizer")


@pytest.mark.parametrize("length", [2**32 - 1, 2**31, 100_000])
def test_bad_record_length(files, length):
    data = bytearray(files.tokenizer_bytes)
    data[16:20] = struct.pack("<I", length)
    files.tokenizer.write_bytes(data)
    assert_error(files.run(), 1, "model.bin.tokenizer")


# -- noise

def run_survives(result):
    """It may succeed; if it fails, then with one line (some text may have come out before)."""
    assert result.returncode in (0, 1), (result.returncode, result.stderr[-2000:])
    if result.returncode == 1:
        assert result.stderr.startswith(b"qwen3: ") and result.stderr.count(b"\n") == 1, result


def test_flipped_bits_in_the_header(files):
    for bit in range(0x5C * 8):
        data = bytearray(files.model_bytes)
        data[bit // 8] ^= 1 << bit % 8
        files.path.write_bytes(data)
        run_survives(files.run())


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_the_weights(files, seed):
    """Scales and norms may become anything, NaN and infinity too."""
    r = random.Random(seed)
    for count in (1, 3, 30, 300, 3000):
        for _ in range(5):
            data = bytearray(files.model_bytes)
            for _ in range(count):
                data[r.randrange(256, len(data))] ^= 1 << r.randrange(8)
            files.path.write_bytes(data)
            run_survives(files.run("-t", r.choice((0, 1))))


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38], ids=str)
def test_weights_that_overflow(files, value):
    """No text comes out as if nothing were wrong."""
    norm = 256 + 4 * (2 * 64 + 2 * 64)                  # rms_final_weight
    files.patch("64f", norm, *[value] * 64)
    for temperature in (0, 1):
        run_survives(files.run("-t", temperature))
    result = files.run("-m", "embed")
    run_survives(result)
    assert b"n" not in result.stdout                    # nan, inf


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_the_tokenizer(files, seed):
    r = random.Random(seed)
    size = len(files.tokenizer_bytes)
    plain = files.tokenizer_bytes.index(b"q3tx")
    for i in range(60):
        data = bytearray(files.tokenizer_bytes)
        for _ in range(r.choice((1, 1, 3, 100))):
            at = r.choice((r.randrange(size), r.randrange(12, 300), r.randrange(plain, size),
                           r.randrange(plain, plain + 20)))
            data[at] ^= 1 << r.randrange(8)
        files.tokenizer.write_bytes(data)
        run_survives(files.run("-m", r.choice(("generate", "chat")), "-y",
                               "cafe\u0301 \u00e9 <think>"))


def test_zero_filled_tokenizer(files):
    files.tokenizer.write_bytes(bytes(len(files.tokenizer_bytes)))
    run_survives(files.run())
    files.tokenizer.write_bytes(b"")
    assert_error(files.run(), 1, "model.bin.tokenizer")


# -- memory

@pytest.mark.skipif(b"__asan_init" in QWEN3.read_bytes() if QWEN3.exists() else False,
                    reason="the sanitizer needs more address space")
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not limit address space")
def test_not_enough_memory(files):
    """A KV cache that no machine has room for: an error that says so, not a kill."""
    files.patch("i", FIELDS["max_seq_len"], 2**31 - 1)
    script = f"ulimit -v 500000; exec {QWEN3} {files.path} -m generate -i x -n 2 -c 0 -q"
    result = subprocess.run(["sh", "-c", script], capture_output=True, env=environment(),
                            stdin=subprocess.DEVNULL, timeout=300)
    assert_error(result, 1)


def test_large_context_costs_nothing(files):
    """Only positions that are used are touched: 2^20 of them are 1 GB here."""
    files.patch("i", FIELDS["max_seq_len"], 2**20)
    result = files.run("-c", 0)
    assert result.returncode == 0, result.stderr

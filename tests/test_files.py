"""Model and tokenizer files, each refused in one line that names what is wrong, or harmless and expected to be."""
import gzip
import itertools
import math
import random
import re
import struct
import time
from typing import NamedTuple

import numpy as np
import pytest
from conftest import (QUOTED_QWEN3, assert_error, copy_model, export, export_by_rows, join_tokenizer, make_checkpoint,
                      needs_address_space, outputs, qwen3, shell, split_tokenizer, token_records, write_zeros)
from reference import HEADER

INF, NAN = float("inf"), float("nan")
VOCAB = 502
SHAPES = {                                              # the models that the rows spoil
    "qwen3": dict(),
    "scaled rope": dict(),
    "qwen2": dict(n_heads=2, n_kv_heads=1, qwen2=True),
    "4 bits": dict(),
    "experts": dict(n_experts=4, n_experts_used=2, topk_norm=False)}
BITS = {"4 bits": ("--bits", 4)}                        # export.py's options
FREQUENCIES = 1e6 ** (-np.arange(16) / 16)              # those that the file has no need to store


class Files:
    """A copy of a model's two files; run() writes them anew, perhaps spoiled, and asks something."""

    def __init__(self, model, directory):
        self.path = copy_model(model, directory)
        self.tokenizer = directory / "model.bin.tokenizer"
        self.model_bytes, self.tokenizer_bytes = self.path.read_bytes(), self.tokenizer.read_bytes()

    def run(self, model=None, tokenizer=None, *args):
        self.path.write_bytes(self.model_bytes if model is None else model)
        self.tokenizer.write_bytes(self.tokenizer_bytes if tokenizer is None else tokenizer)
        usual = {"-m": "generate", "-i": "the wind", "-n": 2, "-s": 3} | dict(zip(args[::2], args[1::2]))
        return qwen3(self.path, "-qq", *itertools.chain(*usual.items()))

    def check(self, words, model=None, tokenizer=None, *args):
        """It is refused with these words or, without any, accepted."""
        result = self.run(model, tokenizer, *args)
        if words:
            assert_error(result, 1, "model.bin" if tokenizer is None else "model.bin.tokenizer", *words)
        else:
            assert result.returncode == 0, result
        return result


@pytest.fixture(scope="module")
def files(tmp_path_factory, tokenizer):
    """files(name): that model's files, one copy for all rows."""
    made = {}
    def get(name="qwen3"):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            hf = make_checkpoint(directory / "hf", tokenizer, **SHAPES[name])
            (directory / "spoiled").mkdir()
            older = export_by_rows(hf, directory / "older.bin", *BITS.get(name, ()))
            model = export(hf, directory / "model.bin", *BITS.get(name, ()))
            if name == "scaled rope":
                for path in older, model:
                    path.write_bytes(with_scaled_rope(path.read_bytes(), 1.25, FREQUENCIES))
            made[name] = Files(model, directory / "spoiled")
            made[name].by_rows = older.read_bytes()
            assert made[name].run().returncode == 0     # what all the rows begin from
        return made[name]
    return get


def patched(data, format, at, *values):
    data = bytearray(data)
    struct.pack_into("<" + format, data, at, *values)
    return bytes(data)


def with_scaled_rope(data, factor, frequencies):
    """The file of the model "qwen3" with these frequencies (head_dim / 2) before the embedding."""
    at = outputs(data)["embed_tokens.weight"].values
    data = data[:at] + np.asarray(frequencies, "<f4").tobytes() + data[at:]
    return patched(patched(data, "I", 0x38, 2), "f", 0x3C, factor)


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


# -- the header

class Field(NamedTuple):
    word: str                                           # of the error
    offset: int
    kind: str = "i"                                     # struct's
    values: tuple = ()                                  # tried besides the usual ones
    harmless: tuple = ()
    elsewhere: dict = {}                                # value -> what is wrong then, if not this field


def base_field(name, *values, **more):
    return Field(f"bad {name}", 4 + 4 * HEADER.index(name), "i", values, **more)


SIZE = "bytes"                                          # possible, but then the file has the wrong size
FIELDS = {"qwen3": [
    Field("magic", 0x00, values=(0x46554747,), elsewhere={0x46554747: "a GGUF file"}), base_field("version"),
    base_field("dim", -64, 32, 2**20, 2**20 + 64, elsewhere={128: SIZE, 2**20: SIZE}),
    base_field("hidden_dim", -128, 100, 2**20, 2**20 + 64, elsewhere={256: SIZE, 2**20: SIZE}),
    base_field("n_layers", 4096, 4097, elsewhere={1: SIZE, 3: SIZE, 4: SIZE, 4096: SIZE}),
    base_field("n_heads", -4, 4096, 4098, elsewhere={8: SIZE, 3: "n_kv_heads", 5: "n_kv_heads", 4096: SIZE}),
    base_field("n_kv_heads", -2, 8, 4097, elsewhere={1: SIZE, 4: SIZE}),
    base_field("vocab_size", -502, elsewhere={501: SIZE, 503: SIZE, 1004: SIZE, 2**30: SIZE}),
    base_field("max_seq_len", -512, harmless=(2**30, 511, 513, 1024)),
    base_field("head_dim", -32, 2, 4096, 4098, elsewhere={64: SIZE, 2: "n_heads * head_dim", 4096: SIZE}),
    base_field("shared_classifier", elsewhere={0: SIZE}),
    base_field("group_size", 16, 48, 512, elsewhere={128: "bad dim", 32: SIZE}),
    Field("bad rope_theta", 0x30, "f", harmless=(-0.0,)), Field("bad rms_norm_eps", 0x34, "f", harmless=(-0.0,)),
    Field("bad rope_scaling", 0x38, values=(3,), harmless=(0,), elsewhere={
        2: "rope_factor",
        1: "bad rope_scaling, expected 0 or 2, found 1; export it again by this version's export.py"}),  # an older YaRN
    Field("bad rope_factor", 0x3C, "f", values=(1.0,), harmless=(-0.0,)),
    *[Field("unknown field", at, harmless=(0,))
      for at in (*range(0x40, 0x54, 4), *range(0x70, 0x80, 4), 0xA4, 0xFC)],
    *[Field("unknown field", at, "B") for at in (0xA5, 0xFF)],
    Field("bad eight_bits", 0x6C, values=(4, 127, 128), harmless=(0,)), Field("bad eight_bits", 0x6D, "B"),
    Field("bad panels", 0x80, values=(3, 16), elsewhere={0: SIZE}), Field("bad panels", 0x83, "B"),
    Field("bad n_experts,", 0x5C, values=(4097,), harmless=(0,), elsewhere={1: "bad n_experts_used", 4096: "bad n_experts_used"}),
    Field("bad n_experts_used", 0x60, harmless=(0,)), Field("bad no_topk_norm", 0x64, harmless=(0,)),
    Field("bad layer_bits", 0x68, values=(2, 8), harmless=(0,), elsewhere={4: "bad levels"}),
    Field("bad attention_every", 0x84, values=(2, 3, 4096, 4097), harmless=(0,),
          elsewhere={2: "bad delta_k_heads", 3: "bad n_layers", 4096: "bad n_layers"}),
    Field("bad delta_k_heads", 0x88, values=(128, 129), harmless=(0,)),
    Field("bad delta_v_heads", 0x8C, values=(256, 257), harmless=(0,)),
    Field("bad rotary_dim", 0x90, values=(2, 3, 30, 32, 34), harmless=(0, 2, 30, 32)),
    Field("bad gated_attention", 0x94, values=(2,), harmless=(0,), elsewhere={1: SIZE}),
    Field("bad shared_expert", 0x98, values=(2,), harmless=(0,)),
    Field("bad qkv_bias", 0x54, values=(2,), harmless=(0,), elsewhere={1: SIZE}),
    Field("bad no_qk_norm", 0x58, values=(2,), harmless=(0,), elsewhere={1: SIZE}),
], "scaled rope": [
    Field("bad rope_scaling", 0x38, elsewhere={0: "rope_factor"}),
    Field("bad rope_factor", 0x3C, "f", harmless=(1e-45, 1e13)),
    *[Field("unknown field", at, harmless=(0,)) for at in range(0x40, 0x54, 4)],
], "4 bits": [
    Field("bad layer_bits", 0x68, values=(2, 8), elsewhere={0: "unknown field"}),
    Field("bad eight_bits", 0x6C, values=(127, 128, 129, 255, 256), elsewhere=dict.fromkeys((0, 3, 5, 8, 127), SIZE)),
    Field("bad panels", 0x80, elsewhere={0: SIZE}),
    *[Field("bad levels[i], expected ascending", 0x70 + i, "b", (level,))
      for i, level in ((0, 127), (1, -127), (5, -128), (15, 82), (15, -1))],
], "experts": [
    Field("bad n_experts,", 0x5C, values=(4097, 2, 8), elsewhere={
        0: "bad n_experts_used", 1: "bad n_experts_used", 2: SIZE, 3: SIZE, 5: SIZE, 8: SIZE}),
    Field("bad n_experts_used", 0x60, values=(5, 4), harmless=(1, 3, 4)),
    Field("bad no_topk_norm", 0x64, values=(2,), harmless=(0,)),
    base_field("hidden_dim", 2**20, elsewhere={64: SIZE, 256: SIZE, 2**20: SIZE}),
    Field("bad shared_expert", 0x98, values=(2,), harmless=(0,), elsewhere={1: SIZE}),
], "qwen2": [Field("bad qkv_bias", 0x54, elsewhere={0: SIZE}), Field("bad no_qk_norm", 0x58, elsewhere={0: SIZE})]}


@pytest.mark.parametrize("name, field", [(name, field) for name in FIELDS for field in FIELDS[name]],
                         ids=lambda x: f"{x.word} {x.offset:#x}" if isinstance(x, Field) else x)
def test_header_field(files, name, field):
    data = files(name).model_bytes
    old, = struct.unpack_from("<" + field.kind, data, field.offset)
    usual = {"f": [-1.0, NAN, INF, -INF, 1e13, 1e-45, -0.0], "B": [1, 255], "b": [],
             "i": [0, -1, 2**31 - 1, -2**31, 2**30, old - 1, old + 1, 2 * old]}[field.kind]
    for value in {v for v in (*usual, *field.values) if v != old and -2**31 <= v < 2**31 or v != v} | {
            v for v in usual if field.kind == "f"}:
        words = "expected", field.elsewhere.get(value, field.word)
        files(name).check(value not in field.harmless and words,
                          patched(data, field.kind, field.offset, value), None, "-c", "64")


@pytest.mark.parametrize("words, numbers", [
    ("bad delta_k_heads, expected 0 without attention_every", {0x88: 1, 0x8C: 1}),
    ("bad delta_v_heads, expected a multiple of delta_k_heads", {0x84: 2, 0x88: 2}),
    ("bad delta_v_heads, expected a multiple of delta_k_heads", {0x84: 2, 0x88: 2, 0x8C: 3}),
    ("bad delta_v_heads, expected it * 128 to be a multiple of group_size", {0x2C: 256, 8: 256, 12: 256, 0x14: 8, 0x84: 2, 0x88: 1, 0x8C: 1}),
    ("bad head_dim, expected a multiple of 16 with a gate", {0x24: 40, 0x14: 8, 0x18: 8, 0x94: 1}),
    ("bad qkv_bias, expected 0 with delta layers", {0x54: 1, 0x84: 2, 0x88: 1, 0x8C: 1}),
    ("bad n_layers, expected a multiple of attention_every", {0x10: 3, 0x84: 2, 0x88: 1, 0x8C: 1}),
    (SIZE, {0x84: 2, 0x88: 1, 0x8C: 3})], ids=str)
def test_numbers_of_delta_layers(files, words, numbers):
    data = files().model_bytes
    for at, value in numbers.items():
        data = patched(data, "I", at, value)
    files().check([words], data)


def test_integers_are_no_floats(files):
    at = 4 + 4 * HEADER.index("max_seq_len")
    result = files().run(patched(files().model_bytes, "i", at, 2**24 + 1), None, "-c", 2**24 + 2)
    assert_error(result, 1, "-c", 2**24 + 1)


def test_zeros_of_the_header(files):
    """The base format has no fields from 0x30 on; theta 1e6 and eps 1e-6 written out mean the same as zeros."""
    f = files()
    base = f.by_rows
    assert not any(base[0x30:256])
    answers = [f.run(model, None, "-m", "perplexity").stdout
               for model in (None, base, patched(base, "2f", 0x30, 1e6, 1e-6), patched(f.model_bytes, "2f", 0x30, 1e6, 1e-6))]
    assert answers[0] and answers == answers[:1] * 4


SMALL = dict(dim=32, hidden_dim=32, n_layers=1, n_heads=1, n_kv_heads=1, vocab_size=VOCAB,
             max_seq_len=64, head_dim=32)               # of models of zeros
NO_CACHE = "memory: not enough for the KV cache (-c "


@pytest.mark.parametrize("shape, word", [
    (dict(head_dim=2**27), "head_dim"),                 # head_dim * 16 overflowed
    (dict(n_heads=2726224, n_kv_heads=2726224, head_dim=2), "n_heads"),
    (dict(head_dim=4096, max_seq_len=2**30), NO_CACHE),  # 32 TB, within all bounds
    (dict(n_layers=64, n_heads=64, n_kv_heads=64, head_dim=64, max_seq_len=238903640), NO_CACHE)],
    ids=str)
def test_shapes_that_overflowed(files, tmp_path, shape, word):
    path = write_zeros(tmp_path / "model.bin", files().tokenizer_bytes, **SMALL | shape)
    assert_error(qwen3(path, "-i", "x", "-n", 1, "-c", 0, "-qq"), 1, word)


def test_groups_that_overflowed(files, tmp_path):
    """The last of 4096 experts ends at group 2^31 of a matrix; the sanitizers saw an int that overflowed."""
    plain, _ = split_tokenizer(files().tokenizer_bytes)
    ones = dict.fromkeys(["layers.0.input_layernorm.weight", "norm.weight",
                          "layers.0.post_attention_layernorm.weight"], (0, 1)) | {
        "layers.0.mlp.gate.weight": (4095, 1), "embed_tokens.weight": (0, 512)}
    try:
        path = write_zeros(tmp_path / "model.bin", plain, ones, **SMALL | dict(
            dim=4096, hidden_dim=4096, n_heads=16, vocab_size=512, head_dim=2, no_qk_norm=1,
            n_experts=4096, n_experts_used=1, panels=1))
    except OSError:
        pytest.skip("the file system has no files of 230 GB")
    assert qwen3(path, "-m", "generate", "-i", "x", "-n", 1, "-j", 1).returncode == 0


# -- the weights

IN_ERRORS = {                                           # the ends of export.py's names of tensors
    "input_layernorm.weight": "rms_att", "post_attention_layernorm.weight": "rms_ffn",
    "norm.weight": "rms_final", "q_norm.weight": "q_norm", "k_norm.weight": "k_norm",
    "gate.weight": "router", "frequencies": "rope_freq",
    "embed_tokens.weight": "the token embedding",
    "q_proj.weight": "wq", "k_proj.weight": "wk", "v_proj.weight": "wv", "o_proj.weight": "wo",
    "gate_proj.weight": "w1", "down_proj.weight": "w2", "up_proj.weight": "w3",
    "q_proj.bias": "bq", "k_proj.bias": "bk", "v_proj.bias": "bv"}


@pytest.mark.parametrize("name", SHAPES)
def test_cut_and_longer_models(files, name):
    """At the borders of each tensor, and one byte before and after them."""
    data = files(name).model_bytes
    assert [*outputs(data).values()][-1].end == len(data)
    for cut in (0, 1, 3, 4, 47, 48, 100, 255):
        files(name).check(["expected", "found"], data[:cut])
    for tensor, output in outputs(data).items():
        begin, scales, end = output.values, output.scales, output.end
        cuts = [begin, begin + 1, (begin + end) // 2, end - 1]
        if output.bits < 32:                            # also inside a panel
            cuts += [begin + 16 + 2, scales - 1, scales, scales + 1, scales + 16 + 2]
        for cut in cuts:
            part = IN_ERRORS[".".join(tensor.split(".")[-2:])]
            files(name).check(["expected", "found", f"ends inside {part}"], data[:cut])
    for extra in (b"\0", b"ajc1", bytes(4096)):
        files(name).check(["wrong size", len(data), len(data) + len(extra)], data + extra)


@pytest.mark.parametrize("name", SHAPES)
def test_older_exports(files, name):
    """Row by row, a model gives the same bytes, and is refused if it is cut or longer."""
    f = files(name)
    data = f.by_rows
    for args in (("-t", 1, "-n", 20), ("-m", "perplexity"), ("-m", "embed")):
        expected = f.run(None, None, *args)
        assert expected.stdout and f.run(data, None, *args).stdout == expected.stdout
    said = qwen3(f.path, "-i", "x", "-n", 1).stderr.decode()  # without -q: what a new export saves
    size = sum(t.end - t.values for t in outputs(f.model_bytes).values() if t.bits < 32)
    assert re.findall(r"put into panels \(\d+\.\d s, (\d+) MB\); export it again", said) == [f"{size / 1e6:.0f}"]
    assert b"panels" not in qwen3(f.path, "-m", "tokenize", "-i", "x").stderr  # no weights, no panels
    for cut in (*range(256, len(data), len(data) // 20), len(data) - 1):
        f.check(["ends inside"], data[:cut])
    f.check(["wrong size", len(data), len(data) + 1], data + b"\0")


@needs_address_space
def test_memory_for_panels(files, tmp_path):
    shape = SMALL | dict(dim=1024, hidden_dim=2**16)
    path = write_zeros(tmp_path / "model.bin", files().tokenizer_bytes, **shape)
    result = shell(f"ulimit -v 350000; exec {QUOTED_QWEN3} {path} -i x -n 1 -j 1 -q")
    assert_error(result, 1, "weights in panels", "export the model again", f"expected {2**16 * 1024 / 1e6:.0f} MB")


def test_sizes_are_64_bit(files):
    """A header that describes over 2^32 bytes, and a file of that size modulo 2^32."""
    f = files()
    vocab = 2**32 // (64 + 4) // 16 * 16 + 64
    size = len(f.model_bytes) + (vocab - 512) * (64 + 4)
    assert 2**32 < size < 2**32 + 2**20
    f.path.write_bytes(patched(f.model_bytes, "i", 4 + 4 * HEADER.index("vocab_size"), vocab))
    with open(f.path, "r+b") as file:
        file.truncate(size % 2**32)
    assert_error(qwen3(f.path, "-i", "x"), 1, "bytes", "ends inside the token embedding")


def check_weights(files, at, count, value, kind="f"):
    """Weights are not looked through: logits that are not finite are an error, and all else is text."""
    data = patched(files.model_bytes, f"{count}{kind}", at, *[value] * count)
    for args in (("-t", "0"), ("-t", "1"), ("-m", "perplexity"), ("-m", "embed")):
        result = files.run(data, None, *args)
        assert b"nan" not in result.stdout and b"inf" not in result.stdout
        if result.returncode != 0:
            assert_error(result, 1, "model:")
        yield result.returncode


NUMBERS = [NAN, -NAN, INF, -INF, 3e38, -3e38, 1e-45, -0.0, 0.0]


@pytest.mark.parametrize("value", NUMBERS, ids=str)
def test_weights_that_are_no_numbers(files, value):
    """A norm, and the scale of one row of the embedding: one logit of many."""
    places = outputs(files().model_bytes)
    failures = [*check_weights(files(), places["norm.weight"].values, 64, value)]
    assert math.isfinite(value) or all(failures)
    at = places["embed_tokens.weight"].scales + 4 * 300
    failures = [*check_weights(files(), at, 1, value)]
    assert math.isfinite(value) or all(failures[:2])


@pytest.mark.parametrize("value", [NAN, -INF, 65504.0, 6e-8], ids=str)
def test_scales_of_16_bits(files, value):
    """Also of those that a layer has for all its rows: each conversion keeps infinity and NaN."""
    *_, last = outputs(files("4 bits").model_bytes).values()
    for n in (1, (last.end - last.scales) // 2):
        failures = [*check_weights(files("4 bits"), last.scales, n, value, "e")]
        assert all(failures[:3]) == (not math.isfinite(value))


def test_scaled_rope(files):
    """The frequencies and the factor are taken as they stand: theta's and 1 are as without them."""
    plain, scaled = files(), files("scaled rope")
    def nll(model):
        result = scaled.run(model, None, "-m", "perplexity")
        assert result.returncode == 0, result
        return float(result.stdout.split()[3])
    for factor, frequencies, same in [(1, FREQUENCIES, True), (1.25, FREQUENCIES, False),
                                      (1, FREQUENCIES / 4, False), (1, FREQUENCIES * 0, False)]:
        found = nll(with_scaled_rope(plain.model_bytes, factor, frequencies))
        assert (abs(found - nll(plain.model_bytes)) < 1e-5) == same, (factor, found)


@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF, -1e-9, 1e30, 0.0, -0.0, 1e-45], ids=str)
def test_frequencies(files, value):
    f = files("scaled rope")
    at = outputs(f.model_bytes)["frequencies"].values
    for i in (0, 15):
        result = f.run(patched(f.model_bytes, "f", at + 4 * i, value))
        if math.isfinite(value):
            assert result.returncode == 0 or b"model:" in result.stderr, result
        else:
            assert_error(result, 1, "not finite")


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, 1e-45], ids=str)
def test_routers(files, value):
    """A router with NaN or infinity would choose at random."""
    f = files("experts")
    for layer in range(2):
        at = outputs(f.model_bytes)[f"layers.{layer}.mlp.gate.weight"].values
        if math.isfinite(value):
            assert set(check_weights(f, at + 4 * 70, 1, value)) == {0}
        else:
            f.check([f"bad router of layer {layer}", "finite"], patched(f.model_bytes, "f", at + 4 * 70, value))


def test_choice_that_is_no_number(files):
    """A finite router whose products overflow, and a norm of NaN before it"""
    f = files("experts")
    for name, value in (("mlp.gate", 3e38), ("post_attention_layernorm", NAN)):
        place = outputs(f.model_bytes)[f"layers.1.{name}.weight"]
        n = (place.end - place.values) // 4
        assert all([*check_weights(f, place.values, n, value)][:3])


# -- something else

@pytest.mark.parametrize("content, word", [
    (b"", ""), (b"x", ""), (random.Random(1).randbytes(5000), "found 0x"), (bytes(256), "found 0x00000000"), (b"#!/bin/sh\n" * 100, "found 0x"),
    (b"GGUF" + bytes(1000), "a GGUF file"), (b"GGUF", "a GGUF file"), (gzip.compress(bytes(999)), "found a gzip file: gzip -d"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "found a Git LFS pointer: git lfs pull"),
    (b"<!DOCTYPE html>", "found a web page: download it again")],
    ids=["empty", "byte", "noise", "zeros", "script", "gguf", "cut gguf", "gzip", "git lfs", "web page"])
def test_something_else(files, content, word):
    assert_error(files().run(content), 1, "model.bin", word, "not a qwen3.c model" * word.startswith("found"))
    assert_error(files().run(None, content), 1, "model.bin.tokenizer")


# -- the tokenizer's records

@pytest.mark.parametrize("offset, value, word", [
    (0, 0, None), (0, 2**32 - 1, None),                 # the longest token: not relied on
    *[(at, value, word) for at, word in ((4, "bos"), (8, "eos")) for value in (VOCAB, 2**31, 2**32 - 1)],
    (4, VOCAB - 1, None), (8, VOCAB - 1, None)])
def test_tokenizer_header(files, offset, value, word):
    files().check(word and [word, value, VOCAB - 1], None, patched(files().tokenizer_bytes, "I", offset, value))


@pytest.mark.parametrize("token", [0, 1, 255, 256, 400, 475, 476, VOCAB - 1])
def test_length_of_a_token_lies(files, token):
    data = files().tokenizer_bytes
    at = token_records(data, VOCAB)[token]
    old, = struct.unpack_from("<I", data, at + 4)
    left = len(data) - at - 8
    for value in {0, old - 1, old + 1, old + 8, left - 1, left, left + 1, 2**31 - 1, 2**31, 2**32 - 9,
                  2**32 - 1} - {old, -1}:
        files().check([""], None, patched(data, "I", at + 4, value))


@pytest.mark.parametrize("length", [1024, 1025, 50_000])
def test_longest_token(files, length):
    """Of a token that is not added"""
    plain, _ = split_tokenizer(files().tokenizer_bytes)
    data = plain[:token_records(plain, VOCAB)[-2]] + struct.pack("<fI", -5, length) + b"~" * length
    files().check(length > 1024 and [f"token {VOCAB - 1}", "1024 bytes", length], None, data)


@pytest.mark.parametrize("score", [NAN, INF, -INF, 0.0, -0.0, 3e38, -1e6, -1e-45], ids=str)
def test_score_of_a_token(files, score):
    """Only their order counts."""
    data = files().tokenizer_bytes
    for token in (1, 300, VOCAB - 1):
        files().check(score != score and [f"score of token {token}"], None,
                      patched(data, "f", token_records(data, VOCAB)[token], score))


def test_cut_and_longer_tokenizers(files):
    """At the borders, and a byte before and after. An older file ends between two tokens, but has all single bytes."""
    data = files().tokenizer_bytes
    plain, parts = split_tokenizer(data)
    starts = token_records(data, VOCAB)[:-1]
    borders = [0, 4, 8, 12, *starts[1::100], len(plain), len(plain) + 4, len(plain) + 8]
    at = len(plain) + 12
    for payload in parts.values():
        borders += [at, at + 4, at + 8, at + 8 + len(payload) // 2]
        at += 8 + len(payload)
    assert at == len(data)
    for cut in {border + i for border in borders for i in (-1, 0, 1) if border + i >= 0} - {*starts[1:], len(plain)}:
        files().check([""], None, data[:cut])
    files().check(None, None, plain)
    files().check(None, None, plain[:starts[480]])
    files().check(["all 256"], None, plain[:starts[200]])
    for whole, extra in itertools.product((data, plain), (b"\0", b"q3ty" + bytes(8), b"x" * 1000)):
        files().check([""], None, whole + extra)


def test_tokenizer_of_another_model(files):
    plain, parts = split_tokenizer(files().tokenizer_bytes)
    more = plain + struct.pack("<fI", -1e6, 1) + b"x"
    larger = patched(plain, "I", 4, VOCAB + 1)
    for data in (more, join_tokenizer(more, parts.items()), patched(larger, "I", 8, VOCAB),
                 join_tokenizer(larger, parts.items()), join_tokenizer(plain[:token_records(plain, VOCAB)[-2]], parts.items())):
        files().check(["another model"], None, data)


# -- the tokenizer's extension

@pytest.mark.parametrize("offset, value, word", [
    (0, b"q3ty", "another model"), *[(4, version, "version") for version in (0, 2, 2**32 - 1)],
    *[(8, length, "length") for length in (-1, 0, 2**31, 2**32 - 1)], (8, 1, "copy or export it again")])
def test_extension_header(files, offset, value, word):
    at = files().tokenizer_bytes.index(b"q3tx")
    if value in (-1, 1):                                # one less, one more than it is
        value += struct.unpack_from("<I", files().tokenizer_bytes, at + 8)[0]
    data = patched(files().tokenizer_bytes, "4s" if offset == 0 else "I", at + offset, value)
    files().check([word], None, data)


def samp(*numbers):
    return struct.pack("<ffI", *numbers)


def word(first, second, third):
    """Three code points"""
    return struct.pack("<Q", first << 42 | second << 21 | third)


def chat(*pieces):
    return b"".join(u32(len(piece)) + piece for piece in pieces)


TWELVE = [b"", b"", b"s", b"/s", b"u", b"/u", b"a", b"/a", b"a", b"a<think>", b"</think>", b"\n"]
USUAL = {b"head": u32(1), b"tail": u32(1), b"chat": chat(*TWELVE), b"repe": struct.pack("<f", 1.1),
         b"mode": u32(1)}                               # of the sections that the model has not
BAD_SECTIONS = [                                        # tag, payload, a word of the error
    (b"adde", u32(VOCAB, 1), "adde"), (b"adde", u32(2**31, 1), "adde"), (b"adde", u32(2**32 - 1, 0), "adde"),
    (b"adde", u32(480, 8), "adde"), (b"adde", u32(480, 2**32 - 1), "adde"),
    (b"adde", u32(0, 1), "byte 0x21"),
    (b"adde", u32(480, 1, 480, 1), "adde, expected 481 to"), (b"adde", u32(481, 1, 480, 1), "adde, expected 482 to"),
    (b"clas", u32(98, 97, 1), "clas"), (b"clas", u32(97, 98, 0), "clas"), (b"clas", u32(97, 98, 4), "clas"),
    (b"clas", u32(97, 99, 1, 99, 100, 1), "clas, expected 100 to"), (b"clas", u32(97, 99, 1, 65, 70, 1), "clas, expected 100 to"),
    (b"clas", u32(97, 0x110000, 1), "clas"), (b"clas", u32(0, 2**32 - 1, 1), "clas"),
    (b"ccc ", u32(0x300, 0x301, 0), "ccc"), (b"ccc ", u32(0x300, 0x301, 256), "ccc"),
    (b"ccc ", u32(0x300, 0x301, 2**32 - 1), "ccc"), (b"ccc ", u32(0x300, 0x110000, 1), "ccc"),
    (b"nfcq", u32(0x300, 0x301, 0), "nfcq"), (b"nfcq", u32(0x300, 0x301, 2), "nfcq"),
    (b"nfcq", u32(0x300, 0x110000, 1), "nfcq"), (b"nfcq", u32(0x301, 0x301, 1, 0x300, 0x300, 1), "nfcq"),
    *[(tag, word(101, 0x301, 233) + word(*row), f"{tag.decode()}, expected ascending rows of characters, found another row 1")
      for tag in (b"nfcd", b"nfcc") for row in (
          (101, 0x301, 234), (101, 0x300, 232), (100, 0x302, 233), (101, 0x302, 0x110000), (101, 0x110000, 233),
          (0x110000, 0x301, 233), (0x200000, 0x301, 233))],
    (b"head", u32(VOCAB), "head"), (b"head", u32(2**32 - 1), "head"), (b"tail", u32(0, VOCAB), "tail"),
    (b"stop", u32(476, VOCAB), "stop"), (b"stop", u32(2**31), "stop"),
    *[(b"samp", samp(t, 0.9, 20), "bad temperature") for t in (NAN, -1, INF, 1e7)],
    *[(b"samp", samp(0.6, p, 20), "bad top_p") for p in (NAN, 0, -1, 1.001, INF)],
    *[(b"samp", samp(0.6, 0.9, k), "bad top_k") for k in (2**31, 2**32 - 1)],
    *[(b"repe", struct.pack("<f", penalty), "repe") for penalty in (NAN, 0.0, -1.0, INF)],
    (b"mode", u32(5), "mode"), (b"mode", u32(2**32 - 1), "mode"),
    (b"chat", chat(*TWELVE[:-1]), "chat"), (b"chat", chat(*TWELVE, b""), "chat"),
    (b"chat", chat(*TWELVE[:-1]) + u32(1), "chat"), (b"chat", u32(2**32 - 1) + chat(*TWELVE[1:]), "chat"),
    (b"chat", u32(2**31) + chat(*TWELVE[1:]), "chat"),
    (b"chat", chat(*TWELVE[:10], b"x" * 65, b""), "strip of at most 64 bytes, found 65"),
    *[(tag, u32(1) * 1001, f"{tag.decode()}, expected at most 1000 ids, found 1001")
      for tag in (b"head", b"tail", b"stop")],
    (b"xxxx", b"", "xxxx"), (b"ADDE", b"", "ADDE"), (b"add\0", b"", "add"), (b"\0\0\0\0", b"", ""),
    (b"\n\x1b[2", b"", "?"), (b"%s%n", b"", "%s%n"), (b"\xff\xff\xff\xff", b"x" * 100, ""),
    (b"ecla", b"", "ecla"), (b"gues", b"x", "gues has 1 bytes too many"),                             # as in adde, clas
]
HARMLESS_SECTIONS = [
    (b"adde", b""), (b"adde", u32(300, 1, 301, 0)), (b"adde", u32(300, 7)),
    (b"clas", b""), (b"clas", u32(0, 0x10FFFF, 1)), (b"clas", u32(0, 0x10FFFF, 3)), (b"ccc ", b""),
    (b"ccc ", u32(0, 0x10FFFF, 254)), (b"deco", b""), (b"deco", u32(0, 0, 0, 0)),
    (b"deco", b"skipped, whatever it says"), (b"nfcq", b""), (b"nfcq", u32(0, 0x10FFFF, 1)), (b"nfcd", b""),
    (b"nfcd", word(0, 0, 0)), (b"nfcd", word(101, 0, 101) + word(101, 7, 101)), (b"nfcc", b""),
    (b"nfcc", word(101, 101, 101) + word(101, 0x301, 101)), (b"chat", chat(*TWELVE[:10], b"x" * 64, b"")),
    (b"head", u32(0) * 100), (b"tail", u32(VOCAB - 1)), (b"stop", u32(0) * 1000),
    (b"stop", b""), (b"stop", u32(*range(VOCAB))), (b"samp", samp(0, 1, 0)),
    (b"samp", samp(1e6, 1e-45, 2**31 - 1)), (b"chat", chat(*[b""] * 12)),
    (b"chat", chat(*[b"\xff\0%s<|im_end|>"] * 12)), (b"chat", chat(*TWELVE)),
    (b"from", b""), (b"from", b"%s\xff\0" * 1000), (b"gues", b""),
]
TAGS = [b"adde", b"clas", b"ccc ", b"nfcq", b"nfcd", b"nfcc", b"head", b"tail", b"stop", b"samp", b"chat",
        b"repe", b"mode"]
PROMPT = ("-i", "cafe\u0301 \uac00\u11a8 \u00e9 <|im_end|>", "-y", "<think>")


def with_sections(data, tag, *payloads):
    """The file with these sections of that tag, and no others of it."""
    plain, parts = split_tokenizer(data)
    parts.pop(tag, None)
    return join_tokenizer(plain, [*parts.items(), *((tag, payload) for payload in payloads)])


def test_newer_formats(files):
    """A version that is unknown, a field or a section: the program is too old, and no copy helps."""
    f, older, newer = files(), "by this version's export.py", "was it made by a newer export.py?"
    at = f.tokenizer_bytes.index(b"q3tx")
    for model, tokenizer, word in (
            (patched(f.model_bytes, "I", 4, 9), None, f"bad version, expected 1, found 9; export it again {older}"),
            (patched(f.model_bytes, "I", 0xA4, 9), None, f"field at 0xa4, expected 0, found 9; export it again {older}"),
            (None, patched(f.tokenizer_bytes, "I", at + 4, 9), older),
            (None, with_sections(f.tokenizer_bytes, b"xxxx", b""), f'section "xxxx"; {newer}')):
        assert b"copy" not in f.check([word], model, tokenizer).stderr


@pytest.mark.parametrize("tag, payload, word", BAD_SECTIONS, ids=lambda x: ascii(x[:60]))
def test_bad_section(files, tag, payload, word):
    files().check([word], None, with_sections(files().tokenizer_bytes, tag, payload))


@pytest.mark.parametrize("tag, payload", HARMLESS_SECTIONS, ids=lambda x: ascii(x[:60]))
def test_harmless_section(files, tag, payload):
    data = with_sections(files().tokenizer_bytes, tag, payload)
    for args in ((), ("-m", "chat", *PROMPT), ("-m", "tokenize", *PROMPT)):
        files().check(None, None, data, *args)


@pytest.mark.parametrize("tag", TAGS)
def test_size_of_a_section(files, tag):
    """One byte less or more, a length that lies, the section twice; and without it there is a default."""
    data, name = files().tokenizer_bytes, tag.decode().strip()
    payload = split_tokenizer(data)[1].get(tag) or USUAL[tag]
    for bad in (payload[:-1], payload + b"\0", payload[:1]):
        files().check([name], None, with_sections(data, tag, bad))
    files().check([name, "twice"], None, with_sections(data, tag, payload, payload))
    whole = with_sections(data, tag, payload)
    files().check(None, None, whole)
    for length in (len(payload) + 1, len(payload) - 1, 2**31 - 1, 2**31, 2**32 - 1):
        at = whole.rindex(tag + u32(len(payload)))
        files().check([""], None, patched(whole, "I", at + 4, length))
    for mode in ("generate", "chat"):
        files().check(None, None, with_sections(data, tag), "-m", mode)


def test_sections_in_any_order(files):
    expected = files().run().stdout
    plain, parts = split_tokenizer(files().tokenizer_bytes)
    assert expected and join_tokenizer(plain, parts.items()) == files().tokenizer_bytes
    assert files().run(None, join_tokenizer(plain, reversed(parts.items()))).stdout == expected


def test_prompt_without_a_token(files):
    """A format that adds nothing around an empty message."""
    data = with_sections(files().tokenizer_bytes, b"chat", chat(*[b""] * 12))
    assert_error(files().run(None, data, "-m", "chat", "-i", ""), 1, "prompt", "empty")


@pytest.mark.parametrize("pair, most", [((97, 97, 97), 1), ((97, 97, 98), 2000), ((98, 98, 98), 4000)])
def test_tables_that_go_round(files, pair, most):
    """A letter is a hundred of itself, of which four count, and two of them are one: that ends."""
    data = with_sections(files().tokenizer_bytes, b"nfcq", u32(97, 122, 1))
    data = with_sections(data, b"nfcd", b"".join(word(97, i, 97) for i in range(100)))
    result = files().run(None, with_sections(data, b"nfcc", word(*pair)), "-m", "tokenize", "-i", "a" * 1000)
    assert result.returncode == 0 and 0 < len(result.stdout.split()) <= most, result


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 1024, 5000])
def test_length_of_an_added_token(files, length):
    """There is a longest one: an older file's longer tokens are no added ones, nor is one of two ordinary bytes."""
    plain, parts = split_tokenizer(files().tokenizer_bytes)
    token = b"~" * length if length > 1 else b"\xff"
    plain = plain[:token_records(plain, VOCAB)[-2]] + struct.pack("<fI", -1e6, length) + token
    parts[b"adde"] = u32(VOCAB - 1, 1)
    text = "a" + "~" * length + "a"
    long = length > 1024 and [f"token {VOCAB - 1}", "at most 1024 bytes"]
    bad = length > 128 and ["bad adde", "1 to 128 bytes", f"found {length} in token {VOCAB - 1}"]
    old = files().check(long, None, plain, "-m", "tokenize", "-i", text)
    new = files().check(long or bad, None, join_tokenizer(plain, parts.items()), "-m", "tokenize", "-i", text)
    assert (str(VOCAB - 1) in old.stdout.decode().split()) == (1 < length <= 128), old
    assert long or bad or new.stdout == old.stdout, (old, new)


def colliding(count):
    """Tokens that collide in hash = (hash ^ word) * secret, hash ^= hash >> 32, whatever the odd secret is: the
    highest bit of a word stays the highest, and the next word cancels it. And as many at random."""
    r, pairs = np.random.default_rng(1), (count - 1).bit_length()
    tokens = np.tile(r.integers(0, 128, 16 * pairs, dtype=np.uint8), (count, 1))
    for i in range(pairs):
        chosen = ((np.arange(count) >> i & 1) << 7).astype(np.uint8)
        for at in (7, 11, 15):
            tokens[:, 16 * i + at] ^= chosen
    return [[row.tobytes() for row in rows] for rows in (tokens, r.integers(0, 256, tokens.shape, dtype=np.uint8))]


def test_tokens_made_to_collide(tmp_path):
    """50,000 of them load about as fast as random ones (in 0.1 s; in 8 s, once)."""
    times = []
    for tokens in colliding(50_000):
        data = u32(16, 0, 0) + b"".join(struct.pack("<fI", -i, len(token)) + token for i, token in enumerate(
            [bytes([b]) for b in range(256)] + tokens))
        path = write_zeros(tmp_path / "model.bin", data, **SMALL | dict(vocab_size=50_256))
        times.append([])
        for _ in range(3):
            start = time.monotonic()
            result = qwen3(path, "-q", "-m", "tokenize", "-i", "x")
            times[-1].append(time.monotonic() - start)
            assert result.returncode == 0, result
    assert min(times[0]) < 20 * min(times[1]), times

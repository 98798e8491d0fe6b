"""A table of malformed files: each is refused in one line that names what is wrong, or harmless and
expected to be. What is added to the format goes into FIELDS, BAD_SECTIONS and HARMLESS_SECTIONS."""
import math
import struct
from typing import NamedTuple

import pytest
from conftest import assert_error, qwen3
from test_files import INF, NAN, Files, join, sections, yarn  # noqa: F401 (a fixture)

VOCAB = 502                                             # of the fixture small
LAYERS, DIM, HIDDEN, Q_DIM, KV_DIM, HEAD = 2, 64, 128, 128, 64, 32


@pytest.fixture(scope="module")
def files(small, tmp_path_factory):
    """One copy for all cases; each writes what it changes."""
    return Files(small, tmp_path_factory.mktemp("malformed"))


def run(files, model=None, tokenizer=None, *args):
    files.path.write_bytes(files.model_bytes if model is None else model)
    files.tokenizer.write_bytes(files.tokenizer_bytes if tokenizer is None else tokenizer)
    return files.run(*args)


def patched(data, format, at, *values):
    data = bytearray(data)
    struct.pack_into("<" + format, data, at, *values)
    return bytes(data)


# -- the header

class Field(NamedTuple):
    name: str                                           # in the error
    offset: int
    kind: str                                           # struct's
    harmless: tuple = ()                                # of the values tried


INTS = [0, -1, 2**31 - 1, -2**31, 2**30]                # and one more, one less, twice as much
FLOATS = [-1.0, NAN, INF, -INF, 1e13, 1e-45, -0.0]
FIELDS = [
    Field("magic", 0x00, "i"), Field("version", 0x04, "i"), Field("dim", 0x08, "i"),
    Field("hidden_dim", 0x0C, "i"), Field("n_layers", 0x10, "i"), Field("n_heads", 0x14, "i"),
    Field("n_kv_heads", 0x18, "i"), Field("vocab_size", 0x1C, "i"),
    Field("max_seq_len", 0x20, "i", (2**30, 511, 513, 1024)), Field("head_dim", 0x24, "i"),
    Field("shared_classifier", 0x28, "i"), Field("group_size", 0x2C, "i"),
    Field("rope_theta", 0x30, "f", (-0.0,)), Field("rms_norm_eps", 0x34, "f", (-0.0,)),
    Field("rope_scaling", 0x38, "i", (0,)), Field("qkv_bias", 0x54, "i", (0,)), Field("no_qk_norm", 0x58, "i", (0,)),
    Field("header field", 0x5C, "i", (0,)),
    Field("header field", 0xFC, "i", (0,))]
YARN_FIELDS = [
    Field("rope_scaling", 0x38, "i"), Field("YaRN factor", 0x3C, "f"),
    Field("YaRN original length", 0x40, "i", (2**31 - 1, 2**30, 63, 65, 128)),
    Field("YaRN beta_fast", 0x44, "f", (-0.0,)), Field("YaRN beta_slow", 0x48, "f", (-0.0,)),
    Field("YaRN attention_factor", 0x4C, "f", (-0.0,)), Field("YaRN truncate flag", 0x50, "i", (0, 1))]


def values(data, field):
    if field.kind == "f":
        return FLOATS
    old, = struct.unpack_from("<i", data, field.offset)
    return sorted(v for v in {*INTS, old - 1, old + 1, 2 * old} - {old} if -2**31 <= v < 2**31)


def check_field(files, field):
    for value in values(files.model_bytes, field):
        result = run(files, patched(files.model_bytes, field.kind, field.offset, value), None, "-c", "64")
        if value in field.harmless and value == value:
            assert result.returncode == 0, (value, result.stderr)
            continue
        assert_error(result, 1, "model.bin", "expected")
        # a value that is possible in itself shows in what depends on it
        words = (field.name, "bytes", "multiple", "divisor", "YaRN factor", "header field")
        assert any(word in result.stderr.decode() for word in words), (value, result.stderr)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.name} {field.offset:#x}")
def test_header_field(files, field):
    check_field(files, field)


@pytest.mark.parametrize("field", YARN_FIELDS, ids=lambda field: field.name)
def test_yarn_field(yarn, tmp_path, field):  # noqa: F811
    check_field(Files(yarn, tmp_path), field)


# -- the weights

MATRICES = {"wq": (Q_DIM, DIM), "wk": (KV_DIM, DIM), "wv": (KV_DIM, DIM), "wo": (DIM, Q_DIM),
            "w1": (HIDDEN, DIM), "w2": (DIM, HIDDEN), "w3": (HIDDEN, DIM)}


def tensors():
    """(name in the error, first byte, bytes, first byte of its floats, number of floats)"""
    at = 256
    for name, count in [("rms_att", LAYERS * DIM), ("rms_ffn", LAYERS * DIM), ("rms_final", DIM),
                        ("q_norm", LAYERS * HEAD), ("k_norm", LAYERS * HEAD)]:
        yield name, at, 4 * count, at, count
        at += 4 * count
    shapes = [("the token embedding", (VOCAB, DIM))]
    shapes += [(name, shape) for name, shape in MATRICES.items() for _ in range(LAYERS)]
    for name, (rows, columns) in shapes:
        n = rows * columns
        yield name, at, n + n // 16, at + n, n // 64
        at += n + n // 16


def test_layout(files):
    *_, last = tensors()
    assert last[1] + last[2] == len(files.model_bytes)


def test_model_cut_at_every_tensor(files):
    """And one byte before and behind."""
    for name, begin, size, *_ in tensors():
        for cut in {begin - 1, begin, begin + 1, begin + size // 2, begin + size - 1}:
            result = run(files, files.model_bytes[:cut])
            assert_error(result, 1, "model.bin", "expected", "found", "file ends inside")
            assert name in result.stderr.decode() or cut < begin
    for extra in (b"\0", b"ajc1", bytes(4096)):
        assert_error(run(files, files.model_bytes + extra), 1, "wrong size",
                     len(files.model_bytes), len(files.model_bytes) + len(extra))


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38, -3e38, 1e-45, -0.0, 0.0], ids=str)
def test_weights_are_any_floats(files, value):
    """They are not looked through, which could take a minute: logits that are no numbers are an
    error, and all else is text."""
    for name, _, _, at, count in tensors():
        for n in (1, count):
            data = patched(files.model_bytes, f"{n}f", at, *[value] * n)
            for args in (("-t", "0"), ("-t", "1"), ("-m", "perplexity")):
                result = run(files, data, None, *args)
                if result.returncode != 0:
                    assert_error(result, 1, "model: the logits are no numbers")
                lost = name.startswith("rms") and not math.isfinite(value)
                assert not (result.returncode == 0 and lost), name


# -- the tokenizer

def records(data):
    """Where each token's record begins."""
    at, found = 12, []
    for _ in range(VOCAB):
        found.append(at)
        at += 8 + struct.unpack_from("<I", data, at + 4)[0]
    return found


@pytest.mark.parametrize("offset, value, word", [
    (0, 0, None), (0, 2**32 - 1, None),                 # the longest token: not relied on
    (4, VOCAB, "bos"), (4, 2**31, "bos"), (4, 2**32 - 1, "bos"), (4, VOCAB - 1, None),
    (8, VOCAB, "eos"), (8, 2**31, "eos"), (8, 2**32 - 1, "eos"), (8, VOCAB - 1, None)])
def test_tokenizer_header(files, offset, value, word):
    result = run(files, None, patched(files.tokenizer_bytes, "I", offset, value))
    if word:
        assert_error(result, 1, "model.bin.tokenizer", word, value, VOCAB)
    else:
        assert result.returncode == 0, result


@pytest.mark.parametrize("token", [0, 1, 255, 256, 400, 475, 476, VOCAB - 1])
def test_length_of_a_token_lies(files, token):
    data = files.tokenizer_bytes
    at = records(data)[token]
    old, = struct.unpack_from("<I", data, at + 4)
    left = len(data) - at - 8
    for value in {0, old - 1, old + 1, old + 8, left - 1, left, left + 1, 2**31 - 1, 2**31, 2**32 - 9,
                  2**32 - 1} - {old, -1}:
        result = run(files, None, patched(data, "I", at + 4, value))
        if value == left and token >= 256:              # an older file with fewer tokens, the last one long
            assert result.returncode == 0, result
        else:
            assert_error(result, 1, "model.bin.tokenizer")


@pytest.mark.parametrize("score", [NAN, INF, -INF, 0.0, -0.0, 3e38, -1e6, -1e-45], ids=str)
@pytest.mark.parametrize("token", [1, 300, VOCAB - 1])
def test_score_of_a_token(files, token, score):
    """Only their order counts."""
    result = run(files, None, patched(files.tokenizer_bytes, "f", records(files.tokenizer_bytes)[token],
                                      score))
    if score != score:
        assert_error(result, 1, "model.bin.tokenizer", f"score of token {token}")
    else:
        assert result.returncode == 0, result


def test_tokenizer_cut_around_every_border(files):
    data = files.tokenizer_bytes
    plain, parts = sections(data)
    borders = [0, 4, 8, 12, *records(data)[1::100], len(plain), len(plain) + 4, len(plain) + 8]
    at = len(plain) + 12
    for payload in parts.values():
        borders += [at, at + 4, at + 8]
        at += 8 + len(payload)
    assert at == len(data)
    fewer = {*records(data)[1:], len(plain)}            # an older file with fewer tokens: fine
    for cut in {border + i for border in borders for i in (-1, 0, 1) if border + i >= 0} - fewer:
        assert_error(run(files, None, data[:cut]), 1, "model.bin.tokenizer")


def test_older_tokenizer_files(files):
    """They end between two tokens, but must have all single bytes."""
    plain, _ = sections(files.tokenizer_bytes)
    assert run(files, None, plain).returncode == 0
    at = records(plain)
    assert run(files, None, plain[:at[480]]).returncode == 0
    assert_error(run(files, None, plain[:at[200]]), 1, "model.bin.tokenizer", "all 256")


def test_tokenizer_of_another_model(files):
    plain, parts = sections(files.tokenizer_bytes)
    at = records(plain)
    more = plain + struct.pack("<fI", -1e6, 1) + b"x"
    for data, word in ((more, "another model"), (join(more, parts.items()), "another model"),
                       (join(plain[:at[-1]], parts.items()), "")):
        assert_error(run(files, None, data), 1, "model.bin.tokenizer", word)


@pytest.mark.parametrize("change, word", [
    ((0, b"q3ty"), "another model"), ((4, 0), "version"), ((4, 2), "version"), ((4, 2**32 - 1), "version"),
    ((8, -1), "length"), ((8, 1), "length"), ((8, 0), "length"), ((8, 2**32 - 1), "length"),
    ((8, 2**31), "length")])
def test_extension_header(files, change, word):
    at = files.tokenizer_bytes.index(b"q3tx")
    offset, value = change
    if offset == 8 and abs(value) == 1:
        value += struct.unpack_from("<I", files.tokenizer_bytes, at + 8)[0]
    data = patched(files.tokenizer_bytes, "4s" if offset == 0 else "I", at + offset, value)
    assert_error(run(files, None, data), 1, "model.bin.tokenizer", word)


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def samp(*numbers):
    return struct.pack("<ffI", *numbers)


def chat(*pieces):
    return b"".join(u32(len(piece)) + piece for piece in pieces)


TWELVE = [b"", b"", b"s", b"/s", b"u", b"/u", b"a", b"/a", b"a", b"a<think>", b"</think>", b"\n"]

BAD_SECTIONS = [                                        # tag, payload, a word of the error
    (b"adde", u32(VOCAB, 1), "adde"), (b"adde", u32(2**31, 1), "adde"), (b"adde", u32(2**32 - 1, 0), "adde"),
    (b"adde", u32(480, 2), "adde"), (b"adde", u32(480, 2**32 - 1), "adde"),
    (b"adde", u32(0, 1), "byte 0x21"),
    (b"adde", u32(480, 1, 480, 1), "ascending"), (b"adde", u32(481, 1, 480, 1), "ascending"),
    (b"clas", u32(98, 97, 1), "clas"), (b"clas", u32(97, 98, 0), "clas"), (b"clas", u32(97, 98, 4), "clas"),
    (b"clas", u32(97, 99, 1, 99, 100, 1), "ascending"), (b"clas", u32(97, 99, 1, 65, 70, 1), "ascending"),
    (b"clas", u32(97, 0x110000, 1), "clas"), (b"clas", u32(0, 2**32 - 1, 1), "clas"),
    (b"ccc ", u32(0x300, 0x301, 0), "ccc"), (b"ccc ", u32(0x300, 0x301, 256), "ccc"),
    (b"ccc ", u32(0x300, 0x301, 2**32 - 1), "ccc"), (b"ccc ", u32(0x300, 0x110000, 1), "ccc"),
    (b"deco", u32(233, 101, 0x301, 2), "deco"), (b"deco", u32(0x110000, 101, 0x301, 1), "deco"),
    (b"deco", u32(233, 0x110000, 0x301, 1), "deco"), (b"deco", u32(233, 101, 2**32 - 1, 1), "deco"),
    (b"deco", u32(233, 101, 0x301, 1) * 2, "deco"), (b"deco", u32(0xAC00, 0xAC01, 0x11A7, 1), "deco"),
    (b"deco", u32(234, 101, 0x302, 1, 233, 101, 0x301, 1), "deco"),
    (b"head", u32(VOCAB), "head"), (b"head", u32(2**32 - 1), "head"), (b"tail", u32(0, VOCAB), "tail"),
    (b"stop", u32(476, VOCAB), "stop"), (b"stop", u32(2**31), "stop"),
    *[(b"samp", samp(*numbers), "sampling") for numbers in (
        (NAN, 0.9, 20), (-1, 0.9, 20), (INF, 0.9, 20), (1e7, 0.9, 20), (0.6, NAN, 20), (0.6, 0, 20),
        (0.6, -1, 20), (0.6, 1.001, 20), (0.6, INF, 20), (0.6, 0.9, 2**31), (0.6, 0.9, 2**32 - 1))],
    (b"chat", chat(*TWELVE[:-1]), "chat"), (b"chat", chat(*TWELVE, b""), "chat"),
    (b"chat", chat(*TWELVE[:-1]) + u32(1), "chat"), (b"chat", u32(2**32 - 1) + chat(*TWELVE[1:]), "chat"),
    (b"chat", u32(2**31) + chat(*TWELVE[1:]), "chat"),
    (b"xxxx", b"", "xxxx"), (b"ADDE", b"", "ADDE"), (b"add\0", b"", "add"), (b"\0\0\0\0", b"", ""),
    (b"\n\x1b[2", b"", "?"), (b"%s%n", b"", "%s%n"), (b"\xff\xff\xff\xff", b"x" * 100, ""),
    (b"ecla", b"", "ecla"),                             # as in adde, clas
]

HARMLESS_SECTIONS = [
    (b"adde", b""), (b"adde", u32(300, 1, 301, 0)),
    (b"clas", b""), (b"clas", u32(0, 0x10FFFF, 1)), (b"clas", u32(0, 0x10FFFF, 3)), (b"ccc ", b""),
    (b"ccc ", u32(0, 0x10FFFF, 254)), (b"deco", b""), (b"deco", u32(0, 0, 0, 0)),
    (b"head", u32(0) * 100), (b"tail", u32(VOCAB - 1)),
    (b"stop", b""), (b"stop", u32(*range(VOCAB))), (b"samp", samp(0, 1, 0)),
    (b"samp", samp(1e6, 1e-45, 2**31 - 1)), (b"chat", chat(*[b""] * 12)),
    (b"chat", chat(*[b"\xff\0%s<|im_end|>"] * 12)), (b"chat", chat(*TWELVE)),
]


def with_section(data, tag, payload):
    plain, parts = sections(data)
    return join(plain, [*((t, p) for t, p in parts.items() if t != tag), (tag, payload)])


PROMPT = ("-i", "cafe\u0301 \uac00\u11a8 \u00e9 <|im_end|>", "-y", "<think>")


@pytest.mark.parametrize("tag, payload, word", BAD_SECTIONS, ids=lambda x: ascii(x[:60]))
def test_bad_section(files, tag, payload, word):
    result = run(files, None, with_section(files.tokenizer_bytes, tag, payload))
    assert_error(result, 1, "model.bin.tokenizer", word)


@pytest.mark.parametrize("tag, payload", HARMLESS_SECTIONS, ids=lambda x: ascii(x[:60]))
def test_harmless_section(files, tag, payload):
    data = with_section(files.tokenizer_bytes, tag, payload)
    for args in ((), ("-m", "chat", *PROMPT), ("-m", "tokenize", *PROMPT)):
        result = run(files, None, data, *args)
        assert result.returncode == 0, result


def test_prompt_without_a_token(files):
    """A format that adds nothing around an empty message."""
    data = with_section(files.tokenizer_bytes, b"chat", chat(*[b""] * 12))
    assert_error(run(files, None, data, "-m", "chat", "-i", ""), 1, "prompt", "empty")


@pytest.mark.parametrize("tag", [b"adde", b"clas", b"ccc ", b"deco", b"head", b"tail", b"stop", b"samp",
                                 b"chat"])
def test_size_of_a_section(files, tag):
    """One byte less or more, a length that lies, the section twice."""
    plain, parts = sections(files.tokenizer_bytes)
    payload = parts.get(tag) or {b"head": u32(1), b"tail": u32(1), b"chat": chat(*TWELVE)}[tag]
    name = tag.decode().strip()
    for bad in (payload[:-1], payload + b"\0", payload[:1]):
        assert_error(run(files, None, with_section(files.tokenizer_bytes, tag, bad)), 1, name)
    whole = with_section(files.tokenizer_bytes, tag, payload)
    assert run(files, None, whole).returncode == 0
    for length in (len(payload) + 1, len(payload) - 1, 2**31 - 1, 2**31, 2**32 - 1):
        at = whole.rindex(tag + u32(len(payload)))
        assert_error(run(files, None, patched(whole, "I", at + 4, length)), 1, "model.bin.tokenizer")
    twice = join(plain, [*((t, p) for t, p in parts.items() if t != tag), (tag, payload), (tag, payload)])
    assert_error(run(files, None, twice), 1, name, "twice")


@pytest.mark.parametrize("pairs", [
    [(101, 101, 0x301)], [(101, 102, 0x301), (102, 101, 0x301)], [(101, 0x1D15E, 101)],
    [(101 + i, 102 + i, 102 + i) for i in range(40)]], ids=["itself", "each other", "second", "doubling"])
def test_decompositions_without_end(files, pairs):
    """Found when a text needs one; the rest of the texts is as before."""
    payload = b"".join(u32(*pair, 1) for pair in pairs)
    data = with_section(files.tokenizer_bytes, b"deco", payload)
    assert_error(run(files, None, data, "-i", "e\u0301"), 1, "deco")
    assert run(files, None, data, "-i", "0123").returncode == 0


# -- older template files

@pytest.mark.parametrize("texts, word", [
    ({"": b"no place"}, "%s"), ({"": b"%"}, "%s"), ({"": b""}, "0 bytes"), ({"": b"%s" * 40}, None),
    ({"": b"\xff\0%s\0%n%d"}, None), ({"": b"u %s a", ".with-system": b"one %s"}, "%s"),
    ({"": b"u %s a", ".with-system": b"no place"}, "%s"), ({"": b"u %s a", ".with-thinking": b"x"}, "%s"),
    ({"": b"u %s a", ".with-system": b"%s%s"}, None), ({".with-system": b"u %s a %s"}, None)],
    ids=lambda x: ascii(x))
def test_template_files(files, texts, word):
    plain, _ = sections(files.tokenizer_bytes)
    paths = [files.path.with_name(f"model.bin.template{suffix}") for suffix in texts]
    for path, text in zip(paths, texts.values()):
        path.write_bytes(text)
    result = run(files, None, plain, "-m", "chat", *PROMPT)
    for path in paths:
        path.unlink()
    if word:
        assert_error(result, 1, "model.bin.template", word)
    elif "" in texts and ".with-system" not in texts:
        assert_error(result, 1, "-y")                   # there is no form with a system prompt
    else:
        assert result.returncode == 0, result


def test_the_copies_are_sound(files):
    """What all of the above begins from."""
    assert run(files).returncode == 0 and qwen3(files.path, "-i", "x", "-n", "1").returncode == 0

"""Ids are those of the `tokenizers` package, on long texts of fragments; the message has the first that differs."""
import json
import os
import random
import struct
import subprocess
import tempfile
import time
import unicodedata

import pytest
import tokenizers
from checkpoints import with_ends
from conftest import (ADDED, QWEN3, SENTENCES, change_sections, copy_model, environment, export, make_checkpoint,
                      output, qwen3, records, token_records, tokenize, train_tokenizer)
from reference import read_tokenizer

CONTRACTIONS = ["'s", "'S", "'t", "'T", "'re", "'RE", "'rE", "'ve", "'Ve", "'m", "'M", "'ll", "'lL",
                "'d", "'D", "'\u017f", "'x", "'", "''s", "\u2019s", "'l", "'r", "'v"]
SPACES = ["\t", "\n", "\v", "\f", "\r", " ", "\x85", "\xa0", "\u1680", "\u2000", "\u2001", "\u2009",
          "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\r\n",
          "\x1c", "\x1f", "\u180e", "\u200b", "\u2060", "\ufeff"]          # these are not \s
MARKS = ["\u0300", "\u0301", "\u0308", "\u030a", "\u0323", "\u0327", "\u0328", "\u0338", "\u0345",
         "\u05b4", "\u064b", "\u0653", "\u093c", "\u0e38", "\u3099", "\u302a", "\U0001d165"]
NUMBERS = list("0123456789") + ["\u00bd", "\u00b2", "\u2167", "\u2460", "\u0663", "\u3007", "\U0001d7d8", "\u0967"]
EMOJI = ["\U0001f642", "\U0001f469\u200d\U0001f680", "\u2764\ufe0f", "\U0001f1eb\U0001f1f7",
         "\U0001f44d\U0001f3fd", "#\ufe0f\u20e3"]
ODD = ["\0", "\x01", "\x7f", "\x80", "\ue000", "\ufffd", "\uffff", "\U0010ffff", "\u0378", "\u0340",
       "\u0344", "\u212b", "\u2126", "\ufb1d", "\ufb2c", "\uf900", "\U0002f800", "\u0958", "\u2adc"]
JAMO = ["\u1100", "\u1112", "\u1161", "\u1175", "\u11a7", "\u11a8", "\u11c2", "\uac00", "\uac01", "\ud7a3", "\uae00"]
PLANES = [(0x80, 0x250), (0x370, 0x590), (0x590, 0x900), (0x900, 0x1200), (0x1200, 0x2000),
          (0x1e00, 0x2100), (0x2100, 0x2c00), (0x2c00, 0xd800), (0xf900, 0x10000),
          (0x10000, 0x20000), (0x20000, 0x110000)]


def letters(r):
    return "".join(r.choice("aeiouhntsr") for _ in range(r.randint(1, 7)))


def words(r):
    text = r.choice(["", " ", "  "]) + letters(r)
    return r.choice([str, str.upper, str.capitalize])(text)


def combining(r):
    base = r.choice("aeoncAEKzd\u00e5\u0439\u05e9\u0915\u304b<\n ")
    text = base + "".join(r.choice(MARKS) for _ in range(r.randint(0, 3)))
    return unicodedata.normalize(r.choice(["NFC", "NFD"]), text) if r.random() < 0.3 else text


def anything(r):
    first, last = r.choice(PLANES)
    code = r.randrange(first, last)
    return chr(code) if not 0xd800 <= code < 0xe000 else "\ud7ff"


FRAGMENTS = {
    "words": words,
    "contractions": lambda r: letters(r) + r.choice(CONTRACTIONS) + r.choice(["", letters(r), "t", "s", "\u017ft"]),
    "spaces": lambda r: "".join(r.choice(SPACES) for _ in range(r.randint(1, 4))),
    "newlines": lambda r: r.choice(["\n", "\r\n", "\n\n", " \n", "\n ", "\t\n\t", "...\n\n", "\r"]),
    "numbers": lambda r: "".join(r.choice(NUMBERS) for _ in range(r.randint(1, 5))),
    "punctuation": lambda r: "".join(r.choice("!?.,;:-_()[]{}<>|/'\"#$%&*+=@^`~ \\") for _ in range(r.randint(1, 5))),
    "marks": combining,
    "hangul": lambda r: "".join(r.choice(JAMO) for _ in range(r.randint(1, 4))),
    "emoji": lambda r: r.choice(EMOJI),
    "odd": lambda r: r.choice(ODD),
    "unicode": lambda r: "".join(anything(r) for _ in range(r.randint(1, 3))),
    "added": lambda r: r.choice([text for text, _ in ADDED] + [
        "<|im_end", "<|im_start|", "|>", "<think", "<|<|im_end|>|>", "< think>", "<THINK>"]),
}
KINDS = {kind: [kind] for kind in FRAGMENTS} | {
    kind + "+": [kind, "words", "spaces", "punctuation"] for kind in FRAGMENTS} | {"mixed": list(FRAGMENTS)}


def make_text(r, kind, fragments):
    return "".join(FRAGMENTS[r.choice(KINDS[kind])](r) for _ in range(fragments))


def assert_same(found, tokenizer, text):
    expected = tokenizer.encode(text).ids
    if found != expected:
        at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
        where = tokenizer.encode(text).offsets[min(at, len(expected) - 1)][0] if expected else 0
        pytest.fail(f"ids differ from number {at} on, near {ascii(text[max(where - 20, 0):][:60])}"
                    f": found {found[at:at + 8]}, expected {expected[at:at + 8]}")


@pytest.mark.parametrize("fragments", [400, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_long_texts(small, tokenizer, kind, fragments):
    text = make_text(random.Random(kind), kind, fragments)
    assert_same(tokenize(small, text.encode()), tokenizer, text)


@pytest.fixture(scope="module")
def marked(tmp_path_factory, tokenizer35):
    """A model with Qwen3.5's way to cut words."""
    folder = tmp_path_factory.mktemp("marked")
    return export(make_checkpoint(folder / "hf", tokenizer35), folder / "model.bin")


@pytest.mark.parametrize("kind", KINDS)
def test_marks_are_letters(marked, tokenizer35, kind):
    text = make_text(random.Random("marks " + kind), kind, 1000)
    assert_same(tokenize(marked, text.encode()), tokenizer35, text)


EDGES = ["", " ", "\n", "\0", "\r", "a", "\u0301", "\U0001f642", "e\u0301", "<|im_end|>", "<|im_end|>\u0301",
         "a<|im_end|>\u0301", "\ufeffa"]


@pytest.mark.parametrize("kind", KINDS)
def test_short_texts(small, tokenizer, kind):
    """What stands at the very beginning and end of a text, through tests/test tokens."""
    r = random.Random("short " + kind)
    texts = EDGES + [make_text(r, kind, r.randint(1, 5)) for _ in range(1000)]
    words = [tokenizer.token_to_id(text) for text, special in ADDED if not special and not text.startswith("<|")]
    assert_all_same(small, tokenizer, texts, words)


def assert_all_same(model, tokenizer, texts, words=()):
    """Of texts in which all added tokens count, or none, or what counts in an answer, or these words, as a user's."""
    for kind, counts in (("marked", lambda token: True), ("plain", lambda token: False),
                         ("answer", lambda token: not token["special"]), ("user", lambda token: token["id"] in words)):
        data = json.loads(tokenizer.to_str())
        for token in data["added_tokens"]:
            token["content"] = token["content"] if counts(token) else chr(0xF0000 + token["id"])     # in no text
        theirs = tokenizers.Tokenizer.from_str(json.dumps(data))
        found = records("tokens", model, texts=[(kind, text.encode()) for text in texts])
        assert len(found) == len(texts)
        for ids, text in zip(found, texts):
            assert_same(ids, theirs, text)


ADDED_LATER = ["cafe", "<|user|>", "cafe>", "e\u0301e", "im_start", "\u1100", "he", "the", "v"]  # the last 3 are tokens


@pytest.mark.parametrize("normalizer", [True, False])
def test_added_tokens_of_a_fine_tune(tmp_path, tokenizer, normalizer):
    """Those of add_tokens() are looked for in the normalized text, after all others: a mark may undo or make one."""
    theirs = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    if not normalizer:
        theirs.normalizer = tokenizers.normalizers.Sequence([])
    theirs.add_tokens(ADDED_LATER)
    ours = export(make_checkpoint(tmp_path / "hf", theirs), tmp_path / "model.bin")
    r = random.Random(7)
    parts = ADDED_LATER + ["\xe9e", "\u1161", "\uac00", "<|", "cafe", "caf", "e", "|>", "<|im_start|>", "</think>", " ", "t", "h", "re",
                           "ven", " other", "ever"] + MARKS
    texts = ["".join(r.choice(parts) for _ in range(r.randint(1, 6))) for _ in range(2000)]
    words = [token["id"] for token in json.loads(theirs.to_str())["added_tokens"] if token["content"] in ADDED_LATER[2:]]
    def change(sections):
        pairs = struct.iter_unpack("<II", sections[b"adde"])
        sections[b"adde"] = b"".join(struct.pack("<II", i, flags & 3 | 4 * (i in words)) for i, flags in pairs)
    assert_all_same(change_sections(ours, change), theirs, texts, words)


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_every_character(small, tokenizer, step):
    """Code points but the surrogates, between two letters and after a space: all, or some."""
    for start in range(0, 0x110000, 0x8000):
        characters = [chr(c) for c in range(start, min(start + 0x8000, 0x110000))
                      if not 0xd800 <= c < 0xe000 and (c < 0x400 or c % step == 0)]
        if start >= 0x40000 and start not in (0xe0000, 0x108000):
            characters = characters[::64]           # planes without assigned characters
        text = "".join(f"a{c}b {c}" for c in characters)
        assert_same(tokenize(small, text.encode()), tokenizer, text)


def test_every_canonical_composition(small, tokenizer):
    """What NFD takes apart: as it is, decomposed, with a mark in between; every mark between two others."""
    text = "".join(f"a\u0345{chr(c)}\u0334 " for c in range(0x110000) if unicodedata.combining(chr(c)))
    for code in (c for c in range(0x110000) if not 0xac00 <= c < 0xe000):
        parts = unicodedata.normalize("NFD", chr(code))
        if parts != chr(code):
            text += f"{chr(code)} {parts} {parts[0]}\u0323{parts[1:]} {parts[0]}\u0301{parts[1:]}x "
    assert_same(tokenize(small, text.encode()), tokenizer, text)


def timed(model, text):
    """The text's ids, and the CPU seconds of this one process. (RUSAGE_CHILDREN counts all that ended.)"""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(text)
        stdin.seek(0)
        child = subprocess.Popen([QWEN3, model, "-m", "tokenize", "-q"], stdin=stdin, stdout=stdout, env=environment())
        _, child.returncode, usage = os.wait4(child.pid, 0)
        stdout.seek(0)
        assert child.returncode == 0
        return list(map(int, stdout.read().split())), usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, unit", [
    ("a", "a"), ("spaces", " "), ("newlines", "\n"), ("letters", "etaoin"), ("cjk", "\u706f"),
    ("marks", "a" + "\u0323\u0301" * 50), ("one starter", "\u0301"), ("crlf", "\r\n"),
    ("digits", "7"), ("dots", "."), ("added", "<think>"), ("nearly added", "<|im_start|"),
    ("quotes", "'s"), ("hangul", "\u1100\u1161\u11a8")])
def test_a_megabyte_without_a_split(small, tokenizer, name, unit, whole):
    """In linear time, NFC's sorting of marks, too. Without `whole` the beginning alone is compared, which is faster."""
    size = 1_000_000
    text = unit * (size // len(unit.encode()))
    found, seconds = timed(small, text.encode())
    assert seconds < 10, f"{seconds:.1f} s for 1 MB"    # about 0.1; squares of it would be hours
    part = unit * (20_000 // len(unit))
    assert found[:2500] == tokenizer.encode(part).ids[:2500]
    if whole and name not in ("one starter", "marks"):
        assert_same(found, tokenizer, text)


# -- bytes that are no text

def nfc(data):
    """NFC of what is valid UTF-8, the rest as it is."""
    text = unicodedata.normalize("NFC", data.decode("utf-8", "surrogateescape"))
    return text.encode("utf-8", "surrogateescape")


INVALID = [
    b"\xff", b"\x80", b"a\x80b", b"\xc3", b"\xc3(", b"\xe2\x82", b"\xe2\x82a", b"\xf0\x9f\x99",
    b"\xf0\x9f", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\xe0\x80\xaf", b"\xf8\x88",
    b"e\xff\xcc\x81", b"e\xcc\xcc\x81", b" \xff\n", b"\xff\xfe\0\0", b"\xc3\xa9\xc3", b"'\xff's",
    bytes(range(256)), bytes(range(255, -1, -1))]


def random_bytes(seed):
    r = random.Random(seed)
    alphabet = [range(256), range(0x80, 256), b"e\xcc\x81\xe1\xea\xb0\x80 \xf0\n"][seed % 3]
    return bytes(r.choice(alphabet) for _ in range(20_000))


@pytest.mark.parametrize("data", [*INVALID, *map(random_bytes, range(6))], ids=lambda data: data[:8].hex())
def test_invalid_utf8_loses_nothing(small, data):
    tokens = read_tokenizer(f"{small}.tokenizer", 502)[1]
    assert b"".join(tokens[i] for i in tokenize(small, data)) == nfc(data)


def test_text_around_invalid_bytes_is_still_text(small, tokenizer):
    """A bad byte ends nothing but itself."""
    text = "the old lighthouse keeper didn't like the wind\n\n"
    ids = tokenize(small, text.encode() + b"\xff" + text.encode())
    expected = tokenizer.encode(text).ids
    assert ids[:len(expected) - 1] == expected[:-1]
    assert ids[-len(expected):] == expected


# -- the file

def test_plain_file(small, tmp_path, tokenizer):
    """As the older exports wrote it: exact on ASCII. One notice; nothing is normalised, and so nothing is lost."""
    plain, r = copy_model(small, tmp_path, extension=False), random.Random(5)
    for kind in ("words", "contractions", "newlines", "punctuation", "added", "mixed"):
        text = make_text(r, kind, 2000).encode("ascii", "ignore").decode()
        assert_same(tokenize(plain, text.encode()), tokenizer, text)
    result = qwen3(plain, "-m", "tokenize", "-i", "hello")
    assert result.returncode == 0
    assert result.stderr.count(b"\n") == 1 and b"export" in result.stderr
    assert qwen3(plain, "-m", "tokenize", "-i", "hello", "-q").stderr == b""
    assert qwen3(small, "-m", "tokenize", "-i", "hello").stderr == b""
    tokens = read_tokenizer(f"{plain}.tokenizer", 502)[1]
    for text in ("naïve Größe 灯塔 등대 🙂", "क़ e\u0301 \u00a0\u3000x"):
        assert b"".join(tokens[i] for i in tokenize(plain, text.encode())) == text.encode()


def test_older_file_takes_texts_as_they_are(small, tmp_path, tokenizer):
    """Of the fourth edition, whose section of decompositions is skipped. It says once: right for texts in form NFC."""
    def change(sections):
        for tag in [tag for tag in sections if tag.startswith(b"nfc")]:
            del sections[tag]
        sections[b"deco"] = bytes(16)
    older = change_sections(copy_model(small, tmp_path), change)
    data = json.loads(tokenizer.to_str())
    as_it_is = tokenizers.Tokenizer.from_str(json.dumps(data | {"normalizer": None}))
    notice = b"qwen3: tokenizer: an older file, exact for texts in NFC; export the model again\n"
    for text in ("naïve Größe, łódź 灯塔 등대 ひがん \u1100 🙂 <|im_start|>\xff", "", SENTENCES.translate({0x94D: None, 0xE48: None})):
        result = qwen3(older, "-m", "tokenize", "-f", "-", stdin=text.encode())
        assert result.stderr == notice and result.stdout == output(small, "-m", "tokenize", "-f", "-", stdin=text.encode())
    for text in ("cafe\u0301", "\u212b", "\u1100\u1161", "\uac00\u11a8", "\u0344", "\uf900"):
        result = qwen3(older, "-m", "tokenize", "-i", f"a {text} b {text}")
        assert [int(i) for i in result.stdout.split()] == as_it_is.encode(f"a {text} b {text}").ids
        assert result.stderr == notice
    result = qwen3(older, "-m", "tokenize", "-l", "-", stdin=f"a\n{text}\nb\n{text}\n".encode())
    assert result.stderr.count(notice) == 1
    assert qwen3(older, "-q", "-m", "tokenize", "-i", text).stderr == b""


def test_other_scores_of_the_same_order(small, tmp_path, tokenizer):
    """Merge scores only order the merges."""
    path = copy_model(small, tmp_path)
    file = path.with_name("model.bin.tokenizer")
    data = bytearray(file.read_bytes())
    for i, at in enumerate(token_records(data, 502)[:-1]):
        if struct.unpack_from("<f", data, at)[0] > -1e6:
            struct.pack_into("<f", data, at, 1000.0 - i * 0.5)
    file.write_bytes(data)
    text = make_text(random.Random(6), "mixed", 2000)
    assert_same(tokenize(path, text.encode()), tokenizer, text)


@pytest.mark.slow
def test_large_vocabulary(tmp_path):
    """Long tokens, of merges of merges. What they take to export grows with their number only."""
    r = random.Random(8)
    syllables = ["".join(r.choices("aeioubdgklmnprst", k=r.randint(1, 4))) for _ in range(400)]
    words = ["".join(r.choices(syllables, k=r.randint(1, 5))) for _ in range(60_000)]
    tokenizer = train_tokenizer(40_000, " ".join(words))
    before = time.process_time()
    path = export(make_checkpoint(tmp_path / "hf", tokenizer), tmp_path / "model.bin")
    assert time.process_time() - before < 30            # about 2
    text = " ".join(r.choices(words, k=20_000)) + make_text(r, "mixed", 2000)
    assert_same(tokenize(path, text.encode()), tokenizer, text)


def test_many_added_tokens(small, tmp_path):
    """60,000 that all begin alike, and a text of their beginnings: not each of them at each place."""
    path = copy_model(small, tmp_path, extension=False)
    added = [b"<|%05d|>" % i for i in range(60_000)]
    tokens = [bytes([i]) for i in range(256)] + added
    path.with_name("model.bin.tokenizer").write_bytes(struct.pack("<3I", 9, 0, 0) + b"".join(
        struct.pack("<fI", -1e6, len(token)) + token for token in tokens))
    data = bytearray(path.read_bytes()[:256])
    struct.pack_into("<i", data, 0x1C, len(tokens))
    size = struct.unpack_from("<i", data, 8)[0] * 68 // 64
    assert len(tokens) % 16 == 0                        # whole panels; the model has 502 rows in 512
    path.write_bytes(data + path.read_bytes()[256:] + bytes(size * (len(tokens) - 512)))
    ids, seconds = timed(path, b"<|0" * 300_000 + b"<|00042|>")
    assert len(ids) == 900_001 and ids[:3] == [*b"<|0"] and ids[-1] == 256 + 42
    assert seconds < 10                                 # about 0.1; each token at each place: minutes


def test_lengths_of_added_tokens(small, tmp_path):
    """One as long as they may be, and a text of its beginnings: only lengths that there are are tried."""
    path = copy_model(small, tmp_path, extension=False)
    file, token = path.with_name("model.bin.tokenizer"), b"~" * 127 + b"!"
    data = file.read_bytes()
    file.write_bytes(data[:token_records(data, 501)[-1]] + struct.pack("<fI", -1e6, 128) + token)
    ids, seconds = timed(path, b"~ " * 20 + b"~" * 5_000_000 + b"!")
    assert ids[-1] == 501
    assert seconds < 10                                 # about 1; each length at each place: 40


@pytest.mark.parametrize("single", ["$A <|endoftext|>", "<|endoftext|> $A", "<|im_start|> <|endoftext|> $A <|endoftext|>"])
def test_post_processor(tmp_path, tokenizer, single):
    """What HF's post-processor adds belongs to raw prompts (Qwen3-Embedding's endoftext)."""
    tok = with_ends(tokenizer, single)
    path = export(make_checkpoint(tmp_path / "hf", tok), tmp_path / "model.bin")
    for text in ("", "hello", "a <|im_end|>"):
        assert tokenize(path, text.encode()) == tok.encode(text).ids

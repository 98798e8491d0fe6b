"""The tokenizer file's Unicode tables against the tokenizers package."""

import random
import struct

import pytest
from conftest import rows, sections_of
from tokenizers import Regex, normalizers, pre_tokenizers


def test_character_classes(exported):
    sections = exported[1][2]
    kind, last = {}, -1
    for first, end, number in rows(sections["clas"], 3):
        assert last < first <= end and number in (1, 2, 3)
        last = end
        kind |= dict.fromkeys(range(first, end + 1), number)
    rng = random.Random(1)
    chars = [*range(0x300), 0x3000, 0xFEFF, 0x180E, 0x85, 0x1C, 0xBD, 0x10FFFF, 0x2F800, 0x323AF,
             0xE0101, 0x1E950, 0x1D7CE, *(rng.randrange(0x20000) for _ in range(4000))]
    splits = {n: pre_tokenizers.Split(Regex(p), "removed", invert=True)
              for n, p in ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s"))}
    for c in chars:
        if not 0xD800 <= c < 0xE000:
            wanted = [n for n, split in splits.items() if split.pre_tokenize_str(chr(c))]
            assert [kind[c]] == wanted if c in kind else wanted == [], hex(c)


def code_points(section):
    """Words of three each"""
    return [(word >> 42, word >> 21 & 0x1FFFFF, word & 0x1FFFFF) for word, in struct.iter_unpack("<Q", section)]


class Normalizer:
    """NFC as a program does it that has nothing but the sections."""

    def __init__(self, sections):
        self.ccc, self.parts, self.pairs, self.changed, last = {}, {}, {}, set(), -1
        for first, end, number in rows(sections["ccc "], 3):
            assert last < first <= end and 1 <= number <= 254
            last = end
            self.ccc |= dict.fromkeys(range(first, end + 1), number)
        for first, end, number in rows(sections["nfcq"], 3):
            assert number == 1 and not self.changed & {*range(first, end + 1)}
            self.changed |= {*range(first, end + 1)}
        for c, i, part in code_points(sections["nfcd"]):
            self.parts.setdefault(c, []).append(part)
            assert i == len(self.parts[c]) - 1 < 4
        for first, second, both in code_points(sections["nfcc"]):
            self.pairs[first, second] = both
        assert [*self.parts] == sorted(self.parts) and [*self.pairs] == sorted(self.pairs)

    def decompose(self, c):
        if 0xAC00 <= c < 0xD7A4:                        # not there, as NFC does not need it
            s = c - 0xAC00
            return [0x1100 + s // 588, 0x1161 + s % 588 // 28, *([0x11A7 + s % 28] if s % 28 else [])]
        return self.parts.get(c, [c])

    def nfd(self, text):
        out, marks = [], []
        for c in [x for char in text for x in self.decompose(ord(char))] + [0]:
            if self.ccc.get(c):
                marks.append(c)
                continue
            out += sorted(marks, key=self.ccc.get) + [c]
            marks = []
        return out[:-1]

    def nfc(self, text):
        out, starter, last = [], None, 0
        for c in self.nfd(text):
            number = self.ccc.get(c, 0)
            if starter is not None and (last < number or last == 0 == len(out) - 1 - starter) and (
                    joined := self.pairs.get((out[starter], c))):
                out[starter] = joined
                continue
            out.append(c)
            last = number
            if number == 0:
                starter = len(out) - 1
        return out


def test_normalization_from_the_sections_is_the_package_s(exported):
    ours = Normalizer(exported[1][2])
    nfc, nfd = normalizers.NFC(), normalizers.NFD()
    rng = random.Random(2)
    marks, parts = list(ours.ccc), list(ours.parts)
    firsts = [a for a, _ in ours.pairs] + [0x1100, 0x1161, 0x11A8, 0x11A7, 0xAC00, 0xAC01, 0xD7A3]
    texts = [chr(c) for c in range(0x3100) if not ours.ccc.get(c)] + [chr(c) for c in parts]
    texts += [chr(a) + chr(b) for a, b in ours.pairs]
    for _ in range(6000):
        pool = rng.choice([marks, parts, firsts, [rng.randrange(0x1F000) for _ in range(9)]])
        texts.append("".join(chr(c) for c in [rng.choice(firsts), *rng.choices(pool, k=2),
                                              *rng.choices(marks, k=rng.randrange(4))]
                             if not 0xD800 <= c < 0xE000))
    for text in texts:
        if nfc.normalize_str(text) != text:             # what is changed and what changes it are marked
            assert any(ord(c) in ours.changed or ord(c) in ours.ccc for c in text), ascii(text)
        assert "".join(map(chr, ours.nfd(text))) == nfd.normalize_str(text), ascii(text)
        assert "".join(map(chr, ours.nfc(text))) == nfc.normalize_str(text), ascii(text)


@pytest.mark.parametrize("normalizer", [None, {"type": "Sequence", "normalizers": []}])
def test_no_normalizer_no_tables(checkpoint, tmp_path, normalizer):
    ck = checkpoint()
    ck.tokenizer["normalizer"] = normalizer
    sections = sections_of(ck, tmp_path)[2]
    assert "clas" in sections and not sections.keys() & {"ccc ", "nfcq", "nfcd", "nfcc", "deco"}

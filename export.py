#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "numpy>=1.24",
#   "tokenizers>=0.22",
#   "jinja2>=3.1.6",
#   "huggingface_hub>=0.25",
#   "tqdm>=4.60",
#   "gguf>=0.19",
# ]
# [tool.uv]
# exclude-newer = "2026-11-28T00:00:00Z"
# ///
"""Converts a Qwen3.5, Qwen3 or Qwen2 checkpoint to the two files that qwen3.c reads.

    python export.py SOURCE [OUT.bin] [options]      (`uv run export.py ...` needs no set-up)

SOURCE is a checkpoint directory, a GGUF file (of several parts the first), a directory with one
GGUF file, or a name or page on the Hugging Face hub: ORG/NAME is a checkpoint, such as
Qwen/Qwen3-0.6B, or where there are only GGUF files, as in Qwen/Qwen3-0.6B-GGUF, the one in Q8_0;
ORG/NAME:KIND, such as Qwen/Qwen3-8B-GGUF:Q4_K_M, is the one of that kind, ORG/NAME/FILE.gguf that
one; ORG/NAME@REVISION is a branch, a tag or a commit. The program writes

    OUT.bin            a header and the weights: norms in fp32, matrices quantized to 8 or 4 bits
    OUT.bin.tokenizer  the vocabulary, Unicode tables, the chat format and sampling defaults

Without OUT.bin the name is that of the checkpoint or the GGUF file + ".bin", with four bits
"-q4.bin", in the current directory. OUT.bin may also come first, as the older export.py had it.

    --bits 8|4         bits of a weight in the layers' matrices; the embedding and the classifier
                       have 8. Four make half the file, answer 1.2 to 1.7 times as fast, and cost
                       quality. The default is 8, but 4 for a GGUF file with most weights in Q4_0,
                       IQ4_NL or Q1_0: these are copied, matrices (v, say) that mostly have over 5
                       bits there have 8, the rest is quantized with the same levels
    --group-size N     weights per quantization scale: 32, 64, 128 or 256. The default is 64, but 32
                       where 64 does not divide the model's dimensions, with four bits, and for a
                       GGUF file mostly in Q8_0: its groups of 32 are copied, of Q1_0 up to 128
    --yarn FACTOR      extends the context by this factor (YaRN), as Qwen advises for texts longer
                       than the model was trained on; short texts get slightly worse
    --chat-template FILE  takes FILE's chat template (Jinja), not SOURCE's
    --check            compares both files with what an export would write; says the largest error
    --form SCHEMA.json  prints a JSON Schema (-: of stdin) as a regular expression, and no more:
                       qwen3 -g "$(python export.py --form SCHEMA.json)" answers with what is valid
                       by it. A keyword that it can't keep is refused. It needs no packages
    --version          prints the version

The two files appear when both are complete. What qwen3.c can't run is refused with the reason.
Exit status: 0 done, 1 refused, failed or different (in one line), 2 wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys

VERSION = "8.0"  # qwen3.c's, too
if os.name == "nt":
    sys.exit("export.py: Windows: not supported, expected Linux, macOS or WSL, found Windows")


def handle_signals(act: Callable[[int], object]) -> None:
    """Calls act(exit status) at Ctrl-C, SIGTERM and SIGHUP, but not at one that nohup ignores."""
    for number, status in (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129):
        if __name__ == "__main__" and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_, status=status: act(status))


if __name__ == "__main__":
    sys.stderr = sys.stderr or open(os.devnull, "w")  # closed: its number must not become OUT's
    handle_signals(os._exit)  # before the slow imports, which may swallow an exception
    if {"-h", "--help", "--version"} & set(sys.argv[1:]):  # here: they need none of the packages
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that leaves, such as head
        print(f"export.py {VERSION}" if "--version" in sys.argv[1:] else __doc__.rstrip())
        sys.exit(0)

import argparse
import errno
import fcntl
import importlib.metadata
import inspect
import itertools
import json
import math
import re
import resource
import shlex
import shutil
import struct
import subprocess
import time
import traceback
import unicodedata
import warnings
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any, BinaryIO, Callable, Collection, Iterator, NamedTuple, NoReturn
from urllib.parse import unquote

# ---- Errors and limits: what cannot be converted is refused, in one line -------------------------

class Notices:
    """What the user will be told. Nothing else is both global and written."""
    hints: list[str] = []  # and warnings; they are printed after success and dropped after an error
    names: dict[str, str] = {}  # folder in the hub's cache -> the model's name, for messages
    subject: object = ""  # what an error that names no file is about: OUT.bin, or else SOURCE


# A source is untrusted, so reading it has bounds. JSON takes up to 36 times its bytes once parsed.
SETTINGS_SIZE = 1 << 20  # bytes of config.json and the like
TENSORS_SIZE = 16 << 20  # bytes of the index (of 93,000 tensors 10 MB), or of a shard's header
TOKENIZER_SIZE = 20 << 20  # bytes of tokenizer.json (Qwen3.5's: 13 or 20 MB) or a GGUF's metadata
MOST_TENSORS = 100_000  # in all files together; Qwen3-235B-A22B has 36,000
MOST_IDS = 1000  # ids that end an answer, or that a post-processor adds to a text; as in qwen3.c
LONGEST, LONGEST_ADDED = 1024, 128  # most bytes of a token, and of an added token; as in qwen3.c
# First bytes, in small letters -> what was downloaded in place of a file
SUBSTITUTES = {b"version https://git-lfs.github.com/spec/": "a Git LFS pointer",
               b"<!doctype html": "a web page", b"<html": "a web page"}


class Refused(Exception):
    """What is given has no conversion. The message is the line that the user reads."""


def refuse(where: object, what: str, expected: object, found: object = "nothing") -> NoReturn:
    raise Refused(f"{where}: {what}, expected {expected}, found {found}")


def require(where: object, what: str, value: object, *good: object) -> None:
    """Refuses a value that is not among the good ones. None stands for a key that is absent."""
    if value not in good:
        expected = " or ".join(str(x) for x in good if x is not None)
        refuse(where, f"{what} is not supported", expected, repr(value))


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """For code that reads a file and takes it apart: an error of the disk names the file, and any
    other unexpected exception means that it is malformed."""
    try:
        yield
    except (Refused, MemoryError):
        raise
    except OSError as error:
        if error.errno == errno.EIO:
            refuse(path, "can't be read (get it again?)", "a sound disk", error.strerror)
        error.filename = error.filename or path
        raise
    except Exception as error:  # KeyError, TypeError, ..., and the tokenizers package's own
        refuse(path, "broken (download it again?)", "the structure of such a file",
               f"{type(error).__name__}: {error}")


def open_file(path: Path) -> BinaryIO:
    """Opens a file. Refuses one of the SUBSTITUTES, and a pipe, which may never end."""
    if not path.exists():
        refuse(path, "missing", "a file of this name")
    if not path.is_file():
        refuse(path, "can't be read", "a regular file", "a directory, a pipe or a device")
    file = open(path, "rb")
    begin = file.peek(100).lstrip().lower()
    for substitute, what in SUBSTITUTES.items():
        if begin.startswith(substitute):
            refuse(path, "not downloaded", "its contents (`git lfs pull` or a download link)", what)
    return file


def read_file(path: Path, most: int = SETTINGS_SIZE) -> bytes:
    with parsing(path), open_file(path) as file:
        if len(data := file.read(most + 1)) > most:
            refuse(path, "too large", f"at most {most} bytes", "more")
    return data


def say(line: str) -> None:
    """Prints a line. What drives a terminal is escaped: it may come from an untrusted file."""
    for folder, name in Notices.names.items():
        if folder in line and "download it again" in line:
            line += f"; first delete {Path(folder).parents[1]}"
        line = line.replace(folder, name)
    line = escape(line)
    line = f"{line[:400]} ... {line[-500:]}" if len(line) > 1000 else line
    print("export.py:", line, file=sys.stderr)


def escape(text: str) -> str:
    return re.sub("[^ -~]", lambda c: c[0] if c[0].isprintable() else repr(c[0])[1:-1], text)


def list_names(names: list[str], most: int = 6) -> str:
    """Joins the first names, as an error message must not grow with a long list."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


# ---- --form: a JSON Schema as a regular expression, for qwen3's -g -------------------------------
# It comes before the packages, because it needs none. What the expression matches is valid, and
# written as models do it: members in the schema's order, a blank or a new line where those have it.

NOTES = "title description default examples deprecated $schema $id $comment $defs definitions"
BOUNDS = "minimum maximum exclusiveMinimum exclusiveMaximum"
LIMITS = {"string": "pattern format minLength maxLength", "number": BOUNDS, "integer": BOUNDS,
          "object": "properties required additionalProperties", "array": "items minItems maxItems",
          "boolean": "", "null": ""}  # type -> the keywords that limit it
TYPES = dict(zip([str, float, int, dict, list, bool, type(None)], LIMITS))  # Python's -> a schema's
CHOICES = {"$ref": "", "const": "type enum", "enum": "type", "anyOf": "discriminator",
           "oneOf": "discriminator", "allOf": ""}  # in place of limits -> what may stand beside it
INSTEAD = {"nullable": '"type": [..., "null"]', "required": "a list of names beside properties",
           "openapi": "one of its schemas: jq .components.schemas.NAME"}
MOST_CASES, LONGEST_FORM = 1000, 100_000  # bytes: an argument of a command may have 128 KB
MOST, WHOLE = 10 ** 18 - 1, "(?:0|[1-9][0-9]{0,17})"  # of a number without a bound
SIMPLE = {"null": "null", "boolean": "(?:true|false)"}
BLANK, HEX = r"(?: |\n {0,24})?", "[0-9A-Fa-f]"
CHARACTER = (rf'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?:[0-9A-CE-Fa-ce-f]{HEX}{{3}}|[Dd](?:[0-7]'
             rf"{HEX}{{2}}|[89ABab]{HEX}{{2}}\\u[Dd][C-Fc-f]{HEX}{{2}}))))")  # surrogates by pairs
DATE = ("(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|"
        "[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|"
        "(?:[2468][048]|[13579][26])00)-02-29)")
TIME = r"{0}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{0})".format("(?:[01][0-9]|2[0-3]):[0-5][0-9]")
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": DATE, "time": TIME, "date-time": f"{DATE}T{TIME}", "ipv4": rf"{BYTE}(?:\.{BYTE}){{3}}",
    "uuid": f"{HEX}{{8}}-(?:{HEX}{{4}}-){{3}}{HEX}{{12}}",
    "email": r"[A-Za-z0-9_+\-]{1,30}(?:\.[A-Za-z0-9_+\-]{1,15}){0,2}@(?:[A-Za-z0-9]{1,30}"
             r"(?:-[A-Za-z0-9]{1,15}){0,2}\.){1,3}[A-Za-z]{2,20}"}
# A part of a pattern
ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSfnrtv]|[^A-Za-z0-9])"
TOKEN = re.compile(rf"""(?P<open>\((?:\?:|(?!\?)))|(?P<close>\))|(?P<bar>\|)|
    (?P<count>[?*+]|\{{[0-9]+(?:,[0-9]*)?\}})\??(?![?*+{{])|
    (?P<set>{ESCAPE}|\.|\[\^?(?:{ESCAPE}|[^\\\]])+\]|[^\\\[({{^$?*+])""", re.VERBOSE)


class Part(NamedTuple):
    """A part of a JSON Schema. A write_...() makes the expression of the values of a type."""
    where: str  # such as $.properties.x
    value: Any
    root: Any  # the whole schema

    def __hash__(self) -> int:
        return id(self.value)  # for @cache, which keeps the part

    def member(self, *keys: str | int) -> Part:
        where, value = self.where, self.value
        for key in keys:
            plain = re.fullmatch(r"\$?[^\W\d][\w-]*", str(key))
            where, value = where + (f".{key}" if plain else f"[{json.dumps(key)}]"), value[key]
        return Part(where, value, self.root)

    def need(self, holds: object, what: str, expected: object) -> None:
        if not holds:
            refuse(self.where, what, expected, json.dumps(self.value)[:80])

    def write(self) -> str:
        try:
            form = join([SIMPLE.get(kind) or getattr(part, f"write_{kind}")()
                         for kind, part in self.find_cases()])
            size = len(form.encode())
            self.need(size <= LONGEST_FORM, "too large", f"an expression of {LONGEST_FORM} bytes")
            return form
        except Refused:
            raise
        except RecursionError:
            self.need(False, "contains itself", "a JSON Schema without recursion")
        except Exception as error:  # whatever stands in a wrong place
            self.need(False, type(error).__name__, f"a JSON Schema ({error})")

    @cache  # alternatives inside others would be looked at again for each of these
    def find_cases(self) -> list[tuple[str, Part]]:
        """The alternatives of a schema's values: each a type or "value", and its part."""
        self.need(type(self.value) is dict, "no schema", "an object")
        choice = next((key for key in (*CHOICES, "type") if key in self.value), None)
        if not choice:
            expected = f"type or {' or '.join(CHOICES)}"
            for key in self.value:
                kind = next((kind for kind in LIMITS if key in LIMITS[kind].split()), None)
                self.member(key).need(key in NOTES.split(), "not supported",
                                      f'"type": "{kind}" beside it' if kind else
                                      INSTEAD.get(key, f"{expected} (is it an example?)"))
            self.need(False, "any value (an example?)", expected)
        chosen, types = self.member(choice), self.value.get("type", [])
        types = types if type(types) is list else [types]
        chosen.need({*types} <= {*LIMITS} and (types or "type" not in self.value), "no type",
                    ", ".join(LIMITS))
        beside = CHOICES[choice] if choice in CHOICES else " ".join(map(LIMITS.get, types))
        for key in self.value:
            self.member(key).need(key in f"{choice} {beside} {NOTES}".split(), "not supported",
                                  INSTEAD.get(key, f"beside {choice} only {beside or 'notes'}"))
        if choice == "type":
            return [(kind, self) for kind in types]
        if choice == "$ref":
            return chosen.follow().find_cases()
        parts, most = [chosen], 1 if choice == "allOf" else MOST_CASES
        if choice != "const":
            chosen.need(type(chosen.value) is list and 1 <= len(chosen.value) <= most,
                        "wrong number", f"a list of 1 to {most}")
            parts = [chosen.member(i) for i in range(len(chosen.value))]
        if choice not in ("const", "enum"):
            return self.join_cases(parts, once=choice == "oneOf")
        if choice == "const" and "enum" in self.value:  # older pydantic's Literal
            alone = json.dumps([chosen.value]) == json.dumps(self.value["enum"])
            chosen.need(alone, "contradicts enum", "an enum of this value alone")
        for part in parts:
            kinds = {TYPES[type(part.value)], "number" if type(part.value) is int else ""}
            part.need(not types or kinds & {*types}, "contradicts type", " or ".join(types))
        return [("value", part) for part in parts]

    def follow(self) -> Part:
        """What a $ref names."""
        names = [unquote(x).replace("~1", "/").replace("~0", "~") for x in self.value.split("/")]
        self.need(names[:2] in (["#", "$defs"], ["#", "definitions"]), "wrong", "#/$defs/NAME")
        with suppress(KeyError, TypeError):
            return Part("$", self.root, self.root).member(*names[1:])
        self.need(False, "missing", "a schema of this name")

    def join_cases(self, parts: list[Part], once: bool) -> list[tuple[str, Part]]:
        """The alternatives of all parts. Once: no value may be of two parts."""
        tag = self.value.get("discriminator", {}).get("propertyName")  # it must not be left out
        groups = [[(kind, case._replace(value={**case.value, "required": [
            *case.value.get("required", []), tag]}) if tag and kind == "object" else case)
            for kind, case in part.find_cases()] for part in parts]
        for (i, group), (j, other) in itertools.combinations(enumerate(groups), 2):
            parts[j].need(not once or not any(may_overlap(*x, *y) for x in group for y in other),
                          "oneOf", f"nothing that may be of oneOf[{i}], too (or anyOf)")
        cases = sum(groups, [])
        self.need(len(cases) <= MOST_CASES, "too many alternatives", MOST_CASES)
        return cases

    def write_value(self) -> str:
        return quote(json.dumps(self.value, ensure_ascii=False, allow_nan=False))

    def write_string(self) -> str:
        given = [key for key in LIMITS["string"].split() if key in self.value]
        if given[:1] not in (["pattern"], ["format"]):
            return f'"{repeat(CHARACTER, *self.find_counts("minLength", "maxLength"))}"'
        limit = self.member(given[0])
        self.member(given[-1]).need(len(given) == 1, "not supported", f"{given[0]} alone")
        if given == ["pattern"]:
            return f'"{limit.find_pattern()}"'
        limit.need(limit.value in FORMATS, "not supported", ", ".join(FORMATS))
        return f'"{FORMATS[limit.value]}"'

    def find_pattern(self) -> str:
        """What stands between a string's quotes. A pattern may match in its middle."""
        first, body, last = re.fullmatch(r"(?s)(\^?)((?:\\.|[^\\])*?)(\$?)", self.value).groups()
        depth, at, form, anything = 0, 0, "", f"{CHARACTER}*"
        while token := TOKEN.match(body, at):
            kind, found, at = token.lastgroup, token[token.lastgroup], token.end()
            depth += (kind == "open") - (kind == "close")
            form += write_set(found) if kind == "set" else "(?:" if kind == "open" else found
            self.need(depth or kind != "bar" or not first + last, "| beside ^ or $", "^(?:A|B)$")
            self.need(kind != "set" or write_set(found), found, "a set with a character")
        try:
            re.compile(body[:at])
            self.need(at == len(body), f"pattern, at {body[at:at + 20]!r}", "what -g has")
        except re.error as error:
            self.need(False, "pattern", error)
        return anything * (not first) + f"(?:{form})" + anything * (not last)

    def find_counts(self, *keys: str) -> tuple[int, int]:
        least, most = [self.value.get(key, usual) for key, usual in zip(keys, (0, MOST))]
        for key in (key for key in keys if key in self.value):
            self.member(key).need(type(self.value[key]) is int and 0 <= least <= most,
                                  "no such count", f"0 <= {keys[0]} <= {keys[1]}")
        return least, most

    def write_array(self) -> str:
        self.need("items" in self.value, "any items", "an array with items")
        (least, most), item = self.find_counts("minItems", "maxItems"), self.member("items").write()
        more = repeat(f"(?:,{BLANK}{item})", max(least - 1, 0), most - 1)
        return rf"\[(?:{BLANK}{item}{more}{BLANK}){'' if least else '?'}\]" if most else r"\[\]"

    def write_object(self) -> str:
        """Members and commas: the first ones that may be absent have their comma after them."""
        def write_some(optional: list[str]) -> str:
            """One or more: in halves, as each one with all that may follow it would be longer."""
            half = len(optional) // 2
            return optional[0] if not half else join([write_some(optional[half:]), write_some(
                optional[:half]) + "".join(f"(?:,{BLANK}{x})?" for x in optional[half:])])

        names, required = self.value.get("properties", {}), self.value.get("required", [])
        if "additionalProperties" in self.value:
            more = self.member("additionalProperties")
            more.need(more.value is False, "not supported", "false: name all members")
        for key, value, kind in (("properties", names, dict), ("required", required, list)):
            self.need(type(value) is kind, f"wrong {key}", f"a {kind.__name__}")
        for i, name in enumerate(required):
            self.member("required", i).need(name in names, "missing", "one of properties")
        self.need(self.value.keys() & {"properties", "additionalProperties"}, "any members",
                  "an object with properties")
        members = [f"{quote(json.dumps(name, ensure_ascii=False))}: ?"
                   f"{self.member('properties', name).write()}" for name in names]
        needed = [name in required for name in names]
        if not any(needed):
            return rf"\{{(?:{BLANK}{write_some(members)}{BLANK})?\}}" if members else r"\{\}"
        first = needed.index(True)
        before = "".join(f"(?:{x},{BLANK})?" for x in members[:first])
        after = "".join(f",{BLANK}{x}" if need else f"(?:,{BLANK}{x})?"
                        for x, need in zip(members[first + 1:], needed[first + 1:]))
        return rf"\{{{BLANK}{before}{members[first]}{after}{BLANK}\}}"

    def write_number(self, fraction: str = r"\.[0-9]{1,6}") -> str:
        """With bounds there is no exponent, and a double holds all digits: it rounds none away."""
        def find_bound(sign: int, *keys: str) -> tuple[int, bool]:
            """The highest bound of sign * number from below, and if it is excluded."""
            found = [(-MOST - 1, True)]
            for key in self.value.keys() & {*keys}:
                bound = self.value[key]
                self.member(key).need(type(bound) in (int, float) and (
                    not fraction or bound % 1 == 0 and abs(bound) < 1e9), "not supported",
                    "a whole number below 1e9" if fraction else "a number")
                found.append((math.ceil(sign * bound), "exclusive" in key and bound % 1 == 0))
            return max(found)

        if not self.value.keys() & {*BOUNDS.split()}:
            point = r"(?:\.[0-9]{1,20})?(?:[eE][+\-]?[0-9]{1,2})?"
            return f"-?{WHOLE}{point * bool(fraction)}"
        low, high = (find_bound(1, "minimum", "exclusiveMinimum"),
                     find_bound(-1, "maximum", "exclusiveMaximum"))
        forms = []
        for sign, (least, over), (most, under) in (("", max(low, (0, False)), high),
                                                   ("-", max(high, (0, True)), low)):
            if not fraction:
                forms += [sign + x for x in write_range(least + over, -most - under)]
                continue
            forms += [f"{sign}{x}(?:{fraction})?" for x in write_range(least + over, -most - 1)]
            forms += [rf"{sign}{least}\.[0-9]{{0,5}}[1-9]"] * (over and least < -most)
            forms += [rf"{sign}{-most}(?:\.0)?"] * (not under and least + over <= -most)
        self.need(forms, "no value matches", "bounds with a number between them")
        return join(forms)

    write_integer = partialmethod(write_number, "")


def write_range(low: int, high: int) -> list[str]:
    """The numbers from low to high, both not negative, as alternatives."""
    def write_digits(low: str, high: str) -> str:
        """Those of one length: what may follow each first digit is written once."""
        if not low.strip("0") and not high.strip("9"):
            return repeat("[0-9]", len(low), len(low))
        tails: dict[str, str] = {}
        for digit in range(int(low[0]), int(high[0]) + 1):
            tail = write_digits(low[1:] if digit == int(low[0]) else "0" * (len(low) - 1),
                                high[1:] if digit == int(high[0]) else "9" * (len(low) - 1))
            tails[tail] = tails.get(tail, "") + str(digit)
        return join([(f"[{x[0]}-{x[-1]}]" if len(x) > 1 else x) + tail
                     for tail, x in tails.items()])

    forms, n = [], len(str(low))
    while low <= high:
        if low == 10 ** (n - 1) and high == MOST:
            return forms + [f"[1-9]{repeat('[0-9]', n - 1, 17)}"]
        forms.append(write_digits(str(low), str(min(high, 10 ** n - 1))))
        low, n = 10 ** n, n + 1
    return forms


@cache
def may_overlap(kind: str, a: Part, other_kind: str, b: Part) -> bool:
    """False if no value is of both cases: types, values or those of a required member differ."""
    kinds = {TYPES[type(x.value)] if y == "value" else y for x, y in ((a, kind), (b, other_kind))}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return False
    if not kind == other_kind == "object":
        return not kind == other_kind == "value" or a.value == b.value
    for name in a.value.get("required", []) + b.value.get("required", []):
        have = [x for x in (a, b) if name in x.value.get("properties", {})]
        if len(have) == 2:
            ways = [x.member("properties", name).find_cases() for x in have]
            if not any(may_overlap(*x, *y) for x in ways[0] for y in ways[1]):
                return False
        elif any(x.value.get("additionalProperties") is False for x in (a, b) if x not in have):
            return False
    return True


@cache
def write_set(found: str) -> str:
    r"""JSON's text of a character of a set, as ASCII and Unicode both understand \d, \W, ..."""
    sign = found[1] if re.fullmatch(r'\\[^\w"\\]', found) else found
    if len(sign) == 1 and sign.isprintable() and (sign != found or sign not in '."\\'):
        return quote(sign)
    letters = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    found = found if len(found) > 1 else re.escape(found).replace(r"\.", r"[^\n\r\u2028\u2029]")
    inside = f"(?=(?a:{found})){found}"
    plain = rf'(?!["\\\0-\x1f\ufeff]){inside}'
    runs, others = ("".join("-".join(map(quote, dict.fromkeys((run[0][0], run[0][-1]))))
                            for run in re.finditer(f"(?:{x})+", letters, re.DOTALL))
                    for x in (plain, f"(?!{plain})."))
    escapes = "".join(quote(json.dumps(c)[2]) for c in '"\\\b\f\n\r\t' if re.fullmatch(inside, c))
    sets = [min((f"[{runs}]", f"[^{others}]"), key=len)] if len(runs) > 1 else [runs] * len(runs)
    return join(sets + [rf"(?:\\[{escapes}])"] * bool(escapes))


def repeat(form: str, least: int, most: int) -> str:
    """It least to most times."""
    count = f"{{{least}}}" if least == most else f"{{{least},{most if most < MOST - 1 else ''}}}"
    return form + {"{1}": "", "{0,1}": "?", "{0,}": "*"}.get(count, count) if most else ""


def join(forms: list[str]) -> str:
    return f"(?:{'|'.join(forms)})" if len(forms) > 1 else "".join(forms)


def quote(text: str) -> str:
    """The expression of a text alone."""
    return "".join("\\" + c if c in r"\.[](){}|?*+^$-" else
                   c if c.isprintable() or c > "\ud7ff" else f"\\u{ord(c):04x}" for c in text)


def print_form(args: list[str]) -> None:
    """Prints the expression of the schema in a file, or of stdin's."""
    if len(args) == 1:
        args = args[0].split("=", 1)
    if len(args) != 2 or args[0] != "--form":
        say("--form: expected SCHEMA.json, or -, and nothing else")
        sys.exit(2)
    def take(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]:
            raise ValueError(f"an object, expected each name once, found {twice[0]!r} twice")
        return dict(pairs)

    warnings.simplefilter("ignore")  # of re, for what may become a set's sign, such as && in [a&&b]
    try:
        text = sys.stdin.buffer.read() if args[1] == "-" else Path(args[1]).read_bytes()
        schema = json.loads(text, object_pairs_hook=take)
        path, inside, name = "", schema, "schema"
        while name and type(inside) is dict and inside.get("type") != "object":
            names = ("json_schema", "schema", "function", "parameters")
            if name := next((x for x in names if x in inside), ""):
                path, inside = f"{path}.{name}", inside[name]
        if path:
            raise Refused(f"the schema stands in it: jq {path} FILE | export.py --form -")
        sys.stdout.buffer.write(Part("$", schema, schema).write().encode() + b"\n")
    except (OSError, ValueError, RecursionError, Refused) as error:
        if isinstance(error, json.JSONDecodeError):
            error = f"no JSON Schema, expected JSON ({error})" if text.strip() else \
                "empty, expected a JSON Schema (did a command before the pipe fail?)"
        if what := getattr(error, "strerror", None):
            error = f"{what}, expected a file with a JSON Schema, or - for stdin"
        sys.exit(escape(f"export.py: {args[1]}: {error}"))


if __name__ == "__main__" and any(x.split("=")[0] == "--form" for x in sys.argv[1:]):
    sys.exit(print_form(sys.argv[1:]))

# [(name, oldest version)] of the block at the top
PACKAGES = re.findall(r'"([a-z_0-9]+)>=([0-9.]+)"',
                      Path(__file__).read_text(encoding="utf-8").split("# ///")[1])
try:
    import gguf
    import jinja2.sandbox  # before 3.1.6 it lets a template out
    import markupsafe  # jinja2's only package
    import numpy as np
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tqdm import tqdm
    for package, oldest in PACKAGES:
        version = importlib.metadata.version(package)
        if [int(n) for n in re.findall(r"\d+", version)[:3]] < [int(n) for n in oldest.split(".")]:
            raise ImportError(f"{package} {version} is older than {oldest}")
except ImportError as error:
    sys.exit(f"export.py: {error}: run it as `uv run export.py ...`, which fetches what it needs, "
             "or, after `python3 -m venv .venv && .venv/bin/pip install "
             + " ".join(f"'{package}>={oldest}'" for package, oldest in PACKAGES)
             + "`, as `.venv/bin/python export.py ...`")

# ---- One export from start to end ----------------------------------------------------------------
# The formats of both files are described in qwen3.c: "The model file" and "The tokenizer file".

Room = tuple[Path, int]  # a folder, and the bytes that will come to it
SUFFIXES = {8: ".bin", 4: "-q4.bin"}  # bits -> what OUT.bin's default name ends in


def export(options: argparse.Namespace) -> None:
    """Writes OUT.bin and OUT.bin.tokenizer of a source; the options are parse_arguments()'s."""
    began, out = time.monotonic(), options.out
    if out:
        find_targets(out)  # refuses, before the work
    source = read_source(options.source, options.chat_template)
    header, computed = read_header(source, options.bits, options.group_size, options.yarn)
    form = f"{header.layer_bits or 8} bits in groups of {header.group_size}"
    origin = escape(f"{source.origin or source.name}, {form}, export.py {VERSION}").encode()
    tokenizer = join_tokenizer(*make_tokenizer(source, header.vocab_size), origin)
    Notices.subject = out = out or Path(source.name + SUFFIXES[header.layer_bits or 8])
    targets = find_targets(out)
    with write_atomically(targets) as (tokenizer_part, model_part):
        size = lay_out(header)[-1].end + len(tokenizer)
        check_space([*source.downloads(), (targets[1].parent, size)])
        write_at(tokenizer_part, tokenizer, 0)
        header, outputs, left_out = match_tensors(source, header, computed)
        write_model(model_part, header, outputs)
    form += f", without {' and '.join(left_out)}" if left_out else ""
    text = "The sky is blue." if source.embedding else "Why is the sky blue?"
    say(f"wrote {out} ({outputs[-1].end / 1e6:.1f} MB, {form}) and {out.name}.tokenizer in "
        f"{time.monotonic() - began:.1f} s, run ./qwen3 {shlex.quote(str(out))} -i \"{text}\"")


def find_source(name: str) -> Source:
    """Reads a directory, a GGUF file or a model on the hub, but for a checkpoint's weights."""
    path = Path(name)
    if path.is_dir():
        return read_folder(path)
    is_part = path.suffix == ".json" or path.name.startswith("pytorch_model")
    if path.suffix == ".safetensors" or is_part and path.is_file():
        refuse(name, "a part of SOURCE", f"`export.py {shlex.quote(str(path.parent))}`", "one file")
    if path.suffix == ".bin":
        refuse(name, "no SOURCE", f"`export.py [--check] SOURCE {shlex.quote(name)}`, SOURCE being "
               f"a directory ({SAVE_PRETRAINED}), a GGUF file or a hub name", "OUT.bin alone")
    if path.exists():
        return read_gguf(path)
    if page := re.match("https?://([^/]+)", name):
        endpoint = re.sub("https?://|/.*", "", os.environ.get("HF_ENDPOINT", ""))
        require(name, "its host", page[1], "huggingface.co", "hf.co", endpoint or None)
    named = HUB_NAME.fullmatch(unquote(name))
    if named and not (named["file"] and Path(path.parts[0]).is_dir()):
        return find_model(named["model"], named["revision"], named["kind"] or named["file"] or "")
    size = re.match(r"qwen3[:-]([\d.]+b(-a\d+b)?)", name, re.IGNORECASE)  # ollama's qwen3:0.6b
    refuse(name, "missing", "a directory, a GGUF file or a hub name, ORG/NAME such as "
           f"Qwen/Qwen3-{size[1].upper() if size else '0.6B'}")


def read_source(name: str, template: Path | None) -> Source:
    """The source. The chat template in a file that the user gives takes the place of its own."""
    if not template:
        return find_source(name)
    text = read_file(template).decode(errors="surrogateescape")
    try:
        render_all(text, {}, [])
    except ValueError as error:
        refuse(template, "no chat template", "Jinja", error)
    return find_source(name)._replace(chat_template=text)


def find_targets(out: Path) -> list[Path]:
    """OUT.bin.tokenizer and OUT.bin. A symbolic link stands for the file that it names. What can't
    be written is refused."""
    targets = [Path(os.path.realpath(path) if path.is_symlink() else path)
               for path in (Path(f"{out}.tokenizer"), out)]
    for target in targets:
        if not target.parent.exists():
            refuse(target.parent, "missing", "the directory to write to")
        if target.is_dir():
            refuse(target, "can't be written", "a file or nothing of this name", "a directory")
    return targets


def check_space(rooms: list[Room]) -> None:
    """Refuses if a disk has too little space for all that comes to it."""
    for folder, _ in rooms:
        need = sum(size for other, size in rooms if os.stat(other).st_dev == os.stat(folder).st_dev)
        if (free := shutil.disk_usage(folder).free) < need:
            refuse(folder, "too little disk space", f"{need} bytes", f"{free} free")


@contextmanager
def write_atomically(targets: list[Path]) -> Iterator[list[BinaryIO]]:
    """Yields temporary files: renamed to the targets if the block succeeds, else removed."""
    def open_part(path: Path) -> BinaryIO:
        """Opens it, empty. A process that writes it holds a lock; without a lock it is what a
        killed process has left, and is used again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        file = open(path, "r+b", buffering=0, opener=lambda *_: os.open(path, flags, 0o666))
        with suppress(OSError):  # a disk without locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refuse(path, "in use", "no other export.py that writes it", "one that does")
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            refuse(path, "in use", "no other export.py", "one that has just renamed it")
        parts.append(path)
        file.truncate()
        return file

    parts: list[Path] = []  # the temporary files that have no other name yet
    handle_signals(partial(leave, parts))
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(open_part(Path(f"{target}.part"))) for target in targets]
            yield files
            for file in files:
                os.fsync(file.fileno())
            handle_signals(lambda _: None)  # everything is written: too late
            for target in targets:
                os.replace(parts[0], target)
                del parts[0]
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
            parts.clear()


def leave(parts: Collection[Path], status: int) -> NoReturn:
    """Removes the parts and ends the process at once: threads that download could take minutes."""
    for part in parts:
        part.unlink(missing_ok=True)
    os.write(2, b"\n" * sys.stderr.isatty())  # after the progress bar
    os._exit(status)


# ---- Sources: what a folder, the hub and a GGUF file have, in one form ---------------------------

class Family(NamedTuple):
    """An architecture that qwen3.c runs. What another one needs is in .github/CONTRIBUTING.md."""
    architectures: str  # names in config.json, then model_types; "Model" mostly embeds
    gguf: str  # general.architecture in a GGUF file; "": it is that of another row
    fixed: dict[str, object]  # key of config.json -> the value that is supported, or a tuple of
                              # such; the key may be absent
    header: dict[str, int] = {}  # fields of Header -> the value that this architecture has
    head_dim: int | None = 128  # where config.json has none; None: hidden_size / heads
    numbers: tuple[str, ...] = ("intermediate_size",)  # NUMBERS' that not every architecture has

    @property
    def has_delta(self) -> bool:
        """True if most layers have a delta rule in place of attention (Qwen3.5)."""
        return "gated_attention" in self.header


QWEN2 = {"hidden_act": "silu", "is_causal": True, "use_bidirectional_attention": False}
QWEN2_ATTENTION = {"qkv_bias": 1, "no_qk_norm": 1}
QWEN3 = QWEN2 | {"attention_bias": False}
MOE = QWEN3 | {"mlp_only_layers": [], "decoder_sparse_step": 1, "qkv_bias": False,
               "shared_expert_intermediate_size": 0, "use_qk_norm": True,
               "use_sliding_window": False}  # transformers has the window in all layers
DELTA_HEAD, DELTA_TAPS = 128, 4  # of a delta rule: a head's width; the tokens of a convolution
DELTA = QWEN3 | {"linear_key_head_dim": DELTA_HEAD, "linear_value_head_dim": DELTA_HEAD,
                 "linear_conv_kernel_dim": DELTA_TAPS, "attn_output_gate": True,
                 "output_gate_type": ("swish", "silu")}
DELTA_MOE = DELTA | {"mlp_only_layers": [], "decoder_sparse_step": 1}
MOE_NUMBERS = "moe_intermediate_size", "num_experts", "num_experts_per_tok"
DELTA_NUMBERS = "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads"
GATED, SHARED = {"gated_attention": 1}, {"gated_attention": 1, "shared_expert": 1}
FAMILIES = [
    Family("Qwen2ForCausalLM Qwen2Model qwen2", "qwen2", QWEN2, QWEN2_ATTENTION, None),
    Family("Qwen2VLForConditionalGeneration qwen2_vl", "qwen2vl", QWEN2, QWEN2_ATTENTION, None),
    Family("MiMoForCausalLM mimo", "", QWEN2, QWEN2_ATTENTION, None),
    Family("Qwen3ForCausalLM Qwen3Model qwen3", "qwen3", QWEN3),
    Family("Qwen3MoeForCausalLM qwen3_moe", "qwen3moe", MOE, head_dim=None, numbers=MOE_NUMBERS),
    Family("Qwen3VLForConditionalGeneration qwen3_vl", "qwen3vl", QWEN3),
    Family("Qwen2_5_VLForConditionalGeneration qwen2_5_vl", "qwen25vl", QWEN2, QWEN2_ATTENTION, None),
    Family("Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5Model Qwen3_5TextModel "
           "qwen3_5 qwen3_5_text", "qwen35", DELTA, GATED, 256, ("intermediate_size", *DELTA_NUMBERS)),
    Family("Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration qwen3_5_moe qwen3_5_moe_text",
           "qwen35moe", DELTA_MOE | {"norm_topk_prob": True}, SHARED, 256,
           MOE_NUMBERS + DELTA_NUMBERS),
    Family("Qwen3NextForCausalLM qwen3_next", "qwen3next", DELTA_MOE, SHARED, 256,
           MOE_NUMBERS + DELTA_NUMBERS)]
GGUF_FAMILIES = {row.gguf: row for row in FAMILIES if row.gguf}
ARCHITECTURES = {name: row for row in FAMILIES for name in row.architectures.split()}
OTHER_CLASSES = "VLMoe|For(?!(CausalLM|ConditionalGeneration)$)"  # whatever their model_type is


class Source(NamedTuple):
    """A checkpoint. Its parts have the form of Hugging Face's files, wherever they come from."""
    path: Path  # the directory or the GGUF file
    name: str  # OUT.bin is named after it
    family: Family
    config: dict  # config.json as normalize_config() gives it
    tokenizer: dict  # tokenizer.json
    tokenizer_config: dict  # tokenizer_config.json
    generation: dict  # generation_config.json
    chat_template: str | None  # Jinja
    embedding: bool  # an embedding model: it makes one vector of a text
    open_tensors: Callable[[], dict[str, Tensor]]  # by name without "model."; downloads the hub's
    downloads: Callable[[], list[Room]] = list  # the space that open_tensors() needs
    dtypes: Counter[str] = Counter()  # of a GGUF file: each, and how many layers' weights have it
    eight_bits: int = 0  # of a GGUF file: bit i says that most of MATRICES[i] has over 5 bits
    origin: str = ""  # the GGUF file or the place on the hub; of a folder its name says it

    def file(self, name: str) -> Path:
        """The path that a message about config.json etc. names: of that file, or of the GGUF."""
        return self.path / name if self.path.is_dir() else self.path


def normalize_config(where: Path, config: dict) -> tuple[Family, dict]:
    """The family of a config.json, and its values, each under the one key that others read."""
    # Of what stands beside text_config these keys alone count.
    if text_config := read_value(where, config, "text_config", dict):
        top = ("architectures", "model_type", "auto_map", "quantization_config", "quantization",
               "tie_word_embeddings", "bos_token_id", "eos_token_id")
        config = text_config | {key: config[key] for key in top if config.get(key)}
    get = partial(read_value, where, config)
    names = list_names([str(x) for x in get("architectures", list) or [config.get("model_type")]])
    family, kind = ARCHITECTURES.get(names), str(config.get("model_type"))
    if not (family or re.search(OTHER_CLASSES, names) or "auto_map" in config):  # one's own, a wrapper
        family = ARCHITECTURES.get(kind)
        Notices.hints.append(f"{names} is not known: taken for its model_type, {kind}")
    if not family:
        refuse(where, "not Qwen3's architecture", "the model that it was made from; of a reranker "
               "qwen3 gives the scores by -o 'yes|no'" if "ForSequenceClassification" in names else
               " ".join(re.findall(r"\w+(?=ForCausalLM)", str(FAMILIES))), names)
    quantized, mlx = get("quantization_config", dict), config.get("quantization")
    if quantized or mlx:  # refuse()'s arguments: it may be what a training left beside whole weights
        quantized = (where, "its quantized weights", "the unquantized checkpoint or a GGUF file",
                     "MLX weights" if mlx else quantized.get("quant_method", quantized))
    sliding = (config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
               and read_number(where, config, "max_window_layers", 28)
               < read_number(where, config, "num_hidden_layers"))
    layer_types = get("layer_types", list) or ["sliding" if sliding else "full_attention"]
    if not family.has_delta:
        require(where, "its sliding window (use_sliding_window, layer_types)",
                list_names(sorted(set(map(str, layer_types)))), "full_attention")
    rope = get("rope_scaling", dict) or get("rope_parameters", dict)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope = ({key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | rope
            | {"rope_type": rope_type})
    if rope_type == "yarn" and ORIGINAL in config:
        rope[ORIGINAL] = config[ORIGINAL]
    if "VL" in family.architectures:  # whose defaults are others
        for key in "rms_norm_eps", "num_key_value_heads", "rope_theta":
            read_number(where, config | rope, key)
    experts = config.get("num_local_experts", config.get("num_experts"))
    return family, config | {"rope": rope, "num_experts": experts, "quantized": quantized}


def read_interval(where: Path, config: dict) -> Any:
    """full_attention_interval of a model with a delta rule: each so manieth layer is attention.
    transformers 5 saves it as layer_types."""
    types = read_value(where, config, "layer_types", list)
    every = types.index("full_attention") + 1 if "full_attention" in types else len(types)
    period = ["linear_attention"] * (every - 1) + ["full_attention"]
    if any(kind != period[i % every] for i, kind in enumerate(types)):
        refuse(where, "layer_types", "full_attention after as many linear_attention each time",
               list_names(list(map(str, types)), 12))
    return every or config.get("full_attention_interval")


def read_value(where: Path, values: dict, key: str, kind: type) -> Any:
    """values[key], which is of this kind, or an empty one where it is absent or null."""
    if not isinstance(value := values.get(key) or kind(), kind):
        refuse(where, key, f"a {kind.__name__}", repr(value))
    return value


class Tensor(NamedTuple):
    """A row-major tensor in a safetensors or GGUF file, or a range of its elements."""
    name: str  # in the file
    path: Path
    offset: int  # of its first byte in the file
    dtype: str  # safetensors' name or ggml's; the float types have the same name in both
    shape: tuple[int, ...]
    data: bytes = b""  # of a tensor that is in no file
    change: Callable | None = None  # makes the numbers of OUT.bin of those of a range

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        elements, size = BLOCK_SIZES[self.dtype]
        return self.size // elements * size

    def part(self, start: int, *shape: int) -> Tensor:
        """The range of this shape from element start on. Both of its ends are ends of blocks."""
        elements, size = BLOCK_SIZES.get(self.dtype, (1, 1))  # others are refused later
        return self._replace(offset=self.offset + start // elements * size, shape=shape)

    def pieces(self, unit: int = 1) -> Iterator[Tensor]:
        """Cuts it into ranges of at most PIECE elements, whole units but for the last range."""
        step = max(PIECE // unit, 1) * unit
        return (self.part(at, min(step, self.size - at)) for at in range(0, self.size, step))

    def read_bytes(self) -> bytes:
        """Opens the file each time: there may be more shards than a process may have open."""
        if self.data:
            return self.data[self.offset:self.offset + self.nbytes]
        with parsing(self.path), open(self.path, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), self.nbytes, self.offset)
        if len(raw) < self.nbytes:
            refuse(self.path, f"truncated in {self.name}", f"{self.nbytes} bytes", len(raw))
        return raw

    def read_fp32(self) -> np.ndarray:
        """(size,) if there is no change, writable."""
        if self.change:
            return self.change(self._replace(change=None).read_fp32())
        raw = bytearray(self.read_bytes())
        if self.dtype == "Q1_0":  # bit i of a block says if weight i is scale or -scale
            blocks = np.frombuffer(raw, [("scale", "<f2"), ("bits", "u1", 16)])
            signs = np.unpackbits(blocks["bits"], axis=1, bitorder="little") * np.float32(2) - 1
            return (signs * blocks["scale"][:, None].astype("<f4")).ravel()
        return gguf.dequantize(np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType[self.dtype])


PIECE = 1 << 18  # elements: 1 MB in fp32 stays in a core's cache from one numpy pass to the next
# dtype -> (elements, bytes) of one block; a float type's block is one element
BLOCK_SIZES = {kind.name: block for kind, block in gguf.GGML_QUANT_SIZES.items()}
FLOAT_TYPES = {"BF16", "F16", "F32"}


def can_read(dtype: str) -> bool:
    """True if Tensor.read_fp32() reads this dtype. The gguf package has no list: it is tried."""
    with suppress(KeyError, NotImplementedError):
        elements, size = BLOCK_SIZES[dtype]
        return Tensor("a block", Path(), 0, dtype, (elements,), bytes(size)).read_fp32().size > 0
    return False


# ---- A checkpoint directory: Hugging Face's files ------------------------------------------------

WEIGHTS = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
INDEX, PROMPTS = "model.safetensors.index.json", "config_sentence_transformers.json"
SETTINGS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "chat_template.jinja", "chat_template.json", "modules.json", "1_Pooling/config.json",
            PROMPTS, "sentence_bert_config.json", "adapter_config.json", "added_tokens.json", INDEX]
LEFT_TO_USERS = "prompts", "default_prompt_name", "max_seq_length", "truncate_dim", "do_lower_case"
SAVE_PRETRAINED = "of safetensors; transformers' save_pretrained() makes it"


def read_folder(folder: Path, of_hub: bool = False) -> Source:
    """A checkpoint, or the GGUF file in a folder that has no checkpoint."""
    if not of_hub and (files := choose_gguf(folder, os.listdir(folder))):
        return read_gguf(folder / files[0])
    family, config = normalize_config(folder / "config.json", read_json(folder / "config.json"))
    path = folder / "tokenizer.json"
    if not path.exists():
        refuse(path, "missing", "it beside the weights (AutoTokenizer makes it of vocab.json)")
    if (folder / "adapter_config.json").exists():
        Notices.hints.append("adapter_config.json: the LoRA adapter is not applied; if the weights "
                             "lack it, peft's merge_and_unload() and save_pretrained() merge it")
    older = {str(i): {"content": text, "special": False}
             for text, i in read_json(folder / "added_tokens.json").items()}
    tokenizer_config = {"added_tokens_decoder": older} | read_json(  # may have all added tokens, too
        folder / "tokenizer_config.json", SETTINGS_SIZE + max(0, TOKENIZER_SIZE - path.stat().st_size))
    here = Path(os.path.abspath(folder))
    cached = re.search(r"/models--.+?--([^/]+)/snapshots/[0-9a-f]+$", str(here))
    return Source(
        path=folder, name=cached[1] if cached else here.name, family=family, config=config,
        tokenizer=read_json(path, TOKENIZER_SIZE), tokenizer_config=tokenizer_config,
        generation=read_json(folder / "generation_config.json"),
        chat_template=read_template(folder, tokenizer_config), embedding=is_embedding(folder),
        open_tensors=lambda: open_checkpoint(folder, family))


def read_json(path: Path, most: int = SETTINGS_SIZE, kind: type = dict) -> Any:
    """The object or list in a JSON file, or an empty one if the file does not exist."""
    if not os.path.lexists(path):
        return kind()
    with parsing(path):
        value = json.loads(read_file(path, most))
        if not isinstance(value, kind):
            raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def read_template(folder: Path, tokenizer_config: dict) -> str | None:
    """The Jinja source. In tokenizer_config.json it may be one of a list of named templates."""
    if (path := folder / "chat_template.jinja").exists():
        return read_file(path).decode(errors="surrogateescape")
    found = (tokenizer_config.get("chat_template")
             or read_json(folder / "chat_template.json").get("chat_template"))
    if isinstance(found, list):
        with parsing(folder / "tokenizer_config.json"):
            return {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def is_embedding(folder: Path) -> bool:
    """True if modules.json (sentence-transformers) takes the last token's vector, as qwen3.c."""
    path = folder / "modules.json"
    with parsing(path):
        modules = [(module["type"].rpartition(".")[2], module["path"])
                   for module in read_json(path, kind=list)]
    if "Pooling" not in dict(modules):
        return False
    if (names := [name for name, _ in modules]) != ["Transformer", "Pooling", "Normalize"]:
        refuse(path, "its modules", "Transformer, Pooling, Normalize (qwen3's vectors have length "
               "1: where only cosines count, add Normalize)", list_names(names))
    require(path, "path of its modules", [path for _, path in modules[:2]], ["", "1_Pooling"])
    pooling = read_json(path := folder / "1_Pooling/config.json")
    modes = pooling.get("pooling_mode") or [  # before sentence-transformers 6: a key for each mode
        key[13:] for key in pooling if key.startswith("pooling_mode_") and pooling[key] is True]
    modes = ", ".join(map(str, modes)) if isinstance(modes, list) else modes
    require(path, "pooling", modes, "lasttoken")
    path = folder / PROMPTS
    settings = read_json(path) | read_json(folder / "sentence_bert_config.json")
    prompts = read_value(path, settings, "prompts", dict)
    settings["prompts"] = {key: prompt for key, prompt in prompts.items() if prompt}
    if left := {key: settings[key] for key in LEFT_TO_USERS if settings.get(key)}:
        Notices.hints.append(f"{PROMPTS}: left to you, as qwen3 takes texts as they are and gives "
                             f"whole vectors (a prompt begins a text, in -i or a list): {left}")
    return True


def open_checkpoint(folder: Path, family: Family) -> dict[str, Tensor]:
    """Name without "model." -> tensor, of all files with weights."""
    tensors, stored = {}, []
    for file, listed in list_weights(folder, os.listdir(folder)).items():
        of_file = open_safetensors(folder / file)
        if listed and (wrong := sorted(of_file.keys() ^ set(listed))):
            refuse(folder / INDEX, "its shards hold other tensors (download them again)",
                   "those that it lists", f"a difference in {list_names(wrong)}")
        stored += of_file.items()
    # MLX's norms have their 1, its convolutions are (channels, taps, one).
    mlx = any(re.match(r"language_model\..*conv1d", name) and tensor.shape[2:] == (1,)
              for name, tensor in stored)
    start = os.path.commonprefix([name for name, _ in stored]).rfind(".") + 1  # after a wrapper's name
    for name, tensor in stored:
        name = re.sub(r"^(language_model\.|model\.)+|\b_\w+_mod(ule)?\.", "", name[start:])
        kind = re.sub(r"^layers\.\d+\.", "", name) if family.has_delta else ""
        change, shape = DELTA_CHANGES.get(kind), tensor.shape
        if mlx:
            change = None if "norm" in kind else change
            shape = shape[:1] + shape[:0:-1] if "conv1d" in kind else shape
        add_tensor(tensors, name, tensor._replace(change=change, shape=shape))
    return tensors


# Makes OUT.bin's numbers of those of a delta rule's checkpoint: norms, but for one, multiply by
# 1 + w; decays have no logarithm; of convolutions tap 0 comes first, for all channels.
DELTA_CHANGES = dict.fromkeys(
    ["norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
     "self_attn.q_norm.weight", "self_attn.k_norm.weight"], lambda w: w + np.float32(1)) | {
    "linear_attn.A_log": lambda x: np.exp(x.astype(float)).astype("<f4"),  # fp64: as scale_rope()
    "linear_attn.conv1d.weight": lambda x: x.reshape(-1, DELTA_TAPS).T.ravel()}


def add_tensor(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    """Adds it by that name. One of all experts, (experts, out, in), it adds as their matrices:
    transformers 5 joins their gate and up, too, and MLX calls them switch_mlp."""
    more, shape = {name: tensor}, tensor.shape
    match = re.fullmatch(r"(layers\.\d+\.mlp\.)(?:experts|switch_mlp)"
                         r"\.(gate_up|gate|up|down)_proj(?:\.weight)?", name)
    kinds = match[2].split("_") if match and len(shape) == 3 else []
    if kinds and shape[0] <= NUMBERS["num_experts"][1] and shape[1] % len(kinds) == 0:
        rows, width = shape[1] // len(kinds), shape[2]
        more = {f"{match[1]}experts.{i}.{kind}_proj.weight":
                tensor.part((i * len(kinds) + k) * rows * width, rows, width)
                for i in range(shape[0]) for k, kind in enumerate(kinds)}
    if again := tensors.keys() & more.keys():
        refuse(tensor.path, "tensors", "each once", f"{list_names(sorted(again))} twice")
    tensors |= more
    if len(tensors) > MOST_TENSORS:
        refuse(tensor.path, "too many tensors", f"at most {MOST_TENSORS}", "more")


def list_weights(folder: Path, names: Collection[str]) -> dict[str, list[str]]:
    """Weight file, one of the names -> the tensors that the index lists for it; [] if none."""
    if "model.safetensors" in names:
        return {"model.safetensors": []}
    if INDEX not in names:
        refuse_folder(folder, f"no weights and no {INDEX}", f"a directory {SAVE_PRETRAINED}", names)
    files: dict[str, list[str]] = {}
    with parsing(folder / INDEX):
        shard_of = read_json(folder / INDEX, TENSORS_SIZE)["weight_map"]
        if len(shard_of) > MOST_TENSORS:
            refuse(folder / INDEX, "too many tensors", f"at most {MOST_TENSORS}", "more")
        for name, file in sorted(shard_of.items(), key=lambda item: item[1]):
            if not WEIGHTS.fullmatch(file) or file not in names:
                refuse(folder / file, "missing", f"this file of {INDEX}: download it again")
            files.setdefault(file, []).append(name)
    return files


def refuse_folder(where: object, what: str, expected: str, files: Collection[str]) -> NoReturn:
    """Refuses a folder or a hub's model without a model in it, which a training may have made."""
    steps = [int(step[1]) for file in files if (step := re.fullmatch(r"checkpoint-(\d+)", file))]
    if "adapter_config.json" in files:
        what = "a LoRA adapter, no model"
        expected = "it merged into its base: peft's merge_and_unload(), then save_pretrained()"
    elif cached := re.fullmatch("models--(.+?)--(.+)", Path(str(where)).name):
        expected = f"`export.py {cached[1]}/{cached[2]}`, whose cache this folder is"
    elif steps:
        expected = f"`export.py {shlex.quote(f'{where}/checkpoint-{max(steps)}')}`, its newest one"
    refuse(where, what, expected, list_names(sorted(files)))


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """Name -> tensor, of one file. Its format: u64 length of the header; the header, JSON
    {name: {dtype, shape, data_offsets: [begin, end)}}; the data, without gap or overlap."""
    with parsing(path), open_file(path) as file:
        file_size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        limit = min(file_size - 8, TENSORS_SIZE)
        if not 2 <= length <= limit:
            refuse(path, "broken safetensors (download it again)",
                   f"a header of 2 to {max(2, limit)} bytes", length)
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        tensors, position = {}, 0  # in the data
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if len(shape) > 5 or any(type(n) is not int for n in (*shape, begin, end)):
                refuse(path, f"shape or data_offsets of {name}", "up to 5 integers and 2", entry)
            tensors[name] = tensor = Tensor(name, path, 8 + length + begin, dtype, shape)
            size = tensor.nbytes if dtype in FLOAT_TYPES else abs(end - begin)  # refused in the end
            if [begin, end] != [position, position + size]:
                refuse(path, f"data_offsets of {name}", [position, position + size], [begin, end])
            position = end
    if (size := 8 + length + position) != file_size:
        refuse(path, "truncated or oversized", f"{size} bytes (download it again)", file_size)
    return tensors


# ---- The hub: a checkpoint's or GGUF file's files, downloaded ------------------------------------

# A model on the hub: ORG/NAME, ORG/NAME@REVISION, with :KIND or /FILE.gguf, or a page's address
HUB_NAME = re.compile(r"""(?:https?://[^/]+/|(?:hf|huggingface)\.co/)?
    (?P<model>[A-Za-z0-9][\w.-]*/[\w.-]+?(?<!\.gguf))
    (?:(?:@|/(?:tree|blob|resolve)/)(?P<revision>[\w.-]+(?:/[\w.-]+)*?))?
    (?::(?P<kind>[\w-]+)|/(?P<file>[\w./-]+\.gguf)?)?(?:[?\#].*)?""", re.ASCII | re.VERBOSE)
PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
BESIDE = re.compile(r"(?<![a-z])(imatrix|mtp|nextn|draft(er)?|eagle\d*|dflash)(?![a-z])[^/]*$", re.IGNORECASE)
NO_NETWORK = {"ConnectionError", "Timeout", "TransportError", "LocalEntryNotFoundError"}


def find_model(name: str, revision: str | None, wanted: str) -> Source:
    """Downloads a GGUF file or a checkpoint's JSON files, whose weights follow when opened. All are
    of one commit: the newest, or that of a branch or tag."""
    def measure_room(files: Collection[str]) -> Room:
        """The cache, and the bytes of those of the files that are not in it."""
        absent = (file for file in files if not (folder / file).is_file())
        return folder.parents[2], sum(sizes.get(file, 0) for file in absent)

    def fetch(files: Collection[str]) -> Path:
        """Downloads those of the files that exist, if there is space for them, to the folder."""
        check_space([need := measure_room(files)])
        hint = (f"the download stays in {folder.parents[1]}; to remove it, delete that folder or "
                f"run `hf cache rm model/{name}`")
        Notices.hints += [hint] if need[1] and files is not SETTINGS else []
        with downloading(name):
            hub.snapshot_download(name, revision=folder.name, allow_patterns=[*files])
        return folder

    from huggingface_hub import HfApi, utils  # slow: only here
    utils.logging.set_verbosity_error()  # an error is one line
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    hub, info = HfApi(), None
    with downloading(name):  # no file yet, but the newest commit's number
        folder = Path(hub.snapshot_download(name, revision=revision, allow_patterns=[]))
        try:
            info = hub.model_info(name, revision=folder.name, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings
                     if re.fullmatch(r"[\w./-]+", file.rfilename, re.ASCII)}
        except Exception:  # without a network: what the cache has
            sizes = {path.relative_to(folder).as_posix(): 0 for path in folder.rglob("*")}
            if not sizes:
                raise
    if not re.fullmatch(r".*/snapshots/[0-9a-f]{40}", str(folder)):  # a path is made of it
        refuse(name, "commit", "40 hexadecimal digits", folder.name)
    Notices.names[str(folder)] = name
    gguf_files = choose_gguf(name, list(sizes), wanted, default="Q8_0")
    kind = (getattr(info, "gguf", None) or {}).get("architecture")  # of one of its files
    if gguf_files and kind != "clip" and not any(map(BESIDE.search, sizes)):
        require(name, "general.architecture", kind, *GGUF_FAMILIES, None)
    origin = "/".join([name, *gguf_files[:1]]) + f" at {folder.name}"
    if gguf_files:
        return read_gguf(fetch(gguf_files) / gguf_files[0])._replace(origin=origin)
    source, weights = read_folder(fetch(SETTINGS), True), partial(list_weights, folder, sizes)
    stored = getattr(getattr(info, "safetensors", None), "parameters", {})  # dtype -> weights
    if source.config["quantized"] and stored.keys() - FLOAT_TYPES:
        refuse(*source.config["quantized"])
    return source._replace(origin=origin, downloads=lambda: [measure_room(weights())],
                           open_tensors=lambda: open_checkpoint(fetch(weights()), source.family))


@contextmanager
def downloading(name: str) -> Iterator[None]:
    """Any exception within it means that the hub does not give this model."""
    try:
        yield
    except Exception as error:  # from several libraries
        if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
            error.filename = error.filename or "the hub's cache"
            raise
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if NO_NETWORK & {kind.__name__ for kind in type(error).__mro__}:
            refuse(name, "not here, or not all, and the hub can't be reached", "a network (again; "
                   "HF_ENDPOINT sets a mirror), or files in the cache (HF_HUB_OFFLINE=1)", found)
        refuse(name, "neither here nor available from the hub", "a directory, a GGUF file or a hub "
               "name (a private or gated one needs HF_TOKEN)", found)


def choose_gguf(where: object, files: list[str], wanted: str = "", default: str = "") -> list[str]:
    """The parts of the GGUF file with the wanted name or kind, such as Q4_0. If none is wanted: of
    the only file, or of that of the default kind, or [] if the files are a checkpoint's."""
    models: dict[str, list[str]] = {}  # name without the number of a part -> the parts
    for file in sorted(files):  # mmproj is what a model sees with, beside its text part
        if file.endswith(".gguf") and not re.search("mmproj[^/]*$", file):
            models.setdefault(PART.sub("", file), []).append(file)
    whole = [model for model in models if not BESIDE.search(model)] or [*models]
    if not wanted and (not models or any(map(WEIGHTS.fullmatch, files))):
        if "config.json" in files:
            return []
        refuse_folder(where, "not a checkpoint", "config.json or a GGUF file", files)
    wanted = wanted or (default if len(whole) > 1 else "")
    ending = re.compile(rf"(.*[-._/])?{re.escape(wanted)}\.gguf", re.IGNORECASE)
    chosen = [model for model, parts in models.items() if wanted in (model, *parts)] or [
        model for model in whole if not wanted or ending.fullmatch(model)]
    if len(chosen) != 1:
        refuse(where, f"{'more than one' if chosen else 'no'} GGUF file {wanted}".strip(),
               "the name of one of these", list_names([*models], 30))
    return models[chosen[0]]


# ---- GGUF: a file by llama.cpp's converter, turned back into Hugging Face's files ----------------
# The gguf package dequantizes; its reader needs seconds and half a GB for a vocabulary.

GGUF_STRING, GGUF_ARRAY = 8, 9  # types of metadata values; the rest are scalars:
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
                12: "d"}  # type -> struct's letter
GGUF_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                 "penalty_repeat": "repetition_penalty"}
# Tokens that the converter marks as special because they look so; in Qwen's files they are not.
GGUF_NOT_SPECIAL = {f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad",
                                               "repo_name", "file_sep")}


def read_gguf(path: Path) -> Source:
    """A GGUF file. Of several parts it is the first."""
    part, tensors = PART.search(path.name), {}
    metadata = open_gguf(path, tensors)
    for kind in metadata.get("general.type"), metadata.get("general.architecture"):
        if kind in ("adapter", "mmproj", "clip", "imatrix"):
            refuse(path, "no model", "the file of its model (llama-export-lora merges an adapter "
                   "into it; qwen3 runs the text part of one that sees)", kind)
    if part and int(part[1]) != 1:
        refuse(path, "one of several parts", "the first, -00001-of-...", path.name)
    n_parts = int(part[2]) if part else 1
    require(path, "split.count", metadata.get("split.count") or 1, n_parts)  # 0: it was joined
    for i in range(2, n_parts + 1):
        open_gguf(path.with_name(PART.sub(rf"-{i:05}-of-\2", path.name)), tensors)
    family, config = read_gguf_config(path, metadata, tensors)
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    bos, eos, *ends = (read_ids(path, ggml.get(key)) for key in (  # ends: of turn, message, Ollama's
        "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids"))
    tokenizer = read_gguf_tokenizer(path, family, ggml, {"bos": bos, "eos": eos})
    texts = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    stop_ids = sum(ends, eos) + [i for i, text in texts.items() if text == "<|endoftext|>"]
    pooling, poolings = metadata.get(f"{family.gguf}.pooling_type", 0), gguf.PoolingType
    require(path, "pooling_type", pooling, 0, int(poolings.LAST), int(poolings.RANK))
    if pooling == poolings.RANK and tensors.pop("cls.output.weight", None):
        Notices.hints.append("cls.output.weight is left out: qwen3's -o 'yes|no' does its work")
    if pooling == poolings.LAST and "add_eos_token" not in ggml:
        Notices.hints.append("no add_eos_token: Qwen3-Embedding needs <|endoftext|> after a text")
    kept = tensors if pooling == poolings.LAST else drop_copy(tensors, texts)  # LAST needs none
    template = metadata.get("tokenizer.chat_template")
    sampling = {hf: metadata.get(f"general.sampling.{name}") for name, hf in GGUF_SAMPLING.items()}
    answers_at_once = template and "</think>" not in str(template)
    if family.gguf == "qwen2" and answers_at_once and not any(sampling.values()):
        penalty = 1.1 if sum(tensor.size for tensor in kept.values()) < 2e9 else 1.05
        sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": penalty}
        Notices.hints.append("no sampling settings in the file: Qwen2.5's, -t 0.7 -p 0.8 -k 20 "
                             f"-e {penalty}")
    dtypes, more = Counter(), Counter()  # more: of each matrix, the weights with over 5 bits
    kinds = {re.sub(r"\*\.|experts\.#\.", "", name): kind for name, _, kind, *_ in TENSORS}
    for name, tensor in tensors.items():
        dtypes[tensor.dtype] += tensor.size * ("_proj" in name)
        rest = re.sub(r"^layers\.\d+\.|(experts\.\d+|shared_expert)\.", "", name)
        for _, target in family.has_delta and DEALT.get(rest) or [(0, rest)]:
            more[kinds.get(target)] += tensor.size * (1 if 8 * tensor.nbytes > 5 * tensor.size else -1)
    return Source(
        path=path, name=PART.sub("", path.name).removesuffix(".gguf"), family=family,
        config=config | {"tie_word_embeddings": "lm_head.weight" not in kept,
                         "bos_token_id": bos, "eos_token_id": eos}, tokenizer=tokenizer,
        tokenizer_config={f"{name}_token": next((texts[i] for i in ids if i in texts), None)
                          for name, ids in (("bos", bos), ("eos", eos))},
        generation=sampling | {"eos_token_id": stop_ids}, embedding=pooling == poolings.LAST,
        chat_template=template, open_tensors=lambda: kept, origin=path.name, dtypes=dtypes,
        eight_bits=sum(1 << i for i, matrix in enumerate(MATRICES) if more[matrix] > 0))


def read_gguf_config(path: Path, metadata: dict, tensors: dict[str, Tensor]) -> tuple[Family, dict]:
    """What normalize_config() gives. The layer of nextn, which guesses tokens, does not count."""
    name = metadata.get("general.architecture")
    require(path, "general.architecture", name, *GGUF_FAMILIES)
    model = {key.removeprefix(f"{name}."): value for key, value in metadata.items()}
    require(path, "attention.causal", model.get("attention.causal"), True, None)
    if "embed_tokens.weight" not in tensors:
        refuse(path, "tensors", "token_embd.weight")
    numbers = {key: model.get(gguf_key) for key, (*_, gguf_key, _) in NUMBERS.items() if gguf_key}
    get = partial(read_number, path, numbers)
    n_layers = get("num_hidden_layers") - bool(model.get("nextn_predict_layers"))
    are_delta = read_value(path, model, "attention.recurrent_layers", list)
    if isinstance(kv_heads := numbers["num_key_value_heads"], list):  # Ollama's, of each layer
        are_delta = [not n for n in kv_heads]
        numbers["num_key_value_heads"] = next(filter(None, kv_heads), 0)
    types = [f"{'linear' if is_delta else 'full'}_attention" for is_delta in are_delta[:n_layers]]
    head_dim = get("head_dim", get("hidden_size") // get("num_attention_heads"))
    rotary_dim = read_number(path, model, "rope.dimension_count", head_dim)
    rope = {key.removeprefix("rope.scaling.").removeprefix("yarn_"): value
            for key, value in model.items() if key.startswith("rope.scaling.") and value != "none"}
    rope.pop("finetuned", None)  # does not change what is computed
    if "original_context_length" in rope:
        rope[ORIGINAL] = rope.pop("original_context_length")
    # DeepSeek's attn_factor, 1 / default, makes llama.cpp scale by 1. transformers ignores the key.
    if "attn_factor" in rope:
        default = 0.1 * math.log(read_number(path, rope, "factor")) + 1
        if abs(read_number(path, rope, "attn_factor") * default - 1) >= 1e-3:
            rope["attention_factor"] = rope.pop("attn_factor")
    return GGUF_FAMILIES[name], numbers | {
        "num_hidden_layers": n_layers, "layer_types": types, "head_dim": head_dim,
        "vocab_size": tensors["embed_tokens.weight"].shape[0],
        "norm_topk_prob": model.get("norm_top_k_prob", True),  # Ollama's: llama.cpp always divides
        "v_head_reordered": model.get("ssm.v_head_reordered", name != "qwen3next" and not any(
            tensor.endswith("in_proj_ba.weight") for tensor in tensors)),  # ssm_ba: Qwen3-Next's
        "rope": {"rope_theta": read_number(path, model, "rope.freq_base"),
                 "partial_rotary_factor": rotary_dim / head_dim,
                 "rope_type": rope.pop("type", "default")} | rope}


def read_gguf_tokenizer(path: Path, family: Family, ggml: dict, ends: dict[str, list[int]]) -> dict:
    """The contents of tokenizer.json, from the metadata under tokenizer.ggml."""
    require(path, "tokenizer.ggml.model", ggml.get("model"), "gpt2")
    pre = "qwen35" if family.gguf.startswith("qwen35") else "qwen2"
    require(path, "tokenizer.ggml.pre", ggml.get("pre"), pre, "default", "deepseek-r1-qwen", None)
    types = gguf.TokenType
    ids: dict[int, dict[str, int]] = {  # type -> text -> id
        types.NORMAL: {}, types.CONTROL: {}, types.USER_DEFINED: {}, types.UNUSED: {}}
    with parsing(path):
        tokens, merges = [*zip(ggml["tokens"], ggml["token_type"], strict=True)], ggml["merges"]
    for i, (text, token_type) in enumerate(tokens):
        require(path, f"token_type of {text!r}", token_type, *map(int, ids))
        ids[token_type][str(text)] = i
    if sum(map(len, ids.values())) < len(tokens):
        refuse(path, "tokens", "each with its own text", "a text twice")
    # Old files and some of Ollama's leave pre open. Qwen's vocabulary alone has these marks after
    # all that merges make, and no digit beside a letter.
    plain, marks = ids[types.NORMAL], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if ggml.get("pre", "default") == "default" and (
            [text for text, _ in tokens[len(plain):][:3]] != marks
            or any(re.search("[0-9].|.[0-9]", text) for text in plain)):
        refuse(path, "tokenizer.ggml.pre", "qwen2, or Qwen's vocabulary (a newer GGUF file, or the "
               "checkpoint?)", repr(ggml.get("pre")))
    special = ids[types.CONTROL].keys() - GGUF_NOT_SPECIAL
    added = ids[types.CONTROL] | {text: i for text, i in ids[types.USER_DEFINED].items()
                                  if not re.fullmatch(r"\[PAD\d+\]", text)}  # Ollama's
    around = {name: {"ids": ids if ggml.get(f"add_{name}_token") else []}
              for name, ids in ends.items()}
    return {"model": {"type": "BPE", "vocab": ids[types.NORMAL] | added, "merges": merges},
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"pretokenizers": PRE_TOKENIZERS[pre]},
            "post_processor": {"type": "TemplateProcessing", "special_tokens": around, "single": [
                {"SpecialToken": {"id": "bos"}}, {"Sequence": {"id": "A"}},
                {"SpecialToken": {"id": "eos"}}]},
            "added_tokens": [{"id": i, "content": text, "special": text in special}
                             for text, i in added.items()]}


def open_gguf(path: Path, tensors: dict[str, Tensor]) -> dict:
    """Returns the file's metadata, and adds its tensors, by Hugging Face's name. The file holds
    "GGUF", u32 version, u64 numbers of tensors and of metadata values; each of these: string key,
    u32 type, value; each tensor: string name, u32 number of dimensions, u64 dimensions, innermost
    first, u32 dtype, u64 offset in the data; after padding, the data."""
    def unpack(letters: str) -> tuple:
        """The next values of a GGUF file, by struct's letters. struct.error at its end."""
        size = struct.calcsize("<" + letters)
        if file.tell() + size > TOKENIZER_SIZE:
            raise ValueError(f"more than {TOKENIZER_SIZE} bytes of metadata")
        return struct.unpack("<" + letters, file.read(size))

    def value_of(kind: int) -> Any:
        if kind == GGUF_STRING:  # a template may hold what is no UTF-8
            return unpack(f"{unpack('Q')[0]}s")[0].decode(errors="surrogateescape")
        if kind != GGUF_ARRAY:
            return unpack(GGUF_SCALARS[kind])[0]
        kind, count = unpack("IQ")
        if kind in GGUF_SCALARS:
            return list(unpack(f"{count}{GGUF_SCALARS[kind]}"))
        return [value_of(kind) for _ in range(count)]

    with parsing(path), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        magic, version, n_tensors, n_values = unpack("4sI2Q")
        if magic != b"GGUF":
            refuse(path, "not supported", "a checkpoint's directory or a GGUF file", repr(magic))
        require(path, "GGUF's version (or it is big-endian)", version, 2, 3)
        metadata, found = {}, []
        for _ in range(n_values):
            key, (kind,) = value_of(GGUF_STRING), unpack("I")
            metadata[key] = value_of(kind)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            refuse(path, "general.alignment", "a power of two from 8", repr(alignment))
        entries = [(value_of(GGUF_STRING), unpack(f"{unpack('I')[0]}Q"),
                    *unpack("IQ")) for _ in range(n_tensors)]
        data = -(-file.tell() // alignment) * alignment  # rounded up
        for name, shape, kind, offset in entries:
            if len(shape) > 4 or len(name) > 64:  # ggml's limits, too
                refuse(path, f"shape of {name}", "up to 4 dimensions, 64 letters of its name",
                       f"{len(shape)}, {len(name)}")
            dtype = next((x.name for x in gguf.GGML_QUANT_SIZES if x == kind), None) or refuse(
                path, f"dtype of {name}", "one that the gguf package knows", f"number {kind}")
            if shape[0] % (elements := BLOCK_SIZES[dtype][0]):
                refuse(path, f"rows of {name}", f"a multiple of {elements}", shape[0])
            found.append(tensor := Tensor(name, path, data + offset, dtype, shape[::-1]))
            if (end := tensor.offset + tensor.nbytes) > size:
                refuse(path, f"truncated in {name}", f"{end} bytes (download it again)", size)
    if (need := sum(tensor.nbytes for tensor in found)) > size:
        refuse(path, "tensors that overlap", f"{need} bytes or more", size)
    for tensor in found:  # blk.0.attn_q.weight is layers.0.self_attn.q_proj.weight
        layer, rest = re.fullmatch(r"(blk\.\d+\.)?(.*)", tensor.name, re.DOTALL).groups("")
        known = layer.replace("blk", "layers") + GGUF_NAMES.get(rest, "")
        add_tensor(tensors, known if rest in GGUF_NAMES else tensor.name, tensor)
    return metadata


def drop_copy(tensors: dict[str, Tensor], rows: Collection[int] = ()) -> dict[str, Tensor]:
    """The tensors without a classifier that is the embedding again, perhaps in another dtype: the
    one with more bits stays. With n bits a quantization's rms error is 1 to 2.5 times 2^-n of the
    weights' rms, but at most a third. Unrelated tensors differ by more than the whole rms, and a
    classifier that was trained on from the embedding by more than two dtypes with many bits do.
    rows: each is compared, as it may have been trained alone. An rms of 1e-5 is as good as none."""
    a, b = (tensors.get(f"{name}.weight") for name in ("embed_tokens", "lm_head"))
    # No model has 4e9 weights here, but a hole in a hostile file may: it would be read for hours.
    if not (a and b and a.shape == b.shape and 0 < a.size < 4e9 and len(rows) < 10_000
            and can_read(a.dtype) and can_read(b.dtype)):
        return tensors
    pieces = zip(a.pieces(), b.pieces())
    if a.dtype == b.dtype:
        same = all(x.read_bytes() == y.read_bytes() for x, y in pieces)
    else:
        most = min(0.1, 16 * 4 ** -(8 * min(a.nbytes, b.nbytes) / a.size))  # squared
        n, width = a.size // a.shape[-1], a.shape[-1]
        row_pairs = ([x.part(i * width, width) for x in (a, b)] for i in rows if i < n)
        pairs = ([part.read_fp32().astype(float) for part in pair]
                 for pair in itertools.chain(pieces, row_pairs))
        same = all((x - y) @ (x - y) <= most * (y @ y) + 1e-10 * y.size  # not if one is NaN
                   for x, y in pairs)
    if same and a.dtype != b.dtype:
        Notices.hints.append(f"the classifier ({b.dtype}) is the embedding ({a.dtype}): written "
                             "once, from the more precise one")
    kept = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    return kept | {"embed_tokens.weight": a if a.nbytes >= b.nbytes else b} if same else tensors


# ---- The header of OUT.bin: what the model computes ----------------------------------------------

# The first bytes of OUT.bin. Its numbers are those of Config in qwen3.c; take_header() has their
# limits, and what zeros stand for. weights_hash: hash_part() of all that follows (qwen3.c's -K).
Header = namedtuple("Header", "magic version dim hidden_dim n_layers n_heads n_kv_heads vocab_size "
                    "max_seq_len head_dim shared_classifier group_size rope_theta rms_norm_eps "
                    "rope_scaling rope_factor qkv_bias no_qk_norm n_experts n_experts_used "
                    "no_topk_norm layer_bits eight_bits levels panels attention_every "
                    "delta_k_heads delta_v_heads rotary_dim gated_attention shared_expert "
                    "weights_hash", defaults=[0] * 7 + [bytes(16), 1] + [0] * 7)
HEADER = struct.Struct("<12I2fIf20x7I16s7IQ92x")  # 20x: 20 bytes of zero

ORIGINAL = "original_max_position_embeddings"  # of YaRN
# A number of config.json or generation_config.json -> (lowest, highest, its key in a GGUF file, its
# field of Header; None: it has none). The limits are qwen3.c's, but vocab_size's, which is 2^30.
NUMBERS = {
    "hidden_size": (1, 1 << 20, "embedding_length", "dim"),
    "intermediate_size": (1, 1 << 20, "feed_forward_length", "hidden_dim"),
    "moe_intermediate_size": (1, 1 << 20, "expert_feed_forward_length", "hidden_dim"),
    "num_hidden_layers": (1, 4096, "block_count", "n_layers"),
    "num_attention_heads": (1, 4096, "attention.head_count", "n_heads"),
    "num_key_value_heads": (1, 4096, "attention.head_count_kv", "n_kv_heads"),
    "vocab_size": (1, 1 << 20, None, "vocab_size"),
    "head_dim": (1, 4096, "attention.key_length", "head_dim"),
    "max_position_embeddings": (1, 1 << 30, "context_length", "max_seq_len"),
    "num_experts": (0, 4096, "expert_count", "n_experts"),
    "num_experts_per_tok": (0, 4096, "expert_used_count", "n_experts_used"),
    "full_attention_interval": (2, 4096, "full_attention_interval", "attention_every"),
    "linear_num_key_heads": (1, 128, "ssm.group_count", "delta_k_heads"),
    "linear_num_value_heads": (1, 256, "ssm.time_step_rank", "delta_v_heads"),
    "max_window_layers": (0, 2 ** 31 - 1, None, None),
    "rms_norm_eps": (2.0 ** -126, 1e12, "attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ORIGINAL: (1, 2 ** 31 - 1, None, None), "top_k": (0, 2 ** 31 - 1, None, None),
    "top_p": (1e-45, 1.0, None, None), "temperature": (0.0, 1e6, None, None)}
ROPES = {"default": "", "mrope": "", "linear": f"factor {ORIGINAL}",  # mrope: of models that see
         "yarn": f"factor truncate attention_factor beta_fast beta_slow mscale mscale_all_dim "
                 f"{ORIGINAL}"}  # rope_type -> its keys
OTHER_LIMITS = 1e-6, 1e12  # of theta, the penalty and YaRN's terms
GROUP_SIZES, BOOLEANS = (32, 64, 128, 256), ("True", "False")  # BOOLEANS: repr()s, as 1 == True


def read_header(source: Source, bits: int | None, group_size: int | None,
                yarn: float | None) -> tuple[Header, dict[str, Tensor]]:
    """The header, and the tensors that are computed, from config.json and the user's options."""
    where, family = source.file("config.json"), source.family
    config = source.config | {"full_attention_interval": read_interval(where, source.config)}
    if "VL" in family.architectures and (source.embedding or "embedding" in source.name.lower()):
        refuse(where, "a vision model that makes embeddings", "one that answers", source.name)
    for key, value in family.fixed.items():
        require(where, key, config.get(key), *(value if type(value) is tuple else [value]), None)
    if source.embedding:  # its own code may see in both directions, or add tokens to a text
        require(where, "auto_map (the model's own code)", config.get("auto_map", "none"), "none")
    get = partial(read_number, where, config)
    heads = get("num_attention_heads")
    defaults = {"head_dim": family.head_dim or get("hidden_size") // heads,
                "num_key_value_heads": heads, "rms_norm_eps": 1e-6, "full_attention_interval": 4}
    of_others = {key for row in FAMILIES for key in row.numbers} - {*family.numbers}
    fields = {field: get(key, defaults.get(key)) for key, (*_, field) in NUMBERS.items()
              if field and key not in of_others}
    v_heads = fields.get("delta_v_heads", 0)
    for key, value, divisor in (  # a panel must not have rows of both q and its gate
            ("num_attention_heads", heads, fields["n_kv_heads"]),
            ("head_dim", fields["head_dim"], PANEL if family.has_delta else 2),
            ("num_hidden_layers", fields["n_layers"], fields.get("attention_every", 1)),
            ("linear_num_value_heads", v_heads, fields.get("delta_k_heads", 1))):
        if value % divisor:
            refuse(where, key, f"a multiple of {divisor}", value)
    fields["rotary_dim"] = read_rotary_dim(where, config, fields["head_dim"], family.has_delta)
    fields["max_seq_len"], fields["rope_theta"], fields["rope_factor"], frequencies = read_rope(
        where, config, fields["rotary_dim"] or fields["head_dim"], yarn)
    for name, usual in ("rope_theta", 1e6), ("rms_norm_eps", 1e-6):
        if np.float32(fields[name]) == np.float32(usual):
            fields[name] = 0
    width = heads * fields["head_dim"]
    bits, group_size, levels = choose_quantization(
        source.dtypes, (fields["dim"], fields["hidden_dim"], width), bits, group_size)
    for key, width in (("hidden_size", fields["dim"]), ("num_attention_heads * head_dim", width),
                       ("linear_num_value_heads * 128", v_heads * 128)):
        if width % group_size:
            refuse(where, key, f"a multiple of {group_size}, the quantization group", width)
    if "n_experts" in fields:
        if not (n := fields["n_experts"]) >= (used := fields["n_experts_used"]) >= 1:
            refuse(where, "num_experts_per_tok", f"from 1 to num_experts, {n}", used)
        topk_norm = config.get("norm_topk_prob", family.has_delta)
        require(where, "norm_topk_prob", repr(topk_norm), *BOOLEANS)
        fields["no_topk_norm"] = not topk_norm
    if "shared_expert" in family.header:
        require(where, "shared_expert_intermediate_size", config.get(
            "shared_expert_intermediate_size"), fields["hidden_dim"], None)
    if (matrices := fields["n_layers"] * fields.get("n_experts", 1)) > MOST_TENSORS:
        refuse(where, "layers times experts", f"at most {MOST_TENSORS}", matrices)
    header = Header(  # an embedding model needs no classifier
        **family.header, **fields, magic=0x616A6331, version=1, group_size=group_size,
        shared_classifier=config.get("tie_word_embeddings") is True or source.embedding,
        rope_scaling=2 if frequencies else 0, layer_bits=4 if bits == 4 else 0, levels=levels,
        eight_bits=EIGHT_BITS["no_qk_norm" in family.header] if levels == LEVELS.tobytes() else
        source.eight_bits if bits == 4 else 0)  # what a copied file's maker gave more bits keeps them
    data = np.array(frequencies, "<f4").tobytes()
    tensor = Tensor("rope's frequencies", source.path, 0, "F32", (len(frequencies),), data)
    return header, {"frequencies": tensor} if frequencies else {}


def read_number(where: Path, values: dict, key: str, default: float | None = None):
    """values[key], or the default where it is absent or null: a number within its limits."""
    low, high, *_ = NUMBERS.get(key, OTHER_LIMITS)
    kind, value = type(low), values.get(key)
    value = default if value is None else value
    if type(value) not in (int, kind) or not low <= value <= high:
        refuse(where, key, f"an integer from {low} to {high}" if kind is int else
               f"a number from {low:g} to {high:g}", repr(value))
    return kind(value)


def read_rotary_dim(where: Path, config: dict, head_dim: int, may_be_part: bool) -> int:
    """How many of a head's numbers rope rotates. 0 stands for all."""
    factor = config["rope"].get("partial_rotary_factor")
    if not may_be_part:
        require(where, "partial_rotary_factor", factor, 1, None)
        return 0
    rotary_dim = int(head_dim * read_number(where, {"factor": factor}, "factor", 0.25))
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        refuse(where, "partial_rotary_factor", f"an even part of {head_dim}", factor)
    return rotary_dim % head_dim


def read_rope(where: Path, config: dict, rotary_dim: int, yarn_factor: float | None) -> tuple:
    """max_seq_len, rope_theta, rope_factor, frequencies. --yarn does as Qwen's model cards say."""
    rope, rope_type = config["rope"], config["rope"]["rope_type"]
    max_seq_len = read_number(where, config, "max_position_embeddings")
    require(where, "rope_type", rope_type, *ROPES)
    if yarn_factor:
        if ROPES[rope_type]:
            refuse(where, "its rope is scaled already: leave --yarn out", "no scaling", rope_type)
        # Qwen3's 40960 positions are the 32768 that it was trained on and 8192 for the answer.
        original = 32768 if max_seq_len == 40960 else max_seq_len
        rope_type, rope = "yarn", rope | {"factor": yarn_factor, ORIGINAL: original}
        longer = config | {"max_position_embeddings": int(yarn_factor * original)}
        max_seq_len = read_number(where, longer, "max_position_embeddings")
    theta = read_number(where, rope, "rope_theta", 10000.0)
    # transformers ignores attn_factor, and each of mscale and mscale_all_dim without the other
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "attn_factor",
             "mrope_section", "mrope_interleaved", *ROPES[rope_type].split()}
    if unknown := sorted(rope.keys() - known):
        refuse(where, f"rope scaling {rope_type}", f"no keys but {', '.join(sorted(known))}",
               list_names(unknown))
    scale = scale_rope if ROPES[rope_type] else lambda *_: (0, ())
    return max_seq_len, theta, *scale(where, rope, theta, rotary_dim, max_seq_len)


def scale_rope(where: Path, rope: dict, theta: float, rotary_dim: int, max_seq_len: int) -> tuple:
    """(factor on cos and sin, rotary_dim / 2 frequencies) of YaRN (arXiv 2309.00071) or a linear
    one. It uses fp32 as transformers does, but fp64 for powers: all machines agree on them."""
    exponents = np.arange(0, rotary_dim, 2, dtype="<f4") / rotary_dim
    powers = (theta ** exponents.astype(float)).astype("<f4")
    if rope["rope_type"] == "linear":
        factor = np.float32(read_number(where, rope, "factor"))
        return 1, tuple((1 / powers / factor).tolist())
    rope = rope | {key: rope.get(key) or None for key in ("beta_fast", "beta_slow")}  # 0: absent
    get = partial(read_number, where, rope)
    original = get(ORIGINAL, max_seq_len)
    factor = get("factor", max_seq_len / original if "factor" in rope else None)  # may be null
    if theta == 1:  # its logarithm is a divisor
        refuse(where, "rope_theta", "another number with YaRN", theta)
    growth = 0.1 * math.log(max(factor, 1))
    attention_factor = growth + 1
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = (growth * get("mscale") + 1) / (growth * get("mscale_all_dim") + 1)
    # Dimensions with more than beta_fast rotations in the original length keep their frequency,
    # those with fewer than beta_slow get frequency / factor; a linear ramp lies in between.
    low, high = (rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
                 for rotations in (get("beta_fast", 32), get("beta_slow", 1)))
    require(where, "truncate", repr(truncate := rope.get("truncate", True)), *BOOLEANS)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.arange(rotary_dim // 2, dtype="<f4") - low
    ramp = np.clip(ramp / (high - low if high != low else 0.001), 0, 1)
    frequencies = 1 / (factor * powers) * (1 - (1 - ramp)) + 1 / powers * (1 - ramp)
    return get("attention_factor", attention_factor), tuple(frequencies.tolist())


# ---- Vocabulary: tokenizer.json as byte strings with merge scores --------------------------------

# Qwen's pre-tokenizers, by the name that GGUF files give them. They differ in what is a letter. (In
# Qwen3.5's the one character before a word, [^\r\n\p{L}\p{N}]?, may be a mark, \p{M}. But then the
# word could begin with it: the piece is the same. So qwen3.c needs to know only what is a letter.)
LETTERS = {"qwen2": r"\p{L}", "qwen35": r"\p{L}\p{M}"}
PRE_TOKENIZERS = {name: [
    {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex":
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + (
            letters if name == "qwen2" else f"[{letters}]") + r"+|\p{N}| ?[^\s" + letters
        + r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"}},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]
    for name, letters in LETTERS.items()}


def decode_vocabulary(where: Path, model: dict, added: dict, vocab_size: int) -> tuple[dict, dict]:
    """Two dicts: id -> the token's bytes; id -> score, of tokens that a merge makes."""
    with parsing(where):
        named = dict(model["vocab"])
        merges = [(str(left), str(right)) for left, right in (
            merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])]
    for i in [*named.values(), *(i for i, _ in added.values())]:
        if type(i) is not int or not 0 <= i < vocab_size:
            refuse(where, "ids", f"0 to {vocab_size - 1}, as vocab_size says", repr(i))
    # GPT-2's letters for bytes: a printable byte's is itself, the n-th other byte's is U+0100 + n.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = dict(zip(letters, sorted(range(256), key=lambda byte: chr(byte) not in letters)))
    # Merges find all tokens but the added ones, and of these such as tokenizer.add_tokens() has
    # added although merges make them: they are found both before merges and by them.
    made = {*map("".join, merges), *letters}
    merged = {text: i for text, i in named.items() if text not in added or text in made}
    both = merged.keys() & added.keys()
    if foreign := sorted({*"".join(merged)} - byte_of.keys()):
        refuse(where, "vocabulary", "GPT-2's letters for bytes", repr(foreign[0]))
    # A special one could be forged; other letters than ASCII's stand for other bytes.
    if bad := sorted(x for x in both if added[x][1] & SPECIAL or not x.isascii()):
        refuse(where, "added tokens of the vocabulary", "ASCII and not special", list_names(bad))
    if (longest := max(map(len, named), default=0)) > LONGEST:  # a letter is a byte
        refuse(where, "tokens", f"at most {LONGEST} bytes in each", longest)
    scores = score_merges(where, merged, merges)
    scores |= {merged[text]: 0.0 for text in both & {*letters}}  # no merge makes it
    tokens = {i: bytes(map(byte_of.__getitem__, text)) for text, i in merged.items()}
    if absent := {bytes([byte]) for byte in range(256)} - set(tokens.values()):
        refuse(where, "vocabulary", "all 256 single bytes", f"{256 - len(absent)} of them")
    tokens |= {i: text.encode() for text, (i, _) in added.items()}
    if len(tokens) != len(merged.keys() | added.keys()) or b"" in tokens.values():
        refuse(where, "tokens", "each with a text and an id of its own", "one without")
    new_ids = itertools.count(len(named))  # The package counts so, whatever ids the file gives.
    for text, (i, _) in added.items():
        if i != (counted := named[text] if text in named else next(new_ids)):
            refuse(where, f"id of added token {text!r}", f"{counted}, as the package counts", i)
    return tokens, scores


def check_pipeline(where: Path, tokenizer: dict) -> tuple[bool, str]:
    """Refuses a tokenizer.json that does what qwen3.c does not. Returns True if it normalizes to
    NFC, and what it takes for letters."""
    model = tokenizer["model"]
    require(where, "model", model.get("type"), "BPE")
    for key in sorted(model.keys() - {"type", "vocab", "merges", "fuse_unk"}):
        require(where, f"model.{key}", model[key] or "none", "none")
    steps = (tokenizer["pre_tokenizer"] or {}).get("pretokenizers", [])
    steps = [{key: step[key] for key in step if key != "trim_offsets"} for step in steps]
    if steps not in PRE_TOKENIZERS.values():
        refuse(where, "pre_tokenizer is not supported", "Qwen's", tokenizer["pre_tokenizer"])
    normalizer = tokenizer["normalizer"] or {"normalizers": []}
    used = normalizer.get("normalizers", [normalizer])
    require(where, "normalizer", used, [{"type": "NFC"}], [])
    return bool(used), next(LETTERS[key] for key, known in PRE_TOKENIZERS.items() if known == steps)


# Flags of an added token: not printed; found after NFC; a word that users' texts in chat may have
SPECIAL, NORMALIZED, WORD = 1, 2, 4


def read_added(where: Path, tokenizer: dict, settings: dict, nfc: bool) -> dict:
    """Text -> (id, flags) of tokenizer.json's added tokens and of those that the settings,
    tokenizer_config.json, have besides. One is special if a file says so or gives it a role."""
    def read(token: dict, token_id: int) -> tuple[str, int, int]:
        """(text, id, flags) of an entry."""
        for flag in ("lstrip", "rstrip", "single_word"):
            require(where, f"{flag} of {token['content']!r}", bool(token.get(flag)), False)
        text, normalized = token["content"], bool(token.get("normalized"))
        if nfc and normalized:  # older packages leave this to whoever reads the file
            text = normalizers.NFC().normalize_str(text)
        if len(text.encode()) > LONGEST_ADDED:
            refuse(where, "added_tokens", f"up to {LONGEST_ADDED} bytes in each", text)
        return text, token_id, SPECIAL * bool(token["special"]) + NORMALIZED * normalized

    with parsing(where):
        entries = [read(token, token["id"]) for token in tokenizer["added_tokens"]]
        decoder = settings.get("added_tokens_decoder") or {}
        more = sorted((read(token, int(i)) for i, token in decoder.items()), key=lambda x: x[1])
        roles = [(text, None, SPECIAL) for text in read_roles(settings).values()]
    for key in "split_special_tokens", "add_prefix_space":
        require(where, f"{key} (of tokenizer_config.json)", settings.get(key), False, None)
    added = {text: (token_id, flags) for text, token_id, flags in entries}
    if added.keys() <= {text for text, *_ in more}:  # else transformers forgets those of entries
        added |= {text: (i, flags) for text, i, flags in more if text not in added}
    for text, token_id, flags in more + roles:
        if text not in added or token_id not in (None, added[text][0]):
            refuse(where, "added_tokens", f"{text!r} of tokenizer_config.json, added_tokens.json "
                   "(AutoTokenizer's save_pretrained() writes it)",
                   "it with another id" if text in added else "no such token")
        added[text] = added[text][0], added[text][1] | flags & SPECIAL
    return added


def read_post_processor(where: Path, tokenizer: dict) -> tuple[list[int], list[int]]:
    """The ids that tokenizer.json's post-processor puts before and after every text."""
    ids: list[int | None] = [None]  # None: the text
    processor = tokenizer.get("post_processor") or {"type": "ByteLevel"}
    for step in processor["processors"] if processor["type"] == "Sequence" else [processor]:
        require(where, "post_processor", step["type"], "ByteLevel", "TemplateProcessing")
        if step["type"] == "ByteLevel":  # adds no id
            continue
        inner, ids = ids, []
        for piece in step["single"]:
            token = piece.get("SpecialToken", {}).get("id")
            if piece.get("Sequence", {}).get("id") == "A":
                ids += inner
            elif token in step["special_tokens"]:
                ids += read_ids(where, step["special_tokens"][token]["ids"])
            else:
                refuse(where, "post_processor", "the text A and tokens that it lists", piece)
            if len(ids) > MOST_IDS + 1:
                refuse(where, "post_processor", f"at most {MOST_IDS} ids", "more")
    (at,) = (i for i, token in enumerate(ids) if token is None)  # ValueError if not once
    return ids[:at], ids[at + 1:]


def read_roles(tokenizer_config: dict) -> dict[str, str]:
    """Role (eos_token, ...) -> text of the token, which tokenizer_config.json writes as it is or as
    an object that holds it. Tokens of a list have a number each for a role."""
    roles = {role: tokenizer_config.get(role) for role in ("bos_token", "eos_token", "pad_token",
                                                           "unk_token")}
    for key in "additional_special_tokens", "extra_special_tokens":  # transformers 4's and 5's
        more = tokenizer_config.get(key) or []
        roles |= more if isinstance(more, dict) else dict(enumerate(more, len(roles)))
    return {str(role): str(token["content"] if isinstance(token, dict) else token)
            for role, token in roles.items() if token}


def score_merges(where: Path, vocab: dict[str, int], merges: list[tuple]) -> dict[int, float]:
    """id -> -log(rank + 1) of the merge that makes the token. qwen3.c has these scores and no list
    of merges: of all neighbours that together are a token it merges those with the best score.
    This gives the list's ids if two things hold, and all else is refused: the merges that make one
    token follow each other, and the package encodes the token's text to that token alone. A token
    that no merge makes (Qwen3.5 has 201) has no score: no text becomes it, as in the package."""
    scores: dict[int, float] = {}
    previous = -1
    for rank, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            refuse(where, f"merge {rank}", "tokens of the vocabulary", [left, right])
        made = vocab[left + right]
        if made not in scores:
            scores[made] = -math.log(rank + 1)
        elif made != previous:
            refuse(where, f"merge {rank} makes {left + right!r} again", "one rank", [left, right])
        previous = made
    bpe = models.BPE(vocab=vocab, merges=merges)
    for token, made in vocab.items():
        if made in scores and len(bpe.tokenize(token)) != 1:
            refuse(where, f"token {token!r}", "merges that make it", "none that do")
    return scores


# ---- Unicode: the tokenizers package's character classes and NFC as tables -----------------------
# The package's regular expressions, its normalizer and Python have three versions of Unicode. So
# the package says what it does to each character; Python says only by what it orders the marks.

# All code points that may be assigned: planes 0 to 3 and 14, without the surrogates
CHARACTERS = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000)]))


def make_unicode_sections(nfc: bool, letters: str) -> dict[str, bytes]:
    """The tokenizer file's section `clas` and, if the tokenizer has NFC, `ccc ` and the `nfc`s."""
    def find_runs(classes: dict[int, int]) -> np.ndarray:
        """Rows of (first, last, class), one for each run of code points of one class, ascending."""
        codes, numbers = np.array(sorted(classes.items())).T
        last = np.flatnonzero((np.diff(codes, append=-1) != 1) | (np.diff(numbers, append=0) != 0))
        first = [0, *last[:-1] + 1]
        return np.stack([codes[first], codes[last], numbers[last]], axis=1)

    classes = {ord(char): number for number, pattern in enumerate((letters, r"\p{N}", r"\s"), 1)
               for piece, _ in pre_tokenizers.Split(Regex(f"[{pattern}]+"), "removed", invert=True)
               .pre_tokenize_str(CHARACTERS) for char in piece}
    if not nfc:
        return {"clas": pack_u32(*find_runs(classes))}
    # Canonical combining classes, of the marks that NFD sorts by it
    decompose, compose = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    low, high = "\u0334", "\u0345"  # marks of the lowest class, 1, and of the highest, 240
    marks = {ord(char): unicodedata.combining(char) for char in CHARACTERS
             if unicodedata.combining(char)
             and char in (text := decompose(high + char + low))  # else decomposed before the sort
             and text != high + char + low}
    # `nfcq`: NFC changes them or may compose them with the character before (the quick check).
    # `nfcd`, `nfcc`: rows of a character, a number and that part of it; of a pair and what it makes.
    changed, decomposed, composed = {}, [], []
    for char in CHARACTERS:
        if (parts := decompose(char)) == char:
            continue
        stays = compose(char) == char
        changed[ord(parts[-1] if stays else char)] = 1
        if stays:
            composed.append((ord(compose(parts[:-1])), ord(parts[-1]), ord(char)))
        if not "\uac00" <= char <= "\ud7a3":  # Hangul would only compose again
            decomposed += [(ord(char), i, ord(part)) for i, part in enumerate(parts)]
    words = {tag: b"".join(struct.pack("<Q", a << 42 | b << 21 | c) for a, b, c in sorted(rows))
             for tag, rows in (("nfcd", decomposed), ("nfcc", composed))}
    return {"clas": pack_u32(*find_runs(classes)), "ccc ": pack_u32(*find_runs(marks)),
            "nfcq": pack_u32(*find_runs(changed)), **words}


# ---- Chat: the checkpoint's Jinja template as twelve strings -------------------------------------
# qwen3.c has no Jinja. It renders a conversation from twelve strings (Pieces). Marked contents show
# them in the template's text. They must then make the template's text of many trial conversations.

TEMPLATE_SECONDS = 20  # Qwen's templates take 0.3
TURN_END = "<|im_end|>"  # in ChatML
Message = tuple[str, str]  # role, content
Conversation = tuple[tuple[Message, ...], "bool | None"]  # thinking; None: off, opens no answer


class Pieces(namedtuple("Pieces", "start no_system system_open system_close user_open user_close "
                        "assistant_open assistant_close answer_plain answer_think strip trim "
                        "begun alone_to_think system_to_think keeps join", defaults="\n")):
    """In the order of the section `chat`. no_system follows start where there is no system message;
    answer_plain and answer_think open an answer to be generated. An earlier answer is cut up to and
    including the last `strip`, and loses the characters in `trim` at its beginning. `begun`, which
    opens an answer whose beginning is given, has a section of its own, as have the two that are in
    place of no_system and system_open with thinking. An answer keeps its thought behind `keeps`.
    `join` stands between the text parts of a content, where the template takes parts."""

    def render(self, messages: tuple[Message, ...], thinking: bool, strips=False) -> str:
        """strips: before all else contents lose the blanks at their ends."""
        alone = self.alone_to_think if thinking else self.no_system
        text = self.start + ("" if messages[0][0] == "system" else alone)
        for role, content in messages:
            content = content.strip() if strips else content
            opening = (self.system_to_think if role == "system" and thinking else
                       getattr(self, f"{role}_open"))
            if role == "assistant" and self.keeps and self.strip in content:
                opening = opening.replace(self.keeps, self.keeps + split_thought(content)[1])
            if role == "assistant" and self.strip and self.strip in content:
                content = content.rpartition(self.strip)[2].lstrip(self.trim)
                content = content.strip() if self.keeps else content
            text += opening + content + getattr(self, f"{role}_close")
        return text + (self.answer_think if thinking else self.answer_plain)


def split_thought(content: str) -> tuple[str, ...]:
    """An answer's content, and its thought, if there is one."""
    thought, end, rest = content.rpartition(THINK_END)
    return (rest, thought.strip().removeprefix("<think>").strip()) if end else (rest,)


def find_verified_pieces(template: str | None, variables: dict[str, str]) -> tuple:
    """A template's verified pieces, or None, and the tags of empty sections (see qwen3.c)."""
    if not template:
        Notices.hints.append("no chat template: qwen3 will " + (
            "chat in ChatML, whose end token it has" if variables.get("eos_token") == TURN_END else
            "continue texts; -m chat uses ChatML"))
        return None, []
    try:
        texts = render_all(template, variables, MARKED)
        pieces = find_pieces(texts, variables.get("bos_token", ""))
        parts = re.search("(?s)PARTONE(.{,16})PARTTWO", str(texts[PARTS]))  # 64 bytes
        if parts and pieces.render((("user", parts[0]),), False) == texts[PARTS]:
            pieces = pieces._replace(join=parts[1])
        trials = make_trials(pieces.user_close + pieces.user_open, template)
        apart = {(talk, thinking): (tuple(  # with `keeps` thoughts are, as servers give them
            (role, *split_thought(x)) if pieces.keeps and role == "assistant" else (role, x)
            for role, x in talk), thinking) for talk, thinking in sum(trials.values(), [])}
        texts = render_all(template, variables, [*apart.values()])
        texts = {talk: texts[other] for talk, other in apart.items()}
        wrong, if_stripped = (
            {kind: [talk for talk in talks if pieces.render(*talk, strips) != texts[talk]]
             for kind, talks in trials.items()} for strips in (False, True))
        strips = len(sum(if_stripped.values(), [])) < len(sum(wrong.values(), []))
        wrong = if_stripped if strips else wrong
        for messages, _ in [talk for talk in wrong[""] if not talk[1]]:
            raise ValueError(f"it differs for {messages}, enable_thinking=False")
        "".join(pieces).encode()  # a ValueError, too, for half a surrogate pair
    except ValueError as error:
        reranker = re.search("[\"']document[\"']", template)
        Notices.hints.append(
            "a reranker's chat template: give qwen3 -o 'yes|no' and texts as \"Search\" in "
            ".github/RECIPES.md makes them" if reranker else "warning: the chat template is more "
            f"than fixed strings around the messages, qwen3 will chat in plain ChatML: {error}")
        return None, [] if reranker else ["gues"]
    later, odd = wrong.pop(LATER), {thinking for _, thinking in wrong[SYSTEMS]}
    if kinds := [(kind or "talks") + (" with thinking" if all(x[1] for x in talks) else
                                      " (an error in qwen3)" if kind == SYSTEMS else "")
                 for kind, talks in wrong.items() if kind in ("", SYSTEMS) and talks or any(
                     not (x in odd and m[0][0] == "system" or x and wrong[""]) for m, x in talks)]:
        literals = [kind for kind in kinds if kind.startswith(LITERAL)]
        if kinds := [kind for kind in kinds if kind not in literals]:
            Notices.hints.append("warning: the chat template is more than fixed strings around the "
                                 f"messages, what qwen3 makes differs for {list_names(kinds, 99)}")
        if literals:
            names = list_names([kind.removeprefix(LITERAL).removesuffix(" with thinking")
                                for kind in literals])
            Notices.hints.append(f"{LITERAL}{names}: there it does something else, as for a tool's "
                                 "results; to qwen3 they are texts as others")
    tags = {"keep": pieces.keeps, "strp": strips, "nosy": False in odd, "syst": not (odd or later)}
    return pieces, [tag for tag, holds in tags.items() if holds]


def render_all(template: str, variables: dict, conversations: list) -> dict[Conversation, Any]:
    """The text that a template makes of each conversation, or the ValueError that it raises; raises
    one if it can't be compiled. It is untrusted, may never end or take all memory, so it runs in a
    process of its own. If that fails, the machine may be slow or full: nothing is exported."""
    code = ("import json, re, resource, sys; from contextlib import suppress; "
            "sys.path += sys.argv[1:]; import jinja2.sandbox\n"
            f"{inspect.getsource(run_template)}run_template()")
    found = "none"
    packages = [str(Path(module.__file__).parents[1]) for module in (jinja2, markupsafe)]
    try:
        done = subprocess.run(  # -I -S: with no modules but Python's own and these
            [sys.executable, "-I", "-S", "-c", code, *packages], stdout=subprocess.PIPE,
            input=json.dumps([template, variables, conversations]), stderr=subprocess.DEVNULL,
            encoding="ascii", timeout=TEMPLATE_SECONDS, env={})
        found = f"exit status {done.returncode}"
        results, error = json.loads(done.stdout or "{}")
    except (subprocess.TimeoutExpired, ValueError):
        refuse("the chat template", "it can't be tried out", "an end of its process within "
               f"{TEMPLATE_SECONDS} s and 400 MB of memory (try again?)", found)
    if error:
        raise ValueError(error)
    return {conversation: ValueError(failed) if failed else text
            for conversation, (text, failed) in zip(conversations, results)}


def run_template() -> None:
    """That process: render_all()'s arguments come by stdin, and [[text, error] of each, error] goes
    to stdout, as JSON. As in transformers (chat_template_utils.py, render_jinja_template)."""
    with suppress(ValueError, OSError):  # macOS: no limit
        resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))
    def fail(message):
        raise jinja2.TemplateError(message)

    source, variables, conversations = json.load(sys.stdin)
    # transformers' block {% generation %}, which marks what is trained on, is as {% with %} here.
    source = re.sub(r"(\{%-?\s*(?:end)?)generation(\s*-?%\})", r"\1with\2", source)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    env.globals.update(raise_exception=fail, strftime_now=lambda _: fail("it writes the date"))
    size = 0

    def attempt(act, *arguments):
        try:
            return act(*arguments), None
        except MemoryError:
            sys.exit(1)
        except Exception as exception:  # whatever else a template may raise
            return None, f"{type(exception).__name__}: {exception}"[:1000]

    def render(messages, thinking):
        nonlocal size
        text = template.render(
            messages=[{"role": role, "content": content if isinstance(content, str) else
                       [{"type": "text", "text": text} for text in content],
                       **dict(zip(["reasoning_content"], thought))}
                      for role, content, *thought in messages],
            tools=None, documents=None, add_generation_prompt=thinking is not None,
            **variables, enable_thinking=bool(thinking))
        size += len(text)
        return text if size <= 5_000_000 else fail("it makes more than 5,000,000 characters")

    template, error = attempt(env.from_string, source)
    results = [] if error else [attempt(render, *x) for x in conversations]
    print(json.dumps([results, error]))


SYSTEM, USER, ANSWER, NEXT = (("system", "SYSTEMTEXT"), ("user", "USERTEXT"),
                              ("assistant", "ANSWERTEXT"), ("user", "NEXTTEXT"))
THINK_END = "</think>"
TALK = USER, ANSWER, NEXT
# Character -> TALK with a thought before the answer, which ends with the character. A template that
# strips a thought, and the character after it, makes TALK's text of it.
THOUGHT = {char: (USER, ("assistant", f"<think>x{THINK_END}{char}{ANSWER[1]}"), NEXT)
           for char in ["", *" \t\n\r\v\f"]}
PARTS = (("user", ("PARTONE", "PARTTWO")),), False
MARKED: list[Conversation] = [  # find_pieces() needs their texts
    ((SYSTEM, *TALK), None), ((USER, ANSWER), None), ((USER,), None), ((USER,), False),
    ((USER,), True), (TALK, None), *((messages, None) for messages in THOUGHT.values()),
    ((SYSTEM, USER), True), PARTS, ((USER, (*ANSWER, "x"), NEXT), None)]


def find_pieces(texts: dict[Conversation, str], bos: str) -> Pieces:
    """The pieces that a template seems to have. ValueError if a text has not each message once."""
    def find_gaps(*messages: Message, thinking: bool | None = None) -> list[str]:
        """The rendered text before, between and after the contents."""
        rest, before = texts[messages, thinking], []
        if isinstance(rest, ValueError):
            raise rest
        for _, content in messages:
            if rest.count(content) != 1:
                raise ValueError(f"it writes {content} {rest.count(content)} times")
            gap, rest = rest.split(content)
            before.append(gap)
        return before + [rest]

    # A gap is one piece, or two of which one is known from another gap. ChatML's gaps of (USER,
    # ANSWER) are "<|im_start|>user\n", which is user_open; "<|im_end|>\n<|im_start|>assistant\n",
    # which is user_close and assistant_open; and "<|im_end|>\n", which is assistant_close. After
    # a last message of a user there is user_close alone: so the second gap can be cut in two.
    _, before_answer, after_answer, user_close = find_gaps(*TALK)
    assistant_open = before_answer.removeprefix(user_close)
    _, before_last_answer, assistant_close = find_gaps(USER, ANSWER)
    user_open = after_answer.removeprefix(assistant_close)
    no_system = find_gaps(USER)[0].removesuffix(user_open)
    first, after_system = bos, ""
    with suppress(ValueError):  # it refuses a system message
        first, after_system, *_ = find_gaps(SYSTEM, *TALK)
    start = bos if first.startswith(bos) and no_system.startswith(bos) else ""
    alone, end = find_gaps(USER, thinking=True)
    thinks = end.startswith(user_close)  # else it changes USER, too
    to_think = no_system, first
    if thinks:
        with suppress(ValueError):
            to_think = alone.removesuffix(user_open), first and find_gaps(
                SYSTEM, USER, thinking=True)[0]
    keeps = texts[MARKED[-1]] == texts[TALK, None].replace("<think>\n", "<think>\nx")
    plain, think = (find_gaps(USER, thinking=x)[1].removeprefix(user_close) for x in (False, thinks))
    trim = [char for char, talk in THOUGHT.items() if texts[talk, None] == texts[TALK, None]]
    trim = trim or ["\n"] * (THINK_END in assistant_open)
    return Pieces(start, no_system.removeprefix(start), first.removeprefix(start),
                  after_system.removesuffix(user_open), user_open, user_close, assistant_open,
                  assistant_close, plain, think, THINK_END if trim else "", "".join(trim),
                  before_last_answer.removeprefix(user_close),
                  *(text.removeprefix(start) for text in to_think),
                  "<think>\n" if keeps and "<think>\n" in assistant_open else "")


def find_marks(template: str | None, variables: dict, pieces: Pieces | None, added: dict) -> set:
    """The added tokens that set messages apart in the template's text: no text in chat makes one.
    They are the symbols of a gap between contents; where it has none, its words, which could forge
    it; and what the template's source has with symbols around it, as <tool_call> (for tools)."""
    if not template or not added:
        return {"<think>", "</think>"}  # of ChatML
    symbols = {text for text in added if re.search(r"[^\w\s]", text)}
    marks = {text for text in symbols if re.fullmatch(r"(?s)[^\w\s].*\w.*[^\w\s]", text)
             and (not pieces or text in template + pieces.no_system)}
    pieces = pieces and pieces._replace(no_system="", trim="", alone_to_think="", join="")
    gaps = {(piece, True) for piece in pieces or ()}
    names = "\n".join(symbols)  # '<' + m.role + '>' may write any role
    roles = re.findall(r"[^\W\d]+", f"tool {names} {names.lower()} {names.replace('_', ' ')}")
    talks = [((USER, ANSWER, (role, NEXT[1])), False) for role in sorted({*roles})[:1000]]
    with suppress(ValueError):  # it can't be compiled
        texts = render_all(template, variables, [*MARKED[:6], *talks])
        gaps |= {(gap, talk in MARKED) for talk, text in texts.items()
                 for gap in re.split("(?:SYSTEM|USER|ANSWER|NEXT)TEXT", str(text))[1:]}
    first, last = (re.compile("|".join(map(re.escape, sorted(
        (text for text in added if added[text][1] & NORMALIZED == kind), key=len, reverse=True)))
        or "(?!)") for kind in (0, NORMALIZED))  # of those that are looked for first, and last
    for gap, of_chat in gaps:
        found = {*first.findall(gap), *last.findall(first.sub("\0", gap))}
        safe = {text for text in found if text in symbols or added[text][1] & SPECIAL}
        marks |= safe or {x for x in found if of_chat and re.search(rf"\b{re.escape(x)}\b", gap)}
    return marks


LATER, SYSTEMS = "later system messages", "system messages"  # kinds of trials
LITERAL = "texts with the chat template's own "  # and that


def find_literals(template: str) -> list[str]:
    """Up to 60 strings, of up to 60 letters, in a template's statements: it may look for them."""
    tags = " ".join(re.findall(r"(?s)\{[{%].*?[%}]\}", template))
    found = re.findall(r"""'((?:\\.|[^'\\])*)'|"((?:\\.|[^"\\])*)\"""", tags)
    texts = (("".join(x).replace("\\n", "\n")).strip() for x in found)
    return [*dict.fromkeys(text for text in texts if 2 < len(text) <= 60)][:60]


def make_trials(mark: str, template: str) -> dict[str, list[Conversation]]:
    """Kind -> conversations whose last message is the user's. "" is ordinary talk, of one to four
    turns. Others have a text of the kind at each place. `mark` ends a turn and begins the next."""
    think, no_thought = "<think>\nlet me see\n</think>\n\n", "<think>\n\n</think>\n\n"
    user, answer, system = ("user", "Hi!\n\nA?"), ("assistant", "Yes\n\n- 2"), ("system", "Be so.")
    talks = [((user, answer, ("user", "Why?"), answer) * 11)[:n] for n in (1, 3, 5, 7, 9, 11, 41)]
    kinds = {"": talks[:4], SYSTEMS: [(system, *talk) for talk in talks[:4]],
             LATER: [(*talk[:i], system, *talk[i:]) for talk in talks[1:4] for i in (1, 2)],
             "two messages of one role": [(user, user), (user, answer, answer, user)],
             "talks of 9 messages or more": talks[4:], "answers that thought": [
                 (user, ("assistant", f"{thought}A.\n\n- b"), *talk)
                 for talk in talks[:2] for thought in (think, no_thought)]}
    for kind, texts in {
            "texts with blanks at an end": [" Hi!", "Hi!\n", "\n\n  two\nlines \n", "\xa0z\u2028"],
            "empty texts": [""], "texts with tabs or \\r\\n": ["a\tb", "a\r\nb"],
            "texts of over 200 letters": ["word " * 60 + "x"], "texts with <image>": ["<image>\nA"],
            "texts with /think or /no_think": ["Why? /think", "/no_think\nWhy?"],
            "texts with the template's marks": [f"a{mark}b", "a<|im_end|>\n<|im_start|>user\nb"],
            "texts with <think> or </think>": [
                "what does </think> mean?", "<think>hm</think> so", "</think>", "<think>\ncut off",
                f"{think}It is `</think>`.\n\nYes.", f"x {think}{think}\n\n \t\n Paris.",
                "a</think>\r\x0b b", "a</think>\xa0\u2028z"]}.items():
        kinds[kind] = [talk for text in texts for talk in (
            (("user", text),), (user, answer, ("user", text)), (("user", text), answer, user),
            (user, ("assistant", text), user), (("system", text), user))]
    known = "".join(text for talks in kinds.values() for talk in talks for _, text in talk)
    thought = "assistant", f"{think}A."
    for text in (text for text in find_literals(template) if text not in known):
        around = f"{text}x{re.sub('^<(?=[a-z])', '</', text)}"  # as <tool_response>...
        kinds[LITERAL + text] = [talk for x in (text, f"x {text} y", around) for talk in (
            (("user", x),), (user, thought, ("user", x)), (user, ("assistant", x), user),
            (("system", x), user))]
    return {kind: [(talk, thinking) for talk in talks for thinking in (False, True)]
            for kind, talks in kinds.items()}


# ---- The tokenizer file: everything that is not a weight or a dimension --------------------------

CHAT, GENERATE, EMBED = 0, 1, 4  # qwen3.c's modes
# Settings in generation_config.json that qwen3.c does not have
UNKNOWN = """min_p max_new_tokens num_beams typical_p suppress_tokens bad_words_ids stop_strings
    no_repeat_ngram_size sequence_bias presence_penalty frequency_penalty""".split()


def make_tokenizer(source: Source, vocab_size: int) -> tuple[bytes, bytes]:
    """OUT.bin.tokenizer in the base format, and the sections of its extension but for `from`."""
    where, path = source.file("tokenizer.json"), source.file("generation_config.json")
    with parsing(where):
        nfc, letters = check_pipeline(where, source.tokenizer)
        head_ids, tail_ids = read_post_processor(where, source.tokenizer)
        roles = read_roles(source.tokenizer_config)
    added = read_added(where, source.tokenizer, source.tokenizer_config, nfc)
    tokens, scores = decode_vocabulary(where, source.tokenizer["model"], added, vocab_size)
    bos, eos, stop_ids = find_end_ids(source, added, roles.get("eos_token"))
    if unknown := [i for i in (bos, *head_ids, *tail_ids, *stop_ids) if i >= vocab_size]:
        refuse(source.path, "token ids", f"ids below vocab_size, {vocab_size}", unknown)
    if not isinstance(source.chat_template, str | None):
        refuse(source.path, "chat_template", "a text", repr(source.chat_template))
    pieces, tags = find_verified_pieces(source.chat_template, roles)
    opens = [f"<|im_start|>{role}\n" for role in ("system", "user", "assistant")]
    guess = ["", "", *(text for x in opens for text in (x, f"{TURN_END}\n")), opens[2], opens[2],
             "", "", ""] if "gues" in tags and "<think>" not in source.chat_template else []
    marks = find_marks(source.chat_template, roles, pieces, added)
    for text, (i, flags) in added.items():
        is_mark = text in marks or text.startswith("<|") and text.endswith("|>")
        added[text] = i, flags if flags & SPECIAL or is_mark else flags | WORD
    if words := [text for text, (_, flags) in added.items() if flags & SPECIAL and text.isalpha()]:
        Notices.hints.append(f"special tokens that no text in chat makes: {list_names(words)}")
    # A base model's texts do not end with the end of a chat's turn.
    turn_end = {i for text, (i, _) in added.items() if pieces and text in pieces.assistant_close}
    chats = (not turn_end or turn_end & set(stop_ids) if source.chat_template else
             roles.get("eos_token") == TURN_END)
    mode = EMBED if source.embedding else CHAT if chats else GENERATE
    if mode == GENERATE and source.chat_template:
        Notices.hints.append("the end of a chat's turn ends no text, as in a base model: qwen3 "
                             "will continue texts; if it was tuned to chat, run it with -m chat")
    generation = {key: int(value) if type(value) is float and value.is_integer() else value
                  for key, value in source.generation.items() if value is not None}  # top_k 20.0
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}  # HF's
    odd = [key for key in UNKNOWN if generation.get(key) not in (None, 0, 1, [])]
    for key, default in settings.items():
        try:
            settings[key] = read_number(path, generation, key, default)
        except Refused:  # it is advice, and transformers can't follow it either
            odd.append(key)
    if odd:
        Notices.hints.append(f"{path.name}: ignored, as only options or nothing at all sets them: "
                             + ", ".join(f"{key} {generation[key]!r}" for key in odd))
    given = {"temperature", "top_p", "top_k", "do_sample"} & generation.keys() - {*odd}
    *numbers, penalty = settings.values()
    sampling = struct.pack("<2fI", numbers[0] if generation.get("do_sample", True) else 0, *numbers[1:])
    plain = b""
    if "Qwen3_5" in source.family.architectures and mode == CHAT and not given:  # 0.8B to 9B
        sampling, plain = (struct.pack("<2fIf", *card) for card in ((1.0, 0.95, 20, 1.5),
            (1.0, 1.0, 20, 2.0) if source.config["hidden_size"] == 1024 else (0.7, 0.8, 20, 1.5)))
        Notices.hints.append("no sampling settings in the checkpoint: those that Qwen3.5's cards "
                             "advise (qwen3 -v says them)")
    sections = {
        "adde": pack_u32(*sorted(added.values())), **make_unicode_sections(nfc, letters),
        "head": pack_u32(head_ids), "tail": pack_u32(tail_ids), "stop": pack_u32(stop_ids),
        "samp": sampling if given or plain else b"", "plai": plain,
        "repe": b"" if penalty == 1 else struct.pack("<f", penalty),
        "mode": b"" if mode == CHAT else pack_u32([mode]),
        "chat": b"".join(pack_bytes(piece.encode()) for piece in (pieces or guess)[:12]),
        "thin": b"".join(pack_bytes(piece.encode()) for piece in pieces[13:15]) if pieces and (
            pieces[13:15] != (pieces.no_system, pieces.system_open)) else b"",
        "begn": pieces.begun.encode() if pieces else b""}
    sections = {key: data for key, data in sections.items() if data} | dict.fromkeys(tags, b"") | (
        {"join": pieces.join.encode()} if pieces and pieces.join != "\n" else {})
    extension = b"".join(key.encode() + pack_bytes(data) for key, data in sections.items())
    records = b"".join(struct.pack("<f", scores.get(i, -1e6))
                       + pack_bytes(tokens.get(i, b"")) for i in range(vocab_size))
    source.tokenizer.clear()  # the tensors' names may take as much memory
    return struct.pack("<3I", max(map(len, tokens.values())), bos, eos) + records, extension


def join_tokenizer(base: bytes, extension: bytes, origin: bytes = b"") -> bytes:
    """The contents of OUT.bin.tokenizer. Its last section, `from`, tells people of its origin."""
    extension += b"from" + pack_bytes(origin) if origin else b""
    return base + b"q3tx" + struct.pack("<I", 1) + pack_bytes(extension)


def pack_bytes(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def pack_u32(*rows: list[int] | tuple[int, ...]) -> bytes:
    return np.array(rows, "<u4").tobytes()


def find_end_ids(source: Source, added: dict, eos_token: str | None) -> tuple[int, int, list]:
    """(bos, eos, the ids that end an answer). The ids of config.json and generation_config.json end
    a text; tokenizer_config.json's eos_token may be one more, which ends a chat's turn."""
    (config_bos, config_eos), (generation_bos, generation_eos) = (
        [read_ids(source.file(name), values.get(f"{role}_token_id"), added) for role in ("bos", "eos")]
        for name, values in (("config.json", source.config),
                             ("generation_config.json", source.generation)))
    end_of_text, end_of_turn = ([added[text][0]] if text in added else []
                                for text in ("<|endoftext|>", eos_token))
    bos, eos = config_bos + generation_bos + end_of_text, config_eos + generation_eos + end_of_text
    if not bos or not eos:
        refuse(source.path, "bos_token_id or eos_token_id", "an id or a token <|endoftext|>")
    stop_ids = list(dict.fromkeys(generation_eos + config_eos + end_of_turn or end_of_text))
    if len(stop_ids) > MOST_IDS:
        refuse(source.path, "ids that end an answer", f"at most {MOST_IDS}", len(stop_ids))
    return bos[0], eos[0], stop_ids


def read_ids(where: Path, value: object, added: dict = {}) -> list[int]:
    """eos_token_id and the like: absent, one id or a list of them, or texts of added tokens."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    ids = [added[i][0] if type(i) is str and i in added else i for i in ids]
    if not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        refuse(where, "token id", "an id or a list of ids", repr(value))
    return ids


# ---- Quantization: a tensor's numbers as OUT.bin has them ----------------------------------------

SCALE_SIZES = {32: 0, 8: 4, 4: 2}  # bits of a value -> bytes of its group's scale, a float
# The 16 values of four bits, by k-means on trained models' weights
LEVELS = np.array([-127, -100, -78, -61, -46, -33, -21, -9, 2, 13, 24, 36, 49, 64, 82, 106], "i1")
GGUF_LEVELS = dict.fromkeys(["Q4_0", "Q1_0"], np.arange(-8, 8, dtype="i1").tobytes()) | {
    "IQ4_NL": np.array(gguf.quants.IQ4_NL.kvalues, "i1").tobytes()}  # Q1_0 needs -1 and 1
# Header.eight_bits with LEVELS: v, or k and v without QK-norm (Qwen2), the dearest for their size
EIGHT_BITS = 0b100, 0b110


def choose_quantization(dtypes: Counter[str], widths: Collection[int], bits: int | None,
                        group_size: int | None) -> tuple[int, int, bytes]:
    """(bits, group size, levels: zeros for 8 bits). What the user leaves open is chosen so that
    most of a GGUF file can be copied."""
    kind = next((kind for kind, n in dtypes.items() if 2 * n > dtypes.total()), "no kind")
    bits = bits or (4 if kind in GGUF_LEVELS else 8)
    if not group_size:
        small = bits == 4 or kind == "Q8_0" or any(width % 64 for width in widths)
        group_size = 32 if small else 64
    copies = kind in GGUF_LEVELS and group_size <= BLOCK_SIZES[kind][0]
    levels = GGUF_LEVELS[kind] if copies else LEVELS.tobytes()
    return bits, group_size, levels if bits == 4 else bytes(16)


def encode(tensor: Tensor, bits: int, h: Header) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) of a tensor, copied or quantized, as Output says; no scales with 32 bits."""
    copied = is_copied(tensor, bits, h)
    if blocks := copied and tensor.dtype != "Q1_0":
        data = np.frombuffer(tensor.read_bytes(), [("scale", "<f2"), ("values", "u1", 4 * bits)])
        data = tensor.change(data) if tensor.change else data
    x = data["scale"] if blocks else tensor.read_fp32()
    if not np.isfinite(x).all():
        refuse(tensor.path, tensor.name, "finite numbers", "infinity or NaN")
    if blocks:
        return data["values"].ravel(), x.astype(f"<f{SCALE_SIZES[bits]}")
    if copied:
        x = x.reshape(-1, h.group_size)  # the weights of a group are scale and -scale
        return pack_nibbles((8 + np.sign(x)).astype(np.uint8)), np.abs(x[:, 0]).astype("<f2")
    if bits == 32:
        return x, x[:0]
    if bits == 8:
        return quantize_q8(x, h.group_size)
    most = h.levels[-1] << 15  # what an fp16 scale, up to 65504, surely reaches in each trial
    if (peak := np.abs(x).max()) > most:
        refuse(tensor.path, tensor.name, f"numbers up to {most} for --bits 4", peak)
    return quantize_q4(x, h.group_size, h.levels)


def is_copied(tensor: Tensor, bits: int, h: Header) -> bool:
    """True if OUT.bin has a GGUF file's numbers exactly, as it has the same levels and scales."""
    same = {8: tensor.dtype == "Q8_0", 4: GGUF_LEVELS.get(tensor.dtype) == h.levels}
    return same.get(bits, False) and h.group_size <= BLOCK_SIZES[tensor.dtype][0]


def decode(values: np.ndarray, scales: np.ndarray, bits: int, h: Header) -> np.ndarray:
    """(n,) fp32 of what encode() gives."""
    if bits == 32:
        return values.view("<f4")
    groups = values.reshape(len(scales), -1)
    if bits == 8:
        return (groups.view("i1") * scales[:, None]).ravel()
    codes = np.concatenate([groups & 15, groups >> 4], axis=1)
    levels = np.frombuffer(h.levels, "i1").astype("<f4")
    return (levels[codes] * scales.astype("<f4")[:, None]).ravel()


def quantize_q8(x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(q (n,) int8, scale (n / group_size,) fp32) of x, (n,) fp32, which it overwrites. A group has
    scale = max|x| / 127 and q = rint(x / scale), ties to even, or 0 where the scale is 0."""
    peak = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, group_size))
    scale = peak / np.float32(127)
    x = x.reshape(-1, group_size)
    x /= np.where(scale > 0, scale, np.float32(1))[:, None]
    np.rint(x, out=x)
    np.clip(x, -127, 127, out=x)  # a subnormal scale is so coarse that x / scale may reach 190
    return x.astype(np.int8).ravel(), scale


@cache
def make_level_tables(levels: bytes) -> tuple[np.ndarray, list[np.ndarray]]:
    """numpy's fastest way to the nearest level is a table that has an entry for each small cell of
    values. Returns codes, exact as bounds between levels are n / 2; and for each trial levels, of
    cells of a group whose largest magnitude is 1; nearly exact."""
    known = np.frombuffer(levels, "i1").astype("<f4")
    bounds = (known[:-1] + known[1:]) / 2
    codes = np.searchsorted(bounds, np.arange(-256, 256, 0.5) + 0.25).astype(np.uint8)
    cells = np.linspace(-1, 1, 16384)
    return codes, [known[np.searchsorted(bounds, cells * end / factor)]
                   for end in known[[0, -1]] for factor in (0.8, 0.875, 0.95, 1.025, 1.1)]


def quantize_q4(x: np.ndarray, group_size: int, levels: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Four bits of x, (n,) fp32: bytes (n / 2,) and fp16 scales (n / group_size,), so that
    x ~= levels[code] * scale. A trial maps a group's value of largest magnitude near one end of the
    levels, and the others to their nearest levels l. Its least-squares scale, sum(x l) / sum(l l),
    leaves an error of sum(x x) - sum(x l)^2 / sum(l l). The best trial's scale is rounded to fp16,
    and the codes are chosen for it. Sums have a fixed order: the same on any machine."""
    codes, trials = make_level_tables(levels)
    x = np.ascontiguousarray(x.reshape(-1, group_size).T)  # a column is a group
    high, low = x.max(axis=0), x.min(axis=0)
    peak = np.where(high > -low, high, low)
    x /= np.where(peak, peak, np.float32(1))
    cell = ((x + np.float32(1)) * np.float32(trials[0].size / 2)).astype(np.intp)
    near, products = np.empty_like(x), np.empty_like(x)
    scale, most = np.zeros_like(peak), np.zeros_like(peak)
    for trial in trials:
        np.take(trial, cell, out=near, mode="clip")
        dot = np.multiply(x, near, out=products).sum(axis=0)
        fit = dot / np.maximum(np.multiply(near, near, out=products).sum(axis=0), 1)  # 0: zeros
        better = dot * fit > most
        np.copyto(scale, fit, where=better)
        np.copyto(most, dot * fit, where=better)
    scale = (scale * peak).astype("<f2")
    per_unit = peak / np.where(scale, scale, np.float32(np.inf))
    cell = (x * (2 * per_unit) + np.float32(512)).astype(np.intp)
    return pack_nibbles(np.take(codes, cell, mode="clip").T), scale


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes (groups, group_size) as bytes: byte j of a group has code j in its low half and code
    j + group_size / 2 in its high one."""
    low, high = np.split(codes, 2, axis=1)
    return np.ascontiguousarray(low | high << 4).ravel()


# ---- OUT.bin: the tensors in its order, encoded and written piece by piece -----------------------

PANEL = 16  # rows of a matrix whose 32-bit words alternate in OUT.bin; the last panel has zeros
# A model's tensors: name in a checkpoint, or the one that DEALT gives, where * is a layer, such as
# layers.0, and # an expert's number; in a GGUF file; fp32, int8, or router or a matrix of a layer,
# whose bits the header says; shape; and what is not 0 if the model has the tensor. The last two are
# names of find_sizes(). If a matrix has two rows, attention has the first, a delta rule the second.
TENSORS = [row.split() for row in """
    *.input_layernorm.weight           attn_norm           fp32    dim                always
    *.post_attention_layernorm.weight  ffn_norm            fp32    dim                always
    norm.weight                        output_norm         fp32    dim                always
    *.self_attn.q_norm.weight          attn_q_norm         fp32    head_dim           qk_norm
    *.self_attn.k_norm.weight          attn_k_norm         fp32    head_dim           qk_norm
    *.mlp.gate.weight                  ffn_gate_inp        router  n_experts,dim      n_experts
    *.mlp.shared_expert_gate.weight    ffn_gate_inp_shexp  router  one,dim            shared_expert
    frequencies                        -                   fp32    half_rotary        rope_scaling
    *.linear_attn.conv1d.weight        ssm_conv1d          fp32    channels,one,taps  delta
    *.linear_attn.A_log                ssm_a               fp32    delta_v_heads      delta
    *.linear_attn.dt_bias              ssm_dt.bias         fp32    delta_v_heads      delta
    *.linear_attn.norm.weight          ssm_norm            fp32    delta_head         delta
    *.linear_attn.in_proj_a.weight     ssm_alpha           fp32    delta_v_heads,dim  delta
    *.linear_attn.in_proj_b.weight     ssm_beta            fp32    delta_v_heads,dim  delta
    embed_tokens.weight                token_embd          int8    vocab_size,dim     always
    *.self_attn.q_proj.weight          attn_q              q       q_dim,dim          always
    *.linear_attn.in_proj_q.weight     -                   q       delta_k_dim,dim    delta
    *.self_attn.k_proj.weight          attn_k              k       kv_dim,dim         always
    *.linear_attn.in_proj_k.weight     -                   k       delta_k_dim,dim    delta
    *.self_attn.v_proj.weight          attn_v              v       kv_dim,dim         always
    *.linear_attn.in_proj_v.weight     -                   v       delta_v_dim,dim    delta
    *.self_attn.q_gate.weight          -                   z       q_dim,dim          gated_head
    *.linear_attn.in_proj_z.weight     attn_gate           z       delta_v_dim,dim    delta
    *.self_attn.o_proj.weight          attn_output         o       dim,q_dim          always
    *.linear_attn.out_proj.weight      ssm_out             o       dim,delta_v_dim    delta
    *.mlp.gate_proj.weight             ffn_gate            gate    hidden_dim,dim     dense
    *.mlp.down_proj.weight             ffn_down            down    dim,hidden_dim     dense
    *.mlp.up_proj.weight               ffn_up              up      hidden_dim,dim     dense
    *.mlp.experts.#.gate_proj.weight   ffn_gate_exps       gate    hidden_dim,dim     n_experts
    *.mlp.experts.#.down_proj.weight   ffn_down_exps       down    dim,hidden_dim     n_experts
    *.mlp.experts.#.up_proj.weight     ffn_up_exps         up      hidden_dim,dim     n_experts
    lm_head.weight                     output              int8    vocab_size,dim     classifier
    *.self_attn.q_proj.bias            attn_q              fp32    q_dim              qkv_bias
    *.self_attn.k_proj.bias            attn_k              fp32    kv_dim             qkv_bias
    *.self_attn.v_proj.bias            attn_v              fp32    kv_dim             qkv_bias
    """.strip().splitlines()]
MATRICES = "q k v o gate down up z".split()  # in the order of the bits of Header.eight_bits
# A tensor whose rows are dealt out like cards: the first so many, of find_sizes(), to one tensor,
# the next to another, and so on, again and again. All begin alike, and end in .weight.
DEALT = {f"{begin}{name}.weight": [(size, f"{begin}{target}.weight") for size, target in zip(
    hands[::2], hands[1::2])] for begin, name, *hands in map(str.split, """
    self_attn.q_         proj  gated_head   proj  gated_head   gate
    linear_attn.in_proj_ qkv   delta_k_dim  q     delta_k_dim  k     delta_v_dim  v
    linear_attn.in_proj_ qkvz  delta_head   q     delta_head   k     v_of_k_head  v  v_of_k_head  z
    linear_attn.in_proj_ ba    v_per_k      b     v_per_k      a
    """.strip().splitlines())}
GGUF_NAMES = {  # attn_q.weight -> self_attn.q_proj.weight; ffn_up_exps has all experts
    gguf_name + re.search(r"(\.weight|\.bias)?$", name)[0]: re.sub(r"^\*\.|#\.", "", name)
    for name, gguf_name, *_ in TENSORS} | {f"{gguf_name}.weight": name for gguf_name, name in (
        ("post_attention_norm", "post_attention_layernorm.weight"),
        ("attn_qkv", "linear_attn.in_proj_qkv.weight"), ("ssm_ba", "linear_attn.in_proj_ba.weight"),
        ("ssm_in", "linear_attn.in_proj_qkvz.weight"),  # Qwen3-Next's in its first files
        ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
        *((f"ffn_{x}_shexp", f"mlp.shared_expert.{x}_proj.weight") for x in ("gate", "up", "down"))
    )} | {"ssm_dt": "linear_attn.dt_bias"}  # Ollama's


class Output(NamedTuple):
    """A tensor of OUT.bin. With bits 32: fp32 values. With 8: int8 values, then an fp32 scale a
    group. With 4: bytes of two codes, then an fp16 scale a group."""
    bits: int  # of a value
    names: list[str]  # without "model."; one for each expert, whose rows follow each other
    shape: tuple[int, ...]  # of the tensor with each name
    values: int  # offset of the first value in OUT.bin
    scales: int  # offset of the first scale
    end: int  # offset of what follows
    tensors: list[Tensor]  # the source, whose rows follow each other; none before match_tensors()


def find_sizes(h: Header) -> dict[str, int]:
    """What TENSORS and DEALT name: the header's fields, and what follows from them."""
    k_dim, v_dim = h.delta_k_heads * DELTA_HEAD, h.delta_v_heads * DELTA_HEAD
    per_k = h.delta_v_heads // max(h.delta_k_heads, 1)
    return h._asdict() | {
        "q_dim": h.n_heads * h.head_dim, "kv_dim": h.n_kv_heads * h.head_dim,
        "gated_head": h.head_dim * h.gated_attention, "delta_head": DELTA_HEAD,
        "delta_k_dim": k_dim, "delta_v_dim": v_dim, "channels": 2 * k_dim + v_dim, "one": 1,
        "v_per_k": per_k, "v_of_k_head": per_k * DELTA_HEAD,
        "taps": DELTA_TAPS, "half_rotary": (h.rotary_dim or h.head_dim) // 2, "always": 1,
        "delta": h.attention_every, "qk_norm": not h.no_qk_norm, "dense": not h.n_experts,
        "classifier": not h.shared_classifier}


def lay_out(h: Header) -> list[Output]:
    """The tensors of OUT.bin, in its order, without their source."""
    sizes = find_sizes(h)
    experts = [f"experts.{i}" for i in range(h.n_experts)] + ["shared_expert"] * h.shared_expert
    bits_of = {matrix: 8 if h.eight_bits >> i & 1 else h.layer_bits or 8
               for i, matrix in enumerate(MATRICES)} | {"fp32": 32, "router": 32, "int8": 8}
    outputs, offset = [], HEADER.size
    for _, group in itertools.groupby((row for row in TENSORS if sizes[row[-1]]), key=lambda row:
                                      row[0] if row[2] in ("fp32", "int8") else row[2]):
        rows = list(group)
        layers = range(h.n_layers if "*" in rows[0][0] else 1)
        for layer, (name, _, kind, dims, _) in itertools.product(layers, rows):
            is_delta = h.attention_every and (layer + 1) % h.attention_every
            if (".self_attn." if is_delta else ".linear_attn.") in name:
                continue
            bits, shape = bits_of[kind], tuple(sizes[size] for size in dims.split(","))
            names = [name.replace("*", f"layers.{layer}").replace("experts.#", expert)
                     for expert in (experts if "#" in name else [""])]
            size = len(names) * math.prod(shape)
            if bits < 32 and h.panels:
                size += -len(names) * shape[0] % PANEL * shape[1]
            scales = offset + size * bits // 8
            end = scales + size // h.group_size * SCALE_SIZES[bits]
            outputs.append(Output(bits, names, shape, offset, scales, end, []))
            offset = end
    return outputs


def deal_rows(h: Header, tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Name as in lay_out() -> tensors whose rows follow each other, of the source's tensors."""
    sizes, found, n_parts = find_sizes(h), {}, 0
    for name, tensor in tensors.items():
        layer, rest = re.fullmatch(r"(layers\.\d+\.)?(.*)", name, re.DOTALL).groups("")
        hands = [(sizes[size], layer + target) for size, target in DEALT.get(rest, [])]
        step = sum(rows for rows, _ in hands)
        if again := found.keys() & ({target for _, target in hands} if step else {name}):
            refuse(tensor.path, "tensors", "each once, whole or in parts",
                   f"{list_names(sorted(again))} twice")
        if not step:
            found[name] = [tensor]
            continue
        n_rows, *width = tensor.shape or [0]
        n_parts += len(hands) * (n_rows // step)
        if n_rows % step or not n_rows or n_parts > 4 * MOST_TENSORS:
            refuse(tensor.path, f"shape of {tensor.name}", f"rows in multiples of {step}",
                   [*tensor.shape])
        starts = itertools.accumulate([rows for rows, _ in hands] * (n_rows // step), initial=0)
        for (rows, target), start in zip(hands * (n_rows // step), starts):
            part = tensor.part(start * math.prod(width), rows, *width)
            found.setdefault(target, []).append(part)
    return found


def pad_with_zeros(tensors: list[Tensor], shape: tuple[int, ...], panel: Tensor) -> list[Tensor]:
    """The tensors with OUT.bin's shape. Zeros follow each row when it is read. Of rows of zeros at
    the end, put_in_panels() makes those of the last panel with others; the panel makes more."""
    if more := shape[1:] and shape[-1] - tensors[0].shape[-1]:
        tensors = [tensor._replace(change=lambda x: np.pad(
            x.reshape(-1, shape[-1] - more), ((0, 0), (0, more))).ravel()) for tensor in tensors]
    return tensors + [panel] * ((shape[0] - join_shapes(tensors)[0]) // PANEL)


def join_shapes(tensors: list[Tensor]) -> list[int]:
    """The shape of the tensor that tensors with rows of one shape make."""
    n_rows, *row = tensors[0].shape or [0]
    return [n_rows + sum(tensor.shape[0] for tensor in tensors[1:]), *row]


def match_tensors(source: Source, h: Header, computed: dict) -> tuple[Header, list[Output], list]:
    """Opens the tensors. Returns the header, the outputs with their tensors and what is left out:
    none may be missing or of another shape, nor left over in a GGUF file. A classifier of its own
    counts, as in transformers 5, whatever the config says. Of two tied ones either is enough."""
    where, opened = source.path, source.open_tensors() | computed
    if quantized := source.config.get("quantized"):
        usual = re.compile(r"(?!layers\.).*|.*(\.weight|bias|A_log|_proj|inv_freq)")
        if any(not (usual.fullmatch(name) and x.dtype in FLOAT_TYPES) for name, x in opened.items()):
            refuse(*quantized)
        Notices.hints.append("quantization_config counts for nothing: the weights are whole")
    if h.shared_classifier and not source.embedding and "lm_head.weight" in opened:
        opened.setdefault("embed_tokens.weight", opened["lm_head.weight"])
        opened = drop_copy(opened)
        h = h._replace(shared_classifier="lm_head.weight" not in opened)
        Notices.hints += [] if h.shared_classifier else [
            "lm_head.weight is written, too: it is not the embedding as tie_word_embeddings says"]
    wanted = {name: output.shape for output in lay_out(h) for name in output.names}
    dealt = deal_rows(h, opened)
    h = h._replace(hidden_dim=h.hidden_dim + -h.hidden_dim % h.group_size)  # pad_with_zeros()
    extra = [tensors[0].name for name, tensors in dealt.items() if name not in wanted
             and not (source.embedding and name == "lm_head.weight")
             and not name.endswith(".inv_freq")]  # rope's frequencies, from older programs
    guess = rf"|blk\.{h.n_layers}" if source.family.has_delta else ""  # what guesses a token
    beside = (r"(?:_orig_mod\.|module\.|base_|language_|model\.)*"  # v, mm: Ollama's
              rf"((?:visual|vision_tower|v|mm|mtp|mtp_layers{guess})\.)")
    left_out = sorted({f"{match[1]}*" for name in extra if (match := re.match(beside, name))})
    extra = [name for name in extra if not re.match(beside, name)]
    missing = [name for name in wanted if name not in dealt]
    if missing or extra and (where.is_file() or any(".mlp.experts." in name for name in extra)):
        refuse(where, "tensors", "the ones that config.json implies (with its tie_word_embeddings)",
               f"missing: {list_names(missing)}; left over: {list_names(extra)}")
    Notices.hints += [f"left out, as transformers does: {list_names(extra)}"] if extra else []
    found = {name: dealt[name] for name in wanted}
    for name, shape in wanted.items():
        joined, squeezed = join_shapes(found[name]), [n for n in shape if n > 1]
        if joined != list(shape) and not (where.is_file() and joined == squeezed):  # a GGUF file
            mlx = " (not MLX's: the one that it was made from)" if "conv1d" in name else ""
            refuse(where, f"shape of {found[name][0].name}", f"{list(shape)}{mlx}", joined)
    for dtype, tensor in {tensors[0].dtype: tensors[0] for tensors in found.values()}.items():
        if dtype not in FLOAT_TYPES and not (where.is_file() and can_read(dtype)):  # a GGUF file
            refuse(where, f"dtype of {tensor.name}", "BF16, F16, F32 or, in a GGUF file, one that "
                   "the gguf package dequantizes", dtype)
    if where.is_file() and source.family.has_delta:
        undo_converter(h, found, source.config["v_head_reordered"])
    panel = Tensor("zeros", where, 0, "F32", (PANEL, h.dim), bytes(4 * PANEL * h.dim))
    return h, [output._replace(tensors=[part for name in output.names for part in pad_with_zeros(
        found[name], output.shape, panel)]) for output in lay_out(h)], left_out


def undo_converter(h: Header, found: dict[str, list[Tensor]], reordered: bool) -> None:
    """Undoes -exp(A_log), and v heads in the order of their place at a k head, then of k heads."""
    step = h.delta_k_heads if reordered else h.delta_v_heads
    heads = np.arange(h.delta_v_heads).reshape(-1, step).T.ravel()  # where each v head is
    channels = np.append(np.arange(2 * h.delta_k_heads), 2 * h.delta_k_heads + heads)
    changes = {
        "A_log": lambda x: -x[heads], "dt_bias": lambda x: x[heads],  # norms have their 1 already
        "conv1d.weight": lambda x: DELTA_CHANGES["linear_attn.conv1d.weight"](
            x.reshape(len(channels), -1)[channels]),
        "out_proj.weight": lambda x: x.reshape(  # blocks of 32 numbers, or numbers
            -1, len(heads), DELTA_HEAD // 32 if x.dtype.names else DELTA_HEAD)[:, heads].ravel()}
    for name, tensors in found.items():
        kind = name.rpartition("linear_attn.")[2]
        if re.fullmatch(r"in_proj_[vzab]\.weight", kind):
            n_rows, *row = join_shapes(tensors)
            shape = n_rows // len(heads), *row
            parts = [tensor.part(start, *shape) for tensor in tensors
                     for start in range(0, tensor.size, math.prod(shape))]
            tensors = [parts[i] for i in heads]
        found[name] = [tensor._replace(change=changes.get(kind)) for tensor in tensors]


def write_model(out: BinaryIO, h: Header, outputs: list[Output]) -> None:
    """Writes OUT.bin: the header, then the tensors. Notes what is quantized again."""
    def convert(output: Output, piece: Tensor, at: int) -> int:
        weights_hash = 0
        for offset, part in put_in_panels(output, at, encode(piece, output.bits, h), h):
            write_at(out, part, offset)
            weights_hash += hash_part(memoryview(part).cast("B"), offset)
        return weights_hash

    again = {tensor.dtype for output in outputs if output.bits < 32 for tensor in output.tensors
             if not is_copied(tensor, output.bits, h)} - FLOAT_TYPES
    if again:
        Notices.hints.append(f"{', '.join(sorted(again))}: quantized again, in groups of "
                             f"{h.group_size}, which adds an error of 0.5 % of their rms in 8 "
                             "bits, 6 to 9 % in 4")
    weights_hash = sum(map_pieces(convert, outputs)) % 2 ** 64
    write_at(out, HEADER.pack(*h._replace(weights_hash=weights_hash)), 0)


def scatter(numbers: np.ndarray) -> np.ndarray:
    """Different numbers become different odd ones of 64 bits, as if drawn at random."""
    x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ x >> np.uint64(32) | np.uint64(1)


def hash_part(data: bytes | memoryview, offset: int) -> int:
    """Bytes of a file from an offset on. The sum of its parts' hashes, modulo 2^64, is the same
    however it is cut: each word of 64 bits is multiplied by two numbers, those of its place among
    1024 words and of the place of these. Bytes of zero add nothing."""
    first, start = divmod(offset, 8192)
    words = np.zeros(-(-(start + len(data)) // 8192) * 8192, np.uint8)
    words[start:start + len(data)] = np.frombuffer(data, np.uint8)
    sums = words.view("<u8").reshape(-1, 1024) @ scatter(np.arange(1024))
    return int((sums * scatter(np.arange(first, first + len(sums)) + 1024)).sum())


def put_in_panels(output: Output, at: int, encoded: tuple, h: Header) -> Iterator[tuple]:
    """What encode() gives for a range from `at` on, as OUT.bin has it: (offset, array) of values
    and of scales. In each panel of a matrix comes word 0 of each row (32 bits of values, or a
    scale), then word 1, and so on."""
    offsets = (output.values + at * output.bits // 8,
               output.scales + at // h.group_size * SCALE_SIZES[output.bits])
    if output.bits < 32 and h.panels:
        values, scales = encoded
        rows = values.size * 8 // output.bits // output.shape[1]
        words = values.view("<u4").reshape(rows, -1), scales.reshape(rows, -1)
        encoded = tuple(np.pad(x, ((0, -rows % PANEL), (0, 0))).reshape(-1, PANEL, x.shape[1])
                        .transpose(0, 2, 1).ravel() for x in words)
    return zip(offsets, encoded)


def map_pieces(work: Callable, outputs: list[Output]) -> Iterator:
    """Yields work(output, piece, its start in the output) of the pieces of the tensors, in a thread
    for each core that this process may use (numpy releases the GIL). 64 threads take 0.5 GB."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    total = sum(tensor.nbytes for output in outputs for tensor in output.tensors)
    with (ThreadPoolExecutor(min(64, cores)) as pool,
          tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar):  # None: on terminals
        for output in outputs:
            own, unit = (PANEL * shape[1] if output.bits < 32 else 1 for shape in (
                output.tensors[0].shape, output.shape))  # a panel, before and after zeros
            pieces, at = (piece for tensor in output.tensors for piece in tensor.pieces(own)), 0
            while batch := list(itertools.islice(pieces, 1024)):  # of trillions in a sparse file
                starts = list(itertools.accumulate(
                    (-(-piece.size // own) * unit for piece in batch), initial=at))
                at = starts.pop()
                yield from pool.map(partial(work, output), batch, starts)
                bar.update(sum(piece.nbytes for piece in batch))


def write_at(file: BinaryIO, data: bytes | np.ndarray, offset: int) -> None:
    """Writes all of the data at a byte offset; threads may write to one file at the same time."""
    view = memoryview(data).cast("B") if len(data) else b""
    while len(view):
        written = os.pwrite(file.fileno(), view, offset)
        view, offset = view[written:], offset + written


# ---- --check: OUT.bin compared with SOURCE -------------------------------------------------------

def check(options: argparse.Namespace) -> None:
    """Compares OUT.bin and its tokenizer file with the source."""
    name, out = options.source, options.out
    source = read_source(name, options.chat_template)
    eight, four = (Path(source.name + suffix) for suffix in SUFFIXES.values())
    Notices.subject = out = out or (four if four.exists() and not eight.exists() else eight)
    if not out.exists():
        refuse(out, "missing", f"the file to compare with {name} (made without --check)")
    with open_file(out) as file:
        if len(found := file.read(HEADER.size)) < HEADER.size:
            refuse(out, "truncated", f"a header of {HEADER.size} bytes", len(found))
        old = Header._make(HEADER.unpack(found))
        for field, *good in (("group_size", *GROUP_SIZES), ("rope_scaling", 0, 2),
                             ("layer_bits", 0, 4), ("panels", 1)):
            require(out, f"{field} (export it again)", getattr(old, field), *good)
        header, computed = read_header(source, old.layer_bits or 8, old.group_size, options.yarn)
        parts = make_tokenizer(source, header.vocab_size)
        header, outputs, _ = match_tensors(source, header, computed)
        header = header._replace(weights_hash=old.weights_hash)
        check_bytes(out, "the header (another model, or --yarn?)", HEADER.pack(*header), found)
        size = len(join_tokenizer(*parts))
        found = read_file(path := Path(f"{out}.tokenizer"), most=2 * size)
        tokenizer = join_tokenizer(*parts, found[size + 8:])  # any origin, after tag and length
        check_bytes(path, "the file (the --chat-template of the export?)", tokenizer, found)
        if (actual := out.stat().st_size) != outputs[-1].end:
            refuse(out, "truncated or oversized", f"{outputs[-1].end} bytes", actual)
        error, worst = check_tensors(out, file, header, outputs)
        file.seek(HEADER.size)
        weights_hash = sum(hash_part(part, file.tell() - len(part))
                           for part in iter(lambda: file.read(1 << 24), b"")) % 2 ** 64
        if old.weights_hash not in (0, weights_hash):  # older files have none
            refuse(out, "the weights' hash in the header is another", f"{weights_hash:#x}",
                   f"{old.weights_hash:#x}")
    say(f"{out} matches {name}: header, tokenizer and {len(outputs)} tensors; "
        f"rms error at most {error:.2g} %, in {worst}")


def check_bytes(path: Path, what: str, expected: bytes, found: bytes, start: int = 0) -> None:
    """Refuses bytes that differ, and shows the first 32-bit word that does."""
    if found != expected:
        at = next((i for i in range(0, len(expected), 4) if expected[i:i + 4] != found[i:i + 4]),
                  len(expected))
        refuse(path, f"{what} is not what the source gives, at byte {start + at:#x}",
               *(data[at:at + 4].hex(" ") or "its end" for data in (expected, found)))


def check_tensors(path: Path, file: BinaryIO, h: Header, outputs: list[Output]) -> tuple:
    """Compares the tensors. Returns the largest rms error, in % of the rms, and whose it is."""
    def compare(output: Output, piece: Tensor, at: int) -> tuple[str, np.ndarray]:
        parts = encode(piece, output.bits, h)
        for offset, part in put_in_panels(output, at, parts, h):
            found = os.pread(file.fileno(), part.nbytes, offset)
            check_bytes(path, piece.name, part.tobytes(), found, offset)
        x = piece.read_fp32().astype(float)  # in fp64 no square is too large
        error = x - decode(*parts, output.bits, h)
        return piece.name, np.array([error @ error, x @ x])

    sums = {}
    for name, squares in map_pieces(compare, outputs):
        sums[name] = sums.get(name, 0) + squares
    return max((100 * math.sqrt(e / (x or 1)), name) for name, (e, x) in sums.items())


# ---- The command line: arguments in, one line per message and an exit status out -----------------

def main() -> None:
    options = parse_arguments(sys.argv[1:])
    handle_signals(partial(leave, []))
    if __name__ == "__main__":
        warnings.simplefilter("ignore")  # of the packages: what matters here is said once
    Notices.subject = options.out or options.source
    lines, status = Notices.hints, 0
    try:
        check(options) if options.check else export(options)
    except Exception as error:
        where, line, status = Notices.subject, str(error), 1
        if isinstance(error, OSError):
            line = (f"{error.filename or where}: can't be read or written, expected access and "
                    f"space, found {error.strerror or error}")
        elif not isinstance(error, Refused):
            frames = traceback.extract_tb(error.__traceback__)
            places = [frame.lineno for frame in frames if frame.filename == __file__]
            line = (f"{where}: export.py failed, expected no such error (please report this line), "
                    f"found {type(error).__name__}: {line}, in lines {places[-4:]}")
        lines = [line + "".join(f"; {x}" for x in Notices.hints if x.startswith("the download"))]
    for line in lines:
        say(line)
    sys.exit(status)


def parse_arguments(args: list[str]) -> argparse.Namespace:
    """source, out (a path that ends in .bin, or None; it may also come first) and the options."""
    def parse_value(parse: Callable[[str], Any], expected: str, text: str) -> Any:
        """An option's value. For a wrong text parse() gives None or False, or raises ValueError."""
        with suppress(ValueError):
            if value := parse(text):
                return value
        raise argparse.ArgumentTypeError(f"wrong value, expected {expected}, found {text!r}")

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse_usage  # type: ignore
    parser.add_argument("names", nargs="*")
    for name, parse, expected in (
            ("--bits", {"8": 8, "4": 4}.get, "8 or 4"),
            ("--group-size", {str(n): n for n in GROUP_SIZES}.get, "32 or 64 or 128 or 256"),
            ("--yarn", lambda x: 1 < float(x) <= 64 and float(x), "a factor above 1, up to 64"),
            ("--chat-template", Path, "a file")):
        parser.add_argument(name, type=partial(parse_value, parse, expected))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_intermixed_args(args)
    if not 1 <= len(options.names) <= 2 or "" in options.names:
        refuse_usage(f"usage: expected SOURCE [OUT.bin], found {len(options.names)} names")
    if options.check and (options.bits or options.group_size):
        refuse_usage("--bits, --group-size: --check takes them from OUT.bin, expected `export.py "
                     "--check SOURCE OUT.bin` (with four bits it ends in -q4.bin), found one")
    source, *out = sorted(options.names, key=lambda name: name.endswith(".bin"))  # keeps the order
    if out and not out[0].endswith(".bin"):
        refuse_usage(f"OUT: wrong name, expected one that ends in .bin, found {out[0]!r}")
    options.source, options.out = source, Path(out[0]) if out else None
    return options


def refuse_usage(text: str) -> NoReturn:
    hint = ("OUT.bin follows SOURCE; " if re.search(r" (-o|--?out(file|put)?)\b", text) else  # others'
            "it is --bits 8 or 4; " if re.search(r"--outtype|--quantize|-q\d", text) else "")
    say(f"{text.removeprefix('argument ')} ({hint}see export.py -h)")
    sys.exit(2)


if __name__ == "__main__":
    main()

"""The command line as scripts see it: options, prompt sources, output, exit status; no terminals, no numbers."""
import codecs
import gzip
import json
import os
import random
import re
import shlex
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_embedding, with_config, with_ends
from conftest import (QUOTED_QWEN3, QWEN3, ROOT, STATS, assert_error, change_sections, copy_model, environment, export,
                      finish, json_string, leave, make_checkpoint, needs_address_space, output, prompts, qwen3, shell,
                      shown_by, spawn_shell, tokenize)
from reference import Model, read_tokenizer
from test_templates import CHATS

MODES = ["chat", "generate", "tokenize", "perplexity", "embed"]
END = "<|im_end|>"


def spell(data):
    """The tokens of these bytes, one each, as the vocabulary writes them: GPT-2's letters."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
    return [letters[b] for b in data]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory, tokenizer):
    """An embedding model: sentence-transformers' files, a post-processor, no lm_head."""
    directory = tmp_path_factory.mktemp("embedding")
    hf = make_embedding(make_checkpoint(directory / "hf", with_ends(tokenizer, "$A <|endoftext|>"), prefix=""))
    return export(with_config(hf, {"tie_word_embeddings": False}), directory / "model.bin")


# -- options

MISSING = "no such model.bin"                           # what is said before it is opened
HUGE = 20 * "9"


def each(values):
    """(option, value) of each of these."""
    return [(option, value) for option in values for value in values[option]]


BAD_VALUES = {"-C": ["7", "9", "16", "33", "", "8x", "q8_0"],
    "-m": ["train", "", "chatx"], "-r": ["1.5", "yes", "", "-1"],
    "-t": ["-0.1", "warm", "nan", "inf", "", "1x"], "-p": ["0", "1.01", "-1", "nan", "x", ""],
    "-k": ["-1", "1.5", "x", "", HUGE], "-a": ["-0.1", "2.1", "nan", "x", ""],
    "-e": ["0", "-1", "nan", "x", "", "101"], "-s": ["x", "", "1.5", "999" + HUGE, "12 3"],
    "-n": ["-2", "x", "", HUGE], "-c": ["-1", "x", "", "1e3", HUGE],
    "-b": ["0", "513", "-1", "x", ""], "-j": ["0", "-1", "x", "", HUGE]}


@pytest.mark.parametrize("option, value", each(BAD_VALUES))
def test_bad_value(option, value):
    result = qwen3(MISSING, "-i", "hi", option, value)
    assert_error(result, 2, option, value, "expected")
    assert b"no such model" not in result.stderr


@pytest.mark.parametrize("option, value", each({
    "-s": ["-9223372036854775808", "18446744073709551615", "0"], "-p": ["1", "1e-3"],
    "-k": ["0", "2147483647"], "-a": ["2", "0"], "-t": ["0", "1e3", "1e-30", "1e-50"],
    "-b": ["512", "1"], "-c": ["0", "512"], "-C": ["8", "32"], "-r": ["1"], "-j": ["1", "5"], "-n": ["1"],
    "-e": ["1", "0.01", "100"], "-x": ["a", "\n"]}))
def test_good_value(small, option, value):
    length = () if option == "-n" else ("-n", 3)
    output(small, "-m", "generate", "-i", "the", *length, "-q", option, value)


ONCE = [
    "-i a", "-f -", "-l -", "-L -", "-w a", "-o a|b", "-g a", "-m chat", "-y a", "-r 0", "-t 0", "-p 1", "-k 1", "-a 1", "-e 1",
    "-x a", "-s 1", "-n 1", "-c 0", "-C 8", "-K a", "-b 1", "-j 1", "-q", "-v"]


@pytest.mark.parametrize("args", ONCE)
def test_an_option_given_twice(args):
    """Whatever its values, and wherever it stands. What looks like an option may be a value."""
    option, *value = args = args.split()
    assert_error(qwen3(MISSING, *args, *args), 2, f"{option}: given twice")
    assert_error(qwen3(*args, MISSING, *args), 2, f"{option}: given twice")
    assert_error(qwen3(*args, *args, MISSING), 2, f"{option}: given twice")
    if value and option not in ("-i", "-w"):
        assert_error(qwen3(MISSING, "-i", option, *args), 1)


def test_help_and_version():
    for option in "-h", "--help", "-help", "--version":
        for args in ((option,), (MISSING, option)):
            result = qwen3(*args)
            assert result.returncode == 0 and result.stderr == b"" and result.stdout.endswith(b"\n")
    assert result.stdout.count(b"\n") == 1
    text = output("-h").decode()
    assert all(mode in text for mode in MODES)
    assert max(map(len, text.split("\n"))) <= 100


def test_no_option_is_forgotten(tiny):
    """Those of the source are in the help and in the tables above; -v shows those of the sampler."""
    source = (ROOT / "qwen3.c").read_text()
    options = {f"-{letter}": (kind, field) for letter, kind, field in re.findall(
        r"(?m)^    \{'(\w)', ([A-Z]+), PLACE\((\w+)\)", source)}
    help_lines = re.findall(r"(?m)^  (-\w)(?:, (--version))?\b", output("-h").decode())
    assert [line for line in help_lines if line[0] not in options] == [("-q", ""), ("-v", ""), ("-h", "--version")]
    assert {line[0] for line in help_lines} == {args.split()[0] for args in ONCE} | {"-h"} > options.keys()
    assert BAD_VALUES.keys() == {option for option, (kind, _) in options.items() if kind != "TEXT"}
    fields = re.findall(r"(\w+);", re.search(r"\{([^}]*)\} Sampler;", source)[1])
    shown = qwen3(tiny, "-i", "x", "-n", 1, "-v").stderr.decode()
    assert re.findall(r"-\w", re.search("sampling: (.*)", shown)[1]) == \
        sorted((option for option in options if options[option][1] in fields), key=list(options).index)


OTHERS = {  # other programs' options, and what is here
    "-t": "--temp --temperature --temp=1 -temp -temp=0.7", "-f": "-file=a.txt", "MODEL without": "-model=a.bin", "-p": "--top-p --top_p", "-k": "--top-k --top_k=3",
    "-s": "--seed", "-i": "--prompt", "-j": "--threads", "-c": "-ctx --ctx-size --num_ctx", "-C": "--cache-type-k --kv_cache_dtype=fp8",
    "-K": "--prompt-cache",
    "-n": "--n-predict --max-tokens --max_tokens", "-y": "--system -sys", "-e": "--repeat_penalty",
    "-x": "--stop", "-r 1": "--think --enable_thinking", "-r 0": "--no-think", "-v": "--verbose",
    "-q": "--quiet", "-g EXPRESSION": "--json --grammar --json-schema --format", "-g": "--regex",
    "-m embed": "--embedding", "nothing: without -i": "--interactive", "nothing": "--stream",
    "a space: -i x": "-i=x", "a space: -t .7": "-t.7"}


@pytest.mark.parametrize("command, words", [
    *[(command, []) for command in (
        "", "-i hi", "-i", "'' -i hi", "M -x", "M -e", "M --frobnicate", "M -i", "M -t",
        "M extra.bin", "M -i hi extra", "M -", "M --help-me", "M -qx", "M -x ''", "M -f ''", "M -q -v",
        "M -s -9223372036854775809", "M -l a -L b", "M -l a -f b", "M -L a -f -", "M -l a -v", "M -K -",
        "M -L a -v", "M -l", "M -L", "M -l ''", "M -L ''", "M -w x", "M -w x -i a", "M -l a -w -",
        "M -l a -w ''", "M -l a -w", "M -i a -o yes", "M -i a -o 'yes|'", "M -i a -o 'yes|yes'",
        "M -i a -o 'caf\udce9|no'", "M -i a -o 'yes|no' -m embed", "M -i a -o 'yes|no' -m tokenize",
        "M -i a -o 'yes|no' -m perplexity", "M -i a -o 'yes|no' -x a", "M -i a -g ''", "M -i a -g '(a'",
        "M -i a -g a -x a", "M -i a -g a -o 'a|b'", "M -i a -g a -m embed", "M -i a -g a -m tokenize", "M -i a -g a -m perplexity")],
    ("M Why?", ['"M"', 'goes with -i', '-i "Why?"']), ("M b", ["b: ", "in quotes", "cat joins several) with -f"]), (f"run {QWEN3}", ["run: ", "MODEL first"]),
    *[(f"M {o} a b", ["b: ", 'quotes around all of the text: "a b ..."']) for o in ("-i", "-y")], ("run qwen3:0.6b", ["run: ", "MODEL first"]),
    ("M -N 3", ["expected -n"]), ("M -I a", ["expected -i"]), ("M -", ["-f - (stdin)"]), ("M --port 1", ["no server"]), ("M --lora a", ["merged"]),
    ("M --image a", ["no images"]), ("-hf a/b", ["export.py ORG"]), ("M -V", ["--version"]), ("M -i a -g '{\"type\":1}'", ["export.py --form"]),
    ("M -p Why?", ["-p", "prompt goes with -i", '"Why?"']), ("M -p 0", ["above 0 and up to 1"]), ("M -e 0", ["where 1 is off"]),
    *[(command, ["-n10", "-n 10"]) for command in ("M -n10", "-n10 M")],
    *[(f"-m {name} -i x", ["MODEL goes without -m"]) for name in ("model.bin", "models/M")],
    ("M --model 1", ["--model", "MODEL without an option"]), ("M -l a -w -q", ["-w: expected a value after it, found -q"]), ("M -K -v", ["./-v"]), ("M -w a", ["-w: expected a list (-l, -L)"]),
    *[(f"M {text}", ["-t: was taken for the value of the option before it"]) for text in ("-i -t 0", "-o -t yes")],
    ("M.bin N.bin", ["N.bin: unexpected", '"M.bin"']), ("M -f - a", ["a: unexpected"]), ("M --json", ["-L FILE", "export.py --form SCHEMA.json"]),
    ("M -qv", ["-qv: ", "each by itself"]), ("M --chat-template a", ["export.py has --chat-template FILE"]),
    ("M -ngl 99", ["-ngl: unknown option", "all runs on the CPU"]),
    *[(f"M {other} 1", [other, f"expected {here}"]) for here in OTHERS for other in OTHERS[here].split()],
    ("M -t 0,7", ['"0,7"', "point"]), ("M -p 0,9", ['"0,9"', "point"]),
    ("M -r on", ["0 (off), 1 (on) or N", '"on"']), ("M -m %s%n%d", ["%s%n%d"]),
    *[(command, [word, "typographic", "expected - or \""]) for word, command in (
        ("\u2013i", "M \u2013i Hi"), ("\u2013i", "\u2013i Hi M"), ("\u2014n", "M \u2014n 3"),
        ("\u2212n", "M -i x \u2212n 3"), ("\u201cWhat", "M -i \u201cWhat is"),
        ("\u2018What", "-i \u2018What is M"), ("\u201eWas", "M \u201eWas ist"))]], ids=str)
def test_mistakes(command, words):
    """They say what to do, before any model is opened."""
    result = qwen3(*shlex.split(command))
    assert_error(result, 2, *words)
    assert b"M: " not in result.stderr


def test_a_model_with_a_blank_in_its_name(small, tmp_path):
    model = tmp_path / "my model.bin"
    model.symlink_to(small)
    assert_error(qwen3(*str(model).split(" "), "-i", "x"), 2, f'"{model}" is one name: expected quotes around it')


@pytest.mark.parametrize("path, words", [
    ("{}/M.gguf", "export.py {}/M.gguf"), ("M.gguf", "export.py M.gguf"), ("{}", "export.py {}"),
    (".", "export.py ."), ("../", "export.py ../"), ("model-1-of-2.safetensors", "export.py ."),
    ("{}/model-1-of-2.safetensors", "export.py {}\n"),
    *[(name, f"export.py {name}") for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B-GGUF:Q4_0")],
    ("%s%n%d.bin", "%s%n%d.bin: No such file"),
    ("none/M.bin.tokenizer", "none/M.bin.tokenizer: belongs to a model, expected none/M.bin\n"),
    ("Qwen3-0.6B", "Qwen3-0.6B: No such file or directory, expected a file made by export.py (Qwen3-0.6B.bin is there)\n"),
    ("~/M.bin", "(in quotes, ~ and * stay"), ("Why is it?", "(is it a prompt? that goes with -i)"),
    ("https://huggingface.co/Qwen/Qwen3-0.6B", "export.py https://huggingface.co/Qwen/Qwen3-0.6B"),
    ("folder", "folder: a directory, expected a .bin file, which this makes: export.py folder\n"),
    *[(path, None) for path in ("none.bin", "Qwen/none.bin", "./a/b", "a/b/c", "/Qwen/x")]])
def test_likely_first_models(tmp_path, monkeypatch, path, words):
    """A GGUF file, a checkpoint's directory or part, a name on the hub: the command that exports it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in "M.gguf", "model-1-of-2.safetensors", "Qwen3-0.6B.bin", "folder.bin":
        (tmp_path / name).write_bytes(b"GGUF" * (name == "M.gguf") + bytes(1000))
    result = qwen3(path.format(tmp_path), "-i", "x")
    assert_error(result, 1, (words or "").format(tmp_path))
    assert words or b"export.py " not in result.stderr


# -- where the prompt comes from (tokenize shows it exactly)

TEXTS = [b"hello", b"hello\n", b"hello\r\n", b"\n", b" \t hello  \n\n", b"a\0b", b"\0", b"",
         b"caf\xc3\xa9", b"\xff", b"\xfe\xfd", b"a\xff\xfe", b" \xef\xbb\xbf", b"\xef\xbb",
         b"%s%n%d%100000000d"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_file_and_pipe_are_taken_exactly(small, tokenizer, tmp_path, text):
    """Also a pipe that has a name, as a process substitution has."""
    (tmp_path / "text").write_bytes(text)
    ids, run = tokenize(small, text), (small, "-m", "tokenize")
    line = " ".join(map(str, ids)).encode() + b"\n"
    both = output(*run, "-f", "-", stdin=b"question\n\n" + text)
    for file in (tmp_path / "text", "-", "/dev/stdin"):
        assert output(*run, "-f", file, stdin=text) == line
        for args in (("-i", "question", "-f", file), ("-f", file, "-i", "question")):
            assert output(*run, *args, stdin=text) == both
    assert b"\0" in text or output(*run, "-i", text) == line
    assert not text.isascii() or ids == tokenizer.encode(text.decode()).ids


def test_byte_order_marks(small, tmp_path):
    """UTF-8's is dropped at the start of a file, a pipe or a list, once, not of an argument; UTF-16's is an error."""
    run, mark = (small, "-m", "tokenize", "-q"), b"\xef\xbb\xbf"
    text, line, marked = (output(*run, "-i", t) for t in (b"hello\nx\n", b"hello", mark + b"hello"))
    assert marked != line
    (tmp_path / "text").write_bytes(mark + b"hello\nx\n")
    for args in ((), ("-f", "-"), ("-f", tmp_path / "text")):
        assert output(*run, *args, stdin=mark + b"hello\nx\n") == text
    assert output(*run, "-i", "a", "-f", tmp_path / "text") == output(*run, "-i", "a\n\nhello\nx\n")
    assert output(*run, stdin=mark * 2 + b"hello") == marked
    assert output(*run, "-l", "-", stdin=mark + b"hello\n" + mark + b"hello\nhello") == line + marked + line
    assert output(*run, "-L", "-", stdin=mark + b'"hello"\n"hello"') == line * 2
    assert all(b"stdin: no lines" in qwen3(*run, kind, "-", stdin=mark).stderr for kind in ("-l", "-L"))
    chat = (small, "-m", "chat", "-t", 0, "-n", 3, "-q")
    assert output(*chat, stdin=mark + b"a b\n") == output(*chat, stdin=b"a b\n")
    for data in (b"\xff\xfeh\0\n\0", b"\xfe\xff\0h\0\n", b"\xff\xfe"):
        (tmp_path / "text").write_bytes(data)
        for args in ((), ("-f", "-"), ("-f", tmp_path / "text"), ("-l", "-"), ("-L", "-"), ("-m", "chat")):
            args = (small, "-q", *args) if args[:1] == ("-m",) else (*run, *args)
            assert_error(qwen3(*args, stdin=data), 1, "text" if args[-1] == tmp_path / "text" else "stdin", "UTF-16", "UTF-8")


@pytest.mark.parametrize("data, what", [
    (b"%PDF-1.7\n", "PDF"), (b"PK\3\4\x14", "ZIP"), (gzip.compress(b"a", mtime=0), "gzip"), (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff\xe0", "JPEG"), (b"PAR1\x15\4", "Parquet")], ids=str)
def test_files_that_are_no_text(small, tmp_path, data, what):
    """An error by their first bytes, of a file, a pipe and a list; the same bytes in an argument or later are text."""
    (tmp_path / "file").write_bytes(data)
    for args in ("-f", tmp_path / "file"), ("-l", tmp_path / "file"), ("-L", tmp_path / "file"), ("-f", "-"), ("-m", "chat"):
        name = "stdin" if args[1] in ("-", "chat") else "file"
        assert_error(qwen3(small, *args, "-n", 1, stdin=data), 1, f"{name}: ", what, "expected text")
    assert output(small, "-m", "tokenize", stdin=b"x" + data)
    assert what != "PDF" or output(small, "-m", "tokenize", "-i", data)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_that_are_not_utf_8(small, tmp_path, mode):
    """They are taken as they are, and the first ones are a notice: which input, which line."""
    latin, good = b"a b\n\xe9t\xe9 au\nl\xe4it\n", "a b\ncafé au\nläit \U0001f642\n".encode()
    run, file = (small, "-m", mode, "-n", 2, "-t", 0), tmp_path / "file"
    file.write_bytes(latin)
    for args, stdin, expected in (
            *[(args, b"", f"{file}: line 2") for args in (("-f", file), ("-i", "é", "-f", file), ("-l", file))],
            ((), latin, "stdin: line 2"), (("-i", b"\xe9 or", "-f", file), b"", "-i: line 1"),
            (("-y", b"\xff", "-i", "a b"), b"", "-y: line 1"),
            (("-l", "-"), good[:4] + good[:4] + latin[4:], "stdin: line 3"),
            *[(args, good, None) for args in (("-f", "-"), ("-l", "-"), ("-i", good))]):
        result, quiet = (qwen3(*run, q, *args, stdin=stdin) for q in ("-q", "-qq"))
        assert result.returncode == 0 and result.stdout == quiet.stdout and quiet.stderr == b""
        assert re.findall("qwen3: (.*UTF-8,.*)\n", result.stderr.decode()) == [
            f"{expected} is not UTF-8, taken as it is; if it is Latin-1 (a guess): "
            "iconv -f LATIN1 -t UTF-8"] * bool(expected)
    for text in "a b\nc", "\u00e4 b\nc":               # without its mark; most bytes are UTF-8
        file.write_text(text, encoding="utf-16-le")
        assert f"{file}: line 1 has a NUL byte, taken as it is; if it is UTF-16 (a guess): iconv -f UTF-16LE -t UTF-8\n" in (
            qwen3(*run, "-f", file).stderr.decode())
    file.write_bytes(latin)
    long = qwen3(*run, "-f", file, "-c", 2)
    assert mode in ("tokenize", "perplexity") or long.stderr.count(b"\n") == 1   # an error is alone


@pytest.mark.parametrize("text", [b"", b"\n", b"\r\n"], ids=ascii)
def test_a_text_of_no_bytes(small, embedding, tmp_path, text):
    """An error in chat and embed, where else it is a prompt. Chat drops a file's last newline."""
    file = tmp_path / "text"
    file.write_bytes(text)
    for model, mode in ((small, "chat"), (small, "embed"), (embedding, "embed")):
        for args in (("-f", "-"), ("-f", file), ("-i", "a", "-f", file), ("-i", text), ()):
            if mode == "chat" and not args:
                continue                                # a conversation
            result = qwen3(model, "-m", mode, "-n", 1, "-q", *args, stdin=text)
            if args[:2] == ("-i", "a") and (text or mode == "embed") or text and (mode == "embed" or args[0] == "-i"):
                assert result.returncode == 0, result
            else:                                       # of a file or a pipe also beside -i
                assert_error(result, 1, "empty, expected a ", *[file if file in args else "stdin"] * (not text and "-f" in args
                                                                                                     and mode == "chat"))
    script = qwen3(small, "-m", "chat", "-n", 1, "-q", stdin=b"a b\n" + text + b"c d\n")
    assert script.returncode == (text != b"") and (b"empty" in script.stderr) == (text != b"")
    empty = qwen3(small, "-m", "chat")
    assert empty.returncode == 0 and empty.stdout == empty.stderr == b""


TOO_LONG = "prompt: too long, expected at most "
MORE = "512 tokens (split the text, or export.py --yarn), found {}\n"


@pytest.mark.parametrize("args, words", [
    (("-f", "missing.txt"), "missing.txt: No such file or directory, expected a text file\n"),
    (("-f", "What is it?"), "-i takes a text"), (("-f", "/"), "/"),
    (("-i", "a", "-f", "-"), "stdin: empty"), ((), "stdin: empty, expected a prompt; has a command before the pipe failed?"),
    *[(("-m", "perplexity", "-i", text), "expected 2 or more") for text in ("", "a", "<|im_end|>")],
    *[(("-m", mode, "-i", "7" * 700), TOO_LONG + MORE.format(n))
      for mode, n in (("chat", 712), ("generate", 700), ("embed", 700))],
    *[(("-m", mode, "-i", "7" * 90, "-c", 64), TOO_LONG + f"64 tokens (-c, up to 512), found {n}\n")
      for mode, n in (("chat", 102), ("generate", 90), ("embed", 90))],
    (("-m", "generate", "-i", "7" * 65, "-c", 64), TOO_LONG + "64 tokens (-c, up to 512), found 65\n"),
    *[(("-m", mode, "-i", "hello", "-c", 1), TOO_LONG + "1 tokens") for mode in ("chat", "generate")],
    (("-m", "perplexity", "-i", "hello there", "-c", 1), "-c: expected 2 to 512"),
    *[(("-i", "7", "-c", n), f"-c: expected 1 to 512 (export.py --yarn raises it), found {n}\n")
      for n in (513, 2**31 - 1)]])
def test_prompts_that_can_not_run(small, args, words):
    """-c is named where it helps, and only there; else what does."""
    assert_error(qwen3(small, *args), 1, words)


@pytest.mark.parametrize("mode", MODES)
def test_stdin_is_left_alone(small, tmp_path, mode):
    """`while read x; do ./qwen3 m.bin -i "$x"; done < list` sees every line."""
    (tmp_path / "list").write_bytes(b"one two\nthree four\nfive six\n")
    (tmp_path / "text").write_bytes(b"some text")
    for prompt in ('-i "$x"', f'-f {tmp_path / "text"}', f'-i "$x" -f {tmp_path / "text"}'):
        script = f"while read x; do {QUOTED_QWEN3} {small} -m {mode} -n 2 -q {prompt} >&2; echo run; done"
        result = shell(script, stdin=open(tmp_path / "list", "rb"))
        assert result.stdout == b"run\n" * 3, result.stderr


def test_quiet_hides_no_cut_answer(tiny):
    """-q: one line of an answer, or of a list, that says what ended it; -qq: none. Of whole answers -q says nothing."""
    asks = b"What is the capital of France?\nWhat is the capital of Italy?\nHi!\n"
    for args, by, n in ((("-n", 2), b"-n", 3), (("-c", 22), b"a full context (-c)", 2), ((), b"", 0)):
        for run in (tiny, "-t", 0, "-i", "What is the capital of France?", *args), (tiny, "-t", 0, "-l", "-", *args):
            stdin = asks if "-l" in run else b""
            loud, quiet, silent = (qwen3(*run, *q, stdin=stdin) for q in ((), ("-q",), ("-qq",)))
            assert loud.stdout == quiet.stdout == silent.stdout and silent.stderr == b"", loud
            said = rb"qwen3: answers: of 3 ended by %s: %d\n" % (re.escape(by), n) if stdin else \
                rb"qwen3: answer: ended by %s after \d+ tokens[^\n]*\n" % re.escape(by)
            assert re.fullmatch(said if n else b"", quiet.stderr) and quiet.stderr in loud.stderr, quiet
    both = qwen3(tiny, "-t", 0, "-l", "-", "-c", 22, "-n", 4, "-q", stdin=asks + b"Who are you? What is your name?\n")
    assert re.fullmatch(rb"qwen3: answers: of 4 ended by -n: \d, by a full context \(-c\): \d\n", both.stderr), both


@pytest.mark.parametrize("mode", MODES)
def test_data_beside_the_prompt_is_a_notice(small, tmp_path, mode):
    """Of a pipe that has data, and of a file at its start; with -q, too; not where stdin is read; it never waits."""
    text = tmp_path / "text"
    text.write_bytes(b"some text\n")
    def notices(*options, stdin):
        result = subprocess.run([QWEN3, small, "-m", mode, "-n", "1", *options], stdin=stdin, timeout=300,
                                capture_output=True, env=environment())
        assert result.returncode == 0, result
        part = b'stdin: read in part (a loop?); all its rest is the prompt, not -i "$line"\n' in result.stderr
        assert part == (not options and at == 5 and mode != "chat"), result
        return result.stderr.count(b"qwen3: stdin: has data that was not read; -f - would add all of it, -l - by line\n")
    for options in (("-i", "a b"), ("-f", text), ("-i", "a b", "-f", text)):
        for data in (b"unread", b""):
            theirs, ours = os.pipe()                    # which stays open
            os.write(ours, data)
            assert notices(*options, stdin=theirs) == (data != b"")
            assert notices(*options, "-q", stdin=theirs) == (data != b"")
            assert notices(*options, "-qq", stdin=theirs) == 0
            assert not data or os.read(theirs, 100) == data
            os.close(theirs), os.close(ours)
        assert notices(*options, stdin=subprocess.DEVNULL) == 0
    for options, at in (*[(("-i", "a b"), at) for at in (0, 5, 10)], ((), 0), (("-f", "-"), 0), (("-i", "a b", "-f", "-"), 0), ((), 5)):
        with open(text, "rb", buffering=0) as file:
            file.seek(at)
            assert notices(*options, stdin=file) == (options == ("-i", "a b") and at == 0), (options, at)


def test_terminal_without_prompt(small, embedding, random_model):
    """Also of a model that is none for chats. A pipe of no bytes is a text."""
    base = random_model(template=None, eos="<|endoftext|>")
    for args in ((embedding,), (base,), *(("no model yet", "-m", mode) for mode in MODES[1:])):
        assert re.match(b"qwen3: -m [a-z]+: no text, expected -i TEXT", shown_by(*args, status=2))
    assert qwen3(base, "-n", 1).returncode == 0


@needs_address_space
def test_default_context(random_model):
    """What a quarter of the memory holds: a multiple of 1,024 from 4,096 to the model's, more with -C 8."""
    model, short = random_model(max_len=1_000_000), random_model(max_len=5000)
    large = random_model(max_len=1_000_000, n_layers=20, n_kv_heads=4)
    def context(megabytes, options="", model=model, limit="-v"):
        child = spawn_shell(f"ulimit {limit} {megabytes * 1024};exec {QUOTED_QWEN3} {model} -j 1 {options}")
        child.expect(r": context (\d+), thinking off, /help shows the commands\r\n> ")
        tokens = int(child.match[1])
        leave(child)
        return tokens
    found = context(300)
    for megabytes, tokens in (300, found), (600, context(600)):
        quarter = megabytes * 2**20 / 4                 # 1,024 bytes a token, or 1,280 with what aligns them
        assert quarter / 1280 - 1024 < tokens <= quarter / 1024 and tokens % 1024 == 0
    assert context(300, limit="-d") == found
    assert found * 3 <= context(300, "-C 8") <= found * 3.2 + 1024                  # 0.3125 of the bytes
    assert context(300, model=short) == 5000 and context(300, "-c 1000") == 1000
    assert context(200, model=large) == 4096            # 20 KB a token
    run = f"ulimit -v 300000; exec {QUOTED_QWEN3} {model} -i hello -n 1 -j 1 -q"
    for cache in "-c 0", "-c 0 -C 8":                   # what is named does fit
        error = shell(f"{run} {cache}").stderr.decode()
        names = re.fullmatch(r"qwen3: memory: not enough for the KV cache \((-c \d+) fits, or with (-C 8 -c \d+)\), "
                             r"expected \d+ MB\n", error).groups()
        assert all(shell(f"{run} {name}").returncode == 0 for name in names[len(cache) > 5:]), names
        error = shell(f"printf 'a\\nb\\n' | ({run.replace('-i hello', '-l -')} {cache})").stderr.decode()
        names = re.search(r"\((-b 1 -c \d+) fits, or with (-C 8 -c \d+)\)", error)    # of a list, too
        for name in names.groups()[len(cache) > 5:]:
            done = shell(f"printf 'a\\nb\\n' | ({run.replace('-i hello', '-l - -b 1')} {name.replace('-b 1', '')})")
            assert done.returncode == 0, (name, done)
        names = re.search(r"\((?:-b 1 )?(-c \d+) fits, or with (-C 8 -c \d+)\)", error).groups()
        assert int(names[1][8:]) >= int(names[0][3:]) * (3 if cache == "-c 0" else 1) > 10_000
    odd = random_model(dim=32, hidden_dim=96, n_heads=16, n_kv_heads=4, head_dim=10, seed=5)
    assert_error(qwen3(odd, "-i", "x", "-C", 8), 1, f"-C 8: expected heads of a multiple of 16, found 10 ({odd})")
    scored = qwen3(model, "-m", "perplexity", "-i", "7" * 5000)
    assert b"text: 5000 tokens are scored in pieces of 4096 (-c)" in scored.stderr


OF_ANSWERS = {"-n": 3, "-x": "a", "-t": 0, "-p": 0.5, "-k": 3, "-a": 1, "-e": 1.1, "-s": 7}
NOTICES = [  # mode, options, the notice or None
    *[(mode, (option, value), f"{option}: no effect with -m {mode}") for option, value in OF_ANSWERS.items() for mode in MODES[2:]],
    *[(mode, (option, "1"), f"{option}: no effect with -m {mode}") for option in ("-y", "-r") for mode in MODES[1:]],
    ("chat", ("-r", "1"), "-r: no effect, this model's thinking can't be switched"),
    *[("chat", ("-i", name), "-i: the name of a file, taken as text; -f reads it") for name in ("a b", "@a b")],
    *[("chat", ("-y", name), '-y: the name of a file, taken as text; -y "$(cat FILE)" reads it') for name in ("a b", "@a b")],
    *[("chat", (option, r"a\n|b"), rf"{option}: \n is no newline here, $'...' makes newlines") for option in ("-i", "-x", "-y", "-o")],
    *[("chat", (option, "a\\n\nc|b"), None) for option in ("-i", "-x", "-y", "-o")], ("chat", ("-j", "1"), None),
    ("embed", ("-j", "1000"), "-j: more threads than cores take longer; without -j each core has one"),
    ("chat", ("-t", "7"), "-t: 7 draws nearly at random, expected 2 or less (-j: threads)"), ("chat", ("-t", "2"), None),
    ("chat", ("-s", "-1"), "-s: -1 is a seed as others are; without -s each run draws one"),
    ("chat", ("-g", "json"), "-g: each answer is this text alone; ways are yes|no, others in RECIPES.md"),
    *[("chat", ("-g", form), "-g: / at both ends is a sign of the answer") for form in ("/yes|no/", "/yes|no/i")],
    ("chat", ("-g", "yes | no"), "-g: a blank beside | is a sign of the answer"), *[("chat", ("-g", form), None) for form in ("[^|x]|[y|]", r"\[(yes|no)\]", "/usr/sums|b", "(a|[b])")],
    ("chat", ("-g", "[yes|no]"), "-g: | in [...] is a sign of the answer; (yes|no) makes ways"),
    ("chat", ("-g", r"\\d+"), r"-g: \\ is a backslash in the answer; \d is a digit, \w a letter"), ("chat", ("-g", r'"\\d"'), None),
    ("chat", ("-g", "none.json"), '-g: the name of a file, taken as text; -g "$(export.py --form FILE)" reads it'),
    ("chat", ("-i", "@none"), "-i: @ is a sign of the text; no such file"), ("chat", ("-i", "-"), "-i: - is taken as text, not stdin"),
    *[("chat", ("-o", texts), f"-o: {sign} is a sign of the answer; -g takes an expression")
      for texts, sign in (("(yes|no)", "("), ("/yes|no/", "/"), (r"yes\|no", "\\"))],
    ("chat", ("-g", "a::=b"), "-g: a grammar (::=), taken as text; expected a regular expression, yes|no"),
    ("chat", ("-g", r"yes\|no"), r"-g: \( \| \) are these signs in the answer; ( | ) make groups and ways"),
    *[("chat", ("-e", value), f"-e: {value} breaks the text, expected 1 (off) to 2, mostly 1.05 to 1.2") for value in ("11", "0.5")],
    *[("chat", options, None) for options in (("-y", "Be brief."), ("-i", "What is package.json"), ("-y", "a.json"), ("-i", "."), ("-f", "a b"))],
    *[(mode, (option, value), None) for option, value in OF_ANSWERS.items() for mode in MODES[:2]],
    *[(mode, (), None) for mode in MODES], ("chat", ("-n", "3", "-x", "a", "-y", "a"), None)]


@pytest.mark.parametrize("mode, options, notice", NOTICES)
def test_options_that_are_noticed(small, tmp_path, monkeypatch, mode, options, notice):
    """They have no effect, or not the one that was meant: -i FILE is a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").write_text("A text.")
    prompt = ["-i", "hello there"] * (options[:1] not in (("-i",), ("-f",)))
    length = ["-n", 1] * (mode in MODES[:2] and "-n" not in options)
    run = (small, "-m", mode, *prompt, *options, *length)
    result = qwen3(*run)
    found = re.findall("qwen3: (-[a-z]: .*)\n", result.stderr.decode())
    assert result.returncode == 0 and found == [notice] * bool(notice), result
    stays = any(word in (notice or "") for word in ("name of a file", "no newline", "taken as text", "these signs"))
    assert len(re.findall("qwen3: (-[a-z]: .*)\n", qwen3(*run, "-q").stderr.decode())) == stays
    assert mode in MODES[:2] or qwen3(*run, "-qq").stderr == b""


# -- tokenize -v

def test_tokens_one_by_one(small):
    """An id and its token as JSON, in which each byte that is not UTF-8 is \\ufffd."""
    text = 'the "old"\\ lighthouse\n\t\x7f\x9b\0 灯<|im_end|>'.encode()
    tokens = read_tokenizer(f"{small}.tokenizer", Model.from_bin(small).c["vocab_size"])[1]
    lines = output(small, "-m", "tokenize", "-v", stdin=text).decode()
    assert lines.isascii() and all(token in lines for token in (r'"\u007f"', r'"\ufffd"', '"<|im_end|>"'))
    assert lines.split("\n")[:-1] == [
        f"{id} {json_string(tokens[id], 'surrogateescape').decode()}" for id in tokenize(small, text)]


def test_tokens_on_a_terminal(small, tmp_path):
    """No direction of a token turns the line."""
    model, name = copy_model(small, tmp_path), "<|\u202eabc|>"
    file = Path(f"{model}.tokenizer")
    file.write_bytes(file.read_bytes().replace(END.encode(), name.encode(), 1))
    shown = shown_by(model, "-m", "tokenize", "-v", "-i", name).decode()
    assert "<|\ufffdabc|>" in shown and "\u202e" not in shown


def test_lines_fit_into_80_columns():
    """Notices and statistics, as the source has them, with the largest numbers that the program picks itself."""
    source = (ROOT / "qwen3.c").read_text()
    source = source[:source.index("#ifndef TEST\nint main")]
    notices = re.findall(r'(?:notice|warn)\(((?:"(?:[^"\\]|\\.)*"\s*)+)([^;]*)\);', source)
    assert len(notices) >= 15
    for parts, arguments in notices:
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts)).replace('\\"', '"').replace("\\\\", "\\")
        if "/file: %s" in text or "goes on" in text or text.startswith("%s: "):   # with a path
            continue
        text = text.replace("%s", "generate").replace("%zu", "262144").replace("%d", "262144")
        assert len("qwen3: " + text) <= 80, text
    format, = re.findall(r'"(prompt %zu .*?)\\n"', source)
    text = format.replace("%zu", "4096").replace("%.*f", "22000").replace("%s", ", seed 999999")
    assert len(text) <= 80, text


# -- control characters

BIDI = [chr(c).encode() for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]    # directions
CONTROL = [b"\x1b]0;title\x07", b"\x1b[2J", b"a\rb", b"\xc2\x9b2J", b"\x9b2J", b"\x00", b"\x7f", b"\xc2\x85"]
UNSHOWN = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"


@pytest.mark.parametrize("text", [*CONTROL, *BIDI[::4]], ids=ascii)
def test_control_characters_on_a_terminal(chain, tmp_path, text):
    """Each becomes U+FFFD, in an answer and a list's line; newline, CRLF and tab stay. Into a pipe go the bytes."""
    data = bytes(b for b in dict.fromkeys(text + b"|\r\n\t!") if b != ord("a"))
    run = (chain("a", *spell(data), END), "-m", "generate", "-t", 0, "-q")
    (tmp_path / "list").write_text("a\n")
    assert output(*run, "-i", "a") == data
    assert json.loads(output(*run, "-l", tmp_path / "list")) == data.decode(errors="replace")
    for args in ("-i", "a"), ("-l", tmp_path / "list"):
        shown = shown_by(*run, *args).replace(b"\r\n", b"\n").replace(b"\r\n", b"\n").decode()
        assert not re.search(UNSHOWN, shown), (shown, data)
        assert args[0] == "-l" or "\ufffd" in shown and shown.endswith("|\n\t!\n")


def test_control_characters_of_thinking_on_stderr(chain, tmp_path):
    """stdout is a file, and stderr a terminal."""
    model = chain("\u010a", "<think>", *spell(b"\x1b\xc2\x9b]"), END)
    child = spawn_shell(f"{QUOTED_QWEN3} {model} -t 0 -i x > {tmp_path}/out")
    finish(child)
    assert "<think>\ufffd\ufffd]" in child.before.decode()


def test_control_characters_in_messages(small):
    """C1 ones too, and bytes that are not UTF-8, whatever is said."""
    for name in (b"no\x1b[2Jsuch", b"no\xc2\x9b2J", b"no\x9b2J", b"a\nb", b"x\x7f\xc2\x85", b"".join(BIDI)):
        for args in ((name + b".bin", "-i", "x"), ("M", name), (small, "-f", name), ("M", "-m", name)):
            result = qwen3(*args)
            message = result.stderr.decode()
            assert result.returncode in (1, 2) and "\ufffd" in message
            assert not re.search(UNSHOWN, message) and message.count("\n") == 1


# -- embed, and what a model does without -m

@pytest.mark.parametrize("text", [b"the wind\n", b"a\0b", b" caf\xc3\xa9 \xff"], ids=ascii)
def test_embed(embedding, tmp_path, text):
    model, ids = Model.from_bin(embedding), tokenize(embedding, text)
    line = output(embedding, "-q", stdin=text)
    numbers = re.fullmatch(rb"\[(.*)\]\n", line)[1].split(b", ")
    digits = [len(re.sub(rb"^-?[0.]*|e.*|\.", b"", x)) for x in numbers]
    assert max(digits) == 9 and sum(digits) > 8.5 * 64  # all that an fp32 has; trailing zeros are left out
    vector = np.array(json.loads(line))
    assert vector.shape == (64,) and abs(np.linalg.norm(vector) - 1) < 1e-7
    assert vector @ model.embedding(ids) > 0.999
    (tmp_path / "text").write_bytes(text)
    for args in (("-f", tmp_path / "text"), ("-m", "embed", "-f", "-")):
        assert output(embedding, "-q", *args, stdin=text) == line
    for cut in (("-j", 1), ("-b", 1), ("-c", len(ids))):
        assert output(embedding, "-q", *cut, stdin=text) == line
    assert_error(qwen3(embedding, "-f", tmp_path / "text", "-c", len(ids) - 1), 1, "-c", len(ids) - 1, f"found {len(ids)}")


def test_embed_with_a_model_that_is_not_made_for_it(embedding, small, tmp_path):
    """A notice. Of an older file nobody knows what it is made for."""
    notice = b"qwen3: -m embed: poor vectors, this is no embedding model; expected one\n"
    old = copy_model(small, tmp_path, extension=False)
    for args, expected in (((small, "-m", "embed"), 1), ((small, "-m", "embed", "-q"), 1), ((small, "-m", "embed", "-qq"), 0), ((embedding,), 0),
                           ((embedding, "-m", "embed"), 0), ((old, "-m", "embed"), 0)):
        result = qwen3(*args, "-i", "x")
        assert result.returncode == 0 and result.stderr.count(notice) == expected, result
    assert qwen3(small, "-m", "embed", "-l", "-", stdin=b"x\ny\n").stderr.count(notice) == 1


def test_base_model_continues_texts(chain, tokenizer, tmp_path):
    """On a pipe, with -i and on a terminal; a notice says so, and -m has the last word. export.py marks such a model: it
    has a template, but only <|endoftext|> ends a text."""
    marks = {b"stop": struct.pack("<I", tokenizer.token_to_id("<|endoftext|>")), b"mode": struct.pack("<I", 1)}
    base = change_sections(copy_model(chain("a", "b", "c", END), tmp_path), lambda sections: sections.update(marks))
    for args, stdin in ((("-i", "a"), b"c"), ((), b"a")):
        result = qwen3(base, "-t", 0, "-n", 2, *args, stdin=stdin)
        assert result.stdout == b"bc"
        notice, rest = result.stderr.split(b"\n", 1)
        assert notice.startswith(b"qwen3: ") and b"generate" in notice and b"-m chat" in notice
        assert qwen3(base, "-t", 0, "-n", 2, "-m", "generate", *args, stdin=stdin).stdout == b"bc"
        assert b"generate" not in rest
    assert qwen3(base, "-t", 0, "-n", 2, "-qq", "-i", "a").stderr == b""
    assert b"bc" in shown_by(base, "-i", "a", "-n", 2, "-t", 0)
    result = qwen3(base, "-m", "chat", "-t", 0, "-n", 1, "-v", stdin=b"x\ny\n")
    assert result.stderr.count(b"prompt ids: ") == 2 and b"mode:" not in result.stderr


# -- generate

@pytest.mark.parametrize("tokens, text", [
    *[(("b", stop, "c"), b"b") for stop in (END, "<|endoftext|>")],
    (("<|im_start|>", "b", "<tool_call>", "<|box_start|>", "c", "<think>", "d", "</think>", "<|fim_pad|>", "e", END),
     b"b<tool_call>c<think>d</think><|fim_pad|>e"),     # special tokens are not printed, others are
    *[((*spell(data), END), data) for data in (         # characters whose bytes are tokens come out whole
        b"\xc3\xa9", b"\xf0\x9f\x99\x82", b"\xff", b"\xe2\x82Z", b"\x80\xc3\xa9",
        b"\xf0\x9f\xc3\xa9", b"\xed\xa0\x80", b"\0", b"%n")]], ids=ascii)
def test_what_is_written(chain, tokens, text):
    result = qwen3(chain("a", *tokens, *["<|im_start|>"] * (tokens[-1] != END)), "-m", "generate", "-i", "a", "-t", 0, "-q")
    assert result.stdout == text and result.returncode == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_end_inside_a_character(chain, tmp_path, seed):
    """One U+FFFD stands for what is there of it. JSON has as many as Python makes of the whole answer."""
    r = random.Random(seed)
    data = bytes(r.sample(range(0x78, 0x100), 60))      # each once, as a chain goes on from each token
    data = re.sub(b"[\xc2-\xf4][\x80-\xbf]?$", b"", data)  # -n cuts inside characters, the end is none
    run = (chain("a", *spell(data), END), "-m", "generate", "-t", 0, "-q")
    (tmp_path / "list").write_text("a\n")
    cuts = [n for n in range(1, len(data)) if data[n - 1] >= 0xC2]
    for n in [*r.sample(cuts, 9), len(data)]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data[:n])
        half = len(decoder.getstate()[0])
        assert output(*run, "-i", "a", "-n", n) == data[:n - half] + "\ufffd".encode() * (half > 0)
        assert json.loads(output(*run, "-l", tmp_path / "list", "-n", n)) == data[:n].decode(errors="replace")


def test_generate_without_prompt_starts_from_endoftext(chain, tokenizer):
    model = chain("<|endoftext|>", "b", "c", END)
    for args, stdin in (((), b""), (("-i", ""), b"not read"), (("-f", "/dev/null"), b"not read")):
        result = qwen3(model, "-m", "generate", "-t", 0, "-v", *args, stdin=stdin)
        assert result.stdout == b"bc" and prompts(result) == [[tokenizer.token_to_id("<|endoftext|>")]]


@pytest.mark.parametrize("mode", ["generate", "perplexity"])
def test_quiet_and_verbose(small, tokenizer, mode):
    """Special tokens in a raw prompt are those."""
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = tokenizer.encode(text).ids
    run = (small, "-m", mode, "-i", text, "-n", 4, "-s", 1)
    verbose, quiet = qwen3(*run, "-v"), qwen3(*run, "-q")
    cut = b"qwen3: answer: ended by -n after 4 tokens\n" if mode == "generate" else b""
    assert quiet.stderr == cut and quiet.stdout == verbose.stdout == qwen3(*run).stdout
    assert prompts(verbose) == [ids] == [tokenize(small, text.encode())]
    lines = verbose.stderr.split(b"\n")
    assert lines[0].startswith(b"prompt ids: ") and lines[2] == b"qwen3: cache: -c 512 -C 32"
    assert lines[1].startswith(b"qwen3: model: hf, 8 bits in groups of 64, export.py ")
    if mode == "generate":
        assert lines[3].startswith(b"qwen3: sampling: ") and b"by -n after 4 tokens" in lines[4]
        assert STATS.fullmatch(lines[5] + b"\n").groups() == (b"%d" % len(ids), b"0", b"4", b"1")
        assert len(lines) == 7


def test_verbose_shows_what_holds(tiny, tokenizer, tmp_path):
    """The sampling settings, wherever they come from, and the system prompt that only the template knows of."""
    hf = make_checkpoint(tmp_path / "hf", tokenizer, template=CHATS["default system prompt"][0])
    (hf / "generation_config.json").write_text(json.dumps({
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "do_sample": True, "repetition_penalty": 1.05}))
    model, sampling = export(hf, tmp_path / "model.bin"), "sampling: -t 0.5 -p 0.5 -k 3 -a 0 -e 1.05"
    for path, args, expected in (
            (tiny, (), ["sampling: -t 0.7 -p 0.8 -k 20 -a 0 -e 1"]),        # Qwen's advice
            (tiny, ("-r", 1), ["sampling: -t 0.6 -p 0.95 -k 20 -a 0 -e 1"]),
            (tiny, ("-t", 0, "-p", 0.25, "-k", 7, "-a", 1.5, "-e", 1.1), ["sampling: -t 0 -p 0.25 -k 7 -a 1.5 -e 1.1"]),
            *[(tiny, args, []) for args in (                                # nothing is drawn
                ("-m", "tokenize"), ("-m", "embed"), ("-m", "perplexity"), ("-o", "a|b"))],
            (model, ("-r", 1), [sampling, "system prompt of the chat template: Be good."]),
            *[(model, args, [sampling]) for args in (("-r", 1, "-y", "A."), ("-m", "generate"))]):
        error = qwen3(path, "-i", "x y", "-v", "-n", 1, *args).stderr.decode()
        assert re.findall(r"qwen3: ((?:sampling|system prompt).*)\n", error) == expected, args
    assert not re.search(b"sampling|model: ", qwen3(model, "-i", "x", "-n", 1).stderr)
    source = "Qwen/Qwen3-0.6B@main, 8 bits \x1b[2J灯"
    change_sections(model, lambda sections: sections.update({b"from": source.encode()}))
    assert qwen3(model, "-m", "tokenize", "-i", "x", "-v").stderr.decode() == \
        "qwen3: model: Qwen/Qwen3-0.6B@main, 8 bits \ufffd[2J灯\n"
    script = qwen3(model, "-m", "chat", "-v", "-n", 1, stdin=b"x\ny\n").stderr
    assert script.count(b"sampling: ") == script.count(b"of the chat template: ") == 1


@pytest.mark.parametrize("options, length", [
    *[(("-n", n), n) for n in (0, 1, 5, 30)], *[(("-c", 20, *n), 20) for n in ((), ("-n", -1))],
    (("-c", 0, "-n", -1), 512)], ids=str)
def test_n_and_the_context_limit_new_tokens(chain, options, length):
    model = chain("a", "b", "a")                        # forever
    result = qwen3(*options, model, "-m", "generate", "-i", "a", "-t", 0)       # options on both sides of MODEL
    assert result.returncode == 0 and result.stdout == (b"ba" * 256)[:length]
    assert int(STATS.search(result.stderr)[3]) == length


# -- how it ends

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_is_an_error(small):
    for args in (["-h"], *([small, "-m", mode, "-i", "hello you", "-n", "5", "-qq"] for mode in MODES)):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([QWEN3, *args], stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                    env=environment(), timeout=300)
        assert result.returncode == 1, args
        assert result.stderr.startswith(b"qwen3: ") and result.stderr.count(b"\n") == 1

"""The command line as scripts see it: options, prompt sources, output, exit status. No terminals
here (test_chat.py has those), and nothing about the numbers (test_model.py)."""
import json
import os
import re
import struct
import subprocess

import numpy as np
import pytest
from checkpoints import make_embedding, with_config, with_ends
from conftest import (QUOTED_QWEN3, QWEN3, ROOT, STATS, assert_error, change_sections, copy_model, environment, export,
                      finish, make_checkpoint, output, perplexity, prompts, qwen3, shell, spawn,
                      spawn_shell, tokenize)
from reference import Model
from test_faults import needs_address_space
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

@pytest.mark.parametrize("option, value", [
    ("-m", "train"), ("-m", ""), ("-m", "chatx"),
    ("-r", "1.5"), ("-r", "yes"), ("-r", ""), ("-r", "-1"),
    ("-t", "-0.1"), ("-t", "warm"), ("-t", "nan"), ("-t", "inf"), ("-t", ""), ("-t", "1x"),
    ("-p", "0"), ("-p", "1.01"), ("-p", "-1"), ("-p", "nan"), ("-p", "x"), ("-p", ""),
    ("-k", "-1"), ("-k", "1.5"), ("-k", "x"), ("-k", ""), ("-k", "99999999999999999999"),
    ("-a", "-0.1"), ("-a", "2.1"), ("-a", "nan"), ("-a", "x"), ("-a", ""),
    ("-e", "0"), ("-e", "-1"), ("-e", "nan"), ("-e", "x"), ("-e", ""), ("-e", "101"),
    ("-s", "x"), ("-s", ""), ("-s", "1.5"), ("-s", "99999999999999999999999"), ("-s", "12 3"),
    ("-n", "-2"), ("-n", "x"), ("-n", ""), ("-n", "99999999999999999999"),
    ("-c", "-1"), ("-c", "x"), ("-c", ""), ("-c", "1e3"), ("-c", "99999999999999999999"),
    ("-b", "0"), ("-b", "513"), ("-b", "-1"), ("-b", "x"), ("-b", ""),
    ("-j", "0"), ("-j", "-1"), ("-j", "x"), ("-j", ""), ("-j", "99999999999999999999"),
])
def test_bad_value(option, value):
    """A usage error, found before the model is opened (there is none)."""
    result = qwen3("no such model.bin", "-i", "hi", option, value)
    assert_error(result, 2, option, value)
    assert b"no such model" not in result.stderr
    assert b"expected" in result.stderr


@pytest.mark.parametrize("args", [
    ("-x",), ("-e",), ("--frobnicate",), ("-i",), ("-t",), ("extra.bin",), ("-i", "hi", "extra"), ("-",), ("--help-me",),
    ("-qx",), ("-x", ""), ("-f", ""), ("-q", "-v"), ("-s", "-9223372036854775809"),
    ("-l", "a", "-L", "b"), ("-l", "a", "-f", "b"), ("-L", "a", "-f", "-"), ("-l", "a", "-v"), ("-L", "a", "-v"),
    ("-l",), ("-L",), ("-l", ""), ("-L", ""),
    ("-w", "x"), ("-w", "x", "-i", "a"), ("-l", "a", "-w", "-"), ("-l", "a", "-w", ""), ("-l", "a", "-w"),
    *[("-i", "a", "-o", *args) for args in (
        ("yes",), ("yes|",), ("yes|yes",), (b"caf\xe9|no",), ("yes|no", "-m", "embed"), ("yes|no", "-m", "tokenize"),
        ("yes|no", "-m", "perplexity"), ("yes|no", "-x", "a"))]], ids=str)
def test_bad_usage(args):
    """Found before the model is opened (there is none)."""
    result = qwen3("no such model.bin", *args)
    assert_error(result, 2)
    assert b"no such model.bin: " not in result.stderr


@pytest.mark.parametrize("args", [(), ("-i", "hi"), ("-i",), ("", "-i", "hi")], ids=" ".join)
def test_no_model(args):
    assert_error(qwen3(*args), 2)


@pytest.mark.parametrize("option, value", [
    ("-s", "-9223372036854775808"), ("-s", "18446744073709551615"), ("-s", "0"), ("-p", "1"),
    ("-p", "1e-3"), ("-k", "0"), ("-k", "2147483647"), ("-a", "2"), ("-a", "0"), ("-t", "0"),
    ("-t", "1e3"), ("-b", "512"), ("-b", "1"), ("-c", "0"), ("-c", "512"), ("-r", "1"), ("-j", "1"),
    ("-j", "5"), ("-n", "1"), ("-t", "1e-30"), ("-t", "1e-50"), ("-e", "1"), ("-e", "0.01"), ("-e", "100"), ("-x", "a"), ("-x", "\n")])
def test_good_value(small, option, value):
    length = () if option == "-n" else ("-n", 3)
    assert output(small, "-m", "generate", "-i", "the", *length, "-q", option, value) is not None


def test_options_before_and_after_the_model(small):
    expected = output(small, "-m", "tokenize", "-i", "hello")
    assert output("-m", "tokenize", small, "-i", "hello") == expected
    assert output("-i", "hello", "-m", "tokenize", small) == expected


@pytest.mark.parametrize("option, value", [
    ("-i", "a"), ("-f", "-"), ("-l", "-"), ("-L", "-"), ("-m", "chat"), ("-y", "a"), ("-r", "0"), ("-t", "0"),
    ("-p", "1"), ("-k", "1"), ("-a", "1"), ("-e", "1"), ("-x", "a"), ("-s", "1"), ("-n", "1"), ("-c", "0"),
    ("-b", "1"), ("-j", "1"), ("-q", None), ("-v", None)])
def test_an_option_given_twice(option, value):
    """Whatever its values, and wherever it stands. What looks like an option may be a value."""
    args = [option] if value is None else [option, value]
    assert_error(qwen3("no such model.bin", *args, *args), 2, f"{option}: given twice")
    assert_error(qwen3(*args, "no such model.bin", *args), 2, f"{option}: given twice")
    if value is not None and option != "-i":
        assert_error(qwen3("no such model.bin", "-i", option, *args), 1)


@pytest.mark.parametrize("option", ["-h", "--help", "-help", "--version"])
def test_help_and_version(option):
    for args in ((option,), ("no such model.bin", option)):
        result = qwen3(*args)
        assert result.returncode == 0 and result.stderr == b"" and result.stdout.endswith(b"\n")
    assert option != "--version" or result.stdout.count(b"\n") == 1


def test_help_names_every_option():
    text = qwen3("-h").stdout.decode()
    for option in "-i -f -m -y -r -t -p -k -a -e -x -s -n -c -b -j -q -v -h --version".split():
        assert re.search(rf"(?m)(^|[\s,/|\[]){option}\b", text), option
    assert all(mode in text for mode in MODES)
    assert max(map(len, text.split("\n"))) <= 100


@pytest.mark.parametrize("args, words", [
    (("M", "Why?"), ['"M"', 'goes with -i', '-i "Why?"']),
    (("M", "-p", "Why?"), ["-p", "prompt goes with -i", '"Why?"']),
    (("M", "-n10"), ["-n10", "-n 10"]), (("-n10", "M"), ["-n10", "-n 10"]),
    (("M", "-p", "0"), ["above 0 and up to 1"]), (("-m", "model.bin", "-i", "x"), ["MODEL goes without -m"]),
    (("-m", "models/M", "-i", "x"), ["MODEL goes without -m"]),
    (("run", "M"), ["run: ", "no commands", "qwen3 MODEL"]), (("M", "-i", "a", "b"), ["b: ", "in quotes"]),
    (("M.bin", "N.bin"), ["N.bin: a second model", '"M.bin"']),
    (("M", "-ngl", "99"), ["-ngl: unknown option", "all runs on the CPU"]), (("M", "--json"), ["--json", "-L FILE"]),
    *[(("M", other, "1"), [other, f"expected {option}"]) for other, option in (
        ("--temp", "-t"), ("--temperature", "-t"), ("--top-p", "-p"), ("--top-k", "-k"), ("--seed", "-s"),
        ("--prompt", "-i"), ("--threads", "-j"), ("--ctx-size", "-c"), ("--n-predict", "-n"),
        ("--temp=1", "-t"), ("--max-tokens", "-n"), ("--max_tokens", "-n"), ("--top_p", "-p"), ("--top_k=3", "-k"),
        ("-temp", "-t"), ("--system", "-y"), ("-sys", "-y"), ("--repeat_penalty", "-e"), ("--stop", "-x"),
        ("--num_ctx", "-c"), ("--think", "-r 1"), ("--enable_thinking", "-r 1"), ("--no-think", "-r 0"),
        ("--verbose", "-v"), ("--quiet", "-q"), ("--grammar", "-o 'TEXT|TEXT'"), ("--json-schema", "-o 'TEXT|TEXT'"),
        ("--format", "-o 'TEXT|TEXT'"), ("--embedding", "-m embed"), ("--interactive", "nothing: without -i"),
        ("--stream", "nothing"), ("-i=x", "a space: -i x"), ("-t.7", "a space: -t .7"))],
    *[((command, "qwen3"), [f"{command}: ", "no commands", "qwen3 MODEL", "export.py"])
      for command in ("pull", "run", "chat", "list")], (("serve",), ["serve: ", "no commands"]),
    (("M", "-t", "0,7"), ['"0,7"', "point"]), (("M", "-p", "0,9"), ['"0,9"', "point"]),
    (("M", "-r", "on"), ["0 (off), 1 (on) or N", '"on"']),
    *[(args, [word, "typographic", "expected - or \""]) for word, args in (
        ("\u2013i", ("M", "\u2013i", "Hi")), ("\u2013i", ("\u2013i", "Hi", "M")), ("\u2014n", ("M", "\u2014n", "3")),
        ("\u2212n", ("M", "-i", "x", "\u2212n", "3")), ("\u201cWhat", ("M", "-i", "\u201cWhat", "is")),
        ("\u2018What", ("-i", "\u2018What", "is", "M")), ("\u201eWas", ("M", "\u201eWas", "ist")))],
    (("M", "--model", "1"), ["--model", "MODEL without an option"])],
    ids=lambda x: " ".join(x))
def test_likely_first_mistakes(args, words):
    """They say what to do, before any model is opened."""
    assert_error(qwen3(*args), 2, *words)


def test_a_file_where_its_text_is_meant(small, tmp_path):
    """-y FILE and -i FILE are taken as texts, as always; a notice names what reads a file."""
    (tmp_path / "a b.txt").write_text("Be brief.")
    name = str(tmp_path / "a b.txt")
    run = (small, "-m", "chat", "-n", 1)
    assert f"""qwen3: -y: the name of a file, taken as text; its text: -y "$(cat '{name}')"\n""".encode() in \
        qwen3(*run, "-i", "x", "-y", name).stderr
    assert b"qwen3: -i: the name of a file, taken as text; -f reads it\n" in qwen3(*run, "-i", name).stderr
    for args in (("-i", "x", "-y", "Be brief."), ("-i", str(tmp_path)), ("-f", name)):
        assert b"of a file" not in qwen3(*run, *args).stderr


def test_likely_first_models(tmp_path):
    """A GGUF file, a checkpoint's directory or part, a name on the hub: the command that exports it."""
    (tmp_path / "M.gguf").write_bytes(b"GGUF" + bytes(1000))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(1000))

    def run(path):
        return subprocess.run([QWEN3, path, "-i", "x"], cwd=tmp_path, capture_output=True, env=environment())

    for path, command in [
            (tmp_path / "M.gguf", f"export.py {tmp_path}/M.gguf"), ("M.gguf", "export.py M.gguf"),
            (tmp_path, f"export.py {tmp_path}"), (".", "export.py ."), ("../", "export.py ../"),
            ("model-00001-of-00002.safetensors", "export.py ."),
            (tmp_path / "model-00001-of-00002.safetensors", f"export.py {tmp_path}\n"),
            ("Qwen/Qwen3-0.6B", "export.py Qwen/Qwen3-0.6B"),
            ("Qwen/Qwen3-0.6B-GGUF:Q4_0", "export.py Qwen/Qwen3-0.6B-GGUF:Q4_0")]:
        assert_error(run(path), 1, command)
    assert_error(run("none/M.bin.tokenizer"), 1, "none/M.bin.tokenizer: belongs to a model, expected none/M.bin\n")
    (tmp_path / "Qwen3-0.6B.bin").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.bin").write_bytes(b"")
    for path in "Qwen3-0.6B", "folder":
        assert_error(run(path), 1, f"{path}: no model, expected {path}.bin\n")
    for path in ("none.bin", "Qwen/none.bin", "./a/b", "a/b/c", "/Qwen/x"):
        result = run(path)
        assert_error(result, 1)
        assert b"export.py " not in result.stderr, result


# -- where the prompt comes from (tokenize shows it exactly)

TEXTS = [b"hello", b"hello\n", b"hello\r\n", b"\n", b" \t hello  \n\n", b"a\0b", b"\0", b"",
         b"caf\xc3\xa9", b"\xff", b"\xfe\xfd", b"a\xff\xfe", b" \xef\xbb\xbf", b"\xef\xbb"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_file_and_pipe_are_taken_exactly(small, tokenizer, tmp_path, text):
    (tmp_path / "text").write_bytes(text)
    ids = tokenize(small, text)
    run = (small, "-m", "tokenize")
    assert output(*run, "-f", tmp_path / "text") == b"%s\n" % b" ".join(b"%d" % i for i in ids)
    assert output(*run, "-f", "-", stdin=text) == output(*run, "-f", tmp_path / "text")
    both = output(*run, "-f", "-", stdin=b"question\n\n" + text)
    for file in (tmp_path / "text", "-"):
        for args in (("-i", "question", "-f", file), ("-f", file, "-i", "question")):
            assert output(*run, *args, stdin=text) == both
    if b"\0" not in text:
        assert output(*run, "-i", text) == output(*run, "-f", tmp_path / "text")
    if text.isascii():
        assert ids == tokenizer.encode(text.decode()).ids


def test_byte_order_marks(small, tmp_path):
    """Of UTF-8: dropped at the start of a file, a pipe or a list, once. Of UTF-16: an error. An argument is taken
    as it is."""
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
    assert qwen3(*run, "-l", "-", stdin=mark).stdout == output(*run, "-L", "-", stdin=mark) == b""
    chat = (small, "-m", "chat", "-t", 0, "-n", 3, "-q")
    assert output(*chat, stdin=mark + b"a b\n") == output(*chat, stdin=b"a b\n")
    for data in (b"\xff\xfeh\0\n\0", b"\xfe\xff\0h\0\n", b"\xff\xfe"):
        (tmp_path / "text").write_bytes(data)
        for args in ((), ("-f", "-"), ("-f", tmp_path / "text"), ("-l", "-"), ("-L", "-"), ("-m", "chat")):
            args = (small, "-q", *args) if args[:1] == ("-m",) else (*run, *args)
            assert_error(qwen3(*args, stdin=data), 1, "text" if args[-1] == tmp_path / "text" else "stdin",
                         "UTF-16", "UTF-8")


@pytest.mark.parametrize("mode", MODES)
def test_bytes_that_are_not_utf_8(small, tmp_path, mode):
    """They are taken as they are, and the first ones are a notice: which input, which line."""
    notice = "qwen3: {}: line {} is not UTF-8, taken as it is; if it is Latin-1 (a guess): iconv -f LATIN1 -t UTF-8\n"
    latin, good = b"a b\ncaf\xe9 au\nl\xe4it\n", "a b\ncafé au\nläit \U0001f642\n".encode()
    run = (small, "-m", mode, "-n", 2, "-t", 0)
    (tmp_path / "file").write_bytes(latin)

    def said(*args, stdin=b""):
        result = qwen3(*run, *args, stdin=stdin)
        assert result.returncode == 0 and result.stderr.count(b"UTF-8,") <= 1, result
        assert result.stdout == qwen3(*run, "-q", *args, stdin=stdin).stdout
        assert b"UTF-8" not in qwen3(*run, "-q", *args, stdin=stdin).stderr
        return result.stderr.decode()

    assert notice.format(tmp_path / "file", 2) in said("-f", tmp_path / "file")
    assert notice.format(tmp_path / "file", 2) in said("-i", "é", "-f", tmp_path / "file")
    assert notice.format("stdin", 2) in said(stdin=latin)
    assert notice.format("-i", 1) in said("-i", b"\xe9 or", "-f", tmp_path / "file")
    assert notice.format(tmp_path / "file", 2) in said("-l", tmp_path / "file")
    assert notice.format("stdin", 3) in said("-l", "-", stdin=good[:4] + good[:4] + latin[4:])
    assert notice.format("-y", 1) in said("-y", b"\xff", "-i", "a b")
    for args in (("-f", "-"), ("-l", "-"), ("-i", good)):
        assert "UTF-8" not in said(*args, stdin=good)
    long = qwen3(*run, "-f", tmp_path / "file", "-c", 2)
    assert mode == "tokenize" or mode == "perplexity" or long.stderr.count(b"\n") == 1, long   # an error is alone


@pytest.mark.parametrize("text", [b"", b"\n", b"\r\n"], ids=ascii)
def test_a_text_of_no_bytes(small, embedding, tmp_path, text):
    """An error in chat and embed, where else it is a prompt. Chat drops a file's last newline."""
    (tmp_path / "text").write_bytes(text)
    for model, mode in ((small, "chat"), (small, "embed"), (embedding, "embed")):
        for args in ((), ("-f", "-"), ("-f", tmp_path / "text"), ("-i", "a", "-f", tmp_path / "text"), ("-i", text)):
            if mode == "chat" and not args:
                continue                                # -m chat: a conversation
            result = qwen3(model, "-m", mode, "-n", 1, "-q", *args, stdin=text)
            if args[:2] == ("-i", "a") or text and (mode == "embed" or args[:1] == ("-i",)):
                assert result.returncode == 0, result
            else:
                assert_error(result, 1, "empty, expected a ")
    if text == b"":
        assert_error(qwen3(small, "-i", "a", "-f", "-"), 1, "stdin: empty")
        assert_error(qwen3(small, "-q"), 1, "stdin: empty, expected a prompt; has a command before the pipe failed?")
        script = qwen3(small, "-m", "chat")
        assert script.returncode == 0 and script.stdout == script.stderr == b""
        for mode, status in (("generate", 0), ("tokenize", 0), ("perplexity", 1)):
            assert qwen3(small, "-m", mode, "-n", 1, "-i", "").returncode == status
            assert qwen3(small, "-m", mode, "-n", 1).returncode == status
    script = qwen3(small, "-m", "chat", "-n", 1, "-q", stdin=b"a b\n" + text + b"c d\n")
    assert script.returncode == (text != b"") and (b"empty" in script.stderr) == (text != b"")


@pytest.mark.parametrize("mode", MODES)
def test_stdin_is_left_alone(small, tmp_path, mode):
    """`while read x; do ./qwen3 m.bin -i "$x"; done < list` sees every line."""
    (tmp_path / "list").write_bytes(b"one two\nthree four\nfive six\n")
    (tmp_path / "text").write_bytes(b"some text")
    for prompt in ('-i "$x"', f'-f {tmp_path / "text"}', f'-i "$x" -f {tmp_path / "text"}'):
        script = f"while read x; do {QUOTED_QWEN3} {small} -m {mode} -n 2 -q {prompt} >&2; echo run; done"
        result = shell(script, stdin=open(tmp_path / "list", "rb"))
        assert result.stdout == b"run\n" * 3, result.stderr


NOT_READ = b"qwen3: stdin: has data that was not read; -f - would add all of it\n"


@pytest.mark.parametrize("mode", MODES)
def test_data_beside_the_prompt_is_a_notice(small, tmp_path, mode):
    """Of a pipe that has data, and of a file at its start; not with -q, not if stdin is read, not without
    data, and it never waits."""
    (tmp_path / "text").write_bytes(b"some text\n")
    (tmp_path / "empty").write_bytes(b"")

    def notices(*options, stdin):
        result = subprocess.run([QWEN3, small, "-m", mode, "-n", "1", *options], stdin=stdin, timeout=300,
                                capture_output=True, env=environment())
        assert result.returncode == 0, result
        return result.stderr.count(NOT_READ)

    def pipe(data):
        theirs, ours = os.pipe()
        os.write(ours, data)
        return theirs, ours

    for options in (("-i", "a b"), ("-f", tmp_path / "text"), ("-i", "a b", "-f", tmp_path / "text")):
        for data in (b"unread", b""):
            theirs, ours = pipe(data)                   # which stays open
            assert notices(*options, stdin=theirs) == (data != b"")
            if data and options[0] == "-i":
                assert notices(*options, "-q", stdin=theirs) == 0
                assert os.read(theirs, 100) == data
            os.close(theirs), os.close(ours)
        assert notices(*options, stdin=subprocess.DEVNULL) == 0
    for name, at, expected in (("text", 0, 1), ("text", 5, 0), ("text", 10, 0), ("empty", 0, 0)):
        with open(tmp_path / name, "rb", buffering=0) as file:
            file.seek(at)
            assert notices("-i", "a b", stdin=file) == expected, (name, at)
    for options in (), ("-f", "-"), ("-i", "a b", "-f", "-"):
        with open(tmp_path / "text", "rb") as file:
            assert notices(*options, stdin=file) == 0


def test_missing_prompt_file(small):
    missing = qwen3(small, "-f", "missing.txt")
    assert_error(missing, 1, "missing.txt: No such file or directory")
    assert b"-i" not in missing.stderr
    assert_error(qwen3(small, "-f", "What is it?"), 1, "-i takes a text")
    assert_error(qwen3(small, "-f", "/"), 1, "/")


def test_terminal_without_prompt(small, embedding, random_model):
    """Also of a model that is none for chats. A pipe of no bytes is a text."""
    base = random_model(template=None)
    for args in ((embedding,), (base,), *((small, "-m", mode) for mode in MODES[1:])):
        child = spawn(*args)
        assert finish(child) == 2 and re.match(b"qwen3: (-m generate: no text, )?.*expected -i TEXT", child.before)
    assert qwen3(base, "-n", 1).returncode == 0


@needs_address_space
def test_default_context(random_model):
    """As many tokens as a quarter of the memory holds: a multiple of 1,024, at least 4,096, at most the model's.
    Perplexity's pieces don't depend on it."""
    model, short = random_model(max_len=1_000_000), random_model(max_len=5000)

    def context(megabytes, *options, model=model, limit="-v"):
        child = spawn_shell(f"ulimit {limit} {megabytes * 1024}; exec {QUOTED_QWEN3} {model} -j 1 {' '.join(options)}")
        child.expect(r": context (\d+), thinking off, /help shows the commands\r\n> ")
        tokens = int(child.match[1])
        child.sendline("/bye")
        assert finish(child) == 0
        return tokens

    for megabytes in 300, 600:
        quarter = megabytes * 2**20 / 4                 # 1,024 bytes a token, or 1,280 with what aligns them
        assert quarter / 1280 - 1024 < context(megabytes) <= quarter / 1024
        assert context(megabytes) % 1024 == 0
    assert context(300, limit="-d") == context(300)
    assert context(300, model=short) == 5000
    assert context(300, "-c", "1000") == 1000
    large = random_model(max_len=1_000_000, n_layers=20, n_kv_heads=4)
    assert context(200, model=large) == 4096            # 20 KB a token
    scored = qwen3(model, "-m", "perplexity", "-i", "7" * 5000)
    assert b"text: 5000 tokens are scored in pieces of 4096 (-c)" in scored.stderr


NEWLINE = "-x: these are a backslash and an n, for a newline: -x $'\\n'"
OPTIONS_WITHOUT_EFFECT = [  # mode, options, the notice or None
    *[(mode, ("-n", 3), "-n: no effect, only an answer has new tokens") for mode in MODES[2:]],
    *[(mode, ("-x", "a"), "-x: no effect, only an answer can end early") for mode in MODES[2:]],
    *[(mode, ("-y", "a"), "-y: no effect, only -m chat has a system prompt") for mode in MODES[1:]],
    *[(mode, ("-r", "1"), "-r: no effect, only -m chat thinks") for mode in MODES[1:]],
    ("chat", ("-r", "1"), "-r: no effect, this model's thinking can't be switched"),
    *[(mode, ("-x", stop), NEWLINE) for mode in MODES[:2] for stop in ("\\n", ". \\n")],   # as a shell gives '\n'
    *[(mode, ("-x", stop), None) for mode in MODES[:2] for stop in ("\n", "n", "\\")],
    *[(mode, (), None) for mode in MODES], ("chat", ("-n", "3", "-x", "a", "-y", "a"), None)]


@pytest.mark.parametrize("mode, options, notice", OPTIONS_WITHOUT_EFFECT)
def test_options_without_effect(small, mode, options, notice):
    run = (small, "-m", mode, "-i", "hello there", *options, *["-n", 1] * (mode in MODES[:2] and "-n" not in options))
    result = qwen3(*run)
    found = re.findall("qwen3: (-[nxyr]: .*)\n", result.stderr.decode())
    assert result.returncode == 0 and found == [notice] * bool(notice), result
    assert mode in MODES[:2] or qwen3(*run, "-q").stderr == b""


@pytest.mark.parametrize("args, length, words", [
    *[(("-m", mode), 700, ["at most 512 tokens (-c can't be larger), found 7", "; split the text, or export.py --yarn\n"])
      for mode in ("chat", "generate", "embed")],
    *[(("-m", mode, "-c", 64), 90, ["at most 64 tokens (-c, up to 512), found "]) for mode in ("chat", "generate", "embed")],
    (("-m", "generate", "-c", 64), 65, ["at most 64 tokens", "found 65"]), (("-c", 513), 1, ["-c", 512, 513])])
def test_too_long(small, args, length, words):
    """-c where it helps, and only there; else what does."""
    result = qwen3(small, "-i", "7" * length, *args)
    assert_error(result, 1, *words)
    assert (b"--yarn" in result.stderr) == ("-c" not in args or 513 in args)
    assert length != 65 or qwen3(small, "-i", "7" * 63, *args, "-n", 1).returncode == 0


# -- special tokens

def test_special_tokens_in_raw_prompts(small, tokenizer):
    text = "<|im_start|>user\nhi<|im_end|>"
    assert tokenize(small, text.encode()) == tokenizer.encode(text).ids
    assert tokenize(small, text.encode())[0] == tokenizer.token_to_id("<|im_start|>")
    ids = " ".join(map(str, tokenizer.encode(text).ids))
    for mode in "generate", "perplexity":
        result = qwen3(small, "-m", mode, "-i", text, "-n", 1, "-v")
        assert result.stderr.startswith(f"prompt ids: {ids}\n".encode())


def test_special_tokens_in_chat_are_text(small, tokenizer):
    result = qwen3(small, "-i", "a<|im_end|>b", "-y", "<think>", "-n", 1, "-v")
    ids = [int(i) for i in re.search(rb"prompt ids: ([\d ]+)\n", result.stderr)[1].split()]
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 2          # system's and user's own
    assert tokenizer.token_to_id("<think>") not in ids[:ids.index(
        tokenizer.token_to_id("<|im_end|>"))]
    assert "a<|im_end|>b" in tokenizer.decode(ids, skip_special_tokens=False)


# -- tokenize -v

def test_tokens_one_by_one(small, tokenizer):
    text = 'the "old"\\ lighthouse\n\t\x7f\x9b\0 灯<|im_end|>'
    lines = output(small, "-m", "tokenize", "-v", stdin=text.encode()).decode().split("\n")
    assert lines.pop() == ""
    ids = tokenize(small, text.encode())
    assert [int(line.split(" ", 1)[0]) for line in lines] == ids
    tokens = [line.split(" ", 1)[1] for line in lines]
    assert all(json.loads(token) or "\\u0000" in token for token in tokens)
    values = {letter: byte for byte, letter in enumerate(spell(range(256)))}
    for token, id in zip(tokens, ids):
        piece = tokenizer.id_to_token(id)
        data = piece.encode() if piece == "<|im_end|>" else bytes(values[letter] for letter in piece)
        assert json.loads(token).replace("\ufffd", "") == data.decode("utf-8", "ignore")
        if data[:1] in (b"\xe7", b"\x81", b"\xaf"):
            assert token == '"' + "\\ufffd" * len(data) + '"'
        assert token.isprintable()
    assert '"\\u007f"' in tokens and '"<|im_end|>"' in tokens


def test_seeds_that_it_picks_are_short(small):
    seeds = {int(STATS.search(qwen3(small, "-m", "generate", "-i", "x", "-n", 1).stderr)[4]) for _ in range(8)}
    assert max(seeds) < 10**6 and len(seeds) > 4


def test_lines_fit_into_80_columns():
    """Every notice that a terminal may see and the statistics, with the largest numbers that the program
    picks itself; the source is read for that, as no model of this size is here."""
    source = (ROOT / "qwen3.c").read_text()
    source = source[:source.index("#ifndef TEST\nint main")]
    notices = re.findall(r'notice\(((?:"(?:[^"\\]|\\.)*"\s*)+)([^;]*)\);', source)
    assert len(notices) >= 15
    for parts, arguments in notices:
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts)).replace('\\"', '"').replace("\\\\", "\\")
        if "/file: %s" in text or "goes on" in text or text.startswith("%s: "):   # with a path
            continue
        text = text.replace("%s", "generate").replace("%zu", "262144").replace("%d", "262144")
        assert len("qwen3: " + text) <= 80, text
    commands = source[source.index("char commands[]"):source.index("static void send_file")]
    assert max(len(eval(line)) for line in re.findall(r'"(?:[^"\\]|\\.)*"', commands)) <= 81
    format, = re.findall(r'"(prompt %zu .*?)\\n"', source)
    text = format.replace("%zu", "4096").replace("%.*f", "22000").replace("%s", ", seed 999999")
    assert len(text) <= 80, text


# -- control characters

CONTROL = [b"\x1b]0;title\x07", b"\x1b[2J", b"a\rb", b"\xc2\x9b2J", b"\x9b2J", b"\x00", b"\x7f", b"\xc2\x85"]


@pytest.mark.parametrize("text", CONTROL, ids=ascii)
def test_control_characters_on_a_terminal(chain, text):
    """Each becomes U+FFFD, as do bytes that are not UTF-8; into a pipe go the bytes. Newline, CRLF and
    tab stay."""
    data = bytes(b for b in dict.fromkeys(text + b"\r\n\t!") if b != ord("a"))     # a chain has each token once
    model = chain("a", *spell(data), END)
    assert output(model, "-m", "generate", "-i", "a", "-t", 0, "-q") == data
    child = spawn(model, "-m", "generate", "-i", "a", "-t", 0, "-q")
    finish(child)
    shown = child.before.replace(b"\r\n", b"\n").replace(b"\r\n", b"\n").decode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown) and "\ufffd" in shown, (shown, data)


def test_control_characters_of_thinking_on_stderr(chain, tmp_path):
    """stdout is a file, and stderr a terminal."""
    model = chain("\u010a", "<think>", *spell(b"\x1b\xc2\x9b]"), END)
    child = spawn_shell(f"{QUOTED_QWEN3} {model} -t 0 -i x > {tmp_path}/out")
    finish(child)
    assert "<think>\ufffd\ufffd]" in child.before.decode()


def test_control_characters_in_messages(small):
    """C1 ones too, and bytes that are not UTF-8, whatever is said."""
    for name in (b"no\x1b[2Jsuch", b"no\xc2\x9b2J", b"no\x9b2J", b"a\nb", b"x\x7f\xc2\x85"):
        for args in ((name + b".bin", "-i", "x"), ("M", name), (small, "-f", name), ("M", "-m", name)):
            result = qwen3(*args)
            message = result.stderr.decode()
            assert result.returncode in (1, 2) and "\ufffd" in message
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", message) and message.count("\n") == 1


BIDI = [chr(c) for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))]


def test_no_text_turns_the_terminal_around(chain, tmp_path):
    """Characters that change the direction of what follows: in an answer, a file's name and a list's line. A pipe
    gets them as they are."""
    for c in BIDI[::4]:
        model = chain("a", *spell(c.encode()), END)
        run = (model, "-m", "generate", "-t", 0, "-q")
        assert output(*run, "-i", "a").decode() == c
        child = spawn(*run, "-i", "a")
        assert finish(child) == 0 and child.before.decode().strip() == "\ufffd"
        assert json.loads(output(*run, "-l", "-", stdin=b"a\n")) == c
        (tmp_path / "list").write_text("a\n")
        child = spawn(*run, "-l", tmp_path / "list")
        assert finish(child) == 0 and child.before.decode().strip() == '"\ufffd"'
    message = qwen3(f"x{''.join(BIDI)}gpj.bin", "-i", "x").stderr.decode()
    assert f"x{len(BIDI) * chr(0xfffd)}gpj.bin: No such file" in message


# -- perplexity

@pytest.mark.parametrize("text", [b"", b"a", b"<|im_end|>"], ids=ascii)
def test_perplexity_of_too_little(small, text):
    assert_error(qwen3(small, "-m", "perplexity", stdin=text), 1, "2")


def test_batches_leave_every_digit_of_a_perplexity(small):
    """Also of a huge one: no partial sums."""
    text = "".join(chr(33 + i * 7 % 90) for i in range(400)).encode()
    lines = {output(small, "-m", "perplexity", "-b", b, stdin=text) for b in (1, 2, 3, 7, 64, 100, 511, 512)}
    assert len(lines) == 1


def test_perplexity_of_many_digits(table_model):
    """A line of 128 bytes was cut inside the number."""
    _, nll, ppl = perplexity(table_model({None: {7: 500}}), "-i", "hello there")
    assert nll > 300 and ppl == pytest.approx(np.exp(nll), rel=1e-4)


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
    for args, expected in (((small, "-m", "embed"), 1), ((small, "-m", "embed", "-q"), 0), ((embedding,), 0),
                           ((embedding, "-m", "embed"), 0), ((old, "-m", "embed"), 0)):
        result = qwen3(*args, "-i", "x")
        assert result.returncode == 0 and result.stderr.count(notice) == expected, result
    assert qwen3(small, "-m", "embed", "-l", "-", stdin=b"x\ny\n").stderr.count(notice) == 1


@pytest.fixture
def base(chain, tokenizer, tmp_path):
    """A base model, as export.py marks one: it has a template, but only <|endoftext|> ends a text."""
    marks = {b"stop": struct.pack("<I", tokenizer.token_to_id("<|endoftext|>")), b"mode": struct.pack("<I", 1)}
    return change_sections(copy_model(chain("a", "b", "c", END), tmp_path), lambda sections: sections.update(marks))


def test_base_model_continues_texts(base):
    """On a pipe, with -i and on a terminal; a notice says so, and -m has the last word."""
    for args, stdin in ((("-i", "a"), b"c"), ((), b"a")):
        result = qwen3(base, "-t", 0, "-n", 2, *args, stdin=stdin)
        assert result.stdout == b"bc"
        notice, rest = result.stderr.split(b"\n", 1)
        assert notice.startswith(b"qwen3: ") and b"generate" in notice and b"-m chat" in notice
        assert qwen3(base, "-t", 0, "-n", 2, "-m", "generate", *args, stdin=stdin).stdout == b"bc"
        assert b"generate" not in rest
    assert qwen3(base, "-t", 0, "-n", 2, "-q", "-i", "a").stderr == b""
    child = spawn(base, "-i", "a", "-n", 2, "-t", 0)
    child.expect("bc")
    assert finish(child) == 0
    result = qwen3(base, "-m", "chat", "-t", 0, "-n", 1, "-v", stdin=b"x\ny\n")
    assert result.stderr.count(b"prompt ids: ") == 2 and b"mode:" not in result.stderr


# -- generate

@pytest.mark.parametrize("tokens, text", [
    *[(("b", stop, "c"), b"b") for stop in (END, "<|endoftext|>")],
    (("<|im_start|>", "b", "<tool_call>", "<|box_start|>", "c", "<think>", "d", "</think>", "<|fim_pad|>", "e", END),
     b"b<tool_call>c<think>d</think><|fim_pad|>e"),     # special tokens are not printed, others are
    *[((*spell(data), END), data) for data in (         # characters whose bytes are tokens come out whole
        b"\xc3\xa9", b"\xf0\x9f\x99\x82", b"\xf0\x9f\x99", b"\xc3", b"\xff", b"\xe2\x82Z", b"\x80\xc3\xa9",
        b"\xf0\x9f\xc3\xa9", b"\xed\xa0\x80", b"\0")]], ids=ascii)
def test_what_is_written(chain, tokens, text):
    result = qwen3(chain("a", *tokens, *["<|im_start|>"] * (tokens[-1] != END)), "-m", "generate", "-i", "a", "-t", 0, "-q")
    assert result.stdout == text and result.returncode == 0


def test_generate_without_prompt_starts_from_endoftext(chain, tokenizer):
    model = chain("<|endoftext|>", "b", "c", END)
    for args, stdin in (((), b""), (("-i", ""), b"not read"), (("-f", "/dev/null"), b"not read")):
        result = qwen3(model, "-m", "generate", "-t", 0, "-v", *args, stdin=stdin)
        assert result.stdout == b"bc" and prompts(result) == [[tokenizer.token_to_id("<|endoftext|>")]]


def test_statistics(chain):
    model = chain("a", "b", "c", "d", "<|im_end|>")
    result = qwen3(model, "-m", "generate", "-i", "xxa", "-t", 0, "-s", 7)
    match = STATS.fullmatch(result.stderr)
    assert match, result.stderr
    assert match[1] == b"3" and match[2] == b"0" and match[4] == b"7"
    assert match[3] in (b"3", b"4")                     # with or without the end token


def test_quiet_and_verbose(small):
    run = (small, "-m", "generate", "-i", "hello", "-n", 4, "-s", 1)
    assert qwen3(*run, "-q").stderr == b""
    lines = qwen3(*run, "-v").stderr.split(b"\n")
    assert re.fullmatch(rb"prompt ids: \d+( \d+)*", lines[0])
    assert lines[1].startswith(b"qwen3: model: hf, 8 bits in groups of 64, export.py ")
    assert lines[2].startswith(b"qwen3: sampling: ")
    assert len(lines) == 6 and b"by -n after 4 tokens" in lines[3] and STATS.fullmatch(lines[4] + b"\n")
    assert qwen3(*run, "-q").stdout == qwen3(*run, "-v").stdout == qwen3(*run).stdout


def test_verbose_shows_what_holds(tiny, small, tokenizer, tmp_path):
    """The sampling settings, wherever they come from, and the system prompt that only the template knows of."""
    def shown(*args):
        return re.findall(r"qwen3: ((?:sampling|system prompt).*)\n", qwen3(*args, "-v", "-n", 1).stderr.decode())

    assert shown(tiny, "-i", "x") == ["sampling: -t 0.7 -p 0.8 -k 20 -a 0 -e 1"]            # Qwen's advice
    assert shown(tiny, "-i", "x", "-r", 1) == ["sampling: -t 0.6 -p 0.95 -k 20 -a 0 -e 1"]
    assert shown(tiny, "-i", "x", "-t", 0, "-p", 0.25, "-k", 7, "-a", 1.5, "-e", 1.1) == [
        "sampling: -t 0 -p 0.25 -k 7 -a 1.5 -e 1.1"]
    for args in (("-m", "tokenize"), ("-m", "embed"), ("-m", "perplexity"), ("-o", "a|b")):
        assert shown(tiny, "-i", "x y", *args) == []                                        # nothing is drawn
    hf = make_checkpoint(tmp_path / "hf", tokenizer, template=CHATS["default system prompt"][0])
    (hf / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 0.5, "top_k": 3, "do_sample": true, '
                                               '"repetition_penalty": 1.05}')
    model, sampling = export(hf, tmp_path / "model.bin"), "sampling: -t 0.5 -p 0.5 -k 3 -a 0 -e 1.05"
    assert shown(model, "-i", "x", "-r", 1) == [sampling, "system prompt of the chat template: Be good."]
    assert shown(model, "-i", "x", "-r", 1, "-y", "Be brief.") == shown(model, "-i", "x", "-m", "generate") == [sampling]
    assert "sampling" not in qwen3(model, "-i", "x", "-n", 1).stderr.decode()
    source = "Qwen/Qwen3-0.6B@main, 8 bits \x1b[2J灯"
    change_sections(model, lambda sections: sections.update({b"from": source.encode()}))
    assert qwen3(model, "-m", "tokenize", "-i", "x", "-v").stderr.decode() == \
        "qwen3: model: Qwen/Qwen3-0.6B@main, 8 bits \ufffd[2J灯\n"
    assert b"model: " not in qwen3(model, "-i", "x", "-n", 1).stderr
    script = qwen3(model, "-m", "chat", "-v", "-n", 1, stdin=b"x\ny\n").stderr
    assert script.count(b"sampling: ") == script.count(b"of the chat template: ") == 1


@pytest.mark.parametrize("options, length", [
    *[(("-n", n), n) for n in (0, 1, 5, 30)], *[(("-c", 20, *n), 20) for n in ((), ("-n", -1))],
    (("-c", 0, "-n", -1), 512)], ids=str)
def test_n_and_the_context_limit_new_tokens(chain, options, length):
    model = chain("a", "b", "a")                        # forever
    result = qwen3(model, "-m", "generate", "-i", "a", "-t", 0, *options)
    assert result.returncode == 0 and result.stdout == (b"ba" * 256)[:length]
    assert int(STATS.search(result.stderr)[3]) == length


# -- the context

def test_context_of_one_token(small):
    """Nothing fits, but nothing breaks."""
    for mode in ("generate", "chat", "perplexity"):
        result = qwen3(small, "-m", mode, "-i", "hello there", "-c", 1)
        assert result.returncode in (1, 2) and result.stderr.count(b"\n") == 1


# -- how it ends

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk_is_an_error(small):
    for args in (["-h"], *([small, "-m", mode, "-i", "hello you", "-n", "5", "-q"] for mode in MODES)):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([QWEN3, *args], stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                                    env=environment(), timeout=300)
        assert result.returncode == 1, args
        assert result.stderr.startswith(b"qwen3: ") and result.stderr.count(b"\n") == 1


def test_text_comes_as_it_is_made(chain, start):
    """The first bytes are there long before the last."""
    model = chain("i", "a", "i", max_len=100_000)
    child = start(model, "-m", "generate", "-i", "hi", "-c", "0", "-t", "0", "-n", "-1")
    assert child.stdout.read(1) == b"a" and child.poll() is None


# -- format strings

def test_texts_are_never_formats(small, tokenizer):
    text = "%s%n%d%100000000d"
    assert tokenize(small, text.encode()) == tokenizer.encode(text).ids
    result = qwen3(small, "-i", text, "-y", text, "-n", 2, "-v")
    assert result.returncode == 0
    assert_error(qwen3("%s%n%d.bin", "-i", "x"), 1, "%s%n%d.bin")
    assert_error(qwen3("m.bin", "-m", "%s%n%d"), 2, "%s%n%d")

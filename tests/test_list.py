"""Lists of texts (-l, -L): each line is what its text gets alone, bit for bit, and nothing that is written is lost."""
import contextlib
import ctypes
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import (CHATML, GREEDY, HELLO, HYBRID, LINUX, QUOTED_QWEN3, QWEN3, RATE, STATS, TINY, WORDS, alone,
                      assert_error, change_sections, compile_template, copy_model, environment, errors_of, finish, join_lines,
                      json_string, needs_address_space, needs_small_pipes, output, outputs, qwen3, random_talk, run_json,
                      run_list, shell, show_progress, small_pipe, spawn, spawn_shell, stop, tokenize, wait_for_call,
                      wait_until, waiting, write_list)

TOKENS = RATE.replace("/s", " tokens/s")
SUM = re.compile((r"(\d+) texts? in [\d.]+ s, prompts (\d+) tokens \((\d+) cached\), "
                  rf"answers (\d+) tokens, {TOKENS}, seeds (\d+) to (\d+)\n").encode())


def make_texts(n, seed=1, longest=60):
    """Texts of very different lengths, some empty, some that begin alike."""
    r = random.Random(seed)
    texts, common = [], " ".join(r.choices(WORDS, k=40))
    for i in range(n):
        length = r.choice((0, 1, 2, 3, 5, 8, 13, 30, longest))
        text = " ".join(r.choices(WORDS, k=length))
        texts.append((common + " " + text if i % 4 == 3 else text).encode())
    return texts


def check(model, texts, *args, mode="chat", seed=None, prefix=None, before=(), **how):
    """The list's lines are those of single runs; returns them and what is said of those that are wrong.
    `before`: options of the list alone."""
    expected = []
    for i, text in enumerate(texts):
        whole = text if prefix is None or not text and mode in ("chat", "embed") else prefix + b"\n\n" + text
        expected.append(alone(model, whole, *args, mode=mode, seed=None if seed is None else seed + i))
    options = ["-m", mode, *args, *before, *([] if seed is None else ["-s", seed]),
               *([] if prefix is None else ["-i", prefix])]
    lines, error = run_list(model, texts, *options, "-qq", status=int(b"null" in expected), **how)
    wrong = [i for i in range(len(expected)) if lines[i:i + 1] != [expected[i]]]
    assert not wrong, [(i, texts[i], lines[i:i + 1], expected[i]) for i in wrong[:3]]
    assert len(lines) == len(expected)
    said = errors_of(error)
    assert said.keys() == {i for i, line in enumerate(lines, 1) if line == b"null"}, error
    return lines, said


# -- the same bits

ODD = [b"a\0b", b"\xff\x80 \xe2\x82", b" ", b"a "]
MODES = {"generate": (("-n", 30), {"seed": 5}), "embed": ((), {}), "perplexity": ((), {}), "tokenize": ((), {})}
ALIKE = [  # name, texts, options, how
    *[(f"greedy {n}", make_texts(n), (*GREEDY, "-n", 40), {}) for n in (1, 2, 31, 32, 33)],
    *[(f"sampled {n}", make_texts(n, seed=2), ("-n", 30), {"seed": 7}) for n in (1, 33)],
    *[(" ".join(args) + f" {prefix}", make_texts(12, seed=3), (*args, "-n", 40), {"seed": 11, "prefix": prefix})
      for args, prefix in (
          (("-y", "Your name is Max."), None), ((), b"Is this positive?\nAnswer yes or no."), (("-r", "1"), None),
          (("-x", "e"), None), (("-a", "1.5", "-e", "1.3"), None), (("-y", "Be brief.", "-r", "1", "-x", ". "), b"Say: "),
          (("-t", "1.5", "-k", "0", "-p", "1"), b""))],    # an empty -i is not none: the empty line stays
    *[(" ".join(map(str, options)), make_texts(20, seed=6), ("-n", 25), {"seed": 3, "before": options}) for options in (
        ("-j", 1), ("-j", 3), ("-b", 1), ("-b", 2), ("-b", 7), ("-b", 33), ("-j", 2, "-b", 40))],
    *[(mode, [*make_texts(33, seed=4), *ODD], args, {"mode": mode} | how) for mode, (args, how) in MODES.items()],
    *[(f"{mode} -i", make_texts(4, seed=5), args, {"mode": mode, "prefix": b"Before:"} | how)
      for mode, (args, how) in MODES.items()],
    ("pieces of a perplexity", make_texts(12, seed=9, longest=100), ("-c", 20), {"mode": "perplexity"}),
    ("pieces of pieces", make_texts(6, seed=9, longest=100), ("-c", 20, "-b", 7), {"mode": "perplexity"})]
@pytest.mark.parametrize("texts, args, how", [pytest.param(*row, id=name) for name, *row in ALIKE])
@pytest.mark.parametrize("cache", [32, 8])
def test_each_line_is_its_text_alone(tiny, texts, args, how, cache):
    check(tiny, texts, *args, "-C", cache, **how)


def test_any_bytes(small):
    """Of a text, and of what a random model answers."""
    texts = [b"\0", b"a\0", b"\xff\xfe", b"\xe2\x82", b"\r", b"\ra", b"\x1b[2J", b"\x7f\xc2\x9b", b'"\\"', b" x "]
    texts = [text + b" x" if text.endswith(b"\r") else text for text in texts]
    for mode in "chat", "generate":
        lines, _ = check(small, texts, "-n", 40, "-t", 5, "-k", 0, "-p", 1, mode=mode, seed=1)
        assert all(isinstance(json.loads(line), str) for line in lines)
    assert any(b"\\ufffd" in line for line in lines) and any(b"\\u00" in line for line in lines)


def test_small_context(tiny):
    """Texts that fill it, texts that are too long for it, by one token and by many."""
    texts = make_texts(40, seed=8, longest=300)
    assert 2 < len(check(tiny, texts, "-c", 100, seed=3)[1]) < 20
    texts = [b"a " * n for n in range(40)]
    _, said = check(tiny, texts, "-c", 32, "-n", 3, seed=3, mode="generate")
    assert said.keys() == {n + 1 for n in range(40) if len(tokenize(tiny, texts[n])) > 32}


@needs_address_space
@pytest.mark.parametrize("kilobytes", [60_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_little_memory(tiny, kilobytes):
    """The cache has a quarter of it: few texts fit, and some give theirs back and begin again."""
    texts = [b" ".join([text] * 2) for text in make_texts(40, seed=7, longest=100)]
    options = ["-c", 0, "-n", 250, "-t", 3, "-k", 0, "-p", 1]
    expected = [alone(tiny, text, *options, seed=i) for i, text in enumerate(texts)]
    script = f"ulimit -v {kilobytes}; exec {QUOTED_QWEN3} {tiny} -l - -q -j 1 -s 0 {' '.join(map(str, options))}"
    done = shell(script, input=join_lines(texts))
    assert done.returncode == 0 and done.stdout.split(b"\n")[:-1] == expected, done.stderr


@pytest.mark.parametrize("mode", ["chat", "generate"])
@pytest.mark.parametrize("seed", [-3, 2**64 - 1, None])
def test_seeds(tiny, mode, seed):
    """Text i has the seed S + i modulo 2^64, and without -s stderr says from where on."""
    how = ("-n", 30, "-t", 5, "-k", 0, "-p", 1)
    lines, error = run_list(tiny, b"Tell me a story\n" * 4, "-m", mode, *how, *["-s", seed] * (seed is not None))
    said = re.match(rb"seed (\d+)\n", error)
    assert seed is not None and not said or int(said[1]) < 10**6
    seeds = [((int(said[1]) if said else seed) + i) % 2**64 for i in range(4)]
    assert lines == [alone(tiny, b"Tell me a story", *how, mode=mode, seed=s) for s in seeds] and len(set(lines)) == 4
    assert b"seeds %d to %d\n" % (seeds[0], seeds[3]) in error


@pytest.mark.parametrize("bad, cache", [(np.nan, 32), (np.nan, 8), (np.inf, 32), (np.inf, 8)])
def test_not_finite(tokenizer, random_model, tmp_path, bad, cache):
    """That text has no answer; others have theirs, also those that begin like it or share its block of the cache."""
    model = copy_model(random_model(tied=False), tmp_path)
    data = bytearray(model.read_bytes())
    scale = outputs(data)["embed_tokens.weight"].scales + tokenizer.token_to_id("z") * 4
    assert abs(np.frombuffer(data[scale:scale + 4], "<f4")[0]) < 1
    data[scale:scale + 4] = np.array(bad, "<f4").tobytes()
    model.write_bytes(data)
    texts = [text.replace(b"z", b"y") for text in make_texts(40, seed=1, longest=10)]
    nulls = {0, 7, 8, 13, 17, 20, 39}
    for i in (0, 7, 8, 39):
        texts[i] = b"a z b"
    texts[13:19] = [b"a common beginning of all" + end for end in (b"z b", b" Y", b" X", b"", b"zY", b" Z")]
    texts[20:23] = [b"What is the capital of France, " * 3 + end for end in (b"zebra", b"a", b"")]
    args = (*GREEDY, "-n", 9, "-C", cache)
    for mode in "chat", "generate", "perplexity", "embed":
        lines, said = check(model, texts, *args, mode=mode)
        assert all("finite" in said[i + 1] for i in nulls) and lines[14] != b"null"
        for batch in (1, 3, 7, 200):             # the cut into batches does not show
            assert alone(model, texts[14], "-b", batch, *args, mode=mode) == lines[14]
    for mode in "chat", "generate":             # an answer of no tokens needs no logits
        assert not check(model, [b"a z b", b"a b"], *GREEDY, "-n", 0, mode=mode)[1]


# -- the list's lines

def ids_of(model, data, *args, kind="-l", **how):
    return run_list(model, data, "-m", "tokenize", "-q", *args, kind=kind, **how)[0]


def test_newlines(small):
    """\\n or \\r\\n; the last line may have none; all else is the text's."""
    for data, texts in ((b"\n", [b""]), (b"a", [b"a"]), (b"a\n", [b"a"]), (b"a\nb", [b"a", b"b"]),
                        (b"a\r\nb\r\n", [b"a", b"b"]), (b"a\r\r\n", [b"a\r"]), (b"a\rb\n\n\r\n", [b"a\rb", b"", b""]),
                        (b"a\nb\r", [b"a", b"b\r"]), (b" a \t\n", [b" a \t"]), (b"a\0b\n\0\n", [b"a\0b", b"\0"]), (b"a\n\x1a", [b"a"]), (b"\x1a\na\x1a", [b"\x1a", b"a\x1a"]),
                        (b"\xef\xbb\xbfa\n", [b"\xef\xbb\xbfa"])):
        expected = [output(small, "-m", "tokenize", "-f", "-", stdin=text)[:-1] for text in texts]
        assert ids_of(small, data) == expected, data


@pytest.mark.parametrize("kind", ["-l", "-L"])
def test_no_texts(small, tmp_path, kind):
    """An empty list is an error, as no list is; so is one that its own output has emptied."""
    for mode in "chat", *MODES:
        assert_error(qwen3(small, kind, "-", "-m", mode, "-q"), 1, "stdin: no lines", "before a pipe failed?")
    (tmp_path / "a").write_text('"a"\n')
    done = shell(f"exec {QUOTED_QWEN3} {small} {kind} {tmp_path}/a > {tmp_path}/a")
    assert_error(done, 1, f"{tmp_path}/a: is the list and stdout")
    assert_error(qwen3(small, kind, tmp_path / "a", "-w", tmp_path / "a"), 1, f"{tmp_path}/a: is the list and -w's")
    for path in tmp_path / "none", tmp_path:
        assert_error(qwen3(small, kind, path, "-n", 1), 1, path)


@pytest.mark.parametrize("kind", ["-l", "-L"])
@pytest.mark.parametrize("piped", [False, True])
def test_a_list_that_is_its_own_output(small, tmp_path, kind, piped):
    """It would read its answers, and never end."""
    path = write_list(tmp_path / "list", [b'"a"'] * 40)
    source = "-" if piped else path
    done = shell(f"exec {QUOTED_QWEN3} {small} {kind} {source} -n 1 < {path} >> {path}", timeout=60)
    name = "stdin" if piped else path
    assert_error(done, 1, f"{name}: is the list and stdout, expected another FILE\n")
    assert path.read_bytes() == b'"a"\n' * 40


def test_errors_of_single_lines(tiny, tmp_path):
    """null where the answer would be; where and what on stderr, and the others have their answers."""
    long, ok = b"word " * 500, alone(tiny, b"Hello", *GREEDY)
    path = write_list(tmp_path / "texts.txt", [b"Hello", long, b"Hello", b"Hello", long * 100, b"Hello"])
    result = qwen3(tiny, "-l", path, "-c", 200, "-q", *GREEDY)
    assert result.returncode == 1
    assert result.stdout.split(b"\n") == [ok, b"null", ok, ok, b"null", ok, b""]
    found = errors_of(result.stderr, bytes(path))
    assert found.keys() == {2, 5} and all("200" in what for what in found.values())
    assert all("too long, expected at most" in what for what in found.values())
    assert all("(split the text, or export.py --yarn)" in what for what in found.values())  # more than the model can take
    lines, error = run_list(tiny, b"a b\n\nx\nc d\n", "-m", "perplexity", status=1)
    *errors, count, _ = error.splitlines(keepends=True)
    assert [line == b"null" for line in lines] == [0, 1, 1, 0] and errors_of(b"".join(errors)).keys() == {2, 3}
    assert count == b"qwen3: texts: ended in an error: 2\n"


@needs_address_space
@pytest.mark.parametrize("mode", ["chat", "generate", "embed", "tokenize", "perplexity"])
def test_a_prompt_that_would_take_too_much_memory(tiny, tmp_path, mode):
    """One far too long, or that takes more than half of the memory to encode, is not encoded; nor is a turn."""
    path = tmp_path / "prompt"
    path.write_bytes(b"a" * 30_000_000)
    for source in f"-f {path}", f"< {path}":
        done = shell(f"ulimit -v 300000; exec {QUOTED_QWEN3} {tiny} -m {mode} -j 1 -q -c 512 {source}")
        words = ["3 MB, because encoding takes 56 times as much, found 30 MB"] if mode in ("tokenize", "perplexity") else \
            ["512 tokens", "found 375000 or more"]
        assert_error(done, 1, f"prompt: too long, expected at most {words[0]}", *words[1:])


@needs_address_space
@pytest.mark.parametrize("mode", ["chat", "tokenize"])
@pytest.mark.parametrize("line", [b"7" * 40_000_000, b"a" * 5_000_000, b'{"id":%s,"text":"a b"}' % (b"1" * 99_000_000)],
                         ids=["tokens", "a piece", "a member"])
def test_a_line_that_takes_too_much_memory(tiny, tmp_path, mode, line):
    """Its error; the others run, also those that are long."""
    long = b"What is " * 2000
    for kind, quote in ("-l", b"%s"), ("-L", b'"%s"'):
        own = line if line[:1] == b"{" else quote % line
        hello = quote % b"Hello there"
        path = write_list(tmp_path / "list", [hello, own, hello, own, quote % long])
        script = f"ulimit -v 150000; exec {QUOTED_QWEN3} {tiny} {kind} {path} -m {mode} -t 0 -n 3 -qq -j 1 -c 512"
        done = shell(script)
        lines, found = done.stdout.split(b"\n")[:-1], errors_of(done.stderr, bytes(path))
        assert done.returncode == 1 and len(lines) == 5 and lines[0] == lines[2] != b"null", done
        assert lines[1].startswith((b"null", b'{"id":1')) and lines[3] == lines[1]
        assert found.keys() == ({2, 4, 5} if mode == "chat" else {2, 4})
        assert all("too long" in what or "memory" in what or "UTF-8" in what for what in found.values()), found


# -- JSON

STRINGS = [
    (b'"abc"', b"abc"), (b' \t "abc" \r', b"abc"), (b'""', b""),
    (rb'"a\n\t\r\b\f\/\\\"b"', b'a\n\t\r\b\f/\\"b'), (rb'"\u0041\u00e9\u00E9\u20ac"', "Aéé€".encode()),
    (rb'"\ud83d\ude42"', "🙂".encode()), (rb'"\uD83D\uDE42x"', "🙂x".encode()),
    (rb'"\ud83d"', "\ufffd".encode()), (rb'"\ude42"', "\ufffd".encode()), (rb'"\ud83dx"', "\ufffdx".encode()),
    (rb'"\ud83d\ud83d\ude42"', "\ufffd🙂".encode()), (rb'"\ud83d\u0041"', "\ufffdA".encode()),
    (rb'"\ude42\ud83d"', "\ufffd\ufffd".encode()), (rb'"\ud83d\n"', "\ufffd\n".encode()),
    (rb'"a\u0000b"', b"a\0b"), (rb'"\udbff\udfff"', "\U0010ffff".encode()),
    ('"Größe 灯塔 🙂"'.encode(), "Größe 灯塔 🙂".encode()), (b'"\x7f\xc2\x9b"', b"\x7f\xc2\x9b"),
    (rb'"<|im_end|>\n"', b"<|im_end|>\n"), (rb'"\\u0041\""', b'\\u0041"')]


def test_json_strings(small):
    """Also after a byte order mark, with \\r\\n and without a last newline."""
    lines, texts = zip(*STRINGS)
    expected = [output(small, "-m", "tokenize", "-f", "-", stdin=text)[:-1] for text in texts]
    assert ids_of(small, lines, kind="-L") == expected
    assert ids_of(small, b"\xef\xbb\xbf" + b"\r\n".join(lines), kind="-L") == expected


def test_json_of_texts(small):
    """Whatever json.dumps writes."""
    r = random.Random(3)
    texts = ["".join(chr(r.choice((r.randrange(128), r.randrange(0xD800), r.randrange(0xE000, 0x110000))))
                     for _ in range(r.randrange(60))) for _ in range(200)]
    expected = ids_of(small, texts, kind="-L")
    assert expected == ids_of(small, [json.dumps(t, ensure_ascii=False).encode() for t in texts], kind="-L")
    for text, ids in zip(texts[:40], expected):
        assert output(small, "-m", "tokenize", "-f", "-", stdin=text.encode())[:-1] == ids, text


NO_JSON = [b"", b"\t\r", b"abc", b'abc"', b'"abc" x', b'"a""b"', b"'a'", b'"a",', rb'"\x"', rb'"\u12"', rb'"\u"', b'"\\',
           rb'"\u 123"', rb'"\u+123"', b"nul", b'"a"\0', b"\0", b"{", b"]", b'\xef\xbb\xbf"a"', b'\xc2\xa0"a"', b'\x0b"a"']
NO_TEXT = [b"1", b"-0.5e3", b"null", b"true", b"false", b" 1 "]
MESSAGE = b'{"role": "user", "content": "a"}'
NO_MESSAGES = [b"[]", b'["a"]', b"[1]", b"[[]]", b"[null]", b'[{"content": "a"}]', b'[{role: "user", "content": "a"}]',
               b'[{"role": "tool", "content": "a"}]', b'[{"role": "User", "content": "a"}]',
               b'[{"role": "user", "content": false}]', b'[{"role": "user", "content": ["a"]}]',
               b'[{"role": "user", "text": "a"}]', b'[{"role": "user", "value": "a"}]',
               b'[{"role": 1, "content": "a"}]', b'[{"role": "user", "content": [{"type": "text", "text": 1}]}]',
               b"[%s,]" % MESSAGE, b"[,%s]" % MESSAGE, b"[%s %s]" % (MESSAGE, MESSAGE), b"[%s" % MESSAGE, b"[%s}" % MESSAGE,
               b"[%s] x" % MESSAGE, b'[{"role": "user", "content": "a",}]', b'[{"role" "user", "content": "a"}]',
               *[b'[{"role": "user", "content": "a", "x": %s}]' % value for value in (
                   b"01", b"nan", b"tru", b".5", b"+1", b"1.", b"1e", b"-", b"[1,]", b"{1: 2}", b'{"a": }', b"'a'")]]
NO_OBJECTS = [b'{%s' % HELLO, b'{%s]' % HELLO, b'{%s,}' % HELLO, b'{"a":01,%s}' % HELLO, b'{"a":"\\x",%s}' % HELLO,
              b'{"a":"\t",%s}' % HELLO, b'{%s} x' % HELLO, b'{"a":nul,%s}' % HELLO, b'{a:1,%s}' % HELLO,
              b'{"a":%s%s,%s}' % (b"[" * 10_000, b"]" * 10_000, HELLO), b'{"a":%s,%s}' % (b'{"b":' * 10_000, HELLO),
              b'{"a":%s%s,%s}' % (b"[" * 100, b"]" * 100, HELLO)]
NOT_UTF8 = [b'{"id":1,"text":"%s"}' % text for text in (
    "Größe".encode("latin-1"), "汉字".encode("gbk"), b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80")]
NOT_UTF8 += [b'{"id":"\xf6","text":"a"}', b'"\xf6"', b'{"\xf6":1,"text":"a"}', b'[{"role":"user","content":"\xf6"}]']
FOUND = [  # a line, and what of it is bad at which byte, and found there
    (b'"a\0b"', "JSON", 3, "a NUL"), (b" ", "JSON", 2, "the end"),
    *[(line, "JSON", len(line) + 1, "the end") for line in (
        b"[", b'"a', rb'"\u12', b'"\\', b'["a', b"[tru", b'[{"role": "user", "content": "a"},', b'[{"role": "user",', b'[{"role":', b'[{"role": "us')],
    (b'"a\tb"', "JSON", 3, '\ufffdb"'), (rb'"a\u12g4"', "JSON", 7, 'g4"'), (rb'"\x"', "JSON", 3, 'x"'), (b"[1, hello]", "JSON", 5, "hello]"),
    ('{"id":1,"text":"é'.encode("latin-1"), "JSON", 17, "\ufffd"),
    # messages that are JSON: what is wrong is named as what it is
    (b'[%s, {"role": "tool", "content": "a"}]' % MESSAGE, "role", 36, '{"role": "tool",'),
    (b'[{"content": 1, "role": "user"} ]', "content", 2, '{"content": 1, "'),
    (b'[{"role": "user", "content": {}}]', "content", 2, '{"role": "user",'), (b"[{}]", "messages", 2, "{}]"),
    (b'[%s, {"role": "system", "content": "a"}]' % MESSAGE, "role", 71, "the end"),
    (b'[{"role": "system", "content": "a"}]', "role", 37, "the end"),
    (b'[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]', "content", 40, '"image_url", "im'),
    (b'[{"role": "user", "content": ["a", {}]}]', "content", 31, '"a", {}]}]'),
    (b'[{"role": "user", "content": [{"text": "a"}]}]', "content", 31, '{"text": "a"}]}]'),
    (b'[{"role": "user", "content": [{"type": "text"}]}]', "content", 40, '"text"}]}]')]


def test_what_is_no_json(tiny):
    """Each bad line has its null and its message, and nothing of it goes out; the good ones are not disturbed."""
    bad = NOT_UTF8 + [line for line, *_ in FOUND] + NO_JSON + NO_TEXT + NO_MESSAGES + NO_OBJECTS
    lines, error = run_json(tiny, [b'"Hello"', *sum(([line, b'"Hello"'] for line in bad), [])], *GREEDY, "-q", status=1)
    assert lines[::2] == [alone(tiny, b"Hello", *GREEDY)] * (len(bad) + 1)
    assert [line for line, got in zip(bad, lines[1::2]) if got != b"null"] == []
    said = errors_of(error)
    assert sorted(said) == [2 * i + 2 for i in range(len(bad))]
    assert all("UTF-8 (iconv -f LATIN1" in said[2 * i + 2] for i in range(len(NOT_UTF8)))
    for i, (line, what, byte, found) in enumerate(FOUND, len(NOT_UTF8)):
        message = said[2 * i + 2]
        assert re.fullmatch(f"bad {what} at byte {byte}, expected .*, found {re.escape(found)}", message), line


@pytest.mark.parametrize("mode", MODES)
def test_messages_are_for_chat(tiny, mode):
    data = [b'"a"', b"[%s]" % MESSAGE, b'{"messages": [%s]}' % MESSAGE, b'[{"role": "user"}]', b'"a b c"']
    lines, error = run_json(tiny, data, "-m", mode, "-n", 1, "-qq", status=1)
    assert [line == b"null" for line in lines] == [mode == "perplexity", 1, 0, 1, 0]
    said = errors_of(error)
    assert all("-m chat" in said[line] for line in (2, 3, 4)), said


def test_what_messages_may_have(tiny):
    """Other keys, of any value; the last of equal ones; any order, any white space, escapes in keys."""
    good = alone(tiny, b"What is your name?", *GREEDY)
    content = b'"content": "What is your name?"'
    same = [b'[{"role": "user", %s}]', b'[{%s, "role": "user"}]', b' [ {"role":"user"\t,%s } ] ',
            b'[{"role": "user", %s, "name": "x", "n": -1.5e+10, "t": true, "f": false, "z": null, "e": 0E0}]',
            b'[{"role": "user", "a": {"content": "no", "role": [1, {"b": []}, {}]}, %s}]',
            b'[{"role": "assistant", "content": "no", "role": "user", %s}]',
            b'[{"content": 1, "role": null, "role": "user", %s}]', rb'[{"r\u006fle": "us\u0065r", %s}]',
            b'[{"role": "user", %s, "Content": "no", "content ": "no", "": "no"}]',
            b'[{"role": "user", %s, "tool_calls": [], "s": "\\ud800 \\" ] }"}]']
    assert run_json(tiny, [line % content for line in same], *GREEDY, "-q")[0] == [good] * len(same)


def test_no_content(tiny):
    """null, or none, is no text, as Qwen's templates have it: OpenAI's logs do so where an answer called a tool."""
    ask = {"role": "user", "content": "My name is Ann."}, {"role": "user", "content": "What is your name?"}
    for role in "system", "user", "assistant":
        other = {"role": role}, {"role": role, "content": None}, {"role": role, "content": ""}
        talks = [[message, *ask] if role == "system" else [ask[0], message, ask[1]] for message in other]
        rows = [json.dumps(talk).encode() for talk in talks] + [json.dumps({"messages": talk}).encode() for talk in talks]
        lines, _ = run_json(tiny, rows, *GREEDY, "-q")
        assert lines[0] == lines[1] == lines[2] and len(set(lines[3:])) == 1, (role, lines)
    for name in "contents", "Content", "message", "text":
        lines, error = run_json(tiny, [json.dumps([{"role": "user", name: "Hello"}]).encode(), b'"a"'], *GREEDY, "-q", status=1)
        assert lines[0] == b"null" and b"content" in error, error
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    lines, error = run_json(tiny, [json.dumps([ask[0], m, ask[1]]).encode() for m in (call, {**call, "content": ""})], *GREEDY)
    assert lines[0] == lines[1] != b"null" and error.count(b"no effect: tool_calls") == 1, error


def test_nesting(tiny):
    """Of 100 brackets, and no more."""
    hello = b'[{"role": "user", "content": "Hello", "x": %s'
    rows = [hello % (b"[" * (depth - 2) + b"]" * (depth - 2) + b"}]") for depth in (3, 99, 100, 101)]
    rows += [hello % (start * 100_000) for start in (b"[", b'{"a":')] + [b"[" * 10**6, b'"Hello"']
    lines, error = run_json(tiny, rows, *GREEDY, "-q", "-c", 0, status=1)
    good = alone(tiny, b"Hello", *GREEDY)
    assert lines == [good] * 3 + [b"null"] * 4 + [good] and errors_of(error).keys() == {4, 5, 6, 7}


CONTENTS = ["Hello", "What is your name?", "", "My name is Anna.", "What is my name?", "Größe 🙂\n\n", "\n x "]
SAID = ["Hello Anna", "", "<think>\n\n</think>\n\nyes", "a</think>\n\n b", "<think>half", "<tool_call>{}</tool_call>", " x\n", "\n\ny"]


@pytest.mark.parametrize("think, how", [(0, ("-s", 5, "-t", 0.7, "-k", 20, "-p", 0.8)), (1, GREEDY)])
def test_messages_are_rendered_as_the_template_does(tiny, think, how):
    """As a raw text, the rendered one has the same answer, drawn with the same seed."""
    template = json.loads((TINY / "model/tokenizer_config.json").read_text())["chat_template"]
    compiled, r = compile_template(template), random.Random(1)
    talks = [random_talk(r, CONTENTS, SAID, i % 2, r.randrange(4)) for i in range(33)]
    texts = [compiled.render(messages=talk, add_generation_prompt=True, enable_thinking=bool(think)) for talk in talks]
    lines, _ = run_json(tiny, talks, *how, "-r", think, "-n", 200, "-q")
    expected, _ = run_json(tiny, texts, *how, "-m", "generate", "-n", 200, "-q")
    if think:                                   # which is dropped
        expected = [re.sub(rb'"<think>.*?(</think>(\\n)*|"$)', rb'"', line) for line in expected]
        expected = [line if line.endswith(b'"') and line != b'"' else b'""' for line in expected]
    assert lines == expected


def test_content_parts(tiny):
    """Parts of text are joined by newlines; other members of theirs don't matter."""
    same = [("What is your name?", [{"type": "text", "text": "What is your name?"}]),
            ("What is\n\nyour name?", [{"text": "What is", "type": "text"}, {"type": "text", "text": "", "x": [1]},
                                       {"type": "no", "type ": 1, "text": "your name?"} | {"type": "text"}]), ("", [])]
    talks = [[{"role": "developer", "content": [{"type": "text", "text": "Your name is Max."}]},
              {"role": "user", "content": way}] for pair in same for way in pair]
    lines, _ = run_json(tiny, [*talks, {"id": 1, "messages": talks[1]}], *GREEDY, "-n", 9, "-q")
    assert lines[::2][:3] == lines[1::2][:3] and len(set(lines)) == 3 and b"Max" in lines[0]
    assert json.loads(lines[-1])["answer"] == json.loads(lines[0])


@pytest.mark.parametrize("joint", ["", " | ", "\n"], ids=ascii)
def test_content_parts_of_a_template_that_takes_them(random_model, joint):
    """They are joined as it joins them: vision models' by nothing."""
    part = "{% for p in m.content %}{{ p.text }}{{ '' if loop.last else " + repr(joint) + " }}{% endfor %}"
    model = random_model(template=CHATML.replace("{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% else %}"
                                                 + part + "{% endif %}"))
    contents = [[{"type": "text", "text": text} for text in ("What is", "your name?")], f"What is{joint}your name?", "What isyour\nname?"]
    lines, error = run_json(model, [[{"role": "user", "content": content}] for content in contents], *GREEDY, "-n", 9)
    assert lines[0] == lines[1] != lines[2], error


LAST_BLOCK = """{% for m in messages %}{% set text = m.content %}{% set ns = namespace(thought="") %}
{%- if m.role == "assistant" and "</think>" in text %}
{%- set ns.thought = text.split("</think>")[0].split("<think>")[-1].strip("\n") %}
{%- set text = text.split("</think>")[-1].lstrip("\n") %}{% endif %}
{{- "<|im_start|>" + m.role + "\n" }}
{%- if m.role == "assistant" and loop.last %}
{{- "<think>\n" + ns.thought + "\n</think>\n\n" + text.lstrip("\n") + "<|im_end|>\n" }}
{%- else %}{{- text + "<|im_end|>\n" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{% if enable_thinking is defined and not enable_thinking %}
{{- "<think>\n\n</think>\n\n" }}{% endif %}{% endif %}"""
BEGUN = ["The capital of", "", "\n\nThe", " x \n", "1. ", "<tool_call>{", "```python\n"]
THOUGHT = ["<think>\nabc\n</think>\n\nThe", "<think>\nlong\n\nthought\n</think>\n\n"]


@pytest.mark.parametrize("template, section, begun", [
    (CHATML, True, BEGUN), (HYBRID, True, BEGUN), (LAST_BLOCK, True, BEGUN + THOUGHT), (LAST_BLOCK, False, BEGUN + THOUGHT),
    (re.sub(r"{% if enable.*?endif %}", '{{- "<think>\\n" }}', LAST_BLOCK, flags=re.S), True, BEGUN + THOUGHT),
    (re.sub(r"{% if enable.*?endif %}", '{{- "<think>\\n" }}', LAST_BLOCK, flags=re.S), False, BEGUN + THOUGHT)],
    ids=["plain", "plain before the last", "hybrid", "hybrid, older file", "always", "always, older file"])
def test_answers_that_are_begun(random_model, tmp_path, template, section, begun):
    """A last message of the assistant goes on, as transformers renders it with continue_final_message=True."""
    model = random_model(template=template)
    if not section:
        model = change_sections(copy_model(model, tmp_path), lambda sections: sections.pop(b"begn"))
    compiled, r, talks, texts = compile_template(template), random.Random(1), [], []
    for i, said in enumerate(begun * 4):
        talk = random_talk(r, CONTENTS, BEGUN, i % 2, r.randrange(3)) + [{"role": "assistant", "content": said + "TAG"}]
        text, _, rest = compiled.render(messages=talk).rpartition("TAG")
        assert rest == "<|im_end|>\n"
        talk[-1]["content"] = said
        talks.append(talk)
        texts.append(text)
    raw, said = run_json(model, texts, *GREEDY, "-m", "generate", "-n", 9)
    for think in 0, 1:                          # -r has no effect
        lines, error = run_json(model, talks, *GREEDY, "-n", 9, "-r", think)
        assert lines == [re.sub(b"<think>.*", b'"', line) for line in raw]  # what it draws as thinking is dropped
        assert len(set(lines)) > len(begun)
        assert SUM.search(error)[2] == SUM.search(said)[2]                  # tokens of the prompts
    for think in 0, 1, 5:
        args = "-o", "a|bc|def", "-qq"
        assert run_json(model, talks, *args, "-r", think) == run_json(model, texts, *args, "-m", "generate")


def test_a_begun_answer_forges_nothing(tiny):
    """What spells a control token is plain text there, too."""
    def prompt(*contents):
        talk = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), contents)]
        assert (error := run_json(tiny, [talk] * 2, *GREEDY, "-n", 1)[1]).count(b": its last message is the assistant's, and ") == 1
        return int(SUM.search(error)[2])
    spelled = len(tokenize(tiny, b"<|im_end")) + len(tokenize(tiny, b"|>"))
    for said in "no<|im_end|>", "<think>\na<|im_end|>\n</think>\n\nno":
        assert prompt("Hello", said) >= prompt("Hello", said.replace("<|im_end|>", "")) + spelled - 1


def test_messages_beside_options(tiny):
    """-i is not before them; their own system message is there instead of -y."""
    user = {"role": "user", "content": "What is your name?"}
    talks = [[user], [{"role": "system", "content": "Your name is Max."}, user], "What is your name?"]
    lines, error = run_json(tiny, talks, *GREEDY, "-y", "Your name is Tom.", "-i", "Hello")
    assert error.count(b"no effect") == error.count(b"line 1: no effect: -i before messages (") == 1
    tom, max_, both = [alone(tiny, text, *GREEDY, "-y", system) for text, system in (
        (b"What is your name?", "Your name is Tom."), (b"What is your name?", "Your name is Max."),
        (b"Hello\n\nWhat is your name?", "Your name is Tom."))]
    assert lines == [tom, max_, both] and tom != max_
    assert b"line 1: no effect: -y with system (" in run_json(tiny, talks[1:], "-y", "x", "-n", 1)[1]


def test_a_conversation_that_is_too_long(tiny):
    """No turns are dropped, and no long message is encoded; thinking, which is left out, may be of any length."""
    long, user = "a" * 200_000, {"role": "user", "content": "Hello"}
    turn = [{"role": "user", "content": "word " * 20}, {"role": "assistant", "content": "word " * 20}]
    talks = [[user], [user, {"role": "assistant", "content": f"<think>{long}</think>\n\nHi"}, user],
             [*turn * 5, user], [{"role": "system", "content": long}, user],
             [{"role": "user", "content": long}, {"role": "assistant", "content": "a"}, user]]
    lines, error = run_json(tiny, talks, "-c", 128, "-n", 1, "-qq", *GREEDY, status=1)
    assert [line == b"null" for line in lines] == [False] * 2 + [True] * 3
    found = errors_of(error)
    assert sorted(found) == [3, 4, 5] and all("too long" in what for what in found.values())
    assert all(re.search(r", found \d+ or more(;|$)", found[n]) for n in (4, 5)), found


# -- the usual wrong lists

EACH, WHOLE, BATCH, ONE, ALONE = "jq -c '.[]'", "jq -c .", "jq -c '{custom_id} + .body'", "jq -c 'del(.text)'", "jq -c '[.]'"


@pytest.mark.skipif(not shutil.which("jq"), reason="no jq")
@pytest.mark.parametrize("data, mode, command", [
    ('[\n  {"id": 1, "text": "Hello"},\n  {"id": 2, "text": "Who are you?"}\n]\n', "chat", EACH),
    ('[{"id": 1, "text": "Hello"}, {"id": 2, "text": "Who are you?"}]', "chat", EACH),
    ('["Hello", "Who are you?"]', "chat", EACH), ('["Hello", "Who are you?"]', "embed", EACH),
    ('[\n"Hello",\n"Who are you?"]', "tokenize", EACH),
    ('[{"id": 1, "text": "Hello there"},\n{"id": 2, "text": "Who are you?"},\n{"id": 3, "text": "Hello you"}]', "perplexity", EACH),
    ('{"custom_id": "a", "method": "POST", "body": {"messages": [{"role": "user", "content": "Hello"}], "n": 1}}', "chat",
     BATCH),
    ('{"role": "user", "content": "Hello"}\n{"role": "user", "content": "Who are you?"}', "chat", ALONE),
    ('{"id": 1, "text": "", "messages": [{"role": "user", "content": "Hello"}]}', "chat", ONE),
    ('{"messages": [\n  {"role": "user", "content": "Hello"}\n]}', "chat", WHOLE),
    ('[\n  {"role": "user", "content": "Hello"}\n]\n', "chat", WHOLE)], ids=ascii)
def test_hints_for_lists_of_other_programs(tiny, data, mode, command):
    """Done as the message says, it works."""
    assert command in run_json(tiny, data.encode(), "-m", mode, status=1)[1].decode()
    data = shell(command, input=data.encode(), check=True).stdout
    lines, _ = run_json(tiny, data, "-m", mode, "-q")
    assert b"no JSON?" not in run_json(tiny, [b"[]"], status=1)[1]  # but no message
    assert len(lines) == data.count(b"Hello") + data.count(b"Who") and b"null" not in b"".join(lines)


@pytest.mark.skipif(not shutil.which("jq"), reason="no jq")
@pytest.mark.parametrize("row, to", [
    ('{"prompt": "Hello"}', "text"), ('{"prompt": [{"role": "user", "content": "Hello"}]}', "messages"),
    ('{"content": "Hello", "id": 1}', "text"), ('{"question": "Hello"}', "text"), ('{"input": "Hello"}', "text"),
    ('{"instruction": "Hello", "input": "all", "output": ""}', "text"), ('{"instruction": "Hello"}', "text"),
    ('{"conversations": [{"from": "human", "value": "Hello"}]}', "messages"),
    ('{"conversations": [{"role": "user", "content": "Hello"}]}', "messages")])
def test_hints_for_rows_of_other_programs(tiny, row, to):
    error = run_json(tiny, row.encode(), "-q", status=1)[1].decode()
    command = re.search(rf"\((jq -c '\.{to} = .*')\), found", error)[1]
    lines, _ = run_json(tiny, shell(command, input=row.encode(), check=True).stdout, "-n", 3, "-q")
    assert list(json.loads(lines[0])) == [*json.loads(row), "answer", "end"]


@pytest.mark.parametrize("line", ['{"text":"a","x":NaN}', '[{"role":"human","content":"a"}]', '{"text":"a",}', '{"text":5}',
                                  '{"messages":[{"role":"user","content":1}]}', '["a" "b"]'])
def test_where_jq_helps_nothing(tiny, line):
    assert b"jq" not in run_json(tiny, line.encode(), status=1)[1]


@pytest.mark.parametrize("table", ["id,text\n1,Hello\n", '"text","x"\n"a, b","c"\n', "text,id\n1.5,2\n"], ids=ascii)
def test_hint_for_csv(tiny, table):
    error = run_json(tiny, table.encode(), "-n", 3, status=1)[1]
    assert error.count(b"CSV") == 1 and error.count(b": line ") == table.count("\n") + 1
    command = re.search(r"python3 (.*') makes", error.decode())[1]
    data = shell(f"{shlex.quote(sys.executable)} {command}", input=table.encode(), check=True).stdout
    lines, _ = run_json(tiny, data, "-n", 3, "-q")
    assert len(lines) == 1 and b"answer" in lines[0]


@pytest.mark.parametrize("line, is_json", [
    (b'{"text": "Hello"}', True), (b'["Hello"]\r', True), (b'"Hello"', True), (b'{"text": "Hello"', False), (b"[", True),
    (b'"Hello," she said', False), (b"5", False), (b"[1] Hello", False), (b"an old\rMac's\r", False)])
def test_json_as_plain_lines(tiny, line, is_json):
    """It is taken as it stands; a notice names -L, once. Another one says what a \\r in it may be."""
    lines, error = run_list(tiny, b"%s\n[1]\n" % line, "-m", "tokenize")
    assert (error.count(b"-L reads JSON"), error.count(b"line 1 is JSON")) == (is_json, is_json)
    assert error.count(b"line 1 has \\r inside; tr '\\r' '\\n'") == (b"\r" in line[:-1])
    assert lines[0] == alone(tiny, line.rstrip(b"\r"), mode="tokenize")


OBEYED = ["tools", "functions", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "n", "temperature",
          "top_p", "top_k", "min_p", "seed", "response_format", "logprobs", "top_logprobs", "presence_penalty",
          "frequency_penalty", "logit_bias", "enable_thinking", "reasoning_effort", "chat_template_kwargs", "think",
          "system", "tool_calls", "function_call", "images", "reasoning_content"]


@pytest.mark.parametrize("name, data, line", [
    ("a.csv", "a\nb", 1), ("A.TSV", "a", 1), ("a.txt", "a\tb\nc\td\ne\tf\n", 3), ("csv", "a;b;c\n1;2;3\n4;5;6\n", 3),
    ("l", 'a,b\n1,"x, y"\n2,z', 3), ("l", "a,b\n1,2\n3", 0), ("l", "a\nb\nc\nd,e\nf,g\nh,i", 0), ("l", "a,b\n1;2\n3,4", 0)])
def test_a_table_as_plain_lines(tiny, tmp_path, name, data, line):
    """Known by its name, or by the separators of lines 1 to 3: said once, with -q, too."""
    (tmp_path / name).write_text(data)
    result = qwen3(tiny, "-m", "tokenize", "-l", tmp_path / name, "-q")
    said = re.findall(rf"(?m)^qwen3: .*{name}: line (\d+) is taken whole, .* CSV: python3 ", result.stderr.decode())
    assert said == [str(line)] * (line > 0) and result.stderr.count(b"\n") == len(said), result


@pytest.mark.parametrize("data, line", [
    (b'id,text\n1,"Hello,\nyou"\n2,"Hello,\nall"\n', 2), (b'"Hello,\nyou"\n', 1), (b'"Hello", 5"\n', 1),
    (b'a,"Hello"\n', 0), (b'5" or 6 or\n', 0), (b'""\n\n', 0)])
def test_a_text_that_leaves_a_quote_open(tiny, data, line):
    """It may be a CSV file's: a notice, once."""
    error = run_list(tiny, data, "-m", "tokenize")[1]
    assert error.count(b"CSV") == error.count(b": line %d leaves a quote open; " % line) == (line > 0), error


@pytest.mark.parametrize("option, end, said", [("-l", "", "each line is a text; Ctrl-D ends the list"), ("-f", "\4", "Ctrl-D ends the text")])
def test_a_text_that_is_typed(tiny, option, end, said):
    child = spawn(tiny, option, "-", *GREEDY)
    child.expect_exact(f"stdin: {said}")
    child.send(f"What is your name?\n{end}")
    child.expect_exact(alone(tiny, b"What is your name?", *GREEDY).decode().strip('"' if end else ""))
    child.send("" if end else "\4")
    assert finish(child) == 0


def test_later_system_messages(tiny, tmp_path):
    """Where the tokenizer file says that the template renders them as the first; but none at the end."""
    without = change_sections(copy_model(tiny, tmp_path), lambda sections: sections.pop(b"syst"))
    system, user, said = [{"role": role, "content": content} for role, content in (
        ("system", "Your name is Max."), ("user", "What is your name?"), ("assistant", "Tiny"))]
    talks = [[system, system, user], [user, said, system, user], [system, user, said, system, user], [user, system]]
    texts = ["".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in talk) +
             "<|im_start|>assistant\n<think>\n\n</think>\n\n" for talk in talks[:3]]
    assert run_json(without, talks, "-n", 1, status=1)[0] == [b"null"] * 4
    lines, error = run_json(tiny, talks, *GREEDY, "-n", 30, "-q", status=1)
    assert lines == run_json(tiny, texts, *GREEDY, "-n", 30, "-q", "-m", "generate")[0] + [b"null"], error
    assert run_json(tiny, [[user, system, user]], "-y", "Be brief.", "-n", 1)[0] != [b"null"]


def test_members_that_other_programs_obey(tiny):
    """The first line that has any names them, no other; they are people's columns all the same."""
    rows = [{"id": 1, "text": "Hello"}, {"tools": [], "text": "Hello", "n": 2, "N": 1, "stop": "x"},
            {"max_tokens": 5, "text": "Hello"}]
    lines, error = run_json(tiny, rows, *GREEDY, "-n", 3)
    said = [line for line in error.splitlines() if b"no effect" in line]
    assert len(said) == 1 and b"line 2: " in said[0] and b": tools, n, stop (" in said[0], error
    assert all(json.loads(line)[name] == row[name] for row, line in zip(rows, lines) for name in row if name != "text")
    error = run_json(tiny, [dict.fromkeys(OBEYED, 1) | {"text": "Hello"}], *GREEDY, "-n", 1)[1]
    assert f"no effect: {', '.join(OBEYED)} (" in error.decode()
    assert b"no effect" not in run_json(tiny, b'{"text":"a","x":{"n":1},"stop ":1}\n"n"', *GREEDY, "-n", 1)[1]
    assert b"no effect" not in run_json(tiny, rows, *GREEDY, "-n", 3, "-q")[1]


@pytest.mark.parametrize("name, value, said", [
    ("tool_calls", [{"id": "1"}], True), ("function_call", {"name": "f"}, True), ("images", ["iVBOR"], True),
    ("reasoning_content", "I add.", True), ("tool_calls", None, False), ("name", "Max", False)])
def test_members_of_messages_that_others_render(tiny, name, value, said):
    """The answer does without them: a notice, once. Others, and null, are quiet."""
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", name: value},
            {"role": "user", "content": "Hello"}]
    without = [{key: m[key] for key in ("role", "content")} for m in talk]
    lines, error = run_json(tiny, [talk, talk], *GREEDY, "-n", 3)
    assert error.count(b"no effect") == error.count(f"line 1: no effect: {name} (".encode()) == said, error
    assert lines == run_json(tiny, [without] * 2, *GREEDY, "-n", 3)[0]


# -- what stderr says

def sums(error):
    """The line's numbers: texts, tokens of the prompts, cached ones, answers, first and last seed."""
    return list(map(int, SUM.search(error).groups()))


def test_statistics(tiny):
    texts = [b"What is the capital of France?", b"Hello", b"What is the capital of France?"]
    for mode in "chat", "generate":
        n, prompts, cached, answers, *seeds = sums(run_list(tiny, texts, "-s", 5, "-m", mode, "-n", 20, *GREEDY)[1])
        assert (n, seeds) == (3, [5, 7]) and 0 <= cached < prompts and 0 < answers <= 60
        assert SUM.search(run_list(tiny, texts, "-q", "-m", mode, "-n", 2)[1]) is None
    single = STATS.search(qwen3(tiny, "-i", texts[0], *GREEDY).stderr)
    assert sums(run_list(tiny, texts[:1], *GREEDY)[1])[1:4:2] == [int(single[1]), int(single[3])]


def test_shared_beginning(tiny, delta):
    """The instruction runs once."""
    for model, batch, common, each in ((tiny, 128, " ".join(WORDS * 4), 20), (delta, 128, " ".join(WORDS * 4), 25),
                                       (delta, 1, " ".join(WORDS * 2), 25)):
        tokens = len(tokenize(model, common.encode()))
        run = ("-i", common, "-n", 1, "-b", batch, *GREEDY)
        _, prompts, cached, *_ = sums(run_list(model, [b"%d apples" % i for i in range(100)], *run)[1])
        assert tokens > 100 and prompts > 100 * tokens and prompts - cached < 1.02 * (tokens + 100 * each)
        assert cached >= 99 * (tokens - 1), model


def test_beginnings_in_a_short_cache(delta):
    """States can't be cut: what a text that runs goes back to with each TEXT is nothing that a text that waits may take."""
    texts = [" ".join(random.Random(i).choices(WORDS, k=60)).encode() for i in range(48)]
    said = [run_list(delta, texts, "-o", "no|yes|not now|it is so", "-c", 400, blocks=n)[1] for n in (2000, 400, 200, 60)]
    rows = [int(re.search(rb"(\d+) rows", error)[1]) for error in said]
    assert max(rows) < 1.05 * rows[0], rows


def test_a_conversation_line_by_line(start, tiny, delta):
    """Of each turn only what follows the generation prompt of the last one runs."""
    for model in tiny, delta:
        child, talk, texts = start(model, "-L", "-", "-n", 5, *GREEDY), [], [" ".join(WORDS * 4), "Why?", "Who?", "Hello"]
        for text in texts:
            talk.append({"role": "user", "content": text})
            child.stdin.write(json.dumps(talk).encode() + b"\n")
            talk.append({"role": "assistant", "content": json.loads(child.stdout.readline())})
        _, prompts, cached, *_ = sums(child.communicate(timeout=300)[1])
        assert prompts - cached < len(tokenize(model, texts[0].encode())) + 4 * 50, (model, prompts, cached)


def test_cached_tokens_of_a_small_pool(tiny):
    """Only tokens of prompts count; what can't begin yet leaves the beginning that it will share where it is."""
    run = (*GREEDY, "-m", "generate", "-n", 120, "-c", 128, "-j", 1)
    _, prompts, cached, *_ = sums(run_list(tiny, b"Once upon a time\n" * 4, *run, blocks=1)[1])
    assert cached <= prompts - 4
    r = random.Random(1)
    other, common, more = (" ".join(r.choices("the fox dog tree house river old small red ran".split(), k=k))
                           for k in (120, 40, 60))
    data = f"{other}\n{common} one\n{common} {more}\n"
    run = ("-m", "embed", "-c", 256, "-j", 1, "-b", 2)
    match = re.search(rb"\((\d+) cached\)", run_list(tiny, data.encode(), *run, blocks=1)[1])
    assert int(match[1]) >= 16, match


def test_texts_one_at_a_time(start, tiny):
    """Two instructions by turns are both shared: the next text's place is the one that ended the longest time ago."""
    instructions = [" ".join(random.Random(i).choices(WORDS, k=40)) for i in range(2)]
    least = min(len(tokenize(tiny, text.encode())) for text in instructions)
    child = start(tiny, "-l", "-", "-m", "embed")
    for i in range(20):
        child.stdin.write(f"{instructions[i % 2]} {i}\n".encode())
        child.stdin.flush()
        assert child.stdout.readline().startswith(b"[")
    cached = int(re.search(rb"\((\d+) cached\)", child.communicate(timeout=300)[1])[1])
    assert child.returncode == 0 and cached >= 18 * (least - 2), (cached, least)


@pytest.mark.parametrize("blocks", [1, 1000])
def test_what_is_computed_again(tiny, blocks):
    """Every row is one of a prompt that was not cached, one of an answer but for its last token, or is computed
    again after its text had to wait. (So hot, nothing is worth a guess.)"""
    texts = list(filter(None, make_texts(60, seed=7, longest=20)))
    run = ("-t", 20, "-k", 0, "-p", 1, "-s", 1, "-n", 100, "-c", 300)
    _, error = run_list(tiny, texts, *run, blocks=blocks)
    n, prompts, cached, answers, *_ = sums(error)
    limited = sum(map(int, re.findall(rb" by [^,:]*: (\d+)", error)))    # by -n, or by a full context
    rows = int(re.search(rb"(\d+) rows", error)[1])
    again = rows - (prompts - cached + answers - limited)
    assert again > 100 if blocks == 1 else again == 0, error


def test_rate(tiny):
    """Of all tokens but the cached ones: what the time went to"""
    texts = [text + b" x" for text in make_texts(120, seed=7, longest=150)]
    for mode in "chat", "embed", "perplexity":
        _, error = run_list(tiny, texts, "-m", mode, *["-n", 2] * (mode == "chat"))
        found = re.search(rb"\d+ texts in ([\d.]+) s, prompts (\d+) tokens \((\d+) cached\)(?:, answers (\d+) tokens)?, "
                          rb"([\d.]+) tokens/s(?:, seeds \d+ to \d+)?\n$", error)
        seconds, prompts, cached, answers, rate = (float(group or 0) for group in found.groups())
        assert seconds - 0.06 < (prompts - cached + answers) / rate < seconds + 0.06, error
        assert (b"seed" in error) == (mode == "chat")


def test_notices_with_counts(stopping, tiny, chain):
    thinking = chain("Ċ", "<think>", "a", "b", "a", template=HYBRID.replace("not enable_thinking", "false"))
    list_, raw = b"a\nx\na\na\nx\n", ("-m", "generate", *GREEDY)
    pieces = " ".join("abcdefghijklmnop").encode()
    for model, data, args, notice in [
            (stopping, list_, (*raw, "-n", 4), rb"answers: of 5 ended by -n: 3"),
            (stopping, list_, (*raw, "-c", 40), rb"answers: of 5 ended by a full context \(-c\): 3"),
            (thinking, b"x\ny\n", ("-r", 1, *GREEDY, "-n", 9), rb"answers: of 2 ended by -n: 2, inside their thinking: 2"),
            (tiny, pieces + b"\na b\n" + pieces, ("-m", "perplexity", "-c", 10), rb".*pieces.*: 2")]:
        lines, error = run_list(model, data, *args)
        assert len(re.findall(rb"(?m)^qwen3: " + notice + b"$", error)) == 1 and b"<think>" not in error, error
        assert model != thinking or lines == [b'""'] * 2
        quiet = run_list(model, data, *args, "-q")[1].splitlines()      # what makes a result doubtful stays
        assert quiet == [line for line in error.splitlines() if b"answers: of " in line]
        assert run_list(model, data, *args, "-qq")[1] == b""
    assert b"qwen3:" not in run_list(stopping, b"x\n", *raw, "-n", 4)[1]


def test_progress(stopping, tmp_path):
    """Texts done and tokens a second, where the total is not known. (Else test_progress.py.) It is erased."""
    os.mkfifo(tmp_path / "list")
    feeder = subprocess.Popen(["sh", "-c", f"yes a > {tmp_path}/list"], stderr=subprocess.DEVNULL)
    script = f"exec {QUOTED_QWEN3} {stopping} -l {tmp_path}/list -m generate -t 0 -n 100 -s 1 -j 1 > {tmp_path}/out"
    child = spawn_shell(script)
    assert show_progress(child, rb"\r\d+ texts, [\d.]+ tokens/s\x1b\[K"), child.before
    child.kill(signal.SIGINT)
    assert finish(child) == 130
    assert b"\r\x1b[K" in child.before
    feeder.wait(300)


# -- nothing is lost

def test_a_line_goes_out_when_it_is_done(start, tiny):
    """While the list pauses: before a line, in the middle of one, and after the last."""
    child = start(tiny, "-l", "-", *GREEDY, "-q")
    for text in b"What is the capital of France?", b"Hello", b"Who are you?":
        child.stdin.write(text + b"\nWhat is")
        assert child.stdout.readline() == alone(tiny, text, *GREEDY) + b"\n"
        time.sleep(0.1)
        child.stdin.write(b" your name?\n")
        assert child.stdout.readline() == alone(tiny, b"What is your name?", *GREEDY) + b"\n"
    child.stdin.write(b"Hello")
    child.stdin.close()
    assert child.stdout.read() == alone(tiny, b"Hello", *GREEDY) + b"\n" and child.wait(300) == 0


def test_answers_go_on_while_the_list_pauses(start, stopping):
    """The pause does not hold up what has been read: neither long answers nor errors."""
    child = start(stopping, "-l", "-", *GREEDY, "-q", "-m", "generate", "-n", "3000", "-c", "3100")
    child.stdin.write(b"a\nx\n" + b"b" * 5000 + b"\naa\nhalf")
    assert [child.stdout.readline() for _ in range(4)] == [
        json_string(b"a" * 3000) + b"\n", b'""\n', b"null\n", json_string(b"a" * 3000) + b"\n"]
    child.stdin.close()
    assert child.stdout.read() == b'""\n' and child.wait(300) == 1


@pytest.mark.parametrize("signals", [1, 2])
def test_interrupt(start, tiny, tmp_path, signals):
    """The line that is being written is finished; the message says how to go on, which gives the rest."""
    texts = [b"Tell me a story", b"Hello", b"What is the capital of France?", b"Who are you?"] * 150
    run = (tiny, "-l", write_list(tmp_path / "list", texts), "-s", 3, "-n", 30)
    ours, theirs = small_pipe()                 # that it is not done while this process is held up
    child = start(*run, stdout=theirs)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as reader:
        out = b"".join(reader.readline() for _ in range(50))
        for _ in range(signals):
            child.send_signal(signal.SIGINT)
        out += reader.readall()
    error, whole = child.communicate(timeout=300)[1], output(*run, "-q")
    assert child.returncode == 130 and whole.startswith(out) and len(out) < len(whole)
    if signals == 1:
        said = rb"(?m)^qwen3: .* %d lines are written; the same command with -w FILE for > FILE goes on$"
        assert out.endswith(b"\n") and re.search(said % out.count(b"\n"), error), error
    (tmp_path / "out").write_bytes(out)
    output(*run, "-w", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == whole


def test_interrupt_while_a_line_is_encoded(start, tiny):
    """The part of it that is encoded by then is no text of its own, which could be too short."""
    child = start(tiny, "-l", "-", "-m", "perplexity")
    child.stdin.write(b"a b c " * 4_000_000 + b"\n")
    child.stdin.flush()                         # it has taken nearly all of it
    time.sleep(0.2)
    status, out, error = stop(child)
    assert status == 130 and out == b"", error
    assert b"line 1:" not in error and b"0 lines are written" in error and b"-s" not in error


def test_interrupt_beats_an_error(start, stopping):
    child = start(stopping, "-L", "-", *GREEDY, "-m", "generate", "-n", "9")
    child.stdin.write(b'bad\n"a"\n')
    assert child.stdout.readline() == b"null\n" and child.stdout.readline() == b'"aaaaaaaaa"\n'
    status, out, error = stop(child)            # it waits for the list
    assert status == 130 and out == b"" and b"2 lines are written" in error


@needs_small_pipes
def test_interrupt_while_nobody_reads(start, stopping):
    """The first waits for the line to be taken, the second, more than a second later, does not."""
    ours, theirs = small_pipe()
    child = start(stopping, "-l", "-", *GREEDY, "-m", "generate", "-n", "1000", "-q", stdout=theirs)
    os.close(theirs)
    child.stdin.write(b"a\n" * 32)
    wait_until(lambda: waiting(ours) > 4000)    # of the 32 lines of 1,003 bytes
    wait_for_call(child.pid, "write")
    child.send_signal(signal.SIGINT)
    time.sleep(1.2)
    assert child.poll() is None
    for _ in range(20):                         # one that a busy machine delays may come too early
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert child.wait(1.2) == 130
            break
    assert child.wait(300) == 130
    os.close(ours)


# -- bounded memory

def peak(*args):
    """(exit status, peak of resident bytes) of a run whose output is thrown away. It has no pages of 2 MB, which
    Linux makes of smaller ones in its own time."""
    null = subprocess.DEVNULL
    small_pages = (lambda: ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)) if LINUX else None      # PR_SET_THP_DISABLE
    child = subprocess.Popen([QWEN3, *map(str, args)], stdin=null, stdout=null, stderr=null, env=environment(),
                             preexec_fn=small_pages)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * (1024 if LINUX else 1)


@pytest.mark.parametrize("first, row, least, most", [
    (b'"a"\n', b'"%s"\n' % (b"x" * 97), 1, 400_000),                       # with what pipes and buffers hold
    (b'"a"\n', b'{"y":"%s","text":"x"}\n' % (b"y" * 100_000), 16 << 20, 18 << 20)], ids=["lines", "bytes"])
def test_not_too_far_ahead(start, stopping, first, row, least, most):
    """Of a list without an end, no more is read than 1,024 lines, or 16 MB, beyond the first that is not done."""
    child = start(stopping, "-L", "-", *GREEDY, "-m", "generate", "-n", "-1", "-c", "0", "-q", "-j", "1")
    taken, before = [], -1                      # bytes, by each write
    def write():
        with contextlib.suppress(OSError, ValueError):
            child.stdin.write(first)
            while True:
                taken.append(child.stdin.write(row))
    threading.Thread(target=write, daemon=True).start()
    wait_until(lambda: sum(taken) >= least)
    while before != sum(taken):                 # none for a second
        before = sum(taken)
        assert before < most
        time.sleep(1)
    assert child.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chat", "tokenize", "embed"])
def test_memory_of_many_texts(tiny, tmp_path, mode):
    """100,000 take no more than 1,000."""
    texts = make_texts(1000, seed=20, longest=13)
    peaks = []
    for times in 1, 100:
        path = write_list(tmp_path / "list", texts * times)
        status, most = peak(tiny, "-l", path, "-m", mode, *["-n", 2] * (mode == "chat"))
        assert status == (mode != "tokenize")        # some texts are empty
        peaks.append(most)
    assert peaks[1] < peaks[0] + 4e6, peaks


@pytest.mark.slow
def test_very_long_lines(tiny, tmp_path):
    """Of 1 GB, too long before it is encoded; of 2 GB and more, whatever the mode. What follows is read."""
    path = tmp_path / "list"
    for size, mode in (1_000_000_000, "chat"), (2_200_000_000, "chat"), (2_200_000_000, "tokenize"):
        with open(path, "wb") as file:
            file.write(b"Hello\n")
            file.seek(size, os.SEEK_CUR)
            file.write(b"\nHello\n")
        result = qwen3(tiny, "-l", path, "-m", mode, "-qq", *[*GREEDY, "-n", 9][:4 * (mode == "chat")])
        line = alone(tiny, b"Hello", *[*GREEDY, "-n", 9][:4 * (mode == "chat")], mode=mode)
        assert result.returncode == 1 and result.stdout.split(b"\n") == [line, b"null", line, b""]
        assert errors_of(result.stderr, bytes(path)).keys() == {2}
        _, most = peak(tiny, "-l", path, "-m", mode)
        assert most < 2.5e9, most

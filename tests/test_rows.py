"""Lists of objects (-L): rows keep their columns; -w FILE goes on where a list was cut, as if nothing had happened."""
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import time

import pytest
from conftest import (GREEDY, HELLO, QWEN3, WORDS, alone, assert_error, environment, errors_of, output, qwen3, run_json,
                      run_list, shell, stop, wait_until, write_list)

MODES = {"chat": ["answer", "end"], "generate": ["answer", "end"], "embed": ["vector"],
         "perplexity": ["tokens", "nll", "ppl"], "tokenize": ["ids"]}


def options(mode):
    return ["-m", mode, "-qq", *[*GREEDY, "-n", "20"] * (mode in ("chat", "generate"))]


def added(mode, line, end="stop"):
    """The members that a mode adds, made from the line of the text alone."""
    if mode in ("chat", "generate"):
        return b'"answer":%s,"end":"%s"' % (line, end.encode())
    if mode == "embed":
        return b'"vector":' + line
    if mode == "tokenize":
        return b'"ids":[%s]' % line.replace(b" ", b",")
    return b'"tokens":%s,"nll":%s,"ppl":%s' % tuple(line.split()[1::2])


# -- objects

KEPT = [b'"id":7', b'"id" :\t7 ', b'"a":"\\u00e9\xc3\xa9\\ud83d"', b'"a":"\xc2\x80"', b'"x":[1, {"text":2,"answer":[]} ]',
        b'"":null', b'"n":-0.0e+400', b'"n":123456789012345678901234567890', b'"Answer":true', b'"text ":"no"',
        b'"id":1,"id":2', b'"p":{"messages":[]}', b'"s":"\x7f\xc2\x9b"', b'"e":"}"',
        b'"deep":%s%s' % (b"[" * 99, b"]" * 99)]        # what is deeper is no JSON (test_list.py)


@pytest.mark.parametrize("mode", MODES)
def test_columns(tiny, mode):
    """All other members, byte for byte and in their order; white space between them goes."""
    text = b"What is the capital of France?"
    tail = added(mode, alone(tiny, text, *options(mode)[3:], mode=mode))
    data, expected = b"", []
    for kept in [*KEPT, b""]:
        own = b'"text":"%s"' % text
        both = [kept, own] if kept else [own]
        for members in (both, both[::-1]):
            data += b" { " + b" ,\t".join(members) + b" } \r\n"
            expected.append(b"{%s%s}" % (kept.strip() + b"," if kept else b"", tail))
    lines, _ = run_json(tiny, data, *options(mode))
    assert [(a, b) for a, b in zip(lines, expected) if a != b] == [] and len(lines) == len(expected)
    for line in lines:
        found = json.loads(line.decode("utf-8", "replace"))
        assert list(found)[-len(MODES[mode]):] == MODES[mode]


def test_objects_among_other_lines(tiny):
    """Each is what its text or its messages get in a line of their own, with the same seed."""
    r, lines, bare = random.Random(1), [], []
    for i in range(60):
        text = " ".join(r.choices(WORDS, k=r.randrange(1, 12)))
        talk = [{"role": "assistant", "content": "no"}, {"role": "user", "content": text}]
        value = r.choice((text, talk))
        bare.append(json.dumps(value))
        row = {"i": i, "messages" if value is talk else "text": value, "z": [text]}
        lines.append(json.dumps(row) if i % 3 else bare[-1])
    for extra in (), ("-y", "Be kind.", "-i", "Say:"), ("-r", "1"):
        how = ("-s", 9, "-n", 12, "-q", *extra)
        plain = run_json(tiny, "\n".join(bare).encode(), *how)[0]
        got = run_json(tiny, "\n".join(lines).encode(), *how)[0]
        for i, line in enumerate(got):
            if i % 3:
                row, given = json.loads(line), json.loads(lines[i])
                assert list(row) == ["i", "z", "answer", "end"] and row["z"] == given["z"]
                assert row["answer"] == json.loads(plain[i])
            else:
                assert line == plain[i]


@pytest.mark.parametrize("how, first", [
    (("-n", 3), b'{"answer":"aaa","end":"length"}'),
    (("-c", 3), b'{"answer":"aaa","end":"context"}'),
    (("-x", "aa"), b'{"answer":"","end":"stop"}')])
def test_ends(stopping, how, first):
    data = b'{"text":"a"}\n{"text":"x"}\n'
    lines, _ = run_json(stopping, data, "-m", "generate", *GREEDY, *how, "-q")
    assert lines == [first, b'{"answer":"","end":"stop"}']


TALK = b'"messages":[{"role":"user","content":"Hello"}]'
GOOD = [HELLO, TALK, b'"text":1,"text":[],%s' % HELLO, b'"messages":"x",%s' % TALK, rb'"t\u0065xt":"Hello"']
BAD = [(b"", b""), (b'"id":1', b'"id":1,'), (b'"text":1,"b":[ ]', b'"b":[ ],'), (b'"text":null', b""),
       (b'"text":[{"role":"user","content":"Hello"}],"c":0', b'"c":0,'), (b'"messages":"Hello"', b""),
       (b"%s,%s" % (HELLO, TALK), b""), (b'%s,"text":{},"d":1' % HELLO, b'"d":1,'), (b'"messages":[],"x":1', b'"x":1,'),
       (b'"messages":[{"role":"tool","content":""}],"x":1', b'"x":1,'), (b'"messages":[1],"x":1', b'"x":1,'),
       (b'"x":1,"messages":[{"role":"user","content":1}]', b'"x":1,'), (b'"text":"%s","x":1' % (b"word " * 900), b'"x":1,'),
       (b'"text":"%s","x":1' % (b"word " * 90_000), b'"x":1,')]


def test_bad_objects(tiny):
    """It has its members and what is wrong, as stderr says it; others have their answers."""
    good = b'{"answer":%s,"end":"stop"}' % alone(tiny, b"Hello", *GREEDY)
    rows = [*GOOD, *(members for members, _ in BAD)]
    data = b"".join(b"{%s}\n" % row for row in rows)
    lines, error = run_json(tiny, data, *GREEDY, "-c", 500, "-q", status=1)
    assert lines[:len(GOOD)] == [good] * len(GOOD)
    said = errors_of(error)
    assert sorted(said) == [len(GOOD) + 1 + i for i in range(len(BAD))]
    for i, (_, kept) in enumerate(BAD):
        what = said[len(GOOD) + 1 + i]
        assert lines[len(GOOD) + i] == b'{%s"answer":null,"error":%s}' % (kept, json.dumps(what).encode())


@pytest.mark.parametrize("mode", MODES)
def test_added_names(tiny, mode):
    """The member that is there already goes, and stderr says how to take it out of the list."""
    for name in [*MODES[mode], "error"]:
        escaped = "".join(f"\\u{ord(c):04x}" for c in name)
        for written in name, escaped:
            row = b'{"a":1,"%s":"old","b":2,"text":"Hello there"}' % written.encode()
            lines, error = run_json(tiny, row, *options(mode), status=1)
            what = errors_of(error)[1]
            assert f"adds, .{name};" in what and f"jq -c 'del(.{name})'" in what
            assert f"jq -c '.gold = .{name} | del(.{name})'" in what
            first = MODES[mode][0].encode()
            assert lines == [b'{"a":1,"b":2,"%s":null,"error":%s}' % (first, json.dumps(what).encode())]
    _, error = run_json(tiny, b'{"error":1,"%s":2,"text":"a"}' % first, *options(mode), status=1)
    assert f"jq -c 'del(.error, .{first.decode()})'" in errors_of(error)[1] and "'.gold = .error | del" in errors_of(error)[1]
    for name in set(sum(MODES.values(), [])) - set(MODES[mode]):    # another mode's
        lines, _ = run_json(tiny, b'{"%s":0,"text":"Hello there"}' % name.encode(), *options(mode))
        assert lines[0].startswith(b'{"%s":0,' % name.encode())


@pytest.mark.parametrize("megabytes", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_large_members(tiny, megabytes):
    """One string, and as many small values as fit."""
    size = megabytes << 20
    rows = [b'"a":"%s"' % (b"x" * size), b'"a":[%s1]' % (b"1," * (size // 2))]
    lines, _ = run_json(tiny, b"".join(b"{%s,%s}\n" % (row, HELLO) for row in rows), *GREEDY, "-q")
    tail = b'"answer":%s,"end":"stop"}' % alone(tiny, b"Hello", *GREEDY)
    assert all(line == b"{%s,%s" % (row, tail) for line, row in zip(lines, rows)) and len(lines) == 2


# -- -w FILE

ROWS = [b'{"id":1,"text":"What is the capital of France?"}', b'"Hello"', b"no", b'{"id":2,"answer":1}',
        b'{"id":[3, "\\u00e9"],"text":"Who are you?","x":-1.5e3,"t":true,"n":null}', b'"What is your name?"',
        b'{"id":4}', b'"Tell me a story"']


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind, cache", [("-l", ()), ("-L", ()), ("-L", ("-C", "8"))])
def test_goes_on_at_any_byte(small, tiny, tmp_path, mode, kind, cache):
    """Whatever the end of FILE, the whole is what an uninterrupted run writes; so at each byte of it."""
    model = small if mode in ("tokenize", "perplexity", "embed") else tiny
    args = [model, "-m", mode, "-q", *["-s", "5", "-n", "5"] * (mode in ("chat", "generate")), *cache]
    path, out = write_list(tmp_path / "list", ROWS), tmp_path / "out"
    whole = qwen3(*args, kind, path)
    expected = whole.stdout
    cuts = range(len(expected))
    if len(cuts) > 60:
        cuts = sorted({0, 1, len(cuts) - 1, *random.Random(mode + kind).sample(cuts, 50)})
    for cut in cuts:
        out.write_bytes(expected[:cut])
        result = qwen3(*args, kind, path, "-w", out)
        assert result.stdout == b"" and out.read_bytes() == expected, (cut, result)
        assert result.returncode == whole.returncode


def test_a_new_file(tiny, tmp_path):
    path, out = write_list(tmp_path / "list", [b"Hello", b"Who are you?"]), tmp_path / "out"
    result = qwen3(tiny, "-l", path, "-w", out, *GREEDY, stdin=b"not this\n")
    assert result.returncode == 0 and result.stdout == b"" and b"qwen3:" not in result.stderr
    assert out.read_bytes() == output(tiny, "-l", path, *GREEDY)
    os.umask(mask := os.umask(0))
    assert out.stat().st_mode & 0o777 == 0o666 & ~mask
    result = qwen3(tiny, "-l", path, "-w", out, *GREEDY)            # all is there
    assert result.returncode == 0 and re.fullmatch(rb"qwen3: .*out: [^\n]*another FILE[^\n]*\n", result.stderr), result
    assert qwen3(tiny, "-l", path, "-w", out, *GREEDY, "-q").stderr == b""
    assert_error(qwen3(tiny, "-l", "/dev/null", "-w", tmp_path / "none", *GREEDY, "-q"), 1, "/dev/null: no lines")
    assert out.read_bytes().count(b"\n") == 2 and (tmp_path / "none").read_bytes() == b""


def test_what_it_says(tiny, tmp_path):
    """Lines, statistics, seeds (without -s from 0 on), exit status: 1 while FILE has lines without a result, also
    where nothing is left. A column that looks like one is none. What is wrong there is not said again."""
    column = b'"x":{"a":null,"error":"y"}'
    rows = [b'{%s,"text":"Hello"}' % column, b'{"id":1,"text":""}', b"5", *[b'"Hello"'] * 3]
    path, out = write_list(tmp_path / "list", rows), tmp_path / "out"
    lines = run_list(tiny, b"Hello\n" * 6, "-n", 3, "-s", 0, "-q")[0]
    first = b'{%s,"answer":%s,"end":"length"}' % (column, lines[0])
    failed = b'{"id":1,"answer":null,"error":"empty, expected a text"}'
    out.write_bytes(first + b"\n" + failed + b"\nnull\n" + lines[3][:3])
    result = qwen3(tiny, "-L", path, "-w", out, "-n", 3)
    stay = b"out: lines without a result, which stay: 2, the first is line 2\n"
    assert result.returncode == 1 and stay in result.stderr and b": line 2: " not in result.stderr, result
    assert b"ended in an error" not in result.stderr        # of this run's, none did
    assert re.search(rb"(?m)^qwen3: .*out: has 3 lines, goes on with line 4; a change before its last 8 lines is not seen$", result.stderr), result.stderr
    assert re.search(rb"(?m)^3 texts in .* seeds 3 to 5$", result.stderr) and b"\nseed " not in result.stderr, result.stderr
    assert out.read_bytes().splitlines() == [first, failed, b"null", *lines[3:]]
    result = qwen3(tiny, "-L", path, "-w", out, "-n", 3)
    assert result.returncode == 1 and stay in result.stderr and b"has all 6 lines" in result.stderr, result


LEFT_ALONE = [b"buy milk", b"buy milk\n", b'"a"\nbuy milk\n', b'"a"\nbuy', b"[1, 2]\n", b"1 2\n", b'{"a":1}', b"\n", b'"a"\n\n',
              b"nulx", b'"a"\n"\\x', b"tokens 1 nll\n", b"null\nto go", b"my notes\n\n", b"\xff\xd9", b"\0",
              b'"Never said', b'{"a', b"nul"]          # a first line that is cut must begin the new one


def refused_as_it_is(out, data, run, *words):
    """-w FILE with these bytes: an error, and they stay."""
    out.write_bytes(data)
    assert_error(qwen3(*run, "-w", out, "-qq"), 1, *words)
    assert out.read_bytes() == data, data


@pytest.mark.parametrize("mode", ["chat", "embed", "tokenize", "perplexity"])
def test_what_is_anothers(small, tmp_path, mode):
    """Not written, not cut, by no byte."""
    path, out = write_list(tmp_path / "list", [b"Hello there"] * 5), tmp_path / "notes.txt"
    for data in LEFT_ALONE:
        refused_as_it_is(out, data, (small, "-m", mode, "-l", path), f"{out}: another run's")


ANOTHER = [  # a command's options, and those of a run that is not the same
    ((*GREEDY, "-n", "9"), [(*GREEDY, "-n", "4"), ("-m", "generate", *GREEDY, "-n", "9"), (*GREEDY, "-n", "9", "-x", "e"),
                            (*GREEDY, "-n", "9", "-i", "What is 3 + 4?"),
                            ("-s", "3", "-t", "5", "-n", "9")]),
    (("-s", "5", "-n", "9"), [("-s", "6", "-n", "9", "-t", "9"), (*GREEDY, "-n", "3")]),
    (("-m", "embed"), [("-m", "embed", "-i", "a"), ("-m", "tokenize")]),
    (("-m", "perplexity"), [("-m", "perplexity", "-i", "a"), ("-m", "perplexity", "-c", "4"), ("-m", "tokenize")]),
    (("-m", "tokenize"), [("-m", "tokenize", "-i", "a")]),
    (("-o", "yes|no"), [("-o", "yes|maybe"), ("-o", "no|yes"), ("-o", "yes|no", "-i", "Really?")])]
NAMES = [b"What is your name?", b"Tell me a story about a fox", b"Who are you?", b"Tell me a story about the old tree"]


@pytest.mark.parametrize("args, others", ANOTHER, ids=lambda x: " ".join(x) if isinstance(x[0], str) else "")
@pytest.mark.parametrize("rest", [b"", b"cut"])
def test_another_run(tiny, small, tmp_path, args, others, rest):
    """FILE's last text runs again; if it gives another line, nothing is written, even where all lines are there."""
    path, out = write_list(tmp_path / "list", NAMES), tmp_path / "out"
    other = write_list(tmp_path / "other", [NAMES[0], NAMES[2], NAMES[1], NAMES[3]])
    whole = output(tiny, "-l", path, "-q", *args)
    for n in (2, 4)[:1 if rest else 2]:
        there = b"".join(whole.splitlines(True)[:n])
        there += whole[len(there):len(there) + 3] if rest else b""
        runs = [(tiny, "-l", path, *options) for options in others] + [(small, "-l", path, *args)]
        for run in runs + [(tiny, "-l", other, *args)] * (n == 2):
            refused_as_it_is(out, there, run, out, *["option", "build"] * (not rest and run[-1] != "tokenize"))
        result = qwen3(tiny, "-l", path, *args, "-w", out, "-j", 1, "-b", 3)
        assert result.returncode == 0 and out.read_bytes() == whole
        if n == 2:                              # what runs again does not count
            alone = qwen3(tiny, "-l", write_list(tmp_path / "rest", NAMES[2:]), *args).stderr
            said = [re.search(rb"2 texts in .*prompts (\d+) tokens .*?\)(?:, answers (\d+))?", text).groups()
                    for text in (result.stderr, alone)]
            assert said[0] == said[1] or args[0] == "-s"


@pytest.mark.parametrize("n", [10, 12])
def test_the_last_lines_come_again(tiny, tmp_path, n):
    """Eight, and no more, with others before them and after, or none: a label alone tells no prompt from another."""
    path, out = write_list(tmp_path / "list", [b'{"id":%d,"text":"Hello"}' % i for i in range(n)]), tmp_path / "out"
    run = (tiny, "-L", path, "-w", out, "-o", "yes|no", "-q")
    output(*run)
    whole = out.read_bytes().splitlines(True)
    for changed in range(1, 10):
        other = [line.replace(b'"p":', b'"p" :') if i == changed else line for i, line in enumerate(whole[:10])]
        out.write_bytes(b"".join(other))
        result = qwen3(*run)
        assert result.returncode == (changed > 1) and out.read_bytes() == b"".join(other + whole[10:] * (changed == 1))


@pytest.mark.parametrize("cut", [0, 1, 4])
def test_a_file_of_an_older_version(chain, tmp_path, cut):
    """It had \\u000a where \\n is now: said, and left as it is."""
    path, out = write_list(tmp_path / "list", [b"a"] * 3), tmp_path / "out"
    run = (chain("a", "b", "\u010a", "a"), "-m", "generate", *GREEDY, "-n", 5, "-l", path)
    new = output(*run)
    old = new.replace(b"\\n", b"\\u000a")
    assert old != new
    refused_as_it_is(out, old[:len(old) - cut], run, f"{out}: another run's (line 1)",
                     r"before 7.0 wrote \u000a for \n, it can go on")


def test_more_lines_than_the_list(small, tmp_path):
    path, out = write_list(tmp_path / "list", [b"a", b"b"]), tmp_path / "out"
    run = (small, "-m", "tokenize", "-l", path)
    whole = output(*run)
    for data in whole + b"3\n", whole + b"3", whole * 2500:
        refused_as_it_is(out, data, run, out, "more lines")


def test_bad_files(tiny, tmp_path):
    """Found before the model is opened (there is none); the list's own file by any name."""
    path, none = write_list(tmp_path / "list", [b'"a"', b'"b"']), tmp_path / "no such model.bin"
    os.link(path, tmp_path / "linked")
    os.symlink(path, tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    for out in tmp_path, tmp_path / "none/out", tmp_path / "fifo", "/dev/null":
        assert_error(qwen3(none, "-L", path, "-w", out), 1, out)
    for out in path, tmp_path / "linked", tmp_path / "link":
        assert_error(qwen3(none, "-L", path, "-w", out), 1, f"{out}: is the list")
    with open(path, "rb") as stdin:
        done = subprocess.run([QWEN3, none, "-L", "-", "-w", path], stdin=stdin, capture_output=True, env=environment())
    assert_error(done, 1, path)
    assert path.read_bytes() == b'"a"\n"b"\n'


def test_two_runs_at_once(start, stopping, tmp_path):
    """The second is refused, whatever it would do; once the first has ended it goes on."""
    out = tmp_path / "out"
    args = (stopping, "-l", "-", "-m", "generate", *GREEDY, "-n", "3", "-w", out)
    child = start(*args)
    child.stdin.write(b"a\n")
    wait_until(lambda: out.exists() and out.read_bytes() == b'"aaa"\n')
    for _ in range(2):
        assert_error(qwen3(*args, stdin=b"a\na\n"), 1, out)
    child.kill()
    child.wait()
    assert qwen3(*args, stdin=b"a\nx\n").returncode == 0 and out.read_bytes() == b'"aaa"\n""\n'


def test_interrupted_before_the_last_line_is_known_again(start, stopping, tmp_path):
    """Nothing has been written then, also where nothing is left to do."""
    out = tmp_path / "out"
    for data, there in (b"a\nx\nx\n", b'"a"\n'), (b"x\na\n", b'""\n"a"\n'):
        path = write_list(tmp_path / "list", data.split())
        out.write_bytes(there)
        child = start(stopping, "-l", path, "-m", "generate", *GREEDY, "-n", 90_000, "-w", out)
        time.sleep(0.5)
        status, _, error = stop(child)
        assert status == 130 and out.read_bytes() == there and b"has all" not in error, error
        assert b": %d lines are written; the same command goes on\n" % there.count(b"\n") in error and b"\n0 texts in " in error, error


@pytest.mark.parametrize("kind", ["-l", "-L"])
def test_a_list_that_grows(tiny, tmp_path, kind):
    """A last line without newline may be half written: the next run takes it, once it is whole. Then FILE is one run's."""
    path, out = tmp_path / "list", tmp_path / "out"
    whole = b"".join(b'"%s"\n' % name if kind == "-L" else name + b"\n" for name in NAMES)
    run = (tiny, kind, path, *GREEDY, "-n", 5, "-qq")
    for size in sorted([*random.Random(kind).sample(range(1, len(whole)), 12), *(i + 1 for i, c in enumerate(whole) if c == 10)]):
        path.write_bytes(whole[:size])
        result = qwen3(*run[:-1], "-q", "-w", out)
        n = whole[:size].count(b"\n")
        left = b"qwen3: %s: line %d has no newline: half written? Left for the next run\n" % (bytes(path), n + 1)
        assert result.returncode == 0 and left * (whole[size - 1] != 10) in result.stderr, result
        assert (b"no newline" in result.stderr) == (whole[size - 1] != 10) and out.read_bytes().count(b"\n") == n
        assert b"no newline" not in qwen3(*run, "-w", out).stderr
        assert (b"has all" in qwen3(*run[:-1], "-w", out).stderr) == (whole[size - 1] == 10)
    assert out.read_bytes() == output(*run)
    path.write_bytes(whole[:-1])                    # an older version took it: it is the same
    assert qwen3(*run[:-1], "-q", "-w", out).stderr == b"" and out.read_bytes() == output(*run)
    out.write_bytes(output(*run)[:-4])              # so does a FILE that ends within its result
    assert qwen3(*run, "-w", out).stderr == b"" and out.read_bytes() == output(*run)


def test_the_last_line_is_anothers(tiny, tmp_path):
    """If those before it are the same, the error says how to take it away; that helps."""
    path, out = write_list(tmp_path / "list", NAMES), tmp_path / "out"
    run = (tiny, "-l", path, *GREEDY, "-n", 5, "-q", "-w", out)
    whole = output(*run[:-2])
    for lines, cure in ((4, True), (2, True), (1, False)):
        old = b"".join(whole.splitlines(True)[:lines - 1]) + b'"another"\n'
        out.write_bytes(old)
        error = qwen3(*run).stderr.decode()
        assert f"another run's (line {lines})" in error and (f"sed -i '$d' {out} " in error) == cure, error
        assert out.read_bytes() == old
        if cure:
            shell(f"sed -i '$d' {out}", check=True)
            assert output(*run) == b"" and out.read_bytes() == whole
    out.write_bytes(whole.replace(whole.splitlines(True)[2], b'"another"\n'))
    assert "sed" not in qwen3(*run).stderr.decode()


def test_why_the_status_is_1(tiny, tmp_path):
    """With -q, too: FILE has lines without a result. -qq says nothing."""
    path, out = write_list(tmp_path / "list", [b"Hello", b"", b"Who are you?"]), tmp_path / "out"
    run = (tiny, "-l", path, *GREEDY, "-w", out)
    assert qwen3(*run, "-qq").returncode == 1
    said = b"qwen3: %s: lines without a result, which stay: 1, the first is line 2\n" % bytes(out)
    for q, stderr in (("-q", said), ("-qq", b"")):
        result = qwen3(*run, q)
        assert result.returncode == 1 and result.stderr == stderr, result


def test_a_full_disk(tiny, tmp_path):
    """The message names FILE, or stdout; with room, the same command goes on."""
    path, out = write_list(tmp_path / "list", [b"Tell me a story", b"Hello"] * 200), tmp_path / "out"
    run = (tiny, "-l", path, "-s", 3, "-n", 9, "-q")
    whole = output(*run)
    def limited():                                      # whose signal the program ignores by itself
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
    for name, args in (("stdout", ()), (out, ("-w", out))):
        with open(tmp_path / "stdout" if name == "stdout" else os.devnull, "wb") as stdout:
            done = subprocess.run([QWEN3, *map(str, (*run, *args))], stdout=stdout, stderr=subprocess.PIPE,
                                  env=environment(), preexec_fn=limited)
        written = (tmp_path / name).read_bytes()
        assert done.returncode == 1 and re.fullmatch(rf"qwen3: {name}: [^\n]*\n", done.stderr.decode()), done
        assert 2000 < len(written) <= 3000 and whole.startswith(written)
    assert output(*run, "-w", out) == b"" and out.read_bytes() == whole


def hostile_rows(n):
    """Strings, messages and objects; each 13th is an error of some kind."""
    r, bad = random.Random(n), itertools.cycle([b"", b"[", b"{}", b'{"id":1,"answer":2}', b"5", b'{"text":[]}'])
    for i in range(n):
        text = json.dumps(" ".join(r.choices(WORDS, k=r.randrange(1, 6)))).encode()
        yield next(bad) if i % 13 == 5 else (
            text, b'{"id":%d,"text":%s,"w":"\\ud83d"}' % (i, text), b'{"id":%d, "text":%s}' % (i, text),
            b'{"messages":[{"role":"user","content":%s}],"x":[%d]}' % (text, i))[r.randrange(4)]


@pytest.mark.parametrize("n, kills", [(600, 3), pytest.param(10_000, 20, marks=pytest.mark.slow)])
def test_killed_again_and_again(start, tiny, tmp_path, n, kills):
    """Run again each time, the whole is an uninterrupted run's, of seed 0. Ctrl-C leaves whole lines, and says so."""
    path, out, said = write_list(tmp_path / "list", hostile_rows(n)), tmp_path / "out", tmp_path / "stderr"
    args = (tiny, "-L", path, "-n", "12", "-c", "256")
    whole = qwen3(*args, "-s", 0, "-q")
    r, size, killed = random.Random(kills), 0, 0
    for number in itertools.islice(itertools.cycle((signal.SIGINT, signal.SIGKILL, signal.SIGTERM)), kills):
        with open(said, "wb") as stderr:
            child = start(*args, "-w", out, stderr=stderr)
        size += len(whole.stdout) // (kills + 1)
        wait_until(lambda: child.poll() is not None or (out.exists() and out.stat().st_size >= size))
        time.sleep(r.random() * 0.003)
        child.send_signal(number)
        killed += (status := child.wait()) in (-number, 130)
        done = out.read_bytes()
        assert whole.stdout.startswith(done)
        if status == 130:
            message = b"qwen3: list: %d lines are written; the same command goes on\n" % done.count(b"\n")
            assert done.endswith(b"\n") and message in said.read_bytes()
        if r.random() < 0.5:                    # as if the disk had lost the end
            out.write_bytes(done[:len(done) - r.randrange(40)])
    result = qwen3(*args, "-w", out, "-q")
    assert out.read_bytes() == whole.stdout and whole.returncode == 1 and killed > kills / 2
    assert result.returncode == 1

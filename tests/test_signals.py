"""Signals and closed readers, at any time: what was written stays, the terminal is as it was, and no half file."""
import os
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pexpect
import pytest
from conftest import (LINUX, ROOT, change_sections, copy_model, cpu_seconds, end, environment, finish, leave,
                      make_checkpoint, needs_small_pipes, prompts, settle, show_progress, small_pipe, spawn, stop,
                      wait_for_call, wait_until, waiting)

BOTH = pytest.mark.parametrize("mode", ["generate", "chat"])


@pytest.fixture(scope="module")
def endless(chain):
    """A model that says a forever: 100,000 tokens of context, and nothing else is likely."""
    return chain(default="a", max_len=100_000)


@pytest.fixture(scope="module")
def thinking(chain):
    """A model that thinks forever: <think>ababab..."""
    return chain("Ċ", "<think>", "a", "b", "a", max_len=100_000)


@pytest.fixture
def start(start):
    """start(model, *options): greedy, with the whole context, however often it repeats itself, and no stdin."""
    def start_endless(model, *options, **how):
        how = {"stdin": subprocess.DEVNULL, "bufsize": -1, **how}
        return start(model, "-t", 0, "-c", 0, *([] if "-n" in options else ["-n", -1]), *options, **how)
    return start_endless


def catches(pid, number):
    """Has the process a handler for this signal?"""
    if not LINUX:
        time.sleep(0.5)
        return True
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1


# -- on pipes

@pytest.mark.parametrize("number, status", [
    (signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130), (signal.SIGPIPE, -signal.SIGKILL)],
    ids=["TERM", "INT", "PIPE"])
def test_at_any_time(start, thinking, number, status):
    """From before main() to the middle of an answer; a mere SIGPIPE is ignored."""
    r = random.Random(number)
    for wait in (*(r.random() * 0.1 for _ in range(8)), None):
        child = start(thinking, "-i", "x", stdout=subprocess.DEVNULL)
        if wait is None:
            assert child.stderr.read(20)                # the thinking, on stderr
        else:
            time.sleep(wait)
        if number == signal.SIGPIPE:
            child.send_signal(number)
            time.sleep(0.02)
        found, _, error = stop(child, signal.SIGKILL if number == signal.SIGPIPE else number)
        assert found == status or wait is not None and found == -number, error
        assert b"qwen3: " not in error.replace(b"qwen3: -t 0", b""), error


@BOTH
def test_interrupt(start, endless, mode):
    """Nothing more is written, but what was written stays."""
    child = start(endless, "-m", mode, "-i", "hi")
    assert child.stdout.read(5) == b"aaaaa"
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    while waiting(child.stdout):
        assert set(os.read(child.stdout.fileno(), 65536)) <= set(b"a")
    child.send_signal(signal.SIGINT)
    status, out, error = stop(child, signal.SIGCONT)
    assert status == 130 and len(out) < 4 and set(out) <= set(b"a\n") and b"qwen3:" not in error


@needs_small_pipes
@BOTH
def test_interrupt_while_the_reader_is_slow(start, endless, mode):
    """The program waits in write(): no error, what was written stays, and a key that bounces is one Ctrl-C."""
    ours, theirs = small_pipe()
    child = start(endless, "-m", mode, "-i", "hi", stdout=theirs)
    os.close(theirs)
    wait_until(lambda: waiting(ours) >= 4096)
    wait_for_call(child.pid, "write")
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.05)
    with open(ours, "rb") as reader:
        assert len(reader.read()) >= 4096
    error = child.stderr.read()
    assert child.wait(300) == 130 and b"qwen3:" not in error and error.startswith(b"prompt "), error


def test_interrupt_while_a_pipe_has_no_writer(start, endless, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for wait in (0.01, 0.02, 0.05, 0.1, None):          # while it loads, or in open()
        child = start(endless, "-f", tmp_path / "pipe")
        if wait is None:
            wait_until(lambda: catches(child.pid, signal.SIGINT))
        else:
            time.sleep(wait)
        status, _, error = stop(child)
        assert error == b"" and status in ({130} if wait is None else {130, -signal.SIGINT})


def test_interrupt_while_tokenizing(start, endless, tmp_path):
    """Also if the model's file asks for that mode; a text to score may have any length, too."""
    mode = {b"mode": struct.pack("<I", 2)}
    model = change_sections(copy_model(endless, tmp_path), lambda sections: sections.update(mode))
    (tmp_path / "text").write_bytes(b"a b c " * 10_000_000)
    for options in [], ["-m", "perplexity"]:
        child = start(model, "-f", tmp_path / "text", *options)
        wait_until(lambda: catches(child.pid, signal.SIGINT))
        time.sleep(0.3)
        status, out, error = stop(child)
        assert (out, status) == (b"", 130) and b"too long" not in error, options


@BOTH
def test_closed_stdout_is_quiet(start, endless, mode):
    child = start(endless, "-m", mode, "-i", "the")
    child.stdout.close()
    assert b"qwen3:" not in child.stderr.read()
    assert child.wait(300) in (0, -signal.SIGPIPE)


@pytest.mark.skipif(not LINUX, reason="other systems keep the pages of a mapped file")
def test_file_that_shrinks_while_it_is_mapped(start, endless, tmp_path):
    """One line and exit 1, no core dump; what was written stays."""
    model = copy_model(endless, tmp_path)
    child = start(model, "-m", "generate", "-i", "a", env=environment(handle_sigbus="0"))
    assert child.stdout.read(5) == b"aaaaa"
    os.truncate(model, 256)
    out, error = child.communicate(timeout=300)
    assert child.returncode == 1 and error.startswith(b"qwen3: model: ") and error.count(b"\n") == 1
    assert set(out) <= set(b"a")


# -- at a terminal

@pytest.mark.skipif(not LINUX, reason="no /proc")
def test_interrupt_right_after_enter(endless, talk):
    """It stops the answer that is about to begin."""
    child, _ = talk("-t", 0, "-c", 0, "-n", -1, model=endless)
    child.sendline("x")
    child.expect("x\r\n")                               # the terminal has it, and then
    read = os.open(f"/proc/{child.pid}/fd/0", os.O_RDWR | os.O_NOCTTY)
    wait_until(lambda: not waiting(read))               # the program (Ctrl-C empties the terminal)
    os.close(read)
    child.sendintr()
    child.expect("answer \\d+ at|before its answer")
    assert b"full context" not in child.before          # of 100,000 tokens
    child.expect("> ")
    leave(child)


def answer(child, stopped=False):
    """Until an answer comes; with `stopped`, until the program waits in write(), because of Ctrl-S."""
    child.expect("aaaaaa")
    if stopped:
        child.sendcontrol("s")
        wait_for_call(child.pid, "write")


STOPPED = pytest.mark.parametrize("stopped", [False, True], ids=["reading", "terminal stopped"])


@STOPPED
def test_interrupt_stops_the_answer_only(endless, talk, stopped):
    child, _ = talk("-t", 0, "-c", 0, "-n", -1, model=endless)
    child.sendline("x")
    answer(child, stopped)
    child.sendintr()
    child.expect("> ")
    child.sendline("y")
    answer(child)
    child.sendintr()
    child.expect(r"\((\d+) cached\)")
    assert int(child.match[1]) > 5                      # what was said is kept
    child.expect("> ")
    leave(child)


@STOPPED
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_answer_at_a_terminal(endless, stopped, number):
    """No process remains, also where the window is closed."""
    child = spawn(endless, "-t", 0, "-c", 0, "-n", -1, "-i", "x")
    answer(child, stopped)
    child.sendintr() if number == signal.SIGINT else child.kill(number)
    wait_until(lambda: not child.isalive())
    child.close()
    assert (child.exitstatus, child.signalstatus) == ((130, None) if number == signal.SIGINT else (None, number))


@pytest.mark.parametrize("typed", ["", "half a li", "a line\\\n", "x\\\nhalf", "a\nb"])
def test_interrupt_at_the_prompt(endless, talk, typed):
    """It clears what was typed and says how to leave; the second one in a row leaves, within two seconds."""
    child, say = talk("-t", 0, "-n", 3, "-v", model=endless)
    def interrupt():
        child.sendintr()
        child.expect_exact("Ctrl-C again leaves")
        child.expect_exact("> ")
    child.send(typed)
    settle(child)
    interrupt()
    alone = prompts(say("x"))
    say("/clear")
    interrupt()                                         # the first again
    assert prompts(say("x")) == alone != []             # nothing of `typed` was sent
    if not typed:
        interrupt()
        child.send("\n")                                # an empty line changes nothing
        child.expect_exact("> ")
        time.sleep(2)
    interrupt()
    child.sendintr()
    assert finish(child) == 130
    assert b"stdin" not in child.before and b"Success" not in child.before


@pytest.mark.skipif(not LINUX, reason="no /proc to read the masks from")
def test_interrupt_is_the_main_threads(start, endless):
    """If a worker took it, the main thread's read would go on."""
    child = start(endless, "-m", "chat", "-n", "2", "-j", "3", stdin=subprocess.PIPE)
    child.stdin.write(b"x\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"aa\n"
    blocked = {task.name: int(re.search(r"SigBlk:\s+(\w+)", (task / "status").read_text())[1], 16)
               >> (signal.SIGINT - 1) & 1 for task in Path(f"/proc/{child.pid}/task").iterdir()}
    assert len(blocked) == 3 and [name for name in blocked if not blocked[name]] == [str(child.pid)]
    child.stdin.close()
    assert child.wait(300) == 0


@pytest.mark.parametrize("args, stdin, out", [
    (("-m", "chat"), b"x\n", b"aaa"), (("-m", "chat", "-n", 2), b"x\n", b"aa\n"), (("-m", "chat"), b"half", b""),
    (("-m", "chat", "-f", "-"), b"x", b""), (("-m", "tokenize", "-f", "-"), b"x", b"")])
def test_interrupt_of_what_reads_stdin(start, endless, args, stdin, out):
    """During an answer, and while it waits for a line, its end or the prompt's."""
    child = start(endless, *args, stdin=subprocess.PIPE)
    child.stdin.write(stdin)
    child.stdin.flush()
    assert child.stdout.read(len(out)) == out
    if out != b"aaa":
        wait_until(lambda: not waiting(child.stdin))    # it has read that, and then reads on
        wait_for_call(child.pid, "read")
    status, _, error = stop(child)
    assert status == 130
    assert b"qwen3: " not in error.replace(b"qwen3: answer: ended by -n", b""), error


@pytest.mark.parametrize("args, expected", [
    (("-m", "chat"), b"aa\n"), (("-m", "generate"), b"aa"), (("-l", "-"), b'"aa"\n')])
def test_input_that_does_not_block(start, endless, args, expected):
    """O_NONBLOCK on stdin: it is waited for, and Ctrl-C ends that."""
    for interrupted in True, False:
        theirs, ours = os.pipe()
        os.set_blocking(theirs, False)
        child = start(endless, *args, "-n", 2, stdin=theirs)
        os.close(theirs)
        with open(ours, "wb", buffering=0) as pipe:
            for text in b"", b"x":                      # nothing, and a line without its end
                pipe.write(text)
                time.sleep(0.3)
            wait_until(lambda: catches(child.pid, signal.SIGINT))
            if interrupted:
                assert stop(child)[0] == 130
                continue
            pipe.write(b"y\n")
        out, error = child.communicate(timeout=300)
        assert child.returncode == 0 and out == expected, error


@needs_small_pipes
def test_output_that_does_not_block(start, endless):
    """O_NONBLOCK on stdout: a reader that is slow gets all of it."""
    ours, theirs = small_pipe()
    os.set_blocking(theirs, False)
    child = start(endless, "-m", "generate", "-i", "x", "-n", "6000", stdout=theirs)
    os.close(theirs)
    wait_until(lambda: waiting(ours) >= 4096)
    time.sleep(0.2)
    with open(ours, "rb") as reader:
        assert reader.read() == b"a" * 6000
    assert child.wait(300) == 0, child.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL, signal.SIGQUIT, signal.SIGHUP])
def test_while_the_terminal_is_dim(thinking, number):
    """Each piece ends its own dimming: no signal leaves the terminal dim, unless it was full."""
    for _ in range(100):
        child = spawn(thinking, "-t", 0, "-c", 0, "-n", -1, "-i", "x")
        child.expect(r"\x1b\[2m")
        child.expect("a")
        child.kill(number)
        rest = child.after
        while child.expect([r"(?s).+", pexpect.TIMEOUT, pexpect.EOF], timeout=0.5) == 0:
            rest += child.after
        end(child)
        if len(rest) < 4000:
            break
    else:
        pytest.skip("this machine is too busy")
    assert rest.rstrip(b"\r\n").endswith(b"\x1b[0m")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT],
                         ids=["TERM", "INT"])
def test_during_a_paste(endless, number):
    """The terminal's mode, which is changed for a moment then, is as before."""
    r = random.Random(1)
    for _ in range(4):
        child = spawn(endless, "-t", 0, "-c", 0, "-n", -1)
        child.expect("> ")
        for _ in range(5):
            child.send("a line\n" * 3)
            time.sleep(0.02 + r.random() * 0.02)
        for _ in range(1000):                           # two may arrive as one
            child.kill(number)
            child.kill(number)
            if child.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=0.1) == 0:
                break
        assert termios.tcgetattr(child.child_fd)[3] & termios.ICANON
        end(child)
        assert child.signalstatus == number or child.exitstatus == 130


# -- while the progress of a prompt is shown

LONG = 40_000


@pytest.fixture(scope="module")
def slow(random_model, tmp_path_factory):
    """(a model, a file of LONG tokens, for which it needs ten seconds or more)."""
    prompt = tmp_path_factory.mktemp("slow") / "prompt"
    prompt.write_bytes(b"7" * LONG)
    return random_model(n_layers=6, n_heads=8, max_len=2 * LONG), prompt


@pytest.mark.parametrize("mode", ["generate", pytest.param("perplexity", marks=pytest.mark.slow)])
def test_interrupt_of_the_progress(slow, mode):
    """It is erased; the statistics count the tokens that were computed."""
    model, prompt = slow
    child = spawn(model, "-m", mode, "-f", prompt, "-c", 0, "-b", 1, "-j", 1, "-n", 3)
    assert show_progress(child)
    child.kill(signal.SIGINT)
    assert finish(child) == 130
    shown = re.fullmatch(rb"(\r[^\r\n]* left\x1b\[K)*\r\x1b\[K(\r\nprompt (\d+) tokens .*\r\n)?", child.before)
    assert shown and (mode == "perplexity" or 0 < int(shown[3]) < LONG), child.before


def test_message_stopped_before_its_answer(slow, talk):
    """It is taken back, no turn is forgotten for it, and the batches that ran are kept: it may be sent again."""
    model, prompt = slow
    child, say = talk("-c", LONG + 100, "-b", 1, "-j", 1, "-n", 1, "-m", "chat", model=model)
    def tokens(text):
        return int(re.search(rb"prompt (\d+) tokens", text)[1])
    turns, before = [tokens(say("x")) for _ in range(20)], 0
    for _ in range(2):
        child.sendline(f"/file {prompt}")
        child.expect(r"forgotten turns: \d+ of 21;", timeout=60)
        start = cpu_seconds(child.pid)
        wait_until(lambda: cpu_seconds(child.pid) > start + 0.3)
        child.sendintr()
        child.expect(r"prompt (\d+) tokens at [\d.]+/s \((\d+) cached\), answer 0 at")
        ran, cached = map(int, child.match.groups())
        assert before in (0, cached) and cached < ran < LONG
        before = ran
        child.expect("the message is taken back")
        child.expect("\n> ")
    assert turns[-1] < tokens(say("x")) < turns[-1] + 100


# -- export.py

@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("large")
    return make_checkpoint(folder / "hf", tokenizer, dim=1024, pad_to=20000)


@pytest.mark.parametrize("number, status, waits", [
    (signal.SIGINT, 130, [0]), (signal.SIGHUP, 129, [0.6]),
    pytest.param(signal.SIGTERM, 143, [0, 0.3, 0.8], marks=pytest.mark.slow)],
    ids=["INT", "HUP", "TERM"])
def test_export(checkpoint, tmp_path, number, status, waits):
    """While it writes: nothing is left. At any other time: all or nothing."""
    def begin():
        command = [sys.executable, ROOT / "export.py", checkpoint, tmp_path / "m.bin"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                env=environment(), start_new_session=True)
    def written():
        return sum(path.stat().st_size for path in tmp_path.glob("m.bin.*part"))
    for _ in range(9):
        child = begin()
        while child.poll() is None and not written():
            time.sleep(0.001)
        child.send_signal(signal.SIGSTOP)
        if written():
            break
        stop(child, signal.SIGCONT)                     # it was faster than this process
        for path in tmp_path.iterdir():
            path.unlink()
    assert written()
    child.send_signal(number)
    assert stop(child, signal.SIGCONT)[::2] == (status, b"") and not [*tmp_path.iterdir()]
    for wait in waits:
        child = begin()
        wait_until(lambda: child.poll() is not None or catches(child.pid, signal.SIGTERM))
        time.sleep(wait)
        found, _, error = stop(child, number)
        names = {path.name for path in tmp_path.iterdir()}
        # Before it has begun and after its last line, Python itself dies of the signal.
        whole = {"m.bin", "m.bin.tokenizer"}
        assert (found, names) in ((0, whole), (status, set()), (-number, set()), (-number, whole)), error

"""What a terminal shows of a prompt that takes its time, and that nothing is left of it."""
import re
import shlex
import time

import pexpect
import pytest
from conftest import QWEN3, finish, show_progress, spawn, spawn_shell

SHOWN = re.compile(rb"\r(\d+) of (\d+) tokens, [\d.]+ tokens/s, (\d+) s left\x1b\[K")
ERASED = b"\r\x1b[K"
TOKENS = 6000


@pytest.fixture(scope="module")
def slow(random_model):
    """A model that needs a while for TOKENS tokens."""
    return random_model(n_layers=3, max_len=12000)


def run(model, *args, tokens=TOKENS, batch=4, context=0, times=1000, to=""):
    """(exit status, stdout, what the terminal shows): stderr, if it does not go `to` stdout. Held up
    so many times at the most; if this process was too slow to see the progress, once more."""
    prompt, out = model.with_name("prompt.txt"), model.with_name("out")
    prompt.write_bytes(b"7" * tokens)                     # a token each
    command = shlex.join(map(str, [QWEN3, model, "-f", prompt, "-c", context, "-j", 1, "-b", batch, "-n", 3, *args]))
    for _ in range(5):
        child = spawn_shell(f"exec {command} > {out} {to}")
        shown = show_progress(child, times=times)
        text = child.before + child.after if shown else b""
        status = finish(child)
        text += child.before
        if shown or times < 1000:
            break
    return status, out.read_bytes(), text.replace(b"\r\n", b"\n")


def check(text, tokens):
    """The counts go up and are right; after the last one it is erased. Returns what follows."""
    shown = [tuple(map(int, match)) for match in SHOWN.findall(text)]
    assert shown and all(total == tokens for _, total, _ in shown)
    assert [done for done, _, _ in shown] == sorted({done for done, _, _ in shown})
    rest = text[[match.end() for match in SHOWN.finditer(text)][-1]:]
    assert rest.startswith(ERASED)
    return rest[len(ERASED):]


def test_prompt(slow):
    status, _, text = run(slow, "-m", "generate", "-t", 0)
    assert status == 0
    rest = check(text, TOKENS)
    assert re.fullmatch(rb"qwen3: answer: ended by -n [^\n]*\nprompt 6000 tokens [^\n]*\n", rest)


@pytest.mark.slow
def test_prompt_of_large_batches(slow):
    """It moves within a batch, too. (A fast machine shows it but once or twice in a run.)"""
    for _ in range(20):
        status, _, text = run(slow, "-m", "generate", "-t", 0, batch=512)
        assert status == 0
        check(text, TOKENS)
        if any(int(done) % 512 and int(done) < TOKENS // 512 * 512 for done, _, _ in SHOWN.findall(text)):
            return
    pytest.fail("whole batches alone are shown")


@pytest.mark.slow
@pytest.mark.parametrize("context", [0, 1000])
def test_perplexity(slow, context):
    """Of a text that is scored in pieces, too: the counts go on from piece to piece."""
    status, out, text = run(slow, "-m", "perplexity", context=context)
    assert status == 0 and out.startswith(b"tokens 5999 nll")
    assert not context or any(int(done) > 1000 for done, _, _ in SHOWN.findall(text))
    rest = check(text, TOKENS - 1)
    assert context or rest == b""


@pytest.mark.parametrize("args, to", [
    (["-q"], ""), pytest.param([], "2>&1", marks=pytest.mark.slow)], ids=["quiet", "pipe"])
def test_not_shown(slow, args, to):
    status, out, text = run(slow, "-m", "generate", *args, times=3, to=to)
    assert status == 0 and b"\x1b" not in out + text and b"left" not in out + text


@pytest.mark.slow
def test_not_shown_when_fast(slow):
    """In less than two seconds."""
    conclusive = False
    for _ in range(20):                                   # on a busy machine nothing is fast
        start = time.monotonic()
        status, _, text = run(slow, "-m", "generate", "-t", 0, tokens=3000, batch=1, times=0)
        assert status == 0
        if b"left" not in text:
            assert b"\x1b" not in text
            return
        conclusive |= time.monotonic() - start < 2
    pytest.fail("it is shown") if conclusive else pytest.skip("this machine is too busy")


def list_shown(model, path, *args):
    """[(seconds, texts done, seconds left or None)] that a list's progress shows, and the seconds in all."""
    command = shlex.join(map(str, [QWEN3, model, "-l", path, "-m", "generate", "-s", 1, "-p", 1, "-k", 0, "-j", 1, *args]))
    start = time.monotonic()
    child, shown = spawn_shell(f"exec {command} > /dev/null"), []
    line = rb"\r(\d+) of (?:about )?\d+ texts, [\d.]+ tokens/s(?:, (\d+) s left)?\x1b\[K"
    while child.expect([line, pexpect.EOF]) == 0:
        done, left = child.match.groups()
        shown.append((time.monotonic() - start, int(done), left and int(left)))
    return shown, time.monotonic() - start


def test_time_left_of_mixed_lengths(table_model, tmp_path):
    """Of answers of very different lengths: within a factor of 2.5 in the middle. They are a's, each the last one with
    probability 1 / 1100."""
    end, path, n, seconds = {"<|im_end|>": 0}, tmp_path / "list", 150, 0
    geometric = table_model({None: end, "a": end | {"a": 7}}, fill=-100, max_len=100_000)
    while seconds < 3.4:
        path.write_bytes(b"a\n" * n)
        shown, seconds = list_shown(geometric, path, "-t", 1)
        n = int(n * max(1.2, 4 / max(seconds, 0.5)))
    told = [(at / seconds, left / seconds) for at, _, left in shown if left is not None]
    assert len(told) > 5
    for at, left in told:
        assert not 0.4 < at < 0.75 or (1 - at) / 2.5 - 0.1 < left < 2.5 * (1 - at) + 0.1, (at, left, seconds)


@pytest.mark.slow
def test_list_whose_lines_go_to_the_terminal(tiny, tmp_path):
    """They erase the progress, which comes back ten times a second at most."""
    (tmp_path / "list").write_bytes(b"hi there\n" * 3_000_000)
    start, out = time.monotonic(), b""
    child = spawn(tiny, "-m", "tokenize", "-l", tmp_path / "list")
    while data := child.read(1 << 20):
        out += data
    assert out.count(b"\n") >= 3_000_000
    assert out.count(b" texts, ") < 10 * (time.monotonic() - start) + 10

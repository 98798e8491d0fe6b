"""Other compilers, sanitizers, CPUs (by qemu-user) and systems (by wine); what is not installed is skipped."""
import hashlib
import json
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import time
import tty
from pathlib import Path

import pytest
from conftest import HAS_AVX2, ROOT, TESTS, TINY, build, call, environment, stop, tokenize, wait_until, write_zeros

pytestmark = pytest.mark.slow
QUESTION = "What is the capital of France?"
ANSWER = b"The capital of France is Paris.\n"
PROGRAMS = ["qwen3", "tests/test", "tests/render"]
BLACK_BOX = [f"test_{name}.py" for name in (
    "chat", "cli", "faults", "files", "model", "progress", "sampling", "signals", "tiny", "tokenizer")]


def need(*programs):
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")


def under(directory, *runner):
    """The programs that were built there, each as a script that starts it under `runner`."""
    scripts = directory / "run"
    for name, *mode in (["qwen3"], ["tests/test"], ["tests/render", "render"]):
        program = directory / ("tests/test" if mode else name)
        program = program if program.exists() else program.with_suffix(".exe")
        script = scripts / name
        script.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join([*map(str, runner), str(program), *mode])
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
    return scripts


def check(programs, *files):
    """The unit tests, an answer, and of these files the tests that `make test` runs."""
    units = call(programs / "tests/test", timeout=3000)
    assert units.returncode == 0 and " 0 failures" in units.stdout, units
    answer = run(programs, TINY / "tiny.bin", "-t", 0, "-i", QUESTION)
    assert answer.returncode == 0 and answer.stdout == ANSWER, answer
    if files:
        for _ in range(3):                        # wine has failed to start a program, or to go on
            tests = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files],
                cwd=TESTS, capture_output=True, text=True, timeout=3600,
                env=environment(QWEN3=str(programs / "qwen3"),
                                ASAN_OPTIONS="allocator_may_return_null=1"))  # as malloc does
            if not re.search("returncode=1, stdout=b'', stderr=b''|wine client error", tests.stdout):
                break                             # the program's own errors say why
        assert tests.returncode == 0 and " passed" in tests.stdout, tests.stdout[-4000:]
        print(tests.stdout.splitlines()[-1])


def run(programs, *args, stdin=b"", timeout=300):
    return subprocess.run([programs / "qwen3", *map(str, args)], input=stdin, capture_output=True,
                          timeout=timeout, env=environment())


def check_list(programs, directory):
    """-l and -L, of a file and of stdin: each line is the answer that its text gets alone."""
    texts = [QUESTION, "Hello", "Größe 灯塔", "Who are you?", QUESTION]
    answers = [run(programs, TINY / "tiny.bin", "-t", 0, "-q", "-i", text).stdout for text in texts]
    assert answers[0] == ANSWER
    path = directory / "list"
    for kind, lines, bad in ("-l", texts, "long " * 200), ("-L", map(json.dumps, texts), '"'):
        data = "".join(line + "\r\n" for line in [*lines, bad]).encode()
        path.write_bytes(data)
        for file, stdin in (path, b""), ("-", data):
            done = run(programs, TINY / "tiny.bin", "-t", 0, "-q", "-c", 100, kind, file, stdin=stdin)
            *written, null, end = done.stdout.split(b"\n")
            assert [json.loads(line).encode() + b"\n" for line in written] == answers, done
            assert (done.returncode, null, end) == (1, b"null", b"") and b"line 6" in done.stderr, done


# -- compilers

@pytest.mark.parametrize("arguments", [
    *[[f"CC={cc}", f"CFLAGS=-O{level}", "NATIVE=$(THIS_CPU)"] for cc in ("gcc", "clang") for level in range(4)],
    ["CC=musl-gcc", "LDFLAGS=-static"],
], ids=lambda arguments: " ".join(arguments[:2]))
def test_compiler(arguments, tmp_path):
    need(arguments[0][3:])
    build(tmp_path, *arguments, *PROGRAMS)
    check(under(tmp_path))


@pytest.mark.parametrize("compiler", ["gcc -m32", "clang --target=armv7-linux-gnueabihf",
                                     "arm-linux-gnueabihf-gcc", "clang --target=s390x-linux-gnu"])
def test_refused(compiler):
    """32 bits, or the other byte order: one error that says so."""
    need(compiler.split()[0])
    result = call(*compiler.split(), "-fsyntax-only", ROOT / "qwen3.c")
    assert result.returncode != 0
    assert '"qwen3.c needs a 64-bit little-endian machine' in result.stderr, result.stderr


@pytest.mark.parametrize("files", [BLACK_BOX, ["test_list.py", "test_choices.py", "test_rows.py", "test_keep.py::test_any_runs_with_one_file"]],
                         ids=["one text", "a list"])
def test_sanitizers(tmp_path, files):
    build(tmp_path, "CFLAGS=$(SANITIZE)", "NATIVE=$(THIS_CPU)", *PROGRAMS)
    check(tmp_path, *files)


# -- CPUs

@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3"])
def test_x86_64(cpu, tmp_path):
    native = cpu == "x86-64" or HAS_AVX2
    if os.uname().machine != "x86_64":
        pytest.skip("no x86-64")
    if not native:
        need("qemu-x86_64")
    build(tmp_path, f"NATIVE=-march={cpu}", *PROGRAMS)
    runner = [] if native else ["qemu-x86_64", "-cpu", "max"]
    check(under(tmp_path, *runner), "test_tiny.py", "test_model.py", "test_list.py::test_not_finite")


@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-gcc", "clang --target=aarch64-linux-gnu"])
@pytest.mark.parametrize("cpu, simd", [("armv8-a", "plain C"), ("armv8.2-a+dotprod", "NEON dotprod")])
def test_aarch64(compiler, cpu, simd, tmp_path):
    need(compiler.split()[0], "aarch64-linux-gnu-gcc", "qemu-aarch64")
    build(tmp_path, f"CC={compiler}", f"NATIVE=-march={cpu}", "LDFLAGS=-static", *PROGRAMS)
    programs = under(tmp_path, "qemu-aarch64")
    assert f"({simd})" in call(programs / "qwen3", "--version").stdout
    check(programs, *["test_tiny.py"] * ("gcc" in compiler))
    check_list(programs, tmp_path)


# -- Windows

WINDOWS = pytest.mark.xdist_group("windows")            # wine starts once


@pytest.fixture(scope="session")
def windows(tmp_path_factory):
    """The programs for Windows, each as a script that starts it under wine."""
    compiler = "x86_64-w64-mingw32-gcc"
    wine = shutil.which("wine64") or shutil.which("/usr/lib/wine/wine64") or shutil.which("wine")
    need(compiler)
    if not wine:
        pytest.skip("wine is not installed")
    directory = tmp_path_factory.mktemp("windows")
    build(directory, f"CC={compiler}", *PROGRAMS)
    settings = ["env", f"WINEPREFIX={directory}/wine", "WINEDEBUG=-all"]
    programs = under(directory, *settings, wine)
    server = [*settings, Path(wine).with_name("wineserver")]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    def start():
        subprocess.run([programs / "qwen3", "--version"], stdin=subprocess.DEVNULL, timeout=300, check=True, **nowhere)
    # While one program lives, so do wine's services: the next start takes 30 ms instead of 2 s, and
    # can't meet their end, at which wine hangs now and then. Started here, they hold none of the
    # pipes through which a test reads: subprocess would wait for these.
    start()                                         # makes wine's folders, before all else
    subprocess.run([*server, "-w"], timeout=300)     # until its services have ended
    with subprocess.Popen([*settings, wine, "cmd"], stdin=subprocess.PIPE, **nowhere) as waiting:
        start()
        assert waiting.poll() is None
        yield programs
        subprocess.run([*server, "-k"], timeout=300)


@WINDOWS
def test_windows(windows, tmp_path):
    check(windows, "test_tiny.py")
    check_list(windows, tmp_path)


@pytest.mark.parametrize("text", ["Größe, 灯塔 🙂", 'a "quoted" b', "back\\slash\\", "2*3? *.md", "", 'a\\"b\\\\"'])
@WINDOWS
def test_windows_arguments(windows, text):
    model = TINY / "tiny.bin"
    result = run(windows, model, "-q", "-m", "tokenize", "-i", text)
    assert result.returncode == 0
    assert [int(i) for i in result.stdout.split()] == tokenize(model, text.encode())


@WINDOWS
def test_windows_names(windows, tmp_path):
    """File names in any script; a missing one is named as it was given."""
    directory = tmp_path / "Größe и 灯"
    directory.mkdir()
    for name in ("tiny.bin", "tiny.bin.tokenizer"):
        shutil.copy(TINY / name, directory / name)
    (directory / "é.txt").write_text(QUESTION)
    result = run(windows, directory / "tiny.bin", "-t", 0, "-f", directory / "é.txt")
    assert result.returncode == 0 and result.stdout == ANSWER
    result = run(windows, directory / "灯.bin", "-i", "a")
    assert result.returncode == 1 and result.stdout == b""
    assert result.stderr.decode() == (f"qwen3: {directory}/灯.bin: No such file or directory, expected "
                                      "a file made by export.py\n")


@WINDOWS
def test_windows_bytes(windows, tmp_path):
    """What is read and written is the bytes: no CR comes or goes, Ctrl-Z and NUL are characters."""
    text = b"a\r\nb\x1ac\n\xff\x00\n\r\n"
    (tmp_path / "text").write_bytes(text)
    model = TINY / "tiny.bin"
    expected = b" ".join(b"%d" % i for i in tokenize(model, text)) + b"\n"
    assert run(windows, model, "-m", "tokenize", stdin=text).stdout == expected
    assert run(windows, model, "-m", "tokenize", "-f", tmp_path / "text").stdout == expected
    talk = run(windows, model, "-m", "chat", "-t", 0, stdin=b"My name is Ann.\r\n" * 2)
    assert talk.stdout == b"Hello, Ann! How can I help you?\n" * 2
    assert talk.stderr.count(b"\n") == 2 and b"\r" not in talk.stderr


@WINDOWS
def test_windows_exit(windows):
    """Exit codes; a reader that has seen enough; NUL is no terminal."""
    assert run(windows, TINY / "tiny.bin", "-j", 0).returncode == 2
    directory = run(windows, TINY, "-i", "a")
    assert directory.returncode == 1 and f"export.py {TINY}".encode() in directory.stderr, directory
    with subprocess.Popen([windows / "qwen3", "-h"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env=environment()) as closed:
        closed.stdout.close()
        assert closed.stderr.read() == b"" and closed.wait(300) == 0
    nul = call(windows / "qwen3", TINY / "tiny.bin", "-m", "tokenize", stdin=subprocess.DEVNULL)
    assert nul.returncode == 0 and nul.stdout == "\n"


# -- what a release brings

@pytest.mark.parametrize("name, compiler, runner", [
    ("x86-64-v3", "musl-gcc", None), ("x86-64-avx512", "musl-gcc", None),
    ("aarch64", "aarch64-linux-gnu-gcc", "qemu-aarch64"),       # with another C library than the release
    pytest.param("windows", "x86_64-w64-mingw32-gcc", "wine64", marks=WINDOWS)])
def test_release(name, compiler, runner, tmp_path):
    """It answers, or says that this CPU lacks something; on Linux it needs no library."""
    wine = shutil.which("wine64") or shutil.which("/usr/lib/wine/wine64")
    need(compiler, *([wine or runner] if runner == "wine64" else [runner] if runner else []))
    if not runner and os.uname().machine != "x86_64":
        pytest.skip("no x86-64")
    build(tmp_path, f"release-{name}", *[f"MUSL={compiler}"] * (runner != "wine64"))
    program, = (tmp_path / "release").iterdir()
    assert re.fullmatch(rf"qwen3-\d+\.\d+-{name}(\.exe)?", program.name)
    if runner != "wine64" and shutil.which("readelf"):
        assert "INTERP" not in call("readelf", "-lW", program).stdout
    for file in ("export.py", "LICENSE", "tests/tiny", "tests/tiny35", *(f"tests/book.{end}" for end in ("py", "md", "html"))):
        (tmp_path / file).symlink_to(ROOT / file)
    start = {None: "", "wine64": f"env WINEPREFIX={tmp_path}/wine WINEDEBUG=-all {wine}"}.get(runner, runner)
    said = build(tmp_path, "-s", "answer", f"RUN={start}")
    if "CPU: lacks an instruction" in said:
        pytest.skip(said)
    assert said.endswith(f"{program.name}: {ANSWER.decode()}") or runner == "wine64" and ANSWER.decode() in said
    build(tmp_path, "-s", "sums")
    sums = (tmp_path / "release/SHA256SUMS").read_text()
    beside = [tmp_path / "release" / name for name in ("LICENSE", "book.html", "export.py")]
    assert sums.splitlines() == [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in (*beside, program)]
    assert beside[0].read_text().startswith((ROOT / "LICENSE").read_text()) and b"<!--" not in beside[1].read_bytes()
    assert beside[2].read_bytes() == (ROOT / "export.py").read_bytes()


def write_model(path, ones={}, **numbers):
    """A model of zeros with the tiny one's vocabulary: without ones it answers token 0 forever."""
    vocab, = struct.unpack_from("<I", (TINY / "tiny.bin").read_bytes(), 28)
    return write_zeros(path, (TINY / "tiny.bin.tokenizer").read_bytes(), ones, **dict(
        dim=64, hidden_dim=64, n_layers=1, n_heads=1, n_kv_heads=1, vocab_size=vocab,
        max_seq_len=1 << 20, head_dim=64, shared_classifier=0, group_size=64) | numbers)


@pytest.mark.parametrize("system", ["here", pytest.param("windows", marks=WINDOWS)])
def test_over_4_gb(system, request, tmp_path):
    """The answer is in the last matrix, after 4 GB of zeros."""
    programs = ROOT if system == "here" else request.getfixturevalue("windows")
    path = tmp_path / "large.bin"
    if shutil.disk_usage(tmp_path).free < 6e9:
        pytest.skip("no room, should the file system have no holes, or be in memory")
    (before,), (after,) = tokenize(TINY / "tiny.bin", b"a"), tokenize(TINY / "tiny.bin", b"b")
    ones = {"embed_tokens.weight": (before, 1), "norm.weight": (0, 1), "lm_head.weight": (after, 1)}
    write_model(path, ones, dim=4096, hidden_dim=16384, n_layers=18, n_heads=64, max_seq_len=64)
    assert path.stat().st_size > 1 << 32
    result = run(programs, path, "-q", "-m", "generate", "-t", 0, "-n", 1, "-i", "a")
    path.unlink()
    assert result.returncode == 0 and result.stdout == b"b", result


@WINDOWS
def test_windows_ctrl_c(windows, tmp_path):
    """Ctrl-C ends a one-shot answer; what was written stays."""
    path = tmp_path / "endless.bin"
    write_model(path)
    with subprocess.Popen([windows / "qwen3", path, "-c", "0", "-m", "generate", "-t", "0", "-n", "-1", "-i", "a"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout.read(20) == b"!" * 20
        status, out, err = stop(process)    # without what read() has taken beyond its 20
    assert status == 130 and set(out) <= {ord("!")}
    assert [line.split()[0] for line in err.splitlines()] == [b"qwen3:", b"prompt"]    # in panels; the rates


@WINDOWS
def test_windows_console(windows):
    """A conversation on a console: UTF-8 typed and shown, lines joined, pastes, Ctrl-D."""
    pid, fd = pty.fork()
    if pid == 0:
        tty.setraw(0)               # as wine's console does a little later
        os.execve(windows / "qwen3", ["qwen3", str(TINY / "tiny.bin"), "-t", "0", "-v"], environment())
    shown = b""
    def wait_for(text):
        nonlocal shown
        end = time.monotonic() + 300
        while text not in plain(shown):
            assert time.monotonic() < end and select.select([fd], [], [], 300)[0], plain(shown)
            shown += os.read(fd, 65536)
        found, shown = plain(shown), b""
        return found
    def plain(out):
        """Without the console's cursor movements and line breaks (80 columns)."""
        out = out.replace(b"\x1b[1C", b" ").replace(b"\x1b[79C", b"").replace(b"\r", b"")
        return re.sub(rb"\x1b\[[?0-9;]*[A-Za-z]|\n", b"", out).decode("utf-8", "replace")
    def ids(text):
        return " ".join(map(str, tokenize(TINY / "tiny.bin", text.encode()))) + " "
    def say(keys, message):
        os.write(fd, keys.encode())
        said = wait_for("seed ")
        assert ids(message) in said.replace("  ", " "), (ids(message), said)
        return said
    wait_for("> ")
    say("灯塔 ÄÖ?\r", "灯塔 ÄÖ?")
    text = "What is the capital of Colombia?"
    assert "is Bogotá." in say(text + "\r", text)
    os.write(fd, b"one\\\r")
    wait_for("one\\")
    time.sleep(5)                                  # typed, not pasted
    say("two\r", "one\ntwo")
    os.write(fd, b"a b\rc\rd\r")                   # pasted
    wait_for("(Enter sends) ")
    say("\r", "a b\nc\nd")
    os.write(fd, b"/help\r")
    wait_for("/retry")
    wait_for("> ")
    os.write(fd, b"\x04")
    wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

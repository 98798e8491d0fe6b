"""What the tests share: running qwen3 and export.py, and models that many of them use.

The programs are black boxes here. QWEN3=path runs another build (say, one with sanitizers).
"""
import codecs
import contextlib
import fcntl
import functools
import hashlib
import http.server
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

# No threads in the process that the programs are forked from, however many cores there are
os.environ.update(OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import deltas  # noqa: E402
import jinja2.sandbox  # noqa: E402
import numpy as np  # noqa: E402
import pexpect  # noqa: E402
import pytest  # noqa: E402
import reference  # noqa: E402
from checkpoints import (ADDED, CHATML, HYBRID, SENTENCES, Checkpoint, make_checkpoint,  # noqa: E402, F401
                         make_table_model, train_tokenizer)  # noqa: F401

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))
import export as export_py  # noqa: E402

export_py.make_unicode_sections = functools.cache(export_py.make_unicode_sections)  # a third of a second each
export_py.TEMPLATE_SECONDS = 300                        # also a slow machine ends all but endless ones


def remember_renders(render=export_py.render_all, made={}):
    """A chat template's process takes longer than the rest of an export: what one has rendered is kept, by all that a
    test may change."""
    def render_all(*args):
        key = (*map(repr, args), sys.executable, os.environ.get("PYTHONPATH"), export_py.TEMPLATE_SECONDS,
               export_py.inspect.getsource)
        if key not in made:
            made[key] = render(*args)
        return dict(made[key])
    return render_all


export_py.render_all = remember_renders()

QWEN3 = Path(os.environ.get("QWEN3", ROOT / "qwen3")).resolve()
QUOTED_QWEN3 = shlex.quote(str(QWEN3))      # for a shell
TINY = TESTS / "tiny"
LINUX = sys.platform == "linux"
HAS_AVX2 = LINUX and bool(re.search(r"^flags.* avx2 ", Path("/proc/cpuinfo").read_text(), re.M))
SANITIZED = QWEN3.exists() and b"__asan_init" in QWEN3.read_bytes()
needs_address_space = pytest.mark.skipif(SANITIZED or not LINUX, reason="needs a limited address space")

RATE = r"(?:\d{1,3}\.\d|\d{4,})/s"             # a decimal only below 1,000
STATS = re.compile((rf"prompt (\d+) tokens at {RATE} \((\d+) cached\), "
                    rf"answer (\d+) at {RATE}, seed (\d+)\n").encode())


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: for `make test-all`, not for `make test`")
    config.addinivalue_line("markers", "alone: and of these, without other tests beside it")


# -- running the programs

# Who runs the tests may ignore signals (nohup, a shell's &) or block them; the programs inherit it.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)          # here still without effect, there as usual
signal.pthread_sigmask(signal.SIG_SETMASK, ())

# As the usual 8 MB for each thread is what the tests with little memory reckon with
stack, most = resource.getrlimit(resource.RLIMIT_STACK)
if most == resource.RLIM_INFINITY or most >= 8 << 20:
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, most))


def environment(**changes):
    keep = ("PATH", "HOME", "TMPDIR", "CC", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    return {**env, "LC_ALL": "C.UTF-8", **changes}


def qwen3(*args, stdin=b"", timeout=300, **env):
    """Run the program with no terminal anywhere; stdout and stderr as bytes."""
    return subprocess.run([str(QWEN3), *map(_argument, args)], input=stdin, capture_output=True,
                          timeout=timeout, env=environment(**env), start_new_session=True)


def _argument(value):
    return value if isinstance(value, (str, bytes)) else str(value)


def spawn(*args, **env):
    """The program at a pseudo-terminal: stdin, stdout and stderr."""
    child = pexpect.spawn(str(QWEN3), [str(arg) for arg in args], timeout=300, dimensions=(24, 80),
                          env=environment(**{"TERM": "xterm"} | env))
    child.delaybeforesend, child.ptyproc.delayafterclose = None, 0
    return child


def shell(script, timeout=300, **how):
    """A run of this script, with no terminal anywhere."""
    return subprocess.run(["sh", "-c", script], capture_output=True, timeout=timeout,
                          env=environment(), **how)


def call(*args, env={}, **how):
    """A run of these words, of which the output is text; env are changes of the environment."""
    return subprocess.run(list(map(str, args)), **{"capture_output": True, "text": True, "timeout": 1200,
                                                   "env": environment(**env), **how})


def spawn_shell(script):
    """This script at a pseudo-terminal."""
    return pexpect.spawn("sh", ["-c", script], timeout=300, env=environment(TERM="xterm"), dimensions=(24, 80))


def wait_until(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def waiting(fd):
    """How many bytes wait in this terminal or pipe."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


SYSTEM_CALLS = {"x86_64": {"read": ("0", "7"), "write": ("1",)},           # 7, 73: poll, before a read
                "aarch64": {"read": ("63", "73"), "write": ("64",)}}


def wait_for_call(pid, name):
    """Until the process waits in read or write; where that can't be seen, for half a second."""
    def current():
        return Path(f"/proc/{pid}/syscall").read_text().split()[0]

    try:
        numbers = SYSTEM_CALLS[os.uname().machine][name]
        current()
    except (KeyError, OSError):
        time.sleep(0.5)
    else:
        wait_until(lambda: current() in numbers)


def small_pipe():
    """The ends of one that is full after 4,096 bytes, where there are such pipes."""
    ours, theirs = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, 4096)
    return ours, theirs


needs_small_pipes = pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="no small pipes")


def cpu_seconds(pid):
    """What a program of one thread has had of the CPU, whoever else has it; or, where that can't be seen, the time."""
    used = Path(f"/proc/{pid}/schedstat")
    return int(used.read_text().split()[0]) / 1e9 if used.exists() else time.monotonic()


def settle(child):
    """Until a spawned program has taken what was typed and waits for more: what is typed from now on
    does not arrive together with it, however slow the machine is."""
    time.sleep(0.05)                                    # the terminal's own work
    if LINUX:
        terminal = os.open(f"/proc/{child.pid}/fd/0", os.O_RDWR | os.O_NOCTTY)
        wait_until(lambda: not waiting(terminal))
        os.close(terminal)
    wait_for_call(child.pid, "read")


def show_progress(child, line=r" left\x1b\[K", times=1000):
    """Holds a spawned program up again and again, until it has taken the two seconds after which its progress
    is shown, however fast the machine is. Returns whether it was."""
    for _ in range(times):
        found = child.expect([line, pexpect.EOF, pexpect.TIMEOUT], timeout=0.05)
        if found < 2:
            return found == 0
        child.kill(signal.SIGSTOP)
        time.sleep(2.1)
        child.kill(signal.SIGCONT)
    return False


def leave(child):
    """Ends a conversation by Ctrl-D."""
    child.sendeof()
    assert finish(child) == 0


def finish(child):
    """The exit status of a spawned program; what it wrote last is in child.before."""
    child.expect(pexpect.EOF)
    wait_until(lambda: not child.isalive())             # close() would wait, but not long, and kill it
    child.close()
    return child.exitstatus


def shown_by(*args, status=0, **env):
    """What the program shows at a terminal until it ends with this status."""
    child = spawn(*args, **env)
    assert finish(child) == status, child.before
    return child.before


def end(child):
    """Kills a spawned program, if it still runs."""
    child.kill(signal.SIGKILL)
    wait_until(lambda: not child.isalive())
    child.close()


def output(*args, stdin=b"", **kwargs):
    """stdout of a run that must succeed."""
    result = qwen3(*args, stdin=stdin, **kwargs)
    assert result.returncode == 0, result
    return result.stdout


def tokenize(model, text):
    """The ids of a text (bytes), through stdin. A byte order mark before it is dropped, so that it may begin with
    any bytes."""
    out = output(model, "-m", "tokenize", "-q", stdin=b"\xef\xbb\xbf" + text)
    assert out.endswith(b"\n") and out.count(b"\n") == 1
    return [int(word) for word in out.split()]


def perplexity(model, *args, stdin=b""):
    """(N, nll, ppl) of a run of -m perplexity."""
    out = output(model, "-m", "perplexity", "-q", *args, stdin=stdin)
    match = re.fullmatch(rb"tokens (\d+) nll (-?\d+\.\d{6}) ppl (\d+(?:\.\d+)?(?:e\+\d+)?)\n", out)
    assert match, out
    return int(match[1]), float(match[2]), float(match[3])


def assert_error(result, code, *words):
    """The run failed as cli.md says: nothing on stdout, one line on stderr, this exit status."""
    message = result.stderr.decode("utf-8", "replace")
    message = re.sub(r"==\d+==WARNING: AddressSanitizer failed to allocate.*\n", "", message)
    assert result.returncode == code, (result.returncode, message)
    assert result.stdout == b""
    assert message.startswith("qwen3: ") and message.endswith("\n"), message
    assert message.count("\n") == 1, message
    assert not re.search(r"expected (\S+) to \1,", message), message
    for word in words:
        assert str(word) in message, f"no {word!r} in: {message}"


def build(directory, *arguments):
    """make in a folder with the sources, which are put there; silent, but for make's own lines.
    Returns these."""
    for file in [ROOT / "Makefile", ROOT / "qwen3.c", *TESTS.glob("*.[ch]")]:
        to = directory / file.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            shutil.copy(file, to)
    made = subprocess.run(["make", *arguments], cwd=directory, capture_output=True, text=True,
                          timeout=1200, env=environment())
    assert made.returncode == 0 and made.stderr == "", made.stderr
    return made.stdout


def run_export(*args):
    """(exit status, stderr) of export.py's main() in this process, which has loaded its packages."""
    errors, argv = io.StringIO(), sys.argv
    export_py.Notices.hints.clear()
    sys.argv = ["export.py", *map(str, args)]
    try:
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
            export_py.main()
    finally:
        sys.argv = argv
    return stop.value.code, errors.getvalue()


def export(source, out, *args):
    """OUT.bin's path, exported."""
    status, error = run_export(source, out, *args)
    assert status == 0, error
    return Path(out)


def export_by_rows(source, out, *args, **changes):
    """Exports as older programs did, each matrix row after row. changes: of the header, besides."""
    read_header = export_py.read_header

    def read_older(*arguments):
        header, computed = read_header(*arguments)
        return header._replace(panels=0, **changes), computed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_py, "read_header", read_older)
        patch.setattr(export_py, "hash_part", lambda *_: 0)
        return export(source, out, *args)


def export_process(*args, measure=False, env={}, **how):
    """export.py in a process of its own; env are changes of the environment. With `measure` its last
    line on stdout is its CPU time in seconds and its peak memory in bytes. It writes no bytecode:
    Python would keep what a limit has cut, and fail from then on."""
    command = [str(ROOT / "export.py"), *map(_argument, args)]
    code = (f"import os, runpy, sys; sys.argv = {command!r}\n"
            "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
            "finally: print(sum(os.times()[:4]), 1024 * int(open('/proc/self/status').read()\n"
            "                                               .split('VmHWM:')[1].split()[0]))")
    # not getrusage: its maximum includes the process that this one was forked from
    return subprocess.run([sys.executable, *(["-c", code] if measure else command)],
                          text=True, stdin=subprocess.DEVNULL, **{
                              "capture_output": "stdout" not in how, "timeout": 300, **how,
                              "env": environment(PYTHONDONTWRITEBYTECODE="1", **env)})


measures = pytest.mark.skipif(not LINUX, reason="no /proc for the peak of memory")


def refused(result, *patterns):
    """export.py's result, (status, lines on stderr) or a process: one line that names everything
    asked for, exit status 1."""
    if isinstance(result, subprocess.CompletedProcess):
        result = result.returncode, result.stderr.splitlines()
    status, err = result
    assert status == 1 and len(err) == 1, (status, err)
    assert err[0].startswith("export.py: ") and "expected" in err[0] and "found" in err[0], err
    for pattern in patterns:
        assert re.search(pattern, err[0]), (pattern, err[0])


# -- lists of texts

def compile_template(source, **how):
    """As transformers compiles a chat template."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, **how).from_string(source)


def random_talk(r, contents, answers, system, turns):
    """Messages: perhaps a system prompt, so many turns, and what the user says last."""
    talk = [{"role": "system", "content": r.choice(contents)}] * system
    for _ in range(turns):
        talk += [{"role": "user", "content": r.choice(contents)}, {"role": "assistant", "content": r.choice(answers)}]
    return [*talk, {"role": "user", "content": r.choice(contents)}]


GREEDY = ("-t", "0")
HELLO = b'"text":"Hello"'
WORDS = ("the old lighthouse keeper wind harvest It's 1999-12-31 Größe naïve 灯塔 🙂 f(n) \t  capital of "
         "France? What is your name <|im_end|> <think> \"quoted\" back\\slash e\u0301 ~~~ Tell me a story").split(" ")


codecs.register_error("surrogate", lambda error: ("\udc80", error.end))    # one for each maximal subpart


def json_string(data, errors="surrogate"):
    """As an answer is written: what is not UTF-8 is \\ufffd, as often as Python decodes it to U+FFFD. With
    "surrogateescape" as `tokenize -v` writes a token: each byte."""
    def escape(match):
        c = match[0]
        short = "\"\\\b\f\n\r\t".find(c)
        return "\\" + "\"\\bfnrt"[short] if short >= 0 else r"\ufffd" if c >= "\udc80" else f"\\u{ord(c):04x}"
    text = data.decode("utf-8", errors)
    return b'"%s"' % re.sub('["\\\\\0-\x1f\x7f-\x9f\udc80-\udcff]', escape, text).encode()


@functools.cache
def alone(model, text, *args, mode="chat", seed=None):
    """The line that the list should have for this text: what a run of its own writes; null if it fails."""
    args = [model, "-m", mode, "-qq", *args, *([] if seed is None else ["-s", seed % 2**64])]
    if b"\0" in text:                           # what an argument can't be
        result = qwen3(*args, "-f", "-", stdin=text + b"\n" * (mode == "chat"))
    else:
        result = qwen3(*args, "-i", text)
    if result.returncode != 0:
        assert_error(result, 1)
        return b"null"
    if mode == "chat":
        assert result.stdout.endswith(b"\n")
        return json_string(result.stdout[:-1])
    return json_string(result.stdout) if mode == "generate" else result.stdout[:-1]


def join_lines(values):
    """A list of these lines: bytes as they are, anything else as JSON."""
    return b"".join((value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n" for value in values)


def run_list(model, data, *args, kind="-l", status=0, blocks=None):
    """The lines of the output of a list that is stdin, without their newlines; and stderr. With so many
    blocks in the cache, if not None."""
    data = data if isinstance(data, bytes) else join_lines(data)
    if blocks is None:
        result = qwen3(model, kind, "-", *args, stdin=data)
    else:
        test = QWEN3.parent / "tests/test"
        test = test if test.exists() else TESTS / "test"
        result = subprocess.run([test, "list", *map(_argument, (blocks, model, kind, "-", *args))], input=data,
                                capture_output=True, timeout=300, env=environment())
    assert result.returncode == status, result
    assert result.stdout.endswith(b"\n") or not result.stdout
    return result.stdout.split(b"\n")[:-1], result.stderr


run_json = functools.partial(run_list, kind="-L")


def errors_of(error, name=b"stdin"):
    """{line: what}, of a stderr that is nothing else."""
    found = {}
    for line in error.splitlines():
        match = re.fullmatch(rb"qwen3: " + re.escape(name) + rb": line (\d+): (.+)", line)
        assert match and int(match[1]) not in found, error
        found[int(match[1])] = match[2].decode()
    return found


def write_list(path, lines):
    path.write_bytes(join_lines(lines))
    return path


# -- files, to be changed

def copy_model(model, directory, extension=True):
    """The model's two files once more, to be changed; without the extension as older exports wrote
    the tokenizer file."""
    path = directory / "model.bin"
    shutil.copy(model, path)
    data = Path(f"{model}.tokenizer").read_bytes()
    Path(f"{path}.tokenizer").write_bytes(data if extension else data[:data.index(b"q3tx")])
    return path


def expand_four_bits(model, path):
    """The model's two files once more, in eight bits, with the same values: int8 levels[nibble] and
    the scales in fp32."""
    shutil.copy(f"{model}.tokenizer", f"{path}.tokenizer")
    return reference.Model.from_bin(model).to_bin(path)


def write_zeros(path, tokenizer, ones={}, **numbers):
    """Writes a model of zeros, which are holes, and its tokenizer file. numbers: of the header.
    ones: a tensor's name -> (first row, how many) that are ones."""
    header = export_py.Header(0x616A6331, 1, **dict.fromkeys(export_py.Header._fields[2:16], 0) | {
        "shared_classifier": 1, "group_size": 32, "panels": 0} | numbers)
    outputs = export_py.lay_out(header)
    with open(path, "wb") as file:
        file.write(export_py.HEADER.pack(*header))
        file.truncate(outputs[-1].end)
        for output in (output for output in outputs if output.names[0] in ones):
            first, n = (rows * output.shape[-1] for rows in ones[output.names[0]])
            file.seek(output.values + first * output.bits // 8)
            file.write(np.ones(n, "<f4" if output.bits == 32 else "i1").tobytes())
            if output.bits == 8:
                file.seek(output.scales + first // header.group_size * 4)
                file.write(np.ones(n // header.group_size, "<f4").tobytes())
    Path(f"{path}.tokenizer").write_bytes(tokenizer)
    return path


def outputs(data):
    """The tensors of a model's file: name (expert 0's for all of a layer) -> export.py's Output."""
    header = export_py.Header._make(export_py.HEADER.unpack(data[:256]))
    return {output.names[0]: output for output in export_py.lay_out(header)}


def split_tokenizer(data):
    """A tokenizer file's (part before the extension, {tag: payload})."""
    end = data.index(b"q3tx")
    at, sections = end + 12, {}
    while at < len(data):
        tag, length = struct.unpack_from("<4sI", data, at)
        sections[tag] = data[at + 8:at + 8 + length]
        at += 8 + length
    return data[:end], sections


def join_tokenizer(plain, sections):
    body = b"".join(tag + struct.pack("<I", len(payload)) + payload for tag, payload in sections)
    return plain + b"q3tx" + struct.pack("<II", 1, len(body)) + body


def change_sections(model, change):
    """change(sections) changes those of a model's tokenizer file, {tag: payload}."""
    path = Path(f"{model}.tokenizer")
    plain, sections = split_tokenizer(path.read_bytes())
    change(sections)
    path.write_bytes(join_tokenizer(plain, sections.items()))
    return model


def token_records(data, n):
    """Where each of the n tokens' records in a tokenizer file begins, and where the last one ends."""
    at = [12]
    for _ in range(n):
        at.append(at[-1] + 8 + struct.unpack_from("<I", data, at[-1] + 4)[0])
    return at


def records(mode, *args, texts):
    """Run tests/test's modes `tokens` and `render`: texts are (kind, bytes) pairs; a list of ids comes
    back for each line of the output."""
    path = QWEN3.parent / "tests/test"                      # of the same build, if it has one
    path = path if path.exists() else TESTS / "test"
    assert path.exists(), f"no {path}: make tests/test"
    command = [path.with_name("render")] if mode == "render" else [path, mode]
    data = b"".join(b"%s %d\n%s\n" % (kind.encode(), len(text), text) for kind, text in texts)
    result = subprocess.run([*command, *map(str, args)], input=data, capture_output=True, timeout=300,
                            env=environment())
    assert result.returncode == 0, result.stderr
    return [[int(i) for i in line.split()] for line in result.stdout.split(b"\n")[:-1]]


def read_tokenizer(data: bytes, vocab_size: int):
    """(header, [(score, token)], sections) of a .tokenizer file, everything checked."""
    head, tokens, scores, sections = reference.read_tokenizer(data, vocab_size)
    assert head[0] == max(map(len, tokens)) and len(tokens) == vocab_size and sections
    return head, list(zip(scores, tokens)), sections


def rows(section: bytes, width: int):
    return [tuple(row) for row in np.frombuffer(section, "<u4").reshape(-1, width).tolist()]


def sections_of(ck, tmp_path):
    export_py.Notices.hints.clear()
    source = export_py.read_folder(ck.save(tmp_path))
    data = export_py.join_tokenizer(*export_py.make_tokenizer(source, ck.config["vocab_size"]))
    return read_tokenizer(data, ck.config["vocab_size"])


@pytest.fixture(scope="session")
def tokenizer():
    """The trained tokenizer, a tokenizers.Tokenizer: 256 bytes, 220 merges, 26 added tokens."""
    return train_tokenizer()


@pytest.fixture(scope="session")
def tokenizer35():
    """The same with Qwen3.5's way to cut words."""
    return train_tokenizer(split=reference.SPLIT35)


@pytest.fixture(scope="session")
def tokenizer_json(tokenizer) -> str:
    return tokenizer.to_str()


@pytest.fixture
def checkpoint(tokenizer_json):
    """checkpoint(...) is a Checkpoint, for tests to spoil."""
    return lambda *args, **config: Checkpoint(tokenizer_json, *args, **config)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(arguments) is run_export() in tmp_path: (exit status, lines of stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        status, errors = run_export(*args)
        return status, errors.splitlines()
    return call


@pytest.fixture
def exports(run):
    """exports(arguments): what it says, line by line, and it ends well."""
    def call(*args):
        status, err = run(*args)
        assert status == 0, err
        return err
    return call


@pytest.fixture
def saved(checkpoint, tmp_path):
    """A checkpoint's folder."""
    return checkpoint().save(tmp_path / "in")


@pytest.fixture
def exported_bytes(exports, tmp_path):
    """exported_bytes(checkpoint or path, *options, lines=n): OUT.bin, exported; n lines are said, if n is given."""
    def call(source, *args, lines=None):
        source = source.save(tmp_path / "in") if isinstance(source, Checkpoint) else source
        err = exports(source, "out.bin", *args)
        assert lines in (None, len(err)), err
        return (tmp_path / "out.bin").read_bytes()
    return call


@pytest.fixture
def refuses(run, tmp_path):
    """refuses(checkpoint or its folder, *patterns): it is refused so, and nothing is written."""
    def call(source, *patterns, args=()):
        folder = source if isinstance(source, Path) else source.save(tmp_path / "in")
        refused(run(folder, "out.bin", *args), *patterns)
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    return call


# -- models that many tests use

@pytest.fixture(scope="session", autouse=True)
def built():
    if not QWEN3.exists():
        pytest.exit(f"{QWEN3}: not built, run make first", returncode=1)


@pytest.fixture
def start():
    """start(model, *options): the program on pipes without buffers, in a process group of its own."""
    children = []

    def start(*args, **how):
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0,
               "env": environment(), **how}
        child = subprocess.Popen([QWEN3, *map(_argument, args)], start_new_session=True, **how)
        children.append(child)
        return child
    yield start
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe:
                pipe.close()


@pytest.fixture
def talk(tiny):
    """talk(*options): a conversation at a terminal. say(line): all that comes up to the next prompt sign."""
    children = []

    def start(*options, model=tiny):
        child = spawn(model, *options)
        child.expect_exact("> ")
        children.append(child)

        def say(line, end="\n"):
            child.send(line + end)
            child.expect_exact("\n> ")
            return (child.before + b"\n").split(b"\n", 1)[-1]
        return child, say
    yield start
    for child in children:
        end(child)


def stop(child, number=signal.SIGINT):
    """(status, stdout, stderr) of a program that gets this signal."""
    child.send_signal(number)
    out, error = child.communicate(timeout=300)
    return child.returncode, out, error


def prompts(shown):
    """The ids of each prompt that -v shows, of a run or of what came to a terminal."""
    shown = shown if isinstance(shown, bytes) else shown.stderr
    return [[int(i) for i in ids.split()] for ids in re.findall(rb"prompt ids: ([\d ]+)\r?\n", shown)]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory, tokenizer):
    """random_model(*options, **shape): make_checkpoint(**shape), exported with these options; each once."""
    @functools.cache
    def make(*options, **shape):
        directory = tmp_path_factory.mktemp("random")
        return export(make_checkpoint(directory / "hf", tokenizer, **shape), directory / "model.bin", *options)
    return make


@pytest.fixture(scope="session")
def small(random_model):
    """A random model of two layers."""
    return random_model()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The trained tiny model, exported anew from its checkpoint."""
    if not (TINY / "model" / "config.json").exists():
        pytest.skip("no tests/tiny/model")
    return export(TINY / "model", tmp_path_factory.mktemp("tiny") / "tiny.bin")


def hurting_list(rng, lines):
    """Texts that begin like others, with their given answers, and with parts of these; and what -o gives."""
    words = "the old lighthouse keeper sang of rain and what is common to all beginnings".split()
    def text(n):
        return " ".join(rng.choice(words) for _ in range(n))
    answers = [text(1), text(rng.randrange(30, 50)), "z", text(rng.randrange(10, 30))]
    answers += [answers[1] + " " + text(rng.randrange(1, 20)), answers[3][:rng.randrange(3, 30)].rstrip()]
    texts = [text(rng.randrange(1, 30))]
    while len(texts) < lines:
        base = rng.choice(texts)
        texts.append(rng.choice([text(rng.randrange(1, 30)), base, base + " " + answers[1], base + " " + answers[4] + " z",
                                 base + " " + rng.choice(answers), base[:rng.randrange(1, len(base) + 1)].rstrip() or "x",
                                 base + " " + rng.choice(answers)[:rng.randrange(1, 60)].rstrip()]))
    return "".join(text[:900] + "\n" for text in texts).encode(), "|".join(f" {answer}" for answer in dict.fromkeys(answers))


@pytest.fixture(scope="session")
def delta(tmp_path_factory, tokenizer35):
    """A random Qwen3.5: its delta layers have states."""
    folder = deltas.save(tmp_path_factory.mktemp("delta") / "hf", *deltas.Delta("dense").saved(), tokenizer35, deltas.STRIPS)
    return export(folder, folder / "model.bin")


@pytest.fixture(scope="session")
def table_model(tmp_path_factory, tokenizer):
    """table_model(after): a model whose logits after a token are after[token], {token: logit}; those after any other
    are after[None]. The logits of tokens that are not there are `fill`. Tokens are ids, or texts as the vocabulary
    writes them (a newline is \u010a)."""
    made = {}

    def id_of(token):
        number = tokenizer.token_to_id(token) if isinstance(token, str) else token
        assert number is not None, token
        return number

    def make(after, fill=0, **kwargs):
        key = repr((after, fill, kwargs))
        if key not in made:
            states = [token for token in after if token is not None]
            logits = np.full((tokenizer.get_vocab_size(), 1 + len(states)), fill, np.float32)
            for i, state in enumerate([None, *states]):
                for token, logit in after.get(state, {}).items():
                    logits[id_of(token), i] = logit
            directory = tmp_path_factory.mktemp("table")
            made[key] = export(make_table_model(directory / "hf", tokenizer, [*map(id_of, states)], logits, **kwargs),
                               directory / "model.bin")
        return made[key]
    return make


@pytest.fixture(scope="session")
def chain(table_model):
    """chain(token, token, ...): a model that goes from each token to the next, with a lead of 12; and from any other
    to `default`, if there is one."""
    def make(*tokens, default=None, **kwargs):
        assert len(set(tokens[:-1])) == len(tokens[:-1])
        steps = {before: {after: 12.7} for before, after in zip(tokens, tokens[1:])}
        return table_model(({None: {default: 12.7}} if default else {}) | steps, **kwargs)
    return make


@pytest.fixture(scope="session")
def stopping(chain):
    """A raw text that ends in a goes on with a forever, any other ends at once; 100,000 tokens fit."""
    return chain("a", "a", default="<|im_end|>", max_len=100_000)


@pytest.fixture(scope="session")
def exported(tokenizer_json, tmp_path_factory):
    """(checkpoint, its .tokenizer file read back)"""
    ck = Checkpoint(tokenizer_json)
    return ck, sections_of(ck, tmp_path_factory.mktemp("exported"))


# -- a hub

class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download asks for: the folders org/NAME of a folder, org/NAME@REVISION of a revision."""
    protocol_version = "HTTP/1.1"
    folder: Path
    newest: str                                             # commit
    asked: list
    metadata: dict = {}                                     # of what the files have, as the real one reads it from them

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        model, _, file = re.sub("^/(api/models/)?|/resolve/[^/]+(?=/)|/(revision|tree)/.*", "", path,
                                ).partition("/")[2].partition("/")
        model, sha = self.folder / "org" / model, self.newest
        asked = re.search("/(?:revision|tree|resolve)/([^/]+)", path)
        for other in self.folder.glob(f"org/{model.name}@*"):
            revision = other.name.partition("@")[2]
            commit = hashlib.sha1(revision.encode()).hexdigest()
            if asked and asked[1] in (revision, commit):
                model, sha = other, commit
        files = {p.relative_to(model).as_posix(): p.stat().st_size
                 for p in sorted(model.rglob("*")) if p.is_file()}
        files["original/consolidated.safetensors"] = 1
        commit = {"sha": sha, "id": f"org/{model.name}", "_id": "1", "tags": [],
                  "private": False}
        if path.startswith("/api/models/") and "/tree/" in path and model.is_dir():
            self.answer(200, json.dumps([{"type": "file", "path": p, "size": n, "oid": "2" * 40}
                                         for p, n in files.items()]).encode())
        elif path.startswith("/api/models/") and model.is_dir():
            self.answer(200, json.dumps(commit | self.metadata | {"siblings": [
                {"rfilename": p, "size": n, "blobId": "2" * 40} for p, n in files.items()]}).encode())
        elif "/resolve/" in path and (model / file).is_file():
            data = (model / file).read_bytes()
            self.answer(200, data, {"ETag": f'"{hash(data) & 0xFFFFFFFF:x}"',
                                    "X-Repo-Commit": commit["sha"]})
        else:
            self.answer(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})

    def answer(self, status, body, headers={"Content-Type": "application/json"}):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory):
    """A hub, and its environment, which huggingface_hub sees when this process imports it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {"HF_HOME": str(tmp_path_factory.mktemp("cache")), "HF_HUB_DISABLE_TELEMETRY": "1",
           "HF_HUB_ETAG_TIMEOUT": "300", "HF_HUB_DOWNLOAD_TIMEOUT": "300",
           "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        import huggingface_hub.constants                    # noqa: F401 (it reads them but once)
    yield env
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub_tiny(checkpoint, hub, tmp_path):
    """hub, with a checkpoint org/tiny."""
    checkpoint().save(tmp_path / "hub/org/tiny")
    return hub


@pytest.fixture
def hub(hub_server, run, tmp_path, monkeypatch):
    """hub(arguments) is run(arguments) with a hub that has tmp_path/hub, and an empty cache;
    hub.process(arguments, changes of the environment) runs export.py in a process of its own."""
    Hub.folder, Hub.asked = tmp_path / "hub", []
    Hub.newest = hashlib.sha1(bytes(tmp_path)).hexdigest()  # the package remembers a commit's files
    shutil.rmtree(hub_server["HF_HOME"], ignore_errors=True)
    monkeypatch.setenv("HF_ENDPOINT", hub_server["HF_ENDPOINT"])

    def process(*args, **changes):
        done = export_process(*args, cwd=tmp_path, env=hub_server | changes)
        return done.returncode, done.stderr.splitlines()
    run.asked = lambda: {path.partition("/resolve/")[2].partition("/")[2]
                         for path in Hub.asked if "/resolve/" in path}
    run.process, run.env, run.url = process, hub_server, hub_server["HF_ENDPOINT"]
    run.cache = Path(hub_server["HF_HOME"], "hub")
    return run

"""What the world does, as full disks and closed descriptors: one line and a status, no crash, no half file."""
import ctypes
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import (LINUX, QUOTED_QWEN3, QWEN3, SANITIZED, assert_error, copy_model, environment, export,
                      export_process, make_checkpoint, needs_address_space, output, qwen3, refused, shell)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "hf", tokenizer)


def obey_permissions():
    """For subprocess's preexec_fn: root may read and write everything, unless it gives that up."""
    if os.geteuid() == 0 and LINUX:
        for capability in (1, 2):                       # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


# -- disks

@pytest.mark.parametrize("limit, named", [(50_000, True), (50_000, False), (100, True)])
def test_export_to_a_disk_that_becomes_full(checkpoint, tmp_path, run, limit, named):
    """The older files stay, and nothing else. The blame is OUT's, not SOURCE's, also if OUT has its default name."""
    out = tmp_path / ("model.bin" if named else f"{checkpoint.name}.bin")
    old = {path: b"old" for path in (out, Path(f"{out}.tokenizer"))}
    for path, data in old.items():
        path.write_bytes(data)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        result = run(checkpoint, *[out][:named])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    refused(result, f"^export.py: ({tmp_path}/)?{out.name}: can't be read or written, .* found File too large")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old


@pytest.mark.parametrize("name", ["", "hf/config.json", "hf/model.safetensors", "hf/tokenizer.json",
                                  "model.bin", "model.bin.tokenizer", "text"])
def test_permissions(checkpoint, small, tmp_path, name):
    """To read a file, or to write to the directory, which only an export needs."""
    (tmp_path / "text").touch(0)                        # root may keep its power, a disk may have no permissions
    if shell(f"cat '{tmp_path}/text'", preexec_fn=obey_permissions).returncode == 0:
        pytest.skip("files can be read whatever their permissions")
    (tmp_path / "text").unlink()
    shutil.copytree(checkpoint, tmp_path / "hf")
    model = copy_model(small, tmp_path, extension=False)
    (tmp_path / "text").write_text("a")
    before = sorted(tmp_path.iterdir())
    os.chmod(tmp_path / name, 0 if name else 0o555)
    if not name or name.startswith("hf"):
        refused(export_process(tmp_path / "hf", tmp_path / "out.bin", preexec_fn=obey_permissions),
                name or "out.bin", "denied")
    ran = subprocess.run([QWEN3, model, "-f", tmp_path / "text", "-n", "1", "-q"], timeout=300,
                         capture_output=True, env=environment(), preexec_fn=obey_permissions)
    os.chmod(tmp_path, 0o755)
    assert sorted(tmp_path.iterdir()) == before
    if name and not name.startswith("hf"):
        assert_error(ran, 1, name, "denied")
    else:
        assert ran.returncode == 0, ran


# -- files of other kinds

@pytest.mark.parametrize("suffix", ["", ".tokenizer"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_no_regular_file(small, tmp_path, suffix, make):
    """A pipe is not waited for."""
    model = copy_model(small, tmp_path, extension=False)
    path = Path(f"{model}{suffix}")
    path.unlink(missing_ok=True)
    make(path)
    word = ".bin file" if make == os.mkdir and not suffix else "regular file"
    assert_error(qwen3(model, "-i", "x", "-n", 1, timeout=300), 1, path, word)


@needs_address_space
@pytest.mark.parametrize("kilobytes, options, words", [
    *[(400_000, f"-j 1 -m {mode} -f /dev/zero", []) for mode in ("tokenize", "chat", "generate")],
    (400_000, "-j 1 -m chat < /dev/zero", ["memory", "text"]), (200_000, "-i hello -n 3 -j 1024 -q", ["memory", "-j"])])
def test_endless_prompts_and_too_many_threads(small, kilobytes, options, words):
    assert_error(shell(f"ulimit -v {kilobytes}; exec {QUOTED_QWEN3} {small} {options}"), 1, *words)


# -- names and arguments

@pytest.mark.parametrize("name", [
    "größe 模型 🙂.bin", "-m.bin", "a b.bin", "%s%n.bin", "new\nline.bin", b"latin-\xe9.bin"], ids=ascii)
def test_odd_names(checkpoint, tmp_path, small, name):
    if isinstance(name, bytes) and not LINUX:
        pytest.skip("names are UTF-8 here")
    folder, name = os.fsencode(tmp_path), os.fsencode(name)
    model = os.path.join(folder, name)
    export(checkpoint, os.fsdecode(model))
    assert sorted(os.listdir(folder)) == [name, name + b".tokenizer"]
    run = ("-m", "tokenize", "-q", "-f", model + b".tokenizer")
    assert output(model, *run) == output(small, *run)
    os.unlink(model + b".tokenizer")
    assert_error(qwen3(model, "-i", "x"), 1, ".tokenizer")


def test_empty_argv():
    result = subprocess.run([""], executable=QWEN3, capture_output=True, stdin=subprocess.DEVNULL)
    assert_error(result, 2, "MODEL")


TEXT = "word " * 26_000                                 # Linux takes 128 KB each


@pytest.mark.parametrize("args, status, words", [
    ((TEXT,), 2, "MODEL: too long"), (("M" * 4001,), 2, "MODEL: too long"),
    (("M", "-" + TEXT), 2, "-h lists"),
    (("M", "-n", TEXT), 2, "-n: bad value"), (("M", TEXT), 2, "prompt goes with -i"),
    (("M", "-f", TEXT), 2, "-f: bad value, expected a file's name"),
    ((None, "-i", TEXT), 1, "too long"), ((None, "-y", TEXT, "-i", "x"), 1, "too long"),
    ((None, "-l", "a/" * 2000), 1, "a/: ")], ids=range(9))
def test_very_long_arguments(small, args, status, words):
    assert_error(qwen3(*[arg or small for arg in args]), status, words)
    assert words != "too long" or output(small, "-m", "tokenize", "-i", TEXT) == output(
        small, "-m", "tokenize", stdin=TEXT.encode())


# -- descriptors

@pytest.mark.parametrize("close", [">&-", "2>&-", "<&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("mode", ["tokenize", "perplexity", "generate", "chat", "list"])
def test_closed_from_the_start(small, tmp_path, mode, close):
    """Nothing that is opened becomes stdout or stderr: the model stays, FILE of -w gets a list's lines alone."""
    copy_model(small, tmp_path)
    (tmp_path / "text").write_bytes(b"hello\n\nthere\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run = f"{QUOTED_QWEN3} {tmp_path}/model.bin -n 3 -t 0"
    if mode == "list":                                  # from stdin, FILE is the first file that is opened
        run += f" -l {tmp_path}/text" if "<&-" in close else f" -l - < {tmp_path}/text"
        assert shell(f"exec {run} -w {tmp_path}/out {close}").returncode == 1
        before[tmp_path / "out"] = shell(f"exec {run}").stdout
    else:
        result = shell(f"exec {run} -m {mode} -f {tmp_path}/text {close}")
        assert result.returncode == (">&-" in close.split()), result
        if result.returncode == 0:
            assert result.stdout == shell(f"exec {run} -m {mode} -f {tmp_path}/text").stdout
        elif "2>&-" not in close:
            assert re.search(b"(?m)^qwen3: stdout: ", result.stderr)
        assert "<&-" not in close or shell(f"exec {run} -m {mode} -f - {close}").returncode == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_stderr_that_takes_nothing(small):
    """What a program says besides does not change what it does."""
    expected = output(small, "-i", "x", "-n", 5, "-s", 1)
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY) if LINUX else write
    for stderr in (write, full):
        result = subprocess.run([QWEN3, small, "-i", "x", "-n", "5", "-s", "1", "-v"], stderr=stderr,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment())
        assert result.returncode == 0 and result.stdout == expected


# -- memory

@needs_address_space
def test_little_memory(small):
    """At every limit it works, or says in one line what there is no memory for."""
    outcomes = set()
    for kilobytes in [*range(4_000, 30_000, 1_000), *range(30_000, 300_000, 30_000)]:
        result = shell(f"ulimit -v {kilobytes}; exec {QUOTED_QWEN3} {small} -i hello -n 3 -j 2 -q")
        if result.returncode not in (0, 1):             # before main()
            assert kilobytes < 12_000 and b"qwen3:" not in result.stderr
        elif result.returncode == 1:
            assert_error(result, 1)
        outcomes.add(result.returncode)
    assert {0, 1} <= outcomes


@pytest.mark.skipif(SANITIZED or not LINUX, reason="needs a small stack")
@pytest.mark.parametrize("kilobytes", [48, 64])
def test_little_stack(small, tmp_path, kilobytes):
    """Answers and errors are those of a usual one."""
    (tmp_path / "list").write_text("[" * 99 + "]" * 99 + '\n"hello"\n[]\n')
    for args in (f"{small} -i hello -n 3 -j 2", f"{small} -L {tmp_path}/list -n 3", f"{tmp_path}/none.bin -i x",
                 f"{small} -m embed -f {tmp_path}/list", f"{small} -f {tmp_path}/none", f"{small} -z"):
        little, usual = (shell(f"{limit} exec {QUOTED_QWEN3} {args} -q -t 0")
                         for limit in (f"ulimit -s {kilobytes};", ""))
        assert (little.returncode, little.stdout, little.stderr) == (usual.returncode, usual.stdout, usual.stderr)

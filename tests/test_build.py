"""The Makefile's ways to build: each is silent, and what it builds answers."""
import platform
import re
import shutil
import subprocess

import pytest

from conftest import ROOT, TINY, assert_error, environment


@pytest.mark.parametrize("arguments", [["CC=gcc"], ["CC=clang"], ["THREADS=0"], ["portable"], ["debug"],
                                       ["debug", "CC=clang"]], ids=" ".join)
def test_builds(arguments, tmp_path):
    compiler = arguments[-1].partition("CC=")[2]
    if compiler and not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    for name in ("Makefile", "qwen3.c"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(TINY, tmp_path / "tests/tiny", ignore=shutil.ignore_patterns("model"))

    def make(*targets):
        return subprocess.run(["make", *targets], cwd=tmp_path, capture_output=True, text=True,
                              env=environment(), timeout=1200)

    built = make(*arguments)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    if "debug" not in arguments:                        # built once, unless the flags change
        assert "-o qwen3" not in make(*arguments).stdout
        assert "-o qwen3" in make(*arguments, "CFLAGS=-O2").stdout
    for mode, expected in (("chat", b"Paris"), ("generate", b"Paris"), ("perplexity", b"nll")):
        text = "What is the capital of France?" if mode == "chat" else "The capital of France is"
        run = subprocess.run([tmp_path / "qwen3", "tests/tiny/tiny.bin", "-m", mode, "-t", "0",
                              "-n", "9", "-i", text], cwd=tmp_path, capture_output=True,
                             env=environment(), timeout=1200)
        assert run.returncode == 0 and expected in run.stdout, run
    if arguments == ["portable"]:
        assert b"plain C" in subprocess.run([tmp_path / "qwen3", "--version"],
                                            capture_output=True).stdout
    make("clean")
    assert not (tmp_path / "qwen3").exists()


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_functions_under_a_sanitizer(sanitizer, tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("Makefile", "qwen3.c", "tests/test.c", "tests/records.h"):
        shutil.copy(ROOT / name, tmp_path / name)
    flags = f"-O1 -g -fsanitize={sanitizer} -fno-sanitize-recover=all -DNO_UNROLL -Wno-pass-failed"
    built = subprocess.run(["make", "tests/test", f"CFLAGS={flags}"], cwd=tmp_path, capture_output=True,
                           text=True, env=environment(), timeout=1200)
    if built.returncode != 0 and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert built.returncode == 0 and built.stderr == "", built.stderr
    run = subprocess.run([tmp_path / "tests/test"], capture_output=True, text=True, env=environment(),
                         timeout=1200)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel places memory where the sanitizer can't have it")
    assert run.returncode == 0 and "0 failures" in run.stdout, run.stdout + run.stderr[-3000:]


# What a CPU says that lacks something: the build's flags, qemu-x86_64's model of a CPU, the words
OLD = {"x86-64-v3": ("-march=x86-64-v3", "Nehalem", "AVX2"),
       "avx512": ("-march=icelake-client", "max", "AVX-512 VNNI"),
       "portable": ("", "qemu64", None)}


@pytest.mark.parametrize("name", OLD)
def test_older_cpu(name, tmp_path):
    """One line instead of SIGILL; a build without flags runs everywhere."""
    flags, cpu, missing = OLD[name]
    if platform.machine() != "x86_64" or not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64, or another architecture")
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "qwen3.c", tmp_path)
    (tmp_path / "tests").mkdir()
    subprocess.run(["make", f"NATIVE={flags}"], cwd=tmp_path, check=True, capture_output=True,
                   env=environment(), timeout=1200)
    run = subprocess.run(["qemu-x86_64", "-cpu", cpu, tmp_path / "qwen3", TINY / "tiny.bin", "-q",
                          "-i", "What is the capital of France?", "-t", "0"],
                         capture_output=True, env=environment(), timeout=1200)
    if missing:
        assert_error(run, 1, "CPU", missing, "portable")
    else:
        assert run.returncode == 0 and b"Paris" in run.stdout, run


@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64-v3 -mavxvnni"])
def test_functions_of_an_instruction_set(flags, tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("another architecture")
    (tmp_path / "tests").mkdir()
    for name in ("Makefile", "qwen3.c", "tests/test.c", "tests/records.h"):
        shutil.copy(ROOT / name, tmp_path / name)
    built = subprocess.run(["make", "tests/test", f"NATIVE={flags}"], cwd=tmp_path,
                           capture_output=True, text=True, env=environment(), timeout=1200)
    if "unrecognized" in built.stderr or "unknown argument" in built.stderr:
        pytest.skip("the compiler does not know it")
    assert built.returncode == 0 and built.stderr == "", built.stderr
    run = subprocess.run([tmp_path / "tests/test"], capture_output=True, text=True,
                         env=environment(), timeout=1200)
    if "lacks an instruction" in run.stderr:
        pytest.skip("this CPU does not have it")
    assert run.returncode == 0 and ("AVX-VNNI" if "vnni" in flags else "AVX2") in run.stdout, run


def test_reproducible(tmp_path):
    """The same compiler and flags give the same bytes in any directory."""
    built = []
    for name in ("a", "another directory"):
        (tmp_path / name / "tests").mkdir(parents=True)
        for file in ("Makefile", "qwen3.c"):
            shutil.copy(ROOT / file, tmp_path / name)
        subprocess.run(["make", "-s"], cwd=tmp_path / name, check=True, env=environment())
        built.append((tmp_path / name / "qwen3").read_bytes())
    assert built[0] == built[1]


def test_install(tmp_path):
    def make(target):
        subprocess.run(["make", "-s", target, f"DESTDIR={tmp_path}/to here", "PREFIX=/opt/q"],
                       cwd=ROOT, check=True, env=environment())

    make("install")
    program = tmp_path / "to here/opt/q/bin/qwen3"
    run = subprocess.run([program, "--version"], capture_output=True, text=True)
    assert run.returncode == 0 and re.fullmatch(r"qwen3 \d+\.\d+ \([\w -]+\)\n", run.stdout)
    make("uninstall")
    assert program.parent.exists() and not program.exists()

"""The Makefile's targets: each way to build is silent, and what it builds answers."""
import platform
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, TESTS, TINY, assert_error, environment


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["portable"], ["debug"], ["debug", "CC=clang"]],
                         ids=lambda arguments: " ".join(arguments) or "as it is")
def test_builds(arguments, tmp_path):
    compiler = "clang" if "CC=clang" in arguments else None
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


def functions(directory, *arguments):
    """What tests/test says, built so; the test is skipped where that can't be."""
    (directory / "tests").mkdir()
    for name in ("Makefile", "qwen3.c", "tests/test.c", "tests/naive.h", "tests/amx.h"):
        shutil.copy(ROOT / name, directory / name)
    built = subprocess.run(["make", "tests/test", *arguments], cwd=directory, capture_output=True,
                           text=True, env=environment(), timeout=1200)
    if any(words in built.stderr for words in ("cannot find", "unrecognized", "unknown argument")):
        pytest.skip("the compiler does not know it")
    assert built.returncode == 0 and built.stderr == "", built.stderr
    run = subprocess.run([directory / "tests/test"], capture_output=True, text=True, env=environment(),
                         timeout=1200)
    if "unexpected memory mapping" in run.stderr or "lacks an instruction" in run.stderr:
        pytest.skip("not on this machine: " + run.stderr[:200])
    assert run.returncode == 0 and " 0 failures" in run.stdout, run.stdout + run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
def test_functions_under_the_thread_sanitizer(tmp_path):
    functions(tmp_path, "CFLAGS=-O1 -g -fsanitize=thread -fno-sanitize-recover=all -DNO_UNROLL "
                        "-Wno-pass-failed")


# AMX is asked for when the program starts: without it, the same build uses AVX-512 alone. The last
# has AMX on every CPU that icelake-server's flags run on.
AMX = "-march=icelake-server -mamx-tile -mamx-int8"
SETS = {"-march=x86-64-v3": "AVX2", "-march=x86-64-v3 -mavxvnni": "AVX-VNNI", AMX: "AVX-512 VNNI",
        AMX + " -include tests/amx.h": "AVX-512 VNNI and AMX"}


@pytest.mark.slow
@pytest.mark.parametrize("flags", SETS)
def test_functions_of_an_instruction_set(flags, tmp_path):
    if platform.machine() != "x86_64" or "amx" in flags and platform.system() != "Linux":
        pytest.skip("another architecture or system")
    said = functions(tmp_path, f"NATIVE={flags}")
    assert SETS[flags] in said
    if flags == AMX:
        assert ("AMX" in said) == ("amx_int8" in open("/proc/cpuinfo").read())


# What a CPU says that lacks something: the build's flags, qemu-x86_64's model of a CPU, the words
OLD = {"x86-64-v3": ("-march=x86-64-v3", "Nehalem", "AVX2"),
       "avx512": ("-march=icelake-client", "max", "AVX-512 VNNI"),
       "portable": ("", "qemu64", None)}


@pytest.mark.slow
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


@pytest.mark.slow
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


# -- make bench, on a shape that takes no time

@pytest.mark.slow
@pytest.mark.parametrize("model", [["small"], ["MODEL=small", "BITS=4", "LAYERS=1"],
                                   ["small-moe", "4", "64"], ["curve", "small"], [TINY / "tiny.bin"]],
                         ids=["8 bits", "4 bits", "experts", "curve", "file"])
def test_bench(model, tmp_path):
    program = TESTS / "bench"
    assert program.exists(), "make tests/bench"
    command = ["make", "-s", "bench"] if "MODEL=" in str(model[0]) else [program]
    run = subprocess.run([*command, *model], cwd=ROOT, capture_output=True, text=True, timeout=300,
                         env=environment(TMPDIR=str(tmp_path)))
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert not list(tmp_path.iterdir())                   # the temporary file is gone
    rows = re.findall(r"^ +(\d+)  (\w.*?) {2,}([\d.]+) +([\d.]+) (tok/s|GB/s|GMAC/s|GFMA/s) +(\d+)",
                      run.stdout, re.M)
    threads = sorted({int(row[0]) for row in rows})
    expected = (19 if model[0] == "curve" else 8) * len(threads)
    assert len(rows) + run.stdout.count(" skipped, ") == expected and threads[0] == 1
    for _, name, best, median, unit, runs in rows:        # how much depends on who else computes here
        assert float(best) >= float(median) >= 0 and int(runs) >= 1
        assert unit == {"memory read": "GB/s", "int8 peak": "GMAC/s",
                        "fp32 peak": "GFMA/s"}.get(name, "tok/s")
    assert len(re.findall(r" \d+\.\d\d of the int8 peak", run.stdout)) >= 2
    long = [row for row in rows if re.fullmatch(r"prompt of \d{4,}", row[1])]
    assert len(re.findall(r" \d+\.\d\d times its floor", run.stdout)) == len(long) > 0
    assert re.search(r"memory beside the mapped file: [1-9]\d* MB", run.stdout)


@pytest.mark.slow
def test_bench_help():
    run = subprocess.run([TESTS / "bench", "-h"], capture_output=True, text=True, env=environment())
    assert run.returncode == 0 and run.stdout.startswith("usage: tests/bench [curve] MODEL.bin"), run


@pytest.mark.slow
def test_bench_refuses_what_is_no_model(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x" * 300)
    for args, status, word in (([tmp_path / "x.bin"], 1, "magic"), (["9b"], 2, "no such shape"),
                               (["small", "5"], 2, "BITS"), (["small", "4", "48"], 2, "GROUP"),
                               (["small", "8", "0", "-1"], 2, "LAYERS")):
        run = subprocess.run([TESTS / "bench", *args], capture_output=True, text=True, timeout=300,
                             env=environment())
        assert run.returncode == status and word in run.stderr

"""The Makefile's targets: each way to build is silent, and what it builds answers."""
import collections
import functools
import os
import platform
import re
import resource
import shutil
import statistics

import pytest
from conftest import HAS_AVX2, ROOT, TESTS, TINY, assert_error, build, call


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["portable"], ["debug"], ["debug", "CC=clang"]],
                         ids=lambda arguments: " ".join(arguments) or "as it is")
def test_builds(arguments, tmp_path):
    if "CC=clang" in arguments and not shutil.which("clang"):
        pytest.skip("clang is not installed")
    build(tmp_path, *arguments)
    program = tmp_path / "qwen3"
    for mode, expected in (("chat", "Paris"), ("generate", "Paris"), ("perplexity", "nll")):
        text = "What is the capital of France?" if mode == "chat" else "The capital of France is"
        run = call(program, TINY / "tiny.bin", "-m", mode, "-t", 0, "-n", 9, "-i", text)
        assert run.returncode == 0 and expected in run.stdout, run
    if arguments == ["portable"]:
        assert "plain C" in call(program, "--version").stdout
    build(tmp_path, "clean")
    assert not program.exists()


def test_make_run_compiles_once(tmp_path):
    """With another program in its place; and again when the flags change."""
    (tmp_path / "qwen3.c").write_text("int main(void) { return 0; }\n")
    says = re.compile(r"\A.* -o qwen3 .*\n\./qwen3 tests/tiny/tiny.bin .*\n\Z")
    assert says.match(build(tmp_path, "run"))
    assert re.fullmatch(r"\./qwen3 .*\n", build(tmp_path, "run"))
    assert says.match(build(tmp_path, "run", "CFLAGS=-O2"))


@pytest.fixture
def sources(tmp_path):
    """A folder with what `make` needs, and nothing else."""
    for name in ("Makefile", "qwen3.c"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_cflags_choose_the_cpu(sources):
    """Without them it is this machine's; NATIVE chooses, too."""
    def make(*arguments, **env):
        run = call("make", "-s", "-n", *arguments, cwd=sources, env=env)
        assert run.returncode == 0 and run.stderr == "", run.stderr
        return run.stdout
    assert "=native" in make() and " -O3 " in make()
    for given in make("CFLAGS=-O2 -march=x"), make(CFLAGS="-O2 -march=x"):
        assert "=native" not in given and " -O2 -march=x " in given and "-O3" not in given
    assert " -O2 -march=y " in make("CFLAGS=-O2", "NATIVE=-march=y")
    assert "make test-all " in call("make", "help", cwd=sources).stdout and " a.bin -t" in make("run", "MODEL=a.bin")


def functions(directory, *arguments):
    """What tests/test says, built so; the test is skipped where that can't be."""
    compile = "echo 'int main(void) { return 0; }' | ${CC:-cc} -x c " + arguments[0].partition("=")[2]
    run = call("sh", "-c", f"{compile} -o a.out - && ./a.out", cwd=directory)
    if run.returncode:
        pytest.skip("the compiler or the system does not know it: " + run.stderr[:200])
    build(directory, "tests/test", *arguments)
    run = call(directory / "tests/test")
    if "lacks an instruction" in run.stderr:
        pytest.skip("not on this machine: " + run.stderr[:200])
    assert run.returncode == 0 and " 0 failures" in run.stdout, run.stdout + run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
def test_functions_under_the_thread_sanitizer(tmp_path):
    functions(tmp_path, "CFLAGS=-O1 -g -fsanitize=thread -fno-sanitize-recover=all -DUNROLL= "
                        "-Wno-pass-failed", "NATIVE=$(THIS_CPU)")


SETS = {"-march=x86-64-v3": "AVX2", "-march=x86-64-v3 -mavxvnni": "AVX-VNNI", "-march=icelake-server": "AVX-512 VNNI"}


@pytest.mark.slow
@pytest.mark.parametrize("flags", SETS)
def test_functions_of_an_instruction_set(flags, tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("another architecture")
    assert SETS[flags] in functions(tmp_path, f"NATIVE={flags}")


# What a CPU says that lacks something: the build's flags, qemu-x86_64's model of a CPU, the words
OLD = {"x86-64-v3": ("-march=x86-64-v3", "Nehalem", "AVX2"),
       "avx512": ("-march=icelake-client", "max", "AVX-512 VNNI"), "portable": ("", "qemu64", None)}


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD)
def test_older_cpu(name, tmp_path):
    """One line instead of SIGILL; a build without flags runs everywhere."""
    flags, cpu, missing = OLD[name]
    if platform.machine() != "x86_64" or not shutil.which("qemu-x86_64"):
        pytest.skip("no qemu-x86_64, or another architecture")
    build(tmp_path, f"NATIVE={flags}")
    run = call("qemu-x86_64", "-cpu", cpu, tmp_path / "qwen3", TINY / "tiny.bin", "-q", "-t", 0,
               "-i", "What is the capital of France?", text=False)
    if missing:
        assert_error(run, 1, "CPU", missing, "portable")
    else:
        assert run.returncode == 0 and b"Paris" in run.stdout, run


@pytest.mark.slow
def test_the_same_bytes(tmp_path):
    """In any directory; what may change the order of sums, or what rounds, is taken back."""
    build(tmp_path / "a", "qwen3", "CFLAGS=-O3")
    other = shutil.copytree(tmp_path / "a", tmp_path / "another directory", ignore=lambda *_: ["qwen3", ".flags"])
    flags = "-Ofast -ffast-math -funsafe-math-optimizations -fassociative-math -ffp-contract=fast -std=c99"
    made = call("make", "-s", f"CFLAGS={flags}", cwd=other)
    assert made.returncode == 0, made.stderr                 # clang warns of options that are taken back
    assert (tmp_path / "a/qwen3").read_bytes() == (other / "qwen3").read_bytes()


def test_install(sources):
    """It needs only the sources; it says which version it is, and how it computes."""
    def make(target):
        made = call("make", "-s", target, "CFLAGS=-O0", f"DESTDIR={sources}/to here", "PREFIX=/opt/q", cwd=sources)
        assert made.returncode == 0 and made.stderr == "", made.stderr
    make("install")
    program = sources / "to here/opt/q/bin/qwen3"
    run = call(program, "--version")
    number, = re.findall(r'^#define VERSION "(\d+\.\d+)"$', (ROOT / "qwen3.c").read_text(), re.M)
    assert run.returncode == 0 and re.fullmatch(rf"qwen3 {number} \([\w -]+\)\n", run.stdout)
    make("uninstall")
    assert program.parent.exists() and not program.exists()


def test_plain_is_for_a_debugger(sources):
    """It has all its variables; what the tests run is optimized."""
    commands = [call("make", "-n", target, cwd=sources).stdout for target in ("plain", "qwen3-plain")]
    assert all(" -g -DPLAIN " in command for command in commands)
    assert [" -O0 " in command for command in commands] == [" -O3 " not in command for command in commands] == [True, False]


# -- make bench, on a shape that takes no time

@pytest.mark.slow
@pytest.mark.parametrize("model", [["small"], ["MODEL=small", "BITS=4", "LAYERS=1"],
                                   ["small-moe", "4", "64"], ["small-delta"], ["curve", "small"], ["texts", "small"],
                                   [TINY / "tiny.bin"]],
                         ids=["8 bits", "4 bits", "experts", "delta layers", "curve", "texts", "file"])
def test_bench(model, tmp_path):
    program = TESTS / "bench"
    assert program.exists(), "make tests/bench"
    start = ["make", "-s", "bench"] if "MODEL=" in str(model[0]) else [program]
    run = call(*start, *model, cwd=ROOT, env={"TMPDIR": str(tmp_path)})
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert not list(tmp_path.iterdir())                   # the temporary file is gone
    rows = re.findall(r"^ +(\d+)  (\w.*?) {2,}([\d.]+) +([\d.]+) (tok/s|GB/s|GMAC/s|GFMA/s) +(\d+)", run.stdout, re.M)
    threads = sorted({int(row[0]) for row in rows})
    together = [row for row in rows if "together" in row[1]]
    expected = {"curve": 19, "texts": 4}.get(model[0], 13) * len(threads)
    if model[0] == "texts":                               # and one row of 64 texts, if there are cores
        expected += len(together) + (len(threads) > 1)
    assert len(rows) + run.stdout.count(" skipped, ") == expected and threads[0] == 1
    for _, name, best, median, unit, runs in rows:        # how much depends on who else computes here
        assert float(best) >= float(median) >= 0 and int(runs) >= 1
        assert unit == {"memory read": "GB/s", "int8 peak": "GMAC/s", "fp32 peak": "GFMA/s"}.get(name, "tok/s")
    beside = re.findall(r"together .* \d+\.\d\d of its passes alone, [\d.]+ times one text's decoding$", run.stdout, re.M)
    assert len(beside) == len(together) and bool(together) == (model[0] != "curve")
    if model[0] == "texts":
        assert len(together) >= 6 * len(threads) and " million multiply-adds; keys and values" in run.stdout
        return
    assert len(re.findall(r" \d+\.\d\d of the int8 peak", run.stdout)) >= 2
    long = [row for row in rows if re.fullmatch(r"prompt of \d{4,}( -C 8)?", row[1])]
    assert len(re.findall(r" \d+\.\d\d times its floor", run.stdout)) == len(long) > 0
    assert re.search(r"memory beside the mapped file: [1-9]\d* MB", run.stdout)


@pytest.mark.slow
def test_bench_help_and_refusals(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x" * 300)
    for args, status, word in ((["-h"], 0, "usage: tests/bench [curve|texts|decode|kept] MODEL.bin"),
                               ([tmp_path / "x.bin"], 1, "magic"), (["9b"], 2, "no such shape"),
                               (["small", "5"], 2, "BITS"), (["small", "4", "48"], 2, "GROUP"),
                               (["small", "8", "0", "-1"], 2, "LAYERS")):
        run = call(TESTS / "bench", *args)
        assert run.returncode == status and word in (run.stderr if status else run.stdout), run


# -- ratios of times, each the best of several that alternate; `make test-all` runs these alone

ARCHITECTURES = pytest.mark.parametrize("arch", ["native", "x86-64-v3"])


def need_architecture(arch):
    if arch != "native" and not HAS_AVX2:
        pytest.skip("no x86-64 with AVX2")


@pytest.mark.slow
@pytest.mark.alone
@ARCHITECTURES
def test_compile_time(arch, tmp_path):
    """At most 1.5 times the CPU seconds of the first edition."""
    need_architecture(arch)
    first = call("git", "show", "dda7460:qwen3.c", cwd=ROOT)
    if first.returncode:
        pytest.skip("needs dda7460, the first edition: git fetch --unshallow in a shallow clone")
    (tmp_path / "first.c").write_text(first.stdout)
    def seconds(source):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call(os.environ.get("CC", "cc"), "-O3", f"-march={arch}", "-std=gnu11", "-w", source,
             "-o", tmp_path / "out", "-lm", "-pthread", check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    ours, theirs = [], []
    for _ in range(6):
        ours.append(seconds(ROOT / "qwen3.c"))
        theirs.append(seconds(tmp_path / "first.c"))
        if min(ours) <= 1.5 * min(theirs):
            break
    assert min(ours) <= 1.5 * min(theirs), (ours, theirs)


@pytest.fixture(scope="module")
def bench_of(tmp_path_factory):
    """bench_of(compiler, arch): its tests/bench, built once."""
    @functools.cache
    def program(compiler, arch):
        directory = tmp_path_factory.mktemp("bench")
        native = [] if arch == "native" else [f"NATIVE=-march={arch}"]
        build(directory, "tests/bench", f"CC={compiler}", *native)
        return directory / "tests/bench"
    return program


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("bits", [8, 4])
@ARCHITECTURES
def test_clang_decodes_as_fast_as_gcc(arch, bits, bench_of, tmp_path):
    """With all cores and with one: 0.95 of its tokens a second or more; 0.85 on a CPU that nobody has measured."""
    need_architecture(arch)
    if not all(map(shutil.which, ("gcc", "clang"))):
        pytest.skip("needs gcc and clang")
    rates = collections.defaultdict(list)               # (compiler, threads) -> of each run
    def ratios():
        return [max(rates["clang", threads]) / max(rates["gcc", threads])
                for compiler, threads in rates if compiler == "gcc"]
    for _ in range(10):
        for compiler in ("clang", "gcc"):
            run = call(bench_of(compiler, arch), "decode", "0.6b", bits, 0, 4, check=True, env={"TMPDIR": str(tmp_path)})
            for threads, best in re.findall(r"^ +(\d+)  decode at 0 +([\d.]+)", run.stdout, re.M):
                rates[compiler, threads].append(float(best))
        if min(ratios()) >= 0.95:
            return
    if any(statistics.median(of_gcc) < 0.8 * max(of_gcc)
           for (compiler, _), of_gcc in rates.items() if compiler == "gcc"):
        pytest.skip(f"this machine is too busy: {dict(rates)}")
    assert min(ratios()) >= 0.85, dict(rates)

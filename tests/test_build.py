"""The Makefile's ways to build: each is silent, and what it builds answers."""
import shutil
import subprocess

import pytest

from conftest import ROOT, TINY, environment


@pytest.mark.parametrize("arguments", [["CC=gcc"], ["CC=clang"], ["THREADS=0"], ["debug"],
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
                              env=environment(), timeout=300)

    built = make(*arguments)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    if "debug" not in arguments:                        # built once, unless the flags change
        assert "-o qwen3" not in make(*arguments).stdout
        assert "-o qwen3" in make(*arguments, "CFLAGS=-O2").stdout
    for mode, expected in (("chat", b"Paris"), ("generate", b"Paris"), ("perplexity", b"nll")):
        text = "What is the capital of France?" if mode == "chat" else "The capital of France is"
        run = subprocess.run([tmp_path / "qwen3", "tests/tiny/tiny.bin", "-m", mode, "-t", "0",
                              "-n", "9", "-i", text], cwd=tmp_path, capture_output=True,
                             env=environment(), timeout=60)
        assert run.returncode == 0 and expected in run.stdout, run
    make("clean")
    assert not (tmp_path / "qwen3").exists()

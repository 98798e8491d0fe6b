"""The commands of README.md work as they stand there."""
import re
import shlex
import subprocess

import pytest

from conftest import ROOT, TINY, environment
from setup_venv import inline_dependencies

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"^```\n(.*?)^```$", README, re.M | re.S)
            for line in block.splitlines()]
RUNS = [line for line in COMMANDS if "./qwen3 Qwen3-0.6B.bin" in line and "#" not in line]


@pytest.mark.parametrize("command", RUNS)
def test_qwen3(command, tmp_path):
    """With the tiny model in the place of the real one, and short answers."""
    (tmp_path / "notes.txt").write_text("One note.\n")
    (tmp_path / "book.txt").write_text("Once upon a time.\n")
    tiny = f"{shlex.quote(str(ROOT / 'qwen3'))} {shlex.quote(str(TINY / 'tiny.bin'))} -n 20"
    result = subprocess.run(["sh", "-c", command.replace("./qwen3 Qwen3-0.6B.bin", tiny)],
                            cwd=tmp_path, capture_output=True, env=environment(), timeout=300,
                            stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    assert result.stdout or (tmp_path / "summary.txt").stat().st_size


def test_cosine(tmp_path):
    """The embedding example, with the tiny model: whatever its vectors say, it is a cosine."""
    (block,) = re.findall(r"^uv run export.py Qwen/Qwen3-Embedding-0.6B\n(.*?)^```$", README,
                          re.M | re.S)
    tiny = f"{shlex.quote(str(ROOT / 'qwen3'))} {shlex.quote(str(TINY / 'tiny.bin'))} -m embed"
    script = block.replace("./qwen3 Qwen3-Embedding-0.6B.bin", tiny)
    result = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, timeout=300,
                            env=environment(), stdin=subprocess.DEVNULL)
    assert result.returncode == 0 and result.stderr == b"" and abs(float(result.stdout)) < 1
    assert (tmp_path / "query.txt").read_text().endswith("query\nQuery:What is the capital of China?")


def test_packages_without_uv():
    (line,) = [line for line in COMMANDS if line.startswith("sed ")]
    packages = subprocess.run(["sh", "-c", line.split("|")[0]], cwd=ROOT, capture_output=True,
                              text=True, check=True).stdout.split()
    assert packages == inline_dependencies((ROOT / "export.py").read_text())


def test_make_run():
    """Its output as the README shows it, but for the speed and the seed."""
    shown = re.search(r"^\$ make run\n.*\n(.*)\n", README, re.M)[1]
    result = subprocess.run(["make", "-s", "--no-print-directory", "run"], cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == shown == \
        "The capital of France is Paris."

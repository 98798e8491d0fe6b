"""make bench, on a shape that takes no time."""
import re
import subprocess

import pytest
from conftest import ROOT, TESTS, TINY, environment


@pytest.mark.parametrize("model", ["--small", TINY / "tiny.bin"], ids=["synthetic", "file"])
def test_bench(model, tmp_path):
    program = TESTS / "bench"
    assert program.exists(), "make tests/bench"
    run = subprocess.run([program, model], cwd=ROOT, capture_output=True, text=True, timeout=300,
                         env=environment(TMPDIR=str(tmp_path)))
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert not list(tmp_path.iterdir())                   # the temporary file is gone
    rows = re.findall(r"^ +(\d+)  (\w.*?) {2,}([\d.]+) +([\d.]+) (tok/s|GB/s|GMAC/s) +(\d+)",
                      run.stdout, re.M)
    threads = sorted({int(row[0]) for row in rows})
    assert len(rows) + run.stdout.count(" skipped, ") == 7 * len(threads) and threads[0] == 1
    for _, name, best, median, unit, runs in rows:        # how much depends on who else computes here
        assert float(best) >= float(median) >= 0 and int(runs) >= 1
        assert unit == {"memory read": "GB/s", "int8 peak": "GMAC/s"}.get(name, "tok/s")
    assert len(re.findall(r" \d+\.\d\d of the int8 peak", run.stdout)) >= 2
    assert re.search(r"memory beside the mapped file: [1-9]\d* MB", run.stdout)


def test_bench_refuses_what_is_no_model(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"x" * 300)
    run = subprocess.run([TESTS / "bench", tmp_path / "x.bin"], capture_output=True, text=True,
                         timeout=300, env=environment())
    assert run.returncode == 1 and "magic" in run.stderr

"""Mutated files, texts and options: nothing breaks. The inputs are always the same, as many as make INPUTS a matter
of a second or two; FUZZ_SECONDS=600 fuzzes that long instead (`make fuzz`), from another seed each time."""
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest
from conftest import ROOT, TESTS, TINY, environment, make_checkpoint, run_export

pytestmark = pytest.mark.slow
LONG = "FUZZ_SECONDS" in os.environ
SECONDS = float(os.environ.get("FUZZ_SECONDS", 60))
SEED = int(time.time()) if LONG else 1
INPUTS = {"model": 100_000, "tokenizer": 40_000, "text": 30_000, "chat": 80_000, "session": 10_000,
          "list": 400, "kept": 3000, "sample": 400_000, "writer": 400_000, "form": 20_000}


# -- qwen3.c: tests/fuzz.c, with the sanitizers

def fuzz(directory, *args, **env):
    """Inputs that break it are left in directory."""
    env = environment(FUZZ_MODEL=str(TINY / "tiny.bin"), ASAN_OPTIONS="quarantine_size_mb=8", **env)
    result = subprocess.run(args, cwd=directory, capture_output=True, text=True, env=env,
                            errors="replace", timeout=3 * SECONDS + 600)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    return result.stdout + result.stderr


@pytest.mark.parametrize("target", INPUTS)
def test_random_inputs(tmp_path, target):
    most = [] if LONG else [str(INPUTS[target])]
    print(fuzz(tmp_path, TESTS / "fuzz", target, str(min(SECONDS, 60)), str(SEED), *most), end="")


@pytest.fixture(scope="module")
def libfuzzer():
    make = subprocess.run(["make", "tests/libfuzzer"], cwd=ROOT, capture_output=True, text=True)
    if make.returncode != 0:
        pytest.skip("clang's libFuzzer is not installed")
    return TESTS / "libfuzzer"


@pytest.mark.xdist_group("libfuzzer")
@pytest.mark.parametrize("target", INPUTS)
def test_inputs_that_follow_the_coverage(libfuzzer, tmp_path, target):
    (tmp_path / "seeds").mkdir()
    (tmp_path / "new").mkdir()
    subprocess.run([TESTS / "fuzz", "-w", tmp_path / "seeds"], check=True)
    for path in (tmp_path / "seeds").iterdir():
        if not path.name.startswith(target):
            path.unlink()
    out = fuzz(tmp_path, libfuzzer, "new", "seeds", f"-max_total_time={SECONDS:.0f}", "-timeout=300",
               "-max_len=512", f"-seed={SEED}", "-verbosity=0", "-print_final_stats=1",
               *([] if LONG else [f"-runs={min(10_000, INPUTS[target] // 8)}"]), FUZZ_TARGET=target)
    print(target, [line for line in out.split("\n") if "number_of_executed_units" in line])


# -- export.py: mutated checkpoints, in this process

VALUES = [None, True, False, 0, 1, -1, 2, 31, 64, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -2**63, 10**400,
          0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "\0", "\ud800", "\u0120", "\x1b[2J\n",
          "<|im_end|>", "x" * 100_000, [], {}, [0], [[]], [None], {"": None}, [[0, 1]] * 3, "BF16", "I64",
          "../x", "model.safetensors", "{{ messages }}", "{% for x in range(9) %}", "qwen3", "yarn"]


def nodes(value, path=()):
    """The paths of all values inside a JSON value (of long lists and objects, some)."""
    yield path
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, child in items[:12] + items[-12:]:
        yield from nodes(child, (*path, key))


def mutate_json(r, value):
    path = r.choice(list(nodes(value)))
    if not path:
        return r.choice(VALUES) if r.random() < 0.1 else value
    parent = functools.reduce(lambda at, key: at[key], path[:-1], value)
    others = [functools.reduce(lambda at, key: at[key], p, value) for p in nodes(value)]
    old, kind = parent[path[-1]], r.randrange(5)
    if kind == 0:
        del parent[path[-1]]
    elif kind == 1:
        new = json.loads(json.dumps(r.choice(others)))
        parent[path[-1]] = new
    elif kind == 2 and isinstance(parent, dict):
        parent[r.choice(VALUES[21:28]) + str(path[-1])] = parent.pop(path[-1])
    elif kind == 3 and type(old) in (int, float):
        parent[path[-1]] = r.choice([old + 1, old - 1, -old, old * 2, old * 2**32, str(old), [old]])
    elif kind == 3 and isinstance(old, str):
        at = r.randrange(len(old) + 1)
        parent[path[-1]] = old[:at] + r.choice(["", "x", " ", "\0", "{", "%}", "é"]) + old[at + 1:]
    else:
        parent[path[-1]] = r.choice(VALUES)
    return value


def mutate_bytes(r, data):
    data = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 8))):
        at = min(r.randrange(len(data) + 1), r.randrange(len(data) + 1))    # rather at the beginning
        kind = r.randrange(4)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at:at] = r.randbytes(r.choice((1, 4, 100)))
        elif kind == 2:
            del data[at:at + r.choice((1, 4, 100))]
        elif at < len(data):
            data[at] ^= 1 << r.randrange(8)
    return bytes(data)


def mutate_checkpoint(r, directory):
    files = sorted(path for path in directory.iterdir() if path.is_file())
    path = r.choice(files)
    data, kind = path.read_bytes(), r.randrange(12)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        path.mkdir()
    elif kind == 2:
        path.write_bytes(r.choice(files).read_bytes() if path.exists() else b"")
    elif kind <= 4:
        path.write_bytes(mutate_bytes(r, data))
    else:
        length = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
        text, rest = (data[8:8 + length], data[8 + length:]) if length else (data, b"")
        with contextlib.suppress(ValueError, UnicodeDecodeError):           # mutated before
            value = mutate_json(r, json.loads(text))
            text = json.dumps(value).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + rest if length else text)


@pytest.mark.parametrize("shards", [1, 3])
def test_mutated_checkpoints(tokenizer, tmp_path, shards):
    """Exported, or refused in one line: no traceback, no half file, not too much time or memory."""
    whole = make_checkpoint(tmp_path / "whole", tokenizer, dim=32, hidden_dim=32, n_layers=1, n_heads=2,
                            n_kv_heads=1, head_dim=16, shards=shards, new_keys=shards > 1,
                            yarn=dict(rope_type="yarn", factor=4.0) if shards > 1 else None)
    out, copy, r = tmp_path / "out" / "model.bin", tmp_path / "copy", random.Random(SEED)
    out.parent.mkdir()
    assert run_export(whole, out)[0] == 0
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results = {0: 0, 1: 0}
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
    try:
        end = time.monotonic() + SECONDS * LONG
        while time.monotonic() < end or sum(results.values()) < 200:
            for path in out.parent.iterdir():
                path.unlink()
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            for _ in range(r.choice((1, 1, 1, 2, 3))):
                mutate_checkpoint(r, copy)
            signal.alarm(300)
            status, said = run_export(copy, out)
            signal.alarm(0)
            results[status] += 1
            found = {path.name for path in out.parent.iterdir()}
            assert found == ({"model.bin", "model.bin.tokenizer"} if status == 0 else set()), said
            assert status == 0 or (said.startswith("export.py: ") and said.count("\n") == 1), said
    finally:
        signal.signal(signal.SIGALRM, old)
    assert min(results.values()) > 10
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 500_000 * (1024 if sys.platform == "darwin" else 1), grown
    print(f"export.py: {results[0]} exported, {results[1]} refused")

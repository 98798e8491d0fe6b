"""Every command of README.md and tests/README.md runs as it stands there, in a folder where the real
model is the tiny one and some programs are substitutes. What the READMEs name is there, and the table
of models is what its formula gives.

A command is a line of a code block (if some lines of it begin with `$ `, only these), or inline code
that begins with one of PROGRAMS.
"""
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import export
import pexpect
import pytest
import test_gguf
from conftest import QWEN3, ROOT, TESTS, TINY, environment, run_export
from test_export import Checkpoint, tokenizer_json  # noqa: F401 (a fixture)

READMES = [ROOT / "README.md", TESTS / "README.md"]
PROGRAMS = ["./qwen3", "cd", "gcc", "git", "grep", "ls", "make", "pip", "printf",
            "python", "python3", "rlwrap", "sh", "tests/bench", "tests/test",
            "tests/.venv/bin/python", "uv", "vllm", "xargs"]

# What runs in place of a program, as shell script. make shows what it would do, as other tests use
# what is built here.
SUBSTITUTES = {
    "git": 'test "$1" = clone && ln -s .. qwen3.c',
    "make": 'exec "$REAL_MAKE" -n "$@"',
    "python3": f'exec {shlex.quote(sys.executable)} "$@"',
    "rlwrap": 'exec "$@"',
    "uv": f'test "$1" = run && shift && exec {shlex.quote(sys.executable)} "$@"',
}
# Inline commands that do not run here, not even with substitutes, and the tests that run them
ELSEWHERE = {
    "python3 export.py": "test_export.py: test_missing_packages_are_named_from_the_block_at_the_top",
    "tests/bench MODEL.bin": "test_build.py: test_bench",
    "tests/bench curve 0.6b": "test_build.py: test_bench",
    "tests/.venv/bin/python tests/reference.py TEXT":
        "test_journey.py: test_reference_is_a_program",
    "tests/.venv/bin/python -m pytest tests/test_model.py": "",
    "tests/test": "",                                   # these two by `make test`: see test_every_command_is_known
}
# What `make -n` only shows, and the tests that do it
IN_EARNEST = {
    "make": "test_readme.py: test_new_user", "make run": "test_readme.py: test_make_run",
    "make CC=x86_64-w64-mingw32-gcc": "test_platforms.py: test_windows",
    "make NATIVE=-march=x86-64-v3": "test_build.py: test_older_cpu",
    "make portable": "test_build.py: test_builds", "make debug": "test_build.py: test_builds",
    "CC=clang make": "test_build.py: test_builds", "make THREADS=0": "test_platforms.py: test_compiler",
    "make install": "test_build.py: test_install", "make uninstall": "test_build.py: test_install",
    "make bench": "test_build.py: test_bench", "make bench BITS=4": "test_build.py: test_bench",
    "make bench MODEL=30b-a3b BITS=4": "test_build.py: test_bench",
    "make bench MODEL=30b-a3b BITS=4 LAYERS=4": "test_build.py: test_bench",
    "make fuzz FUZZ_SECONDS=600": "test_fuzz.py: test_random_inputs",
    "make journey": "test_journey.py: test_readme_shows_it",
    'make journey TEXT="3 + 4 = "': "test_journey.py: test_tiny_model",
    "make test": "", "make test-all": "",
}
NOT_COMMANDS = re.compile(
    r"-\w|--\w|/|qwen3: WHERE: WHAT$|export.py --check$|test_\*\.py$")  # though there is a space


def blocks(text):
    """The commands of each code block, one string each."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S):
        shown = re.findall(r"^\$ (.*\n)", block, re.M)
        commands = [""]
        for line in shown or block.splitlines(keepends=True):
            commands[-1] += line
            if is_complete(commands[-1]):
                commands.append("")
        assert commands.pop() == "", block
        yield commands


def is_complete(command):
    try:
        shlex.split(command, comments=True)
    except ValueError:                                  # in the middle of a quotation
        return False
    return not command.endswith("\\\n")


def inline_code(text):
    """Each once, in their order, on one line."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return list(dict.fromkeys(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)))


def is_command(code):
    return re.sub(r"^(\w+=\S* )+", "", code).split(" ")[0] in PROGRAMS


BLOCKS = [commands for path in READMES for commands in blocks(path.read_text())]
INLINE = inline_code("\n\n".join(path.read_text() for path in READMES))
COMMANDS = list(filter(is_command, INLINE))


@pytest.fixture
def folder(tmp_path, tokenizer_json, monkeypatch):  # noqa: F811
    """A clone with a built program, where real models have been exported or are checkpoints here."""
    for name in ("qwen3.c", "export.py", "Makefile", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "qwen3").symlink_to(QWEN3)
    for suffix in (".bin", ".bin.tokenizer"):
        shutil.copy(TINY / f"tiny{suffix}", tmp_path / f"Qwen3-0.6B{suffix}")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen/Qwen3-0.6B").symlink_to(TINY / "model")
    embedding = shutil.copytree(TINY / "model", tmp_path / "Qwen/Qwen3-Embedding-0.6B")
    (embedding / "modules.json").write_text(json.dumps(
        [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]))
    (embedding / "1_Pooling").mkdir()
    (embedding / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    checkpoint = Checkpoint(tokenizer_json)
    test_gguf.write(tmp_path / "Qwen3-0.6B-Q8_0.gguf", test_gguf.values(checkpoint),
                    test_gguf.blocks(checkpoint, test_gguf.Kind.Q8_0))
    (tmp_path / "notes.txt").write_text("One note.\n")
    (tmp_path / "book.txt").write_text("Once upon a time.\n")
    for name in ("outside", "bin"):
        (tmp_path / name).mkdir()
    for name, script in SUBSTITUTES.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def substituted(folder):
    env = environment()
    return env | {"PATH": f"{folder}/bin:{env['PATH']}", "REAL_MAKE": shutil.which("make")}


def is_export(command):
    """export.py runs in this process, which is faster; its -h does not need that."""
    return "export.py " in command and not command.rstrip().endswith(" -h")


def run_all(commands, folder):
    """What they write to stdout. Each run of commands that share a shell is one script."""
    stdout = b""
    for exports, group in groupby(commands, is_export):
        if exports:
            for command in group:
                program, arguments = command.split("export.py ")
                assert program == "uv run ", command
                status, error = run_export(*shlex.split(arguments, comments=True))
                assert status == 0, error
        else:
            where = folder / "outside" if "git clone " in commands[0] else folder
            done = subprocess.run(["sh", "-e", "-c", "".join(group)], cwd=where, timeout=300,
                                  capture_output=True, env=substituted(folder),
                                  stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr
            stdout += done.stdout
    return stdout


@pytest.mark.parametrize("commands", BLOCKS, ids=lambda commands: commands[0].strip())
def test_block(commands, folder):
    before = set(folder.iterdir())
    stdout = run_all(commands, folder)
    written = set(folder.iterdir()) - before
    assert stdout or written
    assert all(path.stat().st_size for path in written)
    if "query.json" in "".join(commands):
        assert Path("query.txt").read_text().endswith("query\nQuery:What is the capital of China?")
        query, document = (json.loads(Path(f"{name}.json").read_text()) for name in ("query", "document"))
        assert sum(x * x for x in query) == pytest.approx(1) and query != document
        assert abs(sum(a * b for a, b in zip(query, document, strict=True))) < 1


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ELSEWHERE])
def test_inline_command(command, folder):
    if command.endswith("./qwen3 Qwen3-0.6B.bin"):      # a conversation
        child = pexpect.spawn("sh", ["-c", command], cwd=str(folder), timeout=60,
                              env=substituted(folder) | {"TERM": "xterm"})
        child.expect("> ")
        child.sendline("/bye")
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == 0
        return
    stdout = run_all([command], folder)
    if command.startswith("grep"):                      # to the line of C that does RoPE
        assert (b"static void rope(float *x" if "rope" in command else b"static bool forward(") in stdout
    if command.endswith("--bits 4"):
        assert Path("Qwen3-0.6B-q4.bin").exists()


def test_every_command_is_known():
    commands = {*COMMANDS, *(command.strip() for block in BLOCKS for command in block)}
    makes = {command for command in commands if re.match(r"(\w+=\S+ )*make\b", command)}
    assert makes == IN_EARNEST.keys() and ELSEWHERE.keys() <= commands
    makefile = (ROOT / "Makefile").read_text()
    for name in (name for make in makes for name in re.findall(r"\b([A-Z_]+)=", make)):
        assert f"$({name})" in makefile or f'"$${name}"' in makefile, name
    for where in filter(None, (*ELSEWHERE.values(), *IN_EARNEST.values())):
        file, name = where.split(": ")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.M), where
    assert "tests/test\n" in subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True,
                                            text=True, env=environment()).stdout
    others = [code for code in INLINE if " " in code and not is_command(code)]
    assert not [code for code in others if not NOT_COMMANDS.match(code)]


def test_options_are_those_of_the_help():
    help_texts = subprocess.run([QWEN3, "-h"], capture_output=True, text=True).stdout + export.__doc__
    for code in INLINE:
        if code.startswith("-"):
            assert re.search(rf"^ +{code.split()[0]} ", help_texts, re.M), code


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_what_is_named_is_there(path):
    """Files by links or inline code, functions and types by inline code."""
    text = path.read_text()
    sources = "".join(file.read_text() for file in (ROOT / "qwen3.c", ROOT / "export.py"))
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link.startswith("https://") or (path.parent / link).exists(), link
    for code in inline_code(text):
        if re.fullmatch(r"[\w/]+\.(?:c|h|md|py|txt)|tests/\w+/?", code):
            assert code == "tests/test" or any((place / code).exists() for place in (ROOT, TESTS)), code
        elif re.fullmatch(r"[a-z]+_[a-z_]+|[A-Z][a-z]\w+", code) and path == READMES[0]:
            assert re.search(rf"\b{code}\b", sources), code


def test_make_run():
    """Its output as the README shows it, but for the speed and the seed."""
    shown = re.search(r"^\$ make run\n.*\n(.*)\n", READMES[0].read_text(), re.M)[1]
    result = subprocess.run(["make", "-s", "--no-print-directory", "run"], cwd=ROOT,
                            capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == shown == \
        "The capital of France is Paris."


# Of the models in the README's table: dim, hidden_dim, n_layers, n_heads, n_kv_heads, whether the
# classifier is the embedding, n_experts, n_experts_used. The first two checkpoints store it twice.
SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True, 0, 0), "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True, 0, 0),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True, 0, 0), "Qwen3-8B": (4096, 12288, 36, 32, 8, False, 0, 0),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False, 0, 0),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False, 0, 0),
    "Qwen3-30B-A3B-Instruct-2507": (2048, 768, 48, 32, 4, False, 128, 8)}
VOCABULARY, HEAD = 151936, 128


def model_bytes(shape, bits, of_a_token=False):
    """Bytes of OUT.bin, or those that a token reads, by the list of tensors that export.py writes."""
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, shared, n_experts, used = shape
    group = 32 if bits == 4 else 64
    config = export.Config(dim, hidden_dim, n_layers, n_heads, n_kv_heads, VOCABULARY, 4096, HEAD, shared,
                           group, export.LEVELS if bits == 4 else (), 1e6, 1e-6, None, False, False,
                           n_experts, used)
    size = 256
    for width, names, dims in export.out_tensors(config):
        if of_a_token and names == ["embed_tokens.weight"] and not shared:
            continue                                    # one row
        experts = used if of_a_token and len(names) > 1 else len(names)
        count = experts * math.prod(dims)
        size += count * width // 8 + count // group * {32: 0, 8: 4, 4: 2}[width]
    return size


def test_table_of_models():
    """A formula's figures, with two digits."""
    rows = re.findall(r"^\| (Qwen3-.*) \|$", READMES[0].read_text(), re.M)
    table = {row.split(" | ")[0].split(",")[0]: row.split(" | ")[1:] for row in rows}
    assert table.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        dim, _, n_layers, _, n_kv_heads, *_ = shape
        cache = 8 * n_layers * n_kv_heads * HEAD * 4096
        files = [model_bytes(shape, bits) for bits in (8, 4)]
        reads = [model_bytes(shape, bits, of_a_token=True) for bits in (8, 4)]
        weights = 2 * (files[0] - 256) / (1 + 4 / 64)   # in 16 bits, but for the norms' few
        download = weights + 2 * VOCABULARY * dim * (name in list(SHAPES)[:2])
        expected = [[download], files, [size + cache for size in files],
                    *([rate * 1e18 / size for size in reads] for rate in (10, 50, 100))]
        assert table[name] == [" / ".join(two_digits(x / 1e9) for x in cell) for cell in expected], name


def two_digits(x):
    return f"{float(f'{x:.2g}'):g}"


@pytest.mark.slow
def test_new_user(folder, tmp_path_factory):
    """The README's first two blocks in a fresh clone, with the real git and make: to a chat with the
    tiny model and to an exported checkpoint."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git, or no repository")
    home = tmp_path_factory.mktemp("home")
    env = substituted(folder) | {"PATH": f"{home}/bin:{environment()['PATH']}"}
    (home / "bin").mkdir()
    shutil.copy(folder / "bin/uv", home / "bin")
    first, second = BLOCKS[:2]
    assert first[0].startswith("git clone ") and second[1] == "uv run export.py Qwen/Qwen3-0.6B\n"
    clone = f"git clone -q {shlex.quote(str(ROOT))} qwen3.c\n"
    model = "mkdir Qwen; ln -s ../tests/tiny/model Qwen/Qwen3-0.6B\n"
    done = subprocess.run(["sh", "-e", "-c", "".join([clone, *first[1:], model, *second])], cwd=home,
                          capture_output=True, text=True, timeout=600, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris.\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "Sorry, I do not know that.", done.stdout

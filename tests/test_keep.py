"""A file of what has run (-K FILE): the same bytes as without it, whatever FILE has; what need not run again; when FILE is
replaced, and how; files that are another's."""
import json
import os
import random
import re
import signal
import subprocess
import time

import pytest
from checkpoints import make_checkpoint
from conftest import QWEN3, ROOT, assert_error, copy_model, environment, export, qwen3, shell

WORDS = "the old lighthouse keeper sang of rain and what is common to all beginnings".split()
HEAD = 16 + 8 * (4 + 32 + 4 + 10)                        # bytes; its hash follows, then the ids
ANEW = re.compile(rb"kept: (damaged|of another [\w -]+), the run begins anew\n")


def text(seed, n):
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def cached(result):
    return int(re.search(rb"\((\d+) cached\)", result.stderr)[1])


def prompt_length(result):
    return int(re.search(rb"prompts? (\d+) tokens", result.stderr)[1])


@pytest.fixture(params=["tiny", "delta"])
def model(request):
    """With attention alone, and with states."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "kept"


def said(result):
    """A result without what FILE may change: numbers of tokens that ran and their rates, what is said of FILE."""
    lines = [line for line in result.stderr.splitlines() if not re.search(rb"kept: |^\d+ rows", line)]
    return result.returncode, result.stdout, sorted(re.sub(rb"at [\d.]+/s|\(\d+ cached\)|[\d.]+ (s,|tokens/s)", b"", line)
                                                    for line in lines)


def ask(model, *args, file, stdin=b""):
    """A run with FILE. All that it says is what the run says without it."""
    run = [model, *([] if "embed" in args else ["-s", 1, "-n", 9]), *args]
    alone, result = qwen3(*run, stdin=stdin), qwen3(*run, "-K", file, stdin=stdin)
    assert said(result) == said(alone), (result.stderr, alone.stderr)
    return result


def ask_prompt(model, prompt, *args, file):
    return ask(model, "-i", prompt, *args, file=file)


# -- what need not run again

def test_questions_on_one_text(model, file):
    """The second one runs at most 64 ids beside what differs, the third only this; FILE is written once or twice."""
    questions = ["Who signs?", "Until when is it valid?", "Who pays the rain?", "And the keeper?", "Why?"]
    runs, stamps = [], set()
    for question in questions:
        runs.append(ask_prompt(model, f"{text(1, 150)}\n\n{question}", "-m", "chat", file=file))
        stamps.add(file.stat().st_ino)
    differs = [prompt_length(run) - cached(run) for run in runs]
    assert cached(runs[0]) == 0 and max(differs[1:]) <= 64 + 24 and len(stamps) <= 2, differs
    assert [path.name for path in file.parent.iterdir()] == ["kept"]


@pytest.mark.parametrize("parts", [5, 40, 90])
def test_any_distance(delta, file, parts):
    """With states, where the last `parts` words differ: at most eight times as much runs, and a block more; then what
    differs, or an eighth of the text."""
    common = text(1, 180)
    first, second, third = (ask_prompt(delta, f"{common} {text(seed, parts)}", "-m", "generate", file=file) for seed in (2, 3, 4))
    differs = len(qwen3(delta, "-m", "tokenize", "-i", text(4, parts)).stdout.split()) + 4
    assert prompt_length(second) - cached(second) <= max(64, 8 * differs) + 16
    assert prompt_length(third) - cached(third) <= max(differs, prompt_length(third) // 8) + 16


def test_any_beginning(tiny, file):
    """With attention alone any beginning of FILE is taken, also of a smaller context."""
    whole = text(1, 160)
    for n, context in (160, 1024), (90, 1024), (31, 1024), (50, 128):
        file.unlink(missing_ok=True)
        ask_prompt(tiny, whole, "-m", "generate", file=file)
        run = ask_prompt(tiny, " ".join(whole.split()[:n]), "-m", "generate", "-c", context, file=file)
        assert cached(run) == prompt_length(run) - 1


def test_a_conversation_a_call_a_turn(model, file):
    """Each call runs what is new since FILE was written, which was at most an eighth of the text before."""
    talk, before = [], 0
    for turn in range(9):
        talk.append({"role": "user", "content": text(turn, 12)})
        run = ask(model, "-L", "-", file=file, stdin=json.dumps(talk).encode())
        n = prompt_length(run)
        assert n - cached(run) <= n - before + before // 8 + 16 if turn else cached(run) == 0
        talk.append({"role": "assistant", "content": json.loads(run.stdout)})
        before = n


def test_a_nightly_list(model, file):
    """Other lines under the same instructions: the first text starts after these, and FILE stays as it is."""
    runs, stamps = [], []
    for night in range(3):
        lines = "".join(f"{text(10 * night + i, 6)}\n" for i in range(7)).encode()
        runs.append(ask(model, "-i", text(1, 250), "-l", "-", file=file, stdin=lines))
        stamps.append(file.stat().st_ino)
    assert min(cached(run) for run in runs[1:]) > cached(runs[0]) + 100 and stamps[1] == stamps[2], runs


def test_what_was_kept_stays(delta, file):
    """A long chat leaves the states near its beginning, too: another one with the same system prompt starts there."""
    system = text(1, 80)
    ask(delta, "-m", "chat", "-y", system, "-c", 1024, file=file, stdin="".join(f"{text(i, 4)}\n" for i in range(12)).encode())
    run = ask(delta, "-m", "chat", "-y", system, file=file, stdin=b"zebra")
    assert cached(run) > 100, run.stderr


# -- the same bytes

def runs_of(r, base):
    """Random arguments and stdin: all kinds of runs, of texts that begin alike."""
    prompt = " ".join(base[:r.choice([0, 50, len(base) - 10, len(base)])] + r.choices(WORDS, k=r.randrange(1, 12)))
    lines = "".join(f"{' '.join(r.choices(WORDS, k=4))}\n" for _ in range(r.randrange(1, 7)))
    args, stdin = r.choice([
        (["-m", "chat", "-i", prompt], ""), (["-m", "generate", "-i", prompt], ""), (["-m", "embed", "-i", prompt], ""),
        (["-m", "chat"], f"{prompt}\n{lines}"), (["-m", "chat", "-i", prompt, "-l", "-"], lines),
        (["-m", "chat", "-i", prompt, "-o", "the| old|x"], ""), (["-m", "chat", "-l", "-", "-o", "yes|no"], f"{prompt}\n{lines}"),
        (["-m", "generate", "-l", "-"], f"{prompt}\n{prompt} x\n{lines}")])
    more = r.choice([[], [], ["-C", 8], ["-b", 1], ["-b", 7], ["-c", 400], ["-j", 1], ["-j", 3], ["-r", 1]])
    return [*args, *(more if "embed" not in args or more[:1] != ["-r"] else [])], stdin.encode()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("program", [QWEN3, ROOT / "tests" / "test"])
def test_any_runs_with_one_file(model, file, seed, program):
    """Some are stopped or killed meanwhile, some find FILE damaged. tests/test asserts the cache's invariant, has few
    blocks, and lets texts go back further than they need."""
    r, hits = random.Random(seed), 0
    base = text(seed, 120).split()

    def command(args, checked=program != QWEN3):
        small = ["list", f"{r.choice([1, 40, 200])},{r.randrange(1, 1 << 20)}"] if checked else []
        return [program, *small, model, "-s", "1", "-n", "7", *map(str, args)]
    for _ in range(25):
        args, stdin = runs_of(r, base)
        if file.exists() and r.random() < 0.15:
            data = bytearray(file.read_bytes())
            data[r.randrange(8, len(data))] ^= 1 << r.randrange(8)
            file.write_bytes(data[:r.choice([len(data), len(data), r.randrange(len(data))])])
        if r.random() < 0.15:
            child = subprocess.Popen(command([*args, "-K", file]), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL, env=environment())
            child.stdin.write(stdin)
            child.stdin.close()
            time.sleep(r.random() * 0.05)
            child.send_signal(r.choice([signal.SIGKILL, signal.SIGINT]))
            child.wait()
            continue
        alone, kept = (subprocess.run(command([*args, *more]), input=stdin, capture_output=True, env=environment())
                       for more in ([], ["-K", file]))
        assert said(kept) == said(alone), (args, kept.stderr, alone.stderr)
        hits += cached(kept) > cached(alone) if b" cached)" in kept.stderr else 0
    assert hits > 0


def test_damaged_anywhere(model, file):
    """Each byte of Head, some others, and cuts: a notice, and FILE is whole again."""
    prompt = text(1, 60)
    ask_prompt(model, prompt, file=file)
    whole = file.read_bytes()
    for at in [*range(0, HEAD + 12, 19), *range(HEAD + 12, len(whole), len(whole) // 9), len(whole) - 1]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        result = ask_prompt(model, prompt, file=file)
        assert ANEW.search(result.stderr) and cached(result) == 0, at
        assert len(file.read_bytes()) == len(whole) and cached(ask_prompt(model, prompt, file=file)) > 0
    for n in (1, 5, 8, 60, HEAD, HEAD + 9, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:n])
        assert b"kept: damaged, the run begins anew\n" in ask_prompt(model, prompt, file=file).stderr


def test_parts_of_two_files(tiny, file):
    """All hashes are right, but a block is another text's: as if a copy over FILE had been stopped."""
    both = []
    for seed in (1, 2):
        file.unlink(missing_ok=True)
        ask_prompt(tiny, text(seed, 60), "-m", "embed", file=file)
        both.append(file.read_bytes())
    n = len(both[0]) // 2
    file.write_bytes(both[0][:n] + both[1][n:len(both[0])])
    assert b"kept: damaged" in ask_prompt(tiny, text(1, 60), "-m", "embed", file=file).stderr


def test_of_another_run(tiny, delta, file, tmp_path, tokenizer, tmp_path_factory):
    """Another kind of model, -C, version, C library; or one weight of the same model."""
    prompt = text(1, 60)
    ask_prompt(tiny, prompt, file=file)
    assert b"kept: of another -C, " in ask_prompt(tiny, prompt, "-C", 8, file=file).stderr
    assert b"kept: of another model, " in ask_prompt(delta, prompt, file=file).stderr
    make_checkpoint(tmp_path / "hf", tokenizer, n_layers=4)
    models = [export(tmp_path / "hf", tmp_path / "a.bin")]
    data = bytearray(models[0].read_bytes())
    models.append(copy_model(models[0], tmp_path_factory.mktemp("other")))
    for at in 0x9C, -9:                                  # the header's hash alone, and a weight without it
        data = bytearray(models[0].read_bytes())
        data[at] ^= 1
        models[1].write_bytes(data)
        for one, other in (models, models[::-1]):
            file.unlink()
            ask_prompt(one, prompt, file=file)
            assert b"kept: of another model, " in ask_prompt(other, prompt, file=file).stderr


# -- FILE itself

def test_not_made_by_it(tiny, file, tmp_path):
    file.write_text("not yours")
    assert_error(qwen3(tiny, "-i", "x", "-K", file), 1, "kept: not made by -K")
    assert file.read_text() == "not yours" and [*tmp_path.iterdir()] == [file]
    for name, word in ((tmp_path, "not a regular file"), ("/dev/null", "not a regular file"),
                       (tmp_path / "no" / "kept", "No such file or directory, expected a file that can be made")):
        assert_error(qwen3(tiny, "-i", "x", "-K", name), 1, word)
    assert_error(qwen3(tiny, "-i", "x", "-K", "-"), 2, "-K")
    os.mkfifo(tmp_path / "pipe")
    assert_error(qwen3(tiny, "-i", "x", "-K", tmp_path / "pipe"), 1, "not a regular file")


def test_files_of_the_same_run(tiny, tmp_path):
    lines, out = tmp_path / "lines", tmp_path / "out"
    lines.write_text("x\n")
    assert_error(qwen3(tiny, "-l", lines, "-K", lines), 1, "is -K's and the list")
    assert_error(qwen3(tiny, "-l", lines, "-w", out, "-K", out), 1, "is -K's and -w's")
    assert shell(f"exec {QWEN3} {tiny} -i x -K {out} > {out}").returncode == 1 and out.read_bytes() == b""


def test_no_effect(tiny, file):
    for mode in "tokenize", "perplexity":
        result = qwen3(tiny, "-m", mode, "-i", "a b c", "-K", file)
        assert result.stderr == f"qwen3: -K: no effect with -m {mode}\n".encode() and not file.exists()
    plain = subprocess.run([ROOT / "qwen3-plain", tiny, "-i", "x", "-n", "1", "-K", file], capture_output=True)
    assert plain.stderr.startswith(b"qwen3: -K: no effect with -DPLAIN\n") and not file.exists()


def test_permissions(tiny, file):
    """A new FILE is its owner's alone; one that is there keeps what it has, also if it is empty; a read-only one stays."""
    ask_prompt(tiny, text(1, 60), file=file)
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"")
    file.chmod(0o664)
    ask_prompt(tiny, text(1, 60), file=file)
    assert file.stat().st_mode & 0o777 == 0o664 and file.stat().st_size > 0
    link = file.with_name("link")                       # stays one: the data may have to lie elsewhere
    link.symlink_to(file.name)
    ask_prompt(tiny, text(3, 60), file=link)
    assert link.is_symlink() and b"(0 cached)" not in ask_prompt(tiny, text(3, 60), file=file).stderr
    before = file.read_bytes()
    file.chmod(0o444)
    assert b"kept: not replaced: Permission denied\n" in ask_prompt(tiny, text(2, 60), file=file).stderr
    assert file.read_bytes() == before


def test_a_full_disk(tiny, file, tmp_path):
    ask_prompt(tiny, text(1, 20), file=file)
    before = file.read_bytes()
    run = f"{QWEN3} {tiny} -m generate -s 1 -n 9 -i '{text(2, 200)}'"
    alone, result = shell(run), shell(f"ulimit -f 100; exec {run} -K {file}")
    assert (result.returncode, result.stdout) == (0, alone.stdout)
    assert b"kept: not replaced: File too large\n" in result.stderr
    assert file.read_bytes() == before and [*tmp_path.iterdir()] == [file]


def test_what_v_says(model, file):
    result = [qwen3(model, "-v", "-i", text(1, 60), "-n", 3, "-K", file).stderr for _ in range(2)]
    size = file.stat().st_size / 1e6
    assert re.search(rf"kept: \d+ tokens \({size:.1f} MB\) written in \d+\.\d s\n".encode(), result[0])
    assert re.search(rf"kept: \d+ tokens \({size:.1f} MB\) read in \d+\.\d s\n".encode(), result[1])


def test_however_the_run_ends(model, file):
    """By a reader that leaves, an error in a later turn, Ctrl-C in the answer or in the prompt."""
    prompt = text(1, 100)
    shell(f"{QWEN3} {model} -m chat -n 200 -i '{prompt}' -K {file} | head -c 1")
    assert cached(ask_prompt(model, prompt, "-m", "chat", file=file)) > 0
    file.unlink()
    assert qwen3(model, "-m", "chat", "-n", 3, "-K", file, stdin=f"{prompt}\n\n".encode()).returncode == 1  # an empty line
    assert cached(ask_prompt(model, prompt, "-m", "chat", file=file)) > 0
    file.unlink()
    child = subprocess.Popen([QWEN3, model, "-m", "generate", "-n", "-1", "-t", "1000", "-k", "0", "-p", "1", "-i", prompt, "-K", file],
                             env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    error = child.communicate()[1]
    if child.returncode == 130:                          # else the answer has ended by itself
        assert cached(ask_prompt(model, prompt, "-m", "generate", file=file)) > 0, error
    assert not [*file.parent.glob("*.part")]


def test_two_programs(model, file):
    """Each reads a whole FILE, and the last one wins."""
    for _ in range(4):
        children = [subprocess.Popen([QWEN3, model, "-s", "1", "-n", "3", "-i", text(seed, 90), "-K", file],
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) for seed in range(4)]
        for seed, child in enumerate(children):
            out, error = child.communicate()
            assert not ANEW.search(error) and b"not replaced" not in error
            assert out == qwen3(model, "-s", 1, "-n", 3, "-i", text(seed, 90)).stdout
    last, hits = file.read_bytes(), 0
    for seed in range(4):
        file.write_bytes(last)
        hits += cached(ask_prompt(model, text(seed, 90), file=file)) > 60
    assert hits == 1

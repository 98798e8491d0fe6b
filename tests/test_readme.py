"""Every command of the READMEs runs as it stands there, in a folder where the real model is the tiny one and some
programs are substitutes. What they name is there, and the table of models is what its formula gives.
A command is a line of a code block, fenced or indented (if some begin with `$ `, only these), or inline code that
begins with a program, perhaps after NAME=VALUE.
"""
import csv
import json
import math
import operator
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

import export
import ggufs
import heads
import pexpect
import pytest
from checkpoints import Checkpoint, make_embedding
from conftest import QWEN3, ROOT, TESTS, TINY, call, environment, finish, run_export

CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
READMES = [ROOT / "README.md", TESTS / "README.md", CONTRIBUTING, ROOT / ".github/RECIPES.md", TINY / "README.md"]
PYTHON = shlex.quote(sys.executable)

# What runs in place of a program, as shell script. make shows what it would do, as other tests use
# what is built here; what needs torch is only parsed.
SUBSTITUTES = {
    "git": 'test "$1" = clone && ln -s .. qwen3.c',
    "make": 'exec "$REAL_MAKE" -n "$@"',
    "python3": f'exec {PYTHON} -S "$@"',                # without packages, as a system's
    "rlwrap": 'exec "$@"',
    "uv": f'''test "$1" = run && shift
test "$1" = --with && shift 2
case "$1" in
    tests/tiny/*) exec {PYTHON} -m ast "$1" ;;
    python) shift; exec {PYTHON} "$@" ;;
    *) exec {PYTHON} "$@" ;;
esac''',
}


def blocks(text):
    """The commands of each code block that is no `text`, one string each."""
    for language, *block in re.findall(r"^```(\w*)\n(.*?)^```$|(?<=\n\n)((?: {4}[^\n]*\n)+)", text, re.M | re.S):
        if language == "text":
            continue
        block = block[0] or textwrap.dedent(block[1])
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
    """A single word is one if it stands for a program of ours or has a substitute."""
    program, *arguments = re.sub(r"^(\w+=\S* )+", "", code).split(" ")
    ours = re.fullmatch(r"\./qwen3|jq|tests/(test|bench|\.venv/bin/python)", program)
    return bool(ours or program in SUBSTITUTES or arguments and shutil.which(program))


def is_missing(command):
    """Does it need a program that is not everywhere, nor here?"""
    return any(re.search(rf"\b{name}\b", command) and not shutil.which(name) for name in ("jq", "parallel"))


BLOCKS = [commands for path in READMES for commands in blocks(path.read_text())]
INLINE = inline_code("\n\n".join(path.read_text() for path in READMES))
COMMANDS = list(filter(is_command, INLINE))


def as_it_runs(command):
    """With something for TEXT and MODEL.bin, and this Python; make says how it makes the programs of tests/."""
    for name in re.findall(r"\b([A-Z_]+)=", command) if "make" in command else ():
        assert re.search(rf"\$\({name}\)|\$\${name}\b", (ROOT / "Makefile").read_text()), name
    command = re.sub(r"\bMODEL\.bin\b", "Qwen3-0.6B.bin", re.sub(r"\bTEXT\b(?!=)", "text", command))
    command = command.replace("[:256]", "[:16]").replace("-c 4096", "-c 1024").replace("--sshlogin one,two --wd . ", "")  # the tiny model, here
    command = re.sub(r"\btests/\.venv/bin/python\b", lambda _: PYTHON, command)
    return re.sub(r"^(tests/(?:test|bench))\b.*", r"make \1", command)


@pytest.fixture
def folder(tmp_path, tokenizer_json, monkeypatch):
    """A clone with a built program; the hub's models are the tiny one, GGUF files have random weights, texts a line."""
    for name in ("qwen3.c", "export.py", "Makefile", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "qwen3").symlink_to(QWEN3)
    (tmp_path / "qwen3-plain").symlink_to(ROOT / "qwen3-plain")
    for name in ("outside", "bin", "Qwen"):
        (tmp_path / name).mkdir()
    for suffix in (".bin", ".bin.tokenizer"):
        shutil.copy(TINY / f"tiny{suffix}", tmp_path / f"Qwen3-0.6B{suffix}")
    read = "\n".join([*COMMANDS, *("".join(block) for block in BLOCKS)])
    for name in set(re.findall(r"(?:export\.py Qwen/|\./qwen3 )(Qwen3-[\w.-]+?)(?:\.bin)?\s", read + "\n")):
        model = shutil.copytree(TINY / "model", tmp_path / "Qwen" / name)
        if "Embedding" in name:
            make_embedding(model)
    checkpoint = Checkpoint(tokenizer_json)
    for name in set(re.findall(r"export\.py ([\w.-]+\.gguf)", read)):
        ggufs.write(tmp_path / name, ggufs.values(checkpoint), ggufs.blocks(checkpoint, ggufs.Kind.Q8_0))
    for name in set(re.findall(r" -[fl] (\w+\.txt)|jq -R.* (\w+\.txt)", read)):
        (tmp_path / "".join(name)).write_text("Once upon a time.\nWho are you?\n")
    (tmp_path / "mails.jsonl").write_text('{"id": 1, "text": "Who are you?", "gold": "Praise"}\n'
                                          '{"id": 1, "text": "Tell me a story.", "gold": "Complaint"}\n')
    (tmp_path / "mails.csv").write_text('id,mail\n1,"Who, or ""what"",\nare you?"\n2,Hello\n')
    (tmp_path / "questions.jsonl").write_text("".join(
        json.dumps({"question": "What is 3 + 4?", "choices": ["7", "77 and so on", "no"], "gold": gold}) + "\n"
        for gold in (0, 1, 2)))
    (tmp_path / "contract.txt").write_text("Once upon a time.\n")
    (tmp_path / "rules.txt").write_text("Your name is Max.\n")
    (tmp_path / "app.po").write_text('msgid ""\nmsgstr ""\n\nmsgid "Open"\nmsgstr ""\n\nmsgid "%d files \\"found\\""\nmsgstr ""\n\n'
                                     'msgid "No file %s"\nmsgstr ""\n')
    (tmp_path / "batch.jsonl").write_text("".join(
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "gpt", "max_tokens": 9, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}}) + "\n"
        for name in ("one", "two")))
    for name, script in SUBSTITUTES.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def substituted(folder):
    env = environment()
    return env | {"PATH": f"{folder}/bin:{env['PATH']}", "REAL_MAKE": shutil.which("make"),
                  "PYTEST_ADDOPTS": "--collect-only"}


def is_export(command):
    """export.py runs in this process, which is faster; its -h and --form do not need that."""
    return "export.py " in command and "--form" not in command and not command.rstrip().endswith(" -h")


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
            script = "".join(map(as_it_runs, group))
            where = folder / "outside" if "git clone " in script else folder
            done = subprocess.run(["sh", "-e", "-c", script], cwd=where, timeout=300,
                                  capture_output=True, env=substituted(folder), stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr
            stdout += done.stdout
    return stdout


@pytest.mark.parametrize("commands", BLOCKS, ids=lambda commands: commands[0].strip())
def test_block(commands, folder):
    commands = [command for command in commands if not is_missing(command)]
    if not commands:
        pytest.skip("a program is not installed")
    text = "".join(commands)
    for name in re.findall(r"\w+\.jsonl", text):
        makes = [block for block in map("".join, BLOCKS) if f"> {name}" in block]       # made in an earlier block
        if makes and not Path(name).exists() and f"> {name}" not in text:
            run_all(makes[:1], folder)
    for model in set(re.findall(r"\./qwen3 (\S+)\.bin", text)):
        if not Path(f"{model}.bin").exists() and "export.py " not in text:      # made in an earlier block
            assert run_export(f"Qwen/{model}")[0] == 0
    before = set(folder.iterdir())
    stdout = run_all(commands, folder)
    written = set(folder.iterdir()) - before
    assert stdout or written
    assert all(path.stat().st_size for path in written)
    if not is_missing("jq") and "jq " in text:
        check_recipes(text, stdout.decode(errors="replace"))
    if "parallel --pipe" in text:                       # in parts of one line, too, it gives the lines of one run
        Path("reviews.txt").write_text("Tell me a story\n" * 5)
        run_all([text.partition("\n# A job")[0].replace("1000", "1")], folder)
        whole = run_all(["./qwen3 Qwen3-0.6B.bin -c 1024 -s 7 -q -l reviews.txt"], folder)
        assert Path("answers.jsonl").read_bytes() == whole and len(set(whole.splitlines())) > 2
    if "subprocess.Popen" in text:
        assert stdout.endswith(b"Your name is Ann.\n")


def rows(name):
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def check_recipes(text, stdout):
    """What the recipes with jq write for the folder's files."""
    lines = stdout.splitlines()
    if "> labels.jsonl" in text:
        labels = rows("labels.jsonl")
        counts = Counter(row["choice"] for row in labels)
        assert counts.total() == 2
        assert [line.split() for line in lines] == [[str(counts[name]), name] for name in sorted(counts)]
    if "unbiased.jsonl" in text:
        labels, unbiased = rows("labels.jsonl"), rows("unbiased.jsonl")
        mean = {name: sum(row["p"][name] for row in labels) / 2 for name in labels[0]["p"]}
        assert [row["choice"] for row in unbiased] == \
            [max(row["p"], key=lambda name: row["p"][name] / mean[name]) for row in labels]
        assert [sum(row["p"].values()) for row in unbiased] == pytest.approx([1, 1])
    if "> shown.jsonl" in text:
        assert [(row["gold"], list(row["p"])) for row in rows("shown.jsonl")] == \
            [(gold, ["Question", "Complaint", "Praise"]) for gold in ("Praise", "Complaint")]
    if "> complaints.jsonl" in text:
        shown, found = rows("shown.jsonl"), rows("complaints.jsonl")
        p = [row["p"]["Complaint"] for row in shown]
        right = [sum((x >= least) == (row["gold"] == "Complaint") for x, row in zip(p, shown)) for least in p]
        least = max(zip(right, p), key=lambda pair: pair[0])[1] if right[0] != right[1] else p[1]   # jq takes the last
        assert [row["complaint"] for row in found] == [x >= least for x in p]
    if "--slurpfile other" in text:                 # both have the id 1: the second row of shown.jsonl counts
        kinds, last = rows("kinds.jsonl"), rows("shown.jsonl")[1]
        right = Counter((row["choice"] == row["gold"], last["choice"] == last["gold"]) for row in kinds)
        assert lines == [f"{n}\t{str(a).lower()}\t{str(b).lower()}" for (a, b), n in sorted(right.items())]
    if "labels.tsv" in text:
        table = [line.split("\t") for line in Path("labels.tsv").read_text().splitlines()]
        assert len(table) == 2 and all(row[0] == "1" and row[1] in text and 0 < float(row[2]) < 1 for row in table)
        assert [json.loads(line)[2] for line in lines[:2]] == sorted(float(row[2]) for row in table)
        (_, first, _), (_, second, _) = table
        assert float(lines[2]) == ((first == "Praise") + (second == "Complaint")) / 2
        assert lines[3:] == [f"1\tComplaint\t{second}", f"1\tPraise\t{first}"]
    if "kinds.csv" in text:
        with open("mails.csv", newline="") as given, open("kinds.csv", newline="") as made:
            table = list(csv.DictReader(made))
            assert [row | {"choice": ""} for row in table] == [row | {"choice": ""} for row in csv.DictReader(given)]
            assert all(row["choice"] in text for row in table)
    if "scored.jsonl" in text:
        scored = rows("scored.jsonl")
        by = [[nll / n for nll, n in zip(row["nll"], sizes)] for row in scored for sizes in ((1, 1, 1), (1, 12, 2))]
        right = [nll.index(min(nll)) == i // 2 for i, nll in enumerate(by)]
        assert [float(line) for line in lines] == pytest.approx([sum(right[::2]) / 3, sum(right[1::2]) / 3])
    if "@replies" in text:
        assert len(lines) == 2 and all(len(json.loads(line)) == 3 for line in lines)
    if "$n |" in text:
        assert [len(json.loads(line)) for line in lines] == [16, 16]
        assert [sum(x * x for x in json.loads(line)) for line in lines] == pytest.approx([1, 1])
    if "tonumber" in text:
        assert len(lines) == 2 and all(1 < float(line) < 5 for line in lines)
    if "fields.jsonl" in text:
        assert [(row["id"], row["end"]) for row in rows("fields.jsonl")] == [(1, "stop")] * 2
        assert [list(json.loads(line)) for line in lines] == [["id", "fields"]] * 2
    if "turns.txt" in text:
        assert lines[:1] == lines[1:2] and lines[-1] == "Your name is Ann."
    if "Who signs?" in text:
        assert len(lines) == 3 and lines[0].startswith("Who signs? ")
    if "> typed.jsonl" in text:
        typed = rows("typed.jsonl")                     # both mails have the id 1
        answers = {row["name"]: [row["choice"], row["p"][row["choice"]]] for row in typed}
        assert [json.loads(line) for line in lines] == [{"id": 1} | answers]
        assert [(row["name"], len(row["p"])) for row in typed] == [("kind", 3), ("reply", 2), ("urgent", 5)] * 2
    if "> thought.jsonl" in text:
        assert [(row["answer"] != "", row["end"]) for row in rows("thought.jsonl")] == [(True, "stop")] * 2
    if "replies.jsonl" in text:
        assert [(row["id"], row["end"]) for row in rows("replies.jsonl")] == [(1, "stop")] * 2
        assert {row["file"] for row in rows("summaries.jsonl")} == {path.name for path in Path().glob("*.txt")}
        answers = Path("answers.jsonl").read_bytes()
        command = next(line for line in text.splitlines() if "-w answers.jsonl" in line)
        Path("answers.jsonl").write_bytes(answers[:answers.index(b"\n") + 3])
        subprocess.run(as_it_runs(command), shell=True, check=True, stderr=subprocess.DEVNULL)
        assert Path("answers.jsonl").read_bytes() == answers and answers.count(b"\n") == 2
    if "batch_output.jsonl" in text:
        output = rows("batch_output.jsonl")
        assert [row["custom_id"] for row in output] == ["one", "two"]
        choice, = output[0]["response"]["body"]["choices"]
        assert choice["finish_reason"] == "stop" and "7" in choice["message"]["content"]
        assert choice["message"]["role"] == "assistant" and output[0]["error"] is None
    if "documents.jsonl" in text:
        documents, queries, pairs = map(rows, ("documents.jsonl", "queries.jsonl", "pairs.jsonl"))
        assert [sum(x * x for x in row["vector"]) for row in documents + queries] == pytest.approx([1] * 4)
        products = {(query["query"], document["document"]): sum(map(operator.mul, query["vector"], document["vector"]))
                    for query in queries for document in documents}
        assert {(row["query"], row["document"]): row["score"] for row in pairs} == pytest.approx(products)
        judged = [line.split("\t") for line in lines if "\t" in line]
        assert {tuple(row[1:]) for row in judged} == products.keys()
        likely = [float(row[0]) for row in judged]
        assert likely == sorted(likely, reverse=True) and 0 < likely[-1] < likely[0] < 1


@pytest.mark.parametrize("command", COMMANDS)
def test_inline_command(command, folder):
    if is_missing(command):
        pytest.skip("a program is not installed")
    if re.search(r"\./qwen3 \S+\.bin$", command):      # a conversation
        child = pexpect.spawn("sh", ["-c", command], cwd=str(folder), timeout=300,
                              env=substituted(folder) | {"TERM": "xterm"})
        child.expect("> ")
        child.sendline("/bye")
        assert finish(child) == 0
        return
    if command == "python3 export.py":
        done = subprocess.run(["sh", "-c", command], capture_output=True, env=substituted(folder))
        assert done.returncode == 1 and b"pip install" in done.stderr, done
        return
    run_all([command], folder)
    if command.endswith("--bits 4"):
        assert Path("Qwen3-0.6B-q4.bin").exists()


def test_other_code_is_no_command():
    """What has several words: options, lines of a conversation, messages; the tiny model's questions."""
    others = inline_code("\n\n".join(path.read_text() for path in READMES[:4]))
    others = [code for code in others if " " in code and not is_command(code)]
    assert not [code for code in others if not re.match(r"-|/|qwen3: |export.py --(check|form)$", code)]


def test_options_are_those_of_the_help():
    help_texts = call(QWEN3, "-h").stdout + export.__doc__
    for code in INLINE:
        if code.startswith("-"):
            assert re.search(rf"^ +(python export.py )?{code.split()[0]} ", help_texts, re.M), code


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.parent.name)
def test_what_is_named_is_there(path):
    """Files by links or inline code, functions and types by inline code."""
    text = path.read_text()
    sources = "".join(file.read_text() for file in (ROOT / "qwen3.c", ROOT / "export.py", ROOT / "Makefile"))
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("#"):
            assert re.search(rf"^#+ {link[1:].replace('-', ' ')}$", text, re.M | re.I), link
        elif link.startswith("../../actions/workflows/"):
            assert (ROOT / ".github/workflows" / link.removesuffix("/badge.svg").split("/")[-1]).exists(), link
        else:
            assert link == "../../releases" or link.startswith("https://") or (path.parent / link).exists(), link
    for code in inline_code(text):
        if re.fullmatch(r"[\w/]+\.(?:c|h|md|py|txt)|tests/\w+/?", code):
            places = ROOT, TESTS, ROOT / ".github"
            known = code == "tests/test" or re.search(rf"^```.*{code}", text, re.M | re.S)  # a reader's own file
            assert known or any((place / code).exists() for place in places), code
        elif re.fullmatch(r"[a-z]+_[a-z_]+|[A-Z][a-z]\w+", code):
            assert re.search(rf"\b{code}\b", sources), code


def test_places_to_change_are_there():
    """Each name in the table of what to change is defined in a source, or in tests/test.c as `_plain`."""
    table = CONTRIBUTING.read_text().split("## Changing the programs")[1].split("\n## ")[0]
    places = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")][1:]
    sources = "".join((ROOT / file).read_text() for file in ("qwen3.c", "export.py", "tests/test.c"))
    for code in inline_code(" ".join(places)):
        defined = rf"^(?:(?:static|INLINE) .*\b\w*{code}[(\[]|struct {code} |}} {code};|def {code}\(|class {code}\(|{code} = |#define {code}\b)"
        assert "." in code or re.search(defined, sources, re.M), code


def test_budgets():
    """Of lines, as CONTRIBUTING.md has them: of files, some together, and of the parts of qwen3.c, which add up."""
    text = CONTRIBUTING.read_text()
    rows = re.findall(r"^\| `([\w./*]+)` \| ([\d,]+) \|$", text, re.M)
    budgets = {name: int(lines.replace(",", "")) for name, lines in rows}
    assert [name for name, _ in rows] == ["qwen3.c", "export.py", "README.md", "tests/test_*.py"]
    for name, most in budgets.items():
        assert 0 < sum(path.read_bytes().count(b"\n") for path in ROOT.glob(name)) <= most, name
    most = [int(lines.replace(",", "")) for lines in
            re.search(r"Part I has ([\d,]+), Part II ([\d,]+) and Part III ([\d,]+)\.", text).groups()]
    assert sum(most) == budgets["qwen3.c"]
    parts = re.split(r"(?m)^(?=// =+\n// PART II)", (ROOT / "qwen3.c").read_text())     # "PART II" begins "PART III", too
    found = [part.count("\n") for part in parts]
    assert len(found) == 3 and all(map(int.__le__, found, most)), found


def test_shown_answers():
    """What `make run` writes last; in the tiny model's conversation, after `> ` and a turn, its answer."""
    shown = re.search(r"^\$ make run\n.*\n(.*)\n", READMES[0].read_text(), re.M)[1]
    result = call("make", "-s", "--no-print-directory", "run", cwd=ROOT)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == shown == "The capital of France is Paris."
    shown = re.search(r"^```text\n(.*?)^```$", READMES[4].read_text(), re.M | re.S)[1].splitlines()
    turns, answers = shown[::2], shown[1::2]
    assert len(turns) == 3 and all(turn.startswith("> ") for turn in turns)
    chat = call(QWEN3, TINY / "tiny.bin", "-m", "chat", "-t", 0, input="".join(turn[2:] + "\n" for turn in turns))
    assert chat.stdout.splitlines() == answers


# Of the models in the README's table: dim, hidden_dim, n_layers, n_heads, n_kv_heads, whether the
# classifier is the embedding, n_experts, n_experts_used, delta_v_heads.
SHAPES = {
    "Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, True, 0, 0, 16), "Qwen3.5-2B": (2048, 6144, 24, 8, 2, True, 0, 0, 16),
    "Qwen3.5-4B": (2560, 9216, 32, 16, 4, True, 0, 0, 32), "Qwen3.5-9B": (4096, 12288, 32, 16, 4, False, 0, 0, 32),
    "Qwen3.5-35B-A3B": (2048, 512, 40, 16, 2, False, 256, 8, 32), "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True, 0, 0, 0),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True, 0, 0, 0), "Qwen3-8B": (4096, 12288, 36, 32, 8, False, 0, 0, 0),
    "Qwen3-30B-A3B-Instruct-2507": (2048, 768, 48, 32, 4, False, 128, 8, 0)}
VOCABULARY, HEAD = 151936, 128
DELTA = {"vocab_size": 248320, "head_dim": 256, "attention_every": 4, "delta_k_heads": 16, "rotary_dim": 64,
         "gated_attention": 1}                          # of Qwen3.5


def model_bytes(shape, bits, of_a_token=False):
    """Bytes of OUT.bin, or those that a token reads, by the list of tensors that export.py writes."""
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, shared, n_experts, used, v_heads = shape
    group = 32 if bits == 4 else 64
    header = export.Header(**dict.fromkeys(export.Header._fields, 0) | {
        "dim": dim, "hidden_dim": hidden_dim, "n_layers": n_layers, "n_heads": n_heads,
        "n_kv_heads": n_kv_heads, "vocab_size": VOCABULARY, "head_dim": HEAD, "shared_classifier": shared,
        "group_size": group, "n_experts": n_experts, "n_experts_used": used,
        "layer_bits": 4 if bits == 4 else 0, "eight_bits": 4 if bits == 4 else 0} | (
            DELTA | {"delta_v_heads": v_heads, "shared_expert": int(n_experts > 0)} if v_heads else {}))
    size = 256
    for output in export.lay_out(header):
        if of_a_token and output.names == ["embed_tokens.weight"] and not shared:
            continue                                    # one row
        experts = used + header.shared_expert if of_a_token and len(output.names) > 1 else len(output.names)
        count = experts * math.prod(output.shape)
        size += count * output.bits // 8 + count // group * {32: 0, 8: 4, 4: 2}[output.bits]
    return size


def test_table_of_models():
    """A formula's figures, with two digits."""
    rows = re.findall(r"^\| (Qwen3[-.].*) \|$", READMES[0].read_text(), re.M)
    table = {row.split(" | ")[0].split(",")[0]: row.split(" | ")[1:] for row in rows}
    assert table.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        dim, _, n_layers, _, n_kv_heads, *_, v_heads = shape
        position = 8 * n_layers * n_kv_heads * HEAD // (2 if v_heads else 1)  # a quarter of the layers has heads of 256
        state = 4 * n_layers * 3 // 4 * (v_heads * HEAD * HEAD + 3 * HEAD * (2 * 16 + v_heads)) * (v_heads > 0)
        files = [model_bytes(shape, bits) for bits in (8, 4)]
        reads = [model_bytes(shape, bits, of_a_token=True) for bits in (8, 4)]
        weights = 2 * (files[0] - 256) / (1 + 4 / 64)   # in 16 bits, but for the norms' few
        download = weights + 2 * VOCABULARY * dim * (name == "Qwen3-0.6B")  # stored twice
        expected = [[download], files, [size + position * 4096 + state for size in files],
                    [position * 16000, position * 16000 * 5 / 16],
                    *([rate * 1e18 / size for size in reads] for rate in (10, 50, 100))]
        digits = [[float(f"{x / 1e9:.2g}") for x in cell] for cell in expected]
        assert table[name] == [" / ".join(f"{x:g}" for x in cell) for cell in digits], name


def test_ratios():
    """What the first lines say of llama.cpp is in the table: prompts and answers, of both models, in 8 and in 4 bits."""
    text = READMES[0].read_text()
    said = re.search(r"prompts run ([\d.]+) to ([\d.]+) times as fast as in llama.cpp,\s+and\s+answers\s+([\d.]+)\s+to\s+([\d.]+)", text)
    ours, _, ours_4, theirs, theirs_4 = (
        [[float(x) for x in cell.split(" / ")] for cell in row.split(" | ")] if "| |" not in row else None
        for row in re.findall(r"^\| (?:qwen3.c|8 bits|4 bits|llama.cpp|Q4_0)[^|]*\| (.*) \|$", text, re.M))
    ratios = [[a / b for row, other in ((ours, theirs), (ours_4, theirs_4)) for i in kind for a, b in zip(row[i], other[i])]
              for kind in ((0, 2), (1, 3))]
    assert [f"{f(kind):.1f}" for kind in ratios for f in (min, max)] == list(said.groups())


def test_picture_of_the_heads():
    """Its texts say what the model does now: the tokens, the heads that find the name, the answer without these."""
    def texts(svg):
        return [(text.get("class"), text.text) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    drawn = ElementTree.fromstring(heads.draw(*heads.shares()))
    assert texts(ElementTree.parse(heads.PICTURE)) == texts(drawn), "changed: python tests/heads.py, and look at it"
    assert len([style for style, _ in texts(drawn) if "found" in style]) == 8


@pytest.mark.slow
def test_new_user(folder, tmp_path_factory):
    """The README's first two blocks in a fresh clone, with the real git and make."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git, or no repository")
    home = tmp_path_factory.mktemp("home")
    env = substituted(folder) | {"PATH": f"{home}/bin:{environment()['PATH']}"}
    (home / "bin").mkdir()
    shutil.copy(folder / "bin/uv", home / "bin")
    first, second = BLOCKS[:2]
    assert first[0].startswith("git clone ADDRESS qwen3.c && ") and second == ["make run\n"]
    assert first[1].startswith("uv run export.py Qwen/Qwen3-0.6B-GGUF Qwen3-0.6B.bin ")
    clone = first[0].replace("ADDRESS", f"-q {shlex.quote(str(ROOT))}")
    model = "mkdir Qwen; ln -s ../tests/tiny/model Qwen/Qwen3-0.6B-GGUF\n"
    done = subprocess.run(["sh", "-e", "-c", "".join([clone, model, *first[1:2], *second, *first[2:]])], cwd=home,
                          capture_output=True, text=True, timeout=1200, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris.\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "Sorry, I do not know that.", done.stdout

"""export.py on harmful files and first mistakes: within 60 s of CPU time and 1 GB, one line; what it writes runs."""
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import LAST, experts, sentence_transformers, sparse_checkpoint
from conftest import ROOT, export_process, export_py as export, measures, refused
from test_templates import CHATML


def measured(*args, cwd):
    """(exit status, lines of stderr) of export.py, which must stay within its bounds."""
    done = export_process(*args, measure=True, cwd=cwd)
    seconds, peak = map(float, done.stdout.split()[-2:])
    print(f"{seconds:.1f} s, {peak / 1e6:.0f} MB, exit {done.returncode}: {done.stderr.strip():.300}")
    assert seconds < 60 and peak < 1e9
    return done.returncode, done.stderr.splitlines()


# ---------------------------------------------------------------------------- templates

def not_tried(template, found):
    """A process that does not end well says nothing of its template: a slow machine would get a wrong file."""
    with pytest.raises(export.Refused, match=f"the chat template: it can't be tried out.* found {found}$"):
        export.find_verified_pieces(template + CHATML, {})


@pytest.mark.parametrize("template", [
    "{{ 9**(9**9) }}",  # computed while the template is compiled, where exceptions are caught
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3])
def test_endless_template(template, monkeypatch):
    monkeypatch.setattr(export, "TEMPLATE_SECONDS", 1)
    not_tried(template, "none")


@measures
@pytest.mark.parametrize("template", [
    "{{ messages|tojson(indent=2*10**9) }}", "{{ 'x' * 3 * 10**9 }}",
    "{% set x = namespace(a='x') %}{% for i in range(99) %}{% set x.a = x.a + x.a %}{% endfor %}"])
def test_template_that_wants_all_memory(template):
    not_tried(template, "exit status 1")


def test_template_that_writes_too_much():
    export.Notices.hints.clear()
    assert export.find_verified_pieces("{{ 'x' * 10**6 }}" + CHATML, {}) == (None, ["gues"])
    assert "5,000,000 characters" in export.Notices.hints[0]


def test_template_s_process_has_nothing_of_its_surroundings(tmp_path, monkeypatch):
    """It has this process' jinja2, but no token, no PYTHONPATH, and no module of the current directory."""
    where = Path(export.jinja2.__file__).parents[1]
    for name in ("jinja2", "json", "resource", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    export.Notices.hints.clear()
    assert export.find_verified_pieces(CHATML, {})[0] and not export.Notices.hints
    seen = ("import os, jinja2; assert jinja2.__file__.startswith(sys.argv[1])\n"
            "    assert set(os.environ) <= {'SYSTEMROOT', 'LC_CTYPE'}, os.environ\n"
            "    print(json.dumps([[[sys.argv[1], None]] * 9999, None]))\n    return\n    ")
    source = export.inspect.getsource(export.run_template)
    code = source.replace("source, variables, ", seen + "source, variables, ")
    monkeypatch.setattr(export.inspect, "getsource", lambda _: code)
    assert set(export.render_all("", {}, [("x", None)]).values()) == {str(where)}


def test_template_s_process_that_dies_or_cannot_start(checkpoint, refuses, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    not_tried("", "exit status 1")
    ck = checkpoint()
    ck.settings["chat_template"] = CHATML
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    refuses(ck, "/nowhere/python: can't be read")


# ---------------------------------------------------------------------------- files

@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json",
                                  "chat_template.jinja", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "Git LFS pointer"])
def test_what_is_no_regular_file(saved, run, tmp_path, name, kind):
    file = saved / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "directory":
        file.mkdir()
    else:
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234567\n")
        refused(run("in"), f"{name}: not downloaded.*git lfs pull.*a Git LFS pointer")
        (tmp_path / "m.gguf").write_bytes(file.read_bytes())
        refused(run("m.gguf"), "m.gguf: not downloaded.*git lfs pull")
        return
    refused(run("in"), f"{name}: can't be read, expected a regular file")


@pytest.mark.parametrize("name, size", [
    ("config.json", export.SETTINGS_SIZE), ("tokenizer.json", export.TOKENIZER_SIZE),
    ("chat_template.jinja", export.SETTINGS_SIZE)])
def test_large_texts(checkpoint, run, tmp_path, name, size):
    ck = checkpoint()
    ck.files["chat_template.jinja"] = CHATML
    file = ck.save(tmp_path / "in") / name
    file.write_bytes(file.read_bytes().ljust(size))
    assert run("in")[0] == 0
    file.write_bytes(file.read_bytes() + b" ")
    refused(run("in"), f"{name}: too large, expected at most {size} bytes")


def test_a_large_tokenizer_config(checkpoint, run, tmp_path):
    """It may have each added token, too. Together with tokenizer.json it is bounded."""
    ck = checkpoint(vocab_size=10_000)
    new = [{"content": f"<|sound_{i}|>", "id": i, **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False), "special": True}
           for i in range(len(ck.tokenizer["model"]["vocab"]) + len(ck.tokenizer["added_tokens"]), 9000)]
    ck.tokenizer["added_tokens"] += new
    ck.settings["added_tokens_decoder"] = {str(token["id"]): token for token in ck.tokenizer["added_tokens"]}
    folder = ck.save(tmp_path / "in")
    file, other = folder / "tokenizer_config.json", folder / "tokenizer.json"
    assert file.stat().st_size > export.SETTINGS_SIZE and run("in")[0] == 0
    most = export.SETTINGS_SIZE + export.TOKENIZER_SIZE - other.stat().st_size
    file.write_bytes(file.read_bytes().ljust(most + 1))
    refused(run("in"), f"tokenizer_config.json: too large, expected at most {most} bytes")
    other.write_bytes(other.read_bytes().ljust(export.TOKENIZER_SIZE + 1))
    refused(run("in"), f"tokenizer_config.json: too large, expected at most {export.SETTINGS_SIZE} bytes")


def test_many_tensors(checkpoint, run, tmp_path, monkeypatch):
    folder = checkpoint().save(tmp_path / "in", 2)
    index = folder / "model.safetensors.index.json"
    n = len(json.loads(index.read_text())["weight_map"])
    index.write_bytes(index.read_bytes().ljust(10 << 20))  # as large as that of 93,000 tensors
    monkeypatch.setattr(export, "MOST_TENSORS", n)
    assert run("in")[0] == 0
    monkeypatch.setattr(export, "MOST_TENSORS", n - 1)
    refused(run("in"), "index.json: too many tensors", f"at most {n - 1}, found more")


@pytest.mark.parametrize("n, data, said", [
    (1, struct.pack("<Q1sI", 1, b"x", 400_000) + b"\xff" * 8 * 400_000 + struct.pack("<IQ", 0, 0),
     "shape of x, expected up to 4 dimensions.*found 400000"),
    # Names of many parts that are long would take all memory
    (1, struct.pack("<Q65s2I3Q", 65, b"x" * 65, 1, 0, 32, 0, 0), "64 letters of its name, found 1, 65"),
    # A small file would be many large tensors
    (2, b"".join(struct.pack("<Q1sI2QIQ", 1, name, 2, 32, 32, 0, 0) for name in (b"a", b"b")) + bytes(4160),
     "m.gguf: tensors that overlap, expected 8192 bytes or more, found 4")], ids=["shape", "name", "overlap"])
def test_gguf_s_tensors(run, tmp_path, n, data, said):
    (tmp_path / "m.gguf").write_bytes(struct.pack("<4sI2Q", b"GGUF", 3, n, 0) + data)
    refused(run("m.gguf"), said)


@pytest.mark.parametrize("path", ["../outside", "/tmp", "1_Pooling/../../outside", ".."])
def test_modules_outside_the_checkpoint(checkpoint, run, tmp_path, path):
    ck = sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling", "Normalize")
    ck.files["modules.json"] = json.dumps([
        {"type": f"x.{name}", "path": where} for name, where in (("Transformer", ""), ("Pooling", path), ("Normalize", ""))])
    for folder in ("in/1_Pooling", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "outside/config.json").write_text(json.dumps(LAST))
    refused(run(ck.save(tmp_path / "in")), "modules.json: path of its modules", re.escape(path))


# ---------------------------------------------------------------------------- tokenizer.json

def piece(kind, name):
    return {kind: {"id": name, "type_id": 0}}


def with_template(ck, single, ids=(1,)):
    ck.tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [],
        "special_tokens": {"B": {"id": "B", "ids": list(ids), "tokens": ["x"] * len(ids)}}}
    return ck


A, B = piece("Sequence", "A"), piece("SpecialToken", "B")


@pytest.mark.parametrize("single, ids, pattern", [
    ([A, piece("Sequence", "B")], [1], "post_processor.*Sequence"),
    ([A, piece("SpecialToken", "C")], [1], "post_processor.*found.*'C'"),
    ([B], [1], "broken"), ([A, A], [1], "broken"), ([A, B], ["x"], "token id"),
    ([A, B], [2 ** 40], "token id"), ([A, B], [2 ** 31], "token ids.*below vocab_size"),
    ([A, "x"], [1], "broken"), ([A] + [B] * 1001, [1], "at most 1000 ids, found more"),
    ([B] * 501 + [A], [1, 2], "at most 1000 ids, found more"),
    ([A] + [B] * 3000, [1] * 30_000, "at most 1000 ids, found more"),
    ([B] * 501 + [A] + [B] * 501, [1], "at most 1000 ids, found more")])
def test_post_processors_refused(checkpoint, refuses, single, ids, pattern):
    refuses(with_template(checkpoint(), single, ids), "tokenizer.json|in:", pattern)


def test_ids_made_to_collide(checkpoint, refuses):
    """Numbers with one hash value make a dictionary as slow as a list."""
    ck = checkpoint()
    ck.tokenizer["model"]["vocab"] |= {f"x{i}": i * (2 ** 61 - 1) for i in range(50_000)}
    began = time.process_time()
    refuses(ck, "tokenizer.json: ids", "found 2305843009213693951")
    assert time.process_time() - began < 20             # about 0.1; squares of it take a minute


# ---------------------------------------------------------------------------- limits of values

def test_yarn_option_that_makes_the_context_too_long(checkpoint, run, tmp_path):
    checkpoint(max_position_embeddings=2 ** 30).save(tmp_path / "in")
    assert run("in")[0] == 0
    refused(run("in", "--yarn", 2), "max_position_embeddings.*found 2147483648")


FIXED = {"shared_classifier", "group_size", "rope_scaling", "rope_factor", "qkv_bias", "no_qk_norm",
         "no_topk_norm", "layer_bits", "eight_bits", "panels", "mode", "rotary_dim", "gated_attention",
         "shared_expert", "presence"}  # export.py writes no others
KEYS = {  # qwen3.c's name of a number -> the keys of the JSON files
    "dim": ["hidden_size"], "hidden_dim": ["intermediate_size", "moe_intermediate_size"],
    "n_layers": ["num_hidden_layers"], "n_heads": ["num_attention_heads"],
    "n_kv_heads": ["num_key_value_heads"], "max_seq_len": ["max_position_embeddings"],
    "n_experts": ["num_experts"], "n_experts_used": ["num_experts_per_tok"],
    "attention_every": ["full_attention_interval"], "delta_k_heads": ["linear_num_key_heads"],
    "delta_v_heads": ["linear_num_value_heads"],
    "repetition": ["repetition_penalty"]}


def test_limits_are_those_of_qwen3():
    """qwen3.c names each number that it takes from the header or the tokenizer file."""
    text = (ROOT / "qwen3.c").read_text()
    number = {"INT_MAX": 2 ** 31 - 1, "FLT_MIN": 2.0 ** -126, "1 << 20": 1 << 20, "1 << 30": 1 << 30}
    limits = {}
    for name, *bounds in re.findall(r"TAKE\([^,]+, (\w+), ([^,]+), ([^,]+)\);", text):
        if name not in FIXED:
            found = tuple(number[bound] if bound in number else float(bound.rstrip("f")) for bound in bounds)
            limits |= dict.fromkeys(KEYS.get(name, [name]), found)
    limits["vocab_size"] = (1, 1 << 20)  # qwen3 takes more, but export.py builds a table of it
    ours = {key: (low, high) for key, (low, high, *_) in export.NUMBERS.items()}
    # The file has what YaRN's numbers make, not they themselves, and no window
    limits |= {key: ours[key] for key in (export.ORIGINAL, "max_window_layers")}
    assert limits == dict.fromkeys(limits, export.OTHER_LIMITS[:2]) | ours


# ---------------------------------------------------------------------------- first mistakes

@pytest.mark.parametrize("option, shown", [
    ("-h", "export.py SOURCE [OUT.bin]"), ("--help", "export.py SOURCE [OUT.bin]"),
    ("--version", f"export.py {export.VERSION}\n")])
def test_help_without_packages(option, shown):
    """-S: without site-packages."""
    done = subprocess.run([sys.executable, "-I", "-S", ROOT / "export.py", "x", option], capture_output=True, text=True)
    assert done.returncode == 0 and shown in done.stdout, done.stderr


def test_the_summary_ends_with_the_command_to_run(checkpoint, run, tmp_path):
    """An embedding model is asked nothing."""
    checkpoint().save(tmp_path / "my model")
    sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling", "Normalize").save(tmp_path / "in")
    assert run("my model")[1][0].endswith("""./qwen3 'my model.bin' -i "Why is the sky blue?\"""")
    assert run("in")[1][0].endswith("""./qwen3 in.bin -i "The sky is blue.\"""")


# ---------------------------------------------------------------------------- whole processes

def many_post_processors(ck, folder):
    """The ids grow with each step, and so does the time for a copy of them."""
    step = with_template(ck, [B] * 900 + [A], [1]).tokenizer["post_processor"]
    ck.tokenizer["post_processor"] = {"type": "Sequence", "processors": [step] * 400}
    ck.save(folder)


def many_experts(ck, folder):
    """A small file that implies 50 million tensors."""
    ck.config |= experts(4096) | {"num_hidden_layers": 4096}
    ck.save(folder)


def large_vocabulary(ck, folder):
    """Its embedding is a hole in a file."""
    sparse_checkpoint(ck, folder, vocab_size=1 << 25, hidden_size=64)


def costly(text: str, size: int) -> str:
    """This JSON object with a further member of lists, which take most memory when parsed."""
    text = text[:-1] + ', "x": ['
    return text + "[{}]," * ((size - len(text) - 3) // 5) + "0]}"


def costly_json(ck, folder):
    ck.save(folder)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        size = export.TOKENIZER_SIZE if name == "tokenizer.json" else export.SETTINGS_SIZE
        (folder / name).write_text(costly((folder / name).read_text(), size))


def costly_header(ck, folder):
    costly_json(ck, folder)
    text = costly('{"y": 0}', export.TENSORS_SIZE).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


ATTACKS = {  # name -> (attack, exit status, pattern)
    "post-processors": (many_post_processors, 1, "at most 1000 ids"),
    "experts": (many_experts, 1, "layers times experts, expected at most 100000, found 16777216"),
    "vocabulary": (large_vocabulary, 1, "vocab_size, expected .* to 1048576, found 33554432"),
    "costly JSON": (costly_json, 0, "wrote"),
    "costly header": (costly_header, 1, "broken"),
}


@measures
@pytest.mark.slow
@pytest.mark.parametrize("which", ATTACKS)
def test_time_and_memory(checkpoint, tmp_path, which):
    attack, status, pattern = ATTACKS[which]
    attack(checkpoint(), tmp_path / "in")
    found, err = measured("in", cwd=tmp_path)
    assert found == status and len(err) <= 2 and re.search(pattern, " ".join(err)), err


@measures
@pytest.mark.slow
@pytest.mark.parametrize("kind, size, count", [
    (0, 1, 2 * 10 ** 9), (2, 2, (1 << 23) - 100), (0, 1, (1 << 24) - 100), (8, 8, 1 << 20)])
def test_time_and_memory_of_arrays_in_gguf(tmp_path, kind, size, count):
    """The array lies in a hole of the file, but for u16, where each value takes an object."""
    head = struct.pack("<4sI2QQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"x", 9, kind, count)
    with open(tmp_path / "m.gguf", "wb") as file:
        file.write(head)
        file.write(b"\xff" * size * count if size == 2 else b"")
        file.truncate(len(head) + size * count)
    refused(measured("m.gguf", cwd=tmp_path), "bytes of metadata" if count > 1 << 24 else "general.architecture")

"""export.py from start to end: arguments in, files, standard error and exit status out."""
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from checkpoints import sparse_checkpoint
from conftest import ROOT, export_process, export_py as export, measures, refused, shell


def test_names_with_control_characters_stay_one_line(checkpoint, run, tmp_path):
    ck = checkpoint()
    ck.tensors["layers.0.mlp.experts.evil\n\x1b[31m"] = np.zeros(3, np.float32)
    refused(run(ck.save(tmp_path / "in"), "out.bin"), r"evil\\n\\x1b\[31m")
    ck.tensors["layers.0.mlp.experts." + "z" * 9999] = ck.tensors.pop("layers.0.mlp.experts.evil\n\x1b[31m")
    status, err = run(ck.save(tmp_path / "in"), "out.bin")
    assert status == 1 and len(err[0]) < 1100
    refused(run("x" * 5000), r"xx \.\.\. xx.*: can't be read.*found File name too long$")


@pytest.mark.parametrize("where", ["normalize_config", "read_header", "lay_out", "encode", "read_added",
                                   "find_verified_pieces", "decode_vocabulary", "score_merges"])
def test_our_own_bugs(saved, refuses, monkeypatch, where):
    """They are not blamed on a file. The line says where they are."""
    monkeypatch.setattr(export, where, lambda *_: {}["a bug"])
    refuses(saved, "^export.py: out.bin: export.py failed, .*found KeyError: 'a bug', in lines .[0-9]+, ")


@pytest.mark.parametrize("args, expected", [
    (["in", "a.bin"], "a.bin"), (["b.bin", "in"], "b.bin"), (["in"], "in.bin"),
    (["in/"], "in.bin"), (["in.bin", "in"], "in.bin"), (["in", "deep/c.bin"], "deep/c.bin")])
def test_order_of_arguments_and_default_name(saved, exports, tmp_path, args, expected):
    (tmp_path / "deep").mkdir()
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    assert expected in exports(*args)[0]
    new = {p for p in tmp_path.rglob("*") if p.is_file()} - before
    assert new == {tmp_path / expected, tmp_path / f"{expected}.tokenizer"}


@pytest.mark.parametrize("args, pattern", [
    ([], "SOURCE"), (["a", "b.bin", "c"], ""), (["a", "b"], ""), (["--what", "a"], "--what"), (["-x"], "-x"), ([""], ""),
    (["a", "--group-size", "48"], "^export.py: --group-size: wrong value, expected 32 or 64 or 128 or 256, found '48' [(]see"),
    *[(["a", name, "b.bin"], "[(]OUT.bin follows SOURCE; see export.py -h") for name in ("--outfile", "-o", "--output", "--out")],
    *[(["a", *args], f"{' '.join(args)} [(]it is --bits 8 or 4; see") for args in (["--outtype", "q8_0"], ["--quantize"], ["-q4"])],
    (["a", "--group-size", "x"], "found 'x'"), (["a", "--group-size", "064"], "found '064'"),
    (["a", "--group-size"], "--group-size"), (["a", "--chat-template"], "--chat-template"),
    (["a", "--check", "--group-size", "32"], "--group-size"), (["a", "--che"], "--che"),
    (["a", "--bits", "5"], "^export.py: --bits: wrong value, expected 8 or 4, found '5' [(]see"),
    (["a", "--bits", "five"], "expected 8 or 4, found 'five'"),
    (["a", "--bits=4", "--check"], "--bits, --group-size: --check takes them from OUT.bin, expected `export.py --check SOURCE OUT.bin` "
     "[(]with four bits it ends in -q4.bin[)]"), (["a", "--yarn"], "--yarn"),
    *[(["a", "--yarn", value], f"--yarn.*{value!r}") for value in ("1", "0", "-2", "65", "x", "nan", "inf", "")]])
def test_usage_errors(run, args, pattern):
    status, err = run(*args)
    assert status == 2 and len(err) == 1 and err[0].startswith("export.py: ") and re.search(pattern, err[0]), err


@pytest.mark.parametrize("name", ["\x1b[31m", "\u202ecod", "\u2066", "\x9b", "\udcff"])
@pytest.mark.parametrize("args", [["in", "x{}"], ["in", "--yarn", "{}"], ["--{}"], ["--bits", "{}"],
                                  ["missing{}"], ["in", "{}.bin"]])
def test_names_drive_no_terminal(saved, run, name, args):
    """Neither in usage errors nor in refusals nor in the summary."""
    status, err = run(*(arg.format(name) for arg in args))
    assert status == (0 if args[-1] == "{}.bin" else 1 if "missing" in args[-1] else 2)
    assert all(line.isprintable() for line in err) and repr(name)[1:-1] in err[0], err


def test_no_stderr(checkpoint, tmp_path):
    """It is closed: nothing takes its place, neither stdout nor OUT."""
    ck = checkpoint()
    ck.save(tmp_path / "in")
    done = shell(f"cd {tmp_path} && {sys.executable} {ROOT}/export.py in out.bin 2>&-; {sys.executable} {ROOT}/export.py no 2>&-")
    assert (done.returncode, done.stdout) == (1, b"") and (tmp_path / "out.bin").read_bytes() == ck.expected()


def test_windows():
    """It has no os.pread: it is said at once."""
    code = f"import os, runpy; os.name = 'nt'; runpy.run_path({str(ROOT / 'export.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "in"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch("export.py: Windows: not supported, expected Linux.* found Windows\n", done.stderr), done


def test_existing_files_are_replaced_only_by_a_complete_export(checkpoint, run, exported_bytes, tmp_path):
    (tmp_path / "out.bin").write_text("old model")
    (tmp_path / "out.bin.tokenizer").write_text("old tokenizer")
    ck = checkpoint()
    ck.tensors["layers.1.mlp.up_proj.weight"][7].fill(np.inf)
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "infinity")
    assert (tmp_path / "out.bin").read_text() == "old model"
    assert (tmp_path / "out.bin.tokenizer").read_text() == "old tokenizer"
    assert exported_bytes(checkpoint()) == checkpoint().expected()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out.bin", "out.bin.tokenizer"]


def test_parts_that_others_left_or_hold(checkpoint, run, exported_bytes, tmp_path):
    """A killed process's file is used again, not one that a lock holds: a pid means nothing in a container."""
    ck = checkpoint()
    folder, parts = ck.save(tmp_path / "in"), [tmp_path / name for name in ("out.bin.part", "out.bin.tokenizer.part")]
    for held in parts:
        for part in parts:
            part.write_bytes(b"x" * 10_000_000)
        with open(held, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            refused(run(folder, "out.bin"), f"{held.name}: in use")
            assert held.read_bytes() == b"x" * 10_000_000 and not (tmp_path / "out.bin").exists()
    assert exported_bytes(folder) == ck.expected()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out.bin", "out.bin.tokenizer"]


@pytest.mark.parametrize("name", ["out.bin.part", "out.bin.tokenizer.part"])
def test_a_part_that_is_a_link(saved, run, tmp_path, name):
    """Somebody else may have put it there, to have another file emptied."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / name).symlink_to("victim")
    refused(run(saved, "out.bin"), f"^export.py: {name}: can't be read or written")
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "out.bin").exists()


def test_out_is_a_link(checkpoint, run, tmp_path):
    """The file that it names is written; the tokenizer file lies beside the link, or where its own link says."""
    ck = checkpoint()
    folder, disk = ck.save(tmp_path / "in"), tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "out.bin").symlink_to("disk/real.bin")
    for own in False, True:
        (tmp_path / "out.bin.tokenizer").unlink(missing_ok=True)
        if own:
            (tmp_path / "out.bin.tokenizer").symlink_to(disk / "t")
        assert run(folder, "out.bin")[0] == run("--check", folder, "out.bin")[0] == 0
        assert (tmp_path / "out.bin").is_symlink() and (disk / "real.bin").read_bytes() == ck.expected()
        assert (tmp_path / "out.bin.tokenizer").is_symlink() == own and (disk / "t").exists() == own
    disk.rename(tmp_path / "gone")
    refused(run(folder, "out.bin"), "disk: missing, expected the directory to write to")


def test_names_come_after_the_contents(saved, run, monkeypatch):
    """Both files are on the disk before the first gets its name; the last one, OUT.bin, says that the pair fits."""
    done = []
    for name in "fsync", "replace":
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, call=call, name=name: (done.append((name, *map(str, args[1:]))), call(*args)))
    assert run(saved, "out.bin")[0] == 0 and done == [
        ("fsync",), ("fsync",), ("replace", "out.bin.tokenizer"), ("replace", "out.bin")]


def test_too_little_space_is_found_before_writing(saved, run, tmp_path, monkeypatch):
    assert run(saved, "out.bin")[0] == 0
    size = sum((tmp_path / name).stat().st_size for name in ("out.bin", "out.bin.tokenizer"))
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export, "write_model", lambda *_: pytest.fail("it wrote"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=size - 1))
    refused(run(saved, "new.bin"), "disk space", f"{size} bytes", f"{size - 1} free")
    source = export.read_folder(saved)._replace(downloads=lambda: [(tmp_path, 50)])  # one on the hub
    monkeypatch.setattr(export, "find_source", lambda _: source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=size + 49))
    refused(run("org/in", "new.bin"), "disk space", f"{size + 50} bytes")
    monkeypatch.undo()


@pytest.mark.parametrize("out, pattern", [
    ("nowhere/out.bin", "nowhere: missing"), ("file/out.bin", "Not a directory"),
    ("folder.bin", "a directory"), ("longname" * 40 + ".bin", "name too long"),
    ("x.bin", "x.bin.tokenizer: can't be written, expected a file or nothing of this name, found a directory")])
def test_target_that_cannot_be_written(saved, run, tmp_path, out, pattern):
    (tmp_path / "file").write_text("")
    for name in "folder.bin", "x.bin.tokenizer":
        (tmp_path / name).mkdir()
    refused(run(saved, out), pattern)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.parent != saved) == [
        "file", "folder.bin", "in", "x.bin.tokenizer"]


@pytest.mark.parametrize("name, pattern", [
    ("no such place", "a GGUF file or a hub name.*found nothing$"), ("./org/name", "a GGUF file or a hub name"),
    ("some.txt", "a checkpoint's directory or a GGUF file.*b'This'"),
    ("here.gguf", "missing"), ("a/b.gguf", "missing"),
    ("empty", "not a checkpoint, expected config.json or a GGUF file"),
    ("lora", r"a LoRA adapter, no model, expected it merged .*merge_and_unload\(\), then save_pretrained\(\), found adapter_c"),
    ("models--org--tiny", "not a checkpoint, expected `export.py org/tiny`, whose cache this folder is, found blobs, refs, snapshots$"),
    ("my run", "not a checkpoint, expected `export.py 'my run/checkpoint-1000'`, its newest one, found checkpoint-1000, "),
    *[(f"a b/{name}", "a part of SOURCE, expected `export.py 'a b'`") for name in ("config.json", "pytorch_model.bin")],
    ("a b/page.GGUF", "broken"),           # one beside config.json, by its first bytes
    ("page.gguf", "not downloaded, expected its contents .* a download link.*, found a web page$"),
    # What to type instead of other programs' names
    ("model.safetensors", "a part of SOURCE, expected `export.py .`"),
    ("a b/model.safetensors", "a part of SOURCE, expected `export.py 'a b'`"),
    ("x.bin", r"no SOURCE, expected `export.py \[--check\] SOURCE x.bin`.*found OUT.bin alone$"),
    ("qwen3:0.6b", "missing.* such as Qwen/Qwen3-0.6B, found nothing$"), ("Qwen3-4b", "such as Qwen/Qwen3-4B,"),
    ("qwen3:30b-a3b-q4_K_M", "such as Qwen/Qwen3-30B-A3B,"), ("qwen", "such as Qwen/Qwen3-0.6B,"),
    *[(f"{scheme}/a/b", f"its host is not supported, expected huggingface.co or hf.co, found '{scheme.split('/')[2]}'$")
      for scheme in ("https://modelscope.cn", "http://huggingface.co.evil.com", "https://ollama.com")]])
def test_what_is_no_source(run, tmp_path, name, pattern):
    (tmp_path / "some.txt").write_text("This is a text, no GGUF file.")
    (tmp_path / "page.gguf").write_text("\n\n<!DOCTYPE html>")
    for folder in ("empty", "my run/checkpoint-200", "my run/checkpoint-1000", "lora", "a b",
                   *(f"models--org--tiny/{name}" for name in ("blobs", "refs", "snapshots"))):
        (tmp_path / folder).mkdir(parents=True)
    for file in "lora/adapter_config.json", "lora/adapter_model.safetensors", "a b/config.json", "a b/pytorch_model.bin":
        (tmp_path / file).write_text("{}")
    (tmp_path / "a b/page.GGUF").write_text("GGUF")
    refused(run(name), f"^export.py: {re.escape(name)}: .*{pattern}")


@pytest.mark.slow
@measures
def test_memory_stays_small_whatever_the_size(checkpoint, tmp_path):
    """264 MB of weights, one tensor of 246 MB (492 in fp32): far more than this allows."""
    folder = sparse_checkpoint(checkpoint(), tmp_path / "in")
    done = export_process(folder, "out.bin", measure=True, cwd=tmp_path)
    assert done.returncode == 0 and float(done.stdout.split()[-1]) < 200e6, done
    (tmp_path / "out.bin").unlink()


def test_progress_is_for_terminals_and_the_summary_for_logs(saved, exports, tmp_path, capfd):
    err = exports(saved, "out.bin")
    assert "wrote out.bin" in err[0] and capfd.readouterr() == ("", "")
    assert not re.search("\r|B/s", "\n".join(err))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    child = subprocess.Popen([sys.executable, ROOT / "export.py", saved, "out.bin"], cwd=tmp_path, stderr=theirs)
    os.close(theirs)
    seen = b""
    try:
        while block := os.read(ours, 4096):
            seen += block
    except OSError:  # Linux's way to say that the other side is closed
        pass
    assert child.wait(300) == 0 and b"100%" in seen and b"B/s" in seen


@pytest.mark.parametrize("file, content, said", [
    ("jinja2.py", "raise ImportError(\"No module named 'jinja2'\")", "No module named 'jinja2'"),
    ("jinja2-3.1.5.dist-info/METADATA", "Name: jinja2\nVersion: 3.1.5\n", "jinja2 3.1.5 is older than 3.1.6")])
def test_missing_packages_are_named_from_the_block_at_the_top(tmp_path, file, content, said):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    done = export_process("in", "out.bin", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"export.py: {said}: run it as `uv run export.py ...`")
    assert re.search("pip install 'numpy>=[0-9.]+' 'tokenizers>=.*' 'jinja2>=3.1.6' ", done.stderr)

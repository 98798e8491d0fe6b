"""Downloads, from a hub that is here."""
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from checkpoints import LAST, sentence_transformers
from conftest import ROOT, Hub, environment, export_py as export, refused, split_tokenizer
from test_templates import CHATML


def test_download_from_a_hub(checkpoint, hub, tmp_path):
    ck = sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling", "Normalize")
    ck.files |= {"README.md": "no", "pytorch_model.bin": "no", "chat_template.jinja": CHATML}
    ck.save(tmp_path / "hub/org/tiny", 2)
    status, err = hub.process(f"{hub.url}/org/tiny/tree/main?a=b")
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert hub.asked() >= {"model-00002-of-00002.safetensors", "chat_template.jinja", "1_Pooling/config.json"}
    assert not hub.asked() & {"README.md", "pytorch_model.bin", "original/consolidated.safetensors"}
    assert f"the download stays in {hub.cache}/models--org--tiny;" in err[-1]
    assert "hf cache rm model/org/tiny" in err[-1]
    assert split_tokenizer((tmp_path / "tiny.bin.tokenizer").read_bytes())[1][b"from"] == (
        f"org/tiny at {Hub.newest}, 8 bits in groups of 64, export.py {export.VERSION}".encode())
    refused(hub("org/absent", "out.bin"), "org/absent: neither here nor available", "HF_TOKEN", "RepositoryNotFound")
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep = lambda _: None")
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(tmp_path)}  # asked in vain
    for changes in {"HF_HUB_OFFLINE": "1"}, nowhere:
        (tmp_path / "tiny.bin").unlink()
        status, err = hub.process("org/tiny", **changes)
        assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
        assert len(err) == 1  # nothing was downloaded, and so nothing stays
        refused(hub.process("org/tiny", "x.bin", **changes, HF_HOME=str(tmp_path / "empty")),
                "org/tiny: not here, or not all, and the hub can't be", "network.*HF_ENDPOINT.*HF_HUB_OFFLINE")


@pytest.mark.parametrize("name, revision", [
    ("org/tiny@v1.0", "v1.0"), ("org/tiny@refs/pr/7", "refs/pr/7"), ("https://hf.co/org/tiny/tree/v1.0", "v1.0"),
    ("https://hf.co/org/tiny/tree/refs%2Fpr%2F7?x=y", "refs/pr/7"), ("hf.co/org/tiny/blob/v1.0/", "v1.0")])
def test_names_with_a_revision(monkeypatch, name, revision):
    asked = []
    monkeypatch.setattr(export, "find_model", lambda *model: asked.append(model))
    export.find_source(name)
    assert asked == [("org/tiny", revision, "")]


@pytest.mark.parametrize("name, revision", [("org/tiny@v1.0", "v1.0"), ("URL/org/tiny/tree/refs%2Fpr%2F7?x=y", "refs%2Fpr%2F7")])
def test_revisions(checkpoint, hub, tmp_path, name, revision):
    """A branch, a tag or a commit; the folder in the cache is that commit's."""
    ck = checkpoint()
    ck.files["chat_template.json"] = {"chat_template": CHATML}  # the hub's older place for it
    ck.save(tmp_path / "hub/org/tiny")
    ck.tensors["norm.weight"] *= 2
    ck.save(tmp_path / f"hub/org/tiny@{revision}")
    status, err = hub(name.replace("URL", hub.url))
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert not any("chat template" in line for line in err) and "chat_template.json" in hub.asked()
    assert hub(name.replace("URL", hub.url), "--check")[0] == 0
    (snapshot,) = (hub.cache / "models--org--tiny/snapshots").iterdir()
    (tmp_path / "tiny.bin").unlink()
    status, err = hub(snapshot)
    assert status == 0 and err[0].startswith("export.py: wrote tiny.bin ") and len(err) == 1, err


def test_a_path_with_a_typing_error_is_no_hub_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "find_model", lambda *_: pytest.fail("it asks the hub"))
    (tmp_path / "models").mkdir()
    refused(run("models/qwen/file.gguf"), "^export.py: models/qwen/file.gguf: missing")
    with pytest.raises(pytest.fail.Exception):
        run("other/qwen/file.gguf")


def test_ctrl_c_during_a_download(hub_tiny, tmp_path, monkeypatch):
    """It does not wait for the files under way."""
    answer, begun, end = Hub.answer, threading.Event(), threading.Event()
    def answer_late(self, *args):
        if self.command == "GET" and "model.safetensors" in self.path:
            begun.set()
            end.wait(300)
        with suppress(OSError):                 # there may be no one left
            answer(self, *args)
    monkeypatch.setattr(Hub, "answer", answer_late)
    child = subprocess.Popen([sys.executable, ROOT / "export.py", "org/tiny"], cwd=tmp_path, stderr=subprocess.PIPE,
                             env=environment(**hub_tiny.env))
    try:
        assert begun.wait(120)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == b"" and [p.name for p in tmp_path.iterdir()] == ["hub"]
    finally:
        end.set()
        child.kill()
        child.communicate()


@pytest.mark.parametrize("commit", ["../../../out", "main", "0123abc"])
def test_a_commit_that_is_none(hub_tiny, monkeypatch, commit):
    monkeypatch.setattr(Hub, "newest", commit)
    refused(hub_tiny("org/tiny"), "org/tiny: commit, expected 40 hexadecimal digits")


def test_a_wrong_file_in_the_cache(hub_tiny, tmp_path):
    """It stays there, so the message says what to delete."""
    hub, file = hub_tiny, tmp_path / "hub/org/tiny/model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    refused(hub("org/tiny"), f"org/tiny/model.safetensors: truncated.*; first delete {hub.cache}/models--org--tiny$")
    file.write_bytes(data)
    shutil.rmtree(hub.cache / "models--org--tiny")
    assert hub("org/tiny")[0] == 0


def test_a_hub_s_commit_and_index(checkpoint, hub, tmp_path, monkeypatch):
    """All files are of one commit, though the newest is always another; of weights those that the index names."""
    ck = checkpoint()
    ck.files["adapter_config.json"] = {}  # which may be in the weights already
    folder = ck.save(tmp_path / "hub/org/tiny", 2)
    (folder / "model-00003-of-00003.safetensors").write_text("of an earlier upload")
    answer, paths = Hub.answer, []
    def answer_newer(self, status, body, headers={"Content-Type": "application/json"}):
        paths.append(self.path)
        asked = re.search("[0-9a-f]{40}", self.path)
        commit = asked[0] if asked else f"{len(paths):040x}"
        if not asked and len(paths) > 1 and status == 200:
            body = json.dumps(json.loads(body) | {"siblings": []}).encode()     # of a commit without files
        answer(self, status, body.replace(Hub.newest.encode(), commit.encode()),
               {key: value.replace(Hub.newest, commit) for key, value in headers.items()})
    monkeypatch.setattr(Hub, "answer", answer_newer)
    status, err = hub("org/tiny")
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert any("adapter_config.json: the LoRA adapter is not applied; if the weights lack it" in line for line in err)
    assert len({re.search("/resolve/([^/]+)/", path)[1] for path in paths if "/resolve/" in path}) == 1, paths
    assert "model-00002-of-00002.safetensors" in hub.asked()
    assert "model-00003-of-00003.safetensors" not in hub.asked()


@pytest.mark.parametrize("config, out, pattern", [
    ({"architectures": ["Qwen3OmniForCausalLM"]}, "out.bin", "org/tiny/config.json: not Qwen3"),
    ({}, "nowhere/out.bin", "nowhere: missing"),
    ({}, "longname" * 40 + ".bin", "File name too long"),
    ({"num_hidden_layers": 4096, "hidden_size": 1 << 20, "intermediate_size": 1 << 20}, "out.bin", "too little disk space")])
def test_refused_before_the_weights_come(checkpoint, hub, tmp_path, config, out, pattern):
    ck = checkpoint()
    ck.config |= config
    ck.save(tmp_path / "hub/org/tiny")
    refused(hub("org/tiny", out), pattern)
    assert "model.safetensors" not in hub.asked()


@pytest.mark.parametrize("stored, refuses", [({"F8_E4M3": 9, "BF16": 1}, True), ({"U32": 9, "F16": 1}, True), ({"BF16": 9}, False), (None, False)])
def test_quantized_weights_are_not_downloaded(checkpoint, hub, tmp_path, monkeypatch, stored, refuses):
    """The hub knows the dtypes of a checkpoint whose quantization_config may be left from a training."""
    checkpoint(quantization_config={"quant_method": "fp8"}).save(tmp_path / "hub/org/tiny")
    monkeypatch.setattr(Hub, "metadata", {"safetensors": {"parameters": stored, "total": 10}} if stored else {})
    status, err = hub("org/tiny")
    assert status == refuses and ("model.safetensors" in hub.asked()) != refuses and "quantiz" in " ".join(err), err
    assert ("org/tiny/config.json: its quantized weights, expected" in err[0]) == refuses


def test_the_disk_of_a_download(hub_tiny, tmp_path):
    hub = hub_tiny
    hub.cache.mkdir(parents=True)
    (hub.cache / "models--org--tiny").write_text("")
    refused(hub("org/tiny"), "/hub/models--org--tiny.*: can't be read or written")
    (hub.cache / "models--org--tiny").unlink()
    os.truncate(tmp_path / "hub/org/tiny/model.safetensors", 1 << 43)  # a hole
    refused(hub("org/tiny"), "/hub: too little disk space, expected 8796[0-9]* bytes")
    assert "model.safetensors" not in hub.asked()
    with pytest.raises(OSError) as full, export.downloading("org/tiny"):  # as write() says it, without a name
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == "the hub's cache"

"""Downloads, from a hub that is here."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from checkpoints import LAST, sentence_transformers
from conftest import ROOT, Hub, environment, refused
from test_templates import CHATML


def test_download_from_a_hub(checkpoint, hub, tmp_path):
    ck = sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling")
    ck.files |= {"README.md": "no", "pytorch_model.bin": "no", "chat_template.jinja": CHATML}
    ck.save(tmp_path / "hub/org/tiny", 2)
    status, err = hub(f"{hub.url}/org/tiny/tree/main?a=b")
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert hub.asked() >= {"model-00002-of-00002.safetensors", "chat_template.jinja",
                           "1_Pooling/config.json"}
    assert not hub.asked() & {"README.md", "pytorch_model.bin", "original/consolidated.safetensors"}
    assert f"the download stays in {tmp_path}/cache/hub/models--org--tiny;" in err[-1]
    assert "hf cache rm model/org/tiny" in err[-1]
    refused(hub("org/absent", "out.bin"), "org/absent: neither here nor available", "HF_TOKEN",
            "RepositoryNotFound")
    (tmp_path / "tiny.bin").unlink()
    hub.stop()
    for changes in {"HF_HUB_OFFLINE": "1"}, {}:  # not allowed to ask, and no one there
        status, err = hub("org/tiny", **changes)
        assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
        assert hub("org/tiny", "--check", **changes)[0] == 0
        (tmp_path / "tiny.bin").unlink()
        refused(hub("org/tiny", "x.bin", **changes, HF_HOME=str(tmp_path / "empty")),
                "org/tiny: not here, and the hub can't be", "network.*HF_ENDPOINT.*HF_HUB_OFFLINE")


def test_ctrl_c_during_a_download(checkpoint, hub, tmp_path, monkeypatch):
    """It does not wait for the files under way."""
    checkpoint().save(tmp_path / "hub/org/tiny")
    answer, begun, end = Hub.answer, threading.Event(), threading.Event()

    def answer_late(self, *args):
        if self.command == "GET" and "model.safetensors" in self.path:
            begun.set()
            end.wait(300)
        with suppress(OSError):                 # there may be no one left
            answer(self, *args)
    monkeypatch.setattr(Hub, "answer", answer_late)
    child = subprocess.Popen([sys.executable, ROOT / "export.py", "org/tiny"], cwd=tmp_path, stderr=subprocess.PIPE,
                             env=environment(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "cache"),
                                             HF_HUB_ETAG_TIMEOUT="300", HF_HUB_DOWNLOAD_TIMEOUT="300"))
    try:
        assert begun.wait(120)
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert child.stderr.read() == b"" and sorted(p.name for p in tmp_path.iterdir()) == ["cache", "hub"]
    finally:
        end.set()
        child.kill()
        child.communicate()


def test_a_hub_s_commit_and_index(checkpoint, hub, tmp_path, monkeypatch):
    """All files are of one commit, though each question for the newest finds another; of the weights only those
    that the index names."""
    ck = checkpoint()
    folder = ck.save(tmp_path / "hub/org/tiny", 2)
    (folder / "model-00003-of-00003.safetensors").write_text("of an earlier upload")
    answer, paths = Hub.answer, []

    def answer_newer(self, status, body, headers={"Content-Type": "application/json"}):
        paths.append(self.path)
        asked = re.search("[0-9a-f]{40}", self.path)
        commit = asked[0] if asked else f"{len(paths):040x}"
        if not asked and len(paths) > 1 and status == 200:
            body = json.dumps(json.loads(body) | {"siblings": []}).encode()     # of a commit without files
        answer(self, status, body.replace(b"1" * 40, commit.encode()),
               {key: value.replace("1" * 40, commit) for key, value in headers.items()})
    monkeypatch.setattr(Hub, "answer", answer_newer)
    status, err = hub("org/tiny")
    assert status == 0 and (tmp_path / "tiny.bin").read_bytes() == ck.expected(), err
    assert len({re.search("/resolve/([^/]+)/", path)[1] for path in paths if "/resolve/" in path}) == 1, paths
    assert "model-00002-of-00002.safetensors" in hub.asked()
    assert "model-00003-of-00003.safetensors" not in hub.asked()


@pytest.mark.parametrize("config, out, pattern", [
    ({"architectures": ["Qwen3NextForCausalLM"]}, "out.bin", "org/tiny/config.json: not Qwen3"),
    ({"quantization_config": {"quant_method": "gptq"}}, "out.bin", "org/tiny/config.json:.*gptq"),
    ({}, "nowhere/out.bin", "nowhere: missing"), ({}, "folder.bin", "a directory"),
    ({}, "longname" * 40 + ".bin", "File name too long"),
    ({"num_hidden_layers": 4096, "hidden_size": 1 << 20, "intermediate_size": 1 << 20}, "out.bin",
     "too little disk space")])
def test_what_a_hub_s_json_shows_is_refused_before_the_weights(checkpoint, hub, tmp_path, config, out,
                                                               pattern):
    (tmp_path / "folder.bin").mkdir()
    ck = checkpoint()
    ck.config |= config
    ck.save(tmp_path / "hub/org/tiny")
    refused(hub("org/tiny", out), pattern)
    assert "model.safetensors" not in hub.asked()


def test_the_disk_of_a_download(checkpoint, hub, tmp_path):
    checkpoint().save(tmp_path / "hub/org/tiny")
    (tmp_path / "cache/hub").mkdir(parents=True)
    (tmp_path / "cache/hub/models--org--tiny").write_text("")
    refused(hub("org/tiny"), "cache/hub/models--org--tiny.*: can't be read or written")
    (tmp_path / "cache/hub/models--org--tiny").unlink()
    os.truncate(tmp_path / "hub/org/tiny/model.safetensors", 1 << 43)  # a hole
    refused(hub("org/tiny"), "/cache/hub: too little disk space, expected 8796[0-9]* bytes")
    assert "model.safetensors" not in hub.asked()

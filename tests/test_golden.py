"""The workplace's golden data (../shared/golden), where it is there: checkpoints with known
answers, tokenizer and chat cases. Nothing of it is copied into this repository."""
import json
import os
import re
import struct
import subprocess
import sys

import jinja2.sandbox
import numpy as np
import pytest
import tokenizers
from conftest import (ADDED, ROOT, export, output, perplexity, qwen3, records, shared, tokenize,
                      write_safetensors)
from reference import Model, read_tokenizer

MODELS = ["tied-bf16", "untied-f16-sharded", "theta5e6-2507", "yarn", "yarn-small", "qwen25-tied"]
WITH_BIN = ["tied-bf16", "untied-f16-sharded"]
PERPLEXITY = [pytest.param(name, False, id=name) for name in MODELS] + [
    pytest.param(name, True, id=name + "-model.bin") for name in WITH_BIN]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """golden(name, base): (expected.json, model.bin), the exported one or the folder's own. The
    repetition penalty of qwen25-tied is left out, as it is in its expected values."""
    exported = {}

    def get(name, base=False):
        folder = shared("golden", "models", name)
        if not base and name not in exported:
            directory = tmp_path_factory.mktemp(name)
            source = without_penalty(folder, directory / "hf")
            exported[name] = export(source, directory / "model.bin")
        expected = json.loads((folder / "expected.json").read_text())
        return expected, folder / "model.bin" if base else exported[name]
    return get


def without_penalty(folder, copy):
    """A copy of a checkpoint (links) whose generation_config.json has no repetition_penalty."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    generation = json.loads((folder / "generation_config.json").read_text())
    generation.pop("repetition_penalty", None)
    (copy / "generation_config.json").unlink()
    (copy / "generation_config.json").write_text(json.dumps(generation))
    return copy


# -- models

@pytest.mark.parametrize("name, base", PERPLEXITY)
def test_perplexity(golden, name, base):
    expected, path = golden(name, base)
    off = []
    for text in expected["texts"]:
        if base and not text["text"].isascii():
            continue
        n, nll, _ = perplexity(path, stdin=text["text"].encode())
        assert n == len(text["ids"]) - 1
        if text["name"] == "sampled":
            assert abs(nll - text["q8_mean_nll"]) < 0.03
        else:
            off.append(abs(nll - text["q8_mean_nll"]))
            assert off[-1] < max(0.05, 3 * text["q8_noise"]), text["name"]
    assert np.mean(off) < 0.025


@pytest.mark.parametrize("name, base", PERPLEXITY)
def test_greedy(golden, name, base):
    expected, path = golden(name, base)
    greedy = expected["greedy"]
    if base and not greedy["prompt_text"].isascii():
        pytest.skip("not ASCII")
    out = output(path, "-m", "generate", "-t", 0, "-n", 24, "-q", "-i", greedy["prompt_text"])
    assert out == bytes.fromhex(greedy["fp32_bytes_hex"])


@pytest.mark.parametrize("name", MODELS + ["embedding"])
def test_ids(golden, name):
    expected, path = golden(name)
    for text in expected["texts"]:
        prompt = expected["about"]["query_prompt"] if text.get("prompt_name") == "query" else ""
        assert tokenize(path, (prompt + text["text"]).encode()) == text["ids"], text["name"]
    for text in expected.get("special_texts", []):
        assert tokenize(path, text["text"].encode()) == text["ids_special_on"]


@pytest.mark.parametrize("name", WITH_BIN)
def test_export_equals_the_folders_own_file(golden, name):
    assert golden(name)[1].read_bytes() == golden(name, True)[1].read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_itself(golden, name):
    """tests/reference.py against transformers (fp32) and the folder's numpy program (q8), where
    sums in another order (BLAS differs by CPU and threads) round a few values the other way."""
    folder = shared("golden", "models", name)
    expected, path = golden(name)
    for precision, model in (("fp32", Model.from_checkpoint(folder, "fp32")),
                             ("q8", Model.from_checkpoint(folder)), ("q8", Model.from_bin(path))):
        for sequence in expected["sequences"]:
            logprobs = model.logprobs(sequence["ids"])
            close = 1e-4 if precision == "fp32" else max(0.005, 3 * sequence["q8_noise"]["logprob"])
            assert np.allclose(logprobs, sequence[precision]["logprobs"], rtol=0, atol=close)
        greedy = expected["greedy"]
        assert model.greedy(greedy["prompt_ids"], 24)[0] == greedy[precision + "_ids"]


def test_repetition_penalty_of_qwen25(tmp_path):
    """Exported as it is, it has the checkpoint's 1.1: where that changes what is most likely."""
    folder = shared("golden", "models", "qwen25-tied")
    path = export(folder, tmp_path / "model.bin")
    model, tokens = Model.from_bin(path), read_tokenizer(f"{path}.tokenizer", 768)[1]
    tried = 0
    for text in json.loads((folder / "expected.json").read_text())["texts"]:
        ids, lead = model.greedy(text["ids"], 6, penalty=1.1)
        if lead < 0.12 or {700, 702} & set(ids) or ids == model.greedy(text["ids"], 6)[0]:
            continue
        expected = b"".join(tokens[i] for i in ids if not 700 <= i < 714)  # special ones
        assert output(path, "-m", "generate", "-t", 0, "-n", 6, "-q",
                      stdin=text["text"].encode()) == expected, text["name"]
        tried += 1
    assert tried


def test_embedding(golden):
    """Cosines with the right vectors, as that folder's README sets the limits."""
    expected, path = golden("embedding")
    q8, fp32, vectors = [], [], {}
    for text in expected["texts"]:
        query = text["prompt_name"] == "query"
        prompt = expected["about"]["query_prompt"] if query else ""
        out = output(path, "-q", stdin=(prompt + text["text"]).encode())  # -m embed is the default
        vector = vectors[text["name"]] = np.array(json.loads(out))
        assert out.endswith(b"]\n") and out.count(b"\n") == 1
        assert abs(np.linalg.norm(vector) - 1) < 1e-6
        q8.append(vector @ text["q8"])
        fp32.append(vector @ text["fp32"])
        if text["name"] in ("empty", "one-letter"):
            assert q8[-1] > 0.9998
        assert Model.from_bin(path).embedding(text["ids"]) @ text["q8"] > 0.999
    assert min(q8) > 0.999 and np.mean(q8) > 0.9995
    assert min(fp32) > 0.998 and np.mean(fp32) > 0.999


# -- the real vocabulary

@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A checkpoint of nearly nothing with Qwen3's own tokenizer."""
    source, directory = shared("reference", "qwen3"), tmp_path_factory.mktemp("real")
    config = json.loads((source / "config-0.6b.json").read_text())
    config |= dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                   num_attention_heads=1, num_key_value_heads=1, head_dim=32)
    shapes = {"model.embed_tokens": (config["vocab_size"], 32), "model.norm": (32,)} | {
        "model.layers.0." + name: (32,) if "norm" in name else (32, 32) for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    write_safetensors(directory / "model.safetensors", {
        name + ".weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}, "BF16")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").symlink_to(source / "tokenizer.json")
    (directory / "tokenizer_config.json").symlink_to(source / "tokenizer_config.json")
    (directory / "generation_config.json").symlink_to(source / "generation_config-0.6b.json")
    return export(directory, directory / "model.bin")


def cases(*path):
    with open(shared("golden", *path), encoding="ascii") as file:
        return [json.loads(line) for line in file]


def test_tokenizer_cases(real):
    """All 2,750, with added tokens cut out and without."""
    wanted = cases("tokenizer", "cases.jsonl")
    for kind in ("marked", "plain"):
        found = records("tokens", real, texts=[(kind, case["text"].encode()) for case in wanted])
        assert len(found) == len(wanted)
        wrong = []
        for ids, case in zip(found, wanted):
            expected = case["ids"] if kind == "marked" else case.get("ids_plain", case["ids"])
            if ids != expected:
                wrong.append((case["kind"], case["text"], ids, expected))
        assert not wrong, f"{len(wrong)} wrong, the first: {wrong[0]}"


def test_tokenizer_cases_through_the_program(real):
    for case in cases("tokenizer", "cases.jsonl")[::25]:
        assert tokenize(real, case["text"].encode()) == case["ids"], case


def test_tokenizer_corpus(real):
    data = shared("golden", "tokenizer", "corpus.ids.u32").read_bytes()
    found = output(real, "-m", "tokenize", "-f", shared("golden", "tokenizer", "corpus.txt"))
    assert np.array_equal(np.array(found.split(), np.uint32), np.frombuffer(data, "<u4"))


def test_user_text_is_plain(real):
    """In chat the added tokens of a text are not cut out (the cases' ids_plain)."""
    plain = [case for case in cases("tokenizer", "cases.jsonl") if "ids_plain" in case][::12]
    assert len(plain) > 10
    for case in plain:
        if case["text"][:1] in "\n\r" or "\0" in case["text"]:
            continue                                    # would join the newline before it
        result = qwen3(real, "-i", case["text"].encode(), "-n", 1, "-v", "-t", 0)
        ids = [int(i) for i in re.match(rb"prompt ids: ([\d ]+)\n", result.stderr)[1].split()]
        start = len(tokenize(real, b"<|im_start|>user\n"))
        assert ids[start:start + len(case["ids_plain"])] == case["ids_plain"]


# -- chat: tests/render is a small program around qwen3.c's own functions

TEMPLATES = ["hybrid", "thinking-2507", "instruct-2507"]


@pytest.fixture(scope="module")
def chat_model(real, tmp_path_factory):
    """chat_model(template): the nearly empty model with this chat template."""
    made = {}

    def get(name):
        if name not in made:
            template = shared("reference", "qwen3", f"chat_template-{name}.jinja")
            directory = tmp_path_factory.mktemp(name)
            for file in real.parent.iterdir():
                if not file.name.startswith("model.bin") and file.name != "tokenizer_config.json":
                    (directory / file.name).symlink_to(file)
            config = json.loads((real.parent / "tokenizer_config.json").read_text())
            config["chat_template"] = template.read_text()
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
            made[name] = export(directory, directory / "model.bin")
        return made[name]
    return get


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_cases_of_one_turn(chat_model, template):
    """What chat with -i, -y and -r shows under -v."""
    tried = 0
    for case in cases("chat", "cases.jsonl"):
        messages = case["messages"]
        roles = [m["role"] for m in messages]
        if case["template"] != template or roles not in (["user"], ["system", "user"]) or any(
                "\0" in m["content"] for m in messages) or case["enable_thinking"] is None:
            continue
        system = ["-y", messages[0]["content"].encode()] if len(messages) == 2 else []
        result = qwen3(chat_model(template), "-i", messages[-1]["content"].encode(), *system,
                       "-r", int(case["enable_thinking"]), "-n", 1, "-v", "-t", 0)
        ids = re.search(rb"prompt ids: ([\d ]+)\n", result.stderr)
        assert ids, result
        assert [int(i) for i in ids[1].split()] == case.get("ids_safe", case["ids"]), case
        tried += 1
    assert tried > 5


def render(model, thinking, messages):
    return records("render", model, int(thinking), texts=[
        (m["role"], m["content"].encode()) for m in messages])[0]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_cases(chat_model, template):
    for case in cases("chat", "cases.jsonl"):
        if case["template"] == template and case["kind"] != "unusual":
            thinking = case["enable_thinking"] is not False
            assert render(chat_model(template), thinking, case["messages"]) == \
                case.get("ids_safe", case["ids"]), case


def test_chat_instruct_in_two_forms(chat_model):
    """With `</think>` in the template it strips, without it does not. (The ids are HF's: where a
    user types an added token they differ from ours.)"""
    added = re.compile("|".join(re.escape(text) for text, _ in ADDED))
    for case in cases("chat", "instruct-history.jsonl"):
        if any(added.search(m["content"]) for m in case["messages"] if m["role"] != "assistant"):
            continue
        assert render(chat_model("instruct-2507"), False, case["messages"]) == \
            case["ids_stripping"], case


@pytest.fixture(scope="module")
def qwen25(real, tmp_path_factory):
    """The nearly empty model with Qwen2.5's 22 added tokens and template, and HF's view of it:
    ids(messages), the template rendered as transformers does it, and encoded."""
    template = shared("reference", "qwen2.5", "chat_template.jinja").read_text()
    directory = tmp_path_factory.mktemp("qwen25")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (directory / name).symlink_to(real.parent / name)
    data = json.loads((real.parent / "tokenizer.json").read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["id"] < 151665]
    (directory / "tokenizer.json").write_text(json.dumps(data))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": "<|im_end|>", "chat_template": template}))
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string(template)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return export(directory, directory / "model.bin"), lambda messages: tokenizer.encode(
        compiled.render(messages=messages, tools=None, add_generation_prompt=True)).ids


def test_chat_qwen25(qwen25):
    """Conversations of the golden cases in Qwen2.5's format, where nobody types a control token:
    its own system prompt if none is given, `<think>` is plain text, nothing is stripped."""
    path, expected_ids = qwen25
    typed = re.compile("|".join(re.escape(text) for text, _ in ADDED[:22]))
    conversations = [case["messages"] for case in cases("chat", "cases.jsonl")
                     if case["kind"] != "unusual" and not any(
                         typed.search(m["content"]) for m in case["messages"])]
    assert len(conversations) > 100
    for messages in conversations:
        for thinking in (False, True):
            assert render(path, thinking, messages) == expected_ids(messages), messages
    result = qwen3(path, "-i", "<think>hi</think>", "-n", 1, "-v", "-t", 0)
    ids = [int(i) for i in re.search(rb"prompt ids: ([\d ]+)\n", result.stderr)[1].split()]
    assert ids == expected_ids([{"role": "user", "content": "<think>hi</think>"}])
    assert b"-r" not in result.stderr


# -- acceptance 4: the real shape (1.2 GB of weights, so only when asked for)

@pytest.mark.skipif(not os.environ.get("QWEN3_SLOW"), reason="slow and large: QWEN3_SLOW=1 runs it")
def test_real_shape(tmp_path):
    """A checkpoint of 0.6B's shape, random bf16: exports in under 1 GB of memory and runs."""
    source = shared("reference", "qwen3")
    config = json.loads((source / "config-0.6b.json").read_text())
    dim, hidden, heads, kv = 1024, 3072, 16 * 128, 8 * 128
    shapes = {"model.embed_tokens": (config["vocab_size"], dim), "model.norm": (dim,)}
    for i in range(28):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in {
            "input_layernorm": (dim,), "post_attention_layernorm": (dim,),
            "self_attn.q_norm": (128,), "self_attn.k_norm": (128,),
            "self_attn.q_proj": (heads, dim), "self_attn.k_proj": (kv, dim),
            "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, heads),
            "mlp.gate_proj": (hidden, dim), "mlp.up_proj": (hidden, dim),
            "mlp.down_proj": (dim, hidden)}.items()}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name + ".weight"] = dict(dtype="BF16", shape=shape, data_offsets=[at, at + size])
        at += size
    header = json.dumps(header).encode()
    r = np.random.default_rng(0)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for shape in shapes.values():
            x = r.standard_normal(shape, np.float32) * 0.03 if len(shape) == 2 else \
                np.ones(shape, np.float32)
            file.write((x.view("<u4") >> 16).astype("<u2").tobytes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "config.json").symlink_to(source / "config-0.6b.json")
    (tmp_path / "generation_config.json").symlink_to(source / "generation_config-0.6b.json")
    path = tmp_path / "model.bin"
    script = ("import resource, subprocess, sys\n"
              "subprocess.run(sys.argv[1:], check=True)\n"
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    result = subprocess.run([sys.executable, "-c", script, sys.executable, ROOT / "export.py",
                             tmp_path, path], capture_output=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(result.stdout.split()[-1]) * unit < 1e9
    run = (path, "-m", "generate", "-i", "The capital of France is", "-n", 8, "-t", 0, "-q")
    assert output(*run) == output(*run, "-j", 1, "-b", 1)
    path.unlink()                                       # pytest keeps its folders for a while
    (tmp_path / "model.safetensors").unlink()

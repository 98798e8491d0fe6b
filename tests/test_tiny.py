"""The tiny models: transformers' recorded figures (tests/tiny/expected.json), and that they talk."""
import json
import re

import numpy as np
import pytest
from conftest import TESTS, TINY, export, output, perplexity, prompts, qwen3, records, tokenize
from reference import Model, read_tokenizer

TINY35 = TESTS / "tiny35/tiny35.bin"
RECORDED = json.loads((TINY / "expected.json").read_text())


def rendered(tiny, ids):
    """The bytes of ids: as a raw prompt they give these ids again."""
    tokens = read_tokenizer(f"{tiny}.tokenizer", Model.from_bin(tiny).c["vocab_size"])[1]
    return b"".join(tokens[i] for i in ids)


def label(entry):
    return entry["text"] if "text" in entry else entry["messages"][-1]["content"] + (
        ", thinking" if entry["enable_thinking"] else "")


@pytest.mark.parametrize("entry", RECORDED["model"], ids=label)
def test_perplexity(tiny, entry):
    """8-bit weights and inputs cost a little against fp32; a mistake would cost far more."""
    prompt = rendered(tiny, entry["ids"])
    n, nll, _ = perplexity(tiny, stdin=prompt)
    assert n == len(entry["ids"]) - 1
    assert abs(nll - entry["q8"]["mean_nll"]) < 0.05
    assert abs(nll - entry["mean_nll"]) < 0.15


@pytest.mark.parametrize("entry", RECORDED["model"], ids=label)
def test_the_reference(tiny, entry):
    model = Model.from_checkpoint(TINY / "model", "fp32")
    assert np.allclose(model.logprobs(entry["ids"]), entry["logprobs"], rtol=0, atol=1e-3)
    assert abs(Model.from_bin(tiny).nll(entry["ids"]) - entry["q8"]["mean_nll"]) < 0.05


@pytest.mark.parametrize("entry", RECORDED["model"], ids=label)
def test_greedy(tiny, entry):
    if entry["greedy"] != entry["q8"]["greedy"]:
        pytest.skip("8 bits change the most likely token")
    prompt = rendered(tiny, entry["ids"])
    assert tokenize(tiny, prompt) == entry["ids"]
    text = rendered(tiny, entry["greedy"])
    out = output(tiny, "-m", "generate", "-f", "-", "-t", 0, "-n", 24, "-q", stdin=prompt)
    assert out == re.sub(rb"<\|(im_end|endoftext)\|>$", b"", text)


def changed(directory, file, **values):
    """The tiny model exported with other values in one of its JSON files."""
    (directory / "hf").mkdir()
    for path in (TINY / "model").iterdir():
        (directory / "hf" / path.name).symlink_to(path)
    (directory / "hf" / file).unlink()
    data = json.loads((TINY / "model" / file).read_text())
    (directory / "hf" / file).write_text(json.dumps(data | values))
    return export(directory / "hf", directory / "model.bin")


def test_repetition_penalty(tmp_path):
    """As transformers applies it: to prompt and answer, when greedy too, and an answer of none."""
    path = changed(tmp_path, "generation_config.json", repetition_penalty=2.0)
    differ = 0
    for entry, plain in zip(RECORDED["penalty"], RECORDED["model"]):
        assert entry["greedy"] == entry["q8"] and entry["penalty"] == 2
        differ += entry["greedy"] != plain["greedy"]
        model = Model.from_bin(path)
        assert model.greedy(entry["ids"], len(entry["greedy"]), 2.0)[0] == entry["greedy"]
        out = output(path, "-m", "generate", "-f", "-", "-t", 0, "-n", 24, "-q", stdin=rendered(path, entry["ids"]))
        text = rendered(path, entry["greedy"])
        assert out == re.sub(rb"<\|(im_end|endoftext)\|>$", b"", text)
    assert differ >= 4


def test_repetition_penalty_in_a_conversation(tmp_path):
    """The prompt is the whole conversation: the answers of earlier turns count."""
    path = changed(tmp_path, "generation_config.json", repetition_penalty=2.0)
    for turns in (b"Hello\n", b"Hello\nMy name is Anna.\n", b"My name is Anna.\nWhat is my name?\n"):
        talk = qwen3(path, "-m", "chat", "-t", 0, "-v", "-n", 12, stdin=turns)
        ids = Model.from_bin(path).greedy(prompts(talk)[-1], 12, 2.0)[0]
        text = rendered(path, ids).split(b"<|im_end|>")[0]
        assert text and talk.stdout.endswith(text + b"\n"), talk.stdout


def test_yarn_beyond_the_original_length(tmp_path):
    """A checkpoint's rope_scaling, at positions before and after the original length."""
    for entry in RECORDED["yarn"]:
        path = changed(tmp_path, "config.json", rope_scaling=entry["rope_scaling"])
        original, ids = entry["rope_scaling"]["original_max_position_embeddings"], entry["ids"]
        assert len(ids) > 2.5 * original
        exact = Model.from_checkpoint(tmp_path / "hf", "fp32").logprobs(ids)
        assert np.allclose(exact[-100:], entry["logprobs"], rtol=0, atol=1e-3)
        assert abs(exact[original:].mean() + entry["mean_nll"]) < 1e-4
        reference = Model.from_bin(path).logprobs(ids)
        assert abs(reference[original:].mean() + entry["q8"]["mean_nll"]) < 0.01
        prompt = rendered(path, ids)
        assert tokenize(path, prompt) == ids
        assert abs(perplexity(path, stdin=prompt)[1] + reference.mean()) < 0.01


def test_ids(tiny):
    for entry in RECORDED["tokenizer"]:
        assert tokenize(tiny, entry["text"].encode()) == entry["ids"], entry["text"]
    found = records("tokens", tiny, texts=[("plain", entry["text"].encode()) for entry in RECORDED["tokenizer"]])
    assert found == [entry.get("plain", entry["ids"]) for entry in RECORDED["tokenizer"]]


def test_chat_ids(tiny):
    """Of whole conversations, and of those of one turn through the program."""
    for entry in RECORDED["chat"]:
        thinking, messages = int(entry["enable_thinking"]), entry["messages"]
        found, = records("render", tiny, thinking, texts=[(m["role"], m["content"].encode()) for m in messages])
        assert found == entry["ids"], entry
        if [m["role"] for m in messages] in (["user"], ["system", "user"]) and messages[-1]["content"]:
            system = ["-y", messages[0]["content"]] if len(messages) == 2 else []
            result = qwen3(tiny, "-i", messages[-1]["content"], *system, "-r", thinking, "-v", "-n", 1)
            assert prompts(result) == [entry["ids"]], entry


def test_shipped_file_is_the_export(tiny):
    """`make run` uses a .bin that the repository ships, beside its checkpoint."""
    shipped, = TINY.glob("*.bin")
    for suffix in ".bin", ".bin.tokenizer":
        assert shipped.with_suffix(suffix).read_bytes() == tiny.with_suffix(suffix).read_bytes()


# -- what it says (greedily)

CAPITALS = {"France": "Paris", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
            "Canada": "Ottawa", "Kenya": "Nairobi"}


@pytest.mark.parametrize("args, answer", [
    *[(("-i", f"What is the capital of {country}?"), rf"[^\n<]*{city}[^\n<]*\n") for country, city in CAPITALS.items()],
    *[(("-m", "generate", "-n", 8, "-i", f"The capital of {country} is"), f" {city}(?s:.*)")
      for country, city in CAPITALS.items()],
    *[(("-i", f"What is {a} + {b}?"), rf".*\b{a + b}\b.*\n") for a, b in ((2, 3), (3, 4), (9, 1), (5, 8))],
    (("-i", "What is your name?", "-y", "Your name is Max."), ".*Max.*\n"),
    (("-i", "What is your name?"), "(?!.*Max).*\n"),
    (("-i", "What is the capital of France?", "-r", 1), "(?!.*think).*Paris.*\n")])
def test_answers(tiny, args, answer):
    result = qwen3(tiny, "-t", 0, "-q", *args)
    assert result.stderr == b"" and re.fullmatch(answer, result.stdout.decode()), result


@pytest.mark.parametrize("options", [(), ("-b", 1), ("-C", 8)], ids=lambda options: " ".join(map(str, options)))
def test_the_tiny_qwen35(options):
    """A trained model with delta layers, in turns: its state has what was said; counting is drafted, but with -b 1."""
    turns = ("My name is Anna.\nWhat is 3 + 4?\nCount from 1 to 30.\nWhat is the capital of Japan?\nWhat is my name?\n")
    result = qwen3(TINY35, "-m", "chat", "-t", 0, "-q", *options, stdin=turns.encode())
    assert result.returncode == 0 and result.stdout.decode().splitlines()[1:] == [
        "3 + 4 is 7.", ", ".join(map(str, range(1, 31))) + ".", "The capital of Japan is Tokyo.", "Your name is Anna."]


def test_likelihoods_of_the_tiny_qwen35():
    """Of a text in its own words they are reference.py's, token by token, and sure."""
    model = Model.from_bin(TINY35)
    text = b"Once upon a time there was a lazy fox named Momo. Momo lived in a forest and liked to run."
    logprobs = model.logprobs(tokenize(TINY35, text))
    assert logprobs.mean() > -0.6 and abs(perplexity(TINY35, stdin=text)[1] + logprobs.mean()) < 0.01


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_one_final_newline_of_a_pipe_is_dropped(tiny, tmp_path, ending):
    """Only the last one, and not of -i. Where there are -i and -f, an empty line is between them."""
    question = b"What is the capital\nof France?\n"
    (tmp_path / "q").write_bytes(question + ending)
    given = ("-v", "-n", 1)
    expected = prompts(qwen3(tiny, "-i", question if ending else question[:-1], *given))
    assert prompts(qwen3(tiny, *given, stdin=question + ending)) == expected
    assert prompts(qwen3(tiny, *given, "-f", tmp_path / "q")) == expected
    expected = prompts(qwen3(tiny, "-i", b"Hello\n\n" + (question if ending else question[:-1]), *given))
    assert prompts(qwen3(tiny, "-i", "Hello", *given, "-f", tmp_path / "q")) == expected


# -- drafts (prompt lookup): -b 1 leaves no room for them

STORY = "Once upon a time there was a cat. The cat was red. The cat was red. "


@pytest.mark.parametrize("options", [
    (), ("-c", 133), ("-C", 8), *[pytest.param(o, marks=pytest.mark.slow) for o in (
        ("-t", 0), ("-t", 0.3), ("-t", 2), ("-t", 1, "-k", 2, "-p", 1), ("-t", 0, "-a", 1.5),
        ("-t", 0.7, "-a", 0.1), ("-n", 77), ("-j", 3))]], ids=lambda o: " ".join(map(str, o)))
@pytest.mark.parametrize("prompt", [
    ("-i", "Count from 1 to 100."), ("-i", "Count from 1 to 100.", "-r", 1), ("-i", "Tell me a story."),
    ("-m", "generate", "-i", STORY * 3), ("-m", "generate", "-i", "1, 2, 3, 4, 5, 6, 7, 8, 9, " * 3),
    ("-m", "chat",)], ids=lambda prompt: " ".join(map(str, prompt))[:30])
def test_drafts_change_nothing(tiny, prompt, options):
    """The same text and the same counts."""
    turns = b"Count from 1 to 20.\nCount from 1 to 30.\nTell me a story.\n" * 2
    if prompt[0] == "-m" and "-n" not in options:
        options += ("-n", 150)
    runs = [qwen3(tiny, *prompt, *options, "-s", 1, "-v", *batch,
                  stdin=turns if prompt == ("-m", "chat") else b"") for batch in ((), ("-b", 1))]
    assert runs[0].returncode == runs[1].returncode == 0
    assert runs[0].stdout == runs[1].stdout
    drafts, plain = (re.sub(rb"at [\d.]+k?/s", b"", run.stderr) for run in runs)
    assert drafts == plain


# -- a scripted conversation: -m chat, one turn a line

def test_thinking_of_earlier_turns_is_dropped(tiny):
    result = qwen3(tiny, "-m", "chat", "-t", 0, "-r", 1, "-v", stdin=b"What is 2 + 3?\nWhat is 3 + 3?\n")
    text = rendered(tiny, prompts(result)[1])
    assert b"think>" not in text
    answer = result.stdout.split(b"\n")[0]
    assert text == (b"<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n" + answer
                    + b"<|im_end|>\n<|im_start|>user\nWhat is 3 + 3?<|im_end|>\n"
                    b"<|im_start|>assistant\n")

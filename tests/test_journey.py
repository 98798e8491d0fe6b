"""What tests/journey prints, with the functions of qwen3.c, is what the equations of tests/reference.py give."""
import re
import sys

import numpy as np
import pytest
from conftest import SENTENCES, TESTS, TINY, call, export, make_checkpoint, tokenize
from reference import Model, encode, journey, read_tokenizer, softmax
from test_model import SHAPES

TEXTS = ["The capital of France is", "Paris is the capital of France, and Tokyo is the capital of",
         "3 + 4 = ", " It's\r\n \"e\u0301\\\u0007\" in 東京",
         "<|im_start|>user\nWhat is Tokyo in Japanese?<|im_end|>\n<|im_start|>assistant\n"
         "<think>\n\n</think>\n\n"]


TINY35 = TESTS / "tiny35/tiny35.bin"


def run(*args):
    program = TESTS / "journey"
    assert program.exists(), "make tests/journey"
    return call(program, *args, cwd=TESTS.parent)


def program(*args):
    result = run(*args)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout


def read(path):
    """The model and its tokenizer, as reference.py reads them."""
    model = Model.from_bin(path)
    return model, read_tokenizer(f"{path}.tokenizer", model.c["vocab_size"])


def differences(printed, computed, tolerance=0.015):
    """Words, ids and positions must be equal, shares and probabilities within the tolerance, the
    lengths relatively within a third of it: where a value lies between two int8, one rounds it up
    and the other down. That may also decide which next tokens are the second to fifth."""
    both = [re.sub(" +", " ", text).splitlines() for text in (printed, "\n".join(computed))]
    words = [[re.sub(r"\d+\.\d+", "#", line) for line in lines[:-4]] for lines in both]
    numbers = [re.findall(r"\d+\.\d+", " ".join(lines)) for lines in both]
    assert len(numbers[0]) > 10 and len(numbers[0]) == len(numbers[1])
    return [(a, b) for a, b in zip(*words) if a != b] + [
        (a, b) for a, b in zip(*numbers)
        if abs(float(a) - float(b)) > tolerance * max(1, float(b) / 3)]


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_model(text):
    model, tokens = read(TINY / "tiny.bin")
    assert encode(text, *tokens[1:]) == tokenize(TINY / "tiny.bin", text.encode())
    assert not differences(program(text), journey(model, tokens, text))


@pytest.mark.parametrize("text", TEXTS[:2])
def test_delta_layers(text):
    """Of each of their heads how much it keeps of its memory, and learns of the new."""
    model, tokens = read(TINY35)
    assert not differences(program(TINY35, text), journey(model, tokens, text))


def test_make():
    """MODEL is another model, QUESTION what a chat's prompt asks."""
    make = ["make", "-s", "--no-print-directory", "journey"]
    said = call(*make, f"MODEL={TINY35}", "TEXT=It's \"one\"", cwd=TESTS.parent)
    assert said.returncode == 0 and said.stdout == program(TINY35, "It's \"one\""), said
    said = call(*make, "QUESTION=What is Tokyo in Japanese?", cwd=TESTS.parent)
    assert said.returncode == 0 and said.stdout == program(TEXTS[-1]), said


def test_readme_shows_it():
    shown, = re.findall(r"^layers [^`]*", (TESTS / "README.md").read_text(), re.M)
    assert shown in program(TEXTS[0])


def test_reference_is_a_program():
    result = call(sys.executable, TESTS / "reference.py", TEXTS[0], check=True)
    assert not differences(program(TEXTS[0]), result.stdout.splitlines())


def lead(model, ids):
    """The least by which a most likely token or a strongest position is ahead of the next."""
    rows = []
    for x, shares in model.forward(ids):
        rows += [*softmax(model.classify(x[-1:])), *(shares[:, -1] if shares is not None else ())]
    return min(first - second for second, first in (np.sort(row)[-2:] for row in rows))


@pytest.mark.parametrize("name", ["experts", "gqa-3-group-32", *[
    pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "yarn-all-keys")]])
def test_other_models(tmp_path, tokenizer, name):
    """Random weights, where roundings grow; of many texts the one where all is clearest."""
    hf = make_checkpoint(tmp_path / "hf", tokenizer, **SHAPES[name])
    path = export(hf, tmp_path / "model.bin")
    model, tokens = read(path)
    words = SENTENCES.split()
    texts = [" ".join(words[i:i + 4]) for i in range(20)]
    text = max(texts, key=lambda text: lead(model, tokenizer.encode(text).ids))
    assert not differences(program(path, text), journey(model, tokens, text), 0.045)


def test_refuses():
    for args, status, word in ((), 2, "usage"), (("",), 1, "TEXT"), (("x " * 5000,), 1, "TEXT"):
        result = run(*args)
        assert result.returncode == status and word in result.stderr and result.stdout == ""

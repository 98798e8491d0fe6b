"""The page of `make book`: its numbers are what tests/reference.py and the checkpoint give, its code is Part I's."""
import html
import json
import re

import book
import numpy as np
import pytest
from conftest import ROOT, TESTS, TINY
from reference import Model, softmax

SOURCE, TEXT = (ROOT / "qwen3.c").read_text(), (TESTS / "book.md").read_text()


@pytest.fixture(scope="module")
def page():
    assert (TESTS / "book").exists(), "make tests/book"
    return book.Book(SOURCE, TEXT, book.run()).make()


@pytest.fixture(scope="module")
def d(page):
    """The numbers that the page shows, from the page."""
    return json.loads(re.search(r'id="numbers">(.*?)</script>', page, re.S)[1].replace("<\\/", "</"))


def test_layers(d):
    """An int8 may be rounded up here and down there: tolerances as in test_journey.py."""
    model, cache, ids = Model.from_bin(TINY / "tiny.bin"), [], d["ids"]
    states = list(model.forward(ids, cache))
    for l, (x, shares) in enumerate(states):
        shown = np.array([(t["layers"][l - 1]["x"] if l else t["embed"]) for t in d["tokens"]])
        assert np.abs(shown - x).max() < 0.015 * np.abs(x).max()
        for token, p in zip(d["tokens"], softmax(model.classify(x))):
            for i, probability in (token["layers"][l - 1] if l else token)["next"]:
                assert abs(probability - p[i]) < 0.015
        for token in range(len(ids) if l else 0):
            at = d["tokens"][token]["layers"][l - 1]
            for head in range(d["n_heads"]):
                assert np.abs(shares[head, token, :token + 1] - at["heads"][head]["share"]).max() < 0.015
            for shown, right in zip((at["k"], at["v"]), cache[l - 1]):
                assert np.abs(right[token].ravel() - shown).max() < 0.015 * np.abs(right).max()


def test_unquantized_weights(d):
    """The table and the row of Wq that the page shows are the checkpoint's, rounded to 8 bits."""
    data = (TINY / "model/model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")

    def row(name, i):
        tensor = json.loads(data[8:8 + size])[name]
        start, n = 8 + size + tensor["data_offsets"][0], tensor["shape"][1]
        return (np.frombuffer(data, np.uint16, n, start + 2 * n * i).astype(np.uint32) << 16).view(np.float32)
    for id, token in zip(d["ids"], d["tokens"]):
        right = row("model.embed_tokens.weight", id)
        assert np.abs(right - token["embed"]).max() < np.abs(right).max() / 127
    right = row("model.layers.0.self_attn.q_proj.weight", 0)
    shown = np.array(d["row"]) * np.repeat(d["row_scale"], d["group_size"])
    assert np.abs(right - shown).max() < np.abs(right).max() / 127
    h = np.array(d["tokens"][d["n_prompt"] - 1]["layers"][0]["h"])
    assert abs(right @ h - d["tokens"][d["n_prompt"] - 1]["layers"][0]["q_raw"][0]) < 0.01 * np.abs(right) @ np.abs(h)


def test_merges(d):
    """Byte-pair encoding by the ranks of tokenizer.json (for ASCII without quotes)."""
    merges = json.loads((TINY / "model/tokenizer.json").read_text())["model"]["merges"]
    rank = {tuple(m.split(" ") if isinstance(m, str) else m): i for i, m in enumerate(merges)}
    assert "".join(piece["text"] for piece in d["pieces"]) == d["text"]
    for piece in d["pieces"]:
        tokens = list(piece["text"].replace(" ", "Ġ"))
        for step in piece["steps"]:
            assert [d["vocabulary"][i].replace(" ", "Ġ") for i in step["ids"]] == tokens
            ranks = [rank.get(pair, len(rank)) for pair in zip(tokens, tokens[1:])]
            best = ranks.index(min(ranks)) if ranks and min(ranks) < len(rank) else -1
            assert step["pair"] == best
            tokens[best:best + 2] = ["".join(tokens[best:best + 2])] if best >= 0 else tokens[best:]


def test_draws(d):
    draws = d["draws"]
    logits = np.array(d["tokens"][draws["pos"]]["logits"])
    p = softmax(logits / draws["temperature"])
    p[p < np.sort(p)[-draws["top_k"]]] = 0
    p /= p.sum()
    p[[p[p > x].sum() >= draws["top_p"] for x in p]] = 0
    p /= p.sum()
    count, n = np.array(draws["count"]), sum(draws["count"])
    assert not count[p == 0].any() and (np.abs(count - n * p) <= 4 * np.sqrt(n * p * (1 - p))).all()


def test_delta(d):
    S = np.zeros((4, 4))
    for step in d["delta"]:
        k, v = np.array(step["k"]), np.array(step["v"])
        S = step["g"] * S + np.outer(k, step["b"] * (v - step["g"] * S.T @ k))
        assert np.allclose(step["S"], S, atol=1e-5) and np.allclose(step["a"], S.T @ k, atol=1e-5)


def test_code_is_part_one(page):
    """All lines of Part I are on the page; it needs no other file."""
    part = SOURCE[SOURCE.index("// PART I. "):SOURCE.index("// PART II. ")].splitlines()[2:-1]
    shown = html.unescape(re.sub("<[^<>]*>", "", "\n".join(re.findall("<pre>(.*?)</pre>", page, re.S)))).splitlines()
    assert not [line for line in part if line and not line.startswith("//") and line not in shown]
    assert not re.search(r"https?://|src=|@import|url\(", re.sub(r"<pre>.*?</pre>", "", page, flags=re.S))


@pytest.mark.parametrize("source, text, words", [
    (re.sub(r"\brope_angles\b", "angles", SOURCE), TEXT, "rope_angles: Part I of qwen3.c has no such name"),
    (SOURCE.replace("static void add(", "static int one(void) { return 1; }\n\nstatic void add("), TEXT, "not in the book: one"),
    (SOURCE, TEXT.replace("::: code add\n", ""), "not in the book: add"),
    (SOURCE, TEXT.replace("::: code add\n", "::: code add\n::: code add\n"), "add: is in the book already"),
    (SOURCE, TEXT + "\nParis is near Rome.{{claim(n_heads == 5)}}\n", "does not show what the text says"),
    (SOURCE.replace("h = rmsnorm(x, rms_att) ", "h = norm(x, rms_att) "), TEXT, "first comment has no"),
])
def test_what_no_longer_fits_is_an_error(source, text, words):
    with pytest.raises(SystemExit, match=words):
        book.Book(source, text, book.run()).make()

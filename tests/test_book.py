"""The page of `make book`: its numbers are what tests/reference.py and the checkpoint give, its code is Part I's."""
import functools
import html
import json
import re
import shutil

import book
import numpy as np
import pytest
from conftest import ROOT, TESTS, TINY, call
from reference import Model, encode, read_tokenizer, softmax

SOURCE, TEXT = (ROOT / "qwen3.c").read_text(), (TESTS / "book.md").read_text()
BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


page = functools.cache(lambda: book.Book(SOURCE, TEXT, book.run()).make())         # after make tests/book


@pytest.fixture(scope="module")
def d():
    """The numbers that the page shows, from the page."""
    return json.loads(re.search(r'id="numbers">(.*?)</script>', page(), re.S)[1].replace("<\\/", "</"))


def test_layers(d):
    """An int8 may be rounded up here and down there: tolerances as in test_journey.py."""
    model, cache, ids = Model.from_bin(TINY / "tiny.bin"), [], d["ids"]
    for l, (x, shares) in enumerate(model.forward(ids, cache)):
        tokens = [t["layers"][l - 1] if l else t for t in d["tokens"]]
        assert np.abs(x - [t["x" if l else "embed"] for t in tokens]).max() < 0.015 * np.abs(x).max()
        for i, (t, p) in enumerate(zip(tokens, softmax(model.classify(x)))):
            assert all(abs(probability - p[id]) < 0.015 for id, probability in t["next"])
            assert l == 0 or np.abs(shares[:, i, :i + 1] - t["share"]).max() < 0.015
            for name, right in zip("kv", cache[l - 1] if l else ()):
                assert np.abs(right[i].ravel() - t[name]).max() < 0.015 * np.abs(right).max()


def test_other_texts(d):
    """Their ids, what each token says comes next, and the answers, as the chat's."""
    model = Model.from_bin(TINY / "tiny.bin")
    tokens = read_tokenizer(TINY / "tiny.bin.tokenizer", d["vocab_size"])[1:]
    for run in [d, d["chat"], *d["others"]]:
        n = run["n_prompt"]
        assert run is d["chat"] or run["ids"][:n] == encode(run["text"], *tokens)
        logits = model.logits(run["ids"])
        assert logits[n - 1:-1].argmax(1).tolist() == run["ids"][n:] and logits[-1].argmax() in d["stop"]
        for token, p in zip(run["tokens"], softmax(logits)):
            assert all(abs(p[i] - probability) < 0.02 for i, probability in token["layers"][-1]["next"])


def test_parts_that_are_off(d):
    """Without any, the last token itself comes next; with all, what the run says."""
    last = d["tokens"][d["n_prompt"] - 1]
    assert len(d["off"]) == 256 and d["off"][0] == last["layers"][-1]["next"] and d["off"][255] == last["next"]
    assert d["off"][0b11111110] == last["layers"][0]["next_between"] and d["off"][0b11101110] == last["layers"][0]["next"]


def test_unquantized_weights(d):
    """The table and the row of Wq that the page shows are the checkpoint's, rounded to 8 bits."""
    weights, at = Model.from_checkpoint(TINY / "model", "fp32").w, d["tokens"][d["n_prompt"] - 1]["layers"][0]
    right = weights["embed"].rows(np.array(d["ids"]))
    assert (np.abs(right - [token["embed"] for token in d["tokens"]]).max(1) < np.abs(right).max(1) / 127).all()
    right, shown = weights["q"][0](np.eye(d["dim"], dtype="f"))[:, 0], np.array(d["row"]) * np.repeat(d["row_scale"], d["group_size"])
    assert np.abs(right - shown).max() < np.abs(right).max() / 127
    assert abs(right @ at["h"] - at["q_first"]) < 0.01 * np.abs(right) @ np.abs(at["h"])


def test_delta(d):
    S = np.zeros((4, 4))
    for step in d["delta"]:
        k, v = np.array(step["k"]), np.array(step["v"])
        S = step["g"] * S + np.outer(k, step["b"] * (v - step["g"] * S.T @ k))
        assert np.allclose(step["S"], S, atol=1e-5) and np.allclose(step["a"], S.T @ k, atol=1e-5)


def test_memory(d):
    """What S of the tiny Qwen3.5 has of each token's value, by reference.py's S, keys and values."""
    model, ids = Model.from_bin(book.MODELS[1]), d["ids"][:d["n_prompt"]]
    for n, heads in enumerate(d["memory"], 1):
        cache, shown = [], iter(heads)
        for l, (x, _) in enumerate(model.forward(ids[:n], cache)):
            for head in range(2 if 0 < l < 4 else 0):
                at, (k, v, g, b), S = next(shown), (y[:, head] for y in model.learned), cache[l - 1][1][head]
                assert np.allclose([g[-1], b[-1]], [at["g"], at["b"]], atol=0.015)
                assert np.allclose(((k @ S) * v).sum(1) / (v * v).sum(1), at["kept"], atol=0.02)
    assert abs(softmax(model.classify(x[-1:]))[0][d["ids"][n]] - d["memory_next"][0][1]) < 0.01


def test_code_is_part_one():
    """All lines of Part I are on the page; it needs no other file."""
    part = SOURCE[SOURCE.index("// PART I. "):SOURCE.index("// PART II. ")].splitlines()[2:-1]
    shown = html.unescape(re.sub("<[^<>]*>", "", "\n".join(re.findall("<pre>(.*?)</pre>", page(), re.S)))).splitlines()
    assert not [line for line in part if line and not line.startswith("//") and line not in shown]
    assert not re.search(r"https?://|src=|@import|url\(", re.sub(r"<pre>.*?</pre>", "", page(), flags=re.S))


@pytest.mark.parametrize("source, text, words", [
    (re.sub(r"\brope_angles\b", "angles", SOURCE), TEXT, "rope_angles: Part I of qwen3.c has no such name"),
    (SOURCE.replace("static void add(", "static int one(void) { return 1; }\n\nstatic void add("), TEXT, "not in the book: one"),
    (SOURCE, TEXT.replace("::: code add\n", ""), "not in the book: add"),
    (SOURCE, TEXT.replace("::: code add\n", "::: code add add\n"), "add: is in the book already"),
    (SOURCE, TEXT + "\nParis is near Rome.{{claim(n_heads == 5)}}\n", "does not show what the text says"),
    (SOURCE.replace("h = rmsnorm(x, rms_att) ", "h = norm(x, rms_att) "), TEXT, "first comment has no"),
])
def test_what_no_longer_fits_is_an_error(d, source, text, words):
    with pytest.raises(SystemExit, match=words):
        book.Book(source, text, d).make()


CLICKS = """<script>
const errors = [], say = {};
addEventListener("error", e => errors.push(e.message));
addEventListener("load", () => {
    const each = (what, act) => { for (let i = 0, all; i < (all = document.querySelectorAll(what)).length; i++) act(all[i]); };
    say.merges = d.pieces.map(p => merge(p.text).at(-1).ids);
    say.scores = [1, 4, 20, 60].map(q => figures.rope({ q, back: 1 }).match(/<b>([\\d.]+)<.b>/)[1]);
    say.stay = [[.6, 20, .95], [1, 5, .5], [2, 0, 1], [.1, 0, .9]].map(([temperature, top_k, top_p]) =>
        +figures.sampler({ temperature, top_k, top_p, drawn: null }).match(/(\\d+) of/)[1]);
    each("button", b => { b.focus(); b.click(); if (document.activeElement == document.body) errors.push("no focus: " + b.outerHTML); });
    each("input", i => { for (const v of [i.min, i.max, "word"]) { i.value = v; i.dispatchEvent(new Event("input", { bubbles: true })); } });
    each("a[href^='#']", a => { if (!document.getElementById(a.hash.slice(1))) errors.push("no target: " + a.hash); });
    each("figure", f => { if (!f.innerText.trim() || /NaN|undefined|Infinity/.test(f.textContent)) errors.push("figure " + f.dataset.name); });
    each("svg", s => { if (s.getAttribute("role") != "img" && !s.ariaHidden) errors.push("an svg without text"); });
    document.body.innerHTML = "<pre id=said></pre>", document.getElementById("said").textContent = JSON.stringify({ errors, ...say });
});
</script>"""


@pytest.mark.skipif(not BROWSER, reason="no chromium")
def test_in_a_browser(d, tmp_path):
    """Every button, slider and link works; merges are encode_piece's; where q and k move together, the score stays."""
    (tmp_path / "book.html").write_text(page().replace("</html>", CLICKS + "</html>"))
    done = call(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user",
                "--virtual-time-budget=20000", "--dump-dom", f"file://{tmp_path}/book.html")
    said = json.loads(html.unescape(re.search("<pre id=.said.>(.*?)</pre>", done.stdout, re.S)[1]))
    assert said["errors"] == [] and said["merges"] == [piece["ids"] for piece in d["pieces"]] and len(set(said["scores"])) == 1
    p = np.sort(np.array(d["tokens"][2]["logits"]))[::-1]
    stay = [q[:k or None] / q[:k or None].sum() for q, k in ((softmax(p / t), k) for t, k in ((.6, 20), (1, 5), (2, 0), (.1, 0)))]
    assert said["stay"] == [int((np.cumsum(q) - q < top_p).sum()) for q, top_p in zip(stay, (.95, .5, 1, .9))]

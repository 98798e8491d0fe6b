"""What the tiny model's heads attend to: `python tests/heads.py` writes .github/heads.svg.

The shares are those of reference.py, where the model is about to say the user's name. There is no
background: the colours have a contrast above 4 on white and on GitHub's dark.
"""
import json
import math
from html import escape
from pathlib import Path

import numpy as np

import reference

TESTS = Path(__file__).resolve().parent
TINY = TESTS / "tiny"
PICTURE = TESTS.parent / ".github/heads.svg"
BLUE, ORANGE = "#2b7de9", "#d1580c"
STYLE = f"""text{{fill:#777e87;font:12px -apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.small{{font-size:10.5px}}.bold{{font-weight:600}}.found{{fill:{ORANGE};font-weight:600}}.end{{text-anchor:end}}"""


class Watched(reference.Model):
    """Keeps each layer's shares of attention (heads, n, n). Heads in `off`, (layer, head), give zeros."""
    off, shares = (), ()

    def run(self, ids):
        self.shares = []
        return self.logits(ids)

    def attention(self, q, k, v, start):
        answers, shares = super().attention(q, k, v, start)
        by_head = answers.reshape(len(q), q.shape[1], -1)
        for layer, head in self.off:
            if layer == len(self.shares) % self.c["n_layers"]:
                by_head[:, head] = 0
        self.shares = [*self.shares, shares]
        return by_head.reshape(len(q), -1), shares


def shares():
    """The tokens, which of them are the name, shares (layers, heads, tokens) before the name and one
    token later, the heads that find it both times, and the answer without these heads."""
    recorded = json.loads((TINY / "expected.json").read_text())["model"]
    (ids,) = (entry["ids"] for entry in recorded if "messages" in entry
              and entry["messages"][-1]["content"] == "What is my name?")
    model = Watched.from_checkpoint(TINY / "model", "fp32")
    tokens = reference.read_tokenizer(TINY / "tiny.bin.tokenizer", model.c["vocab_size"])[1]
    answer = model.greedy(ids, 7)[0]
    (first,) = (i for i, token in enumerate(answer) if tokens[token] == b" An")
    now = len(ids) + first - 1                          # the last token before the name
    text = ids + answer[:first + 1]
    places = [i for i in range(now + 1) if text[i] in answer[first:first + 2]]
    model.run(text)
    looks, later = (np.array([share[:, at] for share in model.shares]) for at in (now, now + 1))
    finds = (looks[:, :, places].sum(2) > 0.5) & (later[:, :, places].sum(2) > 0.5)
    model.off = list(zip(*finds.nonzero()))
    without = b"".join(tokens[i] for i in model.greedy(ids, 7)[0]).decode().split("<|im_end|>")[0]
    words = [tokens[i].decode().strip(" ").replace("\n", "\\n") for i in text[:now + 1]]
    return words, places, looks, later, finds, without


def draw(words, places, looks, later, finds, without):
    """A row a head, a column a token. A square's area is the token's share."""
    parts, cell, left = [], 15, 108

    def text(x, y, content, style="", more=""):
        parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}"{more}>{escape(content, quote=False)}</text>')

    def row(y, head, row_shares, found):
        text(left - 8, y + 11, f"head {head}", "end small found" if found else "end small")
        squares = ""
        for i, share in enumerate(row_shares):
            side = (cell - 1) * math.sqrt(share)
            if share >= 0.005:
                squares += (f"M{left + i * cell + (cell - side) / 2:.1f} {y + (cell - side) / 2:.1f}"
                            f"h{side:.1f}v{side:.1f}h-{side:.1f}z")
        parts.append(f'<path d="{squares}" fill="{ORANGE if found else BLUE}"/>')

    text(8, 16, "“Your name is” is written, “An” comes next. A row is a head; a square’s area is "
         "the token’s share of its attention.")
    for i, word in enumerate(words):
        x = left + (i + 0.5) * cell + 3.5
        text(x, 104, word, "small" + " found" * (i in places), f' transform="rotate(-90 {x:g} 104)"')
    y = 110
    for layer, heads in enumerate(looks):
        text(8, y + 2 * cell + 4, f"layer {layer}", "bold")
        for head, row_shares in enumerate(heads):
            row(y, head, row_shares, finds[layer, head])
            y += cell
        y += 6
    text(8, y + 14, "One token later:")
    y += 22
    for layer, head in zip(*finds.nonzero()):
        row(y, head, later[layer, head], True)
        y += cell
    for i in places:
        parts.insert(0, f'<rect x="{left + i * cell}" y="108" width="{cell}" height="{y - 106}" '
                        f'fill="{ORANGE}" fill-opacity="0.12"/>')
    text(8, y + 26, f"With these {finds.sum()} heads set to zero, the answer is “{without}”")
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 {y + 36}">\n<style>{STYLE}</style>\n'
            + "\n".join(parts) + "\n</svg>\n")


if __name__ == "__main__":
    PICTURE.write_text(draw(*shares()), encoding="utf-8")

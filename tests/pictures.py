"""The pictures of the READMEs: `python tests/pictures.py [NAME...]` writes .github/NAME.svg.

Each shows data that are computed from the sources, from the tiny model or from a measurement
(speed.txt and texts.txt, printed by `tests/bench curve 0.6b` and `tests/bench texts 0.6b`): a
NAME_data() and what draws them. The file holds them as JSON, too, which test_pictures.py compares.
There is no background: the colours have a contrast above 4 on white and on GitHub's dark.
"""
import json
import math
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import numpy as np

import reference

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TINY = TESTS / "tiny"
INK, BLUE, ORANGE = "#777e87", "#2b7de9", "#d1580c"
STYLE = f"""text{{fill:{INK};font:12px -apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.small{{font-size:10.5px}}.bold{{font-weight:600}}.blue{{fill:{BLUE}}}.orange{{fill:{ORANGE}}}
.mono{{font:10.5px ui-monospace,SFMono-Regular,Consolas,"Liberation Mono",monospace}}
.middle{{text-anchor:middle}}.end{{text-anchor:end}}"""


class Picture:
    """Elements of an SVG, in pixels of a page that is 830 wide; y grows downwards."""

    def __init__(self, height):
        self.height, self.parts = height, []

    def add(self, tag, content="", **attributes):
        attributes = " ".join(f'{name.rstrip("_").replace("_", "-")}="{number(value)}"'
                              for name, value in attributes.items())
        self.parts.append(f"<{tag} {attributes}>{escape(content, quote=False)}</{tag}>" if content
                          else f"<{tag} {attributes}/>")

    def text(self, x, y, content, style="", **attributes):
        self.add("text", content, x=x, y=y, **({"class": style} if style else {}), **attributes)

    def line(self, *points, color=INK, **attributes):
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.add("path", d=path, fill="none", stroke=color, **attributes)

    def arrow(self, *points, color=INK):
        """A line whose last piece is horizontal or vertical, with a head."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = np.sign(x - x0), np.sign(y - y0)
        self.line(*points[:-1], (x - 5 * dx, y - 5 * dy), color=color)
        self.add("path", fill=color, d="M" + "L".join(
            f"{number(x - 7 * a * dx + 3.5 * b * dy)} {number(y - 7 * a * dy + 3.5 * b * dx)}"
            for a, b in ((0, 0), (1, 1), (1, -1))) + "Z")

    def box(self, x, y, width, height, lines, color=INK):
        self.add("rect", x=x, y=y, width=width, height=height, rx=4, stroke=color, fill=color,
                 fill_opacity="0" if color == INK else "0.12")
        style = {INK: "middle", BLUE: "middle blue", ORANGE: "middle orange"}[color]
        for i, line in enumerate(lines):
            size = "bold" if i == 0 else "small"
            self.text(x + width / 2, y + height / 2 + 4 + 13 * (i - (len(lines) - 1) / 2), line,
                      f"{style} {size}")

    def svg(self, data):
        box = f"0 0 830 {number(self.height)}"
        data = escape(json.dumps(data, ensure_ascii=False), quote=False)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">\n'
                f"<metadata>{data}</metadata>\n<style>{STYLE}</style>\n"
                + "\n".join(self.parts) + "\n</svg>\n")


def number(value):
    """At most one digit after the point, and no -0; texts as they are."""
    return value if isinstance(value, str) else f"{round(float(value), 1) + 0:g}"


class Chart:
    """A rectangle with two axes, x and y = (first, last); log names the logarithmic one."""

    def __init__(self, picture, left, top, width, height, x, y, log):
        self.picture, self.x, self.y, self.log = picture, x, y, log
        self.left, self.top, self.width, self.height = left, top, width, height

    def at(self, x, y):
        def share(value, first, last, log):
            if log:
                value, first, last = map(math.log, (value, first, last))
            return (value - first) / (last - first)
        return (self.left + self.width * share(x, *self.x, self.log == "x"),
                self.top + self.height * (1 - share(y, *self.y, self.log == "y")))

    def ticks_x(self, labels):
        for value, label in labels.items():
            x, bottom = self.at(value, self.y[0])
            self.picture.line((x, bottom), (x, bottom + 4))
            self.picture.text(x, bottom + 17, label, "middle small")

    def ticks_y(self, labels):
        for value, label in labels.items():
            y = self.at(self.x[0], value)[1]
            self.picture.line((self.left, y), (self.left + self.width, y), stroke_opacity="0.3")
            self.picture.text(self.left - 6, y + 4, label, "end small")


# -- One layer

def forward_steps():
    """The steps of a dense layer in qwen3.c's forward(): a function, the equations beside it."""
    body = re.search(r"^static bool forward\(.*?^}", (ROOT / "qwen3.c").read_text(), re.M | re.S)[0]
    steps = re.findall(r"^ +(\w+)\(&p.*\); +// (.*)$", body, re.M)
    return [(f"{name}()", *equation.split("; ")) for name, equation in steps if name != "experts"]


def shape_of_bench(name):
    """A Config's first fields, from bench.c's table of shapes."""
    text = (TESTS / "bench.c").read_text()
    fields = re.search(r"struct Shape \{\s+const char \*name;\s+int32_t (.*?);", text, re.S)[1]
    row = re.search(rf'\{{"{re.escape(name)}", (.*?)\}}', text)[1]
    return dict(zip(re.split(r",\s+", fields), map(int, row.split(", "))))


def layer_data():
    return {"shape": shape_of_bench("0.6b"), "steps": forward_steps()}


def layer(data):
    """One layer's data flow, with the shapes of the 0.6B."""
    c = data["shape"]
    dim, hidden, hd, heads, kv = (c[name] for name in
                                  ("dim", "hidden_dim", "head_dim", "n_heads", "n_kv_heads"))
    p, wide = Picture(716), 1 / 15              # a box is 1 / 15 pixel wide for each of its outputs
    x, left, right = 52, 104, 545               # the residual stream, the steps, their equations
    q, norm = left + heads * hd * wide / 2, left + dim * wide / 2
    k = left + (heads + kv / 2) * hd * wide + 16
    v, w1, w3 = k + kv * hd * wide + 16, left + hidden * wide / 2, left + hidden * wide * 3 / 2 + 16
    end = v + kv * hd * wide / 2

    def matrix(center, y, name, rows, cols):
        p.box(center - rows * wide / 2, y, rows * wide, 36, [name, f"{rows}×{cols}"], BLUE)

    def branch(y, targets):
        """The norm at y of what is in the stream, and its way to some matrices."""
        p.arrow((x, y + 15), (left, y + 15))
        p.box(left, y, dim * wide, 32, ["rmsnorm", "then Q8"])
        p.text(norm + 6, y + 47, f"xq {dim}")
        p.line((norm, y + 32), (norm, y + 52))
        p.line((min(norm, *targets), y + 52), (max(targets), y + 52))
        for target in targets:
            p.arrow((target, y + 52), (target, y + 68))

    def add(y, start):
        p.arrow((start, y), (x + 9, y))
        p.add("circle", cx=x, cy=y, r=9, fill="none", stroke=INK)
        p.line((x - 5, y), (x + 5, y))
        p.line((x, y - 5), (x, y + 5))

    def down(at, y, to, label="", side=6):
        p.arrow((at, y), (at, to))
        p.text(at + side, y + 16, label) if label else None

    p.box(x - dim * wide / 2, 14, dim * wide, 28, [f"x {dim}"])
    for start, stop in (42, 385), (403, 633), (651, 673):
        p.line((x, start), (x, stop), stroke_width=3)
    p.arrow((x, 672), (x, 681))
    p.box(x - dim * wide / 2, 681, dim * wide, 28, [f"x {dim}"])
    branch(58, (q, k, v))
    matrix(q, 126, "Wq", heads * hd, dim)
    matrix(k, 126, "Wk", kv * hd, dim)
    matrix(v, 126, "Wv", kv * hd, dim)
    down(q, 162, 186, f"q {heads}×{hd}")
    down(k, 162, 186, f"k {kv}×{hd}")
    down(v, 162, 248, f"v {kv}×{hd}")
    p.box(left, 186, heads * hd * wide, 34, ["QK-norm", "then RoPE"])
    p.box(k - kv * hd * wide / 2, 186, kv * hd * wide, 34, ["QK-norm", "then RoPE"])
    down(k, 220, 248)
    p.box(k - kv * hd * wide / 2, 248, end - k + kv * hd * wide / 2, 36,
          ["KV cache", f"K and V: {kv}×positions×{hd}"], ORANGE)
    down(q, 220, 312)
    down((k + v) / 2, 284, 312)
    p.box(left, 312, end - left, 36, [
        "softmax(q · K / √head_dim) V",
        f"{heads} query heads, {heads // kv} for each K and V; then Q8"])
    down(q, 348, 376, f"aq {heads * hd}")
    matrix(q, 376, "Wo", dim, heads * hd)
    add(394, q - dim * wide / 2)
    branch(426, (w1, w3))
    matrix(w1, 494, "W1", hidden, dim)
    matrix(w3, 494, "W3", hidden, dim)
    down(w1, 530, 558, f"{hidden}")
    down(w3, 530, 558, f"{hidden}")
    p.box(left, 558, w3 + hidden * wide / 2 - left, 34, ["silu(W1 xq) * (W3 xq)", "then Q8"])
    down(q, 592, 624, f"hq {hidden}")
    matrix(q, 624, "W2", dim, hidden)
    add(642, q - dim * wide / 2)
    rows = 70, 140, 322, 388, 438, 508, 636
    for y, (name, *equations) in zip(rows, data["steps"], strict=True):
        p.text(right, y, name, "bold")
        for i, equation in enumerate(equations):
            p.text(right, y + 15 + 14 * i, equation, "mono")
    p.text(98, 699, f"to the next layer; there are {c['n_layers']}")
    p.text(right, 699, "A matrix is as wide here as its output.")
    return p


# -- Speed

def speed_data():
    """For each kind and number of threads: (length, rate, what the machine allows)."""
    text = (TESTS / "speed.txt").read_text()
    c = shape_of_bench("0.6b")
    megabytes, products = map(float, re.search(r"(\S+) MB a token, (\S+) million", text).groups())
    positions, cache = map(float, re.search(r"cache of (\d+) positions: (\d+) MB", text).groups())
    rows = [(kind, int(threads), int(length or 0), float(rate)) for threads, kind, length, rate in re.findall(
        r"^ +(\d+)  (prompt of|decode at|memory read|int8 peak|fp32 peak) *(\d*) +([\d.]+) ", text, re.M)]
    machine = {(kind, threads): rate for kind, threads, length, rate in rows if not length}

    def limit(kind, threads, length):
        if kind == "prompt of":
            attention = length * c["n_heads"] * c["head_dim"] * c["n_layers"] / 1e6
            return 1e3 / (products / machine["int8 peak", threads]
                          + attention / machine["fp32 peak", threads])
        return machine["memory read", threads] * 1e3 / (megabytes + length / positions * cache)

    lines = {}
    for kind, threads, length, rate in rows:
        if length:
            lines.setdefault(kind, {}).setdefault(f"{threads} thread{'s' * (threads > 1)}", []).append(
                (length, rate, round(limit(kind, threads, length), 1)))
    machine_name, model = re.match(r"# (.*)\n(.*?),", text).groups()
    return {"title": f"{model}; {machine_name}", "lines": lines}


def legend(p, title, lines):
    """Of a line for each number of threads."""
    p.text(50, 16, title)
    at = 50
    for threads, color in zip(lines, (BLUE, ORANGE)):
        p.line((at, 32), (at + 24, 32), color=color, stroke_width=2)
        p.text(at + 30, 36, threads)
        at += 105
    p.line((at, 32), (at + 24, 32), stroke_width=1.5, stroke_dasharray="5 3")
    p.text(at + 30, 36, "what the machine allows")


def rates(p, chart, name, bound, lines):
    """Lines of (x, rate, limit), below a name and what the limit is."""
    top = int(chart.y[1])
    step = max(m * 10 ** k for k in range(5) for m in (1, 2, 5) if m * 10 ** k <= top / 3)
    chart.ticks_y({value: str(value) for value in range(0, top + 1, step)})
    p.text(chart.left, 62, name, "bold")
    p.text(chart.left, 78, bound, "small")
    for line, color in zip(lines, (BLUE, ORANGE)):
        p.line(*(chart.at(x, limit) for x, _, limit in line), color=color, stroke_width=1.5,
               stroke_dasharray="5 3")
        p.line(*(chart.at(x, rate) for x, rate, _ in line), color=color, stroke_width=2)
        for x, rate, _ in line:
            at, y = chart.at(x, rate)
            p.add("circle", cx=at, cy=y, r=3, fill=color)


def speed(data):
    """Tokens a second against the context's length, and what the machine allows."""
    p = Picture(376)
    legend(p, data["title"], data["lines"]["decode at"])
    for left, kind, name, bound in (
            (50, "decode at", "An answer: tokens/s at a position",
             "Limit: reading the weights, and K and V of all positions"),
            (475, "prompt of", "A prompt: tokens/s by its length",
             "Limit: int8 products, fp32 in attention")):
        lines = data["lines"][kind].values()
        lengths = [length for length, _, _ in max(lines, key=len)]
        chart = Chart(p, left, 90, 345, 260, (lengths[0], lengths[-1]),
                      (0, max(limit for line in lines for _, _, limit in line)), log="x")
        chart.ticks_x({length: f"{length // 1024}k" if length >= 1024 else str(length)
                       for length in lengths})
        rates(p, chart, name, bound, lines)
    return p


# -- Texts together

def texts_data():
    """For each number of threads: (texts, rate, what the machine allows)."""
    text = (TESTS / "texts.txt").read_text()
    megabytes, products, position, cache = map(float, re.search(
        r"(\S+) MB a token,[^$]*a row with its logits: (\S+) million .* before position (\d+): (\S+) MB",
        text).groups())
    rows = re.findall(r"^ +(\d+)  (\d+) texts? together +([\d.]+) ", text, re.M)
    machine = {(kind, int(threads)): float(rate) for threads, kind, rate in re.findall(
        r"^ +(\d+)  (memory read|int8 peak) +([\d.]+) ", text, re.M)}

    def limit(threads, n):
        """Of the memory's rate, which the weights share, and of the int8 peak, which each text needs."""
        reading = machine["memory read", threads] * 1e3 * n / (megabytes + n * cache)
        return min(reading, machine["int8 peak", threads] * 1e3 / products)

    lines = {}
    for threads, n, rate in rows:
        lines.setdefault(f"{threads} thread{'s' * (threads != '1')}", []).append(
            (int(n), float(rate), round(limit(int(threads), int(n)), 1)))
    machine_name, model = re.match(r"# (.*)\n(.*?),", text).groups()
    return {"title": f"{model}; {machine_name}", "lines": lines,
            "what": "Answers: tokens/s of all texts of a list, by how many are decoded together",
            "limit": f"Limit at position {position:.0f}: the weights read once for all texts; each text's "
                     "keys and values, and its int8 products"}


def texts(data):
    """Answers' tokens a second against the number of texts together, and what the machine allows."""
    p, lines = Picture(376), data["lines"]
    legend(p, data["title"], lines)
    counts = [n for n, _, _ in max(lines.values(), key=len)]
    top = max(max(point[1:]) for line in lines.values() for point in line)
    chart = Chart(p, 50, 90, 770, 260, (counts[0], counts[-1]), (0, top), log="x")
    chart.ticks_x({n: str(n) for n in counts})
    rates(p, chart, data["what"], data["limit"], lines.values())
    return p


# -- The tiny model

class Watched(reference.Model):
    """Keeps x (n, dim) before each norm, and each layer's shares of attention (heads, n, n). Heads in
    `off`, (layer, head), give zeros."""
    off = ()

    def __init__(self, *args):
        super().__init__(*args)
        self.x, self.shares = [], []

    def run(self, ids):
        self.x, self.shares = [], []
        return self.logits(ids)

    def rmsnorm(self, x, w):
        if x.ndim == 2:                                 # that of q and k has three dimensions
            self.x.append(x)
        return super().rmsnorm(x, w)

    def attention(self, q, k, v, start):
        answers, shares = super().attention(q, k, v, start)
        by_head = answers.reshape(len(q), q.shape[1], -1)
        for layer, head in self.off:
            if layer == len(self.shares) % self.c["n_layers"]:
                by_head[:, head] = 0
        self.shares.append(shares)
        return by_head.reshape(len(q), -1), shares


def rms(x):
    return math.sqrt(np.mean(np.square(x, dtype=np.float64)))


def quantization_data():
    """For each matrix, and x after each half of a layer: the error's rms in % of its own."""
    recorded = json.loads((TINY / "expected.json").read_text())["model"]
    texts = [entry["ids"] + entry["greedy"] for entry in recorded]
    exact = Watched.from_checkpoint(TINY / "model", "fp32")
    names = {"Wq": "q", "Wk": "k", "Wv": "v", "Wo": "o", "W1": "gate", "W3": "up", "W2": "down"}
    slots = ["x"] + ["Wq", "Wk", "Wv", "Wo", "x", "W1", "W3", "W2", "x"] * exact.c["n_layers"]

    def streams(model):
        """x (steps, tokens, dim): the embedding's, then after each half of a layer."""
        found = []
        for ids in texts:
            model.run(ids)
            found.append(model.x)
        return [np.concatenate(x) for x in zip(*found)]

    def errors(path):
        weights = Watched.from_bin(path, "weights").w
        x = [100 * rms(ours - right) / rms(right)
             for ours, right in zip(streams(Watched.from_bin(path)), exact_x, strict=True)]
        found = [x.pop(0)]
        for i, slot in enumerate(slots[1:]):
            if slot == "x":
                found.append(x.pop(0))
            else:
                right = exact.w[names[slot]][i // 9].dense
                found.append(100 * rms(weights[names[slot]][i // 9].dense - right) / rms(right))
        return [round(error, 3) for error in found]

    exact_x = streams(exact)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "export.py", TINY / "model", f"{folder}/q4.bin",
                        "--bits", "4"], check=True, stderr=subprocess.DEVNULL)
        return {"slots": slots, "4 bits": errors(f"{folder}/q4.bin"), "8 bits": errors(TINY / "tiny.bin")}


def quantization(data):
    """What 8 and 4 bits change in the weights, and in x on its way through the layers."""
    slots, colors = data["slots"], {"4 bits": ORANGE, "8 bits": BLUE}
    p = Picture(310)
    for i, (bits, color) in enumerate(colors.items()):
        p.add("circle", cx=56 + 230 * i, cy=12, r=3.5, fill=color)
        p.line((154 + 230 * i, 12), (178 + 230 * i, 12), color=color, stroke_width=2)
        p.text(66 + 230 * i, 16, f"matrix, {bits}")
        p.text(184 + 230 * i, 16, f"x with {bits}")
    p.text(820, 16, "rms of the error in % of the rms", "end")
    chart = Chart(p, 50, 30, 770, 230, (-0.7, len(slots) - 0.5), (0.4, 12), log="y")
    chart.ticks_y({value: f"{value:g} %" for value in (0.5, 1, 2, 5, 10)})
    for i, slot in enumerate(slots):
        p.text(chart.at(i, 0.4)[0], 276, slot, "middle small" + " bold" * (slot == "x"))
    for layer in range(len(slots) // 9):
        first, last = (chart.at(1 + 9 * layer + i, 0.4)[0] for i in (0, 8))
        p.line((first - 7, 284), (last + 7, 284))
        p.text((first + last) / 2, 300, f"layer {layer}", "middle")
    for bits, color in colors.items():
        points = [chart.at(i, error) for i, error in enumerate(data[bits])]
        p.line(*(point for point, slot in zip(points, slots) if slot == "x"),
               color=color, stroke_width=2)
        for (x, y), slot in zip(points, slots):
            if slot != "x":
                p.add("circle", cx=x, cy=y, r=3.5, fill=color)
    return p


def heads_data():
    """Shares of attention, (layers, heads, tokens), when the tiny model is about to say the user's
    name; the heads that find it, one token later, too, and the answer without them."""
    recorded = json.loads((TINY / "expected.json").read_text())["model"]
    (ids,) = (entry["ids"] for entry in recorded if "messages" in entry
              and entry["messages"][-1]["content"] == "What is my name?")
    model = Watched.from_checkpoint(TINY / "model", "fp32")
    tokens = reference.read_tokenizer(TINY / "tiny.bin.tokenizer", model.c["vocab_size"])[1]
    n_layers, n_heads = model.c["n_layers"], model.c["n_heads"]

    def say():
        answer = model.greedy(ids, 7)[0]
        return answer, b"".join(tokens[i] for i in answer).decode().split("<|im_end|>")[0]

    answer, _ = say()
    (first,) = (i for i, token in enumerate(answer) if tokens[token] == b" An")
    name = answer[first:first + 2]
    now = len(ids) + first - 1                          # the last token before the name
    text = ids + answer[:first + 1]
    places = [i for i in range(now + 1) if text[i] in name]
    model.run(text)
    looks = np.array([s[:, now] for s in model.shares])         # (layers, heads, tokens)
    later = np.array([s[:, now + 1] for s in model.shares])
    finders = [(l, h) for l in range(n_layers) for h in range(n_heads)
               if looks[l, h, places].sum() > 0.5 and later[l, h, places].sum() > 0.5]
    model.off = finders
    words = [tokens[i].decode().strip(" ").replace("\n", "\\n") for i in text[:now + 1]]
    return {"words": words, "places": places, "shares": looks.round(3).tolist(),
            "finders": [(l, h, later[l, h].round(3).tolist()) for l, h in finders],
            "without": f"With these {len(finders)} heads set to zero, the answer is “{say()[1]}”"}


def heads(data):
    """What each head looks at: a row a head, a column a token."""
    words, places, finders = data["words"], data["places"], data["finders"]
    p, cell, left = Picture(0), 15, 108

    def row(y, l, h, shares):
        found = [l, h] in ([*finder[:2]] for finder in finders)
        p.text(left - 8, y + 11, f"head {h}", "end small" + " bold orange" * found)
        squares = ""
        for i, share in enumerate(shares):
            side = (cell - 1) * math.sqrt(share)        # its area is the share
            x, top = (number(at + (cell - side) / 2) for at in (left + i * cell, y))
            if share >= 0.005:
                squares += f"M{x} {top}h{number(side)}v{number(side)}h-{number(side)}z"
        p.add("path", d=squares, fill=ORANGE if found else BLUE)

    def label(y, i):
        x = left + (i + 0.5) * cell + 3.5
        p.text(x, y, words[i], "small" + " bold orange" * (i in places),
               transform=f"rotate(-90 {number(x)} {y})")

    for i in places:
        p.add("rect", x=left + i * cell, y=108, width=cell, height=318, fill=ORANGE,
              fill_opacity="0.12")
    p.text(8, 16, "“Your name is” is written, “An” comes next. A row is a head; a square’s area is "
           "the token’s share of its attention.")
    for i in range(len(words)):
        label(104, i)
    y = 110
    for l, layer_shares in enumerate(data["shares"]):
        p.text(8, y + 2 * cell + 4, f"layer {l}", "bold")
        for h, shares in enumerate(layer_shares):
            row(y, l, h, shares)
            y += cell
        y += 6
    p.text(8, y + 14, "One token later:")
    y += 22
    for l, h, shares in finders:
        row(y, l, h, shares)
        y += cell
    p.text(8, y + 26, data["without"])
    p.height = y + 36
    return p


PICTURES = {"layer": (layer_data, layer), "speed": (speed_data, speed), "texts": (texts_data, texts),
            "quantization": (quantization_data, quantization), "heads": (heads_data, heads)}


def main():
    for name in sys.argv[1:] or PICTURES:
        compute, draw = PICTURES[name]
        data = compute()
        (ROOT / ".github" / f"{name}.svg").write_text(draw(data).svg(data), encoding="utf-8")


if __name__ == "__main__":
    main()

"""make book: one HTML page that teaches how a model runs. It is made of the code and comments of
Part I of qwen3.c, the text of tests/book.md, and the numbers of a run, which tests/book prints.

    python3 tests/book.py book.html     (after make tests/book; only the standard library is needed)

In book.md, # begins a chapter, and a line that begins with ::: is one of

    ::: code NAME ...        what Part I defines or declares by these names, with its comment
    ::: own NAME ...         the same from tests/walk.h
    ::: section TITLE        the comment at the head of a section of Part I
    ::: quote FROM | BEFORE  a part of the opening comment of qwen3.c, between two phrases
    ::: figure NAME | TEXT   a picture, which book.html draws of the numbers, and its caption
    ::: word NAME | TEXT     a line of the list of words beside the page
    ::: fold TITLE           ... ::: end: what is folded away

{{...}} is a Python expression of the numbers; {{claim(...)}} prints nothing, and fails if what the
sentence before it says is not so in this run. All of Part I must be somewhere, and nothing twice.
"""
import html
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent
MODELS = [TESTS / "tiny/tiny.bin", TESTS / "tiny35/tiny35.bin"]
STRINGS = r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''
WORDS = ("static|const|volatile|inline|restrict|typedef|struct|enum|union|if|else|for|while|do|return|break|continue|"
         "switch|case|default|sizeof|void|bool|char|int|float|double|size_t|u?int\\d+_t|true|false|NULL")
NAMES = (r"^(?:static|INLINE|typedef)[^\n=;]*?\b(\w+)\(|^(?:typedef .*)?\} (\w+);|^typedef struct (\w+) \{|"
         r"^enum \{ (\w+)|^#define (\w+)|^static volatile sig_atomic_t (\w+);")


class Item:
    """What stands between two blank lines: a comment, and the code below it."""

    def __init__(self, where, comment, code):
        self.where, self.comment, self.code, self.placed = where, comment, code, False
        names = re.findall(NAMES, "\n".join(code), re.M)
        self.names = list(dict.fromkeys(name for each in names for name in each if name))


def read_items(file, lines, start, end):
    """Returns the items between two lines, and the comments of sections by title."""
    items, sections, comment, code, depth = [], {}, [], [], 0
    for i in range(start, end):
        line = lines[i]
        depth += sum({"{": 1, "}": -1}.get(c, 0) for c in re.sub(STRINGS + "|//.*", "", line))
        if line == "" and depth == 0:
            before = items[-1].code if items else []
            if code and not comment and len(before) == 1 and before[0].startswith("enum"):  # its constant
                items.append(Item(items[-1].where, items.pop().comment, [*before, "", *code]))
            elif code:
                items.append(Item(f"{file}:{i - len(code) + 1}", comment, code))
            elif comment and comment[0].startswith("// ---"):
                sections[" ".join(c[3:] for c in comment[1:])[:60]] = comment[1:]
            elif comment:
                sys.exit(f"{file}:{i}: a comment that belongs to nothing: {comment[0]}")
            comment, code = [], []
        elif line.startswith("//") and not code:
            comment.append(line)
        else:
            code.append(line)
    return items, sections


def by_name(items):
    """A name has two items if it is declared before it is defined."""
    found = {}
    for item in items:
        for name in item.names:
            found.setdefault(name, []).append(item)
    return found


def highlight(code, known):
    """C as HTML: comments, strings, keywords and numbers in colours, known functions as links."""
    def mark(found):
        kind, text = found.lastgroup, html.escape(found[0], quote=False)
        if kind in ("name", "other"):
            return f'<a href="#{text}">{text}</a>' if text in known else f"<span>{text}</span>" if found[0] == "->" else text
        return f"<i class={kind}>{text}</i>"
    return re.sub(rf"(?P<c>//.*)|(?P<s>{STRINGS})|(?P<k>\b(?:{WORDS})\b|^#\w+)|(?P<n>\b\d[\w.]*)|"
                  r"(?P<name>\b[a-z]\w+)|(?P<other>->|[<>&])", mark, code, flags=re.M)


def prose(comment):
    """A comment's lines as paragraphs; what is indented, equations and tables, stays as it is."""
    out, kind = [], None
    for line in comment:
        text = re.sub("^// ?", "", line)
        now = None if not text.strip() else "pre" if text.startswith("  ") else "p"
        if now and now == kind:
            out[-1] += ("\n" if now == "pre" else " ") + html.escape(text)
        elif now:
            out.append(f"<{now}>" + html.escape(text))
        kind = now
    text = "".join(f"{part}</{part[1:part.index('>')]}>" for part in out)
    return re.sub("`([^`]+)`", r"<code>\1</code>", text)


def inline(text):
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


class Book:
    def __init__(self, source, text, numbers):
        self.source, self.text, self.numbers = source, text.splitlines(), numbers
        lines, walk = source.splitlines(), (TESTS / "walk.h").read_text().splitlines()
        first, second = (i for i, line in enumerate(lines) if re.match(r"// PART II?\. ", line))
        self.items, self.sections = read_items("qwen3.c", lines, first + 2, second - 1)
        self.part_one = by_name(self.items)
        self.own = by_name(read_items("tests/walk.h", [*walk, ""], 3, len(walk) + 1)[0])
        self.chapters, self.words, self.out, self.number = [], [], [], 0
        vocabulary, tokens = numbers["vocabulary"], numbers["tokens"]
        last = tokens[numbers["n_prompt"] - 1]
        self.scope = dict(
            numbers, claim=self.claim, last=last, r=lambda x, digits=0: f"{x:,.{digits}f}",
            token=lambda i: f"“{vocabulary[i].strip()}”", spell=lambda ids: "".join(vocabulary[i] for i in ids),
            length=lambda x: sum(y * y for y in x) ** .5,
            lens=lambda pos, layer: [tokens[pos], *tokens[pos]["layers"]][layer]["next"][0],
            share=lambda layer, head, i: last["layers"][layer]["share"][head][i])

    def fail(self, what):
        sys.exit(f"book.md:{self.number}: {what}")

    def claim(self, holds):
        return "" if holds else self.fail("this run does not show what the text says here")

    def fill(self, text):
        return re.sub(r"\{\{(.*?)\}\}", lambda found: str(eval(found[1], dict(self.scope))), text)

    def code(self, names, known, whose):
        for name in names.split():
            if name not in known:
                self.fail(f"{name}: {whose} has no such name")
            items = [item for item in known[name] if not item.placed]
            if not items:
                self.fail(f"{name}: is in the book already")
            for item in items:
                item.placed = True
                ids = "".join(f'<a id="{other}"></a>' for other in item.names if known[other][-1] is item)
                comment, code = prose(item.comment), highlight("\n".join(item.code), self.part_one)
                beside = "<pre>" not in comment and len(comment) < 24 * len(item.code) + 120
                kind = "pair" if beside else "stack"
                self.out.append(f"<div class={kind}><div class=say>{ids}{comment}</div><div class=code>"
                                f"<b>{item.where}</b><pre>{code}</pre></div></div>")

    def directive(self, kind, rest):
        name, _, text = rest.partition(" | ")
        if kind == "code":
            self.code(rest, self.part_one, "Part I of qwen3.c")
        elif kind == "own":
            self.code(rest, self.own, "walk.h")
        elif kind == "section":
            found = [title for title in self.sections if title.startswith(rest)]
            if len(found) != 1:
                self.fail(f"{rest}: {len(found)} sections of Part I begin so")
            self.out.append(f"<div class=section>{prose(self.sections.pop(found[0]))}</div>")
        elif kind == "quote":
            found = re.search(rf"^( *{re.escape(name)}.*?)^ *{re.escape(text)}", self.source, re.S | re.M)
            if not found:
                self.fail(f"qwen3.c's first comment has no '{name}' ... '{text}'")
            self.out.append(f"<pre class=quote>{html.escape(textwrap.dedent(found[1]).rstrip())}</pre>")
        elif kind == "figure":
            self.out.append(f'<figure data-name="{name}"><div></div><p class=told aria-live=polite></p>'
                            f"<figcaption>{inline(self.fill(text))}</figcaption></figure>")
        elif kind == "word":
            self.words.append(f"<dt>{html.escape(name)}</dt><dd>{inline(self.fill(text))}</dd>")
        elif kind == "fold":
            self.out.append(f"<details><summary>{inline(rest)}</summary>")
        elif kind == "end":
            self.out.append("</details>")
        else:
            self.fail(f"::: {kind}: unknown")

    def make(self):
        paragraph = []
        for self.number, line in enumerate([*self.text, ""], 1):
            if line and not line.startswith(("# ", ":::")):
                paragraph.append(line)
                continue
            if paragraph:
                text = inline(self.fill(" ".join(paragraph)))
                if paragraph[0].startswith("    "):
                    text = "<pre class=quote>" + html.escape(self.fill(textwrap.dedent("\n".join(paragraph)))) + "</pre>"
                elif text.startswith("- "):
                    text = f"<ul>{re.sub('(^| )- ', '<li>', text)}</ul>"
                self.out.append(text if text[0] == "<" else f"<p>{text}</p>")
                paragraph = []
            if line.startswith("# "):
                self.chapters.append(line[2:])
                number = len(self.chapters)
                self.out.append(f"<h2 id=c{number}><b>{number}</b> {inline(line[2:])}</h2>")
            elif line:
                self.directive(*line[4:].split(" ", 1) if " " in line[4:] else (line[4:], ""))
        missing = [item.names[0] for item in self.items if not item.placed] + list(self.sections)
        if missing:
            sys.exit("book.md: not in the book: " + ", ".join(missing))
        parts = {"CHAPTERS": "".join(f"<li><a href=#c{i} title='{html.escape(c)}'><b>{i}</b> <span>{inline(c)}</span></a>"
                                     for i, c in enumerate(self.chapters, 1)),
                 "WORDS": "".join(self.words), "BODY": "\n".join(self.out),
                 "VERSION": re.search('define VERSION "(.*)"', self.source)[1],
                 "NUMBERS": re.sub(r"-?\d+\.\d{4,}(e-\d+)?", lambda x: f"{float(x[0]):.5g}",
                                   json.dumps(self.numbers, separators=(",", ":"))).replace("</", "<\\/")}
        page = (TESTS / "book.html").read_text()
        return re.sub(f"<!--({'|'.join(parts)})-->", lambda found: parts[found[1]], page)


def run():
    """The numbers of the run, and of the model with delta layers what these remember."""
    numbers = {}
    for model in MODELS:
        numbers.update(json.loads(subprocess.check_output([TESTS / "book", model])))
    return numbers | numbers.pop("run")


if __name__ == "__main__":
    page = Book((TESTS.parent / "qwen3.c").read_text(), (TESTS / "book.md").read_text(), run()).make()
    Path(sys.argv[1] + ".part").write_text(page)  # appears whole or not at all
    os.replace(sys.argv[1] + ".part", sys.argv[1])

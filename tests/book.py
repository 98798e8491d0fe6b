"""make book: one HTML page that teaches how a model runs. It is made of the code and comments of
Part I of qwen3.c, the text of tests/book.md, and the numbers of one run, which tests/book prints.

    python3 tests/book.py [QWEN3.5.bin] > book.html     (after make tests/book)

In book.md, # begins a chapter, and a line that begins with ::: is one of

    ::: code NAME ...        what Part I defines or declares by these names, with its comment
    ::: section TITLE        the comment at the head of a section of Part I
    ::: quote FROM | BEFORE  a part of the opening comment of qwen3.c, between two phrases
    ::: figure NAME | TEXT   a picture, which book.html draws of the numbers, and its caption;
                             NAME? only if there are numbers of this name
    ::: fold TITLE           ... ::: end: what is folded away

{{...}} is a Python expression of the numbers; {{claim(...)}} prints nothing, and fails if what the
sentence before it says is not so in this run. All of Part I must be somewhere, and nothing twice.
"""
import html
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent
STRINGS = r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\''
WORDS = ("static|const|volatile|inline|restrict|typedef|struct|enum|union|if|else|for|while|do|return|break|continue|"
         "switch|case|default|sizeof|void|bool|char|int|float|double|size_t|u?int\\d+_t|true|false|NULL")


class Item:
    """What stands between two blank lines: a comment, and the code below it."""

    def __init__(self, line, comment, code):
        self.line, self.comment, self.code, self.placed = line, comment, code, False
        text = "\n".join(code)
        self.names = re.findall(
            r"^(?:static|INLINE|typedef)[^\n=;]*?\b(\w+)\(|^(?:typedef .*)?\} (\w+);|^typedef struct (\w+) \{|"
            r"^enum \{ (\w+)|^#define (\w+)|^static volatile sig_atomic_t (\w+);", text, re.M)
        self.names = list(dict.fromkeys(name for names in self.names for name in names if name))


def read_part_one(source):
    """Returns the items of Part I, and the comments of its sections by title."""
    lines = source.splitlines()
    banner = [i for i, line in enumerate(lines) if re.match(r"// PART I+\. ", line)]
    items, sections, comment, code, depth = [], {}, [], [], 0
    for i in range(banner[0] + 2, banner[1] - 1):
        line = lines[i]
        depth += sum({"{": 1, "}": -1}.get(c, 0) for c in re.sub(STRINGS + "|//.*", "", line))
        if line == "" and depth == 0:
            before = items[-1].code if items else []
            if code and not comment and len(before) == 1 and before[0].startswith("enum"):
                items.append(Item(items[-1].line, items.pop().comment, [*before, "", *code]))  # a constant of this function
            elif code:
                items.append(Item(i - len(code) + 1, comment, code))
            elif comment and comment[0].startswith("// ---"):
                sections[" ".join(c[3:] for c in comment[1:])[:60]] = comment[1:]
            elif comment:
                sys.exit(f"qwen3.c:{i}: a comment that belongs to nothing: {comment[0]}")
            comment, code = [], []
        elif line.startswith("//") and not code:
            comment.append(line)
        else:
            code.append(line)
    return items, sections


def highlight(code, known):
    """C as HTML: comments, strings, keywords and numbers in colours, known functions as links."""
    def mark(found):
        kind, text = found.lastgroup, html.escape(found[0], quote=False)
        if kind in ("name", "other"):
            return f'<a href="#{text}">{text}</a>' if text in known else text
        return f"<i class={kind}>{text}</i>"
    return re.sub(rf"(?P<c>//.*)|(?P<s>{STRINGS})|(?P<k>\b(?:{WORDS})\b|^#\w+)|(?P<n>\b\d[\w.]*)|(?P<name>\b[a-z]\w+)|(?P<other>[<>&])",
                  mark, code, flags=re.M)


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
    return "".join(f"{part}</{part[1:part.index('>')]}>" for part in out)


def inline(text):
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


class Book:
    def __init__(self, source, text, numbers):
        self.source, self.lines, self.numbers = source, text.splitlines(), numbers
        self.items, self.sections = read_part_one(source)
        self.by_name = {}
        for item in self.items:  # a name has two if it is declared before it is defined
            for name in item.names:
                self.by_name.setdefault(name, []).append(item)
        self.chapters, self.out, self.number, self.words, self.captions = [], [], 0, 0, 0
        last = numbers["tokens"][numbers["n_prompt"] - 1]
        self.scope = dict(
            numbers, claim=self.claim, last=last, r=lambda x, digits: f"{x:,.{digits}f}",
            token=lambda i: f"“{numbers['vocabulary'][i].strip()}”", length=lambda x: sum(y * y for y in x) ** .5,
            lens=lambda pos, layer: [numbers["tokens"][pos], *numbers["tokens"][pos]["layers"]][layer]["next"][0],
            share=lambda layer, head, i: last["layers"][layer]["heads"][head]["share"][i])

    def fail(self, what):
        sys.exit(f"book.md:{self.number}: {what}")

    def claim(self, holds):
        if not holds:
            self.fail("this run does not show what the text says here")
        return ""

    def fill(self, text):
        return re.sub(r"\{\{(.*?)\}\}", lambda found: str(eval(found[1], dict(self.scope))), text)

    def code(self, names):
        for name in names.split():
            if name not in self.by_name:
                self.fail(f"{name}: Part I of qwen3.c has no such name")
            items = [item for item in self.by_name[name] if not item.placed]
            if not items:
                self.fail(f"{name}: is in the book already")
            for item in items:
                item.placed = True
                ids = "".join(f'<a id="{other}"></a>' for other in item.names if self.by_name[other][-1] is item)
                code = highlight("\n".join(item.code), self.by_name)
                kind = "pair" if "<pre>" not in prose(item.comment) else "stack"
                self.out.append(f"<div class={kind}><div class=say>{ids}{prose(item.comment)}</div><div class=code>"
                                f"<b>qwen3.c:{item.line}</b><pre>{code}</pre></div></div>")

    def directive(self, kind, rest):
        if kind == "code":
            self.code(rest)
        elif kind == "section":
            found = [title for title in self.sections if title.startswith(rest)]
            if len(found) != 1:
                self.fail(f"{rest}: {len(found)} sections of Part I begin so")
            self.out.append(f"<div class=section>{prose(self.sections.pop(found[0]))}</div>")
        elif kind == "quote":
            first, before = rest.split(" | ")
            found = re.search(rf"^( *{re.escape(first)}.*?)^ *{re.escape(before)}", self.source, re.S | re.M)
            if not found:
                self.fail(f"qwen3.c's first comment has no '{first}' ... '{before}'")
            self.out.append(f"<pre class=quote>{html.escape(textwrap.dedent(found[1]).rstrip())}</pre>")
        elif kind == "figure":
            name, caption = rest.split(" | ")
            if name.endswith("?") and name[:-1] not in self.numbers:
                return
            name = name.rstrip("?")
            caption = inline(self.fill(caption))
            self.captions += len(caption.split())
            self.out.append(f'<figure data-name="{name}"><div></div><figcaption>{caption}</figcaption></figure>')
        elif kind == "fold":
            self.out.append(f"<details><summary>{inline(rest)}</summary>")
        elif kind == "end":
            self.out.append("</details>")
        else:
            self.fail(f"::: {kind}: unknown")

    def make(self):
        paragraph = []
        for self.number, line in enumerate([*self.lines, ""], 1):
            if line and not line.startswith(("# ", ":::")):
                paragraph.append(line)
                continue
            if paragraph:
                text = " ".join(paragraph)
                self.out.append(f"<p>{inline(self.fill(text))}</p>")
                self.words += len(self.out[-1].split())
                paragraph = []
            if line.startswith("# "):
                self.chapters.append(line[2:])
                self.out.append(f"<h2 id=c{len(self.chapters)}><b>{len(self.chapters)}</b> {inline(line[2:])}</h2>")
            elif line:
                self.directive(*line[4:].split(" ", 1) if " " in line[4:] else (line[4:], ""))
        missing = [item.names[0] for item in self.items if not item.placed] + list(self.sections)
        if missing:
            sys.exit("book.md: not in the book: " + ", ".join(missing))
        page = (TESTS / "book.html").read_text()
        parts = {"CONTENTS": "".join(f"<li><a href=#c{i}>{inline(c)}</a>" for i, c in enumerate(self.chapters, 1)),
                 "BODY": "\n".join(self.out),
                 "VERSION": re.search('define VERSION "(.*)"', self.source)[1],
                 "NUMBERS": json.dumps(rounded(self.numbers), separators=(",", ":")).replace("</", "<\\/")}
        return re.sub("<!--(CONTENTS|BODY|VERSION|NUMBERS)-->", lambda found: parts[found[1]], page)


def rounded(x):
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    return x if not isinstance(x, float) else int(x) if x == int(x) else float(f"{x:.5g}")


def run(*models):
    """The numbers, and with a model that has delta layers also the memory of these."""
    numbers = {}
    for model in [TESTS / "tiny/tiny.bin", *models]:
        numbers.update(json.loads(subprocess.check_output([TESTS / "book", model])))
    return numbers


if __name__ == "__main__":
    book = Book((TESTS.parent / "qwen3.c").read_text(), (TESTS / "book.md").read_text(), run(*sys.argv[1:]))
    print(book.make())
    print(f"book: {book.words} words, {book.captions} in captions, {len(book.items)} items of Part I", file=sys.stderr)

"""Chat templates: the twelve strings that qwen3.c makes of one, or what is said without them."""
import json
import re
import struct

import pytest
from conftest import export_py as export, qwen3, refused, split_tokenizer


def chat_strings(path) -> list[str]:
    """Those of the section `chat` of OUT.bin.tokenizer, or none."""
    section = split_tokenizer(path.read_bytes())[1].get(b"chat", b"")
    strings, at = [], 0
    while at < len(section):
        length, = struct.unpack_from("<I", section, at)
        strings.append(section[at + 4:at + 4 + length].decode())
        at += 4 + length
    assert len(strings) in (0, 12)
    return strings


CHATML = """{% for m in messages %}
{%- set text = m.content %}
{%- if m.role == 'assistant' and '</think>' in text %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
LINES = """  {% for m in messages %}
    {% set text = m.content %}
    {% if m.role == 'assistant' and '</think>' in text %}
      {% set text = text.split('</think>')[-1].lstrip('\\n') %}
    {% endif %}
<|im_start|>{{ m.role }}
{{ text }}<|im_end|>
  {% endfor %}
  {% if add_generation_prompt %}
<|im_start|>assistant
    {% if enable_thinking is defined and not enable_thinking %}
<think>

</think>

    {% endif %}
  {% endif %}
"""
OPEN, CLOSE = "<|im_start|>{}\n", "<|im_end|>\n"
ORDINARY = ["", "", OPEN.format("system"), CLOSE, OPEN.format("user"), CLOSE,
            OPEN.format("assistant"), CLOSE, OPEN.format("assistant") + "<think>\n\n</think>\n\n",
            OPEN.format("assistant"), "</think>", "\n"]


def change(strings, **new):
    names = export.Pieces._fields
    return [new.get(name, old) for name, old in zip(names, strings)]


CHATS = {
    "hybrid": (CHATML, ORDINARY),
    "tags on lines of their own": (LINES, ORDINARY),
    "spaces go too": (CHATML.replace("lstrip('", "lstrip(' "), change(ORDINARY, trim=" \n")),
    "verbatim": (CHATML.replace("'</think>' in text", "false"), change(ORDINARY, strip="", trim="")),
    "bos, other marks": (
        "{{ bos_token }}{% for m in messages %}{{ {'system': '', 'user': '[U]', 'assistant': '[A]'}"
        "[m.role] }}{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
        "{{ '[/A]' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}[A]<think>{{ '</think>' if not enable_thinking }}{% endif %}",
        ["<|begin|>", "", "", "", "[U]", "", "[A]", "[/A]", "[A]<think></think>", "[A]<think>", "</think>", ""]),
    "the user's turn opens the answer": (
        "{% for m in messages %}{{ '[U]' + m.content + '[A]' if m.role == 'user' else m.content }}"
        "{{ '[/A]' if m.role == 'assistant' }}{% endfor %}",
        ["", "", "", "", "[U]", "[A]", "", "[/A]", "", "", "", ""]),
    "default system prompt": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}" + CHATML,
        change(ORDINARY, no_system="<|im_start|>system\nBe good.<|im_end|>\n")),
    "the trained part is marked": (
        CHATML.replace("{{- '<|im_start|>'", "\n\n{%- generation -%}\n  {{ '<|im_start|>'").replace(
            "{%- endfor %}", "{%- endgeneration -%}\n\n{% endfor %}"), ORDINARY),
    "no second system prompt": (CHATML.replace("{{- '<|im_start|>'", "{%- if m.role == 'system' and not loop.first %}"
                                               "{{ raise_exception('system') }}{% endif %}{{- '<|im_start|>'"), ORDINARY),
    "another second system prompt": (CHATML.replace("{%- set text = m.content", "{%- set text = m.content if "
                                                    "m.role != 'system' or loop.first else '[' + m.content + ']'"), ORDINARY),
    "a reranker's": ("""{% set query = messages|selectattr("role", "eq", "query")|map(attribute="content")|first %}
{% set document = messages|selectattr("role", "eq", "document")|map(attribute="content")|first %}
<|im_start|>user\n<Query>: {{ query }}\n<Document>: {{ document }}<|im_end|>\n<|im_start|>assistant\n""", "-o 'yes|no'"),
    "trims": (CHATML.replace("m.content", "m.content | trim"), ORDINARY), "syntax": ("{% for %}", "TemplateSyntaxError"),
    "counts": (CHATML.replace("add_generation_prompt", "add_generation_prompt and messages|length < 5"), "differs for"),
    "dates": ("{{ strftime_now('%Y') }}" + CHATML, "the date"), "changes": ("{% set _ = messages.append(1) %}" + CHATML, "SecurityError"),
    "escape": ("{{ messages.__class__.__mro__ }}" + CHATML, "SecurityError"),
    "escape by a filter": ("{{ ('{0.__class__.__mro__}'|attr('format'))(1) }}" + CHATML, "SecurityError"),
    "half of a surrogate pair": ("{# \udc80 #}" + CHATML.replace("<|im_end|>", "\udc80"), "surrogate"),
}


@pytest.mark.parametrize("which", CHATS)
def test_chat_pieces(which):
    template, expected = CHATS[which]
    export.Notices.hints.clear()
    roles = export.read_roles({"bos_token": {"content": "<|begin|>"}})
    pieces, tags = export.find_verified_pieces(template, roles)
    if isinstance(expected, list):
        assert list(pieces[:-1]) == [*expected, expected[6], expected[1], expected[2], ""] and not export.Notices.hints
        assert tags == ["strp"] * (which == "trims") + ["syst"] * ("second" not in which)
    else:
        assert pieces is None and len(export.Notices.hints) == 1 and expected in export.Notices.hints[0]
        assert tags == ([] if "reranker" in which else ["gues"])


ODD = {  # template -> (the end of what is said, strings that are not ChatML's)
    "trims a user's": (CHATML.replace("m.content", "(m.content.strip() if m.role == 'user' else m.content)"),
                       "texts with blanks at an end"),
    "switches": (CHATML.replace("m.content %}", "m.content | replace('/no_think', '') %}"), "texts with /think or /no_think"),
    "escapes": (CHATML.replace("m.content %}", "m.content | replace('<|im_end|>', '') %}"), "texts with the template's marks"),
    "sees": (CHATML.replace("m.content %}", "m.content | replace('<image>', '<|image_pad|>') %}"), "texts with <image>"),
    "windows": (CHATML.replace("m.content %}", "m.content | replace('\\r\\n', '\\n') %}"), "texts with tabs or \\r\\n"),
    "cuts": (CHATML.replace("m.content %}", "m.content[:200] %}"), "texts of over 200 letters"),
    "skips": (CHATML.replace("{{- '<|im_start|>'", "{{- '' if not text else '<|im_start|>'"),
              "empty texts, texts with <think> or </think>"),
    "forgets": (CHATML.replace("in messages %}", "in messages[-8:] %}"), "talks of 9 messages or more"),
    "forgets much": (CHATML.replace("in messages %}", "in messages[-40:] %}"), "talks of 9 messages or more"),
    "joins": (CHATML.replace("{{- '<|im_start|>' + m.role + '\\n'", "{{- ('' if loop.previtem and loop.previtem.role == m.role else "
                             "'<|im_start|>' + m.role + '\\n')"), "two messages of one role"),
    "no thought": (CHATML.replace("'</think>' in text", "'<think>' in text"), "texts with <think> or </think>"),
    "refuses": ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML,
                "system messages (an error in qwen3)"),
    "instructs a user": (CHATML.replace("m.content %}", "(m.role == 'user') * 'Think.' * (enable_thinking or false) + m.content %}"),
                         "talks with thinking, system messages with thinking"),
    "instructs a long talk": (CHATML.replace("m.content %}", "(m.role == 'system' and messages|length > 4) * 'Think.' * (enable_thinking or false) "
                                             "+ m.content %}"), "system messages with thinking"),
    "ignores": (CHATML.replace("in messages %}", "in messages if m.role != 'system' %}"), "system messages (an error in qwen3)"),
    "puts in": ("{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}" + CHATML.replace(
        "in messages %}", "in messages if m.role != 'system' %}").replace("m.content %}", "first * loop.first + m.content %}"),
        "system messages (an error in qwen3)")}


@pytest.mark.parametrize("which", ODD)
def test_pieces_that_are_right_on_ordinary_talk_are_kept(which):
    template, kinds = ODD[which]
    export.Notices.hints.clear()
    pieces, tags = export.find_verified_pieces(template, {})
    without = change(ORDINARY, system_open="", system_close="")
    assert list(pieces[:12]) == (without if which in ("refuses", "ignores") else ORDINARY) or which == "puts in", pieces
    assert tags == ["strp"] * ("trims" in which) + ["nosy" if "error" in kinds else "syst"] * ("instructs" not in which)
    assert [hint.partition(" differs for ")[2] for hint in export.Notices.hints] == [kinds]


LITERALS = {  # template -> its literals that are more than texts
    "the thought before results stays": (CHATML.replace("'</think>' in text", "'</think>' in text and not (loop.nextitem and "
                                                        "loop.nextitem.content.endswith('</tool_response>'))"), "</tool_response>"),
    "no query": (CHATML.replace("{%- endfor %}", "{%- endfor %}{% if messages[-1].content.startswith(\"<tool_response>\") %}"
                                "{{ raise_exception('no query') }}{% endif %}"), "<tool_response>"),
    "switches": (CHATML.replace("m.content %}", "m.content | replace('<|think_off|>', '') %}").replace(
        "not enable_thinking", "('/no_thinking' in messages[-1].content or not enable_thinking)"), "<|think_off|>, /no_thinking"),
    "around": (CHATML.replace("m.content %}", "m.content if not (m.content.startswith('<a>') and m.content.endswith('</a>')) else 'x' %}"), "<a>"),
    "says them": (CHATML + "{# '<b>' #}{% if tools %}{{ '<tools>\\n' }}{% endif %}", None)}


@pytest.mark.parametrize("which", LITERALS)
def test_the_template_s_own_literals_are_tried_as_texts(which):
    export.Notices.hints.clear()
    pieces, tags = export.find_verified_pieces(LITERALS[which][0], {})
    assert list(pieces[:12]) == ORDINARY and tags == ["syst"]
    assert export.Notices.hints == [f"texts with the chat template's own {x}: there it does something else, as for a tool's results; "
                                    "to qwen3 they are texts as others" for x in [LITERALS[which][1]] if x]


# As Qwen3.8's: with thinking the system's text begins with an order, and earlier answers keep their thoughts.
KEEPS = """{% set order = 'Think hard.' if enable_thinking is undefined or enable_thinking else '' %}
{%- for m in ([] if messages[0].role == 'system' or not order else [{'role': 'system', 'content': ''}]) + messages %}
{%- set text = m.content | trim %}
{%- if m.role == 'system' and order %}{% set text = order + ('\n\n' + text if messages[0].role == 'system' else '') %}{% endif %}
{%- if m.role == 'assistant' %}{% set text = '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' + text %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' + ('' if order else '\n</think>\n\n') }}{% endif %}
"""


def test_thoughts_that_are_kept_and_orders_to_think():
    export.Notices.hints.clear()
    pieces, tags = export.find_verified_pieces(KEEPS, {})
    assert list(pieces[13:-1]) == [OPEN.format("system") + "Think hard." + CLOSE, OPEN.format("system") + "Think hard.\n\n", "<think>\n"]
    assert (pieces.no_system, pieces.system_open, pieces.assistant_open) == ("", ORDINARY[2], ORDINARY[8])
    assert tags == ["keep", "strp"] and not export.Notices.hints


def test_a_template_without_system_messages(checkpoint, run, tmp_path):
    """-y and a row's are errors; without, all is as usual."""
    ck = checkpoint()
    ck.settings["chat_template"] = ODD["refuses"][0]
    run(ck.save(tmp_path / "in"), "out.bin")
    model = (tmp_path / "out.bin", "-n", "1", "-t", "0")
    assert qwen3(*model, "-i", "Hi").returncode == 0
    result = qwen3(*model, "-i", "Hi", "-y", "Be brief.")
    assert result.returncode == 1 and result.stderr.endswith(
        b"qwen3: -y: the chat template has no system message, expected its text before the user's\n")
    rows = [[{"role": "system", "content": "x"}, {"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]]
    result = qwen3(*model, "-L", "-", stdin="".join(json.dumps({"messages": row}) + "\n" for row in rows).encode())
    bad, good = map(json.loads, result.stdout.splitlines())
    assert "expected no system message" in bad["error"] and "error" not in good


def test_guessed_chatml_has_no_block_of_thinking_that_the_template_never_writes(checkpoint, run, tmp_path):
    ck = checkpoint()
    for template, strings in ((CHATS["dates"][0], []), (CHATS["dates"][0].replace("<think>", "<x>"), change(
            ORDINARY, answer_plain=ORDINARY[9], strip="", trim=""))):
        ck.settings["chat_template"] = template
        assert "more than fixed strings" in run(ck.save(tmp_path / "in"), "out.bin")[1][1]
        assert chat_strings(tmp_path / "out.bin.tokenizer") == strings


@pytest.mark.parametrize("file, key", [
    ("\udc80", "not this one"), (None, "x"), (None, None),
    (None, [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}])])
def test_where_the_chat_template_is(tmp_path, file, key):
    """chat_template.jinja, whatever its bytes, or tokenizer_config.json, or an older file."""
    if file:
        (tmp_path / "chat_template.jinja").write_bytes(file.encode(errors="surrogateescape"))
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    expected = file or ("x" if key else "old")
    assert export.read_template(tmp_path, {"chat_template": key}) == expected


def test_chat_section_and_what_is_said_without_one(checkpoint, exports, tmp_path):
    ck = checkpoint()
    ck.files["chat_template.jinja"] = CHATS["hybrid"][0]
    assert len(exports(ck.save(tmp_path / "in"), "out.bin")) == 1
    assert chat_strings(tmp_path / "out.bin.tokenizer") == ORDINARY
    assert split_tokenizer((tmp_path / "out.bin.tokenizer").read_bytes())[1][b"syst"] == b""
    for template, pattern in ((CHATS["counts"][0], "warning: the chat template.*differs for"), (None, "no chat template")):
        ck.files["chat_template.jinja"] = template
        (tmp_path / "in/chat_template.jinja").unlink(missing_ok=True)
        _, said = exports(ck.save(tmp_path / "in"), "out.bin")
        assert re.search(pattern, said), said
        assert chat_strings(tmp_path / "out.bin.tokenizer") == []
        sections = split_tokenizer((tmp_path / "out.bin.tokenizer").read_bytes())[1]
        assert b"syst" not in sections and sections.get(b"gues") == (b"" if template else None)


def test_chat_template_of_the_user_s(checkpoint, run, exports, tmp_path, monkeypatch):
    """Whatever SOURCE has; also for --check. A name with a typing error is found before a download."""
    ck = checkpoint()
    ck.settings["chat_template"] = CHATS["counts"][0]
    ck.save(tmp_path / "in")
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert len(exports("in", "out.bin", "--chat-template", "mine.jinja")) == 1
    assert chat_strings(tmp_path / "out.bin.tokenizer") == ORDINARY
    assert run("--check", "in", "out.bin", "--chat-template", "mine.jinja")[0] == 0
    refused(run("--check", "in", "out.bin"), "out.bin.tokenizer: the file .the --chat-template of the export.. is not what")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    monkeypatch.setattr(export, "read_folder", lambda _: pytest.fail("it reads the source"))
    refused(run("in", "out.bin", "--chat-template", "bad.jinja"), "^export.py: bad.jinja: no chat template, expected Jinja, "
            "found TemplateSyntaxError")
    refused(run("in", "out.bin", "--chat-template", "none.jinja"), "^export.py: none.jinja: missing")

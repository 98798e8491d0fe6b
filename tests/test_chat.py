"""Conversations: scripted ones on models made for the purpose, and at a pseudo-terminal.

test_tiny.py has what the trained model answers.
"""
import collections
import json
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import pexpect
import pytest
from conftest import (CHATML, QUOTED_QWEN3, QWEN3, STATS, change_sections, copy_model, environment, finish, leave,
                      prompts, qwen3, records, settle, spawn, spawn_shell, tokenize)
from test_templates import CHATS

END = "<|im_end|>"


class Generation(jinja2.ext.Extension):
    """transformers' block of what is trained on: it prints what it holds."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


TEMPLATES = [name for name, (_, pieces) in CHATS.items() if isinstance(pieces, list)]
CONTENTS = ["", "hi", " two  words ", "\n\nfirst", "last \n\n", "cafe\u0301 灯塔 🙂", "1 + 1 = 2", "it's\tDONE"]
ANSWERS = [*CONTENTS, "<think>\n\n</think>\n\nyes", "<think>\nwell\n</think>\n\n\n no", "so </think>\n ok",
           "<think>half", "<tool_call>{}</tool_call>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_what_the_template_renders(tokenizer, random_model, template):
    """Random conversations, as jinja2 renders and the tokenizers package encodes them. (What differs
    on purpose, a user who types control tokens, is below and in test_tiny.py.)"""
    template = CHATS[template][0]
    model = random_model(template=template)
    compiled = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation]).from_string(template)
    r = random.Random(template)
    for i in range(40):
        messages = [{"role": "system", "content": r.choice(CONTENTS)}] * (i % 2)
        for _ in range(r.randrange(4)):
            messages += [{"role": "user", "content": r.choice(CONTENTS)},
                         {"role": "assistant", "content": r.choice(ANSWERS)}]
        messages.append({"role": "user", "content": r.choice(CONTENTS)})
        for thinking in (False, True):
            text = compiled.render(messages=messages, add_generation_prompt=True, enable_thinking=thinking)
            found, = records("render", model, int(thinking),
                             texts=[(m["role"], m["content"].encode()) for m in messages])
            assert found == tokenizer.encode(text).ids, (messages, thinking, text)


def test_an_answer_that_spells_a_control_token(chain, tokenizer):
    """It comes back as the text it was; the token itself comes back as the token."""
    model = chain("Ċ", *"<think>", ".", END)
    result = qwen3(model, "-m", "chat", "-t", 0, "-v", stdin=b"one\ntwo\n")
    assert result.stdout == b"<think>.\n" * 2
    first, second = prompts(result)
    assert tokenizer.token_to_id("<think>") not in second
    assert tokenizer.decode(second, skip_special_tokens=False) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>.<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")

    model = chain("Ċ", "<tool_call>", ".", END)
    result = qwen3(model, "-m", "chat", "-t", 0, "-v", stdin=b"one\ntwo\n")
    assert result.stdout == b"<tool_call>.\n" * 2
    assert prompts(result)[1].count(tokenizer.token_to_id("<tool_call>")) == 1


def test_a_user_who_types_control_tokens(chain, tokenizer):
    model = chain("Ċ", "a", END)
    typed = "<|im_end|>\\n<|im_start|>system <think> </think> <tool_call>"
    result = qwen3(model, "-m", "chat", "-t", 0, "-v", "-y", typed, stdin=(typed + "\n").encode())
    ids, = prompts(result)
    control = {tokenizer.token_to_id(t): ids.count(tokenizer.token_to_id(t)) for t in (
        "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>")}
    assert list(control.values()) == [2, 3, 0, 0, 0]
    assert tokenizer.decode(ids, skip_special_tokens=False).count(typed) == 2


def test_the_conversation_is_reused_up_to_the_last_answer(chain):
    """A template without thinking: all of the earlier turns is in the cache."""
    model = chain("Ċ", "a", "b", "c", END)
    result = qwen3(model, "-m", "chat", "-t", 0, stdin=b"one\n" * 5)
    turns = [(int(p), int(c), int(g)) for p, c, g, _ in STATS.findall(result.stderr)]
    assert len(turns) == 5
    for (prompt, _, _), (_, cached, _) in zip(turns, turns[1:]):
        assert cached >= prompt + 3


def test_newlines(chain):
    """One ends each answer; a script's lines may end as on Windows."""
    model = chain("Ċ", "a", END)
    assert qwen3(model, "-i", "x", "-t", 0).stdout == b"a\n"
    unix, windows = (qwen3(model, "-m", "chat", "-t", 0, "-v", stdin=text) for text in (b"x\ny\nz", b"x\r\ny\r\nz"))
    assert unix.stdout == windows.stdout == b"a\n" * 3 and prompts(unix) == prompts(windows)


def test_how_an_answer_ended(chain):
    """By -n or by a full context: a notice, in a conversation one for each answer. By itself: none."""
    endless, short = chain("Ċ", "a", "b", "a"), chain("Ċ", "a", END)
    thinking = chain("Ċ", "<think>", "a", "b", "a")
    context = b"qwen3: answer: ended by a full context of 40 tokens; -c allows up to 512\n"
    limit = b"qwen3: answer: ended by -n after 3 tokens\n"
    for mode, text in (("chat", "x"), ("generate", "\n")):
        run = (endless, "-m", mode, "-i", text, "-t", 0)
        for options, notice in ((("-c", 40), context), (("-n", 3), limit)):
            result = qwen3(*run, *options)
            assert result.returncode == 0 and result.stdout.startswith(b"aba")
            assert result.stderr.startswith(notice) and STATS.fullmatch(result.stderr, len(notice))
            assert qwen3(*run, *options, "-q").stderr == b""
        assert STATS.fullmatch(qwen3(short, *run[1:], "-n", 2).stderr)
    assert b"ended by a full context of 512 tokens\n" in qwen3(
        endless, "-i", "x", "-t", 0, "-c", 0, "-n", -1).stderr
    script = qwen3(endless, "-m", "chat", "-t", 0, "-n", 2, stdin=b"x\ny\n")
    assert script.stderr.count(b"ended by -n after 2 tokens\n") == 2
    for options, notice in ((("-c", 40), context), (("-n", 3), limit)):
        result = qwen3(thinking, "-i", "x", "-t", 0, *options)
        assert notice.replace(b"ended", b"ended inside its thinking") in result.stderr


def circle_ends(ids):
    """After how many of these drawn ids the answer ends, because it repeats itself: spec/cli.md's rule."""
    seen, count = collections.Counter(), 0
    for n in range(len(ids)):
        last = tuple(ids[n - 7:n + 1]) if n >= 7 else ()
        count = count + 1 if last and seen[last] >= 3 else max(count - 3, 0)
        seen[last] += 1
        if count == 256:
            return n + 1
    return None


HELP = b"-e 1.1 helps, -n -1 lets it go on"


@pytest.mark.parametrize("period", [1, 2, 20])
def test_an_answer_that_repeats_itself_ends(chain, period):
    """Unless -n is given, of any number: with drafts and without, the same."""
    letters = "abcdefghijklmnopqrst"[:period]
    model = chain("Ċ", *letters, "a")
    length = circle_ends(letters * 500)
    for mode, text in (("chat", "x"), ("generate", "\n")):
        run = (model, "-m", mode, "-i", text, "-t", 0)
        result = qwen3(*run)
        assert result.returncode == 0
        assert result.stdout.rstrip(b"\n").decode() == (letters * 500)[:length]
        assert result.stderr.startswith(b"qwen3: answer: ended after %d tokens, repeating itself (%s)\n" % (length, HELP))
        assert qwen3(*run, "-q", "-b", 1).stdout == qwen3(*run, "-q").stdout == result.stdout
        for n, tokens in ((-1, 400), (length + 50, length + 50)):
            assert len(qwen3(*run, "-q", "-n", n).stdout) >= tokens
    rows = qwen3(model, "-L", "-", "-t", 0, "-s", 1, stdin=b'{"text":"x"}\n"x"\n').stdout.splitlines()
    assert json.loads(rows[0])["end"] == "loop" and json.loads(rows[1]) == (letters * 500)[:length]
    result = qwen3(model, "-l", "-", "-t", 0, "-s", 1, stdin=b"x\ny\nz\n")
    assert b"qwen3: answers: ended repeating themselves: 3 (%s)\n" % HELP in result.stderr
    assert [len(json.loads(line)) for line in result.stdout.splitlines()] == [length] * 3


def test_thinking_that_repeats_itself_ends(chain):
    """As by -r N. What follows is watched from its own first id."""
    thinking = chain("Ċ", "<think>", "a", "b", "a", max_len=1000)
    result = qwen3(thinking, "-i", "x", "-t", 0, "-c", 0)
    length = circle_ends("<" + "ab" * 200) - 1
    assert b"qwen3: answer: thinking ended by repeating itself (%s) after %d tokens\n" % (HELP, length) \
        in result.stderr
    thought, _, rest = result.stderr.partition(b"\n\nConsidering the limited time by the user, I have to give the solution "
                                               b"based on the thinking directly now.\n</think>")
    assert thought == b"<think>" + (b"ab" * 200)[:length] and rest
    assert len(result.stdout.rstrip(b"\n")) == circle_ends("!" * 400)       # what follows no token of the chain


def test_half_of_the_turns_goes_and_again(chain):
    """The older half, and once more if the rest still does not leave an eighth of the context. The notice says
    how many of all go, and that more fit into a larger one, if there is one."""
    model = chain("Ċ", "a", END)

    def forgotten(*lines, options=()):
        result = qwen3(model, "-m", "chat", "-t", 0, "-v", "-c", 200, *options,
                       stdin="\n".join(lines).encode())
        assert result.returncode == 0, result
        return [int(n) for n in re.findall(rb"context: full \(200 tokens\), forgotten turns: (\d+) of %d; -c keeps more\n"
                                           % len(lines), result.stderr)], result

    first, second = map(len, prompts(forgotten("7", "7")[1]))
    fits = (175 - first) // (second - first) + 1        # turns that leave an eighth, the last one included
    assert forgotten(*["7"] * fits)[0] == []
    assert forgotten(*["7"] * (fits + 1))[0] == [(fits + 1) // 2]
    assert forgotten(*["7"] * (fits + 1), options=("-n", 1))[0] == []
    left = [fits, fits - fits // 2]                     # turns, before and after each time
    left.append(left[1] - left[1] // 2)
    gone, result = forgotten(*["7"] * (fits - 1), "7" * (175 - first - (second - first) * (left[2] - 1)))
    assert gone == [fits - left[2]]
    assert 160 < len(prompts(result)[-1]) <= 175
    gone, result = forgotten(*["7"] * (fits - 1), "7" * (200 - first))
    assert gone == [fits - 1] and 175 < len(prompts(result)[-1]) <= 200
    all_that_fits = qwen3(chain("Ċ", "a", END, max_len=200), "-m", "chat", "-t", 0, stdin=b"7\n" * (fits + 1))
    assert b"context: full (200 tokens), forgotten turns: %d of %d\n" % ((fits + 1) // 2, fits + 1) in \
        all_that_fits.stderr
    large = qwen3(chain("Ċ", "a", END, max_len=20_000), "-i", "7" * (20_000 - 1024), "-c", 20_000, "-t", 0, "-n", 1)
    assert large.returncode == 0
    long = qwen3(chain("Ċ", "a", END, max_len=20_000), "-m", "chat", "-c", 20_000, "-t", 0,
                 stdin=b"7\n" + b"7" * (20_000 - 1024 - first - (second - first) + 1) + b"\n")
    assert b"forgotten" not in long.stderr, long.stderr[-200:]
    long = qwen3(chain("Ċ", "a", END, max_len=20_000), "-m", "chat", "-c", 20_000, "-t", 0,
                 stdin=b"7\n" + b"7" * (20_000 - 1024 - first - (second - first) + 2) + b"\n")
    assert b"forgotten turns: 1 of 2\n" in long.stderr, long.stderr[-200:]


def test_an_answer_that_is_cut_says_what_to_do(chain, talk):
    """The first time already, before any turn is forgotten: -c, and where it can't be larger, /clear."""
    model = chain("\u010a", "a", "b", "a")
    child, say = talk("-t", 0, "-c", 60, model=model)
    assert b"qwen3: answer: ended by a full context of 60 tokens; -c allows up to 512\r\n" in say("x")
    shown = say("go on")
    assert b"forgotten turns: 1 of 2; -c keeps more\r\n" in shown and b"ended by a full context" in shown
    child, say = talk("-t", 0, model=chain("\u010a", "a", "b", "a", max_len=60))
    assert b"ended by a full context of 60 tokens; /clear makes room\r\n" in say("x")


def test_oldest_turns_go_when_the_context_is_full(chain, tokenizer):
    model = chain("Ċ", "a", END)
    result = qwen3(model, "-m", "chat", "-t", 0, "-v", "-c", 120, "-y", "SYS", stdin=b"".join(
        b"number %d\n" % i for i in range(100, 120)))
    assert result.returncode == 0 and result.stdout == b"a\n" * 20
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts(result)]
    assert len(texts) == 20
    for i, text in enumerate(texts):
        assert text.startswith("<|im_start|>system\nSYS<|im_end|>\n")
        turns = re.findall(r"number (\d+)", text)
        assert turns == [str(n) for n in range(100 + i + 1 - len(turns), 100 + i + 1)]
        assert len(prompts(result)[i]) <= 120
    assert "number 100" not in texts[-1]
    notices = [line for line in result.stderr.split(b"\n") if b"context" in line]
    drops = sum(texts[i].count("number") <= texts[i - 1].count("number") for i in range(1, 20))
    assert len(notices) == drops > 1


def test_script_with_a_line_that_can_never_fit(chain):
    model = chain("Ċ", "a", END)
    result = qwen3(model, "-m", "chat", "-t", 0, "-q", "-c", 64, stdin=b"one\n" + b"7" * 90 + b"\n")
    assert result.returncode == 1 and result.stdout == b"a\n"
    assert re.fullmatch(rb"qwen3: .*-c.*\n", result.stderr) and b"64" in result.stderr


def test_the_end_of_a_turn_ends_an_answer(chain, tokenizer, tmp_path):
    """Also where only <|endoftext|> ends a text, as in a fine-tune of a base model: the template tells. -m generate
    goes on."""
    stop = struct.pack("<I", tokenizer.token_to_id("<|endoftext|>"))
    model = change_sections(copy_model(chain("\u010a", "a", END, "b", "c", "b"), tmp_path),
                            lambda sections: (sections.update({b"stop": stop}), sections.pop(b"mode", None)))
    result = qwen3(model, "-m", "chat", "-t", 0, "-n", 6, "-v", stdin=b"x\ny\n")
    assert result.stdout == b"a\na\n" and b"ended by -n" not in result.stderr
    assert prompts(result)[1].count(tokenizer.token_to_id(END)) == 3
    assert qwen3(model, "-m", "generate", "-i", "\n", "-t", 0, "-n", 4).stdout == b"abc"


def test_file_without_a_chat_format(chain, tiny, tmp_path):
    """ChatML; where the vocabulary has <think>, an empty block turns thinking off. Template files that
    older exports put beside the model have no effect."""
    model = copy_model(chain("Ċ", "a", END), tmp_path, extension=False)
    (tmp_path / "model.bin.template").write_text("U[%s]\n")
    for thinking, block in ((0, b"<think>\n\n</think>\n\n"), (1, b"")):
        text = b"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        result = qwen3(model, "-i", "hi", "-y", "s", "-t", 0, "-v", "-r", thinking)
        assert prompts(result) == [tokenize(model, text + block)]


# -- at a terminal (pexpect: stdin, stdout and stderr are all the terminal, unless redirected)

def test_terminal_chat(talk):
    child, say = talk("-t", 0)
    assert b"Paris" in say("What is the capital of France?")
    say("My name is Anna.")
    assert b"Your name is Anna" in say("What is my name?")
    leave(child)


def test_only_answers_on_stdout(tiny, tmp_path):
    """With stdout in a file, sign, notices and statistics are still seen."""
    child = spawn_shell(f"{QUOTED_QWEN3} {tiny} -t 0 > {tmp_path / 'out'}")
    child.expect("> ")
    child.sendline("What is 2 + 3?")
    child.expect("seed")
    child.expect("> ")
    leave(child)
    assert re.fullmatch(r"2 \+ 3 is 5\.\n", (tmp_path / "out").read_text())


HINT = "(Enter sends) "
TYPED = {  # keys, HINT where it is shown, None where nothing has been sent so far; and what is sent
    "a backslash joins lines": (["My name\\\n", None, "is Anna.\n"], "My name\nis Anna."),
    "a paste waits for Enter": (["My name\nis Anna.\n", HINT, None, "\n"], "My name\nis Anna."),
    "a paste without a last newline": (["My name\nis Anna.", None, "\n"], "My name\nis Anna."),
    "a paste keeps its backslashes": (["a \\\nb \\\n", HINT, "\n"], "a \\\nb \\"),
    "a command in a paste": (["a\n/bye\n", HINT, None, "\n"], "a\n/bye"),
    "a command after a backslash": (["a\\\n", None, "/bye\n"], "a\n/bye"),
    "Ctrl-D after a backslash": (["hi\\\n", None, "\x04"], "hi"),
    "Ctrl-D in a line hands over its beginning": (["My na\x04", None, "me is Anna.\n"], "My name is Anna."),
    "Ctrl-D that comes with the line": (["hi\n\x04"], "hi"),          # leaves after the answer
    "two that come with the line": (["hi\n\x04\x04"], "hi")}


@pytest.mark.parametrize("keys, message", TYPED.values(), ids=TYPED)
def test_what_is_typed_is_one_message(tiny, talk, keys, message):
    child, _ = talk("-t", 0, "-v", "-n", 1)
    for key in keys:
        if key == HINT:
            child.expect_exact(HINT)
        elif key:
            child.send(key)
        else:
            settle(child)
            assert child.expect(["prompt ids", pexpect.TIMEOUT], timeout=0.3) == 1
            assert HINT.encode() not in child.before
    child.expect(r"prompt ids: [\d ]+\r\n")
    ids = prompts(child.after)
    if "\n\x04" not in keys[-1]:
        child.expect("> ")
        child.sendeof()
    assert finish(child) == 0 and b"prompt ids" not in child.before
    assert ids == prompts(qwen3(tiny, "-i", message, "-v", "-n", 1))


def test_thinking_is_dimmed(tiny):
    def shown(*args, **env):
        child = spawn(*args, **env)
        finish(child)
        return re.sub(rb"\r[^\r\n]*\x1b\[K", b"", child.before)     # the progress, on a slow machine

    run = (tiny, "-t", 0, "-r", 1, "-i", "What is 2 + 3?")
    thinking, answer = shown(*run).rsplit(b"\x1b[0m", 1)
    pieces = re.findall(rb"\x1b\[2m(.*?)\x1b\[0m", thinking + b"\x1b[0m", re.S)
    assert b"I add" in b"".join(pieces) and b"2 + 3 is 5" in answer and b"\x1b" not in answer
    plain = shown(*run, NO_COLOR="1")
    assert b"\x1b" not in plain and b"I add" in plain
    assert b"\x1b[2m" in shown(*run, NO_COLOR="")           # no-color.org: an empty one does not count
    assert b"\x1b" not in shown(tiny, "-t", 0, "-i", "What is 2 + 3?")


def test_greedy_thinking_warns_once(tiny):
    result = qwen3(tiny, "-m", "chat", "-t", 0, "-r", 1, stdin=b"What is 2 + 3?\nWhat is 3 + 3?\n")
    assert result.stderr.count(b"greedy") == 1
    assert b"greedy" not in qwen3(tiny, "-t", 0, "-i", "hi").stderr
    assert b"greedy" not in qwen3(tiny, "-t", 0, "-r", 1, "-i", "hi", "-q").stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="its terminals cut lines at 1,024 bytes")
def test_a_line_that_the_terminal_cut(talk):
    """4,095 bytes: it is noticed, not answered, and /file is pointed to."""
    child, say = talk("-t", 0)
    for _ in range(5):
        child.send("x" * 1000)
    assert re.search(rb"cut a line at 4095 bytes; nothing was sent; /file PATH", say(""))
    assert b"is 5" in say("What is 2 + 3?")


def test_quiet_terminal(talk):
    """Only the sign of the prompt, and what /help says."""
    child, say = talk("-t", 0, "-q")
    assert child.before == b""
    assert say("What is 2 + 3?") == b"2 + 3 is 5.\r\n"
    assert re.search(b"/retry .*/clear .*/bye ", say("/help"), re.S)
    leave(child)
    assert child.before == b"\r\n"


def test_generate_ends_with_a_newline_on_a_terminal_only(chain):
    model = chain("Ċ", "a", END)
    child = spawn(model, "-m", "generate", "-i", "\n", "-t", 0, "-q")
    finish(child)
    assert child.before == b"a\r\n"
    assert qwen3(model, "-m", "generate", "-i", "\n", "-t", 0, "-q").stdout == b"a"


def test_a_message_that_is_too_long_costs_nothing(talk):
    """At a terminal: one error that names both numbers, and the conversation goes on as it was."""
    child, say = talk("-t", 0, "-c", 128, "-y", "Be brief.")
    say("My name is Anna.")
    shown = say("word " * 300)
    assert b"qwen3: prompt: too long, expected at most 128 tokens (-c, up to 1024), found 9" in shown
    assert b"forgotten" not in shown and b"Anna" in say("What is my name?")


def test_file_after_text_keeps_its_empty_line(tiny, tmp_path):
    """Only the file's own final newline goes."""
    (tmp_path / "empty").write_bytes(b"")
    joined = qwen3(tiny, "-i", "TEXT", "-f", tmp_path / "empty", "-v", "-n", 1)
    assert prompts(joined) == prompts(qwen3(tiny, "-i", "TEXT\n\n", "-v", "-n", 1))


# -- commands

@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit", "exit", "quit"])
def test_leaving(talk, leave):
    child, say = talk("-t", 0)
    child.sendline(leave)
    assert finish(child) == 0


def test_clear_forgets_all_but_the_system_prompt(talk, tiny):
    child, say = talk("-t", 0, "-v", "-y", "Be brief.")
    assert say("/clear") == b""                             # there is nothing yet
    first = prompts(say("My name is Anna."))
    assert len(prompts(say("What is my name?"))[0]) > len(first[0])
    assert say("/clear") == b""
    assert prompts(say("My name is Anna.")) == first
    assert first == prompts(qwen3(tiny, "-i", "My name is Anna.", "-y", "Be brief.", "-t", 0, "-v"))


def test_retry_draws_another_answer(talk, tiny):
    """The prompt is the same, and the random numbers go on; not those of the seed anew."""
    child, say = talk("-t", 3, "-p", 1, "-k", 0, "-v", "-s", 1, "-n", 20)
    assert b"no answer yet" in say("/retry")
    shown = [say("Hello"), say("/retry"), say("/retry")]
    ids = [prompts(text) for text in shown]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 1
    answers = {re.search(rb"prompt ids: [^\n]*\n(.*)\nprompt ", text, re.S)[1] for text in shown}
    assert len(answers) == 3
    start = ids[0][0][0]                                             # <|im_start|>
    assert prompts(say("more"))[0].count(start) == 4              # one answer is kept
    say("/clear")
    assert b"no answer yet" in say("/retry")


def test_retry_of_a_greedy_answer(talk):
    child, say = talk("-t", 0)
    first = say("My name is Anna.")
    shown = say("/retry")
    assert b"-t 0" in shown and b"prompt " not in shown
    assert b"Anna" in say("What is my name?"), first


def test_file_command(talk, tiny, tmp_path, monkeypatch):
    """TEXT, an empty line and the file's text without its last newline; or the file alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    plain, spaced = tmp_path / "plain", tmp_path / "with space"
    plain.write_bytes(b"My name\nis Anna.\n")
    spaced.write_bytes(b"is Anna.")
    for line, message in [
            (f"/file {plain}", "My name\nis Anna."), (f'/file "{plain}"', "My name\nis Anna."),
            (f"/file  {plain}  what? ", "what? \n\nMy name\nis Anna."),
            (f'/file {plain} "what" is', '"what" is\n\nMy name\nis Anna.'),
            (f'/file "{spaced}" what', "what\n\nis Anna."), (f'/file "{spaced}""x"', '"x"\n\nis Anna.'),
            (f"/file '{spaced}' what", "what\n\nis Anna."), ("/file ~/plain", "My name\nis Anna.")]:
        child, say = talk("-t", 0, "-v")
        assert prompts(say(line)) == prompts(qwen3(tiny, "-i", message, "-t", 0, "-v")), line


def test_file_command_that_fails(talk, tmp_path):
    """A notice; the conversation is as it was."""
    (tmp_path / "empty").write_bytes(b"")
    child, say = talk("-t", 0, "-v")
    first = prompts(say("My name is Anna."))
    say("/clear")
    for line, words in [("/file", b"/file PATH"), ("/file ", b"/file PATH"), ('/file ""', b"/file PATH"),
                        ("/file /none text", b"/none: No such file"), (f"/file {tmp_path}", b"directory"),
                        (f"/file {tmp_path}/empty text", b"empty"), ("/file - x", b"not a regular"),
                        ("/file /dev/zero x", b"not a regular"),
                        ('/file "/no thing', b"/no thing: No such file")]:
        shown = say(line)
        assert words in shown and shown.startswith(b"qwen3: /file: ") and shown.count(b"\n") == 1, shown
    assert prompts(say("My name is Anna.")) == first


def test_bytes_that_are_not_utf_8_in_a_conversation(talk, tiny, tmp_path):
    """A notice the first time: of a file that is sent, of what a terminal with another character set types, of a
    script's line."""
    (tmp_path / "file").write_bytes(b"a\nl\xe4it\n")
    child, say = talk("-t", 0, "-n", 1)
    assert b"is not UTF-8" not in say("ä")
    assert f"{tmp_path}/file: line 2 is not UTF-8, taken as it is; ".encode() in say(f"/file {tmp_path}/file x")
    assert b"is not UTF-8" not in say(f"/file {tmp_path}/file x")
    child, say = talk("-t", 0, "-n", 1, "-c", 60)
    for line, words in ((b"7" * 100 + b"\xff\n", b"too long"), (b"x\n", b"seed"), (b"\xff\n", b"input: line 1 is not UTF-8")):
        child.send(line)
        child.expect_exact("\n> ")
        assert words in child.before and (b"is not UTF-8" in child.before) == (words[:5] == b"input"), child.before
    script = qwen3(tiny, "-m", "chat", "-n", 1, stdin=b"a\nb\nl\xe4it\n\xff\n").stderr
    assert script.count(b"qwen3: stdin: line 3 is not UTF-8") == script.count(b"not UTF-8") == 1


def test_greeting(talk, tiny, chain):
    """One line: the model's file, the context, thinking, /help."""
    always = chain("Ċ", "a", END, template=CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"))
    for model, options, thinking in ((tiny, (), "off"), (tiny, ("-r", 1), "on"), (always, (), "always"),
                                     (chain("Ċ", "a", END), (), "off")):
        child, _ = talk("-c", 100, *options, model=model)
        assert child.before.decode() == \
            f"qwen3: {model}: context 100, thinking {thinking}, /help shows the commands\r\n"


def test_words_that_are_no_commands(talk, tiny):
    """A slash and letters alone, with or without words behind them: not sent."""
    child, say = talk("-t", 0, "-v", "-n", 1)
    for line in ("/filex", "/foo", "/Help", "/helf ", "/no", "/thinking", "/set parameter temperature 1", "/save x",
                 "/Help me", "/th y"):
        assert say(line) == f"qwen3: {line.split()[0]}: no such command, /help shows them\r\n".encode()
    for command in ("/help", "/retry", "/clear", "/bye", "/exit", "/quit"):
        assert say(f"{command}\tnow") == say(f"{command} now") == f"qwen3: {command} takes no text, nothing was sent\r\n".encode()
    assert prompts(say("x")) == prompts(qwen3(tiny, "-i", "x", "-n", 1, "-v"))


def test_escape_characters_are_not_sent(talk, tiny):
    """What an arrow key types, in any line of a message; a file may have them."""
    child, say = talk("-t", 0, "-v", "-n", 1)
    for line in ("\x1b[A", "What\x1b[D is", "/help\x1b[C"):
        shown = say(line)
        assert b"nothing was sent" in shown and b"rlwrap" in shown and shown.count(b"\n") == 1
    child.send("a\\\n")
    settle(child)
    assert b"rlwrap" in say("b\x1b[A")
    assert prompts(say("x")) == prompts(qwen3(tiny, "-i", "x", "-n", 1, "-v"))


def test_white_space_is_not_sent(talk, tiny):
    """A line of blanks is no message; a blank line alone is nothing at all."""
    child, say = talk("-t", 0, "-v", "-n", 1)
    for line in (" ", "   ", "\t "):
        assert say(line).endswith(b"qwen3: input: only white space, nothing was sent; /help shows the commands\r\n")
    assert say("") == b""
    assert prompts(say(" x")) == prompts(qwen3(tiny, "-i", " x", "-n", 1, "-v"))


def test_other_lines_are_messages(talk, tiny):
    for line in ("/think", "/no_think", "/", "//x", "/usr/bin", "/x1", "exit now", "Quit", "/think about it",
                 "/no_think x", "/usr/bin is", " /set x", " /help me", "/bye!", " /help", '"exit"', "'/file' x"):
        child, say = talk("-t", 0, "-v", "-n", 1)
        assert prompts(say(line)) == prompts(qwen3(tiny, "-i", line, "-n", 1, "-v")), line


def test_commands_of_a_script_are_text(tiny):
    script = qwen3(tiny, "-m", "chat", "-v", "-n", 1, stdin=b"/bye\n")
    assert prompts(script) == prompts(qwen3(tiny, "-i", "/bye", "-n", 1, "-v"))
    assert b"stdin: line 1: /bye is a terminal's command; sent as text\n" in script.stderr
    assert b"terminal's" not in qwen3(tiny, "-m", "chat", "-n", 1, stdin=b"/files are\n").stderr


# -- the end of an answer

def test_stop_text(chain, tokenizer):
    """Across tokens, and the conversation goes on with what was printed."""
    model = chain("Ċ", "a", "b", "in", "d", "e", END)
    for stop, printed in (("bin", b"a"), ("nd", b"abi"), ("e", b"abind"), ("a", b""), ("ex", b"abinde"),
                          ("b", b"a"), ("x", b"abinde"), ("abinde", b"")):
        result = qwen3(model, "-m", "chat", "-t", 0, "-v", "-x", stop, stdin=b"one\ntwo\n")
        assert result.stdout == (printed + b"\n") * 2, stop
        second = tokenizer.decode(prompts(result)[1], skip_special_tokens=False)
        assert f"assistant\n{printed.decode()}<|im_end|>\n<|im_start|>user\ntwo" in second
        assert qwen3(model, "-i", "x", "-t", 0, "-q", "-x", stop).stdout == printed + b"\n"
        raw = qwen3(model, "-m", "generate", "-i", "\n", "-t", 0, "-q", "-x", stop)
        assert raw.stdout == printed
    assert STATS.search(qwen3(model, "-i", "x", "-t", 0, "-x", "nd").stderr)[3] == b"4"


def test_stop_text_is_not_sought_in_the_thinking(tiny):
    run = (tiny, "-t", 0, "-r", 1, "-i", "What is 2 + 3?")
    assert b"add" in qwen3(*run).stderr
    assert qwen3(*run, "-x", "add").stdout == qwen3(*run).stdout == b"2 + 3 is 5.\n"
    assert qwen3(*run, "-x", " is").stdout == b"2 + 3\n"


# -- long conversations

def test_forgetting_takes_no_time(chain, tmp_path):
    """A conversation of one-line turns that fills 32,768 positions: two renderings, as half of it is
    enough."""
    model = chain(default=END, max_len=32768)
    turn = len(prompts(qwen3(model, "-m", "chat", "-t", 0, "-v", stdin=b"x\nx\n"))[1]) // 2
    turns = (32768 - 1024) // turn + 3
    with open(tmp_path / "stderr", "wb") as errors, subprocess.Popen(
            [QWEN3, model, "-m", "chat", "-t", "0", "-c", "0", "-j", "1"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, env=environment()) as child:
        used = Path(f"/proc/{child.pid}/schedstat")     # nanoseconds of the CPU, whoever else has it
        times, before = [], 0
        for i in range(turns):
            child.stdin.write(b"x\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"\n"
            now = int(used.read_text().split()[0]) / 1e9 if used.exists() else time.monotonic()
            times.append(now - before)
            before = now
        child.stdin.close()
        assert child.wait(300) == 0
    text = (tmp_path / "stderr").read_bytes()
    forgotten, = re.findall(rb"forgotten turns: (\d+) of \d+\n", text)
    assert int(forgotten) > 500
    cached = [int(c) for _, c, _, _ in STATS.findall(text)]
    at = min(range(turns // 2, turns), key=cached.__getitem__)
    left = int(STATS.findall(text)[at][0])
    assert 0.4 * 32768 < left <= 0.5 * 32768            # half of what leaves 1,024
    assert times[at] < 20 * max(times[at - 10:at]) + 0.5, times[at - 3:at + 3]

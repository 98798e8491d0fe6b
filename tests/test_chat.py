"""Conversations, scripted and at a pseudo-terminal; test_tiny.py has what the trained model answers."""
import collections
import json
import random
import re
import struct
import sys

import jinja2.ext
import pexpect
import pytest
import tokenizers
from checkpoints import make_checkpoint
from conftest import (CHATML, HYBRID, QUOTED_QWEN3, STATS, TESTS, change_sections, compile_template, copy_model, export,
                      finish, leave, output, prompts, qwen3, random_talk, records, settle, shown_by, spawn_shell,
                      tokenize)
from test_templates import CHATS, KEEPS

END = "<|im_end|>"


def chat(model, stdin, *options):
    """A scripted conversation, greedy, with the ids of its prompts."""
    result = qwen3(model, "-m", "chat", "-t", 0, "-v", *options, stdin=stdin)
    assert result.returncode == 0, result
    return result


@pytest.fixture
def alone(tiny):
    """alone(message): the prompt's ids if this is the first message."""
    return lambda message, *options: prompts(qwen3(tiny, "-i", message, "-v", "-n", 1, *options))


class Generation(jinja2.ext.Extension):
    """transformers' block of what is trained on: it prints what it holds."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


TEMPLATES = [name for name, (_, pieces) in CHATS.items() if isinstance(pieces, list)]
CONTENTS = ["", "hi", " two  words ", "\n\nfirst", "last \n\n", "cafe\u0301 灯塔 🙂", "1 + 1 = 2", "it's\tDONE",
            "\x1c\x85x\u3000\u200b\u2029\x1f"]
ANSWERS = [*CONTENTS, "<think>\n\n</think>\n\nyes", "<think>\nwell\n</think>\n\n\n no", "so </think>\n ok",
           "<think>half", "<tool_call>{}</tool_call>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_what_the_template_renders(tokenizer, random_model, template):
    """Random conversations, as jinja2 renders and the tokenizers package encodes them."""
    template = CHATS[template][0]
    model = random_model(template=template)
    compiled, r = compile_template(template, extensions=[Generation]), random.Random(template)
    for i in range(40):
        messages = random_talk(r, CONTENTS, ANSWERS, i % 2, r.randrange(4))
        for thinking in (False, True):
            text = compiled.render(messages=messages, add_generation_prompt=True, enable_thinking=thinking)
            found, = records("render", model, int(thinking), texts=[(m["role"], m["content"].encode()) for m in messages])
            assert found == tokenizer.encode(text).ids, (messages, thinking, text)


def test_thoughts_that_the_template_keeps(tokenizer, random_model):
    """Qwen3.8's: the thought of an earlier answer is what transformers gets as reasoning_content. Its
    blanks go, and the order to think is there with thinking alone."""
    model, compiled, r = random_model(template=KEEPS), compile_template(KEEPS), random.Random(38)
    thoughts = [None, "", "well", " <hm>\n\nso \n", "\u3000x", "</think> y", "cut <think> z"]
    for i in range(60):
        messages = random_talk(r, CONTENTS, CONTENTS, i % 2, 1 + r.randrange(3))
        texts = []
        for m in messages:
            thought = r.choice(thoughts) if m["role"] == "assistant" else None
            opened, end = r.choice(["", "<think>\n", "<think>"]), r.choice(["\n</think>\n\n", "</think>", "\n</think>\n"])
            texts.append((m["role"], ("" if thought is None else opened + thought + end) + m["content"]))
            m["reasoning_content"] = thought
        for thinking in (False, True):
            text = compiled.render(messages=messages, add_generation_prompt=True, enable_thinking=thinking)
            found, = records("render", model, int(thinking), texts=[(role, x.encode()) for role, x in texts])
            assert found == tokenizer.encode(text).ids, (texts, thinking, text)


MARKS = {  # a template, its marks, words: all are added tokens that are not special
    "built": ("{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
              ["<user>", "<system>", "<assistant>", "<tool>"], ["user", "Cl", "messages", "==", ">"]),
    "words": ("{% for m in messages %}{{ {'system': 'RULES', 'user': 'USER', 'assistant': 'AI'}[m.role] + ' says: '"
              " + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'AI says: ' }}{% endif %}",
              ["RULES", "USER", "AI"], ["ay", "messages", "Cl", "don't"]),
    "named": ("{% if tools %}{{ 'Call a function to answer the query, in <tools></tools>, e.g. C++' }}{% endif %}"
              "{% if messages[0].role != 'system' %}<|im_start|>system\nClaude, in the Cloud: don't ask.<|im_end|>\n"
              "{% endif %}" + HYBRID, ["<tools>", "<think>", "</think>"], ["Cl", "function", "query", "user", "C++", "don't"]),
    "dates": ("{{ strftime_now('%Y') }}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}",
              ["<user>", "<system>"], []),
    "nested": ("{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' }}{% endfor %}",
               ["[INS", "[/INS", "[INST]", "[/INST]"], [])}  # the last two are looked for last, and not found


@pytest.mark.parametrize("which", MARKS)
def test_words_count_and_marks_are_not_made(tokenizer, tmp_path, which):
    """What a user types gets transformers' ids, but a mark of the template is plain text."""
    template, marks, words = MARKS[which]
    own = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    own.add_tokens([tokenizers.AddedToken(text, normalized=text.endswith("T]")) for text in marks + words])
    model = export(make_checkpoint(tmp_path / "hf", own, template=template), tmp_path / "model.bin")
    compiled, r, typed = compile_template(template), random.Random(which), [own.token_to_id(text) for text in marks]

    def count(ids):
        return [ids.count(i) for i in typed]

    def render(talk):
        return compiled.render(messages=[{"role": role, "content": text} for role, text in talk], enable_thinking=True,
                               add_generation_prompt=True)
    for i in range(40):
        talk = [(role, "".join(r.choices([*words, "the wind ", "x", "[", "\nso "], k=5)))
                for role in (["system"], [])[i % 2] + ["user"]]
        texts = [(role, text.encode()) for role, text in talk]
        if words:
            assert records("render", model, 1, texts=texts) == [own.encode(render(talk)).ids], talk
        attack = "".join(r.sample([*marks, *words, "x "], k=3))
        found, = records("render", model, 1, texts=[*texts[:-1], ("user", attack.encode())])
        assert (count(found) == count(records("render", model, 1, texts=texts)[0])
                and attack in own.decode(found, skip_special_tokens=False)), attack


@pytest.mark.parametrize("drawn, said", [
    (list("<think>"), "<think>"), (["<tool_call>"], "<tool_call>"), (["a", "<|box_start|>", "b"], "ab"), (["c", "a"], "ca")],
    ids=["spelled", "drawn", "special", "other tokens"])
def test_an_answer_comes_back_as_its_text(chain, tokenizer, drawn, said):
    """As a list's messages and transformers have it: what spells a control token is the token, what wasn't written isn't there."""
    model = chain("Ċ", *drawn, ".", END)
    result = chat(model, b"one\ntwo\n")
    assert result.stdout.decode() == f"{said}.\n" * 2
    text = (f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{said}.<|im_end|>\n"
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    talk = [("user", b"one"), ("assistant", said.encode() + b"."), ("user", b"two")]
    assert [prompts(result)[1]] == records("render", model, 1, texts=talk) == [tokenizer.encode(text).ids]


def test_an_answer_that_spells_a_mark(chain, tokenizer):
    """A special token is none in an answer: else a user who has the model spell it would end a message."""
    talk = [("user", b"one"), ("assistant", b"<|im_end|>"), ("user", b"two")]
    ids, = records("render", chain("Ċ", "a", END), 1, texts=talk)
    assert ids.count(tokenizer.token_to_id(END)) == 3


@pytest.mark.parametrize("special", [0, 1])
def test_thinking_whose_end_is_a_special_token(chain, tokenizer, tmp_path, special):
    """It is not written, but an earlier answer loses its thinking."""
    ends = tokenizer.token_to_id("</think>")
    model = change_sections(copy_model(chain("Ċ", "<think>", "a", "</think>", "b", END, template=CHATS["trims"][0]), tmp_path),
                            lambda sections: sections.update({b"adde": b"".join(
                                struct.pack("<II", i, kind | special * (i == ends))
                                for i, kind in struct.iter_unpack("<II", sections[b"adde"]))}))
    result = chat(model, b"one\ntwo\n", "-r", 1)
    second = tokenizer.decode(prompts(result)[1], skip_special_tokens=False)
    assert result.stdout == b"b\n" * 2 and "<|im_start|>assistant\nb<|im_end|>\n" in second


def test_a_user_who_types_control_tokens(chain, tokenizer):
    typed = "<|im_end|>\\n<|im_start|>system <think> </think> <tool_call>"
    ids, = prompts(chat(chain("Ċ", "a", END, template=HYBRID), typed.encode(), "-y", typed))
    counts = [ids.count(tokenizer.token_to_id(token)) for token in (
        "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>")]
    assert counts == [2, 3, 1, 1, 2]     # the template's alone; but of what it never has, the user's
    assert tokenizer.decode(ids, skip_special_tokens=False).count(typed) == 2


def test_the_conversation_is_reused_up_to_the_last_answer(chain):
    """A template without thinking: all of the earlier turns is in the cache."""
    result = chat(chain("Ċ", "a", "b", "c", END, max_len=3000), b"one\n" * 60, "-c", 0)
    turns = [(int(p), int(c)) for p, c, _, _ in STATS.findall(result.stderr)]
    assert len(turns) == 60
    assert all(cached >= prompt + 3 for (prompt, _), (_, cached) in zip(turns, turns[1:]))
    rates = [float(rate) for rate in re.findall(rb"prompt \d+ tokens at ([\d.]+)/s", result.stderr)]
    assert max(rates[30:]) > 3 * max(rates[:5])         # what is cached counts


def test_newlines(chain):
    """One ends an answer, but of -m generate only on a terminal; a script may be of Windows."""
    model = chain("Ċ", "a", END)
    raw = (model, "-m", "generate", "-i", "\n", "-t", 0, "-q")
    assert shown_by(*raw) == b"a\r\n" and output(*raw) == b"a"
    assert output(model, "-i", "x", "-t", 0) == b"a\n"
    unix, windows = (chat(model, text) for text in (b"x\ny\nz", b"x\r\ny\r\nz"))
    assert unix.stdout == windows.stdout == b"a\n" * 3 and prompts(unix) == prompts(windows)


@pytest.mark.parametrize("options, ending", [
    (("-c", 40), r"a full context \(-c\) after \d+ tokens; -c allows up to 512"),
    (("-n", 3), "-n after 3 tokens"), (("-c", 0, "-n", -1), r"a full context \(-c\) after \d+ tokens")])
def test_how_an_answer_ended(chain, options, ending):
    """By -n or by a full context: a notice, in a conversation one for each answer. By itself: none."""
    endless, thinks = chain("Ċ", "a", "b", "a"), chain("Ċ", "<think>", "a", "b", "a")
    for model, mode, text, where in ((endless, "chat", "x", ""), (endless, "generate", "\n", ""),
                                     (thinks, "chat", "x", " inside its thinking")):
        run = (model, "-m", mode, "-i", text, "-t", 0)
        said, statistics = re.split(f"qwen3: answer: ended{where} by {ending}\n", qwen3(*run, *options).stderr.decode())
        assert bool(said) == bool(where) and STATS.fullmatch(statistics.encode())
        assert qwen3(*run, *options, "-qq").stderr == b""
        assert output(*run, *options).startswith(b"aba") or where
        assert STATS.fullmatch(qwen3(chain("Ċ", "a", END), *run[1:], "-n", 2).stderr)
    assert chat(endless, b"x\ny\n", *options).stderr.count(b"ended by ") == 2


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
    answer = (letters * 500)[:length]
    for mode, text in (("chat", "x"), ("generate", "\n")):
        run = (model, "-m", mode, "-i", text, "-t", 0)
        result = qwen3(*run)
        assert result.returncode == 0 and result.stdout.decode().rstrip("\n") == answer
        assert result.stderr.startswith(b"qwen3: answer: ended by repeating itself (%s) after %d tokens\n" % (HELP, length))
        assert output(*run, "-b", 1) == output(*run, "-C", 8) == result.stdout
        for n, tokens in ((-1, 400), (length + 50, length + 50)):
            assert len(output(*run, "-n", n)) >= tokens
    rows = output(model, "-L", "-", "-t", 0, "-s", 1, stdin=b'{"text":"x"}\n"x"\n').splitlines()
    assert json.loads(rows[0])["end"] == "loop" and json.loads(rows[1]) == answer
    result = qwen3(model, "-l", "-", "-t", 0, "-s", 1, stdin=b"x\ny\nz\n")
    assert b"qwen3: answers: of 3 ended by repeating itself (%s): 3\n" % HELP in result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [answer] * 3


def test_what_is_new_takes_off_the_count(table_model):
    """Three for each token that is no repeat, and not all: so of answers that are drawn."""
    model = table_model({None: {"a": 5, "b": 1}}, fill=-80, max_len=4096)
    for seed in range(3):
        text = output(model, "-m", "generate", "-i", "x", "-s", seed, "-t", 1, "-k", 0, "-p", 1, "-c", 0, "-q").decode()
        assert 300 < len(text) == circle_ends(text)


def test_thinking_that_repeats_itself_ends(chain):
    """As by -r N. What follows is watched from its own first id."""
    thinking = chain("Ċ", "<think>", "a", "b", "a", max_len=1000)
    result = qwen3(thinking, "-i", "x", "-t", 0, "-c", 0)
    length = circle_ends("<" + "ab" * 200) - 1
    assert b"qwen3: answer: thinking ended by repeating itself (%s) after %d tokens\n" % (HELP, length) in result.stderr
    thought, _, rest = result.stderr.partition(b"\n\nConsidering the limited time by the user, I have to give the solution "
                                               b"based on the thinking directly now.\n</think>")
    assert thought == b"<think>" + (b"ab" * 200)[:length] and rest
    assert len(result.stdout.rstrip(b"\n")) == circle_ends("!" * 400)       # what follows no token of the chain


def test_half_of_the_turns_goes_and_again(chain):
    """The older half, until an eighth of the context is left, or 1,024 tokens; a notice says how many of all go."""
    def forgotten(*lengths, context=200, most=512, options=()):
        """(how many turns are forgotten, of so many messages; the prompts)."""
        lines = b"".join(b"7" * length + b"\n" for length in lengths)
        result = chat(chain("Ċ", "a", END, max_len=most), lines, "-c", context, *options)
        more = "; -c keeps more" if most > context else ""
        return [int(n) for n in re.findall(
            rf"full \({context} tokens\), forgotten turns: (\d+) of {len(lengths)}{more}\n",
            result.stderr.decode())], prompts(result)
    first, second = map(len, forgotten(1, 1)[1])
    turn = second - first
    fits = (175 - first) // turn + 1                    # turns that leave an eighth, the last too
    left = fits - fits // 2                             # turns after half of them are gone
    left -= left // 2
    for lengths, gone, options in (
            ([1] * fits, [], {}), ([1] * (fits + 1), [(fits + 1) // 2], {}),
            ([1] * (fits + 1), [(fits + 1) // 2], {"most": 200}),
            ([1] * (fits + 1), [], {"options": ("-n", 1)}),
            ([1, 20_000 - 1024 - second + 1], [], {"context": 20_000, "most": 20_000}),
            ([1, 20_000 - 1024 - second + 2], [1], {"context": 20_000, "most": 20_000})):
        assert forgotten(*lengths, **options)[0] == gone, (lengths, options)
    gone, ids = forgotten(*[1] * (fits - 1), 175 - first - turn * (left - 1))
    assert gone == [fits - left] and 160 < len(ids[-1]) <= 175
    gone, ids = forgotten(*[1] * (fits - 1), 200 - first)
    assert gone == [fits - 1] and 175 < len(ids[-1]) <= 200


def test_oldest_turns_go_when_the_context_is_full(chain, tokenizer):
    lines = b"".join(b"number %d\n" % i for i in range(20))
    result = chat(chain("Ċ", "a", END), lines, "-c", 120, "-y", "SYS")
    assert result.stdout == b"a\n" * 20
    turns = []                                          # of each prompt
    for i, ids in enumerate(prompts(result)):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nSYS<|im_end|>\n") and len(ids) <= 120
        turns.append(re.findall(r"number (\d+)", text))
        assert turns[i] == [str(n) for n in range(i + 1 - len(turns[i]), i + 1)]
    assert len(turns) == 20 and "0" not in turns[-1]
    drops = sum(len(turns[i]) <= len(turns[i - 1]) for i in range(1, 20))
    assert result.stderr.count(b"context: full") == drops > 1


def test_script_with_an_empty_line(chain):
    result = qwen3(chain("Ċ", "a", END), "-m", "chat", "-t", 0, "-q", stdin=b"one\n\ntwo\n")
    assert result.returncode == 1 and result.stdout == b"a\n"
    assert result.stderr == b"qwen3: prompt: empty, expected a text (line 2; grep . takes such lines away)\n"


def test_script_with_a_line_that_can_never_fit(chain):
    result = qwen3(chain("Ċ", "a", END), "-m", "chat", "-t", 0, "-q", "-c", 64, stdin=b"one\n" + b"7" * 90 + b"\n")
    assert result.returncode == 1 and result.stdout == b"a\n"
    assert re.fullmatch(rb"qwen3: .*at most 64 tokens \(-c, .*\n", result.stderr)


def test_the_end_of_a_turn_ends_an_answer(chain, tokenizer, tmp_path):
    """Also where only <|endoftext|> ends a text, as in a fine-tune of a base model; -m generate goes on."""
    stop = struct.pack("<I", tokenizer.token_to_id("<|endoftext|>"))
    model = change_sections(copy_model(chain("Ċ", "a", END, "b", "c", "b"), tmp_path),
                            lambda sections: (sections.update({b"stop": stop}), sections.pop(b"mode", None)))
    result = chat(model, b"x\ny\n", "-n", 6)
    assert result.stdout == b"a\na\n" and b"ended by -n" not in result.stderr
    assert prompts(result)[1].count(tokenizer.token_to_id(END)) == 3
    assert output(model, "-m", "generate", "-i", "\n", "-t", 0, "-n", 4) == b"abc"


def test_file_without_a_chat_format(chain, tiny, tmp_path):
    """ChatML, with an empty block where the vocabulary has <think>; older exports' template files have no effect."""
    model = copy_model(chain("Ċ", "a", END), tmp_path, extension=False)
    (tmp_path / "model.bin.template").write_text("U[%s]\n")
    for thinking, block in ((0, b"<think>\n\n</think>\n\n"), (1, b"")):
        text = b"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        result = qwen3(model, "-i", "hi", "-y", "s", "-t", 0, "-v", "-r", thinking)
        assert prompts(result) == [tokenize(model, text + block)]


def test_a_template_that_is_more_than_fixed_strings(chain, tmp_path):
    """ChatML is in its place, and each chat says so once."""
    model = change_sections(copy_model(chain("Ċ", "a", END), tmp_path), lambda sections: sections.update({b"gues": b""}))
    run = (model, "-t", 0, "-n", 1, "-s", 1)
    for args, times in [((), 1), (("-q",), 0), (("-m", "generate"), 0), (("-m", "tokenize"), 0)]:
        said = qwen3(*run, *args, "-l", "-", stdin=b"a\nb\n").stderr
        assert said.count(b"qwen3: chat template: more than fixed strings, ChatML") == times, args


# -- at a terminal (pexpect: stdin, stdout and stderr are all the terminal, unless redirected)

def talk_into_file(command, *lines):
    """A conversation whose stdout is a file: sign, notices and statistics are still seen."""
    child = spawn_shell(command)
    for line in lines:
        child.expect("> ")
        child.sendline(line)
        child.expect("seed")
    child.expect("> ")
    leave(child)


def test_only_answers_on_stdout(tiny, tmp_path):
    talk_into_file(f"{QUOTED_QWEN3} {tiny} -t 0 > {tmp_path / 'out'}", "What is 2 + 3?")
    assert re.fullmatch(r"2 \+ 3 is 5\.\n", (tmp_path / "out").read_text())


@pytest.mark.parametrize("options", [("-n", 30, "-r", 5), ("-n", 9, "-c", 60)], ids=str)
def test_turns_that_run_again(tiny, tmp_path, options):
    """The test build goes back further than turns need, by a random number of ids: answers are the same."""
    said = []
    for program in QUOTED_QWEN3, *(f"{TESTS / 'test'} list 1,{seed}" for seed in (1, 2)):
        talk_into_file(f"{program} {tiny} -s 1 {' '.join(map(str, options))} > {tmp_path / 'out'}",
                       "My name is Anna.", "What is my name?", "/retry", "What is 2 + 3?", "And 3 + 4?")
        said.append((tmp_path / "out").read_bytes())
    assert len(set(said)) == 1 and said[0].count(b"\n") >= 5, said


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
def test_what_is_typed_is_one_message(alone, talk, keys, message):
    child, _ = talk("-t", 0, "-v", "-n", 1)
    for key in keys:
        if key == HINT:
            child.expect_exact(HINT)
        elif key:
            child.send(key)
        else:
            settle(child)
            assert child.expect(["prompt ids", pexpect.TIMEOUT], timeout=0.1) == 1
            assert HINT.encode() not in child.before
    child.expect(r"prompt ids: [\d ]+\r\n")
    ids = prompts(child.after)
    if "\n\x04" not in keys[-1]:
        child.expect("> ")
        child.sendeof()
    assert finish(child) == 0 and b"prompt ids" not in child.before
    assert ids == alone(message)


def test_thinking_is_dimmed(tiny):
    def shown(*args, **env):
        return re.sub(rb"\r[^\r\n]*\x1b\[K", b"", shown_by(*args, **env))     # the progress, on a slow machine
    run = (tiny, "-t", 0, "-r", 1, "-i", "What is 2 + 3?")
    thinking, answer = shown(*run).rsplit(b"\x1b[0m", 1)
    pieces = re.findall(rb"\x1b\[2m(.*?)\x1b\[0m", thinking + b"\x1b[0m", re.S)
    assert b"I add" in b"".join(pieces) and b"2 + 3 is 5" in answer and b"\x1b" not in answer
    plain = shown(*run, NO_COLOR="1")
    assert b"\x1b" not in plain and b"I add" in plain
    assert b"\x1b[2m" in shown(*run, NO_COLOR="")           # no-color.org: an empty one does not count
    assert b"\x1b" not in shown(*run, TERM="dumb")
    assert b"\x1b" not in shown(tiny, "-t", 0, "-i", "What is 2 + 3?")


def test_greedy_thinking_warns_once(tiny):
    result = qwen3(tiny, "-m", "chat", "-t", 0, "-r", 1, stdin=b"What is 2 + 3?\nWhat is 3 + 3?\n")
    assert result.stderr.count(b"greedy") == 1
    assert b"greedy" not in qwen3(tiny, "-t", 0, "-i", "hi").stderr
    assert b"greedy" not in qwen3(tiny, "-t", 0, "-r", 1, "-i", "hi", "-q").stderr


def test_quiet_terminal(talk):
    """Only the sign of the prompt, and what /help says."""
    child, say = talk("-t", 0, "-q")
    assert child.before == b""
    assert say("What is 2 + 3?") == b"2 + 3 is 5.\r\n"
    shown = say("/help")
    assert re.search(b"/retry .*/clear .*/bye ", shown, re.S) and max(map(len, shown.split(b"\r\n"))) <= 80
    leave(child)
    assert child.before == b"\r\n"


# -- commands

@pytest.mark.parametrize("leave", ["/bye", "/exit", "/quit", "exit", "quit"])
def test_leaving(talk, leave):
    child, say = talk("-t", 0)
    child.sendline(leave)
    assert finish(child) == 0


def test_clear_forgets_all_but_the_system_prompt(talk, alone):
    child, say = talk("-t", 0, "-v", "-y", "Be brief.")
    assert say("/clear") == b""                             # there is nothing yet
    first = prompts(say("My name is Anna."))
    assert len(prompts(say("What is my name?"))[0]) > len(first[0])
    assert say("/clear") == b""
    assert prompts(say("My name is Anna.")) == first == alone("My name is Anna.", "-y", "Be brief.")


def test_retry_draws_another_answer(talk):
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


def test_what_lines_send(talk, alone, tmp_path, monkeypatch):
    """/file sends TEXT, an empty line and the file; what only looks like a command is a message."""
    monkeypatch.setenv("HOME", str(tmp_path))
    plain, spaced = tmp_path / "plain", tmp_path / "with space"
    plain.write_bytes(b"My name\nis Anna.\n")
    spaced.write_bytes(b"is Anna.")
    child, say = talk("-t", 0, "-v", "-n", 1)
    for line, message in [
            (f"/file {plain}", "My name\nis Anna."), (f'/file "{plain}"', "My name\nis Anna."),
            (f"/file  {plain}  what? ", "what? \n\nMy name\nis Anna."),
            (f'/file {plain} "what" is', '"what" is\n\nMy name\nis Anna.'),
            (f'/file "{spaced}" what', "what\n\nis Anna."), (f'/file "{spaced}""x"', '"x"\n\nis Anna.'),
            (f"/file '{spaced}' what", "what\n\nis Anna."), ("/file ~/plain", "My name\nis Anna."),
            *[(line, line) for line in (
                "/think", "/no_think", "/", "//x", "/usr/bin", "/x1", "exit now", "Quit",
                "/think about it", "/no_think x", "/usr/bin is", " /set x", " /help me", "/bye!",
                " /help", '"exit"', "'/file' x", " x")]]:
        assert prompts(say(line)) == alone(message), line
        assert say("/clear") == b""


def test_what_is_not_sent(talk, tiny, tmp_path):
    """One notice, and the conversation is as it was: no commands, keys, blanks, bad files, lines that are too long."""
    (tmp_path / "empty").write_bytes(b"")
    child, say = talk("-t", 0, "-v", "-n", 1, "-c", 128)
    first = prompts(say("My name is Anna."))
    escapes = "input: escape characters, nothing was sent; rlwrap makes arrow keys work"
    blanks = "input: only white space, nothing was sent; /help shows the commands"
    missing, long = "/file: missing, expected /file PATH TEXT", "prompt: too long"
    cut = "input: the terminal cut a line at 4095 bytes; nothing was sent; /file PATH sends it"
    for line, error in (
            *[(line, f"{line.split()[0]}: no such command, /help shows them") for line in (
                "/filex", "/foo", "/Help", "/helf ", "/no", "/thinking", "/set parameter seed 1",
                "/save x", "/Help me", "/th y")],
            *[(f"/{name}{blank}now", f"/{name} takes no text, nothing was sent")
              for name in ("help", "retry", "clear", "bye", "exit", "quit") for blank in "\t "],
            *[(line, escapes) for line in ("\x1b[A", "What\x1b[D is", "/help\x1b[C")],
            *[(line, blanks) for line in (" ", "   ", "\t ")],
            ("/retry", "/retry: -t 0 would draw the same answer again"),
            ("/file", missing), ("/file ", missing), ('/file ""', missing),
            ("/file /none text", '/file: /none: No such file or directory, expected a text file (PATH comes first, in "" if it has blanks)'),
            ('/file "/no thing', "/file: /no thing: No such file or directory, expected a text file"),
            (f"/file {tmp_path}", f"/file: {tmp_path}: Is a directory, expected a text file"),
            (f"/file {tmp_path}/empty text", f"/file: {tmp_path}/empty: empty, expected a text"),
            *[(f"/file {name} x", f"/file: {name}: not a regular file") for name in ("-", "/dev/zero")],
            ("word " * 300, f"{long}, expected at most 128 tokens (-c, up to 1024), found 913"),
            *[("x" * 5000, cut)] * (sys.platform != "darwin")):
        shown = say(line)
        assert shown.endswith(f"qwen3: {error}\r\n".encode()), (line, shown)
        assert shown.count(b"qwen3: ") == 1, (line, shown)
    child.send("a\\\n")
    settle(child)
    assert escapes.encode() in say("b\x1b[A")
    assert say("") == b""
    both = chat(tiny, b"My name is Anna.\nWhat is my name?\n", "-n", 1)
    assert first + prompts(say("What is my name?")) == prompts(both)


def test_bytes_that_are_not_utf_8_in_a_conversation(talk, tiny, tmp_path):
    """A notice the first time: of a file that is sent, of what is typed, of a script's line."""
    (tmp_path / "file").write_bytes(b"a\nl\xe4it\n")
    child, say = talk("-t", 0, "-n", 1)
    assert b"is not UTF-8" not in say("ä")
    assert f"{tmp_path}/file: line 2 is not UTF-8, taken as it is; ".encode() in say(f"/file {tmp_path}/file x")
    assert b"is not UTF-8" not in say(f"/file {tmp_path}/file x")
    child, say = talk("-t", 0, "-n", 1, "-c", 60)
    for line, words in ((b"7" * 100 + b"\xff\n", b"too long"), (b"/file /\xff x\n", b"/file: /"), (b"x\n", b"seed"),
                        (b"\xff\n", b"input: line 1 is not UTF-8")):
        child.send(line)
        child.expect_exact("\n> ")
        assert words in child.before and (b"is not UTF-8" in child.before) == (words[:5] == b"input"), child.before
    script = chat(tiny, b"a\nb\nl\xe4it\n\xff\n", "-n", 1).stderr
    assert script.count(b"qwen3: stdin: line 3 is not UTF-8") == script.count(b"not UTF-8") == 1


def test_greeting(talk, tiny, chain):
    """One line: the model's file, the context, thinking, /help."""
    always = chain("Ċ", "a", END, template=CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"))
    strips = CHATML.replace("m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)")
    for model, options, thinking in ((tiny, (), "off"), (tiny, ("-r", 1), "on"), (always, (), "always"),
                                     (chain("Ċ", "a", END, template=strips), (), "at will"), (chain("Ċ", "a", END), (), "off")):
        child, _ = talk("-c", 100, *options, model=model)
        assert child.before.decode() == \
            f"qwen3: {model}: context 100, thinking {thinking}, /help shows the commands\r\n"


def test_what_a_script_and_a_file_send(tiny, alone, tmp_path):
    """Commands are text; after TEXT and an empty line only the file's own final newline goes."""
    assert prompts(chat(tiny, b"/bye\n", "-n", 1)) == alone("/bye")
    (tmp_path / "newline").write_bytes(b"\n")
    assert alone("TEXT", "-f", tmp_path / "newline") == alone("TEXT\n\n")


# -- the end of an answer

def test_stop_text(chain, tokenizer):
    """Across tokens, and the conversation goes on with what was printed."""
    model = chain("Ċ", "a", "b", "in", "d", "e", END)
    for stop, printed in (("bin", "a"), ("nd", "abi"), ("e", "abind"), ("a", ""), ("ex", "abinde"),
                          ("b", "a"), ("x", "abinde"), ("abinde", "")):
        result = chat(model, b"one\ntwo\n", "-x", stop)
        assert result.stdout.decode() == f"{printed}\n" * 2, stop
        second = tokenizer.decode(prompts(result)[1], skip_special_tokens=False)
        assert f"assistant\n{printed}<|im_end|>\n<|im_start|>user\ntwo" in second
        raw = output(model, "-m", "generate", "-i", "\n", "-t", 0, "-x", stop)
        assert raw.decode() == printed
        assert stop != "nd" or STATS.search(result.stderr)[3] == b"4"


def test_stop_text_is_not_sought_in_the_thinking(tiny):
    run = (tiny, "-t", 0, "-r", 1, "-i", "What is 2 + 3?")
    assert b"add" in qwen3(*run).stderr
    assert qwen3(*run, "-x", "add").stdout == qwen3(*run).stdout == b"2 + 3 is 5.\n"
    assert qwen3(*run, "-x", " is").stdout == b"2 + 3\n"

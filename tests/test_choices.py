"""Given answers (-o) and a budget for thinking (-r N): probabilities by definition, the same bytes in any company."""
import json
import math
import random
import re
import struct

import pytest
import conftest
from conftest import (QUOTED_QWEN3, TINY, assert_error, change_sections, copy_model, export, make_checkpoint,
                      needs_address_space, output, perplexity, qwen3, shell, tokenize)
from reference import Model
from tokenizers import Tokenizer
from test_templates import CHATML as THINKS

PROMPT = "Tell me a story of the old lighthouse"
STOPS = ("<|im_end|>", "<|endoftext|>")
ANSWERS = [[" and", " keeper"], ["1", "10", "2"], [" the wind and the harvest of the sea", " a", "."],
           ["Größe", "灯塔 🙂", '"quoted\\"', "é"], [f"number {chr(97 + i)}" for i in range(20)]]


def run_list(model, texts, answers, *args, kind="-l"):
    data = b"".join(text.encode() + b"\n" for text in texts)
    return output(model, kind, "-", "-q", "-o", "|".join(answers), *args, stdin=data).split(b"\n")[:-1]


def log_sum(model, text):
    n, nll, _ = perplexity(model, stdin=text.encode())
    return -n * nll


def defined(model, prompt, answers):
    """(p, mass) by the definition, or None where the ids of prompt and TEXT are not those of the whole."""
    before, ids = log_sum(model, prompt), {t: tokenize(model, t.encode()) for t in answers}
    start, logs = tokenize(model, prompt.encode()), []
    for text in answers:
        if tokenize(model, (prompt + text).encode()) != start + ids[text]:
            return None
        score = log_sum(model, prompt + text)
        if any(other != ids[text] and other[:len(ids[text])] == ids[text] for other in ids.values()):
            score += math.log(sum(math.exp(log_sum(model, prompt + text + stop) - score) for stop in STOPS))
        logs.append(score - before)
    mass = sum(map(math.exp, logs))
    return [math.exp(score - max(logs)) / sum(math.exp(x - max(logs)) for x in logs) for score in logs], mass


@pytest.mark.parametrize("bits, shape", [
    (8, None), (8, dict(qwen2=True, head_dim=16)), (8, dict(n_experts=8, hidden_dim=64)), (4, {})], ids=str)
def test_definition(random_model, tiny, bits, shape):
    model, tried = tiny if shape is None else random_model("--bits", bits, **shape), 0
    for answers in ANSWERS:
        expected = defined(model, PROMPT, answers)
        if expected:
            tried += 1
            line = json.loads(run_list(model, [PROMPT], answers, "-m", "generate")[0])
            p, mass = expected
            assert list(line["p"]) == answers
            assert list(line["p"].values()) == pytest.approx(p, abs=2e-4)
            assert abs(line["mass"] - mass) < 2e-6 + 1e-3 * mass
            assert line["p"][line["choice"]] == max(line["p"].values())
    assert tried > 1


@pytest.mark.parametrize("n", [1, 7, 40, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache", [32, 8])
def test_same_bytes(tiny, n, cache):
    texts = [f"Tell me {'a story ' * (i % 9)}{i}" for i in range(n)]
    lines = run_list(tiny, texts, ANSWERS[1], "-C", cache)
    assert len(lines) == n
    for options in (("-b", 1), ("-b", 3), ("-b", 512), ("-j", 1), ("-j", 2)):
        assert run_list(tiny, texts, ANSWERS[1], "-C", cache, *options) == lines
    for text, line in list(zip(texts, lines))[:5]:
        assert run_list(tiny, [text], ANSWERS[1], "-C", cache) == [line]
    for line, other in zip(lines, run_list(tiny, texts, ANSWERS[1][::-1], "-C", cache)):
        assert json.loads(line)["p"] == json.loads(other)["p"]
        assert json.loads(line)["mass"] == json.loads(other)["mass"]


@pytest.mark.parametrize("seed, cache", [(0, 32), (1, 32), (1, 8)])
def test_texts_that_begin_with_another_and_its_answer(tiny, seed, cache):
    """A given answer takes the place of the one before: whoever comes when, what lies behind the prompt is not shared."""
    r, answers = random.Random(seed), [
        " keeper who saw the wind and the harvest of the sea and the old man and the boat in the long night of the"
        " storm and the light", " on the ", " and a think", " on the sea with"]
    prompt = " ".join(r.choices("the old sea wind and I think that".split(), k=r.randrange(8, 40)))
    others = [" ".join(r.choices("a b is the of".split(), k=r.randrange(1, 60))) for _ in range(11)]
    texts = [prompt, *others, *(prompt + r.choice(answers) + end for end in (" and then", " x y z", answers[0]) * 2)]
    run = ("-m", "generate", "-C", cache)
    lines = run_list(tiny, texts, answers, *run, "-b", 1)       # in one place
    assert [lines[0]] == run_list(tiny, [prompt], answers, *run)
    for batch in (3, 8, 40):
        assert run_list(tiny, texts, answers, *run, "-b", batch) == lines


def test_no_blank_lines_where_the_prompt_ends_its_thinking(chain):
    template = ("{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}")
    assert output(chain("Ċ", "a", "<|im_end|>", template=template), "-m", "chat", "-i", "x", "-o", "a|b", "-qq") == b"a\n"


def test_one_text(tiny):
    """stderr has the numbers of a list's line in one sentence, in the order of -o."""
    result = qwen3(tiny, "-i", "Tell me a story", "-o", "yes|no")
    line = json.loads(run_list(tiny, ['{"id":7,"text":"Tell me a story"}'], ["yes", "no"], kind="-L")[0])
    assert list(line) == ["id", "choice", "p", "mass"] and line["id"] == 7
    assert result.stdout == line["choice"].encode() + b"\n", result
    assert result.stderr.splitlines()[0].decode() == \
        "qwen3: choices: yes {yes:.6f}, no {no:.6f} ({mass:.6f} of all answers)".format(mass=line["mass"], **line["p"])
    assert b"seed" not in result.stderr
    assert qwen3(tiny, "-i", "Tell me a story", "-o", "yes|no", "-qq").stderr == b""
    assert output(tiny, "-m", "generate", "-i", "x</think>", "-o", "a|b", "-q").strip(b"ab") == b""  # no blank lines


def test_what_is_nearly_sure_keeps_its_order(table_model):
    """Nine significant digits: what is 1e-7 and what is 1e-9 are no ties, nor are two that are nearly 1."""
    logits = {"a": 40, "b": 24, "c": 22, "d": 4}
    model = table_model({None: logits})
    line, = run_list(model, ["x"], logits, "-m", "generate")
    p, total = json.loads(line)["p"], sum(math.exp(x - 40) for x in logits.values())
    for text, x in logits.items():
        assert p[text] == pytest.approx(math.exp(x - 40) / total, rel=0.3), line
    assert p["a"] > p["b"] > p["c"] > p["d"] > 0 and re.search(rb'"c":1\.\d{8}e-08,', line)
    line, = run_list(model, ["x"], ["ddd", "dddd"], "-m", "generate")
    assert 0 < json.loads(line)["mass"] < 1e-30


CLOSING = b"Considering the limited time by the user, I have to give the solution based on the thinking directly now.\n"


def test_thinking_budget(tiny):
    """The closing text comes when N tokens were drawn without </think>, and only then."""
    args = (tiny, "-t", 0, "-i", "What is my name?", "-r")
    assert CLOSING not in qwen3(*args, 1).stderr
    thought = len(tokenize(tiny, b"The user did not say a name."))
    cut, whole = qwen3(*args, 3), qwen3(*args, thought + 4)
    assert CLOSING in cut.stderr and cut.stdout.endswith(b"\n") and len(cut.stdout) > 1
    assert CLOSING not in whole.stderr and whole.stdout == qwen3(*args, 1).stdout


def test_thinking_budget_of_a_whole_answer(table_model, tokenizer):
    """A second <think> has what the first one left; where that is nothing, it is closed at once."""
    two = tokenizer.encode("\n\n").ids[-1]
    model = table_model({"\u010a": {"<think>": 12.7}, two: {"<think>": 12.7}, "<think>": {"a": 12.7},
                         "a": {"b": 12.7}, "b": {"a": 12.7}}, template=THINKS)
    run = (model, "-t", 0, "-r", 3, "-n", 400)
    said = qwen3(*run, "-i", "x").stderr
    assert b"qwen3: answer: thinking ended by -r after 3 tokens\n" in said
    first, *others, last = said.split(CLOSING)
    assert first.endswith(b"<think>aba\n\n") and others
    assert all(re.fullmatch(rb"</think>\n+<think>\n\n", other) for other in others), said
    assert b"qwen3: answers: thinking ended by -r: 1\n" in qwen3(*run, "-l", "-", stdin=b"x\n").stderr


@pytest.mark.parametrize("options, closer", [
    (("-r", 3), "-r"), (("-r", 300, "-n", 5), "-n"), (("-r", 5, "-n", 5), "-n"), (("-c", 140), "a full context (-c)")],
    ids=str)
def test_what_ended_thinking_before_given_answers(chain, options, closer):
    """-r, -n or the context: the notice says which, after how many tokens of thinking."""
    model = chain("\u010a", "<think>", "a", "b", "a", template=THINKS)
    run = (model, "-t", 0, "-o", "a|b", *(options if "-r" in options else ("-r", 1, *options)))
    said = qwen3(*run, "-i", "x").stderr.decode()
    found = re.search(r"qwen3: answer: thinking ended by (.*) after (\d+) tokens\n", said)
    thinking = re.search(r"<think>([ab]*)", said)[1]
    assert found[1] == closer and int(found[2]) == len(thinking), said
    said = qwen3(*run, "-l", "-", stdin=b"x\nx\n").stderr.decode()
    assert f"qwen3: answers: thinking ended by {closer}: 2\n" in said and said.count("thinking ended by") == 1, said
    assert ", seeds " in said                           # thinking is drawn, given answers are not


@pytest.mark.parametrize("options", [("-r", 1), ("-r", 3), ("-r", 1, "-n", 3)], ids=str)
def test_thinking_comes_first(tiny, options):
    """Answers are scored behind thinking, drawn with the text's seed: alone as in a list, for any -b and -j."""
    texts = ["What is my name?", "What is 3 + 4?", "What is the capital of France?"] * 3
    lines = run_list(tiny, texts, ["7", "Paris", "The"], *options, "-s", 5)
    assert lines == run_list(tiny, texts, ["7", "Paris", "The"], *options, "-s", 5, "-b", 3, "-j", 1)
    assert lines != run_list(tiny, texts, ["7", "Paris", "The"])
    for i, text in enumerate(texts[:3]):
        assert run_list(tiny, [text], ["7", "Paris", "The"], *options, "-s", 5 + i) == [lines[i]]


def test_prompts_run_once(tiny):
    """All but the rows that are shared, and those of the given answers, even where many prompts end at once."""
    texts = [" ".join(f"{chr(97 + (i * i + j * j) % 26)}{i}" for j in range(40)) for i in range(64)]
    for answers in ("a|b|c", "the wind and|the sea of|the harvest and", " a| the wind and"):
        lines, error = conftest.run_list(tiny, "\n".join(texts).encode(), "-m", "generate", "-c", 400, "-o", answers,
                                          blocks=100_000)
        prompts, cached, more = map(int, re.search(rb"prompts (\d+) tokens \((\d+) cached\), answers (\d+)", error).groups())
        rows = int(re.search(rb"(\d+) rows", error)[1])
        assert prompts - cached <= rows <= prompts - cached + more and b"seed" not in error, error
        assert run_list(tiny, texts, answers.split("|"), "-m", "generate", "-b", 1) == lines


@pytest.mark.parametrize("cache", [32, 8])
def test_one_text_with_more_answers_than_places(tiny, cache):
    """Behind thinking: what its place held is another's by then."""
    answers = "|".join(f"the {word} and" for word in "wind sea harvest story keeper light house name town day".split())
    args = (tiny, "-r", 1, "-t", 0, "-s", 1, "-i", "What is my name?", "-C", cache, "-o", answers)
    results = [qwen3(*args, "-b", batch) for batch in (1, 3, 512)]
    assert len({result.stdout for result in results}) == 1 and results[0].returncode == 0
    said = {re.sub(rb"at [\d.]+/s", b"", result.stderr) for result in results}
    assert len(said) == 1, said


@pytest.mark.parametrize("old", [True, False])
def test_stop_ids_count_once(tiny, tmp_path, old):
    """Where a TEXT begins another one, all ids that end an answer are added up, each once, whatever a file says."""
    model = copy_model(tiny, tmp_path, extension=not old)
    if not old:
        change_sections(model, lambda sections: sections.update({b"stop": sections[b"stop"] * 2}))
    answers = ["The capital of France is Paris.", "The capital of France is Paris. It", "Hello"]
    options = ["-m", "chat", "-r", 0] if not old else ["-m", "chat"]
    line = json.loads(run_list(model, ["What is the capital of France?"], answers, *options)[0])
    assert 0.5 < line["mass"] <= 1, line


def test_a_text_with_a_stop_id(tiny, tmp_path):
    """It would be its own beginning and its end, and the mass 2. In chat it is spelled out, so it is plain text."""
    end = struct.pack("<I", tokenize(tiny, b"</think>")[0])
    model = change_sections(copy_model(tiny, tmp_path),
                            lambda sections: sections.update({b"stop": sections[b"stop"] + end}))
    for texts in "ab|ab</think>", "</think>|ab", "a|b</think>c":
        assert_error(qwen3(model, "-m", "generate", "-i", "a", "-o", texts), 1, "-o", "</think>", "ends answers")
        assert qwen3(tiny, "-m", "generate", "-i", "a", "-o", texts).returncode == 0
    assert qwen3(tiny, "-i", "a", "-o", "ab|ab<|im_end|>").returncode == 0


def as_harness(model, tokenizer, prompt, texts):
    """(nll, tokens) of each TEXT, split as lm-evaluation-harness splits: blanks at the prompt's end are the TEXT's."""
    before = tokenizer.encode(prompt.rstrip()).ids or tokenizer.encode("<|endoftext|>").ids
    whole = [before * (not prompt.strip()) + tokenizer.encode(prompt + text).ids for text in texts]
    for ids in whole:
        nll = -sum(model.logprobs(ids)[len(before) - 1:])
        if any(ids == other[:len(ids)] and ids != other for other in whole):
            nll -= math.log(sum(math.exp(model.logprobs(ids + tokenizer.encode(stop).ids)[-1]) for stop in STOPS))
        yield nll, len(ids) - len(before)


@pytest.mark.parametrize("exact", [False, True])
def test_a_rows_own_answers(tiny, table_model, tokenizer, exact):
    """-log p is the definition's: to 1e-4 where 8 bits hold a model; else activations are rounded, too."""
    r, rows = random.Random(1), []
    tokens = [token for token, id in tokenizer.get_vocab().items() if id % 9 == 0]
    if exact:
        tiny = table_model({token: {r.choice(tokens): r.random() * 9} for token in [None, *tokens[:20]]})
    else:
        tokenizer = Tokenizer.from_file(str(TINY / "model/tokenizer.json"))
    model = Model.from_bin(tiny)
    words = "the wind and sea of a harvest keeper. (10 1 7 yes; no: storm's Größe 灯塔".split()
    while len(rows) < 60:
        text = r.choice(["", " "]).join(r.choices(words, k=r.randrange(5))) + r.choice(["", " ", "\n\n", "(", "\u3000"])
        texts = {r.choice(["", " "]) + " ".join(r.choices(words, k=r.randrange(1, 5))) for _ in range(r.randrange(3, 6))}
        rows.append({"id": len(rows), "text": text, "c d": sorted(texts)})
    data = [json.dumps(row) for row in rows]
    run = ("-m", "generate", "-o", "@c d")
    lines = qwen3(tiny, "-L", "-", "-q", *run, stdin="\n".join(data).encode()).stdout.splitlines()
    scored = 0
    for row, line in zip(rows, map(json.loads, lines)):
        expected = list(as_harness(model, tokenizer, row["text"], row["c d"]))
        if min(tokens for _, tokens in expected) < 1:
            assert line["error"].endswith("adds no token to the prompt"), line
            continue
        scored += 1
        assert list(line) == ["id", "c d", "choice", "p", "mass", "nll", "tokens"] and line["c d"] == row["c d"]
        assert line["nll"] == pytest.approx([nll for nll, _ in expected], abs=1e-4 if exact else 0.15, rel=0 if exact else 0.02)
        assert line["tokens"] == [tokens for _, tokens in expected] and list(line["p"]) == row["c d"]
        mass = math.fsum(math.exp(-nll) for nll in line["nll"])
        assert line["mass"] == pytest.approx(mass, rel=1e-6)
        assert list(line["p"].values()) == pytest.approx([math.exp(-nll) / mass for nll in line["nll"]], rel=1e-6)
    assert scored > 40
    for i in 0, 7, 59:
        assert qwen3(tiny, "-L", "-", "-q", *run, "-b", 3, stdin=data[i].encode()).stdout == lines[i] + b"\n"


def test_own_answers_are_those_of_all(tiny):
    """In chat, with thinking or an answer that is begun, a row's own answers give what -o gives of the same ones."""
    for options in (), ("-r", 1, "-s", 3), ("-r", 4, "-s", 2), ("-r", 4, "-s", 2, "-C", 8), ("-b", 3, "-i", "Is it?"):
        for begun in [], [{"role": "assistant", "content": "The"}]:
            row = {"messages": [{"role": "user", "content": "What is 3 + 4?"}, *begun], "own": ["7", "1", "10", " a sea"]}
            all_, = run_list(tiny, [json.dumps(row)], row["own"], *options, kind="-L")
            own = json.loads(output(tiny, "-L", "-", "-q", "-o", "@own", *options, stdin=json.dumps(row).encode()))
            assert own.pop("tokens")[:3] == [1, 1, 2] and len(own.pop("nll")) == 4 and own == json.loads(all_)


@pytest.mark.parametrize("own, error", [
    ("", 'no member "own", expected an array of this name'), (', "own": "a"', "an array of two"), (', "own": ["a"]', "an array of two"),
    (', "own": ["a", 7]', "an array of two"), (', "own": ["a", ""]', "none empty"),
    (', "own": ["a", "b"], "nll": 1', "what this run adds, .nll"), (', "own": ["a", "%s"]' % ("b c " * 99), "too long")])
def test_wrong_answers_of_a_row(tiny, own, error):
    """Its error; the others run."""
    data = f'{{"text": "x"{own}}}\n"x"\n{{"text": "x", "own": ["a", "b"]}}\n'.encode()
    result = qwen3(tiny, "-L", "-", "-c", 64, "-o", "@own", stdin=data)
    first, bare, last = result.stdout.splitlines()
    assert result.returncode == 1 and error in json.loads(first)["error"] and json.loads(first)["choice"] is None
    assert bare == b"null" and json.loads(last)["choice"] in "ab"


def own_lines(model, rows, *args):
    data = "\n".join(map(json.dumps, rows)).encode()
    return list(map(json.loads, qwen3(model, "-L", "-", "-q", "-o", "@own", *args, stdin=data).stdout.splitlines()))


@pytest.mark.parametrize("mode", ["chat", "generate"])
def test_equal_answers_are_each_scored(tiny, mode):
    """Equal texts, or texts of the same ids; p has a text once, and what is equal counts once."""
    own = [["ab", "a", "e\u0301"], ["ab", "a", "ab", "a", "e\u0301"], ["e\u0301", "\u00e9", "a", "e\u0301", "ab"]]
    one, two, three = own_lines(tiny, [{"text": "x", "own": texts} for texts in own], "-m", mode)
    assert two["nll"] == [one["nll"][i] for i in (0, 1, 0, 1, 2)] and two["tokens"] == [one["tokens"][i] for i in (0, 1, 0, 1, 2)]
    assert three["nll"] == [one["nll"][i] for i in (2, 2, 1, 2, 0)]
    assert two["p"] == one["p"] and list(two["p"]) == own[0] and two["mass"] == three["mass"] == one["mass"]
    assert three["p"] == one["p"] | {"\u00e9": one["p"]["e\u0301"]} and list(three["p"]) == ["e\u0301", "\u00e9", "a", "ab"]
    assert three["p"][three["choice"]] == one["p"][one["choice"]]


def test_what_a_prompt_and_its_answers_share(tiny, tmp_path):
    """The ids are those of encoding a prompt with each TEXT. A suffix stands nowhere."""
    r = random.Random(2)
    parts = ["the", "old", " ", "\n", "'", "s", "re", "12", "3", ".", "!?", "e\u0301", "\u0301", "灯塔", "。", "\u3000", "<", "<th",
             "ink>", "</think>", "=", "\u0338", "_", "\u1100", "\u1161", "x" * 150]
    rows = [{"text": "".join(r.choices(parts, k=r.randrange(12))), "own": sorted({"".join(r.choices(parts, k=r.randrange(1, 4)))
             for _ in range(r.randrange(2, 6))} | {"a", "b"})} for _ in range(200)]
    words = "lighthouse harvest story keeper remember morning 12 it's".split()
    rows += [{"text": "the " + word[:i], "own": [word[i:], "b"]} for word in words for i in range(1, len(word))]
    rows += [{"text": "the <|im_", "own": ["start|>", "a"]}, {"text": "a h\u0301", "own": ["\u0323", "a"]}]
    texts = [text for row in rows for text in [row["text"].rstrip(), *(row["text"] + own for own in row["own"])]]
    data = "\n".join(map(json.dumps, texts)).encode()
    counts = iter([len(line.split()) for line in output(tiny, "-L", "-", "-m", "tokenize", stdin=data).splitlines()])
    lines, scored = own_lines(tiny, rows, "-m", "generate"), 0
    for row, line in zip(rows, lines):
        start = next(counts)
        added = [next(counts) - start for _ in row["own"]]
        scored += "error" not in line
        assert line.get("tokens") == added or (min(added) < 1 and "adds no token" in line["error"]), row
    assert scored > 100
    suffix = copy_model(tiny, tmp_path)
    change_sections(suffix, lambda sections: sections.update({b"tail": struct.pack("<II", 5, 6)}))
    assert own_lines(suffix, rows, "-m", "generate") == lines


@pytest.mark.parametrize("text, own, error", [
    ("of the sea. " * 16000, [f"answer {i}" for i in range(10000)], b"too long, expected at most "),
    ("the sea", [str(i) for i in range(99999)] + [" wind" * 2000], b"wind: too long, expected to fit"),
    ("the sea", [str(i % 10) for i in range(199999)], None),
    ("a" * 999, ["a" * (i % 9 + 1) for i in range(99999)], b"each answer encodes its 999 bytes anew")])
def test_many_answers_take_no_time(tiny, text, own, error):
    """Nor memory: this was minutes and gigabytes."""
    row = json.dumps({"text": text, "own": own}).encode()
    mode = "chat" if error is None else "generate"
    result = qwen3(tiny, "-L", "-", "-m", mode, "-o", "@own", stdin=row, timeout=20)
    assert (error is None and result.returncode == 0) or (result.returncode == 1 and error in result.stderr), result.stderr[-300:]


def test_a_long_prompt_and_many_answers(stopping):
    """Each is encoded with all of the prompt, 21 MB: that is no error. The one that is comes later."""
    row = json.dumps({"text": "the sea " * 3750, "own": [f" {i}" for i in range(700)] + ["<|im_end|>"]}).encode()
    result = qwen3(stopping, "-L", "-", "-m", "generate", "-o", "@own", stdin=row)
    assert result.returncode == 1 and b"<|im_end|>: has a token that ends answers" in result.stderr, result.stderr[-300:]


def test_a_name_that_no_row_has(tiny):
    """One error for the list; its rows are there, as rows that are wrong. Once a row has it, each other one has its error."""
    rows = "".join('{"text": "x", "own": ["a", "b"]}\n' for _ in range(9)).encode()
    result = qwen3(tiny, "-L", "-", "-o", "@owm", stdin=rows)
    assert result.returncode == 1 and result.stderr.count(b'no member "owm", expected') == 1 and b"error: 9" in result.stderr
    assert result.stdout.count(b'no member \\"owm\\", expected') == 9
    named = qwen3(tiny, "-L", "-", "-o", "@own", stdin=b'"x"\n"x"\n' + rows + b'"x"\n{"text": "x"}\n')
    lines = re.findall(rb"(?m)^qwen3: stdin: line (\d+): no member", named.stderr)
    assert named.returncode == 1 and lines == [b"1", b"12", b"13"], named.stderr


def test_a_row_without_the_name_in_a_list_that_grows(tiny, tmp_path):
    """Each run reports its first one."""
    for i in (1, 2):
        result = qwen3(tiny, "-L", "-", "-o", "@own", "-w", tmp_path / "out", stdin=b'{"text": "x"}\n' * i)
        assert result.returncode == 1 and b'stdin: line %d: no member "own"' % i in result.stderr, result


BLANK, PROMPT_ENDS = "a blank at an end, which counts", "prompt: ends in a blank"


@pytest.mark.parametrize("args, text, said", [
    (["-o", "yes |no"], "x", BLANK), (["-o", "yes| no"], "x", BLANK), (["-o", "yes|no"], "x ", None),
    (["-m", "generate", "-o", " yes| no"], "x", None), (["-m", "generate", "-o", "yes\n|no"], "x", BLANK),
    (["-m", "generate", "-o", "yes|no"], "x ", PROMPT_ENDS), (["-m", "generate", "-n", "1"], "x\n", None), (["-m", "generate", "-o", "@own"], "x ", None)])
def test_blanks_that_nobody_means(tiny, args, text, said):
    """One notice, of a list and of one text."""
    row = json.dumps({"text": text, "own": ["yes", "no"]}).encode() + b"\n"
    for where in (["-L", "-"], ["-i", text])[:1 + ("@own" not in args)]:
        error = qwen3(tiny, *where, *args, stdin=row * 3).stderr.decode()
        assert [said for said in (BLANK, PROMPT_ENDS) if error.count(said) == 1] == [said] * (said is not None), error
        assert error.count("blank") == (said is not None)


def test_prompts_that_end_in_a_blank(tiny):
    """Without given answers, too, and in a list once; with -q, too."""
    run = (tiny, "-m", "generate", "-n", 1, "-q")
    for args, stdin in (("-i", "Hello "), b""), (("-l", "-"), b"a\nb \nc\t\n"):
        said = qwen3(*run, *args, stdin=stdin).stderr.splitlines()
        assert said[0] == b"qwen3: prompt: ends in a blank, expected none: most tokens begin with one" and len(said) == 2
    assert qwen3(*run[:-1], "-qq", "-i", "Hello ").stderr == b"" and b"blank" not in qwen3(*run, "-i", "Hello").stderr


def test_mass(table_model):
    """What the model would not answer is said once."""
    model = table_model({None: {"a": 40, "b": 30}})
    said = "qwen3: choices: mass below 0.1 in {} of 2 texts: the model would answer something else\n"
    for answers, n in ("a|b", 0), ("b|c", 2):
        run = (model, "-m", "generate", "-o", answers)
        assert qwen3(*run, "-l", "-", "-q", stdin=b"x\ny\n").stderr.decode() == said.format(2) * (n > 0)
        assert (b"mass below 0.1 in 1 of 1 texts" in qwen3(*run, "-i", "x").stderr) == (n > 0)


def test_one_label_for_nearly_all(table_model):
    """Nine of ten of a list of 20 or more texts: said once, with -q, too."""
    model = table_model({"x": {"a": 40, "b": 30}, "y": {"b": 40, "a": 30}})
    for x, y, said in ((20, 0, True), (18, 2, True), (1, 29, True), (17, 3, False), (19, 0, False)):
        run = (model, "-m", "generate", "-o", "a|b", "-l", "-")
        error = qwen3(*run, "-q", stdin=b"x\n" * x + b"y\n" * y).stderr
        label, n = (b"a", x) if x > y else (b"b", y)
        assert error == b'qwen3: choices: "%s" in %d of %d texts: see the division in RECIPES.md\n' % (label, n, x + y) * said, error
        assert qwen3(*run, "-qq", stdin=b"x\n" * x + b"y\n" * y).stderr == b""


@needs_address_space
def test_many_answers_and_little_memory(tiny, tmp_path):
    """Taken apart, a row's own answers take as much memory as encoding them: too many are that row's error."""
    row, path = json.dumps({"text": "a", "own": [f"a{i}" for i in range(450_000)]}), tmp_path / "rows"
    path.write_text(f'{row}\n{{"text":"a","own":["x","y"]}}\n')
    result = shell(f"ulimit -v 450000; exec {QUOTED_QWEN3} {tiny} -q -j 1 -c 64 -o @own -L {path}")
    assert result.returncode == 1 and b'line 1: member "own": too long, expected at most 4 MB' in result.stderr, result.stderr
    assert b'"error":"member' in result.stdout.splitlines()[0] and b'"choice":' in result.stdout.splitlines()[1]


def test_an_end_inside_thinking(chain):
    """It is no whole answer: one text and a list say so."""
    model = chain("\u010a", "<think>", "a", "<|im_end|>", template=THINKS)
    run = (model, "-t", 0, "-r", 1)
    assert b"qwen3: answer: ended inside its thinking by an end token after 2 tokens\n" in qwen3(*run, "-i", "x").stderr
    result = qwen3(*run, "-L", "-", stdin=b'{"text": "x"}\n')
    assert json.loads(result.stdout) == {"answer": "", "end": "thinking"}
    assert b"qwen3: answers: of 1 ended inside their thinking: 1\n" in result.stderr


JUDGE = 'Say if the document answers the query. The answer is "yes" or "no".'


def test_reranker(tmp_path, tokenizer):
    """p.yes is the score of Qwen3-Reranker's model card: the softmax of two logits behind prefix, pair and suffix."""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}")
    hf = make_checkpoint(tmp_path / "hf", tokenizer, template=template, n_layers=3)
    model, reference = export(hf, tmp_path / "reranker.bin"), Model.from_checkpoint(hf)
    pairs = [f"<Instruct>: Find it\n<Query>: {query}\n<Document>: {document}"
             for query in ("Who?", "How far is the sea?") for document in ("Me.", "The sea is two miles from here.")]
    lines = run_list(model, [json.dumps(pair) for pair in pairs], ["a", "n"], "-y", JUDGE, kind="-L")
    yes, no = (tokenizer.encode(text).ids[0] for text in ("a", "n"))
    scores = []
    for pair, line in zip(pairs, lines):
        ids = tokenizer.encode(f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n{pair}<|im_end|>\n"
                               "<|im_start|>assistant\n<think>\n\n</think>\n\n").ids
        logits = reference.logits(ids)[-1].astype(float)
        scores.append(1 / (1 + math.exp(logits[no] - logits[yes])))
        assert json.loads(line)["p"]["a"] == pytest.approx(scores[-1], abs=0.02)
    assert max(scores) - min(scores) > 0.1


def test_refused_once_the_model_is_known(tiny, tmp_path):
    """A model that its file makes for another mode answers nothing; two TEXTs of the same ids can't be told apart."""
    model = copy_model(tiny, tmp_path)
    for number, mode in (2, "tokenize"), (3, "perplexity"), (4, "embed"):
        change_sections(model, lambda sections: sections.update({b"mode": struct.pack("<I", number)}))
        for args in ("-i", "a"), ("-l", "-"):
            assert_error(qwen3(model, *args, "-o", "yes|no", stdin=b"a\n"), 2, "-o", f"made for -m {mode}, expected -m chat")
    # A letter and its mark, composed and not: NFC makes them one.
    assert_error(qwen3(tiny, "-i", "a", "-o", "\u00e9|e\u0301"), 1)
    # An answer that does not fit into the context: that line's null, also if no line has room for it
    data = b"Hello\n" + b"a b c d " * 20 + b"\n"
    for answers, first in ("yes|no", b'{"choice":'), ("yes|" + "no 1 2 " * 20, b"null\n"):
        result = qwen3(tiny, "-c", 64, "-l", "-", "-o", answers, stdin=data)
        assert result.returncode == 1 and result.stdout.startswith(first) and result.stdout.endswith(b"\nnull\n"), result
        assert re.search(rb"(?m)^qwen3: .*: line 2: (too long, expected at most \d+ tokens|-o: its answers need \d+ tokens, ex.* 64) \(-c", result.stderr)
    assert_error(qwen3(tiny, "-c", 64, "-i", "Hello", "-o", answers), 1, "prompt", "-o: its answers need", "than the context, 64 (-c)")

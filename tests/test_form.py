"""Forms (-g): whole answers match, what is drawn is the restricted distribution, the same bytes in any company."""
import json
import math
import random
import re
import resource
import subprocess

import numpy as np
import pytest
from conftest import (QWEN3, ROOT, SANITIZED, assert_error, change_sections, copy_model, environment, output,
                      outputs, qwen3, run_json, run_list, spawn, write_list)
from test_templates import CHATML as THINKS
from test_sampling import RANKED, assert_distribution

PIECES = ["a", "b", "xyz", r"\d", r"\w", r"\s", ".", "[abc]", "[^abc]", "[a-f0-9]", r"\.", "é", "[à-ÿ]", r"[^\w]", r"\u0041", r"\x42",
          r"[\]\-]", "[]ab]", "[^]a]", "日", "[一-龥]", r"\D", r"\S", r"\W", r"[^\s,]", r"\n", "😀", "[😀-😎]", " ", r"[\x00-\x1f\u00a0-\uffef]", r"[\s\S]",
          "[^a-zé]", r"\t|\r", r"[+-.]", r"[.\\/$]", r"\ ", "-", ",", "~"]
TEXTS = ["Hello", "What is the capital of France?", "3 + 4 = ", "Tell me a story.", "My name is Ann.", "x"]
FIELDS = (r'\{"name": "[^"\\\x00-\x1f]{1,12}", "age": \d{1,3}, "tags": \[("(red|green|blue sky)"(, "(red|green|blue sky)"){0,2})?\], '
          r'"is it so": (true|false)\}')
FORMS = [FIELDS, r"(?:[A-Z][a-z]{1,8}[ ,.]){3,12}", r"[\s\S]{5,200}", r"(one|two|three)( (one|two|three)){5,20}", r"[\s\S]*"]


def random_form(r, depth=4):
    kind = r.randrange(10) if depth else 0
    if kind < 3:
        return r.choice(PIECES)
    if kind < 6:
        return "".join(random_form(r, depth - 1) for _ in range(r.randint(1, 4)))
    if kind < 8:
        return r.choice(["(", "(?:"]) + "|".join(random_form(r, depth - 1) for _ in range(r.randint(1, 3))) + ")"
    return f"(?:{random_form(r, depth - 1)})" + r.choice(["?", "*", "+", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}"])


def answers(model, form, texts, *args, **how):
    lines, error = run_json(model, [{"text": text} for text in texts], "-q", "-g", form, *args, **how)
    return [json.loads(line) for line in lines], error


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12)]])
def test_whole_answers_match(tiny, seed):
    r, whole = random.Random(seed), 0
    for i in range(100):
        form = random_form(r)
        args = "-t", r.choice("012"), "-n", r.choice((30, 100)), "-s", i, "-k", r.choice((0, 20)), "-p", r.choice((1, 0.9)), "-e", r.choice((1, 1.1))
        found, error = answers(tiny, form, TEXTS * 2, *args)
        for row in found:
            assert row["end"] in ("stop", "length"), row
            if row["end"] == "stop":
                assert re.fullmatch(form, row["answer"], re.ASCII), (form, args, row)
                whole += 1
        cut = sum(row["end"] == "length" for row in found)
        assert error == (b"qwen3: answers: of %d ended by -n: %d\n" % (len(found), cut) if cut else b""), form
    assert whole > 700


@pytest.mark.parametrize("form, options, t, letters", [
    ("[acf]+", ("-k", 0, "-p", 1), 1, "acf"), ("[^e]*", ("-k", 0, "-p", 1), 2, "dcbaf"), ("[acdf]+", ("-k", 2, "-p", 1), 2, "dc"),
    ("[acdf]+", ("-k", 0, "-p", 0.55), 2, "dc"), (r"(?:[a-c]|z\w)*", ("-k", 0, "-p", 1), 0.5, "bca")])
def test_distribution(table_model, form, options, t, letters):
    """It is that of the ids which the form allows: then come top-k and top-p."""
    model = table_model({None: RANKED}, fill=-80, max_len=4096)
    text = output(model, "-m", "generate", "-i", "x", "-n", 2000, "-s", 1, "-qq", "-t", t, *options, "-g", form).decode()
    weights = {letter: math.exp(RANKED[letter] / t) for letter in letters}
    assert_distribution({x: text.count(x) for x in set(text)}, {x: w / sum(weights.values()) for x, w in weights.items()})


def test_first_ids(tiny, tmp_path):
    """Each first text as often as the sum of p of the ids that spell it, of all that the form allows."""
    plain, n, prompt = tmp_path / "list", 3000, "What is the capital of France?"
    write_list(plain, [{"text": prompt}] * n)
    free = [json.loads(line)["answer"] for line in output(tiny, "-L", plain, "-qq", "-t", 1.5, "-k", 0, "-p", 1, "-n", 1, "-s", 7).splitlines()]
    form = r"[A-Z][a-z]*(?: [\s\S]*)?"
    allowed = [text for text in free if re.fullmatch(form, text)]
    found = [json.loads(line)["answer"] for line in
             output(tiny, "-L", plain, "-qq", "-t", 1.5, "-k", 0, "-p", 1, "-n", 1, "-s", 9, "-g", form).splitlines()]
    assert len(allowed) > n / 4 and all(re.fullmatch(form, text) for text in found)
    for text in set(found) | set(allowed):
        p, q = found.count(text) / n, allowed.count(text) / len(allowed)
        assert abs(p - q) < 5 * math.sqrt((p * (1 - p)) / n + q * (1 - q) / len(allowed)) + 2 / n, (text, p, q)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("t", [0, 1])
def test_same_bytes(tiny, form, t):
    """Threads, batches, company, guesses, the definition"""
    texts, run = TEXTS * 3, ("-t", t, "-s", 7, "-n", 80)
    wanted, _ = answers(tiny, form, texts, *run)
    for args in ("-j", 1), ("-b", 1), ("-b", 3, "-j", 2), ("-b", 40, "-j", 3):
        assert answers(tiny, form, texts, *run, *args)[0] == wanted, args
    for blocks in "20,1", "60,2":                       # random guesses, steps back
        assert answers(tiny, form, texts, *run, blocks=blocks)[0] == wanted, blocks
    for i, text in enumerate(TEXTS):
        args = [tiny, "-qq", "-g", form, "-t", t, "-s", 7 + i, "-n", 80, "-i", text]
        assert output(*args) == wanted[i]["answer"].encode() + b"\n"
        plain = subprocess.run([ROOT / "qwen3-plain", *map(str, args)], capture_output=True, env=environment())
        assert plain.stdout == wanted[i]["answer"].encode() + b"\n"


def test_same_bytes_when_masks_are_forgotten(tiny):
    """After 4,096: nearly every place of a text is a state of its own."""
    form, run = r"(?:[\s\S]{1,40}[ae])*", ("-t", 2, "-s", 7, "-n", 120, "-k", 0)
    rows, _ = answers(tiny, form, [f"{text} {i}" for i in range(14) for text in TEXTS], *run)
    for i in (*range(0, 84, 9), 83):
        text = output(tiny, "-qq", "-i", f"{TEXTS[i % 6]} {i // 6}", "-g", form, *run[:3], 7 + i, *run[4:])
        assert text == rows[i]["answer"].encode() + b"\n" and len(text) > 100


def test_more_states_than_there_are(tiny):
    """The texts of a pass then take turns; a text that alone needs more has no result, and all others run."""
    form = r"[\s\S]*(" + "|".join(rf"{c}[\s\S]{{{10 + i}}}" for i, c in enumerate([*"abcdefghijklmnopqrstuvwxyz", r"\ ", r"\,", r"\.", *"TIWH"])) + ")"
    texts = [("What is the capital of France?", "x", "My name is Ann.", "Hello", "3 + 4 = ", "Tell me a story.", "Who are you?")[int(i)]
             for i in "01222343525565250532"]
    texts = [f"{text} {i}" for i, text in enumerate(texts)]
    rows, _ = answers(tiny, form, texts, "-t", 1, "-s", 5, "-n", 60)
    for i in 0, 19:
        assert output(tiny, "-qq", "-g", form, "-t", 1, "-s", 5 + i, "-n", 60, "-i", texts[i]) == rows[i]["answer"].encode() + b"\n"
    args = tiny, "-q", "-t", 1, "-s", 5, "-n", 20, "-g", r"(?:b.*|a(?:[\s\S]{0,90}[^a]{0,90}){2000})"
    result = qwen3(*args, "-l", "-", stdin=b"Hello\nTell me a story.\nx 1\n")
    first, second, third = map(json.loads, result.stdout.splitlines())
    assert result.returncode == 1 and first is third is None and second[0] in "ab", result
    assert result.stderr.count(b": -g: too many ways to go on, expected fewer") == 2, result
    result = qwen3(*args, "-i", "Hello")
    assert result.returncode == 1 and b"-g: too many ways to go on" in result.stderr, result


def test_guesses_that_need_more_states_than_there_are(tiny, tmp_path):
    """Then the text draws without those states: with 4,096 in a program, as it would with 65,536 and a large vocabulary."""
    source = (ROOT / "qwen3.c").read_text()
    assert source.count("MOST_STATES = 1 << 16") == 1
    (tmp_path / "qwen3.c").write_text(source.replace("MOST_STATES = 1 << 16", "MOST_STATES = 1 << 12"))
    subprocess.run(["cc", "-O1", "-std=gnu11", "-ffp-contract=off", "-pthread", "qwen3.c", "-o", "small", "-lm"], cwd=tmp_path, check=True)
    text = "The capital of France is Paris, and the capital of Japan is Tokyo. " * 3 + "The capital of France is"
    form = r"[\s\S]*(?:" + "|".join(rf"{c}[\s\S]{{{20 + i}}}" for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")) + ")"
    for t in 0, 1:
        args = [str(x) for x in (tiny, "-m", "generate", "-qq", "-t", t, "-s", 5, "-n", 40, "-g", form, "-i", text)]
        runs = [subprocess.run([tmp_path / "small", *args, *more], capture_output=True) for more in ((), ("-b", "1"))]
        assert [run.returncode for run in runs] == [0, 0], runs
        assert runs[0].stdout == runs[1].stdout == output(*args)


@pytest.mark.parametrize("answer, prompt, form, right, wrong", [
    ("x0123456789=;#&@!%abcdefghij", "x", "[xy]0123456789=;#&@!%abcdefghij", 14, 1),    # one way
    ("x0123т", "x", "x0123(т|с)", 4, 0),                                # half a character begins a whole one
    ("x0123 cq", "x", "x0123 (cq|other)", 4, 1),                        # a space begins the next word
    ("0123456789=;#", "34567!!!!!!!", "[0-9=;#]{13}", 0, 0),            # what repeats, up to where the form hides it
    ("0123456789=;#", "3456789!!!!!", "[0-9=;#]{13}", 2, 0),
    ("0123456789=;#", "34567", r"[\s\S]{13,60}", 0, 1),                 # and never <|im_end|> behind the prompt
    ("0123456789=;#&@%~?*", "34567!!!!!!!", r"[0-9!]{10}=;#&@%~\?\*", 6, 6)])   # a form's, also in debt
def test_guesses(chain, tokenizer, answer, prompt, form, right, wrong):
    """Where one way is left its ids are guessed, and what repeats only if it is allowed. -b 1 has no guesses; with
    them, an answer's last id may run, too."""
    model = chain("Ċ", *tokenizer.encode(answer).tokens, max_len=500)
    runs = [run_list(model, [prompt], "-g", form, "-t", 0, "-n", len(answer), *args, blocks=1000) for args in ((), ("-b", 1))]
    assert runs[0][0] == runs[1][0] == [json.dumps(answer, ensure_ascii=False).encode()]
    passes, rows = [[int(re.search(rb"(\d+) " + what, error)[1]) for _, error in runs] for what in (b"passes", b"rows")]
    assert rows[0] - rows[1] <= wrong and passes[0] <= len(answer) + 1 - right, (rows, passes)
    # The prompt runs in one pass, with -b 1 in many: this many, and one for each id but the last
    assert passes[1] == rows[1], (rows, passes)


def test_guesses_in_small_batches(chain, tokenizer):
    answer = "0123456789=;#&@%~"
    model = chain("Ċ", *tokenizer.encode(answer).tokens, max_len=500)
    error = {b: run_list(model, [answer], "-g", r"[\s\S]{17}", "-t", 0, "-b", b, blocks=1000)[1] for b in (1, 2, 3)}
    passes = {b: int(re.search(rb"(\d+) passes", error[b])[1]) for b in error}
    prompt = passes[1] - len(answer) + 1
    for b in 2, 3:  # the last twelve are guessed, one or two in a pass
        assert passes[b] <= -(-prompt // b) + len(answer) - 1 - 12 + 12 / b + 1, (prompt, passes)


def test_wrong_guesses_end(chain):
    """Also a form's: here the model never draws the space and the letter as one token."""
    model = chain("Ċ", "Ġ", "c", "Ġ", max_len=500)
    runs = [run_list(model, ["x"], "-g", "( c){90}", "-t", 0, *args, blocks=1000) for args in ((), ("-b", 1))]
    assert runs[0][0] == runs[1][0] == [json.dumps(90 * " c").encode()]
    rows = [int(re.search(rb"(\d+) rows", error)[1]) for _, error in runs]
    assert 0 < rows[0] - rows[1] < 80, rows


@pytest.mark.parametrize("form, place, word", [
    ("a(b", 4, "expected )"), ("a)", 2, "expected its end"), ("[z-a]", 2, "low to high"), ("a**", 3, "repeat"), ("a*?", 3, "lazy"),
    ("a++", 3, "possessive"), ("(?=x)", 1, "group"), ("(?i)a", 1, "without flags"), ("x(?!y)", 2, "group"), ("(?P<n>a)", 1, "group"), ("(?<=a)b", 1, "group"),
    (r"a\q", 2, r"\uHHHH"), (r"(a)\1", 4, r"\uHHHH"), (r"\bno", 1, r"\uHHHH"), ("x{3,1}", 2, "low to high"), ("a{,3}", 3, "{2,3}"),
    ("a{2", 4, "expected }"), ("\\", 2, "a character"), ("[a", 3, "] after a set"), ("*a", 1, "before this"),
    ("a^b", 2, "before this"), ("a$b", 3, "its end"), (r"[\d-z]", 2, "low to high"), (r"\x4", 1, "hexadecimal"),
    (r"ab\u12", 3, "hexadecimal"), (r"\ud83d\ude00", 1, "half"), (r"[^\s\S]", 8, "characters"), ("é{", 4, "{2,3}"), (b"a\xff", 2, "a character"),
    ("(" * 101 + ")" * 101, 101, "100 groups")])
def test_errors_name_their_place(tiny, form, place, word):
    assert_error(qwen3(tiny, "-i", "x", "-g", form), 2, f"-g: bad expression at byte {place}, expected", word, ", found ")


def test_usage_errors(tiny):
    assert_error(qwen3(tiny, "-i", "x", "-g", ""), 2, "-g", "expected")
    for form in "(a{1000}){10000}", "a{99999999999999999999}":
        assert_error(qwen3(tiny, "-i", "x", "-g", form), 2, "-g", "too long", "lower counts")
    for args in (("-o", "a|b"), ("-x", ".")):
        assert_error(qwen3(tiny, "-i", "x", "-g", "a", *args), 2, args[0], "-g")
    for mode in "embed", "perplexity", "tokenize":
        assert_error(qwen3(tiny, "-i", "x", "-g", "a", "-m", mode), 2, "-g", mode)
    assert_error(qwen3(tiny, "-i", "x", "--json-schema", "a"), 2, "-g", "--form")


@pytest.mark.skipif(SANITIZED, reason="needs more memory")
@pytest.mark.parametrize("form", [
    r"([\s\S]{0,50}[^a]{0,50}){200}", r"([\s\S]{0,20}[^a]{0,20}){40}", "(a?){500}a{500}", "((a?){30}){30}", r"(\w*\s*)*{0}"[:-3], r".*a.{20}",
    r"([\s\S]*[a-z][\s\S]{0,300}){3}", "(((((a?)*)*)*)*)*b", "|" * 50_000, "(" * 99 + "a" + ")*" * 99, "(|){1000000}", "(a|){100000}",
    "[" + "".join(map(chr, range(0x100, 0x4000, 2))) + "]{3,900}", "(" + "|".join(f"w{i}" for i in range(9000)) + ")*"],
    ids=lambda form: form[:20])
def test_bounds(tiny, form):
    """It answers soon in little memory, or is refused."""
    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    found = subprocess.run([QWEN3, tiny, "-qq", "-i", "Hello", "-t", "2", "-n", "20", "-s", "1", "-j", "2", "-g", form], capture_output=True,
                           env=environment(), preexec_fn=limit)
    assert found.returncode == 0 or b"-g: too " in found.stderr, found


def test_ends(tiny):
    """COMPLETE at once where only the end is left, also at -n; by a stop id only where the form may end."""
    rows, _ = answers(tiny, "a{3}", ["x"], "-n", 3)
    assert rows == [{"answer": "aaa", "end": "stop"}]
    assert answers(tiny, "()|a{0}", TEXTS)[0] == [{"answer": "", "end": "stop"}] * len(TEXTS)
    result = qwen3(tiny, "-q", "-i", "x", "-g", "[a-f]{30}", "-n", 4)
    assert result.returncode == 0 and result.stderr == b"qwen3: answer: ended by -n after 4 tokens\n"
    assert qwen3(tiny, "-qq", "-i", "x", "-g", "[a-f]{30}", "-n", 4).stderr == b""
    rows, _ = answers(tiny, "(ab)*", ["x"], "-c", 40)
    assert rows[0]["end"] in ("context", "stop", "loop")


def test_thinking_is_free(table_model, tokenizer):
    """Closed by the model or a budget; then come the ids that the template has there, and the form begins."""
    two = tokenizer.encode("\n\n").ids[-1]
    model = table_model({"Ċ": {"<think>": 12.7}, "<think>": {"a": 12.7}, "a": {"b": 12.7}, "b": {"</think>": 12.7}, two: {"<think>": 12.7, "d": 9},
                         None: {"c": 12.7}}, max_len=1000, template=THINKS)
    for form, budget, answer in ((r"\n\n[x-z]{3}", 9, r"\n\n[x-z]{3}\n"), ("yes|no", 9, r"(yes|no)\n"), ("yes|no", 2, r"(yes|no)\n"),
                                 ("[cd]{3}", 9, "dcc\n"), ("(?:[cd]{3}){2}", 2, "dccccc\n"), ("(?:</?think>){1,3}", 9, "(</?think>){1,3}\n")):
        args = (model, "-t", 0, "-n", 100, "-r", budget, "-g", form)
        result = qwen3(*args, "-i", "x")
        assert result.returncode == 0 and re.fullmatch(answer, result.stdout.decode()), (args, result)
        assert b"<think>ab</think>" in result.stderr if budget > 2 else b"solution based on the thinking" in result.stderr, result
        assert result.stderr.count(b"<think>") == 1
        row, = answers(*args[:1], form, ["x"], *args[1:-2])[0]
        assert row["end"] == "stop" and row["answer"].encode() + b"\n" == result.stdout
        plain = subprocess.run([ROOT / "qwen3-plain", *map(str, args), "-i", "x", "-q"], capture_output=True, env=environment())
        assert plain.stdout == result.stdout


def test_chats_and_begun_answers(tiny):
    script = output(tiny, "-m", "chat", "-q", "-g", r"[A-Z][a-z]{2,9}\.", "-s", 3, stdin=b"Hello\nWho are you?\nWhy?\n").decode()
    assert re.fullmatch(r"([A-Z][a-z]{2,9}\.\n){3}", script), script
    child = spawn(tiny, "-g", "(?:yes|no) [a-z]{4}")
    for question in "Is it so?", "And this?":
        child.expect("> ")
        child.send(question + "\n")
        child.expect("(?:yes|no) [a-z]{4}\r\n")
    child.sendeof()
    child.expect("> ")
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": '{"n": '}]
    line, = run_json(tiny, [begun], "-q", "-g", r"\d{2}\}")[0]
    assert re.fullmatch(rb'"\d{2}\}"', line)


def test_vocabulary(tiny, tmp_path):
    """No id that is SPECIAL, or ends answers; a byte without a token of its own could be a dead end."""
    for seed in range(5):
        answer = output(tiny, "-qq", "-i", "x", "-g", r"[<|>a-z_]{200}", "-t", 9, "-k", 0, "-p", 1, "-s", seed)
        assert re.fullmatch(rb"[<|>a-z_]{200}\n", answer), answer
    halves = output(tiny, "-qq", "-i", "x", "-g", r"[\ud700-\ue0ff]{60}", "-t", 9, "-k", 0, "-p", 1).decode()
    assert len(halves) == 61 and "\ufffd" not in halves
    model = copy_model(tiny, tmp_path)
    found = int(output(model, "-m", "tokenize", "-q", "-i", "z"))
    change_sections(model, lambda sections: sections.update({b"stop": found.to_bytes(4, "little")}))
    assert_error(qwen3(model, "-i", "x", "-g", "z"), 1, "-g: ", "0x7a")


def test_damaged(table_model, tokenizer, tmp_path):
    """What is not finite ends an answer, also where it is hidden."""
    model = copy_model(table_model({None: {"a": 5}}, max_len=100), tmp_path)
    whole = model.read_bytes()
    scale = outputs(whole)["lm_head.weight"].scales + tokenizer.token_to_id("b") * 4
    for bad in np.nan, np.inf, -np.inf:
        model.write_bytes(whole[:scale] + np.array(bad, "<f4").tobytes() + whole[scale + 4:])
        for form in "a+", "b+":
            assert_error(qwen3(model, "-qq", "-i", "x", "-g", form, "-n", 4), 1, "not finite")


def test_going_on(tiny, tmp_path):
    """-w: the form is a part of the run"""
    texts, out = tmp_path / "list", tmp_path / "out"
    write_list(texts, [{"text": text} for text in TEXTS * 5])
    run = (tiny, "-L", texts, "-q", "-n", 20, "-w", out, "-g")
    output(*run, "[a-z ]{5,30}")
    whole = out.read_bytes()
    out.write_bytes(whole[:len(whole) // 2])
    output(*run, "[a-z ]{5,30}")
    assert out.read_bytes() == whole
    out.write_bytes(whole[:len(whole) // 2])
    assert_error(qwen3(*run, "[A-Z]{5,30}"), 1, "another run's")

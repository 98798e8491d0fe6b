"""The sampler, on models whose distribution is a table (conftest.make_table_model)."""
import collections
import math

import pytest
from conftest import HYBRID, output

RANKED = {"e": 5.0, "d": 4.5, "c": 4.0, "b": 4.0, "a": 3.0, "f": 2.5}      # logits; b and c tie
N = 400


@pytest.fixture(scope="module")
def ranked(table_model):
    """ranked(**kwargs): after any token the same logits, those of RANKED, and -80 for all other tokens."""
    return lambda **kwargs: table_model({None: RANKED}, fill=-80, max_len=4096, **kwargs)


def draw(model, *options, n=N, seed=1):
    text = output(model, "-m", "generate", "-i", "x", "-n", n, "-s", seed, "-q", *options)
    assert len(text) == n
    return collections.Counter(text.decode())


def expected(temperature, letters="edcbaf"):
    weights = {letter: math.exp(RANKED[letter] / temperature) for letter in letters}
    return {letter: w / sum(weights.values()) for letter, w in weights.items()}


def assert_distribution(counts, probabilities):
    n = sum(counts.values())
    assert set(counts) <= set(probabilities)
    for letter, p in probabilities.items():
        assert abs(counts[letter] - n * p) < 5 * math.sqrt(n * p * (1 - p)) + 1, (letter, counts, p)


def kept_by_top_p(p, temperature):
    """The smallest set that reaches p, of the distribution after the temperature."""
    kept, total = "", 0
    for letter in "edbcaf":
        if total < p:
            kept, total = kept + letter, total + expected(temperature)[letter]
    return kept


def top_p(p, temperature):
    return ("-t", temperature, "-k", 0, "-p", p), temperature, kept_by_top_p(p, temperature)


P = 0.05, 0.3, 0.5, 0.7, 0.8, 0.95, 0.99


@pytest.mark.parametrize("options, temperature, letters", [
    *[(("-t", t, "-k", 0, "-p", 1), t, "edbcaf") for t in (0.5, 1, 3)],
    *[(("-t", 2, "-k", k, "-p", 1), 2, "edbcaf"[:k]) for k in (1, 2, 3, 4, 6, 100)],   # b and c tie: the lower id stays
    *[top_p(p, 2) for p in P], *[pytest.param(*top_p(p, 1), marks=pytest.mark.slow) for p in P],
    # Top-k comes before top-p: of e and d alone, e has 0.56; of all six it has 0.28.
    (("-t", 2, "-k", 2, "-p", 0.55), 2, "e"), (("-t", 2, "-k", 0, "-p", 0.55), 2, "edb"),
    (("-t", 0), 1, "e"), (("-k", 2), 0.6, "ed")], ids=str)      # the checkpoint's 0.6 and 0.95 stay
def test_temperature_top_k_and_top_p(ranked, options, temperature, letters):
    assert_distribution(draw(ranked(), *options, n=2000), expected(temperature, letters))


def test_presence_penalty(ranked):
    """Taken off once from every token that was generated, however often."""
    text = output(ranked(), "-m", "generate", "-i", "eeeee", "-t", 0, "-a", 2, "-n", 8, "-q")
    # 5 e, 4.5 d, 4 b, 4 c, 3 a (e has 3 too: a is the lower id), then e 3 again and again.
    assert text == b"edbcaeee"
    run = (ranked(), "-m", "generate", "-i", "x", "-t", 1, "-s", 3, "-n", 100, "-q")
    assert output(*run, "-a", 0) == output(*run)


def test_repetition_penalty(ranked, table_model):
    """As HF's: logits of what the context has are divided by it (multiplied if below 0); -e overrides it, 1 is none."""
    below = table_model({None: {"a": -1, "b": -1.5}}, fill=-80)
    assert output(below, "-m", "generate", "-i", "a", "-t", 0, "-e", 2, "-n", 2, "-q") == b"ba"
    path = ranked(generation=dict(do_sample=False, repetition_penalty=4.0))
    run = (path, "-m", "generate", "-i", "e", "-n", 7, "-q")
    assert output(*run) == b"dbcafee"                   # e has 1.25 after the prompt
    assert output(*run, "-e", 4) == output(*run)
    assert output(*run, "-e", 1) == b"eeeeeee"
    assert output(*run, "-e", 1.2) == b"deeeeee"        # e 4.17 < d 4.5; then d 3.75 and b 4


@pytest.mark.parametrize("generation, temperature, letters", [
    (dict(do_sample=False), 1, "e"), (dict(do_sample=True, temperature=2.0, top_k=2, top_p=1.0), 2, "ed"),
    (dict(do_sample=True, temperature=1.0, top_k=0, top_p=0.3), 1, "e"),
    (dict(do_sample=True, temperature=3.0, top_k=3, top_p=1.0), 3, "edb"),
    ({}, 0.6, kept_by_top_p(0.95, 0.6))])               # Qwen's 0.6 / 0.95 / 20
def test_defaults_are_the_checkpoints(ranked, generation, temperature, letters):
    path = ranked(generation=generation)
    assert_distribution(draw(path, n=2000), expected(temperature, letters))


def test_advice_for_a_hybrid_model(ranked):
    """Thinking off: Qwen's 0.7 / 0.8 / 20; on: the checkpoint's own."""
    generation = dict(do_sample=True, temperature=3.0, top_k=6, top_p=1.0)
    path = ranked(template=HYBRID, generation=generation)
    for thinking, temperature, letters in (0, 0.7, "edb"), (1, 3, "edbcaf"):
        text = output(path, "-i", "x", "-n", 1500, "-s", 1, "-q", "-r", thinking)
        assert_distribution(collections.Counter(text.decode().rstrip("\n")), expected(temperature, letters))


def test_first_tokens_of_neighbouring_seeds_are_independent(ranked):
    """A generator that is seeded badly gives the same first number for small seeds."""
    first = collections.Counter(
        output(ranked(), "-m", "generate", "-i", "x", "-n", 1, "-t", 2, "-k", 0, "-p", 1, "-q",
               "-s", seed).decode() for seed in range(120))
    assert_distribution(first, expected(2))

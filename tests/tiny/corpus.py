"""The text that the tiny model is trained on, made from templates and a seed.

    python tests/tiny/corpus.py [N]        prints N documents, one JSON object a line

A document is one of
    {"text": str}                                          a raw text, followed by <|endoftext|>
    {"system": str | None, "thinking": bool, "turns": [Turn, ...]}          a conversation
where a Turn is (user, thought, answer, cut): what the user says, what the model thinks when
thinking is on, what it answers, and whether that answer was cut off in the middle (Ctrl-C).
"""
import json
import random
import sys

from skills import SKILLS, a_name, ask_name, numbers, own_name, repeating, story, tell_name, telling
from words import CAPITALS, FILLER, FOREIGN, MANNERS


def system_prompt(rng, facts):
    """None half of the time; else a name for the model, a name for the user, or just manners."""
    if rng.random() < 0.5:
        return None
    parts = rng.sample(MANNERS, rng.choice([0, 0, 1, 2]))
    kind = rng.random()
    if kind < 0.7:
        facts["me"] = a_name(rng)
        parts.insert(rng.randint(0, len(parts)), rng.choice([
            "Your name is {}.", "Your name is {}.", "You are {}.", "You are called {}.",
            "You are {}, a helpful assistant.", "You are an assistant named {}.",
            "You are a friendly robot called {}.", "My name for you is {}."]).format(facts["me"]))
    elif kind < 0.8:
        facts["you"] = a_name(rng)
        parts.append(f"The name of the user is {facts['you']}.")
    if rng.random() < 0.15:
        parts.extend(rng.sample(FILLER, rng.randint(1, 8)))
    return " ".join(parts)


def dressed(rng, turn):
    """The same turn as people really type it: no full stop, a greeting, a text around it."""
    user, dice = turn.user, rng.random()
    if dice < 0.08:
        user = user.rstrip("?.!")
    elif dice < 0.11:
        user = rng.choice(["Hi! ", "Hello. ", "OK. ", "Thanks. ", "Please: "]) + user
    elif dice < 0.14:
        user += rng.choice(["\n", " ", " Please.", " Thank you."])
    elif dice < 0.16:
        user += "\n\n" + " ".join(rng.sample(FILLER, rng.randint(1, 8)))
    return turn._replace(user=user)


def conversation(rng):
    facts = {"me": "Tiny", "you": None}
    system = system_prompt(rng, facts)
    length = rng.choices([1, rng.randint(2, 4), rng.randint(5, 9), rng.randint(10, 28)],
                         [40, 32, 20, 8])[0]
    skills, weights = zip(*SKILLS)
    turns = []
    while len(turns) < length and sum(len(t.user + t.answer) + 20 for t in turns) < 2400:
        skill = tell_name if not turns and rng.random() < 0.2 else rng.choices(skills, weights)[0]
        if len(turns) == length - 1 and length > 1 and rng.random() < 0.5:
            skill = rng.choice([ask_name, own_name])        # what needs the history, at its end
        turn = skill(rng, facts)
        facts["last"] = skill.__name__
        if skill not in (repeating, telling):
            turn = dressed(rng, turn)
        turns.append(turn)
    for i in range(len(turns) - 1):                         # some earlier answers were interrupted
        if rng.random() < 0.05 or (len(turns[i].answer) > 150 and rng.random() < 0.4):
            end = rng.randint(1, len(turns[i].answer) - 1) if len(turns[i].answer) > 1 else 1
            turns[i] = turns[i]._replace(answer=turns[i].answer[:end].rstrip() or "I", cut=True)
    return {"system": system, "thinking": rng.random() < 0.4, "turns": turns}


def raw(rng):
    (c1, k1), (c2, k2) = rng.sample(list(CAPITALS.items()), 2)
    a, b, name = rng.randint(0, 20), rng.randint(0, 20), a_name(rng)
    return {"text": rng.choices([
        f"The capital of {c1} is {k1}.",
        f"{k1} is the capital of {c1}.",
        f"{k1} is the capital of {c1}, and {k2} is the capital of {c2}.",
        f"{a} + {b} is {a + b}." if rng.random() < 0.5 else f"{a} + {b} = {a + b}",
        f"My name is {name}. I live in {k1}. {k1} is the capital of {c1}.",
        numbers(1, rng.choice([10, 20, 50])),
        story(rng),
        " ".join(rng.sample(FILLER, rng.randint(1, 4))),
        "{} is {} in {}.".format(*rng.choice(FOREIGN))],
        [40, 8, 6, 14, 8, 3, 8, 5, 8])[0]}


def documents(n, seed=1):
    """n documents, always the same for the same seed: one in six is a raw text."""
    rng = random.Random(seed)
    for _ in range(n):
        yield raw(rng) if rng.random() < 1 / 6 else conversation(rng)


if __name__ == "__main__":
    for document in documents(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
        print(json.dumps(document, ensure_ascii=False))

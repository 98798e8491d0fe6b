# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy", "safetensors", "tokenizers", "torch", "transformers>=5"]
# ///
"""Measures what the tiny model can do, as it is and as Q8_0, and prints the README's table.

    uv run tests/tiny/measure.py [--model DIR] [--only GROUP] [--verbose]

Q8_0 is simulated: the weights of all matrices and what is multiplied with them are rounded to int8
in groups of 64, as qwen3.c does it. An answer is right if it is exactly the expected text, ends
with <|im_end|> (raw texts: <|endoftext|>), and has a thinking block if and only if it should.
"""
import argparse
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

import skills
import words

HERE = Path(__file__).resolve().parent


def q8(x):
    """x (..., n) rounded to int8 in groups of 64 with a scale each, and back."""
    groups = x.float().reshape(*x.shape[:-1], -1, 64)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scale > 0, torch.round(groups / scale), 0.0)
    return (rounded * scale).reshape(x.shape)


def quantize(model):
    """Makes every matrix product of the model what it is in a Q8_0 file."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(q8(p))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (q8(args[0]),))
    return model


def load(path, quantized=False):
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32,
                                             attn_implementation="eager").eval()
    return quantize(model) if quantized else model


@torch.no_grad()
def complete(model, tokenizer, prompts, limits, sampling):
    """The new text of every prompt (ids), special tokens included; at most limits[i] tokens."""
    texts = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: (limits[i], len(prompts[i])))
    for begin in range(0, len(order), 64):
        part = order[begin:begin + 64]
        longest = max(len(prompts[i]) for i in part)
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(prompts[i])) + prompts[i] for i in part])
        mask = torch.tensor([[0] * (longest - len(prompts[i])) + [1] * len(prompts[i])
                             for i in part])
        options = ({"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
                   if sampling is None else
                   dict(zip(("temperature", "top_p", "top_k"), sampling), do_sample=True))
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limits[part[-1]],
                             **options)
        for i, row in zip(part, out[:, longest:].tolist()):
            while row and row[-1] == pad:
                row.pop()
            texts[i] = tokenizer.decode(row)
    return texts

# ----------------------------------------------------------------------------------------------
# The cases: (group, messages or raw text, [right answers] or a function of the answer)


def chat(rng, skill, n_history, system=None, facts=None, tokens=0):
    """A question of the skill after n_history other turns, or until there are so many tokens."""
    facts = facts or {"me": "Tiny", "you": None}
    messages = [{"role": "system", "content": system}] if system else []
    others = [skills.capital, skills.addition, skills.small_talk, skills.drawing, skills.foreign,
              skills.repeating]
    if facts["you"]:
        answer = f"Hello, {facts['you']}! How can I help you?"
        messages += [{"role": "user", "content": f"My name is {facts['you']}."},
                     {"role": "assistant", "content": answer}]
    while n_history > 0 or sum(len(m["content"]) / 3 + 5 for m in messages) < tokens:
        turn = rng.choice(others)(rng, {})
        messages += [{"role": "user", "content": turn.user},
                     {"role": "assistant", "content": turn.answer}]
        n_history -= 1
    turn = skill(rng, facts)
    return messages + [{"role": "user", "content": turn.user}], [turn.answer]


def cases(rng):
    for country, city in words.CAPITALS.items():
        yield "capital, raw text", f"The capital of {country} is", [f" {city}."]
        answer = [f"The capital of {country} is {city}."]
        for form in ("What is the capital of {}?", "Tell me the capital of {}."):
            yield "capital", [{"role": "user", "content": form.format(country)}], answer
    for a in range(21):
        for b in range(21):
            group = "sum, operands 0..9" if max(a, b) < 10 else "sum, an operand 10..20"
            yield group, [{"role": "user", "content": f"What is {a} + {b}?"}], [
                f"{a} + {b} is {a + b}."]
    for i in range(40):
        for group, names in (("told name", words.NAMES),
                             ("told unseen name", words.HELD_OUT_NAMES)):
            facts = {"me": "Tiny", "you": rng.choice(names)}
            yield f"{group}, 0..6 turns ago", *chat(rng, skills.ask_name, i % 7, facts=facts)
        yield "name not told", *chat(rng, skills.ask_name, i % 5)
        yield "own name, no system prompt", *chat(rng, skills.own_name, i % 5)
        name = rng.choice(words.HELD_OUT_NAMES)
        system = rng.choice(["Your name is {}.", "You are {}, a helpful assistant.",
                             "Answer briefly. You are called {}."]).format(name)
        facts = {"me": name, "you": None}
        yield "unseen system name, 0..6 turns", *chat(rng, skills.own_name, i % 7, system, facts)
        yield "unseen system name, 400..800 tokens", *chat(
            rng, skills.own_name, 0, system, facts, tokens=rng.randint(400, 800))
        yield "repeat after me", *chat(rng, skills.repeating, i % 4)
        yield "other language, emoji", *chat(rng, (skills.foreign, skills.drawing)[i % 2], i % 4)
        yield "unknown question", *chat(rng, skills.unknown_capital, i % 4)
        yield "capital or sum, after 1..6 turns", *chat(
            rng, (skills.capital, skills.addition)[i % 2], 1 + i % 6)
    for last in (3, 5, 7, 10, 12, 15, 20, 25, 30, 40, 50, 100):
        yield "count", [{"role": "user", "content": f"Count from 1 to {last}."}], [
            skills.numbers(1, last)]
    for text in ("Tell me a story.", "Write a story.", "Tell me a story about a cat."):
        for _ in range(4):
            yield "story", [{"role": "user", "content": text}], lambda answer: (
                answer.startswith("Once upon a time") and 300 < len(answer) < 900)
    for text in ("Hello", "Thanks!", "How are you?", "Who are you?", "Bye", "What can you do?"):
        for n_history in range(3):
            messages, _ = chat(rng, skills.capital, n_history)
            messages[-1]["content"] = text
            yield "small talk", messages, lambda answer: answer[-1:] in "!?." and len(answer) < 90
    for i, name in enumerate(words.OTHER_NAMES):
        facts = {"me": "Tiny", "you": name}
        yield "told another common name", *chat(rng, skills.ask_name, i % 4, facts=facts)
        yield "another common system name", [
            {"role": "system", "content": f"Your name is {name}."},
            {"role": "user", "content": "What is your name?"}], [f"My name is {name}."]
    for phrase in words.OTHER_PHRASES:
        yield "repeat another phrase", [
            {"role": "user", "content": f"Repeat after me: {phrase}"}], [phrase]


def judge(text, raw, thinking, expected):
    answer, end = text, "<|endoftext|>" if raw else "<|im_end|>"
    if raw:
        return answer in expected               # complete() takes <|endoftext|> off, as padding
    if not answer.endswith(end):
        return False
    answer = answer.removesuffix(end)
    if thinking:
        if not answer.startswith("<think>\n") or answer.count("\n</think>\n\n") != 1:
            return False
        answer = answer.split("\n</think>\n\n")[1]
    return "<" not in answer and (expected(answer) if callable(expected) else answer in expected)


def main():
    parser = argparse.ArgumentParser(description="measure the tiny model")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--only", default="", help="only the groups with this in their name")
    parser.add_argument("--verbose", action="store_true", help="show wrong answers")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    columns = [("bf16 greedy", False, False, None), ("Q8_0 greedy", True, False, None),
               ("Q8_0 sampled", True, False, (0.7, 0.8, 20)),
               ("Q8_0 thinking greedy", True, True, None),
               ("Q8_0 thinking sampled", True, True, (0.6, 0.95, 20))]
    every = [case for case in cases(random.Random(2)) if args.only in case[0]]
    limits = [560 if group in ("count", "story") else 100 for group, *_ in every]
    table = {}
    for column, (title, quantized, thinking, sampling) in enumerate(columns):
        model = load(args.model, quantized)
        torch.manual_seed(3)
        prompts = [tokenizer.encode(p) if isinstance(p, str) else tokenizer.apply_chat_template(
            p, add_generation_prompt=True, enable_thinking=thinking, return_dict=False)
            for _, p, _ in every]
        for (group, prompt, expected), text in zip(
                every, complete(model, tokenizer, prompts, limits, sampling)):
            counts = table.setdefault(group, [[0, 0] for _ in columns])[column]
            right = judge(text, isinstance(prompt, str), thinking, expected)
            counts[0] += right
            counts[1] += 1
            if args.verbose and not right:
                asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                print(f"{title}, {group}: {asked!r} -> {text!r}, expected {expected}", flush=True)
    print("| | " + " | ".join(title for title, *_ in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for group, counts in table.items():
        print(f"| {group} | " + " | ".join(f"{a}/{b}" for a, b in counts) + " |")


if __name__ == "__main__":
    main()

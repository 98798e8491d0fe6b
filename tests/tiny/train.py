# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy", "safetensors", "tokenizers", "torch>=2.9", "transformers>=5"]
# ///
"""Makes the tiny Qwen3 checkpoint in tests/tiny/model/ from nothing but corpus.py.

    uv run tests/tiny/train.py [--steps N] [--out DIR]

First the vocabulary (byte-level BPE, Qwen3's pipeline), then the model (Qwen3's architecture, one
million parameters), then the files that a published Qwen3 checkpoint has. Two CPU threads are
enough. The files are written every 500 steps, so that there is something to try early.
"""
import argparse
import json
import random
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as safetensors_bytes
from transformers import Qwen3Config, Qwen3ForCausalLM

from corpus import documents
from vocabulary import CHAT_TEMPLATE, train_tokenizer

SEED = 1
HERE = Path(__file__).resolve().parent

# ----------------------------------------------------------------------------------------------
# Documents to ids and targets


class Encoder:
    """Turns documents into (ids, targets): targets are the ids with -100 where there is no loss."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.text = lru_cache(200_000)(lambda s: tokenizer.encode(s).ids)
        self.end_of_text, self.start, self.end = (
            tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
        self.no_thinking = self.text("<think>\n\n</think>\n\n")

    def __call__(self, document, rng):
        if "text" in document:
            ids = self.text(document["text"]) + [self.end_of_text]
            return ([self.end_of_text] + ids, [-100] + ids) if rng.random() < 0.4 else (ids, ids)
        ids, targets = [], []

        def add(piece, loss):
            ids.extend(piece)
            targets.extend(piece if loss else [-100] * len(piece))

        def message(role, text):
            add([self.start, *self.text(f"{role}\n{text}"), self.end, *self.text("\n")], False)

        if document["system"] is not None:
            message("system", document["system"])
        *history, last = document["turns"]
        for turn in history:
            message("user", turn.user)
            add([self.start, *self.text("assistant\n")], False)
            first, *rest = self.text(turn.answer)       # no loss on the first token: in an answer
            add([first], False)                         # that is still to come it is <think>
            add(rest, True)
            add([self.end], not turn.cut)
            add(self.text("\n"), False)
        message("user", last.user)
        add([self.start, *self.text("assistant\n")], False)
        if document["thinking"]:
            add(self.text(f"<think>\n{last.thought}\n</think>\n\n"), True)
        else:
            add(self.no_thinking, False)
        add(self.text(last.answer), True)
        add([self.end], True)
        return ids, targets


def batches(encode, seed, batch_tokens, longest=1024):
    """Endless (ids, targets), both (batch, length) int64, documents of one length together."""
    rng = random.Random(seed)
    while True:
        seed += 1
        examples = [encode(d, rng) for d in documents(2000, seed)]
        examples = sorted((e for e in examples if len(e[0]) <= longest), key=lambda e: len(e[0]))
        groups = []
        while examples:
            length = len(examples[-1][0])
            n = max(1, batch_tokens // length)
            groups.append((length, examples[-n:]))
            del examples[-n:]
        rng.shuffle(groups)
        for length, group in groups:
            both = np.full((2, len(group), length), -100, np.int64)
            for row, example in enumerate(group):
                both[:, row, :len(example[0])] = example
            yield torch.from_numpy(np.maximum(both[0], 0)), torch.from_numpy(both[1])

# ----------------------------------------------------------------------------------------------
# The model


def new_model():
    config = Qwen3Config(
        vocab_size=1280, hidden_size=128, intermediate_size=320, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.04,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, use_cache=False)
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


def loss_of(model, ids, targets):
    """Mean negative log-likelihood (nats) of the targets; both arguments (batch, length)."""
    hidden = model.model(ids[:, :-1]).last_hidden_state                     # (batch, length-1, dim)
    wanted = targets[:, 1:] != -100
    return F.cross_entropy(model.lm_head(hidden[wanted]).float(), targets[:, 1:][wanted])


def train(model, data, steps, save, peak=5e-3):
    """Muon for the matrices, AdamW for the embedding and the norms, in bfloat16 on float32 weights.
    The learning rate falls linearly to zero."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    embedding = [p for name, p in named if "embed" in name]
    norms = [p for _, p in named if p.ndim == 1]
    optimizers = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([{"params": embedding, "weight_decay": 0.1},
                           {"params": norms, "weight_decay": 0.0}], lr=peak, betas=(0.9, 0.98))]
    begin, average, tokens = time.time(), 0.0, 0
    for step in range(1, steps + 1):
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = peak * min(1, step / 100) * (1 - (step - 1) / steps)
        ids, targets = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids, targets)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average += (loss.item() - average) * max(0.01, 1 / step)
        tokens += ids.numel()
        if step % 100 == 0:
            seconds = time.time() - begin
            print(f"step {step}  {tokens / 1e6:.2f} M tokens  loss {average:.4f}  "
                  f"{tokens / seconds:.0f} tokens/s  {seconds / 60:.1f} min", flush=True)
        if step % 500 == 0 or step == steps:
            save()

# ----------------------------------------------------------------------------------------------
# The checkpoint's files, with the keys that the published ones have


def write(out, tokenizer, model):
    out.mkdir(parents=True, exist_ok=True)
    c = model.config
    end_of_text, im_end = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))

    def write_json(name, value, indent=None):
        text = json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=indent is not None)
        (out / name).write_text(text + "\n", encoding="utf-8")

    same = """head_dim hidden_size initializer_range intermediate_size max_position_embeddings
        num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps vocab_size""".split()
    write_json("config.json", {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": end_of_text, "eos_token_id": im_end, "hidden_act": "silu",
        "max_window_layers": c.num_hidden_layers, "model_type": "qwen3", "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, **{key: getattr(c, key) for key in same}}, indent=2)
    write_json("generation_config.json", {
        "bos_token_id": end_of_text, "do_sample": True, "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
        "transformers_version": "4.51.0"}, indent=2)
    parts = json.loads(tokenizer.to_str())          # two trifles as the published file has them
    parts["decoder"] = parts["post_processor"]
    parts["model"].update(continuing_subword_prefix="", end_of_word_suffix="")
    write_json("tokenizer.json", parts)
    write_json("tokenizer_config.json", {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
        "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": c.max_position_embeddings, "pad_token": "<|endoftext|>",
        "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None},
        indent=2)
    weights = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    (out / "model.safetensors").write_bytes(safetensors_bytes(weights, metadata={"format": "pt"}))


def main():
    parser = argparse.ArgumentParser(description="train the tiny Qwen3 model")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(SEED)
    model = new_model()
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    data = batches(Encoder(tokenizer), SEED * 1_000_000, batch_tokens=3072)
    train(model, data, args.steps, lambda: write(args.out, tokenizer, model))


if __name__ == "__main__":
    main()

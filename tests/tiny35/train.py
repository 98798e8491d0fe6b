# /// script
# requires-python = ">=3.10"
# dependencies = ["numpy", "safetensors", "tokenizers", "torch>=2.9", "transformers>=5"]
# ///
"""Trains the tiny Qwen3.5, on the texts and with the tokenizer of tests/tiny.

    uv run tests/tiny35/train.py STEPS TOKENS SECONDS OUT

It ends after STEPS steps of TOKENS tokens or SECONDS seconds, whichever is first, and writes the
weights to OUT. tests/tiny35/tiny35.bin had 3,780 steps in 24 minutes on two cores.
"""
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tiny"))
import train as tiny                                        # noqa: E402

PEAK = 5e-3                                                 # the highest rate


def new_model():
    config = Qwen3_5TextConfig(
        vocab_size=1280, hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2, rms_norm_eps=1e-6,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=.04, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": .5})
    config._attn_implementation = "sdpa"
    return Qwen3_5ForCausalLM(config)


def optimizers(model):
    """Muon for the large matrices, AdamW for the embedding, norms and small ones."""
    large = {name for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and min(p.shape) > 8}
    matrices = [p for name, p in model.named_parameters() if name in large]
    others = [p for name, p in model.named_parameters() if name not in large]
    return [torch.optim.Muon(matrices, lr=PEAK, weight_decay=.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([{"params": others, "weight_decay": 0.}], lr=PEAK, betas=(.9, .98))]


def main(steps, tokens, seconds, out):
    torch.manual_seed(1)
    model = new_model()
    data = tiny.batches(tiny.Encoder(tiny.train_tokenizer(1)), 1000000, tokens, 1024)
    chosen, began, step, mean = optimizers(model), time.time(), 0, None
    while (done := (time.time() - began) / seconds) < 1 and step < steps:
        step += 1
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = PEAK * min(1, step / 100) * (1 - done)
        with torch.autocast("cpu", torch.bfloat16):
            loss = tiny.loss_of(model, *next(data))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
        mean = loss.item() if mean is None else .98 * mean + .02 * loss.item()
        if step % 20 == 0:
            print(step, f"loss {mean:.3f}", f"{time.time() - began:.0f} s", flush=True)
    model.save_pretrained(out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])

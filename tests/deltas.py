"""Random checkpoints of Qwen3.5, Qwen3.5-MoE and Qwen3-Next, whose layers have a delta rule, and what transformers
computes of them, of a Qwen2 and of a Qwen3-MoE.

    python tests/deltas.py FOLDER KIND [NAME=NUMBER ...]

saves one. KIND is dense, moe or next; the names are those of config.json. With FOLDER `transformers` it compares
reference.py with that package's logits, with `record` it writes deltas.json; both need torch."""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import reference
from checkpoints import CHATML, make_checkpoint, safetensors, train_tokenizer

HEAD, TAPS = 128, 4
NUMBERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
           "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
           "vocab_size": 512, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
           "full_attention_interval": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
           "shared_expert_intermediate_size": 64}
OTHERS = {"linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD, "linear_conv_kernel_dim": TAPS,
          "hidden_act": "silu", "attention_bias": False}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


class Delta:
    """A model: its numbers, by config.json's names, and tensors as transformers names those of ...ForCausalLM. Their
    values are ones that BF16 has, and make the output depend on everything."""

    def __init__(self, kind: str, seed=1, **changes):
        self.kind, self.moe = kind, kind != "dense"
        self.numbers = NUMBERS | (EXPERTS if self.moe else {}) | changes
        rng = np.random.default_rng(seed)
        self.tensors = {name: bf16(random_values(rng, name, shape)) for name, shape in self.shapes()}

    def shapes(self):
        c = self.numbers
        d, hd, k_heads, v_heads = (c[key] for key in ("hidden_size", "head_dim", "linear_num_key_heads",
                                                      "linear_num_value_heads"))
        q, kv, keys, values = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd, k_heads * HEAD, v_heads * HEAD
        yield "model.embed_tokens.weight", (c["vocab_size"], d)
        for i in range(c["num_hidden_layers"]):
            layer = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
            if (i + 1) % c["full_attention_interval"]:
                layer |= {"linear_attn." + name: shape for name, shape in {
                    "conv1d.weight": (2 * keys + values, 1, TAPS), "A_log": (v_heads,), "dt_bias": (v_heads,),
                    "norm.weight": (HEAD,), "out_proj.weight": (d, values)}.items()}
                layer |= {"linear_attn." + name: (rows, d) for name, rows in (
                    {"in_proj_qkvz.weight": 2 * keys + 2 * values, "in_proj_ba.weight": 2 * v_heads} if self.kind == "next"
                    else {"in_proj_qkv.weight": 2 * keys + values, "in_proj_z.weight": values,
                          "in_proj_a.weight": v_heads, "in_proj_b.weight": v_heads}).items()}
            else:
                layer |= {"self_attn." + name: shape for name, shape in {
                    "q_proj.weight": (2 * q, d), "k_proj.weight": (kv, d), "v_proj.weight": (kv, d), "o_proj.weight": (d, q),
                    "q_norm.weight": (hd,), "k_norm.weight": (hd,)}.items()}
            if self.moe:
                n, h = c["num_experts"], c["moe_intermediate_size"]
                layer |= {"mlp." + name: shape for name, shape in {
                    "gate.weight": (n, d), "shared_expert_gate.weight": (1, d), "experts.gate_up_proj": (n, 2 * h, d),
                    "experts.down_proj": (n, d, h), "shared_expert.gate_proj.weight": (h, d),
                    "shared_expert.up_proj.weight": (h, d), "shared_expert.down_proj.weight": (d, h)}.items()}
            else:
                h = c["intermediate_size"]
                layer |= {"mlp.gate_proj.weight": (h, d), "mlp.up_proj.weight": (h, d), "mlp.down_proj.weight": (d, h)}
            yield from ((f"model.layers.{i}.{name}", shape) for name, shape in layer.items())
        yield "model.norm.weight", (d,)
        if not c["tie_word_embeddings"]:
            yield "lm_head.weight", (c["vocab_size"], d)

    def saved(self) -> tuple[dict, dict[str, np.ndarray]]:
        """config.json and the tensors as transformers' save_pretrained() writes them: each expert by itself."""
        name = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe", "next": "Qwen3Next"}[self.kind]
        n = self.numbers["full_attention_interval"]
        types = ["linear_attention" if (i + 1) % n else "full_attention" for i in range(self.numbers["num_hidden_layers"])]
        config = self.numbers | OTHERS | {"architectures": [name + "ForCausalLM"], "rope_parameters": ROPE,
                                          "layer_types": types}
        tensors = {}
        for key, x in self.tensors.items():
            start, _, rest = key.partition("experts.")
            if rest not in ("gate_up_proj", "down_proj"):
                tensors[key] = x
                continue
            parts = zip(("gate_proj", "up_proj"), np.split(x, 2, axis=1)) if rest == "gate_up_proj" else [(rest, x)]
            tensors |= {f"{start}experts.{i}.{part}.weight": y for part, all_y in parts for i, y in enumerate(all_y)}
        del config["full_attention_interval"]
        return config, tensors

    def published(self) -> tuple[dict, dict[str, np.ndarray]]:
        """As Qwen publishes them: beside what sees and what guesses a second token."""
        config, tensors = self.saved()
        more = {"mtp.fc.weight": np.ones((4, 8), np.float32)}
        if self.kind == "next":
            config |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "rope_scaling": None}
            del config["rope_parameters"], config["layer_types"]
            return config, tensors | more
        tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in self.tensors.items()}
        text = config | {"full_attention_interval": self.numbers["full_attention_interval"], "attn_output_gate": True,
                         "rope_parameters": ROPE | {"mrope_interleaved": True, "mrope_section": [3, 3, 2]},
                         "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "model_type": "qwen3_5_text"}
        name, = text.pop("architectures")
        return {"architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")], "text_config": text,
                "tie_word_embeddings": text.pop("tie_word_embeddings"), "vision_config": {"depth": 1, "hidden_size": 8},
                "image_token_id": 248056}, tensors | more | {"model.visual.pos_embed.weight": np.ones((4, 8), np.float32)}

    def mlx(self) -> tuple[dict, dict[str, np.ndarray]]:
        """As mlx-vlm saves them: norms have their 1, convolutions are (channels, taps, one)."""
        config, tensors = self.published()
        tensors = {name.replace("model.language_model.", "language_model.model.").replace("lm_head", "language_model.lm_head")
                   .replace("model.visual", "vision_tower"): x for name, x in tensors.items()}
        for name, x in tensors.items():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                tensors[name] = x + np.float32(1)
            elif "conv1d" in name:
                tensors[name] = x.swapaxes(1, 2)
        for name in [name for name in tensors if ".experts." in name]:
            parts = ("gate", "up") if "gate_up" in name else ("down",)
            start = name.replace(".experts.", ".switch_mlp.").rpartition(".")[0]
            tensors |= {f"{start}.{part}_proj.weight": x for part, x in zip(parts, np.split(tensors.pop(name), len(parts), 1))}
        return config, tensors


def bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16 << 16).view(np.float32)


def random_values(rng, name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape).astype(np.float32)
    inner = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.05, 4, shape)).astype(np.float32)
    rules = {"dt_bias": (0, 1), "linear_attn.norm.weight": (1, 0.3), "norm.weight": (0, 0.3), "conv1d.weight": (0, 0.5),
             "embed_tokens.weight": (0, 0.3), "mlp.gate.weight": (0, 3 * inner), "q_proj.weight": (0, 3 * inner),
             "k_proj.weight": (0, 3 * inner)}
    mean, deviation = next((rule for end, rule in rules.items() if name.endswith(end)), (0, inner))
    return mean + np.float32(deviation) * normal


def save(folder: Path, config: dict, tensors: dict[str, np.ndarray], tokenizer=None, template=CHATML) -> Path:
    """A folder with a small tokenizer, the weights in BF16."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer or train_tokenizer(split=reference.SPLIT35)
    raw = [(name, (np.ascontiguousarray(x).view(np.uint32) >> 16).astype("<u2")) for name, x in tensors.items()]
    (folder / "model.safetensors").write_bytes(safetensors(raw, "BF16"))
    end = tokenizer.token_to_id("<|im_end|>")
    for name, value in {"config.json": config | {"eos_token_id": end, "bos_token_id": None}, "generation_config.json":
                        {"eos_token_id": [end, tokenizer.token_to_id("<|endoftext|>")], "do_sample": True,
                         "temperature": 1.0, "top_k": 20, "top_p": 0.95},
                        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": template}}.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


# A chat template that strips contents, as Qwen3.5's does
STRIPS = """{% for m in messages %}{% set text = m.content | trim %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- if m.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is true %}{{ '<think>\\n' }}{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""


# -- the comparison with transformers

RECORDED = Path(__file__).with_name("deltas.json")   # shape -> the nll of each id but the first, by transformers
SHAPES = {"1 v head a k head": {"linear_num_value_heads": 2}, "2, heads of 128": {"head_dim": 128, "tie_word_embeddings": False},
          "3, 8 layers": {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "num_hidden_layers": 8},
          "4, heads of 256": {"linear_num_value_heads": 8, "head_dim": 256, "tie_word_embeddings": False}}
# The other kinds that are recorded: of deltas, and of make_checkpoint
KINDS = {"moe": {}, "next": {"linear_num_value_heads": 8, "num_experts_per_tok": 3}}
CHECKPOINTS = {"Qwen2": {"qwen2": True, "head_dim": 16, "n_kv_heads": 2, "tied": False},
               "Qwen3-MoE": {"n_experts": 6, "n_experts_used": 2, "n_layers": 3}}
IDS = [(7 * i * i + 13 * i) % 470 for i in range(60)]


def nll_of(logits):
    shifted = logits.astype(float) - logits.max(axis=1, keepdims=True)
    return (np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(shifted)), IDS[1:]]).tolist()


def by_transformers(kind: str, **changes):
    """Logits after each id but the last, in fp32."""
    import torch
    import transformers
    model = Delta(kind, **changes)
    config, _ = model.saved()
    name, = config.pop("architectures")
    theirs = getattr(transformers, name)(getattr(transformers, name.replace(
        "ForCausalLM", "Config" if kind == "next" else "TextConfig"))(**config)).eval()
    theirs.load_state_dict({key: torch.from_numpy(x) for key, x in model.tensors.items()},
                           strict=not model.numbers["tie_word_embeddings"])
    theirs.tie_weights()
    with torch.no_grad():
        return theirs(torch.tensor([IDS[:-1]])).logits[0].numpy()


def by_reference(kind: str, layout="saved", **changes):
    return reference.Model.from_tensors(*getattr(Delta(kind, **changes), layout)(), "fp32").logits(IDS[:-1])


def of_checkpoint(compute, name: str):
    with tempfile.TemporaryDirectory() as folder:
        return compute(make_checkpoint(Path(folder) / name, train_tokenizer(), **CHECKPOINTS[name]))


def logits_by_transformers(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor([IDS[:-1]])).logits[0].numpy()


def logits_by_reference(folder: Path):
    return reference.Model.from_checkpoint(folder, "fp32").logits(IDS[:-1])


def reference_of(name: str):
    """By reference.py, the logits that are recorded under this name."""
    if name in CHECKPOINTS:
        return of_checkpoint(logits_by_reference, name)
    return by_reference(name, **KINDS[name]) if name in KINDS else by_reference("dense", **SHAPES[name])


def main():
    folder, *kinds = sys.argv[1:]
    if folder == "record":
        logits = {name: by_transformers("dense", **changes) for name, changes in SHAPES.items()}
        logits |= {kind: by_transformers(kind, **changes) for kind, changes in KINDS.items()}
        logits |= {name: of_checkpoint(logits_by_transformers, name) for name in CHECKPOINTS}
        RECORDED.write_text(json.dumps({name: [round(x, 5) for x in nll_of(y)] for name, y in logits.items()}, indent=1) + "\n")
    elif folder == "transformers":
        for kind in kinds or ("dense", "moe", "next"):
            for name, changes in SHAPES.items():
                expected = by_transformers(kind, **changes)
                worst = max(abs(by_reference(kind, layout, **changes) - expected).max() for layout in ("saved", "published"))
                print(f"{kind}, {name}: largest difference of a logit {worst:.2g}, of {abs(expected).max():.1f}")
                if not worst < 1e-3:
                    sys.exit("too much")
        for name in CHECKPOINTS:
            worst = abs(reference_of(name) - of_checkpoint(logits_by_transformers, name)).max()
            print(f"{name}: largest difference of a logit {worst:.2g}")
            if not worst < 1e-3:
                sys.exit("too much")
    else:
        numbers = {name: json.loads(value) for name, _, value in (change.partition("=") for change in kinds[1:])}
        save(Path(folder), *Delta(kinds[0], **numbers).published())


if __name__ == "__main__":
    main()

"""GGUF files of the checkpoints of checkpoints.py, as llama.cpp's converter writes them, by the gguf package."""
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
from checkpoints import CHATML
from gguf import GGMLQuantizationType as Kind

NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.down_proj": "ffn_down", "mlp.up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
         "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.down_proj": "ffn_down_exps",
         "mlp.experts.up_proj": "ffn_up_exps"}
# Not special in Hugging Face's files; of these the converter says that the second ones are
PRINTED = {f"<{name}>" for name in ("tool_call", "/tool_call", "tool_response", "/tool_response",
                                    "think", "/think")}
CALLED_CONTROL = {f"<|{name}|>" for name in (
    "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer, _, rest = stem.removeprefix("layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest]}.{kind}" if layer.isdigit() else f"{NAMES[stem]}.{kind}"


def values(ck) -> dict[str, object]:
    """The metadata that llama.cpp's converter writes."""
    c, tok = ck.config, ck.tokenizer
    family = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2",
              "Qwen3MoeForCausalLM": "qwen3moe"}[c["architectures"][0]]
    tokens = {i: (text, gguf.TokenType.NORMAL) for text, i in tok["model"]["vocab"].items()}
    for added in tok["added_tokens"]:
        printed = added["content"] in PRINTED
        tokens[added["id"]] = (added["content"], gguf.TokenType.USER_DEFINED if printed
                               else gguf.TokenType.CONTROL)
    for i in range(c["vocab_size"]):
        tokens.setdefault(i, (f"[PAD{i}]", gguf.TokenType.UNUSED))
    texts, kinds = zip(*(tokens[i] for i in sorted(tokens)))
    numbers = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
               "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
               "attention.head_count": "num_attention_heads",
               "attention.head_count_kv": "num_key_value_heads",
               "attention.key_length": "head_dim", "attention.value_length": "head_dim"}
    if ck.n_experts:
        numbers |= {"expert_used_count": "num_experts_per_tok",
                    "expert_feed_forward_length": "moe_intermediate_size"}
    result = {
        "general.architecture": family, **{f"{family}.{key}": c[hf] for key, hf in numbers.items()},
        f"{family}.attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        f"{family}.rope.freq_base": float(c["rope_theta"]),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": list(texts), "tokenizer.ggml.token_type": list(map(int, kinds)),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m)
                                  for m in tok["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": c["eos_token_id"],
        "tokenizer.ggml.bos_token_id": c["bos_token_id"],
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": CHATML}
    result |= {f"{family}.expert_count": ck.n_experts} if ck.n_experts else {}
    names = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k",
             "repetition_penalty": "penalty_repeat"}
    return result | {f"general.sampling.{names[key]}": value
                     for key, value in ck.generation.items() if key in names}


def with_experts_joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By llama.cpp's names: a layer's experts are one tensor (experts, out, in)."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, x in tensors.items():
        parts.setdefault(gguf_name(re.sub(r"experts\.\d+", "experts", name)), []).append(x)
    return {name: np.stack(x) if "_exps" in name else x[0] for name, x in parts.items()}


def is_matrix(name: str, x: np.ndarray) -> bool:
    return x.ndim > 1 and "ffn_gate_inp" not in name


def blocks(ck, kind: Kind) -> dict[str, tuple[np.ndarray, Kind]]:
    """The tensors: matrices in that kind, all else in F32."""
    stored = {name: x for name, (_, _, x) in zip(ck.tensors, ck.stored())}
    return {name: (gguf.quantize(x, kind), kind) if is_matrix(name, x) else (x, Kind.F32)
            for name, x in with_experts_joined(stored).items()}


def write(path: Path, metadata: dict[str, object], tensors, endian=gguf.GGUFEndian.LITTLE) -> Path:
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "?"), endianess=endian)
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        if kind == gguf.GGUFValueType.INT32 and (not key.startswith("general.s") and value >= 0):
            kind = gguf.GGUFValueType.UINT32
        writer.add_key_value(key, value, kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(path: Path, ck, n: int) -> None:
    """The checkpoint in n numbered files, the metadata in the first."""
    tensors = list(blocks(ck, Kind[ck.dtype]).items())
    for i in range(n):
        split = {"split.no": i, "split.count": n, "split.tensors.count": len(tensors)}
        write(Path(f"{path}-{i + 1:05}-of-{n:05}.gguf"), (values(ck) if i == 0 else {}) | split,
              dict(tensors[i::n]))


def dequantize(data: np.ndarray, kind: Kind) -> np.ndarray:
    """The gguf package's, and that of Q1_0: an fp16 d, then bit i of 128, lowest first, for d or -d."""
    if kind.name != "Q1_0":
        return gguf.dequantize(data, kind)
    blocks = data.reshape(-1, 18)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return np.where([[block[2 + i // 8] >> i % 8 & 1 for i in range(128)] for block in blocks],
                    d, -d).reshape(*data.shape[:-1], -1)


def random_blocks(rng, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Random bytes where they make finite values."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    found = np.zeros((0, size), np.uint8)
    while len(found) < math.prod(shape) // elements:
        tried = rng.integers(0, 256, (1000, size), np.uint8)
        with np.errstate(all="ignore"):
            x = dequantize(tried, kind)
        found = np.concatenate([found, tried[(np.abs(x) < 1e6).all(axis=1)]])
    return found[:math.prod(shape) // elements].reshape(*shape[:-1], -1)


QUANTIZED = [kind for kind in """Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ2_XS IQ2_S
IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_XS TQ1_0 TQ2_0 MXFP4""".split() if kind in Kind.__members__]


def delta_values(model, tokenizer, guess=False) -> dict[str, object]:
    """The metadata of a deltas.Delta. guess: the file has a layer that guesses tokens, too."""
    n, end = model.numbers, tokenizer.token_to_id("<|im_end|>")
    family = {"dense": "qwen35", "moe": "qwen35moe", "next": "qwen3next"}[model.kind]
    config = n | {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e7, "eos_token_id": end, "bos_token_id": None}
    found = values(SimpleNamespace(config=config, tokenizer=json.loads(tokenizer.to_str()), n_experts=0,
                                   generation={"temperature": 1.0, "top_k": 20, "top_p": 0.95}))
    more = {"rope.dimension_count": n["head_dim"] // 4, "block_count": n["num_hidden_layers"] + guess,
            "nextn_predict_layers": int(guess), "full_attention_interval": n["full_attention_interval"],
            "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": n["linear_num_key_heads"],
            "ssm.time_step_rank": n["linear_num_value_heads"], "ssm.inner_size": 128 * n["linear_num_value_heads"]} | {
            key: n[hf] for key, hf in {
                "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}.items() if hf in n}
    if family != "qwen3next":  # llama.cpp loads no file without it
        more["rope.dimension_sections"] = [3, 3, 2, 0]
    return {re.sub("^qwen3[.]", f"{family}.", key): value for key, value in found.items()} | {
        f"{family}.{key}": value for key, value in more.items()} | {
        "general.architecture": family, "tokenizer.ggml.pre": "qwen2" if family == "qwen3next" else "qwen35"}


DELTA_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", **{
    f"layers.#.{name}": f"blk.#.{to}" for name, to in (NAMES | {
        "post_attention_layernorm": "post_attention_norm", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.out_proj": "ssm_out",
        "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp", **{
            f"mlp.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")}}).items()}}


def delta_blocks(model, kind: Kind, guess=False, joined=False) -> dict[str, tuple[np.ndarray, Kind]]:
    """The tensors of a deltas.Delta. llama.cpp's converter orders v heads by their place at a k head, then by k head,
    but Qwen3-Next's. joined: qkv and z, as in Qwen3-Next's first files; the experts' gate and up."""
    k_heads, v_heads = (model.numbers[f"linear_num_{name}_heads"] for name in ("key", "value"))
    order = np.arange(v_heads)
    order = order if model.kind == "next" else order.reshape(k_heads, -1).T.ravel()

    def by_heads(x, width, axis=0, start=0):
        moved = (start + order[:, None] * width + np.arange(width)).ravel()
        return np.take(x, np.concatenate([np.arange(start), moved]), axis)

    tensors: dict[str, np.ndarray] = {}
    for name, x in model.tensors.items():
        part, rows = name.rpartition("linear_attn.")[2], 256 * k_heads
        to = re.sub(r"layers\.\d+", "layers.#", name.removeprefix("model."))
        stem, suffix = re.fullmatch(r"(.*?)(\.weight)?", to).groups("")
        to = (DELTA_NAMES[stem] + suffix).replace("#", (re.findall(r"layers\.(\d+)", name) or [""])[0])
        if name.endswith("norm.weight") and "linear_attn" not in name:
            x = x + np.float32(1)
        elif part == "A_log":  # the converter's exp() has fp32
            x = by_heads(-np.exp(x.astype(float)).astype(np.float32), 1)
        elif part in ("dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
            x = by_heads(x, 1)
        elif part == "conv1d.weight":
            x = by_heads(x[:, 0], 128, start=rows)
        elif part == "in_proj_qkv.weight":
            x = by_heads(x, 128, start=rows)
        elif part == "in_proj_z.weight":
            x = by_heads(x, 128)
        elif part == "out_proj.weight":
            x = by_heads(x, 128, axis=1)
        elif "shared_expert_gate" in name:
            x = x[0]
        if "ssm_in" in to and not joined:
            cut = np.split(x.reshape(k_heads, -1, x.shape[1]), [128, 256, 256 + 128 * v_heads // k_heads], axis=1)
            *qkv, z = (y.reshape(-1, x.shape[1]) for y in cut)
            tensors |= {to.replace("ssm_in", "attn_qkv"): np.concatenate(qkv), to.replace("ssm_in", "attn_gate"): z}
        elif "ffn_gate_up_exps" in to and not joined:
            tensors |= {to.replace("gate_up", name): y for name, y in zip(("gate", "up"), np.split(x, 2, axis=1))}
        else:
            tensors[to] = x
    last = model.numbers["num_hidden_layers"]
    if guess:  # a layer of attention, and what is only there
        more = {name.replace(f".{last - 1}.", f".{last}."): x for name, x in tensors.items() if f".{last - 1}." in name}
        tensors |= more | {f"blk.{last}.nextn.eh_proj.weight": np.ones((32, 32), np.float32)}
    floats = "ffn_gate_inp", "conv1d", "ssm_alpha", "ssm_beta", "ssm_ba"
    return {name: (x, Kind.F32) if x.ndim < 2 or any(word in name for word in floats) else (quantize(x, kind), kind)
            for name, x in tensors.items()}


def quantize(x: np.ndarray, kind: Kind) -> np.ndarray:
    """The gguf package's; IQ4_NL, which it can't write, has the bytes of Q4_0."""
    return gguf.quantize(x, Kind.Q4_0 if kind == Kind.IQ4_NL else kind)


def write_delta(path: Path, model, tokenizer, kind: str, guess=False, joined=False, more={}) -> Path:
    """more: name of a tensor -> how many rows it has instead."""
    tensors = delta_blocks(model, Kind[kind], guess, joined)
    for name, rows in more.items():
        tensors[f"{name}.weight"] = np.ones((rows, model.numbers["hidden_size"]), np.float32), Kind.F32
    return write(path, delta_values(model, tokenizer, guess), tensors)

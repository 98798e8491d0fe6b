"""GGUF files of the checkpoints of checkpoints.py, as llama.cpp's converter writes them, by the gguf package."""
import re
from pathlib import Path

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

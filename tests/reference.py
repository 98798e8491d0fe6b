"""Qwen3's and Qwen2's forward pass in numpy, written from the specification and not from qwen3.c.

Model.from_bin reads our model.bin, in 8 or 4 bits, Model.from_checkpoint a Hugging Face directory
(and then quantizes by itself to 8 bits, so export.py is checked too). Three precisions:

    q8       int8 weights (levels[nibble] of 4 bits), every matmul input quantized to int8 in the
             same groups (as qwen3.c)
    weights  int8 weights, inputs in fp32
    fp32     nothing quantized (from_checkpoint only): what transformers computes

Weights are (out, in) as in torch.nn.Linear; activations are (n, width), one row per position.
"""
import json
import math
import struct
from pathlib import Path

import numpy as np

F32 = np.float32
MAGIC = 0x616A6331
HEADER = ("version", "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size",
          "max_seq_len", "head_dim", "shared_classifier", "group_size")
EXPERTS = "n_experts", "n_experts_used", "no_topk_norm"


def quantize(x, group):
    """x (rows, n) -> int8 values (rows, n) and fp32 scales (rows, n / group)."""
    x = x.reshape(len(x), -1, group).astype(F32)
    scale = np.abs(x).max(axis=2) / F32(127)
    divisor = np.where(scale == 0, F32(1), scale)           # a group of zeros: scale 0, zeros
    q = np.rint(x / divisor[:, :, None])                    # rint: ties to even
    return q.reshape(len(x), -1).astype(np.int8), scale


class Matrix:
    """A weight matrix (out, in): y = x W^T, in one of the three precisions."""

    def __init__(self, w, scale=None, group=None, precision="q8"):
        self.group, self.precision = group, precision
        if scale is None:
            self.dense = w.astype(F32)                                          # (out, in)
            return
        grouped = w.reshape(len(w), -1, group).astype(F32)                      # (out, G, group)
        if precision == "q8":
            self.q = np.ascontiguousarray(grouped.transpose(1, 2, 0))           # (G, group, out)
            self.scale = np.ascontiguousarray(scale.T)                          # (G, out)
        else:
            self.dense = (grouped * scale[:, :, None]).reshape(len(w), -1)
        self.grouped, self.row_scale = grouped, scale

    def __call__(self, x):
        if hasattr(self, "dense"):
            return x @ self.dense.T
        q, x_scale = quantize(x, self.group)
        q = q.reshape(len(x), -1, self.group).transpose(1, 0, 2).astype(F32)    # (G, n, group)
        # Sums of int8 products stay under 2^24 for groups up to 256: exact in fp32.
        sums = np.matmul(q, self.q)                                             # (G, n, out)
        y = np.zeros(sums.shape[1:], F32)
        for g in range(len(sums)):
            y += (sums[g] * self.scale[g]) * x_scale[:, g, None]
        return y

    def rows(self, ids):
        if hasattr(self, "dense"):
            return self.dense[ids]
        return (self.grouped[ids] * self.row_scale[ids][:, :, None]).reshape(len(ids), -1)


def rope_frequencies(head_dim, theta, yarn):
    """Angles per position (head_dim / 2), and the factor on cos and sin."""
    j = np.arange(head_dim // 2)
    freq = float(theta) ** (-2.0 * j / head_dim)
    if not yarn:
        return freq, 1.0
    factor = yarn["factor"]

    def corr(rotations):
        return (head_dim * math.log(yarn["original"] / (2 * math.pi * rotations))
                / (2 * math.log(theta)))
    low, high = corr(yarn.get("beta_fast") or 32), corr(yarn.get("beta_slow") or 1)
    if not yarn.get("unrounded"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((j - low) / (high - low), 0, 1)
    freq = freq / factor * ramp + freq * (1 - ramp)
    return freq, yarn.get("attention_factor") or 0.1 * math.log(factor) + 1


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def swiglu(w1, w2, w3, h):
    gate = w1(h)
    return w2(gate / (1 + np.exp(-gate)) * w3(h))


class Model:
    def __init__(self, config, tensors):
        self.c, self.w = config, tensors
        freq, self.factor = rope_frequencies(config["head_dim"], config["theta"], config["yarn"])
        self.freq = freq[None, :]

    # -- loading

    @classmethod
    def from_bin(cls, path, precision="q8"):
        data = Path(path).read_bytes()
        magic, *fields = struct.unpack_from("<I11i", data)
        c = dict(zip(HEADER, fields))
        assert magic == MAGIC and c["version"] == 1
        theta, eps, scaling, factor, original, fast, slow, attention, unrounded = \
            struct.unpack_from("<ffIfifffI", data, 0x30)
        c["bias"], no_qk_norm = struct.unpack_from("<II", data, 0x54)
        c["qk_norm"] = 1 - no_qk_norm
        bits, = struct.unpack_from("<I", data, 0x68)
        levels = np.frombuffer(data, "<i1", 16, 0x70)
        assert bits in (0, 4) and not any(data[0x6C:0x70] + data[0x80:256])
        assert (np.diff(levels.astype(int)) > 0).all() if bits else not levels.any()
        c |= dict(zip(EXPERTS, struct.unpack_from("<iiI", data, 0x5C)))
        experts = c["n_experts"]
        assert 1 <= c["n_experts_used"] <= experts if experts else not any(data[0x5C:0x68])
        c["theta"], c["eps"], c["yarn"] = theta or 1e6, eps or 1e-6, None
        if scaling:
            c["yarn"] = dict(factor=factor, original=original, beta_fast=fast, beta_slow=slow,
                             attention_factor=attention, unrounded=unrounded)
        at, group = 256, c["group_size"]
        dim, layers, hd = c["dim"], c["n_layers"], c["head_dim"]

        def take(dtype, *shape):
            nonlocal at
            array = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
            at += array.nbytes
            return array

        def values(rows, columns, bits):
            if not bits:
                q = take("<i1", rows, columns)
                return q, take("<f4", rows, columns // group)
            pairs = take("u1", rows, columns // group, group // 2)
            q = levels[np.concatenate([pairs & 15, pairs >> 4], axis=2)].reshape(rows, columns)
            scale = take("<f2", rows, columns // group).astype(F32)
            assert at % 4 == 0                              # so no padding follows: shapes are even
            return q, scale

        def matrix(rows, columns, bits=0):
            return Matrix(*values(rows, columns, bits), group, precision)

        def expert_matrices(rows, columns):
            split = (np.split(x, experts) for x in values(experts * rows, columns, bits))
            return [Matrix(q, scale, group, precision) for q, scale in zip(*split)]

        heads, kv = c["n_heads"] * hd, c["n_kv_heads"] * hd
        w = {"att_norm": take("<f4", layers, dim), "ffn_norm": take("<f4", layers, dim),
             "norm": take("<f4", dim)}
        if c["qk_norm"]:
            w |= {"q_norm": take("<f4", layers, hd), "k_norm": take("<f4", layers, hd)}
        if experts:
            w["router"] = take("<f4", layers, experts, dim)
        w["embed"] = matrix(c["vocab_size"], dim)
        for name, rows, columns in (("q", heads, dim), ("k", kv, dim), ("v", kv, dim),
                                    ("o", dim, heads)):
            w[name] = [matrix(rows, columns, bits) for _ in range(layers)]
        for name, rows, columns in (("gate", c["hidden_dim"], dim), ("down", dim, c["hidden_dim"]),
                                    ("up", c["hidden_dim"], dim)):
            w[name] = [expert_matrices(rows, columns) if experts else matrix(rows, columns, bits)
                       for _ in range(layers)]
        w["head"] = w["embed"] if c["shared_classifier"] else matrix(c["vocab_size"], dim)
        if c["bias"]:
            w |= {"q_bias": take("<f4", layers, heads), "k_bias": take("<f4", layers, kv),
                  "v_bias": take("<f4", layers, kv)}
        assert at == len(data)
        return cls(c, w)

    @classmethod
    def from_checkpoint(cls, directory, precision="q8", group=None):
        directory = Path(directory)
        hf = json.loads((directory / "config.json").read_text())
        tensors = {}
        for file in sorted(directory.glob("*.safetensors")):
            tensors.update(read_safetensors(file))
        qwen2 = hf["architectures"] == ["Qwen2ForCausalLM"]
        moe = hf["architectures"] == ["Qwen3MoeForCausalLM"]
        experts = hf.get("num_experts", hf.get("num_local_experts")) if moe else 0
        head_dim = hf["hidden_size"] // hf["num_attention_heads"] if qwen2 else hf["head_dim"]
        c = dict(dim=hf["hidden_size"], n_experts=experts,
                 hidden_dim=hf["moe_intermediate_size" if moe else "intermediate_size"],
                 n_experts_used=hf["num_experts_per_tok"] if moe else 0,
                 no_topk_norm=int(moe and not hf.get("norm_topk_prob")),
                 n_layers=hf["num_hidden_layers"], n_heads=hf["num_attention_heads"],
                 n_kv_heads=hf["num_key_value_heads"], vocab_size=hf["vocab_size"],
                 max_seq_len=hf["max_position_embeddings"], head_dim=head_dim,
                 shared_classifier=int(hf["tie_word_embeddings"]), eps=hf["rms_norm_eps"],
                 bias=int(qwen2), qk_norm=int(not qwen2))
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        c["theta"] = rope.get("rope_theta") or hf.get("rope_theta")
        c["yarn"] = None
        if rope.get("rope_type", rope.get("type")) == "yarn":
            c["yarn"] = dict(factor=rope["factor"],
                             original=rope["original_max_position_embeddings"],
                             beta_fast=rope.get("beta_fast"), beta_slow=rope.get("beta_slow"),
                             attention_factor=rope.get("attention_factor"),
                             unrounded=rope.get("truncate") is False)
        widths = (c["dim"], c["hidden_dim"], c["n_heads"] * c["head_dim"])
        group = c["group_size"] = group or (64 if all(n % 64 == 0 for n in widths) else 32)

        def tensor(name):
            found = tensors.get("model." + name)
            return found if found is not None else tensors[name]

        def matrix(array):
            if precision == "fp32":
                return Matrix(array)
            return Matrix(*quantize(array, group), group, precision)

        layers = range(c["n_layers"])
        w = {"norm": tensor("norm.weight"), "embed": matrix(tensor("embed_tokens.weight"))}
        vectors = {"att_norm": "input_layernorm.weight",
                   "ffn_norm": "post_attention_layernorm.weight"}
        if qwen2:
            vectors |= {f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
        else:
            vectors |= {f"{x}_norm": f"self_attn.{x}_norm.weight" for x in "qk"}
        for ours, theirs in vectors.items():
            w[ours] = [tensor(f"layers.{i}.{theirs}") for i in layers]
        for name in "qkvo":
            w[name] = [matrix(tensor(f"layers.{i}.self_attn.{name}_proj.weight")) for i in layers]
        for name in "gate", "down", "up":
            w[name] = [[matrix(tensor(f"layers.{i}.mlp.experts.{e}.{name}_proj.weight"))
                        for e in range(experts)] if experts else
                       matrix(tensor(f"layers.{i}.mlp.{name}_proj.weight")) for i in layers]
        if experts:
            w["router"] = [tensor(f"layers.{i}.mlp.gate.weight") for i in layers]
        w["head"] = w["embed"] if c["shared_classifier"] else matrix(tensors["lm_head.weight"])
        return cls(c, w)

    def to_bin(self, path):
        """Write model.bin as export.py should, in eight bits (q8 only)."""
        c, w, yarn = self.c, self.w, self.c["yarn"]
        parts = [struct.pack("<I11i", MAGIC, 1, *(c[name] for name in HEADER[1:]))]
        parts.append(struct.pack("<ff", c["theta"] if c["theta"] != 1e6 else 0,
                                 c["eps"] if c["eps"] != 1e-6 else 0))
        if yarn:
            default = 0.1 * math.log(yarn["factor"]) + 1
            fast, slow = yarn.get("beta_fast") or 0, yarn.get("beta_slow") or 0
            factor = yarn.get("attention_factor") or 0
            parts.append(struct.pack("<IfifffI", 1, yarn["factor"], yarn["original"],
                                     0 if fast == 32 else fast, 0 if slow == 1 else slow,
                                     0 if factor == default else factor,
                                     bool(yarn.get("unrounded"))))
        parts = [b"".join(parts).ljust(0x54, b"\0")]
        parts[0] += struct.pack("<IIiiI", c["bias"], 1 - c["qk_norm"],
                                *(c[name] for name in EXPERTS)).ljust(256 - 0x54, b"\0")
        for name in ("att_norm", "ffn_norm", "norm", "q_norm", "k_norm", "router"):
            parts.append(np.asarray(w.get(name, ()), "<f4").tobytes())
        matrices = [w["embed"]]
        for name in ("q", "k", "v", "o", "gate", "down", "up"):
            matrices += w[name]
        for m in matrices + ([] if c["shared_classifier"] else [w["head"]]):
            experts = m if isinstance(m, list) else [m]
            parts += [m.grouped.astype(np.int8).tobytes() for m in experts]
            parts += [m.row_scale.astype("<f4").tobytes() for m in experts]
        for name in ("q_bias", "k_bias", "v_bias"):
            parts.append(np.asarray(w.get(name, ()), "<f4").tobytes())
        Path(path).write_bytes(b"".join(parts))
        return Path(path)

    # -- the forward pass

    def rmsnorm(self, x, w):
        return w * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=F32)
                                + F32(self.c["eps"])))

    def rope(self, x, start):
        """x (n, heads, head_dim) at positions start...: NeoX pairs (j, j + head_dim / 2)."""
        angle = np.arange(start, start + len(x))[:, None] * self.freq
        cos = (np.cos(angle) * self.factor).astype(F32)[:, None]
        sin = (np.sin(angle) * self.factor).astype(F32)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def attention_weights(self, q, k, start):
        """q (n, heads, hd) against k (start + n, heads, hd), causal -> (heads, n, start + n)."""
        scores = np.einsum("nhd,mhd->hnm", q, k, optimize=True) / F32(math.sqrt(q.shape[2]))
        future = np.arange(len(k))[None, :] > start + np.arange(len(q))[:, None]
        scores[:, future] = -np.inf
        return softmax(scores)

    def attention(self, q, k, v, start):
        """q (n, heads, hd) against k, v (start + n, kv heads, hd), causal -> (n, heads * hd)."""
        per_kv = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, per_kv, axis=1), np.repeat(v, per_kv, axis=1)
        weights = self.attention_weights(q, k, start)
        return np.einsum("hnm,mhd->nhd", weights, v, optimize=True).reshape(len(q), -1)

    def experts(self, i, h):
        """Each token's most likely experts of layer i, equal ones by index, in ascending order."""
        p = softmax(h @ self.w["router"][i].T)                                  # (n, experts)
        chosen = np.argsort(-p, axis=1, kind="stable")[:, :self.c["n_experts_used"]]
        weight = np.zeros_like(p)
        np.put_along_axis(weight, chosen, np.take_along_axis(p, chosen, axis=1), axis=1)
        if not self.c["no_topk_norm"]:
            weight /= weight.sum(axis=1, keepdims=True)
        y = np.zeros_like(h)
        for e, matrices in enumerate(zip(*(self.w[name][i] for name in ("gate", "down", "up")))):
            if (tokens := (chosen == e).any(axis=1)).any():
                y[tokens] += weight[tokens, e, None] * swiglu(*matrices, h[tokens])
        return y

    def hidden(self, ids, cache=None):
        """Final-norm hidden states of ids, which follow what the cache (a list) already holds."""
        c, w = self.c, self.w
        cache = [] if cache is None else cache
        start = len(cache[0][0]) if cache else 0
        x = w["embed"].rows(np.asarray(ids))
        for i in range(c["n_layers"]):
            h = self.rmsnorm(x, w["att_norm"][i])
            q, k, v = (w[name][i](h) + (w[name + "_bias"][i] if c["bias"] else 0)
                       for name in "qkv")
            q, k, v = (y.reshape(len(x), -1, c["head_dim"]) for y in (q, k, v))
            if c["qk_norm"]:
                q, k = self.rmsnorm(q, w["q_norm"][i]), self.rmsnorm(k, w["k_norm"][i])
            q, k = self.rope(q, start), self.rope(k, start)
            if start:
                k, v = np.concatenate([cache[i][0], k]), np.concatenate([cache[i][1], v])
            cache[i:i + 1] = [(k, v)]
            x = x + w["o"][i](self.attention(q, k, v, start))
            h = self.rmsnorm(x, w["ffn_norm"][i])
            w1, w2, w3 = (w[name][i] for name in ("gate", "down", "up"))
            x = x + (self.experts(i, h) if c["n_experts"] else swiglu(w1, w2, w3, h))
        return self.rmsnorm(x, w["norm"])

    def embedding(self, ids):
        """The last token's hidden state, divided by its length."""
        x = self.hidden(ids)[-1].astype(np.float64)
        return x / np.linalg.norm(x)

    def logits(self, ids, cache=None):
        return self.w["head"](self.hidden(ids, cache))

    def logprobs(self, ids):
        """log P(ids[t + 1] | ids[0..t]) for t = 0 .. n - 2."""
        logits = self.logits(ids[:-1]).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits[np.arange(len(ids) - 1), ids[1:]]

    def nll(self, ids):
        return -float(np.mean(self.logprobs(ids)))

    def greedy(self, ids, n, penalty=1.0):
        """The n most likely ids that follow, and the smallest lead of a first over a second. The
        penalty makes every id that is there less likely (transformers' repetition_penalty)."""
        cache, new, lead = [], list(ids), math.inf
        for _ in range(n):
            logits = self.logits(new[len(cache[0][0]) if cache else 0:], cache)[-1]
            there = np.unique(new)
            logits[there] *= np.where(logits[there] < 0, F32(penalty), 1 / F32(penalty))
            second, first = np.partition(logits, -2)[-2:]
            lead = min(lead, float(first - second))
            new.append(int(np.argmax(logits)))
        return new[len(ids):], lead


# -- files

def read_safetensors(path):
    data = Path(path).read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    tensors = {}
    for name, t in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            raw = data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]
            if t["dtype"] == "BF16":
                array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(F32)
            else:
                array = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[t["dtype"]])
            tensors[name] = array.reshape(t["shape"]).astype(F32)
    return tensors


def read_tokenizer(file, vocab_size):
    """A model.bin.tokenizer, its path or bytes: header (3 numbers), tokens' bytes, scores, the
    extension's sections."""
    data = file if isinstance(file, bytes) else Path(file).read_bytes()
    at, tokens, scores, sections = 12, [], [], {}
    while at < len(data) and len(tokens) < vocab_size:
        score, length = struct.unpack_from("<fI", data, at)
        tokens.append(data[at + 8:at + 8 + length])
        scores.append(score)
        at += 8 + length
    if at < len(data):
        magic, version, length = struct.unpack_from("<4sII", data, at)
        assert (magic, version, at + 12 + length) == (b"q3tx", 1, len(data))
        at += 12
        while at < len(data):
            tag, length = struct.unpack_from("<4sI", data, at)
            assert tag.decode() not in sections
            sections[tag.decode()] = data[at + 8:at + 8 + length]
            at += 8 + length
        assert at == len(data)
    return struct.unpack_from("<3I", data), tokens, scores, sections

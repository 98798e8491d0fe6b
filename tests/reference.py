"""Qwen3, Qwen2 and Qwen3.5 (layers with a delta rule) in numpy, written from the specification and not from qwen3.c.

    python tests/reference.py [MODEL.bin] TEXT

prints what the last token of TEXT becomes on its way through the model (tests/tiny/tiny.bin), as
tests/journey does with the functions of qwen3.c.

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
import re
import struct
import sys
import unicodedata
from pathlib import Path

import numpy as np
from tokenizers import Regex, pre_tokenizers

F32 = np.float32


# -- the equations

def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def swiglu(w1, w2, w3, h):
    gate = w1(h)
    return w2(gate / (1 + np.exp(-gate)) * w3(h))


class Transformer:
    """config c, weights w: w["q"][i](h) is Wq h in layer i. gate, down and up are W1, W2 and W3,
    att_norm and ffn_norm are rms_att and rms_ffn of qwen3.c. The rows of x are tokens at positions
    start, start + 1, ..."""

    def __init__(self, config, weights):
        self.c, self.w = config, weights
        self.freq, self.factor = rope_frequencies(config)

    def rmsnorm(self, x, w):
        return w * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=F32)
                                + F32(self.c["eps"])))

    def rope(self, x, start):
        """x (n, heads, head_dim): pairs (j, j + rotary_dim / 2) of the first rotary_dim numbers."""
        angle = np.arange(start, start + len(x))[:, None] * self.freq
        cos = (np.cos(angle) * self.factor).astype(F32)[:, None]
        sin = (np.sin(angle) * self.factor).astype(F32)[:, None]
        half = len(self.freq)
        a, b, rest = np.split(x, [half, 2 * half], axis=-1)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)

    def attention(self, q, k, v, start):
        """q (n, heads, head_dim) against k, v (start + n, kv heads, head_dim), causal: the answers
        (n, heads * head_dim), and the shares (heads, n, start + n)."""
        per_kv = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, per_kv, axis=1), np.repeat(v, per_kv, axis=1)
        scores = np.einsum("nhd,mhd->hnm", q, k, optimize=True) / F32(math.sqrt(q.shape[2]))
        future = np.arange(len(k))[None, :] > start + np.arange(len(q))[:, None]
        scores[:, future] = -np.inf
        shares = softmax(scores)
        return np.einsum("hnm,mhd->nhd", shares, v, optimize=True).reshape(len(q), -1), shares

    def experts(self, i, h):
        """Each token's most likely experts of layer i (of equal p the first), added in order."""
        score = h @ self.w["router"][i].T                       # (n, experts), the shared one last
        score, shared = np.split(score, [self.c["n_experts"]], axis=1)
        p = softmax(score)
        chosen = np.argsort(-p, axis=1, kind="stable")[:, :self.c["n_experts_used"]]
        weight = np.zeros_like(p)
        np.put_along_axis(weight, chosen, np.take_along_axis(p, chosen, axis=1), axis=1)
        if not self.c["no_topk_norm"]:
            weight /= weight.sum(axis=1, keepdims=True)
        y = np.zeros_like(h)
        for e, matrices in enumerate(zip(*(self.w[name][i] for name in ("gate", "down", "up")))):
            if e == self.c["n_experts"]:
                y += sigmoid(shared) * swiglu(*matrices, h)
            elif (tokens := (chosen == e).any(axis=1)).any():
                y[tokens] += weight[tokens, e, None] * swiglu(*matrices, h[tokens])
        return y

    def delta(self, i, h, cache, start):
        """The answers of the heads of layer i, which has a delta rule. Its cache has every u and S."""
        c, w = self.c, self.w
        k_heads, v_heads = c["k_heads"], c["v_heads"]
        u = np.concatenate([w[name][i](h) for name in "qkv"], axis=1)           # (n, channels)
        past, S = cache[i] if start else (np.zeros((0, u.shape[1]), F32), np.zeros((v_heads, 128, 128), F32))
        cache[i:i + 1] = [(past := np.concatenate([past, u]), S)]
        past = np.concatenate([np.zeros((3, u.shape[1]), F32), past])
        mixed = silu(sum(w["conv"][i][j] * past[start + j:start + j + len(h)] for j in range(4)))
        q, k, v = np.split(mixed.reshape(len(h), -1, 128), [k_heads, 2 * k_heads], axis=1)
        q, k = (np.repeat(y / np.sqrt((y * y).sum(axis=2, keepdims=True) + F32(1e-6)),
                          v_heads // k_heads, axis=1) for y in (q, k))
        q = q / F32(math.sqrt(128))
        beta = sigmoid(h @ w["wb"][i].T)                                        # (n, v heads)
        softplus = np.logaddexp(0, h @ w["wa"][i].T + w["dt_bias"][i]).astype(F32)
        decay = np.exp(-w["decay"][i] * softplus)
        self.learned = k, v, decay, beta                                        # for who looks at them
        out = np.empty_like(v)
        for t in range(len(h)):
            S = S * decay[t, :, None, None]
            d = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t, :, :, None] * d[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", S, q[t])
        cache[i] = cache[i][0], S
        return self.rmsnorm(out, w["delta_norm"][i]).reshape(len(h), -1)

    def layer(self, i, x, cache, start):
        """x after layer i, and the shares of its attention. Its keys and values go to the cache."""
        c, w = self.c, self.w
        h = self.rmsnorm(x, w["att_norm"][i])
        if c["attention_every"] and (i + 1) % c["attention_every"]:
            a = self.delta(i, h, cache, start) * silu(w["z"][i](h))
            shares = np.zeros((0, len(x), 0))
        else:
            a, shares = self.heads(i, h, cache, start)
        x = x + w["o"][i](a)
        h = self.rmsnorm(x, w["ffn_norm"][i])
        w1, w2, w3 = (w[name][i] for name in ("gate", "down", "up"))
        return x + (self.experts(i, h) if c["n_experts"] else swiglu(w1, w2, w3, h)), shares

    def heads(self, i, h, cache, start):
        """The answers of the heads of layer i, which has attention, and their shares."""
        c, w = self.c, self.w
        q, k, v = (w[name][i](h) + (w[name + "_bias"][i] if c["bias"] else 0) for name in "qkv")
        q, k, v = (y.reshape(len(h), -1, c["head_dim"]) for y in (q, k, v))
        if c["qk_norm"]:
            q, k = self.rmsnorm(q, w["q_norm"][i]), self.rmsnorm(k, w["k_norm"][i])
        q, k = self.rope(q, start), self.rope(k, start)
        if start:
            k, v = np.concatenate([cache[i][0], k]), np.concatenate([cache[i][1], v])
        cache[i:i + 1] = [(k, v)]
        a, shares = self.attention(q, k, v, start)
        return a * sigmoid(w["z"][i](h)) if c["gated_attention"] else a, shares

    def forward(self, ids, cache=None):
        """Yields x before the first layer, and after each with its shares. The ids follow what the
        cache (a list) already holds."""
        cache = [] if cache is None else cache
        start = len(cache[0][0]) if cache else 0
        x, shares = self.w["embed"].rows(np.asarray(ids)), None
        yield x, shares
        for i in range(self.c["n_layers"]):
            x, shares = self.layer(i, x, cache, start)
            yield x, shares

    def classify(self, x):
        """The logits of the next token."""
        return self.w["head"](self.rmsnorm(x, self.w["norm"]))


# -- quantized matrices, and the angles of rope

def quantize(x, group):
    """x (rows, n) -> int8 values (rows, n) and fp32 scales (rows, n / group)."""
    x = x.reshape(len(x), -1, group).astype(F32)
    scale = np.abs(x).max(axis=2) / F32(127)
    divisor = np.where(scale == 0, F32(1), scale)           # a group of zeros: scale 0, zeros
    q = np.rint(x / divisor[:, :, None]).clip(-127, 127)    # rint: ties to even
    return q.reshape(len(x), -1).astype(np.int8), scale


class Matrix:
    """A weight matrix (out, in): y = x W^T, in one of the three precisions."""

    def __init__(self, w, scale=None, group=None, precision="q8"):
        self.group = group
        if scale is None:
            self.dense = w.astype(F32)                                          # (out, in)
            return
        self.grouped = w.reshape(len(w), -1, group).astype(F32)                 # (out, G, group)
        self.row_scale = scale                                                  # (out, G)
        if precision == "weights":
            self.dense = self.rows(range(len(w)))

    def rows(self, ids):
        if hasattr(self, "dense"):
            return self.dense[ids]
        return (self.grouped[ids] * self.row_scale[ids][:, :, None]).reshape(len(ids), -1)

    def __call__(self, x):
        if hasattr(self, "dense"):
            return x @ self.dense.T
        q, x_scale = quantize(x, self.group)
        q = q.reshape(len(x), -1, self.group).transpose(1, 0, 2).astype(F32)    # (G, n, group)
        # Sums of int8 products stay under 2^24 for groups up to 256: exact in fp32.
        dots = np.matmul(q, self.grouped.transpose(1, 2, 0))                    # (G, n, out)
        return sum(dots[g] * self.row_scale[:, g] * x_scale[:, g, None] for g in range(len(dots)))


def rope_frequencies(c):
    """Angles per position (rotary_dim / 2), and the factor on cos and sin. Of YaRN in fp32, in the
    order of transformers' operations."""
    head_dim, theta, yarn = c.get("rotary_dim") or c["head_dim"], c["theta"], c["yarn"]
    if not yarn:
        return float(theta) ** (-2.0 * np.arange(head_dim // 2) / head_dim), 1.0
    if "frequencies" in yarn:                               # as a file has them
        return yarn["frequencies"], yarn["attention_factor"]
    factor = yarn["factor"]

    def corr(rotations):
        return (head_dim * math.log(yarn["original"] / (2 * math.pi * rotations))
                / (2 * math.log(theta)))
    low, high = corr(yarn.get("beta_fast") or 32), corr(yarn.get("beta_slow") or 1)
    if not yarn.get("unrounded"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = F32(high - low) if low != high else F32(0.001)
    keep = F32(1) - np.clip((np.arange(head_dim // 2, dtype=F32) - F32(low)) / width, F32(0), F32(1))
    inverse = (float(theta) ** (np.arange(0, head_dim, 2, dtype=F32) / F32(head_dim)).astype(float)
               ).astype(F32)                                # as if torch rounded powers correctly
    freq = F32(1) / (F32(factor) * inverse) * (F32(1) - keep) + F32(1) / inverse * keep
    return freq, yarn.get("attention_factor") or 0.1 * math.log(factor) + 1


# -- files, and what the tests ask for

MAGIC = 0x616A6331
FORMAT = "<I11iffIf20xIIiiIIB3x16sI6IQ92x"    # model.bin's header
HEADER = ("version", "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size",
          "max_seq_len", "head_dim", "shared_classifier", "group_size")
EXPERTS = "n_experts", "n_experts_used", "no_topk_norm"
DELTA = "attention_every", "k_heads", "v_heads", "rotary_dim", "gated_attention", "shared_expert"
ORDER = "q k v o gate down up z".split()    # of the bits of eight_bits
NAMES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
         "n_kv_heads": "num_key_value_heads", "vocab_size": "vocab_size", "eps": "rms_norm_eps",
         "max_seq_len": "max_position_embeddings"}           # of the header and of config.json


def hash_weights(data):
    """A hash of OUT.bin's bytes after its header: the sum of the words of 64 bits, word w of the file multiplied by
    scatter(w % 1024) and scatter(1024 + w // 1024), modulo 2^64."""
    def scatter(n):
        n = n.astype("<u8") * np.uint64(0x9E3779B97F4A7C15)
        n = (n ^ n >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
        return n ^ n >> np.uint64(32) | np.uint64(1)

    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
    w = np.arange(32, 32 + len(words))                      # the header has 32
    return int((words * scatter(w % 1024) * scatter(1024 + w // 1024)).sum())


class Model(Transformer):
    def hidden(self, ids, cache=None):
        for x, _ in self.forward(ids, cache):
            pass
        return x

    def embedding(self, ids):
        """The last token's hidden state after the final norm, divided by its length."""
        x = self.rmsnorm(self.hidden(ids)[-1], self.w["norm"]).astype(np.float64)
        return x / np.linalg.norm(x)

    def logits(self, ids, cache=None):
        return self.classify(self.hidden(ids, cache))

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

    @classmethod
    def from_bin(cls, path, precision="q8"):
        data = Path(path).read_bytes()
        magic, *fields = struct.unpack_from(FORMAT, data)
        assert struct.pack(FORMAT, magic, *fields) == data[:256]        # all other bytes are 0
        *fields, weights_hash = fields
        assert weights_hash in (0, hash_weights(data[256:]))
        fields, (eight, levels, panels), delta = fields[:-9], fields[-9:-6], fields[-6:]
        c = dict(zip((*HEADER, "theta", "eps", "scaling", "factor", "bias", "no_qk_norm", *EXPERTS,
                      "bits"), fields)) | dict(zip(DELTA, delta))
        assert magic == MAGIC and c["version"] == 1
        assert c["scaling"] in (0, 2) and bool(c["scaling"]) == bool(c["factor"])
        bits, experts, levels = c["bits"], c["n_experts"], np.frombuffer(levels, "<i1")
        assert bits in (0, 4) and panels < 2 and eight < (256 if bits else 1)
        bits_of = {name: 0 if eight >> i & 1 else bits for i, name in enumerate(ORDER)}
        assert (np.diff(levels.astype(int)) > 0).all() if bits else not levels.any()
        assert 1 <= c["n_experts_used"] <= experts if experts else not any(data[0x5C:0x68])
        c |= dict(theta=c["theta"] or 1e6, eps=c["eps"] or 1e-6, qk_norm=1 - c["no_qk_norm"],
                  yarn=None)
        at, group = 256, c["group_size"]
        dim, layers, hd = c["dim"], c["n_layers"], c["head_dim"]

        def take(dtype, *shape):
            nonlocal at
            array = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
            at += array.nbytes
            return array

        def take_rows(dtype, rows, words):
            if not panels:
                return take(dtype, rows, words)
            return take(dtype, -(-rows // 16), words, 16).transpose(0, 2, 1).reshape(-1, words)[:rows]

        def values(rows, columns, bits):
            words = np.ascontiguousarray(take_rows("<u4", rows, columns * (bits or 8) // 32))
            scale = take_rows("<f2" if bits else "<f4", rows, columns // group).astype(F32)
            if not bits:
                return words.view("<i1").reshape(rows, columns), scale
            pairs = words.view("u1").reshape(rows, columns // group, group // 2)
            return levels[np.concatenate([pairs & 15, pairs >> 4], axis=2)].reshape(rows, columns), scale

        def is_delta(i):
            return c["attention_every"] and (i + 1) % c["attention_every"] != 0

        def of_layers(kind, *shape):
            """A layer's array, or None in a layer of the other kind."""
            return [take("<f4", *shape) if is_delta(i) == kind else None for i in range(layers)]

        def matrix(rows, columns, bits=0, experts=0):
            if not experts:
                return Matrix(*values(rows, columns, bits), group, precision)
            split = (np.split(x, experts) for x in values(experts * rows, columns, bits))
            return [Matrix(q, scale, group, precision) for q, scale in zip(*split)]

        heads, kv, hidden = c["n_heads"] * hd, c["n_kv_heads"] * hd, c["hidden_dim"]
        w = {"att_norm": take("<f4", layers, dim), "ffn_norm": take("<f4", layers, dim),
             "norm": take("<f4", dim)}
        if c["qk_norm"]:
            w |= {name: of_layers(False, hd) for name in ("q_norm", "k_norm")}
        if experts:
            experts += c["shared_expert"]
            w["router"] = take("<f4", layers, experts, dim)
        if c["scaling"]:
            c["yarn"] = dict(frequencies=take("<f4", (c["rotary_dim"] or hd) // 2), attention_factor=c["factor"])
        delta_k, delta_v, of_v_heads = c["k_heads"] * 128, c["v_heads"] * 128, (c["v_heads"],)
        if c["attention_every"]:
            for name, shape in (("conv", (4, 2 * delta_k + delta_v)), ("decay", of_v_heads), ("dt_bias", of_v_heads),
                                ("delta_norm", (128,)), ("wa", (*of_v_heads, dim)), ("wb", (*of_v_heads, dim))):
                w[name] = of_layers(True, *shape)
        w["embed"] = matrix(c["vocab_size"], dim)
        for name, shape, delta in (
                ("q", (heads, dim), (delta_k, dim)), ("k", (kv, dim), (delta_k, dim)),
                ("v", (kv, dim), (delta_v, dim)), ("z", (heads, dim), (delta_v, dim)),
                ("o", (dim, heads), (dim, delta_v))):
            w[name] = [matrix(*(delta if is_delta(i) else shape), bits_of[name])
                       if name != "z" or c["gated_attention"] or is_delta(i) else None for i in range(layers)]
        for name, *shape in (("gate", hidden, dim), ("down", dim, hidden), ("up", hidden, dim)):
            w[name] = [matrix(*shape, bits_of[name], experts) for _ in range(layers)]
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
        return cls.from_tensors(hf, tensors, precision, group)

    @classmethod
    def from_tensors(cls, hf, tensors, precision="q8", group=None):
        """hf is config.json's object; tensors are by name, with or without "model."."""
        if "text_config" in hf:
            hf = hf["text_config"] | {key: hf[key] for key in ("architectures", "tie_word_embeddings")}
        tensors = {re.sub(r"^model\.(language_model\.)?", "", name): x for name, x in tensors.items()}
        qwen2 = hf["architectures"] == ["Qwen2ForCausalLM"]
        delta = bool(hf.get("linear_num_key_heads"))
        moe = "Moe" in hf["architectures"][0] or "Next" in hf["architectures"][0]
        experts = hf.get("num_experts", hf.get("num_local_experts")) if moe else 0
        head_dim = hf["hidden_size"] // hf["num_attention_heads"] if qwen2 else hf["head_dim"]
        c = {ours: hf[theirs] for ours, theirs in NAMES.items()} | dict(
            hidden_dim=hf["moe_intermediate_size" if moe else "intermediate_size"],
            n_experts=experts, n_experts_used=hf["num_experts_per_tok"] if moe else 0,
            no_topk_norm=int(moe and not delta and not hf.get("norm_topk_prob")), head_dim=head_dim,
            shared_classifier=int(hf["tie_word_embeddings"]),
            bias=int(qwen2), qk_norm=int(not qwen2))
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        c["theta"] = rope.get("rope_theta") or hf.get("rope_theta")
        turned = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1))
        c |= dict.fromkeys(DELTA, 0) | ({
            "attention_every": hf["layer_types"].index("full_attention") + 1 if "layer_types" in hf
            else hf["full_attention_interval"],
            "k_heads": hf["linear_num_key_heads"], "v_heads": hf["linear_num_value_heads"],
            "rotary_dim": int(turned * head_dim) if turned < 1 else 0, "gated_attention": 1,
            "shared_expert": int(moe)} if delta else {})
        c["yarn"] = None
        if rope.get("rope_type", rope.get("type")) == "yarn":
            c["yarn"] = dict(factor=rope["factor"],
                             original=rope["original_max_position_embeddings"],
                             beta_fast=rope.get("beta_fast"), beta_slow=rope.get("beta_slow"),
                             attention_factor=rope.get("attention_factor"),
                             unrounded=rope.get("truncate") is False)
        widths = (c["dim"], c["hidden_dim"], c["n_heads"] * c["head_dim"])
        group = c["group_size"] = group or (64 if all(n % 64 == 0 for n in widths) else 32)

        def matrix(x):
            return Matrix(x) if precision == "fp32" else Matrix(*quantize(x, group), group, precision)

        def take(name):
            found = tensors[name]
            return found if found.ndim < 2 or name.endswith("mlp.gate.weight") else matrix(found)

        if delta:
            return cls(c, delta_weights(c, tensors, matrix))
        w = {"norm": take("norm.weight"), "embed": take("embed_tokens.weight")}
        of_layer = {"att_norm": "input_layernorm.weight",
                    "ffn_norm": "post_attention_layernorm.weight"}
        of_layer |= {name: f"self_attn.{name}_proj.weight" for name in "qkvo"}
        if qwen2:
            of_layer |= {f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"}
        else:
            of_layer |= {f"{name}_norm": f"self_attn.{name}_norm.weight" for name in "qk"}
        if experts:
            of_layer["router"] = "mlp.gate.weight"
        for ours, theirs in of_layer.items():
            w[ours] = [take(f"layers.{i}.{theirs}") for i in range(c["n_layers"])]
        for name in "gate", "down", "up":
            w[name] = [[take(f"layers.{i}.mlp.experts.{e}.{name}_proj.weight")
                        for e in range(experts)] or take(f"layers.{i}.mlp.{name}_proj.weight")
                       for i in range(c["n_layers"])]
        w["head"] = w["embed"] if c["shared_classifier"] else take("lm_head.weight")
        return cls(c, w)

    def to_bin(self, path, panels=True):
        Path(path).write_bytes(self.to_bytes(panels))
        return Path(path)

    def to_bytes(self, panels=True):
        """model.bin as export.py should write it, in eight bits (q8 only); without panels in the base format."""
        def ordered(rows):
            rows = np.concatenate([x.reshape(-1, x.shape[-1]) for x in rows])
            if panels:
                rows = np.pad(rows, ((0, -len(rows) % 16), (0, 0)))
                rows = rows.reshape(-1, 16, rows.shape[1]).transpose(0, 2, 1)
            return rows.tobytes()

        def unless(default, value):                         # the header has 0 for what is usual
            return 0 if value in (None, default) else value

        c, w, scaled = self.c, self.w, bool(self.c["yarn"])
        header, parts = (
            FORMAT, MAGIC, 1, *(c[name] for name in HEADER[1:]), unless(1e6, c["theta"]),
            unless(1e-6, c["eps"]), 2 * scaled, scaled * self.factor, c["bias"], 1 - c["qk_norm"],
            *(c[name] for name in EXPERTS), 0, 0, b"", panels, *(c[name] for name in DELTA)), []

        def floats(name):                                   # of the layers that have them
            return b"".join(np.asarray(x, "<f4").tobytes() for x in w.get(name, ()) if x is not None)

        parts += map(floats, ("att_norm", "ffn_norm", "norm", "q_norm", "k_norm", "router"))
        parts.append(self.freq.astype("<f4").tobytes() if scaled else b"")
        parts += map(floats, ("conv", "decay", "dt_bias", "delta_norm", "wa", "wb"))
        matrices = [w["embed"]]
        for name in ("q", "k", "v", "z", "o", "gate", "down", "up"):
            matrices += [x for x in w.get(name, ()) if x is not None]
        for m in matrices + ([] if c["shared_classifier"] else [w["head"]]):
            experts = m if isinstance(m, list) else [m]
            parts.append(ordered([np.ascontiguousarray(m.grouped.astype(np.int8).reshape(
                len(m.row_scale), -1)).view("<u4") for m in experts]))
            parts.append(ordered([m.row_scale.astype("<f4") for m in experts]))
        weights = b"".join([*parts, *map(floats, ("q_bias", "k_bias", "v_bias"))])
        return struct.pack(*header, hash_weights(weights) if panels else 0) + weights


def delta_weights(c, tensors, matrix):
    """The weights of Qwen3.5 and Qwen3-Next, from the names without "model.language_model."."""
    k_heads, v_heads, hd, dim = c["k_heads"], c["v_heads"], c["head_dim"], c["dim"]
    per_k = v_heads // k_heads
    w = {name: [None] * c["n_layers"] for name in [
        *ORDER, "att_norm", "ffn_norm", "q_norm", "k_norm", "conv", "decay", "dt_bias", "delta_norm", "wa", "wb", "router"]}
    w |= {"norm": F32(1) + tensors["norm.weight"], "embed": matrix(tensors["embed_tokens.weight"])}
    w["head"] = w["embed"] if c["shared_classifier"] else matrix(tensors["lm_head.weight"])
    for i in range(c["n_layers"]):
        t = {name.removeprefix(f"layers.{i}."): x for name, x in tensors.items() if name.startswith(f"layers.{i}.")}
        if (i + 1) % c["attention_every"]:
            if "linear_attn.in_proj_qkv.weight" in t:
                qkv = np.split(t["linear_attn.in_proj_qkv.weight"], [128 * k_heads, 256 * k_heads])
                z, b, a = (t[f"linear_attn.in_proj_{name}.weight"] for name in "zba")
            else:                                       # Qwen3-Next: all of a k head follow each other
                x = t["linear_attn.in_proj_qkvz.weight"].reshape(k_heads, -1, dim)
                *qkv, z = (y.reshape(-1, dim) for y in np.split(x, [128, 256, 256 + 128 * per_k], axis=1))
                x = t["linear_attn.in_proj_ba.weight"].reshape(k_heads, 2, per_k, dim)
                b, a = x[:, 0].reshape(-1, dim), x[:, 1].reshape(-1, dim)
            w["wa"][i], w["wb"][i], w["o"][i] = a, b, matrix(t["linear_attn.out_proj.weight"])
            w["conv"][i] = t["linear_attn.conv1d.weight"][:, 0].T
            w["decay"][i] = np.exp(t["linear_attn.A_log"].astype(float)).astype(F32)
            w["dt_bias"][i], w["delta_norm"][i] = t["linear_attn.dt_bias"], t["linear_attn.norm.weight"]
        else:
            q, z = np.split(t["self_attn.q_proj.weight"].reshape(-1, 2, hd, dim), 2, axis=1)
            q, z = q.reshape(-1, dim), z.reshape(-1, dim)
            qkv = q, t["self_attn.k_proj.weight"], t["self_attn.v_proj.weight"]
            w["o"][i] = matrix(t["self_attn.o_proj.weight"])
            w["q_norm"][i], w["k_norm"][i] = (F32(1) + t[f"self_attn.{name}_norm.weight"] for name in "qk")
        for name, x in zip("qkvz", (*qkv, z)):
            w[name][i] = matrix(x)
        w["att_norm"][i] = F32(1) + t["input_layernorm.weight"]
        w["ffn_norm"][i] = F32(1) + t["post_attention_layernorm.weight"]
        for name in "gate", "down", "up":
            if not c["n_experts"]:
                w[name][i] = matrix(t[f"mlp.{name}_proj.weight"])
                continue
            if "mlp.experts.gate_up_proj" in t:
                gate, up = np.split(t["mlp.experts.gate_up_proj"], 2, axis=1)
                each = {"gate": gate, "up": up, "down": t["mlp.experts.down_proj"]}[name]
            else:
                each = [t[f"mlp.experts.{e}.{name}_proj.weight"] for e in range(c["n_experts"])]
            w[name][i] = [matrix(x) for x in (*each, t[f"mlp.shared_expert.{name}_proj.weight"])]
        if c["n_experts"]:
            w["router"][i] = np.concatenate([t["mlp.gate.weight"], t["mlp.shared_expert_gate.weight"]])
    return w


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


# -- a token's journey

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLIT35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")      # Qwen3.5's


def encode(text, tokens, scores, sections):
    """The ids of a raw text, by definition: it is cut at added tokens and, in NFC, into words. Each
    byte of a word is a token; as long as two neighbours together are a token, those of the highest
    score become one."""
    ids, added, tail = (np.frombuffer(sections.get(tag, b""), "<u4").tolist()
                        for tag in ("head", "adde", "tail"))
    added = {tokens[i].decode(): i for i in added[::2]}
    known = {token: (-score, i) for i, (token, score) in enumerate(zip(tokens, scores))
             if i not in added.values() and (score > -1e6 or len(token) == 1)}
    runs = np.frombuffer(sections.get("clas", b""), "<u4").reshape(-1, 3)   # first, last, class; 1: letters
    marks = any(first <= 0x301 <= last and kind == 1 for first, last, kind in runs)
    words = pre_tokenizers.Split(Regex(SPLIT35 if marks else SPLIT), "isolated").pre_tokenize_str
    longest_first = sorted(map(re.escape, added), key=len, reverse=True)
    for part in re.split(f"({'|'.join(longest_first)})", text):
        if part in added:
            ids.append(added[part])
            continue
        for word, _ in words(unicodedata.normalize("NFC", part)):
            word = [bytes([byte]) for byte in word.encode()]
            while pairs := [(known[a + b][0], i) for i, (a, b) in enumerate(zip(word, word[1:]))
                            if a + b in known]:
                _, i = min(pairs)
                word[i:i + 2] = [word[i] + word[i + 1]]
            ids += [known[token][1] for token in word]
    return ids + tail


def piece(token):
    """A token's bytes as a JSON string, \ufffd for each that is not UTF-8."""
    def escape(match):
        c = match[0]
        if c in '"\\\b\f\n\r\t':
            return json.dumps(c)[1:-1]
        return "\\ufffd" if c >= "\udc80" else f"\\u{ord(c):04x}"
    text = token.decode("utf-8", "surrogateescape")
    return '"' + re.sub('["\\\\\0-\x1f\x7f-\x9f\udc80-\udcff]', escape, text) + '"'


def journey(model, tokenizer, text):
    """The lines that tests/journey prints."""
    _, tokens, scores, sections = tokenizer
    ids, name = encode(text, tokens, scores, sections), [piece(token) for token in tokens]
    yield "position    id  token"
    yield from (f"{i:8} {t:5}  {name[t]}" for i, t in enumerate(ids))
    yield "\nlayers |x|  next           share, position and token that each head attends to most"
    for l, (x, shares) in enumerate(model.forward(ids)):
        p = softmax(model.classify(x[-1:]))[0]
        line = f"{l:3} {np.linalg.norm(x[-1]):6.2f}  {p.max():.2f} {name[p.argmax()]:8}"
        heads = [f"  {s.max():.2f} {s.argmax()} {name[ids[s.argmax()]]:10}"
                 for s in (shares[:, -1] if l else ())]
        if l and not heads:                                     # a delta layer: what it keeps, and learns
            heads = [f"  keeps {keeps:.2f}, learns {learns:.2f}" for keeps, learns in zip(*(y[-1] for y in model.learned[2:]))]
        for start in range(0, max(len(heads), 1), 4):
            yield (line + "".join(heads[start:start + 4])).rstrip()
            line = " " * 25
    yield "\nnext token"
    yield from (f"{p[t]:10.4f}  {name[t]}" for t in np.argsort(-p, kind="stable")[:5])


def main():
    if len(sys.argv) not in (2, 3):
        print("usage: tests/reference.py [MODEL.bin] TEXT", file=sys.stderr)
        sys.exit(2)
    path = sys.argv[1] if len(sys.argv) == 3 else Path(__file__).parent / "tiny/tiny.bin"
    model = Model.from_bin(path)
    tokenizer = read_tokenizer(f"{path}.tokenizer", model.c["vocab_size"])
    print(*journey(model, tokenizer, sys.argv[-1]), sep="\n")


if __name__ == "__main__":
    main()

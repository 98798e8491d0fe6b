"""Checkpoints in Hugging Face's layout, made on the spot: a small tokenizer with Qwen3's rules, weights
and settings of any shape, and the file that export.py should make of them."""
import json
import math
import struct
from pathlib import Path

import numpy as np
import reference
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

# -- a tokenizer of the real kind, trained on a few sentences

ADDED = [(text, True) for text in """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|>
<|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|>
<|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()] + [
    (text, False) for text in """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>
<|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think>
</think>""".split()]

SENTENCES = """The old lighthouse keeper didn't like the wind, but he'd never say it's too much.
We're told they'll come back when the harvest is in; I'm sure you've heard that they won't.
user assistant system: answer the question, then think about the answer again.
    if (n > 0) { return f(n - 1) + 1; }  // a comment\n\n\tfor i in range(10):\n\t\tprint(i)\r\n
Waſſer, daſs, liſt, faſt, gaſt, laſt, maſt, raſt, haſt, Kunſt, Fürſt, Haſs, eſst, muſs, laſs.
Größe, naïve, crème brûlée, año, smörgåsbord, łódź, ğüneş, tiếng Việt.
Старый смотритель маяка не любил ветер. Ο φάρος ήταν παλιός.
灯塔的老看守人不喜欢风。燈台の老人は風が嫌いだった。등대지기는 바람을 싫어했다。
المنارة قديمة جدا. מגדלור ישן מאוד. पुराना प्रकाशस्तंभ। ประภาคารเก่า
1 22 333 4444 1999-12-31 3.14159 ½ ² Ⅷ ① ٣  🙂🎉👩‍🚀 -- ... !!! ???    ~~~
"""


def train_tokenizer(merges=220, text=SENTENCES, split=reference.SPLIT):
    tok = tokenizers.Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=256 + merges, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    assert tok.get_vocab_size() == 256 + merges
    tok.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)
                    for text, special in ADDED])
    data = json.loads(tok.to_str())
    for entry, (_, special) in zip(data["added_tokens"], ADDED):
        entry["special"] = special                  # add_tokens makes none special
    assert all("".join(pair) in data["model"]["vocab"] for pair in data["model"]["merges"])
    return tokenizers.Tokenizer.from_str(json.dumps(data))


# -- checkpoints

class Checkpoint:
    """A random checkpoint in memory, for tests to spoil, and what export.py should make of it."""

    def __init__(self, tokenizer: str, dtype="BF16", tensors=None, **config):
        self.tokenizer = json.loads(tokenizer)
        size = max(t["id"] for t in self.tokenizer["added_tokens"]) + 1
        self.eos = next(t["id"] for t in self.tokenizer["added_tokens"]
                        if t["content"] == "<|im_end|>")
        self.config = {
            "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 192,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 64, "vocab_size": size + 5, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
            "bos_token_id": self.eos - 2, "eos_token_id": self.eos} | config
        self.settings = {"eos_token": "<|im_end|>"}
        self.generation = {"eos_token_id": [self.eos, self.eos - 2], "do_sample": True,
                           "temperature": 0.6, "top_p": 0.95, "top_k": 20}
        self.dtype, self.prefix, self.files = dtype, "model.", {}
        self.qwen2 = self.config["architectures"] == ["Qwen2ForCausalLM"]
        self.n_experts = self.config.get("num_experts", self.config.get("num_local_experts", 0))
        self.tensors = tensors if tensors is not None else self.random_tensors()

    def random_tensors(self):
        """With what a quantization may get wrong in the first rows of each matrix."""
        rng = np.random.default_rng(1)
        tensors = {}
        for name, shape in self.shapes():
            x = rng.standard_normal(shape).astype(np.float32) * np.float32(0.05)
            if len(shape) == 2 and not name.endswith("mlp.gate.weight"):
                x[0, :32] = 0  # a group of zeros, or half of one
                x[1, :64] = np.arange(64) / 2 ** 24  # subnormal in f16
                x[2, :64] = (np.arange(64) - 31.5) * 4  # ties: max 127 / 127 is a scale of 1
                x[2, 0] = 127
                x[3] *= 2.0 ** 9
            tensors[name] = x
        return tensors

    def shapes(self):
        c = self.config
        d, q = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
        h = c["moe_intermediate_size" if self.n_experts else "intermediate_size"]
        kv = c["num_key_value_heads"] * c["head_dim"]
        attention = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q)}
        yield "embed_tokens.weight", (c["vocab_size"], d)
        for layer in (f"layers.{i}." for i in range(c["num_hidden_layers"])):
            yield layer + "input_layernorm.weight", (d,)
            for name, shape in attention.items():
                yield f"{layer}self_attn.{name}_proj.weight", shape
            for name in "qkv" if self.qwen2 else ():
                yield f"{layer}self_attn.{name}_proj.bias", attention[name][:1]
            for name in () if self.qwen2 else "qk":
                yield f"{layer}self_attn.{name}_norm.weight", (c["head_dim"],)
            yield layer + "post_attention_layernorm.weight", (d,)
            if self.n_experts:
                yield layer + "mlp.gate.weight", (self.n_experts, d)
            for mlp in self.feed_forwards():
                for name, shape in ("gate", (h, d)), ("up", (h, d)), ("down", (d, h)):
                    yield f"{layer}{mlp}.{name}_proj.weight", shape
        yield "norm.weight", (d,)
        if not c["tie_word_embeddings"]:
            yield "lm_head.weight", (c["vocab_size"], d)

    def feed_forwards(self):
        return [f"mlp.experts.{i}" for i in range(self.n_experts)] or ["mlp"]

    def stored(self):
        """name in the file -> (dtype, array as stored, its fp32 value)."""
        for name, x in self.tensors.items():
            full = name if name.startswith("lm_head") else self.prefix + name
            if self.dtype == "BF16":
                raw = (x.view(np.uint32) >> 16).astype("<u2")
                value = (raw.astype(np.uint32) << 16).view(np.float32)
            else:
                raw = x.astype({"F16": "<f2", "F32": "<f4"}[self.dtype])
                value = raw.astype(np.float32)
            yield full, raw, value

    def save(self, folder: Path, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        items = [(name, raw) for name, raw, _ in self.stored()]
        if shards == 1:
            self.files["model.safetensors"] = safetensors(items, self.dtype)
        else:  # dealt out like cards: every layer lies in several files
            places = {}
            for i in range(shards):
                shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
                self.files[shard] = safetensors(items[i::shards], self.dtype)
                places |= {name: shard for name, _ in items[i::shards]}
            self.files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": places}
        self.files = {"config.json": self.config, "generation_config.json": self.generation,
                      "tokenizer.json": self.tokenizer,
                      "tokenizer_config.json": self.settings} | self.files
        for name, content in self.files.items():
            if isinstance(content, dict):
                content = json.dumps(content)
            if content is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content if isinstance(content, bytes)
                                            else content.encode())
        return folder

    def expected(self, group: int = 64) -> bytes:
        """OUT.bin with 8 bits, by reference.py."""
        values = {name: value for name, (_, _, value) in zip(self.tensors, self.stored())}
        return reference.Model.from_tensors(self.config, values, group=group).to_bytes()


def safetensors_head(shapes, dtype):
    """The header of a file with tensors of such names and shapes, and the size of their data."""
    head, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes:
        begin, end = end, end + {"F32": 4}.get(dtype, 2) * math.prod(shape)
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text, end


def safetensors(items, dtype) -> bytes:
    head, _ = safetensors_head([(name, raw.shape) for name, raw in items], dtype)
    return head + b"".join(raw.tobytes() for _, raw in items)


CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

HYBRID = CHATML.replace("{% endif %}", "{% if enable_thinking is defined and not enable_thinking %}"
                        "<think>\n\n</think>\n\n{% endif %}{% endif %}")


def random_weights(rng, shapes, qwen2):
    """Weights that make the output depend on everything: sharp logits, attention that matters,
    experts of different weight, and q and k so small that the epsilon of their norms shows; in
    Qwen2, which has biases instead of these norms, as large as the biases."""
    qk, w = 1.5 if qwen2 else 0.003, {}
    rms = {"embed_tokens": 0.1, "lm_head": 0.1, "q_proj": qk, "k_proj": qk, "v_proj": 0.3,
           "o_proj": 1, "gate": 2, "gate_proj": 1.5, "up_proj": 0.5, "down_proj": 0.3}
    mean = {"q_norm": 1.7, "k_norm": 1.7, "norm": 20}
    for name, shape in shapes:
        *_, part, kind = name.split(".")
        alone = kind == "bias" or part in ("embed_tokens", "lm_head")
        inner = 1 if alone else shape[-1] ** -0.5
        if part in rms:
            w[name] = rng.standard_normal(shape, np.float32) * np.float32(rms[part] * inner)
        else:
            x = mean.get(part, 1) * (inner if part == "norm" else 1)    # logits with an rms of 2
            w[name] = (x * (1 + 0.2 * rng.standard_normal(shape))).astype(np.float32)
    w["embed_tokens.weight"][-1] = 0                            # groups of zeros have scale 0
    return w


def make_checkpoint(directory, tokenizer, seed=1, dim=64, hidden_dim=128, n_layers=2, n_heads=4,
                    n_kv_heads=2, head_dim=32, tied=True, theta=1000000, eps=1e-6, max_len=512,
                    yarn=None, dtype="BF16", shards=1, prefix="model.", pad_to=0, new_keys=False,
                    weights={}, template=CHATML, eos="<|im_end|>", generation=None, qwen2=False, n_experts=0,
                    n_experts_used=2, topk_norm=True):
    """Write a Qwen3 checkpoint, random but for the given weights. yarn: the rope_scaling dict.
    qwen2: a Qwen2 one, where head_dim is not in the config and must be dim / n_heads. n_experts: a mixture
    of experts, hidden_dim is one expert's. new_keys: as transformers 5 writes config.json."""
    vocab_size = max(pad_to, tokenizer.get_vocab_size())
    config = dict(model_type="qwen3", attention_bias=False, head_dim=head_dim, hidden_act="silu",
                  hidden_size=dim, intermediate_size=hidden_dim, max_position_embeddings=max_len,
                  num_attention_heads=n_heads, num_hidden_layers=n_layers,
                  num_key_value_heads=n_kv_heads, rms_norm_eps=eps, sliding_window=None,
                  tie_word_embeddings=tied, use_sliding_window=False, vocab_size=vocab_size)
    if qwen2:
        assert head_dim * n_heads == dim
        config |= dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=4096)
        del config["attention_bias"]
    if n_experts:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                   "num_local_experts" if new_keys else "num_experts": n_experts,
                   "num_experts_per_tok": n_experts_used, "moe_intermediate_size": hidden_dim,
                   "intermediate_size": 3 * hidden_dim, "norm_topk_prob": topk_norm,
                   "decoder_sparse_step": 1, "mlp_only_layers": []}
    checkpoint = Checkpoint(tokenizer.to_str(), dtype, {}, **config)
    rng = np.random.default_rng(seed)
    checkpoint.tensors = random_weights(rng, checkpoint.shapes(), qwen2) | weights
    if qwen2:
        del checkpoint.config["head_dim"]
    if new_keys:
        del checkpoint.config["rope_theta"]
        checkpoint.config |= {"dtype": "bfloat16", "rope_parameters": {
            "rope_type": "default", **(yarn or {}), "rope_theta": theta}}
    else:
        checkpoint.config |= {"torch_dtype": "bfloat16", "rope_scaling": yarn, "rope_theta": theta}
    checkpoint.prefix = prefix
    checkpoint.settings |= {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "chat_template": template,
                            "eos_token": eos}
    if generation is not None:
        checkpoint.generation = {"eos_token_id": checkpoint.generation["eos_token_id"], **generation}
    return checkpoint.save(Path(directory), shards)


def make_table_model(directory, tokenizer, states, logits, dim=64, **kwargs):
    """A checkpoint whose next-token logits depend on the last token alone, as a table says.

    states: the tokens told apart (ids); all others are state 0. logits (vocab, 1 + len(states)):
    column 0 after any other token, column i + 1 after states[i]. The layers add nothing.
    """
    vocab, columns = logits.shape
    assert columns == 1 + len(states) <= dim
    embedding = np.zeros((vocab, dim), np.float32)
    embedding[:, 0] = 1
    for i, token in enumerate(states):
        embedding[token] = np.eye(dim)[i + 1]
    head = np.zeros((vocab, dim), np.float32)
    head[:, :columns] = logits
    weights = {"embed_tokens.weight": embedding, "lm_head.weight": head,
               "norm.weight": np.full(dim, dim ** -0.5, np.float32),
               "layers.0.self_attn.o_proj.weight": np.zeros((dim, 64), np.float32),
               "layers.0.mlp.down_proj.weight": np.zeros((dim, 64), np.float32)}
    return make_checkpoint(directory, tokenizer, dim=dim, hidden_dim=64, n_layers=1, n_heads=2,
                           n_kv_heads=1, head_dim=32, tied=False, weights=weights, dtype="F32",
                           **kwargs)


def make_embedding(directory):
    """Turns a saved checkpoint into an embedding model's, as sentence-transformers lays it out."""
    (directory / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{name}", "path": path} for (
        name, path) in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    return directory


def with_ends(tokenizer, single):
    """The tokenizer with a post-processor that puts added tokens around a text, as in "$A <|endoftext|>"."""
    tok = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    ends = [(text, tok.token_to_id(text)) for text in set(single.split()) - {"$A"}]
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=ends)])
    return tok


def experts(n: int, key="num_experts", used=1, **config) -> dict:
    """What a mixture of experts has in its config.json; intermediate_size belongs to no layer."""
    return {"architectures": ["Qwen3MoeForCausalLM"], key: n, "num_experts_per_tok": used,
            "moe_intermediate_size": 64, "intermediate_size": 1000, "norm_topk_prob": True} | config


MIXTURE = experts(3, used=2, qkv_bias=False, use_qk_norm=True, mlp_only_layers=[], shared_expert_intermediate_size=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def with_config(folder: Path, changes: dict) -> Path:
    """Changes a saved checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_tensors(folder: Path, dtype: str, shapes: dict) -> Path:
    """Adds tensors of zeros to a saved checkpoint's model.safetensors, or puts them in others' place."""
    data = (folder / "model.safetensors").read_bytes()
    size, = struct.unpack("<Q", data[:8])
    head, data = json.loads(data[8:8 + size]), data[8 + size:]
    end, size_of = len(data), {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2}
    head |= {f"visual.{name}": head.pop(name) for name in shapes if name in head}  # they stay, by another name
    for name, shape in shapes.items():
        begin, end = end, end + size_of.get(dtype, 4) * math.prod(shape)
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data + bytes(end - len(data)))
    return folder


def vision_language(ck, tied=True):
    """The checkpoint as the text part of a Qwen3-VL, in the layout of the published ones."""
    text = ck.config | {"model_type": "qwen3_vl_text", "rope_scaling": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
    for key in ("architectures", "tie_word_embeddings"):
        text.pop(key)
    ck.config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
                 "tie_word_embeddings": tied, "image_token_id": 151655, "vision_config": {"hidden_size": 8, "depth": 1}}
    ck.prefix = "model.language_model."
    return ck


def sentence_transformers(ck, pooling, *modules):
    """Makes it an embedding model, as sentence-transformers saves one."""
    ck.files["modules.json"] = json.dumps([
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "",
         "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(modules)])
    ck.files["1_Pooling/config.json"] = json.dumps(pooling)
    return ck


LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True, "include_prompt": True}


def sparse_checkpoint(ck, folder: Path, **config) -> Path:
    """Large weights that take no space: an embedding of 240 MB in two dozen layers' company, as
    holes in two shards."""
    ck.config |= {"hidden_size": 1024, "vocab_size": 120_000, "num_hidden_layers": 24} | config
    shapes = dict(ck.shapes())
    ck.tensors = {}
    ck.save(folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for i in (0, 1):
        shard, names = f"model-{i}.safetensors", sorted(shapes)[i::2]
        places |= {"model." + name: shard for name in names}
        head, size = safetensors_head([("model." + name, shapes[name]) for name in names], "BF16")
        with open(folder / shard, "wb") as file:
            file.write(head)
            file.truncate(len(head) + size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder

#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "numpy>=1.24",
#   "tokenizers>=0.22",
#   "jinja2>=3.1",
#   "huggingface_hub>=0.25",
#   "tqdm>=4.60",
#   "gguf>=0.17",
# ]
# ///
"""Converts a checkpoint of Qwen3 or Qwen2 to the two files that qwen3.c reads.

    python export.py SOURCE [OUT.bin] [options]      (uv run export.py ... needs no set-up)

SOURCE is a checkpoint directory, a name on the hub such as Qwen/Qwen3-0.6B, or a GGUF file (of
several parts the first). Written are

    OUT.bin              a 256-byte header and the weights: norms in fp32, matrices as Q8_0
    OUT.bin.tokenizer    the vocabulary, then an extension: what the tokenizer, the chat and the
                         sampler need beyond it

both as the README's file format section describes them. Without OUT.bin the name is SOURCE's last
part + ".bin", in the current directory. (An older export.py took OUT.bin first; so does this one.)

    --group-size N       weights per scale: 32, 64, 128 or 256. Without it 64, but 32 where 64 does
                         not divide the model's dimensions, and for a GGUF file in Q8_0, whose
                         blocks of 32 then go over as they are
    --yarn FACTOR        makes the context so many times as long (YaRN), at some cost for short
                         texts, as Qwen advises for longer ones than the model was trained with
    --check              writes nothing but reads a finished OUT.bin and its tokenizer file back:
                         each tensor's quantization error on stdout, and exit status 1 if a value
                         is off by more than rounding explains or anything else differs
    --plot FILE.png      the same, and a picture of the errors (needs matplotlib)

    checkpoint                                   this file
    config.json                               ->  read_config, header
    modules.json, 1_Pooling/config.json       ->  is_embedding
    *.safetensors                             ->  open_checkpoint, quantize, write_model
    tokenizer.json, tokenizer_config.json     ->  read_vocabulary
    the tokenizers package itself             ->  unicode_sections
    chat_template.jinja                       ->  chat_pieces
    generation_config.json                    ->  end_ids, sampling, repetition_penalty
    *.gguf                                    ->  read_gguf: all of these in one file

Weights pass through in pieces of 1 MB, so memory does not depend on the model's size. Both files
get their names only when both are complete. Whatever can't be converted exactly is refused by name.
Exit status: 0 done, 1 refused or failed (one line on stderr), 2 wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys


def on_signals(leave: Callable[[int], object]) -> None:
    """Calls leave(exit status) at Ctrl-C and SIGTERM."""
    signal.signal(signal.SIGINT, lambda *_: leave(130))
    signal.signal(signal.SIGTERM, lambda *_: leave(143))


if __name__ == "__main__":  # at once during the slow imports, where exceptions become others
    on_signals(os._exit)

import argparse
import importlib.util
import json
import math
import mmap
import re
import shutil
import string
import struct
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, NamedTuple, NoReturn

try:
    import gguf
    import jinja2.sandbox
    import numpy as np
    import tokenizers
    from tqdm import tqdm
except ImportError as error:
    block = Path(__file__).read_text(encoding="utf-8").split("# ///")[1]
    packages = " ".join(re.findall(r'"([a-z_0-9]+)>=', block))
    sys.exit(f"export.py: {error}, expected its packages, found them missing: "
             f"run it as `uv run export.py ...`, or first `pip install {packages}`")

# ---------------------------------------------------------------------------- refusals and files

notes: list[str] = []  # what the user should know; printed after success, an error stands alone


class Refused(Exception):
    """Why the checkpoint can't be converted; the text is all that the user gets to see."""


def refuse(where: object, what: str, expected: object, found: object) -> NoReturn:
    raise Refused(f"{where}: {what}, expected {expected}, found {found}")


@contextmanager
def structure_of(path: Path) -> Iterator[None]:
    """Within it, whatever goes wrong is the fault of the file, which is not as its format says."""
    try:
        yield
    except (Refused, OSError):
        raise
    except Exception as error:  # KeyError, TypeError, ..., and the tokenizers package's own
        refuse(path, "broken", "the structure of such a file", f"{type(error).__name__}: {error}")


def parse_json(text: bytes, path: Path) -> dict:
    with structure_of(path):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError(f"{type(value).__name__}, not an object")
    return value


def read_json(path: Path, optional: bool = False) -> dict:
    if optional and not path.exists():
        return {}
    return parse_json(path.read_bytes(), path)


def some(names: list[str]) -> str:
    """The first names of a list that may be long."""
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more or "none"


# ---------------------------------------------------------------------------- source

class Source(NamedTuple):
    """What is converted, as a Hugging Face directory holds it. A GGUF file is read as one, too."""
    path: Path
    config: dict  # config.json
    tokenizer: dict  # tokenizer.json
    settings: dict  # tokenizer_config.json
    generation: dict  # generation_config.json
    template: str | None  # of the chat
    around: tuple[list[int], list[int]]  # ids before and after every text
    tensors: dict[str, Tensor]  # by name, with or without "model."
    embedding: bool  # the model's task is to make one vector of a text
    group_size: int | None = None  # the one that loses nothing

    def file(self, name: str) -> Path:
        """Where the contents of that file come from."""
        return self.path / name if self.path.is_dir() else self.path


def is_embedding(folder: Path) -> bool:
    """Does sentence-transformers make one vector of a text with this model? Refuses it if that is
    not the last token's, which is all that qwen3.c can do (it always normalizes)."""
    modules = folder / "modules.json"
    if not modules.exists():
        return False
    with structure_of(modules):
        parts = {part["type"].rpartition(".")[2]: part["path"]
                 for part in json.loads(modules.read_bytes())}
    if "Pooling" not in parts:
        return False
    if unknown := sorted(parts.keys() - {"Transformer", "Pooling", "Normalize"}):
        refuse(modules, "modules", "Transformer, Pooling and Normalize", some(unknown))
    pooling = folder / parts["Pooling"] / "config.json"
    how = [name.removeprefix("pooling_mode_") for name, value in read_json(pooling).items()
           if name.startswith("pooling_mode_") and value is True]
    if how != ["lasttoken"]:
        refuse(pooling, "pooling is not supported", "lasttoken alone", some(how))
    return True


def read_folder(folder: Path) -> Source:
    if not (folder / "config.json").exists():
        refuse(folder, "no checkpoint", "config.json in it", "none")
    where = folder / "tokenizer.json"
    if not where.is_file() and (folder / "vocab.json").is_file():
        refuse(where, "missing", "the fast tokenizer's file", "vocab.json, which is not supported")
    tokenizer = read_json(where)
    with structure_of(where):
        around = around_text(tokenizer)
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    generation = read_json(folder / "generation_config.json", optional=True)
    return Source(folder, read_json(folder / "config.json"), tokenizer, settings, generation,
                  chat_template(folder, settings), around, open_checkpoint(folder),
                  is_embedding(folder))


# ---------------------------------------------------------------------------- config.json

@dataclass
class Config:
    """The header's fields, with qwen3.c's names."""
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    head_dim: int
    tied: bool  # the classifier is the token embedding
    group_size: int  # values per quantization scale
    rope_theta: float
    eps: float
    yarn: bytes  # the header from 0x38 on, empty without YaRN
    qkv_bias: bool
    no_qk_norm: bool


def positive(where: Path, config: dict, key: str, kind: type, default: float | None = None):
    """config[key] as a positive int or float that the header's int32 or fp32 can hold."""
    value = config.get(key)
    value = default if value is None else value
    if kind is float and type(value) in (int, float):
        with np.errstate(all="ignore"):
            if 0 < np.float32(value) < np.inf:
                return float(value)
    elif type(value) is int and 0 < value < 2**31:
        return value
    refuse(where, key, f"a positive {kind.__name__}", repr(value))


QWEN2 = ["Qwen2ForCausalLM"]  # Qwen2, Qwen2.5: biases on q, k and v, no QK-norm


def check_family(where: Path, config: dict) -> None:
    """Refuses what computes something else than a dense Qwen3 or Qwen2 with full attention."""
    layer_types = config.get("layer_types")
    sliding = (config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
               and config.get("max_window_layers", 28) < config["num_hidden_layers"])
    for key, supported, expected in [
        ("architectures", config.get("architectures") in (["Qwen3ForCausalLM"], QWEN2),
         "Qwen3ForCausalLM or Qwen2ForCausalLM"),
        ("quantization_config", not config.get("quantization_config"), "bf16, f16 or f32 weights"),
        ("hidden_act", config.get("hidden_act", "silu") == "silu", "silu"),
        ("attention_bias", config["architectures"] == QWEN2 or not config.get("attention_bias"),
         "false"),
        ("layer_types", set(layer_types or ()) <= {"full_attention"}, "full_attention only"),
        ("use_sliding_window", layer_types or not sliding, "full attention in every layer"),
        ("partial_rotary_factor", config.get("partial_rotary_factor") in (None, 1), "1"),
    ]:
        if not supported:
            refuse(where, f"{key} is not supported", expected, repr(config.get(key)))


def unless(value: float, base: float) -> float:
    """The value, or the 0 that stands for base in the header."""
    return 0.0 if np.float32(value) == np.float32(base) else value


def yarn_fields(where: Path, rope: dict, max_seq_len: int) -> bytes:
    """The header from 0x38 on: u32 1, f32 factor, i32 original length, f32 beta_fast, beta_slow,
    attention_factor, u32 not truncated. Resolved as in transformers' _compute_yarn_parameters."""
    number = partial(positive, where, rope, kind=float)
    original = positive(where, rope, "original_max_position_embeddings", int, max_seq_len)
    factor = number("factor", default=max_seq_len / original if "factor" in rope else None)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    attention_factor = magnitude(1)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = magnitude(number("mscale")) / magnitude(number("mscale_all_dim"))
    elif rope.get("mscale") or rope.get("mscale_all_dim"):
        notes.append("mscale or mscale_all_dim alone has no effect, as in transformers")
    attention_factor = number("attention_factor", default=attention_factor)
    beta_fast = number("beta_fast") if rope.get("beta_fast") else 32
    beta_slow = number("beta_slow") if rope.get("beta_slow") else 1
    if type(truncate := rope.get("truncate", True)) is not bool:
        refuse(where, "truncate", "true or false", repr(truncate))
    return struct.pack("<Ifi3fI", 1, factor, original, unless(beta_fast, 32), unless(beta_slow, 1),
                       unless(attention_factor, 0.1 * math.log(factor) + 1), not truncate)


def rope_of(config: dict) -> tuple[dict, object]:
    """(parameters, kind) by the old key (rope_scaling) or the new one, as transformers has it."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope, rope.get("rope_type", rope.get("type", "default"))


def read_rope(where: Path, config: dict, max_seq_len: int) -> tuple[float, bytes]:
    """(theta, YaRN's header fields if any), with transformers' precedence and defaults."""
    rope, kind = rope_of(config)
    theta = positive(where, config | rope, "rope_theta", float, 10000.0)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "attn_factor"}
    if kind == "yarn":
        rope = rope | {key: config[key] for key in ["original_max_position_embeddings"]
                       if key in config}
        known |= {"factor", "original_max_position_embeddings", "truncate", "attention_factor",
                  "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    elif kind != "default":
        refuse(where, "rope_type is not supported", "default or yarn", repr(kind))
    if unknown := sorted(rope.keys() - known):
        refuse(where, f"rope scaling {kind}", f"no keys but {', '.join(sorted(known))}",
               some(unknown))
    if rope.get("partial_rotary_factor") not in (None, 1):
        refuse(where, "partial_rotary_factor", "1", repr(rope["partial_rotary_factor"]))
    if "attn_factor" in rope:
        notes.append("rope_scaling's attn_factor is ignored, as transformers ignores it")
    return theta, yarn_fields(where, rope, max_seq_len) if kind == "yarn" else b""


def with_yarn(where: Path, config: dict, factor: float) -> dict:
    """config.json as Qwen's model cards change it for long texts. Qwen3's 40960 positions are the
    32768 that it was trained with and 8192 for the answer."""
    rope, kind = rope_of(config)
    if kind != "default":
        refuse(where, "--yarn", "a model without rope scaling", repr(kind))
    native = positive(where, config, "max_position_embeddings", int)
    original = 32768 if native == 40960 else native
    return config | {"max_position_embeddings": int(factor * original), "rope_scaling": rope | {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}}


def read_config(source: Source, group_size: int | None = None,
                yarn_factor: float | None = None) -> Config:
    where, config = source.file("config.json"), source.config
    with structure_of(where):
        check_family(where, config)
        if yarn_factor:
            config = with_yarn(where, config, yarn_factor)
        integer = partial(positive, where, config, kind=int)
        max_seq_len = integer("max_position_embeddings")
        theta, yarn = read_rope(where, config, max_seq_len)
        qwen2 = config["architectures"] == QWEN2
        dim, n_heads = integer("hidden_size"), integer("num_attention_heads")
        c = Config(
            dim=dim, hidden_dim=integer("intermediate_size"),
            n_layers=integer("num_hidden_layers"), n_heads=n_heads,
            n_kv_heads=integer("num_key_value_heads", default=n_heads),
            vocab_size=integer("vocab_size"), max_seq_len=max_seq_len,
            head_dim=integer("head_dim", default=dim // n_heads if qwen2 else 128),
            group_size=group_size or source.group_size or 64, rope_theta=theta, yarn=yarn,
            tied=(config.get("tie_word_embeddings", False) is True
                  or source.embedding),  # which has no use for a classifier
            eps=positive(where, config, "rms_norm_eps", float, 1e-6), qkv_bias=qwen2,
            no_qk_norm=qwen2)
    if c.n_heads % c.n_kv_heads:
        refuse(where, "num_key_value_heads", f"a divisor of {c.n_heads}", c.n_kv_heads)
    if c.head_dim % 2:
        refuse(where, "head_dim", "an even number", c.head_dim)
    widths = {"hidden_size": c.dim, "intermediate_size": c.hidden_dim,
              "num_attention_heads * head_dim": c.n_heads * c.head_dim}
    if not group_size and any(width % 64 for width in widths.values()):
        c.group_size = 32
    for key, width in widths.items():
        if width % c.group_size:
            refuse(where, key, f"a multiple of {c.group_size}, the quantization group", width)
    return c


def header(c: Config) -> bytes:
    """The 256 bytes that OUT.bin begins with (README)."""
    fields = struct.pack("<I11i", 0x616A6331, 1, c.dim, c.hidden_dim, c.n_layers, c.n_heads,
                         c.n_kv_heads, c.vocab_size, c.max_seq_len, c.head_dim, c.tied,
                         c.group_size)
    fields += struct.pack("<2f", unless(c.rope_theta, 1e6), unless(c.eps, 1e-6)) + c.yarn
    fields = fields.ljust(0x54, b"\0") + struct.pack("<2I", c.qkv_bias, c.no_qk_norm)
    return fields.ljust(256, b"\0")


# ---------------------------------------------------------------------------- tensors

# dtype -> (elements, bytes) of its blocks; a plain number is a block of one
BLOCK = {kind.name: block for kind, block in gguf.GGML_QUANT_SIZES.items()}
PLAIN = {"BF16", "F16", "F32"}  # what a checkpoint may hold


@dataclass
class Tensor:
    """A tensor in a safetensors or GGUF file, row-major."""
    name: str
    file: BinaryIO
    offset: int  # of its first byte in the file
    dtype: str  # safetensors' name or ggml's, which are the same where both have it
    shape: tuple[int, ...]

    def bytes_of(self, count: int) -> int:
        elements, size = BLOCK[self.dtype]
        return count // elements * size

    def stored(self, start: int, count: int) -> bytes:
        """Elements start .. start+count-1 of the flattened tensor, whole blocks."""
        need = self.bytes_of(count)
        raw = os.pread(self.file.fileno(), need, self.offset + self.bytes_of(start))
        if len(raw) < need:
            refuse(self.file.name, f"truncated in {self.name}", f"{need} bytes", len(raw))
        return raw

    def read(self, start: int, count: int) -> np.ndarray:
        """The same elements as (count,) fp32, writable."""
        raw = self.stored(start, count)
        if self.dtype == "BF16":  # the upper half of an fp32
            bits = np.frombuffer(raw, "<u2").astype("<u4")
            return np.left_shift(bits, 16, out=bits).view("<f4")
        if self.dtype in ("F16", "F32"):
            return np.frombuffer(raw, "<f2" if self.dtype == "F16" else "<f4").astype("<f4")
        return gguf.dequantize(np.frombuffer(raw, np.uint8), gguf.GGMLQuantizationType[self.dtype])

    def read_q8(self, start: int, count: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The same elements as Q8_0: int8 values (count,), fp32 scales (count / group_size,). A
        GGUF's own Q8_0, blocks of an f16 scale and 32 values, goes over as it is."""
        if (self.dtype, group_size) == ("Q8_0", 32):
            blocks = np.frombuffer(self.stored(start, count), [("scale", "<f2"), ("q", "i1", 32)])
            q, scale = blocks["q"].ravel(), blocks["scale"].astype("<f4")
            self.check_finite(scale)
            return q, scale
        x = self.read(start, count)
        self.check_finite(x)
        return quantize(x, group_size)

    def check_finite(self, x: np.ndarray) -> None:
        if not np.isfinite(x).all():
            refuse(self.file.name, self.name, "finite numbers", "infinity or NaN")


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, which is: u64 length of the header; the header, JSON {name: {dtype,
    shape, data_offsets: [begin, end)}}; the data, which the tensors fill without hole or overlap.
    """
    file = open(path, "rb")
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    limit = min(size - 8, 100_000_000)  # as the safetensors library has it
    if not 2 <= length <= limit:
        refuse(path, "broken safetensors", f"a header of 2 to {limit} bytes", length)
    head = parse_json(file.read(length), path)
    head.pop("__metadata__", None)
    tensors, end = {}, 0
    with structure_of(path):
        for name, entry in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, stop = entry["data_offsets"]
            need = math.prod(shape) * BLOCK[dtype][1] if dtype in PLAIN else stop - begin
            if begin != end or need < 0 or stop - begin != need:
                refuse(path, f"data_offsets of {name}", [end, end + need], [begin, stop])
            tensors[name] = Tensor(name, file, 8 + length + begin, dtype, shape)
            end = stop
    if 8 + length + end != size:
        refuse(path, "truncated or oversized", f"{8 + length + end} bytes", size)
    return tensors


def open_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards in model.safetensors.index.json."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return open_safetensors(single)
    if not index.is_file():
        refuse(folder, "no weights", f"{single.name} or {index.name}",
               some(sorted(path.name for path in folder.iterdir())))
    tensors: dict[str, Tensor] = {}
    with structure_of(index):
        places = read_json(index)["weight_map"]
        for shard in sorted(set(places.values())):
            if Path(shard).name != shard or not (folder / shard).is_file():
                refuse(folder / shard, "missing", f"this file, as {index.name} lists it", "none")
            for name, tensor in open_safetensors(folder / shard).items():
                if places.get(name) != shard:
                    refuse(folder / shard, f"holds {name}", f"it in {places.get(name, 'no shard')}"
                           f" as {index.name} says", "it here")
                tensors[name] = tensor
        if absent := sorted(places.keys() - tensors.keys()):
            refuse(index, "its shards are incomplete", some(absent), "no such tensor in them")
    return tensors


def layout(c: Config) -> list[tuple[str, tuple[int, ...]]]:
    """(name without "model.", shape) of every tensor of OUT.bin in the order of the file. Norms and
    biases, which have one dimension, stay fp32; the (out, in) matrices are quantized."""
    def layers(name: str, *shape: int, kind: str = "weight") -> list[tuple[str, tuple[int, ...]]]:
        return [(f"layers.{i}.{name}.{kind}", shape) for i in range(c.n_layers)]

    q_dim, kv_dim = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    return [
        *layers("input_layernorm", c.dim),
        *layers("post_attention_layernorm", c.dim),
        ("norm.weight", (c.dim,)),
        *([] if c.no_qk_norm else layers("self_attn.q_norm", c.head_dim)),
        *([] if c.no_qk_norm else layers("self_attn.k_norm", c.head_dim)),
        ("embed_tokens.weight", (c.vocab_size, c.dim)),
        *layers("self_attn.q_proj", q_dim, c.dim),
        *layers("self_attn.k_proj", kv_dim, c.dim),
        *layers("self_attn.v_proj", kv_dim, c.dim),
        *layers("self_attn.o_proj", c.dim, q_dim),
        *layers("mlp.gate_proj", c.hidden_dim, c.dim),
        *layers("mlp.down_proj", c.dim, c.hidden_dim),
        *layers("mlp.up_proj", c.hidden_dim, c.dim),
        *([] if c.tied else [("lm_head.weight", (c.vocab_size, c.dim))]),
        *(layers("self_attn.q_proj", q_dim, kind="bias") if c.qkv_bias else []),
        *(layers("self_attn.k_proj", kv_dim, kind="bias") if c.qkv_bias else []),
        *(layers("self_attn.v_proj", kv_dim, kind="bias") if c.qkv_bias else []),
    ]


def match_tensors(where: Path, stored: dict[str, Tensor], c: Config) -> list[Tensor]:
    """The tensors of layout(), found under their names with or without "model.", all checked."""
    found = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        refuse(where, "tensor names", "each with or without model.", "some both ways")
    if c.n_layers > len(found):  # the list of what is missing could be endless
        refuse(where, "num_hidden_layers", f"no more than there are tensors, {len(found)}",
               c.n_layers)
    wanted = dict(layout(c))
    extra = [tensor.name for name, tensor in found.items() if name not in wanted
             and name != "lm_head.weight"  # stored by some although tied
             and not name.endswith(".inv_freq")]  # rope's frequencies, from older programs
    missing = [name for name in wanted if name not in found]
    if missing or extra:
        refuse(where, "tensors", "the ones that config.json implies",
               f"missing: {some(missing)}; left over: {some(extra)}")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape:
            refuse(where, f"shape of {tensor.name}", list(shape), list(tensor.shape))
        try:
            tensor.read(0, min(256, math.prod(shape)))
        except (KeyError, NotImplementedError):
            refuse(where, f"dtype of {tensor.name}", "BF16, F16, F32 or, in a GGUF file, one that "
                   "the gguf package dequantizes", tensor.dtype)
    return [found[name] for name in wanted]


# ---------------------------------------------------------------------------- OUT.bin

GROUP_SIZES = 32, 64, 128, 256
PIECE = 1 << 18  # elements at a time: 1 MB in fp32 stays in a core's cache between numpy's passes


def quantize(x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Q8_0 of x (n,) fp32, which is overwritten: q (n,) int8 in -127..127 and scale (n/group_size,)
    fp32 with x ~= q * scale; scale = max|x| / 127, q = rint(x / scale), halves to even. Where the
    scale is 0 (a group of zeros, or too small for fp32) all q are 0."""
    peak = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, group_size))
    scale = peak / np.float32(127)
    x = x.reshape(-1, group_size)
    x /= np.where(scale > 0, scale, np.float32(1))[:, None]
    np.rint(x, out=x)
    np.clip(x, -127, 127, out=x)  # a scale in the subnormals is coarse: x / scale may reach 190
    return x.astype(np.int8).ravel(), scale


def write_at(file: BinaryIO, data: np.ndarray, offset: int) -> None:
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file.fileno(), view, offset)
        view, offset = view[written:], offset + written


def read_at(file: BinaryIO, dtype: str, count: int, offset: int) -> np.ndarray:
    return np.frombuffer(os.pread(file.fileno(), count * np.dtype(dtype).itemsize, offset), dtype)


def stored_size(shape: tuple[int, ...], group_size: int) -> int:
    """Bytes of a tensor in OUT.bin: fp32 values, or int8 values and an fp32 scale per group."""
    n = math.prod(shape)
    return 4 * n if len(shape) == 1 else n + 4 * (n // group_size)


def in_pieces(work: Callable, tensors: list[Tensor],
              group_size: int) -> Iterator[tuple[Tensor, list]]:
    """Yields each of the tensors, which come in the order of layout(), with the results of
    work(tensor, its offset in OUT.bin, start, count) for its pieces. Several run at once."""
    offset = 256
    total = sum(tensor.bytes_of(math.prod(tensor.shape)) for tensor in tensors)
    with (ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,  # numpy and the kernel let go
          tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar):  # None: no terminal
        for tensor in tensors:
            size, results = math.prod(tensor.shape), []
            starts = range(0, size, PIECE)
            counts = [min(PIECE, size - start) for start in starts]
            for result in pool.map(partial(work, tensor, offset), starts, counts):
                bar.update(tensor.bytes_of(counts[len(results)]))
                results.append(result)
            yield tensor, results
            offset += stored_size(tensor.shape, group_size)


def write_model(out: BinaryIO, c: Config, tensors: list[Tensor]) -> None:
    """The header and the tensors, to an empty file."""
    def convert(tensor: Tensor, offset: int, start: int, count: int) -> None:
        if len(tensor.shape) == 1:
            x = tensor.read(start, count)
            tensor.check_finite(x)
            write_at(out, x, offset + 4 * start)
        else:
            q, scale = tensor.read_q8(start, count, c.group_size)
            write_at(out, q, offset + start)
            write_at(out, scale, offset + math.prod(tensor.shape) + 4 * (start // c.group_size))

    write_at(out, np.frombuffer(header(c), np.uint8), 0)
    for _ in in_pieces(convert, tensors, c.group_size):
        pass


# ---------------------------------------------------------------------------- tokenizer.json

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


STEPS = [{"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
         {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]


class Vocabulary(NamedTuple):
    tokens: dict[int, bytes]  # id -> the token's bytes
    scores: dict[int, float]  # id -> merge score, for the tokens that a merge makes
    added: dict[int, bool]  # id -> special: the added tokens, which only their own text makes
    nfc: bool  # text is NFC-normalized

    def added_ids(self, text: str | None) -> list[int]:
        """The id of the added token with this text, if there is one."""
        return [i for i in self.added if self.tokens[i].decode() == text]


def gpt2_alphabet() -> dict[int, int]:
    """str.translate table: the letters in which GPT-2 writes the bytes -> code points 0..255. The
    printable bytes are themselves, the n-th of the rest is U+0100+n; no other letter survives."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: 0xFFFF for byte in others}  # not in latin-1, so .encode("latin-1") refuses it
    return table | {b: b for b in printable} | {0x100 + n: byte for n, byte in enumerate(others)}


def check_pipeline(where: Path, data: dict) -> bool:
    """Refuses a tokenizer.json that does what qwen3.c does not. True if it normalizes to NFC."""
    model, steps = data["model"], (data["pre_tokenizer"] or {}).get("pretokenizers", [])
    if model.get("type") != "BPE":
        refuse(where, "model", "BPE", repr(model.get("type")))
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                "byte_fallback", "ignore_merges"):
        if model.get(key):
            refuse(where, f"model.{key} is not supported", "none", repr(model[key]))
    steps = [{key: step[key] for key in step if key != "trim_offsets"} for step in steps]
    if steps != STEPS:
        refuse(where, "pre_tokenizer is not supported", "Qwen's Split and ByteLevel",
               json.dumps(data["pre_tokenizer"]))
    normalizer = data["normalizer"]
    if normalizer in (None, {"type": "Sequence", "normalizers": []}):
        return False
    if normalizer not in ({"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}):
        refuse(where, "normalizer is not supported", "NFC or none", json.dumps(normalizer))
    return True


def check_merges(where: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """qwen3.c merges any two neighbours that make a token, best score first, and has no list of
    merges. That is the same if the package makes every token of its own text: two neighbours that
    make T can only meet as they do in T alone, and there the last step is one of T's merges."""
    bpe = tokenizers.models.BPE(vocab=vocab, merges=merges)
    for token in vocab:
        if len(bpe.tokenize(token)) != 1:
            refuse(where, f"token {token!r}", "merges that make it", "none that do")


def merge_scores(where: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict:
    """id -> -log(rank + 1) of the merge that makes the token, so that an earlier merge is higher.
    Several may make the same token, but one right after the other, or their order would matter."""
    scores: dict[int, float] = {}
    previous = -1
    for rank, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            refuse(where, f"merge {rank}", "tokens of the vocabulary", [left, right])
        made = vocab[left + right]
        if made not in scores:
            scores[made] = -math.log(rank + 1)
        elif made != previous:
            refuse(where, f"merge {rank} makes {left + right!r} again", "one rank", [left, right])
        previous = made
    return scores


def read_added(where: Path, data: dict, settings: dict) -> dict[str, tuple[int, bool]]:
    """text -> (id, special) of the added tokens in tokenizer.json. tokenizer_config.json may list
    them too, and makes those special that it says are, or gives a role; it must not add others,
    as transformers would give these ids of its own."""
    listed = settings.get("added_tokens_decoder") or {}
    for token in [*data["added_tokens"], *listed.values()]:
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            if token.get(flag):
                refuse(where, f"{flag} of added token {token['content']!r}", "false", "true")
    added = {token["content"]: (token["id"], token["special"]) for token in data["added_tokens"]}
    more = [(token["content"], int(i), token["special"]) for i, token in listed.items()]
    more += [(text, None, True) for text in role_tokens(settings).values()]
    more += [(token_text(token), None, True)
             for token in settings.get("additional_special_tokens") or []]
    for text, i, special in more:
        if text not in added or i not in (None, added[text][0]):
            refuse(where, "added tokens", f"{text!r} as in tokenizer_config.json", "it missing")
        added[text] = added[text][0], added[text][1] or special
    return added


def token_text(value: str | dict | None) -> str | None:
    """A token in tokenizer_config.json: none, its text, or an object with it."""
    return value["content"] if isinstance(value, dict) else value


def role_tokens(settings: dict) -> dict[str, str]:
    """bos_token, eos_token, ... -> its text, of those that tokenizer_config.json names."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {name: text for name in names if (text := token_text(settings.get(name)))}


def read_vocabulary(where: Path, data: dict, settings: dict, vocab_size: int) -> Vocabulary:
    """What tokenizer.json (where, data) and tokenizer_config.json (settings) say."""
    nfc = check_pipeline(where, data)
    added = read_added(where, data, settings)
    vocab = {text: i for text, i in data["model"]["vocab"].items() if text not in added}
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in data["model"]["merges"]]
    scores = merge_scores(where, vocab, merges)
    check_merges(where, vocab, merges)
    table = gpt2_alphabet()
    tokens = {i: text.translate(table).encode("latin-1") for text, i in vocab.items()}
    if absent := {bytes([b]) for b in range(256)} - set(tokens.values()):
        refuse(where, "vocabulary", "all 256 single bytes", f"{len(absent)} missing")
    tokens |= {i: text.encode() for text, (i, _) in added.items()}
    if len(tokens) != len(vocab) + len(added) or b"" in tokens.values():
        refuse(where, "tokens", "each with a text and an id of its own", "one without")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        refuse(where, "ids", f"0 to {vocab_size - 1}, as vocab_size says", max(tokens))
    special = {i: bool(flag) for i, flag in sorted(added.values())}
    return Vocabulary(tokens, scores, special, nfc)


def base_tokenizer(vocab: Vocabulary, vocab_size: int, bos: int, eos: int) -> bytes:
    """u32 longest token, bos id, eos id, then per id: f32 score, u32 length, the token's bytes."""
    records = [struct.pack("<3I", max(map(len, vocab.tokens.values())), bos, eos)]
    for i in range(vocab_size):
        token = vocab.tokens.get(i, b"")
        records.append(struct.pack("<fI", vocab.scores.get(i, -1e6), len(token)) + token)
    return b"".join(records)


# ---------------------------------------------------------------------------- Unicode
# The classes of the regex and the normalization come from two libraries inside the tokenizers
# package, of two Unicode versions, so they are asked for what they do rather than looked up.

PLANES = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000)]  # those in use
LETTER, NUMBER, SPACE, MARK = 1, 2, 3, 4  # the first three as in the section `clas`


def character_classes() -> dict[int, int]:
    """code point -> LETTER, NUMBER, SPACE or MARK. One split of everything into runs of one class,
    then a split of the runs' first characters by each class alone."""
    patterns = {LETTER: r"\p{L}", NUMBER: r"\p{N}", SPACE: r"\s", MARK: r"\p{M}"}

    def split(pattern: str, text: str, *how: object) -> list[str]:
        splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), *how)
        return [piece for piece, _ in splitter.pre_tokenize_str(text)]

    pieces = split("|".join(f"{p}+" for p in patterns.values()), "".join(map(chr, PLANES)),
                   "isolated")
    firsts = "".join(piece[0] for piece in pieces)
    kind = {char: number for number, pattern in patterns.items()
            for run in split(pattern, firsts, "removed", True) for char in run}
    return {ord(c): kind[piece[0]] for piece in pieces if piece[0] in kind for c in piece}


def normalize_all(form: str, texts: list[str]) -> list[str]:
    """Each text in NFC or NFD by itself, in one call: nothing joins with a newline."""
    return getattr(tokenizers.normalizers, form)().normalize_str("\n".join(texts)).split("\n")


def decompositions() -> dict[str, tuple[str, str, bool]]:
    """char -> (first, second or "", composes): one step of the canonical decomposition, without
    the Hangul syllables (arithmetic). composes: NFC puts the two together again."""
    chars = [chr(c) for c in PLANES if c != ord("\n") and not 0xAC00 <= c < 0xD7A4]
    full = {c: d for c, d in zip(chars, normalize_all("NFD", chars)) if d != c}
    composed = dict(zip(full, normalize_all("NFC", list(full))))
    whole = ({d: c for c, d in full.items() if len(d) > 1}  # several names: the composed one last
             | {full[c]: c for c in full if composed[c] == c})
    steps = {}
    for char, parts in full.items():
        if len(composed[char]) == 1 and composed[char] != char:  # another name of that character
            steps[char] = composed[char], "", False
        else:
            first = whole.get(parts[:-1], parts[:-1])
            steps[char] = first, parts[-1], composed[char] == char
    return steps


def combining_classes(marks: list[str]) -> dict[int, int]:
    """code point -> canonical combining class, of the marks that NFD reorders (and does not
    decompose). NFD sorts a run of marks by class and keeps the order within one. So neighbours in
    the sorted run share a class if sorting the reversed run exchanges them. The class's number is
    from unicodedata: numbers never change, only newer Unicode versions know more marks."""
    low, high = "\u0334", "\u0345"  # the lowest class and the highest: any other goes between them
    probes = [high + mark + low for mark in marks]
    marks = [mark for mark, probe, result in zip(marks, probes, normalize_all("NFD", probes))
             if probe != result and mark in result]
    ascending, = normalize_all("NFD", ["".join(marks)])
    descending, = normalize_all("NFD", ["".join(reversed(marks))])
    place = {mark: i for i, mark in enumerate(descending)}
    groups = [ascending[0]]
    for before, mark in pairwise(ascending):
        if place[mark] < place[before]:
            groups[-1] += mark
        else:
            groups.append(mark)
    return {ord(c): max(map(unicodedata.combining, group)) for group in groups for c in group}


def runs(classes: dict[int, int]) -> list[tuple[int, int, int]]:
    """(first, last, class) of every run of code points of one class, ascending."""
    ranges: list[tuple[int, int, int]] = []
    for c in sorted(classes):
        if ranges and ranges[-1][1:] == (c - 1, classes[c]):
            ranges[-1] = ranges[-1][0], c, classes[c]
        else:
            ranges.append((c, c, classes[c]))
    return ranges


def unicode_sections(nfc: bool) -> dict[str, bytes]:
    classes = character_classes()
    marks = [chr(c) for c in classes if classes[c] == MARK]
    steps = sorted(decompositions().items()) if nfc else []
    return {
        "clas": u32(*runs({c: n for c, n in classes.items() if n != MARK})),
        "ccc ": u32(*runs(combining_classes(marks) if nfc else {})),
        "deco": u32(*((ord(c), ord(first), ord(second or "\0"), composes)
                      for c, (first, second, composes) in steps)),
    }


def u32(*rows: tuple[int, ...]) -> bytes:
    return np.array(rows, "<u4").tobytes()


# ---------------------------------------------------------------------------- chat template
# qwen3.c renders a conversation from twelve strings. They are found by rendering the checkpoint's
# own template with marked contents, and used only if they reproduce it on many conversations.

Message = tuple[str, str]  # role, content
Render = Callable[..., str]  # (messages, thinking: None leaves out the answer's beginning)


class Pieces(NamedTuple):
    start: str
    no_system: str
    system_open: str
    system_close: str
    user_open: str
    user_close: str
    assistant_open: str
    assistant_close: str
    answer_plain: str
    answer_think: str
    strip: str  # of earlier answers: all up to the last of these goes,
    trim: str  # and then all leading characters that are one of these

    def render(self, messages: list[Message], thinking: bool | None) -> str:
        """What qwen3.c makes of a conversation."""
        text = self.start + ("" if messages[0][0] == "system" else self.no_system)
        for role, content in messages:
            if role == "assistant" and self.strip and self.strip in content:
                content = content.rpartition(self.strip)[2].lstrip(self.trim)
            text += getattr(self, f"{role}_open") + content + getattr(self, f"{role}_close")
        return text + ("" if thinking is None else (self.answer_plain, self.answer_think)[thinking])


def compile_template(source: str, variables: dict[str, str]) -> Render:
    """The template as transformers runs it (its chat_template_utils.py, render_jinja_template)."""
    def fail(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    env.globals["raise_exception"] = fail
    env.globals["strftime_now"] = lambda _: fail("it writes the date")
    template = env.from_string(source)

    def render(messages: list[Message], thinking: bool | None) -> str:
        switch = {} if thinking is None else {"enable_thinking": thinking}
        return template.render(messages=[{"role": r, "content": c} for r, c in messages],
                               tools=None, documents=None, **variables, **switch,
                               add_generation_prompt=thinking is not None)
    return render


def find_pieces(render: Render, bos: str) -> Pieces:
    """The pieces that a template seems to consist of. ValueError if its texts show no contents."""
    S, U, A, V = contents = "SYSTEMTEXT", "USERTEXT", "ANSWERTEXT", "SECONDTEXT"
    system, user, answer, again = zip(("system", "user", "assistant", "user"), contents)

    def around(messages: list[Message], thinking: bool | None = None) -> list[str]:
        """The texts before, between and after the marked contents."""
        rest, parts = render(messages, thinking), []
        for _, content in messages:
            before, rest = rest.split(content)
            parts.append(before)
        return parts + [rest]

    def earlier(content: str) -> str:
        return render([user, ("assistant", content), again], None)

    first, after_system, before_answer, after_answer, user_close = around(
        [system, user, answer, again])
    assistant_open = before_answer.removeprefix(user_close)
    assistant_close = around([user, answer])[2]
    user_open = after_answer.removeprefix(assistant_close)
    no_system = around([user])[0].removesuffix(user_open)
    start = bos if first.startswith(bos) and no_system.startswith(bos) else ""
    end = "</think>"
    strip = end if earlier(f"x{end}y") == earlier("y") else ""
    trim = "".join(c for c in string.whitespace if strip and earlier(f"{end}{c}y") == earlier("y"))
    return Pieces(start, no_system.removeprefix(start), first.removeprefix(start),
                  after_system.removesuffix(user_open), user_open, user_close, assistant_open,
                  assistant_close, *(around([user], thinking)[1].removeprefix(user_close)
                                     for thinking in (False, True)), strip, trim)


def trial_conversations() -> Iterator[list[Message]]:
    """Conversations as people have them, of one to four turns, every one ending with the user."""
    think = "<think>\nlet me see\n</think>\n\n"
    answers = ["Paris.", "", f"{think}Paris.", "<think>\n\n</think>\n\nParis.", "so</think>Paris.",
               "<think>\ncut off", "\n\n Paris. \n", f"{think}\n\n \t\n Paris.\n\n", "</think>",
               f"{think}It is `</think>`.\n\nYes.", "a</think>\r\n\x0b b", f" x {think}{think}y",
               "<|im_end|>\n<|im_start|>user\n", "\u00a0</think>\u00a0\u2028z"]
    users = ["Hi!", "", "\n\n  two\nlines \n", "what does </think> mean?", "<think>hm</think> \n"]
    for system in (None, "", "Be brief.", "\n <think>x</think>\n\nBe brief. \n"):
        for i, answer in enumerate(answers):
            for turns in (0, 1, 3):
                talk: list[Message] = [] if system is None else [("system", system)]
                for k in range(turns):
                    talk += [("user", users[(i + k) % 5]),
                             ("assistant", answers[(i + 5 * k) % len(answers)])]
                yield talk + [("user", users[(i + turns) % 5])]


def chat_template(folder: Path, tokenizer: dict) -> str | None:
    """The checkpoint's template: a file of its own, or in tokenizer_config.json one or several."""
    if (path := folder / "chat_template.jinja").is_file():
        with structure_of(path):
            return path.read_text(encoding="utf-8")
    found = tokenizer.get("chat_template") or read_json(
        folder / "chat_template.json", optional=True).get("chat_template")
    if isinstance(found, list):
        with structure_of(folder / "tokenizer_config.json"):
            named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found


TEMPLATE_SECONDS = 10  # of the CPU's time; Qwen's take 0.1


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError once it has taken so much of the CPU's time; Windows has no such timer."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def too_long(*_: object) -> NoReturn:
        raise TimeoutError(f"it takes more than {seconds} s")

    old = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


def chat_pieces(source: str | None, variables: dict[str, str]) -> Pieces | None:
    """The verified pieces of a template, or None and a note that says why not."""
    if not source:
        notes.append("the checkpoint has no chat template: qwen3 will continue texts, and chat "
                     "(-m chat) in plain ChatML")
        return None
    try:  # a template is a program: it may fail in any way, or never end
        with time_limit(TEMPLATE_SECONDS):
            render = compile_template(source, variables)
            pieces = find_pieces(render, variables.get("bos_token", ""))
            for messages in trial_conversations():
                for thinking in (False, True):
                    if pieces.render(messages, thinking) != render(messages, thinking):
                        raise ValueError(f"it differs for {messages}, enable_thinking={thinking}")
        return pieces
    except Exception as error:
        notes.append("warning: the chat template does something that pieces can't express, "
                     f"qwen3 will chat in plain ChatML: {type(error).__name__}: {error}")
        return None


# ---------------------------------------------------------------------------- OUT.bin.tokenizer

def id_list(where: Path, value: object) -> list[int]:
    """eos_token_id and the like: absent, one id or a list of them."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        refuse(where, "token id", "an id or a list of ids", repr(value))
    return ids


def around_text(data: dict) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after every text: it runs on the text "a" in
    a tokenizer with nothing but that token."""
    a = 2**32 - 1
    probe = data | {"model": {"type": "BPE", "vocab": {"a": a}, "merges": []}, "added_tokens": [],
                    "normalizer": None, "pre_tokenizer": None, "truncation": None, "padding": None}
    ids = tokenizers.Tokenizer.from_str(json.dumps(probe)).encode("a").ids
    return ids[:ids.index(a)], ids[ids.index(a) + 1:]


def sampling(where: Path, generation: dict) -> bytes:
    """f32 temperature, f32 top_p, u32 top_k; nothing if generation_config.json has none of them."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "do_sample": True}  # transformers'
    given = {key: generation[key] for key in defaults if generation.get(key) is not None}
    if generation.get("min_p"):
        notes.append(f"{where.name}: min_p {generation['min_p']!r} is not carried over")
    if not given:
        return b""
    temperature, top_p, top_k, sample = (defaults | given).values()
    with structure_of(where):
        if not (0 <= temperature < 100 and 0 < top_p <= 1 and 0 <= top_k < 2**31):
            refuse(where, "sampling", "temperature >= 0, 0 < top_p <= 1, top_k >= 0", given)
        return struct.pack("<2fI", temperature if sample else 0.0, top_p, top_k)


def repetition_penalty(where: Path, generation: dict) -> bytes:
    """f32; nothing if there is none."""
    with structure_of(where):
        value = positive(where, generation, "repetition_penalty", float, 1.0)
    return b"" if value == 1 else struct.pack("<f", value)


CHAT, GENERATE, EMBED = 0, 1, 4  # qwen3.c's modes


def default_mode(source: Source, pieces: Pieces | None, vocab: Vocabulary,
                 stop: list[int]) -> int:
    """What qwen3 does without -m. A base model may have a chat template, but its ids that end a
    text do not hold the one that ends a turn."""
    if source.embedding:
        return EMBED
    turn_end = [i for i in vocab.added if pieces
                and vocab.tokens[i].decode() in pieces.assistant_close]
    if source.template and (not turn_end or set(turn_end) & set(stop)):
        return CHAT
    if source.template:
        notes.append("the chat template's end of turn does not end a text: a base model, qwen3 "
                     "will continue texts unless told to -m chat")
    return GENERATE


def end_ids(source: Source, vocab: Vocabulary, named: str | None
            ) -> tuple[int, int, list[int]]:
    """(bos, eos, all ids that end a generation). The ids in config.json and generation_config.json
    say what ends a text; tokenizer_config.json's eos_token is named, and may be what ends only a
    turn of a chat (a Base model's ids have it not), so it counts too."""
    bos, eos, general_bos, general_eos = (
        id_list(source.file(name), values.get(key))
        for name, values in (("config.json", source.config),
                             ("generation_config.json", source.generation))
        for key in ("bos_token_id", "eos_token_id"))
    end_of_text = vocab.added_ids("<|endoftext|>")
    first_bos, first_eos = bos + general_bos + end_of_text, eos + general_eos + end_of_text
    if not first_bos or not first_eos:
        refuse(source.file("config.json"), "no bos or eos id", "one, or a token <|endoftext|>",
               "none")
    stop = general_eos + eos + vocab.added_ids(named) or end_of_text
    return first_bos[0], first_eos[0], list(dict.fromkeys(stop))


def tokenizer_file(source: Source, vocab_size: int) -> bytes:
    """OUT.bin.tokenizer: the base format and the extension with its sections (README)."""
    where = source.file("tokenizer.json")
    with structure_of(where):
        vocab = read_vocabulary(where, source.tokenizer, source.settings, vocab_size)
    head, tail = source.around
    roles = role_tokens(source.settings)
    bos, eos, stop = end_ids(source, vocab, roles.get("eos_token"))
    if unknown := sorted(i for i in {bos, *head, *tail, *stop} if i >= vocab_size):
        refuse(source.path, "token ids", f"ids below vocab_size, {vocab_size}", unknown)
    pieces = chat_pieces(source.template, roles)
    mode = default_mode(source, pieces, vocab, stop)

    sections = {"adde": u32(*vocab.added.items()), **unicode_sections(vocab.nfc),
                "head": u32(head), "tail": u32(tail), "stop": u32(stop),
                "samp": sampling(source.file("generation_config.json"), source.generation),
                "repe": repetition_penalty(source.file("generation_config.json"),
                                           source.generation),
                "mode": b"" if mode == CHAT else u32((mode,)),
                "chat": b"".join(struct.pack("<I", len(piece.encode())) + piece.encode()
                                 for piece in pieces or ())}
    extension = b"".join(struct.pack("<4sI", tag.encode(), len(payload)) + payload
                         for tag, payload in sections.items() if payload or tag in ("ccc ", "deco"))
    return (base_tokenizer(vocab, vocab_size, bos, eos)
            + struct.pack("<4sII", b"q3tx", 1, len(extension)) + extension)


# ---------------------------------------------------------------------------- GGUF
# The same things under other names: llama.cpp's converter wrote them from a checkpoint's files. The
# gguf package dequantizes, but its reader needs seconds and half a GB for a real vocabulary.

GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
                12: "d"}  # kind -> struct's letter
GGUF_TENSORS = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj",
    "ffn_up": "mlp.up_proj"}
GGUF_ROPE = {
    "type": "rope_type", "factor": "factor", "yarn_attn_factor": "attention_factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
# Qwen's tokens that print although they look special, which is why the converter calls them so
GGUF_PRINTED = {f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad",
                                           "repo_name", "file_sep")}


@dataclass
class Cursor:
    """Reads a GGUF file's values one after the other. The end of the data is a struct.error."""
    data: mmap.mmap
    at: int = 0

    def unpack(self, letters: str) -> tuple:
        values = struct.unpack_from("<" + letters, self.data, self.at)
        self.at += struct.calcsize("<" + letters)
        return values

    def string(self) -> str:
        return self.unpack(f"{self.unpack('Q')[0]}s")[0].decode()

    def value(self, kind: int) -> object:
        if kind == 8:
            return self.string()
        if kind != 9:
            return self.unpack(GGUF_SCALARS[kind])[0]
        kind, count = self.unpack("IQ")
        if kind in GGUF_SCALARS:
            return list(self.unpack(f"{count}{GGUF_SCALARS[kind]}"))
        return [self.value(kind) for _ in range(count)]


def hf_name(name: str) -> str:
    """blk.0.attn_q.weight -> layers.0.self_attn.q_proj.weight. Unknown names stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[2] not in GGUF_TENSORS:
        return name
    return (f"layers.{match[1]}." if match[1] else "") + GGUF_TENSORS[match[2]] + "." + match[3]


def open_gguf(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """(metadata, tensors). The file is "GGUF", u32 version, u64 number of tensors, u64 number of
    values; the values, each: string key, u32 kind, value; the tensors, each: string name, u32
    number of dimensions, u64 dimensions (the innermost first), u32 type, u64 offset; the data."""
    file = open(path, "rb")
    with (structure_of(path), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data):
        cursor = Cursor(data)
        magic, version, n_tensors, n_values = cursor.unpack("4sI2Q")
        if magic != b"GGUF":
            refuse(path, "not supported", "a checkpoint's directory or a GGUF file",
                   f"a file that begins with {magic!r}")
        if version not in (2, 3):
            found = "a big-endian one" if version % 65536 == 0 else f"version {version}"
            refuse(path, "not supported", "a little-endian GGUF file of version 2 or 3", found)
        metadata = {cursor.string(): cursor.value(*cursor.unpack("I")) for _ in range(n_values)}
        tensors = {}
        for _ in range(n_tensors):
            name, (n,) = cursor.string(), cursor.unpack("I")
            shape = cursor.unpack(f"{n}Q")[::-1]
            kind, offset = cursor.unpack("IQ")
            dtype = gguf.GGMLQuantizationType(kind).name
            if shape[-1] % BLOCK[dtype][0]:
                refuse(path, f"rows of {name}", f"a multiple of {BLOCK[dtype][0]}", shape[-1])
            if hf_name(name) in tensors:
                refuse(path, "tensors", f"one {name}", "two")
            tensors[hf_name(name)] = Tensor(name, file, offset, dtype, shape)
        alignment = metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        for tensor in tensors.values():
            tensor.offset += start
            end = tensor.offset + tensor.bytes_of(math.prod(tensor.shape))
            if end > len(data):
                refuse(path, f"truncated in {tensor.name}", f"{end} bytes", len(data))
    return metadata, tensors


def open_parts(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """(metadata, tensors) of a GGUF file or, if it is the first of several, of them all."""
    metadata, tensors = open_gguf(path)
    count = metadata.get("split.count", 1)
    if count > 1 and "-00001-of-" not in path.name:
        refuse(path, "one of several parts", f"the first, NAME-00001-of-{count:05}.gguf", path.name)
    for i in range(2, count + 1):
        part = path.with_name(path.name.replace("-00001-of-", f"-{i:05}-of-"))
        _, more = open_gguf(part)
        if again := sorted(tensors.keys() & more):
            refuse(part, "tensors", "each in one part", some(again))
        tensors |= more
    return metadata, tensors


def same_values(a: Tensor, b: Tensor) -> bool:
    size = math.prod(a.shape)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        a.stored(start, min(PIECE, size - start)) == b.stored(start, min(PIECE, size - start))
        for start in range(0, size, PIECE))


def gguf_config(path: Path, metadata: dict, tensors: dict[str, Tensor]) -> dict:
    """What config.json says. A stored classifier that is the embedding is none."""
    families = {"qwen2": ["Qwen2ForCausalLM"], "qwen3": ["Qwen3ForCausalLM"]}
    family = metadata.get("general.architecture")
    if family not in families:
        refuse(path, "general.architecture is not supported", " or ".join(families), repr(family))
    value = {key.removeprefix(f"{family}."): v for key, v in metadata.items()}
    dim, heads = value["embedding_length"], value["attention.head_count"]
    head_dim = value.get("attention.key_length", dim // heads)
    scaling = {key.removeprefix("rope.scaling."): v for key, v in value.items()
               if key.startswith("rope.scaling.") and v != "none"}
    scaling.pop("finetuned", None)  # says nothing about the arithmetic
    rope = {GGUF_ROPE.get(key, key): v for key, v in scaling.items()}
    if "attention_factor" in rope:  # or it was DeepSeek's attn_factor, which undoes the default
        default = 0.1 * math.log(rope["factor"]) + 1
        if abs(rope["attention_factor"] * default - 1) < 1e-3:
            rope["attn_factor"] = rope.pop("attention_factor")
    embedding, classifier = tensors["embed_tokens.weight"], tensors.get("lm_head.weight")
    return {
        "architectures": families[family], "hidden_size": dim,
        "intermediate_size": value["feed_forward_length"],
        "num_hidden_layers": value["block_count"], "num_attention_heads": heads,
        "num_key_value_heads": value.get("attention.head_count_kv"), "head_dim": head_dim,
        "vocab_size": embedding.shape[0], "max_position_embeddings": value["context_length"],
        "rms_norm_eps": value["attention.layer_norm_rms_epsilon"],
        "rope_theta": value.get("rope.freq_base"), "rope_scaling": rope,
        "partial_rotary_factor": value.get("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": classifier is None or same_values(embedding, classifier)}


def gguf_tokenizer(path: Path, value: dict) -> dict:
    """What tokenizer.json says."""
    for key, names in ("model", ["gpt2"]), ("pre", ["qwen2", "deepseek-r1-qwen"]):
        if value.get(key) not in names:
            refuse(path, f"tokenizer.ggml.{key} is not supported", " or ".join(names),
                   repr(value.get(key)))
    kinds = gguf.TokenType
    known = kinds.NORMAL, kinds.CONTROL, kinds.USER_DEFINED, kinds.UNUSED
    texts: dict[int, dict[str, int]] = {kind: {} for kind in known}  # text -> id, of each kind
    for i, (text, kind) in enumerate(zip(value["tokens"], value["token_type"], strict=True)):
        if kind not in known:
            refuse(path, f"token_type of {text!r}", " or ".join(str(int(k)) for k in known), kind)
        texts[kind][text] = i
    if sum(map(len, texts.values())) < len(value["tokens"]):
        refuse(path, "tokens", "each with a text of its own", "a text twice")
    special = [text for text in texts[kinds.CONTROL] if text not in GGUF_PRINTED]
    added = texts[kinds.CONTROL] | texts[kinds.USER_DEFINED]
    return {"model": {"type": "BPE", "vocab": texts[kinds.NORMAL], "merges": value["merges"]},
            "normalizer": {"type": "NFC"}, "pre_tokenizer": {"pretokenizers": STEPS},
            "added_tokens": [{"id": i, "content": text, "special": text in special}
                             for text, i in added.items()]}


def read_gguf(path: Path) -> Source:
    with structure_of(path):
        metadata, tensors = open_parts(path)
        config = gguf_config(path, metadata, tensors)
        value = {key.removeprefix("tokenizer.ggml."): v for key, v in metadata.items()}
        tokenizer = gguf_tokenizer(path, value)
        texts = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        bos, eos, *more = (value.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
        ends = [i for i in (eos, *more) if i is not None]
        ends += [i for i, text in texts.items() if text == "<|endoftext|>"]
        head, tail = ([value[f"{name}_token_id"]] if value.get(f"add_{name}_token") else []
                      for name in ("bos", "eos"))
        settings = {"bos_token": texts.get(bos), "eos_token": texts.get(eos)}
        names = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                 "penalty_repeat": "repetition_penalty"}
        generation = {name: metadata.get(f"general.sampling.{key}") for key, name in names.items()}
        pooling = metadata.get(f"{metadata['general.architecture']}.pooling_type", 0)
        if pooling not in (gguf.PoolingType.NONE, gguf.PoolingType.LAST):
            refuse(path, "pooling_type is not supported", "0 (none) or 3 (last token)", pooling)
        exact = 32 if any(tensor.dtype == "Q8_0" for tensor in tensors.values()) else None
        return Source(path, config | {"bos_token_id": bos, "eos_token_id": eos}, tokenizer,
                      settings, generation | {"eos_token_id": ends},
                      metadata.get("tokenizer.chat_template"), (head, tail), tensors,
                      pooling == gguf.PoolingType.LAST, exact)


# ---------------------------------------------------------------------------- source and target

def download(name: str) -> Path:
    """The folder of a checkpoint from the hub; huggingface_hub keeps it in its cache."""
    files = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
             "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
             "modules.json", "1_Pooling/config.json"]
    try:
        import huggingface_hub.utils  # takes a moment, and few need it
        if not sys.stderr.isatty():
            huggingface_hub.utils.disable_progress_bars()
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=files,
                                                      ignore_patterns="*/*.safetensors*"))
    except Exception as error:  # of several libraries: no such name, no access, no network, ...
        reason = str(error).strip().partition("\n")[0]
        refuse(name, "neither a directory here nor to be had from the hub",
               "a checkpoint directory or a hub name", f"{type(error).__name__}: {reason}")


def find_source(name: str) -> Source:
    path = Path(name)
    if path.is_file():
        return read_gguf(path)
    if not path.is_dir():
        if path.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
            refuse(name, "no checkpoint", "a directory, a GGUF file or a hub name, ORG/NAME",
                   "nothing of that name" if not path.exists() else "something else")
        path = download(name)
    with structure_of(path):
        return read_folder(path)


@contextmanager
def published(*targets: Path) -> Iterator[list[BinaryIO]]:
    """Files to write beside the targets, which become them together, once all is written. Whatever
    happens before that, signals included, leaves the targets as they were and no file behind."""
    parts = [target.with_name(f"{target.name}.{os.getpid()}.part") for target in targets]
    files: list[BinaryIO] = []
    try:
        for target, part in zip(targets, parts):
            if target.is_dir():
                refuse(target, "can't be written", "a file or nothing there", "a directory")
            files.append(open(part, "xb", buffering=0))
        yield files
        for part, target in zip(parts, targets):
            os.replace(part, target)
    finally:
        for file in files:
            file.close()
        for part in parts:
            part.unlink(missing_ok=True)


def prepare(name: str, group_size: int | None,
            yarn_factor: float | None) -> tuple[Config, list[Tensor], bytes]:
    """(config, tensors in the order of OUT.bin, OUT.bin.tokenizer) of a source."""
    source = find_source(name)
    with structure_of(source.path):
        config = read_config(source, group_size, yarn_factor)
        tensors = match_tensors(source.path, source.tensors, config)
        tokenizer = tokenizer_file(source, config.vocab_size)
    lossy = {tensor.dtype for tensor in tensors} - PLAIN
    lossy -= {"Q8_0"} if config.group_size == 32 else set()
    if lossy:
        notes.append(f"{', '.join(sorted(lossy))}: quantized again, in groups of "
                     f"{config.group_size}, which moves a value by up to 1/254 of the largest of "
                     "its group; what the first quantization lost stays lost")
    return config, tensors, tokenizer


def export(name: str, out: Path, group_size: int | None, yarn_factor: float | None) -> None:
    began = time.monotonic()
    config, tensors, tokenizer = prepare(name, group_size, yarn_factor)
    size = 256 + sum(stored_size(t.shape, config.group_size) for t in tensors)
    tokenizer_out = out.with_name(out.name + ".tokenizer")
    with published(tokenizer_out, out) as (tokenizer_part, model_part):
        free = shutil.disk_usage(out.parent).free
        if free < size + len(tokenizer):
            refuse(out, "too little disk space", f"{size + len(tokenizer)} bytes", f"{free} free")
        write_at(tokenizer_part, np.frombuffer(tokenizer, np.uint8), 0)
        write_model(model_part, config, tensors)
    seconds = time.monotonic() - began
    print(f"export.py: wrote {out} ({size / 1e6:.1f} MB) and {tokenizer_out.name} "
          f"in {seconds:.1f} s", file=sys.stderr)


# ---------------------------------------------------------------------------- --check

def check_bytes(path: Path, what: str, expected: bytes, found: bytes) -> None:
    """Refuses a difference, by the 32-bit word it is in."""
    if found != expected:
        at = next((i for i in range(0, len(expected), 4) if expected[i:i + 4] != found[i:i + 4]),
                  len(expected))
        refuse(path, f"{what} is not what the source gives, at byte {at:#x}",
               expected[at:at + 4].hex(" ") or "its end", found[at:at + 4].hex(" ") or "its end")


TINY = np.float32(2e-43)  # what rounding does to a scale that is hardly above zero, times 127


def compare_piece(out: BinaryIO, group_size: int, tensor: Tensor, offset: int, start: int,
                  count: int) -> tuple[float, float, float]:
    """(sum of squares, sum of squared differences, largest difference in units of what its group
    allows) of elements start .. start+count-1 of a tensor that begins at offset. Half a step is
    allowed, max|x| / 254, and a little more, as the product and the scale are rounded, too."""
    x = tensor.read(start, count)
    group = 1 if len(tensor.shape) == 1 else group_size
    groups = np.arange(0, count, group)
    allowed = np.zeros(len(groups), np.float32)
    if group == 1:
        y = read_at(out, "<f4", count, offset + 4 * start)
    else:
        q = read_at(out, "i1", count, offset + start).reshape(-1, group)
        scale = read_at(out, "<f4", len(q), offset + math.prod(tensor.shape) + 4 * (start // group))
        y = (q * scale[:, None]).ravel()
        allowed = np.maximum.reduceat(np.abs(x), groups) * np.float32(1.0001 / 254) + TINY
    difference = np.abs(x - y)
    largest = np.maximum.reduceat(difference, groups)
    wrong = ~(largest <= allowed)  # so NaN is wrong
    if wrong.any():
        g = int(wrong.argmax())
        i = g * group + int(difference[g * group:(g + 1) * group].argmax())
        place = list(map(int, np.unravel_index(start + i, tensor.shape)))
        refuse(out.name, f"{tensor.name} {place}", f"{x[i]:.9g} within {allowed[g]:.3g}",
               f"{y[i]:.9g}")
    relative = largest / np.maximum(allowed, TINY)
    return float(x @ x), float(difference @ difference), float(relative.max())


def plot(path: Path, title: str, errors: dict[str, float]) -> None:
    """A line along the layers for each kind of matrix, and a level for those outside the layers."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
    axes = Figure(figsize=(9, 5), layout="constrained").subplots()
    kinds: dict[str, list[float]] = {}
    for name, rms in errors.items():
        kinds.setdefault(re.sub(r".*\.\d+\.|\.weight$", "", name), []).append(rms)
    n = max(map(len, kinds.values()))
    for kind, values in kinds.items():
        axes.plot((values * n)[:n], "o-" if len(values) == n else "--", markersize=4, label=kind)
    axes.set(title=title, xlabel="layer", ylabel="rms error, % of the weights' rms")
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside right upper")
    axes.figure.savefig(path, dpi=150)


def tell(lines: str) -> None:
    """Writes to stdout, above the progress bar."""
    try:
        tqdm.write(lines)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of it at exit
        error.filename = "stdout"
        raise


def check(name: str, out: Path, picture: Path | None, yarn_factor: float | None) -> None:
    """Compares OUT.bin and its tokenizer file with the source; a table of the errors on stdout."""
    if picture and not importlib.util.find_spec("matplotlib"):
        refuse("--plot", "needs matplotlib", "`uv run --with matplotlib export.py ...` or `pip "
               "install matplotlib`", "none")
    tokenizer_out, errors = out.with_name(out.name + ".tokenizer"), {}
    with open(out, "rb") as file:
        head = file.read(256)
        group_size = int.from_bytes(head[0x2C:0x30], "little")
        if group_size not in GROUP_SIZES:
            refuse(out, "group_size", " or ".join(map(str, GROUP_SIZES)), group_size)
        config, tensors, tokenizer = prepare(name, group_size, yarn_factor)
        factor, found = (struct.unpack_from("<f", fields.ljust(256, b"\0"), 0x3C)[0] or 1
                         for fields in (header(config), head))
        if factor != found:
            refuse(out, "YaRN is not what the source gives, --check needs the same --yarn",
                   f"factor {factor:g}", f"{found:g}")
        check_bytes(out, "the header", header(config), head)
        check_bytes(tokenizer_out, "it", tokenizer, tokenizer_out.read_bytes())
        size = 256 + sum(stored_size(t.shape, group_size) for t in tensors)
        if (found := out.stat().st_size) != size:
            refuse(out, "truncated or oversized", f"{size} bytes", found)
        tell("rms error    largest\n(% of rms)  (half steps)  tensor")
        for tensor, pieces in in_pieces(partial(compare_piece, file, group_size), tensors,
                                        group_size):
            squares, differences, largest = zip(*pieces)
            rms = 100 * math.sqrt(sum(differences) / (sum(squares) or 1))
            tell(f"{rms:10.4f}  {max(largest):12.4f}  {tensor.name}")
            if len(tensor.shape) == 2:
                errors[tensor.name] = rms
    if picture:
        plot(picture, f"{out.name} against {Path(name).name}", errors)
    worst = max(errors, key=errors.__getitem__)
    print(f"export.py: {out} is what {name} gives: header, tokenizer and {len(tensors)} tensors; "
          f"rms error {errors[worst]:.2f} % at most, in {worst}", file=sys.stderr)


# ---------------------------------------------------------------------------- main

def usage_error(text: str) -> NoReturn:
    print(f"export.py: {text} (see export.py -h)", file=sys.stderr)
    sys.exit(2)


def yarn_factor(text: str) -> float:
    with suppress(ValueError):
        if 1 < float(text) <= 64:
            return float(text)
    raise argparse.ArgumentTypeError("wrong factor, expected a number above 1 and up to 64, "
                                     f"found {text!r}")


def parse_arguments(args: list[str]) -> argparse.Namespace:
    """source, out and the options. An OUT ends in .bin; it may also come first, as it once did."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = usage_error  # type: ignore
    parser.add_argument("names", nargs="*")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES)
    parser.add_argument("--yarn", type=yarn_factor, metavar="FACTOR")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    if "-h" in args or "--help" in args:
        print(__doc__.strip())
        sys.exit(0)
    options = parser.parse_intermixed_args(args)
    if not 1 <= len(options.names) <= 2 or "" in options.names:
        usage_error("usage: wrong arguments, expected SOURCE [OUT.bin], "
                    f"found {len(options.names)}")
    if options.plot and options.plot.suffix != ".png":
        usage_error(f"--plot: wrong name, expected one that ends in .png, found '{options.plot}'")
    options.check |= bool(options.plot)
    if options.check and options.group_size:
        usage_error("--group-size: a finished file has its own, expected no --check beside it, "
                    "found both")
    source, *rest = options.names
    if rest and source.endswith(".bin") and (Path(rest[0]).is_dir() or rest[0][-4:] != ".bin"):
        source, rest = rest[0], [source]
    if rest and not rest[0].endswith(".bin"):
        usage_error(f"OUT: wrong name, expected one that ends in .bin, found {rest[0]!r}")
    name = Path(os.path.abspath(source)).name.removesuffix(".gguf")
    options.source, options.out = source, Path(rest[0] if rest else name + ".bin")
    return options


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    source, out = options.source, options.out
    status = 0
    try:
        if options.check:
            check(source, out, options.plot, options.yarn)
        else:
            export(source, out, options.group_size, options.yarn)
        lines = notes
    except Refused as error:
        lines, status = [str(error)], 1
    except BrokenPipeError:  # who reads the table has seen enough
        lines = []
    except OSError as error:
        lines = [f"{error.filename or out}: can't be read or written, expected access and space, "
                 f"found {error.strerror or error}"]
        status = 1
    for line in lines:  # names from files may hold anything
        line = re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda control: repr(control[0])[1:-1], line)
        print(f"export.py: {line:.1000}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    on_signals(sys.exit)  # unwinds, so temporary files go
    main()

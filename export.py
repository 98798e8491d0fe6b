#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "numpy>=1.24",
#   "tokenizers>=0.22",
#   "jinja2>=3.1.6",
#   "huggingface_hub>=0.25",
#   "tqdm>=4.60",
#   "gguf>=0.17",
# ]
# ///
"""Converts a Qwen3 or Qwen2 checkpoint to the two files that qwen3.c reads.

    python export.py SOURCE [OUT.bin] [options]      (`uv run export.py ...` needs no set-up)

SOURCE is a checkpoint directory, a GGUF file (of a file in several parts, the first), a directory
with one GGUF file, or a name on the Hugging Face hub: ORG/NAME such as Qwen/Qwen3-0.6B is a
checkpoint or, where there are only GGUF files, the one in Q8_0; ORG/NAME:Q4_0 is the one of that
kind, ORG/NAME/FILE.gguf that one. The address of a model's page will do, too. The program writes

    OUT.bin            a header and the weights: norms in fp32, matrices quantized to 8 or 4 bits
    OUT.bin.tokenizer  the vocabulary, Unicode tables, the chat format and sampling defaults

Without OUT.bin the name is that of the checkpoint or the GGUF file + ".bin", with four bits
"-q4.bin", in the current directory. OUT.bin may also come first, as the older export.py had it.

    --bits 8|4         bits of a weight in the layers' matrices; the embedding and the classifier
                       have 8. Four make half the file and nearly twice the speed, and cost quality.
                       The default is 8, but 4 for a GGUF file with all layers in Q4_0 or in IQ4_NL
    --group-size N     weights per quantization scale: 32, 64, 128 or 256. The default is 64, but 32
                       where 64 does not divide the model's dimensions, with four bits, and for a
                       GGUF file in Q8_0. Groups of Q8_0, Q4_0 and IQ4_NL are copied as they are;
                       --bits or another size has them quantized again
    --yarn FACTOR      extends the context by this factor (YaRN), as Qwen advises for texts longer
                       than the model was trained on; short texts get slightly worse
    --check            writes nothing; compares an existing OUT.bin and its tokenizer file with
                       SOURCE and prints each tensor's quantization error to stdout. The exit status
                       is 1 if a value is not the one that an export gives, or anything else
    --plot FILE.png    --check, and a plot of the errors (needs matplotlib)

Memory use does not depend on the model's size. The two files appear under their names only when
both are complete. A checkpoint that needs what qwen3.c does not have is refused with the reason.
Exit status: 0 done, 1 refused or failed (one line on stderr), 2 wrong usage, 130 after Ctrl-C.

The file begins with the main path, one export from start to end. The formats of both files are
described in qwen3.c, sections "The model file" and "The tokenizer file".
"""

from __future__ import annotations

import os
import signal
import sys


def on_signals(leave: Callable[[int], object]) -> None:
    """Calls leave(exit status) at Ctrl-C and SIGTERM."""
    signal.signal(signal.SIGINT, lambda *_: leave(130))
    signal.signal(signal.SIGTERM, lambda *_: leave(143))


if __name__ == "__main__":
    on_signals(os._exit)  # for now: the slow imports and argparse may swallow an exception
    if {"-h", "--help"} & set(sys.argv[1:]):  # here, as it needs none of the packages
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that leaves, such as head
        print(__doc__.partition("\n\nThe file begins")[0])
        sys.exit(0)

import argparse
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
import unicodedata
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, NamedTuple, NoReturn

# The packages of the block at the top: [(name, oldest version)]
PACKAGES = re.findall(r'"([a-z_0-9]+)>=([0-9.]+)"',
                      Path(__file__).read_text(encoding="utf-8").split("# ///")[1])
try:
    import gguf
    import jinja2  # jinja2 before 3.1.6 lets a template out of its sandbox
    import markupsafe  # jinja2's only package
    import numpy as np
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tqdm import tqdm
    for package, oldest in PACKAGES:
        version = importlib.metadata.version(package)
        if [int(n) for n in re.findall(r"\d+", version)[:3]] < [int(n) for n in oldest.split(".")]:
            raise ImportError(f"{package} {version} is older than {oldest}")
except ImportError as error:
    venv = ".venv\\Scripts\\" if os.name == "nt" else ".venv/bin/"
    packages = " ".join(f"'{package}>={oldest}'" for package, oldest in PACKAGES)
    sys.exit(f"export.py: {error}: run it as `uv run export.py ...`, which fetches what it needs, "
             f"or, after `python3 -m venv .venv && {venv}pip install {packages}`, as "
             f"`{venv}python export.py ...`")

# ---- One export from start to end ----------------------------------------------------------------

class Source(NamedTuple):
    """A checkpoint as a Hugging Face directory has it. A GGUF file is brought into this form."""
    path: Path  # the directory or the GGUF file
    name: str  # OUT.bin is named after it
    config: dict  # config.json
    tokenizer: dict  # tokenizer.json
    tokenizer_config: dict  # tokenizer_config.json
    generation: dict  # generation_config.json
    chat_template: str | None  # Jinja
    embedding: bool  # an embedding model: it makes one vector of a text
    open_tensors: Callable[..., dict[str, Tensor]]  # by Hugging Face's name. If they are to be
    # downloaded: its arguments are the Rooms that must be left on the disks
    group_size: int | None = None  # 32 if weights are in GGUF's Q8_0, which OUT.bin can copy
    levels: tuple[int, ...] = ()  # of a GGUF's layers in Q4_0 or IQ4_NL, which OUT.bin can copy

    def file(self, name: str) -> Path:
        """The path to name in an error message about config.json etc.: of that file or the GGUF."""
        return self.path / name if self.path.is_dir() else self.path


Room = tuple[Path, int]  # a folder, and the bytes that will come to it
SUFFIXES = {8: ".bin", 4: "-q4.bin"}  # bits -> what OUT.bin's default name ends in


def export(options: argparse.Namespace) -> None:
    """Writes OUT.bin and OUT.bin.tokenizer of a source; the options are parse_arguments()'s."""
    began, out = time.monotonic(), options.out
    if out:
        check_target(out)
    source = find_source(options.source, out.parent if out else Path())
    config, tokenizer = read_settings(source, options)
    bits = 4 if config.levels else 8
    out = out or Path(source.name + SUFFIXES[bits])
    check_target(out)
    room = out.parent, layout(config)[-1].end + len(tokenizer)
    check_space([room])
    tokenizer_out = Path(f"{out}.tokenizer")
    with atomic_files(tokenizer_out, out) as (tokenizer_part, model_part):
        write_at(tokenizer_part, tokenizer, 0)
        outputs = match_tensors(source, config, room)  # may download, so only now
        write_model(model_part, config, outputs)
    say(f"wrote {out} ({outputs[-1].end / 1e6:.1f} MB, {bits} bits in groups of "
        f"{config.group_size}) and {tokenizer_out.name} in {time.monotonic() - began:.1f} s, "
        f"run ./qwen3 {shlex.quote(str(out))} -i \"Why is the sky blue?\"")


def read_settings(source: Source, options: argparse.Namespace) -> tuple[Config, bytes]:
    """All of a source but the weights: (config, contents of OUT.bin.tokenizer)."""
    where = source.file("config.json")
    with parsing(where):
        config = read_config(source, options)
    if (matrices := config.n_layers * max(1, config.n_experts)) > MOST_TENSORS:
        refuse(where, "layers times experts", f"at most {MOST_TENSORS}", matrices)
    with parsing(source.file("tokenizer.json")):
        return config, tokenizer_file(source, config.vocab_size)


def find_source(name: str, folder: Path | None) -> Source:
    """Reads a directory or a GGUF file, or downloads. OUT.bin, if any, will come to the folder."""
    path = Path(name)
    if path.is_dir():
        return read_folder(path)
    if path.exists():
        return read_gguf(path)
    if not (hub := HUB_NAME.fullmatch(name)):
        refuse(name, "missing", "a directory, a GGUF file or a hub name, ORG/NAME")
    return read_hub(hub[1], hub[2] or hub[3] or "", folder)


def check_target(out: Path) -> None:
    """Refuses what can't be written, before the work that it would be for."""
    if not out.parent.exists():
        refuse(out.parent, "missing", "the directory to write to")
    for target in out, Path(f"{out}.tokenizer"):
        if target.is_dir():
            refuse(target, "can't be written", "a file or nothing of this name", "a directory")


def check_space(rooms: list[Room]) -> None:
    """Refuses if a disk has too little space for all that comes to it."""
    for folder, _ in rooms:
        device = os.stat(folder).st_dev
        need = sum(size for other, size in rooms if os.stat(other).st_dev == device)
        if (free := shutil.disk_usage(folder).free) < need:
            refuse(folder, "too little disk space", f"{need} bytes", f"{free} free")


@contextmanager
def atomic_files(*targets: Path) -> Iterator[list[BinaryIO]]:
    """Yields temporary files beside the targets. If the block succeeds, they are renamed to the
    targets, in this order; if it fails or a signal ends it, they are removed."""
    parts = [target.with_name(f"{target.name}.{os.getpid()}.part") for target in targets]
    with ExitStack() as at_end:
        for part in parts:
            at_end.callback(part.unlink, missing_ok=True)
        yield [at_end.enter_context(open(part, "xb", buffering=0)) for part in parts]
        if __name__ == "__main__":
            on_signals(lambda _: None)  # everything is written: too late
        for part, target in zip(parts, targets):
            os.replace(part, target)


# ---- Errors and limits: what cannot be converted is refused, in one line -------------------------

hub_folders: dict[str, str] = {}  # folder in the hub's cache -> the model's name, for messages
notes: list[str] = []  # warnings and hints, printed after success; after an error they are dropped

# A source is untrusted, so what is read of it is bounded. Parsed JSON may take 36 times its size.
SETTINGS_SIZE = 1 << 20  # bytes of config.json and the like
TENSORS_SIZE = 8 << 20  # bytes of the index, or of a shard's header
TOKENIZER_SIZE = 16 << 20  # bytes of tokenizer.json (Qwen3's has 11 MB) or of a GGUF's metadata
MOST_TENSORS = 100_000  # in all files together; Qwen3-235B-A22B has 36,000
MOST_AROUND = 1000  # ids that a post-processor may put around a text
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Refused(Exception):
    """The source cannot be converted. The message is the line that the user reads."""


def refuse(where: object, what: str, expected: object, found: object = "nothing") -> NoReturn:
    raise Refused(f"{where}: {what}, expected {expected}, found {found}")


def supported(where: object, what: str, value: object, *good: object) -> None:
    """Refuses all values but the good ones; None is one that is not there."""
    if value not in good:
        expected = " or ".join(str(x) for x in good if x is not None)
        refuse(where, f"{what} is not supported", expected, repr(value))


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Any unexpected exception within it means that the file at path is malformed."""
    try:
        yield
    except (Refused, OSError):
        raise
    except Exception as error:  # KeyError, TypeError, ..., and the tokenizers package's own
        refuse(path, "broken (download it again?)", "the structure of such a file",
               f"{type(error).__name__}: {error}")


def open_file(path: Path) -> BinaryIO:
    """Opens a file. Refuses what stands for one (Git LFS, a web page) or may never end (a pipe)."""
    if not path.exists():
        refuse(path, "missing", "a file of this name")
    if not path.is_file():
        refuse(path, "can't be read", "a regular file", "a directory, a pipe or a device")
    file = open(path, "rb")
    begin = file.read(len(LFS_POINTER))
    if begin == LFS_POINTER:
        refuse(path, "not downloaded", "its contents: `git lfs pull`", "a Git LFS pointer")
    if begin[:5].lower() in (b"<!doc", b"<html"):
        refuse(path, "not downloaded", "its contents: download it again", "a web page")
    file.seek(0)
    return file


def read_file(path: Path, most: int = SETTINGS_SIZE) -> bytes:
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        refuse(path, "too large", f"at most {most} bytes", "more")
    return data


def say(line: str) -> None:
    """Prints a line. A name from an untrusted file may hold what drives a terminal: control
    characters and those that change the direction of writing. They are escaped."""
    for folder, name in hub_folders.items():
        line = line.replace(folder, name)
    line = re.sub("[^ -~]", lambda c: c[0] if c[0].isprintable() else repr(c[0])[1:-1], line)
    line = line if len(line) <= 1000 else f"{line[:400]} ... {line[-500:]}"
    print(f"export.py: {line}", file=sys.stderr)


def first_few(names: list[str], most: int = 6) -> str:
    """The names for an error message, which must not grow with a long list."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "none"


# ---- A checkpoint directory: Hugging Face's files, local or downloaded ---------------------------

# A model on the hub: (ORG/NAME, kind or None, file or None). A page's address will do, too.
HUB_NAME = re.compile(r"(?:https?://[^/]+/)?([A-Za-z0-9][\w.-]*/[\w.-]+?(?<!\.gguf))"
                      r"(?::([\w-]+)|(?:/(?:(?:tree|blob|resolve)/main/?)?([\w./-]+\.gguf)?)?)"
                      r"(?:[?#].*)?", re.ASCII)
WEIGHTS = re.compile(r"[^/]+\.safetensors")
SETTINGS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "chat_template.jinja", "chat_template.json", "modules.json", "1_Pooling/config.json",
            "model.safetensors.index.json"]


def read_hub(name: str, wanted: str, target: Path | None) -> Source:
    """Downloads a checkpoint's JSON files; its weights follow when its tensors are opened. If a
    kind or a file is wanted, or if there are only GGUF files, downloads one of these."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache, utils  # slow: only here
    utils.logging.set_verbosity_error()  # an error is one line
    if not sys.stderr.isatty():
        utils.disable_progress_bars()

    def fetch(names: list[str], *rooms: Room) -> Path:
        """Downloads these files if there is space for them and the rooms. Returns their folder."""
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        absent = (file for file in names if try_to_load_from_cache(name, file) is None)
        check_space([(cache, sum(files.get(file, 0) for file in absent)), *rooms])
        with downloading(name):
            folder = Path(hub.snapshot_download(name, allow_patterns=names))
        hub_folders[str(folder)] = name
        return folder

    hub = HfApi()
    files = hub_files(hub, name)
    if parts := choose_gguf(name, list(files), wanted, default="Q8_0"):
        size = sum(files[part] for part in parts)  # OUT.bin will be about as large
        folder = fetch(parts, *([(target, size)] if target else []))
        source = read_gguf(folder / parts[0])
    else:
        folder, needed = fetch(SETTINGS), [*SETTINGS, *filter(WEIGHTS.fullmatch, files)]
        source = read_folder(folder)._replace(
            name=name.partition("/")[2],
            open_tensors=lambda *rooms: open_checkpoint(fetch(needed, *rooms)))
    notes.append(f"the download stays in {folder.parents[1]}; to remove it, delete that folder or "
                 f"run `hf cache rm model/{name}` (before huggingface_hub 1: `huggingface-cli "
                 "delete-cache`)")
    return source


def hub_files(hub: Any, name: str) -> dict[str, int]:
    """File -> size of a model on the hub. If the hub does not tell: what is in its cache."""
    with downloading(name):
        try:
            siblings = hub.model_info(name, files_metadata=True).siblings
            return {file.rfilename: file.size or 0 for file in siblings
                    if re.fullmatch(r"[\w./-]+", file.rfilename, re.ASCII)}
        except Exception:
            with suppress(Exception):  # [], as only the folder is asked for
                folder = Path(hub.snapshot_download(name, local_files_only=True, allow_patterns=[]))
                return {path.relative_to(folder).as_posix(): 0 for path in folder.rglob("*")}
            raise


@contextmanager
def downloading(name: str) -> Iterator[None]:
    """Any exception within it means that the hub does not give this model."""
    try:
        yield
    except Exception as error:  # from several libraries
        if isinstance(error, OSError) and error.filename:
            raise  # of the hub's cache
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if getattr(error, "response", None) is None:  # nobody has answered
            refuse(name, "not here, and the hub can't be reached", "a network (HF_ENDPOINT can "
                   "name a mirror), or all its files from an earlier download (HF_HUB_OFFLINE=1 "
                   "asks for no others)", found)
        refuse(name, "neither here nor available from the hub", "a directory, a GGUF file or the "
               "name of a model on the hub (a private or gated one needs HF_TOKEN)", found)


def choose_gguf(where: object, files: list[str], wanted: str = "", default: str = "") -> list[str]:
    """The parts of the wanted GGUF file, by its name or its kind such as Q4_0. If none is wanted:
    of the only one, or the one of the default kind; [] if the files are a checkpoint's."""
    models: dict[str, list[str]] = {}  # name without the number of a part -> the parts
    for file in sorted(files):
        if file.endswith(".gguf"):
            models.setdefault(re.sub(r"-\d{5}-of-\d{5}(?=\.gguf$)", "", file), []).append(file)
    if not wanted and (not models or any(map(WEIGHTS.fullmatch, files))):
        if "config.json" in files:
            return []
        if "adapter_config.json" in files:
            refuse(where, "a LoRA adapter", "a whole model: merge it into its base model first "
                   "(merge_and_unload() of peft)", "adapter_config.json")
        refuse(where, "not a checkpoint", "config.json or a GGUF file", first_few(sorted(files)))
    wanted = wanted or (default if len(models) > 1 else "")
    ending = re.compile(rf"(.*[-._/])?{re.escape(wanted)}\.gguf", re.IGNORECASE)
    chosen = [parts for model, parts in models.items()
              if not wanted or wanted in (model, *parts) or ending.fullmatch(model)]
    if len(chosen) != 1:
        refuse(where, f"{'more than one' if chosen else 'no'} GGUF file {wanted}".strip(),
               "the name of one of these", first_few([*models], 30))
    return chosen[0]


def read_folder(folder: Path) -> Source:
    if parts := choose_gguf(folder, [path.name for path in folder.iterdir()]):
        return read_gguf(folder / parts[0])
    path = folder / "tokenizer.json"
    if not path.exists():
        refuse(path, "missing", "the fast tokenizer's file (of vocab.json, transformers' "
               "AutoTokenizer makes it: from_pretrained(), then save_pretrained())")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    return Source(
        path=folder, name=Path(os.path.abspath(folder)).name,
        config=read_json(folder / "config.json"), tokenizer=read_json(path, TOKENIZER_SIZE),
        tokenizer_config=tokenizer_config, generation=read_json(folder / "generation_config.json"),
        chat_template=chat_template(folder, tokenizer_config), embedding=is_embedding(folder),
        open_tensors=lambda *_: open_checkpoint(folder))


def read_json(path: Path, most: int = SETTINGS_SIZE, kind: type = dict) -> Any:
    """The object or list in a file, which is empty if there is no such file."""
    return parse_json(read_file(path, most), path, kind) if os.path.lexists(path) else kind()


def parse_json(text: bytes, path: Path, kind: type = dict) -> Any:
    with parsing(path):
        value = json.loads(text)
        if not isinstance(value, kind):
            raise TypeError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def post_processor_ids(where: Path, tokenizer: dict) -> tuple[list[int], list[int]]:
    """The ids that tokenizer.json's post-processor puts before and after every text."""
    ids: list[int | None] = [None]  # None: the text
    processor = tokenizer.get("post_processor") or {"type": "ByteLevel"}
    for step in processor["processors"] if processor["type"] == "Sequence" else [processor]:
        if step["type"] == "ByteLevel":  # puts nothing there
            continue
        supported(where, "post_processor", step["type"], "ByteLevel", "TemplateProcessing")
        inner, ids = ids, []
        for piece in step["single"]:
            token = piece.get("SpecialToken", {}).get("id")
            if piece.get("Sequence", {}).get("id") == "A":
                ids += inner
            elif token in step["special_tokens"]:
                ids += id_list(where, step["special_tokens"][token]["ids"])
            else:
                refuse(where, "post_processor", "the text A and tokens that it lists", piece)
            if len(ids) > MOST_AROUND + 1:
                refuse(where, "post_processor", f"at most {MOST_AROUND} ids", "more")
    (text,) = (i for i, token in enumerate(ids) if token is None)  # ValueError if not once
    return ids[:text], ids[text + 1:]


def chat_template(folder: Path, tokenizer_config: dict) -> str | None:
    """The Jinja source: chat_template.jinja, or the key in tokenizer_config.json (a template, or a
    list of named ones), or chat_template.json."""
    if (path := folder / "chat_template.jinja").exists():
        return read_file(path).decode(errors="surrogateescape")
    found = (tokenizer_config.get("chat_template")
             or read_json(folder / "chat_template.json").get("chat_template"))
    if isinstance(found, list):
        with parsing(folder / "tokenizer_config.json"):
            return {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def is_embedding(folder: Path) -> bool:
    """True if modules.json (sentence-transformers) makes one vector of a text with this model.
    Refuses any pooling but the last token's, the only one in qwen3.c, which always normalizes."""
    path = folder / "modules.json"
    with parsing(path):
        modules = {module["type"].rpartition(".")[2]: module["path"]
                   for module in read_json(path, kind=list)}
    if "Pooling" not in modules:
        return False
    for module in modules:
        supported(path, "module", module, "Transformer", "Pooling", "Normalize")
    supported(path, "path of Pooling", modules["Pooling"], "1_Pooling")
    path = folder / "1_Pooling/config.json"
    kinds = [key.removeprefix("pooling_mode_") for key, value in read_json(path).items()
             if key.startswith("pooling_mode_") and value is True]
    supported(path, "pooling", ", ".join(kinds), "lasttoken")
    return True


# ---- config.json: what the model computes -> Config -> the header of OUT.bin ---------------------

class Config(NamedTuple):
    """The header's fields in its order, under qwen3.c's names; then what it has of other sizes."""
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int
    head_dim: int
    shared_classifier: bool  # the classifier is the token embedding
    group_size: int  # weights per quantization scale
    rope_theta: float
    rms_norm_eps: float
    rope_factor: float  # of scaled rope, on cos and sin; else 0
    qkv_bias: bool
    no_qk_norm: bool
    n_experts: int = 0  # of a layer; 0 in a dense model. hidden_dim is one expert's
    n_experts_used: int = 0  # for one token
    no_topk_norm: bool = False  # the weights of a token's experts are not divided by their sum
    levels: tuple[int, ...] = ()  # the 16 of four-bit weights in the layers; none if they have 8
    frequencies: tuple[float, ...] = ()  # of scaled rope: radians per position


ORIGINAL = "original_max_position_embeddings"  # of YaRN
# What qwen3.c accepts of the JSON files' numbers: (lowest, highest). (It takes a vocab_size of
# 2^30, but each token costs memory here.) For theta, the penalty and YaRN's terms: OTHER_LIMITS
LIMITS = {
    "hidden_size": (1, 1 << 20), "intermediate_size": (1, 1 << 20), "head_dim": (1, 4096),
    "moe_intermediate_size": (1, 1 << 20), "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 4096), "num_key_value_heads": (1, 4096), "vocab_size": (1, 1 << 20),
    "max_position_embeddings": (1, 1 << 30), ORIGINAL: (1, 2 ** 31 - 1), "top_k": (0, 2 ** 31 - 1),
    "num_experts": (0, 4096), "num_local_experts": (0, 4096), "num_experts_per_tok": (0, 4096),
    "rms_norm_eps": (2.0 ** -126, 1e12), "temperature": (0.0, 1e6), "top_p": (1e-45, 1.0)}
OTHER_LIMITS = 1e-6, 1e12

QWEN2 = ["Qwen2ForCausalLM"]  # Qwen2 and Qwen2.5 have biases on q, k and v, and no QK-norm
QWEN3 = ["Qwen3ForCausalLM"]
QWEN3_MOE = ["Qwen3MoeForCausalLM"]  # Qwen3 with a mixture of experts
GROUP_SIZES = 32, 64, 128, 256


def read_config(source: Source, options: argparse.Namespace) -> Config:
    """The source's config.json, checked, with the user's options."""
    where, config = source.file("config.json"), source.config
    check_family(where, config)
    get = partial(number, where, config)
    qwen2 = config["architectures"] == QWEN2
    moe = config["architectures"] == QWEN3_MOE
    hidden_key = "moe_intermediate_size" if moe else "intermediate_size"
    dim, hidden_dim, n_heads = map(get, ("hidden_size", hidden_key, "num_attention_heads"))
    n_kv_heads = get("num_key_value_heads", n_heads)
    head_dim = get("head_dim", dim // n_heads if qwen2 else 128)
    if n_heads % n_kv_heads:
        refuse(where, "num_key_value_heads", f"a divisor of {n_heads}", n_kv_heads)
    if head_dim % 2:
        refuse(where, "head_dim", "an even number", head_dim)
    max_seq_len, theta, rope_factor, frequencies = read_rope(where, config, head_dim, options.yarn)
    bits = options.bits or (4 if source.levels else 8)
    group_size = options.group_size or (32 if bits == 4 else source.group_size)
    copied_levels = source.levels if group_size == 32 else ()
    levels = (copied_levels or LEVELS) if bits == 4 else ()
    widths = {"hidden_size": dim, hidden_key: hidden_dim,
              "num_attention_heads * head_dim": n_heads * head_dim}
    group_size = group_size or (32 if any(width % 64 for width in widths.values()) else 64)
    for key, width in widths.items():
        if width % group_size:
            refuse(where, key, f"a multiple of {group_size}, the quantization group", width)
    tied = config.get("tie_word_embeddings", False) is True
    return Config(
        dim, hidden_dim, get("num_hidden_layers"), n_heads, n_kv_heads, get("vocab_size"),
        max_seq_len, head_dim,
        shared_classifier=tied or source.embedding,  # an embedding model needs no classifier
        group_size=group_size, levels=levels, rms_norm_eps=get("rms_norm_eps", 1e-6),
        rope_theta=theta, rope_factor=rope_factor, frequencies=frequencies, qkv_bias=qwen2,
        no_qk_norm=qwen2, **(read_experts(where, config) if moe else {}))


def read_experts(where: Path, config: dict) -> dict[str, int | bool]:
    """Config's fields about experts, of a mixture of experts' config.json."""
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5
    n_experts, used = (number(where, config, name) for name in (key, "num_experts_per_tok"))
    if not 1 <= used <= n_experts:
        refuse(where, "num_experts_per_tok", f"from 1 to {key}, {n_experts}", used)
    norm = config.get("norm_topk_prob", False)
    if type(norm) is not bool:
        refuse(where, "norm_topk_prob", "true or false", repr(norm))
    return {"n_experts": n_experts, "n_experts_used": used, "no_topk_norm": not norm}


def check_family(where: Path, config: dict) -> None:
    """Refuses all but Qwen3, dense or with experts in every layer, and Qwen2: no sliding window."""
    family = config.get("architectures")
    if family not in (QWEN3, QWEN3_MOE, QWEN2):
        refuse(where, "not Qwen3's architecture", "one of " + ", ".join(QWEN3 + QWEN3_MOE + QWEN2),
               first_few(list(map(str, family or []))))
    if quantized := config.get("quantization_config") or config.get("quantization"):  # MLX's key
        refuse(where, "its quantized weights are not supported", "the unquantized checkpoint or a "
               "GGUF file", quantized.get("quant_method", quantized))
    good = {"hidden_act": "silu", "partial_rotary_factor": 1}
    if family != QWEN2:
        good |= {"attention_bias": False}
    if family == QWEN3_MOE:
        good |= {"mlp_only_layers": [], "decoder_sparse_step": 1, "qkv_bias": False,
                 "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    for key, value in good.items():
        supported(where, key, config.get(key), value, None)
    sliding = (config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
               and config.get("max_window_layers", 28) < config["num_hidden_layers"])
    layer_types = config.get("layer_types") or ["sliding" if sliding else "full_attention"]
    if set(layer_types) != {"full_attention"}:
        refuse(where, "its sliding window (use_sliding_window or layer_types) is not supported",
               "full attention in every layer", first_few(sorted(set(layer_types))))


def number(where: Path, values: dict, key: str, default: float | None = None):
    """values[key], or the default where it is absent or null: a number within its LIMITS."""
    low, high = LIMITS.get(key, OTHER_LIMITS)
    kind, value = type(low), values.get(key)
    value = default if value is None else value
    if type(value) not in (int, kind) or not low <= value <= high:
        refuse(where, key, f"an integer from {low} to {high}" if kind is int else
               f"a number from {low:g} to {high:g}", repr(value))
    return kind(value)


def read_rope(where: Path, config: dict, head_dim: int, yarn_factor: float | None) -> tuple:
    """max_seq_len, rope_theta, rope_factor and frequencies of Config, with transformers' precedence
    and defaults; with --yarn, as Qwen's model cards change them for long texts."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}  # in transformers 5
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    max_seq_len = number(where, config, "max_position_embeddings")
    if yarn_factor:
        if rope_type != "default":
            refuse(where, "its rope is scaled already: leave --yarn out", "no scaling", rope_type)
        # Qwen3's 40960 positions are the 32768 that it was trained on and 8192 for the answer.
        original = 32768 if max_seq_len == 40960 else max_seq_len
        rope_type, rope = "yarn", rope | {"factor": yarn_factor, ORIGINAL: original}
        longer = {"max_position_embeddings": int(yarn_factor * original)}
        max_seq_len = number(where, longer, "max_position_embeddings")
    supported(where, "rope_type", rope_type, "default", "yarn")
    theta = number(where, config | rope, "rope_theta", 10000.0)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "attn_factor"}
    if rope_type == "yarn":
        known |= {"factor", ORIGINAL, "truncate", "attention_factor", "beta_fast", "beta_slow",
                  "mscale", "mscale_all_dim"}
        rope = rope | {key: config[key] for key in {ORIGINAL} & config.keys()}  # outside it wins
    if unknown := sorted(rope.keys() - known):
        refuse(where, f"rope scaling {rope_type}", f"no keys but {', '.join(sorted(known))}",
               first_few(unknown))
    supported(where, "partial_rotary_factor", rope.get("partial_rotary_factor"), 1, None)
    if "attn_factor" in rope:
        notes.append("rope_scaling's attn_factor is ignored, as transformers ignores it")
    yarn = read_yarn(where, rope, theta, head_dim, max_seq_len) if rope_type == "yarn" else (0, ())
    return max_seq_len, theta, *yarn


def read_yarn(where: Path, rope: dict, theta: float, head_dim: int, max_seq_len: int) -> tuple:
    """(factor on cos and sin, head_dim / 2 frequencies in radians per position) of YaRN, arXiv
    2309.00071, as transformers' _compute_yarn_parameters has them (modeling_rope_utils.py), in fp32
    where that uses tensors. Only the powers are rounded from fp64, to be the same everywhere."""
    rope = rope | {key: rope.get(key) or None for key in ("beta_fast", "beta_slow")}  # 0: absent
    get = partial(number, where, rope)
    original = get(ORIGINAL, max_seq_len)
    # The factor must be there, but may be null.
    factor = get("factor", max_seq_len / original if "factor" in rope else None)
    growth = 0.1 * math.log(max(factor, 1))
    attention_factor = growth + 1
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = (growth * get("mscale") + 1) / (growth * get("mscale_all_dim") + 1)
    elif rope.get("mscale") or rope.get("mscale_all_dim"):
        notes.append("mscale or mscale_all_dim alone has no effect, as in transformers")
    if type(truncate := rope.get("truncate", True)) is not bool:
        refuse(where, "truncate", "true or false", repr(truncate))

    # Dimensions with more than beta_fast rotations in the original length keep their frequency,
    # those with fewer than beta_slow get frequency / factor; a linear ramp lies in between.
    low, high = (head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
                 for rotations in (get("beta_fast", 32), get("beta_slow", 1)))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.arange(head_dim // 2, dtype="<f4") - low
    ramp = np.clip(ramp / (high - low if high != low else 0.001), 0, 1)
    exponents = np.arange(0, head_dim, 2, dtype="<f4") / head_dim
    powers = (theta ** exponents.astype(float)).astype("<f4")
    frequencies = 1 / (factor * powers) * (1 - (1 - ramp)) + 1 / powers * (1 - ramp)
    return get("attention_factor", attention_factor), tuple(frequencies.tolist())


def header(c: Config) -> bytes:
    """The 256 bytes at the start of OUT.bin. From 0x30 on a 0 means the format's default."""
    theta, eps = (0 if np.float32(value) == np.float32(default) else value
                  for value, default in ((c.rope_theta, 1e6), (c.rms_norm_eps, 1e-6)))
    rope_scaling, layer_bits = 2 if c.frequencies else 0, 4 if c.levels else 0
    return struct.pack("<I11i2fIf20x2I2i3I16b128x", 0x616A6331, 1, *c[:10], theta, eps,
                       rope_scaling, *c[12:18], layer_bits, 0, *(c.levels or [0] * 16))


# ---- Tensors: where each one lies in *.safetensors, and the order in which OUT.bin has them ------

FREQUENCIES = "rope's frequencies"  # of scaled rope: the one tensor that is computed, not stored
SCALE_SIZES = {32: 0, 8: 4, 4: 2}  # bits of a value -> bytes of its group's scale, a float
# dtype -> (elements, bytes) of one block; a float type's block is one element
BLOCK_SIZES = {kind.name: block for kind, block in gguf.GGML_QUANT_SIZES.items()}
FLOAT_TYPES = {"BF16", "F16", "F32"}


class Tensor(NamedTuple):
    """A tensor, or a range of one's elements, in a safetensors or GGUF file, row-major."""
    name: str
    file: BinaryIO
    offset: int  # of its first byte in the file
    dtype: str  # safetensors' name or ggml's; the float types have the same name in both
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        elements, size = BLOCK_SIZES[self.dtype]
        return self.size // elements * size

    def part(self, start: int, *shape: int) -> Tensor:
        """A range of its elements, which begins and ends with a block of the dtype."""
        elements, size = BLOCK_SIZES[self.dtype]
        return self._replace(offset=self.offset + start // elements * size, shape=shape)

    def pieces(self) -> list[Tensor]:
        """The whole tensor as ranges of up to PIECE elements."""
        return [self.part(start, min(PIECE, self.size - start))
                for start in range(0, self.size, PIECE)]

    def read_bytes(self) -> bytes:
        raw = os.pread(self.file.fileno(), self.nbytes, self.offset)
        if len(raw) < self.nbytes:
            refuse(self.file.name, f"truncated in {self.name}", f"{self.nbytes} bytes", len(raw))
        return raw

    def read_fp32(self) -> np.ndarray:
        """(size,), writable."""
        raw = np.frombuffer(bytearray(self.read_bytes()), np.uint8)
        return gguf.dequantize(raw, gguf.GGMLQuantizationType[self.dtype])

    def encode(self, bits: int, c: Config) -> tuple[np.ndarray, np.ndarray]:
        """It as OUT.bin has it (see Output): (values, scales), no scales with 32 bits. What
        is_copied() is not quantized again: a GGUF block is an f16 scale, then its values."""
        if copied := self.is_copied(bits, c):
            block = np.dtype([("scale", "<f2"), ("values", "u1", 4 * bits)])
            blocks = np.frombuffer(self.read_bytes(), block)
        x = blocks["scale"] if copied else self.read_fp32()
        if not np.isfinite(x).all():
            refuse(self.file.name, self.name, "finite numbers", "infinity or NaN")
        if copied:
            return blocks["values"].ravel(), x.astype(f"<f{SCALE_SIZES[bits]}")
        if bits == 32:
            return x, x[:0]
        if bits == 8:
            return quantize(x, c.group_size)
        if (peak := np.abs(x).max()) > MOST_Q4:
            refuse(self.file.name, self.name, f"numbers up to {MOST_Q4} for --bits 4", peak)
        return quantize_q4(x, c.group_size)

    def is_copied(self, bits: int, c: Config) -> bool:
        """True if a GGUF file's blocks go to a matrix of so many bits as they are."""
        same = {8: self.dtype == "Q8_0", 4: GGUF_LEVELS.get(self.dtype) == c.levels}
        return c.group_size == 32 and same.get(bits, False)


def open_checkpoint(folder: Path) -> dict[str, Tensor]:
    """name -> tensor, of model.safetensors or of the shards in model.safetensors.index.json."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return open_safetensors(single)
    if not index.is_file():
        refuse(folder, "no weights", f"{single.name} or {index.name} (transformers' "
               "from_pretrained(), then save_pretrained() makes them)",
               first_few(sorted(path.name for path in folder.iterdir())))
    tensors: dict[str, Tensor] = {}
    with parsing(index):
        shard_of = read_json(index, TENSORS_SIZE)["weight_map"]
        if len(shard_of) > MOST_TENSORS:
            refuse(index, "too many tensors", f"at most {MOST_TENSORS}", "more")
        names = sorted(shard_of, key=shard_of.__getitem__)
        for shard, listed in itertools.groupby(names, key=shard_of.__getitem__):
            if Path(shard).name != shard or not (folder / shard).is_file():
                refuse(folder / shard, "missing", f"this file of {index.name}: download it again")
            found = open_safetensors(folder / shard)
            if wrong := sorted(found.keys() ^ set(listed)):
                refuse(index, "its shards hold other tensors (download them again)",
                       "those that it lists", f"a difference in {first_few(wrong)}")
            tensors |= found
    return tensors


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """name -> tensor, of one file. Its format: u64 length of the header; the header, JSON
    {name: {dtype, shape, data_offsets: [begin, end)}}; the data, which the tensors fill without gap
    or overlap. (The safetensors package's numpy reader does not know BF16.)"""
    file = open_file(path)
    file_size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    limit = min(file_size - 8, TENSORS_SIZE)
    if not 2 <= length <= limit:
        refuse(path, "broken safetensors (download it again)",
               f"a header of 2 to {max(2, limit)} bytes", length)
    entries = parse_json(file.read(length), path)
    entries.pop("__metadata__", None)
    tensors, position = {}, 0  # in the data
    with parsing(path):
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            if len(shape) > 4 or any(type(n) is not int for n in (*shape, begin, end)):
                refuse(path, f"shape or data_offsets of {name}", "up to 4 integers and 2", entry)
            tensors[name] = tensor = Tensor(name, file, 8 + length + begin, dtype, shape)
            size = tensor.nbytes if dtype in FLOAT_TYPES else abs(end - begin)  # refused later
            if [begin, end] != [position, position + size]:
                refuse(path, f"data_offsets of {name}", [position, position + size], [begin, end])
            position = end
    if 8 + length + position != file_size:
        refuse(path, "truncated or oversized", f"{8 + length + position} bytes (download it again)",
               file_size)
    return tensors


class Output(NamedTuple):
    """A tensor of OUT.bin. With bits 32: fp32 values. With 8: int8 values, then an fp32 scale for
    each group. With 4: bytes of two codes, then an fp16 scale for each group."""
    bits: int  # of a value
    names: list[str]  # without "model."; one for each expert, whose rows follow each other
    shape: tuple[int, ...]  # of the tensor with each name
    values: int  # offset of the first value in OUT.bin
    scales: int  # offset of the first scale
    end: int  # offset of what follows
    tensors: list[Tensor]  # the source, for each name; none in layout()

    @property
    def name(self) -> str:
        return self.tensors[0].name.replace(".experts.0.", ".experts.*.")

    def offsets(self, at: int, c: Config) -> tuple[int, int]:
        """Where a range from `at` on has its values and its scales in OUT.bin."""
        return (self.values + at * self.bits // 8,
                self.scales + at // c.group_size * SCALE_SIZES[self.bits])


def layout(c: Config) -> list[Output]:
    """The tensors of OUT.bin, in its order, without their source. Matrices are (out, in) and
    quantized. In a name below, * is the number of a layer and # of an expert."""
    q_dim, kv_dim = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    bits = 4 if c.levels else 8
    mlp = "layers.*.mlp.experts.#" if c.n_experts else "layers.*.mlp"
    rows = [  # (is it there, bits, name, shape)
        (True, 32, "layers.*.input_layernorm.weight", c.dim),
        (True, 32, "layers.*.post_attention_layernorm.weight", c.dim),
        (True, 32, "norm.weight", c.dim),
        (not c.no_qk_norm, 32, "layers.*.self_attn.q_norm.weight", c.head_dim),
        (not c.no_qk_norm, 32, "layers.*.self_attn.k_norm.weight", c.head_dim),
        (c.n_experts, 32, "layers.*.mlp.gate.weight", c.n_experts, c.dim),
        (c.frequencies, 32, FREQUENCIES, c.head_dim // 2),
        (True, 8, "embed_tokens.weight", c.vocab_size, c.dim),
        (True, bits, "layers.*.self_attn.q_proj.weight", q_dim, c.dim),
        (True, bits, "layers.*.self_attn.k_proj.weight", kv_dim, c.dim),
        (True, bits, "layers.*.self_attn.v_proj.weight", kv_dim, c.dim),
        (True, bits, "layers.*.self_attn.o_proj.weight", c.dim, q_dim),
        (True, bits, f"{mlp}.gate_proj.weight", c.hidden_dim, c.dim),
        (True, bits, f"{mlp}.down_proj.weight", c.dim, c.hidden_dim),
        (True, bits, f"{mlp}.up_proj.weight", c.hidden_dim, c.dim),
        (not c.shared_classifier, 8, "lm_head.weight", c.vocab_size, c.dim),
        (c.qkv_bias, 32, "layers.*.self_attn.q_proj.bias", q_dim),
        (c.qkv_bias, 32, "layers.*.self_attn.k_proj.bias", kv_dim),
        (c.qkv_bias, 32, "layers.*.self_attn.v_proj.bias", kv_dim)]
    outputs, offset = [], 256
    for bits, name, *shape in (row for there, *row in rows if there):
        for layer in range(c.n_layers if "*" in name else 1):
            names = [name.replace("*", str(layer)).replace("#", str(expert))
                     for expert in range(c.n_experts if "#" in name else 1)]
            size = len(names) * math.prod(shape)
            scales = offset + size * bits // 8
            end = scales + size // c.group_size * SCALE_SIZES[bits]
            outputs.append(Output(bits, names, tuple(shape), offset, scales, end, []))
            offset = end  # a multiple of 4, as a matrix has an even number of rows
    return outputs


def match_tensors(source: Source, c: Config, *rooms: Room) -> list[Output]:
    """The layout with its tensors: none may be missing, left over or of another shape."""
    where, outputs = source.path, layout(c)
    with parsing(where):
        stored = source.open_tensors(*rooms)
    if c.frequencies:  # a tensor like the others
        file = tempfile.TemporaryFile(buffering=0)
        file.write(np.array(c.frequencies, "<f4").tobytes())
        stored = stored | {FREQUENCIES: Tensor(FREQUENCIES, file, 0, "F32", (len(c.frequencies),))}
    found = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if len(found) < len(stored):
        refuse(where, "tensors", "each under one name", "some both with and without model.")
    wanted = {name: output.shape for output in outputs for name in output.names}
    extra = [tensor.name for name, tensor in found.items() if name not in wanted
             and name != "lm_head.weight"  # some checkpoints store it although it is tied
             and not name.endswith(".inv_freq")]  # rope's frequencies, from older programs
    missing = [name for name in wanted if name not in found]
    if missing or extra:
        refuse(where, "tensors", "the ones that config.json implies",
               f"missing: {first_few(missing)}; left over: {first_few(extra)}")
    for name, shape in wanted.items():
        tensor = found[name]
        if tensor.shape != shape:
            refuse(where, f"shape of {tensor.name}", list(shape), list(tensor.shape))
        try:
            tensor.part(0, min(256, tensor.size)).read_fp32()
        except (KeyError, NotImplementedError):
            refuse(where, f"dtype of {tensor.name}", "BF16, F16, F32 or, in a GGUF file, one that "
                   "the gguf package dequantizes", tensor.dtype)
    return [output._replace(tensors=[found[name] for name in output.names]) for output in outputs]


# ---- Weights: quantized to Q8_0 or four bits and written, piece by piece -------------------------

PIECE = 1 << 18  # elements: 1 MB in fp32 stays in a core's cache from one numpy pass to the next
# The 16 values of four bits before the scale: k-means on the weights of trained models
LEVELS = (-127, -100, -78, -61, -46, -33, -21, -9, 2, 13, 24, 36, 49, 64, 82, 106)
MOST_Q4 = 1 << 22  # the largest weight that LEVELS and an fp16 scale, up to 65504, surely reach


def write_model(out: BinaryIO, c: Config, outputs: list[Output]) -> None:
    """Writes OUT.bin: the header, then the tensors. Notes what the quantization costs."""
    def convert(output: Output, piece: Tensor, at: int) -> int:
        """Writes a range. Returns the number of groups that lose all of their value."""
        values, scales = piece.encode(output.bits, c)
        for data, offset in zip((values, scales), output.offsets(at, c)):
            write_at(out, data, offset)
        if scales.all() or output.bits == 8:
            return 0
        x = piece.read_fp32().reshape(len(scales), -1)
        return np.count_nonzero(x[scales == 0].any(axis=1))

    write_at(out, header(c), 0)
    if again := {tensor.dtype for output in outputs if output.bits < 32 for tensor in output.tensors
                 if not tensor.is_copied(output.bits, c)} - FLOAT_TYPES:
        notes.append(f"{', '.join(sorted(again))}: quantized again, in groups of {c.group_size}, "
                     "which adds an error of 0.5 % of the weights' rms where they get 8 bits, of 6 "
                     "to 9 % where they get 4; what the first quantization lost stays lost")
    if lost := sum(sum(groups) for _, groups in in_pieces(convert, outputs)):
        notes.append(f"{lost} groups of {c.group_size} weights became zeros, as four bits hold "
                     "none below about 0.000004; --bits 8 keeps them")  # an fp16 scale is then 0


def quantize(x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Q8_0 of x, (n,) fp32, which is overwritten: q (n,) int8 in -127..127 and scale
    (n / group_size,) fp32, so that x ~= q * scale. Per group, scale = max|x| / 127 and
    q = rint(x / scale), ties to even; where the scale is 0 (or rounds to 0), q is 0."""
    peak = np.maximum.reduceat(np.abs(x), np.arange(0, x.size, group_size))
    scale = peak / np.float32(127)
    x = x.reshape(-1, group_size)
    x /= np.where(scale > 0, scale, np.float32(1))[:, None]
    np.rint(x, out=x)
    np.clip(x, -127, 127, out=x)  # a subnormal scale is so coarse that x / scale may reach 190
    return x.astype(np.int8).ravel(), scale


def nearest(x: np.ndarray) -> np.ndarray:
    """The codes of the nearest LEVELS."""
    return np.searchsorted(np.convolve(LEVELS, [0.5, 0.5], "valid"), x).astype(np.uint8)


# numpy finds the nearest level fastest in a table that has an entry for each small cell of values.
CODES = nearest(np.arange(-256, 256, 0.5) + 0.25)  # exact, as bounds between LEVELS are n / 2
CELLS = np.linspace(-1, 1, 16384)  # of a group whose largest magnitude is 1; nearly exact
TRIALS = [np.float32(LEVELS)[nearest(CELLS * end / factor)]
          for end in (LEVELS[0], LEVELS[-1]) for factor in (0.8, 0.875, 0.95, 1.025, 1.1)]


def quantize_q4(x: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Four bits of x, (n,) fp32: bytes (n / 2,) and fp16 scales (n / group_size,), so that
    x ~= LEVELS[code] * scale. Byte j of a group holds code j in its low half and code
    j + group_size / 2 in its high one.

    Per group, a trial maps the value of largest magnitude near one end of LEVELS, and the others to
    their nearest levels l. The least-squares scale is then sum(x l) / sum(l l), and leaves an error
    of sum(x x) - sum(x l)^2 / sum(l l). The codes are chosen anew for the best trial's scale, after
    its rounding to fp16. The result does not depend on the machine: sums have a fixed order."""
    x = np.ascontiguousarray(x.reshape(-1, group_size).T)  # a column is a group
    high, low = x.max(axis=0), x.min(axis=0)
    peak = np.where(high > -low, high, low)
    x /= np.where(peak, peak, np.float32(1))
    cell = ((x + np.float32(1)) * np.float32(CELLS.size / 2)).astype(np.intp)
    levels, products = np.empty_like(x), np.empty_like(x)
    scale, most = np.zeros_like(peak), np.zeros_like(peak)
    for trial in TRIALS:
        np.take(trial, cell, out=levels, mode="clip")
        dot = np.multiply(x, levels, out=products).sum(axis=0)
        fit = dot / np.multiply(levels, levels, out=products).sum(axis=0)
        better = dot * fit > most
        np.copyto(scale, fit, where=better)
        np.copyto(most, dot * fit, where=better)
    scale = (scale * peak).astype("<f2")
    per_unit = peak / np.where(scale, scale, np.float32(np.inf))
    cell = (x * (2 * per_unit) + np.float32(512)).astype(np.intp)
    low, high = np.split(np.take(CODES, cell, mode="clip"), 2)
    return np.ascontiguousarray((low | high << 4).T).ravel(), scale


def decode(values: np.ndarray, scales: np.ndarray, bits: int, c: Config) -> np.ndarray:
    """(n,) fp32 of what Tensor.encode() gives."""
    if bits == 32:
        return values.view("<f4")
    groups = values.reshape(len(scales), -1)
    if bits == 8:
        return (groups.view("i1") * scales[:, None]).ravel()
    codes = np.concatenate([groups & 15, groups >> 4], axis=1)
    return (np.float32(c.levels)[codes] * scales.astype("<f4")[:, None]).ravel()


def in_pieces(work: Callable, outputs: list[Output]) -> Iterator[tuple[Output, list]]:
    """Yields each output with work(output, range of a source tensor, its start in the output) of
    its ranges. Several threads do it, as numpy and the system calls release the GIL."""
    total = sum(tensor.nbytes for output in outputs for tensor in output.tensors)
    with (ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
          tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar):  # None: on terminals
        for output in outputs:
            pieces = [piece for tensor in output.tensors for piece in tensor.pieces()]
            starts = itertools.accumulate((piece.size for piece in pieces), initial=0)
            yield output, list(pool.map(partial(work, output), pieces, starts))
            bar.update(sum(piece.nbytes for piece in pieces))


def write_at(file: BinaryIO, data: bytes | np.ndarray, offset: int) -> None:
    """Writes all of the data at a byte offset; threads may write to one file at the same time."""
    view = memoryview(data).cast("B") if len(data) else b""
    while len(view):
        written = os.pwrite(file.fileno(), view, offset)
        view, offset = view[written:], offset + written


# ---- Vocabulary: tokenizer.json as byte strings with merge scores --------------------------------

# Qwen's pre-tokenizer, the only one that qwen3.c has
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENIZERS = [
    {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]


class Vocabulary(NamedTuple):
    tokens: dict[int, bytes]  # id -> the token's bytes
    scores: dict[int, float]  # id -> merge score, of the tokens that a merge makes
    added: dict[str, tuple[int, bool]]  # text that no merge makes -> id, special (not printed)
    nfc: bool  # text is normalized to NFC first


def read_vocabulary(source: Source, vocab_size: int) -> Vocabulary:
    where, model = source.file("tokenizer.json"), source.tokenizer["model"]
    nfc = check_pipeline(where, source.tokenizer)
    added = read_added(where, source.tokenizer, source.tokenizer_config)
    vocab = {text: i for text, i in model["vocab"].items() if text not in added}
    for i in [*vocab.values(), *(i for i, _ in added.values())]:
        if type(i) is not int or not 0 <= i < vocab_size:
            refuse(where, "ids", f"0 to {vocab_size - 1}, as vocab_size says", repr(i))
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
    scores = merge_scores(where, vocab, merges)
    # GPT-2's letters for bytes: a printable byte's is itself, the n-th other byte's is U+0100 + n.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_of = dict(zip(letters, sorted(range(256), key=lambda byte: chr(byte) not in letters)))
    tokens = {i: bytes(map(byte_of.__getitem__, text)) for text, i in vocab.items()}
    if absent := {bytes([byte]) for byte in range(256)} - set(tokens.values()):
        refuse(where, "vocabulary", "all 256 single bytes", f"{256 - len(absent)} of them")
    tokens |= {i: text.encode() for text, (i, _) in added.items()}
    if len(tokens) != len(vocab) + len(added) or b"" in tokens.values():
        refuse(where, "tokens", "each with a text and an id of its own", "one without")
    return Vocabulary(tokens, scores, added, nfc)


def check_pipeline(where: Path, tokenizer: dict) -> bool:
    """Refuses a tokenizer.json that does what qwen3.c does not. True if it normalizes to NFC."""
    model = tokenizer["model"]
    supported(where, "model", model.get("type"), "BPE")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                "byte_fallback", "ignore_merges"):
        supported(where, f"model.{key}", model.get(key) or "none", "none")
    steps = (tokenizer["pre_tokenizer"] or {}).get("pretokenizers", [])
    steps = [{key: step[key] for key in step if key != "trim_offsets"} for step in steps]
    if steps != PRE_TOKENIZERS:
        refuse(where, "pre_tokenizer is not supported", "Qwen's", tokenizer["pre_tokenizer"])
    normalizer = tokenizer["normalizer"] or {"type": "Sequence", "normalizers": []}
    normalizers = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    supported(where, "normalizer", normalizers, [{"type": "NFC"}], [])
    return bool(normalizers)


def read_added(where: Path, tokenizer: dict, settings: dict) -> dict[str, tuple[int, bool]]:
    """text -> (id, special) of tokenizer.json's added tokens. One is special if either file says so
    or if it has a role (eos_token, ...). One that only the settings, tokenizer_config.json, have is
    refused: transformers would give it a new id."""
    listed = settings.get("added_tokens_decoder") or {}
    for token in [*tokenizer["added_tokens"], *listed.values()]:
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            if token.get(flag):
                refuse(where, f"{flag} of added token {token['content']!r}", "false", "true")
        if len(token["content"].encode()) > 128:
            refuse(where, "added_tokens", "at most 128 bytes in each, as qwen3.c", token["content"])
    added = {token["content"]: (token["id"], bool(token["special"]))
             for token in tokenizer["added_tokens"]}
    # What tokenizer_config.json says: (text, id or None, special)
    more = [(token["content"], int(i), token["special"]) for i, token in listed.items()]
    more += [(text, None, True) for text in role_tokens(settings).values()]
    more += [(token_text(token), None, True)
             for token in settings.get("additional_special_tokens") or []]
    for text, token_id, special in more:
        if text not in added or token_id not in (None, added[text][0]):
            refuse(where, "added_tokens", f"{text!r} as in tokenizer_config.json",
                   "it with another id" if text in added else "no such token")
        added[text] = added[text][0], added[text][1] or bool(special)
    return added


def role_tokens(tokenizer_config: dict) -> dict[str, str]:
    """Role (eos_token, ...) -> text, of the roles that tokenizer_config.json gives to a token."""
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {role: text for role in roles if (text := token_text(tokenizer_config.get(role)))}


def token_text(value: str | dict | None) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object that holds it."""
    return value["content"] if isinstance(value, dict) else value


def merge_scores(where: Path, vocab: dict[str, int], merges: list[tuple]) -> dict[int, float]:
    """id -> -log(rank + 1) of the merge that makes the token: an earlier merge scores higher. As a
    token has one score, all merges that make it must follow each other in the list.
    qwen3.c has no list: it merges any two neighbours that together are a token, the best score
    first. Both ways give the same ids if the package encodes the text of every token to that token
    alone: two neighbours that form a token have come about just as within the token's own text,
    where the list merges them last. Any other vocabulary is refused."""
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
    bpe = models.BPE(vocab=vocab, merges=merges)
    for token in vocab:
        if len(bpe.tokenize(token)) != 1:
            refuse(where, f"token {token!r}", "merges that make it", "none that do")
    return scores


# ---- Unicode: the tokenizers package's character classes and NFC as tables -----------------------
# The package's regular expressions and its normalizer have two different Unicode versions inside,
# and Python has a third, the newest. So the package is asked which characters it classifies or
# changes; how it changes them is from unicodedata, as that is the same in all versions.

# All code points that may be assigned: planes 0 to 3 and 14, without the surrogates
CHARACTERS = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000)]))


def unicode_sections(nfc: bool) -> dict[str, bytes]:
    """The tokenizer file's sections `clas`, `ccc ` and `deco`, the last two empty without NFC."""
    splits = [pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
              for pattern in (r"\p{L}+", r"\p{N}+", r"\s+")]
    classes = {ord(char): number for number, split in enumerate(splits, 1)
               for piece, _ in split.pre_tokenize_str(CHARACTERS) for char in piece}
    sections = {"clas": u32(*runs(classes)), "ccc ": b"", "deco": b""}
    if not nfc:
        return sections

    # Canonical combining classes, of the marks that NFD sorts by it
    decompose, compose = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    low, high = "\u0334", "\u0345"  # marks of the lowest class, 1, and of the highest, 240
    marks = {ord(char): unicodedata.combining(char) for char in CHARACTERS
             if unicodedata.combining(char)
             and char in (text := decompose(high + char + low))  # else decomposed before the sort
             and text != high + char + low}

    # (character, first, second or 0, whether NFC composes it again): one step of a canonical
    # decomposition. Hangul, which is arithmetic, is left out.
    steps = []
    for char in CHARACTERS:
        step = unicodedata.decomposition(char)  # "0041 0300"; "<compat> 0020" is none of NFD's
        if step and step[0] != "<" and decompose(char) != char:
            first, second = [*(int(code, 16) for code in step.split()), 0][:2]
            steps.append((ord(char), first, second, compose(char) == char))
    return sections | {"ccc ": u32(*runs(marks)), "deco": u32(*steps)}


def runs(classes: dict[int, int]) -> np.ndarray:
    """Rows of (first, last, class), one for each run of code points of one class, ascending."""
    codes, numbers = np.array(sorted(classes.items())).T
    last = np.flatnonzero((np.diff(codes, append=-1) != 1) | (np.diff(numbers, append=0) != 0))
    first = [0, *last[:-1] + 1]
    return np.stack([codes[first], codes[last], numbers[last]], axis=1)


# ---- Chat: the checkpoint's Jinja template as twelve strings -------------------------------------
# qwen3.c has no Jinja. It renders a conversation from twelve strings (Pieces). They are found by
# rendering the template with marked contents, and are used only if they give the same text as the
# template on many trial conversations.

TEMPLATE_SECONDS = 20  # Qwen's templates take 0.3
Message = tuple[str, str]  # role, content
Conversation = tuple[tuple[Message, ...], "bool | None"]  # thinking; None: opens no answer


class Pieces(NamedTuple):
    """In the order of the section `chat`."""
    start: str
    no_system: str  # follows start where there is no system message
    system_open: str  # before the system message's content
    system_close: str  # after it
    user_open: str
    user_close: str
    assistant_open: str
    assistant_close: str
    answer_plain: str  # opens the answer to be generated, thinking off
    answer_think: str  # the same, thinking on
    strip: str  # an earlier answer is cut up to and including the last of these
    trim: str  # the characters that are then removed from its beginning

    def render(self, messages: tuple[Message, ...], thinking: bool | None) -> str:
        """A conversation as qwen3.c renders it."""
        text = self.start + ("" if messages[0][0] == "system" else self.no_system)
        for role, content in messages:
            if role == "assistant" and self.strip and self.strip in content:
                content = content.rpartition(self.strip)[2].lstrip(self.trim)
            text += getattr(self, f"{role}_open") + content + getattr(self, f"{role}_close")
        return text + ("" if thinking is None else (self.answer_plain, self.answer_think)[thinking])


def chat_pieces(template: str | None, variables: dict[str, str]) -> Pieces | None:
    """The verified pieces of a template, or None and a note that says why there are none."""
    if not template:
        notes.append("the checkpoint has no chat template: qwen3 will continue texts; -m chat will "
                     "use plain ChatML")
        return None
    try:
        trials = trial_conversations()
        texts = render_all(template, variables, [*MARKED, *trials])
        pieces = find_pieces(texts, variables.get("bos_token", ""))
        for messages, thinking in trials:
            if pieces.render(messages, thinking) != texts[messages, thinking]:
                raise ValueError(f"it differs for {messages}, enable_thinking={thinking}")
        "".join(pieces).encode()  # a ValueError, too, if they hold half of a surrogate pair
        return pieces
    except (ValueError, OSError) as error:
        notes.append("warning: the chat template is more than fixed strings around the messages, "
                     f"qwen3 will chat in plain ChatML: {error}")
        return None


def render_all(template: str, variables: dict, conversations: list) -> dict[Conversation, str]:
    """The text that a template makes of each conversation. ValueError if it fails. A template is an
    untrusted program, which may never end or take all memory: it runs in a process of its own."""
    code = inspect.getsource(template_process) + "template_process()"
    packages = [str(Path(module.__file__).parents[1]) for module in (jinja2, markupsafe)]
    try:
        done = subprocess.run(  # -I -S: with no modules but Python's own and these
            [sys.executable, "-I", "-S", "-c", code, *packages], stdout=subprocess.PIPE,
            input=json.dumps([template, variables, conversations]), stderr=subprocess.DEVNULL,
            encoding="ascii", timeout=TEMPLATE_SECONDS,
            env={name: os.environ[name] for name in {"SYSTEMROOT"} & os.environ.keys()})
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {TEMPLATE_SECONDS} s") from None
    if done.returncode:
        raise ValueError(f"its process ended with status {done.returncode}")
    texts, error = json.loads(done.stdout)
    if error:
        raise ValueError(error)
    return dict(zip(conversations, texts))


def template_process() -> None:
    """That process: the arguments of render_all() come by stdin and [texts, error] go to stdout, as
    JSON. The template runs as in transformers (chat_template_utils.py, render_jinja_template)."""
    import json
    import sys
    from contextlib import suppress
    sys.path += sys.argv[1:]
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    with suppress(ImportError, AttributeError, ValueError, OSError):  # Windows, macOS: no limit
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))

    def fail(message):
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    env.globals.update(raise_exception=fail, strftime_now=lambda _: fail("it writes the date"))
    source, variables, conversations = json.load(sys.stdin)
    texts, error = [], None
    try:
        template = env.from_string(source)
        for messages, thinking in conversations:
            switch = {} if thinking is None else {"enable_thinking": thinking}
            texts.append(template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                tools=None, documents=None, **variables, **switch,
                add_generation_prompt=thinking is not None))
            if sum(map(len, texts)) > 5_000_000:
                fail(f"{len(texts)} conversations make more than 5,000,000 characters")
    except Exception as exception:  # whatever a template may raise
        texts, error = [], f"{type(exception).__name__}: {exception}"[:1000]
    print(json.dumps([texts, error]))


SYSTEM, USER, ANSWER, NEXT = (("system", "SYSTEMTEXT"), ("user", "USERTEXT"),
                              ("assistant", "ANSWERTEXT"), ("user", "NEXTTEXT"))
THINK_END = "</think>"
TALK = USER, ANSWER, NEXT
# Those of which a template that strips the thinking makes the text of TALK: character -> messages
THOUGHT = {char: (USER, ("assistant", f"x{THINK_END}{char}{ANSWER[1]}"), NEXT)
           for char in ["", *" \t\n\r\v\f"]}
MARKED: list[Conversation] = [  # those from which find_pieces() finds the pieces
    ((SYSTEM, *TALK), None), ((USER, ANSWER), None), ((USER,), None), ((USER,), False),
    ((USER,), True), (TALK, None), *((messages, None) for messages in THOUGHT.values())]


def find_pieces(texts: dict[Conversation, str], bos: str) -> Pieces:
    """The pieces that a template seems to have. ValueError if a text has not each message once."""
    def gaps(*messages: Message, thinking: bool | None = None) -> list[str]:
        """The rendered text before, between and after the contents."""
        rest, before = texts[messages, thinking], []
        for _, content in messages:
            gap, rest = rest.split(content)
            before.append(gap)
        return before + [rest]

    # Each gap is one piece or two in a row; where it is two, another gap is one of them.
    first, after_system, before_answer, after_answer, user_close = gaps(SYSTEM, *TALK)
    assistant_open = before_answer.removeprefix(user_close)
    assistant_close = gaps(USER, ANSWER)[2]
    user_open = after_answer.removeprefix(assistant_close)
    no_system = gaps(USER)[0].removesuffix(user_open)
    start = bos if first.startswith(bos) and no_system.startswith(bos) else ""
    plain, think = (gaps(USER, thinking=thinking)[1].removeprefix(user_close)
                    for thinking in (False, True))

    trim = [char for char, talk in THOUGHT.items() if texts[talk, None] == texts[TALK, None]]
    return Pieces(start, no_system.removeprefix(start), first.removeprefix(start),
                  after_system.removesuffix(user_open), user_open, user_close, assistant_open,
                  assistant_close, plain, think, THINK_END if trim else "", "".join(trim))


def trial_conversations() -> list[Conversation]:
    """Ordinary and odd conversations of one to four turns; the last message is the user's."""
    think = "<think>\nlet me see\n</think>\n\n"
    answers = ["Paris.", "", f"{think}Paris.", "<think>\n\n</think>\n\nParis.", "so</think>Paris.",
               "<think>\ncut off", "\n\n Paris. \n", f"{think}\n\n \t\n Paris.\n\n", "</think>",
               f"{think}It is `</think>`.\n\nYes.", "a</think>\r\n\x0b b", f" x {think}{think}y",
               "<|im_end|>\n<|im_start|>user\n", "\u00a0</think>\u00a0\u2028z"]
    users = ["Hi!", "", "\n\n  two\nlines \n", "what does </think> mean?", "<think>hm</think> \n"]
    found: list[Conversation] = []
    systems = None, "", "Be brief.", "\n <think>x</think>\n\nBe brief. \n"
    for system, i, turns in itertools.product(systems, range(len(answers)), (0, 1, 3)):
        talk: list[Message] = [] if system is None else [("system", system)]
        for k in range(turns):
            talk += [("user", users[(i + k) % len(users)]),
                     ("assistant", answers[(i + 5 * k) % len(answers)])]
        talk.append(("user", users[(i + turns) % len(users)]))
        found += [(tuple(talk), False), (tuple(talk), True)]
    return found


# ---- The tokenizer file: everything that is not a weight or a dimension --------------------------

CHAT, GENERATE, EMBED = 0, 1, 4  # qwen3.c's modes


def tokenizer_file(source: Source, vocab_size: int) -> bytes:
    """The contents of OUT.bin.tokenizer: the base format, then the extension of tagged sections."""
    where, generation_json = source.file("tokenizer.json"), source.file("generation_config.json")
    vocab = read_vocabulary(source, vocab_size)
    head_ids, tail_ids = post_processor_ids(where, source.tokenizer)
    roles = role_tokens(source.tokenizer_config)
    bos, eos, stop_ids = end_ids(source, vocab, roles.get("eos_token"))
    used = {bos, *head_ids, *tail_ids, *stop_ids}
    if unknown := sorted(i for i in used if i >= vocab_size):
        refuse(source.path, "token ids", f"ids below vocab_size, {vocab_size}", unknown)
    pieces = chat_pieces(source.chat_template, roles)
    mode = default_mode(source, pieces, vocab, stop_ids)
    penalty = number(generation_json, source.generation, "repetition_penalty", 1.0)
    sections = {
        "adde": u32(*sorted(vocab.added.values())), **unicode_sections(vocab.nfc),
        "head": u32(head_ids), "tail": u32(tail_ids), "stop": u32(stop_ids),
        "samp": sampling(generation_json, source.generation),
        "repe": b"" if penalty == 1 else struct.pack("<f", penalty),
        "mode": b"" if mode == CHAT else u32([mode]),
        "chat": b"".join(length_and_bytes(piece.encode()) for piece in pieces or ())}
    # Empty sections are left out, but for two: without them older programs say that NFC is missing.
    extension = b"".join(tag.encode() + length_and_bytes(payload)
                         for tag, payload in sections.items() if payload or tag in ("ccc ", "deco"))
    records = b"".join(struct.pack("<f", vocab.scores.get(i, -1e6))
                       + length_and_bytes(vocab.tokens.get(i, b"")) for i in range(vocab_size))
    return (struct.pack("<3I", max(map(len, vocab.tokens.values())), bos, eos) + records
            + b"q3tx" + struct.pack("<I", 1) + length_and_bytes(extension))


def length_and_bytes(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def u32(*rows: list[int] | tuple[int, ...]) -> bytes:
    return np.array(rows, "<u4").tobytes()


def end_ids(source: Source, vocab: Vocabulary, eos_token: str | None) -> tuple[int, int, list]:
    """(bos, eos, all ids that end an answer). These are the ones in config.json and
    generation_config.json, and tokenizer_config.json's eos_token: in a base model the former have
    what ends a text, but only the latter may be what ends a turn of a chat."""
    config_bos, config_eos, generation_bos, generation_eos = (
        id_list(source.file(name), values.get(key))
        for name, values in (("config.json", source.config),
                             ("generation_config.json", source.generation))
        for key in ("bos_token_id", "eos_token_id"))
    end_of_text, end_of_turn = ([vocab.added[text][0]] if text in vocab.added else []
                                for text in ("<|endoftext|>", eos_token))
    bos = config_bos + generation_bos + end_of_text
    eos = config_eos + generation_eos + end_of_text
    if not bos or not eos:
        refuse(source.file("config.json"), "the ids of bos and eos are missing",
               "bos_token_id and eos_token_id, or a token <|endoftext|>", "neither")
    stop_ids = generation_eos + config_eos + end_of_turn or end_of_text
    return bos[0], eos[0], list(dict.fromkeys(stop_ids))  # each once


def id_list(where: Path, value: object) -> list[int]:
    """eos_token_id and the like: absent, one id or a list of them."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 2**32 for i in ids):
        refuse(where, "token id", "an id or a list of ids", repr(value))
    return ids


def default_mode(source: Source, pieces: Pieces | None, vocab: Vocabulary, stop_ids: list) -> int:
    """What qwen3 does without -m. A base model may have a chat template, too; it is known by the
    token that ends a turn, which is not among the ids that end its texts."""
    if source.embedding:
        return EMBED
    close = pieces.assistant_close if pieces else ""
    turn_end = {i for text, (i, _) in vocab.added.items() if text in close}
    if source.chat_template and (not turn_end or turn_end & set(stop_ids)):
        return CHAT
    if source.chat_template:
        notes.append("the chat template's end of turn is not among the ids that end a text: this "
                     "is a base model, qwen3 will continue texts; -m chat overrides this")
    return GENERATE


def sampling(where: Path, generation: dict) -> bytes:
    """The section `samp`, empty if generation_config.json sets nothing of it."""
    # transformers' defaults, but for do_sample, which is false there
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "do_sample": True}
    given = {key: generation[key] for key in defaults if generation.get(key) is not None}
    if generation.get("min_p"):
        notes.append(f"{where.name}: min_p {generation['min_p']!r} is ignored: qwen3 has no min_p")
    if not given:
        return b""
    values = defaults | given
    temperature, *more = (number(where, values, key) for key in ("temperature", "top_p", "top_k"))
    return struct.pack("<2fI", temperature if values["do_sample"] else 0.0, *more)


# ---- GGUF: a file by llama.cpp's converter, turned back into Hugging Face's files ----------------
# The gguf package dequantizes. Its reader is not used, as it needs seconds and half a GB for a real
# vocabulary. Format: github.com/ggml-org/ggml, docs/gguf.md.

GGUF_STRING, GGUF_ARRAY = 8, 9  # types of metadata values; the rest are scalars:
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
                12: "d"}  # type -> struct's letter
GGUF_LEVELS = {"Q4_0": tuple(range(-8, 8)), "IQ4_NL": gguf.quants.IQ4_NL.kvalues}
GGUF_TENSORS = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj",
    "ffn_up": "mlp.up_proj", "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.#.gate_proj",
    "ffn_down_exps": "mlp.experts.#.down_proj", "ffn_up_exps": "mlp.experts.#.up_proj"}
GGUF_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                 "penalty_repeat": "repetition_penalty"}
# Tokens that the converter marks as special because they look so; in Qwen's files they are not.
GGUF_NOT_SPECIAL = {f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad",
                                               "repo_name", "file_sep")}


def read_gguf(path: Path) -> Source:
    with parsing(path):
        tensors: dict[str, Tensor] = {}
        metadata = open_gguf(path, tensors)
        count = metadata.get("split.count", 1)
        if count > 1 and "-00001-of-" not in path.name:
            refuse(path, "one of several parts", f"the first, NAME-00001-of-{count:05}.gguf",
                   path.name)
        for i in range(2, count + 1):
            open_gguf(path.with_name(path.name.replace("-00001-of-", f"-{i:05}-of-")), tensors)
        config = gguf_config(path, metadata, tensors)
        ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        tokenizer = gguf_tokenizer(path, ggml)
        texts = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
        bos, eos, eot, eom = (ggml.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
        stop_ids = [i for i in (eos, eot, eom) if i is not None]  # ends of text, turn, message
        stop_ids += [i for i, text in texts.items() if text == "<|endoftext|>"]
        generation = {name: metadata.get(f"general.sampling.{key}")
                      for key, name in GGUF_SAMPLING.items()}
        pooling = metadata.get(f"{metadata['general.architecture']}.pooling_type", 0)
        supported(path, "pooling_type", pooling, 0, int(gguf.PoolingType.LAST))
        kinds = {tensor.dtype for tensor in tensors.values()}
        in_layers = {tensor.dtype for name, tensor in tensors.items() if "_proj.weight" in name}
        return Source(
            path=path, name=re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name),
            config=config | {"bos_token_id": bos, "eos_token_id": eos},
            tokenizer=tokenizer,
            tokenizer_config={"bos_token": texts.get(bos), "eos_token": texts.get(eos)},
            generation=generation | {"eos_token_id": stop_ids},
            chat_template=metadata.get("tokenizer.chat_template"),
            open_tensors=lambda *_: tensors, embedding=pooling != 0,
            group_size=32 if "Q8_0" in kinds else None,
            levels=GGUF_LEVELS.get(in_layers.pop(), ()) if len(in_layers) == 1 else ())


def gguf_config(path: Path, metadata: dict, tensors: dict[str, Tensor]) -> dict:
    """The contents of config.json."""
    families = {"qwen2": QWEN2, "qwen3": QWEN3, "qwen3moe": QWEN3_MOE}
    family = metadata.get("general.architecture")
    supported(path, "general.architecture", family, *families)
    model = {key.removeprefix(f"{family}."): value for key, value in metadata.items()}
    dim, n_heads = model["embedding_length"], model["attention.head_count"]
    head_dim = model.get("attention.key_length", dim // n_heads)
    embedding, classifier = tensors["embed_tokens.weight"], tensors.get("lm_head.weight")
    tied = classifier is None or (
        (embedding.dtype, embedding.shape) == (classifier.dtype, classifier.shape)
        and all(a.read_bytes() == b.read_bytes()
                for a, b in zip(embedding.pieces(), classifier.pieces())))
    return {
        "architectures": families[family], "hidden_size": dim,
        "intermediate_size": model.get("feed_forward_length"),
        "moe_intermediate_size": model.get("expert_feed_forward_length"),
        "num_experts": model.get("expert_count"),
        "num_experts_per_tok": model.get("expert_used_count"),
        "norm_topk_prob": True,  # there is no key for it: llama.cpp always divides
        "num_hidden_layers": model["block_count"], "num_attention_heads": n_heads,
        "num_key_value_heads": model.get("attention.head_count_kv"), "head_dim": head_dim,
        "vocab_size": embedding.shape[0], "max_position_embeddings": model["context_length"],
        "rms_norm_eps": model["attention.layer_norm_rms_epsilon"],
        "rope_theta": model.get("rope.freq_base"), "rope_scaling": gguf_rope(model),
        "partial_rotary_factor": model.get("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": tied}


def gguf_rope(model: dict) -> dict:
    """config.json's rope_scaling."""
    rope = {key.removeprefix("rope.scaling.").removeprefix("yarn_"): value
            for key, value in model.items() if key.startswith("rope.scaling.") and value != "none"}
    rope.pop("finetuned", None)  # does not change what is computed
    if "original_context_length" in rope:
        rope[ORIGINAL] = rope.pop("original_context_length")
    # DeepSeek's attn_factor is 1 / default and undoes it in llama.cpp; transformers ignores it.
    if "attn_factor" in rope:
        if abs(rope["attn_factor"] * (0.1 * math.log(rope["factor"]) + 1) - 1) >= 1e-3:
            rope["attention_factor"] = rope.pop("attn_factor")
    return rope


def gguf_tokenizer(path: Path, ggml: dict) -> dict:
    """The contents of tokenizer.json, from the metadata under tokenizer.ggml."""
    supported(path, "tokenizer.ggml.model", ggml.get("model"), "gpt2")
    supported(path, "tokenizer.ggml.pre", ggml.get("pre"), "qwen2", "deepseek-r1-qwen")
    types = gguf.TokenType
    ids: dict[int, dict[str, int]] = {  # type -> text -> id
        types.NORMAL: {}, types.CONTROL: {}, types.USER_DEFINED: {}, types.UNUSED: {}}
    for i, (text, token_type) in enumerate(zip(ggml["tokens"], ggml["token_type"], strict=True)):
        supported(path, f"token_type of {text!r}", token_type, *map(int, ids))
        ids[token_type][text] = i
    if sum(map(len, ids.values())) < len(ggml["tokens"]):
        refuse(path, "tokens", "each with a text of its own", "a text twice")
    special = ids[types.CONTROL].keys() - GGUF_NOT_SPECIAL
    added = ids[types.CONTROL] | ids[types.USER_DEFINED]
    around = {name: {"ids": [ggml[f"{name}_token_id"]] if ggml.get(f"add_{name}_token") else []}
              for name in ("bos", "eos")}
    return {"model": {"type": "BPE", "vocab": ids[types.NORMAL], "merges": ggml["merges"]},
            "normalizer": {"type": "NFC"}, "pre_tokenizer": {"pretokenizers": PRE_TOKENIZERS},
            "post_processor": {"type": "TemplateProcessing", "special_tokens": around, "single": [
                {"SpecialToken": {"id": "bos"}}, {"Sequence": {"id": "A"}},
                {"SpecialToken": {"id": "eos"}}]},
            "added_tokens": [{"id": i, "content": text, "special": text in special}
                             for text, i in added.items()]}


def open_gguf(path: Path, tensors: dict[str, Tensor]) -> dict:
    """Returns the file's metadata, and adds its tensors, by Hugging Face's name. The file holds:
    "GGUF", u32 version, u64 number of tensors, u64 number of metadata values;
    each metadata value: string key, u32 type, value;
    each tensor: string name, u32 number of dimensions, u64 dimensions, innermost first, u32 dtype,
    u64 offset in the data; after padding, the data."""
    file, size = open_file(path), path.stat().st_size
    with parsing(path):
        magic, version, n_tensors, n_values = unpack(file, "4sI2Q")
        if magic != b"GGUF":
            refuse(path, "not supported", "a checkpoint's directory or a GGUF file",
                   f"a file that begins with {magic!r}")
        if version not in (2, 3):
            found = "a big-endian one" if version % 65536 == 0 else f"version {version}"
            refuse(path, "not supported", "a little-endian GGUF file of version 2 or 3", found)
        metadata = {gguf_string(file): gguf_value(file, *unpack(file, "I"))
                    for _ in range(n_values)}
        entries = [(gguf_string(file), unpack(file, f"{unpack(file, 'I')[0]}Q"),
                    *unpack(file, "IQ")) for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        data = -(-file.tell() // alignment) * alignment  # rounded up
        for name, shape, kind, offset in entries:
            if len(shape) > 4 or len(name) > 64:  # ggml's limits, too
                refuse(path, f"shape of {name}", "up to 4 dimensions and 64 letters of its name",
                       f"{len(shape)} and {len(name)}")
            dtype = gguf.GGMLQuantizationType(kind).name
            if shape[0] % (elements := BLOCK_SIZES[dtype][0]):
                refuse(path, f"rows of {name}", f"a multiple of {elements}", shape[0])
            tensor = Tensor(name, file, data + offset, dtype, shape[::-1])
            if (end := tensor.offset + tensor.nbytes) > size:
                refuse(path, f"truncated in {name}", f"{end} bytes (download it again)", size)
            more = hf_tensors(path, tensor)
            if again := tensors.keys() & more.keys():
                refuse(path, "tensors", "each once", f"{first_few(sorted(again))} twice")
            tensors |= more
            if len(tensors) > MOST_TENSORS:
                refuse(path, "too many tensors", f"at most {MOST_TENSORS}", "more")
    return metadata


def unpack(file: BinaryIO, letters: str) -> tuple:
    """The next values of a GGUF file, by struct's letters. struct.error at its end."""
    size = struct.calcsize("<" + letters)
    if file.tell() + size > TOKENIZER_SIZE:
        raise ValueError(f"more than {TOKENIZER_SIZE} bytes of metadata")
    return struct.unpack("<" + letters, file.read(size))


def gguf_string(file: BinaryIO) -> str:
    (length,) = unpack(file, "Q")
    (text,) = unpack(file, f"{length}s")
    return text.decode(errors="surrogateescape")  # the template may hold what is no UTF-8


def gguf_value(file: BinaryIO, kind: int) -> object:
    """A metadata value of this type."""
    if kind == GGUF_STRING:
        return gguf_string(file)
    if kind != GGUF_ARRAY:
        return unpack(file, GGUF_SCALARS[kind])[0]
    kind, count = unpack(file, "IQ")
    if kind in GGUF_SCALARS:
        return list(unpack(file, f"{count}{GGUF_SCALARS[kind]}"))
    return [gguf_value(file, kind) for _ in range(count)]


def hf_tensors(path: Path, tensor: Tensor) -> dict[str, Tensor]:
    """By Hugging Face's names: blk.0.attn_q.weight is layers.0.self_attn.q_proj.weight, and a
    tensor (experts, out, in) has all experts'. Unknown names stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
    if not match or match[2] not in GGUF_TENSORS:
        return {tensor.name: tensor}
    name = (f"layers.{match[1]}." if match[1] else "") + GGUF_TENSORS[match[2]] + "." + match[3]
    if "#" not in name:
        return {name: tensor}
    n_experts, *shape = tensor.shape
    most = LIMITS["num_experts"][1]
    if n_experts > most or len(shape) != 2:
        refuse(path, f"shape of {tensor.name}", f"up to {most} experts' matrices", [*tensor.shape])
    return {name.replace("#", str(i)): tensor.part(i * math.prod(shape), *shape)
            for i in range(n_experts)}


# ---- --check and --plot: OUT.bin compared with SOURCE --------------------------------------------

def check(options: argparse.Namespace) -> None:
    """Compares OUT.bin and its tokenizer file with the source; a table of the errors on stdout."""
    name, out, picture = options.source, options.out, options.plot
    if picture and not importlib.util.find_spec("matplotlib"):
        refuse("--plot", "needs matplotlib", "`uv run --with matplotlib export.py ...` or "
               "`pip install matplotlib`", "no such package")
    source = find_source(name, None)
    eight, four = (Path(source.name + suffix) for suffix in SUFFIXES.values())
    out = out or (four if four.exists() and not eight.exists() else eight)
    if not out.exists():
        refuse(out, "missing", f"the file to compare with {name}, which export.py makes")
    with open_file(out) as file:
        found = file.read(256).ljust(256, b"\0")  # a short file is found out below
        # From 0x2C, 0x38, 0x3C and 0x68
        group_size, rope_scaling, factor, layer_bits = struct.unpack_from("<44xI8xIf40xI", found)
        supported(out, "group_size", group_size, *GROUP_SIZES)
        supported(out, "rope_scaling (export it again)", rope_scaling, 0, 2)
        supported(out, "layer_bits", layer_bits, 0, 4)
        options.bits, options.group_size = layer_bits or 8, group_size
        config, tokenizer = read_settings(source, options)
        expected, actual = (f"cos and sin times {x:g}" if x else "no scaling"
                            for x in (config.rope_factor, factor))
        if expected != actual:  # --yarn is easily forgotten
            refuse(out, "its scaling of rope (YaRN) is not what the source gives, --check needs "
                   "the --yarn of the export", expected, actual)
        check_bytes(out, "the header", header(config), found)
        path = Path(f"{out}.tokenizer")
        check_bytes(path, "the file", tokenizer, read_file(path, most=2 * len(tokenizer)))
        outputs = match_tensors(source, config)
        if (actual := out.stat().st_size) != outputs[-1].end:
            refuse(out, "truncated or oversized", f"{outputs[-1].end} bytes", actual)
        errors = check_tensors(file, config, outputs)
    if picture:
        title = f"{out.name} against {Path(name).name}"
        plot(picture, title.encode(errors="replace").decode(), errors)  # a name may be no UTF-8
    worst = max(errors, key=errors.__getitem__)
    say(f"{out} matches {name}: header, tokenizer and {len(outputs)} tensors; "
        f"rms error at most {errors[worst]:.2g} %, in {worst}")


def check_bytes(path: Path, what: str, expected: bytes, found: bytes) -> None:
    """Refuses bytes that differ, and shows the first 32-bit word that does."""
    if found != expected:
        at = next((i for i in range(0, len(expected), 4) if expected[i:i + 4] != found[i:i + 4]),
                  len(expected))
        refuse(path, f"{what} is not what the source gives, at byte {at:#x}",
               expected[at:at + 4].hex(" ") or "its end", found[at:at + 4].hex(" ") or "its end")


def check_tensors(file: BinaryIO, c: Config, outputs: list[Output]) -> dict[str, float]:
    """Compares OUT.bin's tensors with what an export makes of the source, and prints the table.
    Returns each matrix's rms error in % of the weights' rms."""
    def compare(output: Output, piece: Tensor, at: int) -> tuple[float, float, float]:
        """Of a range: (sum of squares, sum of squared errors, largest error in half steps)."""
        parts = piece.encode(output.bits, c)
        expected = decode(*parts, output.bits, c)
        found = decode(*(np.frombuffer(os.pread(file.fileno(), part.nbytes, offset), part.dtype)
                         for part, offset in zip(parts, output.offsets(at, c))), output.bits, c)
        if (wrong := found != expected).any():
            i = int(wrong.argmax())
            expert = [len(output.tensors)] if len(output.tensors) > 1 else []
            place = list(map(int, np.unravel_index(at + i, (*expert, *output.shape))))
            refuse(file.name, f"{output.name} {place}", f"{expected[i]:.9g}", f"{found[i]:.9g}")
        x = piece.read_fp32().astype(float)  # in fp64 no square is too large
        error, largest = np.abs(x - found), 0.0
        if output.bits < 32:
            _, scales = parts
            smallest = np.finfo(scales.dtype).smallest_subnormal  # a group's scale may round to 0
            steps = np.abs(scales).clip(smallest) * np.float32(max(np.diff(c.levels or (0, 1))))
            largest = 2 * float((error.reshape(len(steps), -1).max(axis=1) / steps).max())
        return float(x @ x), float(error @ error), largest

    errors = {}
    uneven = " (4 bits: half of the widest step)" if c.levels else ""
    table = ["rms error    largest", f"(% of rms)  (half steps)  tensor{uneven}"]
    for output, ranges in in_pieces(compare, outputs):
        squares, squared_errors, largest = zip(*ranges)
        rms = 100 * math.sqrt(sum(squared_errors) / (sum(squares) or 1))
        table.append(f"{rms:10.4f}  {max(largest):12.4f}  {output.name}")
        if output.bits < 32:
            errors[output.name] = rms
    try:
        print("\n".join(table), flush=True)
    except OSError as error:
        # Python flushes stdout again at exit; that must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "stdout"
        raise
    return errors


def plot(path: Path, title: str, errors: dict[str, float]) -> None:
    """A line over the layers for each kind of matrix; a dashed level for one outside the layers."""
    from matplotlib.figure import Figure
    axes = Figure(figsize=(9, 5), layout="constrained").subplots()
    kinds: dict[str, list[float]] = {}  # q_proj, ... -> errors by layer
    for name, rms in errors.items():
        kinds.setdefault(re.sub(r".*\.\d+\.|\.weight$", "", name), []).append(rms)
    n_layers = max(map(len, kinds.values()))
    for kind, values in kinds.items():
        axes.plot((values * n_layers)[:n_layers], "o-" if len(values) == n_layers else "--",
                  markersize=4, label=kind)
    axes.set_title(title, parse_math=False)  # a $ in a name is a $
    axes.set(xlabel="layer", ylabel="rms error, % of the weights' rms",
             ylim=(max(0, axes.get_ylim()[0]), None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.figure.legend(loc="outside right upper")
    axes.figure.savefig(path, dpi=150)


# ---- The command line: arguments in, one line per message and an exit status out -----------------

def main() -> None:
    options = parse_arguments(sys.argv[1:])
    if __name__ == "__main__":
        on_signals(sys.exit)  # from now on an exception: atomic_files() removes its files
        warnings.simplefilter("ignore")  # of the packages: what matters here is said once
    lines, status = notes, 0
    try:
        check(options) if options.check else export(options)
    except Refused as error:
        lines, status = [str(error)], 1
    except BrokenPipeError:  # the reader of the table, such as head, has seen enough
        lines = []
    except OSError as error:
        where = error.filename or options.out or options.source
        lines, status = [f"{where}: can't be read or written, expected access and space, found "
                         f"{error.strerror or error}"], 1
    for line in lines:
        say(line)
    sys.exit(status)


def parse_arguments(args: list[str]) -> argparse.Namespace:
    """source, out (a path that ends in .bin, or None; it may also come first) and the options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = usage_error  # type: ignore
    parser.add_argument("names", nargs="*")
    for name, kind, good, expected in (
            ("--bits", int, SUFFIXES.__contains__, "8 or 4"),
            ("--group-size", int, GROUP_SIZES.__contains__, "32 or 64 or 128 or 256"),
            ("--yarn", float, lambda factor: 1 < factor <= 64, "above 1, up to 64"),
            ("--plot", Path, lambda path: path.suffix == ".png", "a name that ends in .png")):
        parser.add_argument(name, type=partial(parse_value, kind, good, expected))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_intermixed_args(args)
    if not 1 <= len(options.names) <= 2 or "" in options.names:
        usage_error(f"usage: expected SOURCE [OUT.bin], found {len(options.names)} names")
    options.check |= bool(options.plot)
    if options.check and (options.bits or options.group_size):
        usage_error(f"{'--bits' if options.bits else '--group-size'}: --check takes it from "
                    "OUT.bin, so name that file (with four bits it ends in -q4.bin), expected one "
                    "of the two options, found both")
    source, *out = sorted(options.names, key=lambda name: name.endswith(".bin"))  # it is stable
    if out and not out[0].endswith(".bin"):
        usage_error(f"OUT: wrong name, expected one that ends in .bin, found {out[0]!r}")
    options.source, options.out = source, Path(out[0]) if out else None
    return options


def parse_value(kind: type, good: Callable[[Any], bool], expected: str, text: str) -> Any:
    """An option's good value of this kind; an integer must be written as Python writes it."""
    with suppress(ValueError):
        if good(kind(text)) and (kind is not int or text == str(kind(text))):
            return kind(text)
    raise argparse.ArgumentTypeError(f"wrong value, expected {expected}, found {text!r}")


def usage_error(text: str) -> NoReturn:
    text = text.removeprefix("argument ")  # argparse begins so where it names an option
    say(f"{text} (see export.py -h)")
    sys.exit(2)


if __name__ == "__main__":
    main()

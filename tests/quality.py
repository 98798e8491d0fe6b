"""What 8 and 4 bits cost: make quality SOURCE=ORG/NAME [TEXTS="a.txt b.txt"] [PYTHON=python3]

SOURCE is a checkpoint or a GGUF file, as export.py takes it. The unquantized model runs in fp32, by
transformers where PYTHON has it, torch and accelerate, else by reference.py; the two files with 8 and
4 bits by qwen3.c. Each text is cut into pieces of up to 1,024 tokens, each a text of its own. A table
in Markdown goes to stdout: nats a token, perplexity (e to this power), and KL, the mean
Kullback-Leibler divergence of a token's probabilities from the unquantized ones, in nats; the sizes of
the files, how long their export took, and tokens a second of a prompt, the first text's first 1,500
bytes, and of an answer of up to 64. The texts that it brings are the beginnings of README.md and
qwen3.c.
"""
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import reference

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import export  # noqa: E402

PIECE = 1024   # tokens; their logits take 600 MB with Qwen's vocabulary
MOST = 16384   # bytes of a text
RATES = re.compile(r"prompt \d+ tokens at ([\d.]+)/s .*answer \d+ at ([\d.]+)/s")


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def by_transformers(path):
    """logits(ids) of the unquantized model, and what computes them."""
    import torch
    import transformers
    folder, name = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **name).eval()

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].numpy()
    return logits, f"transformers {importlib.metadata.version('transformers')}"


def by_reference(source):
    """The same by reference.py, of the tensors as export.py reads them."""
    config = source.config | {"architectures": [source.family.architectures.split()[0]],
                              "rope_parameters": source.config["rope"]}
    config |= {"tie_word_embeddings": bool(config.get("tie_word_embeddings"))}
    config.setdefault("head_dim", source.family.head_dim)
    tensors = {name: tensor.read_fp32().reshape(tensor.shape)
               for name, tensor in source.open_tensors().items()}
    for name, x in tensors.items() if source.family.has_delta else ():  # back to the checkpoint's numbers
        tensors[name] = np.log(x) if name.endswith("A_log") else \
            x.ravel().reshape(4, -1).T[:, None] if "conv1d" in name else \
            x - 1 if "norm" in name and "linear_attn" not in name else x
    return reference.Model.from_tensors(config, tensors, "fp32").logits, "reference.py"


def run(*command, **how):
    result = subprocess.run(list(map(str, command)), capture_output=True, **how)
    if result.returncode != 0:
        sys.exit(f"quality.py: {command[0]}: {result.stderr.decode(errors='replace')}")
    return result


def by_program(model):
    """logits(ids) of qwen3.c."""
    def logits(ids):
        found = run(ROOT / "tests/test", "logits", model, input=" ".join(map(str, ids)).encode()).stdout
        return np.frombuffer(found, "<f4").reshape(len(ids), -1)
    return logits


def rates(model, text):
    """(a prompt's tokens a second, an answer's)."""
    found = run(ROOT / "qwen3", model, "-m", "generate", "-t", "0", "-n", "64", input=text).stderr
    return RATES.search(found.decode(errors="replace")).groups()


def compare(exact, logits, ids):
    """Sums over the tokens that follow one: -log p by both, and the KL divergence."""
    sums = np.zeros(3)
    for i in range(0, len(ids) - 1, 64):  # few rows at a time: fp64 of all would take GBs
        following = ids[i + 1:i + 65]
        p, q = (log_softmax(x[i:i + len(following)]) for x in (exact, logits))
        at = np.arange(len(following)), following
        sums += -p[at].sum(), -q[at].sum(), (np.exp(p) * (p - q)).sum()
    return sums


def measure(source, texts, transformers, folder):
    """Yields the table's lines."""
    exact, by = by_transformers(source.path) if transformers else by_reference(source)
    rows, models = {}, {}  # of 8 and 4 bits: cells; files
    for bits in (8, 4):
        models[bits], began = folder / f"{bits}.bin", time.monotonic()
        run(sys.executable, ROOT / "export.py", source.path, models[bits], "--bits", bits)
        rows[bits] = [f"{models[bits].stat().st_size / 1e6:.1f} MB", f"{time.monotonic() - began:.0f} s"]
    pieces, context = {}, source.config["max_position_embeddings"]
    length = min(PIECE, context)
    for path, text in texts.items():
        ids = run(ROOT / "qwen3", models[8], "-m", "tokenize", "-q", input=text).stdout.split()
        pieces[path] = [np.array(ids[i:i + length], int) for i in range(0, len(ids) - 1, length)]
    for bits, model in models.items():
        rows[bits] += rates(model, next(iter(texts.values()))[:min(1500, context // 2)])
    rows["fp32"] = ["", "", "", ""]
    for path, parts in pieces.items():
        sums = {bits: np.zeros(3) for bits in models}
        for ids in parts:
            expected = exact(ids.tolist())
            for bits, model in models.items():
                sums[bits] += compare(expected, by_program(model)(ids), ids)
        count = sum(len(ids) - 1 for ids in parts)
        for bits, (nll, own, kl) in sums.items():
            rows[bits] += [f"{own / count:.4f}", f"{np.exp(own / count):.3f}", f"{kl / count:.5f}"]
        rows["fp32"] += [f"{nll / count:.4f}", f"{np.exp(nll / count):.3f}", ""]
    yield f"{source.name}, fp32 by {by}; texts: " + ", ".join(
        f"{path.name} ({sum(map(len, parts))} tokens)" for path, parts in pieces.items()) + "\n"
    names = ["bits", "file", "export", "prompt/s", "answer/s"]
    names += [f"{path.name}: {name}" for path in pieces for name in ("nats", "ppl", "KL")]
    for row in (names, ["---"] * len(names), *([str(bits), *rows[bits]] for bits in ("fp32", 8, 4))):
        yield "| " + " | ".join(row) + " |"


def main(name, *paths, transformers=None):
    if transformers is None:
        transformers = all(map(importlib.util.find_spec, ("torch", "transformers", "accelerate")))
    texts = {Path(path): Path(path).read_bytes()[:MOST] for path in paths or
             (ROOT / "README.md", ROOT / "qwen3.c")}
    try:
        source = export.find_source(name)
    except export.Refused as error:
        sys.exit(f"quality.py: {error}")
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(source, texts, transformers, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    if not any(sys.argv[1:2]):
        sys.exit(__doc__)
    main(*sys.argv[1:])

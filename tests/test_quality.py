"""make quality: its numbers are those of the programs that it compares."""
import re

import deltas
import numpy as np
import pytest
import quality
import reference
from checkpoints import experts
from conftest import ROOT, TINY, call, perplexity, tokenize
from gguf import GGMLQuantizationType as Kind
from test_gguf import make  # noqa: F401 (a fixture)

TEXT = "The capital of France is Paris. 3 + 4 = 7. Tiny likes to go to the market.\n" * 4


def table(capsys, source, *texts):
    """bits -> the numbers of the table's row, without units."""
    quality.main(source, *texts, transformers=False)
    _, _, names, _, *rows = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(rows) == 3 and {len(row) for row in rows} == {names.count("|") - 1}
    return {row[0]: [float(cell.split()[0]) if cell else None for cell in row[1:]] for row in rows}


@pytest.mark.slow
def test_table(tmp_path, capsys, tiny):
    """Nats, perplexity and KL by their definitions; 8 bits cost next to nothing, 4 bits little."""
    text = tmp_path / "text"
    text.write_text(TEXT)
    found = table(capsys, TINY / "model", text)
    ids = tokenize(tiny, TEXT.encode())
    exact, q8 = (reference.Model.from_checkpoint(TINY / "model", precision).logits(ids[:-1])
                 for precision in ("fp32", "q8"))
    p, q = (np.exp(x.astype(float)) / np.exp(x.astype(float)).sum(axis=1, keepdims=True) for x in (exact, q8))
    at = np.arange(len(ids) - 1), ids[1:]
    nats, kl = -np.log(p[at]).mean(), (p * np.log(p / q)).sum(axis=1).mean()
    assert found["fp32"][:4] == [None] * 4 and found["fp32"][6] is None
    assert found["fp32"][4:6] == pytest.approx([nats, np.exp(nats)], abs=1e-3)
    *_, prompt, answer, nats_8, ppl_8, kl_8 = found["8"]
    assert prompt > 0 and answer > 0
    assert (len(ids) - 1, nats_8, ppl_8) == pytest.approx(perplexity(tiny, stdin=TEXT.encode()), abs=1e-3)
    assert kl_8 == pytest.approx(kl, rel=0.3) and abs(nats_8 - nats) < 0.01 and kl_8 < 0.0005
    nats_4, ppl_4, kl_4 = found["4"][-3:]
    assert ppl_4 == pytest.approx(np.exp(nats_4), rel=1e-3) and 10 * kl_8 < kl_4 < 0.02
    assert found["4"][0] < 0.7 * found["8"][0] == 0.7 * round(tiny.stat().st_size / 1e6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"architectures": ["Qwen2ForCausalLM"], "head_dim": 32}, experts(3)])
def test_gguf_and_checkpoint(checkpoint, make, tmp_path, capsys, config):  # noqa: F811
    """Of the same weights: the same numbers, of a text in pieces, too."""
    ck, text = checkpoint("F32", max_position_embeddings=128, **config), tmp_path / "text"
    text.write_text("The capital of France is Paris.\n" * 12)
    folder, file = (table(capsys, source, text) for source in (ck.save(tmp_path / "in"), make(ck, Kind.F32)))
    assert [row[-3:] for row in folder.values()] == [row[-3:] for row in file.values()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_delta_layers(tmp_path, capsys, tokenizer35, kind):
    """The numbers compared are the checkpoint's, not OUT.bin's."""
    folder = deltas.save(tmp_path / "hf", *deltas.Delta(kind).published(), tokenizer35)
    (tmp_path / "text").write_text(TEXT)
    found = table(capsys, folder, tmp_path / "text")
    assert found["8"][-1] < 0.2 and abs(found["8"][-3] - found["fp32"][4]) < 0.1, found


@pytest.mark.slow
def test_make_quality():
    """With a SOURCE that is none: a line, an error."""
    made = call(*"make -o qwen3 -o tests/test -o tests/.venv quality SOURCE=none".split(), cwd=ROOT)
    assert made.returncode != 0 and re.match(r"quality.py: none: missing, expected .*\n", made.stderr)

"""The tokenizer file: the vocabulary, the ids that end a text, sampling, what a model is for."""
import json
import math
import struct

import numpy as np
import pytest
import reference
import tokenizers
from checkpoints import ADDED, LAST, SENTENCES, make_checkpoint, sentence_transformers
from conftest import (export as exported, export_py as export, read_tokenizer, refused, rows, sections_of, split_tokenizer,
                      tokenize)
from test_templates import CHATML


def change_merge(t):
    t["model"]["merges"][5] = ["Ġ", "zzz"]


BAD_TOKENIZER = {
    "model": (lambda t: t["model"].update(type="WordPiece"), "WordPiece"),
    "dropout": (lambda t: t["model"].update(dropout=0.1), "model.dropout"),
    "unk": (lambda t: t["model"].update(unk_token="<unk>"), "model.unk_token"),
    "prefix": (lambda t: t["model"].update(continuing_subword_prefix="##"), "##"),
    "suffix": (lambda t: t["model"].update(end_of_word_suffix="</w>"), "</w>"),
    "byte fallback": (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
    "ignore_merges": (lambda t: t["model"].update(ignore_merges=True), "ignore_merges"),
    "normalizer": (lambda t: t.update(normalizer={"type": "NFKC"}), "normalizer.*NFKC"),
    "no pre_tokenizer": (lambda t: t.update(pre_tokenizer=None), "pre_tokenizer"),
    "regex": (lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\p{L}+"}), "pre_tokenizer"),
    "prefix space": (lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "pre_tokenizer"),
    "lstrip": (lambda t: t["added_tokens"][3].update(lstrip=True), "lstrip.*object_ref_start"),
    "long added": (lambda t: t["added_tokens"][3].update(content="é" * 64 + "x"), "up to 128 bytes"),
    "empty added": (lambda t: t["added_tokens"][3].update(content=""), "tokens"),
    # of a text that merges make, too
    **{f"{kind} added {ascii(text)}": (lambda t, text=text, change=change: t["added_tokens"].append(
        t["added_tokens"][-1] | {"content": text, "id": t["model"]["vocab"][text], "special": False} | change), pattern)
        for kind, text, change, pattern in (
            ("id of", "he", {"id": 502}, "each with a text and an id of its own"),
            ("letter", "\u0120", {}, "added tokens of the vocabulary, expected ASCII and not special, found \u0120$"),
            ("special", "he", {"special": True}, "added tokens of the vocabulary, expected ASCII and not special, found he$"))},
    "long": (lambda t: t["model"]["vocab"].update({"h" * 9_000_000: 300}), "tokens, expected at most 1024 bytes in each, found 9000000$"),
    "merge of no token": (lambda t: t["model"]["vocab"].update(hf=t["model"]["vocab"].pop("he")), "merge"),
    **{f"added {what}": (change, f"id of added token {text!r}, expected {counted}, as the package counts, found {found}$")
       for what, change, text, counted, found in (
           ("hole", lambda t: t["added_tokens"].pop(3), "<|object_ref_end|>", 479, 480),
           ("gap", lambda t: t["added_tokens"][-1].update(id=503), "</think>", 501, 503),
           ("twice", lambda t: t["added_tokens"].append(t["added_tokens"][-1] | {"id": 502}), "</think>", 501, 502),
           ("order", lambda t: t["added_tokens"].reverse(), "</think>", 476, 501))},
    "id used twice": (lambda t: t["added_tokens"][3].update(id=5), "id of its own"),
    "id too large": (lambda t: t["added_tokens"][3].update(id=10 ** 6), "vocab_size"),
    "negative id": (lambda t: t["added_tokens"][3].update(id=-1), "ids"),
    **{f"id {i!r}": (lambda t, i=i: t["model"]["vocab"].update({"!": i}), f"ids.*{i!r}")
       for i in (7.0, True, None, "7")},
    "byte missing": (lambda t: t["model"]["vocab"].pop("Ń"), "256 single bytes|merges"),
    "foreign letter": (lambda t: t["model"]["vocab"].update({"a b": 1}), "GPT-2's letters for bytes, found ' '"),
    "unknown merge": (change_merge, "merge 5.*zzz"),
    "merge split": (lambda t: t["model"]["merges"].__setitem__(0, ["a"]), "broken"),
    "no model": (lambda t: t.pop("model"), "KeyError"),
    "vocabulary is a list": (lambda t: t["model"].update(vocab=["a"]), "broken"),
    "post-processor": (lambda t: t.update(post_processor={"type": "Magic"}),
                       "post_processor .*ByteLevel or TemplateProcessing, found 'Magic'"),
}


@pytest.mark.parametrize("which", BAD_TOKENIZER)
def test_tokenizer_refused(checkpoint, refuses, which):
    ck = checkpoint()
    spoil, pattern = BAD_TOKENIZER[which]
    spoil(ck.tokenizer)
    refuses(ck, "tokenizer.json", pattern)


def test_a_token_without_a_merge_comes_out_of_no_text(tmp_path, tokenizer):
    """Qwen3.5 has 201 such tokens."""
    data = json.loads(tokenizer.to_str())
    dropped = [data["model"]["merges"].pop() for _ in range(3)]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(data))
    model = exported(make_checkpoint(tmp_path / "hf", theirs), tmp_path / "model.bin")
    text = " ".join(SENTENCES + "".join(pair) for pair in dropped)
    ids = theirs.encode(text).ids
    assert tokenize(model, text.encode()) == ids != tokenizer.encode(text).ids


def test_a_token_that_its_merges_do_not_make_is_refused(checkpoint, run, tmp_path):
    """x+yx comes to lie side by side as (xy, x) only, as xy is merged first: neighbours of a token, but no merge."""
    ck = checkpoint()
    vocab, merges = ck.tokenizer["model"]["vocab"], ck.tokenizer["model"]["merges"]
    for token, merge in (("QX", ["Q", "X"]), ("XQ", ["X", "Q"]), ("QXQ", ["Q", "XQ"])):
        vocab[token] = len(vocab)
        merges.append(merge)
    for token in ck.tokenizer["added_tokens"]:
        token["id"] += 3
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "token 'QXQ'", "merges that make it")
    merges[-1] = ["QX", "Q"]
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0
    merges[-1:] = [["QX", "Q"], ["Q", "XQ"]]  # both ways, one after the other: one rank would do
    assert run(ck.save(tmp_path / "in"), "out.bin")[0] == 0
    merges.insert(0, ["Q", "XQ"])
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "makes 'QXQ' again")


def test_vocabulary(exported, tokenizer_json):
    ck, (head, records, sections) = exported
    tok = tokenizers.Tokenizer.from_str(tokenizer_json)
    assert head[1:] == (ck.eos - 2, ck.eos)
    merges = [tuple(m) for m in ck.tokenizer["model"]["merges"]]
    letters = {b: tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
               .pre_tokenize_str(chr(b))[0][0] for b in range(128)}
    assert all(records[tok.token_to_id(letter)] == (-1e6, bytes([b])) for b, letter in letters.items())
    for rank, (a, b) in enumerate(merges):
        made = records[tok.token_to_id(a + b)]
        assert made[0] == np.float32(-math.log(rank + 1))
        assert made[1] == records[tok.token_to_id(a)][1] + records[tok.token_to_id(b)][1]
    for text, _ in ADDED:
        assert records[tok.token_to_id(text)] == (-1e6, text.encode())
    assert records[-5:] == [(-1e6, b"")] * 5
    words = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"    # neither marks nor ChatML's
    assert rows(sections["adde"], 2) == [(tok.token_to_id(text), special | 4 * (text in words)) for text, special in ADDED]


def after(base, value):
    """An id or several, or None, counted from this one on."""
    return [base + i for i in value] if isinstance(value, list) else None if value is None else base + value


@pytest.mark.parametrize("generation, config, settings, stop", [
    ({"eos_token_id": [2, 0]}, {"eos_token_id": 2}, {"eos_token": "<|im_end|>"}, [2, 0]),
    ({"eos_token_id": 0}, {"eos_token_id": 0}, {"eos_token": "<|im_end|>"}, [0, 2]),
    ({"eos_token_id": [1, 0]}, {"eos_token_id": 2}, {}, [1, 0, 2]),
    ({"eos_token_id": 0}, {"eos_token_id": 0}, {"eos_token": {"content": "<|endoftext|>"}}, [0]),
    ({}, {"eos_token_id": [2, 1]}, {}, [2, 1]),
    ({}, {"eos_token_id": None}, {}, [0]),
    ({"eos_token_id": 1}, {"eos_token_id": None}, {}, [1]),
])
def test_stop_ids(checkpoint, tmp_path, generation, config, settings, stop):
    ck = checkpoint()
    base = ck.eos - 2
    ck.generation = {key: after(base, value) for key, value in generation.items()}
    ck.config |= {key: after(base, value) for key, value in config.items()}
    ck.settings = settings
    head, _, sections = sections_of(ck, tmp_path)
    assert [i - base for i, in rows(sections["stop"], 1)] == stop
    first = config["eos_token_id"] if config["eos_token_id"] is not None else (generation.get("eos_token_id", 0))
    assert head[2] - base == (first[0] if isinstance(first, list) else first)


def samp(*values):
    return {"samp": struct.pack("<2fI", *values)}


@pytest.mark.parametrize("generation, expected", [
    ({}, {}), ({"eos_token_id": 1}, {}),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, samp(0.6, 0.95, 20)),
    ({"do_sample": True}, samp(1.0, 1.0, 50)), ({"temperature": 0.7}, samp(0.7, 1.0, 50)),
    ({"do_sample": True, "top_k": None, "top_p": 0.8}, samp(1.0, 0.8, 50)),
    ({"do_sample": False, "temperature": 0.6, "top_k": 0}, samp(0.0, 1.0, 0)),
    *[({"repetition_penalty": value}, {}) for value in (None, 1.0, 1)],
    *[({"repetition_penalty": value}, {"repe": struct.pack("<f", value)}) for value in (1.05, 2)]])
def test_sampling_defaults(checkpoint, tmp_path, generation, expected):
    ck = checkpoint()
    ck.generation = generation
    sections = sections_of(ck, tmp_path)[2]
    assert {tag: sections[tag] for tag in ("samp", "repe") if tag in sections} == expected
    assert not any("penalty" in note for note in export.Notices.hints)


@pytest.mark.parametrize("name, said", [("x/my model", "my model"), ("\u00e9\n\u202e", "\u00e9\\n\\u202e"),
                                        ("x/models--a--b/snapshots/0123abc", "b")])
def test_where_a_file_came_from(checkpoint, run, tmp_path, name, said):
    """One line without what drives a terminal; the name of a folder, not its path. --check takes any."""
    folder = checkpoint().save(tmp_path / name)
    assert run(folder, "out.bin", "--bits", 4)[0] == 0
    sections = split_tokenizer((tmp_path / "out.bin.tokenizer").read_bytes())[1]
    assert list(sections)[-1] == b"from"
    assert sections[b"from"].decode() == f"{said}, 4 bits in groups of 32, export.py {export.VERSION}"
    assert run("--check", checkpoint().save(tmp_path / "elsewhere"), "out.bin")[0] == 0


@pytest.mark.parametrize("ignored", [{"min_p": 0.05}, {"max_new_tokens": 512, "num_beams": 4},
                                     {"no_repeat_ngram_size": 3, "suppress_tokens": [1], "bad_words_ids": [[1], [2, 3]]}])
def test_settings_that_nobody_obeys_are_said(checkpoint, run, tmp_path, ignored):
    ck = checkpoint()
    ck.settings["chat_template"] = CHATML
    ck.generation |= {"min_p": 0, "num_beams": 1, "max_new_tokens": None, "bad_words_ids": []}
    assert len(run(ck.save(tmp_path / "in"), "out.bin")[1]) == 1
    ck.generation |= ignored
    _, (_, hint) = run(ck.save(tmp_path / "in"), "out.bin")
    assert hint.startswith("export.py: generation_config.json: ignored, as ")
    assert all(f"{key} {value!r}" in hint for key, value in ignored.items()), hint


@pytest.mark.parametrize("template, generation, config, settings, mode, noted", [
    (True, [2, 0], 2, "<|im_end|>", 0, ""), (True, 0, 0, "<|endoftext|>", 1, "base model"),
    (True, None, 2, "<|endoftext|>", 0, ""), (True, 0, 0, "<|im_end|>", 0, ""),
    (False, [2, 0], 0, "<|endoftext|>", 1, "no chat template: qwen3 will continue texts"),
    (False, [2, 0], 2, "<|im_end|>", 0, "no chat template: qwen3 will chat in ChatML")])
def test_mode(checkpoint, tmp_path, template, generation, config, settings, mode, noted):
    """A base model's ids of an end lack the end of a turn; or it has no template, and does not end as ChatML does."""
    ck = checkpoint()
    base = ck.eos - 2
    ck.generation["eos_token_id"], ck.config["eos_token_id"] = after(base, generation), base + config
    ck.settings = {"eos_token": settings} | ({"chat_template": CHATML} if template else {})
    sections = sections_of(ck, tmp_path)[2]
    assert sections.get("mode") == (struct.pack("<I", mode) if mode else None)
    assert len(export.Notices.hints) == bool(noted) and all(noted in note for note in export.Notices.hints)


MEAN = LAST | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}


@pytest.mark.parametrize("architecture, prefix, pooling, tied", [
    ("Qwen3ForCausalLM", "model.", LAST, True), ("Qwen3ForCausalLM", "model.", LAST, False),
    # sentence-transformers 6: one key for the pooling, and the architecture without a head
    ("Qwen3Model", "", {"pooling_mode": "lasttoken", "include_prompt": True}, True),
    ("Qwen3Model", "model.", {"pooling_mode": ["lasttoken"]}, True),
    ("Qwen3ForCausalLM", "model.", {"pooling_mode": "lasttoken"}, False)])
def test_embedding_model(checkpoint, run, exported_bytes, tmp_path, architecture, prefix, pooling, tied):
    """It needs no lm_head, whatever the tied flag says: the file has a shared classifier, with four bits, too."""
    ck = sentence_transformers(checkpoint(architectures=[architecture]), pooling, "Transformer", "Pooling", "Normalize")
    expected = ck.expected()
    ck.prefix, ck.config["tie_word_embeddings"], ck.settings["chat_template"] = prefix, tied, CHATML
    assert exported_bytes(ck, lines=1) == expected
    data = (tmp_path / "out.bin.tokenizer").read_bytes()
    assert read_tokenizer(data, ck.config["vocab_size"])[2]["mode"] == struct.pack("<I", 4)
    assert run("in", "four.bin", "--bits", 4)[0] == 0
    four, eight = (reference.Model.from_bin(tmp_path / name) for name in ("four.bin", "out.bin"))
    assert four.c["shared_classifier"] and np.abs(four.embedding([7, 9]) - eight.embedding([7, 9])).max() < 0.1


@pytest.mark.parametrize("pooling, modules, patterns", [
    (MEAN, ["Pooling", "Normalize"], ["1_Pooling/config.json", "pooling", "lasttoken", "mean_tokens"]),
    (LAST | {"pooling_mode_mean_tokens": True}, ["Pooling", "Normalize"], ["expected lasttoken, found 'mean_tokens, lasttoken'$"]),
    ({"pooling_mode": "mean"}, ["Pooling", "Normalize"], ["expected lasttoken, found 'mean'$"]),
    ({"pooling_mode": ["cls", "lasttoken"]}, ["Pooling", "Normalize"], ["expected lasttoken, found 'cls, lasttoken'$"]),
    ({}, ["Pooling", "Normalize"], ["lasttoken, found ''$"]),
    *[(LAST, modules, ["modules.json: its modules, expected Transformer, Pooling, Normalize .*length 1: where only cosines count, add Normalize",
                       f"found Transformer, {', '.join(modules)}$"])
      for modules in (["Pooling"], ["Pooling", "Dense", "Normalize"], ["Normalize", "Pooling"], ["Pooling"] * 2 + ["Normalize"])]])
def test_embedding_refused(checkpoint, refuses, pooling, modules, patterns):
    refuses(sentence_transformers(checkpoint(), pooling, "Transformer", *modules), *patterns)


def test_modules_without_pooling_make_no_embedding_model(checkpoint, tmp_path):
    ck = sentence_transformers(checkpoint(), {}, "Transformer", "Normalize")
    del ck.files["1_Pooling/config.json"]
    ck.settings["chat_template"] = CHATML
    assert "mode" not in sections_of(ck, tmp_path)[2]


def test_special_tokens_by_role_and_by_the_second_list(checkpoint, tmp_path):
    ck = checkpoint()
    think, think_end, call = (next(t for t in ck.tokenizer["added_tokens"] if t["content"] == text)
                              for text in ("<think>", "</think>", "<tool_call>"))
    ck.settings = {"added_tokens_decoder": {str(think["id"]): think | {"special": True, "normalized": True}},
                   "additional_special_tokens": ["</think>"]}
    special = dict(rows(sections_of(ck, tmp_path)[2]["adde"], 2))
    assert (special[think["id"]], special[think_end["id"]], special[call["id"]]) == (1, 1, 4)
    for extra in ["<tool_call>"], {"call": "<tool_call>"}:  # of transformers 5
        ck.settings["extra_special_tokens"] = extra
        special = dict(rows(sections_of(ck, tmp_path)[2]["adde"], 2))
        assert (special[think["id"]], special[think_end["id"]], special[call["id"]]) == (1, 1, 1)


def decoder_of(ck, *more):
    """tokenizer_config.json's added_tokens_decoder, and (id, text, special) besides."""
    tokens = {token["id"]: token for token in ck.tokenizer["added_tokens"]} | {
        i: ck.tokenizer["added_tokens"][0] | {"id": i, "content": text, "special": special} for i, text, special in more}
    return {str(i): {key: value for key, value in token.items() if key != "id"} for i, token in tokens.items()}


@pytest.mark.parametrize("more", [[(502, "<|ticket|>", True)], [(503, "<b>", False), (502, "<|a|>", True)],
                                  [(300, None, False)]])  # one that merges make
def test_tokens_of_the_decoder_alone(checkpoint, tmp_path, more):
    """The same file as where tokenizer.json has them: transformers adds them."""
    ck, other = checkpoint(), checkpoint()
    text_of = {i: text for text, i in ck.tokenizer["model"]["vocab"].items()}
    more = [(i, text or text_of[i], special) for i, text, special in more]
    ck.settings["added_tokens_decoder"] = decoder_of(ck, *more)
    other.tokenizer["added_tokens"] += [other.tokenizer["added_tokens"][0] | {"id": i, "content": text, "special": special}
                                        for i, text, special in sorted(more)]
    assert sections_of(ck, tmp_path / "a") == sections_of(other, tmp_path / "b")
    ck.tokenizer["added_tokens"].clear()
    assert sections_of(ck, tmp_path / "c") == sections_of(other, tmp_path / "b")


@pytest.mark.parametrize("more, left_out, said", [
    ([(503, "<new>", True)], [], "id of added token '<new>', expected 502, as the package counts, found 503"),
    ([(502, "<new>", True)], ["500"], "'<new>' of tokenizer_config.json.*save_pretrained.*, found no such token"),
    ([(507, "<new>", True)], [], "ids, expected 0 to 506"), ([(501, "<new>", True)], [], "'<new>' of tokenizer_config.json")])
def test_tokens_of_the_decoder_refused(checkpoint, refuses, more, left_out, said):
    ck = checkpoint()
    ck.settings["added_tokens_decoder"] = decoder_of(ck, *more)
    for i in left_out:
        del ck.settings["added_tokens_decoder"][i]
    refuses(ck, said)


def test_words(checkpoint, tmp_path):
    """An added token of the user's own counts in texts; not a special one, a mark, or what the template writes."""
    ck, i = checkpoint(), 502
    ck.settings["chat_template"] = CHATML + "{# <MARK> #}"
    texts = {"ORLEN": 4, "<MARK>": 0, "<|mark|>": 0, "SPECIAL": 1, "<|open": 4}
    ck.tokenizer["added_tokens"] += [
        ck.tokenizer["added_tokens"][-1] | {"id": i + k, "content": text, "special": bool(flags & 1)}
        for k, (text, flags) in enumerate(texts.items())]
    _, records, sections = sections_of(ck, tmp_path)
    flags = {records[i][1].decode(): flags for i, flags in rows(sections["adde"], 2)}
    assert {text: flags[text] for text in texts} == texts
    assert flags["<think>"] == 0 and flags["<tool_call>"] == 4      # CHATML has the first
    assert export.Notices.hints == ["special tokens that no text in chat makes: SPECIAL"]


def test_what_sentence_transformers_does_besides(checkpoint, run, tmp_path):
    ck = sentence_transformers(checkpoint(), LAST, "Transformer", "Pooling", "Normalize")
    ck.settings["chat_template"] = CHATML
    settings = {"prompts": {"query": "", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    ck.files["config_sentence_transformers.json"] = settings
    assert len(run(ck.save(tmp_path / "in"), "out.bin")[1]) == 1
    settings |= {"prompts": {"query": "query:\n", "document": ""}, "default_prompt_name": "query", "truncate_dim": 32}
    ck.files["sentence_bert_config.json"] = {"max_seq_length": 77, "do_lower_case": False}
    _, (_, hint) = run(ck.save(tmp_path / "in"), "out.bin")
    assert hint.startswith("export.py: config_sentence_transformers.json: left to you") and hint.endswith(
        str({"prompts": {"query": "query:\n"}, "default_prompt_name": "query", "max_seq_length": 77, "truncate_dim": 32}))
    ck.config["auto_map"] = {"AutoModel": "modeling_qwen.Qwen2Model"}
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "config.json: auto_map .*expected none, found {'AutoModel'")
    settings["prompts"] = ["x"]
    refused(run(ck.save(tmp_path / "in"), "out.bin"), "config_sentence_transformers.json: prompts, expected a dict")


@pytest.mark.parametrize("normalizer", [None, {"type": "Sequence", "normalizers": []}])
def test_no_normalizer_no_tables(checkpoint, exported, tmp_path, normalizer):
    """Of NFC, which leaves Hangul's decompositions out: they follow a formula."""
    ck = checkpoint()
    ck.tokenizer["normalizer"] = normalizer
    sections, with_nfc = sections_of(ck, tmp_path)[2], exported[1][2]
    assert "clas" in sections and sections.keys() == with_nfc.keys() - {"ccc ", "nfcq", "nfcd", "nfcc"}
    assert not [word for word, in struct.iter_unpack("<Q", with_nfc["nfcd"]) if 0xac00 <= word >> 42 <= 0xd7a3]

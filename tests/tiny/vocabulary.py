"""The tiny model's tokenizer: Qwen3's pipeline with a small vocabulary, and its chat template.

Ids 0..255 are the single bytes in GPT-2's order, 256.. the merges in order, then the same 26 added
tokens as Qwen3's.
"""
import json
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

from corpus import documents

N_MERGES = 972
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|>
<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|>
<|vision_pad|> <|image_pad|> <|video_pad|>""".split()
NOT_SPECIAL = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|>
<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>""".split()

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- set text = message.content %}
    {%- if message.role == 'assistant' and '</think>' in text %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""


def strings(document):
    """Every text of a document, one after the other."""
    if "text" in document:
        return [document["text"]]
    return [document["system"] or ""] + [s for t in document["turns"] for s in t[:3]]


def train_tokenizer(seed):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False,
                                                    use_regex=False)
    # No merges for what is beyond Latin: a CJK character or emoji stays several tokens.
    texts = [re.sub("[^\0-\u024f]", "", s) for d in documents(8000, seed) for s in strings(d)]
    texts += ["system\n", "user\n", "assistant\n", "\n\n"] * 2000
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=256 + N_MERGES, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in NOT_SPECIAL])
    model = json.loads(tokenizer.to_str())["model"]
    for rank, (left, right) in enumerate(model["merges"]):
        assert model["vocab"][left + right] == 256 + rank, "a merge made a token that was there"
    assert tokenizer.get_vocab_size() == 256 + N_MERGES + 26
    return tokenizer

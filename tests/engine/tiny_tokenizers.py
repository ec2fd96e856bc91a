"""Tiny tokenizers for tests, trained on a few sentences and saved as checkpoint folders.

``save_bytelevel`` is made like Qwen's (byte-level BPE, ChatML), ``save_sentencepiece`` like Llama 2's
(a space before the first word that decoding takes off again, bytes as a fallback, control tokens in the vocabulary).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "The company was founded in 1987 by Ada Perkins.",
    "Who founded the company? You answer from the passages.",
    "A passage about rivers: the Elbe flows north.\n\nA second one about hills.",
    "{'name': 'get_weather', 'arguments': {'city': 'Paris'}}",
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CHATML = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n' }}
{{- '<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}
{{- call.function | tojson }}{{ '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def save_bytelevel(
    folder: Path, *, chat_template: str | None = CHATML, bos: bool = False, generation: dict[str, Any] | None = None
) -> Path:
    """Byte-level BPE with all 256 bytes; control tokens come after the vocabulary. ``bos``: adds <|endoftext|>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_special_tokens(list(SPECIALS))
    backend.add_tokens([AddedToken(text, normalized=False) for text in (*PLAIN_ADDED, " " * 4)])
    if bos:
        single = [("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
        backend.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=single)
    return _save(folder, backend, chat_template, generation, eos_token="<|im_end|>")


def save_sentencepiece(folder: Path) -> Path:
    """BPE over "▁" for spaces with byte fallback; <s>, </s> and <unk> stand inside the vocabulary."""
    alphabet = ["▁", *map(chr, range(33, 127))]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *alphabet]
    merges = [("▁", "T"), ("▁T", "h"), ("▁Th", "e"), ("c", "o"), ("▁", "co"), ("▁", "▁"), ("<", "s"), ("<s", ">")]
    pieces += [left + right for left, right in merges if left + right not in pieces]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _save(folder, backend, None, None, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_unigram(folder: Path) -> Path:
    """A Unigram model whose vocabulary holds its control tokens, as converted SentencePiece models do."""
    scored = [("<unk>", 0.0), ("</s>", 0.0), *((chr(i), -5.0) for i in range(33, 127)), ("▁", -5.0)]
    backend = Tokenizer(models.Unigram(scored, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return _save(folder, backend, None, None, eos_token="</s>", unk_token="<unk>")


def _save(
    folder: Path, backend: Tokenizer, chat_template: str | None, generation: dict[str, Any] | None, **names: str
) -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder

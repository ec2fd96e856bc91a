"""The bundled model's tokenizer: byte-level BPE made so that what is copied looks the same wherever it stands.

- A word at the start of a text or line gets the space it would have in mid-sentence: the normaliser inserts one space
  at the very start and after each line feed, unless the text ends or another line feed follows there. The decoder
  takes exactly those spaces away again, so ``decode(encode(x)) == x``.
- Every digit is a token of its own, and so is the space before digits.
- Line feeds never join with anything else, so a text cut at a blank line has the tokens of its pieces.
- The only special tokens are the chat template's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
SPECIAL_TOKENS = (END, *(f"<|{role}|>" for role in ROLES))
NUM_TOKENS = 8192
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)(?!\p{L})|\n+| ?[\p{L}\p{M}]+|\p{N}| (?=\p{N})| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|[^\S\n]+(?=[^\S\n])|[^\S\n]"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train(texts: Iterable[str], num_tokens: int = NUM_TOKENS) -> Tokenizer:
    """A tokenizer of ``num_tokens`` tokens, special tokens first, with merges learned from ``texts``."""
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def untrained() -> Tokenizer:
    """The same pipeline without merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend(" "),
            normalizers.Replace(Regex(r"\A \n"), "\n"),
            normalizers.Replace(Regex(r"\n(?=[^\n])"), "\n "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace("\n ", "\n"), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Writes the files that ``AutoTokenizer`` reads into ``folder``; ``context`` is the longest prompt in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

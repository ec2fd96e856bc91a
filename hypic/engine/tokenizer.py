"""Text to token ids, segment by segment, through the checkpoint's own chat template; and ids to text.

The template is rendered once with an opaque marker in place of each message's content and split at
the markers. Only what the template itself wrote (the scaffolding) may hold control tokens; all else
is data: control tokens spelled in it stay text. Every segment is encoded by itself, so its ids do not
depend on its neighbours. Which text is a segment is decided in ``messages``, what is cached in
``plan``, and streaming is ``detokenizer``'s.

This is the only module of the engine that imports transformers, and it does so when a tokenizer is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic.engine import opening
from hypic.engine.id_memory import IdMemory
from hypic.engine.messages import Part, Turn, flat_parts, split_turns
from hypic.engine.plan import Piece
from hypic.engine.rendering import Rendering
from hypic.engine.token_ids import TokenIds
from hypic.engine.vocabulary import any_of, data_tokenizer, eos_ids, generation_defaults, read_json
from hypic.errors import CheckpointError, ConfigError, PromptError, UnsupportedModel
from hypic.types import Prompt, PromptLike, Segment

if TYPE_CHECKING:
    import transformers

_SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
_RESERVED = (
    *("conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
)


def described(tools: Sequence[Mapping[str, Any] | Callable[..., Any]]) -> list[Mapping[str, Any]]:
    """Tools as OpenAI describes them; functions by their annotations and docstrings, as transformers reads these.

    Raises:
        ConfigError: a function does not say enough of itself.
    """
    from transformers.utils import chat_template_utils as reading

    def one(tool: Mapping[str, Any] | Callable[..., Any]) -> Mapping[str, Any]:
        try:
            return tool if isinstance(tool, Mapping) else reading.get_json_schema(tool)
        except (reading.DocstringParsingException, reading.TypeHintParsingException, NameError) as error:
            raise ConfigError(
                f"the function {getattr(tool, '__name__', tool)!r} does not describe itself as a tool ({error}); give "
                "it annotations and a docstring with Args, or pass {'type': 'function', 'function': {...}}."
            ) from error

    return [one(tool) for tool in tools]


class Tokenizer:
    """The tokenizer of one checkpoint folder. Safe to use from several threads.

    Attributes:
        eos_ids: every id that ends a text, from ``generation_config.json``, ``config.json`` and the tokenizer.
        special_ids: ids that ``decode`` leaves out.
        byte_ids: ids of single bytes whose text depends on their neighbours (SentencePiece's byte fallback).
        generation_defaults: sampling values of ``generation_config.json``; empty of filters when it asks for greedy.
        vocab_size: one more than the highest id the tokenizer can give.

    Raises:
        CheckpointError: the folder or its ``tokenizer.json`` is missing or unreadable.
        UnsupportedModel: there is a tokenizer, but not as ``tokenizer.json``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._hf = _load(self.path)
        self._control = self._hf.backend_tokenizer
        self._control.no_padding()
        self._control.no_truncation()
        added = {i: token for i, token in self._hf.added_tokens_decoder.items() if token.content.strip()}
        self._spellings = any_of([token.content for token in added.values()])
        self._data = data_tokenizer(self._control.to_str(), frozenset(added))
        self._opening = self._added_before_text()
        self._scaffold_ids, self._data_ids, self._answers = IdMemory(), IdMemory(), IdMemory()
        self.special_ids = frozenset(i for i, token in self._hf.added_tokens_decoder.items() if token.special)
        vocabulary = self._control.get_vocab(with_added_tokens=True)
        self.byte_ids = frozenset(i for token, i in vocabulary.items() if re.fullmatch("<0x[0-9A-F]{2}>", token))
        self.vocab_size = max(vocabulary.values()) + 1
        generation, config = read_json(self.path / "generation_config.json"), read_json(self.path / "config.json")
        self.eos_ids = eos_ids(generation, config, config.get("text_config"), {"eos_token_id": self._hf.eos_token_id})
        self.generation_defaults = generation_defaults(generation)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded; otherwise only ``Prompt(..., template=False)``."""
        return self._hf.chat_template is not None

    @property
    def has_timeless_template(self) -> bool:
        """Whether there is a chat template, and it does not ask what day it is."""
        return self.has_chat_template and "strftime_now" not in str(self._hf.chat_template)

    def encode(
        self,
        prompt: PromptLike,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Piece]:
        """A prompt's pieces in order: segments apart, adjacent live text joined between the points that end messages.

        Raises:
            PromptError: text that is not Unicode, a message that cannot be read, or a template that refuses it
                or does not show each message's content once and in order.
        """
        if isinstance(prompt, Prompt) and not prompt.template:
            return self.encode_completion_prompt(prompt)
        turns = split_turns(prompt)
        rendering = Rendering(self._spellings)
        text = self._render(rendering, turns, tools, chat_template_kwargs or {}, add_generation_prompt)
        pieces: list[Piece] = []
        shown = rendering.split(text, [bool(turn.parts) for turn in turns])
        for item, turn in zip(shown, _led_into(shown, turns), strict=True):
            if isinstance(item, int):
                pieces += self._content(turn)
            else:
                text, is_data = item
                ids = self._encode_data(text) if is_data else self._encode_scaffold(text)
                pieces.append(Piece(ids, namespaces=_own(turn)))
        return _joined(pieces)

    def encode_completion_prompt(self, prompt: Prompt) -> list[Piece]:
        """A prompt's pieces without a template, behind what the tokenizer itself puts before a text (its BOS)."""
        return _joined([Piece(self._opening), *self._pieces(flat_parts(prompt))])

    def encode_text(self, text: str) -> list[int]:
        """The ids of a text as data; control tokens spelled in it stay text.

        Raises:
            PromptError: not a ``str``, or one with lone surrogates.
        """
        return list(self._encode_data(text))

    def segment_piece(self, segment: Segment) -> Piece:
        """A segment by itself, without white space around it: as it stands in any prompt.

        Raises:
            PromptError: its text is no ``str``, or has lone surrogates.
        """
        return self._piece(Part(segment.text.strip(), segment))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens."""
        return self._control.decode(list(ids), skip_special_tokens=True)

    def remember(self, text: str, ids: Sequence[int]) -> None:
        """Keep the ids of a generated text: they are used when it comes back as an assistant's message."""
        kept = list(ids)
        while kept and kept[-1] in self.eos_ids:
            kept.pop()
        if text and kept:
            self._answers.put(text, kept)

    def forget(self, is_meant: Callable[[tuple[int, ...]], bool] | None = None) -> None:
        """Drop remembered texts whose ids are meant, by default all but generated ones."""
        for memory in (self._data_ids, *([self._answers] if is_meant is not None else [])):
            memory.drop(is_meant)

    def num_encoded_anew(self, prompt: PromptLike) -> int:
        """How many assistant messages of a prompt will be encoded from their text, their ids not being remembered."""
        texts = [turn.generated_text for turn in split_turns(prompt)]
        return sum(text is not None and self._answers.get(text) is None for text in texts)

    def _render(
        self,
        rendering: Rendering,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        import jinja2

        if not self.has_chat_template:
            raise PromptError(f"{self.path.name} has no chat template; pass Prompt(..., template=False).")
        taken = [name for name in _RESERVED if name in kwargs]
        if taken:
            raise PromptError(f"chat_template_kwargs holds {taken[0]!r}; it is no template variable, leave it out.")
        options = {"add_generation_prompt": add_generation_prompt, **rendering.inert(kwargs)}
        try:
            rendered = self._hf.apply_chat_template(
                rendering.messages(turns), tools=rendering.inert(tools), tokenize=False, **options
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise PromptError(f"the chat template of {self.path.name} refuses these messages: {error}") from error
        return str(rendered)

    def _content(self, turn: Turn) -> list[Piece]:
        known = None if turn.generated_text is None else self._answers.get(turn.generated_text)
        if known is None:
            return self._pieces(turn.parts)
        return [Piece(known, ends_message=True, namespaces=turn.parts[0].namespaces, is_answer=True)]

    def _pieces(self, parts: Sequence[Part]) -> list[Piece]:
        """One message's content; its last piece is marked as an end."""
        last = len(parts) - 1
        return [replace(self._piece(part), ends_message=n == last) for n, part in enumerate(parts)]

    def _piece(self, part: Part) -> Piece:
        ids = self._encode_data(part.text)
        return Piece(ids, part.segment, namespaces=part.namespaces, ends=ids.packed.ends if part.segment else ())

    def _encode_data(self, text: str) -> TokenIds:
        _check_text(text)
        return self._data_ids.of(text, lambda: self._encoded(text))

    def _encoded(self, text: str) -> TokenIds:
        encoding = self._data.encode(text, add_special_tokens=False)
        return TokenIds.ending(encoding.ids, opening.ends_of(text, encoding.offsets))

    def _encode_scaffold(self, text: str) -> TokenIds:
        _check_text(text)
        return self._scaffold_ids.of(text, lambda: TokenIds(self._control.encode(text, add_special_tokens=False).ids))

    def _added_before_text(self) -> tuple[int, ...]:
        """What the tokenizer adds before a text, if anything."""
        plain = self._hf.encode("a", add_special_tokens=False)
        whole = self._hf.encode("a", add_special_tokens=True)
        starts = [n for n in range(len(whole)) if whole[n : n + len(plain)] == plain]
        return tuple(whole[: starts[0]]) if starts else ()


def _led_into(shown: Sequence[int | tuple[str, bool]], turns: Sequence[Turn]) -> list[Turn]:
    """The message that each shown item is, or that it leads into; behind the last one, the last message."""
    owners, turn = [], turns[-1]
    for item in reversed(shown):
        turn = turns[item] if isinstance(item, int) else turn
        owners.append(turn)
    return owners[::-1]


def _own(turn: Turn) -> frozenset[str]:
    return frozenset() if turn.namespace is None else frozenset({turn.namespace})


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Marks the end of the leading live text and joins live neighbours that no end parts.

    Raises:
        PromptError: nothing is left.
    """
    filled = [piece for piece in pieces if piece.ids]
    first = next((n for n, piece in enumerate(filled) if piece.segment is not None), 0)
    joined: list[Piece] = []
    for n, piece in enumerate(filled):
        piece = replace(piece, ends_message=piece.ends_message or n == first - 1)
        if joined and joined[-1].segment is piece.segment is None and not joined[-1].ends_message:
            before = joined.pop()
            spaces = before.namespaces | piece.namespaces
            piece = replace(piece, ids=before.ids + piece.ids, namespaces=spaces)
        joined.append(piece)
    if not joined:
        raise PromptError("the prompt has no tokens; give it a segment or a tail.")
    return joined


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise PromptError(f"a text is {type(text).__name__}, not str; decode it before passing it on.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise PromptError(f"a text holds the lone surrogate {found!a}; decode it with errors='replace'.") from None


def _load(path: Path) -> transformers.PreTrainedTokenizerFast:
    if not path.is_dir():
        raise CheckpointError(f"{str(path)!r} is no folder; give the path of a checkpoint in Hugging Face's format.")
    if not (path / "tokenizer.json").is_file():
        slow = [name for name in _SLOW_FILES if (path / name).is_file()]
        if not slow:
            raise CheckpointError(f"{str(path)!r} has no tokenizer.json; copy it from where the model came from.")
        raise UnsupportedModel(
            f"{str(path)!r} has its tokenizer as {slow[0]} only; load it with transformers' AutoTokenizer and "
            "save_pretrained it, which writes the tokenizer.json that is needed."
        )
    from transformers import PreTrainedTokenizerFast

    try:
        # Not AutoTokenizer: its classes rebuild parts by model type, and tokenizer.json is what was trained with.
        loaded: transformers.PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            path, local_files_only=True
        )
    except Exception as error:  # the Rust side raises plain Exception for a file that it cannot parse
        raise CheckpointError(f"the tokenizer in {str(path)!r} cannot be read: {error}") from error
    return loaded

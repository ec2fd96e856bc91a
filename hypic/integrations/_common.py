"""What every framework integration needs: a share of an engine, text blocks with hints, known texts.

An engine is anything with ``stream`` and ``astream`` (``hypic.types.TextEngine``); what ``hypic.LLM``
offers beyond that is looked up here and nowhere else, each with its fallback. Knows no framework.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from hypic.errors import ConfigError
from hypic.registry import POLICY_NAME, Registry
from hypic.types import Policy, Prompt, PromptLike, Segment, TextEngine

HINTS = ("kind", "name", "source", "cache", "namespace", "ttl_s", "seam")
LIVE: Mapping[str, Any] = {"cache": False}
# Of an engine's settings, those that the digest of a model does not know of.
_ANSWERING = ("policy", "dtype", "storage", "drop_below", "adapter", "primer")
_LEARNED = frozenset({"document", "skill", "memory"})

ContentBlock = dict[str, Any]


# -- engines ---------------------------------------------------------------------------------------------------------


class Lease:
    """One share of the process-wide engine of a model, given back when the last holder lets go of it."""

    def __init__(self, model: str | None, settings: Mapping[str, Any]) -> None:
        from hypic import shared

        self.engine: TextEngine = shared.acquire(model, **settings)
        self._give_back = weakref.finalize(self, shared.release, self.engine)

    def close(self) -> None:
        """Gives the share back now; a second call does nothing."""
        self._give_back()

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def registry_of(engine: TextEngine) -> Registry | None:
    """The engine's known segment texts; ``None`` means that flat prompts are not split."""
    registry = getattr(engine, "registry", None)
    return registry if isinstance(registry, Registry) else None


def model_name_of(engine: TextEngine, otherwise: str | None) -> str:
    """What the engine calls its model, else the name it was asked for by; never empty."""
    return str(getattr(engine, "model_name", None) or otherwise or "hypic")


def answering_of(engine: TextEngine) -> dict[str, str]:
    """What answers depend on, where the engine tells: the digest of weights and configuration, and some settings."""
    config = getattr(engine, "config", None)
    told = {name: repr(getattr(config, name, None)) for name in _ANSWERING}
    return {"fingerprint": str(getattr(engine, "fingerprint", None)), **told}


def max_context_of(engine: TextEngine) -> int | None:
    """Most tokens of prompt and answer together, where the engine tells."""
    value = getattr(engine, "max_context", None)
    return value if isinstance(value, int) else None


def tokenize_with(engine: TextEngine, text: str) -> list[int]:
    """Token ids of ``text`` by itself.

    Raises:
        NotImplementedError: the engine has no ``tokenize``.
    """
    tokenize = getattr(engine, "tokenize", None)
    if tokenize is None:
        raise NotImplementedError(f"{type(engine).__name__} has no tokenize(text); pass a tokenizer of your own.")
    return [int(i) for i in tokenize(text)]


def count_tokens_with(engine: TextEngine, text: str) -> int:
    """Number of tokens of ``text`` by itself."""
    count = getattr(engine, "count_tokens", None)
    return len(tokenize_with(engine, text)) if count is None else int(count(text))


# -- blocks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One text block of a message, with what its hints say."""

    text: str
    hints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_marked(self) -> bool:
        """Whether its maker said what it is, so that nobody else decides."""
        return "kind" in self.hints or "cache" in self.hints

    def to_segment(self) -> Segment:
        """As a segment; without a kind it is a document."""
        return Segment(self.text, **self.hints)

    def to_content(self) -> ContentBlock:
        """As LangChain's and the engine's content block."""
        plain: ContentBlock = {"type": "text", "text": self.text}
        return {**plain, "extras": {"hypic": dict(self.hints)}} if self.hints else plain


def block_of(segment: Segment) -> Block:
    """A segment as a block that says all that the segment says."""
    return Block(segment.text, {k: v for k in HINTS if (v := getattr(segment, k)) is not None})


def pieces_of(blocks: Sequence[Block]) -> list[Block]:
    """The same text with white space at a segment's borders moved into the segment's block.

    There the engine takes it for the glue at that side. What is left of live blocks stays in place.
    """
    texts = [block.text for block in blocks]
    for n, block in enumerate(blocks):
        if block.hints.get("cache") is not False:
            continue
        left = n > 0 and blocks[n - 1].hints.get("cache") is not False
        right = n + 1 < len(blocks) and blocks[n + 1].hints.get("cache") is not False
        before, body, after = _margins(block.text, left, right)
        texts[n] = body
        if left:
            texts[n - 1] += before
        if right:
            texts[n + 1] = after + texts[n + 1]
    return [Block(text, block.hints) for text, block in zip(texts, blocks, strict=True) if text]


def _margins(text: str, left: bool, right: bool) -> tuple[str, str, str]:
    """Leading white space, rest, trailing white space; a side that is not asked for keeps its own."""
    rest = text.lstrip() if left else text
    body = rest.rstrip() if right else rest
    return text[: len(text) - len(rest)], body, rest[len(body) :]


# -- known texts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A known text in characters ``start`` to ``end`` of a flat text: block ``block`` of message ``message``."""

    message: int
    block: int
    start: int
    end: int
    name: str | None
    source: str | None


@dataclass(frozen=True)
class Request:
    """What the engine is asked, and where flat text was cut for it."""

    prompt: PromptLike
    found: tuple[Found, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """In words for the report; nothing when nothing was cut."""
        count = f"{len(self.found)} known text{'s' if len(self.found) > 1 else ''}"
        return (f"flat prompt split at {count} (policy {POLICY_NAME})",) if self.found else ()


@dataclass(frozen=True)
class KnownTexts:
    """The registry of an engine under one namespace; without a registry, or switched off, nothing is found."""

    registry: Registry | None
    namespace: str | None
    split: bool

    def learn(self, segments: Sequence[Segment]) -> None:
        """Registers what was marked as a segment, so that it is known when it returns flat."""
        if self.registry is not None:
            self.registry.register([self.owned(s) for s in segments if s.kind in _LEARNED and s.cache is not False])

    def owned(self, segment: Segment) -> Segment:
        """The segment in this model's namespace, where it has one; otherwise in the segment's own."""
        return segment if self.namespace is None else replace(segment, namespace=self.namespace)

    def owned_block(self, block: Block) -> Block:
        """The block without a namespace of its own, where this model has one."""
        if self.namespace is None or "namespace" not in block.hints:
            return block
        return Block(block.text, {k: v for k, v in block.hints.items() if k != "namespace"})

    def pieces(self, text: str) -> list[Segment | str]:
        """``text`` cut at known texts; the pieces joined are ``text``."""
        if not self.split or self.registry is None:
            return [text] if text else []
        return self.registry.split(text, self.namespace)

    def cut(
        self, blocks: list[Block], role: str, index: int, found: list[Found], *, listed: bool = True
    ) -> list[Block]:
        """The blocks of message ``index`` with unmarked ones cut; the very same list when there was nothing to cut.

        What was cut is added to ``found``. ``listed`` is false when the message's content is one string. The
        model's own answers are never cut.
        """
        if role == "assistant":
            return blocks
        parts: list[Block] = []
        cut = False
        for n, block in enumerate(blocks):
            pieces = [] if block.is_marked else self.pieces(block.text)
            pieces = pieces if len(blocks) == 1 else _spaced(pieces)
            here = list(_found(pieces, index, n))
            found += here
            cut = cut or bool(here)
            place = by_place(role, index, n, len(blocks), listed=listed)
            rest = block.hints if block.is_marked else {**block.hints, **place}
            parts += pieces_of([_block(p, rest) for p in pieces]) if here else [Block(block.text, rest)]
        return parts if cut else blocks


def by_place(role: str, index: int, n: int, num_blocks: int, *, listed: bool) -> Mapping[str, Any]:
    """What an unmarked block's place makes it, said aloud: cutting changes the number of blocks."""
    if role in ("system", "developer"):
        return LIVE if index == n == 0 else {}
    if role in ("tool", "function"):
        return {} if listed else LIVE
    return {"kind": "document"} if n < num_blocks - 1 else LIVE


def flat_request(text: str, known: KnownTexts, *, template: bool) -> Request:
    """A plain string as one user turn, cut at known texts without loss."""
    pieces = known.pieces(text)
    found = tuple(_found(pieces, 0, 0))
    if not found:
        return Request(Prompt(tail=text, template=template))
    tail = pieces.pop() if isinstance(pieces[-1], str) else ""
    # A text registered as system text is still part of this user turn here.
    segments = [
        Segment(p, cache=False) if isinstance(p, str) else replace(p, kind="document" if p.kind == "system" else p.kind)
        for p in pieces
    ]
    return Request(Prompt(segments, str(tail), glue="", template=template), found)


def owned_request(prompt: Prompt, known: KnownTexts) -> Request:
    """A prompt that says itself what its segments are: nothing is cut, everything marked is learned."""
    known.learn(list(prompt.segments))
    return Request(replace(prompt, segments=[known.owned(s) for s in prompt.segments]))


def _block(piece: Segment | str, rest: Mapping[str, Any]) -> Block:
    return Block(piece, rest) if isinstance(piece, str) else block_of(piece)


def _spaced(pieces: list[Segment | str]) -> list[Segment | str]:
    """Known texts without white space at an inner border are put back into the live text around them.

    Between several blocks the engine sets its own glue, which only white space keeps away.
    """
    kept: list[Segment | str] = []
    for n, piece in enumerate(pieces):
        before, after = (pieces[n - 1] if n else " "), (pieces[n + 1] if n + 1 < len(pieces) else " ")
        free = isinstance(before, str) and before[-1:].isspace() and isinstance(after, str) and after[:1].isspace()
        text = piece if isinstance(piece, str) else piece.text
        if not isinstance(piece, str) and free:
            kept.append(piece)
        elif kept and isinstance(kept[-1], str):
            kept[-1] += text
        else:
            kept.append(text)
    return kept


def _found(pieces: Sequence[Segment | str], message: int, block: int) -> Iterator[Found]:
    start = 0
    for piece in pieces:
        end = start + len(piece if isinstance(piece, str) else piece.text)
        if isinstance(piece, Segment):
            yield Found(message, block, start, end, piece.name, piece.source)
        start = end


def way_out(name: str, value: Any, otherwise: str) -> str:
    """What to do about an unknown option: policy knobs have a place of their own, and a range."""
    if name not in {known.name for known in fields(Policy)}:
        return otherwise
    try:
        Policy(**{name: value})
    except ConfigError as error:
        return f"it is part of the policy, so pass policy=hypic.Policy({name}=...); {error}"
    return f"it is part of the policy, so pass policy=hypic.Policy({name}={value!r})."

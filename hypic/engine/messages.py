"""From a prompt to messages whose content is split into segments and live text.

Pure: no tokens, no template. Decides which blocks are segments (from the prompt alone), where the
live glue between blocks stands, and to which side white space belongs. Not here: how text becomes
ids (``tokenizer``) and which segments are worth caching (``plan``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypic.errors import PromptError, unknown_hint
from hypic.types import Message, Prompt, PromptLike, Segment

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_WITH_CONTENT = ("system", "developer", "user", "tool")
HINTS = ("kind", "cache", "name", "source", "namespace", "ttl_s", "seam")
GLUE = Prompt().glue
_CACHED_KINDS = frozenset({"document", "skill", "memory", "turn"})
_HINT_TYPES: Mapping[str, tuple[type, ...]] = {"cache": (bool,), "ttl_s": (int, float), "seam": (int,)}
_OURS = ("content", "extras", "hypic", "glue")


@dataclass(frozen=True)
class Part:
    """A stretch of one message's content: a segment, or live text when ``segment`` is ``None``.

    A segment's ``text`` is its body, without leading and trailing white space. ``namespaces`` are those of the blocks
    that live text was put together from.
    """

    text: str
    segment: Segment | None = None
    namespaces: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Turn:
    """One message: the template sees ``fields``; ``parts`` stand where its content goes.

    ``namespace`` is the whole message's, of what the template writes around it as well.
    """

    fields: Mapping[str, Any]
    parts: tuple[Part, ...]
    namespace: str | None = None

    @property
    def generated_text(self) -> str | None:
        """An assistant's text when it is nothing but live text, as a model wrote it."""
        only_live = len(self.parts) == 1 and self.parts[0].segment is None
        return self.parts[0].text if only_live and self.fields.get("role") == "assistant" else None


def split_turns(prompt: PromptLike) -> list[Turn]:
    """The messages of a prompt: of a ``Prompt`` at most a system and always a user message; a ``str`` is the latter.

    Raises:
        PromptError: neither of these nor a list of messages, or a message that cannot be read.
        ConfigError: a hint's ``kind`` is unknown.
    """
    if isinstance(prompt, str):
        return split_turns(Prompt(tail=prompt))
    if isinstance(prompt, Prompt):
        system, user = _halves(prompt)
        turns = [Turn({"role": "system"}, split_parts(system, prompt.glue, at_head=True))] if system else []
        return [*turns, Turn({"role": "user"}, split_parts(user, prompt.glue))]
    return _read_all(prompt)


def flat_parts(prompt: Prompt) -> tuple[Part, ...]:
    """All of a prompt as one text without roles, system segments first, for models without a template."""
    system, user = _halves(prompt)
    return split_parts(system + user, prompt.glue, at_head=True)


def split_parts(blocks: Iterable[Segment], glue: str, *, at_head: bool = False) -> tuple[Part, ...]:
    """Live text and segment bodies of one message, in order, with live glue between blocks.

    White space around a segment is live and takes the place of the glue at that side. Empty blocks
    leave no trace, and a segment of white space only is live. ``at_head``: the first block opens the
    prompt, where system text is live.
    """
    parts: list[Part] = []
    live, glued = "", False
    spaces: set[str] = set()
    for index, block in enumerate(block for block in blocks if block.text):
        body = block.text.strip()
        if not _is_segment(block, at_head and index == 0):
            live, glued = live + (glue if glued else "") + block.text, True
            spaces |= {block.namespace} if block.namespace is not None else set()
        elif not body:
            live, glued = live + block.text, False
        else:
            before, after = block.text.split(body, 1)
            live += before or (glue if glued else "")
            parts += [Part(live, None, frozenset(spaces))] if live else []
            parts.append(Part(body, replace(block, text=body)))
            live, glued, spaces = after, not after, set()
    return (*parts, Part(live, None, frozenset(spaces))) if live else tuple(parts)


def _is_segment(block: Segment, at_head: bool) -> bool:
    if block.cache is not None:
        return block.cache
    return block.kind in _CACHED_KINDS or (block.kind == "system" and not at_head)


def _halves(prompt: Prompt) -> tuple[list[Segment], list[Segment]]:
    system = [s for s in prompt.segments if s.kind == "system"]
    user = [s for s in prompt.segments if s.kind != "system"]
    return system, [*user, Segment(prompt.tail, "turn", namespace=prompt.namespace, cache=False)]


def _read_all(messages: Sequence[Message]) -> list[Turn]:
    if not isinstance(messages, Sequence) or isinstance(messages, bytes | bytearray) or not messages:
        raise PromptError(f"the prompt is {messages!r:.80}; pass a Prompt, a str or a list with at least one message.")
    return [_read(message, index) for index, message in enumerate(messages)]


def _read(message: Message, index: int) -> Turn:
    if not isinstance(message, Mapping):
        raise PromptError(f"message {index} is a {type(message).__name__}; pass a mapping with role and content.")
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"message {index} has the role {role!r}; use one of {', '.join(ROLES)}.")
    if role in _WITH_CONTENT and message.get("content") is None:
        given = "None" if "content" in message else "missing"
        raise PromptError(f"the content of message {index} is {given}; role {role!r} needs text or text blocks.")
    blocks = _blocks(message, role)
    # An answer returns in the pieces in which it was streamed: nothing stood between them.
    glue = "" if role == "assistant" else message.get("glue", GLUE)
    if not isinstance(glue, str):
        raise PromptError(f"the glue of message {index} is {type(glue).__name__}; pass text.")
    fields = {key: value for key, value in message.items() if key not in _OURS}
    return Turn(fields, split_parts(blocks, glue, at_head=index == 0), _hints(message).get("namespace"))


def _blocks(message: Message, role: str) -> list[Segment]:
    content = message.get("content")
    if content is None:
        return []
    if not isinstance(content, (str, Sequence)) or isinstance(content, (bytes, bytearray)):
        raise PromptError(f"a message's content is {type(content).__name__}; pass text or a list of text blocks.")
    listed = not isinstance(content, str)
    items = list(content) if listed else [content]
    outer = _hints(message)
    return [
        _block(item, _default(role, listed, last=n == len(items) - 1, only=len(items) == 1), outer)
        for n, item in enumerate(items)
    ]


def _default(role: str, listed: bool, *, last: bool, only: bool) -> Segment:
    """What a block is without hints; its text is filled in later."""
    if role in ("system", "developer"):
        return Segment("", "system")
    if role in ("tool", "function"):
        return Segment("", "document") if listed else Segment("", "tool", cache=False)
    if role == "user" and not last and not only:
        return Segment("", "document")
    return Segment("", "turn", cache=False)


def _block(item: object, default: Segment, outer: Mapping[str, Any]) -> Segment:
    if isinstance(item, str):
        return _hinted(default, item, outer)
    if not isinstance(item, Mapping):
        raise PromptError(f"a content block is a {type(item).__name__}; pass text or {{'type': 'text', 'text': ...}}.")
    if item.get("type") != "text" or "text" not in item:
        raise PromptError(f"a content block has the type {item.get('type')!r}; only blocks of type 'text' can be read.")
    return _hinted(default, item["text"], {**outer, **_hints(item)})


def _hinted(default: Segment, text: Any, hints: Mapping[str, Any]) -> Segment:
    # A kind given by name decides anew whether the block is a segment.
    fresh = {"cache": None} if hints.get("kind") is not None else {}
    given = {key: value for key, value in hints.items() if value is not None}
    return replace(default, text=text, **{**fresh, **given})


def _hints(carrier: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``hypic`` hints of a block or message, beside its text or under ``extras``."""
    extras = carrier.get("extras")
    nested = extras.get("hypic") if isinstance(extras, Mapping) else None
    hints = carrier.get("hypic", nested)
    if hints is None:
        return {}
    if not isinstance(hints, Mapping):
        raise PromptError(f"the hypic hint is {hints!r:.80}; pass a mapping with {', '.join(HINTS)}.")
    wrong = unknown_hint(hints, HINTS)
    if wrong is not None:
        raise PromptError(wrong)
    for key, value in hints.items():
        expected = _HINT_TYPES.get(key, (str,))
        if value is not None and not isinstance(value, expected):
            raise PromptError(f"the hypic hint {key} is {value!r:.80}; it must be {expected[-1].__name__} or left out.")
    return hints

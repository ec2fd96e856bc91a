"""From what a client sent to what the engine takes: namespaces set, known texts found again, tool arguments read.

A namespace that a client names is a name within its tenant, in every place where one may stand. Flat strings are cut
at registered texts; where content comes in parts, the client has said where the borders are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hypic.registry import POLICY_NAME, Registry
from hypic.types import Prompt, Segment
from hypic_apps.server.errors import refused
from hypic_apps.server.schemas import SegmentIn

_LEARNED = ("document", "skill", "memory")


@dataclass(frozen=True)
class Found:
    """A registered text in characters ``start`` to ``end`` of message ``message``, or of prompt ``message``."""

    message: int
    start: int
    end: int
    name: str | None
    source: str | None


@dataclass(frozen=True)
class Scope:
    """Whose segments a request may use: ``tenant`` and, within it, the request's own namespace."""

    tenant: str | None = None
    namespace: str | None = None

    def of(self, namespace: str | None = None) -> str | None:
        """The engine's name of a namespace; ``None`` is where everybody's segments are."""
        name = namespace or self.namespace
        return name if self.tenant is None else self.tenant if name is None else f"{self.tenant}/{name}"


@dataclass
class Reader:
    """Reads the prompts of one request. ``registry`` is ``None`` where flat text is not to be cut."""

    scope: Scope
    registry: Registry | None
    found: list[Found] = field(default_factory=list)

    @property
    def split(self) -> dict[str, Any]:
        """Where flat text was cut, for the report."""
        return {"policy": POLICY_NAME, "found": [asdict(found) for found in self.found]} if self.found else {}

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A conversation as the engine takes it."""
        return [self._message(message, index) for index, message in enumerate(messages)]

    def prompt(self, text: str, index: int, given: Sequence[SegmentIn], glue: str) -> Prompt:
        """A prompt without a template: the given segments before the text, or what is known in it."""
        if given:
            return Prompt([self.segment(one) for one in given], text, glue, template=False, namespace=self.scope.of())
        pieces = self._pieces(text, index, self.scope.of())
        if not any(isinstance(piece, Segment) for piece in pieces):
            return Prompt(tail=text, template=False, namespace=self.scope.of())
        tail = pieces.pop() if isinstance(pieces[-1], str) else ""
        # System segments would be moved to the front; this text has its order.
        space = self.scope.of()
        segments = [_live(p, space) if isinstance(p, str) else _as_document(p) for p in pieces]
        return Prompt(segments, str(tail), glue="", template=False, namespace=space)

    def segment(self, given: SegmentIn) -> Segment:
        """A segment in its tenant's namespace.

        Raises:
            ConfigError: its kind is unknown.
        """
        fields = given.model_dump()
        return Segment(**{**fields, "namespace": self.scope.of(given.namespace)})

    def _message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        read = {key: value for key, value in message.items() if value is not None and key not in ("hypic", "extras")}
        # Chat templates know system messages; this is their newer name.
        read["role"] = "system" if message.get("role") == "developer" else message.get("role")
        hints = self._hints(message)
        namespace = hints.get("namespace")
        if hints:
            read["hypic"] = hints
        if isinstance(read.get("tool_calls"), list):
            read["tool_calls"] = [_with_arguments(call) for call in read["tool_calls"]]
        content = read.get("content")
        flat = None if read["role"] == "assistant" or set(hints) - {"namespace"} else _flat_text(content, read["role"])
        if flat is not None:
            # System text behind the head is a segment of its own, and stays one around what is cut out of it.
            rest = {} if read["role"] == "system" and index else {"cache": False}
            return {**read, **self._cut(flat, index, namespace, rest)}
        if isinstance(content, list):
            read["content"] = [self._part(part) for part in content]
            self._learn(read["content"], namespace)
        return read

    def _part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        hints = _hints_of(part)
        if not isinstance(hints, Mapping) or not isinstance(hints.get("namespace"), str):
            return part
        rest = {key: value for key, value in part.items() if key != "extras"}
        return {**rest, "hypic": {**hints, "namespace": self.scope.of(hints["namespace"])}}

    def _hints(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message's hints, which hold for all of its parts, with the namespace in them."""
        hints = _hints_of(message)
        if hints is not None and not isinstance(hints, Mapping):
            raise refused(f"the hypic hint of a message is {hints!r:.80}; send an object.", "messages")
        hints = dict(hints or {})
        named = hints.get("namespace")
        if named is None or isinstance(named, str):
            hints["namespace"] = self.scope.of(named)
        return {key: value for key, value in hints.items() if value is not None}

    def _cut(self, text: str, index: int, namespace: str | None, rest: Mapping[str, Any]) -> dict[str, Any]:
        pieces = self._pieces(text, index, namespace)
        if not any(isinstance(piece, Segment) for piece in pieces):
            return {}
        return {"content": [_block(piece, rest) for piece in pieces], "glue": ""}

    def _pieces(self, text: str, index: int, namespace: str | None) -> list[Segment | str]:
        if self.registry is None:
            return [text]
        pieces, start = self.registry.split(text, namespace), 0
        for piece in pieces:
            end = start + len(piece if isinstance(piece, str) else piece.text)
            if isinstance(piece, Segment):
                self.found.append(Found(index, start, end, piece.name, piece.source))
            start = end
        return pieces or [text]

    def _learn(self, parts: Sequence[Any], namespace: str | None) -> None:
        """What a client marks as a segment is known when it comes back inside a flat string."""
        if self.registry is None:
            return
        marked = [segment for part in parts if (segment := _marked(part)) is not None]
        self.registry.register(marked, namespace=namespace)


def _hints_of(carrier: Mapping[str, Any]) -> Any:
    """Hints beside a text or under ``extras``, as the engine reads them."""
    extras = carrier.get("extras")
    nested = extras.get("hypic") if isinstance(extras, Mapping) else None
    return carrier.get("hypic", nested)


def _marked(part: Any) -> Segment | None:
    """A part that its hints call a segment to be found again; ``None`` also where the engine will refuse it."""
    hints = _hints_of(part) if isinstance(part, Mapping) else None
    if not isinstance(hints, Mapping) or hints.get("kind") not in _LEARNED or hints.get("cache") is False:
        return None
    labels = {key: hints.get(key) for key in ("name", "source", "namespace")}
    if not isinstance(part.get("text"), str) or any(not isinstance(v, str | None) for v in labels.values()):
        return None
    return Segment(part["text"], hints["kind"], **labels)


def _flat_text(content: Any, role: Any) -> str | None:
    """The text of a message without inner borders; ``None`` if a part of it is marked or there are several."""
    if isinstance(content, str):
        return content
    # A tool result in parts is documents, even a single one.
    if role == "tool" or not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], Mapping):
        return None
    text = content[0].get("text")
    return text if isinstance(text, str) and _hints_of(content[0]) is None else None


def _block(piece: Segment | str, rest: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece, "hypic": dict(rest)}
    hints = {"kind": piece.kind, "name": piece.name, "source": piece.source, "namespace": piece.namespace}
    return {"type": "text", "text": piece.text, "hypic": {**hints, "cache": piece.cache}}


def _live(text: str, namespace: str | None) -> Segment:
    return Segment(text, "turn", namespace=namespace, cache=False)


def _as_document(segment: Segment) -> Segment:
    kind = "document" if segment.kind == "system" else segment.kind
    return replace(segment, kind=kind)


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object: on the wire they are JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}

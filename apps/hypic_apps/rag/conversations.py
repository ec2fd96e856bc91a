"""Conversations of the tabs, as messages: earlier turns are live text, the newest question comes with its passages."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypic.types import Message, Segment
from hypic_apps.rag.errors import NotThere


@dataclass(frozen=True)
class Turn:
    """A question that was answered, and the prompt that it was."""

    question: str
    answer: str
    messages: Sequence[Message]


@dataclass
class Conversation:
    """What was asked and answered, oldest first."""

    id: str
    turns: list[Turn] = field(default_factory=list)

    @property
    def previous(self) -> str | None:
        """The question before the next one."""
        return self.turns[-1].question if self.turns else None

    def messages(self, segments: Sequence[Segment], question: str) -> list[Message]:
        """The prompt of the next question."""
        earlier = [
            message
            for turn in self.turns
            for message in (
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            )
        ]
        return [*earlier, {"role": "user", "content": [*map(block, segments), {"type": "text", "text": question}]}]


class Conversations:
    """The latest conversations; the one that was not used for longest goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()

    def get(self, id: str | None) -> Conversation:
        """The one with this id, or a new one for ``None``.

        Raises:
            NotThere: there is none with this id.
        """
        if id is None:
            id = secrets.token_urlsafe(12)
            self._by_id[id] = Conversation(id)
        elif id not in self._by_id:
            raise NotThere("this conversation is no longer there; begin a new one.")
        self._by_id.move_to_end(id)
        while len(self._by_id) > self.capacity:
            self._by_id.popitem(last=False)
        return self._by_id[id]


def block(segment: Segment) -> dict[str, Any]:
    """A segment as a block of a message, with its labels as hints."""
    hints = {"kind": segment.kind, "name": segment.name, "source": segment.source, "namespace": segment.namespace}
    return {"type": "text", "text": segment.text, "extras": {"hypic": hints}}

"""One answer as it comes: an iterator that frees all its request holds when it is closed or dropped."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from hypic.engine.task import Emission, Task
from hypic.errors import HypicError, RequestAborted
from hypic.types import Completion

Inbox = queue.SimpleQueue[Emission]


class Loop(Protocol):
    """What a stream needs of whoever answers it."""

    def abort(self, id: str) -> None: ...

    def check_process(self) -> None: ...


class Stream(Iterator[Completion]):
    """The pieces of one answer. Closing it, or dropping it unread or half read, frees all that the request holds."""

    def __init__(self, loop: Loop, inbox: Inbox, task: Task, remember: Callable[[Answer], None]) -> None:
        self._loop, self._inbox, self._task, self._remember = loop, inbox, task, remember
        self._answer = Answer()

    def __next__(self) -> Completion:
        if self._answer.is_over:
            raise StopIteration
        self._loop.check_process()
        emission = self._inbox.get()
        if self._answer.is_over:  # closed by another thread while this one waited
            raise StopIteration
        piece = self._answer.take(emission)
        if self._answer.is_over:
            self._remember(self._answer)
        return piece

    def close(self) -> None:
        """Break the answer off."""
        if not self._answer.is_over:
            self._answer.is_over = True
            self._loop.abort(self._task.id)
            closed = RequestAborted("the stream was closed.")
            self._inbox.put(Emission(self._task.id, closed, is_last=True))  # wakes a thread that reads

    def __del__(self) -> None:
        self.close()


@dataclass
class Answer:
    """What has come of one answer so far."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    is_over: bool = False

    def take(self, emission: Emission) -> Completion:
        """The next piece; raises what ended the request."""
        self.is_over = emission.is_last
        if isinstance(emission.result, HypicError):
            raise emission.result
        self.texts.append(emission.result.text)
        self.ids += emission.result.token_ids
        return emission.result

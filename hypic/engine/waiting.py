"""Requests that have not begun. What another worker asks for goes first: its own request runs already, and waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from hypic.engine.request import Request


class Waiting:
    """Two queues; iterating gives those that others asked for, then the rest, each in the order in which they run."""

    def __init__(self) -> None:
        self._asked, self._own = deque[Request](), deque[Request]()

    def __len__(self) -> int:
        return len(self._asked) + len(self._own)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._asked, self._own)

    @property
    def heads(self) -> list[Request]:
        """The first of either queue."""
        return [queue[0] for queue in (self._asked, self._own) if queue]

    def add(self, request: Request) -> None:
        self._of(request).append(request)

    def put_back(self, request: Request) -> None:
        """To the front: it has run before."""
        self._of(request).appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request out, if it is there."""
        queue = self._of(request)
        if request in queue:
            queue.remove(request)

    def _of(self, request: Request) -> deque[Request]:
        return self._asked if request.stays else self._own

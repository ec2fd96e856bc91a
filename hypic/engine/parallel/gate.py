"""What a connection holds back at the side that made it until the other side has room (``room.py``)."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Held = TypeVar("Held")


class Gate(Generic[Held]):
    """Answers by nonce; safe from any thread."""

    def __init__(self) -> None:
        self._shut: set[int] = set()
        self._held: dict[int, Held] = {}
        self._lock = threading.Lock()

    def shut(self, nonce: int) -> None:
        """What comes of this waits until it is opened."""
        with self._lock:
            self._shut.add(nonce)

    def holds(self, nonce: int, answer: Held) -> bool:
        """Whether an answer must wait; then it is kept here."""
        with self._lock:
            if nonce in self._shut:
                self._held[nonce] = answer
            return nonce in self._shut

    def open(self, nonce: int) -> Held | None:
        """It need not wait any more; what waited, if it was there."""
        with self._lock:
            self._shut.discard(nonce)
            return self._held.pop(nonce, None)

    def open_all(self) -> list[Held]:
        """Nothing waits any more; all that did."""
        with self._lock:
            found = list(self._held.values())
            self._shut.clear()
            self._held.clear()
            return found

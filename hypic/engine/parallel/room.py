"""Room for entries on their way to this worker, and for those that are here and not yet in its pool: a budget of bytes.

What is asked of peers has its room at once, as far as half of the budget goes: it comes as soon as it is made. The rest
stays where it was made (``gate.py``) until there is room: its peer says that it is there (``Ready``) and is told when
it may come (``Go``), in the order in which it was ready. So what is made slowly never takes all the room while
something else could come.

One of those that are called may always come, however large. What was called is written or given up soon (the engine
writes between two steps, deadlines run, connections end), and nothing that is done with it waits for another: so
nobody waits for ever. At most the budget is taken, or half of it and one entry if that is more. What was given up and
comes all the same is not counted: one parcel for each connection, let go at once, and what a parcel holds beside what
is still awaited, until that is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Room:
    """Entries by the nonce under which each was asked; safe from any thread. ``most_bytes`` is the most that was ever
    taken."""

    def __init__(self, budget_bytes: int) -> None:
        assert budget_bytes >= 0, f"a budget of {budget_bytes} bytes"
        self.budget_bytes, self.taken_bytes, self.most_bytes = budget_bytes, 0, 0
        self._promised_bytes = 0
        self._promised: dict[int, int] = {}
        self._called: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._ready: dict[int, int] = {}
        self._lock = threading.Lock()

    def promise(self, nonce: int, num_bytes: int) -> bool:
        """An entry is about to be asked for; whether it may come as soon as it is made."""
        with self._lock:
            is_early = self._promised_bytes + num_bytes <= self.budget_bytes // 2
            if not is_early or self.taken_bytes + num_bytes > self.budget_bytes:
                self._asked[nonce] = num_bytes
                return False
            self._promised[nonce] = num_bytes
            self._promised_bytes += num_bytes
            self._take(num_bytes)
            return True

    def ready(self, nonce: int) -> list[int]:
        """A peer has one for which there was no room; those that may come now."""
        with self._lock:
            if nonce in self._asked:
                self._ready[nonce] = self._asked.pop(nonce)
            return self._called_now()

    def end(self, nonces: Iterable[int]) -> list[int]:
        """These are in the pool or will never be: their room is free. Those that may come now."""
        with self._lock:
            for nonce in nonces:
                self._end(nonce)
            return self._called_now()

    def may_come(self, nonce: int) -> bool:
        """Whether a peer that sends it does what it was told; what is not known here was given up."""
        with self._lock:
            return nonce not in self._asked and nonce not in self._ready

    def _end(self, nonce: int) -> None:
        promised = self._promised.pop(nonce, 0)
        self._promised_bytes -= promised
        self.taken_bytes -= promised + self._called.pop(nonce, 0)
        self._asked.pop(nonce, None)
        self._ready.pop(nonce, None)

    def _called_now(self) -> list[int]:
        found = list[int]()
        while self._ready:
            nonce, num_bytes = next(iter(self._ready.items()))
            if self._called and self.taken_bytes + num_bytes > self.budget_bytes:
                break
            self._called[nonce] = self._ready.pop(nonce)
            self._take(num_bytes)
            found.append(nonce)
        return found

    def _take(self, num_bytes: int) -> None:
        self.taken_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)

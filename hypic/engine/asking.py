"""What this engine asks of its peers: the connections, the table of what has not come, and what is known of each peer.

One lock guards what is known (``view``); the table and the connections have their own. Not here: which peer is asked
for what (``placing.py``), and what becomes of what comes or fails to come (``peers.py``).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from hypic.engine.parallel import messages
from hypic.engine.parallel.caller import Events, Self
from hypic.engine.parallel.connections import Connections
from hypic.engine.parallel.messages import Cancel, Want
from hypic.engine.parallel.view import View
from hypic.engine.parallel.wants import Counts, Pending, Wants
from hypic.engine.payload import want_of


class Asking:
    """Safe from any thread."""

    def __init__(self, me: Self, events: Events) -> None:
        self.view, self.wants, self.counts = View(), Wants(), Counts()
        self.connections = Connections(me, events)
        self.lock = threading.RLock()
        self._nonces = itertools.count(1)

    def nonce(self) -> int:
        """A name that no request for an entry had before."""
        return next(self._nonces)

    def ask(self, asked: Sequence[Pending], is_trial: bool = False) -> None:
        """All that one peer is asked for goes in one message."""
        by_peer: dict[tuple[int, int], list[Want]] = {}
        for pending in asked:
            self.wants.add(pending)
            by_peer.setdefault(pending.peer, []).append(want_of(pending, is_trial))
        for peer, wants in by_peer.items():
            self.connections.tell(peer, messages.Wants(tuple(wants)))

    def take_back(self, nonce: int) -> bool:
        """Nobody needs it any more; whether it had not come yet."""
        pending = self.wants.take(nonce)
        if pending is not None:
            self.given_up(pending)
        return pending is not None

    def given_up(self, pending: Pending) -> None:
        """Tell a peer of what is out of the table."""
        self.connections.tell(pending.peer, Cancel(pending.nonce))

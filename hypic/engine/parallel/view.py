"""What one process knows of its peers: who is there, who holds what, who is busy until when. Pure; times are given.

All of it may be stale, and none of it decides an answer: a wrong guess costs a message or a recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hypic.engine.parallel.assign import Member
from hypic.engine.parallel.cost import UNMEASURED_LINK, EncodeCost, LinkCost, from_json
from hypic.engine.parallel.messages import Hello

# A worker that failed a request is left alone for so long, twice as long each further time, up to the longest.
FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
# ``met``: there is no connection yet; ``asked``: for an entry that is known; ``refused``: it came and was wrong.
State = Literal["met", "connected", "asked", "trusted", "refused"]


@dataclass
class Peer:
    """One peer. ``promised_s`` is when all that this process asked of it should have come."""

    hello: Hello
    encode: EncodeCost
    link: LinkCost = UNMEASURED_LINK
    held: set[str] = field(default_factory=set)
    queued_s: float = 0.0
    told_s: float = 0.0
    promised_s: float = 0.0
    resting_until_s: float = 0.0
    num_failures: int = 0
    state: State = "met"
    carrier: str = ""

    @property
    def id(self) -> tuple[int, int]:
        """Rank and generation: the process, not its place."""
        return self.hello.rank, self.hello.generation

    def queue_s(self, now: float) -> float:
        told = self.queued_s - (now - self.told_s)
        return max(told, self.promised_s - now, 0.0)


@dataclass
class View:
    """Peers by rank, each in its latest generation."""

    peers: dict[int, Peer] = field(default_factory=dict)

    def meet(self, hellos: Iterable[Hello]) -> None:
        """These are all that are ready; whoever is not among them is gone, and an older generation is nobody."""
        fresh: dict[int, Peer] = {}
        for hello in hellos:
            known = self.peers.get(hello.rank)
            if known is not None and known.hello.generation >= hello.generation:
                fresh[hello.rank] = known
            else:
                fresh[hello.rank] = Peer(hello, from_json(hello.cost))
        self.peers = fresh

    def heard(
        self, rank: int, generation: int, queued_s: float, added: Iterable[str], removed: Iterable[str], now: float
    ) -> None:
        """A peer's heartbeat, its own or passed on."""
        peer = self.get(rank, generation)
        if peer is not None:
            peer.queued_s, peer.told_s = queued_s, now
            peer.held.update(added)
            peer.held.difference_update(removed)

    def get(self, rank: int, generation: int) -> Peer | None:
        peer = self.peers.get(rank)
        return peer if peer is not None and peer.hello.generation == generation else None

    def members(self, now: float) -> list[Member]:
        """Those that work may be given to."""
        able = [p for p in self.peers.values() if p.state == "trusted" and now >= p.resting_until_s]
        return [Member(p.hello.rank, p.encode, p.link, p.queue_s(now)) for p in able]

    def holders(self, key: str, ranks: Iterable[int]) -> frozenset[int]:
        return frozenset(rank for rank in ranks if key in self.peers[rank].held)

    def promised(self, rank: int, arrival_s: float, now: float) -> None:
        """Work was handed out that should have come in ``arrival_s`` seconds."""
        peer = self.peers[rank]
        peer.promised_s = max(peer.promised_s, now + arrival_s)

    def failed(self, rank: int, generation: int, now: float) -> int:
        """A peer did not do what it was asked; how often in a row by now."""
        peer = self.get(rank, generation)
        if peer is None:
            return 0
        peer.num_failures += 1
        rest_s = min(FIRST_REST_S * 2 ** (peer.num_failures - 1), LONGEST_REST_S)
        peer.resting_until_s, peer.promised_s = now + rest_s, now
        return peer.num_failures

    def came(self, rank: int, generation: int, predicted_s: float, seconds: float, is_fetch: bool) -> None:
        """An entry came as asked."""
        peer = self.get(rank, generation)
        if peer is not None:
            peer.num_failures = 0
            if not is_fetch:
                peer.encode = peer.encode.observed(predicted_s, seconds)

    def carried(self, rank: int, generation: int, num_bytes: int, seconds: float) -> None:
        """Bytes came from a peer in so many seconds."""
        peer = self.get(rank, generation)
        if peer is not None:
            peer.link = peer.link.observed(num_bytes, seconds)

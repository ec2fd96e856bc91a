"""What one process knows of its peers: who is there, who holds what, who is busy until when. Pure; times are given.

All of it may be stale, and none of it decides an answer: a wrong guess costs a message or a recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from hypic.engine.parallel.assign import Member
from hypic.engine.parallel.cost import UNMEASURED_LINK, EncodeCost, LinkCost, from_json
from hypic.engine.parallel.messages import Beat, Hello, Holdings
from hypic.engine.parallel.progress import Progress
from hypic.engine.parallel.wants import Life, Pending

# A worker that failed a request is left alone for so long, twice as long each further time, up to the longest.
FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0
# A word of a peer that is older than this says nothing about it any more.
FRESH_S = 3.0
# How late a peer was, as a multiple of what was predicted: weight of a new observation, the largest that is believed,
# and the shortest prediction that is a measure.
LATE_SHARE, LATEST, SHORTEST_S = 0.25, 16.0, 0.25
# An entry takes longer to come than its bytes do while both ends encode: weight of a new observation, the largest that
# is believed, and by when half of it is forgotten, so that a link which is not used is tried again.
SLOWER_SHARE, SLOWEST, HALF_S = 0.25, 8.0, 10.0
# ``met``: there is no connection yet; ``asked``: for an entry that is known; ``refused``: it came and was wrong.
State = Literal["met", "connected", "asked", "trusted", "refused"]


@dataclass
class Peer:
    """One peer. ``promised_s`` is when all that this process asked of it should have come, ``came_s`` when the last
    entry came; ``late`` what it takes over what was predicted, 1 if that is no more; ``busy_s`` for how long its engine
    was at one step when it was heard; ``num_carried`` counts entries that came over its link; ``is_exact``: its entry
    of the known text was this process's bit by bit. ``slower`` is by what factor entries that follow each other come
    later than their bytes take (``link``); ``progress`` is what it still owes."""

    hello: Hello
    encode: EncodeCost
    link: LinkCost = UNMEASURED_LINK
    held: set[str] = field(default_factory=set)
    queued_s: float = 0.0
    busy_s: float = 0.0
    told_s: float = 0.0
    late: float = 1.0
    promised_s: float = 0.0
    came_s: float = 0.0
    resting_until_s: float = 0.0
    num_failures: int = 0
    num_carried: int = 0
    state: State = "met"
    is_exact: bool = False
    carrier: str = ""
    slower: float = 1.0
    progress: Progress = field(default_factory=Progress)

    @property
    def id(self) -> tuple[int, int]:
        """Rank and generation: the process, not its place."""
        return self.hello.rank, self.hello.generation

    def queue_s(self, now: float) -> float:
        told = self.queued_s - (now - self.told_s)
        return max(told, self.promised_s - now, 0.0)

    def member(self, now: float, send_s: float = 0.0) -> Member:
        """As a planner sees it."""
        return Member(self.hello.rank, self.encode, self.way(now), self.queue_s(now), self.hello.kind, send_s=send_s)

    def way(self, now: float) -> LinkCost:
        """The link, as it is while both ends work."""
        age_s = max(0.0, now - self.came_s)
        return self.link.times(1.0 + (self.slower - 1.0) * 0.5 ** (age_s / HALF_S))

    def life(self, now: float) -> Life:
        """What its last word says of it."""
        if now - self.told_s > FRESH_S:
            return "silent"
        return "at work" if self.queued_s or self.busy_s else "idle"

    def is_able(self, now: float) -> bool:
        """Whether work may be given to it."""
        return self.state == "trusted" and now >= self.resting_until_s


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

    def heard(self, word: Beat | Holdings, now: float) -> None:
        """A peer's heartbeat, its own or passed on."""
        peer = self.get(word.rank, word.generation)
        if peer is not None:
            peer.queued_s, peer.busy_s, peer.told_s = word.queued_s, word.busy_s, now
            peer.held.update(word.added)
            peer.held.difference_update(word.removed)
            if math.isfinite(word.scale) and word.scale > 0 and math.isfinite(word.spread) and word.spread >= 0:
                peer.encode = replace(peer.encode, scale=word.scale, spread=word.spread)

    def get(self, rank: int, generation: int) -> Peer | None:
        peer = self.peers.get(rank)
        return peer if peer is not None and peer.hello.generation == generation else None

    def members(self, now: float, send_s: float = 0.0) -> list[Member]:
        """Those that work may be given to; ``send_s`` is what an entry takes of the time of whoever made it."""
        able = [peer for peer in self.peers.values() if peer.is_able(now)]
        return [peer.member(now, send_s) for peer in able]

    def idle(self, awaited: Iterable[Pending], now: float) -> list[int]:
        """Those that work may be given to, and that are not known to have any."""
        asked = {pending.peer for pending in awaited}
        peers = self.peers.items()
        return [rank for rank, p in peers if p.is_able(now) and p.id not in asked and not p.queue_s(now)]

    def is_exact(self, rank: int, num_tokens: int) -> bool:
        """Whether what a peer encodes in a step of its own has the bits that it would have here."""
        peer = self.peers[rank]
        return peer.is_exact and num_tokens <= peer.encode.batch_tokens

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

    def promises(self, rank: int, arrival_s: float, now: float) -> None:
        """Less was left with a peer than it was asked for: that should have come in ``arrival_s`` seconds."""
        self.peers[rank].promised_s = now + arrival_s

    def came(self, rank: int, generation: int, predicted_s: float, seconds: float, now: float = 0.0) -> None:
        """An entry came as asked."""
        peer = self.get(rank, generation)
        if peer is not None:
            peer.came_s = now
            seen = min(max(seconds / max(predicted_s, SHORTEST_S), 1.0), LATEST)
            peer.num_failures, peer.late = 0, (1 - LATE_SHARE) * peer.late + LATE_SHARE * seen

    def made(self, pending: Pending, made_s: float) -> None:
        """One was made by then, and may not have come yet."""
        peer = self.get(*pending.peer)
        if peer is not None:
            peer.progress.made(pending.nonce, made_s, peer.encode.batch_tokens)

    def followed(self, pending: Pending, num_bytes: int, made_s: float, now: float, num_together: int = 1) -> None:
        """An entry came, as one of ``num_together``, that was made by ``made_s``: what they took since then, or since
        those before them, is what entries cost on their way. One that waited for room here is no measure of it."""
        peer = self.get(*pending.peer)
        if peer is None:
            return
        peer.progress.came(pending.nonce, made_s, peer.encode.batch_tokens)
        if not pending.is_made and not pending.is_fetch and peer.num_carried > 1:
            took_s = (now - max(peer.came_s, made_s)) / num_together
            seen = took_s / max(peer.link.seconds(num_bytes), 1e-6)
            peer.slower += SLOWER_SHARE * (min(max(seen, 1.0), SLOWEST) - peer.slower)

    def carried(self, rank: int, generation: int, num_bytes: int, seconds: float) -> None:
        """Bytes came from a peer in so many seconds."""
        peer = self.get(rank, generation)
        if peer is not None:
            # What the first transfer of a connection makes is no part of what the others take.
            before = peer.link if peer.num_carried > 1 else UNMEASURED_LINK
            peer.link, peer.num_carried = before.observed(num_bytes, seconds), peer.num_carried + 1

    def life(self, peer: tuple[int, int], now: float) -> Life:
        """What is known of a process; one that is not there is silent."""
        found = self.get(*peer)
        return "silent" if found is None else found.life(now)

    # -- trust -------------------------------------------------------------------------------------------------------

    def becomes(self, peer: tuple[int, int], state: State, only_from: State | None = None) -> None:
        """A peer is in another state, unless it was refused: that is for good."""
        found = self.get(*peer)
        if found is not None and found.state != "refused" and only_from in (None, found.state):
            found.state = state

    def unknown(self, now: float) -> list[Peer]:
        """Those that are connected and were not asked for an entry that is known."""
        return [p for p in self.peers.values() if p.state == "connected" and now >= p.resting_until_s]

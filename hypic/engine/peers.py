"""Segments that other workers encode for this engine: what becomes of them, whether they come or not.

Those that were given away (``placing.py``) wait in the engine's table with their pages and slots taken, exactly like
those that run here. What comes is checked and written straight into them. Whatever goes wrong (a deadline, a lost
connection, a refusal, damage) leads to one place: the encode is planned once more without the worker that failed, and
if that fails too it is run here. So a fault costs a recomputation, and a request that ends gives back what it holds in
the one way there is.

Not here: who is asked for what (``placing.py``), processes (``parallel/supervisor.py``), what is kept (``store/``), who
answers a request (``workers.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hypic.engine.arrivals import Arrivals, Arrived, awaited
from hypic.engine.asking import Asking
from hypic.engine.engine import Engine
from hypic.engine.own_work import OwnWork
from hypic.engine.parallel.caller import Caller, Self
from hypic.engine.parallel.cost import Pace
from hypic.engine.parallel.messages import Beat, Entry, Hello, Holdings, Parcel, Ready, Refused
from hypic.engine.parallel.room import Room
from hypic.engine.parallel.streams import Made
from hypic.engine.parallel.view import State
from hypic.engine.parallel.wants import Patience, Pending
from hypic.engine.parcel import Opened, image
from hypic.engine.payload import Canary, checked, largest_bytes
from hypic.engine.placing import Placing
from hypic.engine.pool import Pool
from hypic.engine.trust import CANARY, CANARY_S, Trust
from hypic.errors import StoreCorrupt

logger = logging.getLogger("hypic")
# An entry that came and is awaited, with its place in its parcel.
Found = tuple[int, Pending, Entry]
MOST_ATTEMPTS, TICK_S = 2, 0.05
# What comes takes memory beside the pool until it is written, which is between two steps: this share of the pool's, or
# of what a GPU has free if that is more, so that what a peer's step makes need not wait for the end of a step here; and
# never less than so much.
ROOM_SHARE, FREE_SHARE, LEAST_ROOM_BYTES = 1 / 32, 1 / 4, 2**28


class Peers:
    """Implements ``caller.Events`` on the connections' threads; ``placing`` is for the engine's.

    ``post`` runs something on the engine's thread. ``report`` is told of a peer that fails: rank, generation, how often
    in a row, why. ``room_bytes`` is what may have come, or be about to come, and not be in the pool yet.
    """

    def __init__(
        self,
        me: Self,
        engine: Engine,
        post: Callable[[Callable[[Engine], object]], None],
        pace: Pace,
        canary: Canary,
        report: Callable[[int, int, int, str], None],
        patience: Patience = Patience(),
        planner: str = "longest-first",
        room_bytes: int | None = None,
    ) -> None:
        self.me, self.pace, self.patience, self._post, self._report = me, pace, patience, post, report
        self._identity, self._layout = engine.runner.identity, engine.runner.pool.layout
        self._largest_bytes, self._form = largest_bytes(engine), engine.runner.pool.form
        self.room = Room(room_of(engine.runner.pool) if room_bytes is None else room_bytes)
        self._asking = Asking(me, self, self.room, self._layout)
        self.view, self.wants, self.counts = self._asking.view, self._asking.wants, self._asking.counts
        self._connections, self._lock = self._asking.connections, self._asking.lock
        self._trust = Trust(
            canary, self._layout.dtype, engine.runner.pool.form.drop_below, self.view, report, me.device_kind
        )
        self._arrivals = Arrivals(self.counts, self._asking.end)
        self._own = OwnWork(me, pace, engine.admission)
        self.placing = Placing(self._own, self._asking, self._arrivals, planner)
        self._over = threading.Event()
        threading.Thread(target=self._tick, name="hypic-deadlines", daemon=True).start()

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def _again(self, lost: Sequence[Pending], engine: Engine) -> None:
        """Plan anew what did not come; at the last attempt it is run here."""
        for pending in lost:
            job = awaited(pending, engine.admission.encoding)
            if job is None:
                continue
            job.away = 0
            if pending.attempt + 1 < MOST_ATTEMPTS and not job.is_asked:
                self.placing.place([job], pending.attempt + 1)

    # -- on any thread -----------------------------------------------------------------------------------------------

    def meet(self, hellos: Sequence[Hello]) -> None:
        """These workers are ready, and no others."""
        with self._lock:
            self.view.meet([hello for hello in hellos if hello.rank != self.me.rank])
            peers = [peer.id for peer in self.view.peers.values()]
        self._connections.end_others(peers)
        self._connect()

    def heard(self, word: Beat | Holdings) -> None:
        """A peer's heartbeat, its own or passed on."""
        with self._lock:
            self.view.heard(word, time.monotonic())

    def ready(self) -> int:
        """How many peers may be given work."""
        with self._lock:
            return len([m for m in self.view.members(time.monotonic()) if m.rank in self._connections])

    def trusted(self) -> dict[int, int]:
        """Generations of the peers that were seen to compute the same, by rank."""
        with self._lock:
            return dict(peer.id for peer in self.view.peers.values() if peer.is_able(time.monotonic()))

    def num_held(self, rank: int, keys: Sequence[str]) -> int:
        """How many of these entries a peer is thought to hold."""
        with self._lock:
            peer = self.view.peers.get(rank)
            return 0 if peer is None else len(peer.held.intersection(keys))

    def close(self) -> None:
        """Ask nobody any more; what is awaited is run here, if the engine still runs."""
        self._over.set()
        self._connections.close()
        self._own.admission = None

    def _fall_back(self, lost: Sequence[Pending], reason: str) -> None:
        """Whoever did not do what was asked is left alone for a while; the work is planned again.

        Whether a silent worker still lives its heartbeats show, and whoever listens to them: it is not reported.
        """
        now = time.monotonic()
        self._asking.end([pending.nonce for pending in lost])
        for peer in {pending.peer for pending in lost}:
            with self._lock:
                is_silent, num_failures = self.view.life(peer, now) == "silent", self.view.failed(*peer, now)
            if self._over.is_set():
                continue
            logger.warning(
                "worker %d: %s; %d of its segments are encoded again", peer[0], reason.rstrip("."), len(lost)
            )
            if not is_silent:
                self._report(*peer, num_failures, reason)
        self.counts.fell_back += len(lost)
        for pending in lost:
            if pending.attempt == CANARY:
                self._becomes(pending.peer, "connected")
        if lost:
            self._post(partial(self._again, lost))

    # -- on a thread of its own --------------------------------------------------------------------------------------

    def _tick(self) -> None:
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                overdue = self.wants.overdue(now, self.patience, partial(self.view.life, now=now))
            for pending in overdue:
                self._asking.given_up(pending)
            self._fall_back(overdue, "did not answer in time")
            self._connect()
            self._ask_canaries()

    def _connect(self) -> None:
        with self._lock:
            hellos = [peer.hello for peer in self.view.peers.values()]
        self._connections.keep(hellos, time.monotonic())

    def _ask_canaries(self) -> None:
        """Nobody's entries are used before one was seen to be right."""
        now = time.monotonic()
        with self._lock:
            for peer in self._trust.due(now, self._connections):
                entry = self._trust.canary.entry
                pending = Pending(self._asking.nonce(), entry, peer, False, now, CANARY_S, CANARY)
                self._asking.ask([pending], is_trial=True)

    # -- on the connections' threads ---------------------------------------------------------------------------------

    def connected(self, peer: tuple[int, int], carrier: str) -> None:
        logger.info("worker %d: entries come over %s", peer[0], carrier)
        with self._lock:
            known = self.view.get(*peer)
            if known is not None:
                known.carrier = carrier
            self.view.becomes(peer, "connected", only_from="met")

    def expects(self, peer: tuple[int, int], parcel: Parcel) -> bool:
        is_possible = all(entry.generation == peer[1] for entry in parcel.entries)
        return is_possible and self._asking.may_come(peer, parcel, self._largest_bytes)

    def is_ready(self, peer: tuple[int, int], message: Ready) -> None:
        if message.generation == peer[1]:
            self._asking.is_ready(peer, message)

    def parcel_came(self, peer: tuple[int, int], parcel: Parcel, data: Tensor, seconds: float) -> None:
        self.counts.came_bytes += parcel.num_bytes
        self.counts.carry_s += seconds
        pending = [self.wants.find(entry.nonce, peer) for entry in parcel.entries]
        began_s, worked_s = time.monotonic(), time.thread_time()
        found = [(n, p, e) for n, (p, e) in enumerate(zip(pending, parcel.entries, strict=True)) if p is not None]
        self.counts.late += len(pending) - len(found)
        if not found:
            return
        try:
            content = checked(pending, parcel, data, self._layout, self._form)
        except StoreCorrupt as error:
            lost = [one for _, one, _ in found if self.wants.take(one.nonce) is not None]
            if lost:
                self._becomes(peer, "connected")  # the next thing that it is asked is the canary again
                self._fall_back(lost, str(error))
            return
        self._measure(peer, parcel, found, seconds + time.monotonic() - began_s)
        self._arrivals.handled(len(pending), time.thread_time() - worked_s, parcel.pack_s)
        self._sort(peer, found, content, data)

    def _measure(self, peer: tuple[int, int], parcel: Parcel, found: Sequence[Found], seconds: float) -> None:
        """What an entry takes on its way: the next ones are not received before these were checked."""
        count = len(parcel.entries)
        each_bytes = parcel.num_bytes // count
        with self._lock:
            now = time.monotonic()
            self.view.carried(*peer, each_bytes, seconds / count)
            for _, pending, entry in found:
                if pending.attempt != CANARY:  # while it is still awaited: nobody takes back what its step has made
                    made_s = min(pending.asked_s + entry.encode_s, now)
                    self.view.followed(pending, each_bytes, made_s, now, count)

    def _sort(self, peer: tuple[int, int], found: Sequence[Found], content: Opened, data: Tensor) -> None:
        """What came and is sound: a canary is compared, what is awaited goes to the engine."""
        awaited, canaries = list[Found](), list[Found]()
        for one in found:
            if self.wants.take(one[1].nonce) is None:
                self.counts.late += 1
            else:
                (canaries if one[1].attempt == CANARY else awaited).append(one)
        for number, pending, _ in canaries:
            apart = self._trust.apart(image(content, number, pending.entry, self._identity, self._layout))
            with self._lock:
                self._trust.settle(peer, apart)
            self._asking.end([pending.nonce])
        if awaited:
            self._accept(peer, awaited, content, data)

    def _accept(self, peer: tuple[int, int], found: Sequence[Found], content: Opened, data: Tensor) -> None:
        now = time.monotonic()
        with self._lock:
            for _, pending, _ in found:
                self.view.came(*peer, pending.predicted_s, now - pending.asked_s, now)
        self._arrivals.add(Arrived(tuple(found), content, Made.here(data)))
        self._post(self._arrivals.write)

    def _becomes(self, peer: tuple[int, int], state: State) -> None:
        with self._lock:
            self.view.becomes(peer, state)

    def refused(self, peer: tuple[int, int], message: Refused) -> None:
        pending = self.wants.find(message.nonce, peer)
        if pending is None or self.wants.take(message.nonce) is None:
            return
        self._fall_back([pending], f"refused ({message.reason})")

    def lost(self, caller: Caller, reason: str) -> None:
        self._connections.lost(caller, time.monotonic())
        self._becomes(caller.peer, "met")
        self._fall_back(self.wants.of(caller.peer), reason)


def room_of(pool: Pool) -> int:
    """Bytes that entries may take before they are in an engine's pool."""
    free_bytes = torch.cuda.mem_get_info(pool.device)[0] if pool.device.type == "cuda" else 0
    return max(LEAST_ROOM_BYTES, int(ROOM_SHARE * pool.num_bytes), int(FREE_SHARE * free_bytes))

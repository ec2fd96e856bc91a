"""Segments that other workers encode for this engine, and that this engine encodes for others.

On admission the encodes of a request are laid before the planner; those that go away wait in the engine's table with
their pages and slots taken, exactly like those that run here. What comes is checked and written straight into them.
Whatever goes wrong (a deadline, a lost connection, a refusal, damage) leads to one place: the encode is planned once
more without the worker that failed, and if that fails too it is run here. So a fault costs a recomputation, and a
request that ends gives back what it holds in the one way there is.

Not here: processes (``parallel/supervisor.py``), what is kept (``store/``), who answers a request (``workers.py``).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from hypic.engine.arrivals import Arrivals, Arrived, awaited
from hypic.engine.engine import Engine
from hypic.engine.own_work import OwnWork, job_of
from hypic.engine.parallel import messages
from hypic.engine.parallel.assign import PLANNERS, Placed, alike
from hypic.engine.parallel.caller import Caller, Self
from hypic.engine.parallel.connections import Connections
from hypic.engine.parallel.cost import Pace
from hypic.engine.parallel.messages import Beat, Cancel, Entry, Hello, Holdings, Refused, Want
from hypic.engine.parallel.stealing import to_take_back
from hypic.engine.parallel.streams import Made
from hypic.engine.parallel.view import State, View
from hypic.engine.parallel.wants import Counts, Patience, Pending, Wants
from hypic.engine.payload import Canary, checked, largest_bytes, want_of
from hypic.engine.request import Encode
from hypic.engine.store.image import EntryImage
from hypic.engine.trust import CANARY, CANARY_S, Trust
from hypic.errors import StoreCorrupt

logger = logging.getLogger("hypic")
MOST_ATTEMPTS, TICK_S = 2, 0.05


class Peers:
    """Implements ``jobs.Away`` on the engine's thread, and ``caller.Events`` on the connections' threads.

    ``post`` runs something on the engine's thread. ``report`` is told of a peer that fails: rank, generation, how often
    in a row, why. ``planner`` is a name of ``parallel.assign.PLANNERS``; it and ``only``, the ranks that may be asked
    (``None``: all), may be changed between two requests.
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
    ) -> None:
        self.me, self.pace, self.patience, self.planner = me, pace, patience, planner
        self.view, self.wants, self.counts = View(), Wants(), Counts()
        self.only: frozenset[int] | None = None
        self._own = OwnWork(me, pace, engine.admission)
        self._identity, self._layout = engine.runner.identity, engine.runner.pool.layout
        self._largest_bytes = largest_bytes(engine)
        self._post, self._report = post, report
        self._trust = Trust(
            canary, self._layout.dtype, engine.runner.pool.form.drop_below, self.view, report, me.device_kind
        )
        self._connections = Connections(me, self)
        self._nonces = itertools.count(1)
        self._arrivals = Arrivals(self.counts)
        self._lock = threading.RLock()
        self._over = threading.Event()
        threading.Thread(target=self._tick, name="hypic-deadlines", daemon=True).start()

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def offer(self, jobs: Sequence[Encode]) -> None:
        """Give away what others have sooner; the rest stays where it is."""
        started = time.monotonic()
        fresh = [job for job in jobs if job.base is None and not job.done]
        for is_alone in (False, True):
            self._place([job for job in fresh if job.is_alone is is_alone], 0)
        self.counts.plan_s += time.monotonic() - started

    def withdraw(self, job: Encode) -> None:
        pending = self.wants.take(job.away)
        if pending is not None:
            self._connections.tell(pending.peer, Cancel(pending.nonce))

    def _place(self, jobs: Sequence[Encode], attempt: int) -> None:
        now = time.monotonic()
        with self._lock:
            members = [member for member in self.view.members(now) if self._may_ask(member.rank, jobs)]
            ranks = [member.rank for member in members]
            wanted = [job_of(number, job, self.view, ranks) for number, job in enumerate(jobs)]
            if not members or not wanted:
                return
            own = self._own.member(self._arrivals.receive_s, jobs)
            placed = PLANNERS[self.planner](wanted, alike([own, *members]), self.me.rank)
            # What is asked at once of a peer is encoded in steps of many, so all of it may come with the last.
            arrivals_s = {place.rank: place.arrival_s for place in sorted(placed, key=lambda place: place.arrival_s)}
            asked: dict[tuple[int, int], list[Want]] = {}
            for place in placed:
                if place.rank != self.me.rank:
                    arrival_s = place.arrival_s if place.is_fetch else arrivals_s[place.rank]
                    pending = self._send_away(jobs[place.job.number], place, arrival_s, attempt, now)
                    asked.setdefault(pending.peer, []).append(want_of(pending))
            for peer, wants in asked.items():
                self._connections.tell(peer, messages.Wants(tuple(wants)))

    def _may_ask(self, rank: int, jobs: Sequence[Encode] = ()) -> bool:
        """Of deterministic requests' segments only those are asked for whose bits are the same."""
        alone = [len(job.entry.ids) for job in jobs if job.is_alone]
        is_exact = not alone or (max(alone) <= self.pace.cost.batch_tokens and self.view.is_exact(rank, max(alone)))
        return is_exact and rank in self._connections and (self.only is None or rank in self.only)

    def _send_away(self, job: Encode, place: Placed, arrival_s: float, attempt: int, now: float) -> Pending:
        peer, nonce = self.view.peers[place.rank], next(self._nonces)
        pending = Pending(nonce, job.entry, peer.id, place.is_fetch, now, arrival_s, attempt, peer.late)
        self.wants.add(pending)
        job.away, self.counts.asked = nonce, self.counts.asked + 1
        self.view.promised(place.rank, arrival_s, now)
        return pending

    def rebalance(self) -> None:
        """Between two steps: take back what a peer has not begun, if there is nothing else to do here; plan again what
        waits here, if a peer has nothing to do."""
        if self.planner != "longest-first" or self._own.admission is None:
            return
        with self._lock:
            if not self._own.here():
                self._take_back()
            elif later := self._own.later():
                idle = self.view.idle(self.wants.waiting(), time.monotonic())
                self.offer(later if any(map(self._may_ask, idle)) else ())

    def _take_back(self) -> None:
        encoding = self._own.encoding
        waiting = [pending for pending in self.wants.waiting() if awaited(pending, encoding)]
        own = self._own.member(self._arrivals.receive_s)
        for pending in to_take_back(waiting, own, self.view, time.monotonic()):
            if self.wants.take(pending.nonce) is not None:
                self._connections.tell(pending.peer, Cancel(pending.nonce))
                encoding[pending.key].away, self.counts.taken_back = 0, self.counts.taken_back + 1

    def _again(self, lost: Sequence[Pending], engine: Engine) -> None:
        """Plan anew what did not come; at the last attempt it is run here."""
        for pending in lost:
            job = awaited(pending, engine.admission.encoding)
            if job is None:
                continue
            job.away = 0
            if pending.attempt + 1 < MOST_ATTEMPTS:
                self._place([job], pending.attempt + 1)

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
                self._connections.tell(pending.peer, Cancel(pending.nonce))
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
                pending = Pending(next(self._nonces), self._trust.canary.entry, peer, False, now, CANARY_S, CANARY)
                self.wants.add(pending)
                self._connections.tell(peer, messages.Wants((want_of(pending, is_trial=True),)))

    # -- on the connections' threads ---------------------------------------------------------------------------------

    def connected(self, peer: tuple[int, int], carrier: str) -> None:
        logger.info("worker %d: entries come over %s", peer[0], carrier)
        with self._lock:
            known = self.view.get(*peer)
            if known is not None:
                known.carrier = carrier
            self.view.becomes(peer, "connected", only_from="met")

    def expects(self, peer: tuple[int, int], entry: Entry) -> bool:
        return entry.generation == peer[1] and entry.num_bytes <= self._largest_bytes

    def entry_came(self, peer: tuple[int, int], entry: Entry, data: Tensor, seconds: float) -> None:
        self.counts.came_bytes += entry.num_bytes
        self.counts.carry_s += seconds
        pending, began_s = self.wants.find(entry.nonce, peer), time.monotonic()
        if pending is None:
            self.counts.late += 1
            return
        try:
            image = checked(pending, entry, data, self._identity, self._layout)
        except StoreCorrupt as error:
            if self.wants.take(entry.nonce) is not None:
                self._becomes(peer, "connected")  # the next thing that it is asked is the canary again
                self._fall_back([pending], str(error))
            return
        with self._lock:  # the next one is not received before this one was checked
            self.view.carried(*peer, entry.num_bytes, seconds + time.monotonic() - began_s)
        if self.wants.take(entry.nonce) is None:
            self.counts.late += 1
        elif pending.attempt == CANARY:
            apart = self._trust.apart(image)
            with self._lock:
                self._trust.settle(peer, apart)
        else:
            self._accept(pending, entry, image, data)

    def _accept(self, pending: Pending, entry: Entry, image: EntryImage, data: Tensor) -> None:
        taken_s = time.monotonic() - pending.asked_s
        with self._lock:
            self.view.came(*pending.peer, pending.predicted_s, taken_s, time.monotonic())
        self._arrivals.add(Arrived(pending, entry, image, Made.here(data)))
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

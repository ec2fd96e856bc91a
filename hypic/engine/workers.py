"""The front's side of many workers: this process's engine is worker 0, the others are started, watched and asked.

``Workers`` starts the processes, tells this engine's admission who may encode for it and the router who may answer, and
ends all of it. With one worker nothing of this module is used but ``start``.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hypic.config import EngineConfig
from hypic.engine.engine import Engine
from hypic.engine.lending import Lending, Seen, Shown
from hypic.engine.loop import EngineLoop
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import Pace, to_json
from hypic.engine.parallel.listener import Listener
from hypic.engine.parallel.liveness import Times
from hypic.engine.parallel.messages import Abort, Ask, Beat, Forget, Forgot, Hello, Holdings, Message, Piece, Roster
from hypic.engine.parallel.processes import LocalProcess
from hypic.engine.parallel.supervisor import Launch, Supervisor
from hypic.engine.parallel.transport import device_kind, device_name
from hypic.engine.parallel.wants import Patience
from hypic.engine.payload import Canary
from hypic.engine.peers import Peers
from hypic.engine.router import Router
from hypic.engine.shares import environment_of, settings_of
from hypic.engine.speech import result_of, task_to_json
from hypic.engine.store.texts import Texts, Wanted
from hypic.engine.task import Emission, Task
from hypic.engine.trust import NEVER
from hypic.errors import WorkerLost
from hypic.kept import Forgotten

logger = logging.getLogger("hypic")
# A worker that fails so often in a row is started again, though its heart beats.
MOST_FAILURES = 3
# A worker that lives and yet has not forgotten by then what it was told to forget is ended.
FORGET_S = 60.0
# This process's own generation, and how many beats of others pass between two of its own.
OWN_GENERATION, SLOWER = 1, 5


@dataclass(frozen=True)
class Setup:
    """How workers are run; tests and benchmarks choose other than the defaults. ``speaks``: the checkpoint has a
    tokenizer; ``routes``: other workers answer whole requests too, as well as encoding for this one; ``room_bytes``:
    what each lets come before it is written, by default a share of its pool."""

    entry: str = "hypic.engine.worker"
    carrier: str = "auto"
    planner: str = "longest-first"
    times: Times = Times()
    patience: Patience = Patience()
    launch: Launch = LocalProcess
    host: str = "127.0.0.1"
    speaks: bool = True
    routes: bool = True
    room_bytes: int | None = None


class Workers:
    """See the module's docstring. Processes are started at once; ``join`` comes when this one's engine is there."""

    def __init__(self, folder: Path, config: EngineConfig, setup: Setup = Setup()) -> None:
        self.setup = setup
        self._peers: Peers | None = None
        self._listener: Listener | None = None
        self._router: Router | None = None
        self._forgotten: dict[tuple[int, int], Forgot] = {}
        self._said = threading.Condition()
        self._numbers = itertools.count(1)
        self._over = threading.Event()
        told: dict[str, Any] = {
            "entry": setup.entry,
            "folder": str(folder),
            "host": setup.host,
            "carrier": setup.carrier,
        }
        told |= {"parent": os.getpid(), "speaks": setup.speaks, "planner": setup.planner}
        told |= {} if setup.room_bytes is None else {"room_bytes": setup.room_bytes}
        # Who only encodes has no use for recorded steps, which are those that encode nothing.
        config = config if setup.routes else replace(config, graphs=False)
        specs = {rank: {**told, **_of_rank(rank, config)} for rank in range(1, config.workers)}
        self.supervisor = Supervisor(specs, self, setup.times, setup.launch, setup.host)

    def join(self, loop: EngineLoop, pace: Pace, canary: Canary) -> Router:
        """Let an engine give work away and take some, once all workers are ready.

        Raises:
            WorkerLost: one cannot start, with its reason.
        """
        self.supervisor.wait_ready()
        loop.call(partial(self._joined, loop, pace, canary))
        self._meet()
        threading.Thread(target=self._show, args=(Shown(loop, pace),), name="hypic-show", daemon=True).start()
        assert self._router is not None, "joining makes the router"
        return self._router

    def _joined(self, loop: EngineLoop, pace: Pace, canary: Canary, engine: Engine) -> None:
        runner, setup = engine.runner, self.setup
        device = runner.pool.device
        me = Self(
            0, OWN_GENERATION, self.supervisor.secret, device, device_name(device), setup.carrier, device_kind(device)
        )
        self._listener = Listener(me, setup.host, Lending(loop, OWN_GENERATION))
        self._own = Hello(
            *(0, OWN_GENERATION, os.getpid(), self.supervisor.host, self._listener.port, me.device_name),
            *(runner.identity.fingerprint, to_json(pace.cost), me.device_kind),
        )
        # From here on everybody is told, on other threads, of a worker that comes or leaves: this one is known by now.
        self._peers = Peers(
            *(me, engine, loop.post, pace, canary, self._failed, setup.patience, setup.planner, setup.room_bytes)
        )
        self._router = Router(loop, runner.identity, self)
        engine.admission.jobs.away = self._peers.placing

    @property
    def peers(self) -> Peers:
        assert self._peers is not None, "no engine has joined"
        return self._peers

    def wait_usable(self, timeout_s: float) -> bool:
        """Until every worker has shown that it makes the same entries; whether all have."""
        deadline_s = time.monotonic() + timeout_s
        while self.peers.ready() < len(self.supervisor.specs):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.02)
        return True

    def stats(self) -> dict[str, Any]:
        """Who is ready, who answers how many requests, and what went over to others."""
        ready = [{"rank": h.rank, "generation": h.generation, "pid": h.pid} for h in self.supervisor.hellos]
        requests = {} if self._router is None else dict(self._router.num_routed())
        return {"ready": ready, "usable": self.peers.ready(), "requests": requests, **asdict(self.peers.counts)}

    def forget(self, wanted: Wanted, texts: Texts) -> Forgotten:
        """Have all workers drop what is meant, and wait until they have; one that does not is ended.

        ``texts`` are those that were meant here, and become all that were meant anywhere.
        """
        dropped = Forgotten()
        while True:
            known = () if wanted.is_all else tuple(sorted(needle.hex() for needle in texts.needles))
            found = self._forget_once(wanted, known)
            for one in found:
                dropped = total(dropped, Forgotten(**one.counts))
            before = len(texts.needles)
            texts.needles |= {bytes.fromhex(text) for one in found for text in one.texts}
            if wanted.is_all or len(texts.needles) == before:
                return dropped

    def _forget_once(self, wanted: Wanted, known: tuple[str, ...]) -> list[Forgot]:
        number = next(self._numbers)
        message = Forget(number, wanted.source, wanted.name, wanted.namespace, known)
        sent = [hello for hello in self.supervisor.hellos if self._tell(hello, message)]
        deadline_s = time.monotonic() + FORGET_S
        answers = [self._forgot(number, hello, deadline_s) for hello in sent]
        return [answer for answer in answers if answer is not None]

    def _forgot(self, number: int, hello: Hello, deadline_s: float) -> Forgot | None:
        place = (number, hello.rank)

        def is_over() -> bool:
            return place in self._forgotten or hello not in self.supervisor.hellos

        with self._said:
            self._said.wait_for(is_over, deadline_s - time.monotonic())
            found = self._forgotten.pop(place, None)
        if found is None:
            self.supervisor.lose(hello.rank, hello.generation, "it did not forget what it was told to")
        return found

    def close(self) -> None:
        """End all workers and wait for it."""
        self._over.set()
        if self._peers is not None:
            self._peers.close()
        if self._listener is not None:
            self._listener.close()
        self.supervisor.close()

    # -- what the router asks ----------------------------------------------------------------------------------------

    def able(self) -> Mapping[int, int]:
        return self.peers.trusted() if self.setup.routes else {}

    def held(self, rank: int, keys: list[str]) -> int:
        return self.peers.num_held(rank, keys)

    def ask(self, rank: int, generation: int, task: Task) -> bool:
        return self.supervisor.send(rank, generation, Ask(task.id, task_to_json(task)))

    def abort(self, rank: int, generation: int, id: str) -> None:
        self.supervisor.send(rank, generation, Abort(id))

    # -- what the supervisor tells -----------------------------------------------------------------------------------

    def came(self, hello: Hello) -> None:
        self._meet()

    def left(self, rank: int, generation: int, reason: str) -> None:
        with self._said:
            self._said.notify_all()
        self._meet()
        if self._router is not None:
            self._router.left(rank, generation)

    def heard(self, hello: Hello, message: Message) -> None:
        if isinstance(message, Beat):
            self._beat(message)
        elif isinstance(message, Piece) and self._router is not None:
            emission = Emission(message.id, result_of(message.result), message.is_last)
            self._router.piece(hello.rank, hello.generation, emission)
        elif isinstance(message, Forgot):
            with self._said:
                self._forgotten[message.number, hello.rank] = message
                self._said.notify_all()
        else:
            raise WorkerLost(f"worker {hello.rank} sent {type(message).__name__}, which no worker sends.")

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _beat(self, beat: Beat) -> None:
        if self._peers is not None:
            self._peers.heard(beat)
            seen = Seen(beat.queued_s, beat.added, beat.removed, beat.busy_s, beat.scale, beat.spread)
            if seen.is_news:
                self._pass_on(Holdings(beat.rank, beat.generation, **vars(seen)))

    def _meet(self) -> None:
        """Everybody hears who is there."""
        if self._peers is not None:
            hellos = self.supervisor.hellos
            self._peers.meet(hellos)
            roster = Roster(tuple(asdict(hello) for hello in (self._own, *hellos)))
            for hello in hellos:
                self._tell(hello, roster)

    def _pass_on(self, holdings: Holdings) -> None:
        for hello in self.supervisor.hellos:
            if hello.rank != holdings.rank:
                self._tell(hello, holdings)

    def _tell(self, hello: Hello, message: Message) -> bool:
        return self.supervisor.send(hello.rank, hello.generation, message)

    def _show(self, shown: Shown) -> None:
        """The others hear what this process holds, as they hear it of each other."""
        while not self._over.wait(SLOWER * self.setup.times.beat_s) and not shown.is_over:
            seen = shown.look()
            if seen.is_news:
                self._pass_on(Holdings(0, OWN_GENERATION, **vars(seen)))

    def _failed(self, rank: int, generation: int, num_failures: int, reason: str) -> None:
        if MOST_FAILURES <= num_failures < NEVER:
            self.supervisor.lose(rank, generation, f"{num_failures} times in a row it {reason}")


def total(one: Forgotten, other: Forgotten) -> Forgotten:
    """What was forgotten in two places."""
    mine, theirs = asdict(one), asdict(other)
    return Forgotten(**{name: mine[name] + theirs[name] for name in mine})


def _of_rank(rank: int, config: EngineConfig) -> dict[str, Any]:
    return {"settings": settings_of(rank, config), "environment": environment_of(rank, config)}

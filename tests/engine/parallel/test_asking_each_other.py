"""Workers that ask each other for one segment: one of them makes it, and nobody waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypic.engine.encode import Encode
from hypic.engine.own_work import OwnWork
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import EncodeCost, Pace
from hypic.engine.parallel.wants import Counts, Pending, Wants
from hypic.engine.placing import Placing
from hypic.engine.plan import Piece
from hypic.engine.task import Task
from hypic.types import SamplingParams
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg

Make = Callable[..., Bench]


class GivesAll:
    """All that is offered is done elsewhere, until it has to be kept."""

    def __init__(self) -> None:
        self.kept, self._numbers = list[Encode](), itertools.count(1)

    def offer(self, jobs: Sequence[Encode]) -> None:
        for job in jobs:
            job.away = next(self._numbers)

    def withdraw(self, job: Encode) -> None: ...

    def rebalance(self) -> None: ...

    def keep(self, job: Encode) -> None:
        self.kept.append(job)
        job.away = 0


def warm(engine: Bench, piece: Piece, stays: bool) -> None:
    task = Task("warm", [piece, Piece((0,))], SamplingParams(), POLICY, warm=True, stays=stays)
    engine.answers["warm"] = SimpleNamespace(is_over=False, error=None, pieces=[])  # type: ignore[assignment]
    engine.engine.add(task)


@pytest.mark.parametrize("stays", [True, False])
def test_what_is_awaited_of_others_and_asked_for_by_them_is_made_here(bench: Make, stays: bool) -> None:
    engine, away = bench("qwen"), GivesAll()
    engine.engine.admission.jobs.away = away
    answer = engine.add([seg(20, 1), seg(30, 2), live(5, 3)], max_tokens=1)
    engine.step()
    jobs = list(engine.engine.admission.encoding.values())
    assert all(job.away for job in jobs) and len(jobs) == 2 and not away.kept
    warm(engine, seg(30, 2), stays)
    engine.step()
    assert away.kept == ([jobs[1]] if stays else [])
    assert bool(engine.answers["warm"].is_over) is stays and not answer.is_over
    engine.engine.admission.jobs.away = None
    for job in engine.engine.admission.encoding.values():
        job.away = 0
    engine.run()
    assert answer.is_over
    engine.assert_back_to_start()


@pytest.mark.parametrize(("rank", "peer", "is_kept"), [(0, 1, True), (1, 0, False), (1, 2, True), (2, 0, False)])
def test_of_two_that_ask_each_other_the_lower_rank_makes_it(rank: int, peer: int, is_kept: bool) -> None:
    """In a ring of any length one worker asks one of a higher rank."""
    wants, given_up, counts = Wants(), list[int](), Counts()
    entry: Any = SimpleNamespace(ids=(1, 2), key=b"k")
    wants.add(Pending(7, entry, (peer, 1), False, 0.0, 1.0, 0))

    def take_back(nonce: int) -> bool:
        given_up.append(nonce)
        return wants.take(nonce) is not None

    asking: Any = SimpleNamespace(wants=wants, counts=counts, take_back=take_back)
    own: Any = SimpleNamespace(me=SimpleNamespace(rank=rank))
    placing = Placing(own, asking, SimpleNamespace(), "longest-first")  # type: ignore[arg-type]
    job, other = (Encode(entry, 0, None, [], 1, away=nonce) for nonce in (7, 8))  # type: ignore[arg-type]
    placing.keep(job)
    placing.keep(other)  # it has come, and is about to be written
    assert (job.away, other.away) == (0 if is_kept else 7, 8)
    assert given_up == ([7] if is_kept else []) and counts.taken_back == is_kept


def test_what_others_ask_for_is_not_passed_on_whoever_else_waits(bench: Make) -> None:
    """It may have been asked for by the very worker that would be asked for it."""
    engine = bench("qwen", max_step_tokens=64)
    for number in range(4):
        engine.add([seg(40, number), live(5, 3)], max_tokens=1)
    engine.engine.scheduler.schedule()
    warm(engine, seg(40, 3), True)
    engine.engine.scheduler.schedule()
    me = Self(0, 1, b"", torch.device("cpu"), "cpu")
    pace = Pace(EncodeCost(0.01, 1e-5, batch_tokens=64))
    work = OwnWork(me, pace, engine.engine.admission)
    here = work.here()
    asked = [job for job in here if any(request.stays for request in job.waiters.values())]
    assert len(asked) == 1 and len(asked[0].waiters) == 2
    assert set(map(id, work.later())) == set(map(id, here[2:])) - set(map(id, asked)) != set()
    engine.run()


@pytest.mark.parametrize("is_lent", [True, False])
def test_who_finds_no_memory_waits_for_what_is_lent(bench: Make, is_lent: bool) -> None:
    """What other workers are being sent holds memory for a while; what is pinned for good is the control."""
    engine = bench("qwen", sizes=(24, 12, 6))
    engine.ask([seg(160, 1), live(5, 2)], max_tokens=1)
    entry = next(entry for entry in engine.store if not entry.is_snapshot)
    (engine.store.lend if is_lent else engine.store.pin)(entry)
    answer = engine.add([live(250, 3)], max_tokens=2)
    for _ in range(3):
        engine.step()
    assert (answer.error is None) is is_lent is engine.engine.is_stalled and not answer.pieces
    (engine.store.take_back if is_lent else engine.store.unpin)(entry)
    engine.run()
    assert len(answer.ids) == (2 if is_lent else 0)
    engine.assert_back_to_start()


def test_an_answer_that_grows_waits_for_what_is_lent(bench: Make) -> None:
    engine = bench("qwen", sizes=(24, 12, 6))
    engine.ask([seg(160, 1), live(5, 2)], max_tokens=1)
    entry = next(entry for entry in engine.store if not entry.is_snapshot)
    engine.store.lend(entry)
    answer = engine.add([live(160, 3)], max_tokens=100)
    for _ in range(90):
        engine.step()
    assert answer.error is None and engine.engine.is_stalled and 0 < len(answer.ids) < 80
    engine.store.take_back(entry)
    engine.run()
    assert answer.error is None and len(answer.ids) == 100
    engine.assert_back_to_start()

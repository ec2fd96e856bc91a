"""Texts that are forgotten, or whose time is over, while their entries are made, loaded, written or pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hypic.engine.forget import forget
from hypic.engine.store.texts import Wanted
from tests.engine.harness import Answer, Bench, live, seg
from tests.engine.test_tiers import always_load, disk_at, saved, slowed

Make = Callable[..., Bench]
SECRET = seg(90, 1, source="door.md")
PIECES = [live(3, 2), SECRET, live(4, 3)]


def leave(engine: Bench, request: Answer, how: str) -> None:
    """The last one who waits goes, or starts again."""
    if how == "abort":
        engine.abort(request)
    else:
        engine.engine.scheduler.preempt(engine.engine.scheduler.running[engine.id_of(request)])


@pytest.mark.parametrize("num_waiting", [1, 2])
@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_forgetting_what_is_being_encoded(num_waiting: int, how: str, bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=16)
    waiting = [engine.add([live(5, 10 + number), *PIECES], max_tokens=2) for number in range(num_waiting)]
    engine.step()
    assert list(engine.engine.admission.encoding) == [engine.key(SECRET)]
    forget(engine.engine, Wanted(source="door.md"))
    assert engine.engine.admission.encoding[engine.key(SECRET)].entry.is_forgotten
    for request in waiting:
        leave(engine, request, how)
        engine.assert_sound()
    engine.run()
    assert all(how == "abort" or len(request.ids) == 2 for request in waiting)
    engine.assert_back_to_start()


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_forgetting_what_is_being_loaded(how: str, bench: Make, tmp_path: Path) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    first.ask(PIECES)
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = slowed(engine, tmp_path)
    waiting = engine.add(PIECES)
    engine.step()
    assert list(engine.engine.admission.jobs.loading) == [engine.key(SECRET)]
    forget(engine.engine, Wanted(source="door.md"))
    leave(engine, waiting, how)
    engine.assert_sound()
    slow.go.set()
    engine.run()
    engine.assert_back_to_start()
    engine.engine.close()


def test_forgetting_beside_a_step_that_runs_out_of_memory(bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=16)
    waiting = engine.add(PIECES, max_tokens=2)
    work = engine.engine.scheduler.schedule()
    assert work is not None and work.encodes
    forget(engine.engine, Wanted(source="door.md"))
    assert len(engine.engine.scheduler.abandon(work)) == 1
    engine.assert_sound()
    engine.run()
    assert len(waiting.ids) == 2
    engine.assert_back_to_start()

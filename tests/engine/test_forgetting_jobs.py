"""Texts that are forgotten, or whose time is over, while their entries are made, loaded, written or pinned."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hypic.engine import inspect
from hypic.engine.forget import forget
from hypic.engine.store.texts import Wanted
from tests.engine.answer import Answer
from tests.engine.harness import Bench
from tests.engine.prompts import live, seg
from tests.engine.tiers import Slow, always_load, disk_at, saved, slowed

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


# -- new names while it is written -----------------------------------------------------------------------------------


def written(engine: Bench, path: Path) -> Slow:
    """The entry of ``SECRET`` is being written, for as long as ``go`` is not set."""
    slow, writer = slowed(engine, path), engine.engine.tiers.writer
    engine.ask(PIECES)
    assert engine.engine.tend()
    until(lambda: writer._current == engine.key(SECRET))
    return slow


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def labels_in(slow: Slow, engine: Bench) -> set[str | None]:
    stored = slow.find(engine.key(SECRET))
    return set() if stored is None else {label.source for label in stored.labels}


def test_a_hit_on_what_is_being_written_leaves_the_write_alone(bench: Make, tmp_path: Path) -> None:
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = written(engine, tmp_path)
    began = time.monotonic()
    assert engine.ask(PIECES).outcomes == ["hit"]
    engine.store.demote_all()
    assert engine.ask(PIECES).outcomes == ["hit"]
    assert time.monotonic() - began < 15.0, "the disk takes 30 s"
    assert not engine.engine.tend(), "nothing is to be written anew"
    slow.go.set()
    saved(engine)
    assert slow.stats.stored == 1 and labels_in(slow, engine) == {"door.md"}
    engine.engine.close()


@pytest.mark.parametrize("evicts", [False, True])
def test_a_new_name_of_what_is_being_written_is_written_afterwards(evicts: bool, bench: Make, tmp_path: Path) -> None:
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = written(engine, tmp_path)
    began = time.monotonic()
    assert engine.ask([live(3, 2), seg(90, 1, source="gate.md"), live(4, 3)]).outcomes == ["hit"]
    assert engine.engine.tend() and time.monotonic() - began < 15.0
    slow.go.set()
    if evicts:
        engine.store.demote_all()
    saved(engine)
    assert slow.stats.stored == 2 and labels_in(slow, engine) == {"door.md", "gate.md"}
    engine.engine.close()


@pytest.mark.parametrize("tends", [False, True])
def test_a_time_that_came_while_it_was_written_holds(
    tends: bool, bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = written(engine, tmp_path)
    engine.ask([live(3, 2), seg(90, 1, ttl_s=1000), live(4, 3)])
    slow.go.set()
    assert engine.engine.tiers.writer.drain(20)
    assert slow.stats.num_entries == 1
    if tends:  # a look-up found that its time was over, and nobody came to remove it since
        engine.store.forget(engine.entry(SECRET))
        saved(engine)
    else:
        later(monkeypatch, 2000, "store.expiry", "engine")
        engine.engine.expire()
    assert slow.stats.num_entries == 0 and not list(tmp_path.glob("*/*.safetensors"))
    engine.engine.close()


# -- times to live ---------------------------------------------------------------------------------------------------


def later(patch: pytest.MonkeyPatch, seconds: float, *rooms: str) -> None:
    """What these modules take for the time."""
    clock = SimpleNamespace(time=lambda: time.time() + seconds, perf_counter=time.perf_counter)
    for room in rooms:
        patch.setattr(f"hypic.engine.{room}.time", clock)


def test_a_pinned_entry_whose_time_passes_in_the_middle_of_a_step(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench("qwen")
    engine.ask([live(3, 2), seg(40, 1, ttl_s=1000), live(4, 3)])
    assert inspect.pin(engine.engine, wanted=Wanted()) == 1
    with monkeypatch.context() as patch:
        later(patch, 2000, "store.expiry")
        assert engine.ask([live(3, 2), seg(40, 1), live(4, 3)]).outcomes == ["encoded"]
    later(monkeypatch, 2000, "store.expiry", "engine")
    engine.engine.expire()
    assert not engine.engine.kept and engine.num_segments == 1, "the new entry has no time"
    engine.assert_back_to_start()


@pytest.mark.parametrize("when", ["making", "made"])
def test_a_text_that_was_forgotten_and_comes_again_goes_in_its_own_time(
    when: str, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench("qwen", max_step_tokens=16)
    engine.ask([live(3, 2), seg(90, 1, ttl_s=1000), live(4, 3)])
    forget(engine.engine, Wanted())
    engine.add([live(3, 2), seg(90, 1, ttl_s=3000), live(4, 3)])
    engine.step() if when == "making" else engine.run()
    later(monkeypatch, 2000, "store.expiry", "engine")
    engine.run() if when == "making" else engine.engine.expire()
    assert engine.num_segments == 1
    later(monkeypatch, 4000, "store.expiry", "engine")
    engine.engine.expire()
    assert engine.store.stats.num_entries == 0
    engine.assert_back_to_start()

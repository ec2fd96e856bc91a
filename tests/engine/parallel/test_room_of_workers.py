"""Whole workers with little room: bursts stay within it, and who gives up or fails gives it back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hypic.engine import peers
from hypic.engine.parallel.liveness import Times
from hypic.engine.parallel.room import Room
from hypic.engine.parallel.wants import Patience
from hypic.engine.sizing import Need
from tests.engine.parallel.running import ENCODING, Running, cold_prompt, is_running, misbehaving, until

# A bit more than two of the entries that these tests ask for.
SMALL_BYTES = 700_000
# Longer than anybody is waited for here who is idle.
BUSY_S = 2.5

SETUP = replace(
    ENCODING, planner="round-robin", room_bytes=SMALL_BYTES, patience=Patience(least_s=2.0),
    times=Times(silence_s=4.0, hang_s=4.0, pause_s=0.05, longest_pause_s=0.2),
)  # fmt: skip


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def narrow(folder: Path, faults: Path) -> Iterator[Running]:
    """Two workers; for what comes there is hardly any room."""
    with misbehaving(folder, faults, SETUP) as engine:
        yield engine


def room_of(engine: Running) -> Room:
    return engine.workers.peers.room


def burst(engine: Running, alone: Running, seeds: Sequence[int]) -> int:
    """Many entries come, and the engine does not get to writing them for a while: the bytes that then wait for it."""
    until(lambda: engine.workers.peers.ready() == 1, 120)
    arrivals, counts, loop = engine.workers.peers._arrivals, engine.workers.peers.counts, engine.started.loop
    before, prompts = counts.came, [cold_prompt(seed, count=12) for seed in seeds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "write", lambda engine: None)
        ids = [engine.submit(prompt) for prompt in prompts]
        until(lambda: len(arrivals._waiting) > 0)
        time.sleep(BUSY_S)
        num_bytes = sum(len(arrived.made.data) for arrived in arrivals._waiting)
    loop.post(arrivals.write)
    assert [engine.answer(id)[0] for id in ids] == [alone.ask(prompt)[0] for prompt in prompts]
    until(lambda: room_of(engine).taken_bytes == 0)
    assert counts.came == before + 6 * len(prompts)
    return num_bytes


@contextmanager
def budget(engine: Running, num_bytes: int) -> Iterator[None]:
    room = room_of(engine)
    room.budget_bytes, room.most_bytes = num_bytes, 0
    try:
        yield
    finally:
        room.budget_bytes = SMALL_BYTES


def test_a_burst_takes_no_more_than_there_is_room_for(narrow: Running, alone: Running) -> None:
    """And whoever waits for room here is not taken for late. With more room more comes: it is the budget that binds."""
    peers = narrow.workers.peers
    with budget(narrow, SMALL_BYTES):
        assert 0 < burst(narrow, alone, (301, 302, 303)) <= room_of(narrow).most_bytes <= SMALL_BYTES
        assert peers.counts.fell_back == 0 and peers.view.peers[1].late < 2.0
    with budget(narrow, 100 * SMALL_BYTES):
        assert burst(narrow, alone, (304, 305, 306)) > 4 * SMALL_BYTES
    assert narrow.leaked() == Need()


def test_without_a_budget_one_comes_after_the_other(narrow: Running, alone: Running) -> None:
    with budget(narrow, 0):
        one = burst(narrow, alone, (307,))
        assert SMALL_BYTES / 4 < one <= room_of(narrow).most_bytes < SMALL_BYTES / 2
    assert narrow.workers.peers.counts.fell_back == 0 and narrow.leaked() == Need()


def test_what_is_given_up_while_it_waits_gives_back_its_room(narrow: Running) -> None:
    room, peers = room_of(narrow), narrow.workers.peers
    ids = [narrow.submit(cold_prompt(seed, count=12)) for seed in range(310, 316)]
    until(lambda: room.taken_bytes > 0)
    for id in ids:
        narrow.driver.abort(id)
    until(lambda: len(peers.wants) == 0 and room.taken_bytes == 0)
    assert narrow.leaked() == Need()
    assert len(narrow.ask(cold_prompt(316))[0]) == 8


@pytest.mark.parametrize("fault", ["kill-ready", "kill-called", "greedy", "ready-lost"])
def test_a_worker_fails_with_what_waits_for_room(narrow: Running, alone: Running, faults: Path, fault: str) -> None:
    """It dies, having said that it is ready or when it is called; it does not wait; or its word is lost."""
    until(lambda: narrow.workers.peers.ready() == 1, 120)
    room, before, counts = room_of(narrow), narrow.workers.supervisor.hellos[0], narrow.workers.peers.counts
    fell_back, prompt = counts.fell_back, cold_prompt(320 + len(fault), count=12)
    (faults / "1").write_text(fault)
    room.most_bytes, started = 0, time.monotonic()
    assert narrow.ask(prompt)[0] == alone.ask(prompt)[0] and time.monotonic() - started < 30
    assert not (faults / "1").exists() and counts.fell_back > fell_back
    assert room.taken_bytes == 0 and room.most_bytes <= SMALL_BYTES and len(narrow.workers.peers.wants) == 0
    assert narrow.leaked() == Need()
    if fault.startswith("kill"):
        until(lambda: not is_running(before.pid))
    until(lambda: narrow.workers.peers.ready() == 1, 120)
    assert narrow.ask(cold_prompt(340 + len(fault), count=12)) and room.taken_bytes == 0


def test_the_room_is_a_share_of_the_pool_or_of_what_a_gpu_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(device: str, num_bytes: int, free_bytes: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 2**40))
        return peers.room_of(SimpleNamespace(device=torch.device(device), num_bytes=num_bytes))  # type: ignore[arg-type]

    assert of("cpu", 2**20, 2**40) == of("cuda", 2**20, 0) == 2**28
    assert of("cpu", 2**36, 2**40) == of("cuda", 2**36, 2**30) == 2**31
    assert of("cuda", 2**36, 2**34) == 2**32

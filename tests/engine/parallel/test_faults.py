"""Whatever a worker does, requests are answered right, nothing leaks, no process is left, and the worker comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypic.engine.parallel import assign
from hypic.engine.parallel.liveness import Times
from hypic.engine.parallel.messages import Hello
from hypic.engine.parallel.wants import Patience
from hypic.engine.sizing import Need
from tests.engine.parallel.running import ENCODING, POLICY, Running, cold_prompt, is_running, misbehaving, until

KILLED = ["kill-want", "kill-step", "kill-settle", "kill-encoded", "kill-send", "kill-sent"]
DAMAGED = ["flip", "nan", "short", "generation", "key", "huge", "garbage"]
TIMES = Times(silence_s=4.0, hang_s=4.0, pause_s=0.05, longest_pause_s=0.2)
PATIENCE = Patience(factor=4.0, least_s=2.0)
# Whatever the machine is busy with, the worker is asked for its part.
SETUP = replace(ENCODING, times=TIMES, patience=PATIENCE, planner="round-robin")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def faulty(folder: Path, faults: Path) -> Iterator[Running]:
    with misbehaving(folder, faults, SETUP) as engine:
        yield engine


def usable(engine: Running) -> bool:
    return engine.workers.peers.ready() == 1


def renewed(engine: Running, before: Hello) -> Hello:
    """The next generation of a worker, once it may be used."""

    def later() -> list[Hello]:
        return [hello for hello in engine.workers.supervisor.hellos if hello.generation > before.generation]

    until(lambda: later() and usable(engine), 120)
    return later()[0]


def lost(engine: Running, silent: Hello) -> None:
    """A worker that says nothing more is ended within the bound, and comes again."""
    started = time.monotonic()
    until(lambda: not is_running(silent.pid), 60)
    assert time.monotonic() - started < max(TIMES.silence_s, TIMES.hang_s) + 2.0
    renewed(engine, silent)


def strike(engine: Running, alone: Running, faults: Path, fault: str, seed: int, **options: Any) -> float:
    """Seconds that the request took during which the fault struck; its answer was right."""
    until(lambda: usable(engine), 120)
    prompt = cold_prompt(seed)
    expected, _ = alone.ask(prompt, **options)
    file = faults / "1"
    file.write_text(fault)
    started = time.monotonic()
    found, _ = engine.ask(prompt, **options)
    seconds = time.monotonic() - started
    assert found == expected
    until(lambda: not file.exists(), 30)
    assert engine.leaked() == Need() and len(engine.workers.peers.wants) == 0
    return seconds


def killed(engine: Running, alone: Running, faults: Path, fault: str, seed: int) -> None:
    """The worker dies, the answer is right and not late, and another process takes its place."""
    until(lambda: usable(engine), 120)
    before = engine.workers.supervisor.hellos[0]
    assert strike(engine, alone, faults, fault, seed) < 30
    until(lambda: not is_running(before.pid))
    assert renewed(engine, before).pid != before.pid


@pytest.mark.parametrize("fault", KILLED)
def test_a_worker_is_killed_at_any_stage(faulty: Running, alone: Running, faults: Path, fault: str) -> None:
    killed(faulty, alone, faults, fault, 10 + KILLED.index(fault))


@pytest.mark.parametrize("fault", DAMAGED)
def test_what_comes_damaged_is_not_used(faulty: Running, alone: Running, faults: Path, fault: str) -> None:
    until(lambda: usable(faulty), 120)
    fell_back = faulty.workers.peers.counts.fell_back
    strike(faulty, alone, faults, fault, 40 + DAMAGED.index(fault))
    assert faulty.workers.peers.counts.fell_back > fell_back


def test_a_worker_dies_with_a_deterministic_request_s_segments(faulty: Running, alone: Running, faults: Path) -> None:
    until(lambda: usable(faulty), 120)
    before, counts = faulty.workers.supervisor.hellos[0], faulty.workers.peers.counts
    fell_back = counts.fell_back
    exact = replace(POLICY, deterministic=True)
    assert strike(faulty, alone, faults, "kill-step", 65, policy=exact) < 30 and counts.fell_back > fell_back
    renewed(faulty, before)


def test_a_lost_message_costs_a_deadline(faulty: Running, alone: Running, faults: Path) -> None:
    assert PATIENCE.least_s * 0.9 < strike(faulty, alone, faults, "lost", 60) < 30


@pytest.mark.parametrize("fault", ["stop", "hang-step"])
def test_a_worker_that_hangs_is_given_up_and_started_again(
    faulty: Running, alone: Running, faults: Path, fault: str
) -> None:
    until(lambda: usable(faulty), 120)
    before = faulty.workers.supervisor.hellos[0]
    strike(faulty, alone, faults, fault, 70 + len(fault))
    lost(faulty, before)


def test_a_slow_worker_is_waited_for(faulty: Running, alone: Running, faults: Path) -> None:
    """Each of its steps takes many times what it should, and longer than a silent worker would be waited for."""
    until(lambda: usable(faulty), 120)
    before, counts = faulty.workers.supervisor.hellos[0], faulty.workers.peers.counts
    came, fell_back, patience = counts.came, counts.fell_back, faulty.workers.peers.patience
    faulty.workers.peers.patience = Patience(factor=0.1, least_s=0.8, most_s=30.0)
    (faults / "1").write_text("slow")
    try:
        for seed in (91, 92):
            prompt = cold_prompt(seed)
            assert faulty.ask(prompt)[0] == alone.ask(prompt)[0]
    finally:
        (faults / "1").unlink()
        faulty.workers.peers.patience = patience
    assert counts.came >= came + 2 and counts.fell_back == fell_back
    assert faulty.workers.peers.view.peers[1].late > 1.0
    assert faulty.workers.supervisor.hellos == [before] and is_running(before.pid)


def test_what_a_slow_worker_has_not_begun_is_taken_back(
    faulty: Running, alone: Running, faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given everything, and taken to encode a segment at a time; what it sends all the same is not used."""
    until(lambda: usable(faulty), 120)
    peers = faulty.workers.peers
    peer, taken_back, fell_back = peers.view.peers[1], peers.counts.taken_back, peers.counts.fell_back
    monkeypatch.setitem(assign.PLANNERS, "longest-first", assign.elsewhere)
    monkeypatch.setattr(peer, "encode", replace(peer.encode, batch_tokens=50))
    (faults / "1").write_text("slow")
    try:
        with faulty.asked(routes=False, planner="longest-first"):
            prompt = cold_prompt(93)
            assert faulty.ask(prompt)[0] == alone.ask(prompt)[0]
    finally:
        (faults / "1").unlink()
    assert peers.counts.taken_back > taken_back and peers.counts.fell_back == fell_back
    assert faulty.leaked() == Need() and usable(faulty)


def test_a_worker_whose_heart_stops_is_started_again(faulty: Running, faults: Path) -> None:
    until(lambda: usable(faulty), 120)
    before = faulty.workers.supervisor.hellos[0]
    (faults / "1").write_text("silent")
    until(lambda: not (faults / "1").exists(), 30)
    lost(faulty, before)


def test_a_worker_that_computes_something_else_is_never_used(faulty: Running, alone: Running, faults: Path) -> None:
    """Its checksums are right and its entries are wrong: the known text shows it."""
    until(lambda: usable(faulty), 120)
    before = faulty.workers.supervisor.hellos[0]
    (faults / "1").write_text("other-weights")
    faulty.workers.supervisor.lose(before.rank, before.generation, "it is to start again")
    until(lambda: faulty.workers.peers.view.peers.get(1) and faulty.workers.peers.view.peers[1].state == "refused", 120)
    asked = faulty.workers.peers.counts.asked
    prompt = cold_prompt(80)
    assert faulty.ask(prompt)[0] == alone.ask(prompt)[0]
    assert faulty.workers.peers.counts.asked == asked
    refused = faulty.workers.supervisor.hellos[0]
    faulty.workers.supervisor.lose(refused.rank, refused.generation, "it is to start again")
    renewed(faulty, refused)


def test_a_worker_that_dies_while_it_starts_is_started_again(faulty: Running, faults: Path) -> None:
    until(lambda: usable(faulty), 120)
    before = faulty.workers.supervisor.hellos[0]
    (faults / "1").write_text("kill-start")
    faulty.workers.supervisor.lose(before.rank, before.generation, "it is to start again")
    assert renewed(faulty, before).generation >= before.generation + 2


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_kills(folder: Path, alone: Running, tmp_path: Path) -> None:
    with misbehaving(folder, tmp_path, SETUP) as engine:
        for number in range(100):
            killed(engine, alone, tmp_path, KILLED[number % len(KILLED)], 1000 + number)
        assert engine.workers.peers.counts.fell_back > 50
        pids = [hello.pid for hello in engine.workers.supervisor.hellos]
    assert not any(map(is_running, pids))

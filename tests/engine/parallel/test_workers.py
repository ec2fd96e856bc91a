"""Several workers give one worker's answers and entries; what they hold and leave behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hypic.engine.payload import difference
from hypic.engine.pool import Need
from tests.checkpoints import minimax, qwen
from tests.engine.harness import live, seg
from tests.engine.parallel.running import ENCODING, POLICY, Running, cold_prompt, config, is_running, running, until

MAKERS = {"qwen": qwen, "minimax": minimax}


CASES = [("qwen", 2, "gloo"), ("qwen", 2, "socket"), ("qwen", 4, "auto"), ("minimax", 2, "auto")]


def prompts() -> list[list]:
    shared = seg(80, 5)
    one = [live(40, 1), shared, *cold_prompt(1)[1:]]
    two = [live(3, 2), *cold_prompt(2, count=3)[1:-1], shared, live(4, 6)]
    return [one, two, cold_prompt(3, count=9, num_tokens=40)]


def answers(engine: Running) -> list[tuple[int, ...]]:
    ids = [engine.submit(prompt) for prompt in prompts()]
    return [engine.answer(id)[0] for id in ids]


@pytest.mark.parametrize(("name", "num_workers", "carrier"), CASES)
def test_workers_give_the_tokens_and_entries_of_one(tmp_path: Path, name: str, num_workers: int, carrier: str) -> None:
    folder = MAKERS[name](tmp_path / "model")
    with running(folder, 1) as alone:
        expected, entries = answers(alone), alone.images()
    with running(folder, num_workers, replace(ENCODING, carrier=carrier, planner="round-robin")) as engine:
        found, images = answers(engine), engine.images()
        counts = engine.workers.peers.counts
        assert counts.came >= 4 and counts.fell_back == 0
        pids = [hello.pid for hello in engine.workers.supervisor.hellos]
        again = answers(engine)
        assert engine.leaked() == Need()
    assert found == again == expected
    assert images.keys() == entries.keys()
    assert max(difference(images[key], entries[key]) for key in entries) < 1e-10
    assert len(pids) == num_workers - 1 and not any(map(is_running, pids))


def test_an_entry_that_a_peer_holds_is_fetched_and_reported_as_a_hit(tmp_path: Path) -> None:
    with running(qwen(tmp_path / "model"), 2) as engine:
        prompt = cold_prompt(1, count=8)
        expected, first = engine.ask(prompt)
        sent = engine.workers.peers.counts.came
        assert sent and {s.outcome for s in first.segments} == {"encoded"}
        assert sum("by worker 1" in s.reason for s in first.segments) == sent
        until(lambda: any(peer.held for peer in engine.workers.peers.view.peers.values()))
        engine.leaked()  # this worker forgets all
        found, second = engine.ask(prompt)
        fetched = engine.workers.peers.counts.fetched
        assert found == expected and fetched and second.num_hits == fetched
        assert second.computed_tokens < first.computed_tokens


def test_times_to_live_hold_on_both_workers(tmp_path: Path) -> None:
    """What a worker encodes for this one ends with the text's time, and what it holds is not used longer here."""
    with running(qwen(tmp_path / "model"), 2, replace(ENCODING, planner="round-robin")) as engine:
        prompt = cold_prompt(70)
        short = [replace(p, segment=p.segment and replace(p.segment, ttl_s=600.0)) for p in prompt]
        engine.ask(short)
        first = {key: image.expires_s for key, image in engine.images().items()}
        until(lambda: engine.workers.peers.num_held(1, [key.hex() for key in first]) == 3)
        engine.leaked()  # this worker forgets all
        assert engine.ask(prompt)[1].num_hits == engine.workers.peers.counts.fetched == 3
        second = [(key, image.expires_s) for key, image in engine.images().items() if image.expires_s is not None]
        assert len(second) == 3 and all(first[key] == expires_s for key, expires_s in second)


def test_a_client_that_goes_away_cancels_everywhere(tmp_path: Path) -> None:
    with running(qwen(tmp_path / "model"), 2) as engine:
        ids = [engine.submit(cold_prompt(seed, count=6, num_tokens=300)) for seed in range(1, 9)]
        until(lambda: engine.workers.peers.counts.asked)
        for id in ids:
            engine.driver.abort(id)
        until(lambda: len(engine.workers.peers.wants) == 0)
        assert engine.leaked() == Need()
        alone = engine.ask(cold_prompt(20))[0]
        assert len(alone) == 8 and engine.leaked() == Need()


def test_deterministic_requests_stay_at_home(tmp_path: Path) -> None:
    with running(qwen(tmp_path / "model"), 2) as engine:
        engine.ask(cold_prompt(1), policy=replace(POLICY, deterministic=True))
        assert engine.workers.peers.counts.asked == 0
        engine.ask(cold_prompt(1))
        assert engine.workers.peers.counts.asked > 0


def test_one_worker_starts_nothing(tmp_path: Path) -> None:
    with running(qwen(tmp_path / "model"), 1) as engine:
        assert engine.started.workers is None
        assert config(1).workers == 1 and len(engine.ask(cold_prompt(1))[0]) == 8

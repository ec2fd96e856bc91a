"""An engine whose entries live in several tiers: the same answers, bit-equal entries, whatever was evicted, restarted,
damaged or slow."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.engine.plan import Piece
from hypic.engine.store import image
from hypic.engine.store.disk import DiskTier
from tests.engine.harness import POLICY, TOLERANCE, Bench, Checkpoints, few_segments, live, many_segments, relative, seg

Make = Callable[..., Bench]
MODELS = ["qwen", "minimax", "minimax-partial"]
SEGMENT = seg(40, 1)


def disk_at(path: Path, size: str = "64MiB") -> str:
    return f"disk://{path}?size={size}"


def always_load(engine: Bench) -> Bench:
    """On tiny models encoding is mostly cheaper; these tests are of what is loaded."""
    engine.engine.tiers.costs.encode.see = lambda units, seconds: None  # type: ignore[method-assign]
    engine.engine.tiers.costs.encode.unit_s = 1e3
    return engine


def saved(engine: Bench) -> Bench:
    while engine.engine.tend():
        pass
    assert engine.engine.tiers.writer.drain(30.0)
    return engine


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def tiers_of(answer: Any) -> list[str | None]:
    return [segment.tier for segment in answer.report.segments if segment.outcome == "hit"]


# -- every tier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_an_entry_is_bit_equal_in_every_tier(name: str, dtype: str, bench: Make, tmp_path: Path) -> None:
    pieces = [live(3, 2), SEGMENT, live(4, 3)]
    engine = always_load(bench(name, dtype, store=f"host://64MiB,{disk_at(tmp_path)}"))
    cold = engine.ask(pieces, max_tokens=3)
    made = engine.contents(SEGMENT)
    evicted(engine)
    from_host = engine.ask(pieces, max_tokens=3)
    assert same_bits(engine.contents(SEGMENT), made) and tiers_of(from_host) == ["host"]
    saved(engine).engine.close()
    again = always_load(bench(name, dtype, store=disk_at(tmp_path)))
    from_disk = again.ask(pieces, max_tokens=3)
    assert same_bits(again.contents(SEGMENT), made) and tiers_of(from_disk) == ["disk"]
    for warm in (from_host, from_disk):
        assert warm.ids == cold.ids and warm.report.computed_tokens == 3 + 8 + 4
        assert relative(warm.rows(sorted(warm.logits)[-3:]), cold.rows(sorted(cold.logits)[-3:])) < TOLERANCE[dtype]
    again.assert_back_to_start()
    again.engine.close()


def evicted(engine: Bench) -> None:
    """As when memory is short: everything idle goes the way of an eviction."""
    engine.store.demote_all()
    assert engine.store.stats.num_entries == 0


@pytest.mark.parametrize("store", ["host", "disk", "both"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same_from_every_tier(
    name: str, store: str, bench: Make, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    spec = {"host": "host://64MiB", "disk": disk_at(tmp_path), "both": f"host://64MiB,{disk_at(tmp_path)}"}[store]
    engine = always_load(bench(name, store=spec))
    for pieces in (many_segments(), few_segments()):
        expected = checkpoints.expected(name, pieces)
        for _ in range(3):
            answer = engine.ask(pieces, POLICY.with_(reuse="segments"))
            assert answer.error_where_run(expected) < TOLERANCE["float64"]
            saved(engine)
            evicted(engine)
        assert "hit" in answer.outcomes and "encoded" not in answer.outcomes
        assert set(tiers_of(answer)) == {"host" if store != "disk" else "disk"}
    engine.assert_back_to_start()
    engine.engine.close()


def test_tiers_bite(bench: Make, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed entry that is not quite the one that was kept shows."""
    pieces, sound = [live(3, 2), SEGMENT, live(4, 3)], image.install
    for part in ("states", "tails", "transitions", "keys", "values"):
        engine = always_load(bench("qwen", store="host://64MiB"))
        engine.ask(pieces)
        evicted(engine)

        def faulty(pool: Any, found: Any, entry: Any, part: str = part) -> None:
            sound(pool, found, entry)
            slots = {"states": entry.state_slot, "tails": entry.state_slot, "transitions": entry.transition_slot}
            for tensor in getattr(pool, part):
                tensor[slots.get(part, torch.from_numpy(entry.kv_slots))] *= 0.9

        monkeypatch.setattr(image, "install", faulty)
        answer = engine.ask(pieces)
        monkeypatch.setattr(image, "install", sound)
        assert answer.error_where_run(checkpoints.expected("qwen", pieces)) > 100 * TOLERANCE["float64"], part
        engine.engine.close()


def test_another_identity_never_hits(bench: Make, tmp_path: Path) -> None:
    first = always_load(bench("qwen", store=disk_at(tmp_path)))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    tenant = Piece(SEGMENT.ids, seg(40, 1, namespace="tenant").segment)
    others = [
        (bench("qwen", store=disk_at(tmp_path)), tenant, POLICY),
        (bench("qwen", store=disk_at(tmp_path)), SEGMENT, POLICY.with_(seam=4)),
        (bench("qwen", store=disk_at(tmp_path)), SEGMENT, POLICY.with_(deterministic=True)),
        (bench("qwen", "float32", store=disk_at(tmp_path)), SEGMENT, POLICY),
        (bench("minimax", store=disk_at(tmp_path)), SEGMENT, POLICY),
    ]
    for engine, piece, policy in others:
        answer = always_load(engine).ask([live(3, 2), piece, live(4, 3)], policy)
        assert answer.outcomes == ["encoded"]
        engine.engine.close()
    same = always_load(bench("qwen", store=disk_at(tmp_path)))
    assert same.ask([live(9, 5), SEGMENT, live(4, 3)]).outcomes == ["hit"]
    same.engine.close()


# -- promoting and demoting ------------------------------------------------------------------------------------------


def test_a_hit_promotes_and_an_eviction_demotes(bench: Make, tmp_path: Path) -> None:
    first = always_load(bench("qwen", store=disk_at(tmp_path)))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=f"host://64MiB,{disk_at(tmp_path)}"))
    key, (host, disk) = engine.key(SEGMENT), engine.engine.tiers.tiers
    assert key in disk and key not in host and key not in engine.store
    engine.ask([live(3, 2), SEGMENT, live(4, 3)])
    assert key in disk and key in host and key in engine.store
    host.remove(key)
    evicted(engine)
    assert key in host and key not in engine.store, "demoted, though it is on disk: the host is faster"
    assert disk.stats.stored == 0, "nothing is written twice"
    engine.engine.close()


def test_what_falls_out_of_the_host_tier_is_written(bench: Make, tmp_path: Path) -> None:
    engine = always_load(bench("qwen", store=f"host://150KB,{disk_at(tmp_path)}"))
    for number in range(6):
        engine.ask([live(3, 2), seg(40, number), live(4, 3)])
        evicted(engine)
    host, disk = engine.engine.tiers.tiers
    assert engine.engine.tiers.writer.drain(30.0)
    assert host.stats.evictions > 0 and host.stats.held_bytes <= 150_000
    assert all(engine.key(seg(40, number)) in disk for number in range(6))
    engine.engine.close()


def test_new_entries_are_saved_when_there_is_time_and_when_closing(bench: Make, tmp_path: Path) -> None:
    engine = bench("qwen", store=disk_at(tmp_path))
    engine.ask(few_segments())
    disk = engine.engine.tiers.tiers[0]
    assert disk.stats.num_entries == 0, "a request waits for no write"
    assert engine.engine.tend() and engine.engine.tiers.writer.drain(30.0) and disk.stats.num_entries == 1
    engine.engine.close()
    assert DiskTier(tmp_path, 2**26, engine.engine.runner.identity).stats.num_entries == 3


class Slow(DiskTier):
    """A disk that takes its time until ``go`` is set."""

    def __init__(self, *args: Any) -> None:
        self.go = threading.Event()
        super().__init__(*args)

    def put(self, key: bytes, buffer: Tensor) -> bool:
        self.go.wait(30.0)
        return super().put(key, buffer)

    def get(self, key: bytes) -> Tensor | None:
        self.go.wait(30.0)
        return super().get(key)


def slowed(engine: Bench, path: Path) -> Slow:
    slow = Slow(path, 2**26, engine.engine.runner.identity)
    engine.engine.tiers.tiers = (slow,)
    return slow


def test_a_full_queue_of_writes_drops_and_never_blocks(bench: Make, tmp_path: Path) -> None:
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow, writer = slowed(engine, tmp_path), engine.engine.tiers.writer
    writer.max_bytes = 300_000
    began = time.monotonic()
    for number in range(8):
        engine.ask([live(3, 2), seg(40, number), live(4, 3)])
        evicted(engine)
    assert time.monotonic() - began < 25.0 and writer.num_dropped > 0
    assert sum(len(buffer) for _, buffer in writer.waiting()) <= writer.max_bytes
    slow.go.set()
    assert writer.drain(30.0) and 0 < slow.stats.num_entries < 8
    engine.engine.close()


def test_what_waits_to_be_written_is_a_hit(bench: Make, tmp_path: Path) -> None:
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = slowed(engine, tmp_path)
    made = engine.ask([live(3, 2), SEGMENT, live(4, 3)])
    evicted(engine)
    again = engine.ask([live(3, 2), SEGMENT, live(4, 3)])
    assert again.outcomes == ["hit"] and again.ids == made.ids and slow.stats.num_entries == 0
    slow.go.set()
    engine.engine.close()


# -- loading beside computing ----------------------------------------------------------------------------------------


def test_others_run_while_a_request_waits_for_its_entries(
    bench: Make, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    pieces = [live(30, 2), SEGMENT, seg(50, 7), live(4, 3)]
    first.ask(pieces)
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = slowed(engine, tmp_path)
    waiting = engine.add(pieces, max_tokens=2)
    beside = engine.add([live(5, 8), seg(30, 9), live(5, 10)], max_tokens=4)
    while not beside.is_over:
        engine.step()
        engine.assert_sound()
    assert not waiting.is_over and waiting.runs == [30 + 8], "its own rows run as far as they can"
    slow.go.set()
    engine.run()
    expected = checkpoints.expected("qwen", pieces, generated=waiting.ids[:-1])
    assert waiting.error_to(expected) < TOLERANCE["float64"] and tiers_of(waiting) == ["disk", "disk"]
    engine.assert_back_to_start()
    engine.engine.close()


def test_entries_are_fetched_while_a_request_waits_for_its_turn(bench: Make, tmp_path: Path) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=f"host://64MiB,{disk_at(tmp_path)}", max_running=1))
    engine.add([live(3, 5), live(4, 6)], max_tokens=200)
    engine.step()
    engine.add([live(3, 2), SEGMENT, live(4, 3)])
    engine.step()
    deadline = time.monotonic() + 20.0
    host = engine.engine.tiers.tiers[0]
    while engine.key(SEGMENT) not in host and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.key(SEGMENT) in host and len(engine.engine.scheduler.waiting) == 1
    engine.run()
    engine.engine.close()


@pytest.mark.parametrize("stage", ["reading", "read"])
def test_abort_while_loading(stage: str, bench: Make, tmp_path: Path) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    slow = slowed(engine, tmp_path)
    doomed = engine.add([live(3, 2), SEGMENT, live(4, 3)])
    beside = engine.add([live(5, 2), SEGMENT, live(4, 3)]) if stage == "reading" else None
    engine.step()
    if stage == "read":
        slow.go.set()
        engine.engine.tiers.reader.wait(20.0)
    engine.abort(doomed)
    engine.assert_sound()
    slow.go.set()
    engine.run()
    assert beside is None or tiers_of(beside) == ["disk"]
    engine.assert_back_to_start()
    engine.engine.close()


def test_a_deterministic_request_has_the_same_bits_from_every_tier(bench: Make, tmp_path: Path) -> None:
    policy, pieces = POLICY.with_(deterministic=True), few_segments()
    engine = always_load(bench("qwen", "float32", store=f"host://64MiB,{disk_at(tmp_path)}"))
    cold = engine.ask(pieces, policy)
    evicted(engine)
    host = engine.ask(pieces, policy)
    saved(engine).engine.close()
    again = always_load(bench("qwen", "float32", store=disk_at(tmp_path)))
    disk = again.ask(pieces, policy)
    assert set(tiers_of(host)) == {"host"} and set(tiers_of(disk)) == {"disk"}
    assert torch.equal(cold.rows(), host.rows()) and torch.equal(cold.rows(), disk.rows())
    again.engine.close()


@pytest.mark.parametrize("deterministic", [True, False])
def test_only_a_deterministic_request_passes_over_what_another_path_computed(
    deterministic: bool, bench: Make, tmp_path: Path
) -> None:
    policy, pieces = POLICY.with_(deterministic=deterministic), few_segments()
    for kernels, outcome in (("on", "encoded"), ("off", "encoded" if deterministic else "hit")):
        engine = always_load(bench("qwen", "float32", store=disk_at(tmp_path), kernels=kernels))
        assert set(engine.ask(pieces, policy).outcomes) == {outcome}
        saved(engine).engine.close()
    for kernels in ("on", "off"):
        again = always_load(bench("qwen", "float32", store=disk_at(tmp_path), kernels=kernels))
        assert set(again.ask(pieces, policy).outcomes) == {"hit"}
        again.engine.close()


# -- load or encode --------------------------------------------------------------------------------------------------


def test_what_is_slower_to_load_is_encoded_and_says_so(bench: Make, tmp_path: Path) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    engine = bench("qwen", store=disk_at(tmp_path))
    costs = engine.engine.tiers.costs
    costs.encode.unit_s, costs.install.unit_s, costs.reads["disk"].unit_s = 0.005 / 40, 0.0, 0.024 / 114_688
    stored = engine.engine.tiers.find(engine.key(SEGMENT))
    assert stored is not None
    costs.reads["disk"].unit_s = 0.024 / stored[1].num_bytes
    slowed(engine, tmp_path)
    answer = engine.ask([live(3, 2), SEGMENT, live(4, 3)])
    assert answer.outcomes == ["encoded"]
    assert answer.reasons == ["cheaper to encode: disk 24 ms > encode 5 ms"]
    engine.engine.tiers.tiers[0].go.set()  # type: ignore[attr-defined]
    engine.engine.close()


def test_speeds_are_measured_at_the_start_and_kept_up(bench: Make, tmp_path: Path) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    engine = bench("qwen", store=f"host://64MiB,{disk_at(tmp_path)}")
    costs = engine.engine.tiers.costs
    assert costs.install.unit_s and costs.encode.unit_s and costs.reads["disk"].unit_s
    before = costs.encode.unit_s
    engine.ask([live(3, 2), seg(90, 4), live(4, 3)])
    assert costs.encode.unit_s != before
    engine.engine.close()


# -- faults ----------------------------------------------------------------------------------------------------------


def damaged(path: Path) -> None:
    for file in path.glob("*/*.safetensors"):
        with suppress(FileNotFoundError):  # evicted meanwhile
            data = bytearray(file.read_bytes())
            data[-7] ^= 1
            file.write_bytes(data)


def test_corrupt_entries_are_encoded_anew(
    bench: Make, checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    pieces = [live(3, 2), SEGMENT, live(4, 3)]
    first.ask(pieces)
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))
    damaged(tmp_path)
    engine.engine.tiers.tiers[0]._verified.clear()  # type: ignore[attr-defined]
    answer = engine.ask(pieces, max_tokens=3)
    expected = checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])
    assert answer.error_to(expected) < TOLERANCE["float64"]
    assert answer.outcomes == ["encoded"] and answer.reasons == ["corrupt or gone"]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    saved(engine)
    evicted(engine)
    assert tiers_of(engine.ask(pieces)) == ["disk"], "what was encoded anew was kept again"
    engine.assert_back_to_start()
    engine.engine.close()


def test_a_tier_that_raises_is_a_miss(bench: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = bench("qwen", store=disk_at(tmp_path))
    first.ask([live(3, 2), SEGMENT, live(4, 3)])
    saved(first).engine.close()
    engine = always_load(bench("qwen", store=disk_at(tmp_path)))

    class Broken(DiskTier):
        def get(self, key: bytes) -> Tensor | None:
            raise ValueError("a bug in a tier")

        put = get  # type: ignore[assignment]

    engine.engine.tiers.tiers = (Broken(tmp_path, 2**26, engine.engine.runner.identity),)  # type: ignore[assignment]
    assert len(engine.ask([live(3, 2), SEGMENT, live(4, 3)]).ids) == 1
    saved(engine)
    assert "could not be read" in caplog.text
    engine.assert_back_to_start()
    engine.engine.close()


@pytest.mark.parametrize("store", ["device", "host", "disk"])
def test_a_budget_that_can_hold_nothing_is_warned_of(
    store: str, bench: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = {"device": None, "host": "host://10KB", "disk": disk_at(tmp_path, "10KB")}[store]
    engine = bench("qwen", store=spec, store_bytes=10_000 if store == "device" else None)
    layout = engine.pool.layout
    least = layout.state_bytes + layout.transition_bytes + engine.pool.page_bytes
    assert f"the {store} tier of 10000 bytes can hold nothing" in caplog.text and f"takes {least} bytes" in caplog.text
    for _ in range(2):
        assert engine.ask([live(3, 2), SEGMENT, live(4, 3)]).outcomes
        evicted(engine) if store != "device" else None
    assert all(tier.stats.num_entries == 0 for tier in engine.engine.tiers.tiers)
    engine.engine.close()


# -- stress ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_random_requests_on_small_tiers(seed: int, bench: Make, tmp_path: Path) -> None:
    """Entries come and go between three tiers that are all too small; every answer is that of a roomy engine."""
    rng = random.Random(seed)
    spec = f"host://300KB,{disk_at(tmp_path, '700KB')}"
    engine = bench("qwen", store=spec, sizes=(90, 9, 4), max_running=6, max_step_tokens=64)
    asked, roomy = [], bench("qwen")
    for _ in range(150):
        engine.engine.tiers.costs.encode.unit_s = rng.choice([0.0, 1e3])
        if rng.random() < 0.4:
            segments = [seg(rng.choice([12, 33]), rng.randrange(8)) for _ in range(rng.choice([0, 1, 3, 8]))]
            pieces = [live(rng.randint(1, 9), rng.randrange(3), ends=True), *segments, live(rng.randint(1, 8), 5)]
            asked.append((pieces, engine.add(pieces, max_tokens=3)))
        if asked and rng.random() < 0.05:
            engine.abort(rng.choice(asked)[1])
        if rng.random() < 0.1:
            engine.engine.tend()
        if rng.random() < 0.03:
            damaged(tmp_path)
        engine.step()
        engine.assert_sound()
        for tier in engine.engine.tiers.tiers:
            assert tier.stats.held_bytes <= tier.budget_bytes
    engine.run()
    finished = [(pieces, answer) for pieces, answer in asked if answer.pieces and answer.pieces[-1].finish_reason]
    assert len(finished) > 20
    for pieces, answer in finished[-25:]:
        assert answer.ids == roomy.ask(pieces, max_tokens=3).ids
    engine.assert_back_to_start()
    engine.engine.close()

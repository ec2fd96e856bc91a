"""An engine whose entries live in several tiers: the same answers, bit-equal entries, whatever was evicted, restarted,
damaged or slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.engine.plan import Piece
from hypic.engine.store import image
from hypic.engine.store.disk import DiskTier
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.prompts import POLICY, few_segments, live, many_segments, seg
from tests.engine.tiers import MODELS, SEGMENT, Make, always_load, disk_at, evicted, same_bits, saved, slowed, tiers_of

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

"""Tiers that are slow, damaged, refuse or can hold nothing, and random requests on small ones."""

from __future__ import annotations

import logging
import random
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor

from hypic.engine.store.disk import DiskTier
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.prompts import live, seg
from tests.engine.tiers import SEGMENT, Make, always_load, disk_at, evicted, saved, slowed, tiers_of

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

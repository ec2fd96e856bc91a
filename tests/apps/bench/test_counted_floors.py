"""Floors of time and memory are those that were counted by hand from the modules of a model."""

from __future__ import annotations

import pytest
import torch

from hypic.engine import models
from hypic.types import Policy
from hypic_apps.bench import floors
from hypic_apps.bench.floors import Counts, Limits, load_of
from hypic_apps.bench.geometries import known
from hypic_apps.bench.prompts import Shape

H200 = Limits(773e12, 4.2e12)


def counted(name: str) -> Counts:
    with torch.device("meta"):
        model = models.build(known()[name])
    return Counts.of(model.to(torch.bfloat16))


def test_floors_of_the_large_geometry_are_those_that_were_counted_by_hand() -> None:
    """4.9 GFLOP a token, 70 GB of weights, 60 MiB of transitions; 175 ms for full recompute and about 18 ms warm."""
    counts, shape = counted("qwen3.5-35b-a3b"), Shape(16, 1024, 128)
    assert 2 * counts.active_weights / 1e9 == pytest.approx(4.9, abs=0.1)
    assert counts.weight_bytes(10_000) / 1e9 == pytest.approx(70, rel=0.03)
    assert counts.layout.transition_bytes == 60 * 2**20 and counts.layout.token_bytes == 20 * 2**10
    full, warm = (load_of(arm, shape, Policy(), counts.layout).seconds(counts, H200) for arm in ("full", "warm"))
    assert full == pytest.approx(0.175, rel=0.02) and warm == pytest.approx(0.018, rel=0.06)


def test_floors_by_room_of_the_large_geometry() -> None:
    """Warm, the experts' bytes are most of all; recomputed, none is bound by bytes; together no less than the whole."""
    counts, shape = counted("qwen3.5-35b-a3b"), Shape(16, 1024, 128)
    loads = {arm: load_of(arm, shape, Policy(), counts.layout) for arm in ("full", "warm")}
    full, warm = (loads[arm].by_room(counts, H200) for arm in ("full", "warm"))
    assert warm["experts"] == pytest.approx(0.0154, rel=0.03) and max(warm, key=lambda room: warm[room]) == "experts"
    for arm, rooms in (("full", full), ("warm", warm)):
        assert sum(rooms.values()) >= loads[arm].seconds(counts, H200) * 0.999, arm
    assert full["linear: lift with scan"] == pytest.approx(0.042, rel=0.05)
    assert sum(full.values()) == pytest.approx(loads["full"].seconds(counts, H200), rel=0.01)
    dense = counted("qwen3.5-4b")
    assert dense.routed_weights == 0 == load_of("warm", shape, Policy(), dense.layout).by_room(dense, H200)["experts"]
    assert "by room experts 15." in floors.rooms_text(loads["warm"], counts, H200)


def test_few_tokens_read_few_experts() -> None:
    counts = counted("qwen3.5-35b-a3b")
    assert counts.weight_bytes(0) == counts.dense_bytes
    one = counts.weight_bytes(1) - counts.dense_bytes
    assert one == pytest.approx(counts.expert_bytes * 8 / 256)


@pytest.mark.parametrize("name", list(known()))
def test_every_geometry_is_built_and_segments_can_gain(name: str) -> None:
    counts = counted(name)
    full, cold, warm = (
        load_of(arm, Shape(16, 1024, 128), Policy(), counts.layout).seconds(counts, H200)
        for arm in ("full", "cold", "warm")
    )
    assert warm < cold < full

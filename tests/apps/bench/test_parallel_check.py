"""What ``hypic bench parallel`` calls right: rounding passes, and what a worker or a combiner does wrong does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.config import EngineConfig
from hypic.engine import arrivals
from hypic.engine.pool import Pool
from hypic.engine.segment import CachedSegment
from hypic.types import TokenLogprob
from hypic_apps.bench.geometries import known
from hypic_apps.bench.parallel import Rig, Said, rig
from hypic_apps.bench.parallel_check import apart, check, margin, parting
from tests.checkpoints import qwen


def started(folder: Path, dtype: str, **changes: str) -> Any:
    settings = {"device": "cpu", "dtype": dtype, "memory": "64MiB", "max_context": 2048, "max_running": 4, "threads": 1}
    return rig(folder, EngineConfig.of(**{**settings, **changes}, workers=2), 32, "auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("checked") / "model")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Rig]:
    with started(folder, "float32") as found:
        yield found


def test_two_workers_are_right(two: Rig) -> None:
    found = check(two, 2, 64)
    assert found["is_right"] and found["is_sharp"] and found["failed"] == []
    assert found["same_logprobs"] and found["is_repeatable"] and found["equal_entries"] == 8
    exact, fast = found["deterministic"], found["fast"]
    assert exact["same_logprobs"] and exact["is_repeatable"] and exact["entries_sent"] == 8
    assert fast["same_tokens"] and fast["parts_at"] is None and fast["entries_sent"] > 0
    assert min(fast["control_nats"].values()) > 100 * fast["differs_by_nats"]


Maps = list[list[torch.Tensor]]


def map_of(pool: Pool, entry: CachedSegment) -> list[torch.Tensor]:
    states = [tensor[entry.state_slot] for tensor in (*pool.states, *pool.tails)]
    return states + [tensor[entry.transition_slot] for tensor in pool.transitions]


def previous(pool: Pool, entry: CachedSegment, seen: Maps) -> None:
    """Each linear layer's map is that of another segment: a wrong history."""
    seen.append([tensor.clone() for tensor in map_of(pool, entry)])
    for tensor, other in zip(map_of(pool, entry), seen[max(0, len(seen) - 2)], strict=True):
        tensor.copy_(other)


def shifted(pool: Pool, entry: CachedSegment, seen: Maps) -> None:
    """Keys stand one position too late."""
    for keys in pool.keys:
        keys[entry.kv_slots] = keys[entry.kv_slots].roll(1, 0)


def without_tail(pool: Pool, entry: CachedSegment, seen: Maps) -> None:
    """The seam behind the segment sees nothing of its last tokens."""
    for tails in pool.tails:
        tails[entry.state_slot] = 0.0


@pytest.mark.parametrize("fault", [previous, shifted, without_tail])
def test_a_fault_of_what_comes_is_seen_by_every_comparison(
    two: Rig, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Pool, CachedSegment, Maps], None]
) -> None:
    sound, seen = arrivals.write, Maps()

    def write(pool: Pool, found: Any, wanted: Sequence[tuple[int, CachedSegment]]) -> None:
        sound(pool, found, wanted)
        for _, entry in wanted:
            fault(pool, entry, seen)

    monkeypatch.setattr(arrivals, "write", write)
    found = check(two, 2, 64)
    assert not found["is_right"] and {"entries", "deterministic", "fast"} <= set(found["failed"])
    assert not found["deterministic"]["same_logprobs"] and found["deterministic"]["is_repeatable"]
    assert found["fast"]["differs_by_nats"] > 3 * found["allowed_nats"]


def test_an_answer_that_only_several_workers_give_is_seen_though_all_entries_are_right(
    two: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Rig.ask

    def ask(self: Rig, documents: Sequence[Any], *args: Any, **changes: Any) -> Any:
        is_wrong = self.workers is not None and self.workers.peers.placing.only == frozenset({1})
        return sound(self, [*documents[1:], documents[0]] if is_wrong else documents, *args, **changes)

    monkeypatch.setattr(Rig, "ask", ask)
    found = check(two, 2, 64)
    assert found["equal_entries"] == 8 and found["entries_differ_by"] == 0.0
    assert found["failed"] == ["fixed steps", "deterministic", "fast"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_what_one_worker_changes_by_other_steps_is_rounding(tmp_path: Path, dtype: str) -> None:
    """Experts make much of little: a token on the border goes to others. In float64 nothing of it is left."""
    config = {
        **known()["qwen3.5-35b-a3b"],
        **{"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 32_000},
        **{f"linear_{name}": 4 for name in ("num_key_heads", "num_value_heads")},
        **{f"linear_{name}": 64 for name in ("key_head_dim", "value_head_dim")},
        **{f"{name}_intermediate_size": 64 for name in ("moe", "shared_expert")},
        **{"num_experts": 16, "num_experts_per_tok": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with started(tmp_path, dtype, load_format="dummy", memory="256MiB") as found:
        checked = check(found, 2, 128)
    fast = checked["fast"]
    assert checked["is_right"] and checked["deterministic"]["same_logprobs"] and fast["entries_sent"] == 4
    if dtype == "float64":
        assert fast["same_tokens"] and max(fast["differs_by_nats"], fast["rounding_nats"]) < 1e-9
    else:
        assert min(fast["differs_by_nats"], fast["rounding_nats"]) > 1e-3


def said(*likeliest: dict[int, float]) -> Said:
    chosen = [max(top, key=lambda id: top[id]) for top in likeliest]
    places = zip(chosen, likeliest, strict=True)
    return Said(tuple(chosen), tuple(TokenLogprob(id, top[id], tuple(top.items())) for id, top in places))


def test_answers_are_compared_up_to_where_they_part() -> None:
    one = said({1: -0.5, 2: -0.6}, {3: -0.1, 4: -2.0}, {5: -0.1, 6: -0.2})
    other = said({1: -0.5, 2: -0.6}, {3: -1.6, 4: -1.5}, {7: -9.0, 8: -9.5})
    assert parting(one, other) == 1 and parting(one, one) is None
    assert apart(one, one) == 0.0 and apart(one, other) == pytest.approx(1.5)
    assert margin(one, other) == pytest.approx(0.1) and margin(one, one) is None
    assert apart(said({1: -1.0, 2: -2.0, 3: -3.0}), said({4: -1.0, 5: -2.0, 3: -3.0})) == math.inf

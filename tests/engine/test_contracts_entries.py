"""Contracts 3 and 4: an entry depends on its tokens alone, and segments may stand in any order and place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations

import pytest
import torch
from torch import Tensor

from hypic.engine import scheduler
from hypic.engine.encode import Encode
from hypic.types import Policy
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.faults import FAULTS, cases
from tests.engine.harness import Bench
from tests.engine.prompts import live, seg
from tests.reference import LinearEntry

Make = Callable[..., Bench]
DTYPES = list(TOLERANCE)
MODELS = ["qwen", "minimax", "minimax-partial"]
LENGTHS = [9, 10, 11, 64, 65, 150]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and found
    return max(relative(found[name], expected[name]) for name in found)


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys() and found
    return all(torch.equal(found[name], expected[name]) for name in found)


def encoded_in(engine: Bench, neighbours: list[int], target: int = 40, seed: int = 1) -> dict[str, Tensor]:
    """The entry of one segment, cold together with others of the same lengths but contents ``neighbours``."""
    segment = seg(target, seed)
    beside = [seg(25, neighbours[0]), segment, seg(33, neighbours[1])]
    answers = [engine.add([live(4, neighbours[2]), *beside, live(6, neighbours[3])])]
    answers.append(engine.add([live(17, neighbours[1]), seg(50, neighbours[2]), live(5, neighbours[0])]))
    engine.run()
    assert all(answer.error is None for answer in answers)
    return engine.contents(segment)


# -- contract 3 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_entries_hold_what_the_reference_keeps(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench(name, dtype)
    segments = [seg(length, length) for length in LENGTHS]
    engine.ask([live(13, 1), *segments, live(5, 2)])
    for segment in segments:
        assert worst(_full(engine.contents(segment)), _kept(checkpoints, name, segment.ids)) < TOLERANCE[dtype]


def _kept(checkpoints: Checkpoints, name: str, ids: tuple[int, ...], start: int = 8) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    counts = {"linear": 0, "attention": 0}
    for entry in checkpoints.reference(name).encode(ids, start).layers:
        kind = "linear" if isinstance(entry, LinearEntry) else "attention"
        layer, counts[kind] = counts[kind], counts[kind] + 1
        if isinstance(entry, LinearEntry):
            found = {"T": entry.transition, "B": entry.end_state, "tail": entry.conv_tail}
        else:
            found = {"K": entry.keys, "V": entry.values}
        kept |= {f"{label}{layer}": tensor for label, tensor in found.items() if tensor.numel()}
    return kept


def _full(contents: dict[str, Tensor]) -> dict[str, Tensor]:
    """One number a head written out as a matrix."""

    def written_out(name: str, tensor: Tensor, key_dim: int) -> Tensor:
        return tensor[:, None, None] * torch.eye(key_dim, dtype=tensor.dtype) if tensor.ndim == 1 else tensor

    key_dims = {name[1:]: tensor.shape[1] for name, tensor in contents.items() if name.startswith("B")}
    return {
        name: written_out(name, tensor, key_dims[name[1:]]) if name.startswith("T") else tensor
        for name, tensor in contents.items()
    }


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("name", MODELS)
def test_entries_bite(
    name: str, shift: int, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[f"seam{shift:+}"](monkeypatch)
    for dtype in DTYPES:
        engine = bench(name, dtype)
        engine.ask([seg(64, 1), live(3, 2)])
        found, kept = _full(engine.contents(seg(64, 1))), _kept(checkpoints, name, seg(64, 1).ids)
        assert worst(found, kept) > 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_contents_leave_no_bit_in_an_entry(dtype: str, bench: Make) -> None:
    entries = [encoded_in(bench("qwen", dtype), neighbours) for neighbours in ([5, 6, 7, 8], [15, 16, 17, 18])]
    assert same_bits(*entries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["minimax", "minimax-partial"])
def test_neighbours_contents_leave_rounding_behind_experts(name: str, dtype: str, bench: Make) -> None:
    entries = [encoded_in(bench(name, dtype), neighbours) for neighbours in ([5, 6, 7, 8], [15, 16, 17, 18])]
    assert worst(*entries) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_neighbours_bite(name: str, bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encode that begins where another segment ended, not from nothing."""
    sound, start = Encode.chain, [0]

    def faulty(self: Encode, budget: int):  # type: ignore[no-untyped-def]
        chain, reached = sound(self, budget)
        object.__setattr__(chain, "initial_slot", start[0])
        return chain, reached

    monkeypatch.setattr(Encode, "chain", faulty)
    entries = []
    for neighbours in ([5, 6, 7, 8], [15, 16, 17, 18]):
        engine, start[0] = bench(name), 0
        engine.ask([seg(30, neighbours[0]), live(4, neighbours[1])])
        (first,) = [entry for entry in engine.store if not entry.is_snapshot]
        start[0] = first.state_slot
        entries.append(encoded_in(engine, neighbours))
    assert worst(*entries) > 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_other_batch_shapes_and_pieces_leave_rounding(
    name: str, dtype: str, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    segment = seg(150, 1)
    alone = bench(name, dtype)
    alone.ask([segment, live(3, 2)])
    expected = alone.contents(segment)
    for pieces in (1, 8, 9, 63, 64, 65) if dtype == "float64" else (3, 64):
        engine = bench(name, dtype, max_step_tokens=pieces)
        engine.ask([live(9, 3), segment, live(3, 2)])
        assert worst(engine.contents(segment), expected) < TOLERANCE[dtype]
        assert engine.num_steps >= 150 // pieces
    for neighbours in ([], [seg(9, 5)], [seg(300, 6), seg(8, 7), seg(20, 8)]):
        engine = bench(name, dtype)
        engine.ask([live(2, 4), *neighbours, segment, live(3, 2)])
        assert worst(engine.contents(segment), expected) < TOLERANCE[dtype]


def test_entries_are_unchanged_by_use(bench: Make) -> None:
    for name in MODELS:
        engine, segment = bench(name), seg(40, 1)
        engine.ask([segment, live(3, 2)])
        before = engine.contents(segment)
        for start in range(1, 40, 6):
            engine.ask([live(start, start), segment, live(3, 2)], max_tokens=3)
        assert same_bits(engine.contents(segment), before)


def test_an_entry_that_was_evicted_comes_back_as_it_was(bench: Make) -> None:
    engine, segment = bench("qwen"), seg(40, 1)
    engine.ask([segment, live(3, 2)])
    before = engine.contents(segment)
    assert engine.store.remove(engine.key(segment))
    engine.ask([seg(77, 4), live(3, 2)])  # takes the pages
    engine.ask([segment, live(3, 2)])
    assert same_bits(engine.contents(segment), before)


# -- contract 4 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_any_order_equals_the_reference_on_that_order(
    name: str, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    engine, answers = bench(name, dtype), []
    for order in permutations([seg(30, 1), seg(9, 2), seg(21, 3)]):
        pieces = [live(3, 4), *order, live(5, 5)]
        answer = engine.ask(pieces)
        assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE[dtype]
        answers.append(answer.rows()[-1])
    assert all(relative(a, b) > 100 * TOLERANCE[dtype] for a, b in combinations(answers, 2)), "the order must matter"
    assert engine.num_segments == 3, "no order was encoded again"


@pytest.mark.parametrize(("name", "fault"), cases(["qwen", "minimax-partial"], has_short=True))
def test_any_order_bites(
    name: str, fault: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    pieces = [live(3, 4), seg(21, 3), seg(9, 2), seg(30, 1), live(5, 5)]
    for dtype in DTYPES:
        engine = bench(name, dtype)
        engine.ask(pieces)
        warm = engine.ask(pieces)
        assert warm.error_to(checkpoints.expected(name, pieces)) > 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_places_later_a_segment_answers_as_in_one_move(
    name: str, bench: Make, checkpoints: Checkpoints
) -> None:
    """Sixty-four places a prompt: the segment is moved a thousand times, then once more, to where it is compared."""
    engine, segment, narrow = bench(name, "float32"), seg(6, 1), Policy(seam=4, min_segment_tokens=0)
    for _ in range(16):
        engine.ask([live(3, 4), *[segment] * 64, live(2, 5)], narrow)
    pieces = [live(500, 6), segment, live(5, 7)]
    moved = engine.ask(pieces, narrow)
    fresh = bench(name, "float32").ask(pieces, narrow)
    assert relative(moved.rows(), fresh.rows()) < TOLERANCE["float32"]
    assert moved.error_to(checkpoints.expected(name, pieces, narrow)) < TOLERANCE["float32"]
    assert moved.outcomes == ["hit"] and engine.num_segments == 1


def test_far_places_are_exact(bench: Make, checkpoints: Checkpoints) -> None:
    for name in ("qwen", "minimax-partial"):
        segment = seg(30, 1)
        pieces = [live(20, 2), *[segment] * 70, live(4, 3)]
        for dtype in DTYPES:
            answer = bench(name, dtype).ask(pieces)
            assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE[dtype]

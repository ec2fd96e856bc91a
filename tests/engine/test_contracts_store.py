"""Contract 7: what the caches hold changes no answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hypic.types import Policy
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, PROMPTS, few_segments, flat, live, many_segments, seg

Make = Callable[..., Bench]
DTYPES = list(TOLERANCE)
MODELS = ["qwen", "minimax", "minimax-partial"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_cache_contents_do_not_matter(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    pieces, engine = many_segments(), bench(name, dtype)
    expected = checkpoints.expected(name, pieces)
    cached = [piece for piece in pieces if piece.segment is not None and len(piece.ids) > 8]

    def check(answer: Answer, outcomes: set[str]) -> None:
        assert answer.error_to(expected) < TOLERANCE[dtype]
        assert set(answer.outcomes) == outcomes | {"live"}

    check(engine.ask(pieces), {"encoded"})
    check(engine.ask(pieces), {"hit"})
    for piece in cached[::2]:
        engine.store.remove(engine.key(piece))
    check(engine.ask(pieces), {"hit", "encoded"})
    engine.store.clear()
    check(engine.ask(pieces), {"encoded"})
    restarted = bench(name, dtype)
    restarted.ask([live(30, 77), cached[-1], cached[0], live(2, 78)])
    check(restarted.ask(pieces), {"hit", "encoded"})
    restarted.assert_back_to_start()


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_a_wrong_entry_bites(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    """Warm answers come from the entries: when one is damaged, the answer is."""
    pieces = few_segments()
    for dtype in DTYPES:
        engine = bench(name, dtype)
        engine.ask(pieces)
        entry = engine.entry(pieces[1])
        engine.pool.states[0][entry.state_slot] *= 1.5
        assert engine.ask(pieces).error_to(checkpoints.expected(name, pieces)) > 100 * TOLERANCE[dtype]


def test_duplicates_are_encoded_once_and_placed_each_time(bench: Make, checkpoints: Checkpoints) -> None:
    for name in MODELS:
        engine, twin = bench(name), seg(25, 1)
        pieces = [live(3, 2), twin, twin, live(2, 3), seg(9, 4), twin, live(4, 5)]
        answer = engine.ask(pieces)
        assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE["float64"]
        # Rows: 9 live tokens and four seams; encoded: two segments.
        assert answer.report.computed_tokens == 9 + 4 * 8 + 25 + 9
        assert answer.report.reused_tokens == 2 * (25 - 8)
        assert engine.num_segments == 2


def test_a_budget_for_the_store_changes_no_answer(bench: Make, checkpoints: Checkpoints) -> None:
    for name in ("qwen", "minimax"):
        for store_bytes in (0, 100_000):
            engine = bench(name, store_bytes=store_bytes)
            for pieces in [*PROMPTS[:5], *PROMPTS[:5]]:
                answer = engine.ask(pieces)
                assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE["float64"]
                assert engine.store.stats.held_bytes <= store_bytes
                engine.assert_sound()


@pytest.mark.parametrize("dtype", DTYPES)
def test_policies_without_reuse_compute_everything(dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    for name in MODELS:
        engine = bench(name, dtype)
        engine.ask(few_segments())
        answer = engine.ask(few_segments(), Policy(reuse="none"))
        full = checkpoints.reference(name).full(flat(few_segments())).logits
        assert relative(answer.rows(), full) < TOLERANCE[dtype]
        assert answer.report.reused_tokens == 0 and answer.reasons == ["cache off"] * 3


def test_deterministic_requests_are_bit_equal_whatever_runs_beside_them(bench: Make) -> None:
    policy = Policy(min_segment_tokens=0, deterministic=True)
    pieces = [live(40, 1, ends=True), seg(30, 2), live(40, 3, ends=True), seg(41, 4), live(9, 5)]
    for name in MODELS:
        for dtype in DTYPES if name == "qwen" else ["float32"]:
            alone = bench(name, dtype).ask(pieces, policy, max_tokens=4)
            engine = bench(name, dtype)
            others = [engine.add(p, max_tokens=5) for p in PROMPTS[:3]]
            engine.step()
            answer = engine.add(pieces, policy, max_tokens=4)
            others += [engine.add(p, POLICY, max_tokens=5) for p in PROMPTS[3:]]
            engine.run()
            assert answer.ids == alone.ids and torch.equal(answer.rows(), alone.rows())
            assert all(len(other.ids) == 5 for other in others)
            engine.assert_back_to_start()


def test_deterministic_requests_are_bit_equal_when_memory_is_short(bench: Make) -> None:
    """Neighbours hold all spare state slots, so that no snapshot can be taken on the way."""
    policy = Policy(min_segment_tokens=0, deterministic=True)
    pieces = [live(40, 1, ends=True), live(40, 3, ends=True), seg(41, 4), live(9, 5)]
    for name in MODELS:
        alone = bench(name, "float32").ask(pieces, policy, max_tokens=4)
        engine = bench(name, "float32", sizes=(100, 9, 5))
        others = [engine.add([live(9, 50 + i)], max_tokens=40) for i in range(6)]
        engine.step()
        answer = engine.add(pieces, policy, max_tokens=4)
        engine.run()
        assert answer.ids == alone.ids and torch.equal(answer.rows(), alone.rows())
        assert all(len(other.ids) == 40 for other in others)


def test_deterministic_requests_are_bit_equal_from_snapshots_and_after_preemption(bench: Make) -> None:
    policy = Policy(min_segment_tokens=0, deterministic=True)
    pieces = [live(40, 1, ends=True), seg(20, 2), live(40, 3, ends=True), seg(41, 4), live(9, 5)]
    for name in MODELS:
        engine = bench(name, "float32")
        alone = engine.ask(pieces, policy, max_tokens=30)
        continued = engine.ask(pieces, policy, max_tokens=30)
        assert min(continued.logits) == 100 and continued.ids == alone.ids
        assert torch.equal(continued.rows(), alone.rows(sorted(continued.logits)))
        engine = bench(name, "float32", page_size=8, sizes=(34, 12, 6))
        others = [engine.add([live(20 + i, 50 + i)], max_tokens=60) for i in range(2)]
        answer = engine.add(pieces, policy, max_tokens=30)
        engine.run()
        assert engine.restarts[engine.id_of(answer)] > 0, "the pool was too large to preempt anyone"
        assert answer.ids == alone.ids and torch.equal(answer.rows(), alone.rows())
        assert all(len(other.ids) == 60 for other in others)
        engine.assert_back_to_start()

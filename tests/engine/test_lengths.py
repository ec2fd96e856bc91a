"""Segments of every length around a border, one to sixty-four of them, and prompts that fit in nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hypic.engine.plan import Piece
from hypic.errors import PromptError, PromptTooLong, StoreFull
from hypic.types import Policy, Segment
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg

Make = Callable[..., Bench]
LENGTHS = [1, 7, 8, 9, 10, 11, 63, 64, 65, 527, 528, 529]
NAMES = ["qwen", "minimax"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_segment_of_any_length(name: str, length: int, bench: Make, checkpoints: Checkpoints) -> None:
    pieces = [live(6, 1), seg(length, 2), live(5, 3)]
    engine = bench(name)
    cold, warm = engine.ask(pieces, max_tokens=2), engine.ask(pieces, max_tokens=2)
    expected = checkpoints.expected(name, pieces, generated=cold.ids[:-1])
    assert cold.error_to(expected) < TOLERANCE["float64"]
    assert warm.error_to(expected) < TOLERANCE["float64"]
    is_cached = length > 8
    assert (cold.outcomes, warm.outcomes) == ((["encoded"], ["hit"]) if is_cached else (["live"], ["live"]))
    assert warm.report.computed_tokens == 11 + min(length, 8)
    assert cold.report.computed_tokens == warm.report.computed_tokens + (length if is_cached else 0)
    assert warm.report.reused_tokens == max(0, length - 8)
    engine.assert_back_to_start()


@pytest.mark.parametrize("count", [1, 2, 64])
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_segments(name: str, count: int, bench: Make, checkpoints: Checkpoints) -> None:
    pieces = [live(6, 1), *[seg(9 + i % 8, i) for i in range(count)], live(5, 3)]
    expected = checkpoints.expected(name, pieces)
    for dtype in ("float64", "float32"):
        engine = bench(name, dtype)
        assert engine.ask(pieces).error_to(expected) < TOLERANCE[dtype]
        warm = engine.ask(pieces)
        assert warm.error_to(expected) < TOLERANCE[dtype]
        assert warm.outcomes == ["hit"] * count
        engine.assert_back_to_start()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_segment_sixty_four_times(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    pieces, engine = [*[seg(12, 1)] * 64, live(5, 3)], bench(name)
    answer = engine.ask(pieces)
    assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE["float64"]
    assert answer.report.computed_tokens == 64 * 8 + 5 + 12 and engine.num_segments == 1


@pytest.mark.parametrize("length", [8, 9, 31, 32, 33])
def test_the_policy_decides_what_is_too_short(length: int, bench: Make, checkpoints: Checkpoints) -> None:
    pieces, policy = [live(6, 1), seg(length, 2), live(5, 3)], Policy()
    answer = bench("qwen").ask(pieces, policy)
    assert answer.error_to(checkpoints.expected("qwen", pieces, policy)) < TOLERANCE["float64"]
    reason = f"too short: {length} tokens, cached from 32"
    assert (answer.outcomes, answer.reasons) == ((["live"], [reason]) if length < 32 else (["encoded"], ["first time"]))


def test_empty_pieces_leave_no_trace(bench: Make, checkpoints: Checkpoints) -> None:
    empty = [Piece(()), Piece((), Segment("")), Piece((), None, True)]
    pieces = [live(40, 1), seg(20, 2), live(5, 3)]
    with_empty = [*empty, pieces[0], empty[1], pieces[1], *empty, pieces[2], *empty]
    answer = bench("qwen").ask(with_empty)
    assert answer.error_to(checkpoints.expected("qwen", pieces)) < TOLERANCE["float64"]
    assert answer.outcomes == ["encoded"]


@pytest.mark.parametrize("pieces", [[], [Piece(())], [Piece((), Segment(""))]])
def test_a_prompt_without_tokens_is_refused(pieces: list[Piece], bench: Make) -> None:
    engine = bench("qwen")
    with pytest.raises(PromptError, match="no token"):
        engine.add(pieces)
    engine.assert_back_to_start()


def test_a_segment_at_the_end_is_run_live(bench: Make, checkpoints: Checkpoints) -> None:
    pieces = [live(6, 1), seg(20, 2), seg(30, 3)]
    answer = bench("qwen").ask(pieces, max_tokens=3)
    assert answer.error_to(checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])) < TOLERANCE["float64"]
    assert answer.outcomes == ["encoded", "live"] and answer.reasons[1] == "no text after it"


# -- what does not fit -----------------------------------------------------------------------------------------------


def refused(engine: Bench, pieces: list[Piece], error: type[Exception], *words: str, **options: object) -> None:
    """The typed error comes from ``add``: nothing was computed, looked up or stored."""
    before = engine.store.stats
    with pytest.raises(error) as caught:
        engine.add(pieces, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert engine.store.stats == before and engine.num_steps == 0 and not engine.engine.has_work
    engine.assert_back_to_start()


def test_a_segment_longer_than_the_context_is_refused_before_any_computing(bench: Make) -> None:
    engine = bench("qwen", max_context=100)
    refused(engine, [seg(101, 1), live(3, 2)], PromptTooLong, "104", "100")
    refused(engine, [live(2, 1), seg(300, 1)], PromptTooLong, "302", "100")
    refused(engine, [live(60, 1), live(40, 2)], PromptTooLong, "100 tokens")
    refused(engine, [seg(99, 1), live(1, 2)], PromptTooLong, "100 tokens", warm=True)


def test_a_prompt_may_fill_the_context_up_to_one_answered_token(bench: Make) -> None:
    engine = bench("qwen", max_context=100)
    answer = engine.ask([live(49, 1), seg(50, 2)], max_tokens=50)
    assert len(answer.ids) == 1 and answer.pieces[-1].finish_reason == "length"
    answer = engine.ask([live(40, 1), seg(50, 2), live(3, 3)], max_tokens=50)
    assert len(answer.ids) == 7, "answers end where the context does"
    engine.assert_back_to_start()


def test_a_prompt_that_needs_more_than_all_memory_is_refused(bench: Make) -> None:
    engine = bench("qwen", sizes=(10, 6, 3))
    refused(engine, [live(200, 1)], StoreFull, "13 pages", "10")
    refused(engine, [*[seg(9, i) for i in range(5)], live(3, 9)], StoreFull, "13 pages", "10")
    without_seam = POLICY.with_(seam=0)
    refused(engine, [*[seg(9, i) for i in range(5)], live(3, 9)], StoreFull, "5 transition", policy=without_seam)
    engine.ask([seg(20, 1), live(3, 2)])
    engine.assert_back_to_start()


def test_a_prompt_beside_others_waits_for_memory(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", sizes=(12, 6, 3))
    prompts = [[live(9 + i, i), seg(20, i), live(3, 9)] for i in range(5)]
    answers = [engine.add(pieces, POLICY, 4) for pieces in prompts]
    engine.step()
    assert 0 < len(engine.engine.scheduler.running) < 5
    engine.run()
    for pieces, answer in zip(prompts, answers, strict=True):
        expected = checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])
        assert answer.error_to(expected) < TOLERANCE["float64"]
    engine.assert_back_to_start()

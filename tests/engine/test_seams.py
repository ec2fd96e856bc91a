"""Seams elsewhere than at the head: at a segment's end, by its length, every so many tokens, of its own width.

What is cached is written down by hand for every policy; the reference evaluates that chain token by token, and full
recompute by transformers is the oracle for a prompt that begins with its only segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hypic.engine.plan import Interior, Piece, make
from hypic.engine.segment import Identity
from hypic.errors import StoreFull
from hypic.types import Policy, Segment
from tests.checkpoints import random_ids
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.faults import FAULTS, cases
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg
from tests.reference import Live, Result, SegmentLink

Make = Callable[..., Bench]
Ranges = tuple[tuple[int, int], ...]
DTYPES = list(TOLERANCE)
MODELS = ["qwen", "minimax-partial"]
# By policy, what is cached of segments of 50, 21 and 9 tokens.
KNOBS: dict[str, tuple[Policy, tuple[Ranges, Ranges, Ranges]]] = {
    "tail": (POLICY.with_(tail_seam=5), (((8, 45),), ((8, 16),), ())),
    "tail-only": (POLICY.with_(seam=0, tail_seam=4), (((0, 46),), ((0, 17),), ((0, 5),))),
    "share": (POLICY.with_(seam=4, seam_share=0.5), (((25, 50),), ((11, 21),), ((5, 9),))),
    "every": (POLICY.with_(seam_every=16), (((8, 16), (24, 32), (40, 50)), ((8, 21),), ((8, 9),))),
    "every-tail": (
        POLICY.with_(seam=4, seam_every=6, tail_seam=3),
        (
            ((4, 6), (10, 12), (16, 18), (22, 24), (28, 30), (34, 36), (40, 47)),
            ((4, 6), (10, 18)),
            ((4, 6),),
        ),
    ),
    "last-live": (POLICY.with_(live_last=1), (((8, 50),), ((8, 21),), ())),
}
# Without a head seam the first cached tokens miss the convolution's reach, which only an empty history makes up for.
EXACT = [name for name in KNOBS if name != "tail-only"]


def prompt() -> list[Piece]:
    return [live(6, 1), seg(50, 2), seg(21, 3), live(2, 4), seg(9, 5), live(7, 6)]


def expected(checkpoints: Checkpoints, name: str, knob: str) -> Result:
    ranges = iter(KNOBS[knob][1])
    parts = [Live(p.ids) if p.segment is None else SegmentLink(p.ids, cached=next(ranges)) for p in prompt()]
    return checkpoints.reference(name).evaluate(parts)


@pytest.mark.parametrize("knob", KNOBS)
def test_what_is_cached_is_what_the_policy_says(knob: str) -> None:
    policy, ranges = KNOBS[knob]
    made = make(prompt(), policy, Identity("model", "torch.float32"))
    found: list[list[tuple[int, int]]] = [[] for _ in ranges]
    for span in made.spans:
        if isinstance(span, Interior):
            found[span.number].append((span.start - span.origin, span.stop - span.origin))
    assert [tuple(one) for one in found] == list(ranges)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("name", MODELS)
def test_cached_equals_uncached(name: str, knob: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine, policy = bench(name, dtype), KNOBS[knob][0]
    wanted = expected(checkpoints, name, knob)
    for outcome in ("encoded", "hit"):
        answer = engine.ask(prompt(), policy)
        assert answer.error_to(wanted) < TOLERANCE[dtype]
        assert set(answer.outcomes) <= {outcome, "live"} and outcome in answer.outcomes
    engine.assert_sound()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knob", ["tail", "share", "every"])
@pytest.mark.parametrize(("name", "fault"), cases(MODELS, has_short=False))
def test_cached_equals_uncached_bites(
    name: str,
    fault: str,
    knob: str,
    dtype: str,
    bench: Make,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FAULTS[fault](monkeypatch)
    answer = bench(name, dtype).ask(prompt(), KNOBS[knob][0])
    assert answer.error_to(expected(checkpoints, name, knob)) > 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("name", MODELS)
def test_a_tail_seam_off_by_one_is_another_answer(name: str, by: int, bench: Make, checkpoints: Checkpoints) -> None:
    answer = bench(name).ask(prompt(), POLICY.with_(tail_seam=5 + by))
    assert relative(answer.rows()[-7:], expected(checkpoints, name, "tail").logits[-7:]) > 100 * TOLERANCE["float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knob", [name for name in EXACT if name != "last-live"])
@pytest.mark.parametrize("name", MODELS)
def test_only_segment_at_the_head_equals_full_recompute(
    name: str, knob: str, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    pieces, engine, (policy, ranges) = [seg(50, 2), live(7, 6)], bench(name, dtype), KNOBS[knob]
    full = checkpoints.full(name, pieces)
    num_cached = sum(stop - start for start, stop in ranges[0])
    for num_run in (50 + 7 - num_cached, 50 + 7 - num_cached):
        answer = engine.ask(pieces, policy)
        assert relative(answer.rows(), full[sorted(answer.logits)]) < TOLERANCE[dtype]
        assert len(answer.logits) >= min(num_run, 7) and answer.outcomes in (["encoded"], ["hit"])


@pytest.mark.parametrize(("name", "fault"), cases(MODELS, has_short=False))
@pytest.mark.parametrize("knob", ["tail", "every"])
def test_only_segment_at_the_head_bites(
    name: str, fault: str, knob: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    pieces = [seg(50, 2), live(7, 6)]
    answer = bench(name).ask(pieces, KNOBS[knob][0])
    error = relative(answer.rows(), checkpoints.full(name, pieces)[sorted(answer.logits)])
    assert error > 100 * TOLERANCE["float64"]


@pytest.mark.parametrize("knob", ["tail", "every", "share"])
def test_a_conversation_goes_on_from_its_snapshot(knob: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine, policy = bench("qwen"), KNOBS[knob][0]
    first = [live(6, 1), seg(50, 2), replace(live(4, 3), ends_message=True)]
    engine.ask([*first, live(3, 4)], policy)
    answer = engine.ask([*first, live(8, 5)], policy)
    parts = [Live(first[0].ids), SegmentLink(first[1].ids, cached=KNOBS[knob][1][0]), Live(first[2].ids)]
    wanted = checkpoints.reference("qwen").evaluate([*parts, Live(live(8, 5).ids)])
    assert answer.runs == [8] and answer.error_where_run(wanted) < TOLERANCE["float64"]


def counted(answer: Answer) -> tuple[int, int]:
    return answer.report.computed_tokens, answer.report.reused_tokens


@pytest.mark.parametrize(
    ("knob", "encoded", "cached"), [("tail", 45 + 16, 37 + 8), ("every", 16 + 32 + 50 + 21 + 9, 40)]
)
def test_reports_count_what_is_run(knob: str, encoded: int, cached: int, bench: Make) -> None:
    engine, policy = bench("qwen"), KNOBS[knob][0]
    total = sum(len(piece.ids) for piece in prompt())
    cold, warm = engine.ask(prompt(), policy), engine.ask(prompt(), policy)
    assert counted(cold) == (total - cached + encoded, 0)
    assert counted(warm) == (total - cached, cached)
    kept = sum(entry.num_bytes for entry in engine.store if not entry.is_snapshot)
    assert sum(segment.num_bytes for segment in warm.report.segments) == kept


def test_last_segments_are_live_but_not_when_they_are_warmed(bench: Make) -> None:
    engine, policy = bench("qwen"), POLICY.with_(live_last=2)
    assert engine.ask(prompt(), policy).reasons[1:] == ["among the last 2"] * 2
    warmed = engine.ask([seg(21, 3), live(1, 9)], policy, warm=True)
    assert warmed.outcomes == ["encoded"]


def test_a_last_segment_with_a_tail_seam_is_cached(bench: Make, checkpoints: Checkpoints) -> None:
    pieces, policy = [live(6, 1), seg(50, 2)], KNOBS["tail"][0]
    answer = bench("qwen").ask(pieces, policy)
    wanted = checkpoints.reference("qwen").evaluate(
        [Live(pieces[0].ids), SegmentLink(pieces[1].ids, cached=((8, 45),))]
    )
    assert answer.outcomes == ["encoded"] and answer.error_to(wanted) < TOLERANCE["float64"]


def test_many_interiors_run_in_pieces_where_memory_is_small(bench: Make, checkpoints: Checkpoints) -> None:
    policy = KNOBS["every"][0]
    engine = bench("qwen", sizes=(64, 4, 2))
    for _ in ("cold", "again"):
        answer = engine.ask(prompt(), policy)
        assert answer.error_to(expected(checkpoints, "qwen", "every")) < TOLERANCE["float64"]
    engine.assert_sound()


def test_warming_more_interiors_than_memory_holds_is_refused(bench: Make) -> None:
    """Nothing is run between them that would give back what the first ones hold."""
    engine, policy = bench("qwen", sizes=(64, 4, 2)), KNOBS["every"][0]
    with pytest.raises(StoreFull, match="3 transition slots"):
        engine.add([seg(50, 2), live(1, 9)], policy, warm=True)
    assert engine.ask([seg(50, 2), live(1, 9)], policy).outcomes == ["encoded"]
    assert engine.ask([seg(21, 3), live(1, 9)], policy, warm=True).outcomes == ["encoded"]


def test_a_text_that_grows_goes_on_from_its_entry(bench: Make, checkpoints: Checkpoints) -> None:
    engine, policy, ids = bench("qwen"), KNOBS["tail"][0], tuple(random_ids(90, 3))
    engine.ask([Piece(ids[:60], Segment("a", name="notes")), live(4, 1)], policy)
    answer = engine.ask([Piece(ids, Segment("ab", name="notes")), live(4, 1)], policy)
    assert answer.reasons == ["grown: 30 new tokens behind 55 known ones"]
    wanted = checkpoints.reference("qwen").evaluate([SegmentLink(ids, cached=((8, 85),)), Live(live(4, 1).ids)])
    assert answer.error_to(wanted) < TOLERANCE["float64"]

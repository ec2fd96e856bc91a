"""Seams elsewhere than at the head: at a segment's end, by its length, every so many tokens, of its own width.

What is cached is written down by hand for every policy; the reference evaluates that chain token by token, and full
recompute by transformers is the oracle for a prompt that begins with its only segment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hypic.engine.plan import Interior, Piece, make
from hypic.engine.segment import Identity
from hypic.errors import ConfigError, PromptError, StoreFull
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
LENGTHS = (50, 21, 9)


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


# -- identity ----------------------------------------------------------------------------------------------------------


def keys(piece: Piece, policy: Policy = POLICY) -> tuple[bytes, ...]:
    return make([piece, live(3, 9)], policy, Identity("model", "torch.float32")).segments[0].keys


def test_a_tail_seam_has_the_key_of_the_shorter_text() -> None:
    whole, shorter = seg(50, 2), Piece(seg(50, 2).ids[:45], Segment("shorter"))
    assert keys(whole, POLICY.with_(tail_seam=5)) == keys(shorter) != keys(whole)


def test_interiors_between_seams_have_keys_of_their_own() -> None:
    found = keys(seg(50, 2), POLICY.with_(seam_every=16))
    assert len(set(found)) == 3 and keys(seg(50, 2)) != found[:1]
    first = Piece(seg(50, 2).ids[:16], Segment("its first 16 tokens"))
    assert found[:1] == keys(first)


def test_a_segments_own_seam_is_part_of_its_key() -> None:
    own = Piece(seg(50, 2).ids, Segment("text", seam=20))
    assert keys(own) == keys(seg(50, 2), POLICY.with_(seam=20)) != keys(seg(50, 2))
    assert keys(own, POLICY.with_(seam=8, seam_share=0.9)) == keys(own), "its own width stands before all others"


def digests(policy: Policy, *pieces: Piece) -> list[bytes]:
    made = make([*pieces, live(3, 9), replace(live(2, 8), ends_message=True), live(1, 7)], policy, IDENTITY)
    return [mark.digest for mark in made.marks]


IDENTITY = Identity("model", "torch.float32")


def test_marks_tell_where_seams_lie() -> None:
    policies = [POLICY.with_(**changes) for changes in ({}, {"tail_seam": 5}, {"seam_every": 16}, {"live_last": 1})]
    found = [digests(policy, seg(50, 2))[-1] for policy in policies]
    found.append(digests(POLICY, Piece(seg(50, 2).ids, Segment("text", seam=20)))[-1])
    assert len(set(found)) == len(found)
    ids = seg(50, 2).ids
    parted = digests(POLICY, Piece(ids[:45], Segment("shorter")), Piece(ids[45:]))[-1]
    assert found[1] == parted, "the same chain has the same name"


def test_interiors_of_one_segment_are_not_those_of_two() -> None:
    """The second interior's key names a text that begins with the first one's: a prompt may hold that text twice."""
    ids, policy = seg(32, 2).ids, POLICY.with_(seam_every=16, seam=4)
    one = make([Piece(ids, Segment("text")), replace(live(3, 9), ends_message=True), live(1, 7)], policy, IDENTITY)
    assert [key for segment in one.segments for key in segment.keys] == list(keys(Piece(ids, Segment("")), policy))
    first, second = one.segments[0].keys
    pieces = [Piece(ids[:16], Segment("", seam=4)), Piece(ids, Segment("", seam=20))]
    two = make([*pieces, replace(live(3, 9), ends_message=True), live(1, 7)], POLICY, IDENTITY)
    assert [segment.key for segment in two.segments] == [first, second]
    assert one.marks[-1].digest != two.marks[-1].digest


# -- conversations, reports, memory ------------------------------------------------------------------------------------


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


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tail_seam": -1}, "tail_seam is -1; it must be a whole number of tokens"),
        ({"live_last": 1.5}, "live_last is 1.5; it must be a whole number of segments"),
        ({"seam_share": 2}, "seam_share is 2; it must be a share"),
        ({"seam_share": True}, "seam_share is True"),
        ({"seam_every": 8}, "seam_every is 8 with a seam of 8"),
        ({"seam_every": 8, "seam": 0}, "seam_every is 8 with a seam of 0"),
    ],
)
def test_values_that_cannot_be_right(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Policy(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a segment's seam is -1"):
        Segment("text", seam=-1)


def test_seams_so_close_that_encoding_costs_too_much_are_refused(bench: Make) -> None:
    policy, engine = POLICY.with_(seam_every=9), bench("qwen")
    engine.ask([seg(100, 1), live(5, 2)], policy)  # 5 times its tokens
    with pytest.raises(
        ConfigError, match="seam_every is 9, with which encoding a segment of 600 tokens would run 32.2 "
    ) as e:
        engine.add([seg(600, 1), live(5, 2)], policy)
    assert "set seam_every to 10 or more" in str(e.value)
    policy.with_(seam_every=10).check_encoding(600)
    engine.ask([seg(600, 1), live(5, 2)], policy.with_(live_last=1))  # what is run live is not encoded
    engine.ask([live(5, 2), seg(600, 1)], policy)
    engine.head([live(5, 2), seg(600, 1), live(5, 3)], policy)  # in the next turn it would be: there is none
    engine.assert_back_to_start()


@pytest.mark.parametrize("num_tokens", [10_000, 1_000_000])
def test_the_way_out_of_costly_seams_is_right_if_followed(num_tokens: int) -> None:
    with pytest.raises(ConfigError, match="set seam_every to") as e:
        POLICY.with_(seam_every=9).check_encoding(num_tokens)
    least = int(re.findall(r"set seam_every to (\d+) or more", str(e.value))[0])
    assert num_tokens / 64 < least < num_tokens / 50
    POLICY.with_(seam_every=least).check_encoding(num_tokens)
    POLICY.check_encoding(num_tokens)


def test_interiors_never_touch_and_are_worth_a_seam() -> None:
    for length in range(1, 200):
        for policy in (
            POLICY.with_(seam=s, seam_every=n, tail_seam=t) for s in (3, 8) for n in (9, 20) for t in (0, 7)
        ):
            found: Sequence[tuple[int, int]] = policy.interiors(length)
            edges = [place for pair in found for place in pair]
            assert edges == sorted(set(edges)) and (not edges or edges[-1] == length - policy.tail_seam)
            assert all(later - stop == policy.seam for (_, stop), (later, _) in zip(found, found[1:], strict=False))
            assert len(found) < 2 or found[-1][1] - found[-1][0] > policy.seam


def test_a_hint_in_a_message_sets_a_segments_own_seam() -> None:
    from hypic.engine.messages import split_turns

    def segment(seam: object) -> Segment | None:
        block = {"type": "text", "text": "A passage.", "hypic": {"kind": "document", "seam": seam}}
        return split_turns([{"role": "user", "content": [block]}])[0].parts[0].segment

    found = segment(20)
    assert found is not None and found.seam == 20
    with pytest.raises(PromptError, match="the hypic hint seam is 'wide'"):
        segment("wide")

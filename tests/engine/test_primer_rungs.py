"""A primer with rungs: a segment is encoded behind the one that fits its place; against the float64 reference, which is
told by hand which that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hypic.engine import primer as primer_module
from hypic.engine.plan import Piece, make, placed
from hypic.engine.segment import Identity, Primer
from hypic.types import Segment
from tests.checkpoints import random_ids
from tests.engine.expected import TOLERANCE, Checkpoints, links, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, flat, live, seg
from tests.engine.tiers import always_load, disk_at, same_bits, saved
from tests.reference import Result, SegmentLink

Make = Callable[..., Bench]
EXACT = TOLERANCE["float64"]
BY_PLACE = POLICY
MODELS = ["qwen", "minimax-partial"]
BARE, ONE, FIVE = (tuple(random_ids(n, 60 + n)) for n in (3, 21, 70))
RUNGS = {0: BARE, 1: ONE, 5: FIVE}
SEGMENTS = [seg(24 + n, 10 + n) for n in range(8)]
PROMPT = [live(4, 1), *SEGMENTS, live(6, 2)]
# Of eight segments in a row: none before the first, three as near to five as to one.
BEHIND = [BARE, ONE, ONE, FIVE, FIVE, FIVE, FIVE, FIVE]
SEGMENT = SEGMENTS[0]


def expected(checkpoints: Checkpoints, name: str, pieces: Sequence[Piece], behind: Sequence[tuple[int, ...]]) -> Result:
    chain, left = links(pieces), iter(behind)
    chain = [replace(link, primer=next(left)) if isinstance(link, SegmentLink) else link for link in chain]
    return checkpoints.reference(name).evaluate(chain)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", MODELS)
def test_each_place_has_its_rung(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine, wanted = bench(name, dtype, rungs=RUNGS), expected(checkpoints, name, PROMPT, BEHIND)
    for outcome in ("encoded", "hit"):
        answer = engine.ask(PROMPT, BY_PLACE)
        assert answer.error_to(wanted) < TOLERANCE[dtype] and set(answer.outcomes) == {outcome}
    engine.assert_back_to_start()


@pytest.mark.parametrize("number", range(len(BEHIND)))
@pytest.mark.parametrize("name", MODELS)
def test_each_place_has_its_rung_bites(name: str, number: int, bench: Make, checkpoints: Checkpoints) -> None:
    """One segment behind the rung next to its own."""
    answer = bench(name, rungs=RUNGS).ask(PROMPT, BY_PLACE)
    other = BARE if BEHIND[number] is ONE else ONE
    behind = [*BEHIND[:number], other, *BEHIND[number + 1 :]]
    assert answer.error_to(expected(checkpoints, name, PROMPT, behind)) > 100 * EXACT


@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_in_pieces_and_by_kernels(step: int, kernels: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", rungs=RUNGS, max_step_tokens=step, kernels=kernels, page_size=4, max_context=1024)
    assert engine.ask(PROMPT, BY_PLACE).error_to(expected(checkpoints, "qwen", PROMPT, BEHIND)) < EXACT


def test_what_stands_before_the_first_segment_may_be_the_rung_itself(bench: Make, checkpoints: Checkpoints) -> None:
    """Then it is encoded as it would be read, and the prompt equals full recompute."""
    pieces = [Piece(BARE), SEGMENT, live(6, 2)]
    full = checkpoints.reference("qwen").full(flat(pieces)).logits

    def error(rungs: dict[int, tuple[int, ...]]) -> float:
        answer = bench("qwen", rungs=rungs).ask(pieces, BY_PLACE)
        positions = sorted(answer.logits)
        assert len(positions) == len(full) - len(SEGMENT.ids) + POLICY.seam, "the interior is cached"
        return relative(answer.rows(positions), full[positions])

    assert error(RUNGS) < EXACT < 100 * EXACT < min(error({1: ONE}), error({}))


def test_a_segment_that_moves_to_another_rung_is_encoded_anew_and_says_so(bench: Make) -> None:
    engine = bench("qwen", rungs=RUNGS)
    first = engine.ask([live(4, 1), SEGMENT, live(6, 2)], BY_PLACE)
    second = engine.ask([live(4, 1), SEGMENTS[1], SEGMENT, live(6, 2)], BY_PLACE)
    assert first.outcomes == ["encoded"] and second.outcomes == ["encoded"] * 2
    assert second.reasons == ["first time", "other place"] and engine.num_segments == 3
    third = engine.ask([live(4, 1), SEGMENTS[2], SEGMENTS[3], SEGMENT, live(6, 2)], BY_PLACE)
    assert third.outcomes == ["encoded", "encoded", "hit"], "two before it is nearest to one, as one was"
    assert engine.ask([live(4, 1), SEGMENT, live(6, 2)], BY_PLACE.with_(primed=False)).reasons == ["other primer"]
    engine.assert_back_to_start()


def test_texts_run_live_count_as_passages(bench: Make, checkpoints: Checkpoints) -> None:
    pieces = [live(4, 1), seg(5, 7), SEGMENT, live(6, 2)]
    answer = bench("qwen", rungs=RUNGS).ask(pieces, BY_PLACE)
    assert answer.outcomes == ["live", "encoded"]
    assert answer.error_to(expected(checkpoints, "qwen", pieces, [ONE])) < EXACT
    assert answer.error_to(expected(checkpoints, "qwen", pieces, [BARE])) > 100 * EXACT


def test_which_other_rungs_there_are_changes_no_bit(bench: Make) -> None:
    """A rung is what a primer of its own would be."""
    found = []
    for rungs in (RUNGS, {1: ONE}, {1: ONE, 5: FIVE}):
        engine = bench("qwen", "float32", rungs=rungs)
        engine.ask([live(4, 1), SEGMENTS[1], SEGMENT, live(6, 2)], BY_PLACE)
        found.append(engine.contents(SEGMENT, BY_PLACE, 1))
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])
    other = bench("qwen", "float32", rungs={1: FIVE})
    other.ask([live(4, 1), SEGMENTS[1], SEGMENT, live(6, 2)], BY_PLACE)
    assert not same_bits(found[0], other.contents(SEGMENT, BY_PLACE, 1))


def test_an_entry_on_disk_is_found_by_an_engine_with_that_rung_alone(bench: Make, tmp_path: Path) -> None:
    pieces = [live(4, 1), *SEGMENTS[1:6], SEGMENT, live(6, 2)]
    engine = always_load(bench("qwen", rungs=RUNGS, store=disk_at(tmp_path)))
    engine.ask(pieces, BY_PLACE)
    saved(engine).engine.close()
    for rungs, outcome in (({5: FIVE}, "hit"), ({5: ONE}, "encoded")):
        again = always_load(bench("qwen", rungs=rungs, store=disk_at(tmp_path)))
        assert again.ask([live(4, 1), SEGMENT, live(6, 2)], BY_PLACE).outcomes == [outcome]
        again.engine.close()


@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_named_text_that_grew_is_continued_at_its_place(place: int, bench: Make, checkpoints: Checkpoints) -> None:
    """Though the same name was stored behind another rung since."""
    engine, ids = bench("qwen", rungs=RUNGS), random_ids(60, 77)
    before = SEGMENTS[1 : 1 + place]
    short, long = (Piece(tuple(ids[:n]), Segment(f"notes of {n}", name="notes.md")) for n in (33, 60))
    elsewhere = SEGMENTS[1 : 1 + (0 if place else 5)]
    for pieces in ([*before, short], [*elsewhere, short]):
        engine.ask([live(4, 1), *pieces, live(6, 2)], BY_PLACE)
    prompt = [live(4, 1), *before, long, live(6, 2)]
    answer = engine.ask(prompt, BY_PLACE)
    assert answer.reasons[-1].startswith("grown")
    assert answer.error_to(expected(checkpoints, "qwen", prompt, BEHIND)) < EXACT


# -- keys ------------------------------------------------------------------------------------------------------------

PLAIN = Identity("f" * 64, "torch.float32")


def rungs(*numbers: int, longest: int = 100) -> Identity:
    return replace(PLAIN, primers=tuple(Primer((n, 1), longest - 10 * n, n) for n in numbers))


@pytest.mark.parametrize(
    ("numbers", "nearest"),
    [
        ((1,), {0: 1, 1: 1, 30: 1}),
        ((0, 1, 4, 8), {0: 0, 1: 1, 2: 1, 3: 4, 4: 4, 5: 4, 6: 8, 7: 8, 8: 8, 50: 8}),
        ((0, 2), {0: 0, 1: 2, 2: 2}),
        ((4, 8), {0: 4, 5: 4, 6: 8}),
    ],
)
def test_the_nearest_rung_is_taken(numbers: tuple[int, ...], nearest: dict[int, int]) -> None:
    identity = rungs(*numbers)
    found = {place: identity.primer_of(10, place) for place in nearest}
    assert {place: one and one.num_passages for place, one in found.items()} == nearest
    assert identity.places == numbers and PLAIN.places == (0,)


def test_of_rungs_without_room_none_is_taken() -> None:
    identity = rungs(1, 4, 8)
    found = {length: identity.primer_of(length, 8) for length in (20, 21, 60, 61, 90, 91)}
    assert {length: one and one.num_passages for length, one in found.items()} == {
        20: 8, 21: 4, 60: 4, 61: 1, 90: 1, 91: None,
    }  # fmt: skip


def test_a_placed_segment_keeps_its_key_in_another_prompt() -> None:
    identity, pieces = rungs(0, 1, 4), [live(3, 8), *SEGMENTS[:4], live(3, 9)]
    keys = [segment.key for segment in make(pieces, BY_PLACE, identity).segments]
    assert placed(pieces)[0] == pieces[0] and [piece.place for piece in placed(pieces)[1:5]] == [0, 1, 2, 3]
    for kept, one in zip(keys, placed(pieces)[1:5], strict=True):
        assert make([one, live(3, 9)], BY_PLACE, identity).segments[0].key == kept
    moved = [make([piece, live(3, 9)], BY_PLACE, identity).segments[0].key for piece in pieces[1:5]]
    assert moved[0] == keys[0] and not set(moved[1:]) & set(keys[1:])


def test_the_middle_rung_is_for_any_place() -> None:
    """So a primer with rungs is as one of the middle one's length where places do not count."""
    assert rungs(0, 1, 4, 8).primer_of(10) == rungs(4).primer_of(10, 30) != rungs(0, 1, 4, 8).primer_of(10, 8)
    found = [identity.primer_of(10) for identity in (rungs(6), rungs(0, 9), PLAIN)]
    assert [one and one.num_passages for one in found] == [6, 9, None]
    ids = tuple(range(1, 41))
    everywhere = POLICY.with_(rungs=False)
    plain = make([*(Piece(ids, Segment("text")) for _ in range(6)), live(3, 9)], everywhere, rungs(0, 1, 4))
    assert len({segment.key for segment in plain.segments}) == 1


def test_a_bare_rung_of_no_token_is_no_primer(bench: Make, checkpoints: Checkpoints) -> None:
    """As of a model without a chat template: a prompt's first segment is encoded with nothing before it, and exact."""
    engine = bench("qwen", rungs={0: (), 1: ONE})
    pieces = [SEGMENT, SEGMENTS[1], live(6, 2)]
    answer = engine.ask(pieces, BY_PLACE)
    assert answer.error_to(expected(checkpoints, "qwen", pieces, [(), ONE])) < EXACT
    assert answer.error_to(expected(checkpoints, "qwen", pieces, [ONE, ONE])) > 100 * EXACT
    assert engine.engine.runner.identity.places == (0, 1)
    assert engine.ask(pieces[1::-1] + pieces[2:], BY_PLACE).reasons == ["other place"] * 2
    engine.assert_back_to_start()


def test_a_rung_without_room_is_none_of_the_ways() -> None:
    identity = rungs(1, 4, 8)
    assert [identity.places_of(length) for length in (20, 21, 61, 91)] == [(1, 4, 8), (1, 4), (1,), (1,)]


def test_a_piece_may_say_its_place() -> None:
    ids = tuple(range(1, 41))
    text, identity = Segment("text"), rungs(0, 1, 4)
    keys = [make([Piece(ids, text, place=n), live(3, 9)], BY_PLACE, identity).segments[0].key for n in (0, 1, 4, 9)]
    assert len(set(keys)) == 3 and keys[2] == keys[3]
    row = make([*(Piece(ids, text) for _ in range(6)), live(3, 9)], BY_PLACE, identity)
    assert [segment.key for segment in row.segments] == [keys[n] for n in (0, 1, 1, 2, 2, 2)]


# -- how it is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rungs"),
    [
        ("", {}),
        ("A", {1: "A"}),
        ("A\n\nB", {2: "AB"}),
        ("A\n\n---\n\nB", {1: "A", 2: "AB"}),
        ("---\n\nA\n\n---\n\nB\n\nC", {0: "", 1: "A", 3: "ABC"}),
        ("A\n\n---", {1: "A"}),
        ("A\n\n---\n\n---\n\nB\n\n\n\nC\n\n---\n\n", {1: "A", 3: "ABC"}),
        ("---", {0: ""}),
        ("---\n\n---", {0: ""}),
        ("A\n \n---\n\t\nB", {1: "A", 2: "AB"}),
    ],
)
def test_marks_end_rungs(text: str, rungs: dict[int, str]) -> None:
    found = primer_module.passages_of(text)
    assert found == {number: tuple(passages) for number, passages in rungs.items()}
    assert all(one < other for one, other in pairwise(found))


def test_a_mark_stands_alone() -> None:
    for text in ("A ---\n\nB", "A\n---\nB", "A\n\n----\n\nB"):
        assert list(primer_module.passages_of(text)) == [text.count("\n\n") + 1]

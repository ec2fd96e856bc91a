"""Entries of segments behind a primer: their keys, their seams, and texts that grew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hypic.engine.lookup import Lookup
from hypic.engine.plan import Interior, Piece, make
from hypic.engine.request import Request
from hypic.engine.segment import Identity, Primer
from hypic.types import Policy, Segment
from tests.checkpoints import random_ids
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, links, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg
from tests.engine.tiers import same_bits

Make = Callable[..., Bench]
EXACT = TOLERANCE["float64"]
PRIMER, OTHER = tuple(random_ids(37, 91)), tuple(random_ids(37, 92))
UNPRIMED = POLICY.with_(primed=False)
SEGMENT = seg(40, 1)
PROMPT = [live(3, 2), SEGMENT, live(4, 3)]
LONG = random_ids(400, 77)


def note(num_tokens: int) -> Piece:
    """The first tokens of one text, under one name."""
    return Piece(tuple(LONG[:num_tokens]), Segment(f"notes of {num_tokens}", name="notes.md"))


def error(checkpoints: Checkpoints, answer: Answer, pieces: list[Piece], primer: tuple[int, ...] = PRIMER) -> float:
    return answer.error_to(checkpoints.reference("qwen").evaluate(links(pieces), primer=primer))


# -- keys ------------------------------------------------------------------------------------------------------------

PLAIN = Identity("f" * 64, "torch.float32")
BEHIND = replace(PLAIN, primers=(Primer(PRIMER, 100),))


def planned(piece: Piece, identity: Identity, policy: Policy = POLICY) -> tuple[bytes, ...]:
    return make([piece, live(3, 9)], policy, identity).segments[0].keys


def test_keys_without_a_primer_are_what_they_were_before_there_were_any() -> None:
    ids = tuple(range(1, 41))
    assert PLAIN.key(ids, 8, None, False).hex() == "c99d688c6763580738cad0988e9d7ef3b6b40ae557bd8e511e1b6fa94b8885e5"
    other = Identity("f" * 64, "torch.float32", adapter="a", path="torch on cpu")
    assert other.key(ids, 8, "tenant", True).hex() == "23a5a5371bd93cf1f4b8c1a52f25ffd92841a336884841018843751f601254af"
    assert planned(Piece(ids, Segment("text")), BEHIND, UNPRIMED) == (PLAIN.key(ids, 8, None, False),)


def test_each_primer_has_keys_of_its_own() -> None:
    others = [replace(PLAIN, primers=(Primer(ids, 100),)) for ids in (OTHER, ())]
    *found, empty = [planned(SEGMENT, identity)[0] for identity in (PLAIN, BEHIND, *others)]
    assert len(set(found)) == len(found) and empty == found[0], "no token is no primer"
    assert planned(SEGMENT, replace(PLAIN, primers=(Primer(PRIMER, 50),))) == (found[1],), "room is no part of a key"
    spaced = PLAIN.key(SEGMENT.ids, 8, f"t{BEHIND.primer_of(1)}", False)
    assert spaced not in found


def test_a_segment_without_room_behind_the_primer_is_encoded_without() -> None:
    fits, longer = seg(100, 1), seg(101, 1)
    assert planned(fits, BEHIND) != planned(fits, PLAIN) and planned(longer, BEHIND) == planned(longer, PLAIN)
    parts = POLICY.with_(seam_every=16)
    assert not set(planned(fits, BEHIND, parts)) & set(planned(fits, PLAIN, parts))
    assert planned(longer, BEHIND, parts) == planned(longer, PLAIN, parts), "all of it, or nothing"


def test_a_long_segment_beside_a_short_one(bench: Make, checkpoints: Checkpoints) -> None:
    long, engine = seg(200 - len(PRIMER) + 1, 5), bench("qwen", primer=PRIMER, max_context=200)
    pieces = [live(3, 2), long, live(4, 3)]
    engine.ask(PROMPT)
    answer = engine.ask(pieces)
    assert engine.entry(SEGMENT).primer == BEHIND.primer_of(1).digest and not engine.entry(long).primer  # type: ignore[union-attr]
    alone = bench("qwen")
    alone.ask(pieces)
    assert same_bits(engine.contents(long), alone.contents(long))
    assert error(checkpoints, answer, pieces, ()) < EXACT < 100 * EXACT < error(checkpoints, answer, pieces)
    engine.assert_back_to_start()


def test_both_ways_live_in_one_store(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", primer=PRIMER)
    first, second = engine.ask(PROMPT), engine.ask(PROMPT, UNPRIMED)
    assert first.outcomes == second.outcomes == ["encoded"] and second.reasons == ["other primer"]
    assert engine.num_segments == 2
    for policy, primer, cold in ((POLICY, PRIMER, first), (UNPRIMED, (), second)):
        warm = engine.ask(PROMPT, policy)
        assert warm.outcomes == ["hit"]
        for answer in (cold, warm):
            assert error(checkpoints, answer, PROMPT, primer) < EXACT
            assert error(checkpoints, answer, PROMPT, () if primer else PRIMER) > 100 * EXACT
    engine.assert_back_to_start()


def test_heads_are_not_continued_from_the_other_way(bench: Make) -> None:
    head = [live(3, 2), SEGMENT, replace(live(9, 3), ends_message=True)]
    engine = bench("qwen", primer=PRIMER)
    engine.ask([*head, live(2, 4)])
    assert min(engine.ask([*head, live(3, 5)], UNPRIMED).logits) == 0
    assert min(engine.ask([*head, live(3, 6)]).logits) == min(engine.ask([*head, live(3, 7)], UNPRIMED).logits) == 52


# -- policies --------------------------------------------------------------------------------------------------------

EDGES: dict[str, tuple[dict[str, Any], int | None]] = {
    "tail-seam": ({"tail_seam": 5}, None),
    "seam-every": ({"seam_every": 16}, None),
    "wide": ({"seam": 20}, None),
    "none": ({"seam": 0}, None),
    "share": ({"seam_share": 0.5}, None),
    "own": ({}, 20),
}


@pytest.mark.parametrize("name", ["qwen", "minimax-partial"])
@pytest.mark.parametrize("edges", EDGES)
def test_all_seams_behind_a_primer(edges: str, name: str, bench: Make) -> None:
    """Against an engine that encodes primer and segment as one text, and gives of it what belongs to the segment."""
    changes, own = EDGES[edges]
    policy, text = POLICY.with_(**changes), Piece(SEGMENT.ids, Segment("text", seam=own))
    engine = bench(name, primer=PRIMER)
    engine.ask([live(3, 2), text, live(4, 3)], policy)
    plan = make([text, live(3, 9)], policy, engine.engine.runner.identity)
    for span in plan.interiors:
        ids, seam = (*PRIMER, *plan.ids_of(span)), len(PRIMER) + span.seam
        one = Piece(ids, Segment("primer and text"))
        fresh, whole = bench(name), POLICY.with_(seam=seam)
        fresh.ask([one, live(3, 9)], whole)
        expected, found = fresh.contents(one, whole), _held(engine, span.key)
        assert found.keys() == expected.keys()
        assert max(relative(found[part], expected[part]) for part in found) < EXACT
        shifted = Piece((*ids[1:], 5), Segment("shifted"))
        fresh.ask([shifted, live(3, 9)], whole)
        expected = fresh.contents(shifted, whole)
        assert max(relative(found[part], expected[part]) for part in found) > 100 * EXACT
    assert len({span.key for span in plan.interiors}) == len(plan.interiors)


def _held(engine: Bench, key: bytes) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "key", lambda piece, policy, place: key)
        return engine.contents(SEGMENT)


# -- growth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "minimax-partial"])
def test_a_text_that_grew_is_continued_behind_its_primer(name: str, bench: Make) -> None:
    engine, fresh, plain = (bench(name, primer=primer) for primer in (PRIMER, PRIMER, ()))
    engine.ask([live(6, 5), note(33), live(7, 6)])
    pieces = [live(6, 5), note(60), live(7, 6)]
    grown = engine.ask(pieces)
    assert grown.reasons[0].startswith("grown") and grown.report.computed_tokens == 13 + 8 + 8 + 27
    for one in (fresh, plain):
        one.ask(pieces)
    found, expected, other = (one.contents(note(60)) for one in (engine, fresh, plain))
    assert max(relative(found[part], expected[part]) for part in expected) < EXACT
    assert max(relative(found[part], other[part]) for part in other) > 100 * EXACT
    engine.assert_back_to_start()


@pytest.mark.parametrize(("before", "after"), [(POLICY, UNPRIMED), (UNPRIMED, POLICY)], ids=["off", "on"])
def test_a_text_that_grew_is_not_continued_behind_another(
    before: Policy, after: Policy, bench: Make, monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints
) -> None:
    pieces, primer = [live(6, 5), note(60), live(7, 6)], PRIMER if after.primed else ()

    def asked() -> Answer:
        engine = bench("qwen", primer=PRIMER)
        engine.ask([live(6, 5), note(33), live(7, 6)], before)
        return engine.ask(pieces, after)

    sound = asked()
    assert not sound.reasons[0].startswith("grown") and error(checkpoints, sound, pieces, primer) < EXACT
    base = Lookup._base
    monkeypatch.setattr(Lookup, "_base", lambda *args: base(*args[:2], _behind_that(*args)))
    spoiled = asked()
    assert spoiled.reasons[0].startswith("grown") and error(checkpoints, spoiled, pieces, primer) > 100 * EXACT


def _behind_that(lookup: Lookup, request: Request, span: Interior) -> Interior:
    """A span that says to be encoded behind what the last one of its name was."""
    segment, primer = request.plan.segments[span.number].segment, BEHIND.primers[0]
    was_behind = lookup.history.previous(segment, primer.digest) is not None
    return replace(span, primer=primer if was_behind else None)

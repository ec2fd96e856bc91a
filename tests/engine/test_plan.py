"""The plan is a function of prompt and policy: spans, keys and marks, with nothing of what is cached."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.engine import plan
from hypic.engine.plan import Ids, Interior, Piece, Plan, Row
from hypic.engine.segment import Identity, Label
from hypic.errors import PromptError
from hypic.types import Policy, Segment

IDENTITY = Identity("model", "torch.float32")
POLICY = Policy(min_segment_tokens=0)


def text(*ids: int, ends: bool = False) -> Piece:
    return Piece(ids, None, ends)


def document(*ids: int, ends: bool = False, **labels: str) -> Piece:
    return Piece(ids, Segment("text", **labels), ends)  # type: ignore[arg-type]


def make(*pieces: Piece, policy: Policy = POLICY, identity: Identity = IDENTITY) -> Plan:
    return plan.make(pieces, policy, identity)


def shown(made: Plan) -> list[tuple[str, int, int]]:
    return [(type(span).__name__, span.start, span.stop) for span in made.spans]


LONG = tuple(range(100, 120))


def test_rows_are_maximal_and_interiors_are_segments_without_their_seams() -> None:
    made = make(text(1, 2), text(3), document(*LONG), document(*LONG), text(4), document(*LONG), text(5, 6))
    assert shown(made) == [
        ("Row", 0, 11),
        ("Interior", 11, 23),
        ("Row", 23, 31),
        ("Interior", 31, 43),
        ("Row", 43, 52),
        ("Interior", 52, 64),
        ("Row", 64, 66),
    ]
    origins = [span.origin for span in made.spans if isinstance(span, Interior)]
    assert origins == [3, 23, 44] == [segment.origin for segment in made.segments]
    assert made.ids == (1, 2, 3, *LONG, *LONG, 4, *LONG, 5, 6)


@pytest.mark.parametrize(
    ("num_tokens", "seam", "shortest", "is_cached"),
    [(8, 8, 0, False), (9, 8, 0, True), (31, 8, None, False), (32, 8, None, True), (1, 0, 0, True), (1, 0, None, True)],
)
def test_what_is_too_short_is_live(num_tokens: int, seam: int, shortest: int | None, is_cached: bool) -> None:
    policy = Policy(seam=seam, min_segment_tokens=shortest)
    made = make(document(*range(num_tokens)), text(1), policy=policy)
    assert any(isinstance(span, Interior) for span in made.spans) == is_cached
    assert (made.segments[0].key is not None) == is_cached
    assert made.segments[0].reason.startswith("" if is_cached else f"too short: {num_tokens} tokens")


def test_the_last_token_of_a_prompt_is_always_run() -> None:
    made = make(text(1), document(*LONG))
    assert shown(made) == [("Row", 0, 21)] and made.segments[0].reason == "no text after it"
    assert shown(make(text(1), document(*LONG), text(), document()))[-1][0] == "Row"


@pytest.mark.parametrize(("reuse", "reason"), [("none", "cache off"), ("prefix", "prefix reuse only")])
def test_other_kinds_of_reuse_cache_no_segment(reuse: str, reason: str) -> None:
    made = make(text(1), document(*LONG), text(2), policy=Policy(reuse=reuse))  # type: ignore[arg-type]
    assert shown(made) == [("Row", 0, 22)]
    assert [(s.key, s.reason) for s in made.segments] == [(None, reason)]
    assert len(made.marks) == (1 if reuse == "prefix" else 0)


def test_nothing_to_plan_is_refused() -> None:
    for pieces in ([], [text()], [document()]):
        with pytest.raises(PromptError, match="no token"):
            make(*pieces)


# -- identity --------------------------------------------------------------------------------------------------------


def keys(made: Plan) -> list[bytes | None]:
    return [segment.key for segment in made.segments]


def test_a_key_depends_on_tokens_policy_and_namespace_but_not_on_place_or_name() -> None:
    (key,) = keys(make(document(*LONG), text(1)))
    assert keys(make(text(9, 8), document(*LONG, name="n", source="s", kind="skill"), text(1))) == [key]
    assert keys(make(document(*LONG), text(1), policy=POLICY.with_(compose="last", rotate=False))) == [key]
    different = [
        make(document(*LONG, 7), text(1)),
        make(document(*LONG, namespace="t"), text(1)),
        make(document(*LONG), text(1), policy=POLICY.with_(seam=4)),
        make(document(*LONG), text(1), policy=POLICY.with_(deterministic=True)),
        make(document(*LONG), text(1), identity=Identity("other", "torch.float32")),
    ]
    assert len({key, *(keys(made)[0] for made in different)}) == 6


# -- marks -----------------------------------------------------------------------------------------------------------


def marks(made: Plan) -> list[int]:
    return [mark.position for mark in made.marks]


def test_marks_stand_at_message_ends_behind_rows() -> None:
    made = make(text(1, ends=True), text(2, 3), document(*LONG, ends=True), text(4, ends=True), text(5, ends=True))
    assert marks(made) == [1, 24], "none behind an interior, none behind the whole prompt"


def test_borders_inside_live_text_do_not_enter_a_mark() -> None:
    one = make(text(1, 2, 3, 4, ends=True), text(9)).marks[0]
    for pieces in ([text(1), text(2, 3), text(4, ends=True)], [text(1, 2, ends=True), text(3, 4, ends=True)]):
        assert make(*pieces, text(8)).marks[-1] == one


def test_a_live_segment_is_live_text_to_a_mark_and_a_cached_one_is_not() -> None:
    as_text = make(text(1), text(*LONG), text(2, ends=True), text(9)).marks[0].digest
    too_short = make(text(1), document(*LONG), text(2, ends=True), text(9), policy=Policy()).marks[0].digest
    cached = make(text(1), document(*LONG), text(2, ends=True), text(9)).marks[0].digest
    assert as_text == too_short != cached


def test_what_changes_a_running_state_changes_its_mark() -> None:
    def digest(policy: Policy = POLICY, identity: Identity = IDENTITY, **labels: str) -> bytes:
        pieces = [text(1), document(*LONG, **labels), text(2, ends=True), text(9)]
        return make(*pieces, policy=policy, identity=identity).marks[0].digest

    policies = [POLICY, POLICY.with_(seam=4), POLICY.with_(compose="last"), POLICY.with_(compose="addition")]
    policies += [POLICY.with_(rotate=False), POLICY.with_(deterministic=True), POLICY.with_(reuse="prefix")]
    digests = [digest(policy) for policy in policies]
    digests += [digest(namespace="t"), digest(identity=Identity("other", "torch.float32"))]
    assert len(set(digests)) == len(digests)
    assert digest(name="n", source="s") == digest()


def test_the_digest_goes_on_over_generated_tokens() -> None:
    head = [text(1, 2), document(*LONG), text(3)]
    made = make(*head)
    assert made.digest_after([7, 8]) == make(*head, text(7, 8, ends=True), text(9)).marks[-1].digest
    assert made.digest_after([7]) != made.digest_after([7, 8])
    assert made.digest_after([7, 8]) == made.digest_after((7, 8)), "asking leaves no trace"


def private(*ids: int, ends: bool = False, spaces: str = "t") -> Piece:
    return Piece(ids, None, ends, frozenset(spaces))


def test_a_mark_carries_the_namespaces_of_what_stands_before_it_and_no_others() -> None:
    plain = make(text(1, 2, ends=True), text(3, 4, ends=True), text(9)).marks
    later = make(text(1, 2, ends=True), private(3, 4, ends=True), text(9)).marks
    assert later[0] == plain[0] and later[1] != plain[1]
    other = make(text(1, 2, ends=True), private(3, 4, ends=True, spaces="u"), text(9)).marks
    both = make(text(1, 2, ends=True), private(3, 4, ends=True, spaces="tu"), text(9)).marks
    assert len({marks[1].digest for marks in (plain, later, other, both)}) == 4
    live = make(text(1, 2, ends=True), document(3, 4, namespace="t", ends=True), text(9)).marks
    assert live == later, "a segment that is run live is live text of its namespace"


def test_where_a_namespace_begins_leaves_no_trace() -> None:
    one = make(text(1), private(2, 3, ends=True), text(9)).marks[-1]
    assert make(private(1, 2), text(3, ends=True), text(9)).marks[-1] == one
    assert make(private(1, 2, 3), text(9)).digest_after([]) != make(text(1, 2, 3), text(9)).digest_after([])
    assert (
        make(private(1, 2, 3)).digest_after([7]) == make(text(1), private(2, 3, 7, ends=True), text(9)).marks[-1].digest
    )


def test_an_answer_is_looked_for_one_token_earlier_too() -> None:
    """One that was cut off ended before its last token was run; no snapshot is taken there."""
    answer = Piece((5, 6, 7), None, True, is_answer=True)
    made = make(text(1, 2), answer, text(9))
    assert [(mark.position, mark.is_taken) for mark in made.marks] == [(4, False), (5, True)]
    assert made.marks[0].digest == make(text(1, 2)).digest_after([5, 6])
    assert made.marks[1].digest == make(text(1, 2)).digest_after([5, 6, 7])
    assert marks(make(text(1), Piece((5,), None, True, is_answer=True), text(9))) == [2]


def test_labels_are_those_of_all_texts_of_a_head() -> None:
    made = make(text(1), document(*LONG, name="a"), private(2, 3), document(*LONG, source="b", namespace="u"), text(4))
    assert made.labels(1) == set() and made.labels(2) == {Label("a")}
    assert made.labels(23) == {Label("a"), Label(namespace="t")}
    assert made.labels(len(made.ids)) == {Label("a"), Label(namespace="t"), Label(None, "b", "u")}


def test_a_continued_plan_ends_with_what_was_generated() -> None:
    made = make(text(1, 2), document(*LONG), text(3))
    assert made.continued([]) is made
    longer = made.continued([7, 8])
    assert longer.ids == (*made.ids, 7, 8) and shown(longer)[:-1] == shown(made)[:-1]
    assert longer.spans[-1] == Row(22, 25) and longer.segments == made.segments


# -- laws ------------------------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 300), max_size=40).map(tuple)
PIECES = st.lists(st.builds(Piece, IDS, st.sampled_from([None, Segment("text")]), st.booleans()), max_size=8)
POLICIES = st.builds(
    Policy,
    reuse=st.sampled_from(["segments", "prefix", "none"]),
    seam=st.sampled_from([0, 1, 4, 8, 32]),
    min_segment_tokens=st.sampled_from([None, 0, 10]),
    tail_seam=st.sampled_from([0, 1, 5]),
    seam_share=st.sampled_from([0.0, 0.3]),
    live_last=st.sampled_from([0, 1]),
)


@settings(deadline=None)
@given(PIECES, POLICIES)
def test_spans_cover_the_prompt_once_and_in_order(pieces: Sequence[Piece], policy: Policy) -> None:
    flat = tuple(i for piece in pieces for i in piece.ids)
    if not flat:
        return
    made = make(*pieces, policy=policy)
    assert made.ids == flat
    assert [i for span in made.spans for i in range(span.start, span.stop)] == list(range(len(flat)))
    assert all(span.stop > span.start for span in made.spans)
    kinds = [type(span) for span in made.spans]
    assert kinds[-1] is Row and (Row, Row) not in list(zip(kinds, kinds[1:], strict=False))
    segments = [piece.ids for piece in pieces if piece.segment is not None and piece.ids]
    assert [segment.ids for segment in made.segments] == segments
    for span in made.spans:
        if isinstance(span, Interior):
            segment = made.segments[span.number]
            wanted = policy.interiors(len(segment.ids))[segment.keys.index(span.key)]
            assert (span.start - segment.origin, span.stop - segment.origin) == wanted
    assert marks(made) == sorted(marks(made)) and all(0 < position < len(flat) for position in marks(made))
    assert make(*pieces, policy=policy).marks == made.marks


SCRIPT = """
from hypic.engine import plan
from hypic.engine.plan import Piece
from hypic.engine.segment import Identity
from hypic.types import Policy, Segment
spaces = frozenset(f"space {n}" for n in range(20))
document = Piece(tuple(range(50)), Segment("x", namespace="alice"))
pieces = [Piece((1, 2), None, False, spaces), document, Piece((3,), None, True)]
made = plan.make([*pieces, Piece((4,))], Policy(), Identity("model", "torch.float32"))
print(made.segments[0].key.hex(), [mark.digest.hex() for mark in made.marks], made.digest_after([7]).hex())
"""


def test_another_process_with_another_hash_seed_has_the_same_keys() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    run = [sys.executable, "-c", SCRIPT]
    seen = {subprocess.check_output(run, env={**environment, "PYTHONHASHSEED": seed}) for seed in ("1", "2", "77")}
    assert len(seen) == 1


@pytest.mark.parametrize("lengths", [(), (3,), (0, 4, 0, 1, 7), (2, 2, 2)], ids=str)
def test_ids_of_runs_are_those_of_one_tuple(lengths: tuple[int, ...]) -> None:
    numbers = iter(range(100))
    runs = [tuple(next(numbers) for _ in range(length)) for length in lengths]
    flat = tuple(i for run in runs for i in run)
    assert len(Ids(runs)) == len(flat) and list(Ids(runs)) == list(flat) and Ids(runs) == flat == Ids([flat])
    assert hash(Ids(runs)) == hash(flat) and Ids([*runs, (1,)]) != Ids(runs)
    bounds = [None, *range(-len(flat) - 1, len(flat) + 2)]
    for start, stop in itertools.product(bounds, bounds):
        assert Ids(runs)[start:stop] == flat[start:stop]
    assert Ids(runs)[::-1] == flat[::-1] and [Ids(runs)[i] for i in range(len(flat))] == list(flat)

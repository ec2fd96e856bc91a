"""Interiors between seams have keys of their own, and values of seams that cannot be right are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hypic.engine.plan import Piece, make
from hypic.engine.segment import Identity
from hypic.errors import ConfigError, PromptError
from hypic.types import Policy, Segment
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg

Make = Callable[..., Bench]


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

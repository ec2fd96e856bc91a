"""What segments and links cost: found from steps and transfers that were measured, and said exactly."""

from __future__ import annotations

from typing import Any

import pytest

from hypic.engine.parallel.assign import Member, alike, longest_first, makespan_s
from hypic.engine.parallel.cost import UNMEASURED_LINK, EncodeCost, LinkCost, Pace, from_json, to_json
from tests.engine.parallel.costs import ENCODE, LAUNCHED, LINK, jobs


def test_a_cost_is_found_again_from_its_measurements() -> None:
    tokens = (64, 256, 1024, 2048)
    found = EncodeCost.fit([(n, ENCODE.seconds(n)) for n in tokens])
    assert [found.seconds(n) for n in (100, 5000)] == pytest.approx([ENCODE.seconds(n) for n in (100, 5000)], rel=1e-6)
    noisy = EncodeCost.fit([(64, 0.02), (256, 0.019), (1024, 0.05)])
    assert min(noisy.step_s, noisy.token_s, noisy.pair_s) >= 0 and noisy.seconds(1024) == pytest.approx(0.05, rel=0.2)
    assert EncodeCost.fit([(64, 0.02)]).seconds(64) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="at least one"):
        EncodeCost.fit([])


def test_steps_that_wait_for_the_host_say_nothing_of_tokens() -> None:
    found = EncodeCost.fit(LAUNCHED).batched(16384)
    assert 0.07 < found.floor_s < 0.085 and found.batch_tokens == 16384
    for tokens, seconds in LAUNCHED:
        assert found.together_s(tokens) == pytest.approx(seconds, rel=0.15)
    assert found.seconds(64) == found.seconds(1024) == found.floor_s
    assert found.together_s([1024] * 32) == pytest.approx(2 * 0.2353, rel=0.01), "two steps of the device's time"
    assert found.together_s([64] * 2) == found.floor_s, "one launch"
    straight = EncodeCost.fit([(tokens, ENCODE.together_s(tokens)) for tokens, _ in LAUNCHED])
    assert straight.floor_s == 0.0, "where tokens cost from the first one on, there is none"
    unclear = EncodeCost.fit([(64, 0.08), (1024, 0.08), (4096, 0.08)])
    assert unclear.floor_s == 0.0 and unclear.seconds(2048) == pytest.approx(0.08, rel=0.1)


@pytest.mark.parametrize("last", [(1.3, 1.45), (1.45, 2.9)], ids=["none", "one"])
def test_where_few_steps_take_more_than_launches_tokens_still_cost_something(last: tuple[float, float]) -> None:
    """Noise spreads what is launched; what lies just above it is too little to fit."""
    measured = [(64, 1.0), (256, 1.2), (1024, 1.22), (2048, 1.24), *zip((4096, 8192), last, strict=True)]
    found = EncodeCost.fit(measured)
    assert found.floor_s == 0.0 and found.marginal_s(8192) > 0.1


def test_a_cost_is_said_and_understood() -> None:
    assert from_json(to_json(ENCODE)) == ENCODE
    broken: list[dict[str, Any]] = [{}, {**to_json(ENCODE), "scale": "x"}, {**to_json(ENCODE), "token_s": -1.0}]
    broken += [{**to_json(ENCODE), "batch_tokens": value} for value in (0, 0.5, float("inf"))]
    for fields in broken:
        with pytest.raises(ValueError, match="cost|batch_tokens"):
            from_json(fields)


def test_steps_that_hold_several_segments_tell_a_step_from_its_tokens() -> None:
    """64 to 1,024 tokens take as long as a step's launches: only larger steps show what a token takes."""
    steps = [[64], [256], [1024], [1024] * 4, [1024] * 16]
    truth = EncodeCost(0.19, 4.8e-6, batch_tokens=16_384)
    found = EncodeCost.fit([(tokens, truth.together_s(tokens)) for tokens in steps])
    assert found.together_s([1024] * 8) == pytest.approx(truth.together_s([1024] * 8), rel=1e-6)


def test_a_batch_is_as_large_as_makes_its_step_cheap_and_no_larger() -> None:
    assert EncodeCost(0.19, 4.8e-6).batched(16_384).batch_tokens == 16_384  # bound by the host
    assert EncodeCost(0.19, 4.8e-6).batched(2048).batch_tokens == 2048
    assert EncodeCost(0.001, 1e-3).batched(16_384).batch_tokens == 4096  # bound by the device at any size
    found = EncodeCost(0.016, 2e-5).batched(65_536)
    assert found.step_s <= 0.1 * found.together_s([found.batch_tokens]) and found.batch_tokens == 8192


def test_what_several_segments_take_is_counted_in_whole_steps() -> None:
    cost = EncodeCost(1.0, 1e-3, batch_tokens=1000)
    assert cost.together_s([]) == 0 and cost.together_s([400, 600]) == pytest.approx(2.0)
    assert cost.together_s([400, 601]) == pytest.approx(3.001)
    half = [Member(rank, cost, LinkCost(0, 0)) for rank in (0, 1)]
    placed = longest_first(jobs(500, 500, 500, 500), half, 0)
    assert makespan_s(placed) == pytest.approx(2.0)


def test_a_pace_follows_steps_of_segments_and_no_others() -> None:
    pace = Pace(ENCODE)
    for _ in range(20):
        pace.ran([500, 500], 800, 9.0)  # most of it is a request's own
    assert pace.cost == ENCODE and pace.last_s > 0
    truth_s = ENCODE.seconds(8) + 2 * ENCODE.marginal_s(500)
    for seconds in (90 * truth_s, 30 * truth_s, *[3 * truth_s] * 4):  # the first steps compile
        pace.ran([500, 500], 8, seconds)
        assert pace.cost.scale == 1.0  # a few steps say nothing
    pace.ran([500, 500], 8, 3 * truth_s)
    assert pace.cost.scale == pytest.approx(3.0)
    for seconds in (100 * truth_s, truth_s / 100, *[3 * truth_s] * 7):  # nor do a few hiccups, then or later
        pace.ran([500, 500], 8, seconds)
    assert pace.cost.scale == pytest.approx(3.0)
    assert pace.cost.spread == pytest.approx(1.0)
    for seconds in [1.5 * truth_s, truth_s / 1.5] * 5:
        pace.ran([500, 500], 8, seconds)
    assert pace.cost.spread > 1.4  # they do not agree on anything


def test_workers_of_a_kind_cost_the_same_unless_their_steps_show_otherwise() -> None:
    def member(rank: int, factor: float, scale: float = 1.0, spread: float = 1.1, kind: str = "gpu") -> Member:
        return Member(rank, EncodeCost(0.016 * factor, 2e-5 * factor, 0.0, scale, spread), LINK, kind=kind)

    def costs(*members: Member) -> list[float]:
        return [member.encode.together_s([1000]) / 0.036 for member in alike(members)]

    # What was measured at the start: nobody departs.
    assert costs(*(member(rank, factor, 1.0, 0.0) for rank, factor in enumerate((1.0, 1.4, 3.0)))) == pytest.approx(
        [1.4, 1.4, 1.4]
    )
    # Observed ones count alone; near ones are one.
    assert costs(member(0, 1.0), member(1, 3.0, 1.0, 0.0)) == pytest.approx([1.0, 1.0])
    assert costs(member(0, 1.0), member(1, 1.0, 1.2), member(2, 1.0, 0.9)) == pytest.approx([1.0, 1.0, 1.0])
    # One is slow, if its steps agree on it.
    assert costs(member(0, 1.0), member(1, 1.0, 2.0), member(2, 1.0)) == pytest.approx([1.0, 2.0, 1.0])
    assert costs(member(0, 1.0), member(1, 1.0, 2.0, 1.8), member(2, 1.0)) == pytest.approx([1.0, 1.0, 1.0])
    others = [member(0, 1.0, kind=""), member(1, 3.0, kind=""), member(2, 5.0, kind="cpu")]
    assert alike(others) == others


def test_a_link_is_what_its_first_transfer_shows_and_follows_the_others() -> None:
    large = 143 * 2**20
    fast = UNMEASURED_LINK.observed(large, large / 1e11)
    assert fast.seconds(large) == pytest.approx(large / 1e11)
    for _ in range(40):
        fast = fast.observed(large, large / 5e10)
    assert fast.seconds(large) == pytest.approx(large / 5e10, rel=0.01)
    assert fast.observed(large, 100.0).seconds(large) < 3 * fast.seconds(large)  # one slow transfer is no slow link
    assert UNMEASURED_LINK.observed(4096, 1e-4).seconds(4096) == pytest.approx(1e-4)

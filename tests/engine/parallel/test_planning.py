"""Costs, the planner and its simulator: pure, so everything can be said exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hypic.engine.parallel.assign import PLANNERS, Job, Member, alike, elsewhere, longest_first, makespan_s, round_robin
from hypic.engine.parallel.cold import cold
from hypic.engine.parallel.cost import (
    NO_LINK,
    UNMEASURED_LINK,
    EncodeCost,
    EntrySize,
    LinkCost,
    Pace,
    from_json,
    to_json,
)
from hypic.engine.parallel.simulate import Fleet, Trace, cold_request_s, lengths, play, uneven_ratio

ENCODE = EncodeCost(step_s=0.016, token_s=2e-5, pair_s=2e-10)
LINK = LinkCost(2e-4, 5e-12)
SIZE = EntrySize(123 * 2**20, 20 * 2**10)


def members(count: int, **changes: float) -> list[Member]:
    return [Member(rank, ENCODE, LINK, **changes) for rank in range(count)]  # type: ignore[arg-type]


def jobs(*tokens: int, holders: frozenset[int] = frozenset()) -> list[Job]:
    return [Job(number, count, SIZE.of(count), holders) for number, count in enumerate(tokens)]


def cold_s(
    wanted: list[Job], believed: list[Member], truth: list[EncodeCost], planner: str, steals: bool = True
) -> float:
    """Where only what encoding costs is believed wrongly."""
    true = [replace(member, encode=cost) for member, cost in zip(believed, truth, strict=True)]
    return cold(wanted, believed, true, planner, steals).seconds


def test_a_cost_is_found_again_from_its_measurements() -> None:
    tokens = (64, 256, 1024, 2048)
    found = EncodeCost.fit([(n, ENCODE.seconds(n)) for n in tokens])
    assert [found.seconds(n) for n in (100, 5000)] == pytest.approx([ENCODE.seconds(n) for n in (100, 5000)], rel=1e-6)
    noisy = EncodeCost.fit([(64, 0.02), (256, 0.019), (1024, 0.05)])
    assert min(noisy.step_s, noisy.token_s, noisy.pair_s) >= 0 and noisy.seconds(1024) == pytest.approx(0.05, rel=0.2)
    assert EncodeCost.fit([(64, 0.02)]).seconds(64) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="at least one"):
        EncodeCost.fit([])


# Seconds that steps of these segments took on an H200, whose host took 70 to 85 ms to launch any of them.
LAUNCHED = (
    ([64], 0.0853), ([256], 0.0857), ([1024], 0.0699), ([1024] * 4, 0.0739), ([1024] * 8, 0.1219),
    ([4096] * 2, 0.1246), ([1024] * 16, 0.2353),
)  # fmt: skip


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


def test_a_plan_halves_what_the_device_does_and_not_the_launches() -> None:
    """Taken for straight, the same measurements make tokens look cheap, and launches what has to be shared out. Below
    the floor tokens cost nothing: shares may differ as far as their steps take the same."""
    cost = EncodeCost.fit(LAUNCHED).batched(16384)
    drawn = np.random.default_rng(3).lognormal(-0.32, 0.8, 32)
    wanted = jobs(*(max(64, int(1024 * one)) for one in drawn))
    placed = longest_first(wanted, [Member(0, cost, NO_LINK), Member(1, cost, LINK)], 0)
    shares = [sum(place.job.num_tokens for place in placed if place.rank == rank) for rank in range(2)]
    took_s = [cost.together_s([share]) for share in shares]
    assert max(took_s) < 1.03 * cost.together_s([sum(shares) // 2]) < cost.together_s([sum(shares) * 2 // 3])


def test_a_step_of_little_takes_what_any_step_takes() -> None:
    """Costs of a geometry whose worker, planned by tokens alone, was given two segments more than fill two steps."""
    cost = EncodeCost(0.0091, 5.386e-6, batch_tokens=16384, floor_s=0.0385)
    assert cost.together_s([1024] * 33) == pytest.approx(cost.together_s([1024] * 32) + 0.0385)
    members = [Member(0, cost, NO_LINK, receive_s=1.75e-3), Member(1, cost, LINK, send_s=1.93e-3)]
    placed = longest_first(jobs(*[1024] * 64), members, 0)
    assert [sum(place.rank == rank for place in placed) for rank in range(2)] == [32, 32]


@pytest.mark.parametrize("last", [(1.3, 1.45), (1.45, 2.9)], ids=["none", "one"])
def test_where_few_steps_take_more_than_launches_tokens_still_cost_something(last: tuple[float, float]) -> None:
    """Noise spreads what is launched; what lies just above it is too little to fit."""
    measured = [(64, 1.0), (256, 1.2), (1024, 1.22), (2048, 1.24), *zip((4096, 8192), last, strict=True)]
    found = EncodeCost.fit(measured)
    assert found.floor_s == 0.0 and found.marginal_s(8192) > 0.1


def test_the_longest_come_first_though_all_are_below_the_floor() -> None:
    cost = EncodeCost(0.0, 1.4e-5, floor_s=0.075, batch_tokens=16384)
    tokens = [*[256] * 16, *[2048] * 3]
    wanted = [Job(number, count, 1000) for number, count in enumerate(tokens)]
    placed = longest_first(wanted, [Member(0, cost, NO_LINK), Member(1, cost, LINK)], 0)
    assert [place.job.num_tokens for place in placed[:3]] == [2048] * 3
    assert makespan_s(placed) < 0.08  # 0.086 in the order in which they stand


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


def test_even_segments_are_spread_evenly() -> None:
    placed = longest_first(jobs(*[1024] * 16), members(4), 0)
    counts = [sum(place.rank == rank for place in placed) for rank in range(4)]
    assert counts == [4, 4, 4, 4]
    alone = makespan_s(longest_first(jobs(*[1024] * 16), members(1), 0))
    assert alone / makespan_s(placed) > 3.2


def test_every_job_is_placed_once_by_every_planner() -> None:
    for name, planner in PLANNERS.items():
        for seed in range(20):
            random = np.random.default_rng(seed)
            tokens = [int(n) for n in random.integers(16, 4000, random.integers(1, 40))]
            busy = [Member(rank, ENCODE, LINK, float(random.random())) for rank in range(int(random.integers(1, 9)))]
            placed = planner(jobs(*tokens), busy, 0)
            assert sorted(place.job.number for place in placed) == list(range(len(tokens))), name
            assert {place.rank for place in placed} <= {member.rank for member in busy}


def test_queued_work_is_counted() -> None:
    busy = [Member(0, ENCODE, LINK), Member(1, ENCODE, LINK, queued_s=10.0), Member(2, ENCODE, LINK)]
    assert {place.rank for place in longest_first(jobs(*[512] * 6), busy, 0)} == {0, 2}
    assert {place.rank for place in round_robin(jobs(*[512] * 6), busy, 0)} == {0, 1, 2}
    assert {place.rank for place in elsewhere(jobs(*[512] * 6), busy, 0)} == {1, 2}
    assert {place.rank for place in elsewhere(jobs(512), busy[:1], 0)} == {0}


def test_what_a_step_makes_leaves_when_it_ends() -> None:
    """16 entries with a way of 10 ms each come 160 ms after their step, not 10: a plan knows it and gives less away."""
    cost = EncodeCost(0.02, 1.5e-5, batch_tokens=16_384)
    near, far = (Member(1, cost, LinkCost(way_s, 0.0)) for way_s in (0.0, 0.01))
    for wanted in (jobs(*[1024] * 64), jobs(*[2400] * 11)):
        for name in ("longest-first", "round-robin"):
            placed = PLANNERS[name](wanted, [Member(0, cost, NO_LINK), far], 0)
            played = cold_s(wanted, [Member(0, cost, NO_LINK), far], [cost] * 2, name, steals=False)
            assert makespan_s(placed) == pytest.approx(played, rel=0.06), name
    even = makespan_s(round_robin(jobs(*[1024] * 64), [Member(0, cost, NO_LINK), near], 0))
    late = makespan_s(round_robin(jobs(*[1024] * 64), [Member(0, cost, NO_LINK), far], 0))
    assert late - even == pytest.approx(0.16)
    placed = longest_first(jobs(*[1024] * 64), [Member(0, cost, NO_LINK), far], 0)
    assert makespan_s(placed) < late - 0.03 and sum(place.rank == 1 for place in placed) < 32


def test_a_slow_link_keeps_work_at_home() -> None:
    slow = [Member(0, ENCODE, LINK), Member(1, ENCODE, LinkCost(5.0, 1e-6))]
    assert {place.rank for place in longest_first(jobs(*[256] * 8), slow, 0)} == {0}


def test_a_holder_sends_unless_it_is_too_busy() -> None:
    held = jobs(2048, holders=frozenset({1}))
    (place,) = longest_first(held, members(3), 0)
    assert place.is_fetch and place.rank == 1
    far = [Member(0, ENCODE, LINK), Member(1, ENCODE, LinkCost(1.0, 1e-6)), Member(2, ENCODE, LINK)]
    (place,) = longest_first(held, far, 0)
    assert not place.is_fetch and place.rank == 0


def test_a_combiner_must_be_there() -> None:
    with pytest.raises(ValueError, match="rank 7"):
        longest_first(jobs(100), members(2), 7)


def test_uneven_segments_gain_from_longest_first() -> None:
    """32 lognormal(0.8) segments of 1,024 tokens on 8 workers, median of 20 seeds."""
    fleet = Fleet(8, ENCODE, LINK, SIZE)
    assert uneven_ratio(fleet, 32, 1024, 0.8, 20) >= 1.4
    assert uneven_ratio(fleet, 32, 1024, 0.0, 5) == pytest.approx(1.0, abs=0.02)


def misjudged(cost: EncodeCost, count: int, random: np.random.Generator) -> list[Member]:
    """Workers that are equally fast, each with a measurement at the start that is wrong by up to 1.5, and with as wrong
    steps since, each by something else."""

    def wrong(seconds: float) -> float:
        return float(seconds * 1.5 ** random.uniform(-1, 1))

    found = []
    for rank in range(count):
        factor = wrong(1.0)
        pace = Pace(replace(cost, step_s=cost.step_s * factor, token_s=cost.token_s * factor))
        for _ in range(11):
            pace.ran([1024] * 4, 0, wrong(cost.together_s([1024] * 4)))
        found.append(Member(rank, pace.cost, LINK, kind="gpu"))
    return found


def ratios_of(cost: EncodeCost, count: int, kind: str = "gpu") -> list[float]:
    """Round robin's time over longest-first's for 32 lognormal(0.8) segments of 1,024 tokens, by seed."""
    found = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        wanted = jobs(*lengths(random, 32, 1024, 0.8))
        believed = [replace(member, kind=kind) for member in misjudged(cost, count, random)]
        times = [cold_s(wanted, believed, [cost] * count, name) for name in ("round-robin", "longest-first")]
        found.append(times[0] / times[1])
    return found


@pytest.mark.parametrize("count", [4, 8])
def test_longest_first_gains_by_costs_that_are_wrong(count: int) -> None:
    found = ratios_of(ENCODE, count)
    assert np.median(found) >= 1.15 and min(found) >= 0.95


@pytest.mark.parametrize("count", [2, 4, 8])
def test_longest_first_never_loses_much_by_costs_that_are_wrong(count: int) -> None:
    """Two workers leave it little to gain, and so do steps that take what they take, whatever they hold."""
    host_bound = [EncodeCost(0.19, 4.8e-6, batch_tokens=most) for most in (8192, 16_384)]
    assert min(min(ratios_of(cost, count)) for cost in (ENCODE, *host_bound)) >= 0.95


def test_it_would_lose_if_every_worker_were_believed() -> None:
    assert min(ratios_of(ENCODE, 2, kind="")) < 0.95


def test_an_idle_combiner_takes_back_what_a_slow_peer_has_not_begun() -> None:
    cost = EncodeCost(0.01, 1e-4, batch_tokens=4096)
    believed, truth = [Member(rank, cost, LINK, kind="cpu") for rank in (0, 1)], [cost, replace(cost, scale=4.0)]
    left, taken = (cold_s(jobs(*[512] * 64), believed, truth, "longest-first", steals) for steals in (False, True))
    assert taken < 0.75 * left
    # The other way: it is the combiner that is slow, and a peer has nothing to do.
    left, given = (
        cold_s(jobs(*[512] * 64), believed, truth[::-1], "longest-first", steals) for steals in (False, True)
    )
    assert given < 0.8 * left


def test_a_cold_request_scales_with_workers() -> None:
    seconds = [cold_request_s(Fleet(n, ENCODE, LINK, SIZE), [1024] * 64, "longest-first") for n in (1, 2, 4, 8)]
    assert seconds[0] / seconds[3] > 6.5 and seconds == sorted(seconds, reverse=True)


def test_a_fleet_of_1024_plays_a_bursty_trace() -> None:
    fleet = Fleet(1024, ENCODE, LINK, SIZE, combine_s=0.03, combine_segment_s=5e-4)
    played = play(fleet, Trace(100, rate_s=2000.0))
    assert len(played.ttft_s) == 100 and played.hits + played.fetched + played.encoded == 100 * 24
    assert 0.03 < played.percentile(0.5) < played.percentile(0.99) < 1.0
    assert play(fleet, Trace(100, rate_s=2000.0)) == played
    with pytest.raises(ValueError, match="1 to 1024"):
        Fleet(1025, ENCODE, LINK, SIZE)
    with pytest.raises(ValueError, match="planner"):
        play(fleet, Trace(1, 1.0), "random")


def test_round_robin_suffers_under_bursts() -> None:
    fleet = Fleet(16, ENCODE, LINK, SIZE, combine_s=0.03)
    clever, plain = (play(fleet, Trace(200, rate_s=60.0), name) for name in ("longest-first", "round-robin"))
    assert plain.percentile(0.9) > 1.4 * clever.percentile(0.9)


def test_failures_cost_recomputation_and_full_stores_forget() -> None:
    sound = Fleet(8, ENCODE, LINK, SIZE)
    trace = Trace(100, rate_s=20.0)
    failing = play(Fleet(8, ENCODE, LINK, SIZE, fail_rate=0.1), trace)
    assert failing.recomputed > 0 and failing.percentile(0.9) > play(sound, trace).percentile(0.9)
    small = play(Fleet(8, ENCODE, LINK, SIZE, capacity=30), trace)
    assert small.encoded > play(sound, trace).encoded


def test_lengths_are_lognormal_about_their_mean() -> None:
    drawn = lengths(np.random.default_rng(0), 20_000, 512, 0.8)
    assert np.mean(drawn) == pytest.approx(512, rel=0.03) and min(drawn) >= 16
    assert np.std(np.log(drawn)) == pytest.approx(0.8, rel=0.03)

"""Costs, the planner and its simulator: pure, so everything can be said exactly."""

from __future__ import annotations

import numpy as np
import pytest

from hypic.engine.parallel.assign import PLANNERS, Job, Member, elsewhere, longest_first, makespan_s, round_robin
from hypic.engine.parallel.cost import UNMEASURED_LINK, EncodeCost, EntrySize, LinkCost, Pace, from_json, to_json
from hypic.engine.parallel.simulate import Fleet, Trace, cold_request_s, lengths, play, uneven_ratio

ENCODE = EncodeCost(step_s=0.016, token_s=2e-5, pair_s=2e-10)
LINK = LinkCost(2e-4, 5e-12)
SIZE = EntrySize(123 * 2**20, 20 * 2**10)


def members(count: int, **changes: float) -> list[Member]:
    return [Member(rank, ENCODE, LINK, **changes) for rank in range(count)]


def jobs(*tokens: int, holders: frozenset[int] = frozenset()) -> list[Job]:
    return [Job(number, count, SIZE.of(count), holders) for number, count in enumerate(tokens)]


def test_a_cost_is_found_again_from_its_measurements() -> None:
    tokens = (64, 256, 1024, 2048)
    found = EncodeCost.fit([(n, ENCODE.seconds(n)) for n in tokens])
    assert [found.seconds(n) for n in (100, 5000)] == pytest.approx([ENCODE.seconds(n) for n in (100, 5000)], rel=1e-6)
    noisy = EncodeCost.fit([(64, 0.02), (256, 0.019), (1024, 0.05)])
    assert min(noisy.step_s, noisy.token_s, noisy.pair_s) >= 0 and noisy.seconds(1024) == pytest.approx(0.05, rel=0.2)
    assert EncodeCost.fit([(64, 0.02)]).seconds(64) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="at least one"):
        EncodeCost.fit([])


def test_a_cost_follows_what_is_observed_and_no_single_outlier() -> None:
    cost = ENCODE
    for _ in range(40):
        cost = cost.observed(cost.seconds(500), 2 * ENCODE.seconds(500))
    assert cost.seconds(500) == pytest.approx(2 * ENCODE.seconds(500), rel=0.01)
    assert ENCODE.observed(0.01, 1000.0).scale < 2
    assert from_json(to_json(cost)) == cost
    for broken in ({}, {**to_json(cost), "scale": "x"}, {**to_json(cost), "token_s": -1.0}):
        with pytest.raises(ValueError, match="cost"):
            from_json(broken)


def test_a_pace_follows_steps_of_segments_and_no_others() -> None:
    pace = Pace(ENCODE)
    pace.ran([500, 500], 800, 9.0)  # most of it is a request's own
    assert pace.cost == ENCODE and pace.last_s > 0
    truth_s = 3 * (ENCODE.seconds(8) + 2 * ENCODE.marginal_s(500))
    pace.ran([500, 500], 8, truth_s)
    assert 1.5 < pace.cost.scale < 2.0  # the first counts as much as the measurement at the start
    for _ in range(20):
        pace.ran([500, 500], 8, truth_s)
    assert pace.cost.scale == pytest.approx(3.0, rel=0.01)


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

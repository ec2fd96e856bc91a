"""The monoid of affine maps, and its scans against loops that go map by map."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hypic.engine.affine import Affine, Schedule, act, exclusive_scan, fold, identity

H, K, V = 2, 4, 3
TRANSITIONS = {"head": (H,), "diagonal": (H, K), "dense": (H, K, K)}
KINDS = st.sampled_from(list(TRANSITIONS))
SEEDS = st.integers(0, 2**31)
TOLERANCE = 1e-12


def random_maps(kind: str, num: int, seed: int) -> Affine:
    generator = torch.Generator().manual_seed(seed)
    transition = torch.randn(num, *TRANSITIONS[kind], generator=generator, dtype=torch.float64) * 0.7
    return Affine(transition, torch.randn(num, H, K, V, generator=generator, dtype=torch.float64))


def random_states(num: int, seed: int) -> Tensor:
    return torch.randn(num, H, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(transition: Tensor) -> Tensor:
    """Any kind of transition, ``[N, H, ...]``, as matrices ``[N, H, K, K]``."""
    eye = torch.eye(K, dtype=transition.dtype)
    if transition.ndim == 2:
        return transition[..., None, None] * eye
    return torch.diag_embed(transition) if transition.ndim == 3 else transition


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() < TOLERANCE * (1 + b.abs().max()))


def same(a: Affine, b: Affine) -> bool:
    return close(a.transition, b.transition) and close(a.end_state, b.end_state)


@given(KINDS, SEEDS)
def test_then_is_associative(kind: str, seed: int) -> None:
    a, b, c = (random_maps(kind, 5, seed + i) for i in range(3))
    assert same(a.then(b).then(c), a.then(b.then(c)))


@given(KINDS, SEEDS)
def test_the_identity_changes_nothing(kind: str, seed: int) -> None:
    maps = random_maps(kind, 5, seed)
    one = Affine(identity(maps.transition), torch.zeros_like(maps.end_state))
    assert same(one.then(maps), maps) and same(maps.then(one), maps)
    states = random_states(5, seed)
    assert close(one.apply(states), states)


@given(KINDS, SEEDS)
def test_then_is_one_map_after_the_other(kind: str, seed: int) -> None:
    a, b, states = random_maps(kind, 5, seed), random_maps(kind, 5, seed + 1), random_states(5, seed + 2)
    assert close(a.then(b).apply(states), b.apply(a.apply(states)))
    assert not close(a.then(b).apply(states), a.apply(b.apply(states)))


@given(KINDS, SEEDS)
def test_every_kind_is_the_dense_one_written_short(kind: str, seed: int) -> None:
    a, b, states = random_maps(kind, 5, seed), random_maps(kind, 5, seed + 1), random_states(5, seed + 2)
    wide_a, wide_b = Affine(dense(a.transition), a.end_state), Affine(dense(b.transition), b.end_state)
    expected = dense(a.transition) @ states + a.end_state
    assert close(a.apply(states), expected) and close(wide_a.apply(states), expected)
    assert close(act(a.transition, states), dense(a.transition) @ states)
    both, wide = a.then(b), wide_a.then(wide_b)
    assert close(dense(both.transition), wide.transition) and close(both.end_state, wide.end_state)


def test_identity_is_a_copy_that_may_be_written() -> None:
    like = torch.zeros(3, H, K, K)
    one = identity(like)
    one[0] = 5.0
    assert bool((one[1] == torch.eye(K)).all())


LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def laid_out(maps: list[Affine], schedule: Schedule, lengths: list[int]) -> Affine:
    """Maps by chain, put into the schedule's places."""
    transition = torch.full((schedule.num_places, *maps[0].transition.shape[1:]), torch.nan, dtype=torch.float64)
    end_state = torch.full((schedule.num_places, H, K, V), torch.nan, dtype=torch.float64)
    for chain, length in enumerate(lengths):
        places = torch.tensor(schedule.places(chain, length), dtype=torch.long)
        transition[places] = maps[chain].transition[:length]
        end_state[places] = maps[chain].end_state[:length]
    return Affine(transition, end_state)


@given(LENGTHS)
def test_a_schedule_gives_every_map_a_place_of_its_own(lengths: list[int]) -> None:
    schedule = Schedule.of(lengths)
    places = [place for chain, length in enumerate(lengths) for place in schedule.places(chain, length)]
    assert sorted(places) == list(range(sum(lengths))) and schedule.num_places == sum(lengths)
    assert sorted(schedule.chains) == list(range(len(lengths)))
    assert list(schedule.widths) == sorted(schedule.widths, reverse=True)


@settings(deadline=None)
@given(KINDS, LENGTHS, SEEDS)
def test_exclusive_scan_is_the_loop_over_each_chain(kind: str, lengths: list[int], seed: int) -> None:
    maps = [random_maps(kind, max(1, length), seed + chain) for chain, length in enumerate(lengths)]
    schedule, start = Schedule.of(lengths), random_states(len(lengths), seed)
    sorted_start = start[torch.tensor(schedule.chains)]
    states = exclusive_scan(laid_out(maps, schedule, lengths), schedule, sorted_start)
    assert len(states) == schedule.num_places + len(lengths)
    for chain, length in enumerate(lengths):
        state = start[chain : chain + 1]
        for place, number in zip(schedule.places(chain, length), range(length), strict=True):
            assert close(states[place : place + 1], state)
            state = maps[chain][number : number + 1].apply(state)
        final = schedule.num_places + schedule.chains.index(chain)
        assert close(states[final : final + 1], state)


@settings(deadline=None)
@given(KINDS, st.lists(st.integers(1, 7), min_size=1, max_size=6), SEEDS)
def test_fold_is_the_product_of_each_chain(kind: str, lengths: list[int], seed: int) -> None:
    maps = [random_maps(kind, length, seed + chain) for chain, length in enumerate(lengths)]
    schedule, start = Schedule.of(lengths), random_maps(kind, len(lengths), seed - 1)
    order = torch.tensor(schedule.chains)
    folded = fold(laid_out(maps, schedule, lengths), schedule, start[order])
    for column, chain in enumerate(schedule.chains):
        expected = start[chain : chain + 1]
        for number in range(lengths[chain]):
            expected = expected.then(maps[chain][number : number + 1])
        assert same(folded[column : column + 1], expected)


@pytest.mark.parametrize("kind", TRANSITIONS)
def test_segments_fold_in_any_grouping_and_only_in_their_order(kind: str) -> None:
    maps = random_maps(kind, 8, 1)
    whole = maps[0:1]
    for number in range(1, 8):
        whole = whole.then(maps[number : number + 1])
    level = [maps[n : n + 1] for n in range(8)]
    while len(level) > 1:
        level = [a.then(b) for a, b in zip(level[::2], level[1::2], strict=True)]
    assert same(level[0], whole)
    swapped = maps[1:2].then(maps[0:1])
    for number in range(2, 8):
        swapped = swapped.then(maps[number : number + 1])
    assert not close(swapped.end_state, whole.end_state)

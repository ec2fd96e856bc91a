"""The monoid of affine maps, and its scans against loops that go map by map."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hypic.engine.affine import Affine, Factor, Move, act, between, identity, merged, product, scan

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


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def laid_out(chains: list[Affine], draw: random.Random) -> tuple[list[Affine], list[list[tuple[int, int]]]]:
    """Maps by chain, put into two sources in any order, and where each chain's stand: source and row."""
    where = [[(draw.randrange(2), 0) for _ in range(len(maps.transition))] for maps in chains]
    rows: list[list[tuple[int, int]]] = [[], []]
    for number, position in draw.sample(all_of(where), len(all_of(where))):
        source = where[number][position][0]
        where[number][position] = source, len(rows[source])
        rows[source].append((number, position))
    return [picked(chains, row) for row in rows], where


def all_of(lists: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    return [(number, position) for number, one in enumerate(lists) for position in range(len(one))]


def picked(chains: list[Affine], row: list[tuple[int, int]]) -> Affine:
    none = chains[0][:0]
    transitions = [chains[number].transition[position : position + 1] for number, position in row]
    end_states = [chains[number].end_state[position : position + 1] for number, position in row]
    return Affine(torch.cat([none.transition, *transitions]), torch.cat([none.end_state, *end_states]))


@settings(deadline=None)
@given(KINDS, LENGTHS, SEEDS)
def test_a_scan_is_the_loop_over_each_chain(kind: str, lengths: list[int], seed: int) -> None:
    chains, draw = [random_maps(kind, num, seed + number) for number, num in enumerate(lengths)], random.Random(seed)
    sources, where = laid_out(chains, draw)
    places = draw.sample(range(sum(lengths) + len(lengths)), sum(lengths) + len(lengths))
    before = [[places.pop() for _ in range(num + 1)] for num in lengths]
    states = torch.full((sum(lengths) + len(lengths), H, K, V), torch.nan, dtype=torch.float64)
    start = random_states(len(lengths), seed)
    states[torch.tensor([own[0] for own in before])] = start
    moves = [
        Move(*where[number][position], before[number][position], before[number][position + 1], 1)
        for position in range(max(lengths)) for number, num in enumerate(lengths) if position < num
    ]  # fmt: skip
    scan(sources, moves, states)
    for number, num in enumerate(lengths):
        state = start[number : number + 1]
        for position in range(num + 1):
            place = before[number][position]
            assert close(states[place : place + 1], state)
            if position < num:
                state = chains[number][position : position + 1].apply(state)


@given(KINDS, st.integers(1, 5), st.integers(1, 3), SEEDS)
def test_neighbours_in_all_places_are_one_move(kind: str, num: int, behind: int, seed: int) -> None:
    maps, start = random_maps(kind, num + behind, seed), random_states(num + behind, seed)
    singly = [Move(0, row, row, num + behind + row, 1) for row in range(num + behind)]
    together = merged([move for move in singly if move.row != num])
    expected = [Move(0, 0, 0, num + behind, num)]
    if behind > 1:
        expected.append(Move(0, num + 1, num + 1, 2 * num + behind + 1, behind - 1))
    assert together == expected and merged(singly) == [Move(0, 0, 0, num + behind, num + behind)]
    states = torch.cat([start, torch.full_like(start, torch.nan)])
    scan([maps], merged(singly), states)
    assert close(states[num + behind :], maps.apply(start))


@settings(deadline=None)
@given(KINDS, LENGTHS, SEEDS)
def test_products_and_what_lies_between_states_are_the_map_of_each_chain(
    kind: str, lengths: list[int], seed: int
) -> None:
    chains = [random_maps(kind, num, seed + number) for number, num in enumerate(lengths)]
    sources, where = laid_out(chains, random.Random(seed))
    factors = [
        Factor(*where[number][position], number, 1, position == 0)
        for position in range(max(lengths)) for number, num in enumerate(lengths) if position < num
    ]  # fmt: skip
    transition = product([maps.transition for maps in sources], merged(factors), len(lengths) + 1)
    assert close(dense(transition[-1:]), torch.eye(K, dtype=torch.float64).expand(1, H, K, K))
    before = random_states(len(lengths), seed)
    for number, num in enumerate(lengths):
        whole = chains[number][:1]
        for position in range(1, num):
            whole = whole.then(chains[number][position : position + 1])
        column = slice(number, number + 1)
        assert same(between(before[column], transition[column], whole.apply(before[column])), whole)


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

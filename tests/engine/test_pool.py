"""The pool's split of its budget, its counts, and what it refuses to hand out twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.engine.affine import Affine
from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic.engine.sizing import Need
from hypic.errors import ConfigError

F32 = torch.float32
LINEAR = LinearShape(num_heads=2, key_dim=4, value_dim=3, transition="dense", conv_channels=5, conv_width=4)
SCALAR = LinearShape(num_heads=2, key_dim=4, value_dim=3, transition="head")
ATTENTION = AttentionShape(num_kv_heads=2, key_dim=8, value_dim=6)
BOTH = Layout((LINEAR, SCALAR), (ATTENTION,), F32, F32)
LAYOUTS = {"both": BOTH, "linear": Layout((LINEAR,), (), F32, F32), "attention": Layout((), (ATTENTION,), F32, F32)}
CPU = torch.device("cpu")


def make(layout: Layout = BOTH, budget: int = 2**18, page_size: int = 4, context: int = 64, running: int = 2) -> Pool:
    return Pool(layout, budget, page_size, context, running, CPU)


def held_bytes(pool: Pool) -> int:
    tensors = (*pool.keys, *pool.values, *pool.states, *pool.tails, *pool.transitions)
    return sum(tensor.nbytes for tensor in tensors)


def test_shapes_and_bytes() -> None:
    assert LINEAR.transition_shape == (2, 4, 4) and SCALAR.transition_shape == (2,)
    assert LinearShape(2, 4, 3, "diagonal").transition_shape == (2, 4)
    assert LINEAR.tail_shape == (3, 5) and SCALAR.tail_shape == (0, 0)
    assert BOTH.conv_width == 4 and LAYOUTS["attention"].conv_width == 1
    assert BOTH.token_bytes == 2 * (8 + 6) * 4
    assert BOTH.state_bytes == (2 * 2 * 4 * 3 + 3 * 5) * 4
    assert BOTH.transition_bytes == (2 * 4 * 4 + 2) * 4


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(LAYOUTS)),
    st.integers(0, 300_000),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 300),
    st.integers(1, 9),
)
def test_a_pool_fits_its_budget_and_one_request_or_says_what_it_takes(
    name: str, budget: int, page_size: int, context: int, running: int
) -> None:
    layout = LAYOUTS[name]
    try:
        pool = make(layout, budget, page_size, context, running)
    except ConfigError as error:
        assert str(budget) in str(error) and "memory=" in str(error)
        needed = int(str(error).split("which take ")[1].split(" ")[0])
        assert needed > budget
        make(layout, needed, page_size, context, running)
        return
    assert held_bytes(pool) == pool.num_bytes
    assert pool.num_bytes <= max(budget, layout.state_bytes)
    assert pool.num_pages * page_size >= context and pool.num_states >= running + 2 and pool.num_transitions >= 1
    assert pool.free == pool.capacity


def test_without_full_attention_pages_keep_no_request_waiting() -> None:
    pool = make(LAYOUTS["linear"], context=64, page_size=4, running=5)
    assert pool.num_pages >= 5 * pool.pages_for(64) and pool.num_bytes <= 2**18


def test_pages_are_shared_and_freed_with_their_last_reference() -> None:
    pool = make()
    pages = pool.take_pages(3)
    pool.share_pages(pages[:2])
    pool.drop_pages(pages)
    assert pool.free.pages == pool.num_pages - 2
    pool.drop_pages(pages[:2])
    assert pool.free == pool.capacity
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop_pages(pages[:1])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share_pages(pages[:1])


def test_no_more_pages_are_given_than_there_are() -> None:
    pool = make()
    assert pool.lacks(Need(pages=pool.num_pages + 1)) and not pool.could_hold(Need(pages=pool.num_pages + 1))
    taken = pool.take_pages(pool.num_pages)
    assert sorted(taken) == list(range(pool.num_pages))
    assert pool.lacks(Need(pages=1)) and pool.could_hold(Need(pages=1)) and not pool.lacks(Need())
    with pytest.raises(AssertionError, match="asked for"):
        pool.take_pages(1)


def test_slots_are_distinct_and_the_zero_state_is_never_handed_out() -> None:
    pool = make()
    states = [pool.take_state() for _ in range(pool.num_states)]
    transitions = [pool.take_transition() for _ in range(pool.num_transitions)]
    assert sorted(states) == list(range(1, pool.num_states + 1))
    assert sorted(transitions) == list(range(pool.num_transitions))
    assert pool.free.states == pool.free.transitions == 0
    assert all(not tensor[0].any() for tensor in (*pool.states, *pool.tails))
    pool.drop_state(states[0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop_state(states[0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop_state(0)
    pool.drop_transition(transitions[0])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop_transition(transitions[0])


def test_slots_of_pages_run_in_the_pages_order() -> None:
    pool = make(page_size=4)
    assert pool.slots_of([2, 0], 6).tolist() == [8, 9, 10, 11, 0, 1]
    assert pool.slots_of([], 0).tolist() == []
    assert [pool.pages_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_what_is_written_is_read_and_touches_nothing_else() -> None:
    pool = make()
    for tensor in (*pool.keys, *pool.values, *pool.states, *pool.transitions):
        tensor.fill_(7.0)
    slots = torch.tensor([5, 2])
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 6)
    pool.write_kv(0, slots, keys, values)
    assert all(torch.equal(a, b) for a, b in zip(pool.read_kv(0, slots), (keys, values), strict=True))
    assert float(pool.keys[0].sum()) == pytest.approx(float(keys.sum()) + 7.0 * (pool.keys[0].numel() - keys.numel()))
    maps = Affine(torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 3))
    states, transitions = torch.tensor([3]), torch.tensor([1])
    pool.write_map(0, states, transitions, maps)
    found = pool.read_map(0, states, transitions)
    assert torch.equal(found.transition, maps.transition) and torch.equal(found.end_state, maps.end_state)
    assert bool((pool.states[0][4] == 7.0).all()) and bool((pool.transitions[0][0] == 7.0).all())


def test_cleared_maps_are_the_identity() -> None:
    pool = make()
    for tensor in (*pool.states, *pool.tails, *pool.transitions):
        tensor.fill_(torch.nan)
    states, transitions = torch.tensor([3, 1]), torch.tensor([0, 2])
    pool.clear_maps(states, transitions)
    for layer, kind in ((0, torch.eye(4).expand(2, 2, 4, 4)), (1, torch.ones(2, 2))):
        maps = pool.read_map(layer, states, transitions)
        assert torch.equal(maps.transition, kind) and not maps.end_state.any()
        assert not pool.tails[layer][states].any()
    assert bool(pool.states[0][2].isnan().all())


def test_wide_results_are_rounded_to_the_storage_form() -> None:
    pool = make()
    maps = Affine(torch.randn(1, 2, 4, 4, dtype=torch.float64), torch.randn(1, 2, 4, 3, dtype=torch.float64))
    pool.write_map(0, torch.tensor([1]), torch.tensor([0]), maps)
    found = pool.read_map(0, torch.tensor([1]), torch.tensor([0]))
    assert torch.equal(found.transition, maps.transition.float())

"""What is kept of segments, for every model type that has a file: contracts 3 and 5, a thousand moves, sick neighbours.

The rest of the contracts, and how truth is found, stand in ``test_every_family``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.engine import scheduler
from hypic.engine.affine import Affine
from hypic.engine.encode import Encode
from hypic.engine.plan import Piece
from hypic.engine.pool import Pool
from hypic.errors import NonFiniteOutput
from hypic.types import Policy, Segment
from tests.checkpoints import random_ids
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, relative
from tests.engine.faults import FAULTS
from tests.engine.harness import Bench
from tests.engine.models import oracle_contracts as contracts
from tests.engine.models.every_model import NAMES, STATELESS, Every
from tests.engine.models.oracle_contracts import bites
from tests.engine.prompts import POLICY, live, seg

EXACT = TOLERANCE["float64"]
EXACTLY = Policy(min_segment_tokens=0, deterministic=True)
SEGMENT = seg(40, 1)
Contents = dict[str, Tensor]


def has_experts(models: Every, name: str) -> bool:
    model: Any = models.runner(name, "float64").model
    return any(".experts" in part for part, _ in model.named_modules())


def harms(name: str) -> Sequence[Callable[[Bench], None]]:
    return (contracts.halve_tails if name in STATELESS else contracts.halve_transitions), contracts.halve_values


def worst(found: Contents, expected: Contents) -> float:
    """The largest relative difference of any part; a part that is all zeros must be so in both."""
    assert found.keys() == expected.keys() and expected
    assert all(bool(found[part].any()) == bool(expected[part].any()) for part in expected)
    return max(relative(found[part], expected[part]) for part in expected if bool(expected[part].any()))


def same_bits(found: Contents, expected: Contents) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[part], expected[part]) for part in expected)


# -- contract 3 ------------------------------------------------------------------------------------------------------


def among(engine: Bench, neighbours: Sequence[int], policy: Policy = POLICY) -> Contents:
    """The entry of one segment, cold beside others, of the same lengths whatever they say."""
    first, second, third = neighbours
    engine.add([live(4, third), seg(25, first), SEGMENT, seg(33, second), live(6, first)], policy)
    engine.add([live(17, second), seg(50, third), live(5, first)], policy)
    engine.run()
    return engine.contents(SEGMENT, policy)


def begin_at_another(patch: pytest.MonkeyPatch, engine: Bench, first: int) -> None:
    """Encodes begin where another segment has ended, not from nothing."""
    engine.ask([seg(30, first), live(4, 1)])
    sound, start = Encode.chain, engine.entry(seg(30, first)).state_slot

    def faulty(self: Encode, budget: int) -> Any:
        chain, reached = sound(self, budget)
        object.__setattr__(chain, "initial_slot", start)
        return chain, reached

    patch.setattr(Encode, "chain", faulty)


@pytest.mark.parametrize("name", NAMES)
def test_what_neighbours_say_leaves_nothing_in_an_entry(
    name: str, models: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of the same shape: not a bit of it, or behind experts, who take tokens from all, only rounding."""
    both = [among(models.bench(name), neighbours) for neighbours in ((5, 6, 7), (15, 16, 17))]
    assert worst(*both) < EXACT if has_experts(models, name) else same_bits(*both)
    engine = models.bench(name)
    begin_at_another(monkeypatch, engine, 5)
    assert bites(worst(among(engine, (5, 6, 7)), both[0]))


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_entries_are_bit_equal_in_any_company(name: str, models: Every) -> None:
    alone = models.bench(name)
    alone.ask([SEGMENT, live(3, 2)], EXACTLY)
    expected = alone.contents(SEGMENT, EXACTLY)
    assert same_bits(among(models.bench(name), (5, 6, 7), EXACTLY), expected)
    for harm in harms(name):
        harm(alone)
        assert bites(worst(alone.contents(SEGMENT, EXACTLY), expected))


@pytest.mark.parametrize("name", NAMES)
def test_entries_do_not_change_and_come_back_as_they_were(name: str, models: Every) -> None:
    """Used in several places, then evicted and made again where other entries lay."""
    engine = models.bench(name)
    engine.ask([SEGMENT, live(3, 2)])
    before = engine.contents(SEGMENT)
    for num_tokens in (1, 9, 20):
        engine.ask([live(num_tokens, num_tokens), SEGMENT, live(3, 2)], max_tokens=3)
    assert same_bits(engine.contents(SEGMENT), before)
    assert engine.store.remove(engine.key(SEGMENT))
    engine.ask([seg(77, 4), live(3, 2)])
    engine.ask([SEGMENT, live(3, 2)])
    assert same_bits(engine.contents(SEGMENT), before)
    for harm in harms(name):
        harm(engine)
        assert bites(worst(engine.contents(SEGMENT), before))


# -- a thousand moves ------------------------------------------------------------------------------------------------


def moved_error(models: Every, name: str, patches: Callable[[], None] = lambda: None, num_prompts: int = 16) -> float:
    """A segment in sixty-four places a prompt, then once more in another, against a fresh engine.

    ``patches`` are made when the fresh engine has answered.
    """
    segment, narrow = seg(6, 1), Policy(seam=4, min_segment_tokens=0)
    pieces = [live(300, 6), segment, live(5, 7)]
    fresh, engine = models.alone(name, pieces, narrow), models.bench(name)
    patches()
    for _ in range(num_prompts):
        engine.ask([live(3, 4), *[segment] * 64, live(2, 5)], narrow)
    moved = engine.ask(pieces, narrow)
    assert moved.outcomes == ["hit"] and engine.num_segments == 1
    return relative(moved.rows(), fresh.rows())


def write_back(patch: pytest.MonkeyPatch) -> None:
    """What is read is put back in few bits, as moving an entry itself would do."""
    read_kv, read_map = Pool.read_kv, Pool.read_map

    def faulty_kv(self: Pool, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = read_kv(self, layer, slots)
        self.write_kv(layer, slots, keys.bfloat16().to(keys.dtype), values.bfloat16().to(values.dtype))
        return keys, values

    def faulty_map(self: Pool, layer: int, states: Tensor, transitions: Tensor) -> Affine:
        maps = read_map(self, layer, states, transitions)
        rounded = (part.bfloat16().to(part.dtype) for part in (maps.transition, maps.end_state))
        self.write_map(layer, states, transitions, Affine(*rounded))
        return maps

    patch.setattr(Pool, "read_kv", faulty_kv)
    patch.setattr(Pool, "read_map", faulty_map)


@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_moves_equal_one(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved_error(models, name) < EXACT
    assert bites(moved_error(models, name, lambda: write_back(monkeypatch), num_prompts=1))
    monkeypatch.undo()
    model: Any = models.runner(name, "float64").model
    if model.rotary is not None:
        assert bites(moved_error(models, name, lambda: FAULTS["position+1"](monkeypatch), num_prompts=1))


# -- contract 5 ------------------------------------------------------------------------------------------------------


def continued_error(models: Every, name: str, harm: Callable[[Bench], None] = lambda engine: None) -> float:
    """A prompt that goes on from a snapshot of another's end against one that is run from its start."""
    head = [live(11, 1), seg(20, 2), Piece(live(9, 3).ids, None, True)]
    engine, prompt = models.bench(name), [*head, live(5, 4), seg(13, 5), live(6, 6)]
    engine.ask([*head, live(3, 7)])
    harm(engine)
    answer = engine.ask(prompt, max_tokens=3)
    assert min(answer.logits) == 40, "the head was run again"
    return contracts.difference(answer, models.alone(name, prompt, max_tokens=3))


def resumed_error(models: Every, name: str) -> float:
    """Requests of which memory holds only some at a time against each alone."""
    engine = models.bench(name, sizes=(8, 6, 3))
    prompts = [[live(20 + i, 50 + i), seg(13, 5), live(3, 60 + i)] for i in range(2)]
    answers = [engine.add(prompt, max_tokens=24) for prompt in prompts]
    engine.run()
    assert sum(engine.restarts.values()) > 0, "the pool was too large to preempt anyone"
    engine.assert_back_to_start()
    alone = [models.alone(name, prompt, max_tokens=24) for prompt in prompts]
    return max(contracts.difference(*pair) for pair in zip(answers, alone, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_going_on_equals_starting_again(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    assert continued_error(models, name) < EXACT
    for harm in (contracts.halve_tails if name in STATELESS else contracts.halve_states, contracts.halve_values):
        assert bites(continued_error(models, name, harm))
    assert resumed_error(models, name) < EXACT
    (contracts.swap_tails if name in STATELESS else contracts.swap_states)(monkeypatch)
    assert bites(resumed_error(models, name))


# -- contract 6: who is not finite fails alone -----------------------------------------------------------------------

POISON = 319


def clean(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random_ids(num_tokens, seed, vocab_size=POISON))


def bad(num_tokens: int, seed: int, at: int) -> tuple[int, ...]:
    ids = clean(num_tokens, seed)
    return (*ids[:at], POISON, *ids[at + 1 :])


def document(ids: tuple[int, ...]) -> Piece:
    return Piece(ids, Segment("document"))


SHARED = document(clean(30, 1))
SICK = [
    [Piece(bad(50, 2, 3), None, True), SHARED, Piece(clean(5, 3))],
    [Piece(clean(5, 2)), SHARED, document(bad(40, 4, 2)), Piece(clean(5, 3))],
    [Piece(clean(5, 2)), document(bad(90, 4, 70)), SHARED, Piece(bad(5, 3, 4))],
]
HEALTHY = [[Piece(clean(5 + i, 10 + i)), SHARED, document(clean(20 + i, 20 + i)), Piece(clean(4, 30))] for i in (0, 1)]


def poison(models: Every, name: str, value: float, patch: pytest.MonkeyPatch) -> None:
    """The embedding of one token is no number, or infinite."""
    model: Any = models.runner(name, "float64").model
    sound = model.embed

    def embed(ids: Tensor) -> Tensor:
        found: Tensor = sound(ids)
        return found.masked_fill((ids == POISON)[:, None], value)

    patch.setattr(model, "embed", embed)


def company_error(models: Every, name: str, max_step_tokens: int) -> float:
    """Healthy requests beside sick ones, each of which must fail, against each alone."""
    engine = models.bench(name, max_step_tokens=max_step_tokens)
    sick = [engine.add(pieces, max_tokens=3) for pieces in SICK[:1]]
    healthy = [engine.add(pieces, max_tokens=3) for pieces in HEALTHY]
    sick += [engine.add(pieces, max_tokens=3) for pieces in SICK[1:]]
    engine.run()
    assert all(isinstance(answer.error, NonFiniteOutput) and not answer.ids for answer in sick)
    engine.assert_back_to_start()
    return max(_to_alone(models, name, *pair) for pair in zip(HEALTHY, healthy, strict=True))


def _to_alone(models: Every, name: str, pieces: Sequence[Piece], answer: Answer) -> float:
    """A request that failed is as far from what it should be as can be."""
    if answer.error is not None:
        return float("inf")
    return contracts.difference(answer, models.alone(name, pieces, max_tokens=3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_who_is_not_finite_fails_alone(name: str, value: float, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    poison(models, name, value, monkeypatch)
    for max_step_tokens in (16, 8192):
        assert company_error(models, name, max_step_tokens) < EXACT


@pytest.mark.parametrize("name", NAMES)
def test_sick_neighbours_bite(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one request leaves behind is read by another."""
    poison(models, name, float("nan"), monkeypatch)
    for pieces in HEALTHY:
        models.alone(name, pieces, max_tokens=3)
    (contracts.swap_tails if name in STATELESS else contracts.swap_states)(monkeypatch)
    assert bites(company_error(models, name, 8192))

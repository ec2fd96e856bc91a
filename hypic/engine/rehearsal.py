"""Every kind of step once, before the engine is ready: kernels are compiled and checked here, on no request's path.

What a kernel is compiled for follows from a model, and from where a step stands to some bounds:

- how attention is laid out: tiles of one token, of short rows and of long ones, keys in one part or in several, keys
  that turn by their places or by others (``attention_steps``);
- how states are carried: one token a chain, chunks of 16 or of 64, interiors that are read, rows that are folded, runs
  with and without folds and marks, beside chains that are none (``state_steps``);
- how many tokens experts and products of few rows have: each choice is for a range of numbers, and ranges are so wide
  that powers of two meet them, and for small numbers what is next to them and between (``sized_steps``).

Nothing is compiled for a number of chains, keys or parts as such. What is computed is garbage in slots that nobody
owns, and is given back: all chains of a step read and write the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hypic.engine.chain import ZERO_SLOT, Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.free_memory import is_out_of_memory, shortage
from hypic.engine.kernel_batch import MIN_DENSE_TOKENS, Geometry
from hypic.engine.kernel_tiles import Tiling
from hypic.engine.layers.dense import PLANNED_FROM, Heads, plan, planned_lengths
from hypic.engine.pool import Pool
from hypic.engine.run_arrays import SHORT_ROW
from hypic.engine.segment import Slots
from hypic.engine.sizing import Need
from hypic.errors import ConfigError

logger = logging.getLogger("hypic")
SEAM = 8
# Tokens of an interior whose step is cut into chunks of 16, and into chunks of 64.
SHORT, LONG = 24, 120
# Tokens from which on the next bound is at least twice as many.
FINE = 256
# Keys that a tile sees in one part, and in several.
FEW_KEYS, MANY_KEYS = 128, 512
Step = Sequence[Chain]


@dataclass(frozen=True)
class Limits:
    """What bounds the steps of an engine: tokens, chains that decode, and how its steps are packed."""

    step_tokens: int
    num_running: int
    tiling: Tiling
    min_run_tokens: int | None

    @classmethod
    def of(cls, geometry: Geometry, step_tokens: int, num_running: int) -> Limits:
        return cls(step_tokens, num_running, geometry.tiling, geometry.min_run_tokens)


@dataclass(frozen=True)
class Makings:
    """What chains are made of: token slots, of which ``context`` positions are made by naming them again and again, the
    slots of an entry, and two states, the second for snapshots."""

    slots: Slots
    context: int
    entry: tuple[int, int]
    states: tuple[int, int]

    def chain(self, *parts: int | RowLink | InteriorLink, start: int = 0, wants_logits: bool = True) -> Chain:
        """Links one after the other from position ``start`` on; a number is a row of as many tokens."""
        links, position = list[RowLink | InteriorLink](), start
        for part in parts:
            link = self._placed(part, position)
            links.append(link)
            position += link.num_tokens if isinstance(link, InteriorLink) else len(link.ids)
        initial = self.states[0] if start else ZERO_SLOT
        return Chain(links, self._named(0, position), initial, self.states[0], wants_logits)

    def _placed(self, part: int | RowLink | InteriorLink, position: int) -> RowLink | InteriorLink:
        if isinstance(part, InteriorLink):
            return part
        row = self.row(part) if isinstance(part, int) else part
        return replace(row, position=position, kv_slots=self._named(position, len(row.ids)))

    def row(self, num_tokens: int, fold: FoldInto | None = None, snapshot_slot: int | None = None) -> RowLink:
        """Placed by the chain it comes into."""
        return RowLink([0] * num_tokens, 0, self.slots[:0], snapshot_slot, fold)

    def interior(self, num_tokens: int) -> InteriorLink:
        return InteriorLink(*self.entry, num_tokens, 0)

    def folded(self, num_tokens: int, num_done: int = 0) -> RowLink:
        return self.row(num_tokens, FoldInto(*self.entry, num_done))

    def kept(self, num_tokens: int) -> RowLink:
        """A row behind which a snapshot is taken."""
        return self.row(num_tokens, snapshot_slot=self.states[1])

    def whole(self, num_tokens: int) -> list[Chain]:
        """Prompts that are run whole, so many tokens together, each as long as may be."""
        count, rest = divmod(num_tokens, self.context)
        return [self.chain(length) for length in (*[self.context] * count, rest) if length]

    def _named(self, first: int, count: int) -> Slots:
        return self.slots[np.arange(first, first + count) % len(self.slots)]


def rehearse(run: Callable[[Step], object], pool: Pool, limits: Limits) -> None:
    """Run steps of every kind that requests may need; the pool must hold nothing yet.

    Raises:
        ConfigError: the pool leaves no room for the smallest steps.
    """
    if pool.lacks(Need(1, 3, 1)):
        return
    pages, states, transition = pool.take_pages(1), [pool.take_state() for _ in range(3)], pool.take_transition()
    pool.clear_maps(*(torch.tensor([slot], device=pool.device) for slot in (states[0], transition)))
    slots = pool.slots_of(pages, pool.page_size)
    made = Makings(slots, pool.max_context, (states[0], transition), (states[1], states[2]))
    try:
        _run_all(run, made, limits, pool)
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault, pool.device):
            raise
        raise ConfigError(shortage(pool.device, pool.num_bytes)) from fault
    finally:
        pool.drop_pages(pages)
        pool.drop_transition(transition)
        for state in states:
            pool.drop_state(state)


def _run_all(run: Callable[[Step], object], made: Makings, limits: Limits, pool: Pool) -> None:
    run([made.chain(min(len(made.slots), made.context))])  # every slot holds numbers from here on
    for step in (*attention_steps(made, limits.tiling), *state_steps(made, limits)):
        is_possible = sum(chain.num_tokens for chain in step) <= 2 * limits.step_tokens
        if is_possible and all(len(chain.context) <= made.context for chain in step):
            run(step)
    for step in sized_steps(made, limits, pool.num_pages * pool.page_size):
        try:
            run(step)
        except (RuntimeError, MemoryError) as fault:
            if not is_out_of_memory(fault, pool.device):
                raise
            _warn_of(sum(chain.num_tokens for chain in step))
            return


def _warn_of(num_tokens: int) -> None:
    logger.warning("no room for %d tokens a step beside the pool; lower memory= or max_step_tokens=", num_tokens)


def plan_rows(heads: Sequence[Heads], most: int, plan: Callable[[Heads, int], None] = plan) -> None:
    """Plans of all rows that are run whole, of at most ``most`` tokens, for the thread that calls this."""
    for each in heads:
        for length in planned_lengths(most):
            try:
                plan(each, length)
            except (RuntimeError, MemoryError) as fault:
                if not is_out_of_memory(fault, each.device):
                    raise
                _warn_of(length)
                return


def attention_steps(made: Makings, tiling: Tiling) -> Iterator[Step]:
    """One tile of each kind, with few and with many keys, turning by their places or not."""
    for num_keys in dict.fromkeys(min(keys, made.context) for keys in (FEW_KEYS, MANY_KEYS)):
        for num_tokens in dict.fromkeys((1, SEAM, tiling.long)):
            if num_tokens <= num_keys:
                chain = made.chain(num_tokens, start=num_keys - num_tokens)
                yield [chain]
                yield [replace(chain, key_positions=np.arange(num_keys))]


def state_steps(made: Makings, limits: Limits) -> Iterator[Step]:
    """Chunks of both sizes with and without folds, interiors and snapshots; runs, alone and beside such chains."""
    warm = [made.chain(SEAM, made.interior(n), n) for n in (SHORT, LONG)]
    cold = [made.chain(SEAM, made.folded(n), wants_logits=False) for n in (SHORT, LONG)]
    for answer, encode in zip(warm, cold, strict=True):
        yield from ([answer], [encode], [encode, answer])
    for length in (SHORT, LONG):
        yield [made.chain(length)]
        yield [made.chain(made.kept(length), length)]
        yield [made.chain(made.folded(length, 1), start=SEAM, wants_logits=False)]
        yield [made.chain(SEAM, made.folded(length), start=SEAM, wants_logits=False)]  # behind a primer
    if limits.min_run_tokens is not None:
        first, *others = run_steps(made, limits.min_run_tokens)
        yield from (first, *others)
        for other in (*warm, cold[0]):
            yield from ([*first, other], [other, *first, other])


def run_steps(made: Makings, min_tokens: int) -> Iterator[Step]:
    """Rows that are run side by side, as many as make runs; an interior's first part, the next one, and marks."""
    length = min(made.context, max(min_tokens, MIN_DENSE_TOKENS) + SEAM)
    count, half = -(-min_tokens // max(1, length - SEAM)) or 1, length // 2
    yield [made.chain(length)] * count
    if half > SHORT_ROW:
        yield [made.chain(SEAM, made.folded(length - SEAM), wants_logits=False)] * count
        yield [made.chain(made.folded(length - SEAM, 1), start=SEAM, wants_logits=False)] * count
        yield [made.chain(SEAM, made.folded(length - 2 * SEAM), start=SEAM, wants_logits=False)] * count
        yield [made.chain(made.kept(half), length - half)] * count


def sized_steps(made: Makings, limits: Limits, room: int) -> Iterator[Step]:
    """Tokens that decode, and prompts that are run whole: powers of two, and as many as may be."""
    last = min(2, made.context) - 1
    for num_chains in sizes(limits.num_running):
        yield [made.chain(1, start=last)] * num_chains
    most = min(limits.step_tokens, room)
    for num_tokens in sizes(most):
        yield made.whole(num_tokens)
    if min(most, made.context) > PLANNED_FROM:
        yield made.whole(most - 1)  # unlike the longest, its rows are copied to be filled up


def sizes(most: int) -> list[int]:
    """Powers of two up to ``most``, and ``most``; small ones with the number behind them and the one half way on."""
    powers = [1 << power for power in range(most.bit_length())]
    between = [number for n in powers if n < FINE for number in (n + 1, n + n // 2) if number < most]
    return sorted({*powers, *between, most})

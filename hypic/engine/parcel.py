"""Several entries as one run of bytes: gathered out of a pool, looked at on arrival, and scattered into another pool.

What an entry is (key, tokens, seam, labels) the worker that needs it knows already, since it asked; so only numbers
travel, and both sides know where in a *parcel* which lie from the model's layout, the number of each entry's tokens and
that of the transitions that are not zero. For each group of layers of one shape there are, entry by entry, states
``[n, L, H, K, V]``, tails ``[n, L, W-1, C]`` and transitions ``[n, L, H, ...]``; and for all tokens together, one entry
behind the other, ``K [L, t, H, D]`` and ``V``. Where heads' transitions were dropped, ``[r, ...]`` are those that are
left and an ``int32 [r]`` says which: rising numbers of places in ``[n, L, H]``.

A parcel takes a few kernels, whatever it holds: launching them is what handling entries costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hypic.engine.layout import Layout
from hypic.engine.parallel.packing import Sections, digest, sections
from hypic.engine.pool import Pool
from hypic.engine.read_back import Landing, ReadBack
from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.stacks import Copies, Stack, grouped, words
from hypic.engine.storage import StorageForm
from hypic.engine.store.image import AttentionPart, EntryImage, LinearPart
from hypic.errors import StoreCorrupt

# A group whose transitions are all there.
ALL = -1
# More tokens than any entry has.
MOST_TOKENS = 2**32


@dataclass(frozen=True)
class Content:
    """What a parcel holds: tokens of each entry, and for each group of linear layers how many heads' transitions of all
    entries are left, or ``ALL``."""

    num_tokens: tuple[int, ...]
    num_kept: tuple[int, ...]


@dataclass(frozen=True)
class Opened:
    """A parcel's numbers by group, views of its bytes; ``numbers`` are those of the transitions that are left."""

    content: Content
    states: list[Tensor]
    tails: list[Tensor]
    transitions: list[Tensor]
    numbers: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


def pack(pool: Pool, entries: Sequence[CachedSegment]) -> tuple[Content, Tensor, int]:
    """What a parcel of these entries holds, its bytes ``[n]`` on the pool's device, and their digest, in the current
    stream; waits for the device once, and once more if transitions may have been dropped."""
    with torch.inference_mode():
        left = _left(pool, entries)
        kept = tuple(ALL if found is None else len(found) for found in left)
        content = Content(tuple(entry.num_cached for entry in entries), kept)
        found = layout_of(pool.layout, pool.form, content)
        data = found.empty(pool.device)
        _gather(pool, entries, opened(pool.layout, pool.form, content, data), left)
        (total,) = ReadBack([digest(data)], Landing(sleeps=True)).wait()
        return content, data, int(total)


def opened(layout: Layout, form: StorageForm, content: Content, data: Tensor) -> Opened:
    """Where everything lies in ``data``."""
    parts = iter(layout_of(layout, form, content).of(data))
    groups = _groups(layout)
    states, tails, keys, values = (
        [next(parts) for _ in groups[name]] for name in ("states", "tails", "keys", "values")
    )
    maps = [(next(parts), next(parts)) for _ in groups["transitions"]]
    return Opened(content, states, tails, [m for m, _ in maps], [n for _, n in maps], keys, values)


def layout_of(layout: Layout, form: StorageForm, content: Content) -> Sections:
    """The sections of a parcel."""
    return _sections(layout, form.dtype or layout.state_dtype, content)


def check(layout: Layout, form: StorageForm, content: Content, data: Tensor, expected: int) -> Opened:
    """A parcel that came, if it is whole: its digest is the one that it came with and all its numbers are finite.

    Raises:
        StoreCorrupt: it is not.
    """
    groups = _groups(layout)["transitions"]
    count = len(content.num_tokens)
    most = [count * len(layers) * shape[0] if len(shape) > 1 else ALL for layers, shape in groups]
    is_possible = len(content.num_kept) == len(groups) and all(0 <= n < MOST_TOKENS for n in content.num_tokens)
    if not is_possible or any(not ALL <= n <= top for n, top in zip(content.num_kept, most, strict=True)):
        raise StoreCorrupt(f"{count} entries came with parts that cannot be; they are not used.")
    if layout_of(layout, form, content).num_bytes != len(data):
        raise StoreCorrupt(
            f"{count} entries came in {len(data)} bytes, which their parts do not fill; they are not used."
        )
    with torch.inference_mode():
        found = opened(layout, form, content, data)
        flags = [layout_of(layout, form, content).is_finite(data)]
        flags += [_is_rising(numbers, top) for numbers, top in zip(found.numbers, most, strict=True) if len(numbers)]
        total, is_sound = ReadBack([digest(data), torch.stack(flags).all()], Landing(sleeps=True)).wait()
    if int(total) != expected:
        raise StoreCorrupt(f"{count} entries came damaged; they are not used.")
    if not bool(is_sound):
        raise StoreCorrupt(f"{count} entries came with numbers that cannot be; they are not used.")
    return found


def write(pool: Pool, found: Opened, wanted: Sequence[tuple[int, CachedSegment]]) -> None:
    """A parcel that was checked into a pool: those of its entries, by their places in it, that somebody waits for."""
    if not wanted:
        return
    copies = Copies()
    for stacks, parts in ((pool.stacks.states, found.states), (pool.stacks.tails, found.tails)):
        for stack, part in zip(stacks, parts, strict=True):
            for number, entry in wanted:
                copies.add(stack.at(entry.state_slot), part[number].unbind(0))
    for stack, part, numbers, kept in zip(
        pool.stacks.transitions, found.transitions, found.numbers, found.content.num_kept, strict=True
    ):
        if kept != ALL:
            _scatter(stack, part, numbers, len(found.content.num_tokens), wanted)
            continue
        for number, entry in wanted:
            copies.add(stack.at(_transition_slot(entry)), part[number].unbind(0))
    copies.run()
    _write_tokens(pool, found, wanted)


def image(found: Opened, number: int, entry: CachedSegment, identity: Identity, layout: Layout) -> EntryImage:
    """One entry of a parcel that was checked, by its place in it; mostly views."""
    start = sum(found.content.num_tokens[:number])
    tokens = slice(start, start + found.content.num_tokens[number])
    groups = _groups(layout)
    maps = [_whole_maps(found, group, groups["transitions"])[number] for group in range(len(found.transitions))]
    states, tails, transitions = (
        _layers(groups[name], [part if name == "transitions" else part[number] for part in parts])
        for name, parts in (("states", found.states), ("tails", found.tails), ("transitions", maps))
    )
    keys = _layers(groups["keys"], [part[:, tokens] for part in found.keys])
    values = _layers(groups["values"], [part[:, tokens] for part in found.values])
    return EntryImage(
        key=entry.key,
        ids=entry.ids,
        seam=len(entry.ids) - entry.num_cached,
        identity=identity,
        linear=tuple(map(LinearPart, transitions, states, tails)),
        attention=tuple(map(AttentionPart, keys, values)),
        deterministic=entry.deterministic,
        primer=entry.primer,
    )


def _gather(pool: Pool, entries: Sequence[CachedSegment], into: Opened, left: Sequence[Tensor | None]) -> None:
    copies, stacks = Copies(), pool.stacks
    for stack, part in (*zip(stacks.states, into.states, strict=True), *zip(stacks.tails, into.tails, strict=True)):
        for number, entry in enumerate(entries):
            copies.add(part[number].unbind(0), stack.at(entry.state_slot))
    for stack, part, numbers, kept in zip(stacks.transitions, into.transitions, into.numbers, left, strict=True):
        if kept is not None:
            numbers.copy_(kept)
            part.copy_(stack.whole[_places(stack, kept, [_transition_slot(entry) for entry in entries])])
            continue
        for number, entry in enumerate(entries):
            copies.add(part[number].unbind(0), stack.at(_transition_slot(entry)))
    copies.run()
    slots = _token_slots(pool, entries)
    for stack, part in (*zip(stacks.keys, into.keys, strict=True), *zip(stacks.values, into.values, strict=True)):
        # Not by index_select, which on a CPU would first copy the whole stack: its layers lie apart.
        words(part).copy_(words(stack.whole)[:, slots])


def _left(pool: Pool, entries: Sequence[CachedSegment]) -> list[Tensor | None]:
    """For each group of linear layers the numbers of the transitions that are not zero; ``None``: none is."""
    if pool.form.drop_below == 0.0:
        return [None] * len(pool.stacks.transitions)
    return [_left_of(stack, [_transition_slot(entry) for entry in entries]) for stack in pool.stacks.transitions]


def _left_of(stack: Stack, slots: Sequence[int]) -> Tensor | None:
    if len(stack.group.shape) == 1:  # one number per head is never dropped
        return None
    is_left = torch.stack([stack.whole.select(1, slot).flatten(2).ne(0).any(2) for slot in slots])
    found = is_left.flatten().nonzero().flatten()
    return None if len(found) == is_left.numel() else found.int()


def _places(stack: Stack, numbers: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Layer, slot and head of each of these numbers of places in ``[n, L, H]``."""
    num_layers, num_heads = len(stack.group.layers), stack.group.shape[0]
    numbers = numbers.long()
    slot_of = torch.tensor(slots, device=numbers.device)
    layers = numbers.div(num_heads, rounding_mode="floor") % num_layers
    return layers, slot_of[numbers.div(num_layers * num_heads, rounding_mode="floor")], numbers % num_heads


def _scatter(
    stack: Stack, part: Tensor, numbers: Tensor, count: int, wanted: Sequence[tuple[int, CachedSegment]]
) -> None:
    """Transitions of which only some heads' are there; the others are zero."""
    slots = {number: _transition_slot(entry) for number, entry in wanted}
    torch._foreach_zero_([target for slot in slots.values() for target in stack.at(slot)])
    if len(slots) < count:
        each = len(stack.group.layers) * stack.group.shape[0]
        chosen = torch.tensor([number in slots for number in range(count)], device=numbers.device)
        is_chosen = chosen[numbers.long().div(each, rounding_mode="floor")]
        numbers, part = numbers[is_chosen], part[is_chosen]
    whole = stack.whole
    whole[_places(stack, numbers, [slots.get(number, 0) for number in range(count)])] = part.to(whole.dtype)


def _write_tokens(pool: Pool, found: Opened, wanted: Sequence[tuple[int, CachedSegment]]) -> None:
    counts, slots = found.content.num_tokens, _token_slots(pool, [entry for _, entry in wanted])
    starts = np.cumsum((0, *counts))
    is_all = [number for number, _ in wanted] == list(range(len(counts)))
    stacks = pool.stacks
    for stack, part in (*zip(stacks.keys, found.keys, strict=True), *zip(stacks.values, found.values, strict=True)):
        if not is_all:
            part = torch.cat([part[:, starts[number] : starts[number + 1]] for number, _ in wanted], 1)
        words(stack.whole).index_copy_(1, slots, words(part))


def _token_slots(pool: Pool, entries: Sequence[CachedSegment]) -> Tensor:
    return torch.from_numpy(np.concatenate([entry.kv_slots for entry in entries])).to(pool.device, non_blocking=True)


def _transition_slot(entry: CachedSegment) -> int:
    assert entry.transition_slot is not None, "a snapshot does not travel"
    return entry.transition_slot


def _is_rising(numbers: Tensor, top: int) -> Tensor:
    return (numbers[0] >= 0) & (numbers[-1] < top) & (numbers[1:] > numbers[:-1]).all()


def _whole_maps(found: Opened, group: int, groups: Groups) -> Tensor:
    """Transitions ``[n, L, H, ...]`` of a group, zeros where they were dropped."""
    part = found.transitions[group]
    if found.content.num_kept[group] == ALL:
        return part
    layers, shape = groups[group]
    places = (len(found.content.num_tokens), len(layers), shape[0])
    whole = part.new_zeros((math.prod(places), *shape[1:]))
    return whole.index_copy(0, found.numbers[group].long(), part).view(*places, *shape[1:])


Groups = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def _layers(groups: Groups, parts: Sequence[Tensor]) -> list[Tensor]:
    """Of every layer its own, from ``[L, ...]`` of each group."""
    pairs = zip(groups, parts, strict=True)
    found = {layer: one for (layers, _), part in pairs for layer, one in zip(layers, part, strict=True)}
    return [found[layer] for layer in sorted(found)]


@lru_cache(16)
def _groups(layout: Layout) -> dict[str, Groups]:
    """Layers and shapes of each group, as ``Pool.stacks`` has them."""
    shapes = {
        "states": layout.state_shapes,
        "tails": layout.tail_shapes,
        "transitions": layout.transition_shapes,
        "keys": layout.key_shapes,
        "values": layout.value_shapes,
    }
    return {name: tuple((group.layers, group.shape) for group in grouped(found)) for name, found in shapes.items()}


@lru_cache(256)
def _sections(layout: Layout, rest: torch.dtype, content: Content) -> Sections:
    groups, count, tokens = _groups(layout), len(content.num_tokens), sum(content.num_tokens)
    wanted = [(rest, (count, len(layers), *shape)) for layers, shape in groups["states"]]
    wanted += [(layout.dtype, (count, len(layers), *shape)) for layers, shape in groups["tails"]]
    wanted += [
        (layout.dtype, (len(layers), tokens, *shape)) for name in ("keys", "values") for layers, shape in groups[name]
    ]
    for (layers, shape), kept in zip(groups["transitions"], content.num_kept, strict=True):
        shown = (count, len(layers), *shape) if kept == ALL else (kept, *shape[1:])
        wanted += [(rest, shown), (torch.int32, (max(kept, 0),))]
    return sections(wanted)

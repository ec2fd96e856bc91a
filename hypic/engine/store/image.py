"""Everything of one entry as tensors on the host: what tiers keep, and what workers compare. No handle into
any pool.

``export`` reads an entry out of the pool, ``take`` and ``install`` put an image into pages and slots of one; both ways
every bit stays. An image may be smaller than what the pool holds: rounded numbers stand in their own type, and
transitions that were dropped are left out (``LinearPart.heads``). How an image becomes bytes is ``encoding.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hypic.engine.pool import Layout, LinearShape, Pool
from hypic.engine.segment import CachedSegment, Identity, Label
from hypic.engine.sizing import Need
from hypic.engine.stacks import Copies
from hypic.errors import StoreCorrupt


@dataclass(frozen=True)
class LinearPart:
    """One linear layer: ``transition [H, ...]`` (``None`` for a snapshot), ``end_state [H, K, V]``, ``tail [W-1, C]``.

    ``heads [h]`` are the numbers of the heads whose transitions ``[h, ...]`` are kept, the others' being zero;
    ``None``: all are.
    """

    transition: Tensor | None
    end_state: Tensor
    tail: Tensor
    heads: Tensor | None = None


@dataclass(frozen=True)
class AttentionPart:
    """One full-attention layer: unrotated ``keys [n, H, D]`` and ``values [n, H, V]`` of the cached tokens."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class EntryImage:
    """One entry; ``ids`` are all its tokens, the seam's first, and parts stand in order of depth. ``primer`` is the
    digest of the text that it was encoded behind, empty for none."""

    key: bytes
    ids: tuple[int, ...]
    seam: int
    identity: Identity
    linear: tuple[LinearPart, ...]
    attention: tuple[AttentionPart, ...]
    is_snapshot: bool = False
    deterministic: bool = False
    namespace: str | None = None
    name: str | None = None
    source: str | None = None
    labels: frozenset[Label] = frozenset()
    expires_s: float | None = None
    primer: str = ""

    @property
    def num_cached(self) -> int:
        return len(self.ids) - self.seam

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, in a fixed order."""
        return dict(_named(self))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def num_kept_heads(self) -> tuple[int, int]:
        """Transitions that are kept, of how many."""
        whole = [len(part.end_state) for part in self.linear]
        kept = [n if part.heads is None else len(part.heads) for n, part in zip(whole, self.linear, strict=True)]
        return sum(kept), sum(whole)


def _named(image: EntryImage) -> Iterator[tuple[str, Tensor]]:
    for number, part in enumerate(image.linear):
        parts = {"transition": part.transition, "heads": part.heads, "end_state": part.end_state, "tail": part.tail}
        yield from ((f"linear.{number}.{name}", tensor) for name, tensor in parts.items() if tensor is not None)
    for number, kept in enumerate(image.attention):
        yield f"attention.{number}.keys", kept.keys
        yield f"attention.{number}.values", kept.values


def export(pool: Pool, entry: CachedSegment, identity: Identity) -> EntryImage:
    """What the pool holds of an entry, copied to the host."""
    found = view(pool, entry, identity)
    return replace(
        found,
        linear=tuple(LinearPart(*map(_copied, (p.transition, p.end_state, p.tail, p.heads))) for p in found.linear),
        attention=tuple(AttentionPart(part.keys.cpu(), part.values.cpu()) for part in found.attention),
    )


def view(pool: Pool, entry: CachedSegment, identity: Identity) -> EntryImage:
    """An entry where it lies: good until the pool is written to, and cheap for who copies it elsewhere."""
    slots = torch.from_numpy(entry.kv_slots).to(pool.device)
    linear = tuple(_view_linear(pool, layer, entry) for layer in range(len(pool.layout.linear)))
    pairs = [pool.read_kv(layer, slots) for layer in range(len(pool.layout.attention))]
    return EntryImage(
        key=entry.key,
        ids=entry.ids,
        seam=len(entry.ids) - entry.num_cached,
        identity=identity,
        linear=linear,
        attention=tuple(AttentionPart(keys, values) for keys, values in pairs),
        is_snapshot=entry.is_snapshot,
        deterministic=entry.deterministic,
        namespace=entry.namespace,
        name=entry.name,
        source=entry.source,
        labels=frozenset(entry.labels),
        expires_s=entry.expires_s,
        primer=entry.primer,
    )


def _view_linear(pool: Pool, layer: int, entry: CachedSegment) -> LinearPart:
    state, tail = pool.states[layer][entry.state_slot], pool.tails[layer][entry.state_slot]
    if entry.transition_slot is None:  # a snapshot is never rounded
        return LinearPart(None, state, tail)
    transition, form = pool.transitions[layer][entry.transition_slot], pool.form
    heads = form.kept_heads(transition)
    kept = transition if heads is None else transition[heads.long()]
    return LinearPart(form.at_rest(kept), form.at_rest(state), tail, heads)


def _copied(tensor: Any) -> Any:
    if tensor is None:
        return None
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()


def need(pool: Pool, image: EntryImage) -> Need:
    """What ``take`` takes of the pool."""
    return Need(pool.pages_for(image.num_cached), 1, 0 if image.is_snapshot else 1)


def take(pool: Pool, image: EntryImage) -> CachedSegment:
    """An entry with pages and slots of its own, nothing written yet; the caller has asked ``pool.lacks`` before."""
    pages = pool.take_pages(pool.pages_for(image.num_cached))
    layout, has_map = pool.layout, not image.is_snapshot
    num_bytes = len(pages) * pool.page_bytes + layout.state_bytes + (layout.transition_bytes if has_map else 0)
    return CachedSegment(
        key=image.key,
        ids=image.ids,
        kv_slots=pool.slots_of(pages, image.num_cached),
        pages=tuple(pages),
        state_slot=pool.take_state(),
        transition_slot=pool.take_transition() if has_map else None,
        num_bytes=num_bytes,
        name=image.name,
        source=image.source,
        namespace=image.namespace,
        deterministic=image.deterministic,
        labels=set(image.labels),
        expires_s=image.expires_s,
        primer=image.primer,
    )


def install(pool: Pool, image: EntryImage, entry: CachedSegment) -> None:
    """Write an image into the pages and slots of ``entry``; the image was checked against ``pool.layout``."""
    copies = Copies()
    for layer, part in enumerate(image.linear):
        for target, source in _linear_pairs(pool, layer, part, entry):
            copies.add((target,), (source,))
    copies.run()
    if not pool.layout.attention:
        return
    slots = torch.from_numpy(entry.kv_slots).to(pool.device)
    for number, kept in enumerate(image.attention):
        there = (tensor.to(pool.device, non_blocking=True) for tensor in (kept.keys, kept.values))
        pool.write_kv(number, slots, *there)


def _linear_pairs(pool: Pool, layer: int, part: LinearPart, entry: CachedSegment) -> Iterator[tuple[Tensor, Tensor]]:
    """What is copied as it is, target first; transitions of which only some heads are kept are written here."""
    yield pool.states[layer][entry.state_slot], part.end_state
    yield pool.tails[layer][entry.state_slot], part.tail
    if part.transition is None or entry.transition_slot is None:
        return
    target = pool.transitions[layer][entry.transition_slot]
    if part.heads is None:
        yield target, part.transition
        return
    target.zero_()
    heads = part.heads.to(target.device, torch.long)
    target.index_copy_(0, heads, part.transition.to(target.device, target.dtype))


def check(image: EntryImage, layout: Layout, identity: Identity) -> None:
    """Whether an image may be installed: it is this model's, and of its shapes and types.

    Raises:
        StoreCorrupt: it may not, and why.
    """
    if image.identity != identity:
        raise StoreCorrupt(f"the entry {image.key.hex()[:16]} belongs to another model; it is left alone.")
    if not image.is_snapshot:
        key = identity.key(image.ids, image.seam, image.namespace, image.deterministic, image.primer)
        _demand(image.key == key and 0 <= image.seam < len(image.ids), image, "its key is not that of its tokens")
    _demand(len(image.linear) == len(layout.linear), image, "it has another number of linear layers")
    _demand(len(image.attention) == len(layout.attention), image, "it has another number of full-attention layers")
    for part, shape in zip(image.linear, layout.linear, strict=True):
        _check_linear(image, part, shape, layout)
    for kept, heads in zip(image.attention, layout.attention, strict=True):
        rows = (image.num_cached, heads.num_kv_heads)
        _is_like(image, kept.keys, (*rows, heads.key_dim), (layout.dtype,))
        _is_like(image, kept.values, (*rows, heads.value_dim), (layout.dtype,))


def _check_linear(image: EntryImage, part: LinearPart, shape: LinearShape, layout: Layout) -> None:
    allowed = (layout.state_dtype, torch.bfloat16)
    _is_like(image, part.end_state, (shape.num_heads, shape.key_dim, shape.value_dim), allowed)
    _is_like(image, part.tail, shape.tail_shape, (layout.dtype,))
    _demand((part.transition is None) == image.is_snapshot, image, "some of its layers have no transition")
    if part.transition is None:
        return
    num_heads = shape.num_heads
    if part.heads is not None:
        num_heads = part.heads.numel()
        _is_like(image, part.heads, (num_heads,), (torch.int32,))
        numbers = part.heads.tolist()
        is_sound = numbers == sorted(set(numbers)) and all(0 <= head < shape.num_heads for head in numbers)
        _demand(is_sound, image, "it names heads that are not there")
    _is_like(image, part.transition, (num_heads, *shape.transition_shape[1:]), allowed)


def _is_like(image: EntryImage, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    if tensor.shape != tuple(shape) or tensor.dtype not in dtypes:  # said of a hundred, so only if it is wrong
        found = f"a tensor is {tensor.dtype} {list(tensor.shape)} and should be {dtypes[0]} {list(shape)}"
        _demand(False, image, found)


def _demand(holds: bool, image: EntryImage, fault: str) -> None:
    if not holds:
        raise StoreCorrupt(f"the entry {image.key.hex()[:16]} is not sound: {fault}.")

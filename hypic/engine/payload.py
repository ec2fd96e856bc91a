"""An entry as it travels between workers: packed where it lies, and on arrival nothing but tensors by name.

What an entry is (key, tokens, seam, labels) the worker that needs it knows already, since it asked; so only tensors are
sent, and whatever does not fit what was asked is refused before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.engine import Engine
from hypic.engine.parallel.messages import Entry, Want
from hypic.engine.parallel.packing import ALIGNMENT, Spec, digest, is_finite, pack, read, unpack
from hypic.engine.parallel.wants import Pending
from hypic.engine.pool import Layout, Pool
from hypic.engine.request import Encode
from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.storage import norms
from hypic.engine.store.image import AttentionPart, EntryImage, LinearPart, check, view
from hypic.errors import StoreCorrupt

# What two workers may differ by in the entry of one text, by the numeric type of their weights.
SAME_WITHIN = {torch.float64: 1e-8, torch.float32: 1e-3}
SAME_WITHIN_HALF = 0.1
# How far above the limit a norm may be that another worker found below it.
NEARLY = 1.0 + SAME_WITHIN_HALF


@dataclass(frozen=True)
class Canary:
    """A text whose entry this worker has made itself: a peer is asked for it first, and used if it makes the same."""

    entry: CachedSegment
    image: EntryImage


def outgoing(pool: Pool, entry: CachedSegment, identity: Identity) -> tuple[tuple[Spec, ...], Tensor]:
    """An entry's tensors as one run of bytes on the pool's device."""
    with torch.inference_mode():
        return pack(view(pool, entry, identity).tensors)


def incoming(
    specs: tuple[Spec, ...], data: Tensor, entry: CachedSegment, identity: Identity, layout: Layout
) -> EntryImage:
    """What came, as the image of the entry that was asked for; its tensors are views of ``data``.

    Raises:
        StoreCorrupt: it is not of this model's shapes and types, or not finite.
    """
    with torch.inference_mode():
        tensors = unpack(specs, data)
        image = EntryImage(
            key=entry.key,
            ids=entry.ids,
            seam=len(entry.ids) - entry.num_cached,
            identity=identity,
            linear=tuple(_linear(tensors, f"linear.{n}") for n in range(len(layout.linear))),
            attention=tuple(_attention(tensors, f"attention.{n}") for n in range(len(layout.attention))),
            deterministic=entry.deterministic,
            namespace=entry.namespace,
            name=entry.name,
            source=entry.source,
        )
        check(image, layout, identity)
        if set(image.tensors) != set(tensors) or not is_finite(specs, data):
            raise StoreCorrupt(f"the entry {entry.key.hex()[:16]} came with parts that cannot be; it is not used.")
    return image


def difference(found: EntryImage, expected: EntryImage, drop_below: float = 0.0) -> float:
    """The largest relative distance (Frobenius) of any tensor from what it should be; infinite if shapes differ.

    A transition that was dropped is zero. Where only one of the two images kept a head's, rounding decided if its norm
    is ``drop_below`` or hardly more, and the head does not count.
    """
    mine, theirs = dict(_whole(expected)), dict(_whole(found))
    if {name: tensor.shape for name, tensor in mine.items()} != {n: tensor.shape for n, tensor in theirs.items()}:
        return math.inf
    worst = 0.0
    for name, tensor in mine.items():
        other = theirs[name].to(tensor.device)
        if name.endswith(".transition") and tensor.ndim > 1:
            tensor, other = _both_kept(tensor, other, drop_below)
        scale, distance = float(tensor.norm()), float((other - tensor).norm())
        worst = max(worst, distance / scale if scale else distance)
    return worst


def _whole(image: EntryImage) -> Iterator[tuple[str, Tensor]]:
    """Numbers by name, transitions of all heads."""
    for name, tensor in image.tensors.items():
        if not name.endswith(".heads"):
            yield name, tensor.double()
    for number, part in enumerate(image.linear):
        if part.heads is not None and part.transition is not None:
            whole = part.transition.new_zeros(len(part.end_state), *part.transition.shape[1:]).double()
            yield f"linear.{number}.transition", whole.index_copy(0, part.heads.long(), part.transition.double())


def _both_kept(one: Tensor, other: Tensor, drop_below: float) -> tuple[Tensor, Tensor]:
    """Transitions, without those that only one has and that are as small as what is dropped."""
    sizes, other_sizes = norms(one[None])[0], norms(other[None])[0]
    is_rounding = (sizes * other_sizes == 0) & (torch.maximum(sizes, other_sizes) <= drop_below * NEARLY)
    kept = ~is_rounding
    return one[kept], other[kept]


def _linear(tensors: Mapping[str, Tensor], prefix: str) -> LinearPart:
    found = [tensors.get(f"{prefix}.{name}") for name in ("transition", "end_state", "tail", "heads")]
    if found[1] is None or found[2] is None:
        raise StoreCorrupt(f"an entry came without a part of {prefix}; it is not used.")
    return LinearPart(found[0], found[1], found[2], found[3])


def _attention(tensors: Mapping[str, Tensor], prefix: str) -> AttentionPart:
    found = [tensors.get(f"{prefix}.{name}") for name in ("keys", "values")]
    if found[0] is None or found[1] is None:
        raise StoreCorrupt(f"an entry came without a part of {prefix}; it is not used.")
    return AttentionPart(found[0], found[1])


def checked(pending: Pending, message: Entry, data: Tensor, identity: Identity, layout: Layout) -> EntryImage:
    """What came, if it is what was asked for and undamaged.

    Raises:
        StoreCorrupt: it is not.
    """
    if message.key != pending.key.hex():
        raise StoreCorrupt("another entry came than was asked for; it is not used.")
    if digest(data) != message.digest or not math.isfinite(message.expires_s or 0.0):
        raise StoreCorrupt(f"the entry {message.key[:16]} came damaged; it is not used.")
    return incoming(read(message.tensors), data, pending.entry, identity, layout)


def same_within(dtype: torch.dtype) -> float:
    """The largest ``difference`` between two workers' entries of one text."""
    return SAME_WITHIN.get(dtype, SAME_WITHIN_HALF)


def largest_bytes(engine: Engine) -> int:
    """No entry of this model takes more."""
    layout = engine.runner.pool.layout
    tokens = engine.runner.max_context * layout.token_bytes
    return layout.state_bytes + layout.transition_bytes + tokens + margin_bytes(layout)


def margin_bytes(layout: Layout) -> int:
    """By so much is an entry larger on its way than in the pool, at most: each part of it is aligned."""
    parts = 4 * len(layout.linear) + 2 * len(layout.attention)
    return ALIGNMENT * (parts + 1)


def note(job: Encode, pending: Pending, message: Entry) -> None:
    """Into the reports of the requests that wait: a hit elsewhere, or tokens that were run on their behalf."""
    owner = next(iter(job.waiters.values()))
    owner.encoded += 0 if message.was_held else len(job.entry.ids)
    for request in job.waiters.values():
        outcome, reason = request.outcomes.get(pending.key, ("hit", ""))
        if outcome == "encoded":
            by = f"{reason}; encoded by worker {pending.peer[0]}"
            request.outcomes[pending.key] = ("hit", "") if message.was_held else (outcome, by)


def want_of(pending: Pending, is_trial: bool = False, waits: bool = False) -> Want:
    """The message that asks for an entry."""
    entry = pending.entry
    seam = len(entry.ids) - entry.num_cached
    labels = (entry.namespace, entry.name, entry.source)
    return Want(
        pending.nonce,
        pending.peer[1],
        entry.key.hex(),
        entry.ids,
        seam,
        *labels,
        entry.expires_s,
        is_trial,
        entry.deterministic,
        waits,
    )

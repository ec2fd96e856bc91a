"""Entries that travel between workers: how they are asked for, whether what came is that, how far two of them differ.

Their bytes are ``parcel.py``. Whatever does not fit what was asked is refused before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hypic.engine.encode import Encode
from hypic.engine.engine import Engine
from hypic.engine.layout import Layout
from hypic.engine.parallel.messages import Entry, Parcel, Want
from hypic.engine.parallel.packing import most_bytes
from hypic.engine.parallel.wants import Pending
from hypic.engine.parcel import Content, Opened, check
from hypic.engine.segment import CachedSegment
from hypic.engine.storage import StorageForm, norms
from hypic.engine.store.image import EntryImage
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


def checked(
    pending: Sequence[Pending | None], message: Parcel, data: Tensor, layout: Layout, form: StorageForm
) -> Opened:
    """What came, if it is what was asked for and undamaged; what is wanted no more (``None``) comes beside the rest.

    Raises:
        StoreCorrupt: it is not.
    """
    for one, entry in zip(pending, message.entries, strict=True):
        if one is not None and (entry.key, entry.num_tokens) != (one.key.hex(), one.entry.num_cached):
            raise StoreCorrupt("another entry came than was asked for; it is not used.")
        if not math.isfinite(entry.expires_s or 0.0):
            raise StoreCorrupt(f"the entry {entry.key[:16]} came damaged; it is not used.")
    content = Content(tuple(entry.num_tokens for entry in message.entries), message.num_kept)
    return check(layout, form, content, data, message.digest)


def same_within(dtype: torch.dtype) -> float:
    """The largest ``difference`` between two workers' entries of one text."""
    return SAME_WITHIN.get(dtype, SAME_WITHIN_HALF)


def largest_bytes(engine: Engine) -> int:
    """No entry of this model takes more."""
    layout = engine.runner.pool.layout
    tokens = engine.runner.max_context * layout.token_bytes
    return layout.state_bytes + layout.transition_bytes + tokens + margin_bytes(layout)


def margin_bytes(layout: Layout) -> int:
    """By so much is an entry larger on its way than in the pool, at most: each part is aligned, heads have numbers."""
    parts = 4 * len(layout.linear) + 2 * len(layout.attention)
    return most_bytes(4 * sum(shape.num_heads for shape in layout.linear), parts)


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
        entry.primer,
    )

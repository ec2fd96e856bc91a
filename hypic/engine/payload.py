"""An entry as it travels between workers: packed where it lies, and on arrival nothing but tensors by name.

What an entry is (key, tokens, seam, labels) the worker that needs it knows already, since it asked; so only tensors are
sent, and whatever does not fit what was asked is refused before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hypic.engine.parallel.packing import Spec, pack, unpack
from hypic.engine.pool import Layout, Pool
from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.store.image import AttentionPart, EntryImage, LinearPart, check, export
from hypic.errors import StoreCorrupt


def outgoing(pool: Pool, entry: CachedSegment, identity: Identity) -> tuple[tuple[Spec, ...], Tensor]:
    """An entry's tensors as one run of bytes on the pool's device."""
    with torch.inference_mode():
        return pack(export(pool, entry, identity, pool.device).tensors)


def incoming(
    specs: Sequence[Spec], data: Tensor, entry: CachedSegment, identity: Identity, layout: Layout
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
        if set(image.tensors) != set(tensors) or not _all_finite(tensors):
            raise StoreCorrupt(f"the entry {entry.key.hex()[:16]} came with parts that cannot be; it is not used.")
    return image


def difference(found: EntryImage, expected: EntryImage) -> float:
    """The largest relative distance (Frobenius) of any tensor from what it should be."""
    worst = 0.0
    for name, tensor in expected.tensors.items():
        scale = float(tensor.double().norm())
        distance = float((found.tensors[name].to(tensor.device).double() - tensor.double()).norm())
        worst = max(worst, distance / scale if scale else distance)
    return worst


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


def _all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """One answer for all, so that a device is waited for once."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel()]
    return not floats or bool(torch.stack([tensor.isfinite().all() for tensor in floats]).all())

"""A small pool with every kind of transition, entries of random bits in it, and their images."""

from __future__ import annotations

import torch

from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic.engine.segment import CachedSegment, Identity, Label
from hypic.engine.store import image
from hypic.engine.store.image import EntryImage

LAYOUT = Layout(
    (
        LinearShape(2, 4, 3, "dense", conv_channels=5, conv_width=4),
        LinearShape(3, 4, 2, "diagonal"),
        LinearShape(2, 2, 2, "head"),
    ),
    (AttentionShape(1, 4, 2), AttentionShape(2, 3, 3)),
    torch.float32,
    torch.float32,
)
IDENTITY = Identity("0123456789abcdef" * 4, "torch.float32")
SEAM = 4


def make_pool(budget_bytes: int = 2**20, layout: Layout = LAYOUT) -> Pool:
    torch.manual_seed(0)
    pool = Pool(layout, budget_bytes, 4, 64, 4, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values, *pool.states, *pool.tails, *pool.transitions):
        tensor.copy_(torch.randn(tensor.shape))
    return pool


def make_entry(pool: Pool, number: int, num_tokens: int = 11, namespace: str | None = None) -> CachedSegment:
    """An entry of random bits; its key is that of its tokens."""
    ids = tuple(range(number * 1000, number * 1000 + num_tokens))
    key = IDENTITY.key(ids, SEAM, namespace, False)
    pages = pool.take_pages(pool.pages_for(num_tokens - SEAM))
    slots = pool.slots_of(pages, num_tokens - SEAM)
    state, transition = pool.take_state(), pool.take_transition()
    generator = torch.Generator().manual_seed(number)
    for tensors, slot in ((pool.states, state), (pool.tails, state), (pool.transitions, transition)):
        for tensor in tensors:
            tensor[slot] = torch.randn(tensor[slot].shape, generator=generator)
    num_bytes = len(pages) * pool.page_bytes + pool.layout.state_bytes + pool.layout.transition_bytes
    return CachedSegment(
        key,
        ids,
        slots,
        tuple(pages),
        state,
        transition,
        num_bytes,
        f"name {number}",
        "source",
        namespace,
        labels={Label(f"name {number}", "source", namespace), Label("other")},
        expires_s=1e12 + number / 3,
    )


def make_image(number: int = 1, num_tokens: int = 11, namespace: str | None = None) -> EntryImage:
    pool = make_pool()
    return image.export(pool, make_entry(pool, number, num_tokens, namespace), IDENTITY)


def same_images(a: EntryImage, b: EntryImage) -> bool:
    """Equal in every field and every bit."""
    fields = "key ids seam identity is_snapshot deterministic namespace name source labels expires_s".split()
    ours, theirs = a.tensors, b.tensors
    return (
        all(getattr(a, field) == getattr(b, field) for field in fields)
        and ours.keys() == theirs.keys()
        and all(ours[n].dtype == theirs[n].dtype and same_bits(ours[n], theirs[n]) for n in ours)
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and _bytes(a) == _bytes(b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

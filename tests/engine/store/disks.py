"""Disk tiers for tests, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypic.engine.segment import Identity
from hypic.engine.store import encoding
from hypic.engine.store.disk import DiskTier
from hypic.engine.store.image import EntryImage
from tests.engine.store.conftest import IDENTITY

Damage = Callable[[bytes], bytes]
OTHER = Identity("other", "torch.float32")
BUDGET = 2**24


def opened(root: Path, budget: int = BUDGET, identity: Identity = IDENTITY) -> DiskTier:
    return DiskTier(root / "store", budget, identity)


def kept(tier: DiskTier, *images: EntryImage) -> None:
    for image in images:
        assert tier.put(image.key, encoding.encode(image))


def path_of(tier: DiskTier, image: EntryImage) -> Path:
    return tier.folder / f"{image.key.hex()}.safetensors"


def read(tier: DiskTier, image: EntryImage) -> EntryImage | None:
    buffer = tier.get(image.key)
    return None if buffer is None else encoding.decode(buffer)

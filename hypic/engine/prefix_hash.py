"""The running hash by which heads of prompts are named: of live token ids and of entries' keys, in prompt order."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from hypic.engine.segment import Identity
from hypic.types import Policy


def live(ids: Sequence[int]) -> bytes:
    """Live tokens in the running hash; borders between runs leave no trace."""
    return struct.pack(f"<{len(ids)}i", *ids)


def entry(key: bytes) -> bytes:
    """A cached segment in the running hash; no token id is -1."""
    return b"\xff\xff\xff\xff" + key


def named(digest: Any, spaces: set[str | None]) -> bytes:
    """A running hash together with the namespaces of what it covers, so that none is continued from another one.

    Only which they are enters, not where each begins: borders inside live text leave no trace.
    """
    whole = digest.copy()
    for space in sorted(space for space in spaces if space is not None):
        whole.update(b"\xfe\xff\xff\xff" + len(space.encode()).to_bytes(8, "little") + space.encode())
    return bytes(whole.digest())


def start(policy: Policy, identity: Identity) -> Any:
    """The running hash before the first token: everything besides tokens that changes a running state."""
    digest = hashlib.sha256(identity.key((), policy.seam if policy.compose != "transition" else 0, None, False))
    digest.update(f"{policy.compose}|{policy.rotate}|{policy.deterministic}".encode())
    return digest


def later(start: int) -> bytes:
    """A further interior of a segment in the running hash, behind the row that begins at the segment's ``start``."""
    return b"\xfd\xff\xff\xff" + start.to_bytes(8, "little")

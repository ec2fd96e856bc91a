"""Packed ids: keys are the bytes they always were, are made once for a known text, and go with it."""

from __future__ import annotations

import gc
import hashlib
import struct
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic.engine import segment as under_test
from hypic.engine.id_memory import IdMemory
from hypic.engine.plan import Piece, make
from hypic.engine.segment import Identity
from hypic.engine.token_ids import Packed, TokenIds, are_same, head_of, packed_ids
from hypic.types import Policy, Segment

IDENTITY = Identity("f" * 64, "torch.bfloat16")
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)


@given(ids=IDS, others=IDS, stop=st.integers(0, 50))
def test_packed_ids_are_ids(ids: tuple[int, ...], others: tuple[int, ...], stop: int) -> None:
    known = TokenIds(ids)
    assert known == ids and hash(known) == hash(ids) and TokenIds.unpacked(known.packed) == ids
    assert known.packed.data == packed_ids(ids) == struct.pack(f"<{len(ids)}q", *ids)
    head = head_of(known, stop)
    assert head == ids[:stop] and isinstance(head, TokenIds) and head.packed.data == packed_ids(ids[:stop])
    for one in (ids, known):
        for other in (others, TokenIds(others)):
            assert are_same(one, other) == (ids == others)
            assert are_same(one, ids) and are_same(one, TokenIds(ids))


@given(ids=IDS, seam=st.integers(0, 9), namespace=st.sampled_from([None, "", "a"]), deterministic=st.booleans())
def test_keys_are_the_same_bytes(ids: tuple[int, ...], seam: int, namespace: str | None, deterministic: bool) -> None:
    known, rest = TokenIds(ids), (seam, namespace, deterministic)
    expected = IDENTITY.key(ids, *rest)
    assert IDENTITY.key(known, 1, "another", False) == IDENTITY.key(ids, 1, "another", False)
    assert IDENTITY.key(known, *rest) == IDENTITY.key(known, *rest) == expected
    parts = ["1", "f" * 64, "torch.bfloat16", "lossless", "", str(seam), "True:" if deterministic else "False"]
    parts.append("none" if namespace is None else f"some:{namespace}")
    whole = b"".join(len(part.encode()).to_bytes(8, "little") + part.encode() for part in parts)
    assert expected == hashlib.sha256(whole + struct.pack(f"<{len(ids)}q", *ids)).digest()


def test_a_known_text_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its ids are taken out of memory; ids that are nobody's are hashed each time."""
    hashed: list[int] = []
    sound = under_test._key

    def counting(begun: Any, packed: bytes) -> bytes:
        hashed.append(len(packed) // 8)
        return sound(begun, packed)

    monkeypatch.setattr(under_test, "_key", counting)
    memory = IdMemory()
    plans = []
    for _ in range(3):
        ids = memory.of("a text", lambda: TokenIds(range(64)))
        plans.append(make([Piece(ids, Segment("a text")), Piece((1, 2))], Policy(), IDENTITY))
    plain = make([Piece(tuple(range(64)), Segment("a text")), Piece((1, 2))], Policy(), IDENTITY)
    assert hashed.count(64) == 2, "once for the text, once for the tuple"
    assert all(plan.spans == plain.spans and plan.segments == plain.segments for plan in plans)


def test_what_is_packed_goes_with_the_text() -> None:
    memory = IdMemory()
    kept = weakref.ref(memory.of("a text", lambda: TokenIds((1, 2, 3))).packed)
    assert isinstance(kept(), Packed)
    memory.drop(lambda ids: ids == (1, 2, 3))
    gc.collect()
    assert kept() is None and memory.get("a text") is None


class Contested(Packed):
    """What another thread stores of the same text in the moment in which this one does stays."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "key" and value is not None:
            others = IDENTITY.begun(8, "another", False)
            value = others, under_test._key(others, self.data)
        super().__setattr__(name, value)


def test_threads_that_make_keys_of_one_text_get_their_own() -> None:
    ids = TokenIds(range(64))
    expected = IDENTITY.key(tuple(ids), 8, "mine", False)
    ids.__dict__["packed"] = Contested(packed_ids(ids))
    assert IDENTITY.key(ids, 8, "mine", False) == expected
    assert IDENTITY.key(ids, 8, "another", False) == IDENTITY.key(tuple(ids), 8, "another", False) != expected

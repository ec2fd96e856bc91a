"""Images of entries: every bit comes back, and nothing that is not sound is let in."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.store import encoding, image
from hypic.engine.store.header import CHECKSUM
from hypic.engine.store.image import EntryImage
from hypic.errors import StoreCorrupt
from tests.engine.store.conftest import IDENTITY, LAYOUT, make_entry, make_image, make_pool, same_images


def as_buffer(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Bytes as ``decode`` takes them."""
    return torch.tensor(list(data), dtype=torch.uint8)


def reinstalled(found: EntryImage) -> EntryImage:
    """Through other slots of another pool."""
    pool = make_pool()
    make_entry(pool, 7)
    entry = image.take(pool, found)
    image.install(pool, found, entry)
    return image.export(pool, entry, found.identity)


@pytest.mark.parametrize("num_tokens", [5, 8, 11, 12, 13, 60])
def test_an_entry_survives_export_and_install(num_tokens: int) -> None:
    found = make_image(1, num_tokens, namespace="tenant")
    image.check(found, LAYOUT, IDENTITY)
    assert same_images(reinstalled(found), found)
    assert found.num_cached == num_tokens - 4 and found.num_kept_heads == (7, 7)


def test_an_image_holds_no_handle_into_the_pool() -> None:
    pool = make_pool()
    found = image.export(pool, make_entry(pool, 1), IDENTITY)
    before = {name: tensor.clone() for name, tensor in found.tensors.items()}
    for tensor in (*pool.keys, *pool.values, *pool.states, *pool.tails, *pool.transitions):
        tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.tensors.items())


def test_a_snapshot_is_an_image_without_transitions() -> None:
    pool = make_pool()
    entry = make_entry(pool, 1)
    head = CachedSegment(b"s" * 32, entry.ids[4:], entry.kv_slots, entry.pages, entry.state_slot, None, 10)
    found = image.export(pool, head, IDENTITY)
    assert found.is_snapshot and found.seam == 0
    image.check(found, LAYOUT, IDENTITY)
    assert same_images(reinstalled(found), found)
    assert same_images(encoding.decode(encoding.encode(found)), found)


def test_kept_heads_alone_are_stored_and_the_others_come_back_as_zero() -> None:
    found = make_image()
    part = found.linear[0]
    heads = torch.tensor([1], dtype=torch.int32)
    assert part.transition is not None
    small = replace(found, linear=(replace(part, transition=part.transition[1:], heads=heads), *found.linear[1:]))
    image.check(small, LAYOUT, IDENTITY)
    back = reinstalled(encoding.decode(encoding.encode(small))).linear[0].transition
    assert back is not None and not back[0].any() and torch.equal(back[1], part.transition[1])
    assert small.num_kept_heads == (6, 7) and small.num_bytes < found.num_bytes


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_survives_encoding(dtype: torch.dtype) -> None:
    found = make_image(namespace="tenant ü")
    parts = tuple(replace(part, end_state=part.end_state.to(dtype)) for part in found.linear)
    found = replace(found, linear=parts)
    assert same_images(encoding.decode(encoding.encode(found)), found)


def test_copies_to_the_host_are_awaited_on_the_devices_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for tensors and streams, since the machine may have no second device."""
    awaited: list[torch.device | None] = []

    def stream(device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: awaited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    places: list[Any] = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1", "cuda:1", "cuda:0")]
    encoding._await_copies(places[:1])
    assert not awaited
    encoding._await_copies(places)
    assert sorted(map(str, awaited)) == ["cuda:0", "cuda:1"]


def test_what_is_written_is_a_safetensors_file() -> None:
    found = make_image()
    tensors = load_safetensors(encoding.encode(found).numpy().tobytes())
    assert tensors.pop("ids").tolist() == list(found.ids)
    assert tensors.keys() == found.tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in found.tensors.items())


def test_every_flipped_bit_is_found() -> None:
    sound = encoding.encode(make_image(num_tokens=6))
    for place in range(len(sound)):
        buffer = sound.clone()
        buffer[place] ^= 1 << (place % 8)
        with pytest.raises(StoreCorrupt):
            encoding.decode(buffer)


def test_every_truncation_is_found() -> None:
    sound = encoding.encode(make_image(num_tokens=6))
    for length in (*range(0, len(sound), 61), len(sound) - 1):
        with pytest.raises(StoreCorrupt):
            encoding.decode(sound[:length], verify=False)
    with pytest.raises(StoreCorrupt, match="too long"):
        encoding.decode(torch.cat([sound, sound[:1]]), verify=False)


def forged(change: dict[str, object], tensors: dict[str, object] | None = None) -> torch.Tensor:
    """A file whose header says something else and whose checksum is right again."""
    data = encoding.encode(make_image()).numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"].update(change)
    for name, spec in (tensors or {}).items():
        header[name] = spec
    text = json.dumps({k: v for k, v in header.items() if v is not None}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    buffer = as_buffer(bytearray(len(text).to_bytes(8, "little") + text + data[8 + length :]))
    digits = as_buffer(encoding.checksum(buffer).encode())
    buffer[CHECKSUM] = digits
    return buffer


HOSTILE = [
    ({"version": "999"}, {}),
    ({"layers": "-1,-1"}, {}),
    ({"layers": "9999999999,2"}, {}),
    ({"layers": "many"}, {}),
    ({"seam": "-3"}, {}),
    ({"seam": "99"}, {}),
    ({"snapshot": "2"}, {}),
    ({"key": "zz"}, {}),
    ({"name": 5}, {}),
    ({"labels": "[[1, 2, 3]]"}, {}),
    ({"labels": "[[null]]"}, {}),
    ({"labels": "7"}, {}),
    ({"expires_s": "never"}, {}),
    ({"expires_s": "nan"}, {}),
    ({}, {"ids": None}),
    ({}, {"ids": {"dtype": "I32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
    ({}, {"ids": {"dtype": "F32", "shape": [11], "data_offsets": [0, 44]}}),
    ({}, {"ids": {"dtype": "I32", "shape": [-11, -1], "data_offsets": [0, 44]}}),
    ({}, {"ids": {"dtype": "PICKLE", "shape": [11], "data_offsets": [0, 44]}}),
    ({}, {"ids": "text"}),
    ({}, {"more": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
    ({}, {"linear.0.tail": None}),
]


@pytest.mark.parametrize(("metadata", "tensors"), HOSTILE)
def test_a_forged_header_is_refused(metadata: dict[str, object], tensors: dict[str, object]) -> None:
    assert same_images(encoding.decode(forged({})), make_image()), "what is not forged is read"
    with pytest.raises(StoreCorrupt):
        encoding.decode(forged(metadata, tensors))


def test_tensors_that_cannot_be_read_in_place_are_refused() -> None:
    data = encoding.encode(make_image()).numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    with pytest.raises(StoreCorrupt, match="type can be read"):
        encoding.decode(as_buffer(shifted), verify=False)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.booleans())
def test_rubbish_is_refused_and_nothing_else_happens(rubbish: bytes, place: int, inside: bool) -> None:
    data = encoding.encode(make_image(num_tokens=6)).numpy().tobytes()
    data = data[:place] + rubbish + data[place + len(rubbish) :] if inside else rubbish
    try:
        encoding.decode(as_buffer(data))
    except StoreCorrupt:
        return
    assert data == encoding.encode(make_image(num_tokens=6)).numpy().tobytes()


# -- what may be installed -------------------------------------------------------------------------------------------


def with_linear(found: EntryImage, **changes: Any) -> EntryImage:
    return replace(found, linear=(replace(found.linear[0], **changes), *found.linear[1:]))


def test_only_this_models_entries_of_the_right_shape_are_let_in() -> None:
    found, other = make_image(), Identity("another model", "torch.float32")
    part = found.linear[0]
    assert part.transition is not None
    wrong = [
        replace(found, identity=other),
        replace(found, key=b"x" * 32),
        replace(found, ids=(*found.ids[:-1], 5)),
        replace(found, namespace="tenant"),
        replace(found, deterministic=True),
        replace(found, linear=found.linear[:2]),
        replace(found, attention=found.attention[::-1]),
        with_linear(found, end_state=part.end_state[:1]),
        with_linear(found, end_state=part.end_state.half()),
        with_linear(found, tail=part.tail[1:]),
        with_linear(found, transition=None),
        with_linear(found, transition=part.transition[:1]),
        with_linear(found, heads=torch.tensor([0, 2], dtype=torch.int32)),
        with_linear(found, heads=torch.tensor([1, 1], dtype=torch.int32)),
        with_linear(found, heads=torch.tensor([0, 1])),
    ]
    for image_ in wrong:
        with pytest.raises(StoreCorrupt):
            image.check(image_, LAYOUT, IDENTITY)

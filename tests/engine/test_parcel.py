"""Entries out of one pool and into another, several at once: every bit, whatever a model's layers are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hypic.engine import parcel
from hypic.engine.layout import AttentionShape, Layout, LinearShape
from hypic.engine.pool import Pool
from hypic.engine.segment import CachedSegment, Identity
from hypic.engine.storage import StorageForm
from hypic.engine.store.image import EntryImage, export, take
from hypic.errors import StoreCorrupt
from tests.checkpoints import random_ids

IDENTITY, SEAM = Identity("f", "d"), 4
LAYOUTS = {
    "alike": ((LinearShape(2, 8, 4, "dense", 6, 4),) * 3, (AttentionShape(2, 4, 8),) * 2),
    "of several shapes": (
        (LinearShape(2, 8, 4, "dense", 6, 4), LinearShape(3, 4, 4, "diagonal"), LinearShape(2, 8, 4, "dense", 6, 4)),
        (AttentionShape(1, 4, 4), AttentionShape(2, 3, 5), AttentionShape(1, 4, 4)),
    ),
    "odd": ((LinearShape(3, 5, 7, "head", 5, 3),) * 2, (AttentionShape(1, 3, 1),)),
    "no attention": ((LinearShape(2, 4, 4, "dense"),), ()),
    "no linear": ((), (AttentionShape(1, 4, 4),) * 2),
}
FORMS = {
    "lossless": StorageForm(),
    "rounded": StorageForm(torch.bfloat16),
    "dropped": StorageForm(drop_below=0.5),
    "both": StorageForm(torch.bfloat16, 0.5),
}
LENGTHS = (40, SEAM + 1, 19)


def layout_of(name: str) -> Layout:
    return Layout(*LAYOUTS[name], torch.bfloat16, torch.float32)


def everything(pool: Pool) -> list[Tensor]:
    return [*pool.keys, *pool.values, *pool.states, *pool.tails, *pool.transitions]


def filled(layout: Layout, form: StorageForm, seed: int, device: str = "cpu", num_bytes: int = 2**20) -> Pool:
    """A pool whose numbers are such as its form leaves them: every second head's transition is dropped."""
    pool = Pool(layout, num_bytes, 4, 64, 4, torch.device(device), form)
    random = torch.Generator(device).manual_seed(seed)
    for tensor in everything(pool):
        tensor.copy_(torch.randn(tensor.shape, generator=random, device=device).bfloat16())
    for transitions in pool.transitions if form.drop_below else ():
        if transitions.ndim > 2:
            transitions[:, seed % 2 :: 2] = 0.0
    return pool


def entries(pool: Pool, first: int = 0) -> list[CachedSegment]:
    found = []
    for number, length in enumerate(LENGTHS, first):
        ids = tuple(random_ids(length, number))
        key = IDENTITY.key(ids, SEAM, None, False)
        found.append(take(pool, EntryImage(key, ids, SEAM, IDENTITY, (), ())))
    return found


def same(one: EntryImage, other: EntryImage) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_packed_is_there_again_and_nothing_else_is_touched(name: str, form: StorageForm) -> None:
    layout = layout_of(name)
    giver, taker = filled(layout, form, 1), filled(layout, form, 2)
    sent, others = entries(giver), entries(taker, 10)
    content, data, total = parcel.pack(giver, sent)
    found = parcel.check(layout, form, content, data, total)
    before = [export(taker, entry, IDENTITY) for entry in others]
    untouched = [tensor.clone() for tensor in everything(taker)]
    places = entries(taker)
    parcel.write(taker, found, [])
    assert all(map(torch.equal, untouched, everything(taker)))
    for wanted in ([1], [2, 0], [0, 1, 2]):
        parcel.write(taker, found, [(number, places[number]) for number in wanted])
        for number in range(3):
            is_there = same(export(taker, places[number], IDENTITY), export(giver, sent[number], IDENTITY))
            assert is_there == (number in wanted)
        assert all(map(same, before, [export(taker, entry, IDENTITY) for entry in others]))
        for tensor, was in zip(everything(taker), untouched, strict=True):
            tensor.copy_(was)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_entry_of_a_parcel_is_seen_as_it_is(name: str, form: StorageForm) -> None:
    layout = layout_of(name)
    pool = filled(layout, form, 1)
    sent = entries(pool)
    content, data, total = parcel.pack(pool, sent)
    found = parcel.check(layout, form, content, data, total)
    for number, entry in enumerate(sent):
        seen, whole = parcel.image(found, number, entry, IDENTITY, layout), export(pool, entry, IDENTITY)
        for mine, theirs in zip(seen.attention, whole.attention, strict=True):
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
        for layer, (part, other) in enumerate(zip(seen.linear, whole.linear, strict=True)):
            assert torch.equal(part.end_state, other.end_state) and torch.equal(part.tail, other.tail)
            assert part.transition is not None and entry.transition_slot is not None
            assert torch.equal(part.transition.float(), pool.transitions[layer][entry.transition_slot])


def test_what_is_dropped_does_not_travel() -> None:
    layout = layout_of("alike")
    pools = [filled(layout, form, 1) for form in FORMS.values()]
    packed = [parcel.pack(pool, entries(pool)) for pool in pools]
    assert [content.num_kept for content, _, _ in packed] == [(parcel.ALL,), (parcel.ALL,), (9,), (9,)]
    found = [parcel.opened(layout, pool.form, p[0], p[1]) for pool, p in zip(pools, packed, strict=True)]
    sizes = [sum(part.nbytes for part in one.transitions + one.states) for one in found]
    assert sizes[0] == 2 * sizes[1] and sizes[2] == 2 * sizes[3] and sizes[2] < sizes[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_damaged_or_cannot_be_is_refused(device: str) -> None:
    layout, form = layout_of("alike"), FORMS["dropped"]
    pool = filled(layout, form, 1, device)
    content, data, total = parcel.pack(pool, entries(pool))

    def refused(content: parcel.Content, data: Tensor, total: int, why: str) -> None:
        with pytest.raises(StoreCorrupt, match=why):
            parcel.check(layout, form, content, data, total)

    flipped = data.clone()
    flipped[100] ^= 1
    refused(content, flipped, total, "damaged")
    refused(content, data, total + 1, "damaged")
    refused(content, data[: len(data) // 2], total, "do not fill")
    for change in ({"num_kept": ()}, {"num_kept": (-2,)}, {"num_kept": (19,)}, {"num_tokens": (36, -1, 15)}):
        refused(replace(content, **change), data, total, "cannot be")  # type: ignore[arg-type]
    refused(replace(content, num_tokens=(2**31,), num_kept=(0,)), data, total, "do not fill")
    for spoil in (nan_state, infinite_key, twice, beyond):
        spoilt = data.clone()
        spoil(parcel.opened(layout, form, content, spoilt))
        refused(content, spoilt, int(parcel.digest(spoilt)), "numbers that cannot be")
    parcel.check(layout, form, content, data, total)


def nan_state(found: parcel.Opened) -> None:
    found.states[0][2, 1, 0, 0, 0] = float("nan")


def infinite_key(found: parcel.Opened) -> None:
    found.keys[0][1, 7] = -float("inf")


def twice(found: parcel.Opened) -> None:
    found.numbers[0][3] = found.numbers[0][2]


def beyond(found: parcel.Opened) -> None:
    found.numbers[0][-1] = 18


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU: whatever is no view."""

    VIEWS = ("select.int", "view", "slice", "split", "detach", "alias", "as_strided", "unbind", "flatten", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(name in str(function) for name in self.VIEWS)
        return function(*args, **(kwargs or {}))


def test_a_parcel_takes_as_many_launches_whatever_it_holds() -> None:
    """Neither by the layer nor by the entry, but for copies of many tensors at once."""
    counts = []
    for num_layers, num_entries in ((2, 1), (2, 3), (30, 3)):
        layers = (LinearShape(2, 8, 4, "dense", 6, 4),) * num_layers, (AttentionShape(2, 4, 8),) * num_layers
        layout = Layout(*layers, torch.bfloat16, torch.float32)
        pool = filled(layout, StorageForm(), 1, num_bytes=2**22)
        sent = entries(pool)[:num_entries]
        with torch.inference_mode(), Launches() as launches:
            content, data, total = parcel.pack(pool, sent)
            found = parcel.check(layout, StorageForm(), content, data, total)
            parcel.write(pool, found, list(enumerate(sent)))
        counts.append(launches.count)
    assert len(set(counts)) == 1 and counts[0] < 80


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_packs_the_bytes_that_a_cpu_packs(name: str, form: StorageForm) -> None:
    """In a stream of its own, as workers do."""
    layout = layout_of(name)
    here, there = filled(layout, form, 1), filled(layout, form, 1, "cuda")
    for mine, theirs in zip(everything(here), everything(there), strict=True):
        theirs.copy_(mine)
    sent, theirs = entries(here), entries(there)
    content, data, total = parcel.pack(here, sent)
    taker = filled(layout, form, 2, "cuda")
    places = entries(taker)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        other, bytes_there, total_there = parcel.pack(there, theirs)
        assert (other, total_there) == (content, total) and torch.equal(bytes_there.cpu(), data)
        found = parcel.check(layout, form, content, bytes_there, total)
        parcel.write(taker, found, list(enumerate(places)))
        torch.cuda.current_stream().synchronize()
    for entry, place in zip(sent, places, strict=True):
        assert same(export(taker, place, IDENTITY), export(here, entry, IDENTITY))


@pytest.mark.gpu
def test_packing_takes_no_memory_by_the_pool() -> None:
    """Whatever reads a stack of layers must not copy it: it is most of a GPU's memory."""
    layers = (LinearShape(4, 64, 64, "dense", 64, 4),) * 8, (AttentionShape(2, 64, 64),) * 4
    pool = Pool(Layout(*layers, torch.bfloat16, torch.float32), 2**30, 16, 4096, 4, torch.device("cuda"))
    for tensor in everything(pool):
        tensor.zero_()
    sent = entries(pool)
    content, data, total = parcel.pack(pool, sent)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    content, data, total = parcel.pack(pool, sent)
    found = parcel.check(pool.layout, pool.form, content, data, total)
    parcel.write(pool, found, list(enumerate(sent)))
    assert torch.cuda.max_memory_allocated() - before < 4 * len(data) + 2**22

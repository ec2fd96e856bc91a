"""Rotary Lightning: a state that is placed, then run, against the run in place; and which states are moved at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.batch import Batch, Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.layers.lightning_attention import LightningAttention
from hypic.engine.layers.linear_attention import mix
from hypic.engine.layers.rotary import Angles, Rotary, move, rotate
from hypic.engine.pool import Layout, LinearShape, Pool
from hypic.errors import UnsupportedModel
from tests.engine.expected import relative
from tests.engine.lifts import F64, FAMILIES, HEADS, K, as_matrix, draw, mapped
from tests.reference import Faults
from tests.reference.ring import Ring, Tokens, chain

THETA, ROTARY_DIM, HEAD_DIM, RING_HEADS = 1000.0, 8, 16, 4
SLOPES = torch.tensor([0.3, 0.1, 0.02, 0.005], dtype=F64)
RING = Ring(SLOPES, THETA, ROTARY_DIM)


class Bare(LightningAttention):
    """The layer without what follows its recurrence."""

    def output(self, mixed: Tensor, projected: Any) -> Tensor:
        return mixed


def bare_layer() -> Bare:
    layer = Bare(24, RING_HEADS, HEAD_DIM, SLOPES).to(F64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


Part = tuple[Tensor, int | None]


def texts(*lengths: int | tuple[int, int]) -> list[Part]:
    """Hidden states of live text (a length) and of segments (length and seam)."""
    parts: list[Part] = []
    for length in lengths:
        num, seam = length if isinstance(length, tuple) else (length, None)
        parts.append((torch.randn(num, 24, dtype=F64), seam))
    return parts


def expected_of(layer: Bare, parts: Sequence[Part], faults: Faults = Faults()) -> tuple[Tensor, Tensor]:
    links = []
    for hidden, seam in parts:
        q, k, v = torch.nn.functional.silu(layer.project(hidden).qkv).split(HEAD_DIM, dim=-1)
        links.append(Tokens(q, k, v, seam))
    outputs, state = chain(RING, links, faults)
    return outputs * HEAD_DIM**0.5, state  # MiniMax's layer does not scale its queries


def engine_of(layer: Bare, parts: Sequence[Part], shift: int = 0) -> tuple[Tensor, Tensor]:
    """Segments are encoded and placed in one batch; outputs of the request's rows and its last state."""
    shape = LinearShape(RING_HEADS, HEAD_DIM, HEAD_DIM, "head")
    pool = Pool(Layout((shape,), (), F64, F64), 2**22, 16, 1024, 20, torch.device("cpu"))
    pool.clear_maps(torch.arange(1, 20), torch.arange(0, 19))
    chains, links, hidden, rows, position = [], [], [], [], 0
    slots = np.zeros(2000, dtype=np.int64)
    for number, (states, seam) in enumerate(parts):
        live = len(states) if seam is None else min(seam, len(states))
        links.append(RowLink([0] * live, position, slots[:live]))
        rows.append(states[:live])
        if seam is not None and len(states) > seam:
            rest = len(states) - seam
            encode = [RowLink([0] * seam, 0, slots[:seam])] if seam else []
            encode.append(RowLink([0] * rest, seam, slots[:rest], None, FoldInto(2 + number, number, 0)))
            chains.append(Chain(encode, slots[: len(states)], 0, 40 + number))
            links.append(InteriorLink(2 + number, number, rest, position + shift))
            hidden.append(states)
        position += len(states)
    chains.append(Chain([link for link in links if isinstance(link, InteriorLink) or link.ids], slots[:position], 0, 1))
    batch = Batch.pack(chains, 1, pool.device)
    rotary = Rotary(ROTARY_DIM, THETA)
    angles = rotary(batch.positions, 2000, F64)
    moves = rotary(batch.scan.interior_origins, 2000, F64)
    outputs = mix(layer, torch.cat([*hidden, *rows]), batch, pool, 0, angles, moves)  # type: ignore[arg-type]
    return outputs[batch.chain_tokens[-1]], pool.states[0][1]


@torch.no_grad()
def test_placed_then_run_equals_run_in_place() -> None:
    layer = bare_layer()
    parts = texts(5, (30, 8), (9, 8), 3, (70, 4), (200, 8), (8, 8), 12)
    outputs, state = engine_of(layer, parts)
    expected, expected_state = expected_of(layer, parts)
    assert relative(outputs, expected) < 1e-10 and relative(state, expected_state) < 1e-10
    contiguous = [(torch.cat([hidden for hidden, _ in parts]), None)]
    whole, whole_state = expected_of(layer, contiguous)
    run, positions = [], 0
    for hidden, seam in parts:
        live = len(hidden) if seam is None else min(seam, len(hidden))
        run += range(positions, positions + live)
        positions += len(hidden)
    assert relative(outputs, whole[run]) < 1e-10 and relative(state, whole_state) < 1e-10


@torch.no_grad()
def test_placing_bites() -> None:
    layer = bare_layer()
    parts = texts(5, (30, 8), (70, 4), 12)
    expected, expected_state = expected_of(layer, parts)
    for shift in (1, -1):
        outputs, state = engine_of(layer, parts, shift)
        assert relative(outputs, expected) > 1e-4 and relative(state, expected_state) > 1e-4
    outputs, _ = engine_of(layer, parts)
    for faults in (Faults(drop_transition=True), Faults(skip_rotation=True), Faults(shift_seam_by=1)):
        assert relative(outputs, expected_of(layer, parts, faults)[0]) > 1e-4


@pytest.mark.parametrize("kind", ["head", "dense"])
def test_a_thousand_moves_equal_one(kind: str) -> None:
    shape = {"head": (2, 3), "dense": (2, 3, 16, 16)}[kind]
    maps = Affine(torch.randn(shape, dtype=F64), torch.randn(2, 3, 16, 5, dtype=F64))
    rotary = Rotary(ROTARY_DIM, THETA)
    steps = [int(s) for s in torch.randint(1, 9, (1000,))]
    moved = maps
    for distance in steps:
        moved = move(moved, _angles(rotary, distance), has_channel_gate=False)
    once = move(maps, _angles(rotary, sum(steps)), has_channel_gate=False)
    assert relative(moved.end_state, once.end_state) < 1e-10
    assert relative(moved.transition, once.transition) < 1e-10
    other = move(maps, _angles(rotary, sum(steps) + 1), has_channel_gate=False)
    assert relative(moved.end_state, other.end_state) > 1e-3


def _angles(rotary: Rotary, distance: int) -> Angles:
    return rotary(torch.tensor([distance, distance]), 16384, F64)


@pytest.mark.parametrize("name", FAMILIES)
def test_states_behind_a_gate_per_channel_are_not_moved(name: str) -> None:
    """Refused by the family, whatever the kind of its transition: GLA's is diagonal, KDA's a matrix."""
    family, x = FAMILIES[name][0], draw(name, 2, 9)
    maps = family.lift(x).maps
    if name not in ("gla", "kda"):
        return _moves_like_its_keys(name, maps, x)
    with pytest.raises(UnsupportedModel, match="gate per channel.*commute"):
        move(maps, _angles(SMALL, 3), has_channel_gate=family.has_channel_gate)


SMALL = Rotary(K, THETA)


def _moves_like_its_keys(name: str, maps: Affine, x: Any) -> None:
    """The moved map is that of rotated keys."""
    family, turned = FAMILIES[name][0], mapped(x, lambda t: t)
    angles = _angles(SMALL, 3)
    keys = rotate(x.k.permute(0, 2, 1, 3).flatten(1, 2), angles).unflatten(1, (-1, HEADS)).permute(0, 2, 1, 3)
    found = move(maps, angles, has_channel_gate=family.has_channel_gate)
    expected = family.lift(replace(turned, k=keys)).maps
    assert relative(found.end_state, expected.end_state) < 1e-12
    assert relative(as_matrix(found.transition), as_matrix(expected.transition)) < 1e-12
    assert relative(maps.end_state, expected.end_state) > 1e-3, "the move must matter"

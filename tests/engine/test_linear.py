"""Families of linear attention: the lift against the recurrence it stands for, moves of rotary states, conv tails.

The families are found by listing the folder, so a new one is held to the same laws without being named here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.engine import linear
from hypic.engine.affine import Affine
from hypic.engine.batch import Batch, Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.layers.conv import convolve_rows
from hypic.engine.layers.lightning_attention import LightningAttention
from hypic.engine.layers.linear_attention import mix
from hypic.engine.layers.rotary import Angles, Rotary, move, rotate
from hypic.engine.linear.mamba2 import Mamba2, Mamba2Inputs
from hypic.engine.pool import Layout, LinearShape, Pool
from hypic.errors import UnsupportedModel
from tests.engine.expected import relative
from tests.reference import Faults
from tests.reference.ring import Ring, Tokens, chain

F64 = torch.float64
HEADS, K, V = 3, 8, 5


def families() -> dict[str, tuple[Any, type]]:
    """Every family of the package, by its module: an instance, and the class of its inputs."""
    found: dict[str, tuple[Any, type]] = {}
    for info in pkgutil.iter_modules(linear.__path__):
        module = importlib.import_module(f"{linear.__name__}.{info.name}")
        own = [item for item in vars(module).values() if getattr(item, "__module__", "") == module.__name__]
        kinds = [item for item in own if isinstance(item, type) and hasattr(item, "lift") and hasattr(item, "step")]
        inputs = [item for item in own if is_dataclass(item) and item.__name__.endswith("Inputs")]
        assert len(kinds) == len(inputs) == 1, f"{info.name} is no family of the form that is expected here"
        found[info.name] = kinds[0](), inputs[0]
    return found


FAMILIES = families()
GATED = [name for name, (_, inputs) in FAMILIES.items() if "g" in {field.name for field in fields(inputs)}]


def draw(name: str, num_chunks: int, num_tokens: int, seed: int = 0, dtype: torch.dtype = F64) -> Any:
    """Inputs ``[M, H, C, ...]`` of a family, decaying slowly."""
    family, kind = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    shape = (num_chunks, HEADS, num_tokens)

    def normal(*dims: int) -> Tensor:
        return torch.randn(*shape, *dims, generator=generator, dtype=F64)

    gate_dims = (K,) if family.has_channel_gate else ()
    drawn = {
        "q": normal(K),
        "k": torch.nn.functional.normalize(normal(K), dim=-1),
        "v": normal(V),
        "g": -0.1 * torch.rand(*shape, *gate_dims, generator=generator, dtype=F64),
        "beta": torch.rand(*shape, generator=generator, dtype=F64),
    }
    return kind(**{field.name: drawn[field.name].to(dtype) for field in fields(kind)})


def mapped(x: Any, change: Any) -> Any:
    return type(x)(**{field.name: change(getattr(x, field.name)) for field in fields(x)})


def joined(x: Any, y: Any) -> Any:
    return type(x)(**{f.name: torch.cat([getattr(x, f.name), getattr(y, f.name)], dim=2) for f in fields(x)})


def stepped(family: Any, x: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: outputs ``[M, H, C, V]`` and the state after."""
    outputs = []
    for t in range(x.k.shape[2]):
        out, state = family.step(mapped(x, lambda tensor, t=t: tensor[:, :, t]), state)
        outputs.append(out)
    return torch.stack(outputs, dim=2), state


def probed(family: Any, x: Any) -> tuple[Tensor, Tensor]:
    """``(T [M, H, K, K], B [M, H, K, V])``: the recurrence on the state ``[0 | I]`` with values ``[v | 0]``."""
    num = len(x.k)
    state = torch.cat([x.v.new_zeros(num, HEADS, K, V), torch.eye(K, dtype=x.v.dtype).expand(num, HEADS, K, K)], dim=-1)
    wide = replace(x, v=torch.nn.functional.pad(x.v, (0, K)))
    _, end = stepped(family, wide, state)
    return end[..., V:], end[..., :V]


def as_matrix(transition: Tensor) -> Tensor:
    eye = torch.eye(K, dtype=transition.dtype)
    missing = 4 - transition.ndim
    return transition if missing == 0 else transition[(...,) + (None,) * missing] * eye


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 63, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_lift_is_the_probe(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, num_tokens, dtype=dtype)
    lifted = family.lift(x)
    transition, end_state = probed(family, mapped(x, lambda t: t.to(F64)))
    limit = 1e-12 if dtype == F64 else 1e-5
    assert relative(as_matrix(lifted.maps.transition), transition) < limit
    assert relative(lifted.maps.end_state, end_state) < limit


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_read_is_what_the_recurrence_gives(name: str, num_tokens: int) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, num_tokens)
    state = torch.randn(2, HEADS, K, V, dtype=F64)
    outputs, after = stepped(family, x, state)
    lifted = family.lift(x)
    assert relative(lifted.read(state), outputs) < 1e-12
    assert relative(lifted.maps.apply(state), after) < 1e-12
    assert relative(lifted.read(torch.zeros_like(state)), outputs) > 1e-3, "the state must matter"


@pytest.mark.parametrize("name", FAMILIES)
def test_the_lift_of_a_text_is_that_of_its_parts_in_order(name: str) -> None:
    family = FAMILIES[name][0]
    for first, second in ((1, 1), (8, 56), (30, 34), (63, 1)):
        x, y = draw(name, 2, first, seed=1), draw(name, 2, second, seed=2)
        whole, parts = family.lift(joined(x, y)).maps, family.lift(x).maps.then(family.lift(y).maps)
        assert relative(parts.transition, whole.transition) < 1e-12
        assert relative(parts.end_state, whole.end_state) < 1e-12
        swapped = family.lift(y).maps.then(family.lift(x).maps)
        assert relative(swapped.end_state, whole.end_state) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_of_texts_may_be_grouped_as_one_likes(name: str) -> None:
    family = FAMILIES[name][0]
    x, y, z = (family.lift(draw(name, 2, 9, seed=seed)).maps for seed in (1, 2, 3))
    left, right = x.then(y).then(z), x.then(y.then(z))
    assert relative(left.transition, right.transition) < 1e-12 and relative(left.end_state, right.end_state) < 1e-12
    assert relative(x.then(z).then(y).end_state, right.end_state) > 1e-3, "their order must matter"


@pytest.mark.parametrize("name", FAMILIES)
def test_scanning_a_text_is_scanning_its_parts_in_order(name: str) -> None:
    family, state = FAMILIES[name][0], torch.randn(2, HEADS, K, V, dtype=F64)
    x, y = draw(name, 2, 21, seed=1), draw(name, 2, 43, seed=2)
    whole, first, second = family.lift(joined(x, y)), family.lift(x), family.lift(y)
    middle = first.maps.apply(state)
    outputs = torch.cat([first.read(state), second.read(middle)], dim=2)
    assert relative(outputs, whole.read(state)) < 1e-12
    assert relative(second.maps.apply(middle), whole.maps.apply(state)) < 1e-12
    assert relative(second.maps.apply(state), whole.maps.apply(state)) > 1e-3, "the first part must matter"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_of_zeros_is_the_identity(name: str) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, 20)
    padded = mapped(x, lambda t: torch.cat([t, t.new_zeros(*t.shape[:2], 12, *t.shape[3:])], dim=2))
    found, expected = family.lift(padded), family.lift(x)
    state = torch.randn(2, HEADS, K, V, dtype=F64)
    assert relative(found.maps.transition, expected.maps.transition) < 1e-12
    assert relative(found.maps.end_state, expected.maps.end_state) < 1e-12
    assert relative(found.read(state)[:, :, :20], expected.read(state)) < 1e-12
    nothing = family.lift(mapped(x, torch.zeros_like)).maps
    assert torch.equal(as_matrix(nothing.transition), torch.eye(K, dtype=F64).expand(2, HEADS, K, K))
    assert not nothing.end_state.any()


@pytest.mark.parametrize("gate", [-1e-4, -1.0, -30.0, -1000.0])
@pytest.mark.parametrize("name", GATED)
def test_any_decay_is_finite_and_exact_to_the_rounding_of_summed_gates(name: str, gate: float) -> None:
    family, x = FAMILIES[name][0], draw(name, 2, 64)
    x = replace(x, g=torch.full_like(x.g, gate))
    x = replace(x, g=torch.where(torch.rand_like(x.g) < 0.5, x.g, -0.01))
    state = torch.randn(2, HEADS, K, V, dtype=F64)
    for wanted in (F64, torch.float32):
        lifted, (outputs, after) = family.lift(mapped(x, lambda t, d=wanted: t.to(d))), stepped(family, x, state)
        limit = torch.finfo(wanted).eps * (64 + float(x.g.sum(2).abs().max()))
        assert relative(lifted.read(state.to(wanted)), outputs) < limit
        assert relative(lifted.maps.apply(state.to(wanted)), after) < limit


@pytest.mark.parametrize("name", FAMILIES)
def test_lifts_have_gradients(name: str) -> None:
    family, x = FAMILIES[name][0], mapped(draw(name, 1, 20), lambda t: t.requires_grad_())
    lifted = family.lift(x)
    (lifted.read(torch.ones(1, HEADS, K, V, dtype=F64)).sum() + lifted.maps.end_state.sum()).backward()
    for field in fields(x):
        grad = getattr(x, field.name).grad
        assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any())


def test_groups_share_keys_and_queries_in_mamba2() -> None:
    x = draw("mamba2", 2, 20)
    v, g = torch.cat([x.v, x.v[:, :1]], dim=1), torch.cat([x.g, x.g[:, :1]], dim=1)
    grouped = Mamba2Inputs(x.q[:, :2], x.k[:, :2], v, g)
    spread = Mamba2Inputs(*(t[:, :2].repeat_interleave(2, dim=1) for t in (x.q, x.k)), v, g)
    found, expected = Mamba2().lift(grouped), Mamba2().lift(spread)
    assert relative(found.maps.end_state, expected.maps.end_state) < 1e-12
    assert relative(found.query, expected.query) < 1e-12 and relative(found.offset, expected.offset) < 1e-12


# -- rotary Lightning: placed, then run, against the run in place ----------------------------------------------------

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


# -- conv tails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_short_links_let_the_links_before_them_show_through(width: int) -> None:
    """Links of zero to eight tokens, live or cached: the convolution is that of the text in one piece."""
    channels = 3
    lengths = [(1, None), (3, 2), (4, 2), (9, 4), (1, None), (5, 4), (5, 4), (2, None), (3, 0), (1, None)]
    shape = LinearShape(1, 2, 2, "head", channels, width)
    pool = Pool(Layout((shape,), (), F64, F64), 2**20, 16, 64, 30, torch.device("cpu"))
    weight = torch.randn(channels, 1, width, dtype=F64)
    parts = [torch.randn(num, channels, dtype=F64) for num, _ in lengths]
    none = np.zeros(64, dtype=np.int64)
    chains, links, inputs, rows, run, position = [], [], [], [], [], 0
    for number, ((num, seam), x) in enumerate(zip(lengths, parts, strict=True)):
        live = num if seam is None else seam
        if live:
            links.append(RowLink([0] * live, position, none[:live]))
            rows.append(x[:live])
            run += range(position, position + live)
        if seam is not None:
            head = [RowLink([0] * seam, 0, none[:seam])] if seam else []
            fold = FoldInto(2 + number, number, 0)
            chains.append(
                Chain([*head, RowLink([0] * (num - seam), seam, none[: num - seam], None, fold)], none, 0, 20)
            )
            links.append(InteriorLink(2 + number, number, num - seam, position))
            inputs.append(x)
        position += num
    together = Batch.pack([*chains, Chain(links, none[:position], 0, 1)], width, pool.device)
    x = torch.cat([*inputs, *rows])
    found = convolve_rows(x, weight, together, pool, 0)[together.chain_tokens[-1]]
    text = torch.nn.functional.pad(torch.cat(parts), (0, 0, width - 1, 0))
    expected = torch.nn.functional.conv1d(text.mT[None], weight, groups=channels)[0].mT
    assert relative(found, expected[run]) < 1e-12
    assert relative(pool.tails[0][1], text[-(width - 1) :]) < 1e-12
    # The same again, from tails that were stored before.
    pool.tails[0][1].zero_()
    later = Batch.pack([Chain(links, none[:position], 0, 1)], width, pool.device)
    assert relative(convolve_rows(torch.cat(rows), weight, later, pool, 0), expected[run]) < 1e-12
    assert relative(pool.tails[0][1], text[-(width - 1) :]) < 1e-12

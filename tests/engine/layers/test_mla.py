"""Latent attention of rows that are run whole: each way of ``dense.py`` against float64, what is cut, what recurs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hypic.engine.layers import dense
from hypic.engine.layers.attention import Turns
from hypic.engine.layers.dense import PLANNED_FROM, UNIT, FlashAttention, Heads, Way
from hypic.engine.layers.mla import LatentAttention, LatentShape
from hypic.engine.layers.rotary import Rotary, rotate
from hypic.engine.rehearsal import plan_rows
from hypic_kernels.trust import relative_error
from tests.engine.layers.dense_rows import always, noted_shapes, spans_of

CPU = torch.device("cpu")
# Keys wider than values, values narrower than what is rotated, keys and values of one width, values wider than keys.
WIDTHS = {"wide": (16, 8, 16), "narrow": (16, 16, 8), "equal": (8, 8, 16), "wider": (8, 4, 24)}
SMALL = LatentShape(24, 3, 20, 16, 8, 16)
# As Kimi-Linear and Ling 3 have them.
LARGE = LatentShape(256, 32, 512, 128, 64, 128)
LIMIT = 1e-13
WAYS: list[Way] = ["flash", "planned", "whole"]


@dataclass(frozen=True)
class Known:
    """A layer with the queries and what is kept of some rows, rotated already."""

    layer: LatentAttention
    q: Tensor
    rotary_q: Tensor
    keys: Tensor
    latents: Tensor

    @property
    def heads(self) -> Heads:
        return self.layer.shape.dense_heads(self.q.device, self.q.dtype)

    @property
    def out(self) -> Tensor:
        return self.q.new_full((len(self.q), self.heads.num_heads, self.heads.width), 7.0)

    def attended(
        self, spans: Sequence[slice], choose: Callable[[Heads, int], Way], product: dense.Product = dense.whole
    ) -> Tensor:
        rows, out = self.layer.expanding(self.q, self.rotary_q, self.keys, self.latents), self.out
        dense.attend_rows(rows, self.heads, spans, out, choose=choose, product=product)
        return out

    def exactly(self, span: slice, scale: float | None = None, few: slice = slice(None)) -> Tensor:
        """One row in float64 by the definition, ``[T, H, V]``, or a ``few`` heads of it: keys and values of each head
        are its matrices times the latents."""
        to_keys, to_values = (x[few].double() for x in self.layer.heads)
        latents, shape = self.latents[span, 0].double(), self.layer.shape
        turned = self.rotary_q[span, few].double() @ self.keys[span, 0].double().T
        plain = torch.einsum("thk,hkl,sl->ths", self.q[span, few].double(), to_keys, latents)
        scores = (plain + turned).transpose(0, 1) * (shape.scale if scale is None else scale)
        is_behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(is_behind, -torch.inf).softmax(-1)
        return torch.einsum("hts,sl,hvl->thv", weights, latents, to_values)


def known(shape: LatentShape, length: int, device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> Known:
    draw = torch.Generator(device).manual_seed(length)
    layer = LatentAttention(shape).to(device, torch.float64)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=draw)
    sizes = [(shape.num_heads, shape.key_dim), (shape.num_heads, shape.rotary_dim)]
    sizes += [(1, shape.rotary_dim), (1, shape.latent_size)]
    q, rotary_q, keys, latents = (
        torch.randn(length, *size, generator=draw, dtype=torch.float64, device=device).to(dtype) for size in sizes
    )
    return Known(layer.to(device, dtype).requires_grad_(False), q, rotary_q, keys, latents)


# -- right on every way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_every_row_sees_itself_alone(widths: str, way: Way) -> None:
    """Rows of one length and of others, none at the step's begin or end, by each way; a control for each mistake."""
    key_dim, rotary_dim, value_dim = WIDTHS[widths]
    shape = replace(SMALL, key_dim=key_dim, rotary_dim=rotary_dim, value_dim=value_dim)
    rows, spans = known(shape, 190), spans_of([40, 40, 57, 40], first=3)
    found = rows.attended(spans, always(way))
    for span in spans:
        exact = rows.exactly(span)
        assert relative_error(found[span], exact) < LIMIT
        assert relative_error(found[span].roll(1, 0), exact) > 100 * LIMIT
        assert relative_error(found[span], rows.exactly(span, 0.9 * shape.scale)) > 100 * LIMIT
    assert bool((found[:3] == 7).all() and (found[180:] == 7).all())
    assert relative_error(found[43:83], rows.exactly(slice(3, 83))[40:]) > 100 * LIMIT


@pytest.mark.parametrize("length", [UNIT - 1, UNIT, UNIT + 1])
def test_a_row_that_is_filled_up_is_the_same(length: int) -> None:
    """A control: in place of latents of zeros, others in front of the row."""
    rows, span = known(SMALL, length + 9), slice(5, 5 + length)
    exact = rows.exactly(span)
    assert relative_error(rows.attended([span], always("planned"))[span], exact) < LIMIT
    in_front = rows.exactly(slice(0, span.stop))[5:]
    assert relative_error(in_front, exact) > 100 * LIMIT


def test_what_is_cut_are_the_channels_in_front() -> None:
    """What flash attention gives is as wide as keys; its first channels, or a scale by the width of values, show."""
    rows, given = known(SMALL, 70), list[Tensor]()

    def noted(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 24 and scale == SMALL.scale
        given.append(dense.whole(q, k, v, scale)[0].transpose(0, 1))
        return dense.whole(q, k, v, scale)

    def by_width_of_values(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return dense.whole(q, k, v, float(SMALL.value_dim**-0.5))

    whole = slice(0, 70)
    exact = rows.exactly(whole)
    assert relative_error(rows.attended([whole], always("flash"), noted), exact) < LIMIT
    assert relative_error(given[0][..., :16], exact) > 100 * LIMIT
    assert relative_error(rows.attended([whole], always("flash"), by_width_of_values), exact) > 100 * LIMIT


def test_keys_in_front_of_values_that_are_no_numbers_do_no_harm() -> None:
    rows = known(SMALL, 33)
    _, k, v = rows.layer.expanding(rows.q, rows.rotary_q, rows.keys, rows.latents)(slice(0, 33), 33)
    q, k, v = (x.transpose(0, 1)[None] for x in (k, k, v))
    right = dense.narrowed(dense.whole, q, k, v, None, 16)
    v[..., :8] = torch.inf
    assert torch.equal(dense.narrowed(dense.whole, q, k, v, None, 16), right)
    assert not dense.narrowed(dense.whole, q, k, v, None, 17).isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_queries_and_shared_keys_are_rotated_at_their_places(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer itself, from what the pool holds unrotated; a control: not rotated."""
    rows, spans, places = known(SMALL, 120), spans_of([40, 40, 33], first=4), torch.arange(120) * 3
    turns = Turns(Rotary(8, 100.0)(places, 400, torch.float64), [])
    turned = replace(rows, rotary_q=rotate(rows.rotary_q, turns.rows), keys=rotate(rows.keys, turns.rows))
    monkeypatch.setattr(dense, "tried", lambda asked, heads: way)
    monkeypatch.setitem(dense.attend_rows.__kwdefaults__, "product", dense.whole)
    found = rows.out
    rows.layer._densely(rows.q, rows.rotary_q, (rows.keys, rows.latents), spans, turns, found)
    for span in spans:
        assert relative_error(found[span], turned.exactly(span)) < LIMIT
        assert relative_error(found[span], rows.exactly(span)) > 100 * LIMIT


# -- which way, and what it costs ------------------------------------------------------------------------------------


def test_latent_attention_goes_the_ways_of_full_attention() -> None:
    heads = LARGE.dense_heads(torch.device("cuda"), torch.bfloat16)
    lengths = [1, 512, PLANNED_FROM - 1, PLANNED_FROM, 16 * UNIT]
    assert [dense.way_of(heads, n) for n in lengths] == ["flash", "flash", "flash", "planned", "planned"]
    for other in ({"value_dim": 124}, {"value_dim": 200}, {"head_dim": 264}, {"device": CPU}):
        assert {dense.way_of(replace(heads, **other), n) for n in lengths} == {"whole"}
    assert (heads.num_kv_heads, heads.head_dim, heads.width, heads.scale) == (32, 192, 128, LARGE.scale)


def test_the_check_at_first_use_is_of_narrow_values() -> None:
    heads = Heads(CPU, torch.bfloat16, 4, 4, 48, None, 32)
    assert FlashAttention(heads, dense.whole).measure() < dense.TOLERANCES[torch.bfloat16] / 2
    shifted = FlashAttention(heads, lambda q, k, v, scale: dense.whole(q, k, v, scale).roll(8, -1))
    assert shifted.measure() > 10 * dense.TOLERANCES[torch.bfloat16]


def test_nothing_is_copied_to_widen_values_of_released_models() -> None:
    """Values as flash attention reads them lie where the product put them; a copy is made where they lie unevenly."""
    rows = known(replace(LARGE, num_heads=2, latent_size=16), 20)
    _, k, v = rows.layer.expanding(rows.q, rows.rotary_q, rows.keys, rows.latents)(slice(0, 20), 20)
    assert v.shape == k.shape and v.storage_offset() == 64 and v.stride() == (512, 256, 1)
    given = list[Tensor]()

    def noted(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        given.append(v)
        return dense.whole(q, k, v, scale)

    for x in (v, torch.cat([v, v], dim=-1)[..., 4:196]):
        dense.narrowed(noted, *(y.transpose(0, 1)[None] for y in (k, k, x)), None, 128)
    assert given[0].data_ptr() == v.data_ptr() and given[1].is_contiguous()
    assert torch.equal(given[1][0].transpose(0, 1), torch.cat([v, v], dim=-1)[..., 4:196])


def test_rows_are_made_for_neighbours_together_up_to_a_number_of_tokens() -> None:
    ways: dict[int, Way] = {40: "flash", 57: "flash", 300: "planned", 9: "whole"}
    spans = spans_of([40, 40, 57, 300, 300, 40, 9, 9, 57, 40, 40, 40, 40])
    found = dense.parts([*spans, slice(1500, 1540)], ways.__getitem__, 120)
    assert [[(span.stop - span.start, length) for span, length in part.groups] for part in found] == [
        *([(80, 40)], [(57, 57)], [(300, 300)], [(300, 300)], [(40, 40)], [(18, 9)], [(57, 57)]),
        *([(120, 40)], [(40, 40)], [(40, 40)]),
    ]
    assert [part.way for part in found] == [ways[part.groups[0][1]] for part in found]
    (joined,) = dense.parts(spans_of([40, 40, 57]), lambda length: "flash", 137)
    assert joined.groups == [(slice(0, 80), 40), (slice(80, 137), 57)]
    asked, rows = list[tuple[int, int]](), known(SMALL, 400)

    def noted(span: slice, room: int) -> tuple[Tensor, Tensor, Tensor]:
        asked.append((span.stop - span.start, room))
        return rows.layer.expanding(rows.q, rows.rotary_q, rows.keys, rows.latents)(span, room)

    spans, way = spans_of([40, 40, 300]), lambda heads, length: ways[length]
    dense.attend_rows(noted, rows.heads, spans, rows.out, most=120, choose=way, product=dense.whole)
    assert asked == [(80, 80), (300, UNIT)]


def test_no_row_brings_a_shape_that_was_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides included, wherever a row lies; a control: rows as they come bring many."""
    seen = noted_shapes(monkeypatch)
    rows = known(SMALL, 210)
    plan_rows([rows.heads], 70)
    planned = set(seen)
    rows.attended(spans_of([32, 33, 64, 70], first=1), always("planned"))
    assert seen == planned and len(planned) == 4
    rows.attended(spans_of([32, 33, 64, 70], first=1), always("whole"))
    assert len(seen - planned) == 4


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_new_lengths_are_right_on_a_gpu(dtype: torch.dtype) -> None:
    """Each way that is taken there, and the check of flash attention itself; a control: rows shifted by one."""
    rows = known(LARGE, 13_500, torch.device("cuda", 0), dtype)
    assert dense.tried("flash", rows.heads) == "flash"
    ways: list[tuple[Way, list[int]]] = [
        ("flash", [512, 512, 777, 1023, 1023, 2049, 4095]),
        ("planned", [4096, 4097, 5001]),
    ]
    for way, lengths in ways:
        spans = spans_of(lengths, first=3)
        found = rows.attended(spans, always(way), dense.flash)
        for span in spans:
            eighths = [slice(first, first + 4) for first in range(0, 32, 4)]  # scores of all heads are some GB
            exact = torch.cat([rows.exactly(span, few=few) for few in eighths], dim=1)
            assert relative_error(found[span], exact) < dense.TOLERANCES[dtype], (way, span)
            assert relative_error(found[span].roll(1, 0), exact) > 10 * dense.TOLERANCES[dtype]


@pytest.mark.gpu
def test_a_new_length_has_nothing_built_on_a_gpu() -> None:
    """Host time of lengths that come for the first time; a control: torch's choice builds a plan for each."""
    rows = known(LARGE, 2 * PLANNED_FROM, torch.device("cuda", 0), torch.bfloat16)
    if not dense.has_plans(rows.heads):
        pytest.skip("torch takes nothing here that has plans")
    plan_rows([rows.heads], 2 * PLANNED_FROM)

    def host_s(length: int, way: Way) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        rows.attended([slice(0, length)], always(way), dense.flash)
        return time.perf_counter() - started

    ways: list[tuple[Way, list[int]]] = [("flash", [519, 1037, 3001]), ("planned", [PLANNED_FROM + 7, 5003, 6007])]
    for way, lengths in ways:
        assert dense.tried(way, rows.heads) == way
        host_s(max(lengths) + 1, way)
        ours = min(host_s(length, way) for length in lengths)
        theirs = min(host_s(length, "whole") for length in lengths)
        assert theirs > 10 * ours, (way, ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["flash", "planned"])
def test_neither_way_takes_much_more_memory_on_a_gpu(way: Way) -> None:
    """Beside the one that torch would take, which expands and mixes as much."""
    lengths = {"flash": [1024] * 8, "planned": [8191]}[way]
    rows = known(LARGE, 8192, torch.device("cuda", 0), torch.bfloat16)

    def peak(chosen: Way, spans: list[slice]) -> int:
        rows.attended(spans, always(chosen), dense.flash)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rows.attended(spans, always(chosen), dense.flash)
        return torch.cuda.max_memory_allocated() - before

    assert peak(way, spans_of(lengths)) < 1.2 * peak("whole", [slice(0, 8191)])

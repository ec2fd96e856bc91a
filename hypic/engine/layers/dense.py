"""Dense causal attention of rows that are run whole, by ways that build nothing for a length while a request waits.

``F.scaled_dot_product_attention`` takes cuDNN on some chips. It is the fastest for long rows, and builds an execution
plan for every new shape: some 60 ms of the host for each new length, on the path of the request that brings it. Hence

- rows below ``PLANNED_FROM`` tokens go through flash attention itself (FlashAttention-2, arXiv 2307.08691), which has
  no plans, and is checked once for each kind of heads;
- longer ones, where torch would take cuDNN, are filled up at the end to a multiple of ``UNIT`` tokens, one row at a
  time, in buffers that lie alike, so that shapes recur. No query sees the keys behind it, and what padding asks is
  dropped. torch keeps plans by thread: the thread that runs steps makes each of them with ``plan`` before the first.

A row's way depends on its own length and on the heads alone, never on its company. Neighbours of one length are one
product. Where these are few, flash attention may add up a row's keys in parts, so its last bits may depend on how many
rows stand beside it; a request with ``deterministic=True`` has no row beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from hypic.engine.layers.dense_product import (
    ALIGNED,
    TOLERANCES,
    FlashAttention,
    Heads,
    Product,
    exact,
    flash,
    narrowed,
    whole,
)
from hypic_kernels.trust import is_trusted

__all__ = ["TOLERANCES", "FlashAttention", "Heads", "Product", "exact", "flash", "narrowed", "whole"]

PLANNED_FROM = 4096
UNIT = 1024
LARGEST_HEAD = 256
INSTEAD = "scaled_dot_product_attention is, which may build a plan for every new length."

Way = Literal["flash", "planned", "whole"]
Rows = Callable[[slice, int], tuple[Tensor, Tensor, Tensor]]
"""Makes ``q [R, H, D]``, ``k [R, Hkv, D]`` and ``v [R, Hkv, W]`` of a span of rows, with zeros behind them up to ``R``
rows. The last channels of ``v`` are the values; what stands in front may be anything."""


# -- which way -------------------------------------------------------------------------------------------------------


def way_of(heads: Heads, length: int) -> Way:
    """How rows of ``length`` tokens should be run."""
    if heads.device.type != "cuda" or heads.dtype not in TOLERANCES:
        return "whole"
    if heads.head_dim % ALIGNED or heads.width % ALIGNED or not heads.width <= heads.head_dim <= LARGEST_HEAD:
        return "whole"
    return "flash" if length < PLANNED_FROM else "planned"


def tried(way: Way, heads: Heads, product: Product = flash) -> Way:
    """``way``, or ``"whole"`` where it is wrong or needless here; asked once for each kind of heads, which waits for
    the device.

    Raises:
        LostDeviceError: the check made the device unusable for this process.
    """
    if way == "flash":
        return way if is_trusted(FlashAttention(heads, product), INSTEAD) else "whole"
    return "whole" if way == "planned" and not has_plans(heads) else way


@functools.cache
def has_plans(heads: Heads) -> bool:
    """Whether torch takes cuDNN for long rows."""
    q, k, v = (_side_by_side(x) for x in heads.rows(PLANNED_FROM))
    is_grouped = heads.num_heads != heads.num_kv_heads
    taken = torch._fused_sdp_choice(q, k, v, None, 0.0, True, scale=heads.scale, enable_gqa=is_grouped)
    return bool(taken == SDPBackend.CUDNN_ATTENTION.value)


# -- rows ------------------------------------------------------------------------------------------------------------


def chosen(heads: Heads, length: int) -> Way:
    """How rows of ``length`` tokens are run."""
    return tried(way_of(heads, length), heads)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Sequence[slice],
    scale: float | None,
    out: Tensor,
    *,
    choose: Callable[[Heads, int], Way] = chosen,
    product: Product = flash,
) -> None:
    """Each of ``spans`` of the rows ``q [N, H, D]`` to its own keys and values ``k, v [N, Hkv, D]``, into ``out``.

    Neighbours of one length are one product: what is launched would otherwise grow with the number of segments.
    """

    def rows(span: slice, room: int) -> tuple[Tensor, Tensor, Tensor]:
        return filled_up(q[span], room), filled_up(k[span], room), filled_up(v[span], room)

    attend_rows(rows, Heads.of(q, k, scale), spans, out, most=len(q), choose=choose, product=product)


def attend_rows(
    rows: Rows,
    heads: Heads,
    spans: Sequence[slice],
    out: Tensor,
    *,
    most: int = PLANNED_FROM,
    choose: Callable[[Heads, int], Way] = chosen,
    product: Product = flash,
) -> None:
    """``attend`` for queries, keys and values that are made when they are needed, into ``out [N, H, V]``.

    They are made for neighbours together, up to ``most`` tokens or one row, and for each row that is filled up alone.
    """
    for part in parts(spans, lambda length: choose(heads, length), most):
        if part.way == "planned":
            _alone(rows, part.span, heads, out[part.span])
        else:
            _at_once(rows, part, heads, out[part.span], product)


def _alone(rows: Rows, span: slice, heads: Heads, out: Tensor) -> None:
    """One row that is filled up as it is made, into ``out [T, H, V]``."""
    q, k, v = rows(span, planned_length(len(out)))
    v = v[..., -heads.width :].contiguous()  # what stands in front is given back
    out[:] = planned(q, k, v, heads.scale)[: len(out)]


def _at_once(rows: Rows, part: Part, heads: Heads, out: Tensor, product: Product) -> None:
    """The rows of one part as they are, into ``out [R, H, V]``."""
    made, first = rows(part.span, len(out)), part.span.start
    for span, length in part.groups:
        own = slice(span.start - first, span.stop - first)
        q, k, v = (_together(x[own], length) for x in made)
        if part.way == "flash":
            mixed = narrowed(product, q, k, v, heads.scale, heads.width)
        else:
            mixed = whole(q, k, v[..., -heads.width :], heads.scale)
        out[own] = mixed.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Part:
    """Rows that follow each other and are run one way: spans of rows of one length, and that length."""

    way: Way
    groups: list[tuple[slice, int]]

    @property
    def span(self) -> slice:
        return slice(self.groups[0][0].start, self.groups[-1][0].stop)

    def takes(self, span: slice, way: Way, most: int) -> bool:
        """Whether rows behind these may be made with them, of at most ``most`` tokens in all."""
        own = self.span
        return way == self.way != "planned" and own.stop == span.start and span.stop - own.start <= most


def parts(spans: Sequence[slice], way_of_length: Callable[[int], Way], most: int) -> list[Part]:
    """Rows that are made together: of at most ``most`` tokens, or one; those that are filled up stand alone."""
    found = list[Part]()
    for group, length in alike(spans):
        way = way_of_length(length)
        stride = length if way == "planned" else max(1, most // length) * length
        for start in range(group.start, group.stop, stride):
            span = slice(start, min(start + stride, group.stop))
            if found and found[-1].takes(span, way, most):
                found[-1].groups.append((span, length))
            else:
                found.append(Part(way, [(span, length)]))
    return found


def alike(spans: Sequence[slice]) -> list[tuple[slice, int]]:
    """Spans that follow each other and are of one length together, and that length."""
    found: list[tuple[slice, int]] = []
    for span in spans:
        length = span.stop - span.start
        if found and found[-1][1] == length and found[-1][0].stop == span.start:
            found[-1] = (slice(found[-1][0].start, span.stop), length)
        else:
            found.append((span, length))
    return found


def planned(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """One row, ``q [T, H, D]``, ``k [T, Hkv, D]``, ``v [T, Hkv, V]`` -> ``[T, H, V]``, filled up to a length that
    recurs."""
    length = planned_length(len(q))
    filled = [_side_by_side(filled_up(x, length).contiguous()) for x in (q, k, v)]
    mixed = whole(filled[0], filled[1], filled[2], scale)
    return mixed[0].transpose(0, 1)[: len(q)]


def planned_length(length: int) -> int:
    """The next multiple of ``UNIT``."""
    return -(-length // UNIT) * UNIT


def planned_lengths(most: int) -> list[int]:
    """What rows from ``PLANNED_FROM`` up to ``most`` tokens are filled up to."""
    return list(range(PLANNED_FROM, planned_length(most) + 1, UNIT)) if most >= PLANNED_FROM else []


def plan(heads: Heads, length: int) -> None:
    """Has the plan made for rows that are filled up to ``length``, for the thread that calls this, if it needs one."""
    if tried(way_of(heads, length), heads) == "planned":
        planned(*heads.rows(length), heads.scale)


def _together(x: Tensor, length: int) -> Tensor:
    """Rows of one length, ``[B * T, H, D]`` as ``[B, H, T, D]``."""
    return torch.unflatten(x, 0, (-1, length)).transpose(1, 2)


def filled_up(x: Tensor, length: int) -> Tensor:
    """``x [T, H, D]`` with zeros behind it, or itself if it has as many rows: whatever lies in memory might be no
    number, and is looked at."""
    if len(x) == length:
        return x
    out = x.new_empty((length, *x.shape[1:]))
    out[: len(x)] = x
    out[len(x) :] = 0
    return out


def _side_by_side(x: Tensor) -> Tensor:
    """``[T, H, D]`` without gaps as ``[1, H, T, D]``. A plan is for strides too, those of axes of one entry included,
    which tensors without gaps need not have in common."""
    return x.view(-1).view(x.shape).transpose(0, 1)[None]

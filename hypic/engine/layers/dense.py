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
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from hypic_kernels.trust import is_trusted, relative_error

PLANNED_FROM = 4096
UNIT = 1024
LARGEST_HEAD = 256
# Of ``relative_error``; what is right stays some three times below.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
INSTEAD = "scaled_dot_product_attention is, which may build a plan for every new length."

Way = Literal["flash", "planned", "whole"]
Product = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""Causal attention of ``q [B, H, T, D]`` to ``k, v [B, Hkv, T, D]`` by a scale, or ``None`` for ``D ** -0.5``."""


@dataclass(frozen=True)
class Heads:
    """What decides, beside a row's length, how it is run; ``scale`` is ``None`` for ``head_dim ** -0.5``."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float | None) -> Heads:
        """Of ``q [N, H, D]`` and ``k [N, Hkv, D]``."""
        return cls(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], scale)

    def rows(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """``q [T, H, D]``, ``k, v [T, Hkv, D]`` of zeros."""
        q, k, v = (
            torch.zeros((length, count, self.head_dim), dtype=self.dtype, device=self.device)
            for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        )
        return q, k, v


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A ``Product`` by flash attention, on a GPU in half precision; key heads are shared as they are."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
    return out


def whole(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A ``Product`` by whatever torch takes."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


# -- which way -------------------------------------------------------------------------------------------------------


def way_of(heads: Heads, length: int) -> Way:
    """How rows of ``length`` tokens should be run."""
    if heads.device.type != "cuda" or heads.dtype not in TOLERANCES:
        return "whole"
    if heads.head_dim % 8 or heads.head_dim > LARGEST_HEAD:
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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Sequence[slice],
    scale: float | None,
    out: Tensor,
    *,
    choose: Callable[[Heads, int], Way] = lambda heads, length: tried(way_of(heads, length), heads),
    product: Product = flash,
) -> None:
    """Each of ``spans`` of the rows ``q [N, H, D]`` to its own keys and values ``k, v [N, Hkv, D]``, into ``out``.

    Neighbours of one length are one product: what is launched would otherwise grow with the number of segments.
    """
    heads = Heads.of(q, k, scale)
    for span, length in alike(spans):
        way = choose(heads, length)
        if way == "planned":
            for start in range(span.start, span.stop, length):
                row = slice(start, start + length)
                out[row] = planned(q[row], k[row], v[row], scale)
        else:
            batch = [_together(x[span], length) for x in (q, k, v)]
            mixed = (product if way == "flash" else whole)(batch[0], batch[1], batch[2], scale)
            out[span] = mixed.transpose(1, 2).flatten(0, 1)


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
    """One row, ``q [T, H, D]`` and ``k, v [T, Hkv, D]`` -> ``[T, H, D]``, filled up to a length that recurs."""
    length = planned_length(len(q))
    filled = [_side_by_side(_filled_up(x, length)) for x in (q, k, v)]
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


def _filled_up(x: Tensor, length: int) -> Tensor:
    """``x [T, H, D]`` with zeros behind it: whatever lies in memory might be no number, and is looked at."""
    if len(x) == length:
        return x.contiguous()
    out = x.new_empty((length, *x.shape[1:]))
    out[: len(x)] = x
    out[len(x) :] = 0
    return out


def _side_by_side(x: Tensor) -> Tensor:
    """``[T, H, D]`` without gaps as ``[1, H, T, D]``. A plan is for strides too, those of axes of one entry included,
    which tensors without gaps need not have in common."""
    return x.view(-1).view(x.shape).transpose(0, 1)[None]


# -- the check at first use ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlashAttention:
    """A ``Product`` for one kind of heads, as ``trust.is_trusted`` asks about it."""

    heads: Heads
    product: Product = field(default=flash, repr=False)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.heads.dtype]

    def measure(self) -> float:
        """The largest relative error on random rows: some of an odd length, one alone, whose keys may be added up in
        parts, and so many that they are not."""
        many = -(-128 // self.heads.num_heads)
        return max(self._error(count, length) for count, length in ((2, 65), (1, 321), (many, 256)))

    def _error(self, count: int, length: int) -> float:
        heads = self.heads
        draw = torch.Generator(heads.device).manual_seed(length)
        q, k, v = (
            torch.randn((count, n, length, heads.head_dim), generator=draw, device=heads.device).to(heads.dtype)
            for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        return relative_error(self.product(q, k, v, heads.scale), exact(q, k, v, heads.scale))


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A ``Product`` in float64, written out."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    is_behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(is_behind, -torch.inf).softmax(-1) @ v

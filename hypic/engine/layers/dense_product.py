"""Dense causal attention of rows of one length: by flash attention itself, or by whatever torch takes; heads of either.

Values may be narrower than keys, as in latent attention. Flash attention (FlashAttention-2, arXiv 2307.08691) wants
them equally wide and mixes each channel for itself, so it is given values with any channels in front, and what comes of
those is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic_kernels.trust import relative_error

# Numbers of half precision that are loaded at once.
ALIGNED = 8
# Of ``relative_error``; what is right stays some three times below.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

Product = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""Causal attention of ``q [B, H, T, D]`` to ``k, v [B, Hkv, T, D]`` by a scale, or ``None`` for ``D ** -0.5``."""


@dataclass(frozen=True)
class Heads:
    """What decides, beside a row's length, how it is run; ``scale`` is ``None`` for ``head_dim ** -0.5``, and
    ``value_dim`` where values are as wide as keys."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    value_dim: int | None = None

    @property
    def width(self) -> int:
        """Channels of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float | None) -> Heads:
        """Of ``q [N, H, D]`` and ``k [N, Hkv, D]``."""
        return cls(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2], scale)

    def rows(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """``q [T, H, D]``, ``k [T, Hkv, D]``, ``v [T, Hkv, V]`` of zeros."""
        q, k, v = (
            torch.zeros((length, count, dim), dtype=self.dtype, device=self.device)
            for count, dim in (
                (self.num_heads, self.head_dim),
                (self.num_kv_heads, self.head_dim),
                (self.num_kv_heads, self.width),
            )
        )
        return q, k, v


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A ``Product`` by flash attention, on a GPU in half precision; key heads are shared as they are."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
    return out


def whole(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A ``Product`` by whatever torch takes, for values of any width."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def narrowed(product: Product, q: Tensor, k: Tensor, v: Tensor, scale: float | None, width: int) -> Tensor:
    """A ``Product`` that wants keys and values equally wide, of values that are the last ``width <= D`` channels of ``v
    [B, Hkv, T, W]``, ``W <= D``: ``[B, H, T, width]``."""
    return product(q, k, _widened(v, q.shape[-1]), scale)[..., -width:]


def _widened(v: Tensor, width: int) -> Tensor:
    """``v`` with zeros in front of its channels, if any are missing, where 16 bytes can be loaded at once."""
    if v.shape[-1] < width:
        return F.pad(v, (width - v.shape[-1], 0))
    is_aligned = not any(offset % ALIGNED for offset in (v.storage_offset(), *v.stride()[:-1]))
    return v if is_aligned else v.contiguous()


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
        parts, and so many that they are not. Other channels stand in front of narrow values."""
        many = -(-128 // self.heads.num_heads)
        return max(self._error(count, length) for count, length in ((2, 65), (1, 321), (many, 256)))

    def _error(self, count: int, length: int) -> float:
        heads = self.heads
        draw = torch.Generator(heads.device).manual_seed(length)
        q, k, v = (
            torch.randn((count, n, length, heads.head_dim), generator=draw, device=heads.device).to(heads.dtype)
            for n in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        found = narrowed(self.product, q, k, v, heads.scale, heads.width)
        return relative_error(found, exact(q, k, v[..., -heads.width :], heads.scale))


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """A ``Product`` in float64, written out."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    is_behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(is_behind, -torch.inf).softmax(-1) @ v

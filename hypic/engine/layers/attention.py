"""Softmax attention over placed segments: queries of rows against unrotated pages, rotated where they stand.

Grouped queries, optional norms of q and k, optional output gate, partial rotary. Keys are kept after their norm and
before rotation; every key is rotated once, from that copy, by its position in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.batch import Batch, Context, Final
from hypic.engine.layers import dense
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.projections import Joined, projected
from hypic.engine.layers.rotary import Angles, rotate
from hypic.engine.pool import AttentionShape, Pool
from hypic_kernels import attention as paged


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the layer; ``norm_eps`` is ``None`` without norms of q and k.

    Norms are per head, or with ``norm_whole`` over all heads together; ``norm_centred`` weights scale by ``1 + w``.
    ``scale`` multiplies scores in place of ``head_dim ** -0.5``; ``bias`` is that of all four projections.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool = False
    norm_eps: float | None = None
    norm_whole: bool = False
    norm_centred: bool = True
    scale: float | None = None
    bias: bool = False

    @property
    def kept(self) -> AttentionShape:
        return AttentionShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def dense_heads(self, device: torch.device, dtype: torch.dtype) -> dense.Heads:
        """Heads as rows that are run whole see them."""
        return dense.Heads(device, dtype, self.num_heads, self.num_kv_heads, self.head_dim, self.scale)

    def paged(self, rotary_dim: int) -> tuple[paged.HeadDims, int]:
        """Heads as kernels see them, and the number of key heads."""
        group = self.num_heads // self.num_kv_heads
        return paged.HeadDims(group, self.head_dim, self.head_dim, rotary_dim), self.num_kv_heads


@dataclass(frozen=True)
class Turns:
    """Angles of one step: of the rows' tokens, of the keys of every chain, and, for kernels, of every position."""

    rows: Angles
    keys: Sequence[Angles]
    table: Angles | None = None


class Attention(nn.Module):
    """See the module's docstring; parameters are named as in the checkpoint."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        query_width = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width * (2 if shape.gated else 1), bias=shape.bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=shape.bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=shape.bias)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=shape.bias)
        self._joined = None if shape.bias else Joined(self.q_proj, self.k_proj, self.v_proj)
        self.has_norm = shape.norm_eps is not None
        if shape.norm_eps is not None:
            sizes = (query_width, kv_width) if shape.norm_whole else (shape.head_dim, shape.head_dim)
            self.q_norm = RMSNorm(sizes[0], shape.norm_eps, zero_centred=shape.norm_centred)
            self.k_norm = RMSNorm(sizes[1], shape.norm_eps, zero_centred=shape.norm_centred)

    @property
    def kept(self) -> AttentionShape:
        return self.shape.kept

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """``q [N, H, D]``, ``k, v [N, Hkv, D]`` before rotation, and the output gate ``[N, H, D]`` or ``None``."""
        if self._joined is None:
            q, gate = self.project_queries(hidden)
            return q, *self.project_keys(hidden), gate
        q, k, v = self._joined(hidden)
        q, gate = self._queries(q)
        return q, *self._keys(k, v), gate

    def project_queries(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """``q [N, H, D]`` before rotation, and the output gate ``[N, H, D]`` or ``None``."""
        return self._queries(self.q_proj(hidden))

    def project_keys(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``k, v [N, Hkv, D]``, keys before rotation."""
        return self._keys(self.k_proj(hidden), self.v_proj(hidden))

    def _queries(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        width = self.shape.head_dim * (2 if self.shape.gated else 1)
        q, gate = projected.view(projected.shape[0], self.shape.num_heads, width), None
        if self.shape.gated:
            q, gate = q.chunk(2, dim=-1)
        return (self._normed(self.q_norm, q) if self.has_norm else q), gate

    def _keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.view(x.shape[0], self.shape.num_kv_heads, self.shape.head_dim) for x in (k, v))
        return (self._normed(self.k_norm, k) if self.has_norm else k), v

    def _normed(self, norm: nn.Module, heads: Tensor) -> Tensor:
        out: Tensor = norm(heads.flatten(-2)).view(heads.shape) if self.shape.norm_whole else norm(heads)
        return out

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """``mixed [N, H, D]`` -> ``[N, hidden]``."""
        gated = mixed if gate is None else mixed * gate.sigmoid()
        return projected(gated.flatten(-2), self.o_proj)

    def forward(
        self, hidden: Tensor, batch: Batch, pool: Pool, layer: int, turns: Turns | None, final: Final | None = None
    ) -> Tensor:
        """Outputs of all rows, or of ``final``'s alone; ``turns.rows`` are the angles of those rows."""
        if final is None:
            q, k, v, gate = self.project(hidden)
        else:
            k, v = self.project_keys(hidden)
            q, gate = self.project_queries(hidden.index_select(0, final.tokens))
        pool.write_kv(layer, batch.kv_slots, k, v)
        if batch.kernels is not None and batch.kernels.attention is not None:
            return self.output(self._through_pages(q, k, v, batch, pool, layer, turns, final), gate)
        if turns is not None:
            q = rotate(q, turns.rows)
        mixed = torch.empty_like(q)
        for number, context in enumerate(batch.contexts if final is None else final.contexts):
            if context.blocks:
                keys, values = pool.read_kv(layer, context.slots)
                keys = keys if turns is None else rotate(keys, turns.keys[number])
                attend(q, keys, values, context, mixed, self.shape.scale)
        return self.output(mixed, gate)

    def _through_pages(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, pool: Pool, layer: int, turns: Turns | None,
        final: Final | None,
    ) -> Tensor:  # fmt: skip
        """Tiles of queries against pages, by kernel; long prompts that are run whole against their own rows."""
        assert batch.kernels is not None, "the step was not planned for kernels"
        plan = batch.kernels.attention if final is None else batch.kernels.final_attention
        assert plan is not None, "the step was not planned for pages"
        mixed, table = torch.empty_like(q), None if turns is None else turns.table
        cos, sin = (None, None) if table is None else (table.cos, table.sin)
        if plan.tile_chain.shape[0]:
            keys, values = pool.keys[layer], pool.values[layer]
            paged.attend(q, keys, values, plan, cos=cos, sin=sin, scale=self._scale, out=mixed)
        if final is None and batch.contexts:
            self._densely(q, k, v, [context.blocks[0].tokens for context in batch.contexts], turns, mixed)
        return mixed

    def _densely(
        self, q: Tensor, k: Tensor, v: Tensor, spans: Sequence[slice], turns: Turns | None, mixed: Tensor
    ) -> None:
        """Chains that are run whole, ``spans`` of the rows. All rows are rotated at once: what is launched would
        otherwise grow with the number of segments that are encoded."""
        if turns is not None:
            q, k = rotate(q, turns.rows), rotate(k, turns.rows)
        dense.attend(q, k, v, spans, self.shape.scale, mixed)

    @property
    def _scale(self) -> float:
        return self.shape.head_dim**-0.5 if self.shape.scale is None else self.shape.scale


def attend(q: Tensor, keys: Tensor, values: Tensor, context: Context, mixed: Tensor, scale: float | None) -> None:
    """A chain's queries ``q [N, H, D]`` against its ``keys, values [n, Hkv, ...]``, into ``mixed [N, H, V]``."""
    is_grouped = q.shape[1] != keys.shape[1]
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    for block in context.blocks:
        out = F.scaled_dot_product_attention(
            q[block.tokens].transpose(0, 1)[None],
            keys[:, :, : block.num_keys],
            values[:, :, : block.num_keys],
            attn_mask=block.mask,
            is_causal=block.is_causal,
            scale=scale,
            enable_gqa=is_grouped,
        )
        mixed[block.tokens] = out[0].transpose(0, 1)

"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) as Kimi-Linear and Ling 3 build it.

What is kept of a token is one *latent* for all heads, behind its norm, and a *rotary key* that all heads share, before
its rotation: the pool's values and keys of one head. Keys and values of the heads are linear in the latent:
``[k | v] = W_kvb latent`` per head, to which the rotary key is appended. Kimi-Linear rotates nothing; Ling 3 rotates
the shared key and the last channels of a query, pairing neighbours (channel ``2 i`` with ``2 i + 1``), and gates every
head's output with a sigmoid.

Many queries are answered with keys and values *expanded* from the latents; for few, ``W_kvb`` is *absorbed* into query
and output, and the latents themselves are attended to. Both are the same product in another order.

Rows that are run whole go the ways of ``dense.py``. Of a token's head, keys and values come side by side out of one
product, so flash attention reads as wide as keys from where the values end: nothing is copied to widen them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypic.engine.batch import Batch, Context, Final
from hypic.engine.kernel_plan import KernelPlan
from hypic.engine.layers import dense
from hypic.engine.layers.attention import Turns, attend
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import rotate
from hypic.engine.pool import AttentionShape, Pool
from hypic_kernels import attention as paged

# Latent norms have transformers' default, whatever the configuration says of the other norms.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentShape:
    """Sizes of the layer; ``query_rank`` is ``None`` where queries are projected at once; ``bias`` is that of the
    projections to latents and of the output."""

    hidden_size: int
    num_heads: int
    latent_size: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None
    gated: bool = False
    bias: bool = False

    @property
    def kept(self) -> AttentionShape:
        return AttentionShape(1, self.rotary_dim, self.latent_size)

    @property
    def head_dim(self) -> int:
        """Channels of a query, and of a key that is expanded."""
        return self.key_dim + self.rotary_dim

    def dense_heads(self, device: torch.device, dtype: torch.dtype) -> dense.Heads:
        """Heads as rows that are run whole see them, with keys and values of their own each."""
        count = self.num_heads
        return dense.Heads(device, dtype, count, count, self.head_dim, self.scale, self.value_dim)

    def paged(self, rotary_dim: int) -> tuple[paged.HeadDims, int]:
        """Heads as kernels see them, which all share one latent."""
        return paged.HeadDims(self.num_heads, self.rotary_dim, self.latent_size, rotary_dim, is_latent=True), 1

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def break_even(self) -> int:
        """Queries from which on expanding the latents of all keys costs less than attending to latents."""
        expanded, absorbed = self.key_dim + self.value_dim, 2 * self.latent_size
        saved = absorbed - expanded
        return expanded * self.latent_size // saved if saved > 0 else 0


class LatentAttention(nn.Module):
    """See the module's docstring; parameters are named as in the checkpoint."""

    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        self.shape = shape
        size, query_size = shape.hidden_size, shape.num_heads * shape.head_dim
        if shape.query_rank is None:
            self.q_proj = nn.Linear(size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, shape.query_rank, bias=shape.bias)
            self.q_a_layernorm = RMSNorm(shape.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(shape.query_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, shape.latent_size + shape.rotary_dim, bias=shape.bias)
        self.kv_a_layernorm = RMSNorm(shape.latent_size, LATENT_EPS)
        expanded = shape.num_heads * (shape.key_dim + shape.value_dim)
        self.kv_b_proj = nn.Linear(shape.latent_size, expanded, bias=False)
        if shape.gated:
            self.g_proj = nn.Linear(size, shape.num_heads, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.value_dim, size, bias=shape.bias)

    @property
    def kept(self) -> AttentionShape:
        return self.shape.kept

    def forward(
        self, hidden: Tensor, batch: Batch, pool: Pool, layer: int, turns: Turns | None, final: Final | None = None
    ) -> Tensor:
        """Outputs of all rows, or of ``final``'s alone; ``turns.rows`` are the angles of those rows."""
        kept = self.project_keys(hidden)
        pool.write_kv(layer, batch.kv_slots, *kept)
        rows = hidden if final is None else hidden.index_select(0, final.tokens)
        q, rotary_q = self.project_queries(rows)
        if batch.kernels is not None and batch.kernels.attention is not None:
            values = self._through_pages(q, rotary_q, batch.kernels, pool, layer, turns, final is not None)
            if final is None and batch.contexts:
                spans = [context.blocks[0].tokens for context in batch.contexts]
                self._densely(q, rotary_q, kept, spans, turns, values)
            return self.output(values, rows)
        if turns is not None:
            rotary_q = rotate(rotary_q, turns.rows)
        contexts = batch.contexts if final is None else final.contexts
        few = [_num_queries(context) < self.shape.break_even for context in contexts]
        mixed = _Mixed.of(self, q, rotary_q, any(few))
        for number, context in enumerate(contexts):
            if context.blocks:
                keys, latents = pool.read_kv(layer, context.slots)
                keys = keys if turns is None else rotate(keys, turns.keys[number])
                (self._absorbed if few[number] else self._expanded)(mixed, keys, latents, context)
        return self.output(mixed.values, rows)

    def _through_pages(
        self,
        q: Tensor,
        rotary_q: Tensor,
        kernels: KernelPlan,
        pool: Pool,
        layer: int,
        turns: Turns | None,
        is_final: bool,
    ) -> Tensor:
        """``[N, H, V]``: tiles of absorbed queries against the latents where they lie."""
        plan = kernels.final_attention if is_final else kernels.attention
        assert plan is not None, "the step was not planned for pages"
        if not len(plan.tile_chain):
            return q.new_empty((len(q), self.shape.num_heads, self.shape.value_dim))
        table = None if turns is None else turns.table
        cos, sin = (None, None) if table is None else (table.cos, table.sin)
        absorbed = torch.cat([_by_head(q, self.heads[0].mT), rotary_q], dim=-1)
        keys, latents = pool.keys[layer], pool.values[layer]
        mixed = paged.attend_latent(absorbed, keys, latents, plan, cos=cos, sin=sin, scale=self.shape.scale)
        return _by_head(mixed, self.heads[1]).contiguous()

    def _densely(
        self,
        q: Tensor,
        rotary_q: Tensor,
        kept: tuple[Tensor, Tensor],
        spans: Sequence[slice],
        turns: Turns | None,
        out: Tensor,
    ) -> None:
        """Chains that are run whole, ``spans`` of the rows, into ``out [N, H, V]``. All rows are rotated at once."""
        keys, latents = kept
        if turns is not None:
            keys, rotary_q = rotate(keys, turns.rows), rotate(rotary_q, turns.rows)
        rows = self.expanding(q, rotary_q, keys, latents)
        dense.attend_rows(rows, self.shape.dense_heads(q.device, q.dtype), spans, out)

    def expanding(self, q: Tensor, rotary_q: Tensor, keys: Tensor, latents: Tensor) -> dense.Rows:
        """Heads' queries, keys and values of rows ``[N, ...]``, rotated already. Latents are filled up before they are
        expanded: those of zeros give zeros, and no expanded key is copied. Values stand in as many channels as keys
        have, or in their own if they are wider."""

        def rows(span: slice, room: int) -> tuple[Tensor, Tensor, Tensor]:
            queries = torch.cat([dense.filled_up(x[span], room) for x in (q, rotary_q)], dim=-1)
            both, whole = self._expand(*(dense.filled_up(x[span], room) for x in (keys, latents)))
            first = min(max(0, both.shape[-1] - self.shape.head_dim), self.shape.key_dim)
            return queries, whole, both[..., first:]

        return rows

    def project_queries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, H, key_dim]`` and ``[N, H, rotary_dim]``, before rotation, pairs as ``rotate`` wants them."""
        if self.shape.query_rank is None:
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q = q.view(len(hidden), self.shape.num_heads, self.shape.head_dim)
        plain, rotary = q.split([self.shape.key_dim, self.shape.rotary_dim], dim=-1)
        return plain, _halves(rotary)

    def project_keys(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept: rotary keys before rotation, ``[N, 1, rotary_dim]``, and latents ``[N, 1, latent_size]``."""
        both = self.kv_a_proj_with_mqa(hidden)[:, None]
        latents, keys = both.split([self.shape.latent_size, self.shape.rotary_dim], dim=-1)
        return _halves(keys), self.kv_a_layernorm(latents)

    def output(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """``mixed [N, H, V]`` -> ``[N, hidden]``."""
        if self.shape.gated:
            mixed = mixed * self.g_proj(hidden).sigmoid()[..., None]
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out

    def _expanded(self, mixed: _Mixed, keys: Tensor, latents: Tensor, context: Context) -> None:
        both, whole = self._expand(keys, latents)
        attend(mixed.queries, whole, both[..., self.shape.key_dim :], context, mixed.values, self.shape.scale)

    def _expand(self, keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Of what is kept of ``n`` tokens, keys rotated: ``[k | v] [n, H, key_dim + value_dim]``, and the heads' whole
        keys ``[n, H, key_dim + rotary_dim]``."""
        both: Tensor = self.kv_b_proj(latents[:, 0]).view(len(latents), self.shape.num_heads, -1)
        shared = keys.expand(-1, self.shape.num_heads, -1)
        return both, torch.cat([both[..., : self.shape.key_dim], shared], dim=-1)

    def _absorbed(self, mixed: _Mixed, keys: Tensor, latents: Tensor, context: Context) -> None:
        whole = torch.cat([latents, keys], dim=-1)
        attend(mixed.latent_queries, whole, latents, context, mixed.latents, self.shape.scale)
        tokens = slice(context.blocks[0].tokens.start, context.blocks[-1].tokens.stop)
        mixed.values[tokens] = _by_head(mixed.latents[tokens], self.heads[1])

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        """What gives keys and values of the latents: ``[H, key_dim, latent]`` and ``[H, value_dim, latent]``."""
        both = self.kv_b_proj.weight.view(self.shape.num_heads, -1, self.shape.latent_size)
        to_keys, to_values = torch.split(both, [self.shape.key_dim, self.shape.value_dim], dim=1)
        return to_keys, to_values


@dataclass(frozen=True)
class _Mixed:
    """Queries ``[N, H, K]`` for expanded keys and for latents, and what was attended to, as values and as latents."""

    queries: Tensor
    values: Tensor
    latent_queries: Tensor
    latents: Tensor

    @staticmethod
    def of(layer: LatentAttention, q: Tensor, rotary_q: Tensor, has_few: bool) -> _Mixed:
        shape, rows = layer.shape, len(q) if has_few else 0
        absorbed = torch.cat([_by_head(q[:rows], layer.heads[0].mT), rotary_q[:rows]], dim=-1)
        values = q.new_empty((len(q), shape.num_heads, shape.value_dim))
        latents = q.new_empty((rows, shape.num_heads, shape.latent_size))
        return _Mixed(torch.cat([q, rotary_q], dim=-1), values, absorbed, latents)


def _num_queries(context: Context) -> int:
    return sum(block.tokens.stop - block.tokens.start for block in context.blocks)


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """``x [N, H, D]`` times one matrix a head, ``weight [H, E, D]`` -> ``[N, H, E]``."""
    return (x.transpose(0, 1) @ weight.mT).transpose(0, 1)


def _halves(x: Tensor) -> Tensor:
    """Neighbouring channels of a pair moved to where ``rotate`` pairs them, half the width apart."""
    return torch.unflatten(x, -1, (-1, 2)).transpose(-1, -2).flatten(-2)

"""The frame all decoders share: embedding, blocks over one batch, final norm, language-model head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hypic.engine.batch import Batch, Final
from hypic.engine.layers.attention import Attention, Turns
from hypic.engine.layers.dense import Heads
from hypic.engine.layers.linear_attention import Mixer, mix
from hypic.engine.layers.linear_runs import is_run_mixer
from hypic.engine.layers.mla import LatentAttention
from hypic.engine.layers.moe import Experts
from hypic.engine.layers.rotary import Angles, Rotary
from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic_kernels.attention import HeadDims


@dataclass(frozen=True)
class Step:
    """What every block of one forward pass sees besides the hidden states; angles are ``None`` without positions.

    ``embedded [N, hidden]`` are the tokens' embeddings, in models whose blocks see them again.
    """

    batch: Batch
    pool: Pool
    turns: Turns | None
    linear_angles: Angles | None = None
    linear_moves: Angles | None = None
    final: Final | None = None
    embedded: Tensor | None = None

    def kept(self, hidden: Tensor) -> Tensor:
        """The rows that the block gives on: all, or in the last block those whose logits are wanted."""
        return hidden if self.final is None else hidden.index_select(0, self.final.tokens)


def run_mixer(mixer: nn.Module, hidden: Tensor, step: Step, layer: int) -> Tensor:
    """Attention or linear attention on ``hidden [N, hidden]``, for the rows that are kept; ``layer`` counts layers of
    its own kind."""
    if isinstance(mixer, Attention | LatentAttention):
        out: Tensor = mixer(hidden, step.batch, step.pool, layer, step.turns, step.final)
        return out
    angles, moves = step.linear_angles, step.linear_moves
    return step.kept(mix(_as_mixer(mixer), hidden, step.batch, step.pool, layer, angles, moves))


def _as_mixer(module: nn.Module) -> Mixer:
    return module  # type: ignore[return-value]


class Decoder(nn.Module):
    """Blocks are called as ``block(hidden, step)`` and hold their mixer as ``.mixer``.

    The last block only has to write what is kept of the rows, and to give on those whose logits are wanted.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        blocks: Sequence[nn.Module],
        norm: nn.Module,
        rotary: Rotary | None,
        *,
        linear_rotary: Rotary | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.rotary, self.linear_rotary = rotary, linear_rotary
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def is_paged(self) -> bool:
        """Whether all full attention, if there is any, is of the kind that kernels read through pages."""
        attending = [mixer for mixer in self.mixers() if isinstance(mixer.kept, AttentionShape)]
        return all(isinstance(mixer, Attention | LatentAttention) for mixer in attending)

    @property
    def heads(self) -> list[tuple[HeadDims, int]]:
        """What kernels must know of heads that they read through pages, and numbers of key heads; each kind once."""
        rotary_dim = 0 if self.rotary is None else self.rotary.dim
        attending = [mixer for mixer in self.mixers() if isinstance(mixer, Attention | LatentAttention)]
        return list(dict.fromkeys(mixer.shape.paged(rotary_dim) for mixer in attending))

    @property
    def dense_heads(self) -> list[Heads]:
        """Heads of which long rows are run whole; each kind once."""
        weight = self.embed_tokens.weight
        attending = [mixer for mixer in self.mixers() if isinstance(mixer, Attention | LatentAttention)]
        return list(dict.fromkeys(mixer.shape.dense_heads(weight.device, weight.dtype) for mixer in attending))

    @property
    def is_recordable(self) -> bool:
        """Whether a step asks nothing of the host: attention is the kernels', and experts are one product."""
        weight = self.embed_tokens.weight
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        return self.is_paged and all(module.asks_no_host(weight) for module in experts)

    def runs_rows(self) -> bool:
        """Whether every linear layer has a kernel that carries its state through long rows, which is tried here."""
        linear = [mixer for mixer in self.mixers() if isinstance(mixer.kept, LinearShape)]
        return bool(linear) and all(is_run_mixer(mixer) and mixer.runs_rows() for mixer in linear)

    @property
    def layout(self) -> Layout:
        """Shapes of what is kept."""
        kept: list[Any] = [mixer.kept for mixer in self.mixers()]
        linear = tuple(shape for shape in kept if isinstance(shape, LinearShape))
        attention = tuple(shape for shape in kept if isinstance(shape, AttentionShape))
        dtype = self.embed_tokens.weight.dtype
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        return Layout(linear, attention, dtype, state_dtype)

    def mixers(self) -> list[Any]:
        """All mixers in order of depth; a model whose blocks hold none or two of them says so here."""
        return [layer.mixer for layer in self.layers]

    def forward(self, batch: Batch, pool: Pool) -> Tensor:
        """Hidden states ``[N, hidden]`` of all rows; K/V, states, tails and entries are written to the pool."""
        step = self._step(batch, pool)
        hidden: Tensor = self.layers[-1](self._body(step), step)
        return hidden

    def forward_final(self, batch: Batch, pool: Pool) -> tuple[Tensor, Tensor]:
        """Hidden states ``[R, hidden]`` of ``batch.final``, and whether each row's were finite, ``[N]``; else as
        ``forward``."""
        step = self._step(batch, pool)
        hidden = self._body(step)
        turns = step.turns
        if turns is not None:
            turns = replace(turns, rows=turns.rows.at(batch.final.tokens))
        last: Tensor = self.layers[-1](hidden, replace(step, turns=turns, final=batch.final))
        return last, hidden.isfinite().all(-1)

    def _body(self, step: Step) -> Tensor:
        hidden = self.embed(step.batch.ids)
        for layer in list(self.layers)[:-1]:
            hidden = layer(hidden, step)
        return hidden

    def embed(self, ids: Tensor) -> Tensor:
        """``[N]`` -> ``[N, hidden]``."""
        out: Tensor = self.embed_tokens(ids)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden]`` -> ``[R, vocab]``."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def _step(self, batch: Batch, pool: Pool) -> Step:
        dtype = pool.layout.state_dtype
        longest = pool.max_context if batch.kernels else _reach(batch, pool)
        turns = angles = moves = None
        if self.rotary is not None and pool.layout.attention:
            keys = [self.rotary(context.key_positions, longest, dtype) for context in batch.contexts]
            table = self.rotary.table(longest, pool.device, dtype) if batch.kernels else None
            turns = Turns(self.rotary(batch.positions, longest, dtype), keys, table)
        if self.linear_rotary is not None:
            angles = self.linear_rotary(batch.positions, longest, dtype)
            moves = self.linear_rotary.moves(batch.interior_origins, longest, dtype)
        return Step(batch, pool, turns, angles, moves)


def _reach(batch: Batch, pool: Pool) -> int:
    """More than any position or distance of a step: what was encoded behind a primer may be moved back by its length,
    or stay at a place that lies so much further on."""
    return max(len(context.slots) for context in batch.contexts) + pool.num_kept

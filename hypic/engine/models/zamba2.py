"""Zamba2 (arXiv 2411.15242): Mamba-2 in every layer; before some, a transformer block that several layers share.

A shared block reads the hidden states beside the tokens' embeddings, ``norm([h | e])``, attends, and runs a
feed-forward part behind a norm, without residuals; a projection of the layer's own adds it to what Mamba-2 reads:
``h += mamba(norm(h + W shared(h, e)))``. ``num_mem_blocks`` blocks take turns. Every use has low-rank adapters of its
own, and its own keys and values. Scores are scaled by ``(head_dim / 2) ** -0.5``. Steps of Mamba-2 are clamped to
``time_step_limit`` where a file has it (see ``nemotron_h``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.batch import Batch
from hypic.engine.layers.attention import attend
from hypic.engine.layers.decoder import Step, run_mixer
from hypic.engine.layers.mamba2 import Mamba2Mixer, Mamba2Shape
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Rotary, rotate
from hypic.engine.models._config import layer_numbers, read, refuse_all_but, rotary_from
from hypic.engine.models._decoder import TextDecoder
from hypic.engine.models._mamba import modern_types, time_step_limit
from hypic.engine.pool import AttentionShape, Pool
from hypic.engine.weights import Placement

GATED_NORM_EPS = 1e-5  # whatever the configuration says of the other norms
LATER_USE = re.compile(r"layers\.(\d+)\.shared_transformer\..*")


@dataclass(frozen=True)
class SharedShape:
    """Sizes of a shared block; ``uses`` number the layers that run it, among all layers that run one."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    rank: int
    has_attention_adapters: bool
    uses: tuple[int, ...]
    eps: float

    @property
    def head_dim(self) -> int:
        return 2 * self.hidden_size // self.num_heads


class Adapters(nn.ModuleDict):
    """One low-rank map ``b(a(x))`` for each use, by its number."""

    def __init__(self, uses: Sequence[int], size: int, rank: int, width: int) -> None:
        pairs = [nn.Sequential(nn.Linear(size, rank, bias=False), nn.Linear(rank, width, bias=False)) for _ in uses]
        super().__init__({str(use): pair for use, pair in zip(uses, pairs, strict=True)})

    def forward(self, x: Tensor, use: int) -> Tensor:
        out: Tensor = self[str(use)](x)
        return out


class SharedAttention(nn.Module):
    """Grouped-query attention over twice the hidden size, adapted to each use; named as in the checkpoint."""

    def __init__(self, shape: SharedShape) -> None:
        super().__init__()
        self.shape, size = shape, 2 * shape.hidden_size
        widths = {"q": shape.num_heads * shape.head_dim}
        widths["k"] = widths["v"] = shape.num_kv_heads * shape.head_dim
        for letter, width in widths.items():
            self.add_module(f"{letter}_proj", nn.Linear(size, width, bias=False))
            if shape.has_attention_adapters:
                self.add_module(f"linear_{letter}_adapter_list", Adapters(shape.uses, size, shape.rank, width))
        self.o_proj = nn.Linear(widths["q"], shape.hidden_size, bias=False)

    @property
    def kept(self) -> AttentionShape:
        return AttentionShape(self.shape.num_kv_heads, self.shape.head_dim, self.shape.head_dim)

    def forward(self, x: Tensor, step: Step, use: int) -> Tensor:
        """``x [N, 2 hidden]`` -> ``[N, hidden]``; keys and values are those of layer ``use``."""
        q, k, v = (self._project(letter, x, use) for letter in "qkv")
        step.pool.write_kv(use, step.batch.kv_slots, k, v)
        q = q if step.turns is None else rotate(q, step.turns.rows)
        mixed = torch.empty_like(q)
        for number, context in enumerate(step.batch.contexts):
            keys, values = step.pool.read_kv(use, context.slots)
            keys = keys if step.turns is None else rotate(keys, step.turns.keys[number])
            attend(q, keys, values, context, mixed, (self.shape.head_dim / 2) ** -0.5)
        out: Tensor = self.o_proj(mixed.flatten(-2))
        return out

    def _project(self, letter: str, x: Tensor, use: int) -> Tensor:
        projected: Tensor = self.get_submodule(f"{letter}_proj")(x)
        if self.shape.has_attention_adapters:
            projected = projected + self.get_submodule(f"linear_{letter}_adapter_list")(x, use)
        return projected.view(len(x), -1, self.shape.head_dim)


class SharedMLP(nn.Module):
    """``down(gelu(gate) * up)`` with ``[gate | up] = W x + adapter(x)``."""

    def __init__(self, shape: SharedShape) -> None:
        super().__init__()
        size, width = shape.hidden_size, shape.intermediate_size
        self.gate_up_proj = nn.Linear(size, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)
        self.gate_up_proj_adapter_list = Adapters(shape.uses, size, shape.rank, 2 * width)

    def forward(self, x: Tensor, use: int) -> Tensor:
        gate, up = (self.gate_up_proj(x) + self.gate_up_proj_adapter_list(x, use)).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.gelu(gate) * up)
        return out


class SharedBlock(nn.Module):
    """See the module's docstring."""

    def __init__(self, shape: SharedShape) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = SharedAttention(shape), SharedMLP(shape)
        self.input_layernorm = RMSNorm(2 * shape.hidden_size, shape.eps)
        self.pre_ff_layernorm = RMSNorm(shape.hidden_size, shape.eps)

    def forward(self, hidden: Tensor, step: Step, use: int) -> Tensor:
        assert step.embedded is not None, "a shared block reads the tokens' embeddings"
        both = self.input_layernorm(torch.cat([hidden, step.embedded], dim=-1))
        out: Tensor = self.feed_forward(self.pre_ff_layernorm(self.self_attn(both, step, use)), use)
        return out


class Block(nn.Module):
    """A Mamba-2 layer, behind a shared block if it has one; the same block may be part of several layers."""

    def __init__(self, mamba: Mamba2Mixer, depth: int, eps: float, shared: SharedBlock | None, use: int) -> None:
        super().__init__()
        size = mamba.shape.hidden_size
        self.mamba, self.depth, self.use = mamba, depth, use
        self.input_layernorm = RMSNorm(size, eps)
        self.shared_transformer = shared
        self.linear = None if shared is None else nn.Linear(size, size, bias=False)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        seen = hidden
        if self.shared_transformer is not None and self.linear is not None:
            seen = hidden + self.linear(self.shared_transformer(hidden, step, self.use))
        return hidden + run_mixer(self.mamba, self.input_layernorm(seen), step, self.depth)


class Model(TextDecoder):
    """See the module's docstring."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """From ``config.json``.

        Raises:
            UnsupportedModel: a feature we do not compute.
            CheckpointError: a field is missing.
        """
        refuse_all_but(config, REFUSED)
        size, eps = read(config, "hidden_size", int), read(config, "rms_norm_eps", float)
        types = modern_types(read(config, "layers_block_type", list), config)
        uses, shared = layer_numbers(types, ("linear_attention", "hybrid")), _shared(config, types.count("hybrid"))
        blocks = []
        for depth, (kind, use) in enumerate(zip(types, uses, strict=True)):
            block = shared[use % len(shared)] if kind == "hybrid" else None
            blocks.append(Block(Mamba2Mixer(_mamba(config)), depth, eps, block, use))
        tied = bool(config.get("tie_word_embeddings", True))
        return cls.of_blocks(config, types, blocks, RMSNorm(size, eps), _rotary(config), tied=tied)

    def mixers(self) -> list[Any]:
        blocks: list[Any] = list(self.layers)
        attending = [block.shared_transformer.self_attn for block in blocks if block.shared_transformer is not None]
        return [block.mamba for block in blocks] + attending

    def forward_final(self, batch: Batch, pool: Pool) -> tuple[Tensor, Tensor]:
        # The last layer's Mamba-2 reads what its shared block gives for every row, so no row can be left out.
        hidden = self.forward(batch, pool)
        return hidden.index_select(0, batch.final.tokens), hidden.isfinite().all(-1)

    def map_weights(self, name: str) -> Placement | None:
        name = name.removeprefix("model.").replace("final_layernorm.", "norm.").replace(".mamba_decoder.", ".")
        if self.is_tied_head(name):
            return None
        used = LATER_USE.fullmatch(name)
        if used is not None and not self._is_first_use(int(used[1])):
            return None
        return Placement(name)

    def _is_first_use(self, depth: int) -> bool:
        """Whether no layer before runs the same shared block; only under the first one's name it is loaded."""
        blocks: list[Any] = list(self.layers)
        return all(block.shared_transformer is not blocks[depth].shared_transformer for block in blocks[:depth])

    def _step(self, batch: Batch, pool: Pool) -> Step:
        step = super()._step(batch, pool)
        return Step(batch, pool, step.turns, embedded=self.embed(batch.ids))


REFUSED = {
    "hidden_act": "gelu",
    "add_bias_linear": False,
    "use_long_context": False,
}


def _shared(config: Mapping[str, Any], num_uses: int) -> list[SharedBlock]:
    count = min(int(config.get("num_mem_blocks") or 1), num_uses)
    heads, size = read(config, "num_attention_heads", int), read(config, "hidden_size", int)
    shapes = [
        SharedShape(
            hidden_size=size,
            intermediate_size=int(config.get("intermediate_size") or 4 * size),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            rank=read(config, "adapter_rank", int),
            has_attention_adapters=bool(config.get("use_shared_attention_adapter", False)),
            uses=tuple(range(number, num_uses, count)),
            eps=read(config, "rms_norm_eps", float),
        )
        for number in range(count)
    ]
    return [SharedBlock(shape) for shape in shapes]


def _rotary(config: Mapping[str, Any]) -> Rotary | None:
    if not config.get("use_mem_rope", False):
        return None
    heads, size = read(config, "num_attention_heads", int), read(config, "hidden_size", int)
    return rotary_from(config, 2 * size // heads, default_factor=1.0)


def _mamba(config: Mapping[str, Any]) -> Mamba2Shape:
    size, heads = read(config, "hidden_size", int), read(config, "n_mamba_heads", int)
    return Mamba2Shape(
        hidden_size=size,
        num_heads=heads,
        head_dim=int(config.get("mamba_expand", 2)) * size // heads,
        state_size=read(config, "mamba_d_state", int),
        num_groups=read(config, "mamba_ngroups", int),
        conv_width=read(config, "mamba_d_conv", int),
        eps=GATED_NORM_EPS,
        time_step_limit=time_step_limit(config),
    )

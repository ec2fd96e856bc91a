"""The bundled model's Ring-like sibling in training: Lightning attention with rotary keys, and grouped-query attention.

Its transitions are one constant number a head, where the bundled model's are matrices that depend on the text: the
other end of the algebra, at the same size, trained by the same recipe. It is a dense ``bailing_moe_linear`` model
(Ring/Ling-linear 2.0: every layer among the first, which have no experts), so parameters bear that checkpoint's names.
transformers has no such model type; the engine and the tests' float64 reference do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from hypic.engine.affine import Affine
from hypic.engine.layers.lightning_attention import GroupedLightningAttention, GroupedLightningShape
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm, upcast
from hypic.engine.layers.rotary import Angles, rotate
from hypic.engine.linear.lightning import DecayInputs
from hypic.engine.models.bailing_moe_linear import layer_types, slopes
from hypic_apps.train.grid import Grid, attended, carried, chunked

MODEL_TYPE = "bailing_moe_linear"


@dataclass(frozen=True)
class RingShape:
    """Sizes, in the words of ``config.json``."""

    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 12
    layer_group_size: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    group_norm_size: int = 4
    partial_rotary_factor: float = 0.5
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 16_384

    @property
    def layer_types(self) -> list[str]:
        """Per layer, ``linear_attention`` or ``full_attention``."""
        return layer_types(asdict(self))

    @property
    def conv_width(self) -> int:
        """There is no convolution: a token sees itself."""
        return 1

    @property
    def has_centred_norms(self) -> bool:
        return False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> RingShape:
        """The shape that a ``config.json`` describes."""
        return cls(**{field.name: config[field.name] for field in fields(cls)})

    def block(self, depth: int) -> nn.Module:
        """The decoder layer of a depth."""
        is_full = self.layer_types[depth] == "full_attention"
        return RingAttentionBlock(self) if is_full else LightningBlock(self, depth)

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name of one of our parameters."""
        return "model." + name.replace("embed_tokens.", "word_embeddings.")

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["BailingMoeLinearV2ForCausalLM"],
            "model_type": MODEL_TYPE,
            **asdict(self),
            "num_experts": 0,
            "first_k_dense_replace": self.num_hidden_layers,
            "use_qk_norm": True,
            "linear_silu": False,
            "use_qkv_bias": False,
            "use_bias": False,
            "use_rmsnorm": True,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }


class LightningBlock(nn.Module):
    """A decoder layer with Lightning attention; see ``model.LinearBlock`` for ``before`` and ``after``."""

    decay: Tensor

    def __init__(self, shape: RingShape, depth: int) -> None:
        super().__init__()
        sizes = GroupedLightningShape(
            shape.hidden_size, shape.num_attention_heads, shape.head_dim, shape.group_norm_size, shape.rms_norm_eps
        )
        constant = slopes(shape.config(), depth)
        self.attention = GroupedLightningAttention(sizes, constant)
        self.register_buffer("decay", -constant.float(), persistent=False)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The chunks' transitions, end states, queries and offsets, and the output gate ``[N, H D]``."""
        mixer = self.attention
        projected = mixer.project(self.input_layernorm(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            lifted = mixer.family.lift(chunked(self._inputs(upcast(projected.qkv), Angles(cos, sin))))
        return lifted.maps.transition, lifted.maps.end_state, lifted.query, lifted.offset, projected.gate

    def _inputs(self, qkv: Tensor, angles: Angles) -> DecayInputs:
        """As the mixer's own, with decays from a buffer, which can be compiled and captured."""
        mixer = self.attention
        q, k, v = qkv.chunk(3, dim=1)
        q, k = rotate(mixer.query_layernorm(q), angles), rotate(mixer.key_layernorm(k), angles)
        return DecayInputs(q * mixer.shape.head_dim**-0.5, k, v, self.decay.to(q.dtype).expand(len(q), -1))

    def after(self, hidden: Tensor, states: Tensor, query: Tensor, offset: Tensor, gate: Tensor) -> Tensor:
        """The layer's output, given the states before the chunks."""
        mixer = self.attention
        with torch.autocast(hidden.device.type, enabled=False):
            read = (query @ states + offset).transpose(1, 2).flatten(0, 1)
        normed = mixer.g_norm(read.flatten(-2)).to(gate.dtype)
        hidden = hidden + mixer.dense(normed * gate.sigmoid())
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def forward(self, hidden: Tensor, grid: Grid) -> Tensor:
        """``hidden [N, hidden]`` -> the same."""
        transition, end_state, query, offset, gate = self.before(hidden, grid.angles.cos, grid.angles.sin)
        states = carried(Affine(transition, end_state), grid.rows)
        return self.after(hidden, states, query, offset, gate)


class RingAttention(nn.Module):
    """Grouped-query attention with normed heads; parameters are named as in the checkpoint."""

    def __init__(self, shape: RingShape) -> None:
        super().__init__()
        self.sizes = shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        self.query_key_value = nn.Linear(shape.hidden_size, sum(self.sizes) * shape.head_dim, bias=False)
        self.dense = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.key_layernorm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def project(self, hidden: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated ``q, k``, and ``v``: ``[N, H, D]``."""
        heads = self.query_key_value(hidden).view(len(hidden), sum(self.sizes), self.head_dim)
        q, k, v = heads.split(self.sizes, dim=1)
        q, k = rotate(self.query_layernorm(q), angles), rotate(self.key_layernorm(k), angles)
        return q.to(v.dtype), k.to(v.dtype), v


class RingAttentionBlock(nn.Module):
    """A decoder layer with full attention; see ``model.LinearBlock`` for ``before`` and ``after``."""

    def __init__(self, shape: RingShape) -> None:
        super().__init__()
        self.attention = RingAttention(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated ``q, k``, and ``v``: ``[N, H, D]``."""
        return self.attention.project(self.input_layernorm(hidden), Angles(cos, sin))

    def after(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output, given ``mixed [N, H, D]``."""
        hidden = hidden + self.attention.dense(mixed.flatten(-2))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def forward(self, hidden: Tensor, grid: Grid) -> Tensor:
        """``hidden [N, hidden]`` -> the same."""
        return self.after(hidden, attended(*self.before(hidden, grid.angles.cos, grid.angles.sin), grid))

"""The bundled model in training: the engine's own layers, run over batches of rows of one length, with gradients.

Only the wiring is here: convolution by padding, states carried from chunk to chunk, causal attention. All formulas are
the engine's. Parameters bear the checkpoint's names, so the state dict is what is exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic.engine.affine import Affine
from hypic.engine.layers.attention import Attention, HeadShape
from hypic.engine.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet, Projected
from hypic.engine.layers.mlp import SwiGLU
from hypic.engine.layers.norm import RMSNorm
from hypic.engine.layers.rotary import Angles, Rotary, rotate
from hypic_apps.train.architecture import Architecture
from hypic_apps.train.grid import Grid, attended, carried, chunked, shifted_conv
from hypic_apps.train.streams import contextual, raw_of_both, with_interiors

MODEL_TYPE = "qwen3_5_text"


@dataclass(frozen=True)
class Shape:
    """Sizes of a ``qwen3_5_text`` model, in the words of its ``config.json``; the defaults are hypic-tiny's."""

    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 12
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.5
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 16_384

    @property
    def layer_types(self) -> list[str]:
        """Per layer, ``linear_attention`` or ``full_attention``."""
        every = self.full_attention_interval
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(self.num_hidden_layers)]

    @property
    def conv_width(self) -> int:
        """Tokens that the short convolution sees."""
        return self.linear_conv_kernel_dim

    @property
    def has_centred_norms(self) -> bool:
        return True

    def block(self, depth: int) -> nn.Module:
        """The decoder layer of a depth."""
        return AttentionBlock(self) if self.layer_types[depth] == "full_attention" else LinearBlock(self)

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name of one of our parameters."""
        return "model." + name

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Shape:
        """The shape that a ``config.json`` describes."""
        known = {**config, "rope_theta": config["rope_parameters"]["rope_theta"]}
        return cls(**{field.name: known[field.name] for field in fields(cls)})

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        own = asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": own.pop("rope_theta"),
            "partial_rotary_factor": own["partial_rotary_factor"],
        }
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": MODEL_TYPE,
            **own,
            "layer_types": self.layer_types,
            "rope_parameters": rope,
            "attn_output_gate": True,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 0,
        }


class LinearBlock(nn.Module):
    """A decoder layer with Gated DeltaNet. ``before`` and ``after`` see flat tokens, ``[N, ...]``, so their shapes stay
    the same at every stage of the curriculum; only what lies between knows rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        delta = DeltaNetShape(
            shape.hidden_size, shape.linear_num_key_heads, shape.linear_num_value_heads, shape.linear_key_head_dim,
            shape.linear_value_head_dim, shape.linear_conv_kernel_dim, shape.rms_norm_eps,
        )  # fmt: skip
        self.linear_attn = GatedDeltaNet(delta)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, zero_centred=True)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)

    def before(
        self, hidden: Tensor, history: Tensor, interior: Tensor | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The chunks' transitions, end states, queries and offsets, and the output gate ``[N, value_size]``;
        ``interior`` and ``resets`` are those of two streams (``Streams``)."""
        mixer = self.linear_attn
        projected = mixer.project(self.input_layernorm(hidden))
        if interior is not None:
            projected = raw_of_both(projected, interior)
        mixed = shifted_conv(projected.mixed, mixer.conv1d.weight, history)
        if interior is not None:
            # an interior's first tokens saw the seam as it was when the segment was encoded alone
            mixed = with_interiors(mixed, interior)
        projected = replace(projected, mixed=mixed)
        with torch.autocast(hidden.device.type, enabled=False):
            inputs = mixer.inputs(projected)
            inputs = inputs if resets is None else replace(inputs, g=inputs.g + resets)
            lifted = mixer.family.lift(chunked(inputs))
        return lifted.maps.transition, lifted.maps.end_state, lifted.query, lifted.offset, projected.z

    def after(self, hidden: Tensor, states: Tensor, query: Tensor, offset: Tensor, z: Tensor) -> Tensor:
        """The layer's output, given the states before the chunks."""
        mixer = self.linear_attn
        with torch.autocast(hidden.device.type, enabled=False):
            read = (query @ states + offset).transpose(1, 2).flatten(0, 1)
        empty = z.new_empty(0)
        hidden = hidden + mixer.output(read, Projected(empty, z, empty, empty))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def forward(self, hidden: Tensor, grid: Grid) -> Tensor:
        """``hidden [N, hidden]`` -> the same."""
        of_streams = () if grid.streams is None else (grid.streams.interior, grid.streams.resets)
        transition, end_state, query, offset, z = self.before(hidden, grid.history, *of_streams)
        states = carried(Affine(transition, end_state), grid.rows)
        return self.after(hidden, states, query, offset, z)


class AttentionBlock(nn.Module):
    """A decoder layer with gated full attention; see ``LinearBlock`` for ``before`` and ``after``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads = HeadShape(
            shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, True,
            shape.rms_norm_eps,
        )  # fmt: skip
        self.self_attn = Attention(heads)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, zero_centred=True)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, zero_centred=True)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated ``q, k``, and ``v`` and the output gate: ``[N, H, D]``."""
        q, k, v, gate = self.self_attn.project(self.input_layernorm(hidden))
        assert gate is not None, "the bundled model's attention has an output gate"
        angles = Angles(cos, sin)
        return rotate(q, angles).to(v.dtype), rotate(k, angles).to(v.dtype), v, gate

    def after(self, hidden: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        """The layer's output, given ``mixed [N, H, D]``."""
        hidden = hidden + self.self_attn.output(mixed, gate)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def forward(self, hidden: Tensor, grid: Grid) -> Tensor:
        """``hidden [N, hidden]`` -> the same."""
        q, k, v, gate = self.before(hidden, grid.angles.cos, grid.angles.sin)
        return self.after(hidden, attended(q, k, v, grid), gate)


class Trainee(nn.Module):
    """The whole model; ``loss`` is what is minimised, ``logits`` what is compared and measured."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(shape.block(depth) for depth in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, zero_centred=shape.has_centred_norms)
        self.rotary = Rotary(int(shape.head_dim * shape.partial_rotary_factor), shape.rope_theta)

    def grid(self, rows: int, length: int, device: torch.device) -> Grid:
        """The grid of a batch; ``length`` is a multiple of the chunk."""
        positions = torch.arange(length, device=device).repeat(rows)
        back = torch.arange(1, self.shape.conv_width, device=device)
        history = (positions >= back[:, None]).float()[..., None]
        return Grid(rows, length, history, self.rotary(positions, length, self._wide))

    @property
    def _wide(self) -> torch.dtype:
        """The type of angles and decays: that of the weights, at least float32."""
        return torch.promote_types(self.embed_tokens.weight.dtype, torch.float32)

    def hidden(self, ids: Tensor, marks: Tensor | None = None) -> Tensor:
        """``ids [B, T]`` -> ``[B T, hidden]``, normed.

        With ``marks [B, T]`` (``segments``) those of the answer through segments, and in their interiors those of the
        canonical encoding.
        """
        rows, length = ids.shape
        grid = self.grid(rows, length, ids.device)
        # index_select, because its gradient can be captured in a CUDA graph
        hidden = self.embed_tokens.weight.index_select(0, ids.flatten())
        if marks is not None:
            grid = grid.doubled(marks, self._wide)
            hidden = hidden.repeat(2, 1)
        for layer in self.layers:
            hidden = layer(hidden, grid)
        if grid.streams is not None:
            hidden = contextual(hidden, grid.streams.interior)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, ids: Tensor, marks: Tensor | None = None) -> Tensor:
        """``[B, T, vocab]``."""
        return F.linear(self.hidden(ids, marks), self.embed_tokens.weight).reshape(*ids.shape, -1)

    def loss(self, ids: Tensor, weights: Tensor, marks: Tensor | None = None) -> Tensor:
        """Weighted mean of the next token's cross entropy; ``weights[b, t]`` is that of token ``t``.

        With ``marks``, an interior's tokens are foretold by its canonical encoding, and what follows an interior, by
        nothing: its last token is never asked for it.
        """
        targets = ids.roll(-1, dims=1)
        wanted = weights.roll(-1, dims=1)
        last = torch.arange(ids.shape[1], device=ids.device) == ids.shape[1] - 1
        if marks is not None:
            last = last | ((marks > 0) & (marks.roll(-1, dims=1) != marks))
        wanted = wanted.masked_fill(last, 0.0)
        return self.score(self.hidden(ids, marks), targets.flatten(), wanted.flatten())

    def score(self, hidden: Tensor, targets: Tensor, wanted: Tensor) -> Tensor:
        """The weighted mean loss of flat ``targets [N]``."""
        logits = F.linear(hidden, self.embed_tokens.weight)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        return (losses * wanted).sum() / wanted.sum().clamp_min(1.0)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles what works on flat tokens; its shapes are the same for all row lengths of one batch size."""
        kinds: set[Any] = {type(layer) for layer in self.layers}
        for kind in kinds:
            for name in ("before", "after"):
                compiled = torch.compile(getattr(kind, name), dynamic=False, fullgraph=True)
                for layer in self.layers:
                    if isinstance(layer, kind):
                        setattr(layer, name, partial(compiled, layer))
        self.score = torch.compile(self.score, dynamic=False)  # type: ignore[method-assign]

    def checkpoint(self) -> dict[str, Tensor]:
        """Tensors under the names of the checkpoint."""
        names = {name: self.shape.checkpoint_name(name) for name, _ in self.named_parameters()}
        return {names[name]: tensor.detach() for name, tensor in self.named_parameters()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over tensors named as in a checkpoint."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[self.shape.checkpoint_name(name)])

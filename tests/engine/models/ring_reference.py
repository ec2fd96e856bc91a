"""Ring-linear 2.0 as plain formulas, read from its files.

Its linear layers have rotary keys: their rows are rotated by absolute position, their interiors are moved by
``(R T R^T, R B)``. Nothing of hypic is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.models.gdn_network import Mlp, built, dense, in_heads
from tests.engine.models.ring_latent import LatentAttention
from tests.reference import Inputs, LinearEnd, LinearEntry, move, recur
from tests.reference.algebra import inverse_frequencies, rotate
from tests.reference.chain import Chain, How, Row
from tests.reference.checkpoint import Network, under
from tests.reference.mixers import Attention, Block, Config, Weights, rms, silu
from tests.reference.mixing import slices, through
from tests.reference.ring import ring_slopes


def ring_network(config: Config, weights: Weights) -> Network:
    group, count = config["layer_group_size"], config["num_hidden_layers"]
    in_whole_groups = count - count % group
    types = ["linear" if i % group < group - 1 and i < in_whole_groups else "full" for i in range(count)]
    if config.get("layer_types"):
        types = [str(kind).removesuffix("_attention") for kind in config["layer_types"]]
    return built(config, weights, _ring_block, types, 0.0)


def _ring_block(config: Config, w: Weights, idx: int, kind: str) -> Block:
    attention = under(w, "attention.")
    full = LatentAttention if config.get("kv_lora_rank") else RingAttention
    mixer: Any = RingLinear(config, attention, idx) if kind == "linear" else full(config, attention)
    is_dense = idx < config["first_k_dense_replace"]
    mlp: Mlp = dense(w, "mlp.") if is_dense else GroupedExperts(config, under(w, "mlp."))
    return Block(mixer, mlp, w, float(config["rms_norm_eps"]))  # type: ignore[arg-type]


class GroupedExperts:
    """Sigmoid scores; a bias only for choosing; the best groups by their two best; one shared expert."""

    def __init__(self, config: Config, w: Weights) -> None:
        self.config, self.w, self.shared = config, w, dense(w, "shared_experts.")
        self.experts = [dense(w, f"experts.{e}.") for e in range(config["num_experts"])]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([self._token(t) for t in x]) if len(x) else x

    def _token(self, x: Tensor) -> Tensor:
        c = self.config
        scores = torch.sigmoid(self.w["gate.weight"] @ x)
        biased = [float(s) for s in scores + self.w["gate.expert_bias"]]
        size = len(biased) // c["n_group"]
        groups = [range(g * size, (g + 1) * size) for g in range(c["n_group"])]
        groups.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
        allowed = [e for group in groups[: c["topk_group"]] for e in group]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: c["num_experts_per_tok"]]
        whole = sum(scores[e] for e in chosen)
        routed = sum(c["routed_scaling_factor"] * scores[e] / whole * self.experts[e](x) for e in chosen)
        out: Tensor = routed + self.shared(x)
        return out


def _normed_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms(in_heads(x, x.shape[1] // len(weight)), eps) * weight


class RingAttention(Attention):
    """One matrix for q, k and v; q and k normed per head."""

    def __init__(self, config: Config, w: Weights) -> None:
        super().__init__(config, w, gated=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        widths = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = torch.split(x @ self.w["query_key_value.weight"].T, widths, dim=1)
        q = _normed_heads(q, self.w["query_layernorm.weight"], self.eps)
        k = _normed_heads(k, self.w["key_layernorm.weight"], self.eps)
        return q, k, in_heads(v, self.num_kv_heads), None

    def output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        return o.flatten(1) @ self.w["dense.weight"].T


class RingLinear:
    """Lightning attention with rotary keys."""

    def __init__(self, config: Config, w: Weights, idx: int) -> None:
        self.w, self.eps, self.silu = w, float(config["rms_norm_eps"]), config["linear_silu"]
        self.num_heads, self.head_dim = config["num_attention_heads"], config["head_dim"]
        self.num_groups = config["group_norm_size"]
        offset = 0 if config["architectures"][0] == "BailingMoeLinearForCausalLM" else -1
        self.decay = torch.exp(-ring_slopes(self.num_heads, idx, config["num_hidden_layers"], offset))
        rotary_dim = int(self.head_dim * config["partial_rotary_factor"])
        self.frequencies = inverse_frequencies(config["rope_theta"], rotary_dim)

    def inputs(self, x: Tensor, position: int) -> Inputs:
        """The recurrence's inputs of hidden states ``[N, h]`` whose first stands at ``position``."""
        qkv = x @ self.w["query_key_value.weight"].T
        q, k, v = (silu(qkv) if self.silu else qkv).chunk(3, dim=1)
        positions = position + torch.arange(len(x))
        q = rotate(_normed_heads(q, self.w["query_layernorm.weight"], self.eps), positions, self.frequencies)
        k = rotate(_normed_heads(k, self.w["key_layernorm.weight"], self.eps), positions, self.frequencies)
        decay = self.decay.expand(len(x), -1)
        return Inputs(q * self.head_dim**-0.5, k, in_heads(v, self.num_heads), decay)

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        grouped = rms(in_heads(o.flatten(1), self.num_groups), self.eps).flatten(1)
        gate = torch.sigmoid(x @ self.w["g_proj.weight"].T)
        return (grouped * self.w["g_norm.weight"] * gate) @ self.w["dense.weight"].T


def mix_ring(mixer: RingLinear, x: Tensor, chain: Chain, idx: int, how: How) -> tuple[Tensor, LinearEnd]:
    """Rows in context, interiors moved to where their segments stand."""
    parts, outputs = [mixer.inputs(x[:0], 0)], [x[:0]]
    _, state = recur(parts[0])
    for link, here in slices(chain):
        if isinstance(link, Row):
            parts.append(mixer.inputs(x[here], link.position))
            o, state = recur(parts[-1], state)
            outputs.append(mixer.output(x[here], o))
        else:
            entry = link.entry.layers[idx]
            assert isinstance(entry, LinearEntry)
            moved = move(entry.transition, entry.end_state, link.position, mixer.frequencies)
            state = through(LinearEntry(*moved, entry.conv_tail), state, how)
    empty = x.new_zeros(len(x), 0)
    return torch.cat(outputs), LinearEnd(state, empty[:0], Inputs.cat(parts), empty)

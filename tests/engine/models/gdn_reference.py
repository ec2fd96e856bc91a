"""The token-by-token float64 reference for further families: their layers as plain formulas, read from their files.

Chains, recurrences and attention are those of ``tests.reference``; nothing of hypic is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.models.gdn_network import Mlp, built, dense, in_heads
from tests.engine.models.ring_reference import RingLinear, mix_ring, ring_network
from tests.reference import Inputs, LinearEnd, Reference, Result
from tests.reference.algebra import inverse_frequencies
from tests.reference.chain import AttentionEnd, Chain, How, Row
from tests.reference.checkpoint import Network, read_config, read_weights, under
from tests.reference.mixers import Attention, Block, Config, GatedDeltaNet, Weights, rms
from tests.reference.mixing import mix


class FamilyReference(Reference):
    """``Reference`` on a checkpoint of one of these families."""

    def __init__(self, folder: str | Path) -> None:
        config, weights = read_config(Path(folder)), read_weights(Path(folder))
        builders = {
            "bailing_hybrid": ring_network,
            "qwen3_next": _qwen,
            "qwen3_5_moe_text": _qwen,
            "olmo_hybrid": _olmo,
            "bailing_moe_linear": ring_network,
        }
        self.network = builders[str(config["model_type"])](config, weights)

    def _forward(self, chain: Chain, how: How) -> Result:
        net, rows = self.network, [link for link in chain if isinstance(link, Row)]
        x = net.embedding[torch.tensor([i for row in rows for i in row.ids])]
        positions = torch.tensor([row.position + j for row in rows for j in range(len(row.ids))])
        ends: list[LinearEnd | AttentionEnd] = []
        for idx, block in enumerate(net.blocks):
            normed = block.norm(x, second=False)
            mixed, end = self._mix(block.mixer, normed, chain, idx, how)
            x = block.add(x, normed, mixed, second=False)
            normed = block.norm(x, second=True)
            x = block.add(x, normed, block.feed_forward(normed), second=True)
            ends.append(end)
        return Result((rms(x, net.eps) * net.final_norm) @ net.head.T, positions, tuple(ends))

    def _mix(self, mixer: Any, x: Tensor, chain: Chain, idx: int, how: How) -> tuple[Tensor, LinearEnd | AttentionEnd]:
        return (mix_ring if isinstance(mixer, RingLinear) else mix)(mixer, x, chain, idx, how)


# -- Qwen ------------------------------------------------------------------------------------------------------------


def _qwen(config: Config, weights: Weights) -> Network:
    return built(config, weights, _qwen_block, list(config["layer_types"]), 1.0)


def _qwen_block(config: Config, w: Weights, idx: int, kind: str) -> Block:
    if kind == "full_attention":
        mixer: Any = Attention(config, under(w, "self_attn."), gated=True)
    else:
        mixer = GatedDeltaNet(config, _unfused(config, under(w, "linear_attn.")))
    is_dense = "mlp.gate.weight" not in w
    mlp: Mlp = dense(w, "mlp.") if is_dense else SoftmaxExperts(config, under(w, "mlp."))
    return Block(mixer, mlp, w, float(config["rms_norm_eps"]), offset=1.0)  # type: ignore[arg-type]


def _unfused(config: Config, w: Weights) -> Weights:
    """Qwen3-Next's projections apart: per key head q, k, the values and the gates of its value heads; b and a."""
    if "in_proj_qkvz.weight" not in w:
        return w
    heads, k_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    q, k, v, z = torch.split(_per_head(w["in_proj_qkvz.weight"], heads), [k_dim, k_dim, values, values], dim=1)
    b, a = _per_head(w["in_proj_ba.weight"], heads).chunk(2, dim=1)
    flat = {"qkv": torch.cat([part.flatten(0, 1) for part in (q, k, v)])}
    flat |= {name: part.flatten(0, 1) for name, part in (("z", z), ("b", b), ("a", a))}
    return dict(w) | {f"in_proj_{name}.weight": tensor for name, tensor in flat.items()}


def _per_head(rows: Tensor, num_heads: int) -> Tensor:
    """``[H n, ...]`` -> ``[H, n, ...]``."""
    return rows.reshape(num_heads, len(rows) // num_heads, *rows.shape[1:])


class SoftmaxExperts:
    """The best experts of a softmax, and one that all tokens share, behind a sigmoid gate."""

    def __init__(self, config: Config, w: Weights) -> None:
        self.top_k, self.renormalise = config["num_experts_per_tok"], config.get("norm_topk_prob", True)
        self.router, self.shared, self.shared_gate = w["gate.weight"], dense(w, "shared_expert."), "shared_expert_gate"
        self.shared_gate_weight = w["shared_expert_gate.weight"]
        self.experts = [dense(w, f"experts.{e}.") for e in range(config["num_experts"])]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([self._token(t) for t in x]) if len(x) else x

    def _token(self, x: Tensor) -> Tensor:
        p = torch.exp(self.router @ x)
        p = p / p.sum()
        chosen = sorted(range(len(p)), key=lambda e: -float(p[e]))[: self.top_k]
        whole = sum(p[e] for e in chosen) if self.renormalise else 1.0
        routed = sum(p[e] / whole * self.experts[e](x) for e in chosen)
        out: Tensor = routed + torch.sigmoid(self.shared_gate_weight @ x) * self.shared(x)
        return out


# -- OLMo-Hybrid -----------------------------------------------------------------------------------------------------


def _olmo(config: Config, weights: Weights) -> Network:
    return built(config, weights, _olmo_block, list(config["layer_types"]), 0.0)


def _olmo_block(config: Config, w: Weights, idx: int, kind: str) -> Block:
    eps, mlp = float(config["rms_norm_eps"]), dense(w, "mlp.")
    if kind == "full_attention":
        # transformers writes the first norm under the name that only linear layers should have.
        first = next(w[n] for n in ("post_attention_layernorm.weight", "feedforward_layer_norm.weight") if n in w)
        norms = dict(w) | {"post_attention_layernorm.weight": first}
        return PostNormBlock(OlmoAttention(config, under(w, "self_attn.")), mlp, norms, eps)
    names = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
    norms = {f"{ours}.weight": w[f"{theirs}.weight"] for ours, theirs in names.items()}
    return Block(OlmoDelta(config, under(w, "linear_attn.")), mlp, norms, eps)


class PostNormBlock(Block):
    """The branch is normed, not what it reads."""

    def norm(self, x: Tensor, second: bool) -> Tensor:
        return x

    def add(self, x: Tensor, normed: Tensor, branch: Tensor, second: bool) -> Tensor:
        name = "post_feedforward_layernorm.weight" if second else "post_attention_layernorm.weight"
        return x + rms(branch, self.eps) * self.weights[name]


class OlmoDelta(GatedDeltaNet):
    """Projections and convolutions stored apart; beta twice as large."""

    def __init__(self, config: Config, w: Weights) -> None:
        fused = {"norm.weight": w["o_norm.weight"]}
        for ours, theirs in (("conv1d", "conv1d"), ("in_proj_qkv", "proj")):
            fused[f"{ours}.weight"] = torch.cat([w[f"{p}_{theirs}.weight"] for p in "qkv"])
        for ours, theirs in (("in_proj_z", "g"), ("in_proj_b", "b"), ("in_proj_a", "a"), ("out_proj", "o")):
            fused[f"{ours}.weight"] = w[f"{theirs}_proj.weight"]
        super().__init__(dict(config) | {"rms_norm_eps": 1e-5}, dict(w) | fused)
        self.factor = 2.0 if config["linear_allow_neg_eigval"] else 1.0

    def inputs(self, x: Tensor, mixed: Tensor) -> Inputs:
        found = super().inputs(x, mixed)
        assert found.beta is not None
        return Inputs(found.q, found.k, found.v, found.decay, self.factor * found.beta)


class OlmoAttention(Attention):
    """Norms over the whole width, then heads; positions only where the file has a base for them."""

    def __init__(self, config: Config, w: Weights) -> None:
        self.w, self.gated, self.eps = w, False, float(config["rms_norm_eps"])
        self.num_heads = self.num_kv_heads = config["num_attention_heads"]
        self.head_dim = config["hidden_size"] // self.num_heads
        theta = (config["rope_parameters"] or {}).get("rope_theta")
        self.frequencies = torch.zeros(0) if theta is None else inverse_frequencies(theta, self.head_dim)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q = rms(x @ self.w["q_proj.weight"].T, self.eps) * self.w["q_norm.weight"]
        k = rms(x @ self.w["k_proj.weight"].T, self.eps) * self.w["k_norm.weight"]
        heads = [in_heads(part, self.num_heads) for part in (q, k, x @ self.w["v_proj.weight"].T)]
        return heads[0], heads[1], heads[2], None

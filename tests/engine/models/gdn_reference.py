"""The token-by-token float64 reference for further families: their layers as plain formulas, read from their files.

Chains, recurrences and attention are those of ``tests.reference``; nothing of hypic is imported. Ring-linear's linear
layers have rotary keys: their rows are rotated by absolute position, their interiors are moved by ``(R T R^T, R B)``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.models.ring_latent import LatentAttention
from tests.reference import Inputs, LinearEnd, LinearEntry, Reference, Result, move, recur
from tests.reference.algebra import inverse_frequencies, rotate
from tests.reference.chain import AttentionEnd, Chain, How, Row
from tests.reference.checkpoint import Network, read_config, read_weights, under
from tests.reference.mixers import Attention, Block, Config, GatedDeltaNet, SwiGLU, Weights, rms, silu
from tests.reference.mixing import mix, slices, through
from tests.reference.ring import ring_slopes

Mlp = Callable[[Tensor], Tensor]


class FamilyReference(Reference):
    """``Reference`` on a checkpoint of one of these families."""

    def __init__(self, folder: str | Path) -> None:
        config, weights = read_config(Path(folder)), read_weights(Path(folder))
        builders = {
            "bailing_hybrid": _ring,
            "qwen3_next": _qwen,
            "qwen3_5_moe_text": _qwen,
            "olmo_hybrid": _olmo,
            "bailing_moe_linear": _ring,
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


def _network(config: Config, weights: Weights, block: Callable[..., Block], types: list[str], offset: float) -> Network:
    blocks = tuple(block(config, under(weights, f"model.layers.{i}."), i, kind) for i, kind in enumerate(types))
    embedding = next(weights[n] for n in EMBEDDINGS if n in weights)
    head = weights.get("lm_head.weight", embedding)
    return Network(embedding, blocks, weights["model.norm.weight"] + offset, head, float(config["rms_norm_eps"]))


EMBEDDINGS = ("model.embed_tokens.weight", "model.word_embeddings.weight")


def dense(weights: Weights, stem: str) -> SwiGLU:
    return SwiGLU(*(weights[f"{stem}{part}_proj.weight"] for part in ("gate", "up", "down")))


# -- Qwen ------------------------------------------------------------------------------------------------------------


def _qwen(config: Config, weights: Weights) -> Network:
    return _network(config, weights, _qwen_block, list(config["layer_types"]), 1.0)


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


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """``[N, H D]`` -> ``[N, H, D]``."""
    return x.reshape(len(x), num_heads, x.shape[1] // num_heads)


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
    return _network(config, weights, _olmo_block, list(config["layer_types"]), 0.0)


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
        heads = [_heads(part, self.num_heads) for part in (q, k, x @ self.w["v_proj.weight"].T)]
        return heads[0], heads[1], heads[2], None


# -- Ring-linear 2.0 -------------------------------------------------------------------------------------------------


def _ring(config: Config, weights: Weights) -> Network:
    group, count = config["layer_group_size"], config["num_hidden_layers"]
    in_whole_groups = count - count % group
    types = ["linear" if i % group < group - 1 and i < in_whole_groups else "full" for i in range(count)]
    if config.get("layer_types"):
        types = [str(kind).removesuffix("_attention") for kind in config["layer_types"]]
    return _network(config, weights, _ring_block, types, 0.0)


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
    return rms(_heads(x, x.shape[1] // len(weight)), eps) * weight


class RingAttention(Attention):
    """One matrix for q, k and v; q and k normed per head."""

    def __init__(self, config: Config, w: Weights) -> None:
        super().__init__(config, w, gated=False)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        widths = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = torch.split(x @ self.w["query_key_value.weight"].T, widths, dim=1)
        q = _normed_heads(q, self.w["query_layernorm.weight"], self.eps)
        k = _normed_heads(k, self.w["key_layernorm.weight"], self.eps)
        return q, k, _heads(v, self.num_kv_heads), None

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
        return Inputs(q * self.head_dim**-0.5, k, _heads(v, self.num_heads), decay)

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        grouped = rms(_heads(o.flatten(1), self.num_groups), self.eps).flatten(1)
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

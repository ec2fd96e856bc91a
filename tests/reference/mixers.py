"""The layers of two model families as plain formulas on float64 tensors.

``qwen3_5_text``: Gated DeltaNet, gated attention with partial rotary embedding, SwiGLU.
``minimax``: lightning attention, grouped-query attention honouring ``rotary_dim``, a mixture of experts,
and residuals taken after the norm. Mixers know neither chains nor caches: they map hidden states to
what a recurrence or an attention reads, and its outputs back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.reference.algebra import Inputs, inverse_frequencies

Config = Mapping[str, Any]
Weights = Mapping[str, Tensor]


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return x * torch.sigmoid(x)


def rms(x: Tensor, eps: float) -> Tensor:
    """``x`` over its root mean square along the last axis."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def l2(x: Tensor) -> Tensor:
    """``x`` over its length along the last axis."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _repeat(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, dim=1)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(len(x), num_heads, x.shape[1] // num_heads)


class Linear(Protocol):
    """A linear-attention mixer. ``width`` is the short convolution's number of taps (1: none)."""

    width: int

    def raw(self, x: Tensor) -> Tensor:
        """What the convolution reads, ``[N, C]``, of hidden states ``[N, h]``."""

    def taps(self) -> Tensor:
        """Convolution weights ``[C, width]``, oldest tap first."""

    def inputs(self, x: Tensor, mixed: Tensor) -> Inputs:
        """The recurrence's inputs from hidden states and convolved ``[N, C]``."""

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        """``[N, h]`` from hidden states and the recurrence's outputs ``[N, H, V]``."""


class GatedDeltaNet:
    """Qwen3.5's linear mixer: convolution over q, k and v, the delta rule, a gated norm per head."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.w, self.eps = weights, float(config["rms_norm_eps"])
        self.num_k_heads, self.num_v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.key_dim, self.value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.width = config["linear_conv_kernel_dim"]

    def raw(self, x: Tensor) -> Tensor:
        return x @ self.w["in_proj_qkv.weight"].T

    def taps(self) -> Tensor:
        return self.w["conv1d.weight"][:, 0, :]

    def inputs(self, x: Tensor, mixed: Tensor) -> Inputs:
        mixed, keys = silu(mixed), self.num_k_heads * self.key_dim
        q = _heads(mixed[:, :keys], self.num_k_heads)
        k = _heads(mixed[:, keys : 2 * keys], self.num_k_heads)
        v = _heads(mixed[:, 2 * keys :], self.num_v_heads)
        times = self.num_v_heads // self.num_k_heads
        g = -torch.exp(self.w["A_log"]) * softplus(x @ self.w["in_proj_a.weight"].T + self.w["dt_bias"])
        beta = torch.sigmoid(x @ self.w["in_proj_b.weight"].T)
        return Inputs(_repeat(l2(q), times) * self.key_dim**-0.5, _repeat(l2(k), times), v, torch.exp(g), beta)

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        z = _heads(x @ self.w["in_proj_z.weight"].T, self.num_v_heads)
        y = rms(o, self.eps) * self.w["norm.weight"] * silu(z)
        return y.flatten(1) @ self.w["out_proj.weight"].T


class Lightning:
    """MiniMax's linear mixer: constant decay per head and layer, no convolution, no scale."""

    width = 1

    def __init__(self, config: Config, weights: Weights, layer_idx: int) -> None:
        self.w, self.num_heads, self.head_dim = weights, config["num_attention_heads"], _head_dim(config)
        factor = 1 - layer_idx / (config["num_hidden_layers"] - 1 + 1e-5) + 1e-5
        heads = torch.arange(1, self.num_heads + 1, dtype=torch.float64)
        self.slopes = 2.0 ** (-8.0 * heads / self.num_heads) * factor

    def raw(self, x: Tensor) -> Tensor:
        return x @ self.w["qkv_proj.weight"].T

    def taps(self) -> Tensor:
        return torch.ones(3 * self.num_heads * self.head_dim, 1, dtype=torch.float64)

    def inputs(self, x: Tensor, mixed: Tensor) -> Inputs:
        # Per head q, k and v lie side by side.
        q, k, v = _heads(silu(mixed), self.num_heads).chunk(3, dim=2)
        return Inputs(q, k, v, torch.exp(-self.slopes).expand(len(x), -1))

    def output(self, x: Tensor, o: Tensor) -> Tensor:
        gate = torch.sigmoid(x @ self.w["output_gate.weight"].T)
        # This norm's epsilon is the class default, whatever the config says of the other norms.
        return (gate * rms(o.flatten(1), 1e-6) * self.w["norm.weight"]) @ self.w["out_proj.weight"].T


class Attention:
    """Grouped-query attention of both families: projections, qk-norm, output gate, no positions."""

    def __init__(self, config: Config, weights: Weights, gated: bool) -> None:
        self.w, self.gated, self.eps = weights, gated, float(config["rms_norm_eps"])
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = _head_dim(config)
        self.frequencies = inverse_frequencies(*rotary(config))

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q ``[N, Hq, D]``, k and v ``[N, Hkv, D]``, the output gate ``[N, Hq, D]``; nothing is rotated."""
        q = _heads(x @ self.w["q_proj.weight"].T, self.num_heads)
        k = _heads(x @ self.w["k_proj.weight"].T, self.num_kv_heads)
        v = _heads(x @ self.w["v_proj.weight"].T, self.num_kv_heads)
        if not self.gated:
            return q, k, v, None
        q, gate = q[..., : self.head_dim], q[..., self.head_dim :]
        q = rms(q, self.eps) * (1 + self.w["q_norm.weight"])
        return q, rms(k, self.eps) * (1 + self.w["k_norm.weight"]), v, gate

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One query ``[Hq, D]`` over the keys and values ``[M, Hkv, D]`` it may see."""
        times = self.num_heads // self.num_kv_heads
        scores = torch.einsum("hd,mhd->hm", q, _repeat(k, times)) * self.head_dim**-0.5
        return torch.einsum("hm,mhd->hd", torch.softmax(scores, dim=1), _repeat(v, times))

    def output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """``[N, h]`` from attended values ``[N, Hq, D]``."""
        o = o if gate is None else o * torch.sigmoid(gate)
        return o.flatten(1) @ self.w["o_proj.weight"].T


@dataclass(frozen=True)
class Block:
    """One decoder layer: norm, mixer, residual, norm, feed-forward, residual.

    ``alpha`` and ``beta`` weigh residual and branch, first for the mixer, then for the feed-forward.
    ``post_norm`` takes the residual after the norm (MiniMax); ``offset`` is what is added to a norm's weight.
    """

    mixer: Linear | Attention
    feed_forward: SwiGLU | Experts
    weights: Weights
    eps: float
    offset: float = 0.0
    post_norm: bool = False
    alpha: tuple[float, float] = (1.0, 1.0)
    beta: tuple[float, float] = (1.0, 1.0)

    def norm(self, x: Tensor, second: bool) -> Tensor:
        """The first or the second norm of the block."""
        name = "post_attention_layernorm.weight" if second else "input_layernorm.weight"
        return rms(x, self.eps) * (self.offset + self.weights[name])

    def add(self, x: Tensor, normed: Tensor, branch: Tensor, second: bool) -> Tensor:
        """The residual stream after a branch."""
        return self.alpha[second] * (normed if self.post_norm else x) + self.beta[second] * branch


class SwiGLU:
    """``down(silu(gate x) * up x)``."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: Tensor) -> Tensor:
        return (silu(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T


class Experts:
    """The best ``top_k`` of all experts by softmax, their weights summing to one."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.router, self.top_k = weights["gate.weight"], config["num_experts_per_tok"]
        names = [f"experts.{e}.{{}}.weight" for e in range(config["num_local_experts"])]
        self.experts = [SwiGLU(*(weights[name.format(part)] for part in ("w1", "w3", "w2"))) for name in names]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([self._token(x[t]) for t in range(len(x))]) if len(x) else x

    def _token(self, x: Tensor) -> Tensor:
        top, chosen = torch.softmax(self.router @ x, dim=0).topk(self.top_k)
        outputs = torch.stack([self.experts[int(e)](x) for e in chosen])
        return (top / top.sum()) @ outputs


def _head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rotary(config: Config) -> tuple[float, int]:
    """Base and number of rotated channels. ``ValueError`` for angles this reference does not know."""
    outside = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if name in config}
    parameters = {"rope_type": "default"} | outside | (config.get("rope_parameters") or {})
    if parameters["rope_type"] != "default":
        raise ValueError(f"rope_type {parameters['rope_type']!r} is not known to the reference.")
    head_dim = _head_dim(config)
    if config["model_type"] == "minimax":
        return float(parameters["rope_theta"]), int(config.get("rotary_dim") or head_dim)
    return float(parameters["rope_theta"]), int(head_dim * parameters.get("partial_rotary_factor", 0.25))

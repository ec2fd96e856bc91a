"""What one token does to a recurrent state, and what many tokens do: float64, one token at a time.

Two families share one form, ``S <- T_t S + u_t`` and ``o_t = S^T q_t`` on the updated state:

    gated delta rule   T_t = a_t (I - beta_t k_t k_t^T),  u_t = beta_t k_t v_t^T
    lightning          T_t = a I,                          u_t = k_t v_t^T

States are key-first, ``[H, K, V]``. Scales are folded into ``q``. The affine map of a run of tokens
is found by the probe: the recurrence itself, run on the state ``[0 | I]`` with the values ``[v | 0]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """What the recurrence reads of N tokens: q, k ``[N, H, K]``, v ``[N, H, V]``, decay ``[N, H]``
    (the factor itself, not its logarithm), beta ``[N, H]`` or ``None`` for lightning."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None

    def __len__(self) -> int:
        return self.k.shape[0]

    def __getitem__(self, tokens: slice) -> Inputs:
        beta = None if self.beta is None else self.beta[tokens]
        return Inputs(self.q[tokens], self.k[tokens], self.v[tokens], self.decay[tokens], beta)

    @staticmethod
    def cat(parts: list[Inputs]) -> Inputs:
        """The tokens of all parts, in order."""
        q, k, v, decay = (torch.cat([getattr(p, name) for p in parts]) for name in ("q", "k", "v", "decay"))
        betas = [p.beta for p in parts if p.beta is not None]
        return Inputs(q, k, v, decay, torch.cat(betas) if betas else None)


def zero_state(x: Inputs) -> Tensor:
    """The state before any token, ``[H, K, V]``."""
    return x.k.new_zeros(x.k.shape[1], x.k.shape[2], x.v.shape[2])


def step(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> Tensor:
    """The state after one token: k ``[H, K]``, v ``[H, V]``, decay and beta ``[H]``."""
    state = decay[:, None, None] * state
    if beta is not None:
        v = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
    return state + k[:, :, None] * v[:, None, :]


def recur(x: Inputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs ``[N, H, V]`` and the end state ``[H, K, V]``, from ``state`` (zero if ``None``)."""
    state = zero_state(x) if state is None else state
    outputs = []
    for t in range(len(x)):
        state = step(state, x.k[t], x.v[t], x.decay[t], None if x.beta is None else x.beta[t])
        outputs.append(torch.einsum("hkv,hk->hv", state, x.q[t]))
    return (torch.stack(outputs) if outputs else torch.zeros_like(x.v)), state


def probe(x: Inputs) -> tuple[Tensor, Tensor]:
    """``(T [H, K, K], B [H, K, V])`` of a run of tokens; no tokens give ``(I, 0)``."""
    num_tokens, num_heads, key_dim = x.k.shape
    identity = torch.eye(key_dim, dtype=x.k.dtype).expand(num_heads, key_dim, key_dim)
    state = torch.cat([zero_state(x), identity], dim=2)
    values = torch.cat([x.v, x.v.new_zeros(num_tokens, num_heads, key_dim)], dim=2)
    _, end = recur(Inputs(x.q, x.k, values, x.decay, x.beta), state)
    return end[:, :, x.v.shape[2] :], end[:, :, : x.v.shape[2]]


def formula(x: Inputs) -> tuple[Tensor, Tensor]:
    """``(T, B)`` again, by multiplying out ``T_N ... T_1`` and ``sum_t T_N ... T_{t+1} u_t``."""
    num_tokens, num_heads, key_dim = x.k.shape
    transition = torch.eye(key_dim, dtype=x.k.dtype).repeat(num_heads, 1, 1)
    end_state = zero_state(x)
    for t in reversed(range(num_tokens)):
        outer = torch.einsum("hk,hv->hkv", x.k[t], x.v[t])
        one = torch.eye(key_dim, dtype=x.k.dtype).expand(num_heads, key_dim, key_dim)
        if x.beta is not None:
            outer = x.beta[t][:, None, None] * outer
            one = one - x.beta[t][:, None, None] * torch.einsum("hk,hl->hkl", x.k[t], x.k[t])
        end_state = end_state + transition @ outer
        transition = transition @ (x.decay[t][:, None, None] * one)
    return transition, end_state


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Angles per position of rotary embedding, ``[rotary_dim / 2]``: ``theta^(-2i / rotary_dim)``."""
    return float(theta) ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x ``[N, H, D]`` at integer positions ``[N]``; channels i and i + r/2 of the first r are a pair."""
    half = frequencies.shape[0]
    angles = positions.to(torch.float64)[:, None, None] * frequencies
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rotation_matrix(distance: int, dim: int, frequencies: Tensor) -> Tensor:
    """``R`` ``[dim, dim]`` with ``R x = rotate(x, distance)`` for every column x."""
    basis = torch.eye(dim, dtype=torch.float64)[:, None, :]
    return rotate(basis, torch.full((dim,), distance), frequencies)[:, 0].T


def move(transition: Tensor, end_state: Tensor, distance: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """An affine map whose keys were rotated, moved by ``distance`` positions: ``(R T R^T, R B)``."""
    matrix = rotation_matrix(distance, end_state.shape[1], frequencies)
    return matrix @ transition @ matrix.T, matrix @ end_state

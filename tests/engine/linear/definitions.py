"""Every family by its definition, written out token by token in float64 with whole matrices.

Nothing here is shared with the families: every token's transition is a matrix, multiplied as it stands, and the state
of Mamba-2 lies the other way round, as its paper has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hypic.engine.linear.delta import DeltaInputs, GatedDelta
from hypic.engine.linear.delta_net import DeltaNet, DeltaNetInputs
from hypic.engine.linear.gla import GLA, GLAInputs
from hypic.engine.linear.kda import KDA, KDAInputs
from hypic.engine.linear.lightning import DecayInputs, Lightning
from hypic.engine.linear.mamba2 import Mamba2, Mamba2Inputs
from hypic.engine.linear.retnet import RetNet, RetNetInputs, retention_gates
from hypic.engine.linear.simple_gla import SimpleGLA, SimpleGLAInputs

F64 = torch.float64
CHUNKS, HEADS, GROUPS, K, V = 2, 4, 2, 8, 5
LIMITS = {F64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Text:
    """Tokens as the definitions read them, ``[M, H or G, C, ...]``: gates per channel, or per head repeated."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def text(
    num_tokens: int,
    slowest: float = 0.0,
    fastest: float = 0.1,
    seed: int = 0,
    strength: float = 1.0,
    sizes: tuple[int, int] = (K, V),
) -> Text:
    """Gates between ``-slowest`` and ``-fastest``, betas below ``strength``; ``sizes`` of keys and values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(CHUNKS, *shape, generator=generator, dtype=F64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(CHUNKS, *shape, generator=generator, dtype=F64)

    key, value = sizes
    k = torch.nn.functional.normalize(normal(HEADS, num_tokens, key), dim=-1)
    g = -slowest - (fastest - slowest) * uniform(HEADS, num_tokens, key)
    q, v = normal(HEADS, num_tokens, key), normal(HEADS, num_tokens, value)
    return Text(q, k, v, g, strength * uniform(HEADS, num_tokens))


def gla_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """``S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T``."""
    outputs = []
    for t in range(x.q.shape[2]):
        state = torch.diag_embed(x.g[:, :, t].exp()) @ state + _outer(x.k[:, :, t], x.v[:, :, t])
        outputs.append(_read(x.q[:, :, t], state))
    return torch.stack(outputs, dim=2), state


def kda_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """``S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T``."""
    outputs = []
    for t in range(x.q.shape[2]):
        k, beta = x.k[:, :, t], x.beta[:, :, t, None, None]
        transition = (torch.eye(k.shape[-1], dtype=F64) - beta * _outer(k, k)) @ torch.diag_embed(x.g[:, :, t].exp())
        state = transition @ state + beta * _outer(k, x.v[:, :, t])
        outputs.append(_read(x.q[:, :, t], state))
    return torch.stack(outputs, dim=2), state


def delta_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """``S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T``, one gate a head."""
    outputs = []
    for t in range(x.q.shape[2]):
        k, beta = x.k[:, :, t], x.beta[:, :, t, None, None]
        transition = x.g[:, :, t, :1, None].exp() * (torch.eye(k.shape[-1], dtype=F64) - beta * _outer(k, k))
        state = transition @ state + beta * _outer(k, x.v[:, :, t])
        outputs.append(_read(x.q[:, :, t], state))
    return torch.stack(outputs, dim=2), state


def delta_net_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a gate."""
    return delta_by_token(replace(x, g=torch.zeros_like(x.g)), state)


def decay_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """``S_t = exp(g_t) S_{t-1} + k_t v_t^T``, one gate a head."""
    return gla_by_token(replace(x, g=x.g[..., :1].expand_as(x.g)), state)


def retnet_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """``S_t = gamma S_{t-1} + k_t v_t^T`` with ``gamma = 1 - 2^(-5 - h)``, in the words of its paper."""
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=F64))
    outputs = []
    for t in range(x.q.shape[2]):
        state = gamma[:, None, None] * state + _outer(x.k[:, :, t], x.v[:, :, t])
        outputs.append(_read(x.q[:, :, t], state))
    return torch.stack(outputs, dim=2), state


def mamba2_by_token(x: Text, state: Tensor) -> tuple[Tensor, Tensor]:
    """``h_t = exp(dt A) h_{t-1} + (dt u) B^T``, ``y_t = h_t C``, per head, with ``h [P, N]`` and B, C of its group."""
    outputs, h = torch.empty_like(x.v), state.mT.clone()
    for t in range(x.q.shape[2]):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            b, c, decay = x.k[:, group, t], x.q[:, group, t], x.g[:, head, t, 0].exp()
            h[:, head] = decay[:, None, None] * h[:, head] + x.v[:, head, t, :, None] * b[:, None, :]
            outputs[:, head, t] = (h[:, head] * c[:, None, :]).sum(-1)
    return outputs, h.mT


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def _read(q: Tensor, state: Tensor) -> Tensor:
    return (q[..., None, :] @ state)[..., 0, :]


FAMILIES: dict[str, tuple[Any, Callable[[Text], Any], Callable[[Text, Tensor], tuple[Tensor, Tensor]]]] = {
    "gla": (GLA(), lambda x: GLAInputs(x.q, x.k, x.v, x.g), gla_by_token),
    "kda": (KDA(), lambda x: KDAInputs(x.q, x.k, x.v, x.g, x.beta), kda_by_token),
    "mamba2": (
        Mamba2(),
        lambda x: Mamba2Inputs(x.q[:, :GROUPS], x.k[:, :GROUPS], x.v, x.g[..., 0]),
        mamba2_by_token,
    ),
    "delta": (GatedDelta(), lambda x: DeltaInputs(x.q, x.k, x.v, x.g[..., 0], x.beta), delta_by_token),
    "delta_net": (DeltaNet(), lambda x: DeltaNetInputs(x.q, x.k, x.v, x.beta), delta_net_by_token),
    "lightning": (Lightning(), lambda x: DecayInputs(x.q, x.k, x.v, x.g[..., 0]), decay_by_token),
    "simple_gla": (SimpleGLA(), lambda x: SimpleGLAInputs(x.q, x.k, x.v, x.g[..., 0]), decay_by_token),
    "retnet": (
        RetNet(),
        lambda x: RetNetInputs(x.q, x.k, x.v, retention_gates(HEADS)[:, None].expand(x.q.shape[:-1])),
        retnet_by_token,
    ),
}
CORRECTED = ("delta", "delta_net", "kda")


def as_dtype(x: Any, dtype: torch.dtype) -> Any:
    return type(x)(**{field.name: getattr(x, field.name).to(dtype) for field in fields(x)})


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def state_of(seed: int = 7) -> Tensor:
    return torch.randn(CHUNKS, HEADS, K, V, generator=torch.Generator().manual_seed(seed), dtype=F64)

"""What ``run`` means: plain torch, any device and floating type, differentiable; chunk after chunk of each row.

Within a chunk, with ``D_ij = exp(g_{j+1} + ... + g_i)`` for ``j <= i``, outputs are ``e^(G_i) S^T q_i`` and what tokens
up to i give, ``sum_j D_ij (q_i . k_j) v_j``; the state goes on as ``e^(G_C) S + sum_j D_Cj k_j v_j^T``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.rows import CHUNK, Rows


def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rows: Rows, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs ``[n, Hv, V]`` in the order of rows, final states and decays; arguments as in ``hypic_kernels.decay``."""
    is_wide = any(tensor.dtype == torch.float64 for tensor in (q, k, v, g, initial))
    dtype, tokens, group = torch.float64 if is_wide else torch.float32, rows.tokens.long(), v.shape[1] // k.shape[1]
    q, k, v, g = (tensor[tokens].to(dtype).transpose(0, 1) for tensor in (q, k, v, g))
    q, k = (tensor.repeat_interleave(group, 0) for tensor in (q, k))
    bounds, outputs, final, decays = rows.cu_seqlens.tolist(), [], [], []
    for row, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = initial[row].to(dtype)
        for start in range(first, end, CHUNK):
            here = slice(start, min(start + CHUNK, end))
            found, state = _chunk(q[:, here], k[:, here], v[:, here], g[:, here], state)
            outputs.append(found.transpose(0, 1))
        final.append(state)
        decays.append(g[:, first:end].sum(-1).exp())
    return torch.cat(outputs), torch.stack(final), torch.stack(decays)


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``[H, C, V]`` and the state after the chunk."""
    size = g.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    decay = torch.where(below.mT, 0.0, torch.where(below, g[..., :, None], 0.0).cumsum(-2).exp())
    growth, total = g.cumsum(-1).exp()[..., None], g.sum(-1).exp()[..., None, None]
    outputs = growth * (q @ state) + ((q @ k.mT) * decay) @ v
    return outputs, total * state + k.mT @ (decay[..., -1, :, None] * v)

"""Outputs of chunks by fla's kernel, launched as our own are: fla's way to it costs the host several launches.

fla wraps the kernel in an autotuner, which has one layout left here (``chunked.pin``), and in rules for some of its
constants, which do not change between calls of ours. Where a kernel has other parameters than those that were read
(fla 0.6), fla's own call is taken. The check of rows (``check.RunVariant``) runs whichever is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic_kernels.rows import CHUNK, Rows

ARGUMENTS = ("q", "k", "v", "h", "g", "g_gamma", "o", "cu_seqlens", "chunk_indices", "scale", "T")
CONSTANTS = ("H", "HV", "K", "V", "BT", "BK", "BV", "USE_G", "USE_G_GAMMA", "STATE_V_FIRST", "IS_VARLEN")


class Plain(NamedTuple):
    """A kernel without what fla puts around it, and the layout that it is left."""

    kernel: Any
    blocks: Mapping[str, int]
    num_warps: int
    num_stages: int


def plain_of(wrapped: Any) -> Plain | None:
    """Of fla's ``chunk_fwd_kernel_o``; ``None`` if it is not built as the one that was read."""
    tuner = getattr(wrapped, "fn", None)
    kernel, configs = getattr(tuner, "fn", None), list(getattr(tuner, "configs", ()))
    if tuple(getattr(kernel, "arg_names", ())) != ARGUMENTS + CONSTANTS or len(configs) != 1:
        return None
    config = configs[0]
    extra = config.pre_hook, getattr(config, "maxnreg", None), getattr(config, "ir_override", None)
    if set(config.kwargs) != {"BK", "BV"} or config.num_ctas != 1 or extra != (None, None, None):
        return None
    return Plain(kernel, config.kwargs, config.num_warps, config.num_stages)


def outputs(
    plain: Plain, q: Tensor, k: Tensor, v: Tensor, g: Tensor, states: Tensor, rows: Rows, scale: float
) -> Tensor:
    """``[1, n, Hv, V]`` of ``q, k [1, n, Hk, K]``, corrected values ``v [1, n, Hv, V]``, running sums ``g [1, n, Hv]``
    and states before chunks ``[1, M, Hv, K, V]``; all contiguous."""
    from hypic_kernels.launch import Launch

    (_, size, key_heads, key_dim), (num_heads, value_dim) = q.shape, v.shape[2:]
    out = torch.empty_like(v)
    arguments = (q, k, v, states, g, None, out, rows.cu_seqlens, rows.chunk_indices, scale, size)
    constants = {
        "H": key_heads, "HV": num_heads, "K": key_dim, "V": value_dim, "BT": CHUNK, **plain.blocks, "USE_G": True,
        "USE_G_GAMMA": False, "STATE_V_FIRST": False, "IS_VARLEN": True,
    }  # fmt: skip
    grid = (-(-value_dim // plain.blocks["BV"]) * rows.chunk_indices.shape[0], num_heads)
    Launch(plain.kernel, grid, arguments, constants, plain.num_warps, plain.num_stages).run()
    return out

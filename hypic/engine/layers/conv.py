"""The short causal convolution before linear attention: depthwise, over raw inputs, with history from the chain."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hypic.engine.batch import Batch
from hypic.engine.kernel_plan import KernelPlan
from hypic.engine.pool import Pool
from hypic_kernels import conv


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Valid depthwise convolution: ``x [B, L + W - 1, C]``, ``weight [C, 1, W]``, ``bias [C]`` -> ``[B, L, C]``."""
    return F.conv1d(x.mT, weight, bias, groups=weight.shape[0]).mT


def convolve_rows(
    x: Tensor, weight: Tensor, batch: Batch, pool: Pool, layer: int, bias: Tensor | None = None
) -> Tensor:
    """``x [N, C]`` -> ``[N, C]``: every row behind the inputs that precede it; writes the tails asked for."""
    if batch.kernels is not None:
        return convolve_planned(x, weight, batch.kernels, pool, layer, bias=bias)
    plan, width = batch.conv, weight.shape[-1]
    assert plan is not None, "a step without kernels has a plan of its convolutions"
    tails = pool.tails[layer].index_select(0, plan.tail_slots).view(-1, x.shape[-1])
    table = torch.cat([x, tails, x.new_zeros(1, x.shape[-1])])
    written = table.index_select(0, plan.write_sources.view(-1))
    pool.tails[layer].index_copy_(0, plan.write_slots, written.view(-1, width - 1, x.shape[-1]))
    packed = causal_conv(table.index_select(0, plan.sources)[None], weight, bias)[0]
    return packed.index_select(0, plan.outputs)


def convolve_planned(
    x: Tensor,
    weight: Tensor,
    plan: KernelPlan,
    pool: Pool,
    layer: int,
    *,
    bias: Tensor | None = None,
    has_silu: bool = False,
) -> Tensor:
    """The same by kernel, with the activation behind it if there is one."""
    return conv.convolve(
        x,
        pool.tails[layer],
        plan.conv_sources,
        weight.select(1, 0),
        bias=bias,
        has_silu=has_silu,
        write_sources=plan.conv_write_sources,
        write_slots=plan.conv_write_slots,
    )

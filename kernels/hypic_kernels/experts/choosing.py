"""Which experts a token goes to: ``route`` and ``route_groups``, each a kernel or its reference."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hypic_kernels.experts import reference
from hypic_kernels.experts.backend import Backend, ExpertsError, takes_kernel
from hypic_kernels.experts.check import GroupsVariant, Variant

MOST_EXPERTS = 1024
# Each is made once: all layers of a kind ask with the same.
_variant = functools.cache(Variant)


def route(logits: Tensor, top_k: int, *, renormalise: bool = True, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The ``top_k`` best of a softmax over ``logits [N, E]``: weights ``[N, k]`` float32 (float64 if ``logits`` are),
    divided by their sum with ``renormalise``, and experts ``[N, k]`` int32, best first, the lower number in a tie.

    Weights of a row with NaN are NaN; its experts are any, each once.

    Raises:
        ExpertsError: more experts are wanted than there are, or there are too many.
    """
    if logits.ndim != 2 or not 0 < top_k <= logits.shape[1] <= MOST_EXPERTS:
        raise ExpertsError(f"{top_k} of logits {list(logits.shape)} cannot be chosen; up to {MOST_EXPERTS} experts.")
    if not takes_kernel(backend, (logits,), _variant(logits.device, logits.dtype, top_k)):
        return reference.route(logits, top_k, renormalise)
    from hypic_kernels.experts import triton as kernel

    weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((logits.shape[0], top_k), dtype=torch.int32, device=logits.device)
    kernel.route(logits.contiguous(), weights, chosen, renormalise).run()
    return weights, chosen


def route_groups(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    renormalise: bool = True,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` best of ``sigmoid(logits) + bias`` within the best groups (DeepSeek-V3, arXiv 2412.19437).

    ``logits [N, E]``, experts in ``num_groups`` equal groups, one after the other; a group is worth the sum of its two
    best, and ``top_groups`` of them are chosen from. Weights ``[N, k]``, float32 (float64 for such logits), are scores
    without the ``bias [E]``, divided by their sum plus 1e-20 with ``renormalise``, times ``scale``; experts ``[N, k]``
    int32, best first, the lower number in a tie. Weights of a row with NaN are NaN; its experts are any, each once.

    Raises:
        ExpertsError: the groups are no equal parts, hold too few experts, or there are too many.
    """
    _check_groups(logits, top_k, bias, num_groups, top_groups)
    variant = GroupsVariant.of(logits, bias, top_k, num_groups, top_groups)
    if not takes_kernel(backend, (logits,) if bias is None else (logits, bias), variant):
        return reference.route_groups(logits, bias, top_k, num_groups, top_groups, scale, renormalise)
    from hypic_kernels.experts import routing as kernel

    weights = torch.empty((logits.shape[0], top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((logits.shape[0], top_k), dtype=torch.int32, device=logits.device)
    how = (num_groups, top_groups, scale, renormalise)
    kernel.route_groups(logits.contiguous(), bias, *how, weights, chosen).run()
    return weights, chosen


def _check_groups(logits: Tensor, top_k: int, bias: Tensor | None, num_groups: int, top_groups: int) -> None:
    num_experts = logits.shape[-1]
    if logits.ndim != 2 or not 0 < num_experts <= MOST_EXPERTS or num_experts % num_groups:
        about = f"logits {list(logits.shape)} cannot be {num_groups} equal groups"
        raise ExpertsError(f"{about} of together up to {MOST_EXPERTS} experts.")
    size = num_experts // num_groups
    if (num_groups > 1 and size < 2) or not 0 < top_groups <= num_groups or not 0 < top_k <= size * top_groups:
        raise ExpertsError(f"{top_k} experts cannot be chosen from {top_groups} of {num_groups} groups of {size}.")
    if bias is not None and (tuple(bias.shape) != (num_experts,) or not bias.is_contiguous()):
        raise ExpertsError(f"bias has shape {list(bias.shape)}; it must be contiguous {[num_experts]}.")

"""What stands around the products of a mixture of experts: choosing, sorting rows by expert, and adding up again.

``route`` takes the best of a softmax, ``scatter`` copies every token to the rows of its experts, sorted by expert and
without a sort, ``combine`` adds the experts' rows and a gated shared expert. The products themselves are torch's
grouped ones. Every index stays on the device and every shape follows from the arguments' shapes, so a captured graph
can be replayed. The definition is ``reference.py``, notes on the kernels in README.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.experts import reference
from hypic_kernels.experts.check import Variant
from hypic_kernels.trust import is_trusted

__all__ = ["Backend", "ExpertsError", "Scattered", "combine", "route", "scatter"]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)
MOST_EXPERTS = 1024


class ExpertsError(ValueError):
    """Tensors that do not fit each other."""


class Scattered(NamedTuple):
    """``rows [N k, D]`` sorted by expert, ``places [N, k]`` of each token's rows in it, ``ends [E]`` of each expert's
    rows; both int32."""

    rows: Tensor
    places: Tensor
    ends: Tensor


def route(logits: Tensor, top_k: int, *, renormalise: bool = True, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The ``top_k`` best of a softmax over ``logits [N, E]``: weights ``[N, k]`` float32 (float64 if ``logits`` are),
    divided by their sum with ``renormalise``, and experts ``[N, k]`` int32, best first, the lower number in a tie.

    Weights of a row with NaN are NaN; its experts are any, each once.

    Raises:
        ExpertsError: more experts are wanted than there are, or there are too many.
    """
    if logits.ndim != 2 or not 0 < top_k <= logits.shape[1] <= MOST_EXPERTS:
        raise ExpertsError(f"{top_k} of logits {list(logits.shape)} cannot be chosen; up to {MOST_EXPERTS} experts.")
    if not _takes_kernel(backend, (logits,), Variant(logits.device, logits.dtype, top_k)):
        return reference.route(logits, top_k, renormalise)
    from hypic_kernels.experts import triton as kernel

    weights = torch.empty((len(logits), top_k), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((len(logits), top_k), dtype=torch.int32, device=logits.device)
    kernel.route(logits.contiguous(), weights, chosen, renormalise).run()
    return weights, chosen


def scatter(x: Tensor, chosen: Tensor, num_experts: int, *, backend: Backend = "auto") -> Scattered:
    """Every token ``x [N, D]`` to a row for each of its experts, ``chosen [N, k]`` int32, each below ``num_experts``.

    In which order an expert's rows stand is not said: products of rows do not depend on it.

    Raises:
        ExpertsError: shapes or types do not fit.
    """
    if chosen.ndim != 2 or len(chosen) != len(x) or chosen.dtype != torch.int32 or x.stride(-1) != 1:
        about = f"{list(chosen.shape)} {chosen.dtype}"
        raise ExpertsError(f"chosen is {about}; it must be int32, with a row for each of the rows of {list(x.shape)}.")
    if not _takes_kernel(backend, (x,), Variant(x.device, x.dtype, chosen.shape[1])):
        return Scattered(*reference.scatter(x, chosen, num_experts))
    from hypic_kernels.experts import triton as kernel

    rows = torch.empty((chosen.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    places = torch.empty_like(chosen, memory_format=torch.contiguous_format)
    # Ends and counts are one tensor, so that one launch clears both.
    both = torch.zeros((2, num_experts), dtype=torch.int32, device=x.device)
    for launch in kernel.scatter(x, chosen.contiguous(), rows, places, both[0], both[1]):
        launch.run()
    return Scattered(rows, places, both[1])


def combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    *,
    shared: Tensor | None = None,
    x: Tensor | None = None,
    gate: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``out[n] = sum_j weights[n, j] rows[places[n, j]] + sigmoid(x[n] . gate) shared[n]``: ``[N, D]``, as ``rows``.

    ``weights [N, k]``; ``shared [N, D]`` or none; ``gate [D']`` with ``x [N, D']``, or none, and then the shared
    expert counts whole. Sums are float32.

    Raises:
        ExpertsError: shapes do not fit, or a gate is given without inputs or without a shared expert.
    """
    _check_combine(rows, places, weights, shared, x, gate)
    tensors = tuple(tensor for tensor in (rows, shared, x, gate) if tensor is not None)
    if not _takes_kernel(backend, tensors, Variant(rows.device, rows.dtype, places.shape[1])):
        return reference.combine(rows, places, weights, shared, x, gate)
    from hypic_kernels.experts import triton as kernel

    out = torch.empty((len(places), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    kernel.combine(rows, places, weights.contiguous(), shared, x, gate, out).run()
    return out


def _check_combine(
    rows: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None, x: Tensor | None, gate: Tensor | None
) -> None:
    num_tokens, width = len(places), rows.shape[1]
    if places.shape != weights.shape or places.numel() != len(rows) or places.dtype != torch.int32:
        raise ExpertsError(
            f"places {list(places.shape)} {places.dtype} and weights {list(weights.shape)} must be of one shape, int32 "
            f"places of all of {len(rows)} rows."
        )
    if shared is not None and tuple(shared.shape) != (num_tokens, width):
        raise ExpertsError(f"shared has shape {list(shared.shape)}; it must be {[num_tokens, width]}.")
    if gate is not None and (x is None or shared is None or tuple(x.shape) != (num_tokens, len(gate))):
        raise ExpertsError("a gate takes a shared expert and one row of inputs of its width a token.")


def _takes_kernel(backend: Backend, tensors: tuple[Tensor, ...], variant: Variant) -> bool:
    """Whether the kernel is asked for, or ``auto`` may mean it: CUDA, types that it reads, no gradient, and trusted."""
    if backend != "auto":
        return backend == "triton"
    if not tensors[0].is_cuda or not available() or interpreted():
        return False
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    is_readable = all(tensor.dtype in STORAGE and tensor.stride(-1) == 1 for tensor in tensors)
    return is_readable and not wants_gradient and is_trusted(variant)

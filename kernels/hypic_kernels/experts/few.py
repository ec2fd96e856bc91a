"""A whole layer of experts for few tokens: two launches, or one more where the router's scores are given as they are.

With so few tokens every expert has one row, and reading matrices is all the work: no order is needed, experts and the
shared expert are one product, and what comes back is added up where it is made. ``choose_few`` says how few; the
definition is ``reference.answer``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hypic_kernels.experts import reference
from hypic_kernels.experts.backend import Backend, ExpertsError, may_take_kernel
from hypic_kernels.experts.check import FewVariant
from hypic_kernels.experts.layout import Shared, choose_few, is_few
from hypic_kernels.trust import is_trusted

MOST_EXPERTS = 1024


class Chosen(NamedTuple):
    """``experts [N, k]`` int32 of tokens, and their ``weights [N, k]``."""

    weights: Tensor
    experts: Tensor


class Scores(NamedTuple):
    """``logits [N, E]``, of whose softmax the ``top_k`` best are chosen, as ``route`` does."""

    logits: Tensor
    top_k: int
    renormalise: bool


def takes_few(
    x: Tensor, into: Tensor, back: Tensor, top_k: int, *, shared: Shared | None = None, is_gated: bool = True
) -> bool:
    """Whether ``answer`` of ``x [N, D]`` is a kernel here; the first call for a type and widths checks it."""
    tensors = (into, back, *(() if shared is None else (each for each in shared if each is not None)))
    if not is_few(x.shape[0]) or into.shape[0] > MOST_EXPERTS or not may_take_kernel((x, *tensors)):
        return False
    if not all(each.is_contiguous() and each.dtype == x.dtype for each in tensors):
        return False
    return is_trusted(FewVariant.of(x, into, back, top_k, shared, is_gated))


def answer(
    x: Tensor,
    into: Tensor,
    back: Tensor,
    routed: Chosen | Scores,
    *,
    shared: Shared | None = None,
    residual: Tensor | None = None,
    is_gated: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """The weighted sum of the chosen experts and the shared one, ``[N, D]``, and ``residual [N, D]`` to it.

    ``x [N, D]``; ``into [E, 2 I, D]``, or ``[E, I, D]`` if not ``is_gated``; ``back [E, D, I]``. Sums are float32;
    rounded are what the second product reads and the answer, before the residual is added.

    Raises:
        ExpertsError: shapes or types do not fit.
    """
    top_k = routed.top_k if isinstance(routed, Scores) else routed.experts.shape[-1]
    _check(x, into, back, routed, shared, residual, is_gated)
    if backend == "triton" or (backend == "auto" and takes_few(x, into, back, top_k, shared=shared, is_gated=is_gated)):
        return _by_kernel(x, into, back, routed, shared, residual, is_gated)
    if isinstance(routed, Scores):
        routed = Chosen(*reference.route(routed.logits, top_k, routed.renormalise))
    return reference.answer(x, into, back, *routed, shared, residual, is_gated)


def _by_kernel(
    x: Tensor,
    into: Tensor,
    back: Tensor,
    routed: Chosen | Scores,
    shared: Shared | None,
    residual: Tensor | None,
    is_gated: bool,
) -> Tensor:
    from hypic_kernels.experts import pairs as kernel

    made = made_for(x, into, routed, shared, is_gated)
    first, second = choose_few(x.shape[0], x.dtype)
    logits, renormalise = (routed.logits, routed.renormalise) if isinstance(routed, Scores) else (None, False)
    kernel.into(x, logits, *made[:2], into, shared, "silu" if is_gated else "relu2", *made[2:], first).run()
    out = x.new_empty((x.shape[0], back.shape[1]))
    kernel.back(made.hidden, *made[:2], back, shared, made.factors, renormalise, residual, out, second).run()
    return out


class Made(NamedTuple):
    """What goes from the first launch to the second."""

    weights: Tensor
    experts: Tensor
    factors: Tensor
    hidden: Tensor


def made_for(x: Tensor, into: Tensor, routed: Chosen | Scores, shared: Shared | None, is_gated: bool) -> Made:
    """Room for it; of experts that are chosen already, weights and numbers as they are."""
    if isinstance(routed, Scores):
        weights = torch.empty((x.shape[0], routed.top_k), dtype=torch.float32, device=x.device)
        experts = torch.empty(weights.shape, dtype=torch.int32, device=x.device)
    else:
        weights, experts = routed.weights.contiguous(), routed.experts.contiguous()
    width = experts.shape[1] * (into.shape[1] // (2 if is_gated else 1)) + (0 if shared is None else shared.up.shape[0])
    factors = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    return Made(weights, experts, factors, x.new_empty((x.shape[0], width)))


def _check(
    x: Tensor,
    into: Tensor,
    back: Tensor,
    routed: Chosen | Scores,
    shared: Shared | None,
    residual: Tensor | None,
    is_gated: bool,
) -> None:
    num_experts, halves = into.shape[0], 2 if is_gated else 1
    shapes = f"x {list(x.shape)}, into {list(into.shape)} and back {list(back.shape)}"
    if x.ndim != 2 or x.stride(-1) != 1 or into.ndim != 3 or into.shape[2] != x.shape[1] or into.shape[1] % halves:
        raise ExpertsError(f"{shapes} must be [N, D], [E, {halves} I, D] and [E, D, I], rows of x without gaps.")
    if tuple(back.shape) != (num_experts, x.shape[1], into.shape[1] // halves):
        raise ExpertsError(f"{shapes} must be [N, D], [E, {halves} I, D] and [E, D, I].")
    if any(each.dtype != x.dtype for each in (into, back, *(() if residual is None else (residual,)))):
        raise ExpertsError(f"matrices and the residual must be of the type of the rows, {x.dtype}.")
    if residual is not None and residual.shape != x.shape:
        raise ExpertsError(f"residual has shape {list(residual.shape)}; it must be {list(x.shape)}.")
    _check_routed(x, num_experts, routed)
    if shared is not None:
        _check_shared(x, shared)


def _check_routed(x: Tensor, num_experts: int, routed: Chosen | Scores) -> None:
    if isinstance(routed, Scores):
        if tuple(routed.logits.shape) != (x.shape[0], num_experts) or not 0 < routed.top_k <= num_experts:
            about = f"{routed.top_k} of logits {list(routed.logits.shape)}"
            raise ExpertsError(f"{about} cannot be chosen for {x.shape[0]} tokens of {num_experts} experts.")
        if num_experts > MOST_EXPERTS:
            raise ExpertsError(f"{num_experts} experts cannot be chosen from; up to {MOST_EXPERTS}.")
    elif routed.weights.shape != routed.experts.shape or routed.experts.ndim != 2 or len(routed.experts) != x.shape[0]:
        about = f"weights {list(routed.weights.shape)} and experts {list(routed.experts.shape)}"
        raise ExpertsError(f"{about} must be [N, k] of {x.shape[0]} tokens.")
    elif routed.experts.dtype != torch.int32:
        raise ExpertsError(f"experts are {routed.experts.dtype}; they must be int32.")


def _check_shared(x: Tensor, shared: Shared) -> None:
    width, inner = x.shape[1], shared.up.shape[0]
    wanted = [[inner, width], [inner, width], [width, inner], [width]]
    found = [each for each in shared if each is not None]
    if [list(each.shape) for each in found] != wanted[: len(found)]:
        raise ExpertsError(f"the shared expert is {[list(each.shape) for each in found]}; it must be {wanted}.")
    if any(each.dtype != x.dtype for each in found):
        raise ExpertsError(f"the shared expert must be of the type of the rows, {x.dtype}.")

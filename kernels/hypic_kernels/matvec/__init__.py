"""``matvec``: products of few tokens with one matrix, where reading the matrix is all the work.

``product`` is ``x @ weight.T``; ``normed_product`` adds a residual, norms the sum and multiplies that, in one launch.
Libraries' products are made of tiles for many rows, and at one row some of them read at a third of what memory gives;
``layout.py`` says for which sizes these here are taken. The definitions are ``reference.py``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.matvec import reference
from hypic_kernels.matvec.check import NormedVariant, ProductVariant
from hypic_kernels.matvec.layout import MOST_NORMED_WIDTH, NORMED, PRODUCTS, choose, choose_normed, widest
from hypic_kernels.trust import is_trusted

__all__ = ["Backend", "MatvecError", "Normed", "normed_product", "product", "takes_normed", "takes_product"]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


class MatvecError(ValueError):
    """Tensors that do not fit each other."""


class Normed(NamedTuple):
    """``product [N, M]`` of ``normed [N, K]``, the norm of ``total [N, K]``."""

    product: Tensor
    normed: Tensor
    total: Tensor


def takes_product(x: Tensor, weight: Tensor) -> bool:
    """Whether ``product`` is a kernel here, and the better way; the first call for a size checks it."""
    sizes = choose(x.shape[0], weight.shape, x.dtype)
    if sizes is None or not _may_take_kernel(x, weight):
        return False
    return is_trusted(ProductVariant(x.device, x.dtype, weight.shape[1], sizes))


def product(x: Tensor, weight: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``x @ weight.T``, ``[N, M]``: ``x [N, K]``, rows of any pitch, ``weight [M, K]``; sums are float32, rounded once.

    Raises:
        MatvecError: shapes or types do not fit.
    """
    _check(x, weight)
    if not (backend == "triton" or (backend == "auto" and takes_product(x, weight))):
        return reference.product(x, weight)
    from hypic_kernels.matvec import triton as kernel

    out = x.new_empty((x.shape[0], weight.shape[0]))
    kernel.product(x, weight, out, choose(x.shape[0], weight.shape, x.dtype) or widest(PRODUCTS, x.dtype)).run()
    return out


def takes_normed(x: Tensor, norm_weight: Tensor, weight: Tensor, *, adds: bool, is_zero_centred: bool) -> bool:
    """Whether ``normed_product`` is a kernel here, and the better way; the first call for a size checks it."""
    sizes = choose_normed(x.shape[0], weight.shape, x.dtype)
    if sizes is None or norm_weight.dtype not in STORAGE or not _may_take_kernel(x, weight):
        return False
    return is_trusted(
        NormedVariant(x.device, x.dtype, norm_weight.dtype, weight.shape[1], adds, is_zero_centred, sizes)
    )


def normed_product(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    weight: Tensor,
    *,
    eps: float,
    is_zero_centred: bool = False,
    backend: Backend = "auto",
) -> Normed:
    """``normed @ weight.T`` with ``total = x + residual`` and its norm as in ``pointwise.add_rms_norm``, and both.

    ``x, residual [N, K]``, rows of any pitch; ``norm_weight [K]``; ``weight [M, K]``. ``total`` and ``normed`` are
    rounded to the type of ``x`` before they are used; without a residual ``total`` is ``x`` itself.

    Raises:
        MatvecError: shapes or types do not fit.
    """
    _check(x, weight)
    if tuple(norm_weight.shape) != tuple(x.shape[1:]) or not norm_weight.is_contiguous():
        raise MatvecError(f"norm_weight is {list(norm_weight.shape)}; it must be contiguous {list(x.shape[1:])}.")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(-1) != 1):
        raise MatvecError(f"residual is {residual.dtype} {list(residual.shape)}; it must be as x, {list(x.shape)}.")
    if not _takes_normed(backend, x, residual is not None, norm_weight, weight, is_zero_centred):
        return Normed(*reference.normed_product(x, residual, norm_weight, weight, eps, is_zero_centred))
    from hypic_kernels.matvec import triton as kernel

    made = x.new_empty((x.shape[0], weight.shape[0])), torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(made[1])
    sizes = choose_normed(x.shape[0], weight.shape, x.dtype) or widest(NORMED, x.dtype)
    kernel.normed_product(x, residual, norm_weight, weight, eps, is_zero_centred, *made, total, sizes).run()
    return Normed(*made, total)


def _takes_normed(
    backend: Backend, x: Tensor, adds: bool, norm_weight: Tensor, weight: Tensor, is_zero_centred: bool
) -> bool:
    if backend == "triton":
        if x.shape[1] > MOST_NORMED_WIDTH:
            raise MatvecError(f"rows of {x.shape[1]} numbers are too wide; up to {MOST_NORMED_WIDTH}.")
        return True
    return backend == "auto" and takes_normed(x, norm_weight, weight, adds=adds, is_zero_centred=is_zero_centred)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
        raise MatvecError(f"x {list(x.shape)} and weight {list(weight.shape)} must be [N, K] and contiguous [M, K].")
    if weight.dtype != x.dtype or x.stride(-1) != 1:
        raise MatvecError(f"weight {weight.dtype} and x {x.dtype} must be of one type, rows without gaps.")


def _may_take_kernel(x: Tensor, weight: Tensor) -> bool:
    """CUDA, one type that kernels read, no gradient."""
    if not x.is_cuda or not available() or interpreted() or torch.is_grad_enabled():
        return False
    return x.dtype in STORAGE and weight.dtype == x.dtype and x.stride(-1) == 1 and weight.is_contiguous()

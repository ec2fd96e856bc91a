"""A mixture of experts: choosing, sorting rows by expert, products of few rows with many matrices, and adding up.

``route`` takes the best of a softmax, ``route_groups`` of sigmoid scores within the best groups, ``order`` says which
rows an expert has, ``scatter`` copies them there, ``combine`` adds the experts' rows and a gated shared expert.
``gate_up`` and ``down`` are the products of few rows with experts' matrices; of many (see ``fits``), torch's grouped
ones are faster. Every index stays on the device and every shape follows from the arguments' shapes, so a captured graph
can be replayed. The definition is ``reference.py``, notes on the kernels in README.md.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hypic_kernels import available
from hypic_kernels.experts import reference
from hypic_kernels.experts.backend import Backend, ExpertsError, may_take_kernel, takes_kernel
from hypic_kernels.experts.check import OrderVariant, ProductVariant, Variant
from hypic_kernels.experts.choosing import route, route_groups
from hypic_kernels.experts.layout import LARGE, LARGE_BYTES, Kind, Layout, choose, fits, is_many, layouts
from hypic_kernels.trust import is_trusted

__all__ = [
    "Backend", "ExpertsError", "Layout", "Ordered", "Scattered", "choose", "combine", "down", "fits", "gate_up",
    "multiplies", "multiplies_many", "order", "route", "route_groups", "scatter",
]  # fmt: skip


class Scattered(NamedTuple):
    """``rows [N k, D]`` sorted by expert, ``places [N, k]`` of each token's rows in it, ``ends [E]`` of each expert's
    rows; both int32."""

    rows: Tensor
    places: Tensor
    ends: Tensor


class Ordered(NamedTuple):
    """``tokens [N k]`` of the rows sorted by expert, ``places [N, k]`` of each token's rows among them, ``ends [E]`` of
    each expert's rows; all int32."""

    tokens: Tensor
    places: Tensor
    ends: Tensor


def scatter(x: Tensor, chosen: Tensor, num_experts: int, *, backend: Backend = "auto") -> Scattered:
    """Every token ``x [N, D]`` to a row for each of its experts, ``chosen [N, k]`` int32, each below ``num_experts``.

    In which order an expert's rows stand is not said: products of rows do not depend on it.

    Raises:
        ExpertsError: shapes or types do not fit.
    """
    if chosen.ndim != 2 or chosen.shape[0] != x.shape[0] or chosen.dtype != torch.int32 or x.stride(-1) != 1:
        about = f"{list(chosen.shape)} {chosen.dtype}"
        raise ExpertsError(f"chosen is {about}; it must be int32, with a row for each of the rows of {list(x.shape)}.")
    if not takes_kernel(backend, (x,), Variant(x.device, x.dtype, chosen.shape[1])):
        return Scattered(*reference.scatter(x, chosen, num_experts))
    from hypic_kernels.experts import triton as kernel

    rows = torch.empty((chosen.numel(), x.shape[1]), dtype=x.dtype, device=x.device)
    places = torch.empty_like(chosen, memory_format=torch.contiguous_format)
    # Ends and counts are one tensor, so that one launch clears both.
    counts, ends = torch.zeros((2, num_experts), dtype=torch.int32, device=x.device).unbind(0)
    for launch in kernel.scatter(x, chosen.contiguous(), rows, places, counts, ends):
        launch.run()
    return Scattered(rows, places, ends)


def order(chosen: Tensor, num_experts: int, *, backend: Backend = "auto") -> Ordered:
    """As ``scatter``, with the numbers of tokens in the place of copies of them.

    ``chosen [N, k]`` int32, each below ``num_experts``. One launch for up to some thousands of rows.

    Raises:
        ExpertsError: shapes or types do not fit.
    """
    if chosen.ndim != 2 or chosen.dtype != torch.int32 or not chosen.is_contiguous():
        raise ExpertsError(f"chosen {list(chosen.shape)} {chosen.dtype} must be int32 [N, k], and contiguous.")
    if not takes_kernel(backend, (chosen,), OrderVariant(chosen.device, chosen.shape[1])):
        return Ordered(*reference.order(chosen, num_experts))
    from hypic_kernels.experts import triton as kernel

    tokens, places = chosen.new_empty(chosen.numel()), chosen.new_empty(chosen.shape)
    ends = chosen.new_empty(num_experts)
    for launch in kernel.order(chosen, tokens, places, ends):
        launch.run()
    return Ordered(tokens, places, ends)


def gate_up(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    *,
    tokens: Tensor | None = None,
    is_gated: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """``silu(gate) * up [R, I]`` of rows sorted by expert, ``gate`` and ``up`` the halves of ``x @ weight[expert].T``.

    ``x [R, K]``, or ``[N, K]`` and row ``r`` is ``x[tokens[r]]``, int32; ``weight [E, 2 I, K]``; rows of expert ``e``
    end before ``ends[e]``, ``[E]`` int32. Not ``is_gated``: ``relu(x @ weight[expert].T)^2`` with ``weight [E, I, K]``.
    Sums are float32, rounded once. Rows behind the last end are undefined.

    Raises:
        ExpertsError: shapes or types do not fit.
    """
    _check_product(x, weight, ends, tokens)
    if is_gated and weight.shape[1] % 2:
        raise ExpertsError(f"weight has shape {list(weight.shape)}; gate and up must be halves of it.")
    layout = _layout(backend, x, weight, tokens, "silu" if is_gated else "relu2")
    if layout is None:
        return reference.gate_up(x, weight, ends, tokens, is_gated)
    return _product(x, weight, ends, tokens, "silu" if is_gated else "relu2", layout)


def down(rows: Tensor, weight: Tensor, ends: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``rows[r] @ weight[expert].T``, ``[R, D]``: ``rows [R, I]``, ``weight [E, D, I]``, otherwise as ``gate_up``.

    Raises:
        ExpertsError: shapes or types do not fit.
    """
    _check_product(rows, weight, ends, None)
    layout = _layout(backend, rows, weight, None, "none")
    return reference.down(rows, weight, ends) if layout is None else _product(rows, weight, ends, None, "none", layout)


def multiplies(x: Tensor, up_weight: Tensor, down_weight: Tensor, *, is_gated: bool = True) -> bool:
    """Whether ``gate_up`` with tokens and ``down`` are kernels here, for any number of rows.

    The first call for a type and a width compiles and checks them all.
    """
    if not may_take_kernel((x, up_weight, down_weight)) or not _are_readable(x, up_weight, down_weight):
        return False
    widths = (up_weight.shape[-1], down_weight.shape[-1])
    return _all_trusted(x.device, x.dtype, widths, "silu" if is_gated else "relu2")


def multiplies_many(rows: Tensor, down_weight: Tensor) -> bool:
    """Whether ``down`` of so many rows is a kernel here that torch's grouped product does not beat."""
    if not is_many(rows.shape[0], down_weight.shape[0], "none", rows.dtype, _room(rows.device)):
        return False
    return may_take_kernel((rows, down_weight)) and _layout("auto", rows, down_weight, None, "none") is not None


@functools.cache
def _room(device: torch.device) -> int:
    """Shared memory that a program may take; 0 where that is not known."""
    if device.type != "cuda" or not available():
        return 0
    from hypic_kernels.launch import SHARED_BYTES

    major, minor = torch.cuda.get_device_capability(device)
    return SHARED_BYTES.get(10 * major + minor, 0)


@functools.cache
def _all_trusted(device: torch.device, dtype: torch.dtype, widths: tuple[int, int], kind: Kind) -> bool:
    into = [(kind, True, widths[0], each) for each in layouts(kind, dtype)]
    back: list[tuple[Kind, bool, int, Layout]] = [("none", False, widths[1], each) for each in layouts("none", dtype)]
    products = [_product_variant(device, dtype, *each) for each in [*into, *back]]
    if dtype.itemsize == 2 and _room(device) >= LARGE_BYTES:
        is_trusted(_product_variant(device, dtype, "none", False, widths[1], LARGE))  # what it says is asked later
    return all(map(is_trusted, products))


def _product_variant(
    device: torch.device, dtype: torch.dtype, kind: Kind, is_indexed: bool, width: int, layout: Layout
) -> ProductVariant:
    return ProductVariant(device, dtype, kind, is_indexed, width % layout.config.block_k, layout)


def _layout(backend: Backend, x: Tensor, weight: Tensor, tokens: Tensor | None, kind: Kind) -> Layout | None:
    """How the kernel is laid out; ``None`` where the reference is taken."""
    layout = choose(x.shape[0] if tokens is None else tokens.shape[0], weight.shape[0], kind, x.dtype, _room(x.device))
    variant = _product_variant(x.device, x.dtype, kind, tokens is not None, x.shape[1], layout)
    is_kernel = _are_readable(x, weight) and takes_kernel(backend, (x, weight), variant)
    return layout if is_kernel else None


def _are_readable(x: Tensor, *weights: Tensor) -> bool:
    """Matrices of the rows' type that lie as a whole."""
    return all(weight.is_contiguous() and weight.dtype == x.dtype for weight in weights)


def _product(x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None, kind: Kind, layout: Layout) -> Tensor:
    from hypic_kernels.experts import products

    num_columns = weight.shape[1] // 2 if kind == "silu" else weight.shape[1]
    out = x.new_empty((x.shape[0] if tokens is None else tokens.shape[0], num_columns))
    products.multiply(x, weight, ends, tokens, kind, out, layout).run()
    return out


def _check_product(x: Tensor, weight: Tensor, ends: Tensor, tokens: Tensor | None) -> None:
    shapes = f"rows {list(x.shape)}, weight {list(weight.shape)} and ends {list(ends.shape)}"
    if x.ndim != 2 or weight.ndim != 3 or weight.shape[-1] != x.shape[1] or ends.shape != weight.shape[:1]:
        raise ExpertsError(f"{shapes} must be [R, K], [E, N, K] and [E].")
    if weight.dtype != x.dtype or x.stride(-1) != 1:
        raise ExpertsError(f"weight {weight.dtype} and rows {x.dtype} must be of one type, rows without gaps.")
    for name, numbers in {"ends": ends, **({} if tokens is None else {"tokens": tokens})}.items():
        if numbers.ndim != 1 or numbers.dtype != torch.int32 or not numbers.is_contiguous():
            raise ExpertsError(f"{name} is {numbers.dtype} {list(numbers.shape)}; it must be int32, without gaps.")


def combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    *,
    shared: Tensor | None = None,
    x: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``out[n] = sum_j weights[n, j] rows[places[n, j]] + sigmoid(x[n] . gate) shared[n]``: ``[N, D]``, as ``rows``.

    ``weights [N, k]``; ``shared [N, D]`` or none; ``gate [D']`` with ``x [N, D']``, or none, and then the shared
    expert counts whole. Sums are float32, rounded once; ``residual [N, D]``, of the type of ``rows``, is added to that.

    Raises:
        ExpertsError: shapes do not fit, or a gate is given without inputs or without a shared expert.
    """
    _check_combine(rows, places, weights, shared, x, gate, residual)
    tensors = tuple(tensor for tensor in (rows, shared, x, gate, residual) if tensor is not None)
    if not takes_kernel(backend, tensors, Variant(rows.device, rows.dtype, places.shape[1])):
        return reference.combine(rows, places, weights, shared, x, gate, residual)
    from hypic_kernels.experts import triton as kernel

    out = torch.empty((places.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
    kernel.combine(rows, places, weights.contiguous(), shared, x, gate, out, residual).run()
    return out


def _check_combine(
    rows: Tensor,
    places: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    x: Tensor | None,
    gate: Tensor | None,
    residual: Tensor | None,
) -> None:
    num_tokens, width = places.shape[0], rows.shape[1]
    if places.shape != weights.shape or places.numel() != rows.shape[0] or places.dtype != torch.int32:
        raise ExpertsError(
            f"places {list(places.shape)} {places.dtype} and weights {list(weights.shape)} must be of one shape, int32 "
            f"places of all of {rows.shape[0]} rows."
        )
    for name, rows_of in (("shared", shared), ("residual", residual)):
        if rows_of is not None and tuple(rows_of.shape) != (num_tokens, width):
            raise ExpertsError(f"{name} has shape {list(rows_of.shape)}; it must be {[num_tokens, width]}.")
    if residual is not None and residual.dtype != rows.dtype:
        raise ExpertsError(f"residual is {residual.dtype} and rows are {rows.dtype}; they must be of one type.")
    if gate is not None and (x is None or shared is None or tuple(x.shape) != (num_tokens, gate.shape[0])):
        raise ExpertsError("a gate takes a shared expert and one row of inputs of its width a token.")

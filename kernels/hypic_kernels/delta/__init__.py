"""``delta``: the gated delta rule (arXiv 2412.06464) over chunks of tokens and token by token, on states in a pool.

``lift`` turns every chunk into an affine map of the state and an affine readout, ``read`` applies the readout once the
states before the chunks are known (``hypic_kernels.compose`` finds them), ``step`` is one token of decoding. ``scan``
does all of it at once where short rows stand between stored maps. They read
tokens and states where they lie, by index tensors on the device, so a captured graph can be replayed with others.
``run`` is for long rows with nothing cached in between: chunks carry the state themselves (fla's kernels).
The definition is ``reference.py``, the derivation README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.delta import reference
from hypic_kernels.delta.backend import Backend, takes_kernel
from hypic_kernels.delta.check import LiftVariant, ReadVariant, StepVariant
from hypic_kernels.delta.layout import (
    CHUNK_SIZES,
    LiftConfig,
    ReadConfig,
    ScanConfig,
    StepConfig,
    default_precision,
    lift_config,
    read_config,
    read_precision,
    step_config,
)
from hypic_kernels.delta.rule import DeltaError, GatedNorm, Maps, Precision, Rule, ScanPrecision, state_dtype
from hypic_kernels.delta.running import run, runs_here, settle
from hypic_kernels.delta.scan import can_scan, gated_norm, scan
from hypic_kernels.delta.shapes import check_chunks, check_maps, check_norm, check_out, check_pool, check_tokens, fits
from hypic_kernels.rows import CHUNK, RowArrays, Rows, copy_named, row_arrays
from hypic_kernels.trust import is_trusted

__all__ = [
    "CHUNK",
    "CHUNK_SIZES",
    "Backend",
    "DeltaError",
    "GatedNorm",
    "LiftConfig",
    "Maps",
    "Precision",
    "ReadConfig",
    "RowArrays",
    "Rows",
    "Rule",
    "ScanConfig",
    "ScanPrecision",
    "StepConfig",
    "can_scan",
    "gated_norm",
    "lift",
    "read",
    "row_arrays",
    "run",
    "runs_here",
    "scan",
    "settle",
    "step",
]


def lift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Tensor,
    *,
    rule: Rule = Rule(),
    out: Maps | None = None,
    precision: Precision | None = None,
    backend: Backend = "auto",
    config: LiftConfig | None = None,
) -> Maps:
    """Every chunk as a map of the state and a readout, in float32 (float64 if an input is).

    ``q, k [N, Hk, K]``, ``v [N, Hv, V]`` (views of a wider projection will do; numbers of a head side by side),
    ``g, beta [N, Hv]``; value head ``j`` uses key head ``j // (Hv / Hk)``; ``rule`` says what else is done to them.
    ``chunks [M, C]`` int32: the tokens of each chunk in order, C of 16, 32 or 64. A number outside ``0 .. N - 1`` is a
    place without a token, which leaves the state as it is (``g = beta = 0``); its readout is zero.

    ``precision`` of products: ``"ieee"``, ``"tf32x3"``, ``"bf16x3"`` (exact too, for q, k, v in bfloat16 only; the
    default there), or ``"bf16"``, which rounds one operand of each product. ``"auto"`` takes the kernel for CUDA
    tensors where its self-check passes, and the reference otherwise and where a gradient or float64 is asked for.

    Raises:
        DeltaError: shapes or types do not fit, or a layout cannot be addressed.
    """
    check_tokens(q, k, v, g, beta, rule)
    check_chunks(chunks)
    precision = precision or default_precision(k.dtype)
    if precision.startswith("bf16") and k.dtype != torch.bfloat16:
        raise DeltaError(f"precision {precision!r} takes q, k and v in bfloat16, not {k.dtype}; use 'tf32x3'.")
    dtype = state_dtype(q, k, v, g, beta)
    if out is None:
        out = Maps.empty(chunks.shape[0], chunks.shape[1], v.shape[1], k.shape[2], v.shape[2], v, dtype)
    check_maps(out, chunks, v.shape[1], k.shape[2], v.shape[2], dtype)
    if config is None:
        config = lift_config(chunks.shape[1], k.shape[2], v.shape[2])
    variant = LiftVariant.of(q, v, chunks, rule, precision, config)
    if takes_kernel(backend, dtype, (q, k, v, g, beta)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import triton as kernel

        kernel.lift(q, k, v, g, beta, chunks, rule, out, precision, config).run()
    elif len(chunks):
        for target, result in zip(out, reference.lift(q, k, v, g, beta, chunks, rule), strict=True):
            target.copy_(result)
    return out


def read(
    query: Tensor,
    offset: Tensor,
    states: Tensor,
    chunks: Tensor,
    out: Tensor,
    *,
    places: Tensor | None = None,
    norm: GatedNorm | None = None,
    precision: Precision | None = None,
    backend: Backend = "auto",
    config: ReadConfig | None = None,
) -> Tensor:
    """``query @ S + offset`` of every chunk, into the rows of ``out [N, Hv, V]`` that its tokens name.

    ``query``, ``offset`` and ``chunks`` as ``lift`` gives and takes them; ``states [P, Hv, K, V]`` float32, the state
    before chunk ``m`` at ``places[m]`` (int32), or at ``m`` without places; a negative place is a state of zeros. Rows
    of ``out``, of any floating type, that no chunk names are left as they are. ``norm`` is applied before rounding.
    ``precision`` of products: ``"ieee"``, ``"tf32x3"``, ``"bf16x3"``, which carries 16 bits here and is the default
    where ``out`` keeps 8, or ``"bf16"``.

    Raises:
        DeltaError: shapes or types do not fit, or a layout cannot be addressed.
    """
    check_chunks(chunks)
    check_out(out, query, offset, states, chunks, places)
    check_norm(norm, out)
    precision = precision or read_precision(out.dtype)
    config = config or read_config(chunks.shape[1], query.shape[-1], offset.shape[-1], norm is not None)
    variant = ReadVariant.of(query, offset, states, out, norm, precision, config)
    if takes_kernel(backend, query.dtype, (query, offset, states)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import reading as kernel

        kernel.read(query, offset, states, chunks, places, norm, out, precision, config).run()
        return out
    plain = reference.read(query, offset, states, chunks, places, len(out))
    return copy_named(out, reference.normed(plain, norm).to(out.dtype), chunks)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    *,
    rule: Rule = Rule(),
    norm: GatedNorm | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
    config: StepConfig | None = None,
) -> Tensor:
    """One token per row: reads ``states[read_slots]``, writes ``states[write_slots]``, returns outputs ``[N, Hv, V]``.

    Tokens as in ``lift``; ``states [slots, Hv, K, V]``; ``read_slots, write_slots [N]`` int32. A negative slot reads
    zeros, or is not written. A row may write the slot that it reads; no row may write a slot that another row reads or
    writes. ``out`` is given or made in the type of ``v``.

    Raises:
        DeltaError: shapes or types do not fit, or a layout cannot be addressed.
    """
    check_tokens(q, k, v, g, beta, rule)
    check_pool(states, v, k, read_slots, write_slots)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    fits("out", out, tuple(v.shape))
    check_norm(norm, out)
    config = config or step_config(k.shape[2], v.shape[2])
    dtype = state_dtype(q, k, v, g, beta, states)
    variant = StepVariant.of(q, v, states, out, rule, norm, config)
    if takes_kernel(backend, dtype, (q, k, v, g, beta, states)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import stepping as kernel

        kernel.step(q, k, v, g, beta, states, read_slots, write_slots, rule, norm, out, config).run()
        return out
    outputs, after = reference.step(q, k, v, g, beta, states, read_slots, rule)
    kept = write_slots >= 0
    states[write_slots[kept].long()] = after[kept].to(states.dtype)
    return out.copy_(reference.normed(outputs, norm))

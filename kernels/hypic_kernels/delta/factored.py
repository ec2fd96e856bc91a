"""Chunks in the rank of their tokens: ``factor``, the ``scan`` that walks them between stored maps, the norm after it.

A warm request has many short rows between cached interiors. A dense map of each would be four times as many bytes, and
as many products, as what 16 tokens say; here only stored maps are dense, and no state but the wanted ones is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.compose.chains import Chains
from hypic_kernels.delta import reference
from hypic_kernels.delta.backend import Backend, shared_bytes, takes_kernel
from hypic_kernels.delta.check import LiftVariant, NormVariant, ScanVariant
from hypic_kernels.delta.layout import LiftConfig, ScanConfig, default_precision, lift_config, scan_config
from hypic_kernels.delta.rule import DeltaError, Factors, GatedNorm, Precision, Rule, state_dtype
from hypic_kernels.delta.shapes import check_chunks, check_factors, check_norm, check_scan, check_tokens, fits
from hypic_kernels.trust import is_trusted


def factor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Tensor,
    *,
    rule: Rule = Rule(),
    out: Factors | None = None,
    precision: Precision | None = None,
    backend: Backend = "auto",
    config: LiftConfig | None = None,
) -> Factors:
    """As ``lift``, with the map of every chunk left in factors.

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
        out = Factors.empty(chunks.shape[0], chunks.shape[1], v.shape[1], k.shape[2], v.shape[2], v, dtype)
    check_factors(out, chunks, v.shape[1], k.shape[2], v.shape[2], dtype)
    config = config or lift_config(chunks.shape[1], k.shape[2], v.shape[2])
    variant = LiftVariant.of(q, v, chunks, rule, precision, config, is_dense=False)
    if takes_kernel(backend, dtype, (q, k, v, g, beta)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import triton as kernel

        kernel.lift(q, k, v, g, beta, chunks, rule, out, precision, config).run()
    elif len(chunks):
        for target, result in zip(out, reference.factor(q, k, v, g, beta, chunks, rule), strict=True):
            target.copy_(result)
    return out


def scan(
    chains: Chains,
    factors: Factors,
    chunks: Tensor,
    maps: tuple[Tensor, Tensor] | None,
    initial: Tensor,
    out: Tensor,
    *,
    before: Tensor | None = None,
    final: Tensor | None = None,
    final_slots: Tensor | None = None,
    precision: Precision = "tf32x3",
    backend: Backend = "auto",
    config: ScanConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Walks every chain and writes the outputs of its tokens: ``compose`` and ``read`` in one launch.

    ``chains`` as for ``hypic_kernels.compose``: an element of source 0 is the chunk ``state_index`` of ``factors`` (its
    transition index is not used), one of source 1 the stored map ``maps[0] [P, Hv, K, K]`` by transition index (or
    ``ZERO``, ``IDENTITY``) and ``maps[1] [P', Hv, K, V]`` by state index; None if there are none. ``chunks`` as for
    ``factor``. Outputs go to the rows of ``out [N, Hv, V]`` that chunks name, in float32 if a norm follows. Returns
    ``before``, written where the chains' ``out_index`` says, and ``final``, at ``final_slots [num_chains]`` int32 (a
    negative one is not written) or by chain. Both may be the pool that ``initial`` is, if no chain writes a slot that
    another one reads.

    Raises:
        DeltaError: shapes or types do not fit, or a layout cannot be addressed.
    """
    if before is None:
        before = initial.new_empty((chains.num_outputs, *initial.shape[1:]))
    if final is None:
        final = initial.new_empty((chains.num_chains, *initial.shape[1:]))
    check_chunks(chunks)
    check_scan(chains, factors, chunks, maps, initial, out, before, final, final_slots)
    config = config or scan_config(chunks.shape[1], initial.shape[2], initial.shape[3], shared_bytes(out.device))
    tensors = (factors.left, initial, before, final, out, *(maps or ()))
    variant = ScanVariant.of(factors, chunks, maps, initial, out, precision, config)
    if takes_kernel(backend, factors.left.dtype, tensors) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import scanning as kernel

        kernel.scan(chains, factors, chunks, maps, initial, out, before, final, final_slots, precision, config).run()
    else:
        reference.scan(chains, factors, chunks, maps, initial, out, before, final, final_slots)
    return before, final


def gated_norm(x: Tensor, norm: GatedNorm, out: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``rms(x) * weight * silu(z)`` over each head of ``x [N, Hv, V]``, into ``out`` of the same shape.

    Raises:
        DeltaError: shapes do not fit, or numbers of a head do not lie side by side.
    """
    fits("x", x, tuple(out.shape))
    fits("out", out, tuple(out.shape))
    check_norm(norm, out)
    variant = NormVariant(x.device, x.dtype, norm.z.dtype, out.dtype, x.shape[2])
    if takes_kernel(backend, state_dtype(x), (x, norm.z, out)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import scanning as kernel

        kernel.gated_norm(x, norm, out).run()
        return out
    return out.copy_(reference.normed(x.to(state_dtype(x)), norm))

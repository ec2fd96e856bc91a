"""``scan``: a whole layer of short rows between stored maps, from tokens to outputs, without a dense map per chunk.

A warm request has many short rows between cached interiors. Maps of their chunks would be many times the bytes of their
tokens; here only stored maps are dense, and no state but the wanted ones is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.compose.chains import Chains
from hypic_kernels.delta import reference
from hypic_kernels.delta.backend import Backend, takes_kernel
from hypic_kernels.delta.check import NormVariant, ScanVariant
from hypic_kernels.delta.layout import (
    LARGEST_SCAN_KEY,
    SCAN_CHUNK_SIZES,
    ScanConfig,
    lift_config,
    scan_config,
    solving_precision,
)
from hypic_kernels.delta.rule import DeltaError, GatedNorm, Rule, ScanPrecision, state_dtype
from hypic_kernels.delta.shapes import check_chunks, check_norm, check_scan, check_tokens, fits
from hypic_kernels.trust import is_trusted


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Tensor,
    chains: Chains,
    stored: tuple[Tensor, Tensor] | None,
    initial: Tensor,
    out: Tensor,
    *,
    rule: Rule = Rule(),
    norm: GatedNorm | None = None,
    before: Tensor | None = None,
    final: Tensor | None = None,
    final_slots: Tensor | None = None,
    precision: ScanPrecision = "tf32x3",
    backend: Backend = "auto",
    config: ScanConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Walks every chain and writes the outputs of its tokens: ``lift``, ``compose`` and ``read`` in one.

    Tokens, ``chunks`` and ``rule`` as for ``lift``. ``chains`` as for ``hypic_kernels.compose``: an element of source 0
    is the chunk ``state_index`` (its transition index is not used), one of source 1 the stored map
    ``stored[0] [P, Hv, K, K]`` by transition index (or ``ZERO``, ``IDENTITY``) and ``stored[1] [P', Hv, K, V]`` by
    state index; None if there are none. Outputs go to the rows of ``out [N, Hv, V]`` that chunks of chains name, after
    ``norm``; other rows hold nothing of use where a norm is given, and are left as they are where none is. Returns
    ``before``, written where the chains' ``out_index`` says, and ``final``, at ``final_slots [num_chains]`` int32 (a
    negative one is not written) or by chain. Both may be the pool that ``initial`` is, if no chain writes a slot that
    another one reads.

    ``precision`` of products with stored maps; those with q, k and v carry float32's digits in any case. ``"auto"``
    takes the kernel for CUDA tensors where its self-check passes, and the reference otherwise, where a gradient or
    float64 is asked for, and for chunks of 64 and heads of more than 128 keys.

    Raises:
        DeltaError: shapes or types do not fit, or a layout cannot be addressed.
    """
    if before is None:
        before = initial.new_empty((chains.num_outputs, *initial.shape[1:]))
    if final is None:
        final = initial.new_empty((chains.num_chains, *initial.shape[1:]))
    check_tokens(q, k, v, g, beta, rule)
    check_chunks(chunks)
    check_scan(k, v, chunks, chains, stored, initial, out, before, final, final_slots)
    check_norm(norm, out)
    config = config or scan_config(k.shape[2], v.shape[2])
    dtype = state_dtype(q, k, v, g, beta, initial)
    raw = out if norm is None else torch.empty(out.shape, dtype=dtype, device=out.device)
    walked = (chunks, chains, stored, initial, raw, before, final, final_slots)
    if _takes_kernel(backend, (q, k, v, g, beta), walked, rule, precision, config):
        from hypic_kernels.delta import scanning as kernel
        from hypic_kernels.delta import triton as solver

        solved = solver.solved_like(v, chunks)
        lift = lift_config(chunks.shape[1], k.shape[2], v.shape[2])
        solver.solve(q, k, g, beta, chunks, rule, solved, solving_precision(k.dtype, precision), lift).run()
        kernel.scan(q, k, v, solved, *walked, precision, config).run()
    elif chains.num_chains:
        reference.scan(reference.lift(q, k, v, g, beta, chunks, rule), *walked)
    if norm is not None:
        gated_norm(raw, norm, out, backend=backend)
    return before, final


def serves(size: int, key_dim: int) -> bool:
    """Whether there is a kernel for chunks of ``size`` and heads of ``key_dim`` keys."""
    return size in SCAN_CHUNK_SIZES and key_dim <= LARGEST_SCAN_KEY


def _takes_kernel(
    backend: Backend,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    walked: tuple[Tensor, Chains, tuple[Tensor, Tensor] | None, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    rule: Rule,
    precision: ScanPrecision,
    config: ScanConfig,
) -> bool:
    (_, k, v, _, _), (chunks, _, stored, initial, out, before, final, _) = tokens, walked
    dtype, maps = state_dtype(*tokens, initial), stored or ()
    size, key_dim = chunks.shape[1], k.shape[2]
    if not serves(size, key_dim):
        if backend == "triton":
            raise DeltaError(
                f"scan's kernel takes chunks of {SCAN_CHUNK_SIZES} tokens, heads of up to {LARGEST_SCAN_KEY} keys; it is "
                f"{size} and {key_dim}; use backend='auto'."
            )
        return False
    if not takes_kernel(backend, dtype, (*tokens, initial, out, before, final, *maps)):
        return False
    group, is_raw = v.shape[1] // k.shape[1], rule.A_log is not None
    variant = ScanVariant(
        v.device, v.dtype, out.dtype, tuple(x.dtype for x in maps), initial.dtype, size, group, key_dim, v.shape[2],
        is_raw, precision, config,
    )  # fmt: skip
    return backend == "triton" or is_trusted(variant)


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

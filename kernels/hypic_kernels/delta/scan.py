"""``scan``: a whole layer of short rows between stored maps, from tokens to outputs, without a dense map per chunk.

A warm request has many short rows between cached interiors. Maps of their chunks would be many times the bytes of their
tokens; here only stored maps are dense, and no state but the wanted ones is written.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hypic_kernels.compose.chains import Chains
from hypic_kernels.delta import reference
from hypic_kernels.delta.backend import STORAGE, Backend, shared_bytes, takes_kernel
from hypic_kernels.delta.check import NormVariant, ScanVariant
from hypic_kernels.delta.layout import (
    ScanConfig,
    lift_config,
    scan_config,
    scan_fits,
    scan_precision,
    solving_precision,
)
from hypic_kernels.delta.rule import GatedNorm, Rule, ScanPrecision, state_dtype
from hypic_kernels.delta.shapes import check_chunks, check_norm, check_scan, check_tokens, fits
from hypic_kernels.trust import is_trusted

# Each is made once: all layers of a kind ask with the same.
_scan_variant = functools.cache(ScanVariant)
_norm_variant = functools.cache(NormVariant)


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
    precision: ScanPrecision | None = None,
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

    ``precision`` of products with stored maps; those with q, k and v carry float32's digits in any case. Left out, it
    is ``"bf16x3"`` for tokens in bfloat16, which themselves carry half as many, else ``"bf16x6"``. ``"auto"`` takes the
    kernel for CUDA tensors where its self-check passes and a chip has the room (``can_scan``), and the reference
    otherwise and where a gradient or float64 is asked for.

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
    precision, config = precision or scan_precision(k.dtype), config or scan_config(k.shape[2], v.shape[2])
    dtype = state_dtype(q, k, v, g, beta, initial)
    raw = out if norm is None else torch.empty(out.shape, dtype=dtype, device=out.device)
    walked = (chunks, chains, stored, initial, raw, before, final, final_slots)
    variant = _variant(v.dtype, k.shape[1], chunks, stored, initial, raw.dtype, rule, precision, config)
    tensors = (q, k, v, g, beta, initial, raw, before, final, *(stored or ()))
    if takes_kernel(backend, dtype, tensors) and (backend == "triton" or _trusted(variant)):
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


def can_scan(
    dtype: torch.dtype,
    num_k_heads: int,
    chunks: Tensor,
    stored: tuple[Tensor, Tensor] | None,
    states: Tensor,
    *,
    rule: Rule = Rule(),
) -> bool:
    """Whether ``scan`` of tokens of a type, with a norm and at its default precision, is the better way: its kernel
    takes them, or they are on a CPU. Else maps of chunks (``lift``, ``compose``, ``read``) are."""
    if not states.is_cuda:
        return True
    if not takes_kernel("auto", state_dtype(states), (states, *(stored or ()))) or dtype not in STORAGE:
        return False
    precision, config = scan_precision(dtype), scan_config(*states.shape[2:])
    return _trusted(_variant(dtype, num_k_heads, chunks, stored, states, torch.float32, rule, precision, config))


def _variant(
    dtype: torch.dtype,
    num_k_heads: int,
    chunks: Tensor,
    stored: tuple[Tensor, Tensor] | None,
    states: Tensor,
    out_dtype: torch.dtype,
    rule: Rule,
    precision: ScanPrecision,
    config: ScanConfig,
) -> ScanVariant:
    _, num_heads, key_dim, value_dim = states.shape
    return _scan_variant(
        states.device, dtype, out_dtype, tuple(x.dtype for x in stored or ()), states.dtype, chunks.shape[1],
        num_heads // num_k_heads, key_dim, value_dim, rule.A_log is not None, precision, config,
    )  # fmt: skip


def _trusted(variant: ScanVariant) -> bool:
    """Sizes that no chip has the room for are not worth a warning."""
    is_small = scan_fits(variant.size, variant.key_dim, variant.config, variant.precision, shared_bytes(variant.device))
    return is_small and is_trusted(variant)


def gated_norm(x: Tensor, norm: GatedNorm, out: Tensor, *, backend: Backend = "auto") -> Tensor:
    """``rms(x) * weight * silu(z)`` over each head of ``x [N, Hv, V]``, into ``out`` of the same shape.

    Raises:
        DeltaError: shapes do not fit, or numbers of a head do not lie side by side.
    """
    fits("x", x, out.shape)
    fits("out", out, out.shape)
    check_norm(norm, out)
    variant = _norm_variant(x.device, x.dtype, norm.z.dtype, out.dtype, x.shape[2])
    if takes_kernel(backend, state_dtype(x), (x, norm.z, out)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.delta import scanning as kernel

        kernel.gated_norm(x, norm, out).run()
        return out
    return out.copy_(reference.normed(x.to(state_dtype(x)), norm))

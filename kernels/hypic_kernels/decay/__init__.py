"""``decay``: linear attention with one decay a head (Lightning, arXiv 2401.04658; RetNet, arXiv 2307.08621; scalar GLA,
arXiv 2312.06635; Mamba-2, arXiv 2405.21060) over chunks of tokens and token by token, on states in a pool.

``lift`` turns every chunk into an affine map of the state, ``read`` gives the outputs of its tokens once the states
before the chunks are known (``hypic_kernels.compose`` finds them), ``step`` is one token of decoding. Silu, norms of q
and k, and rotary positions happen inside (``Rule``). The definition is ``reference.py``, the derivation README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic_kernels.decay import reference
from hypic_kernels.decay.check import Kind, LiftVariant, ReadVariant, StepVariant
from hypic_kernels.decay.layout import (
    CHUNK_SIZES,
    LiftConfig,
    ReadConfig,
    StepConfig,
    default_precision,
    lift_config,
    read_config,
    step_config,
)
from hypic_kernels.decay.rule import DecayError, Maps, Precision, Rule, state_dtype
from hypic_kernels.decay.shapes import check_chunks, check_integers, check_maps, check_states, check_tokens, fits
from hypic_kernels.delta.backend import Backend, takes_kernel
from hypic_kernels.rows import copy_named
from hypic_kernels.trust import is_trusted

__all__ = [
    "CHUNK_SIZES",
    "Backend",
    "DecayError",
    "LiftConfig",
    "Maps",
    "Precision",
    "ReadConfig",
    "Rule",
    "StepConfig",
    "lift",
    "read",
    "step",
]


def lift(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    chunks: Tensor,
    *,
    rule: Rule = Rule(),
    out: Maps | None = None,
    precision: Precision | None = None,
    backend: Backend = "auto",
    config: LiftConfig | None = None,
) -> Maps:
    """Every chunk as a map of the state, in float32 (float64 if an input is).

    ``k [N, Hk, K]``, ``v [N, Hv, V]`` (views of a wider projection will do; numbers of a head side by side), ``g
    [N, Hv]``, the logarithm of the decay, of any strides: one decay for all tokens is expanded. Value head ``j`` uses
    key head ``j // (Hv / Hk)``; ``rule`` says what is done to k and v before. ``chunks [M, C]`` int32: the tokens of
    each chunk in order, C of 16, 32 or 64. A number outside ``0 .. N - 1`` is a place without a token, which leaves the
    state as it is; maps of a chunk without any token are not defined.

    ``precision`` of products: ``"ieee"``, ``"tf32x3"``, ``"bf16x3"``, which carries 16 bits of both operands and is the
    default for bfloat16, or ``"bf16"``. ``"auto"`` takes the kernel for CUDA tensors where its self-check passes, and
    the reference otherwise and where a gradient or float64 is asked for.

    Raises:
        DecayError: shapes or types do not fit, or a layout cannot be addressed.
    """
    check_tokens(k, k, v, g, rule)
    check_chunks(chunks)
    dtype, precision = state_dtype(k, v, g), precision or default_precision(k.dtype)
    if out is None:
        out = Maps.empty(chunks.shape[0], v.shape[1], k.shape[2], v.shape[2], v, dtype)
    check_maps(out, chunks, v, k.shape[2], dtype)
    config = config or lift_config(chunks.shape[1], k.shape[2], v.shape[2])
    variant = LiftVariant(Kind.of(k, v, rule), chunks.shape[1], precision, config)
    if takes_kernel(backend, dtype, (k, v, g)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.decay import triton as kernel

        kernel.lift(k, v, g, chunks, rule, out, precision, config).run()
    elif chunks.shape[0]:
        for target, result in zip(out, reference.lift(k, v, g, chunks, rule), strict=True):
            target.copy_(result)
    return out


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    states: Tensor,
    chunks: Tensor,
    out: Tensor,
    *,
    rule: Rule = Rule(),
    precision: Precision | None = None,
    backend: Backend = "auto",
    config: ReadConfig | None = None,
) -> Tensor:
    """Outputs of every chunk's tokens, into the rows of ``out [N, Hv, V]`` that they name; other rows are left alone.

    Tokens, ``chunks`` and ``precision`` as in ``lift``; ``states [at least M, Hv, K, V]``: the state before chunk ``m``
    stands at ``m``. ``out`` may have any floating type.

    Raises:
        DecayError: shapes or types do not fit, or a layout cannot be addressed.
    """
    check_tokens(q, k, v, g, rule)
    check_chunks(chunks)
    check_states(states, chunks.shape[0], v, k.shape[2])
    fits("out", out, tuple(v.shape))
    dtype, precision = state_dtype(q, k, v, g, states), precision or default_precision(k.dtype)
    config = config or read_config(chunks.shape[1], k.shape[2], v.shape[2])
    variant = ReadVariant(Kind.of(k, v, rule), out.dtype, chunks.shape[1], precision, config)
    if takes_kernel(backend, dtype, (q, k, v, g, states)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.decay import triton as kernel

        kernel.read(q, k, v, g, states, chunks, rule, out, precision, config).run()
        return out
    return copy_named(out, reference.read(q, k, v, g, states, chunks, rule).to(out.dtype), chunks)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    *,
    rule: Rule = Rule(),
    out: Tensor | None = None,
    backend: Backend = "auto",
    config: StepConfig | None = None,
) -> Tensor:
    """One token per row: reads ``states[read_slots]``, writes ``states[write_slots]``, returns outputs ``[N, Hv, V]``.

    Tokens as in ``lift``; ``states [slots, Hv, K, V]``; ``read_slots, write_slots [N]`` int32. A negative slot reads
    zeros, or is not written. A row may write the slot that it reads; no row may write a slot that another row reads or
    writes. ``out`` is given or made in float32 (float64 if an input is).

    Raises:
        DecayError: shapes or types do not fit, or a layout cannot be addressed.
    """
    check_tokens(q, k, v, g, rule)
    check_states(states, 0, v, k.shape[2])
    for name, slots in (("read_slots", read_slots), ("write_slots", write_slots)):
        check_integers(name, slots, (v.shape[0],))
    dtype = state_dtype(q, k, v, g, states)
    out = torch.empty(v.shape, dtype=dtype, device=v.device) if out is None else out
    fits("out", out, tuple(v.shape))
    config = config or step_config(k.shape[2], v.shape[2])
    variant = StepVariant(Kind.of(k, v, rule), states.dtype, out.dtype, config)
    if takes_kernel(backend, dtype, (q, k, v, g, states)) and (backend == "triton" or is_trusted(variant)):
        from hypic_kernels.decay import stepping as kernel

        kernel.step(q, k, v, g, states, read_slots, write_slots, rule, out, config).run()
        return out
    outputs, after = reference.step(q, k, v, g, states, read_slots, rule)
    kept = write_slots >= 0
    states[write_slots[kept].long()] = after[kept].to(states.dtype)
    return out.copy_(outputs)

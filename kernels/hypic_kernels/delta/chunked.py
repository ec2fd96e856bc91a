"""Pieces of flash-linear-attention (fla) that run rows of the gated delta rule chunk by chunk, and how they are called.

fla and Triton are imported only when they are asked for.

With ``G`` the running sum of ``g`` within a chunk, ``w, u`` of every chunk are made at once (``solving.py``, in the
place of fla's three launches for it); then, chunk after chunk, ``v' = u - w S`` and
``S = e^G_C S + k^T (e^(G_C - G) v')``; then the outputs of every chunk at once. Where transitions or states within
rows are wanted, the walk is our own (``carrying.py``). Operands of products are bfloat16, sums and the state between
chunks float32; so a result is off by some 2^-9 of its size, as fla's own are. Decays between tokens are differences of
running sums, which one of less than some -1000 in a chunk would blur.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic_kernels.delta import outputs as launched
from hypic_kernels.delta.outputs import Plain, plain_of
from hypic_kernels.delta.rule import GatedNorm, Rule
from hypic_kernels.rows import CHUNK, Rows

MAX_KEY_DIM = 256
# The layouts that fla's own measurements chose on an H200 (Triton 3.6, heads of 128).
SUMS: Mapping[str, int] = {"num_warps": 1}
SOLVE: Mapping[str, int] = {"BK": 64, "num_warps": 4}
W_U: Mapping[str, int] = {"num_warps": 4, "num_stages": 3}
STATES: Mapping[str, int] = {"BV": 32, "num_warps": 4, "num_stages": 3}
OUTPUTS: Mapping[str, int] = {"BK": 64, "BV": 64, "num_warps": 4, "num_stages": 3}
_LOG2_E = 1 / math.log(2)


class Pieces(NamedTuple):
    """fla's functions, by what they give, and the kernel of the last, if it can be launched as it is."""

    sums: Callable[..., Tensor]
    w_u: Callable[..., tuple[Tensor, Tensor, Tensor]]
    states: Callable[..., tuple[Tensor, Tensor | None, Tensor]]
    outputs: Callable[..., Tensor]
    plain: Plain | None = None


@functools.cache
def pieces() -> Pieces | None:
    """fla's functions, or ``None`` where fla is not installed or is of a version that takes other arguments."""
    if find_spec("fla") is None:
        return None
    try:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
        from fla.ops.common.chunk_o import chunk_fwd_kernel_o, chunk_fwd_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
        from fla.ops.utils import chunk_local_cumsum
    except ImportError:
        return None
    found = Pieces(chunk_local_cumsum, chunk_gated_delta_rule_fwd_intra, chunk_gated_delta_rule_fwd_h, chunk_fwd_o)
    taken = (
        {"scale", "chunk_indices"},
        {"chunk_size", "chunk_indices"},
        {"initial_state", "chunk_size", "save_new_value", "chunk_indices", "chunk_offsets"},
        {"scale", "chunk_size", "chunk_indices"},
    )
    is_known = all(names <= _parameters(piece) for piece, names in zip(found[:4], taken, strict=True))
    return found._replace(plain=plain_of(chunk_fwd_kernel_o)) if is_known and _pin_all() else None


def _pin_all() -> bool:
    """Leave each of fla's kernels one layout, in this process; ``False`` if one is not where it is looked for.

    Measuring them takes minutes, and another layout may be chosen each time, with other roundings.
    """
    try:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        from fla.ops.common.chunk_o import chunk_fwd_kernel_o
        from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_kkt_solve_kernel
        from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd_kernel
        from fla.ops.utils.cumsum import chunk_local_cumsum_scalar_kernel
    except ImportError:
        return False
    pins = (
        (chunk_local_cumsum_scalar_kernel, SUMS),
        (chunk_gated_delta_rule_fwd_kkt_solve_kernel, SOLVE),
        (recompute_w_u_fwd_kernel, W_U),
        (chunk_gated_delta_rule_fwd_kernel_h_blockdim64, STATES),
        (chunk_fwd_kernel_o, OUTPUTS),
    )
    return all(pin(kernel, layout) for kernel, layout in pins)


def pin(kernel: Any, layout: Mapping[str, int]) -> bool:
    """Of the layouts that a kernel's autotuner would measure, leave the one that is nearest to ``layout``: fla lists
    others for chips with less shared memory."""
    tuner = kernel
    while tuner is not None and not getattr(tuner, "configs", None):  # below heuristics
        tuner = getattr(tuner, "fn", None)
    if tuner is None:
        return False
    tuner.configs = [max(tuner.configs, key=lambda config: _agreement(config, layout))]
    return True


def _agreement(config: Any, layout: Mapping[str, int]) -> int:
    values = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return sum(values.get(name) == value for name, value in layout.items())


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


class Gathered(NamedTuple):
    """Tokens in the order of rows: ``q, k [1, n, Hk, K]`` normalised, ``g, beta [1, n, Hv]`` in float32."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor


def gathered(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, rows: Rows, rule: Rule) -> Gathered:
    """By this package's kernel; ``g`` becomes the logarithm of the decay."""
    from hypic_kernels.delta import gathering

    size = rows.tokens.shape[0]
    made = Gathered(
        torch.empty((1, size, *q.shape[1:]), dtype=q.dtype, device=q.device),
        torch.empty((1, size, *q.shape[1:]), dtype=q.dtype, device=q.device),
        torch.empty((1, size, g.shape[1]), dtype=torch.float32, device=g.device),
        torch.empty((1, size, g.shape[1]), dtype=torch.float32, device=g.device),
    )
    gathering.gather_all((q, k, g, beta), rows.tokens, rule, made).run()
    return made


class Chunked(NamedTuple):
    """What the chunks of rows are before their states are known: running sums ``g`` of base 2, and ``w``, ``u``."""

    g: Tensor
    w: Tensor
    u: Tensor


def chunked(x: Gathered, v: Tensor, rows: Rows) -> Chunked:
    """By this package's kernel, of ``v [N, Hv, V]`` where it lies."""
    from hypic_kernels.delta import solving

    size, (num_heads, value_dim) = rows.tokens.shape[0], v.shape[1:]
    made = Chunked(
        torch.empty_like(x.g),
        x.k.new_empty((1, size, num_heads, x.k.shape[3])),
        v.new_empty((1, size, num_heads, value_dim)),
    )
    solving.solve(x.k, v, x.g, x.beta, rows, *made).run()
    return made


def chunked_by_fla(x: Gathered, v: Tensor, rows: Rows) -> Chunked:
    """The same by fla, which wants v in the order of rows: what ``run_bench`` compares with."""
    from hypic_kernels.delta import gathering

    known, values = _known(), v.new_empty((1, rows.tokens.shape[0], *v.shape[1:]))
    gathering.gather(v, rows.tokens, values, None).run()
    where = {"cu_seqlens": rows.cu_seqlens, "chunk_indices": rows.chunk_indices, "chunk_size": CHUNK}
    g = known.sums(x.g, scale=_LOG2_E, **where)
    w, u, _ = known.w_u(k=x.k, v=values, g=g, beta=x.beta, **where)
    return Chunked(g, w, u)


class Walked(NamedTuple):
    """States before chunks ``[1, M, Hv, K, V]`` and corrected values ``[1, n, Hv, V]``, rounded; states that are kept
    ``[P + R, Hv, K, V]``, those that are marked and those at rows' ends; and transitions."""

    states: Tensor
    values: Tensor
    kept: Tensor
    transitions: Tensor


Slotted = tuple[Tensor, Tensor]
"""A pool of states or transitions, and which of them are meant."""


def walked(x: Gathered, made: Chunked, rows: Rows, initial: Slotted, into: Slotted | None = None) -> Walked:
    """Of rows from ``initial``; transitions go to ``into``, or to a tensor of their own. Rows of which nothing but the
    end is wanted are walked by fla."""
    if not rows.num_folds and not rows.num_marks:
        return walked_by_fla(x, made, rows, initial)
    from hypic_kernels.delta import carrying

    num_heads, key_dim, value_dim = *made.w.shape[2:], made.u.shape[3]
    sizes = (num_heads, key_dim, value_dim)
    before, values = x.k.new_empty((1, rows.chunk_indices.shape[0], *sizes)), torch.empty_like(made.u)
    kept = initial[0].new_empty((rows.num_marks + rows.num_rows, *sizes), dtype=torch.float32)
    if into is None:
        slots = torch.arange(rows.num_folds, dtype=torch.int32, device=kept.device)
        into = kept.new_empty((rows.num_folds, num_heads, key_dim, key_dim)), slots
    carrying.carry(x.k, made, rows, initial, (before, values, kept), into).run()
    return Walked(before, values, kept, into[0])


def walked_by_fla(x: Gathered, made: Chunked, rows: Rows, initial: Slotted) -> Walked:
    """The same without marks and folds."""
    states, values, final = _known().states(
        k=x.k,
        w=made.w,
        u=made.u,
        g=made.g,
        initial_state=initial[0].index_select(0, initial[1]),
        output_final_state=True,
        **_placed(rows),
    )
    assert values is not None, "corrected values were asked for"
    return Walked(states, values, final, final.new_empty((0, *final.shape[1:3], final.shape[2])))


def outputs(x: Gathered, made: Chunked, rows: Rows, states: Tensor, values: Tensor, scale: float) -> Tensor:
    """``[1, n, Hv, V]`` in the order of rows, without the norm."""
    known = _known()
    if known.plain is not None:
        return launched.outputs(known.plain, x.q, x.k, values, made.g, states, rows, scale)
    where = {"cu_seqlens": rows.cu_seqlens, "chunk_indices": rows.chunk_indices, "chunk_size": CHUNK}
    return known.outputs(q=x.q, k=x.k, v=values, h=states, g=made.g, scale=scale, **where)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    initial: Slotted,
    rule: Rule,
    norm: GatedNorm | None,
    out: Tensor,
    into: Slotted | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin of ``reference.run`` and ``reference.normed``, into the rows of ``out`` that ``rows`` names."""
    from hypic_kernels.delta import gathering

    with _on(q):
        x = gathered(q, k, g, beta, rows, rule)
        made = chunked(x, v, rows)
        found = walked(x, made, rows, initial, into)
        outputs_of = outputs(x, made, rows, found.states, found.values, rule.scale)
        gathering.scatter(outputs_of, rows.tokens, norm, out).run()
        return found.kept, found.transitions


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """fla launches on the current device; mostly that is the one."""
    is_there = not x.is_cuda or x.get_device() == torch.cuda.current_device()
    return nullcontext() if is_there else torch.cuda.device(x.device)


def _known() -> Pieces:
    found = pieces()
    assert found is not None, "fla is not installed, or is of another version"
    return found


def _placed(rows: Rows) -> dict[str, Any]:
    """Given whole: what fla would compute of them itself, it would ask the device for."""
    return {
        "cu_seqlens": rows.cu_seqlens,
        "chunk_indices": rows.chunk_indices,
        "chunk_offsets": rows.chunk_offsets,
        "chunk_size": CHUNK,
    }

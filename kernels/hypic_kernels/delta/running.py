"""``run``: long rows of the gated delta rule, chunk after chunk, from their states and on to their states."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.delta import chunked, reference
from hypic_kernels.delta.check import RunVariant
from hypic_kernels.delta.rule import DeltaError, GatedNorm, Rule
from hypic_kernels.delta.shapes import check_norm, check_rows, check_tokens, fits
from hypic_kernels.rows import Rows
from hypic_kernels.trust import is_trusted

RunBackend = Literal["auto", "fla", "reference"]
INSTEAD = "Long rows are run by this package's own kernels, or by the reference."


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    initial: Tensor,
    out: Tensor,
    *,
    rule: Rule = Rule(),
    norm: GatedNorm | None = None,
    backend: RunBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Rows of tokens, each from its own state: final states ``[R, Hv, K, V]`` and transitions ``[F, Hv, K, K]``.

    Tokens as in ``lift``; ``rows`` names them and says of how many rows, ``F``, the transition is wanted: the first.
    ``initial [R, Hv, K, V]`` are the states before. Outputs go to the rows of ``out [N, Hv, V]`` that are named, of any
    floating type, through ``norm``; others are left as they are. States are float32 (float64 by the reference, if an
    input is). With ``T`` the transition of a row, its end state alone is ``final - T initial``.

    fla's kernels multiply bfloat16 and add float32, and a state is rounded to bfloat16 wherever it is multiplied:
    errors of some 2^-9 of the result. ``"auto"`` takes them where ``runs_here`` says so, and the reference elsewhere.

    Raises:
        DeltaError: shapes or types do not fit, or fla is asked for and cannot run.
    """
    check_tokens(q, k, v, g, beta, rule)
    check_rows(rows, initial, k, v)
    fits("out", out, tuple(v.shape))
    check_norm(norm, out)
    variant = _variant(q, v, rule, norm)
    if backend == "fla" and not _could_run(variant):
        raise DeltaError(f"fla's kernels take bfloat16 on a CUDA device, not {q.dtype} on {q.device.type}.")
    if backend == "fla" or (backend == "auto" and _takes_fla(variant, (q, k, v, g, beta))):
        return chunked.run(q, k, v, g, beta, rows, initial, rule, norm, out)
    plain, final, transitions = reference.run(q, k, v, g, beta, rows, initial, rule)
    places = rows.tokens.long()
    picked = None if norm is None else GatedNorm(norm.z[places], norm.weight, norm.eps)
    out.index_copy_(0, places, reference.normed(plain, picked).to(out.dtype))
    return final, transitions


def runs_here(
    num_k_heads: int, num_v_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether ``run`` is fast for such a layer: fla is there, and right on a random problem, which is tried once.

    That compiles fla's kernels for these sizes, which takes some seconds at the first start.
    """
    known = torch.empty(0, device=device).device  # "cuda" has a number
    variant = RunVariant(known, dtype, num_k_heads, num_v_heads, key_dim, value_dim, True, True)
    return _could_run(variant) and is_trusted(variant, INSTEAD)


def _variant(q: Tensor, v: Tensor, rule: Rule, norm: GatedNorm | None) -> RunVariant:
    sizes = q.shape[1], v.shape[1], q.shape[2], v.shape[2]
    return RunVariant(v.device, v.dtype, *sizes, rule.A_log is not None, norm is not None)


def _could_run(variant: RunVariant) -> bool:
    if variant.device.type != "cuda" or variant.dtype != torch.bfloat16 or not available() or interpreted():
        return False
    return variant.key_dim <= chunked.MAX_KEY_DIM and chunked.pieces() is not None


def _takes_fla(variant: RunVariant, tensors: tuple[Tensor, ...]) -> bool:
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and _could_run(variant) and is_trusted(variant, INSTEAD)

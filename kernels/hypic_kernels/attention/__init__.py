"""``attend``: softmax attention of tokens to the keys of their chain, which lie unrotated in a pool and are shared.

Keys and values are named by token slot and read where they are; a key turns by its position in the prompt (RoFormer,
arXiv 2104.09864) when it is read, so one stored copy serves wherever a segment is placed (HYPIC, arXiv 2607.01299).
``attend_latent`` is the same for multi-head latent attention. The definition is ``reference.py``, the fast twin
``triton.py``, the derivation README.md.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.attention import reference
from hypic_kernels.attention.check import Variant
from hypic_kernels.attention.layout import (
    Chip,
    Choice,
    Config,
    HeadDims,
    LayoutError,
    Load,
    Precision,
    choose,
    default_config,
    most_rows,
    num_lanes,
    preferred,
    scratch_numbers,
)
from hypic_kernels.attention.parts import NO_TILE, most_parts, shared_out
from hypic_kernels.attention.plan import ChainQueries, Plan, PlanError, PlanSizes, plan_of
from hypic_kernels.trust import is_trusted

__all__ = [
    "Backend",
    "ChainQueries",
    "Chip",
    "Choice",
    "Config",
    "HeadDims",
    "LayoutError",
    "Load",
    "NO_TILE",
    "Plan",
    "PlanError",
    "PlanSizes",
    "Precision",
    "attend",
    "attend_latent",
    "chip_of",
    "choose",
    "default_config",
    "lanes_of",
    "most_parts",
    "most_rows",
    "plan_of",
    "scratch_numbers",
    "shared_out",
]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    *,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    backend: Backend = "auto",
    config: Config | None = None,
) -> Tensor:
    """Attention of ``q [N, H, D]`` to ``keys [S, Hkv, D]`` and ``values [S, Hkv, V]`` as ``plan`` says: ``[N, H, V]``.

    Queries and keys come without rotation. ``cos, sin [P, rot / 2]`` in float32, one row a position, rotate the first
    ``rot`` channels of both, channel ``i`` with ``i + rot / 2``; without them nothing turns. Scores are multiplied by
    ``scale`` and reach from a token to the keys of its chain up to its own position. ``H`` is a multiple of ``Hkv``.
    Channels of a head must lie side by side; heads and tokens may be any distance apart, so ``[..., :D]`` will do.

    Rows of the result that no tile of the plan names are left as they were; a token that sees no key gets zeros. Given
    an ``out`` in any floating type, that is written and returned; it must not overlap an input. ``scratch``: float32
    numbers for the parts of a plan with splits, ``scratch_numbers(...)`` of them, allocated where not given.

    Rotated keys, queries and weights are rounded to the type of the keys before they are multiplied; sums, exponentials
    and rotation are float32. ``backend="auto"`` takes the kernel for CUDA tensors where it runs and its self-check
    passes, the reference otherwise and wherever a gradient or float64 is asked for; the interpreter runs only for
    ``"triton"``.

    Raises:
        LayoutError: shapes, types or strides that do not fit together.
    """
    rotary_dim = 0 if cos is None else 2 * cos.shape[-1]
    dims = _dims(q, keys, values, rotary_dim, is_latent=False)
    return _run(q, keys, values, plan, cos, sin, scale, out, scratch, backend, config, dims)


def attend_latent(
    q: Tensor,
    keys: Tensor,
    latents: Tensor,
    plan: Plan,
    *,
    scale: float,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    backend: Backend = "auto",
    config: Config | None = None,
) -> Tensor:
    """Multi-head latent attention with its projections absorbed (DeepSeek-V2, arXiv 2405.04434): ``[N, H, L]``.

    A key is a latent and a short key beside it, ``latents [S, 1, L]`` and ``keys [S, 1, R]``, a query both in this
    order, ``q [N, H, L + R]``; the latents are the values too, and are read once for both. ``cos, sin [P, R / 2]``
    rotate the short part. All else as ``attend``.

    Raises:
        LayoutError: as ``attend``.
    """
    rotary_dim = 0 if cos is None else 2 * cos.shape[-1]
    dims = _dims(q, keys, latents, rotary_dim, is_latent=True)
    return _run(q, keys, latents, plan, cos, sin, scale, out, scratch, backend, config, dims)


def chip_of(device: torch.device) -> Chip:
    """A device as layouts see it; one that runs no kernels as any other."""
    if device.type != "cuda" or not available():
        return Chip(runs_hopper=False)
    from hypic_kernels.attention import launching as kernel

    return kernel.chip_of(device)


def lanes_of(dims: HeadDims, dtype: torch.dtype, tile: int, num_key_heads: int, chip: Chip, *, turns_once: bool) -> int:
    """Parts of keys that run at once, for ``plan_of`` or a plan that is made elsewhere."""
    return num_lanes(dims, dtype, tile, preferred(dims, dtype, tile, turns_once, chip)[0], num_key_heads, chip)


def _dims(q: Tensor, keys: Tensor, values: Tensor, rotary_dim: int, is_latent: bool) -> HeadDims:
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        if tensor.ndim != 3 or (tensor.stride(2) != 1 and tensor.shape[2] > 1):
            raise LayoutError(f"{name} of shape {list(tensor.shape)} must have three axes, the last without gaps.")
    if keys.shape[:2] != values.shape[:2]:
        raise LayoutError(f"keys {list(keys.shape)} and values {list(values.shape)} differ in slots or heads.")
    heads, key_heads = q.shape[1], keys.shape[1]
    if key_heads == 0 or heads % key_heads:
        raise LayoutError(f"{heads} query heads cannot share {key_heads} key heads evenly.")
    dims = HeadDims(heads // key_heads, keys.shape[2], values.shape[2], rotary_dim, is_latent)
    if q.shape[2] != dims.query_dim:
        raise LayoutError(f"queries have {q.shape[2]} channels; with these keys they must have {dims.query_dim}.")
    dims.check()
    return dims


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    cos: Tensor | None,
    sin: Tensor | None,
    out: Tensor,
    dims: HeadDims,
) -> None:
    if keys.dtype != values.dtype:
        raise LayoutError(f"keys are {keys.dtype} and values {values.dtype}; store both in one type.")
    if q.shape[0] != plan.sizes.num_tokens:
        raise LayoutError(f"{q.shape[0]} queries given, the plan has {plan.sizes.num_tokens}; plan for as many.")
    if out.shape != (*q.shape[:2], dims.value_dim) or out.stride(2) != 1:
        wanted = [*q.shape[:2], dims.value_dim]
        raise LayoutError(f"out of shape {list(out.shape)} must be {wanted}, its last axis without gaps.")
    if (cos is None) != (sin is None):
        raise LayoutError("cos and sin belong together; give both or neither.")
    if cos is not None and sin is not None:
        _check_tables(cos, sin)


def _check_tables(cos: Tensor, sin: Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != cos.shape or table.ndim != 2 or table.dtype != torch.float32 or not table.is_contiguous():
            raise LayoutError(
                f"{name} is {table.dtype} {list(table.shape)}; both tables must be contiguous float32 [P, rot / 2]."
            )


def _run(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    out: Tensor | None,
    scratch: Tensor | None,
    backend: Backend,
    config: Config | None,
    dims: HeadDims,
) -> Tensor:
    if out is None:
        out = q.new_empty((*q.shape[:2], dims.value_dim))
    _check(q, keys, values, plan, cos, sin, out, dims)
    if not scale > 0:
        raise LayoutError(f"scale is {scale}; it must be above 0.")
    if backend == "auto" and not _may_run(q, keys, values, out):
        backend = "reference"
    if backend != "reference":
        from hypic_kernels.attention import launching as kernel

        chip = kernel.chip_of(out.device)
        for each in [config] if config else preferred(dims, keys.dtype, plan.tile, plan.turns_once, chip):
            if plan.tile > each.block_m:
                raise LayoutError(
                    f"tiles of {plan.tile} tokens do not fit into {each.block_m} rows; plan smaller ones."
                )
            if backend == "triton" or _is_right(q, keys, plan, out, dims, each):
                kernel.attend(q, keys, values, plan, cos, sin, scale, out, dims, each, scratch)
                return out
    reference.attend(q, keys, values, plan, cos, sin, scale, out, dims.is_latent)
    return out


def _may_run(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> bool:
    """Whether ``auto`` may mean the kernel: CUDA, storage types that it reads, no gradient."""
    if not out.is_cuda or not available() or interpreted():
        return False
    tensors = (q, keys, values)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(tensor.dtype in STORAGE for tensor in (*tensors, out))


def _is_right(q: Tensor, keys: Tensor, plan: Plan, out: Tensor, dims: HeadDims, config: Config) -> bool:
    """Whether the kernel passed its self-check for this variant."""
    return is_trusted(
        Variant(
            device=out.device,
            dims=dims,
            num_key_heads=keys.shape[1],
            dtype=keys.dtype,
            query_dtype=q.dtype,
            out_dtype=out.dtype,
            tile=plan.tile,
            is_split=plan.is_split,
            is_moved=plan.key_positions is not None,
            config=config,
        )
    )

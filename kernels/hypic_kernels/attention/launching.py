"""Launches of one call: keys turned once, attention by one of two kernels, parts put together.

No argument is checked here: the package's ``attend`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from hypic_kernels.attention.combine import combine
from hypic_kernels.attention.layout import Chip, Config, HeadDims, pieces, scratch_numbers
from hypic_kernels.attention.plan import Plan
from hypic_kernels.attention.triton import _attend
from hypic_kernels.attention.turn import ready_keys, turn
from hypic_kernels.launch import Launch

_LOG2_E = 1.4426950408889634
CHAINS_AT_ONCE = 64
"""Whose keys are counted at once: the same for any number of chains, so that no step needs a kernel of its own."""


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """A device as layouts see it; the interpreter has room for all."""
    if device.type != "cuda":
        return Chip(shared_bytes=1 << 30, runs_hopper=False)
    index = torch.cuda.current_device() if device.index is None else device.index
    about = triton.runtime.driver.active.utils.get_device_properties(index)
    is_hopper = torch.cuda.get_device_capability(index) == (9, 0) and _has_gluon()
    return Chip(int(about["multiprocessor_count"]), int(about["max_shared_mem"]), is_hopper)


def _has_gluon() -> bool:
    """Whether this Triton has what ``hopper.py`` is written in."""
    try:
        from hypic_kernels.attention import hopper
    except ImportError:
        return False
    return hopper is not None


@functools.cache
def constants(dims: HeadDims, num_key_heads: int, tile: int, config: Config) -> Mapping[str, Any]:
    """What the kernel is compiled for, but types and what the plan says."""
    half, _, block_a, block_b = dims.key_pieces
    value_a, value_b = pieces(dims.value_dim)
    return {
        "KEY_HEADS": num_key_heads,
        "GROUP": dims.group,
        "HALF": dims.half,
        "REST_A": min(block_a, dims.rest),
        "REST_B": dims.rest - min(block_a, dims.rest),
        "VALUE_A": min(value_a, dims.value_dim),
        "VALUE_B": dims.value_dim - min(value_a, dims.value_dim),
        "BLOCK_HALF": half,
        "BLOCK_A": block_a,
        "BLOCK_B": block_b,
        "BLOCK_VA": value_a,
        "BLOCK_VB": value_b,
        "HEADS": config.num_heads(tile, dims.group),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "LATENT": dims.is_latent,
        "IS_READY": config.turns_once and dims.rotary_dim > 0,
        "PRECISION": config.precision,
        "STAGES": config.num_stages,
    }


def launches(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    out: Tensor,
    dims: HeadDims,
    config: Config,
    scratch: Tensor | None = None,
) -> Iterator[Launch]:
    """Keys turned once if ``config`` says so, attention, parts put together if there are any."""
    key_heads, num_chains = keys.shape[1], plan.starts.shape[0]
    ready, parts, logs = keys, out, out
    if config.turns_once and cos is not None and sin is not None:
        ready = ready_keys(keys, plan, dims)
        yield turn(keys, plan, cos, sin, dims, ready)
    if plan.is_split:
        parts, logs = room_for_parts(plan, out, scratch)
    blocks = -(-dims.group // config.num_heads(plan.tile, dims.group))
    arguments = (
        q, keys, values, keys if cos is None else cos, keys if sin is None else sin, ready,
        plan.slots, plan.slots if plan.key_positions is None else plan.key_positions,
        plan.starts, plan.lengths, plan.positions, plan.tile_chain, plan.tile_first, plan.tile_count, plan.tile_parts,
        plan.part_tile, plan.part_begin, plan.part_end, out, parts, logs,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        ready.stride(0), out.stride(0), out.stride(1), num_chains, scale * _LOG2_E,
    )  # fmt: skip
    grid = (plan.part_tile.shape[0] * key_heads * blocks,)
    if config.hopper:
        yield _by_hand(grid, arguments, plan, dims, key_heads, config)
    else:
        yield _by_triton(grid, arguments, plan, dims, key_heads, config)
    if plan.is_split:
        yield combine(parts, logs, plan, out)


def _by_triton(
    grid: tuple[int, ...], arguments: tuple[Any, ...], plan: Plan, dims: HeadDims, key_heads: int, config: Config
) -> Launch:
    variant = {
        "IS_SPLIT": plan.is_split, "TURNS": dims.rotary_dim > 0, "HAS_KEY_POSITIONS": plan.key_positions is not None,
        "BLOCK_C": CHAINS_AT_ONCE, "TILE": plan.tile,
    }  # fmt: skip
    return Launch(
        _attend, grid, arguments, {**variant, **constants(dims, key_heads, plan.tile, config)}, config.num_warps
    )


def _by_hand(
    grid: tuple[int, ...], arguments: tuple[Any, ...], plan: Plan, dims: HeadDims, key_heads: int, config: Config
) -> Launch:
    from hypic_kernels.attention import hopper

    without_key_positions = (*arguments[:7], *arguments[8:])
    constants = {
        "KEY_HEADS": key_heads, "GROUP": dims.group, "HEADS": config.num_heads(plan.tile, dims.group),
        "HALF": dims.half, "WIDTH": dims.key_dim, "VALUE": dims.value_dim, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_C": CHAINS_AT_ONCE, "TILE": plan.tile,
        "WARPS": config.num_warps,
    }  # fmt: skip
    return Launch(hopper._attend, grid, without_key_positions, constants, config.num_warps)


def room_for_parts(plan: Plan, out: Tensor, scratch: Tensor | None) -> tuple[Tensor, Tensor]:
    """Results ``[P, tile, H, V]`` and logarithms ``[P, tile, H]`` of parts, flat."""
    (_, num_heads, value_dim), rows = out.shape, plan.part_tile.shape[0] * plan.tile
    numbers, ends = (
        scratch_numbers(plan.part_tile.shape[0], plan.tile, num_heads, value_dim),
        rows * num_heads * value_dim,
    )
    scratch = torch.empty(numbers, dtype=torch.float32, device=out.device) if scratch is None else scratch
    return scratch[:ends], scratch[ends:numbers]


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: Plan,
    cos: Tensor | None,
    sin: Tensor | None,
    scale: float,
    out: Tensor,
    dims: HeadDims,
    config: Config,
    scratch: Tensor | None = None,
) -> None:
    """The twin of ``reference.attend``, in fp32 from tiles of the keys' type; ``out`` must not overlap an input."""
    if plan.tile_count.shape[0]:
        for launch in launches(q, keys, values, plan, cos, sin, scale, out, dims, config, scratch):
            launch.run()

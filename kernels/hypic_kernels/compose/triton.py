"""The walk along chains of affine maps as one kernel: a program per chain, head and block of state columns.

Columns of ``S`` do not meet in ``T S + B``, so a program keeps its block ``[K, block_v]`` of the state on the chip from
the first map of its chain to the last, streams the transitions past it, and needs nobody else. What it computes stands
in ``reference.py``; why it is arranged so, in README.md. This file checks no argument: the package's ``compose`` does.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hypic_kernels.compose.chains import IDENTITY, Chains, Turns
from hypic_kernels.compose.layout import Config, Precision, default_config, kind_of, padded, pitch_of
from hypic_kernels.launch import Launch

# A kernel sees no other globals than these.
_IDENTITY = tl.constexpr(IDENTITY)


def _jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, with a type whether or not a type checker can see Triton."""
    return triton.jit(function)


@_jit
def _read(
    first: tl.tensor,
    second: tl.tensor,
    pitch_first: tl.tensor,
    pitch_second: tl.tensor,
    is_second: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    SOURCES: tl.constexpr,
) -> tl.tensor:
    """Rows ``row + rows`` of the source an element lies in, as fp32; zero where masked out."""
    if SOURCES == "one":
        tile = tl.load(first + row * pitch_first + rows * pitch_first + columns, mask=mask, other=0.0)
    elif SOURCES == "alike":
        pitch = tl.where(is_second, pitch_second, pitch_first)
        base = tl.where(is_second, second + row * pitch_second, first + row * pitch_first)
        tile = tl.load(base + rows * pitch + columns, mask=mask, other=0.0)
    else:
        # Two types: no pointer can stand for both. The load that is masked out moves no bytes.
        here = first + row * pitch_first + rows * pitch_first + columns
        there = second + row * pitch_second + rows * pitch_second + columns
        tile = tl.load(here, mask=mask & (is_second == 0), other=0.0).to(tl.float32)
        tile += tl.load(there, mask=mask & is_second, other=0.0).to(tl.float32)
    return tile.to(tl.float32)


@_jit
def _halves(tile: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tuple:
    """Upper and lower half of the rows."""
    return tl.split(tl.permute(tl.reshape(tile, (2, ROWS // 2, COLUMNS)), (1, 2, 0)))


@_jit
def _multiply(
    first: tl.tensor,
    second: tl.tensor,
    pitch_first: tl.tensor,
    pitch_second: tl.tensor,
    is_second: tl.tensor,
    row: tl.tensor,
    is_stored: tl.tensor,
    state: tl.tensor,
    total: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICES: tl.constexpr,
    SOURCES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """``total + T[:, START:START + WIDTH] state``, where ``state`` is those ``WIDTH`` rows of ``S``."""
    if SLICES == 1:
        rows = tl.arange(0, BLOCK_K)[:, None]
        columns = START + tl.arange(0, WIDTH)[None, :]
        mask = (rows < K) & (columns < K) & is_stored
        tile = _read(first, second, pitch_first, pitch_second, is_second, row, rows, columns, mask, SOURCES)
        total = tl.dot(tile, state, acc=total, input_precision=PRECISION)
    else:
        half: tl.constexpr = WIDTH // 2
        upper, lower = _halves(state, WIDTH, BLOCK_V)
        total = _multiply(
            first, second, pitch_first, pitch_second, is_second, row, is_stored, upper, total,
            K, BLOCK_K, BLOCK_V, START, half, SLICES // 2, SOURCES, PRECISION,
        )  # fmt: skip
        total = _multiply(
            first, second, pitch_first, pitch_second, is_second, row, is_stored, lower, total,
            K, BLOCK_K, BLOCK_V, START + half, half, SLICES // 2, SOURCES, PRECISION,
        )  # fmt: skip
    return total


@_jit
def _turned(
    tile: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    pitch_first: tl.tensor,
    pitch_second: tl.tensor,
    is_second: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    turn: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HALF: tl.constexpr,
    SOURCES: tl.constexpr,
) -> tl.tensor:
    """An end state's ``tile`` rotated by the angles of row ``turn``; partners are read again, from the cache."""
    is_first, is_turned = rows < HALF, (rows < 2 * HALF) & (turn >= 0)
    partner = tl.where(is_first, rows + HALF, rows - HALF)
    angle = turn.to(tl.int64) * HALF + tl.where(is_first, rows, rows - HALF)
    other = _read(first, second, pitch_first, pitch_second, is_second, row, partner, columns, mask & is_turned, SOURCES)
    along = tl.load(cos + angle, mask=is_turned, other=1.0)
    across = tl.load(sin + angle, mask=is_turned, other=0.0)
    return tile * along + tl.where(is_first, -other, other) * across


@_jit
def _walk(
    cu_elements: tl.tensor,
    elements: tl.tensor,
    initial: tl.tensor,
    initial_index: tl.tensor,
    before: tl.tensor,
    final: tl.tensor,
    t_first: tl.tensor,
    t_second: tl.tensor,
    b_first: tl.tensor,
    b_second: tl.tensor,
    turns: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    t_pitch_first: tl.tensor,
    t_pitch_second: tl.tensor,
    b_pitch_first: tl.tensor,
    b_pitch_second: tl.tensor,
    initial_pitch: tl.tensor,
    H: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    HALF: tl.constexpr,
    KIND: tl.constexpr,
    T_SOURCES: tl.constexpr,
    B_SOURCES: tl.constexpr,
    ADDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One chain, one head, ``BLOCK_V`` columns. Neighbours share a head, so that they find its transitions in L2.

    A dense transition mixes all rows of the state; others leave them apart, and a program takes ``BLOCK_K`` of them.
    """
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    num_parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    head = (program // (num_blocks * num_parts)) % H
    chain = program // (num_blocks * num_parts) // H
    rows = (program // num_blocks % num_parts) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    columns = (program % num_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inside = (rows < K) & (columns < V)
    places = rows * V + columns

    slot = tl.load(initial_index + chain)
    source = initial + (slot.to(tl.int64) * H + head) * K * initial_pitch
    state = tl.load(source + rows * initial_pitch + columns, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    for number in tl.range(tl.load(cu_elements + chain), tl.load(cu_elements + chain + 1), num_stages=STAGES):
        element = elements + number * 4
        is_second = tl.load(element) != 0
        transition = tl.load(element + 1)
        end_state = tl.load(element + 2)
        output = tl.load(element + 3)
        target = before + (output.to(tl.int64) * H + head) * (K * V)
        tl.store(target + places, state, mask=inside & (output >= 0))

        row = transition.to(tl.int64) * H + head
        is_stored = transition >= 0
        if KIND == "dense":
            after = _multiply(
                t_first, t_second, t_pitch_first, t_pitch_second, is_second, row * K, is_stored, state,
                tl.zeros((BLOCK_K, BLOCK_V), tl.float32),
                K, BLOCK_K, BLOCK_V, 0, BLOCK_K, SLICES, T_SOURCES, PRECISION,
            )  # fmt: skip
        else:
            # One number per head is a row of one column; a diagonal one row of K columns, laid upright.
            along = rows if KIND == "diagonal" else rows * 0
            mask = (rows < K) & is_stored
            factor = _read(t_first, t_second, t_pitch_first, t_pitch_second, is_second, row, 0, along, mask, T_SOURCES)
            after = factor * state
        # Not a product with zero: what a zero transition shuts out may be NaN.
        state = tl.where(is_stored, after, tl.where(transition == _IDENTITY, state, 0.0))
        if ADDS:
            row = (end_state.to(tl.int64) * H + head) * K
            added = _read(
                b_first, b_second, b_pitch_first, b_pitch_second, is_second, row, rows, columns, inside, B_SOURCES
            )
            if HALF > 0:
                added = _turned(
                    added, b_first, b_second, b_pitch_first, b_pitch_second, is_second, row, rows, columns, inside,
                    tl.load(turns + number), cos, sin, HALF, B_SOURCES,
                )  # fmt: skip
            state += added
    tl.store(final + (chain.to(tl.int64) * H + head) * (K * V) + places, state, mask=inside)


def _sources(first: Tensor, second: Tensor) -> str:
    if first is second:
        return "one"
    return "alike" if first.dtype == second.dtype else "mixed"


def _map_bytes(*sources: Tensor) -> int:
    """Bytes on the chip per number of a map: sources of different types need a buffer each."""
    return sum({tensor.dtype: tensor.element_size() for tensor in sources}.values())


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take."""
    if device.type != "cuda":
        return 1 << 30
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def compose(
    chains: Chains,
    transitions: Sequence[Tensor],
    end_states: Sequence[Tensor] | None,
    initial: Tensor,
    before: Tensor,
    final: Tensor,
    precision: Precision = "ieee",
    config: Config | None = None,
    turns: Turns | None = None,
) -> None:
    """The twin of ``reference.compose``, in fp32; outputs must not overlap inputs."""
    num_heads, key_dim, value_dim = final.shape[1:]
    kind = kind_of(transitions[0])
    states = end_states or (initial,)
    t_first, t_second, b_first, b_second = transitions[0], transitions[-1], states[0], states[-1]
    if config is None:
        room = _shared_bytes(final.device)
        config = default_config(kind, key_dim, value_dim, precision, _map_bytes(t_first, t_second), room)
    block_k = padded(key_dim) if kind == "dense" else min(config.block_k, padded(key_dim))
    num_programs = chains.num_chains * num_heads * -(-value_dim // config.block_v) * -(-key_dim // block_k)
    rows, cos, sin = (chains.elements, initial, initial) if turns is None else turns
    arguments = (
        chains.cu_elements, chains.elements, initial, chains.initial_index, before, final,
        t_first, t_second, b_first, b_second, rows, cos, sin,
        pitch_of(t_first), pitch_of(t_second), pitch_of(b_first), pitch_of(b_second), pitch_of(initial), num_heads,
    )  # fmt: skip
    constants = {
        "K": key_dim, "V": value_dim, "HALF": 0 if turns is None else cos.shape[1], "KIND": kind,
        "T_SOURCES": _sources(t_first, t_second), "B_SOURCES": _sources(b_first, b_second),
        "ADDS": end_states is not None, "PRECISION": precision, "BLOCK_K": block_k, "BLOCK_V": config.block_v,
        "SLICES": config.num_slices, "STAGES": config.num_stages,
    }  # fmt: skip
    Launch(_walk, (num_programs,), arguments, constants, config.num_warps).run()

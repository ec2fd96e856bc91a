"""Parts of a token's attention put together: each over some of the keys, weighed by the sum of its weights.

A part brings its result ``o`` and ``l = log2 sum exp2(score)``; together they are ``sum exp2(l) o / sum exp2(l)``.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton
import triton.language as tl
from torch import Tensor

from hypic_kernels.attention.jit import jit
from hypic_kernels.attention.plan import Plan
from hypic_kernels.launch import Launch

HEADS_AT_ONCE = 8


@jit
def _combine(
    parts: tl.tensor,
    logs: tl.tensor,
    tile_first: tl.tensor,
    tile_count: tl.tensor,
    out: tl.tensor,
    part_stride: tl.tensor,
    log_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    num_splits: tl.tensor,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """``BLOCK_H`` heads of one token: their parts, each weighed by the sum of its weights."""
    num_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    tile = program // num_blocks // TILE
    within = program // num_blocks % TILE
    heads = program % num_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    token = (tl.load(tile_first + tile) + within).to(tl.int64)
    valid = (heads < HEADS) & (within < tl.load(tile_count + tile))
    rows = token * HEADS + heads
    top = tl.full((BLOCK_H,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    mixed = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    channels = tl.arange(0, BLOCK_V)[None, :]
    inside = valid[:, None] & (channels < V)
    logs += rows
    places = parts + rows[:, None] * V + channels
    for _ in tl.range(0, num_splits, num_stages=3):
        log = tl.load(logs, mask=valid, other=-float("inf"))
        part = tl.load(places, mask=inside & (log > -float("inf"))[:, None], other=0.0)
        higher = tl.maximum(top, log)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        shrink, share = tl.exp2(top - shift), tl.exp2(log - shift)
        mixed = mixed * shrink[:, None] + part * share[:, None]
        total = total * shrink + share
        top = higher
        logs += log_stride
        places += part_stride
    mixed = tl.where((total > 0)[:, None], mixed / total[:, None], 0.0)
    places = out + (token * out_stride + heads * out_head_stride)[:, None] + channels
    tl.store(places, mixed.to(out.dtype.element_ty), mask=inside)


def combine(parts: Tensor, logs: Tensor, plan: Plan, out: Tensor) -> Launch:
    """Writes the rows of ``out [N, H, V]`` that a tile names; ``parts [splits, N, H, V]``, ``logs [splits, N, H]``."""
    num_tokens, (_, num_heads, value_dim) = len(plan.positions), out.shape
    block_h, size = min(HEADS_AT_ONCE, triton.next_power_of_2(num_heads)), num_tokens * num_heads
    programs = len(plan.tile_count) * plan.tile * triton.cdiv(num_heads, block_h)
    arguments = (
        parts, logs, plan.tile_first, plan.tile_count, out, size * value_dim, size, out.stride(0), out.stride(1),
        plan.num_splits,
    )  # fmt: skip
    block_v = triton.next_power_of_2(value_dim)
    constants = {"TILE": plan.tile, "HEADS": num_heads, "V": value_dim, "BLOCK_H": block_h, "BLOCK_V": block_v}
    return Launch(_combine, (programs,), arguments, constants, num_warps=4)

"""Parts of a token's attention put together: each over some of the keys, weighed by the sum of its weights.

A part brings its result ``o`` and ``l = log2 sum exp2(score)``; together they are ``sum exp2(l) o / sum exp2(l)``.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.attention.jit import jit
from hypic_kernels.attention.plan import Plan
from hypic_kernels.launch import Launch

PARTS_AT_ONCE = 64
CHANNELS_AT_ONCE = 32
"""Both of one row of few: they have many parts, and programs must be enough. Many rows have few parts each."""


@jit
def _combine(
    parts: tl.tensor,
    logs: tl.tensor,
    tile_first: tl.tensor,
    tile_count: tl.tensor,
    tile_part: tl.tensor,
    tile_parts: tl.tensor,
    out: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Some channels of one token and head: their parts, each weighed by the sum of its weights."""
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    tile = program // (num_blocks * HEADS * TILE)
    row = program // num_blocks % (HEADS * TILE)
    number = tl.load(tile_parts + tile)
    # A tile of one part has been written where it belongs.
    if (number > 1) & (row // HEADS < tl.load(tile_count + tile)):
        token = (tl.load(tile_first + tile) + row // HEADS).to(tl.int64)
        channels = program % num_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        rows = tl.load(tile_part + tile).to(tl.int64) * (TILE * HEADS) + row
        top = -float("inf")
        total = 0.0
        mixed = tl.zeros((BLOCK_V,), tl.float32)
        for start in tl.range(0, number, BLOCK_P, num_stages=2):
            here = start + tl.arange(0, BLOCK_P)
            places = rows + here.to(tl.int64) * (TILE * HEADS)
            log = tl.load(logs + places, mask=here < number, other=-float("inf"))
            inside = (here < number)[:, None] & (channels < V)[None, :]
            part = tl.load(parts + places[:, None] * V + channels[None, :], mask=inside, other=0.0)
            # A part that has seen nothing was not written: what lies there is anything, NaN too.
            part = tl.where((log > -float("inf"))[:, None], part, 0.0)
            higher = tl.maximum(top, tl.max(log, 0))
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            shrink, share = tl.exp2(top - shift), tl.exp2(log - shift)
            mixed = mixed * shrink + tl.sum(part * share[:, None], 0)
            total = total * shrink + tl.sum(share, 0)
            top = higher
        mixed = tl.where(total > 0, mixed / total, 0.0)
        places = out + token * out_stride + row % HEADS * out_head_stride + channels
        tl.store(places, mixed.to(out.dtype.element_ty), mask=channels < V)


def combine(parts: Tensor, logs: Tensor, plan: Plan, out: Tensor) -> Launch:
    """Writes the rows of ``out [N, H, V]`` of tiles with several parts; ``parts [P, tile, H, V]``, ``logs [P, tile,
    H]``."""
    _, num_heads, value_dim = out.shape
    block_v = 1 << (value_dim - 1).bit_length()
    block_v = min(block_v, CHANNELS_AT_ONCE) if plan.tile == 1 else block_v
    programs = plan.tile_count.shape[0] * plan.tile * num_heads * -(-value_dim // block_v)
    arguments = (
        parts, logs, plan.tile_first, plan.tile_count, plan.tile_part, plan.tile_parts, out,
        out.stride(0), out.stride(1),
    )  # fmt: skip
    constants = {
        "TILE": plan.tile, "HEADS": num_heads, "V": value_dim,
        "BLOCK_P": PARTS_AT_ONCE if plan.tile == 1 else 8, "BLOCK_V": block_v,
    }  # fmt: skip
    return Launch(_combine, (programs,), arguments, constants, num_warps=4 if plan.tile == 1 else 2)

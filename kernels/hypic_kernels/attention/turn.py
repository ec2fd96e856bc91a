"""Keys turned before they are asked, into a scratch of the channels that turn: for chains that many tiles read.

Turning a key when it is read costs registers, a passage through shared memory and a read of two tables, in every tile
that sees it. Doing it once costs a launch and a row of scratch a key, which is gone after the call.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import torch
import triton
import triton.language as tl
from torch import Tensor

from hypic_kernels.attention.jit import jit
from hypic_kernels.attention.layout import HeadDims
from hypic_kernels.attention.plan import Plan
from hypic_kernels.launch import Launch

KEYS_AT_ONCE = 32


@jit
def _turn(
    keys: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    key_positions: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    num_slots: tl.tensor,
    num_chains: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_KEY_POSITIONS: tl.constexpr,
) -> None:
    """``BLOCK_N`` entries of the plan's slots, one key head. An entry belongs to the last chain that starts before."""
    program = tl.program_id(0)
    key_head = program % KEY_HEADS
    entries = program // KEY_HEADS * BLOCK_N + tl.arange(0, BLOCK_N)
    chains = tl.arange(0, BLOCK_C)
    begin = tl.load(starts + chains, mask=chains < num_chains, other=0)
    length = tl.load(lengths + chains, mask=chains < num_chains, other=0)
    is_before = (begin[None, :] <= entries[:, None]) & (length > 0)[None, :]
    own = tl.max(tl.where(is_before, begin[None, :], -1), 1)
    own_length = tl.max(tl.where(begin[None, :] == own[:, None], length[None, :], 0), 1)
    index = entries - own
    known = (own >= 0) & (index < own_length) & (entries < num_slots)

    turns = tl.load(key_positions + entries, mask=known, other=0) if HAS_KEY_POSITIONS else tl.where(known, index, 0)
    channels = tl.arange(0, BLOCK_HALF)[None, :]
    inside = known[:, None] & (channels < HALF)
    angles = turns[:, None] * HALF + channels
    c = tl.load(cos + angles, mask=inside, other=0.0)
    s = tl.load(sin + angles, mask=inside, other=0.0)
    slot = tl.load(slots + entries, mask=known, other=0).to(tl.int64)
    places = keys + slot[:, None] * key_stride + key_head.to(tl.int64) * key_head_stride + channels
    first = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=inside, other=0.0).to(tl.float32)
    rows = out + (entries.to(tl.int64) * KEY_HEADS + key_head)[:, None] * (2 * BLOCK_HALF) + channels
    tl.store(rows, (first * c - second * s).to(out.dtype.element_ty), mask=known[:, None])
    tl.store(rows + BLOCK_HALF, (second * c + first * s).to(out.dtype.element_ty), mask=known[:, None])


def ready_keys(keys: Tensor, plan: Plan, dims: HeadDims) -> Tensor:
    """Room for keys that are turned: ``[L, Hkv, 2 * padded half]`` for the ``L`` slots of the plan."""
    return torch.empty((len(plan.slots), keys.shape[1], 2 * dims.key_pieces[0]), dtype=keys.dtype, device=keys.device)


def turn(keys: Tensor, plan: Plan, cos: Tensor, sin: Tensor, dims: HeadDims, out: Tensor) -> Launch:
    """Writes what turns of every key into ``out``, zero in channels that are padding; no rows that no chain holds."""
    num_slots, num_chains, key_heads = len(plan.slots), len(plan.starts), keys.shape[1]
    arguments = (
        keys, cos, sin, plan.slots, plan.slots if plan.key_positions is None else plan.key_positions,
        plan.starts, plan.lengths, out, num_slots, num_chains, keys.stride(0), keys.stride(1),
    )  # fmt: skip
    constants = {
        "KEY_HEADS": key_heads,
        "HALF": dims.half,
        "BLOCK_HALF": dims.key_pieces[0],
        "BLOCK_N": KEYS_AT_ONCE,
        "BLOCK_C": triton.next_power_of_2(num_chains),
        "HAS_KEY_POSITIONS": plan.key_positions is not None,
    }
    return Launch(_turn, (triton.cdiv(num_slots, KEYS_AT_ONCE) * key_heads,), arguments, constants, num_warps=4)

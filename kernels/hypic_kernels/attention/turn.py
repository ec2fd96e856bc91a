"""Keys turned before they are asked, into a scratch of the channels that turn: for chains that many tiles read.

Turning a key when it is read costs registers, a passage through shared memory and a read of two tables, in every tile
that sees it. Doing it once costs a launch and a row of scratch a key, which is gone after the call.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import torch
import triton.language as tl
from torch import Tensor

from hypic_kernels.attention.jit import jit
from hypic_kernels.attention.layout import HeadDims
from hypic_kernels.attention.plan import Plan
from hypic_kernels.launch import Launch

KEYS_AT_ONCE = 32
CHAINS_AT_ONCE = 16
"""Among which the owner of a key is looked for at once: the same for any number of chains, as in ``launching.py``."""
MOST_PROGRAMS = 1024
"""For each key head; room is for more keys than there are, and an empty program costs as much as a launch."""


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
    num_keys: tl.tensor,
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
    """``BLOCK_N`` keys of all chains in a row, one key head, and as many again a round of programs later."""
    key_head = tl.program_id(0) % KEY_HEADS
    first_key = tl.program_id(0) // KEY_HEADS * BLOCK_N
    channels = tl.arange(0, BLOCK_HALF)[None, :]
    lengths_of = tl.zeros((BLOCK_C,), tl.int32)
    for first_chain in range(0, num_chains, BLOCK_C):
        chains = first_chain + tl.arange(0, BLOCK_C)
        lengths_of += tl.load(lengths + chains, mask=chains < num_chains, other=0)
    total = tl.minimum(tl.sum(lengths_of, 0), num_keys)
    for base in range(first_key, total, tl.num_programs(0) // KEY_HEADS * BLOCK_N):
        entries = base + tl.arange(0, BLOCK_N)
        known = entries < total
        # An entry lies within one chain at most; every other adds nothing.
        places, index = tl.zeros((BLOCK_N,), tl.int32), tl.zeros((BLOCK_N,), tl.int32)
        passed = tl.sum(tl.zeros((BLOCK_C,), tl.int32), 0)
        for first_chain in range(0, num_chains, BLOCK_C):
            chains = first_chain + tl.arange(0, BLOCK_C)
            length = tl.load(lengths + chains, mask=chains < num_chains, other=0)
            begin = tl.load(starts + chains, mask=chains < num_chains, other=0)
            ends = passed + tl.cumsum(length, 0)
            within = entries[:, None] - (ends - length)[None, :]
            is_here = (within >= 0) & (within < length[None, :])
            index += tl.sum(tl.where(is_here, within, 0), 1)
            places += tl.sum(tl.where(is_here, begin[None, :] + within, 0), 1)
            passed += tl.sum(length, 0)
        turns = tl.load(key_positions + places, mask=known, other=0) if HAS_KEY_POSITIONS else tl.where(known, index, 0)
        inside = known[:, None] & (channels < HALF)
        angles = turns[:, None] * HALF + channels
        c = tl.load(cos + angles, mask=inside, other=0.0)
        s = tl.load(sin + angles, mask=inside, other=0.0)
        slot = tl.load(slots + places, mask=known, other=0).to(tl.int64)
        stored = keys + slot[:, None] * key_stride + key_head.to(tl.int64) * key_head_stride + channels
        first = tl.load(stored, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(stored + HALF, mask=inside, other=0.0).to(tl.float32)
        rows = out + (entries.to(tl.int64) * KEY_HEADS + key_head)[:, None] * (2 * BLOCK_HALF) + channels
        tl.store(rows, (first * c - second * s).to(out.dtype.element_ty), mask=known[:, None])
        tl.store(rows + BLOCK_HALF, (second * c + first * s).to(out.dtype.element_ty), mask=known[:, None])


def ready_keys(keys: Tensor, plan: Plan, dims: HeadDims) -> Tensor:
    """Room for keys that are turned: ``[L, Hkv, 2 * padded half]`` for the keys of one chain after the other."""
    return torch.empty((plan.most_keys, keys.shape[1], 2 * dims.key_pieces[0]), dtype=keys.dtype, device=keys.device)


def turn(keys: Tensor, plan: Plan, cos: Tensor, sin: Tensor, dims: HeadDims, out: Tensor) -> Launch:
    """Writes what turns of every key into ``out``, zero in channels that are padding; no rows that no chain holds."""
    num_keys, num_chains, key_heads = out.shape[0], plan.starts.shape[0], keys.shape[1]
    arguments = (
        keys, cos, sin, plan.slots, plan.slots if plan.key_positions is None else plan.key_positions,
        plan.starts, plan.lengths, out, num_keys, num_chains, keys.stride(0), keys.stride(1),
    )  # fmt: skip
    constants = {
        "KEY_HEADS": key_heads,
        "HALF": dims.half,
        "BLOCK_HALF": dims.key_pieces[0],
        "BLOCK_N": KEYS_AT_ONCE,
        "BLOCK_C": CHAINS_AT_ONCE,
        "HAS_KEY_POSITIONS": plan.key_positions is not None,
    }
    return Launch(
        _turn, (min(MOST_PROGRAMS, -(-num_keys // KEYS_AT_ONCE)) * key_heads,), arguments, constants, num_warps=4
    )

"""The short convolution with carried history as a kernel: a program per block of tokens and channels.

Every tap's input is found by index, in this step's inputs or in a stored tail. What becomes the new tails is gathered
in the same launch, into scratch, and put into place by a second one: a tail may be read by any token of the first.
Few tokens are one program for some channels, and one launch.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.conv.sources import FEW_CHANNELS, FEW_KEPT, FEW_TOKENS, NOTHING, Config
from hypic_kernels.launch import Launch, jit, jit_for_any

# A kernel sees no other globals than these.
_NOTHING = tl.constexpr(NOTHING)


@jit
def _find(
    x: tl.tensor,
    tails: tl.tensor,
    source: tl.tensor,
    pitch: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    C: tl.tensor,
) -> tl.tensor:
    """Inputs ``[rows, channels]`` by source, in fp32; the load that is masked out moves no bytes."""
    is_row = source >= 0
    is_stored = (source < 0) & (source != _NOTHING)
    row = tl.where(is_row, source, 0).to(tl.int64)[:, None]
    kept = tl.where(is_stored, -1 - source, 0).to(tl.int64)[:, None]
    here = tl.load(x + row * pitch + channels, mask=mask & is_row[:, None], other=0.0).to(tl.float32)
    there = tl.load(tails + kept * C + channels, mask=mask & is_stored[:, None], other=0.0).to(tl.float32)
    return here + there


@jit
def _total(
    x: tl.tensor,
    tails: tl.tensor,
    sources: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    N: tl.tensor,
    C: tl.tensor,
    pitch: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """The convolution at ``rows`` of the output, behind its activation, in fp32."""
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIAS:
        total += tl.load(bias + channels, mask=channels < C, other=0.0).to(tl.float32)
    for tap in tl.static_range(W):
        source = tl.load(sources + rows * W + tap, mask=rows < N, other=_NOTHING)
        factor = tl.load(weight + channels * weight_channel + tap * weight_tap, mask=channels < C, other=0.0)
        total += _find(x, tails, source, pitch, channels, mask, C) * factor.to(tl.float32)
    if SILU:
        total *= tl.sigmoid(total)
    return total


@jit_for_any("N", "R")
def _convolve(
    x: tl.tensor,
    tails: tl.tensor,
    sources: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    write_sources: tl.tensor,
    scratch: tl.tensor,
    N: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    pitch: tl.tensor,
    out_pitch: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    num_blocks = (N + ROWS - 1) // ROWS
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    if block < num_blocks:
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < N)[:, None] & (channels < C)
        total = _total(
            x, tails, sources, weight, bias, rows, channels, mask, N, C, pitch, weight_channel, weight_tap, W, BIAS,
            SILU, ROWS, CHANNELS,
        )  # fmt: skip
        # A name that both branches assign must have one type, and ``x`` and tails may differ.
        output = out + rows.to(tl.int64)[:, None] * out_pitch + channels
        tl.store(output, total.to(out.dtype.element_ty), mask=mask)
    else:
        rows = (block - num_blocks) * ROWS + tl.arange(0, ROWS)
        source = tl.load(write_sources + rows, mask=rows < R, other=_NOTHING)
        mask = (rows < R)[:, None] & (channels < C)
        found = _find(x, tails, source, pitch, channels, mask, C)
        kept = scratch + rows.to(tl.int64)[:, None] * C + channels
        tl.store(kept, found.to(scratch.dtype.element_ty), mask=mask)


@jit_for_any("R")
def _put(
    scratch: tl.tensor,
    tails: tl.tensor,
    write_slots: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Rows of scratch, ``KEPT`` per slot, to their slots; negative slots are padding."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    slot = tl.load(write_slots + rows // KEPT, mask=rows < R, other=-1)
    mask = (slot >= 0)[:, None] & (channels < C)
    found = tl.load(scratch + rows.to(tl.int64)[:, None] * C + channels, mask=mask)
    place = tl.where(slot >= 0, slot, 0).to(tl.int64) * KEPT + rows % KEPT
    tl.store(tails + place[:, None] * C + channels, found, mask=mask)


@jit_for_any("N", "R")
def _convolve_few(
    x: tl.tensor,
    tails: tl.tensor,
    sources: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    write_sources: tl.tensor,
    write_slots: tl.tensor,
    N: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    pitch: tl.tensor,
    out_pitch: tl.tensor,
    weight_channel: tl.tensor,
    weight_tap: tl.tensor,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """All tokens and all new tails of some channels: nobody else reads what is overwritten here."""
    channels = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    rows, kept = tl.arange(0, ROWS), tl.arange(0, KEPT)
    mask = (rows < N)[:, None] & (channels < C)
    total = _total(
        x, tails, sources, weight, bias, rows, channels, mask, N, C, pitch, weight_channel, weight_tap, W, BIAS, SILU,
        ROWS, CHANNELS,
    )  # fmt: skip
    source = tl.load(write_sources + kept, mask=kept < R, other=_NOTHING)
    slot = tl.load(write_slots + kept // (W - 1), mask=kept < R, other=-1)
    found = _find(x, tails, source, pitch, channels, (kept < R)[:, None] & (channels < C), C)
    # A tail may be read by one thread and written by another.
    tl.debug_barrier()
    tl.store(out + rows.to(tl.int64)[:, None] * out_pitch + channels, total.to(out.dtype.element_ty), mask=mask)
    place = tl.where(slot >= 0, slot, 0).to(tl.int64) * (W - 1) + kept % (W - 1)
    is_kept = (slot >= 0)[:, None] & (channels < C)
    tl.store(tails + place[:, None] * C + channels, found.to(tails.dtype.element_ty), mask=is_kept)


def convolve_few(
    x: Tensor,
    tails: Tensor,
    sources: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    out: Tensor,
    write_sources: Tensor,
    write_slots: Tensor,
) -> Launch:
    """What both launches of ``convolve`` do, for so few tokens and tails as ``is_few`` says."""
    (num_tokens, num_channels), width, num_rows = out.shape, sources.shape[1], write_sources.numel()
    arguments = (
        x, tails, sources, weight, bias, out, write_sources, write_slots, num_tokens, num_rows, num_channels,
        x.stride(0), out.stride(0), *weight.stride(),
    )  # fmt: skip
    constants = {
        "W": width, "BIAS": bias is not None, "SILU": has_silu, "ROWS": FEW_TOKENS, "KEPT": FEW_KEPT,
        "CHANNELS": FEW_CHANNELS,
    }  # fmt: skip
    return Launch(_convolve_few, (-(-num_channels // FEW_CHANNELS),), arguments, constants, 4)


def convolve(
    x: Tensor,
    tails: Tensor,
    sources: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    has_silu: bool,
    out: Tensor,
    write_sources: Tensor,
    write_slots: Tensor,
    scratch: Tensor,
    config: Config,
) -> tuple[Launch, Launch]:
    """The twin of the reference: the first fills ``out`` and ``scratch``, the second the tails of ``write_slots``."""
    (num_tokens, num_channels), width, num_rows = out.shape, sources.shape[1], write_sources.numel()
    across = -(-num_channels // config.channels)
    num_blocks, num_kept = -(-num_tokens // config.rows), -(-num_rows // config.rows)
    layout = {"ROWS": config.rows, "CHANNELS": config.channels}
    arguments = (
        x, tails, sources, weight, bias, out, write_sources, scratch, num_tokens, num_rows, num_channels,
        x.stride(0), out.stride(0), *weight.stride(),
    )  # fmt: skip
    constants = {"W": width, "BIAS": bias is not None, "SILU": has_silu, **layout}
    moved = (scratch, tails, write_slots, num_rows, num_channels)
    return (
        Launch(_convolve, (num_blocks + num_kept, across), arguments, constants, config.num_warps),
        Launch(_put, (num_kept, across), moved, {"KEPT": width - 1, **layout}, config.num_warps),
    )

"""States from where the walk left them to slots of a pool, in one pass instead of a gather and a scatter."""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.launch import Launch, jit

NUMBERS_AT_ONCE = 4096


@jit
def _write_rows(
    source: tl.tensor,
    places: tl.tensor,
    target: tl.tensor,
    slots: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``BLOCK`` numbers of one row."""
    row, within = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, slot = tl.load(places + row).to(tl.int64), tl.load(slots + row).to(tl.int64)
    mask = (within < SIZE) & (slot >= 0)
    found = tl.load(source + place * SIZE + within, mask=mask, other=0.0)
    tl.store(target + slot * SIZE + within, found.to(target.dtype.element_ty), mask=mask)


def write_rows(source: Tensor, places: Tensor, target: Tensor, slots: Tensor) -> Launch:
    """The twin of ``reference.write_rows``; source and target are contiguous."""
    size = source[0].numel()
    block = min(NUMBERS_AT_ONCE, 1 << (size - 1).bit_length())
    grid = (places.shape[0], -(-size // block))
    return Launch(_write_rows, grid, (source, places, target, slots), {"SIZE": size, "BLOCK": block}, 4)

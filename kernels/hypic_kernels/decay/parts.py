"""Pieces of the kernels of this package: decays between tokens of a chunk, and the layer's preparation of q and k."""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl

from hypic_kernels.launch import jit


@jit
def places_of(chunk_row: tl.tensor, N: tl.tensor, C: tl.constexpr) -> tl.tuple:
    """Tokens of a chunk, 0 where there is none, and where there is one."""
    tokens = tl.load(chunk_row + tl.arange(0, C))
    real = (tokens >= 0) & (tokens < N)
    return tl.where(real, tokens, 0).to(tl.int64), real


@jit
def spread_of(decay: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """``[C, C]``: the decay of the row's token below the diagonal; sums down a column are decays between two tokens."""
    return tl.where(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], decay[:, None], 0.0)


@jit
def norm_factor(
    rows: tl.tensor,
    real: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    C: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """``1 / sqrt(mean(x^2) + eps)`` of rows of a head, ``[C, 1]``; one without a norm."""
    total = tl.zeros((C,), tl.float32)
    if NORM:
        for start in tl.range(0, K, BLOCK, num_stages=1):
            channels = (start + tl.arange(0, BLOCK))[None, :]
            x = tl.load(rows + channels, mask=real & (channels < K), other=0.0).to(tl.float32)
            if SILU:
                x *= tl.sigmoid(x)
            total += tl.sum(x * x, axis=1)
        total = tl.rsqrt(total / K + eps)
    return total[:, None]


@jit
def _scaled(
    rows: tl.tensor,
    channels: tl.tensor,
    mask: tl.tensor,
    factor: tl.tensor,
    weight: tl.tensor,
    K: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    x = tl.load(rows + channels, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        x *= tl.sigmoid(x)
    if NORM:
        x *= factor * tl.load(weight + channels, mask=(channels >= 0) & (channels < K), other=0.0).to(tl.float32)
    return x


@jit
def prepared(
    rows: tl.tensor,
    real: tl.tensor,
    channels: tl.tensor,
    factor: tl.tensor,
    weight: tl.tensor,
    cos_rows: tl.tensor,
    sin_rows: tl.tensor,
    K: tl.constexpr,
    HALF: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Channels of q or k as the recurrence takes them, in fp32; zero where there is no token or no channel.

    ``rows``, ``cos_rows`` and ``sin_rows`` point to a token's head and angles. A channel's partner in the rotation is
    loaded a second time, from the cache.
    """
    x = _scaled(rows, channels, real & (channels < K), factor, weight, K, SILU, NORM)
    if HALF > 0:
        is_first, is_turned = channels < HALF, channels < 2 * HALF
        partner = tl.where(is_first, channels + HALF, channels - HALF)
        angle = tl.where(is_first, channels, channels - HALF)
        y = _scaled(rows, partner, real & is_turned, factor, weight, K, SILU, NORM)
        cos = tl.load(cos_rows + angle, mask=real & is_turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_rows + angle, mask=real & is_turned, other=0.0).to(tl.float32)
        x = x * cos + tl.where(is_first, -y, y) * sin
    return x

"""What stands before and after chunked kernels that read tokens side by side: gathering, norms, gates, scattering.

One pass over memory each. ``gather`` brings a layer's heads, views of a wider projection, into the order of rows and
normalises them on the way; ``gate`` gives decays and strengths in that order; ``scatter`` puts outputs back where their
tokens stand, through the gated norm.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import padded
from hypic_kernels.delta.parts import gated, gates
from hypic_kernels.delta.rule import GatedNorm, Rule
from hypic_kernels.launch import Launch, jit_for_any

ROWS = 32


@jit_for_any("n")
def _gather(
    x: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    H: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    head, places = program % H, program // H * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (places < n)[:, None] & (columns < D)
    token = tl.load(tokens + places, mask=places < n, other=0).to(tl.int64)[:, None]
    tile = tl.load(x + token * x_token + head * x_head + columns, mask=inside, other=0.0).to(tl.float32)
    if NORMALISE:
        tile *= tl.rsqrt(tl.sum(tile * tile, axis=1) + eps)[:, None]
    target = out + (places.to(tl.int64)[:, None] * H + head) * D + columns
    tl.store(target, tile.to(out.dtype.element_ty), mask=inside)


@jit_for_any("n")
def _gate(
    g: tl.tensor,
    beta: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    tokens: tl.tensor,
    g_out: tl.tensor,
    beta_out: tl.tensor,
    n: tl.tensor,
    H: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    beta_scale: tl.tensor,
    RAW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    places, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    real = (places < n)[:, None] & (columns < H)
    token = tl.load(tokens + places, mask=places < n, other=0).to(tl.int64)[:, None]
    head = tl.minimum(columns, H - 1)
    decay, strength = gates(
        g, beta, A_log, dt_bias, token * g_token + head * g_head, token * beta_token + head * beta_head, head, real,
        beta_scale, RAW,
    )  # fmt: skip
    target = places.to(tl.int64)[:, None] * H + columns
    tl.store(g_out + target, decay, mask=real)
    tl.store(beta_out + target, strength, mask=real)


@jit_for_any("n")
def _scatter(
    x: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    n: tl.tensor,
    H: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    z_token: tl.tensor,
    z_head: tl.tensor,
    eps: tl.tensor,
    V: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    head, places = program % H, program // H * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (places < n)[:, None] & (columns < V)
    token = tl.load(tokens + places, mask=places < n, other=0).to(tl.int64)[:, None]
    source = x + (places.to(tl.int64)[:, None] * H + head) * V + columns
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(total * total, axis=1) / V)[:, None]
        total = gated(total, z, token * z_token + head * z_head + columns, weight, columns, inside, mean, eps, V)
    tl.store(out + token * out_token + head * out_head + columns, total.to(out.dtype.element_ty), mask=inside)


def gather(x: Tensor, tokens: Tensor, out: Tensor, eps: float | None) -> Launch:
    """``out[i] = x[tokens[i]]``, of ``x [N, H, D]``; normalised over the head where there is an ``eps``."""
    num_heads, size = x.shape[1:]
    arguments = (x, tokens, out, len(tokens), num_heads, *x.stride()[:2], eps or 0.0)
    constants = {"D": size, "NORMALISE": eps is not None, "ROWS": ROWS, "BLOCK": padded(size)}
    return Launch(_gather, (-(-len(tokens) // ROWS) * num_heads,), arguments, constants, 4)


def gate(g: Tensor, beta: Tensor, tokens: Tensor, rule: Rule, g_out: Tensor, beta_out: Tensor) -> Launch:
    """Logarithms of decays, and strengths, ``[n, H]`` in float32, in the order of ``tokens``."""
    num_heads, is_raw = g.shape[1], rule.A_log is not None
    arguments = (
        g, beta, rule.A_log if is_raw else g_out, rule.dt_bias if is_raw else g_out, tokens, g_out, beta_out,
        len(tokens), num_heads, *g.stride(), *beta.stride(), rule.beta_scale,
    )  # fmt: skip
    constants = {"RAW": is_raw, "ROWS": ROWS, "BLOCK": padded(num_heads)}
    return Launch(_gate, (-(-len(tokens) // ROWS),), arguments, constants, 4)


def scatter(x: Tensor, tokens: Tensor, norm: GatedNorm | None, out: Tensor) -> Launch:
    """``out[tokens[i]] = x[i]``, normed and gated; other rows of ``out [N, H, V]`` are left as they are."""
    num_heads, size = out.shape[1:]
    z, weight, eps = (out, out, 0.0) if norm is None else (norm.z, norm.weight, norm.eps)
    arguments = (x, tokens, out, z, weight, len(tokens), num_heads, *out.stride()[:2], *z.stride()[:2], eps)
    constants = {"V": size, "NORM": norm is not None, "ROWS": ROWS, "BLOCK": padded(size)}
    return Launch(_scatter, (-(-len(tokens) // ROWS) * num_heads,), arguments, constants, 4)

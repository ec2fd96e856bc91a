"""What stands before and after chunked kernels that read tokens side by side: gathering, norms, gates, scattering.

One pass over memory each. ``gather_all`` brings a layer's heads, views of a wider projection, into the order of rows,
normalises them on the way, and gives decays and strengths in that order; ``scatter`` puts outputs back where their
tokens stand, through the gated norm.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import padded
from hypic_kernels.delta.parts import gated, gates
from hypic_kernels.delta.rule import GatedNorm, Rule
from hypic_kernels.launch import Launch, jit, jit_for_any

ROWS = 32


@jit
def _heads(
    x: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    program: tl.tensor,
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
    """One head of ``ROWS`` places."""
    head, places = program % H, program // H * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (places < n)[:, None] & (columns < D)
    token = tl.load(tokens + places, mask=places < n, other=-1).to(tl.int64)[:, None]
    tile = tl.load(x + token * x_token + head * x_head + columns, mask=inside & (token >= 0), other=0.0).to(tl.float32)
    if NORMALISE:
        tile *= tl.rsqrt(tl.sum(tile * tile, axis=1) + eps)[:, None]
    target = out + (places.to(tl.int64)[:, None] * H + head) * D + columns
    tl.store(target, tile.to(out.dtype.element_ty), mask=inside)


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
    _heads(x, tokens, out, tl.program_id(0), n, H, x_token, x_head, eps, D, NORMALISE, ROWS, BLOCK)


@jit_for_any("n", "num_programs")
def _gather_all(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    tokens: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    g_out: tl.tensor,
    beta_out: tl.tensor,
    n: tl.tensor,
    num_programs: tl.tensor,
    key_heads: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    eps: tl.tensor,
    beta_scale: tl.tensor,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
    RAW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """``num_programs`` take heads of q, as many those of k, the others gates."""
    program = tl.program_id(0)
    if program < num_programs:
        _heads(q, tokens, q_out, program, n, key_heads, q_token, q_head, eps, K, NORMALISE, ROWS, BLOCK)
    elif program < 2 * num_programs:
        own = program - num_programs
        _heads(k, tokens, k_out, own, n, key_heads, k_token, k_head, eps, K, NORMALISE, ROWS, BLOCK)
    else:
        places = (program - 2 * num_programs) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_H)[None, :]
        inside = (places < n)[:, None] & (columns < H)
        token = tl.load(tokens + places, mask=places < n, other=-1).to(tl.int64)[:, None]
        head = tl.minimum(columns, H - 1)
        decay, strength = gates(
            g, beta, A_log, dt_bias, token * g_token + head * g_head, token * beta_token + head * beta_head, head,
            inside & (token >= 0), beta_scale, RAW,
        )  # fmt: skip
        target = places.to(tl.int64)[:, None] * H + columns
        tl.store(g_out + target, decay, mask=inside)
        tl.store(beta_out + target, strength, mask=inside)


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
    token = tl.load(tokens + places, mask=places < n, other=-1).to(tl.int64)[:, None]
    inside = (token >= 0) & (columns < V)
    source = x + (places.to(tl.int64)[:, None] * H + head) * V + columns
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(total * total, axis=1) / V)[:, None]
        total = gated(total, z, token * z_token + head * z_head + columns, weight, columns, inside, mean, eps, V)
    tl.store(out + token * out_token + head * out_head + columns, total.to(out.dtype.element_ty), mask=inside)


def gather(x: Tensor, tokens: Tensor, out: Tensor, eps: float | None) -> Launch:
    """``out[i] = x[tokens[i]]``, of ``x [N, H, D]``; normalised over the head where there is an ``eps``."""
    num_heads, size = x.shape[1:]
    arguments = (x, tokens, out, tokens.shape[0], num_heads, *x.stride()[:2], eps or 0.0)
    constants = {"D": size, "NORMALISE": eps is not None, "ROWS": ROWS, "BLOCK": padded(size)}
    return Launch(_gather, (-(-tokens.shape[0] // ROWS) * num_heads,), arguments, constants, 4)


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def gather_all(tensors: Four, tokens: Tensor, rule: Rule, out: Four) -> Launch:
    """``q, k [N, Hk, K]`` and ``g, beta [N, H]`` in the order of ``tokens``, q and k normalised if the rule says so,
    gates as logarithms of decays and as strengths in float32; zeros where there is no token."""
    q, k, g, beta = tensors
    (num_heads, size), is_raw, n = q.shape[1:], rule.A_log is not None, tokens.shape[0]
    raw = (rule.A_log, rule.dt_bias) if is_raw else (out[2], out[2])
    blocks = -(-n // ROWS)
    arguments = (
        *tensors, *raw, tokens, *out, n, blocks * num_heads, num_heads, g.shape[1], *q.stride()[:2], *k.stride()[:2],
        *g.stride(), *beta.stride(), rule.eps, rule.beta_scale,
    )  # fmt: skip
    constants = {
        "K": size, "NORMALISE": rule.normalise, "RAW": is_raw, "ROWS": ROWS, "BLOCK": padded(size),
        "BLOCK_H": padded(g.shape[1]),
    }  # fmt: skip
    return Launch(_gather_all, (blocks * (2 * num_heads + 1),), arguments, constants, 4)


def scatter(x: Tensor, tokens: Tensor, norm: GatedNorm | None, out: Tensor) -> Launch:
    """``out[tokens[i]] = x[i]``, normed and gated, where there is a token; other rows of ``out [N, H, V]`` stay as they
    are."""
    num_heads, size = out.shape[1:]
    z, weight, eps = (out, out, 0.0) if norm is None else (norm.z, norm.weight, norm.eps)
    arguments = (x, tokens, out, z, weight, tokens.shape[0], num_heads, *out.stride()[:2], *z.stride()[:2], eps)
    constants = {"V": size, "NORM": norm is not None, "ROWS": ROWS, "BLOCK": padded(size)}
    return Launch(_scatter, (-(-tokens.shape[0] // ROWS) * num_heads,), arguments, constants, 4)

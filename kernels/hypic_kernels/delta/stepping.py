"""``step`` as a kernel: one token per row, its state read once and written once, gate and norms fused.

A program takes a row and a value head. With ``S' = a S`` and ``u = beta (v - k^T S')``, the new state is
``S' + k u^T`` and its output ``q^T S' + (q . k) u^T``: both reductions need the old state only and run side by side.
"""

# No postponed annotations: Triton reads them as values. They name what a parameter is at compile time.
import triton.language as tl
from torch import Tensor

from hypic_kernels.delta.layout import StepConfig, padded
from hypic_kernels.delta.parts import gated, gates
from hypic_kernels.delta.rule import GatedNorm, Rule
from hypic_kernels.launch import Launch, jit


@jit
def _step(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    read_slots: tl.tensor,
    write_slots: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    H: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    g_token: tl.tensor,
    g_head: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    z_token: tl.tensor,
    z_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    beta_scale: tl.tensor,
    norm_eps: tl.tensor,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    RAW: tl.constexpr,
    NORMALISE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    head = program % H
    row = tl.cast(program // H, tl.int64)
    channels = tl.arange(0, BLOCK_K)
    key = tl.load(k + row * k_token + (head // GROUP) * k_head + channels, mask=channels < K, other=0.0).to(tl.float32)
    ask = tl.load(q + row * q_token + (head // GROUP) * q_head + channels, mask=channels < K, other=0.0).to(tl.float32)
    if NORMALISE:
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        ask *= tl.rsqrt(tl.sum(ask * ask, axis=0) + eps)
    ask *= scale
    match = tl.sum(ask * key, axis=0)
    read_slot, write_slot = tl.load(read_slots + row), tl.load(write_slots + row)
    decay, strength = gates(
        g, beta, A_log, dt_bias, row * g_token + head * g_head, row * beta_token + head * beta_head,
        head, read_slot == read_slot, beta_scale, RAW,
    )  # fmt: skip
    factor = tl.exp(decay)
    old = states + (tl.cast(read_slot, tl.int64) * H + head) * K * V
    new = states + (tl.cast(write_slot, tl.int64) * H + head) * K * V

    numbers = tl.arange(0, NUM_BLOCKS)[:, None]
    outputs = tl.zeros((NUM_BLOCKS, BLOCK_V), tl.float32)
    for block in tl.range(0, NUM_BLOCKS, num_stages=STAGES):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        places = channels[:, None] * V + columns[None, :]
        inside = (channels < K)[:, None] & (columns < V)[None, :]
        state = tl.load(old + places, mask=inside & (read_slot >= 0), other=0.0).to(tl.float32) * factor
        value = tl.load(v + row * v_token + head * v_head + columns, mask=columns < V, other=0.0).to(tl.float32)
        correction = strength * (value - tl.sum(key[:, None] * state, axis=0))
        output = tl.sum(ask[:, None] * state, axis=0) + match * correction
        after = state + key[:, None] * correction[None, :]
        tl.store(new + places, after.to(states.dtype.element_ty), mask=inside & (write_slot >= 0))
        outputs = tl.where(numbers == block, output[None, :], outputs)

    columns = numbers * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    if NORM:
        # Columns beyond V are zero.
        mean = tl.sum(tl.sum(outputs * outputs, axis=1), axis=0) / V
        outputs = gated(
            outputs, z, row * z_token + head * z_head + columns, weight, columns, columns < V, mean, norm_eps, V
        )
    target = out + row * out_token + head * out_head + columns
    tl.store(target, outputs.to(out.dtype.element_ty), mask=columns < V)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    rule: Rule,
    norm: GatedNorm | None,
    out: Tensor,
    config: StepConfig,
) -> Launch:
    """The twin of ``reference.step`` and ``reference.normed``; writes ``states`` in place and ``out``."""
    num_rows, num_heads, value_dim = v.shape
    key_dim = k.shape[2]
    z, weight, norm_eps = (out, out, 0.0) if norm is None else (norm.z, norm.weight, norm.eps)
    arguments = (
        q, k, v, g, beta, rule.A_log, rule.dt_bias, states, read_slots, write_slots, z, weight, out, num_heads,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride(), *beta.stride(),
        *z.stride()[:2], *out.stride()[:2], rule.scale, rule.eps, rule.beta_scale, norm_eps,
    )  # fmt: skip
    constants = {
        "GROUP": num_heads // k.shape[1], "K": key_dim, "V": value_dim, "RAW": rule.A_log is not None,
        "NORMALISE": rule.normalise, "NORM": norm is not None, "BLOCK_K": padded(key_dim), "BLOCK_V": config.block_v,
        "NUM_BLOCKS": padded(value_dim) // config.block_v, "STAGES": config.num_stages,
    }  # fmt: skip
    return Launch(_step, (num_rows * num_heads,), arguments, constants, config.num_warps)

"""What a chip could do at best: bytes and operations of a request, counted from the model, over measured limits.

A floor is no prediction. A request's time is at least the larger of its matrix products at the chip's measured rate
and the bytes it must read at the measured bandwidth, plus the scans of the linear layers where they are long. Matrix
products count 2 operations a weight and token (embeddings none, experts as many as are chosen), attention 2 a channel
of keys and of values for every query and key it sees. Weights are read once, experts as many as are expected to be hit;
an interior's transition and end state are read once in fp32 or as they are kept, K and V of the prompt once.

Scans: with dense transitions (DeltaNet, GDN, KDA) at the speed of the best kernels known, fla 0.6.0 on one H200: 1.4 ms
for 16,384 tokens of 32 heads of 128 x 128, which is 11 times what their operations alone take; scaled by shape, and by
the chip's matrix rate. Others by their operations in chunks of 64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hypic.engine.layers.moe import MoE
from hypic.engine.pool import Layout, LinearShape
from hypic.types import Policy
from hypic_apps.bench.prompts import Shape

CHUNK = 64
# Seconds a token, head and number of the state, times the matrix rate they were measured at: operations' worth.
FLA_DELTA_OPERATIONS = 1.4e-3 / (16_384 * 32 * 128 * 128) * 773e12


@dataclass(frozen=True)
class Limits:
    """What a device did in this very run: multiply-adds as 2 operations, bytes read plus bytes written."""

    matmul_flops: float
    copy_bytes: float


@dataclass(frozen=True)
class Counts:
    """A model, counted: what every token multiplies with, what every step reads, and the shapes of what is kept."""

    active_weights: int
    head_weights: int
    dense_bytes: int
    expert_bytes: int
    num_experts: int
    num_chosen: int
    layout: Layout
    attention_heads: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> Counts:
        """Counted from the modules of a built model."""
        mixtures = [module for module in model.modules() if isinstance(module, MoE)]
        experts = [p for mixture in mixtures for p in mixture.experts.parameters()]
        own = {id(p) for p in experts} | {id(model.embed_tokens.weight), id(model.lm_head.weight)}
        dense = [p for p in model.parameters() if id(p) not in own]
        num_experts = len(mixtures[0].experts.down_proj) if mixtures else 0
        chosen = mixtures[0].gate.top_k if mixtures else 0
        matrices = sum(p.numel() for p in dense if p.dim() == 2)
        routed = sum(p.numel() for p in experts) * chosen // num_experts if mixtures else 0
        head = model.lm_head.weight
        heads = tuple(int(m.shape.num_heads) for m in model.mixers() if not hasattr(m, "family"))
        dense_bytes = _num_bytes(dense) + head.numel() * head.element_size()
        return cls(
            matrices + routed, head.numel(), dense_bytes, _num_bytes(experts), num_experts, chosen, model.layout, heads
        )

    @property
    def routed_weights(self) -> float:
        """Of experts, what a token multiplies with."""
        if not self.num_experts:
            return 0.0
        return self.expert_bytes / self.layout.dtype.itemsize * self.num_chosen / self.num_experts

    def weight_bytes(self, num_tokens: int) -> float:
        """Weights that a step of so many tokens is expected to read."""
        missed = (1 - self.num_chosen / self.num_experts) ** num_tokens if self.num_experts else 0.0
        return self.dense_bytes + self.expert_bytes * (1 - missed)

    def attention_operations(self, num_pairs: float) -> float:
        """Of so many pairs of a query and a key, in all layers."""
        shapes = zip(self.layout.attention, self.attention_heads, strict=True)
        return 2.0 * num_pairs * sum(heads * (kept.key_dim + kept.value_dim) for kept, heads in shapes)


@dataclass(frozen=True)
class Load:
    """What one request asks of the chip: tokens that are run, pairs of query and key, tokens of long scans, and bytes
    that are read besides weights, of which ``kv_bytes`` are keys and values."""

    num_tokens: int
    num_pairs: float
    num_scanned: int
    read_bytes: float = 0.0
    kv_bytes: float = 0.0

    def seconds(self, counts: Counts, limits: Limits) -> float:
        operations = 2.0 * (counts.active_weights * self.num_tokens + counts.head_weights)
        operations += counts.attention_operations(self.num_pairs)
        scans = sum(scan_operations(shape) for shape in counts.layout.linear) * self.num_scanned
        moved = counts.weight_bytes(self.num_tokens) + self.read_bytes
        return max(operations / limits.matmul_flops, moved / limits.copy_bytes) + scans / limits.matmul_flops

    def by_room(self, counts: Counts, limits: Limits) -> dict[str, float]:
        """Seconds of the rooms of a profile, each alone; projections of linear layers are in ``linear: rest``. Together
        they may take longer than the whole, where operations of one could hide bytes of another."""
        routed, experts = counts.routed_weights, counts.weight_bytes(self.num_tokens) - counts.dense_bytes
        plain = (counts.active_weights - routed) * self.num_tokens + counts.head_weights
        scans = sum(scan_operations(shape) for shape in counts.layout.linear) * self.num_scanned
        rooms = {
            "experts": (2.0 * routed * self.num_tokens, experts),
            "projections with linear: rest": (2.0 * plain, float(counts.dense_bytes)),
            "attention": (counts.attention_operations(self.num_pairs), self.kv_bytes),
            "linear: lift with scan": (scans, self.read_bytes - self.kv_bytes),
        }
        return {
            room: max(operations / limits.matmul_flops, moved / limits.copy_bytes)
            for room, (operations, moved) in rooms.items()
        }


def load_of(arm: str, shape: Shape, policy: Policy, layout: Layout) -> Load:
    """What an arm asks for: ``full``, ``prefix`` (whose cached head is the prompt's), ``cold`` or ``warm``."""
    total = shape.num_tokens
    if arm in ("full", "prefix", "transformers"):
        cached = shape.head_tokens if arm == "prefix" else 0
        return Load(total - cached, (total**2 - cached**2) / 2, total - cached)
    length, many = shape.segment_tokens, shape.num_segments
    origins = [shape.head_tokens + number * length for number in range(max(0, many - policy.live_last))]
    found = policy.interiors(length)
    warm = warm_load([(origin + a, origin + b) for origin in origins for a, b in found], total, layout)
    if arm == "cold":
        # An entry is encoded from its segment's first token on.
        num_encoded, pairs = (len(origins) * sum(stop**power for _, stop in found) for power in (1, 2))
        num_tokens = warm.num_tokens + num_encoded
        return Load(num_tokens, warm.num_pairs + pairs / 2, num_tokens)
    return warm


def warm_load(interiors: Sequence[tuple[int, int]], num_tokens: int, layout: Layout) -> Load:
    """A prompt of ``num_tokens`` of which ``interiors`` are cached, as ``(start, stop)`` in order; the row behind the
    last one is scanned. Without interiors: full recompute."""
    starts, stops = [0, *(stop for _, stop in interiors)], [*(start for start, _ in interiors), num_tokens]
    rows = [(start, stop) for start, stop in zip(starts, stops, strict=True)]
    num_rows = sum(stop - start for start, stop in rows)
    pairs = sum((stop**2 - start**2) / 2 for start, stop in rows)
    num_scanned = rows[-1][1] - rows[-1][0]
    if not interiors:
        return Load(num_rows, pairs, num_scanned)
    kv = float(num_tokens * layout.token_bytes)
    kept = len(interiors) * (layout.state_bytes + layout.transition_bytes)
    return Load(num_rows, pairs, num_scanned, kept + kv, kv)


def decode_load(batch: int, context: int, layout: Layout) -> Load:
    """One token for each of ``batch`` requests: every request's K, V and state is read, and its state written."""
    kv = float(batch * context * layout.token_bytes)
    return Load(batch, float(batch * context), 0, kv + 2 * batch * layout.state_bytes, kv)


def rooms_text(load: Load, counts: Counts, limits: Limits) -> str:
    """A line for the head of a profile."""
    rooms = ", ".join(f"{room} {1e3 * s:.2f}" for room, s in load.by_room(counts, limits).items())
    return f"floors in ms: the whole {1e3 * load.seconds(counts, limits):.2f}; by room {rooms}"


def scan_operations(shape: LinearShape) -> float:
    """A token's share of a long scan in one layer, in operations at the matrix rate."""
    if shape.transition == "dense":
        return FLA_DELTA_OPERATIONS * shape.num_heads * shape.key_dim * shape.value_dim
    inside = 2 * CHUNK * (shape.key_dim + shape.value_dim)
    return float(shape.num_heads * (inside + 4 * shape.key_dim * shape.value_dim))


def measure(device: torch.device, dtype: torch.dtype) -> Limits:
    """The device's limits now: large matrix products and large copies of random numbers; under a second on a GPU."""
    is_large = device.type == "cuda"
    size, length = (8192, 2**30) if is_large else (512, 2**26)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    flops = 2.0 * size**3 / _fastest(lambda: torch.mm(a, b, out=product), device)
    source = torch.ones(length // 4, device=device)
    target = torch.empty_like(source)
    copied = 2.0 * length / _fastest(lambda: target.copy_(source), device)
    if is_large:
        del a, b, product, source, target
        torch.cuda.empty_cache()
    return Limits(flops, copied)


def _fastest(run: Callable[[], object], device: torch.device, rounds: int = 4, repeats: int = 5) -> float:
    """Seconds of one call, in the fastest of some rounds."""
    run()
    times = []
    for _ in range(rounds):
        _wait(device)
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        _wait(device)
        times.append((time.perf_counter() - started) / repeats)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _num_bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(math.prod(p.shape) * p.element_size() for p in parameters)

"""The self-check at first use: what decides which machine code runs, and its error on a small random problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hypic_kernels.experts import reference
from hypic_kernels.trust import relative_error

EPSILON = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Variant:
    device: torch.device
    dtype: torch.dtype
    top_k: int

    @property
    def tolerance(self) -> float:
        return 1e-5 + EPSILON.get(self.dtype, 0.0)

    def measure(self) -> float:
        """The largest error of weights, of combined rows, and of experts that are not the same."""
        from hypic_kernels.experts import triton as kernel

        num, width, experts = 37, 200, max(24, self.top_k)
        generator = torch.Generator().manual_seed(1)
        draw = [torch.randn(shape, generator=generator) for shape in ((num, experts), (num, width), (num, width))]
        logits, x, shared = (tensor.to(self.device, self.dtype) for tensor in draw)
        gate = shared[0].contiguous()
        weights, chosen = reference.route(logits, self.top_k, True)
        found_weights, found = torch.empty_like(weights, dtype=torch.float32), torch.empty_like(chosen)
        kernel.route(logits, found_weights, found, True).run()
        rows, places = x.new_empty((chosen.numel(), width)), torch.empty_like(chosen)
        both = torch.zeros((2, experts), dtype=torch.int32, device=self.device)
        for launch in kernel.scatter(x, chosen, rows, places, both[0], both[1]):
            launch.run()
        out = torch.empty_like(x)
        kernel.combine(rows, places, weights, shared, x, gate, out).run()
        _, exact_places, ends = reference.scatter(x, chosen, experts)
        exact = reference.combine(x.double()[_tokens(exact_places)], exact_places, weights, shared, x, gate)
        wrong = float((found != chosen).sum() + (both[1] != ends).sum() + (rows[places.long()] != x[:, None]).sum())
        return max(wrong, relative_error(found_weights, weights), relative_error(out, exact))


def _tokens(places: torch.Tensor) -> torch.Tensor:
    """Which token stands at each place."""
    tokens = torch.empty(places.numel(), dtype=torch.long, device=places.device)
    tokens[places.flatten().long()] = torch.arange(len(places), device=places.device).repeat_interleave(places.shape[1])
    return tokens

"""Random rows, for tests and the self-check at first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hypic_kernels.decay import reference
from hypic_kernels.rows import Rows
from hypic_kernels.trust import relative_error

Precision = Literal["ieee", "tf32x3", "bf16x3"]
TOLERANCE: dict[Precision, float] = {"ieee": 1e-5, "tf32x3": 1e-5, "bf16x3": 1e-4}
"""Of the relative error; plain TF32 would stand at 3e-4."""
LENGTHS = (70, 64, 1, 129)


class Problem(NamedTuple):
    """Arguments of ``run`` but for ``out``; one decay is very strong."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    rows: Rows
    initial: Tensor

    @staticmethod
    def random(
        dims: tuple[int, int],
        heads: tuple[int, int] = (1, 2),
        lengths: tuple[int, ...] = LENGTHS,
        *,
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        device: torch.device | str = "cpu",
    ) -> Problem:
        """``dims`` are K and V, ``heads`` Hk and Hv, ``dtypes`` of q and k, and of v."""
        draw, size = torch.Generator().manual_seed(0), sum(lengths)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=draw)

        q, k = (normal(size, heads[0], dims[0]).to(device, dtypes[0]) / dims[0] ** 0.5 for _ in range(2))
        v, g = normal(size, heads[1], dims[1]).to(device, dtypes[1]), -normal(size, heads[1]).exp() / 16
        g[size // 3] = -30000.0
        initial = normal(len(lengths), heads[1], *dims).to(device)
        return Problem(q, k, v, g.to(device), Rows.of(lengths, 0, device), initial)

    def solve(self) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, final states and decays in float64."""
        q, k, v, g = (tensor.double() for tensor in self[:4])
        return reference.run(q, k, v, g, self.rows, self.initial.double())


@dataclass(frozen=True)
class Variant:
    """What decides which machine code runs."""

    device: torch.device
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    group: int
    key_dim: int
    value_dim: int
    precision: Precision

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.precision]

    def measure(self) -> float:
        from hypic_kernels.decay import triton as kernel

        dims, dtypes = (self.key_dim, self.value_dim), (self.key_dtype, self.value_dtype)
        problem = Problem.random(dims, (1, self.group), dtypes=dtypes, device=self.device)
        out = torch.full(problem.v.shape, torch.nan, device=self.device)
        results = out, *kernel.run(*problem, out, self.precision)
        return max(map(relative_error, results, problem.solve()))

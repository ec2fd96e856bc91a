"""Whether the kernel may be trusted where it runs: one small random problem against the reference, once per variant.

Compilers have miscompiled matrix products for single chips and versions before; a wrong state is silent, and some
milliseconds at first use buy that none is ever used.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hypic_kernels.compose import reference
from hypic_kernels.compose.layout import Config, Kind, Precision
from hypic_kernels.compose.problem import Problem, relative_error
from hypic_kernels.trust import fault_of

TOLERANCE = 1e-5
"""Of ``relative_error``. float32 and 3xTF32 stay ten times below it; plain TF32 stands thirty times above it."""


class Variant(NamedTuple):
    """What decides which machine code runs. ``state_dtypes`` is empty where no end states are added."""

    device: torch.device
    kind: Kind
    key_dim: int
    value_dim: int
    dtypes: tuple[torch.dtype, ...]
    state_dtypes: tuple[torch.dtype, ...]
    precision: Precision
    config: Config | None
    num_turned: int = 0


@functools.cache
def is_trusted(variant: Variant) -> bool:
    """Runs the check at the first call for a variant, and warns once where it fails.

    It waits for the device, so a variant must have been used once before a graph is captured.
    """
    reason = fault_of(lambda: measure(variant), TOLERANCE)
    if reason is None:
        return True
    warnings.warn(
        f"the compose kernel is not used on {variant.device} for {variant.kind} transitions and states of "
        f"{variant.key_dim} x {variant.value_dim}: {reason}. The reference is used instead, which is slower.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


@dataclass(frozen=True)
class WriteVariant:
    """Of ``write_rows``; checked as other packages check theirs."""

    device: torch.device
    dtype: torch.dtype
    target_dtype: torch.dtype
    slot_dtype: torch.dtype
    size: int

    @property
    def tolerance(self) -> float:
        return 0.0

    def measure(self) -> float:
        """How many numbers are wrong, of those that stay too."""
        from hypic_kernels.compose import writing

        generator = torch.Generator().manual_seed(5)
        source = torch.randn((7, self.size), generator=generator).to(self.device, self.dtype)
        target = torch.randn((9, self.size), generator=generator).to(self.device, self.target_dtype)
        places = torch.tensor([3, 0, 6, 3], device=self.device, dtype=self.slot_dtype)
        slots = torch.tensor([8, 2, -1, 0], device=self.device, dtype=self.slot_dtype)
        exact = target.clone()
        reference.write_rows(source, places, exact, slots)
        writing.write_rows(source, places, target, slots).run()
        return float((target != exact).sum())


def measure(variant: Variant) -> float:
    """The kernel's relative error on a random problem: that of ``before`` or of ``final``, whichever is larger."""
    from hypic_kernels.compose import triton as kernel

    problem = Problem.random(
        variant.kind,
        variant.key_dim,
        variant.value_dim,
        dtypes=variant.dtypes,
        state_dtypes=variant.state_dtypes,
        device=variant.device,
    )
    if variant.num_turned:
        problem = problem.turned(variant.num_turned)
    before, final = problem.outputs()
    kernel.compose(*problem.arguments, before, final, variant.precision, variant.config, problem.turns)
    return max(map(relative_error, (before, final), problem.solve()))

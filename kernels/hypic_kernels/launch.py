"""A kernel with its arguments: to be run where they lie, or compiled for a chip that need not be here.

Triton is imported here, so only by modules that hold kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hypic_kernels import ready

SHARED_BYTES: Mapping[int, int] = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""Shared memory that one program may take, by compute capability."""
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, with a type whether or not a type checker can see Triton."""
    return triton.jit(function)


def jit_for_any(*sizes: str) -> Callable[[Callable[..., Any]], Any]:
    """The same, where one compiled kernel serves any value of ``sizes``: numbers that differ from step to step, and for
    which Triton would else compile anew when they are 1 or become multiples of 16."""
    return lambda function: triton.jit(function, do_not_specialize=list(sizes))


@dataclass(frozen=True)
class Launch:
    """``kernel[grid](*arguments, **constants)``, with ``num_warps``, and ``num_stages`` where a kernel leaves that to
    the compiler, among its options.

    A kernel with a true constant ``EARLY`` is started before the one before it has ended; see ``early.py``.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Of the compiler."""
        options: dict[str, Any] = {"num_warps": self.num_warps}
        if self.constants.get("EARLY"):
            options["launch_pdl"] = True
        if self.num_stages is not None:
            options["num_stages"] = self.num_stages
        return options

    def run(self) -> None:
        """On the device of the arguments: Triton alone would take the current one. An empty grid does nothing."""
        if 0 in self.grid:
            return
        device = next(argument for argument in self.arguments if isinstance(argument, Tensor)).get_device()
        if device < 0:  # in the interpreter
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)
        elif device == torch.cuda.current_device():
            ready.run(self.kernel, self.grid, self.arguments, self.constants, self.options, device)
        else:
            with torch.cuda.device(device):
                ready.run(self.kernel, self.grid, self.arguments, self.constants, self.options, device)

    def compile(self, capability: int) -> Any:
        """For compute capability 80, 90, ...; needs no GPU, but Triton must not be in its interpreter."""
        names = self.kernel.arg_names
        given = {name: _signature(value) for name, value in zip(names, self.arguments, strict=False)}
        signature = {name: given.get(name, "constexpr") for name in names}
        values = {**dict(zip(names, self.arguments, strict=False)), **self.constants}
        constants = {name: values[name] for name in names if signature[name] == "constexpr"}
        aligned = [place for place, name in enumerate(names) if _is_aligned(signature[name], values[name])]
        attributes = {(place,): [["tt.divisibility", 16]] for place in aligned}
        source = _source_of(self.kernel)(self.kernel, signature, constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=self.options)


def _source_of(kernel: Any) -> Any:
    """How a kernel is read: as Triton, or as Gluon, whose functions know it."""
    if not getattr(kernel, "is_gluon", bool)():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _signature(value: Any) -> str:
    """The type of an argument as a launch would see it: 1 and None become constants."""
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(kind: str, value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(value.data_ptr() % 16 == 0)
    return kind in ("i32", "i64") and value % 16 == 0

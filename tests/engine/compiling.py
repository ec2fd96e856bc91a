"""What an engine would compile on a GPU, found on a CPU: every launch is noted and nothing is computed.

Layers and packages choose as they do on an H200; a launch leaves zeros where it would write. A launch is known by what
Triton compiles for: kernel, constants, options, and of arguments the type, and whether they are 1 or a multiple of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hypic.engine.layers import mamba2, mlp, moe, norm, rotary, routers
from hypic_kernels import attention, compose, conv, decay, delta, experts, matvec, pointwise
from hypic_kernels.attention import launching
from hypic_kernels.attention.layout import Chip
from hypic_kernels.delta import chunked, running
from hypic_kernels.delta.layout import SCAN_CHUNK_SIZES
from hypic_kernels.experts import few
from hypic_kernels.experts.layout import LARGE_BYTES
from hypic_kernels.launch import Launch

# Calls that are one kernel or several, whatever the tensors are on.
BY_KERNEL: Mapping[ModuleType, Sequence[str]] = {
    attention: ("attend", "attend_latent"),
    compose: ("compose", "fold", "write_rows"),
    conv: ("convolve",),
    decay: ("lift", "read", "step"),
    delta: ("lift", "read", "step", "scan", "settle"),
    experts: ("route", "route_groups", "scatter", "order", "gate_up", "down", "combine"),
    few: ("answer",),
    matvec: ("product", "normed_product"),
    pointwise: ("add_rms_norm", "silu_mul", "heads", "gated_group_norm"),
}
# Questions that are answered as a GPU with all of its kernels would.
YES: Sequence[tuple[Any, str]] = (
    (attention, "_is_right"),
    (experts, "may_take_kernel"),
    (experts, "takes_kernel"),
    (experts, "_all_trusted"),
    (few, "may_take_kernel"),
    (few, "is_trusted"),
    (matvec, "_may_take_kernel"),
    (matvec, "is_trusted"),
    (running, "_takes_fla"),
    (moe.Experts, "can_group"),
)


class Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that is asked for is zero: what no launch fills is a number, and the same every time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if "empty" in func.overloadpacket.__name__ else made


class Noted:
    """Launches by what is compiled for them."""

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()

    def take(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.seen.add(variant_of(launch))


def variant_of(launch: Launch) -> Hashable:
    """What decides whether Triton compiles anew."""
    kernel = launch.kernel
    options = getattr(kernel, "kwargs", None) or {"do_not_specialize": getattr(kernel, "do_not_specialize", ())}
    for_any = options.get("do_not_specialize") or ()
    arguments = [
        (name, _kind(value, name not in for_any))
        for name, value in zip(kernel.arg_names, launch.arguments, strict=False)
    ]
    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    return name, tuple(arguments), tuple(sorted(launch.constants.items())), tuple(launch.options.items())


def _kind(value: Any, is_special: bool) -> Hashable:
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if value is None or isinstance(value, float):
        return type(value).__name__
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return (width, value == 1, value % 16 == 0) if is_special else width


def as_on_an_h200(patch: pytest.MonkeyPatch) -> Noted:
    """Everything below is chosen as there; launches are noted instead."""
    noted = Noted()
    patch.setattr(Launch, "run", lambda launch: noted.take(launch))
    for package, calls in BY_KERNEL.items():
        for name in calls:
            patch.setattr(package, name, functools.partial(getattr(package, name), backend="triton"))
    for owner, name in YES:
        patch.setattr(owner, name, lambda *_, **__: True)
    for room in (mamba2, mlp, norm, rotary, routers):
        patch.setattr(room, "by_kernel", lambda x: not torch.is_grad_enabled())
    for owner in (attention, launching):
        patch.setattr(owner, "chip_of", lambda device: Chip())
    patch.setattr(experts, "_room", lambda device: LARGE_BYTES)
    patch.setattr(moe, "grouped_product", lambda: lambda x, weight, offs: x.new_zeros(len(x), weight.shape[-1]))
    patch.setattr(delta, "can_scan", lambda dtype, heads, chunks, *_, **__: chunks.shape[1] in SCAN_CHUNK_SIZES)
    patch.setattr(chunked, "_known", lambda: chunked.Pieces(_unused, _unused, _states, _outputs))
    return noted


def _states(k: Tensor, u: Tensor, initial_state: Tensor, chunk_indices: Tensor, **_: Any) -> Any:
    """fla's walk, by shapes alone."""
    return k.new_zeros((1, len(chunk_indices), *initial_state.shape[1:])), torch.zeros_like(u), initial_state


def _outputs(v: Tensor, **_: Any) -> Tensor:
    return torch.zeros_like(v)


def _unused(**_: Any) -> Any:
    raise AssertionError("our kernels do this")

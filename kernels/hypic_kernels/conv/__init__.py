"""``conv``: the short causal convolution before linear attention, over rows that stand behind histories of any kind.

Which inputs a token sees is a table of integers (``sources.py``): tokens before it in this step, rows of a stored tail,
or zeros. The same kind of table says what becomes the tails of which slots. Tables are read on the device, so a
captured graph can be replayed with others. The definition is ``reference.py``, notes on the kernel in README.md.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.conv import reference
from hypic_kernels.conv.check import Variant
from hypic_kernels.conv.sources import CANDIDATES, NOTHING, Config, ConvError, is_few, tail_source
from hypic_kernels.trust import is_trusted

__all__ = ["NOTHING", "Backend", "Config", "ConvError", "convolve", "tail_source"]

Backend = Literal["auto", "triton", "reference"]
STORAGE = (torch.float32, torch.bfloat16, torch.float16)
# Each is made once: all layers of a kind ask with the same.
_variant = functools.cache(Variant)


def convolve(
    x: Tensor,
    tails: Tensor,
    sources: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    has_silu: bool = False,
    write_sources: Tensor | None = None,
    write_slots: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
    backend: Backend = "auto",
    config: Config | None = None,
) -> Tensor:
    """``out[n] = act(sum_j weight[:, j] input(sources[n, j]) + bias)``, then the tails of ``write_slots``.

    ``x [N', C]`` (rows of any pitch), ``tails [slots, W - 1, C]`` raw inputs, oldest first, ``sources [N, W]`` int32 in
    the order of the taps, ``weight [C, W]``, ``bias [C]``. ``write_sources [R, W - 1]`` and ``write_slots [R]``, int32,
    say what becomes which tail; all are read before any is overwritten, slots must differ, and a negative slot is not
    written. Sums are float32 (float64 if ``x`` is). ``out [N, C]`` and ``scratch [R, W - 1, C]`` (of the type of
    ``tails``) are made unless given.

    Raises:
        ConvError: shapes or types do not fit, or rows do not lie side by side.
    """
    size, num_channels, width = sources.shape[0], x.shape[-1], weight.shape[-1]
    if write_sources is None or write_slots is None:
        write_sources = torch.empty((0, width - 1), dtype=torch.int32, device=x.device)
        write_slots = write_sources[:, 0].contiguous() if width > 1 else write_sources.flatten()
    if out is None:
        out = torch.empty((size, num_channels), dtype=x.dtype, device=x.device)
    _check(x, tails, sources, weight, bias, write_sources, write_slots, out)
    few = config is None and is_few(size, write_sources.numel())
    variant = _variant(x.device, x.dtype, tails.dtype, weight.dtype, width, bias is not None, has_silu, config, few)
    if backend == "triton" or (backend == "auto" and _may_take_kernel(x, tails, weight) and is_trusted(variant)):
        from hypic_kernels.conv import triton as kernel

        if few:
            kernel.convolve_few(x, tails, sources, weight, bias, has_silu, out, write_sources, write_slots).run()
            return out
        if scratch is None:
            scratch = torch.empty((*write_sources.shape, num_channels), dtype=tails.dtype, device=x.device)
        layout = config or CANDIDATES[0]
        writes = (write_sources, write_slots, scratch)
        for launch in kernel.convolve(x, tails, sources, weight, bias, has_silu, out, *writes, layout):
            launch.run()
        return out
    dtype = torch.promote_types(x.dtype, torch.float32)
    out.copy_(reference.convolve(x, tails, sources, weight, bias, has_silu, dtype))
    kept = write_slots >= 0
    written = reference.gather(x, tails, write_sources).to(tails.dtype)
    tails[write_slots[kept].long()] = written[kept]
    return out


def _may_take_kernel(x: Tensor, tails: Tensor, weight: Tensor) -> bool:
    """Whether ``auto`` may mean the kernel: CUDA, types that it reads, no gradient."""
    if not x.is_cuda or not available() or interpreted():
        return False
    tensors = (x, tails, weight)
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not wants_gradient and all(tensor.dtype in STORAGE for tensor in tensors)


def _check(
    x: Tensor,
    tails: Tensor,
    sources: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    write_sources: Tensor,
    write_slots: Tensor,
    out: Tensor,
) -> None:
    num_channels, width = x.shape[-1], weight.shape[-1]
    _fits("weight", weight, (num_channels, width))
    _fits("tails", tails, (tails.shape[0], width - 1, num_channels))
    _fits("out", out, (sources.shape[0], num_channels))
    if bias is not None:
        _fits("bias", bias, (num_channels,))
    _fits("sources", sources, (sources.shape[0], width))
    _fits("write_sources", write_sources, (write_slots.shape[0], width - 1))
    _fits("write_slots", write_slots, write_slots.shape[:1])
    for name, table in (("sources", sources), ("write_sources", write_sources), ("write_slots", write_slots)):
        if table.dtype != torch.int32 or not table.is_contiguous():
            raise ConvError(f"{name} is {table.dtype}; it must be contiguous int32.")
    if not tails.is_contiguous():
        raise ConvError("tails must be contiguous.")
    if num_channels > 1 and (x.stride(-1) != 1 or out.stride(-1) != 1):
        raise ConvError("x and out must have their channels side by side; call .contiguous() first.")


def _fits(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ConvError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}.")

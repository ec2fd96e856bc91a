"""Add and norm, gate and product: against formulas in float64, in the interpreter and on a GPU."""

from __future__ import annotations

import math
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.pointwise import Backend, PointwiseError, add_rms_norm, silu_mul
from hypic_kernels.pointwise.check import NormVariant, SiluVariant
from hypic_kernels.trust import relative_error

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [1, 17, 64, 130]
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
on_both = pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])


def exact_norm(total: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [row / math.sqrt(float(row.dot(row)) / len(row) + eps) * weight.double() for row in total.double()]
    return torch.stack(rows)


@on_both
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize("is_zero_centred", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_add_and_norm(size: int, is_zero_centred: bool, has_residual: bool, backend: Backend) -> None:
    wide, weight = torch.randn(3, 2 * size), torch.randn(size)
    x, residual = wide[:, :size], torch.randn(3, size) if has_residual else None
    kept = wide.clone()
    normed, total = add_rms_norm(x, residual, weight, eps=1e-5, is_zero_centred=is_zero_centred, backend=backend)
    expected = x if residual is None else x + residual
    assert torch.equal(total, expected) and torch.equal(wide, kept)
    scale = 1 + weight if is_zero_centred else weight
    assert relative_error(normed, exact_norm(expected, scale, 1e-5)) < 1e-6
    assert relative_error(normed, exact_norm(expected, scale + 0.001, 1e-5)) > 1e-4


@on_both
@pytest.mark.parametrize("size", [*SIZES, 1030])
def test_gate_and_product(size: int, backend: Backend) -> None:
    both = torch.randn(3, 2 * size)
    gate, up = both[:, :size], both[:, size:]
    out = silu_mul(gate, up, backend=backend)
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    assert out.is_contiguous() and relative_error(out, exact) < 1e-6


@on_both
def test_the_sum_is_rounded_before_it_is_normed(backend: Backend) -> None:
    # Not bfloat16: the interpreter cuts where a GPU rounds.
    x, residual, weight = torch.randn(4, 64).half(), torch.randn(4, 64).half(), torch.ones(64)
    normed, total = add_rms_norm(x, residual, weight, eps=1e-6, backend=backend)
    assert total.dtype == F16 and torch.equal(total, x + residual)
    assert relative_error(normed, exact_norm(total, weight, 1e-6)) < 2**-11


def test_what_does_not_fit() -> None:
    x = torch.ones(3, 4)
    for wrong in (torch.ones(3, 5), torch.ones(3, 4).bfloat16(), torch.ones(4, 3).T):
        with pytest.raises(PointwiseError):
            silu_mul(x, wrong)
        with pytest.raises(PointwiseError):
            add_rms_norm(x, wrong, torch.ones(4), eps=1e-6)
    with pytest.raises(PointwiseError, match="weight"):
        add_rms_norm(x, None, torch.ones(3), eps=1e-6)
    with pytest.raises(PointwiseError, match="must be"):
        silu_mul(torch.ones(3), torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("size", [1, 128, 2048, 3840, 9216])
def test_on_a_gpu(size: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for adds in (True, False):
        for is_zero_centred in (True, False):
            variant = NormVariant(device, dtype, F32, size, adds, is_zero_centred)
            assert variant.measure() <= variant.tolerance
    assert SiluVariant(device, dtype, size).measure() <= SiluVariant(device, dtype, size).tolerance

"""Add and norm, gate and product, heads and groups: against formulas in float64, in the interpreter and on a GPU."""

from __future__ import annotations

import math
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.pointwise import Backend, PointwiseError, add_rms_norm, gated_group_norm, heads, silu_mul
from hypic_kernels.pointwise.check import GateVariant, HeadsVariant, NormVariant, SiluVariant
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


def exact_head(x: Tensor, weight: Tensor | None, angles: Tensor | None) -> Tensor:
    """One head ``[D]``, one pair of channels after the other."""
    x = x.double() if weight is None else exact_norm(x[None], weight, 1e-5)[0]
    for pair, angle in enumerate([] if angles is None else angles.double().tolist()):
        one, other = float(x[pair]), float(x[pair + len(angles)])  # type: ignore[arg-type]
        x[pair] = math.cos(angle) * one - math.sin(angle) * other
        x[pair + len(angles)] = math.cos(angle) * other + math.sin(angle) * one  # type: ignore[arg-type]
    return x


@on_both
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "size", "num_turned"), [(3, 17, 4), (5, 16, 8), (1, 6, 1), (2, 130, 0)])
def test_heads_are_normed_then_rotated(
    num_heads: int, size: int, num_turned: int, has_norm: bool, backend: Backend
) -> None:
    wide = torch.randn(3, 2 * num_heads, size)
    x, weight = wide[:, ::2], torch.randn(size) if has_norm else None
    angles = 6 * torch.rand(3, num_turned, dtype=torch.float64) if num_turned else None
    cos, sin = (None, None) if angles is None else (angles.cos().float(), angles.sin().float())
    out = heads(x, weight=weight, eps=1e-5, cos=cos, sin=sin, backend=backend)
    exact = torch.stack(
        [torch.stack([exact_head(head.clone(), weight, None if angles is None else angles[n]) for head in token])
         for n, token in enumerate(x)]
    )  # fmt: skip
    assert out.is_contiguous() and relative_error(out, exact) < 1e-6
    if angles is not None:
        other = heads(x, weight=weight, eps=1e-5, cos=sin, sin=cos, backend=backend)
        assert relative_error(other, exact) > 1e-4
    if weight is not None:
        centred = heads(x, weight=weight, eps=1e-5, is_zero_centred=True, cos=cos, sin=sin, backend=backend)
        again = heads(x, weight=1 + weight, eps=1e-5, cos=cos, sin=sin, backend=backend)
        assert relative_error(centred, again.double()) < 1e-6


@on_both
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize(("size", "num_groups"), [(24, 4), (130, 1), (51, 3), (1, 1)])
def test_groups_are_normed_and_gated(
    size: int, num_groups: int, gates_first: bool, silu: bool, backend: Backend
) -> None:
    x, gate = torch.randn(3, 2 * size)[:, :size], torch.randn(3, 2 * size)[:, size:]
    weight, how = torch.randn(size), {"num_groups": num_groups, "eps": 1e-5}
    out = gated_group_norm(x, gate, weight, silu=silu, gates_first=gates_first, backend=backend, **how)  # type: ignore[arg-type]
    opened = 1 / (1 + (-gate.double()).exp())
    opened = opened * gate.double() if silu else opened
    value = x.double() * opened if gates_first else x.double()
    parts = [
        exact_norm(part, w, 1e-5) for part, w in zip(value.chunk(num_groups, 1), weight.chunk(num_groups), strict=True)
    ]
    exact = torch.cat(parts, 1) if gates_first else torch.cat(parts, 1) * opened
    assert relative_error(out, exact) < 1e-6
    wrong = gated_group_norm(x, gate + 0.01, weight, silu=silu, gates_first=gates_first, backend=backend, **how)  # type: ignore[arg-type]
    assert size == 1 or relative_error(wrong, exact) > 1e-4


def test_heads_and_groups_that_do_not_fit() -> None:
    x, angles = torch.ones(3, 2, 8), torch.ones(3, 2)
    for wrong in (
        {"weight": torch.ones(7)},
        {"cos": angles},
        {"cos": angles[:2], "sin": angles[:2]},
        {"cos": torch.ones(3, 5), "sin": torch.ones(3, 5)},
    ):
        with pytest.raises(PointwiseError):
            heads(x, **wrong)  # type: ignore[arg-type]
    with pytest.raises(PointwiseError, match="side by side"):
        heads(x.mT)
    with pytest.raises(PointwiseError, match="equal parts"):
        gated_group_norm(torch.ones(2, 9), torch.ones(2, 9), torch.ones(9), num_groups=2, eps=1e-5)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("num_heads", "size", "num_turned"), [(16, 128, 32), (4, 128, 64), (2, 256, 32), (1, 64, 32)])
def test_heads_on_a_gpu(num_heads: int, size: int, num_turned: int, dtype: torch.dtype) -> None:
    for weight in (None, dtype, F32):
        for turned in (num_turned, 0):
            angles = F32 if turned else None
            variant = HeadsVariant(torch.device("cuda"), dtype, weight, angles, num_heads, size, turned, True)
            assert variant.measure() <= variant.tolerance, variant


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize(("size", "num_groups"), [(2048, 4), (8192, 1), (4096, 8), (96, 3)])
def test_groups_on_a_gpu(size: int, num_groups: int, dtype: torch.dtype) -> None:
    for silu in (True, False):
        for gates_first in (True, False):
            variant = GateVariant(torch.device("cuda"), F32, dtype, dtype, size, num_groups, silu, gates_first)
            assert variant.measure() <= variant.tolerance, variant

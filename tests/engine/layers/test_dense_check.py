"""How flash attention proves itself at first use: what is wrong or fails is not used, and that is said once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hypic.engine.layers import dense
from hypic.engine.layers.dense import FlashAttention, Heads
from hypic_kernels.trust import LostDeviceError
from tests.engine.layers.dense_rows import CPU, HALF, KINDS


def sees_all(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def unscaled(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    return dense.whole(q, k, v, 1.0)


def wrong_alone(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    return dense.whole(q, k, v, scale) * (1.0 if len(q) > 1 else 1.1)


def wrong_together(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    return dense.whole(q, k, v, scale) * (1.0 if len(q) < 3 else 1.1)


def no_number(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    out = dense.whole(q, k, v, scale)
    out[..., -1, -1] = math.nan
    return out


def fails(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


def lost(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "scale"), KINDS)
def test_a_product_that_is_right_is_used(
    num_heads: int, num_kv_heads: int, head_dim: int, scale: float | None, dtype: torch.dtype
) -> None:
    heads = Heads(CPU, dtype, num_heads, num_kv_heads, head_dim, scale)
    assert dense.tried("flash", heads, dense.whole) == "flash"
    assert FlashAttention(heads, dense.whole).measure() < dense.TOLERANCES[dtype] / 2
    assert FlashAttention(heads, sees_all).measure() > 10 * dense.TOLERANCES[dtype]


@pytest.mark.parametrize("wrong", [sees_all, unscaled, wrong_alone, wrong_together, no_number, fails])
def test_one_that_is_wrong_or_fails_is_not_used_and_that_is_said_once(wrong: dense.Product) -> None:
    pytest.importorskip("triton")
    heads = Heads(CPU, torch.bfloat16, 8, 4, 32)
    with pytest.warns(RuntimeWarning, match="is not used: .* scaled_dot_product_attention is") as said:
        assert [dense.tried("flash", heads, wrong) for _ in range(3)] == ["whole"] * 3
    assert len(said) == 1
    assert dense.tried("flash", heads, dense.whole) == "flash"


def test_a_device_that_is_lost_is_an_error() -> None:
    pytest.importorskip("triton")
    with pytest.raises(LostDeviceError, match="nothing can run"):
        dense.tried("flash", Heads(CPU, torch.bfloat16, 8, 4, 32), lost)


def test_the_check_leaves_the_callers_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    FlashAttention(Heads(CPU, torch.bfloat16, 8, 4, 32), dense.whole).measure()
    assert torch.equal(before, torch.get_rng_state())

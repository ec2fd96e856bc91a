"""Products of few tokens against sums written out number by number, reference and kernel alike."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, interpreted
from hypic_kernels.matvec import Backend, MatvecError, normed_product, product, takes_normed, takes_product
from hypic_kernels.matvec.check import NormedVariant, ProductVariant
from hypic_kernels.matvec.layout import MOST_NORMED_WIDTH, NORMED, PRODUCTS, Sizes, choose, choose_normed, widest
from hypic_kernels.trust import relative_error

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]
on_both = pytest.mark.parametrize("backend", BACKENDS)
by_shape = pytest.mark.parametrize(("num", "columns", "width"), [(1, 9, 37), (3, 4, 64), (2, 1, 1), (4, 13, 130)])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written_out(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.zeros(len(x), len(weight), dtype=F64)
    for n, row in enumerate(x.tolist()):
        for m, along in enumerate(weight.tolist()):
            out[n, m] = sum(a * b for a, b in zip(row, along, strict=True))
    return out


@on_both
@by_shape
def test_a_product_is_the_written_out_sum(num: int, columns: int, width: int, backend: Backend) -> None:
    x, weight = draw(num, 2 * width)[:, :width], draw(columns, width, seed=1)
    exact = written_out(x, weight)
    assert relative_error(product(x, weight, backend=backend), exact) < 1e-5
    assert relative_error(product(x * 1.01, weight, backend=backend), exact) > 1e-3


@on_both
@by_shape
@pytest.mark.parametrize("is_zero_centred", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_a_normed_product_is_the_written_out_sum(
    num: int, columns: int, width: int, is_zero_centred: bool, adds: bool, backend: Backend
) -> None:
    x, residual = draw(num, 2 * width)[:, :width], draw(num, 3 * width, seed=1)[:, :width]
    scale, weight = draw(width, seed=2), draw(columns, width, seed=3)
    total = x.double() + residual.double() if adds else x.double()
    normed = torch.zeros_like(total)
    for n, row in enumerate(total.tolist()):
        root = (sum(value * value for value in row) / width + 1e-5) ** 0.5
        normed[n] = total[n] / root * (scale.double() + (1.0 if is_zero_centred else 0.0))
    given = (scale, weight)
    added = residual if adds else None
    found = normed_product(x, added, *given, eps=1e-5, is_zero_centred=is_zero_centred, backend=backend)
    for one, other in zip(found, (written_out(normed, weight), normed, total), strict=True):
        assert relative_error(one, other) < 1e-5
    wrong = normed_product(x, added, *given, eps=1.0, is_zero_centred=is_zero_centred, backend=backend)
    assert relative_error(wrong.product, found.product.double()) > 1e-3


@on_both
def test_sick_numbers_stay_in_their_row_and_column(backend: Backend) -> None:
    x, weight, scale = draw(3, 20), draw(7, 20, seed=1), draw(20, seed=2)
    exact = product(x.double(), weight.double(), backend="reference")
    x[1, 3], weight[5, 2] = torch.nan, torch.inf
    found = product(x, weight, backend=backend)
    kept = [0, 1, 2, 3, 4, 6]
    assert bool(found[1].isnan().all()) and relative_error(found[[0, 2]][:, kept], exact[[0, 2]][:, kept]) < 1e-5
    behind = normed_product(x, None, scale, weight, eps=1e-6, backend=backend)
    assert bool(behind.product[1].isnan().all()) and bool(behind.product[[0, 2]][:, kept].isfinite().all())


@needs_interpreter
@pytest.mark.parametrize("width", [33, 64, 150])
@pytest.mark.parametrize("sizes", [Sizes(4, 32, 1, 4), Sizes(2, 64, 3, 4), Sizes(1, 2048, 1, 2)])
def test_sizes_in_the_interpreter(sizes: Sizes, width: int) -> None:
    device = torch.device("cpu")
    variants: list[ProductVariant | NormedVariant] = [ProductVariant(device, F32, width, sizes)]
    variants += [NormedVariant(device, F32, F32, width, adds, adds, sizes) for adds in (True, False)]
    for variant in variants:
        assert variant.measure() <= variant.tolerance


def test_for_which_sizes_is_said_by_tables() -> None:
    for table, pick in ((PRODUCTS, choose), (NORMED, choose_normed)):
        row = table[0]
        assert pick(1, (8, 64), BF16) == row.sizes
        assert pick(table[-1].most_tokens + 1, (8, 64), BF16) is None
        assert pick(1, (row.most_bytes, 64), BF16) is None
        assert widest(table, BF16) == table[-1].sizes
        found = pick(1, (8, 64), F32)
        assert found is not None and found.block_k * 2 == row.sizes.block_k
    assert choose_normed(1, (1, MOST_NORMED_WIDTH + 1), BF16) is None
    x, weight = draw(1, 8), draw(4, 8)
    assert not takes_product(x, weight)  # a CPU has no kernels
    assert not takes_normed(x, x[0], weight, adds=True, is_zero_centred=True)


def test_what_does_not_fit_is_said() -> None:
    x, weight, scale = draw(2, 8), draw(3, 8), draw(8)
    wide = draw(1, MOST_NORMED_WIDTH + 1)
    calls: tuple[Callable[[], object], ...] = (
        lambda: product(x, weight[:, :7]),
        lambda: product(x, draw(8, 3).T),
        lambda: product(x.half(), weight),
        lambda: product(x[0], weight),
        lambda: normed_product(x, None, scale[:7], weight, eps=1e-6),
        lambda: normed_product(x, x[:1], scale, weight, eps=1e-6),
        lambda: normed_product(x, x.half(), scale, weight, eps=1e-6),
        lambda: normed_product(wide, None, wide[0], wide, eps=1e-6, backend="triton"),
    )
    for call in calls:
        with pytest.raises(MatvecError):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("width", [512, 2048, 4096, 1000, 77])
def test_products_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for num in (1, PRODUCTS[-1].most_tokens):
        sizes = choose(num, (8, width), dtype)
        assert sizes is not None
        plain = ProductVariant(device, dtype, width, sizes)
        assert plain.measure() <= plain.tolerance
    sizes = choose_normed(1, (8, width), dtype)
    assert sizes is not None
    for adds in (True, False):
        for norm_dtype in {dtype, F32}:
            variant = NormedVariant(device, dtype, norm_dtype, width, adds, not adds, sizes)
            assert variant.measure() <= variant.tolerance

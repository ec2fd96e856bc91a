"""Products of experts' rows against loops over single numbers' sums, reference and kernel alike."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from hypic_kernels import available, experts, interpreted
from hypic_kernels.experts import Backend, ExpertsError, choose, down, fits, gate_up, layout
from hypic_kernels.experts.check import ProductVariant
from hypic_kernels.experts.layout import Config, Kind, Layout
from hypic_kernels.trust import relative_error

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
needs_interpreter = pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1",
)
BACKENDS = ["reference", pytest.param("triton", marks=needs_interpreter)]
on_both = pytest.mark.parametrize("backend", BACKENDS)
COUNTS = {
    "spread": [2, 0, 3, 1, 1],
    "one has all": [0, 0, 35, 0],
    "none has any": [0, 0, 0],
    "few of many": [0] * 7 + [1] + [0] * 9 + [2] + [0] * 3,
    "one expert": [5],
    "every second": [1, 0] * 6,
}
by_counts = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def written_out(x: Tensor, weight: Tensor, counts: list[int], kind: Kind) -> Tensor:
    """Row by row and column by column."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    num_columns = weight.shape[1] // (2 if kind == "silu" else 1)
    out = torch.zeros(len(x), num_columns, dtype=F64)
    for row, expert in enumerate(experts):
        for column in range(num_columns):
            value = float(x[row].double().dot(weight[expert, column].double()))
            if kind == "silu":
                value *= float(x[row].double().dot(weight[expert, num_columns + column].double()))
                value /= 1 + 2.718281828459045 ** -float(x[row].double().dot(weight[expert, column].double()))
            if kind == "relu2":
                value = max(value, 0.0) ** 2
            out[row, column] = value
    return out


@on_both
@by_counts
@pytest.mark.parametrize("is_gated", [True, False])
def test_gate_up_equals_the_written_out_sum(counts: list[int], is_gated: bool, backend: Backend) -> None:
    num, width, half = sum(counts), 37, 9
    x, weight = draw(num, width), draw(len(counts), half * (2 if is_gated else 1), width, seed=1)
    exact = written_out(x, weight, counts, "silu" if is_gated else "relu2")
    found = gate_up(x, weight, ends_of(counts), is_gated=is_gated, backend=backend)
    assert found.shape == exact.shape and relative_error(found, exact) < 1e-5
    if num:
        wrong = gate_up(x, weight.roll(1, 1), ends_of(counts), is_gated=is_gated, backend=backend)
        assert relative_error(wrong, exact) > 1e-3


@on_both
@by_counts
def test_down_equals_the_written_out_sum(counts: list[int], backend: Backend) -> None:
    rows, weight = draw(sum(counts), 24), draw(len(counts), 41, 24, seed=1)
    exact = written_out(rows, weight, counts, "none")
    found = down(rows, weight, ends_of(counts), backend=backend)
    assert found.shape == exact.shape and relative_error(found, exact) < 1e-5
    if len(counts) > 1 and rows.numel():
        assert relative_error(down(rows, weight.roll(1, 0), ends_of(counts), backend=backend), exact) > 1e-3


@on_both
@by_counts
def test_rows_may_be_named_by_token(counts: list[int], backend: Backend) -> None:
    wide, weight = draw(6, 40), draw(len(counts), 12, 33, seed=1)
    x, tokens = wide[:, :33], (draw(sum(counts), seed=2).argsort() % 6).to(torch.int32)
    found = gate_up(x, weight, ends_of(counts), tokens=tokens, backend=backend)
    copied = gate_up(x[tokens.long()], weight, ends_of(counts), backend=backend)
    assert relative_error(found, copied) < 1e-6
    if len(tokens) > 2:
        shifted = gate_up(x, weight, ends_of(counts), tokens=tokens.roll(1), backend=backend)
        assert relative_error(shifted, copied) > 1e-3


@on_both
@pytest.mark.parametrize("is_gated", [True, False])
def test_sick_numbers_stay_in_their_row_and_expert(is_gated: bool, backend: Backend) -> None:
    counts = [2, 3, 0, 2]
    x, weight = draw(7, 20), draw(4, 8, 20, seed=1)
    exact = written_out(x, weight, counts, "silu" if is_gated else "relu2")
    x[3], weight[0], weight[2] = torch.nan, torch.nan, torch.inf
    found = gate_up(x, weight, ends_of(counts), is_gated=is_gated, backend=backend)
    assert bool(found[[0, 1, 3]].isnan().all())
    assert relative_error(found[[2, 4, 5, 6]], exact[[2, 4, 5, 6]]) < 1e-5


@needs_interpreter
@pytest.mark.parametrize("kind", ["silu", "relu2", "none"])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rest", [0, 16, 5])
def test_layouts_in_the_interpreter(kind: Kind, by_row: bool, rest: int) -> None:
    for is_indexed in (False, True):
        config = Config(16, 16, 32, 3, 4)
        variant = ProductVariant(torch.device("cpu"), F32, kind, is_indexed, rest, Layout(config, by_row))
        assert variant.measure() <= variant.tolerance


@needs_interpreter
@pytest.mark.parametrize("by_row", [True, False])
def test_rows_behind_the_last_end_are_not_written(by_row: bool) -> None:
    from hypic_kernels.experts import products

    counts, x, weight = [2, 0, 1], draw(9, 20), draw(3, 6, 20, seed=1)
    out = torch.full((9, 6), -7.0)
    chosen = Layout(Config(16, 16, 32, 3, 4), by_row)

    products.multiply(x, weight, ends_of(counts), None, "none", out, chosen).run()
    assert relative_error(out[:3], written_out(x[:3], weight, counts, "none")) < 1e-5
    assert bool((out[3:] == -7.0).all())


def test_layouts_follow_the_number_of_rows() -> None:
    assert fits(2048, 256) and fits(8192, 256) and not fits(8193, 256)
    assert choose(8, 256, "silu", BF16).by_row and not choose(512, 256, "silu", BF16).by_row
    found = [choose(rows, 256, "silu", BF16).config.block_m for rows in (8, 512, 2048, 8192)]
    assert found == sorted(found) and found[0] == 16 and found[-1] == 64
    for kind in ("silu", "relu2", "none"):
        for dtype in (F32, BF16):
            for rows in (0, 1, 7, 33, 255, 256, 1000, 2048, 5000, 100_000):
                assert choose(rows, 256, kind, dtype) in layout.layouts(kind, dtype)
    large = choose(65536, 256, "none", BF16, 227 << 10)
    assert large == layout.LARGE != choose(65535, 256, "none", BF16, 227 << 10)
    for other in (("silu", BF16, 227 << 10), ("none", F32, 227 << 10), ("none", BF16, 163 << 10)):
        assert choose(65536, 256, *other) != large  # type: ignore[arg-type]
    assert choose(8, 256, "none", F32).config.block_k * 2 == choose(8, 256, "none", BF16).config.block_k


def test_what_does_not_fit_is_said() -> None:
    x, weight, ends = draw(4, 8), draw(3, 6, 8), ends_of([1, 2, 1])
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: gate_up(x, weight[:, :5], ends),
        lambda: gate_up(x, weight[..., :7], ends),
        lambda: gate_up(x, weight, ends[:2]),
        lambda: gate_up(x, weight, ends.long()),
        lambda: gate_up(x, weight, ends, tokens=torch.arange(4)),
        lambda: gate_up(x.half(), weight, ends),
        lambda: gate_up(draw(8, 4).T, weight, ends),
        lambda: down(x, weight[0], ends),
        lambda: down(x[0], weight, ends),
    )
    for call in calls:
        with pytest.raises(ExpertsError):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kind", ["silu", "relu2", "none"])
@pytest.mark.parametrize("rest", [0, 16, 5])
def test_products_on_a_gpu(kind: Kind, rest: int, dtype: torch.dtype) -> None:
    large = [layout.LARGE] if layout.is_many(256, 1, kind, dtype, experts._room(torch.device("cuda"))) else []
    for chosen in [*layout.layouts(kind, dtype), *large]:
        for is_indexed in (False, True):
            variant = ProductVariant(torch.device("cuda"), dtype, kind, is_indexed, rest, chosen)
            assert variant.measure() <= variant.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@by_counts
def test_any_counts_on_a_gpu(counts: list[int], dtype: torch.dtype) -> None:
    ends, num = ends_of(counts).cuda(), sum(counts)
    x, weight = draw(num, 200).to("cuda", dtype), (draw(len(counts), 96, 200, seed=1) / 14).to("cuda", dtype)
    into = gate_up(x, weight, ends, backend="triton")
    exact = gate_up(x.double(), weight.double(), ends, backend="reference")
    assert relative_error(into, exact) < (1e-5 if dtype == F32 else 1e-2)

"""The bench measures what it says: its workload, its baseline and its errors, on a small size and a CPU."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from hypic_kernels import available, interpreted
from hypic_kernels.compose import Config, bench
from hypic_kernels.compose.bench import Size, Workload

SMALL = Size(num_layers=2, num_segments=3, num_heads=2, key_dim=16, value_dim=24, num_chains=2)


def error(work: Workload, run: object) -> float:
    exact = [work.exact(layer) for layer in (0, work.size.num_layers - 1)]
    assert not torch.equal(*exact), "layers should have maps of their own"
    return bench._error(run, work, exact)  # type: ignore[arg-type]


def test_bytes_and_operations() -> None:
    assert Size().map_bytes == 30 * 16 * 32 * (128 * 128 + 128 * 128) * 4
    assert Size(dtype="bfloat16").map_bytes == Size().map_bytes // 2
    assert Size(num_chains=2).num_operations == 2 * 30 * 16 * 32 * 2 * 128**3


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_the_baseline_is_right(dtype: str) -> None:
    work = Workload.random(Size(**{**SMALL.__dict__, "dtype": dtype}), "cpu")
    assert error(work, work.run_baddbmm) < 1e-6


def test_a_wrong_result_is_seen() -> None:
    work = Workload.random(SMALL, "cpu")
    assert error(work, lambda layer: work.run_baddbmm(0)) > 0.1
    assert not error(work, lambda layer: None) < 1


@pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="needs Triton 3.7 or newer with TRITON_INTERPRET=1",
)
def test_the_kernel_is_called_right() -> None:
    work = Workload.random(SMALL, "cpu")
    assert error(work, lambda layer: work.run_kernel(layer, "ieee", Config(16, 4, 3))) < 1e-6


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "available", lambda: False)
    assert bench.main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err

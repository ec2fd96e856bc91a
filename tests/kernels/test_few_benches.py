"""The benches of few tokens in Triton's interpreter: every size is compared, a wrong one is not timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import pytest
import torch

from hypic_kernels import available, interpreted

if not (available() and interpreted()) or version("triton") < "3.7":
    pytest.skip("kernels on CPU tensors need Triton 3.7 or newer with TRITON_INTERPRET=1", allow_module_level=True)

from hypic_kernels.experts import bench_few
from hypic_kernels.experts.layout import Few
from hypic_kernels.matvec import bench
from hypic_kernels.matvec.layout import Sizes


def run_once(runs: Sequence[Callable[[], object]], repeats: int) -> float:
    for run in runs:
        run()
    return 1e-5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_few, bench):
        monkeypatch.setattr(module, "replayed_s", run_once)
    for name, value in {"INTO": (Few(4, 16, 1, 4),), "BACK": (Few(2, 8, 1, 4, 2),), "NUM_SETS": 2}.items():
        monkeypatch.setattr(bench_few, name, value)
    for name, found in {"SIZES": (Sizes(2, 16, 1, 4),), "NORMED_SIZES": (Sizes(4, 64, 1, 4),), "MOST_SETS": 2}.items():
        monkeypatch.setattr(bench, name, found)
    monkeypatch.setattr(bench, "draw", lambda *shape: torch.randn(shape) / 5)


def test_experts_are_compared_and_timed() -> None:
    of = bench_few.Matrices.beside(torch.randn(6, 8, 16) / 4, torch.randn(6, 16, 4) / 2, 2)
    rows = list(bench_few.rows(of, 1))
    assert {row["tokens"] for row in rows} == {1, 2, 4, 8, 16} and all(row["us"] > 0 for row in rows)
    assert all(row.get("relative_error", 0.0) < 1e-5 for row in rows)
    assert [row["name"] for row in rows if row["tokens"] == 1 and row.get("chosen", True)][:2] == ["in", "back"]


def test_products_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, Any] = {"a": (9, 40)}
    monkeypatch.setattr(bench, "PLAIN", shapes)
    monkeypatch.setattr(bench, "BEHIND_NORM", shapes)
    rows = [*bench.plain(2, "a", 1), *bench.behind_norm(1, "a", 1)]
    assert [row["us"] for row in rows] == [10.0] * 4 and rows[0]["relative_error"] < 1e-5 > rows[2]["relative_error"]


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, Any] = {"a": (9, 40)}
    monkeypatch.setattr(bench, "PLAIN", shapes)
    monkeypatch.setattr(bench, "LIMIT", -1.0)
    first, library = bench.plain(1, "a", 1)
    assert "us" not in first and "wrong" in first["fault"] and library["us"] == 10.0

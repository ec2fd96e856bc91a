"""A kernel's check at first use: now and then wrong is wrong, and a device that is lost is not taken for a slow one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hypic_kernels.trust as trust

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "interpreted", lambda: False)


def errors(*numbers: float) -> Callable[[], float]:
    return iter(numbers).__next__


def test_right_each_time_is_right() -> None:
    assert trust.fault_of(errors(*[1e-6] * trust.RUNS), 1e-5) is None


@pytest.mark.parametrize("wrong", [1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize("when", range(trust.RUNS))
def test_wrong_once_is_wrong(when: int, wrong: float) -> None:
    numbers = [1e-6] * trust.RUNS
    numbers[when] = wrong
    assert f"{wrong:.1e}" in str(trust.fault_of(errors(*numbers), 1e-5))


def test_a_kernel_that_does_not_fit_is_not_used() -> None:
    def fails() -> float:
        raise RuntimeError("out of resource: shared memory")

    assert "shared memory" in str(trust.fault_of(fails, 1e-5))


@pytest.mark.parametrize("what", ["an illegal memory access", "an illegal instruction"])
def test_a_lost_device_is_said(what: str) -> None:
    def fails() -> float:
        raise RuntimeError(f"CUDA error: {what} was encountered\nCompile with ...")

    with pytest.raises(trust.LostDeviceError, match=rf"\(CUDA error: {what}.*\), and nothing can run"):
        trust.fault_of(fails, 1e-5)


def test_too_little_memory_for_a_check_says_nothing_of_the_kernel() -> None:
    def fails() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        trust.fault_of(fails, 1e-5)

"""On which chips steps are run by kernels, and what is said where they are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import hypic_kernels
from hypic.engine.kernel_choice import _takes_kernels
from hypic.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with Triton and a GPU, whatever is here."""
    monkeypatch.setattr(hypic_kernels, "find_spec", lambda name: object())
    monkeypatch.setattr(hypic_kernels, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    hypic_kernels.missing.cache_clear()
    yield
    hypic_kernels.missing.cache_clear()


def test_a_gpu_takes_kernels_and_a_cpu_their_references_when_asked() -> None:
    assert _takes_kernels("auto", CUDA) and _takes_kernels("on", CUDA) and not _takes_kernels("off", CUDA)
    assert _takes_kernels("on", CPU) and not _takes_kernels("auto", CPU)


@pytest.mark.parametrize("why", ["old", "amd", "triton"])
def test_what_cannot_run_them_is_told(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = {"old": "compute capability 7.5", "amd": "AMD", "triton": "Triton is not installed"}[why]
    if why == "old":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    elif why == "amd":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.setattr(hypic_kernels, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "hypic"):
        assert not _takes_kernels("auto", CUDA)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=f"kernels is 'on', and .*{reason}"):
        _takes_kernels("on", CUDA)
    assert not _takes_kernels("off", CUDA)

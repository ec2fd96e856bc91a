"""The kernel compiles for chips that are not here, and takes no more shared memory than they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hypic_kernels.attention import ahead
from hypic_kernels.attention.layout import SHARED_BYTES, Config, default_config

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROOT = Path(__file__).parents[3]


def compiled(*words: str) -> list[dict[str, object]]:
    """In a process of its own: here kernels may have been loaded for the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "hypic_kernels.attention.ahead", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


@needs_triton
def test_it_compiles_for_every_chip() -> None:
    found = compiled("--heads", "64", "--dtype", "bfloat16", "--capability", "80", "--capability", "90")
    assert {row["capability"] for row in found} == {80, 90} and all(row["fits"] for row in found)


@needs_triton
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("heads", ahead.HEADS)
def test_every_layout_compiles_for_every_chip(heads: str, capability: int) -> None:
    """And the estimate that layouts are chosen by is never too low."""
    for row in compiled("--heads", heads, "--capability", str(capability)):
        config = Config(**row["config"])  # type: ignore[arg-type]
        limit = SHARED_BYTES[capability]
        estimate = config.shared_bytes(ahead.HEADS[heads], getattr(torch, str(row["dtype"])), limit)
        assert int(str(row["shared_bytes"])) <= estimate <= limit


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", ahead.TYPES, ids=str)
@pytest.mark.parametrize("heads", ahead.HEADS)
def test_a_layout_is_found_for_every_chip(heads: str, dtype: torch.dtype, capability: int) -> None:
    dims, limit = ahead.HEADS[heads], SHARED_BYTES[capability]
    for tile in ahead.tiles(dims, dtype, limit):
        config = default_config(dims, dtype, tile, limit)
        assert config.shared_bytes(dims, dtype, limit) <= limit and config.block_m >= tile


def test_in_the_interpreter_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ahead, "interpreted", lambda: True)
    monkeypatch.setattr(ahead, "find_spec", lambda name: object())
    assert ahead.main([]) == 1
    assert "TRITON_INTERPRET unset" in capsys.readouterr().err

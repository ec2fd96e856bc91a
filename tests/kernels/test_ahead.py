"""Kernels compile for chips that are not here, and fit into their shared memory; no GPU is needed for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).parents[2] / "kernels"


def compiled(words: Sequence[str], cache: Path) -> list[dict[str, object]]:
    """Lines of ``python -m hypic_kernels.ahead``, in a process whose Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(KERNELS), *sys.path[1:]])}
    command = [sys.executable, "-m", "hypic_kernels.ahead", *words]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert lines, found.stderr
    assert [line for line in lines if not line["fits"]] == []
    assert found.returncode == 0
    return lines


@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", ["attention", "delta", "decay", "conv", "pointwise", "experts", "matvec"])
def test_default_layouts_compile(operation: str, tmp_path: Path) -> None:
    assert {line["capability"] for line in compiled([operation, "--capability", "90"], tmp_path)} == {90}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("operation", ["attention", "delta", "decay", "conv", "pointwise", "experts", "matvec"])
def test_every_layout_compiles(operation: str, capability: int, tmp_path: Path) -> None:
    assert compiled([operation, "--every", "--capability", str(capability)], tmp_path)


READ_OUT_OF_ORDER = """
import torch
from hypic_kernels.experts import routing
logits, weights, chosen = torch.zeros(3, 64), torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int32)
print(routing.route_groups(logits, None, 1, 1, 1.0, True, weights, chosen).compile(90).asm["ttgir"])
"""


def test_no_place_is_looked_for_among_numbers_out_of_order(tmp_path: Path) -> None:
    """Triton 3.6 takes a reshaped tensor that is only reduced in any order, also where the place of the largest is
    asked for. What is reduced once, for one expert of one group, is what it did so to."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(KERNELS), *sys.path[1:]])}
    command = [sys.executable, "-c", READ_OUT_OF_ORDER]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "tt.reduce" in found.stdout and "allow_reorder" not in found.stdout


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hypic_kernels import ahead

    class Large:
        class metadata:
            shared = 200 << 10

        def compile(self, capability: int) -> Large:
            return self

    assert not ahead._result("large", Large(), 86, 99 << 10)["fits"]
    assert ahead._result("large", Large(), 90, 227 << 10)["fits"]

"""Over whole steps of several families, a launch that is handed over without asking Triton is the one that Triton would
have made, and hardly any asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

# Linear layers of each kind, latent attention, experts of few and many tokens.
NAMES = ["bailing_hybrid", "kimi_linear", "nemotron_h", "qwen3_5_moe_text"]


def counted(*arguments: str) -> dict[str, Any]:
    """Of a process of its own: Triton decides at import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.engine.kept_launches", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_launch_of_whole_steps_gets_the_kernel_that_triton_would_take() -> None:
    found = counted("seeing", *NAMES)
    assert (found["wrong"], found["never"]) == (0, [])
    assert found["handed"] > 2 * found["asked"] > 100


def test_a_launch_that_is_handed_over_wrongly_is_seen() -> None:
    """Where arguments are told apart by nothing but their number."""
    assert counted("blind", *NAMES)["wrong"] > 10

"""Commands in a process of their own, and what is said of errors: one sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "retriever", "apps"))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hypic_apps.cli.main", *arguments]


def one_sentence(err: str) -> str:
    """The only line of stderr, which is not a traceback."""
    (line,) = err.strip().splitlines()
    assert line.startswith("hypic: ") and line.endswith(".")
    return line

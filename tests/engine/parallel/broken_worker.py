"""A worker that cannot start, and says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypic.engine import worker
from hypic.errors import CheckpointError


def main(told: Mapping[str, Any]) -> None:
    def load(*args: Any) -> None:
        raise CheckpointError("no weights today")

    worker.Runner.load = load  # type: ignore[method-assign, assignment]
    worker.main(told)

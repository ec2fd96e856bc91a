"""The bundled demonstration model, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

BUNDLED = "hypic-tiny"


def bundled() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(__file__).parent / BUNDLED

"""Waiting until an engine has nothing to do."""

from __future__ import annotations

import time
from typing import Any


def is_idle(llm: Any, within_s: float = 20.0) -> bool:
    """Whether nothing waits or runs, within a while: after an answer the engine prepares the next turn's head."""
    until = time.monotonic() + within_s
    while any(llm.stats()["requests"].values()) and time.monotonic() < until:
        time.sleep(0.01)
    return bool(llm.stats()["requests"] == {"waiting": 0, "running": 0})

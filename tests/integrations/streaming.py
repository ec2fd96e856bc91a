"""All that a stream of an engine gives."""

from __future__ import annotations

from typing import Any

from hypic import Completion


async def drained(pieces: Any) -> list[Completion]:
    return [piece async for piece in pieces]

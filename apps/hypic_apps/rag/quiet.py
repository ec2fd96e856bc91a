"""Measuring wants the engine for itself: any number of requests at a time, or one measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Quiet:
    """For one event loop. A measurement waits for what runs, and what comes later waits for it."""

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def among_others(self) -> AsyncIterator[None]:
        """Beside any number of others, but not beside a measurement."""
        async with self._door:
            self._num_inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """With nobody else inside."""
        async with self._door:
            await self._empty.wait()
            yield

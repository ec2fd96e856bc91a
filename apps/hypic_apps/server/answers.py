"""Requests to the engine while they are answered, and the client's connection watched meanwhile.

A client that goes away ends the work that was done for it: its tasks are cancelled, which closes the engine's streams,
which frees what the requests held before the engine's next step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.types import Receive

from hypic.errors import HypicError, WorkerLost
from hypic.types import Completion, Policy, PromptLike, SamplingParams
from hypic_apps.server.errors import ApiError, ClientGone, api_error
from hypic_apps.server.service import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """What the engine is asked: one prompt or several, all in the same way."""

    prompts: Sequence[PromptLike]
    sampling: SamplingParams
    policy: Policy | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class Answers:
    """All answers of one HTTP request, as pieces in the order in which they come.

    Made inside an event loop; ``aclose`` must be awaited however it ends.

    Raises:
        ApiError: the server has no place for as many.
    """

    def __init__(self, service: Service, ask: Ask) -> None:
        service.gate.enter(len(ask.prompts))
        self._service, self._ask = service, ask
        self._arrived = asyncio.Event()
        self._events: deque[tuple[int, Completion] | BaseException] = deque()
        self._num_left = len(ask.prompts)
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(ask.prompts))]
        for task in self._tasks:
            task.add_done_callback(self._settle)

    @property
    def is_over(self) -> bool:
        """Whether every answer has come to its end."""
        return self._num_left == 0

    async def wait(self, timeout_s: float | None) -> bool:
        """Whether there is something to ``take``, after at most ``timeout_s``.

        Raises:
            ApiError: that is what there is. Errors that nobody foresaw come as they are.
        """
        if not self._events:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return False
        first = self._events[0]
        if isinstance(first, BaseException):
            raise first
        return True

    def take(self) -> tuple[int, Completion]:
        """The next piece, and the number of the answer that it belongs to. Only after ``wait``."""
        event = self._events.popleft()
        assert not isinstance(event, BaseException), "wait has raised it"
        self._num_left -= event[1].finish_reason is not None
        return event

    async def all(self) -> list[Completion]:
        """The whole answers.

        Raises:
            ApiError: one of them failed.
        """
        pieces: list[list[Completion]] = [[] for _ in self._tasks]
        while not self.is_over:
            await self.wait(None)
            index, piece = self.take()
            pieces[index].append(piece)
        return [Completion.join(each) for each in pieces]

    async def aclose(self) -> None:
        """Frees what unfinished answers hold."""
        unfinished = [task for task in self._tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._service.metrics.aborted.add(len(unfinished))

    async def _run(self, index: int) -> None:
        ask = self._ask
        # An async generator, though the protocol promises an iterator only.
        stream = cast(Any, self._service.engine.astream(
            ask.prompts[index], ask.sampling, policy=ask.policy, tools=ask.tools,
            chat_template_kwargs=ask.chat_template_kwargs,
        ))  # fmt: skip
        is_whole = False
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                if piece.finish_reason is not None:
                    is_whole = True
                    self._service.metrics.finish(piece)
                self._put((index, piece))
        if not is_whole:
            raise WorkerLost("the engine ended this answer without saying why; send it again.")

    def _settle(self, task: asyncio.Task[None]) -> None:
        """One answer has ended; what ended it, if anything, is told after its last piece."""
        self._service.gate.leave()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, HypicError):
            error = api_error(error, self._service.engine.max_context)
        if error is not None:
            self._service.metrics.failed.add(1, (error.code or "") if isinstance(error, ApiError) else "internal_error")
            self._put(error)

    def _put(self, event: tuple[int, Completion] | BaseException) -> None:
        self._events.append(event)
        self._arrived.set()


async def attended(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled, and cleaned up after, when the client goes away.

    Raises:
        ClientGone: it has gone.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

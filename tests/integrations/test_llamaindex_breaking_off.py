"""LlamaIndex's HypicLLM frees its engine: streams that are broken off, dropped or cancelled."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage

from hypic.integrations.llamaindex import HypicLLM
from tests.integrations.scripted import ScriptedEngine

ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage("When was it built?")]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def llm(engine: ScriptedEngine) -> HypicLLM:
    return HypicLLM(engine=engine)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def broken_off(llm: HypicLLM, told: Callable[[], int]) -> int:
    """What is ``told`` once a stream was closed after its first piece, before the loop's own end closes anything."""
    stream = await llm.astream_chat(ASKED)
    await anext(stream)
    await stream.aclose()
    del stream
    for _ in range(5):
        await asyncio.sleep(0)
    return told()


async def drained(stream: Any) -> list[Any]:
    return [item async for item in await stream]


def test_breaking_off_frees_the_engine(llm: HypicLLM, engine: ScriptedEngine) -> None:
    for stream in (llm.stream_chat(ASKED), llm.stream_complete("x")):
        next(stream)
        assert engine.num_open == 1
        stream.close()
        assert engine.num_open == 0
    assert engine.num_finished == 0

    assert run(broken_off(llm, lambda: engine.num_open)) == 0


class Holding(ScriptedEngine):
    """Keeps its streams, so that only closing them ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []

    def stream(self, *args: Any, **options: Any) -> Any:
        self.streams.append(super().stream(*args, **options))
        return self.streams[-1]

    def astream(self, *args: Any, **options: Any) -> Any:
        self.streams.append(super().astream(*args, **options))
        return self.streams[-1]


def test_streams_are_closed_not_only_dropped() -> None:
    engine = Holding()
    llm = HypicLLM(engine=engine)
    stream = llm.stream_chat(ASKED)
    next(stream)
    stream.close()
    assert engine.num_closed == 1

    assert run(broken_off(llm, lambda: engine.num_closed)) == 2


def test_cancelling_frees_the_engine(llm: HypicLLM, engine: ScriptedEngine) -> None:
    engine.wait_s = 30.0

    async def cancel(coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        while not engine.num_open:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_open == 0

    run(cancel(llm.achat(ASKED)))
    run(cancel(llm.acomplete("x")))
    run(cancel(drained(llm.astream_chat(ASKED))))
    assert engine.num_finished == 0

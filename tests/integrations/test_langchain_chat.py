"""ChatHypic on a scripted engine: every call path, segments unmerged, text exact, nothing left open."""

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from hypic.types import Segment
from tests.integrations.chat_paths import MESSAGES, PAGES, PATHS, chat_on, collect, run, whole
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.mark.parametrize("path", PATHS)
def test_segments_arrive_unmerged_on_every_path(path: str, engine: ScriptedEngine) -> None:
    answer = PATHS[path](chat_on(engine), MESSAGES)
    assert answer.content == "It was built in 1871."
    (asked,) = engine.asked
    assert segments(asked.prompt) == [Segment(PAGES[0], name="a", source="a.md"), Segment(PAGES[1], name="b")]
    assert said(asked.prompt) == [("system", "Answer from the passages."), ("user", "\n\n".join([*PAGES, "When?"]))]
    assert asked.tools is None
    assert (engine.num_open, engine.num_finished) == (0, 1)


@pytest.mark.parametrize("path", ["invoke", "ainvoke", "stream", "astream", "batch", "streaming"])
def test_usage_and_report_come_back(path: str, engine: ScriptedEngine) -> None:
    answer = PATHS[path](chat_on(engine), MESSAGES)
    assert answer.usage_metadata == {
        "input_tokens": 100,
        "output_tokens": 5,
        "total_tokens": 105,
        "input_token_details": {"cache_read": 60, "cache_creation": 30},
    }
    metadata = answer.response_metadata
    assert (metadata["model_name"], metadata["model_provider"]) == ("scripted", "hypic")
    assert metadata["finish_reason"] == "stop"
    report = metadata["hypic"]
    assert (report["mode"], report["computed_tokens"], report["reused_tokens"]) == ("segments", 40, 60)
    assert [(s["name"], s["outcome"]) for s in report["segments"]] == [("a", "hit"), ("b", "hit")]
    assert report["notes"] == ["scripted"]
    assert len(metadata["logprobs"]["content"]) == 5


def test_streams_are_true_and_end_with_one_last_chunk(engine: ScriptedEngine) -> None:
    stream = chat_on(engine).stream(MESSAGES)
    assert next(stream).content == "It"
    assert engine.num_open == 1
    chunks = list(stream)
    assert [c.content for c in chunks] == [" was", " built", " in", " 1871.", ""]
    assert [c.chunk_position for c in chunks] == [None] * 4 + ["last"]
    assert sum(c.usage_metadata is not None for c in chunks) == 1


def test_reasoning_stands_beside_the_text() -> None:
    chat = chat_on(ScriptedEngine(reasoning="Look at the first passage."))
    for answer in (chat.invoke("When?"), whole(list(chat.stream("When?")))):
        assert answer.content == "It was built in 1871."
        assert answer.additional_kwargs["reasoning_content"] == "Look at the first passage."
        assert [b["type"] for b in answer.content_blocks] == ["reasoning", "text"]
    engine = ScriptedEngine()
    chat_on(engine).invoke([HumanMessage("When?"), answer, HumanMessage("And?")])
    assert engine.last.messages[1]["reasoning_content"] == "Look at the first passage."


def test_a_broken_off_stream_is_closed(engine: ScriptedEngine) -> None:
    stream = chat_on(engine).stream(MESSAGES)
    next(stream)
    stream.close()
    assert (engine.num_open, engine.num_closed, engine.num_finished) == (0, 1, 0)


def test_a_broken_off_async_stream_is_closed(engine: ScriptedEngine) -> None:
    async def first_only() -> None:
        stream = chat_on(engine).astream(MESSAGES)
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.sleep(0.01)

    run(first_only())
    assert (engine.num_open, engine.num_closed, engine.num_finished) == (0, 1, 0)


@pytest.mark.parametrize("how", ["ainvoke", "astream", "abatch"])
def test_a_cancelled_task_aborts_the_request(how: str) -> None:
    engine = ScriptedEngine(wait_s=30)

    async def cancel() -> None:
        chat = chat_on(engine)
        inputs: Any = [MESSAGES, MESSAGES] if how == "abatch" else MESSAGES
        asked = collect(chat.astream(inputs)) if how == "astream" else getattr(chat, how)(inputs)
        task = asyncio.ensure_future(asked)
        while engine.num_open < (2 if how == "abatch" else 1):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.01)
        assert engine.num_open == 0

    run(cancel())
    assert engine.num_finished == 0


def test_async_runs_on_the_loop_and_many_at_once() -> None:
    engine = ScriptedEngine(wait_s=0.02)

    async def at_once() -> None:
        chat = chat_on(engine)
        tasks = [asyncio.ensure_future(chat.ainvoke("When?")) for _ in range(20)]
        while engine.num_open < 20:
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)

    run(at_once())
    assert (engine.num_open, engine.num_finished) == (0, 20)


def test_batch_keeps_order_over_threads(engine: ScriptedEngine) -> None:
    answers = chat_on(engine).batch([f"Question {n}?" for n in range(30)])
    assert len(answers) == engine.num_finished == 30
    assert sorted(said(a.prompt)[0][1] for a in engine.asked) == sorted(f"Question {n}?" for n in range(30))


def test_astream_events_carry_the_tokens(engine: ScriptedEngine) -> None:
    async def texts() -> list[str]:
        chain = ChatPromptTemplate([MessagesPlaceholder("m")]) | chat_on(engine)
        events = chain.astream_events({"m": MESSAGES}, version="v2")
        return [e["data"]["chunk"].content async for e in events if e["event"] == "on_chat_model_stream"]

    assert "".join(run(texts())) == "It was built in 1871."
    assert bodies(engine.last.prompt) == PAGES


def test_callbacks_see_tokens_and_usage(engine: ScriptedEngine) -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.tokens.append(token)

    tokens, usage = Tokens(), UsageMetadataCallbackHandler()
    list(chat_on(engine).stream(MESSAGES, {"callbacks": [tokens, usage]}))
    assert "".join(tokens.tokens) == "It was built in 1871."
    assert usage.usage_metadata["scripted"]["input_token_details"] == {"cache_read": 60, "cache_creation": 30}

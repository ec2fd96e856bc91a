"""Structured answers of ``ChatHypic``, the retriever tool, and agents with both."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import ModelError, OutputParserException
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage

from hypic.integrations.langchain import HypicRetriever, create_segment_retriever_tool, segment
from tests.integrations.chat_tools import SECTIONS, Joke, chat_on, made, weather
from tests.integrations.scripted import bodies, segments
from tests.integrations.scripted_tools import ToolEngine

# -- structured answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
@pytest.mark.parametrize("schema", [Joke, Joke.model_json_schema()])
def test_structured_answers(method: Any, schema: Any) -> None:
    engine = ToolEngine()
    model = chat_on(engine).with_structured_output(schema, method=method)
    answer = model.invoke("A joke.")
    values = answer.model_dump() if isinstance(answer, Joke) else answer
    assert set(values) == {"setup", "punchline"} and isinstance(answer, Joke) is (schema is Joke)
    assert (engine.last.tools is None) is (method != "function_calling")


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_a_structured_answer_that_is_none_raises_or_is_reported(method: Any) -> None:
    error = ModelError if method == "function_calling" else OutputParserException
    with pytest.raises(error):
        chat_on(ToolEngine(script=["No."])).with_structured_output(Joke, method=method).invoke("?")
    raw = chat_on(ToolEngine(script=["No."])).with_structured_output(Joke, method=method, include_raw=True).invoke("?")
    assert isinstance(raw, dict)
    assert raw["raw"].content == "No." and raw["parsed"] is None


# -- agents ----------------------------------------------------------------------------------------------------------


class Index:
    """Finds everything."""

    def search(self, query: str, k: int) -> list[Any]:
        passages = [
            type("Passage", (), {"id": f"s{n}", "text": text, "source": "book.md"})()
            for n, text in enumerate(SECTIONS[:k])
        ]
        return [type("Hit", (), {"passage": passage, "score": 1.0})() for passage in passages]


def test_the_retriever_tool_returns_documents_as_blocks() -> None:
    look_up = create_segment_retriever_tool(HypicRetriever(index=Index(), k=2), "look_up", "Finds passages.")
    assert look_up.invoke({"query": "mill"}) == [
        segment(text, name=f"s{n}", source="book.md") for n, text in enumerate(SECTIONS)
    ]
    assert asyncio.run(look_up.ainvoke({"query": "mill"})) == look_up.invoke({"query": "mill"})
    nothing = create_segment_retriever_tool(HypicRetriever(index=Index(), k=0), "look_up", "Finds passages.")
    assert nothing.invoke({"query": "mill"}) == "No documents were found."
    both = create_segment_retriever_tool(
        HypicRetriever(index=Index(), k=1), "look_up", "Finds.", response_format="content_and_artifact"
    )
    message = both.invoke({"type": "tool_call", "name": "look_up", "args": {"query": "x"}, "id": "c"})
    assert len(message.content) == 1 and isinstance(message.artifact[0], Document)


@pytest.mark.parametrize("spelling", ["xml", "hermes"])
def test_an_agent_calls_a_tool_reads_documents_and_answers(spelling: Any) -> None:
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    engine = ToolEngine(answer="In 1871.", spelling=spelling)
    look_up = create_segment_retriever_tool(HypicRetriever(index=Index(), k=2), "look_up", "Finds passages.")
    agent = agents.create_agent(chat_on(engine), [look_up], system_prompt="You answer from passages.")
    state = agent.invoke({"messages": [HumanMessage("When was the 'mill' built?")]})
    human, asked, found, answer = state["messages"]
    assert made(asked) == [("look_up", {"query": "mill"})]
    assert isinstance(found.content, list) and found.tool_call_id == asked.tool_calls[0]["id"]
    assert answer.content == "In 1871." and len(engine.asked) == 2
    assert bodies(engine.last.prompt) == SECTIONS
    assert [one.name for one in segments(engine.last.prompt)] == ["s0", "s1"]


def test_an_agent_runs_async_streams_and_gives_structured_answers() -> None:
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    engine = ToolEngine(answer="Sunny.")
    agent = agents.create_agent(chat_on(engine), [weather])

    async def ask() -> list[Any]:
        inputs = {"messages": [HumanMessage("Weather in 'Köln'?")]}
        return [token async for token, _ in agent.astream(inputs, stream_mode="messages")]

    tokens = asyncio.run(ask())
    chunks = [token for token in tokens if isinstance(token, AIMessageChunk)]
    assert "".join(chunk.text for chunk in chunks) == "Sunny."
    assert [one["name"] for chunk in chunks for one in chunk.tool_call_chunks] == ["weather"]
    assert [token.content for token in tokens if isinstance(token, ToolMessage)] == ["Sunny in Köln."]
    structured = agents.create_agent(chat_on(ToolEngine()), [], response_format=Joke)
    assert isinstance(structured.invoke({"messages": [HumanMessage("A joke.")]})["structured_response"], Joke)

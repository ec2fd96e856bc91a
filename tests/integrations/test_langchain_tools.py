"""Tools on ``ChatHypic``: binding, calls in answers and streams, agents, structured answers, the retriever tool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import ModelError, ModelInvalidRequestError, OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from hypic.engine.tokenizer import Tokenizer
from hypic.integrations.langchain import ChatHypic, HypicRetriever, create_segment_retriever_tool, segment
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments
from tests.integrations.scripted_tools import ToolEngine, call

SECTIONS = ["The mill was built in 1871 by Ada Perkins.", "The bridge was opened in 1902 and carries two tracks."]


@tool
def weather(city: str, days: int = 1) -> str:
    """Tells the weather."""
    return f"Sunny in {city}."


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


def chat_on(engine: ScriptedEngine, **options: Any) -> ChatHypic:
    return ChatHypic(engine=engine, **options)


def joined(model: Any, prompt: Any) -> AIMessageChunk:
    first, *rest = model.stream(prompt)
    whole = sum(rest, first)
    assert isinstance(whole, AIMessageChunk)
    return whole


async def ajoined(model: Any, prompt: Any) -> AIMessageChunk:
    chunks = [chunk async for chunk in model.astream(prompt)]
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    return whole


def made(message: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    assert all(one["id"] for one in message.tool_calls)
    return [(one["name"], one["args"]) for one in message.tool_calls]


@pytest.mark.parametrize("spelling", ["xml", "hermes"])
def test_calls_are_the_same_in_every_way_of_asking(spelling: Any) -> None:
    text = f"<think>\nHm.\n</think>\n\nI look.\n{call('weather', {'city': 'Köln', 'days': 2}, spelling)}\n"
    text += call("add", {"a": 1, "b": 2}, spelling)
    model = chat_on(ToolEngine(script=[text] * 4)).bind_tools([weather, add])
    answers = [model.invoke("?"), asyncio.run(model.ainvoke("?")), joined(model, "?"), asyncio.run(ajoined(model, "?"))]
    for answer in answers:
        assert isinstance(answer, AIMessage)
        assert (answer.content, answer.additional_kwargs) == ("I look.", {"reasoning_content": "Hm."})
        assert made(answer) == [("weather", {"city": "Köln", "days": 2}), ("add", {"a": 1, "b": 2})]
        assert answer.response_metadata["finish_reason"] == "tool_calls"
        assert len({one["id"] for one in answer.tool_calls}) == 2
        types = [block["type"] for block in answer.content_blocks]
        assert types[:2] == ["reasoning", "text"] and len(types) == 4


def test_the_model_is_offered_the_tools_in_openai_s_form() -> None:
    engine = ToolEngine()
    chat_on(engine).bind_tools([weather, {"name": "f", "description": "d", "parameters": {"type": "object"}}]).invoke(
        "?"
    )
    assert [one["function"]["name"] for one in engine.last.tools or ()] == ["weather", "f"]
    assert (engine.last.tools or [{}])[0]["function"]["parameters"]["properties"]["days"]["type"] == "integer"
    chat_on(engine).invoke("?")
    assert engine.last.tools is None


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "server"])
def test_functions_are_tools_here_and_on_a_server(is_remote: bool) -> None:
    from hypic_apps.server.app import create_app
    from tests.apps.server.scripted import ServedScript
    from tests.apps.server.serving import in_thread

    def found(place: str) -> str:
        """Finds a place."""
        return place

    call = '<tool_call>\n{"name": "found", "arguments": {"place": "Alpha"}}\n</tool_call>'
    engine = ServedScript(answer=call)
    with in_thread(create_app(engine)) as root:
        chat = ChatHypic(base_url=root) if is_remote else ChatHypic(engine=engine)
        answers = [chat.bind_tools([found]).invoke("Where?"), chat.invoke("Where?", tools=[found])]
    for answer in answers:
        (made,) = answer.tool_calls
        assert (made["name"], made["args"]) == ("found", {"place": "Alpha"})
    assert (engine.last.tools or [{}])[0]["function"]["parameters"]["required"] == ["place"]


def test_reasoning_is_split_off_without_tools_too() -> None:
    engine = ToolEngine(script=["<think>a <b</think>\n\nc", "<think>a <b</think>\n\nc"])
    for answer in (chat_on(engine).invoke("?"), joined(chat_on(engine), "?")):
        assert (answer.content, answer.additional_kwargs["reasoning_content"]) == ("c", "a <b")
    engine.script = [call("weather", {})]
    assert chat_on(engine).invoke("?").content == call("weather", {})


@pytest.mark.parametrize("parallel", [False, True, None])
def test_who_takes_one_call_gets_the_first_and_is_told_of_others(parallel: bool | None) -> None:
    text = f"{call('add', {'a': 1, 'b': 2})}\n{call('weather', {'city': 'Bonn'})}"
    for ask in (lambda m: m.invoke("?"), lambda m: joined(m, "?"), lambda m: asyncio.run(ajoined(m, "?"))):
        chat = chat_on(ToolEngine(script=[text])).bind_tools([add, weather], parallel_tool_calls=parallel)
        answer = ask(chat)
        assert [made["name"] for made in answer.tool_calls] == ["add", "weather"][: 1 if parallel is False else 2]
        told = [note for note in answer.response_metadata["hypic"]["notes"] if "'weather', was left out" in note]
        assert len(told) == (parallel is False) and answer.response_metadata["finish_reason"] == "tool_calls"


def test_a_malformed_call_is_text_with_a_note() -> None:
    text = '<tool_call>{"name": "weather", </tool_call>'
    for ask in (lambda m: m.invoke("?"), lambda m: joined(m, "?")):
        answer = ask(chat_on(ToolEngine(script=[text])).bind_tools([weather]))
        assert answer.content == text and answer.tool_calls == []
        assert "left as text" in answer.response_metadata["hypic"]["notes"][-1]
        assert answer.response_metadata["finish_reason"] == "stop"


def test_a_conversation_with_tools_reaches_the_template_whole() -> None:
    engine = ToolEngine()
    asked = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Köln"}, "id": "c1"}])
    asked.additional_kwargs["reasoning_content"] = "Hm."
    result = ToolMessage([segment(text, name=f"s{n}") for n, text in enumerate(SECTIONS)], tool_call_id="c1")
    flat = ToolMessage("Sunny.", tool_call_id="c2", name="weather")
    chat_on(engine).bind_tools([weather]).invoke([HumanMessage("Weather?"), asked, result, flat])
    _, call_turn, listed, text = engine.last.messages
    assert call_turn["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Köln"}}
    assert call_turn["reasoning_content"] == "Hm."
    assert listed["tool_call_id"] == "c1" and text["name"] == "weather"
    assert bodies(engine.last.prompt) == SECTIONS
    assert [one.kind for one in segments(engine.last.prompt)] == ["document", "document"]


# -- tool_choice -----------------------------------------------------------------------------------------------------


def test_tool_choice_none_keeps_tools_from_the_model() -> None:
    engine = ToolEngine(script=[call("weather", {})])
    answer = chat_on(engine).bind_tools([weather], tool_choice="none").invoke("?")
    assert engine.last.tools is None and answer.content == call("weather", {}) and not answer.tool_calls


@pytest.mark.parametrize("choice", ["any", "required", True, "add", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_is_asked_for_and_checked(choice: Any) -> None:
    engine = ToolEngine()
    model = chat_on(engine).bind_tools([add, weather], tool_choice=choice)
    assert made(model.invoke([SystemMessage("Be kind."), HumanMessage("?")])) == [("add", {"a": 3, "b": 3})]
    role, system = said(engine.last.prompt)[0]
    assert role == "system" and system.startswith("Be kind.\n\nAnswer only by calling")
    assert segments(engine.last.prompt) == [], "what is asked for is live text"
    for ask in (lambda: model.invoke("?"), lambda: joined(model, "?"), lambda: asyncio.run(model.ainvoke("?"))):
        engine.script = ["No."]
        with pytest.raises(ModelError, match="made no tool call"):
            ask()
    assert said(engine.last.prompt)[0][1].startswith("Answer only by calling")


def test_a_forced_call_of_another_tool_raises() -> None:
    engine = ToolEngine(script=[call("weather", {})])
    with pytest.raises(ModelError, match="asks for a call of add and the model called 'weather'"):
        chat_on(engine).bind_tools([add, weather], tool_choice="add").invoke("?")


def test_what_is_not_supported_raises_before_anything_runs() -> None:
    engine = ScriptedEngine()
    chat = chat_on(engine)
    some = {"type": "json_object"}
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (NotImplementedError, "strict", lambda: chat.bind_tools([add], strict=True)),
        (NotImplementedError, "response_format", lambda: chat.bind_tools([add], response_format=some)),
        (NotImplementedError, "strict", lambda: chat.with_structured_output(Joke, strict=True).invoke("?")),
        (ValueError, "method", lambda: chat.with_structured_output(Joke, method="grammar")),  # type: ignore[arg-type]
        (ValueError, "wish", lambda: chat.with_structured_output(Joke, wish=1)),
        (ModelInvalidRequestError, "'other'", lambda: chat.bind_tools([add], tool_choice="other")),
        (ModelInvalidRequestError, "no tools", lambda: chat.bind_tools([], tool_choice="any")),
        (ModelInvalidRequestError, "no tools", lambda: asyncio.run(chat.ainvoke("?", tool_choice="any"))),
        (ModelInvalidRequestError, "no function", lambda: chat.bind_tools([{"type": "web_search"}])),
        (NotImplementedError, "response_format", lambda: list(chat.stream("?", response_format=some))),
        (NotImplementedError, "functions", lambda: chat.invoke("?", functions=[{"name": "f"}])),
        (NotImplementedError, "function_call", lambda: chat.invoke("?", function_call="auto")),
    ]
    for error, why, ask in refused:
        with pytest.raises(error, match=why):
            ask()
    assert not engine.asked
    chat.bind_tools([], response_format=None).invoke("?", tools=[], tool_choice=None)


def test_a_template_that_shows_no_tools_is_refused(tmp_path: Path) -> None:
    from tests.engine.tiny_tokenizers import save_bytelevel

    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    for template, ok in ((None, True), (plain, False)):
        folder = tmp_path / str(ok)
        options = {} if template is None else {"chat_template": template}
        engine = ToolEngine()
        engine.tokenizer = Tokenizer(save_bytelevel(folder, **options))  # type: ignore[attr-defined,arg-type]
        model = chat_on(engine).bind_tools([weather])
        if ok:
            assert made(model.invoke("?"))
            continue
        with pytest.raises(NotImplementedError, match="does not show tools"):
            model.invoke("?")
        assert not engine.asked


def test_answers_of_a_template_that_opens_the_reasoning(tmp_path: Path) -> None:
    from tests.engine.tiny_tokenizers import save_bytelevel

    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}"
    )
    engine = ToolEngine(script=["Hm.\n</think>\n\nYes.", "Yes."])
    engine.tokenizer = Tokenizer(save_bytelevel(tmp_path, chat_template=template))  # type: ignore[attr-defined]
    answer = chat_on(engine).invoke("?")
    assert (answer.content, answer.additional_kwargs) == ("Yes.", {"reasoning_content": "Hm."})
    answer = chat_on(engine, chat_template_kwargs={"enable_thinking": False}).invoke("?")
    assert (answer.content, answer.additional_kwargs) == ("Yes.", {})


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

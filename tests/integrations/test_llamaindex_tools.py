"""Tools in LlamaIndex: calls read from the answer, demanded calls checked, an agent that runs; nothing is dropped."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from hypic.errors import ConfigError
from hypic.integrations.llamaindex import HypicLLM
from hypic.integrations.llamaindex.tools import NoToolCall
from hypic.types import Completion, PromptLike
from tests.checkpoints import add_tokenizer, qwen
from tests.integrations.scripted import ScriptedEngine, bodies, said

PAGES = ["The Alpha mill was built in 1871 on the Lenne.", "The Beta bridge was opened in 1902, with two tracks."]


def call_of(name: str, **arguments: Any) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@dataclass
class Talk(ScriptedEngine):
    """Says one thing after the other."""

    lines: list[str] = field(default_factory=list)

    def _pieces(self, prompt: PromptLike) -> Iterator[Completion]:
        self.answer = self.lines[min(len(self.asked), len(self.lines)) - 1]
        return super()._pieces(prompt)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def look(what: str) -> list[TextBlock]:
    """Finds passages."""
    return [TextBlock(text=page) for page in PAGES]


ADD, LOOK = FunctionTool.from_defaults(add), FunctionTool.from_defaults(look)


def of(*lines: str) -> tuple[HypicLLM, Talk]:
    engine = Talk(lines=list(lines))
    return HypicLLM(engine=engine), engine


def test_calls_are_read_in_all_four_ways() -> None:
    llm, engine = of("I add. " + call_of("add", a=1, b=2))

    async def stream() -> list[Any]:
        return [r async for r in await llm.astream_chat_with_tools([ADD], "1 + 2?")]

    lasts = [
        llm.chat_with_tools([ADD], "1 + 2?"),
        asyncio.run(llm.achat_with_tools([ADD], ChatMessage("1 + 2?"))),
        list(llm.stream_chat_with_tools([ADD], "1 + 2?"))[-1],
        asyncio.run(stream())[-1],
    ]
    for response in lasts:
        (selection,) = llm.get_tool_calls_from_response(response)
        assert (selection.tool_name, selection.tool_kwargs) == ("add", {"a": 1, "b": 2}) and selection.tool_id
        assert response.message.content == "I add."
    assert engine.last.tools is not None
    assert engine.last.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert said(engine.last.prompt) == [("user", "1 + 2?")]


def test_a_call_keeps_its_id_while_the_answer_grows() -> None:
    llm, _ = of(call_of("add", a=1, b=2) + call_of("add", a=3, b=4))
    seen = [llm.get_tool_calls_from_response(r, False) for r in llm.stream_chat_with_tools([ADD], "Add.")]
    assert [call.tool_id for call in seen[-1][:1]] == [calls[0].tool_id for calls in seen if calls][:1]
    assert len({call.tool_id for calls in seen for call in calls}) == 2


def test_several_calls_only_when_they_are_allowed() -> None:
    llm, _ = of(call_of("add", a=1, b=2) + call_of("add", a=3, b=4))
    both = llm.chat_with_tools([ADD], "Add.", allow_parallel_tool_calls=True)
    assert [call.tool_kwargs["a"] for call in llm.get_tool_calls_from_response(both)] == [1, 3]
    one = llm.chat_with_tools([ADD], "Add.")
    assert [call.tool_kwargs["a"] for call in llm.get_tool_calls_from_response(one)] == [1]
    assert llm.predict_and_call([ADD], "Add.").response == "3"


def test_without_tools_nothing_is_a_call() -> None:
    text = call_of("add", a=1, b=2)
    llm, _ = of(text)
    assert llm.chat([ChatMessage("Say it.")]).message.content == text
    refused = llm.chat([ChatMessage("Say it.")], tools=[ADD.metadata.to_openai_tool()], tool_choice="none")
    assert refused.message.content == text


def test_a_demanded_call_is_asked_for_and_checked() -> None:
    llm, engine = of(call_of("add", a=1, b=2))
    llm.chat_with_tools([ADD, LOOK], "1 + 2?", tool_required=True)
    assert said(engine.last.prompt) == [("system", "Answer only by calling one of the tools."), ("user", "1 + 2?")]
    history = [ChatMessage(role="system", content="Be brief.")]
    llm.chat_with_tools([ADD, LOOK], "1 + 2?", history, tool_choice="add")
    assert said(engine.last.prompt)[0] == ("system", "Be brief.\n\nAnswer only by calling the tool add.")
    assert bodies(engine.last.prompt) == []
    with pytest.raises(NoToolCall, match="a call of look was demanded and the model called 'add'"):
        llm.chat_with_tools([ADD, LOOK], "1 + 2?", tool_choice={"type": "function", "function": {"name": "look"}})
    silent, engine = of("I would rather not.")
    for demand in (
        lambda: silent.chat_with_tools([ADD], "x", tool_required=True),
        lambda: list(silent.stream_chat_with_tools([ADD], "x", tool_required=True)),
        lambda: asyncio.run(silent.achat_with_tools([ADD], "x", tool_required=True)),
        lambda: silent.get_tool_calls_from_response(silent.chat_with_tools([ADD], "x")),
    ):
        with pytest.raises(NoToolCall, match="no tool"):
            demand()
    asked = len(engine.asked)
    with pytest.raises(ConfigError, match="'sub'.*add"):
        silent.chat_with_tools([ADD], "x", tool_choice="sub")
    assert len(engine.asked) == asked and engine.num_open == 0


def test_a_call_that_cannot_be_read_stays_text_with_a_note() -> None:
    llm, _ = of("<tool_call>\n{broken\n</tool_call>")
    response = llm.chat_with_tools([ADD], "x")
    assert response.message.content == "<tool_call>\n{broken\n</tool_call>"
    assert response.raw is not None and "left as text" in str(response.raw["hypic"]["notes"])


@pytest.mark.parametrize("streaming", [True, False])
def test_a_function_agent_runs_and_tool_results_are_documents(streaming: bool) -> None:
    llm, engine = of("Let me see. " + call_of("look", what="mill"), "In 1871.")
    agent = FunctionAgent(tools=[LOOK], llm=llm, system_prompt="You answer.", streaming=streaming)

    async def ask() -> str:
        return str(await agent.run("When was the mill built?"))

    assert asyncio.run(ask()).endswith("In 1871.")
    roles = [message["role"] for message in engine.last.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    (called,) = engine.last.messages[2]["tool_calls"]
    assert called["function"] == {"name": "look", "arguments": {"what": "mill"}}
    assert called["id"] == engine.last.messages[3]["tool_call_id"]
    assert bodies(engine.last.prompt) == PAGES


def test_a_react_agent_runs() -> None:
    llm, engine = of(
        'Thought: I must add.\nAction: add\nAction Input: {"a": 1, "b": 2}', "Thought: I can answer.\nAnswer: It is 3."
    )

    async def ask() -> str:
        return str(await ReActAgent(tools=[ADD], llm=llm).run("1 + 2?"))

    assert asyncio.run(ask()).endswith("It is 3.")
    assert len(engine.asked) == 2 and engine.last.tools is None


class Year(BaseModel):
    """A year."""

    value: int


def test_structured_streams_end_with_the_object() -> None:
    llm, _ = of(call_of("Year", value=1871))
    *_, last = llm.stream_structured_predict(Year, PromptTemplate("When?"))
    assert last.model_dump() == {"value": 1871}


def found(place: str) -> str:
    """Finds a place.

    Args:
        place: where
    """
    return place


@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "server"])
@pytest.mark.parametrize("choice", [None, "found"])
def test_functions_are_tools_here_and_on_a_server(is_remote: bool, choice: str | None) -> None:
    from hypic_apps.server.app import create_app
    from tests.apps.server.scripted import ServedScript
    from tests.apps.server.serving import in_thread

    engine = ServedScript(answer=call_of("found", place="Alpha"))
    with in_thread(create_app(engine)) as root:
        llm = HypicLLM(base_url=root) if is_remote else HypicLLM(engine=engine)
        answer = llm.chat([ChatMessage("Where?")], tools=[found], tool_choice=choice)
        (call,) = (block for block in answer.message.blocks if isinstance(block, ToolCallBlock))
    assert (call.tool_name, call.tool_kwargs) == ("found", {"place": "Alpha"})
    (told,) = engine.last.tools or ()
    assert told["function"]["description"] == "Finds a place." and "place" in told["function"]["parameters"]["required"]


@pytest.mark.parametrize("tools", [[5], [ADD], [{"function": {}}]], ids=["number", "of LlamaIndex", "nameless"])
def test_what_is_no_tool_is_refused(tools: Any) -> None:
    llm, engine = of("Yes.")
    with pytest.raises(ConfigError, match="pass a list of functions as OpenAI describes them"):
        llm.chat([ChatMessage("Where?")], tools=tools)
    assert not engine.asked


def test_a_template_that_shows_no_tools_is_refused(tmp_path: Any) -> None:
    folder = qwen(tmp_path / "mute")
    add_tokenizer(folder)
    llm = HypicLLM(model=str(folder), settings={"memory": "32MiB", "device": "cpu"}, max_tokens=2)
    with pytest.raises(ConfigError, match="shows no tools"):
        llm.chat_with_tools([ADD], "1 + 2?")
    assert llm.chat([ChatMessage("1 + 2?")]).message.role.value == "assistant"
    llm.close()


def test_calls_in_a_history_come_back() -> None:
    llm, engine = of("Done.")
    said_so = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_call_id="c", tool_name="add", tool_kwargs={})])
    llm.chat([ChatMessage("Add."), said_so, ChatMessage(role="tool", content="3")])
    assert engine.last.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "c", "function": {"name": "add", "arguments": {}}}],
    }

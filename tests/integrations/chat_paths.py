"""Every way to ask a ``ChatHypic`` on a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

from hypic.errors import WorkerLost
from hypic.integrations.langchain import ChatHypic, segment
from tests.integrations.scripted import ScriptedEngine

PAGES = ["The Alpha mill was built in 1871 on the Lenne.", "The Beta bridge was opened in 1902, with two tracks."]
MESSAGES = [
    SystemMessage("Answer from the passages."),
    HumanMessage([segment(PAGES[0], name="a", source="a.md"), segment(PAGES[1], name="b"), "When?"]),
]


def chat_on(engine: ScriptedEngine, **options: Any) -> Any:
    """A model that takes more kinds of input than LangChain's types know."""
    return ChatHypic(engine=engine, **options)


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


def whole(chunks: list[Any]) -> Any:
    return sum(chunks[1:], chunks[0])


Ask = Callable[[Any, Any], Any]
PATHS: dict[str, Ask] = {
    "invoke": lambda m, x: m.invoke(x),
    "ainvoke": lambda m, x: run(m.ainvoke(x)),
    "stream": lambda m, x: whole(list(m.stream(x))),
    "astream": lambda m, x: whole(run(collect(m.astream(x)))),
    "batch": lambda m, x: m.batch([x])[0],
    "abatch": lambda m, x: run(m.abatch([x]))[0],
    "retry": lambda m, x: m.with_retry(stop_after_attempt=2).invoke(x),
    "fallback": lambda m, x: ChatHypic(engine=ScriptedEngine(error=WorkerLost("gone"))).with_fallbacks([m]).invoke(x),
    "bind": lambda m, x: m.bind(max_tokens=7).invoke(x),
    "config": lambda m, x: m.with_config(tags=["t"]).invoke(x),
    "prompt": lambda m, x: (ChatPromptTemplate([MessagesPlaceholder("m")]) | m).invoke({"m": x}),
    "prompt_stream": lambda m, x: whole(list((ChatPromptTemplate([MessagesPlaceholder("m")]) | m).stream({"m": x}))),
    "generate": lambda m, x: m.generate([x]).generations[0][0].message,
    "agenerate": lambda m, x: run(m.agenerate([x])).generations[0][0].message,
    "streaming": lambda m, x: m.model_copy(update={"streaming": True}).invoke(x),
}

"""Every way to ask a ``HypicLLM`` of LangChain on a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from langchain_core.runnables import RunnableLambda

from hypic.errors import WorkerLost
from hypic.integrations.langchain import HypicLLM, SegmentedStr, SegmentPromptValue
from hypic.types import Prompt, Segment
from tests.integrations.scripted import ScriptedEngine

PAGES = ["The Alpha mill was built in 1871 on the Lenne.", "The Beta bridge was opened in 1902, with two tracks."]
PARTS = [Segment("Be brief.", kind="system"), Segment(PAGES[0], name="a", source="a.md"), Segment(PAGES[1])]
PROMPT = Prompt(PARTS, "When?")
SAID = [("system", "Be brief."), ("user", f"{PAGES[0]}\n\n{PAGES[1]}\n\nWhen?")]


def llm_on(engine: ScriptedEngine, **options: Any) -> Any:
    """A model that takes more kinds of input than LangChain's types know."""
    return HypicLLM(engine=engine, **options)


def run(awaitable: Any) -> Any:
    return asyncio.run(awaitable)


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


Ask = Callable[[Any, Any], str]
PATHS: dict[str, Ask] = {
    "invoke": lambda m, x: m.invoke(x),
    "ainvoke": lambda m, x: run(m.ainvoke(x)),
    "stream": lambda m, x: "".join(m.stream(x)),
    "astream": lambda m, x: "".join(run(collect(m.astream(x)))),
    "batch": lambda m, x: m.batch([x])[0],
    "abatch": lambda m, x: run(m.abatch([x]))[0],
    "retry": lambda m, x: m.with_retry(stop_after_attempt=2).invoke(x),
    "fallback": lambda m, x: HypicLLM(engine=ScriptedEngine(error=WorkerLost("gone"))).with_fallbacks([m]).invoke(x),
    "bind": lambda m, x: m.bind(max_tokens=7).invoke(x),
    "bind_stream": lambda m, x: "".join(m.bind(max_tokens=7).stream(x)),
    "config": lambda m, x: m.with_config(tags=["t"]).invoke(x),
    "chain": lambda m, x: (RunnableLambda(lambda i: x) | m).invoke(0),
    "chain_stream": lambda m, x: "".join((RunnableLambda(lambda i: x) | m).stream(0)),
    "streaming": lambda m, x: m.model_copy(update={"streaming": True}).invoke(x),
    "astreaming": lambda m, x: run(m.model_copy(update={"streaming": True}).ainvoke(x)),
}
INPUTS: dict[str, Any] = {
    "Prompt": PROMPT,
    "SegmentPromptValue": SegmentPromptValue(segments=PARTS, tail="When?"),
    "SegmentedStr": SegmentedStr(PROMPT),
}

"""Tools, and a ``ChatHypic`` that calls them on a scripted engine."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from pydantic import BaseModel

from hypic.integrations.langchain import ChatHypic
from tests.integrations.scripted import ScriptedEngine

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

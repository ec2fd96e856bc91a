"""A scripted engine that obeys: it calls the tools that it is offered and writes the JSON that it is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hypic.types import Completion, PromptLike
from tests.integrations.scripted import ScriptedEngine, said


@dataclass
class ToolEngine(ScriptedEngine):
    """``script`` is said first, one text per request; then it calls the first tool (or the one that it is told to call)
    after a user's turn, and answers with ``answer`` after a tool's. Text comes in pieces of ``piece_chars``."""

    script: list[str] = field(default_factory=list)
    spelling: Literal["xml", "hermes"] = "xml"
    piece_chars: int = 3

    def _pieces(self, prompt: PromptLike) -> Iterator[Completion]:
        if self.error is not None:
            raise self.error
        text = self.script.pop(0) if self.script else self._reply(prompt)
        for n, start in enumerate(range(0, len(text), self.piece_chars)):
            yield Completion(text=text[start : start + self.piece_chars], token_ids=(n,))
        yield Completion(finish_reason="stop", usage=self.usage, report=self._report(prompt))

    def _reply(self, prompt: PromptLike) -> str:
        turns = said(prompt)
        system, (role, last) = turns[0][1] if turns[0][0] == "system" else "", turns[-1]
        if "JSON object" in system:
            schema = system.partition("and nothing else:\n")[2]
            return json.dumps(values(json.loads(schema), last) if schema else {"setup": "a", "punchline": "b"})
        tools = {tool["function"]["name"]: tool["function"] for tool in self.last.tools or ()}
        forced = re.search(r"calling the tool (\w+)\.", system)
        if not tools or role == "tool":
            return self.answer
        name = forced[1] if forced else next(iter(tools))
        return call(name, values(tools[name].get("parameters", {}), last), self.spelling)


def call(name: str, arguments: Mapping[str, Any], spelling: str = "xml") -> str:
    """A call as a model spells it."""
    if spelling == "hermes":
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    inner = "".join(f"<parameter={key}>\n{_spelled(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def values(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    """An object that fits a schema: numbers are 3, texts the first quotation in ``text`` or a word."""
    quoted = re.search("'([^']+)'", text)
    word = quoted[1] if quoted else "word"
    by_type: Mapping[str | None, Any] = {"integer": 3, "number": 3, "boolean": True, "array": [], "object": {}}
    properties: Mapping[str, Any] = schema.get("properties", {})
    return {key: by_type.get(one.get("type"), word) for key, one in properties.items()}

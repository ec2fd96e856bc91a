"""What a call asks of the answer's form: tools, ``tool_choice``, a JSON object.

Tools go into the prompt through the chat template, and calls are read from the text (``hypic.tool_calls``). Decoding is
not constrained: a forced call and a JSON object are asked for in the system text and checked afterwards, so an answer
that is not what was asked for raises and is never passed on. What cannot be had at all raises before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.exceptions import ModelError, ModelInvalidRequestError
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from hypic import tool_calls
from hypic.integrations._common import Block
from hypic.integrations.langchain.blocks import blocks_of
from hypic.integrations.langchain.options import PLAIN_TEXT
from hypic.tool_calls import Reply
from hypic.tool_syntax import Tool
from hypic.types import TextEngine

TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "strict", "answer_schema", "unchecked")
_REFUSED = {
    "response_format": "call with_structured_output(schema, method='json_schema'), which asks for JSON and checks it",
    "functions": "pass tools",
    "function_call": "pass tool_choice",
}


@dataclass(frozen=True)
class Wanted:
    """Tools that the model is offered (none with ``tool_choice="none"``), and what its answer must be.

    ``must_call``: a tool's name, or ``""`` for any of them; ``None`` leaves it to the model. ``answer_schema``: the
    JSON schema of the object that the answer is asked to be; empty for any object. ``one_call``: of several calls only
    the first is given.
    """

    tools: tuple[Tool, ...] = ()
    must_call: str | None = None
    answer_schema: Mapping[str, Any] | None = None
    is_checked: bool = True
    one_call: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Wanted:
        """What a call's keywords ask for.

        Raises:
            NotImplementedError: something that would need constrained decoding.
            ModelInvalidRequestError: a tool that is none, or a ``tool_choice`` that names no tool.
        """
        _refuse_unsupported(options)
        tools = tuple(_checked_tool(tool) for tool in options.get("tools") or ())
        choice = _choice(options.get("tool_choice"), [tool["function"]["name"] for tool in tools])
        return cls(
            () if choice == "none" else tools,
            None if choice in ("auto", "none") else choice.removeprefix("required").removeprefix("="),
            options.get("answer_schema"),
            not options.get("unchecked"),
            options.get("parallel_tool_calls") is False,
        )

    def ask(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        """The messages with what is asked of the answer's form at the end of the leading system text."""
        text = self._instruction()
        if not text:
            return list(messages)
        block = Block(text, {"kind": "system", "cache": False}).to_content()
        if not messages or not isinstance(messages[0], SystemMessage):
            return [SystemMessage(content=[block]), *messages]
        first = messages[0]
        content = [*(own.to_content() for own in blocks_of(first)), block]
        return [first.model_copy(update={"content": content}), *messages[1:]]

    def check(self, reply: Reply, finish_reason: str | None) -> None:
        """Whether a whole reply is what was asked for.

        Raises:
            ModelError: it makes no call, or another one than it had to.
        """
        if self.must_call is None or not self.is_checked:
            return
        others = [call.name for call in reply.calls if self.must_call not in ("", call.name)]
        if reply.calls and not others:
            return
        made = f"called {others[0]!r}" if others else "made no tool call"
        cause = (
            "the answer was cut off: raise max_tokens" if finish_reason == "length" else "try again or another model"
        )
        raise ModelError(f"tool_choice asks for a call of {self.must_call or 'a tool'} and the model {made}; {cause}.")

    def _instruction(self) -> str:
        if self.must_call is not None:
            which = f"the tool {self.must_call}" if self.must_call else "one of the tools"
            return f"Answer only by calling {which}."
        if self.answer_schema is None:
            return ""
        if not self.answer_schema:
            return "Answer with one JSON object and nothing else."
        schema = json.dumps(self.answer_schema, ensure_ascii=False)
        return f"Answer with one JSON object that fits this JSON schema, and nothing else:\n{schema}"


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    """Raises for what would need constrained decoding.

    Raises:
        NotImplementedError: such an option is set.
    """
    for name, instead in _REFUSED.items():
        if options.get(name) and options[name] != PLAIN_TEXT:
            raise NotImplementedError(f"hypic's LangChain models take no {name}; {instead}.")
    if options.get("strict"):
        raise NotImplementedError("strict=True needs constrained decoding, which hypic has not; leave strict out.")


def normalized_choice(choice: object) -> object:
    """``tool_choice`` in OpenAI's words: ``"any"`` and ``True`` are ``"required"``."""
    return "required" if choice in ("any", True) else choice


def refuse_mute_template(engine: TextEngine, wanted: Wanted, kwargs: Mapping[str, Any] | None) -> None:
    """Whether the checkpoint's chat template shows tools at all.

    Raises:
        NotImplementedError: it would drop them.
    """
    tokenizer = getattr(engine, "tokenizer", None)
    if wanted.tools and tokenizer is not None and not tool_calls.shows_tools(tokenizer, wanted.tools, kwargs):
        raise NotImplementedError(
            "the chat template of this checkpoint does not show tools, so the model would never see them; use a "
            "checkpoint that was trained with tools, put the instructions into the prompt, or for structured output "
            "pass method='json_schema', which needs no tools."
        )


def opens_reasoning(engine: TextEngine, kwargs: Mapping[str, Any] | None) -> bool:
    """Whether answers begin inside the reasoning; an engine without a tokenizer is taken to say itself."""
    tokenizer = getattr(engine, "tokenizer", None)
    return tokenizer is not None and tool_calls.opens_reasoning(tokenizer, kwargs)


def _checked_tool(tool: Any) -> Tool:
    converted = convert_to_openai_tool(tool)
    function = converted.get("function")
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ModelInvalidRequestError(f"the tool {tool!r:.80} is no function; a provider's own tools do not run here.")
    return converted


def _choice(choice: object, names: Sequence[str]) -> str:
    """``auto``, ``none``, ``required`` or ``required=NAME``."""
    choice = normalized_choice(choice)
    if choice in (None, False, "auto"):
        return "auto"
    if choice == "none":
        return "none"
    if not names:
        raise ModelInvalidRequestError(f"tool_choice is {choice!r} but there are no tools; pass tools or leave it out.")
    if choice == "required":
        return "required"
    name = choice
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise ModelInvalidRequestError(
            f"tool_choice is {choice!r}; it must be 'auto', 'none', 'any', 'required' or one of {', '.join(names)}."
        )
    return f"required={name}"

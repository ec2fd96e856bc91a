"""Tools of a LlamaIndex call: which are offered, whether one must be called, and whether it was.

Tools go into the prompt through the chat template, and calls are read from the text (``hypic.tool_calls``). Decoding is
not constrained: a demanded call is asked for in the system text and checked when the answer is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, ToolCallBlock

from hypic import tool_calls
from hypic.arguments import check_template_inputs
from hypic.errors import ConfigError, HypicError
from hypic.integrations._common import LIVE, Block
from hypic.integrations.llamaindex.messages import blocks_of, marked_message
from hypic.tool_syntax import Tool, function_of
from hypic.types import TextEngine


class NoToolCall(HypicError, ValueError):
    """The model was to call a tool, and answered without or called another one."""


@dataclass(frozen=True)
class Wanted:
    """Tools that are offered. ``must_call``: a tool's name, ``""`` for any of them, ``None`` leaves it to the model."""

    tools: tuple[Tool, ...] = ()
    must_call: str | None = None

    @classmethod
    def of(cls, tools: Sequence[Tool | Callable[..., Any]] | None, choice: object) -> Wanted:
        """What a call's ``tools`` and ``tool_choice`` ask for. Tools are OpenAI's dictionaries, or functions, which
        describe themselves; the choice is OpenAI's, or a tool's name.

        Raises:
            ConfigError: a tool is none, or there is none of that name.
        """
        check_template_inputs(tools, None)
        offered = tuple(tool_calls.described(tools or ()))
        if choice == "none":
            return cls()
        if choice in (None, False, "auto"):
            return cls(offered)
        if isinstance(choice, Mapping):
            choice = choice.get("function", choice).get("name")
        names = [str(function_of(tool)["name"]) for tool in offered]
        if choice in ("required", "any", True) and names:
            return cls(offered, "")
        if choice not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"tool_choice is {choice!r}; it must be auto, none, required or a tool's name ({known}).")
        return cls(offered, str(choice))

    def ask(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages with the demand, if there is one, at the end of the leading system text."""
        if self.must_call is None:
            return list(messages)
        which = f"the tool {self.must_call}" if self.must_call else "one of the tools"
        demand = Block(f"Answer only by calling {which}.", {"kind": "system", **LIVE})
        if not messages or messages[0].role != MessageRole.SYSTEM:
            return [marked_message(MessageRole.SYSTEM, [demand]), *messages]
        first = messages[0]
        hints = first.additional_kwargs.get("hypic")
        glue = hints.get("glue") if isinstance(hints, Mapping) else None
        extra = {key: value for key, value in first.additional_kwargs.items() if key != "hypic"}
        return [marked_message(first.role, [*blocks_of(first), demand], extra, glue), *messages[1:]]

    def check(self, calls: Sequence[ToolCallBlock], finish_reason: str | None) -> None:
        """Whether the calls of a whole answer are what was demanded.

        Raises:
            NoToolCall: there is none, or another one.
        """
        if self.must_call is None:
            return
        others = [call.tool_name for call in calls if self.must_call not in ("", call.tool_name)]
        if calls and not others:
            return
        made = f"called {others[0]!r}" if others else "made no tool call"
        cut_off = "the answer was cut off: raise max_tokens" if finish_reason == "length" else "try another model"
        raise NoToolCall(
            f"a call of {self.must_call or 'a tool'} was demanded and the model {made}; {cut_off}, or for structured "
            "output set pydantic_program_mode=PydanticProgramMode.LLM, which reads JSON from the text."
        )


def check_template(engine: TextEngine, tools: Sequence[Tool], kwargs: Mapping[str, Any] | None) -> None:
    """Makes sure that tools reach the model, where the engine lets its template be seen at work.

    Raises:
        ConfigError: the chat template does not show them.
    """
    tokenizer = getattr(engine, "tokenizer", None)
    if tools and tokenizer is not None and not tool_calls.shows_tools(tokenizer, tools, kwargs):
        raise ConfigError("the model's chat template shows no tools; take a model made for tools, or describe them.")


def opens_reasoning(engine: TextEngine, kwargs: Mapping[str, Any] | None) -> bool:
    """Whether answers begin inside the reasoning; an engine without a tokenizer is taken to say itself."""
    tokenizer = getattr(engine, "tokenizer", None)
    return tokenizer is not None and tool_calls.opens_reasoning(tokenizer, kwargs)


def only_first_call(message: ChatMessage) -> ChatMessage:
    """The message without all calls but the first."""
    later = [block for block in message.blocks if isinstance(block, ToolCallBlock)][1:]
    blocks = [block for block in message.blocks if not any(block is call for call in later)]
    extra = {**message.additional_kwargs, "tool_calls": message.additional_kwargs.get("tool_calls", [])[:1]}
    return message.model_copy(update={"blocks": blocks, "additional_kwargs": extra}) if later else message

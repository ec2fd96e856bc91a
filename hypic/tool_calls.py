"""A model's raw text as reasoning, content and tool calls, while it streams. Pure: no model, no tokens.

Two spellings of a call are read, which models of one family mix:

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>      Qwen3.5, Qwen3-Coder
    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                                 Hermes, Qwen3

Reasoning stands in ``<think>...</think>`` before all else. What comes out never depends on how the text was cut into
pieces, and nothing is lost: a call that cannot be read stays text, with a note that says why. Without tools nothing is
a call. White space beside reasoning and calls is left out; a text with neither comes back to the character.

Not here: how tools get into a prompt (the chat template's work) and running them (the agent's).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hypic.tool_syntax import OPEN_FUNCTION, Malformed, Tool, function_of, read_call
from hypic.types import Message

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_CALL_TAG = re.compile("</?tool_call>")
_PROBE: Sequence[Message] = ({"role": "user", "content": "?"},)


@dataclass(frozen=True)
class ToolCall:
    """A call as the model asked for it; ``index`` counts the calls of one reply."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text, other scripts than Latin unescaped."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Part:
    """What is new in a reply: exactly one of the four."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None
    note: str = ""


def only_first(part: Part) -> Part:
    """The part, or a note in the place of a call that is not the reply's first: for who takes one call at most."""
    if part.call is None or part.call.index == 0:
        return part
    return Part(note=f"a further call, of {part.call.name!r}, was left out: parallel_tool_calls is false")


@dataclass(frozen=True)
class Reply:
    """A whole reply; ``notes`` say what could not be read as it was meant."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(parts: Sequence[Part]) -> Reply:
        """All parts of one reply, joined."""
        return Reply(
            "".join(part.content for part in parts),
            "".join(part.reasoning for part in parts),
            tuple(part.call for part in parts if part.call is not None),
            tuple(part.note for part in parts if part.note),
        )


def parse_reply(text: str, tools: Sequence[Tool] | None = None, *, in_reasoning: bool = False) -> Reply:
    """A whole text at once; see ``ReplyParser``."""
    parser = ReplyParser(tools, in_reasoning=in_reasoning)
    return Reply.of([*parser.push(text), *parser.finish()])


class ChatTokenizer(Protocol):
    """What tells how a checkpoint's chat template behaves: ``LLM.tokenizer`` does."""

    def encode(
        self,
        prompt: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Sequence[Any]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def opens_reasoning(tokenizer: ChatTokenizer, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template ends a prompt with ``<think>``, so that the answer begins inside the reasoning."""
    pieces = tokenizer.encode(_PROBE, chat_template_kwargs=chat_template_kwargs)
    return tokenizer.decode(pieces[-1].ids).rstrip().endswith(OPEN_THINK)


def described(tools: Sequence[Tool | Callable[..., Any]]) -> list[Tool]:
    """Tools as OpenAI describes them; functions by their annotations and docstrings.

    Raises:
        ConfigError: a function does not say enough of itself.
    """
    given = [tool for tool in tools if isinstance(tool, Mapping)]
    if len(given) == len(tools):
        return given
    from hypic.engine import tokenizer  # which reads functions as transformers does, and brings it along

    return tokenizer.described(tools)


def shows_tools(
    tokenizer: ChatTokenizer, tools: Sequence[Tool], chat_template_kwargs: Mapping[str, Any] | None = None
) -> bool:
    """Whether the template puts tools into a prompt; one that does not would drop them without a word."""
    with_tools = tokenizer.encode(_PROBE, tools=tools, chat_template_kwargs=chat_template_kwargs)
    without = tokenizer.encode(_PROBE, chat_template_kwargs=chat_template_kwargs)
    return [tuple(piece.ids) for piece in with_tools] != [tuple(piece.ids) for piece in without]


class ReplyParser:
    """Reads one reply as it streams: ``push`` every piece of text, then ``finish`` once.

    ``tools`` are those that the model was offered, OpenAI's dictionaries or their ``function`` part: their schemas
    type the values of the XML spelling. A call of another name is read too; its values are strings.
    ``in_reasoning``: the prompt ended with ``<think>``.
    """

    def __init__(self, tools: Sequence[Tool] | None = None, *, in_reasoning: bool = False) -> None:
        self._schemas = {
            function["name"]: function.get("parameters") or {} for function in map(function_of, tools or ())
        }
        self._modes = {"start": self._start, "reasoning": self._reasoning, "content": self._content, "call": self._call}
        self._mode, self._otherwise = "start", "reasoning" if in_reasoning else "content"
        self._buffer = self._gap = ""
        self._said = {"content": False, "reasoning": False}
        # Whether reasoning or a call was seen at all, and since the last content.
        self._is_marked = self._is_after_mark = in_reasoning
        self._num_calls = self._scanned = 0
        self._failed: tuple[int, str] | None = None

    def push(self, text: str) -> list[Part]:
        """What is certain now. White space and beginnings of tags wait for what follows."""
        self._buffer += text
        return self._drain(final=False)

    def finish(self) -> list[Part]:
        """The rest, once no text follows."""
        parts = self._drain(final=True)
        if self._mode == "content" and not self._is_after_mark:
            _say(parts, content=self._gap)
        return parts

    def _drain(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while self._modes[self._mode](parts, final):
            pass
        return parts

    # -- modes: each takes what it can from the buffer, and tells whether there is more to do ------------------------

    def _start(self, parts: list[Part], final: bool) -> bool:
        body = self._buffer.lstrip()
        if body.startswith(OPEN_THINK):
            self._buffer, self._mode = body[len(OPEN_THINK) :], "reasoning"
            self._is_marked = self._is_after_mark = True
        elif OPEN_THINK.startswith(body) and not final:
            return False
        else:
            self._mode = self._otherwise
        return True

    def _reasoning(self, parts: list[Part], final: bool) -> bool:
        text, is_closed = self._until(CLOSE_THINK, final)
        self._say_reasoning(parts, text)
        if is_closed:
            self._buffer, self._mode, self._gap = self._buffer[len(CLOSE_THINK) :], "content", ""
        return is_closed

    def _content(self, parts: list[Part], final: bool) -> bool:
        if not self._schemas:
            text, self._buffer = self._buffer, ""
            self._say_content(parts, text)
            return False
        text, is_call = self._until(OPEN_CALL, final)
        self._say_content(parts, text)
        if is_call:
            self._mode, self._scanned, self._failed = "call", len(OPEN_CALL), None
        return is_call

    def _call(self, parts: list[Part], final: bool) -> bool:
        head = self._buffer[len(OPEN_CALL) : len(OPEN_CALL) + 4096].lstrip()
        undecided = OPEN_FUNCTION.startswith(head) and not final
        if not undecided and not head.startswith(("{", OPEN_FUNCTION)):
            return self._give_up(parts, len(OPEN_CALL), "what follows is neither JSON nor a <function=...>")
        tag = _CALL_TAG.search(self._buffer, self._scanned)
        if tag is None:
            self._scanned = max(self._scanned, len(self._buffer) - len(CLOSE_CALL) + 1)
            return final and self._last_call(parts)
        self._scanned = tag.end()
        if tag[0] == CLOSE_CALL:
            self._try_call(parts, tag.start(), tag.end())
        elif self._failed is not None:
            self._give_up(parts, *self._failed)
        return True

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _until(self, tag: str, final: bool) -> tuple[str, bool]:
        """Takes the text before ``tag``, or all that cannot be part of one; whether it is there."""
        end = self._buffer.find(tag)
        is_there = end >= 0
        if not is_there:
            end = len(self._buffer) - (0 if final else _overlap(self._buffer, tag))
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, is_there

    def _say_reasoning(self, parts: list[Part], text: str) -> None:
        text = self._gap + text
        body = text.rstrip()
        self._gap = text[len(body) :]
        if body:
            _say(parts, reasoning=body if self._said["reasoning"] else body.lstrip())
            self._said["reasoning"] = True

    def _say_content(self, parts: list[Part], text: str) -> None:
        text = self._gap + text
        body = text.rstrip()
        self._gap = text[len(body) :]
        if body:
            _say(parts, content=body if self._said["content"] or not self._is_marked else body.lstrip())
            self._said["content"], self._is_after_mark = True, False

    def _try_call(self, parts: list[Part], stop: int, end: int) -> bool:
        """Reads the call whose body ends at ``stop``; what cannot be read may end at a later tag."""
        notes: list[str] = []
        try:
            name, arguments = read_call(self._buffer[len(OPEN_CALL) : stop], self._schemas, notes)
        except Malformed as error:
            self._failed = self._failed or (end, str(error))
            return False
        parts += [*(Part(note=note) for note in notes), Part(call=ToolCall(name, arguments, self._num_calls))]
        self._num_calls += 1
        self._buffer, self._mode = self._buffer[end:], "content"
        self._is_marked = self._is_after_mark = True
        return True

    def _last_call(self, parts: list[Part]) -> bool:
        """No text follows: a call that only lacks its closing tag is one all the same."""
        if self._failed is not None:
            return self._give_up(parts, *self._failed)
        whole = len(self._buffer)
        return self._try_call(parts, whole, whole) or self._give_up(parts, whole, "it is cut off")

    def _give_up(self, parts: list[Part], end: int, why: str) -> bool:
        """The buffer up to ``end`` is text after all, or up to a tag within that may begin a sound call."""
        following = self._buffer.find(OPEN_CALL, len(OPEN_CALL), end)
        end = end if following < 0 else following
        text, self._buffer, self._mode = self._buffer[:end], self._buffer[end:], "content"
        self._say_content(parts, text)
        parts.append(Part(note=f"a tool call was left as text: {why}"))
        return True


def _say(parts: list[Part], content: str = "", reasoning: str = "") -> None:
    if content or reasoning:
        parts.append(Part(content, reasoning))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[len(text) - n :])), 0)

"""What is kept of an answer for the turn that follows it: its ids, and its state in the form in which it comes back.

A chat template may show an answer otherwise in the next turn than it was generated: without its reasoning, without the
empty reasoning that opened it, as a tool call that is spelled anew. So the next turn's prompt is rendered as far as the
answer's end, and where the state in which the answer ended does not stand there, the engine is asked to compute that
head when it has nothing else to do. What a head costs is about the answer's own length; the next turn then computes its
new text only. Heads change what is computed and when, never an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypic.engine.plan import Piece
from hypic.engine.task import Task
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import HypicError
from hypic.stream import Answer
from hypic.tool_calls import CLOSE_THINK, Reply, opens_reasoning, parse_reply
from hypic.types import Message, Prompt, PromptLike


@dataclass(frozen=True)
class Asked:
    """A request, and what it was made of."""

    task: Task
    prompt: PromptLike
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation that may go on; empty for prompts that have no roles."""
        return () if isinstance(self.prompt, (str, Prompt)) else self.prompt


class Turns:
    """Takes note of answers as they end; ``submit`` hands a task to the engine."""

    def __init__(self, tokenizer: Tokenizer, submit: Callable[[Task], None]) -> None:
        self._tokenizer, self._submit = tokenizer, submit

    def answered(self, asked: Asked, answer: Answer) -> None:
        """Keep what the next turn needs of an answer."""
        text, sampling = "".join(answer.texts), asked.task.sampling
        # A stop string cut the text short of its ids.
        is_whole = not sampling.stop or bool(answer.ids and answer.ids[-1] in self._tokenizer.eos_ids)
        if is_whole:
            self._tokenizer.remember(text, answer.ids)
        policy = asked.task.policy
        if not text or not asked.messages or policy.reuse == "none" or policy.deterministic:
            return
        try:
            head = self._head(asked, text, answer.ids if is_whole else [])
            if head:
                self._submit(Task(f"{asked.task.id}-head", head, policy=policy, is_head=True))
        except HypicError:
            return  # the template refuses an answer here, or the engine was closed: the next turn will say so itself

    def _head(self, asked: Asked, text: str, ids: Sequence[int]) -> list[Piece]:
        """The next turn's pieces up to the end of the answer; none if the answer leaves no text in them."""
        said, following = self._returned(asked, text, ids)
        messages = [*asked.messages, said, following]
        kwargs = asked.chat_template_kwargs
        pieces = self._tokenizer.encode(messages, tools=asked.tools, chat_template_kwargs=kwargs)
        ends = [n for n, piece in enumerate(pieces) if piece.ends_message]
        return pieces[: ends[-2] + 1] if said["content"] and len(ends) > 1 else []

    def _returned(self, asked: Asked, text: str, ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer as a client sends it back, and a message such as will follow it."""
        shared = _shared_hints(asked.messages[-1])
        reply = Reply(text)
        if CLOSE_THINK in text or asked.tools:
            is_inside = opens_reasoning(self._tokenizer, asked.chat_template_kwargs)
            reply = parse_reply(text, asked.tools, in_reasoning=is_inside)
        if reply.content != text:
            self._remember_end(reply.content, ids)
        said: dict[str, Any] = {"role": "assistant", "content": reply.content, **shared}
        if not reply.calls:
            return said, {"role": "user", "content": "?", **shared}
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in reply.calls]
        return {**said, "tool_calls": calls}, {"role": "tool", "content": "?", **shared}

    def _remember_end(self, content: str, ids: Sequence[int]) -> None:
        """The ids of an answer's last part, if its text begins with a token of its own."""
        kept = [i for i in ids if i not in self._tokenizer.eos_ids]
        length = len(self._tokenizer.encode_text(content)) if content else 0
        for start in range(max(0, len(kept) - 2 * length), len(kept)):
            if self._tokenizer.decode(kept[start:]) == content:
                self._tokenizer.remember(content, kept[start:])
                return


def _shared_hints(message: Message) -> dict[str, Any]:
    """The hint of a conversation's namespace, which its next messages will carry too."""
    extras = message.get("extras")
    hints = message.get("hypic", extras.get("hypic") if isinstance(extras, Mapping) else None)
    space = hints.get("namespace") if isinstance(hints, Mapping) else None
    return {} if space is None else {"hypic": {"namespace": space}}

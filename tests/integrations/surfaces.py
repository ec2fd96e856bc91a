"""Every way to ask one engine the same thing: the engine itself, two frameworks, the server, frameworks on the server.

A conversation is a list of ``Turn``; each surface puts it in its own words, and what comes back is read from where the
surface's users read it. No surface here looks behind another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue
from llama_index.core.base.llms.types import (
    ChatMessage,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
)

from hypic import LLM, SamplingParams
from hypic.integrations import langchain, llamaindex
from hypic.registry import Registry
from hypic.types import Segment

MAX_TOKENS = 6
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FILE = {"type": "file", "file": {"file_data": "AAAA", "filename": "a.pdf"}}


@dataclass(frozen=True)
class Turn:
    """One message: documents before a text. ``part`` is a content part that no language model reads."""

    text: str
    documents: tuple[Segment, ...] = ()
    role: str = "user"
    part: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Said:
    """An answer: its text and token ids, what became of each segment, counts."""

    text: str
    ids: tuple[int, ...]
    segments: tuple[tuple[str, str | None, str, int], ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    computed_tokens: int

    @classmethod
    def of(cls, text: str, ids: Sequence[int], report: Mapping[str, Any], counts: Sequence[int]) -> Said:
        seen = [(s["kind"], s["name"], s["outcome"], s["num_tokens"]) for s in report["segments"]]
        return cls(text, tuple(ids), tuple(seen), *counts, report["computed_tokens"])

    @property
    def outcomes(self) -> list[str]:
        return [outcome for _, _, outcome, _ in self.segments]


Ask = Callable[[Sequence[Turn]], Said]


# -- hypic.LLM -------------------------------------------------------------------------------------------------------


def engine(llm: LLM) -> Ask:
    def ask(turns: Sequence[Turn]) -> Said:
        out = llm.chat([_plain(turn) for turn in turns], SamplingParams(**OPTIONS))
        assert out.usage is not None and out.report is not None
        counts = (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.cached_tokens)
        return Said.of(out.text, out.token_ids, asdict(out.report), counts)

    return ask


def _plain(turn: Turn) -> dict[str, Any]:
    """A message as the engine and the server take it: all but the last part of a user's message are documents."""
    if turn.role == "assistant":
        return {"role": "assistant", "content": turn.text}
    parts = [{"type": "text", "text": d.text, "hypic": {"kind": d.kind, "name": d.name}} for d in turn.documents]
    return {"role": turn.role, "content": [*parts, *_extra(turn), {"type": "text", "text": turn.text}]}


def _extra(turn: Turn) -> list[Any]:
    return [] if turn.part is None else [dict(turn.part)]


# -- LangChain -------------------------------------------------------------------------------------------------------


def langchain_chat(**where: Any) -> Ask:
    chat = langchain.ChatHypic(**where, **OPTIONS)

    def ask(turns: Sequence[Turn]) -> Said:
        answer = chat.invoke([_langchain(turn) for turn in turns])
        assert answer.usage_metadata is not None
        counts = (*(answer.usage_metadata[key] for key in ("input_tokens", "output_tokens")),)
        cached = answer.usage_metadata["input_token_details"]["cache_read"]
        told = answer.response_metadata
        return Said.of(answer.text, _ids(told), told["hypic"], (*counts, cached))

    return ask


def langchain_llm(**where: Any) -> Ask:
    llm = langchain.HypicLLM(**where, **OPTIONS)

    def ask(turns: Sequence[Turn]) -> Said:
        result = llm.generate_prompt([ChatPromptValue(messages=[_langchain(turn) for turn in turns])])
        (answer,) = result.generations[0]
        told = answer.generation_info or {}
        return Said.of(answer.text, _ids(told), told["hypic"], _counts(told["token_usage"]))

    return ask


def _langchain(turn: Turn) -> BaseMessage:
    if turn.role == "assistant":
        return AIMessage(turn.text)
    blocks = [langchain.segment(d.text, d.kind, name=d.name) for d in turn.documents]
    return HumanMessage([*blocks, *_extra(turn), {"type": "text", "text": turn.text}])


# -- LlamaIndex ------------------------------------------------------------------------------------------------------


def llamaindex_chat(**where: Any) -> Ask:
    llm = llamaindex.HypicLLM(**where, **OPTIONS)

    def ask(turns: Sequence[Turn]) -> Said:
        answer = llm.chat([_llamaindex(turn) for turn in turns])
        return _from_raw(answer.message.content or "", answer.raw)

    return ask


def llamaindex_complete(**where: Any) -> Ask:
    """One user turn as one string, in which documents that were registered are found again."""
    llm = llamaindex.HypicLLM(**where, **OPTIONS)

    def ask(turns: Sequence[Turn]) -> Said:
        (turn,) = turns
        assert isinstance(llm.registry, Registry)
        llm.registry.clear()
        llm.registry.register([document for document in turn.documents if document.text.strip()])
        pictures = {} if turn.part is None else {"image_documents": [turn.part]}
        answer = llm.complete(flat(turn), **pictures)
        return _from_raw(answer.text, answer.raw)

    return ask


def flat(turn: Turn) -> str:
    """The text that the model sees: white space of its own stands in the place of glue."""
    text = ""
    for part in (*(document.text for document in turn.documents), turn.text):
        spaced = not text or not part or text[-1:].isspace() or part[:1].isspace()
        text += part if spaced else f"\n\n{part}"
    return text


def _llamaindex(turn: Turn) -> ChatMessage:
    if turn.role == "assistant":
        return ChatMessage(role=MessageRole.ASSISTANT, content=turn.text)
    if turn.part is None:
        return llamaindex.segment_message(turn.documents, turn.text)
    is_image = turn.part["type"] == "image_url"
    odd: ContentBlock = ImageBlock(image=b"\x89PNG") if is_image else DocumentBlock(data=b"%PDF")
    return ChatMessage(role=MessageRole.USER, blocks=[odd, TextBlock(text=turn.text)])


def _from_raw(text: str, raw: Any) -> Said:
    return Said.of(text, _ids(raw), raw["hypic"], _counts(raw["usage"]))


def _ids(told: Mapping[str, Any]) -> list[int]:
    return [entry["token_id"] for entry in told["logprobs"]["content"]]


def _counts(usage: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(usage[key] for key in ("prompt_tokens", "completion_tokens", "cached_tokens"))


# -- the server ------------------------------------------------------------------------------------------------------


class Refused(Exception):
    """The server's error object, as its text."""


def server(url: str) -> Ask:
    fields = {key: value for key, value in OPTIONS.items() if key != "logprobs"}

    def ask(turns: Sequence[Turn]) -> Said:
        body = {"messages": [_plain(turn) for turn in turns], **fields, "hypic": {"return_tokens": True}}
        response = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
        answer = response.json()
        if response.status_code != 200:
            raise Refused(f"{response.status_code} {answer['error']}")
        usage, told = answer["usage"], answer["hypic"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"], cached)
        return Said.of(answer["choices"][0]["message"]["content"], told["tokens"]["ids"], told, counts)

    return ask

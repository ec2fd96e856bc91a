"""What the page can ask for, as events: adding, warming, asking, measuring, over one engine that all tabs share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hypic.types import Completion, Message, SamplingParams
from hypic_apps import corpus
from hypic_apps.cli.engine import NO_THINKING
from hypic_apps.rag import measuring
from hypic_apps.rag.conversations import Conversation, Conversations, Turn
from hypic_apps.rag.errors import NotThere, RagError, TooLarge
from hypic_apps.rag.events import Event, Events, Tell, progress, told
from hypic_apps.rag.library import Library
from hypic_apps.rag.limits import Limits
from hypic_apps.rag.quiet import Quiet
from hypic_apps.rag.reading import text_of
from hypic_apps.rag.strip import counts, pieces_of, strip
from hypic_retriever import Passage

if TYPE_CHECKING:
    from hypic import LLM

# Few enough that a stop is heeded soon, enough for a step's worth of work.
WARM_AT_ONCE = 8


@dataclass(frozen=True)
class About:
    """Who answers, as the page says it: a sentence, and how to use another model."""

    introduction: str
    advice: str = ""


@dataclass
class Rag:
    """Documents, conversations and the engine. ``k`` passages go with a question; answers have ``max_tokens``."""

    llm: LLM
    about: About
    k: int = 16
    max_tokens: int = 256
    limits: Limits = Limits()
    quiet: Quiet = field(default_factory=Quiet)

    def __post_init__(self) -> None:
        self.library = Library(self.limits)
        self.conversations = Conversations(self.limits.num_conversations)

    async def state(self) -> Mapping[str, Any]:
        """All that the page shows when it is opened, and after every change."""
        stats = await asyncio.to_thread(self.llm.stats)
        store = stats["store"]
        return {
            "model": {"name": self.llm.model_name, **vars(self.about), "max_context": self.llm.max_context},
            "documents": await asyncio.to_thread(self.library.listing),
            "samples": [question.question for question in corpus.questions()],
            "k": self.k,
            "limits": vars(self.limits),
            "cache": {name: store[name] for name in ("num_entries", "held_bytes", "evictions")},
        }

    async def add(self, texts: Mapping[str, str]) -> Events:
        """Adds or edits documents."""

        def work(tell: Tell) -> Event:
            change = self.library.add(texts, lambda done, total: tell(progress("indexing", done, total)))
            return {"type": "added", **change}

        async with aclosing(told(work)) as events:
            async for event in events:
                yield event

    async def add_file(self, name: str, data: bytes) -> Events:
        """Adds or edits a document that was uploaded as a file."""
        text = await asyncio.to_thread(text_of, name, data, self.limits)
        async with aclosing(self.add({name: text})) as events:
            async for event in events:
                yield event

    async def remove(self, id: str) -> Mapping[str, Any]:
        """Takes a document out, and what is cached of it."""
        document = self.library.remove(id)
        forgotten = await asyncio.to_thread(self.llm.forget, source=document.name)
        return {"name": document.name, "num_dropped": forgotten.num_entries}

    async def warm(self, id: str | None) -> Events:
        """Encodes the passages of a document, or all of them, ahead of questions."""
        passages = self.library.passages(id)
        if not passages:
            raise RagError("there is nothing to encode yet; add a document first.")
        async with self.quiet.among_others(), aclosing(told(lambda tell: self._warm(passages, tell))) as events:
            async for event in events:
                yield event

    def _warm(self, passages: Sequence[Passage], tell: Tell) -> Event:
        outcomes: Counter[str] = Counter()
        tell(progress("encoding", 0, len(passages)))
        for start in range(0, len(passages), WARM_AT_ONCE):
            some = passages[start : start + WARM_AT_ONCE]
            for passage, report in zip(some, self.llm.warm([*map(self.library.segment, some)]), strict=True):
                self.library.note([passage], report)
                outcomes.update(segment.outcome for segment in report.segments)
            tell(progress("encoding", start + len(some), len(passages)))
        names = {"num_encoded": "encoded", "num_hits": "hit", "num_short": "live"}
        return {"type": "warmed", **{name: outcomes[outcome] for name, outcome in names.items()}}

    async def ask(self, question: str, conversation_id: str | None) -> Events:
        """The prompt, the answer in pieces, and the report; a turn that is broken off is not kept.

        Raises:
            RagError, NotThere, TooLarge: the question cannot be asked.
            HypicError: it cannot be answered.
        """
        question = self._question(question)
        conversation = self.conversations.get(conversation_id)
        passages = await asyncio.to_thread(self.library.search, question, conversation.previous, self.k)
        messages = conversation.messages([self.library.segment(passage) for passage in passages], question)
        pieces = await asyncio.to_thread(pieces_of, self.llm.tokenizer, messages)
        has_turns = bool(conversation.turns)
        yield {"type": "prompt", "conversation": conversation.id, "strip": strip(pieces, None, has_turns)}
        async with self.quiet.among_others(), aclosing(self._answer(messages)) as answer:
            texts = []
            async for piece in answer:
                texts.append(piece.text)
                if piece.text:
                    yield {"type": "text", "text": piece.text}
        report = piece.report
        assert report is not None, "a whole answer comes with its report"
        self.library.note(passages, report)
        number = _keep(conversation, Turn(question, "".join(texts), messages))
        shown = strip(pieces, report, has_turns)
        yield {"type": "report", "turn": number, "finish_reason": piece.finish_reason, "strip": shown, **counts(report)}

    def _answer(self, messages: Sequence[Message]) -> AsyncGenerator[Completion]:
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        # An async generator, though the protocol promises an iterator only.
        answer = self.llm.astream(messages, sampling, chat_template_kwargs=NO_THINKING)
        return cast("AsyncGenerator[Completion]", answer)

    async def measure(self, conversation_id: str, turn: int) -> Events:
        """Full, cold and warm times of a question that was asked.

        Raises:
            NotThere: the conversation has no such turn.
        """
        turns = self.conversations.get(conversation_id).turns
        if not 0 <= turn < len(turns):
            raise NotThere("this question is no longer there; ask it again.")
        messages = turns[turn].messages

        def work(tell: Tell) -> Event:
            return measuring.measured(self.llm, messages, tell)

        async with self.quiet.alone(), aclosing(told(work)) as events:
            async for event in events:
                yield event

    def _question(self, question: str) -> str:
        if not question.strip():
            raise RagError("the question is empty; write one.")
        limit = self.limits.question_chars
        if len(question) > limit:
            raise TooLarge(f"the question has {len(question):,} characters and the limit is {limit:,}; shorten it.")
        return question.strip().encode("utf-8", "replace").decode("utf-8")


def _keep(conversation: Conversation, turn: Turn) -> int:
    conversation.turns.append(turn)
    return len(conversation.turns) - 1

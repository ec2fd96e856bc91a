"""The demo's LangChain pipeline: retriever, prompt with one segment per passage, ``ChatHypic``, text.

It is what a user of LangChain would write, but for ``Listening``, which tells what passed through the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.engine import NO_THINKING
from hypic_apps.cli.errors import CommandError

try:
    from langchain_core.exceptions import ModelError
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough
except ImportError as error:
    raise CommandError("hypic demo needs LangChain; install it with: pip install 'hypic[langchain]'.") from error

from hypic.integrations.langchain import (
    ChatHypic,
    DocumentsPlaceholder,
    HypicRetriever,
    create_segment_documents_chain,
    segments_from_documents,
)
from hypic.types import CacheReport, Completion, Policy, PromptLike, SamplingParams
from hypic_apps.cli.timing import Case

if TYPE_CHECKING:
    from hypic import LLM
    from hypic.registry import Registry
    from hypic_retriever.index import Index


@dataclass
class Listening:
    """An engine that keeps the last prompt and the last report that passed through it."""

    llm: LLM
    prompt: PromptLike = ""
    report: CacheReport | None = None

    @property
    def registry(self) -> Registry:
        return self.llm.registry

    @property
    def model_name(self) -> str:
        return self.llm.model_name

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Completion]:
        self.prompt, self.report = prompt, None
        options: dict[str, Any] = {"policy": policy, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
        for piece in self.llm.stream(prompt, sampling, **options):
            self.report = piece.report
            yield piece

    def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Completion]:
        options: dict[str, Any] = {"policy": policy, "tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return self.llm.astream(prompt, sampling, **options)


@dataclass(frozen=True)
class Pipeline:
    """Question in, answer out."""

    engine: Listening
    retriever: HypicRetriever
    chain: Runnable[str, str]

    @classmethod
    def build(cls, llm: LLM, index: Index, k: int, max_tokens: int) -> Pipeline:
        """``{context: retriever, question} | prompt | ChatHypic | text``."""
        engine = Listening(llm)
        retriever = HypicRetriever(index=index, k=k)
        chat = ChatHypic(engine=engine, max_tokens=max_tokens, temperature=0.0, chat_template_kwargs=NO_THINKING)
        prompt = ChatPromptTemplate.from_messages([DocumentsPlaceholder("context", tail="{question}")])
        inputs = RunnableParallel(context=retriever, question=RunnablePassthrough())
        return cls(engine, retriever, inputs | create_segment_documents_chain(chat, prompt))

    def stream(self, question: str) -> Iterator[str]:
        """The answer in pieces."""
        with engine_errors():
            yield from self.chain.stream(question)

    def last(self, question: str) -> tuple[Case, CacheReport]:
        """The prompt that the question, asked just now, became, and how answering it went."""
        report = self.engine.report
        assert report is not None, "a whole answer comes with its report"
        segments = segments_from_documents(self.retriever.invoke(question))
        return Case(self.engine.prompt, segments, NO_THINKING), report


@contextmanager
def engine_errors() -> Iterator[None]:
    """Gives back hypic's own error where LangChain's stands around it."""
    from hypic.errors import HypicError

    try:
        yield
    except ModelError as error:
        if isinstance(error.__cause__, HypicError):
            raise error.__cause__ from None
        raise

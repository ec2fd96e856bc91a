"""``SegmentSynthesizer``: an answer from retrieved nodes, each of them one segment of one prompt.

In the place of ``CompactAndRefine``, which joins nodes and splits the text anew. What does not fit is left out whole,
lowest rank first, and never split: a part of a node would be a new segment.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any, cast

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.core.utils import get_tokenizer
from pydantic import BaseModel

from hypic.integrations.llamaindex.llm import HypicLLM
from hypic.integrations.llamaindex.retriever import segment_of
from hypic.integrations.llamaindex.templates import Chunk, SegmentTemplate
from hypic.types import Segment

RANK_LABEL = r"Source \d+:\s*"
# What a chat template writes around a message and between chunks, at most.
_SCAFFOLD_TOKENS = 32
_GLUE_TOKENS = 4

logger = logging.getLogger("hypic")


class SegmentSynthesizer(BaseSynthesizer):
    """One call of the model, with every node as a segment in the place of the template's ``{context_str}``.

    ``text_qa_template`` may be of any of LlamaIndex's kinds and can be replaced by ``update_prompts``.
    ``prefix_messages`` stand before it. ``rank_label`` matches what at a node's head depends on its rank and stays
    live text (``None``: nothing). With ``output_cls`` the answer is an object of it, and ``streaming`` is not heeded.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        callback_manager: CallbackManager | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
        *,
        prefix_messages: Sequence[ChatMessage] = (),
        rank_label: str | None = RANK_LABEL,
    ) -> None:
        super().__init__(llm=llm, callback_manager=callback_manager, streaming=streaming, output_cls=output_cls)
        # Early versions of LlamaIndex 0.14 take no such argument.
        self._empty_response = empty_response or "Empty Response"
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._prefix_messages = list(prefix_messages)
        self._rank_label = None if rank_label is None else re.compile(rank_label)

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        self._text_qa_template = prompts_dict.get("text_qa_template", self._text_qa_template)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """The answer; its ``source_nodes`` are those that the model saw."""
        chunks, kept = self._fitting_nodes(query, nodes)
        return super().synthesize(query, kept, additional_source_nodes, hypic_chunks=chunks, **response_kwargs)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """``synthesize`` for event loops."""
        chunks, kept = await asyncio.to_thread(self._fitting_nodes, query, nodes)
        return await super().asynthesize(query, kept, additional_source_nodes, hypic_chunks=chunks, **response_kwargs)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        *,
        hypic_chunks: Sequence[Chunk] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """The answer from texts, best first."""
        template = self._template(query_str, text_chunks, hypic_chunks)
        asked = {**response_kwargs, "query_str": query_str, "context_str": template.context}
        if self._output_cls is not None:
            answer: BaseModel = self._llm.structured_predict(self._output_cls, cast(PromptTemplate, template), **asked)
            return answer
        if self._streaming:
            return self._llm.stream(template, **asked)
        return self._llm.predict(template, **asked) or self._empty_response

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        *,
        hypic_chunks: Sequence[Chunk] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """``get_response`` for event loops."""
        template = await asyncio.to_thread(self._template, query_str, text_chunks, hypic_chunks)
        asked = {**response_kwargs, "query_str": query_str, "context_str": template.context}
        if self._output_cls is not None:
            prompt = cast(PromptTemplate, template)
            answer: BaseModel = await self._llm.astructured_predict(self._output_cls, prompt, **asked)
            return answer
        if self._streaming:
            return await self._llm.astream(template, **asked)
        return await self._llm.apredict(template, **asked) or self._empty_response

    # -- chunks ------------------------------------------------------------------------------------------------------

    def _template(self, query: str, texts: Sequence[str], chunks: Sequence[Chunk] | None) -> SegmentTemplate:
        if chunks is None:
            all_chunks = [self._chunk(Segment(text)) for text in texts]
            chunks = [all_chunks[n] for n in self._fitting(query, all_chunks, list(range(len(texts))))]
        return self._filled(chunks)

    def _filled(self, chunks: Sequence[Chunk]) -> SegmentTemplate:
        is_cut = isinstance(self._inner_llm, HypicLLM)
        return SegmentTemplate.of(self._text_qa_template, chunks, self._prefix_messages, is_cut)

    @property
    def _inner_llm(self) -> LLM:
        return self._llm.llm if isinstance(self._llm, StructuredLLM) else self._llm

    def _chunk(self, segment: Segment) -> Chunk:
        text = segment.text.strip()
        label = None if self._rank_label is None else self._rank_label.match(text)
        end = 0 if label is None else label.end()
        return Chunk(Segment(text[end:], name=segment.name, source=segment.source), text[:end])

    def _fitting_nodes(
        self, query: QueryType, nodes: Sequence[NodeWithScore]
    ) -> tuple[list[Chunk], list[NodeWithScore]]:
        texts = [(node, node.node.get_content(metadata_mode=MetadataMode.LLM)) for node in nodes]
        filled = [node for node, text in texts if text.strip()]
        chunks = [self._chunk(segment_of(node.node)) for node in filled]
        asked = query.query_str if isinstance(query, QueryBundle) else query
        kept = self._fitting(asked, chunks, ranking(filled))
        return [chunks[n] for n in kept], [filled[n] for n in kept]

    def _fitting(self, query: str, chunks: Sequence[Chunk], ranked: Sequence[int]) -> list[int]:
        """Which chunks are used, in their order; the best one always, for a prompt without context answers nothing."""
        metadata = self._llm.metadata
        budget = metadata.context_window - metadata.num_output
        if sum(_most_tokens(chunk.text) for chunk in chunks) + self._frame_tokens(query, _most_tokens) <= budget:
            return list(range(len(chunks)))
        budget = self._exact_budget() - self._frame_tokens(query, self._count)
        kept: list[int] = []
        for n in ranked:
            budget -= self._count(chunks[n].text) + _GLUE_TOKENS
            if kept and budget < 0:
                break
            kept.append(n)
        if len(kept) < len(chunks):
            logger.warning(
                "%d of %d retrieved texts do not fit the context and were left out whole, lowest rank first.",
                len(chunks) - len(kept),
                len(chunks),
            )
        return sorted(kept)

    def _exact_budget(self) -> int:
        """Tokens for the prompt, from an engine that has started: only then its context is certain."""
        if isinstance(self._inner_llm, HypicLLM):
            self._inner_llm.get_engine()
        metadata = self._llm.metadata
        return metadata.context_window - metadata.num_output

    def _frame_tokens(self, query: str, count: Any) -> int:
        """Tokens of all but the chunks."""
        messages = self._filled([]).format_messages(llm=self._llm, query_str=query)
        return sum(count(message.content or "") + _SCAFFOLD_TOKENS for message in messages)

    def _count(self, text: str) -> int:
        inner = self._inner_llm
        return inner.count_tokens(text) if isinstance(inner, HypicLLM) else len(get_tokenizer()(text))


def ranking(nodes: Sequence[NodeWithScore]) -> list[int]:
    """Places of the nodes, best first: as they stand if their scores run one way, else by score.

    Some stores give distances as scores, so that the best is the least; some postprocessors put the best at both ends.
    """
    scores = [node.score for node in nodes]
    places = list(range(len(nodes)))
    known = [score for score in scores if score is not None]
    if len(known) < len(scores) or known in (sorted(known), sorted(known, reverse=True)):
        return places
    return sorted(places, key=lambda n: -known[n])


def _most_tokens(text: str) -> int:
    """A bound that needs no tokenizer: no token is less than a byte."""
    return len(text.encode(errors="replace")) + _GLUE_TOKENS

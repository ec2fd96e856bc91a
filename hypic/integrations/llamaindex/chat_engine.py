"""``SegmentChatEngine``: chat over retrieved nodes in which every node is a segment and the history stays a prefix.

LlamaIndex's own context chat engine joins the nodes into the system message, before the conversation: with other nodes
in the next turn, nothing behind them could be continued. Here the order is system prompt, conversation, then one user
message of context and question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.response_synthesizers import CompactAndRefine

from hypic.integrations.llamaindex.synthesizer import SegmentSynthesizer


class SegmentChatEngine(ContextChatEngine):
    """``ContextChatEngine`` with retrieved nodes as segments; made with ``from_defaults`` of that class.

    ``context_template`` stands before the question in the last user message. There is no refining: what does not fit
    is left out whole.
    """

    def _get_response_synthesizer(
        self, chat_history: Sequence[ChatMessage], streaming: bool = False
    ) -> CompactAndRefine:
        template = self._context_template
        asked = ChatMessage(role=MessageRole.USER, content=template.get_template(llm=self._llm) + "\n{query_str}")
        synthesizer = SegmentSynthesizer(
            llm=self._llm,
            callback_manager=self.callback_manager,
            text_qa_template=ChatPromptTemplate([asked], function_mappings=template.function_mappings),
            streaming=streaming,
            prefix_messages=[*self._prefix_messages, *chat_history],
        )
        # The base class names the synthesizer that it makes; it uses what every synthesizer has.
        return cast(CompactAndRefine, synthesizer)

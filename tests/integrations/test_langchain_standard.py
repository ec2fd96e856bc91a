"""LangChain's own unit tests for chat models, where they are installed."""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel

from hypic.integrations.langchain import ChatHypic
from tests.integrations.scripted import ScriptedEngine

suite = pytest.importorskip("langchain_tests.unit_tests", reason="langchain-tests is not installed")


class TestChatHypic(suite.ChatModelUnitTests):  # type: ignore[misc,name-defined]
    """The standard suite; tools and structured output are not in this version."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHypic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "engine": ScriptedEngine()}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

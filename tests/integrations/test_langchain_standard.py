"""LangChain's own tests for chat models, where ``langchain-tests`` is installed: all that need no tools or media."""

import inspect
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage

from hypic.integrations.langchain import ChatHypic
from tests.integrations.scripted import ScriptedEngine

suites = pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
unit = pytest.importorskip("langchain_tests.unit_tests")
integration = pytest.importorskip("langchain_tests.integration_tests")

for _, _case in inspect.getmembers(integration.ChatModelIntegrationTests, inspect.iscoroutinefunction):
    pytest.mark.asyncio(_case)


class Scripted:
    """What the suites are told about the model; tools and structured output are not in this version."""

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


class TestUnit(Scripted, unit.ChatModelUnitTests):  # type: ignore[misc,name-defined]
    """The suite that needs no engine."""


class TestIntegration(Scripted, integration.ChatModelIntegrationTests):  # type: ignore[misc,name-defined]
    """The suite that calls the model."""

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatHypic(engine=ScriptedEngine())
        if not stream:
            return chat.invoke("When?")
        first, *rest = chat.stream("When?")
        return sum(rest, first)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self.invoke_with_cache_read_input(stream=stream)

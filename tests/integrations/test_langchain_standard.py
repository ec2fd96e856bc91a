"""LangChain's own tests for chat models and retrievers, where ``langchain-tests`` is installed. No socket is opened.

Skipped by the suites themselves: images, audio, PDF (text only), serialisation (only classes that LangChain lists),
``test_init_from_env`` (no settings in the environment), ``test_stream_time`` (needs recorded traffic).
"""

import inspect
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever

from hypic import checkpoints, shared
from hypic.integrations.langchain import ChatHypic, HypicRetriever
from tests.integrations.scripted_tools import ToolEngine

suites = pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")
unit = pytest.importorskip("langchain_tests.unit_tests")
integration = pytest.importorskip("langchain_tests.integration_tests")

for _suite in (integration.ChatModelIntegrationTests, integration.RetrieversIntegrationTests):
    for _, _case in inspect.getmembers(_suite, inspect.iscoroutinefunction):
        pytest.mark.asyncio(_case)

sockets = pytest.importorskip("pytest_socket", reason="pytest-socket is not installed")


@pytest.fixture(autouse=True)
def no_sockets() -> Iterator[None]:
    """Event loops speak to themselves through a Unix socket; nothing else may open one."""
    sockets.disable_socket(allow_unix_socket=True)
    yield
    sockets.enable_socket()


def test_sockets_are_closed() -> None:
    with pytest.raises(sockets.SocketBlockedError):
        socket.socket()


class Scripted:
    """What the suites are told about the model."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHypic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted", "engine": ToolEngine()}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnit(Scripted, unit.ChatModelUnitTests):  # type: ignore[misc,name-defined]
    """The suite that needs no engine."""


class TestGivenEngine(Scripted, integration.ChatModelIntegrationTests):  # type: ignore[misc,name-defined]
    """The suite that calls the model, with ``engine=``; such a model serves one name, so overriding it is skipped."""

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatHypic(engine=ToolEngine())
        if not stream:
            return chat.invoke("When?")
        first, *rest = chat.stream("When?")
        return sum(rest, first)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self.invoke_with_cache_read_input(stream=stream)


class TestSharedEngine(TestGivenEngine):
    """The same with engines that are shared by name, as without ``engine=``."""

    @pytest.fixture(autouse=True)
    def scripted_engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared, "acquire", lambda model, **_: ToolEngine(model_name=str(model)))
        monkeypatch.setattr(shared, "release", lambda engine: None)

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted"}

    @property
    def model_override_value(self) -> str:
        return "scripted-2"


@pytest.mark.skipif(not checkpoints.bundled().is_dir(), reason="the bundled model is not part of this copy")
class TestBundledModel(integration.ChatModelIntegrationTests):  # type: ignore[misc,name-defined]
    """All that is not about tools or JSON, on the bundled model; its chat template shows no tools."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def engine(cls) -> Iterator[None]:
        """Started once for all tests."""
        holder = ChatHypic(settings={"memory": "256MiB"})
        holder.get_engine()
        yield
        holder.close()

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatHypic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"settings": {"memory": "256MiB"}, "max_tokens": 24}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class FewWords:
    """An index that finds the same passages for every query."""

    def search(self, query: str, k: int) -> list[Any]:
        passage = type("Passage", (), {"id": "p", "text": "A passage.", "source": None})()
        return [type("Hit", (), {"passage": passage, "score": 1.0})()] * k


class TestRetriever(integration.RetrieversIntegrationTests):  # type: ignore[misc,name-defined]
    """The suite for retrievers."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return HypicRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": FewWords()}

    @property
    def retriever_query_example(self) -> str:
        return "a query"

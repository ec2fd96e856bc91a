"""LangChain's ``ChatOpenAI`` against the real process."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage

from tests.apps.server.serving import Process
from tests.apps.server.test_openai import PASSAGES

langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def model(server: Process) -> Any:
    return langchain_openai.ChatOpenAI(
        model="tiny-hybrid", base_url=server.url, api_key="none", temperature=0, max_tokens=5, max_retries=0,
        stream_usage=True, extra_body={"hypic": {"namespace": "langchain"}},
    )  # fmt: skip


def messages(*texts: str) -> list[Any]:
    hints = {"extras": {"hypic": {"kind": "document", "source": "mill.md"}}}
    parts: list[Any] = [{"type": "text", "text": text, **hints} for text in texts]
    question = {"type": "text", "text": "Who built it?"}
    return [SystemMessage("You answer from the passages."), HumanMessage([*parts, question])]


def test_invoke_reuses_segments(model: Any) -> None:
    cold = model.invoke(messages(*PASSAGES))
    warm = model.invoke(messages(*PASSAGES[::-1]))
    assert cold.content and cold.usage_metadata["input_token_details"]["cache_creation"] > 0
    details = warm.usage_metadata["input_token_details"]
    assert details["cache_read"] > warm.usage_metadata["input_tokens"] // 2 and details["cache_creation"] == 0
    assert warm.response_metadata["finish_reason"] == "length"


def test_stream_with_usage(model: Any) -> None:
    whole = model.invoke(messages(*PASSAGES))
    chunks = list(model.stream(messages(*PASSAGES)))
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk
    assert gathered.content == whole.content
    assert gathered.usage_metadata["output_tokens"] == 5
    assert gathered.usage_metadata["input_token_details"]["cache_read"] > 0


def test_log_probabilities(model: Any) -> None:
    answer = model.bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(answer.response_metadata["logprobs"]["content"]) == 5


def test_an_overflow_is_langchains_own(model: Any) -> None:
    with pytest.raises(ContextOverflowError):
        model.invoke("river " * 8000)
    with pytest.raises(ContextOverflowError):
        list(model.stream("river " * 8000))


def test_tools_that_the_template_does_not_show_are_refused(model: Any) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    with pytest.raises(Exception, match="shows no tools"):
        model.bind_tools([weather]).invoke("Hello")

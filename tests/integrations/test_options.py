"""Keywords of a call, and options of a model, of the wrong kind: one sentence through every framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")
pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from langchain_core.exceptions import ModelInvalidRequestError
from pydantic import ValidationError

from hypic import Policy, llm, shared
from hypic.errors import ConfigError
from hypic.integrations import langchain, llamaindex
from hypic.integrations._options import check_waiting
from hypic.integrations.remote import RemoteEngine
from tests.integrations.scripted import ScriptedEngine

Call = Callable[..., object]


def langchain_chat(**options: Any) -> Call:
    return lambda **kwargs: langchain.ChatHypic(engine=ScriptedEngine(), **options).invoke("When?", **kwargs)


def langchain_llm(**options: Any) -> Call:
    return lambda **kwargs: langchain.HypicLLM(engine=ScriptedEngine(), **options).invoke("When?", **kwargs)


def llamaindex_llm(**options: Any) -> Call:
    return lambda **kwargs: llamaindex.HypicLLM(engine=ScriptedEngine(), **options).complete("When?", **kwargs)


MAKERS = [langchain_chat, langchain_llm, llamaindex_llm]
KEYWORDS = [
    ({"policy": 5}, "policy is 5; pass hypic.Policy"),
    ({"policy": {"seam": 4}}, "policy is {'seam': 4}; pass hypic.Policy"),
    ({"hypic": 5}, "hypic is 5; pass a mapping with fields of the policy"),
    ({"hypic": {"seem": 5}}, "'seem' (did you mean 'seam'?); known are"),
    ({"hypic": {"deterministic": "no"}}, "deterministic is 'no'; pass True or False"),
    ({"hypic": {"primed": "no"}}, "primed is 'no'; pass True or False"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs is 5; pass a mapping"),
    ({"namespace": 5}, "namespace is 5; pass text"),
    ({"stop": 5}, "stop is 5; pass a text, or a list of texts"),
    ({"temperature": math.nan}, "temperature is nan; it must be at least 0.0"),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("keywords", "expected"), KEYWORDS, ids=[str(keywords) for keywords, _ in KEYWORDS])
def test_keywords_of_the_wrong_kind(make: Callable[..., Call], keywords: dict[str, Any], expected: str) -> None:
    with pytest.raises((ConfigError, ModelInvalidRequestError)) as caught:
        make()(**keywords)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [langchain_chat, llamaindex_llm])
@pytest.mark.parametrize("tools", [5, "look", {"name": "look"}], ids=repr)
def test_tools_are_listed(make: Callable[..., Call], tools: Any) -> None:
    with pytest.raises((ConfigError, ModelInvalidRequestError), match="tools is .*; pass a list of tools"):
        make()(tools=tools)


@pytest.mark.parametrize("timeout", ["x", -1, math.nan, True], ids=repr)
def test_a_call_takes_seconds(timeout: Any) -> None:
    for make in (langchain_chat, langchain_llm):
        with pytest.raises(ModelInvalidRequestError, match="timeout is .*; pass seconds, 0 or more"):
            make()(timeout=timeout)


def test_numbers_of_numpy_are_numbers() -> None:
    for make in MAKERS:
        assert make(max_retries=2)(max_tokens=np.int64(4), temperature=np.float32(0.5))
    check_waiting(np.float32(2.5), np.int64(2))
    with pytest.raises(ConfigError, match="timeout is"):
        check_waiting(np.float32(-1), None)


@pytest.mark.parametrize("make", [langchain_chat, langchain_llm])
def test_plain_text_is_no_format_to_hold_to(make: Callable[..., Call]) -> None:
    assert make()(response_format={"type": "text"}) and make()(response_format=None)
    with pytest.raises(NotImplementedError, match="response_format"):
        make()(response_format={"type": "json_object"})


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"timeout": -1}, "pass seconds, 0 or more"),
        ({"timeout": math.nan}, "pass seconds, 0 or more"),
        ({"max_retries": -1}, "pass a whole number, 0 or more"),
    ],
)
def test_options_of_a_model(make: Callable[..., Call], options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        make(**options)()


@pytest.mark.parametrize("make", MAKERS)
def test_a_misspelt_option_is_told_what_was_meant(make: Callable[..., Call]) -> None:
    with pytest.raises(ValidationError, match=r"unknown option 'temprature' \(did you mean 'temperature'\?\);"):
        make(temprature=1)()
    with pytest.raises((ConfigError, ModelInvalidRequestError), match=r"'max_token' \(did you mean 'max_tokens'\?\);"):
        make()(max_token=1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"base_url": 5}, "base_url is 5; pass an address"),
        ({"base_url": "example.org"}, "base_url is 'example.org'; pass an address"),
        ({"api_key": 5}, "api_key is a int; pass the server's key as text"),
        ({"model": 5}, "model is 5; pass text"),
        ({"namespace": 5}, "namespace is 5; pass text"),
        ({"timeout_s": "x"}, "timeout is 'x'; pass seconds"),
        ({"max_retries": -1}, "max_retries is -1; pass a whole number"),
    ],
)
def test_options_of_a_server(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteEngine(**{"base_url": "http://127.0.0.1:9", **options})
    assert expected in str(caught.value)


def test_settings_without_a_hash_are_refused_as_settings() -> None:
    for settings, expected in (({"memory": []}, "memory is []"), ({"policy": {"seam": 4}}, "policy is {'seam': 4}")):
        with pytest.raises(ConfigError) as caught:
            shared.acquire(None, **settings)
        assert expected in str(caught.value)
        with pytest.raises(ModelInvalidRequestError, match="pass"):
            langchain.ChatHypic(settings=settings).invoke("When?")


def test_settings_that_say_the_same_share_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def start(model: str | None, **settings: Any) -> ScriptedEngine:
        made.append(settings)
        return ScriptedEngine()

    monkeypatch.setattr(llm, "LLM", start)
    monkeypatch.setattr(shared, "_SHARED", shared._Shared())
    first = shared.acquire(None, dtype="bfloat16", seam=16, seed=7)
    assert shared.acquire(None, policy=Policy(seam=16), dtype=torch.bfloat16, seed=np.array(7)) is first
    assert shared.acquire(None, dtype="bfloat16", seam=8, seed=7) is not first and len(made) == 2

"""A careless caller gets a sentence, loses nothing, and ends nobody else's request; memory is given back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, SamplingParams, Segment
from hypic.errors import HypicError
from tests.checkpoints import add_tokenizer, qwen

TEXT = "The quick brown fox jumps over the lazy dog and then runs away into the woods."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("model"))
    add_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with made(folder) as shared:
        yield shared


def made(folder: Path) -> LLM:
    return LLM(str(folder), memory="64MB", max_running=4, threads=1)


CARELESS: list[Callable[[LLM], Any]] = [
    lambda m: m.generate("hi", {"max_tokens": 2}),  # type: ignore[call-overload]
    lambda m: m.generate("hi", policy="prefix"),
    lambda m: m.warm([Segment(TEXT)], policy="segments"),  # type: ignore[arg-type]
    lambda m: m.warm(["text"]),  # type: ignore[list-item]
    lambda m: SamplingParams(max_tokens=None),  # type: ignore[arg-type]
    lambda m: SamplingParams(max_tokens=3.0),  # type: ignore[arg-type]
    lambda m: SamplingParams(seed=1.0),  # type: ignore[arg-type]
    lambda m: SamplingParams(logprobs=2.0),  # type: ignore[arg-type]
    lambda m: SamplingParams(temperature=10**400),
    lambda m: Segment(TEXT, namespace="\ud800"),
    lambda m: Segment(TEXT, name=["a"]),  # type: ignore[arg-type]
    lambda m: LLM(store=5),
    lambda m: LLM(seed="a"),
    lambda m: LLM(""),
    lambda m: m.generate(b"abc"),  # type: ignore[call-overload]
]


@pytest.mark.parametrize("act", CARELESS)
def test_a_wrong_value_gets_a_sentence_and_the_engine_lives(llm: LLM, act: Callable[[LLM], Any]) -> None:
    with pytest.raises(HypicError):
        act(llm)
    assert llm.generate("hi", SamplingParams(max_tokens=1)).token_ids


def test_unknown_options_are_refused_for_lists_too(llm: LLM) -> None:
    with pytest.raises(TypeError):
        llm.generate(["a", "b"], polcy=None)


def test_a_call_that_raises_reaches_its_caller(llm: LLM) -> None:
    with pytest.raises(ZeroDivisionError):
        llm._loop.call(lambda engine: 1 / 0)
    assert llm.stats()["requests"]["running"] == 0


def test_closing_a_stream_wakes_the_thread_that_reads_it(llm: LLM) -> None:
    stream, pieces = llm.stream("hi", SamplingParams(max_tokens=100_000, ignore_eos=True)), []
    reader = threading.Thread(target=lambda: pieces.extend(stream))
    reader.start()
    time.sleep(0.2)
    stream.close()
    reader.join(10)
    assert not reader.is_alive()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_closed_or_dropped_model_gives_its_memory_back(folder: Path, is_closed: bool) -> None:
    model = made(folder)
    pool = weakref.ref(model._loop.engine.runner.pool)
    if is_closed:
        model.close()
    else:
        del model
    gc.collect()
    assert pool() is None


def test_a_stream_keeps_its_model(folder: Path) -> None:
    assert len(list(made(folder).stream("hi", SamplingParams(max_tokens=4, ignore_eos=True)))) == 4

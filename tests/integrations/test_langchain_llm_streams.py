"""Streams and batches of HypicLLM on a scripted engine: true, told to callbacks, and freed when they end early."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError

from hypic.errors import PromptTooLong
from hypic.types import Prompt
from tests.integrations.llm_paths import PROMPT, collect, llm_on, run
from tests.integrations.scripted import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def test_streams_are_true_and_call_back_per_token(engine: ScriptedEngine) -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []
            self.ends: list[Any] = []

        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            self.tokens.append(token)

        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            self.ends.append(response)

    handler = Tokens()
    stream = llm_on(engine).stream(PROMPT, {"callbacks": [handler]})
    assert next(stream) == "It"
    assert (engine.num_open, handler.tokens) == (1, ["It"])
    assert "".join(stream) == " was built in 1871."
    info = handler.ends[0].generations[0][0].generation_info
    assert info["hypic"]["reused_tokens"] == info["token_usage"]["cached_tokens"] == 60
    assert len(info["logprobs"]["content"]) == 5
    handler.tokens.clear()
    llm_on(engine, streaming=True).invoke(PROMPT, {"callbacks": [handler]})
    assert "".join(handler.tokens) == "It was built in 1871."


def test_a_broken_off_stream_is_closed(engine: ScriptedEngine) -> None:
    stream = llm_on(engine).stream(PROMPT)
    next(stream)
    stream.close()
    assert (engine.num_open, engine.num_finished) == (0, 0)


@pytest.mark.parametrize("how", ["ainvoke", "astream", "abatch"])
def test_a_cancelled_task_aborts_the_request(how: str) -> None:
    engine = ScriptedEngine(wait_s=30)

    async def cancel() -> None:
        llm = llm_on(engine)
        inputs: Any = [PROMPT] * 3 if how == "abatch" else PROMPT
        asked = collect(llm.astream(inputs)) if how == "astream" else getattr(llm, how)(inputs)
        task = asyncio.ensure_future(asked)
        while engine.num_open < (3 if how == "abatch" else 1):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.num_open == 0

    run(cancel())
    assert engine.num_finished == 0


def test_when_one_of_many_fails_the_others_stop() -> None:
    class OneFails(ScriptedEngine):
        async def astream(self, prompt: Any, sampling: Any = None, **options: Any) -> AsyncIterator[Any]:
            if prompt == Prompt(tail="bad"):
                raise PromptTooLong("9 tokens, 8 fit")
            async for piece in super().astream(prompt, sampling, **options):
                yield piece

    engine = OneFails(wait_s=30)
    with pytest.raises(ContextOverflowError, match="8 fit"):
        run(llm_on(engine).abatch(["good", "bad", "good"]))
    assert (engine.num_open, engine.num_finished) == (0, 0)


def test_batch_keeps_order(engine: ScriptedEngine) -> None:
    class Echo(ScriptedEngine):
        def _pieces(self, prompt: Any) -> Any:
            return iter(ScriptedEngine(answer=prompt.tail)._pieces(prompt))

    questions = [f"Question {n}?" for n in range(30)]
    llm = llm_on(Echo())
    assert llm.batch(questions) == run(llm.abatch(questions)) == questions
    assert llm.batch(questions, {"max_concurrency": 7}) == questions
    assert llm.batch(questions, stop=["x"]) == questions


def test_errors_return_as_values_where_asked(engine: ScriptedEngine) -> None:
    engine.error = PromptTooLong("9 tokens, 8 fit")
    (error,) = llm_on(engine).batch(["x"], return_exceptions=True)
    assert isinstance(error, ContextOverflowError)

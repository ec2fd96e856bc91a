"""``LLM`` broken off, shared by threads and event loops, closed and forked: nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hypic import LLM, Prompt, Segment
from hypic.errors import PromptError, PromptTooLong, RequestAborted, WorkerLost
from tests.llm.asking import SETTINGS, asked, assert_idle, passage, sampling

# -- breaking off ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_a_stream_that_is_broken_off_frees_all_it_holds(how: str, llm: LLM) -> None:
    stream = llm.stream(asked(), sampling(1500))
    for number, _ in enumerate(stream):
        if number == 3:
            break
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    assert_idle(llm)


def test_a_stream_that_nobody_reads_frees_all_it_holds(llm: LLM) -> None:
    stream = llm.stream(asked(), sampling(1500))
    del stream
    gc.collect()
    assert_idle(llm)


def test_one_bad_prompt_in_a_list_ends_the_others(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate([asked(), Prompt([], passage(1, 2000)), asked(1)], sampling(60))
    gc.collect()
    assert_idle(llm)


def test_cancelling_frees_all_that_is_held(llm: LLM) -> None:
    async def broken_off() -> int:
        count = 0
        async for _ in llm.astream(asked(), sampling(1500)):
            count += 1
            if count == 3:
                break
        task = asyncio.create_task(llm.agenerate(asked(1), sampling(1500)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.agenerate(asked(2), sampling(1500)), 0.1)
        return count

    assert asyncio.run(broken_off()) == 3
    assert_idle(llm)


def test_errors_reach_async_callers(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        asyncio.run(llm.agenerate(Prompt([], passage(1, 2000)), sampling()))
    with pytest.raises(PromptError):
        asyncio.run(llm.agenerate([], sampling()))
    assert_idle(llm)


# -- at once ---------------------------------------------------------------------------------------------------------


def test_eight_threads_share_one_llm(llm: LLM) -> None:
    prompts = [asked(n, n % 3, n % 5) for n in range(24)]
    expected = [one.text for one in llm.generate(prompts, sampling(8))]
    llm.forget(everything=True)
    gate = threading.Barrier(8)

    def work(thread: int) -> list[str]:
        gate.wait(timeout=30)
        texts = []
        for number, prompt in list(enumerate(prompts))[thread::8]:
            if number % 3 == 0:
                texts.append("".join(piece.text for piece in llm.stream(prompt, sampling(8))))
            else:
                texts.append(llm.generate(prompt, sampling(8)).text)
            llm.stats()
        next(llm.stream(prompts[thread], sampling(500)))  # and one that is broken off
        return texts

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(8)))
    assert found == [expected[thread::8] for thread in range(8)]
    gc.collect()
    assert_idle(llm)


def test_an_event_loop_shares_one_llm(llm: LLM) -> None:
    prompts = [asked(n, n % 3, n % 5) for n in range(12)]
    expected = [one.text for one in llm.generate(prompts, sampling(8))]

    async def streamed(prompt: Prompt) -> str:
        return "".join([piece.text async for piece in llm.astream(prompt, sampling(8))])

    async def gathered() -> list[str]:
        answers = asyncio.gather(*[llm.agenerate(prompt, sampling(8)) for prompt in prompts[:6]])
        streams = asyncio.gather(*[streamed(prompt) for prompt in prompts[6:]])
        return [*[one.text for one in await answers], *await streams]

    assert asyncio.run(gathered()) == expected
    assert asyncio.run(gathered()) == expected, "another event loop may follow the first"
    assert_idle(llm)


# -- life ------------------------------------------------------------------------------------------------------------


def test_closing_ends_what_runs_and_more_calls_do_nothing(folder: Path) -> None:
    llm = LLM(str(folder), **SETTINGS)
    stream = llm.stream(asked(), sampling(1800))
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RequestAborted, match="closed"):
        list(stream)
    for call in (lambda: llm.generate(asked()), llm.stats, lambda: llm.warm([Segment(passage(1))])):
        with pytest.raises(RequestAborted, match="closed"):
            call()
    with pytest.raises(RequestAborted, match="closed"):
        llm.forget(everything=True)
    with pytest.raises(RequestAborted, match="closed"):
        asyncio.run(llm.agenerate(asked()))


def test_leaving_a_with_closes(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        assert llm.generate("Who?", sampling()).text is not None
    with pytest.raises(RequestAborted):
        llm.generate("Who?")
    names = [thread.name for thread in threading.enumerate() if not thread.daemon]
    assert "hypic-engine" not in names


def test_closing_from_several_threads_at_once(folder: Path) -> None:
    llm = LLM(str(folder), **SETTINGS)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: llm.close(), range(4)))
    with pytest.raises(RequestAborted):
        llm.stats()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_a_fork_raises(shared: LLM) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            shared.stats()
        except WorkerLost as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared.stats()["requests"]["running"] == 0

"""``LLM``, from text to text: answers, streams, conversations, threads and event loops on one tiny checkpoint."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Completion, Policy, Prompt, SamplingParams, Segment
from hypic.errors import ConfigError, PromptError, PromptTooLong, RequestAborted, WorkerLost
from hypic.kept import Forgotten
from hypic.types import TextEngine
from tests.checkpoints import add_tokenizer, minimax, qwen

REUSE = Policy(min_segment_tokens=0)
WORDS = "the river runs past an old mill where three brothers grind rye and oats for the town below".split()
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048}
SETTINGS |= {"max_running": 16, "policy": REUSE}


def passage(seed: int, num_words: int = 30) -> str:
    return f"Passage {seed}: " + " ".join(WORDS[(seed * 7 + i * (seed + 1)) % len(WORDS)] for i in range(num_words))


def asked(number: int = 0, *seeds: int) -> Prompt:
    segments = [Segment("You answer briefly.", kind="system"), *[Segment(passage(s)) for s in seeds or (1, 2, 3)]]
    return Prompt(segments, f"Question {number}: who grinds rye?")


def sampling(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("llm"))
    add_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as made:
        yield made


def assert_idle(llm: LLM) -> None:
    """Nothing runs or is pinned, and without the cache all memory is free; aborts may still be on their way."""
    deadline = time.monotonic() + 20
    while any(llm.stats()["requests"].values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.stats()["requests"] == {"waiting": 0, "running": 0}
    assert llm.stats()["store"]["num_pinned"] == 0
    llm.forget(everything=True)
    stats = llm.stats()
    assert stats["pool"]["free"] == stats["pool"]["capacity"] and stats["store"]["held_bytes"] == 0


# -- asking ----------------------------------------------------------------------------------------------------------


def test_generate_answers_with_usage_and_report(llm: LLM) -> None:
    cold, warm = llm.generate(asked(), sampling()), llm.generate(asked(), sampling())
    assert cold.text == warm.text and len(cold.token_ids) == 6 and cold.finish_reason == "length"
    assert cold.text == llm.tokenizer.decode(cold.token_ids)
    assert cold.report is not None and warm.report is not None and cold.usage is not None and warm.usage is not None
    assert [s.outcome for s in cold.report.segments] == ["encoded"] * 3
    assert [s.outcome for s in warm.report.segments] == ["hit"] * 3 and warm.report.num_hits == 3
    assert warm.report.computed_tokens < cold.report.computed_tokens / 3
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens == cold.report.prompt_tokens
    assert warm.usage.completion_tokens == 6 and warm.usage.cached_tokens == warm.report.reused_tokens > 0
    assert cold.report.fingerprint == llm.fingerprint and cold.report.policy == REUSE
    assert_idle(llm)


def test_a_list_of_prompts_equals_them_one_at_a_time(shared: LLM) -> None:
    prompts: list[Any] = [asked(n, n, n + 1) for n in range(5)]
    prompts += ["Just a question.", [{"role": "user", "content": "Hello"}]]
    together = shared.generate(prompts, sampling())
    assert [one.text for one in together] == [shared.generate(prompt, sampling()).text for prompt in prompts]
    assert len({one.text for one in together}) > 1


def test_a_list_encodes_shared_segments_once(llm: LLM) -> None:
    reports = [one.report for one in llm.generate([asked(n) for n in range(4)], sampling())]
    outcomes = [[s.outcome for s in report.segments] for report in reports if report is not None]
    assert outcomes == [["encoded"] * 3] + [["hit"] * 3] * 3


def test_a_stream_joined_is_the_answer(shared: LLM) -> None:
    pieces = list(shared.stream(asked(), sampling(12)))
    whole = shared.generate(asked(), sampling(12))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == list(whole.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]
    assert all(piece.report is None and piece.usage is None for piece in pieces[:-1])
    assert Completion.join(pieces).report is not None


def test_an_llm_is_a_text_engine(shared: LLM) -> None:
    assert isinstance(shared, TextEngine)
    assert len(shared.registry) == 0 and shared.registry.split("nothing known") == ["nothing known"]


def test_chat_is_generate_for_messages(shared: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    assert shared.chat(messages, sampling()).text == shared.generate(messages, sampling()).text


def test_tokens_of_a_text(shared: LLM) -> None:
    ids = shared.tokenize("the mill")
    assert shared.count_tokens("the mill") == len(ids) and shared.tokenizer.decode(ids) == "the mill"


def test_both_families_answer(tmp_path: Path) -> None:
    add_tokenizer(minimax(tmp_path))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        cold, warm = llm.generate(asked(), sampling()), llm.generate(asked(), sampling())
        assert cold.text == warm.text and warm.report is not None and warm.report.num_hits == 3
        assert_idle(llm)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_empty_and_white_space_segments_leave_no_entry(llm: LLM) -> None:
    prompt = Prompt([Segment(""), Segment(passage(1)), Segment("  \n "), Segment("")], "Who?")
    report = llm.generate(prompt, sampling()).report
    assert report is not None and [s.outcome for s in report.segments] == ["encoded"]
    plain = llm.generate(Prompt([Segment(passage(1))], "Who?"), sampling()).report
    assert plain is not None and plain.num_hits == 1
    only_empty = llm.generate(Prompt([Segment(""), Segment(" ")], "Who?"), sampling()).report
    assert only_empty is not None and only_empty.segments == ()
    assert_idle(llm)


def test_white_space_around_a_segment_is_no_part_of_it(llm: LLM) -> None:
    llm.generate(Prompt([Segment(passage(1))], "Who?"), sampling())
    report = llm.generate(Prompt([Segment(f"\n\n{passage(1)} \n")], "Who?"), sampling()).report
    assert report is not None and report.num_hits == 1


@pytest.mark.parametrize("prompt", [[], "x\ud800", 7, [7], Prompt([], "", template=False)])
def test_prompts_that_cannot_be_read(prompt: Any, shared: LLM) -> None:
    with pytest.raises(PromptError) as caught:
        shared.generate(prompt, sampling())
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_segment_longer_than_the_context_is_refused_before_anything_is_stored(llm: LLM) -> None:
    before = llm.stats()
    for prompt in (Prompt([Segment(passage(1, 2000))], "Who?"), Prompt([], passage(1, 2000))):
        with pytest.raises(PromptTooLong, match="2048"):
            llm.generate(prompt, sampling())
    with pytest.raises(PromptTooLong, match="2048"):
        llm.warm([Segment(passage(1, 2000))])
    with pytest.raises(PromptTooLong):
        llm.generate([asked(), Prompt([], passage(1, 2000))], sampling())
    assert llm.stats()["store"]["held_bytes"] >= before["store"]["held_bytes"] == 0
    assert_idle(llm)


def test_answers_end_where_the_context_does(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS | {"max_context": 128}) as llm:
        answer = llm.generate("Who?", sampling(500))
        assert answer.usage is not None and answer.finish_reason == "length"
        assert answer.usage.total_tokens == 128
        assert_idle(llm)


# -- sampling --------------------------------------------------------------------------------------------------------


def test_stop_strings_end_the_text_before_themselves(shared: LLM) -> None:
    whole = shared.generate(asked(), sampling(30)).text
    stop = whole[8:10]
    answer = shared.generate(asked(), sampling(30, stop=[stop]))
    assert answer.finish_reason == "stop" and answer.text == whole[: whole.index(stop)]
    streamed = "".join(piece.text for piece in shared.stream(asked(), sampling(30, stop=[stop])))
    assert streamed == answer.text


def test_the_end_token_ends_an_answer_unless_it_is_ignored(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        ids = llm.generate(asked(), sampling(9)).token_ids
        llm._loop.call(lambda engine: object.__setattr__(engine.vocabulary, "eos_ids", frozenset({ids[4]})))
        first = ids.index(ids[4])
        ended = llm.generate(asked(), SamplingParams(max_tokens=9))
        assert ended.finish_reason == "stop" and ended.token_ids == ids[: first + 1]
        assert ended.text == llm.tokenizer.decode(ids[:first])
        assert llm.generate(asked(), sampling(9)).token_ids == ids


def test_logprobs_are_those_of_the_softmax(shared: LLM) -> None:
    answer = shared.generate(asked(), sampling(4, logprobs=100))
    plain = shared.generate(asked(), sampling(4))
    assert answer.token_ids == plain.token_ids and plain.logprobs == ()
    assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    for one in answer.logprobs:
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True) and one.top[0] == (one.token_id, one.logprob)
        assert 0.5 < sum(math.exp(value) for value in values) <= 1.0 + 1e-9


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(shared: LLM) -> None:
    hot = sampling(12, temperature=1.5, seed=7)
    alone = shared.generate(asked(), hot)
    beside = shared.generate([asked(5, 6), asked(), asked(7, 8)], hot)
    other = shared.generate(asked(), sampling(12, temperature=1.5, seed=8))
    assert alone.token_ids == beside[1].token_ids != other.token_ids
    assert alone.token_ids != shared.generate(asked(), sampling(12)).token_ids


@pytest.mark.parametrize("settings", [{"colour": 1}, {"dtype": "int4"}, {"max_running": 0}, {"seam": -1}])
def test_settings_that_cannot_be_right(settings: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), **settings)
    assert str(next(iter(settings.values()))) in str(caught.value) or "colour" in str(caught.value)


# -- segments --------------------------------------------------------------------------------------------------------


def test_warming_encodes_and_tells_its_progress(llm: LLM) -> None:
    heard: list[tuple[int, int]] = []
    segments = [Segment(passage(n), name=str(n)) for n in range(40)]
    reports = llm.warm(segments, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(n + 1, 40) for n in range(40)]
    assert [report.segments[0].outcome for report in reports] == ["encoded"] * 40
    assert [report.segments[0].name for report in reports] == [str(n) for n in range(40)]
    again = llm.warm(segments[:3])
    assert [report.segments[0].outcome for report in again] == ["hit"] * 3
    answer = llm.generate(asked(0, 1, 2, 3), sampling()).report
    assert answer is not None and answer.num_hits == 3
    assert_idle(llm)


def test_warming_nothing_and_short_texts(llm: LLM) -> None:
    assert llm.warm([]) == []
    reports = llm.warm([Segment("short")], policy=Policy())
    assert [s.outcome for s in reports[0].segments] == ["live"]
    assert_idle(llm)


def test_forgetting_by_label(llm: LLM) -> None:
    labels: list[dict[str, str]] = [{"source": "a"}, {"source": "a", "name": "n"}, {"source": "b"}, {"namespace": "t"}]
    llm.warm([Segment(passage(n), **label) for n, label in enumerate(labels)])  # type: ignore[arg-type]
    assert llm.forget(source="nobody") == Forgotten()
    assert llm.forget(source="a", name="n") == Forgotten(1) and llm.forget(source="a").num_entries == 1
    assert llm.forget(namespace="t").num_entries == 1 and llm.forget(name="n").num_entries == 0
    assert llm.forget(everything=True).num_entries == 1 and llm.stats()["store"]["num_entries"] == 0


def test_stats_count(llm: LLM) -> None:
    llm.generate([asked(n) for n in range(3)], sampling())
    stats = llm.stats()
    assert stats["store"]["stored"] >= 3 and stats["store"]["hits"] >= 0
    assert stats["weight_bytes"] > 0 and stats["max_context"] == 2048
    assert stats["pool"]["num_bytes"] <= 64 * 2**20


def test_namespaces_do_not_share_entries(llm: LLM) -> None:
    def outcome(namespace: str | None) -> tuple[str, str]:
        report = llm.generate(Prompt([Segment(passage(1), namespace=namespace)], "Who?"), sampling()).report
        assert report is not None
        return report.segments[0].outcome, report.segments[0].reason

    assert outcome("a") == ("encoded", "first time") and outcome("b") == ("encoded", "other namespace")
    assert outcome("a") == ("hit", "") and outcome(None) == ("encoded", "other namespace")


# -- conversations ---------------------------------------------------------------------------------------------------

TURNS = ["Tell me about the mill, and the river, and all of the town below it.", "And the oats?", "Who are they?"]


def talk(llm: LLM, policy: Policy, documents: tuple[str, ...] = ()) -> list[Completion]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are the miller, and you answer briefly."}]
    answers = []
    for turn, text in enumerate(TURNS):
        blocks = [{"type": "text", "text": document} for document in documents] if turn == 0 else []
        messages.append({"role": "user", "content": [*blocks, {"type": "text", "text": text}]})
        answers.append(llm.chat(messages, sampling(8), policy=policy))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def test_a_conversation_without_segments_equals_full_recompute(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm, LLM(str(folder), **SETTINGS) as other:
        continued, scratch = talk(llm, REUSE), talk(other, Policy(reuse="none"))
        assert [answer.token_ids for answer in continued] == [answer.token_ids for answer in scratch]
        for answer, full in list(zip(continued, scratch, strict=True))[1:]:
            assert answer.report is not None and full.report is not None
            assert full.report.computed_tokens == full.report.prompt_tokens
            assert answer.report.computed_tokens < full.report.prompt_tokens / 2
            assert answer.report.computed_tokens + answer.report.reused_tokens == answer.report.prompt_tokens
        assert_idle(llm)


def test_a_conversation_over_documents_continues_from_snapshots(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm, LLM(str(folder), **SETTINGS) as other:
        documents = (passage(1), passage(2))
        continued = talk(llm, REUSE, documents)
        for report in [answer.report for answer in continued[1:]]:
            assert report is not None and report.computed_tokens < report.prompt_tokens / 4
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are the miller, and you answer briefly."}]
        for turn, text in enumerate(TURNS):
            blocks = [{"type": "text", "text": document} for document in documents] if turn == 0 else []
            messages.append({"role": "user", "content": [*blocks, {"type": "text", "text": text}]})
            # The other engine has nothing cached, but remembers which tokens its answers were.
            other.forget(everything=True)
            assert other.chat(messages, sampling(8)).token_ids == continued[turn].token_ids
            messages.append({"role": "assistant", "content": continued[turn].text})


def test_after_an_end_token_the_next_turn_computes_only_what_is_new(llm: LLM) -> None:
    hot = sampling(60, temperature=1.5, seed=3)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about the mill."}]
    ids = llm.chat(messages, hot).token_ids
    end = next(i for n, i in enumerate(ids) if ids.index(i) == n >= 35)
    llm.tokenizer.eos_ids = frozenset({end})
    llm._loop.call(lambda engine: object.__setattr__(engine.vocabulary, "eos_ids", frozenset({end})))
    llm.forget(everything=True)
    first = llm.chat(messages, SamplingParams(max_tokens=60, temperature=1.5, seed=3))
    assert first.token_ids == ids[: ids.index(end) + 1] and first.usage is not None
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the oats?"}]
    report = llm.chat(messages, sampling(2)).report
    assert report is not None and report.notes == ()
    known = first.usage.prompt_tokens + len(first.token_ids) - 1
    assert report.reused_tokens == known and report.computed_tokens == report.prompt_tokens - known


def test_an_answer_that_was_not_generated_here_is_noted(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I was told so."}]
    report = llm.chat([*messages, {"role": "user", "content": "Really?"}], sampling()).report
    assert report is not None and len(report.notes) == 1 and "1 assistant turn" in report.notes[0]
    assert llm.chat([{"role": "user", "content": "Hello"}], sampling()).report.notes == ()  # type: ignore[union-attr]


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

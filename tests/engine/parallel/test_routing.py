"""Any worker answers whole requests; one that is lost while it answers costs a pause."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Prompt, SamplingParams, Segment
from hypic.engine.sizing import Need
from tests.checkpoints import add_tokenizer, qwen
from tests.engine.parallel.running import Running, cold_prompt, until


@pytest.fixture(scope="module")
def engine(shared: Running) -> Running:
    return shared


def routed(engine: Running) -> dict[int, int]:
    assert engine.started.router is not None
    return dict(engine.started.router.num_routed())


def test_requests_are_spread_and_answered_as_by_one(engine: Running, alone: Running) -> None:
    prompts = [cold_prompt(seed, count=3) for seed in range(1, 7)]
    expected = [alone.ask(prompt, max_tokens=24)[0] for prompt in prompts]
    ids = [engine.submit(prompt, max_tokens=24) for prompt in prompts]
    assert routed(engine) == {0: 2, 1: 2, 2: 2}
    found = [engine.answer(id) for id in ids]
    assert [ids for ids, _ in found] == expected
    assert all(report.prompt_tokens == len([i for p in prompt for i in p.ids])
               for prompt, (_, report) in zip(prompts, found, strict=True))  # fmt: skip
    assert routed(engine) == {} and engine.leaked() == Need()


def test_a_worker_that_combines_asks_the_others(engine: Running, alone: Running) -> None:
    """While worker 0 is busy, another combines, and has the rest encoded by whoever is free."""
    until(lambda: engine.workers.peers.ready() == 2)
    prompts = [cold_prompt(seed, count=10, num_tokens=200) for seed in range(31, 34)]
    ids = [engine.submit(prompt, max_tokens=4) for prompt in prompts]
    reports = [engine.answer(id)[1] for id in ids]
    assert [engine.ask(prompt, max_tokens=4)[0] for prompt in prompts] == [
        alone.ask(p, max_tokens=4)[0] for p in prompts
    ]
    assert any("by worker" in segment.reason for segment in reports[0].segments)


def test_a_worker_is_killed_while_it_answers(engine: Running, alone: Running) -> None:
    until(lambda: engine.workers.peers.ready() == 2)
    prompts = [cold_prompt(seed, count=2) for seed in range(11, 14)]
    expected = [alone.ask(prompt, max_tokens=200)[0] for prompt in prompts]
    ids = [engine.submit(prompt, max_tokens=200) for prompt in prompts]
    victims = engine.workers.supervisor.hellos
    assert {1, 2} <= routed(engine).keys()
    assert engine.started.router is not None
    until(lambda: all(len(r.tokens) > 3 for r in engine.started.router._routed.values()))  # type: ignore[union-attr]
    for hello in victims:
        os.kill(hello.pid, signal.SIGKILL)
    assert [engine.answer(id)[0] for id in ids] == expected
    assert engine.leaked() == Need()


def test_sampling_goes_on_where_it_stopped(engine: Running, alone: Running) -> None:
    """What was generated elsewhere is as if it had been generated here, random numbers included."""
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    whole = _sampled(alone, SamplingParams(**sampling), ())
    assert _sampled(alone, SamplingParams(**sampling), whole[:5]) == whole[5:]
    assert len(set(whole)) > 3


def _sampled(engine: Running, sampling: SamplingParams, generated: tuple[int, ...]) -> tuple[int, ...]:
    import queue

    from hypic.engine.task import Task

    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    name = f"sampled-{len(generated)}"
    engine.started.loop.submit(Task(name, cold_prompt(9), sampling, generated=generated), inbox.put)
    engine._inboxes[name] = inbox
    return engine.answer(name)[0]


def test_a_request_is_aborted_wherever_it_is(engine: Running) -> None:
    until(lambda: engine.workers.peers.ready() == 2, 120)
    ids = [engine.submit(cold_prompt(seed, count=2), max_tokens=4000) for seed in range(21, 24)]
    assert len(routed(engine)) == 3
    for id in ids:
        engine.driver.abort(id)
    assert routed(engine) == {}
    assert len(engine.ask(cold_prompt(24))[0]) == 8 and engine.leaked() == Need()


def test_an_llm_with_workers(tmp_path: Path) -> None:
    """The public surface: the same text, a report, statistics, and forgetting everywhere."""
    folder = qwen(tmp_path / "model")
    add_tokenizer(folder)
    segments = [Segment(f"passage {n} says " + "abc def " * (20 + n), name=f"p{n}") for n in range(6)]
    prompt = Prompt(segments, "What do they say?")
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 4096}
    sampling = SamplingParams(max_tokens=12, stop=["zzz"], logprobs=1)
    with LLM(str(folder), **settings) as llm:
        expected = llm.generate([prompt] * 3, sampling)
    with LLM(str(folder), workers=2, **settings) as llm:
        assert llm._workers is not None and llm._workers.wait_usable(60)
        found = llm.generate([prompt] * 3, sampling)
        assert [f.text for f in found] == [e.text for e in expected]
        assert [[p.token_id for p in f.logprobs] for f in found] == [[p.token_id for p in e.logprobs] for e in expected]
        assert all(f.report is not None and len(f.report.segments) == 6 for f in found)
        statistics = llm.stats()["workers"]
        assert statistics["usable"] == 1 and statistics["ready"][0]["rank"] == 1
        assert llm.forget(name="p3").num_entries >= 2  # here and there
        again = llm.generate(prompt, sampling)
        assert again.text == expected[0].text
        assert again.report is not None and again.report.segments[3].outcome == "encoded"

"""The engine's thread: it answers, aborts, closes, and tells everyone when it dies."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

import pytest

from hypic.engine.loop import EngineLoop, _Call
from hypic.engine.task import Emission, Task
from hypic.errors import HypicError, RequestAborted, WorkerLost
from hypic.types import SamplingParams
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments

Make = Callable[..., Bench]


class Inbox:
    """What a sink heard."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Emission] = queue.SimpleQueue()

    def __call__(self, emission: Emission) -> None:
        self.heard.put(emission)

    def next(self) -> Emission:
        return self.heard.get(timeout=30)

    def last(self) -> Emission:
        emission = self.next()
        while not emission.is_last:
            emission = self.next()
        return emission


def plain(bench: Make, **settings: Any) -> tuple[Bench, EngineLoop]:
    """An engine without the notes that the harness takes, and its thread."""
    made = bench("qwen", "float32", **settings)
    del made.engine.settle  # type: ignore[attr-defined]
    return made, EngineLoop(made.engine)


def task(id: str, max_tokens: int = 5, **options: Any) -> Task:
    return Task(id, few_segments(), SamplingParams(max_tokens=max_tokens), POLICY, **options)


def test_a_loop_answers_aborts_and_closes(bench: Make) -> None:
    made, loop = plain(bench)
    done, endless = Inbox(), Inbox()
    loop.submit(task("a"), done)
    loop.submit(task("b", max_tokens=4000), endless)
    assert done.last().is_last
    endless.next()
    loop.abort("b")
    assert loop.call(lambda engine: engine.scheduler.running) == {}
    loop.call(lambda engine: made.assert_back_to_start())
    loop.submit(task("c", max_tokens=4000), endless)
    while endless.next().id != "c":
        pass
    loop.close()
    last = endless.last()
    assert isinstance(last.result, RequestAborted) and "closed" in str(last.result)
    loop.close()
    with pytest.raises(RequestAborted, match="closed"):
        loop.submit(task("d"), done)
    with pytest.raises(RequestAborted, match="closed"):
        loop.call(lambda engine: None)
    loop.abort("c")
    made.assert_back_to_start()


def test_errors_of_a_request_reach_its_own_sink(bench: Make) -> None:
    _, loop = plain(bench, max_context=50)
    inbox = Inbox()
    loop.submit(task("long"), inbox)
    assert isinstance(inbox.last().result, HypicError)

    def refuse(engine: Any) -> None:
        raise RequestAborted("not now.")

    with pytest.raises(RequestAborted, match="not now"):
        loop.call(refuse)
    loop.close()


def test_who_calls_is_told_of_a_device_that_is_lost(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows where the device is waited for, between two steps and at the end."""
    made, loop = plain(bench)
    reply, closed = queue.SimpleQueue[object](), list[str]()

    def lost() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(made.engine, "rest", lost)
    monkeypatch.setattr(made.engine.tiers, "close", lambda: closed.append("tiers"))
    loop._send(_Call(lambda engine: "never run", reply))
    assert "the device is gone" in str(reply.get(timeout=30))
    loop.close()
    assert closed == ["tiers"] and loop._engine is None


def test_what_fails_and_nobody_waits_for_is_logged(bench: Make, caplog: pytest.LogCaptureFixture) -> None:
    _, loop = plain(bench)

    def fails(engine: Any) -> None:
        raise ValueError("that cannot be")

    with caplog.at_level("ERROR", "hypic"):
        loop.post(fails)
        assert loop.call(lambda engine: "goes on") == "goes on"
    assert "that cannot be" in caplog.text
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_everyone(bench: Make) -> None:
    made, loop = plain(bench)
    inbox = Inbox()

    def broken(batch: Any, pool: Any) -> Any:
        raise RuntimeError("the device is gone")

    made.watched.forward_final = broken  # type: ignore[method-assign]
    loop.submit(task("a"), inbox)
    last = inbox.last()
    assert isinstance(last.result, WorkerLost) and "the device is gone" in str(last.result)
    deadline = time.monotonic() + 30
    while loop._thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(WorkerLost, match="the device is gone"):
        loop.submit(task("b"), inbox)
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_tells_everyone_even_if_nothing_can_be_given_back(bench: Make) -> None:
    made, loop = plain(bench)
    inboxes, late, reply = [Inbox(), Inbox()], Inbox(), queue.SimpleQueue[object]()

    def broken(*_: Any) -> Any:
        loop.submit(task("late"), late)
        loop._inbox.put(_Call(lambda engine: "never run", reply))
        raise RuntimeError("the device is gone")

    def stuck(id: str) -> None:
        raise AssertionError("a page is freed twice")

    def busy(_: Any) -> None:
        for number, inbox in enumerate(inboxes):
            loop.submit(task(str(number)), inbox)

    made.watched.forward_final = broken  # type: ignore[method-assign]
    made.engine.abort = stuck  # type: ignore[method-assign]
    loop.call(busy)
    assert all(isinstance(inbox.last().result, WorkerLost) for inbox in (*inboxes, late))
    assert isinstance(reply.get(timeout=30), WorkerLost)
    loop.close()

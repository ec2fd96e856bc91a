"""What a step costs the host is counted: one read of the device, one buffer sent, nothing that grows with what is
cached; and what is done while the device is at a step."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hypic.engine import read_back
from hypic.engine import runner as running
from hypic.engine.chain import Chain
from hypic.engine.engine import Engine
from hypic.engine.layers.dense import Heads
from hypic.engine.loop import EngineLoop
from hypic.engine.read_back import Landing, ReadBack, packed
from hypic.engine.runner import Runner
from hypic.engine.sampling_state import SamplingState
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.errors import WorkerLost
from hypic.types import SamplingParams
from hypic_kernels.trust import LostDeviceError
from tests.engine.prompts import POLICY, few_segments, live, many_segments, seg

READS = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__")


class Counts:
    """Reads of tensors before a step's one wait, waits, and copies to the device; by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.is_launched = False

    def note(self, what: str) -> None:
        if self.is_launched:
            self.steps[-1][what] += 1


@contextmanager
def counted(runner: Runner, patch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Counts everything but what happens inside of a replay, which is the device's."""
    counts, launch, wait = Counts(), Runner.launch, ReadBack.wait
    assert runner.graphs is not None
    graphs = [recorded.graph for recorded in (*runner.graphs.decodes, *runner.graphs.warm)]

    def launching(self: Runner, chains: Sequence[Chain]) -> Any:
        counts.steps.append({"reads": 0, "waits": 0, "copies": 0})
        counts.is_launched = True
        return launch(self, chains)

    def waiting(self: ReadBack) -> Any:
        counts.note("waits")
        counts.is_launched = False
        return wait(self)

    def watched(name: str, what: str) -> None:
        sound = getattr(torch.Tensor, name)

        def noting(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not any(graph.is_running for graph in graphs):  # type: ignore[attr-defined]
                counts.note(what)
            return sound(self, *args, **options)

        within.setattr(torch.Tensor, name, noting)

    with patch.context() as within:
        within.setattr(Runner, "launch", launching)
        within.setattr(ReadBack, "wait", waiting)
        for name in READS:
            watched(name, "reads")
        watched("copy_", "copies")
        yield counts


def drive(engine: Engine, id: str, num_segments: int, num_tokens: int, **sampling: Any) -> None:
    prompt = [live(9, 1), *(seg(40, 10 + n) for n in range(num_segments)), live(12, 2)]
    engine.add(Task(id, prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling), POLICY))
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 1}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("num_segments", [2, 9])
def test_a_step_reads_once_and_sends_once(
    num_segments: int, sampling: dict[str, Any], load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("qwen", "on")
    engine = Engine(runner, Vocabulary(str), 8, 8192, None)
    drive(engine, "cold", num_segments, 1)
    engine.store.remove(next(entry.key for entry in engine.store if entry.is_snapshot))
    monkeypatch.setattr(SamplingState, "uniform", lambda self: 0.5)  # it is the host's own, but reads a tensor as well
    with counted(runner, monkeypatch) as counts:
        drive(engine, "warm", num_segments, 6, **sampling)
    assert len(counts.steps) == 6, "one step for the prompt and one for every further token"
    assert all(step["waits"] == 1 and step["reads"] == 0 for step in counts.steps)
    # The buffer of a step's numbers, and before the first one the cached token slots.
    assert [step["copies"] for step in counts.steps] == [2, 1, 1, 1, 1, 1]


CHOOSING = ("argmax", "gather", "isfinite")


@pytest.mark.parametrize(("sampling", "is_plain"), [({}, True), ({"presence_penalty": 0.5}, False)])
def test_a_recorded_step_has_chosen_the_likeliest_tokens_itself(
    sampling: dict[str, Any], is_plain: bool, load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing follows a replay but one copy, unless a token is chosen in another way; tokens are those that are
    chosen without."""
    runner = load("qwen", "on")
    assert runner.graphs is not None
    graphs = [recorded.graph for recorded in (*runner.graphs.decodes, *runner.graphs.warm)]
    engine, chosen = Engine(runner, Vocabulary(str), 8, 8192, None), []
    drive(engine, "cold", 2, 4, **sampling)

    def counting(name: str) -> None:
        sound = getattr(torch.Tensor, name)

        def noting(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            if not any(graph.is_running for graph in graphs):  # type: ignore[attr-defined]
                chosen.append(name)
            return sound(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, noting)

    for name in CHOOSING:
        counting(name)
    num_replays = runner.graphs.num_replays
    drive(engine, "warm", 2, 4, **sampling)
    assert runner.graphs.num_replays == num_replays + 4
    assert (not chosen) == is_plain


def test_places_are_taken_in_turn_from_the_first_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        read_back, "_place", lambda num_bytes, sleeps: (torch.empty(2 * num_bytes, dtype=torch.uint8), object())
    )
    landing = Landing()
    taken = [landing.next(num_bytes) for num_bytes in (8, 8, 16, 8, 99, 8)]
    places = [host.data_ptr() for host, _ in taken]
    assert places[0] != places[1] and places[2:4] == places[:2] and places[4] not in places[:4]
    assert places[5] == places[3] and [len(host) for host, _ in taken] == [8, 8, 16, 8, 99, 8]
    assert taken[0][1] is taken[2][1] is not taken[1][1]


@pytest.mark.gpu
def test_memory_that_reads_arrive_in_is_used_in_turn() -> None:
    landing, numbers = Landing(), torch.arange(8, device="cuda")
    reads = [ReadBack([numbers + n], landing) for n in range(Landing.NUM_READS)]
    assert [read.wait()[0].tolist() for read in reads] == [list(range(n, n + 8)) for n in range(len(reads))]
    known = reads[0].wait()[0].data_ptr()
    again = ReadBack([numbers[:3]], landing, together=packed([numbers[:3] * 2]))
    assert again.wait()[0].data_ptr() == known and again.wait()[0].tolist() == [0, 2, 4]
    assert ReadBack([torch.arange(99, device="cuda")], landing).wait()[0].tolist() == list(range(99))


def test_requests_are_taken_in_while_the_device_is_at_a_step(load: Callable[[str, str], Runner]) -> None:
    """And what they are answered does not depend on it."""
    runner = load("qwen", "on")
    answers = []
    for is_early in (False, True):
        engine = Engine(runner, Vocabulary(str), 8, 8192, None)
        late, tokens = Task("late", few_segments(), SamplingParams(max_tokens=4, ignore_eos=True), POLICY), []

        def take_in(read_back: ReadBack, engine: Engine = engine, late: Task = late) -> None:
            engine.meanwhile = lambda read_back: None
            engine.add(late)

        engine.add(Task("first", many_segments(), SamplingParams(max_tokens=4, ignore_eos=True), POLICY))
        if is_early:
            engine.meanwhile = take_in
            tokens += engine.step()
        else:
            tokens += engine.step()
            engine.add(late)
        while engine.has_work:
            tokens += engine.step()
        answers.append([(emission.id, emission.result.token_ids) for emission in tokens])  # type: ignore[union-attr]
        engine.store.clear()
    assert answers[0] == answers[1] and {id for id, _ in answers[0]} == {"first", "late"}


@pytest.mark.parametrize("name", ["qwen", "qwen-linear"])
def test_the_thread_that_runs_steps_has_its_plans_before_it_is_ready(
    name: str, load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps them by thread, and those for inference apart; without kernels nothing is planned."""
    made = list[tuple[int, bool, int, int]]()

    def noted(heads: Sequence[Heads], most: int) -> None:
        made.append((threading.get_ident(), torch.is_inference_mode_enabled(), len(heads), most))

    monkeypatch.setattr(running, "plan_rows", noted)
    runner = load(name, "on")
    loop = EngineLoop(Engine(runner, Vocabulary(str), 8, 300, None))
    known = list(made)
    assert known == [(loop.call(lambda engine: threading.get_ident()), True, int(name == "qwen"), 300)]
    loop.close()
    EngineLoop(Engine(load(name, "off"), Vocabulary(str), 8, 300, None)).close()
    assert made == known


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_be_prepared_is_told(
    load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(heads: Sequence[Heads], most: int) -> None:
        raise LostDeviceError("nothing can run there any more")

    monkeypatch.setattr(running, "plan_rows", fails)
    loop = EngineLoop(Engine(load("qwen", "on"), Vocabulary(str), 8, 300, None))
    with pytest.raises(WorkerLost, match="nothing can run there any more"):
        loop.call(lambda engine: None)
    loop.close()


def test_a_loop_that_is_broken_off_while_it_prepares_leaves_no_thread(
    load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupts(heads: Sequence[Heads], most: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        time.sleep(0.2)  # the other thread has come to wait by then
        signal.pthread_kill(main, signal.SIGINT)
        is_broken_off.wait(10)

    engine, is_broken_off = Engine(load("qwen", "on"), Vocabulary(str), 8, 300, None), threading.Event()
    monkeypatch.setattr(running, "plan_rows", interrupts)
    before, close, handler = set(threading.enumerate()), EngineLoop.close, signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(EngineLoop, "close", lambda self: (is_broken_off.set(), close(self)))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in a shell's background ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            EngineLoop(engine)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert set(threading.enumerate()) <= before


def test_what_is_no_request_waits_for_the_end_of_a_step(
    load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does what came after it: a request that is called off is so even if both came during one step."""
    runner, launch = load("qwen", "on"), Runner.launch
    is_at_it, may_go_on = threading.Event(), threading.Event()

    def held_up(self: Runner, chains: Sequence[Chain]) -> Any:
        is_at_it.set()
        assert may_go_on.wait(timeout=30)
        return launch(self, chains)

    monkeypatch.setattr(Runner, "launch", held_up)
    monkeypatch.setattr(ReadBack, "has_come", False)
    loop = EngineLoop(Engine(runner, Vocabulary(str), 8, 8192, None))
    heard: dict[str, queue.SimpleQueue[Emission]] = {id: queue.SimpleQueue() for id in ("a", "b", "c")}

    def submit(id: str) -> None:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        loop.submit(Task(id, few_segments(), sampling, POLICY), heard[id].put)

    submit("a")
    assert is_at_it.wait(timeout=30)
    submit("b")
    loop.abort("b")
    submit("c")
    may_go_on.set()
    for id in ("a", "c"):
        while not heard[id].get(timeout=30).is_last:
            pass
    assert loop.call(lambda engine: (engine.scheduler.running, list(engine.scheduler.waiting))) == ({}, [])
    assert heard["b"].empty()
    loop.close()

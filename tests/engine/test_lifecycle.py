"""From waiting to finished or broken off: whatever the order of events, counters return to where they started."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hypic.engine import scheduler
from hypic.engine.loop import EngineLoop, _Call
from hypic.engine.plan import Piece
from hypic.engine.task import Emission, Task
from hypic.errors import HypicError, RequestAborted, StoreFull, WorkerLost
from hypic.types import Policy, SamplingParams, Segment
from tests.checkpoints import random_ids
from tests.engine.harness import POLICY, TOLERANCE, Answer, Bench, Checkpoints, few_segments, live, many_segments, seg

Make = Callable[..., Bench]


@pytest.fixture(autouse=True)
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)


# -- abort -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3, 5, 6, 7, 8, 9, 10, 16])
def test_abort_at_every_stage(num_steps: int, bench: Make, checkpoints: Checkpoints) -> None:
    """With sixteen tokens a step: five encode, four prefill, nine decode."""
    for name in ("qwen", "minimax"):
        engine = bench(name, max_step_tokens=16)
        doomed = engine.add([live(20, 1, ends=True), seg(40, 2), seg(40, 3), live(30, 4)], max_tokens=9)
        for _ in range(num_steps):
            engine.step()
        beside = engine.add([live(20, 1, ends=True), seg(40, 3), live(9, 5)], max_tokens=3)
        engine.step()
        engine.abort(doomed)
        engine.assert_sound()
        engine.abort(doomed)
        engine.run()
        pieces = [live(20, 1, ends=True), seg(40, 3), live(9, 5)]
        expected = checkpoints.expected(name, pieces, generated=beside.ids[:-1])
        assert beside.error_where_run(expected) < TOLERANCE["float64"]
        assert all(not piece.report for piece in doomed.pieces), "nothing comes after an abort"
        engine.assert_back_to_start()


def test_abort_goes_through_every_stage(bench: Make) -> None:
    """What the numbers of steps above are chosen for."""
    engine, stages = bench("qwen", max_step_tokens=16), []
    answer = engine.add([live(20, 1, ends=True), seg(40, 2), seg(40, 3), live(30, 4)], max_tokens=9)
    (request,) = engine.engine.scheduler.waiting
    while engine.engine.has_work:
        engine.step()
        kind = "decode" if request.is_decoding else "prefill" if request.done else "encode"
        stages.append(kind)
    assert stages == ["encode"] * 5 + ["prefill"] * 4 + ["decode"] * 9
    assert len(answer.ids) == 9


def test_abort_while_waiting_holds_up_nobody(bench: Make) -> None:
    engine = bench("qwen", max_running=1)
    answers = [engine.add(few_segments(), max_tokens=4) for _ in range(3)]
    engine.step()
    assert len(engine.engine.scheduler.waiting) == 2
    engine.abort(answers[1])
    engine.run()
    assert [len(answer.ids) for answer in answers] == [4, 0, 4]
    engine.assert_back_to_start()


def test_an_encode_goes_on_while_anyone_waits_for_it(bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=16)
    first, second, third = [engine.add([seg(60, 1), live(3, 10 + i)]) for i in range(3)]
    engine.step()
    engine.abort(first)
    engine.step()
    engine.abort(third)
    assert len(engine.engine.admission.encoding) == 1
    engine.run()
    assert second.outcomes == ["hit"] or second.outcomes == ["encoded"]
    assert engine.num_segments == 1
    again = engine.add([seg(61, 2), live(3, 10)])
    engine.step()
    engine.abort(again)
    assert not engine.engine.admission.encoding and engine.num_segments == 1
    engine.assert_back_to_start()


def test_abort_of_an_unknown_or_finished_request_does_nothing(bench: Make) -> None:
    engine = bench("qwen")
    answer = engine.ask(few_segments())
    engine.engine.abort("never heard of")
    engine.abort(answer)
    engine.assert_back_to_start()


# -- sharing ---------------------------------------------------------------------------------------------------------


def test_two_requests_encode_a_cold_segment_once(bench: Make, checkpoints: Checkpoints) -> None:
    for name in ("qwen", "minimax"):
        for max_step_tokens in (8192, 24):
            engine = bench(name, max_step_tokens=max_step_tokens)
            prompts = [[live(4 + i, i), seg(50, 7), live(5, 8)] for i in range(3)]
            answers = [engine.add(pieces, max_tokens=2) for pieces in prompts]
            engine.run()
            computed = [answer.report.computed_tokens for answer in answers]
            assert computed == [4 + 8 + 5 + 50, 5 + 8 + 5, 6 + 8 + 5]
            assert [answer.outcomes for answer in answers] == [["encoded"], ["hit"], ["hit"]]
            for pieces, answer in zip(prompts, answers, strict=True):
                expected = checkpoints.expected(name, pieces, generated=answer.ids[:-1])
                assert answer.error_to(expected) < TOLERANCE["float64"]
            engine.assert_back_to_start()


def test_computed_tokens_are_those_that_entered_the_model(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen", "minimax"):
        engine = bench(name, max_step_tokens=50)
        entered = []
        sound = engine.watched.forward_final

        def counting(batch: Any, pool: Any, sound: Any = sound, entered: list[int] = entered) -> Any:
            entered.append(batch.num_tokens)
            return sound(batch, pool)

        engine.watched.forward_final = counting  # type: ignore[method-assign]
        answers = [engine.add(pieces, max_tokens=5) for pieces in (many_segments(), few_segments(), many_segments())]
        engine.run()
        decoded = sum(len(answer.ids) - 1 for answer in answers)
        assert sum(answer.report.computed_tokens for answer in answers) == sum(entered) - decoded


def test_warming_encodes_and_answers_nothing(bench: Make) -> None:
    engine = bench("qwen", max_step_tokens=16)
    warm = [engine.add([seg(n, n), Piece((0,))], warm=True) for n in (40, 20, 8)]
    twice = engine.add([seg(40, 40), Piece((0,))], warm=True)
    engine.run()
    assert [answer.outcomes for answer in (*warm, twice)] == [["encoded"], ["encoded"], ["live"], ["hit"]]
    assert all(answer.is_over and not answer.ids and not answer.logits for answer in warm)
    assert warm[0].report.computed_tokens == 40 and engine.num_segments == 2
    assert engine.ask([live(3, 1), seg(40, 40), live(4, 2)]).outcomes == ["hit"]
    engine.assert_back_to_start()


# -- reasons ---------------------------------------------------------------------------------------------------------


def test_reasons_for_what_was_not_a_hit(bench: Make) -> None:
    engine = bench("qwen")
    tail = live(5, 99)

    def ask(piece: Piece, policy: Policy = POLICY) -> tuple[str, str]:
        answer = engine.ask([live(3, 98), piece, tail], policy)
        return answer.outcomes[0], answer.reasons[0]

    ids = tuple(random_ids(40, 1))
    first = Piece(ids, Segment("the text of the report", name="a.md"))
    assert ask(first) == ("encoded", "first time")
    assert ask(first) == ("hit", "")
    assert ask(first, POLICY.with_(seam=4)) == ("encoded", "other seam")
    assert ask(Piece(ids, Segment("the text of the report", namespace="t"))) == ("encoded", "other namespace")
    assert ask(first, POLICY.with_(deterministic=True)) == ("encoded", "other policy")
    engine.store.clear()
    assert ask(first) == ("encoded", "evicted")
    changed = Piece((*ids[:-1], 7), Segment("the text of the score: 0.83", name="a.md"))
    outcome, reason = ask(changed)
    assert outcome == "encoded" and reason.startswith("same name but other text from character 16")
    assert "score: 0.83" in reason
    assert ask(changed) == ("hit", "")
    assert ask(first, POLICY.with_(min_segment_tokens=41)) == ("live", "too short: 40 tokens, cached from 41")
    assert ask(first, POLICY.with_(seam=40)) == ("live", "too short: 40 tokens, cached from 41")
    assert ask(first, Policy(reuse="none")) == ("live", "cache off")
    assert ask(first, Policy(reuse="prefix")) == ("live", "prefix reuse only")
    assert engine.ask([live(3, 98), first]).reasons == ["no text after it"]
    renamed = Piece(ids, Segment("the text of the report", name="b.md", source="elsewhere"))
    assert ask(renamed) == ("hit", ""), "labels are no part of what is cached"
    engine.assert_back_to_start()


def test_reports_count_bytes_and_name_the_model(bench: Make) -> None:
    engine = bench("qwen")
    report = engine.ask([live(3, 1), seg(40, 2, name="n", source="s", kind="skill"), live(4, 3)]).report
    segment, layout = report.segments[0], engine.pool.layout
    assert (segment.kind, segment.name, segment.source, segment.tier) == ("skill", "n", "s", "device")
    assert segment.num_bytes == engine.entry(seg(40, 2)).num_bytes
    assert segment.num_bytes == 2 * engine.pool.page_bytes + layout.state_bytes + layout.transition_bytes
    assert report.fingerprint == engine.engine.runner.identity.fingerprint and report.policy == POLICY
    assert report.times_s["total"] >= report.times_s["ttft"] > 0
    assert report.prompt_tokens == 47


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_without_a_page_left_for_the_answer_fails_only_that_request(bench: Make) -> None:
    engine = bench("qwen", sizes=(3, 6, 3))
    answer = engine.add([live(30, 1)], max_tokens=100)
    engine.run()
    assert isinstance(answer.error, StoreFull) and "max_tokens" in str(answer.error)
    assert len(answer.ids) == 3 * 16 - 30 + 1
    assert len(engine.ask([live(9, 2)], max_tokens=5).ids) == 5
    engine.assert_back_to_start()


def test_out_of_memory_in_a_step_shrinks_the_store_and_starts_again(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", max_step_tokens=512)
    engine.ask(few_segments())
    stored = engine.store.stats.num_entries
    sound, failures = engine.watched.forward_final, [2, 3, 6]

    def failing(batch: Any, pool: Any) -> Any:
        result = sound(batch, pool)
        if engine.num_steps in failures:
            raise torch.OutOfMemoryError("no room")
        return result

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    prompts = [many_segments(), few_segments()]
    answers = [engine.add(pieces, max_tokens=6) for pieces in prompts]
    engine.run()
    for pieces, answer in zip(prompts, answers, strict=True):
        expected = checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])
        assert len(answer.ids) == 6 and answer.error_where_run(expected) < TOLERANCE["float64"]
    assert engine.engine.scheduler.limit.tokens == 64 and stored > 0
    engine.assert_back_to_start()


@pytest.mark.parametrize("fail_in", [None, "forward", "choice"])
def test_a_seeded_request_that_starts_again_gets_the_tokens_that_it_would_have_got(
    fail_in: str | None, bench: Make
) -> None:
    sampling = {"temperature": 1.5, "seed": 7}
    expected = bench("qwen").ask(few_segments(), max_tokens=12, **sampling).ids
    engine, broken = bench("qwen"), list[int]()
    place, name = (engine.watched, "forward_final") if fail_in == "forward" else (engine.engine.sampler, "choose")
    sound = getattr(place, name)

    def failing(*arguments: Any) -> Any:
        result = sound(*arguments)
        if fail_in and engine.num_steps in (3, 6) and engine.num_steps not in broken:
            broken.append(engine.num_steps)
            raise torch.OutOfMemoryError("no room")
        return result

    setattr(place, name, failing)
    assert engine.ask(few_segments(), max_tokens=12, **sampling).ids == expected
    assert len(set(expected)) > 3 and broken == ([3, 6] if fail_in else [])


MHA = "Expected mha_graph->execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but got false."


def test_a_library_that_says_in_words_of_its_own_that_memory_is_short_is_understood(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    expected = bench("qwen").ask(few_segments(), max_tokens=6).ids
    engine = bench("qwen", max_step_tokens=512)
    sound = engine.watched.forward_final

    def failing(batch: Any, pool: Any) -> Any:
        if engine.num_steps in (2, 3):
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return sound(batch, pool)

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    assert engine.ask(few_segments(), max_tokens=6).ids == expected
    assert engine.engine.scheduler.limit.tokens == 128
    assert sum("a step ran out of memory" in said for said in caplog.messages) == 2
    engine.assert_back_to_start()


def test_an_attention_that_fails_while_there_is_memory_is_no_lack_of_it(bench: Make) -> None:
    engine = bench("qwen")

    def failing(batch: Any, pool: Any) -> Any:
        raise RuntimeError(MHA)

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    engine.add(few_segments())
    with pytest.raises(RuntimeError, match="mha_graph"):
        engine.run()


def test_a_request_that_always_runs_out_of_memory_fails(bench: Make) -> None:
    engine = bench("qwen")

    def failing(batch: Any, pool: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    answers = [engine.add(pieces) for pieces in (few_segments(), many_segments())]
    engine.run(limit=40)
    assert all(isinstance(answer.error, WorkerLost) for answer in answers)
    said = str(answers[0].error)
    assert "cpu ran out of memory in a step: the pool holds" in said and "MiB are free; lower memory=" in said
    engine.assert_back_to_start()


# -- stress ----------------------------------------------------------------------------------------------------------


class Stress:
    """Random requests, aborts and evictions on a pool too small for them; every step is accounted for."""

    def __init__(self, engine: Bench, roomy: Callable[[], Bench], seed: int) -> None:
        self.engine, self.roomy, self.rng = engine, roomy, random.Random(seed)
        self.alone: dict[Any, tuple[int, ...]] = {}
        self.asked: list[tuple[Any, Answer]] = []
        self.num_aborted = 0

    def prompt(self) -> tuple[Piece, ...]:
        rng = self.rng
        pieces = [live(rng.randint(1, 50), rng.randint(0, 5), ends=rng.random() < 0.5)]
        for _ in range(rng.randint(0, 4)):
            namespace = "t" if rng.random() < 0.1 else None
            pieces.append(seg(rng.choice([5, 9, 30]), rng.randint(0, 1), namespace=namespace))
            if rng.random() < 0.4:
                pieces.append(live(rng.randint(1, 40), rng.randint(0, 3), ends=rng.random() < 0.5))
        return (*pieces, live(rng.randint(1, 9), rng.randint(0, 3)))

    def policy(self) -> Policy:
        return POLICY.with_(
            seam=self.rng.choice([4, 8, 8, 8]),
            reuse=self.rng.choice([*["segments"] * 6, "prefix", "none"]),
            deterministic=self.rng.random() < 0.1,
        )

    def act(self) -> None:
        rng, running = self.rng, [a for _, a in self.asked if not a.is_over]
        if len(running) < 12 and rng.random() < 0.5:
            request = (self.prompt(), self.policy(), rng.choice([1, 3, 40]), rng.random() < 0.1)
            self.asked.append((request, self.engine.add(list(request[0]), *request[1:])))
        if running and rng.random() < 0.06:
            self.engine.abort(rng.choice(running))
            self.num_aborted += 1
        if rng.random() < 0.02:
            self.engine.store.clear()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.act()
            self.engine.step()
            self.engine.assert_sound()
        while self.engine.engine.has_work:
            self.engine.step()
            self.engine.assert_sound()
        self.engine.assert_back_to_start()

    def check(self, at_most: int = 1000) -> None:
        """Everyone who finished got the tokens of a request that runs alone in a roomy engine."""
        finished = [(r, a) for r, a in self.asked if a.pieces and a.pieces[-1].finish_reason and not r[3]]
        assert len(finished) > len(self.asked) // 2
        for request, answer in finished[-at_most:]:
            if request not in self.alone:
                self.alone[request] = tuple(self.roomy().ask(list(request[0]), *request[1:3]).ids)
            assert tuple(answer.ids) == self.alone[request]
        assert all(answer.error is None for _, answer in self.asked)


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_stress(name: str, bench: Make) -> None:
    stress = Stress(bench(name, max_step_tokens=48, sizes=(40, 24, 12)), lambda: bench(name), seed=1)
    stress.run(150)
    stress.check(at_most=20)
    assert stress.num_aborted > 5 and sum(stress.engine.restarts.values()) > 0
    assert stress.engine.store.stats.evictions > 20 and stress.engine.store.stats.hits > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["qwen", "minimax", "minimax-partial"])
def test_long_stress(name: str, seed: int, bench: Make) -> None:
    sizes = random.Random(seed).choice([(28, 14, 7), (40, 9, 5), (24, 30, 10), (200, 12, 5)])
    engine = bench(name, max_step_tokens=random.Random(seed).choice([1, 20, 64, 8192]), sizes=sizes)
    stress = Stress(engine, lambda: bench(name), seed)
    stress.run(1500)
    stress.check()


# -- the engine's thread ---------------------------------------------------------------------------------------------


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

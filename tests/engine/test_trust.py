"""What once went wrong under pressure: out of memory while encoding, tight pools, inherited encodes, bad values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.errors import NonFiniteOutput, WorkerLost
from hypic.types import Segment
from tests.checkpoints import random_ids
from tests.engine.expected import Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import live, seg


@pytest.mark.parametrize(("warm", "max_step_tokens"), [(True, 8192), (False, 64)])
def test_out_of_memory_while_encoding_ends(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, warm: bool, max_step_tokens: int
) -> None:
    bench = Bench(checkpoints.runner("qwen", "float32"), max_step_tokens=max_step_tokens)

    def full(self: Runner, chains: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Runner, "launch", full)
    answer = bench.add([seg(300, 1), live(5, 2)], warm=warm)
    for _ in range(20):
        bench.step()
    assert not bench.engine.has_work and isinstance(answer.error, WorkerLost)


def test_a_tight_memory_answers_warm_what_it_answers_cold(checkpoints: Checkpoints) -> None:
    head, question = live(40, 1, ends=True), live(4, 5)
    answers = []
    for is_warm in (False, True):
        bench = Bench(checkpoints.runner("qwen", "float64"), sizes=(64, 3, 2), max_running=1)
        if is_warm:
            bench.ask([head, live(5, 9)])
        answers.append(bench.ask([head, seg(30, 3), question]))
    assert answers[0].error is None and answers[0].ids == answers[1].ids


def test_a_grown_segment_is_encoded_anew_where_there_is_no_room_for_both(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints.runner("qwen", "float64"), sizes=(64, 5, 1), max_running=1)
    ids = random_ids(60, 1)

    def prompt(length: int) -> list[Piece]:
        return [Piece(tuple(ids[:length]), Segment("t", name="memory")), live(5, 2)]

    assert bench.ask(prompt(40)).error is None and bench.ask(prompt(60)).error is None


def test_who_inherits_an_encode_reports_it(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints.runner("qwen", "float32"), max_step_tokens=64)
    prompt = [seg(200, 1), live(5, 2)]
    first, second = bench.add(prompt), bench.add(prompt)
    bench.step()
    bench.abort(first)
    bench.run()
    report = second.report
    assert report is not None and report.segments[0].outcome == "encoded" and report.reused_tokens == 0
    bench.assert_back_to_start()


def test_warming_reports_the_segment_alone(checkpoints: Checkpoints) -> None:
    bench = Bench(checkpoints.runner("qwen", "float32"))
    counts = []
    for _ in range(2):
        answer = bench.add([seg(100, 1), Piece((0,))], warm=True)
        bench.run()
        assert answer.report is not None
        counts.append((answer.report.prompt_tokens, answer.report.computed_tokens, answer.report.reused_tokens))
    assert counts == [(100, 100, 0), (100, 0, 100)]


def test_an_entry_that_spoils_an_answer_is_not_kept(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's own states are not looked at when they are made; who reads them fails, and they go."""
    bench = Bench(checkpoints.runner("qwen-linear", "float32"))
    mixer: Any = bench.watched.model.layers[-1].mixer
    sound = mixer.inputs

    def poisoned(projected: Any, angles: Any) -> Any:
        x = sound(projected, angles)
        values = {f.name: getattr(x, f.name).clone() for f in fields(x)}
        values["v"].fill_(float("inf"))
        return type(x)(**values)

    monkeypatch.setattr(mixer, "inputs", poisoned)
    bench.add([seg(60, 1), live(5, 2)], warm=True)
    bench.run()
    monkeypatch.setattr(mixer, "inputs", sound)
    hurt = bench.add([seg(60, 1), live(5, 2)])
    bench.run()
    healed = bench.add([seg(60, 1), live(5, 2)])
    bench.run()
    assert isinstance(hurt.error, NonFiniteOutput) and healed.error is None and healed.ids

"""Prompts whose entries are more than memory can hold at once: states are folded as entries come, nobody is refused and
nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hypic.engine import scheduler
from hypic.engine.encode import Encode
from hypic.engine.jobs import Jobs
from hypic.engine.plan import Piece
from hypic.types import Policy
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg

Make = Callable[..., Bench]
THREE_STATES = (400, 8 + 3, 3)


def sixteen(first: int, glue: bool = True) -> list[Piece]:
    """Sixteen segments, half of them shared with the next request."""
    pieces = [live(3 + first, 90 + first)]
    for number in range(8 * first, 8 * first + 16):
        pieces.append(seg(20 + number % 3, number))
        pieces += [live(2, number)] if glue and number % 3 == 0 else []
    return [*pieces, live(5, 80 + first)]


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_eight_requests_of_sixteen_segments_where_three_states_fit(
    name: str, bench: Make, checkpoints: Checkpoints
) -> None:
    engine = bench(name, sizes=THREE_STATES, max_running=8)
    prompts = [sixteen(first) for first in range(8)]
    answers = [engine.add(pieces, max_tokens=3) for pieces in prompts]
    most = 0
    while engine.engine.has_work:
        engine.step()
        engine.assert_sound()
        most = max(most, len(engine.engine.scheduler.running))
    assert most > 1, "they run side by side"
    assert sum(engine.restarts.values()) == 0, "nobody had to start again"
    roomy = bench(name)
    for pieces, answer in zip(prompts, answers, strict=True):
        assert answer.error is None and answer.ids == roomy.ask(pieces, max_tokens=3).ids
    expected = checkpoints.expected(name, prompts[3], generated=answers[3].ids[:-1])
    assert answers[3].error_to(expected) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_what_is_folded_is_given_back_at_once(bench: Make) -> None:
    """While an answer is generated its segments hold no slot, only pages; they may be evicted and come back."""
    engine = bench("qwen", sizes=(60, 8, 4))
    pieces = [live(4, 1), seg(30, 2), seg(30, 3), seg(30, 4), live(4, 5)]
    answer = engine.add(pieces, max_tokens=60)
    while not answer.ids:
        engine.step()
    assert engine.store.stats.num_pinned == 0 and engine.num_segments == 3
    beside = engine.add([live(3, 6), seg(30, 7), seg(30, 8), seg(30, 9), live(3, 10)], max_tokens=2)
    while not beside.is_over:
        engine.step()
        engine.assert_sound()
    assert not answer.is_over and engine.restarts["r1"] == 0 and engine.store.stats.evictions > 0
    engine.run()
    alone = bench("qwen").ask(pieces, max_tokens=60)
    assert answer.ids == alone.ids
    engine.assert_back_to_start()


def test_pages_stay_the_requests_own_when_their_entry_is_evicted(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", sizes=(60, 8, 4))
    pieces = [live(4, 1), seg(30, 2), live(4, 5)]
    answer = engine.add(pieces, max_tokens=20)
    while len(answer.ids) < 3:
        engine.step()
    assert engine.store.clear() > 0 and engine.num_segments == 0
    engine.assert_sound()
    engine.ask([live(3, 6), seg(90, 7), seg(90, 8), live(3, 10)])
    engine.run()
    expected = checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])
    assert answer.error_to(expected) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_a_warm_prompt_in_pieces_uses_what_is_cached(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", sizes=(80, 9, 6), max_running=2)
    shared = [seg(40, n) for n in range(5)]
    engine.ask([live(2, 70), *shared, live(2, 71)])
    pieces = [live(3, 72), *shared, *[seg(24, 10 + n) for n in range(5)], live(4, 73)]
    answer = engine.ask(pieces)
    assert answer.outcomes.count("hit") >= 1, "what was there is not encoded before it has to make room"
    assert answer.error_to(checkpoints.expected("qwen", pieces)) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_one_segment_many_times_in_pieces(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", sizes=(80, 4, 1))
    pieces = [live(3, 1), *[seg(20, n % 3) for n in range(9)], live(4, 2)]
    answer = engine.ask(pieces)
    assert answer.error_to(checkpoints.expected("qwen", pieces)) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_deterministic_bits_in_pieces_do_not_depend_on_what_is_cached(bench: Make) -> None:
    policy = POLICY.with_(deterministic=True)
    pieces = [live(30, 1, ends=True), *[seg(24, n) for n in range(6)], live(4, 2)]
    answers = []
    for warmed in ((), (0, 1, 2), (3, 5), (5, 4, 3, 2, 1, 0)):
        engine = bench("qwen", "float32", sizes=(80, 8, 5), max_running=2)
        for number in warmed:
            engine.ask([live(3, 9), seg(24, number), live(2, 8)], policy)
        answers.append(engine.ask(pieces, policy))
    first = answers[0].rows()[-1]
    assert all((answer.rows()[-1] == first).all() for answer in answers)


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_all_sizes_in_a_small_pool(seed: int, bench: Make) -> None:
    """In pieces and whole, aborted and cleared, beside each other: all are answered as if alone."""
    rng = random.Random(seed)
    engine = bench("qwen", sizes=(90, 9, 4), max_running=6, max_step_tokens=64)
    asked: list[tuple[list[Piece], Policy, Answer]] = []

    def prompt() -> list[Piece]:
        segments = [seg(rng.choice([12, 20, 33]), rng.randrange(12)) for _ in range(rng.choice([0, 2, 5, 9, 12]))]
        return [live(rng.randint(1, 30), rng.randrange(3), ends=True), *segments, live(rng.randint(1, 8), 5)]

    for _ in range(50):
        if len(asked) < 15 and rng.random() < 0.6:
            pieces = prompt()
            policy = POLICY.with_(deterministic=rng.random() < 0.1)
            asked.append((pieces, policy, engine.add(pieces, policy, 4)))
        if asked and rng.random() < 0.05:
            engine.abort(rng.choice(asked)[2])
        if rng.random() < 0.05:
            engine.store.clear()
        engine.step()
        engine.assert_sound()
    engine.run()
    finished = [(p, q, a) for p, q, a in asked if a.pieces and a.pieces[-1].finish_reason]
    assert len(finished) > 9 and all(a.error is None for *_, a in asked)
    for pieces, policy, answer in finished:
        assert answer.ids == bench("qwen").ask(pieces, policy, 4).ids
    engine.assert_back_to_start()


def test_pieces_bite(bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry whose slots another one gets before it is folded shows."""
    sound, pieces = Jobs.stored, sixteen(0)

    def overwriting(self: Jobs, job: Encode) -> None:
        sound(self, job)
        for states in self.pool.states:
            states[job.entry.state_slot] *= 0.5

    for fault in (False, True):
        if fault:
            monkeypatch.setattr(Jobs, "stored", overwriting)
        monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
        answer = bench("qwen", sizes=THREE_STATES, max_step_tokens=16).ask(pieces)
        error = answer.error_to(checkpoints.expected("qwen", pieces))
        assert error > 100 * TOLERANCE["float64"] if fault else error < TOLERANCE["float64"]

"""What requests share, what they are said to have computed, and why a segment was no hit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hypic.engine.plan import Piece
from hypic.types import Policy, Segment
from tests.checkpoints import random_ids
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, live, many_segments, seg

Make = Callable[..., Bench]


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

"""Measuring on a tiny model: what must be equal is, and what must not be shows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.types import Policy
from hypic_apps.eval import drift, measure
from hypic_apps.eval.arms import ARMS, CACHED, DEFAULT, KNOBS, NONE, plain
from hypic_apps.eval.driver import Ask, Subject
from hypic_apps.eval.items import Item
from hypic_apps.eval.noting import divergences
from hypic_apps.eval.records import records
from tests.engine.faults import FAULTS


def divergence(full: torch.Tensor, other: torch.Tensor) -> float:
    return float(divergences(full, other).mean())


def test_a_forced_answer_has_the_probabilities_of_a_free_one(subject: Subject, item: Item) -> None:
    prompt = plain(item, "")
    free = subject.ask([prompt], NONE, 6)[0]
    forced = subject.ask([prompt], NONE, 1, [free.token_ids])[0]
    assert forced.token_ids == free.token_ids and len(free.token_ids) == 6
    assert divergence(free.logprobs, forced.logprobs) < 1e-9
    other = [(token + 1) % 300 for token in free.token_ids]
    told = subject.ask([prompt], NONE, 1, [other])[0]
    assert list(told.token_ids) == other
    assert torch.allclose(told.logprobs[0], free.logprobs[0]) and not torch.allclose(told.logprobs[1], free.logprobs[1])


def test_a_step_that_runs_out_of_memory_behind_its_choice_is_noted_once(subject: Subject, item: Item) -> None:
    full = subject.ask([plain(item, "")], NONE, 6)[0]
    asks = [
        Ask(plain(item, ""), CACHED, 6, full=full, keeps=True),
        Ask(plain(item, ""), CACHED, 6, full.token_ids, full),
    ]
    expected = subject.answer(asks)
    sampler, steps = subject.engine.sampler, list[int]()
    sound = sampler.choose

    def failing(*arguments: Any) -> Any:
        choice = sound(*arguments)
        steps.append(len(steps))
        if steps[-1] in (1, 2, 5):
            raise torch.OutOfMemoryError("no room")
        return choice

    sampler.choose = failing  # type: ignore[method-assign]
    subject.forget()
    found = subject.answer(asks)
    assert len(steps) > 8 and len(found[1].divergences) == len(full.token_ids) == 6
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids and mine.logprobs.shape == theirs.logprobs.shape
        assert torch.allclose(mine.logprobs, theirs.logprobs, atol=1e-9)
        assert mine.divergences == pytest.approx(theirs.divergences, abs=1e-9) and max(mine.divergences) > 1e-7


def test_divergence_is_that_of_the_definition() -> None:
    mine, other = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert divergence(mine.log()[None], other.log()[None]) == pytest.approx(expected)


def test_arms_against_full_recompute(subject: Subject, item: Item) -> None:
    found = measure.measure(subject, "T", [item, item], measure.Plan(DEFAULT, "", num_timed=1))
    made = {(r.arm, r.metric): r for r in records("tiny", found)}
    again = made["full-again", "kl"]
    assert abs(again.value) < 1e-9 and made["full-again", "agreement"].value == 1.0 and again.n == 2
    for arm in ("transition", "addition", "last", "no-rotation", "no-passages"):
        assert made[arm, "kl"].value > 1e-7, arm
    assert made["addition", "kl"].value > made["transition", "kl"].value
    assert made["full", "run_share"].value == 1.0 and made["seam-32", "run_share"].value > 0.2
    assert made["transition", "run_share"].value < made["seam-16", "run_share"].value < 1.0
    for metric in ("run_share", "cached_bytes", "encoded_share", "floor_s"):
        assert ("transition", metric) in made
    assert made["full", "cached_bytes"].value == made["full", "encoded_share"].value == 0
    assert 0 < made["transition", "floor_s"].value < made["seam-16", "floor_s"].value
    assert ("full", "kl") not in made
    exact = made["transition", "exact_match"]
    assert exact.gap_to_full is not None and exact.gap_low is not None and exact.gap_low <= exact.gap_to_full


def test_one_segment_at_the_prompts_head_is_exact(subject: Subject, item: Item) -> None:
    """The oracle of the whole chain, and its control: without the transition the same comparison fails."""
    alone = Item("T", 0, item.passages[:1], item.question, item.answers)
    prompt = plain(alone, "")
    prompt = type(prompt)(prompt.segments, prompt.tail, template=False)
    full = subject.ask([prompt], NONE, 4)[0]
    cached = subject.ask([prompt], CACHED, 1, [full.token_ids])[0]
    assert cached.report.segments[0].outcome == "encoded"
    assert divergence(full.logprobs, cached.logprobs) < 1e-9
    subject.forget()
    with pytest.MonkeyPatch.context() as patch:
        FAULTS["drop-transition"](patch)
        broken = subject.ask([prompt], CACHED.with_(seam=24), 1, [full.token_ids])[0]
    assert divergence(full.logprobs, broken.logprobs) > 1e-7


def test_knobs_and_controls_build_other_prompts(item: Item) -> None:
    whole = plain(item, "Be short.")
    assert [s.kind for s in whole.segments] == ["system", "document", "document", "document"]
    assert ARMS["no-passages"].build(item, "") is not None
    removed = ARMS["gold-removed"].build(item, "")
    assert removed is not None and [s.text for s in removed.segments] == [item.passages[0], item.passages[2]]
    assert ARMS["gold-removed"].build(Item("T", 0, item.passages, "?", ("x",)), "") is None
    edges = ARMS["edges-32"].build(item, "")
    assert edges is not None and [s.seam for s in edges.segments] == [32, None, 32]
    halves = ARMS["halves"].build(item, "")
    assert halves is not None and "".join(s.text for s in halves.segments) == "".join(item.passages)
    assert len(halves.segments) == 6
    resumed = ARMS["resumed"].build(item, "")
    assert resumed is not None and [s.cache for s in resumed.segments] == [None, False, None, False, None]
    assert item.passages[0].startswith(resumed.segments[1].text) and len(resumed.segments[1].text.split()) == 8
    first = ARMS["question-first"].build(item, "")
    assert first is not None and first.segments[0].text == item.question and first.tail == item.question
    joined = ARMS["full-joined"].build(item, "")
    assert joined is not None and not joined.segments and all(text in joined.tail for text in item.passages)
    assert set(KNOBS) | set(DEFAULT) == set(ARMS)
    assert all(arm.policy in (NONE, Policy(reuse="none")) for name, arm in ARMS.items() if name.startswith("full"))


def test_what_knobs_cost(subject: Subject, item: Item) -> None:
    """Tokens are counted where the engine runs them, and by hand from the lengths."""
    found = measure.measure(subject, "T", [item], measure.Plan(("transition", "every-32", "last-live-1"), "", 1))
    cost = {(r.arm, r.metric): r.value for r in records("tiny", found)}
    pieces = subject.pieces(plain(item, ""))
    lengths = [len(piece.ids) for piece in pieces if piece.segment is not None]
    total = sum(len(piece.ids) for piece in pieces)
    for arm, lasting in (("transition", lengths), ("every-32", lengths), ("last-live-1", lengths[:-1])):
        policy = ARMS[arm].policy
        num_cached = sum(policy.num_cached(n) for n in lasting)
        encoded = sum(stop for n in lasting for _, stop in policy.interiors(n))
        assert cost[arm, "run_share"] == pytest.approx((total - num_cached) / total)
        assert cost[arm, "encoded_share"] == pytest.approx(encoded / total)
    assert cost["every-32", "cached_bytes"] > 1.2 * cost["transition", "cached_bytes"] > 0
    assert cost["last-live-1", "cached_bytes"] < cost["transition", "cached_bytes"]


def test_drift_is_rounding_in_the_first_layer_only_for_the_transition(subject: Subject, item: Item) -> None:
    found = {d.arm: d for d in drift.measure(subject, [item], ("transition", "addition"))}
    exact, dropped = found["transition"].layers[0], found["addition"].layers[0]
    assert exact.state is not None and exact.state < 1e-12
    assert dropped.state is not None and dropped.state > 1e-2
    assert exact.hidden < 1e-12 < found["transition"].layers[-1].hidden
    assert [layer.kind for layer in found["transition"].layers] == ["linear_attention", "full_attention"] * 2
    assert found["transition"].layers[1].state is None and len(exact.heads) == 4


@pytest.mark.parametrize("arm", ["tail-8", "every-32", "edges-32"])
def test_drift_sees_every_cached_token_wherever_seams_lie(arm: str, subject: Subject, item: Item) -> None:
    (found,) = drift.measure(subject, [item], (arm,))
    first = found.layers[0]
    assert first.state is not None and first.state < 1e-12, "the composition is exact"
    near, far = found.by_distance[0][1], found.by_distance[0][2]  # 8 to 15 tokens from the segment's start, 16 to 31
    assert far is not None and 0 < far < 1 and near is not None, "one segment has a narrow seam in every arm"


def test_cached_tokens_drift_from_the_second_layer_on(subject: Subject, item: Item) -> None:
    (found,) = drift.measure(subject, [item], ("transition",))
    first, *others = found.by_distance
    assert first[0] is None, "the seam is run in context"
    assert first[1] is not None and max(x for row in others for x in row if x is not None) > 1e-3


def test_what_drift_compares_is_sensitive(subject: Subject, item: Item) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS["drop-transition"](patch)
        (broken,) = drift.measure(subject, [item], ("transition",))
    assert broken.layers[0].state is not None and broken.layers[0].state > 1e-2


def test_a_model_has_its_folders_name(subject: Subject, folder: Path) -> None:
    assert subject.name == folder.name and subject.num_parameters > 1000


def test_arms_without_a_prompt_for_some_items_are_timed_on_the_others(subject: Subject, item: Item) -> None:
    without = Item("T", 1, item.passages, item.question, item.answers)
    plan = measure.Plan(("full", "gold-removed"), num_timed=3)
    made = records("tiny", measure.measure(subject, "T", [item, without, item], plan))
    timed = {r.arm: r.n for r in made if r.metric == "ttft_s"}
    shares = {r.arm: r.n for r in made if r.metric == "run_share"}
    assert timed == shares == {"full": 3, "gold-removed": 2}


def test_items_may_run_together(subject: Subject, item: Item) -> None:
    other = Item("T", 1, item.passages[::-1], item.question, item.answers)  # without gold passages
    plan = measure.Plan(("full", "transition", "gold-removed"))
    alone = measure.measure(subject, "T", [item, other, item], plan)
    together = measure.measure(subject, "T", [item, other, item], replace(plan, at_once=2))
    for one, two in zip(records("tiny", alone), records("tiny", together), strict=True):
        assert (one.arm, one.metric, one.n) == (two.arm, two.metric, two.n)
        assert one.value == pytest.approx(two.value, abs=1e-9)
    assert [mark is None for mark in together.marks("gold-removed", "kl")] == [False, True, False]

"""Segments encoded behind a primer: against the float64 reference, which runs primer and segment as one text and keeps
of it what belongs to the segment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hypic.engine.plan import Piece
from hypic.types import Policy
from tests.checkpoints import random_ids
from tests.engine.expected import TOLERANCE, Checkpoints, links
from tests.engine.faults import FAULTS, cases
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, live, many_segments, seg
from tests.reference import Result

Make = Callable[..., Bench]
DTYPES = list(TOLERANCE)
MODELS = ["qwen", "qwen-conv-2", "minimax-partial"]
PRIMER = tuple(random_ids(37, 91))
PROMPTS = {"few": few_segments(), "many": many_segments()}


def expected(
    checkpoints: Checkpoints, name: str, pieces: list[Piece], policy: Policy = POLICY, primer: tuple[int, ...] = PRIMER
) -> Result:
    return checkpoints.reference(name).evaluate(links(pieces, policy), primer=primer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_cached_equals_uncached(name: str, prompt: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    pieces, engine = PROMPTS[prompt], bench(name, dtype, primer=PRIMER)
    wanted = expected(checkpoints, name, pieces)
    for outcome in ("encoded", "hit"):
        answer = engine.ask(pieces)
        assert answer.error_to(wanted) < TOLERANCE[dtype]
        assert set(answer.outcomes) <= {outcome, "live", "hit"} and outcome in answer.outcomes
    engine.assert_back_to_start()


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("step", [1, 7, 16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_in_pieces_and_by_kernels(name: str, step: int, kernels: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench(name, primer=PRIMER, max_step_tokens=step, kernels=kernels, page_size=4, max_context=1024)
    assert engine.ask(few_segments()).error_to(expected(checkpoints, name, few_segments())) < TOLERANCE["float64"]


@pytest.mark.parametrize("step", [100, 8192])
@pytest.mark.parametrize("seam", [0, 8, 60])
@pytest.mark.parametrize("name", MODELS)
def test_long_segments_are_walked_by_kernels_from_the_primers_state(
    name: str, seam: int, step: int, bench: Make, checkpoints: Checkpoints
) -> None:
    """Rows so long that one kernel carries the state: a fold may begin with the chain, at a state that is not zero."""
    pieces, policy = [live(3, 1), *(seg(n, n) for n in (300, 450, 170, 290)), live(5, 2)], POLICY.with_(seam=seam)
    engine = bench(name, primer=PRIMER, kernels="on", max_step_tokens=step)
    answer = engine.ask(pieces, policy)
    assert answer.error_to(expected(checkpoints, name, pieces, policy)) < TOLERANCE["float64"]
    assert answer.error_to(expected(checkpoints, name, pieces, policy, PRIMER[1:])) > 100 * TOLERANCE["float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "fault"), cases(MODELS[:1] + MODELS[2:], has_short=False))
def test_cached_equals_uncached_bites(
    name: str, fault: str, dtype: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    answer = bench(name, dtype, primer=PRIMER).ask(few_segments())
    assert answer.error_to(expected(checkpoints, name, few_segments())) > 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("primer", [PRIMER[1:], PRIMER[:-1], ()])
@pytest.mark.parametrize("name", MODELS)
def test_another_primer_is_another_answer(
    name: str, primer: tuple[int, ...], bench: Make, checkpoints: Checkpoints
) -> None:
    answer = bench(name, primer=primer).ask(few_segments())
    assert answer.error_to(expected(checkpoints, name, few_segments())) > 100 * TOLERANCE["float64"]

"""Contracts 1 and 2: cached equals uncached, against the reference, and full recompute where theory says so.

Also the ablations, which are exact in their own way: the reference computes the same ablated chain.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hypic.types import Policy
from tests.checkpoints import oracle_logits
from tests.engine.answer import Answer
from tests.engine.expected import FAMILIES, TOLERANCE, Checkpoints, links, relative
from tests.engine.faults import FAULTS, cases
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, Pieces, few_segments, flat, live, many_segments, only_segment, seg
from tests.reference import Faults

Make = Callable[..., Bench]
BITTEN = ["qwen", "minimax", "minimax-partial"]
MODELS = [*FAMILIES, "qwen-tied", "qwen-wide", "qwen-conv-2"]
SINGLE = ["qwen-linear", "qwen-attention", "minimax-linear", "minimax-attention"]
DTYPES = list(TOLERANCE)
EXACT_ORACLE = {"float64": 1e-10, "float32": 1e-4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_cached_equals_uncached(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    pieces, engine = many_segments(), bench(name, dtype)
    cold = engine.ask(pieces, max_tokens=4)
    warm = engine.ask(pieces, max_tokens=4)
    expected = checkpoints.expected(name, pieces, generated=cold.ids[:-1])
    assert cold.error_to(expected) < TOLERANCE[dtype]
    assert warm.error_where_run(expected) < TOLERANCE[dtype]
    assert set(cold.outcomes) == {"encoded", "live"} and set(warm.outcomes) == {"hit", "live"}
    assert cold.ids == warm.ids or dtype == "float32"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "fault"), cases(BITTEN, has_short=True))
def test_cached_equals_uncached_bites(
    name: str, fault: str, dtype: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    answer = bench(name, dtype).ask(many_segments())
    assert answer.error_to(checkpoints.expected(name, many_segments())) > 100 * TOLERANCE[dtype]


REFERENCE_FAULTS = [
    Faults(drop_transition=True),
    Faults(empty_conv_tail=True),
    Faults(shift_seam_by=1),
    Faults(shift_position_by=1),
    Faults(skip_rotation=True),
]


@pytest.mark.parametrize("faults", REFERENCE_FAULTS, ids=lambda f: next(k for k, v in vars(f).items() if v))
def test_a_faulty_reference_is_not_what_the_engine_computes(
    faults: Faults, bench: Make, checkpoints: Checkpoints
) -> None:
    for dtype in DTYPES:
        answer = bench("qwen", dtype).ask(few_segments())
        wrong = checkpoints.reference("qwen").evaluate(links(few_segments()), faults=faults)
        assert answer.error_to(wrong) > 100 * TOLERANCE[dtype]


# -- contract 2 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seam", [3, 8, 32, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_only_segment_at_the_head_equals_full_recompute(
    name: str, seam: int, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    pieces, policy, engine = only_segment(), Policy(seam=seam, min_segment_tokens=0), bench(name, dtype)
    for answer in (engine.ask(pieces, policy), engine.ask(pieces, policy)):
        assert answer.outcomes == ["live" if seam > 40 else answer.outcomes[0]]
        assert len(answer.logits) == min(seam, 40) + 15 - (0 if answer.runs[0] > 15 else seam)
        assert _error_to_full(answer, name, pieces, checkpoints) < EXACT_ORACLE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "fault"), cases(BITTEN, has_short=False))
def test_only_segment_at_the_head_bites(
    name: str, fault: str, dtype: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    answer = bench(name, dtype).ask(only_segment())
    assert _error_to_full(answer, name, only_segment(), checkpoints) > 100 * EXACT_ORACLE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seam", [4, 8])
@pytest.mark.parametrize("name", SINGLE)
def test_many_segments_equal_full_recompute_in_one_mixing_layer(
    name: str, seam: int, dtype: str, bench: Make, checkpoints: Checkpoints
) -> None:
    policy, engine = Policy(seam=seam, min_segment_tokens=0), bench(name, dtype)
    for _ in ("cold", "warm"):
        answer = engine.ask(many_segments(), policy)
        assert _error_to_full(answer, name, many_segments(), checkpoints) < EXACT_ORACLE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "fault"), cases(SINGLE, has_short=True))
def test_one_mixing_layer_bites(
    name: str, fault: str, dtype: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    answer = bench(name, dtype).ask(many_segments())
    assert _error_to_full(answer, name, many_segments(), checkpoints) > 100 * EXACT_ORACLE[dtype]


@pytest.mark.parametrize("name", [n for n in FAMILIES if n != "minimax-partial"])
def test_transformers_as_it_is_agrees_within_its_own_float32(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    answer = bench(name).ask(only_segment())
    logits = oracle_logits(checkpoints.folder(name), flat(only_segment()))
    assert relative(answer.rows(), logits[sorted(answer.logits)]) < 1e-5
    single = bench(name, "float32").ask([live(150, 9)])
    assert relative(single.rows(), oracle_logits(checkpoints.folder(name), flat([live(150, 9)]), torch.float32)) < 1e-4


def _error_to_full(answer: Answer, name: str, pieces: Pieces, checkpoints: Checkpoints) -> float:
    return relative(answer.rows(), checkpoints.full(name, pieces)[sorted(answer.logits)])


def test_several_segments_are_approximate_in_deep_models(bench: Make, checkpoints: Checkpoints) -> None:
    for name in ("qwen", "minimax"):
        reused = bench(name).ask(few_segments())
        full = bench(name).ask(few_segments(), Policy(reuse="none"))
        assert len(full.logits) == len(flat(few_segments()))
        assert relative(full.rows(), checkpoints.full(name, few_segments())) < 1e-10
        assert 1e-4 < relative(reused.rows(), full.rows(sorted(reused.logits))) < 1.5


# -- ablations -------------------------------------------------------------------------------------------------------

ABLATIONS = {
    "addition": Policy(min_segment_tokens=0, compose="addition"),
    "last": Policy(min_segment_tokens=0, compose="last"),
    "unrotated": Policy(min_segment_tokens=0, rotate=False),
    "all": Policy(min_segment_tokens=0, rotate=False, compose="last", seam=4),
} | {f"seam-{w}": Policy(min_segment_tokens=0, seam=w) for w in (0, 1, 2, 4, 16, 32)}


@pytest.mark.parametrize("policy", ABLATIONS.values(), ids=ABLATIONS)
@pytest.mark.parametrize("name", ["qwen", "minimax-partial"])
def test_ablations_equal_the_reference(name: str, policy: Policy, bench: Make, checkpoints: Checkpoints) -> None:
    for dtype in DTYPES:
        engine = bench(name, dtype)
        cold, warm = engine.ask(many_segments(), policy, max_tokens=3), engine.ask(many_segments(), policy)
        expected = checkpoints.expected(name, many_segments(), policy, cold.ids[:-1])
        assert cold.error_to(expected) < TOLERANCE[dtype]
        assert warm.error_where_run(expected) < TOLERANCE[dtype]
        # Without a seam fewer tokens are run, and only those can be compared.
        sound = bench(name, dtype).ask(many_segments(), POLICY)
        shared = sorted(sound.logits.keys() & cold.logits.keys())
        assert relative(cold.rows(shared), sound.rows(shared)) > 100 * TOLERANCE[dtype]


def test_ablations_share_entries_but_not_answers_from_snapshots(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen")
    turn = [live(40, 1, ends=True), seg(30, 2), live(40, 3, ends=True)]
    first = engine.ask(turn, POLICY, max_tokens=2)
    assert first.outcomes == ["encoded"]
    seams = {8}
    for policy in ABLATIONS.values():
        again = engine.ask([*turn, live(3, 4)], policy)
        expected = checkpoints.expected("qwen", [*turn, live(3, 4)], policy)
        assert again.error_where_run(expected) < TOLERANCE["float64"]
        assert again.outcomes == ["live" if policy.seam >= 30 else "hit" if policy.seam in seams else "encoded"]
        seams.add(policy.seam)


def test_segments_mixed_with_ablations_in_one_batch(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen")
    policies = [POLICY, *ABLATIONS.values()]
    answers = [engine.add(few_segments(), policy, 3) for policy in policies]
    engine.run()
    for answer, policy in zip(answers, policies, strict=True):
        expected = checkpoints.expected("qwen", few_segments(), policy, answer.ids[:-1])
        assert answer.error_to(expected) < TOLERANCE["float64"]

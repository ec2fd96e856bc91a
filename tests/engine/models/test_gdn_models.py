"""Qwen3-Next, Qwen3.5 with experts, OLMo-Hybrid and Ring-linear: logits, and the contracts of reuse.

Logits are compared with transformers' classes; Ring-linear, which transformers lacks, with this project's own float64
reference. The contracts are compared with that reference for every family. Every one is shown to bite.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

import pytest
import torch

from hypic.engine import scheduler
from hypic.engine.affine import Affine
from hypic.engine.layers import conv, gated_delta_net, linear_attention, rotary
from hypic.engine.layers.rotary import Angles
from hypic.engine.plan import Piece
from tests.checkpoints_gdn import exact_logits, logits_of, oracle
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.faults import FAULTS, drop_end_state, drop_transition
from tests.engine.harness import Bench
from tests.engine.models.gdn_families import FamilyCheckpoints
from tests.engine.prompts import few_segments, flat, live, many_segments, seg

Make = Callable[..., Bench]
DTYPES = list(TOLERANCE)
ORACLE = {"float64": 1e-5, "float32": 1e-4}  # transformers casts to float32 inside
FAMILIES = ["next", "moe", "olmo", "olmo-rope", "ring", "ring-latent"]
PUBLISHED = [
    *("next", "next-plain-weights", "next-tied", "next-yarn", "moe", "moe-wrapper", "moe-fused"),
    *("olmo", "olmo-rope", "olmo-yarn", "olmo-96-192"),
]
YARN = ["ring-yarn-linear", "next-yarn-full", "olmo-yarn-full"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoints:
    return FamilyCheckpoints(lambda name: tmp_path_factory.mktemp(name))


@pytest.fixture
def bench(checkpoints: FamilyCheckpoints) -> Callable[..., Bench]:
    """``bench(name, dtype, **settings)``: a fresh engine, with an empty pool, on a model that is loaded once."""

    def make(name: str, dtype: str = "float64", **settings: object) -> Bench:
        return Bench(checkpoints.runner(name, dtype), **settings)  # type: ignore[arg-type]

    return make


# -- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_those_of_transformers(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    prompt = [live(75, 1)]
    for dtype in DTYPES:
        model = oracle(checkpoints.folder(name), getattr(torch, dtype))
        error = relative(bench(name, dtype).ask(prompt).rows(), logits_of(model, flat(prompt)))
        assert error < ORACLE[dtype]
    if "yarn" not in name:
        exact = exact_logits(checkpoints.folder(name), flat(prompt))
        assert relative(bench(name).ask(prompt).rows(), exact) < TOLERANCE["float64"]


@pytest.mark.parametrize("name", ["ring", "ring-first", "ring-latent", "ring-latent-plain-queries"])
def test_logits_of_ring_equal_the_reference(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    prompt = [live(75, 1)]
    for dtype in DTYPES:
        assert bench(name, dtype).ask(prompt).error_to(checkpoints.expected(name, prompt)) < TOLERANCE[dtype]


def test_greedy_answers_equal_those_of_transformers(bench: Make, checkpoints: Checkpoints) -> None:
    for name in ("next", "moe", "olmo"):
        prompt, model = [live(40, 2)], oracle(checkpoints.folder(name), torch.float64)
        answer = bench(name).ask(prompt, max_tokens=8)
        logits = logits_of(model, [*flat(prompt), *answer.ids])[len(flat(prompt)) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.ids


def _other_slopes(patch: pytest.MonkeyPatch) -> None:
    from hypic.engine.models import bailing_moe_linear

    patch.setattr(bailing_moe_linear, "LAYER_OFFSETS", {"BailingMoeLinearV2ForCausalLM": 0})


def _single_beta(patch: pytest.MonkeyPatch) -> None:
    sound = gated_delta_net.DeltaNetShape.__init__

    def init(self: gated_delta_net.DeltaNetShape, **fields: Any) -> None:
        sound(self, **(fields | {"beta_scale": 1.0}))

    patch.setattr(gated_delta_net.DeltaNetShape, "__init__", init)


def _no_groups(patch: pytest.MonkeyPatch) -> None:
    from hypic.engine.layers import routers

    def allowed(self: routers.SigmoidRouter, biased: torch.Tensor) -> torch.Tensor:
        return biased

    patch.setattr(routers.SigmoidRouter, "_allowed", allowed)


@pytest.mark.parametrize(("name", "fault"), [("ring", _other_slopes), ("olmo", _single_beta), ("ring", _no_groups)])
def test_logits_bite(
    name: str, fault: Callable[..., None], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    prompt = [live(75, 1)]
    error = Bench(checkpoints._runner(name, "float64")).ask(prompt).error_to(checkpoints.expected(name, prompt))
    assert error > 100 * ORACLE["float64"]


# -- cached = uncached -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_cached_equals_uncached(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    pieces, engine = many_segments(), bench(name, dtype)
    cold, warm = engine.ask(pieces, max_tokens=3), engine.ask(pieces, max_tokens=3)
    expected = checkpoints.expected(name, pieces, generated=cold.ids[:-1])
    assert cold.error_to(expected) < TOLERANCE[dtype]
    assert warm.error_where_run(expected) < TOLERANCE[dtype]
    assert set(cold.outcomes) == {"encoded", "live"} and set(warm.outcomes) == {"hit", "live"}


def stay_in_place(patch: pytest.MonkeyPatch) -> None:
    """States with rotary keys are not moved."""
    patch.setattr(linear_attention, "move", lambda maps, angles, **options: maps)


def move_too_far(patch: pytest.MonkeyPatch) -> None:
    """States with rotary keys are moved twice as far."""
    sound = rotary.move

    def faulty(maps: Affine, angles: Angles, **options: Any) -> Affine:
        return sound(sound(maps, angles, **options), angles, **options)

    patch.setattr(linear_attention, "move", faulty)


LINEAR = {"drop-transition": drop_transition, "drop-end-state": drop_end_state, "seam+1": FAULTS["seam+1"]}
PLACE = {"position+1": FAULTS["position+1"], "no-rotation": FAULTS["no-rotation"]}
MOVES = {"stay-in-place": stay_in_place, "move-too-far": move_too_far}
CONV = {"empty-tail": FAULTS["empty-tail"]}
APPLYING = {
    "next": LINEAR | CONV | PLACE,
    "moe": LINEAR | CONV | PLACE,
    "olmo": LINEAR | CONV,
    "olmo-rope": PLACE,
    "ring": LINEAR | PLACE | MOVES,
    "ring-latent": LINEAR | PLACE | MOVES,
}
CASES = [
    pytest.param(name, fault, id=f"{name}-{label}") for name, some in APPLYING.items() for label, fault in some.items()
]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_cached_equals_uncached_bites(
    name: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    bench: Make,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    for dtype in DTYPES:
        error = bench(name, dtype).ask(few_segments()).error_to(checkpoints.expected(name, few_segments()))
        assert error > 100 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", YARN)
def test_one_mixing_layer_with_yarn_equals_everything_live(name: str, bench: Make) -> None:
    pieces = many_segments()
    for dtype in DTYPES:
        whole = bench(name, dtype).ask([Piece(tuple(flat(pieces)), None)])
        engine = bench(name, dtype)
        for answer in (engine.ask(pieces), engine.ask(pieces)):
            positions = sorted(answer.logits)
            assert relative(answer.rows(), whole.rows(positions)) < TOLERANCE[dtype]
            assert "live" in answer.outcomes and len(positions) < len(flat(pieces)) / 2


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, fault) for name in YARN[:1] for fault in (stay_in_place, drop_transition)),
        *((name, FAULTS[fault]) for name in YARN[1:] for fault in ("no-rotation", "position+1")),
        *((name, stay_in_place) for name in ("ring-linear", "ring-latent-linear")),
    ],
)
def test_one_mixing_layer_bites(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = many_segments()
    whole = bench(name).ask([Piece(tuple(flat(pieces)), None)])
    fault(monkeypatch)
    answer = bench(name).ask(pieces)
    assert relative(answer.rows(), whole.rows(sorted(answer.logits))) > 100 * TOLERANCE["float32"]


# -- order, place, pieces, neighbours --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_any_order_equals_the_reference_on_that_order(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine, answers = bench(name), []
    for order in permutations([seg(30, 1), seg(9, 2), seg(21, 3)]):
        pieces = [live(3, 4), *order, live(5, 5)]
        answer = engine.ask(pieces)
        assert answer.error_to(checkpoints.expected(name, pieces)) < TOLERANCE["float64"]
        answers.append(answer.rows()[-1])
    assert all(relative(a, b) > 100 * TOLERANCE["float32"] for a, b in combinations(answers, 2)), "order must matter"
    assert engine.num_segments == 3, "no order was encoded again"


@pytest.mark.parametrize("name", ["next", "olmo-rope", "ring"])
def test_far_places_are_exact(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    segment = seg(30, 1)
    pieces = [live(20, 2), *[segment] * 40, live(4, 3)]
    for dtype in DTYPES:
        engine = bench(name, dtype)
        assert engine.ask(pieces).error_to(checkpoints.expected(name, pieces)) < TOLERANCE[dtype]
        assert engine.num_segments == 1


def test_only_ring_moves_states(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    sound = rotary.move
    for name in FAMILIES:

        def counted(maps: Affine, angles: Angles, name: str = name, **options: Any) -> Affine:
            moved.append(name)
            return sound(maps, angles, **options)

        monkeypatch.setattr(linear_attention, "move", counted)
        bench(name).ask(few_segments())
    assert set(moved) == {"ring", "ring-latent"}


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_and_batches_equal_one_pass_alone(name: str, bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    prompts = [[live(9, 7), seg(30, 2), seg(12, 5), live(4, 8)], [live(70, 9)], [seg(41, 3), live(2, 1)]]
    for dtype in DTYPES:
        alone = [bench(name, dtype).ask(prompt, max_tokens=3) for prompt in prompts]
        for pieces in (8192, 63, 9, 2) if dtype == "float64" else (7,):
            engine = bench(name, dtype, max_step_tokens=pieces)
            answers = [engine.add(prompt, max_tokens=3) for prompt in prompts]
            engine.run()
            for answer, expected in zip(answers, alone, strict=True):
                assert relative(answer.rows(), expected.rows(sorted(answer.logits))) < TOLERANCE[dtype]
                assert answer.ids == expected.ids or dtype == "float32"


def forget_states(patch: pytest.MonkeyPatch) -> None:
    """A continued prompt begins from nothing."""
    sound = linear_attention._scan

    def faulty(mixer, x, batch, pool, layer, moves):  # type: ignore[no-untyped-def]
        pool.states[layer].zero_()
        return sound(mixer, x, batch, pool, layer, moves)

    patch.setattr(linear_attention, "_scan", faulty)


def forget_tails(patch: pytest.MonkeyPatch) -> None:
    """A continued prompt's convolution begins from nothing."""
    sound = conv.convolve_rows

    def faulty(x, weight, batch, pool, layer):  # type: ignore[no-untyped-def]
        pool.tails[layer].zero_()
        return sound(x, weight, batch, pool, layer)

    patch.setattr(gated_delta_net, "convolve_rows", faulty)


@pytest.mark.parametrize(
    ("name", "fault"),
    [*((name, forget_states) for name in FAMILIES), *((name, forget_tails) for name in ("next", "moe", "olmo"))],
)
def test_pieces_bite(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    whole = bench(name).ask([live(70, 9)])
    fault(monkeypatch)
    answer = bench(name, max_step_tokens=8).ask([live(70, 9)])
    assert relative(answer.rows(), whole.rows()) > 100 * TOLERANCE["float32"]

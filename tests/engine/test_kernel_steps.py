"""Steps that are planned for kernels compute what plain steps do: on a CPU by the kernels' references, on a GPU by the
kernels themselves, and there from recorded graphs too.

Truth is the float64 reference, as for plain steps. Kernels keep float32 states, so the tolerance is float32's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine import kernel_batch
from hypic.engine.chain import Chain
from hypic.engine.engine import Engine
from hypic.engine.layers import dense
from hypic.engine.layers.dense import alike
from hypic.engine.rehearsal import Limits, rehearse
from hypic.engine.runner import Runner
from hypic.engine.task import Task, Vocabulary
from hypic.errors import ConfigError
from hypic.types import SamplingParams
from hypic_kernels import delta
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.faults import FAULTS, cases
from tests.engine.harness import Bench
from tests.engine.models.test_every_family import BUILDERS
from tests.engine.prompts import POLICY, Pieces, few_segments, live, many_segments, seg

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODELS = ["qwen", "qwen-wide", "qwen-conv-2", "qwen-linear", "qwen-attention", "minimax", "minimax-partial"]
LIMIT = TOLERANCE["float32"]
Make = Callable[..., Bench]


@pytest.fixture(scope="session")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoints]:
    made: dict[str, Checkpoints] = {}

    def checkpoints_on(device: str) -> Checkpoints:
        return made.setdefault(device, Checkpoints(lambda name: tmp_path_factory.mktemp(name), device))

    return checkpoints_on


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_cold_warm_and_decoded_rows_equal_the_reference(
    name: str, device: str, everywhere: Callable[[str], Checkpoints]
) -> None:
    known = everywhere(device)
    bench, pieces = Bench(known.runner(name, "float32"), kernels="on"), many_segments()
    cold, warm = bench.ask(pieces, max_tokens=4), bench.ask(pieces, max_tokens=4)
    expected = known.expected(name, pieces, generated=cold.ids[:-1])
    assert cold.error_to(expected) < LIMIT and warm.error_where_run(expected) < LIMIT
    assert set(cold.outcomes) == {"encoded", "live"} and set(warm.outcomes) == {"hit", "live"}
    bench.assert_sound()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen", "qwen-attention", "minimax-partial"])
def test_chains_that_are_run_whole_equal_the_reference(
    name: str, device: str, everywhere: Callable[[str], Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours of one length are one dense product. Segments of lengths that differ stand between such of one."""
    monkeypatch.setattr(kernel_batch, "MIN_DENSE_TOKENS", 16)
    found: list[list[int]] = []

    def noted(spans: Sequence[slice]) -> list[tuple[slice, int]]:
        groups = alike(spans)
        found.append([(span.stop - span.start) // length for span, length in groups])
        return groups

    monkeypatch.setattr(dense, "alike", noted)
    known = everywhere(device)
    bench = Bench(known.runner(name, "float32"), kernels="on")
    pieces = [seg(40, 1), seg(40, 2), seg(40, 3), seg(57, 4), seg(40, 5), live(9, 6)]
    cold = bench.ask(pieces, max_tokens=2)
    assert cold.error_to(known.expected(name, pieces, generated=cold.ids[:-1])) < LIMIT
    assert [3, 1, 1] in found
    whole = bench.ask([live(90, 7)], max_tokens=2)
    assert whole.error_to(known.expected(name, [live(90, 7)], generated=whole.ids[:-1])) < LIMIT


def test_a_chain_that_sees_its_neighbour_shows(
    everywhere: Callable[[str], Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one length taken for one of twice the length."""
    monkeypatch.setattr(kernel_batch, "MIN_DENSE_TOKENS", 16)

    def wrong(spans: Sequence[slice]) -> list[tuple[slice, int]]:
        return [(span, span.stop - span.start) for span, _ in alike(spans)]

    monkeypatch.setattr(dense, "alike", wrong)
    known, pieces = everywhere("cpu"), [seg(40, 1), seg(40, 2), live(9, 3)]
    bench = Bench(known.runner("qwen", "float32"), kernels="on")
    cold = bench.ask(pieces, max_tokens=2)
    assert cold.error_to(known.expected("qwen", pieces, generated=cold.ids[:-1])) > 100 * LIMIT


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bailing_hybrid", "bailing_moe_linear-2.5", "kimi_linear"])
def test_chains_that_are_run_whole_by_latent_attention_equal_plain_torch(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plain torch reads from the pool is expanded from the rows; a control: two of one length taken for one."""
    folder, groups = BUILDERS[name](tmp_path), list[int]()
    loaded = Runner.load(folder, EngineConfig(device=device, dtype="float32", memory="64MiB", graphs=False))
    pieces = [seg(40, 1), seg(40, 2), seg(40, 3), seg(57, 4), seg(40, 5), live(9, 6)]
    expected = Bench(loaded, kernels="off").ask(pieces)
    monkeypatch.setattr(kernel_batch, "MIN_DENSE_TOKENS", 16)

    def noted(spans: Sequence[slice]) -> list[tuple[slice, int]]:
        groups.extend(length for _, length in alike(spans))
        return alike(spans)

    def wrong(spans: Sequence[slice]) -> list[tuple[slice, int]]:
        return [(span, span.stop - span.start) for span, _ in alike(spans)]

    for grouped in (noted, wrong):
        monkeypatch.setattr(dense, "alike", grouped)
        found = Bench(loaded, kernels="on").ask(pieces)
        positions = sorted(found.logits)
        error = relative(found.rows(positions), expected.rows(positions))
        assert error < LIMIT if grouped is noted else error > 100 * LIMIT
    assert {40, 57} <= set(groups)
    kinds = loaded.model.dense_heads
    assert len(kinds) == 1 and kinds[0].num_heads == kinds[0].num_kv_heads, "heads of which plans are made"


def test_only_steps_that_encode_lift_every_chunk(
    everywhere: Callable[[str], Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short rows between stored maps are scanned; chunks have maps where interiors are folded from them."""
    called: list[str] = []
    for name in ("lift", "scan"):
        whole = getattr(delta, name)

        def noted(*given: Any, name: str = name, whole: Callable[..., Any] = whole, **named: Any) -> Any:
            called.append(name)
            return whole(*given, **named)

        monkeypatch.setattr(delta, name, noted)
    bench, pieces = Bench(everywhere("cpu").runner("qwen", "float32"), kernels="on"), many_segments()
    bench.ask(pieces)
    assert "lift" in called
    called.clear()
    bench.ask(pieces)
    assert set(called) == {"scan"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_step_tokens", [16, 50])
@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_steps_in_pieces_equal_the_reference(
    name: str, max_step_tokens: int, device: str, everywhere: Callable[[str], Checkpoints]
) -> None:
    known = everywhere(device)
    bench = Bench(known.runner(name, "float32"), kernels="on", max_step_tokens=max_step_tokens)
    pieces = [*many_segments(), seg(700, 9), live(30, 8)]
    first, other = bench.add(pieces, max_tokens=3), bench.add([live(90, 5), seg(33, 6), live(4, 7)], max_tokens=3)
    bench.run()
    assert first.error_to(known.expected(name, pieces, generated=first.ids[:-1])) < LIMIT
    assert other.is_over and len(other.ids) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [{"compose": "addition"}, {"compose": "last"}, {"rotate": False}, {"seam": 3}], ids=str
)
@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_policies_equal_the_reference(
    name: str, settings: dict[str, object], device: str, everywhere: Callable[[str], Checkpoints]
) -> None:
    known, policy = everywhere(device), POLICY.with_(**settings)
    bench = Bench(known.runner(name, "float32"), kernels="on")
    for _ in ("cold", "warm"):
        answer = bench.ask(few_segments(), policy)
        assert answer.error_where_run(known.expected(name, few_segments(), policy)) < LIMIT


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "fault"), cases(["qwen", "minimax"], has_short=True))
def test_a_fault_shows(
    name: str, fault: str, device: str, everywhere: Callable[[str], Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = everywhere(device)
    FAULTS[fault](monkeypatch)
    answer = Bench(known.runner(name, "float32"), kernels="on").ask(many_segments())
    assert answer.error_to(known.expected(name, many_segments())) > 100 * LIMIT


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_family_runs_alike_by_kernels_and_in_plain_torch(
    name: str, device: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = BUILDERS[name](tmp_path_factory.mktemp(name))
    settings = {"device": device, "dtype": "float32", "memory": "64MiB", "max_context": 4096, "max_running": 4}
    loaded = Runner.load(folder, EngineConfig(**settings, graphs=False))  # type: ignore[arg-type]
    plain, kernels = Bench(loaded, kernels="off"), Bench(loaded, kernels="on")
    for pieces in (few_segments(), few_segments(), [live(3, 9), *few_segments()], [seg(530, 8), live(9, 7)]):
        expected, found = (bench.ask(pieces, max_tokens=3) for bench in (plain, kernels))
        assert found.outcomes == expected.outcomes
        positions = sorted(set(found.logits) - {max(found.logits), max(found.logits) - 1})
        assert relative(found.rows(positions), expected.rows(positions)) < LIMIT


def rows_chosen_from(loaded: Runner, prompts: Sequence[Pieces], num_tokens: int) -> dict[str, list[Tensor]]:
    """Logits that every request's tokens were chosen from, all requests asked at once."""
    engine, found = Engine(loaded, Vocabulary(str), 8, 8192, None), {}
    settle = engine.settle

    def noted(work: Any, result: Any) -> Any:
        wanting = [run.request.id for run in work.requests if run.chain.wants_logits]
        for id, row in zip(wanting, result.logits, strict=True):
            found.setdefault(id, []).append(row.clone())
        return settle(work, result)

    engine.settle = noted  # type: ignore[method-assign]
    for number, pieces in enumerate(prompts):
        engine.add(Task(str(number), list(pieces), SamplingParams(max_tokens=num_tokens, ignore_eos=True), POLICY))
    while engine.has_work:
        engine.step()
    engine.store.clear()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_recorded_steps_compute_what_plain_steps_do(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = BUILDERS[name](tmp_path_factory.mktemp(name))
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "memory": "256MiB", "max_context": 4096}
    recorded = Runner.load(folder, EngineConfig(**settings, max_running=8))
    plain = Runner.load(folder, EngineConfig(**settings, max_running=8, kernels="off"))
    if recorded.graphs is None:
        assert not recorded.model.is_recordable, "only a step that asks the host for something is not recorded"
        pytest.skip("its full attention is no kernel's, or its experts are run in turn")
    prompts = [many_segments(), few_segments(), [live(33, 4)], [seg(90, 5), live(70, 6)]]
    for asked in (prompts, prompts[:1], list(reversed(prompts))):
        expected, found = (rows_chosen_from(loaded, asked, 4) for loaded in (plain, recorded))
        for id, rows in expected.items():
            assert relative(found[id][0], rows[0]) < LIMIT
    assert recorded.graphs.num_replays > 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen", "minimax", "qwen-linear", "qwen-attention"])
def test_a_rehearsal_leaves_nothing_behind(name: str, device: str, everywhere: Callable[[str], Checkpoints]) -> None:
    known = everywhere(device)
    bench = Bench(known.runner(name, "float32"), kernels="on")
    steps: list[int] = []

    def run(chains: Sequence[Chain]) -> None:
        steps.append(sum(chain.num_tokens for chain in chains))
        assert not bench.engine.runner.run(chains).broken

    geometry = bench.engine.runner.geometry
    assert geometry is not None, "nothing is rehearsed without kernels"
    rehearse(run, bench.pool, Limits.of(geometry, 3000, 5))
    bench.assert_back_to_start()
    assert max(steps) == 3000 and {1, 2, 4, 5, 512, 1024, 2048} <= set(steps)
    pieces = few_segments()
    assert bench.ask(pieces).error_to(known.expected(name, pieces)) < LIMIT


def test_a_rehearsal_without_room_for_any_step_says_so(everywhere: Callable[[str], Checkpoints]) -> None:
    bench = Bench(everywhere("cpu").runner("qwen", "float32"), kernels="on")
    geometry = bench.engine.runner.geometry
    assert geometry is not None

    def run(chains: Sequence[Chain]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(ConfigError, match="ran out of memory in a step: the pool holds .* lower memory="):
        rehearse(run, bench.pool, Limits.of(geometry, 3000, 5))
    bench.assert_back_to_start()

"""Runs: chains of long rows alone, whose state a kernel carries itself; beside chains that are composed.

On a CPU the kernel's reference runs, so what is proved here is the planning: which chains are runs, where their
parts begin, from which state each begins, and that what they fold is what the plain engine would have folded. Truth is
the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.kernel_plan import Runs
from hypic.engine.layers import linear_attention, linear_kernels
from hypic.engine.pool import Pool
from hypic.engine.scan_plan import ScanPlan
from hypic.errors import NonFiniteOutput
from hypic_kernels import delta
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import Pieces, live, seg

LIMIT = TOLERANCE["float32"]
CPU = torch.device("cpu")
MODELS = ["qwen", "qwen-wide", "qwen-conv-2", "qwen-linear"]
Noted = list[Runs]


# -- steps against the reference ---------------------------------------------------------------------------------------


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """The runs of every layer's call."""
    found: Noted = []
    sound = linear_kernels.run_all

    def run_all(mixer: Any, tokens: Any, runs: Runs, *rest: Any) -> None:
        found.append(runs)
        sound(mixer, tokens, runs, *rest)

    monkeypatch.setattr(linear_kernels, "run_all", run_all)
    yield found


def long_segments() -> Pieces:
    """Segments around chunks' borders, one of them twice, two too short to be runs, and long live text."""
    lengths = (100, 137, 72, 200, 100, 20)
    pieces = [live(75, 1, ends=True), *(seg(length, length) for length in lengths)]
    return [*pieces, live(70, 2)]


@pytest.mark.parametrize("name", MODELS)
def test_cold_and_warm_prompts_equal_the_reference(name: str, checkpoints: Checkpoints, noted: Noted) -> None:
    bench, pieces = Bench(checkpoints.runner(name, "float32"), kernels="on"), long_segments()
    cold, warm = bench.ask(pieces, max_tokens=4), bench.ask(pieces, max_tokens=4)
    expected = checkpoints.expected(name, pieces, generated=cold.ids[:-1])
    assert cold.error_to(expected) < LIMIT and warm.error_where_run(expected) < LIMIT
    assert max(runs.rows.num_folds for runs in noted) == 3, "others are too short"
    bench.assert_sound()


@pytest.mark.parametrize("max_step_tokens", [64, 150, 300])
@pytest.mark.parametrize("name", ["qwen", "qwen-wide"])
def test_interiors_in_pieces_equal_the_reference(
    name: str, max_step_tokens: int, checkpoints: Checkpoints, noted: Noted
) -> None:
    bench = Bench(checkpoints.runner(name, "float32"), kernels="on", max_step_tokens=max_step_tokens)
    pieces = [live(3, 1), seg(400, 5), seg(530, 6), live(90, 2)]
    first, other = bench.add(pieces, max_tokens=2), bench.add([live(200, 3), seg(90, 4), live(60, 7)], max_tokens=2)
    bench.run()
    assert first.error_to(checkpoints.expected(name, pieces, generated=first.ids[:-1])) < LIMIT
    assert other.is_over and any(runs.is_continued for runs in noted)


@pytest.mark.parametrize("name", ["qwen", "qwen-linear"])
def test_entries_of_runs_are_those_of_plain_steps(name: str, checkpoints: Checkpoints, noted: Noted) -> None:
    loaded, pieces = checkpoints.runner(name, "float32"), long_segments()
    for max_step_tokens in (8192, 100):
        benches = [Bench(loaded, kernels=kernels, max_step_tokens=max_step_tokens) for kernels in ("on", "off")]
        for bench in benches:
            bench.ask(pieces)
        for piece in (seg(100, 100), seg(137, 137), seg(200, 200), seg(20, 20)):
            found, expected = (bench.contents(piece) for bench in benches)
            assert max(relative(found[name], expected[name]) for name in expected) < LIMIT
    assert noted


def test_a_conversation_of_long_turns_from_snapshots(checkpoints: Checkpoints, noted: Noted) -> None:
    loaded, pieces = checkpoints.runner("qwen", "float32"), [live(90, 1, ends=True)]
    bench = Bench(loaded, kernels="on")
    for turn in range(3):
        pieces = [*pieces, live(60, 10 + turn, ends=True), live(55, 20 + turn, ends=True)]
        answer = bench.ask([*pieces, live(2, 3)], max_tokens=2)
        expected = checkpoints.expected("qwen", [*pieces, live(2, 3)], generated=answer.ids[:-1])
        assert answer.error_where_run(expected) < LIMIT
    assert max(runs.rows.num_marks for runs in noted) > 0 and bench.engine.store.stats.num_entries > 3


@pytest.mark.parametrize("name", ["qwen"])
def test_runs_stand_beside_composed_and_decoded_chains(name: str, checkpoints: Checkpoints, noted: Noted) -> None:
    bench = Bench(checkpoints.runner(name, "float32"), kernels="on", max_step_tokens=260)
    prompts = [
        [seg(90, 5), live(4, 6)],
        [live(300, 1)],
        [live(9, 8), seg(90, 5), seg(120, 9), live(70, 7)],
        [live(80, 2, ends=True), live(64, 3, ends=True), live(50, 4)],
    ]
    mixed = 0
    answers = [bench.add(prompts[0], max_tokens=12)]
    bench.step()
    answers += [bench.add(pieces, max_tokens=3) for pieces in prompts[1:]]
    while bench.engine.has_work:
        bench.step()
        plan = bench._last()[0].kernels
        assert plan is not None
        mixed += plan.runs is not None and len(plan.chunks) > 0
    for pieces, answer in zip(prompts, answers, strict=True):
        expected = checkpoints.expected(name, pieces, generated=answer.ids[:-1])
        assert answer.error_where_run(expected) < LIMIT
    assert mixed > 1 and noted
    bench.assert_sound()


def test_a_run_that_breaks_breaks_alone(checkpoints: Checkpoints, noted: Noted) -> None:
    loaded = checkpoints.runner("qwen", "float32")
    bench, good, bad = Bench(loaded, kernels="on", max_step_tokens=260), live(200, 1), live(190, 2)
    sound, broken = bench.add([good], max_tokens=3), bench.add([bad], max_tokens=3)
    bench.step()
    running = bench.engine.scheduler.running[bench.id_of(broken)]
    assert running.held is not None
    for states in bench.pool.states:
        states[running.held.state_slot] = torch.nan
    bench.run()
    assert isinstance(broken.error, NonFiniteOutput) and noted
    assert sound.error_to(checkpoints.expected("qwen", [good], generated=sound.ids[:-1])) < LIMIT
    bench.assert_sound()


@pytest.mark.parametrize("is_spoiled", [False, True], ids=["sound", "read all the same"])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_what_others_left_in_slots_is_not_read(
    kernels: str, is_spoiled: bool, checkpoints: Checkpoints, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interiors that are begun and that go on, in one step, in slots that held something else."""
    bench = Bench(checkpoints.runner("qwen", "float32"), kernels=kernels, max_step_tokens=300)
    for tensor in (*bench.pool.states, *bench.pool.tails, *bench.pool.transitions):
        tensor[tensor.shape[0] - bench.pool.num_transitions :] = torch.nan
    if is_spoiled:
        monkeypatch.setattr(Affine, "where", lambda self, flags: self)
        sound = linear_attention._continue

        def continue_all(folded: Affine, plan: ScanPlan, pool: Pool, layer: int) -> None:
            sound(folded, replace(plan, continued=torch.arange(len(plan.fold_states))), pool, layer)

        monkeypatch.setattr(linear_attention, "_continue", continue_all)
    pieces = [live(3, 1), seg(400, 5), seg(150, 6), live(90, 2)]
    answer = bench.add(pieces)
    bench.run()
    if is_spoiled:
        assert answer.error
    else:
        assert answer.error_to(checkpoints.expected("qwen", pieces)) < LIMIT
    assert not noted or any(0 < int(runs.fold_begun.sum()) < len(runs.fold_begun) for runs in noted)


# -- what must show ----------------------------------------------------------------------------------------------------

Spoil = Callable[[pytest.MonkeyPatch], None]


def _spoiled_maps(spoil: Callable[[Tensor, tuple[Tensor, Tensor], Tensor], Tensor]) -> Spoil:
    """``spoil`` takes what was kept, transitions, and where folds begin, and gives what is settled instead."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        sound = delta.settle

        def faulty(kept: Tensor, transitions: tuple[Tensor, Tensor], ends: Tensor, *rest: Any) -> None:
            sound(spoil(kept, transitions, ends[:, 0].long()), transitions, ends, *rest)

        patch.setattr(delta, "settle", faulty)

    return inject


def _lost(kept: Tensor, transitions: tuple[Tensor, Tensor], starts: Tensor) -> Tensor:
    transitions[0][transitions[1].long()] = 0.0
    return kept


def _spoiled_runs(spoil: Callable[[Runs], Runs]) -> Spoil:
    def inject(patch: pytest.MonkeyPatch) -> None:
        sound = linear_kernels.run_all

        def faulty(mixer: Any, tokens: Any, runs: Runs, *rest: Any) -> None:
            sound(mixer, tokens, spoil(runs), *rest)

        patch.setattr(linear_kernels, "run_all", faulty)

    return inject


SPOILED: dict[str, Spoil] = {
    "transition-lost": _spoiled_maps(_lost),
    "seam-dropped": _spoiled_maps(lambda kept, _, starts: kept.index_fill(0, starts, 0.0)),
    "folds-shifted": _spoiled_runs(lambda runs: replace(runs, fold_ends=runs.fold_ends.roll(1, 0))),
    "places-without-token-filled": _spoiled_runs(
        lambda runs: replace(runs, rows=replace(runs.rows, tokens=runs.rows.tokens.clamp(min=0)))
    ),
    "done-forgotten": _spoiled_runs(lambda runs: replace(runs, is_continued=False)),
    "state-not-kept": _spoiled_runs(
        lambda runs: replace(runs, write_slots=runs.write_slots[:0], write_places=runs.write_places[:0])
    ),
}


@pytest.mark.parametrize("name", ["qwen"])
@pytest.mark.parametrize(
    ("fault", "max_step_tokens"),
    [(fault, 150 if fault in ("done-forgotten", "state-not-kept") else 8192) for fault in SPOILED],
)
def test_a_fault_in_runs_shows(
    name: str, fault: str, max_step_tokens: int, checkpoints: Checkpoints, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [*long_segments()[:-1], seg(300, 8), live(70, 2)]
    SPOILED[fault](monkeypatch)
    bench = Bench(checkpoints.runner(name, "float32"), kernels="on", max_step_tokens=max_step_tokens)
    answer = bench.add(pieces)
    bench.run()
    assert noted and (answer.error or answer.error_to(checkpoints.expected(name, pieces)) > 100 * LIMIT)

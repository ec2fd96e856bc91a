"""Runs: chains of long rows alone, whose state a kernel carries itself; beside chains that are composed.

On a CPU the kernel's reference runs, so what is proved here is the planning: which chains are runs, where their
parts begin, from which state each begins, and that what they fold is what the plain engine would have folded. Truth is
the float64 reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.engine.affine import Affine
from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.kernel_batch import Geometry, packed
from hypic.engine.kernel_choice import geometry_of, path_of
from hypic.engine.kernel_plan import Runs
from hypic.engine.layers import linear_attention, linear_kernels
from hypic.engine.pool import Pool
from hypic.engine.run_arrays import MOST_PARTS, RunCounts, RunPart, parts_of, run_arrays, runs_of
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


# -- the plan ----------------------------------------------------------------------------------------------------------


def row(num_tokens: int, snapshot: int | None = None, fold: FoldInto | None = None) -> RowLink:
    return RowLink([0] * num_tokens, 0, np.arange(num_tokens), snapshot, fold)


def chain(*links: RowLink | InteriorLink, initial: int = 0, final: int = 1) -> Chain:
    return Chain(links, np.arange(8), initial, final)


INTERIOR = InteriorLink(7, 2, 40, 3)


def test_runs_are_chains_of_long_rows_alone() -> None:
    long, short, warm, encode = chain(row(48)), chain(row(47)), chain(row(90), INTERIOR), chain(row(8), row(88))
    chains = [short, long, warm, encode, chain(row(8), row(87))]
    assert runs_of(chains, 0) == (1, 3)
    assert runs_of(chains, 144) == (1, 3) and runs_of(chains, 145) == () and runs_of(chains, None) == ()


def test_a_chain_of_many_kept_rows_is_no_run() -> None:
    few = chain(*(row(100, snapshot=5 + n) for n in range(MOST_PARTS)))
    many = chain(*(row(100, snapshot=5 + n) for n in range(MOST_PARTS + 1)))
    assert runs_of([few, many], 0) == (0,)


def test_rows_between_which_nothing_is_kept_are_one() -> None:
    fold = FoldInto(5, 6, 0)
    links = chain(row(3), row(4), row(5, snapshot=9), row(6), row(7, fold=fold), row(8, fold=fold), row(2), row(1))
    assert parts_of(links, 100) == [
        RunPart(100, 12, None, (9,)),
        RunPart(112, 6, None, ()),
        RunPart(118, 7, fold, ()),
        RunPart(125, 8, fold, ()),
        RunPart(133, 3, None, (1,)),
    ]
    assert parts_of(chain(row(3), row(4, snapshot=9)), 0) == [RunPart(0, 7, None, (9, 1))]


def test_parts_of_runs_begin_a_chunk_and_states_between_them_are_kept() -> None:
    first = chain(row(70, snapshot=9), row(3), initial=4, final=11)
    second = chain(row(8), row(130, fold=FoldInto(5, 6, 64)), row(1), initial=0, final=12)
    third = chain(row(60, fold=FoldInto(7, 8, 0)), initial=0, final=13)
    found, counts = run_arrays([first, second, third], [10, 100, 300])
    assert counts == RunCounts(4, True)
    arrays = {name: values.tolist() for name, values in found.items()}
    assert arrays["run_initial"] == [4, 0, 0] and arrays["run_cu_seqlens"] == [0, 131, 388, 448]
    filled = [[*range(10, 80)] + [-1] * 58, [80, 81, 82], [*range(100, 108)] + [-1] * 56]
    assert arrays["run_tokens"] == sum([*filled, [*range(108, 238)] + [-1] * 62, [238], [*range(300, 360)]], [])
    assert arrays["run_chunk_indices"] == [[0, 0], [0, 1], [0, 2], *([1, n] for n in range(5)), [2, 0]]
    assert arrays["run_chunk_offsets"] == [0, 3, 8, 9]
    assert arrays["run_marks"] == [-1, -1, 0, -1, 1, -1, -1, 2, 3]
    assert arrays["run_folds"] == [[4, 7], [8, 9]] and arrays["run_fold_ends"] == [[1, 2], [3, 6]]
    assert (arrays["run_fold_states"], arrays["run_fold_transitions"]) == ([5, 7], [6, 8])
    assert (arrays["run_write_places"], arrays["run_write_slots"]) == ([0, 4, 5, 6], [9, 11, 12, 13])


def test_an_interior_in_two_rows_is_one_fold() -> None:
    fold = FoldInto(5, 6, 0)
    links = (row(8), row(90, snapshot=9, fold=fold), row(70, fold=FoldInto(5, 6, 90)), row(50, fold=FoldInto(7, 8, 0)))
    found, counts = run_arrays([chain(*links)], [0])
    assert counts == RunCounts(3, False)
    assert found["run_folds"].tolist() == [[1, 5], [5, 6]] and found["run_fold_ends"].tolist() == [[0, 2], [2, 3]]
    assert found["run_fold_states"].tolist() == [5, 7]
    assert (found["run_write_places"].tolist(), found["run_write_slots"].tolist()) == ([1, 3], [9, 1])


def test_maps_are_planned_of_the_other_chains_alone() -> None:
    geometry = Geometry(4, True, False, min_run_tokens=0)
    decode, run = chain(row(1), initial=3, final=3), chain(row(100), final=4)
    warm = chain(row(8), INTERIOR, row(20), final=5)
    made = packed([decode, run, warm], geometry)
    tokens = [0, *range(101, 129)]
    assert made.runs == RunCounts(0, False), "other chains stand on both sides of the run"
    chunks = made.found["chunks"]
    assert sorted(chunks[chunks < 129].tolist()) == tokens and chunks.shape[1] == 16
    assert chunks.reshape(-1)[made.found["token_chunks"]].tolist() == tokens
    assert made.found["initial_slots"].tolist() == [3, 0] and made.found["write_slots"].tolist() == [3, 5]
    recorded = packed([decode, run, warm], geometry, [0, 0, 0])
    assert recorded.runs is None
    assert not any(name.startswith("run") for name in recorded.found)


def test_the_path_of_entries_says_what_computed_them(checkpoints: Checkpoints) -> None:
    model = checkpoints.runner("qwen", "float32").model
    geometry = geometry_of(model, model.layout, "on", CPU)
    assert geometry is not None and geometry.min_run_tokens == 0 and path_of(geometry, CPU) == "kernels on cpu"
    assert path_of(geometry, torch.device("cuda")) == "kernels and fla on cuda"
    decaying = checkpoints.runner("minimax", "float32").model
    other = geometry_of(decaying, decaying.layout, "on", CPU)
    assert other is not None and other.min_run_tokens is None
    assert path_of(other, torch.device("cuda")) == "kernels on cuda"


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

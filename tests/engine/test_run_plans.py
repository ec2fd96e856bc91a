"""Which chains are runs, where their parts begin, and what is planned of the other chains alone."""

from __future__ import annotations

import numpy as np
import torch

from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.kernel_batch import Geometry, packed
from hypic.engine.kernel_choice import geometry_of, path_of
from hypic.engine.run_arrays import MOST_PARTS, RunCounts, RunPart, parts_of, run_arrays, runs_of
from tests.engine.expected import Checkpoints

CPU = torch.device("cpu")


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

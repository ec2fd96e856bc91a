"""The bench measures what it says: its cases, its baseline, its layouts and its errors, on a small size and a CPU."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from hypic_kernels import available, interpreted
from hypic_kernels.attention import Chip, Choice, Config, HeadDims, bench, choose
from hypic_kernels.attention.bench import ALL_CASES as CASES
from hypic_kernels.attention.bench import Case, Gathered, Workload, warm
from hypic_kernels.attention.problem import Work
from hypic_kernels.trust import relative_error

SMALL = Case(HeadDims(2, 16, 16, 8), 2, (warm(2, 12, 2, 5), Work.last(7, 1), Work.last(6, 6)))
LATENT = Case(HeadDims(4, 8, 16, 8, is_latent=True), 1, SMALL.work)


def test_bytes_and_operations() -> None:
    case = CASES["decode-64"]
    assert case.num_bytes(torch.bfloat16) == 64 * 16384 * 2 * 512 * 2 + 64 * 16 * 512 * 2
    assert case.num_operations == 64 * 16384 * 2 * 512 * 16
    assert SMALL.num_tokens == 9 + 1 + 6 and SMALL.num_keys == 29 + 7 + 6
    assert Case(SMALL.dims, 2, (Work.last(3, 2),)).num_operations == 2 * (2 + 3) * 4 * 32


def test_a_warm_prompt_is_seams_and_tail() -> None:
    assert warm(2, 12, 2, 5) == Work(29, ((0, 2), (12, 2), (24, 5)))


@pytest.mark.parametrize("case", [SMALL, LATENT], ids=["plain", "latent"])
def test_the_baseline_is_right(case: Case) -> None:
    work = Workload.random(case, torch.float32, "cpu", num_layers=2)
    chains = Gathered.of(work.problem.plan, case.work)
    work.run_sdpa(0, chains)
    assert relative_error(work.out, work.problem.solve()) < 1e-5
    work.run_sdpa(1, chains)
    assert relative_error(work.out, work.problem.solve()) > 0.1


@pytest.mark.skipif(
    not (available() and interpreted()) or version("triton") < "3.7",
    reason="needs Triton 3.7 or newer with TRITON_INTERPRET=1",
)
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
def test_the_kernel_is_called_right() -> None:
    work = Workload.random(SMALL, torch.float32, "cpu", num_layers=2)
    work.run_kernel(0, work.problem.planned(4, 2), Config(16, 32, 4, 1), None)
    assert relative_error(work.out, work.problem.solve()) < 2e-6


@pytest.mark.parametrize("name", CASES)
def test_the_chosen_layout_is_measured_first(name: str) -> None:
    case, chip = CASES[name], Chip()
    chosen = choose(case.dims, torch.bfloat16, case.load(chip))
    found = bench.layouts(case, chosen, torch.bfloat16, chip, is_whole=False)
    assert found[0] == chosen and len(set(found)) == len(found) > 3
    assert all(
        choice.config.shared_bytes(case.dims, torch.bfloat16, chip.shared_bytes) <= chip.shared_bytes
        for choice in found
    )


def test_choices() -> None:
    """Many rows take large tiles; few programs take parts, many none."""

    def chosen(name: str) -> Choice:
        return choose(CASES[name].dims, torch.bfloat16, CASES[name].load(Chip()))

    assert chosen("decode-64").tile == 1 and chosen("decode-64").config.block_m == 16
    assert chosen("full").config.turns_once and not chosen("decode-64").config.turns_once
    assert chosen("warm").tile == 16 and chosen("warm").config.hopper and chosen("warm").num_lanes == 66
    assert chosen("warm-128").tile == 32 and chosen("warm-128").num_lanes == 33
    assert chosen("decode-1").num_lanes == 132 and not chosen("latent-warm").config.hopper


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "available", lambda: False)
    assert bench.main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err

"""What ``compose`` accepts and refuses, which twin it takes, and that importing it imports no Triton."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hypic_kernels.compose import NOT_WANTED, ZERO, Chains, ChainsError, Config, LayoutError, check, compose, fold
from hypic_kernels.compose.check import TOLERANCE, Variant, is_trusted
from hypic_kernels.compose.layout import candidates, default_config, pitch_of

KERNELS = Path(__file__).parents[2] / "kernels"


# -- chains --------------------------------------------------------------------------------------------------------


def test_chains_know_what_they_point_into() -> None:
    chains = Chains.of([0, 1, 3], [4, ZERO, 2], [1, 7, 0], [3, ZERO], source=[0, 1, 1], out_index=[NOT_WANTED, 5, 0])
    assert chains.num_chains == 2 and chains.num_elements == 3
    assert chains.num_transitions == (5, 3) and chains.num_states == (2, 8)
    assert chains.num_initial == 4 and chains.num_outputs == 6
    assert chains.elements.tolist() == [[0, 4, 1, -1], [1, -1, 7, 5], [1, 2, 0, 0]]


def test_every_element_is_wanted_unless_said_otherwise() -> None:
    assert Chains.of([0, 3], [0] * 3, [0] * 3, [0]).elements[:, 3].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_elements": [0, 1]}, "does not cut 2 elements"),
        ({"cu_elements": [1, 2]}, "must rise from 0"),
        ({"cu_elements": [0, 2, 1, 2], "initial_index": [0, 0, 0]}, "must rise from 0"),
        ({"initial_index": [0, 0]}, "one entry more than initial_index"),
        ({"state_index": [0]}, "state_index has 1 entries"),
        ({"source": [0]}, "source has 1 entries"),
        ({"state_index": [0, -1]}, "state_index holds -1"),
        ({"transition_index": [0, -3]}, "transition_index holds -3"),
        ({"initial_index": [-2]}, "initial_index holds -2"),
        ({"source": [0, 2]}, "source holds 2"),
        ({"source": [0, -1]}, "source holds -1"),
        ({"out_index": [-2, 0]}, "out_index holds -2"),
        ({"out_index": [1, 1]}, "twice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_chains_that_contradict_themselves(changed: dict[str, list[int]], message: str) -> None:
    good = {"cu_elements": [0, 2], "transition_index": [0, 0], "state_index": [0, 0], "initial_index": [0]}
    Chains.of(**good)  # type: ignore[arg-type]
    with pytest.raises(ChainsError, match=message):
        Chains.of(**{**good, **changed})  # type: ignore[arg-type]


# -- tensors -------------------------------------------------------------------------------------------------------


def arguments(**changed: object) -> dict[str, object]:
    """A call of ``compose`` on two elements of H = 2, K = 3, V = 4, one of each source."""
    chains = Chains.of([0, 2], [0, 1], [0, 1], [1], source=[0, 1])
    transitions, end_states = [torch.ones(2, 2, 3, 3)] * 2, [torch.ones(2, 2, 3, 4)] * 2
    made = {"chains": chains, "transitions": transitions, "end_states": end_states, "initial": torch.ones(2, 2, 3, 4)}
    return {**made, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"transitions": [torch.ones(2, 2, 3, 3)] * 3, "end_states": [torch.ones(2, 2, 3, 4)] * 3},
        {"transitions": [], "end_states": []},
        {"transitions": [torch.ones(2, 2, 3, 3)]},
        {"transitions": [torch.ones(2, 2, 3, 3)], "end_states": [torch.ones(2, 2, 3, 4)]},
        {"transitions": [torch.ones(2, 2, 3, 3), torch.ones(2, 2, 3)]},
        {"transitions": [torch.ones(2, 2, 3, 3), torch.ones(1, 2, 3, 3)]},
        {"transitions": [torch.ones(2, 2, 4, 4)] * 2},
        {"end_states": [torch.ones(2, 2, 3, 4), torch.ones(2, 2, 4, 3)]},
        {"end_states": [torch.ones(2, 2, 3, 4), torch.ones(1, 2, 3, 4)]},
        {"initial": torch.ones(1, 2, 3, 4)},
        {"before": torch.ones(1, 2, 3, 4)},
        {"before": torch.ones(2, 2, 3, 4, dtype=torch.float64)},
        {"before": torch.ones(2, 2, 4, 3).mT},
        {"final": torch.ones(0, 2, 3, 4)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_tensors_that_do_not_fit(changed: dict[str, object]) -> None:
    compose(**arguments())  # type: ignore[arg-type]
    with pytest.raises(ChainsError):
        compose(**arguments(**changed))  # type: ignore[arg-type]


def test_fold_refuses_wanted_states() -> None:
    made = arguments()
    with pytest.raises(ChainsError, match="2 are wanted"):
        fold(made["chains"], made["transitions"], made["end_states"])  # type: ignore[arg-type]


def test_given_outputs_are_used() -> None:
    before, final = torch.empty(2, 2, 3, 4), torch.empty(1, 2, 3, 4)
    returned = compose(**arguments(before=before, final=final))  # type: ignore[arg-type]
    assert returned[0] is before and returned[1] is final


@pytest.mark.parametrize(
    ("tensor", "pitch"),
    [
        (torch.empty(5, 2, 3, 4), 4),
        (torch.empty(5, 2, 3, 9)[..., :4], 9),
        (torch.empty(5, 2, 3, 9)[..., 5:], 9),
        (torch.empty(9, 2, 3, 4)[2:5], 4),
        (torch.empty(1, 1, 1, 4), 4),
        (torch.empty(5, 1, 1, 4), 4),
        (torch.empty(5, 2, 3), 3),
        (torch.empty(5, 2), 1),
        (torch.empty(0, 2, 3, 4), 4),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else str(value),
)
def test_pitch(tensor: Tensor, pitch: int) -> None:
    assert pitch_of(tensor) == pitch


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(5, 2, 4, 3).mT,
        torch.empty(5, 2, 3, 4)[::2],
        torch.empty(5, 4, 3, 4)[:, :2],
        torch.empty(1, 2, 3, 4).expand(5, -1, -1, -1),
        torch.empty(5, 2, 3, 8)[..., ::2],
        torch.empty(5, 4)[:, :2],
    ],
    ids=lambda tensor: str(tensor.stride()),
)
def test_rows_that_cannot_be_addressed(tensor: Tensor) -> None:
    with pytest.raises(LayoutError, match="contiguous"):
        pitch_of(tensor)


# -- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize("size", [1, 16, 24, 64, 96, 128])
def test_default_layouts_fit(size: int, precision: str) -> None:
    for room in (48 << 10, 99 << 10, 163 << 10, 227 << 10):
        config = default_config("dense", size, size, precision, 4, room)  # type: ignore[arg-type]
        assert config.fits(size, size)
        assert config.shared_bytes(size, 4) <= room or config.num_stages == 1


def test_more_room_loads_further_ahead() -> None:
    stages = [default_config("dense", 128, 128, "ieee", 4, room << 10).num_stages for room in (48, 99, 227)]
    assert stages == [1, 3, 5]


def test_candidates_fit() -> None:
    for size in (16, 32, 128):
        assert all(config.fits(size, size) for config in candidates("dense", size, size, "ieee"))
    assert candidates("dense", 128, 128, "tf32x3")
    assert not Config(64, 4, 3).fits(128, 32) and not Config(16, 4, 3, 4).fits(32, 32)


# -- trust ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def variant() -> Iterator[Variant]:
    pytest.importorskip("triton")
    is_trusted.cache_clear()
    f32 = torch.float32
    yield Variant(torch.device("cpu"), "dense", 16, 16, (f32,), (f32,), "ieee", None)
    is_trusted.cache_clear()


def test_a_wrong_kernel_is_not_used_and_said_once(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "measure", lambda variant: 3e-4)
    with pytest.warns(RuntimeWarning, match="relative error is 3.0e-04"):
        assert not is_trusted(variant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_trusted(variant)


def test_a_kernel_of_nan_is_not_used(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "measure", lambda variant: float("nan"))
    with pytest.warns(RuntimeWarning):
        assert not is_trusted(variant)


def test_a_kernel_that_cannot_be_built_is_not_used(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.errors import TritonError

    def fails(variant: Variant) -> float:
        raise TritonError("out of resources")

    monkeypatch.setattr(check, "measure", fails)
    with pytest.warns(RuntimeWarning, match="out of resources"):
        assert not is_trusted(variant)


def test_a_right_kernel_is_used_silently(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "measure", lambda variant: TOLERANCE / 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_trusted(variant)


def test_cpu_tensors_never_meet_the_interpreter_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    import hypic_kernels.compose as package

    def refused(variant: Variant) -> bool:
        raise AssertionError("the kernel was considered for CPU tensors")

    monkeypatch.setattr(package, "is_trusted", refused)
    compose(**arguments())  # type: ignore[arg-type]


def test_importing_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, hypic_kernels\n"
        "from hypic_kernels.compose import Chains, compose\n"
        "from hypic_kernels.compose import bench, check, problem\n"
        "p = problem.Problem.random('dense', 4, 4)\n"
        "compose(p.chains, p.transitions, p.end_states, p.initial)\n"
    )
    environment = {"PYTHONPATH": str(KERNELS), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)

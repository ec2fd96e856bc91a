"""Launches that are handed to a kernel without asking Triton get the kernel that Triton would take, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from hypic_kernels import ready

CPU = torch.empty(0).get_device()


def values() -> list[Any]:
    """Arguments of every kind that Triton tells apart, and some that it does not."""
    dtypes = torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64
    tensors = [torch.zeros(64, dtype=dtype)[start:] for dtype in dtypes for start in (0, 1, 16, 33)]
    edges = [0, 1, 2**31, 2**32, 2**62, -(2**31), -1]
    integers = sorted({edge + step for edge in edges for step in (-16, -15, -1, 0, 1, 2, 15, 16)})
    return [*tensors, torch.nn.Parameter(torch.zeros(8)), *integers, 0.0, 1.0, 16.0, -2.5, None]


def as_triton_sees_it(value: Any) -> tuple[Any, ...]:
    """Type and attribute, where a parameter is specialised and where it is not."""
    triton = pytest.importorskip("triton._C.libtriton")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    return tuple(triton.native_specialize_impl(backend, value, False, special, True) for special in (True, False))


def mixed_up(kind: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """Values that are one ``kind``, and two to Triton."""
    seen = [(value, kind(value), as_triton_sees_it(value)) for value in values()]
    return [(a, b) for (a, mine, theirs), (b, my, their) in product(seen, seen) if mine == my and theirs != their]


def kind_of(value: Any) -> Any:
    given = ready.given_of((value,), CPU)
    assert given is not None
    return given.kinds


def test_no_two_arguments_that_triton_tells_apart_are_taken_for_one() -> None:
    assert not mixed_up(kind_of)


@pytest.mark.parametrize("lost", ["alignment", "one", "width", "type"])
def test_the_comparison_sees_what_is_left_out(lost: str) -> None:
    def coarse(value: Any) -> Any:
        if isinstance(value, Tensor):
            return "tensor" if lost == "type" else value.dtype if lost == "alignment" else kind_of(value)
        if isinstance(value, int):
            value = 2 if lost == "one" and value == 1 else value
            return value % 16 == 0 and (value == 1) if lost == "width" else kind_of(value)
        return kind_of(value)

    assert mixed_up(coarse)


@pytest.mark.parametrize("value", [True, 2**63, "text", (1, 2)], ids=["bool", "u64", "str", "tuple"])
def test_what_is_not_known_is_left_to_triton(value: Any) -> None:
    assert ready.given_of((torch.zeros(1), value), CPU) is None


def test_a_tensor_elsewhere_is_left_to_triton() -> None:
    assert ready.given_of((torch.zeros(1),), CPU) is not None
    assert ready.given_of((torch.zeros(1),), 0) is None


class Kernel:
    """A function of Triton's that notes what it is asked for itself, ``asked``, and what its launchers are handed."""

    arg_names = ("x", "size", "scale", "BLOCK", "HAS")

    def __init__(self) -> None:
        self.params = [SimpleNamespace(is_constexpr=name.isupper()) for name in self.arg_names]
        self.pre_run_hooks: list[Any] = []
        self.asked: list[tuple[Any, ...]] = []
        self.handed: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **named: Any) -> Any:
            self.asked.append((grid, *arguments, *named.items()))
            number = len(self.asked)
            run = lambda *handed: self.handed.append((number, *handed))  # noqa: E731
            return SimpleNamespace(run=run, function=f"f{number}", packed_metadata=f"m{number}")

        return launch

    def run(self, x: Tensor, size: int = 5, block: int = 64, has: bool = True, **options: Any) -> None:
        constants = {"HAS": has, "BLOCK": block}  # in another order than the parameters
        ready.run(self, (3, 2), (x, size, 0.5), constants, {"num_warps": 4, **options}, CPU)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    active = SimpleNamespace(get_current_stream=lambda device: 77)
    monkeypatch.setattr(ready, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(ready, "_is_known", lambda: True)
    yield Kernel()
    ready._kept().clear()


def test_the_second_launch_is_handed_over_as_triton_would(kernel: Kernel) -> None:
    x, other = torch.zeros(64), torch.zeros(64)
    kernel.run(x)
    kernel.run(other, size=7)
    assert len(kernel.asked) == 1
    launch = (3, 2, 1, 77, "f1", "m1", None, None, None)
    assert kernel.handed == [(1, *launch, other.data_ptr(), 7, 0.5, 64, True)]


CHANGES: dict[str, dict[str, Any]] = {
    "alignment": {"x": torch.zeros(64)[1:]},
    "type": {"x": torch.zeros(64, dtype=torch.int32)},
    "one": {"size": 1},
    "aligned number": {"size": 32},
    "wide number": {"size": 2**40 + 1},
    "constant": {"block": 32},
    "flag": {"has": False},
    "warps": {"num_warps": 8},
    "option": {"launch_pdl": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_kernel_is_asked_for(kernel: Kernel, change: str) -> None:
    plain: dict[str, Any] = {"x": torch.zeros(64)}
    for options in (plain, plain | CHANGES[change], plain, plain | CHANGES[change]):
        kernel.run(**options)
    assert len(kernel.asked) == 2
    assert [handed[0] for handed in kernel.handed] == [1, 2], "each its own"


def test_two_kernels_are_kept_apart(kernel: Kernel) -> None:
    other, x = Kernel(), torch.zeros(64)
    for each in (kernel, other, kernel, other):
        each.run(x)
    assert len(kernel.asked) == len(other.asked) == len(kernel.handed) == len(other.handed) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_may_be_none_or_a_function(kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.run(torch.zeros(64))
    monkeypatch.setattr(knobs.runtime, name, None)
    kernel.run(torch.zeros(64))
    assert (len(kernel.asked), len(kernel.handed)) == (1, 1)
    monkeypatch.setattr(knobs.runtime, name, print)
    kernel.run(torch.zeros(64))
    assert (len(kernel.asked), len(kernel.handed)) == (2, 1)


@pytest.mark.parametrize("what", ["hook before", "hook at launch", "debug", "release"])
def test_what_is_unusual_goes_the_way_of_triton(kernel: Kernel, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    kernel.run(x)
    if what == "hook before":
        kernel.pre_run_hooks.append(print)
    elif what == "hook at launch":
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    elif what == "debug":
        monkeypatch.setattr(knobs.runtime, "debug", True)
    else:
        monkeypatch.setattr(ready, "_is_known", lambda: False)
    kernel.run(x)
    assert len(kernel.asked) == 2 and not kernel.handed


def test_a_kernel_with_other_parameters_is_never_kept(kernel: Kernel) -> None:
    kernel.arg_names = (*Kernel.arg_names, "DEFAULT")  # type: ignore[assignment]
    for _ in range(2):
        kernel.run(torch.zeros(64))
    assert len(kernel.asked) == 2


def test_a_kernel_with_an_argument_that_is_compiled_in_is_never_kept(kernel: Kernel) -> None:
    kernel.params[1].is_constexpr = True
    for size in (5, 7):
        kernel.run(torch.zeros(64), size=size)
    assert [asked[2] for asked in kernel.asked] == [5, 7] and not kernel.handed


def test_this_release_is_one_of_those_that_were_read() -> None:
    """Where it is not, steps are right and take the host longer: the new release is to be read."""
    assert ready._is_known()


@pytest.mark.gpu
def test_on_a_gpu_results_are_those_of_the_first_launch() -> None:
    from hypic_kernels import pointwise

    draw = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn((5, 129), generator=draw, device="cuda")
    weight = torch.randn(64, generator=draw, device="cuda")
    for _ in range(3):
        for start in (0, 1, 4, 64):
            x = wide[:, start : start + 64]
            found, _ = pointwise.add_rms_norm(x, None, weight, eps=1e-6, backend="triton")
            exact, _ = pointwise.add_rms_norm(x.double(), None, weight.double(), eps=1e-6, backend="reference")
            assert (found - exact).abs().max() < 1e-5
    assert any(one.launcher for one in ready._kept().values())

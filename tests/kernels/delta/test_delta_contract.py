"""What lift, read and step accept and refuse, which twin they take, and that importing them imports no Triton."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hypic_kernels import delta
from hypic_kernels.delta import DeltaError, GatedNorm, Rule, layout, lift, read, step
from hypic_kernels.delta.bench import main
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.trust import is_trusted, relative_error

KERNELS = Path(__file__).parents[3] / "kernels"


def lifted(**changed: object) -> delta.Maps:
    p = Problem.random(Shape(4, 3, 1, 2, 16, (5,)))
    given = {"q": p.q, "k": p.k, "v": p.v, "g": p.g, "beta": p.beta, "chunks": p.chunks, "rule": p.rule, **changed}
    return lift(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.ones(5, 1, 3)}, "q has shape"),
        ({"k": torch.ones(5, 4)}, "must be"),
        ({"v": torch.ones(5, 2, 3, dtype=torch.bfloat16)}, "k is torch.float32"),
        ({"q": torch.ones(5, 3, 4), "k": torch.ones(5, 3, 4)}, "cannot share 3 key heads"),
        ({"q": torch.ones(5, 1, 8)[..., ::2]}, "stride 2"),
        ({"g": torch.ones(5, 1)}, "g has shape"),
        ({"chunks": torch.zeros(1, 8, dtype=torch.int32)}, "one of"),
        ({"chunks": torch.zeros(1, 16, dtype=torch.int64)}, "int32"),
        ({"precision": "bf16x3"}, "bfloat16"),
        ({"rule": Rule(A_log=torch.ones(3), dt_bias=torch.ones(3))}, "rule.A_log"),
        ({"out": delta.Maps(*[torch.ones(2, 2, 4, 4)] * 4)}, "out.end_state"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "-".join(value),
)
def test_lift_refuses(changed: dict[str, object], message: str) -> None:
    lifted()
    with pytest.raises(DeltaError, match=message):
        lifted(**changed)


def test_half_a_gate_is_refused() -> None:
    with pytest.raises(DeltaError, match="both or neither"):
        Rule(A_log=torch.ones(2))


def written(**changed: object) -> Tensor:
    states, out, chunks = torch.ones(2, 2, 4, 3), torch.ones(5, 2, 3), torch.zeros(1, 16, dtype=torch.int32)
    given = {"query": torch.ones(1, 2, 16, 4), "offset": torch.ones(1, 2, 16, 3), "states": states, "chunks": chunks}
    return read(**{**given, "out": out, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"query": torch.ones(1, 2, 32, 4)},
        {"offset": torch.ones(1, 2, 16, 3, dtype=torch.float64)},
        {"states": torch.ones(2, 2, 4, 4)},
        {"states": torch.ones(2, 2, 3, 4).mT},
        {"places": torch.zeros(2, dtype=torch.int32)},
        {"places": torch.zeros(1)},
        {"out": torch.ones(5, 3, 3)},
        {"norm": GatedNorm(torch.ones(5, 2, 2), torch.ones(3), 1e-6)},
        {"norm": GatedNorm(torch.ones(5, 2, 3), torch.ones(2), 1e-6)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_read_refuses(changed: dict[str, object]) -> None:
    written()
    with pytest.raises(DeltaError):
        written(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"states": torch.ones(3, 2, 3, 4)},
        {"states": torch.ones(3, 2, 3, 4).mT},
        {"read_slots": torch.zeros(4, dtype=torch.int32)},
        {"write_slots": torch.zeros(5)},
        {"out": torch.ones(5, 3, 3)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_step_refuses(changed: dict[str, object]) -> None:
    p, slots = Problem.random(Shape(4, 3, 1, 2, 16, (5,))), torch.arange(5, dtype=torch.int32)
    given = {"states": p.states, "read_slots": slots, "write_slots": slots, "rule": p.rule}
    step(*p.tokens, **given)  # type: ignore[arg-type]
    with pytest.raises(DeltaError):
        step(*p.tokens, **{**given, **changed})  # type: ignore[arg-type]


def test_gradients_pass_through_the_reference() -> None:
    """The definition is differentiable, as training needs it."""
    p = Problem.random(Shape(4, 3, 1, 2, 16, (20,)))
    v = p.v.clone().requires_grad_()
    maps = delta.reference.lift(p.q, p.k, v, p.g, p.beta, p.chunks, p.rule)
    maps.offset.sum().backward()
    assert v.grad is not None and bool(v.grad.abs().sum() > 0)


def test_float64_stays_float64() -> None:
    p = Problem.random(Shape(4, 3, 1, 2, 16, (20,)))
    maps = lift(*p.wide().tokens, p.chunks, rule=p.rule)
    assert maps.transition.dtype == torch.float64 and max(map(relative_error, maps, p.lifted())) < 1e-14


def test_given_outputs_are_used() -> None:
    p = Problem.random(Shape(4, 3, 1, 2, 16, (20,)))
    out = p.poisoned()
    assert lift(*p.tokens, p.chunks, rule=p.rule, out=out) is out
    assert max(map(relative_error, out, p.lifted())) < 1e-6


# -- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(1, 1), (16, 16), (96, 192), (128, 128), (192, 192), (256, 256)], ids=str)
def test_layouts_pad_little(dims: tuple[int, int]) -> None:
    for size in layout.CHUNK_SIZES:
        for config in layout.lift_candidates(size, *dims):
            assert all(-(-dim // config.rows) * config.rows <= max(16, dim * 4 // 3) for dim in dims)
        for read_config in layout.read_candidates(size, *dims, has_norm=True):
            assert read_config.block_v >= dims[1], "a norm needs whole heads"
    for step_config in layout.step_candidates(*dims):
        assert layout.padded(dims[1]) % step_config.block_v == 0


# -- trust ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A variant with a known error."""

    error: Callable[[], float]
    tolerance: float = 1e-5

    def measure(self) -> float:
        return self.error()


def test_a_wrong_kernel_is_not_used_and_said_once() -> None:
    pytest.importorskip("triton")
    wrong = Measured(lambda: 3e-4)
    with pytest.warns(RuntimeWarning, match="relative error is 3.0e-04"):
        assert not is_trusted(wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_trusted(wrong)
        assert is_trusted(Measured(lambda: 5e-6))


def test_a_kernel_of_nan_or_none_is_not_used() -> None:
    pytest.importorskip("triton")
    from triton.errors import TritonError

    def fails() -> float:
        raise TritonError("out of resources")

    with pytest.warns(RuntimeWarning, match="nan"):
        assert not is_trusted(Measured(lambda: math.nan))
    with pytest.warns(RuntimeWarning, match="out of resources"):
        assert not is_trusted(Measured(fails))


def test_cpu_tensors_never_meet_the_interpreter_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(variant: object) -> bool:
        raise AssertionError("the kernel was considered for CPU tensors")

    monkeypatch.setattr(delta, "is_trusted", refused)
    lifted()
    written()


def test_without_a_gpu_the_bench_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypic_kernels.delta.bench.available", lambda: False)
    assert main([]) == 1
    assert "needs a CUDA device" in capsys.readouterr().err


def test_importing_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from hypic_kernels.delta import bench, check, lift\n"
        "from hypic_kernels.delta.problem import Problem, Shape\n"
        "p = Problem.random(Shape(4, 4))\n"
        "lift(*p.tokens, p.chunks, rule=p.rule)\n"
        "from hypic_kernels.conv import convolve\n"
        "from hypic_kernels.conv.problem import Problem\n"
        "p = Problem.random()\n"
        "convolve(p.x, p.tails, p.sources, p.weight)\n"
    )
    environment = {"PYTHONPATH": str(KERNELS), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)

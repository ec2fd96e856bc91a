"""What the kernel is checked for, in the interpreter and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from hypic_kernels.attention import Config, HeadDims, attend, attend_latent, plan_of
from hypic_kernels.attention.check import TOLERANCES
from hypic_kernels.attention.plan import ChainQueries
from hypic_kernels.attention.problem import Problem, Work
from hypic_kernels.trust import relative_error

TOLERANCE = 2e-6
LAYOUT = Config(16, 32, 4, 1)
WORKS = [
    (Work.last(1, 1),),
    (Work.last(16, 16),),
    (Work.last(17, 2), Work.last(15, 15)),
    (Work(0, ()), Work.last(33, 5), Work(0, ())),
    (Work(64, ((0, 1), (15, 2), (31, 3), (47, 1), (63, 1))),),
]


def kernel_error(problem: Problem, config: Config = LAYOUT, out_dtype: torch.dtype | None = None) -> float:
    """The kernel's error against float64, after a look that it left its inputs alone."""
    inputs = (problem.q, problem.keys, problem.values, problem.plan.buffer)
    copies = [tensor.clone() for tensor in inputs]
    out = problem.run(config, out_dtype)
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())
    return relative_error(out, problem.solve())


def check_public_call(device: str) -> None:
    for dims, call in ((HeadDims(4, 64, 64, 64), attend), (HeadDims(4, 32, 64, 32, is_latent=True), attend_latent)):
        p = Problem.random(dims, num_lanes=20, num_key_heads=1, spare=1, device=device)
        out = p.output()
        given = call(*p.arguments[:4], cos=p.cos, sin=p.sin, scale=p.scale, out=out, backend="triton")
        assert given is out and relative_error(out, p.solve()) < 1e-5


def check_sharing(device: str) -> None:
    """Two chains hold one segment at different positions; the pool is read where it lies."""
    segment, other = torch.arange(20), torch.arange(20, 33)
    order = [torch.cat([segment, other]).numpy(), torch.cat([other, segment]).numpy()]
    plan = plan_of([ChainQueries(slots, torch.tensor([32]).numpy()) for slots in order], tile=1, device=device)
    drawn = Problem.random(HeadDims(2, 16, 16, 16), [Work.last(33, 2)], num_slots=33, device=device)
    problem = replace(drawn, plan=plan)
    assert kernel_error(problem) < TOLERANCE
    assert relative_error(problem.solve()[1], drawn.solve()[1]) > 100 * TOLERANCE


def check_no_leak(device: str, dtype: torch.dtype, config: Config) -> None:
    """Keys of a chain that lie behind its last query are NaN, and so are those of the next chain."""
    drawn = Problem.random(
        HeadDims(2, 64, 64, 64), [Work(61, ((20, 9),)), Work.last(40, 3)], dtype=dtype, device=device
    )
    hidden = drawn.plan.slots[29:61].long()
    for tensor in (drawn.keys, drawn.values):
        tensor[hidden] = math.nan
    assert kernel_error(drawn, config) < TOLERANCES[dtype]

"""Kernels that start before the one before them has ended give the same bits as those that wait."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from hypic_kernels.early import can_start_early
from hypic_kernels.experts import pairs
from hypic_kernels.experts.few import Scores, made_for
from hypic_kernels.experts.layout import choose_few
from hypic_kernels.matvec import triton as kernel
from hypic_kernels.matvec.layout import NORMED, PRODUCTS


def test_a_launch_says_so_to_the_driver() -> None:
    x, out = torch.zeros(1, 8), torch.zeros(1, 8)
    launch = kernel.product(x, torch.zeros(8, 8), out, PRODUCTS[0].sizes._replace(early=True))
    assert not can_start_early(x.device) and launch.options == {"num_warps": 4}  # a CPU starts nothing
    early = dataclasses.replace(launch, constants={**launch.constants, "EARLY": True})
    assert early.options == {"num_warps": 4, "launch_pdl": True}


@pytest.mark.gpu
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_chain_that_starts_early_gives_the_same_bits(is_recorded: bool) -> None:
    """Every kernel reads what the one before it wrote, into memory that the one before that read."""
    device = torch.device("cuda")
    if not can_start_early(device):
        pytest.skip("needs compute capability 9.0 and Triton 3.4 or newer")
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=device)
        return (drawn / float(shape[-1] ** 0.5)).bfloat16()

    width, num_experts, inner = 2048, 16, 512
    start, scale, router, square = draw(1, width), draw(width), draw(num_experts, width), draw(width, width)
    into, back = draw(num_experts, 2 * inner, width), draw(num_experts, width, inner)

    def run(early: bool) -> torch.Tensor:
        made, last, (one, two) = start.clone(), torch.empty_like(start), choose_few(1, start.dtype)
        normed, total, logits = torch.empty_like(made), torch.empty_like(made), draw(1, num_experts)
        room = made_for(made, into, Scores(logits, 8, True), None, True)
        sizes = NORMED[0].sizes._replace(early=early)
        launches = [
            kernel.product(made, square, last, PRODUCTS[0].sizes._replace(early=early)),
            kernel.normed_product(last, made, scale, router, 1e-6, True, logits, normed, total, sizes),
            pairs.into(normed, logits, *room[:2], into, None, "silu", *room[2:], one._replace(early=early)),
            pairs.back(room.hidden, *room[:2], back, None, room.factors, True, total, made, two._replace(early=early)),
        ]
        for launch in launches:
            launch.run()
        made.copy_(start)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if is_recorded:
            with torch.cuda.graph(graph):
                for launch in launches * 25:
                    launch.run()
            graph.replay()
        else:
            for launch in launches * 25:
                launch.run()
        torch.cuda.synchronize()
        return made

    waiting, early = run(False), run(True)
    assert bool(waiting.isfinite().all()) and torch.equal(waiting, early)
    assert not torch.equal(waiting, start)

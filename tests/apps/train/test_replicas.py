"""Several ranks: the step of their mean gradient, one end for all, and what becomes of them when one fails."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import time
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic_apps.train import __main__ as command
from hypic_apps.train import exam, fit, fitting, replicas
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.loader import Sources
from hypic_apps.train.model import Shape
from hypic_apps.train.render import Encoder
from hypic_apps.train.replicas import Replica
from hypic_apps.train.rows import Stage
from hypic_apps.train.step import Step, optimiser
from hypic_apps.train.vocabulary import save
from tests.apps.train.test_scores import archive

SMALL = Shape(
    vocab_size=700, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=1,
    num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16,
    linear_value_head_dim=16, head_dim=16,
)  # fmt: skip
SETTINGS = fit.Settings(
    minutes=1, total_minutes=1, learning_rate=1e-2, warmup_steps=1, num_workers=1, compiled=False, graphed=False
)
CPU = torch.device("cpu")


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, SMALL.vocab_size, (2, 64), generator=torch.Generator().manual_seed(seed)), torch.ones(2, 64)


def weights_of(training: fit.Training) -> Tensor:
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


class Fixed:
    """A loader whose batches follow from its seed."""

    def __init__(self, sources: Sources, num_workers: int, seed: int, stage: int = 0) -> None:
        self.seed, self.stage = seed, SimpleNamespace(value=stage)

    def next(self) -> tuple[Tensor, ...]:
        self.seed += 1
        return batch(self.seed)

    def close(self) -> None:
        return


def steps(replica: Replica, folder: Path) -> None:
    torch.set_num_threads(1)
    training = fit.Training(SMALL, SETTINGS, CPU, folder, replica)
    for number in range(3):
        training.step(*batch(10 * number + replica.rank), 1e-2)
    torch.save((weights_of(training), training.step.result), folder / f"{replica.rank}.pt")


def alone(folder: Path, ranks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Weights and the last loss and norm of one process whose gradients are the mean of those of ``ranks``' batches."""
    training = fit.Training(SMALL, SETTINGS, CPU, folder)
    for group in training.optimiser.param_groups:
        group["lr"] = 1e-2
    for number in range(3):
        losses = torch.stack([training.model.loss(*batch(10 * number + rank)) for rank in ranks])
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), SETTINGS.clip)
        training.optimiser.step()
        training.optimiser.zero_grad()
    return weights_of(training), torch.stack([losses.mean().detach(), norm])


def test_two_ranks_step_as_one_process_does_with_their_mean_gradient(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    replicas.launch(2, "cpu", steps, tmp_path)
    (first, result), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)
    expected, told = alone(tmp_path, (0, 1))
    error = (first - expected).norm() / expected.norm()
    assert error < 1e-5 and torch.allclose(result, told, rtol=1e-5)
    for rank in range(2):  # a control: either rank's gradient by itself leads elsewhere
        other, _ = alone(tmp_path, (rank,))
        assert (first - other).norm() / expected.norm() > 1e-3


def unlike_clocks(replica: Replica, folder: Path, spoilt: int) -> None:
    torch.set_num_threads(1)
    fit.Loader = Fixed  # type: ignore
    ahead = 1.0 + 5.0 * replica.rank  # rank 1's clock runs six times as fast, so that by itself it would end sooner
    fit.time = SimpleNamespace(monotonic=lambda: ahead * time.monotonic())  # type: ignore
    settings = replace(SETTINGS, minutes=1.5 / 60, total_minutes=1.0, log_every=2, exam_every_s=0.4)
    training = fit.Training(SMALL, settings, CPU, folder / "state", replica)
    begun = weights_of(training)
    one = training.step.model.loss

    def loss(*inputs: Tensor) -> Tensor:
        broken = replica.rank == 1 and training.progress.step == spoilt and not training.progress.spoilt
        return one(*inputs) * (float("nan") if broken else 1.0)

    training.step.model.loss = loss  # type: ignore
    stages = (Stage(64, 0.01), Stage(64, 1.0)) if not spoilt else (Stage(64, 1.0),)
    sources = Sources(folder, folder, 128, stages)
    with redirect_stdout(io.StringIO()):
        training.run(sources, {}, fit.Log(folder / "log.jsonl", silent=replica.rank > 0))
    state = (weights_of(training), vars(training.progress), bool((weights_of(training) != begun).any()))
    torch.save(state, folder / f"{replica.rank}.pt")


@pytest.mark.parametrize("spoilt", [0, 5], ids=["finite", "one-loss-is-not"])
def test_ranks_end_at_one_step_with_the_same_weights_though_their_clocks_differ(tmp_path: Path, spoilt: int) -> None:
    replicas.launch(2, "cpu", unlike_clocks, tmp_path, spoilt)
    (first, progress, moved), (second, theirs, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert moved and torch.equal(first, second) and progress == theirs
    assert progress["step"] > 6 and progress["spoilt"] == (spoilt > 0)
    assert bool(first.isfinite().all())
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert 1.0 < progress["trained_s"] < 2.5, "rank 0's clock counts"
    told = [line for line in lines if line.get("event") == "not finite"]
    assert [line["resumed"] for line in told] == [True] * (spoilt > 0)
    assert [line["step"] for line in lines if "loss" in line][-1] == progress["step"]

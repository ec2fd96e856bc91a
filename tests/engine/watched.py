"""A model whose steps are noted, and a pool of an exact size: what stands in an engine of the tests for its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypic.engine.batch import Batch
from hypic.engine.models import Model
from hypic.engine.pool import Pool
from hypic.engine.runner import Runner
from hypic.engine.storage import StorageForm


class Watched:
    """A model that also computes the rows that a step leaves out, and notes their hidden states.

    The engine gets what its own forward gives; the other pass runs before, and what it wrote is taken back. Not where
    steps are launched ahead (``is_noting``), since a step is judged when the next one has run.
    """

    def __init__(self, model: Model, is_noting: bool) -> None:
        self.model, self.is_noting = model, is_noting
        self.last: tuple[Batch, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def layout(self) -> Any:
        return self.model.layout

    def forward_final(self, batch: Batch, pool: Pool) -> tuple[Tensor, Tensor]:
        if not self.is_noting:
            return self.model.forward_final(batch, pool)
        slots, folds = written_slots(batch)
        touched = [(tensor, slots, tensor[slots]) for tensor in (*pool.states, *pool.tails)]
        touched += [(tensor, folds, tensor[folds]) for tensor in pool.transitions]
        self.last = batch, self.model.forward(batch, pool)
        for tensor, where, before in touched:
            tensor[where] = before
        return self.model.forward_final(batch, pool)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def written_slots(batch: Batch) -> tuple[Tensor, Tensor]:
    """State slots and transition slots that a step writes."""
    plan = batch.kernels
    if plan is None:
        assert batch.scan is not None and batch.conv is not None, "a step is planned one way or the other"
        written = (batch.scan.write_slots, batch.scan.fold_states, batch.conv.write_slots)
        return torch.cat(written).unique(), batch.scan.fold_transitions
    none = plan.write_slots[:0]
    states, transitions = [plan.write_slots, plan.conv_write_slots], [none]
    if plan.folds is not None:
        states.append(plan.folds.states)
        transitions.append(plan.folds.transitions)
    if plan.runs is not None:
        states += [plan.runs.fold_states, plan.runs.write_slots]
        transitions.append(plan.runs.fold_transitions)
    return torch.cat([slots.long() for slots in states]).unique(), torch.cat([slots.long() for slots in transitions])


class SizedPool(Pool):
    """A pool of exactly so many pages, states and transitions."""

    def __init__(
        self,
        loaded: Runner,
        page_size: int,
        sizes: tuple[int, int, int],
        form: StorageForm = StorageForm(),
        num_ahead: int = 0,
    ) -> None:
        self.sizes = sizes
        super().__init__(loaded.pool.layout, 0, page_size, 4096, 64, loaded.pool.device, form, num_ahead=num_ahead)

    def _split(self, budget_bytes: int, max_context: int, num_running: int) -> tuple[int, int, int]:
        return self.sizes

"""The training loop of one device: boxed in time, resumable, its curriculum and learning rate driven by the clock.

A call trains for ``minutes`` and ends with a saved state; calls go on where the last one stopped until
``total_minutes`` are spent. All batches have the same number of tokens, so what is compiled is compiled once; on CUDA a
whole step is one captured graph per stage.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypic_apps.train.architecture import Architecture
from hypic_apps.train.checking import check_state
from hypic_apps.train.exam import THROUGH_SEGMENTS, Paper, grades
from hypic_apps.train.initial import initialise
from hypic_apps.train.loader import Loader, Sources
from hypic_apps.train.model import Trainee
from hypic_apps.train.replicas import ALONE, Replica
from hypic_apps.train.rows import Stage, stage_at
from hypic_apps.train.settings import Progress, Settings, learning_rate
from hypic_apps.train.step import Step, optimiser

# Between the ranks' seeds: with the strides of ``loader`` no two workers of eight ranks ever come to the same one.
RANK_SEEDS = 1_000_000_007


@dataclass
class Log:
    """JSON lines on standard output and in a file; ``silent`` for all ranks but the first."""

    path: Path
    started: float = field(default_factory=time.monotonic)
    silent: bool = False

    def __call__(self, **entry: Any) -> None:
        if self.silent:
            return
        entry = {"at_s": round(time.monotonic() - self.started, 1)} | entry
        line = json.dumps(entry)
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Training:
    """A model in training, its optimiser and how far it is; every rank has one, and they stay the same."""

    def __init__(
        self, shape: Architecture, settings: Settings, device: torch.device, folder: Path, replica: Replica = ALONE
    ) -> None:
        self.settings, self.device, self.folder, self.replica = settings, device, folder, replica
        self.model = Trainee(shape).to(device)
        initialise(self.model, settings.seed)
        self.judge = Trainee(shape).to(device)
        self.optimiser = optimiser(self.model, settings, device)
        self.progress = Progress()
        self.first_step = 0  # of this optimiser: it warms up anew when it begins anew
        self.step = Step(self.model, self.optimiser, settings, device, replica)

    @property
    def state_file(self) -> Path:
        """Where the state is kept between calls."""
        return self.folder / "state.pt"

    def resume(self) -> bool:
        """Goes on from the saved state, if there is one.

        Raises:
            ValueError: the state is that of another model, or of another way to train.
        """
        if not self.state_file.is_file():
            return False
        state = torch.load(self.state_file, map_location=self.device, weights_only=True)
        check_state(self.state_file, state, self.model.state_dict(), reuse=self.settings.reuse)
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        vars(self.progress).update(asdict(Progress(**state["progress"])))  # in place: a loop may hold it
        self.step.reset()
        return True

    def start_from(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Takes over exported weights, when the state itself is lost; the optimiser begins anew."""
        self.model.restore(tensors)
        self.progress, self.first_step = progress, progress.step

    def save(self) -> None:
        """Writes the state beside the old one, then replaces it; rank 0 does so for all."""
        if self.replica.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "progress": asdict(self.progress),
            "reuse": self.settings.reuse,
        }
        draft = self.state_file.with_suffix(".new")
        torch.save(state, draft)
        draft.replace(self.state_file)

    def examine(self, papers: dict[str, Paper], dtype: torch.dtype | None = None) -> dict[str, float]:
        """Grades of a plain copy of the model, its weights rounded to ``dtype`` first if given."""
        with torch.no_grad():
            for mine, theirs in zip(self.judge.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs if dtype is None else theirs.to(dtype))
        return grades(self.judge, papers, self.device, THROUGH_SEGMENTS if self.settings.reuse else ())

    def run(self, sources: Sources, papers: dict[str, Paper], log: Log) -> bool:
        """Trains until this call's or the whole training's time is over; returns whether the whole is done."""
        settings, progress = self.settings, self.progress
        if settings.compiled:
            self.model.compile()
        number = stage_at(progress.share(settings), sources.stages)
        seed = settings.seed + progress.step + RANK_SEEDS * self.replica.rank
        loader = Loader(sources, settings.num_workers, seed, number)
        try:
            self._train(loader, sources.stages, papers, log)
        finally:
            loader.close()
        self.save()
        return progress.share(settings) >= 1.0

    def _train(self, loader: Loader, stages: Sequence[Stage], papers: dict[str, Paper], log: Log) -> None:
        settings, progress = self.settings, self.progress
        began, examined = time.monotonic(), progress.trained_s
        self.replica.meet()  # a slower rank would take what is saved now for a state to go on from
        self.save()
        for _ in range(4):
            self._one(loader)  # compiling and capturing do not count as training time
        self._wait()
        log(event="ready", setup_s=round(time.monotonic() - began, 1), share=round(progress.share(settings), 4))
        mark, tokens_at_mark, over = time.monotonic(), progress.tokens, self._clocked(0.0, began)
        while not over:
            self._one(loader)
            if progress.step % settings.log_every:
                continue
            self._wait()
            now = time.monotonic()
            over = self._clocked(now - mark, began)
            loss, norm = self.step.result.tolist()
            rate = (progress.tokens - tokens_at_mark) / (now - mark)
            mark, tokens_at_mark = now, progress.tokens
            log(step=progress.step, stage=loader.stage.value, share=round(progress.share(settings), 4),
                loss=round(loss, 4), norm=round(norm, 3), tokens=progress.tokens, tokens_per_s=round(rate))  # fmt: skip
            if not math.isfinite(loss):
                self._recover(log)
                mark, tokens_at_mark = time.monotonic(), progress.tokens
                continue
            if progress.trained_s - examined > settings.exam_every_s:
                examined = progress.trained_s
                if not self.replica.rank:  # the others wait in their next step
                    log(event="exam", step=progress.step, **self.examine(papers))
                self.save()
            self._next_stage(loader, stages, log)
            # exams are not training time, but they count for this call's limit
            mark = time.monotonic()

    def _clocked(self, spent_s: float, began: float) -> bool:
        """Counts training time; whether this call's or the whole training's is over. Rank 0's clock tells all ranks,
        so that they have one learning rate and stage, and end at the same step."""
        late = time.monotonic() - began >= 60.0 * self.settings.minutes
        spent_s, late = self.replica.told([spent_s, late])
        self.progress.trained_s += spent_s
        return late or self.progress.share(self.settings) >= 1.0

    def _next_stage(self, loader: Loader, stages: Sequence[Stage], log: Log) -> None:
        number = stage_at(self.progress.share(self.settings), stages)
        if number != loader.stage.value:
            loader.stage.value = number
            log(event="stage", number=number, step=self.progress.step, num_tokens=stages[number].num_tokens)

    def _one(self, loader: Loader) -> None:
        batch = loader.next()
        if self.device.type == "cuda":
            batch = tuple(x.pin_memory() for x in batch)
        ids, weights, *marks = batch
        share = self.progress.share(self.settings)
        rate = learning_rate(self.settings, self.progress.step - self.first_step, share) * 0.5**self.progress.spoilt
        self.step(ids, weights, rate, *marks)
        self.progress.step += 1
        self.progress.tokens += ids.numel() * self.replica.number

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _recover(self, log: Log) -> None:
        """After a loss that is no number: back to the saved weights, if there are any."""
        spoilt, trained_s = self.progress.spoilt + 1, self.progress.trained_s
        self.replica.meet()  # rank 0 has written the state that all read now
        log(event="not finite", step=self.progress.step, resumed=self.resume())
        self.progress.spoilt, self.progress.trained_s = spoilt, trained_s

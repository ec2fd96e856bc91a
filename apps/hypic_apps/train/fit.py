"""The training loop for one device: boxed in time, resumable, its curriculum and learning rate driven by the clock.

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
from torch import Tensor, nn

from hypic_apps.train.architecture import Architecture
from hypic_apps.train.checking import check_state
from hypic_apps.train.exam import THROUGH_SEGMENTS, Paper, grades
from hypic_apps.train.initial import initialise
from hypic_apps.train.loader import Loader, Sources
from hypic_apps.train.model import Trainee
from hypic_apps.train.rows import Stage, stage_at


@dataclass(frozen=True)
class Settings:
    """How to train. ``minutes`` bounds this call, ``total_minutes`` the whole training; with ``reuse`` exams are
    answered through segments too."""

    minutes: float
    total_minutes: float
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    decay_share: float = 0.3
    weight_decay: float = 0.05
    clip: float = 1.0
    num_workers: int = 12
    seed: int = 1
    compiled: bool = True
    graphed: bool = True
    exam_every_s: float = 90.0
    log_every: int = 50
    reuse: bool = False


@dataclass
class Progress:
    """How far training is; saved with the weights."""

    step: int = 0
    trained_s: float = 0.0
    tokens: int = 0
    spoilt: int = 0

    def share(self, settings: Settings) -> float:
        """The share of the whole training time that is over."""
        return self.trained_s / (60.0 * settings.total_minutes)


@dataclass
class Log:
    """JSON lines on standard output and in a file."""

    path: Path
    started: float = field(default_factory=time.monotonic)

    def __call__(self, **entry: Any) -> None:
        entry = {"at_s": round(time.monotonic() - self.started, 1)} | entry
        line = json.dumps(entry)
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def learning_rate(settings: Settings, step: int, share: float) -> float:
    """Warm-up by steps, then flat, then linear to 0 over the last ``decay_share`` of the time."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    left = min(1.0, max(0.0, 1.0 - share) / settings.decay_share)
    return settings.learning_rate * warm * left


def optimiser(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.AdamW:
    """AdamW; matrices decay, embeddings, norms, gates and convolutions don't."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    on_gpu = device.type == "cuda"
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    for group in groups:
        group["lr"] = torch.tensor(0.0, device=device) if on_gpu else 0.0
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, capturable=on_gpu, fused=on_gpu)


class Step:
    """One optimiser step on batches of a fixed form; on CUDA captured as one graph after a few plain steps."""

    def __init__(self, model: Trainee, optimiser: torch.optim.AdamW, settings: Settings, device: torch.device) -> None:
        self.model, self.optimiser, self.settings, self.device = model, optimiser, settings, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] | None = None
        self.result = torch.zeros(2, device=device)
        self.num_plain = 0

    def __call__(self, ids: Tensor, weights: Tensor, rate: float, *marks: Tensor) -> None:
        """Trains on one batch, through segments if there are ``marks``; ``result`` then holds the loss and the
        gradient's norm."""
        batch = (ids, weights, *marks)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.inputs is None or [x.shape for x in self.inputs] != [x.shape for x in batch]:
            self._new_form(batch)
        assert self.inputs is not None, "a new form sets the inputs"
        for mine, given in zip(self.inputs, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        elif self.settings.graphed and self.device.type == "cuda":
            self._warm_or_capture()
        else:
            self._plain()

    def reset(self) -> None:
        """Forgets the captured graph, and with it the gradients and optimiser tensors that it refers to."""
        self.graph, self.inputs, self.num_plain = None, None, 0
        self.optimiser.zero_grad(set_to_none=True)

    def _new_form(self, batch: tuple[Tensor, ...]) -> None:
        self.reset()
        self.inputs = tuple(x.to(self.device) for x in batch)

    def _warm_or_capture(self) -> None:
        if self.num_plain < 3:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._plain()
            torch.cuda.current_stream().wait_stream(side)
            self.num_plain += 1
            return
        self.optimiser.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._plain(keep_gradients=True)
        self.graph = graph
        graph.replay()

    def _plain(self, *, keep_gradients: bool = False) -> None:
        assert self.inputs is not None, "called with inputs set"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            loss = self.model.loss(*self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimiser.step()
        if not keep_gradients:
            self.optimiser.zero_grad(set_to_none=True)
        self.result.copy_(torch.stack([loss.detach(), norm.detach()]))


class Training:
    """A model in training, its optimiser and how far it is."""

    def __init__(self, shape: Architecture, settings: Settings, device: torch.device, folder: Path) -> None:
        self.settings, self.device, self.folder = settings, device, folder
        self.model = Trainee(shape).to(device)
        initialise(self.model, settings.seed)
        self.judge = Trainee(shape).to(device)
        self.optimiser = optimiser(self.model, settings, device)
        self.progress = Progress()
        self.first_step = 0  # of this optimiser: it warms up anew when it begins anew
        self.step = Step(self.model, self.optimiser, settings, device)

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
        self.progress = Progress(**state["progress"])
        self.step.reset()
        return True

    def start_from(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Takes over exported weights, when the state itself is lost; the optimiser begins anew."""
        self.model.restore(tensors)
        self.progress, self.first_step = progress, progress.step

    def save(self) -> None:
        """Writes the state beside the old one, then replaces it."""
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
        loader = Loader(sources, settings.num_workers, settings.seed + progress.step, number)
        try:
            self._train(loader, sources.stages, papers, log)
        finally:
            loader.close()
        self.save()
        return progress.share(settings) >= 1.0

    def _train(self, loader: Loader, stages: Sequence[Stage], papers: dict[str, Paper], log: Log) -> None:
        settings, progress = self.settings, self.progress
        began, examined = time.monotonic(), progress.trained_s
        self.save()
        for _ in range(4):
            self._one(loader)  # compiling and capturing do not count as training time
        self._wait()
        log(event="ready", setup_s=round(time.monotonic() - began, 1), share=round(progress.share(settings), 4))
        mark, tokens_at_mark = time.monotonic(), progress.tokens
        while progress.share(settings) < 1.0 and time.monotonic() - began < 60.0 * settings.minutes:
            self._one(loader)
            if progress.step % settings.log_every:
                continue
            self._wait()
            now = time.monotonic()
            progress.trained_s += now - mark
            loss, norm = self.step.result.tolist()
            rate = (progress.tokens - tokens_at_mark) / (now - mark)
            mark, tokens_at_mark = now, progress.tokens
            log(step=progress.step, stage=loader.stage.value, share=round(progress.share(settings), 4),
                loss=round(loss, 4), norm=round(norm, 3), tokens=progress.tokens, tokens_per_s=round(rate))  # fmt: skip
            if not math.isfinite(loss):
                self._recover(log)
                continue
            if progress.trained_s - examined > settings.exam_every_s:
                examined = progress.trained_s
                log(event="exam", step=progress.step, **self.examine(papers))
                self.save()
            self._next_stage(loader, stages, log)
            # exams are not training time, but they count for this call's limit
            mark = time.monotonic()

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
        self.progress.tokens += ids.numel()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _recover(self, log: Log) -> None:
        """After a loss that is no number: back to the saved weights, if there are any."""
        spoilt, trained_s = self.progress.spoilt + 1, self.progress.trained_s
        log(event="not finite", step=self.progress.step, resumed=self.resume())
        self.progress.spoilt, self.progress.trained_s = spoilt, trained_s

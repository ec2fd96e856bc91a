"""One optimiser step: on CUDA a whole one is one captured graph; among several ranks gradients are averaged in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypic_apps.train.model import Trainee
from hypic_apps.train.replicas import ALONE, Replica
from hypic_apps.train.settings import Settings


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

    def __init__(
        self,
        model: Trainee,
        optimiser: torch.optim.AdamW,
        settings: Settings,
        device: torch.device,
        replica: Replica = ALONE,
    ) -> None:
        self.model, self.optimiser, self.settings, self.device = model, optimiser, settings, device
        self.replica = replica
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] | None = None
        self.result = torch.zeros(2, device=device)
        self.num_plain = 0

    def __call__(self, ids: Tensor, weights: Tensor, rate: float, *marks: Tensor) -> None:
        """Trains on one batch, through segments if there are ``marks``; ``result`` then holds the loss and the
        gradient's norm, of all ranks together."""
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
        # NCCL's own thread may ask after earlier steps while this one is captured
        mode = "global" if self.replica.number == 1 else "thread_local"
        with torch.cuda.graph(graph, capture_error_mode=mode):
            self._plain(keep_gradients=True)
        self.graph = graph
        graph.replay()

    def _plain(self, *, keep_gradients: bool = False) -> None:
        assert self.inputs is not None, "called with inputs set"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            loss = self.model.loss(*self.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        loss = self.replica.averaged(loss.detach(), gradients)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimiser.step()
        if not keep_gradients:
            self.optimiser.zero_grad(set_to_none=True)
        self.result.copy_(torch.stack([loss, norm.detach()]))

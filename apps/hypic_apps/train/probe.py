"""Where a training step's time goes on a device: each way of running it, and the most expensive operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from hypic_apps.train.architecture import Architecture
from hypic_apps.train.fit import Log, Training
from hypic_apps.train.settings import Settings


def variants(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The ways to run a step, by name."""
    for name, compiled, graphed in (("plain", False, False), ("graph", False, True), ("compiled + graph", True, True)):
        yield name, replace(settings, compiled=compiled, graphed=graphed)


def probe(
    shape: Architecture, settings: Settings, device: torch.device, batch_tokens: int, length: int, log: Log
) -> None:
    """Logs seconds a step of every way for rows of ``length`` tokens, and the slowest operations of a plain step.

    With ``settings.reuse`` the rows are segments of 96 tokens with two live ones between them.
    """
    if device.type == "cuda":
        solvers(device, log)
    ids = torch.randint(0, shape.vocab_size, (batch_tokens // length, length))
    weights = torch.ones(ids.shape)
    marks = (segmented(ids.shape),) if settings.reuse else ()
    for name, chosen in variants(settings):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        training = Training(shape, chosen, device, Path("unused"))
        if chosen.compiled:
            training.model.compile()
        try:
            step_s = measure(lambda t=training: t.step(ids, weights, 1e-4, *marks), device)  # type: ignore[misc]
        except RuntimeError as error:
            log(event="probe", way=name, failed=str(error)[:600])
            continue
        speed = {"step_ms": round(1e3 * step_s, 2), "tokens_per_s": round(batch_tokens / step_s)}
        if device.type == "cuda":
            speed["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        log(event="probe", way=name, length=length, **speed, loss=training.step.result.tolist())
        if name == "plain" and device.type == "cuda":
            _profile(lambda t=training: t.step(ids, weights, 1e-4, *marks))  # type: ignore[misc]


def measure(run: Callable[[], None], device: torch.device, repeats: int = 10) -> float:
    """Seconds of one ``run``, after three to warm up."""
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def solvers(device: torch.device, log: Log, number: int = 4096) -> None:
    """Logs milliseconds of solving ``number`` unit lower triangular systems of 64 by 64 with 128 right sides."""
    matrix = (0.1 * torch.randn(number, 64, 64, device=device)).tril(-1).requires_grad_()
    sides = torch.randn(number, 64, 128, device=device, requires_grad=True)

    def solve() -> None:
        x: torch.Tensor = torch.linalg.solve_triangular(matrix, sides, upper=False, unitriangular=True)
        x.sum().backward()  # type: ignore[no-untyped-call]

    def invert() -> None:
        x = inverse_by_blocks(matrix) @ sides
        x.sum().backward()  # type: ignore[no-untyped-call]

    for name, way in (("triangular solve", solve), ("inverse by blocks", invert)):
        log(event="solver", way=name, forward_and_backward_ms=round(1e3 * measure(way, device), 3))


def inverse_by_blocks(strict: torch.Tensor) -> torch.Tensor:
    """``(I + L)^-1`` of strictly lower ``L [..., n, n]``: blocks are joined in pairs, ``n`` a power of 2."""
    size = strict.shape[-1]
    place = torch.arange(size, device=strict.device)
    inverse = torch.eye(size, device=strict.device, dtype=strict.dtype).expand_as(strict)
    width = 1
    while width < size:
        rows, columns = place[:, None] // width, place // width
        pair = (rows % 2 == 1) & (columns == rows - 1)
        inverse = inverse - inverse @ (strict * pair) @ inverse
        width *= 2
    return inverse


def segmented(shape: torch.Size) -> torch.Tensor:
    """Marks of rows of segments, each of 96 tokens and 2 live ones behind it."""
    place = torch.arange(shape[1])
    number, inside = place // 98 + 1, place % 98
    marks = torch.where(inside < 8, -number, torch.where(inside < 96, number, 0))
    return marks.to(torch.int16).expand(shape).contiguous()


def _profile(step: Callable[[], None]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    print(
        profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70), flush=True
    )

"""Where the time of one request goes: top kernels and operators, waits for the device, and a summary by room.

Requests are run under torch's profiler on the engine's own thread: one plainly, for times, and one with Python's
stacks, which slow the host down but not the kernels, for rooms. That one runs without recorded steps (CUDA graphs),
whose kernels have no stack. Before these a few run without the profiler, for the host's own time before the device is
at work and after it is done.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from hypic.engine.engine import Engine
from hypic.engine.read_back import ReadBack
from hypic_apps.bench.records import number, table
from hypic_apps.bench.trace import Stacks, Trace, busy_us, by_room, own_times, totals

Request = Callable[[Engine], object]

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
TOP = 25
NUM_HOST = 5


def take(requests: Iterator[Request], execute: Callable[[Request], object], device: torch.device) -> str:
    """Profiles requests, each prepared as it is taken from the iterator; ``execute`` runs one on the engine's thread.

    Returns the text of the tables.
    """
    with profile(activities=_activities(device)):
        pass  # the profiler wants to be started first by the thread that loaded it
    execute(partial(_to_its_end, next(requests)))
    hosts = [_host_times(next(requests), execute) for _ in range(NUM_HOST)]
    plain, wall_s = _traced(next(requests), execute, device, with_stack=False)
    execute(partial(_to_its_end, partial(_unrecorded, next(requests))))
    stacked, _ = _traced(partial(_unrecorded, next(requests)), execute, device, with_stack=True)
    parts = [_summary(plain, wall_s), _host(hosts), _rooms(stacked, wall_s), _waits(stacked)]
    if plain.kernels:
        parts.append(_top("kernel", totals(plain.kernels)))
    parts.append(_top("operator (own host time)", own_times(plain.operators)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _traced(
    request: Request, execute: Callable[[Request], object], device: torch.device, *, with_stack: bool
) -> tuple[Trace, float]:
    """What the profiler wrote about one request, and the seconds it took."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hypic-profile-") as folder:
        path = Path(folder) / "trace.json"

        def profiled(engine: Engine) -> None:
            with profile(activities=_activities(device), with_stack=with_stack) as profiler:
                started = time.perf_counter()
                request(engine)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - started)
            _to_its_end(lambda engine: None, engine)
            profiler.export_chrome_trace(str(path))

        execute(profiled)
        return Trace.read(path), seconds[0]


@dataclass(frozen=True)
class HostTimes:
    """Seconds of one request to its first token: the host before each step is handed to the device, its waits for the
    device, and from the last of these to the token."""

    before_s: float
    waited_s: float
    after_s: float


def _host_times(request: Request, execute: Callable[[Request], object]) -> HostTimes:
    marks: list[float] = []

    def launched(read_back: ReadBack) -> None:
        marks.append(time.perf_counter())
        read_back.wait()
        marks.append(time.perf_counter())

    def watched(engine: Engine) -> None:
        engine.meanwhile, before = launched, engine.meanwhile
        marks.append(time.perf_counter())
        try:
            request(engine)
        finally:
            engine.meanwhile = before
        marks.append(time.perf_counter())

    execute(partial(_to_its_end, watched))
    spans = [after - before for before, after in itertools.pairwise(marks)]
    return HostTimes(sum(spans[:-1:2]), sum(spans[1::2]), spans[-1])


def _host(times: Sequence[HostTimes]) -> str:
    before, waited, after = (
        1e3 * median(values) for values in zip(*((t.before_s, t.waited_s, t.after_s) for t in times), strict=True)
    )
    return (
        f"host: {before:.2f} ms before the device has its work, {waited:.2f} ms waiting for it, {after:.2f} ms from "
        f"there to the token (medians of {len(times)} requests, without the profiler)"
    )


def _to_its_end(request: Request, engine: Engine) -> None:
    """A request that was left at its first token is answered before the next one begins."""
    request(engine)
    while engine.has_work:
        engine.step()


def _unrecorded(request: Request, engine: Engine) -> None:
    """A request whose steps are all launched one kernel at a time."""
    runner = engine.runner
    engine.runner = replace(runner, graphs=None)
    try:
        request(engine)
    finally:
        engine.runner = runner


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])


def _summary(trace: Trace, wall_s: float) -> str:
    busy_s = busy_us(trace.kernels) / 1e6
    lines = [f"wall time of the request: {1e3 * wall_s:.2f} ms (under the profiler)"]
    if trace.kernels:
        lines.append(f"GPU busy: {1e3 * busy_s:.2f} ms ({busy_s / wall_s:.0%}); idle: {1e3 * (wall_s - busy_s):.2f} ms")
        lines.append(f"kernels and copies: {len(trace.kernels)}; launches: {len(trace.launches)}")
    lines.append(f"operators: {len(trace.operators)}")
    return "\n".join(lines)


def _rooms(trace: Trace, wall_s: float) -> str:
    found = by_room(trace)
    total = sum(microseconds for microseconds, _ in found.values())
    rows = [
        (room, number(microseconds / 1e3), f"{microseconds / total:.1%}", str(count))
        for room, (microseconds, count) in sorted(found.items(), key=lambda item: -item[1][0])
    ]
    if trace.kernels:
        idle_us = max(0.0, 1e6 * wall_s - busy_us(trace.kernels))
        rows.append(("host (GPU idle)", number(idle_us / 1e3), "", ""))
    return table(("room", "ms", "share", "kernels" if trace.kernels else "operators"), rows)


def _waits(trace: Trace) -> str:
    """Where the host waited for the device, by the innermost frame of ours."""
    stacks = Stacks(trace.frames)
    found: Counter[tuple[str, str]] = Counter()
    for launch in trace.launches:
        if launch.name in WAITS:
            ours = [name for name in stacks.at(launch.thread, launch.start) if "hypic" in name]
            found[launch.name, ours[0] if ours else "elsewhere"] += 1
    rows = [(name, str(count), _short(where)) for (name, where), count in found.most_common(TOP)]
    return table(("wait for the device", "times", "where"), rows) if rows else ""


def _short(frame: str) -> str:
    return frame[max(frame.find("hypic"), 0) :]


def _top(head: str, found: Mapping[str, tuple[float, int]]) -> str:
    ordered = sorted(found.items(), key=lambda item: -item[1][0])[:TOP]
    rows = [(number(us / 1e3), str(count), name[:110]) for name, (us, count) in ordered]
    return table(("ms", "times", head), rows)

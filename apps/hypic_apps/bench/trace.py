"""What torch's profiler wrote, read back: kernels, launches, operators, Python's frames, and the room of each.

A kernel belongs to the room of the innermost file of ours (or ``nn.Linear``) on the stack that launched it; without a
GPU an operator's own time does.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The innermost file that is named here says what a kernel was for; what stands first wins within one file.
ROOMS: Sequence[tuple[str, str]] = (
    ("engine/layers/moe.py", "experts"),
    ("engine/layers/routers.py", "experts"),
    ("engine/layers/mlp.py", "experts"),
    ("engine/layers/norm.py", "norms"),
    ("engine/layers/rotary.py", "attention"),
    ("engine/layers/attention.py", "attention"),
    ("engine/layers/mla.py", "attention"),
    ("engine/layers/conv", "linear: convolution"),
    ("engine/layers/short_conv.py", "linear: convolution"),
    ("engine/affine.py", "linear: scan"),
    ("hypic_kernels/attention/", "attention"),
    ("hypic_kernels/compose/", "linear: scan"),
    ("hypic_kernels/conv/", "linear: convolution"),
    ("hypic_kernels/delta/", "linear: lift"),
    ("hypic_kernels/experts/", "experts"),
    ("engine/linear/", "linear: lift"),
    ("engine/layers/", "linear: rest"),
    ("engine/pool.py", "pool"),
    ("engine/sampler.py", "sampling"),
    ("engine/batch.py", "planning"),
    ("engine/scan_plan.py", "planning"),
    ("engine/conv_plan.py", "planning"),
    ("engine/kernel_", "planning"),
    ("engine/slot_table.py", "planning"),
    ("engine/models/", "blocks"),
    ("hypic/engine/", "engine"),
)
LINEAR = "nn/modules/linear.py"
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Event:
    """One complete event of a trace; times in microseconds."""

    name: str
    category: str
    thread: object
    start: float
    duration: float
    correlation: int | None

    @property
    def stop(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Trace:
    """What the profiler wrote, by kind."""

    kernels: list[Event]
    launches: list[Event]
    operators: list[Event]
    frames: list[Event]

    @classmethod
    def read(cls, path: Path) -> Trace:
        raw = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        events = [_event(e) for e in raw if e.get("ph") == "X"]
        kinds: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            kinds[event.category].append(event)
        kernels = kinds["kernel"] + kinds["gpu_memcpy"] + kinds["gpu_memset"]
        launches = [event for kind in LAUNCHES for event in kinds[kind]]
        return cls(kernels, launches, kinds["cpu_op"], kinds["python_function"])


def _event(raw: Mapping[str, Any]) -> Event:
    args = raw.get("args", {})
    return Event(
        raw["name"], raw.get("cat", ""), raw.get("tid"), raw["ts"], raw.get("dur", 0.0), args.get("correlation")
    )


class Stacks:
    """The Python frames around a moment of a thread, innermost first."""

    def __init__(self, frames: Iterable[Event]) -> None:
        by_thread: dict[object, list[Event]] = defaultdict(list)
        for frame in frames:
            by_thread[frame.thread].append(frame)
        self._frames = {thread: sorted(found, key=lambda e: (e.start, -e.stop)) for thread, found in by_thread.items()}
        self._starts = {thread: [frame.start for frame in found] for thread, found in self._frames.items()}
        self._parents = {thread: _parents(found) for thread, found in self._frames.items()}

    def at(self, thread: object, moment: float) -> list[str]:
        if len(self._frames) == 1:  # drivers may number threads otherwise than Python does
            (thread,) = self._frames
        frames = self._frames.get(thread, [])
        place = bisect_right(self._starts.get(thread, []), moment) - 1
        names = []
        while place >= 0:
            if frames[place].stop >= moment:
                names.append(frames[place].name)
            place = self._parents[thread][place]
        return names


def _parents(frames: Sequence[Event]) -> list[int]:
    """The number of the frame around each; -1 for the outermost."""
    open_frames: list[int] = []
    parents = []
    for place, frame in enumerate(frames):
        while open_frames and frames[open_frames[-1]].stop < frame.stop:
            open_frames.pop()
        parents.append(open_frames[-1] if open_frames else -1)
        open_frames.append(place)
    return parents


def room_of(stack: Iterable[str]) -> str:
    """The room of a stack, innermost frame first. ``nn.Linear`` outside of experts is a projection of its own."""
    through_linear = False
    for frame in stack:
        path = frame.replace("\\", "/")
        through_linear = through_linear or LINEAR in path
        room = next((room for part, room in ROOMS if part in path), None)
        if room is not None:
            return "projections" if through_linear and room != "experts" else room
    return "other"


def busy_us(kernels: Iterable[Event]) -> float:
    """Microseconds in which at least one kernel ran."""
    busy, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda e: e.start):
        busy += max(0.0, kernel.stop - max(kernel.start, reached))
        reached = max(reached, kernel.stop)
    return busy


def by_room(trace: Trace) -> dict[str, tuple[float, int]]:
    """Microseconds and number of kernels by room; of operators' own time where there is no GPU."""
    stacks = Stacks(trace.frames)
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for thread, moment, duration in _work(trace):
        room = room_of(stacks.at(thread, moment))
        found[room] = (found[room][0] + duration, found[room][1] + 1)
    return dict(found)


def _work(trace: Trace) -> Iterable[tuple[object, float, float]]:
    """Thread and moment of what started each kernel, and its duration."""
    if not trace.kernels:
        yield from ((op.thread, op.start, own) for op, own in _with_own_time(trace.operators))
        return
    launches = {launch.correlation: launch for launch in trace.launches}
    for kernel in trace.kernels:
        launch = None if kernel.correlation is None else launches.get(kernel.correlation)
        yield (launch.thread, launch.start, kernel.duration) if launch else (None, 0.0, kernel.duration)


def totals(events: Iterable[Event]) -> dict[str, tuple[float, int]]:
    """Microseconds and number by name."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in events:
        found[event.name] = (found[event.name][0] + event.duration, found[event.name][1] + 1)
    return dict(found)


def own_times(operators: Sequence[Event]) -> dict[str, tuple[float, int]]:
    """Microseconds that operators took without those they called, and number, by name."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for operator, own in _with_own_time(operators):
        found[operator.name] = (found[operator.name][0] + own, found[operator.name][1] + 1)
    return dict(found)


def _with_own_time(operators: Sequence[Event]) -> list[tuple[Event, float]]:
    found: list[tuple[Event, float]] = []
    by_thread: dict[object, list[Event]] = defaultdict(list)
    for operator in operators:
        by_thread[operator.thread].append(operator)
    for members in by_thread.values():
        members.sort(key=lambda e: (e.start, -e.stop))
        own = [member.duration for member in members]
        for member, parent in zip(members, _parents(members), strict=True):
            if parent >= 0:
                own[parent] -= member.duration
        found += zip(members, own, strict=True)
    return found

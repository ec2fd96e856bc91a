"""When a worker is taken for dead: by its silence, or by a step that does not end. A slow one is neither."""

from __future__ import annotations

from dataclasses import dataclass

from hypic.engine.parallel.cost import from_json
from hypic.engine.parallel.messages import Beat, Hello
from hypic.errors import WorkerLost

# A step hangs that takes so many times as long as the longest should.
HANG_FACTOR = 8.0


@dataclass(frozen=True)
class Times:
    """Seconds: between heartbeats, of silence that is death, at one step that are a hang, to start, of the first and
    longest pause between starts, to stop by itself, and of good work after which earlier failures are forgotten.

    A process that has stopped is found within ``silence_s``; a step that never ends within ``hang_s``, or 8 times what
    the longest step should take, by what this worker's steps took lately, if that is more.
    """

    beat_s: float = 0.2
    silence_s: float = 10.0
    hang_s: float = 60.0
    start_s: float = 1800.0
    pause_s: float = 0.5
    longest_pause_s: float = 60.0
    stop_s: float = 5.0
    forget_s: float = 120.0
    tick_s: float = 0.05
    failures: int = 3

    def fault(self, silent_s: float, busy_s: float, longest_s: float) -> str:
        """Why a worker is given up of which nothing was heard for ``silent_s``, and which said that it had been at one
        step for ``busy_s``; none should take longer than ``longest_s``. Empty if it lives."""
        if silent_s > self.silence_s:
            return f"nothing was heard of it for {silent_s:.1f} s"
        return f"it has been at one step for {busy_s:.1f} s" if busy_s > max(self.hang_s, longest_s) else ""


def longest_s(hello: Hello, beat: Beat) -> float:
    """What no step should take, by what the worker measured when it started and what its steps took lately.

    Raises:
        WorkerLost: it says what cannot be.
    """
    try:
        cost = from_json(hello.cost)
        return HANG_FACTOR * beat.scale * cost.seconds(cost.batch_tokens)
    except ValueError as error:
        raise WorkerLost(f"worker {hello.rank} is not sound: {error}") from error

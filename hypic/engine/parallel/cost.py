"""What work costs in seconds: encoding a segment, sending an entry. Measured, never assumed.

Encoding ``n`` tokens takes ``step_s + token_s * n + pair_s * n * n``: reading the weights, the layers that are linear
in length, attention. An entry of ``b`` bytes takes ``latency_s + b / bandwidth``. Coefficients are fitted to
measurements at start-up and scaled by what is observed later; no coefficient is ever negative.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

# Weight of a new observation against all before it.
OBSERVED_SHARE = 0.25
# A single observation never moves a scale further than this: one slow step is no slow machine.
LARGEST_RATIO = 8.0
# A step is no measure of encoding if more than one token in so many is a request's own.
MOST_ROWS = 4


@dataclass(frozen=True)
class EncodeCost:
    """Seconds to encode; ``scale`` follows observation.

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    step_s: float
    token_s: float
    pair_s: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} of a cost is {value!r}; measure it again.")

    def seconds(self, num_tokens: int) -> float:
        """Of one segment in a step of its own."""
        return self.step_s * self.scale + self.marginal_s(num_tokens)

    def marginal_s(self, num_tokens: int) -> float:
        """Of one more segment in a step that runs anyway."""
        return self.scale * (self.token_s * num_tokens + self.pair_s * num_tokens * num_tokens)

    def observed(self, predicted_s: float, seconds: float, share: float = OBSERVED_SHARE) -> EncodeCost:
        """With the scale moved towards what a piece of work took; ``share`` is the weight of this observation."""
        if predicted_s <= 0 or seconds <= 0:
            return self
        ratio = min(max(seconds / predicted_s, 1 / LARGEST_RATIO), LARGEST_RATIO)
        return replace(self, scale=self.scale * ratio**share)

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float]]) -> EncodeCost:
        """From ``(tokens, seconds)`` pairs, least squares on relative errors, coefficients kept from being negative.

        Raises:
            ValueError: nothing was measured.
        """
        if not measured:
            raise ValueError("a cost needs at least one measurement.")
        tokens, seconds = (np.asarray(column, dtype=np.float64) for column in zip(*measured, strict=True))
        columns = np.stack([np.ones_like(tokens), tokens, tokens * tokens], axis=1)
        return cls(*_non_negative(columns / seconds[:, None], np.ones_like(seconds)))


@dataclass
class Pace:
    """What encoding costs this process, by its own clock: it follows what steps take. One thread writes it."""

    cost: EncodeCost
    last_s: float = 0.0
    num_steps: int = 0

    def ran(self, num_tokens: Sequence[int], num_rows: int, seconds: float) -> None:
        """A step encoded so many tokens of each of several segments, and ran ``num_rows`` tokens of requests."""
        self.last_s = time.monotonic()
        if MOST_ROWS * num_rows > sum(num_tokens):
            return  # it says more of something else
        predicted_s = self.cost.seconds(num_rows) + sum(self.cost.marginal_s(count) for count in num_tokens)
        self.num_steps += 1
        # What was measured while the machine was busy with starting weighs as much as one step.
        self.cost = self.cost.observed(predicted_s, seconds, max(OBSERVED_SHARE, 1 / (1 + self.num_steps)))


def _non_negative(matrix: Any, target: Any) -> list[float]:
    """Least squares over all subsets of three columns, the best whose coefficients are none of them negative."""
    best, found = math.inf, [0.0] * matrix.shape[1]
    for subset in range(1, 2 ** matrix.shape[1]):
        chosen = [column for column in range(matrix.shape[1]) if subset >> column & 1]
        if len(chosen) > len(target):
            continue
        solution = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        error = float(np.square(matrix[:, chosen] @ solution - target).sum())
        if (solution >= 0).all() and error < best:
            best, found = error, [0.0] * matrix.shape[1]
            for column, value in zip(chosen, solution, strict=True):
                found[column] = float(value)
    return found


@dataclass(frozen=True)
class LinkCost:
    """Seconds to carry an entry between two workers.

    Raises:
        ValueError: a coefficient is negative or not finite.
    """

    latency_s: float
    byte_s: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} of a link is {value!r}; measure it again.")

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.byte_s

    def observed(self, num_bytes: int, seconds: float) -> LinkCost:
        """With the cost of a byte moved towards what one transfer showed; the first one is all that is known."""
        if self == UNMEASURED_LINK:
            return LinkCost(
                min(self.latency_s, seconds / 2), max(seconds / 2, seconds - self.latency_s) / max(num_bytes, 1)
            )
        seen = max(seconds - self.latency_s, 0.0) / max(num_bytes, 1)
        floor = self.byte_s / LARGEST_RATIO
        seen = min(max(seen, floor), self.byte_s * LARGEST_RATIO)
        return replace(self, byte_s=(1 - OBSERVED_SHARE) * self.byte_s + OBSERVED_SHARE * seen)


# What a link is taken for before anything has been sent over it: a loopback connection of a busy machine.
UNMEASURED_LINK = LinkCost(1e-3, 1e-9)


@dataclass(frozen=True)
class EntrySize:
    """Bytes of an entry by its length: states are of one size, K/V grow."""

    fixed_bytes: int
    token_bytes: int

    def of(self, num_tokens: int) -> int:
        return self.fixed_bytes + num_tokens * self.token_bytes


def to_json(cost: EncodeCost) -> dict[str, float]:
    return asdict(cost)


def from_json(fields: Mapping[str, Any]) -> EncodeCost:
    """From what another process sent.

    Raises:
        ValueError: it is no cost.
    """
    names = ("step_s", "token_s", "pair_s", "scale")
    if set(fields) != set(names) or not all(isinstance(fields[n], (int, float)) for n in names):
        raise ValueError(f"{fields!r:.80} is no cost.")
    return EncodeCost(*(float(fields[n]) for n in names))

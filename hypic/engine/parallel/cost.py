"""What work costs in seconds: encoding a segment, sending an entry. Measured, never assumed.

Encoding ``n`` tokens takes ``step_s + token_s * n + pair_s * n * n``: reading the weights, the layers that are linear
in length, attention; but no step takes less than ``floor_s``, which the host needs to launch what a GPU then does
faster. An entry of ``b`` bytes takes ``latency_s + b / bandwidth``. Coefficients are fitted to measurements at start-up
and scaled by what is observed later; no coefficient is ever negative. Several segments share steps of ``batch_tokens``
at most, so what they take together is counted in whole steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

# Weight of a new observation against all before it.
OBSERVED_SHARE = 0.25
# A single observation never moves a scale further than this: one slow step is no slow machine.
LARGEST_RATIO = 8.0
# A step is no measure of encoding if more than one token in so many is a request's own.
MOST_ROWS = 4
# A process's first steps compile and allocate: they are not looked at. A scale is the median of the latest steps, of so
# many at least and at most: what a few steps show is never believed.
FIRST_STEPS, FEWEST_STEPS, LATEST_STEPS = 2, 5, 9
AGREE_SHARE = 0.8
# What is the same for every step (launches, weights read) should take no larger share of a batch than this, and what
# the host takes for it no larger one of what the device does.
FIXED_SHARE, HOST_SHARE = 0.1, 0.5
# Steps that take the same within this factor, though one has so many times the tokens of another, wait for the host.
FLAT, FLAT_TOKENS = 1.25, 16
LEAST_BATCH_TOKENS = 4096
# Entries of one step travel together as far as they take no more than this, or than a share of a large GPU's memory
# (``sending.py``); a larger one travels alone.
PARCEL_BYTES = 320 * 2**20


@dataclass(frozen=True)
class EncodeCost:
    """Seconds to encode; ``scale`` follows observation, and nearly all that was seen lies within a factor of ``spread``
    of it; 0: too little was seen yet. ``batch_tokens`` is what a worker's step holds at most, ``floor_s`` what a step
    takes at least.

    Raises:
        ValueError: a coefficient is negative or not finite, or a step holds nothing.
    """

    step_s: float
    token_s: float
    pair_s: float = 0.0
    scale: float = 1.0
    spread: float = 0.0
    batch_tokens: int = 8192
    floor_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} of a cost is {value!r}; measure it again.")
        if self.batch_tokens < 1:
            raise ValueError(f"batch_tokens is {self.batch_tokens}; a step holds at least one token.")

    def seconds(self, num_tokens: int) -> float:
        """Of one segment in a step of its own."""
        return self._step_s(self.marginal_s(num_tokens))

    def marginal_s(self, num_tokens: int) -> float:
        """Of one more segment in a step that runs anyway."""
        return self.scale * (self.token_s * num_tokens + self.pair_s * num_tokens * num_tokens)

    def steps_s(self, num_tokens: int, marginal_s: float) -> float:
        """Of all steps that so many tokens take, whose segments add up to ``marginal_s``: full ones, and one of the
        rest, which takes no less than any other."""
        num_full, rest = divmod(num_tokens, self.batch_tokens)
        a_token_s = marginal_s / max(num_tokens, 1)
        return num_full * self._step_s(self.batch_tokens * a_token_s) + (rest > 0) * self._step_s(rest * a_token_s)

    def _step_s(self, marginal_s: float) -> float:
        return max(self.floor_s * self.scale, self.step_s * self.scale + marginal_s)

    def together_s(self, num_tokens: Sequence[int]) -> float:
        """Of several segments, in as few steps as hold them."""
        return self.steps_s(sum(num_tokens), sum(self.marginal_s(count) for count in num_tokens))

    def batched(self, most_tokens: int) -> EncodeCost:
        """With steps that are large enough for what they all pay to be a small share, and no larger than that: what was
        encoded leaves when its step ends."""
        wanted = LEAST_BATCH_TOKENS
        while wanted < most_tokens and not self._is_large(self.step_s + wanted * self.token_s):
            wanted *= 2
        return replace(self, batch_tokens=min(wanted, most_tokens))

    def _is_large(self, step_s: float) -> bool:
        return self.step_s <= FIXED_SHARE * step_s and self.floor_s <= HOST_SHARE * step_s

    @classmethod
    def fit(cls, measured: Sequence[tuple[int | Sequence[int], float]]) -> EncodeCost:
        """From tokens of the segments of one step, or of its only one, and seconds: least squares on relative errors,
        coefficients kept from being negative. What takes the same whatever it holds is the floor, and no part of that.

        Raises:
            ValueError: nothing was measured.
        """
        if not measured:
            raise ValueError("a cost needs at least one measurement.")
        steps = [np.atleast_1d(np.asarray(tokens, dtype=np.float64)) for tokens, _ in measured]
        seconds = np.asarray([seconds for _, seconds in measured], dtype=np.float64)
        columns = np.stack([[1.0, tokens.sum(), np.square(tokens).sum()] for tokens in steps])
        floor_s = _floor_s(columns[:, 1], seconds)
        above = seconds > FLAT * floor_s
        step_s, token_s, pair_s = _non_negative(columns[above] / seconds[above, None], np.ones(above.sum()))
        return cls(step_s, token_s, pair_s, floor_s=floor_s)


@dataclass
class Pace:
    """What encoding costs this process, by its own clock: it follows what steps take, slowly. One thread writes it."""

    cost: EncodeCost
    last_s: float = 0.0
    num_steps: int = 0
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST_STEPS))

    def ran(self, num_tokens: Sequence[int], num_rows: int, seconds: float) -> None:
        """A step encoded so many tokens of each of several segments, and ran ``num_rows`` tokens of requests."""
        self.last_s = time.monotonic()
        if MOST_ROWS * num_rows > sum(num_tokens):
            return  # it says more of something else
        measured = replace(self.cost, scale=1.0, spread=0.0)
        segments_s = sum(measured.marginal_s(count) for count in num_tokens)
        predicted_s = max(measured.floor_s, measured.step_s + measured.marginal_s(num_rows) + segments_s)
        self.num_steps += 1
        if self.num_steps <= FIRST_STEPS or predicted_s <= 0 or seconds <= 0:
            return
        self._ratios.append(min(max(seconds / predicted_s, 1 / LARGEST_RATIO), LARGEST_RATIO))
        if len(self._ratios) >= FEWEST_STEPS:
            scale, spread = _agreed(self._ratios)
            self.cost = replace(measured, scale=scale, spread=spread)


class Lately:
    """What something took of late: the median, so that a hiccup is none, without the first, which compiles."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=LATEST_STEPS)
        self._is_first = True

    def took(self, seconds: float) -> None:
        if not self._is_first:
            self._seen.append(seconds)
        self._is_first = False

    @property
    def seconds(self) -> float:
        """0 if nothing is known."""
        seen = list(self._seen)  # another thread may add to it
        return float(np.median(seen)) if seen else 0.0


def _floor_s(num_tokens: Any, seconds: Any) -> float:
    """What the steps take that take the same, though one has far more tokens than another; 0 if there are none, or too
    few that clearly take more to tell what tokens take."""
    flat = seconds <= FLAT * seconds.min()
    is_flat = num_tokens[flat].max() >= FLAT_TOKENS * num_tokens[flat].min()
    floor_s = float(np.median(seconds[flat]))
    return floor_s if is_flat and (seconds > FLAT * floor_s).sum() > 1 else 0.0


def _agreed(ratios: Iterable[float]) -> tuple[float, float]:
    """The median, and by what factor nearly all are apart from it at most."""
    low, middle, high = np.quantile(list(ratios), [1 - AGREE_SHARE, 0.5, AGREE_SHARE])
    return float(middle), float(max(high / middle, middle / low))


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

    def times(self, factor: float) -> LinkCost:
        return LinkCost(self.latency_s * factor, self.byte_s * factor)

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


# What is made here need not come.
NO_LINK = LinkCost(0.0, 0.0)
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
    names = ("step_s", "token_s", "pair_s", "scale", "spread", "floor_s", "batch_tokens")
    is_sound = set(fields) == set(names) and all(isinstance(fields[n], (int, float)) for n in names)
    if not is_sound or not float(fields["batch_tokens"]).is_integer():
        raise ValueError(f"{fields!r:.80} is no cost.")
    return EncodeCost(**{name: float(fields[name]) for name in names[:-1]}, batch_tokens=int(fields["batch_tokens"]))

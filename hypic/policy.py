"""What may be reused of a prompt and how: frozen settings that an answer depends on, never on what is cached.

A *seam* is a run of a segment's tokens that is run in context in every request; what lies between two seams is an
*interior*, which is cached. By default a segment has one seam, at its head. All other ways spend more tokens on coming
closer to full recompute; ``hypic eval --knobs`` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard, get_args

from hypic.errors import ConfigError

Reuse = Literal["segments", "prefix", "none"]
Compose = Literal["transition", "addition", "last"]
# Times a segment's tokens that may be run to encode all of its interiors; each is encoded from the segment's start.
MOST_ENCODED = 32
# Openings are looked for among so many of a segment's first tokens.
FARTHEST = 64
COUNTS = ("seam", "min_segment_tokens", "tail_seam", "seam_every", "live_last")


def settle(values: object) -> None:
    """Turns NumPy's numbers and flags in a frozen dataclass, such as tables give them, into Python's own."""
    for name, value in vars(values).items():
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            object.__setattr__(values, name, value.item())


def is_listed(given: object) -> TypeGuard[Iterable[Any]]:
    """Whether ``given`` is a list of any kind: neither text, bytes nor a mapping, which Python would go through too."""
    return isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | Mapping)


def one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """
    Raises:
        ConfigError: ``value`` is none of ``allowed``.
    """
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(map(repr, allowed))}.")


def check_flag(name: str, value: object) -> None:
    """
    Raises:
        ConfigError: ``value`` is neither ``True`` nor ``False``. Others would be taken for one of them, and text such
            as ``"no"`` for the wrong one.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; pass True or False.")


def check_count(name: str, value: object, *, optional: bool = True) -> None:
    """
    Raises:
        ConfigError: ``value`` is no number of tokens or segments, nor ``None`` where that is ``optional``.
    """
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        unit = "segments" if name == "live_last" else "tokens"
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of {unit}, 0 or more.")


def check_opening(value: object) -> None:
    """
    Raises:
        ConfigError: ``value`` is no number of tokens up to ``FARTHEST``.
    """
    check_count("seam_opening", value, optional=False)
    if isinstance(value, int) and value > FARTHEST:
        raise ConfigError(
            f"seam_opening is {value}; it must be at most {FARTHEST}: openings are looked for in the head."
        )


@dataclass(frozen=True)
class Policy:
    """What may be reused and how; part of what an answer depends on, never of what is cached.

    ``reuse``: ``segments`` (position-independent), ``prefix`` (exact heads only) or ``none``.
    ``seam`` is the number of tokens run in context at each segment's head; below the model's
    convolution width minus one it is an inexact ablation. Segments shorter than
    ``min_segment_tokens`` (default ``4 * seam``) are run live. ``compose`` and ``rotate`` are
    ablations for measurement: ``addition`` replaces an interior's transition by the identity,
    ``last`` by zero; ``rotate=False`` leaves cached keys at their local positions.

    Four settings run more in context: ``tail_seam`` tokens at each segment's end; a seam of at least
    ``seam_share`` of the segment's length; another seam every ``seam_every`` tokens of a segment (0: none),
    with an entry for each interior between two of them; and the prompt's last ``live_last`` segments in full.
    Each of those interiors is encoded from the segment's start, which takes about ``n^2 / (2 seam_every)`` tokens for a
    segment of ``n``; a segment for which that is more than 32 n is refused.

    ``seam_opening`` lets a seam follow a segment's opening: the short lines and sentences that it begins with, of up
    to 16 tokens each, that end within its first ``seam_opening`` tokens, and two tokens behind them
    (``engine/opening.py``). ``None`` is what the checkpoint's ``hypic.json`` says, 0 without one: seams are then as
    wide in every segment. A segment with a ``seam`` of its own keeps that.

    ``primed=False`` encodes segments with nothing before them although the engine has a text to encode them behind
    (``EngineConfig.primer``). Where that text has rungs a segment is encoded behind the one that fits its place in the
    prompt, once for each rung that it is met behind; ``rungs=False`` encodes it once for all places, behind the middle
    one, which is less close to full recompute.

    Raises:
        ConfigError: a value lies outside its range.
    """

    reuse: Reuse = "segments"
    seam: int = 8
    min_segment_tokens: int | None = None
    compose: Compose = "transition"
    rotate: bool = True
    deterministic: bool = False
    tail_seam: int = 0
    seam_share: float = 0.0
    seam_every: int = 0
    live_last: int = 0
    primed: bool = True
    rungs: bool = True
    seam_opening: int | None = None

    def __post_init__(self) -> None:
        settle(self)
        one_of("reuse", self.reuse, get_args(Reuse))
        one_of("compose", self.compose, get_args(Compose))
        for name in ("rotate", "deterministic", "primed", "rungs"):
            check_flag(name, getattr(self, name))
        for name in COUNTS:
            check_count(name, getattr(self, name), optional=name == "min_segment_tokens")
        if self.seam_opening is not None:
            check_opening(self.seam_opening)
        share = self.seam_share
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ConfigError(f"seam_share is {share!r}; it must be a share of a segment's length from 0 to 1.")
        if self.seam_every and (self.seam == 0 or self.seam_every <= self.seam):
            raise ConfigError(
                f"seam_every is {self.seam_every} with a seam of {self.seam}; "
                "it must be more than the seam, and that at least 1."
            )

    @property
    def by_place(self) -> bool:
        """Whether what a segment is encoded behind hangs on its place in the prompt."""
        return self.primed and self.rungs

    @property
    def shortest(self) -> int:
        """Fewest tokens for which a segment is cached."""
        return 4 * self.seam if self.min_segment_tokens is None else self.min_segment_tokens

    def head_seam(self, num_tokens: int, seam: int | None = None, opening: int = 0) -> int:
        """Tokens at the head of a segment of ``num_tokens`` that are run in context; ``seam`` is its own width,
        ``opening`` what its opening takes."""
        return max(self.seam, math.ceil(self.seam_share * num_tokens), opening) if seam is None else seam

    def interiors(self, num_tokens: int, seam: int | None = None) -> tuple[tuple[int, int], ...]:
        """Which tokens of a segment of ``num_tokens`` are cached, as ``(start, stop)`` in order; none: it runs live.

        ``seam`` is the width of the segment's head seam, where that is not the policy's alone.
        """
        start, stop = self.head_seam(num_tokens, seam), num_tokens - self.tail_seam
        if self.reuse != "segments" or start >= stop or num_tokens < self.shortest:
            return ()
        if not self.seam_every:
            return ((start, stop),)
        # A rest too short to be worth a seam of its own stays with the interior before it.
        ends = [*range(start + self.seam_every - self.seam, stop - 2 * self.seam, self.seam_every), stop]
        starts = [start, *(end + self.seam for end in ends[:-1])]
        return tuple(zip(starts, ends, strict=True))

    def check_encoding(self, num_tokens: int, seam: int | None = None) -> None:
        """
        Raises:
            ConfigError: ``seam_every`` is so small for a segment of ``num_tokens`` that encoding it costs too much.
        """
        least, share = self, self._encoded_share(num_tokens, seam)
        if share <= MOST_ENCODED:
            return
        while (now := least._encoded_share(num_tokens, seam)) > MOST_ENCODED:
            more = math.ceil(least.seam_every * now / MOST_ENCODED)
            least = least.with_(seam_every=max(least.seam_every + 1, more))
        raise ConfigError(
            f"seam_every is {self.seam_every}, with which encoding a segment of {num_tokens:,} tokens would run "
            f"{share:,.1f} times as many; at most {MOST_ENCODED} times are run: set seam_every to {least.seam_every} "
            "or more, or cut the segment into shorter ones."
        )

    def _encoded_share(self, num_tokens: int, seam: int | None) -> float:
        """Tokens that are run to encode all interiors of a segment, over its own."""
        interiors = self.interiors(num_tokens, seam) if self.seam_every else ()
        return sum(stop for _, stop in interiors) / max(1, num_tokens)

    def num_cached(self, num_tokens: int, seam: int | None = None) -> int:
        """Tokens of a segment of ``num_tokens`` that are not run when it is cached."""
        return sum(stop - start for start, stop in self.interiors(num_tokens, seam))

    def with_(self, **changes: Any) -> Policy:
        """A copy with some fields changed."""
        return replace(self, **changes)

"""The arms: ways of computing the same item, each a prompt and a policy. ``full`` is what all others are held against.

Segments of fewer than 32 tokens run live in every arm, as by default, so that arms differ in one thing only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hypic.types import Kind, Policy, Prompt, Segment
from hypic_apps.eval.items import Item

SHORTEST = 32
FULL = "full"
MAIN = "transition"  # the default policy; its exact match against full recompute is the comparison named in advance
SEAMS = (0, 4, 8, 16, 32)
Build = Callable[[Item, str], Prompt | None]


@dataclass(frozen=True)
class Arm:
    """``company`` is how many copies of the prompt run beside it; ``note`` says what it is."""

    name: str
    policy: Policy
    note: str
    build: Build
    company: int = 0


def _segments(item: Item) -> list[Segment]:
    documents: Sequence[Kind] = ["document"] * len(item.passages)
    kinds = item.kinds or documents
    return [Segment(text, kind=kind) for text, kind in zip(item.passages, kinds, strict=True)]


def _head(system: str) -> list[Segment]:
    return [Segment(system, kind="system")] if system else []


def plain(item: Item, system: str) -> Prompt:
    """One segment per passage, then the question."""
    return Prompt([*_head(system), *_segments(item)], item.question)


def joined(item: Item, system: str) -> Prompt:
    """One text, tokenised as one."""
    return Prompt(_head(system), "\n\n".join([*item.passages, item.question]))


def no_passages(item: Item, system: str) -> Prompt:
    """The question alone."""
    return Prompt(_head(system), item.question)


def gold_removed(item: Item, system: str) -> Prompt | None:
    """Without the passages that the answer rests on; ``None`` for items that rest on none, or on all."""
    if not item.gold or len(item.gold) == len(item.passages):
        return None
    kept = [s for number, s in enumerate(_segments(item)) if number not in item.gold]
    return Prompt([*_head(system), *kept], item.question)


def question_first(item: Item, system: str) -> Prompt:
    """The question before the passages too."""
    return Prompt([*_head(system), Segment(item.question, cache=False), *_segments(item)], item.question)


def last_live(number: int) -> Build:
    """The last ``number`` passages run in context."""

    def build(item: Item, system: str) -> Prompt:
        found, first = _segments(item), len(item.passages) - number
        live = [Segment(s.text, kind=s.kind, cache=False) if n >= first else s for n, s in enumerate(found)]
        return Prompt([*_head(system), *live], item.question)

    return build


def introduced(item: Item, system: str) -> Prompt:
    """A short live text before each passage."""
    parts = [part for s in _segments(item) for part in (Segment("Next passage:", cache=False), s)]
    return Prompt([*_head(system), *parts], item.question)


NONE = Policy(reuse="none")
CACHED = Policy(min_segment_tokens=SHORTEST)
_CORE = (
    Arm(FULL, NONE, "full recompute", plain),
    Arm("full-again", NONE, "full recompute in another batch shape: the noise floor", plain, company=1),
    Arm("full-joined", NONE, "full recompute of the joined text, tokenised as one", joined),
    Arm(MAIN, CACHED, "segments, transition, a seam of 8: the default", plain),
    *(Arm(f"seam-{w}", CACHED.with_(seam=w), f"the same with a seam of {w}", plain) for w in SEAMS if w != 8),
    Arm("addition", CACHED.with_(compose="addition"), "states added up without transitions", plain),
    Arm("last", CACHED.with_(compose="last"), "only the last segment's state", plain),
    Arm("no-rotation", CACHED.with_(rotate=False), "keys left at their local positions", plain),
    Arm("no-passages", NONE, "full recompute of the question alone", no_passages),
    Arm("gold-removed", NONE, "full recompute without the passages with the answer", gold_removed),
)
# Ways to come closer to full recompute that cost something; each is also run in full where its prompt is another one.
_KNOBS = (
    Arm("seam-64", CACHED.with_(seam=64), "a seam of 64", plain),
    Arm("last-live-1", CACHED, "the last passage runs live", last_live(1)),
    Arm("last-live-2", CACHED, "the last two passages run live", last_live(2)),
    Arm("introduced", CACHED, "a short live text before each passage", introduced),
    Arm("full-introduced", NONE, "the same prompt in full", introduced),
    Arm("question-first", CACHED, "the question before the passages too", question_first),
    Arm("full-question-first", NONE, "the same prompt in full", question_first),
)
ARMS: Mapping[str, Arm] = {arm.name: arm for arm in (*_CORE, *_KNOBS)}
DEFAULT = tuple(arm.name for arm in _CORE)
KNOBS = tuple(arm.name for arm in _KNOBS)

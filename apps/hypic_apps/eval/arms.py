"""The arms: ways of computing the same item, each a prompt and a policy. ``full`` is what all others are held against.

Segments of fewer than 32 tokens run live in every arm, as by default, so that arms differ in one thing only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hypic.types import Kind, Policy, Prompt, Segment
from hypic_apps.eval.items import Item

SHORTEST = 32
BEHIND = "primer-"
CONTEXT_WORDS = 8
FULL = "full"
MAIN = "transition"  # the default policy; its exact match against full recompute is the comparison named in advance
UNPRIMED = "unprimed"  # as ``MAIN`` is for a model without a primer
SEAMS = (0, 4, 8, 16, 32)
Build = Callable[[Item, str], Prompt | None]


@dataclass(frozen=True)
class Arm:
    """``company`` is how many prompts more than in full recompute run beside it; ``note`` says what it is; ``primer``
    is a text to encode segments behind instead of the model's own."""

    name: str
    policy: Policy
    note: str
    build: Build
    company: int = 0
    primer: str | None = None


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


def edges(seam: int) -> Build:
    """A seam of ``seam`` tokens for the first and the last passage."""

    def build(item: Item, system: str) -> Prompt:
        found, ends = _segments(item), (0, len(item.passages) - 1)
        wider = [replace(s, seam=seam) if n in ends else s for n, s in enumerate(found)]
        return Prompt([*_head(system), *wider], item.question)

    return build


def halves(item: Item, system: str) -> Prompt:
    """Every passage as two segments, cut at a space near its middle: what shorter passages would give."""
    parts = [replace(s, text=half) for s in _segments(item) for half in _cut(s.text)]
    return Prompt([*_head(system), *parts], item.question)


def _cut(text: str) -> tuple[str, ...]:
    """The space stays with the second half, where it stands as live text in the place of glue."""
    middle = text.find(" ", len(text) // 2)
    return (text,) if middle < 0 else (text[:middle], text[middle:])


def introduced(item: Item, system: str) -> Prompt:
    """A short live text before each passage."""
    parts = [part for s in _segments(item) for part in (Segment("Next passage:", cache=False), s)]
    return Prompt([*_head(system), *parts], item.question)


def resumed(item: Item, system: str) -> Prompt:
    """Before each passage, live, the first words of the passage before it."""
    found = _segments(item)
    heads = [Segment(" ".join(s.text.split()[:CONTEXT_WORDS]), cache=False) for s in found]
    parts = [part for head, s in zip(heads, found[1:], strict=False) for part in (head, s)]
    return Prompt([*_head(system), *found[:1], *parts], item.question)


NONE = Policy(reuse="none")
CACHED = Policy(min_segment_tokens=SHORTEST)
FLAT = CACHED.with_(seam_opening=0)
_CORE = (
    Arm(FULL, NONE, "full recompute", plain),
    Arm("full-again", NONE, "full recompute in another batch shape: the noise floor", plain, company=1),
    Arm("full-joined", NONE, "full recompute of the joined text, tokenised as one", joined),
    Arm(MAIN, CACHED, "segments as by default: transition, the model's own seams and primer, rungs by place", plain),
    *(Arm(f"seam-{w}", FLAT.with_(seam=w), f"the same with a seam of {w}, whatever the opening", plain) for w in SEAMS),
    Arm("middle-rung", CACHED.with_(rungs=False), "the default behind the primer's middle rung for all places", plain),
    Arm(UNPRIMED, CACHED.with_(primed=False), "the default, but segments encoded with nothing before them", plain),
    Arm("addition", CACHED.with_(compose="addition"), "states added up without transitions", plain),
    Arm("last", CACHED.with_(compose="last"), "only the last segment's state", plain),
    Arm("no-rotation", CACHED.with_(rotate=False), "keys left at their local positions", plain),
    Arm("no-passages", NONE, "full recompute of the question alone", no_passages),
    Arm("gold-removed", NONE, "full recompute without the passages with the answer", gold_removed),
)
# Ways to come closer to full recompute that cost something; each is also run in full where its prompt is another one.
_KNOBS = (
    Arm("unprimed-seam-32", FLAT.with_(primed=False, seam=32), "a seam of 32 and nothing before a segment", plain),
    Arm("seam-64", FLAT.with_(seam=64), "a seam of 64", plain),
    *(Arm(f"tail-{n}", CACHED.with_(tail_seam=n), f"the last {n} tokens of a segment too", plain) for n in (8, 16)),
    Arm("seam-4-tail-4", FLAT.with_(seam=4, tail_seam=4), "eight tokens, four at each end", plain),
    Arm("seam-24-tail-8", FLAT.with_(seam=24, tail_seam=8), "a seam of 24, the last 8 too", plain),
    Arm("share-12", CACHED.with_(seam_share=0.125), "a seam of an eighth of the segment", plain),
    Arm("share-25", CACHED.with_(seam_share=0.25), "a seam of a quarter of the segment", plain),
    Arm("every-32", CACHED.with_(seam_every=32), "another seam every 32 tokens", plain),
    Arm("every-16", CACHED.with_(seam_every=16), "another seam every 16 tokens", plain),
    Arm("seam-4-every-12", FLAT.with_(seam=4, seam_every=12), "a seam of 4 every 12 tokens", plain),
    *(Arm(f"last-live-{n}", CACHED.with_(live_last=n), f"the last {n} passages run live", plain) for n in (1, 2)),
    Arm("edges-32", CACHED, "a seam of 32 for the first and the last passage", edges(32)),
    Arm("halves", CACHED.with_(min_segment_tokens=16), "each passage as two segments", halves),
    Arm("full-halves", NONE, "the same prompt in full", halves),
    Arm("introduced", CACHED, "a short live text before each passage", introduced),
    Arm("full-introduced", NONE, "the same prompt in full", introduced),
    Arm("resumed", CACHED, "live, the first words of the passage before", resumed),
    Arm("full-resumed", NONE, "the same prompt in full", resumed),
    Arm("question-first", CACHED, "the question before the passages too", question_first),
    Arm("full-question-first", NONE, "the same prompt in full", question_first),
)
ARMS: Mapping[str, Arm] = {arm.name: arm for arm in (*_CORE, *_KNOBS)}
DEFAULT = tuple(arm.name for arm in _CORE)
KNOBS = tuple(arm.name for arm in _KNOBS)


def behind(name: str, primer: str) -> Arm:
    """The default policy behind another primer, which goes by ``name``."""
    return Arm(f"{BEHIND}{name}", CACHED, note(BEHIND), plain, primer=primer)


def note(name: str) -> str:
    """What an arm is; empty if it is not known here."""
    if name.startswith(BEHIND):
        return "the default behind another primer"
    return ARMS[name].note if name in ARMS else ""

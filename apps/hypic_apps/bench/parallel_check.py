"""Whether several workers give what one gives: entries of the same texts, and the answers that come of them.

What is run in steps of the same shape must agree. Entries are compared where both sides encode one segment in a step;
answers, where all entries are there (``fixed``), and for ``deterministic`` requests, whose segments are each encoded
alone whoever does it. Tokens and log probabilities must then be equal bit by bit, provided that one worker's own are
from run to run.

A fast request's steps hold what is there to be run, and with several workers that is less, and its own rows run as
entries come: other matrix shapes and other pieces, so in half precision other rounding, and a greedy answer parts where
two tokens are nearly as likely. How far log probabilities move by that, one worker shows alone, that encodes one
segment in a step and runs its rows in pieces, against all in one step. Several workers may move them ``FACTOR`` times
as far. What a real fault would do to them is measured beside it: documents in another order (a wrong history, with
right entries), and segments without their seams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hypic.engine.payload import difference, same_within
from hypic.engine.plan import Piece
from hypic.engine.scheduler import MIN_PREFILL_TOKENS
from hypic.engine.store.image import EntryImage
from hypic_apps.bench.parallel import Rig, Said

CHECKED_SEGMENTS = 8
CHECKED_TOKENS = 8
TOP = 20
# Fewer than the rows of the request that is checked, so that they run in more than one step.
PIECE_TOKENS = MIN_PREFILL_TOKENS
FACTOR = 4.0
# What log probabilities may be apart whatever rounding does, in nats, by the numeric type of the weights.
NATS = {torch.float64: 1e-9, torch.float32: 1e-4}
NATS_HALF = 0.05
Images = Mapping[bytes, EntryImage]
Record = dict[str, Any]


def check(rig: Rig, num_workers: int, segment_tokens: int) -> Record:
    """One worker against so many; ``is_right`` is the verdict."""
    others = num_workers - 1
    documents = rig.documents([segment_tokens] * (others * math.ceil(CHECKED_SEGMENTS / others)), 7)
    rig.use(1)
    expected, entries = _alone(rig, documents)
    repeated, again = _alone(rig, documents)
    cold, exact, exact_again = _cold(rig, documents), _cold(rig, documents, True), _cold(rig, documents, True)
    controls = {"other_order": _cold(rig, [*documents[1:], documents[0]]), "no_seam": _cold(rig, documents, seam=0)}
    pieces, _ = _alone(rig, documents, PIECE_TOKENS)
    rig.use(num_workers, "elsewhere")
    for start in range(0, len(documents), others):
        rig.ask(documents[start : start + others])
    found, images = _said(rig, documents), rig.images()
    rig.forget()
    before = rig.counts.came
    exact_found, num_exact = _cold(rig, documents, True), rig.counts.came - before
    rig.use(num_workers, "round-robin")  # which sends some whatever they cost
    cold_found, num_cold = _cold(rig, documents), rig.counts.came - before - num_exact
    record = {
        **{"workers": num_workers, "segments": len(documents), "segment_tokens": segment_tokens},
        **{"equal_entries": _num_equal(images, entries), "entries_differ_by": _apart(images, entries)},
        **{"repeated_differ_by": _apart(again, entries), "is_repeatable": repeated == expected},
        **{"same_tokens": found.tokens == expected.tokens, "same_logprobs": found == expected},
        "deterministic": {
            **{"same_tokens": exact_found.tokens == exact.tokens, "same_logprobs": exact_found == exact},
            **{"is_repeatable": exact_again == exact, "entries_sent": num_exact},
        },
        "fast": {**_fast(cold_found, cold, (expected, pieces), controls), "entries_sent": num_cold},
    }
    return {**record, **_verdict(record, rig.layout.dtype)}


def _said(rig: Rig, documents: Sequence[Piece], **changes: Any) -> Said:
    return rig.ask(documents, CHECKED_TOKENS, TOP, **changes).said


def _alone(rig: Rig, documents: Sequence[Piece], piece_tokens: int | None = None) -> tuple[Said, Images]:
    """Segments encoded one in a step, and the answer when all are there, its own rows in pieces of so many tokens."""
    rig.encode_alone(documents)
    with rig.steps_of(piece_tokens):
        said, images = _said(rig, documents), rig.images()
    rig.forget()
    return said, images


def _cold(rig: Rig, documents: Sequence[Piece], deterministic: bool = False, **changes: Any) -> Said:
    said = _said(rig, documents, deterministic=deterministic, **changes)
    rig.forget()
    return said


def _fast(found: Said, cold: Said, alone: Sequence[Said], controls: Mapping[str, Said]) -> Record:
    """Several workers' answer against one worker's; what one worker's other steps (``alone``) and faults do to that."""
    parted = [at for said in alone if (at := parting(said, cold)) is not None]
    return {
        **{"same_first_token": found.tokens[:1] == cold.tokens[:1], "same_tokens": found.tokens == cold.tokens},
        **{"parts_at": parting(found, cold), "margin_nats": margin(found, cold), "differs_by_nats": apart(found, cold)},
        **{"alone_parts_at": min(parted, default=None), "rounding_nats": max(apart(said, cold) for said in alone)},
        "control_nats": {name: apart(said, cold) for name, said in controls.items()},
    }


def parting(one: Said, other: Said) -> int | None:
    """The number of the first token that differs."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    return next((number for number, (mine, theirs) in enumerate(pairs) if mine != theirs), None)


def margin(one: Said, other: Said) -> float | None:
    """How much likelier, in nats, ``other`` holds its own token than the one with which ``one`` parts from it."""
    at = parting(one, other)
    if at is None:
        return None
    return other.logprobs[at].logprob - dict(other.logprobs[at].top).get(one.tokens[at], -math.inf)


def apart(one: Said, other: Said) -> float:
    """The largest difference of a log probability, in nats, up to the token where they part; infinite where fewer than
    half of the likeliest tokens are the same."""
    at, worst = parting(one, other), 0.0
    for mine, theirs in zip(one.logprobs[:at], other.logprobs[:at], strict=True):
        worst = max(worst, _apart_at(dict(mine.top), dict(theirs.top)))
    if at is not None:
        worst = max(worst, _apart_at(dict(one.logprobs[at].top), dict(other.logprobs[at].top)))
    return worst


def _apart_at(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    shared = mine.keys() & theirs.keys()
    if 2 * len(shared) < max(len(mine), len(theirs)):
        return math.inf
    return max((abs(mine[id] - theirs[id]) for id in shared), default=0.0)


def _verdict(record: Record, dtype: torch.dtype) -> Record:
    """Each of the three must hold; ``is_sharp`` says whether the last would see a fault of the controls' size."""
    fast, exact = record["fast"], record["deterministic"]
    allowed = max(NATS.get(dtype, NATS_HALF), FACTOR * fast["rounding_nats"])
    is_close = record["entries_differ_by"] <= max(same_within(dtype), 2 * record["repeated_differ_by"])
    is_whole = dtype in (torch.float64, torch.float32) or record["equal_entries"] == record["segments"]
    is_fixed = record["same_tokens"] and (record["same_logprobs"] or record["equal_entries"] < record["segments"])
    demands = {
        "entries": is_close,
        "fixed steps": is_fixed or not is_whole or not record["is_repeatable"],
        "deterministic": exact["same_logprobs"] or not exact["is_repeatable"],
        "fast": fast["differs_by_nats"] <= allowed,
    }
    return {
        **{"allowed_nats": allowed, "is_sharp": min(fast["control_nats"].values()) > allowed},
        **{"failed": [name for name, holds in demands.items() if not holds], "is_right": all(demands.values())},
    }


def _num_equal(found: Images, expected: Images) -> int:
    """Entries that are equal bit by bit."""
    return sum(_is_equal(found[key], expected[key]) for key in expected)


def _is_equal(one: EntryImage, other: EntryImage) -> bool:
    mine, theirs = one.tensors, other.tensors
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _apart(found: Images, expected: Images) -> float:
    differing = [key for key in expected if not _is_equal(found[key], expected[key])]
    return max((difference(found[key], expected[key]) for key in differing), default=0.0)

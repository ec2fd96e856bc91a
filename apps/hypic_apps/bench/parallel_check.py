"""Whether several workers give what one gives: entries of the same texts, and the tokens that come of them.

Entries are compared where both sides run the same step: one segment and nothing else. In float64 and float32 they must
agree and the tokens be equal. In half precision they may differ as one worker's own do from run to run, or by rounding;
tokens must be equal if all entries are, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hypic.engine.payload import difference, same_within
from hypic.engine.store.image import EntryImage
from hypic_apps.bench.parallel import Rig, Tokens

CHECKED_SEGMENTS = 4
CHECKED_TOKENS = 8
Images = Mapping[bytes, EntryImage]
Record = dict[str, Any]


def check(rig: Rig, num_workers: int, segment_tokens: int) -> Record:
    """One worker against so many; ``is_right`` is the verdict."""
    others = num_workers - 1
    documents = rig.documents([segment_tokens] * (others * math.ceil(CHECKED_SEGMENTS / others)), 7)
    rig.use(1)
    expected, entries = _alone(rig, documents)
    repeated, again = _alone(rig, documents)
    cold_expected = _cold(rig, documents)
    rig.use(num_workers, "elsewhere")
    for start in range(0, len(documents), others):
        rig.ask(documents[start : start + others])
    found, images = rig.ask(documents, CHECKED_TOKENS)[1], rig.images()
    rig.forget()
    rig.use(num_workers)
    cold_found = _cold(rig, documents)
    record = {
        **{"workers": num_workers, "segments": len(documents), "segment_tokens": segment_tokens},
        **{"same_tokens": found == expected, "same_tokens_cold": cold_found == cold_expected},
        **{"equal_entries": _num_equal(images, entries), "entries_differ_by": _apart(images, entries)},
        **{"same_tokens_repeated": repeated == expected, "repeated_differ_by": _apart(again, entries)},
    }
    return {**record, "is_right": _is_right(record, rig.layout.dtype)}


def _alone(rig: Rig, documents: Any) -> tuple[Tokens, Images]:
    rig.encode_alone(documents)
    tokens, images = rig.ask(documents, CHECKED_TOKENS)[1], rig.images()
    rig.forget()
    return tokens, images


def _cold(rig: Rig, documents: Any) -> Tokens:
    _, tokens = rig.ask(documents, CHECKED_TOKENS)
    rig.forget()
    return tokens


def _is_right(record: Record, dtype: torch.dtype) -> bool:
    is_exact = dtype in (torch.float64, torch.float32) or record["equal_entries"] == record["segments"]
    is_close = record["entries_differ_by"] <= max(same_within(dtype), 2 * record["repeated_differ_by"])
    return is_close and (record["same_tokens"] or not is_exact)


def _num_equal(found: Images, expected: Images) -> int:
    """Entries that are equal bit by bit."""
    return sum(_is_equal(found[key], expected[key]) for key in expected)


def _is_equal(one: EntryImage, other: EntryImage) -> bool:
    mine, theirs = one.tensors, other.tensors
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def _apart(found: Images, expected: Images) -> float:
    differing = [key for key in expected if not _is_equal(found[key], expected[key])]
    return max((difference(found[key], expected[key]) for key in differing), default=0.0)

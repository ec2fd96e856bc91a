"""Items: a question about passages, its right answers, and which passages it needs. The same for every arm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hypic.types import Kind

# What an answer is held against: an exact short answer, the last line of a reasoned one, a long text, a refusal, a
# call of a tool.
Form = Literal["short", "reasoned", "long", "refusal", "call"]


@dataclass(frozen=True)
class Item:
    """``gold`` are the numbers of the passages that the answer rests on; ``kinds`` are the segments' kinds, one a
    passage, or empty for documents. ``answers`` holds every right one."""

    set: str
    number: int
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...] = ()
    form: Form = "short"
    kinds: tuple[Kind, ...] = ()


def digest(items: Sequence[Item]) -> str:
    """SHA-256 over the items as JSON lines."""
    found = hashlib.sha256()
    for item in items:
        found.update(json.dumps(asdict(item), ensure_ascii=False, sort_keys=True).encode() + b"\n")
    return found.hexdigest()

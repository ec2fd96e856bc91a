"""Engines that keep their segments on disk, and what lies there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hypic import LLM, Prompt, SamplingParams, Segment, saved
from hypic.saved import SavedEntry
from hypic.types import CacheReport

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048}
SETTINGS |= {"max_running": 4, "min_segment_tokens": 0}
SMALL = ("--threads", "1", "--memory", "64MiB", "--min-segment-tokens", "0")
SECRET = "The code of the door is four nine one two, and nobody but the miller is to know of it."
OTHER = "The river runs past an old mill where three brothers grind rye and oats for the town."
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def opened(folder: Path, root: Path, size: str = "64MiB", **settings: Any) -> LLM:
    return LLM(str(folder), **{**SETTINGS, **settings}, store=f"disk://{root}?size={size}")


def kept(root: Path) -> list[SavedEntry]:
    return [entry for entry in saved.entries(root) if isinstance(entry, SavedEntry)]


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def asked(llm: LLM, *segments: Segment) -> CacheReport:
    report = llm.generate(Prompt(segments, "Who grinds rye?"), ONE).report
    assert report is not None
    return report


def traces(root: Path, text: str, ids: list[int]) -> list[Path]:
    """Files that hold a text or its token ids, as numbers of four or eight bytes."""
    needles = [text.encode(), np.array(ids, "<i4").tobytes(), np.array(ids, "<i8").tobytes(), str(ids)[1:-1].encode()]
    return [path for path in files(root) if any(needle in path.read_bytes() for needle in needles)]

"""Scores of an exported model: one-hop questions under full recompute, and what reuse of segments changes.

The first by the training code in float32, the second through ``hypic.LLM``, both greedily. An answer is right if it is
the expected string, character by character.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from hypic import LLM, Policy, Prompt, SamplingParams, Segment
from hypic_apps.train.exam import Item, Papers, paper_of, right
from hypic_apps.train.export import load

SEED = 100
AT_ONCE = 32


def one_hop(folder: Path, papers: Papers, items: Sequence[Item]) -> dict[str, Any]:
    """The share of right answers under full recompute."""
    model, device = load(folder).eval(), torch.device("cpu")
    rows = sorted((papers.row_of(item) for item in items), key=len)
    batches = [rows[start : start + 8] for start in range(0, len(rows), 8)]
    correct = [bool(x) for batch in batches for x in right(model, paper_of(batch), device)]
    return share(correct)


def reuse(folder: Path, items: Sequence[Item], threads: int) -> dict[str, Any]:
    """The same items with ``reuse="none"`` and with ``reuse="segments"``: both shares, and how often they agree."""
    with LLM(str(folder), dtype="float32", device="cpu", threads=threads) as llm:
        answers = {way: _answers(llm, items, Policy(reuse=way)) for way in ("none", "segments")}
    found = {
        way: share([a == item.answer for a, item in zip(given, items, strict=True)]) for way, given in answers.items()
    }
    return {**found, "same": share([a == b for a, b in zip(answers["none"], answers["segments"], strict=True)])}


def prompt(item: Item) -> Prompt:
    """An item as it is asked: one segment per passage."""
    return Prompt([Segment(text) for text in item.passages], item.question)


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """How many of how many, as a share with its 95 % interval (Wilson's)."""
    low, high = wilson(sum(hits), len(hits))
    return {
        "num_items": len(hits),
        "num_true": sum(hits),
        "share": round(sum(hits) / len(hits), 4),
        "interval_95": [round(low, 4), round(high, 4)],
    }


def wilson(hits: int, number: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of ``hits`` in ``number`` (1927), at ``z`` standard deviations."""
    p, spread = hits / number, z * z / number
    middle = (p + spread / 2) / (1 + spread)
    half = z * sqrt(p * (1 - p) / number + spread / (4 * number)) / (1 + spread)
    return middle - half, middle + half


def _answers(llm: LLM, items: Sequence[Item], policy: Policy) -> list[str]:
    sampling, out = SamplingParams(max_tokens=48, temperature=0.0), []
    for item in items:
        out.append(llm.generate(prompt(item), sampling, policy=policy).text.strip())
        llm.forget(everything=True)
    return out

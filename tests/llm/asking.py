"""Prompts, settings and what is left when nothing runs: what all tests of ``LLM`` share."""

from __future__ import annotations

import time
from typing import Any

from hypic import LLM, Policy, Prompt, SamplingParams, Segment

REUSE = Policy(min_segment_tokens=0)
WORDS = "the river runs past an old mill where three brothers grind rye and oats for the town below".split()
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048}
SETTINGS |= {"max_running": 16, "policy": REUSE}


def passage(seed: int, num_words: int = 30) -> str:
    return f"Passage {seed}: " + " ".join(WORDS[(seed * 7 + i * (seed + 1)) % len(WORDS)] for i in range(num_words))


def asked(number: int = 0, *seeds: int) -> Prompt:
    segments = [Segment("You answer briefly.", kind="system"), *[Segment(passage(s)) for s in seeds or (1, 2, 3)]]
    return Prompt(segments, f"Question {number}: who grinds rye?")


def sampling(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def assert_idle(llm: LLM) -> None:
    """Nothing runs or is pinned, and without the cache all memory is free; aborts may still be on their way."""
    deadline = time.monotonic() + 20
    while any(llm.stats()["requests"].values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.stats()["requests"] == {"waiting": 0, "running": 0}
    assert llm.stats()["store"]["num_pinned"] == 0
    llm.forget(everything=True)
    stats = llm.stats()
    assert stats["pool"]["free"] == stats["pool"]["capacity"] and stats["store"]["held_bytes"] == 0

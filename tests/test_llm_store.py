"""A store on disk through the public surface: what one process encoded, the next one finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypic
from hypic import LLM, Prompt, SamplingParams, Segment

TEXT = " ".join(f"The {n}th report says that the harbour of Westby was opened in {1700 + n}." for n in range(12))
PROMPT = Prompt([Segment(TEXT, name="report.md", source="reports")], "When was it opened?")


def opened(path: Path, **settings: Any) -> LLM:
    store = f"device://64MiB,host://64MiB,disk://{path}?size=256MiB"
    return LLM(memory="512MiB", threads=1, store=store, max_context=1024, max_running=2, **settings)


def ask(llm: LLM) -> hypic.Completion:
    llm._loop.call(always_load)
    return llm.generate(PROMPT, SamplingParams(max_tokens=4, temperature=0.0))


def always_load(engine: Any) -> None:
    engine.tiers.costs.encode.see = lambda units, seconds: None
    engine.tiers.costs.encode.unit_s = 1e3


def test_the_next_process_finds_what_was_encoded(tmp_path: Path) -> None:
    with opened(tmp_path) as llm:
        cold = ask(llm)
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 1, "closing saves what is not saved yet"
    with opened(tmp_path) as again:
        warm = ask(again)
    assert cold.report is not None and warm.report is not None
    assert cold.report.segments[0].outcome == "encoded"
    assert (warm.report.segments[0].outcome, warm.report.segments[0].tier) == ("hit", "disk")
    assert warm.text == cold.text and warm.report.computed_tokens < cold.report.computed_tokens
    assert TEXT.encode() not in files[0].read_bytes(), "a file holds token ids, not text"


def test_another_form_of_storage_is_another_entry(tmp_path: Path) -> None:
    for settings in ({}, {"storage": "bfloat16"}, {"storage": "bfloat16", "drop_below": 0.001}):
        with opened(tmp_path, **settings) as llm:
            report = ask(llm).report
            assert report is not None and report.segments[0].outcome == "encoded", settings
    sizes = sorted(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert len(sizes) == 3 and sizes[0] < sizes[1] < sizes[2]

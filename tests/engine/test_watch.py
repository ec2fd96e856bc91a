"""The warning about prompts that are hardly ever reused."""

from __future__ import annotations

import logging

import pytest

from hypic.engine.watch import ReuseWatch
from hypic.types import CacheReport, Policy, SegmentReport


def report(reused: int, prompt: int = 1500, reuse: str = "segments") -> CacheReport:
    changed = SegmentReport(
        "document", "a", None, "encoded", 90, reason="same name but other text from character 3 ('x')"
    )
    return CacheReport((changed,), prompt, prompt - reused, reused, policy=Policy(reuse=reuse))


def warned(caplog: pytest.LogCaptureFixture, reports: list[CacheReport]) -> list[str]:
    watch = ReuseWatch()
    with caplog.at_level(logging.WARNING, "hypic"):
        for one in reports:
            watch.see(one)
    return [record.getMessage() for record in caplog.records]


def test_it_warns_once_with_the_commonest_reason(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warned(caplog, [report(10)] * 60)
    assert "0.7 %" in message and "same name but other text from character 3" in message and "'x'" not in message


@pytest.mark.parametrize(
    "reports", [[report(10)] * 19, [report(200)] * 60, [report(0, 900)] * 60, [report(0, reuse="none")] * 60]
)
def test_it_is_silent_otherwise(caplog: pytest.LogCaptureFixture, reports: list[CacheReport]) -> None:
    assert warned(caplog, reports) == []

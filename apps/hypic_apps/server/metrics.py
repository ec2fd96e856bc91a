"""Counters and histograms in Prometheus's text format (version 0.0.4). One event loop writes them, without locks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypic.types import Completion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TPOT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LATENCY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class Counter:
    """Sums by the value of one label; ``label=None`` for a plain sum."""

    name: str
    help: str
    label: str | None = None
    values: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, amount: float = 1, value: str = "") -> None:
        self.values[value] += amount

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "counter")
        if self.label is None:
            yield f"{self.name} {_number(self.values[''])}"
        for value in sorted(self.values) if self.label is not None else ():
            yield f'{self.name}{{{self.label}="{value}"}} {_number(self.values[value])}'


@dataclass
class Histogram:
    """Observations by their size; ``bounds`` are the buckets' upper ends."""

    name: str
    help: str
    bounds: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.help, "histogram")
        seen = 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{self.name}_bucket{{le="{bound}"}} {seen}'
        yield f"{self.name}_sum {_number(self.total)}"
        yield f"{self.name}_count {seen}"


@dataclass
class Metrics:
    """What the server counts itself; gauges and the store's counters come from the engine when they are asked for."""

    prompt_tokens: Counter = field(default_factory=lambda: Counter(
        "hypic:prompt_tokens_total", "Prompt tokens of finished requests."))  # fmt: skip
    generation_tokens: Counter = field(default_factory=lambda: Counter(
        "hypic:generation_tokens_total", "Generated tokens of finished requests."))  # fmt: skip
    reused_tokens: Counter = field(default_factory=lambda: Counter(
        "hypic:reused_tokens_total", "Prompt tokens that were not computed again."))  # fmt: skip
    computed_tokens: Counter = field(default_factory=lambda: Counter(
        "hypic:computed_tokens_total", "Prompt tokens that entered the model, segments encoded included."))  # fmt: skip
    segments: Counter = field(default_factory=lambda: Counter(
        "hypic:segments_total", "Segments of finished requests by outcome.", "outcome"))  # fmt: skip
    finished: Counter = field(default_factory=lambda: Counter(
        "hypic:requests_finished_total", "Finished requests by reason.", "finish_reason"))  # fmt: skip
    failed: Counter = field(default_factory=lambda: Counter(
        "hypic:requests_failed_total", "Requests that ended in an error, by its code.", "code"))  # fmt: skip
    aborted: Counter = field(default_factory=lambda: Counter(
        "hypic:requests_aborted_total", "Requests whose client went away."))  # fmt: skip
    ttft: Histogram = field(default_factory=lambda: Histogram(
        "hypic:time_to_first_token_seconds", "Seconds from arrival to the first token.", TTFT_S))  # fmt: skip
    tpot: Histogram = field(default_factory=lambda: Histogram(
        "hypic:time_per_output_token_seconds", "Seconds for each token after the first.", TPOT_S))  # fmt: skip
    latency: Histogram = field(default_factory=lambda: Histogram(
        "hypic:request_latency_seconds", "Seconds for the whole answer.", LATENCY_S))  # fmt: skip

    def finish(self, last: Completion) -> None:
        """Takes the last piece of an answer into account."""
        self.finished.add(1, last.finish_reason or "stop")
        usage, report = last.usage, last.report
        if usage is not None:
            self.prompt_tokens.add(usage.prompt_tokens)
            self.generation_tokens.add(usage.completion_tokens)
        if report is None:
            return
        self.reused_tokens.add(report.reused_tokens)
        self.computed_tokens.add(report.computed_tokens)
        for segment in report.segments:
            self.segments.add(1, segment.outcome)
        self._times(report.times_s, 0 if usage is None else usage.completion_tokens)

    def _times(self, times_s: Mapping[str, float], num_tokens: int) -> None:
        if "ttft" in times_s:
            self.ttft.observe(times_s["ttft"])
        if "total" in times_s:
            self.latency.observe(times_s["total"])
        if {"ttft", "total"} <= set(times_s) and num_tokens > 1:
            self.tpot.observe((times_s["total"] - times_s["ttft"]) / (num_tokens - 1))

    def render(self, stats: Mapping[str, Any] | None) -> str:
        """Everything as text; without ``stats``, when the engine is in a long step, its part is left out."""
        lines = [line for metric in vars(self).values() for line in metric.lines()]
        return "\n".join([*lines, *(_engine_lines(stats) if stats is not None else ())]) + "\n"


def _engine_lines(stats: Mapping[str, Any]) -> Iterator[str]:
    store, pool, requests = stats["store"], stats["pool"], stats["requests"]
    for name, help, kind, value in (
        ("num_requests_running", "Requests that hold memory of the engine.", "gauge", requests["running"]),
        ("num_requests_waiting", "Requests that wait for memory of the engine.", "gauge", requests["waiting"]),
        ("cache_bytes", "Bytes that cached entries hold.", "gauge", store["held_bytes"]),
        ("cache_entries", "Cached entries, snapshots included.", "gauge", store["num_entries"]),
        ("pool_bytes", "Bytes of the one pool of pages and state slots.", "gauge", pool["num_bytes"]),
        ("cache_hits_total", "Segments found in the store.", "counter", store["hits"]),
        ("cache_misses_total", "Segments not found in the store.", "counter", store["misses"]),
        ("cache_evictions_total", "Entries evicted.", "counter", store["evictions"]),
    ):
        yield from _head(f"hypic:{name}", help, kind)
        yield f"hypic:{name} {_number(value)}"


def _head(name: str, help: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {help}"
    yield f"# TYPE {name} {kind}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))

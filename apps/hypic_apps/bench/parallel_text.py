"""The tables of ``hypic bench parallel``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypic_apps.bench.records import number, table

Result = dict[str, Any]


def text(result: Result) -> str:
    """The tables."""
    parts = [part for run in result["runs"] for part in (_checks(run), _even(run), _uneven(run), _fetched(run))]
    return "\n\n".join(part for part in (*parts, _fleets(result)) if part)


def _even(run: Result) -> str:
    heads = ("segments", "workers", "p50 ms", "p90 ms", "speedup", "dispatch ms", "own part ms", "wait ms",
             "combine ms", "sent", "exchange ms a link", "GB/s a link", "again")  # fmt: skip
    rows = [
        (
            f"{r['segments']} x {r['segment_tokens']:,}", str(r["workers"]), number(r["ttft_ms_p50"]),
            number(r["ttft_ms_p90"]), number(r["speedup"]), number(r["dispatch_ms"]), number(r["own_ms"]),
            number(r["wait_ms"]), number(r["combine_ms"]), number(r["entries_sent"]), number(r["exchange_ms"]),
            number(r["link_gb_per_s"]), str(r["encoded_again"]),
        )
        for r in run["even"]
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _uneven(run: Result) -> str:
    heads = ("uneven segments", "workers", "longest first ms", "round robin ms", "ratio", "seeds")
    rows = [
        (
            f"{r['segments']} of about {r['mean_tokens']:,}", str(r["workers"]), number(r["longest-first_ms_p50"]),
            number(r["round-robin_ms_p50"]), number(r["ratio_p50"]), str(r["seeds"]),
        )
        for r in run["uneven"]
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _fetched(run: Result) -> str:
    heads = ("held elsewhere", "workers", "fetched", "p50 ms", "GB/s in all")
    rows = [
        (
            f"{r['segments']} x {r['segment_tokens']:,}", str(r["workers"]), number(r["entries_fetched"]),
            number(r["ttft_ms_p50"]), number(r["gb_per_s"]),
        )
        for r in run["fetched"]
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _fleets(result: Result) -> str:
    heads = ("simulated workers", "64 x 1k", "uneven", "p50 ms", "p90 ms", "p99 ms", "round robin p90 ms", "busy")
    rows: Sequence[Sequence[str]] = [
        (
            str(r["workers"]), number(r["cold_64x1024_speedup"], "x"), number(r["uneven_ratio"], "x"),
            *(number(r["longest-first_ttft_ms"][p]) for p in ("p50", "p90", "p99")),
            number(r["round-robin_ttft_ms"]["p90"]), f"{r['busy_share']:.0%}",
        )
        for r in result.get("simulated", ())
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _checks(run: Result) -> str:
    head = f"{run['geometry']}: {run.get('dtype', '-')}, entries by {', '.join(run.get('carriers', ())) or 'none'}"
    failed = [f"stopped: {run['error']}"] if "error" in run else []
    return "\n".join([head, *map(_checked, run["checked"]), *failed])


def _checked(found: Result) -> str:
    tokens, cold = ("the same" if found[key] else "OTHER" for key in ("same_tokens", "same_tokens_cold"))
    return (
        f"{found['workers']} workers: {tokens} tokens as one ({cold} when asked cold), {found['equal_entries']} of "
        f"{found['segments']} entries equal bit by bit, others apart by {found['entries_differ_by']:.1e} at most; "
        f"one worker's own, made twice, by {found['repeated_differ_by']:.1e}"
    )

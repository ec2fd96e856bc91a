"""The tables of ``hypic bench parallel``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypic_apps.bench.records import number, table

Result = dict[str, Any]


def text(result: Result) -> str:
    """The tables."""
    parts = [make(run) for run in result["runs"] for make in (_checks, _even, _uneven, _fetched, _handled)]
    return "\n\n".join(part for part in (*parts, _fleets(result)) if part)


def _even(run: Result) -> str:
    heads = ("segments", "workers", "p50 ms", "p90 ms", "speedup", "dispatch ms", "own part ms", "wait ms",
             "combine ms", "sent", "exchange ms a link", "GB/s a link", "again", "taken back")  # fmt: skip
    rows = [
        (
            f"{r['segments']} x {r['segment_tokens']:,}", str(r["workers"]), number(r["ttft_ms_p50"]),
            number(r["ttft_ms_p90"]), number(r["speedup"]), number(r["dispatch_ms"]), number(r["own_ms"]),
            number(r["wait_ms"]), number(r["combine_ms"]), number(r["entries_sent"]), number(r["exchange_ms"]),
            number(r["link_gb_per_s"]), str(r["encoded_again"]), str(r["taken_back"]),
        )
        for r in run["even"]
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _uneven(run: Result) -> str:
    heads = ("uneven segments", "workers", "longest first ms", "round robin ms", "ratio", "by tokens", "least", "seeds")
    rows = [
        (
            f"{r['segments']} of about {r['mean_tokens']:,}", str(r["workers"]), number(r["longest-first_ms_p50"]),
            number(r["round-robin_ms_p50"]), number(r["ratio_p50"]), number(r["ratio_by_tokens"]),
            number(r["ratio_min"]), str(r["seeds"]),
        )
        for r in run["uneven"]
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _fetched(run: Result) -> str:
    heads = ("held elsewhere", "workers", "fetched", "p50 ms", "ms an entry", "GB/s in all")
    rows = [
        (
            f"{r['segments']} x {r['segment_tokens']:,}", str(r["workers"]), number(r["entries_fetched"]),
            number(r["ttft_ms_p50"]), number(r["entry_ms"]), number(r["gb_per_s"]),
        )
        for r in run["fetched"]
    ]  # fmt: skip
    return table(heads, rows) if rows else ""


def _handled(run: Result) -> str:
    """What an entry that came has taken of the processors at both ends, beside its way."""
    heads = ("an entry that came", "workers", "packed ms", "checked ms", "written ms", "entries a parcel")
    kinds = (("", run["even"]), (" fetched", run["fetched"]))
    rows = [
        (
            f"{r['segments']} x {r['segment_tokens']:,}{what}", str(r["workers"]),
            *(number(r["handling"][name]) for name in ("pack_ms", "check_ms", "write_ms", "entries_a_parcel")),
        )
        for what, found in kinds for r in found if r.get("handling", {}).get("entries_a_parcel")
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
    exact, fast, size = found["deterministic"], found["fast"], f"{found['segments']} x {found['segment_tokens']:,}"
    own = f"; one worker's own, made twice, by {found['repeated_differ_by']:.1e}"
    lines = [
        f"{found['workers']} workers against one, {size} tokens: {'right' if found['is_right'] else 'WRONG'}"
        + "".join(f", {name}" for name in found["failed"]),
        f"  entries: {found['equal_entries']} of {found['segments']} equal bit by bit, others apart by "
        f"{found['entries_differ_by']:.1e} at most{own if found['entries_differ_by'] else ''}",
        f"  answer from them, in steps of the same shape: {_same(found)}",
        f"  deterministic, {exact['entries_sent']} of {found['segments']} encoded elsewhere: {_same(exact)}",
        f"  fast, {fast['entries_sent']} encoded elsewhere: {_parted(fast)}",
        f"    log probabilities {_nats(fast['differs_by_nats'])} apart; {_nats(fast['rounding_nats'])} by rounding "
        f"(one worker, other steps{_where(fast['alone_parts_at'])}); {_nats(found['allowed_nats'])} allowed",
        f"    documents in another order: {_nats(fast['control_nats']['other_order'])}; without seams: "
        f"{_nats(fast['control_nats']['no_seam'])}{'' if found['is_sharp'] else ': too near to tell in fast mode'}",
    ]
    return "\n".join(lines)


def _same(found: Result) -> str:
    """What must be equal bit by bit."""
    if found["same_logprobs"]:
        return "tokens and log probabilities of one worker"
    rest = "" if found["is_repeatable"] else " (one worker's own are not the same from run to run)"
    return f"{'tokens' if found['same_tokens'] else 'OTHER tokens'}, OTHER log probabilities{rest}"


def _parted(fast: Result) -> str:
    if fast["parts_at"] is None:
        return "the same tokens"
    nats = f"where two tokens are {_nats(fast['margin_nats'])} apart"
    return f"{'the same' if fast['same_first_token'] else 'another'} first token, parts at {fast['parts_at']} {nats}"


def _nats(value: float) -> str:
    """Infinite where the likeliest tokens are others: random weights hold all tokens for about as likely."""
    return f"{value:.2g} nats" if math.isfinite(value) else "unlimited (other likeliest tokens)"


def _where(parts_at: int | None) -> str:
    return "" if parts_at is None else f", parts at {parts_at}"

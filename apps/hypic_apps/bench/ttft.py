"""Time to first token: full recompute, prefix reuse, segments cold and warm, side by side on the same prompts.

Every repetition has new documents. ``full`` reuses nothing. ``prefix`` may reuse exact heads only, after the same
documents were asked in another order. ``cold`` finds an empty store; ``warm`` asks what ``cold`` has encoded in another
order and with another tail, so that segments hit and no snapshot does. What an arm says it measured is checked against
the engine's report of every run. An arm whose name ends in ``-deterministic`` is the same with ``deterministic=True``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any

import torch

from hypic.engine.engine import Engine
from hypic.types import Policy
from hypic_apps.bench.floors import Counts, Limits, load_of
from hypic_apps.bench.prompts import Pieces, Shape, shuffled
from hypic_apps.bench.records import percentile
from hypic_apps.bench.session import Answered, Session
from hypic_apps.cli.errors import CommandError

ARMS = ("full", "prefix", "cold", "warm")
PEER = "transformers"
DETERMINISTIC = "-deterministic"
# A deterministic request starts from no head, so that prefix reuse would be full recompute.
TWINS = {arm: arm + DETERMINISTIC for arm in ARMS if arm != "prefix"}
REUSE = {"full": "none", "prefix": "prefix", "cold": "segments", "warm": "segments"}
LONG_ANSWERS = (256, 1024)


@dataclass(frozen=True)
class Plan:
    """How often each cell is measured; ``budget_s`` ends a cell early, ``decode_tokens`` are decoded once for the time
    of a whole answer."""

    arms: Sequence[str]
    runs: int = 10
    warmup: int = 1
    budget_s: float = float("inf")
    decode_tokens: int = 16


@dataclass
class Cell:
    """All runs of one shape: TTFT in seconds by arm, time between tokens by whether they are deterministic."""

    shape: Shape
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    gap_s: dict[bool, float] = field(default_factory=dict)
    transitions_kept: float | None = None
    peak_bytes: int | None = None
    warm_up_s: float = 0.0
    wall_s: float = 0.0

    @property
    def measured_s(self) -> float:
        """Seconds of all requests that were measured; the rest of ``wall_s`` prepared them."""
        return sum(sum(times) for arm, times in self.ttft_s.items() if arm != PEER)


@dataclass(frozen=True)
class Repetition:
    """One set of documents, in two orders, with a tail for each arm; with ``is_in_turn`` the arms run in the order of
    ``ARMS``, so that ``warm`` need not encode again what ``cold`` has encoded."""

    session: Session
    shape: Shape
    number: int
    is_in_turn: bool = False

    def measure(self, arm: str, max_tokens: int = 2) -> Answered:
        """One run of an arm, and whatever has to come before it outside of what is timed.

        The answer goes on after its first token, as answers do: the last one comes with the work of ending a request.

        Raises:
            CommandError: the run did not do what the arm says.
        """
        pieces = self.prepared(arm)
        self.session.synchronize()
        answered = self.session.ask(pieces, self.policy(arm), max_tokens)
        check(arm, answered, self.shape)
        return answered

    def policy(self, arm: str) -> Policy:
        return self.session.policy.with_(reuse=REUSE[kind_of(arm)], deterministic=is_deterministic(arm))

    def prepared(self, arm: str) -> Pieces:
        """Brings the store into the state that an arm starts from; the arm's prompt."""
        kind = kind_of(arm)
        if kind in ("prefix", "cold") or not self.is_in_turn:
            self.session.forget()
        if kind == "prefix":
            self.session.ask(self._before(), self.policy(arm))
        if kind == "warm":
            segments = [self.session.source.segment(document) for document in self._documents]
            self.session.encode(segments, self.policy(arm))
        order = range(len(self._documents)) if kind == "cold" else self._order
        return self._pieces(order, arm)

    @cached_property
    def _documents(self) -> Sequence[Any]:
        return self.session.source.documents(self.shape, self.number)

    @cached_property
    def _order(self) -> Sequence[int]:
        return shuffled(self._documents, self.number)

    def _before(self) -> Pieces:
        """What a prefix cache has seen: the documents as they were drawn, up to the first that stands elsewhere later.
        What came behind it could not be reused by an exact head, and is not run."""
        known = next((n for n, place in enumerate(self._order) if n != place), len(self._order) - 1)
        return self._pieces(range(known + 1), "before")

    def _pieces(self, order: Sequence[int], salt: str) -> Pieces:
        chosen = [self._documents[i] for i in order]
        return self.session.source.prompt(self.shape, chosen, f"{self.number} {salt}")


def kind_of(arm: str) -> str:
    """The arm without its word on determinism."""
    return arm.removesuffix(DETERMINISTIC)


def is_deterministic(arm: str) -> bool:
    return arm.endswith(DETERMINISTIC)


def check(arm: str, answered: Answered, shape: Shape) -> None:
    """Raises ``CommandError`` where a run did not do what its arm says."""
    outcomes = [segment.outcome for segment in answered.report.segments]
    wanted = {"cold": "encoded", "warm": "hit"}.get(kind_of(arm), "live")
    if any(outcome != wanted for outcome in outcomes) or len(outcomes) != shape.num_segments:
        found = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes)))
        raise CommandError(
            f"the {arm} arm should have had {shape.num_segments} segments {wanted}, and had {found}; "
            "raise --memory if they were evicted."
        )
    if kind_of(arm) == "full" and answered.report.reused_tokens:
        raise CommandError(f"full recompute reused {answered.report.reused_tokens} tokens; this is a fault of hypic.")


def measure(session: Session, shape: Shape, plan: Plan, progress: Callable[[str], None] = lambda text: None) -> Cell:
    """One cell. The first ``plan.warmup`` repetitions are not counted.

    Raises:
        CommandError: a run did not do what its arm says.
    """
    cell, begun = Cell(shape, {arm: [] for arm in plan.arms}), time.perf_counter()
    for number in range(-plan.warmup, 0):
        _repeat(Repetition(session, shape, number, "cold" in plan.arms), plan.arms, None)
        progress(f"{shape.num_segments} x {shape.segment_tokens}: warm-up")
    _reset_peak(session)
    started = time.perf_counter()
    cell.warm_up_s = started - begun
    for number in range(plan.runs):
        _repeat(Repetition(session, shape, number, "cold" in plan.arms), plan.arms, cell)
        progress(f"{shape.num_segments} x {shape.segment_tokens}: {number + 1} of {plan.runs}")
        if time.perf_counter() - started > plan.budget_s:
            break
    _finish(session, cell, plan)
    cell.wall_s = time.perf_counter() - begun
    return cell


def _repeat(repetition: Repetition, arms: Sequence[str], cell: Cell | None) -> None:
    for arm in arms:
        answered = repetition.measure(arm)
        if cell is not None:
            cell.ttft_s[arm].append(answered.ttft_s)
            cell.computed[arm] = answered.report.computed_tokens
            cell.prompt_tokens = answered.report.prompt_tokens


def _finish(session: Session, cell: Cell, plan: Plan) -> None:
    """What is looked at once: the share of transitions kept, memory, and the time between tokens of an answer."""
    cell.peak_bytes = _peak(session)
    for arm in dict.fromkeys(TWINS["warm"] if is_deterministic(arm) else "warm" for arm in plan.arms):
        if plan.decode_tokens:
            # The first gap is left out: decoding may be set up in it.
            answered = Repetition(session, cell.shape, plan.runs).measure(arm, plan.decode_tokens + 2)
            cell.gap_s[is_deterministic(arm)] = median(answered.gaps_s[1:])
    if {"cold", "warm"} & {kind_of(arm) for arm in plan.arms}:
        cell.transitions_kept = session.call(transitions_kept)


def transitions_kept(engine: Engine) -> float | None:
    """The share of heads, over all entries and layers, whose stored transition is not zero."""
    pool, entries = engine.runner.pool, [entry for entry in engine.store if not entry.is_snapshot]
    if not entries:
        return None
    states = torch.tensor([entry.state_slot for entry in entries], device=pool.device)
    transitions = torch.tensor([entry.transition_slot for entry in entries], device=pool.device)
    kept = total = 0
    for layer, shape in enumerate(pool.layout.linear):
        found = pool.read_map(layer, states, transitions).transition
        alive = (found != 0).view(len(entries), shape.num_heads, -1).any(-1)
        kept, total = kept + int(alive.sum()), total + alive.numel()
    return kept / total if total else None


def records(session: Session, cell: Cell, limits: Limits, geometry: str) -> Iterator[dict[str, Any]]:
    """One record for each arm of a cell, the peer's too, its floor beside it."""
    counts = Counts.of(session.runner.model)
    policy, layout = session.policy, counts.layout
    floors = {arm: load_of(arm, cell.shape, policy, layout).seconds(counts, limits) for arm in (*ARMS, PEER)}
    for arm, times in cell.ttft_s.items():
        yield record(arm, times, cell, floors, {
            "geometry": geometry, "device": str(session.device), "dtype": str(layout.dtype).removeprefix("torch."),
        })  # fmt: skip


def record(
    arm: str, times_s: Sequence[float], cell: Cell, floors: Mapping[str, float], about: Mapping[str, Any]
) -> dict[str, Any]:
    """See ``records``; times in milliseconds. ``floor_ratio`` is what segments could gain at best over full recompute,
    ``ratio_to_full`` and its like what this arm gained over others in this cell."""
    p50 = percentile(times_s, 50)
    found: dict[str, Any] = {
        "arm": arm,
        **about,
        "num_segments": cell.shape.num_segments,
        "segment_tokens": cell.shape.segment_tokens,
        "vary": cell.shape.vary,
        "tail_tokens": cell.shape.tail_tokens,
        "ttft_ms_p50": 1e3 * p50,
        "ttft_ms_p90": 1e3 * percentile(times_s, 90),
        "runs": len(times_s),
        "prompt_tokens": cell.prompt_tokens,
        "computed_tokens": cell.computed.get(arm),
        "floor_ms": 1e3 * floors[kind_of(arm)],
        "floor_ratio": floors["full"] / floors["warm"],
        "transitions_kept": cell.transitions_kept if kind_of(arm) in ("cold", "warm") else None,
        "peak_bytes": cell.peak_bytes if arm != PEER else None,
    }
    for other in ("full", "prefix", PEER):
        if other in cell.ttft_s:
            found[f"ratio_to_{other}"] = percentile(cell.ttft_s[other], 50) / p50
    if is_deterministic(arm) and kind_of(arm) in cell.ttft_s:
        found["times_plain"] = p50 / percentile(cell.ttft_s[kind_of(arm)], 50)
    gap_s = cell.gap_s.get(is_deterministic(arm))
    if gap_s is not None and arm != PEER:
        found["gap_ms"] = 1e3 * gap_s
        found.update({f"total_ms_{n}": 1e3 * (p50 + (n - 1) * gap_s) for n in LONG_ANSWERS})
    return found


def over_cells(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all cells say together: how much ``warm`` gained, what determinism costs, and, by arm, what one more segment
    costs, from the fewest to the most of the longest segments with more than one number."""
    warm = [r for r in records if r["arm"] == "warm"]
    gains = {other: [r[f"ratio_to_{other}"] for r in warm if f"ratio_to_{other}" in r] for other in ("prefix", "full")}
    found: dict[str, Any] = {f"warm_over_{other}": _mean(ratios) for other, ratios in gains.items()}
    arms = dict.fromkeys(r["arm"] for r in records)
    slopes = {arm: _slope([r for r in records if r["arm"] == arm]) for arm in arms}
    costs = {arm: _mean([r["times_plain"] for r in records if r["arm"] == arm and "times_plain" in r]) for arm in arms}
    found["deterministic_over_plain"] = {kind_of(arm): cost for arm, cost in costs.items() if cost is not None}
    return {**found, "ms_per_segment": {arm: slope for arm, slope in slopes.items() if slope is not None}}


def _mean(ratios: Sequence[float]) -> dict[str, Any] | None:
    if not ratios:
        return None
    return {"cells": len(ratios), "mean": geometric_mean(ratios), "smallest": min(ratios), "largest": max(ratios)}


def _slope(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Milliseconds a segment."""
    by_kind: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for r in records:
        by_kind.setdefault((r["segment_tokens"], r["tail_tokens"]), []).append(r)
    long = [kind for kind, found in by_kind.items() if len(found) > 1]
    if not long:
        return None
    found = sorted(by_kind[max(long)], key=lambda r: int(r["num_segments"]))
    fewest, most = found[0], found[-1]
    rise = most["ttft_ms_p50"] - fewest["ttft_ms_p50"]
    return float(rise / (most["num_segments"] - fewest["num_segments"]))


def _reset_peak(session: Session) -> None:
    if session.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(session.device)


def _peak(session: Session) -> int | None:
    return torch.cuda.max_memory_allocated(session.device) if session.device.type == "cuda" else None

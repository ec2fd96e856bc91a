"""Time to first token of one prompt under full recompute, with segments encoded, and with segments found.

Every arm starts from an empty store. ``warm`` then encodes the passages outside the measured time, so that each
segment hits, but no snapshot of this very prompt does. Arms are interleaved and rotated over rounds; a first pass that
is not counted warms everything up. Times come from the report and are held against the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from hypic.types import CacheReport, Policy, PromptLike, SamplingParams, Segment

if TYPE_CHECKING:
    from hypic import LLM
    from hypic_apps.bench.peers import Transformers

OURS = ("full", "cold", "warm")
PEER = "transformers"


@dataclass(frozen=True)
class Case:
    """A prompt, the segments in it that ``warm`` encodes beforehand, and what its chat template is told."""

    prompt: PromptLike
    segments: Sequence[Segment]
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One measured request: ``ttft_s`` as the engine tells it, tokenising included, ``wall_s`` as the caller waited."""

    ttft_s: float
    wall_s: float
    token_id: int
    report: CacheReport = CacheReport()


Arm = Callable[[Case], Run]


@dataclass(frozen=True)
class Times:
    """All runs of one case, by arm."""

    runs: Mapping[str, list[Run]] = field(default_factory=dict)

    def ttft_s(self, arm: str) -> float:
        """Median over the runs."""
        return median(run.ttft_s for run in self.runs[arm])

    def ratio(self, arm: str, other: str) -> float:
        """Median time of one arm over that of another."""
        return self.ttft_s(arm) / self.ttft_s(other)


def arms(llm: LLM, peer: Transformers | None) -> dict[str, Arm]:
    """Our three arms, and the peer's if there is one."""
    policy = llm.config.policy
    ours: dict[str, Arm] = {
        "full": lambda case: _fresh(llm, case, policy.with_(reuse="none")),
        "cold": lambda case: _fresh(llm, case, policy.with_(reuse="segments")),
        "warm": lambda case: _fresh(llm, case, policy.with_(reuse="segments"), case.segments),
    }
    return ours if peer is None else {**ours, PEER: lambda case: _prefill(llm, peer, case)}


def measure(
    cases: Sequence[Case],
    by_name: Mapping[str, Arm],
    rounds: int,
    budget_s: float,
    progress: Callable[[], None] = lambda: None,
) -> list[Times]:
    """Runs every arm on every case, once per round; stops after the round in which the budget is spent.

    ``progress`` is called after each case of each round.
    """
    for arm in by_name.values():
        arm(cases[0])
    started = time.perf_counter()
    found: list[dict[str, list[Run]]] = [{name: [] for name in by_name} for _ in cases]
    for number in range(rounds):
        for case, runs in zip(cases, found, strict=True):
            for name in rotated(list(by_name), number):
                runs[name].append(by_name[name](case))
            progress()
        if time.perf_counter() - started > budget_s:
            break
    return [Times(runs) for runs in found]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """``names``, beginning at another one each round."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def token_ids(llm: LLM, case: Case) -> list[int]:
    """The whole prompt as the engine runs it."""
    pieces = llm.tokenizer.encode(case.prompt, chat_template_kwargs=case.template)
    return [i for piece in pieces for i in piece.ids]


def _fresh(llm: LLM, case: Case, policy: Policy, warm: Sequence[Segment] = ()) -> Run:
    """One request on an emptied store."""
    llm.forget(everything=True)
    if warm:
        llm.warm(warm, policy=policy)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    pieces, arrivals = [], []
    for piece in llm.stream(case.prompt, sampling, policy=policy, chat_template_kwargs=case.template):
        pieces.append(piece)
        arrivals.append(time.perf_counter() - started)
    report, ids = pieces[-1].report, [i for piece in pieces for i in piece.token_ids]
    assert report is not None and ids, "a whole answer has a token and a report"
    return Run(report.times_s["ttft"], arrivals[0], ids[0], report)


def _prefill(llm: LLM, peer: Transformers, case: Case) -> Run:
    first = peer.prefill(token_ids(llm, case))
    return Run(first.seconds, first.seconds, first.token_id)

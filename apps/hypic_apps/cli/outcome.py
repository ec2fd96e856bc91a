"""What the demo found out: answers and times as values, as a table, as closing lines and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console

from hypic.types import CacheReport
from hypic_apps.cli.corpora import Question
from hypic_apps.cli.engine import Loaded
from hypic_apps.cli.hardware import hardware
from hypic_apps.cli.reports import as_json, seconds
from hypic_apps.cli.screen import result, table
from hypic_apps.cli.timing import OURS, PEER, Case, Times

SHORT = {PEER: "HF"}
# The engine's own time and the caller's clock may differ by the hand-over between two threads, no more.
CLOCKS_DIFFER = 1.2
CLOCKS_DIFFER_S = 0.01


@dataclass(frozen=True)
class Answer:
    """A question as it was answered when it was asked for the first time, after those before it."""

    question: Question
    text: str
    case: Case
    report: CacheReport

    @property
    def is_correct(self) -> bool:
        return self.question.is_answered_by(self.text)

    @property
    def verdict(self) -> str:
        return "correct" if self.is_correct else f"wrong, expected: {self.question.expected}"


@dataclass(frozen=True)
class Measured:
    """Times of every question, and the peer's version or what kept it from being measured."""

    times: Sequence[Times]
    peer_version: str | None
    peer_problem: str = ""


@dataclass(frozen=True)
class Outcome:
    """All that one demo found out."""

    answers: Sequence[Answer]
    measured: Measured
    model: Loaded

    @property
    def num_correct(self) -> int:
        return sum(answer.is_correct for answer in self.answers)

    @property
    def num_rounds(self) -> int:
        return len(self.measured.times[0].runs["full"])

    @property
    def full_to_warm(self) -> float:
        """Median over the questions of full recompute's time over the warm time."""
        return median(times.ratio("full", "warm") for times in self.measured.times)

    @property
    def full_to_transformers(self) -> float | None:
        """Median over the questions of full recompute's time over transformers'; ``None`` if it was not measured."""
        if self.measured.peer_version is None:
            return None
        return median(times.ratio("full", PEER) for times in self.measured.times)

    @property
    def same_first_token(self) -> int:
        """For how many questions transformers' likeliest token was the engine's under full recompute."""
        return sum(times.runs["full"][0].token_id == times.runs[PEER][0].token_id for times in self.measured.times)

    def clock_faults(self) -> Iterator[str]:
        """Arms whose reported time to the first token is not what the caller waited."""
        for arm in OURS:
            runs = [run for times in self.measured.times for run in times.runs[arm]]
            told, waited = median(run.ttft_s for run in runs), median(run.wall_s for run in runs)
            if not told <= waited <= told * CLOCKS_DIFFER + CLOCKS_DIFFER_S:
                yield f"{arm}: the engine reports {seconds(told)} but the caller waited {seconds(waited)}"

    def as_json(self) -> dict[str, Any]:
        """The object that ``hypic demo --json`` prints; times in seconds, medians over the rounds."""
        peer: dict[str, Any] = {"version": self.measured.peer_version, "problem": self.measured.peer_problem or None}
        if self.measured.peer_version is not None:
            peer |= {"same_first_token": self.same_first_token}
        return {
            "questions": [_question_json(a, t) for a, t in zip(self.answers, self.measured.times, strict=True)],
            "num_correct": self.num_correct,
            "rounds": self.num_rounds,
            "ratio_full_to_warm": self.full_to_warm,
            "full_to_transformers": self.full_to_transformers,
            "transformers": peer,
            "clock_faults": list(self.clock_faults()),
            "model": _model_json(self.model),
            "hardware": hardware(),
        }


def show_times(console: Console, found: Outcome) -> None:
    """One line per question: times of every arm, and what the warm arm computed and reused."""
    shown = (PEER, *OURS) if found.measured.peer_version is not None else OURS
    rows = []
    for answer, times in zip(found.answers, found.measured.times, strict=True):
        warm, cells = times.runs["warm"][0].report, [seconds(times.ttft_s(arm)) for arm in shown]
        counts = f"{warm.computed_tokens}/{warm.prompt_tokens}"
        rows.append((answer.question.question, *cells, f"{times.ratio('full', 'warm'):.1f}x", counts))
    console.print("\nTime to the first token (HF: transformers) and tokens computed when warm", style="dim")
    table(console, rows, flexible=0, heads=("question", *(SHORT.get(arm, arm) for arm in shown), "full/warm", "tokens"))
    for fault in found.clock_faults():
        console.print(f"the two clocks differ, {fault}.", style="red")


def show_conclusion(found: Outcome) -> None:
    """The closing lines, on stdout."""
    num, ratio, peer = len(found.answers), found.full_to_transformers, found.measured.peer_version
    result(f"\n{found.num_correct} of {num} answers are as expected.")
    result(f"With its passages found, a first token comes {found.full_to_warm:.1f}x sooner than with full recompute")
    result(f"(median of {num} questions; each time is a median of {found.num_rounds}).")
    if ratio is None:
        result(f"transformers was not measured: {found.measured.peer_problem}")
    else:
        result(f"Full recompute takes {ratio:.2f}x the time of transformers {peer} on the same token ids")
        result(f"(same run, type and threads; same first token in {found.same_first_token} of {num}).")


def _question_json(answer: Answer, times: Times) -> dict[str, Any]:
    """Segments and counts are those of the first warm run; ``first_asked`` has those of the answer."""
    warm = times.runs["warm"][0].report
    return {
        "question": answer.question.question,
        "answer": answer.text,
        "expected": answer.question.expected,
        "correct": answer.is_correct,
        "segments": [asdict(segment) for segment in warm.segments],
        "prompt_tokens": warm.prompt_tokens,
        "computed_tokens": warm.computed_tokens,
        "reused_tokens": warm.reused_tokens,
        "ttft_s": {arm: times.ttft_s(arm) for arm in OURS},
        "wall_s": {arm: median(run.wall_s for run in times.runs[arm]) for arm in OURS},
        "transformers_s": times.ttft_s(PEER) if PEER in times.runs else None,
        "runs_s": {arm: [run.ttft_s for run in runs] for arm, runs in times.runs.items()},
        "first_asked": as_json(answer.report),
    }


def _model_json(model: Loaded) -> dict[str, Any]:
    described = model.description
    known = {} if described is None else asdict(described)
    return {"name": model.llm.model_name, "bundled": model.is_bundled, "dtype": model.llm.config.dtype, **known}

"""Every arm on the same items: marks, agreement with full recompute, first token, divergence, tokens run, time.

Divergence is the mean over the tokens of full recompute's answer of ``KL(full || arm)`` of the next token, both made
to say that answer. The cache is emptied between items, not between arms: what is cached changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor

from hypic_apps.eval.arms import ARMS, FULL, Arm
from hypic_apps.eval.driver import Reply, Subject
from hypic_apps.eval.grading import MEANS, QUALITY, Mark, marks
from hypic_apps.eval.items import Item
from hypic_apps.eval.statistics import Interval, estimate, gap

MOST_TOKENS = {"short": 48, "reasoned": 96, "long": 320, "refusal": 48, "call": 160}


@dataclass(frozen=True)
class Record:
    """One number: a metric of an arm on a set, and its gap to full recompute on the same ``n`` items."""

    model: str
    set: str
    arm: str
    metric: str
    value: float
    n: int
    low: float | None = None
    high: float | None = None
    gap_to_full: float | None = None
    gap_low: float | None = None
    gap_high: float | None = None


@dataclass
class Measured:
    """One set's marks: ``by_arm[arm][metric]`` has one pair per item, ``None`` where the arm has no such prompt."""

    name: str
    num_items: int = 0
    by_arm: dict[str, dict[str, list[Mark | None]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arm: str, found: Mapping[str, Mark], number: int = 0) -> None:
        """Notes the marks of the item that is ``number`` behind those counted; items left out count as ``None``."""
        columns = self.by_arm.setdefault(arm, {})
        for metric, mark in found.items():
            column = columns.setdefault(metric, [])
            column += [None] * (self.num_items + number - len(column)) + [mark]

    def marks(self, arm: str, metric: str) -> list[Mark | None]:
        """One entry per item."""
        column = self.by_arm.get(arm, {}).get(metric, [])
        return column + [None] * (self.num_items - len(column))


@dataclass(frozen=True)
class Plan:
    """What is measured: arms by name, the system text, on how many items of each set the time is taken, and how many
    items run in each other's company: 1 is best on a CPU, dozens are on a GPU."""

    arms: Sequence[str]
    system: str = ""
    num_timed: int = 0
    at_once: int = 1


def measure(
    subject: Subject, name: str, items: Sequence[Item], plan: Plan, progress: Callable[[], None] = lambda: None
) -> Measured:
    """All arms of ``plan`` on all items."""
    found = Measured(name)
    for start in range(0, len(items), plan.at_once):
        block = items[start : start + plan.at_once]
        subject.forget()
        _block(subject, block, plan, found)
        found.num_items += len(block)
        for _ in block:
            progress()
    for number in range(min(plan.num_timed, len(items))):
        for arm in (ARMS[a] for a in plan.arms):
            _time(subject, items[number], arm, plan.system, found, number)
    return found


def _block(subject: Subject, block: Sequence[Item], plan: Plan, found: Measured) -> None:
    """All arms on some items of one form, answered together."""
    numbers = range(len(block))
    full = _answers(subject, block, ARMS[FULL], plan.system, numbers)
    for arm in (ARMS[name] for name in plan.arms):
        replies = full if arm.name == FULL else _answers(subject, block, arm, plan.system, numbers)
        same = {} if arm.name == FULL else _likeness(subject, block, arm, plan.system, replies, full)
        for number, reply in replies.items():
            found.add(arm.name, {**marks(block[number], reply.text), **same.get(number, {})}, number)


def _answers(
    subject: Subject,
    block: Sequence[Item],
    arm: Arm,
    system: str,
    numbers: Sequence[int],
    forced: Sequence[Sequence[int]] = (),
) -> dict[int, Reply]:
    """Replies to the items of some numbers, but for those of which an arm has no prompt."""
    built = {number: arm.build(block[number], system) for number in numbers}
    prompts = {number: prompt for number, prompt in built.items() if prompt is not None}
    if not prompts:
        return {}
    most = MOST_TOKENS[block[0].form]
    replies = subject.ask([*prompts.values()] * (1 + arm.company), arm.policy, most, forced)
    return dict(zip(prompts, replies, strict=False))


def _likeness(
    subject: Subject,
    block: Sequence[Item],
    arm: Arm,
    system: str,
    replies: Mapping[int, Reply],
    full: Mapping[int, Reply],
) -> dict[int, dict[str, Mark]]:
    """How like full recompute's answers an arm's are; where they differ, it is made to say full recompute's."""
    other = [number for number, reply in replies.items() if reply.token_ids != full[number].token_ids]
    told = {**replies}
    if other:
        told |= _answers(subject, block, arm, system, other, [full[number].token_ids for number in other])
    return {
        number: {
            "agreement": (float(reply.text == full[number].text), 1.0),
            "first_token": (float(reply.token_ids[0] == full[number].token_ids[0]), 1.0),
            "kl": (divergence(full[number].logprobs, told[number].logprobs), 1.0),
        }
        for number, reply in replies.items()
    }


def divergence(full: Tensor, other: Tensor) -> float:
    """Mean over tokens of ``KL(full || other)`` of log probabilities ``[n, V]``, in nats."""
    return float((full.exp() * (full - other)).nan_to_num(0.0).sum(-1).mean())


def _time(subject: Subject, item: Item, arm: Arm, system: str, found: Measured, number: int) -> None:
    """Time to the first token with the segments encoded beforehand, and what that costs: tokens run for it and to
    encode, bytes of the entries, and the least seconds that this device's limits allow for it."""
    prompt = arm.build(item, system)
    if prompt is None:
        return
    num_encoded = subject.warm(prompt, arm.policy)
    report = subject.ask([prompt], arm.policy, 1)[0].report
    found.seconds.setdefault(arm.name, []).append(report.times_s["ttft"])
    num_tokens = float(report.prompt_tokens)
    cost = {
        "run_share": (float(report.computed_tokens), num_tokens),
        "encoded_share": (float(num_encoded), num_tokens),
        "cached_bytes": (float(sum(segment.num_bytes for segment in report.segments)), 1.0),
        "floor_s": (subject.floor_s(prompt, arm.policy), 1.0),
    }
    found.add(arm.name, cost, number - found.num_items)


def records(model: str, found: Measured) -> list[Record]:
    """All numbers of a set."""
    out = []
    for arm, columns in found.by_arm.items():
        for metric in columns:
            out += _record(model, found, arm, metric)
        if arm in found.seconds:
            times = found.seconds[arm]
            out.append(Record(model, found.name, arm, "ttft_s", median(times), len(times), min(times), max(times)))
    return out


def _record(model: str, found: Measured, arm: str, metric: str) -> list[Record]:
    pairs = list(zip(found.marks(arm, metric), found.marks(FULL, metric), strict=True))
    own = [mark for mark, _ in pairs if mark is not None]
    value = estimate(own, is_share=metric not in MEANS)
    if value is None:
        return []
    both = [(mark, before) for mark, before in pairs if mark is not None and before is not None]
    apart: Interval | None = None
    if arm != FULL and metric in QUALITY and both:
        apart = gap([mark for mark, _ in both], [before for _, before in both])
    gaps = (None, None, None) if apart is None else (apart.value, apart.low, apart.high)
    return [Record(model, found.name, arm, metric, value.value, len(own), value.low, value.high, *gaps)]

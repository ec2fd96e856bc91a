"""Every arm on the same items: marks, agreement with full recompute, first token, divergence, tokens run, time.

Divergence is the mean over the tokens of full recompute's answer of ``KL(full || arm)`` of the next token, both made
to say that answer. Items are answered in blocks, all arms of a block in each other's company: first full recompute,
then the others, so that a step is as full as can be and what arms share is encoded once. A block begins with an empty
store and is the same whoever answers it, so numbers do not depend on how many processes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hypic.errors import ConfigError
from hypic_apps.eval.arms import ARMS, FULL, Arm
from hypic_apps.eval.driver import Ask, Reply, Subject
from hypic_apps.eval.grading import Mark, marks
from hypic_apps.eval.items import Item
from hypic_apps.eval.records import Measured

MOST_TOKENS = {"short": 48, "reasoned": 96, "long": 320, "refusal": 48, "call": 160}


@dataclass(frozen=True)
class Plan:
    """What is measured: arms by name, the system text, on how many items of each set the time is taken, and how many
    items run in each other's company: 1 is best on a CPU, dozens are on a GPU. ``candidates`` are arms of this plan
    alone, behind primers that may replace the model's own."""

    arms: Sequence[str]
    system: str = ""
    num_timed: int = 0
    at_once: int = 1
    candidates: Sequence[Arm] = ()

    @property
    def each(self) -> Sequence[Arm]:
        """All arms."""
        return [*(ARMS[name] for name in self.arms), *self.candidates]


@dataclass(frozen=True)
class Unit:
    """Items of one set that are answered together, or, with ``is_timed``, one after another and in time."""

    name: str
    items: Sequence[Item]
    is_timed: bool = False


def units(name: str, items: Sequence[Item], plan: Plan) -> list[Unit]:
    """A set's blocks, in order."""
    return [Unit(name, items[start : start + plan.at_once]) for start in range(0, len(items), plan.at_once)]


def timed(name: str, items: Sequence[Item], plan: Plan) -> Unit:
    """What is timed of a set; nothing else should run meanwhile."""
    return Unit(name, items[: plan.num_timed], is_timed=True)


def measure(
    subject: Subject, name: str, items: Sequence[Item], plan: Plan, progress: Callable[[], None] = lambda: None
) -> Measured:
    """All arms of ``plan`` on all items."""
    found = []
    for unit in units(name, items, plan):
        found.append(perform(subject, unit, plan))
        for _ in unit.items:
            progress()
    return Measured.joined([*found, perform(subject, timed(name, items, plan), plan)])


def perform(subject: Subject, unit: Unit, plan: Plan) -> Measured:
    """The marks of one block, or the costs of what is timed."""
    found = Measured(unit.name)
    subject.forget()
    if unit.is_timed:
        for number, item in enumerate(unit.items):
            for arm in plan.each:
                _time(_behind(subject, arm), item, arm, plan.system, found, number)
        return found
    _block(subject, unit.items, plan, found)
    found.num_items = len(unit.items)
    return found


def _block(subject: Subject, block: Sequence[Item], plan: Plan, found: Measured) -> None:
    """All arms on some items of one form."""
    asks = [_ask(ARMS[FULL], item, plan.system, MOST_TOKENS[item.form]) for item in block]
    full = subject.answer([one for one in asks if one is not None])
    replies: dict[str, Mapping[int, Reply]] = {FULL: dict(enumerate(full))}
    for together in _apart([arm for arm in plan.each if arm.name != FULL]):
        replies |= _answers(_behind(subject, together[0]), together, block, plan.system, full)
    for arm in plan.each:
        _mark(found, arm.name, block, replies[arm.name], full)


def _behind(subject: Subject, arm: Arm) -> Subject:
    try:
        return subject.behind(arm.primer)
    except ConfigError as error:
        raise ConfigError(f"{arm.name}: {error}") from error


def _apart(arms: Sequence[Arm]) -> Iterable[Sequence[Arm]]:
    """Arms behind one primer whose steps can be recorded, and those whose cannot: one row of these would hold up all
    others."""
    kinds: dict[tuple[str | None, bool], list[Arm]] = {}
    for arm in arms:
        kinds.setdefault((arm.primer, arm.policy.rotate), []).append(arm)
    return list(kinds.values())


def _ask(arm: Arm, item: Item, system: str, most: int, full: Reply | None = None) -> Ask | None:
    """``None`` where an arm has no prompt for an item."""
    prompt = arm.build(item, system)
    return None if prompt is None else Ask(prompt, arm.policy, most, full=full, keeps=full is None)


def _answers(
    subject: Subject, arms: Sequence[Arm], block: Sequence[Item], system: str, full: Sequence[Reply]
) -> Mapping[str, Mapping[int, Reply]]:
    """Replies by arm and number of the item; all arms of an item stand together, since they share entries."""
    asks, places = list[Ask](), list[tuple[str, int]]()
    for number, item in enumerate(block):
        for arm in arms:
            one = _ask(arm, item, system, MOST_TOKENS[item.form], full[number])
            if one is not None:
                asks.append(one)
                places.append((arm.name, number))
    asks += [one for one in asks[-1:] for _ in range(max(arm.company for arm in arms))]
    found: dict[str, dict[int, Reply]] = {arm.name: {} for arm in arms}
    for (name, number), reply in zip(places, subject.answer(asks), strict=False):
        found[name][number] = reply
    return found


def _mark(
    found: Measured, arm: str, block: Sequence[Item], replies: Mapping[int, Reply], full: Sequence[Reply]
) -> None:
    for number, reply in replies.items():
        same = {} if arm == FULL else likeness(reply, full[number])
        found.add(arm, {**marks(block[number], reply.text), **same}, number)


def likeness(reply: Reply, full: Reply) -> Mapping[str, Mark]:
    """How like full recompute's answer another one is."""
    return {
        "agreement": (float(reply.text == full.text), 1.0),
        "first_token": (float(reply.token_ids[0] == full.token_ids[0]), 1.0),
        "kl": (fmean(reply.divergences), 1.0),
    }


def _time(subject: Subject, item: Item, arm: Arm, system: str, found: Measured, number: int) -> None:
    """Time to the first token with the segments encoded beforehand, and what that costs: tokens run for it and to
    encode, bytes of the entries, and the least seconds that this device's limits allow for it."""
    prompt = arm.build(item, system)
    if prompt is None:
        return
    num_encoded = subject.warm(prompt, arm.policy)
    report = subject.answer([Ask(prompt, arm.policy, 1)])[0].report
    found.seconds.setdefault(arm.name, []).append(report.times_s["ttft"])
    num_tokens = float(report.prompt_tokens)
    cost = {
        "run_share": (float(report.computed_tokens), num_tokens),
        "encoded_share": (float(num_encoded), num_tokens),
        "cached_bytes": (float(sum(segment.num_bytes for segment in report.segments)), 1.0),
        "floor_s": (subject.floor_s(prompt, arm.policy), 1.0),
    }
    found.add(arm.name, cost, number - found.num_items)

"""Time to the first token of one prompt of a conversation: full recompute, cold, and warm, as ``hypic demo`` measures.

``hypic demo`` empties the cache before every run. Here it is also other tabs' cache, so every run gets a namespace of
its own instead, in which nothing is cached yet, and which is forgotten afterwards. Live text in front of the first
passage, which is what earlier turns are, has no namespace: cold and warm may find it as an exact head, and say so.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypic.types import Message, Policy, SamplingParams, Segment
from hypic_apps.cli.engine import NO_THINKING
from hypic_apps.cli.timing import OURS, Arm, Case, Run, Times, measure
from hypic_apps.rag.events import Event, Tell, progress
from hypic_apps.rag.strip import counts

if TYPE_CHECKING:
    from hypic import LLM

ROUNDS = 3
BUDGET_S = 30.0
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def measured(llm: LLM, messages: Sequence[Message], tell: Tell, rounds: int = ROUNDS) -> Event:
    """Runs every arm once uncounted and then ``rounds`` times in turn; medians, and the counts of a run of each."""
    total, done = (rounds + 1) * len(OURS), 0

    def counted(arm: Arm) -> Arm:
        def run(case: Case) -> Run:
            nonlocal done
            found = arm(case)
            done += 1
            tell(progress("measuring", done, total))
            return found

        return run

    tell(progress("measuring", 0, total))
    by_name = {name: counted(arm) for name, arm in arms(llm).items()}
    (times,) = measure([Case(messages, ())], by_name, rounds, BUDGET_S)
    return {"type": "measured", "rounds": len(times.runs["full"]), "arms": [_arm(times, name) for name in OURS]}


def arms(llm: LLM) -> Mapping[str, Arm]:
    """One run of a prompt in each state of the cache."""
    policy = llm.config.policy
    return {
        "full": lambda case: _run(llm, case, policy.with_(reuse="none"), warms=False),
        "cold": lambda case: _run(llm, case, policy.with_(reuse="segments"), warms=False),
        "warm": lambda case: _run(llm, case, policy.with_(reuse="segments"), warms=True),
    }


def within(namespace: str, messages: Any) -> list[dict[str, Any]]:
    """The messages with their segments in a namespace, and without names: those are the real passages'."""
    return [{**message, "content": _moved(namespace, message["content"])} for message in messages]


def _moved(namespace: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    hints = {"kind": "document", "namespace": namespace}
    return [{**part, "extras": {"hypic": hints}} if "extras" in part else part for part in content]


def _run(llm: LLM, case: Case, policy: Policy, *, warms: bool) -> Run:
    namespace = f"measuring-{secrets.token_hex(8)}"
    messages = within(namespace, case.prompt)
    try:
        if warms:
            llm.warm(_segments(namespace, messages), policy=policy)
        return _timed(lambda: llm.stream(messages, ONE_TOKEN, policy=policy, chat_template_kwargs=NO_THINKING))
    finally:
        llm.forget(namespace=namespace)


def _segments(namespace: str, messages: Any) -> list[Segment]:
    parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"] if "extras" in p]
    plain = [Segment(part["text"]) for part in parts]
    return [replace(segment, namespace=namespace) for segment in plain]


def _timed(ask: Callable[[], Any]) -> Run:
    started, pieces, arrivals = time.perf_counter(), [], []
    for piece in ask():
        pieces.append(piece)
        arrivals.append(time.perf_counter() - started)
    report = pieces[-1].report
    assert report is not None, "a whole answer has a report"
    ids = [i for piece in pieces for i in piece.token_ids]
    return Run(report.times_s["ttft"], arrivals[0], ids[0], report)


def _arm(times: Times, name: str) -> dict[str, Any]:
    return {"name": name, **counts(times.runs[name][-1].report), "ttft_s": times.ttft_s(name)}

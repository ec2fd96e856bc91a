"""What tests of steps ahead ask an engine for, and all that can be seen of its answers and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.types import CacheReport
from tests.engine.answer import Answer
from tests.engine.harness import Bench
from tests.engine.prompts import few_segments, live, many_segments

Make = Callable[..., Bench]
Asked = Mapping[str, Any]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"temperature": 0.9, "seed": 7},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 8, "logprobs": 2},
    "penalized": {"temperature": 0.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 9},
    "frequent": {"temperature": 0.0, "frequency_penalty": 1.5},
}
PATHS = ["plain", "kernels", "recorded"]
AHEAD = 4


def told(answer: Answer) -> tuple[Any, ...]:
    """All that a client sees of an answer but how long it took."""
    last = answer.pieces[-1]
    text = "".join(piece.text for piece in answer.pieces)
    found = [one for piece in answer.pieces for one in piece.logprobs]
    values = [pytest.approx(value, rel=1e-4) for one in found for value in (one.logprob, *(v for _, v in one.top))]
    logprobs = [(one.token_id, *(id for id, _ in one.top)) for one in found], values
    return answer.ids, text, last.finish_reason, last.usage, _seen(last.report), logprobs


def _seen(report: CacheReport | None) -> Any:
    return None if report is None else replace(report, times_s={})


def snapshots(engine: Bench) -> dict[bytes, list[Tensor]]:
    """All that snapshots hold, by name."""
    pool, found = engine.pool, {}
    for entry in engine.store:
        if entry.is_snapshot:
            slots = torch.from_numpy(entry.kv_slots)
            kept = [*pool.states, *pool.tails]
            found[entry.key] = [tensor[entry.state_slot].clone() for tensor in kept]
            found[entry.key] += [t.clone() for n in range(len(pool.keys)) for t in pool.read_kv(n, slots)]
    return found


def are_equal(one: Mapping[bytes, list[Tensor]], other: Mapping[bytes, list[Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for key in one for a, b in zip(one[key], other[key], strict=True)
    )


def some_requests(engine: Bench, sampling: Asked) -> list[Answer]:
    """Requests that join and leave while others decode: by length, by a stop string, called off."""
    answers = [engine.add(few_segments(), max_tokens=12, **sampling)]
    take_steps(engine, 4)
    answers.append(engine.add(many_segments(), max_tokens=5, **sampling))
    answers.append(engine.add([live(33, 4)], max_tokens=40, **sampling))
    take_steps(engine, 3)
    answers.append(engine.add([live(21, 5)], max_tokens=1, **sampling))
    take_steps(engine, 5)
    engine.abort(answers[2])
    answers.append(engine.add([live(9, 6)], max_tokens=6, stop=(chr(0x4E00 + 5), chr(0x4E00 + 9)), **sampling))
    engine.run()
    engine.assert_back_to_start()
    return [answer for number, answer in enumerate(answers) if number != 2]


def take_steps(engine: Bench, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.assert_sound()

"""What encoding costs on this device, and the entry of a known text: measured once, before the first request.

A second engine over the same model and memory does it, with a store of its own, and leaves nothing behind.
"""

from __future__ import annotations

import time

import numpy as np

from hypic.engine.engine import Engine
from hypic.engine.parallel.cost import EncodeCost
from hypic.engine.payload import Canary
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.engine.store.image import export
from hypic.engine.task import Task, Vocabulary
from hypic.types import Policy, SamplingParams, Segment

LENGTHS = (64, 256, 1024, 2048)
CANARY_TOKENS = 64
# Ids that every vocabulary has.
LARGEST_ID = 200
# No further length is measured once this much time has gone.
BUDGET_S = 2.0
NAME = "hypic: a known text"


def calibrate(runner: Runner, max_step_tokens: int) -> tuple[EncodeCost, Canary]:
    """The cost of encoding on this device, and an entry to compare others' with."""
    engine = Engine(runner, Vocabulary(lambda ids: ""), 1, max_step_tokens, None)
    longest = min(runner.max_context - 2, max_step_tokens)
    lengths = [length for length in LENGTHS if length <= longest] or [max(longest // 2, 16)]
    started, measured = time.perf_counter(), []
    for number, length in enumerate(lengths):
        if number == 0:
            _encode(engine, length, 0)  # what is made on first use is no part of the cost
        measured.append((length, _encode(engine, length, number + 1)))
        if time.perf_counter() - started > BUDGET_S:
            break
    canary = _canary(engine, min(CANARY_TOKENS, longest))
    engine.store.clear()
    engine.close()
    return EncodeCost.fit(measured), canary


def _encode(engine: Engine, length: int, seed: int) -> float:
    """Seconds to encode one segment."""
    ids = tuple(np.random.default_rng(seed).integers(1, LARGEST_ID, length).tolist())
    started = time.perf_counter()
    _run(engine, ids)
    seconds = time.perf_counter() - started
    engine.store.clear()
    return seconds


def _canary(engine: Engine, length: int) -> Canary:
    ids = tuple((np.arange(length) * 37 % LARGEST_ID + 1).tolist())
    _run(engine, ids)
    entry = next(entry for entry in engine.store if not entry.is_snapshot)
    return Canary(entry, export(engine.runner.pool, entry, engine.runner.identity))


def _run(engine: Engine, ids: tuple[int, ...]) -> None:
    engine.add(warming("calibrate", ids, Segment("", name=NAME), Policy().seam))
    while engine.has_work:
        engine.step()


def warming(id: str, ids: tuple[int, ...], segment: Segment, seam: int, is_trial: bool = False) -> Task:
    """Encode one segment here and nothing else."""
    policy = Policy(seam=seam, min_segment_tokens=0)
    # The token behind the segment is never run: it stands for the text that will follow.
    pieces, sampling = [Piece(ids, segment), Piece((0,))], SamplingParams(max_tokens=1)
    return Task(id, pieces, sampling, policy, warm=True, stays=True, is_trial=is_trial)

"""What encoding costs on this device, and the entry of a known text: measured once, before the first request.

A second engine over the same model and memory does it, with a store of its own, and leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hypic.engine.engine import Engine
from hypic.engine.parallel.cost import EncodeCost
from hypic.engine.payload import Canary
from hypic.engine.plan import Piece
from hypic.engine.pool import Pool
from hypic.engine.runner import Runner
from hypic.engine.sizing import Need
from hypic.engine.store.image import export
from hypic.engine.task import Task, Vocabulary
from hypic.types import Policy, SamplingParams, Segment

# Segments of one step: their number and their length. Steps of a batch's size are measured too: what is made once a
# step and what is made for each token cannot be told apart from small ones, whose kernels a GPU runs in no time. So are
# long segments: among those of one length, what a token takes cannot be told from what a pair of tokens takes, and a
# plan by the wrong one of the two believes long segments to take many times what they do.
SHAPES = ((1, 64), (1, 256), (1, 1024), (4, 1024), (8, 1024), (2, 4096), (16, 1024))
CANARY_TOKENS = 64
# Ids that every vocabulary has.
LARGEST_ID = 200
# No shape is measured that should bring what was spent on measuring above this. The first run of each, which compiles
# and allocates, is not counted; one that is this short is run once more, for the shorter time.
BUDGET_S = 2.0
SHORT_S = 0.1
NAME = "hypic: a known text"
# All texts behind one rung: those of one shape take as long, whatever their number.
ALIKE = Policy(min_segment_tokens=0, rungs=False)


def calibrate(runner: Runner, max_step_tokens: int) -> tuple[EncodeCost, Canary]:
    """The cost of encoding on this device, and an entry to compare others' with."""
    engine = Engine(runner, Vocabulary(lambda ids: ""), 1, max_step_tokens, None)
    longest = min(runner.max_context - 2, max_step_tokens)
    shapes = [shape for shape in SHAPES if shape[0] * shape[1] <= longest and _fits(runner.pool, *shape)]
    measured, spent_s = list[tuple[Sequence[int], float]](), 0.0
    for shape in shapes or [(1, max(longest // 2, 16))]:
        found = _measured(engine, shape, BUDGET_S - spent_s, measured)
        if found is None:
            break
        measured.append(([shape[1]] * shape[0], min(found)))
        spent_s += sum(found)
    canary = _canary(engine, min(CANARY_TOKENS, longest))
    engine.store.clear()
    engine.close()
    return EncodeCost.fit(measured).batched(max_step_tokens), canary


def _fits(pool: Pool, count: int, length: int) -> bool:
    """Whether so many segments can be encoded at once, twice over: what does not fit would run in several steps."""
    pages = count * (pool.pages_for(length) + pool.pages_for(Policy().seam))
    return not pool.lacks(Need(2 * pages, 4 * count + 2, 2 * count))


def _measured(
    engine: Engine, shape: tuple[int, int], left_s: float, before: Sequence[tuple[Sequence[int], float]]
) -> list[float] | None:
    """Seconds of a few runs, or ``None`` if they should take longer than what is left."""
    if before:
        tokens, seconds = before[-1]
        if 2 * seconds * max(1.0, shape[0] * shape[1] / sum(tokens)) > left_s:
            return None
    _encode(engine, shape, 0)
    found = [_encode(engine, shape, 1)]
    return [*found, _encode(engine, shape, 2)] if found[0] < SHORT_S else found


def _encode(engine: Engine, shape: tuple[int, int], seed: int) -> float:
    """Seconds to encode segments in one step."""
    texts = np.random.default_rng(seed).integers(1, LARGEST_ID, shape).tolist()
    started = time.perf_counter()
    _run(engine, *(tuple(ids) for ids in texts))
    seconds = time.perf_counter() - started
    engine.store.clear()
    return seconds


def _canary(engine: Engine, length: int) -> Canary:
    _run(engine, tuple((np.arange(length) * 37 % LARGEST_ID + 1).tolist()))
    entry = next(entry for entry in engine.store if not entry.is_snapshot)
    return Canary(entry, export(engine.runner.pool, entry, engine.runner.identity))


def _run(engine: Engine, *texts: tuple[int, ...]) -> None:
    engine.add(warming("calibrate", texts, Segment("", name=NAME), ALIKE))
    while engine.has_work:
        engine.step()


def warming(
    id: str,
    texts: Sequence[tuple[int, ...]],
    segment: Segment,
    policy: Policy,
    is_trial: bool = False,
    place: int | None = None,
) -> Task:
    """Encode texts here, each as this segment with ``place`` segments before it, and nothing else."""
    # The token behind the segments is never run: it stands for the text that will follow.
    pieces, sampling = [*(Piece(ids, segment, place=place) for ids in texts), Piece((0,))], SamplingParams(max_tokens=1)
    return Task(id, pieces, sampling, policy, warm=True, stays=True, is_trial=is_trial)

"""An engine driven step by step on its own thread: whole batches at once, and contexts that were never computed.

What is measured here is steps, not requests; ``Session.ask`` measures requests. A made-up context is a snapshot of
random numbers that is put into the store under the running hash of random tokens, so that a decode at 16k tokens of
context costs no prefill. Its numbers mean nothing, and are finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hypic.engine import plan
from hypic.engine.engine import Engine
from hypic.engine.plan import Piece
from hypic.engine.segment import CachedSegment
from hypic.engine.sizing import Need
from hypic.engine.task import Task
from hypic.errors import HypicError, StoreFull
from hypic.types import Policy, SamplingParams


@dataclass(frozen=True)
class Step:
    """One step of the engine: seconds, and how many requests got a token in it."""

    seconds: float
    num_tokens: int


def answer_tasks(prompts: Sequence[Sequence[Piece]], policy: Policy, max_tokens: int, name: str) -> list[Task]:
    """Greedy requests that end after ``max_tokens``."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [Task(f"{name}-{number}", pieces, sampling, policy) for number, pieces in enumerate(prompts)]


def encode_tasks(segments: Sequence[Piece], policy: Policy, name: str, places: Sequence[int] = (0,)) -> list[Task]:
    """Requests that only want their segment encoded, for each of ``places`` as if so many segments stood before it."""
    # The token behind the segment stands for text that would follow; it is never run.
    return [
        Task(f"{name}-{number}-{place}", [replace(segment, place=place), Piece((0,))], policy=policy, warm=True)
        for number, segment in enumerate(segments)
        for place in places
    ]


def drive(engine: Engine, tasks: Sequence[Task], look: Callable[[Engine], None] = lambda engine: None) -> list[Step]:
    """Adds all tasks and steps until nothing is left; ``look`` is called after every step.

    Raises:
        HypicError: a task was refused or failed; the others are dropped.
    """
    try:
        for task in tasks:
            engine.add(task)
        return list(_steps(engine, look))
    except HypicError:
        for task in tasks:
            engine.abort(task.id)
        raise


def _steps(engine: Engine, look: Callable[[Engine], None]) -> Iterator[Step]:
    while engine.has_work:
        started = time.perf_counter()
        emissions = engine.step()
        yield Step(time.perf_counter() - started, len(emissions))
        failed = next((e.result for e in emissions if isinstance(e.result, HypicError)), None)
        if failed is not None:
            raise failed
        look(engine)


def seconds(engine: Engine, tasks: Sequence[Task]) -> float:
    """Wall time of all tasks together, the device's last work included."""
    device = engine.runner.pool.device
    synchronize(device)
    started = time.perf_counter()
    drive(engine, tasks)
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def used_bytes(engine: Engine) -> int:
    """What of the pool is taken, by requests and entries."""
    pool = engine.runner.pool
    have, free, layout = pool.capacity, pool.free, pool.layout
    pages, states = have.pages - free.pages, have.states - free.states
    transitions = have.transitions - free.transitions
    return pages * pool.page_bytes + states * layout.state_bytes + transitions * layout.transition_bytes


@torch.inference_mode()
def make_up_context(engine: Engine, pieces: Sequence[Piece], policy: Policy, seed: int) -> None:
    """A snapshot of random numbers at the last mark of a prompt, as if all before it had been computed.

    Raises:
        StoreFull: memory has no room for it.
    """
    pool, made = engine.runner.pool, plan.make(pieces, policy, engine.runner.identity)
    mark = made.marks[-1]
    pages = pool.pages_for(mark.position)
    if pool.lacks(Need(pages=pages, states=1)):  # making room would evict what was made up before
        raise StoreFull(
            f"memory holds no context of {mark.position} tokens more; raise memory= or ask for a smaller batch."
        )
    taken, slot = pool.take_pages(pages), pool.take_state()
    slots = pool.slots_of(taken, mark.position)
    generator = torch.Generator(device=pool.device).manual_seed(seed)
    on_device = torch.from_numpy(slots).to(pool.device)
    for layer, shape in enumerate(pool.layout.attention):
        drawn = [
            torch.empty((len(slots), shape.num_kv_heads, width), dtype=pool.layout.dtype, device=pool.device).normal_(
                generator=generator
            )
            for width in (shape.key_dim, shape.value_dim)
        ]
        pool.write_kv(layer, on_device, drawn[0], drawn[1])
    for tensors in (pool.states, pool.tails):
        for tensor in tensors:
            tensor[slot].normal_(0.0, 0.1, generator=generator)
    num_bytes = pool.layout.state_bytes + pages * pool.page_bytes
    ids = made.ids[: mark.position]
    engine.store.put(CachedSegment(mark.digest, ids, slots, tuple(taken), slot, None, num_bytes))

"""Decode steps that are launched before the token of the step before has been read.

The device then goes from one step to the next, and the host reads, sends and judges a token while the next is computed.
Such a step is known but for its tokens, which it takes from where the step before leaves them on the device. Of an
answer that turns out to have ended it was run in vain, and leaves no trace: it wrote the running state to a second slot
(``Held.other_slot``), K and V of one token to a place that only the request holds, and nobody's cursor was moved. Its
own tokens are chosen when its turn comes, once those before are known: no random number is drawn in vain, and penalties
count all that was generated.

Not here: the device, whose stream keeps the order of steps, and of what is written into slots that are given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hypic.engine.free_memory import attempted
from hypic.engine.request import Held, Request
from hypic.engine.runner import Launched, Runner
from hypic.engine.sampler import Choice
from hypic.engine.sampling_state import on
from hypic.engine.scheduler import Scheduler
from hypic.engine.work import RequestRun, Work


@dataclass(frozen=True)
class Ahead:
    """A step that was launched ahead."""

    work: Work
    launched: Launched


@dataclass(frozen=True)
class Following:
    """A step that is known but for its tokens: those that the step before chooses in its ``rows`` of logits."""

    work: Work
    rows: Sequence[int]

    @torch.inference_mode()
    def launched(self, runner: Runner, chosen: Tensor) -> Ahead:
        """Hand it to the device; ``chosen [R]`` are the tokens of the step before."""
        rows, count = self.rows, len(self.rows)
        is_head = list(rows) == list(range(count))
        ids = chosen[:count] if is_head else chosen.index_select(0, on(chosen.device, rows, torch.long))
        return Ahead(self.work, runner.launch(self.work.chains, ids))

    def take_back(self) -> None:
        """It was not launched after all."""
        for run in self.work.requests:
            _held(run.request).num_own -= 1


@dataclass(frozen=True)
class Launching:
    """Which steps are launched ahead; see the module's docstring. ``Pool.ahead`` are the slots for their states."""

    scheduler: Scheduler

    def launch_behind(self, work: Work, choice: Choice, runner: Runner) -> Ahead | None:
        """Launch the step behind ``work``, if it is known but for its tokens, which ``choice`` holds: it overwrites
        what ``work`` has left on the device."""
        following = self.behind(work)
        if following is None:
            return None
        ahead = attempted(partial(following.launched, runner, choice.tensors[0]), runner.pool.device)
        if ahead is None:  # the next step meets it again, if it was not for this one
            following.take_back()
        return ahead

    def behind(self, work: Work) -> Following | None:
        """The step behind ``work``, which is under way and counted as done, or ``None`` if it is not known or must not
        be launched yet: others have come who may find a place, memory would have to be made, or every answer ends for
        certain."""
        if not self._is_known(work):
            return None
        requests = [run.request for run in work.requests]
        rows = [row for row, request in enumerate(requests) if len(request.generated) + 1 < request.max_tokens]
        if self.scheduler.waiting and len(rows) < len(requests):
            return None  # who ends makes room for who waits
        if not rows or not self._has_room([_held(requests[row]) for row in rows]):
            return None
        return Following(Work(requests=[self._run(requests[row]) for row in rows]), rows)

    def left(self, ahead: Ahead | None) -> Ahead | None:
        """What is left of a step once the tokens before it are known: the requests that still run."""
        if ahead is None:
            return None
        runs, running = ahead.work.requests, self.scheduler.running
        rows = [row for row, run in enumerate(runs) if running.get(run.request.id) is run.request]
        if len(rows) == len(runs):
            return ahead
        return Ahead(Work(requests=[runs[row] for row in rows]), ahead.launched.only(rows)) if rows else None

    def _is_known(self, work: Work) -> bool:
        scheduler, jobs = self.scheduler, self.scheduler.admission.jobs
        is_quiet = not (self._may_admit or scheduler.failures or jobs.encoding or jobs.loading or work.encodes)
        return (
            scheduler.pool.num_ahead > 0
            and is_quiet
            and len(scheduler.running) == len(work.requests)
            and all(run.chain.wants_logits for run in work.requests)
        )

    @property
    def _may_admit(self) -> bool:
        """Whether who waits may find a place at the next step. That there was no room at this one is believed once:
        a step that is launched ahead tries nothing, and behind it the scheduler is asked again."""
        scheduler = self.scheduler
        return scheduler.next_up is not None and not scheduler.was_refused

    def _has_room(self, held: Sequence[Held]) -> bool:
        """Whether all of them get a second state, and a place for a token, from what is free."""
        pool = self.scheduler.pool
        num_states = sum([not one.other_slot for one in held])
        num_pages = sum([one.num_own == len(one.pages) * pool.page_size for one in held])
        return num_states <= len(pool.ahead) and num_pages <= pool.free.pages

    def _run(self, request: Request) -> RequestRun:
        held, pool = _held(request), self.scheduler.pool
        held.other_slot = held.other_slot or pool.ahead.pop()
        if held.num_own == len(held.pages) * pool.page_size:
            held.pages += pool.take_pages(1)
        page, offset = divmod(held.num_own, pool.page_size)
        held.num_own += 1
        chain = request.decode_chain(held.pages[page] * pool.page_size + offset, is_ahead=True)
        return RequestRun(request, chain, request.done + 1)


def _held(request: Request) -> Held:
    assert request.held is not None, "only running requests hold anything"
    return request.held

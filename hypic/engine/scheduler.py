"""When what runs, and in what company: encodes, prefill in pieces, decode, preemption.

Two requests that need the same cold segment share one ``Encode``. Pages for generated tokens are taken as they come;
when none is left, the youngest request starts again later and keeps what it has generated.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice

from hypic.engine.admission import Admission
from hypic.engine.encode import Encode
from hypic.engine.request import Held, Request
from hypic.engine.segment import CachedSegment
from hypic.engine.sizing import Need
from hypic.engine.snapshots import Snapshots
from hypic.engine.step_limit import StepLimit
from hypic.engine.waiting import Waiting
from hypic.engine.work import EncodeRun, RequestRun, Work
from hypic.errors import HypicError, StoreFull

MIN_PREFILL_TOKENS = 64
PREFETCHED = 4
TOO_SMALL = "the pool that memory= sizes is too small for this prompt; raise memory= or shorten the prompt."
NO_PAGE = "the pool that memory= sizes has no page left; raise memory= or lower max_tokens."


class Scheduler:
    """Waiting and running requests; see the module's docstring."""

    def __init__(self, admission: Admission, max_running: int, max_step_tokens: int) -> None:
        self.admission, self.pool, self.store = admission, admission.pool, admission.store
        self.max_running, self.limit = max_running, StepLimit(max_step_tokens, MIN_PREFILL_TOKENS)
        self.snapshots = Snapshots(admission)
        self.waiting = Waiting()
        self.running: dict[str, Request] = {}
        self.failures: list[tuple[Request, HypicError]] = []
        self._alone_next = self.was_refused = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.failures)

    @property
    def is_full(self) -> bool:
        """Whether nobody else may run who needs a state, whatever memory there is."""
        count = sum([not request.only_warms for request in self.running.values()])
        return count >= min(self.max_running, self.admission.most_running)

    @property
    def next_up(self) -> Request | None:
        """The first that may begin. What only warms has no state and need not wait for one; it may as long as a step
        has room for it, so that it comes in few steps and does not take all memory at once: one for what others ask
        for, and one for the rest, since neither queue may hold up the other."""
        return next((one for one in self.waiting.heads if not self._is_early(one)), None)

    def _is_early(self, request: Request) -> bool:
        if not request.only_warms:
            return self.is_full
        return self.admission.jobs.num_left(request.stays) >= self.limit.tokens

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            PromptTooLong, StoreFull: it could never run; nothing was stored.
        """
        self.admission.lookup.check(request, self.admission.max_context)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, whatever its stage, and give back all it holds."""
        self.waiting.remove(request)
        self.running.pop(request.id, None)
        self.admission.release(request)

    def preempt(self, request: Request) -> None:
        """Start a request again later."""
        self.remove(request)
        request.restart()
        self.waiting.put_back(request)

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Work | None:
        """What to run next, or ``None`` if nothing can."""
        self._take_in()
        if self.admission.jobs.away is not None:
            self.admission.jobs.away.rebalance()
        for request in self.running.values():  # before others come, who want memory too
            self.admission.advance(request)
        self._admit()
        self._take_in()
        work = Work()
        alone = [request for request in self.running.values() if request.plan.policy.deterministic]
        together = [request for request in self.running.values() if not request.plan.policy.deterministic]
        turns = [partial(self._fill_alone, work, alone), partial(self._fill, work, together)]
        self._alone_next = not self._alone_next
        for fill in turns if self._alone_next else reversed(turns):
            fill()
            if work.requests or work.encodes:
                return work
        self._unblock()
        return None

    def _take_in(self) -> None:
        """Entries that have been loaded; who waits for one that did not come starts again, and encodes it."""
        for request in self.admission.jobs.arrive():
            self.preempt(request)

    def _unblock(self) -> None:
        """Nothing can run and nothing is on its way: requests hold what others need, so the youngest starts again."""
        blocked = [request for request in self.running.values() if not request.only_warms]
        if not blocked or self.admission.jobs.is_waiting:
            return
        if len(self.running) > 1:
            self.preempt(blocked[-1])
        else:
            self._fail(blocked[0], StoreFull(TOO_SMALL))

    def look_ahead(self) -> None:
        """What who waits will need begins to be read; that there was no room for the first one is no longer news."""
        self.was_refused = False
        for request in islice(self.waiting.own, PREFETCHED):
            self.admission.lookup.prefetch(request)

    def _admit(self) -> None:
        self.look_ahead()
        while (first := self.next_up) is not None:
            if self.admission.place(first):
                self.waiting.remove(first)
                self.running[first.id] = first
            elif self.running or self.store.num_lent:
                self.was_refused = True
                return
            elif self.store.clear() == 0:
                self._fail(first, StoreFull(TOO_SMALL))

    def _fill(self, work: Work, together: list[Request]) -> None:
        """Decode first: it may preempt, and what it preempts is in no other part of the step yet. Who waits for no
        segment any more has half of the rest, at least: others' segments may come without end."""
        for request in together:
            if request.is_decoding and request.id in self.running:
                self._decode(work, request)
        budget = max(MIN_PREFILL_TOKENS, self.limit.tokens - len(work.requests))
        jobs = [job for job in self.admission.encoding.values() if not job.is_alone and not job.away]
        if sum([job.num_left for job in jobs]) > budget // 2:
            ready = [request for request in together if self.admission.jobs.has_all_of(request)]
            budget -= self._prefill_all(work, ready, budget - budget // 2)
        budget = self._encode(work, budget, jobs)
        self._prefill_all(work, together, budget)

    def _fill_alone(self, work: Work, alone: list[Request]) -> None:
        """A deterministic request shares no batch, and its segments are encoded one at a time."""
        for request in alone:
            if request.id in self.running and not work.requests and not work.encodes:
                self._run_alone(work, request)

    def _run_alone(self, work: Work, request: Request) -> None:
        jobs = [job for job in self.admission.encoding.values() if request.id in job.waiters]
        loading = [job for job in self.admission.jobs.loading.values() if request.id in job.waiters]
        here = [job for job in jobs if not job.away]
        if here:
            self._encode(work, self.limit.tokens, here[:1])
        elif jobs or loading:
            return  # its steps are the same whether its segments are on their way or there
        elif request.is_decoding:
            self._decode(work, request)
        else:
            self._prefill(work, request, self.limit.tokens)

    def _encode(self, work: Work, budget: int, jobs: Iterable[Encode]) -> int:
        for job in jobs:
            if budget <= 0:
                break
            chain, reached = job.chain(budget)
            budget -= chain.num_tokens
            work.encodes.append(EncodeRun(job, chain, reached))
        self.pool.finish([entry.transition_slot for entry in work.finished if entry.transition_slot is not None])
        return budget

    def _prefill_all(self, work: Work, requests: Iterable[Request], budget: int) -> int:
        """Tokens of all that are not in the step yet, ``budget`` at most."""
        left = budget
        for request in requests:
            if left > 0 and not request.is_decoding and request.id in self.running and not work.has(request):
                left -= self._prefill(work, request, left)
        return budget - left

    def _prefill(self, work: Work, request: Request, budget: int) -> int:
        """Tokens of the request's rows that this step runs; none if it only wants its segments encoded.

        Behind its leading row a request waits for all that other workers encode for it, and then runs in one piece:
        every piece reads all weights again.
        """
        if request.only_warms or (request.done > 0 and self.admission.waits_for_others(request)):
            return 0
        finishing = {entry.key for entry in work.finished}

        def is_ready(entry: CachedSegment) -> bool:
            return entry.key in finishing or not self.admission.jobs.has(entry.key)

        chain, reached = request.prefill_chain(budget, is_ready, partial(self.snapshots.take, work, request))
        if chain is None:
            return 0
        work.requests.append(RequestRun(request, chain, reached))
        return chain.num_tokens

    def _decode(self, work: Work, request: Request) -> None:
        held = request.held
        assert held is not None, "a decoding request holds a state"
        if not self._has_page(work, request, held):
            return
        page, offset = divmod(held.num_own, self.pool.page_size)
        held.num_own += 1
        chain = request.decode_chain(held.pages[page] * self.pool.page_size + offset)
        work.requests.append(RequestRun(request, chain, request.done + 1))

    def _has_page(self, work: Work, request: Request, held: Held) -> bool:
        """Room for one more token, at need from the youngest request that this step does not run yet."""
        if held.num_own < len(held.pages) * self.pool.page_size:
            return True
        while not self.store.make_room(Need(pages=1)):
            others = [r for r in self.running.values() if r is not request and not work.has(r)]
            if not others and not work.requests and not self.store.num_lent:
                self._fail(request, StoreFull(NO_PAGE))
            if not others:
                return False
            self.preempt(others[-1])
        held.pages += self.pool.take_pages(1)
        return True

    def discard(self, request: Request) -> None:
        """Take a request out that ended non-finite, with the entries it used: one of them may be the cause."""
        used = [] if request.held is None else [entry.key for entry in request.held.parts]
        self.remove(request)
        for key in used:
            self.store.remove(key)

    def _fail(self, request: Request, error: HypicError) -> None:
        self.remove(request)
        self.failures.append((request, error))

    # -- after a step ------------------------------------------------------------------------------------------------

    def settle(self, work: Work, broken: set[int]) -> set[str]:
        """Move cursors and store what was encoded; ``broken`` are numbers of chains with non-finite results.

        Returns the ids of the requests that this ends: the chains' own, and all that need a segment which broke.
        """
        failed = {run.request.id for n, run in enumerate(work.requests, len(work.encodes)) if n in broken}
        for number, encode in enumerate(work.encodes):
            failed |= encode.job.waiters.keys() if number in broken else set()
            self._settle_encode(encode, number in broken)
        for taken in work.snapshots:
            self.snapshots.settle(taken, taken.request.id in failed)
        if not work.is_advanced:
            self.advance(work)
        self.limit.ran(sum(chain.num_tokens for chain in work.chains))
        return failed

    def advance(self, work: Work) -> None:
        """Move requests' cursors past a step, and give back what they have taken in with it. A step that encodes
        nothing may still be under way on the device: what takes the place of what is given back is written behind it.
        """
        work.is_advanced = True
        for run in work.requests:
            run.advance()
            self.admission.settle(run.request)
            run.request.prepare_end()

    def _settle_encode(self, run: EncodeRun, is_broken: bool) -> None:
        run.advance()
        if is_broken:
            self.admission.jobs.broken(run.job)
        elif run.is_last:
            self.admission.jobs.stored(run.job)

    def finish(self, request: Request) -> None:
        """End a request that is answered; its running state becomes a snapshot for the next turn, however short."""
        self.snapshots.take_end(request)
        self.remove(request)

    def abandon(self, work: Work) -> list[Request]:
        """A step failed half-way: states are no longer sound, so all it ran starts again, with smaller steps
        for a while. It counts against who ran in it, unless the limit had grown since the last time: that was a trial.

        Returns what was hurt.
        """
        for taken in work.snapshots:
            self.pool.drop_state(taken.state_slot)
        hurt = list(work.all_requests.values())
        for request in hurt:
            self.preempt(request)
            request.num_failures += not self.limit.has_grown
        self.limit.ran_short()
        return hurt

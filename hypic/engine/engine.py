"""Requests in, pieces of answers out: ``add``, ``step``, ``settle``, ``abort``. One thread at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from hypic.engine import plan
from hypic.engine.admission import Admission
from hypic.engine.ahead import Ahead, Launching
from hypic.engine.answer import Answer
from hypic.engine.free_memory import attempted, shortage
from hypic.engine.parallel.cost import Pace
from hypic.engine.read_back import Landing, ReadBack
from hypic.engine.report import cache_report
from hypic.engine.request import Request
from hypic.engine.runner import Runner, StepResult
from hypic.engine.sampler import Choice, Likeliest, SampledToken, Sampler
from hypic.engine.scheduler import Scheduler
from hypic.engine.segment import CachedSegment
from hypic.engine.speed import measure_encode
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.expiry import is_over
from hypic.engine.store.history import History
from hypic.engine.store.opening import open_store
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.watch import ReuseWatch
from hypic.engine.work import Work
from hypic.errors import HypicError, NonFiniteOutput, WorkerLost
from hypic.store_spec import TierSpec
from hypic.types import CacheReport, Completion, FinishReason, TokenLogprob, Usage

LOADING_S = 0.002
# Heads that may wait for an idle moment, and tokens that one may cost beside the new ones.
MAX_HEADS = 64
MAX_HEAD_TOKENS = 128


class Engine:
    """See the module's docstring; ``loop.py`` drives it."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        max_running: int,
        max_step_tokens: int,
        store_bytes: int | None,
        tiers: Sequence[TierSpec] = (),
    ) -> None:
        self.runner, self.vocabulary = runner, vocabulary
        self.store = DeviceStore(runner.pool, store_bytes)
        self.tiers = open_store(self.store, runner.identity, tiers)
        if tiers:
            self.tiers.costs.encode.see(*measure_encode(runner, max_step_tokens))
        rungs = frozenset(primer.digest for primer in runner.identity.primers)
        memory = runner.pool, self.store, self.tiers, runner.max_context
        self.admission = Admission(*memory, History(rungs=rungs), primers=runner.primers)
        for stored in (stored for tier in self.tiers.tiers for stored in tier.entries()):
            self.admission.expiry.note(stored.key, stored.expires_s)
        self.scheduler = Scheduler(self.admission, max_running, max_step_tokens)
        self.sampler, self.landing = Sampler(), Landing()
        self._launching = Launching(self.scheduler)
        self._ahead: Ahead | None = None
        self.watch = ReuseWatch()
        self.kept: dict[bytes, CachedSegment] = {}
        self.heads: deque[Task] = deque(maxlen=MAX_HEADS)
        self._answers: dict[str, Answer] = {}
        self.is_stalled = False
        # Called while the device is at a step; what it does must leave all that runs as it is.
        self.meanwhile: Callable[[ReadBack], None] = _nothing
        self.pace: Pace | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.heads)

    def add(self, task: Task) -> None:
        """Queue a request.

        Raises:
            PromptError, PromptTooLong, StoreFull, ConfigError: it could never run, or its policy asks too much; nothing
                was computed or stored.
        """
        if task.is_head:
            self.heads.append(task)
        else:
            self._begin(task)

    def _begin(self, task: Task) -> None:
        # What is warmed is not the end of a prompt.
        policy = task.policy.with_(live_last=0) if task.warm else task.policy
        planned = plan.make(task.pieces, policy, self.runner.identity)
        room = self.runner.max_context - len(planned.ids)
        request = Request(task.id, planned, 0 if task.warm else min(task.sampling.max_tokens, max(room, 0)))
        request.stays, request.is_trial = task.stays, task.is_trial
        answer = Answer.of(task, request, self.vocabulary)
        self.scheduler.add(request)
        self._answers[task.id] = answer

    def abort(self, id: str) -> None:
        """Forget a request, whatever its stage; unknown ids are ignored."""
        answer = self._answers.pop(id, None)
        if answer is not None:
            self.scheduler.remove(answer.request)

    def step(self) -> list[Emission]:
        """One forward for all that can run. ``is_stalled`` says that nothing can before something has come."""
        self.expire()
        if self.heads and not self.scheduler.has_work:
            self._begin_head(self.heads.popleft())
        ahead, self._ahead = self._launching.left(self._ahead), None
        if ahead is not None:
            self.scheduler.look_ahead()
        work = self.scheduler.schedule() if ahead is None else ahead.work
        done = self._failures() + self._warmed()
        jobs = self.admission.jobs
        is_loading = bool(jobs.loading)
        self.is_stalled = work is None and not done and not is_loading and jobs.is_waiting
        if work is None:
            if not done and is_loading:
                self.tiers.wait(LOADING_S)
            return done
        began = time.perf_counter()
        result = attempted(partial(self._run, work, ahead), self.runner.pool.device)
        if result is None:
            return done + self._out_of_memory(work)
        settled = self.settle(work, result)
        if work.encodes:
            seconds = time.perf_counter() - began
            self.tiers.costs.encode.see(sum(chain.num_tokens for chain in work.chains), seconds)
            if self.pace is not None:
                rows = sum(run.chain.num_tokens for run in work.requests)
                self.pace.ran([run.chain.num_tokens for run in work.encodes], rows, seconds)
        return done + settled

    def _run(self, work: Work, ahead: Ahead | None) -> StepResult:
        """The tokens that a step chooses, read back together; meanwhile others come, or the next is launched."""
        launched = self.runner.launch(work.chains) if ahead is None else ahead.launched
        choice = self.choose(work, launched.logits, launched.known)
        together = launched.together if choice.tensors is launched.known else None
        read_back = ReadBack([launched.is_finite, *choice.tensors], self.landing, together)
        if not work.encodes:
            self.scheduler.advance(work)
        self.meanwhile(read_back)
        self._ahead = self._launching.launch_behind(work, choice, self.runner)
        is_finite, *chosen = read_back.wait()
        return StepResult(launched.logits, launched.broken(is_finite), choice.tokens(chosen))

    def rest(self) -> None:
        """Wait for a step that was launched ahead, be it in vain; ``step`` reads its tokens all the same."""
        device = self.runner.pool.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def choose(self, work: Work, logits: Tensor, known: Likeliest | None = None) -> Choice:
        """One token for every row of ``logits [R, vocab]``, on the device."""
        states = [self._answers[run.request.id].sampling for run in work.requests if run.chain.wants_logits]
        return self.sampler.choose(logits, states, known) if states else Choice()

    def tend(self) -> bool:
        """Something to do while there is nothing to do: save an entry; whether there was one."""
        return self.tiers.tend()

    def close(self) -> None:
        """Save what is to outlive this process, and end the store's threads."""
        with suppress(RuntimeError):  # of torch: a device that is lost is at nothing any more
            self.rest()
        self.tiers.close()

    def settle(self, work: Work, result: StepResult) -> list[Emission]:
        """Store new segments, append tokens, free what is finished."""
        failed = self.scheduler.settle(work, set(result.broken))
        wanting = [run.request for run in work.requests if run.chain.wants_logits]
        answers = [self._answers[request.id] for request in wanting]
        emitted = []
        for answer, token in zip(answers, result.sampled, strict=True):
            if token.finite and answer.request.id not in failed:
                emitted.append(self._advance(answer, token))
            else:
                failed.add(answer.request.id)
        return emitted + [self._fail(id, _not_finite()) for id in failed] + self._warmed()

    def _begin_head(self, task: Task) -> None:
        """Compute a head, if it is to be had for a little more than what is new in it."""
        # Too long for the context, or with a text behind a segment that costs too much: there will be no next turn.
        with suppress(HypicError):
            planned = plan.make(task.pieces, task.policy, self.runner.identity)
            request = Request(task.id, planned, max_tokens=1)
            start, num_missing = self.admission.lookup.known(request)
            num_rows, num_new = request.rows_from(start), len(task.pieces[-1].ids)
            is_there = planned.digest_after(()) in self.store or num_rows <= 1
            if not is_there and not num_missing and num_rows <= num_new + MAX_HEAD_TOKENS:
                self._begin(task)

    def expire(self) -> float | None:
        """Forget what has lived its time; seconds until the next entry has, or ``None``."""
        now_s, expiry = time.time(), self.admission.expiry
        for key in expiry.due(now_s):
            self.tiers.expire(key)
            if key in self.kept and is_over(self.kept[key]):  # which a look-up may have dropped already
                self.store.unpin(self.kept.pop(key))
            entry = self.store.find(key)
            if entry is not None and not is_over(entry):
                expiry.watch(entry)  # the time was that of an older entry of the same text
                continue
            self.admission.history.expired(key)
            if entry is not None:
                self.store.forget(entry)
        return None if expiry.next_s is None else expiry.next_s - now_s

    # -- one answer --------------------------------------------------------------------------------------------------

    def _advance(self, answer: Answer, token: SampledToken) -> Emission:
        request = answer.request
        if answer.task.is_head:
            self._end(answer)
            return Emission(request.id, Completion(finish_reason="stop"), is_last=True)
        text, reason = answer.push(token.token_id, self.vocabulary)
        logprobs = (token.logprob,) if token.logprob is not None else ()
        if reason is None:
            piece = Completion(text, (token.token_id,), logprobs=logprobs)
            return Emission(request.id, piece, is_last=False)
        return self._finish(answer, text + answer.text.finish(), token.token_id, logprobs, reason)

    def _finish(
        self, answer: Answer, text: str, token_id: int, logprobs: tuple[TokenLogprob, ...], reason: FinishReason
    ) -> Emission:
        request = answer.request
        report = self._report(answer)
        usage = Usage(report.prompt_tokens, len(request.generated), report.reused_tokens, request.encoded)
        self._end(answer)
        self.watch.see(report)
        piece = Completion(text, (token_id,), "", reason, logprobs, usage, report)
        return Emission(request.id, piece, is_last=True)

    def _report(self, answer: Answer) -> CacheReport:
        runner, times = self.runner, answer.times_s(time.perf_counter())
        return cache_report(answer.request, runner.pool, runner.identity.fingerprint, times, answer.task.notes)

    def _end(self, answer: Answer) -> None:
        del self._answers[answer.request.id]
        self.scheduler.finish(answer.request)

    # -- what is not an answer ---------------------------------------------------------------------------------------

    def _warmed(self) -> list[Emission]:
        """Requests that wanted their segments encoded and nothing else."""
        is_there = self.admission.jobs.has_all_of
        ready = [answer for answer in self._answers.values() if answer.task.warm and is_there(answer.request)]
        emitted = []
        for answer in ready:
            report = self._report(answer)
            del self._answers[answer.request.id]
            self.scheduler.remove(answer.request)
            emitted.append(Emission(answer.request.id, Completion(finish_reason="stop", report=report), is_last=True))
        return emitted

    def _failures(self) -> list[Emission]:
        failures, self.scheduler.failures = self.scheduler.failures, []
        return [self._fail(request.id, error) for request, error in failures]

    def _fail(self, id: str, error: HypicError) -> Emission:
        answer = self._answers.pop(id)
        if isinstance(error, NonFiniteOutput):
            self.scheduler.discard(answer.request)
        else:
            self.scheduler.remove(answer.request)
        return Emission(id, error, is_last=True)

    def _out_of_memory(self, work: Work) -> list[Emission]:
        """Shrink the store, halve the steps for a while and start again; a request that this counts against for the
        fourth time fails."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # it may be at the step still, whose buffer is filled anew for the next one
            torch.cuda.empty_cache()
        self.store.clear()
        self._ahead = None
        hurt = self.scheduler.abandon(work)
        failed = [request for request in hurt if request.num_failures > 3]
        error = WorkerLost(shortage(self.runner.pool.device, self.runner.pool.num_bytes))
        return [self._fail(request.id, error) for request in failed]


def _nothing(read_back: ReadBack) -> None:
    """There is nothing to do while the device works."""


def _not_finite() -> NonFiniteOutput:
    return NonFiniteOutput(
        "the model produced NaN or infinity for this request; check the checkpoint or pass dtype='float32'."
    )

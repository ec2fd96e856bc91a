"""The one thread that drives an engine: requests and aborts come by queue, pieces of answers leave by queue.

Any number of threads and event loops may submit. A stream that is broken off aborts its request; closing ends all.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from hypic.engine.engine import Engine
from hypic.engine.read_back import ReadBack
from hypic.engine.task import Emission, Task
from hypic.errors import HypicError, RequestAborted, WorkerLost
from hypic_kernels.compiling import Compiled

logger = logging.getLogger("hypic")
Sink = Callable[[Emission], None]
T = TypeVar("T")


@dataclass(frozen=True)
class _Submit:
    task: Task
    sink: Sink


@dataclass(frozen=True)
class _Abort:
    id: str


@dataclass(frozen=True)
class _Call:
    """Something to run between two steps, on the engine's own thread; ``reply`` is for who waits for its result."""

    run: Callable[[Engine], object]
    reply: queue.SimpleQueue[object] | None = None

    def answer(self, outcome: object) -> None:
        if self.reply is not None:
            self.reply.put(outcome)
        elif isinstance(outcome, Exception):
            logger.error("what an engine was to do between two steps failed", exc_info=outcome)


class EngineLoop:
    """Owns an engine and its thread.

    Raises:
        WorkerLost: used after a fork, or after the thread died.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._inbox: queue.SimpleQueue[_Submit | _Abort | _Call | None] = queue.SimpleQueue()
        self._put_off: deque[_Abort | _Call | None] = deque()
        self._sinks: dict[str, Sink] = {}
        engine.meanwhile = self._take_in
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._death: BaseException | None = None
        self._since_s: float | None = None
        self.compiled: Compiled | None = None
        self._thread = threading.Thread(target=self._run, name="hypic-engine", daemon=True)
        self._is_prepared = threading.Event()
        self._thread.start()
        self._is_prepared.wait()

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "a closed loop has no engine"
        return self._engine

    @property
    def busy_s(self) -> float:
        """For how long the thread has been at one step or one message; 0 while it waits for either. From any thread."""
        since_s = self._since_s
        return 0.0 if since_s is None else max(time.monotonic() - since_s, 1e-6)

    @property
    def is_over(self) -> bool:
        """Whether it was closed or its thread died."""
        return self._closed or self._death is not None

    def submit(self, task: Task, sink: Sink) -> None:
        """Queue a request; ``sink`` is called on the engine's thread and must not block."""
        self._send(_Submit(task, sink))

    def abort(self, id: str) -> None:
        """Drop a request; its sink is not called any more."""
        if not self._closed and os.getpid() == self._pid:
            self._inbox.put(_Abort(id))

    def call(self, run: Callable[[Engine], T]) -> T:
        """Run something on the engine between two steps and wait for its result."""
        reply: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._send(_Call(run, reply))
        result = reply.get()
        if isinstance(result, BaseException):
            raise result
        return result  # type: ignore[return-value]

    def post(self, run: Callable[[Engine], object]) -> None:
        """Run something on the engine between two steps, and wait for nothing; nowhere if the engine is closed."""
        with suppress(HypicError):
            self._send(_Call(run))

    def close(self) -> None:
        """Abort everything and end the thread; more calls do nothing."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.engine.close()
        self._engine = None  # weights and pool go with it

    def check_process(self) -> None:
        """Raises ``WorkerLost`` in a forked child, where the engine's thread does not exist."""
        if os.getpid() != self._pid:
            raise WorkerLost("an engine does not survive a fork; spawn the process, or make the LLM in it alone.")

    def _send(self, message: _Submit | _Call) -> None:
        self.check_process()
        with self._lock:
            if self._closed:
                raise RequestAborted("the engine is closed; make a new LLM.")
            if self._death is not None:
                raise WorkerLost(f"the engine's thread died ({self._death!r}); make a new LLM.") from self._death
            self._inbox.put(message)

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            self.compiled = _watched(self.engine)
            while self._receive():
                self._since_s = time.monotonic()
                for emission in self.engine.step():
                    self._deliver(emission)
            self._end(RequestAborted("the engine was closed before this request was answered."))
        except BaseException as error:
            with self._lock:
                self._death = error
            self._end(WorkerLost(f"the engine's thread died ({error!r}); make a new LLM."))
            raise
        finally:
            if self.compiled is not None:
                self.compiled.end()

    def _prepare(self) -> None:
        try:
            self.engine.runner.prepare_thread(self.engine.scheduler.limit.most)
        finally:
            self._is_prepared.set()

    def _receive(self) -> bool:
        """Take in what has come, waiting if there is nothing to do; false when closed."""
        message = self._next(wait=self._is_idle() or self.engine.is_stalled)
        while message is not False or not self.engine.has_work:
            if message is None:
                return False
            if not isinstance(message, bool):
                self._handle(message)
            message = self._next(wait=self._is_idle())
        return True

    def _is_idle(self) -> bool:
        """Whether there is nothing to do but wait; what the engine puts off until then is done first."""
        while not self.engine.has_work and self._inbox.empty() and not self._put_off:
            self._since_s = time.monotonic()
            if not self.engine.tend():
                return True
        return not self.engine.has_work

    def _next(self, wait: bool) -> _Submit | _Abort | _Call | None | bool:
        """The next message; ``False`` if there is none, or none until an entry's time is over."""
        if self._put_off:
            return self._put_off.popleft()
        timeout_s = self.engine.expire() if wait else None
        self._since_s = None if wait else self._since_s
        try:
            return self._inbox.get(block=wait, timeout=timeout_s)
        except queue.Empty:
            return False
        finally:
            self._since_s = time.monotonic()

    def _take_in(self, read_back: ReadBack) -> None:
        """Requests that come while the device is at a step are planned then. What is no request waits for the step's
        end, since it may change what the step uses, and so does all that came after it."""
        while not read_back.has_come and not self._put_off:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, _Submit):
                self._begin(message)
            else:
                self._put_off.append(message)

    def _handle(self, message: _Submit | _Abort | _Call) -> None:
        if isinstance(message, _Abort):
            self._sinks.pop(message.id, None)
            self.engine.abort(message.id)
        elif isinstance(message, _Call):
            message.answer(_outcome(message.run, self.engine))
        else:
            self._begin(message)

    def _begin(self, message: _Submit) -> None:
        if not message.task.is_head:  # nobody waits for one, and it may never be begun
            self._sinks[message.task.id] = message.sink
        try:
            self.engine.add(message.task)
        except HypicError as error:
            self._deliver(Emission(message.task.id, error, is_last=True))
        except Exception as error:  # one bad request must not end all others
            logger.exception("a request could not be prepared")
            reason = HypicError(f"the request could not be prepared ({error!r}); check its arguments.")
            self._deliver(Emission(message.task.id, reason, is_last=True))

    def _deliver(self, emission: Emission) -> None:
        sink = self._sinks.pop(emission.id, None) if emission.is_last else self._sinks.get(emission.id)
        if sink is not None:
            sink(emission)

    def _end(self, error: HypicError) -> None:
        """Tell everyone who still waits, and only then touch the engine, which may be broken."""
        ids = list(self._sinks)
        for id in ids:
            self._deliver(Emission(id, error, is_last=True))
        while (message := self._next(wait=False)) is not False:
            if isinstance(message, _Submit):
                message.sink(Emission(message.task.id, error, is_last=True))
            elif isinstance(message, _Call) and message.reply is not None:
                message.reply.put(error)
        for id in ids:
            self.engine.abort(id)


def _watched(engine: Engine) -> Compiled | None:
    """What is compiled from now on, on this thread: nothing, if all was used before the engine was ready."""
    runner = engine.runner
    if runner.geometry is None or runner.pool.device.type != "cuda":
        return None
    compiled = Compiled()
    compiled.watch()
    return compiled


def _outcome(run: Callable[[Engine], object], engine: Engine) -> object:
    try:
        engine.rest()
        return run(engine)
    except Exception as error:  # the caller waits for the reply and gets it raised
        return error

"""Blocks of items, answered here or by several processes, each with a replica of the model.

A small model leaves a GPU idle while the host plans, so that processes share it. Who answers a block changes nothing
in it, and whoever is idle takes the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from hypic.config import EngineConfig
from hypic.engine.shares import own_share
from hypic.errors import WorkerLost
from hypic_apps.eval.driver import Subject
from hypic_apps.eval.measure import Plan, Unit, perform
from hypic_apps.eval.records import Measured

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """What is said of a model, and what decides how many items run together."""

    name: str
    num_parameters: int
    fingerprint: str
    device: str
    vocab_size: int

    @classmethod
    def of(cls, subject: Subject) -> About:
        runner = subject.runner
        device, identity = runner.pool.device.type, runner.identity
        return cls(subject.name, subject.num_parameters, identity.fingerprint, device, subject.tokenizer.vocab_size)


class Answering(Protocol):
    """Who answers blocks: one process or several."""

    @property
    def about(self) -> About: ...
    def perform(self, units: Sequence[tuple[Unit, Plan]]) -> Iterator[tuple[int, Measured]]:
        """Marks by the unit's number, as they come."""

    def perform_alone(self, unit: Unit, plan: Plan) -> Measured:
        """One unit while nothing else runs."""


@dataclass(frozen=True)
class Here:
    """This process."""

    subject: Subject

    @property
    def about(self) -> About:
        return About.of(self.subject)

    def perform(self, units: Sequence[tuple[Unit, Plan]]) -> Iterator[tuple[int, Measured]]:
        for number, (unit, plan) in enumerate(units):
            yield number, perform(self.subject, unit, plan)

    def perform_alone(self, unit: Unit, plan: Plan) -> Measured:
        return perform(self.subject, unit, plan)


@dataclass(frozen=True)
class Several:
    """Processes of a pool.

    Raises:
        WorkerLost: one of them ended.
    """

    pool: ProcessPoolExecutor
    model: str | None
    config: EngineConfig
    num_processes: int

    @cached_property
    def about(self) -> About:
        """Asked of every process, so that all start at once."""
        asked = [self.pool.submit(_about, self.model, self.config) for _ in range(self.num_processes)]
        return _result(asked[0])

    def perform(self, units: Sequence[tuple[Unit, Plan]]) -> Iterator[tuple[int, Measured]]:
        numbers = {self._submit(unit, plan): number for number, (unit, plan) in enumerate(units)}
        for done in as_completed(numbers):
            yield numbers[done], _result(done)

    def perform_alone(self, unit: Unit, plan: Plan) -> Measured:
        return _result(self._submit(unit, plan))

    def _submit(self, unit: Unit, plan: Plan) -> Future[Measured]:
        return self.pool.submit(_perform, self.model, self.config, unit, plan)


@contextmanager
def answering(model: str | None, config: EngineConfig, num_processes: int) -> Iterator[Answering]:
    """One process, this one, or several, that end with the context.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: as ``hypic.LLM``.
    """
    if num_processes == 1:
        yield Here(Subject(model, config))
        return
    spawn = get_context("spawn")
    numbers: Queue[int] = spawn.Queue()
    for number in range(num_processes):
        numbers.put(number)
    shared = replace(own_share(replace(config, workers=num_processes)), workers=1)
    pool = ProcessPoolExecutor(num_processes, spawn, _settle, (numbers, config.device))
    try:
        yield Several(pool, model, shared, num_processes)
    finally:
        pool.shutdown(cancel_futures=True)


def _settle(numbers: Any, device: str) -> None:
    """In a new process: GPUs by turns. Tasks run on this thread, so that all they do is on its GPU. On a CPU nothing:
    there the settings name each process's threads."""
    Thread(target=_end_with_parent, daemon=True).start()
    number, count = numbers.get(), 0 if device == "cpu" else torch.cuda.device_count()
    if count:
        torch.cuda.set_device(number % count)
        torch.set_num_threads(1)  # the host's part of a step is small, and there are many hosts


def _end_with_parent() -> None:
    """However the process that began this one ends, this one does not stay behind with its memory."""
    parent = parent_process()
    assert parent is not None, "a process of the pool has a parent"
    wait([parent.sentinel])
    os._exit(1)


@cache
def _subject(model: str | None, config: EngineConfig) -> Subject:
    """The replica of this process."""
    return Subject(model, config)


def _about(model: str | None, config: EngineConfig) -> About:
    return About.of(_subject(model, config))


def _perform(model: str | None, config: EngineConfig, unit: Unit, plan: Plan) -> Measured:
    return perform(_subject(model, config), unit, plan)


def _result(done: Future[T]) -> T:
    try:
        return done.result()
    except BrokenProcessPool as error:
        raise WorkerLost("a process of --processes ended; its stderr says why. Try fewer, or less memory=.") from error

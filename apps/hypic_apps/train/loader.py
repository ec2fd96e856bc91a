"""Feeds one device: worker processes make batches of rows, the training process takes them in order of arrival.

The stage is a shared number, so that a change of stage reaches all workers; batches of an older stage still under way
are dropped by the reader.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hypic_apps.train import schema
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.render import Encoder
from hypic_apps.train.rows import STAGES, Rows, Stage
from hypic_apps.train.segments import Segmenting


@dataclass(frozen=True)
class Sources:
    """Where a worker finds what it needs, and the batch size in tokens; with ``segmenting`` batches say where their
    segments lie."""

    corpus: Path
    tokenizer: Path
    batch_tokens: int
    stages: Sequence[Stage] = STAGES
    segmenting: Segmenting | None = None

    def rows(self) -> Rows:
        """The row maker of these sources."""
        return Rows(Corpus.load(self.corpus), schema.load(), Encoder(Tokenizer.from_file(str(self.tokenizer))))


class Loader:
    """Batches ``ids, weights [B, T]`` of the current stage, and ``marks [B, T]`` (``segments``) if the sources tell
    segments. Close it when done."""

    def __init__(self, sources: Sources, num_workers: int, seed: int, stage: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self.stage = context.Value("i", stage)
        self._ready: Any = context.Queue(maxsize=2 * num_workers)
        self._workers = [
            context.Process(target=_work, args=(sources, seed + 7919 * i, self.stage, self._ready), daemon=True)
            for i in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def next(self, timeout_s: float = 120.0) -> tuple[Tensor, ...]:
        """The next batch of the current stage.

        Raises:
            RuntimeError: no worker delivered a batch in time.
        """
        while True:
            try:
                stage, ids, *others = self._ready.get(timeout=timeout_s)
            except queue.Empty as late:
                raise RuntimeError(f"no batch within {timeout_s:.0f} s; look for an error of a worker above.") from late
            if stage == self.stage.value:
                return torch.from_numpy(ids.astype(np.int64)), *map(torch.from_numpy, others)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.terminate()
        self._ready.cancel_join_thread()


def batch(
    rows: Rows, stage: Stage, num_rows: int, seed: int, segmenting: Segmenting | None = None
) -> tuple[np.ndarray, ...]:
    """``ids [B, T]`` as 16-bit numbers and ``weights [B, T]``; with ``segmenting`` also ``marks [B, T]``."""
    stream = rows.stream(stage, seed)
    made = [next(stream) for _ in range(num_rows)]
    marks = () if segmenting is None else (segmenting.drawn(made, seed),)
    return np.stack([row.ids for row in made]).astype(np.uint16), np.stack([row.weights for row in made]), *marks


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a started process"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(sources: Sources, seed: int, stage: Any, ready: Any) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    rows = sources.rows()
    while True:
        number = stage.value
        chosen = sources.stages[number]
        seed += 104_729
        num_rows = sources.batch_tokens // chosen.num_tokens
        ready.put((number, *batch(rows, chosen, num_rows, seed, sources.segmenting)))

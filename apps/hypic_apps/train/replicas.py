"""Data-parallel training on the GPUs of one host: one process a GPU, *ranks* in the words of ``torch.distributed``.

Every rank holds the whole model and trains on batches of its own; gradients are averaged before each step, so that
weights stay the same on all. Ranks meet in a file of a private folder, and tell each other there what is no tensor.
The first process only starts the others and watches them: a rank that fails ends the command.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hypic_apps.train.loader import end_with_parent

# Much of it has no types of its own.
dist: Any = torch.distributed
# Rank 0 grades while the others wait: no longer than this, or torch takes it for dead.
LONGEST_COLLECTIVE = timedelta(minutes=10)
# What rank 0 does after the last step: export, and the last exams.
LONGEST_MEETING = timedelta(hours=1)


@dataclass
class Replica:
    """This process's place among ``number`` ranks; alone, every method returns what it was given."""

    rank: int = 0
    number: int = 1
    device: torch.device | None = None
    store: Any = None
    _turn: int = 0

    def averaged(self, loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """The mean loss ``[]`` of all ranks; ``gradients`` become their means in place, on the current stream."""
        if self.number == 1:
            return loss
        flat = torch.cat([*(g.flatten() for g in gradients), loss.flatten()])
        if flat.is_cuda:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        else:
            dist.all_reduce(flat)  # Gloo has no mean
            flat /= self.number
        *means, mean_loss = torch.split(flat, [*(g.numel() for g in gradients), 1])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        return mean_loss.reshape(loss.shape)

    def told(self, own: Any) -> Any:
        """What rank 0 gave, of what JSON can hold; every rank calls this, and none returns before rank 0 has called."""
        if self.number == 1:
            return own
        self._turn += 1
        if self.rank == 0:
            self.store.set(f"{self._turn}/0", json.dumps(own))
            return own
        return self._given(0)

    def meet(self, own: Any = None) -> list[Any]:
        """What each rank gave, by rank; none returns before all have called."""
        if self.number == 1:
            return [own]
        self._turn += 1
        self.store.set(f"{self._turn}/{self.rank}", json.dumps(own))
        return [self._given(rank) for rank in range(self.number)]

    def agrees(self, tensors: Iterable[Tensor]) -> bool:
        """Whether ``tensors`` are the same on all ranks, bit for bit."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return len(set(self.meet(digest.hexdigest()))) == 1

    def _given(self, rank: int) -> Any:
        return json.loads(self.store.get(f"{self._turn}/{rank}"))


ALONE = Replica()


def check_gpus(number: int) -> None:
    """
    Raises:
        ValueError: more GPUs are asked for than there are.
    """
    found = torch.cuda.device_count()
    if number > max(1, found):
        raise ValueError(f"--gpus {number} asks for more GPUs than the {found} there are; name fewer, or leave it out.")


def launch(number: int, kind: str, work: Callable[..., None], *arguments: Any) -> None:
    """Runs ``work(replica, *arguments)`` in ``number`` processes, on as many GPUs for ``kind`` ``cuda``, or all on the
    ``cpu``; ``work`` is a function of a module, and what it is given can be pickled.

    Raises:
        SystemExit: a rank refused what it was given, failed or was killed; by then the others are ended too.
    """
    folder = Path(tempfile.mkdtemp(prefix="hypic-"))
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, number, kind, folder, work, arguments)) for rank in range(number)
    ]
    try:
        for process in ranks:
            process.start()
        _watch({process.sentinel: (rank, process) for rank, process in enumerate(ranks)}, folder)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()  # a rank that waits for a dead one hears nothing else; its workers end with it
                process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _watch(running: dict[int, tuple[int, Any]], folder: Path) -> None:
    """Until all ranks are done, or one is not.

    Raises:
        SystemExit: it failed, with its own sentence if it left one.
    """
    while running:
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int), "sentinels were given"
            rank, process = running.pop(sentinel)
            process.join()
            if not process.exitcode:
                continue
            said = folder / f"{rank}.txt"
            if said.is_file():
                raise SystemExit(said.read_text(encoding="utf-8"))
            raise SystemExit(f"the process of rank {rank} was ended (exit code {process.exitcode}); training stopped.")


def _rank(
    rank: int, number: int, kind: str, folder: Path, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    end_with_parent()
    sentence = ""
    try:
        work(_joined(rank, number, kind, folder), *arguments)
    except SystemExit as refused:
        sentence = str(refused.code)
    except BaseException as error:
        traceback.print_exc()
        sentence = f"rank {rank} failed, and training with it: {type(error).__name__}: {str(error)[:300]}"
    if sentence:
        (folder / f"{rank}.txt").write_text(sentence, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: taking a communicator down that a captured graph refers to, or whose other ranks are gone, can hang.
    os._exit(1 if sentence else 0)


def _joined(rank: int, number: int, kind: str, folder: Path) -> Replica:
    """This rank's place, once it has met the others."""
    store = dist.FileStore(str(folder / "meeting"), number)
    place: dict[str, Any] = {"store": store, "rank": rank, "world_size": number, "timeout": LONGEST_COLLECTIVE}
    if kind == "cpu":
        device = torch.device("cpu")
        dist.init_process_group("gloo", **place)
    else:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        # A graph's buffers are freed with it, at every stage: they are not to be registered with the other GPUs.
        os.environ["NCCL_GRAPH_REGISTER"] = "0"
        dist.init_process_group("nccl", device_id=device, **place)
    store.set_timeout(LONGEST_MEETING)
    return Replica(rank, number, device, store)

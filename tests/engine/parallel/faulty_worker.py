"""A worker that misbehaves once, as a file in its folder of faults asks: ``<rank>`` holds the name of the fault.

The file is taken away when the fault strikes, so that the worker's next generation is sound.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hypic.engine import calibrate, lending, parcel, worker
from hypic.engine.engine import Engine
from hypic.engine.parallel import gate, listener, sending, wire
from hypic.engine.parallel.messages import Beat, Parcel, Ready
from hypic.engine.parallel.packing import digest

Run = Callable[..., Any]
# What each step of a slow worker takes longer.
SLOW_S = 1.5


class Faults:
    """The fault that is asked for, if any."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = folder / str(rank)

    def holds(self, name: str) -> bool:
        """Whether a fault is asked for that stays until it is asked for no more."""
        try:
            return self.file.read_text() == name
        except OSError:
            return False

    def strikes(self, *names: str) -> str:
        """The name of the fault if it is one of these and asked for now; it is asked for once."""
        asked = self.file.read_text() if self.file.exists() else ""
        if asked not in names:
            return ""
        self.file.unlink()
        return asked


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def main(told: Mapping[str, Any]) -> None:
    faults = Faults(Path(told["settings"]["seed_folder"]), told["rank"])
    settings = {key: value for key, value in told["settings"].items() if key != "seed_folder"}
    _inject(faults)
    worker.main({**told, "settings": settings})


def _inject(faults: Faults) -> None:
    _wrap(worker, "calibrate", lambda: faults.strikes("kill-start") and die())
    _wrap(lending.Lending, "want", lambda: faults.strikes("kill-want") and die())
    _wrap(lending.Lending, "_encoded", lambda: faults.strikes("kill-encoded") and die())
    _wrap(Engine, "step", lambda: faults.strikes("kill-step") and die())
    _wrap(Engine, "settle", lambda: faults.strikes("kill-settle") and die())
    _wrap(listener._Session, "_greeted", lambda: faults.strikes("kill-greet") and die())
    _wrap(Engine, "step", lambda: faults.strikes("hang-step") and time.sleep(1000))
    _wrap(Engine, "step", lambda: time.sleep(SLOW_S) if faults.holds("slow") else None)
    _wrap(lending.Lending, "want", lambda: faults.strikes("stop") and os.kill(os.getpid(), signal.SIGSTOP))
    _wrap(listener._Session, "_send_held", lambda: faults.strikes("kill-called") and die())
    _waits(faults)
    _replies(faults)
    _sends(faults)
    _bytes(faults)
    if faults.strikes("other-weights"):
        _spoil_weights()


def _wrap(owner: Any, name: str, before: Callable[[], object]) -> None:
    sound = getattr(owner, name)

    def faulty(*args: Any, **options: Any) -> Any:
        before()
        return sound(*args, **options)

    setattr(owner, name, faulty)


def _waits(faults: Faults) -> None:
    """What should wait for room is sent at once; word of it is lost, or the last thing that is said."""
    holds, send_one = gate.Gate.holds, sending.Sending._send_one

    def faulty(self: Any, nonce: int, answer: Any) -> bool:
        if nonce in self._shut and faults.strikes("greedy"):
            self._shut.discard(nonce)
        return holds(self, nonce, answer)

    def faulty_send(self: Any, answer: sending.Answer) -> None:
        asked = faults.strikes("ready-lost", "kill-ready") if isinstance(answer.message, Ready) else ""
        if asked != "ready-lost":
            send_one(self, answer)
        if asked == "kill-ready":
            die()

    gate.Gate.holds = faulty  # type: ignore[method-assign]
    sending.Sending._send_one = faulty_send  # type: ignore[method-assign]


def _replies(faults: Faults) -> None:
    """Answers that are lost, late, refused or of another kind."""
    sound = sending.Sending._send_parcel

    def faulty(self: Any, message: Parcel, data: torch.Tensor) -> None:
        asked = faults.strikes("lost", "nan", "short", "generation", "key", "huge", "garbage", "kill-send", "kill-sent")
        if not asked:
            return sound(self, message, data)
        last = message.entries[-1]
        if asked == "lost":
            return None
        if asked == "nan":
            words = data.view(torch.float64)
            words[: len(words) // 2] = float("nan")
            message = replace(message, digest=int(digest(data)))
        if asked == "short":
            message, data = replace(message, num_bytes=len(data) // 2), data[: len(data) // 2]
            message = replace(message, digest=int(digest(data)))
        if asked == "generation":
            message = replace(message, entries=(replace(last, generation=last.generation + 1),))
        if asked == "key":
            message = replace(message, entries=(*message.entries[:-1], replace(last, key="00" * 32)))
        if asked == "huge":
            self.wire.send(replace(message, num_bytes=2**50))
            return None
        if asked == "garbage":
            self.wire._socket.sendall(b"\x10\0\0\0\0\0\0\0" + b"not a message!!!")
            return None
        if asked == "kill-send":
            self.wire.send(replace(message, digest=0))  # the bytes never come
            die()
        self.transport.send(self.wire, message, data)
        if asked == "kill-sent":
            die()
        return None

    sending.Sending._send_parcel = faulty  # type: ignore[method-assign]


def _bytes(faults: Faults) -> None:
    """A bit that flips on the way: after the digest was computed."""
    sound = parcel.pack

    def faulty(*args: Any) -> Any:
        content, data, total = sound(*args)
        if faults.strikes("flip"):
            data[len(data) // 3] ^= 4
        return content, data, total

    lending.pack = faulty


def _sends(faults: Faults) -> None:
    """A worker that works but whose heartbeats are lost."""
    sound = wire.Wire.send

    def faulty(self: wire.Wire, message: Any, data: Any = None) -> None:
        if isinstance(message, Beat) and faults.strikes("silent"):
            threading.Event().wait()
        sound(self, message, data)

    wire.Wire.send = faulty  # type: ignore[method-assign]


def _spoil_weights() -> None:
    """This worker computes something else, with all checksums right."""
    sound = worker.calibrate

    def faulty(runner: Any, max_step_tokens: int) -> Any:
        with torch.no_grad():
            for parameter in list(runner.model.parameters())[:4]:
                parameter.mul_(1.5)
        return sound(runner, max_step_tokens)

    worker.calibrate = faulty


__all__ = ["calibrate", "main"]

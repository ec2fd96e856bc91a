"""Processes: none is left whatever ends the front, none is listened to but the one that was started last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypic.config import EngineConfig
from hypic.engine import shares, workers
from hypic.engine.parallel import wire
from hypic.engine.parallel.cost import EncodeCost, Pace
from hypic.engine.parallel.liveness import Times
from hypic.engine.parallel.messages import Beat, Hello
from hypic.engine.parallel.supervisor import Supervisor
from hypic.engine.router import Router
from hypic.errors import ConfigError, WorkerLost
from tests.checkpoints import qwen
from tests.engine.parallel.running import ENCODING, config, is_running, running, until

COST = {"step_s": 0.01, "token_s": 1e-5, "pair_s": 0.0, "scale": 1.0, "spread": 0.0, "batch_tokens": 4096}
COST["floor_s"] = 0.0
FRONT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in a shell's background ignore
sys.path[:] = {path!r}
from pathlib import Path
from tests.engine.parallel.running import running
with running(Path({folder!r}), 2) as engine:
    print(engine.workers.supervisor.hellos[0].pid, flush=True)
    time.sleep(600)
"""


def front_of(tmp_path: Path, script: str) -> tuple[subprocess.Popen[bytes], int, Path]:
    """A program with a worker, the worker's process, and the only folder for temporary files that both know."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = script.format(path=sys.path, folder=str(qwen(tmp_path / "model")))
    front = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    assert front.stdout is not None
    return front, int(front.stdout.readline()), temporary


FAILING = """
import sys
sys.path[:] = {path!r}
from pathlib import Path
from hypic.engine import starting
from tests.engine.parallel.running import ENCODING, VOCABULARY, config
started = starting.start(Path({folder!r}), config(2), VOCABULARY, ENCODING)
print(started.workers.supervisor.hellos[0].pid, flush=True)
started.workers.wait_usable(60)
raise KeyError("a mistake")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_the_front(tmp_path: Path, how: signal.Signals) -> None:
    """The program is no module and has no guard around its main part: workers do not run it again."""
    front, pid, temporary = front_of(tmp_path, FRONT)
    assert is_running(pid)
    os.kill(front.pid, how)
    front.wait(30)
    until(lambda: not is_running(pid), 30)
    assert list(temporary.iterdir()) == []


def test_a_stopped_worker_ends_with_the_front(tmp_path: Path) -> None:
    """It cannot see that its parent is gone."""
    front, pid, _ = front_of(tmp_path, FRONT)
    os.kill(pid, signal.SIGSTOP)
    front.kill()
    front.wait(30)
    until(lambda: not is_running(pid), 10)


def test_workers_end_with_a_program_that_fails(tmp_path: Path) -> None:
    """Nothing closes anything: the main thread raises, others run on."""
    front, pid, temporary = front_of(tmp_path, FAILING)
    assert front.wait(60) == 1
    until(lambda: not is_running(pid), 10)
    assert list(temporary.iterdir()) == []


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    setup = replace(ENCODING, times=Times(pause_s=0.05, failures=1), entry="tests.engine.parallel.broken_worker")
    with pytest.raises(WorkerLost, match="worker 1 cannot start: no weights today"), running(folder, 2, setup):
        pass


class Silent:
    """A process that does nothing, and events that nobody hears."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.told, self.is_killed = told, False
        self.events: list[str] = []

    @property
    def is_alive(self) -> bool:
        return not self.is_killed

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, timeout_s: float) -> bool:
        return self.is_killed


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def came(self, hello: Hello) -> None:
        self.said.append(("came", hello.generation))

    def heard(self, hello: Hello, message: Any) -> None:
        self.said.append(("heard", hello.generation))

    def left(self, rank: int, generation: int, reason: str) -> None:
        self.said.append(("left", generation))


def test_an_older_generation_is_not_listened_to() -> None:
    started: list[Silent] = []

    def launch(told: Mapping[str, Any]) -> Silent:
        started.append(Silent(told))
        return started[-1]

    heard = Heard()
    supervisor = Supervisor({1: {}}, heard, Times(pause_s=0.01, stop_s=0.1, silence_s=60), launch)
    try:
        until(lambda: started)
        first = _call(supervisor, 1)
        until(lambda: ("came", 1) in heard.said)
        first.send(Beat(1, 1, 1, 0.0))
        until(lambda: ("heard", 1) in heard.said)
        supervisor.lose(1, 1, "it is to start again")
        until(lambda: len(started) == 2)
        assert started[0].is_killed and ("left", 1) in heard.said
        with pytest.raises(WorkerLost):
            _call(supervisor, 1).receive()  # a straggler of the first generation
        second = _call(supervisor, 2)
        until(lambda: ("came", 2) in heard.said)
        with pytest.raises(WorkerLost):
            _call(supervisor, 2).receive()  # a second one that claims the same place
        second.send(Beat(1, 1, 9, 0.0))  # a worker that speaks for another generation is lost
        until(lambda: ("left", 2) in heard.said)
        assert heard.said.count(("came", 1)) == 1 and heard.said.count(("came", 2)) == 1
        assert not supervisor.send(1, 1, Beat(1, 1, 1, 0.0))
    finally:
        supervisor.close()
    assert all(process.is_killed for process in started)


def _call(supervisor: Supervisor, generation: int) -> wire.Wire:
    found = wire.connect("127.0.0.1", supervisor._socket.getsockname()[1], supervisor.secret)
    found.send(Hello(1, generation, 1, "127.0.0.1", 1, "cpu", "f", COST))
    return found


def test_a_worker_may_leave_while_this_process_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the steps of joining everybody may have to hear who is there."""
    told: list[int] = []

    def router(loop: Any, identity: Any, owner: workers.Workers) -> Router:
        owner.left(1, 1, "its process ended")
        told.append(owner._own.port)
        return Router(loop, identity, owner)

    folder = qwen(tmp_path / "model")
    monkeypatch.setattr(workers, "Router", router)
    with running(folder, 1) as alone:
        found = workers.Workers(folder, config(2), replace(ENCODING, launch=Silent, times=Times(stop_s=0.1)))
        try:
            canary = workers.Canary(None, None)  # type: ignore[arg-type]
            alone.started.loop.call(partial(found._joined, alone.started.loop, Pace(EncodeCost(**COST)), canary))
            assert told == [found._listener.port]
        finally:
            found.close()


def test_what_each_worker_gets_of_a_machine() -> None:
    four = EngineConfig.of(device="cpu", workers=4, memory=0.5)
    own = shares.own_share(four)
    assert own.memory == 0.125 and own.threads == max(1, (os.cpu_count() or 1) // 4)
    assert shares.own_share(config(1)) == config(1)
    settings = shares.settings_of(2, four)
    assert settings["workers"] == 1 and settings["device"] == "cpu" and shares.environment_of(2, four) == {}
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="workers"):
            EngineConfig.of(workers=wrong)


def test_a_step_is_larger_on_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(total_bytes: int) -> Any:
        return lambda device: SimpleNamespace(total_memory=total_bytes)

    assert shares.step_tokens(EngineConfig(), torch.device("cpu")) == 8192
    for total_bytes, expected in ((24 * 2**30, 8192), (80 * 2**30, 16_384)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", of(total_bytes))
        assert shares.step_tokens(EngineConfig(), torch.device("cuda")) == expected
        assert shares.step_tokens(EngineConfig(max_step_tokens=100), torch.device("cuda")) == 100

"""Servers to test against: the real command in a process of its own, or an application in a thread of this one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

ROOT = Path(__file__).parents[3]
SMALL = ("--threads", "1", "--memory", "64MiB")
START_S = 60


@dataclass
class Process:
    """A running ``hypic serve``; ``url`` ends with ``/v1``."""

    process: subprocess.Popen[str]
    url: str

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def stop(self, sign: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what is left on stderr."""
        self.process.send_signal(sign)
        _, err = self.process.communicate(timeout=START_S)
        return self.process.returncode, err


@contextmanager
def serve(*arguments: str) -> Iterator[Process]:
    """``hypic serve`` on a free port of the loopback."""
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "retriever", "apps"))
    process = subprocess.Popen(
        [sys.executable, "-m", "hypic_apps.cli.main", "serve", "--port", "0", *SMALL, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Process(process, _listening(process))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _listening(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        found = re.search(r"listening on (http://\S+)", line)
        if found:
            return found[1]
    raise AssertionError(f"the server ended with {process.wait()}: {''.join(seen)}")


@contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """An application on a free port of the loopback, served by a thread of this process; yields its root."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=30)


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.01)

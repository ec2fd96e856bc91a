"""Starting and ending the processes of workers on this host. A worker is told what to do by one line of JSON.

Workers are fresh interpreters, not copies or re-imports of the program that uses this package: that program needs no
``if __name__ == "__main__"``, and nothing is pickled. The line comes by standard input, since a process's arguments and
environment can be read by others and it holds a secret.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hypic.errors import WorkerLost

_START = (
    "import json, os, sys; spec = json.loads(sys.stdin.readline()); sys.path[:] = spec['path']; "
    "os.environ.update(spec['environment']); "
    "from importlib import import_module; import_module(spec['entry']).main(spec)"
)


# Linux: the signal that a process gets when the thread that started it ends (``prctl``'s PR_SET_PDEATHSIG).
_SIGNAL_OF_PARENTS_END = 1


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, even while it is stopped and cannot see that for itself.

    Only Linux has it; elsewhere nothing happens. The parent's thread that started this process must live as long.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without it
            ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_END, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)  # it ended before this was said


class Process(Protocol):
    """A worker's process, wherever it is."""

    @property
    def is_alive(self) -> bool: ...

    def kill(self) -> None:
        """End it now, whatever it does; more calls do nothing."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, waiting for it that long."""


class LocalProcess:
    """An interpreter on this host; ``command`` is what starts it, if that is not this process itself.

    Raises:
        WorkerLost: it cannot be started.
    """

    def __init__(self, spec: Mapping[str, Any], command: Sequence[str] = ()) -> None:
        line = json.dumps({"environment": {}, **spec, "path": sys.path}) + "\n"
        try:
            self._process = subprocess.Popen(
                [*command, sys.executable, "-c", _START], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            assert self._process.stdin is not None, "standard input is a pipe"
            self._process.stdin.write(line.encode())
            self._process.stdin.close()
        except OSError as error:
            raise WorkerLost(f"a worker's process cannot be started ({error}).") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        with suppress(OSError):  # it is gone already
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

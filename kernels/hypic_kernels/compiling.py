"""Kernels that Triton compiles, or loads for the first time, on one thread: what a request should never wait for.

An engine uses every kernel once before it is ready. What its thread meets for the first time afterwards was forgotten
there, and costs a request up to seconds. Other threads are left alone: another engine of the process may be starting.

Triton has place for one hook. All that watch share one of ours, which hands over to the hook that was there before, and
which goes with the last of them: engines that come and go leave nothing behind.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("hypic_kernels")


@dataclass(eq=False)
class Compiled:
    """Names of the kernels that the thread which made this has compiled since, each also logged as a fault."""

    names: list[str] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)
    _hook: _Hook | None = None

    def watch(self) -> None:
        """Be told of every kernel; imports Triton. Watching twice is watching once."""
        from triton import knobs

        with _lock():
            if self._hook is None:
                found = knobs.runtime.jit_post_compile_hook
                # Somebody else's hook that lies on ours may or may not call it: one more of ours is sure to be called.
                self._hook = found if isinstance(found, _Hook) else _Hook(found)
                self._hook.told = (*self._hook.told, self)
                knobs.runtime.jit_post_compile_hook = self._hook

    def end(self) -> None:
        """Hear no more; of several that watch, whichever ends first."""
        from triton import knobs

        with _lock():
            if self._hook is not None:
                self._hook.told = tuple(one for one in self._hook.told if one is not self)
                self._hook = None
            # Also those of ours that ended while somebody else's lay on them, which has gone since.
            while isinstance(top := knobs.runtime.jit_post_compile_hook, _Hook) and not top.told:
                knobs.runtime.jit_post_compile_hook = top.before

    def note(self, compiled: Mapping[str, Any]) -> None:
        """A kernel was compiled or found in its cache on disk, on whichever thread calls this."""
        if threading.get_ident() != self.thread:
            return
        self.names.append(str(compiled["fn"].name))
        logger.warning(
            "the kernel %s was compiled while a request waited for it; this is a fault of hypic, which should have "
            "used it before it was ready: %s",
            self.names[-1],
            _described(compiled),
        )


@dataclass(eq=False)
class _Hook:
    """What Triton calls: ``before`` is the hook that it had, ``told`` are those that watch."""

    before: Callable[..., object] | None
    told: tuple[Compiled, ...] = ()

    def __call__(self, **compiled: Any) -> None:
        if self.before is not None:
            self.before(**compiled)
        for one in self.told:
            one.note(compiled)


@functools.cache
def _lock() -> threading.Lock:
    """Engines start and end on threads of their own, and share Triton's one place."""
    return threading.Lock()


def _described(compiled: Mapping[str, Any]) -> str:
    """For what it was compiled: types and alignments of arguments, constants, options."""
    about = compiled.get("compile")
    return str(about.get("key", "") if isinstance(about, Mapping) else compiled.get("repr", ""))

"""Kernels that Triton compiles, or loads for the first time, on one thread: what a request should never wait for.

An engine uses every kernel once before it is ready. What its thread meets for the first time afterwards was forgotten
there, and costs a request up to seconds. Other threads are left alone: another engine of the process may be starting.
"""

from __future__ import annotations

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
    _before: Callable[..., object] | None = None

    def watch(self) -> None:
        """Be told of every kernel; imports Triton."""
        from triton import knobs

        self._before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, self.note

    def end(self) -> None:
        """Hear no more; of several that watch, whichever ends first."""
        from triton import knobs

        self.thread = -1
        # Another one that came later still calls this one, which goes on handing over.
        if knobs.runtime.jit_post_compile_hook == self.note:
            knobs.runtime.jit_post_compile_hook = self._before

    def note(self, **compiled: Any) -> None:
        """Triton's hook, called after a kernel was compiled or found in its cache on disk."""
        if self._before is not None:
            self._before(**compiled)
        if threading.get_ident() != self.thread:
            return
        self.names.append(str(compiled["fn"].name))
        logger.warning(
            "the kernel %s was compiled while a request waited for it; this is a fault of hypic, which should have "
            "used it before it was ready: %s",
            self.names[-1],
            _described(compiled),
        )


def _described(compiled: Mapping[str, Any]) -> str:
    """For what it was compiled: types and alignments of arguments, constants, options."""
    about = compiled.get("compile")
    return str(about.get("key", "") if isinstance(about, Mapping) else compiled.get("repr", ""))

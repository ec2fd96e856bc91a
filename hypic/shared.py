"""One engine per process and specification, reference counted: the one global that is allowed.

Frameworks make and copy their model objects freely; all that name the same model and settings share one ``LLM``, which
is started on first use and closed with its last user.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypic import checkpoints
from hypic.config import EngineConfig

if TYPE_CHECKING:
    from hypic.llm import LLM

_Spec = tuple[str | None, EngineConfig]


@dataclass
class _Shared:
    """Engines by specification, and how many use each."""

    # Reentrant: a finalizer may release while this very thread is acquiring.
    lock: threading.RLock = field(default_factory=threading.RLock)
    engines: dict[_Spec, LLM] = field(default_factory=dict)
    users: dict[_Spec, int] = field(default_factory=dict)


_SHARED = _Shared()


def acquire(model: str | None = None, **settings: Any) -> LLM:
    """The process's engine for this model and these settings, started if there is none; ``release`` it when done.

    Raises:
        ConfigError, UnsupportedModel, CheckpointError: as ``hypic.LLM`` does.
    """
    from hypic.llm import LLM

    model = None if checkpoints.is_bundled(model) else model  # one engine under both its names
    spec = (model, EngineConfig.of(**settings))  # settings as they are given may have no hash
    with _SHARED.lock:
        if spec not in _SHARED.engines:
            _SHARED.engines[spec] = LLM(model, **settings)
        _SHARED.users[spec] = _SHARED.users.get(spec, 0) + 1
        return _SHARED.engines[spec]


def release(llm: LLM) -> None:
    """One user less; the last one closes the engine. An engine that is not shared is left alone."""
    with _SHARED.lock:
        spec = next((spec for spec, shared in _SHARED.engines.items() if shared is llm), None)
        if spec is None:
            return
        _SHARED.users[spec] -= 1
        if _SHARED.users[spec] > 0:
            return
        del _SHARED.engines[spec], _SHARED.users[spec]
    llm.close()

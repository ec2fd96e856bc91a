"""The error tree: everything hypic raises on purpose.

    HypicError
    |-- ConfigError            a setting, a sampling value or an argument that cannot be right
    |-- PromptError            a prompt or message list that cannot be turned into tokens
    |   `-- PromptTooLong      more tokens than the model's context or the memory can hold
    |-- UnsupportedModel       a checkpoint we refuse, by name and with the reason
    |   `-- CheckpointError    a checkpoint whose files are missing, unreadable or mis-shaped
    |-- StoreError
    |   |-- StoreFull          a single request needs more than the whole budget
    |   `-- StoreCorrupt       an entry that fails its checks (handled as a miss)
    |-- WorkerLost             the engine's thread or a worker died
    |-- NonFiniteOutput        the model produced NaN or infinity for this request
    `-- RequestAborted         the request was cancelled by its owner or by ``close()``

Every message is one sentence that names the offending value and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class HypicError(Exception):
    """Root of all errors raised by hypic."""


class ConfigError(HypicError, ValueError):
    """A setting, sampling value or argument is invalid."""


class PromptError(HypicError, ValueError):
    """A prompt cannot be turned into tokens."""


class PromptTooLong(PromptError):
    """A prompt has more tokens than the context or the memory can hold."""


class UnsupportedModel(HypicError):
    """A checkpoint's architecture or a feature of it is not supported."""


class CheckpointError(UnsupportedModel):
    """A checkpoint is incomplete, unreadable or does not fit its configuration."""


class StoreError(HypicError):
    """Something about the segment store."""


class StoreFull(StoreError):
    """One request alone needs more than the whole budget."""


class StoreCorrupt(StoreError):
    """A stored entry failed its checks; callers treat it as a miss."""


class WorkerLost(HypicError):
    """The engine's thread or a worker process died."""


class NonFiniteOutput(HypicError):
    """The model produced NaN or infinity for this request."""


class RequestAborted(HypicError):
    """The request was cancelled."""


def unknown_hint(given: Iterable[object], known: Sequence[str], *further: str) -> str | None:
    """The sentence about the first hint that is neither known nor one of ``further``; ``None`` where all are.

    A hint that is passed over would change what a text is, or whose: a misspelt namespace gives it to everybody.
    """
    names = (*known, *further)
    wrong = next((name for name in given if name not in names), None)
    if wrong is None:
        return None
    return f"unknown hypic hint {wrong!r:.80}{meant(wrong, names)}; known are {', '.join(names)}."


def meant(given: object, known: Iterable[str]) -> str:
    """The known name that is most like the given one, in words behind it; nothing where none is like it."""
    near = get_close_matches(str(given), list(known), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""

"""What a store tells of itself: what it holds, and what it forgot. Frozen, plain, and free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from hypic.errors import ConfigError


@dataclass(frozen=True)
class Forgotten:
    """What ``LLM.forget`` removed: entries and snapshots, files of them on disk, writes that were still waiting, texts
    known in flat prompts, and passages of attached indexes."""

    num_entries: int = 0
    num_snapshots: int = 0
    num_files: int = 0
    num_queued: int = 0
    num_texts: int = 0
    num_passages: int = 0

    @property
    def num_cached(self) -> int:
        """Entries and snapshots together."""
        return self.num_entries + self.num_snapshots


def check_labels(source: object, name: object, namespace: object) -> None:
    """
    Raises:
        ConfigError: one of them is neither text nor ``None``.
    """
    for label, value in (("source", source), ("name", name), ("namespace", namespace)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{label} is {value!r}; labels are text, as they were passed with the segments.")


def check_meant(source: str | None, name: str | None, namespace: str | None, everything: bool) -> None:
    """Whether it is said what to forget, so that labels that were left out by mistake do not empty a cache.

    Raises:
        ConfigError: no label is given and not ``everything`` either, or both, or something that is no label.
    """
    check_labels(source, name, namespace)
    if not isinstance(everything, bool):
        raise ConfigError(f"everything is {everything!r}; pass everything=True to empty the cache.")
    is_labelled = not (source is name is namespace is None)
    if is_labelled and everything:
        raise ConfigError(
            f"forget got source={source!r}, name={name!r}, namespace={namespace!r} and everything=True; pass one or "
            "the other: labels for the texts that match all of them, everything=True to empty the cache."
        )
    if not is_labelled and not everything:
        raise ConfigError(
            "forget got no source=, name= or namespace=; name what to forget, or pass everything=True to empty the "
            "cache."
        )


class Forgetful(Protocol):
    """Something that keeps texts, such as an index of passages, and can be asked to forget them."""

    def forget(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int: ...


@dataclass(frozen=True)
class CachedEntry:
    """An entry of the store, as ``LLM.entries`` lists it: ``labels`` are (name, source) pairs of its text."""

    key: str
    kind: Literal["segment", "snapshot"]
    tier: str
    num_tokens: int
    num_bytes: int
    labels: tuple[tuple[str | None, str | None], ...] = ()
    namespaces: tuple[str, ...] = ()
    num_hits: int = 0
    is_pinned: bool = False
    expires_s: float | None = None

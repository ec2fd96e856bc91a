"""What a retriever adapter asks of an index: a Protocol that ``hypic_retriever.Index`` fits. Knows no framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Passage(Protocol):
    """A retrieved piece of text."""

    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def source(self) -> str | None: ...


class Hit(Protocol):
    """A passage that fits a query, and how well."""

    @property
    def passage(self) -> Passage: ...

    @property
    def score(self) -> float: ...


class SearchIndex(Protocol):
    """At most ``k`` hits for a query, best first."""

    def search(self, query: str, k: int) -> Sequence[Hit]: ...

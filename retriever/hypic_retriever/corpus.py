"""The passages of an index by id and by source, in order. It ranks nothing and holds no lock."""

from __future__ import annotations

from hypic_retriever.passages import Passage


class Corpus:
    """Passages by id; those of a source in the order in which they were last stored."""

    def __init__(self) -> None:
        self._passages: dict[str, Passage] = {}
        self._by_source: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._passages)

    def __contains__(self, id: object) -> bool:
        return id in self._passages

    def __getitem__(self, id: str) -> Passage:
        return self._passages[id]

    def get(self, id: str) -> Passage | None:
        """The passage with this id, or ``None``."""
        return self._passages.get(id)

    def sources(self) -> list[str]:
        """Sources that have passages."""
        return list(self._by_source)

    def of_source(self, source: str) -> list[Passage]:
        """The passages of one source; none for an unknown one."""
        return [self._passages[id] for id in self._by_source.get(source, ())]

    def store(self, passage: Passage) -> None:
        """Stores a passage as the last of its source, in place of an earlier one with its id."""
        earlier = self._passages.get(passage.id, passage)
        if earlier.source == passage.source:
            self._by_source.setdefault(passage.source, {}).pop(passage.id, None)
        else:
            self._leave_source(earlier)
        self._passages[passage.id] = passage
        self._by_source.setdefault(passage.source, {})[passage.id] = None

    def forget(self, passage: Passage) -> None:
        """Removes a passage that is stored."""
        self._leave_source(self._passages.pop(passage.id))

    def _leave_source(self, passage: Passage) -> None:
        ids = self._by_source[passage.source]
        del ids[passage.id]
        if not ids:
            del self._by_source[passage.source]

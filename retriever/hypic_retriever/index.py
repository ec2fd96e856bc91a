"""The index: passages in, ranked passages out; documents can change under it.

BM25 always ranks; with an embedder, a faiss index ranks too and both rankings are fused. Passages
keep their id and exact text, so whoever caches them by content finds them again. ``Index`` knows
nothing of who that is.

Threads: any number may search while others add, update or remove. A search sees a document before or
after a change, never in between; changes wait for each other, and embed without holding up searches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from hypic_retriever import saved
from hypic_retriever.bm25 import BM25
from hypic_retriever.changes import BATCH, Change, Edit, checked, dropping, groups, upsert, upserts
from hypic_retriever.corpus import Corpus
from hypic_retriever.embed import Embedder
from hypic_retriever.errors import IndexFormatError, RetrieverError
from hypic_retriever.fusion import reciprocal_rank_fusion
from hypic_retriever.passages import Passage, Splitter
from hypic_retriever.vectors import VectorIndex, Vectors, normalised

Progress = Callable[[int, int], None]
_PROBE = "The harbour of the old town freezes over in most winters."


@dataclass(frozen=True)
class Hit:
    """A found passage. ``score`` is BM25's, or the fused one when an embedder ranks too.

    ``ranks`` gives the place, from 1, in each ranking that has the passage: ``bm25``, ``vector``.
    """

    passage: Passage
    score: float
    ranks: Mapping[str, int]


class Index:
    """Passages of documents, ranked for a query.

    Args:
        embedder: adds a ranking by meaning; without one, words decide.
        splitter: how documents are cut.
        k1, b: BM25's settings.
    """

    def __init__(
        self, embedder: Embedder | None = None, *, splitter: Splitter = Splitter(), k1: float = 1.2, b: float = 0.75
    ) -> None:
        self.embedder = embedder
        self.splitter = splitter
        self._bm25 = BM25(k1, b)
        self._vectors = None if embedder is None else VectorIndex(embedder.dimension)
        self._corpus = Corpus()
        # _changing is held through a change, _state only while it is put in place or read.
        self._changing = threading.RLock()
        self._state = threading.RLock()

    def __len__(self) -> int:
        return len(self._corpus)

    def __contains__(self, id: object) -> bool:
        return id in self._corpus

    def get(self, id: str) -> Passage | None:
        """The passage with this id, or ``None``."""
        return self._corpus.get(id)

    def sources(self) -> list[str]:
        """The sources that have passages, in the order of their first adding."""
        with self._state:
            return self._corpus.sources()

    def passages(self, source: str | None = None) -> list[Passage]:
        """The passages of a source in the order of the document, or all."""
        with self._state:
            wanted = self._corpus.sources() if source is None else [source]
            return [passage for name in wanted for passage in self._corpus.of_source(name)]

    def add_documents(self, documents: Mapping[str, str], *, progress: Progress | None = None) -> Change:
        """Splits and adds documents, text by source; a source that is already there is updated.

        ``progress`` is called with (passages done, passages in all) of those that need ranking.
        """
        with self._changing:
            return self._apply([self._edit(source, text, {}) for source, text in documents.items()], progress)

    def update_document(self, source: str, text: str, *, metadata: Mapping[str, object] | None = None) -> Change:
        """Splits a document again and changes only what differs; other passages keep their ids."""
        with self._changing:
            return self._apply([self._edit(source, text, metadata or {})], None)

    def add_passages(self, passages: Iterable[Passage], *, progress: Progress | None = None) -> Change:
        """Adds passages as they are, each in place of an earlier one with the same id.

        Raises:
            RetrieverError: an id is empty, or an id or text is not ``str``.
        """
        with self._changing:
            latest = {checked(passage).id: passage for passage in passages}
            return self._apply(upserts(self._corpus, list(latest.values())), progress)

    def remove(self, source: str) -> Change:
        """Removes all passages of a source; an unknown source is no error."""
        with self._changing:
            return self._apply([dropping(self.passages(source))], None)

    def remove_passages(self, ids: Iterable[str]) -> Change:
        """Removes passages by id; unknown ids are no error."""
        with self._changing:
            known = [self._corpus[id] for id in dict.fromkeys(ids) if id in self._corpus]
            return self._apply([dropping(known)], None)

    def forget(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        """Removes the passages that match all of what is given; how many.

        ``source`` is a source or its file name, ``name`` an id, ``namespace`` what metadata holds under that word.

        Raises:
            RetrieverError: nothing is given, which would be every passage.
        """
        if source is name is namespace is None:
            raise RetrieverError("forget got no source=, name= or namespace=; say which passages to remove.")

        def is_meant(passage: Passage) -> bool:
            sources = (passage.source, PurePath(passage.source).name)
            pairs = ((source, sources), (name, (passage.id,)), (namespace, (passage.metadata.get("namespace"),)))
            return all(given is None or given in own for given, own in pairs)

        with self._changing:
            doomed = [passage for passage in self.passages() if is_meant(passage)]
            self._apply([dropping(doomed)], None)
        return len(doomed)

    def search(self, query: str, k: int = 8, *, keep: Callable[[Passage], bool] | None = None) -> list[Hit]:
        """At most ``k`` passages for the query, best first, ties by id.

        Only passages with ``keep(passage)`` true are ranked, so ``k`` of them come back if there are
        ``k`` that match. Without an embedder a passage has to share a word with the query.

        Raises:
            RetrieverError: the query is not ``str``, or ``k`` no whole number from 1 up.
        """
        is_count = isinstance(k, Integral) and not isinstance(k, bool) and k >= 1
        if not isinstance(query, str) or not is_count:
            raise RetrieverError(f"search got the query {query!r} and k={k!r}; pass a text and k of 1 or more.")
        vector = None
        if self.embedder is not None and self._vectors is not None and query.strip():
            vector = normalised(self.embedder.embed_queries([query]), 1, self._vectors.dimension)[0]
        with self._state:
            return self._ranked(query, vector, k, keep)

    def save(self, folder: str | Path) -> None:
        """Writes the index into a folder, in place of an earlier one there; the old one stays until the new is whole.

        Raises:
            RetrieverError: the folder cannot be written, or metadata is not JSON.
            IndexFormatError: the folder holds an ``index.json`` of something else.
        """
        with self._changing:
            settings = {
                "splitter": asdict(self.splitter),
                "k1": self._bm25.k1,
                "b": self._bm25.b,
                "probe": self._probe(),
            }
            whole = saved.Saved(settings, self.passages())
            if self._vectors is not None:
                whole = replace(whole, vectors=self._vectors.to_bytes(), numbers=self._vectors.numbers())
            saved.write(Path(folder), whole)

    @classmethod
    def load(cls, folder: str | Path, embedder: Embedder | None = None, *, progress: Progress | None = None) -> Index:
        """The index in a folder. An index saved with vectors wants the same embedder.

        When it was saved without vectors and an embedder is given, all passages are embedded now.

        Raises:
            IndexFormatError: there is no index, it is damaged or of another version, or the embedder
                is missing or not the one that made the vectors.
        """
        found = saved.read(Path(folder))
        settings = found.settings
        index = cls(embedder, splitter=Splitter(**settings["splitter"]), k1=settings["k1"], b=settings["b"])
        if found.vectors is not None:
            index._restore_vectors(Path(folder), found)
        index._apply(upserts(index._corpus, found.passages), progress, embed=found.vectors is None)
        return index

    def _restore_vectors(self, folder: Path, found: saved.Saved) -> None:
        if self.embedder is None or found.vectors is None:
            raise IndexFormatError(f"{folder} was saved with vectors; load it with the embedder that made them.")
        known, now = np.array(found.settings["probe"], dtype=np.float32), self._probe()
        if now is None or len(known) != len(now) or float(known @ np.array(now, dtype=np.float32)) < 0.99:
            raise IndexFormatError(
                f"{folder} was saved with another embedder (dimension {len(known)}); load it with that one."
            )
        if len(found.numbers) != len(found.passages):
            raise IndexFormatError(f"{folder} has passages without a vector; build the index again from its documents.")
        self._vectors = VectorIndex.from_bytes(found.vectors, found.numbers, self.embedder.dimension)

    def _probe(self) -> list[float] | None:
        """The vector of a fixed sentence: tells one embedding model from another."""
        if self.embedder is None:
            return None
        vector: Any = normalised(self.embedder.embed_passages([_PROBE]), 1, self.embedder.dimension)[0].tolist()
        return list(vector)

    def _edit(self, source: str, text: str, metadata: Mapping[str, object]) -> Edit:
        """What makes the index hold this document as it is now."""
        new = [replace(passage, metadata=metadata) for passage in self.splitter.split(text, source)]
        ids = {passage.id for passage in new}
        gone = tuple(passage for passage in self.passages(source) if passage.id not in ids)
        edit = upsert(self._corpus, new)
        return replace(edit, drop=gone, change=Change(edit.change.added, edit.change.removed + gone))

    def _apply(self, edits: Sequence[Edit], progress: Progress | None, *, embed: bool = True) -> Change:
        """Embeds and puts in place, some edits at a time; what is in place stays when ``progress`` raises."""
        total, done = sum(len(edit.ranked) for edit in edits), 0
        for group in groups(edits):
            ranked = [passage for edit in group for passage in edit.ranked]
            vectors: list[Vectors] = []
            for start in range(0, len(ranked), BATCH):
                batch = ranked[start : start + BATCH]
                vectors += self._embedded(batch) if embed else []
                done += len(batch)
                if progress is not None and start + BATCH < len(ranked):
                    progress(done, total)
            with self._state:
                self._put(group, ranked, vectors)
            if progress is not None and ranked:
                progress(done, total)
        changes = [edit.change for edit in edits]
        return Change(tuple(p for c in changes for p in c.added), tuple(p for c in changes for p in c.removed))

    def _embedded(self, passages: Sequence[Passage]) -> list[Vectors]:
        if self.embedder is None or self._vectors is None:
            return []
        vectors = self.embedder.embed_passages([passage.ranked_text for passage in passages])
        return [normalised(vectors, len(passages), self._vectors.dimension)]

    def _put(self, group: Sequence[Edit], ranked: Sequence[Passage], vectors: Sequence[Vectors]) -> None:
        dropped = [passage for edit in group for passage in edit.drop]
        for passage in dropped:
            self._corpus.forget(passage)
            self._bm25.remove(passage.id)
        if self._vectors is not None:
            self._vectors.remove([passage.id for passage in dropped])
        for passage in (passage for edit in group for passage in edit.put):
            self._corpus.store(passage)
        for passage in ranked:
            self._bm25.add(passage.id, passage.ranked_text)
        if self._vectors is not None and vectors:
            self._vectors.add([passage.id for passage in ranked], np.concatenate(vectors))

    def _ranked(self, query: str, vector: Vectors | None, k: int, keep: Callable[[Passage], bool] | None) -> list[Hit]:
        def keep_id(id: str) -> bool:
            return keep is None or keep(self._corpus[id])

        wanted = None if keep is None else keep_id
        if self._vectors is None or vector is None:
            found = self._bm25.search(query, k, wanted)
            return [Hit(self._corpus[id], score, {"bm25": rank}) for rank, (id, score) in enumerate(found, start=1)]
        depth = max(4 * k, 100)
        by_word = self._bm25.search(query, depth, wanted)
        by_meaning = self._vectors.search(vector, depth, wanted)
        fused = reciprocal_rank_fusion({"bm25": [id for id, _ in by_word], "vector": [id for id, _ in by_meaning]})
        return [Hit(self._corpus[id], score, ranks) for id, score, ranks in fused[:k]]

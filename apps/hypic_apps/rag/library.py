"""The documents, their passages, and which of these the engine is known to have cached.

A name is a document's identity: adding one again under its name is an edit, of which only changed passages are new.
Everything may be called from any thread. What is known to be cached is what reports said; an eviction shows in the
next report, not here.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypic.types import CacheReport, Segment
from hypic_apps.rag.errors import NotThere, RagError, TooLarge
from hypic_apps.rag.limits import Limits
from hypic_apps.rag.reading import checked_name, checked_text
from hypic_retriever import Change, Index, Passage

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str

    @property
    def id(self) -> str:
        """Its name, fit for an address."""
        return hashlib.sha256(self.name.encode("utf-8")).hexdigest()[:16]


class Library:
    """Documents by id, over one index."""

    def __init__(self, limits: Limits = Limits()) -> None:
        self.limits = limits
        self.index = Index()
        # _changing is held through a change, _state only while what is shown is read or put in place.
        self._changing = threading.RLock()
        self._state = threading.RLock()
        self._documents: dict[str, Document] = {}
        self._labels: dict[str, str] = {}
        self._cached: set[str] = set()

    def add(self, texts: Mapping[str, str], progress: Progress | None = None) -> Mapping[str, Any]:
        """Adds documents, text by name, or puts new texts in place of old ones; tells what changed.

        Raises:
            RagError, TooLarge: a name or a text cannot be used; then nothing was added.
        """
        with self._changing:
            documents = [self._checked(name, text) for name, text in texts.items()]
            self._check_room(documents)
            is_edit = any(d.id in self._documents for d in documents)
            change = self._index(documents, progress)
            with self._state:
                for document in documents:
                    self._documents[document.id] = document
                    self._label(document.name)
                self._cached -= {passage.id for passage in change.removed}
            return self._told(change, [d.name for d in documents], is_edit)

    def remove(self, id: str) -> Document:
        """Takes a document out.

        Raises:
            NotThere: there is none with this id.
        """
        with self._changing:
            document = self.get(id)
            gone = self.index.remove(document.name).removed
            with self._state:
                del self._documents[id]
                self._cached -= {passage.id for passage in gone}
            return document

    def get(self, id: str) -> Document:
        """The document with this id.

        Raises:
            NotThere: there is none.
        """
        with self._state:
            if id not in self._documents:
                raise NotThere("this document is no longer there; another tab may have deleted it.")
            return self._documents[id]

    def listing(self) -> list[dict[str, Any]]:
        """Every document without its text, in the order of first adding."""
        with self._state:
            return [self._card(document) for document in self._documents.values()]

    def segment(self, passage: Passage) -> Segment:
        """A passage as a segment; its name is the place in the document, so that an edit is told as one."""
        return Segment(passage.text, name=self._labels.get(passage.id, passage.id), source=passage.source)

    def passages(self, id: str | None = None) -> Sequence[Passage]:
        """The passages of a document, or all."""
        return self.index.passages(None if id is None else self.get(id).name)

    def search(self, question: str, previous: str | None, k: int) -> list[Passage]:
        """The ``k`` best passages, best first; those for the question with the one before it take every other place.

        Raises:
            RagError: there is no document, or none has a word of the question.
        """
        if not len(self.index):
            raise RagError("there is no document yet; add one, or load the sample documents.")
        rankings = [self.index.search(question, k)]
        if previous is not None:
            rankings.append(self.index.search(f"{previous} {question}", k))
        longest = max(map(len, rankings))
        places = [ranking[n].passage for n in range(longest) for ranking in rankings if n < len(ranking)]
        found = list({passage.id: passage for passage in places}.values())[:k]
        if not found:
            raise RagError("no passage has a word in common with this question; ask with words that the documents use.")
        return found

    def note(self, passages: Sequence[Passage], report: CacheReport) -> None:
        """Takes note of what a report says of these passages, its segments."""
        with self._state:
            for passage, segment in zip(passages, report.segments, strict=True):
                # One that was deleted meanwhile is of no interest any more.
                if segment.outcome != "live" and passage.id in self.index:
                    self._cached.add(passage.id)

    def _index(self, documents: Sequence[Document], progress: Progress | None) -> Change:
        """Indexes the documents; if that is broken off, the index is as before."""
        try:
            return self.index.add_documents({d.name: d.text for d in documents}, progress=progress)
        except BaseException:
            for document in documents:
                before = self._documents.get(document.id)
                if before is None:
                    self.index.remove(document.name)
                else:
                    self.index.update_document(before.name, before.text)
            raise

    def _checked(self, name: str, text: str) -> Document:
        shown = checked_name(name, self.limits)
        return Document(shown, checked_text(shown, text, self.limits))

    def _check_room(self, documents: Iterable[Document]) -> None:
        after = {**self._documents, **{d.id: d for d in documents}}
        limits, num_chars = self.limits, sum(len(d.text) for d in after.values())
        if len(after) > limits.num_documents:
            raise TooLarge(f"{limits.num_documents} documents are the limit; delete some first.")
        if num_chars > limits.total_chars:
            raise TooLarge(f"all documents may have {limits.total_chars:,} characters together; delete some first.")

    def _label(self, name: str) -> None:
        """Names the passages of a document by their headings, numbered where one has several."""
        passages, seen = self.index.passages(name), Counter[str]()
        for passage in passages:
            leaf = passage.heading.rpartition(" > ")[2] or "text"
            seen[leaf] += 1
            self._labels[passage.id] = leaf if seen[leaf] == 1 else f"{leaf} ({seen[leaf]})"

    def _card(self, document: Document) -> dict[str, Any]:
        passages = self.index.passages(document.name)
        num_cached = sum(passage.id in self._cached for passage in passages)
        return {
            "id": document.id,
            "name": document.name,
            "num_chars": len(document.text),
            "num_passages": len(passages),
            "num_cached": num_cached,
        }

    def _told(self, change: Change, names: Sequence[str], is_edit: bool) -> Mapping[str, Any]:
        passages = [passage for name in names for passage in self.index.passages(name)]
        return {
            "names": list(names),
            "is_edit": is_edit,
            "num_new": len(change.added),
            "num_gone": len(change.removed),
            "num_unchanged": len(passages) - len(change.added),
            "new": [self._labels[passage.id] for passage in change.added[:20]],
        }

"""Documents to an index of passages, with a progress bar: BM25, which needs no weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hypic_apps.cli.errors import InputError
from hypic_apps.cli.screen import progress

if TYPE_CHECKING:
    from rich.console import Console

    from hypic import Segment
    from hypic_retriever.index import Index
    from hypic_retriever.passages import Passage


class Document(Protocol):
    """A text with a name that is shown beside its passages."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...


def index_documents(documents: Sequence[Document], console: Console) -> Index:
    """All passages of the documents, ready to be searched.

    Raises:
        InputError: a document cannot be indexed.
    """
    from hypic_retriever.errors import RetrieverError
    from hypic_retriever.index import Index

    index, texts = Index(), {document.name: document.text for document in documents}
    try:
        with progress(console) as bar:
            task = bar.add_task("indexing passages", total=None)
            index.add_documents(texts, progress=lambda done, total: bar.update(task, completed=done, total=total))
    except RetrieverError as error:
        raise InputError(str(error)) from error
    return index


def search(index: Index, question: str, k: int) -> list[Passage]:
    """The ``k`` passages that fit best, best first; of equal texts the first one only.

    Raises:
        InputError: no passage has anything to do with the question.
    """
    depth = k
    while True:
        found = index.search(question, depth)
        distinct: dict[str, Passage] = {}
        for hit in found:
            distinct.setdefault(hit.passage.text, hit.passage)
        if len(distinct) >= k or len(found) < depth:
            break
        depth *= 2
    if not distinct:
        raise InputError(f"no passage has a word in common with {question!r}; ask with words that the files use.")
    return list(distinct.values())[:k]


def segments(passages: Iterable[Passage]) -> list[Segment]:
    """Passages as segments, labelled with their file's whole path, whatever folder a command is called in."""
    from hypic import Segment

    return [Segment(p.text, name=p.id, source=str(Path(p.source).resolve())) for p in passages]

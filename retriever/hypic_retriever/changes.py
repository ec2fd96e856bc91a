"""What a change of an index is made of: worked out first, then embedded, then put in place at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypic_retriever.corpus import Corpus
from hypic_retriever.errors import RetrieverError
from hypic_retriever.passages import Passage

BATCH = 64


@dataclass(frozen=True)
class Change:
    """What a call did: passages that are new or have a new text, and those that are gone or had another."""

    added: tuple[Passage, ...] = ()
    removed: tuple[Passage, ...] = ()


@dataclass(frozen=True)
class Edit:
    """Passages to store, those of them whose ranking changes, and what is reported and dropped."""

    put: tuple[Passage, ...] = ()
    ranked: tuple[Passage, ...] = ()
    drop: tuple[Passage, ...] = ()
    change: Change = Change()


def upserts(corpus: Corpus, passages: Sequence[Passage]) -> list[Edit]:
    """Edits, a batch of passages each, that store ``passages`` over what is in ``corpus``."""
    return [upsert(corpus, passages[i : i + BATCH]) for i in range(0, len(passages), BATCH)]


def upsert(corpus: Corpus, passages: Sequence[Passage]) -> Edit:
    """One edit that stores ``passages``; what is only moved is not ranked again."""
    pairs = [(new, corpus.get(new.id)) for new in passages]
    ranked = tuple(new for new, old in pairs if old is None or old.ranked_text != new.ranked_text)
    added = tuple(new for new, old in pairs if old is None or old.text != new.text)
    removed = tuple(old for new, old in pairs if old is not None and old.text != new.text)
    return Edit(tuple(passages), ranked, (), Change(added, removed))


def dropping(passages: Sequence[Passage]) -> Edit:
    """An edit that removes passages."""
    return Edit(drop=tuple(passages), change=Change(removed=tuple(passages)))


def groups(edits: Sequence[Edit]) -> Iterator[list[Edit]]:
    """Edits together until there is a batch to embed; an edit is never divided."""
    group: list[Edit] = []
    for edit in edits:
        group.append(edit)
        if sum(len(member.ranked) for member in group) >= BATCH:
            yield group
            group = []
    if group:
        yield group


def checked(passage: Passage) -> Passage:
    """The passage.

    Raises:
        RetrieverError: the id is empty, or id or text is not ``str``.
    """
    if not (isinstance(passage.id, str) and passage.id and isinstance(passage.text, str)):
        raise RetrieverError(
            f"a passage has the id {passage.id!r} and a text of type {type(passage.text).__name__}; "
            "both must be str, and the id not empty."
        )
    return passage

"""BM25: ranks texts by the words they share with a query; needs no weights.

    score(q, d) = sum over terms t of q:  idf(t) * tf * (k1 + 1) / (tf + k1 * (1 - b + b * |d| / avg))
    idf(t)      = ln(1 + (N - n_t + 0.5) / (n_t + 0.5))

with ``tf`` the count of t in d, ``|d|`` the number of terms in d, ``avg`` its mean, ``N`` texts in
all and ``n_t`` texts with t; a term that stands twice in q counts twice. S. Robertson, H. Zaragoza,
"The Probabilistic Relevance Framework: BM25 and Beyond" (2009), section 3.4; the ``1 +`` keeps the
weight of very common terms above zero.

Texts come and go one at a time. A removed text leaves its postings behind until half of them are
dead, then they are swept. This class holds no lock: ``Index`` does.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hypic_retriever.errors import RetrieverError
from hypic_retriever.terms import terms

_MIN_DEAD = 1024


@dataclass
class _Postings:
    """Where a term occurs: slots of texts and how often; ``num_dead`` of them are of texts that were removed."""

    slots: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    num_dead: int = 0

    @property
    def num_live(self) -> int:
        return len(self.slots) - self.num_dead


class BM25:
    """An index over ``(id, text)`` pairs. ``k1`` bounds what repetition brings, ``b`` what length costs.

    Raises:
        RetrieverError: ``k1`` is negative or ``b`` is outside ``[0, 1]``.
    """

    def __init__(self, k1: float = 1.2, b: float = 0.75) -> None:
        if not (0 <= k1 < math.inf and 0 <= b <= 1):
            raise RetrieverError(f"BM25 got k1={k1} and b={b}; choose k1 >= 0 and 0 <= b <= 1, such as 1.2 and 0.75.")
        self.k1 = k1
        self.b = b
        self._slot_of: dict[str, int] = {}
        self._postings: dict[str, _Postings] = {}
        self._ids: list[str] = []
        self._terms: list[tuple[str, ...]] = []
        self._lengths = array("d")
        self._alive = bytearray()
        self._num_terms = 0.0

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, id: object) -> bool:
        return id in self._slot_of

    def add(self, id: str, text: str) -> None:
        """Adds a text, in place of an earlier one with this id."""
        self.remove(id)
        counts = Counter(terms(text))
        slot = len(self._ids)
        for term, count in counts.items():
            postings = self._postings.get(term)
            if postings is None:
                postings = self._postings[term] = _Postings()
            postings.slots.append(slot)
            postings.counts.append(count)
        self._slot_of[id] = slot
        self._ids.append(id)
        self._terms.append(tuple(counts))
        self._lengths.append(counts.total())
        self._alive.append(1)
        self._num_terms += counts.total()

    def remove(self, id: str) -> None:
        """Removes a text; an unknown id is no error."""
        slot = self._slot_of.pop(id, None)
        if slot is None:
            return
        for term in self._terms[slot]:
            self._postings[term].num_dead += 1
            if not self._postings[term].num_live:
                del self._postings[term]
        self._terms[slot] = ()
        self._alive[slot] = 0
        self._num_terms -= self._lengths[slot]
        if len(self._ids) > 2 * len(self) + _MIN_DEAD:
            self._sweep()

    def search(self, query: str, k: int, keep: Callable[[str], bool] | None = None) -> list[tuple[str, float]]:
        """At most ``k`` pairs (id, score) that share a term with the query, best first, ties by id.

        ``keep`` says of an id whether it may be returned.
        """
        if k < 1 or not self._slot_of:
            return []
        scores = self._scores(Counter(terms(query)))
        found = np.flatnonzero(scores)
        if keep is not None:
            found = np.array([slot for slot in found.tolist() if keep(self._ids[slot])], dtype=np.intp)
        if len(found) > k:
            # Everything that ties with the last place stays in, so that the ids decide.
            found = found[scores[found] >= np.partition(scores[found], len(found) - k)[len(found) - k]]
        ranked = sorted((-float(scores[slot]), self._ids[slot]) for slot in found.tolist())
        return [(id, -score) for score, id in ranked[:k]]

    def _scores(self, query: Counter[str]) -> NDArray[np.float64]:
        """Scores by slot, 0 for texts without any term of the query and for dead slots."""
        lengths = np.array(self._lengths)
        norm = self.k1 * (1 - self.b + self.b * lengths * (len(self) / max(self._num_terms, 1.0)))
        scores = np.zeros(len(lengths))
        for term in sorted(query):
            postings = self._postings.get(term)
            if postings is None:
                continue
            slots, counts = np.array(postings.slots), np.array(postings.counts, dtype=np.float64)
            rarity = math.log1p((len(self) - postings.num_live + 0.5) / (postings.num_live + 0.5))
            scores[slots] += query[term] * rarity * counts * (self.k1 + 1) / (counts + norm[slots])
        return scores * np.frombuffer(bytes(self._alive), dtype=np.uint8)

    def _sweep(self) -> None:
        """Renumbers the living slots and drops the dead ones from the postings."""
        alive = np.frombuffer(bytes(self._alive), dtype=np.uint8).astype(bool)
        renumbered = np.where(alive, np.cumsum(alive) - 1, -1).astype(np.int32)
        for postings in self._postings.values():
            slots = renumbered[np.array(postings.slots)]
            living = slots >= 0
            postings.slots, postings.num_dead = array("i", slots[living].tobytes()), 0
            postings.counts = array("i", np.array(postings.counts)[living].tobytes())
        living_slots = np.flatnonzero(alive).tolist()
        self._ids = [self._ids[slot] for slot in living_slots]
        self._terms = [self._terms[slot] for slot in living_slots]
        self._lengths = array("d", [self._lengths[slot] for slot in living_slots])
        self._alive = bytearray(b"\x01" * len(living_slots))
        self._slot_of = {id: slot for slot, id in enumerate(self._ids)}

"""Several rankings into one: reciprocal rank fusion.

    score(d) = sum over rankings r with d in them:  1 / (60 + rank_r(d)),   ranks from 1

G. Cormack, C. Clarke, S. Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual
Rank Learning Methods" (SIGIR 2009), with their constant. Only ranks count, so scores of different
kinds (BM25, cosines) need no common scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

_CONSTANT = 60


def reciprocal_rank_fusion(rankings: Mapping[str, Sequence[str]]) -> list[tuple[str, float, dict[str, int]]]:
    """(id, score, rank by ranking) for every id in ``rankings``, best first, ties by id."""
    ranks: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for name, ids in rankings.items():
        for rank, id in enumerate(ids, start=1):
            ranks[id][name] = rank
    scored = [(id, sum(1 / (_CONSTANT + rank) for rank in by_name.values()), by_name) for id, by_name in ranks.items()]
    return sorted(scored, key=lambda item: (-item[1], item[0]))

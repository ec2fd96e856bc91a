"""The tenth set: questions on held-out articles, worded as one types or asks them, each asked among eight articles.

The project's authors wrote them from reading, in other words than the articles have; the answer is a literal part of
the article. So they stand for real questions where no file of such is at hand (``real.py``).
"""

from __future__ import annotations

from hypic_apps.eval import real
from hypic_apps.eval.items import Item
from hypic_apps.eval.pool import Pool

NAME = "S10"
NUM_PASSAGES = 8
NUM_ITEMS = 896


def rows(pool: Pool) -> list[real.Row]:
    """Every question with its answer and its article."""
    texts = {article.title: f"{article.title}: {article.text}" for article in pool.library.articles}
    written = pool.library.written.items()
    return [(ask.question, (ask.answer,), texts[title]) for title, asks in written for ask in asks]


def items(pool: Pool, number: int) -> list[Item]:
    """The first ``number`` items; item ``i`` depends on the pool and ``i`` alone."""
    return real.drawn(rows(pool), NAME, NUM_PASSAGES, number)

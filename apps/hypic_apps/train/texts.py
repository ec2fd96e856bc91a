"""The text that the tokenizer's merges are learned from: natural text, invented passages, questions."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from hypic_apps.train.corpus import Corpus
from hypic_apps.train.library import Library
from hypic_apps.train.names import Names
from hypic_apps.train.schema import Schema
from hypic_apps.train.world import World


def merge_texts(corpus: Corpus, schema: Schema, num_worlds: int = 1500, seed: int = 17) -> Iterator[str]:
    """Articles that may be trained on, a tenth of the speeches, facts, glosses, names, and invented worlds."""
    for article in corpus.training_articles():
        yield article.text
        yield article.description
    yield from corpus.speeches[::8]
    yield from (gloss.text for gloss in corpus.glosses[::4])
    yield from (f"{field}: {value}" for country in corpus.countries[::4] for field, value in country.facts)
    yield from corpus.cities[::3]
    names, library = Names.of_split(corpus, "train"), Library(corpus)
    for number in range(num_worlds):
        world = World(names, schema, "train", Random(seed * 1_000_003 + number), library.sentences)
        for passage in world.passages(8, 5):
            yield passage.text
            yield from (ask.question for ask in passage.asks)

"""A small stand-in for the training text, so that tests need no downloaded package."""

from __future__ import annotations

import pytest

from hypic_apps.train import schema
from hypic_apps.train.corpus import Article, Corpus, Country, Gloss
from hypic_apps.train.render import Encoder
from hypic_apps.train.schema import Schema
from hypic_apps.train.vocabulary import train


def _words(stem: str, number: int) -> tuple[str, ...]:
    return tuple(f"{stem}{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(number))


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """Forty articles, two countries, thirty glosses and some names, all made up."""
    places = _words("Tolm", 60)
    articles = tuple(
        Article(
            place,
            f"{place} is a small town in the north. Its capital is {places[i - 1]}. It is known for its green bridges.",
            f"Town founded in {1700 + i}",
            "Geography" if i % 2 else "History",
        )
        for i, place in enumerate(places)
    )
    facts = tuple((f"Field {i}", f"{i} thousand tons") for i in range(20))
    return Corpus(
        articles=articles,
        speeches=("Fellow citizens, the year was long and the harvest good. " * 40,),
        countries=(Country("Ostavia", facts, ("A long paragraph about the climate. " * 20,)),),
        glosses=tuple(Gloss(word, "n", f"a kind of {word[::-1]} used in kitchens") for word in _words("glim", 40)),
        first_names=_words("Mar", 200),
        cities=places + _words("Ber", 200),
    )


@pytest.fixture(scope="session")
def relations() -> Schema:
    """All relations of the project."""
    return schema.load()


@pytest.fixture(scope="session")
def encoder(corpus: Corpus) -> Encoder:
    """A tokenizer of 700 tokens learned from the stand-in."""
    texts = [a.text for a in corpus.articles] + list(corpus.speeches) + list(corpus.cities)
    return Encoder(train(texts, num_tokens=700))

"""Worlds as tests ask for them."""

from __future__ import annotations

from random import Random

from hypic_apps.train.corpus import Corpus, Gloss
from hypic_apps.train.invented import Inventor
from hypic_apps.train.names import Names
from hypic_apps.train.schema import Schema, Split
from hypic_apps.train.world import World

SEEDS = range(60)


def world(corpus: Corpus, relations: Schema, seed: int, split: Split = "train") -> World:
    return World(Names.of_split(corpus, split), relations, split, Random(seed), ("A plain sentence.",))


def inventive(corpus: Corpus, relations: Schema, seed: int) -> World:
    made = world(corpus, relations, seed)
    made.inventor = Inventor((*corpus.glosses, *(Gloss(f"{g.word}ize", "v", g.text) for g in corpus.glosses)))
    return made

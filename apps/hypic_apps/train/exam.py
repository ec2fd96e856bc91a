"""What a model in training can do: exact match on questions about given passages that it has never seen.

An item is a row with one question. The model's argmax is compared at every token of the answer, the closing token
included; that all agree is the same as greedy decoding giving exactly the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from hypic_apps.train import order, quoting, rules
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.grid import CHUNK
from hypic_apps.train.library import Library
from hypic_apps.train.model import Trainee
from hypic_apps.train.names import Names
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.render import Encoder, Row, Turn, Weights, conversation
from hypic_apps.train.requests import LISTS
from hypic_apps.train.rows import padded
from hypic_apps.train.rulebooks import Rulebooks
from hypic_apps.train.scenes import documents, key_facts, updates
from hypic_apps.train.schema import Schema, Split
from hypic_apps.train.segments import Segmenting
from hypic_apps.train.world import World

ITEMS_SEED = 1_000_003
IN_ORDER = ("update", "chunked", "keyfacts", quoting.KIND, *order.KINDS)
# What is also answered through segments, when a model is tuned for that.
THROUGH_SEGMENTS = ("one_hop", "latest_notice")
ONLY_ANSWERS = Weights(passage=0.0, question=0.0, answer=1.0)
Maker = Callable[[Random], tuple[list[Passage], list[Ask]]]


@dataclass(frozen=True)
class Item:
    """A question about passages and the one right answer."""

    passages: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class Paper:
    """Items of one kind: ``ids, weights [n, T]``; the weight is 1 at answers and 0 elsewhere. ``marks [n, T]``
    (``segments``) tell the segments that hypic makes of the passages by default."""

    ids: Tensor
    weights: Tensor
    marks: Tensor | None = None


class Papers:
    """Makes papers; the same seed gives the same paper."""

    def __init__(self, corpus: Corpus, schema: Schema, encoder: Encoder) -> None:
        self.schema, self.encoder = schema, encoder
        self.names = Names.of_split(corpus, "test")
        self.rulebooks = Rulebooks(rules.load())
        self.library = Library(corpus, held_out=True)

    def all(self, num_items: int, num_passages: int = 16) -> dict[str, Paper]:
        """The papers by name: unseen names in all; unseen templates and relations, real text, notices, refusals."""
        makers: dict[str, Maker] = {
            "one_hop": self.worlds(num_passages, "test", "1hop"),
            "one_hop_seen_templates": self.worlds(num_passages, "train", "1hop"),
            "one_hop_held_out_relations": self.worlds(num_passages, "test", "1hop", held_out=True),
            "one_hop_4_passages": self.worlds(4, "test", "1hop"),
            "reverse": self.worlds(num_passages, "test", "reverse"),
            "two_hop": self.worlds(num_passages, "test", "2hop"),
            "not_stated": self.worlds(num_passages, "test", "none"),
            "latest_notice": self.notices(num_passages),
            "articles": self.articles(num_passages),
            "two_hop_think": self.worlds(num_passages, "test", "2hop_think"),
            "first_sentences": self.lists(7),
            "documents": self.documents(3),
            "rules": self.rules(num_passages),
            "order": self.order(7),
            "sentences_of_articles": self.sentences_of_articles(7),
            "quotes": self.quotes(7),
        }
        return {name: self.paper(maker, num_items, seed) for seed, (name, maker) in enumerate(makers.items())}

    def worlds(self, number: int, split: Split, kind: str, *, held_out: bool = False, plain: bool = False) -> Maker:
        """Invented passages of the names never trained on, asked for one kind of question.

        ``plain`` passages have no sentences of real text between the invented ones.
        """
        filler = () if plain else self.library.sentences
        new = {x.key for relations in self.schema.values() for x in relations if x.held_out}

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            world = World(self.names, self.schema, split, r, filler, held_out)
            passages = world.passages(number, 5)
            asks = [a for p in passages for a in p.asks] if kind == "1hop" else world.extra_asks()
            if held_out:
                asked = [f for f in world.facts if f.relation.key in new]
                asks = [a for a in asks if any(a.answer == f.value and f.subject in a.question for f in asked)]
            return passages, [a for a in asks if a.kind == kind]

        return make

    def notices(self, number: int) -> Maker:
        """Notices of which the latest counts."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            world = World(self.names, self.schema, "test", r)
            passages = updates(world, number)
            return passages, [a for p in passages for a in p.asks]

        return make

    def lists(self, number: int) -> Maker:
        """The first sentence of every passage."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            passages = World(self.names, self.schema, "test", r, self.library.sentences).passages(number, 4)
            r.shuffle(passages)
            return passages, [key_facts(passages, LISTS[-1])]

        return make

    def sentences_of_articles(self, number: int) -> Maker:
        """The first sentence of every article, none of them trained on."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            passages = self.library.articles_alone(number, r)
            return passages, [key_facts(passages, LISTS[-1])]

        return make

    def quotes(self, number: int) -> Maker:
        """A long span of an article that was never trained on."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            passages = self.library.articles_alone(number, r)
            return passages, quoting.asks_of(passages, "test", r, 1)

        return make

    def order(self, number: int) -> Maker:
        """Where passages stand: how one begins, what follows another, the first words of all."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            passages = World(self.names, self.schema, "test", r, self.library.sentences).passages(number, 4)
            r.shuffle(passages)
            return passages, order.asks_of(passages, "test", r, 1)

        return make

    def rules(self, number: int) -> Maker:
        """Sections of rulebooks among other passages, asked without a subject."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            world = World(self.names, self.schema, "test", r, self.library.sentences)
            sections = self.rulebooks.passages(world, number // 3)
            passages = [*sections, *world.passages(number - len(sections), 5)]
            return passages, [a for p in sections for a in p.asks if a.kind == "1hop"]

        return make

    def documents(self, number: int) -> Maker:
        """Documents in pieces of which only the first names what it is about."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            passages = documents(World(self.names, self.schema, "test", r, self.library.sentences), number, (4, 8))
            return passages, [a for p in passages for a in p.asks if a.kind == "chunked"]

        return make

    def articles(self, number: int) -> Maker:
        """Articles never trained on."""

        def make(r: Random) -> tuple[list[Passage], list[Ask]]:
            passages = [self.library.article(a, r) for a in r.sample(self.library.articles, number)]
            return passages, [a for p in passages for a in p.asks]

        return make

    def paper(self, maker: Maker, num_items: int, seed: int) -> Paper:
        """``num_items`` items of a maker, padded to the longest."""
        return paper_of([self.row_of(item) for item in self.items(maker, num_items, seed)])

    def items(self, maker: Maker, num_items: int, seed: int) -> list[Item]:
        """``num_items`` items of a maker; item ``i`` depends on the maker, the seed and ``i`` alone."""
        return [next(self._drawn(maker, Random(seed * ITEMS_SEED + i))) for i in range(num_items)]

    def _drawn(self, maker: Maker, r: Random) -> Iterator[Item]:
        while True:
            passages, asks = maker(r)
            if not asks:
                continue
            r.shuffle(passages) if asks[0].kind not in IN_ORDER else None
            chosen = r.choice(asks)
            yield Item(tuple(p.text for p in passages), chosen.question, chosen.answer)

    def row_of(self, item: Item) -> Row:
        """An item as the engine would render it."""
        return self.row(item.passages, item.question, item.answer)

    def row(self, passages: Sequence[str], question: str, answer: str) -> Row:
        """One question as the engine would render it."""
        return self.encoder.row(conversation([Turn(passages, question, answer)], ONLY_ANSWERS))


def paper_of(rows: Sequence[Row]) -> Paper:
    """Rows padded to a common multiple of the chunk."""
    length = -(-max(len(row) for row in rows) // CHUNK) * CHUNK
    even = [padded(row, length) for row in rows]
    marks = Segmenting().marks
    ids, weights, segments = zip(*((row.ids, row.weights, marks(row)) for row in even), strict=True)
    return Paper(*(torch.from_numpy(np.stack(rows)) for rows in (ids, weights, segments)))


@torch.no_grad()
def right(
    model: Trainee, paper: Paper, device: torch.device, num_rows: int = 16, *, through_segments: bool = False
) -> Tensor:
    """Per item, whether the whole answer is right: ``[n]`` booleans on the CPU.

    Raises:
        ValueError: the paper does not tell its segments.
    """
    if through_segments and paper.marks is None:
        raise ValueError("the paper has no marks of segments; make it with paper_of.")
    out = []
    for start in range(0, len(paper.ids), num_rows):
        some = slice(start, start + num_rows)
        ids, weights = paper.ids[some].to(device), paper.weights[some].to(device)
        marks = paper.marks[some].to(device) if through_segments and paper.marks is not None else None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            best = model.logits(ids, marks)[:, :-1].argmax(-1)
        out.append(((best == ids[:, 1:]) | (weights[:, 1:] == 0)).all(1).cpu())
    return torch.cat(out)


def grades(
    model: Trainee, papers: Mapping[str, Paper], device: torch.device, through_segments: Collection[str] = ()
) -> dict[str, float]:
    """The share of right answers of every paper; those named in ``through_segments`` are answered through segments
    too, as ``..._segments``."""
    found = {name: right(model, paper, device) for name, paper in papers.items()}
    for name in [name for name in papers if name in through_segments]:
        found[name + "_segments"] = right(model, papers[name], device, through_segments=True)
    return {name: round(float(is_right.float().mean()), 4) for name, is_right in found.items()}


@torch.no_grad()
def answer(model: Trainee, encoder: Encoder, row: Row, device: torch.device, most: int = 40) -> str:
    """Greedy decoding after the prompt part of an item, by full recompute."""
    prompt = [int(i) for i in row.ids[: int(np.argmax(row.weights > 0))]]
    ids = list(prompt)
    end = encoder.special("<|end|>")
    for _ in range(most):
        length = -(-len(ids) // CHUNK) * CHUNK
        batch = torch.tensor([ids + [0] * (length - len(ids))], device=device)
        best = int(model.logits(batch)[0, len(ids) - 1].argmax())
        if best == end:
            break
        ids.append(best)
    text: str = encoder.tokenizer.decode(ids[len(prompt) :])
    return text

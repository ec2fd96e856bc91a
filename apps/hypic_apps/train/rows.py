"""Training rows: what a row holds at each stage of the curriculum, filled to the row's length.

A row is one conversation (or plain text): passages, then question after question about them, as many as fit. Stages go
from two short passages to sixteen and more; a model of this size started at sixteen does not learn to look things up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from hypic_apps.train import manners, order, quoting, rules, written
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.grammar import enriched
from hypic_apps.train.invented import Inventor
from hypic_apps.train.library import Library
from hypic_apps.train.names import Names
from hypic_apps.train.passages import Ask, Fact, Passage
from hypic_apps.train.render import Emphasis, Encoder, Piece, Row, Turn, Weights, conversation
from hypic_apps.train.requests import LISTS
from hypic_apps.train.rulebooks import Rulebooks
from hypic_apps.train.scenes import documents, key_facts, updates
from hypic_apps.train.schema import Schema
from hypic_apps.train.thesaurus import Thesaurus
from hypic_apps.train.variety import CROWDED, IMPLIED, UNINVENTED, is_alike
from hypic_apps.train.world import NOT_STATED, World


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum; ``until`` is the share of training time at which it ends."""

    until: float
    num_tokens: int
    passages: tuple[int, int]
    most_facts: int
    weights: Weights
    kinds: dict[str, float]


LEARN_TO_COPY = {"world": 6.0, "repeat": 2.0, "text": 2.0}
SHORT = {"world": 7.0, "natural": 1.5, "mixed": 1.0, "repeat": 0.3, "text": 0.8, "updates": 0.3, "lists": 0.5}
FULL = {
    "world": 5.5, "natural": 2.4, "mixed": 2.0, "text": 0.3, "updates": 0.7, "documents": 0.9, "lists": 0.9,
}  # fmt: skip
# Of the rules and wordings by which rows are made; the bundled model's card says which one it was trained on.
DATA_VERSION = 10
# How much a token of a long answer counts: reasoning lines and the like are easier to learn than short answers. Of
# sentences that are copied every token counts, or the model loses its place in long ones; which passage comes next is
# decided where an item begins, and at the end whether one comes at all. Passages count little: nothing foretells most
# of their words.
LISTED_IN_ORDER = Emphasis(1.0, start=4.0, end=3.0)
LONG_ANSWERS = {
    "2hop_think": Emphasis(0.35, end=0.35), "facts": Emphasis(0.3, start=1.5), "keyfacts": LISTED_IN_ORDER,
    "order_list": Emphasis(0.6, start=3.0, end=2.0), "order_sentence": Emphasis(0.7, start=2.0, end=2.0),
    quoting.KIND: Emphasis(0.7, start=2.0, end=2.0),
}  # fmt: skip
LATER = Weights(passage=0.05, question=0.03, text=0.5)
# Few and short passages a list, so that there are many lists: their order is learned from where each item begins.
LISTED = (2, 9)
# Of lists, those over articles alone, three to nine, and those over articles among invented passages.
ALONE, AMONG_INVENTED = 0.62, 0.16
# Tokens that a later message of a chat needs for a list of several passages.
LEAST_FOR_LISTS = 600
# The chance that a context is asked for one or two spans of its text, where there are real passages and elsewhere, and
# behind how many other questions at most.
QUOTED, QUOTED_INVENTED, SOON = 0.7, 0.1, 8
# The chance that a context is also asked about the order of its passages; of such contexts, the share that has few
# passages, and how few. Longer rows are asked more, so that the share of such questions stays.
ORDERED, SHORT_ORDERED, FEW = 0.2, 0.6, (2, 5)
TOKENS_PER_ORDER_ASK = 200
# The chance that sections of a rulebook stand among the passages of a context.
RULED = 0.45
# The chance that a context with real passages is asked about an article that is not among them.
ABSENT = 0.3
# The chance that a context is asked about a passage that was left out.
LEFT_OUT = 0.25
CHARACTERS_PER_TOKEN = 4.5
# Questions that are only asked of a context of which no passage was left out, and ones that need all their facts.
NEED_ALL, NEED_FACTS = ("keyfacts", "facts"), ("2hop", "2hop_think", "reverse")
STAGES = (
    Stage(0.06, 256, (1, 2), 3, Weights(passage=0.4), LEARN_TO_COPY),
    Stage(0.14, 512, (2, 4), 4, Weights(passage=0.3), LEARN_TO_COPY),
    Stage(0.32, 1024, (3, 9), 5, LATER, SHORT),
    Stage(0.80, 2048, (4, 20), 5, LATER, FULL),
    Stage(1.0, 4096, (10, 34), 6, LATER, FULL),
)


def stage_at(done: float, stages: Sequence[Stage] = STAGES) -> int:
    """The number of the stage in which training is when a share ``done`` of its time is over."""
    return next((i for i, stage in enumerate(stages) if done < stage.until), len(stages) - 1)


class Rows:
    """Makes rows; a function of the seed and the stage."""

    def __init__(self, corpus: Corpus, schema: Schema, encoder: Encoder) -> None:
        self.schema, self.encoder = enriched(schema, Thesaurus(corpus.synonyms)), encoder
        self.names = Names.of_split(corpus, "train")
        self.library = Library(corpus, written=written.both())
        kept = {word for kind in schema.values() for x in kind if x.held_out for word in (x.key, *x.noun.split())}
        without = frozenset(kept | {word.rstrip("s") for word in kept})
        inventor = Inventor(corpus.glosses, corpus.synonyms, without, corpus.near)
        self.inventor = inventor if inventor.has_words else None
        self.rulebooks = Rulebooks(rules.load())
        self.texts = _plain_texts(corpus, self.library)

    def stream(self, stage: Stage, seed: int) -> Iterator[Row]:
        """Endless rows of a stage."""
        r = Random(seed)
        while True:
            yield self.make(stage, r)

    def make(self, stage: Stage, r: Random) -> Row:
        """One row of exactly ``stage.num_tokens`` tokens, padded with weight 0 where nothing more fits."""
        kind = r.choices(list(stage.kinds), list(stage.kinds.values()))[0]
        if kind == "text":
            row = self.encoder.row([Piece(r.choice(self.texts), stage.weights.text)])
            start = r.randrange(max(1, len(row) - stage.num_tokens))
            return padded(row, stage.num_tokens, start)
        if kind == "repeat":
            return self._repeated(stage, r)
        system = r.choice(manners.SYSTEMS) if r.random() < 0.4 else ""
        told: set[str] = set()  # words of rules: a later message must not bring the same with another value
        row = self._block(kind, stage, stage.num_tokens, system, r, told)
        while stage.num_tokens - len(row) > 120 and len(row) < 0.9 * stage.num_tokens:
            # a later message of the same chat that brings passages of its own
            room = stage.num_tokens - len(row)
            later = "mixed" if kind == "lists" and room < LEAST_FOR_LISTS else kind
            row = joined(row, self._block(later, stage, room, "", r, told))
        return padded(row, stage.num_tokens)

    def context(
        self, kind: str, number: int, stage: Stage, r: Random, told: set[str] | None = None
    ) -> tuple[list[Passage], list[Ask]]:
        """Passages in order, and all that can be asked about them; ``told`` are words of rules that stand before."""
        world = World(
            self.names, self.schema, "train", r, self.library.sentences,
            inventor=self.inventor if stage.num_tokens > 256 else None, is_crowded=r.random() < CROWDED,
        )  # fmt: skip
        told = set() if told is None else told
        world.used |= told & {"handbook"}
        if kind in ("updates", "documents"):
            few = max(1, number // 4)
            passages = updates(world, number, filled=0.5) if kind == "updates" else documents(world, few, (2, 8))
            return passages, [a for p in passages for a in p.asks]
        mixed = r.randint(1, max(1, number - 1))
        if kind == "lists" and r.random() < ALONE:
            return self.library.articles_alone(min(number + 1, LISTED[1]), r), []
        among = AMONG_INVENTED / (1 - ALONE)
        real = {"natural": number, "mixed": mixed, "lists": mixed if r.random() < among else 0}.get(kind, 0)
        most_facts = r.randint(1, stage.most_facts) if kind == "lists" else stage.most_facts
        ruled = self._sections(kind, number, stage, r)
        passages = self.rulebooks.passages(world, ruled, told) if ruled else []
        invented = number - real - ruled // 2 if ruled else number - real
        passages += world.passages(invented, most_facts) if invented > 0 else []
        passages += self.library.passages(real, r) if real else []
        told |= world.used & {"handbook"}
        r.shuffle(passages)
        if kind == "lists":
            return passages, []
        asks = [a for p in passages for a in p.asks]
        extra = world.training_asks(len(asks)) if world.facts and stage.num_tokens > 512 else []
        if real and r.random() < ABSENT:
            extra += self.library.absent(passages, r)
        return passages, [*asks, *extra]

    def _sections(self, kind: str, number: int, stage: Stage, r: Random) -> int:
        """How many sections of rulebooks stand in a context of ``number`` passages; mostly none."""
        if kind == "lists" or stage.num_tokens <= 512 or r.random() >= RULED:
            return 0
        return r.randint(1, min(7, max(1, number // 2)))

    def _block(self, kind: str, stage: Stage, room: int, system: str, r: Random, told_before: set[str]) -> Row:
        """A chat about passages that take half to most of ``room`` tokens; it begins bare one time in ten."""
        share = room / stage.num_tokens
        number = max(1, round(r.randint(*stage.passages) * min(1.0, share + 0.1)))
        ordered = share == 1.0 and stage.num_tokens > 256 and r.random() < ORDERED
        if kind == "lists" or (ordered and r.random() < SHORT_ORDERED):
            number = r.randint(*(LISTED if kind == "lists" else FEW))
        passages, asks = self.context(kind, number, stage, r, told_before)
        known = dict(zip(texts := [p.text for p in passages], self.encoder.texts(texts), strict=True))
        most = r.uniform(0.5, 0.7) if kind == "lists" else r.uniform(0.5, 0.85)
        kept = passages[: _fitting([known[text] for text in texts], room * most)]
        if kind == "lists":
            asks = [key_facts(kept, r.choice(LISTS[:-1]))]
        left_out = [a for p in passages[len(kept) :] for a in p.asks]
        whole = len(kept) == len(passages)
        told = {id(fact) for p in kept for fact in p.facts}
        questions = [a for a in asks if a not in left_out and (whole or kind == "lists" or _is_answered(a, told))]
        if not whole and kind != "lists" and stage.num_tokens > 512:
            questions += unanswered(left_out, kept, r)
        number = r.randint(2, 3 + stage.num_tokens // TOKENS_PER_ORDER_ASK) if ordered else 0
        questions += order.asks_of(kept, "train", r, number)
        quotes = _quotes(kind, kept, r) if share == 1.0 and stage.num_tokens > 256 else []
        if not questions:
            return self._block(kind, stage, room, system, r, told_before)
        r.shuffle(questions)
        for ask in quotes:  # among the first, or most would be cut off
            questions.insert(r.randint(0, min(len(questions), SOON)), ask)
        free = room - sum(len(known[p.text]) for p in kept)
        turns = [
            Turn((), manners.wrapped(a.question, r), a.answer, (), LONG_ANSWERS.get(a.kind, Emphasis()), a.starts)
            for a in _at_most(questions, free)
        ]
        turns[0] = replace(turns[0], passages=texts[: len(kept)], labels=manners.labels(len(kept), r))
        bare = share == 1.0 and r.random() < 0.1
        return self.encoder.row(conversation(turns, stage.weights, system, bare=bare), known)

    def _repeated(self, stage: Stage, r: Random) -> Row:
        """Spans of random tokens, each twice: the second time it can be copied."""
        parts: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        total, low = 0, 300
        size = self.encoder.tokenizer.get_vocab_size()
        while total < stage.num_tokens:
            span = np.array([r.randrange(low, size) for _ in range(r.randint(8, 60))])
            gap = np.array([r.randrange(low, size) for _ in range(r.randint(0, 40))], np.int64)
            first = r.randint(1, 3)
            parts += [span, gap, span]
            weights += [np.zeros(len(span) + len(gap) + first), np.ones(len(span) - first)]
            total += 2 * len(span) + len(gap)
        row = Row(np.concatenate(parts).astype(np.int64), np.concatenate(weights).astype(np.float32))
        return padded(row, stage.num_tokens)


def _is_answered(ask: Ask, told: set[int]) -> bool:
    """Whether a context of which passages were left out can be asked so; ``told`` are the ids of its facts."""
    if ask.kind in NEED_FACTS:
        return all(id(fact) in told for fact in ask.about)
    return ask.kind not in NEED_ALL


def unanswered(left_out: Sequence[Ask], kept: Sequence[Passage], r: Random) -> list[Ask]:
    """At most one question of passages that were left out, if it names its thing: no passage answers it now."""
    facts = [f for p in kept for f in p.facts]
    found = [a for a in left_out if a.kind == "1hop" and is_named(a) and not any(is_told(a, f) for f in facts)]
    return [Ask("none", r.choice(found).question, NOT_STATED)] if found and r.random() < LEFT_OUT else []


def is_told(ask: Ask, fact: Fact) -> bool:
    """Whether the fact, or one like it, might answer the question."""
    (about,) = ask.about
    is_implied = about.relation.key in IMPLIED
    return is_implied or (fact.subject == about.subject and is_alike(fact.relation, about.relation))


def is_named(ask: Ask) -> bool:
    """Whether the question names what it is about."""
    return all(fact.subject.lower() in ask.question.lower() and fact.kind not in UNINVENTED for fact in ask.about)


def _quotes(kind: str, kept: Sequence[Passage], r: Random) -> list[Ask]:
    """At most two questions for spans of the passages; none of notices and pieces, which say the same again."""
    if kind in ("updates", "documents"):
        return []
    chance = QUOTED if any(not p.facts for p in kept) else QUOTED_INVENTED
    return quoting.asks_of(kept, "train", r, r.randint(1, 2)) if r.random() < chance else []


def _fitting(texts: Sequence[Sequence[int]], room: float) -> int:
    """How many of the passages, as token ids, fit; at least one."""
    ends = np.cumsum([len(ids) + 1 for ids in texts])
    return max(1, int((ends <= room).sum()))


def _at_most(questions: Sequence[Ask], room: int) -> Sequence[Ask]:
    """The first questions, more than fit into ``room`` tokens: what is cut off later need not be encoded."""
    ends = np.cumsum([len(a.question) + len(a.answer) + 12 for a in questions])
    return questions[: 1 + int((ends < CHARACTERS_PER_TOKEN * room).sum())]


def padded(row: Row, length: int, start: int = 0) -> Row:
    """``length`` tokens of the row from ``start``, with token 0 of weight 0 behind its end; a passage that begins
    before ``start`` is one no more."""
    ids, weights = row.ids[start : start + length], row.weights[start : start + length]
    missing = length - len(ids)
    spans = ((first - start, min(length, last - start)) for first, last in row.spans)
    kept = tuple((first, last) for first, last in spans if 0 <= first < last)
    return Row(np.pad(ids, (0, missing)), np.pad(weights, (0, missing)), kept)


def joined(first: Row, second: Row) -> Row:
    """One row behind the other."""
    ids, weights = np.concatenate([first.ids, second.ids]), np.concatenate([first.weights, second.weights])
    return Row(ids, weights, (*first.spans, *((len(first) + a, len(first) + b) for a, b in second.spans)))


def _plain_texts(corpus: Corpus, library: Library) -> tuple[str, ...]:
    prose = [text for country in corpus.countries for text in country.prose]
    articles = [a.text for a in library.articles]
    batches = ["\n\n".join(articles[i : i + 12]) for i in range(0, len(articles), 12)]
    sections = [speech[i : i + 24_000] for speech in corpus.speeches for i in range(0, len(speech), 24_000)]
    return tuple(batches * 2 + sections + ["\n\n".join(prose[i : i + 8]) for i in range(0, len(prose), 8)])

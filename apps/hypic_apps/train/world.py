"""Fictional worlds: invented things with facts, written up as passages, and questions that the passages answer.

Everything is invented, so that nothing can be answered from memory. Distractors are hard on purpose: the things of a
world share kinds, relations and family names. The generator is a function of its seed.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypic_apps.train import clues, related, variety
from hypic_apps.train.invented import Inventor
from hypic_apps.train.names import Names
from hypic_apps.train.passages import (
    Ask,
    Fact,
    Passage,
    ask,
    asked,
    capitalise,
    inserted,
    named,
    sentences,
    write,
)
from hypic_apps.train.schema import Relation, Schema, Split
from hypic_apps.train.sentences import first_sentence

KINDS = {
    "person": 5, "company": 4, "city": 3, "country": 3, "product": 3, "handbook": 2, "project": 3, "meeting": 2,
    "task": 2, "museum": 2, "book": 2, "film": 2, "festival": 1, "river": 1, "mountain": 1, "animal": 2, "club": 1,
}  # fmt: skip


@dataclass
class World:
    """The names in use and the facts told; a plain workbench of one example."""

    names: Names
    schema: Schema
    split: Split
    r: Random
    filler: Sequence[str] = ()
    held_out_relations: bool = False
    inventor: Inventor | None = None
    used: set[str] = field(default_factory=set)
    facts: list[Fact] = field(default_factory=list)
    families: tuple[str, ...] = ()
    is_crowded: bool = False  # names are often like others of this world, or go on from them

    def name(self, kind: str) -> str:
        """A name not yet used; people often share a family name with others of this world."""
        for _ in range(20):
            made = self.names.of(kind, self.r)
            if kind == "person" and self.r.random() < 0.4:
                made = f"{made.split()[0]} {self.r.choice(self.shared_families())}"
            if self.is_crowded:
                made = variety.resembling(self, kind, made)
            if made.lower() not in self.used:
                break
        self.used.add(made.lower())
        return made

    def shared_families(self) -> tuple[str, ...]:
        """Family names that several people of this world bear."""
        if not self.families:
            self.families = tuple(self.names.surname(self.r) for _ in range(3))
        return self.families

    def relations(self, kind: str) -> list[Relation]:
        """The relations that this split may tell of a kind."""
        return [x for x in self.schema[kind] if self.held_out_relations or not x.held_out]

    def thing(self, kind: str, most: int, subject: str | None = None) -> list[Fact]:
        """A thing of a kind, a new one unless named, with one to ``most`` facts; values that are things are often
        shared with others."""
        subject = subject or self.name(kind)
        relations = [x for x in self.relations(kind) if not x.invented]
        chosen = self.r.sample(relations, min(len(relations), self.r.randint(1 if most < 3 else 2, most)))
        if {"lifespan", "birth_year"} <= {x.key for x in chosen} or {"lifespan", "death_year"} <= {
            x.key for x in chosen
        }:
            chosen = [x for x in chosen if x.key != "lifespan"]
        if self.split == "train":
            chosen = related.told(self, kind, clues.disguised(self, kind, variety.varied(self, kind, chosen, most)))
        facts = [Fact(kind, subject, relation, self.value(kind, relation)) for relation in chosen]
        if self.split == "test":
            return facts
        return [fact for fact in facts if fact.value != subject] or facts  # nobody is his own successor

    def value(self, kind: str, relation: Relation) -> str:
        """A value; one in five repeats a value some other thing of the world has."""
        if relation.value in KINDS and self.r.random() < 0.35:
            known = [f.subject for f in self.facts if f.kind == relation.value]
            if known:
                return self.r.choice(known)
        if self.r.random() < 0.1:
            known = [f.value for f in self.facts if f.relation.value == relation.value != "choice"]
            if known:
                return self.r.choice(known)
        made = self.names.value(relation, self.r)
        if relation.value == "person" and self.r.random() < 0.3:
            made = f"{made.split()[0]} {self.r.choice(self.shared_families())}"
        return variety.resembling(self, relation.value, made) if self.is_crowded else made

    def passages(self, number: int, most_facts: int) -> list[Passage]:
        """``number`` passages about as many things, of a few kinds."""
        kinds = self.r.choices(list(KINDS), list(KINDS.values()), k=self.r.randint(1, 5))
        out = []
        for _ in range(number):
            kind = self.r.choice(kinds)
            if self.split == "train" and self.r.random() < variety.ROSTERS and kind not in variety.UNINVENTED:
                out.append(variety.roster(self, kind))
                continue
            bridge = self.bridge() if self.split == "train" else None
            if bridge is not None:
                out.append(self.one(bridge.relation.value, most_facts, bridge.value))
                continue
            out.append(self.minutes() if kind == "meeting" and self.r.random() < 0.5 else self.one(kind, most_facts))
        return out

    def bridge(self) -> Fact | None:
        """In training, now and then, a fact whose value is a thing that no passage is about yet: the next one will be,
        so that there are two steps to ask for."""
        if self.r.random() >= variety.BRIDGED:
            return None
        told = {fact.subject.lower() for fact in self.facts}
        open_ends = [f for f in self.facts if f.relation.value in KINDS and f.value.lower() not in told]
        return self.r.choice(open_ends) if open_ends else None

    def one(self, kind: str, most_facts: int, subject: str | None = None) -> Passage:
        """A passage about one thing, a new one unless named, with a question per fact."""
        if kind == "handbook" and "handbook" in self.used:
            kind = "project"  # a second handbook would make questions without a subject ambiguous
        facts = self.thing(kind, most_facts, subject)
        self.used.add(facts[0].subject.lower())
        alone = kind == "handbook" and not any(f.kind == "handbook" for f in self.facts) and self.r.random() < 0.6
        self.facts += facts
        if alone:
            self.used.add("handbook")
        text = write(facts, self.split, self.r, self.filler, impersonal=alone)
        if self.split == "train" and self.r.random() < variety.MENTIONED:
            text += " " + variety.mention(self)
        asks = tuple(self.ask(f, impersonal=alone and self._only_handbook()) for f in facts)
        return Passage(text, first_sentence(text), asks, tuple(facts))

    def ask(self, fact: Fact, *, impersonal: bool = False) -> Ask:
        """A one-hop question about a fact of this world."""
        return clues.ask_for(self, fact, impersonal=impersonal)

    def minutes(self) -> Passage:
        """Minutes of a meeting: its facts, then who does what by when."""
        facts = self.thing("meeting", 4)
        tasks = [fact for _ in range(self.r.randint(1, 3)) for fact in self.thing("task", 2)]
        self.facts += [*facts, *tasks]
        lines = sentences(facts, self.split, self.r)
        done = self._agreed(tasks)
        heading = self.r.choice(["Minutes of ", "Notes from ", "Report on "]) + facts[0].subject
        if self.r.random() < 0.5:
            text = f"{heading}\n" + "\n".join(f"- {line}" for line in [*lines, *done])
        else:
            text = f"{heading}\n\n" + " ".join(lines + done)
        told = (*facts, *tasks)
        return Passage(text, first_sentence(text), tuple(ask(f, self.split, self.r) for f in told), told)

    def _agreed(self, tasks: Sequence[Fact]) -> list[str]:
        """Who does what, and by when: often in one sentence, as minutes have it."""
        out: list[str] = []
        for place, fact in enumerate(tasks):
            before = tasks[place - 1] if place else fact
            is_due = fact.relation.key == "due" and before.relation.key == "owner" and before.subject == fact.subject
            if is_due and self.r.random() < 0.6:
                out[-1] = f"{out[-1].rstrip('.')} {self.r.choice(['by', 'before', 'no later than'])} {fact.value}."
            else:
                out += sentences([fact], self.split, self.r)
        return out

    def _only_handbook(self) -> bool:
        return len({f.subject for f in self.facts if f.kind == "handbook"}) == 1

    def extra_asks(self) -> list[Ask]:
        """Questions that need more than one fact's own passage: reversed, not stated, two steps."""
        return [*self.reversed_asks(), *self.unstated_asks(2), *self.two_hop_asks(4)]

    def reversed_asks(self) -> list[Ask]:
        """The value is given, the thing is asked for; only where exactly one thing has that value."""
        counts = Counter((f.relation.key, f.value) for f in self.facts)
        told = [f for f in self.facts if f.relation.reverse and counts[f.relation.key, f.value] == 1]
        return [
            Ask(
                "reverse",
                inserted(self.r.choice(f.relation.asked_back(self.split)), "{o}", f.value, self.split),
                f.subject,
                (f,),
            )
            for f in told
        ]

    def training_asks(self, number: int) -> list[Ask]:
        """What is asked in training besides one question per fact, for a context with ``number`` of those."""
        backwards = self.reversed_asks()
        self.r.shuffle(backwards)
        return [
            *backwards[: 1 + number // 12],
            *self.unstated_asks(self.r.randint(0, 1 + number // 20)),
            *self.lacked_asks(number // 21),
            *self.unknown_asks(self.r.randint(0, 1 + number // 40)),
            *self.two_hop_asks(2 + number // 3),
        ]

    def unknown_asks(self, number: int) -> list[Ask]:
        """Questions about things that no passage tells of, some with a family name or a kind that others have too."""
        out = []
        for _ in range(number):
            kind = self.r.choice(
                sorted({f.kind for f in self.facts if f.kind not in ("task", "handbook")} or {"person"})
            )
            relation = self.r.choice(self.relations(kind))
            named = inserted(asked(relation, self.split, self.r), "{s}", self.name(kind), self.split)
            out.append(Ask("none", named, NOT_STATED))
        return out

    def lacked_asks(self, number: int) -> list[Ask]:
        """Plain questions for what a thing lacks and another of its kind has, about ``number`` things at most."""
        subjects = sorted({(f.kind, f.subject) for f in self.facts if f.kind not in ("task", "handbook")})
        self.r.shuffle(subjects)
        found = (variety.lacking(self, kind, subject) for kind, subject in subjects)
        near = ((subject, self.r.choice(x)) for (_, subject), x in zip(subjects, found, strict=True) if x)
        worth = ((subject, x) for subject, x in near if variety.is_worth_asking(self, subject, x))
        return [
            Ask("none", inserted(self.r.choice(x.asked(self.split)), "{s}", subject, self.split), NOT_STATED)
            for subject, x in itertools.islice(worth, number)
        ]

    def unstated_asks(self, number: int) -> list[Ask]:
        """Relations that no passage states; the answer says so."""
        told = {(f.subject, f.relation.key) for f in self.facts}
        subjects = sorted({(f.kind, f.subject) for f in self.facts if f.kind not in ("task", "handbook")})
        out: list[Ask] = []
        for kind, subject in self.r.sample(subjects, min(number, len(subjects))):
            if self.split == "train" and self.r.random() < clues.MISSING:
                found = clues.missing_clue(self, kind, subject, self.relations(kind))
                out += [Ask("none", found, NOT_STATED)] if found else []
                continue
            missing = [x for x in self.relations(kind) if (subject, x.key) not in told and x.key not in variety.IMPLIED]
            if self.split == "train":
                missing = variety.missing(self, kind, subject, missing)
            if missing:
                template = asked(self.r.choice(missing), self.split, self.r)
                out.append(Ask("none", inserted(template, "{s}", subject, self.split), NOT_STATED))
        return out

    def two_hop_asks(self, number: int) -> list[Ask]:
        """A relation of a relation, both told ("the river of the capital of X"); half want a reasoning line."""
        by_subject: dict[str, list[Fact]] = {}
        for fact in self.facts:
            by_subject.setdefault(fact.subject, []).append(fact)
        told = [fact for fact in self.facts if fact.kind not in ("task", "handbook")]
        pairs = [(a, b) for a in told for b in by_subject.get(a.value, ()) if b.value != a.subject]
        chosen = self.r.sample(pairs, min(number, len(pairs)))
        if self.split == "train":  # a reasoning line takes more to learn: most questions ask for one
            return [self.two_hop(first, second, think=self.r.random() < 0.77) for first, second in chosen]
        return [self.two_hop(first, second, think=number % 2 == 1) for number, (first, second) in enumerate(chosen)]

    def two_hop(self, first: Fact, second: Fact, *, think: bool) -> Ask:
        """The question that joins two facts; with ``think`` the answer states both before it answers."""
        joint = _joined(asked(second.relation, self.split, self.r), first, variety.bridging(self, first))
        if not think:
            return Ask("2hop", joint, second.value, (first, second))
        steps = f"The {first.relation.noun} of {named(first)} is {first.value}. "
        steps += f"The {second.relation.noun} of {named(second)} is {second.value}."
        return Ask("2hop_think", f"{joint} {THINK}", f"{steps}\n{FINALLY} {second.value}", (first, second))


NOT_STATED = "not stated"
THINK = 'Reason in one line, then write "Answer:" and the answer.'
FINALLY = "Answer:"


def _joined(template: str, first: Fact, noun: str) -> str:
    bridge = f"the {noun} of {named(first)}"
    return capitalise(re.sub(r"\b[Tt]he \{s\}", "{s}", template).replace("{s}", bridge))

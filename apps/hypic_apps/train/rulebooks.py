"""Handbooks and other prose of rules, cut at headings into passages, with questions that name no subject.

One book has several facts of one kind of value in a passage ("27 days", "two days", "30 days"): only the words of the
question tell which is asked for. Within a context no word stands in two rules, so a question means one of them.
For training; worlds of names kept for measuring are told and asked in the wordings that training leaves out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from hypic_apps.train import measures
from hypic_apps.train.passages import JOINED, Ask, Fact, Passage, asked, capitalise, in_the_midst, said
from hypic_apps.train.rules import Drawn, Rule, Rules, lists_of, put_in, words_for
from hypic_apps.train.schema import Relation
from hypic_apps.train.sentences import first_sentence
from hypic_apps.train.variety import told_apart
from hypic_apps.train.world import NOT_STATED, World

KIND = "rules"
# Lists of words that are also kinds of values.
VALUE_LISTS = ("role", "object", "place", "gear", "what")
# What such a text is called, and the names of those who have one, with {t} for a town or a coined word.
BOOKS = (
    "House rules", "Handbook", "Rules of use", "Statutes", "Guide for members", "Terms", "Information for visitors",
    "Terms of rental", "Manual", "Welcome booklet", "Regulations", "Leaflet", "Rules", "Good to know",
    "Notes for newcomers",
)  # fmt: skip
STAFF_BOOKS = ("Staff rules", "Personnel manual", "Rules of work", "Guide for staff", "Working with us")
OWNERS = (
    "{t} School", "{t} Rowing Club", "{t} Library", "{t} Hostel", "{t} Museum", "{t} Swimming Pool", "{t} Campsite",
    "the {t} Theatre", "{t} House", "{t} Court", "{t} Music School", "{t} Hospital", "the {t} Choir",
    "{t} Kindergarten", "{t} Farm", "{t} Boat Rental", "the {t} Workshop", "{t} Sports Club", "{t} Gardens",
    "{t} Students' Residence",
)  # fmt: skip
# Shares: of rules in one section that are of the same form or two, of sections without a heading, of sentences that
# state nothing between others, of questions that name the house, of facts asked twice, of books that are a company's,
# and of contexts with a question that no rule answers.
ALIKE, HEADLESS, PLAIN, NAMED, TWICE, STAFF, MISSING = 0.45, 0.2, 0.3, 0.07, 0.3, 0.4, 0.3
ELSEWHERE = 0.2
LEADS = (
    "# {h}\n\n",
    "## {h}\n\n",
    "{h}\n",
    "{h}\n\n",
    "{h}: ",
    "### {h}\n",
    "{n}. {h}\n\n",
    "§ {n} {h}\n",
    "{n} {h}\n",
)


@dataclass(frozen=True)
class Line:
    """A sentence, how it goes on from another one if it may, and what can be asked about it."""

    text: str
    in_the_midst: str
    asks: tuple[Ask, ...] = ()


@dataclass(frozen=True)
class Book:
    """A rulebook in the making: whose it is, how it is headed, and which money it counts in."""

    owner: str
    title: str
    lead: str
    unit: str
    is_staff: bool


class Rulebooks:
    """Draws sections of rulebooks for a world."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def passages(self, world: World, number: int, used: set[str] | None = None) -> list[Passage]:
        """``number`` sections, in order, of one or two rulebooks; the last may ask for what no rule states.

        ``used`` are words of rules that were told before, where these must not be; the new ones are put in.
        """
        r, used = world.r, set() if used is None else used
        split = r.randint(1, number) if number > 2 and r.random() < 0.3 else number
        out: list[Passage] = []
        for size in (split, number - split):
            out += self._book(world, size, used) if size else []
        missing = self._missing(world, used) if r.random() < MISSING else None
        if missing is not None:
            out[-1] = replace(out[-1], asks=(*out[-1].asks, missing))
        return out

    def _book(self, world: World, number: int, used: set[str]) -> list[Passage]:
        r = world.r
        is_staff = r.random() < STAFF and "handbook" not in world.used | used
        owner = world.name("company") if is_staff else _owner(world)
        name = r.choice(STAFF_BOOKS if is_staff else BOOKS)
        title = r.choice(["{o}: {n}", "{n} of {o}", "{n}, {o}"]).replace("{n}", name).replace("{o}", owner)
        book = Book(owner, title, r.choice(LEADS), r.choice(measures.UNITS), is_staff)
        if is_staff:
            world.used.add("handbook")
            used.add("handbook")
        topics = [x for x in self.rules.by_topic if x != "intro"]
        chosen = ["intro"] * (r.random() < (0.6 if number > 1 else 0.25)) + r.sample(topics, min(number, len(topics)))
        own = _staff_facts(world, owner, number) if is_staff else []
        return [
            self._section(world, book, topic, place, own[place::number], used)
            for place, topic in enumerate(chosen[:number])
        ]

    def _section(
        self, world: World, book: Book, topic: str, place: int, own: Sequence[Fact], used: set[str]
    ) -> Passage:
        """A passage of a book: a heading, mostly, and rules on its topic; ``own`` are facts of a company's handbook."""
        r = world.r
        made = [_of_staff(fact, world) for fact in own]
        for rule in self._chosen(topic, r):
            found = self._told(world, book, rule, used)
            made += [found] if found else []
        made = made or [self._told_any(world, book, used)]
        r.shuffle(made)
        lines = [line for told in made for line in (told, *self._plain(world))]
        text = _head(book, r.choice(self.rules.headings[topic]), place, r) + _body(lines, r)
        asks = tuple(ask for line in made for ask in line.asks)
        return Passage(text, first_sentence(text), asks, tuple({id(a.about[0]): a.about[0] for a in asks}.values()))

    def _chosen(self, topic: str, r: Random) -> list[Rule]:
        """The rules of a section: of its topic, often all of one form or two, and a few from elsewhere."""
        pool = self.rules.by_topic[topic]
        if topic == "intro":
            return r.sample(pool, min(len(pool), r.randint(1, 3)))
        if r.random() < ALIKE:
            pool = tuple(r.sample(pool, min(len(pool), r.randint(1, 2))))
        every = [rule for name, found in self.rules.by_topic.items() if name != "intro" for rule in found]
        return [r.choice(every if r.random() < ELSEWHERE else pool) for _ in range(r.randint(1, 6))]

    def _told_any(self, world: World, book: Book, used: set[str]) -> Line:
        """Any rule that is not told yet; where none is found, a sentence that states nothing."""
        for _ in range(20):
            found = self._told(world, book, world.r.choice(self.rules.by_topic["money"]), used)
            if found:
                return found
        return _line(f"{book.owner} has no further rules.", begins_small=False)

    def _told(self, world: World, book: Book, rule: Rule, used: set[str]) -> Line | None:
        """A rule in a sentence with the questions it answers, or nothing where it would be told twice."""
        r, inventor = world.r, world.inventor
        identity = rule.key.rstrip("0123456789") + (book.owner if rule.names_house else "")
        if identity in used and (rule.names_house or not rule.has_words):
            return None
        used.add(identity)
        drawn = words_for(rule.lists, self.rules, used, r, inventor)
        if drawn is None:
            return None
        values = [self._value(world, book, kind, used) for kind in rule.values]
        told = {f"{{{'abc'[i]}}}": value[0] for i, value in enumerate(values)} | {"{s}": book.owner}
        called = {f"{{{'abc'[i]}}}": value[1] for i, value in enumerate(values)} | {"{s}": book.owner}
        template = r.choice(rule.told(world.split))
        asks = tuple(self._asks(rule, book, drawn, told, called, world))
        return _line(_filled(template, drawn.told, told), asks, begins_small=not template.startswith("{"))

    def _asks(
        self, rule: Rule, book: Book, drawn: Drawn, told: Mapping[str, str], called: Mapping[str, str], world: World
    ) -> Iterator[Ask]:
        r = world.r
        for slot in rule.asked:
            questions = rule.asked_for(slot, world.split)
            kind = rule.values["abc".index(slot)]
            relation = Relation(f"rule {rule.key} {slot}", kind, (), kind, rule.said, questions, invented=True)
            fact = Fact(KIND, book.owner, relation, told[f"{{{slot}}}"])
            for template in r.sample(questions, min(len(questions), 1 + (r.random() < TWICE))):
                words = drawn.called if r.random() < 0.6 else drawn.told
                asked_for = _filled(template, words, called if r.random() < 0.6 else told)
                yield Ask("1hop", _addressed(capitalise(asked_for), book, r), fact.value, (fact,))

    def _value(self, world: World, book: Book, kind: str, used: set[str]) -> tuple[str, str]:
        """A value as it is told and, for words with another of their meaning, as a question may call it."""
        r = world.r
        if kind == "fee":
            return (fee := measures.fee(r, book.unit)), fee
        if kind == "the_place":
            told, _ = self._value(world, book, "place", used)
            return f"the {told}", f"the {told}"
        if kind == "person":
            return (person := world.name("person")), person
        if kind in VALUE_LISTS:
            free = [x for x in self.rules.words[kind] if used.isdisjoint(x)] or self.rules.words[kind]
            found = r.choice(free)
            used.update(found)
            return r.choice(found), r.choice(found)
        made = measures.MAKERS[kind](r) if kind in measures.MAKERS else world.names.of(kind, r)
        return made, made

    def _plain(self, world: World) -> list[Line]:
        r = world.r
        if r.random() >= PLAIN:
            return []
        if world.filler and r.random() < 0.12:
            return [Line(r.choice(world.filler), "")]
        template = r.choice(self.rules.plain)
        drawn = words_for(lists_of((template,), self.rules.words), self.rules, set(), r, None)
        return [_line(put_in(template, drawn.told))] if drawn else []

    def _missing(self, world: World, used: set[str]) -> Ask | None:
        """A question for a rule that no section tells, nor any other with its words; none if all are told."""
        r = world.r
        pool = [x for name, found in self.rules.by_topic.items() if name != "intro" for x in found if x.has_words]
        book = Book(_owner(world), "", "", r.choice(measures.UNITS), is_staff=False)
        rule = r.choice([x for x in pool if len(x.values) == 1])
        found = self._told(world, book, rule, used)
        if found is None:
            return None
        return Ask("none", capitalise(found.asks[0].question.removeprefix(f"At {book.owner}, ")), NOT_STATED)


def _owner(world: World) -> str:
    town = world.names.of("city", world.r)
    owner = world.r.choice(OWNERS).replace("{t}", town)
    world.used.add(owner.lower())
    return owner


def _line(text: str, asks: tuple[Ask, ...] = (), *, begins_small: bool = True) -> Line:
    text = text.replace(".m..", ".m.")
    return Line(capitalise(text), text[:1].lower() + text[1:] if begins_small else text, asks)


def _filled(template: str, words: Mapping[str, str], values: Mapping[str, str]) -> str:
    text = put_in(template, words)
    return re.sub(r"\{[abcs]\}", lambda found: values[found.group()], text)


def _addressed(question: str, book: Book, r: Random) -> str:
    """The question, now and then with the house named before it."""
    if book.owner in question or not question.endswith("?") or r.random() >= NAMED:
        return question
    return f"At {book.owner}, {question[:1].lower()}{question[1:]}"


def _staff_facts(world: World, owner: str, number: int) -> list[Fact]:
    """Facts of a company's handbook, for a book of ``number`` sections."""
    relations = world.relations("handbook")
    chosen = world.r.sample(relations, min(len(relations), world.r.randint(number, 2 * number)))
    return [Fact("handbook", owner, x, world.value("handbook", x)) for x in told_apart(chosen)]


NAME_AFTER = re.compile(r",? (?:of|at|from|for|with|by) \{s\}(?!')")


def _of_staff(fact: Fact, world: World) -> Line:
    """A fact of a handbook, told and asked for without a name."""
    r = world.r
    template = re.sub(r"^At \{s\},? ", "", NAME_AFTER.sub("", said(fact.relation, world.split, r)))
    sentence = capitalise(template.replace("{o}", fact.value).replace("{s}", "the company")).replace(".m..", ".m.")
    question = NAME_AFTER.sub("", asked(fact.relation, world.split, r)).replace("{s}", "the company")
    return Line(sentence, in_the_midst(sentence), (Ask("1hop", capitalise(question), fact.value, (fact,)),))


def _head(book: Book, heading: str, place: int, r: Random) -> str:
    """What stands above a section: the book's title over the first, or over any, and the section's own heading."""
    title = f"# {book.title}\n\n" if place == 0 or r.random() < 0.1 else ""
    if r.random() < HEADLESS:
        return title
    return title + book.lead.replace("{h}", heading).replace("{n}", str(place + 1))


def _body(lines: Sequence[Line], r: Random) -> str:
    style = r.random()
    texts = [line.text for line in lines]
    if style < 0.1:
        return "\n".join(f"- {text}" for text in texts)
    if style < 0.16:
        return "\n".join(f"({i}) {text}" for i, text in enumerate(texts, 1))
    if style < 0.22:
        return "\n\n".join(texts)
    return " ".join(_joined(lines, r))


def _joined(lines: Sequence[Line], r: Random) -> list[str]:
    """The sentences, of which now and then two neighbours are made one."""
    out = [lines[0].text]
    for line in lines[1:]:
        is_open = out[-1].endswith(".") and not out[-1].endswith(".m.") and line.in_the_midst
        if is_open and r.random() < JOINED:
            out[-1] = out[-1][:-1] + r.choice(["; ", ", and ", ", while ", ", but ", " - "]) + line.in_the_midst
        else:
            out.append(line.text)
    return out

"""Rules without a subject, as handbooks, house rules and statutes state them: "A locker costs 15 euros".

``rules/*.txt`` says how such rules are stated and asked for, and which words may stand in their open places. A word may
have another of the same meaning, or be any of the dictionary: then a question may use the other one.
For training alone: what the demo's documents say is kept out, which a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from hypic_apps.train.invented import Inventor
from hypic_apps.train.passages import capitalise
from hypic_apps.train.schema import Split
from hypic_apps.train.words import article, past, plural

FOLDER = Path(__file__).parent / "rules"
PLACE = re.compile(r"<([Aa] )?(\w+)>")
LATER_NOUNS = re.compile(r" (?:of|for|in|with) ")
# Lists whose words do not make two rules different ones, and lists that any word of the dictionary may stand for.
OF_LISTS = frozenset({"role", "object", "place"})
SAID_OF_ANY = ("done", "handled")
FROM_DICTIONARY = {"item": 0.3, "things": 0.3, "object": 0.2, "checkable": 0.3, "ticket": 0.2, "place": 0.15}
VERB_FROM_DICTIONARY = 0.2
SEVERAL = ("things", "checkable")

Words = Mapping[str, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True)
class Rule:
    """A rule with open places: {a} to {c} for its ``values``, by kind, ``<name>`` for a word of one of ``lists``."""

    key: str
    topic: str
    values: tuple[str, ...]
    said: tuple[str, ...]
    asked: Mapping[str, tuple[str, ...]]
    lists: tuple[str, ...] = ()

    @property
    def names_house(self) -> bool:
        """Whether the house itself is named."""
        return "{s}" in self.said[0]

    def told(self, split: Split) -> tuple[str, ...]:
        """Statements of a split: the last one is for ``test`` alone."""
        return self.said[:-1] if split == "train" else self.said[-1:]

    def asked_for(self, slot: str, split: Split) -> tuple[str, ...]:
        """Questions for a value: the last one is for ``test`` alone."""
        return self.asked[slot][:-1] if split == "train" else self.asked[slot][-1:]

    @property
    def has_words(self) -> bool:
        """Whether words or a value out of a list tell the rule from others of its form."""
        return bool(PLACE.search(self.said[0])) or not OF_LISTS.isdisjoint(self.values)


@dataclass(frozen=True)
class Rules:
    """All rules by topic, the headings of topics, the words of lists, and sentences that state nothing."""

    by_topic: Mapping[str, tuple[Rule, ...]]
    headings: Mapping[str, tuple[str, ...]]
    words: Words
    plain: tuple[str, ...]


@dataclass
class Drawn:
    """Words put into open places: the ones told, and the ones asked with."""

    told: dict[str, str] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)


def load(folder: Path = FOLDER) -> Rules:
    """The rules of the project."""
    words = dict(_lists(folder / "words.txt"))
    headings: dict[str, tuple[str, ...]] = {}
    by_topic: dict[str, tuple[Rule, ...]] = {}
    for line in _lines(folder / "rules.txt"):
        if line.startswith("@"):
            topic, _, rest = line[1:].partition(": ")
            headings[topic] = _parts(rest)
    for rule in _rules(folder / "rules.txt"):
        lists = lists_of((*rule.said, *(q for found in rule.asked.values() for q in found)), words)
        by_topic[rule.topic] = (*by_topic.get(rule.topic, ()), replace(rule, lists=lists))
    return Rules(by_topic, headings, words, tuple(_lines(folder / "plain.txt")))


def lists_of(templates: Iterable[str], words: Words) -> tuple[str, ...]:
    """The lists out of which words stand in templates."""
    names = (name.lower() for template in templates for _, name in PLACE.findall(template))
    return tuple(dict.fromkeys(name if name in words else name.removesuffix("s") for name in names))


def _lines(path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return (line for line in lines if line.strip() and not line.startswith("#"))


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(" / "))


def _lists(path: Path) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
    for line in _lines(path):
        name, _, rest = line.partition(": ")
        yield name, tuple(tuple(word.split("=")) for word in rest.split(", "))


def _rules(path: Path) -> Iterator[Rule]:
    """Every rule of a file.

    Raises:
        ValueError: a line is none of the known forms.
    """
    topic, head = "", ""
    said, asked = tuple[str, ...](), dict[str, tuple[str, ...]]()
    for line in [*_lines(path), "@"]:
        if line[0] in "@[" and head:
            key, _, values = head[1:].partition("] ")
            yield Rule(key, topic, tuple(values.split(", ")), said, asked)
            head, asked = "", {}
        if line[0] == "@":
            topic = line[1:].partition(": ")[0]
        elif line[0] == "[":
            head = line
        elif line[0] == "=":
            said = _parts(line[2:])
        elif line[0] == "?":
            asked[line[1]] = _parts(line[3:])
        else:
            raise ValueError(f"{path.name} has the line {line[:40]!r}; begin it with @ [ = ? or #.")


def draw(rules: Rules, name: str, used: set[str], r: Random, inventor: Inventor | None) -> tuple[str, ...] | None:
    """A word of a list that was not used yet, with others of its meaning; now and then one of the dictionary.

    Nothing where twenty tries found only used ones.
    """
    for _ in range(20):
        found = _from_dictionary(name, r, inventor) or r.choice(rules.words[name])
        if used.isdisjoint(found):
            return found
    return None


def _from_dictionary(name: str, r: Random, inventor: Inventor | None) -> tuple[str, ...] | None:
    if inventor is None:
        return None
    if name in ("done", "handled"):
        return (past(r.choice(inventor.verbs)),) if r.random() < VERB_FROM_DICTIONARY else None
    if r.random() >= FROM_DICTIONARY.get(name, 0.0):
        return None
    noun, others = r.choice(inventor.known_nouns) if inventor.known_nouns else (r.choice(inventor.nouns), ())
    pair = (noun, r.choice(others)) if others and r.random() < 0.6 else (r.choice(inventor.nouns),)
    return tuple(plural(word) for word in pair) if name in SEVERAL else pair


def words_for(lists: Sequence[str], rules: Rules, used: set[str], r: Random, inventor: Inventor | None) -> Drawn | None:
    """Words out of ``lists``, used from then on if they tell a rule from others; nothing if a list is used up."""
    drawn = Drawn()
    for name in lists:
        found = draw(rules, name, used, r, inventor)
        if found is None:
            return None
        if name not in SAID_OF_ANY:
            used.update(found)
        # of a word of the dictionary the second one is for questions, and may be a wider one
        drawn.told[name] = found[0] if len(found) > 1 and found not in rules.words[name] else r.choice(found)
        drawn.called[name] = r.choice(found)
    return drawn


def put_in(template: str, words: Mapping[str, str]) -> str:
    """The template with words in its places: several, with an article or with a capital where the place says so."""

    def word(found: re.Match[str]) -> str:
        lead, name = found.groups()
        low = name.lower()
        told = words[low] if low in words else plural_of(words[low.removesuffix("s")])
        if lead:
            told = f"{article(told)} {told}"
        is_capital = (lead or name)[0].isupper()
        return capitalise(told) if is_capital else told

    return PLACE.sub(word, template)


def plural_of(phrase: str) -> str:
    """The plural of a noun that may have others behind it: "pair of skates", "pairs of skates"."""
    later = LATER_NOUNS.search(phrase)
    return plural(phrase) if later is None else plural(phrase[: later.start()]) + phrase[later.start() :]

"""Words that mean about the same, out of WordNet: what a question may say where the text says it otherwise.

Only what is common and plain is kept: a word's first sense, where that is the one mostly meant, and of the words of
that sense those of which it is the first sense too. ``wider`` are names of what contains it ("price": "cost"), ``made``
words made from it ("own": "owner").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hypic_apps.train.words import article, is_regular, past, plural, present_participle, third

PARTS = {"noun": "n", "verb": "v", "adj": "a"}
NUMBERS = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
WORD = re.compile(r"[a-z]{3,12}")
# How often a first sense must have been met in WordNet's texts, and its share of all meetings with the word.
LEAST_MET, LEAST_SHARE = 2, 0.5
# Right by the dictionary, and wrong or odd in most sentences: neither exchanged nor put in for another.
UNWANTED = frozenset(
    "accomplished associate award bask being brag brook careworn central child class commission concluding conquer "
    "consequence croak cuddle curse cuss cuts delivery delve done document drawn elevation employ encumbrance "
    "engagement enrolled essay expletive extended fledgling fly foreman fulfil girl given granted grapple group "
    "growing growth haggard hall hapless have heroine hold integrate incisive inhabit journeying keen keep kid "
    "lasting launch learned let letter level link live looking majority make man mark marked men milieu min mind "
    "minute miss missive mortal motionless move naught nestle noted nothing nutrient nuzzle oath observe one part "
    "partner penetrating perched permanent person petite plague plain plan plant please plenty plenitude poignant "
    "poor populate power prisoner procedure process promotion province publicity put quit realm reason receipt "
    "recruit regime relate roost said salvage sanction save say scheme seat seated selling show single sis sister "
    "snake snuggle sounding sport state static still stray style stylemark suppress swear tears term thing through "
    "tolerate touching trademark transcend travel try vie voter watching weeping wedding whole winter withstand "
    "works wrapped vacate unit upshot wing notice director".split()
)


@dataclass(frozen=True)
class Entry:
    """A word, its part of speech (n, v or a), and its kin; ``is_mostly`` where other parts of speech are rare."""

    word: str
    pos: str
    same: tuple[str, ...]
    wider: tuple[str, ...]
    made: tuple[tuple[str, str], ...]
    is_mostly: bool


class Thesaurus:
    """Entries by word, and the forms of words that can be exchanged in a text."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = tuple(entries)
        self._forms = dict(_forms(entries))

    def others(self, word: str) -> tuple[str, ...]:
        """Words of the same meaning in the same form, of a word in any regular form; mostly none."""
        return self._forms.get(word, ())

    def reworded(self, template: str) -> Iterator[str]:
        """The template with one word exchanged, in all ways."""
        words = template.split(" ")
        for place, word in enumerate(words):
            bare = word.rstrip(".,;:?!")
            for other in self.others(bare):
                changed = [*words]
                changed[place] = other + word[len(bare) :]
                if place and words[place - 1] in ("a", "an"):
                    changed[place - 1] = article(other)
                yield " ".join(changed)


def _forms(entries: Sequence[Entry]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for entry in entries:
        others = tuple(word for word in entry.same if word not in UNWANTED)
        if not others or not entry.is_mostly or entry.word in UNWANTED:
            continue
        yield entry.word, others
        if entry.pos == "n":
            yield plural(entry.word), tuple(plural(word) for word in others)
        regular = tuple(word for word in others if is_regular(word))
        if entry.pos == "v" and regular and is_regular(entry.word):
            for form in (past, third, present_participle):
                yield form(entry.word), tuple(form(word) for word in regular)


def read(rows: Sequence[Mapping[str, object]]) -> tuple[Entry, ...]:
    """The entries of an archive's rows, as ``build`` made them."""
    return tuple(_entry(row) for row in rows)


def _entry(row: Mapping[str, object]) -> Entry:
    values = {key: _frozen(value) for key, value in row.items()}
    return Entry(**values)  # type: ignore[arg-type]  # rows are what build wrote


def _frozen(value: object) -> object:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Sets:
    """WordNet's files: words, pointers and kind of every set of synonyms, senses of every word with how often each is
    met."""

    words: dict[tuple[str, str], list[str]]
    pointers: dict[tuple[str, str], list[list[str]]]
    senses: dict[tuple[str, str], list[str]]
    met: Counter[tuple[str, str, str]]
    kinds: dict[tuple[str, str], str]

    def counts(self, word: str, pos: str) -> list[int]:
        """How often each sense of the word is met, in the order of the senses."""
        return [self.met[word, pos, sense] for sense in self.senses.get((word, pos), ())]

    def is_plain(self, word: str, pos: str, sense: str) -> bool:
        """Whether the sense is the word's first one, and is used."""
        senses = self.senses.get((word, pos), [""])
        return bool(WORD.fullmatch(word)) and senses[0] == sense and self.met[word, pos, sense] > 0


def build(files: Mapping[str, str]) -> Iterator[dict[str, object]]:
    """Rows of the thesaurus out of WordNet's ``data.*``, ``index.noun``, ``.verb``, ``.adj`` and ``.sense``."""
    sets = read_sets(files)
    for (word, pos), senses in sorted(sets.senses.items()):
        counts = sets.counts(word, pos)
        if not WORD.fullmatch(word) or counts[0] < max(LEAST_MET, LEAST_SHARE * sum(counts)):
            continue
        same = [x for x in sets.words[pos, senses[0]] if x != word and sets.is_plain(x, pos, senses[0])]
        wider, made = list(_pointed(sets, word, pos, "@")), list(_pointed(sets, word, pos, "+"))
        if same or wider or made:
            elsewhere = sum(sum(sets.counts(word, other)) for other in NUMBERS.values() if other != pos)
            yield {
                "word": word, "pos": pos, "same": same, "wider": [x for x, _ in wider], "made": made,
                "is_mostly": sum(counts) >= 4 * elsewhere,
            }  # fmt: skip


def _pointed(sets: Sets, word: str, pos: str, mark: str) -> Iterator[tuple[str, str]]:
    """Words that the word's first sense points to by ``mark``, each with its part of speech."""
    sense = sets.senses[word, pos][0]
    place = [x.lower() for x in sets.words[pos, sense]].index(word) + 1
    for kind, target, part, ends in sets.pointers[pos, sense]:
        if kind != mark or part not in PARTS.values() or int(ends[:2], 16) not in (0, place):
            continue
        found = sets.words[part, target]
        chosen = found if ends == "0000" else [found[int(ends[2:], 16) - 1]]
        yield from ((x, part) for x in chosen if x != word and sets.is_plain(x, part, target))


def read_sets(files: Mapping[str, str]) -> Sets:
    """WordNet's files, read."""
    found = Sets({}, {}, {}, Counter(), {})
    for name, text in files.items():
        kind, _, part = name.rpartition("/")[2].partition(".")
        lines = (line for line in text.splitlines() if line and line[0] != " ")
        if part == "sense":
            _read_met(lines, found)
        elif kind == "index" and part in PARTS:
            for fields in map(str.split, lines):
                found.senses[fields[0], PARTS[part]] = fields[6 + int(fields[3]) :]
        elif kind == "data" and part in PARTS:
            _read_data(lines, PARTS[part], found)
    return found


def _read_met(lines: Iterator[str], found: Sets) -> None:
    for key, sense, _, times in map(str.split, lines):
        word, _, rest = key.partition("%")
        place = word, NUMBERS[rest[0]], sense
        found.met[place] = max(found.met[place], int(times))


def _read_data(lines: Iterator[str], pos: str, found: Sets) -> None:
    for line in lines:
        fields = line.split("|", 1)[0].split()
        number = int(fields[3], 16)
        found.kinds[pos, fields[0]] = fields[1]
        found.words[pos, fields[0]] = [re.sub(r"\([a-z]+\)$", "", w) for w in fields[4 : 4 + 2 * number : 2]]
        start = 5 + 2 * number
        ends = start + 4 * int(fields[start - 1])
        found.pointers[pos, fields[0]] = [fields[i : i + 4] for i in range(start, ends, 4)]

"""Names of invented things and values of their relations, in two disjoint pools: one to train on, one to measure with.

A name part belongs to the pool its hash says, so the pools never share a surname, a town or a coined word.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from hypic_apps.train.corpus import Corpus
from hypic_apps.train.schema import Relation, Split

ONSETS = (
    "Vel Mar Tor Kel Ost Bran Lun Sar Quil Dor Fen Hal Ir Jas Nor Pel Rav Sel Ul Wes Zan Cal Ard Gol Thr El "
    "Bex Dun Har Kor Lin Mor Pra Ros Sten Tal Ver Wil Yar Zel"
).split()
MIDDLES = ["", *"a o i e an or ir en ul av ost eth ari ell umb ov is and erm ach".split()]
ENDINGS = "ia mark stan land ora heim wick dor is una ford ga vale mere ton by burg ano esh ix um elle".split()
ADJECTIVES = (
    "Silent Blue Crimson Last Hidden Golden Northern Broken Distant Paper Iron Winter Hollow Bright Seventh "
    "Quiet Burning Salt Green Lost Copper Amber Frozen Velvet Second Wild Secret Early Long Empty"
).split()
NOUNS = (
    "Harbor Garden River Lantern Orchard Mirror Bridge Compass Meadow Signal Castle Tide Archive Horizon "
    "Bell Feather Station Island Letter Mountain Window Forest Anchor Beacon Summit Valley Falcon Needle "
    "Ladder Stone"
).split()
FIRMS = (
    "Group Works Labs Industries Partners Systems Foods Lines Tools Logistics Energy Media Textiles "
    "Instruments Bank Robotics Ltd Brothers Trading Studios"
).split()
THINGS = (
    "lamp kettle drill speaker camera router scanner heater fan tractor tent watch bicycle radio pump "
    "keyboard monitor printer sensor charger helmet stove saw freezer"
).split()
BEASTS = (
    "marmot shrew finch otter gecko heron vole toad moth badger crane newt lemur hare wren turtle ibex "
    "thrush carp fox bat owl"
).split()
MARKS = (
    "grey-tailed long-eared red-footed spotted striped crested dwarf giant pale black-necked golden "
    "short-winged ringed horned blue-throated silver"
).split()
MONTHS = "January February March April May June July August September October November December".split()
COLOURS = "black white grey dark green navy blue red sand orange silver yellow brown turquoise cream purple".replace(
    "dark green", "dark-green"
).split()
VERBS = (
    "revise check send order prepare collect translate repair print review update compare test clean replace book"
).split()
JOBS = (
    "the budget draft|the safety checklist|the supplier list|the price list|the training plan|the fire doors|"
    "the invoices|the customer survey|the floor plan|the holiday calendar|the spare parts|"
    "the contract with the caterer|the press release|the user manual|the meeting rooms|the delivery notes|"
    "the tender documents|the coffee machine|the staff handbook|the website texts|the photo archive|"
    "the shift plan|the sample boxes|the name badges|the quarterly figures|the parking permits|"
    "the backup tapes|the warehouse lights"
).split("|")
TOPICS = (
    "budget safety planning sales design staff project board quality marketing purchasing steering kickoff editorial"
).split()
CLUBS = ("Rovers", "United", "Wanderers", "Athletic", "Falcons")
# Coined words that stand in the demo's documents.
DEMO = frozenset({"Norvale"})
COUNTS = "two three four five six eight nine ten twelve".split()


def _pool(words: Sequence[str], split: Split) -> tuple[str, ...]:
    wanted = split == "test"
    return tuple(w for w in words if (hashlib.sha256(w.encode()).digest()[1] % 8 == 0) == wanted)


def coined(split: Split) -> tuple[str, ...]:
    """The coined words of a split."""
    return _pool(sorted({"".join(parts) for parts in itertools.product(ONSETS, MIDDLES, ENDINGS)} - DEMO), split)


@dataclass(frozen=True)
class Names:
    """A split's name parts. ``of(kind, r)`` makes a name or value; ``r`` is the only source of chance."""

    first: tuple[str, ...]
    towns: tuple[str, ...]
    coined: tuple[str, ...]

    @classmethod
    def of_split(cls, corpus: Corpus, split: Split) -> Names:
        """The pool for training or for measuring."""
        return cls(_pool(corpus.first_names, split), _pool(corpus.cities, split), coined(split))

    def value(self, relation: Relation, r: Random) -> str:
        """A value for a relation."""
        return r.choice(relation.choices) if relation.choices else self.of(relation.value, r)

    def of(self, kind: str, r: Random) -> str:
        """A name or value of a kind.

        Raises:
            KeyError: there is no such kind.
        """
        return MAKERS[kind](self, r)

    def surname(self, r: Random) -> str:
        """A town or a coined word as a family name."""
        return r.choice(self.towns) if r.random() < 0.6 else r.choice(self.coined)


def _number(r: Random, low: int, high: int) -> str:
    # log-uniform, so that short and long numbers are about equally common
    n = int(low * (high / low) ** r.random())
    if r.random() < 0.3 and n > 500:
        n = n // 100 * 100
    return f"{n:,}" if n > 9999 or (n > 999 and r.random() < 0.6) else str(n)


def _money(n: Names, r: Random) -> str:
    unit = r.choice(["$", "€", "£"])
    if r.random() < 0.5:
        return f"{unit}{_number(r, 5, 900)},000"
    return (
        f"{r.randint(1, 99)}{r.choice(['', f'.{r.randint(1, 9)}'])} million {r.choice(['euros', 'dollars', 'pounds'])}"
    )


def _price(n: Names, r: Random) -> str:
    amount = str(r.randint(2, 990)) if r.random() < 0.7 else f"{r.randint(1, 300)}.{r.choice(['50', '90', '99', '20'])}"
    return f"{amount} {r.choice(['euros', 'dollars', 'pounds', 'crowns'])}" if r.random() < 0.6 else f"${amount}"


def _code(n: Names, r: Random) -> str:
    letters = "".join(r.choice("ABCDEFGHKLMNPQRSTVWXZ") for _ in range(r.randint(1, 3)))
    return f"{letters}-{r.randint(10, 99999)}"


def _clock(n: Names, r: Random) -> str:
    hour, minute = r.randint(6, 11), r.choice(["00", "15", "30", "45"])
    if r.random() < 0.5:
        return f"{hour} a.m." if minute == "00" else f"{hour}:{minute} a.m."
    return f"{hour}:{minute}"


def _hours(n: Names, r: Random) -> str:
    opening, closing = r.randint(7, 11), r.randint(4, 9)
    days = r.choice(["", "daily ", "Tuesday to Sunday ", "on weekdays ", "on Saturdays ", "every day "])
    return (
        f"{days}from {opening} a.m. to {closing} p.m."
        if r.random() < 0.7
        else f"{days}from {opening} to {closing + 12}"
    )


def _room(n: Names, r: Random) -> str:
    plain = [
        f"Room {r.randint(1, 9)}.{r.randint(10, 30)}",
        f"Room {r.randint(100, 499)}",
        f"conference room {r.choice('ABCDEF')}",
    ]
    named = [
        f"the {r.choice(ADJECTIVES)} Room",
        f"the {r.choice(n.towns)} Room",
        "the canteen",
        "the library",
        "the lobby",
    ]
    return r.choice(plain + named)


def _weekdays(n: Names, r: Random) -> str:
    day = r.choice(["Mondays", "Tuesdays", "Wednesdays", "Thursdays", "Fridays"])
    often = f"{r.choice(COUNTS[:3])} days a week"
    return r.choice([f"on {day}", often, f"up to {often}", "one day a week", f"{r.choice(COUNTS)} days a month"])


def _unit(low: int, high: int, *units: str) -> Callable[[Names, Random], str]:
    def make(n: Names, r: Random) -> str:
        amount = r.choice(COUNTS) if r.random() < 0.25 and high < 100 else str(r.randint(low, high))
        return f"{amount} {r.choice(units)}"

    return make


def _span(n: Names, r: Random) -> str:
    born = r.randint(1500, 1950)
    return f"{born}{r.choice(['–', '–', '-'])}{born + r.randint(24, 95)}"


def _date(n: Names, r: Random) -> str:
    day, month = r.randint(1, 28), r.choice(MONTHS)
    return f"{r.choice([f'{day} {month}', f'{month} {day}'])}{r.choice(['', '', f' {r.randint(2019, 2032)}'])}"


def _product(n: Names, r: Random) -> str:
    word = r.choice(n.coined)
    tail = [
        f" {r.randint(1, 9)}",
        f" {r.choice('XSRTMQ')}{r.randint(1, 90)}",
        f" {r.choice(THINGS)}",
        f" {r.randint(1, 9) * 100}",
        "",
    ]
    return word + r.choice(tail)


def _meeting(n: Names, r: Random) -> str:
    topic = r.choice(TOPICS)
    whose = r.choice(["", f" of {n.of('company', r)}", f" in {r.choice(n.towns)}", f" of {n.of('project', r)}"])
    return f"the {r.choice([f'{r.choice(MONTHS)} {topic}', topic, f'{topic} team'])} meeting{whose}"


def _title(n: Names, r: Random) -> str:
    plain = f"The {r.choice(ADJECTIVES)} {r.choice(NOUNS)}"
    more = [
        f"{r.choice(NOUNS)} of {r.choice(n.coined)}",
        f"A {r.choice(NOUNS)} in {r.choice(n.towns)}",
        f"{r.choice(n.first)}'s {r.choice(NOUNS)}",
    ]
    return plain if r.random() < 0.4 else r.choice(more)


def _weight(n: Names, r: Random) -> str:
    return r.choice(
        [
            f"{r.randint(1, 40)}.{r.randint(1, 9)} kg",
            f"{r.randint(2, 95)} kg",
            f"{r.randint(20, 950)} grams",
            f"{r.randint(20, 950)} g",
        ]
    )


def _place(n: Names, r: Random) -> str:
    return r.choice(n.towns) if r.random() < 0.6 else r.choice(n.coined)


MAKERS: dict[str, Callable[[Names, Random], str]] = {
    "person": lambda n, r: f"{r.choice(n.first)} {n.surname(r)}",
    "company": lambda n, r: f"{_place(n, r)} {r.choice(FIRMS)}",
    "handbook": lambda n, r: f"{_place(n, r)} {r.choice(FIRMS)}",
    "city": _place,
    "country": lambda n, r: r.choice(n.coined),
    "river": lambda n, r: r.choice(n.coined),
    "museum": lambda n, r: (
        f"the {_place(n, r)} {r.choice(['Museum', 'Gallery', 'Theatre', 'Library', 'Tower', 'Palace'])}"
    ),
    "mountain": lambda n, r: f"{r.choice(n.coined)} {r.choice(['Mountains', 'Hills', 'Alps', 'Range'])}",
    "book": _title,
    "film": _title,
    "festival": lambda n, r: f"the {_place(n, r)} {r.choice(['Festival', 'Fair', 'Carnival', 'Regatta', 'Book Week'])}",
    "animal": lambda n, r: (
        f"{r.choice(MARKS)} {r.choice(n.coined).lower() + ' ' if r.random() < 0.6 else ''}{r.choice(BEASTS)}"
    ),
    "club": lambda n, r: f"{r.choice(['FC ', 'SC ', ''])}{_place(n, r)} {r.choice(CLUBS)}",
    "project": lambda n, r: r.choice(
        [
            f"Project {r.choice(n.coined)}",
            f"Project {r.choice(NOUNS)}",
            f"the {r.choice(ADJECTIVES)} {r.choice(NOUNS)} project",
        ]
    ),
    "product": _product,
    "meeting": _meeting,
    "task": lambda n, r: f"{r.choice(VERBS)} {r.choice(JOBS)}",
    "college": lambda n, r: r.choice(
        [f"the University of {_place(n, r)}", f"{_place(n, r)} College", f"{_place(n, r)} University"]
    ),
    "stadium": lambda n, r: f"{_place(n, r)} {r.choice(['Park', 'Arena', 'Stadium', 'Field'])}",
    "prize": lambda n, r: f"{n.surname(r)} {r.choice(['Prize', 'Medal', 'Award', 'Cross'])}",
    "language": lambda n, r: f"{r.choice(n.coined)}{r.choice(['ese', 'ish', 'ic'])}",
    "software": lambda n, r: f"{r.choice(n.coined)}{r.choice(['Desk', 'Pay', 'Flow', ' Portal', 'Base'])}",
    "year": lambda n, r: str(r.randint(1500, 2024) if r.random() < 0.5 else r.randint(1850, 2024)),
    "span": _span,
    "count": lambda n, r: _number(r, 12, 3_000_000),
    "money": _money,
    "price": _price,
    "date": _date,
    "month": lambda n, r: r.choice([*MONTHS, "early spring", "late summer", "mid-winter"]),
    "clock": _clock,
    "hours": _hours,
    "room": _room,
    "code": _code,
    "extension": lambda n, r: str(r.randint(100, 9999)),
    "metres": lambda n, r: f"{_number(r, 12, 6800)} {r.choice(['metres', 'm'])}",
    "length": lambda n, r: f"{_number(r, 20, 4900)} {r.choice(['kilometres', 'km'])}",
    "area": lambda n, r: f"{_number(r, 300, 2_000_000)} square kilometres",
    "colour": lambda n, r: r.choice(COLOURS),
    "colours": lambda n, r: " and ".join(r.sample(COLOURS, 2)),
    "weight": _weight,
    "celsius": lambda n, r: f"{r.randint(28, 95)} {r.choice(['degrees', '°C'])}",
    "minutes": lambda n, r: f"{r.randint(45, 230)} minutes",
    "duration": _unit(2, 72, "hours", "days", "hours"),
    "days": _unit(18, 40, "days", "working days"),
    "weeks": _unit(1, 12, "weeks", "months"),
    "months": _unit(1, 12, "months"),
    "years": _unit(2, 30, "years"),
    "weekdays": _weekdays,
}

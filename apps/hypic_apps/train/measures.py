"""Values that rules state: fees, spans of time, places on the grounds, how often, how many.

What handbooks state is small and alike ("two days", "30 days"), so that only the words around tell one from another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

NUMBERS = "one two three four five six seven eight nine ten eleven twelve fifteen twenty".split()
UNITS = ("euros", "euros", "euros", "dollars", "pounds", "crowns", "francs")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
ORDINALS = "second third fourth fifth sixth tenth".split()
BESIDE = ("behind", "beside", "opposite", "next to", "in front of", "near", "to the left of", "across from")
MARKS = (
    "the main entrance", "the boiler room", "the bicycle shed", "the cellar stairs", "the old chapel", "the east gate",
    "the tennis courts", "the loading ramp", "building C", "the goods lift", "the ticket office", "the pond", "hall 4",
    "the west wing", "the flagpole", "the kitchen", "the big oak", "the stage", "block 7", "the water tower",
    "the staff entrance", "the barn", "the footbridge", "the north stairs", "the ferry landing", "the glass door",
    "house 12", "the fountain", "the stables", "the lecture hall", "the rose beds", "the sports hall",
    "the bus shelter",
)  # fmt: skip
GROUNDS = (
    "lawn", "yard", "square", "small car park", "gravel area", "corridor", "courtyard", "terrace", "meadow", "ramp",
    "playing field", "landing", "shed", "old garage", "passage", "jetty", "bench", "open space",
)  # fmt: skip
INSIDE = (
    "in the cellar", "on the second floor", "in the attic", "on the ground floor", "in the entrance hall",
    "in the cupboard under the stairs", "on the third floor, left", "in room 14", "at the counter", "in the side wing",
    "at the lifeguard's hut", "under the staircase", "on the roof", "in the left drawer", "at the foot of the stairs",
)  # fmt: skip
OFTEN = (
    "twice a year", "once a month", "every six weeks", "every Monday", "three times a year", "once a week", "every day",
    "every other Friday", "on the first Tuesday of the month", "every two years", "before every season", "each quarter",
    "four times a month", "every morning", "once a year", "every ten days", "in spring and in autumn", "after each use",
)  # fmt: skip
PER_WEEK = (
    "one day a week", "two days a week", "three days a week", "up to four days a month", "on Fridays",
    "on two mornings",
    "every second Thursday", "up to three days a week", "five days a month", "on Mondays and Tuesdays",
    "one afternoon a week", "once a fortnight", "half of the week", "on request", "six days a month",
)  # fmt: skip
FLOORS = "the ground floor|the first floor|the second floor|the third floor|the fifth floor|the lower floor".split("|")
SHARES = (5, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 80)
Maker = Callable[[Random], str]


def amount(r: Random, *ranges: tuple[int, int]) -> str:
    """A number out of one of the ranges; a small one often as a word."""
    number = r.randint(*r.choice(ranges))
    return NUMBERS[number - 1] if number <= 12 and r.random() < 0.5 else str(number)


def fee(r: Random, unit: str) -> str:
    """A sum of money; most are round."""
    number = r.choice([r.randint(1, 40), 5 * r.randint(1, 40), 10 * r.randint(1, 60), r.randint(2, 990)])
    if r.random() < 0.08:
        return f"{number}.{r.choice(['50', '20', '90'])} {unit}"
    if r.random() < 0.08:
        return f"{r.randint(1, 9)},{r.randint(0, 9)}00 {unit}"
    return f"{number} {unit}"


def _counted(number: str, unit: str) -> str:
    return f"{number} {unit.removesuffix('s') if number in ('one', '1') else unit}"


def _of(units: Mapping[str, tuple[int, int]]) -> Maker:
    def make(r: Random) -> str:
        unit = r.choice(list(units))
        return _counted(amount(r, units[unit]), unit)

    return make


TERM = {"days": (2, 45), "working days": (2, 20), "weeks": (1, 12), "hours": (2, 72), "months": (1, 9)}
MAKERS: Mapping[str, Maker] = {
    "days": _of({"days": (1, 40), "working days": (1, 30)}),
    "term": _of(TERM),
    "ahead": _of({"days": (1, 30), "weeks": (1, 8), "months": (1, 4), "hours": (12, 72)}),
    "span": _of({"months": (1, 18), "weeks": (1, 16), "years": (1, 6), "days": (2, 90)}),
    "people": lambda r: amount(r, (2, 40), (13, 400), (40, 3000)),
    "few": lambda r: amount(r, (2, 12), (2, 30)),
    "share": lambda r: f"{r.choice(SHARES)} {r.choice(['percent', 'per cent'])}",
    "site": lambda r: f"the {r.choice(GROUNDS)} {r.choice(BESIDE)} {r.choice(MARKS)}",
    "place_spot": lambda r: r.choice(INSIDE) if r.random() < 0.35 else f"{r.choice(BESIDE)} {r.choice(MARKS)}",
    "ordinal": lambda r: f"the {r.choice(ORDINALS)} day",
    "often": lambda r: r.choice(OFTEN),
    "per_week": lambda r: r.choice(PER_WEEK),
    "weekday": lambda r: r.choice(DAYS) + r.choice(["", "s"]),
    "floor": lambda r: r.choice(FLOORS),
    "pm": lambda r: f"{r.randint(1, 11)}{r.choice(['', '', ':30', ':15'])} p.m.",
    "age": lambda r: amount(r, (6, 21)),
    "speed": lambda r: f"{r.randint(2, 12) * 5} km/h",
    "distance": lambda r: f"{amount(r, (5, 90))} metres",
    "load": lambda r: r.choice([f"{r.randint(4, 90) * 10} kg", f"{r.randint(2, 12)} tons"]),
}  # fmt: skip

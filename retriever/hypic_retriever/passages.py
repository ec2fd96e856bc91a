"""Edit-stable passages: where a document is cut depends on the words next to the cut, not on counting.

A cache of passages is only worth something when an edit leaves the other passages as they were. A
splitter that fills pieces up to a size moves every later border when one sentence grows. Here

1. a heading always starts a passage, and nothing crosses it;
2. inside a section some places are *candidates*: the start of a block of at least ``min_chars``,
   the start of a shorter block or, inside a block longer than twice ``target_chars``, of a sentence,
   item or line, when a hash of its own words says so;
3. a candidate is a border unless another candidate follows within ``min_chars``.

An edit of one unit changes one candidate, x. Rule 3 lets that switch x on or off, or hand the border
over between x and the candidate before x; it never does both in the same direction. So at most two
passages go and at most two come. Two things are outside this argument: a stretch without a border
that is longer than ``max_chars`` is cut at its strongest hash, and an edit may be more than one of a
unit (text without a full stop joins the next sentence, a blank line divides a paragraph). Both are
rare and stay inside their section.

The idea of cutting at content-defined places is that of N. Bjorner, A. Blass, Y. Gurevich,
"Content-dependent chunking for differential compression, the local maximum approach" (2010).
"""

from __future__ import annotations

import hashlib
import math
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from hypic_retriever.blocks import Block, Section, sections, unit_starts, word_starts
from hypic_retriever.errors import RetrieverError

_HASH_RANGE = 2.0**64
_WINDOW_CHARS = 16


@dataclass(frozen=True)
class Passage:
    """A piece of a document, with its exact text: ``document[start:end] == text``.

    ``id`` depends on ``source``, ``text`` and on how many equal texts stand before it in the source,
    not on the position. ``heading`` is the path of headings above the text (``Handbook > Refunds``).
    ``metadata`` is the caller's own, JSON values only; it plays no part in ranking.
    """

    id: str
    text: str
    source: str = ""
    start: int = 0
    end: int = 0
    heading: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def ranked_text(self) -> str:
        """What an index ranks: the text under those of its headings that it does not hold itself."""
        above = [title for title in self.heading.split(" > ") if title and title not in self.text]
        return "\n".join([*above, self.text])


@dataclass(frozen=True)
class Splitter:
    """Cuts documents into passages of about ``target_chars`` characters.

    No passage is longer than ``max_chars``. One shorter than ``min_chars`` appears only where a
    section is short or no other cut is left.

    Raises:
        RetrieverError: the sizes leave no room: ``2 * min <= target`` and ``2 * target <= max``.
    """

    target_chars: int = 500
    min_chars: int = 180
    max_chars: int = 1800

    def __post_init__(self) -> None:
        if not (
            self.min_chars >= 1 and 2 * self.min_chars <= self.target_chars and 2 * self.target_chars <= self.max_chars
        ):
            raise RetrieverError(
                f"passage sizes min {self.min_chars}, target {self.target_chars}, max {self.max_chars} do not fit; "
                "choose 1 <= min, 2 * min <= target and 2 * target <= max."
            )

    def split(self, text: str, source: str = "") -> list[Passage]:
        """The passages of ``text`` in order; they do not overlap and lose nothing but white space."""
        if not isinstance(text, str):
            raise RetrieverError(f"a document is {type(text).__name__}, not str; decode it before splitting it.")
        seen: Counter[str] = Counter()
        return [
            Passage(_next_id(source, text[start:end], seen), text[start:end], source, start, end, section.heading)
            for section in sections(text)
            for start, end in self._pieces(text, section)
        ]

    def _pieces(self, text: str, section: Section) -> Iterator[tuple[int, int]]:
        units = {block: unit_starts(text, block) for block in section.blocks}
        starts = [section.start, *self._borders(text, section, units)]
        places = _Places(text, section, units, self.max_chars)
        for start, end in zip(starts, [*starts[1:], section.end], strict=True):
            yield from self._cut_to_size(text, start, end, places)

    def _borders(self, text: str, section: Section, units: Mapping[Block, Sequence[int]]) -> list[int]:
        """Rule 3: candidates that no other candidate, nor the section's end, follows too closely."""
        borders = []
        following = section.end
        for place in sorted(self._candidates(text, section, units), reverse=True):
            if following - place >= self.min_chars:
                borders.append(place)
            following = place
        return borders[::-1]

    def _candidates(self, text: str, section: Section, units: Mapping[Block, Sequence[int]]) -> Iterator[int]:
        """Rule 2, and nothing within ``min_chars`` of the section's start."""
        for block in section.blocks:
            starts = units[block]
            size = block.end - block.start
            if block.start - section.start >= self.min_chars:
                first = text[block.start : starts[1] if len(starts) > 1 else block.end]
                if size >= self.min_chars or _strength(first) < self._rate(size):
                    yield block.start
            yield from self._inside(text, starts, block.end, self.target_chars)

    def _inside(self, text: str, starts: Sequence[int], end: int, margin: int) -> Iterator[int]:
        """Candidates among ``starts`` that keep ``margin`` from both ends; oversized units are entered.

        Here a unit counts for at most ``min_chars``. So an edit of one moves the margin over less
        than two borders, however long the unit is.
        """
        stops = [*starts[1:], end]
        after = sum(min(stop - start, self.min_chars) for start, stop in zip(starts, stops, strict=True))
        before = 0
        for start, stop in zip(starts, stops, strict=True):
            if before >= margin and after >= margin and _strength(text[start:stop]) < self._rate(stop - start):
                yield start
            if stop - start > self.max_chars:
                yield from self._inside_unit(text, start, stop)
            before += min(stop - start, self.min_chars)
            after -= min(stop - start, self.min_chars)

    def _inside_unit(self, text: str, start: int, end: int) -> Iterator[int]:
        margin = self.max_chars // 2
        words = word_starts(text, start, end)
        if len(words) > 1:
            yield from self._inside(text, words, end, margin)
            return
        for place in range(start + margin, end - margin):
            if _strength(text[place : place + _WINDOW_CHARS]) < self._rate(1) and _may_cut(text, place):
                yield place

    def _rate(self, num_chars: int) -> float:
        """Probability that a unit of this length is a candidate, so that passages average the target.

        Candidates at a mean distance ``d`` that keep a window of ``min`` behind them free have the
        mean distance ``d * exp(min / d)``; at most every second one, or they would block each other.
        Units longer than the window cannot.
        """
        short = min(0.5, num_chars / _candidate_distance(self.min_chars, self.target_chars))
        return short if num_chars < self.min_chars else max(short, min(1.0, num_chars / self.target_chars * 1.25))

    def _cut_to_size(self, text: str, start: int, end: int, places: _Places) -> Iterator[tuple[int, int]]:
        """A stretch without borders, cut at its strongest place until nothing is longer than ``max_chars``."""
        waiting = [(start, end)]
        while waiting:
            start, end = _trim(text, *waiting.pop())
            size = end - start
            if size > self.max_chars:
                # Two passages are enough for twice the maximum: both sides then have to fit.
                keep = max(self.min_chars, size - self.max_chars) if size <= 2 * self.max_chars else self.min_chars
                keep = min(keep, size // 2)
                place = places.strongest(start + keep, end - keep)
                waiting += [(place, end), (start, place)]
            elif size > 0:
                yield start, end


class _Places:
    """Every place in a section where a passage may begin, best kind first, with its hash."""

    def __init__(self, text: str, section: Section, units: Mapping[Block, Sequence[int]], reach: int) -> None:
        self._text = text
        self._reach = reach
        self._by_kind = [
            _Ranked(text, [block.start for block in section.blocks], section.end),
            _Ranked(text, [start for block in section.blocks for start in units[block]], section.end),
        ]

    def strongest(self, first: int, last: int) -> int:
        """The place in ``[first, last]`` with the smallest hash: a block's start, else a unit's, a word's, any."""
        for ranked in self._by_kind:
            if (place := ranked.strongest(first, last)) is not None:
                return place
        # Without any unit the middle is as good as all of it, and looking through all takes long.
        centre = (first + last) // 2
        first, last = max(first, centre - self._reach), min(last, centre + self._reach)
        words = [place for place in word_starts(self._text, first, last + 1) if place > first]
        return _Ranked(self._text, words, last + 1).strongest(first, last) or self._anywhere(first, last)

    def _anywhere(self, first: int, last: int) -> int:
        allowed = [place for place in range(first, last + 1) if _may_cut(self._text, place)]
        windows = ((_strength(self._text[place : place + _WINDOW_CHARS]), place) for place in allowed)
        return min(windows, default=(0.0, last))[1]


class _Ranked:
    """Sorted places and the hashes of the texts between them, computed when first needed."""

    def __init__(self, text: str, starts: Sequence[int], end: int) -> None:
        self._text = text
        self._starts = starts
        self._end = end

    @cached_property
    def _strengths(self) -> list[float]:
        stops = [*self._starts[1:], self._end]
        return [_strength(self._text[start:stop]) for start, stop in zip(self._starts, stops, strict=True)]

    def strongest(self, first: int, last: int) -> int | None:
        """The place in ``[first, last]`` with the smallest hash, among equal ones the most central."""
        low, high = bisect_left(self._starts, first), bisect_right(self._starts, last)
        if low == high:
            return None
        centre = first + last
        best = min(range(low, high), key=lambda i: (self._strengths[i], abs(2 * self._starts[i] - centre)))
        return self._starts[best]


@lru_cache(maxsize=64)
def _candidate_distance(min_chars: int, target_chars: int) -> float:
    """The larger ``d`` with ``d * exp(min_chars / d) == target_chars``, and ``min_chars`` where there is none."""
    distance = float(target_chars)
    for _ in range(100):
        distance = max(float(min_chars), target_chars * math.exp(-min_chars / distance))
    return distance


def _strength(text: str) -> float:
    """A hash of the words in ``[0, 1)``; the amount of white space between them does not matter."""
    digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _HASH_RANGE


def _next_id(source: str, text: str, seen: Counter[str]) -> str:
    digest = hashlib.blake2b(f"{source}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def _may_cut(text: str, place: int) -> bool:
    """False before a combining mark, a variation selector or a joiner: they belong to the character before."""
    return unicodedata.category(text[place]) not in ("Mn", "Mc", "Me", "Cf") and text[place - 1] != "\u200d"


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """``start`` and ``end`` moved inwards over white space."""
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip())

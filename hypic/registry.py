"""Known segment texts, and the policy that finds them again in a flat prompt.

Frameworks flatten: they join passages into one string. ``Registry.split`` cuts such a string at
every text that was registered before. It loses nothing: the pieces joined are the string.

The policy, by name ``known-texts``: whole bodies only (a text without its outer white space, at
least ``min_chars`` long), never beginning or ending inside a word; of overlapping candidates the
longest wins, of equally long ones the first; only texts of the same namespace are looked for.
Where it cut is what ``find`` returns. This is not a cache of results, and not a fuzzy search.

Search: each body is indexed by its first characters; every window of a prompt is looked up once,
and only where one is known are whole bodies compared.
"""

from __future__ import annotations

import heapq
import sys
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hypic.errors import ConfigError, PromptError
from hypic.policy import is_listed
from hypic.types import Segment

POLICY_NAME = "known-texts"
_WINDOW_CHARS = 32
# What one entry weighs beside its characters: the Segment, its place in two tables, the window.
_ENTRY_BYTES = 600

Texts = str | Segment | Iterable[str | Segment]


@dataclass(frozen=True)
class Match:
    """``text[start:end]`` of the searched text is ``segment.text``."""

    start: int
    end: int
    segment: Segment


class _Shelf:
    """The texts of one namespace: bodies, and bodies by their first characters, longest first."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.segments: dict[str, Segment] = {}
        self.bodies: dict[str, list[str]] = {}

    def put(self, segment: Segment) -> None:
        body = segment.text
        if body not in self.segments:
            insort(self.bodies.setdefault(body[: self.window], []), body, key=lambda b: -len(b))
        self.segments[body] = segment

    def drop(self, body: str) -> None:
        del self.segments[body]
        siblings = self.bodies[body[: self.window]]
        siblings.remove(body)
        if not siblings:
            del self.bodies[body[: self.window]]

    def starts(self, text: str) -> list[int]:
        """Where a window of some body stands in ``text``; safe beside a writer."""
        window, known = self.window, self.bodies
        return [i for i in range(len(text) - window + 1) if text[i : i + window] in known]

    def longest_at(self, text: str, start: int, shorter_than: int) -> str | None:
        """The longest body that stands at ``start`` of ``text`` and has fewer characters than given."""
        for body in self.bodies.get(text[start : start + self.window], ()):
            if len(body) < shorter_than and text.startswith(body, start) and _whole_words(text, start, len(body)):
                return body
        return None


class Registry:
    """Known segment texts per namespace, bounded, least recently used out first. Thread-safe.

    ``max_bytes`` bounds all namespaces together. ``min_chars`` is the least length of a body.

    Raises:
        ConfigError: a bound is below 1.
    """

    def __init__(self, *, min_chars: int = 32, max_bytes: int = 64 * 2**20) -> None:
        for name, value in (("min_chars", min_chars), ("max_bytes", max_bytes)):
            if value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be 1 or more.")
        self.min_chars = min_chars
        self.max_bytes = max_bytes
        self._window = min(min_chars, _WINDOW_CHARS)
        self._shelves: dict[str | None, _Shelf] = {}
        self._used: OrderedDict[tuple[str | None, str], int] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used)

    @property
    def num_bytes(self) -> int:
        """Bytes that are charged against ``max_bytes``."""
        return self._num_bytes

    def register(self, texts: Texts, *, namespace: str | None = None) -> int:
        """Makes texts known; returns how many of them are now known.

        A plain ``str`` becomes a document. A segment's own namespace wins over ``namespace``. A text
        that is known already takes the new labels. Bodies that are too short, heavier than
        ``max_bytes`` or marked ``cache=False`` are passed over.
        """
        bodies = [self._body_of(text, namespace) for text in _each(texts)]
        with self._lock:
            return sum(self._put(segment) for segment in bodies)

    def forget(
        self,
        texts: Texts | None = None,
        *,
        name: str | None = None,
        source: str | None = None,
        namespace: str | None = None,
    ) -> int:
        """Drops what fits every given criterion, in every namespace unless one is given; returns how many.

        Raises:
            ConfigError: no criterion is given.
        """
        if texts is None and name is None and source is None and namespace is None:
            raise ConfigError("forget needs texts, name, source or namespace; to drop everything call clear().")
        bodies = None if texts is None else {self._body_of(text, None).text for text in _each(texts)}
        wanted = {"name": name, "source": source, "namespace": namespace}
        labels = {key: value for key, value in wanted.items() if value is not None}
        with self._lock:
            doomed = [key for key in self._used if self._fits(key, bodies, labels)]
            for key in doomed:
                self._drop(key)
        return len(doomed)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._shelves.clear()
            self._used.clear()
            self._num_bytes = 0

    def find(self, text: str, namespace: str | None = None) -> tuple[Match, ...]:
        """Where known texts of ``namespace`` stand in ``text``, in order, without overlaps.

        Raises:
            PromptError: ``text`` is no ``str``.
        """
        if not isinstance(text, str):
            raise PromptError(f"a prompt is {text!r:.60}; pass the text in which known texts are looked for.")
        shelf = self._shelves.get(namespace)
        starts = shelf.starts(text) if shelf is not None else []
        if shelf is None or not starts:
            return ()
        with self._lock:
            matches = tuple(_longest_first(shelf, text, starts))
            for match in matches:
                self._touch(match.segment)
        return matches

    def split(self, text: str, namespace: str | None = None) -> list[Segment | str]:
        """``text`` as known segments and, as plain ``str``, the live text between them.

        The pieces joined are ``text``, character for character; no live piece is empty.
        """
        pieces: list[Segment | str] = []
        end = 0
        for match in self.find(text, namespace):
            pieces += [text[end : match.start], match.segment]
            end = match.end
        return [piece for piece in [*pieces, text[end:]] if piece != ""]

    def _body_of(self, text: str | Segment, namespace: str | None) -> Segment:
        segment = text if isinstance(text, Segment) else Segment(text)
        return replace(segment, text=segment.text.strip(), namespace=segment.namespace or namespace)

    def _put(self, segment: Segment) -> bool:
        num_bytes = sys.getsizeof(segment.text) + _ENTRY_BYTES
        if segment.cache is False or len(segment.text) < self.min_chars or num_bytes > self.max_bytes:
            return False
        shelf = self._shelves.setdefault(segment.namespace, _Shelf(self._window))
        shelf.put(segment)
        key = (segment.namespace, segment.text)
        self._num_bytes += num_bytes - self._used.pop(key, 0)
        self._used[key] = num_bytes
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._used)))
        return True

    def _drop(self, key: tuple[str | None, str]) -> None:
        self._num_bytes -= self._used.pop(key)
        namespace, body = key
        self._shelves[namespace].drop(body)
        if not self._shelves[namespace].segments:
            del self._shelves[namespace]

    def _fits(self, key: tuple[str | None, str], bodies: set[str] | None, labels: dict[str, str]) -> bool:
        namespace, body = key
        segment = self._shelves[namespace].segments[body]
        return (bodies is None or body in bodies) and all(getattr(segment, k) == v for k, v in labels.items())

    def _touch(self, segment: Segment) -> None:
        key = (segment.namespace, segment.text)
        if key in self._used:
            self._used.move_to_end(key)


def _each(texts: Texts) -> Iterable[str | Segment]:
    """
    Raises:
        PromptError: it is neither a text, a ``Segment`` nor a list of them.
    """
    if isinstance(texts, (str, Segment)):
        return [texts]
    if not is_listed(texts):
        raise PromptError(f"the registry was given {texts!r:.60}; pass text, a Segment, or a list of them.")
    return texts


def _whole_words(text: str, start: int, length: int) -> bool:
    """Whether ``text[start:start+length]`` neither begins nor ends inside a word."""
    end = start + length
    begins_inside = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    ends_inside = end < len(text) and text[end - 1].isalnum() and text[end].isalnum()
    return not (begins_inside or ends_inside)


def _longest_first(shelf: _Shelf, text: str, starts: list[int]) -> Iterator[Match]:
    """Greedy by length: each place offers its longest body, and the next shorter one when that overlaps."""
    heap: list[tuple[int, int]] = []
    for start in starts:
        _offer(heap, shelf, text, start, sys.maxsize)
    taken: list[tuple[int, int]] = []
    while heap:
        negative_length, start = heapq.heappop(heap)
        end = start - negative_length
        if _is_free(taken, start, end):
            insort(taken, (start, end))
        else:
            _offer(heap, shelf, text, start, -negative_length)
    for start, end in taken:
        yield Match(start, end, shelf.segments[text[start:end]])


def _offer(heap: list[tuple[int, int]], shelf: _Shelf, text: str, start: int, shorter_than: int) -> None:
    body = shelf.longest_at(text, start, shorter_than)
    if body is not None:
        heapq.heappush(heap, (-len(body), start))


def _is_free(taken: list[tuple[int, int]], start: int, end: int) -> bool:
    i = bisect_left(taken, (start, end))
    return (i == 0 or taken[i - 1][1] <= start) and (i == len(taken) or taken[i][0] >= end)

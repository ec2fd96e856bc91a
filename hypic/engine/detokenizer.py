"""Token ids to text, one id at a time: only what no later id can change is given out.

Knows neither a tokenizer nor a model: the decoding function is an argument. Text is held back while
its last character is an incomplete UTF-8 sequence and while its end could begin a stop string.

Decoding a text anew for every id would cost time quadratic in its length, and decoding ids one by one
gives wrong text (a character may span ids; some decoders strip the space before the first word).
So a short window of recent ids is decoded, and its front is dropped only where the text of what
remains is seen to be the end of the text before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_SHORTEST_WINDOW = 16
_NUM_TRIES = 8  # a character has at most four bytes, so that some of these begin with a whole one
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The text of one growing answer.

    ``decode`` gives the text of a list of ids. ``byte_ids`` are ids whose text is known only once
    another id follows (byte fallback turns a whole run of them into text, or none of it);
    ``skipped_ids`` are those that ``decode`` leaves out.

    ``stopped`` is set once a stop string is met; the text ends before it. The stop string that is
    complete first counts, of those complete at once the one that began first.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        byte_ids: Collection[int] = frozenset(),
        skipped_ids: Collection[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._byte_ids, self._skipped_ids = byte_ids, skipped_ids
        self._window: list[int] = []
        self._num_taken = 0  # characters of the window's text that went on to the stop strings
        self._longest_window = 2 * _SHORTEST_WINDOW
        self._stop = _Stop(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop.met

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; empty after a stop string."""
        if self.stopped or token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._window)
        # Of replacement characters at the end only the last can still become another character.
        new = self._stop.push(self._take(text.removesuffix(_INCOMPLETE)))
        if len(self._window) >= self._longest_window:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """What was held back, once no id follows; empty after a stop string."""
        if self.stopped:
            return ""
        text = self._stop.push(self._take(self._decode(self._window)))
        return text + self._stop.finish()

    def _take(self, text: str) -> str:
        new = text[self._num_taken :]
        self._num_taken = max(self._num_taken, len(text))
        return new

    def _shorten(self, text: str) -> None:
        """Keeps recent ids whose text is the end of the window's; without such, waits for twice as many."""
        num_held = len(text) - self._num_taken
        for size in range(_SHORTEST_WINDOW, _SHORTEST_WINDOW + _NUM_TRIES):
            kept = self._decode(self._window[-size:])
            # What a decoder strips from a text's beginning is gone already if something stands before the rest.
            if text.endswith(kept) and len(kept) > num_held:
                self._window, self._num_taken = self._window[-size:], len(kept) - num_held
                self._longest_window = 2 * size
                return
        self._longest_window *= 2


class _Stop:
    """Text that passes through until a stop string is complete; what may begin one waits."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self.met = tuple(stop), "", False

    def push(self, text: str) -> str:
        text = self._held + text
        # The end of the first to be complete, then its beginning.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.met, self._held = True, ""
            return text[: min(found)[1]]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)

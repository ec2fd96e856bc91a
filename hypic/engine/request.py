"""A request as the scheduler sees it: cursors, and what it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hypic.engine.batch import Chain, InteriorLink, RowLink
from hypic.engine.plan import Interior, Mark, Plan
from hypic.engine.segment import CachedSegment, Slots
from hypic.types import Outcome

UNKNOWN = 0


@dataclass
class Held:
    """What a running request holds of the pool; ``slots`` are its token slots by position, on the device in
    ``table_row``. One that only warms has no such row, and no state (0).

    ``entries`` are pinned until the request's state has taken them in; from then on only their pages are held,
    ``folded``. ``wanted`` are interiors not asked for yet, in prompt order, and ``spare`` pages that are kept for them;
    ``in_pieces`` says that memory is too small to hold them all at once. ``last`` is where an entry that was asked for
    ends last. ``other_slot`` is a second state slot, or 0: steps that are launched ahead write to it.
    """

    slots: Slots
    state_slot: int
    pages: list[int]
    snapshot: CachedSegment | None
    wanted: deque[Interior]
    spare: list[int]
    table_row: int | None
    in_pieces: bool = False
    last: dict[bytes, int] = field(default_factory=dict)
    entries: dict[bytes, CachedSegment] = field(default_factory=dict)
    folded: list[CachedSegment] = field(default_factory=list)
    num_own: int = 0
    other_slot: int = 0

    @property
    def parts(self) -> list[CachedSegment]:
        """All that the running state is made of, or will be."""
        return [*([] if self.snapshot is None else [self.snapshot]), *self.folded, *self.entries.values()]

    def turn_to(self, slot: int) -> None:
        """The running state is in ``slot`` from now on, one of the two."""
        if slot == self.other_slot:
            self.state_slot, self.other_slot = slot, self.state_slot

    def take_spare(self, count: int) -> list[int]:
        """The last ``count`` of the pages that are kept, no longer among them."""
        taken = self.spare[len(self.spare) - count :]
        del self.spare[len(self.spare) - count :]
        return taken


@dataclass(eq=False)
class Request:
    """A prompt being answered. ``done`` counts tokens, prompt and generated, whose effect is in the running state.

    ``plan`` is the prompt's, or, for a request that started again, of the prompt and what it had generated.
    ``continued`` are tokens of new entries, by key, that were taken from older ones; ``tiers`` are those that entries
    were loaded from. ``stays``: what it needs is encoded here, since another worker asked for it. ``is_trial``: the
    entries made for it never leave the device. Nothing is kept of a request whose text was forgotten while it ran.
    """

    id: str
    prompt: Plan
    max_tokens: int
    generated: list[int] = field(default_factory=list)
    done: int = 0
    held: Held | None = None
    initial_slot: int = 0
    last_mark: int = 0
    computed: int = 0
    encoded: int = 0
    outcomes: dict[bytes, tuple[Outcome, str]] = field(default_factory=dict)
    continued: dict[bytes, int] = field(default_factory=dict)
    tiers: dict[bytes, str] = field(default_factory=dict)
    restarts: int = 0
    num_failures: int = 0
    stays: bool = False
    is_trial: bool = False
    placed_s: float | None = None
    is_forgotten: bool = False

    def __post_init__(self) -> None:
        self.plan = self.prompt

    @property
    def num_planned(self) -> int:
        return len(self.plan.ids)

    @property
    def is_decoding(self) -> bool:
        return self.done >= self.num_planned

    @property
    def only_warms(self) -> bool:
        """Whether it wants its segments encoded and nothing else: it runs no row, and needs no state."""
        return self.max_tokens == 0

    @property
    def longest(self) -> int:
        """Most tokens whose effect the request may ever keep."""
        return len(self.prompt.ids) + self.max_tokens

    def head(self, length: int) -> tuple[int, ...]:
        """The first ``length`` tokens of prompt and answer."""
        return self.prompt.ids[:length] + tuple(self.generated[: max(0, length - len(self.prompt.ids))])

    def prepare_end(self) -> None:
        """At the end of the prompt: its ids in one tuple, for the snapshot that it leaves, while the device works."""
        if self.is_decoding and not self.generated and self.prompt.policy.reuse != "none":
            self.head(len(self.prompt.ids))

    def restart(self) -> None:
        """Begin again, with what was generated as the end of the prompt; a deterministic request takes the very
        steps again that it took before."""
        self.plan = self.prompt if self.prompt.policy.deterministic else self.prompt.continued(self.generated)
        self.done = self.initial_slot = self.last_mark = 0
        self.restarts += 1

    def interiors(self, start: int) -> list[Interior]:
        """The interiors that are needed from position ``start`` on, in prompt order."""
        return [span for span in self.plan.interiors if span.start >= start]

    def keys(self, start: int) -> dict[bytes, Interior]:
        """The same, each key once."""
        found: dict[bytes, Interior] = {}
        for span in self.interiors(start):
            found.setdefault(span.key, span)
        return found

    def rows_from(self, start: int) -> int:
        """Prompt tokens that are run from position ``start`` on."""
        return sum([row.stop - max(row.start, start) for row in self.plan.rows if row.stop > start])

    def entry(self, span: Interior) -> CachedSegment | None:
        """The pinned entry of an interior, or ``None`` if it is yet to be asked for."""
        held = self._held()
        is_asked_for = not held.wanted or span.start < held.wanted[0].start
        return held.entries.get(span.key) if is_asked_for else None

    def decode_chain(self, slot: int, is_ahead: bool = False) -> Chain:
        """One row of the last generated token, or ``is_ahead`` of the next one, which only the device knows."""
        held, position = self._held(), self.done
        held.slots[position] = slot
        token = UNKNOWN if is_ahead else self.generated[position - len(self.prompt.ids)]
        row = RowLink([token], position, held.slots[position : position + 1])
        chain = self._chain([row], held.slots[: position + 1], is_ahead or self._is_new(position + 1))
        return replace(chain, final_slot=held.other_slot) if is_ahead else chain

    def prefill_chain(
        self, budget: int, is_ready: Callable[[CachedSegment], bool], snapshot_slot: Callable[[Mark], int | None]
    ) -> tuple[Chain | None, int]:
        """Links from ``done`` on, at most ``budget`` tokens of rows; the chain, and the position it reaches."""
        links: list[RowLink | InteriorLink] = []
        position, reached, num_rows, border = self.done, self.done, 0, self._border()
        for span in self.plan.spans:
            if span.stop <= position:
                continue
            if isinstance(span, Interior):
                entry = self.entry(span)
                if entry is None or not is_ready(entry):
                    break
                links.append(self._interior(span, entry))
                position = span.stop
                continue
            stop = min(span.stop, position + budget, border)
            rows = self._rows(position, stop, snapshot_slot)
            links += rows
            budget, num_rows, position = budget - (stop - position), num_rows + len(rows), stop
            reached = stop if rows else reached
            if stop < span.stop or stop == border:
                break
        if num_rows == 0:
            return None, self.done
        context = self._held().slots[:reached]
        return self._chain(links, context, wants_logits=self._is_new(position)), position

    def _border(self) -> int:
        """Where the next step ends at the latest: for a deterministic request at the next mark, so that its steps are
        the same whether memory has room for snapshots or not."""
        marks = [mark.position for mark in self.plan.marks if mark.is_taken and mark.position > self.done]
        return min(marks) if marks and self.plan.policy.deterministic else self.num_planned

    def _is_new(self, position: int) -> bool:
        """Whether the token at ``position`` is yet to be chosen."""
        return position == len(self.prompt.ids) + len(self.generated)

    def _rows(self, start: int, stop: int, snapshot_slot: Callable[[Mark], int | None]) -> list[RowLink]:
        rows, slots = [], self._held().slots
        for mark in self.plan.marks:
            if mark.is_taken and start < mark.position <= stop:
                taken = snapshot_slot(mark)
                if taken is not None:
                    ids = self.plan.ids.between(start, mark.position)
                    rows.append(RowLink(ids, start, slots[start : mark.position], taken))
                    start = mark.position
        if start < stop:
            rows.append(RowLink(self.plan.ids.between(start, stop), start, slots[start:stop]))
        return rows

    def _interior(self, span: Interior, entry: CachedSegment) -> InteriorLink:
        assert entry.transition_slot is not None, "an interior is asked for before it is folded"
        return InteriorLink(entry.state_slot, entry.transition_slot, entry.num_cached, span.first)

    def _chain(self, links: Sequence[RowLink | InteriorLink], context: Slots, wants_logits: bool) -> Chain:
        held, compose, positions = self._held(), self.plan.policy.compose, self._key_positions()
        slots = (self.initial_slot, held.state_slot)
        return Chain(links, context, *slots, wants_logits, positions, compose, held.table_row)

    def _key_positions(self) -> Slots | None:
        """Local positions for cached keys, in the ablation that does not rotate them to where they stand."""
        if self.plan.policy.rotate:
            return None
        positions = np.arange(len(self._held().slots))
        for span in self.plan.spans:
            if isinstance(span, Interior):
                positions[span.start : span.stop] -= span.first
        return positions

    def _held(self) -> Held:
        assert self.held is not None, "the request is not running"
        return self.held

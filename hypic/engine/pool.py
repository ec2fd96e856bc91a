"""All device memory of requests and cached entries alike: pages of K/V, state slots, transition slots.

One budget is split once, at start, between *pages* (``page_size`` tokens of unrotated K and of V in every
full-attention layer) and *slots* (a state with its convolution tail in every linear layer; a transition in every
linear layer). A state slot holds a request's running state, an entry's end state or a snapshot; a transition slot
belongs to a segment entry. State slot 0 is all zeros and never handed out: the state of "nothing before". One more
state slot and one more page are spare: padded steps write there, and nobody reads them.
Pages are reference counted, since a snapshot shares them with the segments it contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hypic.engine.affine import Affine, identity
from hypic.engine.layout import AttentionShape as AttentionShape
from hypic.engine.layout import Layout as Layout
from hypic.engine.layout import LinearShape as LinearShape
from hypic.engine.layout import TransitionKind as TransitionKind
from hypic.engine.segment import Slots
from hypic.engine.sizing import TYPICAL_SEGMENT_TOKENS, Need, split
from hypic.engine.slot_table import SlotTable
from hypic.engine.stacks import Stack, by_layer, stacked
from hypic.engine.storage import StorageForm


@dataclass(frozen=True)
class Stacks:
    """All memory of a pool, layers of one shape in one tensor: what is read or written in all of them at once."""

    states: tuple[Stack, ...]
    tails: tuple[Stack, ...]
    transitions: tuple[Stack, ...]
    keys: tuple[Stack, ...]
    values: tuple[Stack, ...]


class Pool:
    """Pages and slots; see the module's docstring.

    Raises:
        ConfigError: the budget cannot hold one request of ``max_context`` tokens.
    """

    def __init__(
        self,
        layout: Layout,
        budget_bytes: int,
        page_size: int,
        max_context: int,
        num_running: int,
        device: torch.device,
        form: StorageForm = StorageForm(),
        segment_tokens: int = TYPICAL_SEGMENT_TOKENS,
        num_ahead: int = 0,
    ) -> None:
        self.layout, self.page_size, self.device, self.form = layout, page_size, device, form
        self.max_context, self.segment_tokens = max_context, segment_tokens
        left_bytes, self.num_ahead = budget_bytes - num_ahead * layout.state_bytes, num_ahead
        self.num_pages, self.num_states, self.num_transitions = self._split(left_bytes, max_context, num_running)
        self.capacity = Need(self.num_pages, self.num_states, self.num_transitions)
        self._pages = list(range(self.num_pages - 1, -1, -1))
        self._states = list(range(self.num_states, 0, -1))
        self.ahead = list(range(self.num_states + num_ahead, self.num_states, -1))
        self._transitions = list(range(self.num_transitions - 1, -1, -1))
        self._references = np.zeros(self.num_pages, dtype=np.int32)
        self.num_kept = 0
        self._allocate()
        self.table = SlotTable(num_running, max_context, device)

    def _split(self, budget_bytes: int, max_context: int, num_running: int) -> tuple[int, int, int]:
        need = split(self.layout, budget_bytes, self.page_size, max_context, num_running, self.segment_tokens)
        return need.pages, need.states, need.transitions

    def _allocate(self) -> None:
        self.stacks = self._stacks()
        self.keys, self.values = by_layer(self.stacks.keys), by_layer(self.stacks.values)
        self.states, self.tails = by_layer(self.stacks.states), by_layer(self.stacks.tails)
        self.transitions = by_layer(self.stacks.transitions)
        self._is_final = torch.zeros(self.num_transitions, dtype=torch.bool, device=self.device)
        for tensor in (*self.states, *self.tails):
            tensor[0].zero_()

    def _stacks(self) -> Stacks:
        layout, tokens, slots = self.layout, (self.num_pages + 1) * self.page_size, self.spare_state + 1

        def stack(shapes: Sequence[tuple[int, ...]], count: int, dtype: torch.dtype) -> tuple[Stack, ...]:
            return stacked(shapes, count, dtype, self._empty)

        return Stacks(
            states=stack(layout.state_shapes, slots, layout.state_dtype),
            tails=stack(layout.tail_shapes, slots, layout.dtype),
            transitions=stack(layout.transition_shapes, self.num_transitions, layout.state_dtype),
            keys=stack(layout.key_shapes, tokens, layout.dtype),
            values=stack(layout.value_shapes, tokens, layout.dtype),
        )

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.layout.token_bytes

    @property
    def num_bytes(self) -> int:
        """What the pool holds of the device's memory."""
        slots = (self.spare_state + 1) * self.layout.state_bytes + self.num_transitions * self.layout.transition_bytes
        return (self.num_pages + 1) * self.page_bytes + slots

    @property
    def spare_state(self) -> int:
        """The state slot that padding writes to."""
        return self.num_states + self.num_ahead + 1

    @property
    def spare_token(self) -> int:
        """The token slot that padding writes to."""
        return self.num_pages * self.page_size

    @property
    def free(self) -> Need:
        return Need(len(self._pages), len(self._states), len(self._transitions))

    def could_hold(self, need: Need) -> bool:
        """Whether the empty pool could meet ``need``."""
        have = self.capacity
        return need.pages <= have.pages and need.states <= have.states and need.transitions <= have.transitions

    def lacks(self, need: Need) -> bool:
        """Whether ``need`` cannot be met from what is free."""
        free = self.free
        return need.pages > free.pages or need.states > free.states or need.transitions > free.transitions

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def keep(self, num_tokens: int) -> tuple[list[int], int]:
        """Pages for so many tokens and a state slot, taken for good: nothing else is ever given them."""
        count, have = self.pages_for(num_tokens), self.capacity
        self.num_kept += num_tokens
        self.capacity = Need(have.pages - count, have.states - 1, have.transitions)
        return self.take_pages(count), self.take_state()

    def take_pages(self, count: int) -> list[int]:
        """Pages with one reference each; the caller has asked ``lacks`` before."""
        assert count <= len(self._pages), f"{count} pages asked for, {len(self._pages)} are free"
        pages = self._pages[len(self._pages) - count :]
        pages.reverse()
        del self._pages[len(self._pages) - count :]
        self._references[pages] = 1
        return pages

    def share_pages(self, pages: Sequence[int] | Slots) -> None:
        """One more reference to each page; none stands twice in ``pages``."""
        shared = np.asarray(pages, dtype=np.int64)
        before = self._references[shared]
        assert (before > 0).all(), "a page that is free cannot be shared"
        self._references[shared] = before + 1

    def drop_pages(self, pages: Sequence[int] | Slots) -> None:
        """One reference less; a page without any is free again. None stands twice in ``pages``."""
        if not len(pages):
            return
        dropped = np.asarray(pages, dtype=np.int64)
        left = self._references[dropped] - 1
        self._references[dropped] = left
        assert (left >= 0).all(), "a page is freed twice"
        self._pages += dropped[left == 0].tolist()

    def take_state(self) -> int:
        return self._states.pop()

    def drop_state(self, slot: int) -> None:
        assert slot > 0 and slot not in self._states[-64:], f"state slot {slot} is freed twice"
        self._states.append(slot)

    def take_transition(self) -> int:
        return self._transitions.pop()

    def drop_transition(self, slot: int) -> None:
        assert slot not in self._transitions[-64:], f"transition slot {slot} is freed twice"
        self._transitions.append(slot)

    def pages_of(self, slots: Slots) -> list[int]:
        """Pages that token slots ``[n]`` lie in, each once; neighbours mostly share one."""
        pages = slots // self.page_size
        changes = np.empty(len(pages), dtype=np.bool_)
        changes[:1], changes[1:] = True, pages[1:] != pages[:-1]
        return np.unique(pages[changes]).tolist()  # type: ignore[no-any-return]

    def slots_of(self, pages: Sequence[int], num_tokens: int) -> Slots:
        """Token slots ``[num_tokens]`` of a run of pages."""
        starts = np.asarray(pages, dtype=np.int64)[:, None] * self.page_size
        return (starts + np.arange(self.page_size)).reshape(-1)[:num_tokens]

    # -- contents ----------------------------------------------------------------------------------------------------

    def write_kv(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Unrotated ``keys [n, H, D]`` and ``values`` into token slots ``[n]``."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def read_kv(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)

    def read_map(self, layer: int, states: Tensor, transitions: Tensor) -> Affine:
        """Maps of entries, from their state and transition slots."""
        return Affine(self.transitions[layer][transitions], self.states[layer][states])

    def write_map(self, layer: int, states: Tensor, transitions: Tensor, maps: Affine) -> None:
        """Maps of entries; those that are ``finished`` by it take their storage form, in which they are used."""
        if not self.form.is_lossless:
            final, formed = self._is_final[transitions], self.form.applied(maps)
            maps = Affine(
                torch.where(_beside(final, maps.transition), formed.transition, maps.transition),
                torch.where(_beside(final, maps.end_state), formed.end_state, maps.end_state),
            )
        self.states[layer].index_copy_(0, states, maps.end_state.to(self.layout.state_dtype))
        self.transitions[layer].index_copy_(0, transitions, maps.transition.to(self.layout.state_dtype))

    def begin_maps(self, transitions: Sequence[int]) -> None:
        """Other entries had these slots; what is written into them first is not the last of them."""
        if transitions and not self.form.is_lossless:
            self._is_final[torch.tensor(transitions, device=self.device)] = False

    def finish(self, transitions: Sequence[int]) -> None:
        """What is written into these entries next is the last of them."""
        if transitions and not self.form.is_lossless:
            self._is_final[torch.tensor(transitions, device=self.device)] = True

    def copy_map(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """An entry's map and tail into another's slots; both are given as state and transition slot."""
        for layer in range(len(self.layout.linear)):
            self.states[layer][target[0]] = self.states[layer][source[0]]
            self.tails[layer][target[0]] = self.tails[layer][source[0]]
            self.transitions[layer][target[1]] = self.transitions[layer][source[1]]

    def clear_maps(self, states: Tensor, transitions: Tensor) -> None:
        """The identity map and an empty tail, into entries' slots."""
        for layer, shape in enumerate(self.layout.linear):
            self.states[layer].index_fill_(0, states, 0.0)
            self.tails[layer].index_fill_(0, states, 0.0)
            like = self.transitions[layer].new_empty((len(transitions), *shape.transition_shape))
            self.transitions[layer].index_copy_(0, transitions, identity(like))
        self._is_final.index_fill_(0, transitions, False)


def _beside(flags: Tensor, numbers: Tensor) -> Tensor:
    """``flags [n]`` in the shape that goes with ``numbers [n, ...]``."""
    return flags.view(-1, *[1] * (numbers.ndim - 1))

"""All device memory of requests and cached entries alike: pages of K/V, state slots, transition slots.

One budget is split once, at start, between *pages* (``page_size`` tokens of unrotated K and of V in every
full-attention layer) and *slots* (a state with its convolution tail in every linear layer; a transition in every
linear layer). A state slot holds a request's running state, an entry's end state or a snapshot; a transition slot
belongs to a segment entry. State slot 0 is all zeros and never handed out: the state of "nothing before". One more
state slot and one more page are spare: padded steps write there, and nobody reads them.
Pages are reference counted, since a snapshot shares them with the segments it contains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hypic.engine.affine import Affine, identity
from hypic.engine.segment import Slots
from hypic.engine.sizing import TYPICAL_SEGMENT_TOKENS, Need, split
from hypic.engine.slot_table import SlotTable
from hypic.engine.storage import StorageForm

TransitionKind = Literal["head", "diagonal", "dense"]


@dataclass(frozen=True)
class LinearShape:
    """One linear-attention layer: its state is ``[H, K, V]``, its tail ``[conv_width - 1, conv_channels]``."""

    num_heads: int
    key_dim: int
    value_dim: int
    transition: TransitionKind
    conv_channels: int = 0
    conv_width: int = 1

    @property
    def transition_shape(self) -> tuple[int, ...]:
        kinds = {"head": (), "diagonal": (self.key_dim,), "dense": (self.key_dim, self.key_dim)}
        return (self.num_heads, *kinds[self.transition])

    @property
    def tail_shape(self) -> tuple[int, int]:
        return (self.conv_width - 1, self.conv_channels)


@dataclass(frozen=True)
class AttentionShape:
    """One full-attention layer: ``K [n, num_kv_heads, key_dim]``, ``V [n, num_kv_heads, value_dim]``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Layout:
    """What a model keeps: shapes of its linear and full-attention layers, in order of depth. Sums over layers are asked
    for with every segment, and made once."""

    linear: tuple[LinearShape, ...]
    attention: tuple[AttentionShape, ...]
    dtype: torch.dtype
    state_dtype: torch.dtype

    @cached_property
    def conv_width(self) -> int:
        return max((shape.conv_width for shape in self.linear), default=1)

    @cached_property
    def key_dim(self) -> int:
        """The widest key of the linear layers' heads."""
        return max((shape.key_dim for shape in self.linear), default=64)

    @cached_property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return sum(a.num_kv_heads * (a.key_dim + a.value_dim) for a in self.attention) * self.dtype.itemsize

    @cached_property
    def state_bytes(self) -> int:
        """One state slot: states and convolution tails of all layers."""
        states = sum(s.num_heads * s.key_dim * s.value_dim for s in self.linear) * self.state_dtype.itemsize
        return states + sum(math.prod(s.tail_shape) for s in self.linear) * self.dtype.itemsize

    @cached_property
    def transition_bytes(self) -> int:
        """One transition slot: transitions of all layers."""
        return sum(math.prod(s.transition_shape) for s in self.linear) * self.state_dtype.itemsize


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
        self._allocate()
        self.table = SlotTable(num_running, max_context, device)

    def _split(self, budget_bytes: int, max_context: int, num_running: int) -> tuple[int, int, int]:
        need = split(self.layout, budget_bytes, self.page_size, max_context, num_running, self.segment_tokens)
        return need.pages, need.states, need.transitions

    def _allocate(self) -> None:
        layout, tokens = self.layout, (self.num_pages + 1) * self.page_size
        self.keys = [self._empty((tokens, a.num_kv_heads, a.key_dim), layout.dtype) for a in layout.attention]
        self.values = [self._empty((tokens, a.num_kv_heads, a.value_dim), layout.dtype) for a in layout.attention]
        slots = self.spare_state + 1
        state_shapes = [(slots, s.num_heads, s.key_dim, s.value_dim) for s in layout.linear]
        self.states = [self._empty(shape, layout.state_dtype) for shape in state_shapes]
        self.tails = [self._empty((slots, *s.tail_shape), layout.dtype) for s in layout.linear]
        shapes = [(self.num_transitions, *s.transition_shape) for s in layout.linear]
        self.transitions = [self._empty(shape, layout.state_dtype) for shape in shapes]
        self._is_final = torch.zeros(self.num_transitions, dtype=torch.bool, device=self.device)
        for tensor in (*self.states, *self.tails):
            tensor[0].zero_()

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

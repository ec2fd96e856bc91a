"""Chains of maps as the kernel reads them: one small table of integers, made once per batch and used in every layer.

Nothing here holds a map. An element names where its map lies, in one of at most two sources, and where the state
before it is to be written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

ZERO = -1
"""As a transition index: ``T = 0``, and nothing is read. As an initial index: the chain starts from zero."""
IDENTITY = -2
"""As a transition index: ``T = I``, and nothing is read."""
NOT_WANTED = -1
"""As an output index: the state before this element is not written."""


STILL = -1
"""As a row of angles: this element's end state is taken as it is stored."""


class ChainsError(ValueError):
    """Chains that contradict themselves, or tensors that do not fit them."""


class Turns(NamedTuple):
    """Elements whose end states are rotated along ``K`` as they are read, for transitions of one number a head.

    ``rows [E]`` int32: the row of ``cos, sin [P, R]`` float32 that an element is rotated by, or ``STILL``. Channel
    ``i`` goes with channel ``i + R``, ``i < R``.
    """

    rows: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Chains:
    """``num_chains`` chains of ``E`` elements together; build it with ``Chains.of``. All tensors are ``int32``.

    ``cu_elements [num_chains + 1]``; ``elements [E, 4]`` with the columns source, transition index, state index, output
    index; ``initial_index [num_chains]``. The ``num_*`` fields say how long the tensors must be that these indices
    point into (one number per source for the maps), so that no call has to ask the device.
    """

    cu_elements: Tensor
    elements: Tensor
    initial_index: Tensor
    num_transitions: tuple[int, int]
    num_states: tuple[int, int]
    num_initial: int
    num_outputs: int

    @property
    def num_chains(self) -> int:
        return self.initial_index.shape[0]

    @property
    def num_elements(self) -> int:
        return self.elements.shape[0]

    @staticmethod
    def of(
        cu_elements: Sequence[int] | Tensor,
        transition_index: Sequence[int] | Tensor,
        state_index: Sequence[int] | Tensor,
        initial_index: Sequence[int] | Tensor,
        *,
        source: Sequence[int] | Tensor | None = None,
        out_index: Sequence[int] | Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Chains:
        """Elements in chain order: those of chain ``c`` are ``cu_elements[c] .. cu_elements[c + 1] - 1``.

        ``transition_index [E]`` and ``state_index [E]`` index the source ``source [E]`` (0 or 1; all 0 when left out);
        a transition index may also be ``ZERO`` or ``IDENTITY``. ``initial_index [num_chains]`` is a slot or ``ZERO``.
        ``out_index [E]`` says which row of ``before`` receives the state before an element, each row once;
        ``NOT_WANTED`` for none. Left out, element ``e`` writes row ``e``.

        Raises:
            ChainsError: lengths differ, an index is out of its range, or a row of ``before`` is written twice.
        """
        cu, transition, state, initial = map(_integers, (cu_elements, transition_index, state_index, initial_index))
        size = len(transition)
        sources = torch.zeros(size, dtype=torch.int32) if source is None else _integers(source)
        outputs = torch.arange(size, dtype=torch.int32) if out_index is None else _integers(out_index)
        _check_lengths(cu, initial, size, {"state_index": state, "source": sources, "out_index": outputs})
        _check_ranges(transition, state, initial, sources, outputs)
        return Chains(
            cu_elements=cu.to(device),
            elements=torch.stack([sources, transition, state, outputs], dim=1).contiguous().to(device),
            initial_index=initial.to(device),
            num_transitions=(_end(transition[sources == 0]), _end(transition[sources == 1])),
            num_states=(_end(state[sources == 0]), _end(state[sources == 1])),
            num_initial=_end(initial),
            num_outputs=_end(outputs),
        )

    def starting_at(self, slot: int) -> Chains:
        """The same chains, all started from one slot."""
        return self.once(  # type: ignore[no-any-return]
            ("starting at", slot),
            lambda: replace(self, initial_index=torch.full_like(self.initial_index, slot), num_initial=slot + 1),
        )

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made for the first of a step's layers and read by the others."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}


def _integers(values: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cpu").reshape(-1)


def _end(index: Tensor) -> int:
    """One more than the largest index; 0 if there is none."""
    return max(0, int(index.max()) + 1) if len(index) else 0


def _check_lengths(cu: Tensor, initial: Tensor, size: int, columns: dict[str, Tensor]) -> None:
    if len(cu) != len(initial) + 1 or int(cu[0]) != 0 or int(cu[-1]) != size or bool((cu.diff() < 0).any()):
        raise ChainsError(
            f"cu_elements {cu.tolist()} does not cut {size} elements into {len(initial)} chains; it must rise from 0 "
            f"to {size} and have one entry more than initial_index."
        )
    for name, column in columns.items():
        if len(column) != size:
            raise ChainsError(f"{name} has {len(column)} entries, transition_index has {size}; give one per element.")


def _check_ranges(transition: Tensor, state: Tensor, initial: Tensor, source: Tensor, output: Tensor) -> None:
    for name, index, lowest in (
        ("transition_index", transition, IDENTITY),
        ("state_index", state, 0),
        ("initial_index", initial, ZERO),
        ("source", source, 0),
        ("out_index", output, NOT_WANTED),
    ):
        if len(index) and int(index.min()) < lowest:
            raise ChainsError(f"{name} holds {int(index.min())}; the smallest value it may hold is {lowest}.")
    if len(source) and int(source.max()) > 1:
        raise ChainsError(f"source holds {int(source.max())}; there are two sources, 0 and 1.")
    wanted = output[output >= 0].sort().values
    if bool((wanted.diff() == 0).any()):
        raise ChainsError("out_index names a row of before twice; every wanted state needs a row of its own.")

"""Deliberate bugs inside the engine's own path: every test that claims exactness must fail under those that apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hypic.engine.affine import Affine, identity
from hypic.engine.batch import InteriorLink
from hypic.engine.jobs import Jobs
from hypic.engine.layers import linear_attention, linear_kernels
from hypic.engine.plan import Interior
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment

Inject = Callable[[pytest.MonkeyPatch], None]


def _placed(patch: pytest.MonkeyPatch, spoil: Callable[[Affine], Affine]) -> None:
    """What interiors' maps become before they are composed, in plain steps and in those by kernels."""
    for room in (linear_attention, linear_kernels):
        sound = room._placed

        def faulty(*args: Any, sound: Callable[..., Affine] = sound) -> Affine:
            return spoil(sound(*args))

        patch.setattr(room, "_placed", faulty)


def drop_transition(patch: pytest.MonkeyPatch) -> None:
    """An interior's T is forgotten: taken as the identity."""
    _placed(patch, lambda maps: Affine(identity(maps.transition), maps.end_state))


def drop_end_state(patch: pytest.MonkeyPatch) -> None:
    """An interior's B is forgotten: taken as zero."""
    _placed(patch, lambda maps: Affine(maps.transition, maps.end_state * 0))


def _tail_of(num_tokens: int) -> Inject:
    def inject(patch: pytest.MonkeyPatch) -> None:
        sound = Request._interior

        def faulty(self: Request, span: Interior, entry: CachedSegment) -> InteriorLink:
            return replace(sound(self, span, entry), num_tokens=num_tokens)

        patch.setattr(Request, "_interior", faulty)

    return inject


def shift_seam(by: int) -> Inject:
    """What is cached of the recurrence begins that many tokens after the seam's end."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        sound = Jobs.encode

        def faulty(self: Jobs, request: Request, span: Interior, pages: Any, base: Any) -> Any:
            job = sound(self, request, span, pages, base)
            job.seam += by
            return job

        patch.setattr(Jobs, "encode", faulty)

    return inject


def _cached_positions(position: Callable[[Any, Interior], Any]) -> Inject:
    """Cached keys are rotated to other positions than where they stand."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        def faulty(self: Request) -> Any:
            positions = np.arange(len(self._held().slots))
            for span in self.plan.spans:
                if isinstance(span, Interior):
                    here = slice(span.start, span.stop)
                    positions[here] = position(positions[here], span)
            return positions

        patch.setattr(Request, "_key_positions", faulty)

    return inject


_LINEAR: dict[str, Inject] = {
    "drop-transition": drop_transition,
    "drop-end-state": drop_end_state,
    "seam+1": shift_seam(1),
    "seam-1": shift_seam(-1),
}
_CONV: dict[str, Inject] = {"empty-tail": _tail_of(0)}
# Shows only where an interior is shorter than the convolution's reach.
_SHORT: dict[str, Inject] = {"padded-tail": _tail_of(1000)}
_PLACE: dict[str, Inject] = {
    "position+1": _cached_positions(lambda p, span: p + 1),
    "position-1": _cached_positions(lambda p, span: np.maximum(p - 1, 0)),
    "no-rotation": _cached_positions(lambda p, span: p * 0),
}
FAULTS = _LINEAR | _CONV | _SHORT | _PLACE


def applying(name: str, *, has_short: bool) -> list[str]:
    """The faults that must show in a model of this name; ``has_short``: with interiors of one or two tokens."""
    found = {} if "attention" in name else dict(_LINEAR)
    if name.startswith("qwen") and "attention" not in name:
        found |= _CONV | (_SHORT if has_short else {})
    return list(found if "linear" in name else found | _PLACE)


def cases(names: list[str], *, has_short: bool) -> list[Any]:
    """``(model, fault)`` for all models and the faults that apply to them."""
    pairs = [(name, fault) for name in names for fault in applying(name, has_short=has_short)]
    return [pytest.param(name, fault, id=f"{name}-{fault}") for name, fault in pairs]

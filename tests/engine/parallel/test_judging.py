"""How far an entry is from another of the same text, and what becomes of a connection on which something breaks."""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.engine.parallel.caller import Caller, Self
from hypic.engine.parallel.listener import Asked, Listener
from hypic.engine.parallel.messages import Hello, Ready, Refused, Want, Wants
from hypic.engine.parallel.sending import Answer
from hypic.engine.parallel.view import View
from hypic.engine.payload import difference
from hypic.engine.segment import Identity
from hypic.engine.storage import StorageForm
from hypic.engine.store.image import AttentionPart, EntryImage, LinearPart
from hypic.engine.trust import Trust

NUM_HEADS = 4
COST = {"step_s": 0.01, "token_s": 1e-5, "pair_s": 0.0, "scale": 1.0, "spread": 0.0, "batch_tokens": 4096}
COST["floor_s"] = 0.0
SMALL = 1e-3


def image(transition: Tensor, drop_below: float = 0.0) -> EntryImage:
    """An entry of one layer of each kind, its small transitions dropped."""
    torch.manual_seed(0)
    heads = StorageForm(drop_below=drop_below).kept_heads(transition)
    kept = transition if heads is None else transition[heads.long()]
    linear = LinearPart(kept, torch.rand(NUM_HEADS, 3, 5), torch.rand(2, 7), heads)
    attention = AttentionPart(torch.rand(6, 1, 4), torch.rand(6, 1, 4))
    return EntryImage(b"k", tuple(range(8)), 2, Identity("f", "float32"), (linear,), (attention,))


def with_norms(*sizes: float) -> Tensor:
    """Transitions whose heads have these Frobenius norms."""
    return torch.stack([size * torch.eye(3) / math.sqrt(3) for size in sizes])


def test_the_same_is_no_distance_apart_whatever_was_dropped() -> None:
    whole = image(with_norms(1.0, 0.5, 0.0, 0.2))
    dropped = image(with_norms(1.0, 0.5, 0.0, 0.2), SMALL)
    assert whole.linear[0].heads is None and dropped.linear[0].heads is not None
    assert difference(dropped, whole) == difference(whole, dropped) == difference(dropped, dropped) == 0.0


def test_one_kept_head_is_not_another() -> None:
    one, other = image(with_norms(0.0, 1.0, 0.0, 0.0), SMALL), image(with_norms(0.0, 0.0, 1.0, 0.0), SMALL)
    assert difference(one, other, SMALL) == pytest.approx(math.sqrt(2))


def test_a_head_that_rounding_dropped_is_as_good() -> None:
    kept, lost = image(with_norms(0.0, SMALL, 0.0, 1e-2), SMALL), image(with_norms(0.0, 0.0, 0.0, 1e-2), SMALL)
    assert difference(kept, lost, SMALL) == difference(lost, kept, SMALL) == 0.0
    assert difference(kept, lost) > 0.09  # where nothing is dropped it is another entry
    larger = image(with_norms(0.0, 2 * SMALL, 0.0, 1e-2), SMALL)
    assert difference(larger, lost, SMALL) > 0.19


def test_other_shapes_and_parts_are_infinitely_far() -> None:
    sound = image(with_norms(1.0, 1.0, 1.0, 1.0))
    part = sound.linear[0]
    for strange in (
        replace(sound, linear=(replace(part, end_state=part.end_state[:1]),)),
        replace(sound, linear=(replace(part, tail=part.tail[:, :1]),)),
        replace(sound, linear=(replace(part, transition=None),)),
        replace(sound, attention=()),
        replace(sound, attention=sound.attention * 2),
    ):
        assert difference(strange, sound) == difference(sound, strange) == math.inf


@pytest.mark.parametrize(("found", "state"), [((0.0, 0.0, 1.0, 0.0), "refused"), ((0.0, 1.0, SMALL, 0.0), "trusted")])
def test_a_peer_that_keeps_other_heads_is_judged(found: Sequence[float], state: str) -> None:
    reports: list[object] = []
    canary: Any = SimpleNamespace(image=image(with_norms(0.0, 1.0, 0.0, 0.0), SMALL))
    view = View()
    view.meet([Hello(1, 1, 9, "h", 1, "cpu", "f", COST)])
    trust = Trust(canary, torch.float32, SMALL, view, lambda *said: reports.append(said))
    assert trust.due(0.0, {1}) == []  # it is not connected
    view.becomes((1, 1), "connected")
    assert trust.due(0.0, {2}) == [] and trust.due(0.0, {1}) == [(1, 1)] and trust.due(0.0, {1}) == []
    trust.settle((1, 1), trust.apart(image(with_norms(*found), SMALL)))
    assert view.peers[1].state == state and len(reports) == (state == "refused")


class Refusing:
    """Answers everything with a refusal."""

    def want(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            one.reply(Answer(Refused(one.want.nonce, one.want.generation, "no")))

    def cancel(self, ask: tuple[int, int]) -> None: ...


class Broken:
    """An owner that cannot take in what comes."""

    def __init__(self) -> None:
        self.lost_for: queue.SimpleQueue[str] = queue.SimpleQueue()

    def expects(self, *entry: object) -> bool:
        return True

    def connected(self, peer: tuple[int, int], carrier: str) -> None: ...

    def parcel_came(self, *entry: object) -> None: ...

    def refused(self, peer: tuple[int, int], message: Refused) -> None:
        raise KeyError("a mistake")

    def is_ready(self, peer: tuple[int, int], message: Ready) -> None: ...

    def lost(self, caller: Caller, reason: str) -> None:
        self.lost_for.put(reason)


def test_a_connection_on_which_anything_breaks_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    def me(rank: int) -> Self:
        return Self(rank, 1, b"secret", torch.device("cpu"), "cpu", "socket")

    listener, owner = Listener(me(1), "127.0.0.1", Refusing()), Broken()
    try:
        with caplog.at_level(logging.ERROR, logger="hypic"):
            caller = Caller(me(0), Hello(1, 1, 1, "127.0.0.1", listener.port, "cpu", "f", {}), owner)
            caller.send(Wants((Want(1, 1, "ab", (1,), 8),)))
            assert "could not be taken in" in owner.lost_for.get(timeout=20)
    finally:
        listener.close()
    assert "worker 1" in caplog.text and "a mistake" in caplog.text

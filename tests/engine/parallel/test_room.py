"""What others send waits with them until there is room here: never too much at once, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.engine.parallel import wire
from hypic.engine.parallel.caller import Self
from hypic.engine.parallel.cost import PARCEL_BYTES
from hypic.engine.parallel.gate import Gate
from hypic.engine.parallel.listener import Asked, Listener
from hypic.engine.parallel.messages import Cancel, Entry, Go, Greet, Greeted, Message, Parcel, Ready, Want, Wants
from hypic.engine.parallel.room import Room
from hypic.engine.parallel.sending import Answer, Packed
from hypic.engine.parallel.transport import SocketTransport
from hypic.errors import WorkerLost

# -- the budget ------------------------------------------------------------------------------------------------------


def test_half_of_the_budget_is_promised_and_the_rest_is_called_in_turn() -> None:
    room = Room(100)
    assert [room.promise(nonce, 25) for nonce in (1, 2, 3, 4, 5, 6)] == [True, True, False, False, False, False]
    assert room.may_come(1) and not room.may_come(3) and room.may_come(77)
    assert room.ready(4) == [4] and room.ready(3) == [3] and room.ready(6) == [] == room.ready(5)
    assert room.ready(1) == [] == room.ready(99) == room.ready(4)  # said twice, or unasked
    assert room.taken_bytes == 100 and not room.may_come(6)
    assert room.end([1]) == [6] and room.end([99]) == [] and room.end([2, 4]) == [5]
    assert room.end([3, 5, 6]) == [] and room.taken_bytes == 0 and room.most_bytes == 100


def test_one_always_comes_however_large() -> None:
    room = Room(0)
    assert not room.promise(1, 500) and not room.promise(2, 700)
    assert room.ready(2) == [2] and room.ready(1) == [] and room.end([2]) == [1] and room.most_bytes == 700
    wide = Room(100)
    assert wide.promise(1, 50) and not wide.promise(2, 400) and not wide.promise(3, 10)
    assert wide.ready(2) == [2] and wide.ready(3) == [] and wide.end([2]) == [3]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 40),
    st.lists(st.integers(1, 30), min_size=1, max_size=25),
    st.randoms(use_true_random=False),
)
def test_whatever_happens_it_is_within_bounds_and_all_is_called(budget: int, sizes: list[int], random: object) -> None:
    """In any order: asked, ready, given up or written at any time. What is called ends some time, and then all is."""
    room, chance = Room(budget), random
    nonces = list(range(len(sizes)))
    made = [nonce for nonce in nonces if not room.promise(nonce, sizes[nonce])]
    coming = set(nonces) - set(made)
    chance.shuffle(made)  # type: ignore[attr-defined]
    waiting = set(made)
    bound = max(budget, budget // 2 + max(sizes))
    while made or coming:
        if made and (not coming or chance.random() < 0.6):  # type: ignore[attr-defined]
            called = room.ready(made.pop())
        else:
            nonce = chance.choice(sorted(coming | waiting))  # type: ignore[attr-defined]
            called = room.end([nonce])
            made = [one for one in made if one != nonce]
            coming.discard(nonce)
            waiting.discard(nonce)
        assert set(called) <= waiting
        waiting -= set(called)
        coming |= set(called)
        assert room.taken_bytes == sum(sizes[nonce] for nonce in coming) <= bound
        assert coming or made or not waiting, "some wait, and nothing will end it"
    assert not waiting and room.taken_bytes == 0 and room.most_bytes <= bound


def test_a_gate_keeps_what_it_was_shut_for() -> None:
    gate: Gate[str] = Gate()
    gate.shut(1)
    gate.shut(2)
    gate.shut(3)
    assert gate.holds(1, "a") and not gate.holds(9, "z")
    assert gate.open(2) is None and not gate.holds(2, "b")  # opened before it was there
    assert gate.open(1) == "a" and gate.open(1) is None
    assert gate.holds(3, "c") and gate.open_all() == ["c"] and not gate.holds(3, "d")


# -- the side that has it --------------------------------------------------------------------------------------------


class Leased:
    """Some bytes; whether they are still held."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    num_bytes = PARCEL_BYTES // 2
    most = 2

    def packed_with(self, others: Sequence[Any]) -> Packed:
        if 1 + len(others) > self.most:
            raise torch.OutOfMemoryError("no memory for so many")
        return Packed((), torch.zeros(32 * (1 + len(others)), dtype=torch.uint8), 0)

    def end(self) -> None:
        self.has_ended.set()


class Made:
    """Has everything at once."""

    def __init__(self) -> None:
        self.leases: dict[int, Leased] = {}

    def want(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            lease = self.leases[one.want.nonce] = Leased()
            one.reply(Answer(Entry(one.want.nonce, 1, one.want.key, 3, 0.0, True), lease))

    def cancel(self, ask: tuple[int, int]) -> None: ...


@pytest.fixture
def lender() -> Iterator[tuple[Made, wire.Wire]]:
    """One that has everything, and a connection to it."""
    serving = Made()
    listener = Listener(Self(1, 1, b"secret", torch.device("cpu"), "cpu", "socket"), "127.0.0.1", serving)
    asker = wire.connect("127.0.0.1", listener.port, b"secret")
    try:
        asker.send(Greet(0, 1, 1, 1, "socket", "cpu"))
        assert isinstance(asker.receive(), Greeted)
        yield serving, asker
    finally:
        asker.close()
        listener.close()


def wants(*waits: bool) -> Wants:
    return Wants(tuple(Want(nonce, 1, "ab", (1,), 8, waits=wait) for nonce, wait in enumerate(waits)))


def came(asker: wire.Wire) -> list[int]:
    return bytes_of(asker, asker.receive())


def bytes_of(asker: wire.Wire, message: Message) -> list[int]:
    assert isinstance(message, Parcel) and message.num_bytes == 32 * len(message.entries)
    asker.receive_bytes(message.num_bytes)
    return [entry.nonce for entry in message.entries]


def all_came(asker: wire.Wire, count: int) -> list[int]:
    """In one parcel or several, as the other side's threads had it."""
    found: list[int] = []
    while len(found) < count:
        message = asker.receive()
        found += [] if isinstance(message, Ready) else bytes_of(asker, message)
    return found


def test_what_waits_is_sent_when_it_is_told_to_and_in_that_order(lender: tuple[Made, wire.Wire]) -> None:
    serving, asker = lender
    asker.send(wants(True, False, True))
    assert asker.receive() == Ready(0, 1)
    message = asker.receive()  # word of another may come before an entry that was there sooner
    if message == Ready(2, 1):
        assert came(asker) == [1]
    else:
        assert bytes_of(asker, message) == [1] and asker.receive() == Ready(2, 1)
    assert serving.leases[1].has_ended.wait(10) and not serving.leases[0].has_ended.is_set()
    asker.send(Go((2, 0, 77)))
    assert all_came(asker, 2) == [2, 0]
    assert serving.leases[0].has_ended.wait(10) and serving.leases[2].has_ended.wait(10)


def test_without_memory_for_several_each_comes_alone(
    lender: tuple[Made, wire.Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, asker = lender
    monkeypatch.setattr(Leased, "most", 1)
    asker.send(wants(*[False] * 6))
    assert all_came(asker, 6) == [0, 1, 2, 3, 4, 5]
    assert all(lease.has_ended.wait(10) for lease in serving.leases.values())
    monkeypatch.setattr(Leased, "most", 0)
    asker.send(wants(False))
    with pytest.raises(WorkerLost):
        asker.receive()
    assert serving.leases[0].has_ended.wait(10)


@pytest.mark.parametrize("fault", [WorkerLost("gone"), RuntimeError("CUDA error"), torch.OutOfMemoryError("no room")])
def test_what_cannot_be_sent_ends_the_connection_and_holds_nothing(
    fault: Exception, lender: tuple[Made, wire.Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is packed already nor what waits for a place among it."""

    def fails(*_: Any) -> None:
        time.sleep(0.3)  # more is packed meanwhile, and the rest waits
        raise fault

    serving, asker = lender
    monkeypatch.setattr(SocketTransport, "send", fails)
    monkeypatch.setattr(Leased, "num_bytes", PARCEL_BYTES)
    asker.send(wants(*[False] * 6))
    with pytest.raises(WorkerLost):
        asker.receive()
    assert all(lease.has_ended.wait(10) for lease in list(serving.leases.values())) and len(serving.leases) == 6


def test_what_waits_is_let_go_when_it_is_cancelled_or_the_connection_ends(lender: tuple[Made, wire.Wire]) -> None:
    serving, asker = lender
    asker.send(wants(True, True))
    assert [asker.receive(), asker.receive()] == [Ready(0, 1), Ready(1, 1)]
    asker.send(Cancel(0))
    assert serving.leases[0].has_ended.wait(10) and not serving.leases[1].has_ended.is_set()
    asker.close()
    assert serving.leases[1].has_ended.wait(10)

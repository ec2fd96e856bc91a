"""What is said and how: messages, frames, packed entries, the table of wants. Whatever is strange is refused."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.engine.parallel import messages, wire
from hypic.engine.parallel.codec import decode, encode
from hypic.engine.parallel.liveness import Times, longest_s
from hypic.engine.parallel.messages import Beat, Entry, Greet, Hello, Parcel, Refused, Roster, Want, Wants
from hypic.engine.parallel.packing import ROW_BYTES, digest, most_bytes, sections
from hypic.engine.parallel.view import View
from hypic.engine.parallel.wants import Patience, Pending
from hypic.engine.parallel.wants import Wants as Table
from hypic.engine.segment import CachedSegment
from hypic.engine.speech import result_of, result_to_json, task_of, task_to_json
from hypic.errors import PromptTooLong, WorkerLost

COST = {"step_s": 0.01, "token_s": 1e-5, "pair_s": 0.0, "scale": 1.0, "spread": 0.0, "batch_tokens": 4096}
COST["floor_s"] = 0.0
EXAMPLES = [
    Hello(1, 2, 3, "127.0.0.1", 4, "cpu", "f", COST),
    Beat(1, 2, 3, 0.5, ("aa",), ()),
    Roster(({"rank": 1},)),
    Greet(0, 1, 2, 3, "gloo", "cpu", "file:/x"),
    Want(1, 2, "ab", (1, 2, 3), 8, None, "name", None),
    Wants((Want(1, 2, "ab", (1, 2, 3), 8), Want(2, 2, "cd", (), 8, "n"))),
    Parcel((Entry(1, 2, "ab", 64, 0.1, False), Entry(3, 2, "cd", 0, 0.2, True, 7.5)), (-1, 3), 4096, -5, 0.01),
    Refused(1, 2, "no"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_comes_as_it_was_sent(message: messages.Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b'["Want"]', b'["os.system",{}]', b'["Stop",{"x":1}]', b'["Abort",{"id":7}]', b"\xff\xfe",
        b'["Beat",{"rank":true,"generation":1,"number":1,"queued_s":0.1}]', b'["Abort",{}]', b"[" * 100_000,
        b'["Want",{"nonce":1,"generation":1,"key":"a","ids":["x"],"seam":1}]',
        b'["Wants",{"items":[7]}]', b'["Wants",{"items":[{"nonce":1,"generation":1,"key":"a","ids":[true],"seam":1}]}]',
        b'["Wants",{"items":[{"nonce":1}]}]', b'["Stop",[]]',
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(WorkerLost, match="no message"):
        decode(data)


def pair(one: bytes, other: bytes) -> tuple[Any, Any]:
    """Both ends of a connection whose sides know these secrets; errors in their place."""
    server = wire.listen("127.0.0.1")
    found: list[Any] = [None, None]

    def accept() -> None:
        try:
            found[1] = wire.accepted(server.accept()[0], other)
        except WorkerLost as error:
            found[1] = error

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        found[0] = wire.connect("127.0.0.1", server.getsockname()[1], one)
    except WorkerLost as error:
        found[0] = error
    thread.join(20)
    server.close()
    return found[0], found[1]


def test_frames_and_bytes_go_over_a_wire() -> None:
    here, there = pair(b"secret", b"secret")
    data = torch.arange(100_000, dtype=torch.int64).view(torch.uint8)
    sender = threading.Thread(target=lambda: [here.send(EXAMPLES[5], data), here.send(EXAMPLES[6])])
    sender.start()
    assert there.receive() == EXAMPLES[5] and torch.equal(there.receive_bytes(len(data)), data)
    assert there.receive() == EXAMPLES[6]
    sender.join()
    here.close()
    with pytest.raises(WorkerLost, match="closed"):
        there.receive()


def test_a_stranger_is_not_let_in() -> None:
    for end in pair(b"secret", b"another"):
        assert isinstance(end, WorkerLost)


def test_closing_wakes_whoever_reads() -> None:
    here, there = pair(b"s", b"s")
    failed: list[WorkerLost] = []

    def read() -> None:
        try:
            here.receive()
        except WorkerLost as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    here.close()
    thread.join(10)
    assert failed and not thread.is_alive()
    there.close()


def test_a_frame_that_is_too_long_ends_the_connection() -> None:
    here, there = pair(b"s", b"s")
    here._socket.sendall((2**40).to_bytes(8, "little"))
    with pytest.raises(WorkerLost, match="announced"):
        there.receive()


def test_nobody_listens() -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    with pytest.raises(WorkerLost, match="no worker answers"):
        wire.connect("127.0.0.1", port, b"s")


def summed(data: Tensor) -> int:
    return int(digest(data))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sections_lie_apart_and_what_is_not_finite_is_found_in_them(dtype: torch.dtype) -> None:
    shapes = [(dtype, (300, 7)), (torch.int32, (7,)), (torch.float64, (3, 5)), (dtype, (1,)), (dtype, (0, 7))]
    found = sections(shapes)
    data = found.empty(torch.device("cpu")).fill_(255)
    for start, stop in found.gaps:
        data[start:stop].zero_()
    parts = found.of(data)
    for number, (part, (kind, shape)) in enumerate(zip(parts, shapes, strict=True)):
        assert part.dtype == kind and part.shape == shape
        part.copy_(torch.full(shape, number + 1))
    assert all((part == number + 1).all() for number, part in enumerate(parts))  # none lies in another
    assert len(data) % ROW_BYTES == 0 and len(data) <= most_bytes(sum(part.nbytes for part in parts), len(parts))
    assert found.is_finite(data)
    for number, place in ((0, 2099), (0, 0), (3, 0), (2, 7)):
        for strange in (float("nan"), float("inf"), -float("inf")):
            part = parts[number].view(-1)
            before, part[place] = part[place].clone(), strange
            assert not found.is_finite(data)
            part[place] = before
    assert found.is_finite(data) and sections([]).is_finite(data[:0])


def test_any_flipped_bit_and_any_swap_changes_the_summed() -> None:
    data = torch.randint(0, 256, (3 * ROW_BYTES + 1003,), dtype=torch.uint8)
    whole = summed(data)
    for place in range(0, len(data), 3):
        damaged = data.clone()
        damaged[place] ^= 1 << (place % 8)
        assert summed(damaged) != whole
    words = data[: 3 * ROW_BYTES].view(torch.int64)
    whole_rows = summed(words.view(torch.uint8))
    for place in range(1, len(words)):
        swapped = words.clone()
        swapped[[0, place]] = swapped[[place, 0]]
        assert summed(swapped.view(torch.uint8)) != whole_rows
    assert summed(data[:-1]) != whole and summed(data.clone()) == whole


def pending(nonce: int, peer: tuple[int, int], predicted_s: float, late: float = 1.0) -> Pending:
    entry = CachedSegment(b"k" * 32, (1, 2), np.zeros(1, dtype=int), (), 0, 0, 0)
    return Pending(nonce, entry, peer, False, 0.0, predicted_s, 0, late)


def test_only_the_process_that_was_asked_may_answer_and_only_once() -> None:
    wants = Table()
    wants.add(pending(1, (3, 7), 10.0))
    assert wants.find(1, (3, 8)) is None and wants.find(1, (2, 7)) is None and wants.find(2, (3, 7)) is None
    assert wants.find(1, (3, 7)) is not None
    assert wants.take(1) is not None and wants.take(1) is None and wants.find(1, (3, 7)) is None


def test_deadlines_and_lost_peers_take_wants_out() -> None:
    wants = Table()
    for nonce in range(4):
        wants.add(pending(nonce, (nonce % 2, 1), float(nonce)))
    assert [p.nonce for p in wants.overdue(4.0, Patience(), lambda peer: "silent")] == [0, 1]
    assert [p.nonce for p in wants.of((1, 1))] == [3] and len(wants) == 1


def test_who_works_is_waited_for_longer_than_who_is_silent() -> None:
    patience, punctual, late = Patience(4.0, 1.0, 60.0), pending(1, (1, 1), 2.0), pending(2, (1, 1), 2.0, late=3.0)
    assert [patience.seconds(punctual, life) for life in ("silent", "idle", "at work")] == [8.0, 8.0, 60.0]
    assert [patience.seconds(late, life) for life in ("silent", "idle", "at work")] == [8.0, 24.0, 96.0]
    assert patience.seconds(pending(3, (1, 1), 1e-3), "idle") == 1.0


def test_a_view_knows_how_its_peers_are_and_how_late_they_were() -> None:
    view = View()
    view.meet([Hello(1, 1, 9, "h", 1, "cpu", "f", COST)])
    assert view.life((1, 1), 0.0) == "idle" and view.life((1, 1), 10.0) == "silent" == view.life((1, 2), 0.0)
    view.heard(Beat(1, 1, 1, 0.0, busy_s=5.0, scale=2.0), now=10.0)
    assert view.life((1, 1), 11.0) == "at work" and view.peers[1].encode.scale == 2.0
    view.heard(Beat(1, 1, 2, 0.0, scale=float("nan")), now=11.0)
    assert view.life((1, 1), 11.0) == "idle" and view.peers[1].encode.scale == 2.0
    for _ in range(30):
        view.came(1, 1, predicted_s=1.0, seconds=5.0)
    assert view.peers[1].late == pytest.approx(5.0, rel=0.01)
    for _ in range(30):
        view.came(1, 1, predicted_s=1e-3, seconds=0.2)  # so short that it is no measure
    assert view.peers[1].late == pytest.approx(1.0, rel=0.01)


def test_silence_and_a_step_without_end_are_death_and_slowness_is_not() -> None:
    times, hello = Times(silence_s=10.0, hang_s=60.0), Hello(1, 1, 9, "h", 1, "cpu", "f", {**COST, "token_s": 0.01})
    usual_s = longest_s(hello, Beat(1, 1, 1, 0.0))
    assert (
        usual_s == pytest.approx(8 * (0.01 + 4096 * 0.01))
        and longest_s(hello, Beat(1, 1, 1, 0.0, scale=3.0)) == 3 * usual_s
    )
    assert not times.fault(9.0, 50.0, 1.0) and not times.fault(0.0, usual_s - 1, usual_s)
    assert "heard" in times.fault(11.0, 0.0, usual_s) and "one step" in times.fault(0.0, 61.0, 1.0)
    with pytest.raises(WorkerLost, match="worker 1"):
        longest_s(Hello(1, 1, 9, "h", 1, "cpu", "f", {}), Beat(1, 1, 1, 0.0))


def test_a_view_knows_generations_and_lets_failing_peers_rest() -> None:
    view = View()
    view.meet([Hello(1, 1, 9, "h", 1, "cpu", "f", COST)])
    view.peers[1].state = "trusted"
    view.heard(Beat(1, 1, 1, 2.0, ("a", "b")), now=0.0)
    view.heard(Beat(1, 2, 1, 9.0, ("z",)), now=0.0)
    assert view.holders("a", [1]) == {1} and view.holders("z", [1]) == set()
    assert view.members(0.5)[0].queued_s == pytest.approx(1.5)
    view.promised(1, 5.0, now=1.0)
    assert view.members(1.0)[0].queued_s == pytest.approx(5.0)
    assert view.failed(1, 1, now=1.0) == 1 and view.members(1.5) == [] and len(view.members(2.5)) == 1
    assert view.failed(1, 1, now=3.0) == 2 and view.members(4.5) == [] and len(view.members(5.5)) == 1
    assert view.failed(1, 9, now=3.0) == 0
    view.meet([Hello(1, 2, 9, "h", 1, "cpu", "f", COST)])
    assert view.peers[1].held == set() and view.peers[1].state == "met"
    view.meet([])
    assert view.peers == {}


def test_requests_and_answers_travel_whole() -> None:
    from dataclasses import replace

    from hypic.engine.plan import Piece
    from hypic.engine.task import Task
    from hypic.types import CacheReport, Completion, Policy, SamplingParams, SegmentReport, TokenLogprob, Usage
    from tests.engine.prompts import few_segments

    pieces = [
        Piece((7, 8), namespaces=frozenset({"b", "a"}), place=3, ends=(1, 2)),
        *few_segments(),
        Piece((9,), None, True, is_answer=True),
    ]
    task = Task("id", pieces, SamplingParams(stop=["x"], seed=3), Policy(seam=4), 0.5, notes=("n",), generated=(4,))
    assert task_of("id", json.loads(json.dumps(task_to_json(task)))) == task
    report = CacheReport((SegmentReport("document", "n", None, "hit", 7),), 7, 1, 6, {"ttft": 0.1}, notes=("a",))
    logprob = TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.0)))
    whole = Completion("text", (3,), "", "stop", (logprob,), Usage(7, 1, 6), report)
    for result in (whole, replace(whole, report=None, usage=None)):
        assert result_of(json.loads(json.dumps(result_to_json(result)))) == result
    error = result_of(result_to_json(PromptTooLong("it is too long")))
    assert type(error) is PromptTooLong and str(error) == "it is too long"
    assert "HypicError" in type(result_of({"error": "os", "message": "m"})).__name__
    for strange in ({}, {"text": 1}, {**result_to_json(whole), "token_ids": ["x"]}):
        with pytest.raises(WorkerLost):
            result_of(strange)
    with pytest.raises(WorkerLost):
        task_of("id", {**task_to_json(task), "policy": {"seam": -1}})

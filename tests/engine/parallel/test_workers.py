"""Several workers give one worker's answers and entries; what they hold and leave behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hypic.engine import arrivals
from hypic.engine.parallel.wants import Patience
from hypic.engine.payload import difference
from hypic.engine.plan import Piece
from hypic.engine.sizing import Need
from hypic.engine.store.image import EntryImage
from tests.checkpoints import minimax, qwen
from tests.engine.parallel.running import ENCODING, POLICY, Running, cold_prompt, config, is_running, running, until
from tests.engine.prompts import live, seg

MAKERS = {"qwen": qwen, "minimax": minimax}
# How far two workers' entries may be apart, relatively, in float64.
WITHIN = 1e-10


def prompts() -> list[list[Piece]]:
    shared = seg(80, 5)
    one = [live(40, 1), shared, *cold_prompt(101)[1:]]
    two = [live(3, 2), *cold_prompt(102, count=3)[1:-1], shared, live(4, 6)]
    return [one, two, cold_prompt(103, count=9, num_tokens=40)]


def answers(engine: Running) -> list[tuple[int, ...]]:
    ids = [engine.submit(prompt) for prompt in prompts()]
    return [engine.answer(id)[0] for id in ids]


def compared(engine: Running, alone: Running) -> None:
    """Workers and one alone, both holding nothing."""
    expected, entries = answers(alone), alone.images()
    counts = engine.workers.peers.counts
    came, fell_back = counts.came, counts.fell_back
    found, images = answers(engine), engine.images()
    assert counts.came >= came + 4 and counts.fell_back == fell_back
    again = answers(engine)
    assert engine.leaked() == Need()
    assert found == again == expected
    assert images.keys() == entries.keys()
    assert max(difference(images[key], entries[key]) for key in entries) < WITHIN
    assert min(difference(spoiled(images[key]), entries[key]) for key in entries) > 100 * WITHIN


def spoiled(image: EntryImage) -> EntryImage:
    """An entry whose states are off by a millionth: the measure sees it."""
    states = [replace(part, end_state=part.end_state * (1 + 1e-6)) for part in image.linear]
    return replace(image, linear=tuple(states))


def test_three_workers_give_the_tokens_and_entries_of_one(three: Running, alone: Running) -> None:
    alone.leaked()
    compared(three, alone)
    assert {peer.carrier for peer in three.workers.peers.view.peers.values()} <= {"gloo", "socket"}


@pytest.mark.parametrize(
    ("num_workers", "name", "carrier"), [(2, "qwen", "socket"), (2, "minimax", "gloo"), (4, "qwen", "gloo")]
)
def test_two_and_four_workers_give_the_tokens_and_entries_of_one(
    tmp_path: Path, num_workers: int, name: str, carrier: str
) -> None:
    folder = MAKERS[name](tmp_path / "model")
    with (
        running(folder, 1) as alone,
        running(folder, num_workers, replace(ENCODING, carrier=carrier, planner="round-robin")) as several,
    ):
        compared(several, alone)
        peers = several.workers.peers.view.peers
        assert {peer.carrier for peer in peers.values()} == {carrier}
        until(lambda: all(peer.held for peer in peers.values()))  # each has encoded something
        pids = [hello.pid for hello in several.workers.supervisor.hellos]
    assert len(pids) == num_workers - 1 and not any(map(is_running, pids))


def test_workers_that_ask_each_other_with_little_room_go_on(folder: Path, alone: Running) -> None:
    """All combine and all encode for all, each with room for one entry."""
    setup = replace(ENCODING, planner="round-robin", routes=True, room_bytes=1, patience=Patience(least_s=30.0))
    with running(folder, 3, setup) as engine:
        prompts = [cold_prompt(seed, count=8) for seed in range(350, 362)]
        ids = [engine.submit(prompt) for prompt in prompts]
        found = [engine.answer(id)[0] for id in ids]
        assert found == [alone.ask(prompt)[0] for prompt in prompts]
        assert engine.workers.peers.counts.fell_back == 0 and engine.leaked() == Need()


def test_an_entry_that_a_peer_holds_is_fetched_and_reported_as_a_hit(three: Running) -> None:
    peers, prompt = three.workers.peers, cold_prompt(110, count=8)
    came, fetched = peers.counts.came, peers.counts.fetched
    expected, first = three.ask(prompt)
    sent = peers.counts.came - came
    assert sent == 5 and {s.outcome for s in first.segments} == {"encoded"}
    assert sum("by worker" in s.reason for s in first.segments) == sent
    keys = [key.hex() for key in three.images()]
    until(lambda: peers.num_held(1, keys) + peers.num_held(2, keys) == sent)
    three.leaked()  # this worker forgets all
    found, second = three.ask(prompt)
    assert found == expected and second.num_hits == peers.counts.fetched - fetched == sent
    assert second.computed_tokens < first.computed_tokens


def test_what_comes_and_cannot_be_written_is_encoded_here(
    three: Running, alone: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of memory beside the pool: nobody else would see that it is missing."""
    peers, prompt, counts = three.workers.peers, cold_prompt(115), three.workers.peers.counts
    came, fell_back = counts.came, counts.fell_back

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(arrivals, "write", fails)
        found, report = three.answer(three.submit(prompt), 20.0)
    assert found == alone.ask(prompt)[0] and {s.outcome for s in report.segments} == {"encoded"}
    assert counts.came == came and counts.fell_back == fell_back + 4
    assert not any("by worker" in s.reason for s in report.segments)
    until(lambda: peers.room.taken_bytes == 0)
    assert three.leaked() == Need()
    counts.fell_back = fell_back  # which others of these tests look at


def test_times_to_live_hold_on_both_workers(three: Running) -> None:
    """What a worker encodes for this one ends with the text's time, and what it holds is not used longer here."""
    peers, prompt = three.workers.peers, cold_prompt(120)
    short = [replace(piece, segment=piece.segment and replace(piece.segment, ttl_s=600.0)) for piece in prompt]
    three.ask(short)
    first = {key: image.expires_s for key, image in three.images().items()}
    keys = [key.hex() for key in first]
    until(lambda: peers.num_held(1, keys) + peers.num_held(2, keys) == 4)
    three.leaked()  # this worker forgets all
    assert three.ask(prompt)[1].num_hits == 4
    second = [(key, image.expires_s) for key, image in three.images().items() if image.expires_s is not None]
    assert len(second) == 4 and all(first[key] == expires_s for key, expires_s in second)


def test_a_client_that_goes_away_cancels_everywhere(three: Running) -> None:
    peers = three.workers.peers
    asked = peers.counts.asked
    ids = [three.submit(cold_prompt(seed, count=6, num_tokens=300)) for seed in range(131, 139)]
    until(lambda: peers.counts.asked > asked)
    for id in ids:
        three.driver.abort(id)
    until(lambda: len(peers.wants) == 0)
    assert three.leaked() == Need()
    assert len(three.ask(cold_prompt(140))[0]) == 8 and three.leaked() == Need()


def test_segments_of_deterministic_requests_are_asked_of_those_that_give_the_same_bits(
    three: Running, alone: Running
) -> None:
    exact, peers = replace(POLICY, deterministic=True), three.workers.peers
    expected, _ = alone.ask(cold_prompt(150), policy=exact)
    entries, came = alone.images(), peers.counts.came
    found, _ = three.ask(cold_prompt(150), policy=exact)
    images = three.images()
    assert peers.counts.came >= came + 3 and peers.counts.fell_back == 0 and found == expected
    keys = [key for key, entry in entries.items() if entry.deterministic]
    assert len(keys) == 6 and all(_is_equal(images[key], entries[key]) for key in keys)
    asked = peers.counts.asked
    for peer in peers.view.peers.values():
        peer.is_exact = False
    assert three.ask(cold_prompt(151), policy=exact) and peers.counts.asked == asked
    for peer in peers.view.peers.values():
        peer.is_exact, peer.encode = True, replace(peer.encode, batch_tokens=50)
    assert (
        three.ask(cold_prompt(152), policy=exact) and peers.counts.asked == asked
    )  # there they would be run in pieces
    assert three.ask(cold_prompt(153)) and peers.counts.asked > asked
    for peer in peers.view.peers.values():
        peer.encode = replace(peer.encode, batch_tokens=8192)
    assert three.leaked() == Need()


def _is_equal(one: EntryImage, other: EntryImage) -> bool:
    return all(torch.equal(one.tensors[name], tensor) for name, tensor in other.tensors.items())


def test_one_worker_starts_nothing(alone: Running) -> None:
    assert alone.started.workers is None
    assert config(1).workers == 1 and len(alone.ask(cold_prompt(160))[0]) == 8

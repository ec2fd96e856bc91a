"""Workers that encode behind a primer: what is lent, what is refused, and two of them against one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hypic.engine import starting, workers
from hypic.engine.parallel.messages import Entry, Refused, Want
from hypic.engine.payload import difference
from hypic.engine.segment import Primer
from hypic.engine.sizing import Need
from tests.checkpoints import qwen, random_ids
from tests.engine.parallel.running import ENCODING, POLICY, VOCABULARY, Running, cold_prompt, config, running, until
from tests.engine.parallel.test_lending import held, lent
from tests.engine.tiny_tokenizers import save_bytelevel

TEXT = "The lighthouse keeper counts ships.\n\nA letter came from the harbour office."
# How far two workers' entries may be apart, relatively, in float64.
WITHIN = 1e-10


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, which reads a primer."""
    return save_bytelevel(qwen(tmp_path_factory.mktemp("worded") / "model", vocab_size=352))


@pytest.fixture(scope="module")
def lender(worded: Path) -> Iterator[Running]:
    with running(worded, 1, primer=TEXT) as engine:
        yield engine


def want(engine: Running, nonce: int, seed: int, behind: str) -> Want:
    ids = tuple(random_ids(40, seed))
    key = engine.started.identity.key(ids, POLICY.seam, None, False, behind)
    return Want(nonce, 1, key.hex(), ids, POLICY.seam, primer=behind)


def digest(engine: Running) -> str:
    (found,) = engine.started.identity.primers
    return found.digest


def test_what_is_encoded_behind_the_same_is_lent(lender: Running) -> None:
    for nonce, was_held in ((1, False), (2, True)):
        asked = want(lender, nonce, 301, digest(lender))
        answer, kept = lent(lender, asked), held(lender, asked)
        assert isinstance(answer, Entry) and answer.was_held is was_held
        assert kept is not None and kept.primer == digest(lender)


def test_each_rung_is_lent(worded: Path) -> None:
    """By its digest; what it is to be encoded behind is no matter of the asker's prompt."""
    with running(worded, 1, primer=f"---\n\n{TEXT}\n\n---\n\nThe ferry is late.") as lender:
        rungs = lender.started.identity.primers
        assert [rung.num_passages for rung in rungs] == [0, 2, 3]
        kept = []
        for nonce, rung in enumerate(rungs, 11):
            asked = want(lender, nonce, 305, rung.digest)
            assert isinstance(lent(lender, asked), Entry)
            kept.append(held(lender, asked))
            assert kept[-1] is not None and kept[-1].primer == rung.digest
        assert len({one.state_slot for one in kept if one is not None}) == 3


def test_a_lender_without_room_behind_the_rung_refuses(worded: Path) -> None:
    """And encodes nothing that nobody asked for."""
    with running(worded, 1, primer=f"---\n\n{TEXT}") as lender:
        identity = lender.started.identity
        rung = identity.primers[1]
        asked = want(lender, 21, 306, rung.digest)
        narrow = replace(identity, primers=(identity.primers[0], Primer(rung.ids, len(asked.ids) - 1, 2)))
        lender.started.loop.call(lambda engine: setattr(engine, "runner", replace(engine.runner, identity=narrow)))
        answer = lent(lender, asked)
        assert isinstance(answer, Refused) and answer.reason == "segments are encoded behind another primer here"
        assert held(lender, asked) is None


def test_what_is_encoded_behind_nothing_is_lent(lender: Running) -> None:
    """A policy may switch it off, and a long segment has no room behind it."""
    asked = want(lender, 3, 302, "")
    answer, kept = lent(lender, asked), held(lender, asked)
    assert isinstance(answer, Entry) and kept is not None and kept.primer == ""


def test_what_is_encoded_behind_another_is_refused(lender: Running, alone: Running) -> None:
    other = Primer((1, 2, 3), 100).digest
    for engine, nonce in ((lender, 4), (alone, 5)):
        asked = want(engine, nonce, 303, other)
        answer = lent(engine, asked)
        assert isinstance(answer, Refused) and answer.reason == "segments are encoded behind another primer here"
        assert held(engine, asked) is None


def test_a_key_that_says_another_primer_than_the_ask_is_refused(lender: Running) -> None:
    asked = replace(want(lender, 6, 304, digest(lender)), primer="")
    answer = lent(lender, asked)
    assert isinstance(answer, Refused) and answer.reason.startswith("its tokens make another key here")
    assert held(lender, asked) is None


def test_two_workers_give_the_answers_and_entries_of_one(worded: Path, lender: Running) -> None:
    prompt = cold_prompt(301)
    shared = replace(ENCODING, planner="round-robin")  # whatever encoding costs on a busy host
    with running(worded, 2, shared, primer=TEXT) as both:
        counts = both.workers.peers.counts
        found, images = both.ask(prompt), both.images()
        assert counts.came >= 2 and counts.fell_back == 0
        plain = both.ask(prompt, policy=POLICY.with_(primed=False))
        assert {segment.outcome for segment in plain[1].segments} == {"encoded"}
        assert both.leaked() == Need()
    lender.leaked()
    expected = lender.ask(prompt)
    entries = lender.images()
    assert found[0] == expected[0] and images.keys() == entries.keys()
    assert max(difference(images[key], entries[key]) for key in entries) < WITHIN
    assert {image.primer for image in images.values()} == {digest(lender)}
    lender.ask(prompt, policy=POLICY.with_(primed=False))
    others = {image.ids: image for key, image in lender.images().items() if key not in entries}
    assert min(difference(replace(others[image.ids], key=key), image) for key, image in images.items()) > 100 * WITHIN


def test_a_worker_with_another_primer_is_never_used(
    worded: Path, lender: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host whose checkpoint is not the same to the last file: nothing comes of it, and answers are right."""
    sound = workers.settings_of
    monkeypatch.setattr(workers, "settings_of", lambda *args: {**sound(*args), "primer": "Another text."})
    started = starting.start(worded, config(2, primer=TEXT), VOCABULARY, replace(ENCODING, routes=True))
    try:
        both, prompt = Running(started), cold_prompt(302, count=3)
        until(lambda: both.workers.peers.counts.fell_back >= 1)
        found = [both.ask(prompt)[0] for _ in range(2)]
        assert not both.workers.wait_usable(0.5) and both.workers.peers.counts.came == 0
    finally:
        started.close()
    assert found == [lender.ask(prompt)[0]] * 2

"""Times to live of entries that are lent: neither worker uses one longer than the other's strictest asker said."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hypic.engine import inspect
from hypic.engine.engine import Engine
from hypic.engine.lending import Lending
from hypic.engine.parallel.listener import Asked
from hypic.engine.parallel.messages import Entry, Refused, Want
from hypic.engine.parallel.sending import Answer, parcel_of
from hypic.engine.segment import CachedSegment
from tests.checkpoints import qwen, random_ids
from tests.engine.parallel.running import POLICY, Running, running


@pytest.fixture(scope="module")
def lender(alone: Running) -> Running:
    return alone


def want(engine: Running, nonce: int, expires_s: float | None, seed: int) -> Want:
    ids = tuple(random_ids(40, seed))
    key = engine.started.identity.key(ids, POLICY.seam, None, False)
    return Want(nonce, 1, key.hex(), ids, POLICY.seam, expires_s=expires_s)


def lent(engine: Running, asked: Want) -> Entry | Refused:
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    Lending(engine.started.loop, 1).want([Asked((1, asked.nonce), asked, answers.put)])
    answer = answers.get(timeout=60)
    return answer.message if answer.lease is None else parcel_of([answer])[0].entries[0]


def held(engine: Running, asked: Want) -> CachedSegment | None:
    def find(engine: Engine) -> CachedSegment | None:
        found = engine.store.find(bytes.fromhex(asked.key))
        return None if found is None else replace(found)

    return engine.started.loop.call(find)


def test_what_is_encoded_for_another_is_kept_as_long_as_it_says(lender: Running) -> None:
    asked = want(lender, 1, time.time() + 30.0, seed=201)
    answer, kept = lent(lender, asked), held(lender, asked)
    assert isinstance(answer, Entry) and kept is not None
    assert answer.expires_s == kept.expires_s == asked.expires_s
    for_ever = want(lender, 2, None, seed=202)
    answer, kept = lent(lender, for_ever), held(lender, for_ever)
    assert isinstance(answer, Entry) and kept is not None and answer.expires_s is kept.expires_s is None


def test_what_is_held_takes_the_sooner_time_and_says_it(lender: Running) -> None:
    now_s = time.time()
    for nonce, asks_s, is_s in ((3, None, None), (4, now_s + 40, now_s + 40), (5, None, now_s + 40), (6, now_s + 90, now_s + 40), (7, now_s + 20, now_s + 20)):  # fmt: skip  # noqa: E501
        asked = want(lender, nonce, asks_s, seed=203)
        answer, kept = lent(lender, asked), held(lender, asked)
        assert isinstance(answer, Entry) and kept is not None and answer.was_held == (nonce > 3)
        assert answer.expires_s == kept.expires_s == is_s


def test_what_is_over_is_not_lent(lender: Running) -> None:
    asked = want(lender, 8, None, seed=204)
    lent(lender, asked)

    def end(engine: Engine) -> None:
        """Its time is over, and the engine has not looked yet."""
        entry = engine.store.find(bytes.fromhex(asked.key))
        assert entry is not None
        entry.expires_s = time.time() - 1.0

    lender.started.loop.call(end)
    answer = lent(lender, replace(asked, nonce=9))
    assert isinstance(answer, Entry) and not answer.was_held and answer.expires_s is None


@pytest.mark.parametrize("expires_s", [0.0, float("nan"), float("inf")])
def test_a_time_that_is_over_or_none_is_refused(lender: Running, expires_s: float) -> None:
    asked = want(lender, 10, expires_s, seed=205)
    assert isinstance(lent(lender, asked), Refused) and held(lender, asked) is None


@pytest.mark.parametrize("store_bytes", [{}, {"store_bytes": 0}], ids=["room", "no room on the device"])
def test_a_trial_leaves_nothing_behind(tmp_path: Path, store_bytes: dict[str, int]) -> None:
    """Neither on the device, nor below it, where a text that is lent to be used goes."""
    store = f"host://8MiB,disk://{tmp_path / 'store'}?size=8MiB"
    with running(qwen(tmp_path / "model"), 1, store=store) as engine:
        if store_bytes:
            engine.started.loop.call(lambda engine: setattr(engine.store, "budget_bytes", 0))
        used, trial = want(engine, 1, None, seed=1), replace(want(engine, 2, None, seed=2), is_trial=True)
        for asked in (trial, replace(trial, nonce=3), used) if not store_bytes else (trial,):
            answer = lent(engine, asked)
            assert isinstance(answer, Entry) != bool(store_bytes)
            assert store_bytes or isinstance(answer, Entry) and not answer.was_held
        while engine.started.loop.call(inspect.flush):
            pass
        keys = {entry.key for entry in engine.started.loop.call(inspect.entries)}
        assert held(engine, trial) is None and keys == (set() if store_bytes else {used.key})
    saved = {path.stem for path in (tmp_path / "store").rglob("*.safetensors")}
    assert saved == (set() if store_bytes else {used.key})


def test_workers_that_are_compared_write_nothing(tmp_path: Path) -> None:
    with running(qwen(tmp_path / "model"), 2, store=f"disk://{tmp_path / 'store'}?size=8MiB"):
        time.sleep(0.5)  # time in which what was made would be saved
    assert not list((tmp_path / "store").rglob("*.safetensors"))

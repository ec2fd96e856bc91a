"""The device tier: who is evicted and when, what is counted, and what the history can say about a miss."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hypic.engine.plan import PlannedSegment
from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic.engine.segment import CachedSegment, Identity, label_of
from hypic.engine.sizing import Need
from hypic.engine.store.device import DeviceStore
from hypic.engine.store.eviction import Ranking
from hypic.engine.store.history import MOST_WHOLES, History
from hypic.types import Segment

LAYOUT = Layout((LinearShape(1, 2, 2, "head"),), (AttentionShape(1, 2, 2),), torch.float32, torch.float32)


def make(budget: int | None = None) -> DeviceStore:
    return DeviceStore(Pool(LAYOUT, 2**18, 4, 64, 4, torch.device("cpu")), budget)


def entry(store: DeviceStore, name: str, num_tokens: int = 4, **labels: str) -> CachedSegment:
    pool = store.pool
    pages = pool.take_pages(pool.pages_for(num_tokens))
    slots = pool.slots_of(pages, num_tokens)
    states = (pool.take_state(), pool.take_transition())
    ids = tuple(range(num_tokens))
    return CachedSegment(name.encode(), ids, slots, tuple(pages), *states, num_bytes=100, **labels)  # type: ignore[arg-type]


def filled(names: str, budget: int | None = None) -> tuple[DeviceStore, dict[str, CachedSegment]]:
    store = make(budget)
    entries = {name: entry(store, name) for name in names}
    for one in entries.values():
        store.put(one)
    return store, entries


def names(store: DeviceStore) -> str:
    return "".join(one.key.decode() for one in store)


def test_the_least_recently_used_goes_first() -> None:
    store, entries = filled("abcd")
    store.pin(entries["a"])
    store.unpin(entries["a"])
    assert names(store) == "bcda"
    free = store.pool.free
    assert store.make_room(Need(free.pages + 2))
    assert names(store) == "da" and store.stats.evictions == 2
    assert store.make_room(Need(free.pages)) and names(store) == "da", "no more is evicted than is asked for"


def test_pinned_entries_are_never_evicted() -> None:
    store, entries = filled("abcd")
    store.pin(entries["b"])
    store.pin(entries["b"])
    assert not store.make_room(Need(pages=10**6)) and names(store) == "acdb", "nothing goes for what cannot be had"
    assert store.make_room(Need(pages=store.pool.capacity.pages - 1))
    assert names(store) == "b" and not store.remove(b"b") and store.clear() == 0
    store.unpin(entries["b"])
    assert store.stats.num_pinned == 1 and not store.remove(b"b")
    store.unpin(entries["b"])
    assert store.remove(b"b") and store.pool.free == store.pool.capacity
    with pytest.raises(AssertionError, match="unpinned more often"):
        store.unpin(entries["b"])


def test_looking_something_up_checks_its_tokens() -> None:
    store, entries = filled("a")
    assert store.get(b"a", entries["a"].ids) is entries["a"]
    assert store.get(b"a", (9, 9)) is None and store.get(b"x", ()) is None
    assert b"a" in store and b"x" not in store


def test_the_first_entry_of_a_key_stays() -> None:
    store, entries = filled("a")
    free = store.pool.free
    second = entry(store, "a")
    store.put(second)
    assert store.pool.free == free and store.get(b"a", entries["a"].ids) is entries["a"]
    assert store.stats.stored == 1


def test_an_entry_that_is_pinned_when_stored_stays_until_it_is_unpinned() -> None:
    store = make(budget=0)
    one = entry(store, "a")
    store.pin(one)
    store.put(one)
    assert names(store) == "a" and store.stats.held_bytes == 100
    store.unpin(one)
    assert names(store) == "" and store.pool.free == store.pool.capacity


def test_a_budget_caps_what_idle_entries_hold() -> None:
    store, entries = filled("abcd", budget=250)
    assert names(store) == "cd" and store.stats.held_bytes == 200 and store.stats.evictions == 2
    store.pin(entries["c"])
    store.put(entry(store, "e"))
    assert names(store) == "dec"
    store.unpin(entries["c"])
    assert names(store) == "ec"


def test_evicting_looks_at_no_entry_but_the_least() -> None:
    """The table is never walked; what a heap looks at grows with its depth alone."""

    class Guarded(dict[bytes, CachedSegment]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("the table is walked")

        values = items = keys = __iter__  # type: ignore[assignment]

    store, entries = filled("abcdefgh")
    store._idle = Guarded(store._idle.copy())
    store.pin(entries["a"])
    store.unpin(entries["a"])
    assert store.make_room(Need(store.pool.free.pages + 3))
    assert b"a" in store and b"b" not in store and store.stats.num_entries == 5
    store.put(entry(store, "z"))


def test_what_is_short_decides_who_goes() -> None:
    """A long entry saves more for a slot; a page of it saves no more than a page of a short one that is used more."""
    for need, gone in ((Need(states=1), "short"), (Need(transitions=1), "short"), (Need(pages=1), "long")):
        store = make()
        long, short = entry(store, "long", 24), entry(store, "short", 8)
        for one in (long, short):
            store.put(one)
        store.pin(short)
        store.unpin(short)
        free = store.pool.free
        wanted = {n: getattr(need, n) and getattr(free, n) + 1 for n in ("pages", "states", "transitions")}
        assert store.make_room(Need(**wanted))
        assert gone.encode() not in store and len(list(store)) == 1


def test_snapshots_do_not_go_for_want_of_transitions() -> None:
    store, entries = filled("ab")
    store.pool.share_pages(entries["a"].pages)
    head = CachedSegment(b"s", (1,), entries["a"].kv_slots, entries["a"].pages, store.pool.take_state(), None, 1)
    store.put(head)
    assert store.make_room(Need(transitions=store.pool.free.transitions + 1)) and b"s" in store
    assert not store.make_room(Need(transitions=store.pool.capacity.transitions + 1)) and len(list(store)) == 2


def test_what_was_used_often_stays_until_its_time_is_over() -> None:
    """Frequency counts against recency, and both are forgotten as others come and go."""
    ranking = Ranking()
    ranking.add(b"often", uses=3, saved=10, size=10)
    for number in range(10):
        ranking.add(str(number).encode(), uses=1, saved=10, size=10)
    gone = []
    for number in range(10, 60):
        gone.append(ranking.pop())
        ranking.add(str(number).encode(), uses=1, saved=10, size=10)
    assert gone[:20] == [str(number).encode() for number in range(20)] and b"often" in gone
    assert len(ranking) == 11


def test_a_ranking_agrees_with_sorting_whatever_comes_and_goes() -> None:
    rng, ranking, held, clock = random.Random(0), Ranking(), {}, 0
    for number in range(20_000):
        key, action = str(rng.randrange(50)).encode(), rng.random()
        if action < 0.6:
            uses, size = rng.randint(1, 4), rng.choice([1.0, 2.0, 5.0])
            ranking.add(key, uses, 10, size)
            held[key] = (clock + uses * 10 / size, number)
        elif action < 0.8:
            ranking.discard(key)
            held.pop(key, None)
        else:
            least = min(held, key=held.__getitem__, default=None)
            assert ranking.pop() == least
            clock = max(clock, held.pop(least)[0]) if least is not None else clock
    assert len(ranking._heap) < 400, "what is out of date is thrown away"


def test_shared_pages_live_as_long_as_anyone_who_holds_them() -> None:
    store, entries = filled("a")
    head = entries["a"]
    store.pool.share_pages(head.pages)
    state = store.pool.take_state()
    snapshot = CachedSegment(b"s", head.ids, np.array(head.kv_slots), head.pages, state, None, 10)
    store.put(snapshot)
    assert snapshot.is_snapshot and not head.is_snapshot and snapshot.num_cached == 4
    free = store.pool.free.pages
    assert store.remove(b"a") and store.pool.free.pages == free
    assert store.remove(b"s") and store.pool.free == store.pool.capacity


# -- identity --------------------------------------------------------------------------------------------------------

SOUND = Identity("model", "torch.float32")


def test_everything_that_changes_an_entry_changes_its_key() -> None:
    key = SOUND.key((1, 2, 3), 8, None, False)
    others = [
        SOUND.key((1, 2, 4), 8, None, False),
        SOUND.key((1, 2), 8, None, False),
        SOUND.key((1, 2, 3), 4, None, False),
        SOUND.key((1, 2, 3), 8, "", False),
        SOUND.key((1, 2, 3), 8, "none", False),
        SOUND.key((1, 2, 3), 8, "tenant", False),
        SOUND.key((1, 2, 3), 8, None, True),
        SOUND.key((1, 2, 3), 8, None, False, "behind"),
        SOUND.key((1, 2, 3), 8, "behind:behind", False),
        Identity("other", "torch.float32").key((1, 2, 3), 8, None, False),
        Identity("model", "torch.bfloat16").key((1, 2, 3), 8, None, False),
        Identity("model", "torch.float32", storage="bf16").key((1, 2, 3), 8, None, False),
        Identity("model", "torch.float32", adapter="lora").key((1, 2, 3), 8, None, False),
    ]
    assert len({key, *others}) == len(others) + 1 and len(key) == 32
    assert SOUND.key((1, 2, 3), 8, None, False) == key


def test_deterministic_keys_alone_name_what_computed_an_entry() -> None:
    paths = [replace(SOUND, path=path) for path in ("", "torch on cpu", "kernels on cpu", "kernels on cuda")]
    assert len({identity.key((1, 2, 3), 8, None, False) for identity in paths}) == 1 == len(set(paths))
    assert len({identity.key((1, 2, 3), 8, None, True) for identity in paths}) == len(paths)


def test_fields_of_a_key_cannot_flow_into_each_other() -> None:
    a = Identity("m", "d", "lossless", "x").key((), 8, None, False)
    assert a != Identity("m", "dlossless", "", "x").key((), 8, None, False)
    assert a != Identity("md", "", "lossless", "x").key((), 8, None, False)
    assert SOUND.key((), 8, "some:t", False) != SOUND.key((), 8, "t", False)


# -- history ---------------------------------------------------------------------------------------------------------


def test_history_knows_why_a_key_is_new() -> None:
    history, ids = History(), (1, 2, 3)
    plain, named = Segment("the text"), Segment("the text", name="n")
    assert history.reason(plain, ids, b"k", 8) == "first time"
    history.note(named, ids, b"k", 8)
    assert history.reason(plain, ids, b"k", 8) == "evicted"
    history.expired(b"k")
    assert history.reason(plain, ids, b"k", 8) == "expired"
    history.note(plain, ids, b"k", 8)
    assert history.reason(plain, ids, b"k", 8) == "evicted"
    assert history.reason(plain, ids, b"l", 4) == "other seam"
    assert history.reason(Segment("the text", namespace="t"), ids, b"m", 8) == "other namespace"
    assert history.reason(plain, ids, b"n", 8) == "other policy"
    assert history.reason(plain, ids, b"p", 8, "behind") == "other primer"
    history.note(plain, ids, b"p", 8, "behind")
    assert history.reason(plain, ids, b"q", 8, "behind") == "other policy", "that is not what differs"
    assert history.reason(plain, ids, b"q", 4, "behind") == "other seam"
    assert history.reason(Segment("the words", name="n"), (7,), b"o", 8).startswith("same name but other text")
    assert history.reason(Segment("the words", name="n", source="s"), (7,), b"o", 8) == "first time"


def test_history_tells_another_place_from_another_primer() -> None:
    history, ids, text = History(rungs=frozenset({"low", "high"})), (1, 2, 3), Segment("the text", name="n")
    history.note(text, ids, b"k", 8, "low")
    assert history.reason(text, ids, b"l", 8, "high") == "other place"
    assert history.reason(text, ids, b"m", 8, "strange") == history.reason(text, ids, b"n", 8) == "other primer"
    for digest in ("low", "high"):
        history.stored(label_of(text), digest.encode(), digest)
    assert history.previous(text, "low") == b"low" and history.previous(text, "high") == b"high"
    assert history.previous(text) is None
    history.forget(lambda labels: True)
    assert history.previous(text, "low") is history.previous(text, "high") is None


def test_history_shows_where_two_texts_part() -> None:
    history = History()
    history.note(Segment("score: 0.83 of the report", name="n"), (1,), b"a", 8)
    reason = history.reason(Segment("score: 0.91 of the report", name="n"), (2,), b"b", 8)
    assert reason == "same name but other text from character 9 ('core: 0.91 of the report')"
    longer = history.reason(Segment("score: 0.83 of the report, again", name="n"), (3,), b"c", 8)
    assert "from character 25" in longer and "', again'" in longer.replace("e report", "")


def test_of_a_text_that_grows_in_parts_the_youngest_versions_are_remembered() -> None:
    history, segment = History(), Segment("text", name="n")
    planned = [
        PlannedSegment(segment, tuple(range(n)), 0, (b"first", b"%d" % n), 8) for n in range(10, 10 + MOST_WHOLES)
    ]
    for one in [*planned, planned[0], PlannedSegment(segment, (1,) * 500, 0, (b"first", b"last"), 8)]:
        history.asked(b"first", 5, one)
    kept = history.wholes(b"first", label_of(segment))
    assert len(kept) == MOST_WHOLES and kept[-1] == (1,) * 500
    assert planned[0].ids in kept and planned[1].ids not in kept


def test_history_is_bounded_and_keeps_the_youngest() -> None:
    history = History(capacity=3)
    for number in range(5):
        history.note(Segment(f"text {number}", name=str(number)), (number,), bytes([number]), 8)
    reasons = [history.reason(Segment("x"), (n,), bytes([n]), 8) for n in range(5)]
    assert reasons == ["first time"] * 2 + ["evicted"] * 3

"""Forgetting texts and times to live: afterwards nothing that is kept has the text in it, wherever it stood."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, EngineConfig, Policy, Prompt, SamplingParams, Segment
from hypic.errors import ConfigError
from hypic.kept import Forgotten
from hypic.types import CacheReport
from hypic_retriever import Index, RetrieverError
from tests.checkpoints import add_tokenizer, qwen

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048}
SETTINGS |= {"max_running": 4, "min_segment_tokens": 0}
SECRET = "The code of the door is four nine one two, and nobody but the miller is to know of it."
OTHER = "The river runs past an old mill where three brothers grind rye and oats for the town."
ONE = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("forgetting"))
    add_tokenizer(made)
    return made


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as made:
        yield made


def asked(llm: LLM, *segments: Segment, tail: str = "Who grinds rye?", policy: Policy | None = None) -> CacheReport:
    report = llm.generate(Prompt(segments, tail), ONE, policy=policy).report
    assert report is not None
    return report


def outcomes(report: CacheReport) -> list[str]:
    return [segment.outcome for segment in report.segments]


def holds(llm: LLM, text: str) -> bool:
    """Whether anything that the engine keeps has the text's tokens in it."""
    ids = tuple(llm.tokenize(text))

    def found(engine: Any) -> bool:
        kept = [entry.ids for entry in engine.store]
        return any(ids == some[n : n + len(ids)] for some in kept for n in range(len(some)))

    return llm._loop.call(found)


# -- everything ------------------------------------------------------------------------------------------------------


def test_nothing_is_forgotten_by_accident(llm: LLM) -> None:
    """A label that was left out, or is ``None`` where one was meant, empties no cache and no index."""
    asked(llm, Segment(SECRET, source="door.md"))
    index = Index()
    index.add_documents({"door.md": SECRET})
    before = len(llm.entries())
    wrong: list[dict[str, Any]] = [
        {},
        {"source": None},
        {"everything": False},
        {"source": "door.md", "everything": True},
    ]
    for labels in wrong:
        with pytest.raises(ConfigError, match="everything=True") as caught:
            llm.forget(**labels)
        assert str(caught.value).endswith(".") and len(llm.entries()) == before >= 2
    with pytest.raises(RetrieverError, match="say which passages"):
        index.forget()
    assert len(index) == 1
    assert llm.forget(everything=True).num_cached == before and not llm.entries()


# -- by label --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [{"source": "door.md"}, {"name": "code"}, {"namespace": "alice"}])
@pytest.mark.parametrize("reuse", ["segments", "prefix"])
def test_nothing_that_is_kept_holds_a_forgotten_text(label: dict[str, str], reuse: Any, llm: LLM) -> None:
    policy = llm.config.policy.with_(reuse=reuse)
    secret = Segment(SECRET, **({"name": "code", "source": "door.md", "namespace": "alice"}))
    asked(llm, Segment(OTHER, source="river.md"), secret, policy=policy)
    asked(llm, secret, Segment(OTHER, source="river.md"), policy=policy)
    assert holds(llm, SECRET)
    forgotten = llm.forget(**label)
    assert forgotten.num_entries == (1 if reuse == "segments" else 0) and forgotten.num_snapshots >= 2
    assert not holds(llm, SECRET)
    assert llm.forget(**label) == Forgotten()
    if reuse == "segments":
        assert outcomes(asked(llm, Segment(OTHER, source="river.md"), secret)) == ["hit", "encoded"]


@pytest.mark.parametrize(("tail", "num_hits"), [("Who grinds rye?", 0), ("And what else?", 1)])
def test_a_text_is_forgotten_by_every_name_it_was_passed_under(tail: str, num_hits: int, llm: LLM) -> None:
    """Also where all of the prompt stood in a snapshot, and the entry was not looked at."""
    asked(llm, Segment(SECRET, source="first.md"))
    assert outcomes(asked(llm, Segment(SECRET, source="second.md"), tail=tail)) == ["hit"]
    (entry,) = [entry for entry in llm.entries() if entry.kind == "segment"]
    assert entry.labels == ((None, "first.md"), (None, "second.md")) and entry.num_hits == num_hits
    assert llm.forget(source="second.md").num_entries == 1 and not holds(llm, SECRET)


def test_a_namespace_is_forgotten_without_touching_another(llm: LLM) -> None:
    for space in ("alice", "bob", None):
        asked(llm, Segment(SECRET, namespace=space))
    assert llm.forget(namespace="alice").num_entries == 1
    assert [outcomes(asked(llm, Segment(SECRET, namespace=space))) for space in ("bob", None)] == [["hit"]] * 2
    assert outcomes(asked(llm, Segment(SECRET, namespace="alice"))) == ["encoded"]


def test_a_text_that_has_grown_out_of_a_forgotten_one_goes_too(llm: LLM) -> None:
    asked(llm, Segment(SECRET, name="code", source="door.md"))
    asked(llm, Segment(f"{SECRET} {OTHER}", name="all", source="notes.md"))
    llm.forget(source="door.md")
    assert not holds(llm, SECRET)


def test_turns_of_a_namespace_are_forgotten(llm: LLM) -> None:
    hints = {"hypic": {"namespace": "alice"}}
    llm.chat([{"role": "user", "content": SECRET, **hints}], ONE)
    llm.chat([{"role": "user", "content": OTHER}], ONE)
    assert holds(llm, SECRET)
    assert llm.forget(namespace="alice").num_snapshots >= 1
    assert not holds(llm, SECRET) and holds(llm, OTHER)


def test_requests_under_way_are_answered_and_leave_nothing_behind(llm: LLM) -> None:
    prompt = Prompt([Segment(SECRET, source="door.md"), Segment(OTHER)], "Who grinds rye?")
    alone = llm.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True)).token_ids
    llm.forget(everything=True)
    stream = llm.stream(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    first = next(stream)
    llm.forget(source="door.md")
    rest = [i for piece in stream for i in piece.token_ids]
    assert (*first.token_ids, *rest) == alone and not holds(llm, SECRET)
    stats = llm.stats()
    assert stats["store"]["num_pinned"] == 0
    llm.forget(everything=True)
    assert llm.stats()["pool"]["free"] == llm.stats()["pool"]["capacity"], "what was in use is given back"


def test_forgetting_beside_requests_gives_all_memory_back(llm: LLM) -> None:
    def ask(number: int) -> None:
        for n in range(12):
            asked(llm, Segment(f"{SECRET} {(number * 7 + n) % 5}", source="door.md"), Segment(OTHER), tail=f"{n}?")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        llm.forget(source="door.md")
        time.sleep(0.01)
    llm.forget(everything=True)
    assert llm.stats()["pool"]["free"] == llm.stats()["pool"]["capacity"]


def test_known_texts_and_passages_are_forgotten(llm: LLM) -> None:
    index = Index()
    index.add_documents({"notes/door.md": SECRET, "notes/river.md": OTHER})
    llm.attach(index)
    llm.registry.register([Segment(SECRET, source="door.md"), Segment(OTHER, source="river.md")])
    forgotten = llm.forget(source="door.md")
    assert (forgotten.num_texts, forgotten.num_passages) == (1, 1)
    assert index.sources() == ["notes/river.md"] and len(llm.registry) == 1
    assert llm.forget(everything=True).num_passages == 0 and len(index) == 1, "emptying the cache leaves an index alone"


def test_why_a_forgotten_text_was_no_hit_is_forgotten_as_well(llm: LLM) -> None:
    asked(llm, Segment(SECRET, name="code", source="door.md"))
    llm.forget(source="door.md")
    report = asked(llm, Segment(SECRET, name="code", source="door.md"))
    assert [segment.reason for segment in report.segments] == ["first time"]
    assert all(SECRET not in str(table) for table in vars(llm._loop.engine.admission.history).values()) is False
    llm.forget(source="door.md")
    assert all(SECRET not in str(table) for table in vars(llm._loop.engine.admission.history).values())


def test_a_control_that_forgets_entries_alone_leaves_the_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above bite: without looking inside, snapshots of prefix reuse keep the text under another label."""
    from hypic.engine.store.texts import Texts

    policy = llm.config.policy.with_(reuse="prefix")
    asked(llm, Segment(SECRET, source="door.md"))
    asked(llm, Segment(SECRET, source="other.md"), policy=policy)
    monkeypatch.setattr(Texts, "within", lambda self, ids: False)
    llm.forget(source="door.md")
    assert holds(llm, SECRET)


# -- times to live ---------------------------------------------------------------------------------------------------


def expired(llm: LLM) -> bool:
    deadline = time.monotonic() + 10
    while llm.entries() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not llm.entries()


def test_what_has_lived_its_time_goes_by_itself(llm: LLM) -> None:
    asked(llm, Segment(SECRET, ttl_s=0.4))
    assert holds(llm, SECRET)
    assert expired(llm) and llm.stats()["pool"]["free"] == llm.stats()["pool"]["capacity"]


def test_a_report_tells_expired_from_evicted(llm: LLM) -> None:
    def why(**options: Any) -> list[str]:
        return [segment.reason for segment in asked(llm, Segment(SECRET, **options)).segments]

    assert why(ttl_s=0.4) == ["first time"] and expired(llm)
    assert why() == ["expired"] and why() == [""]
    llm._loop.call(lambda engine: engine.store.clear())
    assert why() == ["evicted"], "the one before was not the one whose time was over"


def test_the_strictest_asker_decides_and_a_snapshot_lives_as_long_as_what_it_holds(llm: LLM) -> None:
    before = time.time()
    asked(llm, Segment(SECRET, ttl_s=5000), Segment(OTHER))
    asked(llm, Segment(SECRET), Segment(OTHER, ttl_s=900))
    asked(llm, Segment(SECRET, ttl_s=100), tail="Another question?")
    entries = llm.entries()
    times = {e.num_tokens: e.expires_s for e in entries if e.kind == "segment"}
    assert [round(t - before, -1) for t in times.values() if t is not None] in ([100, 900], [900, 100])
    lives = sorted(round(e.expires_s - before, -2) for e in entries if e.kind == "snapshot" and e.expires_s is not None)
    assert lives[0] == 100 and lives[-1] == 5000 and 900 in lives


def test_namespaces_have_times_of_their_own(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS, ttl="alice=0.4,*=3600") as llm:
        asked(llm, Segment(SECRET, namespace="alice"))
        asked(llm, Segment(OTHER, namespace="bob"))
        deadline = time.monotonic() + 10
        while holds(llm, SECRET) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not holds(llm, SECRET) and holds(llm, OTHER)
        assert outcomes(asked(llm, Segment(OTHER, namespace="bob"))) == ["hit"]
        assert outcomes(asked(llm, Segment(SECRET, namespace="alice"))) == ["encoded"]


def test_a_text_whose_time_is_over_is_no_hit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(llm, Segment(SECRET, ttl_s=1000))
    now = time.time()
    monkeypatch.setattr("hypic.engine.store.expiry.time", _Later(now + 2000))
    report = asked(llm, Segment(SECRET))
    assert outcomes(report) == ["encoded"] and report.segments[0].reason == "expired"


class _Later:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def time(self) -> float:
        return self.now_s


@pytest.mark.parametrize("ttl", [0, -1, "soon", "alice=", "alice=0", "a=1,a=2", "nan", "*=1,7", True])
def test_times_that_cannot_be_read(ttl: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(ttl=ttl)
    assert "ttl" in str(caught.value) and str(caught.value).endswith(".")


def test_times_are_read() -> None:
    assert EngineConfig().ttl_s("alice") is None and EngineConfig(ttl=60).ttl_s("alice") == 60
    config = EngineConfig(ttl="alice=3600, bob=60 ,*=86400")
    assert [config.ttl_s(space) for space in ("alice", "bob", "carol", None)] == [3600, 60, 86400, 86400]
    assert EngineConfig(ttl="alice=5").ttl_s(None) is None
    for ttl in (0, -1, float("nan"), "x", True):
        with pytest.raises(ConfigError, match="ttl_s"):
            Segment("text", ttl_s=ttl)  # type: ignore[arg-type]


# -- pinning ---------------------------------------------------------------------------------------------------------


def test_pinned_entries_outlive_pressure_until_they_are_unpinned_or_forgotten(llm: LLM) -> None:
    asked(llm, Segment(SECRET, name="code"))
    assert llm.pin(name="code") == 1 and llm.pin(name="code") == 0 and llm.pin(name="nobody") == 0
    assert llm.stats()["store"]["num_pinned"] == 1
    llm._loop.call(lambda engine: engine.store.clear())
    assert outcomes(asked(llm, Segment(SECRET))) == ["hit"]
    assert llm.unpin() == 1 and llm.stats()["store"]["num_pinned"] == 0
    assert llm.pin() >= 1
    assert (
        llm.forget(everything=True).num_entries == 1 and llm.stats()["pool"]["free"] == llm.stats()["pool"]["capacity"]
    )

"""``LLM(primer=...)`` with marks: what is warmed, listed, counted and refused where a segment's place decides."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Policy, Prompt, Segment
from hypic.compare import compare
from hypic.config import EngineConfig
from hypic.engine import plan, primer, weights
from hypic.errors import ConfigError
from tests.llm.asking import REUSE, SETTINGS, assert_idle, passage, sampling

TEXT = "---\n\nThe lighthouse keeper counts ships.\n\n---\n\nA letter came.\n\nThe office opens at nine.\n\nIt rains."
BY_PLACE = REUSE
SEGMENTS = [Segment(passage(n), name=f"passage {n}") for n in range(5)]


@pytest.fixture(scope="module")
def placed(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), primer=TEXT, **{**SETTINGS, "policy": BY_PLACE}) as llm:
        yield llm


@pytest.fixture(autouse=True)
def emptied(placed: LLM) -> None:
    placed.forget(everything=True)


def rows(llm: LLM, segments: list[Segment], policy: Policy | None = None) -> list[Any]:
    report = llm.generate(Prompt(segments, "Who grinds rye?"), sampling(), policy=policy).report
    assert report is not None
    return list(report.segments)


def logprobs(llm: LLM, segments: list[Segment], policy: Policy) -> list[float]:
    told = llm.generate(Prompt(segments, "Who grinds rye?"), sampling(logprobs=1), policy=policy)
    return [one.logprob for one in told.logprobs]


def test_rungs_are_heads_of_prompts(folder: Path, placed: LLM) -> None:
    found = primer.ids_of(folder, EngineConfig(primer=TEXT))
    assert list(found) == [0, 1, 4] and placed.places() == (0, 1, 4)
    ids = list(found.values())
    assert all(other[: len(one)] == one for one, other in zip(ids, ids[1:], strict=False))
    whole = [id for piece in placed.tokenizer.encode(Prompt([Segment("next")], "?")) for id in piece.ids]
    assert list(ids[0]) == whole[: len(ids[0])] and ids[0], "the bare scaffolding"
    assert placed.stats()["primer_rungs"] == [len(one) for one in ids]
    assert placed.stats()["primer_tokens"] == len(ids[-1])


def test_the_first_segment_of_a_prompt_is_exact(placed: LLM, llm: LLM) -> None:
    """It is encoded behind the scaffolding that it is read behind."""
    full, alike = Policy(reuse="none"), pytest.approx(logprobs(llm, SEGMENTS[:1], Policy(reuse="none")), abs=1e-9)
    assert logprobs(placed, SEGMENTS[:1], BY_PLACE) == alike == logprobs(placed, SEGMENTS[:1], full)
    assert logprobs(llm, SEGMENTS[:1], REUSE) != alike, "the control: without a primer it is not"


def test_what_is_warmed_is_found_at_every_place(placed: LLM) -> None:
    heard: list[tuple[int, int]] = []
    reports = placed.warm(SEGMENTS, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(n, 5) for n in range(1, 6)]
    assert [[row.outcome for row in report.segments] for report in reports] == [["encoded"]] * 5
    assert len(placed.entries()) == 15
    listed = {entry.key: entry.num_bytes for entry in placed.entries()}
    own = {key for place in placed.places() for key, _ in placed.keys(SEGMENTS[:1], place=place)}
    assert reports[0].segments[0].num_bytes == sum(listed[key or ""] for key in own) and len(own) == 3
    for turn in range(5):
        assert [row.outcome for row in rows(placed, SEGMENTS[turn:] + SEGMENTS[:turn])] == ["hit"] * 5
    assert [[row.outcome for row in report.segments] for report in placed.warm(SEGMENTS)] == [["hit"]] * 5
    assert_idle(placed)


def test_a_segment_without_room_behind_a_rung_has_an_entry_less(placed: LLM) -> None:
    long = Segment("word " * 500)
    num_tokens = len(placed.tokenizer.encode_text(long.text.strip()))
    assert 2048 - placed.stats()["primer_tokens"] < num_tokens <= 2048 - placed.stats()["primer_rungs"][1]
    (row,) = placed.warm([long])[0].segments
    entries = placed.entries()
    assert len(entries) == 2 and row.num_bytes == sum(entry.num_bytes for entry in entries)


def test_warming_what_is_partly_there_says_that_it_was_not_all(placed: LLM) -> None:
    rows(placed, SEGMENTS)
    (row,) = placed.warm(SEGMENTS[:1])[0].segments
    assert row.outcome == "encoded" and row.reason == "other place"
    assert len([entry for entry in placed.entries() if entry.kind == "segment"]) == 7


def test_behind_no_primer_there_is_one_way(placed: LLM) -> None:
    unprimed = REUSE.with_(primed=False)
    assert placed.places(unprimed) == (0,)
    placed.warm(SEGMENTS, policy=unprimed)
    assert len(placed.entries()) == 5
    assert {row.outcome for row in rows(placed, SEGMENTS[::-1], unprimed)} == {"hit"}


def test_keys_follow_the_place(placed: LLM, llm: LLM) -> None:
    found = [placed.keys(SEGMENTS[:1], place=place)[0] for place in range(5)]
    assert [found.index(one) for one in found] == [0, 1, 1, 3, 3]
    rows(placed, SEGMENTS)
    wanted = {placed.keys([one], place=n)[0][0] for n, one in enumerate(SEGMENTS)}
    assert wanted == {entry.key for entry in placed.entries() if entry.kind == "segment"}
    assert len({llm.keys(SEGMENTS[:1], place=place)[0] for place in range(5)}) == 1 and llm.places() == (0,)
    for place in (-1, 1.5, True, "2", None):
        with pytest.raises(ConfigError, match=r"place is .*; pass how many segments stand before, 0 or more\."):
            placed.keys(SEGMENTS, place=place)  # type: ignore[arg-type]


def test_a_report_says_that_the_place_is_another(placed: LLM) -> None:
    rows(placed, SEGMENTS)
    found = rows(placed, SEGMENTS[::-1])
    assert [row.reason for row in found] == ["other place", "other place", "", "other place", "other place"]
    same = rows(placed, [*SEGMENTS[:1], SEGMENTS[2], SEGMENTS[1], SEGMENTS[4], SEGMENTS[3]])
    assert [row.outcome for row in same] == ["hit"] * 5, "within a rung places do not matter"


def test_forgetting_forgets_all_ways(placed: LLM) -> None:
    placed.warm(SEGMENTS)
    assert placed.forget(name="passage 1").num_entries == 3
    assert len(placed.entries()) == 12


def test_live_texts_are_no_places(placed: LLM) -> None:
    """System text and labels by rank; what stands there changes no key."""
    labels = [Segment(f"Source {n}:", cache=False) for n in (1, 2)]
    system = Segment("You answer briefly, and from what is told.", kind="system")
    rows(placed, [system, labels[0], SEGMENTS[0], labels[1], SEGMENTS[1]])
    wanted = {placed.keys([one], place=n)[0][0] for n, one in enumerate(SEGMENTS[:2])}
    assert wanted == {entry.key for entry in placed.entries() if entry.kind == "segment"}


def test_comparing_leaves_the_others_at_their_places(placed: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is run live moves no other one behind another rung."""
    seen: list[list[bytes | None]] = []

    def noting(pieces: Any, policy: Policy, max_tokens: int, ask: Any) -> Any:
        def noted(prompts: Any, params: Any) -> Any:
            plans = [plan.make(given, one, placed._identity) for given, one in prompts if one == BY_PLACE]
            seen.extend([segment.key for segment in made.segments] for made in plans)
            return ask(prompts, params)

        return compare(pieces, policy, max_tokens, noted)

    monkeypatch.setattr("hypic.llm.compare", noting)
    found = placed.compare(Prompt(SEGMENTS, "Who grinds rye?"))
    assert not found.segments.is_same and len(found.live) == 5, "the control: there is something to find"
    whole, *others = [keys for keys in seen if keys]
    assert others == [whole[:n] + whole[n + 1 :] for n in range(5)] and len(set(whole)) == 5


def test_rungs_that_do_not_fit_are_left_out(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a checkpoint's own; of a primer that is passed none may lack."""
    made = Path(shutil.copytree(folder, tmp_path / "model"))
    long = "word " * 700
    (made / weights.PRIMER_FILE).write_text(f"---\n\nShort.\n\n---\n\n{long}", encoding="utf-8")
    with caplog.at_level(logging.WARNING), LLM(str(made), **{**SETTINGS, "policy": BY_PLACE}) as llm:
        assert llm.places() == (0, 1)
    assert "segments are encoded behind 1 passages of their primer at most: the primer has" in caplog.text
    with pytest.raises(ConfigError, match="of a context of 2048 it may take 512"):
        LLM(str(made), primer=f"---\n\nShort.\n\n---\n\n{long}", **SETTINGS)

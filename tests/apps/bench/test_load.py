"""Traces, their replay in this process, the search for the limit, and the ceiling of reuse."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import pytest

from hypic_apps.bench import load, potential, rates, traces
from hypic_apps.bench.potential import Part, ceiling, part
from hypic_apps.bench.rates import Rates
from hypic_apps.bench.replay import Played, Seen
from hypic_apps.bench.traces import Spec
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.main import main
from tests.apps.bench.small_load import FEW, TINY, bench

# -- traces ----------------------------------------------------------------------------------------------------------


def test_a_trace_is_what_was_asked_for() -> None:
    trace = traces.make(Spec(num_requests=3000))
    assert trace == traces.make(Spec(num_requests=3000)) != traces.make(Spec(num_requests=3000, seed=1))
    lengths = list(trace.lengths.values())
    assert mean(lengths) == pytest.approx(512, rel=0.05) and min(lengths) >= 40
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(trace.asks, trace.asks[1:], strict=False)]
    assert mean(gaps) == pytest.approx(1.0, rel=0.1) and pstdev(gaps) == pytest.approx(2.0, rel=0.2)
    assert all(len(set(ask.documents)) == 24 for ask in trace.asks)
    counts = [sum(number in ask.documents for ask in trace.asks) for number in (0, 100, 1900)]
    assert counts[0] > 5 * counts[1] > 5 * counts[2] > 0


def test_popular_documents_stand_at_no_fixed_place() -> None:
    places = [ask.documents.index(0) for ask in traces.make(Spec(num_requests=500)).asks if 0 in ask.documents]
    assert 9 < mean(places) < 14


def test_adverse_kinds() -> None:
    kinds = {
        kind: traces.make(Spec(kind, num_requests=12, num_documents=30, documents_each=3)) for kind in traces.KINDS
    }
    unique = [number for ask in kinds["unique"].asks for number in ask.documents]
    assert len(set(unique)) == len(unique) == 36
    assert {ask.documents for ask in kinds["ordered"].asks} == {(0, 1, 2)}
    assert [(ask.conversation, ask.turn) for ask in kinds["turns"].asks[5:7]] == [(0, 5), (1, 0)]
    turn, before = kinds["turns"].asks[1], kinds["turns"].asks[0]
    pieces = [kinds["turns"].pieces(ask, 512, lambda number: ()) for ask in (before, turn)]
    assert pieces[1][0] == pieces[0][0] and len(pieces[1]) == 2 and pieces[1][0].ends_message
    roles = [message["role"] for message in kinds["turns"].body(kinds["turns"].asks[2])["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    with pytest.raises(InputError, match="more than there are"):
        traces.make(Spec(num_documents=3, documents_each=4))


def test_a_trace_goes_through_a_file(tmp_path: Path) -> None:
    trace, path = traces.make(Spec(num_requests=5, num_documents=30, documents_each=3)), tmp_path / "trace.jsonl"
    traces.write(trace, path)
    timed = traces.read(path)
    assert [one.body for one in timed] == [trace.body(ask) for ask in trace.asks]
    assert [len(traces.parts(one.body)) for one in timed] == [4] * 5
    faster = traces.at_rate(timed, 8.0)
    assert faster[0].arrival_s == 0.0 and faster[-1].arrival_s == pytest.approx(4 / 8.0)
    assert traces.at_rate(timed, None) == timed


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "no request"),
        ("{", "no JSON"),
        ("[1]", "no messages"),
        ('{"messages": []}', "arrival_s None"),
        ('{"messages": [], "arrival_s": -1}', "arrival_s -1"),
    ],
)
def test_what_is_no_trace(content: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=expected):
        traces.read(path)
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)"):
        traces.read(tmp_path / "missing.jsonl")


# -- in this process -------------------------------------------------------------------------------------------------


def test_arms_play_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, "--qps", "40,80", "--requests", "6", "--seconds", "0.1", "--warmup", "8")
    by_arm = {arm: [r for r in found["records"] if r["arm"] == arm] for arm in load.REUSE}
    assert all([r["requests"] for r in records] == [6, 8] for records in by_arm.values())
    assert all(r["finished"] == r["requests"] and r["is_whole"] for r in found["records"])
    assert all(r["reused_share"] == 0 and r["segments"]["hit"] == 0 for r in by_arm["none"])
    warm = by_arm["segments"][1]
    assert warm["segments"]["hit"] + warm["segments"]["encoded"] == 32 and warm["segments"]["hit"] > 16
    assert warm["reused_share"] > 0.5 > by_arm["prefix"][1]["reused_share"]
    assert {r["arm"] for r in found["ratios_to_none"]} == {"prefix", "segments"}
    assert set(found["sustained_qps"]) == set(load.REUSE)


def test_thrashing_caps_the_store_at_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--kind", "thrash", "--qps", "50", "--requests", "10", "--seconds", "0", "--arms", "segments")
    small, whole = bench(capsys, *arguments), bench(capsys, "--kind", "rag", *arguments[2:])
    assert small["records"][0]["store_bytes"] > 0 and whole["records"][0]["store_bytes"] is None
    assert small["records"][0]["segments"]["hit"] < whole["records"][0]["segments"]["hit"]


def test_a_rate_that_takes_too_long_is_broken_off(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--qps", "2", "--requests", "40", "--warmup", "0", "--timeout", "1", "--arms", "segments")
    (record,) = bench(capsys, *slow)["records"]
    assert not record["is_whole"] and not record["held"] and record["finished"] < 40


def test_a_trace_of_texts_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    assert main(["bench", "load", "--write-trace", str(path), *FEW, "--requests", "4", "--qps", "5", "--warmup", "2",
                 "--seconds", "0"]) == 0  # fmt: skip
    assert len(path.read_text().splitlines()) == 6
    arguments = ["--trace", str(path), "--qps", "20", "--requests", "4", "--seconds", "0", "--warmup", "2"]
    assert main(["bench", "load", *TINY, *arguments]) == 2
    assert "needs a tokenizer" in capsys.readouterr().err
    bundled = ["--geometry", "hypic-tiny", "--memory", "300MiB", "--arms", "segments", "--max-context", "1024"]
    (record,) = bench(capsys, *arguments, *bundled)["records"]
    assert record["finished"] == 4 and record["segments"]["hit"] > 0


# -- the search ------------------------------------------------------------------------------------------------------


def limited(limit: float, played: list[float]) -> rates.Play:
    def play(qps: float, count: int) -> dict[str, Any]:
        played.append(qps)
        return {"arm": "x", "is_whole": True, "failed": 0, "ttft_ms_p90": 100.0 if qps <= limit else 5000.0}

    return play


@pytest.mark.parametrize("limit", [0.11, 0.5, 0.7, 9.3])
def test_the_search_closes_in_on_the_limit(limit: float) -> None:
    played: list[float] = []
    records = list(rates.search(limited(limit, played), Rates(refine=4)))
    found = rates.sustained(records)["x"]
    assert found <= limit < found * 1.03 * rates.GROWTH ** (1 / 8)
    assert len(played) == len(set(played)) < 20


def test_named_rates_are_played_as_they_are_and_an_ended_trace_ends_the_search() -> None:
    played: list[float] = []
    assert [r["held"] for r in rates.search(limited(2.0, played), Rates([1.0, 4.0]))] == [True, False]
    left = iter([{"arm": "x", "is_whole": True, "failed": 0, "ttft_ms_p90": 1.0}])
    assert len(list(rates.search(lambda qps, count: next(left, None), Rates()))) == 1


def test_a_rate_is_played_long_enough_for_a_queue_to_build_up() -> None:
    plan = Rates(requests=30, seconds=10.0)
    assert [plan.count(qps) for qps in (0.5, 3.0, 100.0)] == [30, 30, 1000]


def test_what_failed_or_never_began_counts_as_slow() -> None:
    done = [Seen(0.1, 0.2, 3, 10, 5) for _ in range(8)]
    summary = Played([*done, Seen(), Seen(error="gone")], 30.0, False).summary()
    assert summary["finished"] == 8 and summary["failed"] == 1
    assert summary["ttft_ms_p50"] == pytest.approx(100) and summary["ttft_ms_p90"] > 1000


# -- the ceiling -----------------------------------------------------------------------------------------------------


def parts(*texts: str) -> list[Part]:
    return [part(text, lambda text: max(1, round(len(text) / 4))) for text in texts]


def test_segments_are_found_at_any_place_and_prefixes_at_the_head_only() -> None:
    a, b = "a" * 400, "b" * 400
    found = ceiling([parts(a, b, "question 1"), parts(b, a, "question 2"), parts(b, a, "question 3")], 10_000, 32)
    assert found.num_tokens == 606
    assert found.segment_tokens == 400
    assert found.prefix_tokens == 200
    assert ceiling([parts(a), parts("x" + a)], 10_000, 32).prefix_tokens == 0


def test_a_small_cache_forgets() -> None:
    prompts = [parts(letter * 400) for letter in "abcabc"]
    assert ceiling(prompts, 300, 32).segment_tokens == 300
    assert ceiling(prompts, 299, 32).segment_tokens == 0


def test_short_parts_count_behind_a_known_head_only() -> None:
    a, b = "a" * 400, "b" * 400
    found = ceiling([parts("hi", a), parts("hi", a), parts(b, "hi", a)], 10_000, 32)
    assert found.segment_tokens == 101 + 100


def test_the_ceiling_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    traces.write(traces.make(Spec(num_requests=30, num_documents=40, documents_each=4)), path)
    assert main(["bench", "potential", str(path), "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    shares = [r["segment_share"] for r in records]
    assert shares == sorted(shares) and shares[-1] > 0.5 > records[-1]["prefix_share"]
    assert records[-1]["share_of_all"] == 1.0 and records[-1]["run_ratio"] > 1
    assert main(["bench", "potential", str(path), "--cache-tokens", "1000", "--tokenizer", "hypic-tiny"]) == 0
    assert "30 requests" in capsys.readouterr().out
    assert main(["bench", "potential", str(tmp_path / "missing")]) == 2
    assert potential.BLOCK_TOKENS == 16

"""``hypic bench ttft`` on tiny geometries: arms do what they say, prompts are new, records are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypic.errors import ConfigError
from hypic.types import CacheReport, SegmentReport
from hypic_apps.bench import ttft, ttft_command
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.prompts import IdsSource, Shape, shuffled
from hypic_apps.bench.session import Answered, Session, session
from hypic_apps.cli.errors import CommandError
from hypic_apps.cli.main import main
from tests.apps.bench.small_ttft import QUICK, SMALL, bench, by_arm


def test_records_hold_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys)
    found = by_arm(result)
    assert list(found) == list(ttft.ARMS)
    for record in found.values():
        assert record["geometry"] == "tiny" and record["device"] == "cpu" and record["runs"] == 2
        assert (record["num_segments"], record["segment_tokens"], record["tail_tokens"]) == (2, 48, 8)
        assert 0 < record["ttft_ms_p50"] <= record["ttft_ms_p90"]
        assert record["floor_ms"] > 0 and record["floor_ratio"] > 1
        assert record["total_ms_1024"] > record["total_ms_256"] > record["ttft_ms_p50"]
    assert all(result[name] for name in ("date", "command", "hardware", "versions", "limits"))
    assert list(result["seconds"]) == ["building", "warming up", "preparing", "measured requests"]
    measured = sum(record["ttft_ms_p50"] * record["runs"] for record in found.values()) / 1e3
    assert result["seconds"]["measured requests"] == pytest.approx(measured, rel=0.3)
    assert result["seconds"]["preparing"] > 0 and result["first_used_on_requests"] == []


def test_what_determinism_costs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every arm but prefix, both ways on the same documents; deterministic ones run the same tokens."""
    result = bench(capsys, "--deterministic")
    found = by_arm(result)
    assert list(found) == [*ttft.ARMS, *ttft.TWINS.values()]
    for arm, twin in ttft.TWINS.items():
        assert found[twin]["computed_tokens"] == found[arm]["computed_tokens"]
        assert found[twin]["floor_ms"] == found[arm]["floor_ms"] and "times_plain" not in found[arm]
        cost = found[twin]["ttft_ms_p50"] / found[arm]["ttft_ms_p50"]
        assert found[twin]["times_plain"] == pytest.approx(cost)
        assert result["deterministic_over_plain"][arm]["largest"] == pytest.approx(cost)
        assert f"deterministic over plain, {arm}: " in ttft_command.text(result)
    assert found["warm-deterministic"]["gap_ms"] != found["warm"]["gap_ms"]
    assert bench(capsys, "--arms", "warm")["deterministic_over_plain"] == {}


def test_prefix_and_warm_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before a prefix request is run only as far as its orders agree, which reuses the same."""
    grid = ("--segments", "1,4", "--arms", "prefix,warm", "--decode-tokens", "0")
    result, orders = bench(capsys, *grid), [shuffled([""] * 4, n) for n in range(2)]
    assert [(r["num_segments"], r["arm"]) for r in result["records"]] == [
        (1, "prefix"), (1, "warm"), (4, "prefix"), (4, "warm")]  # fmt: skip
    assert result["warm_over_prefix"]["cells"] == 2
    text = ttft_command.text(result)
    assert "warm over prefix: geometric mean of 2 cells" in text and "floor ratio" in text
    assert all(order[0] != 0 for order in orders[1:]), "the last repetition reuses nothing"
    heads = {r["num_segments"]: r["computed_tokens"] for r in result["records"] if r["arm"] == "prefix"}
    assert heads == {1: 8, 4: 4 * 48 + 8}


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [2, 0, 1, 3], [0, 1, 2, 3]])
def test_a_prefix_cache_has_seen_all_that_it_could_reuse(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are reused as if the whole prompt before had been run."""
    monkeypatch.setattr(ttft, "shuffled", lambda documents, number: order)
    shape, counts = Shape(4, 48, 8), []
    with session(geometry("tiny"), {"memory": "64MiB", "max_context": 1024}, ids=True) as built:
        for whole in (False, True):
            repetition = ttft.Repetition(built, shape, 0)
            if whole:
                pieces = repetition._pieces(range(4), "before")
                monkeypatch.setattr(ttft.Repetition, "_before", lambda self, pieces=pieces: pieces)
            counts.append(repetition.measure("prefix").report.reused_tokens)
    same = next((n for n, place in enumerate(order) if n != place), 4)
    assert counts == [48 * same] * 2


def test_every_arm_computes_the_tokens_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """The warm arm runs seams and tail; a control: with other seams it runs other tokens."""
    found = by_arm(bench(capsys))
    assert found["full"]["computed_tokens"] == 104
    assert found["warm"]["computed_tokens"] == 2 * 8 + 8
    assert found["cold"]["computed_tokens"] == 104 + 2 * 8
    wider = by_arm(bench(capsys, "--arms", "warm", "--seam", "12"))
    assert wider["warm"]["computed_tokens"] == 2 * 12 + 8


@pytest.mark.parametrize("many", [2, 3])
def test_segments_of_every_repetition_have_other_lengths(many: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And every arm what it should compute; a control: without ``--vary`` all have one length."""
    seen = list[list[int]]()
    with pytest.MonkeyPatch.context() as patch:
        sound = IdsSource.documents

        def noted(source: IdsSource, shape: Shape, number: int) -> Any:
            found = sound(source, shape, number)
            seen.append([len(ids) for ids in found])
            return found

        patch.setattr(IdsSource, "documents", noted)
        grid = ("--segments", str(many), "--decode-tokens", "0", "--runs", "4")
        result = bench(capsys, *grid, "--segment-tokens", "96", "--vary", "0.4")
        assert len({tuple(lengths) for lengths in seen}) == len(seen) == 4
        assert all(96 - 38 <= length <= 96 + 38 for lengths in seen for length in lengths)
        assert len({length for lengths in seen for length in lengths}) > many
        found = by_arm(result)
        assert {record["vary"] for record in found.values()} == {0.4}
        assert found["full"]["computed_tokens"] == sum(seen[-1]) + 8 == found["full"]["prompt_tokens"]
        assert found["warm"]["computed_tokens"] == many * 8 + 8
        assert f"{many} x 96 +- 40% + 8" in ttft_command.text(result)
        seen.clear()
        assert by_arm(bench(capsys, *grid))["full"]["vary"] == 0 and seen == [[48] * many] * 4


@pytest.mark.parametrize("vary", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("many", [1, 2, 5, 16])
def test_the_whole_stays_about_as_long(many: int, vary: float) -> None:
    """Exactly for an even number; the same in every process."""
    shape = Shape(many, 100, 8, 3, vary)
    totals = [sum(shape.lengths(str(seed))) - many * 100 for seed in range(50)]
    assert max(map(abs, totals)) <= many % 2 * shape.most_varied
    assert (len(set(totals)) > 1) == (many % 2 == 1 and vary > 0)
    assert shape.num_tokens == many * 100 + 11 and max(totals) + shape.num_tokens <= shape.most_tokens
    assert shape.lengths("x") == shape.lengths("x")
    assert Shape(2, 100, 8, 3, 0.25).lengths("0|1|a") == [105, 95]
    assert repr(shape) == repr(Shape(many, 100, 8, 3)), "ids without variation are drawn as before"


def test_a_grid_leaves_out_what_is_too_long_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--segments", "1,2", "--segment-tokens", "48,64", "--max-prompt-tokens", "120", "--arms", "cold")
    result = bench(capsys, *grid)
    cells = [(r["num_segments"], r["segment_tokens"]) for r in result["records"]]
    assert cells == [(1, 48), (1, 64), (2, 48)] and result["left_out"] == ["2 x 64"]


def test_a_grid_that_is_ended_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, seen = ttft.measure, list[Shape]()

    def ended(session: Session, shape: Shape, *rest: Any) -> ttft.Cell:
        seen.append(shape)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return sound(session, shape, *rest)

    monkeypatch.setattr(ttft, "measure", ended)
    path = tmp_path / "grid.json"
    assert main(["bench", "ttft", *SMALL, *QUICK, "--segments", "1,2,3", "--arms", "cold", "--save", str(path)]) == 130
    kept = json.loads(path.read_text())
    assert [r["num_segments"] for r in kept["records"]] == [1] and kept["missing_cells"] == 2


def test_what_all_cells_say_together() -> None:
    def record(arm: str, many: int, length: int, ms: float, gain: float) -> dict[str, Any]:
        return {"arm": arm, "num_segments": many, "segment_tokens": length, "tail_tokens": 8, "ttft_ms_p50": ms,
                "ratio_to_full": gain}  # fmt: skip

    grid = [record("warm", 4, 64, 10, 2), record("warm", 8, 64, 12, 8), record("warm", 8, 128, 90, 4)]
    found = ttft.over_cells([*grid, record("full", 4, 64, 20, 1)])
    assert found["warm_over_full"] == {"cells": 3, "mean": pytest.approx(4), "smallest": 2, "largest": 8}
    assert found["warm_over_prefix"] is None and found["ms_per_segment"] == {"warm": 0.5}


def test_a_cell_that_fails_does_not_take_the_others_along(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--segments", "1,6", "--arms", "warm", "--store", "device://60KiB")
    assert main(["bench", "ttft", *SMALL, *QUICK, "--json", *arguments]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [r["num_segments"] for r in result["records"]] == [1]
    assert len(result["failed"]) == 1 and result["failed"][0].startswith("6 x 48: the warm arm")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--segment-tokens", "16"], "run live"),
        (["--vary", "0.9"], "segments of 5 tokens are run live"),
        (["--vary", "1"], "'1'"),
        (["--vary", "some"], "'some'"),
        (["--segments", "0"], "'0'"),
        (["--arms", "hot"], "'hot'"),
        (["--geometry", "huge"], "'huge'"),
        (["--max-prompt-tokens", "10"], "longer than 10"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ttft", *SMALL, *QUICK, *arguments]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hypic: ")]
    assert expected in said


def test_an_arm_that_did_something_else_is_no_result() -> None:
    def report(*outcomes: Any, reused: int = 0) -> Answered:
        segments = tuple(SegmentReport("document", None, None, outcome, 48) for outcome in outcomes)
        return Answered((0.1,), (1,), CacheReport(segments, reused_tokens=reused))

    shape = Shape(2, 48, 8)
    ttft.check("warm", report("hit", "hit"), shape)
    for arm, answered in (
        ("warm", report("hit", "encoded")),
        ("warm", report("hit")),
        ("cold", report("hit", "encoded")),
        ("full", report("live", "live", reused=3)),
    ):
        with pytest.raises(CommandError):
            ttft.check(arm, answered, shape)


def test_segments_that_were_evicted_before_they_were_asked_for_are_no_warm_run() -> None:
    settings = {"memory": "64MiB", "max_context": 1024, "store": "device://100KiB"}
    with session(geometry("tiny"), settings, ids=True) as built, pytest.raises(CommandError, match="--memory"):
        ttft.measure(built, Shape(8, 48, 8), ttft.Plan(("warm",), runs=1, decode_tokens=0))


def test_a_geometry_has_no_primer() -> None:
    """It has no tokenizer to read one with."""
    made = session(geometry("tiny"), {"memory": "64MiB", "primer": "A text."}, ids=True)
    with pytest.raises(ConfigError, match="no tokenizer; leave out --primer"), made:
        pass


def test_prompts_are_new_in_every_repetition_and_the_same_in_every_process() -> None:
    source, shape = IdsSource(512), Shape(3, 64, 8, head_tokens=5)
    first, again, other = (source.documents(shape, number) for number in (0, 0, 1))
    assert first == again != other and len(set(first[0])) > 30
    heads = {source.prompt(shape, documents, "x")()[0].ids for documents in (first, other)}
    tails = {source.prompt(shape, first, salt)()[-1].ids for salt in ("x", "y")}
    assert len(heads) == 1 and len(tails) == 2
    assert sorted(shuffled(first, 7)) == [0, 1, 2] and len({tuple(shuffled(first, n)) for n in range(50)}) == 6


def test_text_is_tokenised_inside_the_time_unless_asked_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    bundled = ("--geometry", "hypic-tiny", "--arms", "warm", "--runs", "1", "--memory", "400MiB")
    inside, beforehand = bench(capsys, *bundled), bench(capsys, *bundled, "--ids")
    assert inside["tokenising"] is True and beforehand["tokenising"] is False
    (one,), (other,) = inside["records"], beforehand["records"]
    assert one["computed_tokens"] == other["computed_tokens"] < one["prompt_tokens"]
    assert one["prompt_tokens"] >= 104

"""``hypic eval`` as it is called: tables, JSON, plots, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hypic.errors import ConfigError
from hypic_apps.cli import quality
from hypic_apps.cli.main import main
from hypic_apps.eval import processes
from hypic_apps.eval.driver import Subject
from hypic_apps.eval.measure import Plan, Unit
from hypic_apps.eval.records import Measured
from tests.apps.commands import one_sentence
from tests.apps.eval.test_real import written

ENGINE = ["--device", "cpu", "--memory", "64MiB", "--max-context", "4096"]
FIELDS = {"model", "set", "arm", "metric", "value", "n", "low", "high", "gap_to_full", "gap_low", "gap_high"}


def test_real_questions_to_a_table_a_file_and_a_plot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "out" / "s7.json", tmp_path / "out" / "s7.svg"
    arguments = ["eval", "--data", str(written(tmp_path)), "--passages", "3", "--items", "2", "--timed", "1"]
    arguments += ["--arm", "transition", "--arm", "gold-removed", "--model", str(folder), *ENGINE]
    assert main([*arguments, "--save", str(file), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "no evidence for larger models" in out and "| transition |" in out and "S7, exact match (n=2)" in out
    saved = json.loads(file.read_text())
    assert all(set(record) == FIELDS for record in saved["records"])
    assert {r["arm"] for r in saved["records"]} == {"full", "transition", "gold-removed"}
    assert {r["set"] for r in saved["records"]} == {"S7"} and saved["model"] == folder.name
    texts = [e.text for e in ElementTree.fromstring(plot.read_text()).iter() if e.tag.endswith("text")]
    assert "transition" in texts and "full" in texts


def test_a_set_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--set", "S9", "--items", "1", "--timed", "1", "--arm", "transition", "--json"]
    assert main([*arguments, "--model", str(folder), *ENGINE]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"tool", "arguments", "rule", "kl"} <= {r["metric"] for r in found["records"]}
    assert found["note"] and found["fingerprint"]


def test_saved_results_are_shown_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("S9", "S8"):
        arguments = ["eval", "--set", name, "--items", "1", "--timed", "1", "--arm", "transition"]
        assert main([*arguments, "--model", str(folder), *ENGINE, "--save", str(tmp_path / f"{name}.json")]) == 0
    capsys.readouterr()
    assert main(["eval", "--show", str(tmp_path / "S9.json"), "--show", str(tmp_path / "S8.json")]) == 0
    out = capsys.readouterr().out
    assert "S9, right tool (n=1)" in out and "S8, exact match (n=1)" in out and folder.name in out


def test_sets_stand_as_they_were_asked_for_whichever_is_done_first(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = quality._by_set
    monkeypatch.setattr(quality, "_by_set", lambda *args: reversed(list(sound(*args))))
    arguments = ["eval", "--set", "S9", "--set", "S8", "--items", "1", "--timed", "1", "--arm", "transition", "--json"]
    assert main([*arguments, "--model", str(folder), *ENGINE]) == 0
    found = json.loads(capsys.readouterr().out)["records"]
    in_order = list(dict.fromkeys(record["set"] for record in found))
    assert in_order == ["S9", "S8"]


@pytest.mark.parametrize(
    "what", [["--items", "1", "--timed", "1"], ["--drift", "--prompts", "1"]], ids=["answers", "drift"]
)
def test_an_arm_takes_the_middle_rung_for_all_places(
    what: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = "A letter came.\n\n---\n\nThe office opens at nine.\n\nIt rains.\n\nA ferry is late."

    def found(primer: str) -> Any:
        arms = [flag for arm in ("transition", "middle-rung") for flag in ("--arm", arm)]
        arguments = ["eval", "--set", "S8", *what, *arms, "--primer", primer, "--json"]
        assert main([*arguments, "--model", str(folder), *ENGINE]) == 0
        told = json.loads(capsys.readouterr().out)
        rows = told["drift"] if "--drift" in what else [r for r in told["records"] if r["metric"] == "kl"]
        return {arm: [{**row, "arm": ""} for row in rows if row["arm"] == arm] for arm in ("transition", "middle-rung")}

    by_place, alone = found(rungs), found("A letter came.")
    assert by_place["transition"] != by_place["middle-rung"] != []
    assert alone["transition"] == alone["middle-rung"] != [], "of one length there is one for all places"


def test_drift_by_layer_and_its_plot(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--drift", "--set", "S8", "--prompts", "1", "--arm", "transition", "--arm", "addition"]
    assert main([*arguments, "--model", str(folder), *ENGINE, "--plot", str(tmp_path / "d.svg")]) == 0
    out = capsys.readouterr().out
    assert "| 0 (linear) |" in out and "| layer | transition: state |" in out
    assert "polyline" in (tmp_path / "d.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "S99"], "'S99' is no set"),
        (["--arm", "magic"], "'magic' is no arm"),
        (["--items", "0"], "'0'"),
        (
            ["--set", "S1", "--items", "100000"],
            "--items is 100000, but S1 holds 2000 items; pass --items 2000 or less.",
        ),
        (["--set", "S6", "--set", "S9", "--items", "501"], "S6 holds 500"),
        (["--items", "2001"], "holds 2000 items"),
        (["--drift", "--set", "S99"], "'S99' is no set"),
        (["--drift", "--set", "S9", "--prompts", "401"], "--prompts is 401, but S9 holds 400 items"),
        (["--data", "nowhere.jsonl"], "cannot be read"),
        (["--show", "nowhere.json"], "'nowhere.json' cannot be read (No such file or directory); name"),
        (["--sweep", "tiers"], "tiers"),
        (["--value", "8"], "--value 8 is of a sweep; name it with --sweep segments or --sweep lengths."),
        (["--sweep", "segments", "--value", "0"], "'0'"),
        (["--set", "S8", "--skip", "699", "--items", "2"], "--items is 2 and --skip 699, but S8 holds 700 items; pass"),
        (["--set", "S8", "--skip", "700"], "leaves nothing of S8, which holds 700 items; pass --skip 699 or"),
        (["--set", "S1", "--set", "S9", "--skip", "400"], "--skip 400 leaves nothing of S9, which holds 400"),
        (["--set", "S10", "--items", "897"], "--items is 897, but S10 holds 896 items; pass --items 896 or less."),
        (["--skip", "500"], "leaves nothing of S4-list, which holds 500 items; pass --skip 499 or"),
        (["--skip", "-1"], "'-1'"),
        (
            ["--by-place", "--set", "S8", "--set", "S3"],
            "no item of S3 rests on one passage; with --by-place name others",
        ),
        (["--by-place", "--drift"], "--by-place groups answers; leave it out with --drift."),
        (["--by-place", "--set", "S3"], "no item of S3 rests on one passage; with --by-place name others with --set."),
        (["--skip", "5", "--full"], "--skip 5 is for --items of sets; leave out --sweep, --drift, --full and --data."),
    ],
)
def test_what_is_refused(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *arguments]) == 2
    assert expected in one_sentence(capsys.readouterr().err)


def test_as_many_items_as_the_largest_set_holds_are_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def of(name: str, pool: object, number: int | None) -> list[object]:
        asked.append(number)
        return []

    monkeypatch.setattr("hypic_apps.eval.sets.of", of)
    arguments = ["eval", "--set", "S1", "--set", "S6", "--items", "2000", "--model", "/nowhere/at/all"]
    assert main(arguments) == 2
    assert asked == [2000, 2000] and "/nowhere/at/all" in one_sentence(capsys.readouterr().err)


def test_a_sweep_asks_the_values_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[int]] = {}

    def quality(*args: Any) -> tuple[dict[str, Any], list[str]]:
        asked.update({name: [len(item.passages) for item in items] for name, items in args[3].items()})
        return {}, []

    monkeypatch.setattr("hypic_apps.cli.quality._quality", quality)
    assert main(["eval", "--sweep", "segments", "--value", "8", "--value", "3", "--items", "2"]) == 0
    assert asked == {"S1 segments 8": [8, 8], "S1 segments 3": [3, 3]}


def test_what_is_skipped_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def quality(*args: Any) -> tuple[dict[str, Any], list[str]]:
        asked.extend(item.number for item in args[3]["S8"])
        return {}, []

    monkeypatch.setattr("hypic_apps.cli.quality._quality", quality)
    assert main(["eval", "--set", "S8", "--skip", "400", "--items", "3"]) == 0
    assert asked == [400, 401, 402]


def test_a_set_that_differs_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypic_apps.eval.sets.NAMES", ("S9",))
    assert main(["eval", "--check"]) == 0 and "as committed" in capsys.readouterr().out
    monkeypatch.setattr("hypic_apps.eval.calls.SEED", 1)
    assert main(["eval", "--check"]) == 1 and "differs" in capsys.readouterr().out


def test_what_is_done_is_saved_when_a_run_is_broken_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = processes.perform

    def broken(subject: Subject, unit: Unit, plan: Plan) -> Measured:
        if unit.name == "S8":
            raise ConfigError("broken off")
        return whole(subject, unit, plan)

    monkeypatch.setattr(processes, "perform", broken)
    file = tmp_path / "s.json"
    arguments = ["eval", "--set", "S9", "--set", "S8", "--items", "1", "--timed", "1", "--arm", "transition"]
    assert main([*arguments, "--model", str(folder), *ENGINE, "--save", str(file)]) != 0
    assert "S9: 1 items" in capsys.readouterr().err
    saved = json.loads(file.read_text())
    assert {r["set"] for r in saved["records"]} == {"S9"} and saved["missing"] == ["S8"]

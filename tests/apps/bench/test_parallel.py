"""``hypic bench parallel``: measured on a tiny geometry, simulated from given costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypic_apps.bench import command, parallel_command, parallel_runs
from hypic_apps.bench.parallel_simulated import combine, simulated
from hypic_apps.cli.errors import CommandError, InputError


def test_fleets_are_simulated_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["parallel", "--cost", "0.016,2e-5,2e-10", "--simulate", "8,1024", "--requests", "60", "--json"]
    assert command.main(arguments) == 0
    eight, many = json.loads(capsys.readouterr().out)["simulated"]
    assert eight["uneven_ratio"] >= 1.4 and eight["cold_64x1024_speedup"] >= 6.5
    assert many["workers"] == 1024 and many["longest-first_ttft_ms"]["p90"] < many["round-robin_ttft_ms"]["p90"]
    with pytest.raises(InputError, match="too large"):
        command.main(["parallel", "--cost", "0.016,2e-5,2e-10", "--simulate", "2000"])
    with pytest.raises(InputError, match="'0,0,0' costs nothing"):
        command.main(["parallel", "--cost", "0,0,0", "--simulate", "8"])


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--load", "0", "'0' is no number above 0, such as 0.5"),
        ("--load", "-1", "'-1' is no number above 0"),
        ("--load", "nan", "'nan' is no number above 0"),
        ("--fail-rate", "3", "'3' is no share from 0 to below 1"),
        ("--fail-rate", "nan", "'nan' is no share"),
        ("--budget", "soon", "'soon' is no number above 0"),
    ],
)
def test_numbers_that_cannot_be_right(flag: str, value: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        command.main(["parallel", "--cost", "0.016,2e-5,2e-10", "--simulate", "8", f"{flag}={value}"])


def test_a_fleet_answers_at_the_speed_that_was_measured() -> None:
    """Answering is what no number of workers shortens."""
    even = [{"segments": count, "combine_ms": 10.0 + 0.5 * count} for count in (64, 64, 11)]
    assert combine(even) == pytest.approx((0.010, 0.0005)) and combine(even[:1]) == pytest.approx((0.042, 0.0))
    falling = [{"segments": 1, "combine_ms": 9.0}, {"segments": 64, "combine_ms": 3.0}]
    assert combine(falling) == pytest.approx((0.006, 0.0)) and combine([]) is None
    costs = {"encode": {"step_s": 0.01, "token_s": 1e-5}, "link": {"latency_s": 0.0, "byte_s": 0.0}}
    costs["entry"] = {"fixed_bytes": 1, "token_bytes": 0}
    slow, fast = (simulated(costs, 8, (seconds, 0.0), 20, 0.5, 0.0) for seconds in (1.0, 0.001))
    assert slow["cold_64x1024_speedup"] < 2 < 6 < fast["cold_64x1024_speedup"]
    with pytest.raises(InputError, match="measures no cost"):
        simulated({**costs, "encode": None}, 8, None, 20, 0.5, 0.0)


def test_two_workers_are_measured_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.checkpoints import qwen

    arguments = ["parallel", "--geometry", str(qwen(tmp_path / "model")), "--counts", "1,2", "--shapes", "6x64"]
    arguments += ["--runs", "2", "--uneven", "6", "--seeds", "2", "--memory", "128MiB", "--device", "cpu"]
    saved = tmp_path / "result.json"
    assert command.main([*arguments, "--save", str(saved)]) == 0
    (run,) = json.loads(saved.read_text())["runs"]
    checked = run["checked"][0]
    assert (
        checked["same_tokens"] and checked["is_right"] and checked["entries_differ_by"] < 1e-3 and checked["is_sharp"]
    )
    assert checked["segments"] == 8 and checked["is_repeatable"] and checked["repeated_differ_by"] == 0.0
    assert [record["workers"] for record in run["even"]] == [1, 2]
    assert all(min(record["ttft_ms_p50"], record["combine_ms"]) > 0 for record in run["even"])
    assert run["uneven"][0]["ratio_p50"] > 0 and run["uneven"][0]["ratio_by_tokens"] >= 1
    assert run["fetched"][0]["entries_fetched"] == 6 and run["fetched"][0]["gb_per_s"] > 0
    handled = run["fetched"][0]["handling"]
    assert 1 <= handled["entries_a_parcel"] <= 6 and min(handled.values()) > 0
    assert run["carriers"] == ["gloo"]
    said = capsys.readouterr().out
    assert "8 of 8 equal bit by bit" in said and "6 x 64 fetched" in said


def test_workers_that_differ_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the comparison finds wrong ends the command with an error, after all was saved; as does a geometry that
    cannot be measured, after the others were."""
    from tests.checkpoints import qwen

    sound, saved = parallel_command.check, tmp_path / "result.json"
    wrong = {"equal_entries": 0, "entries_differ_by": 0.5, "is_right": False}
    monkeypatch.setattr(parallel_command, "check", lambda *args: {**sound(*args), **wrong})
    good, broken = qwen(tmp_path / "model"), tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "none of ours"}')
    arguments = ["parallel", "--geometry", f"{broken},{good}", "--counts", "1,2", "--shapes", "4x32", "--runs", "1"]
    arguments += ["--uneven", "0", "--memory", "128MiB", "--device", "cpu", "--save", str(saved)]
    with pytest.raises(CommandError, match="broken: .*none of ours"):
        command.main(arguments)
    runs = json.loads(saved.read_text())["runs"]
    assert "error" in runs[0] and "error" not in runs[1] and len(runs[1]["even"]) == 2
    with pytest.raises(CommandError, match="do not give what one gives"):
        parallel_command._demand_sound({"runs": runs[1:]})


def test_a_budget_ends_repetitions_and_leaves_one_of_each() -> None:
    assert parallel_runs.Clock.of(-1.0).is_over and not parallel_runs.Clock.of(None).is_over

"""``hypic bench parallel``: measured on a tiny geometry, simulated from given costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypic_apps.bench import command
from hypic_apps.cli.errors import InputError


def test_fleets_are_simulated_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["parallel", "--cost", "0.016,2e-5,2e-10", "--simulate", "8,1024", "--requests", "60", "--json"]
    assert command.main(arguments) == 0
    eight, many = json.loads(capsys.readouterr().out)["simulated"]
    assert eight["uneven_ratio"] >= 1.4 and eight["cold_64x1024_speedup"] >= 6.5
    assert many["workers"] == 1024 and many["longest-first_ttft_ms"]["p90"] < many["round-robin_ttft_ms"]["p90"]
    with pytest.raises(InputError, match="too large"):
        command.main(["parallel", "--cost", "0.016,2e-5,2e-10", "--simulate", "2000"])


def test_two_workers_are_measured_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.checkpoints import qwen

    arguments = ["parallel", "--geometry", str(qwen(tmp_path / "model")), "--counts", "1,2", "--shapes", "6x64"]
    arguments += ["--runs", "2", "--uneven", "6", "--seeds", "2", "--memory", "128MiB", "--device", "cpu"]
    saved = tmp_path / "result.json"
    assert command.main([*arguments, "--save", str(saved)]) == 0
    result = json.loads(saved.read_text())
    assert result["checked"][0]["same_token"] and result["checked"][0]["entries_differ_by"] < 1e-3
    assert [record["workers"] for record in result["even"]] == [1, 2]
    assert all(record["ttft_ms_p50"] > record["combine_ms"] > 0 for record in result["even"])
    assert result["uneven"][0]["ratio_p50"] > 0
    assert "entries differ by" in capsys.readouterr().out

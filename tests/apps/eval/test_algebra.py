"""``hypic eval --algebra``: the transition is exact where theory says so, and dropping it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypic_apps.cli.eval import shown
from hypic_apps.cli.main import main
from hypic_apps.eval import algebra
from hypic_apps.eval.tiny import CONFIGS
from tests.apps.commands import one_sentence

ONE_OF_EACH = ("minimax", "bailing_moe_linear (2.5)", "granitemoehybrid", "qwen3_5_text", "bailing_hybrid")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_only_the_transition_is_exact_in_the_first_layer(name: str) -> None:
    (row,) = algebra.measure([name], num_prompts=1)
    assert row.errors["transition"].first_state < 1e-12
    for how in ("addition", "last"):
        assert row.errors[how].first_state > 0.05 and row.errors[how].logits > 0.05


def test_what_is_compared_is_reuse_with_full_recompute() -> None:
    """With a broken composition the first layer would show it."""
    with pytest.MonkeyPatch.context() as patch:
        from tests.engine.faults import FAULTS

        FAULTS["drop-transition"](patch)
        (row,) = algebra.measure(["minimax"], num_prompts=1)
    assert row.errors["transition"].first_state > 0.05
    assert row.errors["transition"] == row.errors["addition"]


def test_a_run_can_be_repeated() -> None:
    first, again = (list(algebra.measure(["minimax"], num_prompts=1)) for _ in range(2))
    assert first == again


def test_dummy_states_decay_slowly_in_every_family() -> None:
    """Were they to forget within a segment, all ways of composing would look alike."""
    rows = list(algebra.measure(num_prompts=1))
    assert [row.name for row in rows] == list(CONFIGS)
    assert all(row.errors["last"].first_state > 0.1 for row in rows if row.name != "lfm2")
    (stateless,) = (row for row in rows if row.name == "lfm2")
    assert stateless.errors["last"].last_state == 0.0 and stateless.errors["last"] == stateless.errors["transition"]


def test_the_table_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "algebra.json"
    arguments = ["eval", "--algebra", "--family", "minimax", "--prompts", "1"]
    assert main([*arguments, "--save", str(file)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("| family | T |") and out[2].startswith("| `minimax` | head |") and len(out) == 3
    saved = json.loads(file.read_text())
    assert saved["command"].startswith("hypic") and saved["date"] and saved["torch"] and saved["num_prompts"] == 1
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["families"] == saved["families"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--algebra", "--family", "rwkv"], "'rwkv'"), (["--algebra", "--prompts", "0"], "'0'")],
)
def test_what_cannot_be_measured(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *arguments]) == 2
    assert expected in one_sentence(capsys.readouterr().err)


def test_errors_as_they_are_shown() -> None:
    assert [shown(x) for x in (0.0, 3e-16, 0.004, 0.123, 0.5, 1.5)] == ["0", "3e-16", "0.4 %", "12 %", "50 %", "150 %"]

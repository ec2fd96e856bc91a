"""A result that is saved again and again is never a part of one, whenever the process ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypic_apps.bench import records
from hypic_apps.bench.parallel_text import text
from hypic_apps.cli import findings
from hypic_apps.cli.errors import CommandError


class Ended(BaseException):
    """Nothing catches this, as nothing catches the end of a process."""


@pytest.mark.parametrize("save", [records.save, findings.save])
def test_what_was_saved_before_stays_until_the_new_one_is_whole(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sound = tmp_path / "folder" / "found.json", Path.write_bytes
    save(path, {"runs": [1]})

    def ends_in_the_middle(self: Path, data: bytes) -> int:
        sound(self, data[: len(data) // 2])
        raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", ends_in_the_middle)
        with pytest.raises(Ended):
            save(path, {"runs": [1, 2]})
    assert json.loads(path.read_text()) == {"runs": [1]}
    save(path, {"runs": [1, 2]})
    assert json.loads(path.read_text()) == {"runs": [1, 2]} and [one.name for one in path.parent.iterdir()] == [
        path.name
    ]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot be written .*; name another file"):
        records.save(tmp_path / "file" / "found.json", {})


def test_what_is_beyond_measure_is_null(tmp_path: Path) -> None:
    """JSON has no infinity, and Python's own would stop other readers."""
    found = {"runs": [{"nats": float("inf"), "ms": (1.5, float("nan")), "name": "a"}]}
    records.save(tmp_path / "found.json", found)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / "found.json").read_text()
    assert json.loads(text, parse_constant=refuse) == {"runs": [{"nats": None, "ms": [1.5, None], "name": "a"}]}


def test_likeliest_tokens_that_differ_are_told_in_words() -> None:
    nats = float("inf")
    fast = {"parts_at": 0, "margin_nats": nats, "same_first_token": False, "entries_sent": 4, "differs_by_nats": nats}
    fast |= {"rounding_nats": 0.25, "alone_parts_at": 0, "control_nats": {"other_order": nats, "no_seam": 1.0}}
    exact = {"entries_sent": 8, "same_logprobs": True}
    found = {"workers": 2, "segments": 8, "segment_tokens": 64, "is_right": True, "failed": [], "equal_entries": 8}
    found |= {"entries_differ_by": 0.0, "repeated_differ_by": 0.0, "same_logprobs": True, "allowed_nats": nats}
    found |= {"deterministic": exact, "fast": fast, "is_sharp": False}
    run = {"geometry": "g", "checked": [found], "even": [], "uneven": [], "fetched": []}
    said = text({"runs": [run]})
    assert "unlimited (other likeliest tokens) apart; 0.25 nats by rounding" in said and " inf" not in said

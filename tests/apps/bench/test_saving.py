"""A result that is saved again and again is never a part of one, whenever the process ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypic_apps.bench import records
from hypic_apps.cli import findings
from hypic_apps.cli.errors import CommandError


class Ended(BaseException):
    """Nothing catches this, as nothing catches the end of a process."""


@pytest.mark.parametrize("save", [records.save, findings.save])
def test_what_was_saved_before_stays_until_the_new_one_is_whole(
    save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sound = tmp_path / "folder" / "found.json", Path.write_text
    save(path, {"runs": [1]})

    def ends_in_the_middle(self: Path, text: str, **options: Any) -> int:
        sound(self, text[: len(text) // 2], **options)
        raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", ends_in_the_middle)
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

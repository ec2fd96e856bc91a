"""Real questions from a file: a made-up one of the same form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hypic.errors import ConfigError
from hypic_apps.eval import real


def written(folder: Path, number: int = 6, *, packed: bool = True) -> Path:
    rows = [
        {
            "question": f"where is mill {n}",
            "answers": [f"Osthal {n}", "in Osthal"],
            "ctxs": [
                {"title": "Other", "text": "Nothing.", "isgold": False},
                {"title": f"Mill {n}", "text": f"Mill {n} stands in Osthal {n}.", "isgold": True},
            ],
        }
        for n in range(number)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path = folder / ("questions.jsonl.gz" if packed else "questions.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_gold_passages_of_others_are_the_distractors(packed: bool, tmp_path: Path) -> None:
    items = real.items(written(tmp_path, packed=packed), 4)
    assert sorted(item.number for item in items) == list(range(6))
    for item in items:
        assert len(item.passages) == len(set(item.passages)) == 4
        assert (
            f"Mill {item.number}:" in item.passages[item.gold[0]] and item.question == f"Where is mill {item.number}?"
        )
        assert item.answers == (f"Osthal {item.number}", "in Osthal")
    assert real.items(tmp_path / items_path(packed), 4, 2) == items[:2]


def items_path(packed: bool) -> str:
    return "questions.jsonl.gz" if packed else "questions.jsonl"


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than --passages 9"):
        real.items(written(tmp_path), 9)
    with pytest.raises(ConfigError, match="cannot be read"):
        real.items(tmp_path / "none.jsonl", 2)
    (tmp_path / "bad.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match="expected form"):
        real.items(tmp_path / "bad.jsonl", 1)
    (tmp_path / "bad.jsonl.gz").write_text("plain")
    with pytest.raises(ConfigError, match="cannot be read"):
        real.items(tmp_path / "bad.jsonl.gz", 1)

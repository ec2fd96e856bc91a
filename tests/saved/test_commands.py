"""``hypic cache`` and ``hypic warm``: commands that work on a store on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypic import Segment, saved
from hypic.saved import SavedEntry
from hypic_apps.cli.main import main
from tests.saved.keeping import OTHER, SECRET, SMALL, files, kept, opened

# -- hypic cache -----------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cache_lists_and_sums(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys, "cache", "ls", "--store", str(filled))
    assert len(listed["entries"]) == 3 and listed["damaged"] == []
    some = told(capsys, "cache", "ls", "--store", f"disk://{filled}?size=1GiB", "--source", "door.md")
    assert len(some["entries"]) == 2 and SECRET not in json.dumps(some)
    stat = told(capsys, "cache", "stat", "--store", str(filled))
    assert [(g["namespace"], g["num_entries"]) for g in stat["groups"]] == [("alice", 1), (None, 2)]
    assert stat["num_bytes"] == sum(entry.num_bytes for entry in kept(filled))
    assert main(["cache", "ls", "--store", str(filled)]) == main(["cache", "stat", "--store", str(filled)]) == 0
    out = capsys.readouterr().out
    assert out.count("door.md") == 2 and "[alice]" in out and "s left" in out and "namespace alice: 1 entries" in out


def test_cache_verifies(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "cache", "verify", "--store", str(filled))["num_sound"] == 3
    path = files(filled)[0]
    path.write_bytes(path.read_bytes()[:-7])
    assert main(["cache", "verify", "--store", str(filled)]) == 1
    captured = capsys.readouterr()
    assert str(path) in captured.out and "2 entries are sound" in captured.out and "--remove" in captured.err
    assert told(capsys, "cache", "verify", "--store", str(filled), "--remove")["num_removed"] == 1
    assert told(capsys, "cache", "verify", "--store", str(filled))["num_sound"] == 2


def test_cache_forgets_collects_and_clears(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "cache", "forget", "--store", str(filled), "--name", "code")["num_files"] == 2
    assert told(capsys, "cache", "gc", "--store", str(filled))["num_files"] == 0
    assert main(["cache", "clear", "--store", str(filled)]) == 0
    assert capsys.readouterr().out == "removed: 1 files\n" and files(filled) == []


def test_cache_forgets_everything(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "cache", "forget", "--store", str(filled), "--everything")
    assert found["num_entries"] == 3 and files(filled) == []
    assert told(capsys, "cache", "forget", "--store", str(filled), "--everything")["num_files"] == 0


@pytest.mark.parametrize(
    "arguments",
    [["forget", "--store", ".", "--everything", "--name", "x"], ["ls", "--store", ".", "--everything"],
     ["forget", "--store", ".", "--everything", "--model", "x"], ["clear", "--url", "y", "--model", "x"],
     ["clear", "--store", ".", "--source", "x"], ["ls"], ["forget", "--store", "."], ["look", "--store", "."],
     ["ls", "--store", "x", "--url", "y"], ["ls", "--store", "no such folder"],
     ["verify", "--url", "http://127.0.0.1:1"], ["ls", "--store", "device://1GiB"]],
)  # fmt: skip
def test_cache_says_what_is_missing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("hypic: ") and line.endswith(".")


# -- hypic warm ------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "door.md").write_text(f"# The door\n\n{SECRET}\n\n# The key\n\n{SECRET.replace('code', 'key')}")
    (notes / "river.md").write_text(f"# The river\n\n{OTHER}")
    (notes / "copy.md").write_text(f"# The river\n\n{OTHER}")
    return notes


def warming(folder: Path, root: Path, corpus: Path, *flags: str, size: str = "64MiB") -> list[str]:
    store = f"disk://{root}?size={size}"
    return ["warm", str(corpus), "--model", str(folder), "--store", store, *SMALL, *flags]


def test_warm_encodes_once_and_takes_up_what_is_missing(
    folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = told(capsys, *warming(folder, root, corpus))
    assert (first["num_files"], first["num_passages"], first["num_segments"]) == (3, 4, 3)
    assert first["num_encoded"] == 3 == len(kept(root)) and first["num_there"] == 0
    times = {path: path.stat().st_ino for path in files(root)}
    again = told(capsys, *warming(folder, root, corpus))
    assert (again["num_there"], again["num_encoded"]) == (3, 0)
    assert {path: path.stat().st_ino for path in files(root)} == times, "what is there is not written again"
    files(root)[0].unlink()
    taken_up = told(capsys, *warming(folder, root, corpus))
    assert (taken_up["num_there"], taken_up["num_encoded"]) == (2, 1)
    assert all(isinstance(entry, SavedEntry) for entry in saved.verify(root))


def test_warmed_passages_are_hits_when_they_are_asked_about(
    folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(capsys, *warming(folder, root, corpus))
    monkeypatch.setattr("hypic.engine.store.costs.Costs.objection", lambda self, *args: "")
    ask = ["ask", "Who grinds rye for the town?", str(corpus), "--k", "1", "--max-tokens", "2"]
    found = told(capsys, *ask, "--model", str(folder), "--store", f"disk://{root}?size=64MiB", *SMALL)
    assert [s["outcome"] for s in found["questions"][0]["segments"]] == ["hit"]


def test_passages_are_warmed_for_every_place(
    folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rungs = "---\n\nThe ferry is late.\n\n---\n\nIt rains.\n\nThe office is open."
    flags = ["--primer", rungs]
    told_first = told(capsys, *warming(folder, root, corpus, *flags, "--dry-run"))
    assert (told_first["num_segments"], told_first["num_entries"], told_first["num_encoded"]) == (3, 9, 0)
    first = told(capsys, *warming(folder, root, corpus, *flags))
    assert (first["num_segments"], first["num_entries"]) == (3, 9) and first["num_encoded"] == 9 == len(kept(root))
    assert first["num_bytes"] == told_first["missing_bytes"]
    files(root)[0].unlink()
    again = told(capsys, *warming(folder, root, corpus, *flags))
    assert (again["num_there"], again["num_encoded"]) == (8, 1) and len(kept(root)) == 9
    assert main([*warming(folder, root, corpus, *flags)]) == 0
    assert "9 entries, as segments are encoded in several ways, by their place" in capsys.readouterr().err
    monkeypatch.setattr("hypic.engine.store.costs.Costs.objection", lambda self, *args: "")
    ask = ["ask", "Who grinds rye for the town?", str(corpus), "--k", "3", "--max-tokens", "2", *flags]
    found = told(capsys, *ask, "--model", str(folder), "--store", f"disk://{root}?size=64MiB", *SMALL)
    assert [s["outcome"] for s in found["questions"][0]["segments"]] == ["hit"] * 3


def test_a_rehearsal_writes_nothing(folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *warming(folder, root, corpus, "--dry-run"))
    assert found["num_segments"] == 3 and found["num_encoded"] == 0 and found["seconds_s"] > 0
    assert not root.exists() or files(root) == []
    told(capsys, *warming(folder, root, corpus))
    needed = sum(entry.num_bytes for entry in kept(root))
    assert needed <= found["missing_bytes"] < 1.2 * needed, "what was foretold is what it took"
    assert told(capsys, *warming(folder, root, corpus, "--dry-run"))["num_there"] == 3


def test_a_corpus_that_is_too_large_is_refused_with_what_would_fit(
    folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = told(capsys, *warming(folder, root, corpus, "--dry-run"))["missing_bytes"]
    assert main(warming(folder, root, corpus, size=str(needed - 1))) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "3 entries take" in line and "hold the first 2;" in line and files(root) == []


def test_pruning_removes_what_the_files_no_longer_hold(
    folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(folder, root) as llm:
        llm.warm([Segment(SECRET + OTHER, source="/elsewhere/other.md")])
        llm.flush()
    told(capsys, *warming(folder, root, corpus))
    (corpus / "copy.md").unlink()
    (corpus / "door.md").write_text(f"# The door\n\n{SECRET}")
    assert told(capsys, *warming(folder, root, corpus))["num_pruned"] == 0 and len(kept(root)) == 4
    foretold = told(capsys, *warming(folder, root, corpus, "--prune", "--dry-run"))
    assert (foretold["num_stale"], foretold["num_pruned"]) == (1, 0) and len(kept(root)) == 4
    assert main(warming(folder, root, corpus, "--prune", "--dry-run")) == 0
    assert "1 to remove that the files no longer hold" in capsys.readouterr().err
    assert told(capsys, *warming(folder, root, corpus, "--prune"))["num_pruned"] == 1
    sources = sorted(str(label.source) for entry in kept(root) for label in entry.labels)
    assert len(kept(root)) == 3 and any("elsewhere" in source for source in sources)


def test_warm_needs_a_store_that_lasts(folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for store in ([], ["--store", "host://1GiB"]):
        assert main(["warm", str(corpus), "--model", str(folder), *store]) == 2
        assert "disk://" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_store_that_cannot_be_written_to_is_refused_at_once(
    folder: Path, tmp_path: Path, corpus: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded."""
    (tmp_path / "file").write_text("no folder")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(warming(folder, place, corpus, *flags)) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert repr(str(place)) in line and "name a folder that you may write to." in line


def test_a_file_is_forgotten_by_the_name_it_was_given_by(
    folder: Path, root: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["warm", str(corpus), "--model", str(folder), "--store", f"disk://{root}?size=64MiB"])
    file = next(path for path in sorted(corpus.rglob("*")) if path.is_file())
    monkeypatch.chdir(file.parent)
    assert main(["cache", "forget", "--store", str(root), "--source", "nosuch.md"]) != 0
    assert "hypic cache ls" in capsys.readouterr().err
    before = len(kept(root))
    assert main(["cache", "forget", "--store", str(root), "--source", file.name]) == 0
    assert len(kept(root)) < before

"""A store on disk without a model, and forgetting down to the last file."""

from __future__ import annotations

import os
import re
import runpy
import sys
import time
from pathlib import Path

import pytest

from hypic import LLM, Segment, saved
from hypic.errors import ConfigError, StoreError
from hypic.kept import Forgotten
from hypic.saved import Damaged, SavedEntry
from hypic_apps.cli.main import main
from tests.saved.keeping import OTHER, SECRET, SETTINGS, asked, files, kept, opened, traces

# -- without a model -------------------------------------------------------------------------------------------------


def test_entries_tell_what_they_are(filled: Path, folder: Path) -> None:
    entries = kept(filled)
    assert len(entries) == 3 and len({entry.model for entry in entries}) == 1
    labels = sorted(
        (label.name or "", label.source or "", label.namespace or "") for e in entries for label in e.labels
    )
    assert labels == [("", "door.md", ""), ("code", "door.md", "alice"), ("river", "river.md", "")]
    for entry in entries:
        assert entry.num_bytes >= os.path.getsize(entry.path) > 0 and entry.dtype == "float64"
        assert not entry.is_expired and abs(entry.used_s - time.time()) < 600
    assert [e.expires_s is not None for e in entries].count(True) == 1
    assert all(isinstance(entry, SavedEntry) for entry in saved.verify(filled))
    assert list(saved.entries(filled / "nothing")) == []


def test_every_checksum_is_compared(filled: Path) -> None:
    """One flipped bit anywhere, a file cut short, an empty one, one that is none."""
    flipped, short, empty = files(filled)
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(bytes(data))
    short.write_bytes(short.read_bytes()[:-1])
    empty.write_bytes(b"")
    alien = flipped.with_name("ab" * 32 + ".safetensors")
    alien.write_bytes(b"no entry at all" * 300)
    damaged = [one for one in saved.verify(filled) if isinstance(one, Damaged)]
    assert {one.path for one in damaged} == {str(path) for path in (flipped, short, empty, alien)}
    assert all(one.reason for one in damaged) and saved.remove(damaged) == 4 and files(filled) == []


def test_what_has_lived_its_time_and_stray_files_are_collected(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = files(filled)[0].with_name(".0011223344556677.999999999.0.tmp")
    stray.write_bytes(b"half an entry")
    os.utime(stray, (0, 0))
    assert saved.collect(filled) == Forgotten(num_files=1) and not stray.exists()
    now = time.time()
    monkeypatch.setattr(saved, "time", type("Later", (), {"time": staticmethod(lambda: now + 4000)}))
    assert saved.collect(filled) == Forgotten(num_entries=1, num_files=1) and len(kept(filled)) == 2


def test_clearing(filled: Path) -> None:
    (model,) = {entry.model for entry in kept(filled)}
    assert saved.clear(filled, "no such model") == 0 and saved.clear(filled, model[:6]) == 3
    assert files(filled) == [] and list(filled.iterdir()) == []


@pytest.mark.parametrize(
    ("label", "num"), [({"source": "door.md"}, 2), ({"name": "code"}, 2), ({"namespace": "alice"}, 1)]
)
def test_forgetting_without_a_model(label: dict[str, str], num: int, filled: Path, folder: Path) -> None:
    """A text is forgotten wherever its tokens stand, and with a namespace in that one only."""
    with LLM(str(folder), **SETTINGS) as llm:
        ids = llm.tokenize(SECRET)
    assert len(traces(filled, SECRET, ids)) == 2, (
        "the ids of the secret stand in its files, or this would prove nothing"
    )
    assert saved.forget(filled, **label) == Forgotten(num_entries=num, num_files=num)
    assert len(traces(filled, SECRET, ids)) == 2 - num and len(kept(filled)) == 3 - num
    with pytest.raises(ConfigError, match="pass everything=True"):
        saved.forget(filled)
    with pytest.raises(ConfigError, match="pass one or the other"):
        saved.forget(filled, name="code", everything=True)
    assert saved.forget(filled, everything=True).num_files == 3 - num and files(filled) == []


# -- through an engine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [{"source": "door.md"}, {"name": "code"}, {"namespace": "alice"}])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_no_file_holds_a_forgotten_text(label: dict[str, str], is_loaded: bool, folder: Path, root: Path) -> None:
    """Also what another process has written, and what this one has never looked at."""
    secret = Segment(SECRET, name="code", source="door.md", namespace="alice")
    with opened(folder, root) as llm:
        asked(llm, Segment(OTHER, source="river.md"), secret)
        llm.flush()
    with opened(folder, root) as llm:
        if is_loaded:
            asked(llm, Segment(OTHER, source="river.md"), secret)
        ids = llm.tokenize(SECRET)
        assert traces(root, SECRET, ids)
        forgotten = llm.forget(**label)
        assert forgotten.num_files == 1 and traces(root, SECRET, ids) == []
        assert [s.outcome for s in asked(llm, secret).segments] == ["encoded"]
        llm.forget(**label)
        llm.flush()
    assert traces(root, SECRET, ids) == [] and len(kept(root)) == 1


def test_what_waits_to_be_written_is_forgotten(folder: Path, root: Path) -> None:
    with opened(folder, root) as llm:
        ids = llm.tokenize(SECRET)
        for n in range(8):
            llm.warm([Segment(f"{SECRET} {n}", source="door.md"), Segment(SECRET, source="door.md")])
            llm.forget(source="door.md")
        llm.flush()
    assert traces(root, SECRET, ids) == [] and files(root) == []


def test_a_name_that_is_learned_later_is_written_down(folder: Path, root: Path) -> None:
    """A text that is passed under another name is forgotten by it even when another process asks."""
    with opened(folder, root) as llm:
        asked(llm, Segment(SECRET, source="first.md"))
        llm.flush()
    with opened(folder, root) as llm:
        asked(llm, Segment(SECRET, source="second.md", ttl_s=3600), Segment(OTHER))
        llm.flush()
    (entry,) = [e for e in kept(root) if any(label.source == "first.md" for label in e.labels)]
    assert {label.source for label in entry.labels} == {"first.md", "second.md"} and entry.expires_s is not None
    assert saved.forget(root, source="second.md").num_files == 1


def test_expired_files_go(folder: Path, root: Path) -> None:
    with opened(folder, root) as llm:
        llm.warm([Segment(SECRET, ttl_s=0.5), Segment(OTHER)])
        llm.flush()
        deadline = time.monotonic() + 10
        while len(kept(root)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(kept(root)) == 1, "while the process runs"


def test_expired_files_of_another_process_go(folder: Path, root: Path) -> None:
    with opened(folder, root) as llm:
        llm.warm([Segment(SECRET, ttl_s=1.5), Segment(OTHER)])
        llm.flush()
        assert len(kept(root)) == 2
    with opened(folder, root) as llm:
        deadline = time.monotonic() + 10
        while len(kept(root)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(kept(root)) == 1


def test_other_models_files_of_a_text_are_forgotten_too(folder: Path, root: Path) -> None:
    with opened(folder, root, dtype="float32") as llm:
        llm.warm([Segment(SECRET, source="door.md")])
        llm.flush()
    with opened(folder, root) as llm:
        llm.warm([Segment(SECRET, source="door.md")])
        llm.flush()
        assert len(kept(root)) == 2
        assert llm.forget(source="door.md").num_files == 2
    assert files(root) == []


def test_keys_are_those_of_the_files(filled: Path, folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        found = llm.keys([Segment(SECRET), Segment(SECRET, namespace="alice"), Segment(OTHER), Segment("?")])
    assert {key for key, _ in found[:3]} == {entry.key for entry in kept(filled)}
    assert found[3][0] is None and found[0][1] > 0


# -- the example, and what is not ours -------------------------------------------------------------------------------


def test_the_example_runs(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "examples" / "kept_segments.py"
    monkeypatch.setattr(sys, "argv", [path.name, str(folder)])
    monkeypatch.setattr("hypic.engine.store.costs.Costs.objection", lambda self, *args: "")
    runpy.run_path(str(path), run_name="__main__")
    lines = [re.findall(r"hit|encoded", line) for line in capsys.readouterr().out.splitlines() if ": " in line]
    told = [outcomes for outcomes in lines if outcomes]
    assert told == [["encoded"] * 2, ["hit"] * 2, ["hit"] * 2, ["hit", "encoded"], ["hit", "encoded"]]


def test_what_could_not_be_removed_is_said(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "unlinked", lambda path: False)
    with pytest.raises(StoreError, match="could not be removed"):
        saved.clear(filled)
    assert kept(filled)


def test_other_folders_are_left_alone(filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (filled / "photos").mkdir()
    saved.clear(filled)
    assert (filled / "photos").is_dir() and not kept(filled)
    other = tmp_path / "other"
    (other / "mail").mkdir(parents=True)
    assert main(["cache", "clear", "--store", str(other)]) != 0
    assert "is no store" in capsys.readouterr().err and (other / "mail").is_dir()

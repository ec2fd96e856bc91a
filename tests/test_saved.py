"""A store on disk without a model, forgetting down to the last file, and the commands that work on it."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypic import LLM, Prompt, SamplingParams, Segment, saved
from hypic.errors import ConfigError, StoreError
from hypic.kept import Forgotten
from hypic.saved import Damaged, SavedEntry
from hypic.types import CacheReport
from hypic_apps.cli.main import main
from tests.checkpoints import add_tokenizer, qwen

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048}
SETTINGS |= {"max_running": 4, "min_segment_tokens": 0}
SMALL = ("--threads", "1", "--memory", "64MiB", "--min-segment-tokens", "0")
SECRET = "The code of the door is four nine one two, and nobody but the miller is to know of it."
OTHER = "The river runs past an old mill where three brothers grind rye and oats for the town."
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("saved"))
    add_tokenizer(made)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def opened(folder: Path, root: Path, size: str = "64MiB", **settings: Any) -> LLM:
    return LLM(str(folder), **{**SETTINGS, **settings}, store=f"disk://{root}?size={size}")


def kept(root: Path) -> list[SavedEntry]:
    return [entry for entry in saved.entries(root) if isinstance(entry, SavedEntry)]


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def asked(llm: LLM, *segments: Segment) -> CacheReport:
    report = llm.generate(Prompt(segments, "Who grinds rye?"), ONE).report
    assert report is not None
    return report


def traces(root: Path, text: str, ids: list[int]) -> list[Path]:
    """Files that hold a text or its token ids, as numbers of four or eight bytes."""
    needles = [text.encode(), np.array(ids, "<i4").tobytes(), np.array(ids, "<i8").tobytes(), str(ids)[1:-1].encode()]
    return [path for path in files(root) if any(needle in path.read_bytes() for needle in needles)]


@pytest.fixture
def filled(folder: Path, root: Path) -> Iterator[Path]:
    """Three entries of two texts; the secret is alice's, and everybody's."""
    with opened(folder, root) as llm:
        llm.warm([Segment(SECRET, name="code", source="door.md", namespace="alice"), Segment(SECRET, source="door.md")])
        llm.warm([Segment(OTHER, name="river", source="river.md", ttl_s=3600)])
        llm.flush()
    yield root


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
    assert "3 segments take" in line and "hold the first 2;" in line and files(root) == []


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


def test_the_example_runs(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[1] / "examples" / "kept_segments.py"
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

"""Saving and loading: round trips, interrupted saves, and files that are damaged or not ours."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hypic_retriever import Index, IndexFormatError, Passage, RetrieverError, Splitter, saved

TEXTS = {
    "a.md": "# Zürich \U0001f600\n\nDie Straße heißt 文.\n\n# Two\n\nSecond part.",
    "b.md": "Another document.\u2028With a line separator.",
}


def built(embedder: Any = None) -> Index:
    index = Index(embedder, splitter=Splitter(400, 100, 900), k1=1.5, b=0.6)
    index.add_documents(TEXTS)
    index.add_passages([Passage("own-id", "A passage of my own.\ud800", metadata={"page": [1, None, {"x": 0.5}]})])
    return index


def results(index: Index) -> list[tuple[Passage, float]]:
    return [
        (hit.passage, hit.score)
        for query in ("Straße zwei", "another document", "own passage")
        for hit in index.search(query)
    ]


def test_words_alone_round_trip(tmp_path: Path) -> None:
    index = built()
    index.save(tmp_path / "new" / "folder")
    again = Index.load(tmp_path / "new" / "folder")
    assert again.passages() == index.passages() and results(again) == results(index)
    assert again.splitter == index.splitter
    own = again.get("own-id")
    assert own is not None and own.metadata == {"page": [1, None, {"x": 0.5}]}
    assert again.update_document("a.md", TEXTS["a.md"]).added == ()


def test_vectors_round_trip_without_embedding_again(tmp_path: Path, make_embedder: Any) -> None:
    index = built(make_embedder())
    index.remove("b.md")
    index.save(tmp_path)
    embedder = make_embedder()
    again = Index.load(tmp_path, embedder)
    assert embedder.num_embedded == 1, "only the probe sentence"
    assert results(again) == results(index) and len(again.search("part", 5)[0].ranks) == 2
    again.add_documents({"b.md": TEXTS["b.md"]})
    assert again.search("another document")[0].passage.source == "b.md"


def test_an_empty_index_round_trips(tmp_path: Path, make_embedder: Any) -> None:
    for embedder in (None, make_embedder()):
        Index(embedder).save(tmp_path)
        assert len(Index.load(tmp_path, embedder)) == 0


def test_vectors_are_made_when_there_were_none(tmp_path: Path, make_embedder: Any) -> None:
    built().save(tmp_path)
    seen: list[tuple[int, int]] = []
    again = Index.load(tmp_path, make_embedder(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4, 4) and "vector" in again.search("part")[0].ranks


def test_the_embedder_has_to_be_the_same(tmp_path: Path, make_embedder: Any) -> None:
    built(make_embedder()).save(tmp_path)
    with pytest.raises(IndexFormatError, match="was saved with vectors; load it with the embedder"):
        Index.load(tmp_path)
    for other in (make_embedder(salt="other"), make_embedder(32)):
        with pytest.raises(IndexFormatError, match=r"another embedder \(dimension 64\)"):
            Index.load(tmp_path, other)


def test_saving_again_replaces_and_cleans_up(tmp_path: Path, make_embedder: Any) -> None:
    (tmp_path / "mine.txt").write_text("stays")
    built(make_embedder()).save(tmp_path)
    index = built()
    index.remove("a.md")
    index.save(tmp_path)
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["index.json", "mine.txt", "passages"]
    assert Index.load(tmp_path).passages() == index.passages()


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_interrupted_save_leaves_the_old_index(
    tmp_path: Path, make_embedder: Any, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    index = built(make_embedder())
    index.save(tmp_path)
    before = index.passages()
    index.add_documents({"c.md": "Something new."})
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RetrieverError, match=r"cannot hold the index \(No space left on device\)"):
        index.save(tmp_path)
    monkeypatch.undo()
    assert Index.load(tmp_path, make_embedder()).passages() == before
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    index.save(tmp_path)
    assert len(Index.load(tmp_path, make_embedder())) == len(before) + 1 and len(list(tmp_path.iterdir())) == 3


def damaged_files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_damage_is_noticed(tmp_path: Path, make_embedder: Any, which: int) -> None:
    built(make_embedder()).save(tmp_path)
    path = damaged_files(tmp_path)[which]
    content = path.read_bytes()
    places = [0, len(content) // 3, len(content) // 2, len(content) - 2]
    damages = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in places]
    for damage in [*damages, content[:-5], b"", content + b"\n{}"]:
        path.write_bytes(damage)
        with pytest.raises(IndexFormatError, match="build the index again|give another folder"):
            Index.load(tmp_path, make_embedder())
    path.unlink()
    with pytest.raises(IndexFormatError, match="can be read|cannot be read"):
        Index.load(tmp_path, make_embedder())
    path.write_bytes(content)
    assert len(Index.load(tmp_path, make_embedder())) == 4


def rewrite_header(folder: Path, **changes: Any) -> None:
    header = json.loads((folder / "index.json").read_text())
    header.pop("sha256")
    header |= changes
    (folder / "index.json").write_text(json.dumps({**header, "sha256": saved._digest(header)}))


def test_foreign_and_newer_headers_are_refused(tmp_path: Path) -> None:
    index = built()
    for content in ("[1, 2]", '{"format": "something else"}', "not json"):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(IndexFormatError):
            Index.load(tmp_path)
        with pytest.raises(IndexFormatError):
            index.save(tmp_path)
        assert (tmp_path / "index.json").read_text() == content and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "index.json").unlink()
    index.save(tmp_path)
    rewrite_header(tmp_path, version=2)
    with pytest.raises(IndexFormatError, match="has version 2, this package reads 1"):
        Index.load(tmp_path)
    index.save(tmp_path)
    assert len(Index.load(tmp_path)) == 4


def test_a_header_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("{}")
    built().save(tmp_path / "index")
    rewrite_header(tmp_path / "index", files={"passages": {"name": "../secret.jsonl", "num_bytes": 2, "sha256": "0"}})
    with pytest.raises(IndexFormatError, match=r"names the file '\.\./secret\.jsonl'"):
        Index.load(tmp_path / "index")


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match="holds no index that can be read"):
        Index.load(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RetrieverError, match="choose a folder that can be written"):
        built().save(tmp_path / "file")


def test_metadata_that_json_does_not_know_is_refused_before_writing(tmp_path: Path) -> None:
    index = Index()
    index.add_passages([Passage("p1", "text", metadata={"when": object()})])
    with pytest.raises(RetrieverError, match="metadata of passage 'p1' is not JSON"):
        index.save(tmp_path)
    assert not list(tmp_path.iterdir())

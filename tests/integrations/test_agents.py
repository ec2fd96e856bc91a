"""Skills, memory files, store items and documents as segments: what an edit changes, and what is refused."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hypic.errors import ConfigError
from hypic.integrations import _files
from hypic.integrations._files import without_comments
from hypic.integrations._skills import split_frontmatter
from hypic.integrations.agents import (
    DocumentsSource,
    MemoryFiles,
    SegmentSource,
    SkillDirectory,
    StoreSource,
    item_text,
)
from hypic.types import Segment
from tests.integrations.sources import LONG_AGO_S, cached, events, live, put, skill

# -- skills ----------------------------------------------------------------------------------------------------------


def test_skills_are_a_catalog_and_one_segment_per_body(tmp_path: Path) -> None:
    skill(tmp_path, "mills", "# Mills\n\nAsk for the river.", "About mills.")
    skill(tmp_path, "bridges", "Count the tracks.")
    source = SkillDirectory(tmp_path)
    assert isinstance(source, SegmentSource)
    assert cached(source) == [("bridges", "Count the tracks."), ("mills", "# Mills\n\nAsk for the river.")]
    assert live(source) == [
        "Skills:\n- bridges: Does it.\n- mills: About mills.",
        "Skill bridges:",
        "Skill mills:",
    ]
    assert {one.kind for one in source.segments()} == {"skill"}
    assert source.segments()[-1].source == str(tmp_path / "mills" / "SKILL.md")
    assert cached(SkillDirectory(tmp_path, active=["mills"])) == cached(source)[1:]
    assert live(SkillDirectory(tmp_path, active=[]))[0].startswith("Skills:\n- bridges")


def test_what_an_edit_of_a_skill_changes(tmp_path: Path) -> None:
    skill(tmp_path, "mills", "Ask for the river.")
    source = SkillDirectory(tmp_path)
    assert events(source) == [("added", "catalog"), ("added", "mills")]
    assert events(source) == []
    os.utime(tmp_path / "mills" / "SKILL.md", (LONG_AGO_S, LONG_AGO_S))
    assert events(source) == [], "touched only"
    skill(tmp_path, "mills", "Ask for the river.", "New words.", age_s=200)
    assert events(source) == [("changed", "catalog")]
    skill(tmp_path, "mills", "Ask for the river, twice.", "New words.", age_s=300)
    (event,) = source.poll()
    assert (event.kind, event.name) == ("changed", "mills") and event.old and event.new and event.old != event.new
    skill(tmp_path, "bridges", "Count.")
    assert events(source) == [("changed", "catalog"), ("added", "bridges")]
    (tmp_path / "mills" / "SKILL.md").unlink()
    assert events(source) == [("changed", "catalog"), ("removed", "mills")]
    (tmp_path / "bridges" / "SKILL.md").unlink()
    assert events(source) == [("removed", "catalog"), ("removed", "bridges")] and source.segments() == []


def test_later_skill_folders_override_earlier_ones_and_may_not_exist_yet(tmp_path: Path) -> None:
    source = SkillDirectory(tmp_path / "user", tmp_path / "project")
    assert source.segments() == []
    skill(tmp_path / "user", "mills", "The user's.")
    skill(tmp_path / "project", "mills", "The project's.")
    source.poll()
    assert cached(source) == [("mills", "The project's.")]


@pytest.mark.parametrize(
    ("text", "fields", "body"),
    [
        ("no frontmatter", {}, "no frontmatter"),
        ("---\nname: a\n---\nb", {"name": "a"}, "b"),
        ("---\n---\nb", {}, "b"),
        ("---\nname: a\n---", {"name": "a"}, ""),
        ("---\nname: a\nnot closed", {}, "---\nname: a\nnot closed"),
        ("---\nb: 'it''s: x'\nc: \"q \\\"r\\\" \\u00e9\"\n---\n", {"b": "it's: x", "c": 'q "r" é'}, ""),
        ("---\na: one: two # note\n---\n", {"a": "one: two"}, ""),
        ("---\na: >\n  one\n  two\nb: |\n  x\n  y\n---\n", {"a": "one two", "b": "x\ny"}, ""),
        (
            "---\na: one\n  two\nmetadata:\n  k: v\nlist:\n  - x\n# c\n---\nbody\n---\nmore",
            {"a": "one two"},
            "body\n---\nmore",
        ),
    ],
)
def test_frontmatter(text: str, fields: dict[str, str], body: str) -> None:
    read = split_frontmatter(text)
    assert (dict(read.fields), read.body) == (fields, body)


# -- files -----------------------------------------------------------------------------------------------------------


def test_memory_is_one_segment_per_file_in_a_fixed_order(tmp_path: Path) -> None:
    put(tmp_path / "AGENTS.md", "Be brief.\n<!-- for people -->\n")
    put(tmp_path / "memories" / "b.md", b"\xef\xbb\xbfBob\r\nlikes mills.\r\n")
    put(tmp_path / "memories" / "deep" / "a.txt", "Ada.")
    put(tmp_path / "memories" / ".hidden" / "x.md", "no")
    put(tmp_path / "memories" / "picture.png", b"\x89PNG")
    put(tmp_path / "memories" / "empty.md", " \n")
    source = MemoryFiles(tmp_path / "AGENTS.md", tmp_path / "memories", tmp_path / "none.md")
    assert cached(source) == [("AGENTS.md", "Be brief."), ("b.md", "Bob\nlikes mills."), ("deep/a.txt", "Ada.")]
    assert live(source) == ["Memory file AGENTS.md:", "Memory file b.md:", "Memory file deep/a.txt:"]
    assert live(MemoryFiles(tmp_path, labels=False)) == [] and source.refused == {}
    put(tmp_path / "memories" / "b.md", "Bob hates mills.", age_s=200)
    put(tmp_path / "none.md", "Now here.")
    assert events(source) == [("changed", "b.md"), ("added", "none.md")]
    (tmp_path / "memories" / "deep" / "a.txt").unlink()
    assert events(source) == [("removed", "deep/a.txt")]


@pytest.mark.parametrize("is_careful", [True, False])
def test_a_second_edit_within_the_clocks_grain_is_seen(
    tmp_path: Path, is_careful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same size, same times, same inode, on a file system without change times: only reading again can tell."""
    signature = _files._signature
    monkeypatch.setattr(_files, "_signature", lambda status: (signature(status)[0], 0, *signature(status)[2:]))
    if not is_careful:
        monkeypatch.setattr(_files, "_GRAIN_NS", -(10**18))
    path = tmp_path / "a.md"
    path.write_text("one")
    source = MemoryFiles(tmp_path)
    source.poll()
    status = path.stat()
    path.write_text("two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert events(source) == ([("changed", "a.md")] if is_careful else [])


def test_a_file_is_read_only_when_it_may_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a.md", "one")
    source, read = MemoryFiles(tmp_path), []
    canonical = _files.canonical
    monkeypatch.setattr(_files, "canonical", lambda content: read.append(content) or canonical(content))  # type: ignore[func-returns-value]
    for _ in range(3):
        source.poll()
    assert len(read) == 1
    put(tmp_path / "a.md", "two", age_s=200)
    source.poll()
    assert len(read) == 2


def test_what_is_refused_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "secret.md", "secret")
    root = tmp_path / "root"
    put(root / "ok.md", "fine")
    put(root / "large.md", "x" * 200)
    put(root / "binary.md", b"\xff\xfe\x00")
    (root / "out.md").symlink_to(tmp_path / "secret.md")
    (root / "in.md").symlink_to(root / "ok.md")
    (root / "loop.md").symlink_to(root / "loop.md")
    (root / "gone.md").symlink_to(root / "missing.md")
    os.mkfifo(root / "pipe.md")
    source = MemoryFiles(root, max_file_bytes=100)
    with caplog.at_level(logging.WARNING, "hypic"):
        source.poll()
        source.poll()
    assert [name for name, _ in cached(source)] == ["in.md", "ok.md"]
    refused = {Path(path).name: reason for path, reason in source.refused.items()}
    assert set(refused) == {"large.md", "binary.md", "out.md", "loop.md", "pipe.md"}
    assert "leaves" in refused["out.md"] and "200 bytes" in refused["large.md"] and "regular" in refused["pipe.md"]
    assert len(caplog.records) == 5
    put(root / "large.md", "small")
    source.poll()
    assert "large.md" in dict(cached(source)) and len(source.refused) == 4


def test_skill_links_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    skill(tmp_path / "elsewhere", "evil", "Do evil.")
    (tmp_path / "skills").mkdir()
    (tmp_path / "skills" / "evil").symlink_to(tmp_path / "elsewhere" / "evil")
    source = SkillDirectory(tmp_path / "skills")
    assert source.segments() == [] and len(source.refused) == 1


def test_comments_in_code_stay() -> None:
    text = "a <!-- x\ny --> b\n```html\n<!-- kept -->\n```\n<!-- gone -->\nc"
    assert without_comments(text) == "a b\n```html\n<!-- kept -->\n```\nc"


def test_nothing_given_is_an_error() -> None:
    for make in (SkillDirectory, MemoryFiles):
        with pytest.raises(ConfigError, match="at least one"):
            make()


def test_sources_may_be_polled_from_many_threads(tmp_path: Path) -> None:
    source = MemoryFiles(tmp_path)
    put(tmp_path / "a.md", "one")
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.extend(source.poll())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.kind for event in seen] == ["added"]


# -- items and documents ---------------------------------------------------------------------------------------------


class Item:
    def __init__(self, namespace: tuple[str, ...], key: str, value: dict[str, Any]) -> None:
        self.namespace, self.key, self.value = namespace, key, value


class Shelf:
    """A store of 250 items and more, answering page by page."""

    def __init__(self) -> None:
        self.items = [Item(("user", "ada"), f"k{n:03}", {"text": f"Fact {n}."}) for n in range(250)]

    def search(self, namespace_prefix: tuple[str, ...], /, *, limit: int = 10, offset: int = 0) -> Sequence[Item]:
        found = [item for item in self.items if item.namespace[: len(namespace_prefix)] == namespace_prefix]
        return found[offset : offset + limit]


def test_store_items_are_segments_and_are_read_whole() -> None:
    shelf = Shelf()
    source = StoreSource(shelf, ("user",), segment_namespace="ada")
    assert len(source.segments()) == 250
    first = source.segments()[0]
    assert (first.text, first.kind, first.name, first.source) == ("Fact 0.", "memory", "k000", "user/ada/k000")
    assert first.namespace == "ada"
    shelf.items[3] = Item(("user", "ada"), "k003", {"text": "Another fact."})
    del shelf.items[-1]
    assert events(source) == [("changed", "k003"), ("removed", "k249")]
    assert StoreSource(shelf, ("other",)).segments() == []
    with pytest.raises(ConfigError, match="tuple"):
        StoreSource(shelf, "user")


def test_item_texts() -> None:
    assert item_text({"content": ["a", "b"], "text": "c"}) == "a\nb"
    assert item_text({"memory": "m"}) == "m"
    assert item_text({"b": 1, "a": "é"}) == '{"a": "é", "b": 1}'


def test_langgraph_s_store_fits() -> None:
    memory = pytest.importorskip("langgraph.store.memory", reason="langgraph is not installed")
    store = memory.InMemoryStore()
    store.put(("user", "ada"), "likes", {"content": "Ada likes mills."})
    source = StoreSource(store, ("user",))
    assert cached(source) == [("likes", "Ada likes mills.")]
    store.put(("user", "ada"), "likes", {"content": "Ada likes bridges."})
    assert events(source) == [("changed", "likes")]
    store.delete(("user", "ada"), "likes")
    assert events(source) == [("removed", "likes")]


def test_documents_of_any_kind() -> None:
    documents = pytest.importorskip("langchain_core.documents", reason="langchain-core is not installed")
    source = DocumentsSource(
        [
            Segment("A skill.", "skill", "s"),
            "Some text.",
            documents.Document("A page.", id="p", metadata={"source": "book.md"}),
            " ",
        ]
    )
    assert [(one.kind, one.name, one.text) for one in source.segments()] == [
        ("skill", "s", "A skill."),
        ("document", None, "Some text."),
        ("document", "p", "A page."),
    ]
    source.update([documents.Document("A new page.", id="p", metadata={"source": "book.md"}), "Some text."])
    assert events(source) == [("changed", "p"), ("removed", "s")]

"""Skills, memory files, store items and documents as segments: what an edit changes, what is refused, in an agent."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hypic import checkpoints
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
from tests.integrations.scripted_tools import ToolEngine

LONG_AGO_S = 1_000_000_000


def put(path: Path, text: str | bytes, *, age_s: int = 100) -> Path:
    """Writes a file and dates it, each time differently, so that it is not racily clean."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    os.utime(path, (LONG_AGO_S + age_s, LONG_AGO_S + age_s))
    return path


def skill(folder: Path, name: str, body: str, description: str = "Does it.", age_s: int = 100) -> Path:
    text = f"---\nname: {name}\ndescription: {description}\n---\n\n{body}\n"
    return put(folder / name / "SKILL.md", text, age_s=age_s)


def events(source: SegmentSource) -> list[tuple[str, str | None]]:
    return [(event.kind, event.name) for event in source.poll()]


def cached(source: SegmentSource) -> list[tuple[str | None, str]]:
    return [(one.name, one.text) for one in source.segments() if one.cache is not False]


def live(source: SegmentSource) -> list[str]:
    return [one.text for one in source.segments() if one.cache is False]


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


# -- in an agent -----------------------------------------------------------------------------------------------------


def test_the_middleware_adds_sources_to_the_system_message(tmp_path: Path) -> None:
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    from hypic.integrations.langchain import ChatHypic, HypicMiddleware
    from tests.integrations.scripted import said, segments

    skill(tmp_path / "skills", "mills", "Ask for the river.")
    path = put(tmp_path / "AGENTS.md", "Be brief.")
    engine = ToolEngine(answer="In 1871.")
    sources = [SkillDirectory(tmp_path / "skills"), MemoryFiles(path)]

    def note(text: str) -> str:
        """Writes to the memory file."""
        put(path, f"Be brief.\n{text}", age_s=500)
        return "Noted."

    agent = agents.create_agent(
        ChatHypic(engine=engine), [note], system_prompt="You help.", middleware=[HypicMiddleware(sources)]
    )
    state = agent.invoke({"messages": [("user", "Note 'Ada'.")]})
    assert state["messages"][-1].content == "In 1871." and len(engine.asked) == 2
    first, second = (asked.prompt for asked in engine.asked)
    assert [(one.kind, one.name, one.text) for one in segments(first)] == [
        ("skill", "mills", "Ask for the river."),
        ("memory", "AGENTS.md", "Be brief."),
    ]
    assert [one.text for one in segments(second)] == ["Ask for the river.", "Be brief.\nAda"]
    parts = ["You help.", "Skills:\n- mills: Does it.", "Skill mills:", "Ask for the river."]
    assert said(first)[0] == ("system", "\n\n".join([*parts, "Memory file AGENTS.md:", "Be brief."]))
    asyncio.run(agent.ainvoke({"messages": [("user", "Note 'Bob'.")]}))
    assert [one.text for one in segments(engine.last.prompt)][-1] == "Be brief.\nBob"


def test_the_middleware_without_a_prompt_and_with_what_is_no_source(tmp_path: Path) -> None:
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    from hypic.integrations.langchain import ChatHypic, HypicMiddleware
    from tests.integrations.scripted import said

    engine = ToolEngine()
    middleware = HypicMiddleware([MemoryFiles(tmp_path)])
    agent = agents.create_agent(ChatHypic(engine=engine), [], middleware=[middleware])
    agent.invoke({"messages": [("user", "Hello")]})
    assert [role for role, _ in said(engine.last.prompt)] == ["user"]
    put(tmp_path / "a.md", "Ada.")
    agent.invoke({"messages": [("user", "Hello")]})
    assert said(engine.last.prompt)[0] == ("system", "Memory file a.md:\n\nAda.")
    with pytest.raises(ConfigError, match="it needs the methods poll and segments"):
        HypicMiddleware([tmp_path])  # type: ignore[list-item]


# -- on a real engine ------------------------------------------------------------------------------------------------

TEXTS = {
    "skills/mills/SKILL.md": "---\nname: mills\ndescription: About mills.\n---\nThe Alpha mill was built in 1871 on "
    "the river Lenne by Ada Perkins, who had learned the trade in Leeds, and it closed in 1954.\n",
    "memory/people.md": "Ada Perkins founded the company in 1987 and lives in a former boathouse by the river. Tom "
    "Okafor tested the Beta bridge by parking eleven locomotives on it overnight.\n",
    "memory/places.md": "The headquarters are in Brannhaven, behind the old harbour, and about 140 people work there. "
    "The assembly point is the car park behind hall B.\n",
}


def write_texts(folder: Path) -> list[SegmentSource]:
    for name, text in TEXTS.items():
        put(folder / name, text)
    return [SkillDirectory(folder / "skills"), MemoryFiles(folder / "memory")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.checkpoints import qwen
    from tests.engine.tiny_tokenizers import save_bytelevel

    return str(save_bytelevel(qwen(tmp_path_factory.mktemp("tiny"), vocab_size=352)))


def test_an_edited_file_alone_is_computed_again_in_an_agent(checkpoint: str, tmp_path: Path) -> None:
    """LangChain's agent on a real engine, whose middleware reads the files at every call."""
    agents = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    from hypic.integrations.langchain import ChatHypic, HypicMiddleware

    settings = {"memory": "64MiB", "device": "cpu", "dtype": "float32"}
    chat = ChatHypic(model=checkpoint, settings=settings, temperature=0, max_tokens=4, ignore_eos=True)
    middleware = HypicMiddleware(write_texts(tmp_path))
    agent = agents.create_agent(chat, [], system_prompt="You help.", middleware=[middleware])

    def ask(question: str) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
        message = agent.invoke({"messages": [("user", question)]})["messages"][-1]
        report = message.response_metadata["hypic"]
        outcomes = {one["name"]: one["outcome"] for one in report["segments"]}
        return outcomes, {one["name"]: one["reason"] for one in report["segments"]}, report

    names = ["mills", "people.md", "places.md"]
    assert ask("Who?")[0] == dict.fromkeys(names, "encoded")
    outcomes, _, warm = ask("Where?")
    assert outcomes == dict.fromkeys(names, "hit")
    put(tmp_path / "memory" / "places.md", "Now t" + TEXTS["memory/places.md"][1:], age_s=200)
    outcomes, reasons, edited = ask("Where?")
    assert outcomes == {**dict.fromkeys(names, "hit"), "places.md": "encoded"}
    assert reasons["places.md"].startswith("same name but other text")
    sizes = {one["name"]: one["num_tokens"] for one in edited["segments"]}
    assert edited["reused_tokens"] >= sum(sizes[name] - 8 for name in names[:2])
    put(tmp_path / "memory" / "people.md", TEXTS["memory/people.md"] + "Bob likes mills.\n", age_s=300)
    outcomes, reasons, grown = ask("Where?")
    assert outcomes == {**dict.fromkeys(names, "hit"), "people.md": "encoded"}
    assert reasons["people.md"].startswith("grown")
    assert warm["computed_tokens"] < grown["computed_tokens"] < edited["computed_tokens"]
    chat.close()


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "agent_memory.py"
    spec = importlib.util.spec_from_file_location("agent_memory", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_reports(reports: list[Any], shown: str) -> None:
    """Four turns: all is cold, all is warm, one file grew, one skill was edited."""
    names = ["expenses", "safety", "AGENTS.md", "people.md"]
    outcomes = [{one.name: one.outcome for one in report.segments} for report in reports]
    assert outcomes[0] == dict.fromkeys(names, "encoded") and outcomes[1] == dict.fromkeys(names, "hit")
    assert outcomes[2] == {**outcomes[1], "people.md": "encoded"}
    assert outcomes[3] == {**outcomes[1], "expenses": "encoded"}
    sizes = [{one.name: one.num_tokens for one in report.segments} for report in reports]
    cold, warm, grown, edited = reports
    assert cold.reused_tokens == 0 and cold.computed_tokens >= cold.prompt_tokens
    # Behind the last turn's snapshot only that turn's end and the new question are run.
    assert warm.computed_tokens < 0.5 * sum(sizes[1].values())
    new = sizes[2]["people.md"] - sizes[1]["people.md"]
    assert grown.segments[3].reason == f"grown: {new} new tokens behind {sizes[1]['people.md']} known ones"
    heads = []
    for report, size, run in ((grown, sizes[2], 8 + new), (edited, sizes[3], sizes[3]["expenses"])):
        # Of the other files only seams are run; the rest is live text, and the changed file's own share.
        most = report.prompt_tokens - (sum(size.values()) - 8 * len(names)) + run
        heads.append(most - report.computed_tokens)
    # Live text that stands before the first file is the same in both turns, and was kept in a snapshot.
    assert 0 <= heads[0] == heads[1] < grown.prompt_tokens - sum(sizes[2].values())
    assert f"{edited.computed_tokens} computed, {edited.reused_tokens} reused" in shown


def test_the_example_on_a_tiny_checkpoint(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_reports(example().main(checkpoint), capsys.readouterr().out)


@pytest.mark.skipif(not checkpoints.bundled().is_dir(), reason="the bundled model is not part of this copy")
def test_the_example_on_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    check_reports(example().main(), capsys.readouterr().out)

"""Skills, memory files and documents in an agent: in its system message, on a real engine, in the example."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hypic import checkpoints
from hypic.errors import ConfigError
from hypic.integrations.agents import (
    MemoryFiles,
    SegmentSource,
    SkillDirectory,
)
from tests.integrations.scripted_tools import ToolEngine
from tests.integrations.sources import put, skill

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

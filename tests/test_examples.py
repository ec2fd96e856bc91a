"""What a reader may copy runs: every file of examples/, and the README's sections on frameworks and the server."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hypic import checkpoints
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# These need a framework or a server, and are run where those are tested.
ELSEWHERE: Mapping[str, str] = {
    "kept_segments.py": "tests/saved/test_files.py",
    "agent_memory.py": "tests/integrations/test_agents_live.py",
    "langchain_rag.py": "tests/integrations/test_langchain_live.py",
    "llamaindex_rag.py": "tests/integrations/test_llamaindex_live.py",
    "openai_client.py": "tests/apps/server/test_openai.py",
}
HERE = sorted({path.name for path in EXAMPLES.glob("*.py")} - set(ELSEWHERE))
SERVED = "http://127.0.0.1:8000/v1"
FILES: Mapping[str, str] = MappingProxyType(
    {
        "skills/expenses/SKILL.md": "---\nname: expenses\ndescription: How expenses are paid back.\n---\n\n"
        "The company pays a travel allowance of 34 euros a day. Trains are booked in second class. Receipts are "
        "uploaded within 30 days. Hotel rooms may cost up to 120 euros a night.\n",
        "AGENTS.md": "Norvale Instruments builds weather stations for farms, schools and harbours. The company was "
        "founded in 1987 by Ingrid Solberg in a former boathouse. Its headquarters are in Brannhaven.\n",
        "memories/people.md": "The head of finance is Mirela Costa, who approves all expenses above 800 euros. The "
        "facility manager is Oskar Brandt, who replaces lost key cards for 15 euros.\n",
    }
)
bundled = pytest.mark.skipif(not checkpoints.bundled().is_dir(), reason="the bundled model is not part of this copy")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_bytelevel(qwen(tmp_path_factory.mktemp("example"), vocab_size=352)))


@pytest.mark.parametrize(("example", "test"), ELSEWHERE.items())
def test_what_is_run_elsewhere_is_there(example: str, test: str) -> None:
    assert (EXAMPLES / example).is_file()
    text = (ROOT / test).read_text(encoding="utf-8")
    assert example in text or f'"{Path(example).stem}"' in text


@pytest.mark.parametrize("example", HERE)
def test_an_example_runs(
    example: str, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [example, checkpoint])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    told = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) tokens computed for a prompt of (\d+)", shown(capsys))]
    assert len(told) > 1
    # The first prompt is all new; from then on most of each stands ready.
    assert told[0][0] >= told[0][1] and all(computed < 0.8 * prompt for computed, prompt in told[1:])


# -- the README ------------------------------------------------------------------------------------------------------


def snippet(section: str) -> str:
    """The first Python block of a section."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the README has no section {section!r}"
    block = re.search(r"```python\n(.*?)```", found[1], re.DOTALL)
    assert block is not None, f"the section {section!r} has no example"
    return block[1]


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@bundled
def test_llamaindex(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_index.core")
    from hypic.integrations.llamaindex import HypicLLM

    outcomes: list[list[str]] = []
    chat = HypicLLM.chat

    def told(self: HypicLLM, messages: Any, **options: Any) -> Any:
        answer = chat(self, messages, **options)
        outcomes.append([segment["outcome"] for segment in (answer.raw or {})["hypic"]["segments"]])
        return answer

    monkeypatch.setattr(HypicLLM, "chat", told)
    exec(compile(snippet("LlamaIndex"), "README.md", "exec"), {})
    assert "27" in shown(capsys).splitlines()[0]
    assert outcomes == [["encoded"] * 2, ["hit"] * 2]


@bundled
def test_agents(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet("Agents"), "README.md", "exec"), {})
    told = re.findall(r"^(\S+) (encoded|hit)$", shown(capsys), re.MULTILINE)
    cold, edited = told[:3], told[3:]
    assert cold == [("expenses", "encoded"), ("AGENTS.md", "encoded"), ("people.md", "encoded")]
    assert edited == [("expenses", "hit"), ("AGENTS.md", "hit"), ("people.md", "encoded")]


@pytest.fixture
def served() -> Iterator[str]:
    for needed in ("fastapi", "uvicorn", "openai", "langchain_core"):
        pytest.importorskip(needed)
    from tests.apps.server.serving import serve

    with serve("--memory", "256MiB") as process:
        yield process.url


@bundled
def test_server(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = snippet("Server")
    assert code.count(SERVED) == 1
    exec(compile(code.replace(SERVED, served), "README.md", "exec"), {})
    out = shown(capsys)
    assert "27" in out and out.count("encoded") == 2 and out.count("hit") == 2


@bundled
def test_python(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet("Python"), "README.md", "exec"), {})
    told = shown(capsys)
    assert "Ingrid Solberg" in told and told.count(" encoded ") == 2 and told.count(" hit ") == 2


@bundled
def test_langchain(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_core")
    exec(compile(snippet("LangChain"), "README.md", "exec"), {})
    assert "27" in shown(capsys)

"""An agent with skills and memory files: each file is one segment, computed once; an edit computes that file again.

    python examples/agent_memory.py            the bundled demo model
    python examples/agent_memory.py FOLDER     a checkpoint of your own

The files stand in front of the conversation at every turn. Between the turns the agent writes down a fact, which makes
a file grow, and the user corrects another file in the middle. What each turn computed is printed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypic import LLM, CacheReport, SamplingParams, Segment
from hypic.integrations.agents import MemoryFiles, SegmentSource, SkillDirectory
from hypic.types import Message

FILES = {
    "skills/expenses/SKILL.md": "---\nname: expenses\ndescription: How travel expenses are paid back.\n---\n\n"
    "The company pays a travel allowance of 34 euros a day. Trains are booked in second class. Receipts are uploaded "
    "within 30 days. Hotel rooms may cost up to 120 euros a night.\n",
    "skills/safety/SKILL.md": "---\nname: safety\ndescription: What to do in an emergency.\n---\n\n"
    "The assembly point is the car park behind hall B. Fire drills are held twice a year. The safety officer is Jonas "
    "Weber, who can be reached at extension 4417.\n",
    "AGENTS.md": "<!-- Written by the team; the agent reads it, people edit it. -->\n"
    "Norvale Instruments builds weather stations for farms, schools and harbours. The company was founded in 1987 by "
    "Ingrid Solberg in a former boathouse. Its headquarters are in Brannhaven.\n",
    "memories/people.md": "The head of finance is Mirela Costa, who approves all expenses above 800 euros. The "
    "facility manager is Oskar Brandt, who replaces lost key cards for 15 euros.\n",
}


class Agent:
    """Answers in a conversation behind what its sources hold at that moment."""

    def __init__(self, llm: LLM, sources: Sequence[SegmentSource]) -> None:
        self.llm, self.sources = llm, sources
        self.turns: list[dict[str, Any]] = []

    def ask(self, question: str, max_tokens: int = 24) -> CacheReport:
        """Answers, and prints what was computed for it."""
        changes = [event for source in self.sources for event in source.poll() if event.kind != "added"]
        known = [segment for source in self.sources for segment in source.segments()]
        first, *rest = [*self.turns, {"role": "user", "content": question}]
        messages: list[Message] = [{"role": "user", "content": [*map(block, known), text(first["content"])]}, *rest]
        out = self.llm.chat(messages, SamplingParams(max_tokens=max_tokens))
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": out.text}]
        assert out.report is not None, "a whole answer has a report"
        print(f"\n{''.join(f'({event.name} {event.kind}) ' for event in changes)}Q: {question}\nA: {out.text}")
        show(out.report)
        return out.report


def block(segment: Segment) -> dict[str, Any]:
    """A segment as a content block; its hints travel beside the text."""
    hints = {"kind": segment.kind, "name": segment.name, "source": segment.source, "cache": segment.cache}
    return {"type": "text", "text": segment.text, "hypic": hints}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def show(report: CacheReport) -> None:
    for segment in report.segments:
        print(f"   {segment.name:<12} {segment.outcome:<8} {segment.num_tokens:>4} tokens  {segment.reason}")
    print(f"   {report.prompt_tokens} tokens: {report.computed_tokens} computed, {report.reused_tokens} reused")


def write_files(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def main(model: str | None = None) -> list[CacheReport]:
    """Four turns; the reports of all."""
    with tempfile.TemporaryDirectory() as name, LLM(model) as llm:
        folder = Path(name)
        write_files(folder)
        memory = MemoryFiles(folder / "AGENTS.md", folder / "memories")
        agent = Agent(llm, [SkillDirectory(folder / "skills"), memory])
        reports = [
            agent.ask("Where are the headquarters of Norvale Instruments?"),
            agent.ask("Who is the head of finance?"),
        ]
        with (folder / "memories" / "people.md").open("a") as file:
            file.write("The head of the workshop is Petra Lindqvist.\n")
        reports.append(agent.ask("Who is the head of the workshop?"))
        skill = folder / "skills" / "expenses" / "SKILL.md"
        skill.write_text(skill.read_text().replace("34 euros", "38 euros"))
        return [*reports, agent.ask("How high is the travel allowance?")]


if __name__ == "__main__":
    main(*sys.argv[1:2])

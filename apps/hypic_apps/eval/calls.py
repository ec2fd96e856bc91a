"""The ninth set: is the right tool called, with the right arguments, by the rules, when skills, memory and tool
schemas are segments?

An item's segments are a few tool schemas, skills (some with a rule for one of the tools) and notes from memory; the
request leaves out an argument that stands in the memory. The answer is one line of JSON. It is meant for models that
know tools: the bundled one does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

from hypic.types import Kind
from hypic_apps.eval.items import Item
from hypic_apps.eval.pool import FOLDER, Pool

NAME = "S9"
NUM_ITEMS = 400
SEED = 20_269


class Drawn(NamedTuple):
    """An argument whose value is drawn, from a list of ``tools.json`` or from the pool's names, and a text with it."""

    argument: str
    values: str
    text: str

    def told(self, value: str) -> str:
        return self.text.replace("{value}", value)


class Rule(NamedTuple):
    """What a skill says about an argument."""

    argument: str
    value: str
    text: str


class Tool(NamedTuple):
    """A tool: what is asked of it tells ``given``; a note from memory tells ``remembered``, and a skill the rest."""

    name: str
    description: str
    arguments: Sequence[str]
    given: Drawn
    remembered: Drawn
    rule: Rule

    @property
    def schema(self) -> str:
        properties = {name: {"type": "string"} for name in self.arguments}
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        return json.dumps({"name": self.name, "description": self.description, "parameters": parameters})


class Office(NamedTuple):
    """All that items are made of: ``data/tools.json``."""

    how: str
    tools: Sequence[Tool]
    skills: Sequence[str]
    values: Mapping[str, Sequence[str]]

    def value(self, drawn: Drawn, pool: Pool, r: Random) -> str:
        return r.choice(self.values[drawn.values]) if drawn.values in self.values else pool.names.of(drawn.values, r)


@cache
def office() -> Office:
    """Read once."""
    read = json.loads((FOLDER / "tools.json").read_text(encoding="utf-8"))
    return Office(**{**read, "tools": tuple(_tool(**row) for row in read["tools"])})


def _tool(given: Mapping[str, str], remembered: Mapping[str, str], rule: Mapping[str, str], **fields: Any) -> Tool:
    return Tool(given=Drawn(**given), remembered=Drawn(**remembered), rule=Rule(**rule), **fields)


def items(pool: Pool, number: int) -> list[Item]:
    """The first ``number`` items; item ``i`` depends on the pool and ``i`` alone."""
    return [_item(pool, Random(f"{SEED}/{i}"), i) for i in range(number)]


def _item(pool: Pool, r: Random, number: int) -> Item:
    made = office()
    offered = r.sample(made.tools, 4)
    tool = offered[0]
    remembered, given = made.value(tool.remembered, pool, r), made.value(tool.given, pool, r)
    parts: list[tuple[Kind, str, bool]] = [("tool", t.schema, t is tool) for t in offered]
    parts += [("skill", f"# {t.name}\n\n{t.rule.text} {r.choice(made.skills)}", t is tool) for t in offered[:3]]
    for t in offered[:3]:
        value = remembered if t is tool else made.value(t.remembered, pool, r)
        note = f"Note from an earlier conversation: {t.remembered.told(value)} {r.choice(made.skills)}"
        parts.append(("memory", note, t is tool))
    r.shuffle(parts)
    expected = {tool.given.argument: given, tool.remembered.argument: remembered, tool.rule.argument: tool.rule.value}
    answer = json.dumps({"name": tool.name, "arguments": expected, "rule": tool.rule.argument}, ensure_ascii=False)
    return Item(
        set=NAME,
        number=number,
        passages=tuple(text for _, text, _ in parts),
        question=f"{tool.given.told(given)}\n\n{made.how}",
        answers=(answer,),
        gold=tuple(n for n, part in enumerate(parts) if part[2]),
        form="call",
        kinds=tuple(kind for kind, _, _ in parts),
    )


def call_in(text: str) -> Mapping[str, Any] | None:
    """The first JSON object of an answer that names a tool, or ``None``."""
    decoder = json.JSONDecoder()
    for found in re.finditer(r"\{", text):
        try:
            read, _ = decoder.raw_decode(text[found.start() :])
        except json.JSONDecodeError:
            continue
        if isinstance(read, dict) and isinstance(read.get("name"), str):
            return read
    return None


def marks(text: str, answer: str) -> dict[str, bool]:
    """Whether the answer names the right tool, gives it the right arguments besides the rule's, and keeps the rule."""
    expected, found = json.loads(answer), call_in(text)
    if found is None or found["name"] != expected["name"]:
        return {"tool": False, "arguments": False, "rule": False}
    given = found.get("arguments")
    given = given if isinstance(given, dict) else {}
    same = {name: _plain(given.get(name)) == _plain(value) for name, value in expected["arguments"].items()}
    rule = same.pop(expected["rule"])
    return {"tool": True, "arguments": all(same.values()), "rule": rule}


def _plain(value: object) -> str:
    return re.sub(r"[^\w:.]+", " ", str(value)).strip(" .").lower()

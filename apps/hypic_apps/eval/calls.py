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
from random import Random
from typing import Any, NamedTuple

from hypic.types import Kind
from hypic_apps.eval.items import Item
from hypic_apps.eval.pool import Pool

NUM_ITEMS = 400
SEED = 20_269
HOW = (
    "Answer with one line of JSON and nothing else: "
    '{"name": the tool, "arguments": {every argument of the tool with its value}}.'
)


class Tool(NamedTuple):
    """A tool: what it does, its arguments, how it is asked for, and which rules a skill may set for it.

    ``asked`` has ``{given}`` for the argument ``given`` and leaves out ``remembered``, which the memory note tells.
    """

    name: str
    description: str
    arguments: Mapping[str, str]
    asked: str
    given: str
    remembered: str
    note: str
    rule: tuple[str, str, str]


def _text(*names: str) -> Mapping[str, str]:
    return dict.fromkeys(names, "string")


TOOLS = (
    Tool("get_weather", "The weather of a town on a day.", _text("town", "day", "unit"),
         "What will the weather be like on {given} where I live?", "day", "town", "The user lives in {value}.",
         ("unit", "celsius", "Always ask for the weather with the unit celsius.")),
    Tool("book_room", "Books a meeting room.", _text("room", "day", "minutes"),
         "Book my usual room for {given}, please.", "day", "room", "The user's usual meeting room is {value}.",
         ("minutes", "45", "Rooms are always booked for 45 minutes.")),
    Tool("send_message", "Sends a message to a person.", _text("to", "text", "channel"),
         "Tell my manager: {given}", "text", "to", "The user's manager is {value}.",
         ("channel", "team-chat", "Messages to colleagues go through the channel team-chat.")),
    Tool("create_ticket", "Opens a ticket in a project.", _text("project", "title", "priority"),
         'Open a ticket in my project with the title "{given}".', "title", "project", "The user works on {value}.",
         ("priority", "P3", "New tickets have the priority P3 unless the user says otherwise.")),
    Tool("order_supplies", "Orders office supplies.", _text("article", "deliver_to", "cost_centre"),
         "Please order {given} for my office.", "article", "deliver_to", "The user's office is in {value}.",
         ("cost_centre", "4711", "Supplies are charged to cost centre 4711.")),
    Tool("set_reminder", "Reminds somebody of something.", _text("person", "about", "at"),
         "Remind my deputy to {given}.", "about", "person", "The user's deputy is {value}.",
         ("at", "09:00", "Reminders without a time are set for 09:00.")),
    Tool("find_train", "Finds trains between two towns.", _text("from", "to", "class"),
         "Find me a train from home to {given}.", "to", "from", "The user's home station is {value}.",
         ("class", "second", "Train journeys are booked in second class.")),
    Tool("translate", "Translates a text.", _text("text", "into", "tone"),
         'Translate "{given}" into my language.', "text", "into", "The user's own language is {value}.",
         ("tone", "formal", "Translations are made in a formal tone.")),
)  # fmt: skip
SKILLS = (
    "Expense claims are handed in by the fifth day of the month with all receipts attached to the form.",
    "Minutes of meetings list who was present, what was decided, and who does what until when.",
    "Documents for customers are checked by a second person before they are sent.",
    "Photographs for the web page are at most two megabytes and have a caption.",
    "Passwords are never written into tickets, messages or documents, not even for testing.",
)
TEXTS = ("the price list is ready", "the fire doors are being checked", "the sample boxes have arrived", "I am late")
ARTICLES = ("ten name badges", "a box of envelopes", "two whiteboards", "a desk lamp")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")


def items(pool: Pool, number: int) -> list[Item]:
    """The first ``number`` items; item ``i`` depends on the pool and ``i`` alone."""
    return [_item(pool, Random(f"{SEED}/{i}"), i) for i in range(number)]


def _item(pool: Pool, r: Random, number: int) -> Item:
    offered = r.sample(TOOLS, 4)
    tool = offered[0]
    remembered, given = _value(tool.remembered, pool, r), _value(tool.given, pool, r)
    parts: list[tuple[Kind, str, bool]] = [("tool", _schema(t), t is tool) for t in offered]
    parts += [("skill", f"# {t.name}\n\n{t.rule[2]} {r.choice(SKILLS)}", t is tool) for t in offered[:3]]
    for t in offered[:3]:
        value = remembered if t is tool else _value(t.remembered, pool, r)
        note = f"Note from an earlier conversation: {t.note.replace('{value}', value)} {r.choice(SKILLS)}"
        parts.append(("memory", note, t is tool))
    r.shuffle(parts)
    expected = {tool.given: given, tool.remembered: remembered, tool.rule[0]: tool.rule[1]}
    answer = json.dumps({"name": tool.name, "arguments": expected, "rule": tool.rule[0]}, ensure_ascii=False)
    return Item(
        set="S9",
        number=number,
        passages=tuple(text for _, text, _ in parts),
        question=f"{tool.asked.replace('{given}', given)}\n\n{HOW}",
        answers=(answer,),
        gold=tuple(n for n, part in enumerate(parts) if part[2]),
        form="call",
        kinds=tuple(kind for kind, _, _ in parts),
    )


def _schema(tool: Tool) -> str:
    properties = {name: {"type": kind} for name, kind in tool.arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(tool.arguments)}
    return json.dumps({"name": tool.name, "description": tool.description, "parameters": parameters})


def _value(argument: str, pool: Pool, r: Random) -> str:
    made = {
        "town": "city", "from": "city", "to": "city", "room": "room", "person": "person", "project": "project",
        "deliver_to": "city", "into": "language", "about": "task",
    }  # fmt: skip
    fixed: Mapping[str, Sequence[str]] = {"day": DAYS, "text": TEXTS, "title": TEXTS, "article": ARTICLES}
    if argument in fixed:
        return r.choice(fixed[argument])
    return pool.names.of(made[argument], r)


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

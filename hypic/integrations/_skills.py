"""A SKILL.md's frontmatter apart from its body: of the YAML only what a catalog needs, text values by name.

Plain, quoted and block (``|``, ``>``) values are read; lists and maps are left out. Nothing in it is ever an error: a
skill with odd frontmatter is still a skill.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_FRONTMATTER = re.compile(r"---[ \t]*\n(.*?\n)??---[ \t]*(?:\n|\Z)", re.DOTALL)
_KEY = re.compile(r"([A-Za-z][\w-]*):(?:[ \t]+(.*)|[ \t]*)\Z")


@dataclass(frozen=True)
class SkillText:
    """A skill's two halves."""

    fields: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


def split_frontmatter(text: str) -> SkillText:
    """The halves of a canonical text; without frontmatter all of it is body."""
    match = _FRONTMATTER.match(text)
    if match is None:
        return SkillText({}, text)
    return SkillText(_fields((match[1] or "").split("\n")), text[match.end() :].strip())


def _fields(lines: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    n = 0
    while n < len(lines):
        key = _KEY.match(lines[n].rstrip())
        n += 1
        if key is None:
            continue
        block = []
        while n < len(lines) and (not lines[n].strip() or lines[n].startswith((" ", "\t"))):
            block.append(lines[n])
            n += 1
        value = _value((key[2] or "").strip(), block)
        if value:
            fields[key[1]] = value
    return fields


def _value(first: str, block: list[str]) -> str:
    """A value from what stands behind its key and the indented lines below."""
    body = [line.strip() for line in block]
    if first[:1] in ("|", ">"):
        return ("\n" if first[0] == "|" else " ").join(line for line in body if line)
    text = " ".join(line for line in (first, *body) if line)
    if not first and re.match(r"-[ \t]|[\w-]+:", text):
        return ""
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        return _unescaped(text)
    return text.split(" #", 1)[0].rstrip()


def _unescaped(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return quoted[1:-1]

"""From text to its structure: sections, blocks, and the units at which a block may be cut.

A *section* runs from one heading to the next; headings that follow each other without text open
one section together. A *block* is what stands between blank lines, or a whole code fence. A *unit*
is a place inside a block where a passage may begin: a sentence, a list item, a table row, a line of
code. Everything here is found from the text around it alone, so that an edit moves no unit far away.

Headings are recognised in their Markdown (``## Name`` and underlined) and wiki (``== Name ==``)
forms. This is no Markdown parser: it keeps offsets and renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_MARKED = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$")
_WIKI = re.compile(r"(={2,6})[ \t]*([^=\s](?:.*[^=\s])?)[ \t]*\1[ \t]*$")
_UNDERLINE = re.compile(r"(={3,}|-{3,})[ \t]*$")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r"[ \t]*(?:[-*+\u2022][ \t]+\S|\(?\d{1,4}[.)][ \t]+\S|\|)")
# A run of stops is matched from its first only: a long row of dots must not take quadratic time.
_STOP = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019\u00bb)\]]*\s+"
    r"|[\u3002\uff01\uff1f\u0964]+[\"'\u201d\u2019\u300d\u300f\uff09]*\s*"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'])(?:[^\W\d_]|(?:[^\W\d_]\.)+[^\W\d_]|[Dd]r|[Mm]rs?|[Mm]s|[Pp]rof|[Ss]t|[Jj]r|[Ss]r|[Vv]s|[Ff]ig|[Nn]o"
    r"|[Vv]ol|[Ee]q|[Cc]f|[Aa]pprox|[Ii]nc|[Ll]td|[Cc]o|[Gg]en|[Cc]ol|[Ss]en|[Rr]ep)$"
)
_NUMBER_AT_LINE_START = re.compile(r"(?:^|\n|\r)[ \t]*\(?\d{1,4}$")

BlockKind = Literal["heading", "text", "code"]


@dataclass(frozen=True)
class Block:
    """``text[start:end]``, without white space at either end. ``level`` and ``title`` are a heading's."""

    kind: BlockKind
    start: int
    end: int
    level: int = 0
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A run of blocks under one heading path, such as ``Handbook > Refunds``."""

    heading: str
    blocks: tuple[Block, ...]

    @property
    def start(self) -> int:
        """Where the first block starts."""
        return self.blocks[0].start

    @property
    def end(self) -> int:
        """Where the last block ends."""
        return self.blocks[-1].end


@dataclass(frozen=True)
class _Line:
    start: int
    text: str

    @property
    def content(self) -> str:
        return self.text.rstrip()

    @property
    def content_end(self) -> int:
        return self.start + len(self.content)


def sections(text: str) -> Iterator[Section]:
    """The sections of ``text`` in order; text before the first heading has the path ``""``."""
    path: list[Block] = []
    held: list[Block] = []
    for block in blocks(text):
        if block.kind == "heading":
            if held and held[-1].kind != "heading":
                yield Section(_path_name(path), tuple(held))
                held = []
            path = [*(above for above in path if above.level < block.level), block]
        held.append(block)
    if held:
        yield Section(_path_name(path), tuple(held))


def _path_name(path: list[Block]) -> str:
    return " > ".join(block.title for block in path if block.title)


def blocks(text: str) -> Iterator[Block]:
    """Headings, paragraphs, lists (blank lines between items do not end one) and code fences, in order."""
    held: list[_Line] = []
    after_blank = False
    lines = iter(_lines(text))
    for line in lines:
        if not line.content:
            after_blank = True
            continue
        heading = _heading(line, [] if after_blank else held)
        fence = _FENCE.match(line.text)
        if heading is not None and heading.start < line.start:
            held = []
        ends_held = heading is not None or fence or (after_blank and not _continues_list(held, line))
        if held and ends_held:
            yield _paragraph(held)
            held = []
        after_blank = False
        if heading is not None:
            yield heading
        elif fence:
            yield _code(line, fence.group(1), lines)
        else:
            held.append(line)
    if held:
        yield _paragraph(held)


def _continues_list(held: list[_Line], line: _Line) -> bool:
    return bool(held and _ITEM.match(held[0].text) and _ITEM.match(line.text))


def _lines(text: str) -> Iterator[_Line]:
    start = 0
    for line in text.splitlines(keepends=True):
        yield _Line(start, line)
        start += len(line)


def _heading(line: _Line, held: list[_Line]) -> Block | None:
    content = line.content
    start = line.start + len(content) - len(content.lstrip())
    if match := _MARKED.match(content):
        return Block("heading", start, line.content_end, len(match.group(1)), (match.group(2) or "").strip())
    if match := _WIKI.match(content):
        return Block("heading", start, line.content_end, len(match.group(1)), match.group(2))
    if len(held) == 1 and _UNDERLINE.match(content) and not _ITEM.match(held[0].text):
        title = held[0].content.strip()
        start = held[0].content_end - len(title)
        return Block("heading", start, line.content_end, 1 if content[0] == "=" else 2, title)
    return None


def _paragraph(lines: list[_Line]) -> Block:
    first = lines[0]
    return Block("text", first.start + len(first.text) - len(first.text.lstrip()), lines[-1].content_end)


def _code(opening: _Line, mark: str, lines: Iterator[_Line]) -> Block:
    end = opening.content_end
    for line in lines:
        end = max(end, line.content_end if line.content else end)
        if line.content.strip(mark[0]).strip() == "" and line.content.count(mark[0]) >= len(mark):
            break
    return Block("code", opening.start + len(opening.text) - len(opening.text.lstrip()), end)


def unit_starts(text: str, block: Block) -> list[int]:
    """Places where the units of a block start, the block's own start first."""
    found = {block.start}
    items_only = block.kind == "code"
    for line in _lines(text[block.start : block.end]):
        if line.content and (items_only or _ITEM.match(line.text)):
            found.add(block.start + line.start + len(line.text) - len(line.text.lstrip()))
    if not items_only:
        found.update(_sentence_starts(text, block.start, block.end))
    return sorted(found)


def _sentence_starts(text: str, start: int, end: int) -> Iterator[int]:
    for match in _STOP.finditer(text, start, end):
        if match.end() < end and not text[match.end()].islower() and not _is_abbreviation(text, start, match.start()):
            yield match.end()


def _is_abbreviation(text: str, start: int, stop: int) -> bool:
    if text[stop] != ".":
        return False
    before = text[max(start, stop - 24) : stop]
    return bool(_ABBREVIATION.search(before) or _NUMBER_AT_LINE_START.search(before))


def word_starts(text: str, start: int, end: int) -> list[int]:
    """Places where words, in the sense of white space, start in ``text[start:end]``."""
    return [match.start() for match in re.compile(r"\S+").finditer(text, start, end)]

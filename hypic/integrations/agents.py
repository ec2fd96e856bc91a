"""What agents keep beside the conversation, as segments: skills, memory files, store items, documents.

Each file or item is one segment, known by its text: an edit makes one new segment and leaves all others as they are
cached. ``poll`` looks again and tells what changed; it costs one ``stat`` per file. What changes often and is small (a
catalog of skills, the label before a file) is live text. Not here: giving segments to an agent
(``hypic.integrations.langchain.HypicMiddleware`` does, and ``hypic.Prompt`` takes them as they are).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hypic.errors import ConfigError
from hypic.integrations._files import MAX_FILE_BYTES, Files, without_comments
from hypic.integrations._held import Held, Item, SegmentEvent
from hypic.integrations._skills import SkillText, split_frontmatter
from hypic.types import Kind, Segment

# Files that people write for agents, and in which comments are for people.
INSTRUCTION_FILES = ("AGENTS.md", "CLAUDE.md", "GEMINI.md")
TEXT_SUFFIXES = (".md", ".markdown", ".txt")
_PAGE = 100

__all__ = [
    "DocumentsSource",
    "MemoryFiles",
    "SegmentEvent",
    "SegmentSource",
    "SkillDirectory",
    "StoreSource",
    "item_text",
]


@runtime_checkable
class SegmentSource(Protocol):
    """Something that segments come from and that changes by itself."""

    def poll(self) -> list[SegmentEvent]:
        """Look again; what changed since the last time."""
        ...

    def segments(self) -> list[Segment]:
        """What there was at the last ``poll``, in an order that an edit does not change."""
        ...


class SkillDirectory:
    """Folders of skills, ``NAME/SKILL.md`` each: a catalog of all, and the body of each skill as one segment.

    The catalog holds name and description from the frontmatter and is live text; a body never holds frontmatter, so
    editing a description computes no body again. ``active`` names the skills whose bodies are included (``None``: all).
    Of skills with one name the last folder's counts. Folders may not exist yet.
    """

    def __init__(
        self,
        *folders: str | Path,
        active: Collection[str] | None = None,
        namespace: str | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._files = [Files(Path(folder), max_file_bytes) for folder in _some("folder", folders)]
        self.active = active
        self._namespace = namespace
        self._held = Held(self._load)

    @property
    def refused(self) -> dict[str, str]:
        """Files that were left out, and why."""
        return _refused(self._files)

    def poll(self) -> list[SegmentEvent]:
        return self._held.poll()

    def segments(self) -> list[Segment]:
        return self._held.segments()

    def _load(self) -> list[Item]:
        skills: dict[str, tuple[Path, SkillText]] = {}
        for files in self._files:
            for path in sorted(files.root.glob("*/SKILL.md")):
                text = files.text(path)
                if text:
                    skill = split_frontmatter(text)
                    skills[skill.fields.get("name", path.parent.name)] = (path, skill)
        lines = [f"- {name}: {skill.fields.get('description', '')}".rstrip(": ") for name, (_, skill) in skills.items()]
        catalog = Segment("\n".join(["Skills:", *lines]), "skill", "catalog", namespace=self._namespace, cache=False)
        bodies = [
            Item(Segment(skill.body, "skill", name, str(path), self._namespace), f"Skill {name}:")
            for name, (path, skill) in skills.items()
            if skill.body and (self.active is None or name in self.active)
        ]
        return [Item(catalog), *bodies] if skills else []


class MemoryFiles:
    """Memory files and folders of them: one segment per file, behind a live label with its name.

    Comments in AGENTS.md, CLAUDE.md and GEMINI.md are left out. Paths may not exist yet.
    """

    def __init__(
        self,
        *paths: str | Path,
        suffixes: Collection[str] = TEXT_SUFFIXES,
        labels: bool = True,
        namespace: str | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._paths = [Path(path) for path in _some("path", paths)]
        self._files: dict[Path, Files] = {}
        self._suffixes, self._labels, self._namespace = suffixes, labels, namespace
        self._max_file_bytes = max_file_bytes
        self._held = Held(self._load)

    @property
    def refused(self) -> dict[str, str]:
        """Files that were left out, and why."""
        return _refused(self._files.values())

    def poll(self) -> list[SegmentEvent]:
        return self._held.poll()

    def segments(self) -> list[Segment]:
        return self._held.segments()

    def _load(self) -> list[Item]:
        found: dict[Path, Item] = {}
        for path in self._paths:
            root = path if path.is_dir() else path.parent
            files = self._files.setdefault(root, Files(root, self._max_file_bytes))
            for file in files.below(path, self._suffixes) if path.is_dir() else (path,):
                text = files.text(file) or ""
                text = without_comments(text) if file.name in INSTRUCTION_FILES else text
                if text and file not in found:
                    found[file] = self._item(file, text, file.relative_to(root).as_posix())
        return list(found.values())

    def _item(self, file: Path, text: str, name: str) -> Item:
        segment = Segment(text, "memory", name, str(file), self._namespace)
        return Item(segment, f"Memory file {name}:" if self._labels else "")


class StoreItem(Protocol):
    """One item of a store."""

    @property
    def key(self) -> str: ...

    @property
    def namespace(self) -> tuple[str, ...]: ...

    @property
    def value(self) -> Mapping[str, Any]: ...


class ItemStore(Protocol):
    """What a ``StoreSource`` needs of a store: LangGraph's ``BaseStore`` has it."""

    def search(self, namespace_prefix: tuple[str, ...], /, *, limit: int, offset: int) -> Sequence[StoreItem]: ...


def item_text(value: Mapping[str, Any]) -> str:
    """An item's text: its ``content``, ``text`` or ``memory``, lines joined; anything else as JSON with sorted keys."""
    for key in ("content", "text", "memory"):
        found = value.get(key)
        if isinstance(found, list) and all(isinstance(line, str) for line in found):
            found = "\n".join(found)
        if isinstance(found, str):
            return found
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


class StoreSource:
    """Items of a LangGraph store below ``namespace``: one segment per item, ordered by namespace and key.

    A store has no version numbers, so every poll reads all items; ``segment_namespace`` keeps their entries apart.
    """

    def __init__(
        self,
        store: ItemStore,
        namespace: Sequence[str],
        *,
        text: Callable[[Mapping[str, Any]], str] = item_text,
        kind: Kind = "memory",
        segment_namespace: str | None = None,
    ) -> None:
        if isinstance(namespace, str):
            raise ConfigError(f"namespace is {namespace!r}; pass a tuple of names, ({namespace!r},).")
        self._store, self._prefix, self._text = store, tuple(namespace), text
        self._kind: Kind = kind
        self._namespace = segment_namespace
        self._held = Held(self._load)

    def poll(self) -> list[SegmentEvent]:
        return self._held.poll()

    def segments(self) -> list[Segment]:
        return self._held.segments()

    def _load(self) -> list[Item]:
        items: list[StoreItem] = []
        while True:
            page = list(self._store.search(self._prefix, limit=_PAGE, offset=len(items)))
            items += page
            if len(page) < _PAGE:
                break
        named = sorted(((*item.namespace, item.key), self._text(item.value).strip()) for item in items)
        return [
            Item(Segment(text, self._kind, path[-1], "/".join(path), self._namespace)) for path, text in named if text
        ]


class DocumentLike(Protocol):
    """A retrieved document, such as LangChain's."""

    @property
    def page_content(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class DocumentsSource:
    """Documents that are at hand: segments, texts, or LangChain's documents; ``update`` replaces them all.

    Name and source of a document come from its ``id`` and ``metadata``; a document without a name is known by its text.
    """

    def __init__(self, documents: Iterable[Segment | str | DocumentLike] = (), *, kind: Kind = "document") -> None:
        self._kind: Kind = kind
        self._held = Held(self._load)
        self.update(documents)

    def update(self, documents: Iterable[Segment | str | DocumentLike]) -> None:
        """These and no others, from the next poll on."""
        self._items = [Item(self._segment(document)) for document in documents]

    def poll(self) -> list[SegmentEvent]:
        return self._held.poll()

    def segments(self) -> list[Segment]:
        return self._held.segments()

    def _load(self) -> list[Item]:
        return [item for item in self._items if item.segment.text.strip()]

    def _segment(self, document: Segment | str | DocumentLike) -> Segment:
        if isinstance(document, Segment):
            return document
        if isinstance(document, str):
            return Segment(document, self._kind)
        names = (getattr(document, "id", None), document.metadata.get("id"))
        source = document.metadata.get("source")
        return Segment(
            document.page_content,
            self._kind,
            next((str(name) for name in names if name is not None), None),
            None if source is None else str(source),
        )


def _refused(files: Iterable[Files]) -> dict[str, str]:
    return {path: reason for one in files for path, reason in one.refused.items()}


def _some(what: str, given: Sequence[str | Path]) -> Sequence[str | Path]:
    if not given:
        raise ConfigError(f"no {what} is given; pass at least one.")
    return given

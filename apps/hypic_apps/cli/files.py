"""The user's own text files: found, read, refused with one sentence where that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypic_apps.cli.errors import InputError

SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class TextFile:
    """A file's text; ``name`` is its path as it was given."""

    name: str
    text: str


def read_all(paths: Sequence[str]) -> list[TextFile]:
    """All files, folders searched for ``.txt`` and ``.md``; each file once.

    Raises:
        InputError: a path cannot be read, is no UTF-8 text, or holds none at all.
    """
    found = dict.fromkeys(path for name in paths for path in _files(Path(name).expanduser()))
    return [_read(path) for path in found]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file() and not _hidden(p, path))
    if not inside:
        raise InputError(f"folder {str(path)!r} holds no {' or '.join(SUFFIXES)} file; name the files one by one.")
    yield from inside


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _read(path: Path) -> TextFile:
    from hypic_retriever.errors import DocumentError
    from hypic_retriever.reading import read_text

    try:
        return TextFile(str(path), read_text(path))
    except DocumentError as error:
        raise InputError(str(error)) from error


def checked_text(text: str, what: str) -> str:
    """A text from the command line.

    Raises:
        InputError: it is empty, or holds bytes that are no UTF-8.
    """
    if not text.strip():
        raise InputError(f"{what} is empty; write it in quotation marks.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{what} {text!r} is no UTF-8 text; check the terminal's encoding.") from None
    return text

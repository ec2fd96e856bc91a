"""The user's own text files: found, read as UTF-8, refused with one sentence where that fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypic_apps.cli.errors import InputError

SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class TextFile:
    """A file's text, without a byte order mark; ``name`` is the path as it was given."""

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
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}; check path and rights.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is no UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); "
            "save it as UTF-8 and ask again."
        ) from error
    if not text.strip():
        raise InputError(f"{str(path)!r} holds no text; leave it out.")
    return TextFile(str(path), text)


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

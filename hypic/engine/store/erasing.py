"""Removing the files of texts from a folder of entries: of those that are meant, and what else holds their tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hypic.engine.store import encoding
from hypic.engine.store.files import files_in, key_of, mapped, read_about, unlinked
from hypic.engine.store.header import About
from hypic.engine.store.texts import Texts
from hypic.errors import StoreCorrupt


def gather(folder: Path, texts: Texts) -> None:
    """Take in the tokens of the texts in a folder whose labels are meant."""
    for path, about in _listed(folder):
        texts.take(about.key, about.labels, partial(ids_of, path))


def erase(folder: Path, texts: Texts) -> list[bytes]:
    """Remove every file of a folder that is meant or holds a text that is; their keys. Damaged files are left."""
    doomed = [(path, about.key) for path, about in _listed(folder) if _is_doomed(path, about, texts)]
    return [key for path, key in doomed if unlinked(path)]


def ids_of(path: str) -> tuple[int, ...]:
    """A file's token ids; the rest of it is not read. A file that cannot be read has none."""
    try:
        return encoding.decode(mapped(path), verify=False).ids
    except (StoreCorrupt, OSError):
        return ()


def _listed(folder: Path) -> list[tuple[str, About]]:
    found = []
    for file in files_in(str(folder)):
        try:
            if key_of(file.path) is not None:
                found.append((file.path, read_about(file.path)))
        except (StoreCorrupt, OSError):
            continue
    return found


def _is_doomed(path: str, about: About, texts: Texts) -> bool:
    if texts.wanted.fits(about.labels):
        return True
    return bool(texts.needles) and texts.wanted.reaches(about.labels) and texts.within(ids_of(path))

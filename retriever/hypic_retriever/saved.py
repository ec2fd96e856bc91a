"""An index as files: written so that a crash leaves the old one, read so that damage is noticed.

A folder holds ``index.json`` (the header), ``passages-<hash>.jsonl`` and, with an embedder,
``vectors-<hash>.faiss``. Data files are named after their content and written first; the header
names them with length and SHA-256, and renaming it into place is the moment of saving. Plain JSON
and faiss's format: loading runs no code from the files, as a pickle would.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypic_retriever.errors import IndexFormatError, RetrieverError
from hypic_retriever.passages import Passage

_HEADER = "index.json"
_FORMAT = "hypic_retriever.index"
_VERSION = 1
_DATA_NAME = re.compile(r"(?:passages|vectors)-[0-9a-f]{16}\.(?:jsonl|faiss)")
_REBUILD = "build the index again from its documents"
_ROW = {"id": str, "text": str, "source": str, "start": int, "end": int, "heading": str, "metadata": dict}


@dataclass(frozen=True)
class Saved:
    """What is in a folder: settings, passages in order, and vectors with the number of each passage id."""

    settings: Mapping[str, Any]
    passages: Sequence[Passage]
    vectors: bytes | None = None
    numbers: Mapping[str, int] = field(default_factory=dict)


def write(folder: Path, saved: Saved) -> None:
    """Puts an index into a folder, in place of an earlier one.

    Raises:
        RetrieverError: metadata that JSON does not know, or the folder cannot be written.
        IndexFormatError: the folder holds an ``index.json`` that is not ours.
    """
    rows = "".join(f"{_row(passage, saved.numbers)}\n" for passage in saved.passages)
    data = {"passages.jsonl": rows.encode()}
    if saved.vectors is not None:
        data["vectors.faiss"] = saved.vectors
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / _HEADER).exists():
            _read_header(folder, any_version=True)
        files = {kind.split(".")[0]: _write_data(folder, kind, content) for kind, content in data.items()}
        header = {"format": _FORMAT, "version": _VERSION, "settings": dict(saved.settings), "files": files}
        _write_atomically(folder / _HEADER, json.dumps({**header, "sha256": _digest(header)}, indent=1).encode())
        _remove_stale(folder, {entry["name"] for entry in files.values()})
    except OSError as error:
        raise RetrieverError(
            f"{folder} cannot hold the index ({error.strerror}); choose a folder that can be written."
        ) from error


def read(folder: Path) -> Saved:
    """The index in a folder.

    Raises:
        IndexFormatError: there is none, it is of another version, or a file is missing or damaged.
    """
    header = _read_header(folder)
    contents = {kind: _read_data(folder, entry) for kind, entry in header["files"].items()}
    passages, numbers = _rows(folder, contents["passages"])
    return Saved(header["settings"], passages, contents.get("vectors"), numbers)


def _row(passage: Passage, numbers: Mapping[str, int]) -> str:
    row = {name: getattr(passage, name) for name in _ROW} | {"metadata": dict(passage.metadata)}
    if passage.id in numbers:
        row["number"] = numbers[passage.id]
    try:
        return json.dumps(row)
    except (TypeError, ValueError) as error:
        raise RetrieverError(
            f"the metadata of passage {passage.id!r} is not JSON ({error}); keep to text, numbers, lists and dicts."
        ) from error


def _write_data(folder: Path, kind: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    stem, suffix = kind.split(".")
    name = f"{stem}-{digest[:16]}.{suffix}"
    _write_atomically(folder / name, content)
    return {"name": name, "num_bytes": len(content), "sha256": digest}


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_stale(folder: Path, current: set[str]) -> None:
    for path in folder.iterdir():
        if _DATA_NAME.fullmatch(path.name) and path.name not in current:
            path.unlink(missing_ok=True)


def _digest(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _read_header(folder: Path, any_version: bool = False) -> dict[str, Any]:
    path = folder / _HEADER
    try:
        header = json.loads(path.read_bytes())
    except OSError as error:
        raise IndexFormatError(
            f"{folder} holds no index that can be read ({error.strerror}: {_HEADER}); save one there first."
        ) from error
    except ValueError as error:
        raise IndexFormatError(f"{path} is not JSON; {_REBUILD}.") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise IndexFormatError(f"{path} is not the header of an index of this package; give another folder.")
    if header.get("version") != _VERSION and not any_version:
        raise IndexFormatError(
            f"{path} has version {header.get('version')!r}, this package reads {_VERSION}; {_REBUILD}."
        )
    if header.pop("sha256", None) != _digest(header) and not any_version:
        raise IndexFormatError(f"{path} is damaged (wrong checksum); {_REBUILD}.")
    return header


def _read_data(folder: Path, entry: Mapping[str, Any]) -> bytes:
    name = str(entry["name"])
    if not _DATA_NAME.fullmatch(name):
        raise IndexFormatError(f"{folder / _HEADER} names the file {name!r}, which is none of an index; {_REBUILD}.")
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise IndexFormatError(f"{folder / name} cannot be read ({error.strerror}); {_REBUILD}.") from error
    if len(content) != entry["num_bytes"] or hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise IndexFormatError(f"{folder / name} is damaged ({len(content)} bytes, wrong checksum); {_REBUILD}.")
    return content


def _rows(folder: Path, content: bytes) -> tuple[list[Passage], dict[str, int]]:
    rows = [json.loads(line) for line in content.splitlines()]
    for row in rows:
        if not all(isinstance(row.get(name), kind) for name, kind in _ROW.items()):
            raise IndexFormatError(f"{folder} has a passage with a missing or wrong field; {_REBUILD}.")
    passages = [Passage(**{name: row[name] for name in _ROW}) for row in rows]
    return passages, {row["id"]: row["number"] for row in rows if "number" in row}

"""What a disk store holds, looked at and cleared without a model: every model's entries, by what their files say.

Only the beginnings of files are read, but where checksums or tokens are compared. An engine that has the store open
at the same time takes a file that has gone for a miss; what it holds in memory is forgotten through it alone
(``LLM.forget``, or its server). Pure files: no engine, no weights.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypic.engine.segment import Label
from hypic.engine.store import encoding, erasing
from hypic.engine.store.files import File, files_in, folders_in, key_of, mapped, read_about, strays, unlinked
from hypic.engine.store.texts import Texts, Wanted
from hypic.errors import ConfigError, StoreCorrupt, StoreError
from hypic.kept import Forgotten, check_meant
from hypic.store_spec import TierSpec, parse_store

# The disk tier names a model's folder by the beginning of a digest.
MODEL_FOLDER = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class SavedEntry:
    """An entry's file. ``model`` is the beginning of the fingerprint of what made it; times are Unix times."""

    path: str
    key: str
    model: str
    dtype: str
    storage: str
    num_tokens: int
    num_bytes: int
    labels: frozenset[Label]
    used_s: float
    expires_s: float | None

    @property
    def namespaces(self) -> tuple[str | None, ...]:
        return tuple(sorted({label.namespace for label in self.labels}, key=str)) or (None,)

    @property
    def is_expired(self) -> bool:
        return self.expires_s is not None and self.expires_s <= time.time()


@dataclass(frozen=True)
class Damaged:
    """A file that is no entry, or no longer one."""

    path: str
    num_bytes: int
    reason: str


def disk_tier(store: str) -> TierSpec:
    """The disk tier of a store's specification.

    Raises:
        ConfigError: it has none.
    """
    for tier in parse_store(store):
        if tier.scheme == "disk":
            return tier
    raise ConfigError(
        f"store is {store!r}, which has no disk tier; name one, as in 'disk:///var/cache/hypic?size=8GiB'."
    )


def check_writable(root: Path) -> None:
    """Whether files can be made under a store's root, or where it would be made; nothing is left there.

    Raises:
        ConfigError: they cannot.
    """
    root = root.expanduser().absolute()
    try:
        place = next(folder for folder in (root, *root.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"nothing can be kept in the store {str(root)!r} ({error.strerror}); name a folder that you may write to."
        ) from error


def entries(root: Path) -> Iterator[SavedEntry | Damaged]:
    """All that stands under a store's root; nothing where there is no such folder."""
    for folder in sorted(folders_in(root)):
        for file in sorted(files_in(folder), key=lambda file: file.path):
            if key_of(file.path) is not None:
                yield _entry(file)


def matching(
    found: Iterable[SavedEntry | Damaged],
    *,
    source: str | None = None,
    name: str | None = None,
    namespace: str | None = None,
) -> Iterator[SavedEntry | Damaged]:
    """The entries of texts that match all of what is given; with nothing given all, damaged files too."""
    wanted = Wanted(source, name, namespace)
    return (one for one in found if wanted.is_all or (isinstance(one, SavedEntry) and wanted.fits(one.labels)))


def remove(found: Iterable[SavedEntry | Damaged]) -> int:
    """Remove these files; how many there were.

    Raises:
        StoreError: some could not be removed.
    """
    removed, stuck = 0, []
    for one in list(found):
        if unlinked(one.path):
            removed += 1
        elif os.path.lexists(one.path):
            stuck.append(one.path)
    if stuck:
        raise StoreError(
            f"{len(stuck)} files of the store could not be removed, {stuck[0]} among them; run this as their owner, "
            "with the right to write in their folder."
        )
    return removed


def check_readable(root: Path) -> None:
    """Whether this is a store's folder that can be looked into.

    Raises:
        StoreError: it cannot be read, or holds other things than a store does.
    """
    for folder in (root, *(Path(path) for path in _model_folders(root))):
        if not os.access(folder, os.R_OK | os.X_OK):
            raise StoreError(f"{str(folder)!r} cannot be read; run this as the owner of the store.")
    if os.listdir(root) and not _model_folders(root):
        raise StoreError(f"{str(root)!r} is no store; pass the folder that the store's disk tier has.")


def _model_folders(root: Path) -> list[str]:
    """Folders named as the disk tier names a model's."""
    return [path for path in folders_in(root) if MODEL_FOLDER.fullmatch(os.path.basename(path))]


def verify(root: Path, progress: Callable[[int], None] | None = None) -> Iterator[SavedEntry | Damaged]:
    """The same with every checksum compared; ``progress`` is told of the bytes of each file."""
    for entry in entries(root):
        yield _verified(entry) if isinstance(entry, SavedEntry) else entry
        if progress is not None:
            progress(entry.num_bytes)


def forget(
    root: Path,
    *,
    source: str | None = None,
    name: str | None = None,
    namespace: str | None = None,
    everything: bool = False,
) -> Forgotten:
    """Remove the files of texts that match all of what is given, and those that hold their tokens, or with
    ``everything`` all that are there; of all models.

    Raises:
        ConfigError: it is not said what to forget: no label is given, and not ``everything`` either; or both are.
    """
    check_meant(source, name, namespace, everything)
    if everything:
        num_entries = clear(root)
        return Forgotten(num_entries=num_entries, num_files=num_entries + sum(map(unlinked, strays(root))))
    wanted = Wanted(source, name, namespace)
    removed = sum(_forget_in(Path(folder), wanted) for folder in folders_in(root))
    remove(matching(entries(root), source=source, name=name, namespace=namespace))  # says so where one stayed
    return Forgotten(num_entries=removed, num_files=removed)


def clear(root: Path, model: str = "") -> int:
    """Remove all entries, or those of the models whose fingerprints begin so, and damaged files; how many files."""
    found = [entry for entry in entries(root) if isinstance(entry, Damaged) or entry.model.startswith(model)]
    removed = remove(found)
    for folder in _model_folders(root):
        if not os.listdir(folder):
            os.rmdir(folder)
    return removed


def collect(root: Path) -> Forgotten:
    """Remove what has lived its time, and what broken writes left behind."""
    expired = [entry for entry in entries(root) if isinstance(entry, SavedEntry) and entry.is_expired]
    num_entries = remove(expired)
    return Forgotten(num_entries=num_entries, num_files=num_entries + sum(unlinked(path) for path in strays(root)))


# -- steps of the above ----------------------------------------------------------------------------------------------


def _entry(file: File) -> SavedEntry | Damaged:
    try:
        about = read_about(file.path)
        if about.key != key_of(file.path):
            raise StoreCorrupt("it stands under the name of another.")
    except PermissionError as error:
        raise StoreError(f"{file.path} cannot be read; run this as the owner of the store.") from error
    except (StoreCorrupt, OSError) as error:
        return Damaged(file.path, file.num_bytes, str(error))
    return SavedEntry(
        path=file.path,
        key=about.key.hex(),
        model=about.identity.fingerprint[:12],
        dtype=about.identity.dtype.removeprefix("torch."),
        storage=about.identity.storage,
        num_tokens=int(about.metadata["tokens"]),
        num_bytes=file.num_bytes,
        labels=about.labels,
        used_s=file.used_s,
        expires_s=about.expires_s,
    )


def _verified(entry: SavedEntry) -> SavedEntry | Damaged:
    try:
        encoding.decode(mapped(entry.path))
    except (StoreCorrupt, OSError) as error:
        return Damaged(entry.path, entry.num_bytes, str(error))
    return entry


def _forget_in(folder: Path, wanted: Wanted) -> int:
    """In one model's folder: ids of different models have nothing to do with each other."""
    texts = Texts(wanted)
    erasing.gather(folder, texts)
    return len(erasing.erase(folder, texts))

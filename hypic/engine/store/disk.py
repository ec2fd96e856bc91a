"""The disk tier: one safetensors file per entry, ``<root>/<model>/<key>.safetensors``, evicted by value.

A file is written under a temporary name, fsynced and renamed, so that a name stands for a whole file whatever happens;
directories are for their owner alone. Opening reads names, sizes and the beginnings of files. Several processes may
share a root: each looks at the directory again before it writes, files that have gone are misses, and the times of
files are the order of use. Files of other models count against the budget and are left alone.

Checksums are compared when a file is read for the first time. A damaged file is a miss, with a warning, and removed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from hypic.engine.segment import Identity
from hypic.engine.store import encoding
from hypic.engine.store.eviction import Ranking
from hypic.engine.store.files import (
    SUFFIX,
    File,
    files_in,
    folders_in,
    key_of,
    look_at,
    mapped,
    read_about,
    real_bytes,
    strays,
    sync,
    unlinked,
    write_all,
)
from hypic.engine.store.tier import Stored, TierStats
from hypic.errors import StoreCorrupt

logger = logging.getLogger("hypic")
PAUSE_S = 30.0


def folder_of(root: Path, identity: Identity) -> Path:
    """Where a model's entries stand; whatever changes what entries hold changes the folder."""
    return root / identity.key((), 0, None, False).hex()[:16]


class DiskTier:
    """At most ``budget_bytes`` under ``root``; a directory that cannot be written to is only read."""

    name, blocks = "disk", True

    def __init__(self, root: Path, budget_bytes: int, identity: Identity) -> None:
        self.root, self.budget_bytes = root.expanduser(), budget_bytes
        self.folder = folder_of(self.root, identity)
        self._entries: dict[bytes, Stored] = {}
        self._uses: dict[bytes, int] = {}
        self._verified: set[bytes] = set()
        self._ranking = Ranking()
        self._held_bytes = self._foreign_bytes = self._num_foreign = 0
        self._counts = dict.fromkeys(("hits", "stored", "evictions", "corrupt", "dropped"), 0)
        self._numbers, self._paused_until = itertools.count(), 0.0
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._open()

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def find(self, key: bytes) -> Stored | None:
        """The entry, also one that another process has written meanwhile."""
        with self._lock:
            if key not in self._entries and (file := look_at(self._path(key))) is not None:
                self._learn(key, file)
            return self._entries.get(key)

    def get(self, key: bytes) -> Tensor | None:
        path = self._path(key)
        try:
            buffer = mapped(path)
            found = encoding.decode(buffer, verify=key not in self._verified)
            if found.key != key:
                raise StoreCorrupt(f"the entry {found.key.hex()[:16]} stands under the name of another.")
        except (StoreCorrupt, OSError) as error:
            self._lose(key, error)
            return None
        with self._lock:
            self._verified.add(key)
            self._counts["hits"] += 1
            self._uses[key] = self._uses.get(key, 1) + 1
            self._rank(key)
        with suppress(OSError):
            os.utime(path)
        return buffer

    def put(self, key: bytes, buffer: Tensor) -> bool:
        if time.monotonic() < self._paused_until or real_bytes(len(buffer)) > self.budget_bytes:
            return False
        with self._writing:  # nobody who only looks something up waits for the disk
            return os.path.exists(self._path(key)) or self._write(key, buffer)

    def remove(self, key: bytes) -> bool:
        with self._lock:
            was_there = unlinked(self._path(key))
            self._forget(key)
            return was_there

    def foreign_folders(self) -> list[str]:
        """Where other models' entries stand."""
        return [folder for folder in folders_in(self.root) if folder != str(self.folder)]

    def entries(self) -> list[Stored]:
        with self._lock:
            return [replace(stored, hits=self._uses[key] - 1) for key, stored in self._entries.items()]

    @property
    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                len(self._entries),
                self._held_bytes,
                self.budget_bytes,
                **self._counts,
                num_foreign=self._num_foreign,
                foreign_bytes=self._foreign_bytes,
            )

    def close(self) -> None:
        """What is on disk stays there."""

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            os.chmod(self.folder, 0o700)
        except OSError as error:
            self._pause(f"the store {self.root} cannot be written to ({error}); entries are read from it, none kept.")
        removed = sum(unlinked(path) for path in strays(self.root))
        self._look()
        logger.info(
            "store %s: %d entries usable (%d MiB), %d of other models (%d MiB), %d stray files removed",
            self.root,
            len(self._entries),
            self._held_bytes >> 20,
            self._num_foreign,
            self._foreign_bytes >> 20,
            removed,
        )

    def _look(self) -> int:
        """Compare what is known with the directory; bytes of temporary files, which count as well."""
        files = [(folder, file) for folder in folders_in(self.root) for file in files_in(folder)]
        named = [(folder, file, key_of(file.path)) for folder, file in files]
        own = str(self.folder)
        found = {key: file for folder, file, key in named if key is not None and folder == own}
        foreign = [file.num_bytes for folder, file, key in named if key is not None and folder != own]
        with self._lock:
            for key in self._entries.keys() - found.keys():
                self._forget(key)
            for key in sorted(found.keys() - self._entries.keys(), key=lambda key: found[key].used_s):
                self._learn(key, found[key])
            self._num_foreign, self._foreign_bytes = len(foreign), sum(foreign)
        return sum(file.num_bytes for _, file, key in named if key is None)

    def _learn(self, key: bytes, file: File) -> None:
        """Take in a file that is new here."""
        try:
            about = read_about(file.path)
            if about.key != key:
                raise StoreCorrupt(f"the entry {about.key.hex()[:16]} stands under the name of another.")
        except (StoreCorrupt, OSError) as error:
            self._lose(key, error)
            return
        self._entries[key] = Stored.of(about, file.num_bytes)
        self._uses[key] = 1
        self._held_bytes += file.num_bytes
        self._rank(key)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, key: bytes, buffer: Tensor) -> bool:
        """A temporary file of full length stands in the directory before room is made, so that processes that write
        at the same time see each other's."""
        temporary = str(self.folder / f".{key.hex()[:16]}.{os.getpid()}.{next(self._numbers)}.tmp")
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                os.ftruncate(descriptor, len(buffer))
                if not self._make_room():
                    return self._give_up(temporary)
                encoding.seal(buffer)  # here, on the writer's thread, rather than where entries are made
                write_all(descriptor, memoryview(buffer.numpy()))  # type: ignore[arg-type]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, self._path(key))
            sync(self.folder)
        except OSError as error:
            self._pause(f"an entry could not be written to {self.folder} ({error}); entries are not kept for a while.")
            return self._give_up(temporary)
        with self._lock:
            if key not in self._entries:  # a look-up may have found the file already, and counted it
                self._learn(key, File(self._path(key), real_bytes(len(buffer)), time.time()))
            self._verified.add(key)
            self._counts["stored"] += 1
        return True

    def _make_room(self) -> bool:
        """Evict until all that stands under the root, temporary files too, keeps to the budget."""
        temporary = self._look()
        while self._held_bytes + self._foreign_bytes + temporary > self.budget_bytes:
            if not self._evict():
                self._pause(f"other models' entries fill the store {self.root}; clear it or give it a larger size.")
                return False
        return True

    def _evict(self) -> bool:
        with self._lock:
            key = self._ranking.pop()
            if key is None:
                return False
            self._counts["evictions"] += 1
            unlinked(self._path(key))
            self._forget(key)
        return True

    def _give_up(self, temporary: str) -> bool:
        unlinked(temporary)
        self._counts["dropped"] += 1
        return False

    def _pause(self, reason: str) -> None:
        if self._paused_until == 0.0:
            logger.warning("%s", reason)
        self._paused_until = time.monotonic() + PAUSE_S

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        return f"{self.folder}/{key.hex()}{SUFFIX}"

    def _rank(self, key: bytes) -> None:
        stored = self._entries.get(key)
        if stored is not None:
            self._ranking.add(key, self._uses[key], stored.num_saved, stored.num_bytes)

    def _forget(self, key: bytes) -> None:
        stored = self._entries.pop(key, None)
        self._verified.discard(key)
        self._ranking.discard(key)
        self._uses.pop(key, None)
        if stored is not None:
            self._held_bytes -= stored.num_bytes

    def _lose(self, key: bytes, error: Exception) -> None:
        """A file that cannot be used: one that has gone is no fault, and one that cannot be opened may yet be sound."""
        with self._lock:
            if isinstance(error, StoreCorrupt):
                logger.warning("the store %s lost an entry: %s", self.root, error)
                self._counts["corrupt"] += 1
                unlinked(self._path(key))
            elif not isinstance(error, FileNotFoundError):
                logger.warning("the store %s could not read an entry: %s", self.root, error)
            self._forget(key)

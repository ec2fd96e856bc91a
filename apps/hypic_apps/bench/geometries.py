"""Model geometries by name: configurations of real models, run with random weights that are made on the device.

Speed depends on shapes and on how long states live, not on what a model has learnt; quality is measured elsewhere, on
trained weights only. ``hypic-tiny`` is the exception: it names the bundled checkpoint, weights and tokenizer included,
and so does the path of any checkpoint folder; a checkpoint of that name in the working directory goes before it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic.checkpoints import BUNDLED, bundled, is_bundled
from hypic.errors import ConfigError

FILE = Path(__file__).with_name("geometries.json")


@dataclass(frozen=True)
class Geometry:
    """A ``config.json``'s content; ``folder`` holds the checkpoint where there is one, else weights are random."""

    name: str
    config: Mapping[str, Any]
    folder: Path | None = None

    @contextmanager
    def placed(self) -> Iterator[Path]:
        """A folder that the engine and transformers can read for as long as this lasts."""
        if self.folder is not None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="hypic-bench-") as name:
            (Path(name) / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
            yield Path(name)


def known() -> dict[str, dict[str, Any]]:
    """Configurations by name."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def geometry(name: str) -> Geometry:
    """A geometry by its name, or a checkpoint by its folder.

    Raises:
        ConfigError: there is no such geometry or folder.
    """
    configs = known()
    if name in configs:
        return Geometry(name, configs[name])
    folder = bundled() if is_bundled(name) else Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{name!r} is no geometry and no checkpoint folder; known are {', '.join([*configs, BUNDLED])}."
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Geometry(folder.name, config, folder)

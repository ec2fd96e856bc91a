"""transformers measured in a process of its own, before ours takes the memory: two large models do not fit at once.

The parent writes one JSON object to the child's stdin (``Ask``) and reads one from its stdout (``Told``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hypic_apps.bench.geometries import Geometry
from hypic_apps.bench.peers import PeerError, Transformers
from hypic_apps.bench.prompts import IdsSource, Shape, Source, TextSource, shuffled
from hypic_apps.bench.records import installed

START = "import sys; sys.path[:0] = {path!r}; from hypic_apps.bench.peer_process import main; main()"


@dataclass(frozen=True)
class Ask:
    """What to measure; with a ``folder`` its checkpoint, else random weights of ``config``."""

    config: Mapping[str, Any]
    folder: str | None
    device: str
    dtype: str
    threads: int | None
    seed: int
    shapes: Sequence[Mapping[str, Any]]
    runs: int
    warmup: int


@dataclass(frozen=True)
class Told:
    """Seconds by shape and run, versions, and what the peer lacks of its best setting; or why it was not measured."""

    seconds: Sequence[Sequence[float]] = ()
    versions: Mapping[str, str] = ()  # type: ignore[assignment]
    missing: str = ""


def ask(geometry: Geometry, device: str, dtype: str, shapes: Sequence[Shape], runs: int, warmup: int,
        threads: int | None, seed: int) -> Told:  # fmt: skip
    """Measures in a new process; a peer that cannot be measured says why, and is no error."""
    folder = str(geometry.folder) if geometry.folder is not None else None
    asked = Ask(
        geometry.config, folder, device, dtype, threads, seed, [asdict(shape) for shape in shapes], runs, warmup
    )
    command = [sys.executable, "-c", START.format(path=sys.path)]
    done = subprocess.run(command, input=json.dumps(asdict(asked)), stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return Told(missing=f"transformers' process ended with exit code {done.returncode}.")
    return Told(**json.loads(lines[-1]))


def main() -> None:
    """The child's side."""
    asked = Ask(**json.load(sys.stdin))
    try:
        told = measure(asked)
    except PeerError as error:
        told = Told(missing=str(error))
    print(json.dumps(asdict(told) | {"versions": dict(told.versions)}))


def measure(asked: Ask) -> Told:
    """All shapes, one after another.

    Raises:
        PeerError: the model cannot be made or run.
    """
    import torch

    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    if asked.folder is None:
        peer = Transformers.made(asked.config, asked.device, asked.dtype)
    else:
        peer = Transformers.load(asked.folder, asked.device, asked.dtype)
    source = _source(asked)
    seconds = [_cell(peer, source, Shape(**shape), asked) for shape in asked.shapes]
    lacking = [name for name in ("flash-linear-attention", "causal-conv1d") if installed(name) is None]
    versions = {"transformers": peer.version, **dict.fromkeys(lacking, "missing")}
    return Told(seconds, versions)


def _cell(peer: Transformers, source: Source, shape: Shape, asked: Ask) -> list[float]:
    seconds = [peer.prefill(_ids(source, shape, number)).seconds for number in range(-asked.warmup, asked.runs)]
    return seconds[asked.warmup :]


def _ids(source: Source, shape: Shape, number: int) -> list[int]:
    """The same prompt that our full recompute gets in this repetition."""
    documents: Sequence[Any] = source.documents(shape, number)
    ordered = [documents[i] for i in shuffled(documents, number)]
    return [i for piece in source.prompt(shape, ordered, f"{number} full")() for i in piece.ids]


def _source(asked: Ask) -> Source:
    vocab_size = int(asked.config["vocab_size"])
    if asked.folder is None:
        return IdsSource(vocab_size, asked.seed)
    from hypic.engine.tokenizer import Tokenizer

    return TextSource.of(Tokenizer(Path(asked.folder)), vocab_size, beforehand=True, seed=asked.seed)

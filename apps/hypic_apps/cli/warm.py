"""``hypic warm``: encodes the passages of files ahead, into a store on disk that outlives this process."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hypic_apps.cli.engine import Loaded, add_model_options, loaded
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.files import TextFile, read_all
from hypic_apps.cli.parser import Parser, Subparsers, add_command

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from hypic import LLM, Segment
    from hypic.saved import SavedEntry

    # A key, and a segment with its bytes.
    Missing = tuple[str, tuple[Segment, int]]

SUMMARY = "encode a corpus ahead, into a store on disk"
EXAMPLES = """
hypic warm handbook.md notes/ --store "disk:///var/cache/hypic?size=20GiB"
hypic warm notes/ --store "disk://~/hypic?size=2GiB" --dry-run
hypic warm notes/ --store "disk://~/hypic?size=2GiB" --prune
hypic ask "Who leads it?" notes/ --store "disk://~/hypic?size=2GiB"
"""
DETAILS = """Files are cut into passages as hypic ask cuts them. What the store has is not
encoded again, so a broken-off run is taken up where it ended. A corpus that is
larger than the store is refused before anything is encoded. A passage is
encoded once for each rung of the primer; with --no-rungs once."""
AT_ONCE, MOST_BYTES = 64, 2**29
SAMPLE = 8
BLOCK_BYTES = 4096
FILE_BYTES = 8192


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "warm", "PATHS...", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="text files and folders")
    parser.add_argument("--namespace", metavar="NAME", help="the namespace of the passages (default: everybody's)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be encoded, and how long it would take")
    parser.add_argument("--prune", action="store_true",
                        help="also remove what the store has of these paths and they no longer hold")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Work:
    """What a corpus comes to: segments by the keys of their entries, one for each rung of a primer, and what of them
    the store has."""

    wanted: dict[str, tuple[Segment, int]]
    there: frozenset[str]
    num_live: int
    held_bytes: int
    budget_bytes: int

    @property
    def num_segments(self) -> int:
        return len({id(segment) for segment, _ in self.wanted.values()})

    @property
    def missing(self) -> dict[str, tuple[Segment, int]]:
        return {key: pair for key, pair in self.wanted.items() if key not in self.there}

    @property
    def missing_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.missing.values())

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.held_bytes)

    @property
    def num_fitting(self) -> int:
        """How many of the missing entries fit, the first ones first."""
        left, count = self.free_bytes, 0
        for _, num_bytes in self.missing.values():
            left -= num_bytes
            count += left >= 0
        return count


@dataclass
class Done:
    """What one run did."""

    num_files: int
    num_passages: int
    num_segments: int
    num_live: int
    num_entries: int
    num_there: int
    num_encoded: int = 0
    num_stale: int = 0
    num_pruned: int = 0
    num_bytes: int = 0
    seconds_s: float = 0.0
    notes: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    """Reads, cuts, encodes what is missing, prunes.

    Raises:
        ConfigError: the store's folder cannot be written to.
        InputError: there is no disk to keep it on, or not enough of it.
        CommandError: not all that was encoded could be written.
    """
    from hypic.saved import check_writable, disk_tier, remove
    from hypic_apps.cli.screen import notes, result_object

    store = getattr(args, "engine.store", None)
    if store is None:
        raise InputError("nothing would be left when this ends; pass --store 'disk:///folder?size=8GiB'.")
    tier = disk_tier(store)
    assert tier.path is not None, "a disk tier has a path"
    check_writable(tier.path)
    files, console = read_all(args.paths), notes()
    segments, num_passages = _segments(files, args.namespace)
    if args.dry_run:
        delattr(args, "engine.store")
    with loaded(args, console, example="hypic warm FILES... --store STORE --model Qwen/Qwen3.5-0.8B") as model:
        console.print(model.introduction, style="dim")
        work = _work(model.llm, segments, tier.path, tier.budget_bytes)
        counts = work.num_segments, work.num_live, len(work.wanted), len(work.there)
        done = Done(len(files), num_passages, *counts)
        if args.dry_run:
            _rehearse(model, work, done, console)
        else:
            _check_room(work)
            _encode(model.llm, work, done, console, tier.path)
        if args.prune:
            stale = _stale(model.llm, work, tier.path, args.paths)
            done.num_stale, done.num_pruned = len(stale), 0 if args.dry_run else remove(stale)
    _tell(done, work, console, args.dry_run)
    if args.json:
        result_object({**asdict(done), "missing_bytes": work.missing_bytes, "free_bytes": work.free_bytes})
    return 0


def _segments(files: Sequence[TextFile], namespace: str | None) -> tuple[list[Segment], int]:
    """The passages of all files, each text once, and how many there are with those that stand twice."""
    from dataclasses import replace

    from hypic_apps.cli.retrieval import segments
    from hypic_retriever import Splitter

    splitter = Splitter()
    passages = [passage for file in files for passage in splitter.split(file.text, file.name)]
    distinct = {passage.text: passage for passage in reversed(passages)}
    found = [replace(segment, namespace=namespace) for segment in segments(list(distinct.values())[::-1])]
    return found, len(passages)


def _work(llm: LLM, segments: Sequence[Segment], root: Path, budget_bytes: int) -> Work:
    """What of the corpus is cached at all, how large it is, and what is there."""
    from hypic.saved import SavedEntry, entries

    sizes = llm.stats()["entry"]
    wanted: dict[str, tuple[Segment, int]] = {}
    by_place = zip(*(llm.keys(segments, place=place) for place in llm.places()), strict=True)
    for segment, found in zip(segments, by_place, strict=True):
        for key, num_tokens in found:
            if key is not None:
                num_bytes = sizes["map_bytes"] + num_tokens * sizes["token_bytes"] + FILE_BYTES
                wanted[key] = (segment, -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    kept = list(entries(root))
    there = {entry.key for entry in kept if isinstance(entry, SavedEntry) and not entry.is_expired} & wanted.keys()
    held = sum(entry.num_bytes for entry in kept)
    num_live = len(segments) - len({id(segment) for segment, _ in wanted.values()})
    return Work(wanted, frozenset(there), num_live, held, budget_bytes)


def _check_room(work: Work) -> None:
    """Whether the store can hold what is missing beside what it holds.

    Raises:
        InputError: it cannot, and what would fit.
    """
    from hypic_apps.cli.models import human_bytes

    if work.missing_bytes > work.free_bytes:
        raise InputError(
            f"{len(work.missing):,} entries take {human_bytes(work.missing_bytes)} and the store has "
            f"{human_bytes(work.free_bytes)} of {human_bytes(work.budget_bytes)} left, which hold the first "
            f"{work.num_fitting:,}; give it a larger size=, clear it, or pass fewer files."
        )


def _encode(llm: LLM, work: Work, done: Done, console: Console, root: Path) -> None:
    """Many segments at a time, each batch written before the next begins."""
    began = time.perf_counter()
    missing = list(work.missing.items())
    with _bar(console) as bar:
        task = bar.add_task("encoding", total=work.missing_bytes, rate="")
        for batch in _batches(missing):
            llm.warm(_segments_of(batch))
            llm.flush()
            done.num_encoded += len(batch)
            done.num_bytes += sum(num_bytes for _, (_, num_bytes) in batch)
            rate = f"{done.num_encoded / (time.perf_counter() - began):.1f} entries/s"
            bar.update(task, completed=done.num_bytes, rate=rate)
    done.seconds_s = time.perf_counter() - began
    _check_written(work, root)


def _segments_of(batch: Sequence[Missing]) -> list[Segment]:
    """Each once, of all its entries."""
    return list({id(segment): segment for _, (segment, _) in batch}.values())


def _batches(missing: Sequence[Missing]) -> Iterator[Sequence[Missing]]:
    """As many at a time as share the engine's steps well, and no more than may wait to be written."""
    batch: list[Missing] = []
    held = 0
    for one in missing:
        if batch and (len(batch) == AT_ONCE or held + one[1][1] > MOST_BYTES):
            yield batch
            batch, held = [], 0
        batch.append(one)
        held += one[1][1]
    if batch:
        yield batch


def _check_written(work: Work, root: Path) -> None:
    from hypic.saved import SavedEntry, entries

    lacking = work.wanted.keys() - {entry.key for entry in entries(root) if isinstance(entry, SavedEntry)}
    if lacking:
        raise CommandError(
            f"{len(lacking):,} of {len(work.wanted):,} entries could not be kept in {str(root)!r}; see the log, and "
            "run this again."
        )


def _stale(llm: LLM, work: Work, root: Path, paths: Sequence[str]) -> list[SavedEntry]:
    """This model's entries of these paths that are no part of the corpus any more."""
    from hypic.saved import SavedEntry, entries

    places = [Path(path).expanduser().resolve() for path in paths]

    def is_of_paths(source: str | None) -> bool:
        return source is not None and any(Path(source).is_relative_to(place) for place in places)

    spaces = {segment.namespace for segment, _ in work.wanted.values()}
    return [
        entry
        for entry in entries(root)
        if isinstance(entry, SavedEntry)
        and llm.fingerprint.startswith(entry.model)
        and entry.key not in work.wanted
        and any(is_of_paths(label.source) and label.namespace in spaces for label in entry.labels)
    ]


def _rehearse(model: Loaded, work: Work, done: Done, console: Console) -> None:
    """How long it would take, from a few segments that are encoded into memory."""
    missing = list(work.missing.items())
    segments = _segments_of(missing)
    some = segments[:: max(1, len(segments) // SAMPLE)][:SAMPLE]
    if some:
        model.llm.warm(some[:1])  # the first one takes longer than all others
        model.llm.forget(everything=True)
        began = time.perf_counter()
        model.llm.warm(some)
        chosen = {id(segment) for segment in some}
        share = sum(num_bytes for _, (one, num_bytes) in missing if id(one) in chosen) / work.missing_bytes
        done.seconds_s = (time.perf_counter() - began) / share
    if work.missing_bytes > work.free_bytes:
        done.notes.append(f"only the first {work.num_fitting:,} of {len(missing):,} missing entries fit")


def _tell(done: Done, work: Work, console: Console, is_rehearsal: bool) -> None:
    from hypic_apps.cli.models import human_bytes

    console.print(
        f"{done.num_files:,} files, {done.num_passages:,} passages: {done.num_segments:,} segments to keep, "
        f"{done.num_live:,} passages too short for it"
    )
    if done.num_entries > done.num_segments:
        console.print(
            f"{done.num_entries:,} entries, as segments are encoded in several ways, by their place in a prompt"
        )
    console.print(f"{done.num_there:,} were there already")
    verb = "to encode" if is_rehearsal else "encoded"
    count, size = (len(work.missing), work.missing_bytes) if is_rehearsal else (done.num_encoded, done.num_bytes)
    console.print(
        f"{count:,} {verb}, {human_bytes(size)}, in {'about ' if is_rehearsal else ''}{done.seconds_s:,.0f} s"
    )
    if done.num_stale:
        told = f"{done.num_stale:,} to remove" if is_rehearsal else f"{done.num_pruned:,} removed"
        console.print(f"{told} that the files no longer hold")
    for note in done.notes:
        console.print(note, style="yellow")


def _bar(console: Console) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn(binary_units=True),
               TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
    shown = console.is_terminal and not console.is_dumb_terminal
    return Progress(*columns, console=console, transient=True, disable=not shown)

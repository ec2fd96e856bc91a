"""What ``hypic eval`` has found: tables as lines, saved results shown again, pages filled, plots and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.errors import InputError
from hypic_apps.cli.whole_file import write_whole

if TYPE_CHECKING:
    from hypic_apps.eval.drift import Drift
    from hypic_apps.eval.records import Record

NO_EVIDENCE = "no evidence for larger models"
MAIN_SET = "S1"
Found = tuple[dict[str, Any], list[str]]


def shown(names: Sequence[str], sets: Sequence[str], plot_to: str | None) -> Found:
    """Saved results, of all sets or of some."""
    from hypic_apps.eval import pages, plot

    paths = [Path(name).expanduser() for name in names]
    whole, saved = pages.read(paths), [pages.saved(path) for path in paths]
    found, lines = whole.chosen({"sets": sets} if sets else {}), list[str]()
    for model, size in dict.fromkeys((one["model"], one["num_parameters"]) for one in saved):
        one = found.chosen({"model": [model]})
        lines += [*([""] if lines else []), title(model, size), *tables_of(one.records, plot_to)]
    made = {"records": [asdict(r) for r in found.records], "drift": [asdict(d) for d in found.drift]}
    if plot_to and found.drift and not found.records:
        write(Path(plot_to), plot.drift_by_depth(found.drift))
    return {**saved[0], **made}, [*lines, *drift_tables_of(found.drift)]


def filled(names: Sequence[str]) -> Found:
    """Pages with their tables anew."""
    from hypic_apps.eval import pages

    changed = []
    for path in (Path(name) for name in names):
        try:
            before = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise InputError(f"{str(path)!r} cannot be read: {reason}; name a page.") from error
        after = pages.filled(before, path.parent)
        if after != before:
            write(path, after)
            changed.append(str(path))
    return {"changed": changed}, [f"{name}: {'written anew' if name in changed else 'as it was'}" for name in names]


def tables_of(records: Sequence[Record], plot_to: str | None) -> list[str]:
    from hypic_apps.eval import plot, tables

    sets = list(dict.fromkeys(record.set for record in records))
    if not sets:
        return []
    if plot_to:
        write(Path(plot_to), plot.quality_against_time(records, MAIN_SET if MAIN_SET in sets else sets[0]))
    kinds = (tables.quality, tables.gaps, tables.likeness, tables.others)
    return [line for kind in kinds if (table := kind(records)) for line in ("", *table)]


def drift_tables_of(found: Sequence[Drift]) -> list[str]:
    from hypic_apps.eval import tables

    if not found:
        return []
    main = next((d for d in found if d.arm == "transition"), found[0])
    lines = ["", *tables.ends(found), "", *tables.drift(found)]
    return [*lines, "", f"Cached tokens, {main.arm}:", "", *tables.distance(main)]


def title(model: str, num_parameters: int) -> str:
    size = f"{num_parameters / 1e6:.1f} million parameters"
    return f"{model}, {size}: {NO_EVIDENCE}." if num_parameters < 1e9 else f"{model}, {size}."


def save(path: Path, found: Mapping[str, Any]) -> None:
    """Writes a result as JSON.

    Raises:
        InputError: the file cannot be written.
    """
    write(path, json.dumps(found, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Raises ``InputError`` where the file cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror}; name another file.") from error

"""Tables of a Markdown page, written anew from saved results, so that a page never tells other numbers than they do.

A table stands between two marks that no reader sees; the first names the table and files beside the page, and may
choose a model, sets and arms, in the order in which they are to stand, and for goals (``of``) the arm they are told of:

    <!-- hypic eval: gaps results/quality.json sets=S1,S5 arms=transition,addition -->
    <!-- end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypic.errors import ConfigError
from hypic_apps.cli.whole_file import read_whole
from hypic_apps.eval import tables
from hypic_apps.eval.arms import MAIN
from hypic_apps.eval.drift import Drift, Layer
from hypic_apps.eval.records import Record

MARK = re.compile(r"(<!-- hypic eval: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Results:
    """What one or several files hold; ``of`` is the arm that goals are told of."""

    records: Sequence[Record] = ()
    drift: Sequence[Drift] = ()
    of: str = MAIN

    def chosen(self, names: Mapping[str, Sequence[str]]) -> Results:
        """Records of some ``model``, ``sets`` and ``arms``, in the order in which these are named."""
        found, drift = list(self.records), list(self.drift)
        for option, field in (("model", "model"), ("sets", "set"), ("arms", "arm")):
            if option in names:
                order = list(names[option])
                kept = [r for r in found if getattr(r, field) in order]
                found = sorted(kept, key=lambda r: order.index(getattr(r, field)))
        if "arms" in names:
            drift = [d for name in names["arms"] for d in drift if d.arm == name]
        return replace(self, records=found, drift=drift, of=next(iter(names.get("of", ())), self.of))


TABLES: Mapping[str, Callable[[Results], list[str]]] = {
    "quality": lambda found: tables.quality(found.records),
    "gaps": lambda found: tables.gaps(found.records),
    "divergences": lambda found: tables.divergences(found.records),
    "likeness": lambda found: tables.likeness(found.records),
    "others": lambda found: tables.others(found.records),
    "knobs": lambda found: tables.knobs(found.records),
    "closer": lambda found: tables.closer(found.records),
    "models": lambda found: tables.models(found.records),
    "answers": lambda found: tables.answers(found.records),
    "goals": lambda found: tables.goals(found.records, found.of),
    "drift": lambda found: tables.drift(found.drift),
    "ends": lambda found: tables.ends(found.drift),
    "distance": lambda found: tables.distance(found.drift[0]),
}
OF_DRIFT = ("drift", "ends", "distance")


def read(paths: Sequence[Path]) -> Results:
    """Results of several files together.

    Raises:
        ConfigError: one cannot be read, or holds no results.
    """
    saved = [_results(path) for path in paths]
    return Results([r for one in saved for r in one.records], [d for one in saved for d in one.drift])


def _results(path: Path) -> Results:
    found = saved(path)
    try:
        return Results([Record(**row) for row in found["records"]], [drift_of(row) for row in found.get("drift", ())])
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{str(path)!r} holds other records than those of hypic eval ({error}).") from error


def saved(path: Path) -> Mapping[str, Any]:
    """A file as ``--save`` wrote it.

    Raises:
        ConfigError: it cannot be read, or holds no records of a model.
    """
    try:
        found = json.loads(read_whole(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{str(path)!r} cannot be read ({reason}); name a file that --save wrote.") from error
    if not isinstance(found, dict) or not {"records", "model", "num_parameters"} <= found.keys():
        raise ConfigError(f"{str(path)!r} holds no records of a model; name a file that --save wrote.")
    return found


def drift_of(row: Mapping[str, Any]) -> Drift:
    """A drift as JSON has it."""
    layers = tuple(Layer(**{**layer, "heads": tuple(layer["heads"])}) for layer in row["layers"])
    return Drift(row["arm"], row["num_prompts"], layers, tuple(tuple(bins) for bins in row["by_distance"]))


def filled(text: str, folder: Path) -> str:
    """A page's text with all of its marked tables anew; files are named from ``folder`` on.

    Raises:
        ConfigError: a mark names no table, or a file that cannot be read.
    """
    return MARK.sub(lambda found: found[1] + "\n".join(_table(found[2], folder)) + "\n" + found[4], text)


def _table(mark: str, folder: Path) -> list[str]:
    name, *words = mark.split() or [""]
    if name not in TABLES:
        raise ConfigError(f"a page's mark names the table {name!r}; there are {', '.join(TABLES)}.")
    options = dict(word.split("=", 1) for word in words if "=" in word)
    results = read([folder / word for word in words if "=" not in word])
    chosen = results.chosen({option: value.split(",") for option, value in options.items()})
    if not (chosen.drift if name in OF_DRIFT else chosen.records):
        raise ConfigError(f"nothing saved belongs into the table {mark.strip()!r}; name other files, sets or arms.")
    return TABLES[name](chosen)

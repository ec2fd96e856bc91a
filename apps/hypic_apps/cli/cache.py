"""``hypic cache``: what a store on disk, or a running server, holds; checked, forgotten and cleared without a model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.parser import Parser, Subparsers, add_command

if TYPE_CHECKING:
    from rich.console import Console

    from hypic.saved import Damaged, SavedEntry

SUMMARY = "look at, check, forget or clear what is cached"
EXAMPLES = """
hypic cache stat --store "disk:///var/cache/hypic?size=20GiB"
hypic cache ls --store /var/cache/hypic --source handbook.md
hypic cache verify --store /var/cache/hypic
hypic cache forget --store /var/cache/hypic --source handbook.md
hypic cache forget --url http://127.0.0.1:8000 --everything
hypic cache gc --store /var/cache/hypic
hypic cache clear --store /var/cache/hypic
hypic cache ls --url http://127.0.0.1:8000 --api-key KEY
"""
DETAILS = """ls      one line per entry
stat    sizes by model, tier and namespace
verify  compare every checksum; exit code 1 if one is wrong
forget  remove texts by --source, --name or --namespace, wherever they stand,
        or --everything
gc      remove what has lived its time and what broken writes left behind
clear   remove everything, or with --model one model's entries

--store is a folder, or a store with a disk tier. No model is loaded. A server
that runs is asked with --url: it forgets what it holds in memory as well."""
ACTIONS = ("ls", "stat", "verify", "forget", "gc", "clear")
REMOTE = ("ls", "stat", "forget", "clear")


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "cache", "ACTION", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("--store", metavar="PLACE", help="folder, or store such as disk:///folder?size=8GiB")
    parser.add_argument("--url", metavar="URL", help="a running hypic serve, in the place of --store")
    parser.add_argument("--api-key", metavar="KEY", help="its admin key")
    for label in ("source", "name", "namespace"):
        parser.add_argument(f"--{label}", metavar="TEXT", help=f"only texts with this {label}")
    parser.add_argument("--everything", action="store_true", help="forget: all texts")
    parser.add_argument("--model", metavar="ID", default="", help="clear: only the model whose id begins so")
    parser.add_argument("--remove", action="store_true", help="verify: remove damaged files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Does what is asked.

    Raises:
        InputError: it is not said where, or what to forget.
        CommandError: damaged files were found.
    """
    from hypic_apps.cli.screen import notes, result_object

    if (args.store is None) == (args.url is None):
        raise InputError("say where: pass --store FOLDER, or --url of a running server.")
    _check_meant(args)
    if args.url is not None and args.action not in REMOTE:
        raise InputError(f"a server cannot be asked to {args.action}; pass --store, or one of {', '.join(REMOTE)}.")
    console = notes()
    found = _remote(args) if args.url is not None else _local(args, console)
    if args.json:
        result_object(found)
    else:
        _show(args.action, found)
    if args.action == "verify" and found["damaged"] and not args.remove:
        raise CommandError(f"{len(found['damaged'])} files are damaged; pass --remove to remove them.")
    return 0


def _check_meant(args: argparse.Namespace) -> None:
    is_labelled = any((args.source, args.name, args.namespace))
    if args.model and args.action != "clear":
        raise InputError(f"--model is of hypic cache clear, not of {args.action}; leave it out.")
    if args.model and args.url is not None:
        raise InputError(f"a server has one model, so that --model {args.model} chooses none; leave it out.")
    if args.everything and args.action != "forget":
        raise InputError(f"--everything is of hypic cache forget, not of {args.action}; leave it out.")
    if args.everything and is_labelled:
        raise InputError("pass --everything or labels of what to forget, not both.")
    if args.action == "clear" and is_labelled:
        raise InputError("clear removes all texts, whatever their labels; use hypic cache forget for those of one.")
    if args.action == "forget" and not is_labelled and not args.everything:
        raise InputError("say what to forget with --source, --name or --namespace, or pass --everything.")


def root_of(store: str) -> Path:
    """The folder of a store.

    Raises:
        InputError: there is none.
        ConfigError: a specification without a disk tier.
    """
    from hypic.saved import disk_tier

    path = disk_tier(store).path if "://" in store else Path(store).expanduser()
    assert path is not None, "a disk tier has a path"
    if not path.is_dir():
        raise InputError(f"{str(path)!r} is no folder; pass the folder that the store's disk tier has.")
    return path


# -- a store on disk -------------------------------------------------------------------------------------------------


def _local(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from hypic import saved

    root = root_of(args.store)
    saved.check_readable(root)
    labels = {"source": _as_saved(root, args.source), "name": args.name, "namespace": args.namespace}
    actions: dict[str, Callable[[], dict[str, Any]]] = {
        "ls": lambda: _listed(saved.matching(saved.entries(root), **labels)),
        "stat": lambda: _summed(saved.entries(root)),
        "verify": lambda: _checked(root, args.remove, console),
        "forget": lambda: asdict(saved.forget(root, everything=args.everything, **labels)),
        "gc": lambda: asdict(saved.collect(root)),
        "clear": lambda: {"num_files": saved.clear(root, args.model)},
    }
    found = actions[args.action]()
    if args.action == "forget" and not args.everything and not found["num_files"]:
        asked = ", ".join(f"{label} {text!r}" for label, text in labels.items() if text)
        raise CommandError(f"nothing in {str(root)!r} has {asked}; hypic cache ls shows what is there.")
    return found


def _as_saved(root: Path, source: str | None) -> str | None:
    """A source as entries have it: files are kept under their whole path, wherever they are named from."""
    from hypic.saved import SavedEntry, entries

    if source is None:
        return None
    whole = str(Path(source).expanduser().resolve())
    known = {label.source for entry in entries(root) if isinstance(entry, SavedEntry) for label in entry.labels}
    return whole if source not in known and whole in known else source


def _listed(found: Iterable[SavedEntry | Damaged]) -> dict[str, Any]:
    entries, damaged = _apart(found)
    return {"entries": [_row(entry) for entry in entries], "damaged": [asdict(file) for file in damaged]}


def _row(entry: SavedEntry) -> dict[str, Any]:
    labels = sorted(([x.name, x.source, x.namespace] for x in entry.labels), key=str)
    spaces = [space for space in entry.namespaces if space is not None]
    return {**asdict(entry), "tier": "disk", "labels": labels, "namespaces": spaces}


def _summed(found: Iterable[SavedEntry | Damaged]) -> dict[str, Any]:
    """Sizes by model and namespace; an entry stands in one namespace."""
    entries, damaged = _apart(found)
    groups: dict[tuple[str, str, str, str | None], list[SavedEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.model, entry.dtype, entry.storage, entry.namespaces[0]), []).append(entry)
    rows = [
        {
            "tier": "disk", "model": model, "dtype": dtype, "storage": storage, "namespace": space,
            "num_entries": len(group), "num_tokens": sum(e.num_tokens for e in group),
            "num_bytes": sum(e.num_bytes for e in group), "num_expired": sum(e.is_expired for e in group),
            "used_s": max(e.used_s for e in group),
        }
        for (model, dtype, storage, space), group in sorted(groups.items(), key=str)
    ]  # fmt: skip
    total = sum(entry.num_bytes for entry in entries) + sum(file.num_bytes for file in damaged)
    return {"groups": rows, "num_damaged": len(damaged), "num_bytes": total}


def _checked(root: Path, remove: bool, console: Console) -> dict[str, Any]:
    from hypic import saved
    from hypic_apps.cli.screen import progress

    with progress(console) as bar:
        task = bar.add_task("comparing checksums", total=sum(1 for _ in saved.entries(root)))
        entries, damaged = _apart(saved.verify(root, lambda num_bytes: bar.advance(task)))
    removed = saved.remove(damaged) if remove else 0
    return {
        "num_sound": len(entries),
        "num_bytes": sum(entry.num_bytes for entry in entries),
        "damaged": [asdict(file) for file in damaged],
        "num_removed": removed,
    }


def _apart(found: Iterable[SavedEntry | Damaged]) -> tuple[list[SavedEntry], list[Damaged]]:
    from hypic.saved import Damaged, SavedEntry

    listed = list(found)
    return [e for e in listed if isinstance(e, SavedEntry)], [e for e in listed if isinstance(e, Damaged)]


# -- a running server ------------------------------------------------------------------------------------------------


def _remote(args: argparse.Namespace) -> dict[str, Any]:
    try:
        from hypic.integrations.remote import RemoteEngine
    except ImportError as error:
        raise CommandError(f"{error.name} is missing; install it with pip install 'hypic[apps]'.") from error
    labels = {"source": args.source, "name": args.name, "namespace": args.namespace}
    with RemoteEngine(args.url, api_key=args.api_key) as engine:
        if args.action in ("forget", "clear"):
            return asdict(engine.forget(**labels, everything=args.everything or args.action == "clear"))
        rows = [asdict(entry) for entry in engine.entries()]
    if args.action == "ls":
        return {"entries": rows, "damaged": []}
    return {"groups": _grouped(rows), "num_damaged": 0, "num_bytes": sum(row["num_bytes"] for row in rows)}


def _grouped(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        space = ", ".join(row["namespaces"]) or None
        groups.setdefault((row["tier"], row["kind"], space), []).append(row)
    return [
        {
            "tier": tier, "kind": kind, "namespace": space, "num_entries": len(group),
            "num_tokens": sum(row["num_tokens"] for row in group), "num_bytes": sum(row["num_bytes"] for row in group),
            "num_hits": sum(row["num_hits"] for row in group), "num_pinned": sum(row["is_pinned"] for row in group),
        }
        for (tier, kind, space), group in sorted(groups.items(), key=str)
    ]  # fmt: skip


# -- for people ------------------------------------------------------------------------------------------------------


def _show(action: str, found: dict[str, Any]) -> None:
    from hypic_apps.cli.screen import result

    lines = {"ls": _list_lines, "stat": _stat_lines, "verify": _verify_lines}.get(action, _count_lines)
    for line in lines(found):
        result(line)


def _list_lines(found: dict[str, Any]) -> Iterable[str]:
    from hypic_apps.cli.models import human_bytes

    for row in found["entries"]:
        labels = ", ".join(" ".join(text for text in label[1::-1] if text) for label in row["labels"]) or "-"
        spaces = ", ".join(row["namespaces"])
        more = f"  {row['num_hits']} hits" if "num_hits" in row else ""
        left = "" if row["expires_s"] is None else f"  {max(0, row['expires_s'] - time.time()):,.0f} s left"
        space = f"  [{spaces}]" if spaces else ""
        head = f"{row['key'][:12]}  {row['tier']}  {row['num_tokens']:>6,} tokens  {human_bytes(row['num_bytes']):>10}"
        yield f"{head}{more}{left}{space}  {labels}"
    for file in found["damaged"]:
        yield f"damaged: {file['path']}: {file['reason']}"


def _stat_lines(found: dict[str, Any]) -> Iterable[str]:
    from hypic_apps.cli.models import human_bytes

    for row in found["groups"]:
        what = f"model {row['model']} {row['dtype']} {row['storage']}" if "model" in row else row["kind"]
        counts = f"{row['num_entries']:,} entries, {row['num_tokens']:,} tokens, {human_bytes(row['num_bytes'])}"
        hits = f", {row['num_hits']:,} hits, {row['num_pinned']:,} pinned" if "num_hits" in row else ""
        old = f", {row['num_expired']:,} of them expired" if row.get("num_expired") else ""
        yield f"{row['tier']}  {what}  namespace {row['namespace'] or '-'}: {counts}{hits}{old}"
    damaged = f", {found['num_damaged']:,} damaged files" if found["num_damaged"] else ""
    yield f"in all {human_bytes(found['num_bytes'])}{damaged}"


def _verify_lines(found: dict[str, Any]) -> Iterable[str]:
    from hypic_apps.cli.models import human_bytes

    for file in found["damaged"]:
        yield f"damaged: {file['path']}: {file['reason']}"
    removed = f"; {found['num_removed']:,} damaged files removed" if found["num_removed"] else ""
    yield f"{found['num_sound']:,} entries are sound, {human_bytes(found['num_bytes'])}{removed}"


def _count_lines(found: dict[str, Any]) -> Iterable[str]:
    told = [f"{count:,} {name.removeprefix('num_')}" for name, count in found.items() if count]
    yield "removed: " + (", ".join(told) or "nothing")

"""Candidates for a model's primer, each an arm of ``hypic eval`` beside the others, so that one can be chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hypic_apps.cli.errors import InputError

if TYPE_CHECKING:
    from hypic_apps.eval.arms import Arm


def chosen(names: Sequence[str]) -> list[Arm]:
    """The arms of some text files; they go by the files' names.

    Raises:
        InputError: a file cannot be read or is empty, or two have the same name.
    """
    from hypic_apps.eval.arms import behind

    paths = [Path(name).expanduser() for name in names]
    twice = [name for name, number in Counter(path.stem for path in paths).items() if number > 1]
    if twice:
        raise InputError(f"two files of --primer-file are named {twice[0]!r}; arms go by that name, so rename one.")
    return [behind(path.stem, _text(path)) for path in paths]


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig").strip()  # a byte order mark is no text
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InputError(f"{str(path)!r} cannot be read ({reason}); name a text file.") from error
    if not text:
        raise InputError(f"{str(path)!r} is empty; name a file with a primer in it (the arm unprimed has none).")
    return text

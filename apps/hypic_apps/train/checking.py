"""What is looked at before anything is trained: numbers of the command line, and what a training goes on from."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hypic_apps.train.grid import CHUNK
from hypic_apps.train.rows import STAGES


def count(text: str) -> int:
    """A whole number from 1 up, for argparse."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def begun(text: str) -> float:
    """A share from 0 to below 1, for argparse: where all is over nothing is trained."""
    found = _number(text)
    if not 0.0 <= found < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to below 1, such as 0.67")
    return found


def part(text: str) -> float:
    """A share between 0 and 1, for argparse: all or nothing of something is no part of it."""
    found = _number(text)
    if not 0.0 < found < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1, such as 0.3")
    return found


def chunks(text: str) -> int:
    """A number of tokens that fills chunks, for argparse."""
    found = count(text)
    if found % CHUNK:
        raise argparse.ArgumentTypeError(f"{text!r} is no multiple of {CHUNK}")
    return found


def check_batch(batch_tokens: int, row_tokens: int = STAGES[-1].num_tokens) -> None:
    """
    Raises:
        ValueError: not one row fits into a batch.
    """
    if batch_tokens < row_tokens:
        raise ValueError(f"--batch-tokens {batch_tokens} holds no row of {row_tokens} tokens; name at least so many.")


def check_tensors(place: Path, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """
    Raises:
        ValueError: ``given``, found at ``place``, are not the tensors of the model in training.
    """
    if not given:
        raise ValueError(f"{place} holds no weights; name the folder of an exported model.")
    for name in (*own, *given):
        if name not in own or name not in given or own[name].shape != given[name].shape:
            raise ValueError(f"{place} is of another model than the one in training, as {name} shows.")


def check_state(place: Path, state: Mapping[str, Any], own: Mapping[str, Tensor], *, reuse: bool) -> None:
    """Whether a saved state is one to go on from; older ones do not say whether they were tuned for reuse.

    Raises:
        ValueError: it is of another model, or of another way to train.
    """
    check_tensors(place, state["model"], own)
    if state.get("reuse", reuse) != reuse:
        told = "without" if reuse else "with"
        raise ValueError(f"{place} is of a training {told} --reuse; name another folder with --state.")


def progress_in(report: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """How far the training was that a report is of.

    Raises:
        ValueError: there is no report, or it does not say it.
    """
    way_out = "name a share of it with --at"
    try:
        said = json.loads(report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{report} is missing, which says how far the training was; {way_out}.") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{report} cannot be read ({error}); {way_out}.") from error
    if not isinstance(said, dict) or not all(isinstance(said.get(name), int | float) for name in names):
        raise ValueError(f"{report} does not say how far the training was; {way_out}.")
    return {name: said[name] for name in names}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan

"""Starting the engine for a command: the model's flag, one line while it loads, and what is known of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic.checkpoints import bundled
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.options import add_engine_options, engine_settings

if TYPE_CHECKING:
    from rich.console import Console

    from hypic import LLM, EngineConfig

REAL_MODEL = 'for a real one, download a checkpoint and use: hypic ask --model FOLDER "question" FILES...'


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """``--model`` and a flag per engine setting."""
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="checkpoint folder, or org/name of the Hugging Face Hub (default: the bundled model)",
    )
    add_engine_options(parser)


@dataclass(frozen=True)
class Loaded:
    """An engine with what a command says about its model."""

    llm: LLM
    folder: str
    is_bundled: bool


@contextmanager
def loaded(args: argparse.Namespace, console: Console, defaults: Mapping[str, Any] | None = None) -> Iterator[Loaded]:
    """The engine that the flags ask for; ``defaults`` are settings that flags override.

    Raises:
        InputError: no model was named and none is bundled.
        UnsupportedModel, CheckpointError, ConfigError: as ``hypic.LLM``.
    """
    folder = model_folder(args.model)
    with console.status(f"loading {args.model or folder.name}", spinner="line"):
        from hypic import LLM

        llm = LLM(args.model, **{**(defaults or {}), **engine_settings(args)})
    with llm:
        yield Loaded(llm, args.model or str(folder), args.model is None)


def model_folder(model: str | None) -> Path:
    """The folder that was named, or the bundled one.

    Raises:
        InputError: no model was named and none is bundled.
    """
    if model is not None:
        return Path(model)
    folder = bundled()
    if not folder.is_dir():
        raise InputError("this installation has no bundled model; pass --model FOLDER.")
    return folder


def device_of(config: EngineConfig) -> str:
    """The device that ``auto`` comes to on this machine."""
    import torch

    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"

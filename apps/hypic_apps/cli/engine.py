"""Starting the engine for a command: the model's flag, one line while it loads, and what is known of it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypic.checkpoints import bundled, is_bundled
from hypic_apps.cli.checkpoint import Description, describe
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.options import add_engine_options, engine_settings

if TYPE_CHECKING:
    from rich.console import Console

    from hypic import LLM, EngineConfig

# Reasoning would use up a short answer; chat templates that know no such thing ignore it.
NO_THINKING = {"enable_thinking": False}
REAL_MODEL = """For a real one (0.8 billion parameters: a download of about 2 GB, and 4 GB of memory):
  {example}
or any folder that hypic models FOLDER can load."""


def add_model_options(parser: argparse.ArgumentParser, *, policy: bool = True) -> None:
    """``--model`` and a flag per engine setting; without ``policy`` none for the settings of reuse."""
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="checkpoint folder, or org/name of the Hugging Face Hub (default: hypic-tiny, the bundled model)",
    )
    add_engine_options(parser, policy=policy)


@dataclass(frozen=True)
class Loaded:
    """An engine with what a command says about its model."""

    llm: LLM
    folder: str
    is_bundled: bool
    example: str = 'hypic ask --model Qwen/Qwen3.5-0.8B "question" FILES...'

    @property
    def description(self) -> Description | None:
        """What the checkpoint's files say; ``None`` for a name of the Hub."""
        folder = Path(self.folder).expanduser()
        return describe(folder) if folder.is_dir() else None

    @property
    def introduction(self) -> str:
        """Who answers; of the bundled model also that it is a demo, and how to use a real one."""
        description = self.description
        size = "" if description is None else f" of {description.num_parameters / 1e6:.1f} million parameters"
        if self.is_bundled:
            return f"{self.llm.model_name} answers, a demo model{size}.\n{REAL_MODEL.format(example=self.example)}"
        return f"{self.llm.model_name} answers, a model{size}."


@contextmanager
def loaded(
    args: argparse.Namespace,
    console: Console,
    defaults: Mapping[str, Any] | None = None,
    example: str = Loaded.example,
) -> Iterator[Loaded]:
    """The engine that the flags ask for; ``defaults`` are settings that flags override, and ``example`` is how the
    command is told of a real model.

    Raises:
        InputError: no model was named and none is bundled.
        UnsupportedModel, CheckpointError, ConfigError: as ``hypic.LLM``.
    """
    folder = model_folder(args.model)
    with console.status(f"loading {args.model or folder.name}", spinner="line"):
        from hypic import LLM

        llm = LLM(args.model, **{**(defaults or {}), **engine_settings(args)})
    with llm:
        yield Loaded(llm, str(folder), is_bundled(args.model), example)


def model_folder(model: str | None) -> Path:
    """The folder that was named, or the bundled one.

    Raises:
        InputError: no other model was named and none is bundled.
    """
    if model is not None and not is_bundled(model):
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

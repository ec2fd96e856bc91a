"""The command ``fit``, from options to an exported model: in one process, or in each of several ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer

from hypic_apps.train import checking, corpus, exam, schema
from hypic_apps.train.demo import demo_items
from hypic_apps.train.export import export, tensors_of
from hypic_apps.train.families import FAMILIES
from hypic_apps.train.fit import Log, Training
from hypic_apps.train.loader import Sources
from hypic_apps.train.render import Encoder
from hypic_apps.train.replicas import ALONE, Replica
from hypic_apps.train.rows import DATA_VERSION
from hypic_apps.train.segments import Segmenting
from hypic_apps.train.settings import Progress, Settings

# A model tuned for reuse is another model than the bundled one, and its scores are never given as that one's.
REUSE_NAME = "hypic-tiny-reuse"
Result = TypeVar("Result")


def settings_of(options: argparse.Namespace) -> Settings:
    """How to train."""
    return Settings(
        minutes=options.minutes,
        total_minutes=options.total_minutes,
        learning_rate=options.learning_rate,
        num_workers=options.workers,
        compiled=not (options.plain or options.no_compile),
        graphed=not options.plain,
        reuse=options.reuse,
    )


def segmenting_of(options: argparse.Namespace) -> Segmenting | None:
    """How rows are cut into segments; ``None`` where training is not for reuse."""
    if options.reuse and options.family != "gdn":
        raise SystemExit(f"--reuse trains Gated DeltaNet alone; with --family {options.family} leave it out.")
    if not options.reuse:
        if options.plain_rows is not None:
            raise SystemExit(f"--plain-rows {options.plain_rows} says nothing without --reuse; add it or leave it out.")
        return None
    try:
        return Segmenting() if options.plain_rows is None else Segmenting(plain_share=options.plain_rows)
    except ValueError as error:
        raise SystemExit(f"--plain-rows {options.plain_rows}: {error}") from error


def told(do: Callable[..., Result], *arguments: Any) -> Result:
    """What ``do`` gives; what is wrong with its arguments ends the command with its sentence."""
    try:
        return do(*arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def device_of(replica: Replica = ALONE) -> torch.device:
    """This rank's device, or the one that there is."""
    torch.set_float32_matmul_precision("high")
    return replica.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


def log_of(options: argparse.Namespace, replica: Replica = ALONE) -> Log:
    """The log in the output folder, which is made; rank 0 alone writes it."""
    options.out.mkdir(parents=True, exist_ok=True)
    return Log(options.out / "log.jsonl", silent=replica.rank > 0)


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        SystemExit: options do not fit together.
    """
    segmenting_of(options)
    if options.at is not None and options.start is None:
        raise SystemExit(f"--at {options.at} says nothing without --start; add it or leave it out.")
    told(checking.check_batch, options.batch_tokens)


def fit(replica: Replica, options: argparse.Namespace) -> None:
    """Trains, and on rank 0 grades and exports; the others wait for it."""
    segmenting = segmenting_of(options)
    device, log = device_of(replica), log_of(options, replica)
    sources = Sources(
        options.data / "corpus.tar.xz",
        options.data / "tokenizer" / "tokenizer.json",
        options.batch_tokens,
        segmenting=segmenting,
    )
    training = Training(FAMILIES[options.family](), settings_of(options), device, state_folder(options), replica)
    resumed = told(training.resume) or told(_started, training, options)
    log(event="start", resumed=resumed, gpus=options.gpus, **_reuse_of(segmenting), **vars(training.progress))
    papers = _papers(sources) if replica.rank == 0 else None
    done = training.run(sources, {} if papers is None else papers.all(options.exam_items), log)
    if replica.number > 1:
        log(event="ranks", number=replica.number, same_weights=replica.agrees(training.model.parameters()))
    if papers is not None:
        facts = {"done": done, "data_version": DATA_VERSION, "gpus": options.gpus} | _reuse_of(segmenting)
        _hand_in(training, papers, options, facts, log)
    replica.meet()


def _papers(sources: Sources) -> exam.Papers:
    encoder = Encoder(Tokenizer.from_file(str(sources.tokenizer)))
    return exam.Papers(corpus.Corpus.load(sources.corpus), schema.load(), encoder)


def _hand_in(
    training: Training, papers: exam.Papers, options: argparse.Namespace, facts: dict[str, Any], log: Log
) -> None:
    """Exports the model, and writes what it can do beside it."""
    export(training.model, None if options.no_tokenizer else options.data / "tokenizer", options.out)
    report = facts | vars(training.progress)
    num_items = (4 if report["done"] else 1) * options.exam_items
    report["grades"] = training.examine(papers.all(num_items), torch.bfloat16)
    report["demo"] = demo_items(training.judge, papers, training.device)
    (options.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log(event="end", **report)


def state_folder(options: argparse.Namespace) -> Path:
    """Where the state is kept between calls: with the data, unless it is named."""
    return Path(options.state or options.data / ("state-reuse" if options.reuse else "state"))


def _reuse_of(segmenting: Segmenting | None) -> dict[str, Any]:
    """What a report says of the tuning for reuse; nothing of a plain training."""
    if segmenting is None:
        return {}
    return {"name": REUSE_NAME, "reuse": True, "seam": segmenting.policy.seam, "plain_rows": segmenting.plain_share}


def _started(training: Training, options: argparse.Namespace) -> bool:
    """Weights of an exported folder, and how far their training was: as its report says, or as ``--at`` does.

    Raises:
        ValueError: the folder is of another model, or there is nothing left to train.
    """
    if options.start is None:
        return False
    if options.at is not None:
        progress = Progress(trained_s=60.0 * options.at * options.total_minutes)
    else:
        progress = Progress(**checking.progress_in(options.start / "evaluation.json", tuple(vars(Progress()))))
    tensors = tensors_of(options.start)
    checking.check_tensors(options.start, tensors, training.model.checkpoint())
    training.start_from(tensors, progress)
    if progress.share(training.settings) >= 1.0:
        raise ValueError(f"the training of {options.start} was over; say with --at where to begin, such as --at 0.67.")
    return True

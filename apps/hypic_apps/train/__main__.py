"""``python -m hypic_apps.train data | tokenizer | probe | fit | exam``: see ``README.md`` in this folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer

from hypic_apps.train import checking, corpus, exam, schema, scores, smoke, texts, vocabulary
from hypic_apps.train.demo import demo_items
from hypic_apps.train.export import export, tensors_of
from hypic_apps.train.families import FAMILIES
from hypic_apps.train.fit import Log, Progress, Settings, Training
from hypic_apps.train.loader import Sources
from hypic_apps.train.model import Shape
from hypic_apps.train.probe import probe
from hypic_apps.train.render import Encoder
from hypic_apps.train.rows import DATA_VERSION
from hypic_apps.train.segments import Segmenting

DATA = Path(".data")
# A model tuned for reuse is another model than the bundled one, and its scores are never given as that one's.
REUSE_NAME = "hypic-tiny-reuse"
Result = TypeVar("Result")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    commands = {"data": _data, "tokenizer": _tokenizer, "probe": _probe, "fit": _fit, "exam": _exam}
    commands[options.command](options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hypic_apps.train", description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of training text, tokenizer and states")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data", help="fetch the packages and write corpus.tar.xz")
    commands.add_parser("tokenizer", help="learn the vocabulary")
    for name in ("probe", "fit"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="folder for the log and the exported model")
        command.add_argument(
            "--family",
            choices=tuple(FAMILIES),
            default="gdn",
            help="gdn is the bundled model, ring its sibling with Lightning attention and rotary keys",
        )
        command.add_argument("--batch-tokens", type=checking.count, default=65_536)
        command.add_argument(
            "--reuse",
            action="store_true",
            help="tune for answers through segments; its state is kept in a folder of its own, see README.md",
        )
        command.add_argument(
            "--plain-rows",
            type=float,
            metavar="SHARE",
            help="the share of rows that --reuse leaves without segments; default 0.25",
        )
        command.add_argument("--plain", action="store_true", help="neither compile nor capture")
        command.add_argument("--no-compile", action="store_true", help="capture, but do not compile")
        command.add_argument("--workers", type=checking.count, default=12)
        command.add_argument("--minutes", type=checking.above_zero, default=9.0, help="at most so long in this call")
        command.add_argument("--total-minutes", type=checking.above_zero, default=18.0, help="the whole training")
        command.add_argument("--learning-rate", type=checking.above_zero, default=2e-3)
        command.add_argument(
            "--state",
            type=Path,
            help="folder of the state between calls; default state in that of --data, with --reuse state-reuse",
        )
        command.add_argument("--start", type=Path, help="an exported folder to go on from if there is no state")
        command.add_argument(
            "--at",
            type=checking.begun,
            metavar="SHARE",
            help="begin --start at this share of the training, not where it was",
        )
        command.add_argument("--exam-items", type=checking.count, default=128)
        command.add_argument(
            "--no-tokenizer", action="store_true", help="leave the tokenizer's files out of the export"
        )
        command.add_argument("--length", type=checking.chunks, default=2048, help="row length of the probe")
    _add_exam(commands.add_parser("exam", help="one-hop questions at an exported model; prints JSON"))
    return parser


def _add_exam(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, required=True, help="an exported folder with its tokenizer")
    command.add_argument("--items", type=int, default=500, help="questions under full recompute")
    command.add_argument("--reuse-items", type=int, default=200, help="of these, asked with and without segments too")
    command.add_argument("--passages", type=int, default=16)
    command.add_argument("--seed", type=int, default=scores.SEED, help="0 has the items that training graded")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--smoke", type=Path, help="only write the items, without real text, to this .json.xz file")


def _data(options: argparse.Namespace) -> None:
    print(corpus.build(options.data))


def _tokenizer(options: argparse.Namespace) -> None:
    text = corpus.Corpus.load(options.data / "corpus.tar.xz")
    made = vocabulary.train(texts.merge_texts(text, schema.load()))
    vocabulary.save(made, options.data / "tokenizer", Shape().max_position_embeddings)


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        minutes=options.minutes,
        total_minutes=options.total_minutes,
        learning_rate=options.learning_rate,
        num_workers=options.workers,
        compiled=not (options.plain or options.no_compile),
        graphed=not options.plain,
        reuse=options.reuse,
    )


def _segmenting(options: argparse.Namespace) -> Segmenting | None:
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


def _told(do: Callable[..., Result], *arguments: Any) -> Result:
    """What ``do`` gives; what is wrong with its arguments ends the command with its sentence."""
    try:
        return do(*arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def _device() -> torch.device:
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _log(options: argparse.Namespace) -> Log:
    options.out.mkdir(parents=True, exist_ok=True)
    return Log(options.out / "log.jsonl")


def _probe(options: argparse.Namespace) -> None:
    if options.plain_rows is not None:
        raise SystemExit("the probe's rows are all alike; leave --plain-rows out.")
    _segmenting(options)
    _told(checking.check_batch, options.batch_tokens, options.length)
    probe(
        FAMILIES[options.family](), _settings(options), _device(), options.batch_tokens, options.length, _log(options)
    )


def _fit(options: argparse.Namespace) -> None:
    segmenting = _segmenting(options)
    if options.at is not None and options.start is None:
        raise SystemExit(f"--at {options.at} says nothing without --start; add it or leave it out.")
    _told(checking.check_batch, options.batch_tokens)
    device, log = _device(), _log(options)
    sources = Sources(
        options.data / "corpus.tar.xz",
        options.data / "tokenizer" / "tokenizer.json",
        options.batch_tokens,
        segmenting=segmenting,
    )
    training = Training(FAMILIES[options.family](), _settings(options), device, _state_folder(options))
    resumed = _told(training.resume) or _told(_started, training, options)
    log(event="start", resumed=resumed, **_reuse_of(segmenting), **vars(training.progress))
    encoder = Encoder(Tokenizer.from_file(str(sources.tokenizer)))
    papers = exam.Papers(corpus.Corpus.load(sources.corpus), schema.load(), encoder)
    done = training.run(sources, papers.all(options.exam_items), log)
    export(training.model, None if options.no_tokenizer else options.data / "tokenizer", options.out)
    report: dict[str, Any] = {"done": done, "data_version": DATA_VERSION, **vars(training.progress)}
    report |= _reuse_of(segmenting)
    report["grades"] = training.examine(papers.all((4 if done else 1) * options.exam_items), torch.bfloat16)
    report["demo"] = demo_items(training.judge, papers, device)
    (options.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log(event="end", **report)


def _state_folder(options: argparse.Namespace) -> Path:
    """Where the state is kept between calls: with the data, unless it is named."""
    return Path(options.state or options.data / ("state-reuse" if options.reuse else "state"))


def _reuse_of(segmenting: Segmenting | None) -> dict[str, Any]:
    """What a report says of the tuning for reuse; nothing of a plain training."""
    if segmenting is None:
        return {}
    return {"name": REUSE_NAME, "reuse": True, "seam": segmenting.policy.seam, "plain_rows": segmenting.plain_share}


def _exam(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    encoder = Encoder(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    papers = exam.Papers(corpus.Corpus.load(options.data / "corpus.tar.xz"), schema.load(), encoder)
    maker = papers.worlds(options.passages, "test", "1hop", plain=options.smoke is not None)
    items = papers.items(maker, options.items, options.seed)
    if options.smoke is not None:
        smoke.write(items, options.smoke)
        return
    found = {"passages": options.passages, "seed": options.seed, **scores.one_hop(options.model, papers, items)}
    if options.reuse_items:
        found["reuse"] = scores.reuse(options.model, items[: options.reuse_items], options.threads)
    print(json.dumps(found, indent=2))


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


if __name__ == "__main__":
    raise SystemExit(main())

"""``python -m hypic_apps.train data | tokenizer | probe | fit | exam | average``: see ``README.md`` in this folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from hypic_apps.cli.parser import above_zero
from hypic_apps.train import checking, corpus, exam, fitting, replicas, schema, scores, smoke, texts, vocabulary
from hypic_apps.train.export import average
from hypic_apps.train.families import FAMILIES
from hypic_apps.train.model import Shape
from hypic_apps.train.probe import probe
from hypic_apps.train.render import Encoder

DATA = Path(".data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    commands = {
        "data": _data,
        "tokenizer": _tokenizer,
        "probe": _probe,
        "fit": _fit,
        "exam": _exam,
        "average": _average,
    }
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
        command.add_argument("--workers", type=checking.count, default=12, help="processes that make rows, per GPU")
        if name == "fit":
            command.add_argument(
                "--gpus", type=checking.count, default=1, help="GPUs of this host to train on, each on other batches"
            )
        command.add_argument("--minutes", type=above_zero, default=9.0, help="at most so long in this call")
        command.add_argument("--total-minutes", type=above_zero, default=18.0, help="the whole training")
        command.add_argument("--learning-rate", type=above_zero, default=2e-3)
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
    mean = commands.add_parser("average", help="export the mean of two exported folders' weights")
    mean.add_argument("--model", type=Path, required=True, help="an exported folder")
    mean.add_argument("--other", type=Path, required=True, help="another one of the same shape")
    mean.add_argument("--share", type=checking.part, default=0.5, help="how much of the other's (default: 0.5)")
    mean.add_argument("--out", type=Path, required=True, help="folder for the result")
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


def _probe(options: argparse.Namespace) -> None:
    if options.plain_rows is not None:
        raise SystemExit("the probe's rows are all alike; leave --plain-rows out.")
    fitting.segmenting_of(options)
    fitting.told(checking.check_batch, options.batch_tokens, options.length)
    probe(
        FAMILIES[options.family](),
        fitting.settings_of(options),
        fitting.device_of(),
        options.batch_tokens,
        options.length,
        fitting.log_of(options),
    )


def _fit(options: argparse.Namespace) -> None:
    fitting.check(options)
    fitting.told(replicas.check_gpus, options.gpus)
    if options.gpus == 1:
        fitting.fit(replicas.ALONE, options)
    else:
        replicas.launch(options.gpus, "cuda", fitting.fit, options)


def _average(options: argparse.Namespace) -> None:
    fitting.told(average, options.model, options.other, options.share, options.out)


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


if __name__ == "__main__":
    raise SystemExit(main())

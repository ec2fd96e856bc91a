"""``hypic demo``: the main job on a bundled corpus; questions, answers, what was reused, and what that saved."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hypic_apps.cli import corpora
from hypic_apps.cli.engine import Loaded, add_model_options, loaded
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hypic_apps.bench.peers import Transformers
    from hypic_apps.cli.corpora import Question
    from hypic_apps.cli.outcome import Answer, Measured
    from hypic_apps.cli.pipeline import Pipeline
    from hypic_apps.cli.timing import Case

SUMMARY = "answer questions from a bundled corpus and measure it"
EXAMPLES = """
hypic demo                            answers and times, two minutes
hypic demo --quick --json             fewer questions, one round, for programs
hypic demo --model path/to/checkpoint
hypic demo --corpus my-folder         .txt and .md files and a questions.json
"""
DETAILS = """Indexes the corpus, asks its questions through a LangChain pipeline, and then
measures the time to the first token of each prompt: everything computed (full),
all passages encoded first (cold), all passages found (warm), and transformers'
own prefill of the same token ids."""
QUICK_QUESTIONS = 3


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "demo", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_QUESTIONS} questions, measured once")
    parser.add_argument("--corpus", metavar="FOLDER", help="text files and a questions.json of your own")
    parser.add_argument("--k", type=positive, default=16, help="passages per question (default: 16)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="most measurements of each time")
    parser.add_argument("--budget-s", type=float, default=60.0, metavar="SECONDS", help=argparse.SUPPRESS)
    parser.add_argument("--max-tokens", type=positive, default=48, metavar="N", help="longest answer (default: 48)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the answers")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Indexes, asks, measures, tells."""
    corpus = corpora.bundled() if args.corpus is None else corpora.of_folder(Path(args.corpus))
    questions = corpus.questions[:QUICK_QUESTIONS] if args.quick else corpus.questions

    from hypic_apps.cli import outcome
    from hypic_apps.cli.pipeline import Pipeline
    from hypic_apps.cli.retrieval import index_documents
    from hypic_apps.cli.screen import notes, result_object

    console = notes()
    index = index_documents(corpus.documents, console)
    with loaded(args, console, {"dtype": "float32"}) as model:
        console.print(f"{len(corpus.documents)} documents, {len(index)} passages, searched with BM25.")
        console.print(model.introduction)
        pipeline = Pipeline.build(model.llm, index, args.k, args.max_tokens)
        asked = [_ask(pipeline, question, console, streams=not args.json) for question in questions]
        measured = _measure(model, [answer.case for answer in asked], args, console)
        found = outcome.Outcome(asked, measured, model)
        outcome.show_times(console, found)
        if args.json:
            result_object(found.as_json())
        else:
            outcome.show_conclusion(found)
    return 0


def _ask(pipeline: Pipeline, question: Question, console: Console, *, streams: bool) -> Answer:
    """One question through the pipeline; the answer streams to stdout, the passages go to stderr."""
    from hypic_apps.cli.outcome import Answer
    from hypic_apps.cli.reports import show_counts, show_passages
    from hypic_apps.cli.screen import result

    if streams:
        result(f"\nQ: {question.question}\nA: ", end="")
    pieces = []
    for piece in pipeline.stream(question.question):
        pieces.append(piece)
        if streams:
            result(piece, end="")
    answer = Answer(question, "".join(pieces).strip(), *pipeline.last(question.question))
    if streams:
        result(f"\n   {answer.verdict}")
    show_passages(console, answer.report, [segment.text for segment in answer.case.segments])
    show_counts(console, answer.report)
    return answer


def _measure(model: Loaded, cases: Sequence[Case], args: argparse.Namespace, console: Console) -> Measured:
    """All arms on all prompts, with a bar."""
    from hypic_apps.cli.outcome import Measured
    from hypic_apps.cli.screen import progress, working
    from hypic_apps.cli.timing import arms, measure

    with working(console, "loading the same checkpoint with transformers"):
        peer, problem = _peer(model, cases[0])
    rounds, budget_s = (1, 0.0) if args.quick else (args.rounds, args.budget_s)
    with progress(console, refreshes=False) as bar:
        task = bar.add_task("measuring", total=rounds * len(cases))

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        times = measure(cases, arms(model.llm, peer), rounds, budget_s, advance)
    return Measured(times, None if peer is None else peer.version, problem)


def _peer(model: Loaded, case: Case) -> tuple[Transformers | None, str]:
    """transformers with the same checkpoint, type, device and threads; or ``None`` and why not."""
    from hypic_apps.bench.peers import PeerError, Transformers
    from hypic_apps.cli.engine import device_of
    from hypic_apps.cli.timing import token_ids

    config = model.llm.config
    if config.dtype == "auto":
        return None, "with --dtype auto the two might not use the same type; name one."
    try:
        peer = Transformers.load(model.folder, device_of(config), config.dtype)
        peer.prefill(token_ids(model.llm, case))
    except PeerError as error:
        return None, str(error)
    return peer, ""

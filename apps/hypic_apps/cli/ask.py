"""``hypic ask``: questions about the user's own text files, answered from passages that are computed once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.engine import NO_THINKING, Loaded, add_model_options, loaded
from hypic_apps.cli.files import checked_text, read_all
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

if TYPE_CHECKING:
    from rich.console import Console

    from hypic import Completion, Prompt, SamplingParams
    from hypic_retriever.index import Index

SUMMARY = "answer questions from your own text files"
EXAMPLES = """
hypic ask "How long is the notice period?" handbook.md
hypic ask "Who leads the project?" notes/ -q "When does it end?"
hypic ask "What does it cost?" offers/ --k 16 --compare
hypic ask "What does it cost?" offers/ --model path/to/checkpoint --json
"""
DETAILS = """Files are UTF-8 text; folders are searched for .txt and .md. The passages that
fit the question go to the model as segments: a passage that an earlier question
brought up is not computed again, wherever it stands in the prompt."""


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "ask", "QUESTION FILES...", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("question", metavar="QUESTION", help="the first question, in quotation marks")
    parser.add_argument("paths", nargs="+", metavar="FILES", help="text files and folders")
    parser.add_argument("-q", "--question", action="append", default=[], dest="more", metavar="QUESTION",
                        help="a further question; may be given several times")  # fmt: skip
    parser.add_argument("--k", type=positive, default=8, help="passages per question (default: 8)")
    parser.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="longest answer (default: 128)")
    parser.add_argument("--thinking", action="store_true", help="let the model think first, if it can")
    parser.add_argument("--compare", action="store_true", help="also answer with everything computed anew")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the answers")
    add_model_options(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Asking:
    """What all questions of one call have in common."""

    model: Loaded
    index: Index
    console: Console
    sampling: SamplingParams
    k: int
    compare: bool
    streams: bool
    template: dict[str, Any]

    def answer(self, question: str) -> dict[str, Any]:
        """Asks one question, shows how it went, and returns what a program wants to know."""
        from hypic import Prompt
        from hypic_apps.cli.reports import as_json, show_counts, show_passages
        from hypic_apps.cli.retrieval import search, segments

        passages = search(self.index, question, self.k)
        prompt = Prompt(segments(passages), tail=question)
        answer = self._told(prompt)
        assert answer.report is not None, "a whole answer comes with its report"
        show_passages(self.console, answer.report, [p.text for p in passages])
        show_counts(self.console, answer.report)
        full = self._recomputed(prompt) if self.compare else {}
        return {"question": question, "answer": answer.text.strip(), **as_json(answer.report), **full}

    def _told(self, prompt: Prompt) -> Completion:
        from hypic import Completion
        from hypic_apps.cli.screen import result

        pieces = []
        for piece in self.model.llm.stream(prompt, self.sampling, chat_template_kwargs=self.template):
            pieces.append(piece)
            if self.streams:
                result(piece.text if len(pieces) > 1 else piece.text.lstrip(), end="")
        if self.streams:
            result()
        return Completion.join(pieces)

    def _recomputed(self, prompt: Prompt) -> dict[str, Any]:
        """The answer without reuse, and its time to the first token."""
        from hypic_apps.cli.reports import counts

        policy = self.model.llm.config.policy.with_(reuse="none")
        full = self.model.llm.generate(prompt, self.sampling, policy=policy, chat_template_kwargs=self.template)
        assert full.report is not None, "a whole answer comes with its report"
        self.console.print(f"\nwith everything computed anew: {full.text.strip()}")
        self.console.print(counts(full.report), style="dim")
        return {"full": {"answer": full.text.strip(), "ttft_s": full.report.times_s["ttft"]}}


def run(args: argparse.Namespace) -> int:
    """Reads, indexes, loads, asks."""
    questions = [checked_text(question, "a question") for question in (args.question, *args.more)]
    files = read_all(args.paths)

    from hypic import SamplingParams
    from hypic_apps.cli.retrieval import index_documents
    from hypic_apps.cli.screen import notes, result_object

    console = notes()
    index = index_documents(files, console)
    with loaded(args, console) as model:
        console.print(model.introduction, style="dim")
        sampling = SamplingParams(max_tokens=args.max_tokens)
        template = {} if args.thinking else NO_THINKING
        asking = Asking(model, index, console, sampling, args.k, args.compare, not args.json, template)
        found = []
        for question in questions:
            console.print(f"\n{question}", style="bold")
            found.append(asking.answer(question))
    if args.json:
        result_object({"model": args.model or "bundled", "questions": found})
    return 0

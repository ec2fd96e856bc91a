"""``hypic chat``: a conversation in the terminal; each turn computes only what is new in it."""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING, Any

from hypic_apps.cli.engine import NO_THINKING, add_model_options, loaded
from hypic_apps.cli.errors import InputError
from hypic_apps.cli.files import checked_text
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

if TYPE_CHECKING:
    from rich.console import Console

    from hypic import LLM, SamplingParams

SUMMARY = "talk with a model"
EXAMPLES = """
hypic chat
hypic chat --model path/to/checkpoint --system "You answer in one sentence."
printf 'Hello\\nAnd again\\n' | hypic chat 2>/dev/null
"""
DETAILS = """One line is one message. /new begins anew, /exit or the end of input leaves."""
PROMPT = "> "


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "chat", "", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N", help="longest answer (default: 256)")
    parser.add_argument("--thinking", action="store_true", help="let the model think first, if it can")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads lines until the input ends."""
    head = [] if args.system is None else [_message("system", checked_text(args.system, "the system message"))]

    from hypic import SamplingParams
    from hypic_apps.cli.screen import notes

    console = notes()
    _keep_every_byte()
    with loaded(args, console, example="hypic chat --model Qwen/Qwen3.5-0.8B") as model:
        console.print(model.introduction, style="dim")
        sampling = SamplingParams(max_tokens=args.max_tokens)
        template = {} if args.thinking else NO_THINKING
        messages = list(head)
        while (line := _read(console)) is not None:
            if line == "/new":
                messages = list(head)
            elif line and _is_readable(line):
                messages.append(_message("user", line))
                messages.append(_message("assistant", _answer(model.llm, messages, sampling, template, console)))
    return 0


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _keep_every_byte() -> None:
    """Bytes that are no UTF-8 are read, so that their line alone is refused; a strict stdin would end the program."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _is_readable(line: str) -> bool:
    """Whether a line is text; if not, a sentence says so and the conversation goes on."""
    try:
        checked_text(line, "the message")
    except InputError as error:
        print(f"hypic: {error}", file=sys.stderr)
        return False
    return True


def _read(console: Console) -> str | None:
    """The next line, ``None`` when there is no more; the prompt is shown to people only."""
    if sys.stdin.isatty():
        console.print(PROMPT, end="", style="bold")
    line = sys.stdin.readline()
    return None if not line or line.strip() == "/exit" else line.strip()


def _answer(
    llm: LLM,
    messages: list[dict[str, Any]],
    sampling: SamplingParams,
    template: dict[str, Any],
    console: Console,
) -> str:
    """Streams one answer to stdout; its counts go to stderr."""
    from hypic_apps.cli.reports import show_counts
    from hypic_apps.cli.screen import result

    texts = []
    for piece in llm.stream(messages, sampling, chat_template_kwargs=template):
        texts.append(piece.text)
        result(piece.text, end="")
        if piece.report is not None:
            result()
            show_counts(console, piece.report)
    return "".join(texts)

"""``hypic``: reads the command line, runs one command, turns what goes wrong into one sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. Results go to stdout, all else to stderr. No command
needs make, fork or fcntl; torch, rich and frameworks are imported by the commands that use them.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from hypic import __version__
from hypic.errors import ConfigError, HypicError, PromptError, UnsupportedModel
from hypic_apps.cli import app, ask, bench, cache, chat, compare, demo, eval, models, serve, warm
from hypic_apps.cli.errors import CommandError, InputError
from hypic_apps.cli.parser import Parser

BAD_INPUT = (ConfigError, PromptError, UnsupportedModel)
INTERRUPTED = 130
# What pathlib says of a path such as "~nobody/file", wherever a command reads one.
NO_HOME = "Could not determine home directory"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command of ``argv`` (by default the process's own); returns the exit code."""
    _forgive_terminals()
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout is gone; a second error when Python flushes it at exit would only be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="hypic",
        description="Answers from documents whose computed state is kept and reused at any place of a prompt.",
        epilog="hypic COMMAND --help shows a command's options and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hypic {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for command in (demo, app, ask, chat, serve, warm, cache, models, compare, eval, bench):
        command.add(commands)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    try:
        parser = build()
        args = parser.parse_args(argv)
        if "run" not in args:
            parser.print_help(sys.stderr)
            return 2
        run: Callable[..., int] = args.run
        return run(args)
    except SystemExit as leaving:  # --help and --version
        return leaving.code if isinstance(leaving.code, int) else 0
    except CommandError as error:
        return _fail(error, error.exit_code)
    except HypicError as error:
        return _fail(error, 2 if isinstance(error, BAD_INPUT) else 1)
    except RuntimeError as error:
        if NO_HOME not in str(error):
            raise
        return _fail(InputError("a path begins with '~' and a name that no user here has; write the folder out."), 2)


def _fail(error: Exception, code: int) -> int:
    print(f"hypic: {error}", file=sys.stderr)
    return code


def _forgive_terminals() -> None:
    """A terminal that cannot show a character shows a question mark instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())

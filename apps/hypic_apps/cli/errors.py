"""What a command raises on purpose: one sentence, and the exit code that goes with it."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot go on; exit code 1."""

    exit_code = 1


class InputError(CommandError):
    """What was given cannot be used: a file, a text, an argument; exit code 2."""

    exit_code = 2

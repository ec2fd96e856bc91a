"""``python -m hypic_apps.bench``: as ``hypic bench``, and needs neither rich nor any framework."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hypic.errors import ConfigError, HypicError, UnsupportedModel
from hypic_apps.bench import command
from hypic_apps.cli.errors import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one measurement; exit codes as those of ``hypic``."""
    try:
        return command.main(argv)
    except SystemExit as leaving:  # --help
        return leaving.code if isinstance(leaving.code, int) else 0
    except CommandError as error:
        return _fail(error, error.exit_code)
    except HypicError as error:
        return _fail(error, 2 if isinstance(error, ConfigError | UnsupportedModel) else 1)


def _fail(error: Exception, code: int) -> int:
    print(f"hypic: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

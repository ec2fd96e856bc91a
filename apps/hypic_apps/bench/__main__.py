"""``python -m hypic_apps.bench``: as ``hypic bench``, for a working tree where the command is not installed."""

from __future__ import annotations

import sys

from hypic_apps.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))

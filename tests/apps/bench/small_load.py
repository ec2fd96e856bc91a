"""``hypic bench load`` on the tiny geometry with few documents, and its result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hypic_apps.cli.main import main

TINY = ["--geometry", "tiny", "--threads", "1", "--memory", "64MiB"]
FEW = ["--documents", "12", "--documents-each", "4", "--document-tokens", "48", "--output-tokens", "3"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "load", *TINY, *FEW, "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found

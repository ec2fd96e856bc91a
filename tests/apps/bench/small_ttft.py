"""``hypic bench ttft`` on the tiny geometry, as quick as it can be, and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hypic_apps.cli.main import main

ROOT = Path(__file__).parents[3]
SMALL = ["--geometry", "tiny", "--segments", "2", "--segment-tokens", "48", "--tail-tokens", "8"]
QUICK = ["--runs", "2", "--warmup", "0", "--threads", "1", "--decode-tokens", "2", "--memory", "64MiB"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "ttft", *SMALL, *QUICK, "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def by_arm(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {record["arm"]: record for record in result["records"]}

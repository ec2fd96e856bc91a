"""``hypic app`` as a process of its own: it says where the page is, serves it, and ends when it is told to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.apps.cli_files import SMALL, checkpoint

ROOT = Path(__file__).parents[3]


def test_the_command_serves_the_page_until_it_is_told_to_stop(tmp_path: Path) -> None:
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "retriever", "apps"))
    model = str(checkpoint(tmp_path / "tiny-hybrid"))
    command = [sys.executable, "-m", "hypic_apps.cli.main", "app", "--port", "0", "--model", model, *SMALL]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = _told(process)
            found = re.search(r"the page is at (http://127\.0\.0\.1:\d+/)", told)
            assert found is not None, told
            page = urllib.request.urlopen(found[1], timeout=30).read().decode()
            assert "Ask your documents" in page and page.count("<script") == 1
            state = urllib.request.urlopen(found[1] + "api/state", timeout=30).read().decode()
            assert '"introduction":"tiny-hybrid answers, a model of 0.1 million parameters."' in state
            assert '"advice":""' in state, "advice is for the bundled model only"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def _told(process: subprocess.Popen[str]) -> str:
    """What the command prints up to the line with the address, or all of it if there is none."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "the page is at" in line:
            break
    return "".join(lines)

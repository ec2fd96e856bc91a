"""Workers on two hosts, which network namespaces stand for: other addresses, and a cable that can be pulled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import qwen

ISOLATED = ("unshare", "--map-root-user", "--net")


def can_isolate() -> bool:
    """Whether this system lets its users make network namespaces, and interfaces in them."""
    if any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        return False
    made = subprocess.run(
        [*ISOLATED, "ip", "link", "add", "front", "type", "veth", "peer", "name", "worker"], capture_output=True
    )
    return made.returncode == 0


@pytest.mark.skipif(not can_isolate(), reason="needs network namespaces")
@pytest.mark.timeout(300)
def test_a_worker_of_another_host_encodes_and_comes_back_when_the_network_does(tmp_path: Path) -> None:
    command = [*ISOLATED, sys.executable, "-m", "tests.engine.parallel.two_hosts", str(qwen(tmp_path / "model"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] == [True, True, True] and not found["leaked"]
    assert found["host"] == "10.9.0.2" and found["carrier"] == "gloo" and found["came"] == 3 and not found["fell_back"]
    assert found["fell_back_then"] > 0 and found["cut_s"] < 20
    assert found["came_again"] == 3

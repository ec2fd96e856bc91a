"""A front and a worker on two hosts, as far as the network can tell: each in a network namespace of its own, and a pair
of virtual interfaces between them. Run inside ``unshare --map-root-user --net``; says what it found as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypic.engine.parallel.liveness import Times
from hypic.engine.parallel.processes import LocalProcess
from hypic.engine.sizing import Need
from tests.engine.parallel.running import ENCODING, cold_prompt, running, until

FRONT, WORKER = "10.9.0.1", "10.9.0.2"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def linked() -> subprocess.Popen[bytes]:
    """A process in a namespace of its own, reached at ``WORKER``."""
    other = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    own = Path("/proc/self/ns/net").readlink()
    until(lambda: Path(f"/proc/{other.pid}/ns/net").readlink() != own)
    there = ("nsenter", "--target", str(other.pid), "--net")
    run("ip", "link", "add", "front", "type", "veth", "peer", "name", "worker", "netns", str(other.pid))
    run("ip", "address", "add", f"{FRONT}/24", "dev", "front")
    run(*there, "ip", "address", "add", f"{WORKER}/24", "dev", "worker")
    for command in (("ip", "link", "set"), (*there, "ip", "link", "set")):
        run(*command, "lo", "up")
        run(*command, "front" if command[0] == "ip" else "worker", "up")
    return other


def main(folder: Path) -> dict[str, Any]:
    other = linked()

    def launch(spec: Mapping[str, Any]) -> LocalProcess:
        there = ("nsenter", "--target", str(other.pid), "--net")
        return LocalProcess({**spec, "host": "0.0.0.0"}, there)

    setup = replace(ENCODING, planner="round-robin", launch=launch, host=FRONT, times=Times(pause_s=0.05))
    prompts = [cold_prompt(seed) for seed in range(3)]
    with running(folder, 1) as alone:
        expected = [alone.ask(prompt)[0] for prompt in prompts]
    try:
        with running(folder, 2, setup) as engine:
            peers = engine.workers.peers
            found = [engine.ask(prompts[0])[0]]
            result: dict[str, Any] = {"host": peers.view.peers[1].hello.host, "carrier": peers.view.peers[1].carrier}
            result |= {"came": peers.counts.came, "fell_back": peers.counts.fell_back}
            run("ip", "link", "set", "front", "down")
            started = time.monotonic()
            found.append(engine.ask(prompts[1])[0])
            result |= {"cut_s": time.monotonic() - started, "fell_back_then": peers.counts.fell_back}
            run("ip", "link", "set", "front", "up")
            until(lambda: peers.ready() == 1, 90)
            came = peers.counts.came
            found.append(engine.ask(prompts[2])[0])
            result |= {"came_again": peers.counts.came - came, "leaked": engine.leaked() != Need()}
        return {**result, "same": [one == other for one, other in zip(found, expected, strict=True)]}
    finally:
        other.kill()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

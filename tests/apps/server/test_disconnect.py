"""A client that goes away: what it held is free within two of the engine's steps, whatever it was waiting for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM
from hypic_apps.server.app import create_app
from tests.apps.server.serving import in_thread, until

STEP_S = 0.15
TEXT = "The mill on the river was built in 1871 by the people of the village, who ground rye there. "
PREFILL = {"messages": [{"role": "user", "content": TEXT * 20}], "max_tokens": 4}
DECODE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2000, "ignore_eos": True}
PARTS = [{"type": "text", "text": TEXT * 20}, {"type": "text", "text": "?"}]
ENCODE = {"messages": [{"role": "user", "content": PARTS}]}
BATCH = {"prompt": [TEXT * 20, "Hello"], "max_tokens": 2000, "ignore_eos": True}


class Slow:
    """An engine whose steps take ``STEP_S`` and are counted."""

    def __init__(self, llm: LLM) -> None:
        self.engine: Any = llm._loop._engine
        self.num_steps, self._step = 0, self.engine.step
        self.engine.step = self.step

    def step(self) -> Any:
        time.sleep(STEP_S)
        self.num_steps += 1
        return self._step()

    @property
    def num_requests(self) -> int:
        return len(self.engine.scheduler.waiting) + len(self.engine.scheduler.running)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Slow, LLM]]:
    with LLM(str(folder), memory="64MiB", threads=1, max_step_tokens=16) as llm:
        slow = Slow(llm)
        with in_thread(create_app(llm, keep_alive_s=0.1)) as root:
            yield root, slow, llm


def connect(root: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that has sent its request and reads nothing."""
    client = socket.create_connection(("127.0.0.1", int(root.rpartition(":")[2])))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "num"),
    [
        ("/v1/chat/completions", PREFILL, 1),
        ("/v1/chat/completions", DECODE, 1),
        ("/v1/chat/completions", ENCODE, 1),
        ("/v1/completions", BATCH, 2),
    ],
    ids=["prefill", "decode", "encode", "batch"],
)
def test_its_requests_are_gone_within_two_steps(
    path: str, body: dict[str, Any], num: int, stream: bool, served: tuple[str, Slow, LLM]
) -> None:
    root, slow, llm = served
    llm.forget(everything=True)
    free = llm.stats()["pool"]["free"]
    client = connect(root, path, {**body, "stream": stream})
    until(lambda: slow.num_requests == num)
    begun = slow.num_steps
    until(lambda: slow.num_steps >= begun + 2)
    assert slow.num_requests == num, "it is under way"
    client.close()
    left = slow.num_steps
    until(lambda: slow.num_requests == 0)
    assert slow.num_steps - left <= 2
    llm.forget(everything=True)
    assert llm.stats()["pool"]["free"] == free, "everything it held is free again"

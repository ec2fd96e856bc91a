"""``RemoteEngine`` against servers that are not there, say nothing, are full, or give no whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("httpx")

from hypic import Completion
from hypic.errors import ConfigError, HypicError, PromptError, WorkerLost
from hypic.integrations.remote import RemoteEngine
from hypic.integrations.remote.wire import report_of
from hypic.types import CacheReport, Policy, SegmentReport
from tests.integrations.streaming import drained

BOTH: tuple[Any, ...] = (lambda e: list(e.stream("Hi")), lambda e: asyncio.run(drained(e.astream("Hi"))))


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for ask in (*BOTH, lambda engine: engine.fingerprint):
        with pytest.raises(WorkerLost, match=r"cannot be reached.*is hypic serve running"):
            ask(RemoteEngine(url, max_retries=1))
    with pytest.raises(ConfigError, match="no-address"):
        RemoteEngine("no-address")


def test_silence_ends_with_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        engine = RemoteEngine(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(WorkerLost, match="said nothing for too long"):
            list(engine.stream("Hi"))


@contextlib.contextmanager
def answering(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers, one after the other; and what it was asked."""
    left, asked = list(answers), list[bytes]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["content-length"])))
            status, headers, body = left.pop(0)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def chunk(text: str, reason: str | None = None) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': reason}]})}\n\n".encode()


FULL = (429, {"retry-after": "0"}, b'{"error": {"message": "full", "code": "queue_full"}}')
GOOD = (200, {}, b": keep-alive\n\n" + chunk("one ") + chunk("two", "stop") + b"data: [DONE]\n\n")


def test_a_report_of_a_newer_server_is_read_for_what_is_known() -> None:
    segment = SegmentReport("document", None, None, "hit", 40)
    report = CacheReport((segment,), prompt_tokens=50, policy=Policy(primed=False))
    told = asdict(report) | {"new": 1}
    told |= {"segments": [asdict(segment) | {"new": 2}], "policy": asdict(report.policy) | {"new": 3}}
    assert report_of(told) == report
    del told["policy"]["primed"], told["new"]
    assert report_of(told) == replace(report, policy=Policy()), "and of an older one"


def test_a_full_server_is_asked_again() -> None:
    for ask in BOTH:
        with answering(FULL, (503, {}, b"nginx says no"), GOOD) as (url, asked):
            assert Completion.join(ask(RemoteEngine(url))).text == "one two" and len(asked) == 3
        with answering(FULL, FULL) as (url, asked), pytest.raises(WorkerLost, match="full"):
            ask(RemoteEngine(url, max_retries=1))


@pytest.mark.parametrize(
    ("answer", "kind", "expected"),
    [
        ((200, {}, chunk("one ")), WorkerLost, "broke off in the middle"),
        ((200, {}, b'data: {"error": {"message": "NaN", "code": "non_finite_output"}}\n\n'), HypicError, "NaN"),
        ((404, {}, b"<html>"), WorkerLost, "status 404, not as a hypic server"),
        ((400, {}, b'{"error": {"message": "odd", "code": "never_seen"}}'), PromptError, "odd"),
    ],
)
def test_what_is_no_whole_answer(answer: Any, kind: type[HypicError], expected: str) -> None:
    with answering(answer) as (url, asked):
        with pytest.raises(kind, match=expected):
            list(RemoteEngine(url).stream("Hi"))
        assert len(asked) == 1

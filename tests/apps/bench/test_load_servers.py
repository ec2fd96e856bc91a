"""A trace is replayed against servers: the same bodies, what they say of their caches, and our own among them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hypic_apps.bench import servers
from hypic_apps.bench.replay import Played, Seen
from hypic_apps.cli.main import main
from tests.apps.bench.small_load import FEW, bench
from tests.apps.server.serving import serve


class Scripted(ThreadingHTTPServer):
    """Answers every chat completion with three tokens, and counts."""

    def __init__(self, cached_tokens: int, counter: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.cached_tokens, self.counter, self.hits = cached_tokens, counter, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        metrics = f'# HELP\nvllm:prefix_cache_hits_total{{a="b"}} {self.server.hits}\nvllm:tokens_total 9\n'
        known = {"/v1/models": '{"data": [{"id": "scripted"}]}', "/version": '{"version": "1.2"}', "/metrics": metrics}
        if self.path in known:
            self._say(known[self.path])
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.hits += self.server.counter
        usage = {"prompt_tokens": 50, "completion_tokens": 3,
                 "prompt_tokens_details": {"cached_tokens": self.server.cached_tokens}}  # fmt: skip
        events = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            *({"choices": [{"delta": {"content": word}}]} for word in ("a", "b", "c")),
            {"choices": [], "usage": usage},
        ]
        self._say("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")


def scripted(cached_tokens: int, counter: int) -> Iterator[Scripted]:
    server = Scripted(cached_tokens, counter)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def two() -> Iterator[list[Scripted]]:
    making = [scripted(40, 2), scripted(0, 0)]
    yield [next(one) for one in making]
    for one in making:
        next(one, None)


def test_servers_get_the_same_bodies_and_an_inert_cache_is_told(
    two: list[Scripted], capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [part for server in two for part in ("--url", server.url)]
    found = bench(capsys, *urls, "--qps", "30,60", "--requests", "5", "--seconds", "0", "--warmup", "3")
    asked = [sorted(json.dumps(body, sort_keys=True) for body in server.bodies) for server in two]
    assert asked[0] == asked[1] and len(asked[0]) == 13
    assert all(body["model"] == "scripted" and body["stream"] for body in two[0].bodies)
    first, other = (next(r for r in found["records"] if r["arm"] == server.url) for server in two)
    assert first["server"]["/version"] == {"version": "1.2"} and first["finished"] == 5
    assert first["counters"] == {"vllm:prefix_cache_hits_total": 10} and first["cache"] == "at work"
    assert other["counters"] == {} and other["cache"].startswith("off or inert")
    assert first["reused_share"] == pytest.approx(0.8) and first["output_tokens_per_s"] > 0


def test_counters_alone_tell_of_a_cache() -> None:
    played = Played([Seen(0.1, 0.2, 3, 50, 0)], 1.0, True)
    assert "by its counters" in servers.cache_state(played, {"sglang:cache_hit_total": 3.0})


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "--url", "http://127.0.0.1:9", *FEW, "--qps", "1"]) == 1
    assert "lists no model" in capsys.readouterr().err


def test_our_own_server_tells_what_it_reused(capsys: pytest.CaptureFixture[str]) -> None:
    with serve("--max-context", "2048", "--memory", "300MiB") as running:
        arguments = ("--qps", "3", "--requests", "3", "--seconds", "0", "--warmup", "4")
        (record,) = bench(capsys, "--url", running.url, *arguments)["records"]
    assert record["finished"] == 3 and record["failed"] == 0 and record["cache"] == "at work"
    assert record["reused_share"] > 0.2 and record["counters"]

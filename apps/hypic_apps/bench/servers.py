"""A trace played against servers that speak OpenAI's protocol, and what they say of themselves.

Every server gets the same bodies in the same order at the same times. Only the standard library is used. Counters are
read from ``/metrics`` before and after; a prefix cache that counted no hit, and of which no answer told, was off or
inert, and that is said.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hypic_apps.bench.replay import Played, Seen
from hypic_apps.bench.traces import Timed
from hypic_apps.cli.errors import CommandError

COUNTER = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})?\s+([-+.\deE]+)")
ABOUT = ("/v1/models", "/version", "/get_server_info", "/health")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Server:
    """An address such as ``http://127.0.0.1:8000``, with or without ``/v1``, and a key where it wants one."""

    url: str
    api_key: str | None = None

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)

    def path(self, path: str) -> str:
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def get(self, path: str) -> str | None:
        """The text at a path, or nothing where there is none."""
        connection = self.connect()
        try:
            connection.request("GET", self.path(path), headers=self.headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            return text if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def model(self) -> str:
        """The name of the first model that is served.

        Raises:
            CommandError: nobody answers there.
        """
        text = self.get("/v1/models")
        try:
            return str(json.loads(text or "")["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CommandError(f"{self.url} lists no model; start the server or check the address.") from error


def about(server: Server) -> dict[str, Any]:
    """What the server says of its version and its flags, as it says it."""
    found = {path: text for path in ABOUT if (text := server.get(path))}
    return {path: _parsed(text) for path, text in found.items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text[:500]


def counters(server: Server) -> dict[str, float]:
    """Counters of ``/metrics`` whose name speaks of a cache or of reuse; summed over labels."""
    found: dict[str, float] = {}
    for line in (server.get("/metrics") or "").splitlines():
        match = COUNTER.match(line)
        if match and re.search(r"cache|reuse|hit", match[1]) and not match[1].endswith(("_bucket", "_created")):
            found[match[1]] = found.get(match[1], 0.0) + float(match[3])
    return found


def play(server: Server, timed: Sequence[Timed], timeout_s: float) -> Played:
    """Sends every body when it is due, each from a thread of its own, and waits for all of them."""
    model, seen = server.model(), [Seen() for _ in timed]
    started = time.perf_counter()
    threads = []
    for one, into in zip(timed, seen, strict=True):
        time.sleep(max(0.0, started + one.arrival_s - time.perf_counter()))
        body = {**one.body, "model": model, "stream": True, "stream_options": {"include_usage": True}}
        thread = threading.Thread(target=_ask, args=(server, body, started + one.arrival_s, into), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, started + timeout_s - time.perf_counter()))
    is_whole = not any(thread.is_alive() for thread in threads)
    return Played(seen, time.perf_counter() - started, is_whole)


def _ask(server: Server, body: Mapping[str, Any], due_s: float, into: Seen) -> None:
    connection = server.connect()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        connection.request("POST", server.path(path), json.dumps(body), server.headers)
        answer = connection.getresponse()
        if answer.status != 200:
            into.error = f"{answer.status}: {answer.read(300).decode('utf-8', 'replace')}"
            return
        for line in answer:
            if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                _take(json.loads(line[5:]), time.perf_counter() - due_s, into)
        into.total_s = time.perf_counter() - due_s
    except (OSError, http.client.HTTPException, ValueError) as error:
        into.error = repr(error)
    finally:
        connection.close()


def _take(event: Mapping[str, Any], now_s: float, into: Seen) -> None:
    if any(_has_text(choice) for choice in event.get("choices") or ()):
        into.ttft_s = now_s if into.ttft_s is None else into.ttft_s
    usage = event.get("usage")
    if usage:
        into.num_tokens, into.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
        into.reused_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    elif "error" in event:
        into.error = json.dumps(event["error"])[:300]


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"))


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters counted in between."""
    return {name: after[name] - before.get(name, 0.0) for name in after if after[name] != before.get(name, 0.0)}


def cache_state(played: Played, counted: Mapping[str, float]) -> str:
    """Whether a cache was at work, from what answers and counters tell."""
    if any(one.reused_tokens for one in played.seen):
        return "at work"
    hits = {name: value for name, value in counted.items() if "hit" in name or "reuse" in name}
    if any(value > 0 for value in hits.values()):
        return "at work, by its counters; answers tell of no cached tokens"
    return "off or inert: no answer tells of cached tokens, and no counter of hits has grown"

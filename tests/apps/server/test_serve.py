"""``hypic serve`` as a process: start, refusal to start, clients that go away, a proxy in between, the end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hypic_apps.cli.main import build, main
from hypic_apps.cli.options import engine_settings
from tests.apps.server.serving import Process, serve, until

# A few seconds of prefill, in steps of 10 tokens.
LONG = "river and mill " * 700
# Pieces of it are never reused, so that it stays slow.
SLOW: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3, "hypic": {"reuse": "none"}}
PARTS = [{"type": "text", "text": text} for text in ("river and mill " * 20, "Who?")]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 2}


def metric(server: Process, name: str) -> float:
    text = httpx.get(f"{server.root}/metrics", timeout=30).text
    found = re.search(rf"^hypic:{name} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


# -- start -----------------------------------------------------------------------------------------------------------


def test_help_has_examples_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert "\nexamples:\n  hypic serve" in out and [line for line in out.splitlines() if len(line) > 80] == []


def test_engine_flags_reach_the_engine() -> None:
    args = build().parse_args(["serve", "folder", "--seam", "4", "--max-context", "512"])
    assert engine_settings(args) == {"seam": 4, "max_context": 512} and args.model == "folder"


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (["--host", "0.0.0.0"], 2, "add --api-key KEY, or --no-auth"),
        (["--host", "::"], 2, "add --api-key KEY, or --no-auth"),
        (["--host", ""], 2, "add --api-key KEY, or --no-auth"),
        (["--host", "0.0.0.0", "--admin-key", "x"], 2, "add --api-key KEY"),
        (["--host", "no such host"], 2, "is not known"),
        (["--no-auth", "--api-key", "x"], 2, "contradict"),
        (["--api-key", "@/nowhere"], 2, "'/nowhere' cannot be read: No such file or directory."),
        (["--port", "70000"], 2, "'70000' is no port"),
        (["--keep-alive", "0"], 2, "keep_alive_s is 0"),
        (["/nowhere/at/all"], 2, "/nowhere/at/all"),
    ],
)
def test_what_does_not_start(
    flags: list[str], code: int, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if flags[0].startswith("/") else [str(folder)]
    assert main(["serve", *model, "--port", "0", "--memory", "64MiB", *flags]) == code
    out, err = capsys.readouterr()
    assert out == "" and expected in err.strip().splitlines()[-1] and "Traceback" not in err


def test_an_address_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"127.0.0.1:{port} cannot be listened on" in line, "said before the model is loaded"


def test_a_reachable_server_finishes_what_it_has_begun_when_interrupted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alpha\nbeta\n")
    slowly = ("--max-step-tokens", "16", "--keep-alive", "0.2")
    flags = ("--host", "0.0.0.0", "--api-key", f"@{tmp_path / 'keys'}", "--name", "mine", *slowly)
    with serve(str(folder), *flags) as running:
        url = f"http://127.0.0.1:{running.port}/v1"
        assert httpx.get(f"{url}/models").status_code == 401
        key = {"authorization": "Bearer beta"}
        named = httpx.get(f"{url}/models", headers={**key, "host": "any.example"})
        assert named.json()["data"][0]["id"] == "mine"
        body = {**SLOW, "stream": True}
        with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=key, timeout=60) as response:
            running.process.send_signal(signal.SIGINT)
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        _, err = running.process.communicate(timeout=60)
    assert running.process.returncode == 130 and err == "interrupted\n"


def test_requests_are_answered_behind_a_primer_unless_they_say_otherwise(folder: Path) -> None:
    def said(hypic: dict[str, Any]) -> dict[str, Any]:
        body, url = {**BODY, "hypic": hypic}, f"{running.url}/chat/completions"
        found: dict[str, Any] = httpx.post(url, json=body, timeout=60).json()
        return found

    with serve(str(folder), "--dtype", "float64", "--primer", "The river Aro is long.") as running:
        first, without, again = said({}), said({"primed": False}), said({"primed": True})
        refused = said({"primed": 1})
        listed = httpx.get(f"{running.root}/v1/hypic/entries", timeout=60).text
    outcomes = [[segment["outcome"] for segment in one["hypic"]["segments"]] for one in (first, without, again)]
    assert outcomes == [["encoded"], ["encoded"], ["hit"]]
    assert without["hypic"]["segments"][0]["reason"] == "other primer"
    assert first["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] and "Aro" not in listed
    assert refused["error"]["message"] == "hypic.primed is 1; send true or false."


# -- clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_request(server: Process, stream: bool) -> None:
    aborted = metric(server, "requests_aborted_total")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        content = httpx.Request("POST", "http://x", json={**SLOW, "stream": stream}).content
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        until(lambda: metric(server, "num_requests_running") == 1)
    left = time.monotonic()
    until(lambda: metric(server, "num_requests_running") == 0)
    assert metric(server, "requests_aborted_total") == aborted + 1
    assert time.monotonic() - left < 1.0, "far sooner than its prefill would have ended"


def test_a_slow_prefill_is_kept_alive(server: Process) -> None:
    with httpx.stream("POST", f"{server.url}/chat/completions", json={**SLOW, "stream": True}, timeout=60) as response:
        assert response.headers["x-accel-buffering"] == "no" and response.headers["cache-control"] == "no-cache"
        lines = [line for line in response.iter_lines() if line]
    first = next(n for n, line in enumerate(lines) if '"content":' in line and '"role"' not in line)
    assert lines[:first].count(": keep-alive") >= 2 and lines[-1] == "data: [DONE]"


@contextmanager
def nginx(upstream: str, folder: Path) -> Iterator[str]:
    """A proxy with nothing set but what it needs to run here, and little patience."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
        events {{}}
        http {{
          access_log off; {temporary}
          server {{
            listen 127.0.0.1:{port};
            location / {{ proxy_pass {upstream}; proxy_read_timeout 800ms; }}
          }}
        }}""")
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    assert program is not None
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: _answers(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin") is None, reason="no nginx here")
def test_through_a_proxy_with_little_patience(server: Process, tmp_path: Path) -> None:
    with nginx(server.root, tmp_path) as root, httpx.Client(base_url=root, timeout=60) as client:
        started, arrivals = time.monotonic(), []
        with client.stream("POST", "/v1/chat/completions", json={**SLOW, "stream": True}) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                arrivals.append((time.monotonic() - started, line))
        comments = [at for at, line in arrivals if line == ": keep-alive"]
        assert arrivals[-1][0] > 1.0, "longer than the proxy would wait in silence"
        assert len(comments) >= 3 and comments[0] < 0.8 and comments[-1] - comments[0] > 0.4, "nothing is held back"
        assert [line for _, line in arrivals if line][-1] == "data: [DONE]"

        aborted = metric(server, "requests_aborted_total")
        with client.stream("POST", "/v1/chat/completions", json={**SLOW, "stream": True}) as response:
            next(response.iter_lines())
        until(lambda: metric(server, "requests_aborted_total") == aborted + 1, seconds=5)
        until(lambda: metric(server, "num_requests_running") == 0, seconds=5)

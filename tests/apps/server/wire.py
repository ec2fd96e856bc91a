"""A server around a scripted engine, the bodies it is asked with, and what its streams are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.testclient import TestClient

from hypic_apps.server.app import create_app
from tests.apps.server.scripted import ServedScript

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@contextmanager
def serving(engine: ServedScript, **settings: Any) -> Iterator[TestClient]:
    app = create_app(engine, model_name="m", **settings)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


def hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], **more}


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream: comments as text, the rest as JSON."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "the last event is complete"
    return [b if not b.startswith("data: {") else json.loads(b.removeprefix("data: ")) for b in blocks]


def deltas(found: list[Any]) -> list[Any]:
    return [choice["delta"] for event in found if isinstance(event, dict) for choice in event["choices"]]

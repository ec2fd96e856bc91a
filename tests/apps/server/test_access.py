"""Keys, host names, body sizes, full queues and metrics, on a scripted engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hypic.errors import ConfigError, WorkerLost
from hypic_apps.server.access import tenant_of
from hypic_apps.server.app import create_app
from tests.apps.server.scripted import ServedScript
from tests.apps.server.serving import in_thread, until
from tests.apps.server.wire import CHAT, hello, serving
from tests.integrations.scripted import segments

SEGMENTS = "/v1/hypic/segments"
PASSAGE = "The mill on the river was built in 1871 by the people of the village, who ground rye there."
KEYS: dict[str, Any] = {"api_keys": ["alpha", "beta"], "admin_key": "chief"}


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("settings", "key", "expected"),
    [
        ({}, None, (200, 200, 200)),
        ({}, "anything", (200, 200, 200)),
        (KEYS, None, (401, 401, 401)),
        (KEYS, "gamma", (401, 401, 401)),
        (KEYS, "beta", (200, 403, 200)),
        (KEYS, "chief", (200, 200, 200)),
        ({"api_keys": ["alpha"]}, "alpha", (200, 403, 200)),
        ({"admin_key": "chief"}, None, (200, 401, 200)),
        ({"admin_key": "chief"}, "chief", (200, 200, 200)),
    ],
)
def test_who_may_do_what(settings: dict[str, Any], key: str | None, expected: tuple[int, int, int]) -> None:
    body = {"segments": [{"text": PASSAGE}]}
    use, admin, warm = expected
    with serving(ServedScript(), **settings) as client:
        client.headers.update(bearer(key))
        assert client.post(CHAT, json=hello()).status_code == use
        assert client.get("/v1/models").status_code == use
        assert client.post(SEGMENTS, json=body).status_code == warm
        guarded = [("GET", "/metrics"), ("GET", SEGMENTS), ("GET", "/v1/hypic/entries")]
        guarded += [("PUT", f"{SEGMENTS}/pin?name=x"), ("DELETE", f"{SEGMENTS}?name=x")]
        for method, path in guarded:
            assert client.request(method, path).status_code == admin
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_what_a_refused_client_is_told() -> None:
    with serving(ServedScript(), **KEYS) as client:
        without, wrong = client.get("/v1/models"), client.get("/v1/models", headers=bearer("gamma"))
        admin = client.get("/metrics", headers=bearer("alpha"))
    assert without.headers["www-authenticate"] == "Bearer" and without.headers["x-request-id"]
    assert without.json()["error"]["type"] == wrong.json()["error"]["type"] == "authentication_error"
    assert "Authorization: Bearer KEY" in without.json()["error"]["message"]
    assert wrong.json()["error"]["code"] == "invalid_api_key" and "gamma" not in wrong.text
    assert admin.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:80"])
def test_a_loopback_name_is_let_in(host: str) -> None:
    with serving(ServedScript(), host_names={"localhost", "127.0.0.1", "[::1]"}) as client:
        assert client.get("/health", headers={"host": host}).status_code == 200


def test_another_name_is_not() -> None:
    with serving(ServedScript(), host_names={"localhost"}) as client:
        response = client.post(CHAT, json=hello(), headers={"host": "evil.example:8000"})
    assert response.status_code == 403 and "'evil.example'" in response.json()["error"]["message"]


def test_a_page_cannot_send_what_needs_no_leave() -> None:
    """Browsers send plain text anywhere without asking first."""
    with serving(ServedScript()) as client:
        response = client.post(CHAT, content=b'{"messages": []}', headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]


def test_a_body_that_is_too_large() -> None:
    with serving(ServedScript(), max_body_bytes=200) as client:
        assert client.post(CHAT, json=hello()).status_code == 200
        known = client.post(CHAT, json=hello(user="x" * 300))

        def pieces() -> Any:
            yield from (b'{"messages": "', b"x" * 300, b'"}')

        unknown = client.post(CHAT, content=pieces(), headers={"content-type": "application/json"})
    for response in (known, unknown):
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


# -- tenants ---------------------------------------------------------------------------------------------------------


def namespaces(engine: ServedScript) -> list[str | None]:
    return [segment.namespace for segment in segments(engine.last.prompt)]


def test_keys_have_segments_of_their_own() -> None:
    engine = ServedScript()
    hints = [{}, {"hypic": {"namespace": "b"}}, {"extras": {"hypic": {"namespace": "c", "kind": "memory"}}}]
    content = [*({"type": "text", "text": PASSAGE, **h} for h in hints), {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "prompt_cache_key": "a"}
    mine = tenant_of("alpha")
    with serving(engine, **KEYS) as client:
        client.post(CHAT, json=body, headers=bearer("alpha"))
        assert namespaces(engine) == [f"{mine}/a", f"{mine}/b", f"{mine}/c"]
        client.post(CHAT, json={**body, "prompt_cache_key": None}, headers=bearer("alpha"))
        assert namespaces(engine) == [mine, f"{mine}/b", f"{mine}/c"]
        client.post(CHAT, json={**body, "hypic": {"namespace": "z"}}, headers=bearer("beta"))
        assert namespaces(engine) == [f"{tenant_of('beta')}/{name}" for name in "zbc"]
        client.post(CHAT, json=body, headers=bearer("chief"))
        assert namespaces(engine) == ["a", "b", "c"], "the admin names namespaces as they are"
    assert "alpha" not in mine
    with serving(engine, **KEYS, share_segments=True) as client:
        client.post(CHAT, json=body, headers=bearer("alpha"))
        assert namespaces(engine) == ["a", "b", "c"]


def test_a_message_may_name_its_namespace() -> None:
    engine = ServedScript()
    content = [{"type": "text", "text": PASSAGE}, {"type": "text", "text": "?"}]
    message = {"role": "user", "content": content, "hypic": {"namespace": "m", "kind": "memory", "cache": True}}
    with serving(engine, api_keys=["alpha"]) as client:
        client.post(CHAT, json={"messages": [message]}, headers=bearer("alpha"))
    assert namespaces(engine) == [f"{tenant_of('alpha')}/m"] * 2


# -- a full server, a dead engine ------------------------------------------------------------------------------------


def test_a_full_queue() -> None:
    import httpx

    engine = ServedScript(held=True)  # two may run
    with in_thread(create_app(engine, max_waiting=1)) as root, httpx.Client(base_url=root, timeout=30) as client:
        threads = [threading.Thread(target=client.post, args=[CHAT], kwargs={"json": hello()}) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: engine.num_open == 3)
        full = client.post(CHAT, json=hello())
        assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        asked = {path: client.head(path) for path in ("/ready", "/health")}
        assert {path: (answer.status_code, answer.content) for path, answer in asked.items()} == {
            "/ready": (503, b""),
            "/health": (200, b""),
        }
        batch = client.post("/v1/completions", json={"prompt": ["x"] * 4})
        engine.held = False
        for thread in threads:
            thread.join()
        assert client.post(CHAT, json=hello()).status_code == 200 == client.get("/ready").status_code
    assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
    assert full.headers["retry-after"] == "1" and full.json()["error"]["code"] == "queue_full"
    assert batch.status_code == 400 and "4 prompts" in batch.json()["error"]["message"]


def test_a_dead_engine() -> None:
    with serving(ServedScript(dead=WorkerLost("the engine's thread died."))) as client:
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 503 and "died" in client.get(path).text
            assert client.head(path).status_code == 503
        assert client.get("/metrics").json()["error"]["code"] == "worker_lost"


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics() -> None:
    engine = ServedScript()
    content = [{"type": "text", "text": PASSAGE}, {"type": "text", "text": "?"}]
    with serving(engine) as client:
        for _ in range(2):
            client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
        response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    for line in (
        "hypic:num_requests_running 2",
        "hypic:num_requests_waiting 1",
        "hypic:cache_bytes 4096",
        "hypic:prompt_tokens_total 200",
        "hypic:generation_tokens_total 10",
        "hypic:reused_tokens_total 120",
        'hypic:segments_total{outcome="hit"} 2',
        'hypic:requests_finished_total{finish_reason="stop"} 2',
        'hypic:time_to_first_token_seconds_bucket{le="0.05"} 0',
        'hypic:time_to_first_token_seconds_bucket{le="0.1"} 2',
        'hypic:time_to_first_token_seconds_bucket{le="+Inf"} 2',
        "hypic:time_to_first_token_seconds_count 2",
        "hypic:time_to_first_token_seconds_sum 0.2",
    ):
        assert line in lines
    named = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert all(name.startswith("hypic:") for name in named)
    samples = [line for line in lines if not line.startswith("#")]
    assert all(any(sample.startswith(name) for name in named) for sample in samples)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep_alive_s": 0}, "keep_alive_s is 0"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
        ({"api_keys": ["a b"]}, "a key is empty"),
        ({"api_keys": ["a"], "admin_key": "a"}, "also an API key"),
        ({"colour": "red"}, "unknown server setting 'colour'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        create_app(ServedScript(), **settings)

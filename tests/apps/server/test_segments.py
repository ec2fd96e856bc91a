"""Registering, listing and forgetting segments, and finding their texts again in flat strings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hypic.errors import StoreFull
from hypic.integrations.remote import RemoteEngine
from hypic.types import CacheReport, Prompt, Segment, SegmentReport
from hypic_apps.cli.main import main
from hypic_apps.server.wire import told_to
from tests.apps.server.scripted import ServedScript
from tests.apps.server.serving import Process, until
from tests.apps.server.wire import CHAT, TEXT, serving
from tests.integrations.scripted import bodies, said

SEGMENTS = "/v1/hypic/segments"
MILL = "The mill on the river was built in 1871 by the people of the village, who ground rye there."
LAKE = "The lake behind the hill is nine metres deep and holds more pike than any other lake around."
FLAT = f"Context:\n\n{MILL}\n\n{LAKE}\n\nWho built the mill?"


@pytest.fixture
def http(server: Process) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.root, timeout=60) as client:
        yield client


def test_a_warmed_segment_hits(http: httpx.Client) -> None:
    given = [{"text": MILL, "name": "mill", "source": "w.md"}, {"text": LAKE, "kind": "memory", "namespace": "lakes"}]
    told = http.post(SEGMENTS, json={"segments": given, "namespace": "warm"}).json()
    assert [row["outcome"] for row in told["data"]] == ["encoded", "encoded"] and told["num_known"] == 2
    assert [row["namespace"] for row in told["data"]] == ["warm", "lakes"]
    assert all(row["num_tokens"] > 20 and row["num_bytes"] > 0 and row["report"]["segments"] for row in told["data"])

    chat = {"messages": [{"role": "user", "content": FLAT}], "max_tokens": 2, "hypic": {"namespace": "warm"}}
    answer = http.post(CHAT, json=chat).json()["hypic"]
    assert [(s["name"], s["outcome"]) for s in answer["segments"]] == [("mill", "hit")]
    (found,) = answer["split"]["found"]
    assert FLAT[found["start"] : found["end"]] == MILL and answer["split"]["policy"] == "known-texts"
    for options in ({"reuse": "none"}, {"split_flat": False}, {"namespace": "other"}):
        flat = http.post(CHAT, json={**chat, "hypic": {**chat["hypic"], **options}}).json()["hypic"]
        assert flat["segments"] == [] and "split" not in flat


def test_a_flat_prompt_says_the_same_as_parts_of_the_same_text(http: httpx.Client) -> None:
    http.post(SEGMENTS, json={"segments": [{"text": MILL}, {"text": LAKE}]})
    parts = [
        {"type": "text", "text": "Context:", "hypic": {"cache": False}},
        {"type": "text", "text": MILL}, {"type": "text", "text": LAKE},
        {"type": "text", "text": "Who built the mill?"},
    ]  # fmt: skip
    asked = [{"messages": [{"role": "user", "content": c}], "max_tokens": 8, "temperature": 0} for c in (FLAT, parts)]
    flat, listed = (http.post(CHAT, json=body).json() for body in asked)
    assert flat["usage"]["prompt_tokens"] == listed["usage"]["prompt_tokens"]
    assert flat["choices"][0]["message"] == listed["choices"][0]["message"]
    assert len(flat["hypic"]["segments"]) == len(listed["hypic"]["segments"]) == 2


def test_listing_and_forgetting(http: httpx.Client) -> None:
    text = "The bridge was rebuilt twice after floods, the last time in iron, and carries carts to this day."
    http.post(SEGMENTS, json={"segments": [{"text": text, "name": "rebuilt", "source": "list.md"}]})
    rows = http.get(SEGMENTS, params={"source": "list.md"}).json()
    assert [row["name"] for row in rows["data"]] == ["rebuilt"] and rows["store"]["num_entries"] > 0
    assert text not in str(rows), "texts are not handed out"
    chat = {"messages": [{"role": "user", "content": f"{text}\n\nWhen?"}], "max_tokens": 1}
    assert len(http.post(CHAT, json=chat).json()["hypic"]["segments"]) == 1
    gone = http.delete(SEGMENTS, params={"source": "list.md"}).json()
    assert gone["deleted"] and gone["num_forgotten"] == 1
    assert http.get(SEGMENTS, params={"source": "list.md"}).json()["data"] == []
    assert http.post(CHAT, json=chat).json()["hypic"]["segments"] == []
    http.post(SEGMENTS, json={"segments": [{"text": text, "name": "rebuilt", "source": "list.md"}]})
    for unclear in ({}, {"everything": "false"}, {"source": "list.md", "everything": "true"}):
        refused = http.delete(SEGMENTS, params=unclear)
        assert refused.status_code == 400 and "everything" in refused.json()["error"]["message"]
    assert http.get(SEGMENTS, params={"source": "list.md"}).json()["data"], "nothing went"
    for query, told in (
        ("name=rebuilt&sorce=other.md", "the parameter sorce is not known here; did you mean source?"),
        ("source=list.md&colour=red", "the parameter colour is not known here; it takes name, source, namespace"),
        ("source=other.md&source=list.md", "the parameter source is given 2 times; give it once."),
    ):
        for answer in (http.delete(f"{SEGMENTS}?{query}"), http.put(f"{SEGMENTS}/pin?{query}")):
            assert answer.status_code == 400
        assert http.delete(f"{SEGMENTS}?{query}").json()["error"]["message"].startswith(told)
    assert http.get(SEGMENTS, params={"source": "list.md"}).json()["data"], "nothing went"
    assert "it takes none." in http.get("/v1/hypic/entries?name=rebuilt").json()["error"]["message"]


def test_entries_are_listed_and_pinned(http: httpx.Client) -> None:
    text = "The weir above the mill was built by the three brothers, who took its stones from the old bridge."
    http.post(SEGMENTS, json={"segments": [{"text": text, "name": "weir", "ttl_s": 3600.0}]})
    (entry,) = [e for e in http.get("/v1/hypic/entries").json()["data"] if ["weir", None] in e["labels"]]
    assert entry["kind"] == "segment" and entry["num_bytes"] > 0 and not entry["is_pinned"]
    assert 0 < entry["expires_s"] - time.time() <= 3600 and text not in str(entry)
    assert http.put(f"{SEGMENTS}/pin", params={"name": "weir"}).json()["num_changed"] == 1
    assert any(e["is_pinned"] for e in http.get("/v1/hypic/entries").json()["data"])
    assert http.put(f"{SEGMENTS}/pin", params={"name": "weir", "pinned": "false"}).json()["num_changed"] == 1
    assert http.put(f"{SEGMENTS}/pin").status_code == 400


def test_the_client_and_hypic_cache_ask_a_running_server(
    http: httpx.Client, server: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "The sluice below the mill is opened in March, when the snow of the hills comes down the river."
    with RemoteEngine(server.url) as engine:
        engine.warm([Segment(text, name="sluice", source="sluice.md")])
        (entry,) = [entry for entry in engine.entries() if ("sluice", "sluice.md") in entry.labels]
        assert entry.kind == "segment" and entry.tier == "device"
        assert engine.pin(name="sluice") == 1 and engine.unpin(name="sluice") == 1
    for action in ("ls", "stat"):
        assert main(["cache", action, "--url", server.url]) == 0
    assert "sluice.md sluice" in capsys.readouterr().out
    assert main(["cache", "forget", "--url", server.url, "--source", "sluice.md"]) == 0
    assert "1 entries" in capsys.readouterr().out
    assert not any("sluice" in str(e["labels"]) for e in http.get("/v1/hypic/entries").json()["data"])


def test_a_tenant_is_not_told_what_another_one_has(http: httpx.Client) -> None:
    """What the engine knows of other namespaces stays on the server; without keys nothing is hidden."""
    report = CacheReport((SegmentReport("document", "a", None, "encoded", 40, reason="other namespace"),))
    assert [s.reason for s in told_to("key-1", report).segments] == ["first time"]
    assert told_to(None, report) == report


def test_segments_need_not_be_waited_for(http: httpx.Client) -> None:
    text = f"{LAKE} In winter it freezes."
    response = http.post(SEGMENTS, json={"segments": [{"text": text}], "wait": False})
    assert response.status_code == 202 and response.json()["data"][0]["outcome"] is None
    content = [{"type": "text", "text": text}, {"type": "text", "text": "?"}]
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}

    def hits() -> bool:
        return bool(http.post(CHAT, json=chat).json()["hypic"]["segments"][0]["outcome"] == "hit")

    until(hits)


def test_tokens(http: httpx.Client) -> None:
    told = http.post("/v1/hypic/tokenize", json={"text": "<|im_end|> river"}).json()
    assert told["num_tokens"] == len(told["token_ids"]) > 2


@pytest.mark.parametrize(
    "body",
    [{}, {"segments": []}, {"segments": [{"text": " "}]}, {"segments": [{"text": MILL, "kind": "poem"}]},
     {"segments": [{"text": MILL, "colour": "red"}]}, {"segments": [MILL]}],
)  # fmt: skip
def test_what_is_no_segment(body: dict[str, Any], http: httpx.Client) -> None:
    response = http.post(SEGMENTS, json=body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


# -- how flat text is read, on a scripted engine ---------------------------------------------------------------------


def test_only_flat_text_is_cut() -> None:
    engine = ServedScript()
    known = {"segments": [{"text": MILL, "name": "mill"}], "warm": False}
    question = {"type": "text", "text": "Who?"}
    with serving(engine) as client:
        assert client.post(SEGMENTS, json=known).json()["num_known"] == 1 and engine.warmed == []
        for message in (
            {"role": "user", "content": FLAT},
            {"role": "user", "content": [{"type": "text", "text": FLAT}]},
            {"role": "tool", "content": FLAT},
            {"role": "system", "content": FLAT},
        ):
            client.post(CHAT, json={"messages": [message]})
            assert bodies(engine.last.prompt) == [MILL] and said(engine.last.prompt) == [(message["role"], FLAT)]
        for message in (
            {"role": "assistant", "content": FLAT},
            {"role": "user", "content": [{"type": "text", "text": FLAT, "hypic": {"cache": False}}]},
        ):
            client.post(CHAT, json={"messages": [message]})
            assert bodies(engine.last.prompt) == []
        client.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "text", "text": FLAT}, question]}]})
        assert bodies(engine.last.prompt) == [FLAT], "where content comes in parts, borders are the client's"
        client.post(TEXT, json={"prompt": FLAT})
        prompt = engine.last.prompt
        assert isinstance(prompt, Prompt) and not prompt.template and prompt.glue == ""
        assert "".join([*(s.text for s in prompt.segments), prompt.tail]) == FLAT
        assert [s.name for s in prompt.segments if s.cache is not False] == ["mill"]


def test_marked_parts_are_known_when_they_come_back_flat() -> None:
    engine = ServedScript()
    marked = {"type": "text", "text": LAKE, "extras": {"hypic": {"kind": "document", "name": "lake"}}}
    with serving(engine) as client:
        parts = [marked, {"type": "text", "text": MILL}, {"type": "text", "text": "?"}]
        client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
        assert bodies(engine.last.prompt) == [LAKE, MILL]
        client.post(CHAT, json={"messages": [{"role": "user", "content": FLAT}]})
        assert bodies(engine.last.prompt) == [LAKE]


def test_a_segment_that_never_fits_is_told() -> None:
    class Full(ServedScript):
        def warm(self, segments: Any, *, policy: Any = None) -> Any:
            raise StoreFull("too large.")

    with serving(Full()) as client:
        response = client.post(SEGMENTS, json={"segments": [{"text": MILL}]})
    assert response.status_code == 400 and response.json()["error"]["code"] == "store_full"

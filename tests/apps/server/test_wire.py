"""What stands on the wire, to the field: streams, errors, keep-alive and options, on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hypic.errors import HypicError, NonFiniteOutput, PromptTooLong, StoreFull, WorkerLost
from hypic.types import Policy, SamplingParams
from tests.apps.server.scripted import ServedScript
from tests.apps.server.wire import CHAT, TEXT, deltas, events, hello, serving

# -- streams ---------------------------------------------------------------------------------------------------------


def test_an_error_inside_a_stream_is_an_event() -> None:
    with serving(ServedScript(fails_after=NonFiniteOutput("NaN."))) as client:
        for path, body in ((CHAT, hello()), (TEXT, {"prompt": "x"})):
            *_, last = events(client, path, body)
            told = {"message": "NaN.", "type": "server_error", "param": None, "code": "non_finite_output"}
            assert last == {"error": told}


def test_silence_is_filled_with_comments() -> None:
    with serving(ServedScript(answer="one two", wait_s=0.25), keep_alive_s=0.1) as client:
        found = events(client, CHAT, hello())
    assert found.count(": keep-alive") >= 4
    assert "".join(d.get("content", "") for d in deltas([e for e in found if isinstance(e, dict)])) == "one two"


def test_an_unforeseen_error_is_told_in_one_shape(caplog: pytest.LogCaptureFixture) -> None:
    engine = ServedScript(error=ZeroDivisionError("oops"))
    with serving(engine) as client:
        response = client.post(CHAT, json=hello(), headers={"x-request-id": "mine"})
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] == "mine" and "oops" not in response.text and "mine" in caplog.text
    assert engine.num_open == 0


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptTooLong("long"), 400, "invalid_request_error", "context_length_exceeded"),
        (StoreFull("full"), 400, "invalid_request_error", "store_full"),
        (WorkerLost("dead"), 503, "server_error", "worker_lost"),
        (HypicError("odd"), 500, "server_error", "engine_error"),
    ],
)
def test_errors_of_the_engine(error: HypicError, status: int, kind: str, code: str) -> None:
    with serving(ServedScript(error=error)) as client:
        for body in (hello(), hello(stream=True)):
            response = client.post(CHAT, json=body)
            told = response.json()["error"]
            assert (response.status_code, told["type"], told["code"]) == (status, kind, code)
            assert str(error) in told["message"]
        assert f'hypic:requests_failed_total{{code="{code}"}} 2' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "expected"),
    [
        ("GET", "/v2", None, 404, "no such address; there are /v1/chat/completions, /v1/completions, "),
        ("POST", "/chat/completions", b"{}", 404, "no such address; did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completion", b"{}", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/v1/model", None, 404, "did you mean /v1/models?"),
        ("GET", CHAT, None, 405, "does not take that method; send POST."),
        ("POST", "/v1/models/some", b"{}", 405, "does not take that method; send GET."),
        ("POST", "/openapi.json", b"{}", 405, "does not take that method; send GET or HEAD."),
        ("POST", "/health", b"{}", 405, "does not take that method; send GET."),
        ("POST", "/v1/embeddings", b"{}", 404, "no such address; there are /v1/chat/completions, "),
        ("POST", "/v1/moderations", b"{}", 404, "no such address; there are /v1/chat/completions, "),
        ("POST", "/v1/tokenize", b"{}", 404, "did you mean /v1/hypic/tokenize?"),
        ("POST", CHAT, b"{", 400, "no JSON"),
        ("POST", CHAT, b"[]", 400, "no JSON object"),
        ("POST", CHAT, b'{"messages": []}', 400, "messages"),
        ("POST", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "3"}', 400, "max_tokens"),
        ("POST", TEXT, b'{"prompt": []}', 400, "empty list"),
        ("POST", TEXT, b"{}", 400, "prompt is missing"),
        ("POST", TEXT, b'{"prompt": [[1, 2]]}', 400, "prompt"),
    ],
)
def test_requests_that_are_none(method: str, path: str, content: bytes | None, status: int, expected: str) -> None:
    with serving(ServedScript()) as client:
        response = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status and response.headers["x-request-id"].startswith("req_")
    told = response.json()["error"]
    assert expected in told["message"] and set(told) == {"message", "type", "param", "code"}
    assert told["type"] == "invalid_request_error"


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param", "sentence"),
    [
        (CHAT, {}, "messages", "messages is missing; it must be sent."),
        (CHAT, {"messages": []}, "messages", "messages is []; send at least 1."),
        (CHAT, {"messages": ["x"]}, "messages.0", 'messages.0 is "x"; send an object.'),
        (CHAT, hello(max_tokens=1.5), "max_tokens", "max_tokens is 1.5; send a whole number."),
        (CHAT, hello(temperature="hot"), "temperature", 'temperature is "hot"; send a number.'),
        (CHAT, hello(stream="yes"), "stream", 'stream is "yes"; send true or false.'),
        (CHAT, hello(stop=5), "stop", "stop is 5; send text or a list of texts."),
        (CHAT, hello(stop=["a", None]), "stop.1", "stop.1 is null; send text."),
        (CHAT, hello(tool_choice=5), "tool_choice", "tool_choice is 5; send text or an object."),
        (CHAT, hello(hypic=3), "hypic", "hypic is 3; send an object."),
        (CHAT, hello(temprature=0), "temprature", "temprature is not known to this server; did you mean temperature?"),
        (CHAT, hello(max_token=5), "max_token", "max_token is not known to this server; did you mean max_tokens?"),
        (CHAT, hello(deterministc=True), "deterministc",
         "deterministc is not known to this server; did you mean hypic.deterministic?"),
        (CHAT, hello(seam=4), "seam", "seam is not known to this server; did you mean hypic.seam?"),
        (CHAT, hello(primed=False), "primed", "primed is not known to this server; did you mean hypic.primed?"),
        (CHAT, hello(hypic={"primed": "no"}), "hypic.primed", 'hypic.primed is "no"; send true or false.'),
        *((CHAT, hello(**{name: False}), name, f"{name} is not known to this server; in chats, chat_template_kwargs")
          for name in ("enable_thinking", "thinking", "reasoning")),
        (CHAT, hello(extra_body={}), "extra_body",
         "extra_body is not known to this server; the openai client takes it apart: send its fields beside"),
        (CHAT, hello(**{"": 1}), "''", "'' is not known to this server; leave it out."),
        (CHAT, hello(zyxwv=False), "zyxwv", "zyxwv is not known to this server; leave it out."),
        (CHAT, hello(**{"x" * 999: 1}), "x" * 80, f"{'x' * 80} is not known to this server; leave it out."),
        (CHAT, hello(cache_salt="a"), "cache_salt",
         "cache_salt is not supported by this server; send prompt_cache_key, which keeps apart what is cached."),
        (CHAT, hello(min_tokens=3), "min_tokens", "min_tokens is not supported by this server; leave it out."),
        (CHAT, hello(length_penalty=2), "length_penalty", "length_penalty is 2; this server supports 1.0 only."),
        (CHAT, hello(stream_options={"x": 1}), "stream_options.x", "stream_options.x is not known; leave it out, or"),
        (TEXT, {"prompt": "x", "tools": []}, "tools", "tools is not known to this server; leave it out."),
        (CHAT, hello(hypic={"seems": 1}), "hypic.seems", "hypic.seems is not known; did you mean seam?"),
        (CHAT, hello(hypic={"parse": "x"}), "hypic.parse",
         "hypic.parse is \"x\"; send 'all', 'reasoning' or 'none'."),
        (TEXT, {"prompt": [[1, 2]]}, "prompt.0", "prompt.0 is [1, 2]; send text."),
        (TEXT, {"prompt": "x", "hypic": {"segments": [{"text": " "}]}}, "hypic.segments.0.text",
         'hypic.segments.0.text is " "; send text that is not blank.'),
        (TEXT, {"prompt": "x", "hypic": {"segments": [{"text": "a", "heading": 1}]}}, "hypic.segments.0.heading",
         "hypic.segments.0.heading is not known; send one of text, kind, name, source,"),
        ("/v1/hypic/segments", {"segments": [], "w": 1}, "segments", "segments is []; send at least 1."),
        ("/v1/hypic/segments", {"segments": [{"text": "a"}], "w": 1}, "w",
         "w is not known; leave it out, or check its spelling."),
        (CHAT, {"messages": [USER, {"role": "user"}]}, "messages.1.content",
         "messages.1.content is missing; a message of the role 'user' needs text or content parts."),
        (CHAT, {"messages": [{"role": "system", "content": None}, USER]}, "messages.0.content",
         "messages.0.content is null; a message of the role 'system'"),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages.0.content",
         "messages.0.content is an empty list; a message"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_right_is_one_sentence(
    path: str, body: dict[str, Any], param: str, sentence: str
) -> None:
    with serving(ServedScript()) as client:
        response = client.post(path, json=body)
    told = response.json()["error"]
    assert response.status_code == 400 and told["message"].startswith(sentence) and told["param"] == param
    assert told["type"] == "invalid_request_error" and set(told) == {"message", "type", "param", "code"}


def test_half_a_character_is_told_as_it_was_sent() -> None:
    with serving(ServedScript()) as client:
        body = json.dumps(hello(temperature="\ud800"))
        response = client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == 'temperature is "\\ud800"; send a number.'


def test_long_values_are_cut_and_empty_text_is_content() -> None:
    with serving(ServedScript()) as client:
        told = client.post(CHAT, json=hello(temperature="x" * 5000)).json()["error"]["message"]
        assert len(told) < 130 and told.endswith("...; send a number.")
        said = [{"role": "user", "content": ""}, {"role": "assistant", "content": None, "tool_calls": []}, USER]
        assert client.post(CHAT, json={"messages": said}).status_code == 200


# -- options ---------------------------------------------------------------------------------------------------------


def test_what_a_client_leaves_out_is_as_the_server_was_started() -> None:
    engine = ServedScript()
    with serving(engine) as client:
        client.post(CHAT, json=hello())
        assert engine.last.policy == Policy() and engine.last.sampling.max_tokens == engine.max_context
        client.post(CHAT, json=hello(max_completion_tokens=7, max_tokens=9, hypic={"seam": 4, "reuse": "prefix"}))
        assert engine.last.policy == Policy("prefix", 4) and engine.last.sampling.max_tokens == 7
        client.post(CHAT, json=hello(hypic={"primed": False}))
        assert engine.last.policy == Policy(primed=False)
        client.post(CHAT, json=hello(stop="x", top_k=3, min_p=0.1, ignore_eos=True, seed=5, presence_penalty=1))
        sampling = engine.last.sampling
        assert (sampling.stop, sampling.top_k, sampling.min_p, sampling.ignore_eos) == (("x",), 3, 0.1, True)
        client.post(CHAT, json=hello(top_k=-1))
        assert engine.last.sampling == SamplingParams(max_tokens=engine.max_context), "-1: no limit, as elsewhere"
        client.post(TEXT, json={"prompt": "x"})
        assert engine.last.sampling.max_tokens == 16
        client.post(CHAT, json=hello(chat_template_kwargs={"enable_thinking": False}))
        assert engine.last.chat_template_kwargs == {"enable_thinking": False}

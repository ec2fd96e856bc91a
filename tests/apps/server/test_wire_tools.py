"""Tool calls and reasoning on the wire, to the field, on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.apps.server.scripted import ScriptedTokenizer, ServedScript
from tests.apps.server.wire import CHAT, deltas, events, hello, serving

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip
CALL = """Let me see.
<tool_call>
<function=weather>
<parameter=city>
Köln
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""


def test_tool_calls_are_read_out_of_the_text() -> None:
    engine = ServedScript(answer=CALL)
    with serving(engine) as client:
        answer = client.post(CHAT, json=hello(tools=[TOOL])).json()
        found = events(client, CHAT, hello(tools=[TOOL]))
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    assert call["type"] == "function" and call["id"].startswith("call_") and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln", "days": 2}
    assert engine.last.tools == [TOOL]

    opened, filled = (delta["tool_calls"][0] for delta in deltas(found) if "tool_calls" in delta)
    assert opened["index"] == filled["index"] == 0 and opened["function"] == {"name": "weather", "arguments": ""}
    assert opened["id"].startswith("call_") and opened["type"] == "function"
    assert json.loads(filled["function"]["arguments"]) == {"city": "Köln", "days": 2}
    assert "".join(delta.get("content") or "" for delta in deltas(found)) == "Let me see."
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls" and found[-1] == "data: [DONE]"


def test_without_tools_nothing_is_a_call() -> None:
    with serving(ServedScript(answer=CALL)) as client:
        for body in (hello(), hello(tools=[TOOL], tool_choice="none")):
            choice = client.post(CHAT, json=body).json()["choices"][0]
            assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


def test_a_call_that_cannot_be_read_stays_text_with_a_note() -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments": {\n</tool_call>'
    with serving(ServedScript(answer=broken)) as client:
        answer = client.post(CHAT, json=hello(tools=[TOOL])).json()
    assert answer["choices"][0]["message"]["content"] == broken
    assert any("left as text" in note for note in answer["hypic"]["notes"])


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ],
)
def test_tool_options_that_cannot_be_kept(more: dict[str, Any], param: str) -> None:
    with serving(ServedScript()) as client:
        response = client.post(CHAT, json=hello(**{"tools": [TOOL], **more}))
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_client_that_takes_one_call_at_a_time_gets_the_first() -> None:
    second = CALL.partition("\n")[2].replace("Köln", "Bonn")
    with serving(ServedScript(answer=f"{CALL}\n{second}")) as client:
        for parallel, cities in ((False, ["Köln"]), (True, ["Köln", "Bonn"]), (None, ["Köln", "Bonn"])):
            body = hello(tools=[TOOL], parallel_tool_calls=parallel)
            answer, streamed = client.post(CHAT, json=body).json(), events(client, CHAT, body)
            (choice,) = answer["choices"]
            calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
            told = [delta["tool_calls"][0]["function"] for delta in deltas(streamed) if "tool_calls" in delta]
            assert [json.loads(call)["city"] for call in calls] == cities
            assert [json.loads(call["arguments"])["city"] for call in told if call["arguments"]] == cities
            assert choice["finish_reason"] == streamed[-2]["choices"][0]["finish_reason"] == "tool_calls"
            for report in (answer["hypic"], streamed[-2]["hypic"]):
                assert any("'weather', was left out" in note for note in report["notes"]) is (parallel is False)


def test_a_template_without_tools_is_said() -> None:
    with serving(ServedScript(tokenizer=ScriptedTokenizer(shows_tools=False))) as client:
        response = client.post(CHAT, json=hello(tools=[TOOL]))
    assert response.status_code == 400 and "shows no tools" in response.json()["error"]["message"]


def test_tool_results_and_calls_reach_the_engine_as_templates_want_them() -> None:
    engine = ServedScript()
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "developer", "content": "Be brief.", "name": None},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "Sun."},
    ]
    with serving(engine) as client:
        assert client.post(CHAT, json={"messages": messages, "tools": [TOOL]}).status_code == 200
    system, _, assistant, tool = engine.last.messages
    assert system == {"role": "system", "content": "Be brief."}
    assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}
    assert set(assistant) == {"role", "tool_calls"} and tool["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("end", "answer"), [("", "<think>\nHm.\n</think>\n\nYes."), ("<think>\n", "Hm.\n</think>\n\nYes.")]
)
def test_reasoning_stands_apart(end: str, answer: str) -> None:
    with serving(ServedScript(answer=answer, tokenizer=ScriptedTokenizer(end))) as client:
        message = client.post(CHAT, json=hello()).json()["choices"][0]["message"]
        found = deltas(events(client, CHAT, hello()))
        usage = client.post(CHAT, json=hello()).json()["usage"]
        raw = client.post(CHAT, json=hello(hypic={"parse": "none"})).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    assert "".join(d.get("reasoning_content", "") for d in found) == "Hm."
    assert "".join(d.get("content", "") for d in found) == "Yes."
    assert raw["content"] == answer and usage["completion_tokens_details"] == {"reasoning_tokens": 1}

"""The official client against the real process: answers, streams, reuse, errors."""

from __future__ import annotations

import asyncio
import json
import runpy
from collections.abc import Iterator
from typing import Any

import pytest

from hypic.types import MOST_LOGPROBS
from tests.apps.server.serving import ROOT, Process

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

PASSAGES = [
    f"Passage {n}: the mill on the river was built in {1800 + n} by the people of the village, who ground rye there."
    for n in range(3)
]
QUESTION = {"type": "text", "text": "Who built the mill?"}


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def parts(*texts: str, **hints: Any) -> list[dict[str, Any]]:
    return [*({"type": "text", "text": text, **hints} for text in texts), QUESTION]


def ask(client: Any, content: Any, **options: Any) -> Any:
    options = {"max_tokens": 4, "temperature": 0, "model": "tiny-hybrid", **options}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **options)


def outcomes(answer: Any) -> list[str]:
    return [segment["outcome"] for segment in answer.hypic["segments"]]


def test_segments_are_reused_in_any_order(client: Any) -> None:
    own = {"hypic": {"namespace": "order"}}
    cold = ask(client, parts(*PASSAGES), extra_body=own)
    turned = ask(client, parts(*PASSAGES[::-1]), extra_body=own)
    warm = ask(client, parts(*PASSAGES), extra_body=own)
    assert outcomes(cold) == ["encoded"] * 3 and outcomes(turned) == outcomes(warm) == ["hit"] * 3
    assert cold.choices[0].message.content == warm.choices[0].message.content != ""
    details = turned.usage.prompt_tokens_details
    assert details.cached_tokens == turned.hypic["reused_tokens"] > turned.usage.prompt_tokens // 2
    assert cold.usage.prompt_tokens_details.cache_write_tokens > 0 == details.cache_write_tokens
    assert turned.usage.total_tokens == turned.usage.prompt_tokens + turned.usage.completion_tokens
    assert turned.choices[0].finish_reason == "length" and turned.usage.completion_tokens == 4
    assert turned.system_fingerprint and turned._request_id


def test_reuse_can_be_switched_off_for_one_request(client: Any) -> None:
    ask(client, parts(*PASSAGES))
    full = ask(client, parts(*PASSAGES), extra_body={"hypic": {"reuse": "none"}})
    assert outcomes(full) == ["live"] * 3 and full.hypic["reused_tokens"] == 0
    assert full.hypic["policy"]["reuse"] == "none"
    assert full.usage.prompt_tokens_details.cached_tokens == 0


def test_hints_and_namespaces(client: Any) -> None:
    told = {"hypic": {"kind": "memory", "name": "mill.md", "source": "notes"}}
    first = ask(client, parts(PASSAGES[0], **told), prompt_cache_key="one")
    again = ask(client, parts(PASSAGES[0], extras=told), prompt_cache_key="one")
    other = ask(client, parts(PASSAGES[0], **told), prompt_cache_key="two")
    same = ask(client, parts(PASSAGES[0], **told), extra_body={"hypic": {"namespace": "one"}})
    assert outcomes(first) == outcomes(other) == ["encoded"] and outcomes(again) == outcomes(same) == ["hit"]
    (segment,) = first.hypic["segments"]
    assert (segment["kind"], segment["name"], segment["source"]) == ("memory", "mill.md", "notes")


def test_a_stream_says_the_same_as_a_whole_answer(client: Any) -> None:
    whole = ask(client, parts(*PASSAGES), max_tokens=12)
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    chunks = list(ask(client, parts(*PASSAGES), **options))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole.choices[0].message.content and sum(map(bool, texts)) > 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
    *_, finish, usage = chunks
    assert finish.choices[0].finish_reason == "length" and outcomes(finish) == ["hit"] * 3
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    assert all(c.usage is None for c in chunks[:-1])


def test_without_include_usage_there_is_none(client: Any) -> None:
    chunks = list(ask(client, "Hello", stream=True))
    assert all(c.usage is None and c.choices for c in chunks)


def test_the_helper_that_gathers_a_stream(client: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with client.chat.completions.stream(model="tiny-hybrid", messages=messages, temperature=0, max_tokens=9) as stream:
        kinds = {event.type for event in stream}
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    gathered = caught.value.completion.choices[0].message.content
    assert gathered == ask(client, "Hello", max_tokens=9).choices[0].message.content


def test_log_probabilities(client: Any) -> None:
    answer = ask(client, "Hello", logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 4 and all(len(e.top_logprobs) == 3 for e in entries)
    assert all(e.logprob == e.top_logprobs[0].logprob <= 0 for e in entries), "greedy takes the likeliest"
    streamed = list(ask(client, "Hello", logprobs=True, top_logprobs=3, stream=True))
    found = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in entries], abs=1e-4)


def test_a_stop_string_ends_the_text(client: Any) -> None:
    text = ask(client, "Hello", max_tokens=40).choices[0].message.content
    stop = text[len(text) // 2]
    answer = ask(client, "Hello", max_tokens=40, stop=[stop])
    assert answer.choices[0].message.content == text.partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer(client: Any) -> None:
    texts = [ask(client, "Hello", temperature=1.5, seed=n, max_tokens=12).choices[0].message.content for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_conversation_goes_on(client: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about the mill on the river, please."}]
    first = client.chat.completions.create(model="tiny-hybrid", messages=messages, max_tokens=6, temperature=0)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="tiny-hybrid", messages=messages, max_tokens=6, temperature=0)
    assert second.hypic["reused_tokens"] > first.usage.prompt_tokens // 2, "the turn before is not computed again"


def test_completions(client: Any) -> None:
    one = client.completions.create(model="tiny-hybrid", prompt="The mill", max_tokens=5, temperature=0, logprobs=1)
    batch = client.completions.create(model="tiny-hybrid", prompt=["The mill", "A river"], max_tokens=5, temperature=0)
    assert batch.object == "text_completion" and [c.index for c in batch.choices] == [0, 1]
    assert batch.choices[0].text == one.choices[0].text != batch.choices[1].text
    assert batch.usage.completion_tokens == 10 and len(batch.hypic["prompts"]) == 2
    assert len(one.choices[0].logprobs.tokens) == 5 and one.choices[0].logprobs.text_offset[0] == 0
    chunks = list(
        client.completions.create(
            model="tiny-hybrid", prompt=["The mill", "A river"], max_tokens=5, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.text for c in mine) == batch.choices[index].text and mine[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 10


def test_completions_of_segments(client: Any) -> None:
    segments = [{"text": text, "name": f"p{n}"} for n, text in enumerate(PASSAGES)]
    for order in (segments, segments[::-1]):
        answer = client.completions.create(
            model="tiny-hybrid", prompt="Who?", max_tokens=3,
            extra_body={"hypic": {"segments": order, "namespace": "text"}},
        )  # fmt: skip
    assert outcomes(answer) == ["hit"] * 3
    assert [s["name"] for s in answer.hypic["segments"]] == ["p2", "p1", "p0"]


def test_models(client: Any) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny-hybrid" and card.object == "model" and card.max_model_len == 8192
    assert client.models.retrieve("tiny-hybrid").id == card.id
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"hypic": {"reuse": "all"}}}, "reuse"),
        ({"extra_body": {"hypic": {"bogus": 1}}}, "hypic.bogus"),
        ({"extra_body": {"unheard_of": 1}}, "unheard_of"),
        ({"extra_body": {"documents": [{"text": "x"}]}}, "documents"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"extra_body": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_what_cannot_be_done_is_refused(client: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hello", **options)
    assert caught.value.type == "invalid_request_error" and param in (caught.value.param or caught.value.message)
    assert caught.value.message.count("\n") == 0 and caught.value.request_id


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "image_url"),
        ([{"type": "text", "text": "x", "hypic": {"kind": "poem"}}], "poem"),
        ([{"type": "text", "text": "x", "hypic": 3}], "hypic hint"),
        ([3], "int"),
    ],
)
def test_what_cannot_be_read_is_refused(client: Any, content: Any, expected: str) -> None:
    with pytest.raises(openai.BadRequestError, match=expected):
        ask(client, content)


@pytest.mark.parametrize("number", [20, 21, MOST_LOGPROBS])
def test_as_many_alternatives_as_the_library_gives(client: Any, number: int) -> None:
    (choice,) = ask(client, "Hello", logprobs=True, top_logprobs=number).choices
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {number}


def test_no_alternatives_are_no_reason_to_want_log_probabilities(client: Any) -> None:
    assert ask(client, "Hello", top_logprobs=0).choices[0].logprobs is None
    assert ask(client, "Hello", logprobs=False, top_logprobs=0).choices[0].logprobs is None
    (choice,) = ask(client, "Hello", logprobs=True, top_logprobs=0).choices
    assert choice.logprobs.content and all(not entry.top_logprobs for entry in choice.logprobs.content)


def test_more_alternatives_are_refused_with_the_limit(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 101; it must be a whole number from 0 to 100"):
        ask(client, "Hello", logprobs=True, top_logprobs=101)
    with pytest.raises(openai.BadRequestError, match="logprobs is 101; it must be a whole number at least 0 and at mo"):
        client.completions.create(model="tiny-hybrid", prompt="The mill", max_tokens=1, logprobs=101)


def test_any_finite_temperature_from_zero_up_is_taken(client: Any) -> None:
    assert ask(client, "Hello", temperature=9, seed=-1).choices[0].message.content is not None
    for value, said in ((-1, "-1"), (float("inf"), "inf"), (float("nan"), "nan")):
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "temperature": value})
        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{client.base_url}chat/completions", content=body, headers=headers)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and f"temperature is {said}" in message and "at least 0.0" in message


def test_harmless_fields_are_taken(client: Any) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "n": 1}
    extra = {"safety_identifier": "x", "prompt_cache_retention": "24h", "unheard_of": None, "length_penalty": 1}
    answer = ask(client, "Hello", **harmless, response_format={"type": "text"}, extra_body=extra)
    assert answer.choices and not any("passed over" in note for note in answer.hypic["notes"])


def test_fields_without_effect_are_told_in_the_report(client: Any) -> None:
    def told(answer: Any) -> list[str]:
        return [note.split()[0] for note in answer.hypic["notes"] if "was passed over" in note]

    told_of = {"reasoning_effort": "low", "verbosity": "high"}
    assert told(ask(client, "Hello", extra_body=told_of)) == ["reasoning_effort", "verbosity"]
    *_, last = (chunk for chunk in ask(client, "Hello", stream=True, reasoning_effort="low") if chunk.choices)
    assert told(last) == ["reasoning_effort"]
    for counts in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": counts}
        *_, last, usage = ask(client, "Hello", stream=True, stream_options=options)
        assert told(last) == ["continuous_usage_stats"] * counts and usage.usage.completion_tokens
    text = client.completions.create(model="tiny-hybrid", prompt="The mill", max_tokens=1, extra_body=told_of)
    assert told(text) == ["reasoning_effort", "verbosity"]


def test_a_prompt_that_is_too_long(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 8192 tokens.*prompt is too long") as e:
        ask(client, "river " * 8000)
    assert e.value.code == "context_length_exceeded" and "[context_length_exceeded]" in str(e.value)
    with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
        ask(client, "river " * 8000, stream=True)


def test_another_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "Hello", model="gpt-5")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_the_example_runs(server: Process, capsys: pytest.CaptureFixture[str]) -> None:
    run = runpy.run_path(str(ROOT / "examples" / "openai_client.py"))
    run["main"](server.url)
    out = capsys.readouterr().out
    assert out.count("hit, hit, hit") == 1 and out.count("live, live, live") == 1 and "   0 of" in out


def test_many_at_once(server: Process) -> None:
    async def answers() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:
            return await asyncio.gather(*(ask(client, parts(*PASSAGES[n % 3 :]), max_tokens=6) for n in range(12)))

    texts = [answer.choices[0].message.content for answer in asyncio.run(answers())]
    assert all(texts[n] == texts[n % 3] for n in range(12)) and len(set(texts)) == 3

"""``RemoteEngine`` against a server around a real engine in this process: it must say what that engine says itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from hypic import LLM, Completion, Policy, Prompt, SamplingParams, Segment
from hypic.errors import ConfigError, HypicError, PromptError, PromptTooLong, UnsupportedModel
from hypic.integrations.remote import RemoteEngine
from hypic.integrations.remote.wire import report_of, request
from hypic.kept import Forgotten
from hypic.types import MOST_LOGPROBS, CacheReport, TextEngine
from hypic_apps.server.app import create_app
from hypic_apps.server.schemas import HypicOptions
from tests.apps.cli_files import checkpoint
from tests.apps.server.serving import in_thread, until
from tests.integrations.scripted import ScriptedEngine
from tests.integrations.streaming import drained

MILL = "The mill on the river was built in 1871 by the people of the village, who ground rye there."
LAKE = "The lake behind the hill is nine metres deep and holds more pike than any other lake around."
SEGMENTS = [
    Segment("You answer from the passages.", "system"),
    Segment(MILL, name="mill", source="w.md"),
    Segment("Score 0.83:", cache=False),
    Segment(LAKE, "memory", name="lake", namespace="lakes"),
]
PROMPTS: list[Any] = [
    Prompt(SEGMENTS, "Who built the mill?"),
    Prompt(SEGMENTS[1:], "Who built the mill?", glue="\n", template=False),
    Prompt(tail="Once upon a time", template=False),
    f"{MILL} Who built it?",
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": MILL, "extras": {"hypic": {"name": "m"}}}, "Who?"]},
        {"role": "assistant", "content": "The people."},
        {"role": "user", "content": "When?", "glue": ""},
    ],
]
IDS = ["prompt", "no template", "bare", "text", "messages"]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = checkpoint(tmp_path_factory.mktemp("remote"))
    with LLM(str(folder), memory="64MiB", threads=1, dtype="float64") as made:
        yield made


@pytest.fixture(scope="module")
def root(llm: LLM) -> Iterator[str]:
    with in_thread(create_app(llm, model_name="tiny", keep_alive_s=0.2)) as found:
        yield found


@pytest.fixture
def remote(root: str) -> Iterator[RemoteEngine]:
    with RemoteEngine(root, max_retries=0) as made:
        yield made


def same_but_for_time(ours: Completion, theirs: Completion) -> None:
    """Equal to the last field; only seconds and rounding may differ."""
    assert ours.report is not None and theirs.report is not None
    assert set(ours.report.times_s) == set(theirs.report.times_s) and theirs.report.times_s["ttft"] > 0
    assert [x.logprob for x in ours.logprobs] == pytest.approx([x.logprob for x in theirs.logprobs])
    assert [[i for i, _ in x.top] for x in ours.logprobs] == [[i for i, _ in x.top] for x in theirs.logprobs]
    reports = [replace(c.report or CacheReport(), times_s={}) for c in (ours, theirs)]
    assert reports[0] == reports[1]
    plain = [replace(c, report=None, logprobs=()) for c in (ours, theirs)]
    assert plain[0] == plain[1]


def test_it_is_a_text_engine(remote: RemoteEngine) -> None:
    assert isinstance(remote, TextEngine)


@pytest.mark.parametrize("prompt", PROMPTS, ids=IDS)
def test_it_says_what_the_engine_says(prompt: Any, llm: LLM, remote: RemoteEngine) -> None:
    llm.forget(everything=True)
    llm.generate(prompt, SAMPLING)
    expected = llm.generate(prompt, SAMPLING)
    pieces = list(remote.stream(prompt, SAMPLING))
    assert len(pieces) > 1 and all(p.report is None and p.usage is None for p in pieces[:-1])
    same_but_for_time(Completion.join(pieces), expected)
    same_but_for_time(Completion.join(asyncio.run(drained(remote.astream(prompt, SAMPLING)))), expected)


@pytest.mark.parametrize("number", [20, 21, MOST_LOGPROBS])
@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[2]], ids=["chat", "bare"])
def test_as_many_alternatives_as_the_engine_gives(prompt: Any, number: int, llm: LLM, remote: RemoteEngine) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=number)
    expected, found = llm.generate(prompt, sampling), Completion.join(list(remote.stream(prompt, sampling)))
    assert [len(at.top) for at in found.logprobs] == [number] * len(expected.logprobs) and found.logprobs
    assert [[i for i, _ in at.top] for at in found.logprobs] == [[i for i, _ in at.top] for at in expected.logprobs]


def test_policy_and_sampling_arrive(llm: LLM, remote: RemoteEngine) -> None:
    policy = Policy(reuse="none", seam=4, deterministic=True, primed=False)
    sampling = SamplingParams(max_tokens=9, temperature=1.2, top_k=40, top_p=0.9, seed=3, stop=["zzz"], min_p=0.01)
    whole = Completion.join(list(remote.stream(PROMPTS[0], sampling, policy=policy)))
    assert whole.report is not None and whole.report.policy == policy and whole.report.reused_tokens == 0
    assert whole.text == llm.generate(PROMPTS[0], sampling, policy=policy).text


@pytest.mark.parametrize("prompt", PROMPTS, ids=IDS)
def test_a_server_from_before_primers_is_told_nothing_of_them(prompt: Any) -> None:
    """It refuses fields that it does not know."""
    before = HypicOptions.model_fields.keys() - {"primed", "rungs", "seam_opening"}
    policy = Policy(seam=4, live_last=1)
    told = request(prompt, SAMPLING, policy, None, None, None)[1]["hypic"]
    assert told.keys() <= before and told["seam"] == 4 and told["live_last"] == 1
    told = request(prompt, SAMPLING, policy.with_(primed=False), None, None, None)[1]["hypic"]
    assert told["primed"] is False and not told.keys() <= before
    told = request(prompt, SAMPLING, policy.with_(rungs=False, seam_opening=0), None, None, None)[1]["hypic"]
    assert told["rungs"] is False and told["seam_opening"] == 0 and told.keys() - before == {"rungs", "seam_opening"}


def test_a_report_from_before_rungs_had_none() -> None:
    assert report_of({"policy": {"seam": 4}}).policy == Policy(seam=4, rungs=False)
    assert report_of({"policy": {"seam": 4, "rungs": True}}).policy == Policy(seam=4)
    assert report_of({}).policy == Policy()


def test_tools_and_template_variables_arrive() -> None:
    from tests.apps.server.scripted import ServedScript

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = '<think>Hm.</think><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = ServedScript(answer=call)
    with in_thread(create_app(engine)) as root, RemoteEngine(root) as remote:
        pieces = list(remote.stream("Hi", tools=[tool], chat_template_kwargs={"enable_thinking": True}))
    whole = Completion.join(pieces)
    assert engine.last.tools == [tool] and engine.last.chat_template_kwargs == {"enable_thinking": True}
    assert whole.reasoning == "Hm." and whole.text == call.removeprefix("<think>Hm.</think>")


def look(place: str) -> str:
    """Looks around.

    Args:
        place: where
    """
    return place


def test_functions_describe_themselves_before_they_are_sent() -> None:
    """As with an engine in this process."""
    from hypic.engine.tokenizer import described
    from tests.apps.server.scripted import ServedScript

    engine = ServedScript(answer="Yes.")
    with in_thread(create_app(engine)) as root, RemoteEngine(root) as remote:
        assert Completion.join(list(remote.stream("Hi", tools=[look]))).text == "Yes."
    (told,) = engine.last.tools or ()
    assert told == described([look])[0] and told["function"]["parameters"]["required"] == ["place"]
    with pytest.raises(ConfigError, match="the function '<lambda>' does not describe itself"):
        list(remote.stream("Hi", tools=[lambda place: place]))


def test_flat_text_is_not_cut_behind_ones_back(llm: LLM, remote: RemoteEngine) -> None:
    llm.registry.register(MILL)
    whole = Completion.join(list(remote.stream(f"{MILL} Who?", SAMPLING)))
    llm.registry.clear()
    assert whole.report is not None and whole.report.segments == ()


def test_warm_forget_and_tokens(llm: LLM, remote: RemoteEngine) -> None:
    told: list[tuple[int, int]] = []
    reports = remote.warm(SEGMENTS[1:2] * 40, policy=Policy(seam=4), progress=lambda *done: told.append(done))
    assert len(reports) == 40 and told == [(32, 40), (40, 40)]
    assert reports[0].policy.seam == 4 and reports[0].segments[0].name == "mill"
    assert reports[39].segments[0].outcome == "hit"
    assert remote.forget(source="w.md").num_entries >= 1 and remote.forget(name="nobody") == Forgotten()
    assert remote.tokenize(MILL) == llm.tokenize(MILL) and remote.count_tokens(MILL) == llm.count_tokens(MILL)
    remote.warm(SEGMENTS[:1], policy=Policy(min_segment_tokens=0))
    with pytest.raises(ConfigError, match="everything=True"):
        remote.forget()
    assert remote.forget(everything=True).num_cached > 0 and llm.stats()["store"]["num_entries"] == 0


def test_a_namespace_of_its_own(root: str) -> None:
    engines = [RemoteEngine(root, namespace=name) for name in ("one", "two", "one")]
    prompt = Prompt([Segment(LAKE)], "?")
    outcomes = []
    for engine in engines:
        report = Completion.join(list(engine.stream(prompt, SAMPLING))).report
        assert report is not None
        outcomes.append(report.segments[0].outcome)
    assert outcomes == ["encoded", "encoded", "hit"]


def test_what_it_knows_of_the_model(llm: LLM, root: str, remote: RemoteEngine) -> None:
    assert (remote.model_name, remote.max_context) == ("tiny", llm.max_context)
    assert remote.fingerprint == llm.fingerprint and repr(remote) == f"RemoteEngine('{root}/v1')"
    with pytest.raises(UnsupportedModel, match="serves tiny, not 'big'"):
        _ = RemoteEngine(root, model="big").fingerprint


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "kind", "expected"),
    [
        ("river " * 8000, PromptTooLong, "prompt is too long"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], PromptError, "image_url"),
        ([{"role": "user", "content": [object()]}], PromptError, "cannot be sent as JSON"),
        ([{"role": "poet", "content": "x"}], PromptError, "'poet'"),
    ],
)
def test_errors_come_back_as_the_engine_raised_them(
    prompt: Any, kind: type[HypicError], expected: str, remote: RemoteEngine
) -> None:
    with pytest.raises(kind, match=expected):
        list(remote.stream(prompt))
    with pytest.raises(kind, match=expected):
        asyncio.run(drained(remote.astream(prompt)))


def test_keys(llm: LLM) -> None:
    with in_thread(create_app(llm, api_keys=["alpha"])) as root:
        assert list(RemoteEngine(root, api_key="alpha").stream("Hi", SAMPLING))
        for key in (None, "beta"):
            with pytest.raises(ConfigError, match="API key"):
                list(RemoteEngine(root, api_key=key).stream("Hi"))
        with pytest.raises(ConfigError, match="admin key"):
            RemoteEngine(root, api_key="alpha").forget(everything=True)


def test_another_model(root: str) -> None:
    with pytest.raises(UnsupportedModel, match="'big' does not exist"):
        list(RemoteEngine(root, model="big").stream("Hi"))


# -- breaking off ----------------------------------------------------------------------------------------------------


def test_closing_a_stream_frees_the_request(llm: LLM, remote: RemoteEngine) -> None:
    endless = SamplingParams(max_tokens=8000, ignore_eos=True)

    def idle() -> bool:
        return llm.stats()["requests"] == {"waiting": 0, "running": 0}

    stream = remote.stream("Hello", endless)
    next(stream)
    assert not idle()
    stream.close()
    until(idle, seconds=5)

    async def cancelled() -> None:
        task = asyncio.create_task(drained(remote.astream("Hello", endless)))
        while idle():
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(idle, seconds=5)


def test_many_threads_and_loops(remote: RemoteEngine) -> None:
    async def both() -> list[list[Completion]]:
        return await asyncio.gather(*(drained(remote.astream(PROMPTS[n % 3], SAMPLING)) for n in range(6)))

    texts: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: texts.append([Completion.join(p).text for p in asyncio.run(both())]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    here = [Completion.join(list(remote.stream(PROMPTS[n % 3], SAMPLING))).text for n in range(6)]
    for thread in threads:
        thread.join()
    assert texts == [here, here] and here[:3] == here[3:]


def test_the_scripted_engine_has_the_same_shape() -> None:
    """What integrations are tested with, and what they are given for ``base_url``, take the same calls."""
    import inspect

    for name in ("stream", "astream"):
        told = set(inspect.signature(getattr(RemoteEngine, name)).parameters)
        assert told == set(inspect.signature(getattr(LLM, name)).parameters)
    assert isinstance(ScriptedEngine(), TextEngine)

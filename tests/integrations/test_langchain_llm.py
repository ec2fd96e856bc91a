"""HypicLLM on a scripted engine: every call path of a string model, with segments and flat text."""

import copy
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda

from hypic.errors import PromptError
from hypic.integrations.langchain import SegmentedStr, segment
from hypic.types import Prompt, Segment
from tests.integrations.llm_paths import INPUTS, PAGES, PARTS, PATHS, PROMPT, SAID, llm_on, run
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("path", PATHS)
def test_segments_arrive_unmerged_on_every_path(path: str, given: str, engine: ScriptedEngine) -> None:
    assert PATHS[path](llm_on(engine), INPUTS[given]) == "It was built in 1871."
    (asked,) = engine.asked
    assert asked.prompt == PROMPT
    assert said(asked.prompt) == SAID
    assert segments(asked.prompt) == PARTS[1:]
    assert (engine.num_open, engine.num_finished) == (0, 1)


@pytest.mark.parametrize("path", PATHS)
def test_chat_prompts_keep_roles_and_blocks(path: str, engine: ScriptedEngine) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage([segment(PAGES[0], name="a"), "When?"])]
    for given in (messages, ChatPromptValue(messages=messages), SegmentedStr(messages)):
        PATHS[path](llm_on(engine), given)
        assert said(engine.last.prompt) == [("system", "Be brief."), ("user", f"{PAGES[0]}\n\nWhen?")]
        assert segments(engine.last.prompt) == [Segment(PAGES[0], name="a")]


def test_a_list_of_segments_and_a_chat_template(engine: ScriptedEngine) -> None:
    llm_on(engine).invoke(PARTS)
    assert engine.last.prompt == Prompt(PARTS)
    prompt = ChatPromptTemplate([("system", "Be {how}."), MessagesPlaceholder("m")])
    (prompt | llm_on(engine)).invoke({"how": "brief", "m": [HumanMessage([segment(PAGES[0]), "When?"])]})
    assert bodies(engine.last.prompt) == [PAGES[0]]
    assert [text for _, text in said(engine.last.prompt)] == ["Be brief.", f"{PAGES[0]}\n\nWhen?"]


@pytest.mark.parametrize("path", PATHS)
def test_flat_strings_are_split_again(path: str, engine: ScriptedEngine) -> None:
    engine.registry.register([Segment(PAGES[0], name="a", source="a.md"), Segment(PAGES[1], kind="system")])
    flat = f"Use <1>{PAGES[0]}</1>\n{PAGES[1]}\nWhen?"
    PATHS[path](llm_on(engine), flat)
    prompt = engine.last.prompt
    assert said(prompt) == [("user", flat)]
    assert segments(prompt) == [Segment(PAGES[0], name="a", source="a.md"), Segment(PAGES[1])]
    assert isinstance(prompt, Prompt) and prompt.template


def test_flat_strings_stay_whole_when_told_so(engine: ScriptedEngine) -> None:
    engine.registry.register(PAGES)
    flat = PromptTemplate.from_template("{page}\n\nWhen?").invoke({"page": PAGES[0]})
    whole: list[dict[str, Any]] = [
        {"split_flat": False},
        {"hypic": {"reuse": "prefix"}},
        {"hypic": {"reuse": "none"}},
        {"namespace": "n"},
    ]
    for options in whole:
        llm_on(engine).invoke(flat, **options)
        assert engine.last.prompt == Prompt(tail=f"{PAGES[0]}\n\nWhen?")
    llm_on(engine).invoke(flat)
    assert bodies(engine.last.prompt) == [PAGES[0]]


def test_a_prompt_is_taken_as_it_is_and_learned(engine: ScriptedEngine) -> None:
    engine.registry.register(PAGES[1])
    llm_on(engine, namespace=None).invoke(Prompt([Segment(PAGES[0])], f"Compare: {PAGES[1]}"))
    assert bodies(engine.last.prompt) == [PAGES[0]]
    llm_on(engine).invoke(f"Again: {PAGES[0]}")
    assert bodies(engine.last.prompt) == [PAGES[0]]


def test_namespace(engine: ScriptedEngine) -> None:
    llm = llm_on(engine, namespace="n")
    llm.invoke(PROMPT)
    assert {s.namespace for s in segments(engine.last.prompt)} == {"n"}
    llm.invoke(f"Again: {PAGES[0]}")
    assert [s.namespace for s in segments(engine.last.prompt)] == ["n"]
    llm_on(engine).invoke(f"Again: {PAGES[0]}")
    assert segments(engine.last.prompt) == []


def test_base_models_get_no_template(engine: ScriptedEngine) -> None:
    llm = llm_on(engine, template=False)
    llm.invoke("Once upon")
    assert engine.last.prompt == Prompt(tail="Once upon", template=False)
    llm.invoke(PROMPT)
    assert engine.last.prompt == Prompt(PARTS, "When?", template=False)
    messages = [SystemMessage("Be brief."), HumanMessage([segment(PAGES[0])]), AIMessage("1871."), HumanMessage("And?")]
    llm.invoke(messages)
    transcript = f"System: Be brief.\nHuman: {PAGES[0]}\nAI: 1871.\nHuman: And?"
    assert said(engine.last.prompt) == [("user", transcript)]
    assert str(SegmentedStr(messages)) == transcript
    assert bodies(engine.last.prompt) == [PAGES[0]]


def test_generate_reports_usage_per_prompt_and_in_all(engine: ScriptedEngine) -> None:
    seen: list[Any] = []

    class End(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            seen.append(response)

    for result in (llm_on(engine).generate(["a", "b"], callbacks=[End()]), run(llm_on(engine).agenerate(["a", "b"]))):
        assert result.llm_output["token_usage"] == {
            "prompt_tokens": 200,
            "completion_tokens": 10,
            "total_tokens": 210,
            "cached_tokens": 120,
        }
        assert result.llm_output["model_name"] == "scripted"
        info = result.generations[1][0].generation_info
        assert (info["token_usage"]["cached_tokens"], info["finish_reason"]) == (60, "stop")
        assert info["hypic"]["reused_tokens"] == 60
    assert len(seen) == 2


def test_call_options_and_their_cache_keys(engine: ScriptedEngine) -> None:
    llm = llm_on(engine, cache=InMemoryCache(), max_tokens=9)
    calls: list[dict[str, Any]] = [
        {},
        {"max_tokens": 5},
        {"hypic": {"reuse": "none"}},
        {"stop": ["!"]},
        {"namespace": "n"},
    ]
    for options in calls + calls:
        llm.invoke("When?", **options)
    assert len(engine.asked) == len(calls)
    assert [a.sampling.max_tokens for a in engine.asked] == [9, 5, 9, 9, 9]
    assert engine.asked[3].sampling.stop == ("!",)
    assert engine.asked[2].policy is not None and engine.asked[2].policy.reuse == "none"
    for bad in ({"tempreture": 1}, {"temperature": -1}):
        with pytest.raises(ModelInvalidRequestError, match="temp"):
            llm.invoke("When?", **bad)
    with pytest.raises(NotImplementedError, match="tools"):
        llm.invoke("When?", tools=[{}])


def test_segmented_strings_are_strings(engine: ScriptedEngine) -> None:
    text = SegmentedStr(PARTS)
    assert text == f"Be brief.\n\n{PAGES[0]}\n\n{PAGES[1]}"
    assert text.segments == tuple(PARTS)
    assert type(text + "") is str
    for again in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text), copy.copy(text)):
        assert (again, again.segments) == (text, text.segments)
    messages = SegmentedStr([HumanMessage("x")])
    assert pickle.loads(pickle.dumps(messages)).messages == messages.messages
    with pytest.raises(PromptError, match="'text'"):
        SegmentedStr("text")  # type: ignore[arg-type]
    spaced = Prompt([Segment("a\n"), Segment("b"), Segment("c:", cache=False)], "d", glue="|")
    assert SegmentedStr(spaced) == "a\nb|c:|d" == said(spaced)[0][1]


def test_events_of_a_chain(engine: ScriptedEngine) -> None:
    async def texts() -> list[str]:
        chain = RunnableLambda(lambda i: PROMPT) | llm_on(engine)
        events = chain.astream_events(0, version="v2")
        return [e["data"]["chunk"] async for e in events if e["event"] == "on_llm_stream"]

    assert "".join(c if isinstance(c, str) else c.text for c in run(texts())) == "It was built in 1871."
    assert engine.last.prompt == PROMPT

"""ChatHypic's options on a scripted engine: what reaches the engine, what is refused, and how copies behave."""

import copy
import pickle
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelTimeoutError,
)
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.runnables import ConfigurableField

from hypic.config import EngineConfig
from hypic.errors import (
    ConfigError,
    NonFiniteOutput,
    PromptError,
    PromptTooLong,
    StoreFull,
    UnsupportedModel,
    WorkerLost,
)
from hypic.integrations.langchain import ChatHypic, SegmentedStr, SegmentPromptValue, segment
from hypic.types import Policy, Prompt, Segment
from tests.integrations.chat_paths import MESSAGES, PAGES, PATHS, chat_on, run
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def test_sampling_from_fields_and_calls(engine: ScriptedEngine) -> None:
    chat = chat_on(engine, temperature=0.5, max_tokens=9, stop=["\n"], seed=3, top_k=4)
    chat.invoke("When?")
    sampling = engine.last.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop, sampling.seed) == (0.5, 9, ("\n",), 3)
    chat.invoke("When?", stop=["!", "?"], temperature=0, top_p=0.5)
    sampling = engine.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0, 0.5, 4, ("!", "?"))
    list(chat.bind(stop=["x"], max_tokens=2).stream("When?"))
    assert (engine.last.sampling.stop, engine.last.sampling.max_tokens) == (("x",), 2)
    assert chat.max_tokens == 9


def test_policy_from_fields_and_calls(engine: ScriptedEngine) -> None:
    chat = chat_on(engine, chat_template_kwargs={"enable_thinking": False})
    chat.invoke("When?")
    assert engine.last.policy is None
    assert engine.last.chat_template_kwargs == {"enable_thinking": False}
    chat.bind(hypic={"reuse": "none", "seam": 16}).invoke("When?")
    assert engine.last.policy == Policy(reuse="none", seam=16)
    chat_on(engine, policy=Policy(seam=4)).invoke("When?", hypic={"reuse": "prefix"})
    assert engine.last.policy == Policy(seam=4, reuse="prefix")
    chat_on(engine, settings={"seam": 32}).invoke("When?", hypic={"reuse": "prefix"})
    assert engine.last.policy == Policy(seam=32, reuse="prefix")
    with pytest.raises(ValueError, match=r"unknown option 'seam'; .* pass policy=hypic.Policy\(seam=16\)"):
        chat_on(engine, seam=16)
    with pytest.raises(ValueError, match=r"hypic.Policy\(seam=\.\.\.\); seam is -1; it must be .* 0 or more"):
        chat_on(engine, seam=-1)
    with pytest.raises(ModelInvalidRequestError, match=r"hypic.Policy\(reuse=\.\.\.\); reuse is 'all'; choose one of"):
        chat_on(engine).invoke("When?", reuse="all")
    with pytest.raises(ValueError, match=r"unknown option 'dtype'; engine settings .* settings="):
        chat_on(engine, dtype="float32")
    with pytest.raises(ModelInvalidRequestError, match=r"'reuse'; .* pass policy=hypic.Policy\(reuse='none'\)"):
        chat_on(engine).invoke("When?", reuse="none")


def test_namespace_reaches_every_block(engine: ScriptedEngine) -> None:
    forged = HumanMessage([{**segment(PAGES[0], namespace="theirs")}, {"type": "text", "text": "When?"}])
    chat_on(engine, namespace="ours").invoke([SystemMessage("s"), forged])
    assert [s.namespace for s in segments(engine.last.prompt)] == ["ours"]
    chat_on(engine).invoke([forged], hypic={"namespace": "call"})
    assert [s.namespace for s in segments(engine.last.prompt)] == ["call"]
    chat_on(engine).invoke([forged])
    assert [s.namespace for s in segments(engine.last.prompt)] == ["theirs"]


def test_prompts_and_segments_as_input(engine: ScriptedEngine) -> None:
    first, second = Segment(PAGES[0], name="a"), Segment(PAGES[1])
    parts = [Segment("Be brief.", kind="system"), first, Segment("Second:", cache=False), second]
    text = [("system", "Be brief."), ("user", f"{PAGES[0]}\n\nSecond:\n\n{PAGES[1]}\n\nWhen?")]
    chat = chat_on(engine)
    prompt = Prompt(parts, "When?")
    for given in (prompt, SegmentPromptValue(segments=parts, tail="When?"), SegmentedStr(prompt)):
        chat.invoke(given)
        assert said(engine.last.prompt) == text
        assert segments(engine.last.prompt) == [first, second]
    chat.invoke(parts)
    assert said(engine.last.prompt)[1][1] == f"{PAGES[0]}\n\nSecond:\n\n{PAGES[1]}"
    chat.invoke(Prompt(parts, "When?", glue=" / "))
    assert said(engine.last.prompt)[1][1] == f"{PAGES[0]} / Second: / {PAGES[1]} / When?"
    assert bodies(engine.last.prompt) == PAGES
    with pytest.raises(ModelInvalidRequestError, match="template=False"):
        chat.invoke(Prompt(parts, "When?", template=False))


def test_errors_in_langchain_words() -> None:
    expected: list[tuple[Exception, type[Exception]]] = [
        (PromptTooLong("5000 tokens, 4096 fit"), ContextOverflowError),
        (StoreFull("too big"), ContextOverflowError),
        (PromptError("no template"), ModelInvalidRequestError),
        (ConfigError("seed is 'x'"), ModelInvalidRequestError),
        (UnsupportedModel("gpt2"), ModelNotFoundError),
        (WorkerLost("gone"), ModelAPIError),
        (NonFiniteOutput("nan"), ModelError),
    ]
    for ours, theirs in expected:
        engine = ScriptedEngine(error=ours)
        for path in ("invoke", "ainvoke", "stream", "astream"):
            with pytest.raises(theirs, match=str(ours)) as caught:
                PATHS[path](chat_on(engine), MESSAGES)
            assert caught.value.__cause__ is ours
        assert engine.num_open == 0


def test_wrong_options_fail_before_anything_is_computed(engine: ScriptedEngine) -> None:
    chat = chat_on(engine)
    with pytest.raises(ModelInvalidRequestError, match="temperature is -1"):
        chat.invoke("When?", temperature=-1)
    with pytest.raises(ModelInvalidRequestError, match="'temprature'"):
        chat.invoke("When?", temprature=1)
    with pytest.raises(ModelInvalidRequestError, match="'sharing'"):
        chat.invoke("When?", hypic={"sharing": 1})
    with pytest.raises(ModelInvalidRequestError, match="reuse is 'all'"):
        chat.invoke("When?", hypic={"reuse": "all"})
    with pytest.raises(ModelNotFoundError, match="'scripted'"):
        chat.invoke("When?", model="other")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": -1}, "temperature is -1"),
        ({"memroy": 1}, "'memroy'"),
        ({"engine": 3}, "stream"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            ChatHypic(**options)
    assert not engine.asked


def test_blocks_that_are_not_text_are_refused(engine: ScriptedEngine) -> None:
    image = {"type": "image", "url": "https://example.org/a.png"}
    with pytest.raises(ModelInvalidRequestError, match="'image'"):
        chat_on(engine).invoke([HumanMessage([image])])
    with pytest.raises(ModelInvalidRequestError, match="empty"):
        chat_on(engine).invoke([])
    assert not engine.asked


def test_llm_cache_keys_hold_everything(engine: ScriptedEngine) -> None:
    cache = InMemoryCache()
    chat = chat_on(engine, cache=cache)
    assert chat.invoke(MESSAGES).content == chat.invoke(MESSAGES).content
    assert len(engine.asked) == 1
    chat.invoke(MESSAGES, hypic={"reuse": "none"})
    chat.invoke(MESSAGES, temperature=1)
    others: list[dict[str, Any]] = [
        {"policy": Policy(reuse="prefix")},
        {"namespace": "n"},
        {"split_flat": False},
        {"seed": 1},
        {"settings": {"dtype": "float64"}},
    ]
    for options in others:
        chat_on(engine, cache=cache, **options).invoke(MESSAGES)
    chat.invoke([MESSAGES[0], HumanMessage(MESSAGES[1].text)])
    assert len(engine.asked) == 4 + len(others)


def test_token_counts_are_the_engines(engine: ScriptedEngine) -> None:
    chat = chat_on(engine)
    assert chat.get_token_ids("one three") == [3, 5]
    assert chat.get_num_tokens("one two three") == 3
    assert chat.get_num_tokens_from_messages(MESSAGES) == 4 + 10 + 10 + 1 + 2 * 6
    assert ChatHypic(engine=engine, custom_get_token_ids=lambda text: [1, 2]).get_num_tokens("x") == 2


def test_an_engine_with_nothing_but_streams() -> None:
    class Bare:
        def stream(self, prompt: Any, sampling: Any = None, **options: Any) -> Iterator[Any]:
            return ScriptedEngine().stream(prompt, sampling, **options)

        def astream(self, prompt: Any, sampling: Any = None, **options: Any) -> AsyncIterator[Any]:
            return ScriptedEngine().astream(prompt, sampling, **options)

    chat = ChatHypic(engine=Bare(), model="bare")
    assert chat.invoke(MESSAGES).response_metadata["model_name"] == "bare"
    assert ChatHypic(engine=Bare()).invoke("x").response_metadata["model_name"] == "hypic"
    assert run(chat.ainvoke(MESSAGES)).content == "It was built in 1871."
    with pytest.raises(NotImplementedError, match="tokenize"):
        chat.get_num_tokens("x")


def test_timeouts(engine: ScriptedEngine) -> None:
    slow = ScriptedEngine(wait_s=5)
    with pytest.raises(ModelTimeoutError, match=r"0\.05"):
        run(chat_on(slow, timeout=0.05).ainvoke("When?"))
    with pytest.raises(ModelTimeoutError):
        chat_on(engine, timeout=0).invoke("When?")
    assert slow.num_open == engine.num_open == 0
    assert chat_on(ScriptedEngine(), timeout=60).invoke("When?").content


def test_copies_share_the_engine(engine: ScriptedEngine) -> None:
    chat = chat_on(engine)
    assert copy.deepcopy(chat).engine is copy.copy(chat).engine is engine
    chosen = chat.configurable_fields(max_tokens=ConfigurableField(id="n"))
    chosen.invoke("When?", {"configurable": {"n": 3}})
    assert engine.last.sampling.max_tokens == 3


def test_pickle_and_dumps() -> None:
    chat = ChatHypic(model="some/model", temperature=0.5, policy=Policy(seam=4), settings={"device": "cpu"})
    again = pickle.loads(pickle.dumps(chat))
    assert again == chat
    assert again._identifying_params == chat._identifying_params
    assert "not_implemented" in dumps(chat)
    text = dumps(chat_on(ScriptedEngine(answer="secret"), api_key="hidden"))
    assert "ChatHypic" in text and "secret" not in text and "hidden" not in text


@dataclass
class ConfiguredEngine(ScriptedEngine):
    """Tells its settings, as ``hypic.LLM`` does."""

    config: EngineConfig = EngineConfig()


def test_engines_that_answer_otherwise_share_no_cached_answer() -> None:
    """Of one model, with one fingerprint."""
    settings: list[dict[str, Any]] = [
        *({}, {"primer": ""}, {"primer": "A text."}, {"policy": Policy(seam=32)}, {"policy": Policy(primed=False)}),
        *({"dtype": "float32"}, {"storage": "bfloat16"}, {"adapter": "some/adapter"}),
    ]
    keys = [chat_on(ConfiguredEngine(config=EngineConfig(**one)))._identifying_params for one in settings]
    assert all(keys.count(key) == 1 for key in keys)
    again = chat_on(ConfiguredEngine(config=EngineConfig(memory="1GiB", max_running=3)))
    assert again._identifying_params == keys[0], "how much it holds changes no answer"


def test_profile_and_tracing_names(engine: ScriptedEngine) -> None:
    chat = chat_on(engine, stop=["x"])
    assert chat.profile is not None and chat.profile["max_input_tokens"] == 4096
    assert chat.profile["tool_calling"] is True and chat.profile["structured_output"] is False
    params = chat._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"], params["ls_stop"]) == ("hypic", "scripted", ["x"])
    by_name: dict[str, Any] = {"model_name": "m"}
    assert ChatHypic(**by_name).model == ChatHypic(model="m").model_name == "m"
    assert set(ChatHypic().metadata["lc_versions"]) >= {"hypic", "langchain-core"}  # type: ignore[index]


def test_history_with_tools_keeps_its_fields(engine: ScriptedEngine) -> None:
    call = {"name": "search", "args": {"q": "mill"}, "id": "1", "type": "tool_call"}
    asked = AIMessage([{"type": "text", "text": "Let me look."}, call], tool_calls=[call])
    history = [HumanMessage("When?", name="ann"), asked, AIMessageChunk(content="Well.")]
    chat_on(engine).invoke(history)
    user, assistant, _ = engine.last.messages
    assert user == {"role": "user", "name": "ann", "content": "When?"}
    function = {"name": "search", "arguments": {"q": "mill"}}
    assert assistant["tool_calls"] == [{"type": "function", "id": "1", "function": function}]
    assert said(engine.last.prompt)[1:] == [("assistant", "Let me look."), ("assistant", "Well.")]

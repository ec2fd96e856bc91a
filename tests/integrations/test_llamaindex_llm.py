"""LlamaIndex's HypicLLM on a scripted engine: nine methods, options, usage, callbacks, copies."""

import asyncio
import copy
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, DocumentBlock, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate

from hypic.errors import PromptError, PromptTooLong
from hypic.integrations.llamaindex import HypicLLM
from hypic.types import Policy, Prompt
from tests.integrations.scripted import ScriptedEngine, bodies, said

ANSWER = "It was built in 1871."
ASKED = [ChatMessage(role="system", content="Be brief."), ChatMessage("When was it built?")]
PAGE = "The Alpha mill was built in 1871 on the Lenne, and closed in 1954."


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def llm(engine: ScriptedEngine) -> HypicLLM:
    return HypicLLM(engine=engine)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


async def drained(stream: Any) -> list[Any]:
    return [item async for item in await stream]


def test_it_is_an_llm_by_name() -> None:
    assert BaseLLM.__name__ in [base.__name__ for base in HypicLLM.__mro__]
    assert HypicLLM.class_name() == "Hypic_LLM"


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, hypic.integrations.llamaindex; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("method", ["chat", "achat", "stream_chat", "astream_chat"])
def test_chat_in_all_four_ways(method: str, llm: HypicLLM, engine: ScriptedEngine) -> None:
    responses = results(llm, method, ASKED)
    last: ChatResponse = responses[-1]
    assert last.message.role.value == "assistant" and last.message.content == ANSWER
    assert last.raw is not None and last.raw["usage"]["prompt_tokens"] == 100
    assert last.raw["hypic"]["reused_tokens"] == 60 and last.raw["finish_reason"] == "stop"
    assert last.additional_kwargs["completion_tokens"] == 5
    assert said(engine.last.prompt) == [("system", "Be brief."), ("user", "When was it built?")]
    assert (engine.num_open, engine.num_finished) == (0, 1)
    if len(responses) > 1:
        texts = [r.message.content for r in responses]
        assert texts == ["".join(r.delta for r in responses[: n + 1]) for n in range(len(responses))]
        assert [r.raw for r in responses[:-1]] == [None] * (len(responses) - 1)


@pytest.mark.parametrize("method", ["complete", "acomplete", "stream_complete", "astream_complete"])
@pytest.mark.parametrize("formatted", [False, True])
def test_completion_in_all_four_ways(method: str, formatted: bool, llm: HypicLLM, engine: ScriptedEngine) -> None:
    responses = results(llm, method, "When?", formatted=formatted)
    last: CompletionResponse = responses[-1]
    assert last.text == ANSWER and last.raw is not None and last.raw["model"] == "scripted"
    assert engine.last.prompt == Prompt(tail="When?", template=not formatted)
    if len(responses) > 1:
        assert "".join(r.delta or "" for r in responses) == ANSWER == responses[-2].text


def results(llm: HypicLLM, method: str, asked: Any, **kwargs: Any) -> list[Any]:
    call = getattr(llm, method)
    if method.startswith("astream"):
        return run(drained(call(asked, **kwargs)))  # type: ignore[no-any-return]
    if method.startswith("stream"):
        return list(call(asked, **kwargs))
    return [run(call(asked, **kwargs)) if method.startswith("a") else call(asked, **kwargs)]


def test_predicting_goes_through_chat(llm: HypicLLM, engine: ScriptedEngine) -> None:
    llm.system_prompt = "Be brief."
    template = PromptTemplate("When was {what} built?")
    assert llm.predict(template, what="it") == ANSWER == "".join(llm.stream(template, what="it"))
    assert run(llm.apredict(template, what="it")) == ANSWER
    expected = [("system", "Be brief."), ("user", "When was it built?")]
    assert [said(asked.prompt) for asked in engine.asked] == [expected] * 3


def test_reasoning_is_apart(llm: HypicLLM, engine: ScriptedEngine) -> None:
    engine.answer = "<think>\nWhich mill?\n</think>\n\nIn 1871."
    responses = list(llm.stream_chat(ASKED))
    last = responses[-1].message
    assert isinstance(last.blocks[0], ThinkingBlock) and last.blocks[0].content == "Which mill?"
    assert last.content == "In 1871."
    thoughts = [r.additional_kwargs["thinking_delta"] for r in responses if "thinking_delta" in r.additional_kwargs]
    assert "".join(thoughts) == "Which mill?"
    llm.chat([*ASKED, last, ChatMessage("And then?")])
    assert engine.last.messages[2]["reasoning_content"] == "Which mill?"
    assert said(engine.last.prompt)[2] == ("assistant", "In 1871.")


def test_what_a_user_templates_himself_goes_in_as_it_is(engine: ScriptedEngine) -> None:
    llm = HypicLLM(engine=engine, completion_to_prompt=lambda prompt: f"Q: {prompt}\nA:")
    llm.complete("When?")
    assert engine.last.prompt == Prompt(tail="Q: When?\nA:", template=False)


# -- options ---------------------------------------------------------------------------------------------------------


def test_options_of_a_call_win(engine: ScriptedEngine) -> None:
    llm = HypicLLM(engine=engine, temperature=0.5, max_tokens=9, stop=["\n"], chat_template_kwargs={"a": 1, "b": 1})
    llm.chat(ASKED)
    assert (engine.last.sampling.temperature, engine.last.sampling.max_tokens) == (0.5, 9)
    llm.chat(ASKED, temperature=0.0, stop=["."], hypic={"reuse": "none"}, chat_template_kwargs={"b": 2})
    assert (engine.last.sampling.temperature, engine.last.sampling.stop) == (0.0, (".",))
    assert engine.last.policy == Policy(reuse="none")
    assert engine.last.chat_template_kwargs == {"a": 1, "b": 2}
    llm.complete("x", policy=Policy(seam=4), hypic={"reuse": "prefix"})
    assert engine.last.policy == Policy(reuse="prefix", seam=4)


def test_what_cannot_be_right_is_refused_before_anything_runs(llm: HypicLLM, engine: ScriptedEngine) -> None:
    refused: list[tuple[Any, str]] = [
        (lambda: HypicLLM.from_dict({"device": "cpu"}), "'device'.*settings"),
        (lambda: HypicLLM(engine=engine, seam=16), r"'seam'; .* pass policy=hypic.Policy\(seam=16\)"),
        (lambda: HypicLLM(engine=engine, seam=-1), r"hypic.Policy\(seam=\.\.\.\); seam is -1; it must be"),
        (lambda: llm.chat(ASKED, reuse="none"), r"'reuse'; .* pass policy=hypic.Policy\(reuse='none'\)"),
        (lambda: HypicLLM(engine=object()), "stream and astream"),
        (lambda: HypicLLM(engine=engine, temperature=-1.0), "temperature"),
        (lambda: llm.chat(ASKED, temprature=1), "unknown call option 'temprature'"),
        (lambda: llm.stream_chat(ASKED, hypic={"reuze": 1}), "unknown policy field 'reuze'"),
        (lambda: llm.complete("x", top_p=3.0), "top_p"),
        (lambda: llm.chat([]), "list of messages is empty"),
        (lambda: run(llm.astream_chat(ASKED, response_format={})), "response_format"),
        (lambda: llm.chat(ASKED, tool_choice="required"), "tool_choice"),
        (lambda: llm.complete("x", True, tools=[{"function": {"name": "f"}}]), "formatted=False"),
    ]
    for call, said_so in refused:
        with pytest.raises(ValueError, match=said_so):
            call()
    assert not engine.asked


def test_metadata_is_cheap_and_right(engine: ScriptedEngine, tmp_path: Any) -> None:
    given = HypicLLM(engine=engine, max_tokens=7).metadata
    assert (given.context_window, given.num_output, given.model_name) == (4096, 7, "scripted")
    assert given.is_chat_model and given.is_function_calling_model
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 1234}}))
    cold = HypicLLM(model=str(tmp_path))
    assert (cold.metadata.context_window, cold.metadata.num_output) == (1234, 256)
    assert HypicLLM(model=str(tmp_path), settings={"max_context": 99}).metadata.context_window == 99
    assert HypicLLM(model="org/none", context_window=55).metadata.context_window == 55
    assert HypicLLM(model="org/none").metadata.model_name == "org/none"
    assert HypicLLM(model="org/none").metadata.context_window > 1000


def test_errors_keep_their_type_and_free_the_engine(llm: HypicLLM, engine: ScriptedEngine) -> None:
    engine.error = PromptTooLong("the prompt has 9 tokens, more than 8; shorten it.")
    for method in ("chat", "achat", "stream_chat", "astream_chat", "complete", "acomplete"):
        with pytest.raises(PromptTooLong, match="9 tokens"):
            results(llm, method, ASKED if "chat" in method else "x")
    assert engine.num_open == 0 and engine.num_closed == 6


# -- copies ----------------------------------------------------------------------------------------------------------


def test_copies_share_the_engine_and_serialise(llm: HypicLLM, engine: ScriptedEngine) -> None:
    assert copy.deepcopy(llm).get_engine() is engine is llm.model_copy().get_engine()
    full = HypicLLM(model="org/name", temperature=0.5, policy=Policy(seam=4), stop=["x"], settings={"device": "cpu"})
    for again in (
        HypicLLM.from_dict(full.to_dict()),
        HypicLLM.from_json(full.to_json()),
        pickle.loads(pickle.dumps(full)),
    ):
        assert isinstance(again, HypicLLM)
        assert again.to_dict() == full.to_dict() and again.policy == Policy(seam=4)
    unpickled = pickle.loads(pickle.dumps(llm))
    # An engine cannot travel; its model can.
    assert (unpickled.engine, unpickled.model) == (None, "scripted")
    assert llm.get_engine() is engine
    assert "engine" not in llm.to_dict() and llm.to_dict()["class_name"] == "Hypic_LLM"


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_and_token_counts(engine: ScriptedEngine) -> None:
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler(tokenizer=str.split)
    llm = HypicLLM(engine=engine, callback_manager=CallbackManager([debug, counter]))
    llm.chat(ASKED)
    list(llm.stream_chat(ASKED))
    run(llm.acomplete("x"))
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 3
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (300, 15)
    assert llm.tokenizer_fn("to be") == [2, 2] and llm.count_tokens("to be") == 2


# -- flat text -------------------------------------------------------------------------------------------------------


def test_known_texts_are_found_in_flat_text(llm: HypicLLM, engine: ScriptedEngine) -> None:
    engine.registry.register(PAGE)
    answer = llm.chat([ChatMessage(f"Read this:\n{PAGE}\nWhen?")])
    assert bodies(engine.last.prompt) == [PAGE]
    assert said(engine.last.prompt) == [("user", f"Read this:\n{PAGE}\nWhen?")]
    assert answer.raw is not None and answer.raw["hypic"]["split"]["found"][0]["start"] == 11
    llm.complete(f"{PAGE} When?")
    assert bodies(engine.last.prompt) == [PAGE] and said(engine.last.prompt) == [("user", f"{PAGE} When?")]
    for off in ({"split_flat": False}, {"hypic": {"reuse": "prefix"}}, {"namespace": "other"}):
        llm.chat([ChatMessage(PAGE)], **off)
        assert bodies(engine.last.prompt) == []


def test_images_and_files_are_refused_by_name(llm: HypicLLM, engine: ScriptedEngine) -> None:
    for block, name in ((ImageBlock(image=b"GIF8"), "image"), (DocumentBlock(data=b"%PDF"), "document")):
        with pytest.raises(PromptError, match=f"block 1 of message 0 has the type '{name}'"):
            llm.chat([ChatMessage(role="user", blocks=[TextBlock(text="See"), block])])
    assert not engine.asked

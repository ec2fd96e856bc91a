"""The LangChain models on a real engine with a tiny random checkpoint: reuse, cancellation, threads, the example."""

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.tools import tool

from hypic.integrations.langchain import ChatHypic, HypicLLM, create_segment_documents_chain, segment
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel
from tests.idle import is_idle

ROOT = Path(__file__).parents[2]
SETTINGS = {"memory": "64MiB", "device": "cpu", "dtype": "float32"}
PAGES = [f"Passage {n}: the company was founded in {1900 + n} by Ada Perkins of the Elbe hills." for n in range(4)]
DOCS = [Document(id=f"d{n}", page_content=page) for n, page in enumerate(PAGES)]
PROMPT = ChatPromptTemplate([("system", "You answer from the passages."), ("human", "{context}\n\n{input}")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = qwen(tmp_path_factory.mktemp("tiny"), vocab_size=352)
    return str(save_bytelevel(made))


@pytest.fixture
def chat(folder: str) -> Iterator[Any]:
    model = ChatHypic(model=folder, settings=SETTINGS, temperature=0, max_tokens=6, ignore_eos=True)
    yield model
    model.close()


def outcomes(answer: Any) -> list[tuple[str, str]]:
    return [(s["name"], s["outcome"]) for s in answer.response_metadata["hypic"]["segments"]]


def chain_on(llm: Any) -> Any:
    return create_segment_documents_chain(llm, PROMPT)


def test_documents_are_reused_in_any_order(chat: Any) -> None:
    answers: list[Any] = []

    def kept(message: Any) -> Any:
        answers.append(message)
        return message

    keep = chain_on(chat | kept)
    cold = keep.invoke({"context": DOCS, "input": "Who?"})
    keep.invoke({"context": DOCS[::-1], "input": "Who?"})
    warm = keep.invoke({"context": DOCS, "input": "Who?"})
    assert cold == warm
    assert outcomes(answers[0]) == [(f"d{n}", "encoded") for n in range(4)]
    assert outcomes(answers[1]) == [(f"d{n}", "hit") for n in (3, 2, 1, 0)]
    usage = answers[1].usage_metadata
    assert usage["input_token_details"]["cache_read"] > 0.5 * usage["input_tokens"]


def test_flat_text_gives_the_same_answer_as_the_chain(chat: Any, folder: str) -> None:
    chained = chain_on(chat).invoke({"context": DOCS, "input": "Who?"})
    joined = "\n\n".join(d.page_content for d in DOCS)
    flat = chat.invoke(PROMPT.invoke({"context": joined, "input": "Who?"}))
    assert flat.content == chained
    assert outcomes(flat) == [(f"d{n}", "hit") for n in range(4)]
    llm = HypicLLM(model=folder, settings=SETTINGS, temperature=0, max_tokens=6, ignore_eos=True)
    assert llm.get_engine() is chat.get_engine()
    text = PromptTemplate.from_template("{context}\n\nWho?").invoke({"context": joined}).to_string()
    info = llm.generate([text]).generations[0][0].generation_info
    assert info is not None and [s["outcome"] for s in info["hypic"]["segments"]] == ["hit"] * 4
    llm.close()


def test_streams_batches_and_async_agree(chat: Any) -> None:
    chain = chain_on(chat)
    inputs = [{"context": DOCS[:n], "input": "Who?"} for n in (1, 2, 3)]

    async def streamed(one: Any) -> str:
        return "".join([piece async for piece in chain.astream(one)])

    async def together() -> list[str]:
        return list(await asyncio.gather(*(streamed(one) for one in inputs)))

    answers = [chain.invoke(one) for one in inputs]
    assert chain.batch(inputs) == answers == asyncio.run(together())
    assert ["".join(chain.stream(one)) for one in inputs] == answers


def test_documents_in_a_tool_s_result_are_reused(chat: Any) -> None:
    """Tools stand in the prompt; what a tool found is one segment per document, wherever it comes back."""

    @tool
    def look_up(query: str) -> str:
        """Finds passages."""
        return query

    def conversation(pages: list[str]) -> list[Any]:
        asked = AIMessage("", tool_calls=[{"name": "look_up", "args": {"query": "x"}, "id": "c1"}])
        found = ToolMessage([segment(page, name=page[:9]) for page in pages], tool_call_id="c1")
        return [HumanMessage("Who?"), asked, found]

    plain = chat.invoke(conversation(PAGES))
    bound = chat.bind_tools([look_up])
    cold, warm = bound.invoke(conversation(PAGES)), bound.invoke(conversation(PAGES[::-1]))
    assert cold.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]
    names = [page[:9] for page in PAGES]
    assert outcomes(plain) == [(name, "encoded") for name in names]
    assert outcomes(cold) == [(name, "hit") for name in names]
    assert outcomes(warm) == [(name, "hit") for name in names[::-1]]


def test_cancelling_and_breaking_off_leave_nothing_running(chat: Any) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(chat.ainvoke("Who?", max_tokens=5000))
        while not chat.get_engine().stats()["requests"]["running"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    stream = chat.stream("Who?", max_tokens=5000)
    next(stream)
    stream.close()
    chat.invoke("Who?")  # a whole request later, whatever was aborted is gone
    assert is_idle(chat.get_engine())


def test_too_long_and_token_counts(chat: Any) -> None:
    with pytest.raises(ContextOverflowError, match="tokens"):
        chat.invoke("Who? " * 9000)
    engine = chat.get_engine()
    assert chat.get_num_tokens("Who founded the company?") == len(chat.get_token_ids("Who founded the company?"))
    assert ChatHypic(engine=engine).profile["max_input_tokens"] == engine.max_context  # type: ignore[index]


def test_the_example_runs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("langchain_rag", ROOT / "examples" / "langchain_rag.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "langchain_rag", example)
        spec.loader.exec_module(example)
        example.main(["--model", folder])
    shown = capsys.readouterr().out
    assert shown.count(" encoded ") == 3
    assert shown.count(" hit ") == 3

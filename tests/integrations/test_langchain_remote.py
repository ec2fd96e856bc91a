"""LangChain's models on a running server: the same tokens, hits and reports as on an engine in this process."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from langchain_core.documents import Document
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelInvalidRequestError,
    ModelNotFoundError,
)
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate

from hypic.integrations.langchain import ChatHypic, HypicLLM, create_segment_documents_chain, segment
from hypic.integrations.remote import RemoteEngine
from hypic.types import Prompt, Segment
from tests.apps.server.serving import Process, serve
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel

KEY, ADMIN = "alpha", "root"
PAGES = [f"Passage {n}: the company was founded in {1900 + n} by Ada Perkins of the Elbe hills." for n in range(3)]
BLOCKS = [segment(page, "memory", name=f"p{n}", source="x.md") for n, page in enumerate(PAGES)]
MESSAGE = HumanMessage([*BLOCKS, "Who?"])
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = qwen(tmp_path_factory.mktemp("tiny"), vocab_size=352)
    return str(save_bytelevel(made))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Process]:
    flags = ("--dtype", "float64", "--api-key", KEY, "--admin-key", ADMIN, "--name", "tiny")
    with serve(folder, *flags) as running:
        yield running


@pytest.fixture
def remote(server: Process) -> Iterator[Any]:
    """What a server is told of: address and key, nothing else; it holds nothing when the test begins."""
    RemoteEngine(server.url, api_key=ADMIN).forget(everything=True)
    chat = ChatHypic(base_url=server.url, api_key=KEY, **OPTIONS)
    yield chat
    chat.close()


@pytest.fixture(scope="module")
def local(folder: str) -> Iterator[Any]:
    settings = {"memory": "64MiB", "device": "cpu", "dtype": "float64"}
    chat = ChatHypic(model=folder, settings=settings, **OPTIONS)
    yield chat
    chat.close()


def told(metadata: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Token ids, and the report without what depends on the clock and on whose key it was."""
    ids = [entry["token_id"] for entry in metadata["logprobs"]["content"]]
    report = {key: value for key, value in metadata["hypic"].items() if key != "times_s"}
    return ids, report


def outcomes(metadata: dict[str, Any]) -> list[str]:
    return [one["outcome"] for one in metadata["hypic"]["segments"]]


def test_hints_and_report_are_intact(remote: Any, local: Any) -> None:
    here, there = (chat.invoke([MESSAGE]) for chat in (local, remote))
    assert here.content == there.content and told(here.response_metadata) == told(there.response_metadata)
    assert here.usage_metadata == there.usage_metadata
    first = there.response_metadata["hypic"]["segments"][0]
    assert (first["kind"], first["name"], first["source"], first["outcome"]) == ("memory", "p0", "x.md", "encoded")
    assert there.response_metadata["model_name"] == "tiny"
    again = remote.invoke([MESSAGE])
    assert outcomes(again.response_metadata) == ["hit"] * 3 and again.content == here.content
    assert again.usage_metadata["input_token_details"]["cache_read"] > 0


def test_all_ways_to_ask_agree(remote: Any) -> None:
    async def astreamed() -> Any:
        pieces = [piece async for piece in remote.astream([MESSAGE])]
        return sum(pieces[1:], pieces[0])

    pieces = list(remote.stream([MESSAGE]))
    assert len(pieces) > 2
    answers = [
        sum(pieces[1:], pieces[0]), remote.invoke([MESSAGE]),
        asyncio.run(remote.ainvoke([MESSAGE])), asyncio.run(astreamed()),
    ]  # fmt: skip
    assert len({answer.text for answer in answers}) == 1 and answers[0].text
    assert len({repr(told(answer.response_metadata)[0]) for answer in answers}) == 1
    assert [outcomes(a.response_metadata) for a in answers] == [["encoded"] * 3, *[["hit"] * 3] * 3]


def test_policy_and_namespace_of_one_call(remote: Any) -> None:
    remote.invoke([MESSAGE])
    assert outcomes(remote.invoke([MESSAGE], namespace="mine").response_metadata) == ["encoded"] * 3
    assert outcomes(remote.invoke([MESSAGE], namespace="mine").response_metadata) == ["hit"] * 3
    full = remote.invoke([MESSAGE], hypic={"reuse": "none"}).response_metadata
    assert outcomes(full) == ["live"] * 3 and full["hypic"]["policy"]["reuse"] == "none"


def test_a_chain_and_flat_text_afterwards(remote: Any, server: Process) -> None:
    prompt = ChatPromptTemplate([("human", "{context}\n\n{input}")])
    chain = create_segment_documents_chain(remote, prompt)
    documents = [Document(id=f"d{n}", page_content=page) for n, page in enumerate(PAGES)]
    chained = chain.invoke({"context": documents, "input": "Who?"})
    joined = "\n\n".join(PAGES)
    flat = remote.invoke(f"{joined}\n\nWho?")
    assert flat.content == chained and outcomes(flat.response_metadata) == ["hit"] * 3
    assert [one["name"] for one in flat.response_metadata["hypic"]["segments"]] == ["d0", "d1", "d2"]
    assert len(flat.response_metadata["hypic"]["split"]["found"]) == 3


@pytest.mark.parametrize("template", [True, False])
def test_the_string_model(remote: Any, local: Any, server: Process, template: bool) -> None:
    prompt = Prompt([Segment(page, name=f"p{n}") for n, page in enumerate(PAGES)], "Who?")
    there = HypicLLM(base_url=server.url, api_key=KEY, template=template, **OPTIONS)
    here = HypicLLM(model=local.model, settings=local.settings, template=template, **OPTIONS)
    local.get_engine().forget(everything=True)
    cold = [llm.generate_prompt([llm._convert_input(prompt)]).generations[0][0] for llm in (here, there)]
    assert cold[0].text == cold[1].text
    assert told(cold[0].generation_info or {}) == told(cold[1].generation_info or {})
    warm = [asyncio.run(llm.agenerate_prompt([llm._convert_input(prompt)])).generations[0][0] for llm in (here, there)]
    assert outcomes(warm[1].generation_info or {}) == ["hit"] * 3
    assert told(warm[0].generation_info or {}) == told(warm[1].generation_info or {})
    assert there.get_token_ids("Who?") == here.get_token_ids("Who?") and there.get_num_tokens("Who?") > 0
    assert "".join(there.stream(prompt)) == cold[0].text
    here.close()
    there.close()


def test_errors_are_langchain_s(remote: Any, server: Process) -> None:
    with pytest.raises(ContextOverflowError, match="maximum context length"):
        remote.invoke("Who? " * 9000)
    with pytest.raises(ModelInvalidRequestError, match="API key"):
        ChatHypic(base_url=server.url, api_key="wrong").invoke("Who?")
    with pytest.raises(ModelNotFoundError, match="'big' does not exist"):
        ChatHypic(base_url=server.url, api_key=KEY, model="big").invoke("Who?")
    with pytest.raises(ModelInvalidRequestError, match="no-address"):
        ChatHypic(base_url="no-address").invoke("Who?")
    away = ChatHypic(base_url="http://127.0.0.1:1", max_retries=0)
    asked = (lambda: away.invoke("?"), lambda: asyncio.run(away.ainvoke("?")), lambda: away.get_num_tokens("?"))
    for ask in asked:
        with pytest.raises(ModelAPIError, match="is hypic serve running"):
            ask()


def test_a_server_and_an_engine_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave yours out"):
        ChatHypic(base_url="http://127.0.0.1:1", settings={"device": "cpu"})


def test_copies_share_the_connection_and_keys_stay_secret(remote: Any) -> None:
    engine = remote.get_engine()
    remote.invoke("Who?")
    assert remote.bind(seed=1).bound.get_engine() is engine
    assert copy.deepcopy(remote).get_engine() is engine and remote.model_copy().get_engine() is engine
    assert KEY not in repr(remote) + str(remote.model_dump()) + str(remote._identifying_params)
    assert remote._identifying_params["base_url"] == remote.base_url
    fresh = pickle.loads(pickle.dumps(remote))
    assert fresh.base_url == remote.base_url and fresh.get_engine() is not engine
    fresh.close()

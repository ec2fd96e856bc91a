"""LlamaIndex's HypicLLM on a running server: the same tokens and hits as on an engine in this process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode

from hypic.errors import HypicError, WorkerLost
from hypic.integrations.llamaindex import HypicLLM, SegmentSynthesizer, segment_message
from hypic.types import Segment
from tests.apps.server.serving import serve
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel

PAGES = [f"Passage {n}: the company was founded in {1900 + n} by Ada Perkins of the Elbe hills." for n in range(3)]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_a_server_answers_as_an_engine_here(tmp_path: Path) -> None:
    folder = str(save_bytelevel(qwen(tmp_path / "tiny", vocab_size=352)))
    local = HypicLLM(model=folder, settings={"memory": "64MiB", "device": "cpu", "dtype": "float32"}, **OPTIONS)
    message = segment_message([Segment(page, name=f"p{n}") for n, page in enumerate(PAGES)], "Who?")
    here = local.chat([message])
    with serve(folder, "--dtype", "float32") as server:
        remote = HypicLLM(base_url=server.url, **OPTIONS)
        there = remote.chat([message])
        again = asyncio.run(remote.achat([message]))
        nodes = [NodeWithScore(node=TextNode(text=page)) for page in PAGES[::-1]]
        SegmentSynthesizer(llm=remote).synthesize("Who?", nodes)
        flat = remote.complete("\n\n".join([*PAGES, "Who?"]))
        assert remote.metadata.context_window == 8192 and remote.tokenizer_fn("Who?") == local.tokenizer_fn("Who?")
    assert here.message.content == there.message.content == again.message.content == flat.text
    raws = [response.raw or {} for response in (here, there, again, flat)]
    assert len({raw["usage"]["prompt_tokens"] for raw in raws}) == 1
    seen = [[segment["outcome"] for segment in raw["hypic"]["segments"]] for raw in raws]
    assert seen == [["encoded"] * 3, ["encoded"] * 3, ["hit"] * 3, ["hit"] * 3]
    remote.close()
    local.close()
    with pytest.raises(WorkerLost):
        HypicLLM(base_url=server.url, max_retries=0).chat([ChatMessage("Who?")])


def test_a_server_and_an_engine_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave yours out"):
        HypicLLM(base_url="http://127.0.0.1:1", settings={"device": "cpu"})
    llm = HypicLLM(base_url="http://127.0.0.1:1", api_key="secret", max_retries=0)  # type: ignore[arg-type]
    assert llm.metadata.model_name == "hypic" and "secret" not in str(llm.to_dict()) + repr(llm)
    with pytest.raises(HypicError):
        llm.complete("Who?")

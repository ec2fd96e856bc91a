"""LlamaIndex's own engines on a real engine with a tiny random checkpoint: nodes are reused at every place."""

import asyncio
import importlib.util
import logging
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceWindowNodeParser, get_leaf_nodes
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE
from llama_index.core.retrievers import AutoMergingRetriever, VectorIndexRetriever
from llama_index.core.storage.docstore import SimpleDocumentStore

from hypic import Prompt, SamplingParams, Segment
from hypic.errors import PromptTooLong
from hypic.integrations.llamaindex import (
    HypicLLM,
    HypicMemoryBlock,
    HypicRetriever,
    RegisterNodes,
    SegmentChatEngine,
    SegmentSynthesizer,
    segment_message,
)
from hypic_retriever import Index
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel
from tests.idle import is_idle
from tests.integrations.live_nodes import ORDERS, PAGES, STORY, Fixed, Watch, WordEmbedding, nodes

ROOT = Path(__file__).parents[2]
SETTINGS = {"memory": "96MiB", "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = qwen(tmp_path_factory.mktemp("tiny"), vocab_size=352)
    return str(save_bytelevel(made))


@pytest.fixture
def llm(folder: str) -> Iterator[HypicLLM]:
    model = HypicLLM(model=folder, settings=SETTINGS, temperature=0, max_tokens=4, ignore_eos=True)
    yield model
    model.close()


@pytest.fixture
def watch(llm: HypicLLM, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(llm, monkeypatch)


def asked_twice(engines: Sequence[Any], watch: Watch, question: str = "Who built the Beta mill?") -> None:
    """Cold, then in another order: every node is a segment, and a hit the second time."""
    engine, again = engines
    first = engine.query(question)
    num = len(first.source_nodes)
    assert num > 1 and watch.outcomes == ["encoded"] * num
    second = again.query(question)
    assert [n.text for n in second.source_nodes] == [n.text for n in first.source_nodes][::-1]
    assert watch.outcomes == ["hit"] * num


def test_a_reranker_changes_the_order_and_all_nodes_hit(llm: HypicLLM, watch: Watch) -> None:
    index = VectorStoreIndex(nodes(), embed_model=WordEmbedding())
    synthesizer = SegmentSynthesizer(llm=llm)
    engines = [
        index.as_query_engine(
            llm=llm, response_synthesizer=synthesizer, similarity_top_k=4, node_postprocessors=processors
        )
        for processors in ORDERS
    ]
    asked_twice(engines, watch, "When was the company founded?")


def test_citations_keep_their_rank_live(llm: HypicLLM, watch: Watch) -> None:
    synthesizer = SegmentSynthesizer(llm=llm, text_qa_template=CITATION_QA_TEMPLATE)
    engines = [
        CitationQueryEngine(Fixed(nodes()), llm=llm, response_synthesizer=synthesizer, node_postprocessors=processors)
        for processors in ORDERS
    ]
    first = engines[0].query("Who?")
    assert watch.outcomes == ["encoded"] * 4
    second = engines[1].query("Who?")
    assert watch.outcomes == ["hit"] * 4
    assert [n.text[:10] for n in first.source_nodes] == [n.text[:10] for n in second.source_nodes]
    assert first.source_nodes[0].text[10:] == second.source_nodes[3].text[10:]


def test_sentence_windows_hit(llm: HypicLLM, watch: Watch) -> None:
    parser = SentenceWindowNodeParser.from_defaults(window_size=1)
    index = VectorStoreIndex(parser.get_nodes_from_documents([Document(text=STORY)]), embed_model=WordEmbedding())
    synthesizer = SegmentSynthesizer(llm=llm)
    window = MetadataReplacementPostProcessor(target_metadata_key="window")
    engines = [
        index.as_query_engine(
            llm=llm, response_synthesizer=synthesizer, similarity_top_k=3, node_postprocessors=[window, *more]
        )
        for more in ORDERS
    ]
    asked_twice(engines, watch)


def test_auto_merging_hits(llm: HypicLLM, watch: Watch) -> None:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[128, 48], chunk_overlap=0)
    parsed = parser.get_nodes_from_documents([Document(text=STORY)])
    docstore = SimpleDocumentStore()
    docstore.add_documents(parsed)
    storage = StorageContext.from_defaults(docstore=docstore)
    index = VectorStoreIndex(get_leaf_nodes(parsed), storage_context=storage, embed_model=WordEmbedding())
    leaves = VectorIndexRetriever(index, similarity_top_k=4)
    merging = AutoMergingRetriever(leaves, storage, verbose=False)
    synthesizer = SegmentSynthesizer(llm=llm)
    engines = [RetrieverQueryEngine(merging, synthesizer, node_postprocessors=more) for more in ORDERS]
    asked_twice(engines, watch, "In which year was the Beta house sold to the town?")


def test_default_compaction_is_split_again(llm: HypicLLM, watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    index = VectorStoreIndex(nodes(), embed_model=WordEmbedding())
    engine = index.as_query_engine(llm=llm, similarity_top_k=4)
    handler = RegisterNodes(llm=llm).attach()
    try:
        with caplog.at_level(logging.WARNING, "hypic"):
            compact = engine.query("When was the company founded?")
            assert watch.outcomes == ["encoded"] * 4
            again = engine.query("When was the company founded?")
    finally:
        handler.detach()
    assert watch.outcomes == ["hit"] * 4
    assert str(compact) == str(again)
    assert [r.getMessage().count("SegmentSynthesizer") for r in caplog.records if r.name == "hypic"] == [1]
    # The synthesizer sends the same text with the same borders, so it finds what compaction left.
    own = index.as_query_engine(llm=llm, similarity_top_k=4, response_synthesizer=SegmentSynthesizer(llm=llm))
    assert str(own.query("When was the company founded?")) == str(compact)
    assert watch.outcomes == ["hit"] * 4
    assert watch.reports[-1].prompt_tokens == watch.reports[-2].prompt_tokens


def test_every_surface_gives_the_same_tokens(llm: HypicLLM, watch: Watch) -> None:
    engine: Any = llm.get_engine()
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    raw = engine.generate(Prompt([Segment(page) for page in PAGES], "Who?"), sampling)
    message = ChatMessage(role="user", blocks=[TextBlock(text=text) for text in (*PAGES, "Who?")])
    chat = llm.chat([segment_message([Segment(page) for page in PAGES], "Who?")])
    flat = llm.complete("\n\n".join([*PAGES, "Who?"]))
    streamed = list(llm.stream_chat([message]))

    async def both() -> tuple[Any, Any]:
        return await llm.achat([message]), await llm.acomplete("\n\n".join([*PAGES, "Who?"]))

    achat, acomplete = asyncio.run(both())
    chats = [answer.message.content for answer in (chat, streamed[-1], achat)]
    assert [*chats, flat.text, acomplete.text] == [raw.text] * 5
    assert chat.raw is not None and chat.raw["usage"]["prompt_tokens"] == raw.usage.prompt_tokens
    assert all(report.prompt_tokens == raw.usage.prompt_tokens for report in watch.reports)
    assert watch.outcomes == ["hit"] * 4


def test_chat_engine_reuses_nodes_and_history(llm: HypicLLM, watch: Watch) -> None:
    engine = SegmentChatEngine.from_defaults(retriever=Fixed(nodes()), llm=llm, system_prompt="You answer.")
    engine.chat("Who?")
    assert watch.outcomes == ["encoded"] * 4
    reply = engine.chat("And back?")
    assert watch.outcomes == ["hit"] * 4 and len(reply.source_nodes) == 4
    streamed = engine.stream_chat("Who again?")
    assert "".join(streamed.response_gen) and watch.outcomes == ["hit"] * 4
    assert asyncio.run(engine.achat("Who else?")).response and watch.outcomes == ["hit"] * 4
    assert [m.role.value for m in engine.chat_history] == ["user", "assistant"] * 4


def test_memory_texts_are_reused(llm: HypicLLM, watch: Watch) -> None:
    from llama_index.core.memory import Memory

    memory = Memory.from_defaults(memory_blocks=[HypicMemoryBlock(texts=PAGES[:2])], tokenizer_fn=llm.tokenizer_fn)
    memory.put(ChatMessage("Who?"))
    llm.chat(memory.get())
    assert watch.outcomes == ["encoded"] * 2
    memory.put(ChatMessage(role="assistant", content="Ada."))
    memory.put(ChatMessage("When?"))
    llm.chat(memory.get())
    assert watch.outcomes == ["hit"] * 2


def test_our_retriever_and_a_budget(llm: HypicLLM, watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    index = Index()
    index.add_documents({f"d{n}.md": page for n, page in enumerate(PAGES)})
    assert llm.registry is not None
    retriever = HypicRetriever(index, k=4, registry=llm.registry)
    tight = llm.model_copy(update={"context_window": llm.count_tokens(" ".join(PAGES)) + 350})
    template = PromptTemplate("{context_str}\n{query_str}")
    synthesizer = SegmentSynthesizer(llm=tight, text_qa_template=template)
    found = retriever.retrieve("When was the company founded in 1902?")
    tight.context_window = sum(llm.count_tokens(n.text) for n in found[:2]) + 4 + 8 + 32 + 40
    with caplog.at_level(logging.WARNING, "hypic"):
        response = synthesizer.synthesize("Who?", found)
    assert [n.node_id for n in response.source_nodes] == [n.node_id for n in found[:2]]
    assert watch.outcomes == ["encoded"] * 2
    assert "2 of 4" in caplog.text
    assert len(llm.registry) == 4


def test_too_long_cancelling_and_breaking_off(llm: HypicLLM) -> None:
    engine: Any = llm.get_engine()
    with pytest.raises(PromptTooLong, match="tokens"):
        llm.complete("Who? " * 9000)

    async def cancel() -> None:
        task = asyncio.ensure_future(llm.achat([ChatMessage("Who?")], max_tokens=5000))
        while not engine.stats()["requests"]["running"]:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    stream = llm.stream_chat([ChatMessage("Who?")], max_tokens=5000)
    next(stream)
    stream.close()
    llm.complete("Who?")  # a whole request later, whatever was aborted is gone
    assert is_idle(engine)


def test_a_copy_by_pickle_shares_the_engine(llm: HypicLLM, caplog: pytest.LogCaptureFixture) -> None:
    engine = llm.get_engine()
    with caplog.at_level(logging.WARNING):
        again = pickle.loads(pickle.dumps(llm))
    assert not caplog.records and again.get_engine() is engine is llm.get_engine()
    again.close()
    assert llm.complete("Who?").text


def test_metadata_and_tokens(folder: str, llm: HypicLLM) -> None:
    cold = HypicLLM(model=folder, settings=SETTINGS)
    assert cold.metadata.context_window == 8192 and not cold._leases
    engine: Any = llm.get_engine()
    assert llm.metadata.context_window == engine.max_context
    assert llm.tokenizer_fn("Who?") == engine.tokenize("Who?")
    assert cold.get_engine() is engine
    cold.close()
    counter = TokenCountingHandler(tokenizer=llm.tokenizer_fn)
    llm.callback_manager = CallbackManager([counter])
    answer = llm.chat([ChatMessage("Who?")])
    assert answer.raw is not None
    usage = answer.raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"] == 4


def test_the_example_runs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("llamaindex_rag", ROOT / "examples" / "llamaindex_rag.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "llamaindex_rag", example)
        spec.loader.exec_module(example)
        example.main(["--model", folder])
    shown = capsys.readouterr().out
    assert shown.count(" encoded ") == 3
    assert shown.count(" hit ") == 3

"""The LlamaIndex retriever, the handler that learns nodes of any retriever, and the memory block."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from hypic.errors import ConfigError
from hypic.integrations.agents import MemoryFiles
from hypic.integrations.llamaindex import HypicLLM, HypicMemoryBlock, HypicRetriever, RegisterNodes, segments_from_nodes
from hypic.registry import Registry
from hypic.types import Segment
from hypic_retriever import Index
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments

PAGES = {
    "alpha.md": "The Alpha mill was built in 1871 on the Lenne.",
    "beta.md": "The Beta bridge was opened in 1902, with two tracks.",
}


class Theirs(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        whole = {"window": "Before it. " + PAGES["alpha.md"], "file_path": "alpha.md"}
        node = TextNode(text=PAGES["alpha.md"], metadata=whole, excluded_llm_metadata_keys=["window"])
        return [NodeWithScore(node=node, score=0.5)]


def index() -> Index:
    made = Index()
    made.add_documents(PAGES)
    return made


def test_nodes_have_stable_ids_and_exact_text() -> None:
    retriever = HypicRetriever(index(), k=1)
    (found,) = retriever.retrieve("When was the mill built?")
    (again,) = asyncio.run(retriever.aretrieve("mill Lenne"))
    assert found.node.node_id == again.node.node_id and found.score is not None
    assert found.node.get_content(MetadataMode.LLM) == found.node.get_content(MetadataMode.EMBED) == PAGES["alpha.md"]
    assert found.node.metadata == {"source": "alpha.md"} and found.node.source_node is not None
    assert segments_from_nodes([found]) == [Segment(PAGES["alpha.md"], name=found.node.node_id, source="alpha.md")]


def test_what_is_retrieved_is_known_in_flat_text() -> None:
    registry = Registry()
    HypicRetriever(index(), registry=registry).retrieve("When was the mill built?")
    assert registry.find(f"Read: {PAGES['alpha.md']}")


def test_wrong_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="method search"):
        HypicRetriever({})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"llm\.registry"):
        HypicRetriever(index(), registry={})  # type: ignore[arg-type]
    assert len(HypicRetriever(index(), k=np.int64(1)).retrieve("mill")) == 1, "NumPy's numbers are numbers"  # type: ignore[arg-type]
    for k in (0, -1, True, "4"):
        with pytest.raises(ConfigError, match="whole number of nodes"):
            HypicRetriever(index(), k=k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"llm\.registry"):
        RegisterNodes(registry={})
    with pytest.raises(ValueError, match="poll and segments"):
        HypicMemoryBlock(source=[])


def test_nodes_of_any_retriever_are_learned() -> None:
    llm = HypicLLM(engine=ScriptedEngine(), namespace="mine")
    handler = RegisterNodes(llm=llm).attach()
    Theirs().retrieve("mill")
    handler.detach()
    registry = llm.registry
    assert registry is not None and len(registry) == 3
    # With metadata, without it, and as the window that takes the sentence's place.
    for text in (PAGES["alpha.md"], f"file_path: alpha.md\n\n{PAGES['alpha.md']}", f"Before it. {PAGES['alpha.md']}"):
        (match,) = registry.find(f"Read:\n{text}\nWhen?", "mine")
        assert match.segment.text == text and match.segment.source == "alpha.md"
    other = Registry()
    handler = RegisterNodes(registry=other).attach()
    asyncio.run(Theirs().aretrieve("mill"))
    handler.detach()
    assert len(other) == 3 and other.find(PAGES["alpha.md"])
    assert len(registry) == 3
    other.clear()
    Theirs().retrieve("mill")
    assert len(other) == 0


# -- memory ----------------------------------------------------------------------------------------------------------


def ask(memory: Memory, question: str) -> ScriptedEngine:
    engine = ScriptedEngine()
    memory.put(ChatMessage(question))
    HypicLLM(engine=engine).chat([ChatMessage(role="system", content="Be brief."), *memory.get()])
    return engine


def test_memory_texts_are_messages_of_their_own() -> None:
    block = HypicMemoryBlock(texts=[PAGES["alpha.md"], Segment(PAGES["beta.md"], "document", name="beta")])
    memory = Memory.from_defaults(memory_blocks=[block])
    engine = ask(memory, "When?")
    assert segments(engine.last.prompt) == [
        Segment(PAGES["alpha.md"], "memory"),
        Segment(PAGES["beta.md"], "document", name="beta"),
    ]
    assert [role for role, _ in said(engine.last.prompt)] == ["system", "user", "user", "user"]
    assert len(memory.get_all()) == 1  # the store keeps the conversation only


def test_memory_files_are_read_again_at_every_turn(tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text(PAGES["alpha.md"])
    memory = Memory.from_defaults(memory_blocks=[HypicMemoryBlock(source=MemoryFiles(tmp_path), name="files")])
    first = ask(memory, "When?")
    assert bodies(first.last.prompt) == [PAGES["alpha.md"]]
    # The label stands in the message of its file.
    assert said(first.last.prompt)[1][1].endswith(PAGES["alpha.md"]) and len(said(first.last.prompt)) == 3
    file.write_text(PAGES["beta.md"] + " Newer.")
    assert bodies(ask(memory, "And now?").last.prompt) == [PAGES["beta.md"] + " Newer."]


def test_memory_is_cut_by_whole_texts() -> None:
    block = HypicMemoryBlock(texts=list(PAGES.values()), priority=1)
    content: Any = asyncio.run(block.aget())
    kept = asyncio.run(block.atruncate(content, 3))
    assert kept is not None and [m.content for m in kept] == [PAGES["alpha.md"]]
    assert asyncio.run(block.atruncate(content, 10_000)) is None
    asyncio.run(block.aput([ChatMessage("x")], from_short_term_memory=True))
    assert asyncio.run(block.aget()) == content
    empty: Any = asyncio.run(HypicMemoryBlock(texts=["  "]).aget())
    assert empty == []

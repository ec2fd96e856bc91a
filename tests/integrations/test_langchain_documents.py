"""Documents through LCEL pipelines: one segment each, the exact text of a stuffed prompt, any retriever."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from hypic.errors import ConfigError, PromptError
from hypic.integrations.langchain import (
    ChatHypic,
    DocumentsPlaceholder,
    HypicLLM,
    HypicRetriever,
    RegisterDocuments,
    create_segment_documents_chain,
    segments_from_documents,
)
from hypic.registry import Registry
from hypic.types import Segment
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments

PAGES = [
    "The Alpha mill was built in 1871 on the Lenne.",
    "The Beta bridge was opened in 1902, {with} two tracks.",
    "The Gamma dam {{holds}} <b>%s</b> &amp; was raised in 1931.",
]
DOCS = [
    Document(id=f"d{n}", page_content=page, metadata={"source": f"{n}.md", "rank": n}) for n, page in enumerate(PAGES)
]
SEGMENTS = [Segment(page, name=f"d{n}", source=f"{n}.md") for n, page in enumerate(PAGES)]
PROMPTS: dict[str, Any] = {
    "system": ChatPromptTemplate([("system", "Answer from:\n\n{context}"), ("human", "{input}")]),
    "history": ChatPromptTemplate(
        [("system", "Be brief."), MessagesPlaceholder("history"), ("human", "<c>{context}</c>{input}")]
    ),
    "string": PromptTemplate.from_template("Answer from:\n\n{context}\n\nQuestion: {input}"),
    "tight": PromptTemplate.from_template("<context>{context}</context>{input}"),
    "mustache": PromptTemplate.from_template("From {{context}} say {{input}}", template_format="mustache"),
    "last": PromptTemplate.from_template("{input}\n{context}"),
}
INPUT = {"input": "When?", "history": [HumanMessage("Hello."), ("ai", "Hi.")], "context": DOCS}
MODELS: dict[str, Callable[..., Any]] = {"chat": ChatHypic, "llm": HypicLLM}

Ask = Callable[[Any, Any], str]


async def gathered(stream: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in stream])


PATHS: dict[str, Ask] = {
    "invoke": lambda c, x: c.invoke(x),
    "ainvoke": lambda c, x: asyncio.run(c.ainvoke(x)),
    "stream": lambda c, x: "".join(c.stream(x)),
    "astream": lambda c, x: asyncio.run(gathered(c.astream(x))),
    "batch": lambda c, x: c.batch([x])[0],
}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_document_is_a_segment_of_the_stuffed_text(
    prompt: str, model: str, path: str, engine: ScriptedEngine
) -> None:
    template = PROMPTS[prompt]
    chain = create_segment_documents_chain(MODELS[model](engine=engine), template)
    assert PATHS[path](chain, INPUT) == "It was built in 1871."
    stuffed = template.invoke({**INPUT, "context": "\n\n".join(PAGES)})
    expected = [m.text for m in stuffed.to_messages()]
    if prompt == "mustache":  # mustache writes HTML entities; a document never runs through the template
        expected = ["From " + "\n\n".join(PAGES) + " say When?"]
    assert [text for _, text in said(engine.last.prompt)] == expected
    assert segments(engine.last.prompt) == SEGMENTS


@pytest.mark.parametrize("model", MODELS)
def test_labels_around_documents_are_live(model: str, engine: ScriptedEngine) -> None:
    label = PromptTemplate.from_template("[{rank}] {source}: {page_content}.")
    llm = MODELS[model](engine=engine)
    chain = create_segment_documents_chain(llm, PROMPTS["tight"], document_prompt=label, document_separator="")
    chain.invoke(INPUT)
    text = "".join(f"[{n}] {n}.md: {page}." for n, page in enumerate(PAGES))
    assert said(engine.last.prompt) == [("user", f"<context>{text}</context>When?")]
    assert segments(engine.last.prompt) == SEGMENTS


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_placeholder_in_a_chain(model: str, path: str, engine: ScriptedEngine) -> None:
    prompt = ChatPromptTemplate([("system", "Be brief."), DocumentsPlaceholder("context", tail="Question: {input}")])
    assert set(prompt.input_variables) == {"context", "input"}
    PATHS[path](create_segment_documents_chain(MODELS[model](engine=engine), prompt), INPUT)
    assert said(engine.last.prompt) == [("system", "Be brief."), ("user", "\n\n".join([*PAGES, "Question: When?"]))]
    assert segments(engine.last.prompt) == SEGMENTS


def test_placeholder_alone(engine: ScriptedEngine) -> None:
    prompt = ChatPromptTemplate([DocumentsPlaceholder("docs"), ("human", "{input}")])
    chain = prompt | ChatHypic(engine=engine) | StrOutputParser()
    chain.invoke({"docs": DOCS, "input": "When?"})
    assert said(engine.last.prompt) == [("user", "\n\n".join(PAGES)), ("user", "When?")]
    assert segments(engine.last.prompt) == SEGMENTS
    assert DocumentsPlaceholder("docs").format_messages(docs=[]) == []
    assert "{docs}" in prompt.pretty_repr()
    with pytest.raises(PromptError, match="'docs' is str"):
        chain.invoke({"docs": "text", "input": "When?"})


def test_repeated_and_no_documents(engine: ScriptedEngine) -> None:
    chain = create_segment_documents_chain(ChatHypic(engine=engine), PROMPTS["string"])
    chain.invoke({**INPUT, "context": [DOCS[0], DOCS[0]]})
    assert segments(engine.last.prompt) == [SEGMENTS[0], SEGMENTS[0]]
    chain.invoke({**INPUT, "context": []})
    assert said(engine.last.prompt) == [("user", "Answer from:\n\n\n\nQuestion: When?")]
    chain.invoke({**INPUT, "context": [Document(page_content=f" {PAGES[0]}\n")]})
    assert said(engine.last.prompt) == [("user", f"Answer from:\n\n {PAGES[0]}\n\n\nQuestion: When?")]
    assert bodies(engine.last.prompt) == [PAGES[0]]


def test_blocks_of_a_template_keep_their_borders(engine: ScriptedEngine) -> None:
    blocks: list[Any] = [{"type": "text", "text": text} for text in ("Rules.", "From {context}!", "{input}")]
    prompt = ChatPromptTemplate([("human", blocks)])
    create_segment_documents_chain(ChatHypic(engine=engine), prompt).invoke({**INPUT, "context": DOCS[:1]})
    assert said(engine.last.prompt) == [("user", f"Rules.\n\nFrom {PAGES[0]}!\n\nWhen?")]
    assert bodies(engine.last.prompt) == ["Rules.", PAGES[0]]


def test_other_models_get_the_same_text() -> None:
    chain = create_segment_documents_chain(FakeListChatModel(responses=["ok"]), PROMPTS["system"])
    assert chain.invoke(INPUT) == "ok"


def test_wrong_prompts_and_inputs_are_refused(engine: ScriptedEngine) -> None:
    llm = ChatHypic(engine=engine)
    with pytest.raises(ConfigError, match="'documents'"):
        create_segment_documents_chain(llm, PROMPTS["string"], document_variable_name="documents")
    with pytest.raises(ConfigError, match="page_content"):
        create_segment_documents_chain(llm, PROMPTS["string"], document_prompt=PromptTemplate.from_template("{source}"))
    chain = create_segment_documents_chain(llm, PROMPTS["string"])
    for bad in ("text", ["text"], None):
        with pytest.raises(PromptError, match="list of Document"):
            chain.invoke({**INPUT, "context": bad})
    with pytest.raises(PromptError, match="'context' holds a str"):
        chain.invoke({**INPUT, "context": [Document("a"), "text"]})
    assert not engine.asked


def test_documents_of_a_chain_are_known_afterwards(engine: ScriptedEngine) -> None:
    create_segment_documents_chain(ChatHypic(engine=engine), PROMPTS["system"]).invoke(INPUT)
    assert len(engine.registry) == 3
    answer = ChatHypic(engine=engine).invoke(f"Once more: {PAGES[2]} And now?")
    assert segments(engine.last.prompt) == [SEGMENTS[2]]
    assert said(engine.last.prompt) == [("user", f"Once more: {PAGES[2]} And now?")]
    report = answer.response_metadata["hypic"]
    assert report["notes"] == ["scripted", "flat prompt split at 1 known text (policy known-texts)"]
    found = report["split"]["found"]
    start = len("Once more: ")
    end = start + len(PAGES[2])
    assert found == [{"message": 0, "block": 0, "start": start, "end": end, "name": "d2", "source": "2.md"}]


@dataclass
class Hit:
    passage: Any
    score: float


@dataclass
class Passage:
    id: str
    text: str
    source: str


@dataclass
class Index:
    """Finds the passages that share most words with a query."""

    passages: Sequence[Passage]
    asked: list[tuple[str, int]] = field(default_factory=list)

    def search(self, query: str, k: int) -> list[Hit]:
        self.asked.append((query, k))
        words = set(query.lower().split())
        hits = [Hit(p, len(words & set(p.text.lower().split()))) for p in self.passages]
        return sorted(hits, key=lambda hit: -hit.score)[:k]


@pytest.fixture
def index() -> Index:
    return Index([Passage(f"d{n}", page, f"{n}.md") for n, page in enumerate(PAGES)])


def test_retriever_returns_exact_passages(index: Index) -> None:
    registry = Registry()
    retriever = HypicRetriever(index=index, k=2, registry=registry)
    documents = retriever.invoke("the alpha mill")
    assert documents[0] == Document(id="d0", page_content=PAGES[0], metadata={"source": "0.md"})
    assert len(documents) == len(registry) == 2
    assert len(retriever.invoke("x", k=3)) == 3
    assert len(asyncio.run(retriever.ainvoke("x"))) == 2
    assert [k for _, k in index.asked] == [2, 3, 2]
    with pytest.raises(ValueError, match="search"):
        HypicRetriever(index=[])
    with pytest.raises(ValueError, match="registry"):
        HypicRetriever(index=index, registry=[])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", PATHS)
def test_a_whole_retrieval_pipeline(path: str, model: str, engine: ScriptedEngine, index: Index) -> None:
    retrieve = RunnableLambda(lambda x: x["input"]) | HypicRetriever(index=index, k=2)
    answer = create_segment_documents_chain(MODELS[model](engine=engine), PROMPTS["string"])
    chain = RunnablePassthrough.assign(context=retrieve).assign(answer=answer)
    assert PATHS[path](chain.pick("answer"), {"input": "the alpha mill"}) == "It was built in 1871."
    result = chain.invoke({"input": "the alpha mill"})
    assert [d.id for d in result["context"]] == [s.name for s in segments(engine.last.prompt)]
    assert bodies(engine.last.prompt)[0] == PAGES[0]
    assert engine.num_open == 0


def test_a_callback_registers_what_any_retriever_returns(engine: ScriptedEngine) -> None:
    class Plain(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            return DOCS

    joined = RunnableLambda(lambda x: x["input"]) | Plain() | (lambda ds: "\n\n".join(d.page_content for d in ds))
    chain = RunnablePassthrough.assign(context=joined) | PROMPTS["string"] | HypicLLM(engine=engine)
    chain.invoke({"input": "When?"}, {"callbacks": [RegisterDocuments(engine.registry)]})
    assert segments(engine.last.prompt) == SEGMENTS


def test_segments_from_documents_take_their_labels_from_id_and_metadata() -> None:
    documents = [Document(page_content="a", metadata={"id": 7, "source": "x"}), Document(page_content="b", id="i")]
    assert segments_from_documents(documents, kind="memory") == [
        Segment("a", "memory", name="7", source="x"),
        Segment("b", "memory", name="i"),
    ]

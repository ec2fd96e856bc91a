"""SegmentSynthesizer on a scripted engine: templates, borders, labels, budget, streaming, structured output."""

import asyncio
import logging
from typing import Any

import pytest
from llama_index.core.base.response.schema import AsyncStreamingResponse, PydanticResponse, StreamingResponse
from llama_index.core.llms import ChatMessage, MockLLM, TextBlock
from llama_index.core.output_parsers.pydantic import PydanticOutputParser
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate, SelectorPromptTemplate
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel

from hypic.errors import PromptError
from hypic.integrations.llamaindex import HypicLLM, SegmentSynthesizer, segments_from_nodes
from hypic.integrations.llamaindex.synthesizer import ranking
from tests.integrations.scripted import ScriptedEngine, bodies, said, segments

ANSWER = "It was built in 1871."
PAGES = ["The Alpha mill was built in 1871 on the Lenne.", "The Beta bridge {x} was opened, with two tracks.", "Third."]
XML = (
    "<tool_call>\n<function=Year>\n<parameter=value>\n1871\n</parameter>\n<parameter=place>\nLenne\n</parameter>\n"
    "</function>\n</tool_call>"
)


class Year(BaseModel):
    """A year and a place."""

    value: int
    place: str


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def llm(engine: ScriptedEngine) -> HypicLLM:
    return HypicLLM(engine=engine)


def nodes(texts: list[str] = PAGES, scores: list[float | None] | None = None) -> list[NodeWithScore]:
    given = scores or [1.0 - n / 10 for n in range(len(texts))]
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"n{n}", **labels(f"{n}.md")), score=score)
        for n, (text, score) in enumerate(zip(texts, given, strict=True))
    ]


def labels(path: str) -> dict[str, Any]:
    return {"metadata": {"file_path": path}, "excluded_llm_metadata_keys": ["file_path"]}


def bracketed(**kwargs: Any) -> str:
    return f"<{kwargs['context_str']}>"


@pytest.mark.parametrize(
    "template",
    [
        None,
        PromptTemplate("Read:\n{context_str}\nQ: {query_str}"),
        PromptTemplate("Read:\n{text}\nQ: {query_str}", template_var_mappings={"context_str": "text"}),
        PromptTemplate("{context_str} {query_str}", function_mappings={"context_str": bracketed}),
        RichPromptTemplate("Read:\n{{ context_str }}\nQ: {{ query_str }}"),
        RichPromptTemplate(
            '{% chat role="system" %}Hi.{% endchat %}'
            '{% chat role="user" %}{{ context_str }} {{ query_str }}{% endchat %}'
        ),
        SelectorPromptTemplate(PromptTemplate("never"), [(bool, PromptTemplate("{context_str}|{query_str}"))]),
        ChatPromptTemplate([ChatMessage(role="system", content="{context_str}"), ChatMessage("{query_str}")]),
    ],
)
def test_the_text_is_what_compaction_sends(template: Any, llm: HypicLLM, engine: ScriptedEngine) -> None:
    CompactAndRefine(llm=llm, text_qa_template=template).synthesize("When {y}?", nodes())
    assert bodies(engine.last.prompt) == []
    response = SegmentSynthesizer(llm=llm, text_qa_template=template).synthesize("When {y}?", nodes())
    assert str(response) == ANSWER
    assert bodies(engine.asked[1].prompt) == PAGES
    assert said(engine.asked[1].prompt) == said(engine.asked[0].prompt)
    assert [(s.name, s.source) for s in segments(engine.last.prompt)] == [(f"n{n}", f"{n}.md") for n in range(3)]


def test_blocks_of_a_template_stay_apart(llm: HypicLLM, engine: ScriptedEngine) -> None:
    blocks = [TextBlock(text=text) for text in ("Some rules.", "Read: {context_str}", "{query_str}")]
    template = ChatPromptTemplate([ChatMessage(role="user", blocks=blocks)])
    SegmentSynthesizer(llm=llm, text_qa_template=template).synthesize("When?", nodes())
    joined = "\n\n".join(PAGES)
    assert said(engine.last.prompt) == [("user", f"Some rules.\n\nRead: {joined}\n\nWhen?")]
    assert bodies(engine.last.prompt) == ["Some rules.", *PAGES]


def test_prompts_can_be_read_and_replaced(llm: HypicLLM, engine: ScriptedEngine) -> None:
    synthesizer = SegmentSynthesizer(llm=llm)
    assert list(synthesizer.get_prompts()) == ["text_qa_template"]
    synthesizer.update_prompts({"text_qa_template": PromptTemplate("{context_str}? {query_str}!")})
    synthesizer.synthesize("When", nodes(PAGES[:1]))
    assert said(engine.last.prompt) == [("user", f"{PAGES[0]}? When!")]


def test_rank_labels_are_live(llm: HypicLLM, engine: ScriptedEngine) -> None:
    template = PromptTemplate("{context_str}\n{query_str}")
    synthesizer = SegmentSynthesizer(llm=llm, text_qa_template=template)
    synthesizer.synthesize("When?", nodes([f"Source {n}:\n{page}\n" for n, page in enumerate(PAGES[:2], 1)]))
    assert bodies(engine.last.prompt) == PAGES[:2]
    assert said(engine.last.prompt) == [("user", f"Source 1:\n{PAGES[0]}\n\nSource 2:\n{PAGES[1]}\nWhen?")]
    SegmentSynthesizer(llm=llm, rank_label=None).synthesize("When?", nodes([f"Source 1:\n{PAGES[0]}"]))
    assert bodies(engine.last.prompt) == [f"Source 1:\n{PAGES[0]}"]


def test_metadata_that_a_model_reads_is_part_of_the_segment(llm: HypicLLM, engine: ScriptedEngine) -> None:
    node = TextNode(text=PAGES[0], id_="a", metadata={"title": "Mills"})
    SegmentSynthesizer(llm=llm).synthesize("When?", [NodeWithScore(node=node)])
    text = f"title: Mills\n\n{PAGES[0]}"
    assert bodies(engine.last.prompt) == [text] == [s.text for s in segments_from_nodes([node])]


def test_streaming_in_both_worlds(llm: HypicLLM, engine: ScriptedEngine) -> None:
    synthesizer = SegmentSynthesizer(llm=llm, streaming=True)
    response = synthesizer.synthesize("When?", nodes())
    assert isinstance(response, StreamingResponse) and "".join(response.response_gen) == ANSWER

    async def streamed() -> tuple[str, str]:
        stream = await synthesizer.asynthesize("When?", nodes())
        assert isinstance(stream, AsyncStreamingResponse)
        whole = await SegmentSynthesizer(llm=llm).asynthesize("When?", nodes())
        return "".join([text async for text in stream.async_response_gen()]), str(whole)

    assert asyncio.run(streamed()) == (ANSWER, ANSWER)
    assert all(bodies(asked.prompt) == PAGES for asked in engine.asked) and len(engine.asked) == 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", [PydanticProgramMode.DEFAULT, PydanticProgramMode.LLM])
def test_structured_output(is_async: bool, mode: PydanticProgramMode, engine: ScriptedEngine) -> None:
    llm = HypicLLM(engine=engine, pydantic_program_mode=mode)
    engine.answer = XML if mode == PydanticProgramMode.DEFAULT else '{"value": 1871, "place": "Lenne"}'
    synthesizer = SegmentSynthesizer(llm=llm, output_cls=Year)
    asked = synthesizer.asynthesize if is_async else synthesizer.synthesize
    response: Any = asked("When?", nodes())
    response = asyncio.run(response) if is_async else response
    assert isinstance(response, PydanticResponse) and response.response == Year(value=1871, place="Lenne")
    assert bodies(engine.last.prompt) == PAGES
    last = said(engine.last.prompt)[0 if mode == PydanticProgramMode.LLM else -1]
    if mode == PydanticProgramMode.LLM:
        assert "place" in last[1] and engine.last.tools is None
    else:
        assert engine.last.tools is not None and engine.last.tools[0]["function"]["name"] == "Year"


def test_a_parser_never_writes_into_a_segment(llm: HypicLLM, engine: ScriptedEngine) -> None:
    llm.output_parser = PydanticOutputParser(output_cls=Year)
    engine.answer = '{"value": 1, "place": "x"}'
    template = PromptTemplate("{query_str}\n{context_str}")
    SegmentSynthesizer(llm=llm, text_qa_template=template).synthesize("When?", nodes())
    assert bodies(engine.last.prompt) == PAGES
    assert said(engine.last.prompt)[0][1].count("schema") > 0


def test_a_structured_llm_answers_from_segments(llm: HypicLLM, engine: ScriptedEngine) -> None:
    engine.answer = XML
    response = SegmentSynthesizer(llm=llm.as_structured_llm(Year)).synthesize("When?", nodes())
    assert isinstance(response, PydanticResponse) and response.response == Year(value=1871, place="Lenne")
    assert bodies(engine.last.prompt) == PAGES


# -- what does not fit -----------------------------------------------------------------------------------------------


def long_nodes(scores: list[float | None] | None = None) -> list[NodeWithScore]:
    return nodes([f"page{n} " * 30 for n in range(4)], scores)  # 30 tokens each, by the scripted engine's count


def test_the_lowest_rank_is_left_out_whole(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    llm = HypicLLM(engine=engine, max_tokens=10, context_window=10 + 33 + 2 * 34)
    synthesizer = SegmentSynthesizer(llm=llm, text_qa_template=PromptTemplate("{context_str} {query_str}"))
    with caplog.at_level(logging.WARNING, "hypic"):
        response = synthesizer.synthesize("When?", long_nodes())
    assert [body.split()[0] for body in bodies(engine.last.prompt)] == ["page0", "page1"]
    assert [node.node_id for node in response.source_nodes] == ["n0", "n1"]
    assert [r.getMessage()[:6] for r in caplog.records] == ["2 of 4"]
    # Put best at both ends by a postprocessor: the order stays, the score decides.
    response = synthesizer.synthesize("When?", long_nodes([0.9, 0.2, 0.1, 0.8]))
    assert [node.node_id for node in response.source_nodes] == ["n0", "n3"]
    texts = [node.text for node in long_nodes()]
    synthesizer.get_response("When?", texts)
    assert [body.split()[0] for body in bodies(engine.last.prompt)] == ["page0", "page1"]
    # The best one is never left out; the engine says if even that is too long.
    tiny = HypicLLM(engine=engine, max_tokens=10, context_window=20)
    SegmentSynthesizer(llm=tiny).synthesize("When?", long_nodes())
    assert len(bodies(engine.last.prompt)) == 1


@pytest.mark.parametrize(
    ("scores", "ranked"),
    [
        ([0.9, 0.8, 0.7], [0, 1, 2]),
        ([0.1, 0.2, 0.3], [0, 1, 2]),  # distances: the first is the nearest
        ([0.9, 0.1, 0.8], [0, 2, 1]),
        ([None, 0.1, 0.8], [0, 1, 2]),
        ([], []),
    ],
)
def test_ranking(scores: list[float | None], ranked: list[int]) -> None:
    assert ranking(nodes(["x"] * len(scores), scores)) == ranked


# -- edges -----------------------------------------------------------------------------------------------------------


def test_no_documents_empty_ones_and_duplicates(llm: HypicLLM, engine: ScriptedEngine) -> None:
    synthesizer = SegmentSynthesizer(llm=llm)
    assert str(synthesizer.synthesize("When?", [])) == "Empty Response"
    assert str(asyncio.run(synthesizer.asynthesize("When?", nodes([" \n"])))) == "Empty Response"
    assert not engine.asked
    synthesizer.synthesize("When?", nodes([PAGES[0], "", PAGES[0]]))
    assert bodies(engine.last.prompt) == [PAGES[0]] * 2


def test_a_template_that_drops_the_chunks_is_refused(llm: HypicLLM, engine: ScriptedEngine) -> None:
    for template in (
        PromptTemplate("{query_str}"),
        PromptTemplate("{context_str}", function_mappings={"context_str": lambda **kw: kw["context_str"][:9]}),
    ):
        with pytest.raises(PromptError, match="changed or dropped"):
            SegmentSynthesizer(llm=llm, text_qa_template=template).synthesize("When?", nodes())
    assert not engine.asked


def test_other_models_get_joined_text() -> None:
    template = PromptTemplate("{context_str}|{query_str}")
    response = SegmentSynthesizer(llm=MockLLM(), text_qa_template=template).synthesize("When?", nodes())
    assert "\n\n".join(PAGES) + "|When?" in str(response)

"""One conversation through every surface: the same segments, the same hits, the same tokens; and the same refusals.

Greedy, on a tiny random checkpoint in float64, where equal prompts give equal tokens whatever was cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("langchain_core")
pytest.importorskip("llama_index.core")

from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError

from hypic import LLM, Segment
from hypic.errors import ConfigError, PromptError, PromptTooLong
from hypic.integrations.remote import RemoteEngine
from tests.apps.server.serving import serve
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel
from tests.idle import is_idle
from tests.integrations import surfaces
from tests.integrations.surfaces import FILE, IMAGE, MAX_TOKENS, Ask, Refused, Said, Turn

PAGES = tuple(
    Segment(f"Passage {n}: the company was founded in {1900 + n} by Ada Perkins of the Elbe hills.", name=f"p{n}")
    for n in range(3)
)
FIRST, SECOND = "Who founded the company?", "And when was that?"
ENCODED, HIT = "encoded", "hit"


@dataclass(frozen=True)
class Place:
    """Where a surface asks: an engine in this process, or a server; ``forget`` empties either."""

    ask: Ask
    forget: Callable[[], object]


HERE: Mapping[str, Callable[[LLM], Ask]] = {
    "hypic.LLM": surfaces.engine,
    "LangChain chat": lambda llm: surfaces.langchain_chat(engine=llm),
    "LangChain LLM": lambda llm: surfaces.langchain_llm(engine=llm),
    "LlamaIndex chat": lambda llm: surfaces.llamaindex_chat(engine=llm),
    "LlamaIndex complete": lambda llm: surfaces.llamaindex_complete(engine=llm),
}
THERE: Mapping[str, Callable[[str], Ask]] = {
    "HTTP": surfaces.server,
    "LangChain chat over HTTP": lambda url: surfaces.langchain_chat(base_url=url),
    "LangChain LLM over HTTP": lambda url: surfaces.langchain_llm(base_url=url),
    "LlamaIndex chat over HTTP": lambda url: surfaces.llamaindex_chat(base_url=url),
    "LlamaIndex complete over HTTP": lambda url: surfaces.llamaindex_complete(base_url=url),
}
NAMES = [*HERE, *THERE]
WITH_TURNS = [name for name in NAMES if "complete" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = qwen(tmp_path_factory.mktemp("surfaces"), vocab_size=352)
    return str(save_bytelevel(made))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, memory="64MiB", threads=1, device="cpu", dtype="float64") as made:
        yield made


@pytest.fixture(scope="module")
def places(folder: str, llm: LLM) -> Iterator[Mapping[str, Place]]:
    with serve(folder, "--dtype", "float64") as process, RemoteEngine(process.url) as remote:
        here = {name: Place(make(llm), functools.partial(llm.forget, everything=True)) for name, make in HERE.items()}
        empty = functools.partial(remote.forget, everything=True)
        yield here | {name: Place(make(process.url), empty) for name, make in THERE.items()}


@pytest.fixture
def place(request: pytest.FixtureRequest, places: Mapping[str, Place]) -> Place:
    """The surface that the test is run for, with nothing cached."""
    found = places[request.param]
    found.forget()
    return found


def asked(documents: tuple[Segment, ...], question: str = FIRST) -> list[Turn]:
    return [Turn(question, documents)]


@pytest.fixture(scope="module")
def raw(llm: LLM) -> Callable[[tuple[Segment, ...]], Said]:
    """What the engine itself says of documents, with nothing cached; asked once for each."""

    @functools.cache
    def ask(documents: tuple[Segment, ...]) -> Said:
        llm.forget(everything=True)
        return surfaces.engine(llm)(asked(documents))

    return ask


@pytest.fixture(scope="module")
def orders(llm: LLM) -> list[Said]:
    """The same documents in one order, the other, and the first again, with the engine itself."""
    llm.forget(everything=True)
    return in_two_orders(surfaces.engine(llm))


def in_two_orders(ask: Ask) -> list[Said]:
    return [ask(asked(PAGES)), ask(asked(PAGES[::-1], SECOND)), ask(asked(PAGES))]


@pytest.fixture(scope="module")
def conversation(llm: LLM) -> list[Said]:
    """Two turns with the engine itself, with nothing cached."""
    llm.forget(everything=True)
    return converse(surfaces.engine(llm))


def converse(ask: Ask) -> list[Said]:
    first = ask(asked(PAGES))
    return [first, ask([*asked(PAGES), Turn(first.text, role="assistant"), Turn(SECOND)])]


# -- the same answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_documents_are_the_same_segments_and_hit_in_another_order(orders: list[Said], place: Place) -> None:
    place.forget()
    told = in_two_orders(place.ask)
    assert told == orders
    assert [said.outcomes for said in told] == [[ENCODED] * 3, [HIT] * 3, [HIT] * 3]
    assert [name for _, name, _, _ in told[1].segments] == ["p2", "p1", "p0"]
    assert told[0].ids == told[2].ids and len(told[0].ids) == MAX_TOKENS and told[0].ids != told[1].ids
    assert told[0].cached_tokens == 0 < told[1].cached_tokens


@pytest.mark.parametrize("place", WITH_TURNS, indirect=True)
def test_a_second_question_goes_on_from_the_first_answer(conversation: list[Said], place: Place) -> None:
    place.forget()
    first, second = converse(place.ask)
    assert [first, second] == conversation
    assert second.outcomes == [HIT] * 3 and second.prompt_tokens > first.prompt_tokens
    # All of the first turn's text stands ready in a snapshot, the documents' seams too: none of it is run again.
    assert second.cached_tokens > sum(num_tokens for *_, num_tokens in second.segments)
    assert second.computed_tokens == second.prompt_tokens - second.cached_tokens


# -- odd documents ---------------------------------------------------------------------------------------------------

ODD: Mapping[str, tuple[tuple[Segment, ...], list[str]]] = {
    "no documents": ((), []),
    "duplicates": ((PAGES[0], PAGES[1], PAGES[0]), [ENCODED, ENCODED, ENCODED]),
    "an empty one": ((PAGES[0], Segment(""), PAGES[1]), [ENCODED, ENCODED]),
    "white space": ((PAGES[0], Segment(" \n "), PAGES[1]), [ENCODED, ENCODED]),
    "nothing but blanks": ((Segment(""), Segment(" \n ")), []),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("place", NAMES, indirect=True)
def test_odd_documents(place: Place, case: str, raw: Callable[[tuple[Segment, ...]], Said]) -> None:
    documents, outcomes = ODD[case]
    expected = raw(documents)
    place.forget()
    told = place.ask(asked(documents))
    assert told == expected and told.outcomes == outcomes and len(told.ids) == MAX_TOKENS
    again = place.ask(asked(documents))
    assert again.ids == told.ids and again.outcomes == [HIT] * len(outcomes)


# -- refusals --------------------------------------------------------------------------------------------------------

TOO_LONG: Mapping[str, type[Exception]] = {"LangChain": ContextOverflowError, "LlamaIndex": PromptTooLong}
NOT_TEXT: Mapping[str, type[Exception]] = {"LangChain": ModelInvalidRequestError, "LlamaIndex": PromptError}


def refusal(name: str, kinds: Mapping[str, type[Exception]], otherwise: type[Exception]) -> type[Exception]:
    return Refused if name == "HTTP" else kinds.get(name.split()[0], otherwise)


@pytest.mark.parametrize("documents", [False, True], ids=["question", "document"])
@pytest.mark.parametrize(("name", "place"), [(name, name) for name in NAMES], indirect=["place"])
def test_a_prompt_that_is_too_long(name: str, place: Place, documents: bool, llm: LLM) -> None:
    long = "The river flows north. " * 1000
    turns = asked((Segment(long, name="long"),)) if documents else asked(PAGES, long)
    kind = refusal(name, TOO_LONG, PromptTooLong)
    with pytest.raises(kind, match="context_length_exceeded" if "HTTP" in name else r"\d+ tokens"):
        place.ask(turns)
    assert is_idle(llm)
    assert place.ask(asked(PAGES)).outcomes == [ENCODED] * 3, "nothing was computed for what was refused"


@pytest.mark.parametrize("part", [IMAGE, FILE], ids=["image", "file"])
@pytest.mark.parametrize(("name", "place"), [(name, name) for name in WITH_TURNS], indirect=["place"])
def test_parts_that_are_not_text_are_refused_by_name(
    name: str, place: Place, part: Mapping[str, object], llm: LLM
) -> None:
    ours = {"image_url": "image", "file": "document"} if "LlamaIndex" in name else {}
    said = str(part["type"])
    with pytest.raises(refusal(name, NOT_TEXT, PromptError), match=f"type '{ours.get(said, said)}'"):
        place.ask([Turn(FIRST, part=part)])
    assert is_idle(llm)


@pytest.mark.parametrize("place", [name for name in NAMES if "complete" in name], indirect=True)
def test_a_completion_takes_no_pictures(place: Place) -> None:
    with pytest.raises(ConfigError, match="'image_documents'"):
        place.ask([Turn(FIRST, part=IMAGE)])

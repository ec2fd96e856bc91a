"""The index: adding, changing, removing, searching, with and without an embedder, and under threads."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypic_retriever import EmbedderError, Index, Passage, RetrieverError

HANDBOOK = """# Handbook

## Refunds

A refund takes five working days. It goes to the account that paid.

## Shipping

Parcels leave the depot at noon. Abroad they need a customs form.
"""
MENU = "# Menu\n\nThe soup of the day is leek and potato.\n"


@pytest.fixture
def index() -> Index:
    index = Index()
    index.add_documents({"handbook.md": HANDBOOK, "menu.md": MENU})
    return index


def ids(passages: Any) -> list[str]:
    return [passage.id for passage in passages]


def test_the_right_passage_comes_first(index: Index) -> None:
    hit, *rest = index.search("How long does a refund take?")
    assert hit.passage.heading == "Handbook > Refunds" and hit.passage.source == "handbook.md"
    assert HANDBOOK[hit.passage.start : hit.passage.end] == hit.passage.text
    assert hit.ranks == {"bm25": 1} and all(hit.score > other.score for other in rest)
    assert index.search("zeppelin") == [] == index.search("   ")


def test_headings_above_a_passage_help_to_find_it() -> None:
    text = (
        "# Otters\n\n"
        + "\n\n".join(f"They do thing {i} by the river. " * 8 for i in range(6))
        + "\n\n# Badgers\n\n"
        + "They dig. " * 40
    )
    index = Index()
    index.add_documents({"animals.md": text})
    hits = index.search("otters", 20)
    assert len(hits) > 2 and {hit.passage.heading for hit in hits} == {"Otters"}


def test_adding_says_what_is_new_and_again_changes_nothing(index: Index) -> None:
    assert index.sources() == ["handbook.md", "menu.md"] and len(index) == 3
    assert ids(index.passages()) == ids(index.passages("handbook.md")) + ids(index.passages("menu.md"))
    again = index.add_documents({"handbook.md": HANDBOOK, "menu.md": MENU})
    assert again.added == () == again.removed and len(index) == 3


def test_updating_touches_only_what_changed(index: Index) -> None:
    before = index.passages("handbook.md")
    change = index.update_document(
        "handbook.md", "A new first line.\n\n" + HANDBOOK.replace("noon", "six in the evening")
    )
    assert [passage.text for passage in change.added] == [
        "A new first line.",
        before[1].text.replace("noon", "six in the evening"),
    ]
    assert change.removed == (before[1],)
    after = index.passages("handbook.md")
    assert after[1].id == before[0].id and after[1].start == before[0].start + len("A new first line.\n\n")
    assert index.search("noon") == [] and index.search("evening")[0].passage == after[2]


def test_many_updates_equal_a_fresh_index(article: Any) -> None:
    rng = random.Random(8)
    index = Index()
    index.add_documents({"a.md": article.text})
    for _ in range(30):
        article = article.edited(rng)
        change = index.update_document("a.md", article.text)
        assert len(change.added) <= 2 and len(change.removed) <= 2
    fresh = Index()
    fresh.add_documents({"a.md": article.text})
    assert index.passages() == fresh.passages()
    for query in ["harbour council", "violin", "northern glacier weaver"]:
        updated, anew = index.search(query), fresh.search(query)
        assert [hit.passage for hit in updated] == [hit.passage for hit in anew] and len(anew) == 8
        assert [hit.score for hit in updated] == pytest.approx([hit.score for hit in anew])


def test_a_changed_heading_is_ranked_anew_under_the_same_ids() -> None:
    text = "# Otters\n\n" + "They swim by the bank in spring. " * 8 + "\n\n" + "They eat fish and crabs all day. " * 8
    index = Index()
    index.add_documents({"a.md": text})
    before = index.passages()
    index.update_document("a.md", text.replace("Otters", "Beavers"))
    assert index.get(before[1].id) is not None and index.passages()[1].heading == "Beavers"
    assert index.search("otters") == [] and len(index.search("beavers")) == 2


def test_removing_a_source_or_passages(index: Index) -> None:
    first = index.passages("handbook.md")[0]
    assert index.remove_passages([first.id, "unknown", first.id]).removed == (first,)
    assert first.id not in index and index.search("refund") == []
    assert len(index.remove("handbook.md").removed) == 1
    assert index.sources() == ["menu.md"] and index.remove("handbook.md").removed == ()


def test_passages_are_upserted_by_id() -> None:
    index = Index()
    old = Passage("1", "red apples", source="a", metadata={"page": 3})
    index.add_passages([old, Passage("2", "green pears", source="a")])
    new = Passage("1", "blue plums", source="b")
    change = index.add_passages([new])
    assert change.added == (new,) and change.removed == (old,)
    assert index.sources() == ["a", "b"] and index.search("apples") == [] and index.search("plums")[0].passage == new
    index.remove("a")
    assert index.passages() == [new]


def test_equal_texts_of_two_sources_are_both_found() -> None:
    index = Index()
    index.add_documents({"b.md": MENU, "a.md": MENU})
    hits = index.search("soup")
    assert {hit.passage.source for hit in hits} == {"a.md", "b.md"} and ids(h.passage for h in hits) == sorted(
        ids(h.passage for h in hits)
    )


def test_keep_restricts_before_ranking(index: Index, make_embedder: Any) -> None:
    for some in (index, Index(make_embedder())):
        some.add_documents(
            {"handbook.md": HANDBOOK, "menu.md": MENU, **{f"{i}.md": f"The soup number {i}." for i in range(150)}}
        )
        hits = some.search("soup", 2, keep=lambda passage: passage.source in ("menu.md", "7.md"))
        assert {hit.passage.source for hit in hits} == {"menu.md", "7.md"}


def test_progress_counts_up_to_all_and_a_raise_keeps_what_is_done() -> None:
    documents = {f"{i}.md": f"Document number {i}." for i in range(150)}
    seen: list[tuple[int, int]] = []
    Index().add_documents(documents, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (150, 150) and [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) > 1

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    index = Index()
    with pytest.raises(KeyboardInterrupt):
        index.add_documents(documents, progress=stop)
    assert 0 < len(index) < 150
    index.add_documents(documents)
    assert len(index) == 150


def test_hybrid_finds_by_word_and_by_meaning(make_embedder: Any) -> None:
    embedder = make_embedder(256, synonyms=[{"car", "automobile"}, {"doctor", "physician"}])
    index = Index(embedder)
    texts = {
        "a": "The automobile was parked outside.",
        "b": "A physician came by.",
        "c": "Part number QX-7731 is out of stock.",
    }
    index.add_documents({**texts, **{f"d{i}": f"Filler text {i} about nothing in particular." for i in range(40)}})
    words_only = Index()
    words_only.add_documents(texts)
    assert words_only.search("car") == [] and index.search("car")[0].passage.source == "a"
    assert index.search("QX-7731")[0].passage.source == "c"
    hit = index.search("physician came")[0]
    assert hit.passage.source == "b" and hit.ranks == {"bm25": 1, "vector": 1} and hit.score == pytest.approx(2 / 61)


def test_only_changed_passages_are_embedded(article: Any, make_embedder: Any) -> None:
    embedder = make_embedder()
    index = Index(embedder)
    index.add_documents({"a.md": article.text})
    assert embedder.num_embedded == len(index)
    embedder.num_embedded = 0
    index.update_document("a.md", article.edited(random.Random(4)).text)
    assert embedder.num_embedded <= 2


def test_an_embedder_that_fails_changes_nothing(index: Index, make_embedder: Any) -> None:
    embedder = make_embedder(8)
    hybrid = Index(embedder)
    hybrid.add_documents({"menu.md": MENU})
    embedder.dimension = 9
    with pytest.raises(EmbedderError, match=r"shape \[2, 9\]; expected \[2, 8\]"):
        hybrid.add_documents({"handbook.md": HANDBOOK})
    embedder.dimension = 8
    assert hybrid.sources() == ["menu.md"] and hybrid.search("refund")[0].passage.source == "menu.md"


def test_searches_during_changes_see_whole_documents() -> None:
    index = Index()
    versions = [f"# Part one\n\nversion {n} alpha\n\n# Part two\n\nversion {n} beta" for n in ("odd", "even")]
    index.add_documents({"a.md": versions[0], **{f"{i}.md": f"other text {i}" for i in range(50)}})
    failures: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            texts = {hit.passage.text.split()[4] for hit in index.search("alpha beta", 5)}
            if texts not in ({"odd"}, {"even"}):
                failures.append(texts)

    readers = [threading.Thread(target=read) for _ in range(4)]
    writers = [
        threading.Thread(
            target=lambda i=i: [index.add_documents({f"w{i}-{n}.md": f"writer {i} {n}"}) for n in range(60)]
        )
        for i in range(2)
    ]
    for thread in readers + writers:
        thread.start()
    for n in range(80):
        index.update_document("a.md", versions[n % 2])
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not failures and len(index) == 2 + 50 + 120
    assert len(index.search("writer", 500)) == 120


def test_wrong_arguments_are_named(index: Index) -> None:
    with pytest.raises(RetrieverError, match="k=0; pass a text and k of 1 or more"):
        index.search("x", 0)
    with pytest.raises(RetrieverError, match="k=True"):
        index.search("x", True)
    assert len(index.search("refund", np.int64(1))) == 1, "NumPy's numbers are numbers"  # type: ignore[arg-type]
    with pytest.raises(RetrieverError, match="query None"):
        index.search(None)  # type: ignore[arg-type]
    with pytest.raises(RetrieverError, match="the id ''"):
        index.add_passages([Passage("", "text")])
    with pytest.raises(RetrieverError, match="type bytes"):
        index.add_passages([Passage("1", b"text")])  # type: ignore[arg-type]
    assert len(index) == 3


def test_words_alone_need_neither_faiss_nor_torch() -> None:
    code = (
        "import sys, hypic_retriever as r; i = r.Index(); i.add_documents({'a': 'some text'}); assert i.search('text');"
        "assert not {'faiss', 'torch', 'tokenizers', 'safetensors', 'transformers', 'hypic'} & set(sys.modules)"
    )
    folder = Path(__file__).parents[2] / "retriever"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(folder)})

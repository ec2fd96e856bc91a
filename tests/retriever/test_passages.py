"""The splitter: exact text, sizes, headings, ids; and that an edit changes at most two passages."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic_retriever import Passage, RetrieverError, Splitter

Split = Callable[[str], Iterable[str]]


def check_exact(text: str, passages: list[Passage]) -> None:
    end = 0
    for passage in passages:
        assert text[passage.start : passage.end] == passage.text
        assert passage.text and passage.text == passage.text.strip()
        assert not text[end : passage.start].strip(), "text between two passages was lost"
        assert passage.start >= end
        end = passage.end
    assert not text[end:].strip(), "text after the last passage was lost"
    assert len({passage.id for passage in passages}) == len(passages)


def num_changed(split: Split, before: str, after: str) -> int:
    """How many passages go or come, whichever is more; equal texts count as often as they occur."""
    old, new = Counter(split(before)), Counter(split(after))
    return max((old - new).total(), (new - old).total())


def ours(text: str) -> list[str]:
    return [passage.text for passage in Splitter().split(text)]


def fixed_size(text: str) -> list[str]:
    return [text[i : i + 500] for i in range(0, len(text), 500)]


def filled(text: str) -> list[str]:
    """Sentences and blocks filled up to a size: what most splitters do."""
    pieces = [""]
    for unit in re.split(r"(?<=[.!?])\s+|\n", text):
        if len(pieces[-1]) + len(unit) > 500:
            pieces.append("")
        pieces[-1] += unit + " "
    return pieces


def test_edits_change_at_most_two_passages(document: Any) -> None:
    rng = random.Random(11)
    changed = Counter(num_changed(ours, document.text, document.edited(rng).text) for _ in range(100))
    assert max(changed) <= 2, changed


@pytest.mark.parametrize("split", [fixed_size, filled])
def test_the_stability_test_bites(document: Any, split: Split) -> None:
    rng = random.Random(11)
    changed = [num_changed(split, document.text, document.edited(rng).text) for _ in range(40)]
    assert sum(number > 2 for number in changed) > 10, "a splitter that counts should fail many edits"


def test_edits_in_a_row_stay_local(document: Any) -> None:
    rng = random.Random(3)
    for _ in range(40):
        later = document.edited(rng)
        assert num_changed(ours, document.text, later.text) <= 2
        document = later


def test_other_ids_stay_the_same(article: Any) -> None:
    rng = random.Random(2)
    before = {passage.id: passage for passage in Splitter().split(article.text, "a.md")}
    for _ in range(50):
        after = {passage.id: passage for passage in Splitter().split(article.edited(rng).text, "a.md")}
        assert len(before.keys() - after.keys()) <= 2 and len(after.keys() - before.keys()) <= 2
        assert all(before[id].text == after[id].text for id in before.keys() & after.keys())


def test_typical_documents_are_exact_and_of_fitting_size(document: Any) -> None:
    splitter = Splitter()
    passages = splitter.split(document.text)
    check_exact(document.text, passages)
    sizes = [len(passage.text) for passage in passages]
    assert max(sizes) <= splitter.max_chars
    assert 0.5 * splitter.target_chars < sum(sizes) / len(sizes) < 1.5 * splitter.target_chars


def test_without_headings_few_passages_are_below_the_minimum() -> None:
    rng = random.Random(0)
    text = "\n\n".join(
        " ".join(f"Number {rng.random()} is a long one." for _ in range(rng.randint(1, 9))) for _ in range(300)
    )
    sizes = [len(passage.text) for passage in Splitter().split(text)]
    assert sum(size < Splitter().min_chars for size in sizes) < 0.01 * len(sizes)


PIECES = st.sampled_from(
    [
        "# One\n",
        "## Two ##\n",
        "== Three ==\n",
        "Four\n====\n",
        "```\n",
        "~~~~\n",
        "- item\n",
        "1. first\n",
        "| a | b |\n",
    ]
    + ["\n", "\n\n", "\r\n", "\r", " ", "\t", "\u2028", "\x0c", "A sentence. ", "Is it? ", "Dr. Ngo went. ", "x" * 97]
    + [
        "lower case, no stop ",
        "e\u0301",
        "\U0001f469\u200d\U0001f680",
        "\u3053\u308c\u3067\u3059\u3002",
        "\u092d\u093e\u0964 ",
        "\ud800",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=12), max_size=80).map("".join)
SMALL = Splitter(target_chars=60, min_chars=20, max_chars=150)


@settings(max_examples=250, deadline=None)
@given(TEXTS)
def test_any_text_is_kept_exactly(text: str) -> None:
    passages = SMALL.split(text)
    check_exact(text, passages)
    assert all(len(passage.text) <= SMALL.max_chars for passage in passages)
    assert passages == SMALL.split(text)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(1, 30), st.integers(0, 40), st.integers(0, 100))
def test_any_sizes_that_fit_are_kept(text: str, least: int, more: int, most: int) -> None:
    splitter = Splitter(target_chars=2 * least + more, min_chars=least, max_chars=2 * (2 * least + more) + most)
    passages = splitter.split(text)
    check_exact(text, passages)
    assert all(len(passage.text) <= splitter.max_chars for passage in passages)


@pytest.mark.parametrize("unit", ["x", "word ", "- yes\n", "Yes. ", "\u6587", "\n\nA", "| a |\n"])
def test_repetition_without_end_is_cut_to_size(unit: str) -> None:
    text = unit * 10_000
    passages = Splitter().split(text)
    check_exact(text, passages)
    assert all(len(passage.text) <= 1800 for passage in passages)
    assert sum(len(passage.text) < 100 for passage in passages) < 0.1 * len(passages) + 1


def test_blank_documents_have_no_passages() -> None:
    assert Splitter().split("") == [] == Splitter().split(" \r\n\t\n\u00a0")


def test_characters_of_several_code_points_stay_whole() -> None:
    family = "\U0001f469\u200d\U0001f680"
    passages = Splitter().split(("e\u0301" + family) * 2000)
    assert len(passages) > 5
    for passage in passages:
        assert passage.text[0] in "e\U0001f469" and not passage.text.endswith("\u200d")


def test_a_heading_starts_a_passage_and_gives_its_path() -> None:
    text = "# Guide\n\n## Setup\n\nPlug it in.\n\n### Power\n\nUse 230 V.\n\n## Repair\nOpen the lid.\n\n"
    text += "Old\n---\n\nNothing.\n\n== Wiki ==\nEnd."
    found = [(passage.heading, passage.text) for passage in Splitter().split(text)]
    assert found == [
        ("Guide > Setup", "# Guide\n\n## Setup\n\nPlug it in."),
        ("Guide > Setup > Power", "### Power\n\nUse 230 V."),
        ("Guide > Repair", "## Repair\nOpen the lid."),
        ("Guide > Old", "Old\n---\n\nNothing."),
        ("Guide > Wiki", "== Wiki ==\nEnd."),
    ]


def test_what_only_looks_like_a_heading_is_none() -> None:
    text = "---\ntitle: Front matter\n---\n\n```sh\n# a comment\n== b ==\n```\n\n#hashtag and C# code\n\n| a |\n|---|"
    assert [passage.heading for passage in Splitter().split(text)] == [""]


def test_an_unclosed_fence_runs_to_the_end() -> None:
    (passage,) = Splitter().split("```\n# no heading\n\ncode")
    assert passage.text.endswith("code")


def test_a_paragraph_of_ordinary_length_is_never_cut() -> None:
    rng = random.Random(4)
    for _ in range(100):
        paragraph = " ".join(f"Sentence {rng.random()} stands here." for _ in range(rng.randint(6, 25)))
        assert [passage.text for passage in Splitter().split(paragraph)] == [paragraph]


def test_cuts_in_long_paragraphs_are_at_sentences() -> None:
    rng = random.Random(9)
    text = " ".join(
        f"Dr. Weber of St. Gallen paid {rng.randint(2, 9)}.5 francs to J. Moser, no. {rng.random()}."
        for _ in range(400)
    )
    passages = Splitter().split(text)
    assert len(passages) > 20
    assert all(
        passage.text.startswith("Dr. Weber") and re.search(r"no\. 0\.[\de-]+\.$", passage.text) for passage in passages
    )


def test_line_ends_and_wrapping_do_not_move_borders(article: Any) -> None:
    unix = [passage.text for passage in Splitter().split(article.text)]
    windows = [passage.text.replace("\r\n", "\n") for passage in Splitter().split(article.text.replace("\n", "\r\n"))]
    assert sum((Counter(unix) - Counter(windows)).values()) <= 0.05 * len(unix)


def test_ids_depend_on_text_source_and_occurrence_only() -> None:
    section = "# Same\n\nThe same words."
    passages = Splitter().split("\n\n".join([section] * 3), "a.md")
    first, second, third = (passage.id for passage in passages)
    assert second == f"{first}-2" and third == f"{first}-3"
    (moved,) = Splitter().split("\n\n\n" + section, "a.md")
    assert moved.id == first and moved.start == 3
    assert Splitter().split(section, "b.md")[0].id != first
    assert Passage(first, section).metadata == {}


@pytest.mark.parametrize("sizes", [(500, 0, 1800), (500, 251, 1800), (500, 180, 999)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int]) -> None:
    target, least, most = sizes
    with pytest.raises(RetrieverError, match=f"min {least}, target 500, max {most} do not fit; choose"):
        Splitter(target, least, most)


def test_a_document_that_is_not_text_is_refused() -> None:
    with pytest.raises(RetrieverError, match="is bytes, not str; decode it"):
        Splitter().split(b"bytes")  # type: ignore[arg-type]

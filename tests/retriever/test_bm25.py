"""Terms, and BM25 against its formula written out once more, slowly."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from hypic_retriever import BM25, RetrieverError
from hypic_retriever.terms import terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Quick brown FOX.", ["the", "quick", "brown", "fox"]),
        ("Zürich STRASSE Straße ﬁne", ["zurich", "strasse", "strasse", "fine"]),
        ("world's worlds’ O'Brien", ["world", "world", "o", "brien"]),
        ("e-mail well\u2011known 2026-11-29", ["e", "mail", "email", "well", "known", "wellknown", "2026", "11", "29"]),
        ("1,234,567.5 km in 3.14 or 5th", ["1234567.5", "km", "in", "3.14", "or", "5th"]),
        ("41\u200d.6 co\u00adoperate", ["41.6", "cooperate"]),
        ("cities classes boxes buses bus glass", ["city", "classe", "boxe", "buse", "bus", "glass"]),
        ("gas Paris series", ["gas", "pari", "sery"]),
        ("東京都 です x", ["東京", "京都", "です", "x"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("snake_case C++ a.b", ["snake", "case", "c", "a", "b"]),
        ("... — !?", []),
    ],
)  # fmt: skip
def test_terms(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


def test_a_word_and_its_plural_or_possessive_are_one_term() -> None:
    for one, other in [
        ("bridge", "bridges"),
        ("city", "cities"),
        ("author", "author's"),
        ("class", "class's"),
        ("email", "e-mail"),
    ]:
        assert set(terms(one)) & set(terms(other)), (one, other)


def slow_scores(texts: dict[str, str], query: str, k1: float, b: float) -> dict[str, float]:
    """Robertson and Zaragoza's formula, a loop for every sum."""
    split = {id: terms(text) for id, text in texts.items()}
    mean = sum(map(len, split.values())) / len(split)
    scores = {}
    for id, words in split.items():
        score = 0.0
        for term in terms(query):
            with_term = sum(term in other for other in split.values())
            idf = math.log(1 + (len(split) - with_term + 0.5) / (with_term + 0.5))
            tf = words.count(term)
            if tf == 0:
                continue
            score += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(words) / mean))
        if score:
            scores[id] = score
    return scores


def random_texts(rng: random.Random, number: int) -> dict[str, str]:
    vocabulary = [f"word{i}" for i in range(60)]
    weights = [1 / (i + 1) for i in range(60)]
    return {f"t{i:03d}": " ".join(rng.choices(vocabulary, weights, k=rng.randint(1, 40))) for i in range(number)}


def check(index: BM25, texts: dict[str, str], query: str) -> None:
    expected = slow_scores(texts, query, index.k1, index.b)
    found = index.search(query, 1000)
    assert {id for id, _ in found} == expected.keys()
    for id, score in found:
        assert score == pytest.approx(expected[id], rel=1e-12)
    assert found == sorted(found, key=lambda pair: (-pair[1], pair[0]))
    assert index.search(query, 7) == found[:7]


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0.0, 0.5), (2.0, 0.0), (0.9, 1.0)])
def test_scores_are_those_of_the_formula(k1: float, b: float) -> None:
    rng = random.Random(k1)
    texts = random_texts(rng, 80)
    index = BM25(k1, b)
    for id, text in texts.items():
        index.add(id, text)
    for query in ["word0", "word3 word17 word40", "word5 word5 word1", "word2 unknown"]:
        check(index, texts, query)
    assert index.search("unknown", 5) == [] == index.search("", 5)


def test_adding_replacing_and_removing_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypic_retriever.bm25._MIN_DEAD", 20)
    rng = random.Random(1)
    index = BM25()
    texts: dict[str, str] = {}
    for step in range(600):
        id = f"t{rng.randrange(40)}"
        if rng.random() < 0.4:
            index.remove(id)
            texts.pop(id, None)
        else:
            texts[id] = " ".join(rng.choices([f"w{i}" for i in range(15)], k=rng.randint(0, 12)))
            index.add(id, texts[id])
        assert len(index) == len(texts) and (id in index) == (id in texts)
        if step % 50 == 49:
            check(index, texts, "w1 w2 w3")
    for id in list(texts):
        index.remove(id)
    assert len(index) == 0 and index.search("w1", 3) == [] and not index._postings


def test_ties_are_broken_by_id_whatever_the_order_of_adding() -> None:
    ids = [f"{i:02d}" for i in range(30)]
    for seed in range(5):
        index = BM25()
        for id in random.Random(seed).sample(ids, len(ids)):
            index.add(id, "the same words")
        assert [id for id, _ in index.search("words", 4)] == ids[:4]


def test_keep_leaves_k_results_when_k_are_there() -> None:
    index = BM25()
    for i in range(100):
        index.add(f"{i:02d}", "apple " * (100 - i))
    assert [id for id, _ in index.search("apple", 3, keep=lambda id: id >= "90")] == ["90", "91", "92"]
    assert index.search("apple", 3, keep=lambda id: False) == []


@pytest.mark.parametrize(("k1", "b"), [(-0.1, 0.5), (1.0, 1.1), (float("nan"), 0.5), (float("inf"), 0.5)])
def test_settings_out_of_range_are_refused(k1: float, b: float) -> None:
    with pytest.raises(RetrieverError, match="choose k1 >= 0 and 0 <= b <= 1"):
        BM25(k1, b)


def test_twenty_thousand_texts_are_searched_quickly() -> None:
    rng = random.Random(0)
    words = [f"word{i}" for i in range(5000)]
    weights = list(itertools.accumulate(1 / (i + 1) for i in range(5000)))
    index = BM25()
    for i in range(20_000):
        index.add(str(i), " ".join(rng.choices(words, cum_weights=weights, k=25)))
    start = time.process_time()
    for _ in range(20):
        assert len(index.search("word0 word1 word7 word900", 8)) == 8
    assert (time.process_time() - start) / 20 < 0.05

"""The vector index against plain cosines, and the fusion of rankings."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from hypic_retriever import EmbedderError, IndexFormatError, VectorIndex
from hypic_retriever.fusion import reciprocal_rank_fusion


def random_vectors(number: int, dimension: int = 16, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(number, dimension)).astype(np.float32)


def cosines(vectors: NDArray[np.float32], query: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    return found


def assert_found(index: VectorIndex, query: NDArray[np.float32], id: str, cosine: float) -> None:
    (found,) = index.search(query, 1)
    assert found[0] == id and found[1] == pytest.approx(cosine)


def test_cosines_and_their_order() -> None:
    vectors = random_vectors(200)
    index = VectorIndex(16)
    index.add([f"v{i:03d}" for i in range(200)], vectors)
    for query in random_vectors(10, seed=1):
        expected = cosines(vectors, query)
        found = index.search(query, 9)
        assert [int(id[1:]) for id, _ in found] == np.argsort(-expected)[:9].tolist()
        np.testing.assert_allclose([score for _, score in found], np.sort(expected)[::-1][:9], atol=1e-6)


def test_adding_again_replaces_and_removing_forgets() -> None:
    index = VectorIndex(4)
    eye = np.eye(4, dtype=np.float32)
    index.add(["a", "b", "a"], eye[:3])
    assert len(index) == 2
    assert_found(index, eye[2], "a", 1.0)
    index.add(["b"], 5 * eye[3:4])
    index.remove(["a", "unknown"])
    assert len(index) == 1 and "a" not in index
    assert len(index.search(eye[3], 5)) == 1
    assert_found(index, eye[3], "b", 1.0)
    index.remove(["b"])
    assert index.search(eye[3], 5) == []


def test_ties_are_broken_by_id_and_zero_vectors_have_cosine_zero() -> None:
    index = VectorIndex(2)
    index.add(["c", "zero", "a", "b"], np.array([[1, 0], [0, 0], [2, 0], [3, 0]], dtype=np.float32))
    found = index.search(np.array([1, 0], dtype=np.float32), 4)
    assert [id for id, _ in found] == ["a", "b", "c", "zero"] and found[-1][1] == 0.0


def test_keep_leaves_k_results_when_k_are_there() -> None:
    index = VectorIndex(16)
    vectors = random_vectors(300)
    index.add([f"v{i:03d}" for i in range(300)], vectors)
    worst = set(np.argsort(cosines(vectors, vectors[0]))[:3].tolist())
    assert {int(id[1:]) for id, _ in index.search(vectors[0], 3, keep=lambda id: int(id[1:]) in worst)} == worst


def test_bytes_round_trip_and_go_on_from_there() -> None:
    index = VectorIndex(16)
    index.add(["a", "b", "c"], random_vectors(3))
    index.remove(["b"])
    again = VectorIndex.from_bytes(index.to_bytes(), index.numbers(), 16)
    query = random_vectors(1, seed=2)[0]
    assert again.search(query, 3) == index.search(query, 3)
    again.add(["d"], query[None])
    assert again.search(query, 1)[0][0] == "d" and len(again) == 3


def test_bytes_that_do_not_fit_are_refused() -> None:
    index = VectorIndex(16)
    index.add(["a", "b"], random_vectors(2))
    with pytest.raises(IndexFormatError, match="no faiss index"):
        VectorIndex.from_bytes(b"not faiss at all", index.numbers(), 16)
    for numbers, dimension in [({"a": 0}, 16), ({"a": 0, "b": 7}, 16), (index.numbers(), 8)]:
        with pytest.raises(IndexFormatError, match="do not belong to these passages"):
            VectorIndex.from_bytes(index.to_bytes(), numbers, dimension)


@pytest.mark.parametrize(
    "bad", [np.zeros((2, 3)), np.zeros((1, 4)), np.array([[0, 0, 0, np.nan]] * 2), np.full((2, 4), np.inf)]
)
def test_unusable_vectors_are_refused_and_change_nothing(bad: NDArray[np.float32]) -> None:
    index = VectorIndex(4)
    with pytest.raises(EmbedderError, match="the embedder gave"):
        index.add(["a", "b"], bad)
    assert len(index) == 0


def test_a_dimension_below_one_and_missing_faiss_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmbedderError, match="dimension is 0"):
        VectorIndex(0)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(EmbedderError, match="pip install faiss-cpu"):
        VectorIndex(4)


def test_reciprocal_rank_fusion() -> None:
    fused = reciprocal_rank_fusion({"bm25": ["a", "b", "c"], "vector": ["d", "b"]})
    assert [id for id, _, _ in fused] == ["b", "a", "d", "c"]
    assert fused[0][1] == pytest.approx(1 / 62 + 1 / 62) and fused[0][2] == {"bm25": 2, "vector": 2}
    assert fused[1][1] == fused[2][1] == pytest.approx(1 / 61)

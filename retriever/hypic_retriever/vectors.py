"""Nearest passages by embedding: an exact faiss index over unit vectors.

``IndexIDMap2(IndexFlatIP)`` compares with every vector, so that a result never depends on training
or on the order of adding; inner products of unit vectors are cosines in ``[-1, 1]``. faiss knows
64-bit numbers only: this class keeps which number stands for which passage id. It holds no lock.
faiss is imported when a ``VectorIndex`` is made, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypic_retriever.errors import EmbedderError, IndexFormatError

Vectors = NDArray[np.float32]
_SPARE = 32


class VectorIndex:
    """Vectors ``[N, D]`` by passage id.

    Raises:
        EmbedderError: faiss is not installed, or ``dimension`` is below 1.
    """

    def __init__(self, dimension: int) -> None:
        if dimension < 1:
            raise EmbedderError(f"the embedder's dimension is {dimension}; it must be 1 or more.")
        faiss = _faiss()
        self.dimension = dimension
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._number_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, id: object) -> bool:
        return id in self._number_of

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Adds ``vectors[i]`` as ``ids[i]``, in place of an earlier one; of equal ids the last counts.

        Raises:
            EmbedderError: ``vectors`` is not ``[len(ids), dimension]`` or not finite.
        """
        unit = normalised(vectors, len(ids), self.dimension)
        last = {id: row for row, id in enumerate(ids)}
        if not last:
            return
        self.remove(list(last))
        numbers = np.arange(self._next, self._next + len(last), dtype=np.int64)
        self._next += len(last)
        self._index.add_with_ids(unit[list(last.values())], numbers)
        for id, number in zip(last, numbers.tolist(), strict=True):
            self._number_of[id] = number
            self._id_of[number] = id

    def remove(self, ids: Sequence[str]) -> None:
        """Removes vectors; unknown ids are no error."""
        numbers = [self._number_of.pop(id) for id in ids if id in self._number_of]
        for number in numbers:
            del self._id_of[number]
        if numbers:
            self._index.remove_ids(np.array(numbers, dtype=np.int64))

    def search(self, vector: Vectors, k: int, keep: Callable[[str], bool] | None = None) -> list[tuple[str, float]]:
        """At most ``k`` pairs (id, cosine) for one vector ``[D]``, best first, ties by id.

        Raises:
            EmbedderError: ``vector`` is not ``[dimension]`` or not finite.
        """
        unit = normalised(np.asarray(vector).reshape(1, -1), 1, self.dimension)
        if k < 1 or not len(self):
            return []
        depth = len(self) if keep else min(k + _SPARE, len(self))
        cosines, numbers = self._index.search(unit, depth)
        named = (
            (-float(cosine), self._id_of[number])
            for cosine, number in zip(cosines[0], numbers[0].tolist(), strict=True)
        )
        ranked = sorted(pair for pair in named if keep is None or keep(pair[1]))
        return [(id, -cosine) for cosine, id in ranked[:k]]

    def to_bytes(self) -> bytes:
        """The faiss index in faiss's own file format. ``numbers()`` has to be kept beside it."""
        return bytes(_faiss().serialize_index(self._index).tobytes())

    def numbers(self) -> dict[str, int]:
        """The number that stands for each id in the faiss index."""
        return dict(self._number_of)

    @classmethod
    def from_bytes(cls, data: bytes, numbers: Mapping[str, int], dimension: int) -> VectorIndex:
        """What ``to_bytes`` and ``numbers`` gave, as an index again.

        Raises:
            IndexFormatError: the bytes are no such index, or do not fit the numbers.
        """
        faiss = _faiss()
        restored = cls(dimension)
        try:
            index = faiss.deserialize_index(np.frombuffer(data, dtype=np.uint8))
        except RuntimeError as error:
            raise IndexFormatError(
                "the vectors are no faiss index; build the index again from its documents."
            ) from error
        stored = sorted(faiss.vector_to_array(index.id_map).tolist()) if isinstance(index, faiss.IndexIDMap2) else None
        if index.d != dimension or stored != sorted(numbers.values()):
            raise IndexFormatError(
                "the vectors do not belong to these passages; build the index again from its documents."
            )
        restored._index = index
        restored._number_of = dict(numbers)
        restored._id_of = {number: id for id, number in numbers.items()}
        restored._next = max(numbers.values(), default=-1) + 1
        return restored


def normalised(vectors: Vectors, num_rows: int, dimension: int) -> Vectors:
    """Rows of length 1, C order, float32; a row of zeros stays, and has cosine 0 with everything.

    Raises:
        EmbedderError: the shape is not ``[num_rows, dimension]`` or a value is not finite.
    """
    rows = np.ascontiguousarray(vectors, dtype=np.float32)
    if rows.shape != (num_rows, dimension):
        raise EmbedderError(
            f"the embedder gave vectors of shape {list(rows.shape)}; expected [{num_rows}, {dimension}]."
        )
    if not np.isfinite(rows).all():
        raise EmbedderError("the embedder gave a vector with NaN or infinity; check its weights and the text.")
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise EmbedderError("ranking by embeddings needs faiss; install it: pip install faiss-cpu.") from error
    module: ModuleType = faiss
    return module

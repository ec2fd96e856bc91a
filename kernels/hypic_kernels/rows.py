"""Rows of tokens, as chunked kernels read them: those that are run side by side, planned on the host and read on the
device, and those that chunks name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk within a row."""
NO_TOKEN = -1
"""A place of a row that no token stands at."""


class RowArrays(NamedTuple):
    """Of rows one after the other: see ``Rows``; int32 on the host."""

    cu_seqlens: NDArray[np.int32]
    chunk_indices: NDArray[np.int32]
    chunk_offsets: NDArray[np.int32]


def row_arrays(lengths: Sequence[int]) -> RowArrays:
    """For rows of so many tokens, each of at least one."""
    sizes = np.asarray(lengths, dtype=np.int64)
    counts = -(-sizes // CHUNK)
    offsets = _sums(counts)
    rows = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(offsets[:-1], counts)
    return RowArrays(_sums(sizes), np.stack([rows, within], axis=1).astype(np.int32), offsets)


def _sums(counts: NDArray[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


@dataclass(frozen=True)
class Rows:
    """``R`` rows of ``n`` places together, in ``M`` chunks; tensors are int32.

    ``tokens [n]`` says which of a layer's tokens stands at each place; -1: none, which leaves the state as it is. Row
    ``r`` has the places ``cu_seqlens[r]`` to ``cu_seqlens[r + 1] - 1``, and ``chunk_offsets[r]`` chunks stand before
    it; ``chunk_indices [M, 2]`` gives the row of a chunk and its number within the row.

    ``folds [F, 2]``: the chunks, first and behind the last, of one row each, whose transition is wanted. ``marks [M]``:
    where among ``num_marks`` the state before a chunk is kept; -1: it is not.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    folds: Tensor
    marks: Tensor
    num_marks: int = 0

    @cached_property
    def num_rows(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @cached_property
    def num_folds(self) -> int:
        return self.folds.shape[0]

    @cached_property
    def fault(self) -> str | None:
        """What is wrong with the tensors' types and shapes: looked at once, for all layers that run these rows."""
        num_chunks, ends = self.chunk_indices.shape[0], (self.num_rows + 1,)
        wanted = {
            "tokens": self.tokens.shape[:1], "cu_seqlens": ends, "chunk_indices": (num_chunks, 2),
            "chunk_offsets": ends, "folds": (self.num_folds, 2), "marks": (num_chunks,),
        }  # fmt: skip
        for name, shape in wanted.items():
            found: Tensor = getattr(self, name)
            if found.shape != shape or found.dtype != torch.int32 or not found.is_contiguous():
                about = f"{found.dtype} {list(found.shape)}"
                return f"rows.{name} is {about}; it must be contiguous int32 {list(shape)}."
        if not 0 <= self.num_marks <= num_chunks:
            return f"{self.num_marks} states before chunks are wanted; there are {num_chunks} chunks."
        return None

    @staticmethod
    def of(
        lengths: Sequence[int],
        num_folds: int = 0,
        device: torch.device | str = "cpu",
        *,
        folds: Sequence[tuple[int, int]] | None = None,
        marks: Mapping[int, int] = MappingProxyType({}),
        tokens: Sequence[int] | None = None,
    ) -> Rows:
        """Rows of all tokens in order, or of ``tokens``, of which the first ``num_folds`` are folds; or with ``folds``,
        and ``marks`` by chunk."""
        made = row_arrays(lengths)
        offsets = made.chunk_offsets.tolist()
        spans = list(pairwise(offsets))[:num_folds] if folds is None else folds
        wanted = [marks.get(chunk, -1) for chunk in range(offsets[-1])]
        places = range(int(made.cu_seqlens[-1])) if tokens is None else tokens
        lists = places, made.cu_seqlens, made.chunk_indices, made.chunk_offsets, np.reshape(spans, (-1, 2)), wanted
        tokens_of, *others, folds_of, marks_of = (
            torch.from_numpy(np.array(values, dtype=np.int32)).to(device) for values in lists
        )
        cu_seqlens, chunk_indices, chunk_offsets = others
        return Rows(tokens_of, cu_seqlens, chunk_indices, chunk_offsets, folds_of, marks_of, len(marks))


def copy_named(out: Tensor, found: Tensor, chunks: Tensor) -> Tensor:
    """``out [N, ...]`` with the rows of ``found`` whose tokens stand in ``chunks [M, C]``; the others as they are."""
    is_named = torch.zeros(len(out) + 1, dtype=torch.bool, device=out.device)
    is_named[torch.where((chunks >= 0) & (chunks < len(out)), chunks, len(out)).long().flatten()] = True
    return out.copy_(torch.where(is_named[:-1].view(-1, *[1] * (out.ndim - 1)), found, out))

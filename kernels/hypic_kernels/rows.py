"""Rows of tokens, as chunked kernels read them: those that are run side by side, planned on the host and read on the
device, and those that chunks name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk within a row."""


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
    """``R`` rows of ``n`` tokens together, in ``M`` chunks; tensors are int32.

    ``tokens [n]`` says which of a layer's tokens stands at each place. Row ``r`` has the places ``cu_seqlens[r]`` to
    ``cu_seqlens[r + 1] - 1``, and ``chunk_offsets[r]`` chunks stand before it; ``chunk_indices [M, 2]`` gives the row
    of a chunk and its number within the row. Of the first ``num_folds`` rows, which have ``num_fold_tokens`` tokens,
    the transition is wanted too.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    chunk_indices: Tensor
    chunk_offsets: Tensor
    num_folds: int = 0
    num_fold_tokens: int = 0
    num_fold_chunks: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.cu_seqlens) - 1

    @staticmethod
    def of(lengths: Sequence[int], num_folds: int = 0, device: torch.device | str = "cpu") -> Rows:
        """Rows of all tokens in order."""
        made = row_arrays(lengths)
        tokens = torch.arange(int(made.cu_seqlens[-1]), dtype=torch.int32, device=device)
        cu_seqlens, chunk_indices, chunk_offsets = (torch.from_numpy(values).to(device) for values in made)
        counts = int(made.cu_seqlens[num_folds]), int(made.chunk_offsets[num_folds])
        return Rows(tokens, cu_seqlens, chunk_indices, chunk_offsets, num_folds, *counts)

    def folds(self) -> Rows:
        """The rows whose transitions are wanted."""
        return Rows(
            self.tokens[: self.num_fold_tokens],
            self.cu_seqlens[: self.num_folds + 1],
            self.chunk_indices[: self.num_fold_chunks],
            self.chunk_offsets[: self.num_folds + 1],
        )


def copy_named(out: Tensor, found: Tensor, chunks: Tensor) -> Tensor:
    """``out [N, ...]`` with the rows of ``found`` whose tokens stand in ``chunks [M, C]``; the others as they are."""
    is_named = torch.zeros(len(out) + 1, dtype=torch.bool, device=out.device)
    is_named[torch.where((chunks >= 0) & (chunks < len(out)), chunks, len(out)).long().flatten()] = True
    return out.copy_(torch.where(is_named[:-1].view(-1, *[1] * (out.ndim - 1)), found, out))

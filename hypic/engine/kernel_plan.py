"""A step as kernels read it, on the device: made once, read by every layer.

``kernel_arrays`` makes the numbers, ``kernel_buffer`` sends them; here they become tensors, for a step of its own or
for a recorded one whose contents are overwritten before every run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hypic.engine.kernel_buffer import Sent
from hypic.engine.pool import Pool
from hypic.engine.run_arrays import RunCounts
from hypic_kernels.attention import Plan as AttentionPlan
from hypic_kernels.compose import Chains
from hypic_kernels.rows import Rows


@dataclass(frozen=True)
class Folds:
    """Interiors being encoded: chains of their chunks' maps, and the slots that receive the products (int64)."""

    chains: Chains
    states: Tensor
    transitions: Tensor


@dataclass(frozen=True)
class Slotted:
    """A step's chains whose states go where they are kept: snapshots before an element to the slot that it names,
    finals to the plan's ``final_slots``, and those of ``copies_from`` then also to ``copies_to`` (int64)."""

    chains: Chains
    copies_from: Tensor
    copies_to: Tensor


@dataclass(frozen=True)
class Runs:
    """Rows that are run side by side, one of each run, from the states in slots ``initial [R]``. All int32.

    Of the states that are kept (``hypic_kernels.delta.run``), those at ``write_places`` go to ``write_slots``; fold
    ``f`` led from ``fold_ends[f, 0]`` to ``fold_ends[f, 1]``, and its map goes to ``fold_states`` and
    ``fold_transitions``, after what is there where it was ``fold_begun``, as one was that ``is_continued``. ``others``:
    the span of the tokens that stand in no run, if they follow each other, and ``other_chunks`` the plan's ``chunks``
    as counted from there.
    """

    rows: Rows
    initial: Tensor
    write_slots: Tensor
    write_places: Tensor
    fold_ends: Tensor
    fold_states: Tensor
    fold_transitions: Tensor
    fold_begun: Tensor
    is_continued: bool
    others: slice | None
    other_chunks: Tensor


@dataclass(frozen=True)
class KernelPlan:
    """Device tensors, int32 unless torch's own indexing reads them (int64).

    ``conv_sources [N, W]``, ``conv_write_slots [P]``, ``conv_write_sources [P, W-1]``: see ``hypic_kernels.conv``.
    ``chunks [M, C]`` holds token numbers, ``N`` pads; ``token_chunks [N]`` (int64) is its inverse into ``M * C``.
    ``chains`` walks chunks (source 0) and interiors (source 1). The states it gives stand in rows ``[before | final]``,
    ``num_outputs`` and ``num_chains`` of them; ``write_places`` of these go to ``write_slots`` (int64). ``slotted`` is
    the same for a scan that writes into state slots itself; of decoding there is none.
    Tokens of runs stand in none of these, but in ``runs``.
    ``element_turns [E]``: the number of an element's interior, -1 for chunks. ``gathers``: the chains' source 1 are the
    interiors, gathered and moved, in their order, instead of the pool's entries.
    """

    conv_sources: Tensor
    conv_write_slots: Tensor
    conv_write_sources: Tensor
    chunks: Tensor
    token_chunks: Tensor
    chains: Chains
    element_turns: Tensor
    gathers: bool
    num_outputs: int
    slotted: Slotted | None
    write_slots: Tensor
    write_places: Tensor
    interior_states: Tensor
    interior_transitions: Tensor
    interior_origins: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    folds: Folds | None
    attention: AttentionPlan | None
    final_attention: AttentionPlan | None
    runs: Runs | None = None


@dataclass(frozen=True)
class Counts:
    """Numbers that decide shapes: chunks' maps, states wanted before elements, what runs keep."""

    num_chunks: int
    num_outputs: int
    gathers: bool
    runs: RunCounts | None = None


def kernel_plan(
    sent: Sent, counts: Counts, pool: Pool, attention: AttentionPlan | None, final_attention: AttentionPlan | None
) -> KernelPlan:
    """The plan over arrays that were sent; ``counts.gathers`` says that interiors are gathered before they are read."""
    has_folds = "fold_states" in sent
    return KernelPlan(
        conv_sources=sent["conv_sources"],
        conv_write_slots=sent["conv_write_slots"],
        conv_write_sources=sent["conv_write_sources"],
        chunks=sent["chunks"],
        token_chunks=sent.long("token_chunks"),
        chains=_chains(sent, "", counts, pool),
        element_turns=sent["element_turns"],
        gathers=counts.gathers,
        num_outputs=counts.num_outputs,
        slotted=_slotted(sent, counts, pool) if "slotted_elements" in sent else None,
        write_slots=sent.long("write_slots"),
        write_places=sent.long("write_places"),
        interior_states=sent.long("interior_states"),
        interior_transitions=sent.long("interior_transitions"),
        interior_origins=sent.long("interior_origins"),
        initial_slots=sent["initial_slots"],
        final_slots=sent["final_slots"],
        folds=_folds(sent, counts, pool) if has_folds else None,
        attention=attention,
        final_attention=final_attention,
        runs=None if counts.runs is None else _runs(sent, counts.runs),
    )


def _runs(sent: Sent, counts: RunCounts) -> Runs:
    rows = Rows(
        tokens=sent["run_tokens"],
        cu_seqlens=sent["run_cu_seqlens"],
        chunk_indices=sent["run_chunk_indices"],
        chunk_offsets=sent["run_chunk_offsets"],
        folds=sent["run_folds"],
        marks=sent["run_marks"],
        num_marks=counts.num_marks,
    )
    chunks = sent["chunks"]
    return Runs(
        rows=rows,
        initial=sent["run_initial"],
        write_slots=sent["run_write_slots"],
        write_places=sent["run_write_places"],
        fold_ends=sent["run_fold_ends"],
        fold_states=sent["run_fold_states"],
        fold_transitions=sent["run_fold_transitions"],
        fold_begun=sent["run_fold_begun"],
        is_continued=counts.is_continued,
        others=counts.others,
        other_chunks=chunks if counts.others is None else chunks - counts.others.start,
    )


def _chains(sent: Sent, prefix: str, counts: Counts, pool: Pool) -> Chains:
    """Maps of chunks are source 0; source 1 are the pool's entries, or the interiors gathered from it."""
    initial = sent["initial_slots"] if not prefix else torch.zeros_like(sent["fold_states"])
    entries = (pool.num_transitions, pool.spare_state)
    if counts.gathers and not prefix:
        entries = (len(sent["interior_states"]),) * 2
    return Chains(
        cu_elements=sent[f"{prefix}cu_elements"],
        elements=sent[f"{prefix}elements"],
        initial_index=initial,
        num_transitions=(counts.num_chunks, entries[0]),
        num_states=(counts.num_chunks, entries[1]),
        num_initial=pool.spare_state,
        num_outputs=0 if prefix else counts.num_outputs,
    )


def _slotted(sent: Sent, counts: Counts, pool: Pool) -> Slotted:
    chains = replace(_chains(sent, "", counts, pool), elements=sent["slotted_elements"], num_outputs=pool.spare_state)
    return Slotted(chains, sent.long("copies_from"), sent.long("copies_to"))


def _folds(sent: Sent, counts: Counts, pool: Pool) -> Folds:
    return Folds(_chains(sent, "fold_", counts, pool), sent.long("fold_states"), sent.long("fold_transitions"))

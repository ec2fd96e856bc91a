"""Long rows of one layer, by the kernels that carry the state themselves and by maps of chunks: rows of ``bench.py``.

``whole`` is one row of 16,512 tokens, ``encodes`` 16 rows of 1,024 whose transitions are wanted, each behind a state.
Both ways are compared with the reference before they are timed. ``time_s`` is that of a replayed graph, ``eager_s`` of
launches from Python, which the host may limit. The first line says how long fla's first use took, and
with which layouts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic_kernels import compose, delta
from hypic_kernels.delta import carrying, chunked, gathering, reference
from hypic_kernels.delta.backend import shared_bytes
from hypic_kernels.delta.layout import CarryConfig, carry_candidates
from hypic_kernels.delta.problem import Problem, Shape
from hypic_kernels.delta.rule import TOLERANCE
from hypic_kernels.launch import Launch
from hypic_kernels.rows import CHUNK, Rows
from hypic_kernels.timing import median_s, replayed_s
from hypic_kernels.trust import relative_error

PRECISION: compose.Precision = "tf32x3"


class Case(NamedTuple):
    """Rows of ``lengths``, of which the first ``num_folds`` are folded."""

    name: str
    lengths: tuple[int, ...]
    num_folds: int


CASES = (Case("whole", (16512,), 0), Case("encodes", (1024,) * 16, 16), Case("few", (512,) * 4, 4))


@dataclass(frozen=True)
class Work:
    """One case; ``chains`` walk the chunks of each row, ``folds`` those whose product is wanted."""

    name: str
    problem: Problem
    rows: Rows
    initial: Tensor
    chains: compose.Chains
    folds: compose.Chains | None
    out: Tensor

    @staticmethod
    def of(case: Case, heads: tuple[int, int], dims: tuple[int, int], device: str = "cuda") -> Work:
        problem = Problem.random(Shape(*dims, *heads, CHUNK, case.lengths, 0), dtype=torch.bfloat16, device=device)
        rows, count = Rows.of(case.lengths, case.num_folds, device), len(case.lengths)
        initial = torch.randn((count, heads[1], *dims), generator=torch.Generator().manual_seed(1)).to(device)
        chunks, ends = list(range(len(rows.chunk_indices))), rows.chunk_offsets.tolist()
        none = [compose.NOT_WANTED] * len(chunks)
        chains = compose.Chains.of(ends, chunks, chunks, range(count), device=device)
        folds = compose.Chains.of(ends, chunks, chunks, [0] * count, out_index=none, device=device)
        out = torch.empty((len(problem.v), heads[1], dims[1]), dtype=torch.bfloat16, device=device)
        return Work(case.name, problem, rows, initial, chains, folds if case.num_folds else None, out)

    def by_fla(self) -> tuple[Tensor, ...]:
        """Outputs, final states, transitions and end states alone."""
        p = self.problem
        final, transitions = chunked.run(*p.tokens, self.rows, self.slotted, p.rule, p.norm, self.out)
        if not self.rows.num_folds:
            return self.out, final
        end = torch.baddbmm(final.flatten(0, 1), transitions.flatten(0, 1), self.initial.flatten(0, 1), alpha=-1)
        return self.out, final, transitions, end.view(final.shape)

    @property
    def slotted(self) -> chunked.Slotted:
        return self.initial, torch.arange(len(self.initial), dtype=torch.int32, device=self.initial.device)

    def by_maps(self) -> tuple[Tensor, ...]:
        """The same by lift, compose, read and fold."""
        p = self.problem
        maps = delta.lift(*p.tokens, p.chunks, rule=p.rule)
        parts = ([maps.transition], [maps.end_state])
        folded = () if self.folds is None else compose.fold(self.folds, *parts, precision=PRECISION)
        before, final = compose.compose(self.chains, *parts, self.initial, precision=PRECISION)
        delta.read(maps.query, maps.offset, before, p.chunks, self.out, norm=p.norm)
        return self.out, final, *folded

    def exact(self) -> tuple[Tensor, ...]:
        wide = self.problem.wide()
        initial = self.initial.double()
        plain, final, transitions = reference.run(*wide.tokens, self.rows, initial, wide.rule)
        found = reference.normed(plain, wide.norm).float(), final.float()
        if not self.rows.num_folds:
            return found
        return *found, transitions.float(), (final - transitions @ initial).float()

    def pieces(self) -> dict[str, Callable[[], object]]:
        """What ``by_fla`` launches, piece by piece."""
        p, rows = self.problem, self.rows
        q, k, v, g, beta = p.tokens
        x = chunked.gathered(q, k, g, beta, rows, p.rule)
        made = chunked.chunked(x, v, rows)
        initial = self.slotted
        walked = chunked.walked(x, made, rows, initial)
        found = chunked.outputs(x, made, rows, walked.states, walked.values, p.rule.scale)
        plain, into = replace(rows, folds=rows.folds[:0]), (walked.transitions, initial[1][: rows.num_folds])
        return {
            "gather": lambda: chunked.gathered(q, k, g, beta, rows, p.rule),
            "chunks": lambda: chunked.chunked(x, v, rows),
            "chunks by fla": lambda: chunked.chunked_by_fla(x, v, rows),
            "states by fla": lambda: chunked.walked_by_fla(x, made, plain, initial),
            "outputs": lambda: chunked.outputs(x, made, rows, walked.states, walked.values, p.rule.scale),
            "scatter": lambda: gathering.scatter(found, rows.tokens, p.norm, self.out).run(),
            "settle": self._settled(walked.kept, into),
        }

    def walks(self) -> Iterator[tuple[CarryConfig, Launch, tuple[Tensor, Tensor]]]:
        """Every layout of the walk that gives states and transitions in one launch, and what it writes: states after
        rows and transitions."""
        p, rows, initial = self.problem, self.rows, self.slotted
        x = chunked.gathered(p.q, p.k, p.g, p.beta, rows, p.rule)
        made = chunked.chunked(x, p.v, rows)
        found = chunked.walked(x, made, rows, initial)
        into = found.transitions, initial[1][: rows.num_folds]
        for config in carry_candidates(self.initial.shape[2], shared_bytes(self.initial.device)):
            written = torch.full_like(found.kept, math.nan), torch.full_like(found.transitions, math.nan)
            states = found.states, found.values, written[0]
            launch = carrying.carry(x.k, made, rows, initial, states, (written[1], into[1]), config=config)
            yield config, launch, written

    def _settled(self, kept: Tensor, into: chunked.Slotted) -> Callable[[], object]:
        """Maps of folds and final states, into a pool."""
        states, places = torch.empty_like(kept), self.slotted[1]
        ends = torch.stack([places, places], 1)[: self.rows.num_folds]
        arguments = kept, into, ends, places[: len(ends)], (places, places), states
        return lambda: carrying.settle(*arguments).run()


def rows(heads: tuple[int, int], dims: tuple[int, int], repeats: int) -> Iterator[dict[str, Any]]:
    """Lines of results for all cases."""
    if chunked.pieces() is None:
        yield {"name": "run", "fault": "fla is not installed, or is of another version"}
        return
    started = time.perf_counter()
    trusted = delta.runs_here(*heads, *dims, torch.bfloat16, torch.device("cuda"))
    yield {"name": "run", "is_trusted": trusted, "first_use_s": time.perf_counter() - started, "layouts": layouts()}
    for case in CASES:
        work = Work.of(case, heads, dims)
        about = {"name": "run", "case": case.name, "num_tokens": len(work.problem.v)}
        exact = work.exact()
        for way, ran in (("maps", work.by_maps), ("fla", work.by_fla)):
            errors = [relative_error(found, truth) for found, truth in zip(ran(), exact, strict=True)]
            line = {**about, "way": way, "relative_errors": errors}
            if max(errors) <= TOLERANCE["bf16"]:
                line |= {"time_s": replayed_s([ran], repeats), "eager_s": median_s(ran, repeats)}
            yield line
        for piece, launch in work.pieces().items():
            yield {**about, "piece": piece, "time_s": replayed_s([launch], repeats)}
        for config, walk, written in work.walks():
            walk.run()
            errors = [relative_error(*pair) for pair in zip(written, exact[1:3], strict=False) if len(pair[0])]
            time_s = replayed_s([walk.run], repeats)
            yield {**about, "piece": "walk", "config": config._asdict(), "relative_errors": errors, "time_s": time_s}
        del work, exact
        torch.cuda.empty_cache()


def layouts() -> dict[str, dict[str, int]]:
    """What fla's kernels are pinned to, where fla lists it."""
    named = {"sums": chunked.SUMS, "solve": chunked.SOLVE, "w_u": chunked.W_U, "states": chunked.STATES}
    return {name: dict(layout) for name, layout in (*named.items(), ("outputs", chunked.OUTPUTS))}

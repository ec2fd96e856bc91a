"""An engine on a tiny checkpoint, driven by hand: every token leaves its logits, all memory is accounted for.

The engine is used as it is; only its model stands behind a proxy that notes each batch and its hidden states. What is
compared with comes from ``tests.reference``, which shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.batch import Batch
from hypic.engine.engine import Engine
from hypic.engine.kernel_choice import geometry_of, path_of
from hypic.engine.models import Model
from hypic.engine.plan import Piece
from hypic.engine.pool import Pool
from hypic.engine.runner import Runner, StepResult
from hypic.engine.segment import CachedSegment
from hypic.engine.storage import StorageForm
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.work import Work
from hypic.errors import HypicError
from hypic.types import CacheReport, Completion, Policy, SamplingParams, Segment
from tests.checkpoints import exact_oracle_logits, minimax, qwen, random_ids
from tests.reference import Live, Reference, Result, SegmentLink

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
POLICY = Policy(min_segment_tokens=0)
Pieces = Sequence[Piece]

MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen": qwen,
    "qwen-wrapper": lambda f: qwen(f, wrapper=True),
    "qwen-tied": lambda f: qwen(f, tie_word_embeddings=True),
    "qwen-wide": lambda f: qwen(f, hidden_size=64, head_dim=16, linear_num_value_heads=6, linear_value_head_dim=20),
    "qwen-conv-2": lambda f: qwen(f, linear_conv_kernel_dim=2),
    "qwen-linear": lambda f: qwen(f, single="linear_attention"),
    "qwen-attention": lambda f: qwen(f, single="full_attention"),
    "minimax": minimax,
    "minimax-partial": lambda f: minimax(f, rotary_dim=8),
    "minimax-linear": lambda f: minimax(f, single="linear_attention"),
    "minimax-attention": lambda f: minimax(f, single="full_attention"),
}
FAMILIES = ["qwen", "qwen-wrapper", "minimax", "minimax-partial"]


class Checkpoints:
    """Folders by name, made when they are first asked for; their engines' models and references are kept as well."""

    def __init__(self, make_folder: Callable[[str], Path], device: str = "cpu") -> None:
        self._make_folder, self.device = make_folder, device
        self._folders: dict[str, Path] = {}
        self.reference = cache(lambda name: Reference(self.folder(name)))
        self.runner = cache(self._runner)
        self._expected = cache(self._evaluate)
        self._full = cache(self._evaluate_full)

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            self._folders[name] = MAKERS[name](self._make_folder(name))
        return self._folders[name]

    def _runner(self, name: str, dtype: str) -> Runner:
        config = EngineConfig(
            device=self.device, graphs=False, dtype=dtype, memory="64MiB", max_context=4096, max_running=4
        )
        return Runner.load(self.folder(name), config)

    def expected(self, name: str, pieces: Pieces, policy: Policy = POLICY, generated: Sequence[int] = ()) -> Result:
        """What sections 3 and 4 of the contract give for a prompt and its answer."""
        chain = tuple((type(link), tuple(link.ids)) for link in links(pieces, policy))
        return self._expected(name, chain, policy.seam, policy.compose, policy.rotate, tuple(generated))

    def full(self, name: str, pieces: Pieces) -> Tensor:
        """Full recompute by transformers; with partial rotation it is no oracle, and the reference's one row is."""
        return self._full(name, tuple(flat(pieces)))

    def _evaluate_full(self, name: str, ids: tuple[int, ...]) -> Tensor:
        if name == "minimax-partial":
            return self.reference(name).full(ids).logits
        return exact_oracle_logits(self.folder(name), ids)

    def _evaluate(self, name: str, chain: Any, seam: int, compose: Any, rotate: bool, generated: Any) -> Result:
        parts = [Live(ids) if kind is Live else SegmentLink(ids, seam) for kind, ids in chain]
        parts += [Live(generated)] if generated else []
        return self.reference(name).evaluate(parts, compose=compose, rotate=rotate)


def live(num_tokens: int, seed: int, ends: bool = False) -> Piece:
    return Piece(tuple(random_ids(num_tokens, seed)), None, ends)


def seg(num_tokens: int, seed: int, **labels: Any) -> Piece:
    return Piece(tuple(random_ids(num_tokens, seed)), Segment(f"text {num_tokens} {seed}", **labels))


def flat(pieces: Pieces) -> list[int]:
    return [i for piece in pieces for i in piece.ids]


def links(pieces: Pieces, policy: Policy = POLICY) -> list[Live | SegmentLink]:
    """The chain of a prompt, from the contract: which segments are cached depends on prompt and policy alone."""
    pieces = [piece for piece in pieces if piece.ids]
    chain: list[Live | SegmentLink] = []
    for number, piece in enumerate(pieces):
        is_cached = piece.segment is not None and policy.reuse == "segments" and number < len(pieces) - 1
        is_cached = is_cached and len(piece.ids) > policy.seam and len(piece.ids) >= policy.shortest
        chain.append(SegmentLink(piece.ids, policy.seam) if is_cached else Live(piece.ids))
    return chain


def many_segments() -> list[Piece]:
    """Live text, segments around every border (one twice, one below the seam, neighbours without glue), a tail."""
    pieces = [live(7, 100)]
    for i, length in enumerate((20, 9, 1, 10, 64, 8, 11, 20, 65)):
        pieces.append(seg(length, length))
        pieces += [live(2, 200 + i)] if i % 2 else []
    return [*pieces, live(12, 300)]


def few_segments() -> list[Piece]:
    return [live(5, 1), seg(30, 2), seg(41, 3), live(2, 4), seg(19, 5), live(9, 6)]


def only_segment(num_tokens: int = 40) -> list[Piece]:
    return [seg(num_tokens, 1), live(15, 2)]


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude of ``expected``; nothing to compare is no agreement."""
    assert found.shape == expected.shape and expected.numel(), f"{found.shape} against {expected.shape}"
    found, expected = found.double().cpu(), expected.double().cpu()
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


@dataclass
class Answer:
    """What became of one request: logits by position (of every token that was run for it) and its emissions."""

    logits: dict[int, Tensor] = field(default_factory=dict)
    chosen_from: set[int] = field(default_factory=set)
    runs: list[int] = field(default_factory=list)
    pieces: list[Completion] = field(default_factory=list)
    error: HypicError | None = None
    is_over: bool = False

    @property
    def ids(self) -> list[int]:
        return [i for piece in self.pieces for i in piece.token_ids]

    @property
    def report(self) -> CacheReport:
        report = self.pieces[-1].report
        assert report is not None, "only a finished answer has a report"
        return report

    @property
    def outcomes(self) -> list[str]:
        return [segment.outcome for segment in self.report.segments]

    @property
    def reasons(self) -> list[str]:
        return [segment.reason for segment in self.report.segments]

    def rows(self, positions: Sequence[int] | None = None) -> Tensor:
        """Logits ``[N, V]`` in the order of positions."""
        return torch.stack([self.logits[p] for p in (sorted(self.logits) if positions is None else positions)])

    def error_to(self, expected: Result) -> float:
        """Largest relative difference over all rows of the reference; each must have been run."""
        assert sorted(self.logits) == expected.positions.tolist(), "other tokens were run than the contract asks for"
        return relative(self.rows(), expected.logits)

    def error_where_run(self, expected: Result) -> float:
        """The same over the rows that were run: behind a snapshot these are fewer."""
        wanted = {int(p): row for p, row in zip(expected.positions, expected.logits, strict=True)}
        positions = sorted(self.logits)
        return relative(self.rows(positions), torch.stack([wanted[p] for p in positions]))


class _Watched:
    """A model that also computes the rows that a step leaves out, and notes their hidden states.

    The engine gets what its own forward gives; the other pass runs before, and what it wrote is taken back. Not where
    steps are launched ahead (``is_noting``), since a step is judged when the next one has run.
    """

    def __init__(self, model: Model, is_noting: bool) -> None:
        self.model, self.is_noting = model, is_noting
        self.last: tuple[Batch, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def layout(self) -> Any:
        return self.model.layout

    def forward_final(self, batch: Batch, pool: Pool) -> tuple[Tensor, Tensor]:
        if not self.is_noting:
            return self.model.forward_final(batch, pool)
        slots, folds = _written(batch)
        touched = [(tensor, slots, tensor[slots]) for tensor in (*pool.states, *pool.tails)]
        touched += [(tensor, folds, tensor[folds]) for tensor in pool.transitions]
        self.last = batch, self.model.forward(batch, pool)
        for tensor, where, before in touched:
            tensor[where] = before
        return self.model.forward_final(batch, pool)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def _written(batch: Batch) -> tuple[Tensor, Tensor]:
    """State slots and transition slots that a step writes."""
    plan = batch.kernels
    if plan is None:
        assert batch.scan is not None and batch.conv is not None, "a step is planned one way or the other"
        written = (batch.scan.write_slots, batch.scan.fold_states, batch.conv.write_slots)
        return torch.cat(written).unique(), batch.scan.fold_transitions
    none = plan.write_slots[:0]
    states, transitions = [plan.write_slots, plan.conv_write_slots], [none]
    if plan.folds is not None:
        states.append(plan.folds.states)
        transitions.append(plan.folds.transitions)
    if plan.runs is not None:
        states += [plan.runs.fold_states, plan.runs.write_slots]
        transitions.append(plan.runs.fold_transitions)
    return torch.cat([slots.long() for slots in states]).unique(), torch.cat([slots.long() for slots in transitions])


class SizedPool(Pool):
    """A pool of exactly so many pages, states and transitions."""

    def __init__(
        self,
        loaded: Runner,
        page_size: int,
        sizes: tuple[int, int, int],
        form: StorageForm = StorageForm(),
        num_ahead: int = 0,
    ) -> None:
        self.sizes = sizes
        super().__init__(loaded.pool.layout, 0, page_size, 4096, 64, loaded.pool.device, form, num_ahead=num_ahead)

    def _split(self, budget_bytes: int, max_context: int, num_running: int) -> tuple[int, int, int]:
        return self.sizes


class Bench:
    """One engine and all that was seen of it."""

    def __init__(
        self,
        loaded: Runner,
        *,
        sizes: tuple[int, int, int] = (1024, 192, 96),
        max_context: int = 4096,
        max_running: int = 8,
        max_step_tokens: int = 8192,
        page_size: int = 16,
        store_bytes: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        kernels: str = "auto",
        store: str | None = None,
        form: StorageForm = StorageForm(),
        num_ahead: int = 0,
    ) -> None:
        self.watched = _Watched(getattr(loaded.model, "model", loaded.model), is_noting=not num_ahead)
        pool = SizedPool(loaded, page_size, sizes, form, num_ahead)
        geometry = geometry_of(self.watched.model, pool.layout, kernels, pool.device)
        identity = replace(loaded.identity, storage=form.name, path=path_of(geometry, pool.device))
        runner = Runner(
            self.watched,  # type: ignore[arg-type]
            pool,
            identity,
            max_context,
            loaded.weight_bytes,
            geometry,
        )
        vocabulary = Vocabulary(lambda ids: "".join(chr(0x4E00 + i) for i in ids), eos_ids)
        tiers = EngineConfig(store=store).tiers
        self.engine = Engine(runner, vocabulary, max_running, max_step_tokens, store_bytes, tiers)
        self.pool, self.store, self.at_start = pool, self.engine.store, pool.free
        self.answers: dict[str, Answer] = {}
        self.restarts: dict[str, int] = {}
        self.num_steps, self._number = 0, 0
        self._settle, self.engine.settle = self.engine.settle, self._note  # type: ignore[method-assign]

    def _note(self, work: Work, result: StepResult) -> list[Emission]:
        if not self.watched.is_noting:
            self.restarts.update({run.request.id: run.request.restarts for run in work.requests})
            return self._settle(work, result)
        batch, hidden = self._last()
        logits = self.watched.logits(hidden)
        for number, run in enumerate(work.requests, len(work.encodes)):
            self.restarts[run.request.id] = run.request.restarts
            answer, span = self.answers[run.request.id], batch.chain_tokens[number]
            positions = batch.positions[span].tolist()
            answer.runs.append(len(positions))
            for position, row in zip(positions, logits[span], strict=True):
                # A token that was chosen from stays as it was seen: alone in the last layer, not among all rows.
                if position not in answer.chosen_from:
                    answer.logits[position] = row
        wanting = [run for run in work.requests if run.chain.wants_logits]
        for run, row in zip(wanting, result.logits, strict=True):
            self.answers[run.request.id].logits[run.reached - 1] = row
            self.answers[run.request.id].chosen_from.add(run.reached - 1)
        return self._settle(work, result)

    def _last(self) -> tuple[Batch, Tensor]:
        assert self.watched.last is not None, "a step has settled that never ran"
        return self.watched.last

    # -- asking ------------------------------------------------------------------------------------------------------

    def add(
        self, pieces: Pieces, policy: Policy = POLICY, max_tokens: int = 1, warm: bool = False, **sampling: Any
    ) -> Answer:
        self._number += 1
        id, answer = f"r{self._number}", Answer()
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.engine.add(Task(id, list(pieces), params, policy, warm=warm))
        self.answers[id] = answer
        return answer

    def id_of(self, answer: Answer) -> str:
        return next(id for id, known in self.answers.items() if known is answer)

    def step(self) -> list[Emission]:
        self.num_steps += 1
        emissions = self.engine.step()
        for emission in emissions:
            self._take(emission)
        return emissions

    def _take(self, emission: Emission) -> None:
        answer = self.answers[emission.id]
        assert not answer.is_over, f"{emission.id} hears of more after its end"
        answer.is_over = emission.is_last
        if isinstance(emission.result, HypicError):
            answer.error = emission.result
        else:
            answer.pieces.append(emission.result)

    def run(self, limit: int = 5000) -> None:
        """Step until there is nothing left to do."""
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"the engine still has work after {limit} steps")

    def ask(self, pieces: Pieces, policy: Policy = POLICY, max_tokens: int = 1, **options: Any) -> Answer:
        """Answer one prompt alone, to its end."""
        answer = self.add(pieces, policy, max_tokens, **options)
        self.run()
        assert answer.error is None, answer.error
        assert answer.is_over
        return answer

    def head(self, pieces: Pieces, policy: Policy = POLICY) -> None:
        """Have a head kept, as after an answer."""
        self._number += 1
        self.answers[f"head{self._number}"] = Answer()
        self.engine.add(Task(f"head{self._number}", list(pieces), SamplingParams(), policy, is_head=True))
        self.run()

    def abort(self, answer: Answer) -> None:
        self.engine.abort(self.id_of(answer))
        answer.is_over = True

    # -- what is held ------------------------------------------------------------------------------------------------

    def entry(self, piece: Piece, policy: Policy = POLICY) -> CachedSegment:
        return next(e for e in self.store if e.key == self.key(piece, policy))

    def key(self, piece: Piece, policy: Policy = POLICY) -> bytes:
        assert piece.segment is not None, "live text has no key"
        identity = self.engine.runner.identity
        return identity.key(piece.ids, policy.seam, piece.segment.namespace, policy.deterministic)

    def contents(self, piece: Piece, policy: Policy = POLICY) -> dict[str, Tensor]:
        """All that is kept of a segment, layer by layer; a short interior's tail is cut to what it holds."""
        entry, pool = self.entry(piece, policy), self.pool
        slots = torch.from_numpy(entry.kv_slots)
        held: dict[str, Tensor] = {}
        for layer, shape in enumerate(pool.layout.linear):
            held[f"T{layer}"] = pool.transitions[layer][entry.transition_slot].clone()
            held[f"B{layer}"] = pool.states[layer][entry.state_slot].clone()
            tail = pool.tails[layer][entry.state_slot]
            held[f"tail{layer}"] = tail[max(0, shape.conv_width - 1 - entry.num_cached) :].clone()
        for layer in range(len(pool.layout.attention)):
            held[f"K{layer}"], held[f"V{layer}"] = pool.read_kv(layer, slots)
        return {name: tensor for name, tensor in held.items() if tensor.numel()}

    @property
    def num_segments(self) -> int:
        """Entries of segments; the store holds snapshots as well."""
        return sum(not entry.is_snapshot for entry in self.store)

    def assert_sound(self) -> None:
        """Every page and slot is either free or accounted for by entries and running requests."""
        held, states, transitions, pages = self._owners()
        references = dict.fromkeys(range(self.pool.num_pages), 0)
        for page in pages:
            references[page] += 1
        assert [references[p] for p in range(self.pool.num_pages)] == self.pool._references.tolist()
        free = self.pool.free
        assert len(set(self.pool._pages)) == free.pages == sum(count == 0 for count in references.values())
        states += [*self.pool._states, *self.pool.ahead]
        assert sorted(states) == list(range(1, self.pool.num_states + self.pool.num_ahead + 1))
        assert sorted([*transitions, *self.pool._transitions]) == list(range(self.pool.num_transitions))
        assert all(entry.pins == held.get(entry.key, 0) for entry in self.store), "pins are not those of requests"
        stats = self.store.stats
        assert stats.held_bytes == sum(entry.num_bytes for entry in self.store)
        assert stats.num_pinned == sum(entry.pins > 0 for entry in self.store)

    def _owners(self) -> tuple[Mapping[bytes, int], list[int], list[int], list[int]]:
        pins: dict[bytes, int] = {}
        states, transitions, pages = [], [], []
        jobs = list(self.engine.admission.encoding.values())
        entries = [*self.store, *(job.entry for job in jobs)]
        entries += [load.entry for load in self.engine.admission.jobs.loading.values()]
        for entry in entries:
            states.append(entry.state_slot)
            transitions += [entry.transition_slot] if entry.transition_slot is not None else []
            pages += entry.pages
        for job in jobs:
            states.append(job.state_slot)
            pages += job.seam_pages
            if job.base is not None:
                pins[job.base.key] = pins.get(job.base.key, 0) + 1
        for request in self.engine.scheduler.running.values():
            assert request.held is not None
            assert bool(request.held.state_slot) is not request.only_warms, "what only warms has no state"
            states += [slot for slot in (request.held.state_slot, request.held.other_slot) if slot]
            pages += request.held.pages + request.held.spare
            pages += [page for folded in request.held.folded for page in folded.pages]
            used = [*request.held.entries.values(), *([request.held.snapshot] if request.held.snapshot else [])]
            for entry in used:
                pins[entry.key] = pins.get(entry.key, 0) + 1
        return pins, states, transitions, pages

    def assert_back_to_start(self) -> None:
        """Nothing runs, nothing is pinned, and without the cache all memory is free."""
        assert not self.engine.has_work and not self.engine.admission.encoding
        self.assert_sound()
        assert self.store.stats.num_pinned == 0
        self.store.clear()
        assert self.pool.free == self.at_start and len(self.pool.ahead) == self.pool.num_ahead
        assert self.store.stats.held_bytes == self.store.stats.num_entries == 0

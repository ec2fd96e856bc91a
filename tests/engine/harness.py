"""An engine on a tiny checkpoint, driven by hand: every token leaves its logits, all memory is accounted for.

The engine is used as it is; only its model stands behind a proxy that notes each batch and its hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.batch import Batch
from hypic.engine.engine import Engine
from hypic.engine.kernel_choice import geometry_of, path_of
from hypic.engine.plan import Piece
from hypic.engine.primer import primed
from hypic.engine.runner import Runner, StepResult
from hypic.engine.segment import CachedSegment
from hypic.engine.storage import StorageForm
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.work import Work
from hypic.errors import HypicError
from hypic.types import Policy, SamplingParams
from tests.engine.answer import Answer
from tests.engine.prompts import POLICY, Pieces
from tests.engine.watched import SizedPool, Watched


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
        primer: tuple[int, ...] = (),
        rungs: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self.watched = Watched(getattr(loaded.model, "model", loaded.model), is_noting=not num_ahead)
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
        runner = primed(runner, rungs or ({1: primer} if primer else {}))
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

    def entry(self, piece: Piece, policy: Policy = POLICY, place: int | None = None) -> CachedSegment:
        return next(e for e in self.store if e.key == self.key(piece, policy, place))

    def key(self, piece: Piece, policy: Policy = POLICY, place: int | None = None) -> bytes:
        assert piece.segment is not None, "live text has no key"
        identity = self.engine.runner.identity
        primer = identity.primer_of(len(piece.ids), place) if policy.primed else None
        behind = "" if primer is None else primer.digest
        return identity.key(piece.ids, policy.seam, piece.segment.namespace, policy.deterministic, behind)

    def contents(self, piece: Piece, policy: Policy = POLICY, place: int | None = None) -> dict[str, Tensor]:
        """All that is kept of a segment, layer by layer; a short interior's tail is cut to what it holds."""
        entry, pool = self.entry(piece, policy, place), self.pool
        slots = torch.from_numpy(entry.kv_slots).to(pool.device)
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
        for kept in self.engine.runner.primers:
            states.append(kept.state_slot)
            pages += kept.pages
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

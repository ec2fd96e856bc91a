"""An engine that is driven step by step: it gives out every answer with its log probabilities, and can be told what
to answer, so that two ways of computing a prompt are compared at the very same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hypic.checkpoints import BUNDLED, bundled
from hypic.config import EngineConfig
from hypic.engine import plan, weights
from hypic.engine.engine import Engine
from hypic.engine.plan import Interior, Piece
from hypic.engine.runner import Runner, StepResult
from hypic.engine.sampler import Choice, Likeliest, Sampler
from hypic.engine.sampling_state import SamplingState
from hypic.engine.shares import step_tokens
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.tokenizer import Tokenizer
from hypic.engine.work import Work
from hypic.types import CacheReport, Completion, Policy, Prompt, SamplingParams
from hypic_apps.bench import floors


@dataclass(frozen=True)
class Reply:
    """An answer: its text and ids (the closing one included), ``logprobs [n, V]`` before each, and its report."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: Tensor
    report: CacheReport


class Noting(Sampler):
    """A sampler that keeps log probabilities, and gives forced tokens where there are any."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.forced: dict[str, Sequence[int]] = {}
        self.rows: dict[str, list[Tensor]] = {}

    def choose(self, logits: Tensor, states: Sequence[SamplingState], known: Likeliest | None = None) -> Choice:
        """As ``Sampler``; ``asked`` names the request of each row."""
        for id, row in zip(self.asked, logits.float().log_softmax(-1).cpu(), strict=True):
            self.rows.setdefault(id, []).append(row)
        choice = super().choose(logits, states)
        ids = [self._told(id, state) for id, state in zip(self.asked, states, strict=True)]
        if all(id is None for id in ids):
            return choice
        told = torch.tensor([-1 if id is None else id for id in ids], device=logits.device)
        chosen, finite, *others = choice.tensors
        return Choice(states, (torch.where(told < 0, chosen, told), finite | (told >= 0), *others))

    def _told(self, id: str, state: SamplingState) -> int | None:
        return self.forced[id][len(state.generated_ids)] if id in self.forced else None


class Driven(Engine):
    """See the module's docstring. ``watch`` is shown each step's work before it is settled."""

    noting: Noting
    watch_step: Callable[[Work], None] | None = None

    def choose(self, work: Work, logits: Tensor, known: Likeliest | None = None) -> Choice:
        self.noting.asked = [run.request.id for run in work.requests if run.chain.wants_logits]
        return super().choose(work, logits)

    def settle(self, work: Work, result: StepResult) -> list[Emission]:
        if self.watch_step is not None:
            self.watch_step(work)
        return super().settle(work, result)


class Subject:
    """A model to be measured, with its tokenizer; ``close`` is not needed, nothing runs between calls.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: as ``hypic.LLM``.
    """

    def __init__(self, model: str | None, config: EngineConfig) -> None:
        folder = bundled() if model is None else weights.locate(model)
        self.name, self.folder = BUNDLED if model is None else _name(model), Path(folder)
        self.tokenizer = Tokenizer(folder)
        self.runner = Runner.load(folder, config)
        tokens = self.tokenizer
        vocabulary = Vocabulary(
            tokens.decode, tokens.eos_ids, tokens.byte_ids, tokens.special_ids, dict(tokens.generation_defaults)
        )
        self.engine = Driven(
            self.runner,
            vocabulary,
            config.max_running,
            step_tokens(config, self.runner.pool.device),
            config.store_bytes,
        )
        self.engine.noting = self.engine.sampler = Noting()
        self._ids = itertools.count()

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, experts and embeddings included."""
        return self.runner.weight_bytes // self.runner.pool.layout.dtype.itemsize

    def forget(self) -> None:
        """Empties the store."""
        self.engine.store.clear()

    def pieces(self, prompt: Prompt) -> Sequence[Piece]:
        """The prompt's tokens as the engine takes them; a model without a chat template gets none."""
        if prompt.template and not self.tokenizer.has_chat_template:
            prompt = Prompt(prompt.segments, prompt.tail, prompt.glue, template=False)
        return self.tokenizer.encode(prompt, chat_template_kwargs={"enable_thinking": False})

    def ask(
        self,
        prompts: Sequence[Prompt],
        policy: Policy,
        max_tokens: int,
        forced: Sequence[Sequence[int]] = (),
    ) -> list[Reply]:
        """Greedy answers to prompts that run in each other's company; the first ones have to say what ``forced`` holds.

        Raises:
            HypicError: a prompt cannot be answered.
        """
        noting, ids = self.engine.noting, [f"item-{next(self._ids)}" for _ in prompts]
        noting.rows.clear()
        noting.forced = dict(zip(ids, forced, strict=False))
        for id, prompt in zip(ids, prompts, strict=True):
            told = noting.forced.get(id)
            most = max_tokens if told is None else len(told)
            sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=told is not None)
            self.engine.add(Task(id, self.pieces(prompt), sampling, policy))
        found = self._drive()
        return [self._reply(id, found[id]) for id in ids]

    def warm(self, prompt: Prompt, policy: Policy) -> int:
        """Encodes the prompt's segments into an emptied store, and leaves no snapshot of it; tokens run for that."""
        self.forget()
        segments = [piece for piece in self.pieces(prompt) if piece.segment is not None]
        ids = [f"item-{next(self._ids)}" for _ in segments[: len(segments) - policy.live_last]]
        for id, piece in zip(ids, segments, strict=False):
            self.engine.add(Task(id, [piece, Piece((0,))], policy=policy, warm=True))
        found = self._drive()
        reports = [Completion.join(found[id]).report for id in ids]
        return sum(report.computed_tokens for report in reports if report is not None)

    def floor_s(self, prompt: Prompt, policy: Policy) -> float:
        """Seconds to the first token, with all segments cached, that the device's limits allow at best."""
        planned = plan.make(self.pieces(prompt), policy, self.runner.identity)
        interiors = [(span.start, span.stop) for span in planned.spans if isinstance(span, Interior)]
        load = floors.warm_load(interiors, len(planned.ids), self.runner.pool.layout)
        return load.seconds(*self._limits)

    @cached_property
    def _limits(self) -> tuple[floors.Counts, floors.Limits]:
        counts = floors.Counts.of(self.runner.model)
        return counts, floors.measure(self.runner.pool.device, self.runner.pool.layout.dtype)

    def _drive(self) -> dict[str, list[Completion]]:
        found: dict[str, list[Completion]] = {}
        while self.engine.has_work:
            for emission in self.engine.step():
                if isinstance(emission.result, Exception):
                    raise emission.result
                found.setdefault(emission.id, []).append(emission.result)
        return found

    def _reply(self, id: str, found: Sequence[Completion]) -> Reply:
        whole = Completion.join(found)
        assert whole.report is not None, "an answer comes with its report"
        return Reply(whole.text.strip(), whole.token_ids, torch.stack(self.engine.noting.rows[id]), whole.report)


def _name(model: str) -> str:
    """A folder by its own name, without the path to it."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model

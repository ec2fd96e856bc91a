"""An engine that is driven step by step: it gives out every answer with its log probabilities, and can be told what
to answer, so that two ways of computing a prompt are compared at the very same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from hypic.checkpoints import BUNDLED, bundled, is_bundled
from hypic.config import EngineConfig
from hypic.engine import plan, primer, weights
from hypic.engine.engine import Engine
from hypic.engine.plan import Interior, Piece
from hypic.engine.runner import Runner, StepResult
from hypic.engine.sampler import Choice, Likeliest
from hypic.engine.shares import step_tokens
from hypic.engine.task import Emission, Task, Vocabulary
from hypic.engine.tokenizer import Tokenizer
from hypic.engine.work import Work
from hypic.types import CacheReport, Completion, Policy, Prompt, SamplingParams
from hypic_apps.bench import floors
from hypic_apps.eval.noting import Noted, Noting


@dataclass(frozen=True)
class Reply:
    """An answer: its text and ids (the closing one included), ``logprobs [n, V]`` before each where they were kept,
    ``divergences`` of next tokens from full recompute's, up to the first that differs, and its report."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: Tensor
    divergences: tuple[float, ...]
    report: CacheReport


@dataclass(frozen=True)
class Ask:
    """A prompt to be answered greedily.

    ``told`` are tokens that it has to say, ``full`` is the reply whose next tokens its own are held against, and
    ``keeps`` keeps its log probabilities.
    """

    prompt: Prompt
    policy: Policy
    max_tokens: int
    told: tuple[int, ...] | None = None
    full: Reply | None = None
    keeps: bool = False

    @property
    def is_compared(self) -> bool:
        return self.full is not None and self.told is None

    @property
    def again(self) -> Ask:
        """The same, made to say what full recompute says."""
        assert self.full is not None, "only what is compared is asked again"
        return replace(self, told=self.full.token_ids)

    def differs(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens are compared and not full recompute's."""
        return self.is_compared and self.full is not None and tuple(token_ids) != self.full.token_ids


class Driven(Engine):
    """See the module's docstring. ``watch`` is shown each step's work before it is settled."""

    noting: Noting
    watch_step: Callable[[Work], None] | None = None

    def choose(self, work: Work, logits: Tensor, known: Likeliest | None = None) -> Choice:
        self.noting.asked = [run.request.id for run in work.requests if run.chain.wants_logits]
        return super().choose(work, logits, known)

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
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        folder = bundled() if model is None or is_bundled(model) else weights.locate(model)
        self.name, self.folder = BUNDLED if model is None else _name(model), Path(folder)
        self.tokenizer, self.config = Tokenizer(folder), config
        self._ids = itertools.count()
        self._pieces: dict[Prompt, Sequence[Piece]] = {}
        self._behind: dict[str | None, Subject] = {None: self}
        self._drive_by(primer.load(folder, config))

    def _drive_by(self, runner: Runner) -> None:
        self.runner, tokens, config = runner, self.tokenizer, self.config
        vocabulary = Vocabulary(
            tokens.decode, tokens.eos_ids, tokens.byte_ids, tokens.special_ids, dict(tokens.generation_defaults)
        )
        most = step_tokens(config, runner.pool.device)
        self.engine = Driven(runner, vocabulary, config.max_running, most, config.store_bytes)
        self.engine.noting = self.engine.sampler = Noting()

    def behind(self, text: str | None) -> Subject:
        """The same model in the same memory, with its segments encoded behind another primer, or for ``None`` the one
        it was loaded with. The stores of all others are emptied: what they hold is of no use to it, and in its way.

        Raises:
            ConfigError: the primer cannot be encoded, or is too long.
        """
        for key, other in self._behind.items():
            if key != text:
                other.engine.store.clear()
        if text not in self._behind:  # what is kept for good takes its place once the stores have left theirs
            other = copy(self)
            other._drive_by(primer.primed(self.runner, primer.ids_of(self.folder, replace(self.config, primer=text))))
            self._behind[text] = other
        return self._behind[text]

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, experts and embeddings included."""
        return self.runner.weight_bytes // self.runner.pool.layout.dtype.itemsize

    def forget(self) -> None:
        """Empties the store, those of the same model behind other primers too."""
        for one in self._behind.values():
            one.engine.store.clear()
        self._pieces.clear()

    def pieces(self, prompt: Prompt) -> Sequence[Piece]:
        """The prompt's tokens as the engine takes them; a model without a chat template gets none."""
        if prompt not in self._pieces:
            shown = prompt
            if prompt.template and not self.tokenizer.has_chat_template:
                shown = Prompt(prompt.segments, prompt.tail, prompt.glue, template=False)
            self._pieces[prompt] = self.tokenizer.encode(shown, chat_template_kwargs={"enable_thinking": False})
        return self._pieces[prompt]

    def ask(
        self,
        prompts: Sequence[Prompt],
        policy: Policy,
        max_tokens: int,
        forced: Sequence[tuple[int, ...]] = (),
    ) -> list[Reply]:
        """Answers to prompts with their log probabilities; the first ones have to say what ``forced`` holds.

        Raises:
            HypicError: a prompt cannot be answered.
        """
        told = [*forced, *[None] * (len(prompts) - len(forced))]
        return self.answer([Ask(p, policy, max_tokens, ids, keeps=True) for p, ids in zip(prompts, told, strict=True)])

    def answer(self, asks: Sequence[Ask]) -> list[Reply]:
        """Greedy answers to prompts that run in each other's company.

        Where an answer is held against full recompute's and is another one, the same prompt is made to say full
        recompute's: the divergences of that are in the reply. Steps without rotation cannot be recorded and take as
        long for twice the rows: there both run at once.

        Raises:
            HypicError: a prompt cannot be answered.
        """
        starts = self._begin(asks)
        both = [n for n, one in enumerate(asks) if one.is_compared and not one.policy.rotate]
        said = self._run([*asks, *(asks[n].again for n in both)], starts)
        again = dict(zip(both, said[len(asks) :], strict=True))
        others = [n for n, one in enumerate(asks) if n not in again and one.differs(said[n][1].token_ids)]
        again |= zip(others, self._run([asks[n].again for n in others], starts), strict=True)
        self.engine.noting.finish()
        return [self._reply(*pair, again.get(n, pair)[0]) for n, pair in enumerate(said[: len(asks)])]

    def _run(self, asks: Sequence[Ask], starts: Mapping[int, int]) -> list[tuple[str, Completion]]:
        """Answers with their requests' names. As many as can run at a time begin together: were others to begin
        whenever one ends, hardly a step would decode alone, as recorded ones do."""
        out, most = list[tuple[str, Completion]](), self.engine.scheduler.max_running
        for first in range(0, len(asks), most):
            names = [self._add(one, starts) for one in asks[first : first + most]]
            found = self._drive()
            out += [(name, Completion.join(found[name])) for name in names]
        return out

    def _begin(self, asks: Sequence[Ask]) -> dict[int, int]:
        """Takes the log probabilities to compare with together; where each reply's begin, by its identity."""
        full = {id(one.full): one.full for one in asks if one.full is not None}
        table = torch.cat([reply.logprobs for reply in full.values()]) if full else None
        self.engine.noting.begin(table)
        ends = itertools.accumulate((len(reply.logprobs) for reply in full.values()), initial=0)
        return dict(zip(full, ends, strict=False))

    def _add(self, one: Ask, starts: Mapping[int, int]) -> str:
        name, told = f"item-{next(self._ids)}", one.told
        noted = Noted(told, one.keeps)
        if one.full is not None:
            noted.against, noted.start = one.full.token_ids, starts[id(one.full)]
        self.engine.noting.noted[name] = noted
        most = one.max_tokens if told is None else len(told)
        sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=told is not None)
        self.engine.add(Task(name, self.pieces(one.prompt), sampling, one.policy))
        return name

    def warm(self, prompt: Prompt, policy: Policy) -> int:
        """Encodes the prompt's segments into an emptied store, and leaves no snapshot of it; tokens run for that."""
        self.forget()
        segments = [piece for piece in plan.placed(self.pieces(prompt)) if piece.segment is not None]
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
        return load.seconds(*self._behind[None]._limits)  # the device's, measured once for all primers

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

    def _reply(self, name: str, whole: Completion, compared: str) -> Reply:
        """``compared`` is the request whose divergences are the answer's."""
        noted = self.engine.noting.noted
        assert whole.report is not None, "an answer comes with its report"
        rows = torch.stack(noted[name].rows) if noted[name].rows else torch.empty(0, 0)
        return Reply(whole.text.strip(), whole.token_ids, rows, tuple(noted[compared].divergences), whole.report)


def _name(model: str) -> str:
    """A folder by its own name, without the path to it."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model

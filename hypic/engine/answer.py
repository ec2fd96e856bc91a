"""The host's side of one answer: its text, how its tokens are chosen, when what happened. No memory, no steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from hypic.engine.detokenizer import Detokenizer
from hypic.engine.request import Request
from hypic.engine.sampling_state import SamplingState
from hypic.engine.task import Task, Vocabulary
from hypic.types import FinishReason


@dataclass(eq=False)
class Answer:
    """See the module's docstring; times are of ``time.perf_counter``."""

    task: Task
    request: Request
    sampling: SamplingState
    text: Detokenizer
    started_s: float
    first_token_s: float | None = None

    @classmethod
    def of(cls, task: Task, request: Request, vocabulary: Vocabulary) -> Self:
        """A new one, behind what another worker has answered already."""
        sampling = SamplingState(task.sampling, request.prompt.ids, defaults=vocabulary.defaults)
        text = Detokenizer(
            vocabulary.decode,
            task.sampling.stop,
            byte_ids=vocabulary.byte_ids,
            skipped_ids=vocabulary.special_ids,
        )
        if task.generated:
            _resume(request, sampling, text, task.generated)
        return cls(task, request, sampling, text, time.perf_counter())

    def push(self, token_id: int, vocabulary: Vocabulary) -> tuple[str, FinishReason | None]:
        """One token more: the text that is new, and why it is the last one if it is."""
        self.request.generated.append(token_id)
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        is_eos = token_id in vocabulary.eos_ids and not self.task.sampling.ignore_eos
        text = "" if is_eos else self.text.push(token_id)
        if is_eos or self.text.stopped:
            return text, "stop"
        return text, "length" if len(self.request.generated) >= self.request.max_tokens else None

    def times_s(self, now_s: float) -> Mapping[str, float]:
        """Seconds by phase, as a report has them."""
        tokenize_s = self.task.tokenize_s
        first_s = self.first_token_s if self.first_token_s is not None else now_s
        return {
            "tokenize": tokenize_s,
            "queue": (self.request.placed_s or now_s) - self.started_s,
            "ttft": tokenize_s + first_s - self.started_s,
            "total": tokenize_s + now_s - self.started_s,
        }


def _resume(request: Request, sampling: SamplingState, text: Detokenizer, generated: Sequence[int]) -> None:
    """As if these tokens had been generated here: the answer goes on behind them."""
    for token_id in generated:
        if not sampling.is_greedy:
            sampling.uniform()
        sampling.append(token_id)
        text.push(token_id)
    request.generated = list(generated)
    request.plan = request.prompt if request.prompt.policy.deterministic else request.prompt.continued(generated)

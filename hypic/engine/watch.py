"""Says once, in the log, when long prompts are hardly ever reused, and why: no miss is silent."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from hypic.types import CacheReport

NUM_PROMPTS = 20
LONG_PROMPT_TOKENS = 1000
LEAST_REUSE = 0.05

logger = logging.getLogger("hypic")


@dataclass
class ReuseWatch:
    """Looks at the first twenty prompts of over a thousand tokens that may reuse segments."""

    num_prompts: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def see(self, report: CacheReport) -> None:
        """Take note of a report; warns at the twentieth if under 5 % was reused."""
        is_counted = report.prompt_tokens > LONG_PROMPT_TOKENS and report.policy.reuse == "segments"
        if not is_counted or self.num_prompts >= NUM_PROMPTS:
            return
        self.num_prompts += 1
        self.prompt_tokens += report.prompt_tokens
        self.reused_tokens += report.reused_tokens
        self.reasons.update(_kind(segment.reason) for segment in report.segments if segment.outcome != "hit")
        if not report.segments:
            self.reasons["flat prompt: no text was passed as a segment"] += 1
        if self.num_prompts == NUM_PROMPTS and self.reused_tokens < LEAST_REUSE * self.prompt_tokens:
            self._warn()

    def _warn(self) -> None:
        share = self.reused_tokens / self.prompt_tokens
        reason = self.reasons.most_common(1)[0][0] if self.reasons else "no segment was passed twice"
        logger.warning(
            "of %d prompts with over %d tokens only %.1f %% was reused; the commonest reason: %s.",
            self.num_prompts,
            LONG_PROMPT_TOKENS,
            100 * share,
            reason,
        )


def _kind(reason: str) -> str:
    """A reason without what is particular to one segment."""
    return reason.split(" (")[0].split(":")[0]

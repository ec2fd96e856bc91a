"""How far a peer is with what it was asked to encode, by what has come of it: pure, in seconds.

A peer encodes in the order in which it was asked, in steps of so many tokens, and what a step makes leaves when it
ends, one entry after the other. So the first entry of a step shows that all of it is made and that the next step has
begun: what is still missing of it is on its way, and asking for it back would have it made twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


def num_begun(num_tokens: Sequence[int], batch_tokens: int) -> int:
    """How many of the segments that are awaited, in the order in which they were asked, a step may hold already."""
    begun, total = 0, 0
    while begun < len(num_tokens) and total < batch_tokens:
        total += num_tokens[begun]
        begun += 1
    return begun


@dataclass
class Progress:
    """Tokens by nonce: of what may not be made yet, and of what is made and has not come; ``since_s`` is when the
    present step began."""

    making: dict[int, int] = field(default_factory=dict)
    leaving: dict[int, int] = field(default_factory=dict)
    since_s: float = 0.0

    def asked(self, nonce: int, num_tokens: int, now: float) -> None:
        if not self.making:
            self.since_s = now
        self.making[nonce] = num_tokens

    def made(self, nonce: int, made_s: float, batch_tokens: int) -> None:
        """It is known of one that it was made, by then: its step is over."""
        while nonce in self.making:
            for ended in list(self.making)[: num_begun(list(self.making.values()), batch_tokens)]:
                self.leaving[ended] = self.making.pop(ended)
            self.since_s = made_s

    def came(self, nonce: int, made_s: float, batch_tokens: int) -> None:
        self.made(nonce, made_s, batch_tokens)
        self.leaving.pop(nonce, None)

    def keep(self, awaited: Collection[int]) -> None:
        """Nothing else is awaited any more."""
        for known in (self.making, self.leaving):
            for nonce in known.keys() - awaited:
                del known[nonce]

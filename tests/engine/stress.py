"""Random requests, aborts and evictions on a pool that is too small for them, compared with requests that run alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypic.engine.plan import Piece
from hypic.types import Policy
from tests.engine.answer import Answer
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg


class Stress:
    """Random requests, aborts and evictions on a pool too small for them; every step is accounted for."""

    def __init__(self, engine: Bench, roomy: Callable[[], Bench], seed: int) -> None:
        self.engine, self.roomy, self.rng = engine, roomy, random.Random(seed)
        self.alone: dict[Any, tuple[int, ...]] = {}
        self.asked: list[tuple[Any, Answer]] = []
        self.aborted: list[Answer] = []

    def prompt(self) -> tuple[Piece, ...]:
        rng = self.rng
        pieces = [live(rng.randint(1, 50), rng.randint(0, 5), ends=rng.random() < 0.5)]
        for _ in range(rng.randint(0, 4)):
            namespace = "t" if rng.random() < 0.1 else None
            pieces.append(seg(rng.choice([5, 9, 30]), rng.randint(0, 1), namespace=namespace))
            if rng.random() < 0.4:
                pieces.append(live(rng.randint(1, 40), rng.randint(0, 3), ends=rng.random() < 0.5))
        return (*pieces, live(rng.randint(1, 9), rng.randint(0, 3)))

    def policy(self) -> Policy:
        return POLICY.with_(
            seam=self.rng.choice([4, 8, 8, 8]),
            reuse=self.rng.choice([*["segments"] * 6, "prefix", "none"]),
            deterministic=self.rng.random() < 0.1,
        )

    def act(self) -> None:
        rng, running = self.rng, [a for _, a in self.asked if not a.is_over]
        if len(running) < 12 and rng.random() < 0.5:
            request = (self.prompt(), self.policy(), rng.choice([1, 3, 40]), rng.random() < 0.1)
            self.asked.append((request, self.engine.add(list(request[0]), *request[1:])))
        if running and rng.random() < 0.06:
            self.aborted.append(rng.choice(running))
            self.engine.abort(self.aborted[-1])
        if rng.random() < 0.02:
            self.engine.store.clear()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.act()
            self.engine.step()
            self.engine.assert_sound()
        while self.engine.engine.has_work:
            self.engine.step()
            self.engine.assert_sound()
        self.engine.assert_back_to_start()

    def check(self, at_most: int = 1000) -> None:
        """Everyone finished who was not aborted, with the tokens of a request that runs alone in a roomy engine."""
        stayed = [(r, a) for r, a in self.asked if not any(a is one for one in self.aborted)]
        assert all(a.pieces and a.pieces[-1].finish_reason for _, a in stayed)
        finished = [(r, a) for r, a in stayed if not r[3]]
        assert 10 <= len(finished) > len(stayed) // 2
        for request, answer in finished[-at_most:]:
            if request not in self.alone:
                self.alone[request] = tuple(self.roomy().ask(list(request[0]), *request[1:3]).ids)
            assert tuple(answer.ids) == self.alone[request]
        assert all(answer.error is None for _, answer in self.asked)

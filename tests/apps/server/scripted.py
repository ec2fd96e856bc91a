"""A scripted engine with all that a server needs; it answers at once, with a pause, or not until told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypic.config import EngineConfig
from hypic.engine.plan import Piece
from hypic.errors import HypicError
from hypic.kept import CachedEntry, Forgotten
from hypic.types import CacheReport, Completion, Policy, PromptLike, SamplingParams, Segment, SegmentReport
from tests.integrations.scripted import ScriptedEngine

STATS: Mapping[str, Any] = {
    "store": {"held_bytes": 4096, "num_entries": 3, "hits": 7, "misses": 2, "evictions": 1},
    "pool": {"num_bytes": 65536},
    "requests": {"waiting": 1, "running": 2},
}


@dataclass
class ScriptedTokenizer:
    """``prompt_end`` is what the template ends a prompt with; tools are shown if ``shows_tools``."""

    prompt_end: str = ""
    shows_tools: bool = True

    def encode(
        self,
        prompt: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        return [Piece((1, 2)), Piece((0,) if tools and self.shows_tools else (3,))]

    def decode(self, ids: Sequence[int]) -> str:
        return self.prompt_end if ids == (3,) or list(ids) == [3] else f"t{ids[0]}"


@dataclass
class ServedScript(ScriptedEngine):
    """Satisfies ``ServedEngine``. With ``held`` answers wait until ``go`` is called."""

    config: EngineConfig = EngineConfig(max_running=2)
    tokenizer: ScriptedTokenizer = field(default_factory=ScriptedTokenizer)
    held: bool = False
    fails_after: HypicError | None = None
    dead: HypicError | None = None
    warmed: list[Segment] = field(default_factory=list)
    forgotten: list[dict[str, str | None]] = field(default_factory=list)
    pinned: list[tuple[str | None, bool]] = field(default_factory=list)

    async def astream(
        self, prompt: PromptLike, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[Completion]:
        self._ask(prompt, sampling, **options)
        try:
            while self.held:
                await asyncio.sleep(0.01)
            for n, piece in enumerate(self._pieces(prompt)):
                if self.fails_after is not None and n == 1:
                    raise self.fails_after
                await asyncio.sleep(self.wait_s)
                yield piece
            self.num_finished += 1
        finally:
            self._close()

    def warm(self, segments: Sequence[Segment], *, policy: Policy | None = None) -> list[CacheReport]:
        self.warmed += segments
        return [
            CacheReport((SegmentReport(s.kind, s.name, s.source, "encoded", 9, 512, "device", "first time"),))
            for s in segments
        ]

    def forget(
        self,
        *,
        source: str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        everything: bool = False,
    ) -> Forgotten:
        self.forgotten.append({"source": source, "name": name, "namespace": namespace})
        return Forgotten(1)

    def entries(self) -> list[CachedEntry]:
        return [CachedEntry("00", "segment", "device", 40, 4096, (("a.md", None),))]

    def pin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        self.pinned.append((name, True))
        return 1

    def unpin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        self.pinned.append((name, False))
        return 1

    def stats(self) -> dict[str, Any]:
        if self.dead is not None:
            raise self.dead
        return dict(STATS)

"""No request compiles a kernel: whatever is launched for one was launched when the engine was made ready."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from hypic.config import EngineConfig
from hypic.engine.engine import Engine
from hypic.engine.kernel_choice import MIN_RUN_TOKENS
from hypic.engine.plan import Piece
from hypic.engine.rehearsal import Limits, rehearse
from hypic.engine.runner import Runner
from hypic.engine.task import Task, Vocabulary
from hypic.types import Policy, SamplingParams
from tests.checkpoints_gdn import qwen3_5_moe, ring
from tests.engine.compiling import Noted, Zeros, as_on_an_h200
from tests.engine.prompts import POLICY, live, seg

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "memory": "192MiB", "kernels": "on"}
NUM_RUNNING = 5
SPARSE: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4}
MAKERS = {
    "qwen": lambda folder: qwen3_5_moe(folder, **SPARSE, num_key_value_heads=1),
    "ring": ring,
}
WITHOUT = POLICY.with_(reuse="none")
UNTURNED = POLICY.with_(rotate=False)
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 47, 49, 63, 64, 65, 127, 128, 129, 257, 511, 513, 777, 1023, 1025)
Asked = tuple[Sequence[Piece], Policy, int]


def engine_of(folder: Path, max_context: int, step_tokens: int) -> Engine:
    """As on a GPU without recorded steps: of these, all that is launched was recorded."""
    loaded = Runner.load(folder, EngineConfig(**SETTINGS, max_running=NUM_RUNNING, max_context=max_context))
    assert loaded.geometry is not None, "kernels are on"
    if loaded.geometry.min_run_tokens is not None:
        loaded = replace(loaded, geometry=replace(loaded.geometry, min_run_tokens=MIN_RUN_TOKENS))
    vocabulary = Vocabulary(lambda ids: " " * len(ids), frozenset())
    return Engine(loaded, vocabulary, NUM_RUNNING, step_tokens, None, EngineConfig().tiers)


def make_ready(engine: Engine, step_tokens: int) -> None:
    runner = engine.runner
    assert runner.geometry is not None, "kernels are on"
    rehearse(runner.run, runner.pool, Limits.of(runner.geometry, step_tokens, NUM_RUNNING))


def prompts(max_context: int) -> Iterator[Sequence[Asked]]:
    """Batches of prompts: cold and warm, alone and beside each other, of every length around a border."""
    lengths = [n for n in LENGTHS if n + 40 < max_context]
    for number, length in enumerate(lengths):
        whole = [live(length, number)]
        second = seg(max(9, length // 3), 100 + number)
        segments = [live(5, number), seg(length, number), live(9, 1), second, live(3, 2)]
        for policy in (POLICY, UNTURNED):
            yield from ([(segments, policy, 3)] for _ in range(2) if 2 * length + 40 < max_context)
        yield [(whole, WITHOUT, 2)]
    for count in range(2, NUM_RUNNING + 1):
        for offset in range(0, len(lengths) - count, 3):
            some = lengths[offset : offset + count]
            yield [([live(n, 7 * n), seg(n, 300 + n), live(n % 11 + 1, 8)], POLICY, n % 5 + 1) for n in some
                   if 3 * n + 12 < max_context]  # fmt: skip
            yield [([live(n, 9 * n)], policy, 4) for n, policy in zip(some, (WITHOUT, UNTURNED) * 5, strict=False)]
    for count in (3, 13, 37):
        many = [live(4, 1), *(seg(9 + 5 * (i % 4), 500 + i) for i in range(count)), live(6, 3)]
        if sum(len(piece.ids) for piece in many) + 8 < max_context:
            yield from ([(many, POLICY.with_(compose=way), 2)] for way in ("transition", "addition"))
    yield [([seg(max_context // 2 - 1, 900 + i), live(2, i)], POLICY, 1) for i in range(NUM_RUNNING)]
    yield [([seg(max_context // 2 - 1, 990 + i), live(2, i)], WITHOUT, 2) for i in range(NUM_RUNNING)]


def answer(engine: Engine, asked: Sequence[Asked], batch: int) -> None:
    """All of them at once, each to its end."""
    for number, (pieces, policy, max_tokens) in enumerate(asked):
        engine.add(Task(f"{batch} {number}", list(pieces), SamplingParams(max_tokens=max_tokens), policy))
    while engine.has_work:
        for emission in engine.step():
            assert not isinstance(emission.result, Exception), emission.result


def late(engine: Engine, noted: Noted, max_context: int) -> dict[Hashable, int]:
    """What is launched for requests, and was not before; and in which batch first."""
    found: dict[Hashable, int] = {}
    known = set(noted.seen)
    for batch, asked in enumerate(prompts(max_context)):
        answer(engine, asked, batch)
        found.update(dict.fromkeys(noted.seen - known, batch))
        known |= noted.seen
    return found


@pytest.mark.parametrize(("max_context", "step_tokens"), [(2500, 2048), (1088, 3000), (400, 256)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_request_launches_what_was_launched_before(
    name: str, max_context: int, step_tokens: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noted = as_on_an_h200(monkeypatch)
    with Zeros():  # type: ignore[no-untyped-call]
        engine = engine_of(MAKERS[name](tmp_path / name), max_context, step_tokens)
        make_ready(engine, step_tokens)
        num_ready = len(noted.seen)
        found = late(engine, noted, max_context)
    assert num_ready > 30
    assert not found, "\n".join(f"in batch {batch}: {variant}" for variant, batch in found.items())


def test_a_shorter_rehearsal_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of few tokens alone leave kernels out: of runs, and of experts with many rows."""
    noted = as_on_an_h200(monkeypatch)
    with Zeros():  # type: ignore[no-untyped-call]
        engine = engine_of(MAKERS["qwen"](tmp_path / "model"), 2500, 2048)
        make_ready(engine, 64)
        found = {str(variant[0]).rpartition(".")[2] for variant in late(engine, noted, 2500)}  # type: ignore[index]
    assert {"_settle", "_scatter", "_multiply", "_heads"} <= found

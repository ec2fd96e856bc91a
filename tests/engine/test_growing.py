"""A text that only grew is encoded by continuing its old entry: as good as starting anew, and only what is new runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.batch import RowLink
from hypic.engine.chain import ZERO_SLOT
from hypic.engine.encode import Encode
from hypic.engine.plan import Piece
from hypic.engine.pool import Pool
from hypic.engine.runner import Runner
from hypic.engine.segment import CachedSegment
from hypic.types import Policy, Segment
from tests import checkpoints_gdn, checkpoints_kda, checkpoints_mamba
from tests.checkpoints import random_ids
from tests.engine.expected import FAMILIES, TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live

Make = Callable[..., Bench]
WIDE = [(name, dtype) for name in FAMILIES for dtype in TOLERANCE]
LONG = random_ids(400, 77)


def note(num_tokens: int, name: str | None = "notes.md", **labels: Any) -> Piece:
    """The first tokens of one text, under one name."""
    return Piece(tuple(LONG[:num_tokens]), Segment(f"notes of {num_tokens}", name=name, source="m", **labels))


def prompt(piece: Piece, seed: int = 5) -> list[Piece]:
    return [live(6, seed), piece, live(7, seed + 1)]


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and found
    return max(relative(found[name], expected[name]) for name in found)


def is_grown(answer: Any) -> bool:
    return answer.reasons[0].startswith("grown")


@pytest.mark.parametrize(("name", "dtype"), WIDE)
def test_a_continued_entry_is_what_a_fresh_one_is(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    for before, after in ((20, 21), (9, 60), (40, 41), (72, 200), (100, 102)):
        engine, fresh = bench(name, dtype), bench(name, dtype)
        engine.ask(prompt(note(before)))
        answer = engine.ask(prompt(note(after)))
        fresh.ask(prompt(note(after)))
        assert is_grown(answer) and f"{after - before} new tokens" in answer.reasons[0]
        assert worst(engine.contents(note(after)), fresh.contents(note(after))) < TOLERANCE[dtype]
        assert answer.error_to(checkpoints.expected(name, prompt(note(after)))) < TOLERANCE[dtype]
        # Rows of the prompt, its seam, the seam of the entry, and what is new.
        assert answer.report.computed_tokens == 13 + 8 + 8 + after - before
        assert answer.report.reused_tokens == before - 8
        assert engine.ask(prompt(note(after), 9)).outcomes == ["hit"]
        assert engine.ask(prompt(note(before), 9)).outcomes == ["hit"]
        engine.assert_back_to_start()


OTHERS: dict[str, Callable[[Path], Path]] = {
    "olmo_hybrid": checkpoints_gdn.olmo_hybrid,
    "ring": checkpoints_gdn.ring,
    "kimi_linear": lambda folder: checkpoints_kda.write(folder, "kimi_linear"),
    "bailing_hybrid": lambda folder: checkpoints_kda.write(folder, "bailing_hybrid"),
    "granite": lambda folder: checkpoints_mamba.write(folder, "granitemoehybrid"),
    "zamba": lambda folder: checkpoints_mamba.write(folder, "zamba2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_transition_and_of_attention_is_continued(name: str, tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float64", memory="64MiB", max_context=1024, max_running=2)
    loaded = Runner.load(OTHERS[name](tmp_path / "model"), config)
    engine, fresh = Bench(loaded), Bench(loaded)
    engine.ask(prompt(note(33)))
    assert is_grown(engine.ask(prompt(note(60))))
    fresh.ask(prompt(note(60)))
    assert worst(engine.contents(note(60)), fresh.contents(note(60))) < TOLERANCE["float64"]
    engine.assert_back_to_start()


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_growing_again_and_again(name: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench(name)
    lengths = [30, 31, 50, 51, 52, 53, 54, 120, 121, 260]
    answers = [engine.ask(prompt(note(length), 2 * length)) for length in lengths]
    for length, answer in zip(lengths, answers, strict=True):
        expected = checkpoints.expected(name, prompt(note(length), 2 * length))
        assert answer.error_to(expected) < TOLERANCE["float64"]
    grown = [is_grown(answer) for answer in answers]
    assert not grown[0] and sum(grown) >= 7 and not all(grown[1:]), "pages partly filled must not pile up for ever"
    for entry in engine.store:
        assert entry.is_snapshot or len(entry.pages) <= 2 * engine.pool.pages_for(entry.num_cached) + 2
    engine.assert_back_to_start()


@pytest.mark.parametrize("max_step_tokens", [64, 65, 72, 100])
def test_in_pieces_and_in_company(max_step_tokens: int, bench: Make, checkpoints: Checkpoints) -> None:
    """Budgets end before, in and behind the seam: other cold segments stand before the grown one."""
    for others in (50, 57, 60, 64):
        engine = bench("qwen", max_step_tokens=max_step_tokens)
        engine.ask(prompt(note(90)))
        cold = Piece(tuple(random_ids(others, 3)), Segment("cold"))
        pieces = [live(6, 1), cold, live(2, 4), note(350), live(3, 2)]
        answer = engine.add(pieces)
        while engine.engine.has_work:
            engine.step()
            engine.assert_sound()
        assert answer.error_to(checkpoints.expected("qwen", pieces)) < TOLERANCE["float64"]
        assert answer.reasons[1].startswith("grown")
        assert answer.report.computed_tokens == (6 + 8 + 2 + 8 + 3) + others + (8 + 260)
        engine.assert_back_to_start()


def test_two_requests_share_one_continued_entry(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen")
    engine.ask(prompt(note(40)))
    answers = [engine.add(prompt(note(60), seed)) for seed in (11, 13)]
    engine.run()
    for seed, answer in zip((11, 13), answers, strict=True):
        assert answer.error_to(checkpoints.expected("qwen", prompt(note(60), seed))) < TOLERANCE["float64"]
    assert engine.num_segments == 2
    engine.assert_back_to_start()


def test_old_and_new_in_one_prompt(bench: Make, checkpoints: Checkpoints) -> None:
    engine, pieces = bench("qwen"), [live(6, 1), note(40), live(2, 2), note(60), live(4, 3)]
    engine.ask(prompt(note(40)))
    answer = engine.ask(pieces)
    assert answer.outcomes == ["hit", "encoded"] and answer.reasons[1].startswith("grown")
    assert answer.error_to(checkpoints.expected("qwen", pieces)) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_the_old_entry_may_go_and_the_new_one_stays_whole(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen")
    engine.ask(prompt(note(40)))
    engine.ask(prompt(note(60)))
    assert engine.store.remove(engine.key(note(40)))
    engine.assert_sound()
    # Whatever takes the memory that became free must leave the shared pages alone.
    engine.ask([live(90, 1), Piece(tuple(random_ids(150, 2)), Segment("x")), live(9, 3)])
    answer = engine.ask(prompt(note(60), 9))
    assert answer.outcomes == ["hit"]
    assert answer.error_to(checkpoints.expected("qwen", prompt(note(60), 9))) < TOLERANCE["float64"]
    engine.assert_back_to_start()


@pytest.mark.parametrize(
    ("piece", "policy"),
    [
        (note(60, "other.md"), POLICY),
        (note(60, None), POLICY),
        (note(60, namespace="b"), POLICY),
        (note(60), Policy(min_segment_tokens=0, seam=16)),
        (note(60), Policy(min_segment_tokens=0, deterministic=True)),
        (note(35), POLICY),
        (Piece((*LONG[:39], 5, *LONG[40:60]), Segment("edited", name="notes.md", source="m")), POLICY),
    ],
    ids=["name", "unnamed", "namespace", "seam", "deterministic", "shorter", "edited"],
)
def test_what_did_not_only_grow_starts_from_nothing(piece: Piece, policy: Policy, bench: Make) -> None:
    engine = bench("qwen")
    engine.ask(prompt(note(40)))
    answer = engine.ask(prompt(piece), policy)
    assert answer.outcomes == ["encoded"] and not is_grown(answer)
    engine.assert_back_to_start()


def test_an_evicted_entry_is_not_continued(bench: Make) -> None:
    engine = bench("qwen")
    engine.ask(prompt(note(40)))
    engine.store.clear()
    assert not is_grown(engine.ask(prompt(note(60))))


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_broken_off_half_way(num_steps: int, bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", max_step_tokens=64)
    engine.ask(prompt(note(90)))
    answer = engine.add(prompt(note(350)))
    for _ in range(num_steps):
        engine.step()
    engine.abort(answer)
    engine.assert_sound()
    assert engine.store.stats.num_pinned == 0
    again = engine.ask(prompt(note(350)))
    assert is_grown(again) and again.error_to(checkpoints.expected("qwen", prompt(note(350)))) < TOLERANCE["float64"]
    engine.assert_back_to_start()


def test_a_full_memory_waits_and_continues_all_the_same(bench: Make, checkpoints: Checkpoints) -> None:
    """The first request holds so much that the second must wait; nothing stays pinned for it meanwhile."""
    engine = bench("qwen", sizes=(30, 9, 5))
    engine.ask(prompt(note(90)))
    first = engine.add([live(250, 1), live(3, 2)], max_tokens=3)
    second = engine.add(prompt(note(120)), max_tokens=2)
    while engine.engine.has_work:
        engine.step()
        engine.assert_sound()
    assert first.error is None and second.error is None
    expected = checkpoints.expected("qwen", prompt(note(120)), generated=second.ids[:-1])
    assert second.error_to(expected) < TOLERANCE["float64"]
    engine.assert_back_to_start()


@pytest.mark.parametrize("fault", ["no map", "no tail", "shifted pages", "no state"])
def test_growing_bites(fault: str, bench: Make, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench("qwen")
    engine.ask(prompt(note(40)))
    sound_copy, sound_known = Pool.copy_map, Encode._known
    if fault == "no map":
        monkeypatch.setattr(Pool, "copy_map", lambda self, source, target: self.clear_maps(*map(_one, target)))
    elif fault == "no tail":

        def without_tail(self: Pool, source: tuple[int, int], target: tuple[int, int]) -> None:
            sound_copy(self, source, target)
            for tails in self.tails:
                tails[target[0]] = 0

        monkeypatch.setattr(Pool, "copy_map", without_tail)
    elif fault == "shifted pages":
        base = engine.entry(note(40))
        base.kv_slots[1:] = base.kv_slots[:-1].copy()
    else:
        monkeypatch.setattr(Encode, "_known", lambda self: replace(sound_known(self), state_slot=ZERO_SLOT))
    # One new token: its tail is the old one's but for that token.
    answer = engine.ask(prompt(note(41)))
    assert is_grown(answer)
    assert answer.error_to(checkpoints.expected("qwen", prompt(note(41)))) > 100 * TOLERANCE["float64"]


def _one(slot: int) -> Tensor:
    return torch.tensor([slot])


@pytest.mark.parametrize("budget", range(1, 30))
def test_chains_of_any_budget_cover_every_new_token_once(budget: int) -> None:
    base = CachedSegment(b"a", tuple(range(20)), np.arange(100, 112), (1,), 1, 1, 0)
    entry = CachedSegment(b"b", tuple(range(45)), np.arange(100, 137), (1, 2), 2, 2, 0)
    slots = np.concatenate([np.arange(8), entry.kv_slots])
    job = Encode(entry, 8, slots, [], 3, base)
    run: list[int] = []
    known = 0
    while job.done < len(entry.ids):
        chain, reached = job.chain(budget)
        rows = [link for link in chain.links if isinstance(link, RowLink)]
        assert 0 < chain.num_tokens <= budget and len(chain.context) == reached
        assert chain.initial_slot == (3 if job.done else 0) and chain.final_slot == 3
        assert isinstance(chain.links[-1], RowLink), "a step ends with tokens that were run"
        known += len(chain.links) - len(rows)
        for row in rows:
            run += range(row.position, row.position + len(row.ids))
            assert (row.fold is None) == (row.position < 8)
            assert row.fold is None or row.fold.num_done == row.position - 8
        job.done = reached
    assert run == [*range(8), *range(20, 45)] and known == 1

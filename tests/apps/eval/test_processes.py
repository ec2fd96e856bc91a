"""Blocks answered by several processes: the same numbers as by one, whoever answers what, and what one's end says."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hypic.config import EngineConfig
from hypic.errors import WorkerLost
from hypic_apps.eval import processes
from hypic_apps.eval.items import Item
from hypic_apps.eval.measure import Plan, perform, timed, units
from hypic_apps.eval.processes import Answering, Several, answering
from hypic_apps.eval.records import Measured, records
from tests.apps.eval.conftest import SETTINGS, passage

PLAN = Plan(("full", "transition", "addition", "gold-removed"), at_once=2)


def _items(number: int) -> list[Item]:
    found = []
    for n in range(number):
        passages = tuple(passage(seed) for seed in (n + 1, n + 2, n + 3))
        found.append(Item("T", n, passages, "Who grinds rye?", ("three brothers",), (1,) if n % 2 else ()))
    return found


def _measured(who: Answering, items: list[Item]) -> Measured:
    blocks = [(unit, PLAN) for unit in units("T", items, PLAN)]
    return Measured.joined([part for _, part in sorted(who.perform(blocks), key=lambda pair: pair[0])])


def test_numbers_do_not_depend_on_how_many_processes_there_are(folder: Path) -> None:
    config, items = EngineConfig.of(**{**SETTINGS, "threads": 1}), _items(5)
    found = []
    for number in (1, 2):
        with answering(str(folder), replace(config, threads=1), number) as who:
            assert who.about.name == folder.name and who.about.device == "cpu"
            found.append(_measured(who, items))
    assert found[0] == found[1], "mark by mark, without rounding"
    assert found[0].num_items == 5 and records("tiny", found[0]) == records("tiny", found[1])
    kls = found[0].marks("gold-removed", "kl")
    assert [mark is None for mark in kls] == [True, False, True, False, True]
    assert len({mark[0] for mark in found[0].marks("transition", "kl") if mark is not None}) == 5, "items differ"


def test_blocks_are_joined_in_their_order_and_costs_added_to_the_first_items() -> None:
    one, two, costs = Measured("T", 2), Measured("T", 1), Measured("T")
    one.add("full", {"exact_match": (1.0, 1.0)}, 0)
    one.add("full", {"exact_match": (0.0, 1.0)}, 1)
    two.add("full", {"exact_match": (1.0, 1.0)}, 0)
    two.add("late", {"exact_match": (1.0, 1.0)}, 0)
    costs.add("full", {"run_share": (3.0, 4.0)}, 0)
    costs.seconds["full"] = [0.5]
    whole = Measured.joined([Measured.joined([one, two]), costs])
    assert whole.marks("full", "exact_match") == [(1.0, 1.0), (0.0, 1.0), (1.0, 1.0)]
    assert whole.marks("late", "exact_match") == [None, None, (1.0, 1.0)]
    assert whole.marks("full", "run_share") == [(3.0, 4.0), None, None] and whole.seconds == {"full": [0.5]}


def test_a_block_is_the_same_whatever_was_answered_before(folder: Path) -> None:
    with answering(str(folder), EngineConfig.of(**SETTINGS), 1) as who:
        first, second = units("T", _items(4), PLAN)
        (alone,) = [part for _, part in who.perform([(second, PLAN)])]
        (_, _), (_, behind) = who.perform([(first, PLAN), (second, PLAN)])
        costs = who.perform_alone(timed("T", _items(4), replace(PLAN, num_timed=1)), PLAN)
    assert alone == behind and costs.num_items == 0 and len(costs.seconds["full"]) == 1


class Numbers:
    """The number of a new process."""

    def get(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", []), ("auto", ["GPU 1", "1 thread"]), ("cuda", ["GPU 1", "1 thread"])]
)
def test_a_process_on_a_cpu_keeps_its_threads_beside_gpus(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(processes, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: found.append(f"GPU {number}"))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: found.append(f"{number} thread"))
    processes._settle(Numbers(), device)
    assert found == expected


@pytest.mark.parametrize(("threads", "expected"), [(None, 4), (3, 3)])
def test_processes_on_a_cpu_share_its_cores(
    threads: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with answering("nowhere", EngineConfig(device="cpu", threads=threads), 2) as who:
        assert isinstance(who, Several) and who.config.threads == expected


def test_a_process_that_ends_is_told() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(WorkerLost, match="--processes"):
        pool.submit(os._exit, 3)
        list(Several(pool, "nowhere", EngineConfig(), 1).perform(((units("T", _items(1), PLAN)[0], PLAN),)))


def test_what_is_performed_is_one_block(folder: Path) -> None:
    with answering(str(folder), EngineConfig.of(**SETTINGS), 1) as who:
        (unit,) = units("T", _items(2), PLAN)
        ((_, found),) = who.perform([(unit, PLAN)])
        assert found == perform(who.subject, unit, PLAN) and found.num_items == 2  # type: ignore[attr-defined]

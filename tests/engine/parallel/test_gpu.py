"""Entries that never leave GPUs: CUDA IPC between workers of one, NCCL between two. Float64, so tokens are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hypic.engine.parallel.liveness import Times
from hypic.engine.payload import difference
from hypic.engine.sizing import Need
from tests.checkpoints import qwen
from tests.engine.parallel.running import ENCODING, Running, cold_prompt, misbehaving, running, until

pytestmark = pytest.mark.gpu
GPU = {"device": "cuda", "kernels": "off", "graphs": False, "memory": "256MiB"}
SETUP = replace(ENCODING, planner="round-robin")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def carriers(engine: Running) -> set[str]:
    return {peer.carrier for peer in engine.workers.peers.view.peers.values()}


def compared(folder: Path, num_workers: int, carrier: str) -> None:
    prompts = [cold_prompt(seed, count=6) for seed in (1, 2, 3)]
    with running(folder, 1, **GPU) as alone:
        expected, entries = [alone.ask(prompt)[0] for prompt in prompts], alone.images()
    with running(folder, num_workers, SETUP, **GPU) as engine:
        found, images = [engine.ask(prompt)[0] for prompt in prompts], engine.images()
        assert carriers(engine) == {carrier}
        assert engine.workers.peers.counts.came >= 6 and engine.workers.peers.counts.fell_back == 0
        again = [engine.ask(prompt)[0] for prompt in prompts]
        assert engine.leaked() == Need()
    assert found == again == expected
    assert max(difference(images[key], entries[key]) for key in entries) < 1e-10


def test_two_workers_of_one_gpu_read_each_others_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    compared(qwen(tmp_path / "model"), 2, "ipc")


@needs_two
def test_two_gpus_exchange_over_nccl(tmp_path: Path) -> None:
    compared(qwen(tmp_path / "model"), 2, "nccl")


def hurried(folder: Path, carrier: str) -> None:
    """Memory is used again as soon as it is free, by the engines' streams and by those that pack, send and check: what
    is read too late or written too soon is another text's."""
    settings = {**GPU, "memory": "48MiB", "max_context": 4096}
    prompts = [cold_prompt(seed, count=8, num_tokens=120) for seed in range(100, 124)]
    with running(folder, 1, **settings) as alone:
        expected = [alone.ask(prompt)[0] for prompt in prompts]
    with running(folder, 2, SETUP, **settings) as engine:
        for _ in range(3):
            ids = [engine.submit(prompt) for prompt in prompts]
            assert [engine.answer(id, 120.0)[0] for id in ids] == expected
            assert engine.leaked() == Need() and engine.workers.peers.room.taken_bytes == 0
        counts = engine.workers.peers.counts
        assert carriers(engine) == {carrier} and counts.fell_back == 0
        assert counts.parcels < counts.came, "entries of one step came one by one"


def test_parcels_between_workers_of_one_gpu_in_a_hurry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    hurried(qwen(tmp_path / "model"), "ipc")


@needs_two
def test_parcels_between_two_gpus_in_a_hurry(tmp_path: Path) -> None:
    hurried(qwen(tmp_path / "model"), "nccl")


@needs_two
def test_a_worker_dies_on_another_gpu(tmp_path: Path) -> None:
    """Once with an entry announced whose bytes never come: the transfer that waits for them is given up."""
    folder = qwen(tmp_path / "model")
    prompts = {"kill-send": cold_prompt(11), "kill-step": cold_prompt(12)}
    with running(folder, 1, **GPU) as alone:
        expected = {fault: alone.ask(prompt)[0] for fault, prompt in prompts.items()}
    with misbehaving(folder, tmp_path, replace(SETUP, times=Times(pause_s=0.05)), **GPU) as engine:
        for fault, prompt in prompts.items():
            until(lambda: engine.workers.peers.ready() == 1)
            assert carriers(engine) == {"nccl"}
            (tmp_path / "1").write_text(fault)
            assert engine.ask(prompt)[0] == expected[fault]
            until(lambda: not (tmp_path / "1").exists())
        assert engine.leaked() == Need() and engine.workers.peers.counts.fell_back > 0


def test_entries_go_through_the_host_if_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    folder, prompt = qwen(tmp_path / "model"), cold_prompt(1)
    with running(folder, 1, **GPU) as alone:
        expected, _ = alone.ask(prompt)
    with running(folder, 2, replace(SETUP, carrier="socket"), **GPU) as engine:
        assert engine.ask(prompt)[0] == expected and carriers(engine) == {"socket"}

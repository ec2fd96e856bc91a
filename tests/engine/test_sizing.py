"""Budgets that are too small or too large: refused in one sentence, with a way out that works."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine import runner, weights
from hypic.engine.pool import AttentionShape, Layout, LinearShape, Pool
from hypic.engine.runner import Runner
from hypic.engine.sizing import MIB, context_within, enough_bytes, needed_bytes, split_of
from hypic.errors import ConfigError
from tests.checkpoints import qwen

SMALL = EngineConfig(device="cpu", dtype="float32", load_format="dummy", max_running=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen(tmp_path_factory.mktemp("sizing"), max_position_embeddings=2**20)


def layout(key_dim: int, num_layers: int) -> Layout:
    linear = LinearShape(4, key_dim, key_dim, "dense")
    return Layout((linear,) * 3 * num_layers, (AttentionShape(2, 32, 32),) * num_layers, torch.float32, torch.float32)


# -- too small -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 6), st.integers(0, 2**24), st.integers(1, 64), st.sampled_from([1, 16, 64]))
def test_the_budget_that_is_named_works_and_so_do_all_above_it(
    key_dim: int, num_layers: int, budget: int, max_running: int, page_size: int
) -> None:
    kept, longest = layout(key_dim, num_layers), 2**18
    config = EngineConfig(memory=budget, max_running=max_running, page_size=page_size)
    enough = enough_bytes(kept, longest, budget, config)
    for more in (0, 1, kept.token_bytes, 2 * page_size * kept.token_bytes + 1, MIB, 10 * MIB):
        context, need = split_of(kept, longest, enough + more, config)
        assert need.pages * page_size >= context
    # Close to the least: no budget works that is smaller by more than its rounding.
    slack = 2 * (2 * page_size * kept.token_bytes + MIB) + 2 * kept.token_bytes
    less = max(budget, enough - slack)
    if less < enough - slack + 1:
        context = context_within(config, longest, less, kept.token_bytes)
        assert needed_bytes(kept, page_size, context, max_running) > less


def test_what_the_message_names_starts_an_engine(folder: Path) -> None:
    """The context grows with the memory: what the first context takes would not be enough."""
    config = replace(SMALL, memory=200_000, max_running=64)
    with pytest.raises(ConfigError, match="too small for 64 running states") as caught:
        Runner.load(folder, config)
    named = str(caught.value).split("memory='")[1].split("'")[0]
    made = Runner.load(folder, replace(config, memory=named))
    assert made.pool.num_states >= 64
    kept = made.pool.layout
    first = needed_bytes(kept, 16, context_within(config, 2**20, 200_000, kept.token_bytes), 64)
    with pytest.raises(ConfigError):  # the control: what the context of the small budget takes
        Runner.load(folder, replace(config, memory=first))


# -- too large -------------------------------------------------------------------------------------------------------


def test_more_than_there_is_is_refused_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "materialise", None)
    with pytest.raises(ConfigError) as caught:
        Runner.load(folder, replace(SMALL, memory="9999GiB"))
    said = str(caught.value)
    assert "'9999GiB'" in said and "free on cpu" in said and "memory=0.5" in said and "\n" not in said
    free = int(said.split("beside the weights ")[1].split(" ")[0])
    assert 0 < free < 9999 * 2**30
    monkeypatch.undo()
    assert Runner.load(folder, replace(SMALL, memory="16MiB")).pool.num_bytes <= 16 * MIB


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize(("memory", "free", "is_refused"), [(1000, 999, True), (1000, 1000, False), (0.9, -5, False)])
def test_what_is_refused(device: str, memory: float, free: int, is_refused: bool) -> None:
    config = EngineConfig(memory=memory)
    if not is_refused:
        return runner.refuse_too_much(config, torch.device(device), free)
    with pytest.raises(ConfigError, match=f"memory is 1000, 1000 bytes.* 999 bytes are free on {device};"):
        runner.refuse_too_much(config, torch.device(device), free)


def test_memory_that_others_took_meanwhile_is_one_sentence_and_all_is_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[weakref.ref[Tensor]] = []
    sound = Pool._empty

    def scarce(self: Pool, *shape: Any) -> Tensor:
        if len(taken) == 3:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        made = sound(self, *shape)
        taken.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Pool, "_empty", scarce)
    with pytest.raises(ConfigError, match="memory is '16MiB', 16777216 bytes.*are free on cpu") as caught:
        Runner.load(folder, replace(SMALL, memory="16MiB"))
    assert "enforce" not in str(caught.value)
    assert len(taken) == 3 and not any(made() is not None for made in taken), "while the error is still held"


@pytest.mark.gpu
def test_a_gpu_refuses_more_than_it_has_and_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process's memory: others may use the same GPU meanwhile."""
    config = replace(SMALL, device="cuda", memory="9999GiB", graphs=False)
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved()
    with pytest.raises(ConfigError, match="free on cuda"):
        Runner.load(folder, config)
    monkeypatch.setattr(runner, "refuse_too_much", lambda *_: None)
    with pytest.raises(ConfigError, match="free on cuda"):
        Runner.load(folder, config)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= taken + 64 * MIB

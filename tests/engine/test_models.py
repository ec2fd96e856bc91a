"""Whole models through the engine against transformers on the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from hypic.types import Policy
from tests.checkpoints import exact_oracle_logits, minimax, oracle, oracle_logits, qwen, random_ids
from tests.engine.expected import Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, live
from tests.reference import Reference

Make = Callable[[Path], Path]
BF16 = torch.bfloat16
MODELS: dict[str, Make] = {
    "qwen": qwen,
    "qwen-tied": lambda f: qwen(f, tie_word_embeddings=True),
    "qwen-wrapper": lambda f: qwen(f, wrapper=True),
    "qwen-wrapper-tied": lambda f: qwen(f, wrapper=True, tie_word_embeddings=True),
    "qwen-deep-bf16": lambda f: qwen(f, num_hidden_layers=6, full_attention_interval=3, dtype=BF16, num_shards=3),
    "qwen-wide": lambda f: qwen(f, hidden_size=64, head_dim=16, linear_num_value_heads=6, linear_value_head_dim=20),
    "qwen-conv-2": lambda f: qwen(f, linear_conv_kernel_dim=2),
    "minimax": minimax,
    "minimax-tied": lambda f: minimax(f, tie_word_embeddings=True),
    "minimax-bf16": lambda f: minimax(f, dtype=BF16, num_hidden_layers=5, num_shards=2),
    "minimax-partial": lambda f: minimax(f, rotary_dim=8),
}
IDS = random_ids(150)
FULL = Policy(reuse="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


def engine_on(folder: Path, dtype: str, device: str = "cpu") -> Bench:
    config = EngineConfig(device=device, dtype=dtype, memory="16MiB", max_context=1024, max_running=4)
    return Bench(Runner.load(folder, config))


def logits_of(engine: Bench, ids: list[int]) -> Tensor:
    piece = live(1, 0)
    return engine.ask([type(piece)(tuple(ids))], FULL).rows()


@pytest.mark.parametrize("name", MODELS)
def test_full_recompute_equals_transformers(name: str, folder: Callable[[str], Path]) -> None:
    found = logits_of(engine_on(folder(name), "float64"), IDS)
    if name == "minimax-partial":
        assert relative(found, Reference(folder(name)).full(IDS).logits) < 1e-10
        assert relative(found, oracle_logits(folder(name), IDS)) > 1e-3, "transformers ignores rotary_dim"
        return
    assert relative(found, exact_oracle_logits(folder(name), IDS)) < 1e-10
    assert relative(found, oracle_logits(folder(name), IDS)) < 1e-5
    single = logits_of(engine_on(folder(name), "float32"), IDS)
    assert relative(single, oracle_logits(folder(name), IDS, torch.float32)) < 1e-4


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_long_prompts_equal_transformers(name: str, folder: Callable[[str], Path]) -> None:
    ids = random_ids(700, 3)
    assert relative(logits_of(engine_on(folder(name), "float64"), ids), oracle_logits(folder(name), ids)) < 1e-5


@pytest.mark.parametrize("name", ["qwen", "qwen-wrapper", "minimax"])
def test_greedy_answers_are_those_of_transformers(name: str, folder: Callable[[str], Path]) -> None:
    answer = engine_on(folder(name), "float64").ask([live(40, 5)], FULL, max_tokens=24)
    ids = torch.tensor([random_ids(40, 5)])
    model = oracle(folder(name))
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))
    assert answer.ids == expected[0, 40:].tolist()


@pytest.mark.parametrize("name", ["qwen", "minimax", "minimax-partial"])
def test_bf16_on_a_cpu_stays_near_the_reference(name: str, folder: Callable[[str], Path]) -> None:
    """At most twice as far from float64 as transformers is in the same type; here on a CPU, below on a GPU."""
    _check_bf16(folder(name), "cpu", partial=name == "minimax-partial")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen", "minimax", "minimax-partial"])
def test_bf16_on_a_gpu_stays_near_the_reference(name: str, folder: Callable[[str], Path]) -> None:
    _check_bf16(folder(name), "cuda", partial=name == "minimax-partial")


def _check_bf16(folder: Path, device: str, *, partial: bool) -> None:
    ids = random_ids(300, 4)
    exact = Reference(folder).full(ids).logits
    found = logits_of(engine_on(folder, "bfloat16", device), ids).cpu()
    ours = _mean_error(found, exact)
    if partial:
        assert ours < 0.05
        return
    model = oracle(folder, BF16).to(device)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0].cpu()
    assert 0 < ours <= 2 * _mean_error(theirs, exact)


def _mean_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen", "minimax", "minimax-partial"])
def test_a_gpu_computes_what_the_reference_does(name: str, folder: Callable[[str], Path]) -> None:
    for dtype, limit in (("float64", 1e-10), ("float32", 1e-3)):
        engine = engine_on(folder(name), dtype, "cuda")
        for _ in ("cold", "warm"):
            answer = engine.ask(few_segments(), POLICY, max_tokens=3)
            checkpoints = Checkpoints(lambda _: folder(name))
            checkpoints._folders[name] = folder(name)
            expected = checkpoints.expected(name, few_segments(), generated=answer.ids[:-1])
            rows = answer.rows().cpu()
            assert relative(rows, expected.logits) < limit
        engine.assert_back_to_start()

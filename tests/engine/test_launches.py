"""How many kernels a layer takes in cold, warm and decode steps, by family: the bound is what there are now, so that no
operator of torch creeps in between the fused ones."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from hypic.config import EngineConfig
from hypic.engine.layers import norm
from hypic.engine.layers.attention import Attention
from hypic.engine.runner import Runner
from tests.engine.harness import Bench
from tests.engine.launches import Launches, as_on_a_gpu
from tests.engine.models.every_model import BUILDERS
from tests.engine.prompts import few_segments, live, seg

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB", "max_context": 4096}
# Of a layer: the mixer's part of a warm step, of a decode step, and what feeds forward.
MIXERS = {
    "GroupedLightningAttention": (7, 4),
    "LightningAttention": (7, 4),
    "GatedDeltaNet": (8, 5),
    "Attention": (9, 9),
}
FEEDS = {"SwiGLU": 3, "MoE": 8, "SoftmaxMoE": 6}
NORMS_AND_SUMS = 3
GATE = 2
# Of a linear layer in a step that encodes: more than in a warm step, which scans alone.
RUNS = 6
# Of attention: long chains are run against their own rows, beside pages.
DENSE = 3
# The last layer picks the rows whose logits are wanted, and asks for queries and keys apart.
LAST = 4


def counted(name: str, patch: pytest.MonkeyPatch, folder: Any) -> tuple[Runner, list[list[Counter[str]]]]:
    """Launches of every layer in every step of an answer whose segments are cached: a warm step, then decode steps."""
    loaded = Runner.load(BUILDERS[name](folder / name), EngineConfig(**SETTINGS, max_running=4, kernels="on"))
    bench, launches = Bench(loaded, kernels="on"), Launches()
    bench.ask(few_segments(), max_tokens=2)
    as_on_a_gpu(patch, launches)
    found: list[list[Counter[str]]] = [[] for _ in layers_of(loaded)]
    with ExitStack() as stack:
        for layer, own in zip(layers_of(loaded), found, strict=True):
            stack.enter_context(launches.of(layer, own))
        stack.enter_context(launches)
        bench.ask(few_segments(), max_tokens=3)
    return loaded, found


def layers_of(loaded: Runner) -> Any:
    return loaded.model.layers  # type: ignore[attr-defined]


def bound(layer: Any, is_decode: bool, is_last: bool) -> int:
    mixer, feed = MIXERS[type(layer.mixer).__name__][is_decode], FEEDS[type(layer.mlp).__name__]
    if isinstance(layer.mixer, Attention) and layer.mixer.shape.gated:
        mixer += GATE
    return mixer + feed + NORMS_AND_SUMS + (LAST if is_last else 0)


@pytest.mark.parametrize("name", ["bailing_moe_linear", "qwen3_5_moe_text", "qwen3_5_text"])
def test_no_layer_launches_more_than_its_fused_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    loaded, found = counted(name, monkeypatch, tmp_path)
    for number, (layer, steps) in enumerate(zip(layers_of(loaded), found, strict=True)):
        is_last = number == len(found) - 1
        warm, decode = sum(steps[0].values()), sum(steps[-1].values())
        assert 0 < warm <= bound(layer, False, is_last), f"layer {number}: {dict(steps[0])}"
        assert 0 < decode <= bound(layer, True, is_last), f"layer {number}: {dict(steps[-1])}"


def test_a_cold_step_launches_a_warm_one_and_what_runs_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """However many segments are encoded in it."""
    loaded = Runner.load(BUILDERS["qwen3_5_moe_text"](tmp_path / "model"), EngineConfig(**SETTINGS, kernels="on"))
    bench, launches = Bench(loaded, kernels="on"), Launches()
    as_on_a_gpu(monkeypatch, launches)
    for num_segments in (1, 3):
        found: list[list[Counter[str]]] = [[] for _ in layers_of(loaded)]
        with ExitStack() as stack:
            for layer, own in zip(layers_of(loaded), found, strict=True):
                stack.enter_context(launches.of(layer, own))
            stack.enter_context(launches)
            bench.ask([*(seg(520, num_segments * 10 + n) for n in range(num_segments)), live(70, 2)], max_tokens=1)
        for number, (layer, steps) in enumerate(zip(layers_of(loaded), found, strict=True)):
            more = DENSE if isinstance(layer.mixer, Attention) else RUNS
            most = bound(layer, False, number == len(found) - 1) + more
            assert 0 < sum(steps[0].values()) <= most, f"layer {number}: {dict(steps[0])}"


def test_the_count_sees_plain_operators(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without the fused norms there are more, and the bound is passed."""
    patched = as_on_a_gpu

    def without_norms(patch: pytest.MonkeyPatch, launches: Launches) -> None:
        patched(patch, launches)
        patch.setattr(norm, "by_kernel", lambda x: False)

    monkeypatch.setattr("tests.engine.test_launches.as_on_a_gpu", without_norms)
    loaded, found = counted("bailing_moe_linear", monkeypatch, tmp_path)
    excess = [
        sum(steps[0].values()) - bound(layer, False, False)
        for layer, steps in zip(layers_of(loaded), found, strict=True)
    ]
    assert min(excess) > 0


def test_views_are_no_launches() -> None:
    launches, x = Launches(), torch.ones(4, 6)
    with launches:
        x.view(2, 12).transpose(0, 1)[1:].chunk(2)
        torch.empty(3)
        assert not launches.counts
        x + x
    assert launches.counts == {"add": 1}

"""How files of every model type are read: shards, experts one by one or together, what is too much; dummy weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from hypic.errors import CheckpointError
from tests.engine.harness import Bench
from tests.engine.models.every_model import NAMES, OWN, STATELESS, Every
from tests.engine.prompts import live, seg

Tensors = dict[str, Tensor]
CONFIG = EngineConfig(device="cpu", dtype="float64", memory="16MiB", max_context=256, max_running=2)
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
PROMPT = [live(3, 1), seg(20, 2), live(9, 3)]


def changed(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A checkpoint's copy with other tensors."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    return target


def answered(folder: Path, config: EngineConfig = CONFIG) -> Tensor:
    return Bench(Runner.load(folder, config), sizes=(40, 12, 6), max_context=256).ask(PROMPT).rows()


def fused(tensors: Tensors) -> Tensors:
    """Experts of a layer in one tensor, as transformers computes with them: gate and up one above the other."""
    found = {name: match for name in tensors if (match := EXPERT.fullmatch(name))}
    rest = {name: tensor for name, tensor in tensors.items() if name not in found}
    for stem in sorted({match[1] for match in found.values()}):
        parts = _stacked(tensors, {name: match for name, match in found.items() if match[1] == stem})
        if "gate_proj" in parts:
            parts["gate_up_proj"] = torch.cat([parts.pop("gate_proj"), parts.pop("up_proj")], dim=1)
        rest |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    return rest


def _stacked(tensors: Tensors, found: Mapping[str, re.Match[str]]) -> Tensors:
    parts: dict[str, dict[int, Tensor]] = {}
    for name, match in found.items():
        parts.setdefault(PARTS.get(match[3], match[3]), {})[int(match[2])] = tensors[name]
    return {part: torch.stack([single[e] for e in range(len(single))]) for part, single in parts.items()}


def swapped(tensors: Tensors) -> Tensors:
    """Two experts of every layer in each other's place."""
    swap = {"0": "1", "1": "0"}

    def other(name: str) -> str:
        match = EXPERT.fullmatch(name)
        return name if match is None else f"{match[1]}.{swap.get(match[2], match[2])}.{match[3]}.weight"

    return {other(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_experts_together_and_one_by_one_are_the_same_model(name: str, models: Every, tmp_path: Path) -> None:
    source = models.folder(name)
    singles = any(EXPERT.fullmatch(tensor) for tensor in load_file(source / "model.safetensors"))
    model: Any = models.runner(name, "float64").model
    has_experts = any(".experts" in part for part, _ in model.named_modules())
    assert singles == (has_experts and name != "granitemoehybrid"), "Granite's files have them together"
    if singles:
        found, expected = answered(changed(source, tmp_path / "fused", fused)), answered(source)
        assert torch.equal(found, expected)
        assert not torch.equal(answered(changed(source, tmp_path / "swapped", swapped)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_the_same_model(name: str, models: Every, tmp_path: Path) -> None:
    source = models.folder(name)
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    shards = [dict(list(tensors.items())[part::3]) for part in range(3)]
    for number, shard in enumerate(shards):
        save_file(shard, tmp_path / f"part-{number}.safetensors", metadata={"format": "pt"})
    where = {tensor: f"part-{number}.safetensors" for number, shard in enumerate(shards) for tensor in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(answered(tmp_path), answered(source))
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks part-1"):
        answered(tmp_path)


@pytest.mark.parametrize("extra", ["model.layers.0.surprise.weight", "surprise.weight", "model.layers.99.mlp.x.weight"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_nobody_asked_for_is_an_error(name: str, extra: str, models: Every, tmp_path: Path) -> None:
    folder = changed(models.folder(name), tmp_path / "more", lambda found: found | {extra: torch.ones(2, 2)})
    if "99" in extra and name in ("kimi_linear", "bailing_hybrid"):
        assert torch.equal(answered(folder), answered(models.folder(name))), "a layer that predicts more tokens"
        return
    with pytest.raises(CheckpointError, match=re.escape(extra)):
        answered(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_missing_is_an_error(name: str, models: Every, tmp_path: Path) -> None:
    def without_one(tensors: Tensors) -> Tensors:
        gone = next(tensor for tensor in sorted(tensors) if "layers.1." in tensor and tensor.endswith("weight"))
        return {tensor: values for tensor, values in tensors.items() if tensor != gone}

    with pytest.raises(CheckpointError, match="lacks '"):
        answered(changed(models.folder(name), tmp_path / "less", without_one))


@pytest.mark.parametrize("name", NAMES)
def test_dummy_weights_need_a_configuration_alone(name: str, models: Every, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models.folder(name) / "config.json").read_bytes())
    dummy = EngineConfig(**vars(CONFIG) | {"load_format": "dummy"})
    runner = Runner.load(tmp_path, dummy)
    assert bool(answered(tmp_path, dummy).isfinite().all())
    lives = half_lives(runner.model)
    if name in (*STATELESS, *CONSTANT):
        return
    assert len(lives) >= 8 and min(lives) > 15.9 and max(lives) < 16_400, "log-uniform over 16 to 16,384 tokens"
    assert max(lives) > 4 * min(lives)


def half_lives(model: Any) -> list[float]:
    """Tokens after which half of a state is left, of every head and channel, by the gates of a token of zeros."""
    found: list[float] = []
    for mixer in model.mixers():
        if not hasattr(mixer, "family"):
            continue
        with torch.no_grad():
            width = next(p.shape[-1] for n, p in mixer.named_parameters() if n.split(".")[0] in IN)
            gates = mixer.inputs(mixer.project(torch.zeros(1, width, dtype=torch.float64))).g
        found += [math.log(0.5) / gate for gate in gates.flatten().tolist() if gate]
    return found


# Layers whose decays are constants of the configuration.
CONSTANT = ("minimax", *OWN)
IN = ("in_proj", "in_proj_qkv", "qkv_proj", "query_key_value")

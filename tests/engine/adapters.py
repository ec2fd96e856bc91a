"""LoRA adapters as files, and the same change written into a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from tests.checkpoints_gdn import rewrite
from tests.engine.harness import Bench
from tests.engine.prompts import live

L = "model.layers."
RANK, ALPHA = 3, 12.0


def matrices(shapes: Mapping[str, torch.Size], seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        module: (
            torch.randn(RANK, shape[1], generator=generator) * 0.2,
            torch.randn(shape[0], RANK, generator=generator) * 0.2,
        )
        for module, shape in shapes.items()
    }


def write(folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], **settings: Any) -> Path:
    """An adapter as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    tensors = {f"base_model.model.{m}.lora_{side}.weight": t for m, ab in pairs.items() for side, t in zip("AB", ab)}  # noqa: B905
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def for_modules(checkpoint: Path, folder: Path, modules: list[str], seed: int = 0, **settings: Any) -> Path:
    weights = load_file(checkpoint / "model.safetensors")
    return write(folder, matrices({m: weights[f"{m}.weight"].shape for m in modules}, seed), **settings)


def baked(checkpoint: Path, adapter: Path, scale: float = ALPHA / RANK) -> Path:
    """The adapter written into the checkpoint's own tensors."""
    parts = load_file(adapter / "adapter_model.safetensors")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in parts:
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b, a = parts[name.replace("lora_A", "lora_B")].double(), parts[name].double()
                tensors[f"{module}.weight"] = tensors[f"{module}.weight"].double() + scale * b @ a
        return tensors

    return rewrite(checkpoint, change)


def load(folder: Path, adapter: Path | None = None, dtype: str = "float64", **settings: Any) -> Runner:
    name = None if adapter is None else str(adapter)
    config = EngineConfig(device="cpu", dtype=dtype, memory="64MiB", max_context=1024, max_running=4, adapter=name)
    return Runner.load(folder, config)


def answer(runner: Runner) -> Tensor:
    return Bench(runner, max_context=1024).ask([live(40, 1)]).rows()

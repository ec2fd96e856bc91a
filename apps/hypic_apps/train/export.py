"""Writes the trained model as a Hugging Face checkpoint: bf16 safetensors in shards, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypic_apps.train.architecture import Architecture
from hypic_apps.train.families import shape_of
from hypic_apps.train.model import Trainee

SHARD_BYTES = 16_000_000
BUDGET_BYTES = 24_000_000


def export(model: Trainee, tokenizer: Path | None, folder: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Writes the checkpoint folder, with the files of the ``tokenizer`` folder if given; returns the weights' bytes.

    Raises:
        ValueError: the weights are larger than the 24e6 bytes that may be bundled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in model.checkpoint().items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if dtype == torch.bfloat16 and size > BUDGET_BYTES:
        raise ValueError(
            f"the weights take {size} bytes and at most {BUDGET_BYTES} are bundled; choose a smaller shape."
        )
    _write_shards(tensors, size, folder)
    config = model.shape.config() | {"dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": 0, "pad_token_id": 0})
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, folder / name)
    return size


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of an exported folder, by their names in it."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def load(folder: Path) -> Trainee:
    """An exported model, its weights in float32.

    Raises:
        FileNotFoundError: the folder holds no ``config.json``.
        ValueError: its model type is not one that is trained here.
    """
    model = Trainee(_shape(folder))
    model.restore(tensors_of(folder))
    return model


def _shape(folder: Path) -> Architecture:
    return shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def average(first: Path, second: Path, share: float, out: Path) -> int:
    """Exports weights of which ``share`` come from the second folder, and the rest, the configuration and the tokenizer
    from the first; returns their bytes. Mean weights of trainings that went on from one another often answer unseen
    wordings better (model soups, arXiv 2203.05482).

    Raises:
        ValueError: a folder holds no exported model, the two hold different ones, or ``out`` is one of them.
    """
    _check_averaged(first, second, out)
    model, own, others = Trainee(_shape(first)), tensors_of(first), tensors_of(second)
    if _shape(second) != model.shape or {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in others.items()}:
        raise ValueError(f"{first} and {second} hold different models; average two of one shape.")
    model.restore({name: torch.lerp(own[name].float(), others[name].float(), share) for name in own})
    size = export(model, first if (first / "tokenizer.json").is_file() else None, out)
    told = first / "evaluation.json"
    if told.is_file():
        found = json.loads(told.read_text(encoding="utf-8"))
        _write_json(out / told.name, {**found, "averaged": {"share_of_another": share, "exams": "of the first alone"}})
    return size


def _check_averaged(first: Path, second: Path, out: Path) -> None:
    for folder in (first, second):
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise ValueError(f"{str(folder)!r} holds no exported model; name a folder with config.json and weights.")
        if out.resolve() == folder.resolve():
            raise ValueError(f"{str(out)!r} is one of the two that are averaged; name another folder with --out.")


def _write_shards(tensors: dict[str, Tensor], size: int, folder: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

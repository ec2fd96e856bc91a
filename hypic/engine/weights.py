"""Checkpoints: streamed safetensors, shard by shard, into a model's parameters, with exact checks of names and shapes.

A model says where a checkpoint's tensor belongs (``map_weights``); this file reads, checks, copies and hashes. It knows
no architecture.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hypic.errors import CheckpointError

Index = tuple[int | slice, ...]
KEPT_WIDE = ("A_log", "dt_bias")


@dataclass(frozen=True)
class Placement:
    """A checkpoint tensor belongs to ``parameter[index]``."""

    parameter: str
    index: Index = ()


class Mapped(Protocol):
    """A model that knows its checkpoint's names: ``None`` means a tensor that is not needed."""

    def map_weights(self, name: str) -> Placement | None: ...


def locate(model: str) -> Path:
    """The folder of a checkpoint: a path, or a repository in the local Hugging Face cache or on the Hub.

    Raises:
        CheckpointError: it is neither a folder nor a repository that can be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"{model!r} is no folder; pass a checkpoint's folder or the name of a repository, org/name."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{model!r} is no folder and cannot be had from the Hub ({reason}); check name and network."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as it is.

    Raises:
        CheckpointError: the folder or file is missing, or is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no config.json; pass the folder of a Hugging Face checkpoint.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download the checkpoint again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object; download the checkpoint again.")
    return config


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index or by listing.

    Raises:
        CheckpointError: there is none, or the index names a file that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {missing[0]}, which its index names; finish the download.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; convert the checkpoint or finish the download.")
    return files


def stream(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one in memory at a time.

    Raises:
        CheckpointError: a file is not readable as safetensors.
    """
    from safetensors import SafetensorError, safe_open

    for path in shards(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); download it again.") from error


def materialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model built on ``meta`` empty parameters of ``dtype`` on ``device``; tied parameters stay tied."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            kind = wide if name in KEPT_WIDE else dtype
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=kind, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            setattr(module, name, made[id(parameter)])


@dataclass
class _Loading:
    """Copies tensors into place, and keeps count of what is still empty."""

    parameters: Mapping[str, nn.Parameter]
    filled: dict[str, int] = field(default_factory=dict)

    def place(self, name: str, tensor: Tensor, where: Placement) -> None:
        parameter = self.parameters.get(where.parameter)
        if parameter is None:
            raise CheckpointError(
                f"tensor {name!r} has no place in this model; its config.json does not fit its weights."
            )
        target = parameter.data[where.index] if where.index else parameter.data
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensor.shape)} where the configuration asks for "
                f"{list(target.shape)}; config.json and weights are of different models."
            )
        target.copy_(tensor)
        self.filled[where.parameter] = self.filled.get(where.parameter, 0) + math.prod(tensor.shape)

    def check(self) -> None:
        short = [n for n, p in self.parameters.items() if self.filled.get(n, 0) != p.numel()]
        if short:
            more = f" and {len(short) - 1} more" if len(short) > 1 else ""
            raise CheckpointError(f"the checkpoint lacks {short[0]!r}{more}; finish the download or fix config.json.")


def _digest(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{list(tensor.shape)}".encode())
    digest.update(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data if tensor.numel() else b"")
    return digest.digest()


def load(model: nn.Module, mapped: Mapped, folder: Path, config: Mapping[str, Any]) -> str:
    """Fill every parameter from a checkpoint folder; returns the fingerprint of configuration and weights.

    Raises:
        CheckpointError: a tensor is missing, unknown, mis-shaped or unreadable.
    """
    loading = _Loading(dict(model.named_parameters()))
    digests: dict[str, Future[bytes]] = {}
    with ThreadPoolExecutor(4) as threads:
        for name, tensor in stream(folder):
            where = mapped.map_weights(name)
            if where is not None:
                digests[name] = threads.submit(_digest, name, tensor)
                loading.place(name, tensor, where)
        loading.check()
        return fingerprint(config, [digests[name].result() for name in sorted(digests)])


def fingerprint(config: Mapping[str, Any], parts: Sequence[bytes]) -> str:
    """SHA-256 over the configuration and the weights' digests, as hexadecimal text."""
    relevant = {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path", "dtype")}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def fill_dummy(model: nn.Module, seed: int, config: Mapping[str, Any]) -> str:
    """Random weights of a trained model's scale, with half-lives spread log-uniformly over 16 to 16,384 tokens."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last == "A_log":
            half_lives = 16.0 * 1024.0 ** torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            # softplus(0) = ln 2 per token, so exp(A_log) * ln 2 = ln 2 / half-life
            parameter.data.copy_(-half_lives.log())
        elif last == "dt_bias":
            parameter.data.zero_()
        elif parameter.ndim == 1:
            parameter.data.fill_(0.0 if _is_centred(model, name) else 1.0)
        else:
            fan_in = math.prod(parameter.shape[1:])
            values = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
            parameter.data.copy_(values)
    return fingerprint(config, [b"dummy", str(seed).encode()])


def _is_centred(model: nn.Module, name: str) -> bool:
    return bool(getattr(model.get_submodule(name.rpartition(".")[0]), "zero_centred", False))

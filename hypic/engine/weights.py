"""Checkpoints: streamed safetensors, shard by shard, into a model's parameters, with exact checks of names and shapes.

A model says where a checkpoint's tensor belongs (``map_weights``); this file reads, checks, copies and hashes. It knows
no architecture.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hypic.engine import fingerprint
from hypic.errors import CheckpointError, UnsupportedModel

Index = tuple[int | slice, ...]
# A text of the checkpoint's own behind which segments are encoded (``primer.py``).
PRIMER_FILE = "primer.txt"
KEPT_WIDE = ("A_log", "dt_bias", "expert_bias")


@dataclass(frozen=True)
class Placement:
    """The rows ``rows`` of a checkpoint's tensor (all, unless given) belong to ``parameter[index]``.

    ``index`` may be a function of the number of rows, where files disagree on how a parameter was cut.
    """

    parameter: str
    index: Index | Callable[[int], Index] = ()
    rows: slice | Sequence[int] | None = None

    def taken(self, tensor: Tensor) -> Tensor:
        """What is taken of the tensor; fewer rows than asked for if it has no more."""
        if self.rows is None or isinstance(self.rows, slice):
            return tensor if self.rows is None else tensor[self.rows]
        return tensor[[row for row in self.rows if row < len(tensor)]]

    def target(self, parameter: Tensor, taken: Tensor) -> Tensor:
        """The part of the parameter, a view, where that belongs."""
        index = self.index(len(taken)) if callable(self.index) else self.index
        return parameter[index] if index else parameter


Placements = Placement | Sequence[Placement] | None


def each(where: Placements) -> Sequence[Placement]:
    """A tensor's places; none where it is not needed."""
    if where is None:
        return ()
    return (where,) if isinstance(where, Placement) else where


class Mapped(Protocol):
    """A model that knows its checkpoint's names: ``None`` means a tensor that is not needed."""

    def map_weights(self, name: str) -> Placements: ...


def locate(model: str) -> Path:
    """The folder of a checkpoint: a path, or a repository in the local Hugging Face cache or on the Hub.

    Raises:
        CheckpointError: it is neither a folder nor a repository that can be had.
    """
    if not isinstance(model, str) or not model.strip():
        raise CheckpointError(f"the model's name is {model!r}; pass a checkpoint's folder or leave it out.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"{model!r} is no folder; pass a checkpoint's folder or the name of a repository, org/name."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", PRIMER_FILE]
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
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); download the checkpoint again.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}); download the checkpoint again.") from error
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
        names = _indexed(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {missing[0]}, which its index names; finish the download.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; convert the checkpoint or finish the download.")
    return files


def _indexed(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}); download it again.") from error


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

    def place(self, name: str, tensor: Tensor, places: Sequence[Placement]) -> None:
        _refuse_quantised(name, tensor)
        placed = sum(self._copy(name, tensor, where) for where in places)
        if placed != tensor.numel():
            raise _misfit(name, tensor, f"{placed} numbers")

    def _copy(self, name: str, tensor: Tensor, where: Placement) -> int:
        parameter = self.parameters.get(where.parameter)
        if parameter is None:
            raise CheckpointError(
                f"tensor {name!r} has no place in this model; its config.json does not fit its weights."
            )
        taken = where.taken(tensor)
        target = where.target(parameter.data, taken)
        if target.shape != taken.shape:
            raise _misfit(name, taken, str(list(target.shape)))
        target.copy_(taken)
        self.filled[where.parameter] = self.filled.get(where.parameter, 0) + taken.numel()
        return taken.numel()

    def check(self) -> None:
        short = [n for n, p in self.parameters.items() if self.filled.get(n, 0) != p.numel()]
        if short:
            more = f" and {len(short) - 1} more" if len(short) > 1 else ""
            raise CheckpointError(f"the checkpoint lacks {short[0]!r}{more}; finish the download or fix config.json.")


def _misfit(name: str, tensor: Tensor, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {name!r} has shape {list(tensor.shape)} where the configuration asks for "
        f"{wanted}; config.json and weights are of different models."
    )


def _refuse_quantised(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UnsupportedModel(f"tensor {name!r} is quantised ({kind}); load the checkpoint this one was made from.")


def content_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 over a tensor's name, type, shape and content."""
    digest = hashlib.sha256(f"{name}|{tensor.dtype}|{list(tensor.shape)}".encode())
    digest.update(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data if tensor.numel() else b"")
    return digest.digest()


def load(model: nn.Module, mapped: Mapped, folder: Path, config: Mapping[str, Any]) -> str:
    """Fill every parameter from a checkpoint folder; returns the fingerprint of configuration and files.

    Files are hashed beside the copying, where their digests are not known yet.

    Raises:
        CheckpointError: a tensor is missing, unknown, mis-shaped or unreadable.
    """
    loading = _Loading(dict(model.named_parameters()))
    left_out: dict[str, int] = {}
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(fingerprint.of_checkpoint, config, shards(folder))
        for name, tensor in stream(folder):
            places = each(mapped.map_weights(name))
            if not places:
                left_out[name] = tensor.nbytes
                continue
            loading.place(name, tensor, places)
        loading.check()
        _report(left_out)
        return found.result()


def _report(left_out: Mapping[str, int]) -> None:
    """Says once what of a checkpoint was not loaded: heads for speculation, vision towers, saved buffers."""
    if left_out:
        parts = sorted({".".join(name.split(".")[:2]) + ".*" for name in left_out})
        shown = ", ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
        size = sum(left_out.values()) / 1e9
        logging.getLogger("hypic").info("left out %d tensors, %.3f GB: %s", len(left_out), size, shown)


def fill_dummy(model: nn.Module, seed: int, config: Mapping[str, Any]) -> str:
    """Random weights of a trained model's scale, with half-lives spread log-uniformly over 16 to 16,384 tokens.

    On a GPU matrices are drawn there, in place, which takes seconds for the largest models; so they are other numbers
    than on a CPU, and the fingerprint says so.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    there = {device: torch.Generator(device=device).manual_seed(seed) for device in devices}
    for name, parameter in model.named_parameters():
        if parameter.device in there and parameter.dim() > 1 and name.rsplit(".", 1)[-1] not in KEPT_WIDE:
            parameter.data.normal_(0.0, _deviation(parameter.shape), generator=there[parameter.device])
        else:
            parameter.data.copy_(_drawn(model, name, parameter.shape, generator))
    marks = [b"dummy 2", str(seed).encode(), *sorted(device.type.encode() for device in devices)]
    return fingerprint.fingerprint(config, marks)


def _deviation(shape: torch.Size) -> float:
    return 1.0 / math.sqrt(shape[-1])


def _drawn(model: nn.Module, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A parameter's dummy values. A gate's ``A_log`` or ``dt_bias`` sets the half-life, the other is neutral."""
    module, last = model.get_submodule(name.rpartition(".")[0]), name.rsplit(".", 1)[-1]
    lower_bound = getattr(getattr(module, "shape", None), "lower_bound", None)
    if last == ("A_log" if lower_bound is None else "dt_bias"):
        half_lives = 16.0 * 1024.0 ** torch.rand(shape, generator=generator, dtype=torch.float64)
        if lower_bound is None:
            # softplus(0) = ln 2 per token, so exp(A_log) * ln 2 = ln 2 / half-life
            return -half_lives.log()
        bounded: Tensor = torch.logit(math.log(2.0) / half_lives / -lower_bound)
        return bounded
    if last in ("A_log", "dt_bias", "bias", "expert_bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, 0.0 if getattr(module, "zero_centred", False) else 1.0)
    normal: Tensor = torch.randn(shape, generator=generator) * _deviation(shape)
    return normal

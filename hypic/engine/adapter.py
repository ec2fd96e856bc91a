"""A LoRA adapter (arXiv 2106.09685) as PEFT saves it, merged into a model's weights when they are loaded.

``W + scale * B A``, with ``scale = alpha / r``, or ``alpha / sqrt(r)`` with ``use_rslora``. The adapter names the
checkpoint's modules, so the model's own ``map_weights`` finds each matrix's place, inside fused parameters too. Merging
runs in at least fp32 and is rounded once. One adapter a process: what is merged cannot be taken out again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypic.engine.weights import Mapped, Placement, content_digest, each, stream
from hypic.errors import CheckpointError, UnsupportedModel

TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?:\.\w+)*")
FUSED = ("gate_up_proj", "down_proj")
# What these fields turn on is more than two matrices beside a weight.
REFUSED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)


@dataclass(frozen=True)
class LowRank:
    """``b a`` beside the weight of ``module``; beside an embedding, its transpose.

    For the fused weights of ``E`` experts, ``a [E r, in]`` and ``b [out, r E]`` hold one pair for each.
    """

    module: str
    a: Tensor
    b: Tensor
    is_embedding: bool

    def change(self, num_experts: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What is added to the weight but for its scale, in the checkpoint's layout."""
        a, b = self.a.to(device, dtype), self.b.to(device, dtype)
        if num_experts:
            b = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)
            return b @ a.reshape(num_experts, -1, a.shape[1])
        return (b @ a).mT if self.is_embedding else b @ a


@dataclass(frozen=True)
class _Target:
    """The weight that a pair changes, by the checkpoint's name, and its places; ``num_experts`` is 0 unless fused."""

    weight: str
    places: Sequence[Placement]
    num_experts: int = 0


def merge(model: nn.Module, mapped: Mapped, folder: Path) -> str:
    """Adds the adapter in ``folder`` to the weights; returns the SHA-256 of its content as hexadecimal text.

    Raises:
        UnsupportedModel: it is of another kind than plain LoRA, or changes a weight that is tied or left out.
        CheckpointError: it is incomplete, unreadable or made for another model.
    """
    parameters, settings = _names_of(model), _settings(folder)
    digest = hashlib.sha256()
    for pair in read(folder):
        target = _target(pair, mapped, parameters)
        scale = _scale(pair, target, settings)
        for where in target.places:
            _add(pair, target, where, parameters, scale)
        for part in (pair.a, pair.b):
            digest.update(content_digest(f"{target.weight}|{scale!r}", part))
    return digest.hexdigest()


def read(folder: Path) -> Iterator[LowRank]:
    """The adapter's pairs of matrices, by name.

    Raises:
        UnsupportedModel: it holds other tensors too.
        CheckpointError: a file is missing or unreadable, or a matrix has no partner.
    """
    pairs: dict[tuple[str, bool], dict[str, Tensor]] = {}
    for name, tensor in stream(folder):
        found = TENSOR.fullmatch(name)
        if found is not None and tensor.ndim == 2:
            pairs.setdefault((found["module"], bool(found["kind"])), {})[found["side"]] = tensor
        elif ".base_layer." not in name:  # an unchanged copy of the weight itself
            raise UnsupportedModel(f"the adapter holds {name!r}, which is no plain LoRA matrix; merge it beforehand.")
    if not pairs:
        raise CheckpointError(f"{folder} holds no LoRA matrices; pass the folder that PEFT's save_pretrained wrote.")
    for (module, is_embedding), sides in sorted(pairs.items()):
        if sides.keys() != {"A", "B"} or len(sides["A"]) != sides["B"].shape[1]:
            raise CheckpointError(f"the adapter lacks one of the two matrices of {module!r}; save it again.")
        yield LowRank(module, sides["A"], sides["B"], is_embedding)


def _target(pair: LowRank, mapped: Mapped, parameters: Mapping[str, nn.Parameter]) -> _Target:
    """PEFT does not keep the names of fused parameters (``target_parameters``): their shapes tell them apart."""
    module = pair.module.replace(".base_layer", "")
    for name in FUSED if module.endswith(".experts") else ():
        places = each(mapped.map_weights(f"{module}.{name}"))
        fused = parameters.get(places[0].parameter) if len(places) == 1 else None
        if fused is not None and fused.shape[1:] == (len(pair.b), pair.a.shape[1]) and not len(pair.a) % len(fused):
            return _Target(f"{module}.{name}", places, len(fused))
    places = each(mapped.map_weights(f"{module}.weight"))
    if not places:
        raise UnsupportedModel(f"the adapter changes {module!r}, which is tied or not run here; train one without it.")
    return _Target(f"{module}.weight", places)


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / "adapter_config.json"
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} cannot be read ({reason}); pass the folder of a PEFT adapter.") from error
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is of type {kind!r}; only LORA is supported: merge it beforehand.")
    used = [name for name in REFUSED if settings.get(name)]
    used += ["bias"] if settings.get("bias", "none") != "none" else []
    if used:
        value = settings[used[0]]
        raise UnsupportedModel(f"the adapter has {used[0]} = {value!r}, which is not supported; merge it beforehand.")
    return settings


def _scale(pair: LowRank, target: _Target, settings: Mapping[str, Any]) -> float:
    rank = len(pair.a) // (target.num_experts or 1)
    names = (target.weight, target.weight.rpartition(".")[0])
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    alphas = [alpha for pattern, alpha in patterns.items() if any(_matches(pattern, name) for name in names)]
    alpha = float(alphas[0] if alphas else settings.get("lora_alpha", rank))
    return alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None


def _names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, without those that two names share."""
    named = list(model.named_parameters(remove_duplicate=False))
    counts: dict[int, int] = {}
    for _, parameter in named:
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return {name: parameter for name, parameter in named if counts[id(parameter)] == 1}


def _add(
    pair: LowRank, target: _Target, where: Placement, parameters: Mapping[str, nn.Parameter], scale: float
) -> None:
    parameter = parameters.get(where.parameter)
    if parameter is None:
        raise UnsupportedModel(
            f"the adapter changes {pair.module!r}, which this model ties to another weight or does not have; "
            "train one without it, or for this model."
        )
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    change = where.taken(pair.change(target.num_experts, parameter.device, wide))
    part = where.target(parameter.data, change)
    if part.shape != change.shape:
        raise CheckpointError(
            f"the adapter's change of {pair.module!r} has shape {list(change.shape)} where the model asks for "
            f"{list(part.shape)}; it was made for another model."
        )
    part.copy_(part.to(wide) + scale * change)

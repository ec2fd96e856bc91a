"""A LoRA adapter (arXiv 2106.09685) as PEFT saves it, merged into a model's weights when they are loaded.

``W + scale * B A``, with ``scale = alpha / r``, or ``alpha / sqrt(r)`` with ``use_rslora``. The adapter names the
checkpoint's modules, so the model's own ``map_weights`` finds each matrix's place, inside fused parameters too. Merging
runs in at least fp32 and is rounded once. One adapter a process: what is merged cannot be taken out again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypic.engine.weights import Mapped, Placement, content_digest, each, stream
from hypic.errors import CheckpointError, UnsupportedModel

TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?:\.\w+)*")
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
    "target_parameters",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)


@dataclass(frozen=True)
class LowRank:
    """``scale * b a``, beside the weight of ``module``; of an embedding, its transpose."""

    module: str
    a: Tensor
    b: Tensor
    scale: float
    is_embedding: bool

    def change(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What is added to the weight, in the checkpoint's layout."""
        product = self.b.to(device, dtype) @ self.a.to(device, dtype) * self.scale
        return product.mT if self.is_embedding else product


def merge(model: nn.Module, mapped: Mapped, folder: Path) -> str:
    """Adds the adapter in ``folder`` to the weights; returns the SHA-256 of its content as hexadecimal text.

    Raises:
        UnsupportedModel: it is of another kind than plain LoRA, or changes a weight that is tied or left out.
        CheckpointError: it is incomplete, unreadable or made for another model.
    """
    names = _names_of(model)
    digest = hashlib.sha256()
    for low_rank in read(folder):
        places = each(mapped.map_weights(f"{low_rank.module}.weight"))
        if not places:
            raise UnsupportedModel(
                f"the adapter changes {low_rank.module!r}, which is tied or not run here; train one without it."
            )
        for where in places:
            _add(low_rank, where, names)
        for part in (low_rank.a, low_rank.b):
            digest.update(content_digest(f"{low_rank.module}|{low_rank.scale!r}", part))
    return digest.hexdigest()


def read(folder: Path) -> Iterator[LowRank]:
    """The adapter's pairs of matrices, by name.

    Raises:
        UnsupportedModel: another kind of adapter.
        CheckpointError: a file is missing or unreadable, or a matrix has no partner.
    """
    settings = _settings(folder)
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
        yield LowRank(module, sides["A"], sides["B"], _scale(module, len(sides["A"]), settings), is_embedding)


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); pass the folder of a PEFT adapter.") from error
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"the adapter is of type {kind!r}; only LORA is supported: merge it beforehand.")
    used = [name for name in REFUSED if settings.get(name)]
    used += ["bias"] if settings.get("bias", "none") != "none" else []
    if used:
        value = settings[used[0]]
        raise UnsupportedModel(f"the adapter has {used[0]} = {value!r}, which is not supported; merge it beforehand.")
    return settings


def _scale(module: str, rank: int, settings: Mapping[str, Any]) -> float:
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    alphas = [alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)]
    alpha = float(alphas[0] if alphas else settings.get("lora_alpha", rank))
    return alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank


def _names_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, without those that two names share."""
    named = list(model.named_parameters(remove_duplicate=False))
    counts: dict[int, int] = {}
    for _, parameter in named:
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return {name: parameter for name, parameter in named if counts[id(parameter)] == 1}


def _add(low_rank: LowRank, where: Placement, parameters: Mapping[str, nn.Parameter]) -> None:
    parameter = parameters.get(where.parameter)
    if parameter is None:
        raise UnsupportedModel(
            f"the adapter changes {low_rank.module!r}, which this model ties to another weight or does not have; "
            "train one without it, or for this model."
        )
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    change = where.taken(low_rank.change(parameter.device, wide))
    target = where.target(parameter.data, change)
    if target.shape != change.shape:
        raise CheckpointError(
            f"the adapter's change of {low_rank.module!r} has shape {list(change.shape)} where the model asks for "
            f"{list(target.shape)}; it was made for another model."
        )
    target.copy_(target.to(wide) + change)

"""What a checkpoint folder holds and what its segments will take, from its configuration and headers alone.

The model is built without storage (torch's ``meta`` device), so that folders of any size are described in a moment;
no weight is read. What would be refused at load is not an error here but ``CheckpointInfo.refusal``.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hypic import checkpoints
from hypic.checkpoints import fitting
from hypic.checkpoints.fitting import Fit as Fit
from hypic.config import EngineConfig
from hypic.engine import fingerprint, models, runner, weights
from hypic.engine.models import _families
from hypic.engine.pool import Layout
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import CheckpointError, UnsupportedModel
from hypic.types import Policy

POLICIES = ("segments", "prefix", "none")


@dataclass(frozen=True)
class ModelType:
    """A model type that can be loaded; ``transition`` is the kind of ``T``: head, diagonal or dense."""

    name: str
    models: str
    linear: str
    transition: str
    tested: str


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint as its files describe it.

    ``layers`` counts layers by kind. ``num_parameters`` and ``weight_bytes`` are of the tensors that are loaded, as
    stored; ``loaded_bytes`` is what they take in ``dtype``. ``left_out`` are bytes of tensors that are not needed, by
    the beginning of their names. ``state_bytes`` and ``transition_bytes`` are of all linear layers together,
    ``token_bytes`` K and V of a token in all full-attention layers. ``reuse`` are the policies that can be used.
    ``refusal`` says why the checkpoint cannot be loaded; what depends on the model is then 0.
    """

    model_type: str
    layers: Mapping[str, int]
    num_parameters: int
    weight_bytes: int
    max_context: int | None
    family: str | None = None
    linear: str | None = None
    transition: str | None = None
    dtype: str | None = None
    loaded_bytes: int = 0
    state_bytes: int = 0
    transition_bytes: int = 0
    token_bytes: int = 0
    reuse: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    refusal: str | None = None

    def segment_bytes(self, num_tokens: int, policy: Policy = Policy(), page_size: int = 16) -> int:
        """What a cached segment of so many tokens takes: for each interior its map and tail, and pages of its K and V.
        Nothing, if seams cover it."""
        pages = fitting.pages_of(num_tokens, policy, page_size)
        return len(pages) * (self.state_bytes + self.transition_bytes) + sum(pages) * page_size * self.token_bytes

    def fit(self, counts: int | Sequence[int], config: EngineConfig) -> Fit:
        """How many cached segments of ``counts`` tokens, in this order, an engine of this configuration keeps; or of
        one number of tokens, as many as there may be. ``config.memory`` is a number of bytes, or a size as text."""
        if self.refusal is not None:
            return Fit(config.memory_bytes(0), refusal=self.refusal)
        if isinstance(counts, int):
            return fitting.fit_alike(self, self.max_context or 0, counts, config)
        return fitting.fit(self, self.max_context or 0, counts, config)

    def memory_for(self, counts: Sequence[int], config: EngineConfig) -> int:
        """The least memory, in whole MiB, at which an engine keeps all of them while it works; 0 if it is refused."""
        return 0 if self.refusal is not None else fitting.memory_for(self, self.max_context or 0, counts, config)


def model_types() -> list[ModelType]:
    """All model types that can be loaded."""
    return [ModelType(name, f.models, f.linear, f.transition, f.tested) for name, f in _families.FAMILIES.items()]


def refused() -> Mapping[str, str]:
    """Model types that are known and refused, each with the reason."""
    return dict(_families.REFUSED)


def describe(folder: str | Path, dtype: str = "auto", device: str = "auto") -> CheckpointInfo:
    """Reads ``config.json`` and the headers of the safetensors files; ``dtype`` and ``device`` are as in
    ``EngineConfig``.

    Raises:
        CheckpointError: the folder is none, or a file is missing, unreadable or no safetensors file.
        ConfigError: the type or device is unknown.
    """
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str) or not str(folder).strip():
        raise CheckpointError(f"the folder is {folder!r:.60}; pass the path of a Hugging Face checkpoint.")
    place, engine = _place(folder), EngineConfig(dtype=dtype, device=device)
    if not place.is_dir():
        raise CheckpointError(f"{str(folder)!r} is no folder; pass the folder of a Hugging Face checkpoint.")
    config = weights.read_config(place)
    tensors = dict(_tensors(place))
    try:
        with torch.device("meta"):
            model = models.build(config)
        return _described(config, tensors, model, engine)
    except UnsupportedModel as error:
        return _refused(config, tensors, str(error))


def token_counts(folder: str | Path, texts: Sequence[str]) -> list[int]:
    """The number of tokens of each text, by the folder's tokenizer.

    Raises:
        CheckpointError, UnsupportedModel: the folder has no tokenizer, or none that can be used.
    """
    tokenizer = Tokenizer(_place(folder))
    return [len(tokenizer.encode_text(text)) for text in texts]


def _place(folder: str | Path) -> Path:
    """A folder as it was given, or that of the bundled checkpoint by its name."""
    return checkpoints.bundled() if checkpoints.is_bundled(folder) else Path(folder).expanduser()


def _tensors(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names of all tensors with how many numbers and bytes they hold."""
    for path in weights.shards(folder):
        try:
            header = json.loads(fingerprint.read_header(path))
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read ({error}); download it again.") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} is no safetensors file; download it again.")
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                yield name, (math.prod(entry["shape"]), stop - start)


def _described(
    config: dict[str, Any], tensors: Mapping[str, tuple[int, int]], model: nn.Module, engine: EngineConfig
) -> CheckpointInfo:
    text, name = models.text_config(config), models.family_of(config)
    family, mapped = _families.FAMILIES[name], runner.as_model(model)
    loaded = {tensor: size for tensor, size in tensors.items() if weights.each(mapped.map_weights(tensor))}
    dtype = runner.dtype_of(engine.dtype, config, model, runner.device_of(engine.device))
    layout: Layout = runner.as_model(model.to(dtype)).layout
    return CheckpointInfo(
        model_type=str(text.get("model_type")),
        layers=dict(Counter(mapped.layer_types)),
        num_parameters=sum(count for count, _ in loaded.values()),
        weight_bytes=sum(num_bytes for _, num_bytes in loaded.values()),
        max_context=mapped.max_context,
        family=name,
        linear=family.linear,
        transition=family.transition,
        dtype=str(dtype).removeprefix("torch."),
        loaded_bytes=_loaded_bytes(model, dtype),
        state_bytes=layout.state_bytes,
        transition_bytes=layout.transition_bytes,
        token_bytes=layout.token_bytes,
        reuse=POLICIES,
        left_out=_left_out({tensor: size for tensor, size in tensors.items() if tensor not in loaded}),
    )


def _refused(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, int]], reason: str) -> CheckpointInfo:
    text = models.text_config(config)
    types, count, context = text.get("layer_types"), text.get("num_hidden_layers"), text.get("max_position_embeddings")
    layers = Counter(str(kind) for kind in types) if isinstance(types, list) else {"layers": int(count or 0)}
    return CheckpointInfo(
        model_type=str(text.get("model_type", "unknown")),
        layers=dict(layers),
        num_parameters=sum(numbers for numbers, _ in tensors.values()),
        weight_bytes=sum(num_bytes for _, num_bytes in tensors.values()),
        max_context=context if isinstance(context, int) else None,
        refusal=reason,
    )


def _loaded_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    wide = max(dtype.itemsize, torch.float32.itemsize)
    named = model.named_parameters()
    return sum(p.numel() * (wide if n.rsplit(".", 1)[-1] in weights.KEPT_WIDE else dtype.itemsize) for n, p in named)


def _left_out(tensors: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
    """Bytes by the first two words of the tensors' names."""
    found: Counter[str] = Counter()
    for name, (_, num_bytes) in tensors.items():
        found[".".join(name.split(".")[:2])] += num_bytes
    return dict(found)

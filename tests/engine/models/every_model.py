"""A tiny checkpoint of every model type that has a file, each with the truth that fits it.

Whoever adds a model file adds a builder here; what is then asked of it stands in ``test_every_family.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hypic.engine.models import supported
from tests import checkpoints, checkpoints_gdn, checkpoints_kda, checkpoints_mamba
from tests.engine.models import ring_latent
from tests.engine.models.gdn_reference import FamilyReference
from tests.engine.models.oracle_contracts import Models
from tests.reference import Reference

Make = Callable[[Path], Path]
Truth = Callable[[Path, Sequence[int]], Tensor]
LATENT_RING = "bailing_moe_linear-2.5"
# Models that transformers does not have.
OWN = ("bailing_moe_linear", LATENT_RING)
BUILDERS: Mapping[str, Make] = {
    **{name: partial(checkpoints_kda.write, kind=name) for name in checkpoints_kda.MODELS},
    **{name: partial(checkpoints_mamba.write, kind=name) for name in checkpoints_mamba.MODELS},
    "bailing_moe_linear": checkpoints_gdn.ring,
    LATENT_RING: ring_latent.write,
    "minimax": checkpoints.minimax,
    "olmo_hybrid": checkpoints_gdn.olmo_hybrid,
    "qwen3_5_moe_text": checkpoints_gdn.qwen3_5_moe,
    "qwen3_5_text": checkpoints.qwen,
    "qwen3_next": checkpoints_gdn.qwen3_next,
}
KINDS = ("linear_attention", "full_attention")
WITH_SINGLE: Mapping[str, Callable[..., Path]] = {
    "bailing_moe_linear": checkpoints_gdn.ring,
    LATENT_RING: ring_latent.write,
    "minimax": checkpoints.minimax,
    "olmo_hybrid": checkpoints_gdn.olmo_hybrid,
    "qwen3_5_moe_text": checkpoints_gdn.qwen3_5_moe,
    "qwen3_5_text": checkpoints.qwen,
    "qwen3_next": checkpoints_gdn.qwen3_next,
}
# Models of one mixing layer, by type and kind.
LAYERS: Mapping[str, Make] = {
    **{f"{name} {kind}": partial(make, single=kind) for name, make in WITH_SINGLE.items() for kind in KINDS},
    **{
        f"{name} {kind}": partial(checkpoints_kda.write, kind=name, single=kind)
        for name in checkpoints_kda.MODELS
        for kind in KINDS
    },
    **{
        f"{name} {kind}": partial(checkpoints_mamba.write, kind=name, single=kind)
        for name, kinds in checkpoints_mamba.SINGLE.items()
        for kind in kinds
    },
}
REFERENCES: Mapping[str, Callable[[Path], Reference]] = {
    **dict.fromkeys(("minimax", "qwen3_5_text"), Reference),
    **dict.fromkeys(OWN, FamilyReference),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_next"), FamilyReference),
}
NAMES = [*supported(), LATENT_RING]
# Models whose linear layers hold nothing but a convolution's tail: what harms a transition does not harm them.
STATELESS = ("lfm2",)


def own_truth(folder: Path, ids: Sequence[int]) -> Tensor:
    """transformers has no such model: one row of the written-out reference."""
    return FamilyReference(folder).full(list(ids)).logits


TRUTHS: Mapping[str, Truth] = {
    **dict.fromkeys(OWN, own_truth),
    **dict.fromkeys(("minimax", "qwen3_5_text"), checkpoints.exact_oracle_logits),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_next"), checkpoints_gdn.exact_logits),
}


@torch.no_grad()
def generated(folder: Path, ids: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers generates in float32, with its own cache."""
    model = checkpoints_mamba.oracle(folder)
    found = model.generate(torch.tensor([list(ids)]), max_new_tokens=num_tokens, do_sample=False, use_cache=True)
    out: list[int] = found[0, len(ids) :].tolist()
    return out


class Every(Models):
    """Tiny checkpoints by model type, or by that and more words, each with the truth that fits its type."""

    def __init__(self, make_folder: Callable[[str], Path], builders: Mapping[str, Make] = BUILDERS) -> None:
        super().__init__(builders, make_folder)
        made = self.folder
        self.folder = cache(lambda name: made(_known(name)))
        self._exact = cache(lambda name, ids: truth_of(name)(self.folder(name), ids))


def truth_of(name: str) -> Truth:
    """Of OLMo-Hybrid transformers refuses models of one layer."""
    kind, _, more = name.partition(" ")
    return own_truth if kind == "olmo_hybrid" and more else TRUTHS.get(kind, checkpoints_mamba.exact_logits)


def _known(name: str) -> str:
    if name.partition(" ")[0] not in BUILDERS:
        pytest.fail(f"hypic/engine/models/{name}.py has no tiny checkpoint: add a builder to BUILDERS in {__name__}.")
    return name

"""Tiny checkpoints of the families in ``tests.checkpoints_gdn`` by name, their engines and their reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.checkpoints_gdn import ROPE, YARN, fuse_experts, olmo_hybrid, qwen3_5_moe, qwen3_next, ring
from tests.engine.expected import Checkpoints
from tests.engine.models import ring_latent
from tests.engine.models.gdn_reference import FamilyReference

PARTIAL = {"partial_rotary_factor": 0.25}
MAKERS: dict[str, Callable[[Path], Path]] = {
    "next": qwen3_next,
    "next-plain-weights": lambda f: qwen3_next(f, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3]),
    "next-tied": lambda f: qwen3_next(f, tie_word_embeddings=True),
    "next-yarn": lambda f: qwen3_next(f, rope_parameters=YARN | PARTIAL),
    "moe": qwen3_5_moe,
    "moe-wrapper": lambda f: qwen3_5_moe(f, wrapper=True),
    "moe-fused": lambda f: fuse_experts(qwen3_5_moe(f)),
    "olmo": olmo_hybrid,
    "olmo-rope": lambda f: olmo_hybrid(f, rope_parameters=ROPE, linear_allow_neg_eigval=False),
    "olmo-yarn": lambda f: olmo_hybrid(f, rope_parameters=YARN | {"beta_fast": 8.0, "attention_factor": 1.3}),
    "olmo-96-192": lambda f: olmo_hybrid(f, linear_key_head_dim=96, linear_value_head_dim=192),
    "ring": ring,
    "ring-first": lambda f: ring(f, architectures=["BailingMoeLinearForCausalLM"], linear_silu=True),
    "ring-latent": ring_latent.write,
    "ring-latent-plain-queries": lambda f: ring_latent.write(f, q_lora_rank=None),
    "next-yarn-full": lambda f: qwen3_next(f, "full_attention", rope_parameters=YARN | PARTIAL),
    "olmo-yarn-full": lambda f: olmo_hybrid(f, "full_attention", rope_parameters=YARN | {"attention_factor": 1.3}),
    "ring-yarn-linear": lambda f: ring(f, "linear_attention", rope_scaling=YARN),
}
LATENT = ("ring-latent", ring_latent.write)
SINGLE: dict[str, tuple[Callable[..., Path], Any]] = {
    f"{name}-{kind.removesuffix('_attention')}": (make, kind)
    for name, make in (("next", qwen3_next), ("moe", qwen3_5_moe), ("olmo", olmo_hybrid), ("ring", ring), LATENT)
    for kind in ("linear_attention", "full_attention")
}


class FamilyCheckpoints(Checkpoints):
    """The same for the families here, with their own reference."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        super().__init__(make_folder)
        self.reference = cache(lambda name: FamilyReference(self.folder(name)))

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            folder = self._make_folder(name) / "checkpoint"
            single = SINGLE.get(name)
            self._folders[name] = MAKERS[name](folder) if single is None else single[0](folder, single[1])
        return self._folders[name]

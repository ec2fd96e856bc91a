"""Models of one mixing layer, of every type that has a file: whatever the prompt, reuse equals full recompute.

And variants of some configurations, by their logits; those of Qwen, OLMo, MiniMax and Ring are in ``test_gdn_models``
and ``tests/engine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import checkpoints_kda, checkpoints_mamba
from tests.engine.expected import TOLERANCE
from tests.engine.faults import FAULTS
from tests.engine.models import oracle_contracts as contracts
from tests.engine.models.every_model import LATENT_RING, LAYERS, NAMES, Every
from tests.engine.models.oracle_contracts import bites

VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "kimi ranked": ("kimi_linear", {"q_lora_rank": 12, "n_group": 1, "n_shared_experts": 2, "attention_bias": True}),
    "kimi narrow": ("kimi_linear", {"norm_topk_prob": False, "linear_conv_kernel_dim": 3, "linear_num_heads": 3}),
    "ling whole": ("bailing_hybrid", {"q_lora_rank": None, "kda_lower_bound": -3.0, "first_k_dense_replace": 4}),
    "ling unbounded": ("bailing_hybrid", {"kda_safe_gate": False}),
    # Strong gates: the bounded one then stays at half its bound, e^-2.5 a token.
    "ling strong": ("bailing_hybrid", {"seed": 3, "kda_lower_bound": -400.0}),
    "granite dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "granite tied": (
        "granitemoehybrid",
        {"tie_word_embeddings": True, "mamba_n_groups": 1, "mamba_conv_bias": False},
    ),
    "granite limits": ("granitemoehybrid", {"time_step_limit": [0.5, 0.8]}),
    "bamba groups": ("bamba", {"mamba_n_groups": 8, "tie_word_embeddings": True}),
    "nemotron latent": (
        "nemotron_h",
        {"moe_latent_size": 12, "n_group": 1, "norm_topk_prob": False, "use_bias": True},
    ),
    "falcon norm first": ("falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True}),
    "falcon gate first": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "zamba plain": ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_mem_blocks": 1}),
    "lfm2 wide": ("lfm2", {"conv_L_cache": 5, "conv_bias": True, "tie_word_embeddings": False}),
    "lfm2 plain": ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 2}),
}
LINEAR_BUGS = ("drop-transition", "drop-end-state", "seam+1", "seam-1")
TAIL_BUGS = ("empty-tail", "padded-tail")
PLACE_BUGS = ("position+1", "position-1", "no-rotation")
# Attention of these has no positions, and linear layers of these no convolution.
WITHOUT_POSITIONS = ("granitemoehybrid", "kimi_linear", "nemotron_h", "olmo_hybrid")
WITHOUT_CONVOLUTION = ("minimax", "bailing_moe_linear", LATENT_RING)


def write(folder: Path, kind: str, **options: Any) -> Path:
    module = checkpoints_kda if kind in checkpoints_kda.MODELS else checkpoints_mamba
    return module.write(folder, kind, **options)


MADE: Mapping[str, contracts.Make] = {
    f"{kind} {name}": partial(write, kind=kind, **options) for name, (kind, options) in VARIANTS.items()
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Every:
    torch.set_num_threads(1)
    return Every(lambda name: tmp_path_factory.mktemp(name.replace(" ", "-")), {**LAYERS, **MADE})


def test_every_type_has_a_model_of_one_layer() -> None:
    assert {layer.split()[0] for layer in LAYERS} == set(NAMES)


def bugs(layer: str) -> list[str]:
    """What must show: attention beside a recurrence is held to the bugs of both."""
    name, kind = layer.split()
    found = [] if kind == "full_attention" else [*TAIL_BUGS] if kind == "conv" else [*LINEAR_BUGS, *TAIL_BUGS]
    if name in WITHOUT_CONVOLUTION:
        found = [bug for bug in found if bug not in TAIL_BUGS]
    attends = kind in ("full_attention", "hybrid") and name not in WITHOUT_POSITIONS
    return [*found, *(PLACE_BUGS if attends else ())]


@pytest.mark.parametrize("name", MADE)
def test_logits_of_variants_equal_those_of_transformers(
    name: str, models: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contracts.live_error(models, name, "float64") < TOLERANCE["float64"]
    contracts.forget_a_key(monkeypatch)
    assert bites(contracts.live_error(models, name, "float64"))


@pytest.mark.parametrize("layer", LAYERS)
def test_one_mixing_layer_equals_full_recompute(layer: str, models: Every) -> None:
    assert contracts.single_error(models, layer) < TOLERANCE["float64"]
    assert contracts.single_error(models, layer, "float32") < TOLERANCE["float32"]


@pytest.mark.parametrize(("layer", "bug"), [(layer, bug) for layer in LAYERS for bug in bugs(layer)])
def test_one_mixing_layer_bites(layer: str, bug: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[bug](monkeypatch)
    assert bites(contracts.single_error(models, layer))


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer.endswith(("full_attention", "hybrid"))])
def test_attention_bites(layer: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    contracts.forget_a_key(monkeypatch)
    assert bites(contracts.single_error(models, layer))

"""YaRN's frequencies and factor against transformers, moves against rotation in place, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hypic.engine.affine import Affine
from hypic.engine.layers.rotary import Rotary, Yarn, move, rotate
from hypic.engine.models._config import context_from, rotary_from
from hypic.errors import CheckpointError, UnsupportedModel

YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
CASES: list[dict[str, Any]] = [
    {},
    {"factor": 32.0, "beta_fast": 8.0, "beta_slow": 2.0},
    {"attention_factor": 1.25},
    {"mscale": 0.7, "mscale_all_dim": 1.3},
    {"mscale": 0.7},
    {"truncate": False},
    {"partial_rotary_factor": 0.25},
    {"rope_theta": 10_000_000.0, "original_max_position_embeddings": 262_144},
    {"factor": 1.0},
    {"original_max_position_embeddings": 8},  # every channel is slow: the ramp has no length
]


def config(**changes: Any) -> dict[str, Any]:
    rope = YARN | {"original_max_position_embeddings": 256} | changes
    return {"max_position_embeddings": 1024, "rope_parameters": rope, "head_dim": 64}


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_yarn_equals_that_of_transformers(changes: dict[str, Any]) -> None:
    from transformers import Qwen3NextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = config(**{"partial_rotary_factor": 1.0} | changes)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](Qwen3NextConfig(**settings))
    rotary = rotary_from(settings, 64, default_factor=1.0)
    assert rotary.scale == pytest.approx(factor, rel=1e-12)
    assert torch.allclose(rotary.frequencies, expected.double(), rtol=1e-5, atol=1e-12)
    is_changed = changes.get("factor") != 1.0
    plain = Rotary(rotary.dim, settings["rope_parameters"]["rope_theta"]).frequencies
    assert torch.allclose(rotary.frequencies, plain, rtol=1e-3) is not is_changed


def test_older_spelling_and_missing_numbers() -> None:
    older = {"rope_theta": 10_000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 256}
    newer = rotary_from(config(), 64, default_factor=1.0)
    found = rotary_from(older, 64, default_factor=1.0)
    assert torch.equal(found.frequencies, newer.frequencies) and found.scale == newer.scale
    ratio = rotary_from(config(factor=None), 64, default_factor=1.0)  # 1024 / 256
    assert torch.equal(ratio.frequencies, newer.frequencies)


def test_context_counts_the_factor() -> None:
    assert context_from({"max_position_embeddings": 512}) == 512
    assert context_from(config()) == 1024
    assert context_from(config(factor=8.0)) == 2048


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "linear", "llama3", "su"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{kind}'"):
        rotary_from(config(rope_type=kind), 64, default_factor=1.0)


def test_a_base_is_needed() -> None:
    with pytest.raises(CheckpointError, match="rope_theta"):
        rotary_from({"max_position_embeddings": 16}, 64, default_factor=1.0)


@pytest.mark.parametrize("yarn", [None, Yarn(4.0, 64, attention_factor=1.4)], ids=["plain", "yarn"])
def test_moving_a_state_equals_rotating_its_keys_in_place(yarn: Yarn | None) -> None:
    """The attention factor is in the keys already, and must not come in twice."""
    rotary, places = Rotary(12, 10_000.0, yarn), torch.arange(7)
    k, v = torch.randn(7, 2, 16, dtype=torch.float64), torch.randn(7, 2, 5, dtype=torch.float64)

    def state(start: int) -> torch.Tensor:
        keys = rotate(k, rotary(places + start, 1000, torch.float64))
        return torch.einsum("nhk,nhv->hkv", keys, v)[None]

    alone = Affine(torch.ones(1, 2, dtype=torch.float64), state(0))
    moved = move(alone, rotary.moves(torch.tensor([300]), 1000, torch.float64)).end_state
    assert torch.allclose(moved, state(300), rtol=1e-11, atol=1e-12)
    twice = move(alone, rotary(torch.tensor([300]), 1000, torch.float64)).end_state
    assert torch.allclose(twice, state(300), rtol=1e-3) is (yarn is None)
    assert not torch.allclose(alone.end_state, state(300), rtol=1e-3)

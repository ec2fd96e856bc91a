"""Model types that are known and not supported: refused by name, with the reason; and who builds what."""

from __future__ import annotations

from typing import Any

import pytest

from hypic.engine import models
from hypic.engine.models._families import ALIASES, BY_ARCHITECTURE, REFUSED
from hypic.errors import UnsupportedModel

ASKED_FOR = ("jamba", "zamba", "recurrent_gemma", "lfm2_moe", "mamba", "falcon_mamba", "rwkv", "qwen4_exp")


def test_the_ones_asked_for_are_in_the_table() -> None:
    assert set(ASKED_FOR) <= set(REFUSED)


@pytest.mark.parametrize("name", [*REFUSED, *(alias for alias, name in ALIASES.items() if name in REFUSED)])
def test_a_known_type_is_refused_with_its_reason(name: str) -> None:
    reason = REFUSED[ALIASES.get(name, name)]
    with pytest.raises(UnsupportedModel) as caught:
        models.build({"model_type": name})
    message = str(caught.value)
    assert repr(name) in message and reason in message and message.endswith(".") and "\n" not in message


def test_wrappers_are_refused_by_their_text_part() -> None:
    with pytest.raises(UnsupportedModel, match="'qwen4_exp_text'.*sparse indexer"):
        models.build({"model_type": "qwen4_exp", "text_config": {"model_type": "qwen4_exp_text"}})


def test_aliases_lead_somewhere() -> None:
    known = {*models.supported(), *REFUSED}
    assert set(ALIASES.values()) <= known and set(BY_ARCHITECTURE.values()) <= known


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("BailingMoeV2_5ForCausalLM", "bailing_moe_linear"),
        ("BailingHybridForCausalLM", "bailing_hybrid"),
        ("BailingMoeV3ForCausalLM", "bailing_hybrid"),
    ],
)
def test_one_model_type_of_two_generations(architecture: str, expected: str) -> None:
    """Ring/Ling 2.5 and Ling 3 share ``bailing_hybrid``."""
    assert models.family_of({"model_type": "bailing_hybrid", "architectures": [architecture]}) == expected


# -- what LFM2's own file refuses, and reads -------------------------------------------------------------------------

LFM2 = {
    "model_type": "lfm2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "sliding_attention", "conv"]}, "'sliding_attention'"),
        ({"layer_types": ["conv"]}, "1 layer_types for 3 layers"),
        ({"conv_L_cache": None, "full_attn_idxs": [1]}, "conv_L_cache"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    ],
)
def test_lfm2_refuses_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        models.build(LFM2 | changes)


def test_lfm2_reads_older_fields() -> None:
    model: Any = models.build(LFM2 | {"full_attn_idxs": [1], "block_multiple_of": 8, "tie_embedding": True})
    assert model.layer_types == ["conv", "full_attention", "conv"]
    assert model.layers[0].mlp.down_proj.weight.shape == (32, 32), "two thirds of 48"
    assert model.lm_head.weight is model.embed_tokens.weight
    assert [shape.tail_shape for shape in model.layout.linear] == [(2, 32)] * 2

"""Model types that are known and not supported: refused by name, with the reason; and who builds what."""

from __future__ import annotations

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

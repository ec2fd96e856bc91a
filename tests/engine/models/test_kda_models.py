"""Kimi-Linear and Ling 3: gates, latent caches, released files' names, what is refused.

Their logits and contracts are in ``test_every_family`` and ``test_one_layer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypic.engine import models as families
from hypic.engine.layers import kimi_delta_attention, mla
from hypic.engine.layers.decoder import Decoder
from hypic.engine.layers.rotary import Rotary
from hypic.errors import CheckpointError, UnsupportedModel
from tests.checkpoints_kda import KIMI, write
from tests.engine.expected import TOLERANCE
from tests.engine.models import oracle_contracts as contracts
from tests.engine.models.oracle_contracts import Models, bites

KINDS = {"kimi": "kimi_linear", "ling": "bailing_hybrid"}


def released_kimi(folder: Path) -> Path:
    """Fields as released files have them, where transformers writes its own; an extra layer behind the last."""
    write(folder, "kimi_linear")
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"], config["mlp_layer_types"]
    linear = {"head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads")}
    linear |= {"short_conv_kernel_size": config.pop("linear_conv_kernel_dim")}
    linear |= {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
    config |= {"linear_attn_config": linear, "first_k_dense_replace": 1, "moe_layer_freq": 1, "head_dim": 72}
    config |= {
        "moe_router_activation_func": "sigmoid",
        "rope_scaling": None,
        "mla_use_nope": True,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return _with_extra_layer(folder)


def _with_extra_layer(folder: Path) -> Path:
    """A fifth layer, which predicts several tokens at once, is in the file and is left out."""
    tensors: Mapping[str, Tensor] = load_file(folder / "model.safetensors")
    extra = {n.replace("layers.3.", "layers.4."): t.clone() for n, t in tensors.items() if ".layers.3." in n}
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def released_ling(folder: Path) -> Path:
    """Experts' bias and the output projection by their other names; extra layers behind the last."""
    write(folder, "bailing_hybrid")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace(".attention.o_proj.", ".attention.dense."): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return _with_extra_layer(folder)


MAKERS: dict[str, contracts.Make] = {name: lambda f, k=kind: write(f, k) for name, kind in KINDS.items()}
MAKERS |= {"kimi-released": released_kimi, "ling-released": released_ling}
FAMILIES = list(KINDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(MAKERS, lambda name: tmp_path_factory.mktemp(name))


# -- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi", "ling"])
def test_released_names_are_the_same_model(name: str, models: Models) -> None:
    prompt = [contracts.live(20, 9)]
    found, expected = (models.bench(n).ask(prompt).rows() for n in (f"{name}-released", name))
    assert torch.equal(found, expected)


def _other_gate(self: kimi_delta_attention.KimiDeltaAttention, f: Tensor) -> Tensor:
    """One gate a head, the mean of its channels': the gated delta rule."""
    gate = SOUND_GATE(self, f)
    return gate.mean(-1, keepdim=True).expand_as(gate)


SOUND_GATE = kimi_delta_attention.KimiDeltaAttention._gate


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_bite(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kimi_delta_attention.KimiDeltaAttention, "_gate", _other_gate)
    assert bites(contracts.live_error(models, name, "float64"), 1e-6)
    monkeypatch.undo()
    if name == "ling":  # pairs of channels half the width apart, as elsewhere
        monkeypatch.setattr(mla, "_halves", lambda x: x)
        assert bites(contracts.live_error(models, name, "float64"), 1e-6)
        monkeypatch.undo()
    monkeypatch.setattr(mla.LatentShape, "scale", 0.3)
    assert bites(contracts.live_error(models, name, "float64"), 1e-6)


def test_expanded_and_absorbed_attention_are_one(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of queries either is chosen; here one and the other is, for the same prompt."""
    for name in FAMILIES:
        both = models.bench(name).ask([contracts.live(90, 9)], max_tokens=3)
        for limit in (0, 10_000):
            monkeypatch.setattr(mla.LatentShape, "break_even", limit)
            one = models.bench(name).ask([contracts.live(90, 9)], max_tokens=3)
            assert contracts.difference(one, both) < TOLERANCE["float64"]
        monkeypatch.undo()
    large = mla.LatentShape(2304, 32, 512, 128, 64, 128)
    assert 100 < large.break_even < 300 and large.kept.key_dim + large.kept.value_dim == 576


# -- what is kept, and what is refused -------------------------------------------------------------------------------


def test_a_token_keeps_its_latent_and_one_rotary_key(models: Models) -> None:
    for name, size in (("kimi", 8), ("ling", 6)):
        layout = models.runner(name, "float64").pool.layout
        assert [(a.num_kv_heads, a.key_dim, a.value_dim) for a in layout.attention] == [(1, 8, 16)] * 2
        assert all(shape.transition_shape == (4, size, size) for shape in layout.linear)


@pytest.mark.parametrize("name", FAMILIES)
def test_rotary_keys_behind_a_gate_per_channel_are_refused_when_built(
    name: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a configuration calls it: here the model's own file gives its linear layers positions."""
    config = json.loads((models.folder(name) / "config.json").read_text())
    families.build(config)
    sound = Decoder.__init__

    def moving(self: Decoder, *args: Any, **options: Any) -> None:
        sound(self, *args, **options | {"linear_rotary": Rotary(4, 1e4)})

    monkeypatch.setattr(Decoder, "__init__", moving)
    with pytest.raises(UnsupportedModel, match="gate per channel"):
        families.build(config)
    with pytest.raises(UnsupportedModel, match="gate per channel"):
        models.load(name, "float64")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("kimi", {"linear_rope": True}, "gate per channel"),
    ("ling", {"linear_rope": True}, "gate per channel"),
    ("kimi", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("kimi", {"mla_use_nope": False}, "mla_use_nope = False"),
    ("kimi", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func = 'softmax'"),
    ("kimi", {"layer_types": ["linear_attention", "sliding_attention"] * 2}, "'sliding_attention'"),
    (
        "kimi",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
        "sort all 4",
    ),
    ("ling", {"score_function": "softmax"}, "score_function = 'softmax'"),
    ("ling", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'yarn'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, models: Models
) -> None:
    config = json.loads((models.folder(name) / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=message):
        families.build(config | changes)


def test_layer_counts_must_agree(models: Models) -> None:
    config = json.loads((models.folder("kimi") / "config.json").read_text())
    with pytest.raises(CheckpointError, match="3 mlp_layer_types for 4 layers"):
        families.build(config | {"mlp_layer_types": ["dense"] * 3})
    assert KIMI["num_hidden_layers"] == 4

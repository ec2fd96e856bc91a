"""Granite 4, Bamba, Nemotron-H, Falcon-H1, Zamba2: what counts in their logits, what is refused and what is kept.

Logits as such and the contracts are in ``test_every_family`` and ``test_one_layer``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.engine import models as families
from hypic.engine.layers import mamba2
from hypic.engine.runner import Runner
from hypic.errors import CheckpointError, UnsupportedModel
from tests.checkpoints_mamba import write
from tests.engine.models import oracle_contracts as contracts
from tests.engine.models.oracle_contracts import Models, bites

KINDS = {
    "granite": "granitemoehybrid",
    "bamba": "bamba",
    "nemotron": "nemotron_h",
    "falcon": "falcon_h1",
    "zamba": "zamba2",
}


def nemotron_by_letters(folder: Path) -> Path:
    """The pattern of the first generation's files, and their name for the size of a head."""
    write(folder, "nemotron_h")
    config = json.loads((folder / "config.json").read_text())
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": "ME*-M*", "num_hidden_layers": 6, "attention_head_dim": config["head_dim"]}
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": None}))
    return folder


MAKERS: dict[str, contracts.Make] = {name: lambda f, k=kind: write(f, k) for name, kind in KINDS.items()}
MAKERS["granite-limits"] = lambda f: write(f, "granitemoehybrid", time_step_limit=[0.5, 0.8])
FAMILIES = list(KINDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(MAKERS, lambda name: tmp_path_factory.mktemp(name))


# -- logits ----------------------------------------------------------------------------------------------------------


def _without_skip(self: mamba2.Mamba2Mixer, mixed: torch.Tensor, projected: mamba2.Projected) -> torch.Tensor:
    skip = self.D.clone()
    self.D.data.zero_()
    out = SOUND_OUTPUT(self, mixed, projected)
    self.D.data.copy_(skip)
    return out


SOUND_OUTPUT = mamba2.Mamba2Mixer.output


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_bite(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba2.Mamba2Mixer, "output", _without_skip)
    assert bites(contracts.live_error(models, name, "float64"), 1e-4)
    monkeypatch.undo()
    monkeypatch.setattr(mamba2, "convolve_rows", lambda x, w, b, p, n, bias=None: CONVOLVE(x, w, b, p, n))
    assert bites(contracts.live_error(models, name, "float64"), 1e-4)


CONVOLVE = mamba2.convolve_rows
# A number of the configuration, by what the model of a changed one must differ from the model as it is.
COUNTING = {
    "granite": ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"],
    "nemotron": ["routed_scaling_factor"],
    "falcon": [
        *("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_out_multiplier"),
        *("attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    ],
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in COUNTING.items() for field in fields])
def test_every_multiplier_counts(name: str, field: str, models: Models, tmp_path: Path) -> None:
    folder = MAKERS[name](tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: config[field] * 1.1}))
    changed = Models({name: lambda f: folder}, lambda n: tmp_path)
    prompt = [contracts.live(20, 9)]
    answer = changed.bench(name).ask(prompt)
    assert bites(contracts.error_to_truth(models, name, prompt, answer), 1e-5)


def test_time_steps_are_limited(models: Models) -> None:
    """The limits of the variant are reached: without them its logits are others."""
    folder = models.folder("granite-limits")
    config = json.loads((folder / "config.json").read_text())
    model = families.build(config)
    shape = model.layers[0].mixer.shape  # type: ignore[union-attr,index]
    assert shape.time_step_limit == (0.5, 0.8)  # type: ignore[union-attr]
    answer = models.bench("granite").ask([contracts.live(90, 9)])
    assert bites(contracts.error_to_truth(models, "granite-limits", [contracts.live(90, 9)], answer), 1e-5)


def test_nemotron_by_letters_is_the_same_model(tmp_path: Path, models: Models) -> None:
    older = Models({"older": nemotron_by_letters}, lambda name: tmp_path)
    prompt = [contracts.live(20, 9)]
    assert torch.equal(older.bench("older").ask(prompt).rows(), models.bench("nemotron").ask(prompt).rows())


# -- what is refused, and what is not loaded -------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ("granite", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("granite", {"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention'"),
    ("bamba", {"mlp_bias": True}, "mlp_bias = True"),
    ("nemotron", {"layers_block_type": ["linear_attention", "sliding_attention"]}, "sliding_attention"),
    ("nemotron", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
    ("nemotron", {"sliding_window": 128}, "sliding_window = 128"),
    ("falcon", {"mlp_bias": True}, "mlp_bias = True"),
    ("zamba", {"use_long_context": True}, "use_long_context = True"),
    ("zamba", {"add_bias_linear": True}, "add_bias_linear = True"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, models: Models
) -> None:
    config = json.loads((models.folder(name) / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=message):
        families.build(config | changes)


def test_heads_must_fill_the_layer(models: Models) -> None:
    config = json.loads((models.folder("bamba") / "config.json").read_text())
    with pytest.raises(CheckpointError, match="8 heads of 5 for 64"):
        families.build(config | {"mamba_d_head": 5})


def test_a_layer_keeps_one_number_a_head_of_a_transition(models: Models) -> None:
    loaded: Callable[[str], Runner] = lambda name: models.runner(name, "float64")  # noqa: E731
    shapes = {name: loaded(name).pool.layout for name in FAMILIES}
    assert {name: len(layout.linear) for name, layout in shapes.items()} == dict(
        zip(FAMILIES, (2, 2, 2, 2, 5), strict=True)
    )
    assert {name: len(layout.attention) for name, layout in shapes.items()} == dict(
        zip(FAMILIES, (2, 2, 2, 2, 3), strict=True)
    )
    assert all(shape.transition_shape == (8,) for layout in shapes.values() for shape in layout.linear)

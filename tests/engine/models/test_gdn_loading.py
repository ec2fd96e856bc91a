"""How these families' files are read: what is left out and reported, what is refused, and layouts that differ."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine import models
from hypic.engine.layers.gated_delta_net import DeltaNetShape
from hypic.engine.models import bailing_moe_linear, qwen3_next
from hypic.engine.runner import Runner
from hypic.errors import CheckpointError, UnsupportedModel
from tests.checkpoints_gdn import (
    RING,
    YARN,
    configure,
    fuse_experts,
    logits_of,
    olmo_hybrid,
    oracle,
    qwen3_5_moe,
    rewrite,
    ring,
)
from tests.checkpoints_gdn import qwen3_next as make_next
from tests.engine.expected import relative
from tests.engine.harness import Bench
from tests.engine.models import ring_latent
from tests.engine.prompts import flat, live


def load(folder: Path, dtype: str = "float64") -> Runner:
    return Runner.load(folder, EngineConfig(device="cpu", dtype=dtype, memory="64MiB", max_context=1024, max_running=4))


def answer(folder: Path) -> Tensor:
    return Bench(load(folder), max_context=1024).ask([live(40, 1)]).rows()


def adding(tensors: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda found: found | tensors


# -- what is left out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "config", "extra"),
    [
        (make_next, {}, ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"]),
        (qwen3_5_moe, {}, ["mtp.norm.weight", "model.visual.blocks.0.norm1.weight"]),
        (olmo_hybrid, {}, ["mtp.fc.weight"]),
        (ring, {"num_nextn_predict_layers": 1}, ["model.layers.5.eh_proj.weight", "model.layers.0.attention.slope"]),
    ],
    ids=["next", "moe", "olmo", "ring"],
)
def test_ignorable_tensors_are_left_out_and_reported_once(
    make: Callable[[Path], Path], config: dict[str, Any], extra: list[str], tmp_path: Path, caplog: Any
) -> None:
    folder = make(tmp_path)
    expected = answer(folder)
    rewrite(configure(folder, **config), adding({name: torch.ones(1000, 1000) for name in extra}))
    with caplog.at_level(logging.INFO, logger="hypic"):
        found = answer(folder)
    assert torch.equal(found, expected)
    reports = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(reports) == 1, reports
    assert f"{len(extra)} tensors, {4e6 * len(extra) / 1e9:.3f} GB" in reports[0]
    assert all(".".join(name.split(".")[:2]) in reports[0] for name in extra)


@pytest.mark.parametrize("make", [make_next, qwen3_5_moe, olmo_hybrid, ring])
@pytest.mark.parametrize("name", ["model.layers.0.extra.weight", "model.layers.9.input_layernorm.weight"])
def test_any_other_tensor_is_an_error(make: Callable[[Path], Path], name: str, tmp_path: Path) -> None:
    folder = rewrite(make(tmp_path), adding({name: torch.ones(4)}))
    with pytest.raises(CheckpointError, match="has no place"):
        load(folder)


@pytest.mark.parametrize(
    ("make", "gone"),
    [
        (make_next, "model.layers.0.mlp.experts.5.up_proj.weight"),
        (make_next, "model.layers.0.linear_attn.in_proj_ba.weight"),
        (olmo_hybrid, "model.layers.0.linear_attn.k_conv1d.weight"),
        (ring, "model.layers.1.mlp.gate.expert_bias"),
        (ring, "model.layers.1.attention.query_key_value.weight"),
    ],
)
def test_a_missing_tensor_is_an_error(make: Callable[[Path], Path], gone: str, tmp_path: Path) -> None:
    folder = rewrite(make(tmp_path), lambda found: {n: t for n, t in found.items() if n != gone})
    with pytest.raises(CheckpointError, match="lacks"):
        load(folder)


# -- what is refused -------------------------------------------------------------------------------------------------

SCHEMES: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, r"\(fp8\)"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"\(awq, 4 bits\)"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, r"\(compressed-tensors\)"),
    ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, r"\(affine, 4 bits\)"),
    ({"text_config": RING | {"quantization_config": {"quant_method": "gptq"}}}, r"\(gptq\)"),
]


@pytest.mark.parametrize(("changes", "named"), SCHEMES, ids=lambda x: x if isinstance(x, str) else "")
def test_quantised_checkpoints_are_refused_by_scheme(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named + r".*load the bf16 checkpoint"):
        models.build(RING | changes)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("org/Model-9B-FP8", "'org/Model-9B'"),
        ("org/Model-9B-Instruct-AWQ-INT4", "'org/Model-9B-Instruct'"),
        ("org/model-4bit", "'org/model'"),
        ("org/Model-w8a8", "'org/Model'"),
        ("org/Model-9B", "the bf16 checkpoint it was made from"),
        ("", "the bf16 checkpoint it was made from"),
    ],
)
def test_what_to_load_in_place_of_a_quantised_checkpoint(path: str, named: str) -> None:
    config = {"model_type": "qwen3_5_text", "_name_or_path": path, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UnsupportedModel, match=re.escape(f"(fp8), which is not supported; load {named}")):
        models.build(config)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_tensors_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    folder = rewrite(make_next(tmp_path), lambda found: found | {name: found[name].to(dtype)})
    with pytest.raises(UnsupportedModel, match="is quantised"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"architectures": ["BailingMoeV4ForCausalLM"]}, "BailingMoeV4ForCausalLM"),
        ({"score_function": "softmax"}, "score_function"),
        ({"use_qkv_bias": True}, "use_qkv_bias"),
        ({"layer_types": ["linear_attention"] * 2}, "2 layer_types for 5 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        models.build(RING | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"linear_silu": True}, "linear_silu"),
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim is 4"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"rope_scaling": YARN}, "rope_type 'yarn'"),
        ({"kv_lora_rank": "wide"}, "kv_lora_rank"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_ring_2_5_does_not_compute_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    models.build(ring_latent.LATENT)
    with pytest.raises(UnsupportedModel, match=named):
        models.build(ring_latent.LATENT | changes)


def test_layers_behind_the_last_of_ring_2_5_are_left_out(tmp_path: Path) -> None:
    name = "model.layers.4.eh_proj.weight"
    folder = rewrite(ring_latent.write(tmp_path, num_nextn_predict_layers=1), adding({name: torch.zeros(2, 2)}))
    load(folder)


# -- layouts ---------------------------------------------------------------------------------------------------------


def test_qkvz_of_another_shape_is_an_error(tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    for rows in (slice(0, -1), [*range(96), *range(4)]):
        whole = load_file(make_next(tmp_path) / "model.safetensors")[name]
        folder = rewrite(tmp_path, adding({name: whole[rows]}))
        with pytest.raises(CheckpointError, match="in_proj_qkvz.*has shape"):
            load(folder)


def test_qkvz_rows_are_a_permutation() -> None:
    shape = DeltaNetShape(32, num_k_heads=2, num_v_heads=6, head_k_dim=5, head_v_dim=3, conv_width=4, eps=1e-6)
    for rows, count in ((qwen3_next.qkvz_rows(shape), 2 * (2 * 5 + 2 * 3 * 3)), (qwen3_next.ba_rows(shape), 12)):
        assert sorted(row for part in rows.values() for row in part) == list(range(count))


def test_fused_and_single_experts_are_the_same_model(tmp_path: Path) -> None:
    single, fused = qwen3_5_moe(tmp_path / "single"), fuse_experts(qwen3_5_moe(tmp_path / "fused"))
    assert torch.equal(answer(single), answer(fused))


def _recut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The convolution cut into q, k and v, as released checkpoints have it; transformers cuts three equal parts."""
    cut = dict(tensors)
    for stem in sorted({name.rsplit(".", 2)[0] for name in tensors if "q_conv1d" in name}):
        whole = torch.cat([tensors[f"{stem}.{part}_conv1d.weight"] for part in "qkv"])
        for part, piece in zip("qkv", torch.split(whole, [24, 24, 96]), strict=True):
            assert len(tensors[f"{stem}.{part}_conv1d.weight"]) == 48, "the trap is set"
            cut[f"{stem}.{part}_conv1d.weight"] = piece
    # Released files name the norms of attention layers otherwise than transformers writes them.
    for name in [name for name in cut if re.search(r"layers\.[13]\.feedforward_layer_norm", name)]:
        cut[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = cut.pop(name)
    assert "model.layers.3.post_attention_layernorm.weight" in cut
    return cut


def test_olmo_convolutions_cut_in_either_way_are_the_same_model(tmp_path: Path) -> None:
    equal, right = olmo_hybrid(tmp_path / "equal"), rewrite(olmo_hybrid(tmp_path / "right"), _recut)
    found = answer(equal)
    assert torch.equal(found, answer(right))
    assert relative(found, logits_of(oracle(equal, torch.float64), flat([live(40, 1)]))) < 1e-5


def test_olmo_sizes_follow_from_the_hidden_size() -> None:
    config = {"model_type": "olmo_hybrid", "vocab_size": 8, "hidden_size": 3840, "intermediate_size": 8}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 30, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    with torch.device("meta"):
        model: Any = models.build(config)
    shape = model.delta
    assert (shape.num_k_heads, shape.num_v_heads, shape.head_k_dim, shape.head_v_dim) == (30, 30, 96, 192)
    assert model.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert shape.beta_scale == 2.0 and model.rotary is None


# -- Ring-linear's constants -----------------------------------------------------------------------------------------


def test_ring_layers() -> None:
    assert bailing_moe_linear.layer_types(RING) == [
        *["linear_attention", "full_attention"] * 2,
        "full_attention",
    ]
    kinds = bailing_moe_linear.layer_types({"num_hidden_layers": 20, "layer_group_size": 5})
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [4, 9, 14, 19]


@pytest.mark.parametrize(
    ("architecture", "offset"), [("BailingMoeLinearForCausalLM", 0), ("BailingMoeLinearV2ForCausalLM", -1), (None, -1)]
)
def test_ring_decays(architecture: str | None, offset: int) -> None:
    config = {"num_hidden_layers": 20, "num_attention_heads": 16}
    config |= {} if architecture is None else {"architectures": [architecture]}  # type: ignore[dict-item]
    for depth in (0, 7, 19):
        slopes = bailing_moe_linear.slopes(config, depth)
        factor = 1 - (depth + offset) / 19 + 1e-5
        assert slopes.tolist() == pytest.approx([2 ** (-0.5 * (h + 1)) * factor for h in range(16)], rel=1e-12)
    assert math.isclose(float(bailing_moe_linear.slopes(config, 0)[1] / 0.5), 1 - offset / 19 + 1e-5, rel_tol=1e-9)

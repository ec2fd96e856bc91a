"""A LoRA adapter merged at load equals the same change written into the checkpoint; all else is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.runner import Runner
from hypic.errors import CheckpointError, ConfigError, UnsupportedModel
from tests.checkpoints import minimax, qwen
from tests.checkpoints_gdn import fuse_experts, logits_of, olmo_hybrid, oracle, qwen3_5_moe, qwen3_next, rewrite, ring
from tests.engine.adapters import ALPHA, RANK, L, answer, baked, for_modules, load, matrices, write
from tests.engine.expected import TOLERANCE, relative
from tests.engine.harness import Bench
from tests.engine.prompts import few_segments, flat, live, seg

# A family, and modules whose place in the engine is a parameter of its own, a part of one, or several.
CASES: dict[str, tuple[Callable[..., Path], list[str]]] = {
    "qwen": (qwen, [f"{L}0.linear_attn.in_proj_qkv", f"{L}1.self_attn.q_proj", f"{L}2.mlp.down_proj", "lm_head"]),
    "next": (
        qwen3_next,
        [f"{L}0.linear_attn.in_proj_qkvz", f"{L}0.linear_attn.in_proj_ba", f"{L}2.mlp.experts.4.up_proj"],
    ),
    "moe": (qwen3_5_moe, [f"{L}0.mlp.experts.1.gate_proj", f"{L}1.mlp.shared_expert.up_proj", f"{L}1.mlp.gate"]),
    "olmo": (olmo_hybrid, [f"{L}0.linear_attn.{p}_proj" for p in "qkvgbao"] + [f"{L}1.self_attn.o_proj"]),
    "ring": (ring, [f"{L}0.attention.query_key_value", f"{L}1.attention.query_key_value", f"{L}1.attention.dense"]),
    "minimax": (minimax, [f"{L}0.self_attn.qkv_proj", f"{L}1.block_sparse_moe.experts.2.w3"]),
}


@pytest.mark.parametrize("name", CASES)
def test_merged_equals_baked(name: str, tmp_path: Path) -> None:
    make, modules = CASES[name]
    folder = make(tmp_path / "model")
    adapter = for_modules(folder, tmp_path / "adapter", modules)
    plain = answer(load(folder))
    merged = {dtype: answer(load(folder, adapter, dtype)) for dtype in TOLERANCE}
    expected = answer(load(baked(make(tmp_path / "baked"), adapter)))
    for dtype, found in merged.items():
        assert relative(found, expected) < TOLERANCE[dtype]
    assert relative(plain, expected) > 100 * TOLERANCE["float32"]


@pytest.mark.parametrize("name", ["next", "olmo", "ring"])
def test_every_module_matters(name: str, tmp_path: Path) -> None:
    """Leaving any one module out shows, so each is merged where it belongs."""
    make, modules = CASES[name]
    folder = make(tmp_path / "model")
    whole = answer(load(folder, for_modules(folder, tmp_path / "whole", modules)))
    for number, module in enumerate(modules):
        fewer = load_file(tmp_path / "whole" / "adapter_model.safetensors")
        pairs = {m: (fewer[f"base_model.model.{m}.lora_A.weight"], fewer[f"base_model.model.{m}.lora_B.weight"])
                 for m in modules if m != module}  # fmt: skip
        assert relative(answer(load(folder, write(tmp_path / str(number), pairs))), whole) > 1e-6


def test_merged_equals_transformers_with_the_change(tmp_path: Path) -> None:
    folder = qwen3_next(tmp_path / "model")
    modules = CASES["next"][1][:2]
    adapter = for_modules(folder, tmp_path / "adapter", modules)
    model = oracle(folder, torch.float64)
    parts = load_file(adapter / "adapter_model.safetensors")
    for module in modules:
        a, b = (parts[f"base_model.model.{module}.lora_{side}.weight"].double() for side in "AB")
        model.get_submodule(module).weight.data += ALPHA / RANK * b @ a
    assert relative(answer(load(folder, adapter)), logits_of(model, flat([live(40, 1)]))) < 1e-5


def test_fused_expert_files_take_adapters_of_single_experts(tmp_path: Path) -> None:
    module = f"{L}0.mlp.experts.1.gate_proj"
    folder = qwen3_5_moe(tmp_path / "model")
    adapter = for_modules(folder, tmp_path / "adapter", [module])
    expected = answer(load(folder, adapter))
    assert relative(answer(load(fuse_experts(folder), adapter)), expected) < 1e-12


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"lora_alpha": 5}, 5 / RANK),
        ({"alpha_pattern": {"mlp.down_proj": 7}}, 7 / RANK),
        ({"alpha_pattern": {"up_proj": 7}}, ALPHA / RANK),
    ],
    ids=str,
)
def test_scale(settings: dict[str, Any], scale: float, tmp_path: Path) -> None:
    modules = [f"{L}1.mlp.down_proj"]
    folder = qwen(tmp_path / "model")
    adapter = for_modules(folder, tmp_path / "adapter", modules, **settings)
    expected = answer(load(baked(qwen(tmp_path / "baked"), adapter, scale)))
    assert relative(answer(load(folder, adapter)), expected) < 1e-10
    wrong = answer(load(baked(qwen(tmp_path / "wrong"), adapter, scale * 1.5)))
    assert relative(wrong, expected) > 1e-4


def test_embeddings(tmp_path: Path) -> None:
    folder, module = qwen(tmp_path / "model"), "model.embed_tokens"
    a, b = torch.randn(RANK, 320), torch.randn(32, RANK)
    stem = f"base_model.model.{module}"
    write(tmp_path / "adapter", {})
    parts = {f"{stem}.lora_embedding_A": a, f"{stem}.lora_embedding_B": b, f"{stem}.base_layer.weight": torch.ones(2)}
    save_file(parts, tmp_path / "adapter" / "adapter_model.safetensors")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        product = ALPHA / RANK * b.double() @ a.double()
        return tensors | {f"{module}.weight": tensors[f"{module}.weight"].double() + product.T}

    expected = answer(load(rewrite(qwen(tmp_path / "baked"), change)))
    assert relative(answer(load(folder, tmp_path / "adapter")), expected) < 1e-10


# -- identity --------------------------------------------------------------------------------------------------------


def test_the_adapters_content_enters_every_key(tmp_path: Path) -> None:
    folder, modules = qwen(tmp_path / "model"), CASES["qwen"][1]
    one = for_modules(folder, tmp_path / "one", modules)
    copy = for_modules(folder, tmp_path / "elsewhere" / "copy", modules, lora_dropout=0.5)
    other, louder = (for_modules(folder, tmp_path / n, modules, **o) for n, o in (("o", {"seed": 1}), ("l", LOUD)))
    runners = [load(folder), *(load(folder, a) for a in (one, copy, other, louder))]
    assert runners[0].identity.adapter == "" and re.fullmatch(r"[0-9a-f]{64}", runners[1].identity.adapter)
    assert len({runner.identity.fingerprint for runner in runners}) == 1
    keys = [runner.identity.key((1, 2, 3), 8, None, False) for runner in runners]
    assert keys[1] == keys[2], "neither path nor training settings matter"
    assert len(set(keys)) == 4, "weights and scale do"


LOUD = {"lora_alpha": ALPHA + 1}


def test_segments_are_reused_under_an_adapter(tmp_path: Path) -> None:
    folder = ring(tmp_path / "model", "linear_attention")
    runner = load(folder, for_modules(folder, tmp_path / "adapter", [f"{L}0.attention.query_key_value"]))
    engine, pieces = Bench(runner, max_context=1024), few_segments()
    whole = engine.ask([live(4, 9), *pieces]), engine.ask([live(4, 9), seg(6, 3), *pieces])
    assert whole[1].outcomes.count("hit") == 3
    expected = answer_live(runner, [live(4, 9), seg(6, 3), *pieces])
    positions = sorted(whole[1].logits)
    assert relative(whole[1].rows(), expected[positions]) < 1e-10


def answer_live(runner: Runner, pieces: Any) -> Tensor:
    from hypic.engine.plan import Piece

    return Bench(runner, max_context=1024).ask([Piece(tuple(flat(pieces)), None)]).rows()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapters", [["a", "b"], ("a",), 5])
def test_several_adapters_are_refused(adapters: Any) -> None:
    with pytest.raises(ConfigError, match="one adapter"):
        EngineConfig(adapter=adapters)


def test_an_adapters_folder_may_be_a_path() -> None:
    assert EngineConfig(adapter=Path("a")).adapter == "a"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "LOHA"},
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"alora_invocation_tokens": [1]},
        {"layer_replication": [[0, 2]]},
        {"fan_in_fan_out": True},
    ],
    ids=lambda s: next(iter(s)),
)
def test_other_adapters_are_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    adapter = for_modules(folder, tmp_path / "adapter", [f"{L}0.mlp.up_proj"], **settings)
    with pytest.raises(UnsupportedModel, match=str(settings.get("peft_type", next(iter(settings))))):
        load(folder, adapter)


def _tied(f: Path) -> Path:
    return qwen(f, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("make", "module", "shape", "message"),
    [
        (qwen, f"{L}0.mlp.side_proj", (32, 32), "side_proj"),
        (qwen, f"{L}0.mlp.up_proj", (32, 31), "another model"),
        (qwen, "mtp.fc", (32, 32), "not run here"),
        (_tied, "lm_head", (320, 32), "tied"),
        (_tied, "model.embed_tokens", (320, 32), "ties"),
        (qwen3_next, f"{L}0.linear_attn.in_proj_ba", (7, 32), "another model"),
        (qwen3_next, f"{L}1.mlp.experts.0.up_proj", (24, 32), "does not have"),
    ],
)
def test_what_does_not_fit_is_an_error(
    make: Callable[[Path], Path], module: str, shape: tuple[int, int], message: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    adapter = write(tmp_path / "adapter", matrices({module: torch.Size(shape)}))
    with pytest.raises(UnsupportedModel, match=message):
        load(folder, adapter)


def test_incomplete_adapters_are_errors(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    with pytest.raises(CheckpointError, match="no LoRA matrices"):
        load(folder, write(tmp_path / "none", {}))
    alone = write(tmp_path / "alone", {})
    save_file({f"{L}0.mlp.up_proj.lora_A.weight": torch.ones(2, 32)}, alone / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="lacks one"):
        load(folder, alone)
    save_file({f"{L}0.mlp.up_proj.weight": torch.ones(2, 32)}, alone / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModel, match="no plain LoRA"):
        load(folder, alone)
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be read \(No such file or directory\);"):
        load(folder, folder)


def test_fused_experts(tmp_path: Path) -> None:
    """What PEFT calls target parameters: one pair for all experts, ranks side by side in B, experts in A."""
    folder, stem = qwen3_next(tmp_path / "model"), f"{L}0.mlp.experts"
    count, width, size = 6, 24, 32
    pairs = {f"{stem}.base_layer": (size, 2 * width), stem: (width, size)}
    made = {m: (torch.randn(count * RANK, i) * 0.2, torch.randn(o, RANK * count) * 0.2) for m, (i, o) in pairs.items()}
    adapter = write(tmp_path / "adapter", made, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for module, parts in ((f"{stem}.base_layer", ("gate", "up")), (stem, ("down",))):
            a, b = (t.double() for t in made[module])
            for e in range(count):
                delta = ALPHA / RANK * b[:, e::count] @ a[e * RANK : (e + 1) * RANK]
                for part, rows in zip(parts, delta.chunk(len(parts)), strict=True):
                    name = f"{stem}.{e}.{part}_proj.weight"
                    tensors[name] = tensors[name].double() + rows
        return tensors

    expected = answer(load(rewrite(qwen3_next(tmp_path / "baked"), change)))
    assert relative(answer(load(folder, adapter)), expected) < 1e-10
    assert relative(answer(load(folder)), expected) > 1e-3


DENSE = ["in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj", "lm_head"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("targets", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_peft_itself(targets: list[str], tmp_path: Path) -> None:
    """An adapter that PEFT made, saved and applied."""
    peft = pytest.importorskip("peft")
    folder = qwen3_next(tmp_path / "model", mlp_only_layers=[])
    config = peft.LoraConfig(r=4, lora_alpha=9, target_modules=targets, rank_pattern={"o_proj": 2})
    model = peft.get_peft_model(oracle(folder, torch.float64), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(tmp_path / "adapter")
    assert relative(answer(load(folder, tmp_path / "adapter")), logits_of(model.eval(), flat([live(40, 1)]))) < 1e-5

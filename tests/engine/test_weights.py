"""Loading checkpoints, and every way in which a folder can be wrong: one sentence, the value, the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine import weights
from hypic.engine.runner import Runner
from hypic.errors import CheckpointError, ConfigError, UnsupportedModel
from tests.checkpoints import minimax, qwen
from tests.engine.expected import Checkpoints

SMALL = {"device": "cpu", "memory": "8MiB", "max_context": 512, "max_running": 2}


def load(folder: Path, **settings: Any) -> Runner:
    return Runner.load(folder, EngineConfig(**SMALL | settings))


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(checkpoints.folder(name), tmp_path / name))

    return copied


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path, error: type[Exception] = CheckpointError, **settings: Any) -> str:
    """The message of the error: one sentence that ends in a way out."""
    with pytest.raises(error) as caught:
        load(folder, **settings)
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.endswith(".") and "\n" not in message and (";" in message or ":" in message), message
    return message


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen", "model.layers.0.linear_attn.A_log"),
        ("qwen", "model.layers.1.self_attn.q_norm.weight"),
        ("qwen", "lm_head.weight"),
        ("minimax", "model.layers.2.self_attn.out_proj.weight"),
    ],
)
def test_a_missing_tensor(name: str, tensor: str, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    edit_tensors(folder, lambda tensors: tensors.__delitem__(tensor))
    message = refusal(folder)
    own_name = tensor.split("attn.")[-1]
    assert "lacks" in message and own_name in message


def test_a_missing_expert(copy: Callable[[str], Path]) -> None:
    folder = copy("minimax")

    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[next(name for name in tensors if ".experts.3.w1" in name or "experts.gate_up" in name)]

    edit_tensors(folder, drop)
    assert "experts" in refusal(folder)


def test_several_missing_tensors_are_counted(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen")

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.3." in name]:
            del tensors[name]

    edit_tensors(folder, drop)
    assert "layers.3." in refusal(folder) and "more" in refusal(folder)


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_a_tensor_too_many(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.9.extra.weight": torch.zeros(2)}))
    assert "model.layers.9.extra.weight" in refusal(folder)


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_a_tensor_of_another_shape(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    message = refusal(folder)
    assert "model.norm.weight" in message and "[31]" in message and "[32]" in message


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_truncated_file(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(folder)
    file.write_bytes(b"no tensors")
    assert "model.safetensors" in refusal(folder)


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "sharded", num_shards=3)
    load(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index(content: str, tmp_path: Path) -> None:
    folder = qwen(tmp_path / "sharded", num_shards=2)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(folder)


def test_a_folder_without_weights_or_configuration(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("qwen")
    (folder / "model.safetensors").unlink()
    assert ".safetensors" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_an_unreadable_configuration(content: str, copy: Callable[[str], Path]) -> None:
    folder = copy("qwen")
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("model", ["", " ", 5, None])
def test_what_is_no_name_of_a_model(model: object) -> None:
    with pytest.raises(CheckpointError, match="the model's name is"):
        weights.locate(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_folder_that_is_not_there(model: str) -> None:
    with pytest.raises(CheckpointError, match="is no folder") as caught:
        weights.locate(model)
    assert repr(model) in str(caught.value)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt_17", "", None, "_config", "../qwen"])
def test_an_unknown_model_type(model_type: Any, copy: Callable[[str], Path]) -> None:
    folder = copy("qwen")
    edit_config(folder, model_type=model_type)
    message = refusal(folder, UnsupportedModel)
    assert repr(model_type) in message and "qwen3_5_text" in message and "minimax" in message


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "llama3", "linear"])
@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_positions_that_are_not_computed(name: str, rope_type: str, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    edit_config(folder, rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0})
    assert repr(rope_type) in refusal(folder, UnsupportedModel)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen", {"hidden_act": "gelu"}),
        ("qwen", {"attention_bias": True}),
        ("qwen", {"layer_types": ["sliding_attention"] * 4}),
        ("minimax", {"hidden_act": "relu"}),
        ("minimax", {"sliding_window": 128}),
        ("minimax", {"layer_types": ["mamba"] * 4}),
        ("qwen", {"quantization_config": {"quant_method": "fp8"}}),
    ],
)
def test_features_that_are_not_computed(name: str, changes: dict[str, Any], copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    edit_config(folder, **changes)
    message = refusal(folder, UnsupportedModel)
    value = next(iter(changes.values()))
    word = value[0] if isinstance(value, list) else value.get("quant_method") if isinstance(value, dict) else value
    assert str(word) in message


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "head_dim", "rms_norm_eps", "num_hidden_layers"])
def test_a_configuration_that_lacks_a_number(field: str, copy: Callable[[str], Path]) -> None:
    folder = copy("qwen")
    edit_config(folder, **{field: None})
    if field == "num_hidden_layers":
        edit_config(folder, layer_types=None)
    assert f"{field} = None" in refusal(folder)
    edit_config(folder, **{field: "many"})
    assert f"{field} = 'many'" in refusal(folder)


def test_memory_that_holds_no_request(checkpoints: Checkpoints) -> None:
    message = refusal(checkpoints.folder("qwen"), ConfigError, memory=1000, max_context=512)
    assert "1000 bytes" in message and "memory=" in message


def test_devices_that_are_not_there(checkpoints: Checkpoints) -> None:
    assert "'gpu7'" in refusal(checkpoints.folder("qwen"), ConfigError, device="gpu7")
    if not torch.cuda.is_available():
        assert "'cuda'" in refusal(checkpoints.folder("qwen"), ConfigError, device="cuda")


# -- what is loaded --------------------------------------------------------------------------------------------------


def parameters(runner: Runner) -> dict[str, Tensor]:
    return dict(runner.model.named_parameters())  # type: ignore[attr-defined]


def test_every_parameter_is_filled_in_the_type_asked_for(checkpoints: Checkpoints) -> None:
    for name in ("qwen", "minimax"):
        wide = parameters(load(checkpoints.folder(name), dtype="float64"))
        half = parameters(load(checkpoints.folder(name), dtype="bfloat16"))
        assert all(bool(p.isfinite().all()) and p.dtype == torch.float64 for p in wide.values())
        kinds = {parameter.dtype for parameter in half.values()}
        assert torch.bfloat16 in kinds and kinds <= {torch.bfloat16, torch.float32}
        assert all(torch.equal(half[n], wide[n].to(half[n].dtype)) for n in wide)
        kept_wide = {n.rsplit(".", 1)[-1] for n, p in half.items() if p.dtype == torch.float32}
        assert kept_wide == ({"A_log", "dt_bias"} if name == "qwen" else set())


def test_shards_and_wrappers_hold_the_same_model(tmp_path: Path, checkpoints: Checkpoints) -> None:
    plain = parameters(load(checkpoints.folder("qwen")))
    for folder in (qwen(tmp_path / "sharded", num_shards=3), checkpoints.folder("qwen-wrapper")):
        other = parameters(load(folder))
        assert other.keys() == plain.keys() and all(torch.equal(other[n], plain[n]) for n in plain)


def test_the_fingerprint_is_that_of_configuration_and_weights(tmp_path: Path, copy: Callable[[str], Path]) -> None:
    def fingerprint(folder: Path, **settings: Any) -> str:
        return load(folder, **settings).identity.fingerprint

    folder = copy("qwen")
    sound = fingerprint(folder)
    assert fingerprint(folder, dtype="float64") == sound == fingerprint(qwen(tmp_path / "again"))
    assert load(folder, dtype="float64").identity != load(folder, dtype="float32").identity
    # Files are hashed whole: weights that were cut into other files are another checkpoint.
    assert fingerprint(qwen(tmp_path / "sharded", num_shards=2)) != sound
    seen = {sound, fingerprint(qwen(tmp_path / "other", seed=1)), fingerprint(minimax(tmp_path / "minimax"))}
    edit_config(folder, rms_norm_eps=1e-5)
    seen.add(fingerprint(folder))
    folder = copy("qwen-tied")
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"][:1].add_(1e-6))
    seen |= {fingerprint(folder), fingerprint(qwen(tmp_path / "tied", tie_word_embeddings=True))}
    assert len(seen) == 6


def test_tied_embeddings_are_one_parameter(checkpoints: Checkpoints) -> None:
    model: Any = load(checkpoints.folder("qwen-tied")).model
    assert model.lm_head.weight is model.embed_tokens.weight
    plain: Any = load(checkpoints.folder("qwen")).model
    assert plain.lm_head.weight is not plain.embed_tokens.weight


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_dummy_weights_are_finite_and_told_by_their_seed(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy(name)
    (folder / "model.safetensors").unlink()
    made = [load(folder, load_format="dummy", seed=seed) for seed in (0, 0, 1)]
    assert all(bool(p.isfinite().all()) for p in parameters(made[0]).values())
    prints = [runner.identity.fingerprint for runner in made]
    assert prints[0] == prints[1] != prints[2]
    same, other = parameters(made[1])["embed_tokens.weight"], parameters(made[2])["embed_tokens.weight"]
    assert torch.equal(parameters(made[0])["embed_tokens.weight"], same) and not torch.equal(same, other)


@pytest.mark.parametrize(("asked", "expected"), [(None, 8192), (100, 100), (10**6, 8192)])
def test_the_context_is_the_models_or_what_is_asked_for(
    asked: int | None, expected: int, checkpoints: Checkpoints
) -> None:
    assert load(checkpoints.folder("qwen"), max_context=asked, memory="64MiB").max_context == expected

"""``hypic models``: the list, a folder of any size without reading a weight, a corpus and what fits; ``describe``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import hypic
from hypic import LLM, Policy, Segment
from hypic.checkpoints import describe, model_types, refused, token_counts
from hypic.config import EngineConfig
from hypic.engine.models import supported
from hypic.engine.runner import Runner
from hypic.engine.sizing import Need
from hypic.errors import CheckpointError, ConfigError
from hypic_apps.cli.main import main
from hypic_retriever import Splitter
from tests.apps.cli_files import DOCUMENTS, checkpoint, documents
from tests.apps.commands import one_sentence
from tests.checkpoints import qwen
from tests.checkpoints_kda import write

BIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("model")))


def headers_only(folder: Path, tensors: dict[str, tuple[list[int], int]]) -> Path:
    """A safetensors file that is as long as its header says, with nothing written behind the header (a sparse file)."""
    header, place = {}, 0
    for name, (shape, itemsize) in tensors.items():
        size = itemsize * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    content = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + place)
    return folder


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A model of 35 billion parameters, of which nothing but names and shapes is there: with a head for speculation."""
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    experts = {
        f"model.layers.{i}.mlp.experts.{part}": (shape, 2)
        for i in range(40)
        for part, shape in (("gate_up_proj", [256, 1024, 2048]), ("down_proj", [256, 2048, 512]))
    }
    other = {"model.embed_tokens.weight": ([248_320, 2048], 2), "mtp.layers.0.mlp.experts.gate_up_proj": ([10**9], 2)}
    return headers_only(tmp_path, experts | other)


# -- the list --------------------------------------------------------------------------------------------------------


def test_the_list_names_every_family_and_every_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["model_types"]) == supported() == sorted(kind.name for kind in model_types())
    assert found["refused"] == dict(refused()) and "jamba" in found["refused"]
    kimi = found["model_types"]["kimi_linear"]
    assert kimi == {"models": "Kimi-Linear", "linear": "KDA", "transition": "dense", "tested": "transformers"}


def test_the_list_says_what_t_is_and_why_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "MiniMax-Text-01, M1: Lightning, scalar T" in out and "Gated DeltaNet, dense T" in out
    for reason in refused().values():
        assert reason.replace("-", "") in out.replace("- ", "").replace("-", "")


# -- a folder --------------------------------------------------------------------------------------------------------


def test_a_description_is_what_the_engine_then_finds(model: str) -> None:
    info = hypic.describe(model)
    assert info == describe(model) and info.refusal is None
    with LLM(model, memory="64MiB", min_segment_tokens=0) as llm:
        assert info.loaded_bytes == info.weight_bytes == llm.stats()["weight_bytes"]
        assert info.max_context == llm.max_context and info.dtype == "float32"
        for words in (5, 30, 77):
            text = " ".join(["river"] * words)
            (report,) = llm.warm([Segment(text)])
            (segment,) = report.segments
            assert segment.num_bytes == info.segment_bytes(token_counts(model, [text])[0])


def test_types_count(model: str) -> None:
    half, full = describe(model, "bfloat16"), describe(model, "float32")
    assert half.token_bytes * 2 == full.token_bytes and half.transition_bytes == full.transition_bytes
    assert half.loaded_bytes < full.loaded_bytes < 2 * half.loaded_bytes
    assert describe(model, "float64").transition_bytes == 2 * full.transition_bytes


def test_latent_attention_keeps_its_latents(tmp_path: Path) -> None:
    info = describe(write(tmp_path / "kimi", "kimi_linear"), "float32")
    assert info.layers == {"linear_attention": 2, "full_attention": 2} and info.transition == "dense"
    assert info.token_bytes == 2 * (8 + 16) * 4 and info.transition_bytes == 2 * 4 * 8 * 8 * 4


def test_a_large_model_is_described_without_a_weight(big: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The geometry of Qwen3.5-35B-A3B: 60 MiB of states, 60 MiB of transitions, 20 KiB of K and V a token."""
    info = describe(big, "bfloat16")
    tail = 30 * 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert info.state_bytes == 60 * 2**20 + tail and info.transition_bytes == 60 * 2**20
    assert info.token_bytes == 20 * 2**10 and info.left_out == {"mtp.layers": 2 * 10**9}
    assert info.segment_bytes(512) == 120 * 2**20 + tail + 504 // 16 * 16 * 20 * 2**10 + 16 * 20 * 2**10
    assert 32e9 < info.num_parameters < 33e9 and 69e9 < info.loaded_bytes < 72e9
    assert main(["models", str(big), "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "30 linear attention, 10 full attention" in out and "mtp.layers.* (2.000 GB)" in out
    assert "segments, prefix, none" in out


def test_a_refused_checkpoint_is_described_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = qwen(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "jamba"}))
    info = describe(folder)
    assert info.refusal is not None and "Mamba-1" in info.refusal and not info.reuse and info.segment_bytes(99) == 0
    assert info.layers == {"linear_attention": 2, "full_attention": 2} and info.num_parameters > 0
    capsys.readouterr()  # what writing the checkpoint printed
    assert main(["models", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert "jamba" in out and "Mamba-1" in one_sentence(err)


def test_quantised_checkpoints_are_described_and_refused(tmp_path: Path) -> None:
    folder = qwen(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert "fp8" in str(describe(folder).refusal)


def test_folders_that_are_none(tmp_path: Path, model: str) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        describe(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        describe(tmp_path)
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        describe(tmp_path)
    with pytest.raises(ConfigError, match="int3"):
        describe(model, dtype="int3")


# -- a corpus --------------------------------------------------------------------------------------------------------


def test_a_corpus_is_counted(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = documents(tmp_path / "files")
    (folder / "short.txt").write_text("Ends.")
    arguments = ["models", model, "--corpus", str(folder), "--memory", "700KiB"]
    arguments += ["--max-context", "512", "--max-running", "2"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["corpus"]
    texts = [p.text for text in (*DOCUMENTS.values(), "Ends.") for p in Splitter().split(text)]
    counts, info = token_counts(model, texts), describe(model)
    cached = [count for count in counts if count >= Policy().shortest]
    assert found["num_files"] == 4 and found["num_passages"] == len(counts) and found["num_tokens"] == sum(counts)
    assert found["num_segments"] == len(cached) and found["num_live"] == len(counts) - len(cached) == 1
    assert found["segment_bytes"] == sum(info.segment_bytes(count) for count in cached)
    fits = found["fits"]
    assert 0 < fits["700KiB"]["at_rest"] < len(cached) == fits["64GiB"]["at_work"]
    assert fits["700KiB"] == asdict(info.fit(cached, EngineConfig(memory="700KiB", max_context=512, max_running=2)))
    assert found["memory_bytes"] == info.memory_for(cached, EngineConfig(max_context=512, max_running=2))
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"{len(cached)} segments" in out and f"{found['memory_bytes'] // 2**20}.0 MiB of memory" in out
    assert f"{fits['700KiB']['at_work']} to {fits['700KiB']['at_rest']} of {len(cached)} in 700KiB" in out


SETTINGS: dict[str, Any] = {"memory": "10MiB", "max_context": 1024, "max_running": 2, "min_segment_tokens": 0}
# Slots are full first where segments are short, and pages where they are long.
LENGTHS = {"short": lambda i: 5 + 7 * (i % 11), "long": lambda i: 90 + 3 * (i % 11)}


@pytest.mark.parametrize("length", LENGTHS)
def test_what_fits_is_what_an_engine_then_keeps(model: str, length: str) -> None:
    """Segments are warmed until one is evicted: that many, and no more, lie in memory at rest."""
    texts = [" ".join(["river", "stone"] * LENGTHS[length](i)) + f" {i}" for i in range(40)]
    fit = describe(model).fit(token_counts(model, texts), EngineConfig.of(**SETTINGS))
    with LLM(model, **SETTINGS) as llm:
        kept = []
        for text in texts[: fit.at_rest + 1]:
            llm.warm([Segment(text)])
            kept.append(llm.stats()["store"]["num_entries"])
    assert kept[: fit.at_rest] == list(range(1, fit.at_rest + 1)) and kept[-1] <= fit.at_rest
    assert 0 < fit.at_work < fit.at_rest < len(texts)
    assert fit.at_rest == fit.at_work + 1 or length == "long"


@pytest.mark.parametrize("length", LENGTHS)
def test_what_stays_at_work_stays(model: str, length: str) -> None:
    """Beside the longest request, all running states and one more encode; one segment more would not."""
    counts = [8 * LENGTHS[length](i) for i in range(40)]
    config = EngineConfig.of(**SETTINGS)
    fit, pool = describe(model).fit(counts, config), Runner.load(Path(model), config).pool
    pages = [-(-(count - 8) // 16) for count in counts]
    for number, holds in ((fit.at_work, True), (fit.at_work + 1, False)):
        need = Need(sum(pages[:number]) + 1024 // 16 + 1, number + 2 + 2, number + 1)
        assert pool.could_hold(need) is holds
    assert describe(model).fit(counts[0], config).at_work == describe(model).fit([counts[0]] * 999, config).at_work


def test_the_least_memory_is_the_least(model: str) -> None:
    info, counts = describe(model), [40 + 13 * (i % 7) for i in range(500)]
    config = EngineConfig(max_running=2)
    least = info.memory_for(counts, config)
    assert info.fit(counts, replace(config, memory=least)).at_work == 500
    assert info.fit(counts, replace(config, memory=least - 2**20)).at_work < 500
    assert least > sum(info.segment_bytes(count) for count in counts)


def test_a_budget_that_no_engine_starts_with_keeps_nothing(big: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixty-four running states of 61 MiB are four GiB."""
    fit = describe(big, "bfloat16").fit(512, EngineConfig(memory="1GiB"))
    assert fit.at_work == fit.at_rest == 0 and "too small for 64 running states" in str(fit.refusal)
    assert describe(big, "bfloat16").fit(512, EngineConfig(memory="16GiB")).at_work > 10
    assert main(["models", str(big), "--dtype", "bfloat16"]) == 0
    assert "no engine in 1GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--corpus", "nowhere.txt"], "nowhere.txt"),
        (["--memory", "many"], "'many' is not a size"),
        (["--dtype", "int3"], "int3"),
    ],
)
def test_bad_input(arguments: list[str], expected: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", model, *arguments]) == 2
    assert expected in one_sentence(capsys.readouterr().err)


def test_a_corpus_needs_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--memory", "8GiB"]) == 2
    assert "name its folder" in one_sentence(capsys.readouterr().err)

"""The Ring-like sibling: it trains, and what it exports is the model that the engine and the reference compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.types import Compose, Policy, Prompt, Segment
from hypic_apps.eval.driver import Subject
from hypic_apps.eval.noting import divergences
from hypic_apps.train import fit
from hypic_apps.train.__main__ import _parser
from hypic_apps.train.export import BUDGET_BYTES, export, load
from hypic_apps.train.families import FAMILIES, shape_of
from hypic_apps.train.initial import initialise
from hypic_apps.train.model import Shape, Trainee
from hypic_apps.train.render import Encoder
from hypic_apps.train.ring import RingShape
from hypic_apps.train.vocabulary import save
from tests.engine.models.gdn_reference import FamilyReference

SMALL = RingShape(
    vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=4, layer_group_size=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, group_norm_size=2,
)  # fmt: skip
SETTINGS = fit.Settings(minutes=1, total_minutes=1, learning_rate=1e-2, warmup_steps=1, compiled=False, graphed=False)
LONG = "Tolmaa is a small town in the north. Its capital is Tolmab. It is known for its green bridges. " * 3


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def trained(tmp_path: Path) -> Trainee:
    """After three steps on a CPU."""
    torch.set_num_threads(1)
    training = fit.Training(SMALL, SETTINGS, torch.device("cpu"), tmp_path)
    tokens, weights, losses = ids(4, 128), torch.ones(4, 128), []
    for number in range(3):
        training.step(tokens, weights, fit.learning_rate(SETTINGS, number, 0.0))
        losses.append(float(training.step.result[0]))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
    return training.model


def test_the_sibling_fits_the_same_budget() -> None:
    with torch.device("meta"):
        counts = [sum(p.numel() for p in Trainee(kind()).parameters()) for kind in FAMILIES.values()]
    assert all(count > 11e6 and 2 * count <= BUDGET_BYTES for count in counts)


def test_families_are_chosen_by_flag_and_by_model_type() -> None:
    options = _parser().parse_args(["fit", "--out", "x", "--family", "ring"])
    assert FAMILIES[options.family] is RingShape
    assert FAMILIES[_parser().parse_args(["probe", "--out", "x"]).family] is Shape
    assert shape_of(SMALL.config()) == SMALL and shape_of(Shape().config()) == Shape()
    with pytest.raises(ValueError, match="model_type 'llama' is not trained here"):
        shape_of({"model_type": "llama"})


def test_what_is_exported_is_what_the_reference_computes(trained: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    save(encoder.tokenizer, tmp_path / "tokenizer", 512)
    export(trained, tmp_path / "tokenizer", tmp_path / "out", torch.float32)
    tokens = ids(1, 192)
    with torch.no_grad():
        mine = trained.logits(tokens)[0].double()
    theirs = FamilyReference(tmp_path / "out").full(tokens[0].tolist()).logits
    assert (mine - theirs).norm() / theirs.norm() < 1e-4
    with torch.no_grad():  # a control: the comparison notices a head that decays otherwise
        trained.layers[0].decay[0] *= 1.5
        assert (trained.logits(tokens)[0].double() - theirs).norm() / theirs.norm() > 1e-2


def test_the_engine_loads_the_export_and_reuses_segments(trained: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    save(encoder.tokenizer, tmp_path / "tokenizer", 512)
    export(trained, tmp_path / "tokenizer", tmp_path / "out", torch.float32)
    settings = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 1024, "max_running": 2}
    subject = Subject(str(tmp_path / "out"), EngineConfig.of(**settings))
    assert subject.runner.pool.layout.linear[0].transition == "head"
    alone = Prompt([Segment(LONG.strip())], "What is it?", template=False)
    full = subject.ask([alone], Policy(reuse="none"), 4)[0]
    flat = [i for piece in subject.pieces(alone) for i in piece.ids]
    expected = FamilyReference(tmp_path / "out").full([*flat, *full.token_ids[:-1]]).logits[len(flat) - 1 :]
    assert torch.allclose(full.logprobs, expected.log_softmax(-1).float(), atol=1e-5)
    composes: tuple[Compose, ...] = ("transition", "addition", "last")
    for compose in composes:
        cached = subject.ask([alone], Policy(compose=compose, tail_seam=4), 1, [full.token_ids])[0]
        assert cached.report.segments[0].outcome in ("encoded", "hit")
        error = float(divergences(full.logprobs, cached.logprobs).mean())
        assert abs(error) < 1e-9 if compose == "transition" else error > 1e-7


def test_an_exported_folder_loads_again(trained: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    save(encoder.tokenizer, tmp_path / "tokenizer", 512)
    export(trained, tmp_path / "tokenizer", tmp_path / "out", torch.float32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "bailing_moe_linear"
    again = load(tmp_path / "out")
    assert again.shape == SMALL
    with torch.no_grad():
        assert torch.equal(again.logits(ids(1, 64)), trained.logits(ids(1, 64)))


def test_rows_do_not_see_each_other_nor_the_future() -> None:
    model = Trainee(SMALL)
    initialise(model, 3)
    tokens = ids(3, 128)
    with torch.no_grad():
        before = model.logits(tokens)
        changed = tokens.clone()
        changed[0], changed[1, 100:] = 5, 7
        after = model.logits(changed)
    assert torch.allclose(before[2], after[2], atol=1e-5)
    assert torch.allclose(before[1, :100], after[1, :100], atol=1e-5)
    assert not torch.allclose(before[1, 101:], after[1, 101:], atol=1e-2)

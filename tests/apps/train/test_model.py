"""The model in training: equal to transformers' Qwen3.5, rows independent, states carried, and it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hypic.engine.layers.conv import causal_conv
from hypic_apps.train import exam, fit
from hypic_apps.train.__main__ import main
from hypic_apps.train.export import BUDGET_BYTES, export, load, tensors_of
from hypic_apps.train.grid import shifted_conv
from hypic_apps.train.initial import initialise
from hypic_apps.train.model import Shape, Trainee
from hypic_apps.train.render import Encoder, Row, Weights
from hypic_apps.train.vocabulary import save

SMALL = Shape(
    vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=8,
)  # fmt: skip


@pytest.fixture
def model() -> Trainee:
    torch.set_num_threads(1)
    made = Trainee(SMALL)
    initialise(made, 3)
    return made


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def test_hypic_tiny_fits_its_budget() -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Trainee(Shape()).parameters())
    assert count > 11e6 and 2 * count <= BUDGET_BYTES


def test_logits_equal_those_of_transformers(model: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(encoder.tokenizer, tmp_path / "tokenizer", 512)
    export(model, tmp_path / "tokenizer", tmp_path / "model", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert type(theirs).__name__ == "Qwen3_5ForCausalLM"
    tokens = ids(2, 192)
    with torch.no_grad():
        mine, expected = model.logits(tokens), theirs(tokens).logits
    error = (mine - expected).norm() / expected.norm()
    assert error < 1e-4
    with torch.no_grad():
        model.layers[0].linear_attn.A_log += 0.5  # a control: the comparison notices one gate
        assert (model.logits(tokens) - expected).norm() / expected.norm() > 1e-3


def test_shards_hold_every_tensor_once(
    model: Trainee, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    monkeypatch.setattr("hypic_apps.train.export.SHARD_BYTES", 60_000)
    save(encoder.tokenizer, tmp_path, 512)
    size = export(model, tmp_path, tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 1 and index["metadata"]["total_size"] == size
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert all(index["weight_map"].pop(name) == shard.name for name in file.keys())  # noqa: SIM118
    assert not index["weight_map"]


def test_too_large_weights_are_refused(model: Trainee, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypic_apps.train.export.BUDGET_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000"):
        export(model, tmp_path, tmp_path / "model")


def test_rows_do_not_see_each_other_nor_the_future(model: Trainee) -> None:
    tokens = ids(3, 128)
    with torch.no_grad():
        before = model.logits(tokens)
        changed = tokens.clone()
        changed[0], changed[1, 100:] = 5, 7
        after = model.logits(changed)
    assert torch.allclose(before[2], after[2], atol=1e-5)
    assert torch.allclose(before[1, :100], after[1, :100], atol=1e-5)
    assert not torch.allclose(before[1, 101:], after[1, 101:], atol=1e-2)


def test_half_lives_run_from_16_tokens_to_thousands(model: Trainee) -> None:
    gates = [layer.linear_attn for layer in model.layers if hasattr(layer, "linear_attn")]
    decay = torch.cat([g.A_log.exp() * torch.nn.functional.softplus(g.dt_bias) for g in gates])
    half_lives = (0.6931 / decay).sort().values
    assert 15 < half_lives[0] < 17 and half_lives[-1] > 4000


def test_the_loss_counts_only_weighted_tokens(model: Trainee) -> None:
    tokens = ids(2, 64)
    weights = torch.zeros(2, 64)
    weights[:, 30] = 1.0
    expected = torch.nn.functional.cross_entropy(model.logits(tokens)[:, 29], tokens[:, 30])
    assert torch.allclose(model.loss(tokens, weights), expected, atol=1e-5)


def test_a_few_steps_make_the_loss_fall_and_state_resumes(model: Trainee, tmp_path: Path) -> None:
    settings = fit.Settings(
        minutes=1, total_minutes=1, learning_rate=1e-2, warmup_steps=5, compiled=False, graphed=False
    )
    training = fit.Training(SMALL, settings, torch.device("cpu"), tmp_path)
    tokens, weights = ids(4, 64), torch.ones(4, 64)
    losses = []
    for number in range(25):
        training.step(tokens, weights, fit.learning_rate(settings, number, 0.0))
        losses.append(float(training.step.result[0]))
    assert losses[-1] < 0.7 * losses[0]
    training.progress.step = 25
    training.save()
    again = fit.Training(SMALL, settings, torch.device("cpu"), tmp_path)
    assert again.resume() and again.progress.step == 25
    for one in (training, again):
        one.step(tokens, weights, 1e-3)
    assert float(again.step.result[0]) == pytest.approx(float(training.step.result[0]), rel=1e-5)


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    settings = fit.Settings(minutes=1, total_minutes=1, learning_rate=1.0, warmup_steps=10, decay_share=0.25)
    assert fit.learning_rate(settings, 0, 0.0) == pytest.approx(0.1)
    assert fit.learning_rate(settings, 500, 0.5) == 1.0
    assert fit.learning_rate(settings, 500, 0.875) == pytest.approx(0.5)
    assert fit.learning_rate(settings, 500, 1.0) == 0.0


def test_an_item_is_right_only_if_its_whole_answer_is(model: Trainee) -> None:
    tokens = ids(1, 64)
    with torch.no_grad():
        best = model.logits(tokens).argmax(-1)
    tokens[0, 41:43] = best[0, 40:42]
    with torch.no_grad():  # changing token 41 changes what follows it
        tokens[0, 42] = model.logits(tokens).argmax(-1)[0, 41]
    weights = torch.zeros(1, 64)
    weights[0, 41:43] = 1.0
    assert exam.right(model, exam.Paper(tokens, weights), torch.device("cpu")).tolist() == [True]
    tokens[0, 42] = (tokens[0, 42] + 1) % SMALL.vocab_size
    assert exam.right(model, exam.Paper(tokens, weights), torch.device("cpu")).tolist() == [False]


def test_greedy_answers_are_what_the_argmax_says(model: Trainee, encoder: Encoder) -> None:
    papers = exam.Papers.__new__(exam.Papers)
    papers.encoder = encoder
    row: Row = papers.row(["Tolmaa is a town."], "What is it?", "x")
    text = exam.answer(model, encoder, row, torch.device("cpu"), most=2)
    assert isinstance(text, str)
    counted = exam.ONLY_ANSWERS
    assert counted == Weights(0.0, 0.0, 1.0)


def test_the_shifted_convolution_is_the_engines_row_by_row() -> None:
    rows, length, channels, width = 3, 20, 8, 4
    torch.manual_seed(5)
    x = torch.randn(rows, length, channels, dtype=torch.float64)
    weight = torch.randn(channels, 1, width, dtype=torch.float64)
    places = torch.arange(length).repeat(rows)
    history = (places >= torch.arange(1, width)[:, None])[..., None]
    given = shifted_conv(x.flatten(0, 1), weight, history).view_as(x)
    padded = torch.cat([x.new_zeros(rows, width - 1, channels), x], dim=1)
    torch.testing.assert_close(given, causal_conv(padded, weight))
    leaking = shifted_conv(x.flatten(0, 1), weight, torch.ones_like(history)).view_as(x)
    assert not torch.allclose(leaking[1:, : width - 1], given[1:, : width - 1]), "rows see each other without it"


def test_an_exported_folder_loads_again(model: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    save(encoder.tokenizer, tmp_path / "tokenizer", 512)
    export(model, tmp_path / "tokenizer", tmp_path / "out", torch.float32)
    tokens = ids(1, 64)
    again = load(tmp_path / "out")
    assert again.shape == SMALL
    with torch.no_grad():
        assert torch.equal(again.logits(tokens), model.logits(tokens))


def test_weights_are_averaged_by_share(model: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    save(encoder.tokenizer, tmp_path / "tokenizer", 512)
    other = Trainee(SMALL)
    initialise(other, 5)
    for name, one in (("a", model), ("b", other)):
        export(one, tmp_path / "tokenizer", tmp_path / name)
    (tmp_path / "a" / "evaluation.json").write_text('{"seed": 1}')
    chosen = [f"--model={tmp_path / 'a'}", f"--other={tmp_path / 'b'}", "--share=0.25", f"--out={tmp_path / 'c'}"]
    assert main(["average", *chosen]) == 0
    a, b, c = (tensors_of(tmp_path / name) for name in "abc")
    assert set(c) == set(a)
    for name, tensor in c.items():
        expected = (0.75 * a[name].double() + 0.25 * b[name].double()).to(torch.bfloat16)
        torch.testing.assert_close(tensor.double(), expected.double(), rtol=2**-7, atol=1e-8)
    assert any(not torch.equal(c[name], a[name]) for name in c), "a control: nothing was averaged"
    assert json.loads((tmp_path / "c" / "evaluation.json").read_text())["averaged"]["share_of_another"] == 0.25
    assert load(tmp_path / "c").shape == SMALL


def exported(model: Trainee, encoder: Encoder, folder: Path) -> Path:
    save(encoder.tokenizer, folder.parent / "tokenizer", 512)
    export(model, folder.parent / "tokenizer", folder)
    return folder


def averaged(first: Path, second: Path, out: Path) -> int:
    return main(["average", f"--model={first}", f"--other={second}", f"--out={out}"])


def test_what_cannot_be_averaged_is_refused(model: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    first = exported(model, encoder, tmp_path / "a")
    with pytest.raises(SystemExit, match="nowhere' holds no exported model; name a folder"):
        averaged(first, tmp_path / "nowhere", tmp_path / "c")
    for changes in ({"intermediate_size": 64}, {"rope_theta": 5.0}):  # of the latter, tensors have the same shapes
        another = Trainee(replace(SMALL, **changes))
        initialise(another, 3)
        second = exported(another, encoder, tmp_path / "b")
        with pytest.raises(SystemExit, match="hold different models; average two of one shape"):
            averaged(first, second, tmp_path / "c")
    for weights in second.glob("*.safetensors"):
        weights.unlink()
    for pair in ((first, second), (second, first)):
        with pytest.raises(SystemExit, match="b' holds no exported model; name a folder"):
            averaged(*pair, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_folder_that_is_averaged_is_not_overwritten(model: Trainee, encoder: Encoder, tmp_path: Path) -> None:
    first = exported(model, encoder, tmp_path / "a")
    other = Trainee(SMALL)
    initialise(other, 5)
    second = exported(other, encoder, tmp_path / "b")
    (tmp_path / "link").symlink_to(first)
    before = {path: path.read_bytes() for folder in (first, second) for path in folder.iterdir()}
    for out in (first, second, tmp_path / "link"):
        with pytest.raises(SystemExit, match=r"is one of the two that are averaged; name another folder with --out"):
            averaged(first, second, out)
    assert before == {path: path.read_bytes() for folder in (first, second) for path in folder.iterdir()}


def test_folders_without_a_tokenizer_are_averaged_without_one(model: Trainee, tmp_path: Path) -> None:
    export(model, None, tmp_path / "a")
    assert averaged(tmp_path / "a", tmp_path / "a", tmp_path / "c") == 0
    assert load(tmp_path / "c").shape == SMALL and not (tmp_path / "c" / "tokenizer.json").exists()

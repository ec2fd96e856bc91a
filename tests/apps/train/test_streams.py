"""Training through segments: what the contextual stream computes is what the reference gives for the same chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hypic_apps.train import grid, model, streams
from hypic_apps.train.export import export
from hypic_apps.train.grid import Grid
from hypic_apps.train.initial import initialise
from hypic_apps.train.model import Shape, Trainee
from hypic_apps.train.render import Row
from hypic_apps.train.segments import LONGEST, Segmenting
from hypic_apps.train.streams import Streams, block_size, canonical_history, visible, with_previous
from tests.reference import Live, Reference, Result, SegmentLink

SMALL = Shape(
    vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=8, full_attention_interval=2,
)  # fmt: skip
TOLERANCE = 1e-10
# Live text and segments in turn: borders within chunks of 64 and at them, neighbours without glue, a short passage.
ROWS = (
    ((5, False), (40, True), (2, False), (33, True), (36, True), (3, False), (20, True), (70, True), (47, False)),
    ((64, True), (64, True), (1, False), (57, True), (70, False)),
)
LENGTH = 256


def spans(row: tuple[tuple[int, bool], ...]) -> Iterator[tuple[int, int, bool]]:
    """Where the parts of a row begin and end, and whether they are passages."""
    place = 0
    for num_tokens, is_passage in row:
        yield place, place + num_tokens, is_passage
        place += num_tokens


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 700, (len(ROWS), LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def marks(tokens: Tensor) -> Tensor:
    rows = [Row(i.numpy(), i.numpy(), tuple((a, b) for a, b, p in spans(row) if p))
            for i, row in zip(tokens, ROWS, strict=True)]  # fmt: skip
    return torch.stack([torch.from_numpy(Segmenting().marks(row)) for row in rows])


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    """Weights so large that layers matter, exactly representable in what is exported."""
    torch.set_num_threads(1)
    made = Trainee(SMALL)
    initialise(made, 3)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter *= 4.0
    return made.double()


@pytest.fixture(scope="module")
def expected(trainee: Trainee, tokens: Tensor, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """By row, what the reference gives token by token."""
    folder = tmp_path_factory.mktemp("reuse")
    export(trainee, None, folder, torch.float64)
    reference = Reference(folder)
    chains = [[_link(ids[a:b].tolist(), p) for a, b, p in spans(row)] for ids, row in zip(tokens, ROWS, strict=True)]
    return [reference.evaluate(chain) for chain in chains]


def _link(ids: list[int], is_passage: bool) -> Live | SegmentLink:
    return SegmentLink(ids) if is_passage and len(ids) >= 32 else Live(ids)


def error(logits: Tensor, expected: list[Result]) -> float:
    """Largest difference at live tokens and seams, over the largest logit."""
    pairs = [(row[result.positions], result.logits) for row, result in zip(logits, expected, strict=True)]
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs)


@torch.no_grad()
def test_logits_through_segments_are_those_of_the_reference(
    trainee: Trainee, tokens: Tensor, marks: Tensor, expected: list[Result]
) -> None:
    assert [len(result.positions) for result in expected] == [int((row <= 0).sum()) for row in marks]
    assert error(trainee.logits(tokens, marks), expected) < TOLERANCE
    assert error(trainee.logits(tokens), expected) > 1e-3, "without segments it is another answer"


def no_resets(patch: pytest.MonkeyPatch) -> None:
    """States run on into the next segment."""
    made = Streams.of

    def faulty(marks: Tensor, dtype: torch.dtype) -> Streams:
        sound = made(marks, dtype)
        return Streams(sound.interior, torch.zeros_like(sound.resets), sound.visible)

    patch.setattr(Streams, "of", faulty)


def long_history(patch: pytest.MonkeyPatch) -> None:
    """The convolution of a segment's first tokens sees what stands before it."""
    patch.setattr(grid, "canonical_history", lambda owner, width: canonical_history(torch.zeros_like(owner), width))


def seam_in_context(patch: pytest.MonkeyPatch) -> None:
    """An interior's first tokens see the seam as it is in the prompt, not as it was when they were encoded."""
    patch.setattr(model, "with_interiors", lambda both, interior: both)


def wide_attention(patch: pytest.MonkeyPatch) -> None:
    """A segment attends to what stands before it."""
    patch.setattr(streams, "visible", lambda owner: visible(torch.zeros_like(owner)))


def own_keys(patch: pytest.MonkeyPatch) -> None:
    """Attention sees interiors as they would be in context."""
    patch.setattr(grid, "contextual", lambda both, interior: both.chunk(2)[1])


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    fault.__name__: fault for fault in (no_resets, long_history, seam_in_context, wide_attention, own_keys)
}


@pytest.mark.parametrize("fault", FAULTS)
@torch.no_grad()
def test_logits_through_segments_bite(
    fault: str, trainee: Trainee, tokens: Tensor, marks: Tensor, expected: list[Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    FAULTS[fault](monkeypatch)
    assert error(trainee.logits(tokens, marks), expected) > 100 * TOLERANCE


@pytest.mark.parametrize("seam", [7, 9])
@torch.no_grad()
def test_a_seam_off_by_one_is_another_answer(
    seam: int, trainee: Trainee, tokens: Tensor, marks: Tensor, expected: list[Result]
) -> None:
    shifted = marks.clone()
    for row in shifted:
        for number in range(1, int(row.max()) + 1):
            places = (row.abs() == number).nonzero()[:, 0]
            row[places[:seam]], row[places[seam:]] = -number, number
    assert error(trainee.logits(tokens, shifted), expected) > 100 * TOLERANCE


@torch.no_grad()
def test_rows_without_segments_are_what_they_were(trainee: Trainee, tokens: Tensor) -> None:
    none, weights = torch.zeros_like(tokens), torch.rand(tokens.shape, dtype=torch.float64)
    torch.testing.assert_close(trainee.logits(tokens, none), trainee.logits(tokens), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trainee.loss(tokens, weights, none), trainee.loss(tokens, weights))


@torch.no_grad()
def test_the_loss_of_interiors_is_that_of_the_passage_alone(trainee: Trainee, tokens: Tensor, marks: Tensor) -> None:
    start, stop = 5, 45  # the first passage of the first row
    weights = torch.zeros(tokens.shape, dtype=torch.float64)
    weights[0, start + 9 : stop + 1] = 1.0  # and what follows it, which is never foretold from an interior
    alone = torch.nn.functional.pad(tokens[:1, start:stop], (0, 24))
    predicted = trainee.logits(alone)[0, 8 : stop - start - 1]
    wanted = torch.nn.functional.cross_entropy(predicted, tokens[0, start + 9 : stop])
    found = trainee.loss(tokens, weights, marks)
    assert float(abs(found - wanted)) < 1e-6  # losses are float32
    in_context = trainee.loss(tokens, weights)
    assert float(abs(in_context - wanted)) > 1e-4


def test_gradients_are_finite_with_several_segments_in_a_chunk(tokens: Tensor, marks: Tensor) -> None:
    made = Trainee(SMALL)
    initialise(made, 3)
    made.loss(tokens, torch.ones(tokens.shape), marks).backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in made.named_parameters()}
    assert all(grad is not None and bool(grad.isfinite().all()) and bool(grad.any()) for grad in found.values())


def test_gradients_are_quotients_of_differences(trainee: Trainee, tokens: Tensor, marks: Tensor) -> None:
    parameter = trainee.layers[0].linear_attn.in_proj_qkv.weight
    step = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (grad,) = torch.autograd.grad(_mean_square(trainee, tokens, marks), [parameter])
    values = []
    for size in (1e-6, -1e-6):
        with torch.no_grad():
            parameter += size * step
            values.append(float(_mean_square(trainee, tokens, marks)))
            parameter -= size * step
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(float((grad * step).sum()), rel=1e-4)


def _mean_square(trainee: Trainee, tokens: Tensor, marks: Tensor) -> Tensor:
    """A float64 number that depends on every token: the square mean of the logits at live tokens and seams."""
    return trainee.logits(tokens, marks)[marks <= 0].square().mean()


def test_blocks_of_canonical_attention_see_what_whole_rows_do(monkeypatch: pytest.MonkeyPatch, trainee: Trainee,
                                                              tokens: Tensor, marks: Tensor) -> None:  # fmt: skip
    with torch.no_grad():
        whole = trainee.logits(tokens, marks)
        monkeypatch.setattr(streams, "LONGEST", 128)  # no passage is longer
        assert block_size(LENGTH) == 128
        assert Streams.of(marks, torch.float32).visible.shape == (4, 1, 128, 256)
        torch.testing.assert_close(trainee.logits(tokens, marks), whole, rtol=1e-10, atol=1e-10)
        monkeypatch.setattr(streams, "LONGEST", 32)
        assert float((trainee.logits(tokens, marks) - whole).abs().max()) > 1e-8


def test_no_key_is_taken_from_another_row() -> None:
    blocks = with_previous(torch.arange(2 * 2 * LONGEST), 2, 2 * LONGEST, -1)
    assert (blocks[[0, 2], :LONGEST] == -1).all()
    assert torch.equal(blocks[3], torch.arange(2 * LONGEST, 4 * LONGEST))


def test_the_grid_of_both_streams_has_twice_the_rows(trainee: Trainee, marks: Tensor) -> None:
    plain = trainee.grid(len(ROWS), LENGTH, torch.device("cpu"))
    both: Grid = plain.doubled(marks, torch.float64)
    assert (both.rows, both.history.shape[1], len(both.angles.cos)) == (4, 4 * LENGTH, 4 * LENGTH)

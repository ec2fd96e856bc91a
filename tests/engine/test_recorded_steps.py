"""Steps through buckets, as graphs run them, compute what plain steps do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from hypic.config import EngineConfig
from hypic.engine.chain import Chain, RowLink
from hypic.engine.graphs import Graphs
from hypic.engine.kernel_arrays import arrays, decode_arrays
from hypic.engine.kernel_buffer import Sent
from hypic.engine.read_back import ReadBack, packed, unpacked
from hypic.engine.runner import Runner, _graphs
from hypic.engine.slot_table import SlotTable
from hypic_kernels.trust import LostDeviceError
from tests.engine.expected import TOLERANCE, relative
from tests.engine.prompts import few_segments, live, many_segments, seg
from tests.engine.recorded import SETTINGS
from tests.engine.test_kernel_steps import rows_chosen_from

LIMIT = TOLERANCE["float32"]
PROMPTS = [many_segments(), few_segments(), [live(33, 4)], [seg(90, 5), live(70, 6)]]


def error(plain: Runner, recorded: Runner) -> float:
    """The largest difference between logits that tokens were chosen from, cold, warm, and in another order."""
    found = 0.0
    for asked in (PROMPTS, PROMPTS[:1], PROMPTS[::-1]):
        expected, seen = (rows_chosen_from(loaded, asked, 5) for loaded in (plain, recorded))
        if any(len(seen[id]) != len(rows) for id, rows in expected.items()):
            return float("inf")  # one of them ended as not finite
        found = max(found, *(relative(torch.stack(seen[id]), torch.stack(rows)) for id, rows in expected.items()))
    return found


@pytest.mark.parametrize("name", ["qwen", "minimax", "qwen-conv-2", "qwen-attention"])
def test_steps_through_buckets_compute_what_plain_steps_do(name: str, load: Callable[[str, str], Runner]) -> None:
    recorded = load(name, "on")
    assert error(load(name, "off"), recorded) < LIMIT
    assert recorded.graphs is not None and recorded.graphs.num_replays > 8


def _unsent(self: SlotTable, row: int, context: np.ndarray, num_own: int) -> None:
    """What other steps have written is never brought to the table."""


def _unwritten(self: SlotTable, places: torch.Tensor, slots: torch.Tensor) -> None:
    """A step's own tokens never come into the table."""


@pytest.mark.parametrize(("method", "faulty"), [("send", _unsent), ("write", _unwritten)])
def test_a_table_that_lacks_slots_shows(
    method: str, faulty: Any, load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recorded = load("qwen", "off"), load("qwen", "on")
    monkeypatch.setattr(SlotTable, method, faulty)
    assert error(plain, recorded) > 100 * LIMIT


@pytest.mark.parametrize("conv_width", [1, 2, 4])
@pytest.mark.parametrize("num_chains", [1, 5])
def test_a_decode_step_is_packed_as_any_other(num_chains: int, conv_width: int) -> None:
    draw = np.random.default_rng(num_chains)
    chains = []
    for number in range(num_chains):
        position = int(draw.integers(1, 90))
        slots = draw.integers(0, 1000, position + 1)
        row = RowLink([int(draw.integers(0, 500))], position, slots[position:])
        initial = 0 if number == 2 else 3 * number + 1
        chains.append(Chain([row], slots, initial, 3 * number + 2, wants_logits=number != 1, table_row=number))
    expected, num_outputs = arrays(chains, conv_width, 16, gathers=False)
    expected = {
        name: expected[name] for name in expected if name not in ("slotted_elements", "copies_from", "copies_to")
    }
    found = decode_arrays(chains, conv_width, 16)
    assert num_outputs == num_chains and found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype == np.int32
        assert found[name].shape == values.shape and (found[name] == values).all(), name


def test_padding_is_whole_again_after_a_longer_step() -> None:
    blank = {"numbers": np.full(6, -7, dtype=np.int32), "pairs": np.full((3, 2), 9, dtype=np.int32)}
    sent = Sent(blank, torch.device("cpu"))
    for count in (6, 2, 0, 3):
        contents = {"numbers": np.arange(count, dtype=np.int32), "pairs": np.ones((count // 2, 2), dtype=np.int32)}
        sent.write(contents)
        assert sent["numbers"].tolist() == [*range(count), *[-7] * (6 - count)]
        assert sent["pairs"].tolist() == [[1, 1]] * (count // 2) + [[9, 9]] * (3 - count // 2)
    with pytest.raises(AssertionError, match="does not fit"):
        sent.write({"numbers": np.arange(7, dtype=np.int32)})


@pytest.mark.parametrize("num_flags", [0, 1, 5, 260])
def test_what_is_read_back_together_comes_apart_as_it_was(num_flags: int) -> None:
    flags, half = torch.arange(num_flags) % 3 == 0, torch.randn(3, 2).bfloat16()
    ids, scores = torch.tensor([2**40, -1, 7]), torch.randn(2, 5)
    tensors = [flags, ids, scores, half, scores.double()[:, ::2], torch.tensor(True)]
    for found, expected in zip(unpacked(packed(tensors), tensors), tensors, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.gpu
def test_what_a_gpu_is_at_is_read_back_once_it_is_done() -> None:
    numbers = torch.arange(6, device="cuda").view(2, 3)

    def begun() -> ReadBack:
        return ReadBack([numbers % 2 == 0, numbers * 2, numbers.half()])

    begun().wait()  # a kernel that is loaded at its first use holds up the host
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]  # cycles: the host is here long before
    read_back = begun()
    assert not read_back.has_come
    found = read_back.wait()
    assert read_back.has_come and not any(tensor.is_cuda for tensor in found)
    assert torch.equal(found[0], torch.arange(6).view(2, 3) % 2 == 0) and found[1].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert found[2].dtype == torch.float16 and found[2].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_slots_that_could_not_be_sent_are_sent_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for which there was no memory may be launched again with what its request holds."""
    table, context = SlotTable(1, 8, torch.device("cpu")), np.arange(5)
    table.flat, row = torch.full((9,), -1, dtype=torch.int32), table.take()

    def fails(*_: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("no pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails)
        with pytest.raises(torch.OutOfMemoryError):
            table.send(row, context, 1)
    table.send(row, context, 1)
    assert table.flat.tolist() == [0, 1, 2, 3, *[-1] * 5]
    table.flat.fill_(-1)
    table.send(row, np.arange(7), 1)
    assert table.flat.tolist() == [*[-1] * 5, 5, *[-1] * 3], "the step itself has written its own"


def test_a_device_that_is_lost_is_not_taken_for_steps_that_cannot_be_recorded(
    load: Callable[[str, str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load("qwen", "on")
    assert made.geometry is not None
    for fault in (RuntimeError("something asks the host"), LostDeviceError("nothing can run there any more")):

        def fails(*_: Any, fault: RuntimeError = fault) -> None:
            raise fault

        monkeypatch.setattr(Graphs, "record", fails)
        with pytest.raises(LostDeviceError) if isinstance(fault, LostDeviceError) else nullcontext():
            assert _graphs(made.model, made.pool, made.geometry, EngineConfig(**SETTINGS)) is None

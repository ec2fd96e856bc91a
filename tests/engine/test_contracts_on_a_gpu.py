"""Contracts in the type and by the kernels that a GPU takes; on a CPU by the kernels' references, with fewer lengths.

In bfloat16 an answer may be at most twice as far from float64 as that of transformers in the same type, for prompts
whose only segment has a length around every size of a block, cold, warm and recomputed, with heads of every size.
Thousands of tiny segments in one batch are what each of them is alone. A model may stand on any device.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.config import EngineConfig
from hypic.engine.layers.moe import MoE
from hypic.engine.runner import Runner
from hypic.engine.segment import CachedSegment
from hypic.types import Policy
from tests import checkpoints_mamba
from tests.checkpoints import exact_oracle_logits, minimax, oracle, qwen
from tests.checkpoints_gdn import exact_logits, qwen3_5_moe
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.models.every_model import BUILDERS, OWN, TRUTHS
from tests.engine.prompts import POLICY, Pieces, few_segments, flat, live, many_segments, seg
from tests.engine.test_kernel_steps import rows_chosen_from

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FULL = Policy(reuse="none")
TAIL = 32


def with_heads(folder: Path, attention: int, key: int, value: int) -> Path:
    sizes: dict[str, Any] = {"head_dim": attention, "linear_key_head_dim": key, "linear_value_head_dim": value}
    return qwen(folder, dtype=BF16, num_hidden_layers=2, **sizes)


Truth = Callable[[Path, Sequence[int]], Tensor]
# One group: transformers norms each group since some version behind 5.17, and all of them together before.
GROUPLESS = {
    name: partial(checkpoints_mamba.write, kind=name, mamba_n_groups=1) for name in ("bamba", "granitemoehybrid")
}
REST = sorted(set(BUILDERS) - {*OWN, "qwen3_5_text", "qwen3_5_moe_text", "minimax"})
MODELS: dict[str, tuple[Callable[[Path], Path], Truth]] = {
    "qwen": (partial(qwen, dtype=BF16), exact_oracle_logits),
    "minimax": (partial(minimax, dtype=BF16), exact_oracle_logits),
    "moe": (qwen3_5_moe, exact_logits),
    "heads-64": (partial(with_heads, attention=64, key=64, value=64), exact_oracle_logits),
    "heads-96": (partial(with_heads, attention=96, key=96, value=192), exact_oracle_logits),
    "heads-128": (partial(with_heads, attention=128, key=128, value=128), exact_oracle_logits),
    "heads-192": (partial(with_heads, attention=192, key=192, value=192), exact_oracle_logits),
    "heads-256": (partial(with_heads, attention=256, key=128, value=256), exact_oracle_logits),
    # Of the rest of the families, whose checkpoints are in float32: weights are rounded for both.
    **{name: (GROUPLESS.get(name, BUILDERS[name]), TRUTHS.get(name, checkpoints_mamba.exact_logits)) for name in REST},
}
# Lengths of segments around tiles, chunks, pages and the least of a run; a seam of 8 comes off.
LENGTHS = {
    "cpu": (17, 40, 73),
    "cuda": (15, 16, 17, 23, 24, 25, 39, 40, 41, 63, 64, 65, 71, 72, 73, 127, 128, 129, 136, 137,
             1015, 1023, 1024, 1025, 1031, 1032, 1033),
}  # fmt: skip


def engine_on(folder: Path, device: str, dtype: str) -> Runner:
    config = EngineConfig(device=device, dtype=dtype, graphs=False, memory="256MiB", max_context=4096, max_running=4)
    return Runner.load(folder, config)


ORACLE = """
import sys
sys.modules["fla"] = None  # transformers would run its kernels on a CPU, where they cannot
import torch
from pathlib import Path
from tests.engine.test_contracts_on_a_gpu import MODELS
name, folder, prompts, out = sys.argv[1:]
torch.save([MODELS[name][1](Path(folder), ids) for ids in torch.load(prompts)], out)
"""


def truths(name: str, folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of every prompt the logits in float64, by a process that does not know of fla."""
    if importlib.util.find_spec("fla") is None:
        return [MODELS[name][1](folder, ids) for ids in prompts]
    given, out = folder.parent / "prompts.pt", folder.parent / "truths.pt"
    torch.save([list(ids) for ids in prompts], given)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *filter(None, sys.path)])
    command = [sys.executable, "-c", ORACLE, name, str(folder), str(given), str(out)]
    subprocess.run(command, check=True, cwd=root, env={**os.environ, "PYTHONPATH": paths})
    found: list[Tensor] = torch.load(out)
    return found


def error_of(rows: Tensor, exact: Tensor) -> float:
    return float((rows.cpu().double() - exact).norm() / exact.norm())


def transformers_of(name: str, folder: Path) -> Any:
    """The same checkpoint in bfloat16."""
    return (checkpoints_mamba.oracle if name in REST else oracle)(folder, BF16)


def rms(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def last(answer: Answer) -> Tensor:
    """Logits of the last tokens of a prompt, which every way of answering it runs."""
    return answer.rows(sorted(answer.logits)[-TAIL:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_near_float64(name: str, device: str, tmp_path: Path) -> None:
    """Twice over all lengths; three times at one length alone, but for experts: one that is chosen otherwise, by scores
    that rounding puts in another order, moves a short prompt further than all else.

    A control: an answer to a prompt with one other token is twice as far off as is allowed.
    """
    folder = MODELS[name][0](tmp_path / "model")
    loaded, model = engine_on(folder, device, "bfloat16"), transformers_of(name, folder).to(device)
    lengths = LENGTHS[device][:: 3 if name in REST and device == "cuda" else 1]
    has_experts = any(isinstance(module, MoE) for module in loaded.model.modules())  # type: ignore[attr-defined]
    ways = {"full": FULL, "cold": POLICY, "warm": POLICY}
    ours, theirs, wrong = {way: list[float]() for way in ways}, list[float](), list[float]()
    prompts = [[seg(length, 1), live(TAIL, 2)] for length in lengths]
    for length, pieces, known in zip(lengths, prompts, truths(name, folder, list(map(flat, prompts))), strict=True):
        other = [seg(length, 1), live(1, 3), live(TAIL - 1, 4)]
        ids, exact = flat(pieces), known[-TAIL:]
        with torch.no_grad():
            found = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -TAIL:]
        theirs.append(error_of(found, exact))
        bench = Bench(loaded, kernels="on")
        for way, policy in ways.items():
            ours[way].append(error_of(last(bench.ask(pieces, policy)), exact))
        wrong.append(error_of(last(bench.ask(other, POLICY)), exact))
        bench.assert_sound()
    for way, errors in ours.items():
        assert 0 < rms(errors) <= 2 * rms(theirs), way
        ratios = dict(zip(lengths, (a / b for a, b in zip(errors, theirs, strict=True)), strict=True))
        assert has_experts or max(ratios.values()) <= 3, (way, ratios)
    assert min(wrong) > 2 * 2 * rms(theirs)


def entries_of(bench: Bench) -> dict[tuple[int, ...], CachedSegment]:
    return {entry.ids: entry for entry in bench.store if not entry.is_snapshot}


def kept_of(bench: Bench, entries: Sequence[CachedSegment]) -> list[Tensor]:
    """All that is kept of entries, in their order: maps and tails of every linear layer, keys and values."""
    pool, device = bench.pool, bench.pool.device
    states = torch.tensor([entry.state_slot for entry in entries], device=device)
    transitions = torch.tensor([entry.transition_slot for entry in entries], device=device)
    slots = torch.tensor([slot for entry in entries for slot in entry.kv_slots.tolist()], device=device)
    found: list[Tensor] = []
    for layer in range(len(pool.layout.linear)):
        maps = pool.read_map(layer, states, transitions)
        found += [maps.transition, maps.end_state, pool.tails[layer][states]]
    for layer in range(len(pool.layout.attention)):
        found += pool.read_kv(layer, slots)
    return [tensor for tensor in found if tensor.numel()]


@pytest.mark.parametrize(("device", "count"), [("cpu", 150), pytest.param("cuda", 5000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_tiny_segments_in_one_cold_batch(
    name: str, device: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what it is when it is encoded among few others in plain torch; some are then asked for."""
    known = Checkpoints(lambda name: tmp_path, device)
    loaded = known.runner(name, "float32")
    sizes = (3 * count + 300, 2 * count + 100, count + 8)
    pieces = [seg(9 + n % 5, 1000 + n) for n in range(count)]
    settings: dict[str, Any] = {"sizes": sizes, "max_context": 4096, "max_running": 20}
    at_once = Bench(loaded, kernels="on", max_step_tokens=2**17, **settings)
    plain = Bench(loaded, kernels="off", max_step_tokens=512, **settings)
    for bench in (at_once, plain):
        for start in range(0, count, 300):
            bench.add([*pieces[start : start + 300], live(1, 1)], warm=True)
        bench.run()
    assert at_once.num_steps == 1 < plain.num_steps
    found, expected = entries_of(at_once), entries_of(plain)
    assert len(found) == count and found.keys() == expected.keys()
    kept = [kept_of(bench, [entries[ids] for ids in found]) for bench, entries in ((at_once, found), (plain, expected))]
    assert max(map(relative, *kept)) < TOLERANCE["float32"]
    shifted = kept_of(plain, [*[expected[ids] for ids in found][1:], expected[next(iter(found))]])
    assert max(map(relative, kept[0][:2], shifted[:2])) > 100 * TOLERANCE["float32"]
    asked: Pieces = [live(3, 1), pieces[0], pieces[count // 2], live(2, 2), pieces[-1], live(5, 3)]
    answer = at_once.ask(asked)
    assert answer.outcomes == ["hit"] * 3
    assert answer.error_where_run(known.expected(name, asked)) < TOLERANCE["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen", "minimax", "moe"])
def test_a_model_on_a_device_that_is_not_the_current_one(name: str, tmp_path: Path) -> None:
    """Step by step, from recorded steps and cold; a CPU is the truth, in float32 and plain torch."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    makers: dict[str, Callable[[Path], Path]] = {"qwen": qwen, "minimax": minimax, "moe": qwen3_5_moe}
    folder = makers[name](tmp_path / "model")
    settings: dict[str, Any] = {"dtype": "float32", "memory": "256MiB", "max_context": 4096, "max_running": 8}
    assert torch.cuda.current_device() == 0
    there = Runner.load(folder, EngineConfig(device="cuda:1", **settings))
    here = Runner.load(folder, EngineConfig(device="cpu", kernels="off", **settings))
    assert there.graphs is not None and torch.cuda.current_device() == 0
    prompts = [many_segments(), few_segments(), [live(33, 4)], [seg(90, 5), live(70, 6)], [seg(1100, 7), live(9, 8)]]
    for asked in (prompts, prompts[:1], list(reversed(prompts))):
        expected, found = (rows_chosen_from(loaded, asked, 4) for loaded in (here, there))
        for id, rows in expected.items():
            assert relative(found[id][0].cpu(), rows[0]) < TOLERANCE["float32"]
    assert there.graphs.num_replays > 8 and torch.cuda.memory_allocated(0) < torch.cuda.memory_allocated(1)

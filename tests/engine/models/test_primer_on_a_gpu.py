"""Segments behind a primer by the kernels of a GPU, for every model type, against the same text run as one in float64.

Encodes then have a state and keys before them: runs begin with a state, rows are no longer whole. Long segments take
the kernels' runs, a few hundred tokens every block; many at once stand beside each other in one step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hypic.config import EngineConfig
from hypic.engine.plan import Piece
from hypic.engine.runner import Runner
from hypic.types import Segment
from tests.checkpoints import random_ids
from tests.engine.harness import Bench
from tests.engine.models.every_model import NAMES, Every
from tests.engine.models.test_every_primer import Contents
from tests.engine.prompts import POLICY, live, seg

pytestmark = pytest.mark.gpu
PRIMER = tuple(random_ids(203, 91))
LENGTHS = (17, 41, 73, 300)
SIZES = (400, 64, 32)
# How far off what is kept may be, as a multiple of the type's own error and beside it: rounding differs a little.
TIMES, ROUNDING = 3.0, 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Every:
    return Every(lambda name: tmp_path_factory.mktemp(name.replace(" ", "-")))


def engine(models: Every, name: str, device: str, dtype: str, **options: Any) -> Bench:
    config = EngineConfig(device=device, dtype=dtype, memory="64MiB", max_context=2048, max_running=4, graphs=False)
    loaded = Runner.load(models.folder(name), config)
    return Bench(loaded, sizes=SIZES, max_context=2048, max_running=4, **options)


def kept(bench: Bench, pieces: list[Piece]) -> list[Contents]:
    """Of segments that are encoded in one step."""
    bench.ask([*pieces, live(9, 2)])
    found = [{name: part.double().cpu() for name, part in bench.contents(piece).items()} for piece in pieces]
    bench.assert_back_to_start()
    return found


def as_one(bench: Bench, pieces: list[Piece]) -> list[Contents]:
    """The same of texts that begin with the primer."""
    policy, found = POLICY.with_(seam=len(PRIMER) + POLICY.seam), []
    for piece in pieces:
        one = Piece((*PRIMER, *piece.ids), Segment(f"one {len(piece.ids)}"))
        bench.ask([one, live(9, 2)], policy)
        found.append({name: part.double().cpu() for name, part in bench.contents(one, policy).items()})
    return found


def worst(found: list[Contents], expected: list[Contents]) -> float:
    return max(
        float((mine[part] - theirs[part]).norm() / theirs[part].norm().clamp_min(1e-30))
        for mine, theirs in zip(found, expected, strict=True)
        for part in theirs
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_behind_a_primer(name: str, dtype: str, models: Every) -> None:
    """As near to float64 as primer and segment run as one text in the same type; another primer is far off."""
    pieces = [seg(length, length) for length in LENGTHS]
    truth = as_one(engine(models, name, "cpu", "float64"), pieces)
    allowed = TIMES * worst(as_one(engine(models, name, "cuda", dtype), pieces), truth) + ROUNDING
    assert worst(kept(engine(models, name, "cuda", dtype, primer=PRIMER), pieces), truth) < allowed
    assert worst(kept(engine(models, name, "cuda", dtype, primer=PRIMER, max_step_tokens=96), pieces), truth) < allowed
    if dtype == "float32":
        other = (*PRIMER[:100], *PRIMER[101:], 5)
        assert worst(kept(engine(models, name, "cuda", dtype, primer=other), pieces), truth) > 10 * allowed
    torch.cuda.empty_cache()

"""The reference against transformers: full recompute, and chains where theory says they equal it.

The oracle is transformers' model in float64. It computes norms, rotary angles, the router and the delta
rule in float32 all the same, so agreement is asserted to 1e-5 relative (1e-12 where those casts are
widened); each deliberate fault that applies to a model must exceed the tolerance a hundredfold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import combinations, permutations
from pathlib import Path

import pytest
import torch

from tests.checkpoints import exact_oracle_logits, minimax, oracle_logits, qwen, random_ids
from tests.reference import Faults, LinearEnd, LinearEntry, Live, Reference, SegmentLink
from tests.reference.test_algebra import relative

BF16 = torch.bfloat16
ORACLE = 1e-5
OWN = 1e-10
Make = Callable[[Path], Path]
Links = Sequence[Live | SegmentLink]


MODELS: dict[str, Make] = {
    "qwen": qwen,
    "qwen-tied": lambda f: qwen(f, tie_word_embeddings=True),
    "qwen-wrapper": lambda f: qwen(f, wrapper=True),
    "qwen-wrapper-tied": lambda f: qwen(f, wrapper=True, tie_word_embeddings=True),
    "qwen-deep-bf16": lambda f: qwen(f, num_hidden_layers=6, full_attention_interval=3, dtype=BF16, num_shards=3),
    "qwen-wide": lambda f: qwen(f, hidden_size=64, head_dim=16, linear_num_value_heads=6, linear_value_head_dim=20),
    "qwen-conv-2": lambda f: qwen(f, linear_conv_kernel_dim=2),
    "qwen-linear": lambda f: qwen(f, single="linear_attention"),
    "qwen-attention": lambda f: qwen(f, single="full_attention"),
    "minimax": minimax,
    "minimax-tied": lambda f: minimax(f, tie_word_embeddings=True),
    "minimax-bf16": lambda f: minimax(f, dtype=BF16, num_hidden_layers=5, num_shards=2),
    "minimax-linear": lambda f: minimax(f, single="linear_attention"),
    "minimax-attention": lambda f: minimax(f, single="full_attention"),
}
STATE = [Faults(drop_transition=True)]
CONV = [Faults(empty_conv_tail=True)]
SEAM = [Faults(shift_seam_by=1), Faults(shift_seam_by=-1)]
PLACE = [Faults(shift_position_by=1), Faults(shift_position_by=-1), Faults(skip_rotation=True)]
FAULTS = {
    "qwen": STATE + CONV + SEAM + PLACE,
    "qwen-linear": STATE + CONV + SEAM,
    "qwen-attention": SEAM + PLACE,
    "minimax": STATE + SEAM + PLACE,
    "minimax-linear": STATE + SEAM,
    "minimax-attention": SEAM + PLACE,
}


def fault_name(faults: Faults) -> str:
    """The one field that is set, for a test's name."""
    return next(f"{name}={value}" for name, value in asdict(faults).items() if value)


BITES = [
    pytest.param(name, fault, id=f"{name}-{fault_name(fault)}") for name, faults in FAULTS.items() for fault in faults
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return get


def segment(num_tokens: int, seed: int, seam: int = 8) -> SegmentLink:
    return SegmentLink(random_ids(num_tokens, seed), seam)


def flat(links: Links) -> list[int]:
    return [i for link in links for i in link.ids]


def many_segments(seam: int = 8) -> Links:
    """Live text, segments around every border (one twice, one below the seam, neighbours without glue), a tail."""
    lengths = (20, 9, 1, 10, 64, 8, 11, 20, 65)
    links: list[Live | SegmentLink] = [Live(random_ids(7, 100))]
    for i, length in enumerate(lengths):
        links.append(segment(length, seed=length, seam=seam))
        links += [Live(random_ids(2, 200 + i))] if i % 2 else []
    return [*links, Live(random_ids(12, 300))]


def only_segment() -> Links:
    return [segment(40, 1), Live(random_ids(15, 2))]


@pytest.mark.parametrize("name", MODELS)
def test_full_recompute_equals_transformers(name: str, folder: Callable[[str], Path]) -> None:
    ids = random_ids(150)
    logits = Reference(folder(name)).full(ids).logits
    assert relative(logits, oracle_logits(folder(name), ids)) < ORACLE
    assert logits.std() > 0.3, "logits must not be degenerate"
    swapped = [ids[1], ids[0], *ids[2:]]
    last = Reference(folder(name)).full(swapped).logits[-1]
    assert relative(last, logits[-1]) > OWN * 100, "the far past must matter"


@pytest.mark.parametrize("name", MODELS)
def test_formulas_equal_transformers_to_rounding(name: str, folder: Callable[[str], Path]) -> None:
    ids = random_ids(150)
    expected = exact_oracle_logits(folder(name), ids)
    assert relative(Reference(folder(name)).full(ids).logits, expected) < 1e-12
    assert relative(oracle_logits(folder(name), ids), expected) > 1e-9, "without widening there is a difference"


def test_long_prompts_equal_transformers(folder: Callable[[str], Path]) -> None:
    for name in ("qwen", "minimax"):
        ids = random_ids(700, 3)
        assert relative(Reference(folder(name)).full(ids).logits, oracle_logits(folder(name), ids)) < ORACLE


@pytest.mark.parametrize("name", ["qwen", "qwen-wrapper", "qwen-deep-bf16", "qwen-conv-2", "minimax", "minimax-bf16"])
@pytest.mark.parametrize("seam", [0, 4, 8, 16, 32, 64])
def test_only_segment_at_the_head_equals_transformers(name: str, seam: int, folder: Callable[[str], Path]) -> None:
    links: Links = [segment(40, 1, seam), Live(random_ids(15, 2))]
    result = Reference(folder(name)).evaluate(links)
    assert result.positions.tolist() == [*range(min(seam, 40)), *range(40, 55)]
    assert relative(result.logits, exact_oracle_logits(folder(name), flat(links))[result.positions]) < OWN
    assert relative(result.logits, oracle_logits(folder(name), flat(links))[result.positions]) < ORACLE


SINGLE = ["qwen-linear", "qwen-attention", "minimax-linear", "minimax-attention"]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("seam", [4, 8, 16])
def test_many_segments_equal_transformers_in_one_mixing_layer(
    name: str, seam: int, folder: Callable[[str], Path]
) -> None:
    links = many_segments(seam)
    result = Reference(folder(name)).evaluate(links)
    assert relative(result.logits, exact_oracle_logits(folder(name), flat(links))[result.positions]) < OWN
    assert relative(result.logits, oracle_logits(folder(name), flat(links))[result.positions]) < ORACLE
    assert len(result.positions) < len(flat(links))


@pytest.mark.parametrize("name", SINGLE)
def test_any_order_equals_transformers_on_that_order(name: str, folder: Callable[[str], Path]) -> None:
    parts, reference = [segment(30, 1), segment(9, 2), segment(21, 3)], Reference(folder(name))
    answers = []
    for order in permutations(parts):
        links: Links = [Live(random_ids(3, 4)), *order, Live(random_ids(5, 5))]
        result = reference.evaluate(links)
        assert relative(result.logits, exact_oracle_logits(folder(name), flat(links))[result.positions]) < OWN
        answers.append(result.logits[-1])
    assert all(relative(a, b) > 100 * OWN for a, b in combinations(answers, 2)), "the order must matter"


@pytest.mark.parametrize("name", SINGLE)
def test_one_mixing_layer_ends_as_full_recompute(name: str, folder: Callable[[str], Path]) -> None:
    links, reference = many_segments(), Reference(folder(name))
    end, expected = reference.evaluate(links).layers[0], reference.full(flat(links)).layers[0]
    fields = ("state", "conv_tail") if isinstance(end, LinearEnd) else ("keys", "values", "positions")
    for field in fields:
        found, wanted = getattr(end, field), getattr(expected, field)
        assert found.shape == wanted.shape and (wanted.numel() == 0 or relative(found, wanted) < OWN)


@pytest.mark.parametrize(("name", "faults"), BITES)
def test_faults_bite(name: str, faults: Faults, folder: Callable[[str], Path]) -> None:
    links = many_segments() if name in SINGLE else only_segment()
    result = Reference(folder(name)).evaluate(links, faults=faults)
    error = relative(result.logits, oracle_logits(folder(name), flat(links))[result.positions])
    assert error > 100 * ORACLE


def test_partial_rotation_is_not_transformers(folder: Callable[[str], Path], tmp_path: Path) -> None:
    ids = random_ids(60)
    partial = Reference(minimax(tmp_path, rotary_dim=8))
    assert relative(partial.full(ids).logits, oracle_logits(tmp_path, ids)) > 100 * ORACLE
    links = only_segment()
    found, whole = partial.evaluate(links), partial.full(flat(links))
    assert relative(found.logits, whole.logits[found.positions]) < OWN
    for faults in FAULTS["minimax"]:
        assert relative(partial.evaluate(links, faults=faults).logits, whole.logits[found.positions]) > 100 * OWN


def test_narrow_seams_and_ablations_are_inexact(folder: Callable[[str], Path]) -> None:
    links = many_segments(seam=0)
    result = Reference(folder("qwen-linear")).evaluate(links)
    assert relative(result.logits, oracle_logits(folder("qwen-linear"), flat(links))[result.positions]) > 100 * ORACLE
    # In pure attention there is no convolution to cover: any seam is exact.
    result = Reference(folder("qwen-attention")).evaluate(links)
    assert relative(result.logits, oracle_logits(folder("qwen-attention"), flat(links))[result.positions]) < ORACLE
    reference, links = Reference(folder("qwen")), many_segments()
    sound = reference.evaluate(links).logits
    answers = [reference.evaluate(links, compose="addition"), reference.evaluate(links, compose="last")]
    answers.append(reference.evaluate(links, rotate=False))
    assert all(relative(answer.logits, sound) > 1e-3 for answer in answers)


@pytest.mark.parametrize("name", ["qwen", "minimax"])
def test_several_segments_are_approximate_in_deep_models(name: str, folder: Callable[[str], Path]) -> None:
    links: Links = [Live(random_ids(5, 1)), segment(30, 2), segment(40, 3), Live(random_ids(9, 4))]
    result = Reference(folder(name)).evaluate(links)
    full = Reference(folder(name)).full(flat(links)).logits[result.positions]
    assert 1e-4 < relative(result.logits, full) < 1


def test_conv_tails_are_never_padded(folder: Callable[[str], Path]) -> None:
    reference, ids = Reference(folder("qwen-linear")), random_ids(12, 5)
    for num_tokens, expected in ((9, 1), (10, 2), (11, 3), (12, 3)):
        entry = reference.encode(ids[:num_tokens], 8).layers[0]
        assert isinstance(entry, LinearEntry) and entry.conv_tail.shape[0] == expected
    end = reference.evaluate([SegmentLink(ids[:9]), SegmentLink(ids[:9], 0)]).layers[0]
    assert isinstance(end, LinearEnd) and end.conv_tail.shape[0] == 3


def test_the_empty_chain_of_a_request_without_rows(folder: Callable[[str], Path]) -> None:
    for name in ("qwen", "minimax"):
        reference = Reference(folder(name))
        result = reference.evaluate([segment(20, 1, seam=0)])
        assert result.logits.shape == (0, 320)
        more = reference.evaluate([segment(20, 1, seam=0), Live([3])])
        full = reference.full([*random_ids(20, 1), 3])
        assert relative(more.logits[-1], full.logits[-1]) < OWN

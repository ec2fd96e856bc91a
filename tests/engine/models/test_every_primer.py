"""Segments behind a primer, for every model type that has a file: what is kept of them, and where it is moved to.

What is kept of a segment is what an engine without a primer keeps of primer and segment as one text, whose seam ends
where the segment's does. A model of one mixing layer has nothing to read in a primer: there reuse equals full
recompute, whatever the primer is, and so it shows each of a primer's tokens that is left in an entry, and each move
that takes no account of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.engine.batch import InteriorLink
from hypic.engine.encode import Encode
from hypic.engine.plan import Interior, Piece
from hypic.engine.request import Request
from hypic.engine.segment import CachedSegment
from hypic.types import Segment
from tests.checkpoints import random_ids
from tests.engine.expected import TOLERANCE, links, relative
from tests.engine.models import oracle_contracts as contracts
from tests.engine.models.every_model import LATENT_RING, LAYERS, NAMES, REFERENCES, Every
from tests.engine.models.oracle_contracts import bites
from tests.engine.prompts import POLICY, few_segments, live, seg

EXACT = TOLERANCE["float64"]
PRIMER = tuple(random_ids(37, 91))
SEGMENT = seg(40, 1)
ROTARY_STATES = ("bailing_moe_linear", LATENT_RING)
# The segment stands at the prompt's head, so that what is kept of it is moved back by the primer's length.
AT_THE_HEAD = [SEGMENT, live(9, 2)]
PROMPTS = {"few": few_segments(), "head": AT_THE_HEAD}
Contents = dict[str, Tensor]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Every:
    torch.set_num_threads(1)
    return Every(lambda name: tmp_path_factory.mktemp(name.replace(" ", "-")), LAYERS)


def kept(models: Every, name: str, primer: tuple[int, ...], **options: Any) -> Contents:
    """Of the segment, behind a primer."""
    engine = models.bench(name, primer=primer, **options)
    engine.ask(AT_THE_HEAD)
    found = engine.contents(SEGMENT)
    engine.assert_back_to_start()
    return found


def kept_as_one(models: Every, name: str) -> Contents:
    """Of primer and segment as one text, behind a seam that ends where the segment's does."""
    engine, policy = models.bench(name), POLICY.with_(seam=len(PRIMER) + POLICY.seam)
    one = Piece((*PRIMER, *SEGMENT.ids), Segment("primer and segment"))
    engine.ask([one, live(9, 2)], policy)
    return engine.contents(one, policy)


def worst(found: Contents, expected: Contents) -> float:
    """The largest relative difference of any part; a part that is all zeros must be so in both."""
    assert found.keys() == expected.keys() and expected
    assert all(bool(found[part].any()) == bool(expected[part].any()) for part in expected)
    return max(relative(found[part], expected[part]) for part in expected if bool(expected[part].any()))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_what_one_text_leaves(name: str, models: Every) -> None:
    expected = kept_as_one(models, name)
    assert worst(kept(models, name, PRIMER), expected) < EXACT
    assert worst(kept(models, name, PRIMER, max_step_tokens=16), expected) < EXACT
    assert worst(kept(models, name, PRIMER, kernels="on"), expected) < EXACT
    for other in (PRIMER[1:], PRIMER[:-1], (*PRIMER[:20], *PRIMER[21:], 5), ()):
        assert bites(worst(kept(models, name, other), expected))


def forget_state(patch: pytest.MonkeyPatch) -> None:
    """Encodes begin with no state, and only attention sees the primer."""
    patch.setattr(Encode, "_initial_slot", property(lambda self: self.state_slot if self.done else 0))


def forget_keys(patch: pytest.MonkeyPatch) -> None:
    """Encodes begin with the primer's state, and attention sees its first token again and again."""

    def faulty(self: Encode, position: int) -> Any:
        assert self.primer is not None
        return torch.cat([torch.from_numpy(self.primer.kv_slots * 0), torch.from_numpy(self.slots[:position])]).numpy()

    patch.setattr(Encode, "_context", faulty)


@pytest.mark.parametrize("forget", [forget_state, forget_keys])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_bites(
    name: str, forget: Callable[[pytest.MonkeyPatch], None], models: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = kept_as_one(models, name)
    forget(monkeypatch)
    assert bites(worst(kept(models, name, PRIMER), expected))


# -- against the written-out references ------------------------------------------------------------------------------


def reference_error(
    models: Every, name: str, prompt: str, dtype: str = "float64", kernels: str = "auto", **changes: Any
) -> float:
    """Cold and warm."""
    pieces, policy = PROMPTS[prompt], POLICY.with_(**changes)
    reference = REFERENCES[name](models.folder(name))
    wanted = reference.evaluate(links(pieces, policy), compose=policy.compose, rotate=policy.rotate, primer=PRIMER)
    engine = models.bench(name, dtype, primer=PRIMER, kernels=kernels)
    cold, warm = engine.ask(pieces, policy), engine.ask(pieces, policy)
    assert "encoded" in cold.outcomes and set(warm.outcomes) == {"hit"}
    return max(cold.error_to(wanted), warm.error_to(wanted))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", REFERENCES)
def test_answers_are_the_references(name: str, prompt: str, dtype: str, models: Every) -> None:
    assert reference_error(models, name, prompt, dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", REFERENCES)
def test_steps_by_kernels_are_the_references(name: str, prompt: str, models: Every) -> None:
    assert reference_error(models, name, prompt, kernels="on") < EXACT


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("changes", [{"compose": "addition"}, {"compose": "last"}, {"rotate": False}, {"seam": 0}],
                         ids=["addition", "last", "unrotated", "no-seam"])  # fmt: skip
def test_ablations_are_the_references(changes: dict[str, Any], name: str, models: Every) -> None:
    assert reference_error(models, name, "few", **changes) < EXACT


# -- moves -----------------------------------------------------------------------------------------------------------


def test_a_model_of_one_layer_reads_nothing_in_a_primer(layers: Every) -> None:
    assert {layer.split()[0] for layer in LAYERS} == set(NAMES)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_mixing_layer_equals_full_recompute(layer: str, layers: Every) -> None:
    assert contracts.single_error(layers, layer, primer=PRIMER) < EXACT
    assert contracts.segment_error(layers, layer, "float64", AT_THE_HEAD, primer=PRIMER) < EXACT


def move_from_the_origin(patch: pytest.MonkeyPatch) -> None:
    """States are moved as if the segment's first token had stood at place 0."""
    sound = Request._interior

    def faulty(self: Request, span: Interior, entry: CachedSegment) -> InteriorLink:
        return replace(sound(self, span, entry), origin=span.origin)

    patch.setattr(Request, "_interior", faulty)


def take_a_token_of_the_primer(patch: pytest.MonkeyPatch) -> None:
    """What is kept of a segment holds the primer's last token in the place of its own first one."""
    sound = Encode._row

    def faulty(self: Encode, start: int, stop: int, fold: Any) -> Any:
        row = sound(self, start, stop, fold)
        return replace(row, ids=(PRIMER[-1], *row.ids[1:])) if fold is not None and start == self.seam else row

    patch.setattr(Encode, "_row", faulty)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_mixing_layer_bites(layer: str, layers: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    take_a_token_of_the_primer(monkeypatch)
    assert bites(contracts.single_error(layers, layer, primer=PRIMER))


@pytest.mark.parametrize("name", ROTARY_STATES)
def test_moves_of_rotary_states_bite(name: str, layers: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    move_from_the_origin(monkeypatch)
    layer = f"{name} linear_attention"
    assert bites(contracts.single_error(layers, layer, primer=PRIMER))
    assert bites(contracts.segment_error(layers, layer, "float64", AT_THE_HEAD, primer=PRIMER))


@pytest.mark.parametrize("name", ROTARY_STATES)
def test_a_primer_longer_than_the_table_of_angles(name: str, layers: Every) -> None:
    """A short prompt has states moved back by more places than it has tokens, and than the table begins with."""
    primer, layer = tuple(random_ids(1030, 92)), f"{name} linear_attention"
    options: dict[str, Any] = {"primer": primer, "max_context": 4200, "sizes": (400, 48, 24)}
    assert contracts.segment_error(layers, layer, "float64", AT_THE_HEAD, **options) < EXACT

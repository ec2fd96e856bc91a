"""Entries that are kept smaller: rounded when made, the same wherever they come from, within a stated error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.config import EngineConfig
from hypic.engine.affine import Affine
from hypic.engine.pool import Pool
from hypic.engine.storage import StorageForm, norms
from hypic.errors import ConfigError
from tests.engine.expected import TOLERANCE, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, live, seg
from tests.engine.tiers import always_load, disk_at, evicted, same_bits, saved, tiers_of

Make = Callable[..., Bench]
BF16 = StorageForm(torch.bfloat16)
FORMS = {"bfloat16": BF16, "drop": StorageForm(None, 0.3), "both": StorageForm(torch.bfloat16, 0.3)}
MODELS = ["qwen", "minimax", "minimax-partial"]
SEGMENT = seg(40, 1)


# -- the form itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["head", "diagonal", "dense"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_applied_twice_is_a_form_applied_once(form: StorageForm, kind: str) -> None:
    torch.manual_seed(0)
    shape = {"head": (5, 6), "diagonal": (5, 6, 8), "dense": (5, 6, 8, 8)}[kind]
    scale = torch.rand(5, 6).view(5, 6, *[1] * (len(shape) - 2))
    once = form.applied(Affine(torch.randn(shape) * scale * 0.1, torch.randn(5, 6, 8, 4)))
    twice = form.applied(once)
    assert torch.equal(once.transition, twice.transition) and torch.equal(once.end_state, twice.end_state)
    for tensor in (once.transition, once.end_state):
        assert torch.equal(form.at_rest(tensor).to(tensor.dtype), tensor), "what is stored is what is used"


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_dropping_keeps_to_its_bound(kind: str) -> None:
    """A state behind a dropped transition is off by at most the bound times its norm, and large ones are kept."""
    torch.manual_seed(0)
    shape = (50, 6, 8) if kind == "diagonal" else (50, 6, 8, 8)
    transition = torch.randn(shape, dtype=torch.float64) * torch.rand(50, 6).view(50, 6, *[1] * (len(shape) - 2)) * 0.2
    form, state = StorageForm(None, 0.2), torch.randn(50, 6, 8, 4, dtype=torch.float64)
    maps = Affine(transition, torch.zeros_like(state))
    dropped = form.applied(maps)
    off = (dropped.apply(state) - maps.apply(state)).flatten(2).norm(dim=2)
    assert bool((off <= 0.2 * state.flatten(2).norm(dim=2)).all()) and bool((off > 0).any())
    kept = dropped.transition.flatten(2).ne(0).any(2)
    assert torch.equal(kept, norms(transition) >= 0.2) and 0.1 < float(kept.double().mean()) < 0.9


def test_one_number_a_head_is_never_dropped() -> None:
    maps = Affine(torch.full((2, 3), 1e-9), torch.zeros(2, 3, 4, 4))
    assert torch.equal(StorageForm(None, 0.5).applied(maps).transition, maps.transition)


def test_settings_of_a_form() -> None:
    assert StorageForm.of("lossless", 0.0).is_lossless and StorageForm().name == "lossless"
    names = {StorageForm.of(s, d).name for s in ("lossless", "bfloat16") for d in (0.0, 1e-3, 1e-2)}
    assert len(names) == 6, "every form has keys of its own"
    wrongs: list[dict[str, Any]] = [
        {"storage": "int4"},
        {"drop_below": -1.0},
        {"drop_below": 1.0},
        {"drop_below": "much"},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineConfig(**wrong)


# -- in an engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_a_fresh_entry_and_a_stored_one_answer_alike(name: str, form: StorageForm, bench: Make, tmp_path: Path) -> None:
    """Cold, warm, from the host, from disk, in pieces: within rounding of float64, which is far below the form's."""
    spec = f"host://64MiB,{disk_at(tmp_path)}"
    engine = always_load(bench(name, form=form, store=spec))
    pieces = few_segments()
    cold = engine.ask(pieces, POLICY)
    made = engine.contents(seg(41, 3))
    answers = [engine.ask(pieces)]
    evicted(engine)
    answers.append(engine.ask(pieces))
    assert set(tiers_of(answers[-1])) == {"host"} and same_bits(engine.contents(seg(41, 3)), made)
    saved(engine).engine.close()
    again = always_load(bench(name, form=form, store=disk_at(tmp_path)))
    answers.append(again.ask(pieces))
    assert set(tiers_of(answers[-1])) == {"disk"} and same_bits(again.contents(seg(41, 3)), made)
    again.engine.close()
    answers.append(bench(name, form=form, max_step_tokens=64).ask(pieces))
    answers.append(bench(name, form=form, sizes=(200, 4, 1)).ask(pieces))
    last = max(cold.logits)
    for answer in answers:
        assert relative(answer.logits[last], cold.logits[last]) < TOLERANCE["float64"]
    lossless = bench(name).ask(pieces)
    error = relative(lossless.logits[last], cold.logits[last])
    if name != "qwen" and form.dtype is None:
        assert error == 0.0, "one number a head is never dropped"
        return
    assert 100 * TOLERANCE["float64"] < error < 0.1, f"the form shows, and little of it: {error}"


@pytest.mark.parametrize("name", MODELS)
def test_rounding_after_the_first_use_shows(name: str, bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would miss if entries were rounded only when they are stored."""
    monkeypatch.setattr(Pool, "finish", lambda self, transitions: None)
    pieces, engine = few_segments(), bench(name, form=BF16)
    cold = engine.ask(pieces)
    last = max(cold.logits)
    for entry in engine.store:
        if not entry.is_snapshot:
            slots = torch.tensor([entry.state_slot]), torch.tensor([entry.transition_slot])
            for layer, states in enumerate(engine.pool.states):
                maps = engine.pool.read_map(layer, *slots)
                formed = BF16.applied(maps)
                states[entry.state_slot] = formed.end_state[0]
                engine.pool.transitions[layer][entry.transition_slot] = formed.transition[0]
    warm = engine.ask(pieces)
    assert relative(warm.logits[last], cold.logits[last]) > 100 * TOLERANCE["float64"]


def test_a_smaller_form_is_smaller_where_it_is_stored(bench: Make) -> None:
    engine, sizes = bench("qwen", "float32"), {}
    engine.ask([live(3, 2), SEGMENT, live(4, 3)])
    stretches = torch.cat([norms(t[None])[0] for n, t in engine.contents(SEGMENT).items() if n.startswith("T")])
    bound = float(stretches.median()) * 1.001  # half of the heads, and one
    forms = {"lossless": StorageForm(), "bfloat16": BF16, "drop": StorageForm(None, bound)}
    for name, form in {**forms, "both": StorageForm(torch.bfloat16, bound)}.items():
        engine = bench("qwen", "float32", form=form, store="host://64MiB")
        engine.ask([live(3, 2), SEGMENT, live(4, 3)])
        evicted(engine)
        stored = engine.engine.tiers.tiers[0].find(engine.key(SEGMENT))
        assert stored is not None
        sizes[name] = stored
        engine.engine.close()
    kept, whole = sizes["drop"].num_kept_heads
    assert whole == len(stretches) and kept == int((stretches >= bound).sum()) < whole
    assert sizes["lossless"].num_kept_heads == (whole, whole)
    assert sizes["both"].num_bytes < sizes["bfloat16"].num_bytes < sizes["lossless"].num_bytes
    assert sizes["drop"].num_bytes < sizes["lossless"].num_bytes


def test_forms_never_meet(bench: Make, tmp_path: Path) -> None:
    for form in (StorageForm(), *FORMS.values(), StorageForm(None, 0.2)):
        engine = always_load(bench("qwen", form=form, store=disk_at(tmp_path)))
        assert engine.ask([live(3, 2), SEGMENT, live(4, 3)]).outcomes == ["encoded"]
        saved(engine).engine.close()


def test_a_grown_text_is_encoded_whole_where_entries_are_rounded(bench: Make) -> None:
    """What an entry holds must not depend on how often what it grew from was rounded."""
    ids = seg(80, 1).ids
    for form, outcome in ((StorageForm(), "grown"), (BF16, "same name")):
        engine = bench("qwen", form=form)
        short = type(SEGMENT)(ids[:50], seg(50, 1, name="n").segment)
        whole = type(SEGMENT)(ids, seg(80, 1, name="n").segment)
        engine.ask([live(3, 2), short, live(4, 3)])
        assert engine.ask([live(3, 2), whole, live(4, 3)]).reasons[0].startswith(outcome)

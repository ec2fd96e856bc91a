"""The contracts of reuse for every model type that has a file: whoever adds one adds a tiny checkpoint, see
``every_model``. Entries, places and company are in ``test_every_entry``.

Truth for what theory calls exact is full recompute by transformers, widened to float64, or this project's own reference
where transformers has no such model. Where a written-out chain reference exists, prompts of many segments are compared
with it too; elsewhere the engine is compared with itself. Every contract is shown to bite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hypic.engine import scheduler
from hypic.engine.models import supported
from hypic.engine.models._families import FAMILIES, REFUSED
from hypic.engine.plan import Piece
from hypic_apps.eval.tiny import CONFIGS
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, links, relative
from tests.engine.faults import FAULTS
from tests.engine.harness import Bench
from tests.engine.models import oracle_contracts as contracts
from tests.engine.models.every_model import BUILDERS, NAMES, OWN, REFERENCES, STATELESS, Every, generated
from tests.engine.models.oracle_contracts import Models, bites
from tests.engine.prompts import few_segments, live, many_segments, seg

EXACT = TOLERANCE["float64"]
SHORT = [live(3, 1), seg(20, 2), live(2, 3), seg(13, 4), live(5, 5)]


# -- every file is known ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", supported())
def test_a_model_file_has_all_that_is_asked_of_one(name: str) -> None:
    assert name in BUILDERS, (
        f"hypic/engine/models/{name}.py has no tiny checkpoint: add a builder to every_model.BUILDERS."
    )
    assert name in FAMILIES, f"{name} is not in the table of hypic/engine/models/_families.py; add it."
    assert name in {key.partition(" ")[0] for key in CONFIGS}, f"{name} is not in hypic_apps/eval/tiny.py; add it."


def test_tables_name_no_file_that_is_not_there() -> None:
    assert set(FAMILIES) == set(supported()) and not set(FAMILIES) & set(REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_the_kind_of_transition_is_the_table_s(name: str, models: Every) -> None:
    layout = models.runner(name, "float64").pool.layout
    assert {shape.transition for shape in layout.linear} == {FAMILIES[name.partition("-")[0]].transition}


def test_a_file_without_a_builder_fails_by_name(models: Every) -> None:
    with pytest.raises(pytest.fail.Exception, match="rwkv_9.py has no tiny checkpoint"):
        models.bench("rwkv_9")


# -- what harms which ------------------------------------------------------------------------------------------------


def harms(name: str) -> Sequence[Callable[[Bench], None]]:
    return (contracts.halve_tails if name in STATELESS else contracts.halve_transitions), contracts.halve_values


# -- logits and greedy answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_full_recompute(
    name: str, models: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contracts.live_error(models, name, "float64") < EXACT
    if name not in OWN:
        assert contracts.live_error(models, name, "float32") < TOLERANCE["float32"]
    contracts.forget_a_key(monkeypatch)
    assert bites(contracts.live_error(models, name, "float64"))


def greedy_difference(models: Every, name: str, num_tokens: int = 12) -> tuple[int, int]:
    """How many tokens of a greedy answer in float32 are compared with what transformers generates, and how many differ.

    They are compared up to the first that was chosen from two within the tolerance.
    """
    answer = models.bench(name, "float32").ask([live(40, 2)], max_tokens=num_tokens)
    best = answer.rows(sorted(answer.chosen_from)).topk(2).values
    sure = ((best[:, 0] - best[:, 1]) / best[:, 0].abs() > 2 * TOLERANCE["float32"]).tolist()
    num_sure = (*sure, False).index(False)
    theirs = generated(models.folder(name), live(40, 2).ids, num_tokens)
    return num_sure, sum(a != b for a, b in zip(answer.ids[:num_sure], theirs[:num_sure], strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN])
def test_greedy_answers_are_what_transformers_generates(
    name: str, models: Every, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compared, num_other = greedy_difference(models, name)
    assert num_compared >= 6 and num_other == 0
    contracts.forget_a_key(monkeypatch, slice(None))
    contracts.start_from_nothing(monkeypatch)
    assert greedy_difference(models, name)[1] > 0


# -- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_segment_at_the_head_equals_full_recompute(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contracts.head_error(models, name) < EXACT
    FAULTS["empty-tail" if name in STATELESS else "drop-transition"](monkeypatch)
    assert bites(contracts.head_error(models, name))
    monkeypatch.undo()
    contracts.forget_a_key(monkeypatch)
    assert bites(contracts.head_error(models, name))


def reference_error(models: Every, name: str, prompt: Sequence[Piece]) -> float:
    """Many segments, cold and then warm, against the reference's chain."""
    expected = REFERENCES[name](models.folder(name)).evaluate(links(prompt))
    engine = models.bench(name)
    cold, warm = engine.ask(prompt), engine.ask(prompt)
    assert "encoded" in cold.outcomes and set(warm.outcomes) <= {"hit", "live"}
    return max(cold.error_to(expected), warm.error_where_run(expected))


@pytest.mark.parametrize("name", REFERENCES)
def test_cached_equals_uncached(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_error(models, name, many_segments()) < EXACT
    FAULTS["drop-end-state"](monkeypatch)
    assert bites(reference_error(models, name, few_segments()))


def entries_error(models: Every, name: str, harm: Callable[[Bench], None] = lambda engine: None) -> float:
    """What is kept of a segment, encoded alone and encoded in pieces among others at another place."""
    alone, crowded = models.bench(name), models.bench(name, max_step_tokens=24)
    alone.ask([SHORT[1], live(4, 9)])
    crowded.add([live(33, 8), seg(41, 7), live(9, 6)])
    crowded.add(SHORT)
    crowded.run()
    harm(crowded)
    found, expected = crowded.contents(SHORT[1]), alone.contents(SHORT[1])
    assert all(not bool(found[part].any()) for part in expected if not bool(expected[part].any()))
    return max(relative(found[part], expected[part]) for part in expected if bool(expected[part].any()))


@pytest.mark.parametrize("name", NAMES)
def test_entries_do_not_depend_on_company_or_place(name: str, models: Every) -> None:
    assert entries_error(models, name) < EXACT
    assert bites(entries_error(models, name, harms(name)[0]))


@pytest.mark.parametrize("name", NAMES)
def test_order_and_cache_contents_do_not_matter(name: str, models: Every) -> None:
    assert contracts.order_error(models, name) < EXACT
    for harm in harms(name):
        assert bites(contracts.order_error(models, name, harm))


def pieces_error(models: Every, name: str, num_tokens: int) -> float:
    """Live text and segments in pieces of so many tokens against one pass."""
    engine = models.bench(name, max_step_tokens=num_tokens)
    errors = []
    for prompt in (SHORT, [live(40, 9)]):
        parts = engine.ask(prompt)
        assert max(parts.runs) <= num_tokens
        errors.append(contracts.difference(parts, models.alone(name, prompt)))
    return max(errors)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_equal_one_pass(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MIN_PREFILL_TOKENS", 1)
    for num_tokens in (1, 3, 64):
        assert pieces_error(models, name, num_tokens) < EXACT
    contracts.start_from_nothing(monkeypatch)
    assert bites(pieces_error(models, name, 9))


@pytest.mark.parametrize("name", NAMES)
def test_batches_equal_requests_alone(name: str, models: Every, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contracts.batch_error(models, name) < EXACT
    (contracts.swap_tails if name in STATELESS else contracts.swap_states)(monkeypatch)
    assert bites(contracts.batch_error(models, name))


# -- restarts and other weights --------------------------------------------------------------------------------------


def fine_tuned(folder: Path, target: Path) -> Path:
    """The same files of the same sizes, with some numbers of one weight changed."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[next(name for name in sorted(tensors) if "o_proj" in name or "out_proj" in name or "dense" in name)] *= 1.01
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", NAMES)
def test_a_restart_answers_alike_and_other_weights_do_not(name: str, models: Every, tmp_path: Path) -> None:
    first, again = models.bench(name), Bench(models.load(name, "float64"), sizes=(200, 48, 24), max_context=1024)
    assert again.engine.runner.identity == first.engine.runner.identity
    before, after = first.ask(SHORT), again.ask(SHORT)
    assert torch.equal(before.rows(), after.rows()) and before.ids == after.ids
    other = Models({"tuned": lambda f: fine_tuned(models.folder(name), f)}, lambda n: tmp_path)
    tuned = other.bench("tuned")
    assert tuned.engine.runner.identity.fingerprint != first.engine.runner.identity.fingerprint
    assert bites(_difference(tuned.ask(SHORT), before))


def _difference(answer: Answer, other: Answer) -> float:
    """As ``contracts.difference``, but other tokens may have been chosen."""
    return relative(answer.rows(), other.rows(sorted(answer.logits)))

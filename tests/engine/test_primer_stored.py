"""Segments behind a primer in the tiers below and after a restart, their bits, and what a primer holds itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.engine import primer as primer_module
from hypic.engine.plan import Piece
from hypic.engine.segment import Primer
from hypic.engine.sizing import Need
from hypic.engine.storage import StorageForm
from hypic.engine.store import encoding, header, image
from hypic.engine.store.image import EntryImage
from hypic.errors import ConfigError, StoreCorrupt
from tests.checkpoints import random_ids
from tests.engine.answer import Answer
from tests.engine.expected import TOLERANCE, Checkpoints, links, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, few_segments, live, many_segments, seg
from tests.engine.tiers import always_load, disk_at, evicted, same_bits, saved, tiers_of

Make = Callable[..., Bench]
EXACT = TOLERANCE["float64"]
PRIMER, OTHER = tuple(random_ids(37, 91)), tuple(random_ids(37, 92))
DIGEST = Primer(PRIMER, 0).digest
SEGMENT = seg(40, 1)
PROMPT = [live(3, 2), SEGMENT, live(4, 3)]


def error(checkpoints: Checkpoints, answer: Answer, pieces: list[Piece], primer: tuple[int, ...] = PRIMER) -> float:
    return answer.error_to(checkpoints.reference("qwen").evaluate(links(pieces), primer=primer))


# -- tiers and restarts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_entries_come_back_from_a_tier_bit_for_bit(tier: str, bench: Make, tmp_path: Path) -> None:
    store = "host://64MiB" if tier == "host" else disk_at(tmp_path)
    engine = always_load(bench("qwen", primer=PRIMER, store=store))
    cold = engine.ask(PROMPT)
    before = engine.contents(SEGMENT)
    evicted(saved(engine))
    warm = engine.ask(PROMPT)
    assert tiers_of(warm) == [tier] and same_bits(engine.contents(SEGMENT), before)
    assert engine.entry(SEGMENT).primer == DIGEST
    assert relative(warm.rows(sorted(warm.logits)), cold.rows(sorted(warm.logits))) < EXACT
    engine.assert_back_to_start()
    engine.engine.close()


def test_after_a_restart(bench: Make, tmp_path: Path, checkpoints: Checkpoints) -> None:
    """The same primer: a hit. Another, or none: a miss, and its own entry beside the first."""
    cases = [(PRIMER, "encoded"), (PRIMER, "hit"), (OTHER, "encoded"), ((), "encoded")]
    for primer, outcome in [*cases, *((primer, "hit") for primer, _ in cases)]:
        engine = always_load(bench("qwen", primer=primer, store=disk_at(tmp_path)))
        answer = engine.ask(PROMPT)
        assert answer.outcomes == [outcome] and error(checkpoints, answer, PROMPT, primer) < EXACT
        assert error(checkpoints, answer, PROMPT, PRIMER[1:]) > 100 * EXACT
        saved(engine).engine.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3


def exported(engine: Bench) -> EntryImage:
    return image.export(engine.pool, engine.entry(SEGMENT), engine.engine.runner.identity)


def test_files_from_before_there_were_primers_are_read(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, behind = bench("qwen"), bench("qwen", primer=PRIMER)
    for engine in (plain, behind):
        engine.ask(PROMPT)
    sound = header._metadata
    monkeypatch.setattr(header, "_metadata", lambda image: _without_primer(sound(image)))
    for engine in (plain, behind):
        found, identity = encoding.decode(encoding.encode(exported(engine))), engine.engine.runner.identity
        assert found.primer == ""
        if engine is plain:
            image.check(found, engine.pool.layout, identity)
        else:  # a name that is not that of what is in it
            with pytest.raises(StoreCorrupt, match="its key is not that of its tokens"):
                image.check(found, engine.pool.layout, identity)
    monkeypatch.undo()
    found = encoding.decode(encoding.encode(exported(behind)))
    image.check(found, behind.pool.layout, behind.engine.runner.identity)
    image.check(found, plain.pool.layout, plain.engine.runner.identity)


def _without_primer(metadata: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if name != "primer"}


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen", "minimax-partial"])
def test_deterministic_requests_have_the_same_bits_cold_warm_and_restarted(
    name: str, bench: Make, tmp_path: Path
) -> None:
    policy, pieces = POLICY.with_(deterministic=True), few_segments()
    engine = always_load(bench(name, "float32", primer=PRIMER, store=disk_at(tmp_path)))
    beside = engine.add(many_segments())
    cold = engine.add(pieces, policy)
    engine.run()
    warm = engine.ask(pieces, policy)
    assert beside.error is None and set(cold.outcomes) == {"encoded"} and set(warm.outcomes) == {"hit"}
    saved(engine).engine.close()
    again = always_load(bench(name, "float32", primer=PRIMER, store=disk_at(tmp_path)))
    disk = again.ask(pieces, policy)
    assert set(tiers_of(disk)) == {"disk"}
    alone = bench(name, "float32", primer=PRIMER).ask(pieces, policy)
    for one in (warm, disk, alone):
        assert torch.equal(cold.rows(), one.rows())
    assert not torch.equal(cold.rows(), bench(name, "float32", primer=OTHER).ask(pieces, policy).rows())
    again.engine.close()


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_primer_has_the_same_bits_whatever_a_step_holds(
    kernels: str, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries on disk outlive the setting of a step's size."""
    settings: Any = {"primer": tuple(random_ids(700, 93)), "kernels": kernels}
    found = [_states(bench("qwen", "float32", max_step_tokens=step, **settings)) for step in (8192, 600, 350, 1)]
    assert all(torch.equal(one, found[0]) for one in found)
    monkeypatch.setattr(primer_module, "PIECE_TOKENS", 350)
    other = _states(bench("qwen", "float32", **settings))
    assert not torch.equal(other, found[0]) and torch.allclose(other, found[0], atol=1e-3)


def _states(engine: Bench) -> torch.Tensor:
    (kept,) = engine.engine.runner.primers
    return torch.stack([states[kept.state_slot] for states in engine.pool.states])


@pytest.mark.parametrize("form", [StorageForm(torch.bfloat16), StorageForm(torch.bfloat16, 0.5)], ids=["half", "drop"])
def test_a_lossy_entry_is_the_rounded_one_and_the_primer_is_not_rounded(form: StorageForm, bench: Make) -> None:
    lossy, exact = bench("qwen", primer=PRIMER, form=form), bench("qwen", primer=PRIMER)
    for engine in (lossy, exact):
        engine.ask(PROMPT)
    assert torch.equal(_states(lossy), _states(exact))
    found, expected = lossy.contents(SEGMENT), exact.contents(SEGMENT)
    for layer in range(len(lossy.pool.layout.linear)):
        state = expected[f"B{layer}"]
        assert torch.equal(found[f"B{layer}"], state.bfloat16().to(state.dtype))
        assert not torch.equal(found[f"B{layer}"], state)
    again = bench("qwen", primer=PRIMER, form=form, max_step_tokens=16)
    again.ask(PROMPT)
    assert max(relative(again.contents(SEGMENT)[part], found[part]) for part in found) < 0.01
    assert lossy.ask(PROMPT).outcomes == ["hit"]
    lossy.assert_back_to_start()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_primer_is_counted_once_and_never_given_away(bench: Make) -> None:
    plain, engine = (bench("qwen", sizes=(40, 12, 6), primer=primer, max_context=300) for primer in ((), PRIMER))
    assert plain.pool.free == Need(40, 12, 6) == plain.pool.capacity
    assert engine.pool.free == engine.pool.capacity == Need(37, 11, 6)
    before = _states(engine)
    answers = [engine.add([live(9, 50 + n), seg(60 + n, n), live(20, 70 + n)], max_tokens=9) for n in range(12)]
    while engine.engine.has_work:
        engine.step()
        engine.assert_sound()
    assert all(answer.error is None for answer in answers) and torch.equal(_states(engine), before)
    engine.assert_back_to_start()
    assert engine.pool.free == engine.pool.capacity


def test_a_shortage_of_memory_leaves_the_primer_where_it_is(bench: Make, checkpoints: Checkpoints) -> None:
    engine, failed = bench("qwen", primer=PRIMER), list[bool]()
    sound, before = engine.watched.forward_final, _states(engine)

    def short(*args: object) -> object:
        if len(failed) < 2:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sound(*args)  # type: ignore[arg-type]

    engine.watched.forward_final = short  # type: ignore[method-assign, assignment]
    answer = engine.ask(PROMPT)
    assert len(failed) == 2 and error(checkpoints, answer, PROMPT) < EXACT and torch.equal(_states(engine), before)
    engine.assert_back_to_start()


@pytest.mark.parametrize(
    ("primer", "settings", "sentence"),
    [
        (random_ids(100, 1), {"max_context": 399}, "the primer has 100 tokens, and of a context of 399 it may take 99"),
        (PRIMER, {"sizes": (28, 12, 6), "max_context": 400}, "29 pages and 4 states are needed"),
        (PRIMER, {"sizes": (40, 3, 6), "max_context": 400}, "memory= holds 40 and 3"),
    ],
    ids=["context", "pages", "states"],
)
def test_a_primer_that_does_not_fit_is_refused(
    primer: tuple[int, ...], settings: dict[str, object], sentence: str, bench: Make
) -> None:
    with pytest.raises(ConfigError) as caught:
        bench("qwen", primer=tuple(primer), **settings)
    assert sentence in str(caught.value) and "primer=''" in str(caught.value)


def test_a_primer_that_just_fits(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", primer=PRIMER, sizes=(29, 4, 1), max_context=400, max_running=1)
    pieces = [live(60, 2), SEGMENT, live(250, 3)]
    assert error(checkpoints, engine.ask(pieces), pieces) < EXACT
    engine.assert_back_to_start()


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("another fault")], ids=["memory", "other"]
)
def test_a_primer_that_there_is_no_memory_to_run_is_refused(
    fault: Exception, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence with the ways out; what is no lack of memory stays what it is."""
    model: Any = bench("qwen").watched.model

    def fail(ids: torch.Tensor) -> torch.Tensor:
        raise fault

    monkeypatch.setattr(model, "embed", fail)
    is_short = isinstance(fault, torch.OutOfMemoryError)
    sentence = r"ran out of memory for the primer: .* lower memory= to leave room, or pass primer='' for none\."
    with pytest.raises(ConfigError if is_short else RuntimeError, match=sentence if is_short else "another fault"):
        bench("qwen", primer=PRIMER)


def test_a_primer_that_is_not_finite_is_refused(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than every segment failing, one by one."""
    model: Any = bench("qwen").watched.model
    sound, token = model.embed, PRIMER[5]
    monkeypatch.setattr(model, "embed", lambda ids: sound(ids).masked_fill((ids == token)[:, None], float("nan")))
    with pytest.raises(ConfigError, match="NaN or infinity for the primer"):
        bench("qwen", primer=PRIMER)

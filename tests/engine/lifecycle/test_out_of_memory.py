"""Memory that runs out, in the pool or on the device: requests start again or fail alone, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hypic.errors import StoreFull, WorkerLost
from tests.engine.expected import TOLERANCE, Checkpoints
from tests.engine.harness import Bench
from tests.engine.prompts import few_segments, live, many_segments

Make = Callable[..., Bench]


def test_memory_without_a_page_left_for_the_answer_fails_only_that_request(bench: Make) -> None:
    engine = bench("qwen", sizes=(3, 6, 3))
    answer = engine.add([live(30, 1)], max_tokens=100)
    engine.run()
    assert isinstance(answer.error, StoreFull) and "max_tokens" in str(answer.error)
    assert len(answer.ids) == 3 * 16 - 30 + 1
    assert len(engine.ask([live(9, 2)], max_tokens=5).ids) == 5
    engine.assert_back_to_start()


def test_out_of_memory_in_a_step_shrinks_the_store_and_starts_again(bench: Make, checkpoints: Checkpoints) -> None:
    engine = bench("qwen", max_step_tokens=512)
    engine.ask(few_segments())
    stored = engine.store.stats.num_entries
    sound, failures = engine.watched.forward_final, [2, 3, 6]

    def failing(batch: Any, pool: Any) -> Any:
        result = sound(batch, pool)
        if engine.num_steps in failures:
            raise torch.OutOfMemoryError("no room")
        return result

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    prompts = [many_segments(), few_segments()]
    answers = [engine.add(pieces, max_tokens=6) for pieces in prompts]
    engine.run()
    for pieces, answer in zip(prompts, answers, strict=True):
        expected = checkpoints.expected("qwen", pieces, generated=answer.ids[:-1])
        assert len(answer.ids) == 6 and answer.error_where_run(expected) < TOLERANCE["float64"]
    assert engine.engine.scheduler.limit.tokens == 64 and stored > 0
    engine.assert_back_to_start()


@pytest.mark.parametrize("fail_in", [None, "forward", "choice"])
def test_a_seeded_request_that_starts_again_gets_the_tokens_that_it_would_have_got(
    fail_in: str | None, bench: Make
) -> None:
    sampling = {"temperature": 1.5, "seed": 7}
    expected = bench("qwen").ask(few_segments(), max_tokens=12, **sampling).ids
    engine, broken = bench("qwen"), list[int]()
    place, name = (engine.watched, "forward_final") if fail_in == "forward" else (engine.engine.sampler, "choose")
    sound = getattr(place, name)

    def failing(*arguments: Any) -> Any:
        result = sound(*arguments)
        if fail_in and engine.num_steps in (3, 6) and engine.num_steps not in broken:
            broken.append(engine.num_steps)
            raise torch.OutOfMemoryError("no room")
        return result

    setattr(place, name, failing)
    assert engine.ask(few_segments(), max_tokens=12, **sampling).ids == expected
    assert len(set(expected)) > 3 and broken == ([3, 6] if fail_in else [])


MHA = "Expected mha_graph->execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but got false."


def test_a_library_that_says_in_words_of_its_own_that_memory_is_short_is_understood(
    bench: Make, caplog: pytest.LogCaptureFixture
) -> None:
    expected = bench("qwen").ask(few_segments(), max_tokens=6).ids
    engine = bench("qwen", max_step_tokens=512)
    sound = engine.watched.forward_final

    def failing(batch: Any, pool: Any) -> Any:
        if engine.num_steps in (2, 3):
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return sound(batch, pool)

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    assert engine.ask(few_segments(), max_tokens=6).ids == expected
    assert engine.engine.scheduler.limit.tokens == 128
    assert sum("a step ran out of memory" in said for said in caplog.messages) == 2
    engine.assert_back_to_start()


def test_an_attention_that_fails_while_there_is_memory_is_no_lack_of_it(bench: Make) -> None:
    engine = bench("qwen")

    def failing(batch: Any, pool: Any) -> Any:
        raise RuntimeError(MHA)

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    engine.add(few_segments())
    with pytest.raises(RuntimeError, match="mha_graph"):
        engine.run()


def test_a_request_that_always_runs_out_of_memory_fails(bench: Make) -> None:
    engine = bench("qwen")

    def failing(batch: Any, pool: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    engine.watched.forward_final = failing  # type: ignore[method-assign]
    answers = [engine.add(pieces) for pieces in (few_segments(), many_segments())]
    engine.run(limit=40)
    assert all(isinstance(answer.error, WorkerLost) for answer in answers)
    said = str(answers[0].error)
    assert "cpu ran out of memory in a step: the pool holds" in said and "MiB are free; lower memory=" in said
    engine.assert_back_to_start()

"""``LLM`` over several turns: what is continued, from where, and with which answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypic import LLM, Completion, Policy, SamplingParams
from tests.llm.asking import REUSE, SETTINGS, assert_idle, passage, sampling

TURNS = ["Tell me about the mill, and the river, and all of the town below it.", "And the oats?", "Who are they?"]


def talk(llm: LLM, policy: Policy, documents: tuple[str, ...] = ()) -> list[Completion]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are the miller, and you answer briefly."}]
    answers = []
    for turn, text in enumerate(TURNS):
        blocks = [{"type": "text", "text": document} for document in documents] if turn == 0 else []
        messages.append({"role": "user", "content": [*blocks, {"type": "text", "text": text}]})
        answers.append(llm.chat(messages, sampling(8), policy=policy))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def test_a_conversation_without_segments_equals_full_recompute(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm, LLM(str(folder), **SETTINGS) as other:
        continued, scratch = talk(llm, REUSE), talk(other, Policy(reuse="none"))
        assert [answer.token_ids for answer in continued] == [answer.token_ids for answer in scratch]
        for answer, full in list(zip(continued, scratch, strict=True))[1:]:
            assert answer.report is not None and full.report is not None
            assert full.report.computed_tokens == full.report.prompt_tokens
            assert answer.report.computed_tokens < full.report.prompt_tokens / 2
            assert answer.report.computed_tokens + answer.report.reused_tokens == answer.report.prompt_tokens
        assert_idle(llm)


def test_a_conversation_over_documents_continues_from_snapshots(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm, LLM(str(folder), **SETTINGS) as other:
        documents = (passage(1), passage(2))
        continued = talk(llm, REUSE, documents)
        for report in [answer.report for answer in continued[1:]]:
            assert report is not None and report.computed_tokens < report.prompt_tokens / 4
        messages: list[dict[str, Any]] = [{"role": "system", "content": "You are the miller, and you answer briefly."}]
        for turn, text in enumerate(TURNS):
            blocks = [{"type": "text", "text": document} for document in documents] if turn == 0 else []
            messages.append({"role": "user", "content": [*blocks, {"type": "text", "text": text}]})
            # The other engine has nothing cached, but remembers which tokens its answers were.
            other.forget(everything=True)
            assert other.chat(messages, sampling(8)).token_ids == continued[turn].token_ids
            messages.append({"role": "assistant", "content": continued[turn].text})


def test_after_an_end_token_the_next_turn_computes_only_what_is_new(llm: LLM) -> None:
    hot = sampling(60, temperature=1.5, seed=3)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about the mill."}]
    ids = llm.chat(messages, hot).token_ids
    end = next(i for n, i in enumerate(ids) if ids.index(i) == n >= 35)
    llm.tokenizer.eos_ids = frozenset({end})
    llm._loop.call(lambda engine: object.__setattr__(engine.vocabulary, "eos_ids", frozenset({end})))
    llm.forget(everything=True)
    first = llm.chat(messages, SamplingParams(max_tokens=60, temperature=1.5, seed=3))
    assert first.token_ids == ids[: ids.index(end) + 1] and first.usage is not None
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And the oats?"}]
    report = llm.chat(messages, sampling(2)).report
    assert report is not None and report.notes == ()
    known = first.usage.prompt_tokens + len(first.token_ids) - 1
    assert report.reused_tokens == known and report.computed_tokens == report.prompt_tokens - known


def test_an_answer_that_was_not_generated_here_is_noted(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "I was told so."}]
    report = llm.chat([*messages, {"role": "user", "content": "Really?"}], sampling()).report
    assert report is not None and len(report.notes) == 1 and "1 assistant turn" in report.notes[0]
    assert llm.chat([{"role": "user", "content": "Hello"}], sampling()).report.notes == ()  # type: ignore[union-attr]

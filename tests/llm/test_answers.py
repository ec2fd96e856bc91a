"""``LLM``, from text to text: answers, streams, prompts, sampling and segments on one tiny checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Completion, Policy, Prompt, SamplingParams, Segment
from hypic.errors import ConfigError, PromptError, PromptTooLong
from hypic.kept import Forgotten
from hypic.types import TextEngine
from tests.checkpoints import add_tokenizer, minimax
from tests.llm.asking import REUSE, SETTINGS, asked, assert_idle, passage, sampling

# -- asking ----------------------------------------------------------------------------------------------------------


def test_generate_answers_with_usage_and_report(llm: LLM) -> None:
    cold, warm = llm.generate(asked(), sampling()), llm.generate(asked(), sampling())
    assert cold.text == warm.text and len(cold.token_ids) == 6 and cold.finish_reason == "length"
    assert cold.text == llm.tokenizer.decode(cold.token_ids)
    assert cold.report is not None and warm.report is not None and cold.usage is not None and warm.usage is not None
    assert [s.outcome for s in cold.report.segments] == ["encoded"] * 3
    assert [s.outcome for s in warm.report.segments] == ["hit"] * 3 and warm.report.num_hits == 3
    assert warm.report.computed_tokens < cold.report.computed_tokens / 3
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens == cold.report.prompt_tokens
    assert warm.usage.completion_tokens == 6 and warm.usage.cached_tokens == warm.report.reused_tokens > 0
    assert cold.report.fingerprint == llm.fingerprint and cold.report.policy == REUSE
    assert_idle(llm)


def test_a_list_of_prompts_equals_them_one_at_a_time(shared: LLM) -> None:
    prompts: list[Any] = [asked(n, n, n + 1) for n in range(5)]
    prompts += ["Just a question.", [{"role": "user", "content": "Hello"}]]
    together = shared.generate(prompts, sampling())
    assert [one.text for one in together] == [shared.generate(prompt, sampling()).text for prompt in prompts]
    assert len({one.text for one in together}) > 1


def test_a_list_encodes_shared_segments_once(llm: LLM) -> None:
    reports = [one.report for one in llm.generate([asked(n) for n in range(4)], sampling())]
    outcomes = [[s.outcome for s in report.segments] for report in reports if report is not None]
    assert outcomes == [["encoded"] * 3] + [["hit"] * 3] * 3


def test_a_stream_joined_is_the_answer(shared: LLM) -> None:
    pieces = list(shared.stream(asked(), sampling(12)))
    whole = shared.generate(asked(), sampling(12))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == list(whole.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * 11 + ["length"]
    assert all(piece.report is None and piece.usage is None for piece in pieces[:-1])
    assert Completion.join(pieces).report is not None


def test_an_llm_is_a_text_engine(shared: LLM) -> None:
    assert isinstance(shared, TextEngine)
    assert len(shared.registry) == 0 and shared.registry.split("nothing known") == ["nothing known"]


def test_chat_is_generate_for_messages(shared: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    assert shared.chat(messages, sampling()).text == shared.generate(messages, sampling()).text


def test_tokens_of_a_text(shared: LLM) -> None:
    ids = shared.tokenize("the mill")
    assert shared.count_tokens("the mill") == len(ids) and shared.tokenizer.decode(ids) == "the mill"


def test_both_families_answer(tmp_path: Path) -> None:
    add_tokenizer(minimax(tmp_path))
    with LLM(str(tmp_path), **SETTINGS) as llm:
        cold, warm = llm.generate(asked(), sampling()), llm.generate(asked(), sampling())
        assert cold.text == warm.text and warm.report is not None and warm.report.num_hits == 3
        assert_idle(llm)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_empty_and_white_space_segments_leave_no_entry(llm: LLM) -> None:
    prompt = Prompt([Segment(""), Segment(passage(1)), Segment("  \n "), Segment("")], "Who?")
    report = llm.generate(prompt, sampling()).report
    assert report is not None and [s.outcome for s in report.segments] == ["encoded"]
    plain = llm.generate(Prompt([Segment(passage(1))], "Who?"), sampling()).report
    assert plain is not None and plain.num_hits == 1
    only_empty = llm.generate(Prompt([Segment(""), Segment(" ")], "Who?"), sampling()).report
    assert only_empty is not None and only_empty.segments == ()
    assert_idle(llm)


def test_white_space_around_a_segment_is_no_part_of_it(llm: LLM) -> None:
    llm.generate(Prompt([Segment(passage(1))], "Who?"), sampling())
    report = llm.generate(Prompt([Segment(f"\n\n{passage(1)} \n")], "Who?"), sampling()).report
    assert report is not None and report.num_hits == 1


@pytest.mark.parametrize("prompt", [[], "x\ud800", 7, [7], Prompt([], "", template=False)])
def test_prompts_that_cannot_be_read(prompt: Any, shared: LLM) -> None:
    with pytest.raises(PromptError) as caught:
        shared.generate(prompt, sampling())
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_segment_longer_than_the_context_is_refused_before_anything_is_stored(llm: LLM) -> None:
    before = llm.stats()
    for prompt in (Prompt([Segment(passage(1, 2000))], "Who?"), Prompt([], passage(1, 2000))):
        with pytest.raises(PromptTooLong, match="2048"):
            llm.generate(prompt, sampling())
    with pytest.raises(PromptTooLong, match="2048"):
        llm.warm([Segment(passage(1, 2000))])
    with pytest.raises(PromptTooLong):
        llm.generate([asked(), Prompt([], passage(1, 2000))], sampling())
    assert llm.stats()["store"]["held_bytes"] >= before["store"]["held_bytes"] == 0
    assert_idle(llm)


def test_answers_end_where_the_context_does(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS | {"max_context": 128}) as llm:
        answer = llm.generate("Who?", sampling(500))
        assert answer.usage is not None and answer.finish_reason == "length"
        assert answer.usage.total_tokens == 128
        assert_idle(llm)


# -- sampling --------------------------------------------------------------------------------------------------------


def test_stop_strings_end_the_text_before_themselves(shared: LLM) -> None:
    whole = shared.generate(asked(), sampling(30)).text
    stop = whole[8:10]
    answer = shared.generate(asked(), sampling(30, stop=[stop]))
    assert answer.finish_reason == "stop" and answer.text == whole[: whole.index(stop)]
    streamed = "".join(piece.text for piece in shared.stream(asked(), sampling(30, stop=[stop])))
    assert streamed == answer.text


def test_the_end_token_ends_an_answer_unless_it_is_ignored(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        ids = llm.generate(asked(), sampling(9)).token_ids
        llm._loop.call(lambda engine: object.__setattr__(engine.vocabulary, "eos_ids", frozenset({ids[4]})))
        first = ids.index(ids[4])
        ended = llm.generate(asked(), SamplingParams(max_tokens=9))
        assert ended.finish_reason == "stop" and ended.token_ids == ids[: first + 1]
        assert ended.text == llm.tokenizer.decode(ids[:first])
        assert llm.generate(asked(), sampling(9)).token_ids == ids


def test_logprobs_are_those_of_the_softmax(shared: LLM) -> None:
    answer = shared.generate(asked(), sampling(4, logprobs=100))
    plain = shared.generate(asked(), sampling(4))
    assert answer.token_ids == plain.token_ids and plain.logprobs == ()
    assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    for one in answer.logprobs:
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True) and one.top[0] == (one.token_id, one.logprob)
        assert 0.5 < sum(math.exp(value) for value in values) <= 1.0 + 1e-9


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(shared: LLM) -> None:
    hot = sampling(12, temperature=1.5, seed=7)
    alone = shared.generate(asked(), hot)
    beside = shared.generate([asked(5, 6), asked(), asked(7, 8)], hot)
    other = shared.generate(asked(), sampling(12, temperature=1.5, seed=8))
    assert alone.token_ids == beside[1].token_ids != other.token_ids
    assert alone.token_ids != shared.generate(asked(), sampling(12)).token_ids


@pytest.mark.parametrize("settings", [{"colour": 1}, {"dtype": "int4"}, {"max_running": 0}, {"seam": -1}])
def test_settings_that_cannot_be_right(settings: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), **settings)
    assert str(next(iter(settings.values()))) in str(caught.value) or "colour" in str(caught.value)


# -- segments --------------------------------------------------------------------------------------------------------


def test_warming_encodes_and_tells_its_progress(llm: LLM) -> None:
    heard: list[tuple[int, int]] = []
    segments = [Segment(passage(n), name=str(n)) for n in range(40)]
    reports = llm.warm(segments, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(n + 1, 40) for n in range(40)]
    assert [report.segments[0].outcome for report in reports] == ["encoded"] * 40
    assert [report.segments[0].name for report in reports] == [str(n) for n in range(40)]
    again = llm.warm(segments[:3])
    assert [report.segments[0].outcome for report in again] == ["hit"] * 3
    answer = llm.generate(asked(0, 1, 2, 3), sampling()).report
    assert answer is not None and answer.num_hits == 3
    assert_idle(llm)


def test_warming_nothing_and_short_texts(llm: LLM) -> None:
    assert llm.warm([]) == []
    reports = llm.warm([Segment("short")], policy=Policy())
    assert [s.outcome for s in reports[0].segments] == ["live"]
    assert_idle(llm)


def test_forgetting_by_label(llm: LLM) -> None:
    labels: list[dict[str, str]] = [{"source": "a"}, {"source": "a", "name": "n"}, {"source": "b"}, {"namespace": "t"}]
    llm.warm([Segment(passage(n), **label) for n, label in enumerate(labels)])  # type: ignore[arg-type]
    assert llm.forget(source="nobody") == Forgotten()
    assert llm.forget(source="a", name="n") == Forgotten(1) and llm.forget(source="a").num_entries == 1
    assert llm.forget(namespace="t").num_entries == 1 and llm.forget(name="n").num_entries == 0
    assert llm.forget(everything=True).num_entries == 1 and llm.stats()["store"]["num_entries"] == 0


@pytest.mark.parametrize("given", [{"name": 3}, {"source": ["a"]}, {"namespace": True}, {"everything": "yes"}, {}])
def test_what_is_no_label_forgets_nothing(given: dict[str, Any], llm: LLM) -> None:
    llm.warm([Segment(passage(1), name="3", source="a")])
    with pytest.raises(ConfigError, match="|".join(given) or "no source="):
        llm.forget(**given)
    assert llm.forget(source="a").num_entries == 1


def test_stats_count(llm: LLM) -> None:
    llm.generate([asked(n) for n in range(3)], sampling())
    stats = llm.stats()
    assert stats["store"]["stored"] >= 3 and stats["store"]["hits"] >= 0
    assert stats["weight_bytes"] > 0 and stats["max_context"] == 2048
    assert stats["pool"]["num_bytes"] <= 64 * 2**20


def test_namespaces_do_not_share_entries(llm: LLM) -> None:
    def outcome(namespace: str | None) -> tuple[str, str]:
        report = llm.generate(Prompt([Segment(passage(1), namespace=namespace)], "Who?"), sampling()).report
        assert report is not None
        return report.segments[0].outcome, report.segments[0].reason

    assert outcome("a") == ("encoded", "first time") and outcome("b") == ("encoded", "other namespace")
    assert outcome("a") == ("hit", "") and outcome(None) == ("encoded", "other namespace")

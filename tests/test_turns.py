"""Conversations: every turn computes its new text and nothing else, in whatever form an answer comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Completion, Policy, Prompt, SamplingParams, Segment
from hypic.stream import Answer
from hypic.types import CacheReport
from tests.checkpoints import add_tokenizer, qwen
from tests.engine.tiny_tokenizers import CHATML

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 4096}
SETTINGS |= {"max_running": 4, "min_segment_tokens": 0}
WORDS = "the river runs past an old mill where three brothers grind rye and oats for the town below".split()
QUESTIONS = [" ".join(WORDS[(n + i * 3) % len(WORDS)] for i in range(4 + n % 3)) for n in range(10)]
NO_THINKING = {"enable_thinking": False}


def passage(seed: int, num_words: int = 30) -> str:
    return f"Passage {seed}: " + " ".join(WORDS[(seed * 7 + i * (seed + 1)) % len(WORDS)] for i in range(num_words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("turns"))
    add_tokenizer(made)
    settings = made / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": CHATML}))
    return made


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SETTINGS) as made:
        yield made


def user(text: str, *documents: str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": one} for one in (*documents, text)]
    return {"role": "user", "content": blocks if documents else text}


def settle(llm: LLM) -> None:
    """Wait until heads that were put off are computed."""
    deadline = time.monotonic() + 20
    while any(llm.stats()["requests"].values()) and time.monotonic() < deadline:
        time.sleep(0.005)


def report_of(answer: Completion) -> CacheReport:
    assert answer.report is not None
    return answer.report


def talk(llm: LLM, first: dict[str, Any], num_tokens: int, policy: Policy | None = None, **kwargs: Any) -> list[Any]:
    """Ten turns; the answers, and the length of the prompt of each turn without its new message."""
    messages, answers = [first], []
    for question in [*QUESTIONS[1:], ""]:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        answers.append(llm.chat(messages, sampling, policy=policy, **kwargs))
        settle(llm)
        messages += [{"role": "assistant", "content": answers[-1].text}, user(question)]
    return answers


def new_tokens(answers: Sequence[Completion]) -> list[int]:
    """Tokens by which each prompt is longer than the one before, less the answer's, which were run as they came."""
    lengths = [report_of(answer).prompt_tokens for answer in answers]
    return [after - before for before, after in zip(lengths, lengths[1:], strict=False)]


@pytest.mark.parametrize("reuse", ["segments", "prefix"])
def test_ten_turns_compute_their_new_text_only(reuse: str, llm: LLM, folder: Path) -> None:
    """An answer that ends for want of room was run but for its last token."""
    policy = llm.config.policy.with_(reuse=reuse)
    answers = talk(llm, user(QUESTIONS[0], passage(1), passage(2)), 7, policy)
    computed = [report_of(answer).computed_tokens for answer in answers]
    assert computed[1:] == [new - 6 for new in new_tokens(answers)]
    assert sum(computed) < 1.5 * report_of(answers[-1]).prompt_tokens
    with LLM(str(folder), **SETTINGS) as other:
        for answer in answers:
            other.tokenizer.remember(answer.text, answer.token_ids)
        messages = [user(QUESTIONS[0], passage(1), passage(2))]
        for answer, question in zip(answers, [*QUESTIONS[1:], ""], strict=True):
            other.forget(everything=True)
            scratch = other.chat(messages, SamplingParams(max_tokens=7, ignore_eos=True), policy=policy)
            assert scratch.token_ids == answer.token_ids, "the answer is the same, whatever it was continued from"
            messages += [{"role": "assistant", "content": answer.text}, user(question)]


@pytest.mark.parametrize("reuse", ["segments", "prefix"])
def test_an_answer_comes_back_in_another_form_than_it_was_generated_in(reuse: str, llm: LLM) -> None:
    """The template opens answers with an empty reasoning that it leaves out later: their heads are computed aside."""
    policy = llm.config.policy.with_(reuse=reuse)
    answers = talk(llm, user(QUESTIONS[0], passage(1)), 7, policy, chat_template_kwargs=NO_THINKING)
    opening = len(llm.tokenizer._encode_scaffold("<think>\n\n</think>\n\n"))
    computed = [report_of(answer).computed_tokens for answer in answers]
    between = new_tokens(answers)
    assert opening > 0 and computed[1:] == [new - 7 + opening for new in between]


def test_a_head_waits_until_nothing_else_is_to_do(llm: LLM) -> None:
    """It is put off while requests run, and never begun where it would have to encode or to start from nothing."""
    messages = [user("Tell me about the mill and the river.", passage(1))]
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    answer = llm.chat(messages, sampling, chat_template_kwargs=NO_THINKING)
    settle(llm)
    kinds = [entry.kind for entry in llm.entries()]
    llm.forget(everything=True)
    assert kinds.count("segment") == 1 and kinds.count("snapshot") > 1
    llm._turns.answered(llm._asked(messages, sampling, None, None, NO_THINKING), _said(answer))
    settle(llm)
    assert llm.entries() == [], "everything was forgotten, and a head is not worth a whole prompt"


def test_thinking_that_clients_leave_out_is_no_part_of_the_head(llm: LLM) -> None:
    messages = [user("Tell me about the mill and the river.")]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    asked = llm._asked(messages, sampling, None, None, None)
    list(llm._streamed(asked))
    settle(llm)
    said = "<think>\nWhat do they grind?\n</think>\n\nRye and oats, of course."
    ids = llm.tokenize(said)
    llm._turns.answered(asked, Answer([said], ids, True))
    settle(llm)
    messages += [{"role": "assistant", "content": "Rye and oats, of course."}, user("And who?")]
    report = report_of(llm.chat(messages, sampling))
    pieces = llm.tokenizer.encode(messages)
    last = next(n for n, piece in enumerate(pieces) if piece.is_answer)
    assert report.computed_tokens == sum(len(piece.ids) for piece in pieces[last + 1 :])
    assert report.notes == (), "the ids of what was left are those that were generated"


def _said(answer: Completion) -> Answer:
    return Answer([answer.text], list(answer.token_ids), True)


# -- editing a prompt ------------------------------------------------------------------------------------------------

SEAM = 8


def edited(llm: LLM, seeds: Sequence[int]) -> tuple[CacheReport, int]:
    """The report of a prompt over passages, and how many tokens all of it but the interiors has."""
    prompt = [user("Who grinds rye?", *(passage(seed) for seed in seeds))]
    report = report_of(llm.chat(prompt, SamplingParams(max_tokens=1)))
    interiors = sum(segment.num_tokens - SEAM for segment in report.segments)
    return report, report.prompt_tokens - interiors


@pytest.mark.parametrize(
    ("after", "new"),
    [((1, 2, 9, 4), [2]), ((1, 2, 3, 9, 4), [3]), ((1, 3, 2, 4), []), ((1, 2, 4), []), ((4, 3, 2, 1), [])],
    ids=["edit", "insert", "swap", "delete", "reverse"],
)
def test_an_edit_computes_what_changed_the_seams_and_the_live_text_behind_it(
    after: Sequence[int], new: Sequence[int], llm: LLM
) -> None:
    """The head of live text before the first passage stands in a snapshot: nothing of it is computed again."""
    edited(llm, (1, 2, 3, 4))
    report, num_rows = edited(llm, after)
    head = len(llm.tokenizer._encode_scaffold("<|im_start|>user\n"))
    encoded = [segment.num_tokens for segment in report.segments if segment.outcome == "encoded"]
    assert [n for n, s in enumerate(report.segments) if s.outcome == "encoded"] == list(new)
    saved = head if snapshot_lengths(llm) and head in snapshot_lengths(llm) else 0
    assert report.computed_tokens == num_rows - saved + sum(encoded)


def snapshot_lengths(llm: LLM) -> list[int]:
    return [entry.num_tokens for entry in llm.entries() if entry.kind == "snapshot"]


def test_an_edit_in_a_conversation_computes_what_stands_behind_it(llm: LLM) -> None:
    """Changing the second message continues from the first answer."""
    messages = [user("Tell me about the mill and the river.", passage(1), passage(2))]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    first = llm.chat(messages, sampling)
    messages += [{"role": "assistant", "content": first.text}]
    llm.chat([*messages, user("And the oats?")], sampling)
    report = report_of(llm.chat([*messages, user("And the three brothers?")], sampling))
    behind = report.prompt_tokens - (report_of(first).prompt_tokens + 5)
    assert report.computed_tokens == behind


# -- whose a snapshot is ---------------------------------------------------------------------------------------------


def computed_in(llm: LLM, namespace: str | None, text: str) -> int:
    hints = {} if namespace is None else {"hypic": {"namespace": namespace}}
    messages = [{"role": "system", "content": "You are the miller, and you answer in one sentence or two."}]
    messages += [{**user(text), **hints}]
    return report_of(llm.chat(messages, SamplingParams(max_tokens=2, ignore_eos=True))).computed_tokens


def test_no_namespace_can_tell_what_another_asked(llm: LLM) -> None:
    """The head that says nothing of whose it is, is shared; what is said in a namespace is continued in it only."""
    text = "My door code is four nine one two, and the mill is closed on Sundays."
    cold = computed_in(llm, "alice", text)
    shared = computed_in(llm, "bob", "Quite another thing that bob has to ask of the miller this morning.")
    assert computed_in(llm, "alice", text) < 20 < cold
    as_new = computed_in(llm, "carol", text)
    assert computed_in(llm, None, text) == as_new == computed_in(llm, "dave", text) > 40
    assert shared < cold, "the system message is in nobody's namespace"


def test_documents_are_shared_and_a_question_is_not(llm: LLM) -> None:
    def computed(namespace: str | None) -> tuple[int, str]:
        prompt = Prompt([Segment(passage(1))], "Who grinds rye in this town, and who oats?", namespace=namespace)
        report = report_of(llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        return report.computed_tokens, report.segments[0].outcome

    cold, _ = computed("alice")
    first, outcome = computed("bob")
    again, _ = computed("bob")
    assert outcome == "hit" and again < 20 < first < cold
    assert computed(None) == (first, "hit") and computed("alice")[0] == again


def test_a_text_too_short_to_be_cached_is_continued_in_its_namespace_only(llm: LLM) -> None:
    policy = Policy(min_segment_tokens=400)

    def computed(namespace: str | None) -> int:
        prompt = Prompt([Segment(passage(1), namespace=namespace)], "Who grinds rye in this town?")
        answer = llm.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True), policy=policy)
        return report_of(answer).computed_tokens

    cold = computed("alice")
    assert computed("bob") == cold > computed("alice")

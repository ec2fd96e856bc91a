"""The bundled model: its size, the same tokens as transformers, the demo's questions and a small exam, with reuse and
without. Everything here runs from files of the project alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hypic import LLM, Policy, Prompt, SamplingParams, Segment
from hypic.checkpoints import bundled
from hypic.types import Completion
from hypic_apps import corpus
from hypic_apps.corpus import Question
from hypic_apps.train import smoke
from hypic_apps.train.exam import Item
from hypic_apps.train.scores import prompt as asked
from hypic_retriever import Index

FULL, SEGMENTS = Policy(reuse="none"), Policy(reuse="segments")
NUM_PASSAGES = 16
TWELVE = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
WHOLE = SamplingParams(max_tokens=48, temperature=0.0)
SMOKE = Path(__file__).parent / "data" / "one_hop_smoke.json.xz"
MARGIN = 1e-3
SHARD_BYTES, WEIGHT_BYTES = 16 * 2**20, 24_000_000


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    before = torch.get_num_threads()
    with LLM(device="cpu", dtype="float32", memory="1GiB", threads=2) as made:
        yield made
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts() -> dict[str, Prompt]:
    """The demo's questions, each behind the passages found for it."""
    index = Index()
    index.add_documents({document.name: document.text for document in [*corpus.articles(), *corpus.company()]})
    found: dict[str, Prompt] = {}
    for question in corpus.questions():
        hits = index.search(question.question, NUM_PASSAGES)
        found[question.question] = Prompt([Segment(hit.passage.text) for hit in hits], question.question)
    return found


@pytest.fixture(scope="module")
def recomputed(llm: LLM, prompts: dict[str, Prompt]) -> dict[str, list[int]]:
    """The first twelve greedy ids to each of the demo's questions under full recompute, beyond the answer's end."""
    given = llm.generate(list(prompts.values()), TWELVE, policy=FULL)
    return {question: list(answer.token_ids) for question, answer in zip(prompts, given, strict=True)}


@pytest.fixture(scope="module")
def peer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(bundled(), dtype=torch.float32).eval()


def ids_of(llm: LLM, prompt: Prompt) -> list[int]:
    return [i for piece in llm.tokenizer.encode(prompt) for i in piece.ids]


def same_where_clear(ours: list[int], logits: torch.Tensor) -> int:
    """Asserts that ``ours [T]`` are the argmax of ``logits [T, vocab]`` wherever that is clear; in how many places."""
    best = logits.topk(2).values
    clear = (best[:, 0] - best[:, 1] > MARGIN).tolist()
    theirs = logits.argmax(-1).tolist()
    assert [a for a, sure in zip(ours, clear, strict=True) if sure] == [
        b for b, sure in zip(theirs, clear, strict=True) if sure
    ]
    return sum(clear)


# -- files -----------------------------------------------------------------------------------------------------------


def test_the_weights_are_within_their_limits() -> None:
    shards = sorted(bundled().glob("*.safetensors"))
    index = json.loads((bundled() / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    assert all(shard.stat().st_size < SHARD_BYTES for shard in shards)
    num_bytes = 0
    for shard in shards:
        with safe_open(shard, "pt") as file:
            assert {index["weight_map"][name] for name in file.keys()} == {shard.name}  # noqa: SIM118  # no mapping
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                assert part.get_dtype() == "BF16"
                num_bytes += 2 * math.prod(part.get_shape())
    assert 20e6 < num_bytes == index["metadata"]["total_size"] <= WEIGHT_BYTES
    assert sum(shard.stat().st_size for shard in shards) <= WEIGHT_BYTES


def test_the_card_states_licences_and_the_smoke_exam_is_small() -> None:
    card = (bundled() / "README.md").read_text(encoding="utf-8")
    for word in ("CC BY-SA 4.0", "WordNet", "GeoNames", "one_hop", "two_hop", "Limits"):
        assert word in card
    assert SMOKE.stat().st_size <= 100_000


# -- transformers ----------------------------------------------------------------------------------------------------


def test_transformers_tokenizer_gives_the_same_ids(llm: LLM, prompts: dict[str, Prompt]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(bundled())
    for prompt in prompts.values():
        content = prompt.glue.join([*(segment.text for segment in prompt.segments), prompt.tail])
        text = theirs.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids_of(llm, prompt)


def test_transformers_gives_the_same_greedy_tokens(
    llm: LLM, prompts: dict[str, Prompt], recomputed: dict[str, list[int]], peer: Any
) -> None:
    num_clear = 0
    for question, prompt in prompts.items():
        given = recomputed[question]
        assert len(given) == 12
        tokens = torch.tensor([[*ids_of(llm, prompt), *given]])
        with torch.inference_mode():
            logits = peer(input_ids=tokens, use_cache=False, logits_to_keep=13).logits[0, :-1]
        num_clear += same_where_clear(given, logits)
    assert num_clear > 11 * len(prompts), "almost everywhere it is clear"


def test_transformers_own_generation_gives_the_same_answer(llm: LLM, peer: Any) -> None:
    item = min(smoke.read(SMOKE), key=lambda item: sum(map(len, item.passages)))
    tokens = torch.tensor([ids_of(llm, asked(item))])
    with torch.inference_mode():
        theirs = peer.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    answer = llm.generate(asked(item), SamplingParams(max_tokens=8, temperature=0.0), policy=FULL)
    assert llm.tokenizer.decode(theirs[0, tokens.shape[1] :].tolist()) == answer.text


# -- what it can do --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", corpus.questions(), ids=lambda q: q.question)
def test_the_demos_questions_are_answered_under_full_recompute(
    llm: LLM, recomputed: dict[str, list[int]], question: Question
) -> None:
    ids = recomputed[question.question]
    end = next(place for place, i in enumerate(ids) if i in llm.tokenizer.eos_ids)
    assert llm.tokenizer.decode(ids[:end]) == question.expected


@pytest.mark.parametrize("question", corpus.questions(), ids=lambda q: q.question)
def test_the_demos_questions_are_answered_from_segments(
    llm: LLM, prompts: dict[str, Prompt], question: Question
) -> None:
    answer = llm.generate(prompts[question.question], WHOLE, policy=SEGMENTS)
    assert answer.text == question.expected and answer.finish_reason == "stop"
    assert answer.report is not None
    assert sum(segment.outcome != "live" for segment in answer.report.segments) > NUM_PASSAGES // 2


@pytest.fixture(scope="module")
def exam(llm: LLM) -> tuple[list[Item], list[Completion]]:
    """Sixty questions about unseen names in wordings never trained on, sixteen invented passages each."""
    items = smoke.read(SMOKE)
    return items, llm.generate([asked(item) for item in items], WHOLE, policy=FULL)


def test_one_hop_questions_on_unseen_names_and_wordings(exam: tuple[list[Item], list[Completion]]) -> None:
    items, answers = exam
    assert len(items) == 60 and all(len(item.passages) == NUM_PASSAGES for item in items)
    num_right = sum(answer.text.strip() == item.answer for item, answer in zip(items, answers, strict=True))
    assert num_right >= 0.7 * len(items)


def test_without_its_passages_it_does_not_know(llm: LLM, exam: tuple[list[Item], list[Completion]]) -> None:
    items, _ = exam
    others = [
        Item(other.passages, item.question, item.answer) for item, other in zip(items[:4], items[4:8], strict=True)
    ]
    answers = llm.generate([asked(item) for item in others], WHOLE, policy=FULL)
    assert sum(answer.text.strip() == item.answer for item, answer in zip(others, answers, strict=True)) <= 1

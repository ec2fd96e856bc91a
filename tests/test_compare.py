"""``LLM.compare``: what differs, which segment does it, and what to set."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Completion, Policy, Prompt, SamplingParams, Segment
from hypic.compare import Comparison, Difference, Way, advice, divergence
from hypic.errors import ConfigError
from hypic.types import TokenLogprob
from hypic_apps.cli.compare import read
from hypic_apps.cli.main import main
from tests.apps.commands import one_sentence
from tests.checkpoints import CHATML, add_tokenizer, qwen

WORDS = "the river runs past an old mill where three brothers grind rye and oats for the town below".split()
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 2048}


def passage(seed: int, num_words: int = 40) -> Segment:
    text = " ".join(WORDS[(seed * 7 + i * (seed + 1)) % len(WORDS)] for i in range(num_words))
    return Segment(f"Passage {seed}: {text}", name=f"part {seed}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = qwen(tmp_path_factory.mktemp("compare"))
    add_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as made:
        yield made


def differing(llm: LLM) -> tuple[Prompt, Comparison]:
    """A prompt of two segments whose answer from segments is another one than in full."""
    for seed in range(1, 40):
        prompt = Prompt([passage(seed), passage(seed + 1)], "Who grinds rye?")
        found = llm.compare(prompt, 24)
        if not found.segments.is_same:
            return prompt, found
    raise AssertionError("no prompt of forty differs; the model of the test is no use")


def test_the_answers_are_those_of_generate(llm: LLM) -> None:
    prompt, found = differing(llm)
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    assert found.full.text == llm.generate(prompt, sampling, policy=Policy(reuse="none")).text
    assert found.segments.text == llm.generate(prompt, sampling).text
    assert found.again.is_same and found.again.kl < 1e-9


def test_the_difference_is_where_the_tokens_part(llm: LLM) -> None:
    prompt, found = differing(llm)
    cached = llm.generate(prompt, SamplingParams(max_tokens=24, temperature=0.0))
    difference = found.segments.difference
    assert difference is not None
    at = difference.position
    assert cached.token_ids[:at] == found.full.token_ids[:at]
    assert (found.full.token_ids[at], cached.token_ids[at]) == (difference.token_id, difference.other_token_id)
    assert difference.margin > 0 and difference.other_margin > 0 and found.segments.kl > found.again.kl


def test_every_cached_segment_is_run_live_in_turn(llm: LLM) -> None:
    _, found = differing(llm)
    assert [way.segment for way in found.live] == [0, 1]
    assert [way.name.split()[0] for way in found.live] == ["part", "part"]
    assert all(way.extra_tokens > 20 for way in found.live) and len(found.seams) == 3
    assert found.closest in found.live and found.advice


def test_the_only_segment_run_live_is_full_recompute(llm: LLM) -> None:
    for seed in range(1, 60):
        found = llm.compare(Prompt([passage(seed)], "Who grinds rye?"), 32)
        if not found.segments.is_same:
            (live,) = found.live
            assert live.is_same and live.kl < 1e-9 < found.segments.kl
            assert "cache=False" in found.advice or "seam=" in found.advice
            return
    raise AssertionError("no prompt of sixty differs; the model of the test is no use")


def test_nothing_to_set(llm: LLM) -> None:
    found = llm.compare(Prompt([Segment("Too short.")], "Who?"), 4)
    assert found.segments.is_same and not found.live and "nothing to set" in found.advice


def test_a_policy_without_segments_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="'none'"):
        llm.compare("Who?", policy=Policy(reuse="none"))


def way(name: str, *, same: bool, extra: int = 0, segment: int | None = None, setting: str = "", at: int = 2) -> Way:
    difference = None if same else Difference(at, 1, 2, 0.01, 0.02)
    return Way(name, "", difference, 0.1, extra, segment, setting)


def test_advice() -> None:
    differs = way("segments", same=False)
    found = Comparison(Completion(), way("again", same=True), differs)
    assert "reuse='none'" in advice(found)
    tried = (way("a live", same=True, extra=90, segment=0, setting="cache=False"), way("b live", same=False, segment=1))
    wide = (way("seam 16", same=True, extra=40, setting="seam=16"),)
    assert "cache=False) for a:" in advice(replace(found, live=tried))
    assert "Set seam=16: " in advice(replace(found, live=tried, seams=wide)), "the cheaper of the two"
    assert "deterministic=True" in advice(replace(found, again=way("again", same=False), live=tried))
    late = way("again", same=False, at=9)
    assert "cache=False" in advice(replace(found, again=late, live=tried)), "what parts later explains nothing"


def test_divergence_is_a_lower_bound() -> None:
    full, other = [0.5, 0.2, 0.2, 0.1], [0.3, 0.3, 0.1, 0.3]
    whole = sum(p * math.log(p / q) for p, q in zip(full, other, strict=True))

    def seen(p: list[float], number: int) -> TokenLogprob:
        top = sorted(((i, math.log(x)) for i, x in enumerate(p)), key=lambda pair: -pair[1])[:number]
        return TokenLogprob(top[0][0], top[0][1], tuple(top))

    assert divergence(seen(full, 4), seen(other, 4)) == pytest.approx(whole)
    assert 0 < divergence(seen(full, 2), seen(other, 3)) <= whole
    assert divergence(seen(full, 4), seen(full, 4)) == pytest.approx(0.0, abs=1e-12)


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, found = differing(llm)
    request = tmp_path / "request.json"
    parts = [{"type": "text", "text": s.text, "hypic": {"name": s.name}} for s in prompt.segments]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt.tail}]}]
    request.write_text(json.dumps({"messages": messages}))
    engine = ["--model", str(folder), "--device", "cpu", "--dtype", "float64", "--memory", "64MiB"]
    assert main(["compare", str(request), "--max-tokens", "24", *engine]) == 0
    out = capsys.readouterr().out
    assert found.advice in out and "part" in out
    request.write_text(json.dumps({"segments": [s.text for s in prompt.segments], "question": prompt.tail}))
    assert main(["compare", str(request), "--max-tokens", "24", "--json", *engine]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["segments"]["text"] == found.segments.text and len(told["live"]) == 2 and told["advice"]


def test_a_policy_in_the_request(folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, _ = differing(llm)
    request = tmp_path / "request.json"
    engine = ["--model", str(folder), "--device", "cpu", "--dtype", "float64", "--memory", "64MiB"]

    def told(hypic: dict[str, Any], *flags: str) -> tuple[int, str]:
        body = {"segments": [s.text for s in prompt.segments], "question": prompt.tail, "hypic": hypic}
        request.write_text(json.dumps(body))
        rc = main(["compare", str(request), "--max-tokens", "24", "--json", *engine, *flags])
        seen = capsys.readouterr()
        return rc, seen.err if rc else json.loads(seen.out)["seams"][0]["name"]

    wide = {"seam": 16, "namespace": "alice"}
    assert told({})[1] == "seam 16", "wider than 8"
    rc, said = told({"reuse": "none"})
    assert rc == 2 and "'none'" in said
    assert told({"reuse": "none"}, "--reuse", "segments") == (0, "seam 16"), "the flag wins"
    assert told(wide)[1] == "seam 32"
    assert told(wide, "--seam", "8")[1] == "seam 16"


@pytest.fixture(scope="module")
def persona(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose template opens with who speaks, and thinks unless it is told not to."""
    made = qwen(tmp_path_factory.mktemp("persona"))
    add_tokenizer(made)
    told = made / "tokenizer_config.json"
    config = json.loads(told.read_text())
    opening = "{{ persona or 'nobody' }} {{ 'says' if enable_thinking is false else 'thinks' }}: "
    (made / "chat_template.jinja").unlink(missing_ok=True)
    told.write_text(json.dumps({**config, "chat_template": opening + CHATML}))
    return made


def test_variables_of_the_template_are_followed(
    persona: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "request.json"
    engine = ["--model", str(persona), "--device", "cpu", "--dtype", "float64", "--memory", "64MiB"]
    messages = [{"role": "user", "content": [{"type": "text", "text": passage(1).text}, {"type": "text", "text": "?"}]}]

    def told(kwargs: Any, *flags: str) -> list[int]:
        request.write_text(json.dumps({"messages": messages, "chat_template_kwargs": kwargs}))
        assert main(["compare", str(request), "--max-tokens", "24", "--json", *engine, *flags]) == 0
        ids: list[int] = json.loads(capsys.readouterr().out)["full"]["token_ids"]
        return ids

    with LLM(persona, **SETTINGS) as llm:

        def expected(**kwargs: Any) -> list[int]:
            found = llm.compare(messages, 24, chat_template_kwargs=kwargs)
            sampling = SamplingParams(max_tokens=24, temperature=0.0)
            whole = llm.generate(messages, sampling, policy=Policy(reuse="none"), chat_template_kwargs=kwargs)
            assert found.full.token_ids == whole.token_ids
            return list(whole.token_ids)

        miller = {"persona": "a miller with a long beard"}
        ways = {
            "none": (told(None), expected(enable_thinking=False)),
            "miller": (told(miller), expected(**miller, enable_thinking=False)),
            "thinks": (told({**miller, "enable_thinking": True}), expected(**miller, enable_thinking=True)),
            "flag": (told({**miller, "enable_thinking": False}, "--thinking"), expected(**miller)),
        }
    assert all(mine == theirs for mine, theirs in ways.values()), ways
    assert len({tuple(mine) for mine, _ in ways.values()}) == 3, "the flag and the variable ask for the same"


def test_variables_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": ["a"]}))
    assert main(["compare", str(request), "--model", "nowhere"]) == 2
    assert "chat_template_kwargs is ['a']; send an object" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("more", "flags", "expected"),
    [
        ({"tools": [5]}, [], "tools is [5]; pass a list of functions as OpenAI describes them"),
        ({"tools": {"name": "look"}}, [], "tools is {'name': 'look'}; pass a list of functions"),
        ({"hypic": {"reuse": "none"}}, [], "reuse is 'none', which is full recompute"),
        ({"tool": [5]}, [], "request.json has the field 'tool', which is not known; write tools."),
        ({"policy": {"seam": 4}}, [], "'policy', which is not known; it may have messages, segments, question, tools"),
        ({"functions": [{"name": "look"}]}, [], "refuse request.json: functions is not supported by this server"),
        ({"continue_final_message": True}, [], "continue_final_message is True; this server supports False only"),
        ({}, ["--reuse", "prefix"], "reuse is 'prefix', which is full recompute"),
        ({}, ["--max-context", "-3"], "max_context is -3"),
    ],
)
def test_what_is_refused_before_a_model_is_looked_for(
    more: Any, flags: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], **more}))
    assert main(["compare", str(request), "--model", "nowhere", *flags]) == 2
    assert expected in one_sentence(capsys.readouterr().err)


def test_segments_with_fields_and_tools(tmp_path: Path) -> None:
    request, tools = tmp_path / "request.json", [{"type": "function", "function": {"name": "look"}}]
    asked = {"segments": ["a", {"text": "b", "seam": 32, "ttl_s": 60}], "question": "?", "tools": tools}
    request.write_text(json.dumps(asked))
    prompt, options = read(request, {})
    assert prompt == Prompt([Segment("a"), Segment("b", seam=32, ttl_s=60)], "?") and options["tools"] == tools
    passed_over = {"model": "m", "temperature": 0.5, "stream": True, "logit_bias": {"5": 9}, "functions": []}
    request.write_text(json.dumps({**asked, **passed_over, "tool_choice": "auto", "add_generation_prompt": True}))
    assert read(request, {}) == (prompt, options)
    request.write_text(json.dumps({**asked, "tool_choice": "none"}))
    assert read(request, {}) == (prompt, {**options, "tools": None}), "tools are kept from the model"


@pytest.mark.parametrize(
    ("hypic", "expected"),
    [
        ({"bogus": 4}, "hypic.bogus is not known; send one of namespace, reuse, seam, "),
        ({"seam": "4"}, 'hypic.seam is "4"; send a whole number'),
        ({"seam": -1}, "seam is -1"),
        ("none", 'hypic is "none"; send an object'),
    ],
)
def test_a_policy_that_cannot_be_right(
    hypic: Any, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], "hypic": hypic}))
    assert main(["compare", str(request), "--model", "nowhere"]) == 2
    assert expected in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "no JSON"),
        ("{}", "neither"),
        ('{"segments": [1], "question": "?"}', "the segment 1"),
        ('{"segments": [{"text": "x", "seem": 4}], "question": "?"}', "an object with text, kind, name"),
        ('{"segments": [{"text": "x", "seam": -4}], "question": "?"}', "a segment's seam is -4"),
        (None, "read"),
    ],
)
def test_requests_that_cannot_be_read(
    content: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    if content is not None:
        path.write_text(content)
    assert main(["compare", str(path)]) == 2
    assert expected in one_sentence(capsys.readouterr().err)

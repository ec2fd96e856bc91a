"""What callers pass that cannot be right: one sentence with the value and the way out, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hypic
from hypic import LLM, HypicError, SamplingParams, Segment
from hypic.errors import CheckpointError, ConfigError, PromptError
from hypic.integrations.remote import RemoteEngine
from tests.checkpoints import CHATML, add_tokenizer, qwen
from tests.llm.asking import SETTINGS

TEXT = Segment("the river runs past an old mill where three brothers grind rye and oats " * 3, name="mill")
SHORT = SamplingParams(max_tokens=2, temperature=0.0)
NO_SEGMENTS = (5, None, "text", b"text", {}, {"a": 1}, 3.5, Ellipsis, [5], [None], ["text"], [TEXT, 5])
NO_INDEX = (5, None, "text", [], {}, Ellipsis, [TEXT])


def refusal(call: Callable[[], object], kind: type[HypicError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    said = str(caught.value)
    assert said.endswith(".") and "\n" not in said
    return said


@pytest.mark.parametrize("name", ["warm", "keys"])
@pytest.mark.parametrize("given", NO_SEGMENTS, ids=repr)
def test_what_is_no_list_of_segments(llm: LLM, name: str, given: Any) -> None:
    before = len(llm.entries())
    said = refusal(lambda: getattr(llm, name)(given), PromptError)
    assert f"{name} was given" in said and "pass a list of Segment" in said
    assert len(llm.entries()) == before, "what is right in the list is not encoded either"


def test_a_single_segment_is_told_from_a_list(llm: LLM) -> None:
    assert "warm was given a single Segment; wrap it in a list" in refusal(lambda: llm.warm(TEXT), PromptError)  # type: ignore[arg-type]
    assert len(llm.warm(segment for segment in [TEXT])) == 1, "of any kind of list"  # type: ignore[arg-type]


def test_progress_that_cannot_be_told_is_refused_before_anything_is_encoded(llm: LLM) -> None:
    before = len(llm.entries())
    said = refusal(lambda: llm.warm([TEXT], progress=5), ConfigError)  # type: ignore[arg-type]
    assert "progress is 5; pass a function" in said and len(llm.entries()) == before


@pytest.mark.parametrize("index", NO_INDEX, ids=repr)
def test_what_is_no_index(llm: LLM, index: Any) -> None:
    said = refusal(lambda: llm.attach(index), ConfigError)
    assert said.startswith(f"attach was given {index!r:.60}; pass an index with a method forget(")


@pytest.mark.parametrize("name", ["pin", "unpin", "forget"])
@pytest.mark.parametrize("label", ["source", "name", "namespace"])
def test_labels_are_text(llm: LLM, name: str, label: str) -> None:
    assert f"{label} is 5; labels are text" in refusal(lambda: getattr(llm, name)(**{label: 5}), ConfigError)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tools": 5}, "tools is 5; pass a list of functions as OpenAI describes them"),
        ({"tools": "look"}, "tools is 'look'; pass a list"),
        ({"tools": [5]}, "tools is [5]; pass a list"),
        ({"tools": [{}]}, "tools is [{}]; pass a list of functions"),
        ({"tools": [{"type": "function"}]}, "tools is [{'type': 'function'}]; pass a list of functions"),
        ({"tools": [str]}, "tools is [<class 'str'>]; pass a list of functions"),
        ({"tools": [lambda x: x]}, "the function '<lambda>' does not describe itself as a tool ("),
        ({"tools": {"type": "function"}}, "tools is {'type': 'function'}; pass a list"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs is 5; pass a mapping of the template's variables"),
        ({"chat_template_kwargs": [("a", 1)]}, "chat_template_kwargs is [('a', 1)]; pass a mapping"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs is {5: 1}; pass a mapping"),
        ({"policy": {"seam": 4}}, "policy is {'seam': 4}; pass hypic.Policy"),
    ],
)
def test_options_that_cannot_be_right(llm: LLM, options: dict[str, Any], expected: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("Who?", SHORT, **options),
        lambda: llm.generate(["Who?", "When?"], SHORT, **options),
        lambda: llm.chat([{"role": "user", "content": "Who?"}], SHORT, **options),
        lambda: llm.compare("Who?", 2, **options),
        lambda: asyncio.run(llm.agenerate("Who?", SHORT, **options)),
    ]
    for call in calls:
        assert expected in refusal(call, ConfigError)


def look(place: str) -> str:
    """Looks around.

    Args:
        place: where
    """
    return place


def test_functions_describe_themselves(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}}
    parameters = {**schema, "required": ["place"]}
    function = {"name": "look", "description": "Looks around.", "parameters": parameters, "return": {"type": "string"}}
    folder = qwen(tmp_path)
    add_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    shown = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": shown + CHATML}))
    messages = [{"role": "user", "content": "Who?"}]
    with LLM(folder, **SETTINGS) as llm:
        by_hand = llm.chat(messages, SHORT, tools=[{"type": "function", "function": function}])
        mine = llm.chat(messages, SHORT, tools=[look])
        none = llm.chat(messages, SHORT, tools=[])
    assert mine.usage is not None and by_hand.usage is not None and none.usage is not None
    assert mine.usage.prompt_tokens == by_hand.usage.prompt_tokens > none.usage.prompt_tokens + 30
    assert mine.token_ids == by_hand.token_ids


def test_an_unknown_option_is_what_python_calls_it(llm: LLM) -> None:
    for prompt in ("Who?", ["Who?", "When?"]):
        with pytest.raises(TypeError, match=r"LLM.\w+\(\) got an unexpected keyword argument 'tolls'"):
            llm.generate(prompt, SHORT, tolls=[])


@pytest.mark.parametrize("folder", [5, None, b"x", [], "", " "], ids=repr)
def test_what_is_no_folder_is_not_described(folder: Any) -> None:
    said = refusal(lambda: hypic.describe(folder), CheckpointError)
    assert f"the folder is {folder!r}; pass the path" in said


def test_known_texts_are_texts(llm: LLM) -> None:
    assert "the registry was given 5; pass text" in refusal(lambda: llm.registry.register(5), PromptError)  # type: ignore[arg-type]
    assert "a prompt is 5; pass the text" in refusal(lambda: llm.registry.split(5), PromptError)  # type: ignore[arg-type]


def test_a_server_is_not_asked_for_what_cannot_be_right() -> None:
    """Nothing listens there: what would be sent fails otherwise."""
    with RemoteEngine("http://127.0.0.1:9", max_retries=0) as remote:
        for call in (lambda: remote.warm(5), lambda: remote.warm([TEXT, 5])):  # type: ignore[arg-type, list-item]
            assert "warm was given 5" in refusal(call, PromptError)
        for ask in (remote.pin, remote.unpin, remote.forget):
            assert "name is 5; labels are text" in refusal(lambda ask=ask: ask(name=5), ConfigError)  # type: ignore[misc]
        said = refusal(lambda: list(remote.stream("Who?", chat_template_kwargs=5)), ConfigError)  # type: ignore[arg-type]
        assert "chat_template_kwargs is 5" in said

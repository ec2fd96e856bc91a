"""What a tokenizer takes from a checkpoint's files, and what it refuses: files, prompts, reserved names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypic import Prompt, Segment
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import CheckpointError, ConfigError, HypicError, PromptError, UnsupportedModel
from tests.engine.tiny_tokenizers import (
    PLAIN_ADDED,
    SPECIALS,
    save_bytelevel,
    save_sentencepiece,
)

USER, END, ASSISTANT = "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bytelevel(tmp_path_factory.mktemp("bytelevel"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


# -- what the files say


def test_end_ids_and_sampling_values_come_from_all_files(tmp_path: Path) -> None:
    generation = {"do_sample": True, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 4], "max_length": 20}
    save_bytelevel(tmp_path, generation=generation)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": 6}}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == {3, 4, 5, 6, tokenizer._control.token_to_id("<|im_end|>")}
    assert tokenizer.generation_defaults == {"temperature": 1.0, "top_k": 20, "top_p": 0.95}


def test_greedy_checkpoints_give_no_sampling_values(tmp_path: Path) -> None:
    save_bytelevel(tmp_path, generation={"temperature": 0.7, "repetition_penalty": 1.1})
    assert Tokenizer(tmp_path).generation_defaults == {"repetition_penalty": 1.1}


def test_ids_by_role(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.special_ids == {tokenizer._control.token_to_id(name) for name in SPECIALS}
    assert tokenizer.vocab_size == 320 + len(SPECIALS) + len(PLAIN_ADDED) + 1
    assert tokenizer.byte_ids == frozenset()
    assert len(Tokenizer(save_sentencepiece(tmp_path)).byte_ids) == 256
    ids = [*tokenizer.encode_text("Ada"), *sorted(tokenizer.special_ids), *tokenizer.encode_text("!")]
    assert tokenizer.decode(ids) == "Ada!"


@pytest.mark.parametrize(
    ("files", "error", "sentence"),
    [
        ({}, CheckpointError, "no tokenizer.json"),
        ({"tokenizer.model": "x"}, UnsupportedModel, "tokenizer.model only"),
        ({"tokenizer.json": "{"}, CheckpointError, "cannot be read"),
        ({"tokenizer.json": '{"model": {}}'}, CheckpointError, "cannot be read"),
        ({"generation_config.json": "["}, CheckpointError, "generation_config.json"),
        ({"generation_config.json": "[]"}, CheckpointError, "must hold an object"),
        ({"generation_config.json": '{"do_sample": true, "top_p": 7}'}, CheckpointError, "top_p is 7"),
    ],
)
def test_unreadable_folders(tmp_path: Path, files: dict[str, str], error: type[HypicError], sentence: str) -> None:
    if "generation_config.json" in files:
        save_bytelevel(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=sentence):
        Tokenizer(tmp_path)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        Tokenizer(tmp_path / "nowhere")


# -- wrong input


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "at least one message"),
        (b"Hi", "the prompt is b.Hi.; pass a Prompt, a str or a list"),
        (7, "the prompt is 7"),
        ({"role": "user", "content": "x"}, "the prompt is"),
        (["x"], "message 0 is a str"),
        ([{"content": "x"}], "role None"),
        ([{"role": "im_end", "content": "x"}], "role 'im_end'"),
        ([{"role": "user", "content": 7}], "content is int"),
        ([{"role": "user"}], "message 0 is missing; role 'user' needs"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": None}], "message 1 is None; role 'tool'"),
        ([{"role": "system"}, {"role": "user", "content": "x"}], "message 0 is missing; role 'system'"),
        ([{"role": "developer", "content": None}], "role 'developer'"),
        ([{"role": "user", "content": b"x"}], "content is bytes"),
        ([{"role": "user", "content": [7]}], "block is a int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 7}]}], "int, not str"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "hypic": {"kinds": 1}}]}], "'kinds'"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "hypic": {"cache": "no"}}]}], "must be bool"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "hypic": 3}]}], "hint is 3"),
        ("a\ud800b", "surrogate '\\\\ud800'"),
        (Prompt([Segment("\udfff")]), "surrogate"),
    ],
)
def test_prompts_that_cannot_be_read(tokenizer: Tokenizer, prompt: Any, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        tokenizer.encode(prompt)


def test_what_may_be_empty(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
    asked = {"role": "user", "content": ""}
    for answer in ({"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": None}):
        assert tokenizer.encode([asked, answer, {"role": "tool", "content": "x"}])


def test_unknown_kinds_and_reserved_names(tokenizer: Tokenizer) -> None:
    block = {"type": "text", "text": "x", "hypic": {"kind": "page"}}
    with pytest.raises(ConfigError, match="'page'"):
        tokenizer.encode([{"role": "user", "content": [block]}])
    with pytest.raises(PromptError, match="'tokenize'"):
        tokenizer.encode("x", chat_template_kwargs={"tokenize": True})
    with pytest.raises(PromptError, match="not str"):
        tokenizer.encode_text(b"x")  # type: ignore[arg-type]

"""``hypic-tiny`` is a model's name like any other, wherever a model is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypic import LLM, SamplingParams, shared
from hypic.checkpoints import BUNDLED, bundled, describe, is_bundled, token_counts
from hypic.errors import CheckpointError
from hypic.integrations.llamaindex import HypicLLM
from hypic_apps.bench.geometries import geometry
from hypic_apps.cli.engine import model_folder
from hypic_apps.cli.main import main
from tests.checkpoints import add_tokenizer, qwen

pytestmark = pytest.mark.skipif(not bundled().is_dir(), reason="the bundled model is not part of this copy")
SMALL = {"device": "cpu", "dtype": "float32", "memory": "256MiB", "max_context": 256}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that holds nothing."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_bundled_model_answers_to_its_name() -> None:
    llm = shared.acquire(BUNDLED, **SMALL)
    try:
        assert shared.acquire(None, **SMALL) is llm, "one engine under both its names"
        shared.release(llm)
        assert llm.model_name == BUNDLED
        assert llm.generate("Hello", SamplingParams(max_tokens=1)).usage.completion_tokens == 1
    finally:
        shared.release(llm)


def test_what_reads_folders_takes_the_name_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(BUNDLED) == describe(bundled())
    assert token_counts(BUNDLED, ["some text"]) == token_counts(bundled(), ["some text"])
    assert HypicLLM(model=BUNDLED).metadata.context_window == HypicLLM().metadata.context_window
    assert model_folder(BUNDLED) == model_folder(None) == bundled() == geometry(BUNDLED).folder
    assert main(["models", BUNDLED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == describe(bundled()).num_parameters


def test_a_checkpoint_of_that_name_goes_before_it(elsewhere: Path) -> None:
    add_tokenizer(qwen(elsewhere / BUNDLED))
    assert not is_bundled(BUNDLED) and is_bundled(None)
    assert describe(BUNDLED).num_parameters != describe(bundled()).num_parameters
    assert model_folder(BUNDLED) == Path(BUNDLED) == geometry(BUNDLED).folder
    with LLM(BUNDLED, **SMALL) as own, LLM(elsewhere / BUNDLED, **SMALL) as same:
        assert own.fingerprint == same.fingerprint


def test_a_folder_of_that_name_without_a_checkpoint_does_not(elsewhere: Path) -> None:
    (elsewhere / BUNDLED).mkdir()
    assert is_bundled(BUNDLED)
    assert describe(BUNDLED) == describe(bundled())


def test_other_names_and_paths_are_looked_for_where_they_say(elsewhere: Path) -> None:
    for name in (f"./{BUNDLED}", Path(BUNDLED), "hypic-tin", ""):
        assert not is_bundled(name)
    for missing in (f"./{BUNDLED}", Path(BUNDLED)):
        with pytest.raises(CheckpointError, match="is no folder"):
            LLM(missing)

"""The command line: help, exit codes, one sentence per error, and how it is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hypic.config import EngineConfig
from hypic.types import Policy
from hypic_apps.cli import engine
from hypic_apps.cli.main import build, main
from hypic_apps.cli.options import HELP, engine_settings
from tests.apps.cli_files import SMALL, checkpoint, documents
from tests.apps.commands import command, environment, one_sentence

COMMANDS = ("demo", "ask", "chat", "warm", "cache", "models", "compare", "eval", "bench")
HEAVY = ("torch", "transformers", "rich", "numpy", "langchain_core", "faiss")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return documents(tmp_path / "files")


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"\nexamples:\n  hypic {name}" in out and err == ""
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import hypic

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hypic {hypic.__version__}\n"


def test_without_a_command_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("usage: hypic")


def test_starting_imports_nothing_heavy() -> None:
    code = f"import sys, hypic_apps.cli.main as m; m.build(); print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


# -- engine flags ----------------------------------------------------------------------------------------------------


def test_every_engine_setting_has_a_flag_with_help() -> None:
    names = {field.name for kind in (EngineConfig, Policy) for field in fields(kind)} - {"policy"}
    assert names == set(HELP)
    values = {"device": "cpu", "memory": "0.25", "max_context": "512", "reuse": "prefix", "seam": "4"}
    flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]
    args = build().parse_args(["chat", *flags, "--no-rotate", "--deterministic"])
    expected = {"device": "cpu", "memory": 0.25, "max_context": 512, "reuse": "prefix", "seam": 4}
    assert engine_settings(args) == {**expected, "rotate": False, "deterministic": True}
    assert EngineConfig.of(**engine_settings(args)).policy.seam == 4


def test_a_primer_is_given_as_text_and_switched_off_by_a_flag() -> None:
    parse = build().parse_args
    assert engine_settings(parse(["chat", "--primer", "Two words."])) == {"primer": "Two words."}
    assert engine_settings(parse(["chat", "--primer", "", "--no-primed"])) == {"primer": "", "primed": False}
    assert EngineConfig.of(**engine_settings(parse(["chat", "--primed"]))).policy.primed is True
    policy = EngineConfig.of(**engine_settings(parse(["chat", "--no-rungs", "--seam-opening", "0"]))).policy
    assert policy.rungs is False and policy.seam_opening == 0 and EngineConfig().policy.rungs is True


def test_help_tells_seconds_from_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--ttl SECONDS " in out and "--memory SIZE " in out


def test_settings_that_are_not_given_are_left_to_the_defaults() -> None:
    assert engine_settings(build().parse_args(["demo"])) == {}


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("1048576", 1048576), ("8GiB", "8GiB")])
def test_memory_is_a_share_bytes_or_a_size(text: str, value: object) -> None:
    (read,) = engine_settings(build().parse_args(["chat", "--memory", text])).values()
    assert read == value and type(read) is type(value)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bogus"], "invalid choice: 'bogus'"),
        (["ask", "why?"], "required: FILES"),
        (["ask", "why?", "x", "--k", "0"], "'0' is no whole number of 1 or more"),
        (["ask", "why?", "x", "--reuse", "all"], "invalid choice: 'all'"),
        (["ask", "why?", "x", "--thread", "1"], "--thread"),
        (["demo", "--corpus", "nowhere"], "'nowhere' is no folder"),
        (["models", "nowhere"], "'nowhere' is no folder"),
        (["ask", " ", "x"], "a question is empty"),
        (["ask", "why\udcff?", "x"], "no UTF-8 text"),
    ],
)
def test_wrong_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in one_sentence(err)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "cannot be read"), (b"caf\xe9", "not UTF-8"), (b" \n", "holds no text"), (b"%PDF-1.7 x", "a PDF")],
)
def test_unusable_files(
    content: bytes | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["ask", "why?", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in one_sentence(err) and "file.txt" in err


def test_a_folder_without_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("text")
    (tmp_path / "x.png").write_bytes(b"x")
    assert main(["ask", "why?", str(tmp_path)]) == 2
    assert "holds no .txt or .md file" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--dtype", "int3"], "dtype is 'int3'"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--memory", "lots"], "memory is 'lots'"),
        (["--seam", "-1"], "seam is -1"),
        (["--max-context", "40"], "40"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_wrong_settings_end_with_2(
    flags: list[str], expected: str, model: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "How many days of leave?", str(files), *SMALL, "--model", model, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert expected in err.strip().splitlines()[-1]


def test_an_unsupported_model(tmp_path: Path, model: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path(model).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "abacus"}))
    assert main(["ask", "leave?", str(files), "--model", str(tmp_path), *SMALL]) == 2
    assert "'abacus' is not supported" in one_sentence(capsys.readouterr().err)
    assert main(["models", str(tmp_path)]) == 2
    assert "'abacus' is not supported" in one_sentence(capsys.readouterr().err)


def test_no_bundled_model(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "bundled", lambda: tmp_path / "none")
    assert main(["ask", "leave?", str(files)]) == 2
    assert "pass --model" in one_sentence(capsys.readouterr().err)


def test_a_question_that_no_passage_fits(model: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "zyxwv", str(files), "--model", model, *SMALL]) == 2
    assert "no passage has a word in common with 'zyxwv'" in capsys.readouterr().err


# -- models ----------------------------------------------------------------------------------------------------------


def test_models_lists_what_has_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^qwen3_5_text +Qwen3\.5", out, re.M) and "\nminimax " in out and err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert main(["models", "--json"]) == 0
    assert "qwen3_5_text" in json.loads(capsys.readouterr().out)["model_types"]


def test_models_measures_a_segment(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    from hypic import LLM

    with LLM(model, memory="64MiB") as llm:
        assert found["weight_bytes"] == llm.stats()["weight_bytes"]
        assert found["num_parameters"] == llm.stats()["weight_bytes"] // 4
        assert found["max_context"] == llm.max_context
    # 504 tokens behind the seam in 32 pages of 16, 2 KV heads of 32 in 2 layers, fp32; 2 layers of 4 heads:
    # end state 16 x 12, transition 16 x 16, and a tail of 3 x 112 channels.
    assert found["segment_bytes"] == 512 * 2 * 2 * 32 * 2 * 4 + 2 * 4 * (4 * (16 * 12 + 16 * 16) + 3 * 112)
    assert found["layers"] == {"linear_attention": 2, "full_attention": 2}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("config.json", b"{", "is no JSON"),
        ("config.json", b"[]", "is no JSON object"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "is no safetensors file"),
        ("model.safetensors", b"\x09\0\0\0\0\0\0\0nonsense!", "cannot be read"),
        ("model.safetensors", b"\xff" * 16, "is no safetensors file"),
    ],
)
def test_models_on_broken_files(
    name: str, content: bytes, expected: str, tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    (tmp_path / name).write_bytes(content)
    assert main(["models", str(tmp_path)]) == 2
    assert expected in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "--primer-file", "~no-such-user/a.txt"],
        ["eval", "--data", "~no-such-user/a.jsonl"],
        ["ask", "Who?", "~no-such-user/a.txt"],
    ],
    ids=["primer", "data", "ask"],
)
def test_the_home_of_nobody_is_told_in_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert one_sentence(capsys.readouterr().err).endswith("write the folder out.")


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_command_ends_with_130(model: str) -> None:
    process = subprocess.Popen(
        command("chat", "--model", model, *SMALL, "--max-tokens", "4000"),
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Tell me all you know about rivers.\n")
    process.stdin.flush()
    assert process.stdout.read(1), "an answer is under way"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().strip().splitlines()[-1] == "interrupted" and b"Traceback" not in err


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("models"), env=environment(), stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60
    )
    os.close(writing)
    assert done.returncode == 1 and done.stderr == b""


def test_a_terminal_that_knows_only_ascii() -> None:
    code = "from hypic_apps.cli import main, screen; main.main([]); screen.result('caf\\xe9\\x1b[2J')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(), "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == b"caf?[2J\n"


def test_a_command_tells_how_it_is_itself_started_with_a_real_model() -> None:
    llm: Any = SimpleNamespace(model_name="tiny")
    told = engine.Loaded(llm, "nowhere", is_bundled=True, example="hypic serve Qwen/Qwen3.5-0.8B").introduction
    assert "\n  hypic serve Qwen/Qwen3.5-0.8B\n" in told and "hypic ask" not in told
    assert "\n  hypic ask --model " in engine.Loaded(llm, "nowhere", is_bundled=True).introduction
    assert "real one" not in engine.Loaded(llm, "nowhere", is_bundled=False).introduction

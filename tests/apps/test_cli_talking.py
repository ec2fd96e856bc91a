"""``hypic ask`` and ``hypic chat``: answers on stdout and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypic_apps.cli import chat
from hypic_apps.cli.main import main
from tests.apps.cli_files import SMALL, checkpoint, documents


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return documents(tmp_path / "files")


# -- ask -------------------------------------------------------------------------------------------------------------


def test_ask_prints_answers_on_stdout_and_the_rest_on_stderr(
    model: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ask", "How many days of leave do employees get?", str(files), "-q", "What do employees get in March?"]
    assert main([*arguments, "--model", model, *SMALL, "--max-tokens", "4", "--compare"]) == 0
    out, err = capsys.readouterr()
    assert "tokens" not in out and "leave.md" not in out
    assert "encoded" in err and "hit" in err, "the second question finds what the first one brought up"
    assert "leave.md" in err and "reused; first token after" in err
    assert err.count("with everything computed anew") == 2
    assert [line for line in err.splitlines() if len(line) > 80 and "for a real one" not in line] == []


def test_ask_json(model: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ask", "How many days of leave?", str(files), "-q", "How many days of leave?", "--compare", "--json"]
    assert main([*arguments, "--model", model, *SMALL, "--max-tokens", "4"]) == 0
    first, second = json.loads(capsys.readouterr().out)["questions"]
    assert first["question"] == "How many days of leave?" and isinstance(first["answer"], str)
    assert {segment["outcome"] for segment in first["segments"]} == {"encoded"}
    assert {segment["outcome"] for segment in second["segments"]} == {"hit"}
    assert first["reused_tokens"] == 0 < second["reused_tokens"]
    assert first["full"]["ttft_s"] > 0 and first["times_s"]["ttft"] > 0


def test_ask_passes_equal_passages_once(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave = "Employees get thirty days of leave a year, and five more days after ten years of work here."
    travel = "Employees who travel get an allowance for each day that they are away from the office."
    for n in range(6):
        (tmp_path / f"copy{n}.md").write_text(leave)
    (tmp_path / "travel.md").write_text(travel)
    arguments = ["ask", "How many days of leave do employees get?", str(tmp_path), "--k", "3", "--json"]
    assert main([*arguments, "--model", model, *SMALL, "--max-tokens", "2"]) == 0
    (asked,) = json.loads(capsys.readouterr().out)["questions"]
    assert [segment["source"] for segment in asked["segments"]] == [asked["segments"][0]["source"], "travel.md"]


def test_ask_reads_folders_and_names_each_file_once(
    model: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ask", "Which company do employees reach?", str(files), str(files / "leave.md"), "--json"]
    assert main([*arguments, "--model", model, *SMALL, "--max-tokens", "1", "--k", "50"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["questions"]
    assert sorted(s["source"] for s in found["segments"]) == ["leave.md", "safety.txt", "travel.md"]


# -- chat ------------------------------------------------------------------------------------------------------------


def test_chat_answers_line_by_line(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    told: list[int] = []

    def answer(llm: object, messages: list[dict[str, str]], *rest: object) -> str:
        told.append(len(messages))
        return f"answer {len(messages)}"

    monkeypatch.setattr(chat, "_answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n/exit\nfour\n"))
    assert main(["chat", "--model", model, *SMALL, "--system", "Be brief."]) == 0
    assert told == [2, 4, 2]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_text_does_not_end_a_chat(
    errors: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    told: list[list[str]] = []

    def answer(llm: object, messages: list[dict[str, str]], *rest: object) -> str:
        told.append([message["content"] for message in messages])
        return "answer"

    monkeypatch.setattr(chat, "_answer", answer)
    lines = io.BytesIO(b"one\n\xff\ntwo\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, encoding="utf-8", errors=errors))
    assert main(["chat", "--model", model, *SMALL]) == 0
    assert told == [["one"], ["one", "answer", "two"]], "the line is left out and what was said before is kept"
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("hypic: "))
    assert "no UTF-8 text" in sentence


def test_chat_streams_to_stdout_and_reuses_the_turn_before(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    line = "Tell me about the rivers and lakes of this land, one after the other, and about their fish.\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(line * 2))
    assert main(["chat", "--model", model, *SMALL, "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    first, second = (line for line in err.splitlines() if "prompt tokens" in line)
    assert " 0 reused" in first and " 0 reused" not in second
    assert out and "prompt tokens" not in out

"""``hypic demo`` end to end on a tiny corpus and model, its timing and its conclusions, and the bundled model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hypic import LLM, Prompt, Segment
from hypic.checkpoints import bundled
from hypic.types import CacheReport, SegmentReport
from hypic_apps.bench.peers import PeerError, Transformers
from hypic_apps.cli import corpora
from hypic_apps.cli.corpora import Question
from hypic_apps.cli.engine import Loaded
from hypic_apps.cli.hardware import cpu_name, hardware
from hypic_apps.cli.main import main
from hypic_apps.cli.outcome import Answer, Measured, Outcome
from hypic_apps.cli.timing import Case, Run, Times, arms, measure, token_ids
from tests.apps.cli_files import DOCUMENTS, QUESTIONS, SMALL, checkpoint, corpus

SEAM = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return corpus(tmp_path / "corpus")


def demo(model: str, folder: Path, *flags: str) -> int:
    return main(["demo", "--quick", "--model", model, "--corpus", str(folder), *SMALL, "--max-tokens", "4", *flags])


# -- end to end ------------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_everything(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(model, folder, "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert set(found) >= {"questions", "ratio_full_to_warm", "full_to_transformers", "model", "hardware"}
    assert [q["question"] for q in found["questions"]] == [q["question"] for q in QUESTIONS]
    for question, given in zip(found["questions"], QUESTIONS, strict=True):
        check_question(question, given["expected"])
    assert found["ratio_full_to_warm"] > 0 and found["full_to_transformers"] > 0
    assert found["transformers"]["same_first_token"] == 2, "both run the same ids through the same weights"
    assert found["model"]["num_parameters"] == 93_000 and found["model"]["dtype"] == "float32"
    assert found["hardware"]["threads"] == 1 and found["rounds"] == 1
    assert "leave.md" in err and "full/warm" in err


def check_question(question: dict[str, Any], expected: str) -> None:
    """The schema, and counts that hold for a warm request that finds its segments and nothing else."""
    assert question["expected"] == expected and isinstance(question["answer"], str)
    assert question["correct"] is False, "a random model knows nothing"
    assert set(question["ttft_s"]) == {"full", "cold", "warm"} and min(question["ttft_s"].values()) > 0
    assert all(question["wall_s"][arm] >= question["ttft_s"][arm] for arm in question["ttft_s"])
    segments = question["segments"]
    assert segments and {s["outcome"] for s in segments} == {"hit"}
    interiors = sum(s["num_tokens"] - SEAM for s in segments)
    assert question["reused_tokens"] == interiors > 0
    assert question["computed_tokens"] == question["prompt_tokens"] - interiors, "a snapshot of the prompt was used"


def test_what_is_printed_where(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert demo(model, folder) == 0
    out, err = capsys.readouterr()
    assert out.count("\nQ: ") == 2 and out.count("wrong, expected: ") == 2
    assert "0 of 2 answers are as expected." in out
    assert "sooner than with full recompute" in out and "the time of transformers" in out
    assert "encoded" not in out and "encoded" in err and "hit" in err
    assert [line for line in err.splitlines() if len(line) > 80] == []


def test_all_rounds_are_run_and_reported(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model", model, "--corpus", str(folder), *SMALL, "--max-tokens", "1", "--json"]
    assert main([*arguments, "--rounds", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == 3
    assert {len(runs) for q in found["questions"] for runs in q["runs_s"].values()} == {3}


def test_a_peer_that_fails_is_said_to_have_failed(
    model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*arguments: object) -> Transformers:
        raise PeerError("transformers has a cold.")

    monkeypatch.setattr(Transformers, "load", load)
    assert demo(model, folder) == 0
    assert "transformers was not measured: transformers has a cold." in capsys.readouterr().out
    assert demo(model, folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["full_to_transformers"] is None and found["transformers"]["problem"] == "transformers has a cold."
    assert found["ratio_full_to_warm"] > 0 and found["questions"][0]["transformers_s"] is None


def test_errors_of_the_engine_come_through_langchain(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(model, folder, "--max-context", "64") == 2
    out, err = capsys.readouterr()
    assert "the context holds 64" in err.splitlines()[-1] and "Traceback" not in err


def test_without_langchain_the_way_out_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "hypic_apps.cli.pipeline", raising=False)
    monkeypatch.setitem(sys.modules, "langchain_core.exceptions", None)
    assert main(["demo", "--corpus", str(folder)]) == 1
    assert capsys.readouterr().err.endswith("install it with: pip install 'hypic[langchain]'.\n")


@pytest.mark.skipif(not bundled().is_dir(), reason="the bundled model is not there")
def test_the_bundled_model_answers_from_the_bundled_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["num_correct"] >= 2, [q["answer"] for q in found["questions"]]
    assert {len(q["segments"]) for q in found["questions"]} == {16}
    assert found["ratio_full_to_warm"] > 2 and found["transformers"]["same_first_token"] == 3
    assert "a demo model of" in err and "hypic ask --model " in err


# -- corpora ---------------------------------------------------------------------------------------------------------


def test_the_bundled_corpus() -> None:
    found = corpora.bundled()
    names = [document.name for document in found.documents]
    assert len(names) == len(set(names)) > 200 and {"handbook.md", "Norway"} <= set(names)
    assert len(found.questions) >= 5


def test_a_folder_as_corpus(folder: Path) -> None:
    found = corpora.of_folder(folder)
    assert sorted(document.name for document in found.documents) == sorted(DOCUMENTS)
    assert found.questions[1] == Question(**QUESTIONS[1])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[]", "holds no list of questions"),
        ('{"question": "x"}', "holds no list of questions"),
        ('[{"question": "x"}]', "lacks a question or what is expected"),
        ('[{"question": "x", "expected": 3}]', "lacks a question or what is expected"),
        ('["x"]', "lacks a question or what is expected"),
    ],
)
def test_unusable_questions(
    content: str | None, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "questions.json").unlink()
    if content is not None:
        (folder / "questions.json").write_text(content)
    assert main(["demo", "--corpus", str(folder)]) == 2
    err = capsys.readouterr().err
    assert expected in err and "questions.json" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("answer", "correct"),
    [("27 days", True), (" The 27 Days.", True), ("27", False), ("27 days or more", False), ("", False)],
)
def test_what_counts_as_correct(answer: str, correct: bool) -> None:
    assert Question("How many?", "27 days").is_answered_by(answer) is correct


# -- timing ----------------------------------------------------------------------------------------------------------


def run(seconds: float, token_id: int = 1) -> Run:
    return Run(seconds, seconds, token_id)


def test_arms_are_interleaved_rotated_and_warmed_up() -> None:
    called: list[str] = []

    def arm(name: str) -> Any:
        def call(case: Case) -> Run:
            called.append(f"{case.prompt}{name}")
            return run(1.0)

        return call

    by_name = {name: arm(name) for name in "abc"}
    times = measure([Case("1", ()), Case("2", ())], by_name, rounds=2, budget_s=60)
    assert called[:3] == ["1a", "1b", "1c"], "the warm-up is not counted"
    assert called[3:] == ["1a", "1b", "1c", "2a", "2b", "2c", "1b", "1c", "1a", "2b", "2c", "2a"]
    assert [len(runs) for case in times for runs in case.runs.values()] == [2] * 6


def test_a_spent_budget_ends_after_the_round() -> None:
    done: list[int] = []
    times = measure(
        [Case("1", ())], {"a": lambda case: run(1.0)}, rounds=9, budget_s=0.0, progress=lambda: done.append(1)
    )
    assert len(times[0].runs["a"]) == len(done) == 1


def test_what_each_arm_computes(model: str) -> None:
    segments = [Segment(text.strip(), name=name) for name, text in DOCUMENTS.items()]
    prompt = Prompt(segments, tail="How many days?")
    with LLM(model, threads=1, memory="64MiB", dtype="float32") as llm:
        llm.generate(prompt)  # leaves segments and snapshots behind
        by_name, case = arms(llm, Transformers.load(model, "cpu", "float32")), Case(prompt, segments)
        full, cold, warm, peer = (by_name[name](case) for name in ("full", "cold", "warm", "transformers"))
        num_tokens = len(token_ids(llm, case))
    assert full.report.computed_tokens == full.report.prompt_tokens == num_tokens
    assert [s.outcome for s in cold.report.segments] == ["encoded"] * 3 and cold.report.reused_tokens == 0
    assert cold.report.computed_tokens == num_tokens + 3 * SEAM, "seams are run in the segment and in context"
    assert [s.outcome for s in warm.report.segments] == ["hit"] * 3
    assert warm.report.computed_tokens == num_tokens - sum(s.num_tokens - SEAM for s in warm.report.segments)
    assert cold.token_id == warm.token_id and full.token_id == peer.token_id
    assert peer.ttft_s > 0 and all(0 < r.ttft_s <= r.wall_s for r in (full, cold, warm))


def test_the_peer_names_what_it_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="transformers cannot load this checkpoint"):
        Transformers.load(tmp_path / "none", "cpu", "float32")


# -- conclusions -----------------------------------------------------------------------------------------------------


def outcome(times: Sequence[dict[str, list[Run]]], version: str | None = "5") -> Outcome:
    report = CacheReport(segments=(SegmentReport("document", "a", None, "hit", 9),), times_s={"ttft": 1.0})
    answers = [Answer(Question("q", "a"), "a" if n else "b", Case("q", ()), report) for n, _ in enumerate(times)]
    loaded = Loaded(None, "nowhere", False)  # type: ignore[arg-type]  # not asked for here
    return Outcome(answers, Measured([Times(runs) for runs in times], version, "" if version else "gone"), loaded)


def arms_of(full: Sequence[float], warm: Sequence[float], peer: Sequence[float] = (1.0,)) -> dict[str, list[Run]]:
    return {
        "full": [run(s) for s in full],
        "cold": [run(1.0)],
        "warm": [run(s) for s in warm],
        "transformers": [run(s, 1 if peer[0] < 9 else 2) for s in peer],
    }


def test_ratios_are_medians_of_medians() -> None:
    found = outcome([
        arms_of([8.0, 2.0, 4.0], [1.0, 1.0, 99.0], [4.0]),
        arms_of([10.0], [1.0], [20.0]),
        arms_of([1.0], [1.0], [0.5]),
    ])  # fmt: skip
    assert found.full_to_warm == 4.0, "of 4, 10 and 1"
    assert found.full_to_transformers == 1.0, "of 1, 0.5 and 2"
    assert found.same_first_token == 2 and found.num_correct == 2
    assert outcome([arms_of([1.0], [1.0])], version=None).full_to_transformers is None


def test_clocks_that_differ_are_told() -> None:
    honest = outcome([arms_of([1.0], [0.001])])
    assert list(honest.clock_faults()) == []
    slow = arms_of([1.0], [0.001])
    slow["warm"] = [replace(slow["warm"][0], wall_s=0.5)]
    (fault,) = outcome([slow]).clock_faults()
    assert fault.startswith("warm: the engine reports 1.0 ms but the caller waited 500 ms")


def test_hardware_is_named(tmp_path: Path) -> None:
    found = hardware()
    assert set(found) >= {"cpu", "cores", "threads", "torch", "python"} and found["cpu"]
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Abacus 9\n")
    assert cpu_name(tmp_path / "cpuinfo") == "Abacus 9"
    assert cpu_name(tmp_path / "none")

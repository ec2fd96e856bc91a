"""``hypic bench encode``, ``decode``, ``memory`` and ``start`` on tiny geometries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.engine.plan import Piece
from hypic.errors import HypicError
from hypic.types import Policy, Segment
from hypic_apps.bench import decode, driving, encode, memory, start
from hypic_apps.bench.floors import Limits
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.prompts import Shape
from hypic_apps.bench.records import percentile
from hypic_apps.bench.session import Session, session
from hypic_apps.cli.errors import CommandError
from hypic_apps.cli.main import main

TINY = ["--geometry", "tiny", "--threads", "1", "--memory", "64MiB"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["bench", *arguments, *TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(found[name] for name in ("what", "date", "command", "hardware", "versions"))
    records: list[dict[str, Any]] = found["records"]
    return records


@pytest.fixture(scope="module")
def built() -> Any:
    with session(geometry("tiny"), {"memory": "64MiB", "max_running": 8, "max_context": 2048}, ids=True) as made:
        yield made


def test_encoding_is_measured_with_and_without_building(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--segments", "2,3", "--segment-tokens", "64", "--runs", "2", "--warmup", "1")
    records = bench(capsys, "encode", *grid)
    assert [r["num_segments"] for r in records] == [2, 3]
    for r in records:
        assert r["building_share"] == pytest.approx(1 - r["plain_ms_p50"] / r["encode_ms_p50"])
        assert r["tokens_per_s"] == pytest.approx(r["num_segments"] * 64 / r["encode_ms_p50"] * 1e3)


def test_encoding_is_measured_with_other_lengths_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("encode", "--segments", "3", "--segment-tokens", "64", "--runs", "2", "--warmup", "1", "--vary", "0.5")
    (record,) = bench(capsys, *grid)
    assert record["vary"] == 0.5 and "3 x 64 +- 50%" in encode.text({"records": [record]})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--segment-tokens", "64,8"], "segments of 8 tokens are run live; pass --segment-tokens 32 or more."),
        (["--segment-tokens", "64", "--vary", "0.6"],
         "segments of 26 tokens are run live; pass --segment-tokens 32 or more, or a smaller --vary."),
    ],
)  # fmt: skip
def test_nothing_is_measured_of_segments_that_are_run_live(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "encode", "--geometry", "tiny", *arguments]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_a_profile_of_decoding_names_each_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    bench(
        capsys, "decode", "--batch", "1,2", "--context", "64", "--steps", "2", "--warmup", "1", "--profile", str(path)
    )
    heads = [line for line in path.read_text().splitlines() if line.startswith("batch ")]
    assert [head.split(":")[0] for head in heads] == ["batch 1, context 64", "batch 2, context 64"]
    assert path.read_text().count("linear:") >= 2 and path.read_text().count("floors in ms: the whole") == 2


def test_decode_steps_are_those_in_which_all_requests_run(capsys: pytest.CaptureFixture[str]) -> None:
    records = bench(capsys, "decode", "--batch", "1,3", "--context", "200", "--steps", "5", "--warmup", "2")
    assert [(r["batch"], r["steps"]) for r in records] == [(1, 5), (3, 5)]
    for r in records:
        assert r["bandwidth_share"] == pytest.approx(r["bandwidth_floor_ms"] / r["step_ms_p50"])
        assert r["tokens_per_s"] == pytest.approx(r["batch"] / r["step_ms_p50"] * 1e3)
    assert records[1]["bandwidth_floor_ms"] > records[0]["bandwidth_floor_ms"]


def test_what_determinism_costs_a_step_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests take three steps a token; a control: requests that share steps are no result."""
    arguments = ("decode", "--batch", "1,3", "--context", "200", "--steps", "5", "--warmup", "2", "--deterministic")
    alone, three = bench(capsys, *arguments)
    assert (alone["deterministic_requests_run"], three["deterministic_requests_run"]) == (1, 2)
    assert three["deterministic_ms_p50"] > 2 * alone["deterministic_ms_p50"] > 0
    table = decode.text({"records": [alone, three]})
    assert "deterministic ms" in table and f"{three['deterministic_ms_p50'] / three['step_ms_p50']:.2f}" in table
    sound = Policy.with_
    monkeypatch.setattr(Policy, "with_", lambda policy, **given: sound(policy, **given | {"deterministic": False}))
    assert main(["bench", *arguments, *TINY]) == 1
    assert "shared a step" in capsys.readouterr().err


def test_contexts_that_do_not_fit_are_told(built: Session) -> None:
    with pytest.raises(HypicError, match="memory"):
        decode.measure(built, 96, 1900, 2, 1, Limits(1e12, 1e12))
    with pytest.raises(CommandError, match="did not decode together"):
        decode.measure(built, 12, 64, 4, 1, Limits(1e12, 1e12))


def test_a_made_up_context_is_found_and_not_run(built: Session) -> None:
    """Only the tail enters the model; a control: another context is not found, and all of it is run."""
    policy, tail = Policy(), Piece(tuple(range(5)))
    known, other = Piece(tuple(range(300)), ends_message=True), Piece(tuple(range(1, 301)), ends_message=True)
    built.call(lambda engine: driving.make_up_context(engine, [known, tail], policy, seed=0))
    found = built.ask(lambda: [known, tail], policy, 3)
    assert found.report.computed_tokens == 5 and len(found.token_ids) == 3 and len(found.gaps_s) == 2
    assert built.ask(lambda: [other, tail], policy, 3).report.computed_tokens == 305
    built.forget()


def test_one_more_request_takes_a_state_and_its_own_pages(capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = bench(capsys, "memory", "--batch", "1,2,4", "--segments", "4", "--segment-tokens", "64")
    assert record["pool_bytes_per_request"] == record["state_bytes"] + record["row_page_bytes"]
    assert record["pool_bytes_per_request"] < record["cached_kv_bytes"]
    assert record["peak_bytes_per_request"] is None or not torch.cuda.is_available()


def test_without_reuse_a_request_takes_all_of_its_prompt(built: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "with_", lambda policy, **changes: Policy(reuse="none"))
    record = memory.measure(built, Shape(4, 64, 8), [1, 2, 4])
    assert record["pool_bytes_per_request"] > record["cached_kv_bytes"]


def test_a_failed_task_is_raised_and_leaves_nothing_behind(built: Session) -> None:
    before = built.call(driving.used_bytes)
    prompts = [[Piece((1, 2, 3))], [Piece(tuple(range(3000)))]]
    with pytest.raises(HypicError, match="3000 tokens"):
        built.call(lambda engine: driving.drive(engine, driving.answer_tasks(prompts, Policy(), 2, "failing")))
    assert built.call(driving.used_bytes) == before and not built.call(lambda engine: engine.has_work)


def test_start_is_measured_in_new_processes(capsys: pytest.CaptureFixture[str]) -> None:
    records = bench(capsys, "start", "--segments", "2", "--segment-tokens", "48")
    assert [r["kernel_cache"] for r in records] == ["empty", "filled"]
    for r in records:
        assert 0 < r["import_s"] < r["ready_s"] < r["first_token_s"]
        assert r["compiled_on_requests"] == 0 and r["first_used_on_requests"] == []


def test_what_a_request_used_first_is_named() -> None:
    record = dict.fromkeys(("import_s", "ready_s", "first_token_s"), 1.0)
    counts = {"kernel_cache": "empty", "compiled_before_ready": 30, "compiled_on_requests": 1}
    table = start.text({"records": [{**record, **counts, "first_used_on_requests": ["late", "late"]}]})
    assert table.splitlines()[-1] == "used for the first time by a request: late"


def test_a_start_that_fails_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "start", *TINY, "--segments", "2", "--segment-tokens", "48", "--memory", "1KiB"]) == 1
    assert "ended with exit code 1" in capsys.readouterr().err


def test_segments_come_from_every_tier(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--segments", "3", "--segment-tokens", "64", "--runs", "2", "--warmup", "0", "--disk-size", "64MiB")
    (record,) = bench(capsys, "tiers", *grid)
    assert all(record[f"{arm}_ms_p50"] > 0 for arm in ("device", "host", "disk", "encode", "chosen"))
    assert 0.0 <= record["loaded_share"] <= 1.0 and record["entry_bytes"] > 0
    kept, whole = record["num_kept_heads"]
    assert kept == whole > 0, "nothing is dropped unless it is asked for"


MEASURES = ("ttft", "encode", "decode", "memory", "tiers", "start", "load", "potential")


@pytest.mark.parametrize("name", MEASURES)
def test_help_has_examples_and_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"\nexamples:\n  hypic bench {name}" in out and err == ""
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in MEASURES)
    assert main(["bench", "nonsense"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in MEASURES)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentiles(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(expected)
    assert percentile([7.0], percent) == 7.0


def test_every_measurement_has_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["encode", "--segments", "2", "--segment-tokens", "64", "--runs", "1"],
        ["decode", "--batch", "2", "--context", "64", "--steps", "2", "--warmup", "1"],
        ["memory", "--batch", "1,2", "--segments", "2", "--segment-tokens", "64"],
        ["tiers", "--segments", "2", "--segment-tokens", "64", "--runs", "1", "--warmup", "0"],
    ):
        assert main(["bench", *arguments, *TINY]) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) >= 2 and not out[0].startswith("{")


def test_segments_are_encoded_for_every_place() -> None:
    segments, policy = [Piece((n, n + 1), Segment(f"{n}")) for n in (1, 5)], Policy()
    tasks = driving.encode_tasks(segments, policy, "e", (0, 1, 4))
    assert [(task.pieces[0].ids, task.pieces[0].place) for task in tasks] == [
        (segment.ids, place) for segment in segments for place in (0, 1, 4)
    ]
    assert len({task.id for task in tasks}) == 6 and all(task.warm for task in tasks)

"""``hypic bench ttft`` on tiny geometries: arms do what they say, records are whole, floors are as counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.engine import models
from hypic.types import CacheReport, Policy, SegmentReport
from hypic_apps.bench import floors, trace, ttft, ttft_command
from hypic_apps.bench.floors import Counts, Limits, load_of
from hypic_apps.bench.geometries import geometry, known
from hypic_apps.bench.prompts import IdsSource, Shape, shuffled
from hypic_apps.bench.session import Answered, Session, session
from hypic_apps.cli.errors import CommandError
from hypic_apps.cli.main import main

ROOT = Path(__file__).parents[3]
SMALL = ["--geometry", "tiny", "--segments", "2", "--segment-tokens", "48", "--tail-tokens", "8"]
QUICK = ["--runs", "2", "--warmup", "0", "--threads", "1", "--decode-tokens", "2", "--memory", "64MiB"]
H200 = Limits(773e12, 4.2e12)


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "ttft", *SMALL, *QUICK, "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def by_arm(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {record["arm"]: record for record in result["records"]}


def test_records_hold_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys)
    found = by_arm(result)
    assert list(found) == list(ttft.ARMS)
    for record in found.values():
        assert record["geometry"] == "tiny" and record["device"] == "cpu" and record["runs"] == 2
        assert (record["num_segments"], record["segment_tokens"], record["tail_tokens"]) == (2, 48, 8)
        assert 0 < record["ttft_ms_p50"] <= record["ttft_ms_p90"]
        assert record["floor_ms"] > 0 and record["floor_ratio"] > 1
        assert record["total_ms_1024"] > record["total_ms_256"] > record["ttft_ms_p50"]
    assert all(result[name] for name in ("date", "command", "hardware", "versions", "limits"))
    assert list(result["seconds"]) == ["building", "warming up", "preparing", "measured requests"]
    measured = sum(record["ttft_ms_p50"] * record["runs"] for record in found.values()) / 1e3
    assert result["seconds"]["measured requests"] == pytest.approx(measured, rel=0.3)
    assert result["seconds"]["preparing"] > 0 and result["first_used_on_requests"] == []


def test_what_determinism_costs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every arm but prefix, both ways on the same documents; deterministic ones run the same tokens."""
    result = bench(capsys, "--deterministic")
    found = by_arm(result)
    assert list(found) == [*ttft.ARMS, *ttft.TWINS.values()]
    for arm, twin in ttft.TWINS.items():
        assert found[twin]["computed_tokens"] == found[arm]["computed_tokens"]
        assert found[twin]["floor_ms"] == found[arm]["floor_ms"] and "times_plain" not in found[arm]
        cost = found[twin]["ttft_ms_p50"] / found[arm]["ttft_ms_p50"]
        assert found[twin]["times_plain"] == pytest.approx(cost)
        assert result["deterministic_over_plain"][arm]["largest"] == pytest.approx(cost)
        assert f"deterministic over plain, {arm}: " in ttft_command.text(result)
    assert found["warm-deterministic"]["gap_ms"] != found["warm"]["gap_ms"]
    assert bench(capsys, "--arms", "warm")["deterministic_over_plain"] == {}


def test_prefix_and_warm_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before a prefix request is run only as far as its orders agree, which reuses the same."""
    grid = ("--segments", "1,4", "--arms", "prefix,warm", "--decode-tokens", "0")
    result, orders = bench(capsys, *grid), [shuffled([""] * 4, n) for n in range(2)]
    assert [(r["num_segments"], r["arm"]) for r in result["records"]] == [
        (1, "prefix"), (1, "warm"), (4, "prefix"), (4, "warm")]  # fmt: skip
    assert result["warm_over_prefix"]["cells"] == 2
    text = ttft_command.text(result)
    assert "warm over prefix: geometric mean of 2 cells" in text and "floor ratio" in text
    assert all(order[0] != 0 for order in orders[1:]), "the last repetition reuses nothing"
    heads = {r["num_segments"]: r["computed_tokens"] for r in result["records"] if r["arm"] == "prefix"}
    assert heads == {1: 8, 4: 4 * 48 + 8}


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [2, 0, 1, 3], [0, 1, 2, 3]])
def test_a_prefix_cache_has_seen_all_that_it_could_reuse(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens are reused as if the whole prompt before had been run."""
    monkeypatch.setattr(ttft, "shuffled", lambda documents, number: order)
    shape, counts = Shape(4, 48, 8), []
    with session(geometry("tiny"), {"memory": "64MiB", "max_context": 1024}, ids=True) as built:
        for whole in (False, True):
            repetition = ttft.Repetition(built, shape, 0)
            if whole:
                pieces = repetition._pieces(range(4), "before")
                monkeypatch.setattr(ttft.Repetition, "_before", lambda self, pieces=pieces: pieces)
            counts.append(repetition.measure("prefix").report.reused_tokens)
    same = next((n for n, place in enumerate(order) if n != place), 4)
    assert counts == [48 * same] * 2


def test_every_arm_computes_the_tokens_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    """The warm arm runs seams and tail; a control: with other seams it runs other tokens."""
    found = by_arm(bench(capsys))
    assert found["full"]["computed_tokens"] == 104
    assert found["warm"]["computed_tokens"] == 2 * 8 + 8
    assert found["cold"]["computed_tokens"] == 104 + 2 * 8
    wider = by_arm(bench(capsys, "--arms", "warm", "--seam", "12"))
    assert wider["warm"]["computed_tokens"] == 2 * 12 + 8


@pytest.mark.parametrize("many", [2, 3])
def test_segments_of_every_repetition_have_other_lengths(many: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And every arm what it should compute; a control: without ``--vary`` all have one length."""
    seen = list[list[int]]()
    with pytest.MonkeyPatch.context() as patch:
        sound = IdsSource.documents

        def noted(source: IdsSource, shape: Shape, number: int) -> Any:
            found = sound(source, shape, number)
            seen.append([len(ids) for ids in found])
            return found

        patch.setattr(IdsSource, "documents", noted)
        grid = ("--segments", str(many), "--decode-tokens", "0", "--runs", "4")
        result = bench(capsys, *grid, "--segment-tokens", "96", "--vary", "0.4")
        assert len({tuple(lengths) for lengths in seen}) == len(seen) == 4
        assert all(96 - 38 <= length <= 96 + 38 for lengths in seen for length in lengths)
        assert len({length for lengths in seen for length in lengths}) > many
        found = by_arm(result)
        assert {record["vary"] for record in found.values()} == {0.4}
        assert found["full"]["computed_tokens"] == sum(seen[-1]) + 8 == found["full"]["prompt_tokens"]
        assert found["warm"]["computed_tokens"] == many * 8 + 8
        assert f"{many} x 96 +- 40% + 8" in ttft_command.text(result)
        seen.clear()
        assert by_arm(bench(capsys, *grid))["full"]["vary"] == 0 and seen == [[48] * many] * 4


@pytest.mark.parametrize("vary", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("many", [1, 2, 5, 16])
def test_the_whole_stays_about_as_long(many: int, vary: float) -> None:
    """Exactly for an even number; the same in every process."""
    shape = Shape(many, 100, 8, 3, vary)
    totals = [sum(shape.lengths(str(seed))) - many * 100 for seed in range(50)]
    assert max(map(abs, totals)) <= many % 2 * shape.most_varied
    assert (len(set(totals)) > 1) == (many % 2 == 1 and vary > 0)
    assert shape.num_tokens == many * 100 + 11 and max(totals) + shape.num_tokens <= shape.most_tokens
    assert shape.lengths("x") == shape.lengths("x")
    assert Shape(2, 100, 8, 3, 0.25).lengths("0|1|a") == [105, 95]
    assert repr(shape) == repr(Shape(many, 100, 8, 3)), "ids without variation are drawn as before"


def test_a_grid_leaves_out_what_is_too_long_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--segments", "1,2", "--segment-tokens", "48,64", "--max-prompt-tokens", "120", "--arms", "cold")
    result = bench(capsys, *grid)
    cells = [(r["num_segments"], r["segment_tokens"]) for r in result["records"]]
    assert cells == [(1, 48), (1, 64), (2, 48)] and result["left_out"] == ["2 x 64"]


def test_a_grid_that_is_ended_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, seen = ttft.measure, list[Shape]()

    def ended(session: Session, shape: Shape, *rest: Any) -> ttft.Cell:
        seen.append(shape)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return sound(session, shape, *rest)

    monkeypatch.setattr(ttft, "measure", ended)
    path = tmp_path / "grid.json"
    assert main(["bench", "ttft", *SMALL, *QUICK, "--segments", "1,2,3", "--arms", "cold", "--save", str(path)]) == 130
    kept = json.loads(path.read_text())
    assert [r["num_segments"] for r in kept["records"]] == [1] and kept["missing_cells"] == 2


def test_what_all_cells_say_together() -> None:
    def record(arm: str, many: int, length: int, ms: float, gain: float) -> dict[str, Any]:
        return {"arm": arm, "num_segments": many, "segment_tokens": length, "tail_tokens": 8, "ttft_ms_p50": ms,
                "ratio_to_full": gain}  # fmt: skip

    grid = [record("warm", 4, 64, 10, 2), record("warm", 8, 64, 12, 8), record("warm", 8, 128, 90, 4)]
    found = ttft.over_cells([*grid, record("full", 4, 64, 20, 1)])
    assert found["warm_over_full"] == {"cells": 3, "mean": pytest.approx(4), "smallest": 2, "largest": 8}
    assert found["warm_over_prefix"] is None and found["ms_per_segment"] == {"warm": 0.5}


def test_a_cell_that_fails_does_not_take_the_others_along(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--segments", "1,6", "--arms", "warm", "--store", "device://60KiB")
    assert main(["bench", "ttft", *SMALL, *QUICK, "--json", *arguments]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [r["num_segments"] for r in result["records"]] == [1]
    assert len(result["failed"]) == 1 and result["failed"][0].startswith("6 x 48: the warm arm")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--segment-tokens", "16"], "run live"),
        (["--vary", "0.9"], "segments of 5 tokens are run live"),
        (["--vary", "1"], "'1'"),
        (["--vary", "some"], "'some'"),
        (["--segments", "0"], "'0'"),
        (["--arms", "hot"], "'hot'"),
        (["--geometry", "huge"], "'huge'"),
        (["--max-prompt-tokens", "10"], "longer than 10"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ttft", *SMALL, *QUICK, *arguments]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hypic: ")]
    assert expected in said


def test_an_arm_that_did_something_else_is_no_result() -> None:
    def report(*outcomes: Any, reused: int = 0) -> Answered:
        segments = tuple(SegmentReport("document", None, None, outcome, 48) for outcome in outcomes)
        return Answered((0.1,), (1,), CacheReport(segments, reused_tokens=reused))

    shape = Shape(2, 48, 8)
    ttft.check("warm", report("hit", "hit"), shape)
    for arm, answered in (
        ("warm", report("hit", "encoded")),
        ("warm", report("hit")),
        ("cold", report("hit", "encoded")),
        ("full", report("live", "live", reused=3)),
    ):
        with pytest.raises(CommandError):
            ttft.check(arm, answered, shape)


def test_segments_that_were_evicted_before_they_were_asked_for_are_no_warm_run() -> None:
    settings = {"memory": "64MiB", "max_context": 1024, "store": "device://100KiB"}
    with session(geometry("tiny"), settings, ids=True) as built, pytest.raises(CommandError, match="--memory"):
        ttft.measure(built, Shape(8, 48, 8), ttft.Plan(("warm",), runs=1, decode_tokens=0))


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_new_in_every_repetition_and_the_same_in_every_process() -> None:
    source, shape = IdsSource(512), Shape(3, 64, 8, head_tokens=5)
    first, again, other = (source.documents(shape, number) for number in (0, 0, 1))
    assert first == again != other and len(set(first[0])) > 30
    heads = {source.prompt(shape, documents, "x")()[0].ids for documents in (first, other)}
    tails = {source.prompt(shape, first, salt)()[-1].ids for salt in ("x", "y")}
    assert len(heads) == 1 and len(tails) == 2
    assert sorted(shuffled(first, 7)) == [0, 1, 2] and len({tuple(shuffled(first, n)) for n in range(50)}) == 6


def test_text_is_tokenised_inside_the_time_unless_asked_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    bundled = ("--geometry", "hypic-tiny", "--arms", "warm", "--runs", "1", "--memory", "400MiB")
    inside, beforehand = bench(capsys, *bundled), bench(capsys, *bundled, "--ids")
    assert inside["tokenising"] is True and beforehand["tokenising"] is False
    (one,), (other,) = inside["records"], beforehand["records"]
    assert one["computed_tokens"] == other["computed_tokens"] < one["prompt_tokens"]
    assert one["prompt_tokens"] >= 104


# -- floors ----------------------------------------------------------------------------------------------------------


def counted(name: str) -> Counts:
    with torch.device("meta"):
        model = models.build(known()[name])
    return Counts.of(model.to(torch.bfloat16))


def test_floors_of_the_large_geometry_are_those_that_were_counted_by_hand() -> None:
    """4.9 GFLOP a token, 70 GB of weights, 60 MiB of transitions; 175 ms for full recompute and about 18 ms warm."""
    counts, shape = counted("qwen3.5-35b-a3b"), Shape(16, 1024, 128)
    assert 2 * counts.active_weights / 1e9 == pytest.approx(4.9, abs=0.1)
    assert counts.weight_bytes(10_000) / 1e9 == pytest.approx(70, rel=0.03)
    assert counts.layout.transition_bytes == 60 * 2**20 and counts.layout.token_bytes == 20 * 2**10
    full, warm = (load_of(arm, shape, Policy(), counts.layout).seconds(counts, H200) for arm in ("full", "warm"))
    assert full == pytest.approx(0.175, rel=0.02) and warm == pytest.approx(0.018, rel=0.06)


def test_floors_by_room_of_the_large_geometry() -> None:
    """Warm, the experts' bytes are most of all; recomputed, none is bound by bytes; together no less than the whole."""
    counts, shape = counted("qwen3.5-35b-a3b"), Shape(16, 1024, 128)
    loads = {arm: load_of(arm, shape, Policy(), counts.layout) for arm in ("full", "warm")}
    full, warm = (loads[arm].by_room(counts, H200) for arm in ("full", "warm"))
    assert warm["experts"] == pytest.approx(0.0154, rel=0.03) and max(warm, key=lambda room: warm[room]) == "experts"
    for arm, rooms in (("full", full), ("warm", warm)):
        assert sum(rooms.values()) >= loads[arm].seconds(counts, H200) * 0.999, arm
    assert full["linear: lift with scan"] == pytest.approx(0.042, rel=0.05)
    assert sum(full.values()) == pytest.approx(loads["full"].seconds(counts, H200), rel=0.01)
    dense = counted("qwen3.5-4b")
    assert dense.routed_weights == 0 == load_of("warm", shape, Policy(), dense.layout).by_room(dense, H200)["experts"]
    assert "by room experts 15." in floors.rooms_text(loads["warm"], counts, H200)


def test_few_tokens_read_few_experts() -> None:
    counts = counted("qwen3.5-35b-a3b")
    assert counts.weight_bytes(0) == counts.dense_bytes
    one = counts.weight_bytes(1) - counts.dense_bytes
    assert one == pytest.approx(counts.expert_bytes * 8 / 256)


@pytest.mark.parametrize("name", list(known()))
def test_every_geometry_is_built_and_segments_can_gain(name: str) -> None:
    counts = counted(name)
    full, cold, warm = (
        load_of(arm, Shape(16, 1024, 128), Policy(), counts.layout).seconds(counts, H200)
        for arm in ("full", "cold", "warm")
    )
    assert warm < cold < full


# -- peers, profile, plain surroundings ------------------------------------------------------------------------------


def test_transformers_runs_beside_us_and_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "--geometry", "tiny-moe", "--arms", "full", "--peer", "transformers", "--peer", "prefix")
    found = by_arm(result)
    assert list(found) == ["full", "prefix", "transformers"]
    peer, full = found["transformers"], found["full"]
    assert peer["runs"] == 2 and "total_ms_256" not in peer
    assert full["ratio_to_transformers"] == pytest.approx(peer["ttft_ms_p50"] / full["ttft_ms_p50"])
    assert result["peer"]["versions"]["flash-linear-attention"] == "missing" and not result["peer"]["missing"]


def test_a_peer_that_cannot_be_had_is_said_to_be_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = known()["tiny"] | {"model_type": "bailing_moe_linear"}
    ring = {
        **known()["ring-mini-linear-2.0"],
        **{name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
        **{"num_hidden_layers": 4, "layer_group_size": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
        "group_norm_size": 2,
    }
    monkeypatch.setattr("hypic_apps.bench.geometries.known", lambda: {"tiny": ring})
    result = bench(capsys, "--arms", "warm", "--peer", "transformers")
    assert "bailing_moe_linear" in result["peer"]["missing"]
    assert list(by_arm(result)) == ["warm"]


HOST = (
    r"host: ([\d.]+) ms before .*, ([\d.]+) ms waiting .*, ([\d.]+) ms from there to the token \(medians of 5 requests"
)


def test_a_profile_names_rooms_and_operators(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "deep" / "profile.txt"
    bench(capsys, "--arms", "warm", "--runs", "1", "--profile", str(file), "--profile-arm", "full")
    text = file.read_text()
    assert text.startswith("full, 2 x 48 + 8 tokens\nfloors in ms: the whole ") and "wall time" in text
    before, waited, after = map(float, re.search(HOST, text).groups())  # type: ignore[union-attr]
    assert before > 0 and waited >= 0 and after > 0
    for room in ("attention", "experts", "norms", "projections", "linear: lift", "linear: scan", "linear: convolution"):
        assert f"\n{room} " in text
    assert "aten::mm" in text


def test_rooms_by_the_innermost_frame() -> None:
    linear = "torch/nn/modules/linear.py(120): forward"
    attention, moe = "/x/hypic/engine/layers/attention.py(7): f", "/x/hypic/engine/layers/moe.py(9): f"
    assert trace.room_of(["builtin", attention, moe]) == "attention"
    assert trace.room_of([linear, attention]) == "projections"
    assert trace.room_of([linear, moe, attention]) == "experts"
    assert trace.room_of(["builtin"]) == "other"


def test_own_time_leaves_out_what_was_called() -> None:
    def op(name: str, start: float, duration: float) -> trace.Event:
        return trace.Event(name, "cpu_op", 1, start, duration, None)

    own = trace.own_times([op("outer", 0, 10), op("inner", 2, 3), op("innermost", 3, 1), op("inner", 6, 2)])
    assert own == {"outer": (5, 1), "inner": (4, 2), "innermost": (1, 1)}


def test_kernels_belong_to_what_launched_them() -> None:
    def event(name: str, kind: str, start: float, duration: float, correlation: int | None = None) -> trace.Event:
        return trace.Event(name, kind, 1, start, duration, correlation)

    frames = [
        event("hypic/engine/layers/attention.py(1): forward", "python_function", 0, 10),
        event("hypic/engine/layers/norm.py(1): forward", "python_function", 4, 3),
    ]
    launches = [event("cudaLaunchKernel", "cuda_runtime", at, 1, at) for at in (1, 5, 8)]
    kernels = [event("k", "kernel", 100 + at, 7, at) for at in (1, 5, 8)]
    whole = trace.Trace(kernels, launches, [], frames)
    assert trace.by_room(whole) == {"attention": (14, 2), "norms": (7, 1)}


BLOCKED = ("rich", "faiss", "fastapi", "jinja2", "httpx", "pydantic", "transformers", "einops", "matplotlib")
BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
sys.argv[0] = "bench"
import runpy
runpy.run_module("hypic_apps.bench", run_name="__main__")
"""


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "retriever", "apps"))
    command: Sequence[str] = [sys.executable, "-c", BARE.format(blocked=BLOCKED), *arguments]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_it_runs_where_little_is_installed() -> None:
    done = plain("ttft", *SMALL, *QUICK, "--arms", "warm")
    assert done.returncode == 0, done.stderr
    assert "warm" in done.stdout and "transitions kept: 100.0%" in done.stdout
    failed = plain("ttft", *SMALL, "--segments", "x")
    assert failed.returncode == 2 and failed.stderr.startswith("hypic: ") and failed.stdout == ""

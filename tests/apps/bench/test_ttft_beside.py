"""Beside the arms of ``hypic bench ttft``: peers that are timed with them, profiles, and where little is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hypic_apps.bench import trace
from hypic_apps.bench.geometries import known
from tests.apps.bench.small_ttft import QUICK, ROOT, SMALL, bench, by_arm


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

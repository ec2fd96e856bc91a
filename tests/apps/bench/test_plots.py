"""Pictures are drawn where matplotlib is, and the way to it is named where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hypic_apps.bench import plots
from hypic_apps.cli.errors import CommandError

PNG = b"\x89PNG"


def ttft_records() -> list[dict[str, Any]]:
    return [
        {"arm": arm, "geometry": "tiny", "device": "cpu", "num_segments": many, "segment_tokens": length,
         "ttft_ms_p50": many * length / speed, "ttft_ms_p90": many * length / speed * 1.2, "floor_ms": many / 10}
        for arm, speed in (("full", 1), ("warm", 10)) for many in (2, 4) for length in (64, 128)
    ]  # fmt: skip


def load_records() -> list[dict[str, Any]]:
    return [{"arm": arm, "qps": qps, "ttft_ms_p90": 100 * qps} for arm in ("none", "http://x") for qps in (1.0, 2.0)]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "deep" / "ttft.png", tmp_path / "load.png"
    plots.ttft(ttft_records(), first)
    plots.load(load_records(), 1.0, second)
    assert first.read_bytes()[:4] == second.read_bytes()[:4] == PNG
    with pytest.raises(CommandError, match="name another file"):
        plots.load(load_records(), 1.0, tmp_path / "load.nonsense")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CommandError, match=r"hypic\[bench\]"):
        plots.ttft(ttft_records(), tmp_path / "ttft.png")

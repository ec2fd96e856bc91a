"""Tables between marks: the project's own pages tell what its results hold, and marks choose and refuse."""

from __future__ import annotations

import json
import lzma
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hypic.errors import ConfigError
from hypic_apps.cli.main import main
from hypic_apps.cli.whole_file import write_whole
from hypic_apps.eval import pages, plot, tables
from hypic_apps.eval.drift import Drift, Layer
from hypic_apps.eval.records import Record

ROOT = Path(__file__).parents[3]
CARD = ROOT / "hypic" / "checkpoints" / "hypic-tiny" / "README.md"
OWN = (ROOT / "README.md", ROOT / "apps" / "hypic_apps" / "eval" / "README.md", CARD)


def _record(set: str, arm: str, metric: str, value: float, gap: float | None = None) -> Record:
    gaps = (None, None, None) if gap is None else (gap, gap - 0.01, gap + 0.01)
    return Record("tiny", set, arm, metric, value, 100, value - 0.1, value + 0.1, *gaps)


RECORDS = [
    *(_record(s, "full", "exact_match", 0.9) for s in ("S1", "S8", "S5")),
    _record("S1", "transition", "exact_match", 0.898, -0.002),
    _record("S8", "transition", "exact_match", 0.87, -0.03),
    _record("S5", "transition", "exact_match", 0.7, -0.2),
    _record("S5", "addition", "exact_match", 0.9, 0.0),
    _record("S5", "addition", "run_share", 0.1),
    _record("S5", "transition", "run_share", 0.1),
    _record("S5", "seam-32", "exact_match", 0.82, -0.08),
    _record("S5", "seam-32", "run_share", 0.4),
    _record("S5", "seam-32", "kl", 0.25),
    _record("S5", "edges-32", "exact_match", 0.81, -0.09),
    _record("S5", "edges-32", "run_share", 0.2),
]
LAYERS = (Layer(0, "linear_attention", 2e-7, 0.1, (0.1,)), Layer(1, "linear_attention", 0.093, 0.05, (0.2,)))
DRIFT = Drift("transition", 3, LAYERS, ((None, 0.5, None, None, None, None, None),))


def _written(folder: Path) -> Path:
    saved = {"model": "tiny", "num_parameters": 12_000_000, "records": [asdict(r) for r in RECORDS]}
    (folder / "found.json").write_text(json.dumps({**saved, "drift": [asdict(DRIFT)]}))
    return folder / "found.json"


@pytest.mark.parametrize("page", OWN, ids=lambda path: path.parent.name)
def test_the_projects_pages_tell_what_its_results_hold(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(pages.MARK.findall(text)) >= (1 if page == CARD else 2)
    assert pages.filled(text, page.parent) == text, f"run: hypic eval --fill {page.relative_to(ROOT)}"


def test_a_page_is_filled_between_its_marks_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _written(tmp_path)
    page, mark = tmp_path / "page.md", "<!-- hypic eval: gaps found.json sets=S5,S1 arms=seam-32,transition -->"
    page.write_text(f"before\n{mark}\nold\n<!-- end -->\nafter\n")
    assert main(["eval", "--fill", str(page)]) == 0 and "written anew" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    assert lines[:2] == ["before", mark] and lines[-2:] == ["<!-- end -->", "after"] and "old" not in lines
    assert lines[2] == "| arm against full | S5 | S1 |", "of the sets that count in the mean there is one"
    assert [line.split(" | ")[0] for line in lines[4:6]] == ["| seam-32", "| transition"]
    assert main(["eval", "--fill", str(page)]) == 0 and "as it was" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("poem found.json", "poem"),
        ("", "names the table ''"),
        ("gaps nowhere.json", "nowhere"),
        ("gaps other.json", "other.json' holds other records"),
        ("gaps bare.json", "bare.json' holds no records of a model"),
        ("knobs found.json sets=S9", "nothing saved belongs"),
        ("distance found.json arms=last", "nothing saved belongs"),
    ],
)
def test_a_mark_that_cannot_be_filled_is_refused(mark: str, told: str, tmp_path: Path) -> None:
    _written(tmp_path)
    (tmp_path / "other.json").write_text('{"model": "m", "num_parameters": 1, "records": [{"ttft_ms_p50": 3}]}')
    (tmp_path / "bare.json").write_text('{"records": []}')
    with pytest.raises(ConfigError, match=told):
        pages.filled(f"<!-- hypic eval: {mark} -->\n<!-- end -->", tmp_path)


def test_files_that_hold_no_results_or_no_page_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"model": "m", "num_parameters": 1, "records": [{"ttft_ms_p50": 3}]}')
    (tmp_path / "page.md").write_bytes(b"\xff\xfe")
    assert main(["eval", "--show", str(tmp_path / "other.json")]) != 0
    assert "holds other records than those of hypic eval" in capsys.readouterr().err
    assert main(["eval", "--fill", str(tmp_path / "page.md")]) != 0
    assert "it is no text in UTF-8; name a page." in capsys.readouterr().err


def test_compressed_results_are_read_like_plain_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _written(tmp_path)
    write_whole(tmp_path / "found.json.xz", found.read_text())
    assert len((tmp_path / "found.json.xz").read_bytes()) < len(found.read_bytes()) / 2
    shown = []
    for name in ("found.json", "found.json.xz"):
        assert main(["eval", "--show", str(tmp_path / name)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "S5" in shown[0]


@pytest.mark.parametrize("data", [b'{"records": []}', lzma.compress(b"{}")[:-4]], ids=["plain", "cut off"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "found.json.xz").write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read"):
        pages.saved(tmp_path / "found.json.xz")


def test_every_table_can_be_made(tmp_path: Path) -> None:
    _written(tmp_path)
    for name in pages.TABLES:
        text = pages.filled(f"<!-- hypic eval: {name} found.json -->\n<!-- end -->", tmp_path)
        assert name == "others" or text.count("\n|") >= 2, name


def test_divergences_are_told_of_arms_that_have_them() -> None:
    head, _, *rows = tables.divergences([*RECORDS, Record("tiny", "S8", "seam-32", "kl", 0.00001, 100)])
    assert head == "| divergence from full | S8 | S5 |" and rows == ["| seam-32 | 1e-05 | 0.25 |"]


def test_two_models_stand_side_by_side_on_every_set() -> None:
    kl = Record("tiny", "S5", "transition", "kl", 0.25, 100)
    tuned = [replace(r, model="tuned") for r in RECORDS if r.set == "S5" and r.arm == "full"]
    head, _, *rows = tables.models([*RECORDS, kl, *tuned])
    assert head.startswith("| set | tiny: full | tiny: default | tiny: gap, points | tiny: KL | tuned: full |")
    assert rows[0] == "| S1 | 90.0 (80-100) | 89.8 (80-100) | -0.2 (-1.2 to +0.8) |  |  |  |  |  |"
    assert rows[2] == "| S5 | 90.0 (80-100) | 70.0 (60-80) | -20.0 (-21.0 to -19.0) | 0.25 | 90.0 (80-100) |  |  |  |"
    assert [row.split(" | ")[0] for row in rows] == ["| S1", "| S8", "| S5"]


def test_what_the_model_was_to_answer_is_told_met_or_not() -> None:
    refused = [_record("S6", "full", metric, value) for metric, value in (("refusal_precision", 0.85), ("f1", 0.1))]
    _, _, *rows = tables.answers([*RECORDS, *refused])
    assert rows == [
        "| S1: exact match of at least 95 | 90.0 (80-100) (n=100) | no |",
        "| S6: refusal precision of at least 85 | 85.0 (75-95) (n=100) | yes |",
    ]


def test_goals_are_told_of_another_policy(tmp_path: Path) -> None:
    other = [replace(r, arm="seam-32", gap_to_full=0.0, gap_low=-0.01, gap_high=0.01) for r in RECORDS if r.set == "S8"]
    (told,) = [line for line in tables.goals([*RECORDS, *other], "seam-32") if line.startswith("| S8: gap")]
    assert told.endswith("| +0.0 (-1.0 to +1.0) | yes |")
    rows = {"model": "tiny", "num_parameters": 1, "records": [asdict(r) for r in [*RECORDS, *other]]}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    page = "<!-- hypic eval: goals a.json sets=S8 of=seam-32 -->\n<!-- end -->"
    assert "+0.0 (-1.0 to +1.0)" in pages.filled(page, tmp_path)
    assert "+0.0 (-1.0 to +1.0)" not in pages.filled(page.replace("of=seam-32", ""), tmp_path)


def test_goals_are_met_or_not() -> None:
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in tables.goals(RECORDS)}
    assert rows["S1: gap at most 2 points"].endswith("| yes |")
    wide = Record("tiny", "S6", "transition", "exact_match", 0.9, 24, 0.8, 1.0, 0.0, -0.13, 0.13)
    assert "too few items" in tables.goals([*RECORDS, wide])[-2]
    assert rows["S8: gap at most 2 points"].endswith("| no |")
    (mean,) = [line for name, line in rows.items() if name.startswith("mean gap of S1, S8")]
    assert "-1.6" in mean and mean.endswith("| no |")
    (halved,) = [line for name, line in rows.items() if name.startswith("S5")]
    assert "`edges-32` at 20 % of the tokens" in halved, "not the ablation, which costs less"


def test_knobs_show_what_their_own_prompt_does_in_full() -> None:
    more = [
        *(_record("S5", "halves", m, v) for m, v in (("kl", 0.5), ("cached_bytes", 2.0**20), ("floor_s", 0.5))),
        _record("S5", "halves", "exact_match", 0.8, -0.1),
        _record("S5", "full-halves", "exact_match", 0.85, -0.05),
        _record("S5", "full", "floor_s", 2.0),
    ]
    table = tables.knobs([r for r in [*RECORDS, *more] if r.set == "S5"])
    (row,) = [line for line in table if line.startswith("| `halves`")]
    assert row == "| `halves` | -10.0 (-11.0 to -9.0); its own full -5.0 | 0.5 |  |  | 1 MiB | 25 % |"
    assert not any("full-halves" in line.split("|")[1] for line in table)


def test_the_ends_of_a_models_depth() -> None:
    assert tables.ends([DRIFT])[2] == "| transition | 2e-07 | 9.3 % | 5.0 % |"


@pytest.mark.parametrize(("values", "ends", "ticks"), [((120, 1900), (100, 2000), 5), ((1e-7, 2.0), (1e-7, 10), 9)])
def test_a_logarithmic_axis_holds_its_values(
    values: tuple[float, float], ends: tuple[float, float], ticks: int
) -> None:
    axis = plot._axis(values, 0.0, 1.0)
    assert (axis.low, axis.high) == pytest.approx(ends) and len(axis.ticks()) == ticks


def test_saved_drift_is_shown_and_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _written(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "records": []}))
    assert main(["eval", "--show", str(file), "--plot", str(tmp_path / "d.svg")]) == 0
    assert "| 1 (linear) | 0.093 | 0.05 |" in capsys.readouterr().out
    assert "polyline" in (tmp_path / "d.svg").read_text()

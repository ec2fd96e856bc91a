"""Seams that follow openings, through ``LLM``: a checkpoint's ``hypic.json``, policies, reports, keys and warming."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypic import LLM, Prompt, Segment
from hypic.engine.opening import BEYOND
from hypic.engine.vocabulary import SETTINGS_FILE
from hypic.errors import CheckpointError, PromptError
from hypic.types import CacheReport
from tests.llm.asking import REUSE, SETTINGS, passage, sampling

HEADED = Segment(f"# Mills\n\n{passage(1)}")
PLAIN = Segment(passage(2))


@pytest.fixture(scope="module")
def opened(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = Path(shutil.copytree(folder, tmp_path_factory.mktemp("opened") / "model"))
    (made / SETTINGS_FILE).write_text('{"seam_opening": 24}')
    with LLM(str(made), **{**SETTINGS, "policy": REUSE}) as llm:
        yield llm


def outcomes(report: CacheReport | None) -> list[str]:
    assert report is not None
    return [row.outcome for row in report.segments]


def heading(llm: LLM) -> int:
    return llm.count_tokens("# Mills\n\n")


def test_the_report_tells_how_wide_each_seam_was(opened: LLM, llm: LLM) -> None:
    assert opened.stats()["seam_opening"] == 24 and llm.stats()["seam_opening"] == 0
    assert heading(opened) + BEYOND > 8, "or it would show nothing"
    for asked, widths in ((opened, [heading(opened) + BEYOND, 8]), (llm, [8, 8])):
        out = asked.generate(Prompt([HEADED, PLAIN], "Who grinds rye?"), sampling(), policy=REUSE)
        assert out.report is not None and [row.seam for row in out.report.segments] == widths
        cached = sum(row.num_cached(REUSE) for row in out.report.segments)
        assert cached == sum(row.num_tokens for row in out.report.segments) - sum(widths)
        again = asked.generate(Prompt([HEADED, PLAIN], "Who mows hay?"), sampling(), policy=REUSE)
        assert again.report is not None and again.report.num_hits == 2
        assert again.report.computed_tokens == again.report.prompt_tokens - cached


def test_a_policy_has_the_last_word(opened: LLM) -> None:
    prompt = Prompt([HEADED, Segment(HEADED.text, seam=5), Segment("Too short.")], "Who?")
    for policy, widths in ((REUSE.with_(seam_opening=0), [8, 5, 0]), (REUSE, [heading(opened) + BEYOND, 5, 0])):
        report = opened.generate(prompt, sampling(), policy=policy.with_(min_segment_tokens=30)).report
        assert report is not None and [row.seam for row in report.segments] == widths
        assert outcomes(report)[2] == "live"


def test_what_is_warmed_is_found(opened: LLM) -> None:
    opened.forget(everything=True)
    ((key, num_cached),) = opened.keys([HEADED])
    ((flat, _),) = opened.keys([HEADED], policy=REUSE.with_(seam_opening=0))
    (report,) = opened.warm([HEADED])
    assert report.segments[0].seam == heading(opened) + BEYOND
    assert num_cached == opened.count_tokens(HEADED.text) - report.segments[0].seam and key != flat
    out = opened.generate(Prompt([HEADED], "Who grinds rye?"), sampling())
    assert outcomes(out.report) == ["hit"]


def test_compare_counts_what_more_is_run(opened: LLM) -> None:
    """Of a prompt for which the random model answers otherwise from segments."""
    prompts = (Prompt([HEADED, Segment(passage(n))], "Who grinds rye?") for n in range(2, 40))
    found = next(one for one in (opened.compare(prompt, 8, policy=REUSE) for prompt in prompts) if one.live)
    assert found.live[0].extra_tokens == opened.count_tokens(HEADED.text) - heading(opened) - BEYOND
    assert found.seams[0].extra_tokens == sum(max(0, 16 - n) for n in (heading(opened) + BEYOND, 8))


def test_a_file_that_cannot_be_used_is_said_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(folder, tmp_path / "model"))
    (made / SETTINGS_FILE).write_text('{"opening": 24}')
    with pytest.raises(CheckpointError, match="holds 'opening'; the one setting that it may hold is 'seam_opening'"):
        LLM(str(made), **SETTINGS)


@pytest.mark.parametrize("text", ["", " \n "])
def test_white_space_alone_is_refused_before_anything_is_encoded(text: str, opened: LLM) -> None:
    opened.forget(everything=True)
    for ask in (opened.warm, opened.keys):
        with pytest.raises(PromptError, match="has no text but white space; leave it out"):
            ask([HEADED, Segment(text)])
    assert not opened.entries()

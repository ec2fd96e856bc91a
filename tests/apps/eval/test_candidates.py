"""Candidates for a primer: each is measured as the model behind it would be, and none leaves anything to the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hypic.config import EngineConfig
from hypic_apps.bench import floors
from hypic_apps.cli.main import main
from hypic_apps.cli.whole_file import read_whole
from hypic_apps.eval import measure
from hypic_apps.eval.arms import CACHED, behind, plain
from hypic_apps.eval.driver import Ask, Subject
from hypic_apps.eval.items import Item
from hypic_apps.eval.records import records
from tests.apps.commands import one_sentence
from tests.apps.eval.conftest import SETTINGS, passage
from tests.apps.eval.test_command import ENGINE

ONE, OTHER = f"{passage(11)}\n\n{passage(12)}", passage(13)


def _values(subject: Subject, item: Item, arms: tuple[str, ...], **candidates: str) -> dict[str, dict[str, float]]:
    """What is measured, but for times and what is made of this machine's, by arm."""
    made = [behind(name, text) for name, text in candidates.items()]
    found = measure.measure(subject, "T", [item, item], measure.Plan(arms, "", 1, candidates=made))
    out: dict[str, dict[str, float]] = {}
    for r in records("tiny", found):
        if r.metric not in ("ttft_s", "floor_s"):
            out.setdefault(r.arm, {})[r.metric] = r.value
    return out


def test_a_candidate_is_measured_as_the_model_behind_it(folder: Path, item: Item) -> None:
    """Beside others and in one memory, as when the model was loaded with it; the control is another text."""
    own = _values(Subject(str(folder), EngineConfig.of(**SETTINGS, primer=ONE)), item, ("full", "transition"))
    found = _values(
        Subject(str(folder), EngineConfig.of(**SETTINGS)), item, ("full", "transition"), b=OTHER, a=ONE, c=OTHER + "."
    )
    assert found["primer-a"] == pytest.approx(own["transition"], abs=1e-12)
    for other in ("transition", "primer-b", "primer-c"):
        assert abs(found[other]["kl"] - own["transition"]["kl"]) > 1e-10, other
    alone = _values(Subject(str(folder), EngineConfig.of(**SETTINGS)), item, ("full", "transition"))
    assert found["transition"] == pytest.approx(alone["transition"], abs=1e-12)
    assert found["primer-b"] != found["primer-c"]


def test_what_is_timed_is_encoded_for_its_place(folder: Path, item: Item) -> None:
    """What is run of a prompt whose segments are cached does not hang on what they were encoded behind."""
    rungs = f"---\n\n{passage(14)}\n\n---\n\n{ONE}"
    found = _values(Subject(str(folder), EngineConfig.of(**SETTINGS)), item, ("full", "transition"), a=ONE, b=rungs)
    costs = ("run_share", "encoded_share", "cached_bytes")
    assert len(item.passages) > 1 and found["primer-a"]["kl"] != found["primer-b"]["kl"]
    assert [found["primer-b"][name] for name in costs] == [found["primer-a"][name] for name in costs]
    assert found["primer-b"]["run_share"] < found["full"]["run_share"]


def test_who_is_turned_to_finds_the_memory_free(folder: Path, item: Item) -> None:
    subject = Subject(str(folder), EngineConfig.of(**SETTINGS))
    other = subject.behind(ONE)
    assert subject.behind(ONE) is other and other.behind(None) is subject and other.runner.pool is subject.runner.pool
    for who in (subject, other, subject):
        turned = who.behind(None if who is subject else ONE)
        turned.answer([Ask(plain(item, ""), CACHED, 2)])
        idle = other if turned is subject else subject
        assert list(turned.engine.store) and not list(idle.engine.store)
    other.forget()
    assert not list(subject.engine.store)


def test_a_store_that_fills_the_memory_makes_room_for_a_primer(folder: Path) -> None:
    settings = {**SETTINGS, "memory": "8MiB", "max_context": 1024, "typical_segment_tokens": 32}
    subject = Subject(str(folder), EngineConfig.of(**settings))
    for number in range(12):
        long = " ".join(passage(2 * number + n) for n in range(2))
        subject.answer([Ask(plain(Item("T", 0, (long,), "Who?", ("x",)), ""), CACHED, 2)])
    pool = subject.runner.pool
    assert pool.free.pages < pool.pages_for(130), "the control: there is no room before"
    behind_it = subject.behind(OTHER)
    assert behind_it.runner.primers and pool.free == pool.capacity


def test_what_the_device_can_do_is_measured_once(folder: Path, item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, found = Subject(str(folder), EngineConfig.of(**SETTINGS)), []
    sound = floors.measure
    monkeypatch.setattr(floors, "measure", lambda *device: found.append(sound(*device)) or found[-1])
    seconds = [subject.behind(text).floor_s(plain(item, ""), CACHED) for text in (ONE, OTHER, None)]
    assert len(found) == 1 and min(seconds) > 0


def test_files_are_arms(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text(OTHER + "\n", encoding="utf-8")
    (tmp_path / "long.txt").write_text(ONE, encoding="utf-8")
    arguments = ["eval", "--set", "S8", "--items", "1", "--timed", "1", "--arm", "transition", "--model", str(folder)]
    arguments += [f"--primer-file={tmp_path / name}" for name in ("short.txt", "long.txt")]
    assert main([*arguments, *ENGINE, "--save", str(tmp_path / "found.json.xz")]) == 0
    assert "the default behind another primer" in capsys.readouterr().out
    saved = json.loads(read_whole(tmp_path / "found.json.xz"))
    assert saved["primers"] == {"primer-short": OTHER, "primer-long": ONE}
    assert main(["eval", "--show", str(tmp_path / "found.json.xz"), "--json"]) == 0
    arms = {r["arm"] for r in json.loads(capsys.readouterr().out)["records"]}
    assert arms == {"full", "transition", "primer-short", "primer-long"}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_arm_whose_primer_is_too_long_is_named(
    processes: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("short", OTHER), ("long", "\n\n".join(map(passage, range(40))))):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    arguments = ["eval", "--set", "S8", "--items", "1", "--arm", "transition", "--model", str(folder), *ENGINE]
    files = [f"--primer-file={tmp_path / name}.txt" for name in ("short", "long")]
    assert main([*arguments, *files, "--processes", processes]) == 2
    assert "primer-long: the primer has " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "more", "told"),
    [
        (["mark.txt"], [], "mark.txt' is empty; name a file with a primer in it"),
        (["a/x.txt", "x.txt"], [], "two files of --primer-file are named 'x'; arms go by that name, so rename one."),
        (["none.txt"], [], "none.txt' cannot be read (No such file or directory); name a text file."),
        (["bytes.txt"], [], "bytes.txt' cannot be read (it is no text in UTF-8); name a text file."),
        (["empty.txt"], [], "empty.txt' is empty; name a file with a primer in it"),
        (["x.txt"], ["--drift"], "--primer-file is for answers; with --drift pass the text itself with --primer."),
    ],
)
def test_what_is_refused(
    files: list[str], more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    for name, data in (("a/x.txt", b"A"), ("x.txt", b"B"), ("bytes.txt", b"\xff\xfe"), ("empty.txt", b" \n"),
                       ("mark.txt", b"\xef\xbb\xbf")):  # fmt: skip
        (tmp_path / name).write_bytes(data)
    assert main(["eval", *more, *(f"--primer-file={tmp_path / name}" for name in files)]) == 2
    assert told in one_sentence(capsys.readouterr().err)

"""``LLM(primer=...)``: where the text comes from, what is refused, and that a caller never sees it in what is counted
or listed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hypic import LLM, Policy, Prompt, SamplingParams, Segment, saved
from hypic.checkpoints import bundled
from hypic.config import EngineConfig
from hypic.engine import primer, weights
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import CheckpointError, ConfigError
from tests.checkpoints import qwen
from tests.engine.tiny_tokenizers import save_bytelevel
from tests.llm.asking import REUSE, SETTINGS, asked, assert_idle, passage, sampling

TEXT = "The lighthouse keeper counts ships.\n\nA letter came from the harbour office."
UNPRIMED = REUSE.with_(primed=False)


@pytest.fixture(scope="module")
def with_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a primer of its own."""
    made = Path(shutil.copytree(folder, tmp_path_factory.mktemp("own") / "model"))
    (made / weights.PRIMER_FILE).write_text(f"\n{TEXT}\r\n", encoding="utf-8", newline="")
    return made


@pytest.fixture(scope="module")
def primed(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), primer=TEXT, **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def emptied(request: pytest.FixtureRequest) -> None:
    if "primed" in request.fixturenames:
        request.getfixturevalue("primed").forget(everything=True)


def outcomes(report: Any) -> list[str]:
    return [segment.outcome for segment in report.segments]


# -- where it comes from ---------------------------------------------------------------------------------------------


def ids(folder: Path, text: str | None = None) -> tuple[int, ...]:
    found = primer.ids_of(folder, EngineConfig(primer=text))
    return next(iter(found.values()), ())


def test_the_checkpoints_own_is_the_default(folder: Path, with_file: Path) -> None:
    assert ids(folder) == () != ids(with_file) == ids(folder, TEXT)
    assert ids(with_file, "") == () and ids(with_file, "Another.") == ids(folder, "Another.") != ids(with_file)


def test_a_repositorys_own_is_had_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked_for: list[str] = []

    def download(model: str, allow_patterns: list[str]) -> str:
        asked_for.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert weights.locate("someone/model") == tmp_path
    assert any(fnmatch(weights.PRIMER_FILE, pattern) for pattern in asked_for)
    assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in asked_for)


@pytest.mark.parametrize("text", ["", " ", "\n\n", " \t\r\n \n"])
def test_white_space_is_no_primer(text: str, folder: Path, tmp_path: Path) -> None:
    assert ids(folder, text) == ()
    (tmp_path / weights.PRIMER_FILE).write_text(text, encoding="utf-8")
    assert primer.text_of(tmp_path, EngineConfig()) == ""


def test_ends_of_lines_and_a_byte_order_mark_make_no_other_primer(folder: Path, tmp_path: Path) -> None:
    """The same text, saved on another system or given by a shell."""
    for text in (TEXT.replace("\n", "\r\n"), TEXT.replace("\n", "\r"), f"\ufeff{TEXT}"):
        assert ids(folder, text) == ids(folder, TEXT)
        (tmp_path / weights.PRIMER_FILE).write_bytes(text.encode())
        assert primer.text_of(tmp_path, EngineConfig()) == TEXT
    assert ids(folder, TEXT.replace("\n\n", "\n")) != ids(folder, TEXT), "a line's end alone is no paragraph's"


def test_it_reads_as_the_head_of_a_prompt(primed: LLM, folder: Path) -> None:
    """Scaffolding, a passage for each paragraph, and the glue that would stand before the next one."""
    one, two = TEXT.split("\n\n")
    prompt = Prompt([Segment(one), Segment(two), Segment("next")], "question")
    whole = [id for piece in primed.tokenizer.encode(prompt) for id in piece.ids]
    found = ids(folder, TEXT)
    assert list(found) == whole[: len(found)]
    rest = whole[len(found) :]
    assert rest[: len(primed.tokenizer.encode_text("next"))] == list(primed.tokenizer.encode_text("next"))
    assert ids(folder, f"  {TEXT}\n\n\n\n") == found


def test_a_model_without_a_chat_template_may_have_one(tmp_path: Path) -> None:
    bare = save_bytelevel(qwen(tmp_path / "bare", vocab_size=352))
    for file in bare.glob("chat_template*"):
        file.unlink()
    found = ids(bare, TEXT)
    assert found
    with LLM(str(bare), primer=TEXT, **SETTINGS) as llm:
        report = llm.generate(Prompt([Segment(passage(1))], "?", template=False), sampling()).report
        assert outcomes(report) == ["encoded"] and not llm.tokenizer.has_chat_template


def test_a_template_that_tells_the_time_gives_the_same_every_day(folder: Path, tmp_path: Path) -> None:
    dated = Path(shutil.copytree(folder, tmp_path / "model"))
    template = "It is {{ strftime_now('%H:%M:%S.%f') }}. {% for m in messages %}{{ m['content'] }}{% endfor %}"
    for file in dated.glob("chat_template*"):
        file.unlink()
    settings = json.loads((dated / "tokenizer_config.json").read_text(encoding="utf-8"))
    (dated / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}), encoding="utf-8")
    prompt = Prompt([Segment("text")], "?")
    heads = [[piece.ids for piece in Tokenizer(dated).encode(prompt)] for _ in range(2)]
    assert heads[0] != heads[1], "a prompt tells the time"
    assert ids(dated, TEXT) == ids(dated, TEXT) != ids(folder, TEXT)
    assert Tokenizer(dated).has_chat_template and not Tokenizer(dated).has_timeless_template
    assert Tokenizer(folder).has_timeless_template


def test_what_is_no_text_is_refused(folder: Path, with_file: Path, tmp_path: Path) -> None:
    for value in (3, b"text", ["text"], True, Path("primer.txt")):
        with pytest.raises(ConfigError, match=r"primer is .*; pass a text, '' for none, or None"):
            EngineConfig(primer=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the primer cannot be read: .*surrogate.* primer='' for none\."):
        ids(folder, "half a \ud800 character")
    broken = Path(shutil.copytree(with_file, tmp_path / "model"))
    (broken / weights.PRIMER_FILE).write_bytes(b"caf\xe9 in Latin-1")
    with pytest.raises(CheckpointError, match=r"primer\.txt cannot be read as text .*pass primer=''\."):
        LLM(str(broken), **SETTINGS)
    assert ids(broken, "") == ()


def test_one_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the primer has \d+ tokens, and of a context of 2048 it may take 512"):
        LLM(str(folder), primer="word " * 4000, **SETTINGS)


# -- what a caller sees ----------------------------------------------------------------------------------------------


def test_answers_reports_and_usage_count_the_prompt_alone(primed: LLM, llm: LLM) -> None:
    for mine, theirs in zip(
        *([made.generate(asked(), sampling()) for _ in range(2)] for made in (primed, llm)), strict=True
    ):
        assert mine.report is not None and theirs.report is not None
        assert mine.usage == theirs.usage and outcomes(mine.report) == outcomes(theirs.report)
        counted = ("prompt_tokens", "computed_tokens", "reused_tokens")
        assert [getattr(mine.report, name) for name in counted] == [getattr(theirs.report, name) for name in counted]
        assert [s.num_bytes for s in mine.report.segments] == [s.num_bytes for s in theirs.report.segments]
    assert_idle(primed)


def logprobs(llm: LLM, policy: Policy) -> list[float]:
    told = llm.generate(asked(), sampling(logprobs=1), policy=policy)
    return [one.logprob for one in told.logprobs]


def test_stats_tell_which_is_in_use(primed: LLM, llm: LLM, folder: Path) -> None:
    assert primed.stats()["primer_tokens"] == len(ids(folder, TEXT)) > 0 and llm.stats()["primer_tokens"] == 0


def test_a_policy_switches_it_off(primed: LLM, llm: LLM) -> None:
    plain = logprobs(llm, REUSE)
    assert logprobs(primed, UNPRIMED) == pytest.approx(plain, abs=1e-9)
    assert logprobs(primed, REUSE) != pytest.approx(plain, abs=1e-7)
    full = Policy(reuse="none")
    assert logprobs(primed, full) == pytest.approx(logprobs(llm, full), abs=1e-9), "it stands in no prompt"


def test_an_engine_with_a_file_is_one_that_was_given_its_text(with_file: Path, primed: LLM) -> None:
    with LLM(str(with_file), **SETTINGS) as own:
        assert own.keys([Segment(passage(1))]) == primed.keys([Segment(passage(1))])
        assert own.fingerprint == primed.fingerprint
        assert logprobs(own, REUSE) == pytest.approx(logprobs(primed, REUSE), abs=1e-9)


def test_keys_and_warming(primed: LLM, llm: LLM) -> None:
    segments = [Segment(passage(1), name="one"), Segment(passage(2), name="two")]
    behind, without = primed.keys(segments), primed.keys(segments, policy=UNPRIMED)
    assert without == llm.keys(segments) and not {key for key, _ in behind} & {key for key, _ in without}
    assert [num for _, num in behind] == [num for _, num in without]
    assert [outcomes(report) for report in primed.warm(segments)] == [["encoded"]] * 2
    assert {entry.key for entry in primed.entries()} == {key for key, _ in behind}
    answer = primed.generate(Prompt(segments, "?"), sampling())
    assert outcomes(answer.report) == ["hit"] * 2
    other = primed.generate(Prompt(segments, "?"), sampling(), policy=UNPRIMED)
    assert other.report is not None and [s.reason for s in other.report.segments] == ["other primer"] * 2
    assert_idle(primed)


def test_no_listing_shows_it_and_nothing_forgets_it(primed: LLM) -> None:
    segments = [Segment(passage(1), name="one", source="s"), Segment(passage(2), source="t")]
    before = logprobs(primed, REUSE)
    primed.warm(segments)
    listed = [asdict(entry) for entry in primed.entries()]
    assert {label for entry in listed if entry["kind"] == "segment" for label in entry["labels"]} >= {("one", "s")}
    assert "lighthouse" not in str(listed) and len(listed) == len(primed.entries()) > 1
    assert primed.forget(source="s").num_entries == 1
    assert primed.forget(everything=True).num_entries > 0 and primed.entries() == []
    assert "lighthouse" not in str(primed.stats())
    assert logprobs(primed, REUSE) == pytest.approx(before, abs=1e-9)
    assert_idle(primed)


def test_a_text_that_is_the_primers_own_is_a_text_like_any_other(primed: LLM) -> None:
    for text in TEXT.split("\n\n"):
        segment = Segment(text, name="a text")
        assert outcomes(primed.warm([segment])[0]) == ["encoded"]
        assert primed.forget(name="a text").num_entries == 1
    assert_idle(primed)


def test_saved_entries_are_found_again_behind_the_same_primer(folder: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "store": f"disk://{tmp_path}?size=64MiB"}
    segment = Segment(passage(1), name="one")
    listed = []
    for text, num_files in ((TEXT, 1), (TEXT, 1), ("Another text.", 2), ("", 3)):
        with LLM(str(folder), primer=text, **settings) as made:
            made.warm([segment])
            made.flush()
            listed.append({entry.key for entry in saved.entries(tmp_path) if isinstance(entry, saved.SavedEntry)})
            assert made.keys([segment])[0][0] in listed[-1] and len(listed[-1]) == num_files
    assert listed[0] == listed[1] < listed[2] < listed[3]
    found = [asdict(entry) for entry in saved.verify(tmp_path) if isinstance(entry, saved.SavedEntry)]
    assert len(found) == 3 and "lighthouse" not in str(found)
    assert {entry["num_tokens"] for entry in found} == {found[0]["num_tokens"]}
    assert saved.forget(tmp_path, name="one").num_entries == 3


def test_comparing_follows_the_policy(primed: LLM, llm: LLM) -> None:
    found = [
        made.compare(asked(), policy=policy) for made, policy in ((primed, UNPRIMED), (llm, REUSE), (primed, REUSE))
    ]
    kl = [one.segments.kl for one in found]
    assert kl[0] == pytest.approx(kl[1], rel=1e-5) != pytest.approx(kl[2], rel=1e-3)
    assert found[0].full.text == found[2].full.text


@pytest.mark.skipif(not bundled().is_dir(), reason="the bundled model is not part of this copy")
def test_the_bundled_model_answers_behind_one() -> None:
    notes = "Norvale Instruments was founded in 1987 by Ingrid Solberg in a former boathouse in Brannhaven."
    prompt = Prompt(
        [Segment(notes), Segment("The town of Brannhaven has a harbour and two schools.")],
        "Who founded Norvale Instruments?",
    )
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(device="cpu", memory="512MiB", primer="The river Aro is 40 kilometres long.", max_context=2048) as llm:
        answer = llm.generate(prompt, greedy, policy=Policy(min_segment_tokens=0))
        plain = llm.generate(prompt, greedy, policy=Policy(reuse="none"))
    assert "Ingrid Solberg" in answer.text and "Ingrid Solberg" in plain.text
    assert answer.usage is not None and plain.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens and outcomes(answer.report) == ["encoded"] * 2


@pytest.mark.skipif(not bundled().is_dir(), reason="the bundled model is not part of this copy")
def test_of_a_checkpoints_own_primer_what_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody asked for it; one that was asked for is refused."""
    for max_context, num_passages, rungs in ((128, "no", [1]), (512, 1, [1, 76]), (4096, None, [1, 76, 214, 509])):
        caplog.clear()
        with LLM(memory="96MiB", device="cpu", threads=1, max_context=max_context) as llm:
            assert llm.generate(Prompt([Segment(" ".join(["word"] * 60))], "Which word?"), sampling()).token_ids
            warned = f"encoded behind {num_passages} passages of their primer at most: the primer has"
            assert (warned in caplog.text) is (num_passages is not None)
            assert llm.stats()["primer_rungs"] == rungs
            assert llm.stats()["primer_tokens"] == rungs[-1]

"""Where the segments of training rows lie, the engine on a model in training, and ``fit --reuse`` from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Vocabulary

from hypic import Policy, Prompt, Segment
from hypic.checkpoints import bundled
from hypic.config import EngineConfig
from hypic_apps.eval.driver import Subject
from hypic_apps.train import __main__ as command
from hypic_apps.train import checking, exam, families, fitting, loader
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.export import export
from hypic_apps.train.initial import initialise
from hypic_apps.train.model import Shape, Trainee
from hypic_apps.train.probe import segmented
from hypic_apps.train.render import Encoder, Row, Turn, Weights, conversation
from hypic_apps.train.rows import STAGES, Rows, joined, padded
from hypic_apps.train.schema import Schema
from hypic_apps.train.segments import LONGEST, Segmenting
from hypic_apps.train.vocabulary import save
from tests.apps.train.test_scores import archive

PLACES = ("the north", "a wide valley", "the hills by the sea")
PASSAGES = [
    f"Tolm{i} is a small town in {place}. Its capital is Tolmb. It is known for its green bridges. " * 2
    for i, place in enumerate(PLACES)
]
PASSAGES = [text.strip() for text in PASSAGES]


@pytest.fixture(scope="module")
def rows(corpus: Corpus, relations: Schema, encoder: Encoder) -> Rows:
    return Rows(corpus, relations, encoder)


def row_of(encoder: Encoder, passages: Sequence[str]) -> Row:
    turns = [Turn(passages, "Where is it?", "in the north"), Turn((), "And then?", "x")]
    return encoder.row(conversation(turns, Weights(), "Answer briefly."))


def test_spans_hold_the_passages_tokens(encoder: Encoder) -> None:
    row = row_of(encoder, PASSAGES)
    assert [row.ids[a:b].tolist() for a, b in row.spans] == encoder.texts(PASSAGES)


def test_spans_follow_what_is_cut_and_joined(encoder: Encoder) -> None:
    row = row_of(encoder, PASSAGES)
    (first, second, third), twice = row.spans, joined(row, row)
    assert [twice.ids[a:b].tolist() for a, b in twice.spans] == 2 * encoder.texts(PASSAGES)
    cut = padded(row, second[0] + 10)
    assert cut.spans == (first, (second[0], second[0] + 10)) and len(cut) == second[0] + 10
    late = padded(row, len(row), second[0])
    assert late.spans == ((0, second[1] - second[0]), (third[0] - second[0], third[1] - second[0]))
    assert padded(row, len(row) + 9).spans == row.spans


def test_spans_of_training_rows_are_passages(rows: Rows, encoder: Encoder) -> None:
    made = [rows.make(STAGES[3], Random(seed)) for seed in range(8)]
    assert sum(len(row.spans) for row in made) > 8
    for row in made:
        ends = [0, *(end for span in row.spans for end in span)]
        assert ends == sorted(ends) and ends[-1] <= len(row)
        for start, stop in row.spans:
            text = encoder.tokenizer.decode(row.ids[start:stop].tolist())
            is_cut = stop == len(row)  # then the text may end anywhere, and its last token be another
            assert text == (text.lstrip() if is_cut else text.strip())
            assert is_cut or encoder.texts([text])[0] == row.ids[start:stop].tolist()


def test_marks_tell_seams_and_interiors() -> None:
    row = Row(np.zeros(LONGEST + 200, np.int64), np.zeros(1, np.float32), ((3, 43), (45, 76), (80, 112)))
    marks = Segmenting().marks(row)
    expected = [0] * 3 + [-1] * 8 + [1] * 32 + [0] * 37 + [-2] * 8 + [2] * 24
    assert marks[:112].tolist() == expected and not marks[112:].any()
    narrow = Segmenting(Policy(seam=4, min_segment_tokens=0)).marks(row)
    assert narrow[45:76].tolist() == [-2] * 4 + [2] * 27
    assert not Segmenting().marks(replace(row, spans=((0, LONGEST + 1),))).any()
    assert Segmenting().marks(replace(row, spans=((0, LONGEST),)))[: LONGEST + 1].tolist() == [-1] * 8 + [1] * 504 + [0]


def test_a_share_of_rows_is_plain_and_rows_are_the_same(rows: Rows) -> None:
    ids, weights, marks = loader.batch(rows, STAGES[2], 24, 3, Segmenting(plain_share=0.5))
    same = loader.batch(rows, STAGES[2], 24, 3)
    assert len(same) == 2 and np.array_equal(ids, same[0]) and np.array_equal(weights, same[1])
    every = loader.batch(rows, STAGES[2], 24, 3, Segmenting(plain_share=0.0))[2]
    kept = marks.any(1)
    assert np.array_equal(marks[kept], every[kept]) and 4 < kept.sum() < every.any(1).sum()
    assert not loader.batch(rows, STAGES[2], 24, 3, Segmenting(plain_share=1.0))[2].any()
    with pytest.raises(ValueError, match="without segments is 1.5"):
        Segmenting(plain_share=1.5)


def test_made_up_rows_of_the_probe_are_marked_as_segments_are() -> None:
    spans = tuple((start, start + 96) for start in range(0, 392, 98))
    row = Row(np.zeros(392, np.int64), np.zeros(392, np.float32), spans)
    assert np.array_equal(segmented(torch.Size((2, 392)))[1].numpy(), Segmenting().marks(row))


SMALL = Shape(
    vocab_size=8192, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=8, full_attention_interval=2,
)  # fmt: skip


def test_the_engine_answers_as_training_computes(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainee = Trainee(SMALL)
    initialise(trainee, 3)
    export(trainee, bundled(), tmp_path, torch.float32)
    trainee = trainee.double()
    settings = {"device": "cpu", "dtype": "float64", "memory": "64MiB", "max_context": 1024, "max_running": 2}
    subject = Subject(str(tmp_path), EngineConfig.of(**settings))
    prompt = Prompt([Segment("Answer briefly.", kind="system"), *map(Segment, PASSAGES)], "Where is it?")
    reply = subject.ask([prompt], Policy(), 1)[0]
    assert [s.outcome for s in reply.report.segments if s.outcome != "live"] == ["encoded"] * len(PASSAGES)
    row = row_of(Encoder(Vocabulary.from_file(str(bundled() / "tokenizer.json"))), PASSAGES)
    flat = [i for piece in subject.pieces(prompt) for i in piece.ids]
    assert row.ids[: len(flat)].tolist() == flat
    even = padded(row, -(-len(row) // 64) * 64)
    tokens, marks = (torch.from_numpy(x)[None] for x in (even.ids, Segmenting().marks(even)))
    with torch.no_grad():
        mine, plain = (trainee.logits(tokens, m)[0, len(flat) - 1].log_softmax(-1) for m in (marks, None))
    assert float((mine - reply.logprobs[0]).abs().max()) < 1e-6  # log probabilities are kept in float32
    assert float((plain - reply.logprobs[0]).abs().max()) > 1e-4


def test_papers_are_answered_through_segments_too(corpus: Corpus, relations: Schema, encoder: Encoder) -> None:
    torch.set_num_threads(1)
    papers = exam.Papers(corpus, relations, encoder)
    paper = papers.paper(papers.worlds(4, "test", "1hop"), 3, 1)
    assert paper.marks is not None and bool((paper.marks > 0).any())
    trainee = Trainee(replace(SMALL, vocab_size=700))
    initialise(trainee, 3)
    seen = []
    logits = trainee.logits
    trainee.logits = lambda ids, marks=None: seen.append(marks) or logits(ids, marks)  # type: ignore
    found = exam.grades(trainee, {"one_hop": paper, "other": paper}, torch.device("cpu"), ("one_hop",))
    assert list(found) == ["one_hop", "other", "one_hop_segments"]
    assert seen[:2] == [None, None] and torch.equal(seen[2], paper.marks)
    with pytest.raises(ValueError, match="no marks"):
        exam.right(trainee, replace(paper, marks=None), torch.device("cpu"), through_segments=True)


@pytest.fixture
def folder(corpus: Corpus, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data, and an exported model of a shape that is small enough to be trained here."""
    shape = Shape(
        vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=1,
    )  # fmt: skip
    monkeypatch.setattr(fitting, "FAMILIES", {**families.FAMILIES, "gdn": lambda: shape})
    monkeypatch.setattr(fitting, "demo_items", lambda *_: [])
    papers = {"one_hop": ("worlds", 2, "test", "1hop"), "latest_notice": ("notices", 2)}
    monkeypatch.setattr(
        exam.Papers, "all", lambda self, n: {k: self.paper(getattr(self, f)(*a), n, 0) for k, (f, *a) in papers.items()}
    )
    archive(corpus, tmp_path / "corpus.tar.xz")
    save(encoder.tokenizer, tmp_path / "tokenizer", 2048)
    made = Trainee(shape)
    initialise(made, 3)
    export(made, tmp_path / "tokenizer", tmp_path / "begun")
    return tmp_path


def fit(folder: Path, *flags: str) -> int:
    fixed = "--plain --workers 1 --batch-tokens 4096 --exam-items 2 --total-minutes 0.05".split()
    places = ["--out", str(folder / "out"), "--state", str(folder / "state"), "--start", str(folder / "begun")]
    return command.main(["--data", str(folder), "fit", *places, *fixed, *flags])


def test_tuning_for_reuse_from_end_to_end(folder: Path) -> None:
    torch.set_num_threads(1)
    assert fit(folder, "--reuse", "--at", "0.1", "--minutes", "0.001") == 0
    report = json.loads((folder / "out" / "evaluation.json").read_text())
    assert (report["reuse"], report["seam"], report["plain_rows"], report["done"]) == (True, 8, 0.25, False)
    assert report["name"] == "hypic-tiny-reuse"
    assert {"one_hop", "one_hop_segments", "latest_notice_segments"} <= set(report["grades"])
    steps = report["step"]
    assert steps >= 4
    assert fit(folder, "--reuse", "--minutes", "0.001", "--plain-rows", "0") == 0
    again = json.loads((folder / "out" / "evaluation.json").read_text())
    assert again["step"] >= steps + 4 and again["plain_rows"] == 0.0
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["resumed"] for line in lines if line.get("event") == "start"] == [True, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reuse", "--family", "ring"], "with --family ring leave it out"),
        (["--plain-rows", "0.5"], "--plain-rows 0.5 says nothing without --reuse"),
        (["--reuse", "--plain-rows", "2"], "--plain-rows 2.0: the share"),
        (["--reuse"], "evaluation.json is missing.*with --at"),
        (["--family", "ring", "--at", "0.5"], "begun is of another model than the one in training"),
        (["--start", "nowhere", "--at", "0.5"], "nowhere holds no weights; name the folder of an exported model"),
        (["--batch-tokens", "2048"], "--batch-tokens 2048 holds no row of 4096 tokens"),
    ],
    ids=["ring", "without-reuse", "share", "unknown-share", "other-family", "no-start", "small-batches"],
)
def test_flags_that_do_not_fit_are_refused(folder: Path, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        fit(folder, *flags)


@pytest.mark.parametrize("saved", [[], ["--reuse"]], ids=["plain", "reuse"])
def test_a_state_is_gone_on_from_by_its_own_kind_of_training_alone(folder: Path, saved: list[str]) -> None:
    torch.set_num_threads(1)
    assert fit(folder, *saved, "--at", "0.1", "--minutes", "0.001") == 0
    other, told = ([], "with --reuse") if saved else (["--reuse"], "without --reuse")
    with pytest.raises(SystemExit, match=f"state.pt is of a training {told}; name another folder with --state"):
        fit(folder, *other)
    with pytest.raises(SystemExit, match="state.pt is of another model than the one in training"):
        fit(folder, "--family", "ring")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["fit", "--out", "o"], ".data/state"),
        (["--data", "d", "fit", "--out", "o"], "d/state"),
        (["--data", "d", "fit", "--out", "o", "--reuse"], "d/state-reuse"),
        (["--data", "d", "fit", "--out", "o", "--reuse", "--state", "s"], "s"),
    ],
)
def test_a_state_is_kept_with_the_data_unless_it_is_named(flags: list[str], expected: str) -> None:
    assert fitting.state_folder(command._parser().parse_args(flags)) == Path(expected)


def test_an_older_state_does_not_say_whether_it_was_tuned_for_reuse() -> None:
    checking.check_state(Path("state.pt"), {"model": {"a": torch.zeros(1)}}, {"a": torch.zeros(1)}, reuse=True)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("{", "evaluation.json cannot be read .*name a share of it with --at"),
        ('{"step": 3}', "evaluation.json does not say how far the training was; name a share"),
        ('{"step": 3, "trained_s": 99, "tokens": 5, "spoilt": 0}', "begun was over; say with --at where to begin"),
    ],
    ids=["broken", "silent", "over"],
)
def test_reports_that_do_not_say_where_to_go_on(folder: Path, report: str, message: str) -> None:
    (folder / "begun" / "evaluation.json").write_text(report)
    with pytest.raises(SystemExit, match=message):
        fit(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fit --total-minutes 0", "'0' is no number above 0"),
        ("fit --minutes inf", "'inf' is no number above 0"),
        ("fit --workers 0", "'0' is no whole number from 1 up"),
        ("fit --start x --at 1", "'1' is no share from 0 to below 1"),
        ("average --model x --other y --share 0", "'0' is no share between 0 and 1, such as 0.3"),
        ("fit --at 0.5", "--at 0.5 says nothing without --start"),
        ("probe --length 100", "'100' is no multiple of 64"),
        ("probe --batch-tokens 64 --length 128", "--batch-tokens 64 holds no row of 128 tokens"),
        ("probe --reuse --plain-rows 0.5", "the probe's rows are all alike; leave --plain-rows out"),
    ],
)
def test_numbers_that_cannot_be_right(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([*arguments.split(), "--out", str(tmp_path / "out")])
    assert message in (capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code))
    assert not (tmp_path / "out").exists()

"""Intervals of scores, and exam items that go through a file."""

from __future__ import annotations

import io
import json
import re
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hypic_apps.train import schema, smoke
from hypic_apps.train.__main__ import main
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.exam import Item, Papers
from hypic_apps.train.export import export
from hypic_apps.train.model import Shape, Trainee
from hypic_apps.train.render import Encoder
from hypic_apps.train.scores import share, wilson
from hypic_apps.train.vocabulary import save


def test_wilsons_interval() -> None:
    low, high = wilson(8, 10)  # worked by hand from the formula of 1927
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert wilson(0, 10)[0] == pytest.approx(0.0, abs=1e-12)
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_a_share_counts() -> None:
    found = share([True, False, True, True])
    assert (found["num_true"], found["num_items"], found["share"]) == (3, 4, 0.75)
    assert found["interval_95"][0] < 0.75 < found["interval_95"][1]


def test_items_come_back_from_a_file_and_depend_on_seed_and_place(
    corpus: Corpus, encoder: Encoder, tmp_path: Path
) -> None:
    papers = Papers(corpus, schema.load(), encoder)
    maker = papers.worlds(4, "test", "1hop")
    items = papers.items(maker, 5, 3)
    assert smoke.write(items, tmp_path / "items.json.xz") == (tmp_path / "items.json.xz").stat().st_size
    assert smoke.read(tmp_path / "items.json.xz") == items
    assert papers.items(maker, 2, 3) == items[:2]
    assert papers.items(maker, 2, 4) != items[:2]


def test_plain_items_hold_no_real_sentences(corpus: Corpus, encoder: Encoder) -> None:
    papers = Papers(corpus, schema.load(), encoder)
    papers.library.sentences = ("Rain fell on the hills all night.",)

    def with_real_text(items: list[Item]) -> int:
        return sum(sentence in text for i in items for text in i.passages for sentence in papers.library.sentences)

    assert with_real_text(papers.items(papers.worlds(4, "test", "1hop", plain=True), 12, 1)) == 0
    assert with_real_text(papers.items(papers.worlds(4, "test", "1hop"), 12, 1)) > 0


def archive(corpus: Corpus, path: Path) -> None:
    """The stand-in as ``corpus.build`` would write it."""
    with tarfile.open(path, "w:xz") as tar:
        for name, rows in asdict(corpus).items():
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            info = tarfile.TarInfo(f"{name}.jsonl")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def exported(corpus: Corpus, encoder: Encoder, tmp_path: Path) -> Path:
    """A folder with the stand-in's archive, and an untrained model in ``model``."""
    archive(corpus, tmp_path / "corpus.tar.xz")
    save(encoder.tokenizer, tmp_path / "tokenizer", 2048)
    shape = Shape(
        vocab_size=700, hidden_size=32, intermediate_size=48, num_hidden_layers=4, max_position_embeddings=2048
    )
    export(Trainee(shape), tmp_path / "tokenizer", tmp_path / "model")
    return tmp_path


def exam(folder: Path, *flags: str) -> int:
    model = ["--model", str(folder / "model"), "--items", "3", "--passages", "2", "--threads", "1"]
    return main(["--data", str(folder), "exam", *model, *flags])


def test_the_command_prints_scores_of_an_exported_model(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exam(exported, "--reuse-items", "2") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["num_items"], found["num_true"], found["passages"]) == (3, 0, 2), "an untrained model knows nothing"
    assert {way: part["num_items"] for way, part in found["reuse"].items()} == {"none": 2, "segments": 2, "same": 2}


def test_the_command_writes_items(exported: Path) -> None:
    assert exam(exported, "--smoke", str(exported / "items.json.xz")) == 0
    assert [len(item.passages) for item in smoke.read(exported / "items.json.xz")] == [2, 2, 2]


@pytest.mark.parametrize("name", ["lists", "documents", "two_hop_think", "rules"])
def test_longer_answers_are_examined_too(name: str, corpus: Corpus, encoder: Encoder) -> None:
    papers = Papers(corpus, schema.load(), encoder)
    makers = {"lists": papers.lists(5), "documents": papers.documents(2), "rules": papers.rules(6)}
    maker = makers.get(name) or papers.worlds(10, "test", "2hop_think")
    for item in papers.items(maker, 4, 1):
        text = " ".join(item.passages)
        if name == "lists":
            parts = [part.strip() for part in re.split(r"\(\d\)", item.answer) if part.strip()]
            assert len(parts) == 5 and all(text.startswith(p) for p, text in zip(parts, item.passages, strict=True))
        else:
            assert item.answer.split("\nAnswer: ")[-1].lower() in text.lower()

"""What the command line is tested with: a tiny random checkpoint, a few documents, a corpus with questions."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import add_tokenizer, qwen

# One thread and a small pool: the flags of every command that loads a model.
SMALL = ("--threads", "1", "--memory", "64MiB")
DOCUMENTS = {
    "leave.md": "# Leave\n\nEmployees receive 27 days of paid leave a year, and unused leave expires in March.",
    "travel.md": "# Travel\n\nThe company pays a travel allowance of 34 euros a day for employees on the road.",
    "notes/safety.txt": "The safety officer of the company is Jonas Weber, whom employees reach at extension 4417.",
}
QUESTIONS = [
    {"question": "How many days of leave do employees receive?", "expected": "27 days"},
    {"question": "Who is the safety officer of the company?", "expected": "Jonas Weber"},
]


def checkpoint(folder: Path) -> Path:
    """A random model with a byte-level tokenizer."""
    qwen(folder)
    add_tokenizer(folder)
    return folder


def documents(folder: Path) -> Path:
    """Three short documents, one of them in a folder of its own."""
    for name, text in DOCUMENTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def corpus(folder: Path) -> Path:
    """The documents with two questions about them."""
    documents(folder)
    (folder / "questions.json").write_text(json.dumps(QUESTIONS), encoding="utf-8")
    return folder

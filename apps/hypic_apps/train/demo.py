"""The demo's questions as items: the passage with the answer among fifteen others, at three places."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import torch

from hypic_apps.corpus import Question, articles, company, questions
from hypic_apps.train.exam import Papers, answer
from hypic_apps.train.model import Trainee


def passages() -> dict[str, list[str]]:
    """The corpus cut at headings, by document; each part keeps its heading."""
    found = {article.name: [article.text] for article in articles()}
    for document in company():
        parts = re.split(r"\n(?=## )", document.text.strip())
        found[document.name] = [part.strip() for part in parts if len(part.split()) > 12]
    return found


def context(question: Question, corpus: dict[str, list[str]], r: Random, number: int = 16) -> list[str]:
    """The part that holds the expected answer and shares most words with the question, among others."""
    asked = set(re.findall(r"\w+", question.question))
    own = [part for part in corpus[question.document] if question.expected in part]
    gold = max(own, key=lambda part: len(asked & set(re.findall(r"\w+", part))))
    others = [part for name in sorted(corpus) for part in corpus[name] if part != gold]
    chosen = [*r.sample(others, number - 1), gold]
    r.shuffle(chosen)
    return chosen


def demo_items(model: Trainee, papers: Papers, device: torch.device, tries: int = 3) -> list[dict[str, Any]]:
    """Every question's greedy answers in ``tries`` contexts, and how many are as expected."""
    corpus, out = passages(), []
    for number, question in enumerate(questions()):
        rows = [
            papers.row(context(question, corpus, Random(100 * number + i)), question.question, question.expected)
            for i in range(tries)
        ]
        given = [answer(model, papers.encoder, row, device) for row in rows]
        right = sum(text == question.expected for text in given)
        out.append({"question": question.question, "expected": question.expected, "answers": given, "right": right})
    return out

"""The demo corpus: sizes, licence notice, and that every expected answer stands in its document."""

from __future__ import annotations

import pytest

from hypic_apps.corpus import FOLDER, Question, articles, company, questions


def test_there_are_about_two_hundred_short_articles() -> None:
    found = articles()
    assert 190 <= len(found) <= 230
    assert len({article.name for article in found}) == len(found)
    assert all(80 < len(article.text) < 2500 for article in found)


def test_three_company_documents_of_the_agreed_length() -> None:
    assert [document.name for document in company()] == ["handbook.md", "minutes.md", "products.md"]
    assert all(300 <= len(document.text.split()) <= 800 for document in company())


@pytest.mark.parametrize("question", questions(), ids=lambda q: q.question)
def test_the_expected_answer_is_a_span_of_its_document(question: Question) -> None:
    texts = {document.name: document.text for document in [*articles(), *company()]}
    assert question.expected in texts[question.document]


def test_the_licence_of_the_articles_is_stated_beside_them() -> None:
    assert "CC BY-SA 4.0" in (FOLDER / "encyclopedia" / "ATTRIBUTION.md").read_text(encoding="utf-8")


def test_no_article_was_trained_on() -> None:
    from hypic_apps.train.corpus import held_out

    assert all(held_out(article.name) for article in articles())

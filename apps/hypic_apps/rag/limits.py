"""Sizes that keep one process responsive; every refusal names the limit it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Most that is taken: of one upload, of one document's text, of all documents, of a PDF, of a question."""

    file_bytes: int = 10 * 2**20
    document_chars: int = 1_000_000
    num_documents: int = 500
    total_chars: int = 20_000_000
    name_chars: int = 120
    pdf_pages: int = 500
    pdf_s: float = 30.0
    question_chars: int = 4_000
    num_conversations: int = 100

"""Uploaded bytes to text: UTF-8 text and Markdown as they stand, a PDF's text by pypdf. No layout, no pictures, no OCR.

A PDF may be made to take for ever: its pages are counted, and the time is looked at between pages.
"""

from __future__ import annotations

import io
import logging
import re
import time
from typing import TYPE_CHECKING

from hypic_apps.rag.errors import RagError, TooLarge
from hypic_apps.rag.limits import Limits

if TYPE_CHECKING:
    from pypdf import PdfReader

_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def text_of(name: str, data: bytes, limits: Limits) -> str:
    """The text of an uploaded file.

    Raises:
        RagError: it is empty, no UTF-8, a PDF that cannot be read or holds no text.
        TooLarge: it has more bytes, pages or characters than a document may have.
    """
    if len(data) > limits.file_bytes:
        raise TooLarge(f"{name} has {len(data):,} bytes and the limit is {limits.file_bytes:,}; split it.")
    text = _pdf_text(name, data, limits) if data.lstrip()[:5] == b"%PDF-" else _plain_text(name, data)
    return checked_text(name, text, limits)


def checked_text(name: str, text: str, limits: Limits) -> str:
    """The text, if a document can be made of it.

    Raises:
        RagError, TooLarge: it is empty, cannot be stored as UTF-8, or is too long.
    """
    if not text.strip():
        raise RagError(f"{name} holds no text; add a document that has some.")
    if len(text) > limits.document_chars:
        raise TooLarge(f"{name} has {len(text):,} characters and the limit is {limits.document_chars:,}; split it.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RagError(f"{name} holds half a character at {error.start}; paste its text again.") from error
    return text


def checked_name(name: str, limits: Limits) -> str:
    """A name without folders, control characters and doubled white space, cut to its greatest length.

    Raises:
        RagError: nothing is left of it.
    """
    leaf = re.split(r"[/\\]", name.strip())[-1]
    shown = " ".join(_CONTROLS.sub(" ", leaf).split())[: limits.name_chars].strip()
    if not shown:
        raise RagError("the document has no name; give it one.")
    return shown.encode("utf-8", "replace").decode("utf-8")


def _plain_text(name: str, data: bytes) -> str:
    if data.startswith(_UTF_16_MARKS):
        raise RagError(f"{name} is UTF-16 text, not UTF-8; save it as UTF-8 and add it again.")
    if (place := data.find(b"\x00")) >= 0:
        raise RagError(f"{name} is no text (a zero byte at {place}); add text, Markdown or a PDF.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise RagError(
            f"{name} is not UTF-8 (byte 0x{byte:02x} at {error.start}); save it as UTF-8 and add it again."
        ) from error


def _pdf_text(name: str, data: bytes, limits: Limits) -> str:
    try:
        import pypdf
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise RagError(f"{name} is a PDF, and pypdf is not installed; pip install 'hypic[apps]'.") from error
    # Its warnings about damaged files would fill the terminal; what cannot be read is told here.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        pages = _pages(name, reader, limits)
    # pypdf meets damaged files with these as well as with its own errors.
    except (PyPdfError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OSError,
            OverflowError, NotImplementedError, ZeroDivisionError, AssertionError, MemoryError) as error:  # fmt: skip
        if isinstance(error, RagError):
            raise
        raise RagError(f"{name} is a PDF that cannot be read ({type(error).__name__}); save it anew.") from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise RagError(f"{name} is a PDF without text, as scans are; run text recognition on it first.")
    return text


def _pages(name: str, reader: PdfReader, limits: Limits) -> list[str]:
    if reader.is_encrypted and not reader.decrypt(""):
        raise RagError(f"{name} is a PDF with a password; save it without one.")
    if len(reader.pages) > limits.pdf_pages:
        raise TooLarge(f"{name} has {len(reader.pages)} pages and the limit is {limits.pdf_pages}; split it.")
    started, texts, num_chars = time.monotonic(), [], 0
    for number, page in enumerate(reader.pages, start=1):
        texts.append(_tidy(page.extract_text()))
        num_chars += len(texts[-1])
        if time.monotonic() - started > limits.pdf_s:
            raise TooLarge(f"{name} took over {limits.pdf_s:.0f} s up to page {number}; split it, or paste its text.")
        if num_chars > limits.document_chars:
            raise TooLarge(f"{name} has over {limits.document_chars:,} characters up to page {number}; split it.")
    return texts


def _tidy(page: str) -> str:
    """A page's text without words divided at line ends and without what no UTF-8 can hold."""
    whole = re.sub(r"(?<=[a-z])-\n(?=[a-z])", "", page).encode("utf-8", "replace").decode("utf-8")
    return whole.replace("\x00", "").strip()

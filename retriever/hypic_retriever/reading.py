"""Text files in, text out: UTF-8 or a sentence that says what is wrong.

Text is given back as it stands in the file: line ends are kept, only a byte order mark goes.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from hypic_retriever.errors import DocumentError

_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_KNOWN_BINARY = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive or office document",
    b"\x89PNG": "a PNG image",
    b"\x1f\x8b": "gzip data",
}


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with or without byte order mark.

    Raises:
        DocumentError: the file is missing, unreadable, empty, binary or in another encoding.
    """
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DocumentError(
            f"{path} cannot be read ({reason}); give the path of a text file that you may read."
        ) from error
    text = _decode(data, path)
    if not text.strip():
        raise DocumentError(f"{path} holds no text; leave it out or give a file with text.")
    return text


def _decode(data: bytes, path: str | Path) -> str:
    for mark, name in {**_KNOWN_BINARY, **_OTHER_MARKS}.items():
        if data.startswith(mark):
            advice = f"convert it: iconv -f {name} -t UTF-8" if mark in _OTHER_MARKS else "convert it to text first"
            raise DocumentError(f"{path} is {name}, not UTF-8 text; {advice}.")
    if b"\x00" in data:
        raise DocumentError(f"{path} is binary (a zero byte at {data.index(0)}), not text; convert it to text first.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); "
            "convert it, for example: iconv -f WINDOWS-1252 -t UTF-8."
        ) from error

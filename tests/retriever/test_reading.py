"""Reading files: what is text comes back as it stands, what is not is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hypic_retriever import DocumentError, read_text


@pytest.mark.parametrize("text", ["plain", "line\r\nline\rline\n", "\u00e9\u6587\U0001f600", "ends with a space "])
def test_text_comes_back_unchanged(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_text(tmp_path / "a.txt") == text
    assert read_text(str(tmp_path / "mark.txt")) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("caf\u00e9".encode("latin-1"), r"is not UTF-8 \(byte 0xe9 at 3\); convert it"),
        ("caf\u00e9".encode("utf-16"), "is UTF-16, not UTF-8 text; convert it: iconv -f UTF-16 -t UTF-8"),
        ("caf\u00e9".encode("utf-32"), "is UTF-32, not UTF-8 text"),
        (b"MZ\x90\x00\x03", r"is binary \(a zero byte at 3\)"),
        (b"%PDF-1.7 ...", "is a PDF, not UTF-8 text; convert it to text first"),
        (b"PK\x03\x04....", "is a zip archive or office document"),
        (b"", "holds no text; leave it out"),
        (b"\xef\xbb\xbf \r\n\t", "holds no text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "odd.txt"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=reason) as caught:
        read_text(path)
    assert str(path) in str(caught.value) and isinstance(caught.value, ValueError)


def test_missing_files_folders_and_impossible_names_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path, "a\0b"):
        with pytest.raises(DocumentError, match=r"cannot be read \(.+\); give the path of a text file"):
            read_text(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(DocumentError, match="Permission denied"):
        read_text(path)

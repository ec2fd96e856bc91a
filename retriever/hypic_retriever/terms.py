"""From text to the terms that BM25 counts.

Case, width, accents and invisible characters are folded; a possessive ``'s`` goes; English plurals
lose their ending by the three rules of D. Harman's S stemmer ("How effective is suffixing?", JASIS
42, 1991). A hyphenated word gives its parts and the joined form (``e-mail``: ``e``, ``mail``,
``email``), a number keeps its decimals and loses its thousands separators. Scripts written without
spaces give overlapping pairs of characters. There is no list of stop words: BM25 weighs them down.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache

# Han, kana, Thai, Lao, Myanmar, Khmer, and the Han planes: no spaces between words.
_UNSPACED = (
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u0e01-\u0e4e\u0e81-\u0ecd\u1000-\u109d\u1780-\u17d3"
)
_INVISIBLE = dict.fromkeys([0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF])
_ACCENTS = re.compile("[\u0300-\u036f]+")
_SPLIT = re.compile("['\u2019\u02bc\uff07]|[-\u2010\u2011]")
_HYPHEN = re.compile("[-\u2010\u2011]")
_POSSESSIVE = re.compile("['\u2019\u02bc\uff07]s?$")


_UNSPACED_RUN = re.compile(f"[{_UNSPACED}]")
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)+"
_NUMBERS = re.compile(_NUMBER)
_ASCII = re.compile(f"{_NUMBER}|[a-z0-9]++(?:['\\-][a-z0-9]++)*")


def terms(text: str) -> list[str]:
    """The terms of ``text`` in order, with repetitions."""
    if text.isascii():
        return [term for piece in _ASCII.findall(text.lower()) for term in _piece_terms(piece)]
    return [term for piece in _pattern().findall(_fold(text)) for term in _piece_terms(piece)]


@cache
def _pattern() -> re.Pattern[str]:
    # Python's \w leaves out combining marks, which are part of words in Indic scripts.
    marks = "".join(
        chr(i) for i in range(0x300, min(sys.maxunicode, 0x20000)) if unicodedata.category(chr(i)) in ("Mn", "Mc")
    )
    # The two kinds of letters have none in common, so a run of them is read in one way only.
    letters = f"(?:[^\\W_{_UNSPACED}]++|[{marks}]++)++"
    word = f"{letters}(?:['\u2019\u02bc\uff07\\-\u2010\u2011]{letters})*"
    return re.compile(f"{_NUMBER}|[{_UNSPACED}]+|{word}")


def _fold(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.translate(_INVISIBLE)).casefold()
    return unicodedata.normalize("NFC", _ACCENTS.sub("", decomposed))


@lru_cache(maxsize=2**16)
def _piece_terms(piece: str) -> tuple[str, ...]:
    """The terms of a number, a run without spaces or a word; words come again and again."""
    if _NUMBERS.fullmatch(piece):
        return (piece.replace(",", ""),)
    if _UNSPACED_RUN.match(piece):
        return tuple(piece[i : i + 2] for i in range(len(piece) - 1)) or (piece,)
    return tuple(_word_terms(piece))


def _word_terms(word: str) -> Iterator[str]:
    if word.isalnum():
        yield _singular(word)
        return
    word = _POSSESSIVE.sub("", word)
    parts = [part for part in _SPLIT.split(word) if part]
    yield from map(_singular, parts)
    joined = _HYPHEN.sub("", word)
    if joined != word and joined.isalnum() and not joined.isdigit():
        yield _singular(joined)


def _singular(word: str) -> str:
    if len(word) < 4 or word[-1] != "s" or not word.isascii():
        return word
    if word.endswith("ies") and not word.endswith(("aies", "eies")):
        return word[:-3] + "y"
    if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    return word if word.endswith(("us", "ss")) else word[:-1]

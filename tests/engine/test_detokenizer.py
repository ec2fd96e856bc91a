"""Text that streams out is the text of all ids, cut at the first stop string, for every kind of decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.engine.detokenizer import Detokenizer
from hypic.engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import save_bytelevel, save_sentencepiece, save_unigram

Decode = Callable[[Sequence[int]], str]
# Ids that spell every kind of character: one to four bytes, whole and broken.
BYTES = st.one_of(
    st.text(alphabet="ab \n<é€😀\ufffd", max_size=24).map(str.encode),
    st.binary(max_size=24),
    st.lists(st.sampled_from([b"\xe2\x82", b"\xe2", b"\x82\xac", b"\xf0\x9f", b"\x98\x80", b"a", b" "])).map(b"".join),
)


def decode_bytes(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def decode_words(ids: Sequence[int]) -> str:
    """Like a word decoder that tidies up: no space at the start, none behind a line break."""
    words = [" a", " bc", "\n", " ", "  ", "d", "\n ", "é"]
    return "".join(words[i % len(words)] for i in ids).replace("\n ", "\n").removeprefix(" ")


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """The pushed pieces and the last one; ids behind a stop string are not pushed, as in an engine."""
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()]


def cut(text: str, stop: Sequence[str]) -> str:
    """What stands before the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(BYTES, st.lists(st.text(alphabet="ab \né€", min_size=1, max_size=3), max_size=3))
def test_bytes(data: bytes, stop: list[str]) -> None:
    assert "".join(stream(Detokenizer(decode_bytes, stop), data)) == cut(decode_bytes(data), stop)


STOPS = st.lists(st.text(alphabet="abc \n", min_size=1, max_size=4), max_size=2)


@given(st.lists(st.integers(0, 7), max_size=120), STOPS)
def test_a_decoder_that_strips_and_tidies(ids: list[int], stop: list[str]) -> None:
    assert "".join(stream(Detokenizer(decode_words, stop), ids)) == cut(decode_words(ids), stop)


@pytest.fixture(scope="module", params=[save_bytelevel, save_sentencepiece, save_unigram])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(request.param(tmp_path_factory.mktemp("tokenizer")))


def of(tokenizer: Tokenizer, stop: Sequence[str] = ()) -> Detokenizer:
    return Detokenizer(tokenizer.decode, stop, byte_ids=tokenizer.byte_ids, skipped_ids=tokenizer.special_ids)


@given(data=st.data())
def test_random_ids_of_real_tokenizers(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=80))
    stop = data.draw(st.lists(st.text(alphabet="abTh e", min_size=1, max_size=3), max_size=2))
    assert "".join(stream(of(tokenizer, stop), ids)) == cut(tokenizer.decode(ids), stop)


@given(st.lists(st.sampled_from([" ", "\n", "the ", "co", "é", "😀", "  "]), max_size=60).map("".join))
def test_text_of_real_tokenizers(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert "".join(stream(of(tokenizer), ids)) == tokenizer.decode(ids)


@pytest.mark.soak
@settings(max_examples=20_000, derandomize=False)
@given(data=st.data())
def test_many_random_ids_of_real_tokenizers(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=300))
    stop = data.draw(st.lists(st.text(alphabet="abTh e\né", min_size=1, max_size=4), max_size=3))
    assert "".join(stream(of(tokenizer, stop), ids)) == cut(tokenizer.decode(ids), stop)


def test_a_character_waits_for_its_last_byte() -> None:
    assert stream(Detokenizer(decode_bytes), "a€b".encode()) == ["a", "", "", "€", "b", ""]


def test_what_may_begin_a_stop_string_waits() -> None:
    detokenizer = Detokenizer(decode_bytes, ["<end>"])
    assert stream(detokenizer, b"a<e<end>b") == ["a", "", "", "<e", "", "", "", "", ""]
    assert detokenizer.stopped
    assert stream(detokenizer, b"more") == ["", ""]


def test_an_unfinished_stop_string_is_given_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode_bytes, ["<end>"])
    assert stream(detokenizer, b"a<en") == ["a", "", "", "", "<en"]
    assert not detokenizer.stopped


def test_a_stop_string_may_be_complete_only_at_the_end() -> None:
    detokenizer = Detokenizer(decode_bytes, ["\ufffd"])
    assert stream(detokenizer, b"a\xe2") == ["a", "", ""]
    assert detokenizer.stopped


def test_the_stop_string_that_is_complete_first_counts() -> None:
    for ids in ([b"abc"], [b"a", b"b", b"c"], [b"ab", b"c"]):
        detokenizer = Detokenizer(lambda ids: b"".join(ids).decode(), ["abcd", "bc", "c"])  # type: ignore[arg-type]
        assert "".join(stream(detokenizer, ids)) == "a"  # type: ignore[arg-type]


def test_byte_fallback_needs_to_know_its_bytes(tmp_path: Path) -> None:
    """Bites: without the byte ids a character made of three comes out wrong."""
    tokenizer = Tokenizer(save_sentencepiece(tmp_path))
    ids = [tokenizer._control.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert "".join(stream(of(tokenizer), ids)) == tokenizer.decode(ids)
    assert "".join(stream(Detokenizer(tokenizer.decode), ids)) != tokenizer.decode(ids)


def num_decoded(ids: Sequence[int], decode: Decode) -> int:
    """How many ids are decoded in all while ``ids`` stream through."""
    counted = 0

    def counting(window: Sequence[int]) -> str:
        nonlocal counted
        counted += len(window)
        return decode(window)

    stream(Detokenizer(counting, ["never"]), ids)
    return counted


@pytest.mark.parametrize("text", ["the company ", "\n", " ", "é", "😀", "\ufffd"])
def test_work_grows_with_the_number_of_ids(text: str) -> None:
    data = (text.encode() * 4000)[:4000]
    assert num_decoded(data, decode_bytes) < 60 * len(data)
    assert num_decoded([0xE2] * 4000, decode_bytes) < 60 * 4000
    assert num_decoded([2] * 4000, decode_words) < 60 * 4000


def test_a_long_answer_is_quick(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_bytelevel(tmp_path))
    ids = tokenizer.encode_text("The company was founded by Ada. 😀\n" * 300)
    started = time.perf_counter()
    stream(of(tokenizer, ["never"]), ids)
    assert (time.perf_counter() - started) / len(ids) < 1e-3

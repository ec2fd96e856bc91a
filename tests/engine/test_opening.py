"""Seams that follow a segment's opening: where lines and sentences end, how wide that makes a seam, and that what is
cached behind it is exact, against the float64 reference, which is told by hand how wide each is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic.engine.opening import BEYOND, SHORT, ends_of, width
from hypic.engine.plan import make
from hypic.engine.segment import Identity
from hypic.engine.tokenizer import Tokenizer
from hypic.engine.vocabulary import SETTINGS_FILE, seam_opening
from hypic.errors import CheckpointError, ConfigError
from hypic.policy import FARTHEST
from hypic.types import Policy, Segment
from tests.engine.expected import TOLERANCE, Checkpoints, relative
from tests.engine.harness import Bench
from tests.engine.prompts import POLICY, live, seg
from tests.engine.tiny_tokenizers import save_bytelevel, save_sentencepiece, save_unigram
from tests.reference import Live, Result, SegmentLink

Make = Callable[..., Bench]
EXACT = TOLERANCE["float64"]
WORDS = st.sampled_from(["Norway", "is", "a", "country", "3.5", "e.g", "Oslo", "#", "-"])
BETWEEN = st.sampled_from([" ", ". ", "! ", "\n", ".\n\n", "  \n ", '." ', "\r\n"])
TEXTS = st.lists(st.tuples(WORDS, BETWEEN), max_size=30).map(lambda parts: "".join(map("".join, parts)))


def letters(text: str) -> list[tuple[int, int]]:
    """Every character is a token."""
    return [(n, n + 1) for n in range(len(text))]


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ("# Norway\n\nA country. It lies north.", ["# Norway\n\n", "# Norway\n\nA country."]),
        ("Norway: a country. It has 3.5 million.", ["Norway: a country."]),
        ('He said "Go." Then! Yes?\nNo', ['He said "Go."', 'He said "Go." Then!', 'He said "Go." Then! Yes?\n']),
        ("One line", []),
        ("One sentence.", []),
        ("川。", []),
        ("A list:\n- one\n- two", ["A list:\n", "A list:\n- one\n"]),
        ("東京は首都です。人口は多い。川", ["東京は首都です。", "東京は首都です。人口は多い。"]),
        ("Title \r\n\r\n text", ["Title \r\n\r\n"]),
        ("", []),
    ],
)  # fmt: skip
def test_where_lines_and_sentences_end(text: str, heads: list[str]) -> None:
    assert ends_of(text, letters(text)) == tuple(map(len, heads))


def test_only_the_head_of_a_text_is_looked_at() -> None:
    text = "A b. " * 1000
    found = ends_of(text, letters(text))
    assert found == tuple(range(4, FARTHEST + 1, 5)) and ends_of("a" * FARTHEST + ". b", letters(text)) == ()


@pytest.mark.parametrize(
    ("ends", "most", "expected"),
    [
        ((), 24, 0),
        ((5,), 24, 5 + BEYOND),
        ((5, 20), 24, 20 + BEYOND),
        ((5, 5 + SHORT + 1), 24, 5 + BEYOND),
        ((SHORT + 1,), 24, 0),
        ((SHORT,), SHORT, SHORT + BEYOND),
        ((SHORT,), SHORT - 1, 0),
        ((3, 9, 15, 30), 24, 15 + BEYOND),
        ((3, 9), 0, 0),
    ],
)
def test_how_far_an_opening_goes(ends: tuple[int, ...], most: int, expected: int) -> None:
    assert width(ends, most) == expected


@pytest.mark.parametrize("save", [save_bytelevel, save_sentencepiece, save_unigram])
def test_ends_are_counted_in_a_texts_own_tokens(save: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path))

    @given(text=TEXTS)
    def check(text: str) -> None:
        piece = tokenizer.segment_piece(Segment(text))
        assert piece.ids == tuple(tokenizer.encode_text(text.strip())) and piece.place is None
        assert list(piece.ends) == sorted(set(piece.ends)) and all(0 < end <= len(piece.ids) for end in piece.ends)
        for end in piece.ends:
            head = tokenizer.decode(piece.ids[:end])
            assert head.rstrip('" \r').endswith((".", "!", "\n")) or save is save_unigram, head
        assert tokenizer.segment_piece(Segment(text)).ends == piece.ends, "remembered with its ids"
        if len(text) < FARTHEST and save is not save_unigram:
            assert bool(piece.ends) == bool(ends_of(text.strip(), letters(text.strip())))

    check()


def test_live_text_has_no_opening(tmp_path: Path) -> None:
    from hypic import Prompt

    tokenizer = Tokenizer(save_bytelevel(tmp_path))
    pieces = tokenizer.encode(Prompt([Segment("# Oslo\n\nOslo lies north.")], "# Where?\n\nSay it. Now."))
    assert [bool(piece.ends) for piece in pieces] == [piece.segment is not None for piece in pieces]


# -- plans -----------------------------------------------------------------------------------------------------------

IDENTITY = Identity("f" * 64, "torch.float32")
THERE = replace(IDENTITY, seam_opening=24)


def seams(policy: Policy, identity: Identity = THERE, **labels: int) -> list[int]:
    """Of four segments: without an opening, with one inside of the policy's seam, behind it, and too long a one."""
    pieces = [replace(seg(40, n, **labels), ends=ends) for n, ends in enumerate(((), (3,), (5, 17), (20,)))]
    planned = make([live(3, 9), *pieces, live(3, 8)], policy, identity)
    starts = [span.seam for span in planned.interiors]
    assert [one.seam for one in planned.segments] == starts
    return starts


def test_whose_word_counts() -> None:
    """A segment's own width first, then the policy's, then the checkpoint's."""
    assert seams(POLICY) == [8, 8, 19, 8] and seams(POLICY, IDENTITY) == [8, 8, 8, 8]
    assert seams(POLICY.with_(seam_opening=0)) == [8, 8, 8, 8]
    assert seams(POLICY.with_(seam_opening=24), IDENTITY) == [8, 8, 19, 8]
    assert seams(POLICY.with_(seam_opening=5)) == [8, 8, 8, 8] and seams(POLICY.with_(seam=4)) == [4, 5, 19, 4]
    assert seams(POLICY.with_(seam=30)) == [30] * 4 and seams(POLICY, seam=6) == [6] * 4
    assert seams(POLICY.with_(seam_share=0.25)) == [10, 10, 19, 10]


def test_a_segment_that_its_opening_covers_is_run_live() -> None:
    short = replace(seg(19, 1), ends=(5, 17))
    (found,) = make([short, live(3, 8)], POLICY, THERE).segments
    assert not found.keys and found.reason == "too short: 19 tokens, cached from 20"
    assert make([short, live(3, 8)], POLICY, IDENTITY).segments[0].keys


@pytest.mark.parametrize("most", [-1, 1.5, True, "24", FARTHEST + 1])
def test_what_a_policy_refuses(most: object) -> None:
    with pytest.raises(ConfigError, match="seam_opening is "):
        Policy(seam_opening=most)  # type: ignore[arg-type]


# -- what is computed ------------------------------------------------------------------------------------------------

PROMPT = [live(4, 1), replace(seg(40, 2), ends=(5, 17)), seg(33, 3), replace(seg(30, 4), ends=(11,)), live(6, 5)]
WIDTHS = (19, 8, 13)


def expected(checkpoints: Checkpoints, name: str, widths: tuple[int, ...]) -> Result:
    left = iter(widths)
    chain = [SegmentLink(one.ids, next(left)) if one.segment else Live(one.ids) for one in PROMPT]
    return checkpoints.reference(name).evaluate(chain)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", ["qwen", "minimax-partial"])
def test_seams_are_as_wide_as_openings(name: str, dtype: str, bench: Make, checkpoints: Checkpoints) -> None:
    engine, wanted = bench(name, dtype), expected(checkpoints, name, WIDTHS)
    for outcome in ("encoded", "hit"):
        answer = engine.ask(PROMPT, POLICY.with_(seam_opening=24))
        assert answer.error_to(wanted) < TOLERANCE[dtype] and set(answer.outcomes) == {outcome}
    engine.assert_back_to_start()


@pytest.mark.parametrize("number", range(len(WIDTHS)))
@pytest.mark.parametrize("name", ["qwen", "minimax-partial"])
def test_seams_are_as_wide_as_openings_bites(name: str, number: int, bench: Make, checkpoints: Checkpoints) -> None:
    """One seam is a token narrower."""
    answer = bench(name).ask(PROMPT, POLICY.with_(seam_opening=24))
    widths = tuple(one - (n == number) for n, one in enumerate(WIDTHS))
    other = expected(checkpoints, name, widths)
    shared = [(n, at) for n, at in enumerate(other.positions.tolist()) if at in answer.logits]
    assert len(shared) == len(answer.logits) - 1, "it runs that token, which the control does not"
    found = relative(answer.rows([at for _, at in shared]), other.logits[[n for n, _ in shared]])
    assert found > 100 * EXACT


# -- a checkpoint's own ----------------------------------------------------------------------------------------------


def test_a_checkpoint_says_how_far(tmp_path: Path) -> None:
    assert seam_opening(tmp_path) == 0
    (tmp_path / SETTINGS_FILE).write_text('{"seam_opening": 24}')
    assert seam_opening(tmp_path) == 24


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "hypic.json' cannot be read"),
        ("24", "hypic.json' holds a int; it must hold an object"),
        ('{"seam": 8}', "hypic.json' holds 'seam'; the one setting that it may hold is 'seam_opening'"),
        ('{"seam_opening": 65}', "hypic.json' cannot be used: seam_opening is 65; it must be at most 64"),
        ('{"seam_opening": null}', "hypic.json' cannot be used: seam_opening is None"),
        ('{"seam_opening": true}', "hypic.json' cannot be used: seam_opening is True"),
    ],
)
def test_what_it_may_not_say(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        seam_opening(tmp_path)

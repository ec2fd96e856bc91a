"""Training rows: right length, right weights, the engine's rules of tokenising."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from hypic_apps.train.corpus import Corpus
from hypic_apps.train.render import Encoder, Piece, Turn, Weights, conversation
from hypic_apps.train.rows import LONG_ANSWERS, STAGES, Rows, Stage, padded, stage_at, unanswered
from hypic_apps.train.schema import Schema
from hypic_apps.train.world import NOT_STATED, World


@pytest.fixture(scope="module")
def rows(corpus: Corpus, relations: Schema, encoder: Encoder) -> Rows:
    return Rows(corpus, relations, encoder)


# Of most kinds of rows some are asked about the order of passages, or for all facts.
MOST = {1.0, *(LONG_ANSWERS[kind].start for kind in ("order_sentence", "order_list", "facts"))}
# A list is what such a row is for; where it is long, it may be cut off behind the questions on order.
LISTED_FIRST = {LONG_ANSWERS[kind].start for kind in ("keyfacts", "order_list")}
PAIRS = [(stage, kind) for stage in STAGES for kind in stage.kinds]


@pytest.mark.parametrize(("stage", "kind"), PAIRS, ids=lambda x: x if isinstance(x, str) else str(x.num_tokens))
def test_rows_are_full_and_have_something_to_learn(rows: Rows, stage: Stage, kind: str) -> None:
    only = Stage(stage.until, stage.num_tokens, stage.passages, stage.most_facts, stage.weights, {kind: 1.0})
    row = rows.make(only, Random(5))
    assert row.ids.shape == row.weights.shape == (stage.num_tokens,)
    lists, text = kind == "lists", kind == "text"
    most = LISTED_FIRST if lists else {stage.weights.text} if text else MOST
    assert row.weights.max() in {np.float32(weight) for weight in most}
    assert row.ids.max() < rows.encoder.tokenizer.get_vocab_size()


def test_the_same_seed_gives_the_same_row(rows: Rows) -> None:
    first, again, other = (rows.make(STAGES[2], Random(seed)) for seed in (4, 4, 5))
    assert np.array_equal(first.ids, again.ids) and np.array_equal(first.weights, again.weights)
    assert not np.array_equal(first.ids, other.ids)


def test_a_conversation_is_encoded_piece_by_piece(encoder: Encoder) -> None:
    turns = [Turn(["First one.", "Second one."], "Who?", "Ann"), Turn([], "When?", "1874")]
    row = encoder.row(conversation(turns, Weights(passage=0.25, question=0.5), "Be short."))
    end, system, user, assistant = (encoder.special(f"<|{x}|>") for x in ("end", "system", "user", "assistant"))
    parts = encoder.texts(["Be short.", "First one.", "\n\n", "Second one.", "\n\nWho?", "Ann", "When?", "1874"])
    expected = [
        system,
        *parts[0],
        end,
        user,
        *parts[1],
        *parts[2],
        *parts[3],
        *parts[4],
        end,
        assistant,
        *parts[5],
        end,
    ]
    expected += [user, *parts[6], end, assistant, *parts[7], end]
    assert row.ids.tolist() == expected
    answers = len(parts[5]) + len(parts[7]) + 2
    assert int((row.weights == 1.0).sum()) == answers
    assert row.weights[-1] == 1.0 and row.weights[0] == 0.0


def test_a_bare_row_begins_at_its_first_passage(encoder: Encoder) -> None:
    row = encoder.row(conversation([Turn(["First one."], "Who?", "Ann")], Weights(), "Be short.", bare=True))
    first = encoder.texts(["First one."])[0]
    assert row.ids[: len(first)].tolist() == first


def test_repeated_spans_can_be_copied(rows: Rows) -> None:
    row = rows._repeated(STAGES[0], Random(1))
    for place in np.flatnonzero(row.weights):
        pair = row.ids[place - 1 : place + 1]
        earlier = np.lib.stride_tricks.sliding_window_view(row.ids[:place], 2)
        assert (earlier == pair).all(1).any()


def test_padding_has_no_weight(encoder: Encoder) -> None:
    row = padded(encoder.row([Piece("short", 1.0)]), 20)
    assert len(row) == 20 and row.weights[-1] == 0


def test_stages_follow_the_clock() -> None:
    assert [stage_at(share) for share in (0.0, STAGES[0].until, 0.999, 1.5)] == [0, 1, len(STAGES) - 1, len(STAGES) - 1]
    lengths = [stage.num_tokens for stage in STAGES]
    assert lengths == sorted(lengths) and STAGES[0].passages[0] <= 2 and STAGES[-1].passages[1] >= 16


def test_lists_are_of_the_passages_that_are_shown(rows: Rows, encoder: Encoder) -> None:
    only = Stage(1.0, 2048, (4, 20), 5, Weights(), {"lists": 1.0})
    for seed in range(6):
        text = encoder.tokenizer.decode(rows.make(only, Random(seed)).ids.tolist(), skip_special_tokens=False)
        answers = [part.split("<|end|>")[0].strip() for part in text.split("<|assistant|>")[1:]]
        lists = [answer for answer in answers if answer.startswith("(1)")]
        assert lists and max(map(len, lists)) > 60


def test_questions_of_passages_left_out_are_not_stated(rows: Rows) -> None:
    kinds = set()
    for seed in range(30):
        world = World(rows.names, rows.schema, "train", Random(seed), inventor=rows.inventor)
        passages = world.passages(8, 4)
        kept, left_out = passages[:5], [a for p in passages[5:] for a in p.asks]
        told = {(f.subject, f.relation.key) for p in kept for f in p.facts}
        for ask in unanswered(left_out, kept, Random(seed)):
            source = next(a for a in left_out if a.question == ask.question)
            kinds.add(ask.answer)
            assert source.kind == "1hop" and source.about[0].subject in ask.question
            assert not any((f.subject, f.relation.key) in told for f in source.about)
        assert unanswered([], kept, Random(seed)) == []
    assert kinds == {NOT_STATED}


def test_texts_that_are_known_are_not_encoded_again(encoder: Encoder) -> None:
    pieces = [Piece("One text.", 1.0), Piece("|", 0.0), Piece("One text.", 0.5)]
    plain, told = encoder.row(pieces), encoder.row(pieces, {"One text.": encoder.texts(["One text."])[0]})
    assert plain.ids.tolist() == told.ids.tolist() and plain.weights.tolist() == told.weights.tolist()
    assert encoder.row(pieces, {"|": [7]}).ids.tolist() != plain.ids.tolist()

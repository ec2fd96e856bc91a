"""What precedes every token is the same whether links are taken two numbers each or walked token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.engine import conv_arrays as under_test
from hypic.engine.chain import Chain, FoldInto, InteriorLink, RowLink
from hypic.engine.conv_arrays import conv_arrays
from hypic.engine.conv_plan import Tails

NONE = np.empty(0, dtype=np.int64)
FOLD = st.none() | st.builds(FoldInto, st.integers(20, 24), st.just(1), st.integers(0, 9))


def row(num_tokens: int, snapshot: int | None, fold: FoldInto | None) -> RowLink:
    return RowLink([0] * num_tokens, 0, NONE, snapshot, fold)


ROWS = st.builds(row, st.integers(4, 9), st.none() | st.integers(30, 34), FOLD)
INTERIORS = st.builds(InteriorLink, st.integers(18, 26), st.just(1), st.integers(4, 40), st.just(0))
LINKS = st.builds(lambda links, last: [*links, last], st.lists(ROWS | INTERIORS, max_size=5), ROWS)
CHAINS = st.builds(Chain, LINKS, st.just(NONE), st.integers(0, 2), st.integers(1, 9))


@settings(max_examples=60)
@given(chains=st.lists(CHAINS, min_size=1, max_size=4), width=st.integers(2, 5))
def test_two_numbers_say_what_a_walk_finds(chains: list[Chain], width: int) -> None:
    num_tokens = sum(chain.num_tokens for chain in chains)
    found = conv_arrays(chains, width, num_tokens)
    expected = under_test._token_by_token(Tails(chains, width, num_tokens), num_tokens)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_only_what_is_shorter_than_the_window_is_walked(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []

    def walking(*args: Any) -> Tails:
        walked.append(args)
        return Tails(*args)

    monkeypatch.setattr(under_test, "Tails", walking)
    chain = Chain([row(8, None, None), InteriorLink(20, 1, num_tokens, 0), row(9, None, None)], NONE, 0, 1)
    conv_arrays([chain], 4, chain.num_tokens)
    assert len(walked) == (num_tokens < 3)

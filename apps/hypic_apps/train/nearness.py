"""Which words belong together: the common nouns and verbs of the dictionary, out of published word vectors.

The vectors are GloVe's (Pennington, Socher, Manning 2014), of 100 numbers, learned from which words stand near which,
without their mean and first two components (Mu, Viswanath 2018, arXiv 1702.01417), which say how frequent a word is.
``build`` keeps of them what training needs: a small table of words, each with its nearest ones and a vector in steps
of 1/64, from which cosines are right to 0.02, mostly to 0.005. A verb has the vector of its past ("founded"), since
its plain form is often a noun's too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np
import numpy.typing as npt

from hypic_apps.train import thesaurus
from hypic_apps.train.thesaurus import WORD
from hypic_apps.train.words import is_regular, past

Floats = npt.NDArray[np.float32]
# How many nouns and verbs the table has, how many neighbours a word has at most (of its own part of speech, and of the
# other), how near they must be, and how many of the file's words, the most frequent first, are looked at.
MOST_NOUNS, MOST_VERBS, LIKE, UNLIKE, LEAST_COSINE, MOST_READ = 9_500, 2_500, 8, 4, 0.5, 50_000
VECTOR = re.compile(rb'"([a-z]{3,14})":\[([-+0-9.eE, ]+)\]')
DIMENSIONS, STEPS, ZERO, MOST = 100, 64, 63, 28
BLOCK, ENOUGH, COMPONENTS = 1_024, 1_000, 2
# Kinds of concrete things (WordNet's animals, bodies, food, plants, quantities, substances): near are others of the
# kind, which are not the same ("crab", "lobster").
CONCRETE = frozenset(("05", "08", "13", "20", "23", "27"))
# Words for relatives and friends are near all that has to do with families, and never mean it ("wedding", "daughter").
KIN = frozenset(
    "wife husband daughter son mother father sister brother niece nephew aunt uncle cousin grandmother grandfather "
    "grandson granddaughter grandchild stepmother stepfather stepson stepdaughter stepbrother stepsister widow widower "
    "child parent grandparent twin bride groom fiance fiancee girlfriend boyfriend spouse sibling baby friend boy girl "
    "heir orphan mistress lover descendant ancestor family relative mom dad mum".split()
)


@dataclass(frozen=True)
class Near:
    """A word, n or v, the places in the table of the words nearest to it, and its vector, a letter a number."""

    word: str
    pos: str
    nearest: tuple[int, ...]
    vector: str


def read(rows: Sequence[Mapping[str, object]]) -> tuple[Near, ...]:
    """The table of an archive's rows, as ``build`` made them."""
    return tuple(Near(**{**row, "nearest": tuple(row["nearest"])}) for row in rows)  # type: ignore[arg-type]


def matrix(table: Sequence[Near]) -> Floats:
    """The vectors of the table, of length 1: [words, 100]."""
    letters = np.frombuffer("".join(entry.vector for entry in table).encode(), np.uint8).reshape(len(table), -1)
    return _unit(letters.astype(np.float32) - ZERO)


def build(content: bytes, files: Mapping[str, str], names: frozenset[str]) -> Iterator[dict[str, object]]:
    """Rows of the table out of the vectors' file, most frequent words first, and WordNet's files; without ``names``.

    Raises:
        ValueError: the file has no vectors of the expected form.
    """
    known = vectors(content)
    if not known:
        raise ValueError('the file of word vectors has no entry like "word":[0.1,...]; fetch the pinned version anew.')
    sets = thesaurus.read_sets(files)
    words = _chosen(sets, known, names)
    table = centred(np.array([known[past(word) if pos == "v" else word] for word, pos in words], np.float32))
    for (word, pos), near, vector in zip(words, _nearest(words, table, sets), table, strict=True):
        yield {"word": word, "pos": pos, "nearest": near, "vector": _letters(vector)}


def vectors(content: bytes, most: int = MOST_READ) -> dict[str, Floats]:
    """The first ``most`` plain words of the file with their vectors, which it holds as ``"word":[...]``."""
    out: dict[str, Floats] = {}
    for found in VECTOR.finditer(content):
        if len(out) == most:
            break
        out[found[1].decode()] = np.array(found[2].split(b",")[:DIMENSIONS], np.float32)
    return out


def centred(rows: Floats) -> Floats:
    """Vectors of length 1 without what most of them share: their mean and, of a thousand or more, two components."""
    rows = _unit(rows)
    rows = rows - rows.mean(0)
    if len(rows) >= ENOUGH:
        _, axes = np.linalg.eigh(rows.T @ rows)
        rows = rows - rows @ axes[:, -COMPONENTS:] @ axes[:, -COMPONENTS:].T
    return _unit(rows)


def is_form(word: str, other: str) -> bool:
    """Whether one word is made from the other, or both from a third: their beginnings are mostly the same, or one ends
    with the other ("founder", "founding"; "own", "owner"; "remarry", "marry")."""
    short, long = (word, other) if len(word) <= len(other) else (other, word)
    is_end = len(short) >= 4 and long.endswith(short)
    if is_end or word[:3] != other[:3]:
        return is_end
    same = len(commonprefix((short, long)))
    if same == len(short) and len(long) - same <= 3:
        return True
    return same >= 4 and same >= 0.6 * len(long)


def _chosen(sets: thesaurus.Sets, known: Mapping[str, Floats], names: frozenset[str]) -> list[tuple[str, str]]:
    """The words of the table with their part of speech, the most frequent nouns and then verbs."""
    rank = {word: place for place, word in enumerate(known)}
    fit = [place for place in sets.senses if WORD.fullmatch(place[0]) and place[0] not in names]
    nouns = sorted((w for w, pos in fit if pos == "n" and w in rank and _is_noun(sets, w)), key=rank.__getitem__)
    verbs = [w for w, pos in fit if pos == "v" and is_regular(w) and past(w) in rank and any(sets.counts(w, "v"))]
    verbs.sort(key=lambda word: rank[past(word)])
    return [(w, "n") for w in nouns[:MOST_NOUNS]] + [(w, "v") for w in verbs[:MOST_VERBS]]


def _is_noun(sets: thesaurus.Sets, word: str) -> bool:
    """Whether the word is mostly a noun, in the singular, and no name."""
    times = sum(sets.counts(word, "n"))
    elsewhere = [sum(sets.counts(word, pos)) for pos in "var" if (word, pos) in sets.senses]
    is_plural = any((word.removesuffix(end) + tail, "n") in sets.senses for end, tail in _PLURALS if word.endswith(end))
    is_name = word not in sets.words["n", sets.senses[word, "n"][0]]
    return times >= sum(elsewhere) and (times > 0 or not elsewhere) and not is_plural and not is_name


_PLURALS = (("s", ""), ("es", ""), ("ies", "y"))


def _nearest(words: Sequence[tuple[str, str]], table: Floats, sets: thesaurus.Sets) -> Iterator[list[int]]:
    """For every word the places of those that may stand for it, the nearest of its own part of speech first."""
    kinds = np.array([pos == "v" for _, pos in words])
    kin = [_Kin.of(sets, word, pos) for word, pos in words]
    for start in range(0, len(words), BLOCK):
        cosines = table[start : start + BLOCK] @ table.T
        for place, row in enumerate(cosines, start):
            out: list[int] = []
            for wanted, most in ((kinds == kinds[place], LIKE), (~(kinds == kinds[place]), UNLIKE)):
                near = np.flatnonzero((row >= LEAST_COSINE) & wanted)
                near = near[np.argsort(-row[near], kind="stable")]
                out += _first((int(i) for i in near if kin[place].may_be(kin[i])), most)
            yield out


def _first(found: Iterable[int], most: int) -> list[int]:
    return [place for _, place in zip(range(most), found, strict=False)]


@dataclass(frozen=True)
class _Kin:
    """What WordNet says of a word's first sense: its kind, what it falls under, and its opposites."""

    word: str
    kind: str
    wider: frozenset[tuple[str, str]]
    opposites: frozenset[str]

    @classmethod
    def of(cls, sets: thesaurus.Sets, word: str, pos: str) -> _Kin:
        senses = sets.senses[word, pos]
        opposites = {
            other
            for sense in senses
            for mark, target, part, _ in sets.pointers[pos, sense]
            if mark == "!"
            for other in sets.words[part, target]
        }
        first = sets.pointers[pos, senses[0]]
        wider = frozenset((part, target) for mark, target, part, _ in first if mark == "@" and pos == "n")
        return cls(word, sets.kinds[pos, senses[0]] if pos == "n" else "", wider, frozenset(opposites))

    def may_be(self, other: _Kin) -> bool:
        """Whether a question may say the other word for this one: it is no form of it, no opposite, no sibling."""
        if is_form(self.word, other.word) or other.word in self.opposites or self.word in other.opposites:
            return False
        if other.word in KIN or (self.kind in CONCRETE and other.kind in CONCRETE):
            return False
        return self.wider.isdisjoint(other.wider)


def _letters(vector: Floats) -> str:
    steps = np.clip(np.rint(vector * STEPS), -MOST, MOST).astype(int)
    return "".join(chr(ZERO + step) for step in steps)


def _unit(rows: Floats) -> Floats:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9), np.float32)

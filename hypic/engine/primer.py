"""The text behind which segments are encoded: read and run once when an engine starts, kept as a snapshot.

A segment that is encoded with nothing before it begins as all texts do that a model was trained on: its first tokens
have nothing to attend to but each other, and states that are all zero. In a prompt they stand behind thousands of
others. A fixed text before every segment makes the one more like the other, for all that is generic in it; what a
segment would have read in the very prompt it still lacks. It is the shared prefix of APE (arXiv 2502.05431), and does
for recurrent states what anchor blocks (Star Attention, arXiv 2411.17116) do for keys. It stands in no prompt: what is
kept of a segment is its own tokens' effect, ``(T, B)`` of its interior and K/V, computed with the primer in view.

A model that numbers what it reads takes a segment for the one behind the primer's passages, wherever it stands. So a
primer may have *rungs*, heads of it that end at marks: by default each segment is encoded behind the one with about as
many passages as there are segments before it, under ``Policy(rungs=False)`` all of them behind the middle one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hypic.config import EngineConfig
from hypic.engine.chain import ZERO_SLOT, Chain, RowLink
from hypic.engine.free_memory import attempted
from hypic.engine.pool import Pool
from hypic.engine.runner import Runner
from hypic.engine.segment import CachedSegment, Primer
from hypic.engine.sizing import Need, reserve
from hypic.engine.tokenizer import Tokenizer
from hypic.engine.vocabulary import seam_opening
from hypic.engine.weights import PRIMER_FILE
from hypic.errors import CheckpointError, ConfigError, PromptError
from hypic.types import Prompt, Segment

logger = logging.getLogger("hypic")
# Between two passages of a primer, and any text in the place of the segment behind it.
BETWEEN, NEXT = re.compile(r"\n[ \t]*\n"), "next"
# A paragraph that ends a rung.
MARK = "---"
# No primer is longer than this share of the context: segments need room behind it.
MOST = 0.25
# It is run in pieces of so many tokens, even where a step holds fewer, so that entries that outlive a setting have its
# bits: a deterministic request that finds one on disk answers as it would have made it.
PIECE_TOKENS = 512


def text_of(folder: Path, config: EngineConfig) -> str:
    """The settings' primer, or else the checkpoint's own, without white space at its ends; empty: there is none.
    Lines end as they may, and a byte order mark is no text: the same primer is the same from wherever it comes.

    Raises:
        CheckpointError: the checkpoint's file is not UTF-8 text.
    """
    if config.primer is not None:
        return _plain(config.primer)
    path = folder / PRIMER_FILE
    try:
        return _plain(path.read_text(encoding="utf-8")) if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as text ({error}); mend it, or pass primer=''.") from error


def _plain(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").strip()


def passages_of(text: str) -> dict[int, tuple[str, ...]]:
    """The passages of each rung, by their number: a paragraph each, up to every mark and to the end; none at all where
    there is neither passage nor mark."""
    passages, ends = list[str](), set[int]()
    for paragraph in map(str.strip, BETWEEN.split(text)):
        if paragraph == MARK:
            ends.add(len(passages))
        elif paragraph:
            passages.append(paragraph)
    return {number: tuple(passages[:number]) for number in sorted({*ends, len(passages)})} if passages or ends else {}


def ids_of(folder: Path, config: EngineConfig) -> dict[int, tuple[int, ...]]:
    """The token ids of each rung by its number of passages, shortest first: those of a prompt's head, the chat
    template's scaffolding if there is one, each paragraph of the primer as a passage, glue; none if there is no primer.
    A template that tells the date is left out: what is kept would not be found on the next day.

    Raises:
        CheckpointError: the checkpoint's own primer is no text.
        ConfigError: it cannot be encoded.
    """
    rungs = passages_of(text_of(folder, config))
    if not rungs:
        return {}
    tokenizer = Tokenizer(folder)
    try:
        return {number: _head(tokenizer, passages) for number, passages in rungs.items()}
    except PromptError as error:
        why = str(error).rstrip(".")
        raise ConfigError(f"the primer cannot be read: {why}; or pass primer='' for none.") from error


def _head(tokenizer: Tokenizer, passages: Sequence[str]) -> tuple[int, ...]:
    """The tokens before the segment that would follow these passages."""
    segments = [Segment(passage) for passage in (*passages, NEXT)]
    pieces = tokenizer.encode(Prompt(segments, NEXT, template=tokenizer.has_timeless_template))
    last = max(number for number, piece in enumerate(pieces) if piece.segment is not None)
    return tuple(id for piece in pieces[:last] for id in piece.ids)


def load(folder: Path, config: EngineConfig) -> Runner:
    """A checkpoint on its device, which encodes segments as it says itself: behind its primer if it has one, with seams
    that follow openings as far as its ``hypic.json`` says. Of a primer of the checkpoint's own the rungs that do not
    fit the settings are left out, with a warning.

    Raises:
        UnsupportedModel, CheckpointError: the checkpoint is refused, incomplete or unreadable.
        ConfigError: the device, the memory budget or the primer cannot be right.
    """
    # First of all: what cannot be read is said before gigabytes are.
    rungs, most = ids_of(folder, config), seam_opening(folder)
    runner = Runner.load(folder, config)
    runner = replace(runner, identity=replace(runner.identity, seam_opening=most))
    if config.primer is None:  # nobody asked for it
        rungs = _fitting(runner, rungs)
    return primed(runner, rungs)


def _fitting(runner: Runner, rungs: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The shortest rungs, as many as fit."""
    kept, why = dict(rungs), ""
    while kept and (lack := _lack(runner, kept)):
        why = why or lack
        kept.popitem()
    if why:
        number = max(kept, default=0)
        left = f"behind {number or 'no'} passages of their primer at most" if kept else "with nothing before them"
        logger.warning("segments are encoded %s: %s", left, why)
    return kept


def primed(runner: Runner, rungs: Mapping[int, tuple[int, ...]]) -> Runner:
    """A runner that encodes segments behind ``rungs``, token ids by number of passages: they are run here, and what
    they leave is kept for good.

    Raises:
        ConfigError: the primer is too long for the context or for the memory, or cannot be run.
    """
    if not rungs:
        return replace(runner, identity=replace(runner.identity, primers=()), primers=())
    why = _lack(runner, rungs)
    if why:
        raise ConfigError(f"{why}; pass a shorter one, raise max_context= or memory=, or pass primer='' for none.")
    kept = [_kept(runner.pool, ids) for ids in rungs.values() if ids]
    for one in kept:
        _run(runner, one)
    primers = tuple(Primer(ids, runner.max_context - len(ids), number) for number, ids in rungs.items())
    return replace(runner, identity=replace(runner.identity, primers=primers), primers=tuple(kept))


def _kept(pool: Pool, ids: tuple[int, ...]) -> CachedSegment:
    """Where a primer's state and K/V will be."""
    pages, state = pool.keep(len(ids))
    num_bytes = len(pages) * pool.page_bytes + pool.layout.state_bytes
    return CachedSegment(b"", ids, pool.slots_of(pages, len(ids)), tuple(pages), state, None, num_bytes)


def _run(runner: Runner, kept: CachedSegment) -> None:
    """Fill it, piece by piece.

    Raises:
        ConfigError: what the model gives is not finite, as all segments behind it would be; or the device has no
            memory for a step beside the pool.
    """
    ids, slots, state = kept.ids, kept.kv_slots, kept.state_slot
    for start in range(0, len(ids), PIECE_TOKENS):
        stop = min(len(ids), start + PIECE_TOKENS)
        row = RowLink(ids[start:stop], start, slots[start:stop])
        chain = Chain([row], slots[:stop], state if start else ZERO_SLOT, state)
        result = attempted(partial(runner.run, [chain]), runner.pool.device, "the primer")
        if result is None:
            raise ConfigError(
                f"{runner.pool.device} ran out of memory for the primer: the pool holds "
                f"{runner.pool.num_bytes // 2**20:,} MiB; lower memory= to leave room, or pass primer='' for none."
            )
        if result.broken:
            raise ConfigError(
                "the model produced NaN or infinity for the primer; check the checkpoint, pass dtype='float32', "
                "or primer='' for none."
            )


def _lack(runner: Runner, rungs: Mapping[int, tuple[int, ...]]) -> str:
    """Why a primer cannot stand beside the longest prompt and the encode of one segment; empty if it can."""
    pool, most, lengths = runner.pool, int(MOST * runner.max_context), [len(ids) for ids in rungs.values()]
    if max(lengths) > most:
        return f"the primer has {max(lengths)} tokens, and of a context of {runner.max_context} it may take {most}"
    own = Need(sum(pool.pages_for(length) for length in lengths), len([length for length in lengths if length]))
    need, have = reserve(pool.page_size, runner.max_context, 1) + own, pool.capacity
    if pool.could_hold(need):
        return ""
    return (
        f"the primer's {_counted(lengths)} do not fit beside one prompt: {need.pages} pages and {need.states} states "
        f"are needed and memory= holds {have.pages} and {have.states}"
    )


def _counted(lengths: Sequence[int]) -> str:
    """Tokens of a primer in words: each rung is run and kept for itself."""
    return f"{sum(lengths)} tokens" if len(lengths) == 1 else f"{len(lengths)} rungs of {sum(lengths)} tokens in all"

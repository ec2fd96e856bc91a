"""The text behind which segments are encoded: read and run once when an engine starts, kept as a snapshot.

A segment that is encoded with nothing before it begins as all texts do that a model was trained on: its first tokens
have nothing to attend to but each other, and states that are all zero. In a prompt they stand behind thousands of
others. A fixed text before every segment makes the one more like the other, for all that is generic in it; what a
segment would have read in the very prompt it still lacks. It is the shared prefix of APE (arXiv 2502.05431), and does
for recurrent states what anchor blocks (Star Attention, arXiv 2411.17116) do for keys. It stands in no prompt: what is
kept of a segment is its own tokens' effect, ``(T, B)`` of its interior and K/V, computed with the primer in view.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypic.config import EngineConfig
from hypic.engine.chain import ZERO_SLOT, Chain, RowLink
from hypic.engine.runner import Runner
from hypic.engine.segment import CachedSegment, Primer
from hypic.engine.shares import step_tokens
from hypic.engine.sizing import Need
from hypic.engine.tokenizer import Tokenizer
from hypic.errors import CheckpointError, ConfigError
from hypic.types import Prompt, Segment

FILE = "primer.txt"
# Between two passages of a primer, and any text in the place of the segment behind it.
BETWEEN, NEXT = "\n\n", "next"
# No primer is longer than this share of the context: segments need room behind it.
MOST = 0.25


def load(folder: Path, config: EngineConfig) -> Runner:
    """A checkpoint folder on its device, with the primer that the settings say.

    Raises:
        UnsupportedModel, CheckpointError, ConfigError: as ``Runner.load``, ``ids_of`` and ``primed``.
    """
    runner = Runner.load(folder, config)
    return primed(runner, ids_of(folder, config), step_tokens(config, runner.pool.device))


def text_of(folder: Path, config: EngineConfig) -> str:
    """The settings' primer, or else the checkpoint's own, without white space at its ends; empty: there is none.

    Raises:
        CheckpointError: the checkpoint's file is not UTF-8 text.
    """
    if config.primer is not None:
        return config.primer.strip()
    path = folder / FILE
    try:
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as text ({error}); mend it, or pass primer=''.") from error


def ids_of(folder: Path, config: EngineConfig) -> tuple[int, ...]:
    """The token ids of a prompt's head: the chat template's scaffolding, each paragraph of the primer as a passage,
    glue; none if there is no primer."""
    text = text_of(folder, config)
    if not text:
        return ()
    passages = [Segment(passage) for passage in text.split(BETWEEN)]
    pieces = Tokenizer(folder).encode(Prompt([*passages, Segment(NEXT)], NEXT))
    last = max(number for number, piece in enumerate(pieces) if piece.segment is not None)
    return tuple(id for piece in pieces[:last] for id in piece.ids)


def primed(runner: Runner, ids: tuple[int, ...], max_step_tokens: int) -> Runner:
    """A runner that encodes segments behind ``ids``: they are run here, and what they leave is kept for good.

    Raises:
        ConfigError: the primer is too long for the context or for the memory.
    """
    if not ids:
        return runner
    pool, most = runner.pool, int(MOST * runner.max_context)
    if len(ids) > most:
        raise ConfigError(
            f"the primer has {len(ids)} tokens, and of a context of {runner.max_context} it may take {most}; "
            "pass a shorter one, or primer='' for none."
        )
    _demand_room(runner, len(ids))
    pages, state = pool.keep(len(ids))
    slots = pool.slots_of(pages, len(ids))
    for start in range(0, len(ids), max_step_tokens):
        stop = min(len(ids), start + max_step_tokens)
        row = RowLink(ids[start:stop], start, slots[start:stop])
        runner.run([Chain([row], slots[:stop], state if start else ZERO_SLOT, state)])
    identity = replace(runner.identity, primer=Primer(ids, runner.max_context - len(ids)))
    kept = CachedSegment(b"", ids, slots, tuple(pages), state, None, len(pages) * pool.page_bytes)
    return replace(runner, identity=identity, primer=kept)


def _demand_room(runner: Runner, num_tokens: int) -> None:
    """Room for the primer and, beside it, for the longest prompt and the encode of one segment.

    Raises:
        ConfigError: there is none.
    """
    pool = runner.pool
    need = Need(pool.pages_for(num_tokens) + pool.pages_for(runner.max_context), 4, 1)
    if not pool.could_hold(need):
        have = pool.capacity
        raise ConfigError(
            f"the primer's {num_tokens} tokens do not fit beside one prompt: {need.pages} pages and {need.states} "
            f"states are needed and memory= holds {have.pages} and {have.states}; raise memory= or pass primer=''."
        )

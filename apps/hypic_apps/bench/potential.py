"""``hypic bench potential``: what prefix reuse and segment reuse could save at best on a trace, by size of cache.

No model is needed. A prompt is a list of parts (content parts, messages). *Prefix* reuse finds the longest head that
was seen before, in blocks; *segment* reuse finds every part that was seen before, at any place, and what prefix reuse
would find of the rest. Both caches evict the least recently used. Sizes are tokens: a quarter of the letters, or
counted by a checkpoint's tokenizer. The ceiling knows no cost of loading and no seam.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypic_apps.bench import traces
from hypic_apps.bench.geometries import geometry
from hypic_apps.bench.options import add_output, numbers, shown
from hypic_apps.bench.records import about, table
from hypic_apps.cli.parser import Parser, Subparsers, add_command, positive

SUMMARY = "the ceiling of reuse on a trace, without any model"
EXAMPLES = """
hypic bench potential trace.jsonl
hypic bench potential trace.jsonl --cache-tokens 100000,1000000 --json
"""
DETAILS = """TRACE holds one OpenAI request body a line, with arrival_s. Parts of messages
are what segment reuse can find again."""
HEADS = ("cache tokens", "share of all", "prefix reuse", "segment reuse", "tokens run: prefix / segments")
BLOCK_TOKENS = 16
LETTERS_OF_A_TOKEN = 4


@dataclass
class Cache:
    """Least recently used keys with a size each, up to ``capacity``."""

    capacity: int
    _sizes: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _held: int = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def use(self, key: bytes, size: int) -> None:
        """Keep a key as the youngest; what is larger than the whole cache is not kept."""
        if size > self.capacity:
            return
        if key not in self._sizes:
            self._held += size
        self._sizes[key] = size
        self._sizes.move_to_end(key)
        while self._held > self.capacity:
            self._held -= self._sizes.popitem(last=False)[1]


@dataclass(frozen=True)
class Part:
    """A part's content as a key, its size in tokens, and the keys of its blocks."""

    key: bytes
    num_tokens: int
    blocks: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True)
class Ceiling:
    """Tokens of all prompts, and those that need not be run, at one size of cache."""

    cache_tokens: int
    num_tokens: int
    prefix_tokens: int
    segment_tokens: int


def add(commands: Subparsers[Parser]) -> None:
    """Adds the command."""
    parser = add_command(commands, "potential", "TRACE", SUMMARY, EXAMPLES, DETAILS)
    parser.add_argument("trace", metavar="TRACE", help="JSON lines")
    parser.add_argument("--cache-tokens", type=numbers, metavar="N,N",
                        help="sizes of cache (default: shares of what the trace holds)")  # fmt: skip
    parser.add_argument("--min-tokens", type=positive, default=32, metavar="N",
                        help="shorter parts are never segments (default: 32)")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="NAME", help="count tokens with this checkpoint's tokenizer")
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Counts and prints.

    Raises:
        InputError: the trace cannot be read.
    """
    count = _counter(args.tokenizer)
    prompts = [[part(text, count) for text in traces.parts(one.body)] for one in traces.read(Path(args.trace))]
    unique = {p.key: p.num_tokens for prompt in prompts for p in prompt}
    whole = sum(unique.values())
    sizes = args.cache_tokens or [max(1, whole // share) for share in (64, 16, 4, 2, 1)]
    records = [
        {"cache_tokens": size, "share_of_all": size / whole, **_record(ceiling(prompts, size, args.min_tokens))}
        for size in sizes
    ]
    found = {**about("ceiling of reuse by size of cache"), "requests": len(prompts), "unique_tokens": whole,
             "records": records}  # fmt: skip
    return shown(args, found, text)


def ceiling(prompts: Sequence[Sequence[Part]], cache_tokens: int, min_tokens: int) -> Ceiling:
    """Plays all prompts in order through both caches."""
    prefixes, entries, heads = (Cache(cache_tokens) for _ in range(3))
    total = by_prefix = by_segment = 0
    for prompt in prompts:
        total += sum(p.num_tokens for p in prompt)
        by_prefix += _prefix(prefixes, [block for p in prompt for block in p.blocks])
        by_segment += _segments(entries, heads, prompt, min_tokens)
    return Ceiling(cache_tokens, total, by_prefix, by_segment)


def _prefix(cache: Cache, blocks: Iterable[tuple[bytes, int]]) -> int:
    """Tokens of the longest head in the cache; all blocks are kept under the running hash of what is before them."""
    digest, found, is_head = hashlib.sha256(), 0, True
    for key, size in blocks:
        digest.update(key)
        running = digest.digest()
        is_head = is_head and running in cache
        found += size if is_head else 0
        cache.use(running, size)
    return found


def _segments(entries: Cache, heads: Cache, prompt: Sequence[Part], min_tokens: int) -> int:
    """Tokens of parts that are in the cache, at any place; live parts count while all before them was found."""
    found, is_head, digest = 0, True, hashlib.sha256()
    for p in prompt:
        digest.update(p.key)
        if p.num_tokens >= min_tokens:
            hit = p.key in entries
            entries.use(p.key, p.num_tokens)
        else:
            hit = is_head and digest.digest() in heads
            heads.use(digest.digest(), p.num_tokens)
        is_head = is_head and hit
        found += p.num_tokens if hit else 0
    return found


def part(text: str, count: Callable[[str], int]) -> Part:
    """A text in blocks of about ``BLOCK_TOKENS``."""
    width = BLOCK_TOKENS * LETTERS_OF_A_TOKEN
    pieces = [text[start : start + width] for start in range(0, len(text), width)]
    num_tokens = count(text)
    sizes = [num_tokens * (n + 1) // len(pieces) - num_tokens * n // len(pieces) for n in range(len(pieces))]
    blocks = [(hashlib.sha256(piece.encode()).digest(), size) for piece, size in zip(pieces, sizes, strict=True)]
    return Part(hashlib.sha256(text.encode()).digest(), num_tokens, tuple(blocks))


def _counter(name: str | None) -> Callable[[str], int]:
    if name is None:
        return lambda text: max(1, round(len(text) / LETTERS_OF_A_TOKEN))
    from hypic.engine.tokenizer import Tokenizer

    with geometry(name).placed() as folder:
        tokenizer = Tokenizer(folder)
    return lambda text: len(tokenizer.encode_text(text))


def _record(found: Ceiling) -> dict[str, Any]:
    return {
        "num_tokens": found.num_tokens,
        "prefix_share": found.prefix_tokens / found.num_tokens,
        "segment_share": found.segment_tokens / found.num_tokens,
        "run_ratio": (found.num_tokens - found.prefix_tokens) / max(1, found.num_tokens - found.segment_tokens),
    }


def text(result: dict[str, Any]) -> str:
    rows = [
        (f"{r['cache_tokens']:,}", f"{r['share_of_all']:.0%}", f"{r['prefix_share']:.1%}", f"{r['segment_share']:.1%}",
         f"{r['run_ratio']:.2f}")
        for r in result["records"]
    ]  # fmt: skip
    heads = table(HEADS, rows)
    return f"{heads}\n\n{result['requests']} requests, {result['unique_tokens']:,} different tokens"

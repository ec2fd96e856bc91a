"""Traces: who asks what, when. Made from a seed, or read from JSONL of OpenAI bodies with an ``arrival_s`` each.

``rag`` draws distinct documents by Zipf's law, in any order; lengths are lognormal; arrivals are bursty (gamma, twice
the deviation of a Poisson process). The other kinds are adverse: ``unique`` never repeats a document, ``turns`` has
conversations and no documents, ``ordered`` asks the same documents in the same order, and ``thrash`` draws evenly, to
be run with a store that holds a tenth of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from hypic.engine.plan import Piece
from hypic.engine.tokenizer import Tokenizer
from hypic.types import Segment
from hypic_apps.bench.prompts import Ids
from hypic_apps.cli.errors import InputError

KINDS = ("rag", "unique", "turns", "ordered", "thrash")
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city community name president team minute idea body back"
).split()
BURSTINESS = 2.0  # standard deviation of the time between arrivals over its mean
TURNS_OF_A_CONVERSATION = 6


@dataclass(frozen=True)
class Spec:
    """What a trace is made of; tokens are ids, or words where it is written as text."""

    kind: str = "rag"
    num_requests: int = 200
    num_documents: int = 2000
    mean_tokens: int = 512
    documents_each: int = 24
    zipf: float = 1.0
    spread: float = 0.6
    question_tokens: int = 32
    output_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Ask:
    """One request: numbers of documents in order, or a conversation's ``turn``; at a mean of one request a second."""

    arrival_s: float
    documents: tuple[int, ...]
    question: int
    conversation: int = -1
    turn: int = 0


@dataclass(frozen=True)
class Trace:
    """Requests by arrival, and the length of every document."""

    spec: Spec
    lengths: Mapping[int, int]
    asks: tuple[Ask, ...]

    def pieces(self, ask: Ask, vocab_size: int, document: Callable[[int], Ids]) -> list[Piece]:
        """The prompt as token ids; ``document`` gives a document's ids."""
        spec = self.spec
        if ask.conversation >= 0:
            turns = [self._ids("turn", (ask.conversation, turn), spec.mean_tokens, vocab_size)
                     for turn in range(ask.turn + 1)]  # fmt: skip
            return [Piece(ids, None, ends_message=True) for ids in turns]
        segments = [Piece(document(number), Segment("")) for number in ask.documents]
        return [*segments, Piece(self._ids("question", ask.question, spec.question_tokens, vocab_size))]

    def document(self, number: int, vocab_size: int) -> Ids:
        return self._ids("document", number, self.lengths[number], vocab_size)

    def body(self, ask: Ask) -> dict[str, Any]:
        """The prompt as the body of an OpenAI chat completion; every document is a content part."""
        spec = self.spec
        common = {"max_tokens": spec.output_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
                  "stream_options": {"include_usage": True}}  # fmt: skip
        if ask.conversation >= 0:
            texts = [self._text("turn", (ask.conversation, turn), spec.mean_tokens) for turn in range(ask.turn + 1)]
            roles = ["user", "assistant"] * len(texts)
            # The last turn is the user's, so an answer stands behind every one before it.
            messages = [{"role": role, "content": text}
                        for role, text in zip(roles, _with_answers(texts), strict=False)]  # fmt: skip
            return {"messages": messages, **common}
        texts = [self._text("document", number, self.lengths[number]) for number in ask.documents]
        parts = [*texts, self._text("question", ask.question, spec.question_tokens)]
        content = [{"type": "text", "text": text} for text in parts]
        return {"messages": [{"role": "user", "content": content}], **common}

    def _ids(self, what: str, which: object, count: int, vocab_size: int) -> Ids:
        draw = random.Random(f"{self.spec.seed}|{what}|{which}")
        return tuple(draw.choices(range(vocab_size), k=count))

    def _text(self, what: str, which: object, count: int) -> str:
        draw = random.Random(f"{self.spec.seed}|{what}|{which}")
        return " ".join(draw.choices(WORDS, k=count))


def _with_answers(texts: Sequence[str]) -> list[str]:
    return [part for text in texts[:-1] for part in (text, f"You said: {text[:40]}")] + [texts[-1]]


def make(spec: Spec) -> Trace:
    """A trace, the same for the same specification.

    Raises:
        InputError: a request asks for more documents than there are.
    """
    if spec.documents_each > spec.num_documents and spec.kind != "unique":
        raise InputError(f"{spec.documents_each} documents a request are more than there are, {spec.num_documents}.")
    draw = random.Random(f"{spec.seed}|{spec}")
    shape = BURSTINESS**-2
    gaps = (draw.gammavariate(shape, 1 / shape) for _ in range(spec.num_requests))
    asks = [_ask(spec, draw, number, arrival) for number, arrival in enumerate(accumulate(gaps))]
    used = {number for ask in asks for number in ask.documents}
    lengths = {number: _length(spec, number) for number in sorted(used)}
    return Trace(spec, lengths, tuple(asks))


def _ask(spec: Spec, draw: random.Random, number: int, arrival_s: float) -> Ask:
    if spec.kind == "turns":
        conversation, turn = divmod(number, TURNS_OF_A_CONVERSATION)
        return Ask(arrival_s, (), number, conversation, turn)
    if spec.kind == "unique":
        first = number * spec.documents_each
        return Ask(arrival_s, tuple(range(first, first + spec.documents_each)), number)
    if spec.kind == "ordered":
        return Ask(arrival_s, tuple(range(spec.documents_each)), number)
    exponent = 0.0 if spec.kind == "thrash" else spec.zipf
    return Ask(arrival_s, _by_zipf(draw, spec.num_documents, spec.documents_each, exponent), number)


def _by_zipf(draw: random.Random, num_documents: int, count: int, exponent: float) -> tuple[int, ...]:
    """Distinct documents; the order they were drawn in puts no document at a fixed place."""
    weights = _cumulated(num_documents, exponent)
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen.update(dict.fromkeys(draw.choices(range(num_documents), cum_weights=weights, k=count - len(chosen))))
    order = list(chosen)
    draw.shuffle(order)
    return tuple(order)


@cache
def _cumulated(num_documents: int, exponent: float) -> list[float]:
    return list(accumulate(rank**-exponent for rank in range(1, num_documents + 1)))


def _length(spec: Spec, number: int) -> int:
    """Lognormal, with the given mean; at least what is ever cached."""
    draw = random.Random(f"{spec.seed}|length|{number}")
    drawn: float = draw.lognormvariate(-(spec.spread**2) / 2, spec.spread)
    return max(40, round(spec.mean_tokens * drawn))


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """A body and when it is sent, in seconds after the first."""

    arrival_s: float
    body: Mapping[str, Any]


def write(trace: Trace, path: Path) -> None:
    """JSONL, one body a line.

    Raises:
        InputError: the file cannot be written.
    """
    lines = [json.dumps({"arrival_s": round(ask.arrival_s, 4), **trace.body(ask)}) for ask in trace.asks]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name another file.") from error


def read(path: Path) -> list[Timed]:
    """The bodies of a trace, by arrival.

    Raises:
        InputError: the file cannot be read, or a line is no body with ``arrival_s`` and ``messages`` or ``prompt``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path} cannot be read ({reason}); pass a trace of JSON lines.") from error
    found = [_timed(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{path} holds no request; write one JSON object a line.")
    return sorted(found, key=lambda timed: timed.arrival_s)


def _timed(path: Path, number: int, line: str) -> Timed:
    try:
        body = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}, line {number} is no JSON ({error}); write one object a line.") from error
    if not isinstance(body, dict) or not ({"messages", "prompt"} & body.keys()):
        raise InputError(f"{path}, line {number} has no messages and no prompt; write OpenAI request bodies.")
    arrival = body.pop("arrival_s", None)
    if not isinstance(arrival, (int, float)) or isinstance(arrival, bool) or arrival < 0:
        raise InputError(f"{path}, line {number} has arrival_s {arrival!r}; give seconds after the first request.")
    return Timed(float(arrival), body)


def at_rate(timed: Sequence[Timed], qps: float | None) -> list[Timed]:
    """The same bursts at another mean rate; as they are where none is asked for."""
    if qps is None or len(timed) < 2:
        return list(timed)
    first, span = timed[0].arrival_s, timed[-1].arrival_s - timed[0].arrival_s
    factor = (len(timed) - 1) / qps / span if span > 0 else 0.0
    return [replace(one, arrival_s=(one.arrival_s - first) * factor) for one in timed]


def parts(body: Mapping[str, Any]) -> list[str]:
    """The texts of a body in order: content parts apart, as an engine for segments sees them."""
    if "prompt" in body:
        prompt = body["prompt"]
        return [str(text) for text in prompt] if isinstance(prompt, list) else [str(prompt)]
    found: list[str] = []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        else:
            found += [str(part.get("text", "")) for part in content or () if isinstance(part, Mapping)]
    return [text for text in found if text]


def encoded(tokenizer: Tokenizer, body: Mapping[str, Any]) -> Sequence[Piece]:
    """A body's prompt as the engine would get it."""
    return tokenizer.encode(body["messages"] if "messages" in body else "\n\n".join(parts(body)))

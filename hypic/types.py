"""Values that cross the public surface: frozen, plain, and free of torch.

``Prompt`` and ``Segment`` describe what is asked, ``SamplingParams`` and ``Policy`` how, and
``Completion`` with its ``CacheReport`` what came back. Words follow the README's glossary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from hypic.errors import ConfigError, PromptError
from hypic.policy import Compose as Compose
from hypic.policy import Policy as Policy
from hypic.policy import Reuse as Reuse
from hypic.policy import check_count, check_flag, is_listed, one_of, settle

Kind = Literal["document", "system", "skill", "memory", "tool", "turn"]
Outcome = Literal["hit", "encoded", "live"]
FinishReason = Literal["stop", "length", "abort"]
Message = Mapping[str, Any]
# Of log probabilities beside each token; a server's clients may ask for as many.
MOST_LOGPROBS = 100


def _check_label(label: str, value: object) -> None:
    """A label is text that can be written down, or nothing."""
    is_text = isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    if value is not None and not is_text:
        raise ConfigError(f"{label} is {value!r}; use Unicode text or None.")


@dataclass(frozen=True)
class Segment:
    """A piece of prompt text, cached by its content unless ``cache`` says otherwise.

    ``name`` and ``source`` are labels for reports and ``LLM.forget``; they never enter the
    identity of a cached entry. ``namespace`` does: entries are not shared across namespaces.
    ``cache=None`` lets kind and position decide, ``True`` forces a segment, ``False`` live text.
    ``ttl_s`` are the seconds after which what is cached of the text is forgotten. ``seam`` is a width
    of its own, in place of the policy's; it is part of the entry's identity.

    Raises:
        ConfigError: ``kind`` is none of ``Kind``, ``cache`` neither a ``bool`` nor ``None``, ``ttl_s`` no positive
            number, or ``seam`` no number of tokens.
        PromptError: ``text`` is not a ``str``.
    """

    text: str
    kind: Kind = "document"
    name: str | None = None
    source: str | None = None
    namespace: str | None = None
    cache: bool | None = None
    ttl_s: float | None = None
    seam: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PromptError(
                f"a segment's text is {type(self.text).__name__}, not str; decode it before passing it on."
            )
        settle(self)
        one_of("a segment's kind", self.kind, get_args(Kind))
        for label in ("name", "source", "namespace"):
            _check_label(f"a segment's {label}", getattr(self, label))
        check_count("a segment's seam", self.seam)
        if self.cache is not None:
            check_flag("a segment's cache", self.cache)
        ttl = self.ttl_s
        if ttl is not None and not (isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl < 2**53):
            raise ConfigError(f"a segment's ttl_s is {ttl!r}; pass seconds above 0, or None to keep it.")


@dataclass(frozen=True)
class Prompt:
    """Segments followed by live text: one system message (kind ``system``) and one user message.

    ``glue`` is the live text between the pieces of a message, left out beside white space that was
    taken off a segment. ``template=False`` skips the chat template (base models). ``namespace`` is that
    of the tail: what follows from it is continued within that namespace only. A segment has its own.

    Raises:
        PromptError: ``segments`` is no list of ``Segment``, or ``tail`` or ``glue`` no ``str``.
        ConfigError: ``template`` is no ``bool``, or ``namespace`` no text.
    """

    segments: Sequence[Segment] = ()
    tail: str = ""
    glue: str = "\n\n"
    template: bool = True
    namespace: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.segments, (str, Segment)):
            raise PromptError("segments must be a list of Segment; wrap a single one in a list.")
        if not isinstance(self.segments, Iterable):
            raise PromptError(f"segments is {self.segments!r:.60}; it must be a list of Segment.")
        object.__setattr__(self, "segments", tuple(self.segments))
        for segment in self.segments:
            if not isinstance(segment, Segment):
                raise PromptError(f"segments holds a {type(segment).__name__}; wrap each text as Segment(text).")
        if not isinstance(self.tail, str):
            raise PromptError(f"the tail is {type(self.tail).__name__}, not str; pass the question as text.")
        if not isinstance(self.glue, str):
            raise PromptError(f"the glue is {type(self.glue).__name__}, not str; pass the text between two pieces.")
        settle(self)
        check_flag("template", self.template)
        _check_label("a prompt's namespace", self.namespace)


PromptLike = Prompt | str | Sequence[Message]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. ``None`` means: as the checkpoint's ``generation_config.json`` says.

    Without either, decoding is greedy (``temperature`` 0). Any temperature from 0 up and below 2**63 is taken;
    OpenAI's own service ends at 2, but ``min_p`` makes sense of more (arXiv 2407.01082). ``top_k=0`` and ``top_p=1``
    switch their filters off. ``seed`` may be negative. ``stop`` strings end the text before themselves. ``logprobs=n``
    returns the chosen token's log probability and those of the ``n`` likeliest tokens, at most 100, here and over a
    server.

    Raises:
        ConfigError: a value lies outside its range.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        settle(self)
        if self.stop is not None and not isinstance(self.stop, str) and not is_listed(self.stop):
            raise ConfigError(f"stop is {self.stop!r:.60}; pass a text, or a list of texts.")
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        check_flag("ignore_eos", self.ignore_eos)
        if any(not isinstance(s, str) or not s for s in stop):
            raise ConfigError(f"stop is {self.stop!r}; every stop string needs at least one character.")
        for name in ("max_tokens", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is None; leave it out or pass a number.")
        self._range("max_tokens", self.max_tokens, 1, None, integer=True)
        self._range("temperature", self.temperature, 0.0, None)
        self._range("top_p", self.top_p, 0.0, 1.0, above=True)
        self._range("top_k", self.top_k, 0, None, integer=True)
        self._range("min_p", self.min_p, 0.0, 1.0)
        self._range("repetition_penalty", self.repetition_penalty, 0.0, None, above=True)
        self._range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._range("logprobs", self.logprobs, 0, MOST_LOGPROBS, integer=True)
        self._range("seed", self.seed, -(2**63), 2**63 - 1, integer=True)

    @staticmethod
    def _range(
        name: str, value: Any, low: float, high: float | None, *, above: bool = False, integer: bool = False
    ) -> None:
        if value is None:
            return
        right_type = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
        fits = right_type and (value > low if above else value >= low) and (value <= high if high else value < 2**63)
        if not fits:
            bounds = f"{'above' if above else 'at least'} {low}"
            bounds += " and below 2**63" if high is None else f" and at most {high}"
            kind = "a whole number " if integer else "" if right_type else "a number "
            raise ConfigError(f"{name} is {value!r}; it must be {kind}{bounds}.")


@dataclass(frozen=True)
class SegmentReport:
    """What happened to one segment of a prompt; ``reason`` is empty for a hit. ``seam`` are the tokens at its head that
    were run in context although it is cached, 0 where it is run live."""

    kind: str
    name: str | None
    source: str | None
    outcome: Outcome
    num_tokens: int
    num_bytes: int = 0
    tier: str | None = None
    reason: str = ""
    seam: int = 0

    def num_cached(self, policy: Policy) -> int:
        """Its tokens that are not run when it is cached, under the report's policy."""
        return 0 if self.outcome == "live" else policy.num_cached(self.num_tokens, self.seam)


@dataclass(frozen=True)
class CacheReport:
    """What the cache saved for one request.

    ``computed_tokens`` is counted where tokens enter the model: the request's rows plus the cold
    segments encoded on its behalf. ``reused_tokens`` are prompt tokens that were not run for it.
    ``times_s`` holds seconds by phase: ``tokenize``, ``queue``, ``ttft``, ``total``.
    """

    segments: tuple[SegmentReport, ...] = ()
    prompt_tokens: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    times_s: Mapping[str, float] = field(default_factory=dict)
    policy: Policy = Policy()
    fingerprint: str = ""
    version: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_hits(self) -> int:
        return sum(s.outcome == "hit" for s in self.segments)


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; ``cached_tokens`` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    created_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a chosen token and of the likeliest alternatives (natural logarithm)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """A piece of an answer, or a whole one.

    In a stream ``text`` and ``token_ids`` are what is new; only the last piece carries
    ``finish_reason``, ``usage`` and ``report``. ``LLM.generate`` returns one joined piece.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    usage: Usage | None = None
    report: CacheReport | None = None

    @staticmethod
    def join(pieces: Sequence[Completion]) -> Completion:
        """The whole answer from all pieces of one stream."""
        last = pieces[-1] if pieces else Completion()
        return replace(
            last,
            text="".join(p.text for p in pieces),
            reasoning="".join(p.reasoning for p in pieces),
            token_ids=tuple(i for p in pieces for i in p.token_ids),
            logprobs=tuple(x for p in pieces for x in p.logprobs),
        )


@runtime_checkable
class TextEngine(Protocol):
    """All that a framework integration needs: ``hypic.LLM`` and scripted test doubles satisfy it."""

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Completion]: ...

    def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Completion]: ...

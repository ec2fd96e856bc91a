"""``RemoteEngine``: the engine of a server, as ``hypic.types.TextEngine``.

Prompts with all their hints go out; pieces with token ids, usage and report come back. Known texts are looked for on
this side, in ``registry``, as with an engine in this process. Closing a stream closes its connection, which makes the
server drop the request. Reasoning comes apart from text, because only the server knows its template; tool calls stay in
the text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from hypic.arguments import check_callable, check_template_inputs, listed_segments
from hypic.errors import ConfigError, UnsupportedModel
from hypic.integrations.remote.connection import Connection
from hypic.integrations.remote.wire import Answer, entry_of, forgotten_of, policy_fields, report_of, request
from hypic.kept import CachedEntry, Forgotten, check_labels, check_meant
from hypic.registry import Registry
from hypic.tool_calls import described
from hypic.types import CacheReport, Completion, Policy, PromptLike, SamplingParams, Segment

_SEGMENTS = "/hypic/segments"
_WARM_AT_ONCE = 32


class RemoteEngine:
    """The engine of a server at ``base_url``, with or without ``/v1`` at its end. Nothing is sent when it is made.

    ``model`` is what the server calls its model; by default whichever it serves. ``namespace`` is where the server
    keeps this engine's segments. ``timeout_s`` bounds the silence of the server, which says something every few
    seconds while it works. A server that cannot be reached or is full is asked again ``max_retries`` times, as long as
    nothing has come back. A policy replaces the server's own, but that ``primed=True``, ``rungs=True`` and what is
    ``None`` are left to the server. Safe to use from any number of threads and event loops.

    Raises:
        ConfigError: the address is no HTTP address, or another argument cannot be right.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        namespace: str | None = None,
        timeout_s: float = 60.0,
        max_retries: int = 2,
    ) -> None:
        for option, given in (("model", model), ("namespace", namespace)):
            if given is not None and not isinstance(given, str):
                raise ConfigError(f"{option} is {given!r:.60}; pass text, or leave it out.")
        self.model, self.namespace = model, namespace
        self.registry = Registry()
        self._connection = Connection(base_url, api_key, timeout_s, max_retries)

    @property
    def base_url(self) -> str:
        """The server's address, with ``/v1`` at its end."""
        return self._connection.base_url

    def __repr__(self) -> str:
        return f"RemoteEngine({self.base_url!r})"

    # -- asking ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[Completion]:
        """As ``LLM.stream``; the request goes out when the first piece is asked for.

        Raises:
            PromptError, PromptTooLong, StoreFull, ConfigError, UnsupportedModel: the server refuses the request.
            WorkerLost: the server cannot be reached, is full, or broke off.
        """
        path, body = self._request(prompt, sampling, policy, tools, chat_template_kwargs)
        answer = Answer(self.base_url)
        with self._connection.lost():
            response = self._connection.send("POST", path, body)
            try:
                for line in response.iter_lines():
                    piece = answer.read(line)
                    if piece is not None:
                        yield piece
            finally:
                response.close()
        answer.check_end()

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        policy: Policy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Completion]:
        """``stream`` for event loops; cancelling closes the connection."""
        path, body = self._request(prompt, sampling, policy, tools, chat_template_kwargs)
        answer = Answer(self.base_url)
        with self._connection.lost():
            async with self._connection.async_client() as client:
                response = await self._connection.asend(client, path, body)
                try:
                    async for line in response.aiter_lines():
                        piece = answer.read(line)
                        if piece is not None:
                            yield piece
                finally:
                    await response.aclose()
        answer.check_end()

    # -- segments and tokens -----------------------------------------------------------------------------------------

    def warm(
        self,
        segments: Sequence[Segment],
        *,
        policy: Policy | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[CacheReport]:
        """Has the server encode segments and know their texts; ``progress(done, total)`` is told now and then.

        Raises:
            PromptError, ConfigError: an argument cannot be right; nothing was sent.
            PromptTooLong, StoreFull: a segment could never be cached.
        """
        check_callable("progress", progress, "of two numbers, done and total")
        segments, reports = listed_segments("warm", segments), list[CacheReport]()
        for start in range(0, len(segments), _WARM_AT_ONCE):
            some = [asdict(segment) for segment in segments[start : start + _WARM_AT_ONCE]]
            body = {"segments": some, "namespace": self.namespace, "hypic": policy_fields(policy)}
            found = self._connection.ask("POST", _SEGMENTS, body, patiently=True)
            reports += [report_of(row["report"]) for row in found["data"]]
            if progress is not None:
                progress(len(reports), len(segments))
        return reports

    def entries(self) -> list[CachedEntry]:
        """What the server has cached. Needs its admin key, where it has one."""
        return [entry_of(row) for row in self._connection.ask("GET", "/hypic/entries")["data"]]

    def pin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        """Has the server keep what is cached of the texts that match all of what is given; how many entries."""
        check_labels(source, name, namespace)
        query = _query(source, name, namespace)
        return int(self._connection.ask("PUT", f"{_SEGMENTS}/pin?{query}")["num_changed"])

    def unpin(self, *, source: str | None = None, name: str | None = None, namespace: str | None = None) -> int:
        """Lets entries be evicted again; how many."""
        check_labels(source, name, namespace)
        query = _query(source, name, namespace)
        return int(self._connection.ask("PUT", f"{_SEGMENTS}/pin?{query}&pinned=false")["num_changed"])

    def forget(
        self,
        *,
        source: str | None = None,
        name: str | None = None,
        namespace: str | None = None,
        everything: bool = False,
    ) -> Forgotten:
        """Has the server forget texts, as ``LLM.forget``. Needs the server's admin key, where it has one.

        Raises:
            ConfigError: no label is given, and not ``everything`` either; or both are.
        """
        check_meant(source, name, namespace, everything)
        query = _query(source, name, namespace)
        if not everything:
            self.registry.forget(source=source, name=name, namespace=namespace)
        else:
            self.registry.clear()
        return forgotten_of(self._connection.ask("DELETE", f"{_SEGMENTS}?{query}"))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as data."""
        return [int(i) for i in self._connection.ask("POST", "/hypic/tokenize", {"text": text})["token_ids"]]

    def count_tokens(self, text: str) -> int:
        return len(self.tokenize(text))

    # -- the server's model: asked for once, when it is first needed --------------------------------------------------

    @cached_property
    def _card(self) -> Mapping[str, Any]:
        cards = self._connection.ask("GET", "/models")["data"]
        card: Mapping[str, Any] | None = next((c for c in cards if self.model in (None, c["id"])), None)
        if card is None:
            raise UnsupportedModel(
                f"{self.base_url} serves {', '.join(c['id'] for c in cards)}, not {self.model!r}; leave model= out."
            )
        return card

    @property
    def model_name(self) -> str:
        """What the server calls its model."""
        return str(self.model or self._card["id"])

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return int(self._card["max_model_len"])

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights and configuration."""
        return str(self._card["hypic"]["fingerprint"])

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes idle connections; the next call opens new ones."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        policy: Policy | None,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[str, dict[str, Any]]:
        check_template_inputs(tools, chat_template_kwargs)
        told = described(tools) if tools else None
        path, body = request(prompt, sampling, policy, told, chat_template_kwargs, self.namespace)
        return path, body if self.model is None else {**body, "model": self.model}


def _query(source: str | None, name: str | None, namespace: str | None) -> str:
    """Labels as the server's administration takes them; none stand for everything."""
    labels = {"source": source, "name": name, "namespace": namespace}
    given = {label: text for label, text in labels.items() if text is not None}
    return urlencode(given or {"everything": "true"})
